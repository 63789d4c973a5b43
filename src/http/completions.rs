//! Handler of `POST /v1/completions`: continues a text without the model's template.

use std::{collections::VecDeque, time::Instant};

use axum::{
    Extension,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    answer::{Requests, Writer, answer_all, read_json},
    api::{Api, Meta, unix_seconds},
    backend::{AnswerPart, ChatRequest, FinishReason, Prompt, RequestMeta, Usage},
    chat::{reason_text, usage_json},
    chat_wire::{OPENAI_STOP_TEXTS, WireStreamOptions, answer_limit, stop_texts},
    fault::{Fault, invalid},
    fields::{not_honoured, one_answer, refuse_unsupported},
    generation::Said,
    models::{fingerprint, model_named},
    numbers::Whole,
    sampling::{SamplingDialect, SamplingFields},
    stream::{Payload, ignored_header, merged},
};
use cotenant_units::Tokens;

pub(super) async fn completions(
    State(api): State<Api>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, Fault> {
    let began = Instant::now();
    let (wire, _memory): (WireRequest, _) = read_json(&api, request).await?;
    let model = model_named(&api, wire.model.as_deref())?;
    let ignored = ignored_header(&not_honoured("", &wire.unknown));
    let include_usage = WireStreamOptions::include_usage(wire.stream_options.as_ref());
    let (requests, echoes) = wire.into_requests(meta, model.clone())?;
    let writer = CompletionWriter {
        id: api.fresh_id("cmpl-"),
        created: unix_seconds(),
        fingerprint: fingerprint(&api, &model),
        model,
        include_usage,
        echoes,
        choices: Vec::new(),
        index: 0,
        usage: Usage::default(),
    };
    let answered = answer_all(api, requests, writer, began).await?;
    Ok((ignored, answered).into_response())
}

#[derive(Debug, Deserialize)]
struct WireRequest {
    model: Option<String>,
    prompt: Value,
    max_tokens: Option<Whole>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<Whole>,
    n: Option<Whole>,
    best_of: Option<Whole>,
    stream: Option<bool>,
    stream_options: Option<WireStreamOptions>,
    echo: Option<bool>,
    stop: Option<Value>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    min_p: Option<f64>,
    repeat_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    seed: Option<Whole>,
    #[serde(flatten)]
    unknown: Map<String, Value>,
}

impl WireRequest {
    /// One request per prompt, and the text that precedes each answer.
    fn into_requests(
        self,
        mut meta: RequestMeta,
        model: String,
    ) -> Result<(Requests, Vec<String>), Fault> {
        one_answer("n", self.n)?;
        one_answer("best_of", self.best_of)?;
        refuse_unsupported(&self.unknown)?;
        let mut prompts: VecDeque<Prompt> = prompts(self.prompt)?.into();
        let streamed = self.stream == Some(true);
        // A whole response is complete with the last prompt, so each prompt gets a share of the client's patience.
        let parts = u32::try_from(prompts.len()).unwrap_or(u32::MAX).max(1);
        meta.patience = match meta.patience {
            Some(patience) if !streamed => Some(patience / parts),
            patience => patience,
        };
        let echo = |prompt: &Prompt| match prompt {
            Prompt::Text(text) if self.echo == Some(true) => Ok(text.clone()),
            _ if self.echo == Some(true) => invalid(
                "echo",
                true,
                "is not supported for a prompt of tokens: send it as text",
            ),
            _ => Ok(String::new()),
        };
        let echoes = prompts.iter().map(echo).collect::<Result<_, Fault>>()?;
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
        let max_tokens = match self.max_tokens {
            Some(none) if none.get() == 0 => Some(Tokens::ZERO),
            tokens => answer_limit("max_tokens", tokens)?,
        };
        let first = ChatRequest {
            meta,
            model,
            prompt: prompts.pop_front().unwrap_or_default(),
            max_tokens,
            sampling: SamplingDialect::OPENAI.read(&sampling)?,
            stop: stop_texts("stop", self.stop, OPENAI_STOP_TEXTS)?,
            streamed,
            ..ChatRequest::default()
        };
        let rest = prompts.into_iter().zip(1..).map(|(prompt, place)| {
            let mut request = ChatRequest {
                prompt,
                ..first.clone()
            };
            // Equal prompts must get different answers.
            let seed = &mut request.sampling.asked.seed;
            *seed = seed.map(|seed| seed.wrapping_add(place));
            request
        });
        let rest = rest.collect();
        Ok(((first, rest), echoes))
    }
}

/// One prompt, or a list of prompts.
fn prompts(field: Value) -> Result<Vec<Prompt>, Fault> {
    match field {
        Value::Array(list) if list.len() > PROMPTS_MAX && !list.iter().all(Value::is_number) => {
            invalid(
                "prompt",
                format!("{} prompts", list.len()),
                format!("is above the limit of {PROMPTS_MAX}: send the rest in further requests"),
            )
        }
        Value::Array(list) if !list.iter().all(Value::is_number) => {
            let named = list.into_iter().enumerate();
            named
                .map(|(index, prompt)| prompt_of(&format!("prompt[{index}]"), prompt))
                .collect()
        }
        one => Ok(vec![prompt_of("prompt", one)?]),
    }
}

/// A text, or tokens.
fn prompt_of(field: &str, prompt: Value) -> Result<Prompt, Fault> {
    match prompt {
        Value::String(text) if text.is_empty() => invalid(field, text, "is empty"),
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(list) if list.is_empty() => invalid(field, "[]", "is empty"),
        Value::Array(list) if list.iter().all(Value::is_number) => {
            let token = |token: Value| {
                let number = Whole::of(&token).and_then(Whole::to);
                number.ok_or_else(|| Fault::invalid(field, token, "is not a token"))
            };
            Ok(Prompt::Tokens(
                list.into_iter().map(token).collect::<Result<_, Fault>>()?,
            ))
        }
        other => invalid(field, other, "is neither a text nor a list of tokens"),
    }
}

struct CompletionWriter {
    id: String,
    created: u64,
    fingerprint: String,
    model: String,
    include_usage: bool,
    /// Text that precedes each answer.
    echoes: Vec<String>,
    /// Complete answers of a whole response.
    choices: Vec<Value>,
    /// Index of the current prompt.
    index: usize,
    /// Usage of the answers so far.
    usage: Usage,
}

impl CompletionWriter {
    fn choice(&self, text: &str, reason: Option<FinishReason>) -> Value {
        json!({"text": text, "index": self.index, "logprobs": null, "finish_reason": reason.map(reason_text)})
    }

    fn text(&self, text: &str, reason: Option<FinishReason>) -> Payload {
        self.chunk(self.object(&json!([self.choice(text, reason)])), None)
    }

    fn echo(&self) -> &str {
        self.echoes.get(self.index).map_or("", String::as_str)
    }

    fn object(&self, choices: &Value) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        })
    }

    fn chunk(&self, object: Value, usage: Option<Usage>) -> Payload {
        Payload::from(&if self.include_usage {
            merged(object, json!({"usage": usage.map(usage_json)}))
        } else {
            object
        })
    }
}

impl Writer for CompletionWriter {
    fn begin(&mut self, _prompt: Usage) -> Vec<Payload> {
        vec![self.text(self.echo(), None)]
    }

    fn part(&mut self, part: AnswerPart) -> Vec<Payload> {
        match part {
            AnswerPart::Text(text) => vec![self.text(&text, None)],
            // without a template the parser finds neither reasoning nor tool calls
            AnswerPart::Reasoning(_) | AnswerPart::ToolCall { .. } => Vec::new(),
        }
    }

    fn next(&mut self, reason: FinishReason, usage: Usage) -> Vec<Payload> {
        let ended = self.text("", Some(reason));
        self.usage = self.usage.and(usage);
        self.index += 1;
        vec![ended]
    }

    fn end(&mut self, reason: FinishReason, usage: Usage) -> Vec<Payload> {
        let mut payloads = self.next(reason, usage);
        if self.include_usage {
            payloads.push(self.chunk(self.object(&json!([])), Some(self.usage)));
        }
        payloads.push(Payload::done());
        payloads
    }

    fn keep(&mut self, said: Said, reason: FinishReason, usage: Usage) {
        let choice = self.choice(&format!("{}{}", self.echo(), said.text), Some(reason));
        self.choices.push(choice);
        self.usage = self.usage.and(usage);
        self.index += 1;
    }

    fn whole(mut self, said: Said, reason: FinishReason, usage: Usage) -> Value {
        self.keep(said, reason, usage);
        let usage = json!({"usage": usage_json(self.usage)});
        merged(self.object(&json!(self.choices)), usage)
    }

    fn named(&self, fault: Fault) -> Fault {
        match self.echoes.len() {
            1 => fault.input_named("prompt"),
            _ => fault.input_named(&format!("prompt[{}]", self.index)),
        }
    }
}

/// Our choice: they are answered in sequence and occupy one place.
const PROMPTS_MAX: usize = 64;
