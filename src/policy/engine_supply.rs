//! Memory that the engine can give back, and the cost of each part to the user.
//!
//! KV blocks that no sequence uses, blocks that keep the last answer, precision of KV where that is allowed, the oldest
//! blocks of a running answer where its request allows that, layers, and the workspace of larger prefill chunks; each at
//! the price of what it makes the user wait for ([`Worth`](super::speed::Worth)).

use super::{
    engine_control::EngineControl,
    kv_type::KvType,
    lease::Class,
    params::ResidencyMode,
    residency::{EnginePlan, ModelShape, PlanLimits},
    shedding::{Candidate, Source, Step},
};
use cotenant_units::{Bytes, Tokens};

/// Inputs of the engine's supply.
#[derive(Clone, Copy, Debug)]
pub(super) struct EngineSupply<'a> {
    pub(super) shape: &'a ModelShape,
    pub(super) limits: &'a PlanLimits,
    /// The plan that it was asked for last.
    pub(super) goal: &'a EnginePlan,
    /// Tokens that the last answer has left.
    pub(super) kept: Tokens,
    /// Tokens in the KV cache, whether or not a request runs.
    pub(super) held: Tokens,
    /// Tokens that the running answer may lose.
    pub(super) droppable: Tokens,
    /// KV blocks that no token has touched.
    pub(super) untouched: u32,
    /// Whether a smaller chunk was asked for already.
    pub(super) chunk_pinned: bool,
}

impl EngineSupply<'_> {
    /// All that it can give. Parts that make tokens slower or less precise are left out until it is `serious`.
    pub(super) fn candidates(&self, serious: bool) -> Vec<Candidate> {
        let kv_least = if serious {
            self.limits.kv_type_least
        } else {
            self.goal.kv_type
        };
        let mut candidates = self.kv(kv_least);
        if serious {
            candidates.extend(self.kv_type());
            let oldest = self.oldest_kv(kv_least, &candidates);
            candidates.extend(oldest);
            candidates.extend(self.layers());
            candidates.extend(self.chunk().filter(|_| !self.chunk_pinned));
        }
        candidates.retain(|candidate| candidate.bytes() > Bytes::ZERO);
        candidates
    }

    /// KV blocks that no sequence uses, and those that keep what the last answer has left.
    ///
    /// They are weighed by what they hold in the smallest type that KV may be converted to in the same shed, so that both
    /// together never promise more than they give. Blocks that no token has touched take no memory yet and cost nothing,
    /// unless the mode asks for context.
    fn kv(&self, kv_least: KvType) -> Vec<Candidate> {
        let Self {
            shape,
            limits,
            goal,
            kept,
            untouched,
            ..
        } = *self;
        let kind = goal.kv_type.min(kv_least);
        let block = shape.kv.block_tokens.get().max(1);
        let all = shape.blocks_to_give(goal, limits);
        let has = goal.kv_capacity;
        let after =
            |blocks: u32| Tokens::new(has.get().saturating_sub(blocks.saturating_mul(block)));
        let unused = all.min(has.get().saturating_sub(kept.get()) / block);
        let worth = shape.worth(limits);
        let unit = shape.kv.blocks_bytes(1, kind);
        let gives = |blocks: u32| {
            let all = shape.kv.capacity_bytes(has, kind);
            all.saturating_sub(shape.kv.capacity_bytes(after(blocks), kind))
        };
        let unpriced = match limits.mode {
            ResidencyMode::MaxContext => 0,
            ResidencyMode::Balanced | ResidencyMode::MaxSpeed => untouched.min(unused),
        };
        let undo = |blocks: u32| {
            let touched = blocks.saturating_sub(unpriced);
            in_us(
                TOUCH_NS_PER_MIB,
                shape.kv.blocks_bytes(touched, goal.kv_type),
            )
        };
        let beyond = |blocks: u32| {
            let to = after(blocks.max(unpriced));
            worth.context_us(after(unpriced), to, kept.min(to))
        };
        let mut unused_kv = Candidate::graded(
            Source::UnusedKv,
            Class::LlmElastic,
            unit,
            unused,
            |blocks| beyond(blocks).saturating_add(undo(blocks)),
        );
        // A sequence that has lost its end can be cut back to what is left of it, unless it has a recurrent state, which cannot
        // be taken back, or windows that have passed on: then it has to be read again as a whole.
        let prefix = all - unused;
        let is_cut_back = shape.state_bytes == Bytes::ZERO
            && shape.kv.cut_back_max().is_none_or(|most| kept <= most);
        let lost = |blocks: u32| {
            let left = if is_cut_back {
                after(unused.saturating_add(blocks)).min(kept)
            } else {
                Tokens::ZERO
            };
            worth.context_us(kept, left, kept)
        };
        let mut prefix_kv = Candidate::graded(
            Source::PrefixKv,
            Class::LlmElastic,
            unit,
            prefix,
            |blocks| lost(blocks).saturating_add(undo(blocks)),
        );
        for step in &mut unused_kv.steps {
            step.bytes = gives(step.units);
        }
        for step in &mut prefix_kv.steps {
            step.bytes = gives(unused.saturating_add(step.units)).saturating_sub(gives(unused));
        }
        for candidate in [&mut unused_kv, &mut prefix_kv] {
            candidate.steps.retain(|step| step.bytes > Bytes::ZERO);
        }
        vec![unused_kv, prefix_kv]
    }

    /// KV in a smaller type, one step for each type that is allowed; `held` tokens have to be converted.
    fn kv_type(&self) -> Option<Candidate> {
        let Self {
            shape,
            limits,
            goal,
            held,
            ..
        } = *self;
        let worth = shape.worth(limits);
        let capacity = goal.kv_capacity;
        let now = shape.kv.capacity_bytes(capacity, goal.kv_type);
        let converting = in_us(
            CONVERT_NS_PER_MIB,
            shape.kv.capacity_bytes(held, goal.kv_type),
        );
        let lost = |kind: KvType| worth.precision_us(capacity, held, goal.kv_type, kind);
        let kinds = std::iter::successors(goal.kv_type.smaller(), |kind| kind.smaller());
        let kinds = kinds.take_while(|kind| *kind >= limits.kv_type_least);
        let steps: Vec<Step> = (1..)
            .zip(kinds)
            .map(|(units, kind)| Step {
                units,
                bytes: now.saturating_sub(shape.kv.capacity_bytes(capacity, kind)),
                cost_us: lost(kind).saturating_add(converting.saturating_mul(2)),
            })
            .collect();
        let candidate = Candidate {
            source: Source::KvType,
            class: Class::LlmElastic,
            steps,
            unit: Bytes::ZERO,
        };
        (!candidate.steps.is_empty()).then_some(candidate)
    }

    /// The oldest KV blocks of the running answer, of which `droppable` tokens may be lost.
    ///
    /// They come behind all that the engine could give of its KV otherwise, which are the `others`, for only they take something
    /// from the answer that nothing brings back: so each costs more than all of those together.
    fn oldest_kv(&self, kv_least: KvType, others: &[Candidate]) -> Option<Candidate> {
        let Self {
            shape,
            limits,
            goal,
            droppable,
            ..
        } = *self;
        let kind = goal.kv_type.min(kv_least);
        let (block, has) = (shape.kv.block_tokens.get().max(1), goal.kv_capacity);
        let free = shape.blocks_to_give(goal, limits);
        let idle = PlanLimits {
            kv_used: Tokens::ZERO,
            ..*limits
        };
        let most = shape.blocks_to_give(goal, &idle).saturating_sub(free);
        let blocks = most.min(droppable.get() / block);
        let without = |blocks: u32| {
            let left = has.get().saturating_sub(blocks.saturating_mul(block));
            shape.kv.capacity_bytes(Tokens::new(left), kind)
        };
        let worth = shape.worth(limits);
        let tokens = |blocks: u32| blocks.saturating_mul(block).min(limits.kv_used.get());
        let lost = |blocks: u32| {
            let left = Tokens::new(limits.kv_used.get().saturating_sub(tokens(blocks)));
            worth
                .context_us(limits.kv_used, left, limits.kv_used)
                .saturating_mul(LOST_FOR_EVER)
        };
        let before: u64 = others
            .iter()
            .filter_map(|candidate| candidate.steps.last())
            .map(|step| step.cost_us)
            .fold(BEHIND_OTHERS_US, u64::saturating_add);
        let moving =
            |blocks: u32| in_us(COPY_NS_PER_MIB, shape.kv.blocks_bytes(blocks, goal.kv_type));
        let unit = shape.kv.blocks_bytes(1, kind);
        let mut candidate = Candidate::graded(
            Source::OldestKv,
            Class::LlmElastic,
            unit,
            blocks,
            |blocks| {
                before
                    .saturating_add(moving(blocks))
                    .saturating_add(lost(blocks))
            },
        );
        for step in &mut candidate.steps {
            step.bytes = without(free).saturating_sub(without(free.saturating_add(step.units)));
        }
        candidate.steps.retain(|step| step.bytes > Bytes::ZERO);
        (!candidate.steps.is_empty()).then_some(candidate)
    }

    /// Resident layers, one step for each.
    fn layers(&self) -> Option<Candidate> {
        let Self {
            shape,
            limits,
            goal,
            ..
        } = *self;
        let gives = shape.layers_give(goal, limits);
        let worth = shape.worth(limits);
        let speed = worth.speed();
        let ring = if goal.resident.len() == shape.layers.len() {
            shape.ring_bytes
        } else {
            Bytes::ZERO
        };
        let steps: Vec<Step> = (1..)
            .zip(&gives)
            .map(|(units, bytes)| {
                let layers = bytes.saturating_add(ring);
                Step {
                    units,
                    bytes: *bytes,
                    cost_us: worth
                        .streaming_us(layers)
                        .saturating_add(speed.reading_us(layers)),
                }
            })
            .collect();
        let candidate = Candidate {
            source: Source::Layers,
            class: Class::LlmElastic,
            steps,
            unit: Bytes::ZERO,
        };
        (!candidate.steps.is_empty()).then_some(candidate)
    }

    /// Workspace of a chunk that is larger than that of every other plan, as a whole.
    fn chunk(&self) -> Option<Candidate> {
        let Self {
            shape,
            limits,
            goal,
            ..
        } = *self;
        let bytes = shape.chunk_bytes(limits.prefill_chunk, goal.prefill_chunk);
        let worth = shape.worth(limits);
        let streamed = shape.bytes_without(&goal.resident);
        let slower = worth.prompts_us(streamed, limits.prefill_chunk);
        let cost_us = slower
            .saturating_sub(worth.prompts_us(streamed, goal.prefill_chunk))
            .saturating_add(in_us(TOUCH_NS_PER_MIB, bytes));
        let candidate =
            || Candidate::whole(Source::PrefillChunk, Class::LlmElastic, bytes, cost_us);
        (bytes > Bytes::ZERO).then(candidate)
    }
}

const fn in_us(ns_per_mib: u64, bytes: Bytes) -> u64 {
    ns_per_mib.saturating_mul(bytes.get() / 1024) / 1024 / 1000
}

/// Mapping and touching takes about 0.4 ms for each MiB, as measured on the engine's KV cache.
const TOUCH_NS_PER_MIB: u64 = 400_000;
/// Converting KV reads and writes it once: 0.35 to 1.5 ms for each MiB of `f16` with two threads of a busy machine.
const CONVERT_NS_PER_MIB: u64 = 700_000;
/// Dropping KV copies at most as much of it as is given back. Our choice of 5 GB/s: what is copied to is in memory, and memory
/// is read at 32 to 36 GB/s by two threads (src/dev/notebook.md).
const COPY_NS_PER_MIB: u64 = 200_000;
/// How much dearer a token is that is lost than one that can be read again. Our choice.
const LOST_FOR_EVER: u64 = 4;
/// The greatest cost of asking several, so that it does not outweigh the order.
const BEHIND_OTHERS_US: u64 = 1000;
/// The share that the engine was chosen to give up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Given {
    /// KV blocks.
    blocks: u32,
    /// How many of them the running answer uses, and may lose.
    oldest: u32,
    /// What these were weighed to give.
    block_bytes: Bytes,
    /// By how many types KV becomes smaller.
    smaller_types: u32,
    layers: u32,
    /// The larger prefill chunk.
    smaller_chunk: bool,
}

impl Given {
    /// Adds what was chosen of one source; others than the engine's do not count.
    pub(super) fn add(&mut self, source: &Source, units: u32, bytes: Bytes) {
        match source {
            Source::UnusedKv | Source::PrefixKv | Source::OldestKv => {
                self.blocks = self.blocks.saturating_add(units);
                self.block_bytes = self.block_bytes.saturating_add(bytes);
                if *source == Source::OldestKv {
                    self.oldest = units;
                }
            }
            Source::KvType => self.smaller_types = units,
            Source::Layers => self.layers = self.layers.saturating_add(units),
            Source::PrefillChunk => self.smaller_chunk = true,
            Source::Tenant { .. }
            | Source::WorkerVariant { .. }
            | Source::WorkerStop { .. }
            | Source::WorkerNotified { .. } => {}
        }
    }

    /// The smaller plan of an engine that holds `held`, and the bytes that it gives; `None` if it gives nothing, or
    /// nothing that what is held would cover meanwhile.
    pub(super) fn smaller_plan(
        self,
        engine: &EngineControl,
        held: Bytes,
    ) -> Option<(EnginePlan, Bytes)> {
        let (shape, limits, goal) = (engine.shape()?, engine.limits()?, engine.goal()?);
        let oldest = self.oldest.saturating_mul(shape.kv.block_tokens.get());
        let limits = PlanLimits {
            kv_used: Tokens::new(limits.kv_used.get().saturating_sub(oldest)),
            ..limits
        };
        let goal_bytes = shape.plan_bytes(goal);
        let kind =
            (0..self.smaller_types).fold(goal.kv_type, |kind, _| kind.smaller().unwrap_or(kind));
        let kind = kind.max(limits.kv_type_least).min(goal.kv_type);
        // Blocks were weighed by what they hold in the smallest type that is allowed: in another one fewer are enough.
        let blocks = shape.blocks_that_give(goal, kind, self.block_bytes, self.blocks);
        let layers = usize::try_from(self.layers).unwrap_or(usize::MAX);
        let mut plan = shape.shrunk(goal, blocks, layers, kind, &limits);
        let least_chunk = if engine.is_chunk_pinned() {
            goal.prefill_chunk
        } else {
            goal.prefill_chunk.min(limits.prefill_chunk)
        };
        if self.smaller_chunk {
            plan.prefill_chunk = least_chunk;
        }
        let only_kv = EnginePlan {
            resident: goal.resident.clone(),
            ..plan.clone()
        };
        let least = EnginePlan {
            prefill_chunk: least_chunk,
            ..shape.shrunk(goal, u32::MAX, usize::MAX, kind, &limits)
        };
        let gives = |plan: &EnginePlan| goal_bytes.saturating_sub(shape.plan_bytes(plan));
        // The engine keeps the KV capacity that its sequence has come to need by then. The first layer that is streamed
        // needs a ring; if it is larger than the layer, the two together would not be covered by what is held. And a
        // chunk under way ends before a smaller one begins.
        let is_covered = |plan: &EnginePlan| {
            let kept = EnginePlan {
                kv_capacity: goal.kv_capacity,
                prefill_chunk: goal.prefill_chunk,
                ..plan.clone()
            };
            shape.plan_bytes(&kept) <= held
        };
        let plan = [plan, only_kv, least]
            .into_iter()
            .find(|plan| gives(plan) > Bytes::ZERO && is_covered(plan))?;
        let promised = gives(&plan);
        Some((plan, promised))
    }
}
