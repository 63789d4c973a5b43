//! Plans of a model: the largest that fits, larger ones, smaller ones, each by the best change of the wait for its bytes.
//!
//! Up, a step adds the KV block or the layer that shortens the wait most for its bytes. Down, weights and KV are two halves
//! whose prices add up: for each number of layers and each chunk that may go, the cheapest KV that gives the rest is found,
//! and the cheapest of all these plans is taken. Where KV may be kept in a smaller type, plans grow in the smallest; what
//! `q4` loses is made good after the layers, what `q8` loses, which is next to nothing, at the very end.

use std::collections::BTreeSet;

use super::{
    kv_type::KvType,
    params::ResidencyMode,
    price::{KvContents, Price},
    residency::{EnginePlan, FloorError, ModelShape, PlanLimits},
};
use cotenant_units::{Bytes, Layers, Tokens};

impl ModelShape {
    /// The largest plan that fits into `bytes`.
    ///
    /// All plans of a model under the same limits lie on one path from the floor to the full plan, and no step of it
    /// loses a layer or a KV block; so more bytes never give less of either. The last layer to become resident makes the
    /// staging ring superfluous, so a plan with all layers may be cheaper than one with all but one.
    ///
    /// # Errors
    /// The arithmetic of the floor, if that does not fit.
    ///
    /// ```
    /// # use cotenant_policy::{params::EngineParams, residency::*};
    /// # use cotenant_units::{Bytes, Tokens};
    /// let layer = LayerShape { kind: LayerKind::Attention, part: 0, resident_bytes: Bytes::from_mib(10) };
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

    /// The least that the engine runs with under `limits`.
    #[must_use]
    pub fn floor_plan(&self, limits: &PlanLimits) -> EnginePlan {
        let bounds = Bounds::new(self, limits);
        let least = EnginePlan {
            resident: bounds.first_layers(bounds.layers_min).collect(),
            kv_capacity: bounds.tokens_of(bounds.blocks_min),
            prefill_chunk: limits.prefill_chunk,
            kv_type: limits.kv_type_least.min(limits.kv_type),
        };
        let whole = EnginePlan {
            resident: bounds.give_up.iter().copied().collect(),
            ..least.clone()
        };
        // A ring may take more than all the layers that it streams.
        if self.plan_bytes(&whole) < self.plan_bytes(&least) {
            whole
        } else {
            least
        }
    }

    /// The plan when memory is plentiful.
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

    /// The largest plan that fits into `bytes` and gives up nothing of `from`, whose cache has `kv`.
    ///
    /// Its prefill chunk stays as long as something is streamed that makes it worth its memory.
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

    /// `from` with a larger prefill chunk, if that is worth what it takes: a chunk reads what is streamed once, so while
    /// reading takes longer than computing, twice the chunk makes prompts nearly twice as fast.
    ///
    /// It fits into `bytes`. What is missing for the workspace comes from as few layers as suffice, and only if the wait
    /// for prompts becomes clearly shorter by it; so speeds that differ a little from those of a moment ago change nothing.
    #[must_use]
    pub fn rechunked(
        &self,
        from: &EnginePlan,
        bytes: Bytes,
        limits: &PlanLimits,
    ) -> Option<EnginePlan> {
        let streamed = self.bytes_without(&from.resident);
        let twice = |chunk: &Tokens| Some(Tokens::new(chunk.get().saturating_mul(2)));
        let larger = std::iter::successors(twice(&from.prefill_chunk), twice);
        let larger = larger.take_while(|chunk| *chunk <= limits.prefill_chunk_max);
        let mut larger = larger.peekable();
        if streamed == Bytes::ZERO || larger.peek().is_none() {
            return None;
        }
        let (bounds, price) = (Bounds::new(self, limits), Price::new(self, limits));
        let holds = self.plan_bytes(from);
        let now = price.weights_us(streamed, from.prefill_chunk);
        let least = price.prompts_us(streamed, from.prefill_chunk) / GAIN_LEAST;
        let givable = bounds.layers_to_give(from);
        let sound = larger.filter_map(|chunk| {
            let missing = holds
                .saturating_add(self.chunk_bytes(from.prefill_chunk, chunk))
                .saturating_sub(bytes);
            let mut plan = EnginePlan {
                prefill_chunk: chunk,
                ..from.clone()
            };
            let mut given = Bytes::ZERO;
            for index in &givable {
                if given >= missing {
                    break;
                }
                plan.resident.remove(index);
                given = given.saturating_add(bounds.layer_bytes(*index));
            }
            let then = price.weights_us(streamed.saturating_add(given), chunk);
            let gained = now.saturating_sub(then);
            (given >= missing && gained > 0 && gained >= least).then_some((gained, plan))
        });
        // Of two that are worth the same, the smaller one.
        let best = sound.reduce(|best, next| if next.0 > best.0 { next } else { best });
        best.map(|(_, plan)| plan)
    }

    /// `from` with a KV capacity of at least `needed` tokens within `bytes`, and up to `wanted` as far as that leaves room.
    ///
    /// What is missing for `needed` comes from as few layers as suffice, for what is `wanted` beyond it no layer is given.
    /// `None` if the capacity does not fit, or if `from` has it already.
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
    limits: &'a PlanLimits,
    /// Layers in the order in which they are given up.
    give_up: Vec<u32>,
    layers_min: usize,
    /// Tokens of a block.
    block: u32,
    blocks_min: u32,
    blocks_max: u32,
}

impl<'a> Bounds<'a> {
    fn new(shape: &'a ModelShape, limits: &'a PlanLimits) -> Self {
        let block = shape.kv.block_tokens.get().max(1);
        let wanted = limits.kv_wanted.min(shape.context_max).get();
        let floor = limits.kv_floor.get().min(wanted).max(1);
        let blocks_min = floor.max(limits.kv_used.get()).div_ceil(block);
        let give_up = evenly_spread(shape.layers.len());
        Self {
            shape,
            limits,
            layers_min: shape.parts_of(limits.resident_min).min(give_up.len()),
            give_up,
            block,
            blocks_min,
            blocks_max: (wanted / block).max(blocks_min),
        }
    }

    /// The first layers to become resident.
    fn first_layers(&self, count: usize) -> impl Iterator<Item = u32> {
        self.give_up.iter().rev().take(count).copied()
    }

    /// Layers that `from` can do without, the first to go first.
    fn layers_to_give(&self, from: &EnginePlan) -> Vec<u32> {
        let given = from.resident.len().saturating_sub(self.layers_min);
        let resident = self
            .give_up
            .iter()
            .filter(|index| from.resident.contains(index));
        resident.take(given).copied().collect()
    }

    fn layer_bytes(&self, index: u32) -> Bytes {
        let layer = usize::try_from(index)
            .ok()
            .and_then(|index| self.shape.layers.get(index));
        layer.map_or(Bytes::ZERO, |layer| layer.resident_bytes)
    }

    fn tokens_of(&self, blocks: u32) -> Tokens {
        Tokens::new(blocks.saturating_mul(self.block))
    }

    fn blocks_of(&self, capacity: Tokens) -> u32 {
        capacity.get() / self.block
    }

    /// The last plan that fits into `bytes` on the path from `from` to all that there is; `None` if not even `from` does.
    fn climb(&self, from: &EnginePlan, bytes: Bytes, kv: &KvContents) -> Option<EnginePlan> {
        let (shape, limits) = (self.shape, self.limits);
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
            streamed: shape.bytes_without(&from.resident),
        };
        let bare = EnginePlan {
            resident: BTreeSet::new(),
            kv_capacity: Tokens::ZERO,
            prefill_chunk: limits.prefill_chunk,
            kv_type: least,
        };
        let ring = |is_streamed: bool| {
            if is_streamed {
                shape.ring_bytes
            } else {
                Bytes::ZERO
            }
        };
        let all: Bytes = shape.layers.iter().map(|layer| layer.resident_bytes).sum();
        let base = shape
            .plan_bytes(&bare)
            .saturating_sub(ring(!shape.layers.is_empty()));
        let fits = |step: &Rung| {
            let layers = all.saturating_sub(step.streamed);
            let held = [
                base,
                layers,
                ring(step.layers < missing.len()),
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
            let layer = missing
                .get(step.layers)
                .map(|index| self.layer_bytes(*index));
            let layer = match layer {
                Some(bytes) if step.blocks < last => {
                    let left = step.streamed.saturating_sub(bytes);
                    let faster = weights_us(step.streamed).saturating_sub(weights_us(left));
                    let longer = kv_us(step.blocks).saturating_sub(kv_us(step.blocks + 1));
                    let layer = u128::from(faster) * u128::from(block_bytes);
                    let context = u128::from(longer) * u128::from(bytes.get());
                    let is_first = match limits.mode {
                        ResidencyMode::MaxContext => layer > context,
                        ResidencyMode::Balanced | ResidencyMode::MaxSpeed => layer >= context,
                    };
                    is_first.then_some(bytes)
                }
                other => other,
            };
            if let Some(bytes) = layer {
                step.layers += 1;
                step.streamed = step.streamed.saturating_sub(bytes);
                step.chunk = still_paid(&price, step.streamed, step.chunk, limits.prefill_chunk);
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
    /// Layers that were added.
    layers: usize,
    blocks: u32,
    kind: KvType,
    chunk: Tokens,
    streamed: Bytes,
}

/// `chunk`, or so often half of it as prompts take hardly longer for it, down to `least`.
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

/// Something that can be given up, with its price.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Less {
    pub(super) gives: Bytes,
    pub(super) price_us: u64,
    layers: usize,
    chunk: Tokens,
    blocks: u32,
    kind: KvType,
}

/// Smaller plans than one.
#[derive(Debug)]
pub(super) struct Shrink<'a> {
    pub(super) from: &'a EnginePlan,
    pub(super) price: Price<'a>,
    kv: KvContents,
    bounds: Bounds<'a>,
    giving: Giving,
}

/// What may be given up of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Giving {
    /// Layers, chunk, precision and the oldest tokens, too; else only KV blocks that no answer uses.
    pub(super) is_serious: bool,
    /// Tokens that the running answer may lose.
    pub(super) droppable: Tokens,
    /// Whether the chunk may become smaller.
    pub(super) chunk: bool,
}

impl<'a> Shrink<'a> {
    pub(super) fn new(
        shape: &'a ModelShape,
        limits: &'a PlanLimits,
        from: &'a EnginePlan,
        kv: KvContents,
        giving: Giving,
    ) -> Self {
        Self {
            from,
            price: Price::new(shape, limits),
            kv,
            bounds: Bounds::new(shape, limits),
            giving,
        }
    }

    /// Layers and chunk that can be given up, the less first; each gives more than those before it.
    pub(super) fn weights(&self) -> Vec<Less> {
        let (shape, from) = (self.bounds.shape, self.from);
        let streamed = shape.bytes_without(&from.resident);
        let ring = if streamed == Bytes::ZERO {
            shape.ring_bytes
        } else {
            Bytes::ZERO
        };
        let mut sums = vec![Bytes::ZERO];
        for index in self.layers() {
            let sum = sums.last().copied().unwrap_or_default();
            sums.push(sum.saturating_add(self.bounds.layer_bytes(index)));
        }
        let mut all = Vec::new();
        for chunk in BTreeSet::from([from.prefill_chunk, self.least_chunk()]) {
            let workspace = shape.chunk_bytes(chunk, from.prefill_chunk);
            for (layers, sum) in sums.iter().enumerate() {
                // The first layer that is streamed needs a ring; a plan that takes more in one half would not be
                // covered by what is held until the other has given.
                if layers > 0 && *sum <= ring {
                    continue;
                }
                let less = streamed.saturating_add(*sum);
                all.push(Less {
                    gives: sum
                        .saturating_sub(if layers > 0 { ring } else { Bytes::ZERO })
                        .saturating_add(workspace),
                    price_us: self
                        .price
                        .weights_given_up((streamed, from.prefill_chunk), (less, chunk)),
                    layers,
                    chunk,
                    ..self.nothing()
                });
            }
        }
        undominated(all)
    }

    /// KV that can be given up in steps, by blocks and by type, the less first; each gives more than those before it.
    pub(super) fn kv(&self) -> Vec<Less> {
        let has = self.bounds.blocks_of(self.from.kv_capacity);
        let block = self.bounds.block;
        let marks = [self.kv.touched, self.kv.kept, self.kv.used]
            .map(|tokens| has.saturating_sub(tokens.get().div_ceil(block)));
        let mut all = Vec::new();
        for kind in self.kinds() {
            let most = self.most_blocks(kind);
            let stride = most.div_ceil(STEPS_MAX).max(1);
            let steps = (0..=most / stride).map(|step| step * stride);
            let counts: BTreeSet<u32> = steps
                .chain(marks.into_iter().filter(|mark| *mark < most))
                .chain([most])
                .collect();
            all.extend(counts.into_iter().map(|blocks| self.without(blocks, kind)));
        }
        undominated(all)
    }

    /// The cheapest plan that gives `bytes`; where there is none, the one that gives most.
    pub(super) fn to_give(&self, bytes: Bytes) -> EnginePlan {
        let mut best: Option<(u64, Bytes, Less, Less)> = None;
        for weights in std::iter::once(self.nothing()).chain(self.weights()) {
            let rest = bytes.saturating_sub(weights.gives);
            for kind in self.kinds() {
                let kv = self.without(self.fewest_blocks(kind, rest), kind);
                let gives = weights.gives.saturating_add(kv.gives);
                let price = weights.price_us.saturating_add(kv.price_us);
                // What is not enough is the better, the more it gives.
                let missing = bytes.saturating_sub(gives);
                let is_better = best.is_none_or(|(least, had, ..)| {
                    let lacked = bytes.saturating_sub(had);
                    (missing, price, gives) < (lacked, least, had)
                });
                if is_better {
                    best = Some((price, gives, weights, kv));
                }
            }
        }
        best.map_or_else(
            || self.from.clone(),
            |(_, _, weights, kv)| self.plan_of(&weights, &kv),
        )
    }

    /// Plans that each give up one kind of thing more than the one before, in the order of what they take from an answer.
    pub(super) fn ladder(&self) -> [EnginePlan; 6] {
        let (from, bounds, nothing) = (self.from, &self.bounds, self.nothing());
        let has = bounds.blocks_of(from.kv_capacity);
        let least = self.kinds().into_iter().min().unwrap_or(from.kv_type);
        let free = has.saturating_sub(bounds.blocks_min);
        let most = self.weights().pop().unwrap_or(nothing);
        let kept = self.kv.kept.get().div_ceil(bounds.block);
        let kv = |blocks: u32, kind| Less {
            blocks,
            kind,
            ..nothing
        };
        let blocks = |blocks: u32, kind| self.plan_of(&nothing, &kv(blocks, kind));
        let all = kv(self.most_blocks(least), least);
        let layers = Less {
            chunk: from.prefill_chunk,
            ..most
        };
        [
            blocks(free.min(has.saturating_sub(kept)), from.kv_type),
            blocks(free, from.kv_type),
            blocks(free, least),
            self.plan_of(&nothing, &all),
            self.plan_of(&layers, &all),
            self.plan_of(&most, &all),
        ]
    }

    /// Layers that can be given up, the first to go first.
    fn layers(&self) -> Vec<u32> {
        if self.giving.is_serious {
            self.bounds.layers_to_give(self.from)
        } else {
            Vec::new()
        }
    }

    /// The types in which KV may be kept.
    fn kinds(&self) -> Vec<KvType> {
        let has = self.from.kv_type;
        let least = if self.giving.is_serious {
            self.bounds.limits.kv_type_least.min(has)
        } else {
            has
        };
        let kinds = KvType::ALL.into_iter().rev();
        kinds.filter(|kind| (least..=has).contains(kind)).collect()
    }

    fn least_chunk(&self) -> Tokens {
        let has = self.from.prefill_chunk;
        if self.giving.chunk && self.giving.is_serious {
            has.min(self.bounds.limits.prefill_chunk)
        } else {
            has
        }
    }

    /// Blocks that can be given up where KV is kept as `kind`: the oldest of a running answer only where nothing else of KV
    /// is left, for only they take something from the answer that nothing brings back.
    fn most_blocks(&self, kind: KvType) -> u32 {
        let (bounds, limits) = (&self.bounds, self.bounds.limits);
        let has = bounds.blocks_of(self.from.kv_capacity);
        let free = has.saturating_sub(bounds.blocks_min);
        if !self.giving.is_serious || kind > limits.kv_type_least.min(self.from.kv_type) {
            return free;
        }
        let idle = PlanLimits {
            kv_used: Tokens::ZERO,
            ..*limits
        };
        let floor = Bounds::new(bounds.shape, &idle).blocks_min;
        let oldest = self.giving.droppable.get() / bounds.block;
        free + oldest.min(has.saturating_sub(floor).saturating_sub(free))
    }

    /// The fewest blocks without which KV as `kind` holds `bytes` less, or all that may go.
    fn fewest_blocks(&self, kind: KvType, bytes: Bytes) -> u32 {
        let (mut least, mut most) = (0, self.most_blocks(kind));
        while least < most {
            let middle = least + (most - least) / 2;
            if self.kv_gives(middle, kind) >= bytes {
                most = middle;
            } else {
                least = middle + 1;
            }
        }
        least
    }

    fn kv_gives(&self, blocks: u32, kind: KvType) -> Bytes {
        let (kv, from) = (&self.bounds.shape.kv, self.from);
        let has = self.bounds.blocks_of(from.kv_capacity);
        kv.blocks_bytes(has, from.kv_type)
            .saturating_sub(kv.blocks_bytes(has.saturating_sub(blocks), kind))
    }

    fn without(&self, blocks: u32, kind: KvType) -> Less {
        let (from, has) = (self.from, self.bounds.blocks_of(self.from.kv_capacity));
        let left = self.bounds.tokens_of(has.saturating_sub(blocks));
        Less {
            gives: self.kv_gives(blocks, kind),
            price_us: self.price.kv_given_up(
                (from.kv_capacity, from.kv_type),
                (left, kind),
                &self.kv,
            ),
            blocks,
            kind,
            ..self.nothing()
        }
    }

    const fn nothing(&self) -> Less {
        Less {
            gives: Bytes::ZERO,
            price_us: 0,
            layers: 0,
            chunk: self.from.prefill_chunk,
            blocks: 0,
            kind: self.from.kv_type,
        }
    }

    fn plan_of(&self, weights: &Less, kv: &Less) -> EnginePlan {
        let (from, bounds) = (self.from, &self.bounds);
        let mut resident = from.resident.clone();
        for index in self.layers().into_iter().take(weights.layers) {
            resident.remove(&index);
        }
        let has = bounds.blocks_of(from.kv_capacity);
        EnginePlan {
            resident,
            kv_capacity: bounds.tokens_of(has.saturating_sub(kv.blocks)),
            prefill_chunk: weights.chunk,
            kv_type: kv.kind,
        }
    }

    /// The price of a smaller plan.
    pub(super) fn price_of(&self, plan: &EnginePlan) -> u64 {
        self.price.given_up(self.from, plan, &self.kv)
    }
}

/// Drops what gives nothing, and what gives no more than something cheaper; the less comes first.
fn undominated(mut all: Vec<Less>) -> Vec<Less> {
    all.sort_by_key(|less| (less.price_us, std::cmp::Reverse(less.gives)));
    let mut most = Bytes::ZERO;
    all.retain(|less| {
        let gives_more = less.gives > most;
        most = most.max(less.gives);
        gives_more
    });
    all
}

/// The numbers below `count`, in an order of which every beginning is spread over the whole range: that of the
/// reversed bits (van der Corput).
///
/// Streamed layers that lie far apart leave time to read the next one while the resident ones between them compute;
/// and with one order for all plans, a smaller plan only drops layers and never has to load one.
fn evenly_spread(count: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..u32::try_from(count).unwrap_or(u32::MAX)).collect();
    order.sort_by_key(|index| index.reverse_bits());
    order
}

/// Prompts have to become faster by at least one part of this many for the engine to change its chunk; a chunk is kept while
/// half of it would make them slower by half as much. Our choice.
const GAIN_LEAST: u64 = 8;
/// Steps in which KV is weighed. What a step gives too much is kept afterwards.
const STEPS_MAX: u32 = 16;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        params::EngineParams,
        residency::{KvShape, LayerKind, LayerShape, WindowedKv, sample_shape},
        speed::Speed,
    };

    fn shape(layers: &[u64], ring: u64, block_tokens: u32) -> ModelShape {
        let sample = sample_shape(0, Bytes::ZERO);
        let layer = |bytes: &u64| LayerShape {
            kind: LayerKind::Attention,
            part: 0,
            resident_bytes: Bytes::new(*bytes),
        };
        ModelShape {
            layers: layers.iter().map(layer).collect(),
            fixed_bytes: Bytes::new(5000),
            state_bytes: Bytes::new(100),
            kv: KvShape {
                attention_layers: 2,
                kv_heads: 1,
                head_dim: 4,
                block_tokens: Tokens::new(block_tokens),
                ..sample.kv
            },
            context_max: Tokens::new(4096),
            workspace_fixed_bytes: Bytes::new(10),
            workspace_bytes_per_token: Bytes::new(3),
            ring_bytes: Bytes::new(ring),
            ..sample
        }
    }

    fn limits(mode: ResidencyMode) -> PlanLimits {
        PlanLimits::new(
            &EngineParams {
                mode,
                ..EngineParams::default()
            },
            Tokens::ZERO,
        )
    }

    fn limits_with(mode: ResidencyMode, kinds: (KvType, KvType)) -> PlanLimits {
        PlanLimits {
            kv_type_least: kinds.0.min(kinds.1),
            kv_type: kinds.1,
            ..limits(mode)
        }
    }

    const MODES: [ResidencyMode; 3] = [
        ResidencyMode::Balanced,
        ResidencyMode::MaxContext,
        ResidencyMode::MaxSpeed,
    ];

    #[test]
    fn streamed_layers_are_spread_through_the_depth() {
        assert_eq!(evenly_spread(8), [0, 4, 2, 6, 1, 5, 3, 7]);
        assert_eq!(evenly_spread(5), [0, 4, 2, 1, 3]);
    }

    #[test]
    fn the_ring_makes_all_layers_cheaper_than_all_but_one() {
        let shape = shape(&[1000; 4], 1500, 64);
        let limits = limits(ResidencyMode::MaxSpeed);
        let full_layers = shape.plan_bytes(&shape.floor_plan(&limits)) + Bytes::new(4000 - 1500);
        assert_eq!(shape.plan(full_layers, &limits).unwrap().resident.len(), 4);
        let short = full_layers - Bytes::new(1);
        assert_eq!(shape.plan(short, &limits).unwrap().resident.len(), 2);
    }

    #[test]
    fn the_mode_says_what_goes_first() {
        let shape = shape(&[10_000; 4], 0, 64);
        let full = shape.plan_bytes(&shape.full_plan(&limits(ResidencyMode::Balanced)));
        let plan = |mode| {
            shape
                .plan(full - Bytes::new(30_000), &limits(mode))
                .unwrap()
        };
        let speed = plan(ResidencyMode::MaxSpeed);
        assert_eq!((speed.resident.len(), speed.kv_capacity.get()), (4, 3136));
        let context = plan(ResidencyMode::MaxContext);
        assert_eq!(
            (context.resident.len(), context.kv_capacity.get()),
            (1, 4096)
        );
    }

    #[test]
    fn balanced_gives_up_what_costs_the_user_less() {
        // 64 MiB of layers and 16 MiB of context: reading a prompt again costs little while the model is small.
        let shape = shape(&[16 << 20; 4], 0, 64);
        let shape = ModelShape {
            kv: KvShape {
                head_dim: 512,
                ..shape.kv
            },
            ..shape
        };
        let limits = limits(ResidencyMode::Balanced);
        let full = shape.plan_bytes(&shape.full_plan(&limits));
        let less = shape.plan(full - Bytes::from_mib(8), &limits).unwrap();
        assert_eq!((less.resident.len(), less.kv_capacity.get()), (4, 2048));
        // Where prompts are slow, context is worth more than speed.
        let slow = limits.at_speed(Speed {
            prefill_ns_per_mib: 50_000,
            ..Speed::FIELD
        });
        let less = shape.plan(full - Bytes::from_mib(8), &slow).unwrap();
        assert_eq!((less.resident.len(), less.kv_capacity.get()), (3, 4096));
        // And in between, both give.
        let even = limits.at_speed(Speed {
            prefill_ns_per_mib: 2600,
            ..Speed::FIELD
        });
        let less = shape.plan(full - Bytes::from_mib(30), &even).unwrap();
        assert!(
            less.resident.len() < 4 && (1024..3584).contains(&less.kv_capacity.get()),
            "{less:?}"
        );
    }

    #[test]
    fn a_floor_that_does_not_fit_is_an_error_with_its_arithmetic() {
        let error = shape(&[1000; 4], 100, 64)
            .plan(Bytes::new(6000), &limits(ResidencyMode::Balanced))
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot fit `tiny`: its floor is 21.4 KiB (0 of 4 layers, 512 KV tokens), the engine may hold 5.8 KiB"
        );
    }

    /// 40 parts of 100 MiB, 200 KiB of workspace for each token of a chunk; half of it streamed.
    fn streaming(prefill_ns_per_mib: u64) -> (ModelShape, EnginePlan, PlanLimits) {
        let shape = ModelShape {
            workspace_bytes_per_token: Bytes::from_kib(200),
            ..shape(&[100 << 20; 40], 24 << 20, 64)
        };
        let limits = limits(ResidencyMode::Balanced).with_chunks_up_to(Tokens::new(512));
        let speed = Speed {
            prefill_ns_per_mib,
            ..Speed::FIELD
        };
        let half = shape.plan(Bytes::from_mib(2100), &limits).unwrap();
        (shape, half, limits.at_speed(speed))
    }

    #[test]
    fn a_chunk_grows_as_long_as_reading_takes_longer_than_computing() {
        let chunk = |prefill, bytes_more: u64| {
            let (shape, half, limits) = streaming(prefill);
            let bytes = shape.plan_bytes(&half) + Bytes::from_mib(bytes_more);
            let plan = shape.rechunked(&half, bytes, &limits)?;
            assert!(shape.plan_bytes(&plan) <= bytes);
            Some((
                plan.prefill_chunk.get(),
                half.resident.len() - plan.resident.len(),
            ))
        };
        // 2000 MiB take 976 ms to read; a token takes 2.4 ms on an accelerator: 414 of them.
        assert_eq!(chunk(590, 1000), Some((512, 0)));
        // Without room its 75 MiB take the place of a part.
        assert_eq!(chunk(590, 0), Some((512, 1)));
        // 4.9 ms for a token: 200 of them.
        assert_eq!(chunk(1200, 1000), Some((256, 0)));
        // On a processor 128 take 5 s.
        assert_eq!(chunk(10_000, 1000), None);
    }

    #[test]
    fn a_chunk_is_not_worth_layers_that_cost_answers_more() {
        let (shape, half, limits) = streaming(590);
        let dear = ModelShape {
            workspace_bytes_per_token: Bytes::from_mib(8),
            ..shape
        };
        let holds = dear.plan_bytes(&half);
        assert_eq!(dear.rechunked(&half, holds, &limits), None);
        assert!(
            dear.rechunked(&half, holds + Bytes::from_gib(4), &limits)
                .is_some()
        );
    }

    #[test]
    fn speeds_that_differ_a_little_change_a_chunk_once_at_most() {
        for prefill in (400..20_000).step_by(100) {
            let (shape, mut plan, limits) = streaming(prefill);
            let bytes = shape.plan_bytes(&plan);
            let mut changes = 0;
            for wobble in [0, 30, 0, 30, 15, 0, 30] {
                let speed = Speed {
                    prefill_ns_per_mib: prefill + prefill * wobble / 1000,
                    ..limits.speed
                };
                if let Some(other) = shape.rechunked(&plan, bytes, &limits.at_speed(speed)) {
                    (plan, changes) = (other, changes + 1);
                }
            }
            assert!(changes <= 1, "{prefill}: {changes}");
        }
    }

    proptest! {
        #[test]
        fn a_plan_fits_and_never_loses_layers_or_tokens_when_given_more(
            layers in prop::collection::vec(1u64..100_000, 0..40),
            ring in 0u64..200_000,
            block in prop::sample::select(vec![1u32, 16, 64, 256]),
            used in 0u32..6000,
            resident_min in 0u32..50,
            mode in prop::sample::select(MODES.to_vec()),
            kinds in (prop::sample::select(KvType::ALL.to_vec()), prop::sample::select(KvType::ALL.to_vec())),
            windowed in prop::option::of((1u32..=2, 1u32..40)),
            less in 0u64..3_000_000,
            (more, need) in (0u64..1_000_000, 0u64..1_000_000),
        ) {
            let kv = KvContents { touched: Tokens::new(4096), used: Tokens::new(used), ..KvContents::default() };
            let mut shape = shape(&layers, ring, block);
            shape.kv.windowed = windowed.map(|(layers, blocks)| WindowedKv { layers, blocks });
            let limits = PlanLimits { kv_used: Tokens::new(used), resident_min, ..limits_with(mode, kinds) };
            let floor = shape.plan_bytes(&shape.floor_plan(&limits));
            let small = shape.plan(Bytes::new(less), &limits);
            let large = shape.plan(Bytes::new(less + more), &limits);
            prop_assert_eq!(small.is_ok(), floor.get() <= less);
            if let Ok(small) = small {
                let large = large.unwrap();
                prop_assert!(shape.plan_bytes(&small).get() <= less);
                prop_assert!(small.kv_capacity.get() >= used);
                prop_assert!(small.kv_capacity.get() % block == 0);
                prop_assert!(small.resident.is_subset(&large.resident));
                prop_assert!(small.kv_capacity <= large.kv_capacity && small.kv_type <= large.kv_type);
                prop_assert!(small.kv_type >= limits.kv_type_least && large.kv_type <= limits.kv_type);
                prop_assert!(small.resident.len() >= layers.len().min(resident_min as usize));
            }
            if let Ok(small) = shape.plan(Bytes::new(less), &limits) {
                let grown = shape.grown(&small, Bytes::new(less + more), &limits, &kv);
                prop_assert!(shape.plan_bytes(&grown) <= Bytes::new(less + more));
                prop_assert!(small.resident.is_subset(&grown.resident) && small.kv_capacity <= grown.kv_capacity);
                prop_assert_eq!(shape.grown(&small, Bytes::MAX, &limits, &kv), shape.full_plan(&limits));
                prop_assert!(small.kv_type <= grown.kv_type && grown.kv_type <= limits.kv_type);
                let giving = Giving { is_serious: true, droppable: Tokens::ZERO, chunk: true };
                let shrink = Shrink::new(&shape, &limits, &grown, kv, giving);
                let held = shape.plan_bytes(&grown);
                let [weights, in_kv] = [shrink.weights(), shrink.kv()].map(|less| less.last().map_or(Bytes::ZERO, |less| less.gives));
                prop_assert_eq!(held.saturating_sub(shape.plan_bytes(&shrink.to_give(Bytes::MAX))), weights + in_kv);
                let need = Bytes::new(need);
                let shrunk = shrink.to_give(need);
                let given = held.saturating_sub(shape.plan_bytes(&shrunk));
                prop_assert!(given >= need.min(weights + in_kv), "{} of {}", given, need);
                prop_assert!(shrunk.resident.is_subset(&grown.resident) && shrunk.kv_capacity <= grown.kv_capacity);
                prop_assert!(shrunk.kv_capacity.get() >= used && shrunk.kv_capacity.get().is_multiple_of(block));
                prop_assert!(shrunk.resident.len() >= layers.len().min(resident_min as usize));
                prop_assert!((limits.kv_type_least..=grown.kv_type).contains(&shrunk.kv_type));
                // No other number of layers with any blocks gives as much for less.
                let price = shrink.price_of(&shrunk);
                for (count, blocks) in (0..=4).flat_map(|count| (0..=8).map(move |blocks| (count, blocks))) {
                    let mut other = grown.clone();
                    for index in Bounds::new(&shape, &limits).layers_to_give(&grown).into_iter().take(count) {
                        other.resident.remove(&index);
                    }
                    let left = grown.kv_capacity.get().saturating_sub(blocks * block);
                    other.kv_capacity = Tokens::new(left.max(used.div_ceil(block) * block).max(512.min(grown.kv_capacity.get())));
                    if held.saturating_sub(shape.plan_bytes(&other)) >= need {
                        prop_assert!(price <= shrink.price_of(&other), "{:?} {:?}", shrunk, other);
                    }
                }
            }
            let full = shape.full_plan(&limits);
            let full_again = shape.plan(Bytes::MAX, &limits);
            prop_assert_eq!(full_again.ok(), Some(full));
        }

        #[test]
        fn a_larger_chunk_fits_and_pays_and_goes_when_nothing_is_streamed(
            layers in prop::collection::vec(1u64..100_000_000, 1..40),
            ring in 0u64..200_000,
            per_token in 1u64..200_000,
            (read, prefill) in (1u64..3_000_000, 1u64..100_000),
            resident_min in 0u32..50,
            mode in prop::sample::select(MODES.to_vec()),
            (share, room) in (0u64..1100, 0u64..50_000_000),
        ) {
            let shape = ModelShape { workspace_bytes_per_token: Bytes::new(per_token), ..shape(&layers, ring, 64) };
            let speed = Speed { read_ns_per_mib: read, prefill_ns_per_mib: prefill, ..Speed::FIELD };
            let plain = PlanLimits { resident_min, ..limits(mode) }.at_speed(speed);
            let limits = plain.with_chunks_up_to(Tokens::new(600));
            let (full, floor) = (shape.full_plan(&limits), shape.floor_plan(&limits));
            prop_assert_eq!((&full, &floor), (&shape.full_plan(&plain), &shape.floor_plan(&plain)));
            let bytes = Bytes::new(shape.plan_bytes(&full).get() / 1000 * share).max(shape.plan_bytes(&floor));
            let from = shape.plan(bytes, &limits).unwrap();
            prop_assert_eq!(&from, &shape.plan(bytes, &plain).unwrap());
            prop_assert_eq!(shape.rechunked(&from, bytes, &plain), None);
            let within = bytes + Bytes::new(room);
            let Some(plan) = shape.rechunked(&from, within, &limits) else { return Ok(()) };
            prop_assert!(shape.plan_bytes(&plan) <= within);
            prop_assert!([256, 512].contains(&plan.prefill_chunk.get()), "{}", plan.prefill_chunk);
            prop_assert!(from.resident.len() < layers.len() && plan.resident.is_subset(&from.resident));
            prop_assert!(plan.resident.len() >= from.resident.len().min(resident_min as usize));
            prop_assert_eq!((plan.kv_capacity, plan.kv_type), (from.kv_capacity, from.kv_type));
            let prompts = |plan: &EnginePlan| {
                Price::new(&shape, &limits).prompts_us(shape.bytes_without(&plan.resident), plan.prefill_chunk)
            };
            prop_assert!(prompts(&plan) <= prompts(&from) - prompts(&from) / GAIN_LEAST);
            prop_assert_eq!(shape.rechunked(&plan, within, &limits), None, "once is enough");
            // A shed gives it back as a whole, and layers go without it.
            prop_assert!(shape.plan_bytes(&plan) - shape.chunk_bytes(limits.prefill_chunk, plan.prefill_chunk) >= shape.plan_bytes(&floor));
            // More memory gives up nothing else for it, and all of it leaves no larger chunk.
            let kv = KvContents { touched: plan.kv_capacity, ..KvContents::default() };
            let grown = shape.grown(&plan, within + Bytes::new(room), &limits, &kv);
            prop_assert!(shape.plan_bytes(&grown) <= within + Bytes::new(room));
            prop_assert!(plan.resident.is_subset(&grown.resident) && plan.kv_capacity <= grown.kv_capacity);
            prop_assert!(grown.prefill_chunk <= plan.prefill_chunk && grown.prefill_chunk >= limits.prefill_chunk);
            prop_assert_eq!(shape.grown(&plan, Bytes::MAX, &limits, &kv), full);
            let under_way = shape.grown(&plan, within + Bytes::new(room), &limits.at_chunk(plan.prefill_chunk), &kv);
            prop_assert_eq!(under_way.prefill_chunk, plan.prefill_chunk);
            prop_assert!(shape.plan_bytes(&under_way) <= within + Bytes::new(room));
        }
    }
}
