//! Specification of a worker: start, readiness, stop, memory.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use cotenant_config::{Confinement, WorkerMemory};
pub use cotenant_config::{Listen, Readiness};

/// Specification of one worker.
///
/// At each start, these variables are replaced in [`argv`](Self::argv) and in the values of [`env`](Self::env):
///
/// | variable | value |
/// |---|---|
/// | `${SOCKET}` | path of [`Listen::Socket`] |
/// | `${PORT}` | port of [`Listen::Port`], or the port chosen for each start with [`Listen::FreePort`] |
/// | `${VARIANT}` | the requested variant, see [`WorkerHandle::start`](super::handle::WorkerHandle::start) |
/// | `${NAME}` | [`name`](Self::name) |
/// | `${SELF}` | path of this program, so that its own `worker` verbs are found without `PATH` |
///
/// Any other `${…}` is an error; `$` without a brace is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerSpec {
    /// Name in messages, events and file names: letters, digits, `-` and `_`.
    pub name: String,
    /// Class of its lease, as written in the configuration; not interpreted here.
    pub class: String,
    /// Program and arguments; the program is looked up in `PATH` if it contains no `/`.
    pub argv: Vec<String>,
    /// Additional variables besides those inherited from the supervisor; `${ENV:NAME}` is any other variable of the
    /// supervisor.
    pub env: BTreeMap<String, String>,
    /// Working directory; `None` is the supervisor's.
    pub working_dir: Option<PathBuf>,
    /// Its address. A socket left by an earlier run is removed before the start.
    pub listen: Listen,
    /// Condition of its readiness.
    pub readiness: Readiness,
    /// A worker that is not ready after this time is stopped and reported as failed. Default of the daemon: 30 s.
    pub ready_timeout: Duration,
    /// Time between SIGTERM and SIGKILL unless given otherwise.
    pub stop_grace: Duration,
    /// Its expected memory, and the variants between which it can switch while running.
    pub memory: WorkerMemory,
    /// Bias for the kernel's OOM killer, −1000 … 1000; lowering it requires `CAP_SYS_RESOURCE`.
    pub oom_score_adj: Option<i16>,
    /// Its limits and sandbox.
    pub confinement: Confinement,
    /// File behind `$MEMORY_PRESSURE_WATCH`; `None` is `/dev/null`.
    pub pressure: Option<PressureWatch>,
    /// Number of last lines of stdout and of stderr kept for reports.
    pub log_lines: usize,
    /// Place whose next supervisor may take it over if ours ends abnormally; with `None`, the kernel kills it then.
    pub successor: Option<Successor>,
}

/// Successive supervisors of one place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Successor {
    /// Identifier of the place, from the folder of its sockets: a supervisor takes over only workers of its own place.
    pub place: String,
    /// File kept locked by the current supervisor, so that a worker can detect whether there is one.
    pub lock: PathBuf,
}

impl WorkerSpec {
    /// Returns a worker with this name and argv that speaks Wyoming on `listen`, with the defaults of this module.
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

/// File that becomes readable whenever a worker should release spare memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PressureWatch {
    /// Its path; created at each start, removed with the process.
    pub path: PathBuf,
    /// Its kind.
    pub kind: PressureKind,
    /// Name or number of its owner; `None` is the supervisor's user.
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

/// Default of [`WorkerSpec::ready_timeout`]: the recogniser's open model loads in under 1 s on an x86-64 server; a
/// Jetson with a cold SD card is allowed 30 times that.
pub const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// Default of [`WorkerSpec::stop_grace`]: a Wyoming server has no state to write when it stops.
pub const STOP_GRACE: Duration = Duration::from_secs(2);

/// Default of [`WorkerSpec::log_lines`].
pub const LOG_LINES: usize = 50;
