//! Errors that keep the daemon from starting, or end it.

use std::{io, path::PathBuf};

use crate::{
    journal::{BookError, JournalError},
    policy::params::ParamsError,
    probe::ProbeError,
    rpc::server::BindError,
};

/// Why the daemon could not start, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A folder that it needs cannot be made.
    #[error("cannot create the folder `{path}`")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The machine cannot be read.
    #[error("cannot read the machine")]
    Probe(#[from] ProbeError),
    /// The configuration does not fit this machine.
    #[error("cannot use the configuration on this machine: {0}")]
    Settings(String),
    /// The settings contradict each other.
    #[error("cannot use the settings")]
    Params(#[from] ParamsError),
    /// A critical task is gone.
    #[error("cannot go on: {what}")]
    Lost {
        /// Which: `sampling has ended`.
        what: String,
    },
    /// A listener cannot be opened.
    #[error("cannot open {listener}")]
    Listen {
        /// Which: `http 127.0.0.1:8410`.
        listener: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A socket of gRPC cannot be opened.
    #[error("cannot open gRPC")]
    Socket {
        /// Why not.
        #[source]
        source: BindError,
    },
    /// Another supervisor has its sockets in the same folder.
    #[error("cannot lock `{path}`, which the supervisor of this folder keeps locked")]
    Place {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The state for the next run cannot be written.
    #[error("cannot keep the book of this run")]
    Book {
        /// Why not.
        #[source]
        source: BookError,
    },
    /// The journal cannot be written.
    #[error("cannot keep the journal")]
    Journal {
        /// Why not.
        #[source]
        source: JournalError,
    },
    /// Signals or threads cannot be set up.
    #[error("cannot set up {what}")]
    System {
        /// What.
        what: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

impl RunError {
    /// The remedy.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Folder { path, .. } => Some(format!(
                "create it for this user, or set `runtime_dir` and `state_dir` to folders that it may write ({})",
                path.display()
            )),
            Self::Listen { .. } => {
                Some("another program may use it; choose another address in the configuration".into())
            }
            Self::Socket { source } => Some(source.hint().to_owned()),
            Self::Place { .. } => Some("stop the other supervisor, or set `runtime_dir` to another folder".into()),
            Self::Book { .. } => Some("it lies in `runtime_dir`; a damaged one may be removed".into()),
            Self::Lost { .. } => Some("see its log; a new start begins from a clean state".into()),
            Self::Settings(_) | Self::Probe(_) | Self::Params(_) | Self::Journal { .. } | Self::System { .. } => None,
        }
    }
}
