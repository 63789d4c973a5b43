//! What became of a confinement.

use std::{fmt, io, path::Path};

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
pub(crate) struct Surroundings<'a> {
    pub(crate) worker: &'a str,
    pub(crate) program: &'a str,
    pub(crate) working_dir: Option<&'a Path>,
    /// Folder in which it makes its socket.
    pub(crate) socket_dir: Option<&'a Path>,
    /// What it watches for memory pressure.
    pub(crate) watched: Option<&'a Path>,
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
    #[error(
        "cannot run as user `{name}`: the supervisor runs as uid {own} and lacks `{capability}`"
    )]
    Identity {
        /// As configured.
        name: String,
        /// The supervisor's own.
        own: u32,
        /// What it lacks.
        capability: &'static str,
    },
    /// A resource limit is above what the supervisor itself may have.
    #[error(
        "cannot set `limits.{resource}` to {wanted}: the supervisor's own hard limit is {hard}"
    )]
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
