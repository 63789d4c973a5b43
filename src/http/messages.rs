//! Anthropic's API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

use std::time::Instant;

use axum::{
    Extension, Json,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, StatusCode},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{
    answer::{Writer, answer, read_json},
    api::{Api, Meta},
    backend::{AnswerPart, FinishReason, Prompt, Usage},
    chat::{id_of, shed_from},
    fault::{Fault, invalid},
    generation::Said,
    messages_wire::WireRequest,
    models::model_named,
    stream::{Payload, ignored_of, merged},
    tokens::tokenizer,
};

pub(super) async fn messages(
    State(api): State<Api>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, MessagesFault> {
    let began = Instant::now();
    check_version(request.headers())?;
    let (wire, _memory): (WireRequest, _) = read_json(&api, request).await?;
    let model = model_named(&api, Some(&wire.model))?;
    let ignored = wire.ignored();
    let thinks = wire.thinks();
    let request = wire.into_request(meta, model.clone())?;
    let writer = MessageWriter {
        id: api.fresh_id("msg_"),
        model,
        thinks,
        stop: request.stop.clone(),
        open: None,
        blocks: 0,
        calls: 0,
    };
    let ignored = ignored_of(ignored, &request);
    Ok((ignored, answer(api, request, writer, began).await?).into_response())
}

pub(super) async fn count_tokens(
    State(api): State<Api>,
    Extension(_meta): Meta,
    request: Request,
) -> Result<Response, MessagesFault> {
    check_version(request.headers())?;
    let (mut wire, _memory): (WireRequest, _) = read_json(&api, request).await?;
    model_named(&api, Some(&wire.model))?;
    let conversation = wire.conversation()?;
    let count = tokenizer(&api)?.count(Prompt::Chat(conversation)).await?;
    Ok(Json(json!({"input_tokens": count.get()})).into_response())
}

/// Refuses unknown versions of the API. The newer of the known ones lacks `temperature`, `top_p` and `top_k`, which are
/// accepted with both.
fn check_version(headers: &HeaderMap) -> Result<(), Fault> {
    let version = headers
        .get(VERSION_HEADER)
        .map(|value| String::from_utf8_lossy(value.as_bytes()));
    match version {
        Some(version) if !VERSIONS.contains(&version.as_ref()) => invalid(
            VERSION_HEADER.as_str(),
            version,
            format!("is not one of `{}`", VERSIONS.join("`, `")),
        ),
        _ => Ok(()),
    }
}

/// A failure in Anthropic's form: `{"type": "error", "error": {"type", "message"}}`.
pub(super) struct MessagesFault(Fault);

impl<F: Into<Fault>> From<F> for MessagesFault {
    fn from(fault: F) -> Self {
        Self(fault.into())
    }
}

impl IntoResponse for MessagesFault {
    fn into_response(self) -> Response {
        let (status, body) = of_fault(&self.0);
        (status, self.0.retry_headers(), Json(body)).into_response()
    }
}

fn of_fault(fault: &Fault) -> (StatusCode, Value) {
    let (status, kind) = match fault.status() {
        // temporary refusals count as overload, except for our own faults
        StatusCode::SERVICE_UNAVAILABLE if fault.passes() && !fault.code().ends_with("_lost") => {
            (overloaded(), "overloaded_error")
        }
        StatusCode::SERVICE_UNAVAILABLE | StatusCode::INTERNAL_SERVER_ERROR => {
            (StatusCode::INTERNAL_SERVER_ERROR, "api_error")
        }
        status @ StatusCode::TOO_MANY_REQUESTS => (status, "rate_limit_error"),
        status @ StatusCode::NOT_FOUND => (status, "not_found_error"),
        status @ StatusCode::UNAUTHORIZED => (status, "authentication_error"),
        status @ StatusCode::FORBIDDEN => (status, "permission_error"),
        status @ StatusCode::PAYLOAD_TOO_LARGE => (status, "request_too_large"),
        status => (status, "invalid_request_error"),
    };
    // Clients detect this error by Anthropic's wording.
    let message = match fault.code() {
        "context_length_exceeded" => format!("prompt is too long: {}", fault.message()),
        _ => fault.message().to_owned(),
    };
    let error = json!({"type": kind, "message": message, "code": fault.code()});
    (status, json!({"type": "error", "error": error}))
}

fn overloaded() -> StatusCode {
    StatusCode::from_u16(529).unwrap_or(StatusCode::SERVICE_UNAVAILABLE)
}

/// The open content block of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Text,
    Thinking,
}

struct MessageWriter {
    id: String,
    model: String,
    /// Whether reasoning is sent to the client.
    thinks: bool,
    stop: Vec<String>,
    open: Option<Block>,
    blocks: usize,
    calls: usize,
}

impl MessageWriter {
    fn message(&self, content: &Value, ended: Option<FinishReason>, usage: Usage) -> Value {
        let (reason, sequence) =
            ended.map_or((Value::Null, Value::Null), |reason| self.reason(reason));
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage_json(usage),
        })
    }

    fn reason(&self, reason: FinishReason) -> (Value, Value) {
        match reason {
            FinishReason::Length => (json!("max_tokens"), Value::Null),
            FinishReason::Stop => (json!("end_turn"), Value::Null),
            FinishReason::StopText(place) => (json!("stop_sequence"), json!(self.stop.get(place))),
            FinishReason::ToolCalls => (json!("tool_use"), Value::Null),
        }
    }

    fn delta(&self, delta: &Value) -> Payload {
        let index = self.blocks.saturating_sub(1);
        event(
            "content_block_delta",
            json!({"index": index, "delta": delta}),
        )
    }

    /// Opens a block, unless it is open.
    fn opened(&mut self, block: Block, payloads: &mut Vec<Payload>) {
        if self.open == Some(block) {
            return;
        }
        self.closed(payloads);
        self.open = Some(block);
        let content = match block {
            Block::Text => json!({"type": "text", "text": "", "citations": null}),
            Block::Thinking => json!({"type": "thinking", "thinking": "", "signature": ""}),
        };
        payloads.push(self.start(&content));
    }

    fn start(&mut self, content: &Value) -> Payload {
        let index = self.blocks;
        self.blocks += 1;
        let block = json!({"index": index, "content_block": content});
        event("content_block_start", block)
    }

    fn stop(&self) -> Payload {
        let index = self.blocks.saturating_sub(1);
        event("content_block_stop", json!({"index": index}))
    }

    fn closed(&mut self, payloads: &mut Vec<Payload>) {
        if self.open.take().is_some() {
            payloads.push(self.stop());
        }
    }

    /// A tool call; `None` for one truncated by the length limit, whose input is not an object.
    fn call(&mut self, name: &str, arguments: &str) -> Option<Value> {
        let input: Value = serde_json::from_str(arguments).ok()?;
        let id = id_of("toolu_", &self.id, self.calls);
        self.calls += 1;
        Some(json!({"type": "tool_use", "id": id, "name": name, "input": input}))
    }
}

impl Writer for MessageWriter {
    fn begin(&mut self, prompt: Usage) -> Vec<Payload> {
        let message = self.message(&json!([]), None, prompt);
        vec![event("message_start", json!({"message": message}))]
    }

    fn part(&mut self, part: AnswerPart) -> Vec<Payload> {
        let mut payloads = Vec::new();
        match part {
            AnswerPart::Text(text) => {
                self.opened(Block::Text, &mut payloads);
                payloads.push(self.delta(&json!({"type": "text_delta", "text": text})));
            }
            AnswerPart::Reasoning(text) if self.thinks => {
                self.opened(Block::Thinking, &mut payloads);
                payloads.push(self.delta(&json!({"type": "thinking_delta", "thinking": text})));
            }
            AnswerPart::Reasoning(_) => {}
            AnswerPart::ToolCall { name, arguments } => {
                if let Some(mut call) = self.call(&name, &arguments) {
                    self.closed(&mut payloads);
                    if let Some(input) = call.get_mut("input") {
                        *input = json!({});
                    }
                    payloads.push(self.start(&call));
                    payloads.push(
                        self.delta(&json!({"type": "input_json_delta", "partial_json": arguments})),
                    );
                    payloads.push(self.stop());
                }
            }
        }
        payloads
    }

    fn end(&mut self, reason: FinishReason, usage: Usage) -> Vec<Payload> {
        let mut payloads = Vec::new();
        self.closed(&mut payloads);
        let (reason, sequence) = self.reason(reason);
        payloads.push(event(
            "message_delta",
            json!({
                "delta": {"stop_reason": reason, "stop_sequence": sequence},
                "usage": usage_json(usage),
            }),
        ));
        payloads.push(event("message_stop", json!({})));
        payloads
    }

    fn fail(&mut self, fault: &Fault) -> Vec<Payload> {
        vec![event("error", of_fault(fault).1)]
    }

    fn whole(mut self, said: Said, reason: FinishReason, usage: Usage) -> Value {
        let mut content = Vec::new();
        if self.thinks && !said.reasoning.is_empty() {
            content.push(json!({"type": "thinking", "thinking": said.reasoning, "signature": ""}));
        }
        if !said.text.is_empty() {
            content.push(json!({"type": "text", "text": said.text, "citations": null}));
        }
        for (name, arguments) in &said.calls {
            content.extend(self.call(name, arguments));
        }
        self.message(&Value::Array(content), Some(reason), usage)
    }
}

/// An event named by its type.
fn event(name: &'static str, data: Value) -> Payload {
    Payload::named(name, &merged(json!({"type": name}), data))
}

/// In this API cached tokens do not count as input.
fn usage_json(usage: Usage) -> Value {
    let fresh = usage
        .prompt_tokens
        .get()
        .saturating_sub(usage.cached_tokens.get());
    let json = json!({
        "input_tokens": fresh,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens.get(),
        "output_tokens": usage.completion_tokens.get(),
    });
    merged(json, shed_from(usage))
}

const VERSION_HEADER: HeaderName = HeaderName::from_static("anthropic-version");
/// Versions in use.
const VERSIONS: [&str; 2] = ["2023-06-01", "2026-10-21"];
