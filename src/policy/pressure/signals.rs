//! Kernel signals of memory pressure: stalls, refaults, swap-ins, failed CMA allocations.
//!
//! Other tenants of the machine cause them too, so they are ignored while headroom is ample.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{PressureLevel, Sample, trend::to_u64};
use crate::reason::{Confirmation, LevelReason};
use cotenant_units::{Bytes, Timestamp};

/// Signals that count only if they last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Signals {
    /// Start of the uninterrupted series of samples with refaults of file pages.
    refaulting_since: Option<Timestamp>,
    /// Consecutive samples with stalled allocations.
    stalls_in_a_row: u32,
    /// Whether the signals of the last sample indicated Critical.
    critical_by_signs: bool,
}

/// Increase of kernel counters between two samples; 0 for a counter that is missing or has decreased.
pub(super) struct Signs {
    since: Timestamp,
    pub(super) took_us: u64,
    /// Loss of headroom.
    pub(super) lost: Bytes,
    refaults: u64,
    stalls: u64,
    scans: u64,
    swap_ins: u64,
    cma_refused: u64,
    some_us: u64,
    full_us: u64,
}

impl Signs {
    pub(super) fn between(before: &Sample, now: &Sample, lost: Bytes) -> Self {
        let grown = |of: fn(&Sample) -> Option<u64>| {
            let grown = of(now).zip(of(before));
            grown.map_or(0, |(now, before)| now.saturating_sub(before))
        };
        let took = now.taken_at.saturating_since(before.taken_at);
        Self {
            since: before.taken_at,
            took_us: to_u64(took.as_micros().max(1)),
            lost,
            refaults: grown(|sample| sample.counters.refaults_file),
            stalls: grown(|sample| sample.counters.allocstalls),
            scans: grown(|sample| sample.counters.pgscan_direct),
            swap_ins: grown(|sample| sample.counters.swap_ins),
            cma_refused: grown(|sample| sample.counters.cma_failures),
            some_us: grown(|sample| sample.stalls.psi_some_total_us),
            full_us: grown(|sample| sample.stalls.psi_full_total_us),
        }
    }

    /// Converts `count` to a rate per `unit`, µs.
    pub(super) fn per(&self, unit: u64, count: u64) -> u64 {
        to_u64(u128::from(count) * u128::from(unit) / u128::from(self.took_us))
    }

    /// Returns a signal other than headroom that confirms pressure.
    pub(super) fn confirmation(&self) -> Option<Confirmation> {
        let (of_us, took_ms) = (self.took_us, self.took_us / 1000);
        if self.per(1000, self.some_us) >= PSI_SOME_PER_MILLE {
            let stalled_us = self.some_us;
            Some(Confirmation::Stalled { stalled_us, of_us })
        } else if self.stalls > 0 {
            Some(Confirmation::Stalls { count: self.stalls })
        } else if self.scans > 0 {
            Some(Confirmation::Scans { pages: self.scans })
        } else if self.per(SECOND_US, self.swap_ins) >= SWAP_INS_PER_S {
            let pages = self.swap_ins;
            Some(Confirmation::SwapIns { pages, took_ms })
        } else if self.per(SECOND_US, self.refaults) >= REFAULTS_PER_S {
            let pages = self.refaults;
            Some(Confirmation::Refaults { pages, took_ms })
        } else {
            None
        }
    }
}

impl Signals {
    /// Returns the level that the signals indicate while headroom is below `elevated`, or below twice that.
    pub(super) fn observe(
        &mut self,
        signs: &Signs,
        sample: &Sample,
        headroom: Bytes,
        elevated: Bytes,
    ) -> Option<(PressureLevel, LevelReason)> {
        let per_s = signs.per(SECOND_US, signs.refaults);
        self.refaulting_since =
            (per_s >= REFAULTS_PER_S).then(|| self.refaulting_since.unwrap_or(signs.since));
        let stalled = signs.stalls > 0 || signs.scans > 0;
        self.stalls_in_a_row = if stalled {
            self.stalls_in_a_row.saturating_add(1)
        } else {
            0
        };
        let found = self.judge(signs, sample, headroom, elevated);
        self.critical_by_signs = matches!(found, Some((PressureLevel::Critical, _)));
        found
    }

    fn judge(
        &self,
        signs: &Signs,
        sample: &Sample,
        headroom: Bytes,
        elevated: Bytes,
    ) -> Option<(PressureLevel, LevelReason)> {
        // The counters cover the whole machine: stalls of other processes do not affect a session while the machine has
        // ample memory.
        let plenty = Bytes::new(sample.memory.mem_total.get() / SESSION_PLENTY);
        if sample.scope_used.is_some() && sample.available() >= plenty {
            return None;
        }
        let watermark = elevated;
        if headroom < elevated {
            let per_mille = signs.per(1000, signs.full_us);
            if per_mille >= PSI_FULL_PER_MILLE && signs.took_us >= PSI_LEAST_US {
                let (stalled_us, of_us) = (signs.full_us, signs.took_us);
                let reason = LevelReason::AllStalled {
                    headroom,
                    watermark,
                    stalled_us,
                    of_us,
                };
                return Some((PressureLevel::Critical, reason));
            }
            if self.stalls_in_a_row >= STALLS_IN_A_ROW {
                let (stalls, scans) = (signs.stalls, signs.scans);
                let reason = LevelReason::StallsAgain {
                    headroom,
                    watermark,
                    stalls,
                    scans,
                };
                return Some((PressureLevel::Critical, reason));
            }
        }
        if headroom >= elevated.saturating_mul(2) {
            return None;
        }
        let reason = if signs.cma_refused > 0 {
            LevelReason::CmaRefused {
                headroom,
                refused: signs.cma_refused,
            }
        } else {
            let lasted = sample.taken_at.saturating_since(self.refaulting_since?);
            if lasted < REFAULTS_FOR {
                return None;
            }
            let per_s = signs.per(SECOND_US, signs.refaults);
            LevelReason::Refaults {
                headroom,
                per_s,
                lasted,
            }
        };
        Some((PressureLevel::Elevated, reason))
    }

    /// Returns whether the signals of the last sample indicated Critical.
    pub(super) const fn is_critical(&self) -> bool {
        self.critical_by_signs
    }
}

const SECOND_US: u64 = 1_000_000;
/// Divisor for the part of the machine's memory that is ample for a session: an eighth, the part that the upper
/// watermark leaves of a whole machine.
const SESSION_PLENTY: u64 = 8;
/// lmkd classifies 700 ms of full stall within 1 s as critical.
const PSI_FULL_PER_MILLE: u64 = 700;
/// lmkd classifies 70 ms of partial stall within 1 s as pressure.
const PSI_SOME_PER_MILLE: u64 = 70;
/// Shortest interval for a rate: in a shorter one, a single stall looks like many.
const PSI_LEAST_US: u64 = 100_000;
/// Consecutive samples with stalls that make Critical, on a board whose GPU allocations reclaim memory directly.
const STALLS_IN_A_ROW: u32 = 2;
/// Duration of refaults before they count.
const REFAULTS_FOR: Duration = Duration::from_secs(3);
/// Pages per second: a thrashing board swapped in 0.2 to 6 MB/s, so thrashing begins at about 50 pages/s.
const SWAP_INS_PER_S: u64 = 50;
/// Pages per second (20 MB/s) of page cache read again: the working set does not fit.
const REFAULTS_PER_S: u64 = 5000;
