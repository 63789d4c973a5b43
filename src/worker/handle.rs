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

/// A worker, running or not.
///
/// Each has a task that owns the process; the methods send requests to that task. When the last handle is dropped, or
/// the runtime ends, the worker is killed with its group. No restart happens here. A worker whose specification names a
/// [successor](WorkerSpec::successor) continues when the whole supervisor is killed, and is [adopted](Self::adopt) by
/// the next.
#[derive(Clone, Debug)]
pub struct WorkerHandle {
    shared: Arc<Shared>,
    commands: mpsc::Sender<Command>,
    status: watch::Receiver<Status>,
    events: mpsc::Sender<WorkerEvent>,
}

/// The process of a worker, whichever it is at the time.
#[derive(Clone, Debug)]
pub struct WorkerProcess(watch::Receiver<Status>);

impl WorkerProcess {
    /// Its process id, when there is a process, ready or not.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.0.borrow().state.pid()
    }
}

impl WorkerHandle {
    /// A worker that does not run yet, with a control group for each start where `groups` can have them; needs a tokio
    /// runtime.
    ///
    /// A full `events` delays this worker's task, except for measurements, which are then not reported as events.
    #[must_use]
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

    /// Starts it in the given variant, or the first of its specification; returns the process id as soon as the
    /// program was executed.
    ///
    /// # Errors
    /// When it runs already, or its program cannot be executed; the latter also as an event.
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

    /// Takes over a worker that a supervisor before us has started; it counts as ready when it shows so again, or at
    /// once where it shows it only once and has done so before.
    ///
    /// # Errors
    /// When it runs already, has ended meanwhile, or its output cannot be read.
    pub async fn adopt(&self, survivor: Survivor) -> Result<u32, StartError> {
        let survivor = Box::new(survivor);
        let adopted = self.ask(|reply| Command::Adopt { survivor, reply }).await;
        adopted.unwrap_or(Err(StartError::Gone))
    }

    /// Ends it and waits: SIGTERM to its group, SIGKILL after `grace`, or after the grace of its specification; SIGKILL
    /// at once where that is zero. `why` goes into its death certificate. `None` when it did not run.
    pub async fn stop_because(&self, grace: Option<Duration>, why: &str) -> Option<ExitReport> {
        let grace = grace.unwrap_or(self.shared.spec().stop_grace);
        self.end(Intent::Stop, grace, why).await
    }

    /// Ends it because it lives and does nothing: SIGABRT to its group, so that it can leave a trace, and SIGKILL after
    /// the grace of its specification. `None` when it did not run.
    pub async fn end_hung(&self, why: &str) -> Option<ExitReport> {
        self.end(Intent::Hung, self.shared.spec().stop_grace, why)
            .await
    }

    /// Its current memory; also sent as an event. `None` when it does not run or cannot be read.
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
        // The process may have ended meanwhile, and its id may have passed to another.
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
    /// When it is not ready, has no such variant, or does not do it.
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
        // When its task is gone there is nothing left to note it.
        let _ = self.ask(switched).await;
        Ok(ResizeReport {
            variant: answered.variant,
            after: self.measure().await,
        })
    }

    /// Notifies it of memory pressure. Returns how many of its processes could be notified: none when it does not run,
    /// or no process has connected to its socket.
    pub fn tell_memory_is_short(&self) -> usize {
        self.shared.tap().as_ref().map_or(0, Tap::tell)
    }

    /// Waits until it is ready; `false` when it stops before.
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

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Its specification at the last start.
    #[must_use]
    pub fn spec(&self) -> Arc<WorkerSpec> {
        self.shared.spec()
    }

    /// Changes its specification from the next start on; its name stays.
    pub fn change(&self, spec: WorkerSpec) {
        *self.shared.next_spec() = Some(Arc::new(spec));
    }

    /// Whether it runs.
    #[must_use]
    pub fn state(&self) -> WorkerState {
        self.status.borrow().state
    }

    /// Its process, for observers: it keeps nothing running.
    #[must_use]
    pub fn process(&self) -> WorkerProcess {
        WorkerProcess(self.status.clone())
    }

    /// Its address, while it runs.
    #[must_use]
    pub fn endpoint(&self) -> Option<Endpoint> {
        self.status.borrow().endpoint.clone()
    }

    /// The variant it was started in or last switched to.
    #[must_use]
    pub fn variant(&self) -> Option<String> {
        self.status.borrow().variant.clone()
    }

    /// Measures of its last start, in force or not.
    #[must_use]
    pub fn measures(&self) -> Vec<Measure> {
        self.shared.measures().clone()
    }

    /// How often it was started.
    #[must_use]
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

    /// Has its task do something; `None` when that task is gone.
    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.ok()?;
        answer.await.ok()
    }
}

/// A worker after a switch.
#[derive(Clone, Debug)]
pub struct ResizeReport {
    /// The variant it is in.
    pub variant: String,
    /// Memory measured after it.
    pub after: Option<MemoryReading>,
}

/// Memory of the family of `leader`; `None` when the leader is gone or invisible, which differs from zero.
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

/// Why a worker was not switched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// It is not ready, or not spoken to.
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
    /// It did not do it.
    #[error("cannot switch worker `{worker}` to `{variant}`")]
    Switch {
        /// Its name.
        worker: String,
        /// The variant.
        variant: String,
        /// Why not.
        #[source]
        source: ClientError,
    },
}

/// Requests that may wait for the task of a worker.
const COMMANDS_QUEUED: usize = 8;
