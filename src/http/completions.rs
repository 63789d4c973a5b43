//! `POST /v1/completions`: text that goes on, without the model's template.

use std::time::Instant;

use axum::{
    Extension,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    answer::{Writer, answer, read_json},
    api::{Api, Meta, unix_seconds},
    backend::{AnswerPart, ChatRequest, FinishReason, Prompt, RequestMeta, Usage},
    chat::{reason_text, usage_json},
    chat_wire::{OPENAI_STOP_TEXTS, answer_limit, is_set, named, refuse_other_forms, stop_texts},
    fault::{Fault, InputNamed as _},
    generation::Said,
    models::{fingerprint, model_named},
    numbers::Whole,
    sampling::{SamplingDialect, SamplingFields},
    stream::{Payload, ignored_header},
};

/// `POST /v1/completions`.
pub(super) async fn completions(
    State(api): State<Api>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, Fault> {
    let began = Instant::now();
    let (wire, _memory): (WireRequest, _) = read_json(&api, request).await?;
    let model = model_named(&api, wire.model.as_deref())?;
    let ignored = ignored_header(&wire.ignored());
    let include_usage = wire
        .stream_options
        .as_ref()
        .and_then(|options| options.include_usage);
    let (request, echo) = wire.into_request(meta, model.clone())?;
    let writer = CompletionWriter {
        id: api.fresh_id("cmpl-"),
        created: unix_seconds(),
        fingerprint: fingerprint(&api, &model),
        model,
        include_usage: include_usage == Some(true),
        echo,
    };
    let answered = answer(api, request, writer, began)
        .await
        .input_named("prompt")?;
    Ok((ignored, answered).into_response())
}

#[derive(Debug, Deserialize)]
struct WireRequest {
    model: Option<String>,
    prompt: Value,
    suffix: Option<String>,
    max_tokens: Option<Whole>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<Whole>,
    n: Option<Whole>,
    best_of: Option<Whole>,
    #[serde(default)]
    stream: Option<bool>,
    stream_options: Option<WireStreamOptions>,
    logprobs: Option<Whole>,
    echo: Option<bool>,
    stop: Option<Value>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    logit_bias: Option<Value>,
    ignore_eos: Option<Value>,
    min_p: Option<f64>,
    min_tokens: Option<Value>,
    repeat_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    response_format: Option<Value>,
    seed: Option<Whole>,
    grammar: Option<Value>,
    guided_choice: Option<Value>,
    guided_grammar: Option<Value>,
    guided_json: Option<Value>,
    guided_regex: Option<Value>,
    json_schema: Option<Value>,
    structured_outputs: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct WireStreamOptions {
    include_usage: Option<bool>,
}

impl WireRequest {
    fn ignored(&self) -> Vec<&'static str> {
        named([
            ("ignore_eos", is_set(self.ignore_eos.as_ref())),
            ("logit_bias", is_set(self.logit_bias.as_ref())),
            ("min_tokens", is_set(self.min_tokens.as_ref())),
            ("response_format", is_set(self.response_format.as_ref())),
        ])
    }

    /// The request in plain values, and the text that goes before the answer.
    fn into_request(
        self,
        meta: RequestMeta,
        model: String,
    ) -> Result<(ChatRequest, String), Fault> {
        for (field, number) in [("n", self.n), ("best_of", self.best_of)] {
            if let Some(number) = number.filter(|number| number.get() != 1) {
                return Err(Fault::invalid(
                    field,
                    number,
                    "is not supported: one answer per request",
                ));
            }
        }
        if let Some(number) = self.logprobs {
            return Err(Fault::invalid(
                "logprobs",
                number,
                "is not supported: probabilities are not kept",
            ));
        }
        if let Some(suffix) = self.suffix.filter(|suffix| !suffix.is_empty()) {
            return Err(Fault::invalid(
                "suffix",
                suffix,
                "is not supported: text is only added at the end",
            ));
        }
        refuse_other_forms([
            ("grammar", &self.grammar),
            ("guided_choice", &self.guided_choice),
            ("guided_grammar", &self.guided_grammar),
            ("guided_json", &self.guided_json),
            ("guided_regex", &self.guided_regex),
            ("json_schema", &self.json_schema),
            ("structured_outputs", &self.structured_outputs),
        ])?;
        let prompt = one_prompt(self.prompt)?;
        let echo = match (self.echo, &prompt) {
            (Some(true), Prompt::Text(text)) => text.clone(),
            (Some(true), _) => {
                return Err(Fault::invalid(
                    "echo",
                    true,
                    "is not supported for a prompt of tokens",
                ));
            }
            _ => String::new(),
        };
        let sampling = SamplingFields {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            repeat_penalty: self.repetition_penalty.or(self.repeat_penalty),
            seed: self.seed,
        };
        let request = ChatRequest {
            meta,
            model,
            prompt,
            max_tokens: answer_limit("max_tokens", self.max_tokens)?,
            sampling: SamplingDialect::OPENAI.read(&sampling)?,
            stop: stop_texts("stop", self.stop, OPENAI_STOP_TEXTS)?,
            streamed: self.stream == Some(true),
            ..ChatRequest::default()
        };
        Ok((request, echo))
    }
}

/// The prompt: a text, tokens, or a list of one of them.
fn one_prompt(prompt: Value) -> Result<Prompt, Fault> {
    match prompt {
        Value::String(text) if text.is_empty() => Err(Fault::invalid("prompt", text, "is empty")),
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(list) if list.is_empty() => Err(Fault::invalid("prompt", "[]", "is empty")),
        Value::Array(list) if list.iter().all(Value::is_number) => {
            let token = |token: Value| {
                let number = Whole::of(&token).and_then(Whole::to);
                number.ok_or_else(|| Fault::invalid("prompt", token, "is not a token"))
            };
            Ok(Prompt::Tokens(
                list.into_iter().map(token).collect::<Result<_, Fault>>()?,
            ))
        }
        Value::Array(list) if list.len() > 1 => Err(Fault::invalid(
            "prompt",
            format!("{} prompts", list.len()),
            "is above the limit of 1: one answer per request",
        )),
        Value::Array(list) => match list.into_iter().next() {
            Some(prompt @ Value::String(_)) => one_prompt(prompt),
            Some(Value::Array(tokens)) if tokens.iter().all(Value::is_number) => {
                one_prompt(Value::Array(tokens))
            }
            other => Err(Fault::invalid(
                "prompt",
                other.unwrap_or_default(),
                "is neither a text nor a list of tokens",
            )),
        },
        other => Err(Fault::invalid(
            "prompt",
            other,
            "is neither a text nor a list of tokens",
        )),
    }
}

/// Writes the answer to one request.
struct CompletionWriter {
    id: String,
    created: u64,
    fingerprint: String,
    model: String,
    include_usage: bool,
    /// What goes before the answer.
    echo: String,
}

impl CompletionWriter {
    fn text(&self, text: &str, reason: Option<FinishReason>) -> Map<String, Value> {
        let reason = reason.map(reason_text);
        self.object(&json!([{"text": text, "index": 0, "logprobs": null, "finish_reason": reason}]))
    }

    fn object(&self, choices: &Value) -> Map<String, Value> {
        let object = json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        });
        match object {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }

    fn chunk(&self, mut object: Map<String, Value>, usage: Option<Usage>) -> Payload {
        if self.include_usage {
            object.insert("usage".to_owned(), usage.map_or(Value::Null, usage_json));
        }
        Payload::from(&Value::Object(object))
    }
}

impl Writer for CompletionWriter {
    fn begin(&mut self, _prompt: Usage) -> Vec<Payload> {
        vec![self.chunk(self.text(&self.echo, None), None)]
    }

    fn part(&mut self, part: AnswerPart) -> Vec<Payload> {
        match part {
            AnswerPart::Text(text) => vec![self.chunk(self.text(&text, None), None)],
            // without a template there are neither thoughts nor tools
            AnswerPart::Reasoning(_) | AnswerPart::ToolCall { .. } => Vec::new(),
        }
    }

    fn end(&mut self, reason: FinishReason, usage: Usage) -> Vec<Payload> {
        let mut payloads = vec![self.chunk(self.text("", Some(reason)), None)];
        if self.include_usage {
            payloads.push(self.chunk(self.object(&json!([])), Some(usage)));
        }
        payloads.push(Payload::done());
        payloads
    }

    fn fail(&mut self, fault: &Fault) -> Vec<Payload> {
        vec![Payload::from(&fault.to_json())]
    }

    fn whole(self, said: Said, reason: FinishReason, usage: Usage) -> Value {
        let mut object = self.text(&(self.echo.clone() + &said.text), Some(reason));
        object.insert("usage".to_owned(), usage_json(usage));
        Value::Object(object)
    }
}
