//! Outcome of a confinement.

use std::{fmt, io, path::Path};

/// One part of a confinement and its outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measure {
    /// `memory limit`, `files`, `system calls`, `control group`, …
    pub what: &'static str,
    /// The state in force in words, or the reason why it is not in force.
    pub state: Result<String, String>,
    /// Whether the configuration requests it; if not, its absence causes no warning.
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

/// Parameters of a start besides the confinement itself.
pub(crate) struct Surroundings<'a> {
    pub(crate) worker: &'a str,
    pub(crate) program: &'a str,
    pub(crate) working_dir: Option<&'a Path>,
    /// Folder in which it creates its socket.
    pub(crate) socket_dir: Option<&'a Path>,
    pub(crate) watched: Option<&'a Path>,
}

/// Reason why a worker cannot be confined as required.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// Unknown user or group.
    #[error("{kind} `{name}` does not exist")]
    Unknown {
        /// `user` or `group`.
        kind: &'static str,
        /// Name as configured.
        name: String,
    },
    /// The supervisor may not become another user.
    #[error(
        "cannot run as user `{name}`: the supervisor runs as uid {own} and lacks `{capability}`"
    )]
    Identity {
        /// Name as configured.
        name: String,
        /// Uid of the supervisor.
        own: u32,
        /// The missing capability.
        capability: &'static str,
    },
    /// A resource limit exceeds the supervisor's own.
    #[error(
        "cannot set `limits.{resource}` to {wanted}: the supervisor's own hard limit is {hard}"
    )]
    Resource {
        /// Its name in the configuration.
        resource: &'static str,
        /// Limit as configured.
        wanted: String,
        /// The supervisor's own limit.
        hard: u64,
    },
    /// A required measure is not available.
    #[error("cannot confine it as required: {measure}")]
    Required {
        /// The measure, and the reason.
        measure: String,
    },
    /// A system call failed.
    #[error("cannot prepare {what}")]
    System {
        /// The failed action.
        what: &'static str,
        /// Its error.
        source: io::Error,
    },
}
