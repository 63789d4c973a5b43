//! Bound on the price of a byte: the wait of users that a pressure level may cause.
//!
//! Beyond the price of a plan stands that of not shedding: at Elevated nothing is lost yet, at Critical the kernel drops
//! pages that are read again, below the last resort it ends a process. So Elevated gives up only KV that no answer uses,
//! Critical pays for layers what reading them is worth, and the last resort pays anything.

use super::{params::PressureParams, pressure::Pressure, speed::Speed};
use cotenant_units::Bytes;

/// The pay for the bytes that are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pay {
    level: Level,
    missing: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Elevated,
    Critical,
    LastResort,
}

impl Pay {
    /// By the last sample: Critical counts from when it is ahead within the grace.
    pub(super) fn now(pressure: &Pressure, limits: &PressureParams, missing: Bytes) -> Self {
        let is_last = |headroom| headroom < limits.last_resort_below;
        let level = if pressure.headroom().is_some_and(is_last) {
            Level::LastResort
        } else if pressure.is_urgent() {
            Level::Critical
        } else {
            Level::Elevated
        };
        Self { level, missing }
    }

    pub(super) const fn at_elevated(missing: Bytes) -> Self {
        let level = Level::Elevated;
        Self { level, missing }
    }

    pub(super) const fn at_critical(missing: Bytes) -> Self {
        let level = Level::Critical;
        Self { level, missing }
    }

    /// The same below the last resort.
    pub(super) const fn unbounded(self) -> Self {
        Self {
            level: Level::LastResort,
            ..self
        }
    }

    /// Whether an answer may become slower, and lose what it can do without.
    pub(super) fn is_serious(self) -> bool {
        self.level > Level::Elevated
    }

    /// Whether even work that is under way may be ended.
    pub(super) fn is_unbounded(self) -> bool {
        self.level == Level::LastResort
    }

    /// Whether layers that give `bytes` may cost `price_us`; what they give beyond what is missing counts for nothing.
    pub(super) fn affords(self, price_us: u64, bytes: Bytes, speed: Speed) -> bool {
        let worth = speed.reading_us(bytes.min(self.missing));
        self.is_unbounded() || (self.is_serious() && price_us <= worth.saturating_mul(READS))
    }
}

/// How often a byte may be read again for one that comes back at Critical. Layers that are large beside the staging ring
/// cost 57 reads: an answer, the chunks of its prompts, and once to bring them back. A model that fell from 2300 to 57
/// tokens/s for 4.7 MiB paid 410, at 0.5 ms for each MiB. The bound between them is our choice.
const READS: u64 = 256;
