//! The engine's events become those of the arbiter.

use std::{
    io,
    path::PathBuf,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use tokio::sync::mpsc;

use super::{
    hub::Hub,
    parts::Parts,
    run::{sayable, threads},
};
use crate::{
    causes::in_one_line,
    config::LlmConfig,
    engine::{
        ApplyReport, Engine, EngineEvent, EngineHandle, EnginePhase, Expected, Usage,
        reader::Left,
        thread::{Inspected, OpenError},
    },
    policy::{
        event::Event,
        residency::{EnginePlan, ModelShape},
        speed::Timing,
    },
    units::{Bytes, Timestamp, Tokens},
};

/// Name of the engine's lease in the book.
pub(super) const ENGINE_TENANT: &str = "llm";

/// Events of the engine that may wait for the loop.
const ENGINE_EVENTS: usize = 256;

/// Starts an engine that tells the given sink what happens.
pub(super) type Starter = Box<dyn Fn(mpsc::Sender<EngineEvent>) -> io::Result<Engine> + Send + Sync>;

/// The way to the engine of the moment: one that broke down is replaced by the next load.
#[derive(Clone)]
pub(super) struct CurrentEngine(Arc<RwLock<EngineHandle>>);

impl CurrentEngine {
    /// A handle to ask it.
    pub(super) fn handle(&self) -> EngineHandle {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn replace(&self, handle: EngineHandle) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = handle;
    }
}

/// Reads the model's header away from the loop; the shape comes as an event.
#[derive(Clone)]
pub(super) struct Inspector {
    inspect: Arc<dyn Fn() -> Result<ModelShape, OpenError> + Send + Sync>,
    hub: Arc<Hub>,
    expected: Expected,
}

impl Inspector {
    /// Of the configured model.
    pub(super) fn new(llm: &LlmConfig, hub: &Arc<Hub>) -> Self {
        let (path, name) = (llm.path.clone(), llm.name.clone());
        let (vocabulary, threads) = (sayable(llm), threads(llm));
        let inspect = move || {
            let Inspected {
                mut shape,
                skipped_blocks,
            } = Engine::inspect_with(&path, vocabulary.as_ref(), threads)?;
            if skipped_blocks > 0 {
                tracing::info!(
                    skipped_blocks,
                    "blocks for multi-token prediction stay in the model's file"
                );
            }
            shape.name.clone_from(&name);
            Ok(shape)
        };
        Self::by(Arc::new(inspect), hub)
    }

    fn by(inspect: Arc<dyn Fn() -> Result<ModelShape, OpenError> + Send + Sync>, hub: &Arc<Hub>) -> Self {
        Self {
            inspect,
            hub: Arc::clone(hub),
            expected: Expected::default(),
        }
    }

    /// What a load of it is to find.
    pub(super) fn expected(&self) -> Expected {
        self.expected.clone()
    }

    /// Reads it now.
    pub(super) fn begin(&self) {
        tokio::spawn(self.clone().run(None));
    }

    /// Reads it again once the disk has answered, for which reads wait that have left this.
    fn begin_after(&self, hung: Left) {
        tokio::spawn(self.clone().run(Some(hung)));
    }

    /// Reads it as often as the disk hangs meanwhile, never twice at the same time.
    async fn run(self, mut hung: Option<Left>) {
        loop {
            if let Some(left) = hung.take() {
                loop {
                    tokio::time::sleep(HUNG_LOOK).await;
                    if !left.hangs() {
                        break;
                    }
                }
            }
            let inspect = Arc::clone(&self.inspect);
            let inspected = tokio::task::spawn_blocking(move || inspect()).await;
            let event = match inspected {
                Ok(Ok(shape)) => Event::EngineInspected { shape },
                Ok(Err(error)) => {
                    hung = error.hung().cloned();
                    let hint = error.hint().map_or_else(String::new, |hint| format!(" (hint: {hint})"));
                    Event::EngineFailed {
                        reason: format!("{}{hint}", in_one_line(&error)),
                        left: hung.as_ref().map(Left::bytes),
                    }
                }
                Err(panicked) => Event::EngineFailed {
                    reason: format!("reading the model's header broke down: {panicked}"),
                    left: None,
                },
            };
            self.hub.tell(event).await;
            if hung.is_none() {
                return;
            }
        }
    }
}

/// How often it is looked whether a disk that hung has answered. Our choice: a model takes longer to load.
const HUNG_LOOK: Duration = Duration::from_secs(1);

/// The engine and what was asked of it.
pub(super) struct EngineDriver {
    start: Starter,
    inspector: Inspector,
    engine: Engine,
    current: CurrentEngine,
    path: PathBuf,
    loads: mpsc::UnboundedSender<Asked>,
    hub: Arc<Hub>,
    parts: Parts,
}

/// A load under way.
struct Asked {
    at: Timestamp,
    revision: u64,
    plan: EnginePlan,
}

impl EngineDriver {
    /// Starts an engine for the model at `path`.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(super) fn new(start: Starter, path: PathBuf, inspector: Inspector, parts: &Parts) -> io::Result<Self> {
        let (engine, loads) = launch(&start, &inspector, parts)?;
        Ok(Self {
            current: CurrentEngine(Arc::new(RwLock::new(engine.handle()))),
            start,
            engine,
            path,
            loads,
            hub: Arc::clone(&inspector.hub),
            inspector,
            parts: parts.clone(),
        })
    }

    /// Reads the model's header, see [`Inspector`].
    pub(super) fn inspect(&self) {
        self.inspector.begin();
    }

    /// Loads the model with `plan`, which was made for that of `shape`, into a new engine when the last one has broken down.
    pub(super) fn load(&mut self, revision: u64, plan: EnginePlan, shape: Option<ModelShape>) {
        self.inspector.expected.set(shape);
        let phase = self.engine.handle().snapshot().phase;
        if matches!(phase, EnginePhase::Failed { .. } | EnginePhase::Stopped) {
            match launch(&self.start, &self.inspector, &self.parts) {
                Ok((engine, loads)) => {
                    self.current.replace(engine.handle());
                    (self.engine, self.loads) = (engine, loads);
                }
                Err(error) => {
                    let hub = Arc::clone(&self.hub);
                    let reason = format!("cannot start the engine's thread again: {error}");
                    tokio::spawn(async move { hub.tell(Event::EngineFailed { reason, left: None }).await });
                    return;
                }
            }
        }
        let _ = self.loads.send(Asked {
            at: self.hub.clock().now(),
            revision,
            plan: plan.clone(),
        });
        self.engine.handle().load(&self.path, plan);
    }

    /// Changes what the engine holds.
    pub(super) fn apply(&self, revision: u64, plan: EnginePlan) {
        self.engine.handle().apply(revision, plan);
    }

    /// Takes no more requests; what is returned waits until those that there are have been answered. A model that is
    /// being loaded is not waited for, since nobody can have asked it anything.
    pub(super) fn drain(&self) -> impl Future<Output = ()> + Send + use<> {
        let handle = self.engine.handle();
        handle.drain();
        let mut state = handle.watch();
        async move {
            let idle = state.wait_for(|state| !matches!(state.phase, EnginePhase::Ready | EnginePhase::Draining));
            let _ = idle.await; // its thread has ended
        }
    }

    /// Stops at the next layer, and waits until the engine holds nothing, at most `patience`: reading a model cannot be
    /// interrupted.
    pub(super) async fn stop(self, patience: Duration) {
        self.engine.handle().stop();
        let ended = tokio::task::spawn_blocking(move || self.engine.join());
        if tokio::time::timeout(patience, ended).await.is_err() {
            tracing::warn!("the engine has not stopped within {patience:?}; leaving without it");
        }
    }

    /// The way to the engine of the moment.
    pub(super) fn current(&self) -> CurrentEngine {
        self.current.clone()
    }
}

/// Starts an engine, and the bridge from its events to those of the arbiter.
fn launch(start: &Starter, inspector: &Inspector, parts: &Parts) -> io::Result<(Engine, mpsc::UnboundedSender<Asked>)> {
    let (sink, events) = mpsc::channel(ENGINE_EVENTS);
    let engine = start(sink)?;
    inspector.hub.note_engine(engine.handle());
    let (loads, asked) = mpsc::unbounded_channel();
    parts.spawn(
        "the bridge to the engine",
        forward(events, asked, engine.handle(), inspector.clone()),
    );
    Ok((engine, loads))
}

/// Requests running or waiting, and what the running one needs of the KV cache. What the last answer has left there is
/// kept only as long as nobody needs the space.
pub(super) fn activity(handle: &EngineHandle) -> Event {
    let snapshot = handle.snapshot();
    let running = usize::from(snapshot.running.is_some());
    let position = snapshot.position.get();
    let (kv_used, kv_kept) = if snapshot.running.is_some() {
        (position, 0)
    } else {
        // Copies of the state that prompts go on from lie behind the tokens, and go with the capacity there.
        let marks = snapshot.breakdown.as_ref().map_or(0, |held| held.kv_marks.get());
        let per_token = snapshot
            .shape
            .as_ref()
            .zip(snapshot.plan.as_ref())
            .map_or(0, |(shape, plan)| shape.kv.bytes_per_token(plan.kv_type).get());
        let marks = u32::try_from(marks.div_ceil(per_token.max(1))).unwrap_or(u32::MAX);
        (0, position.saturating_add(marks))
    };
    let (kv_droppable, kv_dropped) = snapshot
        .running
        .map_or((0, 0), |running| (running.droppable.get(), running.dropped.get()));
    Event::EngineActivity {
        requests: u32::try_from(snapshot.queued.saturating_add(running)).unwrap_or(u32::MAX),
        kv_used,
        kv_kept,
        kv_droppable,
        kv_dropped,
        untouched: snapshot.untouched,
    }
}

/// How long an answer took that was given from end to end.
fn timing(usage: Usage, prompt_took: Duration, took: Duration) -> Timing {
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let without = |all: Tokens, some: u32| Tokens::new(all.get().saturating_sub(some));
    Timing {
        prompt_tokens: without(usage.prompt_tokens, usage.cached_tokens.get()),
        prompt_us: micros(prompt_took),
        answer_tokens: without(usage.completion_tokens, 1),
        answer_us: micros(took.saturating_sub(prompt_took)),
    }
}

async fn forward(
    mut events: mpsc::Receiver<EngineEvent>,
    mut asked: mpsc::UnboundedReceiver<Asked>,
    handle: EngineHandle,
    inspector: Inspector,
) {
    let hub = Arc::clone(&inspector.hub);
    // What reads that hang have left, once that is told.
    let mut hung: Option<Left> = None;
    // Whether the model's file holds another one now.
    let mut replaced = false;
    // What was timed while the plan changed says nothing of either.
    let mut changed = true;
    // The plan that was put into force last.
    let mut last = 0;
    while let Some(event) = events.recv().await {
        if let EngineEvent::RequestFinished {
            outcome: Ok(_),
            usage,
            prompt_took: Some(prompt_took),
            took,
            ..
        } = &event
            && !changed
        {
            hub.tell(Event::EngineTimed(timing(*usage, *prompt_took, *took))).await;
        }
        match &event {
            EngineEvent::RequestStarted { .. } => changed = false,
            EngineEvent::Applied { .. }
            | EngineEvent::Ready { .. }
            | EngineEvent::Receded { .. }
            | EngineEvent::Rechunked { .. } => changed = true,
            _ => {}
        }
        let event = match event {
            EngineEvent::Ready { breakdown, .. } => {
                let Ok(asked) = asked.try_recv() else {
                    tracing::error!("the engine is ready though nobody had asked");
                    continue;
                };
                last = asked.revision;
                Event::EngineApplied {
                    revision: asked.revision,
                    in_force: asked.plan,
                    freed: Bytes::ZERO,
                    used: breakdown.total,
                    untouched: breakdown.kv_untouched,
                    untouched_given: Bytes::ZERO,
                    took: hub.clock().now().saturating_since(asked.at),
                }
            }
            EngineEvent::Calibrated { calibration } => Event::EngineCalibrated(calibration),
            EngineEvent::LoadFailed {
                message,
                hint,
                hung: left,
                replaced: another,
                ..
            } => {
                replaced = another;
                let _ = asked.try_recv();
                let hint = hint.map_or_else(String::new, |hint| format!(" (hint: {hint})"));
                hung = left;
                Event::EngineFailed {
                    reason: format!("{message}{hint}"),
                    left: hung.as_ref().map(Left::bytes),
                }
            }
            EngineEvent::Applied { revision, report, .. } => {
                last = revision;
                applied(revision, report)
            }
            EngineEvent::Rechunked { report } => applied(last, report),
            EngineEvent::Receded {
                plan,
                breakdown,
                message,
            } => {
                tracing::warn!("the engine holds less than it was asked to: {message}");
                Event::EngineApplied {
                    revision: last,
                    freed: Bytes::ZERO,
                    used: breakdown.total,
                    untouched: breakdown.kv_untouched,
                    untouched_given: Bytes::ZERO,
                    in_force: Arc::unwrap_or_clone(plan),
                    took: Duration::ZERO,
                }
            }
            EngineEvent::ApplyFailed { revision, error } => Event::EngineApplyFailed {
                revision,
                reason: in_one_line(&error),
            },
            EngineEvent::Failed { message, hung: left } => {
                hung = left;
                Event::EngineFailed {
                    reason: message,
                    left: hung.as_ref().map(Left::bytes),
                }
            }
            EngineEvent::RequestStarted { .. } => activity(&handle),
            EngineEvent::RequestFinished { usage, .. } => match activity(&handle) {
                // What the answer lost in its last moments was not told yet.
                Event::EngineActivity {
                    requests,
                    kv_used,
                    kv_kept,
                    kv_droppable,
                    untouched,
                    ..
                } => Event::EngineActivity {
                    requests,
                    kv_used,
                    kv_kept,
                    kv_droppable,
                    kv_dropped: usage.dropped_tokens.get(),
                    untouched,
                },
                other => other,
            },
            EngineEvent::Stopped => break,
        };
        hub.tell(event).await;
        if let Some(left) = hung.take() {
            inspector.begin_after(left);
        } else if std::mem::take(&mut replaced) {
            inspector.begin();
        }
    }
}

fn applied(revision: u64, report: ApplyReport) -> Event {
    Event::EngineApplied {
        revision,
        freed: report.freed,
        used: report.held,
        untouched: report.held_untouched,
        untouched_given: report.untouched,
        in_force: report.plan,
        took: report.took,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        sync::atomic::{AtomicU32, Ordering},
    };

    use candle_core::quantized::GgmlDType;

    use super::*;
    use crate::{
        daemon::{clock::Clock, hub::Inbound},
        engine::{
            ApplyError, Breakdown, Checkpoint, EngineOptions, ForwardError, LanguageModel, LoadError, LoadErrorKind,
            Model, ModelOptions,
            arena::{Backing, Mapping},
            spec::Architecture,
            synthetic::{Synthetic, TypeMix},
            text::TextSide,
            thread::Opened,
        },
        policy::{
            arbiter::Arbiter,
            event::Action,
            params::{EngineParams, Params, Scope},
            pressure::Sample,
            residency::PlanLimits,
            streaming::Calibration,
        },
    };

    async fn reason(inbox: &mut mpsc::Receiver<Inbound>) -> String {
        match inbox.recv().await.unwrap().event {
            Event::EngineFailed { reason, .. } => reason,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn an_engine_that_broke_down_is_replaced_by_the_next_load() {
        let (hub, mut inbox) = Hub::new("boot".to_owned(), Vec::new(), Clock::start());
        let (parts, _losses) = Parts::new();
        let opened = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&opened);
        let start: Starter = Box::new(move |sink| {
            let count = Arc::clone(&count);
            let opener = move |path: &std::path::Path, _plan: &EnginePlan| {
                assert!(count.fetch_add(1, Ordering::Relaxed) > 0, "as planted");
                Err(Engine::inspect(path, 1).err().unwrap_or_else(|| unreachable!())) as Result<_, OpenError>
            };
            Engine::start_with(EngineOptions::default(), Box::new(opener), sink)
        });
        let path = PathBuf::from("/nonexistent/model.gguf");
        let inspector = Inspector::by(
            Arc::new(|| Engine::inspect(std::path::Path::new("/nonexistent"), 1)),
            &hub,
        );
        let mut driver = EngineDriver::new(start, path, inspector, &parts).unwrap();
        let current = driver.current();
        let plan = EnginePlan {
            resident: BTreeSet::new(),
            kv_capacity: Tokens::new(512),
            prefill_chunk: Tokens::new(64),
            kv_type: crate::policy::kv_type::KvType::F16,
        };
        driver.load(1, plan.clone(), None);
        assert!(reason(&mut inbox).await.contains("as planted"));
        // The next one gets its answer, and whoever asks through the doors asks that one.
        driver.load(2, plan.clone(), None);
        assert!(reason(&mut inbox).await.contains("/nonexistent/model.gguf"));
        assert_eq!(current.handle().snapshot().phase, EnginePhase::Empty);
        // A load that failed leaves an engine that can try again.
        driver.load(3, plan, None);
        assert!(reason(&mut inbox).await.contains("/nonexistent/model.gguf"));
        assert_eq!(opened.load(Ordering::Relaxed), 3);
        driver.drain().await;
        driver.stop(Duration::from_secs(10)).await;
    }

    #[tokio::test]
    async fn a_header_on_a_disk_that_hangs_is_told_and_read_again_when_the_disk_has_answered() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 7)
            .write(&path)
            .unwrap();
        let kept = Arc::new(Mapping::new(Bytes::from_mib(2), Backing::OnTouch).unwrap());
        let (mark, asked) = (Arc::downgrade(&kept), Arc::new(AtomicU32::new(0)));
        let (theirs, count) = (path.clone(), Arc::clone(&asked));
        let inspect = move || {
            if count.fetch_add(1, Ordering::Relaxed) > 0 {
                return Engine::inspect(&theirs, 1);
            }
            let kind = LoadErrorKind::Stalled {
                what: "the header".to_owned(),
                waited: Duration::from_millis(4001),
                limit: Duration::from_secs(4),
            };
            let left = Left::of(vec![mark.clone()], std::time::Instant::now());
            Err(LoadError::new(&theirs, kind).leaving(left).into())
        };
        let (hub, mut inbox) = Hub::new("boot".to_owned(), Vec::new(), Clock::start());
        Inspector::by(Arc::new(inspect), &hub).begin();
        match inbox.recv().await.unwrap().event {
            Event::EngineFailed { reason, left } => {
                assert_eq!(left, Some(Bytes::from_mib(2)));
                let told =
                    "the disk has not answered for 4001 ms, at most 4000 ms are waited (hint: see whether the disk";
                assert!(reason.contains(told), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(asked.load(Ordering::Relaxed), 1, "nobody asks while it hangs");
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
        let (hub, inbox) = Hub::new("boot".to_owned(), Vec::new(), Clock::start());
        let (parts, _losses) = Parts::new();
        let theirs = path.clone();
        let inspector = Inspector::by(Arc::new(move || Engine::inspect(&theirs, 1)), &hub);
        let expected = inspector.expected();
        let start: Starter = Box::new(move |sink| {
            let model = ModelOptions {
                threads: 1,
                name: Some("called so".to_owned()),
                context: None,
                kv_backing: Backing::OnTouch,
                vocabulary: None,
            };
            Engine::start_expecting(EngineOptions::default(), model, expected.clone(), sink)
        });
        let mut driver = EngineDriver::new(start, path.clone(), inspector, &parts).unwrap();
        let mut inbox = inbox;
        let limits = PlanLimits::new(&EngineParams::default(), Tokens::ZERO);
        let floor = |shape: &ModelShape| shape.floor_plan(&limits);
        write(512);
        driver.load(1, floor(&before), Some(before.clone()));
        assert!(reason(&mut inbox).await.contains("holds another model"));
        let event = inbox.recv().await.unwrap().event;
        let Event::EngineInspected { shape } = event else {
            panic!("{event:?}");
        };
        assert_ne!(shape, before);
        driver.load(2, floor(&shape), Some(shape.clone()));
        let event = inbox.recv().await.unwrap().event;
        let Event::EngineApplied { in_force, used, .. } = event else {
            panic!("{event:?}");
        };
        assert!(used <= shape.plan_bytes(&in_force), "{used}");
        driver.drain().await;
        driver.stop(Duration::from_secs(10)).await;
    }

    /// A model that finds what it is told when it measures itself; or that has nothing resident any more then.
    struct Measured(Model, Option<Calibration>);

    impl LanguageModel for Measured {
        fn forward(&mut self, _: &[u32], _: &mut dyn Checkpoint, _: &mut Vec<f32>) -> Result<(), ForwardError> {
            Err(ForwardError::NoTokens)
        }

        fn apply(&mut self, plan: &EnginePlan) -> Result<ApplyReport, ApplyError> {
            self.0.apply(plan)
        }

        fn calibrate(&mut self, _: &mut dyn FnMut() -> bool) -> Result<Option<Calibration>, ApplyError> {
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

    fn measured(path: &std::path::Path, plan: &EnginePlan, found: Option<Calibration>) -> Result<Opened, OpenError> {
        let options = ModelOptions {
            threads: 1,
            name: None,
            context: None,
            kv_backing: Backing::OnTouch,
            vocabulary: None,
        };
        let model = Model::open(path, plan, &options)?;
        let text = TextSide::new(model.header(), model.shape().context_max).unwrap();
        Ok(Opened {
            model: Box::new(Measured(model, found)),
            text,
        })
    }

    /// The engine and the arbiter, without the loop between them.
    struct Pair {
        driver: EngineDriver,
        arbiter: Arbiter,
        now: Timestamp,
        inbox: mpsc::Receiver<Inbound>,
    }

    impl Pair {
        /// Tells the arbiter something, and has the engine do what it says.
        fn tell(&mut self, event: Event) {
            for action in self.arbiter.handle(self.now, event) {
                match action {
                    Action::LoadEngine { revision, plan } => self.driver.load(revision, plan, None),
                    Action::ApplyPlan { revision, plan, .. } => self.driver.apply(revision, plan),
                    _ => {}
                }
            }
        }

        /// What the engine says is in force, and that it uses so much.
        async fn applied(&mut self) -> (EnginePlan, Bytes) {
            let event = self.inbox.recv().await.unwrap().event;
            let Event::EngineApplied { in_force, used, .. } = event.clone() else {
                panic!("{event:?}");
            };
            self.tell(event);
            assert_eq!(self.arbiter.snapshot().engine.in_force.as_ref(), Some(&in_force));
            (in_force, used)
        }
    }

    #[tokio::test]
    async fn what_an_engine_could_not_have_back_after_measuring_is_told_and_asked_for_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let model = Synthetic {
            feed_forward: 4096,
            ..Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 7)
        };
        model.write(&path).unwrap();
        let (shape, _) = Model::inspect(&path, 1).unwrap();
        assert!(shape.ring_bytes < shape.layers.iter().map(|layer| layer.resident_bytes).sum());
        let (hub, inbox) = Hub::new("boot".to_owned(), Vec::new(), Clock::start());
        let (parts, _losses) = Parts::new();
        let start: Starter = Box::new(|sink| {
            let opener = |path: &std::path::Path, plan: &EnginePlan| measured(path, plan, None);
            Engine::start_with(EngineOptions::default(), Box::new(opener), sink)
        });
        let theirs = path.clone();
        let inspector = Inspector::by(Arc::new(move || Engine::inspect(&theirs, 1)), &hub);
        let mut params = Params::for_budget(Bytes::from_mib(400), Bytes::ZERO, Scope::Session);
        params.engine = Some(EngineParams::default());
        let mut pair = Pair {
            driver: EngineDriver::new(start, path, inspector, &parts).unwrap(),
            arbiter: Arbiter::new(params).unwrap(),
            now: Timestamp::START,
            inbox,
        };
        // Nobody uses anything.
        pair.tell(Event::Sampled(Sample {
            taken_at: pair.now,
            mem_total: Bytes::from_gib(8),
            mem_available: Bytes::from_gib(4),
            mem_free: Bytes::from_gib(4),
            scope_used: Some(Bytes::ZERO),
            ..Sample::default()
        }));
        pair.tell(Event::EngineInspected { shape });
        let (loaded, with_all) = pair.applied().await;
        assert!(!loaded.resident.is_empty());
        // Measuring is part of the load, and so is what came of it.
        let (receded, used) = pair.applied().await;
        let fewer = EnginePlan {
            resident: BTreeSet::new(),
            ..loaded.clone()
        };
        assert_eq!(receded, fewer);
        assert!(used < with_all);
        let snapshot = pair.arbiter.snapshot();
        assert_eq!(snapshot.used, used, "the arbiter knows what the engine has");
        assert_eq!(snapshot.engine.asked.as_ref(), Some(&loaded), "there is room for it");
        let (grown, _) = pair.applied().await;
        assert_eq!(grown, loaded);
        assert_eq!(pair.arbiter.snapshot().engine.asked, None);
        pair.driver.drain().await;
        pair.driver.stop(Duration::from_secs(10)).await;
    }
    #[tokio::test]
    async fn an_engine_that_streams_and_finds_reading_slow_reads_prompts_in_larger_chunks() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let model = Synthetic {
            feed_forward: 4096,
            ..Synthetic::tiny(Architecture::Qwen3, TypeMix::All(GgmlDType::Q8_0), 7)
        };
        model.write(&path).unwrap();
        let (shape, _) = Model::inspect(&path, 1).unwrap();
        // Reading a MiB takes a second, or less than computing on it.
        for (read_ns_per_mib, chunk) in [(1_000_000_000, 16), (1, 4)] {
            let found = Calibration {
                compute_ns_per_mib: 1000,
                read_ns_per_mib,
                read_busy_ns_per_mib: read_ns_per_mib,
                slowed_ns_per_mib: 0,
                prefill_ns_per_mib: 1000,
            };
            let (hub, inbox) = Hub::new("boot".to_owned(), Vec::new(), Clock::start());
            let (parts, _losses) = Parts::new();
            let start: Starter = Box::new(move |sink| {
                let opener = move |path: &std::path::Path, plan: &EnginePlan| measured(path, plan, Some(found));
                Engine::start_with(EngineOptions::default(), Box::new(opener), sink)
            });
            let theirs = path.clone();
            let inspector = Inspector::by(Arc::new(move || Engine::inspect(&theirs, 1)), &hub);
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
            // What is used by others leaves the engine all but a part of it.
            let shed_below = params.pressure.elevated_below + params.shed.minimum_reclaim;
            let free = full.saturating_sub(less) + shed_below;
            let mut pair = Pair {
                driver: EngineDriver::new(start, path.clone(), inspector, &parts).unwrap(),
                arbiter: Arbiter::new(params).unwrap(),
                now: Timestamp::START,
                inbox,
            };
            let sample = |pair: &mut Pair, used: Bytes| {
                pair.now = pair.now + Duration::from_millis(10);
                pair.tell(Event::Sampled(Sample {
                    taken_at: pair.now,
                    mem_total: Bytes::from_gib(8),
                    mem_available: Bytes::from_gib(4),
                    mem_free: Bytes::from_gib(4),
                    scope_used: Some(Bytes::from_mib(400).saturating_sub(free) + used),
                    ..Sample::default()
                }));
                pair.now = pair.now + Duration::from_millis(1);
            };
            sample(&mut pair, Bytes::ZERO);
            pair.tell(Event::EngineInspected { shape: shape.clone() });
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
                let held: Bytes = pair.arbiter.snapshot().leases.iter().map(|lease| lease.held).sum();
                assert!(then <= held && held <= full, "{then} of {held}");
            }
            let plan = pair.driver.current().handle().snapshot().plan.unwrap();
            assert_eq!(plan.prefill_chunk.get(), chunk, "in the engine itself");
            pair.driver.drain().await;
            pair.driver.stop(Duration::from_secs(10)).await;
        }
    }
}
