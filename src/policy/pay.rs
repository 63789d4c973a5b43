//! Bound on the price of a byte: the wait of users that a pressure level may cause.
//!
//! Besides the price of a plan there is that of not shedding: at Elevated nothing is lost yet, at Critical the kernel
//! drops pages that are read again, below the last resort it kills a process. Therefore Elevated gives up only KV that
//! no answer uses, Critical pays the reading cost for layers, and stops workers; the last resort pays any price.

use super::{params::PressureParams, pressure::Pressure, speed::Calibration};
use cotenant_units::Bytes;

/// Permitted price for the missing bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pay {
    pub(super) level: Level,
    missing: Bytes,
}

/// Levels of the permitted price.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    /// Only memory that no answer uses.
    Elevated,
    /// An answer may become slower and lose dispensable memory: Critical is predicted within the grace, or was reached
    /// and its dwell lasts.
    Urgent,
    /// Also holders more urgent than the engine.
    Critical,
    /// Also work in progress.
    LastResort,
}

impl Pay {
    pub(super) const fn new(level: Level, missing: Bytes) -> Self {
        Self { level, missing }
    }

    /// Returns the pay for the last sample.
    pub(super) fn now(pressure: &Pressure, limits: &PressureParams, missing: Bytes) -> Self {
        let is_last = |headroom| headroom < limits.last_resort_below;
        let level = if !pressure.is_urgent() {
            Level::Elevated
        } else if !pressure.is_critical_now() {
            Level::Urgent
        } else if !pressure.headroom().is_some_and(is_last) {
            Level::Critical
        } else {
            Level::LastResort
        };
        Self { level, missing }
    }

    /// Returns the pay below the last resort.
    pub(super) const fn unbounded(self) -> Self {
        Self::new(Level::LastResort, self.missing)
    }

    /// Whether an answer may become slower and lose dispensable memory.
    pub(super) fn is_serious(self) -> bool {
        self.level > Level::Elevated
    }

    /// Whether layers that give `bytes` may cost `price_us`; bytes beyond the missing ones count nothing.
    pub(super) fn affords(self, price_us: u64, bytes: Bytes, speed: Calibration) -> bool {
        let worth = speed.reading_us(bytes.min(self.missing));
        self.level == Level::LastResort
            || (self.is_serious() && price_us <= worth.saturating_mul(READS))
    }
}

/// Maximum price of a byte freed at Critical, in reads of it. Layers that are large compared with the staging ring cost
/// 57: an answer, the chunks of its prompts, and one to restore them. A model that fell from 2300 to 57 tokens/s for
/// 4.7 MiB paid 410, at 0.5 ms per MiB. The bound between them is our choice.
const READS: u64 = 256;
