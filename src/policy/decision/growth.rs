//! Decisions about what grows back, and when.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{policy::growth_wait::GrowthWait, units::Tokens};

/// What was decided about growth.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrowthDecision {
    /// What had grown back was shed again soon, so that the dwell is longer from now on.
    BackedOff {
        /// How long it had stayed.
        stayed: Duration,
        /// The dwell from now on.
        dwell: Duration,
    },
    /// A client wants more KV capacity than can be had now.
    CapacityWithheld {
        /// What it wants.
        wanted: Tokens,
        /// What the engine is asked to hold.
        present: Tokens,
        /// What growth waits for.
        wait: GrowthWait,
    },
}
