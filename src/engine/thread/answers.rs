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

use std::ops::ControlFlow;

use super::worker::{Answer, Worker, position_of};
use crate::{
    answer::answer_tags,
    drafts::Drafter,
    engine_loop::Outcome,
    generate::{GenerateError, GenerateRequest, RequestId},
    mailbox::Queued,
    model::{Asked, Selected},
    sampling::Sampler,
    stops::StopStrings,
    text::TextSide,
    tokenizer::TextStream,
};
use cotenant_units::Tokens;

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

/// Tokens that an answer of unknown length is taken to come to when another may join it. Our choice: two to three spoken
/// paragraphs.
const ANSWER_LIKELY: u32 = 256;
/// What an answer is taken to come to at least beyond what it has.
const ANSWER_MIN: u32 = 64;
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
