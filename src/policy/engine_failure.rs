//! Failure of the LLM: its cure, and when it is tried again.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::fmt;

use serde::{Deserialize, Serialize};

use cotenant_units::Timestamp;

/// Cure of a failed LLM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cure {
    /// Loading it again: the process or the device broke down. Tried as often as the restart settings allow.
    #[default]
    Reload,
    /// Time: its file could not be read, or the system lacked something. The header is read again, with back-off, for as long
    /// as that takes.
    Reread,
    /// A change of the file, the settings or the machine: no attempt succeeds before.
    Change {
        /// The change that is needed; empty where the reason says it.
        remedy: String,
    },
}

/// Failure of the LLM, as others see it.
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
    /// When the disk has answered the reads that hang.
    WhenDiskAnswers,
    /// None until the file changes or an operator asks for it: the failure is permanent.
    Never {
        /// Empty where the reason says it.
        remedy: String,
    },
}

impl EngineFailure {
    /// The remedy of a failure that no attempt cures.
    #[must_use]
    pub const fn permanent(&self) -> Option<&str> {
        match &self.next {
            NextTry::Never { remedy } => Some(remedy.as_str()),
            NextTry::Now | NextTry::At(_) | NextTry::WhenDiskAnswers => None,
        }
    }
}

/// The reason, and the remedy where one is known.
impl fmt::Display for EngineFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)?;
        match self.permanent() {
            Some(remedy) if !remedy.is_empty() => write!(f, " (hint: {remedy})"),
            _ => Ok(()),
        }
    }
}
