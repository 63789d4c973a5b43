//! Advice to reboot, for memory that only a reboot recovers.
//!
//! ```text
//!   not advised ── seen for 10 min ──► advised ── not seen for 10 min ──► not advised
//! ```
//!
//! A failed reading is neither: the advice stays as it is.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    pressure::{GpuUse, Sample},
    pressure_level::PressureLevel,
};
use cotenant_units::{Bytes, Timestamp};

/// A state of the machine that only a reboot ends, with the figures of the last sample showing it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum RebootReason {
    /// GPU memory is allocated without a process that holds it.
    #[error("no process holds {bytes} of the {of} that the GPU has")]
    OrphanedGpuMemory { bytes: Bytes, of: Bytes },
    /// The kernel repeatedly refuses contiguous memory while memory is plentiful.
    #[error("the kernel refused contiguous memory {refusals} times though memory is plentiful")]
    ContiguousRefused { refusals: u64 },
    /// Free memory is fragmented into blocks too small for drivers.
    #[error("the largest free block has {largest} with {free} free")]
    Fragmented { free: Bytes, largest: Bytes },
}

impl RebootReason {
    /// Returns its identifier: `orphaned_gpu_memory`, `contiguous_refused`, `fragmented`.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::OrphanedGpuMemory { .. } => "orphaned_gpu_memory",
            Self::ContiguousRefused { .. } => "contiguous_refused",
            Self::Fragmented { .. } => "fragmented",
        }
    }

    /// The identifiers of all reasons.
    pub const WORDS: [&'static str; 3] =
        ["orphaned_gpu_memory", "contiguous_refused", "fragmented"];
}

/// Present and pending advice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RebootAdvice {
    orphaned: Watched,
    contiguous: Watched,
    fragmented: Watched,
    refusals: Option<Refusals>,
}

/// Counter of refused contiguous allocations, with the current series.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Refusals {
    count: u64,
    /// Count before the series.
    before: u64,
    /// Time of the last increase.
    risen_at: Timestamp,
}

/// One reason, watched over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Watched {
    advised: Option<RebootReason>,
    /// Time since which the state contradicts the advice.
    turning_since: Option<Timestamp>,
}

/// A change of the advice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Changed {
    Advised(RebootReason),
    NotAdvised(RebootReason),
}

impl Watched {
    /// Records the finding of a sample; returns a change of the advice.
    fn observe(&mut self, seen: Option<RebootReason>, now: Timestamp) -> Option<Changed> {
        if self.advised.is_some() == seen.is_some() {
            (self.advised, self.turning_since) = (seen, None);
            return None;
        }
        let since = *self.turning_since.get_or_insert(now);
        if now.saturating_since(since) < HELD_FOR {
            return None;
        }
        self.turning_since = None;
        let before = std::mem::replace(&mut self.advised, seen);
        seen.map(Changed::Advised)
            .or(before.map(Changed::NotAdvised))
    }
}

impl RebootAdvice {
    /// Returns the reasons for which a reboot is advised.
    pub(super) fn reasons(&self) -> impl Iterator<Item = RebootReason> {
        [self.orphaned, self.contiguous, self.fragmented]
            .into_iter()
            .filter_map(|watched| watched.advised)
    }

    /// Records a sample and the resulting level; returns the changes of the advice.
    pub(super) fn observe(
        &mut self,
        sample: &Sample,
        level: PressureLevel,
    ) -> impl Iterator<Item = Changed> + use<> {
        let now = sample.taken_at;
        let orphaned = sample.gpu.gpu_orphaned.and_then(|bytes| {
            let bound = ORPHANED_LEAST.max(sample.memory.mem_total.per_mille(ORPHANED_PER_MILLE));
            let bound = lower_where(self.orphaned.advised, bound);
            let of = sample.gpu.gpu_used.map_or(bytes, GpuUse::bytes);
            let seen = (bytes > bound).then_some(RebootReason::OrphanedGpuMemory { bytes, of });
            self.orphaned.observe(seen, now)
        });
        let contiguous = sample.counters.cma_failures.and_then(|count| {
            let seen = self.refused(count, level, now);
            self.contiguous.observe(seen, now)
        });
        let fragmented = sample.largest_free.and_then(|largest| {
            let free = sample.free_without_reclaim();
            let plenty = lower_where(self.fragmented.advised, PLENTY_FREE);
            let seen = (largest < SMALL_BLOCK && free > plenty)
                .then_some(RebootReason::Fragmented { free, largest });
            self.fragmented.observe(seen, now)
        });
        [orphaned, contiguous, fragmented].into_iter().flatten()
    }

    fn refused(
        &mut self,
        count: u64,
        level: PressureLevel,
        now: Timestamp,
    ) -> Option<RebootReason> {
        let known = self.refusals.get_or_insert(Refusals {
            count,
            before: count,
            risen_at: now,
        });
        let goes_on = now.saturating_since(known.risen_at) < REFUSED_EACH;
        if count > known.count {
            if !goes_on {
                known.before = known.count;
            }
            (known.count, known.risen_at) = (count, now);
        }
        let lately = now.saturating_since(known.risen_at) < REFUSED_EACH;
        let refusals = known.count.saturating_sub(known.before);
        (lately && refusals > 0 && level == PressureLevel::Normal)
            .then_some(RebootReason::ContiguousRefused { refusals })
    }
}

/// Returns the bound, halved while the advice stands, as hysteresis.
const fn lower_where(advised: Option<RebootReason>, bound: Bytes) -> Bytes {
    match advised {
        Some(_) => Bytes::new(bound.get() / 2),
        None => bound,
    }
}

/// Time for which a state must last. Processes that end release their memory within seconds; our choice.
const HELD_FOR: Duration = Duration::from_secs(600);
/// Minimum orphaned memory: about the size of a small speech model. Our choice.
const ORPHANED_LEAST: Bytes = Bytes::from_mib(256);
/// The same as a part of the machine's memory, for larger boards. Our choice.
const ORPHANED_PER_MILLE: u32 = 50;
/// Maximum interval between refusals of a series. Our choice.
const REFUSED_EACH: Duration = Duration::from_secs(120);
/// Without a block of this size, nvmap maps pages one by one and drivers get no buffers (its big pages; `nvmap_pp.c`).
const SMALL_BLOCK: Bytes = Bytes::from_kib(64);
/// Free memory above which small blocks mean fragmentation. Our choice.
const PLENTY_FREE: Bytes = Bytes::from_mib(512);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pressure::{GpuReading, KernelCounters, MemoryReading};

    fn at(second: u64) -> Timestamp {
        Timestamp::from_millis(second * 1000)
    }

    fn board(second: u64) -> Sample {
        Sample {
            taken_at: at(second),
            memory: MemoryReading {
                mem_total: Bytes::from_gib(16),
                mem_free: Bytes::from_gib(4),
                ..MemoryReading::default()
            },
            largest_free: Some(Bytes::from_mib(4)),
            counters: KernelCounters {
                cma_failures: Some(7),
                ..KernelCounters::default()
            },
            gpu: GpuReading {
                gpu_used: Some(GpuUse::Counted(Bytes::from_gib(3))),
                gpu_orphaned: Some(Bytes::ZERO),
                ..GpuReading::default()
            },
            ..Sample::default()
        }
    }

    fn orphaned(second: u64, mib: u64) -> Sample {
        Sample {
            gpu: GpuReading {
                gpu_orphaned: Some(Bytes::from_mib(mib)),
                ..board(second).gpu
            },
            ..board(second)
        }
    }

    fn changes(advice: &mut RebootAdvice, sample: &Sample) -> Vec<Changed> {
        advice.observe(sample, PressureLevel::Normal).collect()
    }

    #[test]
    fn orphaned_gpu_memory_is_advised_after_ten_minutes_and_not_any_more_ten_minutes_after_it_has_gone()
     {
        let mut advice = RebootAdvice::default();
        // 5 % of 16 GiB is 819 MiB.
        assert_eq!(changes(&mut advice, &orphaned(0, 900)), []);
        assert_eq!(
            changes(&mut advice, &orphaned(300, 800)),
            [],
            "it fell below the bound"
        );
        assert_eq!(changes(&mut advice, &orphaned(301, 900)), []);
        assert_eq!(changes(&mut advice, &orphaned(900, 900)), []);
        let reason = RebootReason::OrphanedGpuMemory {
            bytes: Bytes::from_mib(910),
            of: Bytes::from_gib(3),
        };
        assert_eq!(
            changes(&mut advice, &orphaned(901, 910)),
            [Changed::Advised(reason)]
        );
        assert_eq!(advice.reasons().collect::<Vec<_>>(), [reason]);
        // Half of the bound has to be reached, and what cannot be read changes nothing.
        assert_eq!(changes(&mut advice, &orphaned(2000, 500)), []);
        assert_eq!(changes(&mut advice, &Sample::default()), []);
        assert_eq!(changes(&mut advice, &orphaned(2001, 100)), []);
        assert_eq!(changes(&mut advice, &orphaned(2600, 100)), []);
        assert!(matches!(
            changes(&mut advice, &orphaned(2601, 100))[..],
            [Changed::NotAdvised(_)]
        ));
        assert_eq!(advice.reasons().count(), 0);
    }

    #[test]
    fn refusals_of_contiguous_memory_are_advised_where_they_go_on_though_memory_is_plentiful() {
        let refused = |second, count| Sample {
            counters: KernelCounters {
                cma_failures: Some(count),
                ..board(second).counters
            },
            ..board(second)
        };
        let mut advice = RebootAdvice::default();
        for second in (0..600).step_by(60) {
            assert_eq!(changes(&mut advice, &refused(second, 7 + second / 60)), []);
        }
        assert_eq!(changes(&mut advice, &refused(655, 17)), []);
        let reason = RebootReason::ContiguousRefused { refusals: 11 };
        assert_eq!(
            changes(&mut advice, &refused(660, 18)),
            [Changed::Advised(reason)]
        );
        // Under pressure refusals are no news.
        let mut short = RebootAdvice::default();
        for second in (0..1200).step_by(60) {
            let sample = refused(second, second);
            assert_eq!(short.observe(&sample, PressureLevel::Elevated).count(), 0);
        }
        // A single one is forgotten.
        let mut once = RebootAdvice::default();
        for second in (0..2000).step_by(10) {
            assert_eq!(
                changes(&mut once, &refused(second, 7 + u64::from(second > 50))),
                []
            );
        }
    }

    #[test]
    fn free_memory_without_a_block_for_drivers_is_advised() {
        let pieces = |second, kib, mib| Sample {
            largest_free: Some(Bytes::from_kib(kib)),
            memory: MemoryReading {
                mem_free: Bytes::from_mib(mib),
                ..board(second).memory
            },
            ..board(second)
        };
        let mut advice = RebootAdvice::default();
        assert_eq!(changes(&mut advice, &pieces(0, 32, 100)), []);
        assert_eq!(
            changes(&mut advice, &pieces(700, 32, 600)),
            [],
            "little was free before"
        );
        assert!(matches!(
            changes(&mut advice, &pieces(1300, 32, 600))[..],
            [Changed::Advised(RebootReason::Fragmented { .. })]
        ));
        assert_eq!(changes(&mut advice, &pieces(1301, 4096, 600)), []);
    }

    #[test]
    fn each_reason_has_its_word() {
        let mib = Bytes::from_mib(1);
        let all = [
            RebootReason::OrphanedGpuMemory {
                bytes: mib,
                of: mib,
            },
            RebootReason::ContiguousRefused { refusals: 1 },
            RebootReason::Fragmented {
                free: mib,
                largest: mib,
            },
        ];
        assert_eq!(all.map(RebootReason::word), RebootReason::WORDS);
        for reason in all {
            assert!(
                serde_json::to_string(&reason)
                    .unwrap()
                    .contains(reason.word())
            );
        }
    }
}
