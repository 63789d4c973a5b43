//! Levels of memory pressure.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Severity of a memory shortage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PressureLevel {
    /// Headroom above the upper watermark.
    #[default]
    Normal,
    /// Below the upper watermark: optional memory does not grow, and some is shed.
    Elevated,
    /// Below the lower watermark: memory is shed at once.
    Critical,
}

impl fmt::Display for PressureLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Normal => "Normal",
            Self::Elevated => "Elevated",
            Self::Critical => "Critical",
        })
    }
}
