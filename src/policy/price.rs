//! Price of memory: the user's expected wait caused by giving it up, in microseconds.
//!
//! The price of an engine plan is the wait for its weights ([`Price::weights_us`]) plus that for its KV
//! ([`Price::kv_us`]); there is no other price of a layer or a block. A token takes the longer of computing and reading
//! ([`Calibration::token_us`]), so reading hidden behind computing is free. A prompt is processed in chunks, each of
//! which reads the streamed layers once. Lost context has to be recomputed, weighted by the probability that it is
//! needed; for a parked conversation that depends on its idle time. Memory of other holders is priced in the same unit.
//! [`weight`] is the factor for the wait of a class.

use std::time::Duration;

use super::{
    kv_type::KvType,
    lease::Class,
    params::ResidencyMode,
    residency::{EnginePlan, Missing, ModelShape, PlanLimits},
    speed::Calibration,
};
use cotenant_units::{Bytes, Tokens};

/// A parked conversation in the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptConversation {
    /// Tokens of capacity that its end frees. Evicted as a whole.
    pub capacity: Tokens,
    /// Tokens that its next prompt has to recompute after that.
    pub tokens: Tokens,
    /// Probability that it is needed, in thousandths.
    pub needed: u32,
}

impl KeptConversation {
    /// Returns the probability, in thousandths, that a conversation with this idle time is needed; the minimum if
    /// another one has replaced it.
    #[must_use]
    pub fn needed(idle: Duration, is_superseded: bool) -> u32 {
        let half = u128::from(IDLE_LONG_S) * 1_000_000;
        let lately = 1000 * half / (half + idle.as_micros());
        let needed = if is_superseded { 0 } else { lately };
        u32::try_from(needed.max(NEEDED_LEAST)).unwrap_or(u32::MAX)
    }
}

/// Contents of the KV cache, as inputs of its price.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvContents {
    /// Tokens kept from the last answer for the next prompt, while no request runs.
    pub kept: Tokens,
    /// Parked conversations, the most probably needed first.
    pub beside: Vec<KeptConversation>,
    /// Tokens that the running answer needs.
    pub used: Tokens,
    /// Tokens in the cache, whether or not a request runs.
    pub held: Tokens,
    /// Capacity touched by tokens. The rest takes no memory yet, and its loss costs nothing.
    pub touched: Tokens,
}

impl KvContents {
    /// Returns the capacity occupied by all conversations.
    #[must_use]
    pub fn occupied(&self) -> Tokens {
        let beside = self.beside.iter().map(|one| one.capacity.get());
        let certain = self.kept.max(self.used).get();
        Tokens::new(beside.fold(certain, u32::saturating_add))
    }

    /// Returns the contents of a cache that will be filled completely, for the plan of a load.
    #[must_use]
    pub fn to_come(limits: &PlanLimits) -> Self {
        Self {
            touched: limits.kv_wanted,
            ..Self::default()
        }
    }
}

/// Prices of the plans of one model under the same limits.
#[derive(Clone, Copy, Debug)]
pub struct Price<'a> {
    shape: &'a ModelShape,
    speed: Calibration,
    mode: ResidencyMode,
    /// The weights that one token needs.
    weights: Bytes,
    /// Mean size of its parts, bytes.
    part: u64,
    /// Capacity of its full plan.
    kv_wanted: Tokens,
}

impl<'a> Price<'a> {
    /// Creates the prices for the plans of a model.
    #[must_use]
    pub fn new(shape: &'a ModelShape, limits: &PlanLimits) -> Self {
        let layers = shape.weights();
        Self {
            shape,
            speed: limits.speed,
            mode: limits.mode,
            weights: shape.token_bytes(),
            part: (layers.bytes.get() / (shape.layers.len() as u64).max(1)).max(1),
            kv_wanted: limits.kv_wanted.min(shape.context_max),
        }
    }

    /// Returns the price of a change between two plans, µs: the additional wait, and the time to restore what is given
    /// up.
    #[must_use]
    pub fn given_up(&self, from: &EnginePlan, to: &EnginePlan, kv: &KvContents) -> u64 {
        let weights = |plan: &EnginePlan| (self.shape.missing(&plan.resident), plan.prefill_chunk);
        let cache = |plan: &EnginePlan| (plan.kv_capacity, plan.kv_type);
        self.weights_given_up(weights(from), weights(to))
            .saturating_add(self.kv_given_up(cache(from), cache(to), kv))
    }

    /// Returns the share of layers and prefill chunk in [`Self::given_up`], from the missing weights of each plan.
    #[must_use]
    pub fn weights_given_up(&self, from: (Missing, Tokens), to: (Missing, Tokens)) -> u64 {
        let more = self
            .speed
            .reading_us(to.0.bytes.saturating_sub(from.0.bytes));
        let chunk = self.shape.chunk_bytes(to.1, from.1);
        self.weights_us(to.0, to.1)
            .saturating_sub(self.weights_us(from.0, from.1))
            .saturating_add(more)
            .saturating_add(moving_us(chunk))
    }

    /// Returns the share of the KV cache in [`Self::given_up`].
    #[must_use]
    pub fn kv_given_up(
        &self,
        from: (Tokens, KvType),
        to: (Tokens, KvType),
        kv: &KvContents,
    ) -> u64 {
        let shape = &self.shape.kv;
        let bytes = |tokens: Tokens| shape.capacity_bytes(tokens, from.1);
        let touched = bytes(kv.touched.min(from.0)).saturating_sub(bytes(kv.touched.min(to.0)));
        let converted = if to.1 < from.1 {
            bytes(kv.held).saturating_mul(2)
        } else {
            Bytes::ZERO
        };
        self.kv_us(to.0, to.1, kv)
            .saturating_sub(self.kv_us(from.0, from.1, kv))
            .saturating_add(moving_us(touched.saturating_add(converted)))
    }

    /// Returns the wait for an answer and its prompts while these weights are `missing` and read for each token and
    /// chunk, µs.
    #[must_use]
    pub fn weights_us(&self, missing: Missing, chunk: Tokens) -> u64 {
        let streamed = missing.token;
        // The part of each streamed layer that the ring holds is read while the preceding layers are computed.
        let ahead = u128::from(self.shape.ring_bytes.get()) * u128::from(streamed.get());
        let exposed = streamed.saturating_sub(Bytes::new(clamped(ahead / u128::from(self.part))));
        let token = self.speed.token_us(self.weights, (streamed, exposed));
        let answer = token.saturating_mul(ANSWER_TOKENS);
        self.preferred(answer, self.mode != ResidencyMode::MaxContext)
            .saturating_add(self.prompts_us(missing.bytes, chunk))
    }

    /// Returns the wait for the prompts alone, µs: each chunk takes the longer of computing its tokens and reading the
    /// streamed layers.
    #[must_use]
    pub fn prompts_us(&self, streamed: Bytes, chunk: Tokens) -> u64 {
        let tokens = u128::from(chunk.get().max(1));
        let computing = tokens * u128::from(self.speed.prefill_token_ns(self.weights)) / 1000;
        let reading = u128::from(self.speed.reading_us(streamed));
        let us = reading.max(computing) * u128::from(PROMPT_TOKENS) / tokens;
        self.preferred(clamped(us), self.mode != ResidencyMode::MaxContext)
    }

    /// Returns the wait for context that a cache of `capacity` cannot keep, or keeps as `kind` with less precision, µs.
    ///
    /// Tokens of the sequence are needed with certainty. Beyond them the probability falls linearly with the position,
    /// from nearly 1 to one eighth for the last token of the wanted capacity.
    #[must_use]
    pub fn kv_us(&self, capacity: Tokens, kind: KvType, kv: &KvContents) -> u64 {
        let [capacity, kept, used, occupied, held, touched, wanted] = [
            capacity,
            kv.kept,
            kv.used,
            kv.occupied(),
            kv.held,
            kv.touched,
            self.kv_wanted,
        ]
        .map(|tokens| u128::from(tokens.get()));
        let certain = kept.max(used);
        // Except in the mode that prefers context, untouched capacity is worth nothing yet.
        let whole = match self.mode {
            ResidencyMode::MaxContext => wanted.max(touched),
            ResidencyMode::Balanced | ResidencyMode::MaxSpeed => touched,
        };
        // A truncated sequence is recomputed as a whole if it cannot be cut back: a recurrent state, or a window that
        // has moved on, cannot be rewound.
        let is_cut_back = self.shape.state_bytes == Bytes::ZERO
            && self
                .shape
                .kv
                .cut_back_max()
                .is_none_or(|most| kv.kept <= most);
        let left = if capacity < kept && !is_cut_back {
            0
        } else {
            capacity
        };
        let whole = whole.max(occupied);
        let end = whole - (occupied - certain);
        let missing = self.missing(whole - left.min(whole), end, certain, &kv.beside);
        // The running answer loses its oldest tokens for its remaining duration.
        let lost = self.likely(capacity.min(used), used, used) * (LOST_FOR_EVER - 1);
        let imprecise =
            self.likely(0, capacity, held) * u128::from(kind.worth_lost()) / u128::from(IN_FULL);
        let token_ns = u128::from(self.speed.prefill_token_ns(self.weights));
        let us = (missing + lost + imprecise) * token_ns / 1_000_000;
        self.preferred(clamped(us), self.mode != ResidencyMode::MaxSpeed)
    }

    /// Scales a wait by the mode: the side that is not preferred counts 1/1024. The preferred side keeps its price, so
    /// that the mode never causes a worker to be stopped.
    const fn preferred(&self, us: u64, is_preferred: bool) -> u64 {
        if is_preferred { us } else { us / IN_FULL }
    }

    /// Returns the expected tokens to recompute, in thousandths, if the cache is `lacking` that many tokens of
    /// capacity. The least needed go first, among conversations and future tokens up to `end`.
    fn missing(
        &self,
        mut lacking: u128,
        mut end: u128,
        certain: u128,
        conversations: &[KeptConversation],
    ) -> u128 {
        let wanted = u128::from(self.kv_wanted.get()).max(1);
        let mut missing = 0;
        for one in conversations.iter().rev() {
            let needed = u128::from(one.needed);
            // Future tokens beyond this position are less probable than the conversation.
            let from = (1000 - needed.min(1000)) * wanted / (1000 - NEEDED_LEAST);
            let to_come = end.saturating_sub(from.max(certain)).min(lacking);
            missing += self.likely(end - to_come, end, certain);
            (end, lacking) = (end - to_come, lacking - to_come);
            // It is evicted as a whole; excess capacity goes to future tokens.
            let capacity = u128::from(one.capacity.get());
            let part = capacity.min(lacking);
            missing += needed * u128::from(one.tokens.get()) * part / capacity.max(1);
            lacking -= part;
        }
        missing + self.likely(end - lacking.min(end), end, certain)
    }

    /// Returns the expected number of needed tokens between two positions, in thousandths; those below `certain` count
    /// fully.
    fn likely(&self, from: u128, to: u128, certain: u128) -> u128 {
        let known = to.min(certain).saturating_sub(from) * 1000;
        let from = from.max(certain);
        let wanted = u128::from(self.kv_wanted.get()).max(1);
        // The mean of a linear function is its value in the middle.
        let middle = ((from + to) / 2).min(wanted);
        known + to.saturating_sub(from) * (1000 - (1000 - NEEDED_LEAST) * middle / wanted)
    }
}

/// Returns the price of memory given up by a tenant, µs: half its deadline, and the time to read the bytes again.
#[must_use]
pub fn of_tenant(bytes: Bytes, deadline: Duration, speed: Calibration) -> u64 {
    (micros(deadline) / 2).saturating_add(speed.reading_us(bytes))
}

/// Returns the price of a switch to a worker's smaller variant, µs: loading it, and later the larger one.
#[must_use]
pub fn of_variant(reload: Duration) -> u64 {
    micros(reload).saturating_mul(2)
}

/// Returns the price of memory given up by a notified worker, µs: it drops data of some use, which costs less than a
/// variant.
#[must_use]
pub fn of_notification(bytes: Bytes, reload: Duration, speed: Calibration) -> u64 {
    (micros(reload) / 4).saturating_add(speed.reading_us(bytes))
}

/// Returns the price of stopping a worker, µs: the loss of its process's state, and `reload` for the next start,
/// increased for a worker that was busy recently and will probably return early, and multiplied by `times`, the ratio
/// of its held bytes to those that stay free after its restart. Work in progress has the highest price: a busy worker
/// (`idle` is `None`) is stopped only if all idle ones do not suffice.
#[must_use]
pub fn of_stop(reload: Duration, idle: Option<Duration>, times: u64) -> u64 {
    let Some(idle) = idle else {
        return u64::MAX;
    };
    micros(reload)
        .saturating_mul(1 + IDLE_LONG_S / idle.as_secs().saturating_add(1))
        .saturating_mul(times.max(1))
        .saturating_add(UTTERANCE_US)
}

/// Returns the factor for the wait of a class.
#[must_use]
pub const fn weight(class: Class) -> u64 {
    match class {
        Class::AudioRealtime => 32,
        Class::Interactive => 8,
        Class::LlmElastic => 2,
        Class::Batch => 1,
    }
}

fn clamped(us: u128) -> u64 {
    u64::try_from(us).unwrap_or(u64::MAX)
}

/// Converts a duration to microseconds, the unit of prices.
fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

const fn moving_us(bytes: Bytes) -> u64 {
    super::speed::in_us(MOVE_NS_PER_MIB, bytes)
}

/// Price of one request to a holder, the duration of one round through the loop: prefers fewer holders at equal cost.
pub(super) const ASKING_US: u128 = 100;
/// An answer of two spoken sentences; a shed is probably undone after it.
const ANSWER_TOKENS: u64 = 48;
/// Tokens of prompts processed during that time. Our choice: an assistant's instructions and tools, and a question.
const PROMPT_TOKENS: u64 = 1024;
/// Probability, in thousandths, that the last token of the wanted capacity is needed; that of the first is 1000. Our
/// choice.
const NEEDED_LEAST: u128 = 125;
/// Time to map and touch a MiB: about 0.4 ms, measured on the engine's KV cache. Converting its type takes 0.35 to 1.5
/// ms with two threads of a busy machine.
const MOVE_NS_PER_MIB: u64 = 400_000;
/// Price of a lost token relative to one that can be recomputed. Our choice.
const LOST_FOR_EVER: u128 = 4;
/// A stopped process loses its learned state, which costs its user one utterance. Our choice.
const UTTERANCE_US: u64 = 10_000_000;
/// Idle time, in seconds, after which a stop costs little more than the start, and a conversation is needed with
/// probability one half. Our choice.
const IDLE_LONG_S: u64 = 60;
/// Denominator of the weights of KV types; the side that a mode does not prefer counts one part. Our choice: it exceeds
/// the differences between models (1 to 50 ms for a MiB of context, 24 ms for a MiB of layers).
const IN_FULL: u64 = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        params::EngineParams,
        residency::{KvShape, sample_shape},
    };

    /// 2.4 GiB of weights, 32 KiB of KV for each token, of which 4096 are wanted.
    fn model() -> ModelShape {
        let shape = sample_shape(32, Bytes::from_mib(64));
        ModelShape {
            fixed_bytes: Bytes::from_mib(400),
            ring_bytes: Bytes::from_mib(64),
            kv: KvShape {
                head_dim: 512,
                ..shape.kv
            },
            ..shape
        }
    }

    fn in_mode(mode: ResidencyMode) -> PlanLimits {
        let params = EngineParams {
            mode,
            ..EngineParams::default()
        };
        PlanLimits::new(&params, Tokens::ZERO)
    }

    /// Of which `kept` tokens are of the last answer, and all were touched.
    fn holding(kept: u32) -> KvContents {
        let kept = Tokens::new(kept);
        KvContents {
            kept,
            held: kept,
            touched: Tokens::new(4096),
            ..KvContents::default()
        }
    }

    #[test]
    fn balanced_weighs_context_against_layers_and_the_others_prefer_one() {
        let shape = model();
        let capacity = |mode| {
            let limits = in_mode(mode);
            let full = shape.plan_bytes(&shape.full_plan(&limits));
            let half = full.saturating_sub(Bytes::from_mib(1024));
            shape.plan(half, &limits).unwrap().kv_capacity.get()
        };
        assert_eq!(capacity(ResidencyMode::MaxContext), 4096);
        assert_eq!(capacity(ResidencyMode::MaxSpeed), 512);
        let balanced = capacity(ResidencyMode::Balanced);
        assert!((1500..3500).contains(&balanced), "{balanced}");
    }

    #[test]
    fn context_in_use_costs_more_than_context_that_may_be_used() {
        let (shape, tokens) = (model(), Tokens::new);
        let price = Price::new(&shape, &in_mode(ResidencyMode::Balanced));
        let lost = |from, to, kept| {
            let us = |capacity| price.kv_us(tokens(capacity), KvType::F16, &holding(kept));
            us(to) - us(from)
        };
        let unused = lost(4096, 3072, 512);
        let nearer = lost(3072, 2048, 512);
        let kept = lost(1024, 0, 1024);
        assert!(unused < nearer && nearer < kept, "{unused} {nearer} {kept}");
        // 1024 tokens at 590 ns for each of 2448 MiB.
        assert_eq!(kept / 1000, 1024 * 590 * 2448 / 1_000_000);
        let whole = lost(4096, 0, 512);
        let precision = |kind| {
            let us = |kind| price.kv_us(tokens(4096), kind, &holding(512));
            us(kind) - us(KvType::F16)
        };
        assert!(precision(KvType::Q8).abs_diff(whole / 16) <= 1);
        assert!(precision(KvType::Q4).abs_diff(whole / 4) <= 1);
    }

    #[test]
    fn a_sequence_that_cannot_be_cut_back_is_lost_as_a_whole() {
        let recurrent = ModelShape {
            state_bytes: Bytes::from_mib(1),
            ..model()
        };
        let lost = |shape: &ModelShape| {
            let price = Price::new(shape, &in_mode(ResidencyMode::Balanced));
            price.kv_us(Tokens::new(960), KvType::F16, &holding(1024))
        };
        assert!(lost(&recurrent) > lost(&model()));
    }

    #[test]
    fn a_conversation_that_has_been_idle_costs_less_than_the_capacity_for_what_is_to_come() {
        let (shape, tokens) = (model(), Tokens::new);
        let price = Price::new(&shape, &in_mode(ResidencyMode::Balanced));
        let lost = |to, beside: &[(u64, bool)]| {
            let beside = beside
                .iter()
                .map(|(idle_s, is_superseded)| KeptConversation {
                    capacity: tokens(1024),
                    tokens: tokens(1000),
                    needed: KeptConversation::needed(Duration::from_secs(*idle_s), *is_superseded),
                });
            let kv = KvContents {
                beside: beside.collect(),
                ..holding(1024)
            };
            let us = |capacity| price.kv_us(tokens(capacity), KvType::F16, &kv);
            us(to) - us(4096)
        };
        // 2048 tokens are free: the conversation that is needed one time in eleven goes before any of them.
        assert_eq!(
            lost(3072, &[(600, false)]) / 1000,
            1000 * 590 * 2448 / 1_000_000 / 8
        );
        assert_eq!(lost(3072, &[(0, true)]), lost(3072, &[(600, false)]));
        // One that has just ended stays: the last of what is to come is needed less.
        let lately = lost(3072, &[(0, false)]);
        assert!(lately > lost(3072, &[(60, false)]));
        assert!(
            lately < lost(2048, &[(0, false)]) / 2,
            "the end of the line first"
        );
        // The last answer goes after both.
        let two = [(0, false), (600, false)];
        let certain = lost(0, &two) - lost(1024, &two);
        assert_eq!(certain / 1000, 1024 * 590 * 2448 / 1_000_000);
    }

    #[test]
    fn reading_that_hides_behind_computing_costs_an_answer_nothing() {
        let shape = model();
        let slow = Calibration {
            compute_ns_per_mib: 100_000,
            prefill_ns_per_mib: 10_000,
            ..Calibration::FIELD
        };
        let price = Price::new(&shape, &in_mode(ResidencyMode::Balanced).at_speed(slow));
        let chunk = Tokens::new(128);
        let of = |mib| shape.weights().only(Bytes::from_mib(mib));
        let us = |streamed| price.weights_us(of(streamed), chunk);
        // A token is computed in 245 ms, in which 501 MiB are read.
        assert_eq!(us(0), us(500));
        assert!(us(0) < us(510));
        let back = price.weights_given_up((of(0), chunk), (of(64), chunk));
        assert_eq!(
            back,
            slow.reading_us(Bytes::from_mib(64)),
            "reading it back"
        );
    }
}
