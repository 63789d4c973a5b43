//! Plans of a model: the largest that fits, larger ones, smaller ones.

use std::collections::BTreeSet;

use super::{
    path::Path,
    shape::{EnginePlan, FloorError, ModelShape, PlanLimits},
};
use crate::{kv_type::KvType, params::ResidencyMode};
use cotenant_units::{Bytes, Layers, Tokens};

impl ModelShape {
    /// The largest plan that fits into `bytes`.
    ///
    /// All plans of a model under the same limits lie on one path from the floor to the full plan, and no step of it
    /// loses a layer or a KV block; so more bytes never give less of either. The steps come by what they are worth, the
    /// dearest first: how much context comes before the layers is reckoned from their costs, weighed by the mode. The
    /// last layer to become resident makes the staging ring superfluous, so a plan with all layers may be cheaper
    /// than one with all but one.
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
        let path = Path::new(self, limits);
        path.steps()
            .rev()
            .find(|step| path.bytes_at(*step) <= bytes)
            .map(|step| path.plan_at(step))
            .ok_or_else(|| {
                let floor = self.floor_plan(limits);
                FloorError {
                    model: self.name.clone(),
                    floor: self.plan_bytes(&floor),
                    resident: Layers::new(self.resident_layers(&floor)),
                    layers: Layers::new(self.layer_count()),
                    kv_tokens: floor.kv_capacity,
                    available: bytes,
                }
            })
    }

    /// The least that the engine runs with under `limits`.
    #[must_use]
    pub fn floor_plan(&self, limits: &PlanLimits) -> EnginePlan {
        let path = Path::new(self, limits);
        let cheapest = path.steps().min_by_key(|step| path.bytes_at(*step));
        path.plan_at(cheapest.unwrap_or(0))
    }

    /// The plan when memory is plentiful.
    #[must_use]
    pub fn full_plan(&self, limits: &PlanLimits) -> EnginePlan {
        let path = Path::new(self, limits);
        path.plan_at(path.last_step())
    }

    /// The largest plan that fits into `bytes` and gives up nothing of `from`: what is worth most comes first.
    ///
    /// Its prefill chunk stays as long as something is streamed that makes it worth its memory.
    #[must_use]
    pub fn grown(&self, from: &EnginePlan, bytes: Bytes, limits: &PlanLimits) -> EnginePlan {
        let path = Path::new(self, limits);
        let (has_layers, has_blocks) = (from.resident.len(), path.blocks_of(from.kv_capacity));
        // Capacity that is added has not been touched by any token: unless the mode asks for context, layers come first.
        let first = match limits.mode {
            ResidencyMode::MaxContext => path.blocks_before_layers.max(has_blocks),
            ResidencyMode::Balanced | ResidencyMode::MaxSpeed => has_blocks,
        };
        let last = path.blocks_max.max(first);
        let all = path.give_up.len().max(has_layers);
        // Bytes of so many layers, with the ring; only KV blocks come on top.
        let chain = || path.give_up.iter().rev().copied();
        let with = |layers: usize| chain().take(layers).chain(from.resident.iter().copied());
        let mut resident: BTreeSet<u32> = with(has_layers).collect();
        let layers = resident.iter().map(|index| path.layer_bytes(*index));
        let mut bytes_of_layers = layers.fold(path.base, Bytes::saturating_add);
        let worth = self.worth(limits);
        let mut held = Vec::with_capacity(all - has_layers + 1);
        let mut chunks = Vec::with_capacity(all - has_layers + 1);
        let mut chunk = from.prefill_chunk.max(limits.prefill_chunk);
        let mut streamed = self.bytes_without(&resident);
        for next in chain().skip(has_layers).map(Some).chain([None]) {
            let ring = if resident.len() < self.layers.len() {
                self.ring_bytes
            } else {
                chunk = limits.prefill_chunk;
                Bytes::ZERO
            };
            if !held.is_empty() {
                chunk = worth.chunk_still_paid(streamed, chunk, limits.prefill_chunk);
            }
            chunks.push(chunk);
            held.push(
                bytes_of_layers
                    .saturating_add(ring)
                    .saturating_add(self.chunk_bytes(limits.prefill_chunk, chunk)),
            );
            if let Some(index) = next
                && resident.insert(index)
            {
                bytes_of_layers = bytes_of_layers.saturating_add(path.layer_bytes(index));
                streamed = streamed.saturating_sub(path.layer_bytes(index));
            }
        }
        let kinds = [KvType::Q4, KvType::Q8, KvType::F16]
            .map(|most| from.kv_type.max(most.min(limits.kv_type)));
        let [least, middle, most] = kinds;
        let all_layers = held.len() - 1;
        let steps = (has_blocks..=first)
            .map(|blocks| (0, blocks, least))
            .chain((0..held.len()).map(|layers| (layers, first, least)))
            .chain((first..=last).map(|blocks| (all_layers, blocks, middle)))
            .chain([(all_layers, last, most)]);
        let mut fitting = steps.filter(|(layers, blocks, kind)| {
            let kv = self.kv.blocks_bytes(*blocks, *kind);
            held.get(*layers)
                .is_some_and(|held| held.saturating_add(kv) <= bytes)
        });
        match fitting.next_back() {
            Some((layers, blocks, kv_type)) => EnginePlan {
                resident: with(has_layers + layers).collect(),
                kv_capacity: path.tokens_of(blocks),
                prefill_chunk: chunks.get(layers).copied().unwrap_or(limits.prefill_chunk),
                kv_type,
            },
            None => from.clone(),
        }
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
        let path = Path::new(self, limits);
        let has = path.blocks_of(from.kv_capacity);
        let block = self.kv.block_tokens.get().max(1);
        let blocks = |tokens: Tokens| tokens.get().div_ceil(block).min(path.blocks_max).max(has);
        let least = blocks(needed);
        let mut plan = EnginePlan {
            kv_capacity: path.tokens_of(least),
            ..from.clone()
        };
        let givable = if least > has {
            path.layers_to_give(from)
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
        plan.kv_capacity = path.tokens_of(most);
        (most > has).then_some(plan)
    }

    /// `from` without its last `blocks` KV blocks and without `layers` of its resident layers, its KV as `kind` if that is
    /// smaller, but never below the floor. Its prefill chunk stays.
    #[must_use]
    pub fn shrunk(
        &self,
        from: &EnginePlan,
        blocks: u32,
        layers: usize,
        kind: KvType,
        limits: &PlanLimits,
    ) -> EnginePlan {
        let path = Path::new(self, limits);
        let has = path.blocks_of(from.kv_capacity);
        let keeps = has.saturating_sub(blocks).max(path.blocks_min).min(has);
        let mut resident = from.resident.clone();
        for index in path.layers_to_give(from).into_iter().take(layers) {
            resident.remove(&index);
        }
        EnginePlan {
            resident,
            kv_capacity: path.tokens_of(keeps),
            prefill_chunk: from.prefill_chunk,
            kv_type: from.kv_type.min(kind.max(limits.kv_type_least)),
        }
    }

    /// The fewest KV blocks without which `from`, its KV as `kind`, holds `bytes` less than with them, at most `most`.
    #[must_use]
    pub fn blocks_that_give(
        &self,
        from: &EnginePlan,
        kind: KvType,
        bytes: Bytes,
        most: u32,
    ) -> u32 {
        let has = from.kv_capacity.get() / self.kv.block_tokens.get().max(1);
        let all = self.kv.blocks_bytes(has, kind);
        let gives = |blocks: u32| {
            all.saturating_sub(self.kv.blocks_bytes(has.saturating_sub(blocks), kind))
        };
        let (mut least, mut most) = (0, most.min(has));
        while least < most {
            let middle = least + (most - least) / 2;
            if gives(middle) >= bytes {
                most = middle;
            } else {
                least = middle + 1;
            }
        }
        least
    }

    /// KV blocks that `from` can give, down to the floor and to what the running sequence uses.
    #[must_use]
    pub fn blocks_to_give(&self, from: &EnginePlan, limits: &PlanLimits) -> u32 {
        let path = Path::new(self, limits);
        path.blocks_of(from.kv_capacity)
            .saturating_sub(path.blocks_min)
    }

    /// Bytes of the layers that `from` can do without, added up, in the order in which they are given. The staging ring
    /// that the first one makes necessary is taken off.
    #[must_use]
    pub fn layers_give(&self, from: &EnginePlan, limits: &PlanLimits) -> Vec<Bytes> {
        let path = Path::new(self, limits);
        let ring = if from.resident.len() == self.layers.len() {
            self.ring_bytes
        } else {
            Bytes::ZERO
        };
        let mut sum = Bytes::ZERO;
        path.layers_to_give(from)
            .into_iter()
            .map(|index| {
                sum = sum.saturating_add(path.layer_bytes(index));
                sum.saturating_sub(ring)
            })
            .collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::{super::path::evenly_spread, *};
    use crate::{
        params::EngineParams,
        residency::{KvShape, LayerKind, LayerShape, WindowedKv, sample_shape},
        speed::Speed,
    };

    pub(in crate::residency) fn shape(layers: &[u64], ring: u64, block_tokens: u32) -> ModelShape {
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

    pub(in crate::residency) fn limits(mode: ResidencyMode) -> PlanLimits {
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

    pub(in crate::residency) const MODES: [ResidencyMode; 3] = [
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
            more in 0u64..1_000_000,
        ) {
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
                let grown = shape.grown(&small, Bytes::new(less + more), &limits);
                prop_assert!(shape.plan_bytes(&grown) <= Bytes::new(less + more));
                prop_assert!(small.resident.is_subset(&grown.resident) && small.kv_capacity <= grown.kv_capacity);
                prop_assert_eq!(shape.grown(&small, Bytes::MAX, &limits), shape.full_plan(&limits));
                prop_assert!(small.kv_type <= grown.kv_type && grown.kv_type <= limits.kv_type);
                let shrunk = shape.shrunk(&grown, 3, 2, KvType::Q4, &limits);
                prop_assert_eq!(shrunk.kv_type, limits.kv_type_least);
                let blocks = shape.blocks_that_give(&shrunk, shrunk.kv_type, Bytes::new(500), 3);
                let has = shrunk.kv_capacity.get() / block;
                let kv = |blocks| shape.kv.blocks_bytes(blocks, shrunk.kv_type);
                prop_assert!(blocks == 3.min(has) || kv(has) - kv(has - blocks) >= Bytes::new(500));
                prop_assert!(shrunk.resident.is_subset(&grown.resident) && shrunk.kv_capacity <= grown.kv_capacity);
                prop_assert!(shrunk.kv_capacity.get() >= used && shrunk.kv_capacity.get().is_multiple_of(block));
                prop_assert!(shrunk.resident.len() >= layers.len().min(resident_min as usize));
                let gives = shape.layers_give(&grown, &limits);
                for (count, bytes) in (1..).zip(&gives) {
                    let without = shape.plan_bytes(&shape.shrunk(&grown, 0, count, KvType::F16, &limits));
                    prop_assert_eq!(*bytes, shape.plan_bytes(&grown).saturating_sub(without));
                }
            }
            let full = shape.full_plan(&limits);
            let full_again = shape.plan(Bytes::MAX, &limits);
            prop_assert_eq!(full_again.ok(), Some(full));
        }
    }
}
