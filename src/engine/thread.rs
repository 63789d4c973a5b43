//! The engine's thread: loads the model, takes commands between layers, answers requests.
//!
//! ```text
//!            load            request            last token, end, failure
//!   Empty ──────────► Ready ─────────► answering ─────────────────────► Ready
//!     ▲  LoadFailed     │ drain            │ drain
//!     └───────          ▼                  ▼
//!                    Stopped ◄──────── Draining          a panic anywhere: Failed, then the thread ends
//! ```
//!
//! At every command point (between two layers, between two slices of a long layer, between two tokens, and at once when
//! idle) the thread takes plans, ends cancelled and overdue requests, and detects disconnected readers. The snapshot
//! contains the longest time between two command points.

mod answers;
#[cfg(test)]
mod tests;
mod worker;

use std::{
    any::Any,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tokio::sync::mpsc;

use self::worker::{FOLDER_MAX, Worker};
use super::{
    disk::{DiskTimeout, Retained},
    drafts::PassSpeed,
    engine_loop::{Broken, EngineLoop},
    error::LoadError,
    gguf_model::GgufModel,
    language_model::{Opened, Opener},
    mailbox::{EngineHandle, Shared, Work},
    model::{ModelOptions, SaveDue, SaveStep},
    protocol::{EngineEvent, EngineOptions, EnginePhase, Expected, Inspected},
    sayable::Sayable,
};
use cotenant_memory::emergency;
use cotenant_policy::{
    compute::Compute,
    engine_failure::Cure,
    residency::{EnginePlan, ModelShape},
    speed::Calibration,
};
use cotenant_units::Bytes;
use cotenant_units::causes::in_one_line;

/// The engine: its thread and a handle to it. Dropping it requests a stop without waiting.
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts a thread that opens GGUF files. Events go to `sink`, whose reader must read until `Stopped`, or drop it.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(
        options: EngineOptions,
        model: ModelOptions,
        sink: mpsc::Sender<EngineEvent>,
    ) -> io::Result<Self> {
        Self::start_expecting(options, model, Expected::default(), sink)
    }

    /// As [`Self::start`]; plans at load are made for the `expected` model.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_expecting(
        options: EngineOptions,
        model: ModelOptions,
        expected: Expected,
        sink: mpsc::Sender<EngineEvent>,
    ) -> io::Result<Self> {
        let model = ModelOptions {
            drafts: options.drafts,
            keeps_conversations: options.conversations.is_some(),
            ..model
        };
        let shared = Arc::new(Shared::new(options));
        let progress = shared.progress().clone();
        let opener = move |path: &Path, plan: &EnginePlan| {
            GgufModel::open(path, plan, &model, &expected, &progress)
        };
        Self::start_on(shared, Box::new(opener), sink)
    }

    /// Returns the size of each piece of a GGUF file's model, tokenizer included, as the basis of a first plan; reads
    /// no weights.
    ///
    /// # Errors
    /// When the header shows that the file cannot be opened.
    pub fn inspect(path: &Path, compute: impl Into<Compute>) -> Result<ModelShape, LoadError> {
        GgufModel::inspect(path, None, compute.into()).map(|inspected| inspected.shape)
    }

    /// As [`Self::inspect`], for a model with a reduced vocabulary, with further facts from its header.
    ///
    /// # Errors
    /// As [`Self::inspect`], and when the text that selects the tokens cannot be read.
    pub fn inspect_with(
        path: &Path,
        vocabulary: Option<&Sayable>,
        compute: impl Into<Compute>,
    ) -> Result<Inspected, LoadError> {
        GgufModel::inspect(path, vocabulary, compute.into())
    }

    /// As [`Self::inspect_with`], and refuses a model that a load would refuse, as far as this is known within 100 ms.
    ///
    /// # Errors
    /// As [`Self::inspect_with`], and when the file ends in zeros, or its token tables or its chat template are
    /// unusable.
    pub fn foresee(
        path: &Path,
        vocabulary: Option<&Sayable>,
        compute: impl Into<Compute>,
    ) -> Result<Inspected, LoadError> {
        GgufModel::foresee(path, vocabulary, compute.into())
    }

    /// As [`Self::foresee`], and builds the tokenizer.
    ///
    /// # Errors
    /// When the model cannot be opened.
    pub fn check(
        path: &Path,
        vocabulary: Option<&Sayable>,
        compute: impl Into<Compute>,
        helper: Option<PathBuf>,
    ) -> Result<Inspected, LoadError> {
        GgufModel::check(path, vocabulary, compute.into(), helper)
    }

    /// Starts a thread that opens models by `opener`.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start_with(
        options: EngineOptions,
        opener: Opener,
        sink: mpsc::Sender<EngineEvent>,
    ) -> io::Result<Self> {
        Self::start_on(Arc::new(Shared::new(options)), opener, sink)
    }

    fn start_on(
        shared: Arc<Shared>,
        opener: Opener,
        sink: mpsc::Sender<EngineEvent>,
    ) -> io::Result<Self> {
        let loop_shared = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || {
                emergency::lock_stack();
                Worker::new(loop_shared, opener, sink).run();
            })?;
        Ok(Self {
            handle: EngineHandle { shared },
            thread: Some(thread),
        })
    }

    /// Returns a handle for requests and commands.
    #[must_use]
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Whether its thread has ended.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the thread has ended; call [`stop`](EngineHandle::stop) or [`drain`](EngineHandle::drain) first.
    /// Blocks: asynchronous code awaits [`EngineEvent::Stopped`] instead.
    pub fn join(mut self) {
        if let Some(thread) = self.thread.take() {
            // Panics are caught inside and reported as events.
            let _ = thread.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.handle.stop();
        }
    }
}

impl Worker {
    fn new(shared: Arc<Shared>, opener: Opener, sink: mpsc::Sender<EngineEvent>) -> Self {
        Self {
            model: None,
            ends: None,
            not_finite: 0,
            answers: Vec::new(),
            reads: false,
            round_takes: Duration::ZERO,
            sliced: None,
            speed: PassSpeed::default(),
            left: Retained::default(),
            text: None,
            opener,
            sequence: Vec::new(),
            logits: Vec::new(),
            greatest: None,
            rested: Instant::now(),
            save_at: None,
            prefill_token: Duration::ZERO,
            engine_loop: EngineLoop::new(shared, sink),
        }
    }

    /// Runs the thread from start to end.
    fn run(mut self) {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            self.work();
            self.save_conversations();
        }));
        // If the model has panicked, dropping it may panic too.
        let model = self.model.take();
        let mut kept = model
            .as_ref()
            .map_or_else(Retained::default, |model| model.kept());
        kept.add(self.left.clone());
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(model)));
        let panic = outcome.err().or_else(|| dropped.err());
        let broken = panic
            .map(|payload| (panic_message(&*payload), Cure::Reload))
            .or(self.ends);
        let hung = kept.hangs().then_some(kept);
        self.engine_loop.close(broken.map(|(message, cure)| Broken {
            message,
            cure,
            hung,
        }));
    }

    fn work(&mut self) {
        loop {
            let retry = (!self.engine_loop.tell_waiting()).then_some(RETRY);
            self.note_returned();
            let again =
                retry.or_else(|| (self.engine_loop.left_noted > Bytes::ZERO).then_some(LEFT_LOOK));
            if self.answers.is_empty() {
                let save = self.save_at;
                let save = save.map(|at| at.saturating_duration_since(Instant::now()));
                match self
                    .engine_loop
                    .shared
                    .wait(again.into_iter().chain(save).min())
                {
                    Work::Exit => return,
                    Work::Answer(queued) => self.start(*queued),
                    // No request is active.
                    Work::Poll => {
                        self.engine_loop.point();
                        self.save_due();
                    }
                }
            } else {
                match self.joining() {
                    // The others proceed while its prompt is read.
                    Some(queued) => self.start(queued),
                    None => self.go_on(),
                }
            }
            self.note_returned();
            if self.answers.is_empty() {
                self.engine_loop.rest();
                if self.engine_loop.shared.stopping() {
                    return;
                }
            }
            if let Some((path, plan)) = self.engine_loop.take_load() {
                self.load(path, &plan);
            }
            if let Some((revision, plan)) = self.engine_loop.take_plan() {
                self.apply(revision, &plan);
            }
            if self.ends.is_some() {
                return;
            }
        }
    }

    fn load(&mut self, path: PathBuf, plan: &EnginePlan) {
        if self.model.is_some() {
            self.engine_loop.tell(EngineEvent::LoadFailed {
                path,
                message: "a model is loaded already".to_owned(),
                hint: Some("start another engine for another model"),
                cure: Cure::Reload,
                hung: None,
            });
            return;
        }
        if self.left.hangs() {
            // Another load would hang too.
            let what = "what an earlier load has asked for".into();
            let stalled = DiskTimeout::default().stalled(self.left.hung(), &what);
            let error = LoadError::new(&path, stalled.into()).leaving(self.left.clone());
            self.load_failed(path, &error);
            return;
        }
        self.engine_loop.state.phase = EnginePhase::Loading { path: path.clone() };
        self.engine_loop.publish();
        match (self.opener)(&path, plan) {
            Ok(Opened { model, text }) => {
                let shape = Arc::new(model.shape().clone());
                let breakdown = Arc::new(model.breakdown());
                let backend = model.backend_name();
                let (plan, refused) = (
                    Arc::new(model.plan().clone()),
                    model.refused().map(str::to_owned),
                );
                let text = Arc::new(text);
                self.engine_loop.shared.open_text(Arc::clone(&text));
                self.engine_loop.state.phase = EnginePhase::Ready;
                self.engine_loop.state.shape = Some(Arc::clone(&shape));
                self.engine_loop.state.plan = Some(Arc::clone(&plan));
                self.engine_loop.state.held = Some(breakdown.total);
                self.engine_loop.state.untouched = breakdown.kv_untouched;
                self.engine_loop.state.breakdown = Some(Arc::clone(&breakdown));
                self.model = Some(model);
                self.engine_loop.state.answers_max = self.answers_max();
                self.text = Some(text);
                self.engine_loop.publish();
                self.engine_loop.tell(EngineEvent::Ready {
                    backend,
                    shape,
                    plan,
                    refused,
                    breakdown,
                });
                self.open_saved();
                self.calibrate();
            }
            Err(error) => self.load_failed(path, &error),
        }
    }

    fn load_failed(&mut self, path: PathBuf, error: &LoadError) {
        self.left = error.hung().cloned().unwrap_or_default();
        self.note_left();
        self.engine_loop.state.phase = EnginePhase::Empty;
        self.engine_loop.publish();
        self.engine_loop.tell(EngineEvent::LoadFailed {
            path,
            message: in_one_line(error),
            hint: error.hint(),
            cure: error.cure(),
            hung: error.hung().cloned(),
        });
    }

    /// Released memory that hanging reads keep.
    fn left(&self) -> Bytes {
        self.model
            .as_ref()
            .map_or_else(|| self.left.bytes(), |model| model.left())
    }

    /// Records the memory kept by a failed load while there is no model.
    fn note_left(&mut self) {
        self.engine_loop.left_noted = self.left.bytes();
        self.engine_loop.state.held =
            (self.engine_loop.left_noted > Bytes::ZERO).then_some(self.engine_loop.left_noted);
    }

    /// Measures the engine's speed, unless a command or a request waits.
    fn calibrate(&mut self) {
        let Some(model) = self.model.as_mut() else {
            return;
        };
        let shared = Arc::clone(&self.engine_loop.shared);
        let measured = model.calibrate(&mut || !shared.is_wanted());
        self.engine_loop.note_held(&**model);
        self.engine_loop.publish();
        match measured {
            Ok(None) => {}
            Ok(Some(calibration)) => {
                let token = calibration.prefill_token_ns(model.shape().token_bytes());
                self.prefill_token = Duration::from_nanos(token);
                self.engine_loop
                    .tell(EngineEvent::Calibrated { calibration });
            }
            Err(error) => self.engine_loop.tell(EngineEvent::Receded {
                plan: Arc::new(model.plan().clone()),
                breakdown: Arc::new(model.breakdown()),
                message: in_one_line(&error),
            }),
        }
    }

    /// Opens the folder of saved conversations, and reads the most recent ones.
    fn open_saved(&mut self) {
        let path = self.engine_loop.shared.options().conversations.clone();
        let (Some(path), Some(model)) = (path, self.model.as_mut()) else {
            return;
        };
        let weights = model.shape().token_bytes();
        let token = Calibration::FIELD.prefill_token_ns(weights);
        self.prefill_token = Duration::from_nanos(token);
        if let Err(error) = model.open_saved(&path) {
            tracing::warn!(
                "cannot open saved conversations in `{}`: {error}",
                path.display()
            );
            return;
        }
        self.save_at = Some(Instant::now());
        self.read_ahead();
    }

    /// Reads conversations of an earlier run into free capacity, until a command or a request waits.
    fn read_ahead(&mut self) {
        let began = Instant::now();
        let before = self.engine_loop.state.saved.counts.reloaded;
        let shared = Arc::clone(&self.engine_loop.shared);
        let Some(model) = self.model.as_mut() else {
            return;
        };
        while !shared.is_wanted() {
            match model.begin_read_ahead(&self.sequence) {
                Some(false) => break,
                None if began.elapsed() >= FOLDER_MAX => break,
                None => std::thread::sleep(DISK_STEP),
                Some(true) => {
                    while model.reload(DISK_STEP) {
                        if shared.is_wanted() {
                            model.end_reload();
                        }
                    }
                }
            }
        }
        let view = model.saved_view(&self.sequence);
        if view.counts.reloaded > before {
            tracing::info!(
                "read {} saved conversations ahead",
                view.counts.reloaded - before
            );
        }
        self.engine_loop.note_held(&**model);
        self.note_saved();
        self.engine_loop.publish();
    }

    /// Saves a conversation that has been idle for long, while no command or request waits.
    fn save_due(&mut self) {
        let now = Instant::now();
        if self.save_at.is_none_or(|at| at > now) || self.engine_loop.shared.is_wanted() {
            return;
        }
        self.read_ahead();
        let after = self.engine_loop.shared.options().save_after;
        let shared = Arc::clone(&self.engine_loop.shared);
        let wait = match self.save_next(after, &mut || !shared.is_wanted()) {
            SaveStep::Saved => Some(Duration::ZERO),
            SaveStep::Busy => Some(SAVE_PAUSE),
            SaveStep::Waits(left) => left,
            SaveStep::Failed => Some(SAVE_RETRY),
        };
        self.save_at = wait.map(|wait| now + wait);
    }

    /// Saves the next of the conversations that have been idle for `after`.
    fn save_next(&mut self, after: Duration, go_on: &mut dyn FnMut() -> bool) -> SaveStep {
        let due = SaveDue {
            idle: self.rested.elapsed(),
            after,
            token: self.token_time(),
        };
        let model = self.model.as_mut().filter(|_| self.ends.is_none());
        let Some(model) = model else {
            return SaveStep::Waits(None);
        };
        let step = model.save_conversation(&self.sequence, due, go_on);
        if step == SaveStep::Saved {
            self.engine_loop.note_held(&**model);
            self.note_saved();
            self.engine_loop.publish();
        }
        step
    }

    /// Saves all conversations for the next run.
    fn save_conversations(&mut self) {
        if self.engine_loop.shared.options().conversations.is_none() {
            return;
        }
        let began = Instant::now();
        let mut go_on = || began.elapsed() < SAVING_MAX;
        let mut saved = 0;
        while go_on() {
            match self.save_next(Duration::ZERO, &mut go_on) {
                SaveStep::Saved => saved += 1,
                SaveStep::Busy => std::thread::sleep(DISK_STEP),
                SaveStep::Waits(_) | SaveStep::Failed => break,
            }
        }
        tracing::info!(
            "saved {saved} conversations in {} ms",
            began.elapsed().as_millis()
        );
    }

    /// Reports the memory held after hanging reads have returned memory.
    fn note_returned(&mut self) {
        let left = self.left();
        if left >= self.engine_loop.left_noted {
            // The memory may come from a plan, which has been reported.
            self.engine_loop.left_noted = left;
            return;
        }
        match self.model.as_ref() {
            Some(model) => self.engine_loop.note_held(&**model),
            None => self.note_left(),
        }
        self.engine_loop.publish();
    }
}

/// Interval of retries while the daemon's sink is full; a daemon that reads never causes one.
const RETRY: Duration = Duration::from_millis(5);

/// Interval of checks of hanging reads. Our choice: the ledger counts the memory that they keep, so no request waits
/// for a check.
const LEFT_LOOK: Duration = Duration::from_secs(1);

/// Interval of checks while the disk is at work.
const DISK_STEP: Duration = Duration::from_millis(1);

/// Pause before a conversation is saved whose saving was interrupted.
const SAVE_PAUSE: Duration = Duration::from_millis(10);

/// Pause after a failed transfer. Our choice: a full disk is reported once per minute.
const SAVE_RETRY: Duration = Duration::from_secs(60);

/// Time limit for saving at the end: below the 5 s that the daemon waits for the engine.
const SAVING_MAX: Duration = Duration::from_secs(4);

/// Returns the message of a panic.
fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned());
    format!("panic: {}", text.as_deref().unwrap_or("without a message"))
}
