//! Adapter of the engine: translates its events for the arbiter.

use std::{
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::sync::mpsc;

use super::{
    control_handle::ControlHandle, control_loop::Clock as _, error::RunError, parts::Parts,
};
use cotenant_config::{KvMemory, LlmConfig, VocabularyConfig};
use cotenant_engine::{
    ApplyReport, Engine, EngineEvent, EngineHandle, EngineOptions, EnginePhase, Expected,
    LoadError, ModelOptions, Sayable, Usage,
    arena::Backing,
    backend,
    disk::Retained,
    helper::THIS_PROGRAM,
    model::Kept,
    protocol::{Inspected, RunningRequest},
    tensor_group::{TensorGroup, TensorKind},
};
use cotenant_http::backend::Weights;
use cotenant_policy::{
    compute::Compute,
    engine_failure::Cure,
    event::{CapacityWanted, EngineApplied, Event, IdleConversation},
    residency::{EnginePlan, ModelShape},
    snapshot::EngineState,
    speed::Timing,
};
use cotenant_probe::{ProbeRoot, cores::usable_cores};
use cotenant_threads::{NotDone, blocking};
use cotenant_units::{Timestamp, Tokens, causes::in_one_line, lock::locked, micros, millis};

/// Bound of the queue of engine events to the loop.
const ENGINE_EVENTS: usize = 256;

/// Function that starts an engine which reports its events to the given sink.
pub(super) type Starter =
    Box<dyn Fn(mpsc::Sender<EngineEvent>) -> io::Result<Engine> + Send + Sync>;

/// Access to the current engine: after a breakdown, the next load replaces it.
#[derive(Clone)]
pub(super) struct CurrentEngine {
    handle: Arc<Mutex<EngineHandle>>,
    weights: Arc<Mutex<Option<Weights>>>,
}

impl CurrentEngine {
    pub(super) fn handle(&self) -> EngineHandle {
        locked(&self.handle).clone()
    }

    /// Returns the weights according to the model's header, once it has been read.
    pub(super) fn weights(&self) -> Option<Weights> {
        locked(&self.weights).clone()
    }

    fn replace(&self, handle: EngineHandle) {
        *locked(&self.handle) = handle;
    }
}

/// Reader of the model's header, outside the loop; the shape is sent as an event.
#[derive(Clone)]
pub(super) struct Inspector {
    inspect: Arc<dyn Fn() -> Result<ModelShape, LoadError> + Send + Sync>,
    control: Arc<ControlHandle>,
    expected: Expected,
    weights: Arc<Mutex<Option<Weights>>>,
    /// The file when last read; `None` if it was missing.
    tried: Arc<Mutex<Option<Identity>>>,
}

impl Inspector {
    pub(super) fn new(llm: &LlmConfig, control: &Arc<ControlHandle>) -> Self {
        let (path, name) = (llm.path.clone(), llm.name.clone());
        let (vocabulary, compute) = (sayable(llm), compute(llm));
        let (keeps, drafts) = (llm.keep_conversations, llm.drafts);
        let weights = Arc::new(Mutex::new(None));
        let known = Arc::clone(&weights);
        let tried = Arc::<Mutex<Option<Identity>>>::default();
        let begun = Arc::clone(&tried);
        let inspect = move || {
            *locked(&begun) = identity(&path);
            let Inspected {
                mut shape,
                unused,
                without_template,
                tensors,
                ..
            } = Engine::inspect_with(&path, vocabulary.as_ref(), compute)?
                .keeping_conversations(keeps)
                .drafting(drafts);
            if let Some(reason) = backend::without_gpu(compute) {
                tracing::info!(%reason, remedy = reason.remedy(), "the LLM computes on the CPU");
            }
            if !unused.is_empty() {
                tracing::info!(unused = unused.join(", "), "unused tensors are not loaded");
            }
            if let Some(written) = without_template {
                tracing::warn!("the model's file has no chat template: {written}");
            }
            shape.name.clone_from(&name);
            *locked(&known) = Some(weights_of(&tensors));
            Ok(shape)
        };
        Self {
            weights,
            tried,
            ..Self::by(Arc::new(inspect), control)
        }
    }

    fn by(
        inspect: Arc<dyn Fn() -> Result<ModelShape, LoadError> + Send + Sync>,
        control: &Arc<ControlHandle>,
    ) -> Self {
        Self {
            inspect,
            control: Arc::clone(control),
            expected: Expected::default(),
            weights: Arc::default(),
            tried: Arc::default(),
        }
    }

    /// Returns the file that a load expects.
    pub(super) fn expected(&self) -> Expected {
        self.expected.clone()
    }

    pub(super) fn begin(&self) {
        tokio::spawn(self.clone().run(None));
    }

    /// Reads again once the disk has answered the abandoned reads of `hung`.
    fn begin_after(&self, hung: Retained) {
        tokio::spawn(self.clone().run(Some(hung)));
    }

    /// Reads, and repeats that after each hang of the disk, never twice at the same time.
    async fn run(self, mut hung: Option<Retained>) {
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
            let inspected = blocking(move || inspect()).await;
            let event = match inspected {
                Ok(Ok(shape)) => Event::EngineInspected { shape },
                Ok(Err(error)) => {
                    hung = error.hung().cloned();
                    failed(
                        in_one_line(&error),
                        error.hint(),
                        error.cure(),
                        hung.as_ref(),
                    )
                }
                Err(NotDone::NoThread(error)) => {
                    tracing::warn!(%error, "the model's header is read later: no thread is free");
                    tokio::time::sleep(HUNG_LOOK).await;
                    continue;
                }
                Err(panicked) => {
                    let reason = format!("reading the model's header panicked: {panicked}");
                    failed(reason, None, Cure::Reload, None)
                }
            };
            self.control.tell(event).await;
            if hung.is_none() {
                return;
            }
        }
    }
}

/// Reads a failed model again whenever its file changes: it was missing, unreadable or damaged.
///
/// A file still being written changes between looks, and is read once it is stable.
async fn retry_when_changed(path: PathBuf, inspector: Inspector) {
    let mut seen = None;
    loop {
        tokio::time::sleep(FILE_LOOK).await;
        let failed = inspector.control.state().engine.state == EngineState::Failed;
        let now = identity(&path);
        // Compared with the file as read, not as of the first look after the failure.
        let changed = now.is_some() && now != *locked(&inspector.tried);
        if failed && changed && now == seen {
            tracing::info!(path = %path.display(), "the model's file has changed: reading it again");
            inspector.begin();
            seen = None;
        } else {
            seen = now;
        }
    }
}

/// Identity of a file: device and inode, length, modification time, and time of the last change of permissions.
type Identity = (u64, u64, u64, [i64; 4]);

fn identity(path: &Path) -> Option<Identity> {
    let file = std::fs::metadata(path).ok()?;
    let times = [
        file.mtime(),
        file.mtime_nsec(),
        file.ctime(),
        file.ctime_nsec(),
    ];
    Some((file.dev(), file.ino(), file.len(), times))
}

/// Polling interval for the file of a failed model. Our choice: loading a model takes longer.
const FILE_LOOK: Duration = Duration::from_secs(1);

/// Polling interval for a disk that hung. Our choice: loading a model takes longer.
const HUNG_LOOK: Duration = Duration::from_secs(1);

/// The engine and its pending requests.
pub(super) struct EngineDriver {
    start: Starter,
    inspector: Inspector,
    engine: Engine,
    current: CurrentEngine,
    path: PathBuf,
    loads: mpsc::UnboundedSender<Asked>,
    control: Arc<ControlHandle>,
    parts: Parts,
}

struct Asked {
    at: Timestamp,
    revision: u64,
}

impl EngineDriver {
    /// Starts an engine for the model at `path`.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub(super) fn new(
        start: Starter,
        path: PathBuf,
        inspector: Inspector,
        parts: &Parts,
    ) -> io::Result<Self> {
        let (engine, loads) = launch(&start, &inspector, parts)?;
        parts.spawn(
            "watching the model's file",
            retry_when_changed(path.clone(), inspector.clone()),
        );
        Ok(Self {
            current: CurrentEngine {
                handle: Arc::new(Mutex::new(engine.handle())),
                weights: Arc::clone(&inspector.weights),
            },
            start,
            engine,
            path,
            loads,
            control: Arc::clone(&inspector.control),
            inspector,
            parts: parts.clone(),
        })
    }

    /// Reads the model's header, see [`Inspector`], at the start and on request of an operator, which retries a failed
    /// GPU.
    pub(super) fn inspect(&self) {
        backend::retry_gpu();
        self.reinspect();
    }

    /// Does the same automatically after a failure; if a GPU failed, the CPU stays selected.
    pub(super) fn reinspect(&self) {
        self.inspector.begin();
    }

    /// Loads the model with `plan`, which was made for `shape`, into a new engine if the last one broke down.
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
                    let control = Arc::clone(&self.control);
                    let reason = format!("cannot start the engine's thread again: {error}");
                    let event = failed(reason, None, Cure::Reread, None);
                    tokio::spawn(async move { control.tell(event).await });
                    return;
                }
            }
        }
        let _ = self.loads.send(Asked {
            at: self.control.clock().now(),
            revision,
        });
        self.engine.handle().load(&self.path, plan);
    }

    pub(super) fn apply(&self, revision: u64, plan: EnginePlan) {
        self.engine.handle().apply(revision, plan);
    }

    /// Refuses new requests; the returned future waits for the current ones. A loading model is not awaited, since no
    /// request can have reached it.
    pub(super) fn drain(&self) -> impl Future<Output = ()> + Send + use<> {
        let handle = self.engine.handle();
        handle.drain();
        let mut state = handle.watch();
        async move {
            let idle = state.wait_for(|state| {
                !matches!(state.phase, EnginePhase::Ready | EnginePhase::Draining)
            });
            let _ = idle.await; // its thread has ended
        }
    }

    /// Stops at the next layer, and waits at most `patience` until the engine holds nothing: reading a model cannot be
    /// interrupted.
    pub(super) async fn stop(self, patience: Duration) {
        self.engine.handle().stop();
        // Polls, because a waiting thread may not be available when the machine is out of resources.
        let end = tokio::time::Instant::now() + patience;
        while !self.engine.has_ended() {
            if tokio::time::Instant::now() > end {
                tracing::warn!("the engine did not stop within {patience:?}; exiting without it");
                return;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        self.engine.join();
    }

    pub(super) fn current(&self) -> CurrentEngine {
        self.current.clone()
    }
}

/// Polling interval for the end of the engine.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Describes weights for clients: their number, and the type of the largest group.
fn weights_of(tensors: &[TensorGroup]) -> Weights {
    let used =
        |group: &&TensorGroup| !matches!(group.kind, TensorKind::MultiToken | TensorKind::Vision);
    let used = || tensors.iter().filter(used);
    let largest = used()
        .max_by_key(|group| group.bytes)
        .and_then(|group| group.types.first());
    let quantization = match largest.and_then(|name| name.strip_suffix('K')) {
        Some(bits) => format!("{bits}_K"),
        None => largest.cloned().unwrap_or_default(),
    };
    Weights {
        parameters: used()
            .map(|group| group.elements)
            .fold(0, u64::saturating_add),
        quantization,
    }
}

/// Starts an engine, and the task that translates its events.
fn launch(
    start: &Starter,
    inspector: &Inspector,
    parts: &Parts,
) -> io::Result<(Engine, mpsc::UnboundedSender<Asked>)> {
    let (sink, events) = mpsc::channel(ENGINE_EVENTS);
    let engine = start(sink)?;
    inspector.control.note_engine(engine.handle());
    let (loads, asked) = mpsc::unbounded_channel();
    parts.spawn(
        "the bridge to the engine",
        forward(events, asked, engine.handle(), inspector.clone()),
    );
    Ok((engine, loads))
}

/// Starts the engine for the configured model.
///
/// # Errors
/// If the system refuses a thread.
pub(super) fn start_engine(
    llm: &LlmConfig,
    state_dir: &Path,
    control: &Arc<ControlHandle>,
    parts: &Parts,
) -> Result<EngineDriver, RunError> {
    let compute = compute(llm);
    let (name, context) = (llm.name.clone(), llm.context);
    let (beside, keeps) = (llm.conversations, llm.keep_conversations);
    let kv_backing = match llm.kv_memory {
        KvMemory::AsNeeded => Backing::OnTouch,
        KvMemory::AtOnce => Backing::Now,
    };
    let vocabulary = sayable(llm);
    let conversations = state_dir.join("conversations");
    if !llm.keep_conversations
        && let Err(error) = std::fs::remove_dir_all(&conversations)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(
            "cannot remove saved conversations `{}`: {error}; remove the folder",
            conversations.display()
        );
    }
    let drafts = llm.drafts;
    let options = EngineOptions {
        answers_max: llm.parallel.map_or(usize::MAX, |most| most as usize),
        drafts,
        conversations: llm.keep_conversations.then_some(conversations),
        ..EngineOptions::default()
    };
    let inspector = Inspector::new(llm, control);
    let expected = inspector.expected();
    let start: Starter = Box::new(move |sink| {
        let model = ModelOptions {
            compute,
            name: Some(name.clone()),
            context: Some(context),
            conversations: beside,
            drafts,
            keeps_conversations: keeps,
            kv_backing,
            vocabulary: vocabulary.clone(),
            helper: Some(PathBuf::from(THIS_PROGRAM)),
        };
        Engine::start_expecting(options.clone(), model, expected.clone(), sink)
    });
    EngineDriver::new(start, llm.path.clone(), inspector, parts)
        .map_err(RunError::system("the engine's thread"))
}

/// Returns the reduced vocabulary in the engine's form.
pub fn sayable(llm: &LlmConfig) -> Option<Sayable> {
    match &llm.vocabulary {
        VocabularyConfig::All => None,
        VocabularyConfig::First(count) => Some(Sayable::First(*count)),
        VocabularyConfig::Text(path) => Some(Sayable::Text(path.clone())),
    }
}

/// Returns the compute device of the LLM.
pub fn compute(llm: &LlmConfig) -> Compute {
    Compute {
        threads: threads(llm),
        device: llm.device,
    }
}

/// Returns the number of compute threads of the LLM: one per physical core unless configured, since two on one core
/// slow each other down.
pub fn threads(llm: &LlmConfig) -> usize {
    llm.threads.map_or_else(
        || usable_cores(&ProbeRoot::default()).min(THREADS_MAX),
        |threads| usize::try_from(threads).unwrap_or(1),
    )
}

const THREADS_MAX: usize = 256;

/// Returns running and waiting requests, and the KV need of the running one. KV of the last answer is kept only while
/// the space is not needed.
pub(super) fn activity(handle: &EngineHandle) -> Event {
    let snapshot = handle.snapshot();
    let running = snapshot.running.len();
    let position = snapshot.position.get();
    let (kv_used, kv_kept) = if running > 0 {
        (position, 0)
    } else {
        (0, position)
    };
    let of_running = |tokens: fn(&RunningRequest) -> Tokens| {
        let all = snapshot.running.iter().map(|one| tokens(one).get());
        all.fold(0, u32::saturating_add)
    };
    Event::EngineActivity {
        requests: u32::try_from(snapshot.queued.saturating_add(running)).unwrap_or(u32::MAX),
        kv_used,
        kv_kept,
        kv_prompt: of_running(|running| running.prompt_tokens),
        kv_most: of_running(|running| running.most),
        kv_droppable: of_running(|running| running.droppable),
        kv_dropped: of_running(|running| running.dropped),
        untouched: snapshot.untouched,
        beside: snapshot
            .kept
            .iter()
            .take(NAMED_MAX)
            .map(idle_conversation)
            .collect(),
    }
}

/// Conversations named in a report, oldest first, which is the order of shedding. Our choice: each measurement is a
/// journal line, which they lengthen by at most 0.5 KiB.
const NAMED_MAX: usize = 8;

fn idle_conversation(kept: &Kept) -> IdleConversation {
    IdleConversation {
        capacity: kept.alone,
        tokens: kept.lost,
        idle_ms: millis(kept.since.elapsed()),
        superseded: kept.is_superseded,
    }
}

fn timing(usage: Usage, prompt_took: Duration, took: Duration) -> Timing {
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
    let control = Arc::clone(&inspector.control);
    // Reported memory retained by hung reads.
    let mut hung: Option<Retained> = None;
    // Timings that include a change of plan are valid for neither plan.
    let mut changed = true;
    // Revision of the plan applied last.
    let mut last = 0;
    while let Some(event) = events.recv().await {
        if let EngineEvent::RequestFinished {
            outcome: Ok(_),
            usage,
            waited,
            prompt_took,
            took,
            ..
        } = &event
        {
            let timing = timing(*usage, prompt_took.unwrap_or_default(), *took);
            let first = prompt_took.map(|prompt_took| *waited + prompt_took);
            control.history().answered(first, timing);
            if prompt_took.is_some() && !changed {
                control.tell(Event::EngineTimed(timing)).await;
            }
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
            EngineEvent::Ready {
                backend,
                plan,
                refused,
                breakdown,
                ..
            } => {
                tracing::info!(backend, "the LLM is loaded");
                if let Some(reason) = refused {
                    tracing::warn!("the LLM is loaded with fewer layers than planned: {reason}");
                }
                let Ok(asked) = asked.try_recv() else {
                    tracing::error!("the engine is ready and no load was requested");
                    continue;
                };
                last = asked.revision;
                let took = control.clock().now().saturating_since(asked.at);
                Event::EngineApplied(EngineApplied {
                    untouched: breakdown.kv_untouched,
                    ..EngineApplied::new(last, Arc::unwrap_or_clone(plan), breakdown.total, took)
                })
            }
            EngineEvent::Calibrated { calibration } => Event::EngineCalibrated(calibration),
            EngineEvent::LoadFailed {
                message,
                hint,
                cure,
                hung: left,
                ..
            } => {
                let _ = asked.try_recv();
                hung = left;
                failed(message, hint, cure, hung.as_ref())
            }
            EngineEvent::Applied {
                revision, report, ..
            } => {
                last = revision;
                applied(revision, report)
            }
            EngineEvent::Rechunked { report } => applied(last, report),
            EngineEvent::Receded {
                plan,
                breakdown,
                message,
            } => {
                tracing::warn!("the engine holds less than requested: {message}");
                let plan = Arc::unwrap_or_clone(plan);
                Event::EngineApplied(EngineApplied {
                    untouched: breakdown.kv_untouched,
                    ..EngineApplied::new(last, plan, breakdown.total, Duration::ZERO)
                })
            }
            EngineEvent::ApplyFailed { revision, error } => Event::EngineApplyFailed {
                revision,
                reason: in_one_line(&error),
            },
            EngineEvent::Failed {
                message,
                cure,
                hung: left,
            } => {
                hung = left;
                failed(message, None, cure, hung.as_ref())
            }
            EngineEvent::RequestStarted { .. } => activity(&handle),
            EngineEvent::RequestFinished { usage, .. } => {
                let mut finished = activity(&handle);
                if let Event::EngineActivity { kv_dropped, .. } = &mut finished {
                    // Includes tokens dropped since the last report.
                    *kv_dropped = usage.dropped_tokens.get();
                }
                finished
            }
            EngineEvent::CapacityWanted {
                needed,
                wanted,
                client,
            } => {
                // First report the capacity in use, so that it is not taken for this request.
                control.tell(activity(&handle)).await;
                let client = client.as_deref().map(str::to_owned);
                Event::CapacityWanted(CapacityWanted {
                    needed,
                    wanted,
                    client,
                    is_running: true,
                })
            }
            EngineEvent::Stopped => break,
        };
        control.tell(event).await;
        if let Some(left) = hung.take() {
            inspector.begin_after(left);
        }
    }
}

/// Returns the event of a failure. If only an external change helps, the remedy accompanies the reason.
fn failed(reason: String, hint: Option<&str>, cure: Cure, hung: Option<&Retained>) -> Event {
    let reason = match (hint, &cure) {
        (Some(hint), Cure::Reload | Cure::Reread) => format!("{reason} (hint: {hint})"),
        (None, _) | (_, Cure::Change { .. }) => reason,
    };
    Event::EngineFailed {
        reason,
        cure,
        left: hung.map(Retained::bytes),
    }
}

fn applied(revision: u64, report: ApplyReport) -> Event {
    Event::EngineApplied(EngineApplied {
        revision,
        freed: report.freed,
        used: report.held,
        untouched: report.held_untouched,
        untouched_given: report.untouched,
        in_force: report.plan,
        took: report.took,
    })
}

#[cfg(test)]
mod tests;
