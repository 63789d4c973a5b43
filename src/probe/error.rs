//! Errors of readings.

use std::{
    io,
    path::{Path, PathBuf},
};

/// A reading that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {what} from `{}`", path.display())]
pub struct ProbeError {
    what: &'static str,
    path: PathBuf,
    #[source]
    kind: ProbeErrorKind,
}

impl ProbeError {
    pub(super) fn io(what: &'static str, path: &Path, error: io::Error) -> Self {
        Self {
            what,
            path: path.to_owned(),
            kind: ProbeErrorKind::Io(error),
        }
    }

    pub(super) fn parse(path: &Path, error: ParseError) -> Self {
        Self {
            what: error.what,
            path: path.to_owned(),
            kind: ProbeErrorKind::Parse(error),
        }
    }
}

/// Reason why a reading failed.
#[derive(Debug, thiserror::Error)]
pub enum ProbeErrorKind {
    /// The system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The content is malformed.
    #[error(transparent)]
    Parse(#[from] ParseError),
}

/// Malformed text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{message}", at(*line))]
pub struct ParseError {
    /// The expected item.
    pub(super) what: &'static str,
    /// Line, from 1; `None` if a whole line is missing.
    pub(super) line: Option<usize>,
    pub(super) message: String,
}

impl ParseError {
    pub(super) fn missing(what: &'static str) -> Self {
        Self {
            what,
            line: None,
            message: "there is no such line".to_owned(),
        }
    }

    pub(super) fn value(what: &'static str, line: usize, value: &[u8], wanted: &str) -> Self {
        let shown: String = String::from_utf8_lossy(value)
            .chars()
            .take(SHOWN_MAX)
            .collect();
        Self {
            what,
            line: Some(line),
            message: format!("`{}` is not {wanted}", shown.escape_debug()),
        }
    }
}

fn at(line: Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!("line {line}: "))
}

/// Characters of a wrong value shown in a message.
const SHOWN_MAX: usize = 40;
