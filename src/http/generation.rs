//! One generation: its events, measured and ordered, for all HTTP APIs.

use std::time::{Duration, Instant};

use futures_util::StreamExt;

use super::{
    api::Api,
    backend::{AnswerPart, ChatEvent, ChatStream, FinishReason, Usage},
};
use cotenant_conversation::refusal::{RETRY_AFTER_DEFAULT, Refusal};

/// One generation: `Started`, then non-empty parts, then `Finished` or `Failed`.
pub(super) struct Generation {
    events: ChatStream,
    usage: Usage,
    any_text: bool,
    api: Api,
    began: Instant,
}

impl Generation {
    pub(super) fn new(events: ChatStream, began: Instant, api: &Api) -> Self {
        Self {
            events,
            usage: Usage::default(),
            any_text: false,
            api: api.clone(),
            began,
        }
    }

    pub(super) async fn next(&mut self) -> ChatEvent {
        loop {
            match self.events.next().await {
                Some(ChatEvent::Part(AnswerPart::Text(text) | AnswerPart::Reasoning(text)))
                    if text.is_empty() => {}
                Some(event) => return self.observed(event),
                None => return ChatEvent::Failed(ended_silently()),
            }
        }
    }

    fn observed(&mut self, event: ChatEvent) -> ChatEvent {
        let status = &self.api.backends().status;
        match event {
            ChatEvent::Started {
                prompt_tokens,
                cached_tokens,
            } => {
                self.usage.prompt_tokens = prompt_tokens;
                self.usage.cached_tokens = cached_tokens;
            }
            ChatEvent::Part(_) if !self.any_text => {
                self.any_text = true;
                status.first_token(self.began.elapsed());
            }
            ChatEvent::Part(_)
            | ChatEvent::Context(_)
            | ChatEvent::Failed(_)
            | ChatEvent::Finished { .. } => {}
        }
        match event {
            // the text sent so far remains valid: the client sees a truncated answer
            ChatEvent::Failed(Refusal::KvReclaimed { generated, .. }) if self.any_text => {
                self.usage.completion_tokens = generated;
                ChatEvent::Finished {
                    reason: FinishReason::Length,
                    usage: self.usage,
                }
            }
            event => event,
        }
    }
}

/// The failure of an engine that ends a stream without an end event.
pub(super) fn ended_silently() -> Refusal {
    Refusal::EngineLost {
        reason: "it ended the answer without a result".to_owned(),
        retry_after: RETRY_AFTER_DEFAULT,
    }
}

/// The complete output of the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    pub(super) reasoning: String,
    pub(super) text: String,
    /// Names and arguments of the called tools.
    pub(super) calls: Vec<(String, String)>,
    /// From the request to the first part.
    pub(super) first_after: Option<Duration>,
    /// The tokens of prompt and answer, if requested.
    pub(super) context: Option<Vec<u32>>,
}

impl Said {
    pub(super) fn push(&mut self, part: AnswerPart) {
        match part {
            AnswerPart::Reasoning(piece) => self.reasoning.push_str(&piece),
            AnswerPart::Text(piece) => self.text.push_str(&piece),
            AnswerPart::ToolCall { name, arguments } => self.calls.push((name, arguments)),
        }
    }
}

pub(super) async fn collected(
    mut generation: Generation,
) -> Result<(Said, FinishReason, Usage), Refusal> {
    let mut said = Said::default();
    loop {
        match generation.next().await {
            ChatEvent::Started { .. } => {}
            ChatEvent::Part(part) => {
                said.first_after
                    .get_or_insert_with(|| generation.began.elapsed());
                said.push(part);
            }
            ChatEvent::Context(tokens) => said.context = Some(tokens),
            ChatEvent::Finished { reason, usage } => return Ok((said, reason, usage)),
            ChatEvent::Failed(refusal) => return Err(refusal),
        }
    }
}
