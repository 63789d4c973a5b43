//! One generation, as every HTTP API follows it.

use std::time::Instant;

use futures_util::StreamExt;

use super::{
    backend::{ChatEvent, ChatStream, FinishReason, ToolCall, Usage},
    chat_writer::Said,
    doors::Doors,
};
use crate::policy::refusal::{RETRY_AFTER_DEFAULT, Refusal};

/// One generation as the doors follow it: what was said, and what it took so far.
pub(super) struct Generation {
    events: ChatStream,
    usage: Usage,
    any_text: bool,
    doors: Doors,
    began: Instant,
}

/// What follows next in a generation.
pub(super) enum Next {
    Reasoning(String),
    Text(String),
    Call(ToolCall),
    End(FinishReason, Usage),
    Failed(Refusal),
}

impl Generation {
    pub(super) fn new(events: ChatStream, began: Instant, doors: &Doors) -> Self {
        Self {
            events,
            usage: Usage::default(),
            any_text: false,
            doors: doors.clone(),
            began,
        }
    }

    pub(super) async fn next(&mut self) -> Next {
        loop {
            match self.events.next().await {
                Some(ChatEvent::Started {
                    prompt_tokens,
                    cached_tokens,
                }) => {
                    self.usage.prompt_tokens = prompt_tokens;
                    self.usage.cached_tokens = cached_tokens;
                }
                Some(ChatEvent::Delta(text) | ChatEvent::Reasoning(text)) if text.is_empty() => {}
                Some(ChatEvent::Delta(text)) => {
                    self.first();
                    return Next::Text(text);
                }
                Some(ChatEvent::Reasoning(text)) => {
                    self.first();
                    return Next::Reasoning(text);
                }
                Some(ChatEvent::ToolCall { name, arguments }) => {
                    self.first();
                    let id = self.doors.fresh_id("call_");
                    return Next::Call(ToolCall { id, name, arguments });
                }
                Some(ChatEvent::Finished { reason, usage }) => {
                    self.doors.backends().status.tokens(usage);
                    return Next::End(reason, usage);
                }
                // what has been said stands: the client sees an answer that was cut short
                Some(ChatEvent::Failed(Refusal::KvReclaimed { generated, .. })) if self.any_text => {
                    self.usage.completion_tokens = generated;
                    self.doors.backends().status.tokens(self.usage);
                    return Next::End(FinishReason::Length, self.usage);
                }
                Some(ChatEvent::Failed(refusal)) => return Next::Failed(refusal),
                None => {
                    return Next::Failed(Refusal::EngineLost {
                        reason: "it ended the answer without a word".to_owned(),
                        retry_after: RETRY_AFTER_DEFAULT,
                    });
                }
            }
        }
    }

    /// Takes note of the first of the answer.
    fn first(&mut self) {
        if !self.any_text {
            self.any_text = true;
            self.doors.backends().status.first_token(self.began.elapsed());
        }
    }
}

/// All of an answer.
pub(super) async fn collected(mut generation: Generation) -> Result<(Said, FinishReason, Usage), Refusal> {
    let mut said = Said::default();
    loop {
        match generation.next().await {
            Next::Reasoning(piece) => said.reasoning.push_str(&piece),
            Next::Text(piece) => said.text.push_str(&piece),
            Next::Call(call) => said.tool_calls.push(call),
            Next::End(reason, usage) => return Ok((said, reason, usage)),
            Next::Failed(refusal) => return Err(refusal),
        }
    }
}
