//! Parser of OpenAI's Responses requests. Errors are 400 and name the field, its value and the limit.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    admission::RETENTION,
    backend::{
        AnswerForm, ChatMessage, ChatRequest, Conversation, Prompt, RequestMeta, Retention, Role,
        ToolCall,
    },
    chat_wire::{ToolChoice, at_least_one, checked_tools, function_of, role_of},
    effort,
    fault::{Fault, invalid},
    fields::{NO_PROBABILITIES, ignored, is_set, refuse_unsupported},
    numbers::Whole,
    sampling::{SamplingDialect, SamplingFields},
};

/// The body of `POST /v1/responses` and of `POST /v1/responses/input_tokens`.
#[derive(Debug, Deserialize)]
pub(super) struct WireRequest {
    pub(super) model: Option<String>,
    input: Option<Value>,
    pub(super) instructions: Option<String>,
    pub(super) max_output_tokens: Option<Whole>,
    pub(super) temperature: Option<f64>,
    pub(super) top_p: Option<f64>,
    stream: Option<bool>,
    pub(super) tools: Option<Vec<Value>>,
    pub(super) tool_choice: Option<Value>,
    pub(super) text: Option<Value>,
    pub(super) metadata: Option<Value>,
    pub(super) parallel_tool_calls: Option<bool>,
    background: Option<bool>,
    conversation: Option<Value>,
    include: Option<Value>,
    max_tool_calls: Option<Value>,
    moderation: Option<Value>,
    previous_response_id: Option<String>,
    prompt: Option<Value>,
    reasoning: Option<Value>,
    store: Option<bool>,
    top_logprobs: Option<Whole>,
    truncation: Option<String>,
    chat_template_kwargs: Option<Map<String, Value>>,
    #[serde(flatten)]
    unknown: Map<String, Value>,
}

impl WireRequest {
    /// Set fields that are ignored.
    pub(super) fn ignored(&self) -> Vec<String> {
        let of_text = |key: &str| self.text.as_ref().and_then(|text| text.get(key));
        let of_reasoning = |key: &str| self.reasoning.as_ref().and_then(|object| object.get(key));
        let known = [
            ("include", is_set(self.include.as_ref())),
            ("max_tool_calls", is_set(self.max_tool_calls.as_ref())),
            ("moderation", is_set(self.moderation.as_ref())),
            (
                "parallel_tool_calls",
                self.parallel_tool_calls == Some(false),
            ),
            ("reasoning.summary", is_set(of_reasoning("summary"))),
            ("store", self.store == Some(true)),
            ("text.verbosity", is_set(of_text("verbosity"))),
        ];
        ignored(known, &self.unknown)
    }

    /// Refuses fields that would change the answer.
    fn refuse_unsupported(&self) -> Result<(), Fault> {
        let nothing_kept =
            "is not supported: answers are not stored; send the whole conversation in `input`";
        if let Some(id) = &self.previous_response_id {
            return invalid("previous_response_id", id, nothing_kept);
        }
        if let Some(conversation) = self.conversation.as_ref().filter(|value| !value.is_null()) {
            return invalid("conversation", conversation, nothing_kept);
        }
        if self.background == Some(true) {
            return invalid("background", true, nothing_kept);
        }
        if let Some(prompt) = self.prompt.as_ref().filter(|value| !value.is_null()) {
            return invalid("prompt", prompt, "is not supported: prompts are not stored");
        }
        refuse_unsupported(&self.unknown)?;
        if let Some(count) = self.top_logprobs.filter(|count| count.get() > 0) {
            return invalid("top_logprobs", count, NO_PROBABILITIES);
        }
        match self.truncation.as_deref() {
            None | Some("auto" | "disabled") => Ok(()),
            Some(other) => invalid("truncation", other, "is not one of `auto`, `disabled`"),
        }
    }

    /// The requested effort of reasoning.
    pub(super) fn effort(&self) -> Option<&Value> {
        self.reasoning
            .as_ref()
            .and_then(|object| object.get("effort"))
    }

    pub(super) fn conversation(&mut self) -> Result<Conversation, Fault> {
        self.refuse_unsupported()?;
        let mut messages = Vec::new();
        if let Some(instructions) = self.instructions.clone().filter(|text| !text.is_empty()) {
            messages.push(ChatMessage::new(Role::System, instructions));
        }
        let instructed = messages.len();
        match self.input.take() {
            Some(Value::String(text)) => messages.push(ChatMessage::new(Role::User, text)),
            Some(Value::Array(items)) => {
                for (index, item) in items.into_iter().enumerate() {
                    push_item(&format!("input[{index}]"), item, &mut messages)?;
                }
            }
            None | Some(Value::Null) => return invalid("input", "", "is missing"),
            Some(other) => return invalid("input", other, "is neither a text nor a list of items"),
        }
        if messages.len() == instructed {
            return invalid("input", "[]", "is empty");
        }
        let mut variables = self.chat_template_kwargs.take().unwrap_or_default();
        effort::request("reasoning.effort", self.effort(), &mut variables)?;
        Ok(Conversation {
            messages,
            tools: function_tools("tools", self.tools.as_deref().unwrap_or_default())?,
            variables,
            ..Conversation::default()
        })
    }

    /// The form requested by `text.format`.
    fn form(&self) -> Result<Option<AnswerForm>, Fault> {
        let format = match self.text.as_ref().and_then(|text| text.get("format")) {
            None | Some(Value::Null) => return Ok(None),
            Some(format) => format,
        };
        match format.get("type").and_then(Value::as_str) {
            Some("text") => Ok(None),
            Some("json_object") => Ok(Some(AnswerForm::JsonObject)),
            Some("json_schema") => match format.get("schema") {
                Some(schema) => Ok(Some(AnswerForm::JsonSchema {
                    schema: schema.clone(),
                    field: "text.format.schema",
                })),
                None => invalid("text.format.schema", "", "is missing"),
            },
            other => invalid(
                "text.format.type",
                other.unwrap_or_default(),
                "is not one of `text`, `json_object`, `json_schema`",
            ),
        }
    }

    /// Converts the request to plain values.
    pub(super) fn request(
        &mut self,
        meta: RequestMeta,
        model: String,
    ) -> Result<ChatRequest, Fault> {
        let mut conversation = self.conversation()?;
        let form = match function_choice(self.tool_choice.as_ref(), &conversation.tools)? {
            ToolChoice::Required(name) => Some(AnswerForm::ToolCall { name }),
            ToolChoice::Auto => self.form()?,
            ToolChoice::None => {
                conversation.tools.clear();
                self.form()?
            }
        };
        let sampling = SamplingFields {
            temperature: self.temperature,
            top_p: self.top_p,
            ..SamplingFields::default()
        };
        Ok(ChatRequest {
            meta,
            model,
            prompt: Prompt::Chat(conversation),
            max_tokens: at_least_one("max_output_tokens", self.max_output_tokens)?,
            sampling: SamplingDialect::OPENAI.read(&sampling)?,
            form,
            retention: (self.truncation.as_deref() == Some("auto"))
                .then_some(Retention::Messages(RETENTION)),
            streamed: self.stream == Some(true),
            ..ChatRequest::default()
        })
    }
}

/// Whether any of its fields has an effect.
/// The tools in the form of the chat API.
pub(super) fn function_tools(field: &str, tools: &[Value]) -> Result<Vec<Value>, Fault> {
    let tools = tools.iter().enumerate().map(|(index, tool)| {
        let kind = tool.get("type").and_then(Value::as_str);
        if kind != Some("function") {
            return invalid(
                &format!("{field}[{index}].type"),
                kind.unwrap_or_default(),
                "is not supported: tools are of the type `function`, and called by the client",
            );
        }
        let fields = ["name", "description", "parameters", "strict"].map(|name| (name, name));
        function_of(&format!("{field}[{index}]"), tool, &fields, false)
    });
    checked_tools(
        field,
        Some(Value::Array(tools.collect::<Result<_, Fault>>()?)),
    )
}

/// Parses `tool_choice`, in which the function name stands beside the type; refused if no tool has that name.
pub(super) fn function_choice(
    choice: Option<&Value>,
    tools: &[Value],
) -> Result<ToolChoice, Fault> {
    let choice = choice.map(|choice| match choice.get("name") {
        Some(name) if choice.get("type") == Some(&json!("function")) => {
            json!({"type": "function", "function": {"name": name}})
        }
        _ => choice.clone(),
    });
    ToolChoice::read(choice.as_ref(), tools)
}

/// Adds an input item to the conversation; calls are merged into the assistant message that made them.
pub(super) fn push_item(
    field: &str,
    mut item: Value,
    messages: &mut Vec<ChatMessage>,
) -> Result<(), Fault> {
    let text = |item: &Value, key: &str| {
        let text = item.get(key).and_then(Value::as_str).map(str::to_owned);
        text.ok_or_else(|| Fault::invalid(&format!("{field}.{key}"), "", "is missing"))
    };
    let kind = item
        .get("type")
        .and_then(Value::as_str)
        .unwrap_or("message")
        .to_owned();
    match kind.as_str() {
        "message" => {
            let known = ["user", "assistant", "system", "developer"];
            let role = role_of(&format!("{field}.role"), &text(&item, "role")?, &known)?;
            let content = item.get_mut("content").map(Value::take).unwrap_or_default();
            let content = text_of(&format!("{field}.content"), content)?;
            match messages.last_mut() {
                // reasoning or a call before this text
                Some(last)
                    if role == Role::Assistant && last.role == role && last.content.is_empty() =>
                {
                    last.content = content;
                }
                _ => messages.push(ChatMessage::new(role, content)),
            }
        }
        "function_call" => {
            let call = ToolCall {
                id: text(&item, "call_id")?,
                name: text(&item, "name")?,
                arguments: text(&item, "arguments")?,
            };
            match messages.last_mut() {
                Some(last) if last.role == Role::Assistant => last.tool_calls.push(call),
                _ => {
                    let mut calling = ChatMessage::new(Role::Assistant, "");
                    calling.tool_calls.push(call);
                    messages.push(calling);
                }
            }
        }
        "function_call_output" => {
            let id = text(&item, "call_id")?;
            let output = item.get_mut("output").map(Value::take).unwrap_or_default();
            let mut outcome =
                ChatMessage::new(Role::Tool, text_of(&format!("{field}.output"), output)?);
            let mut calls = messages.iter().flat_map(|message| &message.tool_calls);
            outcome.name = calls
                .find(|call| call.id == id)
                .map(|call| call.name.clone());
            outcome.tool_call_id = Some(id);
            messages.push(outcome);
        }
        "reasoning" => {
            let content = item.get_mut("content").map(Value::take).unwrap_or_default();
            let thoughts = text_of(&format!("{field}.content"), content)?;
            if !thoughts.is_empty() {
                let mut thinking = ChatMessage::new(Role::Assistant, "");
                thinking.reasoning = Some(thoughts);
                messages.push(thinking);
            }
        }
        _ => {
            return invalid(
                &format!("{field}.type"),
                kind,
                "is not one of `message`, `function_call`, `function_call_output`, `reasoning`",
            );
        }
    }
    Ok(())
}

/// A text, or joined parts of text.
fn text_of(field: &str, content: Value) -> Result<String, Fault> {
    let parts = match content {
        Value::Null => return Ok(String::new()),
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return invalid(field, other, "is neither a text nor a list of parts"),
    };
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        let kind = part.get("type").and_then(Value::as_str);
        let key = match kind {
            Some("input_text" | "output_text" | "reasoning_text" | "text") => "text",
            Some("refusal") => "refusal",
            _ => {
                return invalid(
                    &format!("{field}[{index}].type"),
                    kind.unwrap_or_default(),
                    "is not supported: this model takes `input_text`",
                );
            }
        };
        let piece = part.get(key).and_then(Value::as_str);
        text.push_str(
            piece.ok_or_else(|| {
                Fault::invalid(&format!("{field}[{index}].{key}"), "", "is missing")
            })?,
        );
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::parse_json;

    fn request(body: &Value) -> Result<ChatRequest, String> {
        parse_json::<WireRequest>(body.to_string().as_bytes())
            .and_then(|mut wire| wire.request(RequestMeta::default(), "m".to_owned()))
            .map_err(|fault| fault.message().to_owned())
    }

    #[test]
    fn fields_of_other_apis_are_refused_or_named() {
        let body = |field: &str, value: Value| json!({"model": "m", "input": "x", field: value});
        for field in ["grammar", "guided_json", "structured_outputs", "logprobs"] {
            let error = request(&body(field, json!({"x": 1}))).unwrap_err();
            assert!(error.starts_with(field), "{error}");
        }
        let wire = |body: Value| parse_json::<WireRequest>(body.to_string().as_bytes()).unwrap();
        assert_eq!(
            wire(body("response_format", json!({"type": "text"}))).ignored(),
            ["response_format"]
        );
        assert_eq!(
            wire(body("speculative.n_max", json!(3))).ignored(),
            ["speculative.n_max"]
        );
        for (field, harmless) in [
            ("n", json!(1)),
            ("stream_options", json!({"x": 1})),
            ("stop", json!([])),
        ] {
            assert!(wire(body(field, harmless)).ignored().is_empty(), "{field}");
        }
        let read = request(&body("chat_template_kwargs", json!({"n": 1}))).unwrap();
        assert!(matches!(read.prompt, Prompt::Chat(chat) if chat.variables["n"] == 1));
    }

    #[test]
    fn items_become_messages_with_calls_and_their_outcomes() {
        let read = request(&json!({
            "model": "m", "instructions": "be brief", "max_output_tokens": 9,
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": true}],
            "tool_choice": {"type": "function", "name": "f"},
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "wait", "annotations": []}]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "done"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no"}]}],
        }))
        .unwrap();
        let messages = read.prompt.messages();
        let shape: Vec<(Role, &str, usize)> = messages
            .iter()
            .map(|message| {
                (
                    message.role,
                    message.content.as_str(),
                    message.tool_calls.len(),
                )
            })
            .collect();
        assert_eq!(
            shape,
            [
                (Role::System, "be brief", 0),
                (Role::User, "hi", 0),
                (Role::Assistant, "wait", 2),
                (Role::Tool, "done", 0),
                (Role::Tool, "no", 0),
            ]
        );
        assert_eq!(messages[2].reasoning.as_deref(), Some("hm"));
        assert_eq!(messages[4].name.as_deref(), Some("f"));
        assert_eq!(
            read.form,
            Some(AnswerForm::ToolCall {
                name: Some("f".to_owned())
            })
        );
    }

    #[test]
    fn a_wrong_value_is_named_with_its_limit() {
        let errors: Vec<String> = [
            json!({"input": null}),
            json!({"input": []}),
            json!({"input": 7}),
            json!({"input": [], "instructions": "be brief"}),
            json!({"input": [{"role": "robot", "content": "hi"}]}),
            json!({"input": [{"content": "hi"}]}),
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
            json!({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
            json!({"input": [{"type": "item_reference", "id": "x"}]}),
            json!({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}),
            json!({"input": [{"type": "function_call_output", "output": "x"}]}),
            json!({"max_output_tokens": 0}),
            json!({"temperature": 3}),
            json!({"tools": [{"type": "web_search"}]}),
            json!({"tools": [{"type": "function"}]}),
            json!({"tools": [{"type": "function", "name": "f", "parameters": []}]}),
            json!({"tool_choice": "required"}),
            json!({"tool_choice": {"type": "function", "name": "g"}}),
            json!({"text": {"format": {"type": "xml"}}}),
            json!({"text": {"format": {"type": "json_schema", "name": "x"}}}),
            json!({"previous_response_id": "resp_1"}),
            json!({"conversation": "conv_1"}),
            json!({"background": true}),
            json!({"prompt": {"id": "x"}}),
            json!({"top_logprobs": 2}),
            json!({"truncation": "much"}),
        ]
        .iter()
        .map(|more| {
            let mut body = json!({"model": "m", "input": "hi"});
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            request(&body).unwrap_err()
        })
        .collect();
        insta::assert_snapshot!(errors.join("\n"));
    }
}
