//! Errors that end a built-in worker.

use std::{io, path::PathBuf};

use super::{flite::FliteError, pocketsphinx::SphinxError};
use cotenant_speech::client::Endpoint;
use cotenant_units::Bytes;

/// Reason why a built-in worker ended.
#[derive(Debug, thiserror::Error)]
pub enum VerbError {
    /// The runtime cannot be created.
    #[error("cannot start the worker")]
    Runtime(#[source] io::Error),
    /// The address cannot be bound.
    #[error("cannot listen on `{endpoint}`")]
    Listen {
        /// The address.
        endpoint: Endpoint,
        /// The cause.
        source: io::Error,
    },
    /// A grammar is required, but none is given.
    #[error("vocabulary `grammar` needs a grammar file")]
    NoGrammar,
    /// The grammar cannot be read.
    #[error("cannot read grammar `{}`", path.display())]
    Grammar {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The grammar is too long.
    #[error("grammar `{}` has {bytes}, at most {most} is read", path.display())]
    GrammarTooLong {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: Bytes,
        /// The limit.
        most: Bytes,
    },
    /// The recogniser cannot be used.
    #[error("cannot load the recogniser")]
    Asr(#[source] SphinxError),
    /// The voice cannot be used.
    #[error("cannot load the voice")]
    Flite(#[source] FliteError),
    /// The model for embeddings cannot be used.
    #[error("cannot load the model `{}`", path.display())]
    Embedding {
        /// Its file.
        path: PathBuf,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The program espeak-ng cannot be run.
    #[error("cannot run `espeak-ng`")]
    Espeak(#[source] io::Error),
    /// The memory cannot be allocated.
    #[error("cannot map {bytes} of memory")]
    Map {
        /// Its size.
        bytes: Bytes,
        /// The cause.
        source: io::Error,
    },
    /// The arguments are invalid.
    #[error("{0}")]
    Options(String),
}

impl VerbError {
    /// Returns the remedy, if known.
    pub const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoGrammar => {
                Some("name a JSGF file with `--grammar`, or choose `--vocabulary open`")
            }
            Self::Asr(error) => error.hint(),
            Self::Flite(FliteError::Library(error)) => Some(error.hint()),
            Self::Espeak(_) => {
                Some("install it with `apt-get install espeak-ng`, or choose `--engine flite`")
            }
            _ => None,
        }
    }
}
