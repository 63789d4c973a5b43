//! Handle to the control loop: inbox, published state, notices and event log.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::Path,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use tokio::sync::{
    broadcast,
    mpsc::{self, error::TrySendError},
    oneshot, watch,
};

use super::{
    bind,
    clock::MonotonicClock,
    control_loop::{Clock as _, Inbound},
    history::History,
    sequences::{kept_tokens, sequences, tokens_in_cache},
};
use cotenant_engine::EngineHandle;
use cotenant_http::backend::RunningAnswers;
use cotenant_memory::emergency::{self, Locked};
use cotenant_policy::{
    event::{Answer, ChangedKeys, Event, Origin},
    lease::{LeaseRequest, Ticket},
    shedding::{Chosen, NextShed},
    snapshot::{Snapshot, WorkerState},
};
use cotenant_probe::{
    ProbeRoot,
    cgroup::Hierarchy,
    processes::{self, leader_of},
};
use cotenant_rpc::{
    DeathLog,
    supervisor::{Bar, EventLog, Notice, SubmitError, Supervisor},
    v1,
};
use cotenant_units::{Bytes, Timestamp, lock::locked, micros};
use cotenant_worker::handle::WorkerProcess;

/// Bound of the loop's inbox. An event takes well under a millisecond, so a full inbox indicates a fault elsewhere.
const INBOX_LIMIT: usize = 1024;

/// Notices by which a hold stream may lag before it reads the snapshot instead.
const NOTICE_LIMIT: usize = 256;

/// Death certificates kept per worker: two rounds of restarts and some more, at about 8 KiB each.
const DEATHS_PER_WORKER: usize = 16;

/// The control loop as seen by APIs and adapters.
#[derive(Debug)]
pub struct ControlHandle {
    boot_id: String,
    /// Ids of earlier runs whose leases continue.
    continued: Vec<String>,
    clock: MonotonicClock,
    inbox: mpsc::Sender<Inbound>,
    tickets: AtomicU64,
    snapshot: watch::Sender<Arc<Snapshot>>,
    notices: broadcast::Sender<Notice>,
    log: EventLog,
    deaths: DeathLog,
    work: watch::Sender<BTreeMap<String, u32>>,
    /// Running answers, including those of several stages.
    answers: Arc<RunningAnswers>,
    /// Time of the loop's last iteration, in microseconds.
    beat: AtomicU64,
    /// Outcome of each request to lock memory.
    locked: Mutex<Vec<Locked>>,
    listeners: OnceLock<Vec<(&'static str, SocketAddr)>>,
    /// Confinement of each worker since its last start.
    confinement: Mutex<BTreeMap<String, Vec<String>>>,
    processes: Mutex<BTreeMap<String, WorkerProcess>>,
    engine: Mutex<Option<EngineHandle>>,
    /// First candidate of the next shed with its reason, as of the last round of measurements.
    next_shed: Mutex<String>,
    reloads: OnceLock<mpsc::Sender<ReloadCall>>,
    history: History,
}

/// Call to reload the configuration: its origin, and the receiver of its outcome.
pub(super) type ReloadCall = (Option<Origin>, oneshot::Sender<Result<ChangedKeys, String>>);

impl ControlHandle {
    /// Creates a handle, and the inbox that the loop reads. `continued` holds the ids of earlier runs whose leases
    /// continue, `event_lines` the length of the event log.
    pub fn new(
        boot_id: String,
        continued: Vec<String>,
        clock: MonotonicClock,
        event_lines: usize,
    ) -> (Arc<Self>, mpsc::Receiver<Inbound>) {
        let (inbox, receiver) = mpsc::channel(INBOX_LIMIT);
        let snapshot = watch::Sender::new(Arc::new(Snapshot::default()));
        let answers = Arc::new(RunningAnswers::new(snapshot.subscribe()));
        let control = Self {
            boot_id,
            continued,
            clock,
            inbox,
            tickets: AtomicU64::new(1),
            snapshot,
            notices: broadcast::Sender::new(NOTICE_LIMIT),
            log: EventLog::new(event_lines),
            deaths: DeathLog::new(DEATHS_PER_WORKER),
            work: watch::Sender::default(),
            answers,
            beat: AtomicU64::new(0),
            locked: Mutex::default(),
            listeners: OnceLock::new(),
            confinement: Mutex::default(),
            processes: Mutex::default(),
            engine: Mutex::default(),
            next_shed: Mutex::default(),
            reloads: OnceLock::new(),
            history: History::default(),
        };
        (Arc::new(control), receiver)
    }

    pub(super) const fn history(&self) -> &History {
        &self.history
    }

    pub(super) fn note_next_shed(&self, next: Option<&NextShed>) {
        let text = next.map(next_shed_in_words).unwrap_or_default();
        *locked(&self.next_shed) = text;
    }

    pub(super) fn note_reloader(&self, calls: mpsc::Sender<ReloadCall>) {
        // Set once per run.
        let _ = self.reloads.set(calls);
    }

    pub(super) fn note_engine(&self, handle: EngineHandle) {
        *locked(&self.engine) = Some(handle);
    }

    /// Registers a worker's process, which identifies its descendants.
    pub(super) fn note_worker(&self, worker: &str, process: WorkerProcess) {
        let mut processes = locked(&self.processes);
        processes.insert(worker.to_owned(), process);
    }

    /// Returns the processes of running workers, with the workers' names.
    fn mains(&self) -> BTreeMap<u32, String> {
        let processes = locked(&self.processes);
        let running = processes
            .iter()
            .filter_map(|(name, process)| Some((process.pid()?, name.clone())));
        running.collect()
    }

    /// Returns the reason to refuse a lease of a control group: it must exist, and neither have a process of ours nor be
    /// inside the group of a worker alone.
    fn bar_group(&self, group: &str) -> Option<Bar> {
        let root = ProbeRoot::default();
        let Some(hierarchy) = Hierarchy::open(&root) else {
            return Some(Bar::NoCgroup { mount: None });
        };
        if !hierarchy.has(group) {
            let mount = Some(hierarchy.mount_point().to_owned());
            return Some(Bar::NoCgroup { mount });
        }
        let own = hierarchy.group_of(&root, std::process::id());
        let is_inside = |inner: &str, outer: &str| Path::new(inner).starts_with(outer);
        let workers = self
            .mains()
            .into_iter()
            .map(|(pid, name)| (pid, Some(name)));
        let mut ours = std::iter::once((std::process::id(), None)).chain(workers);
        ours.find_map(|(runs_as, worker)| {
            let of_process = hierarchy.group_of(&root, runs_as)?;
            let is_separate = own.as_ref().is_some_and(|own| !is_inside(own, &of_process));
            let is_ours =
                is_inside(&of_process, group) || (is_separate && is_inside(group, &of_process));
            is_ours.then_some(Bar::OurCgroup { worker, runs_as })
        })
    }

    pub(super) fn note_confinement(&self, worker: &str, lines: Vec<String>) {
        let mut notes = locked(&self.confinement);
        notes.insert(worker.to_owned(), lines);
    }

    /// Records the configured addresses, for the status.
    pub(super) fn note_listeners(&self, listeners: Vec<(&'static str, SocketAddr)>) {
        let _ = self.listeners.set(listeners);
    }

    pub(super) fn note_locked(&self, found: Locked) {
        if found.is_locked() {
            tracing::info!("{found}");
        } else {
            tracing::warn!("{found}");
        }
        let mut all = locked(&self.locked);
        all.push(found);
    }

    /// Publishes a new state.
    pub fn publish(&self, snapshot: Arc<Snapshot>) {
        self.snapshot.send_replace(snapshot);
    }

    /// Sends a notice to the hold streams.
    pub fn notify(&self, notice: Notice) {
        let _ = self.notices.send(notice);
    }

    /// Returns the state after the last event.
    pub fn state(&self) -> Arc<Snapshot> {
        self.snapshot.borrow().clone()
    }

    /// Returns the memory of this process without the engine's; `None` if it cannot be read.
    pub(super) fn own_use(&self) -> Option<Bytes> {
        let resident = processes::resident(&ProbeRoot::default().proc, std::process::id())?;
        let engine = locked(&self.engine);
        let touched = engine.as_ref().map_or(Bytes::ZERO, |engine| {
            let state = engine.snapshot();
            state
                .held
                .unwrap_or_default()
                .saturating_sub(state.untouched)
        });
        Some(resident.saturating_sub(touched))
    }

    /// Returns the age of the last sample; `None` before the first one.
    pub(super) fn sample_age(&self) -> Option<Duration> {
        let taken_at = self.snapshot.borrow().pressure.sample.as_ref()?.taken_at;
        Some(self.clock.now().saturating_since(taken_at))
    }

    /// Counts a request in flight at a worker, until the returned guard is dropped.
    pub(super) fn at_work(self: &Arc<Self>, worker: &str) -> AtWork {
        self.work.send_modify(|counts| {
            let count = counts.entry(worker.to_owned()).or_default();
            *count = count.saturating_add(1);
        });
        AtWork {
            control: Arc::clone(self),
            worker: worker.to_owned(),
        }
    }

    /// Returns the numbers of requests in flight at each worker, as a channel of changes. One task turns them into
    /// events: sent from several places, two events could overtake each other.
    pub(super) fn work(&self) -> watch::Receiver<BTreeMap<String, u32>> {
        self.work.subscribe()
    }

    /// Returns the running answers, including those of several stages.
    pub(super) fn answers(&self) -> &Arc<RunningAnswers> {
        &self.answers
    }

    /// Returns the number of running answers and of requests in flight at workers.
    pub(super) fn running_answers(&self) -> u32 {
        let answers = u32::try_from(self.answers.count()).unwrap_or(u32::MAX);
        let at_workers = self.work.borrow();
        at_workers
            .values()
            .fold(answers, |sum, count| sum.saturating_add(*count))
    }

    pub(super) fn beat(&self, now: Timestamp) {
        let at = micros(now.since_start());
        self.beat.store(at, Ordering::Relaxed);
    }

    /// Returns the time since the last iteration of the loop.
    pub(super) fn since_beat(&self) -> Duration {
        let beat = Duration::from_micros(self.beat.load(Ordering::Relaxed));
        self.clock.now().since_start().saturating_sub(beat)
    }

    pub(super) const fn clock(&self) -> MonotonicClock {
        self.clock
    }

    /// Sends an event of the daemon to the loop, and waits for space in the inbox: events of the engine, workers and
    /// the machine must not be lost.
    pub async fn tell(&self, event: Event) {
        let unsent = emergency::within(|| match self.inbox.try_send(event.into()) {
            Err(TrySendError::Full(inbound)) => Some(inbound),
            Ok(()) | Err(TrySendError::Closed(_)) => None,
        });
        if let Some(inbound) = unsent {
            let _ = self.inbox.send(inbound).await;
        }
    }
}

#[derive(Debug)]
pub(super) struct AtWork {
    control: Arc<ControlHandle>,
    worker: String,
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.control.work.send_modify(|counts| {
            if let Some(count) = counts.get_mut(&self.worker) {
                *count = count.saturating_sub(1);
            }
        });
    }
}

impl Supervisor for ControlHandle {
    fn boot_id(&self) -> &str {
        &self.boot_id
    }

    fn continues(&self, boot_id: &str) -> bool {
        boot_id == self.boot_id || self.continued.iter().any(|known| known == boot_id)
    }

    fn now(&self) -> (Timestamp, SystemTime) {
        self.clock.both()
    }

    fn ticket(&self) -> Ticket {
        Ticket(self.tickets.fetch_add(1, Ordering::Relaxed))
    }

    fn submit(
        &self,
        event: Event,
        caller: Option<(Ticket, oneshot::Sender<Answer>)>,
    ) -> Result<(), SubmitError> {
        self.inbox
            .try_send(Inbound { event, caller })
            .map_err(|error| match error {
                TrySendError::Full(_) => SubmitError::Full,
                TrySendError::Closed(_) => SubmitError::Stopped,
            })
    }

    fn reload(
        &self,
        by: Option<Origin>,
    ) -> Result<oneshot::Receiver<Result<ChangedKeys, String>>, SubmitError> {
        let (call, outcome) = oneshot::channel();
        let calls = self.reloads.get().ok_or(SubmitError::Stopped)?;
        calls.try_send((by, call)).map_err(|error| match error {
            TrySendError::Full(_) => SubmitError::Full,
            TrySendError::Closed(_) => SubmitError::Stopped,
        })?;
        Ok(outcome)
    }

    fn snapshot(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshot.subscribe()
    }

    fn notices(&self) -> broadcast::Receiver<Notice> {
        self.notices.subscribe()
    }

    fn events(&self) -> &EventLog {
        &self.log
    }

    fn deaths(&self) -> &DeathLog {
        &self.deaths
    }

    fn bar(&self, request: &LeaseRequest) -> Option<Bar> {
        if let Some(bar) = request
            .cgroup
            .as_ref()
            .and_then(|group| self.bar_group(group))
        {
            return Some(bar);
        }
        let (tenant, pid) = (&request.tenant, request.holder_pid());
        let state = self.state();
        let mains = self.mains();
        let ids: BTreeSet<u32> = mains.keys().copied().collect();
        let main = pid.filter(|_| !ids.is_empty());
        let main = main.and_then(|pid| leader_of(&ProbeRoot::default().proc, &ids, pid));
        let of = main.and_then(|main| mains.get(&main)).map(String::as_str);
        let Some(worker) = state.workers.iter().find(|worker| worker.name == *tenant) else {
            return main.zip(of).map(|(runs_as, worker)| Bar::OfWorker {
                worker: worker.to_owned(),
                runs_as,
            });
        };
        let runs_as = mains
            .iter()
            .find(|(_, name)| *name == tenant)
            .map(|(pid, _)| *pid);
        let is_it = match runs_as {
            Some(_) => of == Some(tenant.as_str()),
            // The worker is starting: its process, a descendant of ours, may send a request before it is registered
            // here.
            None if worker.state == WorkerState::Starting => {
                of.is_none() && pid.is_some_and(is_descendant)
            }
            // The arbiter decides.
            None => true,
        };
        (!is_it).then_some(Bar::NotTheWorker { runs_as })
    }

    fn complete(&self, status: &mut v1::GetStatusResponse) {
        let all = locked(&self.locked).clone();
        status.locked = all
            .iter()
            .chain(&emergency::stacks())
            .map(ToString::to_string)
            .collect();
        let absent = self
            .listeners
            .get()
            .into_iter()
            .flatten()
            .filter(|(_, address)| !bind::is_here(address.ip()));
        status.absent_addresses = absent
            .map(|(key, address)| format!("{key}: {address}"))
            .collect();
        status.next_shed = locked(&self.next_shed).clone();
        status.running_answers = Some(self.running_answers());
        let counts = emergency::counts();
        (status.standby_served, status.standby_missed) = (counts.served, counts.missed);
        let handle = locked(&self.engine).clone();
        if let (Some(engine), Some(handle)) = (&mut status.engine, &handle) {
            let gap = Some(handle.snapshot().command_gap_max).filter(|gap| !gap.is_zero());
            engine.command_gap_max = gap.and_then(|gap| gap.try_into().ok());
            engine.experts = handle.snapshot().experts.map(|experts| v1::Experts {
                total: experts.total as u64,
                resident: experts.resident as u64,
                found: experts.found,
                read: experts.read,
            });
            engine.sequences = sequences(handle);
            // Taken at the same time as the sequences: the arbiter's figures are those of the last event.
            (engine.kv_used_tokens, engine.kv_kept_tokens) =
                tokens_in_cache(&engine.sequences, kept_tokens(&handle.snapshot()));
            let (read, whole) = handle.loading().unwrap_or_default();
            (engine.load_read_bytes, engine.load_bytes) = (read.get(), whole.get());
        }
        let confinement = locked(&self.confinement);
        for worker in &mut status.workers {
            worker.confinement = confinement.get(&worker.name).cloned().unwrap_or_default();
        }
    }
}

/// Returns whether a process descends from this one.
fn is_descendant(pid: u32) -> bool {
    let own = std::process::id();
    pid != own && leader_of(&ProbeRoot::default().proc, &BTreeSet::from([own]), pid).is_some()
}

/// Describes the first candidate of the next shed, and the headroom that triggers it.
fn next_shed_in_words(next: &NextShed) -> String {
    let (below, now) = (next.below, next.headroom);
    let when = format!("with headroom below {below} (now {now})");
    if next.chosen.is_empty() {
        return format!("nothing to shed, {when}");
    }
    let given = |Chosen { source, bytes }: &Chosen| format!("{source} ({bytes})");
    let given: Vec<String> = next.chosen.iter().map(given).collect();
    format!("{}: cheapest for {}, {when}", given.join(", "), next.need)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cotenant_policy::shedding::Source;
    use cotenant_units::Bytes;

    #[test]
    fn what_is_shed_next_is_one_line() {
        let source = Source::UnusedKv;
        let bytes = Bytes::from_mib(20);
        let mut next = NextShed {
            chosen: vec![Chosen { source, bytes }],
            need: bytes,
            below: Bytes::from_mib(52),
            headroom: Bytes::from_mib(268),
        };
        assert_eq!(
            next_shed_in_words(&next),
            "unused KV blocks (20 MiB): cheapest for 20 MiB, with headroom below 52 MiB (now 268 MiB)"
        );
        next.chosen.clear();
        assert_eq!(
            next_shed_in_words(&next),
            "nothing to shed, with headroom below 52 MiB (now 268 MiB)"
        );
    }
}
