//! Handler of `POST /v1/chat/completions`, and its writer.

use std::time::Instant;

use axum::{
    Extension,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{
    answer::{Writer, answer, read_json},
    api::{Api, Meta, unix_seconds},
    backend::{AnswerPart, FinishReason, Usage},
    chat_wire::WireRequest,
    fault::Fault,
    generation::Said,
    models::{fingerprint, model_named},
    stream::{Payload, ignored_of, merged},
};
use cotenant_policy::kv_type::KvType;
use cotenant_units::Tokens;

pub(super) async fn completions(
    State(api): State<Api>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, Fault> {
    let began = Instant::now();
    let (wire, _memory): (WireRequest, _) = read_json(&api, request).await?;
    let model = model_named(&api, wire.model.as_deref())?;
    let writer = ChatWriter {
        id: api.fresh_id("chatcmpl-"),
        created: unix_seconds(),
        fingerprint: fingerprint(&api, &model),
        model: model.clone(),
        include_usage: wire.include_usage(),
        calls: 0,
    };
    let ignored = wire.ignored();
    let request = wire.into_request(meta, model)?;
    let ignored = ignored_of(ignored, &request);
    Ok((ignored, answer(api, request, writer, began).await?).into_response())
}

/// Writes the answer to one request; all chunks share id and time.
struct ChatWriter {
    id: String,
    created: u64,
    fingerprint: String,
    model: String,
    include_usage: bool,
    calls: usize,
}

impl ChatWriter {
    fn choice(&self, delta: &Value, reason: Option<FinishReason>) -> Payload {
        let choice = json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason.map(reason_text)}]);
        self.chunk(&choice, self.include_usage.then_some(Value::Null))
    }

    fn chunk(&self, choices: &Value, usage: Option<Value>) -> Payload {
        let chunk = json!({
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        });
        let usage = usage.map_or(Value::Null, |usage| json!({"usage": usage}));
        Payload::from(&merged(chunk, usage))
    }
}

impl Writer for ChatWriter {
    fn begin(&mut self, _prompt: Usage) -> Vec<Payload> {
        vec![self.choice(&json!({"role": "assistant", "content": ""}), None)]
    }

    fn part(&mut self, part: AnswerPart) -> Vec<Payload> {
        match part {
            AnswerPart::Text(text) => vec![self.choice(&json!({"content": text}), None)],
            AnswerPart::Reasoning(text) => {
                vec![self.choice(&json!({"reasoning_content": text}), None)]
            }
            // first the name, then the arguments
            AnswerPart::ToolCall { name, arguments } => {
                let index = self.calls;
                self.calls += 1;
                let begun = json!({
                    "index": index,
                    "id": call_id(&self.id, index),
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                });
                let arguments = json!({"index": index, "function": {"arguments": arguments}});
                [begun, arguments]
                    .map(|call| self.choice(&json!({"tool_calls": [call]}), None))
                    .into()
            }
        }
    }

    /// The end of the text, then, if requested, a chunk without choices for the usage.
    fn end(&mut self, reason: FinishReason, usage: Usage) -> Vec<Payload> {
        let mut payloads = vec![self.choice(&json!({}), Some(reason))];
        if self.include_usage {
            payloads.push(self.chunk(&json!([]), Some(usage_json(usage))));
        }
        payloads.push(Payload::done());
        payloads
    }

    fn whole(self, said: Said, reason: FinishReason, usage: Usage) -> Value {
        // as in OpenAI's API: an answer with only tool calls has no content
        let silent = said.text.is_empty() && !said.calls.is_empty();
        let text = Some(said.text).filter(|_| !silent);
        let mut message = json!({"role": "assistant", "content": text});
        if !said.reasoning.is_empty() {
            message = merged(message, json!({"reasoning_content": said.reasoning}));
        }
        if !said.calls.is_empty() {
            let calls = said.calls.iter().enumerate();
            let calls = calls.map(|(index, (name, arguments))| {
                json!({
                    "id": call_id(&self.id, index),
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                })
            });
            message = merged(message, json!({"tool_calls": calls.collect::<Value>()}));
        }
        json!({
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": [{
                "index": 0,
                "message": message,
                "logprobs": null,
                "finish_reason": reason_text(reason),
            }],
            "usage": usage_json(usage),
        })
    }
}

/// The id of a call, unique like the id of its answer.
pub(super) fn call_id(answer: &str, index: usize) -> String {
    id_of("call_", answer, index)
}

/// The id of a part of an answer.
pub(super) fn id_of(prefix: &str, answer: &str, index: usize) -> String {
    let own = answer.rsplit(['-', '_']).next().unwrap_or(answer);
    format!("{prefix}{own}{index:02x}")
}

pub(super) const fn reason_text(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        FinishReason::Stop | FinishReason::StopText(_) => "stop",
        FinishReason::ToolCalls => "tool_calls",
    }
}

pub(super) fn usage_json(usage: Usage) -> Value {
    let (prompt, completion) = (usage.prompt_tokens.get(), usage.completion_tokens.get());
    let json = json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": u64::from(prompt) + u64::from(completion),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens.get()},
    });
    merged(json, shed_from(usage))
}

/// Our extension of the usage, present only if a shortage of memory affected the answer.
pub(super) fn shed_from(usage: Usage) -> Value {
    let mut shed = json!({});
    if usage.kv_type != KvType::F16 {
        shed = merged(shed, json!({"kv_type": usage.kv_type.word()}));
    }
    if usage.dropped_tokens > Tokens::ZERO {
        shed = merged(
            shed,
            json!({"kv_dropped_tokens": usage.dropped_tokens.get()}),
        );
    }
    shed
}
