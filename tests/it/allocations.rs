//! What the way of a shed takes from the allocator: an emergency is no time to ask the kernel for pages.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    collections::BTreeSet,
    path::Path,
    time::Duration,
};

use cotenant::{
    engine::{Engine, EngineOptions, thread::OpenError},
    policy::{
        Arbiter,
        event::{Action, Event},
        params::{EngineParams, Params, Scope},
        pressure::Sample,
        residency::{EnginePlan, KvShape, LayerKind, LayerShape, ModelShape},
    },
    units::{Bytes, Timestamp, Tokens},
};

/// The system's allocator, which counts what this thread asks of it.
struct Counting;

thread_local! {
    static ASKED: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

fn count(bytes: usize) {
    // A thread that is being taken down has no count any more.
    let _ = ASKED.try_with(|asked| {
        let (times, sum) = asked.get();
        asked.set((times + 1, sum + bytes as u64));
    });
}

// SAFETY: every call is handed to the system's allocator as it came; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: as promised by the caller.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// How often, and how many bytes, this thread asks for while it does `work`.
fn asked_by<T>(work: impl FnOnce() -> T) -> (T, u64, u64) {
    let (times, bytes) = ASKED.get();
    let done = work();
    let (times_now, bytes_now) = ASKED.get();
    (done, times_now - times, bytes_now - bytes)
}

fn shape() -> ModelShape {
    let layer = LayerShape {
        kind: LayerKind::Attention,
        part: 0,
        resident_bytes: Bytes::from_mib(10),
    };
    ModelShape {
        name: "tiny".to_owned(),
        architecture: "qwen35".to_owned(),
        layers: vec![layer; 32],
        fixed_bytes: Bytes::from_mib(16),
        state_bytes: Bytes::from_mib(1),
        kv: KvShape {
            attention_layers: 8,
            kv_heads: 2,
            head_dim: 128,
            element_bytes: 2,
            granule: Bytes::ZERO,
            block_tokens: Tokens::new(64),
        },
        context_max: Tokens::new(8192),
        workspace_fixed_bytes: Bytes::from_mib(3),
        workspace_bytes_per_token: Bytes::ZERO,
        ring_bytes: Bytes::from_mib(4),
    }
}

#[test]
fn the_count_counts() {
    let (_, times, bytes) = asked_by(|| vec![0u8; 1000]);
    assert_eq!((times, bytes), (1, 1000));
    assert_eq!(asked_by(|| 1 + 1).1, 0);
}

#[test]
fn asking_the_engine_for_a_plan_that_is_there_allocates_nothing() {
    let (sink, _events) = tokio::sync::mpsc::channel(8);
    let never = |path: &Path, _: &EnginePlan| Err(Engine::inspect(path).unwrap_err()) as Result<_, OpenError>;
    let engine = Engine::start_with(EngineOptions::default(), Box::new(never), sink).unwrap();
    let handle = engine.handle();
    for _ in 0..4 {
        let plan = EnginePlan {
            resident: BTreeSet::new(),
            kv_capacity: Tokens::new(128),
            prefill_chunk: Tokens::new(64),
        };
        let ((), times, _) = asked_by(|| handle.apply(0, plan));
        assert_eq!(times, 0);
    }
    handle.stop();
    engine.join();
}

#[test]
fn a_sample_that_leads_to_a_shed_asks_for_little() {
    let mut params = Params::for_budget(Bytes::from_mib(600), Bytes::ZERO, Scope::Session);
    params.engine = Some(EngineParams::default());
    let mut arbiter = Arbiter::new(params).unwrap();
    let sample = |used: u64, at| Sample {
        taken_at: at,
        mem_total: Bytes::from_gib(64),
        mem_available: Bytes::from_gib(60),
        scope_used: Some(Bytes::from_mib(used)),
        ..Sample::default()
    };
    let mut now = Timestamp::from_millis(1);
    let _ = arbiter.handle(now, Event::Sampled(sample(0, now)));
    let actions = arbiter.handle(now, Event::EngineInspected { shape: shape() });
    let (revision, plan) = actions
        .into_iter()
        .find_map(|action| match action {
            Action::LoadEngine { revision, plan } => Some((revision, plan)),
            _ => None,
        })
        .unwrap();
    let used = shape().plan_bytes(&plan);
    let applied = Event::EngineApplied {
        revision,
        in_force: plan,
        freed: Bytes::ZERO,
        used,
        untouched: Bytes::ZERO,
        untouched_given: Bytes::ZERO,
        took: Duration::from_millis(1),
    };
    let _ = arbiter.handle(now, applied);
    // A neighbour that nobody knows takes what is left.
    let mut shed = None;
    for _ in 0..10 {
        now = now + Duration::from_millis(400);
        let next = Event::Sampled(sample(590, now));
        let (actions, times, bytes) = asked_by(|| arbiter.handle(now, next));
        if actions.iter().any(|action| matches!(action, Action::ApplyPlan { .. })) {
            shed = Some((times, bytes));
            break;
        }
    }
    let (times, bytes) = shed.expect("it sheds");
    println!("from the sample to the order to shed: {times} allocations, {bytes} bytes");
    assert!(
        times <= TIMES_MAX && bytes <= BYTES_MAX,
        "{times} allocations, {bytes} bytes"
    );
}

/// Bounds of a decision with 32 layers: what it weighs, the plan, and its reason in words. They are small blocks that the
/// allocator has at hand; there is no buffer that grows with what was asked before.
const TIMES_MAX: u64 = 2000;
const BYTES_MAX: u64 = 256 << 10;
