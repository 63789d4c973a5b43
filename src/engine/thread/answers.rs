//! Answers in progress: reading prompts, and producing tokens until an answer ends.
//!
//! A single answer owns the model's sequence. When another request can join, its conversation becomes a lane, and all
//! answers proceed together, one token each per pass; the last remaining answer owns the sequence again.
//!
//! ```text
//!   kitchen  prompt t t t t t t t t t t t t t t end
//!   hall                 p p p prompt t t t t t t t t t
//!            alone       in slices    together  alone
//! ```
//!
//! | answers | a pass computes |
//! |---|---|
//! | one | its next token; with it, tokens that its form forces or a draft proposes |
//! | several | the next tokens of each, up to the maximum of answers in a pass |
//! | several, and a prompt | the same, and a slice of the prompt |
//!
//! The last few tokens of a prompt whose beginning is in the cache need no slices: they are the next tokens of its answer.

use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

use super::worker::{Answer, FOLDER_MAX, ROOM_LOOK, Worker, position_of};
use crate::{
    answer::answer_tags,
    drafts::{Draft, Drafter},
    engine_loop::{BetweenLayers, Outcome},
    error::ForwardError,
    generate::{GenerateError, GenerateRequest, RequestId},
    mailbox::Queued,
    model::{Asked, Selected, Span},
    sampling::Sampler,
    stops::StopStrings,
    text::TextSide,
    tokenizer::TextStream,
};
use cotenant_units::{Tokens, causes::in_one_line};

/// Slice of a prompt that is read beside answers.
struct Slice<'a> {
    id: RequestId,
    tokens: &'a [u32],
}

impl Worker {
    /// Returns a request that can join the running ones, if the capacity suffices for all contexts.
    pub(super) fn joining(&mut self) -> Option<Queued> {
        if self.engine_loop.state.queued == 0 || self.answers.len() >= self.answers_max() {
            return None;
        }
        self.set_aside();
        // An answer that has dropped its oldest tokens or cannot become a lane stays alone.
        if self.answers.iter().any(|answer| answer.lane.is_none()) {
            return None;
        }
        let model = self.model.as_ref()?;
        let capacity = model.plan().kv_capacity.get();
        let aside = model.aside_takes().get();
        let to_come = self.engine_loop.active.iter().map(|active| {
            let request = &active.queued.request;
            let said = active.usage.completion_tokens.get();
            likely(request).saturating_sub(said).max(ANSWER_MIN)
        });
        let taken = model.held().get().saturating_add(to_come.sum());
        self.engine_loop.shared.join(|queued| {
            let own = position_of(&queued.prompt).saturating_add(likely(&queued.request));
            let own = own.saturating_add(aside);
            taken.saturating_add(own) <= capacity
        })
    }

    /// Starts a request: reads its prompt and emits its first token.
    pub(super) fn start(&mut self, queued: Queued) {
        let id = queued.request.id;
        let capacity = self.capacity();
        self.set_aside();
        self.engine_loop.begin(queued, capacity);
        // Without a model, the handle refuses requests.
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
        let said = match self.read_prompt(&text, &mut answer) {
            ControlFlow::Continue(()) if answer.next.is_empty() => self.say(&text, &mut answer),
            read => read,
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

    /// Returns the answer to a request before anything is computed.
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
        // If tokens may be dropped, the context length does not limit the answer.
        let most = sinks.map_or(u32::MAX, |_| text.context_max().get());
        let sampler = Sampler::new(request.sampling).map_err(|error| GenerateError::Model {
            message: error.to_string(),
        });
        let suppressed = text.tokenizer().suppressed();
        Some(sampler.map(|sampler| Answer {
            id,
            lane: None,
            tokens: Vec::new(),
            next: Vec::new(),
            rows: 1,
            drafter: Drafter::default(),
            generated: 0,
            short: None,
            sampler: sampler.suppressing(suppressed),
            stops: StopStrings::new(&request.stop),
            stream: TextStream::default(),
            tags: answer_tags(text.tokenizer(), text.template(), &request.prompt),
            mask,
            max_tokens: request.max_tokens.map_or(most, Tokens::get),
            sinks,
            ended: false,
        }))
    }

    /// Extends the sequence to the end of a request's prompt, while the other answers proceed; or makes the answer a lane
    /// whose next tokens are the rest of the prompt.
    fn read_prompt(&mut self, text: &TextSide, answer: &mut Answer) -> ControlFlow<Outcome> {
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
        let client = active.queued.request.client.clone();
        let asked = Asked {
            client: client.as_ref(),
            prompt: &prompt,
            request: id.get(),
        };
        self.reload(id, asked);
        let Some((model, active)) = self.model.as_mut().zip(self.engine_loop.of_mut(id)) else {
            return ControlFlow::Break(Err(GenerateError::Stopping));
        };
        let Selected { kept, fork } = model.select(&self.sequence, asked);
        let (cached, held) = (Tokens::new(kept), model.held());
        let beside = model.kept_conversations().into();
        self.sequence.clear();
        self.sequence.extend(prompt.iter().take(kept as usize));
        // Another conversation with the same system prompt diverges where the last message begins.
        let fork = fork.or_else(|| text.last_message(&prompt).filter(|_| kept == 0));
        if let Some(fork) = fork {
            model.fork_at(fork);
        }
        model.mark_at(ends_at(prompt.len()));
        if !self.answers.is_empty() {
            model.expect(tokens.get());
        }
        active.usage.cached_tokens = cached;
        active.queued.reply.started(tokens, cached);
        self.engine_loop.state.kept = beside;
        self.engine_loop.reused(id, cached, held);
        let fresh = prompt.get(kept as usize..).unwrap_or_default();
        if !self.answers.is_empty() && fresh.len() <= ANSWER_BEGINS {
            answer.lane = model.set_aside(&self.sequence);
        }
        if answer.lane.is_some() {
            answer.tokens = std::mem::take(&mut self.sequence);
            answer.next = fresh.to_vec();
            model.expect(0);
            self.engine_loop
                .prefilled(position_of(fresh), Duration::ZERO);
            return ControlFlow::Continue(());
        }
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

    /// Reads back a saved conversation that a prompt continues, while the other answers proceed.
    fn reload(&mut self, id: RequestId, asked: Asked<'_>) {
        let (token, began) = (self.token_time(), Instant::now());
        loop {
            let model = self.model.as_mut();
            let begun = model.and_then(|model| model.begin_reload(&self.sequence, asked, token));
            if begun == Some(true) {
                break;
            }
            // After a start, the folder is read first.
            if begun == Some(false) || began.elapsed() >= FOLDER_MAX {
                return;
            }
            std::thread::sleep(RELOAD_STEP);
            self.take_commands();
        }
        self.sequence.clear();
        self.reads = true;
        loop {
            let patience = if self.answers.is_empty() {
                RELOAD_STEP
            } else {
                Duration::ZERO
            };
            let model = self.model.as_mut();
            if !model.is_some_and(|model| model.reload(patience)) {
                break;
            }
            if self.answers.is_empty() {
                self.take_commands();
            } else {
                self.go_on();
            }
            if self.engine_loop.ended(id).is_some()
                && let Some(model) = self.model.as_mut()
            {
                model.end_reload();
            }
        }
        self.reads = false;
        self.note_saved();
    }

    /// Advances all answers by a token, as far as capacity permits.
    pub(super) fn go_on(&mut self) {
        self.take_commands();
        self.end_what_has_ended();
        let Some(text) = self.text.clone() else {
            return;
        };
        self.read_again();
        self.take_up();
        let goes_on = |answer: &Answer| answer.lane.is_some() && !self.is_lost(answer);
        if self.answers.iter().any(goes_on) {
            let began = Instant::now();
            self.go_on_together(&text, None);
            self.round_takes = began.elapsed();
        } else if let Some(own) = self.answers.iter().position(|answer| answer.lane.is_none()) {
            let answer = self.answers.remove(own);
            self.go_on_alone(&text, answer);
        }
    }

    /// Ends the answers that a command point has found cancelled or overdue.
    fn end_what_has_ended(&mut self) {
        for answer in std::mem::take(&mut self.answers) {
            match self.engine_loop.ended(answer.id).cloned() {
                Some(outcome) => self.end(answer, outcome),
                None => self.answers.push(answer),
            }
        }
    }

    /// Recomputes lanes that have lost their state to a change of KV type, one after the other.
    fn read_again(&mut self) {
        while !self.reads
            && let Some(number) = self.answers.iter().position(|answer| self.is_lost(answer))
        {
            self.set_aside();
            // An answer that owns the sequence and cannot become a lane ends first.
            if self.answers.iter().any(|answer| answer.lane.is_none()) {
                return;
            }
            let mut answer = self.answers.remove(number);
            let tokens = std::mem::take(&mut answer.tokens);
            let Some((model, active)) = self.model.as_mut().zip(self.engine_loop.of_mut(answer.id))
            else {
                return;
            };
            if let Some(lane) = answer.lane.take() {
                model.leave(lane);
            }
            let asked = Asked {
                client: active.queued.request.client.as_ref(),
                prompt: &tokens,
                request: answer.id.get(),
            };
            let Selected { kept, .. } = model.select(&self.sequence, asked);
            self.sequence.clear();
            self.sequence.extend(tokens.iter().take(kept as usize));
            let fresh = tokens.get(kept as usize..).unwrap_or_default();
            match self.forward(answer.id, fresh, answer.is_greedy()) {
                ControlFlow::Continue(()) => {
                    self.answers.push(answer);
                    if self.answers.len() > 1 {
                        self.set_aside();
                    }
                }
                ControlFlow::Break(outcome) => self.end(answer, outcome),
            }
        }
    }

    fn go_on_alone(&mut self, text: &TextSide, mut answer: Answer) {
        let began = Instant::now();
        let said = self.step_alone(text, &mut answer);
        self.round_takes = began.elapsed();
        match said {
            ControlFlow::Continue(()) => self.answers.push(answer),
            ControlFlow::Break(outcome) => self.end(answer, outcome),
        }
    }

    fn step_alone(&mut self, text: &TextSide, answer: &mut Answer) -> ControlFlow<Outcome> {
        self.find_room(answer.id, text.context_max())?;
        let end = text.context_max().min(self.capacity()).get();
        let room = end.saturating_sub(position_of(&self.sequence)).max(1) as usize;
        self.speed.with_plan(self.engine_loop.state.revision);
        let draft = self.draft(answer, room - 1);
        if !draft.is_empty() {
            return self.verify(text, answer, &draft);
        }
        let fits = answer.next.len().min(room);
        let tokens: Vec<u32> = answer.next.drain(..fits).collect();
        let began = Instant::now();
        self.forward(answer.id, &tokens, answer.is_greedy())?;
        if tokens.len() == 1 {
            self.speed.took(1, began.elapsed());
        }
        if answer.next.is_empty() {
            self.say(text, answer)?;
        }
        ControlFlow::Continue(())
    }

    /// Drafts the tokens that are likely to follow the next one of a single answer, as many as are worth a pass.
    fn draft(&mut self, answer: &mut Answer, room: usize) -> Vec<u32> {
        let (Some(model), [next]) = (self.model.as_mut(), answer.next.as_slice()) else {
            return Vec::new();
        };
        // The tokens allowed by a form are known one at a time, and drafts need the tokens that were dropped.
        if answer.mask.is_some()
            || answer.sinks.is_some()
            || !model.takes_back()
            || !self.engine_loop.shared.options().drafts
        {
            return Vec::new();
        }
        let left = answer.max_tokens.saturating_sub(answer.generated + 1) as usize;
        let results = model.answers_max().saturating_sub(1);
        let most = results.min(room).min(left);
        self.sequence.push(*next);
        let (drafter, speed) = (&mut answer.drafter, self.speed);
        let draft = match drafter.draft(&self.sequence, most, speed, model.drafts()) {
            Draft::Earlier(tokens) => tokens,
            Draft::Block(count) => {
                let began = Instant::now();
                let engine_loop = &self.engine_loop;
                let go_on = &mut || !engine_loop.is_pressed();
                let drafted = model.draft(&self.sequence, count, go_on);
                self.speed.drafted(drafted.len(), began.elapsed());
                drafted
            }
        };
        self.sequence.pop();
        draft
    }

    /// Computes the next token of a single answer together with a draft, and emits the tokens of the draft that it
    /// confirms.
    fn verify(
        &mut self,
        text: &TextSide,
        answer: &mut Answer,
        draft: &[u32],
    ) -> ControlFlow<Outcome> {
        let rows = [answer.next.as_slice(), draft].concat();
        let scored = rows.len();
        let began = Instant::now();
        let span = Span {
            lane: None,
            tokens: &rows,
            scored,
        };
        if let Some(active) = self.engine_loop.of_mut(answer.id) {
            active.own_passes = false;
        }
        if let Err(error) = self.compute(&[span], &[answer.id]) {
            return self.failed(answer.id, &rows, error);
        }
        let mut took = began.elapsed();
        self.sequence.append(&mut answer.next);
        let mut accepted = 0;
        let said = loop {
            let proposed = draft.get(accepted);
            match self.say_result(text, answer, accepted) {
                ControlFlow::Continue(())
                    if proposed.is_some_and(|token| answer.next == [*token]) =>
                {
                    self.sequence.append(&mut answer.next);
                    accepted += 1;
                }
                said => break said,
            }
        };
        let drafter = &mut answer.drafter;
        drafter.verified(accepted, draft.len(), &mut self.speed);
        self.engine_loop.drafted(draft.len(), accepted);
        if let Some(model) = self.model.as_mut() {
            // Non-finite results reset the sequence.
            let (kept, began) = (position_of(&self.sequence), Instant::now());
            model.take_back(None, model.position().saturating_sub(kept));
            took += began.elapsed();
        }
        self.speed.took(scored, took);
        said
    }

    /// Emits the token after result `number` of the last pass, of a single answer.
    fn say_result(
        &mut self,
        text: &TextSide,
        answer: &mut Answer,
        number: usize,
    ) -> ControlFlow<Outcome> {
        self.go_on_unless_ended(answer.id)?;
        match self.scores(answer, number) {
            Ok(()) => self.say(text, answer),
            Err(error) => self.failed(answer.id, &[], error),
        }
    }

    /// Stores the scores of result `number` of the last pass for sampling.
    fn scores(&mut self, answer: &Answer, number: usize) -> Result<(), ForwardError> {
        let Some(model) = self.model.as_mut() else {
            return Err(ForwardError::SequenceLost);
        };
        let held = if answer.lane.is_some() {
            &answer.tokens
        } else {
            &self.sequence
        };
        let position = position_of(held).saturating_sub(1);
        self.greatest = if answer.is_greedy() {
            model.greatest_of(number, position, &mut self.logits)?
        } else {
            model.scores_of(number, position, &mut self.logits)?;
            None
        };
        Ok(())
    }

    /// Advances each lane by a token and the tokens that its form forces, in passes of as many lanes as permitted; the
    /// first pass also reads a slice of a prompt. Returns the number of tokens read from it.
    fn go_on_together(
        &mut self,
        text: &TextSide,
        mut slice: Option<Slice<'_>>,
    ) -> Option<ControlFlow<Outcome, usize>> {
        let mut waiting = std::mem::take(&mut self.answers);
        let (mut computed, mut read) = (false, None);
        while !waiting.is_empty() || slice.is_some() {
            let (most, rows, slice_max) = self.model.as_ref().map_or((1, 1, 1), |model| {
                (model.answers_max(), model.rows_max(), model.slice_max())
            });
            let most = most.saturating_sub(usize::from(slice.is_some()));
            // Without a slice at least one, so that the loop terminates.
            let most = most.max(usize::from(slice.is_none()));
            let rest = waiting.split_off(waiting.len().min(most));
            let some = std::mem::replace(&mut waiting, rest);
            let (mut ready, short) = self.with_places(text.context_max(), some);
            for mut answer in short {
                match self.ends_short(text.context_max(), &mut answer, !ready.is_empty()) {
                    Some(reason) => self.end(answer, Ok(reason)),
                    None => self.answers.push(answer),
                }
            }
            let slice = slice.take().map(|slice| Slice {
                tokens: beginning(
                    slice.tokens,
                    rows.saturating_sub(ready.len()).min(slice_max).max(1),
                ),
                ..slice
            });
            let own = slice.as_ref().map_or(0, |slice| slice.tokens.len());
            self.force(&mut ready, rows.saturating_sub(own));
            computed |= !ready.is_empty() || slice.is_some();
            let failed = self.pass(&ready, slice.as_ref()).err();
            let first = usize::from(slice.is_some());
            for (number, mut answer) in (first..).zip(ready) {
                let said = match &failed {
                    Some(error) => self.failed_together(error),
                    None => self.say_next(text, number, &mut answer),
                };
                match said {
                    ControlFlow::Continue(()) => self.answers.push(answer),
                    ControlFlow::Break(outcome) => self.end(answer, outcome),
                }
            }
            if let Some(slice) = slice {
                read = Some(self.note_read(&slice, failed));
            }
        }
        if !computed {
            std::thread::sleep(ROOM_LOOK);
        }
        read
    }

    /// Sets the number of tokens of each answer in the next pass of `rows` rows: the next one, and the forced ones
    /// after it while rows and places remain.
    fn force(&mut self, ready: &mut [Answer], rows: usize) {
        let mut left = rows.saturating_sub(ready.len());
        for answer in ready {
            answer.rows = 1;
            let more = answer.next.len().saturating_sub(1).min(left);
            let tokens = u32::try_from(more + 1).unwrap_or(1);
            let places = answer.lane.zip(self.model.as_mut());
            if more > 0 && places.is_some_and(|(lane, model)| model.make_places(lane, tokens)) {
                answer.rows += more;
                left -= more;
            }
        }
    }

    /// Computes the next tokens of the `ready` answers, and a slice.
    fn pass(&mut self, ready: &[Answer], slice: Option<&Slice<'_>>) -> Result<(), ForwardError> {
        let own = slice.map(|slice| Span {
            lane: None,
            tokens: slice.tokens,
            scored: 1,
        });
        let lanes = ready.iter().map(|answer| Span {
            lane: answer.lane,
            tokens: beginning(&answer.next, answer.rows),
            scored: 1,
        });
        let spans: Vec<_> = own.into_iter().chain(lanes).collect();
        let own = slice.map(|slice| slice.id);
        let requests: Vec<_> = own
            .into_iter()
            .chain(ready.iter().map(|answer| answer.id))
            .collect();
        if spans.is_empty() {
            return Ok(());
        }
        self.compute(&spans, &requests)
    }

    /// Computes spans in one pass, for these requests; plans are put into force between layers.
    fn compute(&mut self, spans: &[Span<'_>], requests: &[RequestId]) -> Result<(), ForwardError> {
        self.greatest = None;
        let Some(model) = self.model.as_mut() else {
            return Err(ForwardError::SequenceLost);
        };
        let mut between = BetweenLayers::new(&mut self.engine_loop, requests);
        let result = model.forward_together(spans, &mut between);
        self.note_computed(result.is_err());
        if let Some(cure) = result.as_ref().err().and_then(ForwardError::cure) {
            let message = result.as_ref().err().map(|error| in_one_line(error));
            self.ends = Some((message.unwrap_or_default(), cure));
        }
        result
    }

    /// Decides about answers whose pass failed: they end, or are retried.
    fn failed_together(&self, error: &ForwardError) -> ControlFlow<Outcome> {
        match error {
            ForwardError::Cancelled { .. } | ForwardError::KvFull { .. } => {
                ControlFlow::Continue(())
            }
            error => ControlFlow::Break(Err(GenerateError::Model {
                message: in_one_line(error),
            })),
        }
    }

    /// Emits the next token of an answer by result `number` of a joint pass.
    fn say_next(
        &mut self,
        text: &TextSide,
        number: usize,
        answer: &mut Answer,
    ) -> ControlFlow<Outcome> {
        answer.short = None;
        answer.tokens.extend(answer.next.drain(..answer.rows));
        match self.scores(answer, number) {
            // Forced tokens were chosen earlier.
            Ok(()) if !answer.next.is_empty() => ControlFlow::Continue(()),
            Ok(()) => self.say(text, answer),
            Err(error) => ControlFlow::Break(Err(unfinished(error))),
        }
    }

    /// Records that a slice was read, or returns the outcome of its request.
    fn note_read(
        &mut self,
        slice: &Slice<'_>,
        failed: Option<ForwardError>,
    ) -> ControlFlow<Outcome, usize> {
        let read = match failed {
            Some(error) => Err(error),
            None => {
                self.sequence.extend_from_slice(slice.tokens);
                self.greatest = None;
                let position = position_of(&self.sequence).saturating_sub(1);
                let model = self.model.as_mut();
                model.map_or(Err(ForwardError::SequenceLost), |model| {
                    model.scores_of(0, position, &mut self.logits)
                })
            }
        };
        match read {
            Ok(()) => {
                self.go_on_unless_ended(slice.id)?;
                ControlFlow::Continue(slice.tokens.len())
            }
            Err(error) => {
                self.failed(slice.id, slice.tokens, error)?;
                ControlFlow::Continue(0)
            }
        }
    }

    /// Reads tokens of a prompt in slices; returns the time taken.
    pub(super) fn read_slices(
        &mut self,
        text: &TextSide,
        fresh: &[u32],
        answer: &Answer,
    ) -> ControlFlow<Outcome, Duration> {
        let began = Instant::now();
        let mut at = 0;
        for number in 0usize.. {
            let rest = fresh.get(at..).unwrap_or_default();
            if rest.is_empty() {
                break;
            }
            if self.answers.is_empty() {
                self.forward(answer.id, rest, answer.is_greedy())?;
                break;
            }
            let slice = self.sliced.map_or(SLICE_FIRST, |(tokens, spent)| {
                slice_for(tokens, spent, self.round_takes)
            });
            if number.is_multiple_of(SLICES_MEASURED) && rest.len() > slice {
                self.go_on();
                let first = self.round_takes;
                self.go_on();
                // A delay of one pass must not lengthen the slices until the next measurement.
                self.round_takes = self.round_takes.min(first);
                continue;
            }
            let passes = Instant::now();
            self.take_commands();
            self.end_what_has_ended();
            self.go_on_unless_ended(answer.id)?;
            let tokens = Slice {
                id: answer.id,
                tokens: beginning(rest, slice),
            };
            let Some(read) = self.go_on_together(text, Some(tokens)) else {
                break;
            };
            let read = read?;
            at += read;
            if read < rest.len() {
                let spent = passes.elapsed().saturating_sub(self.round_takes);
                self.sliced = Some((read, spent));
            }
        }
        ControlFlow::Continue(began.elapsed())
    }

    /// Appends tokens to the sequence for a request; plans are put into force between layers. With `greedy`, the device
    /// may return the next token instead of the scores.
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
        let broken = result.is_err();
        let outcome = match result {
            Ok(greatest) => {
                self.greatest = greatest;
                self.sequence.extend_from_slice(tokens);
                self.go_on_unless_ended(id)
            }
            Err(error) => self.failed(id, tokens, error),
        };
        self.note_computed(broken);
        outcome
    }

    /// Returns the outcome of a request whose pass of the sequence has failed, with these tokens.
    fn failed(
        &mut self,
        id: RequestId,
        tokens: &[u32],
        error: ForwardError,
    ) -> ControlFlow<Outcome> {
        let ended = self.engine_loop.ended(id).cloned();
        let Some(model) = self.model.as_mut() else {
            return ControlFlow::Break(Err(GenerateError::Stopping));
        };
        match error {
            ForwardError::KvFull { capacity, .. } if !self.reads && !self.sequence.is_empty() => {
                ControlFlow::Break(Ok(self.no_room(id, capacity)))
            }
            ForwardError::KvFull { capacity, needed } => {
                ControlFlow::Break(Err(GenerateError::KvFull {
                    position: Tokens::new(position_of(&self.sequence)),
                    tokens: Tokens::new(needed),
                    capacity,
                }))
            }
            error => {
                if let Some(cure) = error.cure() {
                    self.ends = Some((in_one_line(&error), cure));
                }
                // Before its blocks are released.
                if let Some(active) = self.engine_loop.of_mut(id) {
                    active.note_kept(&**model, None);
                    active.noted = true;
                }
                if matches!(error, ForwardError::Cancelled { .. }) {
                    // Tokens computed before the cancelled pass are valid.
                    let kept = model.recover() as usize;
                    let missing = kept.saturating_sub(self.sequence.len());
                    self.sequence.extend(tokens.iter().take(missing));
                    self.sequence.truncate(kept);
                } else {
                    // Any other failure makes the sequence unusable.
                    model.reset();
                    self.sequence.clear();
                }
                ControlFlow::Break(ended.unwrap_or_else(|| Err(unfinished(error))))
            }
        }
    }
}

/// Expected length of the answer to a request, in tokens.
fn likely(request: &GenerateRequest) -> u32 {
    request
        .max_tokens
        .map_or(ANSWER_LIKELY, |most| most.get().min(ANSWER_LIKELY))
}

/// Expected length of an answer without a limit, in tokens, when another one asks to join. Our choice: two to three
/// spoken paragraphs.
const ANSWER_LIKELY: u32 = 256;
/// Minimum expected remainder of an answer, in tokens.
const ANSWER_MIN: u32 = 64;
/// Position in a prompt of `prompt` tokens where the next prompt is likely to diverge: shortly before the end, since
/// templates write a beginning for the answer that they omit from earlier answers.
fn ends_at(prompt: usize) -> u32 {
    u32::try_from(prompt.saturating_sub(ANSWER_BEGINS)).unwrap_or(0)
}

/// Tokens that the templates of Qwen3 and Qwen3.5 write before an answer but omit from the next prompt (`<think>`, a
/// blank line, `</think>`, a blank line), with a margin for others.
const ANSWER_BEGINS: usize = 8;

/// Interval of command points while a conversation is read back.
const RELOAD_STEP: Duration = Duration::from_millis(1);

/// Converts a failed pass to the error of its request.
fn unfinished(error: ForwardError) -> GenerateError {
    match error {
        ForwardError::NotFinite { position } => GenerateError::NotFinite { position },
        error => GenerateError::Model {
            message: in_one_line(&error),
        },
    }
}

/// Returns at most the first `most` of some tokens.
fn beginning(tokens: &[u32], most: usize) -> &[u32] {
    tokens.get(..most).unwrap_or(tokens)
}

/// Returns the slice length that prolongs a pass of `round` by at most [`SLICE_SHARE`] of it, if `tokens` took `spent`.
fn slice_for(tokens: usize, spent: Duration, round: Duration) -> usize {
    let share = SLICE_SHARE * round.as_secs_f64() / spent.as_secs_f64().max(1e-6);
    let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "bounded"
    )]
    let slice = (f64::from(tokens) * share.min(SLICE_GROWTH)).clamp(0.0, SLICE_MAX) as usize;
    slice.max(SLICE_MIN)
}

/// First slice of the first prompt read beside answers, in tokens, before its speed is known.
const SLICE_FIRST: usize = 4;
/// Smallest slice: with fewer tokens, a prompt takes as many passes as an answer.
const SLICE_MIN: usize = 4;
/// Largest slice, in tokens.
const SLICE_MAX: f64 = 4096.0;
/// Time that a slice adds to a pass, as a share of it. Answers beside a prompt take at most twice their time; a fifth
/// is a margin, since the time of a slice is estimated from the previous one.
const SLICE_SHARE: f64 = 0.8;
/// Maximum growth from one slice to the next. Our choice.
const SLICE_GROWTH: f64 = 2.0;
/// Number of slices after which two passes without one are measured: a plan may have changed their time. Our choice.
const SLICES_MEASURED: usize = 32;
