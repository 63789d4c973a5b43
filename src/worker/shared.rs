//! State shared by the handles and the task of one worker.

use std::{
    collections::BTreeSet,
    fs, io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::sync::oneshot;

use super::{
    adopt::Survivor,
    autopsy::History,
    confine::{ConfineError, Groups, Measure},
    launch::LaunchError,
    orphans::Known,
    pressure::{Tap, TapError},
    report::{ExitReport, Intent},
    spec::WorkerSpec,
};
use cotenant_probe::{ProbeRoot, processes::ProcessTable};
use cotenant_speech::client::Endpoint;
use cotenant_units::lock::locked;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) name: Arc<str>,
    spec: Mutex<Arc<WorkerSpec>>,
    /// Specification for the next start, if changed.
    next_spec: Mutex<Option<Arc<WorkerSpec>>>,
    pub(super) roots: ProbeRoot,
    pub(super) groups: Groups,
    measures: Mutex<Vec<Measure>>,
    history: Mutex<History>,
    family: Mutex<BTreeSet<Known>>,
    tap: Mutex<Option<Tap>>,
}

impl Shared {
    /// Creates the state of a stopped worker.
    pub(super) fn new(spec: WorkerSpec, roots: ProbeRoot, groups: Groups) -> Self {
        Self {
            name: spec.name.as_str().into(),
            spec: Mutex::new(Arc::new(spec)),
            next_spec: Mutex::default(),
            roots,
            groups,
            measures: Mutex::default(),
            history: Mutex::default(),
            family: Mutex::default(),
            tap: Mutex::new(None),
        }
    }

    pub(super) fn spec(&self) -> Arc<WorkerSpec> {
        Arc::clone(&locked(&self.spec))
    }

    pub(super) fn next_spec(&self) -> MutexGuard<'_, Option<Arc<WorkerSpec>>> {
        locked(&self.next_spec)
    }

    pub(super) fn renew(&self) {
        if let Some(next) = self.next_spec().take() {
            *locked(&self.spec) = next;
        }
    }

    pub(super) fn measures(&self) -> MutexGuard<'_, Vec<Measure>> {
        locked(&self.measures)
    }

    pub(super) fn history(&self) -> MutexGuard<'_, History> {
        locked(&self.history)
    }

    /// Locks the set of its processes as last seen.
    pub(super) fn family(&self) -> MutexGuard<'_, BTreeSet<Known>> {
        locked(&self.family)
    }

    /// Locks our end of the pressure file, if there is one.
    pub(super) fn tap(&self) -> MutexGuard<'_, Option<Tap>> {
        locked(&self.tap)
    }
}

/// State published by the task.
#[derive(Clone, Debug)]
pub(super) struct Status {
    pub(super) start: u64,
    pub(super) state: WorkerState,
    pub(super) endpoint: Option<Endpoint>,
    pub(super) variant: Option<String>,
}

impl Default for Status {
    fn default() -> Self {
        Self {
            start: 0,
            state: WorkerState::Stopped,
            endpoint: None,
            variant: None,
        }
    }
}

#[derive(Debug)]
pub(super) enum Command {
    Adopt {
        survivor: Box<Survivor>,
        reply: oneshot::Sender<Result<u32, StartError>>,
    },
    Start {
        variant: Option<String>,
        reply: oneshot::Sender<Result<u32, StartError>>,
    },
    End {
        intent: Intent,
        grace: Duration,
        why: String,
        reply: oneshot::Sender<Option<ExitReport>>,
    },
    Switched {
        start: u64,
        variant: String,
        reply: oneshot::Sender<()>,
    },
}

pub(super) fn write_oom_score_adj(roots: &ProbeRoot, pid: u32, adjustment: i16) -> io::Result<()> {
    fs::write(
        roots.proc.join(pid.to_string()).join("oom_score_adj"),
        adjustment.to_string(),
    )
}

/// State of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerState {
    /// There is no process.
    Stopped,
    /// It runs, but is not ready.
    Starting {
        /// Its process id.
        pid: u32,
    },
    /// It is ready.
    Ready {
        /// Its process id.
        pid: u32,
    },
    /// Its end has been requested.
    Stopping {
        /// Its process id.
        pid: u32,
    },
}

impl WorkerState {
    /// Returns the process id, if there is a process.
    pub const fn pid(self) -> Option<u32> {
        match self {
            Self::Stopped => None,
            Self::Starting { pid } | Self::Ready { pid } | Self::Stopping { pid } => Some(pid),
        }
    }
}

/// Reason why a worker was not started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its pressure file cannot be created.
    #[error("cannot start worker `{worker}`")]
    Pressure {
        /// Its name.
        worker: String,
        /// Its error.
        source: TapError,
    },
    /// It already runs.
    #[error("worker `{worker}` already runs as pid {pid}")]
    Running {
        /// Its name.
        worker: String,
        /// Its process id.
        pid: u32,
    },
    /// Its specification does not list this variant.
    #[error("worker `{worker}` has no variant `{variant}`")]
    Variant {
        /// Its name.
        worker: String,
        /// The variant.
        variant: String,
    },
    /// Its command line cannot be built.
    #[error("cannot build the command line of worker `{worker}`")]
    Launch {
        /// Its name.
        worker: String,
        /// Its error.
        source: LaunchError,
    },
    /// It cannot be confined as configured.
    #[error("cannot confine worker `{worker}`")]
    Confine {
        /// Its name.
        worker: String,
        /// Its error.
        source: ConfineError,
    },
    /// It cannot be taken over from the previous supervisor.
    #[error("cannot take over worker `{worker}` (pid {pid}) from the previous supervisor")]
    Adopt {
        /// Its name.
        worker: String,
        /// Its process id.
        pid: u32,
        /// Its error.
        source: io::Error,
    },
    /// Its program cannot be executed.
    #[error("cannot execute `{program}` as worker `{worker}`")]
    Execute {
        /// Its name.
        worker: String,
        /// The program.
        program: String,
        /// Its error.
        source: io::Error,
    },
    /// Its task has ended with the runtime.
    #[error("the task of the worker has ended")]
    Gone,
}

/// Returns the processes of `leader` and of its descendants; `None` if processes cannot be listed.
pub(super) fn family(proc: &Path, leader: u32) -> Option<BTreeSet<Known>> {
    let table = ProcessTable::read(proc).ok()?;
    let family = table.family(leader);
    let members = table
        .processes
        .iter()
        .filter(|process| family.contains(&process.pid));
    Some(
        members
            .map(|process| (process.pid, process.start_ticks))
            .collect(),
    )
}
