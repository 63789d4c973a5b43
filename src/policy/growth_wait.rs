//! Reason for which growth waits, with its figures.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::pressure_level::PressureLevel;
use cotenant_units::Bytes;

/// Condition for which growth waits, with its figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "wait")]
pub enum GrowthWait {
    /// No engine is loaded.
    #[error("the engine is not loaded")]
    NotLoaded,
    /// The supervisor drains.
    #[error("the supervisor is draining")]
    Draining,
    /// The level is above Normal. `left`: remaining dwell, once the headroom has recovered; absent in older journals.
    #[error("{}", by_level(*level, *left))]
    Pressure {
        level: PressureLevel,
        #[serde(default)]
        left: Option<Duration>,
    },
    /// Requests wait for memory.
    #[error(
        "{waiting} {} for memory",
        if *waiting == 1 { "request waits" } else { "requests wait" }
    )]
    Requests { waiting: u32 },
    /// The last sample is older than the last grant or release.
    #[error("no sample is newer than the last change")]
    Sample,
    /// The dwell after the last shed.
    #[error("the dwell after the last shed ends in {:.1} s", left.as_secs_f64())]
    Dwell { left: Duration },
    /// The engine carries out a plan.
    #[error("a change is under way")]
    Changing,
    /// The last change is settling, or has failed.
    #[error("the last change settles for {:.1} s more", left.as_secs_f64())]
    Settling { left: Duration },
    /// The next step would leave too little headroom.
    #[error(
        "needs {needs} headroom, has {has} (Elevated {elevated} + hysteresis {hysteresis}{} + {step} for the next \
         step)",
        unless_zero(" + ", *reserved, " for workers")
    )]
    Headroom {
        /// Headroom for the next step: the sum of the fields after `has`.
        needs: Bytes,
        /// Headroom of the last sample.
        has: Bytes,
        /// The Elevated watermark.
        elevated: Bytes,
        /// The hysteresis above it.
        hysteresis: Bytes,
        /// Reserved for returning workers.
        reserved: Bytes,
        /// The next step.
        step: Bytes,
    },
    /// The budget has no room for the next step.
    #[error(
        "needs {needs} of the budget, {free} is free{}",
        unless_zero(" and ", *reserved, " of that is reserved for workers")
    )]
    Budget {
        /// The next step.
        needs: Bytes,
        /// Free bytes of the budget.
        free: Bytes,
        /// The part of them reserved for returning workers.
        reserved: Bytes,
    },
}

impl GrowthWait {
    /// Returns the time after which a retry may succeed, if only time is missing.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Dwell { left } | Self::Settling { left } => Some(*left),
            Self::Pressure { left, .. } => *left,
            _ => None,
        }
    }
}

fn by_level(level: PressureLevel, left: Option<Duration>) -> String {
    left.map_or_else(
        || format!("pressure is {level}"),
        |left| {
            format!(
                "pressure stays {level} until its dwell ends in {:.1} s",
                left.as_secs_f64()
            )
        },
    )
}

/// Formats a figure, or an empty string for zero.
pub(super) fn unless_zero(before: &str, bytes: Bytes, after: &str) -> String {
    if bytes == Bytes::ZERO {
        String::new()
    } else {
        format!("{before}{bytes}{after}")
    }
}
