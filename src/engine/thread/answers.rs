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
//! A prompt that joins is read in slices, each in one pass with the next tokens of those before it.

use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

use super::worker::{Answer, Worker, position_of};
use crate::{
    answer::answer_tags,
    drafts::Drafter,
    engine_loop::Outcome,
    error::NOT_FINITE_REMEDY,
    generate::{FinishReason, GenerateError, GenerateRequest, RequestId},
    mailbox::Queued,
    model::{Asked, Selected},
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
            rows: 1,
            drafter: Drafter::default(),
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
            request: id.get(),
        };
        let Selected { kept, fork } = model.select(&self.sequence, asked);
        let (cached, held) = (Tokens::new(kept), model.held());
        let beside = model.kept_conversations().into();
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
        self.engine_loop.state.kept = beside;
        self.engine_loop.reused(id, cached, held);
        let fresh = prompt.get(kept as usize..).unwrap_or_default();
        self.reads = true;
        let read = self.read_slices(text, fresh, answer);
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
}

/// Tokens that the answer to a request is likely to come to.
fn likely(request: &GenerateRequest) -> u32 {
    request
        .max_tokens
        .map_or(ANSWER_LIKELY, |most| most.get().min(ANSWER_LIKELY))
}

/// The most tokens that are computed at once since a form leaves no choice about them. Our choice: as many as the names and
/// punctuation of some tool calls; a form that forces more of them goes on token by token.
const FORCED_MAX: usize = 64;

/// Tokens that an answer of unknown length is taken to come to when another may join it. Our choice: two to three spoken
/// paragraphs.
const ANSWER_LIKELY: u32 = 256;
/// What an answer is taken to come to at least beyond what it has.
const ANSWER_MIN: u32 = 64;
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
