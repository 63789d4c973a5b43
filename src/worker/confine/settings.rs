//! Settings of a confinement, and what became of them.

use std::{
    collections::BTreeMap,
    fmt, io,
    path::{Path, PathBuf},
};

use crate::units::Bytes;

/// What a worker may use and touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// Limit of its control group, page cache included; it may not swap. `None` sets no limit.
    pub memory: Option<Bytes>,
    /// Resource limits, soft and hard alike; `None` is no limit.
    pub resources: BTreeMap<Resource, Option<u64>>,
    /// Name or number of the user it runs as; the supervisor's when `None`.
    pub user: Option<String>,
    /// Name or number of its group; the user's own when `None`.
    pub group: Option<String>,
    /// The only files it may touch beside those that every program needs; all that its user may when `None`.
    pub files: Option<FileAccess>,
    /// Whether system calls that no speech worker needs are refused.
    pub syscalls: SyscallFilter,
    /// Whether it is not started where something of this cannot be put into force.
    pub required: bool,
}

/// Files and folders, each with all below it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileAccess {
    /// May be read and executed.
    pub read: Vec<PathBuf>,
    /// May be read, executed and changed.
    pub write: Vec<PathBuf>,
}

/// Which system calls a worker may make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyscallFilter {
    /// All that its user may.
    #[default]
    All,
    /// All but those that trace others, change mounts, the clock, modules, swap or the kernel itself. The memory of
    /// processes outside is out of reach, and root keeps no capability beyond files, signals and ports.
    Restricted,
}

/// A limit of setrlimit(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resource {
    /// Bytes of address space.
    AddressSpace,
    /// Bytes of a core file.
    Core,
    /// Bytes of the largest file it may write.
    FileSize,
    /// Bytes it may lock.
    LockedMemory,
    /// Open files.
    OpenFiles,
    /// Processes and threads of its user.
    Processes,
}

impl Resource {
    /// As in the configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AddressSpace => "address_space",
            Self::Core => "core",
            Self::FileSize => "file_size",
            Self::LockedMemory => "memlock",
            Self::OpenFiles => "open_files",
            Self::Processes => "processes",
        }
    }
}

/// One part of a confinement, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measure {
    /// `memory limit`, `files`, `system calls`, `control group`, …
    pub what: &'static str,
    /// What is in force, in words; or why it is not.
    pub state: Result<String, String>,
    /// Whether the configuration asks for it; what is not asked for and cannot be had is worth no warning.
    pub asked: bool,
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            Ok(text) => write!(f, "{}: {text}", self.what),
            Err(reason) => write!(f, "{}: not in force: {reason}", self.what),
        }
    }
}

/// What a start needs to know beside the confinement itself.
pub(in crate::worker) struct Surroundings<'a> {
    pub(in crate::worker) worker: &'a str,
    pub(in crate::worker) program: &'a str,
    pub(in crate::worker) working_dir: Option<&'a Path>,
    /// Folder in which it makes its socket.
    pub(in crate::worker) socket_dir: Option<&'a Path>,
    /// What it watches for memory pressure.
    pub(in crate::worker) watched: Option<&'a Path>,
}

/// Why a worker cannot be confined as it must be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfineError {
    /// There is no such user or group.
    #[error("{kind} `{name}` does not exist")]
    Unknown {
        /// `user` or `group`.
        kind: &'static str,
        /// As configured.
        name: String,
    },
    /// The supervisor may not become another user.
    #[error("cannot run as user `{name}`: the supervisor runs as uid {own} and lacks `{capability}`")]
    Identity {
        /// As configured.
        name: String,
        /// The supervisor's own.
        own: u32,
        /// What it lacks.
        capability: &'static str,
    },
    /// A resource limit is above what the supervisor itself may have.
    #[error("cannot set `limits.{resource}` to {wanted}: the supervisor's own hard limit is {hard}")]
    Resource {
        /// Its name in the configuration.
        resource: &'static str,
        /// As configured.
        wanted: String,
        /// The supervisor's own.
        hard: u64,
    },
    /// Something that is required is not there.
    #[error("cannot confine it as required: {measure}")]
    Required {
        /// What, and why not.
        measure: String,
    },
    /// The system refused something that should work.
    #[error("cannot prepare {what}")]
    System {
        /// What.
        what: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
}
