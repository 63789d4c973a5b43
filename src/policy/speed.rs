//! Speed of the engine, for prices and predictions.
//!
//! One token takes the longer of computing on the weights and reading those that are not resident;
//! [`streaming`](super::streaming) simulates the passage of the parts through the ring, with a small difference. Both
//! times are kept per MiB of weights, since they are proportional to those; field values apply until the engine has
//! measured its own.

use serde::{Deserialize, Serialize};

use cotenant_units::{Bytes, Tokens};

/// Times of the engine and the disk, in ns per MiB of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calibration {
    /// Computing one token of an answer, per MiB of layers and head.
    pub compute_ns_per_mib: u64,
    /// Reading weights while no kernel computes.
    pub read_ns_per_mib: u64,
    /// Reading weights while kernels compute.
    pub read_busy_ns_per_mib: u64,
    /// Delay of computing per MiB read at the same time: readers need a processor too.
    pub slowed_ns_per_mib: u64,
    /// Computing one token of a prompt, per MiB of layers and head; zero if not measured.
    #[serde(default)]
    pub prefill_ns_per_mib: u64,
}

/// Timing of one answer by the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// Computed tokens of the prompt.
    pub prompt_tokens: Tokens,
    /// Time for them, µs.
    pub prompt_us: u64,
    /// Tokens of the answer.
    pub answer_tokens: Tokens,
    /// Time for them, µs.
    pub answer_us: u64,
}

impl Timing {
    /// Returns the time per token of the answer, ns; `None` if it is too short.
    #[must_use]
    pub fn token_ns(&self) -> Option<u64> {
        let tokens = self.answer_tokens.get();
        (tokens >= TOKENS_LEAST).then(|| self.answer_us.saturating_mul(1000) / u64::from(tokens))
    }
}

impl Calibration {
    /// Field values, until the engine has measured its own.
    pub const FIELD: Self = Self {
        compute_ns_per_mib: COMPUTE_NS_PER_MIB,
        read_ns_per_mib: READ_NS_PER_MIB,
        read_busy_ns_per_mib: READ_NS_PER_MIB,
        slowed_ns_per_mib: 0,
        prefill_ns_per_mib: PREFILL_NS_PER_MIB,
    };

    /// Learns from a prompt computed with all `weights` in memory. The newest value counts a quarter; prompts of a few
    /// tokens are ignored.
    #[must_use]
    pub fn learn_prompt(self, timing: &Timing, weights: Bytes) -> Self {
        let (tokens, mib) = (timing.prompt_tokens.get(), weights.whole_mib());
        if tokens < TOKENS_LEAST || mib == 0 {
            return self;
        }
        let newest = timing.prompt_us.saturating_mul(1000) / u64::from(tokens) / mib;
        let blend = self
            .prefill_ns_per_mib
            .saturating_mul(3)
            .saturating_add(newest)
            / 4;
        Self {
            prefill_ns_per_mib: blend,
            ..self
        }
    }

    /// Returns the time to read weights of this size once, µs.
    #[must_use]
    pub const fn reading_us(&self, bytes: Bytes) -> u64 {
        in_us(self.read_busy_ns_per_mib, bytes)
    }

    /// Returns the time for one token of an answer while `streamed` of `weights` are read for it, µs: the longer of
    /// computing and reading. Of these, `exposed` bytes exceed the ring's read-ahead and are read while nothing is
    /// computed.
    #[must_use]
    pub fn token_us(&self, weights: Bytes, (streamed, exposed): (Bytes, Bytes)) -> u64 {
        let longer = self
            .read_busy_ns_per_mib
            .saturating_sub(self.compute_ns_per_mib)
            .saturating_sub(self.slowed_ns_per_mib);
        in_us(self.compute_ns_per_mib, weights)
            .saturating_add(in_us(self.slowed_ns_per_mib, streamed))
            .saturating_add(in_us(longer, exposed))
            .max(self.reading_us(streamed))
    }

    /// Returns the time to compute one token of a prompt, ns.
    #[must_use]
    pub const fn prefill_token_ns(&self, weights: Bytes) -> u64 {
        in_us(self.prefill_ns_per_mib.saturating_mul(1000), weights)
    }
}

pub(super) const fn in_us(ns_per_mib: u64, bytes: Bytes) -> u64 {
    // KiB, so that small models do not round to zero.
    ns_per_mib.saturating_mul(bytes.get() / 1024) / 1024 / 1000
}

/// An Orin NX decodes at 0.87 of the 60 GB/s that its GPU reads: 56e9 bytes per second.
const COMPUTE_NS_PER_MIB: u64 = 18_700;
/// Qwen3-8B in Q4_K_M, 4.68 GiB, computes prompts of 512 tokens at 353.7 tokens/s on an Orin NX: 2827 µs for 4792 MiB.
const PREFILL_NS_PER_MIB: u64 = 590;
/// 2 GiB/s, the lower end of figures reported for NVMe drives on the board.
const READ_NS_PER_MIB: u64 = 488_000;
/// Minimum tokens of a timing: shorter answers consist mostly of start-up time.
const TOKENS_LEAST: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_field_figures_give_the_speeds_of_the_field() {
        // Qwen3-8B Q4_K_M: 4.68 GiB, 11.14 tokens per second, prompts at 353.7.
        let speed = Calibration::FIELD;
        let weights = Bytes::from_mib(4792);
        assert_eq!(100_000_000 / in_us(speed.compute_ns_per_mib, weights), 1115);
        assert_eq!(1_000_000_000 / speed.prefill_token_ns(weights), 353);
        // With all of 2.5 GB streamed at 2 GiB/s, nearly a second of reading for each token.
        assert_eq!(100_000_000 / speed.reading_us(Bytes::from_mib(2048)), 100);
    }

    #[test]
    fn prompts_teach_their_speed_unless_they_are_short() {
        let weights = Bytes::from_mib(1000);
        let timing = |tokens| Timing {
            prompt_tokens: Tokens::new(tokens),
            prompt_us: u64::from(tokens) * 2000,
            answer_tokens: Tokens::new(20),
            answer_us: 1,
        };
        let mut speed = Calibration::FIELD;
        for _ in 0..40 {
            speed = speed.learn_prompt(&timing(100), weights);
        }
        assert!(speed.prefill_ns_per_mib.abs_diff(2000) < 10, "{speed:?}");
        let field = Calibration::FIELD;
        assert_eq!(field.learn_prompt(&timing(2), weights), field);
    }
}
