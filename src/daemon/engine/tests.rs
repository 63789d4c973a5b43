//! Tests of the bridge between engine and arbiter, with scripted models.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicU32, Ordering},
};

use super::*;
use crate::{clock::MonotonicClock, control_loop::Inbound};
use cotenant_dev::samples::sample_with;
use cotenant_dev::weights::Weights as _;
use cotenant_engine::{
    ApplyError, Breakdown, Checkpoint, EngineOptions, ForwardError, LanguageModel, Model,
    ModelOptions,
    arena::{Backing, Mapping, SharedMapping},
    disk::DiskTimeout,
    gguf::GgmlDType,
    language_model::Opened,
    spec::Architecture,
    synthetic::{Synthetic, TypeMix},
    text::TextSide,
};
use cotenant_policy::{
    arbiter::Arbiter,
    event::Action,
    params::{EngineParams, Params, Scope},
    residency::PlanLimits,
    speed::Calibration,
};
use cotenant_units::Bytes;

async fn reason(inbox: &mut mpsc::Receiver<Inbound>) -> String {
    match inbox.recv().await.unwrap().event {
        Event::EngineFailed { reason, .. } => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn an_engine_that_broke_down_is_replaced_by_the_next_load() {
    let (control, mut inbox) =
        ControlHandle::new("boot".to_owned(), Vec::new(), MonotonicClock::start(), 64);
    let (parts, _losses) = Parts::new();
    let opened = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&opened);
    let start: Starter = Box::new(move |sink| {
        let count = Arc::clone(&count);
        let opener = move |path: &Path, _plan: &EnginePlan| {
            assert!(count.fetch_add(1, Ordering::Relaxed) > 0, "as planted");
            Err(Engine::inspect(path, 1)
                .err()
                .unwrap_or_else(|| unreachable!())) as Result<_, LoadError>
        };
        Engine::start_with(EngineOptions::default(), Box::new(opener), sink)
    });
    let path = PathBuf::from("/nonexistent/model.gguf");
    let inspector = Inspector::by(
        Arc::new(|| Engine::inspect(Path::new("/nonexistent"), 1)),
        &control,
    );
    let mut driver = EngineDriver::new(start, path, inspector, &parts).unwrap();
    let current = driver.current();
    let plan = EnginePlan {
        resident: BTreeSet::new(),
        kv_capacity: Tokens::new(512),
        prefill_chunk: Tokens::new(64),
        kv_type: cotenant_policy::kv_type::KvType::F16,
    };
    driver.load(1, plan.clone(), None);
    assert!(reason(&mut inbox).await.contains("as planted"));
    // The next engine answers, and API requests reach it.
    driver.load(2, plan.clone(), None);
    assert!(reason(&mut inbox).await.contains("/nonexistent/model.gguf"));
    assert_eq!(current.handle().snapshot().phase, EnginePhase::Empty);
    // After a failed load, the engine can retry.
    driver.load(3, plan, None);
    assert!(reason(&mut inbox).await.contains("/nonexistent/model.gguf"));
    assert_eq!(opened.load(Ordering::Relaxed), 3);
    driver.drain().await;
    driver.stop(Duration::from_secs(10)).await;
}

#[tokio::test]
async fn a_header_on_a_disk_that_hangs_is_reported_and_read_again_when_the_disk_has_answered() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 7)
        .write(&path)
        .unwrap();
    let kept = Mapping::new(Bytes::from_mib(2), Backing::OnTouch).unwrap();
    let kept = Arc::new(SharedMapping::from(kept));
    let (mark, asked) = (Arc::downgrade(&kept), Arc::new(AtomicU32::new(0)));
    let (theirs, count) = (path.clone(), Arc::clone(&asked));
    let inspect = move || {
        if count.fetch_add(1, Ordering::Relaxed) > 0 {
            return Engine::inspect(&theirs, 1);
        }
        let kind = DiskTimeout::default()
            .stalled(Duration::from_millis(4001), &"the header".into())
            .into();
        let left = Retained::of([mark.clone()], std::time::Instant::now());
        Err(LoadError::new(&theirs, kind).leaving(left))
    };
    let (control, mut inbox) =
        ControlHandle::new("boot".to_owned(), Vec::new(), MonotonicClock::start(), 64);
    Inspector::by(Arc::new(inspect), &control).begin();
    match inbox.recv().await.unwrap().event {
        Event::EngineFailed { reason, left, .. } => {
            assert_eq!(left, Some(Bytes::from_mib(2)));
            let reported = "the disk did not respond for 4001 ms, the limit is 4000 ms (hint: check that the disk";
            assert!(reason.contains(reported), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(
        asked.load(Ordering::Relaxed),
        1,
        "the file is not opened again while it hangs"
    );
    drop(kept);
    let event = inbox.recv().await.unwrap().event;
    assert!(matches!(event, Event::EngineInspected { .. }), "{event:?}");
    assert_eq!(asked.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn a_file_that_holds_another_model_by_then_is_looked_at_again_instead_of_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let write = |feed_forward: u32| {
        let model = Synthetic {
            feed_forward,
            ..Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 7)
        };
        let other = folder.path().join("other.gguf");
        model.write(&other).unwrap();
        std::fs::rename(other, &path).unwrap();
    };
    write(256);
    let before = Engine::inspect(&path, 1).unwrap();
    let (control, mut inbox) =
        ControlHandle::new("boot".to_owned(), Vec::new(), MonotonicClock::start(), 64);
    let (parts, _losses) = Parts::new();
    let theirs = path.clone();
    let inspector = Inspector::by(Arc::new(move || Engine::inspect(&theirs, 1)), &control);
    let expected = inspector.expected();
    let start: Starter = Box::new(move |sink| {
        let model = ModelOptions {
            name: Some("called so".to_owned()),
            ..ModelOptions::for_threads(1)
        };
        Engine::start_expecting(EngineOptions::default(), model, expected.clone(), sink)
    });
    let mut driver = EngineDriver::new(start, path.clone(), inspector, &parts).unwrap();
    let limits = PlanLimits::new(&EngineParams::default(), Tokens::ZERO);
    let floor = |shape: &ModelShape| shape.floor_plan(&limits);
    write(512);
    driver.load(1, floor(&before), Some(before.clone()));
    match inbox.recv().await.unwrap().event {
        Event::EngineFailed { reason, cure, .. } => {
            assert!(reason.contains("contains a different model"), "{reason}");
            assert_eq!(cure, Cure::Reread, "it is looked at again");
        }
        other => panic!("{other:?}"),
    }
    // As requested by the arbiter.
    driver.inspect();
    let event = inbox.recv().await.unwrap().event;
    let Event::EngineInspected { shape } = event else {
        panic!("{event:?}");
    };
    assert_ne!(shape, before);
    driver.load(2, floor(&shape), Some(shape.clone()));
    let event = inbox.recv().await.unwrap().event;
    let Event::EngineApplied(EngineApplied { in_force, used, .. }) = event else {
        panic!("{event:?}");
    };
    assert!(used <= shape.plan_bytes(&in_force), "{used}");
    driver.drain().await;
    driver.stop(Duration::from_secs(10)).await;
}

/// Model with a fixed calibration result; `None` leaves nothing resident.
struct Measured(Model, Option<Calibration>);

impl LanguageModel for Measured {
    fn forward(
        &mut self,
        _: &[u32],
        _: &mut dyn Checkpoint,
        _: &mut Vec<f32>,
    ) -> Result<(), ForwardError> {
        Err(ForwardError::NoTokens)
    }

    fn apply(&mut self, plan: &EnginePlan) -> Result<ApplyReport, ApplyError> {
        self.0.apply(plan)
    }

    fn calibrate(
        &mut self,
        _: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Calibration>, ApplyError> {
        if self.1.is_some() {
            return Ok(self.1);
        }
        let nothing = EnginePlan {
            resident: BTreeSet::new(),
            ..self.0.plan().clone()
        };
        self.0.apply(&nothing)?;
        Err(ApplyError::Allocate {
            what: "layer 0".to_owned(),
            bytes: Bytes::from_mib(1),
            source: io::ErrorKind::OutOfMemory.into(),
        })
    }

    fn reset(&mut self) {
        self.0.reset();
    }

    fn plan(&self) -> &EnginePlan {
        self.0.plan()
    }

    fn shape(&self) -> &ModelShape {
        self.0.shape()
    }

    fn position(&self) -> u32 {
        self.0.position()
    }

    fn breakdown(&self) -> Breakdown {
        self.0.breakdown()
    }
}

fn measured(
    path: &Path,
    plan: &EnginePlan,
    found: Option<Calibration>,
) -> Result<Opened, LoadError> {
    let options = ModelOptions::for_threads(1);
    let model = Model::open(path, plan, &options)?;
    let text = TextSide::new(model.header(), model.shape().context_max).unwrap();
    Ok(Opened {
        model: Box::new(Measured(model, found)),
        text,
    })
}

/// Engine and arbiter without the loop.
struct Pair {
    driver: EngineDriver,
    arbiter: Arbiter,
    now: Timestamp,
    inbox: mpsc::Receiver<Inbound>,
}

impl Pair {
    /// Passes an event to the arbiter, and performs its actions on the engine.
    fn tell(&mut self, event: Event) {
        for action in self.arbiter.handle(self.now, event) {
            match action {
                Action::LoadEngine { revision, plan } => self.driver.load(revision, plan, None),
                Action::ApplyPlan { revision, plan, .. } => self.driver.apply(revision, plan),
                _ => {}
            }
        }
    }

    /// Samples a machine with ample memory on which only the engine uses some.
    fn sample(&mut self, used: Bytes) {
        self.tell(Event::Sampled(sample_with(used, self.now)));
    }

    /// Waits for the engine to report a plan; returns it with its memory.
    async fn applied(&mut self) -> (EnginePlan, Bytes) {
        let event = self.inbox.recv().await.unwrap().event;
        let Event::EngineApplied(EngineApplied {
            in_force,
            used,
            untouched,
            ..
        }) = event.clone()
        else {
            panic!("{event:?}");
        };
        self.tell(event);
        assert_eq!(
            self.arbiter.snapshot().engine.in_force.as_ref(),
            Some(&in_force)
        );
        (in_force, used.saturating_sub(untouched))
    }
}

/// Creates a model whose layers are larger than the ring that streams them.
fn wide_model() -> (tempfile::TempDir, PathBuf, ModelShape) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let model = Synthetic {
        feed_forward: 4096,
        ..Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 7)
    };
    model.write(&path).unwrap();
    let (shape, _) = Model::inspect(&path, 1).unwrap();
    (folder, path, shape)
}

#[tokio::test]
async fn what_an_engine_could_not_have_back_after_measuring_is_reported_and_asked_for_again() {
    let (_folder, path, shape) = wide_model();
    assert!(shape.ring_bytes < shape.layers.iter().map(|layer| layer.resident_bytes).sum());
    let (control, inbox) =
        ControlHandle::new("boot".to_owned(), Vec::new(), MonotonicClock::start(), 64);
    let (parts, _losses) = Parts::new();
    let start: Starter = Box::new(|sink| {
        let opener = |path: &Path, plan: &EnginePlan| measured(path, plan, None);
        Engine::start_with(EngineOptions::default(), Box::new(opener), sink)
    });
    let theirs = path.clone();
    let inspector = Inspector::by(Arc::new(move || Engine::inspect(&theirs, 1)), &control);
    let mut params = Params::for_budget(Bytes::from_mib(400), Bytes::ZERO, Scope::Session);
    params.engine = Some(EngineParams::default());
    let mut pair = Pair {
        driver: EngineDriver::new(start, path, inspector, &parts).unwrap(),
        arbiter: Arbiter::new(params).unwrap(),
        now: Timestamp::START,
        inbox,
    };
    pair.sample(Bytes::ZERO);
    pair.tell(Event::EngineInspected { shape });
    let (loaded, with_all) = pair.applied().await;
    assert!(!loaded.resident.is_empty());
    // Measuring is part of the load, and so is its result.
    let (receded, used) = pair.applied().await;
    let fewer = EnginePlan {
        resident: BTreeSet::new(),
        ..loaded.clone()
    };
    assert_eq!(receded, fewer);
    assert!(used < with_all);
    let snapshot = pair.arbiter.snapshot();
    assert_eq!(
        snapshot.memory.used, used,
        "the arbiter knows what the engine has"
    );
    // Growth requires a sample newer than the change.
    pair.now = pair.now + Duration::from_millis(1);
    pair.sample(used);
    let snapshot = pair.arbiter.snapshot();
    assert_eq!(
        snapshot.engine.asked.as_ref(),
        Some(&loaded),
        "there is room for it"
    );
    let (grown, _) = pair.applied().await;
    assert_eq!(grown, loaded);
    assert_eq!(pair.arbiter.snapshot().engine.asked, None);
    pair.driver.drain().await;
    pair.driver.stop(Duration::from_secs(10)).await;
}

#[tokio::test]
async fn an_engine_that_streams_and_finds_reading_slow_reads_prompts_in_larger_chunks() {
    let (_folder, path, shape) = wide_model();
    // Reading a MiB takes a second, or less than computing on it.
    for (read_ns_per_mib, chunk) in [(1_000_000_000, 16), (1, 4)] {
        let found = Calibration {
            compute_ns_per_mib: 1000,
            read_ns_per_mib,
            read_busy_ns_per_mib: read_ns_per_mib,
            slowed_ns_per_mib: 0,
            prefill_ns_per_mib: 1000,
        };
        let (control, inbox) =
            ControlHandle::new("boot".to_owned(), Vec::new(), MonotonicClock::start(), 64);
        let (parts, _losses) = Parts::new();
        let start: Starter = Box::new(move |sink| {
            let opener = move |path: &Path, plan: &EnginePlan| measured(path, plan, Some(found));
            Engine::start_with(EngineOptions::default(), Box::new(opener), sink)
        });
        let theirs = path.clone();
        let inspector = Inspector::by(Arc::new(move || Engine::inspect(&theirs, 1)), &control);
        let mut params = Params::for_budget(Bytes::from_mib(400), Bytes::ZERO, Scope::Session);
        params.engine = Some(EngineParams {
            kv_wanted: Tokens::new(64),
            kv_floor: Tokens::new(64),
            prefill_chunk: Tokens::new(4),
            prefill_chunk_max: Tokens::new(16),
            ..EngineParams::default()
        });
        let limits = PlanLimits::new(params.engine.as_ref().unwrap(), Tokens::ZERO);
        let full = shape.plan_bytes(&shape.full_plan(&limits));
        let less = shape.layers.last().unwrap().resident_bytes;
        // Other users leave the engine less than its whole memory.
        let shed_below = params.pressure.elevated_below + params.pressure.hysteresis;
        let free = full.saturating_sub(less) + shed_below;
        let mut pair = Pair {
            driver: EngineDriver::new(start, path.clone(), inspector, &parts).unwrap(),
            arbiter: Arbiter::new(params).unwrap(),
            now: Timestamp::START,
            inbox,
        };
        let sample = |pair: &mut Pair, used: Bytes| {
            pair.now = pair.now + Duration::from_millis(10);
            pair.tell(Event::Sampled(sample_with(
                Bytes::from_mib(400).saturating_sub(free) + used,
                pair.now,
            )));
            pair.now = pair.now + Duration::from_millis(1);
        };
        sample(&mut pair, Bytes::ZERO);
        pair.tell(Event::EngineInspected {
            shape: shape.clone(),
        });
        let (loaded, used) = pair.applied().await;
        sample(&mut pair, used);
        assert!(loaded.resident.len() < shape.layers.len(), "{loaded:?}");
        assert_eq!(loaded.prefill_chunk.get(), 4);
        let event = pair.inbox.recv().await.unwrap().event;
        assert!(matches!(event, Event::EngineCalibrated(_)), "{event:?}");
        pair.tell(event);
        let asked = pair.arbiter.snapshot().engine.asked;
        assert_eq!(asked.is_some(), chunk > 4, "{asked:?}");
        if chunk > 4 {
            let (in_force, then) = pair.applied().await;
            assert_eq!(in_force.prefill_chunk.get(), chunk);
            assert!(in_force.resident.is_subset(&loaded.resident));
            let held: Bytes = pair
                .arbiter
                .snapshot()
                .leases
                .iter()
                .map(|lease| lease.memory.held)
                .sum();
            assert!(then <= held && held <= full, "{then} of {held}");
        }
        let plan = pair.driver.current().handle().snapshot().plan.unwrap();
        assert_eq!(plan.prefill_chunk.get(), chunk, "in the engine itself");
        pair.driver.drain().await;
        pair.driver.stop(Duration::from_secs(10)).await;
    }
}
