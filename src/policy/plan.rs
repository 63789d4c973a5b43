//! Plans of a model: the largest that fits, larger and smaller ones, each by the best ratio of wait to bytes.
//!
//! Growing adds the KV block or the layer that shortens the wait most per byte. Shrinking treats weights and KV as two
//! halves with additive prices: for each number of layers and each chunk the cheapest KV for the remaining bytes is
//! computed, and the cheapest of these plans is chosen. If smaller KV types are permitted, plans grow in the smallest;
//! the loss of `q4` is restored after the layers, the negligible loss of `q8` last.

mod shrink;

use std::collections::BTreeSet;

use super::{
    kv_type::KvType,
    params::ResidencyMode,
    price::{KvContents, Price},
    residency::{EnginePlan, FloorError, LayerKind, LayerShape, Missing, ModelShape, PlanLimits},
};
use cotenant_units::{Bytes, Layers, Tokens};

pub(super) use self::shrink::{Giving, Less, Shrink};

impl ModelShape {
    /// Returns the largest plan that fits into `bytes`.
    ///
    /// All plans of a model under the same limits lie on one path from the floor to the full plan, and no step of it
    /// loses a layer or a KV block; so more bytes never give less of either. The last resident layer makes the staging
    /// ring unnecessary, so a plan with all layers may take less than one with all but one.
    ///
    /// # Errors
    /// The arithmetic of the floor, if it does not fit.
    ///
    /// ```
    /// # use cotenant_policy::{params::EngineParams, residency::*};
    /// # use cotenant_units::{Bytes, Tokens};
    /// let layer = LayerShape::new(LayerKind::Attention, 0, Bytes::from_mib(10));
    /// let shape = ModelShape {
    ///     name: "tiny".to_owned(), architecture: "llama".to_owned(), layers: vec![layer; 4],
    ///     fixed_bytes: Bytes::from_mib(5), state_bytes: Bytes::ZERO,
    ///     kv: KvShape { attention_layers: 4, kv_heads: 2, head_dim: 64, element_bytes: 2, granule: Bytes::ZERO, block_tokens: Tokens::new(64), windowed: None },
    ///     context_max: Tokens::new(4096), workspace_fixed_bytes: Bytes::ZERO, workspace_bytes_per_token: Bytes::ZERO,
    ///     ring_bytes: Bytes::from_mib(3),
    /// };
    /// let limits = PlanLimits::new(&EngineParams::default(), Tokens::ZERO);
    /// let plan = shape.plan(Bytes::from_mib(34), &limits)?;
    /// assert_eq!((plan.resident.len(), plan.kv_capacity), (2, Tokens::new(512)));
    /// assert!(shape.plan_bytes(&plan) <= Bytes::from_mib(34));
    /// # Ok::<(), FloorError>(())
    /// ```
    pub fn plan(&self, bytes: Bytes, limits: &PlanLimits) -> Result<EnginePlan, FloorError> {
        let floor = self.floor_plan(limits);
        Bounds::new(self, limits)
            .climb(&floor, bytes, &KvContents::to_come(limits))
            .ok_or_else(|| FloorError {
                model: self.name.clone(),
                floor: self.plan_bytes(&floor),
                resident: Layers::new(self.resident_layers(&floor)),
                layers: Layers::new(self.layer_count()),
                kv_tokens: floor.kv_capacity,
                available: bytes,
            })
    }

    /// Returns the smallest plan under `limits`.
    #[must_use]
    pub fn floor_plan(&self, limits: &PlanLimits) -> EnginePlan {
        let bounds = Bounds::new(self, limits);
        let least = EnginePlan {
            resident: bounds.first_layers(bounds.layers_min).collect(),
            kv_capacity: bounds.tokens_of(bounds.blocks_min),
            prefill_chunk: limits.prefill_chunk,
            kv_type: limits.kv_type_least.min(limits.kv_type),
        };
        let without_ring = EnginePlan {
            resident: bounds
                .first_layers(bounds.layers_min.max(bounds.without_ring()))
                .collect(),
            ..least.clone()
        };
        // A ring may take more than all the layers that it streams.
        if self.plan_bytes(&without_ring) < self.plan_bytes(&least) {
            without_ring
        } else {
            least
        }
    }

    /// Returns the plan for plentiful memory.
    #[must_use]
    pub fn full_plan(&self, limits: &PlanLimits) -> EnginePlan {
        let bounds = Bounds::new(self, limits);
        EnginePlan {
            kv_capacity: bounds.tokens_of(bounds.blocks_max),
            resident: bounds.give_up.into_iter().collect(),
            prefill_chunk: limits.prefill_chunk,
            kv_type: limits.kv_type,
        }
    }

    /// Returns the largest plan that fits into `bytes` and gives up nothing of `from`, whose cache contains `kv`.
    ///
    /// A larger prefill chunk is kept as long as streamed layers make it worth its memory.
    #[must_use]
    pub fn grown(
        &self,
        from: &EnginePlan,
        bytes: Bytes,
        limits: &PlanLimits,
        kv: &KvContents,
    ) -> EnginePlan {
        let plan = Bounds::new(self, limits).climb(from, bytes, kv);
        plan.unwrap_or_else(|| from.clone())
    }

    /// Returns `from` with a larger prefill chunk, if it is worth its memory: each chunk reads the streamed layers
    /// once, so while reading takes longer than computing, twice the chunk makes prompts nearly twice as fast.
    ///
    /// The plan fits into `bytes`. Missing bytes for the workspace are taken from as few layers as suffice, and only if
    /// the wait for prompts becomes clearly shorter, so that small changes of the measured speed have no effect.
    #[must_use]
    pub fn rechunked(
        &self,
        from: &EnginePlan,
        bytes: Bytes,
        limits: &PlanLimits,
    ) -> Option<EnginePlan> {
        let streamed = self.missing(&from.resident);
        let twice = |chunk: &Tokens| Some(Tokens::new(chunk.get().saturating_mul(2)));
        let larger = std::iter::successors(twice(&from.prefill_chunk), twice);
        let larger = larger.take_while(|chunk| *chunk <= limits.prefill_chunk_max);
        let mut larger = larger.peekable();
        if streamed.bytes == Bytes::ZERO || larger.peek().is_none() {
            return None;
        }
        let (bounds, price) = (Bounds::new(self, limits), Price::new(self, limits));
        let holds = self.plan_bytes(from);
        let now = price.weights_us(streamed, from.prefill_chunk);
        let least = price.prompts_us(streamed.bytes, from.prefill_chunk) / GAIN_LEAST;
        let givable = bounds.layers_to_give(from);
        let sound = larger.filter_map(|chunk| {
            let mut missing = holds
                .saturating_add(self.chunk_bytes(from.prefill_chunk, chunk))
                .saturating_sub(bytes);
            let mut plan = EnginePlan {
                prefill_chunk: chunk,
                ..from.clone()
            };
            let mut without = streamed;
            let given = |without: Missing| without.bytes.saturating_sub(streamed.bytes);
            // The first part that is streamed needs the ring; experts need none.
            let mut ring = self
                .ring_bytes
                .saturating_sub(self.ring_beside(&from.resident));
            for index in &givable {
                if given(without) >= missing {
                    break;
                }
                plan.resident.remove(index);
                if let Some(part) = bounds.part(*index) {
                    without = without.with(part);
                    if part.is_streamed() {
                        missing = missing.saturating_add(std::mem::take(&mut ring));
                    }
                }
            }
            let given = given(without);
            let then = price.weights_us(without, chunk);
            let gained = now.saturating_sub(then);
            (given >= missing && gained > 0 && gained >= least).then_some((gained, plan))
        });
        // Of two with the same gain, the smaller one.
        let best = sound.reduce(|best, next| if next.0 > best.0 { next } else { best });
        best.map(|(_, plan)| plan)
    }

    /// Returns `from` with a KV capacity of at least `needed` tokens within `bytes`, and up to `wanted` if there is
    /// room.
    ///
    /// Missing bytes for `needed` are taken from as few layers as suffice; none is given up for `wanted`. `None` if the
    /// capacity does not fit, or if `from` already has it.
    #[must_use]
    pub fn with_capacity(
        &self,
        from: &EnginePlan,
        (needed, wanted): (Tokens, Tokens),
        bytes: Bytes,
        limits: &PlanLimits,
    ) -> Option<EnginePlan> {
        let bounds = Bounds::new(self, limits);
        let has = bounds.blocks_of(from.kv_capacity);
        let blocks = |tokens: Tokens| {
            let blocks = tokens.get().div_ceil(bounds.block);
            blocks.min(bounds.blocks_max).max(has)
        };
        let least = blocks(needed);
        let mut plan = EnginePlan {
            kv_capacity: bounds.tokens_of(least),
            ..from.clone()
        };
        let givable = if least > has {
            bounds.layers_to_give(from)
        } else {
            Vec::new()
        };
        for index in givable {
            if self.plan_bytes(&plan) <= bytes {
                break;
            }
            plan.resident.remove(&index);
        }
        let kv = |blocks: u32| self.kv.blocks_bytes(blocks, from.kv_type);
        let rest = self.plan_bytes(&plan).saturating_sub(kv(least));
        let fits = |blocks: &u32| rest.saturating_add(kv(*blocks)) <= bytes;
        let most = (least..=blocks(wanted).max(least)).rev().find(fits)?;
        plan.kv_capacity = bounds.tokens_of(most);
        (most > has).then_some(plan)
    }
}

/// Bounds of a model's plans, in layers and blocks.
#[derive(Debug)]
struct Bounds<'a> {
    shape: &'a ModelShape,
    limits: PlanLimits,
    /// Layers in the order of giving up.
    give_up: Vec<u32>,
    layers_min: usize,
    /// Tokens of a block.
    block: u32,
    blocks_min: u32,
    blocks_max: u32,
}

impl<'a> Bounds<'a> {
    fn new(shape: &'a ModelShape, limits: &PlanLimits) -> Self {
        let block = shape.kv.block_tokens.get().max(1);
        let wanted = limits.kv_wanted.min(shape.context_max).get();
        let copies = shape.tokens_of_copies(limits.conversations, limits.kv_type);
        let floor = limits.kv_floor.get().min(wanted).max(1);
        let blocks_min = floor.max(limits.kv_used.get()).div_ceil(block);
        let mut give_up = evenly_spread(shape.layers.len());
        // A token needs few experts of each layer, and everything else; a draft makes up for several streamed layers.
        let part = |index: &u32| shape.layers.get(usize::try_from(*index).ok()?);
        give_up.sort_by_key(|index| {
            let part = part(index);
            let is_draft = part.is_some_and(|part| part.kind == LayerKind::Draft);
            (is_draft, part.is_some_and(LayerShape::is_streamed))
        });
        Self {
            shape,
            limits: *limits,
            layers_min: shape.parts_of(limits.resident_min).min(give_up.len()),
            give_up,
            block,
            blocks_min,
            blocks_max: (wanted.saturating_add(copies.get()) / block).max(blocks_min),
        }
    }

    /// Returns the first layers to become resident.
    fn first_layers(&self, count: usize) -> impl Iterator<Item = u32> {
        self.give_up.iter().rev().take(count).copied()
    }

    /// Returns how many of the first layers make the ring unnecessary.
    fn without_ring(&self) -> usize {
        let all: Vec<u32> = self.first_layers(self.give_up.len()).collect();
        self.through_ring(&all)
    }

    /// Returns the length of the beginning of these parts that contains all that are read through the ring.
    fn through_ring(&self, parts: &[u32]) -> usize {
        let is_streamed = |index: &u32| self.part(*index).is_some_and(LayerShape::is_streamed);
        parts
            .iter()
            .rposition(is_streamed)
            .map_or(0, |last| last + 1)
    }

    /// Returns the layers that `from` can give up, in order.
    fn layers_to_give(&self, from: &EnginePlan) -> Vec<u32> {
        let given = from.resident.len().saturating_sub(self.layers_min);
        let resident = self
            .give_up
            .iter()
            .filter(|index| from.resident.contains(index));
        resident.take(given).copied().collect()
    }

    fn part(&self, index: u32) -> Option<&'a LayerShape> {
        self.shape.layers.get(usize::try_from(index).ok()?)
    }

    fn tokens_of(&self, blocks: u32) -> Tokens {
        Tokens::new(blocks.saturating_mul(self.block))
    }

    fn blocks_of(&self, capacity: Tokens) -> u32 {
        capacity.get() / self.block
    }

    /// Returns the last plan that fits into `bytes` on the path from `from` to the full plan; `None` if `from` does not
    /// fit.
    fn climb(&self, from: &EnginePlan, bytes: Bytes, kv: &KvContents) -> Option<EnginePlan> {
        let (shape, limits) = (self.shape, &self.limits);
        let price = Price::new(shape, limits);
        let [least, middle, most] =
            KvType::ALL.map(|kind| from.kv_type.max(kind.min(limits.kv_type)));
        let mut missing = self.first_layers(self.give_up.len()).collect::<Vec<u32>>();
        missing.retain(|index| !from.resident.contains(index));
        let last = self.blocks_max.max(self.blocks_of(from.kv_capacity));
        let weights_us = |streamed| price.weights_us(streamed, limits.prefill_chunk);
        let kv_us = |blocks| price.kv_us(self.tokens_of(blocks), least, kv);
        let block_bytes = shape.kv.bytes_per_token(least).get() * u64::from(self.block);
        let mut step = Rung {
            layers: 0,
            blocks: self.blocks_of(from.kv_capacity),
            kind: least,
            chunk: from.prefill_chunk.max(limits.prefill_chunk),
            streamed: shape.missing(&from.resident),
        };
        let bare = EnginePlan {
            resident: BTreeSet::new(),
            kv_capacity: Tokens::ZERO,
            prefill_chunk: limits.prefill_chunk,
            kv_type: least,
        };
        let all = shape.weights().bytes;
        let base = shape
            .plan_bytes(&bare)
            .saturating_sub(shape.ring_beside(&bare.resident));
        let through_ring = self.through_ring(&missing);
        let fits = |step: &Rung| {
            let layers = all.saturating_sub(step.streamed.bytes);
            // Experts come last.
            let ring = if step.layers < through_ring {
                shape.ring_bytes
            } else {
                Bytes::ZERO
            };
            let held = [
                base,
                layers,
                ring,
                shape.chunk_bytes(limits.prefill_chunk, step.chunk),
                shape.kv.blocks_bytes(step.blocks, step.kind),
            ];
            held.into_iter().fold(Bytes::ZERO, Bytes::saturating_add) <= bytes
        };
        let mut best = fits(&step).then_some(step);
        let mut take = |step: Rung| {
            if fits(&step) {
                best = Some(step);
            }
        };
        loop {
            let layer = missing.get(step.layers).and_then(|index| self.part(*index));
            let layer = match layer {
                Some(part) if step.blocks < last => {
                    let left = step.streamed.without(part);
                    let faster = weights_us(step.streamed).saturating_sub(weights_us(left));
                    let longer = kv_us(step.blocks).saturating_sub(kv_us(step.blocks + 1));
                    let layer = u128::from(faster) * u128::from(block_bytes);
                    let context = u128::from(longer) * u128::from(part.resident_bytes.get());
                    let is_first = match limits.mode {
                        ResidencyMode::MaxContext => layer > context,
                        ResidencyMode::Balanced | ResidencyMode::MaxSpeed => layer >= context,
                    };
                    is_first.then_some(part)
                }
                other => other,
            };
            if let Some(part) = layer {
                step.layers += 1;
                step.streamed = step.streamed.without(part);
                let bytes = step.streamed.bytes;
                step.chunk = still_paid(&price, bytes, step.chunk, limits.prefill_chunk);
            } else if step.layers == missing.len() && step.kind < middle {
                step.kind = middle;
            } else if step.blocks < last {
                step.blocks += 1;
            } else if step.kind < most {
                step.kind = most;
            } else {
                break;
            }
            if step.layers == missing.len() {
                step.chunk = limits.prefill_chunk;
            }
            take(step);
        }
        let best = best?;
        let added = missing.iter().take(best.layers);
        Some(EnginePlan {
            resident: from.resident.iter().chain(added).copied().collect(),
            kv_capacity: self.tokens_of(best.blocks),
            prefill_chunk: best.chunk,
            kv_type: best.kind,
        })
    }
}

/// A plan on the way up.
#[derive(Clone, Copy, Debug)]
struct Rung {
    /// Layers added.
    layers: usize,
    blocks: u32,
    kind: KvType,
    chunk: Tokens,
    streamed: Missing,
}

/// Returns `chunk`, halved down to `least` while that makes prompts hardly slower.
fn still_paid(price: &Price<'_>, streamed: Bytes, mut chunk: Tokens, least: Tokens) -> Tokens {
    loop {
        let half = Tokens::new(chunk.get() / 2);
        let now = price.prompts_us(streamed, chunk);
        let is_paid = price.prompts_us(streamed, half) > now.saturating_add(now / (2 * GAIN_LEAST));
        if is_paid || half < least || half == Tokens::ZERO {
            return chunk;
        }
        chunk = half;
    }
}

/// Returns the numbers below `count` in the order of their reversed bits (van der Corput): every prefix is spread over
/// the whole range.
///
/// Distant streamed layers leave time to read the next one while the resident ones between them compute; with one order
/// for all plans, a smaller plan only drops layers and never loads one.
fn evenly_spread(count: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..u32::try_from(count).unwrap_or(u32::MAX)).collect();
    order.sort_by_key(|index| index.reverse_bits());
    order
}

/// Minimum gain for a larger chunk: one part of this many of the wait for prompts. A chunk is kept while half of it
/// would make prompts slower by half as much. Our choice.
const GAIN_LEAST: u64 = 8;

#[cfg(test)]
mod tests;
