//! Decisions about the engine's load, plans and failures.

use serde::{Deserialize, Serialize};

/// What was decided about the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineDecision {}
