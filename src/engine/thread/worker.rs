//! State of the engine's thread: plans in force, places for the next tokens of answers, their output and their end.

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
    /// Why the thread ends, so that the model is loaded into a new engine, and what that needs: its file cannot be read or holds
    /// another one, the device has failed, or the weights are damaged.
    pub(super) ends: Option<(String, Cure)>,
    /// Answers in a row that ended in results that are not finite.
    pub(super) not_finite: u32,
    /// Those that are under way, their prompts read.
    pub(super) answers: Vec<Answer>,
    /// Whether another prompt is being read, in slices, between which they go on.
    pub(super) reads: bool,
    /// How long they took to go on by a token each.
    pub(super) round_takes: Duration,
    /// How long passes of an answer that is alone take.
    pub(super) speed: PassSpeed,
    /// What a load that failed has left to reads that hang.
    pub(super) left: Retained,
    pub(super) text: Option<Arc<TextSide>>,
    pub(super) opener: Opener,
    /// The sequence that the model has: the tokens of an answer that is alone, of the last one, or of the prompt that is being
    /// read, as far as they were computed.
    pub(super) sequence: Vec<u32>,
    pub(super) logits: Vec<f32>,
    /// The token that comes next, where it has been found without `logits`.
    pub(super) greatest: Option<u32>,
    pub(super) engine_loop: EngineLoop,
}

/// An answer as it is written.
pub(super) struct Answer {
    pub(super) id: RequestId,
    /// Where its conversation is set aside; `None` for the one that has the model's sequence.
    pub(super) lane: Option<Lane>,
    /// The tokens of a conversation that is set aside, as far as they were computed.
    pub(super) tokens: Vec<u32>,
    /// The last tokens that were said, which are to be computed next.
    pub(super) next: Vec<u32>,
    /// How many of them the next pass computes.
    pub(super) rows: usize,
    pub(super) drafter: Drafter,
    pub(super) generated: u32,
    /// Since when there has been no place for another token.
    pub(super) short: Option<Instant>,
    pub(super) sampler: Sampler,
    pub(super) stops: StopStrings,
    pub(super) stream: TextStream,
    /// Control tokens that are read as text, since thoughts and calls are found by them.
    pub(super) tags: Vec<(u32, &'static str)>,
    pub(super) mask: Option<Box<dyn TokenMask>>,
    pub(super) max_tokens: u32,
    /// What stays where its oldest tokens may be dropped.
    pub(super) sinks: Option<Tokens>,
    /// Whether a token of the model has ended it.
    pub(super) ended: bool,
}

impl Answer {
    /// Whether the token that comes next may be found without scores.
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
                self.engine_loop.state.kept = model.kept_conversations().into();
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

    /// The command point between two tokens: here plans are put into force.
    pub(super) fn take_commands(&mut self) {
        self.engine_loop.point();
        if let Some((revision, plan)) = self.engine_loop.take_plan() {
            self.apply(revision, &plan);
        }
    }

    /// The same, for a request that may be ended by it.
    pub(super) fn between_tokens(&mut self, id: RequestId) -> ControlFlow<Outcome> {
        self.take_commands();
        self.go_on_unless_ended(id)
    }

    pub(super) fn go_on_unless_ended(&self, id: RequestId) -> ControlFlow<Outcome> {
        let ended = self.engine_loop.ended(id).cloned();
        ended.map_or(ControlFlow::Continue(()), ControlFlow::Break)
    }

    /// How many answers may run together now; none without a model.
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

    /// Takes what the model has dropped out of the sequence as well.
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

    /// Publishes what a pass has changed of what is held.
    pub(super) fn note_computed(&mut self, broken: bool) {
        self.note_dropped();
        if let Some(model) = self.model.as_ref() {
            self.engine_loop.state.untouched = model.untouched();
            // A read that hangs keeps its ring, and another one is beside it now.
            if broken || self.engine_loop.state.breakdown.is_none() {
                self.engine_loop.note_held(&**model);
            }
        }
    }

    /// Finds a place for another token of the answer that is alone: asks for more capacity before there is none, drops the oldest
    /// where the request allows that, and waits for capacity otherwise. Ends the answer where none comes.
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

    /// Waits for more capacity than `position`, for at most [`ROOM_PATIENCE`], and takes commands meanwhile.
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

    /// Which of some answers have a place for another token, and which have not.
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

    /// How an answer without a place ends, if it does: its patience is over, and none beside it may end before and leave its own.
    pub(super) fn ends_short(
        &mut self,
        limit: Tokens,
        answer: &mut Answer,
    ) -> Option<FinishReason> {
        let now = Instant::now();
        let (position, capacity) = (Tokens::new(position_of(&answer.tokens)), self.capacity());
        let held = self
            .model
            .as_ref()
            .map_or(Tokens::ZERO, |model| model.held());
        let beside = Tokens::new(held.get().saturating_sub(position.get()));
        let since = *answer.short.get_or_insert(now);
        let is_over = now.saturating_duration_since(since) >= ROOM_PATIENCE;
        self.engine_loop
            .ask_for_room(answer.id, (position, beside), capacity, ROOM_PAUSE);
        let ends = position >= limit || is_over && self.answers.is_empty();
        ends.then(|| self.no_room(answer.id, capacity))
    }

    /// Why there is no place for another token: the end of the context, or less capacity than there was.
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

    /// What may be dropped of the sequence; nothing while several answers are under way.
    pub(super) fn allow_dropping(&mut self, sinks: Option<Tokens>) {
        let sinks = sinks.filter(|_| self.answers.is_empty());
        if let Some(model) = self.model.as_mut() {
            model.allow_dropping(sinks);
        }
    }

    /// Sets the answer that has the model's sequence aside, so that another can have it.
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

    /// Whether an answer was set aside and cannot be gone on with as it is.
    pub(super) fn is_lost(&self, answer: &Answer) -> bool {
        let lane = answer.lane.zip(self.model.as_ref());
        lane.is_some_and(|(lane, model)| model.is_lost(lane))
    }

    /// The answer that is left alone has the model's sequence again.
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

    /// Says the token that follows what was computed last of an answer.
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
                // What the form allows is not among what the model may say.
                return ControlFlow::Break(Err(GenerateError::Form {
                    message: "no token that the model may say goes on with it".to_owned(),
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

    /// Writes a token of an answer, which is to be computed next.
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

    /// Writes the tokens about which the form of an answer leaves no choice; they are computed with the one before them.
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

    /// Waits until a mask can be asked, and takes commands meanwhile.
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
            // Only an answer that the model has ended stops in the middle of a character by its own doing; behind a stop string
            // there is nothing to report.
            rest.push_str(&answer.stream.finish());
        }
        self.note_outcome(&outcome);
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
            // Also of a cancelled answer everything is kept: who interrupts usually goes on with the same conversation. But
            // what was read with tokens before it that are not there any more is not the beginning of any prompt.
            if dropped > Tokens::ZERO {
                model.reset();
                self.sequence.clear();
            }
            self.engine_loop.state.position = model.held();
            // More than its plan says where a read hung, or its form needed tables.
            self.engine_loop.note_held(&**model);
        }
        self.engine_loop.finish(answer.id, &rest, outcome);
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

/// Tokens of room at which a running answer asks for more: one block, which takes seconds to write where layers are
/// streamed, and a plan milliseconds.
const ROOM_LOW: u32 = 64;
/// How long a running answer without room waits for it, and after which it asks again ahead of that. Our choice: some
/// sheds and their settle time are over by then, and who listens still does.
const ROOM_PATIENCE: Duration = Duration::from_secs(1);
/// How often it asks again while it waits.
const ROOM_PAUSE: Duration = Duration::from_millis(100);
/// How often it looks whether there is room.
pub(super) const ROOM_LOOK: Duration = Duration::from_millis(1);

/// The most tokens that are computed at once since a form leaves no choice about them. Our choice: as many as the names and
/// punctuation of some tool calls; a form that forces more of them goes on token by token.
const FORCED_MAX: usize = 64;

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
