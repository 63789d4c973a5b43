//! Specification of a worker: start, readiness, stop, memory.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use cotenant_config::{Confinement, WorkerMemory};
pub use cotenant_config::{Listen, Readiness};

/// Specification of one worker.
///
/// In [`argv`](Self::argv) and in the values of [`env`](Self::env) these variables are replaced at each start:
///
/// | variable | value |
/// |---|---|
/// | `${SOCKET}` | path of [`Listen::Socket`] |
/// | `${PORT}` | port of [`Listen::Port`], or one that is chosen for each start by [`Listen::FreePort`] |
/// | `${VARIANT}` | the requested variant, see [`WorkerHandle::start`](super::handle::WorkerHandle::start) |
/// | `${NAME}` | [`name`](Self::name) |
/// | `${SELF}` | path of this program, so that its own `worker` verbs need no search in `PATH` |
///
/// Any other `${…}` is an error; `$` without a brace stays as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerSpec {
    /// Name in messages, events and file names: letters, digits, `-` and `_`.
    pub name: String,
    /// Class of its lease, as written in the configuration; not interpreted here.
    pub class: String,
    /// Program and arguments; the program is looked up in `PATH` when it has no `/`.
    pub argv: Vec<String>,
    /// Added to the variables inherited from the supervisor's environment; `${ENV:NAME}` is any other variable of it.
    pub env: BTreeMap<String, String>,
    /// Folder to start in; that of the supervisor when `None`.
    pub working_dir: Option<PathBuf>,
    /// Its address. A socket left there by an earlier run is removed before the start.
    pub listen: Listen,
    /// How it shows that it can serve.
    pub readiness: Readiness,
    /// A worker that is not ready after this time is stopped and reported as failed. Default of the daemon: 30 s.
    pub ready_timeout: Duration,
    /// Time between SIGTERM and SIGKILL where no other is given.
    pub stop_grace: Duration,
    /// Its expected memory, and the variants between which it can be switched while it runs.
    pub memory: WorkerMemory,
    /// Kernel's bias for its out-of-memory killer, −1000 … 1000; lowering it needs `CAP_SYS_RESOURCE`.
    pub oom_score_adj: Option<i16>,
    /// Its limits and sandbox.
    pub confinement: Confinement,
    /// File behind `$MEMORY_PRESSURE_WATCH`; `/dev/null` when `None`.
    pub pressure: Option<PressureWatch>,
    /// How many last lines of stdout and of stderr are kept for reports.
    pub log_lines: usize,
    /// Place whose next supervisor may take it over after an unorderly end; with `None` the kernel ends it then.
    pub successor: Option<Successor>,
}

/// The supervisors that follow one another in one place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Successor {
    /// Identifies the place by the folder of its sockets: a supervisor takes over only the workers of its own place.
    pub place: String,
    /// A file that the supervisor of the moment keeps locked, so that a worker can see whether there is one.
    pub lock: PathBuf,
}

impl WorkerSpec {
    /// A worker with the given name and argv that speaks Wyoming on `listen`, and the defaults of this module.
    #[must_use]
    pub fn new(name: impl Into<String>, argv: Vec<String>, listen: Listen) -> Self {
        let name = name.into();
        Self {
            class: name.clone(),
            name,
            argv,
            env: BTreeMap::new(),
            working_dir: None,
            listen,
            readiness: Readiness::Describe,
            ready_timeout: READY_TIMEOUT,
            stop_grace: STOP_GRACE,
            memory: WorkerMemory::default(),
            oom_score_adj: None,
            confinement: Confinement::default(),
            pressure: None,
            log_lines: LOG_LINES,
            successor: None,
        }
    }
}

/// A file that is readable whenever a worker should release its spare memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PressureWatch {
    /// Its path; made at each start, and gone with the process.
    pub path: PathBuf,
    /// Its kind.
    pub kind: PressureKind,
    /// Name or number of the user it belongs to; the supervisor's own when `None`.
    pub owner: Option<String>,
}

/// Kind of a pressure file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PressureKind {
    /// A FIFO, for a worker of one process.
    Fifo,
    /// A stream socket, for a worker of several.
    Socket,
}

/// Default of [`WorkerSpec::ready_timeout`]: the recogniser's open model loads in under 1 s here; a Jetson on a cold
/// SD card is given 30 times that.
pub const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// Default of [`WorkerSpec::stop_grace`]: a Wyoming server has nothing to write back when it stops.
pub const STOP_GRACE: Duration = Duration::from_secs(2);

/// Default of [`WorkerSpec::log_lines`].
pub const LOG_LINES: usize = 50;
