//! Chat completions of HTTP as engine requests.
//!
//! Answers are split into thoughts, text and tool calls.

use std::{collections::VecDeque, sync::Arc};

use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream};

use super::llm::{Guarded, Llm, RETRY_SOON, Wanted};
use cotenant_conversation::{AnswerPart, Prompt, refusal::Refusal};
use cotenant_engine::{self as engine, AnswerReader};
use cotenant_http::backend::{
    ChatBackend, ChatEvent, ChatRequest, ChatStream, FinishReason, TokenizerBackend,
};
use cotenant_policy::lease::Class;
use cotenant_units::Tokens;

impl ChatBackend for Llm {
    fn chat(&self, request: ChatRequest) -> BoxFuture<'_, Result<ChatStream, Refusal>> {
        async move {
            if request.model != self.name() {
                return Err(Refusal::UnknownModel {
                    model: request.model,
                    known: format!("; there is {}", self.name()),
                });
            }
            let mut reader = AnswerReader::new(request.prompt.tools());
            let wanted = wanted_of(&request);
            let (mut guarded, style) = self.submit(self.asked(request), &wanted).await?;
            reader.set_style(style);
            let mut answer = Answer {
                context: wanted.tokens.then(|| std::mem::take(&mut guarded.prompt)),
                guarded,
                llm: self.clone(),
                reader,
                events: VecDeque::new(),
                called: false,
                ended: false,
            };
            // A failure before the first token is a refusal, which clients may retry.
            let mut begun = Vec::new();
            while let Some(event) = answer.next().await {
                match event {
                    ChatEvent::Failed(refusal) => return Err(refusal),
                    event @ ChatEvent::Started { .. } => begun.push(event),
                    event => {
                        begun.push(event);
                        break;
                    }
                }
            }
            let rest = stream::unfold(answer, |mut answer| async move {
                let event = answer.next().await?;
                Some((event, answer))
            });
            Ok(stream::iter(begun).chain(rest).boxed())
        }
        .boxed()
    }
}

impl TokenizerBackend for Llm {
    fn count(&self, prompt: Prompt) -> BoxFuture<'_, Result<Tokens, Refusal>> {
        self.of_text(move |engine| engine.count(&prompt)).boxed()
    }

    fn tokenize(
        &self,
        text: String,
        begin: bool,
        control: bool,
    ) -> BoxFuture<'_, Result<Vec<u32>, Refusal>> {
        self.of_text(move |engine| engine.tokenize(&text, begin, control))
            .boxed()
    }

    fn pieces(&self, tokens: Vec<u32>) -> BoxFuture<'_, Result<Vec<Vec<u8>>, Refusal>> {
        self.of_text(move |engine| engine.pieces(&tokens)).boxed()
    }
}

impl Llm {
    fn asked(&self, request: ChatRequest) -> engine::GenerateRequest {
        let client = request.meta.client.as_deref();
        engine::GenerateRequest {
            sampling: self.sampling(request.sampling.asked, request.sampling.defaults),
            max_tokens: limited(
                request.max_tokens,
                client.and_then(|client| client.tokens_max),
            ),
            class: client.map_or(Class::Interactive, |client| client.class),
            client: client.map(|client| Arc::clone(&client.name)),
            stop: request.stop,
            sinks: request.sinks,
            form: request.form,
            ..engine::GenerateRequest::new(self.next_id(), request.prompt)
        }
    }
}

/// Returns the smaller of the requested limit and the client's.
fn limited(asked: Option<Tokens>, limit: Option<Tokens>) -> Option<Tokens> {
    match (asked, limit) {
        (Some(asked), Some(limit)) => Some(asked.min(limit)),
        (asked, limit) => asked.or(limit),
    }
}

/// Answer as a stream for HTTP.
struct Answer {
    guarded: Guarded,
    llm: Llm,
    reader: AnswerReader,
    events: VecDeque<ChatEvent>,
    /// Tokens of prompt and answer so far, if requested.
    context: Option<Vec<u32>>,
    called: bool,
    ended: bool,
}

impl Answer {
    async fn next(&mut self) -> Option<ChatEvent> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Some(event);
            }
            if self.ended {
                return None;
            }
            match self.guarded.next().await {
                Some(event) => self.take(event),
                None => self.end(ChatEvent::Failed(Refusal::EngineLost {
                    reason: "it stopped without an answer".to_owned(),
                    retry_after: RETRY_SOON,
                })),
            }
        }
    }

    fn end(&mut self, event: ChatEvent) {
        self.ended = true;
        self.events.push_back(event);
    }

    fn parts(&mut self, parts: Vec<AnswerPart>) {
        for part in parts {
            self.called |= matches!(part, AnswerPart::ToolCall { .. });
            self.events.push_back(ChatEvent::Part(part));
        }
    }

    fn take(&mut self, event: engine::GenerateEvent) {
        match event {
            engine::GenerateEvent::Started {
                prompt_tokens,
                cached_tokens,
            } => {
                self.events.push_back(ChatEvent::Started {
                    prompt_tokens,
                    cached_tokens,
                });
            }
            engine::GenerateEvent::Delta { text, tokens } => {
                if let Some(context) = &mut self.context {
                    context.extend(tokens);
                }
                let parts = self.reader.push(&text);
                self.parts(parts);
            }
            engine::GenerateEvent::Finished {
                reason: engine::FinishReason::KvReclaimed,
                usage,
            } if usage.completion_tokens == Tokens::ZERO => {
                self.end(ChatEvent::Failed(Refusal::KvReclaimed {
                    generated: Tokens::ZERO,
                    retry_after: RETRY_SOON,
                }));
            }
            engine::GenerateEvent::Finished { reason, usage } => {
                let parts = self.reader.finish(reason.is_cut());
                self.parts(parts);
                let reason = match reason {
                    engine::FinishReason::Stop | engine::FinishReason::StopText(_)
                        if self.called =>
                    {
                        FinishReason::ToolCalls
                    }
                    engine::FinishReason::Stop => FinishReason::Stop,
                    engine::FinishReason::StopText(index) => FinishReason::StopText(index),
                    engine::FinishReason::Cancelled
                    | engine::FinishReason::KvReclaimed
                    | engine::FinishReason::Length => FinishReason::Length,
                };
                self.events
                    .extend(self.context.take().map(ChatEvent::Context));
                self.end(ChatEvent::Finished { reason, usage });
            }
            engine::GenerateEvent::Failed(error) => {
                let refusal = self.llm.failed(error);
                self.end(ChatEvent::Failed(refusal));
            }
        }
    }
}

/// Returns the engine parameters of a chat request.
fn wanted_of(request: &ChatRequest) -> Wanted {
    Wanted {
        client: request
            .meta
            .client
            .as_ref()
            .map(|client| Arc::clone(&client.name)),
        patience: request.meta.patience,
        whole: !request.streamed,
        context: request.context_wanted,
        trace: request.meta.trace,
        tokens: request.context_reported,
        early: request.meta.early,
        part_of: request.meta.part_of.clone(),
    }
}
