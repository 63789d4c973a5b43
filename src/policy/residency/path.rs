//! Plans of a model in order, from its floor to its full plan.

use std::collections::BTreeSet;

use super::shape::{EnginePlan, ModelShape, PlanLimits};
use crate::kv_type::KvType;
use cotenant_units::{Bytes, Tokens};

/// All plans under the same limits, from the smallest to the full one.
///
/// A step adds one KV block or makes one layer resident, whichever is worth more. Layers are worth as much as their
/// bytes, and KV blocks the less the more there are; so there are three stretches: KV blocks, then layers, then KV blocks.
/// Where KV may be kept in a smaller type, all of that comes in the smallest; what `q4` loses is made good after the
/// layers, what `q8` loses, which is next to nothing, at the very end.
pub(super) struct Path<'a> {
    pub(super) shape: &'a ModelShape,
    pub(super) prefill_chunk: Tokens,
    /// Layers in the order in which they are given up.
    pub(super) give_up: Vec<u32>,
    /// Bytes of the first `n` layers to become resident, at `n`.
    pub(super) layer_sums: Vec<Bytes>,
    pub(super) layers_min: usize,
    pub(super) blocks_min: u32,
    pub(super) blocks_before_layers: u32,
    pub(super) blocks_max: u32,
    /// The KV type of the first steps, of those with more blocks than come before the layers, and of the last one.
    pub(super) kinds: [KvType; 3],
    /// What every plan has, without layers, KV and ring.
    pub(super) base: Bytes,
}

impl<'a> Path<'a> {
    pub(super) fn new(shape: &'a ModelShape, limits: &PlanLimits) -> Self {
        let block = shape.kv.block_tokens.get().max(1);
        let wanted = limits.kv_wanted.min(shape.context_max).get();
        let floor = limits.kv_floor.get().min(wanted).max(1);
        let blocks_min = floor.max(limits.kv_used.get()).div_ceil(block);
        let blocks_max = (wanted / block).max(blocks_min);
        let kinds = KvType::ALL
            .map(|kind| kind.clamp(limits.kv_type_least.min(limits.kv_type), limits.kv_type));
        let above_layers = shape
            .worth(limits)
            .capacity_above_layers(shape.kv.bytes_per_token(kinds[0]));
        let blocks_before_layers = (above_layers.get() / block).clamp(blocks_min, blocks_max);
        let give_up = evenly_spread(shape.layers.len());
        let mut layer_sums = vec![Bytes::ZERO];
        let mut sum = Bytes::ZERO;
        for index in give_up.iter().rev() {
            let layer = usize::try_from(*index)
                .ok()
                .and_then(|index| shape.layers.get(index));
            sum = sum.saturating_add(layer.map_or(Bytes::ZERO, |layer| layer.resident_bytes));
            layer_sums.push(sum);
        }
        let nothing = EnginePlan {
            resident: BTreeSet::new(),
            kv_capacity: Tokens::ZERO,
            prefill_chunk: limits.prefill_chunk,
            kv_type: limits.kv_type,
        };
        let ring = if shape.layers.is_empty() {
            Bytes::ZERO
        } else {
            shape.ring_bytes
        };
        Self {
            shape,
            prefill_chunk: limits.prefill_chunk,
            layers_min: shape.parts_of(limits.resident_min).min(give_up.len()),
            give_up,
            layer_sums,
            blocks_min,
            blocks_before_layers,
            blocks_max,
            kinds,
            base: shape.plan_bytes(&nothing).saturating_sub(ring),
        }
    }

    pub(super) fn last_step(&self) -> usize {
        let blocks = self.blocks_max.saturating_sub(self.blocks_min);
        let [first, middle, last] = self.kinds;
        usize::try_from(blocks)
            .unwrap_or(usize::MAX)
            .saturating_add(self.give_up.len() - self.layers_min)
            .saturating_add(usize::from(middle > first) + usize::from(last > middle))
    }

    pub(super) fn steps(&self) -> impl DoubleEndedIterator<Item = usize> + use<> {
        0..=self.last_step()
    }

    /// Resident layers, KV blocks and their type at a step.
    pub(super) fn at(&self, step: usize) -> (usize, u32, KvType) {
        let first =
            usize::try_from(self.blocks_before_layers - self.blocks_min).unwrap_or(usize::MAX);
        let layers = self.give_up.len() - self.layers_min;
        let blocks_of = |steps: usize| u32::try_from(steps).unwrap_or(u32::MAX);
        let [least, middle, most] = self.kinds;
        if step <= first {
            (
                self.layers_min,
                self.blocks_min.saturating_add(blocks_of(step)),
                least,
            )
        } else if step - first <= layers {
            (
                self.layers_min + (step - first),
                self.blocks_before_layers,
                least,
            )
        } else {
            let more = blocks_of(step - first - layers - usize::from(middle > least));
            let blocks = self.blocks_before_layers.saturating_add(more);
            let kind = if blocks > self.blocks_max {
                most
            } else {
                middle
            };
            (self.give_up.len(), blocks.min(self.blocks_max), kind)
        }
    }

    pub(super) fn bytes_at(&self, step: usize) -> Bytes {
        let (layers, blocks, kind) = self.at(step);
        let ring = if layers < self.give_up.len() {
            self.shape.ring_bytes
        } else {
            Bytes::ZERO
        };
        self.base
            .saturating_add(self.layer_sums.get(layers).copied().unwrap_or(Bytes::MAX))
            .saturating_add(self.shape.kv.blocks_bytes(blocks, kind))
            .saturating_add(ring)
    }

    pub(super) fn plan_at(&self, step: usize) -> EnginePlan {
        let (layers, blocks, kv_type) = self.at(step);
        EnginePlan {
            resident: self.give_up.iter().rev().take(layers).copied().collect(),
            kv_capacity: self.tokens_of(blocks),
            prefill_chunk: self.prefill_chunk,
            kv_type,
        }
    }

    pub(super) fn tokens_of(&self, blocks: u32) -> Tokens {
        Tokens::new(blocks.saturating_mul(self.shape.kv.block_tokens.get().max(1)))
    }

    pub(super) fn blocks_of(&self, capacity: Tokens) -> u32 {
        capacity.get() / self.shape.kv.block_tokens.get().max(1)
    }

    /// Layers that `from` can do without, the first to go first.
    pub(super) fn layers_to_give(&self, from: &EnginePlan) -> Vec<u32> {
        let keeps = self.layers_min.min(from.resident.len());
        let given = from.resident.len() - keeps;
        let resident = self
            .give_up
            .iter()
            .filter(|index| from.resident.contains(index));
        resident.take(given).copied().collect()
    }

    pub(super) fn layer_bytes(&self, index: u32) -> Bytes {
        let layer = usize::try_from(index)
            .ok()
            .and_then(|index| self.shape.layers.get(index));
        layer.map_or(Bytes::ZERO, |layer| layer.resident_bytes)
    }
}

/// The numbers below `count`, in an order of which every beginning is spread over the whole range: that of the
/// reversed bits (van der Corput).
///
/// Streamed layers that lie far apart leave time to read the next one while the resident ones between them compute;
/// and with one order for all plans, a smaller plan only drops layers and never has to load one.
pub(super) fn evenly_spread(count: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..u32::try_from(count).unwrap_or(u32::MAX)).collect();
    order.sort_by_key(|index| index.reverse_bits());
    order
}
