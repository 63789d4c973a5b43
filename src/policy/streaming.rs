//! Predicted time of a token with streamed weights.
//!
//! Reading and computing overlap through a ring: readers are ahead of the kernels by at most its length. If both times
//! are similar, neither their sum nor their maximum is accurate. Therefore the passage of the parts through the ring is
//! simulated, part by part in order.

use std::collections::BTreeSet;

use super::{
    residency::{LayerKind, ModelShape},
    speed::Calibration,
};
use cotenant_units::Bytes;

/// State of the ring during the passage.
struct Passage<'a> {
    by: &'a Calibration,
    ring: u64,
    /// Bytes in the ring that are read and not consumed yet.
    ahead: u64,
    now_ns: u64,
}

impl Calibration {
    /// Returns the time for one token of an answer while only `resident` parts are in memory, ns.
    #[must_use]
    pub fn token_ns(&self, shape: &ModelShape, resident: &BTreeSet<u32>) -> u64 {
        self.token_ns_by(shape, resident, &|_| MEAN)
    }

    /// Returns the same if part `n` takes `cost(n)` thousandths of the mean time per MiB.
    #[must_use]
    pub fn token_ns_by(
        &self,
        shape: &ModelShape,
        resident: &BTreeSet<u32>,
        cost: &dyn Fn(u32) -> u64,
    ) -> u64 {
        let mut passage = Passage {
            by: self,
            ring: shape.ring_bytes.get().max(1),
            ahead: 0,
            now_ns: 0,
        };
        let mut before = 0;
        // The first token starts with an empty ring; later ones are in the steady state.
        for _ in 0..TOKENS {
            before = passage.now_ns;
            for (part, index) in shape.layers.iter().zip(0u32..) {
                let bytes = part.token_bytes().get();
                if resident.contains(&index) {
                    passage.compute(bytes, cost(index));
                } else if part.is_streamed() {
                    passage.stream(bytes, cost(index));
                } else if part.kind != LayerKind::Draft {
                    passage.fetch(bytes, cost(index));
                }
            }
        }
        passage.now_ns - before
    }

    /// Learns from an answer with `token_ns` per token and only `resident` parts in memory. The change is attributed to
    /// the slower of reading and computing; the newest value counts a quarter.
    #[must_use]
    pub fn learn(self, shape: &ModelShape, resident: &BTreeSet<u32>, token_ns: u64) -> Self {
        let foretold = self.token_ns(shape, resident).max(1);
        let (all, streamed) = (shape.weights().token, shape.missing(resident).token);
        let (computing, reading) = (
            time_of(all.get(), self.compute_ns_per_mib),
            time_of(streamed.get(), self.read_ns_per_mib),
        );
        // Limits the effect of one outlier.
        let measured = token_ns.clamp(
            foretold / LEARNED_MOST,
            foretold.saturating_mul(LEARNED_MOST),
        );
        let newer = |ns: u64| (ns.saturating_mul(3) + scaled(ns, measured, foretold)) / 4;
        if reading > computing {
            self.with_reading(newer(self.read_ns_per_mib).max(1))
        } else {
            self.with_computing(newer(self.compute_ns_per_mib).max(1))
        }
    }

    /// Returns the calibration for a disk that takes `read_ns_per_mib` while no kernel computes.
    #[must_use]
    pub fn with_reading(self, read_ns_per_mib: u64) -> Self {
        let busy = scaled(
            self.read_busy_ns_per_mib,
            read_ns_per_mib,
            self.read_ns_per_mib,
        );
        Self {
            read_ns_per_mib,
            read_busy_ns_per_mib: busy.max(read_ns_per_mib),
            ..self
        }
    }

    /// Returns the calibration for processors that take `compute_ns_per_mib` while nothing is read.
    #[must_use]
    pub const fn with_computing(self, compute_ns_per_mib: u64) -> Self {
        Self {
            compute_ns_per_mib,
            ..self
        }
    }

    /// Returns tokens per second, in thousandths.
    #[must_use]
    pub fn milli_tokens_per_s(&self, shape: &ModelShape, resident: &BTreeSet<u32>) -> u64 {
        self.milli_tokens_per_s_by(shape, resident, &|_| MEAN)
    }

    /// Returns the same with the costs of [`Self::token_ns_by`].
    #[must_use]
    pub fn milli_tokens_per_s_by(
        &self,
        shape: &ModelShape,
        resident: &BTreeSet<u32>,
        cost: &dyn Fn(u32) -> u64,
    ) -> u64 {
        1_000_000_000_000 / self.token_ns_by(shape, resident, cost).max(1)
    }
}

impl Passage<'_> {
    /// Computes on resident bytes; readers continue as far as there is room.
    fn compute(&mut self, bytes: u64, cost: u64) {
        let alone = scaled(time_of(bytes, self.by.compute_ns_per_mib), cost, MEAN);
        let room = self.ring.saturating_sub(self.ahead);
        let (busy, slowed) = (
            self.by.read_busy_ns_per_mib.max(1),
            self.by.slowed_ns_per_mib,
        );
        // With continuous reading, each ns of computing takes busy / (busy − slowed).
        let stretched = (slowed < busy).then(|| scaled(alone, busy, busy - slowed));
        let read = stretched.map_or(u64::MAX, |time| scaled(time, MIB, busy));
        if read <= room {
            self.ahead += read;
            self.now_ns += stretched.unwrap_or(alone);
        } else {
            self.ahead += room;
            self.now_ns += alone + time_of(room, slowed);
        }
    }

    /// Reads bytes that are known only when they are needed, and computes on them.
    fn fetch(&mut self, bytes: u64, cost: u64) {
        self.now_ns += time_of(bytes, self.by.read_ns_per_mib);
        self.compute(bytes, cost);
    }

    /// Computes on bytes that pass through the ring.
    fn stream(&mut self, bytes: u64, cost: u64) {
        let mut left = bytes;
        while left > 0 {
            let piece = left.min(PIECE).min(self.ring);
            if self.ahead < piece {
                self.now_ns += time_of(piece - self.ahead, self.by.read_ns_per_mib);
                self.ahead = piece;
            }
            self.compute(piece, cost);
            self.ahead -= piece;
            left -= piece;
        }
    }
}

fn time_of(bytes: u64, ns_per_mib: u64) -> u64 {
    scaled(bytes, ns_per_mib, MIB)
}

/// `value · by / of`.
fn scaled(value: u64, by: u64, of: u64) -> u64 {
    u64::try_from(u128::from(value) * u128::from(by) / u128::from(of.max(1))).unwrap_or(u64::MAX)
}

/// Cost of a part with the mean time per MiB.
const MEAN: u64 = 1000;
const MIB: u64 = Bytes::from_mib(1).get();
/// Size of the pieces of streamed parts: 2 MiB is between those of small and large models.
const PIECE: u64 = 2 * MIB;
/// Maximum ratio between measured and predicted time; larger ones are clamped.
const LEARNED_MOST: u64 = 4;
/// Tokens simulated; the last one counts.
const TOKENS: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::residency::sample_shape;

    /// 40 parts of 10 MiB, 10 ms of computing, 100 ms of reading.
    fn shape(ring: u64) -> ModelShape {
        ModelShape {
            ring_bytes: Bytes::from_mib(ring),
            ..sample_shape(40, Bytes::from_mib(10))
        }
    }

    const EVEN: Calibration = Calibration {
        compute_ns_per_mib: 25_000,
        read_ns_per_mib: 250_000,
        read_busy_ns_per_mib: 250_000,
        slowed_ns_per_mib: 0,
        prefill_ns_per_mib: 0,
    };

    fn micros(by: Calibration, ring: u64, streamed: &[u32]) -> u64 {
        let resident = (0..40).filter(|part| !streamed.contains(part)).collect();
        by.token_ns(&shape(ring), &resident) / 1000
    }

    #[test]
    fn it_is_the_slower_of_reading_and_computing_where_they_are_far_apart() {
        assert_eq!(micros(EVEN, 24, &[]), 10_000);
        // 10 MiB of reading are a quarter of the computing.
        assert_eq!(micros(EVEN, 24, &[20]), 10_000);
        let all: Vec<u32> = (0..40).collect();
        let whole = micros(EVEN, 24, &all);
        assert!((100_000..101_000).contains(&whole), "{whole}");
    }

    #[test]
    fn a_small_ring_lets_the_disk_idle_when_streamed_parts_lie_together() {
        let apart = micros(EVEN, 24, &[0, 10, 20, 30]);
        let together = micros(EVEN, 12, &[0, 1, 2, 3]);
        assert!((10_000..10_600).contains(&apart), "{apart}");
        assert!(together > 16_000, "{together}");
        // A ring that holds them all makes them one.
        assert!(micros(EVEN, 40, &[0, 1, 2, 3]) < 11_000);
    }

    #[test]
    fn readers_that_need_a_processor_slow_the_kernels_by_what_is_read() {
        let slowed = Calibration {
            slowed_ns_per_mib: 50_000,
            ..EVEN
        };
        // 10 MiB for each token, wherever they are read.
        let micros = micros(slowed, 24, &[20]);
        assert!((10_450..=10_550).contains(&micros), "{micros}");
    }

    #[test]
    fn another_disk_changes_reading_and_another_processor_computing() {
        let by = Calibration {
            read_busy_ns_per_mib: 300_000,
            ..EVEN
        };
        let disk = by.with_reading(500_000);
        assert_eq!(
            (
                disk.read_ns_per_mib,
                disk.read_busy_ns_per_mib,
                disk.compute_ns_per_mib
            ),
            (500_000, 600_000, 25_000)
        );
        assert_eq!(micros(by.with_computing(50_000), 24, &[]), 20_000);
    }

    /// Prices are computed by the longer of computing and reading, for any number of layers at once.
    #[test]
    fn the_time_that_prices_reckon_with_is_near_that_of_the_passage() {
        let mut order: Vec<u32> = (0..40).collect();
        order.sort_by_key(|part| part.reverse_bits());
        for (compute_ns_per_mib, read) in [(25_000, 250_000), (100_000, 488_000), (18_700, 488_000)]
        {
            let by = Calibration {
                compute_ns_per_mib,
                read_ns_per_mib: read,
                read_busy_ns_per_mib: read,
                ..EVEN
            };
            // Rings that hold a part, and some of it.
            for ring in [24, 4] {
                for streamed in 0..=40 {
                    let passage = micros(by, ring, &order[..streamed]);
                    let streamed = streamed as u64;
                    let exposed = Bytes::from_mib(streamed * 10u64.saturating_sub(ring));
                    let streamed = Bytes::from_mib(streamed * 10);
                    let priced = by.token_us(Bytes::from_mib(400), (streamed, exposed));
                    let off = priced.abs_diff(passage);
                    assert!(
                        off <= passage / 10,
                        "{ring} {streamed}: {priced} of {passage}"
                    );
                }
            }
        }
    }

    #[test]
    fn answers_teach_the_speed_of_what_took_longest() {
        let shape = shape(24);
        for streamed in [0, 1, 10, 40] {
            let resident: BTreeSet<u32> = (streamed..40).collect();
            // The machine as it is now is slower than what was measured, in the disk or in the processors.
            let now = if streamed < 4 {
                EVEN.with_computing(40_000)
            } else {
                EVEN.with_reading(400_000)
            };
            let truth = now.token_ns(&shape, &resident);
            let mut by = EVEN;
            for _ in 0..40 {
                by = by.learn(&shape, &resident, truth);
            }
            let off = by.token_ns(&shape, &resident).abs_diff(truth);
            assert!(off < truth / 50, "{streamed}: {off} of {truth}");
            assert!(
                EVEN.learn(&shape, &resident, u64::MAX)
                    .token_ns(&shape, &resident)
                    < 2 * truth
            );
            assert!(EVEN.learn(&shape, &resident, 0).token_ns(&shape, &resident) > 0);
        }
    }

    #[test]
    fn more_in_memory_is_never_slower() {
        let by = Calibration {
            slowed_ns_per_mib: 40_000,
            read_busy_ns_per_mib: 300_000,
            ..EVEN
        };
        let mut order: Vec<u32> = (0..40).collect();
        order.sort_by_key(|part| part.reverse_bits());
        let times: Vec<u64> = (0..=40)
            .map(|streamed| micros(by, 24, &order[..streamed]))
            .collect();
        assert!(times.is_sorted(), "{times:?}");
    }
}
