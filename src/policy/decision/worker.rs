//! Decisions about a worker's start, size and end.

use serde::{Deserialize, Serialize};

use crate::units::Bytes;

/// What was decided about a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerDecision {
    /// It is started, and its peak is held for it.
    Starting {
        /// Its name.
        worker: String,
        /// What is held for its start.
        peak: Bytes,
        /// Free after it.
        free: Bytes,
        /// The budget.
        budget: Bytes,
    },
    /// It runs and answers nothing, and is ended.
    Unresponsive {
        /// Its name.
        worker: String,
        /// Its process.
        pid: u32,
        /// What went unanswered.
        evidence: String,
    },
}
