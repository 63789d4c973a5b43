//! Answers under way: a prompt is read, and tokens follow one another until one ends it.
//!
//! One that is alone has the model's sequence. When another request may join it, it is set aside, and all go on together, a token
//! each in one pass; the last one that is left has the sequence again.
//!
//! ```text
//!   kitchen  prompt t t t t t t t t t t t t t t end
//!   hall                 p p p prompt t t t t t t t t t
//!            alone       in slices    together  alone
//! ```
//!
//! A prompt that joins is read in slices that take about as long as a token of those before it, which go on in between.

use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

use super::worker::{Answer, ROOM_LOOK, Worker, position_of};
use crate::{
    answer::answer_tags,
    engine_loop::{BetweenLayers, Outcome},
    error::{ForwardError, NOT_FINITE_REMEDY},
    generate::{FinishReason, GenerateError, GenerateRequest, RequestId},
    mailbox::Queued,
    model::{Asked, Lane, Selected},
    sampling::{MaskError, SampleError, Sampler, TokenMask},
    stops::{Scan, StopStrings},
    text::TextSide,
    tokenizer::TextStream,
};
use cotenant_policy::engine_failure::Cure;
use cotenant_units::Tokens;
use cotenant_units::causes::in_one_line;

impl Worker {
    /// A request that may join those that are under way, where their contexts and its own have place.
    pub(super) fn joining(&mut self) -> Option<Queued> {
        if self.engine_loop.state.queued == 0 || self.answers.len() >= self.answers_max() {
            return None;
        }
        self.set_aside();
        // One that has lost the oldest of its context, or cannot be gone on from as it is, stays alone.
        if self.answers.iter().any(|answer| answer.lane.is_none()) {
            return None;
        }
        let model = self.model.as_ref()?;
        let capacity = model.plan().kv_capacity.get();
        let to_come = self.engine_loop.active.iter().map(|active| {
            let request = &active.queued.request;
            let said = active.usage.completion_tokens.get();
            likely(request).saturating_sub(said).max(ANSWER_MIN)
        });
        let taken = model.held().get().saturating_add(to_come.sum());
        self.engine_loop.shared.join(|queued| {
            let own = position_of(&queued.prompt).saturating_add(likely(&queued.request));
            taken.saturating_add(own) <= capacity
        })
    }

    /// Begins with a request: reads its prompt and says its first token.
    pub(super) fn start(&mut self, queued: Queued) {
        let id = queued.request.id;
        let capacity = self.capacity();
        self.set_aside();
        self.engine_loop.begin(queued, capacity);
        // Without a model no request gets past the handle.
        let begun = self.text.clone().and_then(|text| self.answer_of(id, &text));
        let Some((text, begun)) = self.text.clone().zip(begun) else {
            self.engine_loop
                .finish(id, "", Err(GenerateError::Stopping));
            return;
        };
        let mut answer = match begun {
            Ok(answer) => answer,
            Err(error) => {
                self.engine_loop.finish(id, "", Err(error));
                return;
            }
        };
        self.allow_dropping(answer.sinks);
        let read = self.read_prompt(&text, &answer);
        let said = match read {
            ControlFlow::Continue(()) => self.say(&text, &mut answer),
            ControlFlow::Break(outcome) => ControlFlow::Break(outcome),
        };
        match said {
            ControlFlow::Break(outcome) => self.end(answer, outcome),
            ControlFlow::Continue(()) if self.answers.is_empty() => self.answers.push(answer),
            ControlFlow::Continue(()) => {
                self.answers.push(answer);
                self.set_aside();
            }
        }
    }

    /// An answer to a request of which nothing has been computed.
    fn answer_of(
        &mut self,
        id: RequestId,
        text: &TextSide,
    ) -> Option<Result<Answer, GenerateError>> {
        let active = self.engine_loop.of_mut(id)?;
        let mask = active.queued.mask.take();
        let request = &active.queued.request;
        let sinks = request
            .sinks
            .map(|sinks| sinks.tokens(active.usage.prompt_tokens));
        // Where room can be made, the context does not end an answer.
        let most = sinks.map_or(u32::MAX, |_| text.context_max().get());
        let sampler = Sampler::new(request.sampling).map_err(|error| GenerateError::Model {
            message: error.to_string(),
        });
        Some(sampler.map(|sampler| Answer {
            id,
            lane: None,
            tokens: Vec::new(),
            next: Vec::new(),
            generated: 0,
            short: None,
            sampler,
            stops: StopStrings::new(&request.stop),
            stream: TextStream::default(),
            tags: answer_tags(text.tokenizer(), text.template(), &request.prompt),
            mask,
            max_tokens: request.max_tokens.map_or(most, Tokens::get),
            sinks,
            ended: false,
        }))
    }

    /// What may be dropped of the sequence; nothing while several answers are under way.
    fn allow_dropping(&mut self, sinks: Option<Tokens>) {
        let sinks = sinks.filter(|_| self.answers.is_empty());
        if let Some(model) = self.model.as_mut() {
            model.allow_dropping(sinks);
        }
    }

    /// Sets the answer that has the model's sequence aside, so that another can have it.
    fn set_aside(&mut self) {
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

    /// The answer that is left alone has the model's sequence again.
    fn take_up(&mut self) {
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

    /// All answers under way go on by a token, where there is place for it.
    pub(super) fn go_on(&mut self) {
        self.take_commands();
        let ended = |worker: &Self, answer: &Answer| worker.engine_loop.ended(answer.id).cloned();
        for answer in std::mem::take(&mut self.answers) {
            match ended(self, &answer) {
                Some(outcome) => self.end(answer, outcome),
                None => self.answers.push(answer),
            }
        }
        self.take_up();
        let Some(text) = self.text.clone() else {
            return;
        };
        if self.answers.iter().any(|answer| answer.lane.is_some()) {
            let began = Instant::now();
            self.go_on_together(&text);
            self.round_takes = began.elapsed();
        } else if let Some(answer) = self.answers.pop() {
            self.go_on_alone(&text, answer);
        }
    }

    fn go_on_alone(&mut self, text: &TextSide, mut answer: Answer) {
        let began = Instant::now();
        let mut step = || {
            self.find_room(answer.id, text.context_max())?;
            let end = text.context_max().min(self.capacity()).get();
            let room = end.saturating_sub(position_of(&self.sequence)).max(1);
            let fits = answer.next.len().min(room as usize);
            let tokens: Vec<u32> = answer.next.drain(..fits).collect();
            self.forward(answer.id, &tokens, answer.is_greedy())?;
            if answer.next.is_empty() {
                self.say(text, &mut answer)?;
            }
            ControlFlow::Continue(())
        };
        let said = step();
        self.round_takes = began.elapsed();
        match said {
            ControlFlow::Continue(()) => self.answers.push(answer),
            ControlFlow::Break(outcome) => self.end(answer, outcome),
        }
    }

    /// The answers that are set aside go on by a token each, as many as may be in one pass.
    fn go_on_together(&mut self, text: &TextSide) {
        let mut waiting = std::mem::take(&mut self.answers);
        let mut computed = false;
        while !waiting.is_empty() {
            let most = self.model.as_ref().map_or(1, |model| model.answers_max());
            let rest = waiting.split_off(waiting.len().min(most.max(1)));
            let some = std::mem::replace(&mut waiting, rest);
            let (ready, short) = self.with_places(text.context_max(), some);
            computed |= !ready.is_empty();
            for mut answer in short {
                match self.ends_short(text.context_max(), &mut answer) {
                    Some(reason) => self.end(answer, Ok(reason)),
                    None => self.answers.push(answer),
                }
            }
            let rows: Vec<(Lane, u32)> = ready
                .iter()
                .filter_map(|answer| Some((answer.lane?, *answer.next.first()?)))
                .collect();
            let requests: Vec<RequestId> = ready.iter().map(|answer| answer.id).collect();
            let failed = self.compute_together(&rows, &requests).err();
            for (number, mut answer) in ready.into_iter().enumerate() {
                let said = match &failed {
                    Some(failed) => failed.clone(),
                    None => self.say_next(text, number, &mut answer),
                };
                match said {
                    ControlFlow::Continue(()) => self.answers.push(answer),
                    ControlFlow::Break(outcome) => self.end(answer, outcome),
                }
            }
        }
        if !computed {
            std::thread::sleep(ROOM_LOOK);
        }
    }

    /// Computes a token of each of some conversations; otherwise says what becomes of their answers.
    fn compute_together(
        &mut self,
        rows: &[(Lane, u32)],
        requests: &[RequestId],
    ) -> Result<(), ControlFlow<Outcome>> {
        let Some(model) = self.model.as_mut().filter(|_| !rows.is_empty()) else {
            return Err(ControlFlow::Continue(()));
        };
        self.greatest = None;
        let mut between = BetweenLayers::new(&mut self.engine_loop, requests);
        let result = model.forward_together(rows, &mut between);
        self.note_computed(result.is_err());
        match result {
            Ok(()) => Ok(()),
            // They end, or are tried again.
            Err(ForwardError::Cancelled { .. } | ForwardError::KvFull { .. }) => {
                Err(ControlFlow::Continue(()))
            }
            Err(error) => {
                if let Some(cure) = error.cure() {
                    self.ends = Some((in_one_line(&error), cure));
                }
                Err(ControlFlow::Break(Err(GenerateError::Model {
                    message: in_one_line(&error),
                })))
            }
        }
    }

    /// Says the next token of an answer whose last one was computed with others, as number `number` of them.
    fn say_next(
        &mut self,
        text: &TextSide,
        number: usize,
        answer: &mut Answer,
    ) -> ControlFlow<Outcome> {
        let (Some(lane), Some(model)) = (answer.lane, self.model.as_mut()) else {
            return ControlFlow::Break(Err(GenerateError::Stopping));
        };
        answer.short = None;
        answer.tokens.extend(answer.next.drain(..1));
        if !answer.next.is_empty() {
            return ControlFlow::Continue(());
        }
        match model.scores_of(number, lane, &mut self.logits) {
            Ok(()) => self.say(text, answer),
            Err(ForwardError::NotFinite { position }) => {
                ControlFlow::Break(Err(GenerateError::NotFinite { position }))
            }
            Err(error) => ControlFlow::Break(Err(GenerateError::Model {
                message: in_one_line(&error),
            })),
        }
    }

    /// Says the token that follows what was computed last of an answer.
    fn say(&mut self, text: &TextSide, answer: &mut Answer) -> ControlFlow<Outcome> {
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
            let forced = in_form(mask.force(&mut |bytes| {
                let mut tokens = text.tokenizer().encode_ahead(bytes);
                tokens.truncate(most);
                tokens
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
    fn end(&mut self, mut answer: Answer, outcome: Outcome) {
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

    /// Brings the sequence to the end of a request's prompt, and lets the answers beside it go on meanwhile.
    fn read_prompt(&mut self, text: &TextSide, answer: &Answer) -> ControlFlow<Outcome> {
        let id = answer.id;
        let Some((model, active)) = self.model.as_mut().zip(self.engine_loop.of_mut(id)) else {
            return ControlFlow::Break(Err(GenerateError::Stopping));
        };
        let prompt = std::mem::take(&mut active.queued.prompt);
        let tokens = Tokens::new(position_of(&prompt));
        let capacity = model.plan().kv_capacity;
        if tokens > capacity {
            return ControlFlow::Break(Err(GenerateError::PromptBeyondKv {
                tokens,
                capacity,
                limit: text.context_max(),
            }));
        }
        let asked = Asked {
            client: active.queued.request.client.as_ref(),
            prompt: &prompt,
        };
        let Selected { kept, fork } = model.select(&self.sequence, asked);
        let (cached, held) = (Tokens::new(kept), model.held());
        self.sequence.clear();
        self.sequence.extend(prompt.iter().take(kept as usize));
        if let Some(fork) = fork {
            model.fork_at(fork);
        }
        model.mark_at(mark_at(prompt.len()));
        if !self.answers.is_empty() {
            model.expect(tokens.get());
        }
        active.usage.cached_tokens = cached;
        active.queued.reply.started(tokens, cached);
        self.engine_loop.reused(id, cached, held);
        let fresh = prompt.get(kept as usize..).unwrap_or_default();
        self.reads = true;
        let read = self.read_slices(fresh, answer);
        self.reads = false;
        if let Some(model) = self.model.as_mut() {
            model.expect(0);
        }
        match read {
            ControlFlow::Break(Err(GenerateError::KvFull {
                position, capacity, ..
            })) => ControlFlow::Break(Err(GenerateError::KvFull {
                position,
                tokens,
                capacity,
            })),
            ControlFlow::Break(outcome) => ControlFlow::Break(outcome),
            ControlFlow::Continue(took) => {
                self.engine_loop.prefilled(position_of(fresh), took);
                ControlFlow::Continue(())
            }
        }
    }

    /// Reads tokens of a prompt; returns how long that took.
    fn read_slices(&mut self, fresh: &[u32], answer: &Answer) -> ControlFlow<Outcome, Duration> {
        let (mut at, mut took, mut slice) = (0, Duration::ZERO, SLICE_FIRST);
        while at < fresh.len() {
            if self.answers.is_empty() {
                slice = fresh.len();
            }
            let end = fresh.len().min(at + slice);
            let began = Instant::now();
            let last = end == fresh.len();
            let tokens = fresh.get(at..end).unwrap_or_default();
            self.forward(answer.id, tokens, last && answer.is_greedy())?;
            let spent = began.elapsed();
            took += spent;
            at = end;
            if !last && !self.answers.is_empty() {
                self.go_on();
                slice = slice_for(tokens.len(), spent, self.round_takes);
            }
        }
        ControlFlow::Continue(took)
    }

    /// Appends tokens to the sequence, for a request; plans are put into force between layers. With `greedy`, the token that comes
    /// next may be found instead of the scores.
    fn forward(&mut self, id: RequestId, tokens: &[u32], greedy: bool) -> ControlFlow<Outcome> {
        self.go_on_unless_ended(id)?;
        let Some(model) = self.model.as_mut() else {
            return ControlFlow::Break(Err(GenerateError::Stopping));
        };
        let requests = [id];
        let mut between = BetweenLayers::new(&mut self.engine_loop, &requests);
        let result = if greedy {
            model.forward_greedy(tokens, &mut between, &mut self.logits)
        } else {
            model
                .forward(tokens, &mut between, &mut self.logits)
                .map(|()| None)
        };
        let ended = self.engine_loop.ended(id).cloned();
        let broken = result.is_err();
        let outcome = match result {
            Ok(greatest) => {
                self.greatest = greatest;
                self.sequence.extend_from_slice(tokens);
                ended.map_or(ControlFlow::Continue(()), ControlFlow::Break)
            }
            Err(ForwardError::KvFull { capacity, .. })
                if !self.reads && !self.sequence.is_empty() =>
            {
                ControlFlow::Break(Ok(self.no_room(id, capacity)))
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
                if let Some(active) = self.engine_loop.of_mut(id) {
                    active.note_kept(&**model, None);
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
        self.note_computed(broken);
        outcome
    }
}

/// Tokens that the answer to a request is likely to come to.
fn likely(request: &GenerateRequest) -> u32 {
    request
        .max_tokens
        .map_or(ANSWER_LIKELY, |most| most.get().min(ANSWER_LIKELY))
}

/// Tokens of a prompt that take about as long as `round`, where `tokens` took `spent`.
fn slice_for(tokens: usize, spent: Duration, round: Duration) -> usize {
    let share = round.as_secs_f64() / spent.as_secs_f64().max(1e-6);
    let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "bounded"
    )]
    let slice = (f64::from(tokens) * share).clamp(0.0, SLICE_MAX) as usize;
    slice.max(SLICE_MIN)
}

/// The most tokens that are computed at once since a form leaves no choice about them. Our choice: as many as the names and
/// punctuation of some tool calls; a form that forces more of them goes on token by token.
const FORCED_MAX: usize = 64;

/// Tokens that an answer of unknown length is taken to come to when another may join it. Our choice: two to three spoken
/// paragraphs.
const ANSWER_LIKELY: u32 = 256;
/// What an answer is taken to come to at least beyond what it has.
const ANSWER_MIN: u32 = 64;
/// The first slice of a prompt that is read beside answers, before its speed is known.
const SLICE_FIRST: usize = 16;
/// The least tokens of one: with fewer, weights are read more often than it saves.
const SLICE_MIN: usize = 4;
/// The most tokens of one.
const SLICE_MAX: f64 = 4096.0;

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
