//! Speed of the engine, for prices in time.
//!
//! One token takes the longer of computing and reading: the weights are computed on, and those that are not resident are
//! read meanwhile; `streaming` computes the passage of the parts through the ring, and differs by little. Both times are
//! kept for each MiB of weights, since they grow with those; figures of the field stand in until the engine has measured its own.

use serde::{Deserialize, Serialize};

use cotenant_units::{Bytes, Tokens};

/// Times of the engine for each MiB of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Speed {
    /// To compute one token of an answer, ns for each MiB of weights.
    pub decode_ns_per_mib: u64,
    /// To read one token of a prompt, ns for each MiB of weights.
    pub prefill_ns_per_mib: u64,
    /// To read streamed weights, ns for each MiB.
    pub read_ns_per_mib: u64,
    /// Loss of computing by each MiB that is read meanwhile, ns.
    #[serde(default)]
    pub slowed_ns_per_mib: u64,
}

impl Default for Speed {
    fn default() -> Self {
        Self::FIELD
    }
}

/// One answer as the engine timed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// Tokens of the prompt that were computed.
    pub prompt_tokens: Tokens,
    /// Time for them, µs.
    pub prompt_us: u64,
    /// Tokens of the answer.
    pub answer_tokens: Tokens,
    /// Time for them, µs.
    pub answer_us: u64,
}

impl Timing {
    /// Time for each token of the answer, ns; `None` for one that is too short to tell.
    #[must_use]
    pub fn token_ns(&self) -> Option<u64> {
        let tokens = self.answer_tokens.get();
        (tokens >= TOKENS_LEAST).then(|| self.answer_us.saturating_mul(1000) / u64::from(tokens))
    }
}

impl Speed {
    /// Figures of the field, until the engine has measured its own.
    pub const FIELD: Self = Self {
        decode_ns_per_mib: DECODE_NS_PER_MIB,
        prefill_ns_per_mib: PREFILL_NS_PER_MIB,
        read_ns_per_mib: READ_NS_PER_MIB,
        slowed_ns_per_mib: 0,
    };

    /// Learns from an answer that was given with `streamed` of `weights` read for each token. The newest counts for a
    /// quarter; answers of a few tokens say nothing.
    #[must_use]
    pub fn learn(self, timing: &Timing, weights: Bytes, streamed: Bytes) -> Self {
        let mut learned = self;
        let each = |us: u64, tokens: Tokens, mib: u64| {
            (tokens.get() >= TOKENS_LEAST && mib > 0)
                .then(|| us.saturating_mul(1000) / u64::from(tokens.get()) / mib)
        };
        let (weights, streamed) = (weights.whole_mib(), streamed.whole_mib());
        // A prompt is read in chunks, each of which reads the streamed layers once: what is left is computing.
        if streamed == 0 {
            if let Some(prefill) = each(timing.prompt_us, timing.prompt_tokens, weights) {
                learned.prefill_ns_per_mib = blend(self.prefill_ns_per_mib, prefill);
            }
            if let Some(decode) = each(timing.answer_us, timing.answer_tokens, weights) {
                learned.decode_ns_per_mib = blend(self.decode_ns_per_mib, decode);
            }
        } else if timing.answer_tokens.get() >= TOKENS_LEAST {
            let token_ns =
                timing.answer_us.saturating_mul(1000) / u64::from(timing.answer_tokens.get());
            let computing = self.decode_ns_per_mib.saturating_mul(weights);
            // A token that takes no longer than computing says only that reading is not slower.
            if token_ns > computing.saturating_add(computing / 8) {
                learned.read_ns_per_mib = blend(self.read_ns_per_mib, (token_ns / streamed).max(1));
            }
        }
        learned
    }

    /// Time to read so much of the weights once, µs.
    #[must_use]
    pub const fn reading_us(&self, bytes: Bytes) -> u64 {
        in_us(self.read_ns_per_mib, bytes)
    }

    /// Time for one token of an answer while `streamed` of `weights` are read for it, µs: the longer of computing and reading.
    /// The part of them that is `exposed`, beyond what a ring holds ahead, is read while nothing else is computed.
    #[must_use]
    pub fn token_us(&self, weights: Bytes, (streamed, exposed): (Bytes, Bytes)) -> u64 {
        let longer = self
            .read_ns_per_mib
            .saturating_sub(self.decode_ns_per_mib)
            .saturating_sub(self.slowed_ns_per_mib);
        in_us(self.decode_ns_per_mib, weights)
            .saturating_add(in_us(self.slowed_ns_per_mib, streamed))
            .saturating_add(in_us(longer, exposed))
            .max(self.reading_us(streamed))
    }

    /// Time to read one token of a prompt, in ns.
    #[must_use]
    pub const fn prefill_token_ns(&self, weights: Bytes) -> u64 {
        in_us(self.prefill_ns_per_mib.saturating_mul(1000), weights)
    }
}

pub(super) const fn in_us(ns_per_mib: u64, bytes: Bytes) -> u64 {
    // KiB, so that small models do not cost nothing.
    ns_per_mib.saturating_mul(bytes.get() / 1024) / 1024 / 1000
}

const fn blend(old: u64, new: u64) -> u64 {
    old.saturating_mul(3).saturating_add(new) / 4
}

/// An Orin NX decodes at 0.87 of the 60 GB/s that its GPU reads: 56e9 bytes per second.
const DECODE_NS_PER_MIB: u64 = 18_700;
/// Qwen3-8B in Q4_K_M, 4.68 GiB, reads prompts of 512 tokens at 353.7 per second on an Orin NX: 2827 µs for 4792 MiB.
const PREFILL_NS_PER_MIB: u64 = 590;
/// 2 GiB/s, the lower end of what NVMe drives on the board are said to give.
const READ_NS_PER_MIB: u64 = 488_000;
/// Shorter answers are mostly their beginning.
const TOKENS_LEAST: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_field_figures_give_the_speeds_of_the_field() {
        // Qwen3-8B Q4_K_M: 4.68 GiB, 11.14 tokens per second, prompts at 353.7.
        let speed = Speed::default();
        let weights = Bytes::from_mib(4792);
        assert_eq!(100_000_000 / in_us(speed.decode_ns_per_mib, weights), 1115);
        assert_eq!(1_000_000_000 / speed.prefill_token_ns(weights), 353);
        // With all of 2.5 GB streamed at 2 GiB/s, nearly a second of reading for each token.
        assert_eq!(100_000_000 / speed.reading_us(Bytes::from_mib(2048)), 100);
    }

    #[test]
    fn what_the_engine_measures_replaces_the_figures_of_the_field() {
        let weights = Bytes::from_mib(1000);
        let timing = |answer_us| Timing {
            prompt_tokens: Tokens::new(100),
            prompt_us: 100 * 2000,
            answer_tokens: Tokens::new(20),
            answer_us,
        };
        let mut speed = Speed::default();
        for _ in 0..40 {
            speed = speed.learn(&timing(20 * 50_000), weights, Bytes::ZERO);
        }
        assert!(speed.prefill_ns_per_mib.abs_diff(2000) < 10, "{speed:?}");
        assert!(speed.decode_ns_per_mib.abs_diff(50_000) < 10, "{speed:?}");
        for _ in 0..40 {
            speed = speed.learn(&timing(20 * 150_000), weights, Bytes::from_mib(500));
        }
        assert!(speed.read_ns_per_mib.abs_diff(300_000) < 100, "{speed:?}");
        let short = Timing {
            answer_tokens: Tokens::new(2),
            prompt_tokens: Tokens::new(2),
            ..timing(1)
        };
        assert_eq!(speed.learn(&short, weights, Bytes::ZERO), speed);
    }
}
