//! Bound on the price of a byte: the wait of users that a pressure level may cause.
//!
//! Beyond the price of a plan stands that of not shedding: at Elevated nothing is lost yet, at Critical the kernel drops
//! pages that are read again, below the last resort it ends a process. So Elevated gives up only KV that no answer uses,
//! Critical pays for layers what reading them is worth, and for workers; the last resort pays anything.

use super::{params::PressureParams, pressure::Pressure, speed::Calibration};
use cotenant_units::Bytes;

/// The pay for the bytes that are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pay {
    pub(super) level: Level,
    missing: Bytes,
}

/// How much is paid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    /// Only what no answer uses.
    Elevated,
    /// An answer may become slower, and lose what it can do without: Critical is ahead within the grace, or was reached and
    /// dwells.
    Urgent,
    /// Holders that are more urgent than the engine give, too.
    Critical,
    /// Even work that is under way may be ended.
    LastResort,
}

impl Pay {
    pub(super) const fn new(level: Level, missing: Bytes) -> Self {
        Self { level, missing }
    }

    /// By the last sample.
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

    /// The same below the last resort.
    pub(super) const fn unbounded(self) -> Self {
        Self::new(Level::LastResort, self.missing)
    }

    /// Whether an answer may become slower, and lose what it can do without.
    pub(super) fn is_serious(self) -> bool {
        self.level > Level::Elevated
    }

    /// Whether layers that give `bytes` may cost `price_us`; what they give beyond what is missing counts for nothing.
    pub(super) fn affords(self, price_us: u64, bytes: Bytes, speed: Calibration) -> bool {
        let worth = speed.reading_us(bytes.min(self.missing));
        self.level == Level::LastResort
            || (self.is_serious() && price_us <= worth.saturating_mul(READS))
    }
}

/// How often a byte may be read again for one that comes back at Critical. Layers that are large beside the staging ring
/// cost 57 reads: an answer, the chunks of its prompts, and once to bring them back. A model that fell from 2300 to 57
/// tokens/s for 4.7 MiB paid 410, at 0.5 ms for each MiB. The bound between them is our choice.
const READS: u64 = 256;
