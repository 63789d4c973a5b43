//! Reason for which growth waits, with its figures.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use super::pressure_level::PressureLevel;
use crate::units::Bytes;

/// What growth waits for, with its figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "wait")]
pub enum GrowthWait {
    /// Nothing is loaded that could grow.
    NotLoaded,
    /// The supervisor drains.
    Draining,
    /// The level is not Normal.
    Pressure {
        /// The level.
        level: PressureLevel,
    },
    /// Requests wait for memory.
    Requests {
        /// How many.
        waiting: u32,
    },
    /// The last sample is older than the last change of what is held.
    Sample,
    /// The dwell after the last shed.
    Dwell {
        /// What is left of it.
        left: Duration,
    },
    /// The engine carries out a plan.
    Changing,
    /// The last change has to settle, or has failed.
    Settling {
        /// For how long.
        left: Duration,
    },
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
            _ => None,
        }
    }
}

impl fmt::Display for GrowthWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotLoaded => f.write_str("the engine is not loaded"),
            Self::Draining => f.write_str("the supervisor is draining"),
            Self::Pressure { level } => write!(f, "pressure is {level}"),
            Self::Requests { waiting: 1 } => f.write_str("1 request waits for memory"),
            Self::Requests { waiting } => write!(f, "{waiting} requests wait for memory"),
            Self::Sample => f.write_str("no sample is newer than the last change"),
            Self::Dwell { left } => write!(f, "the dwell after the last shed ends in {:.1} s", left.as_secs_f64()),
            Self::Changing => f.write_str("a change is under way"),
            Self::Settling { left } => write!(f, "the last change settles for {:.1} s more", left.as_secs_f64()),
            Self::Headroom {
                needs,
                has,
                elevated,
                hysteresis,
                reserved,
                step,
            } => {
                write!(
                    f,
                    "needs {needs} headroom, has {has} (Elevated {elevated} + hysteresis {hysteresis}"
                )?;
                if *reserved > Bytes::ZERO {
                    write!(f, " + {reserved} for workers")?;
                }
                write!(f, " + {step} for the next step)")
            }
            Self::Budget { needs, free, reserved } => {
                write!(f, "needs {needs} of the budget, {free} is free")?;
                if *reserved > Bytes::ZERO {
                    write!(f, " and {reserved} of that is reserved for workers")?;
                }
                Ok(())
            }
        }
    }
}
