//! Decisions about the engine's load, plans and failures.

use serde::{Deserialize, Serialize};

use crate::policy::residency::FloorError;

/// What was decided about the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineDecision {
    /// The model is not loaded, since no memory that comes free would suffice.
    FloorExceedsBudget {
        /// Its floor, and the budget.
        error: FloorError,
    },
}
