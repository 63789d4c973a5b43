//! Tests of plans: order, prices, and conservation of bytes.

use proptest::prelude::*;

use super::*;
use crate::{
    params::EngineParams,
    residency::{KvShape, LayerKind, LayerShape, WindowedKv, sample_shape},
    speed::Calibration,
};

fn shape(layers: &[u64], ring: u64, block_tokens: u32) -> ModelShape {
    let sample = sample_shape(0, Bytes::ZERO);
    let layer = |bytes: &u64| LayerShape::new(LayerKind::Attention, 0, Bytes::new(*bytes));
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

/// Makes a mixture of a shape: of `parts` parts, the first is a layer, and the others have its experts.
fn let_most_be_experts(shape: &mut ModelShape, parts: u32) {
    for (number, part) in (0..).zip(&mut shape.layers) {
        part.part = number % parts;
        if part.part > 0 {
            (part.kind, part.used) = (LayerKind::Experts, 62);
        }
    }
}

/// Adds a draft block of the size of the first layer, if there are several.
fn add_draft(shape: &mut ModelShape) {
    if let [first, _, ..] = shape.layers[..] {
        let draft = LayerShape::new(LayerKind::Draft, 0, first.resident_bytes);
        shape.layers.push(draft);
    }
}

#[test]
fn a_draft_block_is_shed_last_and_needs_no_ring() {
    let mut shape = shape(&[10 << 20; 8], 6 << 20, 64);
    add_draft(&mut shape);
    let limits = limits(ResidencyMode::MaxSpeed);
    let (full, floor) = (shape.full_plan(&limits), shape.floor_plan(&limits));
    let giving = Giving {
        pay: None,
        droppable: Tokens::ZERO,
        chunk: false,
    };
    let shrink = Shrink::new(&shape, &limits, &full, KvContents::to_come(&limits), giving);
    for fewer in [30, 60, 70].map(|mib| shrink.to_give(Bytes::from_mib(mib))) {
        assert!(fewer.resident.contains(&8), "{fewer:?}");
    }
    // It is the first to come back, and the layers without it need no ring.
    let one = shape.plan(shape.plan_bytes(&floor) + Bytes::from_mib(10), &limits);
    assert_eq!(one.unwrap().resident, [8].into());
    let layers: BTreeSet<u32> = (0..8).collect();
    assert_eq!(shape.ring_beside(&layers), Bytes::ZERO);
    assert_eq!(shape.layer_count(), 8);
    assert_eq!(shape.resident_layers(&full), 8);
    // A token does not wait for it.
    let without = Calibration::FIELD.token_ns(&shape, &layers);
    assert!(without <= Calibration::FIELD.token_ns(&shape, &full.resident));
}

#[test]
fn experts_are_shed_first_need_no_ring_and_grow_last() {
    let mut shape = shape(&[10 << 20; 12], 24 << 20, 64);
    let_most_be_experts(&mut shape, 3);
    let limits = limits(ResidencyMode::MaxSpeed);
    let full = shape.full_plan(&limits);
    let giving = Giving {
        pay: None,
        droppable: Tokens::ZERO,
        chunk: false,
    };
    let shrink = Shrink::new(&shape, &limits, &full, KvContents::to_come(&limits), giving);
    let fewer = shrink.to_give(Bytes::from_mib(30));
    let given = shape.plan_bytes(&full) - shape.plan_bytes(&fewer);
    assert_eq!(given, Bytes::from_mib(30), "three parts, and no ring");
    for layer in [0, 3, 6, 9] {
        assert!(fewer.resident.contains(&layer), "{fewer:?}");
    }
    // Without room for all, the layers come first.
    let floor = shape.plan_bytes(&shape.floor_plan(&limits));
    let some = shape.plan(floor + Bytes::from_mib(20), &limits).unwrap();
    assert_eq!(
        some.resident.iter().filter(|part| *part % 3 == 0).count(),
        4
    );
}

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
    // 64 MiB of layers and 16 MiB of context: reading a prompt again costs little with a small model.
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
    // With slow prompts, context is worth more than speed.
    let slow = limits.at_speed(Calibration {
        prefill_ns_per_mib: 50_000,
        ..Calibration::FIELD
    });
    let less = shape.plan(full - Bytes::from_mib(8), &slow).unwrap();
    assert_eq!((less.resident.len(), less.kv_capacity.get()), (3, 4096));
    // In between, both are reduced.
    let even = limits.at_speed(Calibration {
        prefill_ns_per_mib: 2600,
        ..Calibration::FIELD
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

#[test]
fn the_floor_of_a_mixture_has_no_ring_where_the_ring_takes_more_than_all_layers() {
    let mut shape = shape(&[1000; 4], 10_000, 64);
    let_most_be_experts(&mut shape, 2);
    let floor = shape.floor_plan(&limits(ResidencyMode::Balanced));
    assert_eq!(floor.resident, [0, 2].into());
    let less = shape.plan(
        shape.plan_bytes(&floor) - Bytes::new(1),
        &limits(ResidencyMode::Balanced),
    );
    assert!(less.is_err(), "{less:?}");
}

/// Returns a model of 40 parts of 100 MiB, half of it streamed, with 200 KiB of workspace per token of a chunk.
fn streaming(prefill_ns_per_mib: u64) -> (ModelShape, EnginePlan, PlanLimits) {
    let shape = ModelShape {
        workspace_bytes_per_token: Bytes::from_kib(200),
        ..shape(&[100 << 20; 40], 24 << 20, 64)
    };
    let limits = limits(ResidencyMode::Balanced).with_chunks_up_to(Tokens::new(512));
    let speed = Calibration {
        prefill_ns_per_mib,
        ..Calibration::FIELD
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
    // 2000 MiB take 976 ms to read; a token takes 2.4 ms on an accelerator: 414 tokens.
    assert_eq!(chunk(590, 1000), Some((512, 0)));
    // Without free memory, its 75 MiB displace a part.
    assert_eq!(chunk(590, 0), Some((512, 1)));
    // 4.9 ms per token: 200 tokens.
    assert_eq!(chunk(1200, 1000), Some((256, 0)));
    // On a CPU 128 tokens take 5 s.
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
            let speed = Calibration {
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
        windowed in prop::option::of((1u32..=2, 1u32..40, prop::option::of((1u32..=3, 1u32..=4)))),
        (experts, has_draft) in (prop::option::of(2u32..6), any::<bool>()),
        less in 0u64..3_000_000,
        (more, need) in (0u64..1_000_000, 0u64..1_000_000),
    ) {
        let kv = KvContents { touched: Tokens::new(4096), used: Tokens::new(used), ..KvContents::default() };
        let mut shape = shape(&layers, ring, block);
        shape.kv.windowed = windowed.map(|(layers, blocks, heads)| WindowedKv { layers, blocks, heads });
        if let Some(parts) = experts {
            let_most_be_experts(&mut shape, parts);
        }
        if has_draft {
            add_draft(&mut shape);
        }
        let layers = shape.layer_count() as usize;
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
            prop_assert!(small.resident.len() >= layers.min(resident_min as usize));
        }
        if let Ok(small) = shape.plan(Bytes::new(less), &limits) {
            let grown = shape.grown(&small, Bytes::new(less + more), &limits, &kv);
            prop_assert!(shape.plan_bytes(&grown) <= Bytes::new(less + more));
            prop_assert!(small.resident.is_subset(&grown.resident) && small.kv_capacity <= grown.kv_capacity);
            prop_assert_eq!(shape.grown(&small, Bytes::MAX, &limits, &kv), shape.full_plan(&limits));
            prop_assert!(small.kv_type <= grown.kv_type && grown.kv_type <= limits.kv_type);
            let giving = Giving { pay: None, droppable: Tokens::ZERO, chunk: true };
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
            prop_assert!(shrunk.resident.len() >= layers.min(resident_min as usize));
            prop_assert!((limits.kv_type_least..=grown.kv_type).contains(&shrunk.kv_type));
            // No other number of layers and blocks frees as much at a lower price.
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
        (experts, has_draft) in (prop::option::of(2u32..6), any::<bool>()),
        per_token in 1u64..200_000,
        (read, prefill) in (1u64..3_000_000, 1u64..100_000),
        resident_min in 0u32..50,
        mode in prop::sample::select(MODES.to_vec()),
        (share, room) in (0u64..1100, 0u64..50_000_000),
    ) {
        let mut shape = ModelShape { workspace_bytes_per_token: Bytes::new(per_token), ..shape(&layers, ring, 64) };
        if let Some(parts) = experts {
            let_most_be_experts(&mut shape, parts);
        }
        if has_draft {
            add_draft(&mut shape);
        }
        let speed = Calibration { prefill_ns_per_mib: prefill, ..Calibration::FIELD.with_reading(read) };
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
            Price::new(&shape, &limits).prompts_us(shape.missing(&plan.resident).bytes, plan.prefill_chunk)
        };
        prop_assert!(prompts(&plan) <= prompts(&from) - prompts(&from) / GAIN_LEAST);
        prop_assert_eq!(shape.rechunked(&plan, within, &limits), None, "once is enough");
        // The larger chunk can be given up as a whole without going below the floor.
        prop_assert!(shape.plan_bytes(&plan) - shape.chunk_bytes(limits.prefill_chunk, plan.prefill_chunk) >= shape.plan_bytes(&floor));
        // More memory reduces nothing else, and with all memory the plan is the full one, without a larger chunk.
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
