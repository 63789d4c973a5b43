//! The kernel's own signs of pressure: stalls, refaults, swap-ins, refused contiguous memory.
//!
//! Other tenants of the machine cause such signs too, so that where headroom is plentiful they say nothing.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{PressureLevel, Sample, trend::to_u64};
use crate::reason::{Confirmation, LevelReason};
use cotenant_units::{Bytes, Timestamp};

/// Signs that count once they have lasted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Signals {
    /// Since when every sample shows file pages that are read again.
    refaulting_since: Option<Timestamp>,
    /// Samples in a row that show allocations that stalled.
    stalls_in_a_row: u32,
    /// Whether the last sample showed Critical.
    critical_by_signs: bool,
}

/// Growth of the kernel's counters between two samples; nothing for one that is not there, or has gone back.
pub(super) struct Signs {
    since: Timestamp,
    pub(super) took_us: u64,
    /// Headroom that was lost.
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

    /// `count` in `unit` of time, µs.
    pub(super) fn per(&self, unit: u64, count: u64) -> u64 {
        to_u64(u128::from(count) * u128::from(unit) / u128::from(self.took_us))
    }

    /// A sign other than the headroom that confirms it.
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
    /// The level that the signs stand for where headroom is not plentiful, below `elevated` or twice that.
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
        // The kernel counts for the whole machine. What stalls others says nothing of a session while the machine has plenty.
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

    /// Whether the last sample showed Critical.
    pub(super) const fn is_critical(&self) -> bool {
        self.critical_by_signs
    }
}

const SECOND_US: u64 = 1_000_000;
/// The part of the machine's memory, as a divisor, that is plenty for a session on it: an eighth, which is what the upper
/// watermark leaves of a whole machine.
const SESSION_PLENTY: u64 = 8;
/// lmkd takes 700 ms of full stall within 1 s for critical.
const PSI_FULL_PER_MILLE: u64 = 700;
/// lmkd takes some 70 ms of stall within 1 s for a sign of pressure.
const PSI_SOME_PER_MILLE: u64 = 70;
/// Over less than this a single stall looks like many.
const PSI_LEAST_US: u64 = 100_000;
/// Two samples in a row with stalls are Critical on a board whose GPU allocations reclaim by themselves.
const STALLS_IN_A_ROW: u32 = 2;
/// How long file pages have to be read again until that counts.
const REFAULTS_FOR: Duration = Duration::from_secs(3);
/// A board in thrash swapped in 0.2 to 6 MB/s: 50 pages/s is where that begins.
const SWAP_INS_PER_S: u64 = 50;
/// 5000 pages/s (20 MB/s) of the page cache read again: the working set does not fit.
const REFAULTS_PER_S: u64 = 5000;
