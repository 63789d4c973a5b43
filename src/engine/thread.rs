//! The engine's own thread: loads the model, takes commands between two layers, answers requests one at a time.
//!
//! ```text
//!            load            request            last token, end, failure
//!   Empty ──────────► Ready ─────────► answering ─────────────────────► Ready
//!     ▲  LoadFailed     │ drain            │ drain
//!     └───────          ▼                  ▼
//!                    Stopped ◄──────── Draining          a panic anywhere: Failed, then the thread ends
//! ```
//!
//! At every command point (between two layers, between two slices of a layer that takes long, between two tokens, and at
//! once when idle) the thread takes plans, ends what was cancelled or is overdue, and notices readers that went away. The longest time between two command points is
//! in the snapshot.

use std::{
    any::Any,
    convert::Infallible,
    io,
    ops::ControlFlow,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tokio::sync::mpsc;

use super::{
    answer::answer_tags,
    disk::{DiskTimeout, Retained},
    engine_loop::{BetweenLayers, Broken, EngineLoop, Outcome},
    error::{ForwardError, LoadError, NOT_FINITE_REMEDY},
    generate::{FinishReason, GenerateError},
    gguf_model::GgufModel,
    language_model::{LanguageModel, Opened, Opener},
    mailbox::{EngineHandle, Queued, Shared, Work},
    model::{Asked, ModelOptions, Selected},
    protocol::{ApplyFailure, EngineEvent, EngineOptions, EnginePhase, Expected, Inspected},
    sampling::{MaskError, SampleError, Sampler, TokenMask},
    sayable::Sayable,
    stops::{Scan, StopStrings},
    text::TextSide,
    tokenizer::TextStream,
};
use cotenant_memory::emergency;
use cotenant_policy::{
    compute::Compute,
    engine_failure::Cure,
    residency::{EnginePlan, ModelShape},
};
use cotenant_units::causes::in_one_line;
use cotenant_units::{Bytes, Tokens};

/// The engine: its thread and the way to it. Dropping it asks the thread to stop, without waiting.
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts a thread that opens GGUF files. Events go to `sink`, whose reader must keep reading until `Stopped`, or
    /// drop it.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(
        options: EngineOptions,
        model: ModelOptions,
        sink: mpsc::Sender<EngineEvent>,
    ) -> io::Result<Self> {
        Self::start_expecting(options, model, Expected::default(), sink)
    }

    /// As [`Self::start`], for plans that are made for the model that is `expected` when it is loaded.
    ///
    /// # Errors
    /// As there.
    pub fn start_expecting(
        options: EngineOptions,
        model: ModelOptions,
        expected: Expected,
        sink: mpsc::Sender<EngineEvent>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared::new(options));
        let progress = shared.progress().clone();
        let opener = move |path: &Path, plan: &EnginePlan| {
            GgufModel::open(path, plan, &model, &expected, &progress)
        };
        Self::start_on(shared, Box::new(opener), sink)
    }

    /// What the model of a GGUF file occupies piece by piece, tokenizer included, so that a first plan can be made; no
    /// weights are read.
    ///
    /// # Errors
    /// When the file's header shows that it could not be opened.
    pub fn inspect(path: &Path, compute: impl Into<Compute>) -> Result<ModelShape, LoadError> {
        GgufModel::inspect(path, None, compute.into()).map(|inspected| inspected.shape)
    }

    /// As [`Self::inspect`], for a model that may say some tokens only, with what else its header tells.
    ///
    /// # Errors
    /// As there, and when the text cannot be read by which the tokens are chosen.
    pub fn inspect_with(
        path: &Path,
        vocabulary: Option<&Sayable>,
        compute: impl Into<Compute>,
    ) -> Result<Inspected, LoadError> {
        GgufModel::inspect(path, vocabulary, compute.into())
    }

    /// As [`Self::inspect_with`], and refuses what a load would refuse, as far as that shows within 100 ms.
    ///
    /// # Errors
    /// As there, and when the file ends in zeros, or its tables of tokens or its chat template are of no use.
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
    /// When it could not be opened.
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
    /// When the system gives no thread.
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

    /// A handle to ask it.
    #[must_use]
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Whether its thread has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the thread has ended; ask it to [`stop`](EngineHandle::stop) or [`drain`](EngineHandle::drain)
    /// before. Blocks: not for asynchronous code, which awaits [`EngineEvent::Stopped`].
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

struct Worker {
    model: Option<Box<dyn LanguageModel>>,
    /// Why the thread ends, so that the model is loaded into a new engine, and what that needs: its file cannot be read or holds
    /// another one, the device has failed, or the weights are damaged.
    ends: Option<(String, Cure)>,
    /// Answers in a row that ended in results that are not finite.
    not_finite: u32,
    /// What a load that failed has left to reads that hang.
    left: Retained,
    text: Option<Arc<TextSide>>,
    opener: Opener,
    /// The sequence that the model has: the tokens of the last answer and its prompt, as far as they were computed.
    sequence: Vec<u32>,
    logits: Vec<f32>,
    /// The token that comes next, where it has been found without `logits`.
    greatest: Option<u32>,
    engine_loop: EngineLoop,
}

/// An answer as it is written.
struct Writing {
    sampler: Sampler,
    stops: StopStrings,
    stream: TextStream,
    /// Control tokens that are read as text, since thoughts and calls are found by them.
    tags: Vec<(u32, &'static str)>,
    mask: Option<Box<dyn TokenMask>>,
    max_tokens: u32,
    /// Whether a token of the model has ended it.
    ended: bool,
}

impl Worker {
    fn new(shared: Arc<Shared>, opener: Opener, sink: mpsc::Sender<EngineEvent>) -> Self {
        Self {
            model: None,
            ends: None,
            not_finite: 0,
            left: Retained::default(),
            text: None,
            opener,
            sequence: Vec::new(),
            logits: Vec::new(),
            greatest: None,
            engine_loop: EngineLoop::new(shared, sink),
        }
    }

    /// The thread from beginning to end.
    fn run(mut self) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.work()));
        // Dropping the model may break down as well, when it is what broke down before.
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
            match self.engine_loop.shared.wait(again) {
                Work::Exit => return,
                Work::Answer(queued) => self.answer(*queued),
                Work::Poll => {
                    // Nothing is active that could be asked to end.
                    let _ = self.engine_loop.point();
                }
            }
            self.note_returned();
            self.engine_loop.rest();
            if self.engine_loop.shared.stopping() {
                return;
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
            // Another load would hang beside the one that does.
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
                self.text = Some(text);
                self.engine_loop.publish();
                self.engine_loop.tell(EngineEvent::Ready {
                    backend,
                    shape,
                    plan,
                    refused,
                    breakdown,
                });
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

    /// What is held and was given up, and is kept by reads that hang.
    fn left(&self) -> Bytes {
        self.model
            .as_ref()
            .map_or_else(|| self.left.bytes(), |model| model.left())
    }

    /// Notes what a load that failed has left, while there is no model.
    fn note_left(&mut self) {
        self.engine_loop.left_noted = self.left.bytes();
        self.engine_loop.state.held =
            (self.engine_loop.left_noted > Bytes::ZERO).then_some(self.engine_loop.left_noted);
    }

    /// Measures what the engine can do, unless a command or a request waits.
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
            Ok(Some(calibration)) => self
                .engine_loop
                .tell(EngineEvent::Calibrated { calibration }),
            Err(error) => self.engine_loop.tell(EngineEvent::Receded {
                plan: Arc::new(model.plan().clone()),
                breakdown: Arc::new(model.breakdown()),
                message: in_one_line(&error),
            }),
        }
    }

    /// Tells what is held when reads that hung have returned what they kept, or some of it.
    fn note_returned(&mut self) {
        let left = self.left();
        if left >= self.engine_loop.left_noted {
            // A plan may have left it, which has been reported.
            self.engine_loop.left_noted = left;
            return;
        }
        match self.model.as_ref() {
            Some(model) => self.engine_loop.note_held(&**model),
            None => self.note_left(),
        }
        self.engine_loop.publish();
    }

    /// Puts a plan into force between two tokens.
    fn apply(&mut self, revision: u64, plan: &EnginePlan) {
        let gives = self
            .model
            .as_ref()
            .is_some_and(|model| gives_up(&**model, plan));
        emergency::within_if(gives, || self.apply_now(revision, plan));
    }

    fn apply_now(&mut self, revision: u64, plan: &EnginePlan) {
        let Some(model) = self.model.as_mut() else {
            self.engine_loop
                .apply_failed(revision, ApplyFailure::NoModel);
            return;
        };
        if self.engine_loop.active.is_none() && plan.kv_capacity.get() < model.position() {
            // The last answer is only kept in case the next prompt continues it.
            let kept = model.keep(plan.kv_capacity.get());
            self.sequence.truncate(kept as usize);
            self.engine_loop.state.position = Tokens::new(kept);
        }
        let engine_loop = &self.engine_loop;
        let result = model.apply_until(plan, &mut || engine_loop.is_pressed());
        self.note_dropped();
        let Some(model) = self.model.as_mut() else {
            return;
        };
        match result {
            Ok(report) => {
                self.engine_loop.state.breakdown = Some(Arc::new(model.breakdown()));
                self.engine_loop.applied(revision, report);
            }
            Err(error) => {
                // A part of it may have been done.
                self.engine_loop.note_held(&**model);
                self.engine_loop
                    .apply_failed(revision, ApplyFailure::of(&error));
                if let Some(cure) = error.cure() {
                    self.ends = Some((in_one_line(&error), cure));
                }
            }
        }
    }

    /// Answers one request.
    fn answer(&mut self, queued: Queued) {
        let capacity = self.capacity();
        self.engine_loop.begin(queued, capacity);
        let mut rest = String::new();
        let outcome = match self.text.clone() {
            Some(text) => self.write(&text, &mut rest),
            // Without a model no request gets past the handle.
            None => Err(GenerateError::Stopping),
        };
        self.note_outcome(&outcome);
        if let Some(model) = self.model.as_mut() {
            let mut dropped = Tokens::ZERO;
            if let Some(active) = self.engine_loop.active.as_mut() {
                active.note_kept(&**model);
                dropped = active.usage.dropped_tokens;
            }
            model.allow_dropping(None);
            // Also of a cancelled answer everything is kept: who interrupts usually goes on with the same conversation. But
            // what was read with tokens before it that are not there any more is not the beginning of any prompt.
            if dropped > Tokens::ZERO {
                model.reset();
                self.sequence.clear();
                self.engine_loop.state.position = Tokens::ZERO;
            }
            // More than its plan says where a read hung, or its form needed tables.
            self.engine_loop.note_held(&**model);
        }
        self.engine_loop.finish(&rest, outcome);
    }

    /// Gives the model up once answers in a row have ended in results that are not finite: a single one may be due to its prompt.
    fn note_outcome(&mut self, outcome: &Outcome) {
        match outcome {
            Err(error @ GenerateError::NotFinite { .. }) => {
                self.not_finite = self.not_finite.saturating_add(1);
                if self.not_finite >= NOT_FINITE_MAX {
                    let remedy = NOT_FINITE_REMEDY.to_owned();
                    self.ends = Some((in_one_line(error), Cure::Change { remedy }));
                }
            }
            Ok(FinishReason::Cancelled) | Err(_) => {}
            Ok(_) => self.not_finite = 0,
        }
    }

    /// Writes the answer of the active request; `rest` becomes the text that was held back to the end.
    fn write(&mut self, text: &TextSide, rest: &mut String) -> Outcome {
        let Some(active) = self.engine_loop.active.as_mut() else {
            return Err(GenerateError::Stopping);
        };
        let mask = active.queued.mask.take();
        let request = &active.queued.request;
        let sinks = request
            .sinks
            .map(|sinks| sinks.tokens(active.usage.prompt_tokens));
        // Where room can be made, the context does not end an answer.
        let most = sinks.map_or(u32::MAX, |_| text.context_max().get());
        if let Some(model) = self.model.as_mut() {
            model.allow_dropping(sinks);
        }
        let mut writing = Writing {
            sampler: Sampler::new(request.sampling).map_err(|error| GenerateError::Model {
                message: error.to_string(),
            })?,
            stops: StopStrings::new(&request.stop),
            stream: TextStream::default(),
            tags: answer_tags(text.tokenizer(), text.template(), &request.prompt),
            mask,
            max_tokens: request.max_tokens.map_or(most, Tokens::get),
            ended: false,
        };
        let ControlFlow::Break(outcome) = self.write_tokens(text, &mut writing);
        *rest = writing.stops.finish();
        if writing.ended {
            // Only an answer that the model has ended stops in the middle of a character by its own doing; behind a stop string
            // there is nothing to report.
            rest.push_str(&writing.stream.finish());
        }
        outcome
    }

    fn write_tokens(
        &mut self,
        text: &TextSide,
        writing: &mut Writing,
    ) -> ControlFlow<Outcome, Infallible> {
        let greedy = writing.mask.is_none() && writing.sampler.is_greedy();
        self.read_prompt(text.context_max(), greedy)?;
        let mut generated = 0;
        loop {
            if generated >= writing.max_tokens {
                return ControlFlow::Break(Ok(FinishReason::Length));
            }
            if let Some(mask) = &mut writing.mask {
                self.wait_for(&mut **mask)?;
                in_form(mask.apply(&mut self.logits))?;
            }
            let found = self.greatest.map(Ok);
            let token =
                match found.unwrap_or_else(|| writing.sampler.next(&self.logits, &self.sequence)) {
                    Ok(token) => token,
                    Err(SampleError::NotFinite {
                        value: f32::NEG_INFINITY,
                        ..
                    }) if writing.mask.is_some() => {
                        // What the form allows is not among what the model may say.
                        return ControlFlow::Break(Err(GenerateError::Form {
                            message: "no token that the model may say goes on with it".to_owned(),
                        }));
                    }
                    Err(SampleError::NotFinite { .. }) => {
                        return ControlFlow::Break(Err(GenerateError::NotFinite {
                            position: position_of(&self.sequence),
                        }));
                    }
                    Err(error) => {
                        return ControlFlow::Break(Err(GenerateError::Model {
                            message: error.to_string(),
                        }));
                    }
                };
            generated += 1;
            let now = Instant::now();
            self.engine_loop.generated(now);
            if text.tokenizer().is_end(token) {
                writing.ended = true;
                return ControlFlow::Break(Ok(FinishReason::Stop));
            }
            let bytes = text.tokenizer().bytes(token);
            if let Some(mask) = &mut writing.mask {
                in_form(mask.accept(token, bytes))?;
            }
            let tag = writing.tags.iter().find(|(tag, _)| *tag == token);
            let piece = writing
                .stream
                .push(tag.map_or(bytes, |(_, text)| text.as_bytes()));
            let (piece, met) = match writing.stops.push(&piece) {
                Scan::Clear(piece) => (piece, None),
                Scan::Met(piece, place) => (piece, Some(FinishReason::StopText(place))),
            };
            self.engine_loop.deliver(token, &piece, now)?;
            let complete = match &mut writing.mask {
                Some(mask) => {
                    self.wait_for(&mut **mask)?;
                    in_form(mask.is_complete())?
                }
                None => false,
            };
            if let Some(reason) = met.or(complete.then_some(FinishReason::Stop)) {
                return ControlFlow::Break(Ok(reason));
            }
            if generated >= writing.max_tokens {
                return ControlFlow::Break(Ok(FinishReason::Length));
            }
            self.between_tokens()?;
            self.find_room(text.context_max())?;
            self.forward(&[token], greedy)?;
        }
    }

    /// Waits until a mask can be asked, and takes commands meanwhile.
    fn wait_for(&mut self, mask: &mut dyn TokenMask) -> ControlFlow<Outcome> {
        while !in_form(mask.is_ready(MASK_SLICE))? {
            self.between_tokens()?;
        }
        ControlFlow::Continue(())
    }

    /// Brings the sequence to the end of the active request's prompt.
    fn read_prompt(&mut self, limit: Tokens, greedy: bool) -> ControlFlow<Outcome> {
        let Some((model, active)) = self.model.as_mut().zip(self.engine_loop.active.as_mut())
        else {
            return ControlFlow::Break(Err(GenerateError::Stopping));
        };
        let prompt = std::mem::take(&mut active.queued.prompt);
        let tokens = Tokens::new(position_of(&prompt));
        let capacity = model.plan().kv_capacity;
        if tokens > capacity {
            return ControlFlow::Break(Err(GenerateError::PromptBeyondKv {
                tokens,
                capacity,
                limit,
            }));
        }
        let client = active.queued.request.client.as_ref();
        let asked = Asked {
            client,
            prompt: &prompt,
        };
        let Selected { kept, fork } = model.select(&self.sequence, asked);
        let cached = kept as usize;
        self.sequence.clear();
        self.sequence.extend(prompt.iter().take(cached));
        if let Some(fork) = fork {
            model.fork_at(fork);
        }
        model.mark_at(mark_at(prompt.len()));
        active.usage.cached_tokens = Tokens::new(position_of(&self.sequence));
        active
            .queued
            .reply
            .started(tokens, active.usage.cached_tokens);
        self.engine_loop
            .reused(Tokens::new(position_of(&self.sequence)));
        let fresh = prompt.get(cached..).unwrap_or_default();
        let began = Instant::now();
        match self.forward(fresh, greedy) {
            ControlFlow::Break(Err(GenerateError::KvFull {
                position, capacity, ..
            })) => ControlFlow::Break(Err(GenerateError::KvFull {
                position,
                tokens,
                capacity,
            })),
            ControlFlow::Break(outcome) => ControlFlow::Break(outcome),
            ControlFlow::Continue(()) => {
                self.engine_loop
                    .prefilled(position_of(fresh), began.elapsed());
                ControlFlow::Continue(())
            }
        }
    }

    /// The command point between two tokens: here plans are put into force.
    fn between_tokens(&mut self) -> ControlFlow<Outcome> {
        if let Some(outcome) = self.engine_loop.point() {
            return ControlFlow::Break(outcome);
        }
        if let Some((revision, plan)) = self.engine_loop.take_plan() {
            self.apply(revision, &plan);
        }
        ControlFlow::Continue(())
    }

    /// Finds a place for another token: asks for more capacity before there is none, drops the oldest where the request
    /// allows that, and waits for capacity otherwise. Ends the answer where none comes.
    fn find_room(&mut self, limit: Tokens) -> ControlFlow<Outcome> {
        let position = Tokens::new(position_of(&self.sequence));
        let capacity = self.capacity();
        if position < limit.min(capacity) {
            if position.get().saturating_add(ROOM_LOW) >= capacity.get() {
                self.engine_loop
                    .ask_for_room(position, capacity, ROOM_PATIENCE);
            }
            return ControlFlow::Continue(());
        }
        if self
            .model
            .as_mut()
            .map_or(Tokens::ZERO, |model| model.make_room())
            > Tokens::ZERO
        {
            self.note_dropped();
            return ControlFlow::Continue(());
        }
        self.wait_for_room(position, limit)
    }

    /// Waits for more capacity than `position`, for at most [`ROOM_PATIENCE`], and takes commands meanwhile.
    fn wait_for_room(&mut self, position: Tokens, limit: Tokens) -> ControlFlow<Outcome> {
        let began = Instant::now();
        loop {
            let capacity = self.capacity();
            if position < limit.min(capacity) {
                return ControlFlow::Continue(());
            }
            let may_come = position < limit
                && self
                    .engine_loop
                    .ask_for_room(position, capacity, ROOM_PAUSE);
            if !may_come || began.elapsed() >= ROOM_PATIENCE {
                return ControlFlow::Break(Ok(self.no_room(capacity)));
            }
            std::thread::sleep(ROOM_LOOK);
            self.between_tokens()?;
        }
    }

    /// The KV capacity in force.
    fn capacity(&self) -> Tokens {
        self.model
            .as_ref()
            .map_or(Tokens::ZERO, |model| model.plan().kv_capacity)
    }

    /// Takes what the model has dropped out of the sequence as well.
    fn note_dropped(&mut self) {
        let Some(model) = self.model.as_ref() else {
            return;
        };
        let (dropped, after) = model.dropped();
        let (position, after) = (model.position() as usize, after.get() as usize);
        if dropped > Tokens::ZERO && self.sequence.len() > position {
            let end = (after + self.sequence.len() - position).min(self.sequence.len());
            self.sequence.drain(after.min(end)..end);
        }
        self.engine_loop.state.position = Tokens::new(model.position());
        if let Some(running) = self.engine_loop.state.running.as_mut() {
            (running.dropped, running.droppable) = (dropped, model.droppable());
        }
    }

    /// Why there is no place for another token: the end of the context, or less capacity than there was.
    fn no_room(&self, capacity: Tokens) -> FinishReason {
        let before = self
            .engine_loop
            .active
            .as_ref()
            .map_or(Tokens::ZERO, |active| active.capacity);
        if capacity < before {
            FinishReason::KvReclaimed
        } else {
            FinishReason::Length
        }
    }

    /// Appends tokens to the sequence; plans are put into force between layers. With `greedy`, the token that comes next may be
    /// found instead of the scores.
    fn forward(&mut self, tokens: &[u32], greedy: bool) -> ControlFlow<Outcome> {
        let Some(model) = self.model.as_mut() else {
            return ControlFlow::Break(Err(GenerateError::Stopping));
        };
        let mut between = BetweenLayers::new(&mut self.engine_loop);
        let result = if greedy {
            model.forward_greedy(tokens, &mut between, &mut self.logits)
        } else {
            model
                .forward(tokens, &mut between, &mut self.logits)
                .map(|()| None)
        };
        let ended = between.ended.take();
        let broken = result.is_err();
        let outcome = match result {
            Ok(greatest) => {
                self.greatest = greatest;
                self.sequence.extend_from_slice(tokens);
                ended.map_or(ControlFlow::Continue(()), ControlFlow::Break)
            }
            Err(ForwardError::KvFull { capacity, .. })
                if tokens.len() == 1 && !self.sequence.is_empty() =>
            {
                ControlFlow::Break(Ok(self.no_room(capacity)))
            }
            Err(ForwardError::KvFull { capacity, needed }) => {
                ControlFlow::Break(Err(GenerateError::KvFull {
                    position: Tokens::new(position_of(&self.sequence)),
                    tokens: Tokens::new(needed),
                    capacity,
                }))
            }
            Err(error) => {
                if let Some(cure) = error.cure() {
                    self.ends = Some((in_one_line(&error), cure));
                }
                // Before anything of it is given up.
                if let Some(active) = self.engine_loop.active.as_mut() {
                    active.note_kept(&**model);
                    active.noted = true;
                }
                if matches!(error, ForwardError::Cancelled { .. }) {
                    // What was computed before it is as good as ever.
                    let kept = model.recover() as usize;
                    let missing = kept.saturating_sub(self.sequence.len());
                    self.sequence.extend(tokens.iter().take(missing));
                    self.sequence.truncate(kept);
                } else {
                    // Whatever it was, the sequence is lost or worth nothing.
                    model.reset();
                    self.sequence.clear();
                }
                ControlFlow::Break(match (ended, error) {
                    (Some(outcome), _) => outcome,
                    (None, ForwardError::NotFinite { position }) => {
                        Err(GenerateError::NotFinite { position })
                    }
                    (None, error) => Err(GenerateError::Model {
                        message: in_one_line(&error),
                    }),
                })
            }
        };
        self.note_dropped();
        if let Some(model) = self.model.as_ref() {
            self.engine_loop.state.untouched = model.untouched();
            // A read that hangs keeps its ring, and another one is beside it now.
            if broken || self.engine_loop.state.breakdown.is_none() {
                self.engine_loop.note_held(&**model);
            }
        }
        outcome
    }
}

/// Whether a plan holds less than the one in force.
fn gives_up(model: &dyn LanguageModel, plan: &EnginePlan) -> bool {
    let shape = model.shape();
    shape.plan_bytes(plan) < shape.plan_bytes(model.plan())
}

/// How often the idle thread looks whether the daemon's sink has room again; a daemon that reads never lets it come to
/// this.
const RETRY: Duration = Duration::from_millis(5);

/// How often the idle thread looks whether a read that hangs has returned. Our choice: what it keeps is on the book, so that
/// no request is delayed meanwhile.
const LEFT_LOOK: Duration = Duration::from_secs(1);

/// Tokens of room at which a running answer asks for more: one block, which takes seconds to write where layers are
/// streamed, and a plan milliseconds.
const ROOM_LOW: u32 = 64;
/// How long a running answer without room waits for it, and after which it asks again ahead of that. Our choice: some
/// sheds and their settle time are over by then, and who listens still does.
const ROOM_PATIENCE: Duration = Duration::from_secs(1);
/// How often it asks again while it waits.
const ROOM_PAUSE: Duration = Duration::from_millis(100);
/// How often it looks whether there is room.
const ROOM_LOOK: Duration = Duration::from_millis(1);

/// Answers in a row with results that are not finite after which the model is given up. Our choice.
const NOT_FINITE_MAX: u32 = 3;

/// How often the wait for a mask takes commands.
const MASK_SLICE: Duration = Duration::from_millis(5);

/// What the mask of an answer's form says, or the end of the answer.
fn in_form<T>(said: Result<T, MaskError>) -> ControlFlow<Outcome, T> {
    match said {
        Ok(value) => ControlFlow::Continue(value),
        Err(MaskError::Form { message }) => {
            ControlFlow::Break(Err(GenerateError::Form { message }))
        }
        Err(MaskError::Helper { message }) => {
            ControlFlow::Break(Err(GenerateError::HelperLost { message }))
        }
    }
}

/// Where in a prompt of so many tokens another one is likely to part from it: a little before the end, where templates
/// write what begins an answer and leave it out of what was answered before.
fn mark_at(prompt: usize) -> u32 {
    u32::try_from(prompt.saturating_sub(ANSWER_BEGINS) / MARK_STEP * MARK_STEP).unwrap_or(0)
}

/// Tokens that the templates of Qwen3 and Qwen3.5 write before an answer and not into the next prompt (`<think>`, a blank
/// line, `</think>`, a blank line), with room for others.
const ANSWER_BEGINS: usize = 8;
/// Marks lie at multiples of this, the length of the pieces in which a recurrent layer can be computed at once, so that a
/// prompt that goes on from a mark is cut like one that is read from the start.
const MARK_STEP: usize = 64;

/// The number of tokens in a sequence.
fn position_of(sequence: &[u32]) -> u32 {
    u32::try_from(sequence.len()).unwrap_or(u32::MAX)
}

/// What a panic said.
fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned());
    format!("panic: {}", text.as_deref().unwrap_or("without a message"))
}
