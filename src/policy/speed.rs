//! Speed of the engine, for costs in time.
//!
//! One token takes the longer of computing and reading: the weights are computed on, and those that are not resident are
//! read meanwhile (`streaming` reckons more finely, once the engine has measured itself). Context that is lost has to be read again, at the speed of a prompt. Both are kept for each MiB of weights, since
//! that is what they grow with; figures of the field stand in until the engine has measured its own.

use serde::{Deserialize, Serialize};

use super::{kv_type::KvType, params::ResidencyMode};
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

    /// Time to read one token of a prompt, in ns.
    #[must_use]
    pub const fn prefill_token_ns(&self, weights: Bytes) -> u64 {
        in_us(self.prefill_ns_per_mib.saturating_mul(1000), weights)
    }
}

/// The worth of context and speed to each other, in parts of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weights {
    /// For context.
    pub context: u64,
    /// For speed.
    pub speed: u64,
}

impl ResidencyMode {
    /// The same costs, weighed otherwise: `balanced` takes them as they are, the others count one of them for little.
    /// The preferred one does not become dearer by it, so that no worker is stopped for it.
    #[must_use]
    pub const fn weights(self) -> Weights {
        let (context, speed) = match self {
            Self::Balanced => (IN_FULL, IN_FULL),
            Self::MaxContext => (IN_FULL, 1),
            Self::MaxSpeed => (1, IN_FULL),
        };
        Weights { context, speed }
    }
}

/// Cost of the plans of one model, under one mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worth {
    speed: Speed,
    mode: Weights,
    /// All weights of the model.
    weights: Bytes,
    kv_wanted: Tokens,
}

impl Worth {
    /// The costs of a model with `weights` when `kv_wanted` is the capacity of its full plan.
    #[must_use]
    pub const fn new(weights: Bytes, speed: Speed, mode: ResidencyMode, kv_wanted: Tokens) -> Self {
        Self {
            speed,
            mode: mode.weights(),
            weights,
            kv_wanted,
        }
    }

    /// The speed that it reckons with.
    #[must_use]
    pub const fn speed(&self) -> Speed {
        self.speed
    }

    /// The cost of streaming so much more, µs: each token until the shed is likely undone has to read it.
    #[must_use]
    pub const fn streaming_us(&self, bytes: Bytes) -> u64 {
        self.speed
            .reading_us(bytes)
            .saturating_mul(TOKENS_SLOWED)
            .saturating_mul(self.mode.speed)
            / IN_FULL
    }

    /// Time of the prompts that are read until a shed is likely undone, in chunks of `chunk` while `streamed` is
    /// streamed, µs: each chunk takes the longer of computing its tokens and of reading what is streamed once.
    #[must_use]
    pub fn prompts_us(&self, streamed: Bytes, chunk: Tokens) -> u64 {
        let tokens = u128::from(chunk.get().max(1));
        let computing = tokens * u128::from(self.speed.prefill_token_ns(self.weights)) / 1000;
        let reading = u128::from(self.speed.reading_us(streamed));
        let us = reading.max(computing) * u128::from(PROMPT_SLOWED) / tokens;
        u64::try_from(us)
            .unwrap_or(u64::MAX)
            .saturating_mul(self.mode.speed)
            / IN_FULL
    }

    /// `chunk`, or so often half of it as prompts take hardly longer for it, down to `least`.
    #[must_use]
    pub fn chunk_still_paid(&self, streamed: Bytes, mut chunk: Tokens, least: Tokens) -> Tokens {
        loop {
            let (half, now) = (
                Tokens::new(chunk.get() / 2),
                self.prompts_us(streamed, chunk),
            );
            let is_paid = self.prompts_us(streamed, half) > now.saturating_add(now / HARDLY);
            if is_paid || half < least || half == Tokens::ZERO {
                return chunk;
            }
            chunk = half;
        }
    }

    /// The cost of a capacity of `from` falling to `to` while the sequence has `kept` tokens, µs: what has to be read
    /// again, as likely as it is to be needed.
    ///
    /// The tokens of the sequence are needed for certain. Of those beyond, fewer are needed the further it is: from
    /// nearly certain down to one time in eight for the last token of what is wanted.
    #[must_use]
    pub fn context_us(&self, from: Tokens, to: Tokens, kept: Tokens) -> u64 {
        let token_ns = u128::from(self.speed.prefill_token_ns(self.weights));
        let (from, to) = (u128::from(from.get()), u128::from(to.get().min(from.get())));
        let kept = u128::from(kept.get()).clamp(to, from);
        let certain = (kept - to) * 1000;
        // The mean of a line is its value in the middle.
        let likely = (from - kept) * u128::from(self.needed_per_mille((from + kept) / 2));
        let ns = (certain + likely) / 1000 * token_ns;
        u64::try_from(ns / 1000)
            .unwrap_or(u64::MAX)
            .saturating_mul(self.mode.context)
            / IN_FULL
    }

    /// The cost of keeping a capacity of `capacity`, of which the sequence has `kept`, as `to` instead of `from`, µs: the
    /// part of what context is worth that is lost with the precision.
    #[must_use]
    pub fn precision_us(&self, capacity: Tokens, kept: Tokens, from: KvType, to: KvType) -> u64 {
        let lost = to.worth_lost().saturating_sub(from.worth_lost());
        self.context_us(capacity, Tokens::ZERO, kept)
            .saturating_mul(lost)
            / IN_FULL
    }

    /// The most tokens of capacity of which each is worth more than as many bytes of layers.
    #[must_use]
    pub fn capacity_above_layers(&self, bytes_per_token: Bytes) -> Tokens {
        let layers_ns = u128::from(self.speed.read_ns_per_mib)
            * u128::from(TOKENS_SLOWED)
            * u128::from(self.mode.speed)
            * u128::from(bytes_per_token.get())
            / u128::from(Bytes::from_mib(1).get());
        let token_ns =
            u128::from(self.speed.prefill_token_ns(self.weights)) * u128::from(self.mode.context);
        let worth = |token: u32| {
            token_ns * u128::from(self.needed_per_mille(u128::from(token))) > layers_ns * 1000
        };
        // The need falls from token to token.
        let (mut least, mut most) = (0, self.kv_wanted.get());
        while least < most {
            let middle = least + (most - least).div_ceil(2);
            if worth(middle) {
                least = middle;
            } else {
                most = middle - 1;
            }
        }
        Tokens::new(least)
    }

    /// How often token number `token` of the context is needed, in thousandths.
    fn needed_per_mille(&self, token: u128) -> u64 {
        let wanted = u128::from(self.kv_wanted.get()).max(1);
        let token = token.min(wanted);
        let fallen = u128::from(NEEDED_MOST - NEEDED_LEAST) * token / wanted;
        NEEDED_MOST - u64::try_from(fallen).unwrap_or(0)
    }
}

const fn in_us(ns_per_mib: u64, bytes: Bytes) -> u64 {
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
/// An answer of two spoken sentences, which is what a shed slows before it is likely undone.
const TOKENS_SLOWED: u64 = 48;
/// Tokens of prompts that are read until a shed is likely undone, beside that answer. Our choice: the instructions of
/// an assistant of itself and its tools, and a question.
const PROMPT_SLOWED: u64 = 1024;
/// Prompts take hardly longer if it is less than one part of this many. Our choice.
const HARDLY: u64 = 16;
/// Shorter answers are mostly their beginning.
const TOKENS_LEAST: u32 = 8;
/// The first token of a context is always needed, the last of what is wanted one time in eight: our choice.
const NEEDED_MOST: u64 = 1000;
const NEEDED_LEAST: u64 = 125;
/// The side that a mode does not prefer counts for one part of this many. Our choice: it outweighs what models differ
/// in (1 to 50 ms for a MiB of context, 24 ms for a MiB of layers).
const IN_FULL: u64 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    /// 2.4 GiB.
    const WEIGHTS: Bytes = Bytes::from_mib(32 * 64 + 400);

    fn worth(mode: ResidencyMode) -> Worth {
        Worth::new(WEIGHTS, Speed::default(), mode, Tokens::new(4096))
    }

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
    fn balanced_weighs_context_against_layers_and_the_others_prefer_one() {
        let bytes_per_token = Bytes::from_kib(32);
        let capacity = |mode| worth(mode).capacity_above_layers(bytes_per_token).get();
        assert_eq!(capacity(ResidencyMode::MaxContext), 4096);
        assert_eq!(capacity(ResidencyMode::MaxSpeed), 0);
        let balanced = capacity(ResidencyMode::Balanced);
        assert!((1500..3500).contains(&balanced), "{balanced}");
    }

    #[test]
    fn context_in_use_costs_more_than_context_that_may_be_used() {
        let worth = worth(ResidencyMode::Balanced);
        let tokens = Tokens::new;
        let unused = worth.context_us(tokens(4096), tokens(3072), tokens(512));
        let nearer = worth.context_us(tokens(3072), tokens(2048), tokens(512));
        let kept = worth.context_us(tokens(1024), tokens(0), tokens(1024));
        assert!(unused < nearer && nearer < kept, "{unused} {nearer} {kept}");
        assert_eq!(worth.context_us(tokens(512), tokens(512), tokens(512)), 0);
        let whole = worth.context_us(tokens(4096), tokens(0), tokens(512));
        let precision = |from, to| worth.precision_us(tokens(4096), tokens(512), from, to);
        assert_eq!(precision(KvType::F16, KvType::Q8), whole / 16);
        assert_eq!(precision(KvType::F16, KvType::Q4), whole / 4);
        assert!(
            precision(KvType::Q8, KvType::Q4) < whole / 4
                && precision(KvType::Q4, KvType::F16) == 0
        );
        // 1024 tokens at 590 ns for each of 2448 MiB.
        assert_eq!(kept / 1000, 1024 * 590 * 2448 / 1_000_000);
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
