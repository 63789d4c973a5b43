//! State of the engine's thread: plans, capacity for answers, their output and their end.

use std::{
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    disk::Retained,
    drafts::{Drafter, PassSpeed},
    engine_loop::{EngineLoop, Outcome},
    error::NOT_FINITE_REMEDY,
    generate::{FinishReason, GenerateError, RequestId},
    language_model::{LanguageModel, Opener},
    model::Lane,
    protocol::ApplyFailure,
    sampling::{MaskError, SampleError, Sampler, TokenMask},
    stops::{Scan, StopStrings},
    text::TextSide,
    tokenizer::TextStream,
};
use cotenant_memory::emergency;
use cotenant_policy::{engine_failure::Cure, residency::EnginePlan};
use cotenant_units::{Tokens, causes::in_one_line};

pub(super) struct Worker {
    pub(super) model: Option<Box<dyn LanguageModel>>,
    /// Why the thread ends and the model must be loaded into a new engine, with the remedy: its file cannot be read or
    /// was replaced, the device has failed, or the weights are damaged.
    pub(super) ends: Option<(String, Cure)>,
    /// Consecutive answers that ended in non-finite results.
    pub(super) not_finite: u32,
    /// Answers in progress, with their prompts read.
    pub(super) answers: Vec<Answer>,
    /// Whether another prompt is being read in slices, between which the answers proceed.
    pub(super) reads: bool,
    /// Time of the last round, in which each answer advanced by a token.
    pub(super) round_takes: Duration,
    /// Tokens of the last slice of a prompt that had more to come, and the time that it added to a round.
    pub(super) sliced: Option<(usize, Duration)>,
    /// Pass times of a single answer.
    pub(super) speed: PassSpeed,
    /// Memory that a failed load has left to hanging reads.
    pub(super) left: Retained,
    pub(super) text: Option<Arc<TextSide>>,
    pub(super) opener: Opener,
    /// Computed tokens of the model's sequence: those of a single answer, of the last one, or of the prompt being read.
    pub(super) sequence: Vec<u32>,
    pub(super) logits: Vec<f32>,
    /// The next token, if it was found without `logits`.
    pub(super) greatest: Option<u32>,
    /// When the last answer ended.
    pub(super) rested: Instant,
    /// When the next conversation may be due to be saved.
    pub(super) save_at: Option<Instant>,
    /// Time to compute a token of a prompt, as measured after the load.
    pub(super) prefill_token: Duration,
    pub(super) engine_loop: EngineLoop,
}

/// An answer in progress.
pub(super) struct Answer {
    pub(super) id: RequestId,
    /// Lane of its conversation; `None` if it owns the model's sequence.
    pub(super) lane: Option<Lane>,
    /// Computed tokens of a lane.
    pub(super) tokens: Vec<u32>,
    /// The last emitted tokens, which are computed next.
    pub(super) next: Vec<u32>,
    /// Number of `next` tokens in the next pass.
    pub(super) rows: usize,
    pub(super) drafter: Drafter,
    pub(super) generated: u32,
    /// Time since which there has been no place for another token.
    pub(super) short: Option<Instant>,
    pub(super) sampler: Sampler,
    pub(super) stops: StopStrings,
    pub(super) stream: TextStream,
    /// Control tokens that are decoded as text, since they delimit thoughts and calls.
    pub(super) tags: Vec<(u32, &'static str)>,
    pub(super) mask: Option<Box<dyn TokenMask>>,
    pub(super) max_tokens: u32,
    /// Tokens kept when the oldest are dropped; `None` if dropping is not allowed.
    pub(super) sinks: Option<Tokens>,
    /// Whether an end token of the model has ended it.
    pub(super) ended: bool,
}

impl Answer {
    /// Whether the next token can be found without scores.
    pub(super) fn is_greedy(&self) -> bool {
        self.mask.is_none() && self.sampler.is_greedy()
    }
}

impl Worker {
    /// Puts a plan into force between two tokens.
    pub(super) fn apply(&mut self, revision: u64, plan: &EnginePlan) {
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
        if self.engine_loop.active.is_empty() && plan.kv_capacity.get() < model.position() {
            // The last answer is kept only for a prompt that continues it.
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
                self.engine_loop.state.kept = model.kept_conversations().into();
                self.engine_loop.applied(revision, report);
            }
            Err(error) => {
                // Part of the plan may be in force.
                self.engine_loop.note_held(&**model);
                self.engine_loop
                    .apply_failed(revision, ApplyFailure::of(&error));
                if let Some(cure) = error.cure() {
                    self.ends = Some((in_one_line(&error), cure));
                }
            }
        }
    }

    /// Command point between two tokens, where plans are put into force.
    pub(super) fn take_commands(&mut self) {
        self.engine_loop.point();
        if let Some((revision, plan)) = self.engine_loop.take_plan() {
            self.apply(revision, &plan);
        }
    }

    /// Command point for a request, which it may end.
    pub(super) fn between_tokens(&mut self, id: RequestId) -> ControlFlow<Outcome> {
        self.take_commands();
        self.go_on_unless_ended(id)
    }

    pub(super) fn go_on_unless_ended(&self, id: RequestId) -> ControlFlow<Outcome> {
        let ended = self.engine_loop.ended(id).cloned();
        ended.map_or(ControlFlow::Continue(()), ControlFlow::Break)
    }

    /// Maximum number of concurrent answers; 0 without a model.
    pub(super) fn answers_max(&self) -> usize {
        let most = self.engine_loop.shared.options().answers_max;
        let model = self.model.as_ref();
        model.map_or(0, |model| model.answers_max().min(most))
    }

    /// The KV capacity in force.
    pub(super) fn capacity(&self) -> Tokens {
        self.model
            .as_ref()
            .map_or(Tokens::ZERO, |model| model.plan().kv_capacity)
    }

    /// Time to compute a token of a prompt under the plan in force.
    pub(super) fn token_time(&self) -> Duration {
        let rate = self.engine_loop.state.prefill_per_second;
        if rate > 0.0 {
            Duration::try_from_secs_f64(rate.recip()).unwrap_or(self.prefill_token)
        } else {
            self.prefill_token
        }
    }

    /// Publishes which conversations are saved.
    pub(super) fn note_saved(&mut self) {
        if let Some(model) = &self.model {
            self.engine_loop.state.saved = Arc::new(model.saved_view(&self.sequence));
        }
    }

    /// Removes the tokens dropped by the model from the sequence.
    pub(super) fn note_dropped(&mut self) {
        let Some(model) = self.model.as_ref() else {
            return;
        };
        let (dropped, after) = model.dropped();
        let (position, after) = (model.position() as usize, after.get() as usize);
        if dropped > Tokens::ZERO && self.sequence.len() > position {
            let end = (after + self.sequence.len() - position).min(self.sequence.len());
            self.sequence.drain(after.min(end)..end);
        }
        self.engine_loop.state.position = model.held();
        if let [running] = &mut *self.engine_loop.state.running {
            (running.dropped, running.droppable) = (dropped, model.droppable());
        }
    }

    /// Publishes changes of held memory after a pass.
    pub(super) fn note_computed(&mut self, broken: bool) {
        self.note_dropped();
        if let Some(model) = self.model.as_ref() {
            self.engine_loop.state.untouched = model.untouched();
            // A hanging read keeps its ring, and a second ring exists now.
            if broken || self.engine_loop.state.breakdown.is_none() {
                self.engine_loop.note_held(&**model);
            }
        }
    }

    /// Finds a place for another token of a single answer: requests more capacity before it runs out, drops the oldest
    /// tokens if the request allows it, and else waits for capacity. Ends the answer if none is granted.
    pub(super) fn find_room(&mut self, id: RequestId, limit: Tokens) -> ControlFlow<Outcome> {
        let position = Tokens::new(position_of(&self.sequence));
        let capacity = self.capacity();
        if position < limit.min(capacity) {
            if position.get().saturating_add(ROOM_LOW) >= capacity.get() {
                self.engine_loop.ask_for_room(
                    id,
                    (position, Tokens::ZERO),
                    capacity,
                    ROOM_PATIENCE,
                );
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
        self.wait_for_room(id, position, limit)
    }

    /// Waits for a capacity above `position`, for at most [`ROOM_PATIENCE`], and takes commands meanwhile.
    fn wait_for_room(
        &mut self,
        id: RequestId,
        position: Tokens,
        limit: Tokens,
    ) -> ControlFlow<Outcome> {
        let began = Instant::now();
        loop {
            let capacity = self.capacity();
            if position < limit.min(capacity) {
                return ControlFlow::Continue(());
            }
            let may_come = position < limit
                && self.engine_loop.ask_for_room(
                    id,
                    (position, Tokens::ZERO),
                    capacity,
                    ROOM_PAUSE,
                );
            if !may_come || began.elapsed() >= ROOM_PATIENCE {
                return ControlFlow::Break(Ok(self.no_room(id, capacity)));
            }
            std::thread::sleep(ROOM_LOOK);
            self.between_tokens(id)?;
        }
    }

    /// Splits answers into those with a place for another token and those without.
    pub(super) fn with_places(
        &mut self,
        limit: Tokens,
        some: Vec<Answer>,
    ) -> (Vec<Answer>, Vec<Answer>) {
        let limit = limit.get();
        let (mut ready, mut short) = (Vec::new(), Vec::new());
        for answer in some {
            let may_go_on = position_of(&answer.tokens) < limit && !self.is_lost(&answer);
            let lane = answer.lane.filter(|_| may_go_on);
            let has_place = lane.zip(self.model.as_mut());
            if has_place.is_some_and(|(lane, model)| model.make_places(lane, 1)) {
                ready.push(answer);
            } else {
                short.push(answer);
            }
        }
        (ready, short)
    }

    /// Returns how an answer without a place ends, if it does: its patience is over, and no other answer may end first
    /// and leave its places. While others go on, it is patient.
    pub(super) fn ends_short(
        &mut self,
        limit: Tokens,
        answer: &mut Answer,
        others_go_on: bool,
    ) -> Option<FinishReason> {
        let now = Instant::now();
        let (position, capacity) = (Tokens::new(position_of(&answer.tokens)), self.capacity());
        let held = self
            .model
            .as_ref()
            .map_or(Tokens::ZERO, |model| model.held());
        let beside = Tokens::new(held.get().saturating_sub(position.get()));
        if others_go_on {
            answer.short = None;
        }
        let since = *answer.short.get_or_insert(now);
        let is_over = now.saturating_duration_since(since) >= ROOM_PATIENCE;
        self.engine_loop
            .ask_for_room(answer.id, (position, beside), capacity, ROOM_PAUSE);
        let ends = position >= limit || is_over && self.answers.is_empty();
        ends.then(|| self.no_room(answer.id, capacity))
    }

    /// Returns why there is no place for another token: the end of the context, or reclaimed capacity.
    pub(super) fn no_room(&self, id: RequestId, capacity: Tokens) -> FinishReason {
        let before = self
            .engine_loop
            .of(id)
            .map_or(Tokens::ZERO, |active| active.capacity);
        if capacity < before {
            FinishReason::KvReclaimed
        } else {
            FinishReason::Length
        }
    }

    /// Sets the tokens kept when the sequence drops its oldest; forbids dropping while several answers are in progress.
    pub(super) fn allow_dropping(&mut self, sinks: Option<Tokens>) {
        let sinks = sinks.filter(|_| self.answers.is_empty());
        if let Some(model) = self.model.as_mut() {
            model.allow_dropping(sinks);
        }
    }

    /// Makes the answer that owns the model's sequence a lane.
    pub(super) fn set_aside(&mut self) {
        let own = self.answers.iter_mut().find(|answer| answer.lane.is_none());
        let Some((answer, model)) = own.zip(self.model.as_mut()) else {
            return;
        };
        answer.lane = model.set_aside(&self.sequence);
        if answer.lane.is_some() {
            model.allow_dropping(None);
            answer.tokens = std::mem::take(&mut self.sequence);
        }
    }

    /// Whether an answer's lane has lost its state.
    pub(super) fn is_lost(&self, answer: &Answer) -> bool {
        let lane = answer.lane.zip(self.model.as_ref());
        lane.is_some_and(|(lane, model)| model.is_lost(lane))
    }

    /// Returns the sequence to the only answer left.
    pub(super) fn take_up(&mut self) {
        let Some(model) = self.model.as_mut().filter(|_| !self.reads) else {
            return;
        };
        if let [answer] = &mut *self.answers
            && let Some(lane) = answer.lane
            && model.resume(&self.sequence, lane).is_some()
        {
            self.sequence = std::mem::take(&mut answer.tokens);
            answer.lane = None;
            model.allow_dropping(answer.sinks);
        }
    }

    /// Emits the token that follows the last computed one of an answer.
    pub(super) fn say(&mut self, text: &TextSide, answer: &mut Answer) -> ControlFlow<Outcome> {
        if answer.generated >= answer.max_tokens {
            return ControlFlow::Break(Ok(FinishReason::Length));
        }
        if let Some(mask) = &mut answer.mask {
            self.wait_for(answer.id, &mut **mask)?;
            in_form(mask.apply(&mut self.logits))?;
        }
        let before = if answer.lane.is_some() {
            &answer.tokens
        } else {
            &self.sequence
        };
        let found = self.greatest.take().map(Ok);
        let token = match found.unwrap_or_else(|| answer.sampler.next(&self.logits, before)) {
            Ok(token) => token,
            Err(SampleError::NotFinite {
                value: f32::NEG_INFINITY,
                ..
            }) if answer.mask.is_some() => {
                // No sayable token is allowed by the form.
                return ControlFlow::Break(Err(GenerateError::Form {
                    message: "no allowed token continues it".to_owned(),
                }));
            }
            Err(SampleError::NotFinite { .. }) => {
                return ControlFlow::Break(Err(GenerateError::NotFinite {
                    position: position_of(before),
                }));
            }
            Err(error) => {
                return ControlFlow::Break(Err(GenerateError::Model {
                    message: error.to_string(),
                }));
            }
        };
        if text.tokenizer().is_end(token) {
            self.count(answer);
            answer.ended = true;
            return ControlFlow::Break(Ok(FinishReason::Stop));
        }
        if let Some(mask) = &mut answer.mask {
            in_form(mask.accept(token, text.tokenizer().bytes(token)))?;
        }
        self.write(text, answer, token)?;
        self.write_forced(text, answer)
    }

    /// Counts a token of an answer.
    fn count(&mut self, answer: &mut Answer) -> Instant {
        let now = Instant::now();
        answer.generated += 1;
        self.engine_loop.generated(answer.id, now);
        now
    }

    /// Appends a token to an answer's output and to its tokens to compute.
    fn write(&mut self, text: &TextSide, answer: &mut Answer, token: u32) -> ControlFlow<Outcome> {
        let now = self.count(answer);
        answer.next.push(token);
        let bytes = text.tokenizer().bytes(token);
        let tag = answer.tags.iter().find(|(tag, _)| *tag == token);
        let piece = answer
            .stream
            .push(tag.map_or(bytes, |(_, text)| text.as_bytes()));
        let (piece, met) = match answer.stops.push(&piece) {
            Scan::Clear(piece) => (piece, None),
            Scan::Met(piece, place) => (piece, Some(FinishReason::StopText(place))),
        };
        self.engine_loop.deliver(answer.id, token, &piece, now)?;
        met.map_or(ControlFlow::Continue(()), |met| ControlFlow::Break(Ok(met)))
    }

    /// Appends the tokens forced by an answer's form; they are computed with the one before them.
    fn write_forced(&mut self, text: &TextSide, answer: &mut Answer) -> ControlFlow<Outcome> {
        loop {
            if let Some(mask) = &mut answer.mask {
                self.wait_for(answer.id, &mut **mask)?;
                if in_form(mask.is_complete())? {
                    return ControlFlow::Break(Ok(FinishReason::Stop));
                }
            }
            if answer.generated >= answer.max_tokens {
                return ControlFlow::Break(Ok(FinishReason::Length));
            }
            let Some(mask) = &mut answer.mask else {
                return ControlFlow::Continue(());
            };
            let left = (answer.max_tokens - answer.generated) as usize;
            let most = left.min(FORCED_MAX.saturating_sub(answer.next.len()));
            let model = self.model.as_deref();
            let forced = in_form(mask.force(&mut |bytes| {
                let tokens = text.tokenizer().encode_ahead(bytes);
                let can_say = |token: &u32| model.is_none_or(|model| model.can_say(*token));
                tokens.into_iter().take(most).take_while(can_say).collect()
            }))?;
            if forced.is_empty() {
                return ControlFlow::Continue(());
            }
            if let Some(active) = self.engine_loop.of_mut(answer.id) {
                active.own_passes = false;
            }
            for token in forced {
                self.write(text, answer, token)?;
            }
        }
    }

    /// Waits until a mask is ready, and takes commands meanwhile.
    fn wait_for(&mut self, id: RequestId, mask: &mut dyn TokenMask) -> ControlFlow<Outcome> {
        while !in_form(mask.is_ready(MASK_SLICE))? {
            self.between_tokens(id)?;
        }
        ControlFlow::Continue(())
    }

    /// Ends an answer.
    pub(super) fn end(&mut self, mut answer: Answer, outcome: Outcome) {
        let mut rest = answer.stops.finish();
        if answer.ended {
            // Only an answer ended by the model can stop within a character; after a stop string there is nothing to
            // report.
            rest.push_str(&answer.stream.finish());
        }
        self.note_outcome(&outcome);
        self.rested = Instant::now();
        self.save_at = Some(self.rested + SAVE_AFTER_ANSWER);
        if let Some(model) = self.model.as_mut() {
            let mut dropped = Tokens::ZERO;
            if let Some(active) = self.engine_loop.of_mut(answer.id) {
                active.note_kept(&**model, answer.lane);
                dropped = active.usage.dropped_tokens;
            }
            match answer.lane {
                Some(lane) => model.leave(lane),
                None => model.allow_dropping(None),
            }
            // A cancelled answer is kept completely, since the next prompt usually continues it. After dropped tokens,
            // the rest is a prefix of no prompt.
            if dropped > Tokens::ZERO {
                model.reset();
                self.sequence.clear();
            }
            self.engine_loop.state.position = model.held();
            // More than the plan's if a read hung or the form needed tables.
            self.engine_loop.note_held(&**model);
        }
        self.note_saved();
        self.engine_loop.finish(answer.id, &rest, outcome);
    }

    /// Ends the engine after several consecutive answers with non-finite results; a single one may be due to its
    /// prompt.
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
}

/// Whether a plan holds less than the one in force.
fn gives_up(model: &dyn LanguageModel, plan: &EnginePlan) -> bool {
    let shape = model.shape();
    shape.plan_bytes(plan) < shape.plan_bytes(model.plan())
}

/// The number of tokens in a sequence.
pub(super) fn position_of(sequence: &[u32]) -> u32 {
    u32::try_from(sequence.len()).unwrap_or(u32::MAX)
}

/// Remaining tokens at which a running answer requests more capacity: one block, which takes seconds to write with
/// streamed layers, while a plan takes milliseconds.
const ROOM_LOW: u32 = 64;
/// Time for which a running answer without capacity waits, and after which it repeats an early request. Our choice:
/// long enough for some sheds and their settle time, short enough for a listener.
const ROOM_PATIENCE: Duration = Duration::from_secs(1);
/// Interval of its requests while it waits.
const ROOM_PAUSE: Duration = Duration::from_millis(100);
/// Interval of its checks for capacity.
pub(super) const ROOM_LOOK: Duration = Duration::from_millis(1);

/// Maximum number of forced tokens computed at once. Our choice: enough for the names and punctuation of some tool
/// calls; further forced tokens are computed one by one.
const FORCED_MAX: usize = 64;

/// Maximum time to wait for the folder of saved conversations after a start. Our choice.
pub(super) const FOLDER_MAX: Duration = Duration::from_secs(1);

/// Pause after an answer before conversations that have been idle for long are saved. Our choice: a client that asks
/// again at once does not interrupt it.
const SAVE_AFTER_ANSWER: Duration = Duration::from_millis(500);

/// Consecutive answers with non-finite results after which the model is unloaded. Our choice.
const NOT_FINITE_MAX: u32 = 3;

/// Interval of command points while waiting for a mask.
const MASK_SLICE: Duration = Duration::from_millis(5);

/// Converts a mask error to the outcome of the answer.
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
