//! Decisions about shortage and growth.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    policy::{growth_wait::GrowthWait, pressure_level::PressureLevel},
    units::{Bytes, Tokens},
};

/// A decision about shortage and growth.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrowthDecision {
    /// Memory that had grown back was shed again soon, so that the dwell is longer from now on.
    BackedOff {
        /// How long it had stayed.
        stayed: Duration,
        /// From now on.
        dwell: Duration,
    },
    /// A client wants more KV capacity than can be had now.
    CapacityWithheld {
        wanted: Tokens,
        /// What the engine is asked to hold.
        present: Tokens,
        wait: GrowthWait,
    },
    /// Nothing more is shed that would make the engine slower, until Critical is ahead.
    EngineSpared { level: PressureLevel },
    /// Nothing is left to shed.
    NothingLeft {
        level: PressureLevel,
        unaccounted: Bytes,
        /// Of the supervisor itself, where that is known.
        own: Option<Bytes>,
    },
}
