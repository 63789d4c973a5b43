//! OpenAI's Responses API: `POST /v1/responses` and `POST /v1/responses/input_tokens`.

use std::time::Instant;

use axum::{
    Extension, Json,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{
    answer::{Writer, answer, read_json},
    api::{Api, Meta, unix_seconds},
    backend::{AnswerPart, FinishReason, Prompt, Usage},
    chat::{call_id, id_of, shed_from},
    fault::Fault,
    generation::Said,
    models::model_named,
    numbers::Whole,
    responses_wire::WireRequest,
    stream::{Payload, ignored_of, merged},
    tokens::tokenizer,
};

pub(super) async fn responses(
    State(api): State<Api>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, Fault> {
    let began = Instant::now();
    let (mut wire, _memory): (WireRequest, _) = read_json(&api, request).await?;
    let model = model_named(&api, wire.model.as_deref())?;
    let ignored = wire.ignored();
    let request = wire.request(meta, model.clone())?;
    let ignored = ignored_of(ignored, &request);
    let writer = ResponseWriter::new(api.fresh_id("resp_"), &model, wire);
    let answered = answer(api, request, writer, began).await;
    let answered = answered.map_err(|fault| fault.input_named("input"))?;
    Ok((ignored, answered).into_response())
}

pub(super) async fn input_tokens(
    State(api): State<Api>,
    request: Request,
) -> Result<Json<Value>, Fault> {
    let (mut wire, _memory): (WireRequest, _) = read_json(&api, request).await?;
    model_named(&api, wire.model.as_deref())?;
    let prompt = Prompt::Chat(wire.conversation()?);
    let count = tokenizer(&api)?.count(prompt).await;
    let count = count.map_err(|refusal| Fault::from(refusal).input_named("input"))?;
    Ok(Json(
        json!({"object": "response.input_tokens", "input_tokens": count.get()}),
    ))
}

/// The output item to which text is being appended.
struct Open {
    kind: Kind,
    id: String,
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Message,
    Reasoning,
}

impl Open {
    fn part(&self) -> Value {
        match self.kind {
            Kind::Message => {
                json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": []})
            }
            Kind::Reasoning => json!({"type": "reasoning_text", "text": self.text}),
        }
    }

    fn item(&self, status: &str, content: &[Value]) -> Value {
        match self.kind {
            Kind::Message => json!({
                "id": self.id, "type": "message", "status": status, "role": "assistant", "content": content,
            }),
            Kind::Reasoning => json!({
                "id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content,
            }),
        }
    }
}

struct ResponseWriter {
    id: String,
    /// The response as known at its start.
    response: Value,
    sequence: u64,
    open: Option<Open>,
    output: Vec<Value>,
    calls: usize,
}

impl ResponseWriter {
    fn new(id: String, model: &str, wire: WireRequest) -> Self {
        let format = wire
            .text
            .as_ref()
            .and_then(|text| text.get("format"))
            .filter(|format| !format.is_null());
        let effort = wire.effort().cloned();
        let response = json!({
            "id": id,
            "object": "response",
            "created_at": unix_seconds(),
            "status": "in_progress",
            "background": false,
            "error": null,
            "incomplete_details": null,
            "instructions": wire.instructions,
            "max_output_tokens": wire.max_output_tokens.map(Whole::get),
            "metadata": wire.metadata.unwrap_or_else(|| json!({})),
            "model": model,
            "output": [],
            "parallel_tool_calls": wire.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": null,
            "reasoning": {"effort": effort, "summary": null},
            "store": false,
            "temperature": wire.temperature,
            "text": {"format": format.cloned().unwrap_or_else(|| json!({"type": "text"}))},
            "tool_choice": wire.tool_choice.filter(|choice| !choice.is_null()).unwrap_or_else(|| json!("auto")),
            "tools": wire.tools.unwrap_or_default(),
            "top_p": wire.top_p,
            "truncation": "disabled",
            "usage": null,
        });
        Self {
            id,
            response,
            sequence: 0,
            open: None,
            output: Vec::new(),
            calls: 0,
        }
    }

    fn event(&mut self, name: &'static str, data: Value) -> Payload {
        let of_event = json!({"type": name, "sequence_number": self.sequence});
        self.sequence += 1;
        Payload::named(name, &merged(data, of_event))
    }

    /// An event of the next output item.
    fn item_event(&mut self, name: &'static str, id: &str, data: Value) -> Payload {
        let of_item = json!({"item_id": id, "output_index": self.output.len()});
        self.event(name, merged(data, of_item))
    }

    fn output_event(&mut self, name: &'static str, item: &Value) -> Payload {
        let index = self.output.len();
        self.event(name, json!({"output_index": index, "item": item}))
    }

    /// Opens an item, unless it is open.
    fn opened(&mut self, kind: Kind, payloads: &mut Vec<Payload>) {
        if self.open.as_ref().is_some_and(|open| open.kind == kind) {
            return;
        }
        self.closed("completed", payloads);
        let prefix = match kind {
            Kind::Message => "msg_",
            Kind::Reasoning => "rs_",
        };
        let open = Open {
            kind,
            id: id_of(prefix, &self.id, self.output.len()),
            text: String::new(),
        };
        payloads
            .push(self.output_event("response.output_item.added", &open.item("in_progress", &[])));
        payloads.push(self.item_event(
            "response.content_part.added",
            &open.id,
            json!({"content_index": 0, "part": open.part()}),
        ));
        self.open = Some(open);
    }

    fn closed(&mut self, status: &str, payloads: &mut Vec<Payload>) {
        let Some(open) = self.open.take() else {
            return;
        };
        let done = match open.kind {
            Kind::Message => self.item_event(
                "response.output_text.done",
                &open.id,
                json!({"content_index": 0, "text": open.text, "logprobs": []}),
            ),
            Kind::Reasoning => self.item_event(
                "response.reasoning_text.done",
                &open.id,
                json!({"content_index": 0, "text": open.text}),
            ),
        };
        payloads.push(done);
        let part = open.part();
        payloads.push(self.item_event(
            "response.content_part.done",
            &open.id,
            json!({"content_index": 0, "part": part}),
        ));
        let item = open.item(status, &[part]);
        payloads.push(self.output_event("response.output_item.done", &item));
        self.output.push(item);
    }

    fn text(&mut self, kind: Kind, piece: &str) -> Vec<Payload> {
        let mut payloads = Vec::new();
        self.opened(kind, &mut payloads);
        if let Some(mut open) = self.open.take() {
            open.text.push_str(piece);
            payloads.push(match kind {
                Kind::Message => self.item_event(
                    "response.output_text.delta",
                    &open.id,
                    json!({"content_index": 0, "delta": piece, "logprobs": []}),
                ),
                Kind::Reasoning => self.item_event(
                    "response.reasoning_text.delta",
                    &open.id,
                    json!({"content_index": 0, "delta": piece}),
                ),
            });
            self.open = Some(open);
        }
        payloads
    }

    fn call(&mut self, name: &str, arguments: &str) -> Vec<Payload> {
        let mut payloads = Vec::new();
        self.closed("completed", &mut payloads);
        let id = id_of("fc_", &self.id, self.output.len());
        let call = call_id(&self.id, self.calls);
        self.calls += 1;
        let item = |status: &str, arguments: &str| {
            json!({
                "id": id, "type": "function_call", "status": status, "call_id": call, "name": name,
                "arguments": arguments,
            })
        };
        payloads.push(self.output_event("response.output_item.added", &item("in_progress", "")));
        payloads.push(self.item_event(
            "response.function_call_arguments.delta",
            &id,
            json!({"delta": arguments}),
        ));
        payloads.push(self.item_event(
            "response.function_call_arguments.done",
            &id,
            json!({"name": name, "arguments": arguments}),
        ));
        // a call truncated by the length limit is not a complete object
        let whole = serde_json::from_str::<serde_json::Map<String, Value>>(arguments).is_ok();
        let done = item(if whole { "completed" } else { "incomplete" }, arguments);
        payloads.push(self.output_event("response.output_item.done", &done));
        self.output.push(done);
        payloads
    }

    /// The response in its current state.
    fn now(&self, changes: Value) -> Value {
        let response = merged(self.response.clone(), json!({"output": self.output}));
        merged(response, changes)
    }

    fn ended(
        &mut self,
        reason: FinishReason,
        usage: Usage,
        payloads: &mut Vec<Payload>,
    ) -> (&'static str, Value) {
        let cut = reason == FinishReason::Length;
        self.closed(if cut { "incomplete" } else { "completed" }, payloads);
        let (name, changes) = if cut {
            let details = json!({"reason": "max_output_tokens"});
            let changes = json!({"status": "incomplete", "incomplete_details": details});
            ("response.incomplete", changes)
        } else {
            let changes = json!({"status": "completed", "completed_at": unix_seconds()});
            ("response.completed", changes)
        };
        let usage = json!({"usage": usage_json(usage)});
        (name, self.now(merged(changes, usage)))
    }
}

impl Writer for ResponseWriter {
    fn begin(&mut self, _prompt: Usage) -> Vec<Payload> {
        let response = self.now(Value::Null);
        ["response.created", "response.in_progress"]
            .map(|name| self.event(name, json!({"response": response})))
            .into()
    }

    fn part(&mut self, part: AnswerPart) -> Vec<Payload> {
        match part {
            AnswerPart::Text(text) => self.text(Kind::Message, &text),
            AnswerPart::Reasoning(text) => self.text(Kind::Reasoning, &text),
            AnswerPart::ToolCall { name, arguments } => self.call(&name, &arguments),
        }
    }

    fn end(&mut self, reason: FinishReason, usage: Usage) -> Vec<Payload> {
        let mut payloads = Vec::new();
        let (name, response) = self.ended(reason, usage, &mut payloads);
        payloads.push(self.event(name, json!({"response": response})));
        payloads
    }

    /// Clients read either the response or an event `error`, some only the object in it.
    fn fail(&mut self, fault: &Fault) -> Vec<Payload> {
        let mut payloads = Vec::new();
        self.closed("incomplete", &mut payloads);
        let error = json!({"code": "server_error", "message": fault.message()});
        let response = self.now(json!({"status": "failed", "error": error}));
        payloads.push(self.event("response.failed", json!({"response": response})));
        let flat = json!({"code": fault.code(), "message": fault.message(), "param": null});
        payloads.push(self.event("error", merged(fault.to_json(), flat)));
        payloads
    }

    fn whole(mut self, said: Said, reason: FinishReason, usage: Usage) -> Value {
        if !said.reasoning.is_empty() {
            self.text(Kind::Reasoning, &said.reasoning);
        }
        if !said.text.is_empty() {
            self.text(Kind::Message, &said.text);
        }
        for (name, arguments) in &said.calls {
            self.call(name, arguments);
        }
        self.ended(reason, usage, &mut Vec::new()).1
    }
}

fn usage_json(usage: Usage) -> Value {
    let (input, output) = (usage.prompt_tokens.get(), usage.completion_tokens.get());
    let json = json!({
        "input_tokens": input,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens.get(), "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": u64::from(input) + u64::from(output),
    });
    merged(json, shed_from(usage))
}
