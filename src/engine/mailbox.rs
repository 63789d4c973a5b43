//! Handle and bounded mailbox of the engine: commands, requests, and the channels of answers.
//!
//! No method of the handle waits for the model: commands are taken between two tokens, and their results are events.

use std::{
    collections::VecDeque,
    fmt,
    path::Path,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock},
    time::{Duration, Instant},
};

use tokio::sync::{
    mpsc::{self, OwnedPermit, error::TrySendError},
    watch,
};

use super::{
    constraint::Client,
    generate::{
        FinishReason, GenerateError, GenerateEvent, GenerateRequest, PromptError, RequestId,
        SubmitError, Usage,
    },
    helper::FormPlace,
    protocol::{Command, EngineOptions, EnginePhase, EngineSnapshot, WaitingRequest},
    reader::LoadProgress,
    sampling::TokenMask,
    text::{Prepared, TextSide},
};
use cotenant_conversation::{Prompt, SamplingWish};
use cotenant_policy::{lease::Class, residency::EnginePlan};
use cotenant_units::lock::{locked, waited, waited_for};
use cotenant_units::{Bytes, Tokens};

/// Handle for commands and requests. Cheap to clone; all methods but [`Self::form_place`] return at once.
#[derive(Clone)]
pub struct EngineHandle {
    pub(super) shared: Arc<Shared>,
}

impl fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineHandle").finish_non_exhaustive()
    }
}

impl EngineHandle {
    /// Requests a model; the reply is `Ready` or `LoadFailed`. An engine loads one model in its life.
    pub fn load(&self, path: &Path, plan: EnginePlan) {
        self.shared.command(Command::Load {
            path: path.to_owned(),
            plan,
        });
    }

    /// Requests a plan; the reply is `Applied` or `ApplyFailed` with the same revision.
    ///
    /// Taken between two tokens or two layers, and at once when idle. Supersedes a plan that still waits. Tokens of a
    /// running answer do not depend on it.
    pub fn apply(&self, revision: u64, plan: EnginePlan) {
        self.shared.command(Command::Apply { revision, plan });
    }

    /// Submits a request. Renders and encodes its prompt on the caller's thread, so that neither a long prompt nor a
    /// fault in a template library blocks the engine.
    ///
    /// # Errors
    /// The prompt cannot be used, the queue is full, or the engine is not ready.
    pub fn generate(
        &self,
        request: GenerateRequest,
    ) -> Result<mpsc::Receiver<GenerateEvent>, SubmitError> {
        let prepared = self.prepare(&request, Client::PATIENT)?;
        self.submit(request, prepared)
    }

    /// Renders and encodes the prompt of a request, and compiles the form of its answer.
    ///
    /// # Errors
    /// One of them cannot be used, or the engine is not ready.
    pub fn prepare(
        &self,
        request: &GenerateRequest,
        client: Client<'_>,
    ) -> Result<Prepared, SubmitError> {
        Ok(self.shared.text()?.prepare(request, client)?)
    }

    /// The chat template of the model; `None` while no model is ready.
    pub fn template(&self) -> Option<String> {
        self.shared
            .text()
            .ok()
            .map(|side| side.template().to_owned())
    }

    /// Sampling settings recommended by the model's file; none while no model is ready.
    pub fn recommended_sampling(&self) -> SamplingWish {
        self.shared
            .text()
            .map_or(SamplingWish::NONE, |side| side.sampling())
    }

    /// Counts the tokens of a prompt of any length.
    ///
    /// # Errors
    /// It cannot be encoded, or the engine is not ready.
    pub fn count(&self, prompt: &Prompt) -> Result<Tokens, SubmitError> {
        let (tokens, _style) = self.shared.text()?.encode(prompt)?;
        Ok(Tokens::new(u32::try_from(tokens.len()).unwrap_or(u32::MAX)))
    }

    /// Tokenizes a text: `begin` adds the tokens that begin a sequence, `control` recognises control tokens.
    ///
    /// # Errors
    /// It cannot be encoded, or the engine is not ready.
    pub fn tokenize(
        &self,
        text: &str,
        begin: bool,
        control: bool,
    ) -> Result<Vec<u32>, SubmitError> {
        let side = self.shared.text()?;
        let tokenizer = side.tokenizer();
        let encoded = if control {
            tokenizer.encode_rendered(text, None)
        } else {
            tokenizer.encode(text)
        };
        let mut tokens = encoded.map_err(PromptError::Encode)?;
        if begin {
            tokenizer.begin(&mut tokens);
        }
        Ok(tokens)
    }

    /// Returns the bytes of each token; empty for a control token.
    ///
    /// # Errors
    /// A token is not in the vocabulary, or the engine is not ready.
    pub fn pieces(&self, tokens: &[u32]) -> Result<Vec<Vec<u8>>, SubmitError> {
        let side = self.shared.text()?;
        let vocabulary = side.tokenizer().vocabulary();
        if let Some(&token) = tokens.iter().find(|&&token| token >= vocabulary) {
            Err(PromptError::UnknownToken { token, vocabulary })?;
        }
        Ok(tokens
            .iter()
            .map(|&token| side.tokenizer().bytes(token).to_vec())
            .collect())
    }

    /// Waits for a slot for the grammar of a request's answer, of which only a few exist at once; `None` if the answer
    /// has no form.
    ///
    /// # Errors
    /// The engine is not ready.
    pub async fn form_place(
        &self,
        request: &GenerateRequest,
    ) -> Result<Option<FormPlace>, SubmitError> {
        Ok(self.shared.text()?.form_place(request).await)
    }

    /// Submits a [prepared](Self::prepare) request.
    ///
    /// # Errors
    /// The queue is full, or the engine is not ready.
    pub fn submit(
        &self,
        request: GenerateRequest,
        prepared: Prepared,
    ) -> Result<mpsc::Receiver<GenerateEvent>, SubmitError> {
        let (reply, receiver) = Reply::new(&self.shared.options);
        self.shared.submit(Queued {
            request,
            prompt: prepared.tokens,
            mask: prepared.mask,
            reply,
            submitted: Instant::now(),
        })?;
        Ok(receiver)
    }

    /// Cancels a queued or running request; it ends with `Finished(Cancelled)`. Ignores unknown identifiers.
    pub fn cancel(&self, id: RequestId) {
        let mut mailbox = self.shared.lock();
        let running = mailbox.running.iter_mut();
        if let Some(Running { cancelled, .. }) =
            running.into_iter().find(|running| running.id == id)
        {
            *cancelled = true;
        } else {
            mailbox.end_where(|queued| {
                (queued.request.id == id).then_some(Ok(FinishReason::Cancelled))
            });
        }
        drop(mailbox);
        self.shared.wake.notify_all();
    }

    /// Refuses further requests, and stops once the current ones are answered.
    pub fn drain(&self) {
        self.shared.advance(Lifecycle::Draining);
    }

    /// Stops at the next layer; requests fail with `GenerateError::Stopping`.
    pub fn stop(&self) {
        self.shared.advance(Lifecycle::Stopping);
    }

    /// Bytes read and total of the load in progress; `None` while nothing is loading.
    pub fn loading(&self) -> Option<(Bytes, Bytes)> {
        self.shared.progress.figures()
    }

    /// Waiting requests, in the order of service.
    pub fn waiting(&self) -> Vec<WaitingRequest> {
        let mailbox = self.shared.lock();
        let waiting = mailbox.queue.iter().map(|queued| WaitingRequest {
            id: queued.request.id,
            class: queued.request.class,
            client: queued.request.client.clone(),
            prompt_tokens: Tokens::new(u32::try_from(queued.prompt.len()).unwrap_or(u32::MAX)),
            waited: queued.submitted.elapsed(),
        });
        waiting.collect()
    }

    /// The current state of the engine.
    pub fn snapshot(&self) -> EngineSnapshot {
        self.shared.state.borrow().clone()
    }

    /// The state of the engine, with notification of changes.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<EngineSnapshot> {
        self.shared.state.subscribe()
    }
}

/// A waiting request.
pub(super) struct Queued {
    pub(super) request: GenerateRequest,
    pub(super) prompt: Vec<u32>,
    pub(super) mask: Option<Box<dyn TokenMask>>,
    pub(super) reply: Reply,
    pub(super) submitted: Instant,
}

/// A request that ended in the queue, with its outcome.
pub(super) struct Ended {
    pub(super) queued: Queued,
    pub(super) outcome: Result<FinishReason, GenerateError>,
}

/// State of the mailbox at a command point.
pub(super) struct Polled {
    /// The next command.
    pub(super) command: Option<Command>,
    /// Superseded plans, each with the later one.
    pub(super) superseded: Vec<(u64, u64)>,
    /// Requests that ended in the queue.
    pub(super) ended: Vec<Ended>,
    /// Running requests that were cancelled.
    pub(super) cancelled: Vec<RequestId>,
    /// Phase of the engine's end.
    pub(super) lifecycle: Lifecycle,
    /// Number of waiting requests.
    pub(super) queued: usize,
    /// Class of the most urgent waiting request.
    pub(super) most_urgent: Option<Class>,
}

/// Phase of the engine's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lifecycle {
    /// It accepts requests.
    Open,
    /// It completes current requests.
    Draining,
    /// It drops current requests.
    Stopping,
    /// Its thread has ended.
    Closed,
}

/// State shared by the handles and the thread.
pub(super) struct Shared {
    mailbox: Mutex<Mailbox>,
    wake: Condvar,
    state: watch::Sender<EngineSnapshot>,
    text: OnceLock<Arc<TextSide>>,
    progress: LoadProgress,
    options: EngineOptions,
}

struct Mailbox {
    /// At most one model, followed by at most one plan.
    commands: VecDeque<Command>,
    superseded: Vec<(u64, u64)>,
    queue: VecDeque<Queued>,
    ended: Vec<Ended>,
    running: Vec<Running>,
    lifecycle: Lifecycle,
}

/// A running request.
struct Running {
    id: RequestId,
    client: Option<Arc<str>>,
    cancelled: bool,
}

impl Shared {
    pub(super) fn new(options: EngineOptions) -> Self {
        Self {
            mailbox: Mutex::new(Mailbox {
                // With capacity, so that a request for a shed does not allocate.
                commands: VecDeque::with_capacity(4),
                superseded: Vec::with_capacity(SUPERSEDED),
                queue: VecDeque::new(),
                ended: Vec::new(),
                running: Vec::new(),
                lifecycle: Lifecycle::Open,
            }),
            wake: Condvar::new(),
            state: watch::Sender::new(EngineSnapshot::default()),
            text: OnceLock::new(),
            progress: LoadProgress::default(),
            options,
        }
    }

    /// Progress of the load.
    pub(super) const fn progress(&self) -> &LoadProgress {
        &self.progress
    }

    fn command(&self, command: Command) {
        let mut mailbox = self.lock();
        if let Command::Apply { revision, .. } = command
            && let Some(Command::Apply {
                revision: earlier, ..
            }) = mailbox.commands.back()
        {
            let earlier = *earlier;
            mailbox.commands.pop_back();
            mailbox.superseded.push((earlier, revision));
        }
        mailbox.commands.push_back(command);
        drop(mailbox);
        self.wake.notify_all();
    }

    fn submit(&self, queued: Queued) -> Result<(), SubmitError> {
        let mut mailbox = self.lock();
        match mailbox.lifecycle {
            Lifecycle::Open => {}
            Lifecycle::Draining | Lifecycle::Stopping => return Err(SubmitError::Draining),
            Lifecycle::Closed => {
                drop(mailbox);
                return Err(self.unavailable());
            }
        }
        let id = queued.request.id;
        if mailbox.running.iter().any(|running| running.id == id)
            || mailbox.queue.iter().any(|waiting| waiting.request.id == id)
        {
            return Err(SubmitError::Duplicate { id });
        }
        let limit = self.options.queue_limit.max(1);
        if mailbox.queue.len() >= limit {
            // Requests whose readers have disconnected free their slots.
            mailbox.sweep(Instant::now());
        }
        if mailbox.queue.len() >= limit {
            return Err(SubmitError::QueueFull {
                queued: mailbox.queue.len(),
                limit,
            });
        }
        let place = mailbox.place_for(&queued);
        mailbox.queue.insert(place, queued);
        drop(mailbox);
        self.wake.notify_all();
        Ok(())
    }

    fn text(&self) -> Result<Arc<TextSide>, SubmitError> {
        self.text.get().cloned().ok_or_else(|| self.unavailable())
    }

    pub(super) const fn options(&self) -> &EngineOptions {
        &self.options
    }

    // Methods of the engine's thread.

    /// Waits for a command, a request or the end, for at most `patience`.
    pub(super) fn wait(&self, patience: Option<Duration>) -> Work {
        let mut mailbox = self.lock();
        loop {
            if mailbox.lifecycle >= Lifecycle::Stopping {
                return Work::Exit;
            }
            if !mailbox.commands.is_empty()
                || !mailbox.superseded.is_empty()
                || !mailbox.ended.is_empty()
            {
                return Work::Poll;
            }
            if let Some(queued) = mailbox.queue.pop_front() {
                mailbox.running.push(Running::of(&queued));
                return Work::Answer(Box::new(queued));
            }
            if mailbox.lifecycle == Lifecycle::Draining {
                return Work::Exit;
            }
            let Some(patience) = patience else {
                mailbox = waited(&self.wake, mailbox);
                continue;
            };
            let timed_out;
            (mailbox, timed_out) = waited_for(&self.wake, mailbox, patience);
            if timed_out {
                return Work::Poll;
            }
        }
    }

    /// Takes the pending events without waiting; a command only if `commands`.
    pub(super) fn poll(&self, now: Instant, commands: bool) -> Polled {
        let mut mailbox = self.lock();
        mailbox.sweep(now);
        Polled {
            command: if commands {
                mailbox.commands.pop_front()
            } else {
                None
            },
            superseded: mailbox.take_superseded(),
            ended: std::mem::take(&mut mailbox.ended),
            cancelled: mailbox
                .running
                .iter()
                .filter(|running| running.cancelled)
                .map(|running| running.id)
                .collect(),
            lifecycle: mailbox.lifecycle,
            queued: mailbox.queue.len(),
            most_urgent: mailbox
                .queue
                .iter()
                .map(|queued| queued.request.class)
                .min(),
        }
    }

    /// Takes the next request if it `may_join` the running ones.
    pub(super) fn join(&self, may_join: impl FnOnce(&Queued) -> bool) -> Option<Queued> {
        let mut mailbox = self.lock();
        if !mailbox.queue.front().is_some_and(may_join) {
            return None;
        }
        let queued = mailbox.queue.pop_front()?;
        mailbox.running.push(Running::of(&queued));
        Some(queued)
    }

    /// Removes a running request that has ended.
    pub(super) fn done(&self, id: RequestId) {
        self.lock().running.retain(|running| running.id != id);
    }

    /// Closes the mailbox and returns its contents.
    pub(super) fn close(&self) -> Abandoned {
        let mut mailbox = self.lock();
        mailbox.lifecycle = Lifecycle::Closed;
        Abandoned {
            commands: std::mem::take(&mut mailbox.commands),
            superseded: std::mem::take(&mut mailbox.superseded),
            ended: std::mem::take(&mut mailbox.ended),
            queue: std::mem::take(&mut mailbox.queue),
        }
    }

    /// Whether a command or a request waits, or the engine is ending.
    pub(super) fn is_wanted(&self) -> bool {
        let mailbox = self.lock();
        mailbox.lifecycle >= Lifecycle::Draining
            || !mailbox.commands.is_empty()
            || !mailbox.ended.is_empty()
            || !mailbox.queue.is_empty()
    }

    /// Whether a command waits, a request must end, or the engine is stopping.
    pub(super) fn is_pressed(&self, now: Instant) -> bool {
        let mailbox = self.lock();
        mailbox.lifecycle >= Lifecycle::Stopping
            || !mailbox.commands.is_empty()
            || mailbox.running.iter().any(|running| running.cancelled)
            || mailbox.queue.iter().any(|queued| {
                queued
                    .request
                    .deadline
                    .is_some_and(|deadline| deadline <= now)
            })
    }

    pub(super) fn stopping(&self) -> bool {
        self.lock().lifecycle >= Lifecycle::Stopping
    }

    pub(super) fn open_text(&self, text: Arc<TextSide>) {
        // Set once: an engine loads one model in its life.
        let _ = self.text.set(text);
    }

    pub(super) fn publish(&self, snapshot: EngineSnapshot) {
        self.state.send_replace(snapshot);
    }

    fn advance(&self, to: Lifecycle) {
        let mut mailbox = self.lock();
        mailbox.lifecycle = mailbox.lifecycle.max(to);
        drop(mailbox);
        self.wake.notify_all();
    }

    fn unavailable(&self) -> SubmitError {
        match self.state.borrow().phase {
            EnginePhase::Draining => SubmitError::Draining,
            EnginePhase::Failed { ref message } => SubmitError::Failed {
                message: message.clone(),
            },
            ref phase => SubmitError::NotReady {
                phase: phase.word(),
            },
        }
    }

    fn lock(&self) -> MutexGuard<'_, Mailbox> {
        // No code that can panic runs under the lock; even if poisoned, its plain lists are consistent.
        locked(&self.mailbox)
    }
}

/// Contents of a closed mailbox.
pub(super) struct Abandoned {
    pub(super) commands: VecDeque<Command>,
    pub(super) superseded: Vec<(u64, u64)>,
    pub(super) ended: Vec<Ended>,
    pub(super) queue: VecDeque<Queued>,
}

/// Work of the idle thread.
pub(super) enum Work {
    /// Answer a request.
    Answer(Box<Queued>),
    /// End.
    Exit,
    /// Call [`Shared::poll`].
    Poll,
}

/// Time after which a waiting request is no longer overtaken by more urgent ones. Our choice: longer than most answers.
const OVERTAKEN_MAX: Duration = Duration::from_secs(10);

/// Superseded plans between two polls that are recorded without allocating.
const SUPERSEDED: usize = 16;

impl Running {
    fn of(queued: &Queued) -> Self {
        Self {
            id: queued.request.id,
            client: queued.request.client.clone(),
            cancelled: false,
        }
    }
}

impl Mailbox {
    /// Returns the queue position of a request: after more urgent ones, after those of its class whose clients have no
    /// more requests before them than its own client, and after those that waited for [`OVERTAKEN_MAX`].
    fn place_for(&self, queued: &Queued) -> usize {
        let class = queued.request.class;
        let turn = self.turn(queued.request.client.as_ref(), self.queue.len());
        let stays = |(at, waiting): &(usize, &Queued)| {
            waiting.request.class < class
                || waiting.submitted.elapsed() >= OVERTAKEN_MAX
                || waiting.request.class == class
                    && self.turn(waiting.request.client.as_ref(), *at) <= turn
        };
        let waiting: Vec<_> = self.queue.iter().enumerate().collect();
        waiting.iter().rposition(stays).map_or(0, |last| last + 1)
    }

    /// Counts the requests of a client that run, or wait among the first `before`.
    fn turn(&self, client: Option<&Arc<str>>, before: usize) -> usize {
        let running = self.running.iter().map(|running| running.client.as_ref());
        let waiting = self.queue.iter().take(before);
        let waiting = waiting.map(|waiting| waiting.request.client.as_ref());
        let own = running.chain(waiting).filter(|other| *other == client);
        own.count()
    }

    /// Takes the superseded plans and reserves capacity for as many, so that a request for a shed does not allocate.
    fn take_superseded(&mut self) -> Vec<(u64, u64)> {
        if self.superseded.is_empty() {
            return Vec::new();
        }
        std::mem::replace(&mut self.superseded, Vec::with_capacity(SUPERSEDED))
    }

    /// Ends waiting requests whose deadline has passed or whose reader has disconnected.
    fn sweep(&mut self, now: Instant) {
        self.end_where(|queued| {
            if queued.reply.reader() == Reader::Gone {
                Some(Ok(FinishReason::Cancelled))
            } else if queued
                .request
                .deadline
                .is_some_and(|deadline| deadline <= now)
            {
                Some(Err(GenerateError::DeadlinePassed {
                    generated: Tokens::ZERO,
                }))
            } else {
                None
            }
        });
    }

    fn end_where(
        &mut self,
        outcome: impl Fn(&Queued) -> Option<Result<FinishReason, GenerateError>>,
    ) {
        let mut at = 0;
        while let Some(queued) = self.queue.get(at) {
            match outcome(queued) {
                None => at += 1,
                Some(outcome) => {
                    if let Some(queued) = self.queue.remove(at) {
                        self.ended.push(Ended { queued, outcome });
                    }
                }
            }
        }
    }
}

/// Sender of one answer.
///
/// Two slots of its channel are reserved from the start, for the last delta and the end, so that both arrive however
/// slow the reader is. Other deltas are merged while the channel is full.
pub(super) struct Reply {
    sender: mpsc::Sender<GenerateEvent>,
    reserved: Option<(OwnedPermit<GenerateEvent>, OwnedPermit<GenerateEvent>)>,
    text: String,
    tokens: Vec<u32>,
    full_since: Option<Instant>,
}

/// State of the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    /// It has disconnected.
    Gone,
    /// It reads.
    Reading,
    /// The channel has been full since this time.
    Stuck(Instant),
}

impl Reply {
    /// Creates a channel for `stream_buffer` events and the end.
    pub(super) fn new(options: &EngineOptions) -> (Self, mpsc::Receiver<GenerateEvent>) {
        let (sender, receiver) = mpsc::channel(options.stream_buffer.max(1) + 2);
        let reserved = sender
            .clone()
            .try_reserve_owned()
            .ok()
            .zip(sender.clone().try_reserve_owned().ok());
        let reply = Self {
            sender,
            reserved,
            text: String::new(),
            tokens: Vec::new(),
            full_since: None,
        };
        (reply, receiver)
    }

    /// Sends that the request left the queue.
    pub(super) fn started(&self, prompt_tokens: Tokens, cached_tokens: Tokens) {
        // The channel is new and has room; the next command point detects a disconnected reader.
        let _ = self.sender.try_send(GenerateEvent::Started {
            prompt_tokens,
            cached_tokens,
        });
    }

    /// Adds a token and its decoded text, and sends the pending delta if the channel has room.
    pub(super) fn push(&mut self, token: u32, text: &str, now: Instant) -> Reader {
        self.tokens.push(token);
        self.text.push_str(text);
        if self.text.is_empty() {
            return self.reader();
        }
        let delta = GenerateEvent::Delta {
            text: std::mem::take(&mut self.text),
            tokens: std::mem::take(&mut self.tokens),
        };
        match self.sender.try_send(delta) {
            Ok(()) => self.full_since = None,
            Err(TrySendError::Closed(_)) => return Reader::Gone,
            Err(TrySendError::Full(delta)) => {
                if let GenerateEvent::Delta { text, tokens } = delta {
                    self.text = text;
                    self.tokens = tokens;
                }
                self.full_since.get_or_insert(now);
            }
        }
        self.reader()
    }

    /// State of the reader.
    pub(super) fn reader(&self) -> Reader {
        if self.sender.is_closed() {
            return Reader::Gone;
        }
        self.full_since.map_or(Reader::Reading, Reader::Stuck)
    }

    /// Sends the remaining text and the end.
    pub(super) fn end(
        mut self,
        rest: &str,
        outcome: Result<FinishReason, GenerateError>,
        usage: Usage,
    ) {
        self.text.push_str(rest);
        let Some((last, ending)) = self.reserved.take() else {
            return;
        };
        if !self.text.is_empty() {
            last.send(GenerateEvent::Delta {
                text: std::mem::take(&mut self.text),
                tokens: std::mem::take(&mut self.tokens),
            });
        }
        ending.send(match outcome {
            Ok(reason) => GenerateEvent::Finished { reason, usage },
            Err(error) => GenerateEvent::Failed(error),
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use cotenant_conversation::Prompt;
    use cotenant_policy::{kv_type::KvType, lease::Class, residency::EnginePlan};

    #[test]
    fn room_for_replaced_plans_is_there_after_every_look() {
        let shared = Shared::new(EngineOptions::default());
        let order = |revision| Command::Apply {
            revision,
            plan: EnginePlan {
                resident: BTreeSet::new(),
                kv_capacity: Tokens::new(64),
                prefill_chunk: Tokens::new(8),
                kv_type: KvType::F16,
            },
        };
        for turn in 0..3 {
            let looked = shared.poll(Instant::now(), true);
            assert_eq!(looked.superseded.len(), usize::from(turn > 0));
            assert!(
                shared.lock().superseded.capacity() >= SUPERSEDED,
                "turn {turn}"
            );
            shared.command(order(2 * turn));
            shared.command(order(2 * turn + 1));
            // Including polls that find none superseded.
            if turn == 1 {
                shared.poll(Instant::now(), true);
                shared.poll(Instant::now(), true);
                shared.command(order(10));
                shared.command(order(11));
            }
        }
    }

    #[test]
    fn more_urgent_requests_go_first_and_none_is_overtaken_for_long() {
        let shared = Shared::new(EngineOptions::default());
        let waits = |id: u64, class, for_time| waits(&shared, id, class, None, for_time);
        waits(1, Class::Batch, OVERTAKEN_MAX);
        waits(2, Class::Batch, Duration::ZERO);
        waits(3, Class::Interactive, Duration::ZERO);
        waits(4, Class::AudioRealtime, Duration::ZERO);
        waits(5, Class::Interactive, Duration::ZERO);
        assert_eq!(order(&shared), [1, 4, 3, 5, 2]);
    }

    #[test]
    fn clients_take_turns_however_many_requests_one_of_them_has() {
        let shared = Shared::new(EngineOptions::default());
        let waits = |id: u64, client: Option<&str>| {
            waits(&shared, id, Class::Interactive, client, Duration::ZERO);
        };
        for id in 0..4 {
            waits(id, Some("kitchen"));
        }
        waits(4, Some("hall"));
        waits(5, None);
        waits(6, Some("hall"));
        assert_eq!(order(&shared), [0, 4, 5, 1, 6, 2, 3]);
        // Running requests count as well.
        for _ in 0..2 {
            assert!(matches!(shared.wait(None), Work::Answer(_)));
        }
        waits(7, Some("study"));
        waits(8, Some("hall"));
        assert_eq!(order(&shared), [5, 7, 1, 6, 2, 8, 3]);
        // Requests that have waited long enough keep their positions.
        for waiting in &mut shared.lock().queue {
            waiting.submitted = Instant::now().checked_sub(OVERTAKEN_MAX).unwrap();
        }
        waits(9, Some("attic"));
        assert_eq!(order(&shared), [5, 7, 1, 6, 2, 8, 3, 9]);
    }

    fn waits(shared: &Shared, id: u64, class: Class, client: Option<&str>, for_time: Duration) {
        let request = GenerateRequest {
            class,
            client: client.map(Arc::from),
            ..GenerateRequest::new(RequestId::new(id), Prompt::Text(String::new()))
        };
        let (reply, _events) = Reply::new(shared.options());
        let submitted = Instant::now().checked_sub(for_time).unwrap();
        let (prompt, mask) = (Vec::new(), None);
        shared
            .submit(Queued {
                request,
                prompt,
                mask,
                reply,
                submitted,
            })
            .unwrap();
    }

    fn order(shared: &Shared) -> Vec<u64> {
        let mailbox = shared.lock();
        let ids = mailbox.queue.iter().map(|waiting| waiting.request.id.get());
        ids.collect()
    }
}
