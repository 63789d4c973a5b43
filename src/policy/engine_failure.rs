//! Failure of the LLM: its cure, and the next attempt.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::fmt;

use serde::{Deserialize, Serialize};

use cotenant_units::Timestamp;

/// Cure of a failed LLM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cure {
    /// Load it again: the process or the device failed. Attempts are limited by the restart settings.
    #[default]
    Reload,
    /// Wait: its file could not be read, or the system lacked a resource. The header is read again with back-off,
    /// without limit.
    Reread,
    /// Change the file, the settings or the machine: no attempt succeeds before that.
    Change {
        /// The required change; empty if the reason contains it.
        remedy: String,
    },
}

/// A failure of the LLM, for users.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineFailure {
    pub reason: String,
    pub next: NextTry,
}

/// The next attempt to load a failed LLM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NextTry {
    /// It is being loaded, or waits for memory.
    Now,
    /// At this instant.
    At(Timestamp),
    /// Once the disk has completed the hanging reads.
    WhenDiskAnswers,
    /// None until the file changes or an operator requests it: the failure is permanent.
    Never {
        /// Empty if the reason contains it.
        remedy: String,
    },
}

impl EngineFailure {
    /// Returns the remedy of a permanent failure.
    #[must_use]
    pub const fn permanent(&self) -> Option<&str> {
        match &self.next {
            NextTry::Never { remedy } => Some(remedy.as_str()),
            NextTry::Now | NextTry::At(_) | NextTry::WhenDiskAnswers => None,
        }
    }
}

/// The reason, with the remedy if known.
impl fmt::Display for EngineFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)?;
        match self.permanent() {
            Some(remedy) if !remedy.is_empty() => write!(f, " (hint: {remedy})"),
            _ => Ok(()),
        }
    }
}
