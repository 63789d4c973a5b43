//! Handle of one supervised worker.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::sync::{mpsc, oneshot, watch};

pub use super::shared::{StartError, WorkerState};
use super::{
    adopt::Survivor,
    autopsy,
    confine::{Groups, Measure},
    orphans::Known,
    pressure::Tap,
    report::{ExitReport, Intent, MemoryReading, WorkerEvent, WorkerEventKind},
    shared::{Command, Shared, Status, family},
    spec::WorkerSpec,
    supervise::Supervisor,
};
use cotenant_probe::{
    ProbeRoot,
    cgroup::Cgroup,
    nvmap::Nvmap,
    processes::{self, ProcessStat},
};
use cotenant_speech::client::{ClientError, ClientTimeouts, Endpoint, WyomingClient};
use cotenant_threads::blocking;

/// Handle of a worker, running or not.
///
/// Each worker has a task that owns the process; the methods send requests to that task. When the last handle is
/// dropped, or the runtime ends, the worker is killed with its group. It is never restarted here. A worker whose
/// specification names a [successor](WorkerSpec::successor) continues if the supervisor is killed, and is
/// [adopted](Self::adopt) by the next one.
#[derive(Clone, Debug)]
pub struct WorkerHandle {
    shared: Arc<Shared>,
    commands: mpsc::Sender<Command>,
    status: watch::Receiver<Status>,
    events: mpsc::Sender<WorkerEvent>,
}

/// Observer of a worker's current process.
#[derive(Clone, Debug)]
pub struct WorkerProcess(watch::Receiver<Status>);

impl WorkerProcess {
    /// Returns its process id if there is a process, ready or not.
    pub fn pid(&self) -> Option<u32> {
        self.0.borrow().state.pid()
    }
}

impl WorkerHandle {
    /// Creates a stopped worker; each start has its own control group if `groups` supports them. Needs a tokio runtime.
    ///
    /// If `events` is full, this worker's task blocks, except for measurements, whose events are dropped.
    pub fn new(
        spec: WorkerSpec,
        roots: ProbeRoot,
        groups: Groups,
        events: mpsc::Sender<WorkerEvent>,
    ) -> Self {
        let shared = Arc::new(Shared::new(spec, roots, groups));
        let (commands, inbox) = mpsc::channel(COMMANDS_QUEUED);
        let (publish, status) = watch::channel(Status::default());
        let supervisor = Supervisor::new(Arc::clone(&shared), inbox, publish, events.clone());
        tokio::spawn(supervisor.run());
        Self {
            shared,
            commands,
            status,
            events,
        }
    }

    /// Starts it in the given variant, or in the first of its specification; returns the process id once the program is
    /// executed.
    ///
    /// # Errors
    /// If it already runs, or its program cannot be executed; the latter also as an event.
    pub async fn start(&self, variant: Option<&str>) -> Result<u32, StartError> {
        if self.state() == WorkerState::Stopped {
            self.shared.renew();
        }
        let spec = self.shared.spec();
        let variants = &spec.memory.variants;
        let variant = match variant {
            Some(name)
                if !variants.is_empty() && !variants.iter().any(|known| known.name == name) =>
            {
                return Err(StartError::Variant {
                    worker: self.name().to_owned(),
                    variant: name.to_owned(),
                });
            }
            Some(name) => Some(name.to_owned()),
            None => variants.first().map(|first| first.name.clone()),
        };
        let started = self.ask(|reply| Command::Start { variant, reply }).await;
        started.unwrap_or(Err(StartError::Gone))
    }

    /// Takes over a worker started by an earlier supervisor. It counts as ready when it shows so again; if its sign
    /// appears only once, and was seen before, at once.
    ///
    /// # Errors
    /// If it already runs, has ended meanwhile, or its output cannot be read.
    pub async fn adopt(&self, survivor: Survivor) -> Result<u32, StartError> {
        let survivor = Box::new(survivor);
        let adopted = self.ask(|reply| Command::Adopt { survivor, reply }).await;
        adopted.unwrap_or(Err(StartError::Gone))
    }

    /// Ends it and waits: SIGTERM to its group, then SIGKILL after `grace`, or after the grace of its specification;
    /// immediately if that is zero. `why` appears in its death certificate. `None` if it was not running.
    pub async fn stop_because(&self, grace: Option<Duration>, why: &str) -> Option<ExitReport> {
        let grace = grace.unwrap_or(self.shared.spec().stop_grace);
        self.end(Intent::Stop, grace, why).await
    }

    /// Ends an unresponsive worker: SIGABRT to its group, so that it can leave a trace, then SIGKILL after the grace of
    /// its specification. `None` if it was not running.
    pub async fn end_hung(&self, why: &str) -> Option<ExitReport> {
        self.end(Intent::Hung, self.shared.spec().stop_grace, why)
            .await
    }

    /// Measures its memory, and sends the result also as an event. `None` if it is not running or cannot be read.
    pub async fn measure(&self) -> Option<MemoryReading> {
        let Status { start, state, .. } = self.status.borrow().clone();
        let pid = state.pid()?;
        let roots = self.shared.roots.clone();
        let (reading, family, available) = blocking(move || {
            let available = autopsy::available(&roots.proc);
            measure(&roots, pid).map(|(reading, family)| (reading, family, available))
        })
        .await
        .ok()??;
        // The process may have ended meanwhile, and its id may have been reused.
        if self.status.borrow().start != start || self.status.borrow().state.pid() != Some(pid) {
            return None;
        }
        *self.shared.family() = family;
        self.shared.history().push(reading.used(), available);
        let _ = self.events.try_send(WorkerEvent {
            worker: Arc::clone(&self.shared.name),
            start,
            kind: WorkerEventKind::Measured(reading),
        });
        Some(reading)
    }

    /// Switches it to another variant, and measures it before and after.
    ///
    /// # Errors
    /// If it is not ready, has no such variant, or fails to switch.
    pub async fn resize(&self, variant: &str) -> Result<ResizeReport, ResizeError> {
        let name = || self.name().to_owned();
        if !self
            .shared
            .spec()
            .memory
            .variants
            .iter()
            .any(|known| known.name == variant)
        {
            return Err(ResizeError::Variant {
                worker: name(),
                variant: variant.to_owned(),
            });
        }
        let Status {
            state,
            endpoint,
            start,
            ..
        } = self.status.borrow().clone();
        let (WorkerState::Ready { .. }, Some(endpoint)) = (state, endpoint) else {
            return Err(ResizeError::NotReady { worker: name() });
        };
        let client = WyomingClient::new(endpoint, ClientTimeouts::default());
        let answered = client
            .resize(variant)
            .await
            .map_err(|source| ResizeError::Switch {
                worker: name(),
                variant: variant.to_owned(),
                source,
            })?;
        let switched = |reply| Command::Switched {
            start,
            variant: answered.variant.clone(),
            reply,
        };
        // If its task is gone, the result is not needed.
        let _ = self.ask(switched).await;
        Ok(ResizeReport {
            variant: answered.variant,
            after: self.measure().await,
        })
    }

    /// Notifies it of memory pressure. Returns the number of notified processes: 0 if it is not running, or no process
    /// has connected to its socket.
    pub fn tell_memory_is_short(&self) -> usize {
        self.shared.tap().as_ref().map_or(0, Tap::tell)
    }

    /// Waits until it is ready; `false` if it stops before.
    pub async fn ready(&self) -> bool {
        let mut status = self.status.clone();
        let settled = |status: &Status| {
            matches!(
                status.state,
                WorkerState::Ready { .. } | WorkerState::Stopped
            )
        };
        let state = status.wait_for(settled).await.map(|status| status.state);
        matches!(state, Ok(WorkerState::Ready { .. }))
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Returns its specification as of the last start.
    pub fn spec(&self) -> Arc<WorkerSpec> {
        self.shared.spec()
    }

    /// Changes its specification from the next start on, except for its name.
    pub fn change(&self, spec: WorkerSpec) {
        *self.shared.next_spec() = Some(Arc::new(spec));
    }

    /// Returns its state.
    pub fn state(&self) -> WorkerState {
        self.status.borrow().state
    }

    /// Returns an observer of its process, which does not keep it running.
    pub fn process(&self) -> WorkerProcess {
        WorkerProcess(self.status.clone())
    }

    /// Returns its address while it runs.
    pub fn endpoint(&self) -> Option<Endpoint> {
        self.status.borrow().endpoint.clone()
    }

    /// Returns the variant in which it was started, or to which it last switched.
    pub fn variant(&self) -> Option<String> {
        self.status.borrow().variant.clone()
    }

    /// Returns the measures of its last start, applied or not.
    pub fn measures(&self) -> Vec<Measure> {
        self.shared.measures().clone()
    }

    /// Returns how often it was started.
    pub fn starts(&self) -> u64 {
        self.status.borrow().start
    }

    async fn end(&self, intent: Intent, grace: Duration, why: &str) -> Option<ExitReport> {
        let why = why.to_owned();
        let end = |reply| Command::End {
            intent,
            grace,
            why,
            reply,
        };
        self.ask(end).await?
    }

    /// Sends a request to its task; `None` if that task is gone.
    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.ok()?;
        answer.await.ok()
    }
}

/// Result of a switch.
#[derive(Clone, Debug)]
pub struct ResizeReport {
    /// Its present variant.
    pub variant: String,
    /// Memory measured afterwards.
    pub after: Option<MemoryReading>,
}

/// Measures the family of `leader`; `None` if the leader is gone or invisible, which differs from zero.
fn measure(roots: &ProbeRoot, leader: u32) -> Option<(MemoryReading, BTreeSet<Known>)> {
    let proc = &roots.proc;
    if ProcessStat::read(proc, leader)?.is_dead() {
        return None;
    }
    let family = family(proc, leader)?;
    let sum = processes::sum(proc, family.iter().map(|(pid, _)| *pid));
    let group =
        Cgroup::of(roots, leader).filter(|group| Some(group) != Cgroup::own(roots).as_ref());
    let cgroup = group.and_then(|group| group.memory().used);
    let gpu = Nvmap::find(roots)
        .and_then(|nvmap| nvmap.clients()?.of_all(family.iter().map(|(pid, _)| *pid)));
    (sum.processes > 0).then_some((MemoryReading { sum, cgroup, gpu }, family))
}

/// Reason why a worker was not switched.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// It is not ready, or its protocol has no switch.
    #[error("cannot switch worker `{worker}`: it is not ready")]
    NotReady {
        /// Its name.
        worker: String,
    },
    /// Its specification does not list this variant.
    #[error("worker `{worker}` has no variant `{variant}`")]
    Variant {
        /// Its name.
        worker: String,
        /// The variant.
        variant: String,
    },
    /// The switch failed.
    #[error("cannot switch worker `{worker}` to `{variant}`")]
    Switch {
        /// Its name.
        worker: String,
        /// The variant.
        variant: String,
        /// Its error.
        source: ClientError,
    },
}

/// Bound of the queue of requests to a worker's task.
const COMMANDS_QUEUED: usize = 8;
