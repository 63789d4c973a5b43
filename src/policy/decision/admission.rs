//! Decisions about requests that wait, are granted or denied.

use serde::{Deserialize, Serialize};

/// What was decided about requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdmissionDecision {
    /// Nothing new is admitted from now on.
    DrainBegun,
    /// Requests are admitted again.
    DrainEnded,
}
