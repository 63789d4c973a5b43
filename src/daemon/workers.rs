//! Adapter between configured workers, their handles and the arbiter.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{runtime::Handle, sync::mpsc};

use super::{
    control_handle::ControlHandle, handoff::successor_of, hang_detector::HangDetector, parts::Parts,
};
use cotenant_config::{Config, PressureWatch, WorkerConfig, WorkerProtocol, WorkerRole};
use cotenant_policy::{
    book::AdoptedWorker,
    death::{DeathCertificate, DeathClass, LeaseAtDeath},
    event::{Event, WorkerResized},
    lease::LeaseKind,
    snapshot::Snapshot,
};
use cotenant_probe::ProbeRoot;
use cotenant_rpc::supervisor::Supervisor as _;
use cotenant_units::{causes::in_one_line, lock::locked};
use cotenant_worker::{
    adopt::Survivor,
    confine::Groups,
    handle::{StartError, WorkerHandle},
    report::{ExitReport, ExitStatus, FailureReason, Intent, WorkerEvent, WorkerEventKind},
    spec::{self, PressureKind, WorkerSpec},
};

/// Bound of the queue of reports to the loop; a worker's task blocks if it is full.
const REPORT_LIMIT: usize = 256;

/// Bound of the queue of starts and stops of one worker; more than a few only if it does not end.
const ORDERS_LIMIT: usize = 16;

pub(super) struct Workers {
    handles: BTreeMap<String, WorkerHandle>,
    orders: BTreeMap<String, mpsc::Sender<Order>>,
    roles: BTreeMap<String, (WorkerRole, Way)>,
    ends: Ends,
    place: String,
    groups: Groups,
    control: Arc<ControlHandle>,
    /// Runtime for slow work; the loop has its own.
    runtime: Handle,
}

/// Worker with a role, and its connection parameters.
#[derive(Clone, Debug)]
pub(super) struct Speaker {
    pub(super) handle: WorkerHandle,
    pub(super) way: Way,
    pub(super) hangs: HangDetector,
}

/// Connection parameters of a worker.
#[derive(Clone, Debug)]
pub(super) struct Way {
    pub(super) protocol: WorkerProtocol,
    pub(super) model: String,
    /// Time for which a request waits for it to start.
    pub(super) wake_timeout: Duration,
    /// Time for which a request waits for its answer.
    pub(super) answer_timeout: Duration,
}

enum Order {
    Start { variant: Option<String> },
    Stop { reason: String },
}

/// Last end of each worker, as one of a few words.
type Ends = Arc<Mutex<BTreeMap<String, &'static str>>>;

impl Workers {
    /// Creates the workers of `config`, without starting any.
    pub(super) fn new(config: &Config, control: &Arc<ControlHandle>, parts: &Parts) -> Self {
        let (sender, receiver) = mpsc::channel(REPORT_LIMIT);
        let ends = Ends::default();
        let successor = successor_of(config);
        let roots = ProbeRoot::default();
        let groups = if config.workers.is_empty() {
            Groups::none("there are no workers")
        } else {
            Groups::open(&roots)
        };
        let mut workers = Self {
            handles: BTreeMap::new(),
            orders: BTreeMap::new(),
            roles: BTreeMap::new(),
            ends: Arc::clone(&ends),
            place: successor.place.clone(),
            groups: groups.clone(),
            control: Arc::clone(control),
            runtime: Handle::current(),
        };
        match groups.describe() {
            Ok(place) => tracing::info!(place, "each worker has a control group of its own"),
            Err(reason) => tracing::info!(reason, "workers have no control groups of their own"),
        }
        for worker in &config.workers {
            let name = worker.name.clone();
            let spec = supervised(worker, config);
            let handle = WorkerHandle::new(spec, roots.clone(), groups.clone(), sender.clone());
            let (orders, waiting) = mpsc::channel(ORDERS_LIMIT);
            control.note_worker(&name, handle.process());
            parts.spawn(
                "a worker's orders",
                obey(waiting, handle.clone(), Arc::clone(control)),
            );
            workers.handles.insert(name.clone(), handle);
            workers.orders.insert(name.clone(), orders);
            let way = Way {
                protocol: worker.protocol,
                model: worker.model.clone(),
                wake_timeout: worker.wake_timeout,
                answer_timeout: worker.answer_timeout,
            };
            workers.roles.insert(name, (worker.role, way));
        }
        parts.spawn(
            "the bridge to the workers",
            forward(receiver, Arc::clone(control), ends),
        );
        workers
    }

    pub(super) fn handles(&self) -> BTreeMap<String, WorkerHandle> {
        self.handles.clone()
    }

    pub(super) fn specs(&self) -> Vec<WorkerSpec> {
        self.handles
            .values()
            .map(|worker| WorkerSpec::clone(&worker.spec()))
            .collect()
    }

    /// Returns the place that identifies their supervisors.
    pub(super) fn place(&self) -> &str {
        &self.place
    }

    pub(super) const fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Takes over workers left alive by the previous run; returns those that succeeded.
    pub(super) async fn adopt(&self, survivors: Vec<Survivor>) -> Vec<AdoptedWorker> {
        let mut adopted = Vec::new();
        for survivor in survivors {
            let Some(handle) = self.handles.get(&survivor.worker) else {
                continue;
            };
            let (worker, variant) = (survivor.worker.clone(), survivor.variant.clone());
            match handle.adopt(survivor).await {
                Ok(pid) => {
                    tracing::info!(worker, pid, "worker of an earlier supervisor taken over");
                    adopted.push(AdoptedWorker {
                        worker,
                        pid,
                        variant,
                    });
                }
                Err(error) => tracing::warn!("{}", in_one_line(&error)),
            }
        }
        adopted
    }

    /// Returns the last end of a worker: `exited`, `killed`, `not_ready`, `not_started`, `unknown`.
    pub(super) fn last_end(&self, worker: &str) -> Option<&'static str> {
        let ends = locked(&self.ends);
        ends.get(worker).copied()
    }

    /// Returns the workers of a role, by name.
    pub(super) fn of_role(&self, role: WorkerRole) -> impl Iterator<Item = Speaker> {
        let named = self
            .roles
            .iter()
            .filter(move |(_, (found, _))| *found == role);
        named.filter_map(|(name, (_, way))| {
            let handle = self.handles.get(name).cloned()?;
            Some(Speaker {
                hangs: HangDetector::new(handle.clone(), way.protocol, &self.control),
                handle,
                way: way.clone(),
            })
        })
    }

    pub(super) fn tell_memory_is_short(&self, name: &str) {
        if let Some(handle) = self.handles.get(name) {
            let notified = handle.tell_memory_is_short();
            tracing::info!(
                worker = name,
                notified,
                "worker is notified that memory is short"
            );
        }
    }

    pub(super) fn tell_all_memory_is_short(&self) {
        for name in self.handles.keys() {
            self.tell_memory_is_short(name);
        }
    }

    /// Starts a worker; the outcome is sent as an event.
    pub(super) fn start(&self, name: &str, variant: Option<String>) {
        self.order(name, Order::Start { variant });
    }

    /// Stops a worker; its end is sent as an event.
    pub(super) fn stop(&self, name: &str, reason: String) {
        self.order(name, Order::Stop { reason });
    }

    /// Ends an unresponsive worker; its end is sent as an event.
    pub(super) fn abort(&self, name: &str, evidence: String) {
        let Some(worker) = self.handles.get(name).cloned() else {
            tracing::error!(worker = name, "no worker has this name");
            return;
        };
        self.runtime
            .spawn(async move { worker.end_hung(&evidence).await });
    }

    fn order(&self, name: &str, order: Order) {
        match self.orders.get(name).map(|orders| orders.try_send(order)) {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                tracing::error!(worker = name, %error, "cannot send a command to a worker");
            }
            None => tracing::error!(worker = name, "no worker has this name"),
        }
    }

    /// Switches the variant of a worker; the outcome is sent as an event.
    pub(super) fn resize(&self, name: String, variant: String) {
        let Some(worker) = self.handles.get(&name).cloned() else {
            tracing::error!(worker = name, "no worker has this name");
            return;
        };
        let control = Arc::clone(&self.control);
        self.runtime.spawn(async move {
            let event = match worker.resize(&variant).await {
                Ok(report) => Event::WorkerResized(WorkerResized {
                    worker: name,
                    variant: report.variant,
                    used: report.after.map(|reading| reading.used()),
                    error: None,
                }),
                Err(error) => Event::WorkerResized(WorkerResized {
                    worker: name,
                    variant: worker.variant().unwrap_or_default(),
                    used: worker.measure().await.map(|reading| reading.used()),
                    error: Some(in_one_line(&error)),
                }),
            };
            control.tell(event).await;
        });
    }

    /// Ends all workers and waits for them.
    pub(super) async fn stop_all(&self, grace: Duration) {
        let stops = self.handles.values().map(|worker| {
            worker.stop_because(
                Some(grace.min(worker.spec().stop_grace)),
                "the supervisor is stopping",
            )
        });
        futures_util::future::join_all(stops).await;
    }
}

/// Returns the specification of a worker that may outlive this supervisor.
pub(super) fn supervised(worker: &WorkerConfig, config: &Config) -> WorkerSpec {
    WorkerSpec {
        successor: Some(successor_of(config)),
        ..spec_of(worker, &config.runtime_dir)
    }
}

/// Converts changes of the requests in flight at each worker to events, in a single task: sent from several places, two
/// events could overtake each other.
pub(super) async fn report_activity(control: Arc<ControlHandle>) {
    let mut work = control.work();
    let mut reported = BTreeMap::new();
    while work.changed().await.is_ok() {
        let counts = work.borrow_and_update().clone();
        for (worker, &requests) in &counts {
            if reported.get(worker) != Some(&requests) {
                let worker = worker.clone();
                control
                    .tell(Event::WorkerActivity { worker, requests })
                    .await;
            }
        }
        reported = counts;
    }
}

/// Performs starts and stops of one worker in the order given. Reordered, they would leave a process that is not in the
/// ledger.
///
/// Each start is followed by exactly one end, reported by the worker's own task.
async fn obey(
    mut orders: mpsc::Receiver<Order>,
    worker: WorkerHandle,
    control: Arc<ControlHandle>,
) {
    while let Some(order) = orders.recv().await {
        let variant = match order {
            Order::Start { variant } => variant,
            Order::Stop { reason } => {
                let _ = worker.stop_because(None, &reason).await;
                continue;
            }
        };
        match worker.start(variant.as_deref()).await {
            Ok(pid) => {
                tracing::debug!(worker = worker.name(), pid, "worker runs");
                let lines = worker.measures().iter().map(ToString::to_string).collect();
                control.note_confinement(worker.name(), lines);
            }
            // The worker's own task has reported these.
            Err(
                error @ (StartError::Launch { .. }
                | StartError::Confine { .. }
                | StartError::Execute { .. }),
            ) => {
                tracing::warn!("{}", in_one_line(&error));
            }
            // It is in the ledger and already running; its next end is the end of this start.
            Err(error @ StartError::Running { .. }) => tracing::error!("{}", in_one_line(&error)),
            Err(error) => {
                control
                    .tell(Event::WorkerExited {
                        worker: worker.name().to_owned(),
                        intended: false,
                        cause: in_one_line(&error),
                    })
                    .await;
            }
        }
    }
}

/// Converts reports of workers to events of the arbiter.
async fn forward(
    mut reports: mpsc::Receiver<WorkerEvent>,
    control: Arc<ControlHandle>,
    ends: Ends,
) {
    let note = |worker: &str, end| {
        let mut ends = locked(&ends);
        ends.insert(worker.to_owned(), end);
    };
    let mut pids = BTreeMap::new();
    while let Some(report) = reports.recv().await {
        let worker = report.worker.to_string();
        let event = match report.kind {
            WorkerEventKind::Starting { pid } => {
                pids.insert(worker, pid);
                continue;
            }
            WorkerEventKind::Ready { .. } => {
                let pid = pids.get(&worker).copied().unwrap_or_default();
                Event::WorkerReady { worker, pid }
            }
            WorkerEventKind::Failed { reason } => match reason {
                FailureReason::NotStarted { error } => {
                    note(&worker, "not_started");
                    Event::WorkerExited {
                        worker,
                        intended: false,
                        cause: error,
                    }
                }
                // It is being stopped; its exit follows.
                FailureReason::NotReady { .. } => continue,
            },
            WorkerEventKind::Died(mut certificate) => {
                certificate.memory.lease = lease_of(&control.state(), &worker);
                tell_death(&certificate);
                control.deaths().push((*certificate).clone());
                Event::WorkerDied { certificate }
            }
            WorkerEventKind::Exited(exit) => {
                note(&worker, end_of(&exit));
                let cause = match exit.intended_by_us {
                    Some(Intent::NotReady) => {
                        format!("{exit}; see its output, or raise `ready.timeout`")
                    }
                    _ => exit.sentence,
                };
                Event::WorkerExited {
                    worker,
                    intended: exit
                        .intended_by_us
                        .is_some_and(|intent| !matches!(intent, Intent::Hung | Intent::NotReady)),
                    cause,
                }
            }
            // The caller of the measurement reports it, with its time.
            WorkerEventKind::Measured(_) => continue,
        };
        control.tell(event).await;
    }
}

/// Returns the kind of a worker's end in one word.
fn end_of(exit: &ExitReport) -> &'static str {
    match (exit.intended_by_us, exit.status) {
        (Some(Intent::NotReady), _) => "not_ready",
        (Some(Intent::Hung), _) => "hung",
        (_, ExitStatus::Code(_)) => "exited",
        (_, ExitStatus::Signal { .. }) => "killed",
        (_, ExitStatus::Unknown) => "unknown",
    }
}

fn lease_of(state: &Snapshot, worker: &str) -> Option<LeaseAtDeath> {
    let lease = state
        .leases
        .iter()
        .find(|lease| lease.tenant == worker && lease.kind == LeaseKind::Worker)?;
    Some(LeaseAtDeath {
        held: lease.memory.held,
        min: lease.memory.min,
        max: lease.memory.max,
        free: state.memory.free,
    })
}

fn tell_death(certificate: &DeathCertificate) {
    let (worker, took_us, verdict) = (
        &certificate.worker,
        certificate.took_us,
        &certificate.verdict,
    );
    let (class, confidence, sentence) = (verdict.class, verdict.confidence, &verdict.sentence);
    let remedy = verdict.remedy.as_deref().unwrap_or_default();
    if class == DeathClass::KilledByUs {
        tracing::info!(worker, %class, %confidence, took_us, "{sentence}");
    } else {
        tracing::warn!(worker, %class, %confidence, remedy, took_us, "{sentence}");
    }
}

/// Returns the pressure file of a worker, beside its socket.
fn pressure_of(worker: &WorkerConfig, runtime_dir: &Path) -> Option<spec::PressureWatch> {
    let kind = match worker.pressure.watch {
        PressureWatch::Fifo => PressureKind::Fifo,
        PressureWatch::None => return None,
        PressureWatch::Socket => PressureKind::Socket,
    };
    let path = runtime_dir.join(format!("{}.pressure", worker.name));
    let owner = worker.confinement.user.clone();
    Some(spec::PressureWatch { path, kind, owner })
}

/// Converts a configured worker to a specification.
pub fn spec_of(worker: &WorkerConfig, runtime_dir: &Path) -> WorkerSpec {
    WorkerSpec {
        class: worker.class.to_string(),
        env: worker.env.clone(),
        working_dir: worker.working_dir.clone(),
        confinement: worker.confinement.clone(),
        readiness: worker.ready.check.clone(),
        ready_timeout: worker.ready.timeout,
        stop_grace: worker.stop_grace,
        memory: worker.memory.clone(),
        oom_score_adj: Some(worker.oom_score_adj),
        pressure: pressure_of(worker, runtime_dir),
        ..WorkerSpec::new(
            worker.name.clone(),
            worker.argv.clone(),
            worker.listen.clone(),
        )
    }
}
