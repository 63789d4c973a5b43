//! Allocations on the shed path, none of which may reach the system.
//!
//! Below the emergency reserve, the system's allocator counts the requests that reach it.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    collections::BTreeSet,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use crate::weights::Weights as _;
use cotenant::{
    emergency::{self, EmergencyAllocator},
    engine::{
        Engine, EngineEvent, EngineHandle, EngineOptions, Header, LoadError, ModelOptions,
        gguf::GgmlDType,
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
        tokenizer::Tokenizer,
    },
    policy::{
        Arbiter,
        event::{Action, EngineApplied, Event},
        kv_type::KvType,
        lease::Ticket,
        params::{EngineParams, Params, Scope},
        pressure::{MemoryReading, Sample},
        residency::{EnginePlan, KvShape, LayerKind, LayerShape, ModelShape},
    },
    units::{Bytes, Timestamp, Tokens},
};
use tokio::sync::mpsc;

/// System allocator that counts the requests of this thread.
struct Counting;

thread_local! {
    static ASKED: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
    /// Bytes allocated and not freed by this thread, and their maximum.
    static KEPT: Cell<(i64, i64)> = const { Cell::new((0, 0)) };
}

/// Total allocations of threads named `engine`.
static ASKED_BY_ENGINES: AtomicU64 = AtomicU64::new(0);

/// Returns whether this thread is named `engine` in the kernel.
fn is_engine() -> bool {
    let mut name = [0u8; 16];
    // SAFETY: the kernel writes at most 16 bytes, the terminator included.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name.starts_with(b"engine\0")
}

fn count(bytes: usize) {
    if is_engine() {
        ASKED_BY_ENGINES.fetch_add(1, Ordering::Relaxed);
    }
    // A thread that is being destroyed no longer has a count.
    let _ = ASKED.try_with(|asked| {
        let (times, sum) = asked.get();
        asked.set((times + 1, sum + bytes as u64));
    });
    keep(i64::try_from(bytes).unwrap_or(i64::MAX));
}

fn keep(bytes: i64) {
    let _ = KEPT.try_with(|kept| {
        let (now, most) = kept.get();
        kept.set((now + bytes, most.max(now + bytes)));
    });
}

fn let_go(bytes: usize) {
    keep(-i64::try_from(bytes).unwrap_or(i64::MAX));
}

// SAFETY: every call is passed unchanged to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let_go(layout.size());
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        let_go(layout.size());
        // SAFETY: as promised by the caller.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: EmergencyAllocator<Counting> = EmergencyAllocator::before(Counting);

/// Returns number and bytes of this thread's allocations during `work`.
fn asked_by<T>(work: impl FnOnce() -> T) -> (T, u64, u64) {
    let (times, bytes) = ASKED.get();
    let done = work();
    let (times_now, bytes_now) = ASKED.get();
    (done, times_now - times, bytes_now - bytes)
}

/// Returns the bytes that `work` keeps on this thread besides its result, and their maximum meanwhile.
fn kept_by<T>(work: impl FnOnce() -> T) -> (T, i64, i64) {
    let (before, _) = KEPT.get();
    KEPT.set((before, before));
    let done = work();
    let (now, most) = KEPT.get();
    (done, now - before, most - before)
}

fn shape() -> ModelShape {
    let layer = LayerShape::new(LayerKind::Attention, 0, Bytes::from_mib(10));
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
            windowed: None,
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
    let (kept, now, most) = kept_by(|| {
        drop(vec![0u8; 3000]);
        vec![0u8; 1000]
    });
    assert_eq!((now, most), (1000, 3000));
    assert_eq!(kept_by(|| drop(kept)).1, -1000);
}

#[test]
fn a_thread_that_has_encoded_a_prompt_keeps_nothing_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    Synthetic::tiny(Architecture::Qwen35, TypeMix::All(GgmlDType::Q8_0), 11)
        .write(&path)
        .unwrap();
    let tokenizer = Tokenizer::from_header(&Header::read(&path).unwrap()).unwrap();
    // Distinct words, long enough for the library's cache.
    let word = |number: u32| {
        let digits = format!("{number:05}");
        let letters: String = digits
            .bytes()
            .map(|digit| char::from(digit - b'0' + b'a'))
            .collect();
        letters.repeat(50)
    };
    let text: Vec<_> = (0..1000).map(word).collect();
    let text = text.join(" ");
    let kept: i64 = thread::scope(|scope| {
        let encode = || {
            let warm = tokenizer
                .encode("a few words, so that what is made once is there")
                .unwrap();
            drop(warm);
            kept_by(|| drop(tokenizer.encode(&text).unwrap())).1
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(encode)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .sum()
    });
    // The ledger has some 50 KiB for the text side of this model; the words' tokens took 8 MiB per thread.
    assert!(kept < 64 << 10, "{kept} bytes are kept by four threads");
}

#[test]
fn asking_the_engine_for_a_plan_that_is_there_allocates_nothing() {
    let (sink, _events) = mpsc::channel(8);
    let never = |path: &Path, _: &EnginePlan| {
        Err(Engine::inspect(path, 1).unwrap_err()) as Result<_, LoadError>
    };
    let engine = Engine::start_with(EngineOptions::default(), Box::new(never), sink).unwrap();
    let handle = engine.handle();
    for _ in 0..4 {
        let plan = EnginePlan {
            resident: BTreeSet::new(),
            kv_capacity: Tokens::new(128),
            prefill_chunk: Tokens::new(64),
            kv_type: KvType::F16,
        };
        let ((), times, _) = asked_by(|| handle.apply(0, plan));
        assert_eq!(times, 0);
    }
    handle.stop();
    engine.join();
}

/// Returns a sample of a machine with free memory on which this much of the budget is used.
fn sample(used_mib: u64, taken_at: Timestamp) -> Sample {
    let (mem_total, mem_available) = (Bytes::from_gib(64), Bytes::from_gib(60));
    let memory = MemoryReading {
        mem_total,
        mem_available,
        ..MemoryReading::default()
    };
    Sample {
        taken_at,
        memory,
        scope_used: Some(Bytes::from_mib(used_mib)),
        ..Sample::default()
    }
}

#[test]
fn a_sample_that_leads_to_a_shed_asks_for_little() {
    let mut params = Params::for_budget(Bytes::from_mib(600), Bytes::ZERO, Scope::Session);
    params.engine = Some(EngineParams::default());
    let mut arbiter = Arbiter::new(params).unwrap();
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
    let applied = Event::EngineApplied(EngineApplied {
        revision,
        in_force: plan,
        freed: Bytes::ZERO,
        used,
        untouched: Bytes::ZERO,
        untouched_given: Bytes::ZERO,
        took: Duration::from_millis(1),
    });
    let _ = arbiter.handle(now, applied);
    // An unmanaged neighbour takes the remaining memory.
    let mut shed = None;
    for _ in 0..10 {
        now = now + Duration::from_millis(400);
        let next = Event::Sampled(sample(590, now));
        let (actions, times, bytes) = asked_by(|| arbiter.handle(now, next));
        if actions
            .iter()
            .any(|action| matches!(action, Action::ApplyPlan { .. }))
        {
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

/// Arbiter and an engine with a real model, connected as in the daemon.
struct Shedding {
    arbiter: Arbiter,
    handle: EngineHandle,
    events: mpsc::Receiver<EngineEvent>,
    now: Timestamp,
    _engine: Engine,
    _folder: tempfile::TempDir,
}

impl Shedding {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        Synthetic::tiny(Architecture::Qwen35, TypeMix::All(GgmlDType::Q8_0), 11)
            .write(&path)
            .unwrap();
        let (sink, events) = mpsc::channel(64);
        let model = ModelOptions::for_threads(1);
        let engine = Engine::start(EngineOptions::default(), model, sink).unwrap();
        let mut params = Params::for_budget(Bytes::from_mib(600), Bytes::ZERO, Scope::Session);
        params.engine = Some(EngineParams::default());
        let mut shedding = Self {
            arbiter: Arbiter::new(params).unwrap(),
            handle: engine.handle(),
            events,
            now: Timestamp::from_millis(1),
            _engine: engine,
            _folder: folder,
        };
        let _ = shedding.sample(0);
        let shape = Engine::inspect(&path, 1).unwrap();
        let actions = shedding
            .arbiter
            .handle(shedding.now, Event::EngineInspected { shape });
        let (revision, plan) = actions
            .into_iter()
            .find_map(|action| match action {
                Action::LoadEngine { revision, plan } => Some((revision, plan)),
                _ => None,
            })
            .unwrap();
        shedding.handle.load(&path, plan.clone());
        let used = match shedding.events.blocking_recv().unwrap() {
            EngineEvent::Ready { breakdown, .. } => breakdown.total,
            other => panic!("{other:?}"),
        };
        // It calibrates before it accepts orders.
        while !matches!(
            shedding.events.blocking_recv().unwrap(),
            EngineEvent::Calibrated { .. }
        ) {}
        let _ = shedding.applied(revision, plan.clone(), used, Bytes::ZERO);
        shedding.handle.apply(revision, plan);
        while !matches!(
            shedding.events.blocking_recv().unwrap(),
            EngineEvent::Applied { .. }
        ) {}
        shedding
    }

    /// Waits until the engine has completed its orders, and reports them to the arbiter.
    fn settle(&mut self) {
        while self.arbiter.snapshot().engine.asked.is_some() {
            match self.events.blocking_recv().unwrap() {
                EngineEvent::Applied {
                    revision, report, ..
                } => {
                    for action in self.applied(revision, report.plan, report.held, report.freed) {
                        if let Action::ApplyPlan { revision, plan, .. } = action {
                            self.handle.apply(revision, plan);
                        }
                    }
                }
                EngineEvent::ApplyFailed { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Processes a sample and the resulting orders for the engine, as in the control loop.
    fn sample(&mut self, used_mib: u64) -> bool {
        self.now = self.now + Duration::from_millis(400);
        self.take(Event::Sampled(sample(used_mib, self.now)))
    }

    fn engine_is_asked(&self) -> bool {
        self.arbiter.snapshot().engine.asked.is_some()
    }

    /// Processes an event and the resulting orders for the engine; returns whether there were any.
    fn take(&mut self, event: Event) -> bool {
        let mut ordered = false;
        for action in self.arbiter.handle(self.now, event) {
            if let Action::ApplyPlan { revision, plan, .. } = action {
                self.handle.apply(revision, plan);
                ordered = true;
            }
        }
        ordered
    }

    fn applied(
        &mut self,
        revision: u64,
        in_force: EnginePlan,
        used: Bytes,
        freed: Bytes,
    ) -> Vec<Action> {
        self.now = self.now + Duration::from_millis(1);
        let event = Event::EngineApplied(EngineApplied {
            revision,
            in_force,
            freed,
            used,
            untouched: Bytes::ZERO,
            untouched_given: Bytes::ZERO,
            took: Duration::from_millis(1),
        });
        self.arbiter.handle(self.now, event)
    }
}

#[test]
fn from_the_sample_to_the_credit_the_system_is_not_asked_for_memory() {
    let _ = emergency::prepare();
    let mut shedding = Shedding::new();
    let before = emergency::counts();
    let engines = ASKED_BY_ENGINES.load(Ordering::Relaxed);
    assert!(engines > 0, "the engine's thread is counted");
    let mut times = 0;
    // One of the next samples crosses the watermark; the engine executes its order and releases pages.
    let ordered = (0..10).any(|_| {
        let (ordered, asked, _) = asked_by(|| emergency::within(|| shedding.sample(590)));
        times += asked;
        ordered
    });
    assert!(ordered, "it sheds");
    let (revision, report) = match shedding.events.blocking_recv().unwrap() {
        EngineEvent::Applied {
            revision, report, ..
        } => (revision, report),
        other => panic!("{other:?}"),
    };
    let engines = ASKED_BY_ENGINES.load(Ordering::Relaxed) - engines;
    assert!(report.freed > Bytes::ZERO, "{report:?}");
    let held = shedding.arbiter.snapshot().memory.held;
    let credit = || shedding.applied(revision, report.plan.clone(), report.held, report.freed);
    let (_, asked, _) = asked_by(|| emergency::within(credit));
    assert!(
        shedding.arbiter.snapshot().memory.held < held,
        "it is credited"
    );
    let counts = emergency::counts();
    assert_eq!((times, engines, asked), (0, 0, 0), "{counts:?}");
    assert_eq!(counts.missed, before.missed);
    let served = counts.served - before.served;
    println!(
        "{served} blocks that were set aside, {} bytes of them still in use",
        emergency::in_use()
    );
    assert!(served > 0);
}

#[test]
fn what_is_set_aside_is_there_again_after_many_sheds() {
    let _ = emergency::prepare();
    let mut shedding = Shedding::new();
    let mut in_use = Vec::new();
    for round in 1..=8 {
        let shed = Event::OperatorShed {
            ticket: Ticket(2 * round),
            bytes: Bytes::from_mib(1),
            by: None,
        };
        assert!(
            emergency::within(|| shedding.take(shed)),
            "round {round} sheds"
        );
        emergency::within(|| shedding.settle());
        let regrow = Event::OperatorRegrow {
            ticket: Ticket(2 * round + 1),
            by: None,
        };
        let _ = shedding.take(regrow);
        let grows = (0..100).any(|_| shedding.engine_is_asked() || shedding.sample(20));
        assert!(grows, "round {round} grows back");
        shedding.settle();
        in_use.push(emergency::in_use());
    }
    assert_eq!(shedding.arbiter.snapshot().totals.sheds, 8);
    let counts = emergency::counts();
    assert_eq!(counts.missed, 0, "{counts:?}, in use {in_use:?}");
    // Memory kept from a decision is replaced by that of the next one; a channel keeps a few blocks.
    assert!(in_use.iter().all(|bytes| *bytes <= 64 << 10), "{in_use:?}");
}

/// Bounds of a decision with 32 layers: candidates, plan, and reason as text; well within the reserve. No buffer grows
/// with the number of earlier requests.
const TIMES_MAX: u64 = 400;
const BYTES_MAX: u64 = 256 << 10;
