//! From samples to a pressure level: watermarks, hysteresis and dwell.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Timestamp};

/// How short memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PressureLevel {
    /// Headroom above the upper watermark.
    #[default]
    Normal,
    /// Below the upper watermark: nothing optional grows, and something is shed.
    Elevated,
    /// Below the lower watermark: shed at once.
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

/// One reading of the machine. What is not there is `None`, which is neither zero nor plenty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// When it was read.
    pub taken_at: Timestamp,
    /// `MemTotal`.
    pub mem_total: Bytes,
    /// `MemAvailable`.
    pub mem_available: Bytes,
    /// `MemFree`.
    pub mem_free: Bytes,
    /// `CmaFree`; memory that user pages may borrow and the GPU can never have.
    pub cma_free: Option<Bytes>,
    /// Pages that the nvmap pool keeps for the next GPU allocation.
    pub nvmap_pool: Option<Bytes>,
    /// Memory used by all processes that share the budget, where the budget is for a session and not for the machine.
    pub scope_used: Option<Bytes>,
    /// PSI memory `some`, `avg10`, in hundredths of a percent.
    pub psi_some_avg10: Option<u32>,
    /// PSI memory `some`, total stall so far, µs.
    pub psi_some_total_us: Option<u64>,
    /// PSI memory `full`, total stall so far, µs.
    pub psi_full_total_us: Option<u64>,
    /// `workingset_refault_file` so far, pages.
    pub refaults_file: Option<u64>,
    /// `pgscan_direct` so far, pages.
    pub pgscan_direct: Option<u64>,
    /// Sum of `allocstall_*` so far.
    pub allocstalls: Option<u64>,
    /// `pswpin` so far, pages.
    pub swap_ins: Option<u64>,
    /// `oom_kill` so far.
    pub oom_kills: Option<u64>,
}
