//! Reason for which growth waits, with its figures.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::pressure_level::PressureLevel;
use cotenant_units::Bytes;

/// The cause for which growth waits, with its figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "wait")]
pub enum GrowthWait {
    /// Nothing is loaded that could grow.
    NotLoaded,
    /// The supervisor drains.
    Draining,
    /// The level is above Normal. `left`: the rest of its dwell, once the headroom has recovered; absent in older journals.
    Pressure {
        level: PressureLevel,
        #[serde(default)]
        left: Option<Duration>,
    },
    /// Requests wait for memory.
    Requests { waiting: u32 },
    /// The last sample is older than the last change of what is held.
    Sample,
    /// The dwell after the last shed.
    Dwell { left: Duration },
    /// The engine carries out a plan.
    Changing,
    /// The last change has to settle, or has failed.
    Settling { left: Duration },
    /// The next step would leave too little headroom.
    Headroom {
        /// Headroom that the next step needs: all of the following together.
        needs: Bytes,
        /// Headroom of the last sample.
        has: Bytes,
        /// The Elevated watermark.
        elevated: Bytes,
        /// The hysteresis above it.
        hysteresis: Bytes,
        /// Reserved for workers that come back.
        reserved: Bytes,
        /// The next step.
        step: Bytes,
    },
    /// The budget has no room for the next step.
    Budget {
        /// The next step.
        needs: Bytes,
        /// Free of the budget.
        free: Bytes,
        /// What of that is reserved for workers that come back.
        reserved: Bytes,
    },
}

impl GrowthWait {
    /// When it is worth trying again, where time alone is missing.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Dwell { left } | Self::Settling { left } => Some(*left),
            Self::Pressure { left, .. } => *left,
            _ => None,
        }
    }
}
