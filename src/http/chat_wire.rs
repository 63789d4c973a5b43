//! Chat completions as they are written: the request read leniently, the answers exactly.
//!
//! Unknown fields are ignored. Fields that are known, harmless and not honoured are ignored too, and named in the
//! header `x-cotenant-ignored`; fields that would change what the answer *is* are refused.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    backend::{ChatMessage, ChatRequest, FinishReason, RequestMeta, Role, Usage},
    fault::Fault,
};
use crate::units::Tokens;

/// The body of `POST /v1/chat/completions`.
#[derive(Debug, Deserialize)]
pub(super) struct WireRequest {
    pub(super) model: Option<String>,
    messages: Vec<WireMessage>,
    #[serde(default)]
    pub(super) stream: Option<bool>,
    stream_options: Option<WireStreamOptions>,
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    seed: Option<i64>,
    stop: Option<Value>,
    n: Option<i64>,
    tools: Option<Value>,
    tool_choice: Option<Value>,
    response_format: Option<Value>,
    frequency_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    logit_bias: Option<Value>,
    logprobs: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct WireMessage {
    role: String,
    #[serde(default)]
    content: Value,
}

#[derive(Debug, Deserialize)]
struct WireStreamOptions {
    #[serde(default)]
    include_usage: Option<bool>,
}

impl WireRequest {
    /// Whether the client wants the usage as the last chunk.
    pub(super) fn include_usage(&self) -> bool {
        self.stream_options
            .as_ref()
            .and_then(|options| options.include_usage)
            .unwrap_or(false)
    }

    /// Fields that the client set and that are not honoured.
    pub(super) fn ignored(&self) -> Vec<&'static str> {
        let object_or_list = |value: &Option<Value>| match value {
            Some(Value::Array(list)) => !list.is_empty(),
            Some(Value::Object(map)) => !map.is_empty(),
            _ => false,
        };
        let nonzero = |value: Option<f64>| value.is_some_and(|value| value != 0.0);
        [
            ("tools", object_or_list(&self.tools)),
            ("frequency_penalty", nonzero(self.frequency_penalty)),
            ("presence_penalty", nonzero(self.presence_penalty)),
            ("logit_bias", object_or_list(&self.logit_bias)),
            ("logprobs", self.logprobs == Some(true)),
        ]
        .into_iter()
        .filter_map(|(name, set)| set.then_some(name))
        .collect()
    }

    /// The request in plain values.
    ///
    /// # Errors
    /// 400 naming the field, its value and the limit.
    pub(super) fn into_request(self, meta: RequestMeta, model: String) -> Result<ChatRequest, Fault> {
        if let Some(n) = self.n.filter(|&n| n != 1) {
            return Err(Fault::invalid("n", n, "is not supported: one answer per request"));
        }
        refuse_unless_text(self.response_format.as_ref())?;
        refuse_forced_tools(self.tool_choice.as_ref())?;
        if self.messages.is_empty() {
            return Err(Fault::invalid("messages", "[]", "is empty"));
        }
        let messages = self
            .messages
            .into_iter()
            .enumerate()
            .map(|(index, message)| message.into_message(index))
            .collect::<Result<_, Fault>>()?;
        let (max_tokens_name, max_tokens) = match self.max_completion_tokens {
            Some(tokens) => ("max_completion_tokens", Some(tokens)),
            None => ("max_tokens", self.max_tokens),
        };
        let max_tokens = max_tokens
            .map(|tokens| match u32::try_from(tokens) {
                Ok(tokens) if tokens > 0 => Ok(Tokens::new(tokens)),
                // more than any context; the context ends it
                Err(_) if tokens > 0 => Ok(Tokens::new(u32::MAX)),
                _ => Err(Fault::invalid(max_tokens_name, tokens, "is below the limit of 1")),
            })
            .transpose()?;
        let mut temperature = in_range("temperature", self.temperature, 2.0)?;
        let mut top_p = in_range("top_p", self.top_p, 1.0)?;
        if top_p == Some(0.0) {
            // only the likeliest token is left, which is what temperature 0 says
            (temperature, top_p) = (Some(0.0), None);
        }
        Ok(ChatRequest {
            meta,
            model,
            messages,
            max_tokens,
            temperature,
            top_p,
            // a negative seed is as good as any: only equality matters
            seed: self.seed.map(i64::cast_unsigned),
            stop: stop_texts(self.stop)?,
        })
    }
}

impl WireMessage {
    fn into_message(self, index: usize) -> Result<ChatMessage, Fault> {
        let role = match self.role.as_str() {
            "assistant" => Role::Assistant,
            "system" | "developer" => Role::System,
            "tool" | "function" => Role::Tool,
            "user" => Role::User,
            other => {
                return Err(Fault::invalid(
                    &format!("messages[{index}].role"),
                    other,
                    "is not one of `system`, `developer`, `user`, `assistant`, `tool`",
                ));
            }
        };
        let content = match self.content {
            Value::Null => String::new(),
            Value::String(text) => text,
            Value::Array(parts) => joined_parts(index, &parts)?,
            other => {
                return Err(Fault::invalid(
                    &format!("messages[{index}].content"),
                    other,
                    "is neither a text nor a list of parts",
                ));
            }
        };
        Ok(ChatMessage { role, content })
    }
}

fn joined_parts(message: usize, parts: &[Value]) -> Result<String, Fault> {
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        let field = || format!("messages[{message}].content[{index}]");
        match part.get("type").and_then(Value::as_str) {
            Some(kind @ ("text" | "refusal")) => {
                let piece = part
                    .get(kind)
                    .and_then(Value::as_str)
                    .ok_or_else(|| Fault::invalid(&field(), part, format!("has no `{kind}`")))?;
                text.push_str(piece);
            }
            Some(kind) => {
                return Err(Fault::invalid(
                    &format!("{}.type", field()),
                    kind,
                    "is not supported: this model takes `text`",
                ));
            }
            None => return Err(Fault::invalid(&field(), part, "has no `type`")),
        }
    }
    Ok(text)
}

fn stop_texts(stop: Option<Value>) -> Result<Vec<String>, Fault> {
    let texts = match stop {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(list)) => list
            .into_iter()
            .map(|item| match item {
                Value::String(text) => Ok(text),
                other => Err(Fault::invalid("stop", other, "is not a text")),
            })
            .collect::<Result<_, Fault>>()?,
        Some(other) => return Err(Fault::invalid("stop", other, "is neither a text nor a list of texts")),
    };
    if texts.len() > STOP_TEXTS_MAX {
        return Err(Fault::invalid(
            "stop",
            format!("{} texts", texts.len()),
            format!("is above the limit of {STOP_TEXTS_MAX}"),
        ));
    }
    // an empty text would end every answer before it begins
    Ok(texts.into_iter().filter(|text| !text.is_empty()).collect())
}

fn in_range(field: &str, value: Option<f64>, max: f64) -> Result<Option<f64>, Fault> {
    match value {
        Some(value) if !(0.0..=max).contains(&value) => Err(Fault::invalid(
            field,
            value,
            format!("is outside of the limits of 0 and {max}"),
        )),
        value => Ok(value),
    }
}

fn refuse_unless_text(format: Option<&Value>) -> Result<(), Fault> {
    match format.and_then(|format| format.get("type")).and_then(Value::as_str) {
        None | Some("text") => Ok(()),
        Some(other) => Err(Fault::invalid(
            "response_format.type",
            other,
            "is not supported: answers are `text`",
        )),
    }
}

fn refuse_forced_tools(choice: Option<&Value>) -> Result<(), Fault> {
    match choice {
        None | Some(Value::Null) => Ok(()),
        Some(Value::String(choice)) if matches!(choice.as_str(), "auto" | "none") => Ok(()),
        Some(other) => Err(Fault::invalid(
            "tool_choice",
            other,
            "is not supported: tools are not called",
        )),
    }
}

/// Writes the answers to one request: one id and one time for all its chunks.
#[derive(Clone, Debug)]
pub(super) struct ChatWriter {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) include_usage: bool,
}

impl ChatWriter {
    /// The answer in one piece.
    pub(super) fn whole(&self, text: &str, reason: FinishReason, usage: Usage) -> Value {
        json!({
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [{
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "logprobs": null,
                "finish_reason": reason_text(reason),
            }],
            "usage": usage_json(usage),
        })
    }

    /// The first chunk: who speaks.
    pub(super) fn role(&self) -> String {
        self.choice(&json!({"role": "assistant", "content": ""}), None)
    }

    /// A piece of text.
    pub(super) fn delta(&self, text: &str) -> String {
        self.choice(&json!({"content": text}), None)
    }

    /// The end of the text.
    pub(super) fn finish(&self, reason: FinishReason) -> String {
        self.choice(&json!({}), Some(reason))
    }

    /// The last chunk: no choices, only the usage.
    pub(super) fn usage(&self, usage: Usage) -> String {
        self.chunk(json!([]), Some(usage_json(usage)))
    }

    fn choice(&self, delta: &Value, reason: Option<FinishReason>) -> String {
        let choice = json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason.map(reason_text)}]);
        self.chunk(choice, self.include_usage.then_some(Value::Null))
    }

    fn chunk(&self, choices: Value, usage: Option<Value>) -> String {
        let mut chunk = Map::new();
        chunk.insert("id".to_owned(), json!(self.id));
        chunk.insert("object".to_owned(), json!("chat.completion.chunk"));
        chunk.insert("created".to_owned(), json!(self.created));
        chunk.insert("model".to_owned(), json!(self.model));
        chunk.insert("choices".to_owned(), choices);
        if let Some(usage) = usage {
            chunk.insert("usage".to_owned(), usage);
        }
        Value::Object(chunk).to_string()
    }
}

const fn reason_text(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        FinishReason::Stop => "stop",
    }
}

fn usage_json(usage: Usage) -> Value {
    let (prompt, completion) = (usage.prompt_tokens.get(), usage.completion_tokens.get());
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": u64::from(prompt) + u64::from(completion),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens.get()},
    })
}

/// OpenAI's own limit.
const STOP_TEXTS_MAX: usize = 4;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::http::body::parse_json;

    fn request(body: &str) -> Result<ChatRequest, String> {
        parse_json::<WireRequest>(body.as_bytes())
            .and_then(|wire| wire.into_request(RequestMeta::default(), "m".to_owned()))
            .map_err(|fault| fault.message().to_owned())
    }

    #[test]
    fn a_request_is_read_in_all_its_spellings() {
        let read = request(
            r#"{"model": "m", "messages": [
                 {"role": "developer", "content": "be brief"},
                 {"role": "user", "content": [{"type": "text", "text": "turn on "}, {"type": "text", "text": "it"}]},
                 {"role": "assistant", "content": null, "tool_calls": []}],
               "max_tokens": 9, "max_completion_tokens": 7, "temperature": 0.5, "top_p": 1, "seed": -1,
               "stop": "\n", "user": "u", "service_tier": "auto", "something": {"new": [1]}}"#,
        )
        .unwrap();
        assert_eq!(
            read,
            ChatRequest {
                model: "m".to_owned(),
                messages: [
                    (Role::System, "be brief"),
                    (Role::User, "turn on it"),
                    (Role::Assistant, "")
                ]
                .map(|(role, content)| ChatMessage {
                    role,
                    content: content.to_owned()
                })
                .to_vec(),
                max_tokens: Some(Tokens::new(7)),
                temperature: Some(0.5),
                top_p: Some(1.0),
                seed: Some(u64::MAX),
                stop: vec!["\n".to_owned()],
                ..ChatRequest::default()
            }
        );
        let greedy = request(r#"{"messages": [{"role": "user"}], "top_p": 0, "temperature": 1}"#).unwrap();
        assert_eq!((greedy.temperature, greedy.top_p), (Some(0.0), None));
    }

    #[test]
    fn a_wrong_value_is_named_with_its_limit() {
        let user = r#""messages": [{"role": "user", "content": "hi"}]"#;
        let errors: Vec<String> = [
            r#"{"messages": []}"#.to_owned(),
            "{}".to_owned(),
            r#"{"messages": [{"role": "robot", "content": "hi"}]}"#.to_owned(),
            r#"{"messages": [{"role": "user", "content": 7}]}"#.to_owned(),
            r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#.to_owned(),
            r#"{"messages": [{"role": "user", "content": [{"text": "hi"}]}]}"#.to_owned(),
            format!(r#"{{{user}, "n": 2}}"#),
            format!(r#"{{{user}, "temperature": 3}}"#),
            format!(r#"{{{user}, "top_p": -0.5}}"#),
            format!(r#"{{{user}, "max_tokens": 0}}"#),
            format!(r#"{{{user}, "max_tokens": "9"}}"#),
            format!(r#"{{{user}, "stop": ["a", "b", "c", "d", "e"]}}"#),
            format!(r#"{{{user}, "stop": 7}}"#),
            format!(r#"{{{user}, "response_format": {{"type": "json_object"}}}}"#),
            format!(r#"{{{user}, "tool_choice": "required"}}"#),
        ]
        .iter()
        .map(|body| request(body).unwrap_err())
        .collect();
        insta::assert_snapshot!(errors.join("\n"));
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            "[a-z\\u{0}-\\u{ff}]{0,8}".prop_map(Value::from),
            Just(Value::from("text")),
        ];
        leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(
                    prop_oneof![
                        Just("role".to_owned()),
                        Just("content".to_owned()),
                        Just("type".to_owned()),
                        Just("text".to_owned()),
                        "[a-z]{1,4}"
                    ],
                    inner,
                    0..4
                )
                .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_values_in_known_fields_are_read_or_refused(
            fields in prop::collection::btree_map(
                prop::sample::select(vec![
                    "model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens",
                    "temperature", "top_p", "seed", "stop", "n", "tools", "tool_choice", "response_format",
                    "frequency_penalty", "logit_bias", "logprobs", "unknown",
                ]),
                any_json(),
                0..8,
            ),
            user in any::<bool>(),
        ) {
            let mut map: Map<String, Value> = fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            if user {
                map.insert("messages".to_owned(), json!([{"role": "user", "content": "hi"}]));
            }
            let body = Value::Object(map).to_string();
            if let Ok(wire) = parse_json::<WireRequest>(body.as_bytes()) {
                let _names = wire.ignored();
                if let Ok(request) = wire.into_request(RequestMeta::default(), "m".to_owned()) {
                    prop_assert!(!request.messages.is_empty());
                    prop_assert!(request.temperature.is_none_or(|t| (0.0..=2.0).contains(&t)));
                    prop_assert!(request.top_p.is_none_or(|p| p > 0.0 && p <= 1.0));
                }
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _read = parse_json::<WireRequest>(&bytes).map(|wire| wire.into_request(RequestMeta::default(), "m".to_owned()));
        }
    }
}
