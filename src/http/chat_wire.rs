//! Parser of OpenAI's chat completion requests.
//!
//! Unknown fields are ignored, and named in the header `x-cotenant-ignored` unless they are harmless; fields that would
//! change the answer are refused. Errors are 400 and name the field, its value and the limit.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    backend::{
        AnswerForm, ChatMessage, ChatRequest, Conversation, Prompt, RequestMeta, Role, ToolCall,
    },
    effort,
    fault::{Fault, invalid},
    fields::{is_set, not_honoured, one_answer, refuse_unsupported},
    numbers::Whole,
    sampling::{SamplingDialect, SamplingFields},
};
use cotenant_conversation::sinks::Sinks;
use cotenant_units::Tokens;

/// The body of `POST /v1/chat/completions`.
#[derive(Debug, Deserialize)]
pub(super) struct WireRequest {
    pub(super) model: Option<String>,
    messages: Vec<WireMessage>,
    pub(super) stream: Option<bool>,
    stream_options: Option<WireStreamOptions>,
    max_tokens: Option<Whole>,
    max_completion_tokens: Option<Whole>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    seed: Option<Whole>,
    stop: Option<Value>,
    n: Option<Whole>,
    tools: Option<Value>,
    tool_choice: Option<Value>,
    response_format: Option<Value>,
    frequency_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    top_k: Option<Whole>,
    min_p: Option<f64>,
    /// llama.cpp's name.
    repeat_penalty: Option<f64>,
    /// vLLM's name.
    repetition_penalty: Option<f64>,
    chat_template_kwargs: Option<Map<String, Value>>,
    enable_thinking: Option<bool>,
    reasoning_effort: Option<Value>,
    context_shift: Option<bool>,
    /// As in vLLM and `transformers`.
    continue_final_message: Option<bool>,
    add_generation_prompt: Option<bool>,
    n_keep: Option<Whole>,
    #[serde(flatten)]
    unknown: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
struct WireMessage {
    role: String,
    #[serde(default)]
    content: Value,
    reasoning_content: Option<String>,
    /// As in vLLM and OpenRouter.
    reasoning: Option<Value>,
    refusal: Option<String>,
    tool_calls: Option<Vec<WireToolCall>>,
    tool_call_id: Option<String>,
    name: Option<String>,
    /// Whether the answer continues this message, in the dialect of Mistral and DeepSeek.
    prefix: Option<bool>,
    /// The same, in the dialect of Moonshot and Alibaba.
    partial: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct WireToolCall {
    id: Option<String>,
    function: WireFunctionCall,
}

#[derive(Debug, Deserialize)]
struct WireFunctionCall {
    name: String,
    #[serde(default)]
    arguments: Value,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct WireStreamOptions {
    include_usage: Option<bool>,
}

impl WireStreamOptions {
    /// Whether the usage is requested as the last chunk.
    pub(super) fn include_usage(options: Option<&Self>) -> bool {
        options.and_then(|options| options.include_usage) == Some(true)
    }
}

impl WireRequest {
    pub(super) fn include_usage(&self) -> bool {
        WireStreamOptions::include_usage(self.stream_options.as_ref())
    }

    /// Set fields that are ignored.
    pub(super) fn ignored(&self) -> Vec<String> {
        not_honoured("", &self.unknown)
    }

    /// Converts the request to plain values.
    pub(super) fn into_request(
        self,
        meta: RequestMeta,
        model: String,
    ) -> Result<ChatRequest, Fault> {
        one_answer("n", self.n)?;
        refuse_unsupported(&self.unknown)?;
        let mut tools = checked_tools("tools", self.tools)?;
        let choice = ToolChoice::read(self.tool_choice.as_ref(), &tools)?;
        if choice == ToolChoice::None {
            tools.clear();
        }
        let form = match choice {
            ToolChoice::Required(name) => Some(AnswerForm::ToolCall { name }),
            ToolChoice::Auto | ToolChoice::None => answer_form(self.response_format)?,
        };
        let mut variables = self.chat_template_kwargs.unwrap_or_default();
        if let Some(thinking) = self.enable_thinking {
            variables.insert("enable_thinking".to_owned(), Value::Bool(thinking));
        }
        effort::request(
            "reasoning_effort",
            self.reasoning_effort.as_ref(),
            &mut variables,
        )?;
        if self.messages.is_empty() {
            return invalid("messages", "[]", "is empty");
        }
        let begun = Begun {
            continued: self.continue_final_message,
            prompted: self.add_generation_prompt,
            prefix: self
                .messages
                .last()
                .is_some_and(|message| [message.prefix, message.partial].contains(&Some(true))),
        };
        let messages = self
            .messages
            .into_iter()
            .enumerate()
            .map(|(index, message)| message.into_message(index))
            .collect::<Result<_, Fault>>()?;
        let mut conversation = Conversation {
            messages,
            tools,
            variables,
            ..Conversation::default()
        };
        conversation.continues = begun.continues(&conversation, form.as_ref())?;
        let (max_tokens_name, max_tokens) = match self.max_completion_tokens {
            Some(tokens) => ("max_completion_tokens", Some(tokens)),
            None => ("max_tokens", self.max_tokens),
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
        Ok(ChatRequest {
            meta,
            model,
            prompt: Prompt::Chat(conversation),
            max_tokens: answer_limit(max_tokens_name, max_tokens)?,
            sampling: SamplingDialect::OPENAI.read(&sampling)?,
            stop: stop_texts("stop", self.stop, OPENAI_STOP_TEXTS)?,
            form,
            sinks: sinks(self.context_shift == Some(true), "n_keep", self.n_keep)?,
            streamed: self.stream == Some(true),
            ..ChatRequest::default()
        })
    }
}

/// Fields for continuing an assistant message.
struct Begun {
    continued: Option<bool>,
    prompted: Option<bool>,
    prefix: bool,
}

impl Begun {
    fn continues(
        &self,
        conversation: &Conversation,
        form: Option<&AnswerForm>,
    ) -> Result<bool, Fault> {
        let (field, value) = match (self.continued, self.prompted) {
            (Some(true), Some(true)) => {
                return invalid(
                    "add_generation_prompt",
                    true,
                    "contradicts `continue_final_message`",
                );
            }
            (Some(true), _) => ("continue_final_message", true),
            _ if self.prefix => ("prefix", true),
            (None, Some(false)) => ("add_generation_prompt", false),
            _ => return Ok(false),
        };
        if !conversation.ends_with_words_of_the_model() {
            return invalid(
                field,
                value,
                "needs text of the assistant as the last message",
            );
        }
        match form {
            Some(_) => invalid(
                field,
                value,
                "is not supported together with an answer format",
            ),
            None => Ok(true),
        }
    }
}

impl WireMessage {
    fn into_message(self, index: usize) -> Result<ChatMessage, Fault> {
        let known = ["system", "developer", "user", "assistant", "tool"];
        let role = match self.role.as_str() {
            "function" => Role::Tool,
            role => role_of(&format!("messages[{index}].role"), role, &known)?,
        };
        let tool_calls = self.tool_calls.unwrap_or_default().into_iter();
        let tool_calls = tool_calls
            .map(|call| ToolCall {
                id: call.id.unwrap_or_default(),
                name: call.function.name,
                arguments: arguments_text(call.function.arguments),
            })
            .collect();
        let content = match self.content {
            Value::Null => self.refusal.unwrap_or_default(),
            Value::String(text) => text,
            Value::Array(parts) => joined_parts(index, &parts)?,
            other => {
                return invalid(
                    &format!("messages[{index}].content"),
                    other,
                    "is neither a text nor a list of parts",
                );
            }
        };
        Ok(ChatMessage {
            role,
            content,
            reasoning: match (self.reasoning_content, self.reasoning) {
                (None, Some(Value::String(thoughts))) => Some(thoughts),
                (thoughts, _) => thoughts,
            },
            tool_calls,
            tool_call_id: self.tool_call_id,
            name: self.name,
        })
    }
}

/// The role of this name, if it is in `known`.
pub(super) fn role_of(field: &str, role: &str, known: &[&str]) -> Result<Role, Fault> {
    Ok(match role {
        role if !known.contains(&role) => {
            let problem = format!("is not one of `{}`", known.join("`, `"));
            return invalid(field, role, problem);
        }
        "assistant" => Role::Assistant,
        "tool" => Role::Tool,
        "user" => Role::User,
        _ => Role::System,
    })
}

/// Arguments of a call as text; some clients send an object instead.
pub(super) fn arguments_text(arguments: Value) -> String {
    match arguments {
        Value::String(text) => text,
        Value::Null => "{}".to_owned(),
        other => other.to_string(),
    }
}

pub(super) fn has_tool(tools: &[Value], name: &str) -> bool {
    let own = |tool: &Value| {
        tool.pointer("/function/name")
            .is_some_and(|own| own == name)
    };
    tools.iter().any(own)
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
                return invalid(
                    &format!("{}.type", field()),
                    kind,
                    "is not supported: this model takes `text`",
                );
            }
            None => return invalid(&field(), part, "has no `type`"),
        }
    }
    Ok(text)
}

pub(super) fn stop_texts(
    field: &str,
    stop: Option<Value>,
    most: usize,
) -> Result<Vec<String>, Fault> {
    let texts = match stop {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(list)) => list
            .into_iter()
            .map(|item| match item {
                Value::String(text) => Ok(text),
                other => invalid(field, other, "is not a text"),
            })
            .collect::<Result<_, Fault>>()?,
        Some(other) => return invalid(field, other, "is neither a text nor a list of texts"),
    };
    if texts.len() > most {
        return invalid(
            field,
            format!("{} texts", texts.len()),
            format!("is above the limit of {most}"),
        );
    }
    // an empty text would end every answer at once
    Ok(texts.into_iter().filter(|text| !text.is_empty()).collect())
}

/// Tokens that are kept when the oldest context is dropped, if dropping is permitted.
pub(super) fn sinks(may: bool, field: &str, keep: Option<Whole>) -> Result<Option<Sinks>, Fault> {
    let sinks = keep.map_or(Ok(Sinks::DEFAULT), |number| {
        Sinks::from_wire(number.get()).ok_or_else(|| {
            Fault::invalid(
                field,
                number,
                "is neither a number of tokens nor -1 for the whole prompt",
            )
        })
    })?;
    Ok(may.then_some(sinks))
}

/// Maximum number of tokens of an answer. -1 means no limit, as in llama.cpp and LM Studio.
pub(super) fn answer_limit(field: &str, tokens: Option<Whole>) -> Result<Option<Tokens>, Fault> {
    at_least_one(field, tokens.filter(|tokens| tokens.get() != -1))
}

pub(super) fn at_least_one(field: &str, tokens: Option<Whole>) -> Result<Option<Tokens>, Fault> {
    tokens
        .map(|tokens| match tokens.to() {
            Some(tokens) if tokens > 0 => Ok(Tokens::new(tokens)),
            // exceeds any context, which then is the limit
            None if tokens.get() > 0 => Ok(Tokens::new(u32::MAX)),
            _ => invalid(field, tokens, "is below the limit of 1"),
        })
        .transpose()
}

/// The form requested by `response_format`.
fn answer_form(format: Option<Value>) -> Result<Option<AnswerForm>, Fault> {
    let Some(mut format) = format.filter(|format| !format.is_null()) else {
        return Ok(None);
    };
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some(kind @ ("json_object" | "json_schema")) => {
            let is_open = kind == "json_object";
            let schema = format.pointer_mut("/json_schema/schema").map(Value::take);
            if let Some(schema) = schema.filter(|_| !is_open) {
                return Ok(Some(AnswerForm::JsonSchema {
                    schema,
                    field: SCHEMA_FIELD,
                }));
            }
            // llama.cpp puts it beside either type.
            let schema = format.get_mut("schema").map(Value::take);
            match schema.filter(|schema| !schema.is_null()) {
                Some(schema) => Ok(Some(AnswerForm::JsonSchema {
                    schema,
                    field: "response_format.schema",
                })),
                None if is_open => Ok(Some(AnswerForm::JsonObject)),
                None => invalid(SCHEMA_FIELD, "", "is missing"),
            }
        }
        Some(other) => invalid(
            "response_format.type",
            other,
            "is not one of `text`, `json_object`, `json_schema`",
        ),
        None => invalid("response_format", &format, "has no `type`"),
    }
}

/// The tools, each of them a function with a name.
pub(super) fn checked_tools(field: &str, tools: Option<Value>) -> Result<Vec<Value>, Fault> {
    let mut tools = match tools {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(tools)) => tools,
        Some(other) => return invalid(field, other, "is not a list"),
    };
    if tools.len() > TOOLS_MAX {
        return invalid(
            field,
            format!("{} tools", tools.len()),
            format!("is above the limit of {TOOLS_MAX}"),
        );
    }
    for (index, tool) in tools.iter_mut().enumerate() {
        let place = || format!("{field}[{index}]");
        match tool.get("type").unwrap_or(&Value::Null) {
            Value::String(kind) if kind == "function" => {}
            // vLLM and Ollama accept functions without a type.
            kind if !is_set(Some(kind)) && tool.get("function").is_some_and(Value::is_object) => {
                if let Some(tool) = tool.as_object_mut() {
                    tool.insert("type".to_owned(), "function".into());
                }
            }
            _ => return invalid(&place(), &*tool, "is not of the type `function`"),
        }
        let name = tool.pointer("/function/name").and_then(Value::as_str);
        if name.is_none_or(str::is_empty) {
            return invalid(&format!("{}.function.name", place()), "", "is missing");
        }
        if let Some(parameters) = tool.pointer("/function/parameters")
            && !parameters.is_object()
            && !parameters.is_null()
        {
            return invalid(
                &format!("{}.function.parameters", place()),
                parameters,
                "is not a JSON schema",
            );
        }
    }
    Ok(tools)
}

/// Converts a tool of another API to OpenAI's chat completions; `fields` maps the names.
///
/// # Errors
/// 400 for a missing name or an invalid JSON schema.
pub(super) fn function_of(
    field: &str,
    tool: &Value,
    fields: &[(&str, &str)],
    has_schema: bool,
) -> Result<Value, Fault> {
    let name = tool.get("name").and_then(Value::as_str);
    if name.is_none_or(str::is_empty) {
        return invalid(&format!("{field}.name"), "", "is missing");
    }
    let mut function = Map::new();
    for (own, there) in fields {
        let value = tool.get(own).filter(|value| !value.is_null());
        let is_schema = *there == "parameters";
        match value {
            Some(value) if is_schema && !value.is_object() => {
                return invalid(&format!("{field}.{own}"), value, "is not a JSON schema");
            }
            None if is_schema && has_schema => {
                return invalid(&format!("{field}.{own}"), "null", "is not a JSON schema");
            }
            Some(value) => {
                function.insert((*there).to_owned(), value.clone());
            }
            None => {}
        }
    }
    Ok(json!({"type": "function", "function": function}))
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ToolChoice {
    /// The model decides.
    Auto,
    /// The tools are hidden from the model.
    None,
    /// A tool must be called: the named one, or any.
    Required(Option<String>),
}

impl ToolChoice {
    pub(super) fn read(choice: Option<&Value>, tools: &[Value]) -> Result<Self, Fault> {
        let choice = match choice {
            None | Some(Value::Null) => return Ok(Self::Auto),
            Some(choice) => choice,
        };
        let read = match choice {
            Value::String(word) if word == "none" => return Ok(Self::None),
            Value::String(word) if word == "auto" => return Ok(Self::Auto),
            Value::String(word) if word == "required" => Self::Required(None),
            Value::Object(_) if choice.get("type").and_then(Value::as_str) == Some("function") => {
                let name = choice.pointer("/function/name").and_then(Value::as_str);
                let name =
                    name.ok_or_else(|| Fault::invalid("tool_choice", choice, "names no function"))?;
                if !has_tool(tools, name) {
                    return invalid("tool_choice", name, "is not one of `tools`");
                }
                Self::Required(Some(name.to_owned()))
            }
            other => {
                return invalid(
                    "tool_choice",
                    other,
                    "is neither `none`, `auto`, `required` nor a function",
                );
            }
        };
        if tools.is_empty() {
            return invalid("tool_choice", choice, "needs `tools`, and there are none");
        }
        Ok(read)
    }
}

const SCHEMA_FIELD: &str = "response_format.json_schema.schema";
/// OpenAI's limit.
const TOOLS_MAX: usize = 128;
/// OpenAI's limit of stop texts.
pub(super) const OPENAI_STOP_TEXTS: usize = 4;
/// Our choice, for APIs without a stated limit: each token is searched for each text.
pub(super) const STOP_TEXTS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{
        backend::{ChatSampling, SamplingWish},
        body::parse_json,
    };

    fn request(body: &str) -> Result<ChatRequest, String> {
        parse_json::<WireRequest>(body.as_bytes())
            .and_then(|wire| wire.into_request(RequestMeta::default(), "m".to_owned()))
            .map_err(|fault| fault.message().to_owned())
    }

    #[test]
    fn what_is_not_honoured_is_named() {
        let ignored = |fields: Value| {
            let mut body = json!({"messages": []});
            body.as_object_mut()
                .unwrap()
                .extend(fields.as_object().unwrap().clone());
            parse_json::<WireRequest>(body.to_string().as_bytes())
                .unwrap()
                .ignored()
        };
        assert_eq!(
            ignored(
                json!({"min_p": 0.1, "verbosity": "low", "functions": [{"name": "f"}], "modalities": ["text", "audio"]})
            ),
            ["verbosity", "functions", "modalities"]
        );
        let document = include_str!("../../docs/errors.md");
        let row = document
            .lines()
            .find(|line| line.starts_with("| `logit_bias`"))
            .unwrap();
        let cell = row.split(" | ").next().unwrap();
        let documented: Vec<&str> = cell.split('`').skip(1).step_by(2).collect();
        let all = documented
            .iter()
            .map(|name| ((*name).to_owned(), json!({"x": 1})))
            .collect();
        let mut expected = documented.clone();
        expected.sort_unstable();
        let mut named = ignored(Value::Object(all));
        named.sort_unstable();
        assert_eq!(named, expected, "docs/errors.md lists what is ignored");
        assert!(
            ignored(json!({"top_k": 5, "modalities": ["text"], "functions": [], "audio": null}))
                .is_empty()
        );
    }

    #[test]
    fn a_context_loses_its_oldest_only_where_that_is_asked_for() {
        let sinks = |more: &str| {
            let body = format!(
                r#"{{"model": "m", "messages": [{{"role": "user", "content": "hi"}}]{more}}}"#
            );
            request(&body).map(|request| request.sinks)
        };
        for (more, expected) in [
            ("", None),
            (r#", "n_keep": 5"#, None),
            (r#", "context_shift": false, "n_keep": 5"#, None),
            (r#", "context_shift": true"#, Some(Sinks::DEFAULT)),
            (
                r#", "context_shift": true, "n_keep": 5"#,
                Some(Sinks::Tokens(Tokens::new(5))),
            ),
            (
                r#", "context_shift": true, "n_keep": -1"#,
                Some(Sinks::Prompt),
            ),
        ] {
            assert_eq!(sinks(more), Ok(expected), "{more}");
        }
        assert!(
            sinks(r#", "n_keep": -2"#)
                .unwrap_err()
                .starts_with("n_keep")
        );
    }

    #[test]
    fn a_request_is_read_in_all_its_spellings() {
        let read = request(
            r#"{"model": "m", "messages": [
                 {"role": "developer", "content": "be brief"},
                 {"role": "user", "content": [{"type": "text", "text": "turn on "}, {"type": "text", "text": "it"}]},
                 {"role": "assistant", "content": null, "tool_calls": []}],
               "max_tokens": 9, "max_completion_tokens": 7, "temperature": 0.5, "top_p": 1, "seed": -2,
               "stop": "\n", "user": "u", "service_tier": "auto", "something": {"new": [1]}}"#,
        )
        .unwrap();
        assert_eq!(
            read,
            ChatRequest {
                model: "m".to_owned(),
                prompt: Prompt::Chat(
                    [
                        (Role::System, "be brief"),
                        (Role::User, "turn on it"),
                        (Role::Assistant, "")
                    ]
                    .map(|(role, content)| ChatMessage::new(role, content.to_owned()))
                    .to_vec()
                    .into()
                ),
                max_tokens: Some(Tokens::new(7)),
                sampling: ChatSampling {
                    asked: SamplingWish {
                        temperature: Some(0.5),
                        top_p: Some(1.0),
                        seed: Some(u64::MAX - 1),
                        ..SamplingWish::NONE
                    },
                    defaults: SamplingWish {
                        temperature: Some(1.0),
                        ..SamplingWish::NONE
                    },
                },
                stop: vec!["\n".to_owned()],
                ..ChatRequest::default()
            }
        );
    }

    #[test]
    fn an_answer_that_was_begun_is_continued_where_that_is_asked_for() {
        let continues = |last: &str, more: &str| {
            let body =
                format!(r#"{{"messages": [{{"role": "user", "content": "hi"}}, {last}]{more}}}"#);
            request(&body).map(|request| match request.prompt {
                Prompt::Chat(conversation) => conversation.continues,
                other => panic!("{other:?}"),
            })
        };
        let begun = r#"{"role": "assistant", "content": "I am"}"#;
        for (last, more, expected) in [
            (begun, "", Ok(false)),
            (begun, r#", "add_generation_prompt": true"#, Ok(false)),
            (begun, r#", "continue_final_message": true"#, Ok(true)),
            (
                begun,
                r#", "continue_final_message": true, "add_generation_prompt": false"#,
                Ok(true),
            ),
            (begun, r#", "add_generation_prompt": false"#, Ok(true)),
            (
                r#"{"role": "assistant", "content": "I am", "prefix": true}"#,
                "",
                Ok(true),
            ),
            (
                begun,
                r#", "continue_final_message": true, "add_generation_prompt": true"#,
                Err("add_generation_prompt"),
            ),
            (
                r#"{"role": "user", "content": "so?"}"#,
                r#", "continue_final_message": true"#,
                Err("continue_final_message"),
            ),
            (
                begun,
                r#", "continue_final_message": true, "response_format": {"type": "json_object"}"#,
                Err("continue_final_message"),
            ),
        ] {
            match (continues(last, more), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{last}{more}"),
                (Err(message), Err(field)) => assert!(message.starts_with(field), "{message}"),
                (found, expected) => panic!("{found:?}, expected {expected:?}: {last}{more}"),
            }
        }
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
            format!(r#"{{{user}, "logprobs": true}}"#),
            format!(r#"{{{user}, "presence_penalty": 3}}"#),
            format!(r#"{{{user}, "response_format": {{"type": "xml"}}}}"#),
            format!(r#"{{{user}, "response_format": "json"}}"#),
            format!(r#"{{{user}, "response_format": {{"type": "json_schema", "json_schema": {{"name": "x"}}}}}}"#),
            format!(r#"{{{user}, "tool_choice": "required"}}"#),
            format!(r#"{{{user}, "tool_choice": "perhaps"}}"#),
            format!(r#"{{{user}, "tools": {{}}}}"#),
            format!(r#"{{{user}, "tools": [{{"type": "retrieval"}}]}}"#),
            format!(r#"{{{user}, "tools": [{{"type": "function", "function": {{}}}}]}}"#),
            format!(r#"{{{user}, "tools": [{{"type": "function", "function": {{"name": "f", "parameters": []}}}}]}}"#),
            format!(r#"{{{user}, "tool_choice": {{"type": "function", "function": {{"name": "f"}}}}}}"#),
        ]
        .iter()
        .map(|body| request(body).unwrap_err())
        .collect();
        insta::assert_snapshot!(errors.join("\n"));
    }

    #[test]
    fn tools_forms_and_what_came_of_them_are_read() {
        let read = request(
            r#"{"messages": [
                 {"role": "assistant", "content": null, "reasoning_content": "hm",
                  "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
                 {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "done"}],
               "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required",
               "chat_template_kwargs": {"enable_thinking": false}, "frequency_penalty": -1, "presence_penalty": 0.5}"#,
        )
        .unwrap();
        let called = read.prompt.messages().first().unwrap();
        assert_eq!(called.reasoning.as_deref(), Some("hm"));
        assert_eq!(
            called.tool_calls,
            [ToolCall {
                id: "call_1".to_owned(),
                name: "f".to_owned(),
                arguments: r#"{"a": 1}"#.to_owned()
            }]
        );
        let outcome = read.prompt.messages().get(1).unwrap();
        assert_eq!(
            (outcome.role, outcome.tool_call_id.as_deref()),
            (Role::Tool, Some("call_1"))
        );
        assert_eq!(read.form, Some(AnswerForm::ToolCall { name: None }));
        let Prompt::Chat(conversation) = &read.prompt else {
            panic!("{read:?}")
        };
        assert_eq!(
            conversation.variables.get("enable_thinking"),
            Some(&json!(false))
        );
        let sampling = read.sampling.asked;
        assert_eq!(
            (sampling.frequency_penalty, sampling.presence_penalty),
            (Some(-1.0), Some(0.5))
        );

        let user = r#""messages": [{"role": "user", "content": "hi"}]"#;
        let form = |format: &str| {
            request(&format!(r#"{{{user}, "response_format": {format}}}"#))
                .unwrap()
                .form
        };
        assert_eq!(form(r#"{"type": "text"}"#), None);
        assert_eq!(form("null"), None);
        assert_eq!(
            form(r#"{"type": "json_object"}"#),
            Some(AnswerForm::JsonObject)
        );
        let schema = form(
            r#"{"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}"#,
        );
        assert!(
            matches!(schema, Some(AnswerForm::JsonSchema { schema, .. }) if schema == json!({"type": "null"}))
        );
        let tools =
            r#""tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none""#;
        assert_eq!(
            request(&format!("{{{user}, {tools}}}"))
                .unwrap()
                .prompt
                .tools(),
            &[] as &[Value]
        );
    }

    #[test]
    fn a_schema_beside_the_type_is_the_form_as_well() {
        let form = |format: Value| {
            let body =
                json!({"messages": [{"role": "user", "content": "x"}], "response_format": format});
            request(&body.to_string()).map(|request| request.form)
        };
        let beside = Ok(Some(AnswerForm::JsonSchema {
            schema: json!({"type": "null"}),
            field: "response_format.schema",
        }));
        for kind in ["json_object", "json_schema"] {
            assert_eq!(
                form(json!({"type": kind, "schema": {"type": "null"}})),
                beside
            );
        }
        assert_eq!(
            form(json!({"type": "json_object", "schema": null})),
            Ok(Some(AnswerForm::JsonObject))
        );
        assert!(form(json!({"type": "json_schema"})).is_err());
    }

    #[test]
    fn messages_are_read_however_clients_keep_them() {
        let body = json!({
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": null, "reasoning": "hm", "tool_calls": [{"id": null, "function": {"name": "f"}}]},
                {"role": "tool", "content": "y", "tool_call_id": null},
                {"role": "assistant", "content": null, "refusal": "no"},
                {"role": "assistant", "content": "He", "partial": true},
            ],
            "tools": [{"function": {"name": "f"}}, {"type": null, "function": {"name": "g"}}],
        });
        let request = request(&body.to_string()).unwrap();
        let messages = request.prompt.messages();
        assert_eq!(messages[1].reasoning.as_deref(), Some("hm"));
        assert_eq!(messages[1].tool_calls[0].name, "f");
        assert_eq!(messages[3].content, "no");
        assert!(matches!(&request.prompt, Prompt::Chat(chat) if chat.continues));
        assert!(
            request
                .prompt
                .tools()
                .iter()
                .all(|tool| tool["type"] == "function")
        );
    }

    #[test]
    fn forms_of_other_servers_are_refused_by_name() {
        for (field, value) in [
            ("grammar", json!("root ::= \"maybe\"")),
            ("guided_choice", json!(["maybe"])),
            ("guided_grammar", json!("root ::= x")),
            ("guided_json", json!({"type": "boolean"})),
            ("guided_regex", json!("a+")),
            ("json_schema", json!({"type": "boolean"})),
            ("structured_outputs", json!({"choice": ["a"]})),
        ] {
            let body = json!({"messages": [{"role": "user", "content": "x"}], field: value});
            let error = request(&body.to_string()).unwrap_err();
            assert!(
                error.starts_with(field) && error.contains("response_format"),
                "{error}"
            );
        }
        for unset in [json!(null), json!(""), json!([]), json!({}), json!(false)] {
            let body = json!({"messages": [{"role": "user", "content": "x"}], "grammar": unset});
            assert!(request(&body.to_string()).is_ok(), "{body}");
        }
        let several = json!({"messages": [{"role": "user", "content": "x"}], "best_of": 2});
        assert!(
            request(&several.to_string())
                .unwrap_err()
                .starts_with("best_of: `2` is not 1")
        );
    }
}
