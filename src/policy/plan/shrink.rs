//! Reductions of a plan: the cheapest one that frees enough.

use std::collections::BTreeSet;

use super::Bounds;
use crate::{
    kv_type::KvType,
    pay::Pay,
    price::{KvContents, Price},
    residency::{EnginePlan, ModelShape, PlanLimits},
};
use cotenant_units::{Bytes, Tokens};

/// Reduction of one half of a plan, with its price.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Less {
    pub(crate) gives: Bytes,
    pub(crate) price_us: u64,
    layers: usize,
    chunk: Tokens,
    blocks: u32,
    kind: KvType,
}

/// Search for reductions of the plan `from`.
#[derive(Debug)]
pub(crate) struct Shrink<'a> {
    pub(crate) from: &'a EnginePlan,
    pub(crate) price: Price<'a>,
    kv: KvContents,
    bounds: Bounds<'a>,
    giving: Giving,
}

/// Limits of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Giving {
    /// Bound on its cost, if any.
    pub(crate) pay: Option<Pay>,
    /// Tokens of the running answer that may be dropped.
    pub(crate) droppable: Tokens,
    /// Whether the prefill chunk may shrink.
    pub(crate) chunk: bool,
}

impl Giving {
    /// Returns whether layers, chunk, precision and the oldest tokens may be given up, and not only KV blocks that no
    /// answer uses.
    fn is_serious(&self) -> bool {
        self.pay.is_none_or(Pay::is_serious)
    }
}

impl<'a> Shrink<'a> {
    pub(crate) fn new(
        shape: &'a ModelShape,
        limits: &PlanLimits,
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

    /// Returns reductions of layers and chunk, cheapest first; each frees more than the one before.
    pub(crate) fn weights(&self) -> Vec<Less> {
        let (shape, from) = (self.bounds.shape, self.from);
        let streamed = shape.missing(&from.resident);
        // The first part that is read through the ring needs one.
        let has_ring = shape.ring_beside(&from.resident) > Bytes::ZERO;
        let (mut sums, mut ring) = (vec![(streamed, Bytes::ZERO)], Bytes::ZERO);
        for part in self
            .layers()
            .into_iter()
            .filter_map(|index| self.bounds.part(index))
        {
            if part.is_streamed() && !has_ring {
                ring = shape.ring_bytes;
            }
            let (sum, _) = sums.last().copied().unwrap_or_default();
            sums.push((sum.with(part), ring));
        }
        let mut all = Vec::new();
        for chunk in BTreeSet::from([from.prefill_chunk, self.least_chunk()]) {
            let workspace = shape.chunk_bytes(chunk, from.prefill_chunk);
            for (layers, (less, ring)) in sums.iter().enumerate() {
                // A reduction of fewer bytes than the ring would enlarge this half of the plan, and the lease would not
                // cover it until the KV half has freed memory.
                let given = less.bytes.saturating_sub(streamed.bytes);
                if layers > 0 && given <= *ring {
                    continue;
                }
                all.push(Less {
                    gives: given.saturating_sub(*ring).saturating_add(workspace),
                    price_us: self
                        .price
                        .weights_given_up((streamed, from.prefill_chunk), (*less, chunk)),
                    layers,
                    chunk,
                    ..self.nothing()
                });
            }
        }
        let speed = self.bounds.limits.speed;
        if let Some(pay) = self.giving.pay {
            all.retain(|less: &Less| pay.affords(less.price_us, less.gives, speed));
        }
        undominated(all)
    }

    /// Returns reductions of KV by blocks and by type, cheapest first; each frees more than the one before.
    pub(crate) fn kv(&self) -> Vec<Less> {
        let has = self.bounds.blocks_of(self.from.kv_capacity);
        let block = self.bounds.block;
        let marks = [
            self.kv.touched,
            self.kv.kept,
            self.kv.used,
            self.kv.occupied(),
        ]
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

    /// Returns the cheapest plan that frees `bytes`, or the one that frees most if none does.
    pub(crate) fn to_give(&self, bytes: Bytes) -> EnginePlan {
        let mut best: Option<(u64, Bytes, Less, Less)> = None;
        for weights in std::iter::once(self.nothing()).chain(self.weights()) {
            let rest = bytes.saturating_sub(weights.gives);
            for kind in self.kinds() {
                let kv = self.without(self.fewest_blocks(kind, rest), kind);
                let gives = weights.gives.saturating_add(kv.gives);
                let price = weights.price_us.saturating_add(kv.price_us);
                // Among insufficient plans, the one that frees more is better.
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

    /// Returns plans that each give up one more kind of memory than the one before, least harm to an answer first.
    pub(crate) fn ladder(&self) -> [EnginePlan; 6] {
        let (from, bounds, nothing) = (self.from, &self.bounds, self.nothing());
        let has = bounds.blocks_of(from.kv_capacity);
        let least = self.kinds().into_iter().min().unwrap_or(from.kv_type);
        let free = has.saturating_sub(bounds.blocks_min);
        let most = self.weights().pop().unwrap_or(nothing);
        let kept = self.kv.occupied().get().div_ceil(bounds.block);
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

    /// Returns the layers that can be given up, in order.
    fn layers(&self) -> Vec<u32> {
        if self.giving.is_serious() {
            self.bounds.layers_to_give(self.from)
        } else {
            Vec::new()
        }
    }

    /// Returns the KV types that are allowed, largest first.
    fn kinds(&self) -> Vec<KvType> {
        let has = self.from.kv_type;
        let least = if self.giving.is_serious() {
            self.bounds.limits.kv_type_least.min(has)
        } else {
            has
        };
        let kinds = KvType::ALL.into_iter().rev();
        kinds.filter(|kind| (least..=has).contains(kind)).collect()
    }

    fn least_chunk(&self) -> Tokens {
        let has = self.from.prefill_chunk;
        if self.giving.chunk && self.giving.is_serious() {
            has.min(self.bounds.limits.prefill_chunk)
        } else {
            has
        }
    }

    /// Returns how many blocks can be given up with KV of type `kind`. The oldest blocks of a running answer are
    /// included only with the smallest type allowed, since their loss is permanent.
    fn most_blocks(&self, kind: KvType) -> u32 {
        let (bounds, limits) = (&self.bounds, self.bounds.limits);
        let has = bounds.blocks_of(self.from.kv_capacity);
        let free = has.saturating_sub(bounds.blocks_min);
        if !self.giving.is_serious() || kind > limits.kv_type_least.min(self.from.kv_type) {
            return free;
        }
        let idle = PlanLimits {
            kv_used: Tokens::ZERO,
            ..limits
        };
        let floor = Bounds::new(bounds.shape, &idle).blocks_min;
        let oldest = self.giving.droppable.get() / bounds.block;
        free + oldest.min(has.saturating_sub(floor).saturating_sub(free))
    }

    /// Returns the fewest blocks whose removal frees `bytes` with KV of type `kind`, or all removable blocks.
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

    /// Returns the price of a smaller plan.
    pub(crate) fn price_of(&self, plan: &EnginePlan) -> u64 {
        self.price.given_up(self.from, plan, &self.kv)
    }
}

/// Drops reductions that free nothing, or no more than a cheaper one; sorts by price.
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

/// Steps in which KV is weighed. The excess of the last step is kept afterwards.
const STEPS_MAX: u32 = 16;
