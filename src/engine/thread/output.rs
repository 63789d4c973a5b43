//! Output of answers: which sequence each has, its next tokens as text, and its end.

use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

use super::worker::{Answer, Worker, position_of};
use crate::{
    engine_loop::Outcome,
    error::NOT_FINITE_REMEDY,
    generate::{FinishReason, GenerateError, RequestId},
    sampling::{MaskError, SampleError, TokenMask},
    stops::Scan,
    text::TextSide,
};
use cotenant_policy::engine_failure::Cure;
use cotenant_units::{Tokens, causes::in_one_line};

impl Worker {
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
