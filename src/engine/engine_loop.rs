//! Command points of the engine's thread, and its reports.

use std::{
    collections::VecDeque,
    ops::ControlFlow,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::mpsc::{self, error::TrySendError};

use super::{
    disk::Retained,
    error::{ApplyError, ApplyReport},
    generate::{FinishReason, GenerateError, RequestId, Usage},
    language_model::LanguageModel,
    mailbox::{Ended, Lifecycle, Polled, Queued, Reader, Shared},
    model::Lane,
    preemption::{Checkpoint, Flow},
    protocol::{ApplyFailure, Command, EngineEvent, EnginePhase, EngineSnapshot, RunningRequest},
};
use cotenant_memory::emergency;
use cotenant_policy::{engine_failure::Cure, lease::Class, residency::EnginePlan};
use cotenant_units::{Bytes, Tokens};

/// Result of a request.
pub(super) type Outcome = Result<FinishReason, GenerateError>;

/// State of the engine's thread except the model, available while the model computes.
pub(super) struct EngineLoop {
    pub(super) shared: Arc<Shared>,
    pub(super) state: EngineSnapshot,
    /// Active requests, in the order of their starts.
    pub(super) active: Vec<Active>,
    sink: mpsc::Sender<EngineEvent>,
    /// Events that must reach the daemon but found its sink full: at most two per command of the daemon.
    outbox: VecDeque<EngineEvent>,
    /// A requested model that is not loaded yet.
    load: Option<(PathBuf, EnginePlan)>,
    /// A plan that was taken but is not in force yet.
    plan: Option<(u64, EnginePlan)>,
    last_point: Option<Instant>,
    /// Part of [`EngineSnapshot::held`] that hanging reads kept when it was recorded.
    pub(super) left_noted: Bytes,
}

/// Active request.
pub(super) struct Active {
    pub(super) queued: Queued,
    pub(super) usage: Usage,
    pub(super) started: Instant,
    pub(super) first_token: Option<Instant>,
    /// KV capacity at its start.
    pub(super) capacity: Tokens,
    /// Maximum length of prompt and answer.
    most: Tokens,
    /// Time of its last request for capacity.
    asked_at: Option<Instant>,
    /// Whether its usage describes its KV tokens: recorded early if an incomplete pass releases them before the end.
    pub(super) noted: bool,
    /// Whether each of its tokens took a pass of its own.
    pub(super) own_passes: bool,
    /// Outcome found by a command point; the request ends with it.
    ended: Option<Outcome>,
}

impl Active {
    fn is_overdue(&self, now: Instant) -> bool {
        self.queued
            .request
            .deadline
            .is_some_and(|deadline| deadline <= now)
    }

    /// Whether its time limit has passed: the total one, or the one while a request at least as urgent as its class
    /// waits.
    fn is_cut(&self, now: Instant, most_urgent: Option<Class>) -> bool {
        let request = &self.queued.request;
        let since = |began: Instant, most: Option<Duration>| {
            most.is_some_and(|most| now.saturating_duration_since(began) >= most)
        };
        let waits = most_urgent.is_some_and(|class| class <= request.class);
        since(self.started, request.time_max)
            || waits
                && self
                    .first_token
                    .is_some_and(|began| since(began, request.time_shared))
    }

    /// Records the KV precision and the number of dropped tokens, unless done before.
    pub(super) fn note_kept(&mut self, model: &dyn LanguageModel, lane: Option<Lane>) {
        if !self.noted {
            self.usage.kv_type = model.kv_precision(lane);
            if lane.is_none() {
                (self.usage.dropped_tokens, _) = model.dropped();
            }
        }
    }
}

impl EngineLoop {
    pub(super) fn new(shared: Arc<Shared>, sink: mpsc::Sender<EngineEvent>) -> Self {
        Self {
            shared,
            state: EngineSnapshot::default(),
            active: Vec::new(),
            sink,
            outbox: VecDeque::new(),
            load: None,
            plan: None,
            last_point: None,
            left_noted: Bytes::ZERO,
        }
    }

    // Command points.

    /// Takes a command and records which active requests must end.
    ///
    /// A plan is only stored for [`Self::take_plan`], since this may be called during a computation.
    pub(super) fn point(&mut self) {
        let now = Instant::now();
        if let Some(last) = self.last_point.replace(now) {
            let gap = now.saturating_duration_since(last);
            self.state.command_gap_max = self.state.command_gap_max.max(gap);
        }
        let polled = self.shared.poll(now, self.plan.is_none());
        let Polled {
            command,
            superseded,
            ended,
            cancelled,
            lifecycle,
            queued,
            most_urgent,
        } = polled;
        for (revision, by) in superseded {
            self.tell(EngineEvent::ApplyFailed {
                revision,
                error: ApplyFailure::Superseded { by },
            });
        }
        for ended in ended {
            self.ended_in_queue(ended);
        }
        match command {
            None => {}
            Some(Command::Apply { revision, plan }) => self.plan = Some((revision, plan)),
            Some(Command::Load { path, plan }) => self.load = Some((path, plan)),
        }
        if lifecycle == Lifecycle::Draining && self.state.phase == EnginePhase::Ready {
            self.state.phase = EnginePhase::Draining;
            self.publish();
        }
        if self.state.queued != queued {
            self.state.queued = queued;
            self.publish();
        }
        let unread = self.shared.options().unread_limit;
        for active in self.active.iter_mut().filter(|one| one.ended.is_none()) {
            active.ended = if lifecycle >= Lifecycle::Stopping {
                Some(Err(GenerateError::Stopping))
            } else if active.is_overdue(now) {
                Some(Err(GenerateError::DeadlinePassed {
                    generated: active.usage.completion_tokens,
                }))
            } else if cancelled.contains(&active.queued.request.id) {
                Some(Ok(FinishReason::Cancelled))
            } else if active.is_cut(now, most_urgent) {
                Some(Ok(FinishReason::Length))
            } else {
                reader_left(active.queued.reply.reader(), now, unread)
            };
        }
    }

    /// Outcome of an active request that must end.
    pub(super) fn ended(&self, id: RequestId) -> Option<&Outcome> {
        self.of(id)?.ended.as_ref()
    }

    /// Returns an active request.
    pub(super) fn of(&self, id: RequestId) -> Option<&Active> {
        self.active.iter().find(|one| one.queued.request.id == id)
    }

    /// Returns an active request, mutably.
    pub(super) fn of_mut(&mut self, id: RequestId) -> Option<&mut Active> {
        let mut all = self.active.iter_mut();
        all.find(|one| one.queued.request.id == id)
    }

    /// Published state of an active request.
    pub(super) fn running_mut(&mut self, id: RequestId) -> Option<&mut RunningRequest> {
        self.state.running.iter_mut().find(|one| one.id == id)
    }

    /// Whether the current work should end: for a command, the end of a request, or a stop.
    pub(super) fn is_pressed(&self) -> bool {
        let (now, unread) = (Instant::now(), self.shared.options().unread_limit);
        let ends = |active: &Active| {
            active.is_overdue(now)
                || active.is_cut(now, None)
                || reader_left(active.queued.reply.reader(), now, unread).is_some()
        };
        self.shared.is_pressed(now) || self.active.iter().any(ends)
    }

    /// Passes a token and its decoded text to the reader of a request.
    pub(super) fn deliver(
        &mut self,
        id: RequestId,
        token: u32,
        text: &str,
        now: Instant,
    ) -> ControlFlow<Outcome> {
        let unread = self.shared.options().unread_limit;
        let Some(active) = self.of_mut(id) else {
            return ControlFlow::Continue(());
        };
        let reader = active.queued.reply.push(token, text, now);
        reader_left(reader, now, unread).map_or(ControlFlow::Continue(()), ControlFlow::Break)
    }

    /// Takes the plan to put into force.
    pub(super) const fn take_plan(&mut self) -> Option<(u64, EnginePlan)> {
        self.plan.take()
    }

    /// Takes the model to load.
    pub(super) const fn take_load(&mut self) -> Option<(PathBuf, EnginePlan)> {
        self.load.take()
    }

    /// Excludes the time until the next command point from the gap statistics.
    pub(super) const fn rest(&mut self) {
        self.last_point = None;
    }

    // Reports.

    /// Reports an event that the daemon needs. If its sink is full, the event waits in the outbox, without blocking an
    /// answer.
    pub(super) fn tell(&mut self, event: EngineEvent) {
        self.outbox.push_back(event);
        self.tell_waiting();
    }

    /// Sends events of the outbox while the sink has room; returns whether all were sent.
    pub(super) fn tell_waiting(&mut self) -> bool {
        while let Some(event) = self.outbox.pop_front() {
            match self.sink.try_send(event) {
                // A daemon that has ended needs no report.
                Ok(()) | Err(TrySendError::Closed(_)) => {}
                Err(TrySendError::Full(event)) => {
                    self.outbox.push_front(event);
                    return false;
                }
            }
        }
        true
    }

    /// Reports an event that may be dropped.
    pub(super) fn mention(&mut self, event: EngineEvent) {
        if !self.outbox.is_empty() || self.sink.try_send(event).is_err() {
            self.state.events_dropped = self.state.events_dropped.saturating_add(1);
        }
    }

    /// Publishes the current state.
    pub(super) fn publish(&self) {
        self.shared.publish(self.state.clone());
    }

    /// Reports that a plan is in force.
    pub(super) fn applied(&mut self, revision: u64, report: ApplyReport) {
        self.state.revision = Some(revision);
        self.note_report(&report);
        self.tell(EngineEvent::Applied {
            revision,
            report,
            breakdown: self.state.breakdown.clone(),
        });
    }

    /// Copies a report into the published state.
    fn note_report(&mut self, report: &ApplyReport) {
        if self
            .state
            .plan
            .as_ref()
            .is_none_or(|before| before.resident != report.plan.resident)
        {
            self.state.prefill_per_second = 0.0;
        }
        self.state.plan = Some(Arc::new(report.plan.clone()));
        self.state.held = Some(report.held);
        self.state.untouched = report.held_untouched;
        self.publish();
    }

    /// Reports a plan that could not be put into force.
    pub(super) fn apply_failed(&mut self, revision: u64, error: ApplyFailure) {
        self.publish();
        self.tell(EngineEvent::ApplyFailed { revision, error });
    }

    /// Records the memory and plan of the model, as requested or not.
    pub(super) fn note_held(&mut self, model: &dyn LanguageModel) {
        // Before the breakdown, whose value may be lower if a read returns meanwhile.
        self.left_noted = model.left();
        let breakdown = Arc::new(model.breakdown());
        self.state.plan = Some(Arc::new(model.plan().clone()));
        self.state.held = Some(breakdown.total);
        self.state.untouched = breakdown.kv_untouched;
        self.state.breakdown = Some(breakdown);
        self.state.experts = model.expert_counts();
        self.state.kept = model.kept_conversations().into();
    }

    /// Activates a request.
    pub(super) fn begin(&mut self, queued: Queued, capacity: Tokens) {
        let started = Instant::now();
        let prompt_tokens = Tokens::new(u32::try_from(queued.prompt.len()).unwrap_or(u32::MAX));
        let request = &queued.request;
        let most = request.max_tokens.map_or(u32::MAX, |answer| {
            prompt_tokens.get().saturating_add(answer.get())
        });
        let most = Tokens::new(most);
        self.last_point = Some(started);
        let id = queued.request.id;
        self.mention(EngineEvent::RequestStarted {
            id,
            prompt_tokens,
            waited: started.saturating_duration_since(queued.submitted),
        });
        self.state.running_since.get_or_insert(started);
        self.state.last = None;
        self.state.running.push(RunningRequest {
            id,
            class: queued.request.class,
            client: queued.request.client.clone(),
            prompt_tokens,
            most,
            cached: Tokens::ZERO,
            generated: Tokens::ZERO,
            droppable: Tokens::ZERO,
            dropped: Tokens::ZERO,
        });
        let own_passes = self.active.is_empty();
        for beside in &mut self.active {
            beside.own_passes = false;
        }
        self.active.push(Active {
            own_passes,
            queued,
            usage: Usage {
                prompt_tokens,
                ..Usage::default()
            },
            started,
            first_token: None,
            capacity,
            most,
            asked_at: None,
            noted: false,
            ended: None,
        });
        self.publish();
    }

    /// Counts drafted and accepted tokens.
    pub(super) const fn drafted(&mut self, tokens: usize, accepted: usize) {
        let state = &mut self.state;
        state.tokens_drafted = state.tokens_drafted.saturating_add(tokens as u64);
        state.drafts_accepted = state.drafts_accepted.saturating_add(accepted as u64);
    }

    /// Records the cached tokens of a request's prompt, and the KV tokens of all requests.
    pub(super) fn reused(&mut self, id: RequestId, cached: Tokens, held: Tokens) {
        if let Some(running) = self.running_mut(id) {
            running.cached = cached;
        }
        self.state.position = held;
        self.publish();
    }

    /// Counts computed tokens of a prompt.
    pub(super) fn prefilled(&mut self, tokens: u32, took: Duration) {
        self.state.tokens_prefilled = self
            .state
            .tokens_prefilled
            .saturating_add(u64::from(tokens));
        // Too few tokens measure overhead rather than the rate.
        if tokens >= PREFILL_MEASURED && !took.is_zero() {
            self.state.prefill_per_second = f64::from(tokens) / took.as_secs_f64();
        }
    }

    /// Counts a generated token of a request.
    pub(super) fn generated(&mut self, id: RequestId, now: Instant) {
        self.state.tokens_generated = self.state.tokens_generated.saturating_add(1);
        let mut all = self.active.iter_mut();
        let Some(active) = all.find(|one| one.queued.request.id == id) else {
            return;
        };
        let generated = active.usage.completion_tokens.get().saturating_add(1);
        active.usage.completion_tokens = Tokens::new(generated);
        match active.first_token {
            None => active.first_token = Some(now),
            Some(first) => {
                let seconds = now.saturating_duration_since(first).as_secs_f64();
                if seconds > 0.0 {
                    self.state.tokens_per_second = f64::from(generated.saturating_sub(1)) / seconds;
                }
            }
        }
        let completion = active.usage.completion_tokens;
        if let Some(running) = self.running_mut(id) {
            running.generated = completion;
        }
        self.publish();
    }

    /// Requests more KV capacity than `capacity`, of which a request uses `position` tokens and others `beside`, unless
    /// its last request is less than `pause` ago. Returns whether more capacity is possible.
    pub(super) fn ask_for_room(
        &mut self,
        id: RequestId,
        (position, beside): (Tokens, Tokens),
        capacity: Tokens,
        pause: Duration,
    ) -> bool {
        let Some(active) = self.of_mut(id) else {
            return false;
        };
        let request = &active.queued.request;
        let most = Tokens::new(active.most.get().saturating_add(beside.get()));
        let wanted = most.min(request.grows_to);
        if wanted <= capacity {
            return false;
        }
        let now = Instant::now();
        if active
            .asked_at
            .is_some_and(|asked| now.saturating_duration_since(asked) < pause)
        {
            return true;
        }
        let used = position.get().saturating_add(beside.get());
        let needed = Tokens::new(used.saturating_add(ROOM_ASKED)).min(wanted);
        let client = request.client.clone();
        active.asked_at = Some(now);
        self.mention(EngineEvent::CapacityWanted {
            needed,
            wanted,
            client,
        });
        true
    }

    /// Ends a request; `rest` is the last text of the answer, which was held back.
    pub(super) fn finish(&mut self, id: RequestId, rest: &str, outcome: Outcome) {
        self.last_point = None;
        self.shared.done(id);
        let is = |one: &RunningRequest| one.id == id;
        let ended = self.state.running.extract_if(.., |one| is(one)).next();
        self.state.last = ended.filter(|_| self.state.running.is_empty());
        let at = self
            .active
            .iter()
            .position(|one| one.queued.request.id == id);
        let active = at.map(|at| self.active.remove(at));
        self.state.running_since = self.active.first().map(|first| first.started);
        let Some(active) = active else {
            return;
        };
        let Active {
            queued,
            usage,
            started,
            first_token,
            own_passes,
            ..
        } = active;
        // Moving average: three parts of the previous value, one part of the last answer.
        let (known, took) = (self.state.answer_takes, started.elapsed());
        self.state.answer_takes = if known.is_zero() {
            took
        } else {
            (known * 3 + took) / 4
        };
        let timed = first_token.filter(|_| own_passes);
        self.finished(queued, rest, outcome, usage, (started, timed));
    }

    fn ended_in_queue(&mut self, ended: Ended) {
        let Ended { queued, outcome } = ended;
        self.finished(
            queued,
            "",
            outcome,
            Usage::default(),
            (Instant::now(), None),
        );
    }

    fn finished(
        &mut self,
        queued: Queued,
        rest: &str,
        outcome: Outcome,
        usage: Usage,
        (started, timed): (Instant, Option<Instant>),
    ) {
        let Queued {
            request,
            reply,
            submitted,
            ..
        } = queued;
        self.state.requests_finished = self.state.requests_finished.saturating_add(1);
        self.mention(EngineEvent::RequestFinished {
            id: request.id,
            outcome: outcome.clone(),
            usage,
            waited: started.saturating_duration_since(submitted),
            prompt_took: timed.map(|first| first.saturating_duration_since(started)),
            took: started.elapsed(),
        });
        // Publish the counters before the client can read them.
        self.publish();
        reply.end(rest, outcome, usage);
    }

    /// Refuses further requests and answers all waiting ones; `failure` is the reason if the engine was not stopped on
    /// purpose.
    pub(super) fn close(&mut self, failure: Option<Broken>) {
        let message = failure.as_ref().map(|failure| failure.message.clone());
        let cure = failure
            .as_ref()
            .map_or(Cure::Reload, |failure| failure.cure.clone());
        let error = message.clone().map_or(GenerateError::Stopping, |message| {
            GenerateError::EngineLost { message }
        });
        let apply_error =
            message
                .clone()
                .map_or(ApplyFailure::Stopping, |message| ApplyFailure::Model {
                    message,
                });
        self.state.phase = message.map_or(EnginePhase::Stopped, |message| EnginePhase::Failed {
            message,
        });
        self.state.plan = None;
        self.state.held = None;
        self.state.untouched = Bytes::ZERO;
        self.state.breakdown = None;
        self.state.position = Tokens::ZERO;
        self.state.queued = 0;
        // Publish first: requests refused from now on state the reason.
        self.publish();
        let left = self.shared.close();
        while let Some(active) = self.active.first() {
            self.finish(active.queued.request.id, "", Err(error.clone()));
        }
        for ended in left.ended {
            self.ended_in_queue(ended);
        }
        for queued in left.queue {
            self.ended_in_queue(Ended {
                queued,
                outcome: Err(error.clone()),
            });
        }
        for (revision, by) in left.superseded {
            self.apply_failed(revision, ApplyFailure::Superseded { by });
        }
        if let Some((revision, _)) = self.plan.take() {
            self.apply_failed(revision, apply_error.clone());
        }
        let load = self
            .load
            .take()
            .map(|(path, plan)| Command::Load { path, plan });
        for command in load.into_iter().chain(left.commands) {
            match command {
                Command::Apply { revision, .. } => self.apply_failed(revision, apply_error.clone()),
                Command::Load { path, .. } => self.tell(EngineEvent::LoadFailed {
                    path,
                    message: apply_error.to_string(),
                    hint: None,
                    cure: cure.clone(),
                    hung: None,
                }),
            }
        }
        if let Some(Broken {
            message,
            cure,
            hung,
        }) = failure
        {
            self.tell(EngineEvent::Failed {
                message,
                cure,
                hung,
            });
        }
        self.publish();
        self.outbox.push_back(EngineEvent::Stopped);
        for event in self.outbox.drain(..) {
            let _ = self.sink.blocking_send(event);
        }
    }
}

/// KV capacity requested beyond the position of a running answer, in tokens: two blocks, so that it requests again
/// after one.
const ROOM_ASKED: u32 = 128;

/// Minimum prompt length for a measurement of the prefill rate. Our choice.
const PREFILL_MEASURED: u32 = 16;

/// Reason for an unplanned end of the thread.
pub(super) struct Broken {
    pub(super) message: String,
    pub(super) cure: Cure,
    /// Memory of its model kept by hanging reads.
    pub(super) hung: Option<Retained>,
}

/// Returns the cancellation for a reader that has disconnected or has read nothing for `unread`.
fn reader_left(reader: Reader, now: Instant, unread: Duration) -> Option<Outcome> {
    let left = match reader {
        Reader::Gone => true,
        Reader::Reading => false,
        Reader::Stuck(since) => now.saturating_duration_since(since) >= unread,
    };
    left.then_some(Ok(FinishReason::Cancelled))
}

/// Checkpoint during a pass: takes plans between and within layers, and stops the pass once all of its requests have
/// ended.
pub(super) struct BetweenLayers<'engine> {
    engine_loop: &'engine mut EngineLoop,
    requests: &'engine [RequestId],
    revision: u64,
}

impl<'engine> BetweenLayers<'engine> {
    pub(super) const fn new(
        engine_loop: &'engine mut EngineLoop,
        requests: &'engine [RequestId],
    ) -> Self {
        Self {
            engine_loop,
            requests,
            revision: 0,
        }
    }
}

impl Checkpoint for BetweenLayers<'_> {
    fn poll(&mut self) -> Flow {
        self.engine_loop.point();
        let has_ended = |id: &RequestId| self.engine_loop.ended(*id).is_some();
        if self.requests.iter().all(has_ended) {
            return Flow::Stop;
        }
        match self.engine_loop.take_plan() {
            Some((revision, plan)) => {
                self.revision = revision;
                Flow::Apply(plan)
            }
            None => Flow::Continue,
        }
    }

    fn poll_in_layer(&mut self) -> Flow {
        self.poll()
    }

    fn wanted(&mut self) -> bool {
        self.engine_loop.is_pressed()
    }

    fn applied(&mut self, result: Result<ApplyReport, ApplyError>) {
        let sheds = result
            .as_ref()
            .is_ok_and(|report| report.grown == Bytes::ZERO);
        emergency::within_if(sheds, || match result {
            Ok(report) => {
                // The known breakdown belongs to the previous plan.
                self.engine_loop.state.breakdown = None;
                self.engine_loop.applied(self.revision, report);
            }
            Err(error) => {
                // Part of the plan may be in force.
                self.engine_loop.state.breakdown = None;
                self.engine_loop
                    .apply_failed(self.revision, ApplyFailure::of(&error));
            }
        });
    }

    fn rechunked(&mut self, report: ApplyReport) {
        emergency::within(|| {
            self.engine_loop.state.breakdown = None;
            self.engine_loop.note_report(&report);
            self.engine_loop.tell(EngineEvent::Rechunked { report });
        });
    }
}
