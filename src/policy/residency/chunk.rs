//! Size of prefill chunks while parts are streamed.

use super::{
    path::Path,
    shape::{EnginePlan, ModelShape, PlanLimits},
};
use cotenant_units::{Bytes, Tokens};

impl ModelShape {
    /// `from` with a larger prefill chunk, if that is worth what it takes: a chunk reads what is streamed once, so while
    /// reading takes longer than computing, twice the chunk makes prompts nearly twice as fast.
    ///
    /// It fits into `bytes`. What is missing for the workspace comes from as few layers as suffice, and only if prompts
    /// gain clearly more than answers lose by that; so speeds that differ a little from those of a moment ago change nothing.
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
        let (path, worth, holds) = (
            Path::new(self, limits),
            self.worth(limits),
            self.plan_bytes(from),
        );
        let now = worth.prompts_us(streamed, from.prefill_chunk);
        let givable = path.layers_to_give(from);
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
                given = given.saturating_add(path.layer_bytes(*index));
            }
            let gained =
                now.saturating_sub(worth.prompts_us(streamed.saturating_add(given), chunk));
            let lost = worth.streaming_us(given);
            let pays =
                gained >= now / GAIN_LEAST && gained > lost.saturating_add(lost / GAIN_MARGIN);
            (given >= missing && pays).then(|| (gained - lost, plan))
        });
        // Of two that are worth the same, the smaller one.
        let best = sound.reduce(|best, next| if next.0 > best.0 { next } else { best });
        best.map(|(_, plan)| plan)
    }
}

/// Prompts have to become faster by at least one part of this many for the engine to change. Our choice.
const GAIN_LEAST: u64 = 8;
/// And what they gain has to be more than what is lost by one part of this many of that. Our choice.
const GAIN_MARGIN: u64 = 4;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        super::plans::tests::{MODES, limits, shape},
        *,
    };
    use crate::{kv_type::KvType, params::ResidencyMode, speed::Speed};

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
                shape.worth(&limits).prompts_us(shape.bytes_without(&plan.resident), plan.prefill_chunk)
            };
            prop_assert!(prompts(&plan) <= prompts(&from) - prompts(&from) / GAIN_LEAST);
            prop_assert_eq!(shape.rechunked(&plan, within, &limits), None, "once is enough");
            // A shed gives it back as a whole, and layers go without it.
            prop_assert!(shape.plan_bytes(&plan) - shape.chunk_bytes(limits.prefill_chunk, plan.prefill_chunk) >= shape.plan_bytes(&floor));
            for (count, bytes) in (1..).zip(&shape.layers_give(&plan, &limits)) {
                let without = shape.plan_bytes(&shape.shrunk(&plan, 0, count, KvType::F16, &limits));
                prop_assert_eq!(*bytes, shape.plan_bytes(&plan).saturating_sub(without));
            }
            // More memory gives up nothing else for it, and all of it leaves no larger chunk.
            let grown = shape.grown(&plan, within + Bytes::new(room), &limits);
            prop_assert!(shape.plan_bytes(&grown) <= within + Bytes::new(room));
            prop_assert!(plan.resident.is_subset(&grown.resident) && plan.kv_capacity <= grown.kv_capacity);
            prop_assert!(grown.prefill_chunk <= plan.prefill_chunk && grown.prefill_chunk >= limits.prefill_chunk);
            prop_assert_eq!(shape.grown(&plan, Bytes::MAX, &limits), full);
            let under_way = shape.grown(&plan, within + Bytes::new(room), &limits.at_chunk(plan.prefill_chunk));
            prop_assert_eq!(under_way.prefill_chunk, plan.prefill_chunk);
            prop_assert!(shape.plan_bytes(&under_way) <= within + Bytes::new(room));
        }
    }
}
