//! Device drawn from a seed: budget, model, workers.

use std::time::Duration;

use cotenant::{
    policy::{
        kv_type::KvType,
        lease::Class,
        params::{
            ENGINE_TENANT, EngineParams, Params, PressureParams, ResidencyMode, Scope, StartParams,
            VariantParams, WorkerParams,
        },
        peaks::LearnedPeak,
        residency::{KvShape, LayerKind, LayerShape, ModelShape, PlanLimits, WindowedKv},
        speed::Calibration,
    },
    units::{Bytes, Tokens},
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::worker::Breath;

pub(crate) const fn mib(mib: u64) -> Bytes {
    Bytes::from_mib(mib)
}

pub(crate) fn millis(rng: &mut ChaCha8Rng, from: u64, to: u64) -> Duration {
    Duration::from_micros(rng.random_range(from * 1000..=to * 1000))
}

pub(crate) const CLASSES: [Class; 4] = [
    Class::AudioRealtime,
    Class::Interactive,
    Class::LlmElastic,
    Class::Batch,
];

/// Draws made before anything happens.
pub(crate) struct Device {
    pub(crate) params: Params,
    pub(crate) shape: Option<ModelShape>,
    /// Use by the OS, inside the reserve.
    pub(crate) os_used: Bytes,
    /// A worker that can never be started while the engine is loaded.
    pub(crate) hopeless: Option<String>,
}

pub(crate) fn choose(rng: &mut ChaCha8Rng) -> Device {
    let shape = rng.random_bool(0.85).then(|| choose_shape(rng));
    let kv_type = if rng.random_bool(0.7) {
        KvType::F16
    } else {
        KvType::Q8
    };
    let engine = shape.is_some().then(|| EngineParams {
        kv_wanted: Tokens::new(rng.random_range(512..6000)),
        kv_floor: Tokens::new(rng.random_range(64..512)),
        kv_type,
        kv_type_least: kv_type.min(KvType::ALL[rng.random_range(0..KvType::ALL.len())]),
        prefill_chunk: Tokens::new(64),
        resident_min: rng.random_range(0..3),
        mode: [
            ResidencyMode::Balanced,
            ResidencyMode::MaxContext,
            ResidencyMode::MaxSpeed,
        ][rng.random_range(0..3)],
        load_timeout: Duration::from_secs(5),
        apply_timeout: Duration::from_millis(500),
        ..EngineParams::default()
    });
    let workers: Vec<WorkerParams> = ["asr", "tts", "indexer"]
        .into_iter()
        .take(rng.random_range(0..=3))
        .map(|name| choose_worker(rng, name))
        .collect();
    let full = shape
        .as_ref()
        .zip(engine.as_ref())
        .map_or(Bytes::ZERO, |(shape, engine)| {
            shape.plan_bytes(&shape.full_plan(&PlanLimits::new(engine, Tokens::ZERO)))
        });
    let peaks: Bytes = workers.iter().map(largest).sum();
    // Everything fits once no other holder is present; the margin varies.
    let needed = full + peaks + mib(rng.random_range(10..200));
    let budget = Bytes::new(needed.get() * 13 / 10);
    let scope = if rng.random_bool(0.5) {
        Scope::Session
    } else {
        Scope::Machine
    };
    let reserve = mib(rng.random_range(0..64));
    let mut params = Params::for_budget(budget + reserve, reserve, scope);
    params.pressure = PressureParams {
        dwell: Duration::from_millis(rng.random_range(500..4000)),
        // Small budgets at a desktop's rate would be sampled every 10 ms, and nothing else would happen.
        fill_rate_mib_per_s: [50, 200, 1000][rng.random_range(0..3)],
        ..PressureParams::scaled_to(budget)
    };
    params.shed.minimum_reclaim = budget.per_mille(50);
    params.lease.queue_max = rng.random_range(2..20);
    params.engine = engine;
    params.workers = workers;
    Device {
        os_used: reserve.per_mille(rng.random_range(300..1000)),
        params,
        shape,
        hopeless: None,
    }
}

/// Further properties of some workers: they rest, start after others, or shed on notification. Drawn from a separate
/// source, so that the rest of a seed's device is unchanged.
pub(crate) fn choose_habits(seed: u64, device: &mut Device) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ HABITS);
    if !rng.random_bool(0.4) {
        return;
    }
    let has_engine = device.shape.is_some();
    let mut before: Vec<String> = Vec::new();
    for worker in &mut device.params.workers {
        let name = worker.name.clone();
        if rng.random_bool(0.4) {
            worker.rest.idle_stop_after = Some(millis(&mut rng, 300, 3000));
        }
        if !worker.variants.is_empty() && rng.random_bool(0.4) {
            worker.rest.idle_shrink_after = Some(millis(&mut rng, 100, 2000));
        }
        match rng.random_range(0..5) {
            0 if has_engine => worker.start.before_engine = true,
            1 if has_engine => worker.start.after = vec![ENGINE_TENANT.to_owned()],
            2 => worker.start.after = before.last().cloned().into_iter().collect(),
            _ => {}
        }
        if worker.variants.is_empty() && rng.random_bool(0.4) {
            worker.shrinks_to = Some(worker.steady.per_mille(500));
        }
        before.push(name);
    }
    // A worker that precedes the engine cannot follow one that follows it.
    if device.params.validate().is_err() {
        for worker in &mut device.params.workers {
            worker.start.before_engine = false;
        }
    }
}

/// A worker with an old observed use of the whole machine: it can never be started beside the engine, and no holder may
/// be kept small for it. Drawn from a separate source, like habits.
pub(crate) fn choose_hopeless(seed: u64, device: &mut Device) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ HOPELESS);
    let workers = &device.params.workers;
    let of_one_size: Vec<&WorkerParams> = workers
        .iter()
        .filter(|worker| worker.variants.is_empty())
        .collect();
    if device.shape.is_none() || of_one_size.is_empty() || !rng.random_bool(0.2) {
        return;
    }
    let name = of_one_size[rng.random_range(0..of_one_size.len())]
        .name
        .clone();
    let seen = LearnedPeak {
        holder: name.clone(),
        variant: None,
        bytes: device.params.budget.bytes(),
        lives: 1,
        start: None,
        model: None,
    };
    device.params.peaks = std::iter::once(seen).collect();
    device.hopeless = Some(name);
}

/// How soon a waiting request is promoted. Drawn from a separate source, like habits.
pub(crate) fn choose_ageing(seed: u64, device: &mut Device) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ AGEING);
    if rng.random_bool(0.5) {
        // No request waits longer than 6 s.
        device.params.lease.wait_max = Duration::from_secs(6);
    }
}

/// Workers whose requests exceed their declared peak and release the memory, and some that leak. Drawn from a separate
/// source, like habits.
pub(crate) fn choose_breathing(seed: u64, device: &mut Device) -> Vec<(String, Breath)> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ BREATHING);
    if !rng.random_bool(0.3) {
        return Vec::new();
    }
    let of_one_size = device.params.workers.iter_mut();
    let of_one_size =
        of_one_size.filter(|worker| worker.variants.is_empty() && worker.shrinks_to.is_none());
    let choose = |worker: &mut WorkerParams| {
        worker.rest.recycle_leaks = true;
        let leaks = rng.random_bool(0.3);
        let leak = if leaks {
            worker.peak.per_mille(rng.random_range(40..200))
        } else {
            Bytes::ZERO
        };
        (
            worker.name.clone(),
            Breath {
                rest: Bytes::ZERO,
                leak,
            },
        )
    };
    of_one_size.map(choose).collect()
}

/// The engine's periodic measurements: often, reading takes longer than computing, so that prompts justify larger
/// chunks. Drawn from a separate source, like habits.
pub(crate) fn choose_speeds(seed: u64) -> Vec<(Duration, Calibration)> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ SPEEDS);
    let measured = |rng: &mut ChaCha8Rng| {
        let read_ns_per_mib = rng.random_range(100_000..2_000_000);
        Calibration {
            compute_ns_per_mib: rng.random_range(10_000..200_000),
            read_ns_per_mib,
            read_busy_ns_per_mib: read_ns_per_mib,
            slowed_ns_per_mib: 0,
            prefill_ns_per_mib: [0, 600, 3000, 50_000][rng.random_range(0..4)],
        }
    };
    (0..rng.random_range(0..5))
        .map(|_| (millis(&mut rng, 200, 12_000), measured(&mut rng)))
        .collect()
}

const SPEEDS: u64 = 0x7370_6565_6473;
const AGEING: u64 = 0x6167_6569_6e67;
const HOPELESS: u64 = 0x686f_7065;
const BREATHING: u64 = 0x6272_6561_7468;
const HABITS: u64 = 0x6861_6269_7473;

pub(crate) fn largest(worker: &WorkerParams) -> Bytes {
    worker
        .variants
        .iter()
        .map(|variant| variant.peak)
        .chain([worker.peak])
        .max()
        .unwrap()
}

fn choose_shape(rng: &mut ChaCha8Rng) -> ModelShape {
    let layer = rng.random_range(1..12);
    // Of a mixture, each layer has rooms for experts in parts of their own.
    let experts = rng.random_range(0..4u32).saturating_sub(1);
    let layers = (0..rng.random_range(2..14)).flat_map(|index| {
        let kind = if index % 4 == 3 {
            LayerKind::Attention
        } else {
            LayerKind::Recurrent
        };
        let whole = LayerShape::new(kind, 0, mib(layer + u64::from(index % 4 == 3)));
        let rooms = (1..=experts).map(move |part| LayerShape {
            used: 62,
            ..LayerShape::new(LayerKind::Experts, part, mib(2 * layer))
        });
        std::iter::once(whole).chain(rooms)
    });
    // Some models have a draft block.
    let draft = LayerShape::new(LayerKind::Draft, 0, mib(layer));
    let layers = layers.chain(rng.random_bool(0.25).then_some(draft));
    ModelShape {
        name: "sim".to_owned(),
        architecture: "qwen35".to_owned(),
        layers: layers.collect(),
        fixed_bytes: mib(rng.random_range(1..20)),
        state_bytes: mib(1),
        kv: KvShape {
            attention_layers: 3,
            kv_heads: 2,
            head_dim: 128,
            element_bytes: 2,
            granule: Bytes::ZERO,
            block_tokens: Tokens::new([16, 64, 256][rng.random_range(0..3)]),
            windowed: rng.random_bool(0.3).then(|| WindowedKv {
                layers: rng.random_range(1..=3),
                blocks: rng.random_range(1..=12),
                heads: rng
                    .random_bool(0.5)
                    .then(|| (rng.random_range(1..=2), [64, 256][rng.random_range(0..2)])),
            }),
        },
        context_max: Tokens::new(8192),
        workspace_fixed_bytes: mib(2),
        workspace_bytes_per_token: Bytes::from_kib(8),
        ring_bytes: mib(rng.random_range(1..16)),
    }
}

fn choose_worker(rng: &mut ChaCha8Rng, name: &str) -> WorkerParams {
    let steady = rng.random_range(5..40);
    let peak = steady + rng.random_range(0..20);
    let variants = if rng.random_bool(0.5) {
        vec![
            ("small", steady, peak),
            ("large", steady * 3, steady * 3 + 5),
        ]
        .into_iter()
        .map(|(name, steady, peak)| VariantParams {
            name: name.to_owned(),
            steady: mib(steady),
            peak: mib(peak),
        })
        .collect()
    } else {
        Vec::new()
    };
    WorkerParams {
        name: name.to_owned(),
        class: CLASSES[rng.random_range(0..4)],
        steady: mib(steady),
        peak: mib(peak),
        variants,
        stop_grace: Duration::from_millis(300),
        start: StartParams {
            autostart: rng.random_bool(0.8),
            start_order: rng.random_range(0..3),
            ready_timeout: Duration::from_secs(2),
            ..StartParams::default()
        },
        ..WorkerParams::default()
    }
}
