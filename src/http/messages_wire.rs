//! Parser of Anthropic's messages requests. Errors are 400 and name the field, its value and the limit.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    backend::{
        AnswerForm, ChatMessage, ChatRequest, Conversation, Prompt, RequestMeta, Role, ToolCall,
    },
    chat_wire::{
        STOP_TEXTS_MAX, at_least_one, checked_tools, function_of, has_tool, role_of, stop_texts,
    },
    effort,
    fault::{Fault, invalid},
    fields::{ignored, is_set, refuse_unsupported},
    numbers::Whole,
    sampling::{SamplingDialect, SamplingFields},
};

/// The body of `POST /v1/messages` and of `POST /v1/messages/count_tokens`.
#[derive(Debug, Deserialize)]
pub(super) struct WireRequest {
    pub(super) model: String,
    messages: Vec<WireMessage>,
    system: Option<Value>,
    max_tokens: Option<Whole>,
    stop_sequences: Option<Value>,
    stream: Option<bool>,
    temperature: Option<f64>,
    top_k: Option<Whole>,
    top_p: Option<f64>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<WireToolChoice>,
    thinking: Option<WireThinking>,
    output_config: Option<WireOutputConfig>,
    output_format: Option<Value>,
    container: Option<Value>,
    context_management: Option<Value>,
    mcp_servers: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    #[serde(flatten)]
    unknown: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
struct WireMessage {
    role: String,
    content: Value,
}

#[derive(Debug, Deserialize)]
struct WireToolChoice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct WireThinking {
    #[serde(rename = "type")]
    kind: String,
    budget_tokens: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
struct WireOutputConfig {
    effort: Option<Value>,
    format: Option<Value>,
}

impl WireRequest {
    /// Set fields that are ignored.
    pub(super) fn ignored(&self) -> Vec<String> {
        let budget = self
            .thinking
            .as_ref()
            .is_some_and(|thinking| thinking.budget_tokens.is_some());
        let one_tool = self
            .tool_choice
            .as_ref()
            .is_some_and(|choice| choice.disable_parallel_tool_use == Some(true));
        let known = [
            ("container", is_set(self.container.as_ref())),
            (
                "context_management",
                is_set(self.context_management.as_ref()),
            ),
            ("thinking.budget_tokens", budget),
            ("tool_choice.disable_parallel_tool_use", one_tool),
        ];
        ignored(known, &self.unknown)
    }

    pub(super) fn thinks(&self) -> bool {
        self.thinking
            .as_ref()
            .is_some_and(|thinking| thinking.kind != "disabled")
    }

    pub(super) fn conversation(&mut self) -> Result<Conversation, Fault> {
        if self
            .mcp_servers
            .as_ref()
            .is_some_and(|servers| is_set(Some(servers)))
        {
            return invalid(
                "mcp_servers",
                "",
                "is not supported: tools are called by the client",
            );
        }
        refuse_unsupported(&self.unknown)?;
        let mut messages: Vec<ChatMessage> = Vec::new();
        if let Some(system) = self.system.take().filter(|system| !system.is_null()) {
            let text = text_of("system", system)?;
            if !text.is_empty() {
                messages.push(ChatMessage::new(Role::System, text));
            }
        }
        let mut reader = Messages {
            messages,
            tools: BTreeMap::new(),
        };
        for (index, message) in std::mem::take(&mut self.messages).into_iter().enumerate() {
            reader.push(index, message)?;
        }
        let messages = reader.messages;
        let last = messages.last().map(|message| message.role);
        if matches!(last, None | Some(Role::System)) {
            return invalid("messages", "[]", "is empty");
        }
        let mut variables = self.chat_template_kwargs.take().unwrap_or_default();
        variables.insert("enable_thinking".to_owned(), Value::Bool(self.thinks()));
        let config = self.output_config.as_ref();
        let effort = config.and_then(|config| config.effort.as_ref());
        effort::request("output_config.effort", effort, &mut variables)?;
        let mut conversation = Conversation {
            messages,
            tools: self.read_tools()?,
            variables,
            ..Conversation::default()
        };
        conversation.continues = conversation.ends_with_words_of_the_model();
        if last == Some(Role::Assistant) && !conversation.continues {
            let problem = "is the role of the last message, which has no text to continue";
            return invalid("messages", "assistant", problem);
        }
        Ok(conversation)
    }

    /// The tools in OpenAI's form; empty if none may be called.
    fn read_tools(&mut self) -> Result<Vec<Value>, Fault> {
        let tools = self.tools.take().unwrap_or_default();
        let tools = tools.iter().enumerate().map(|(index, tool)| {
            let field = format!("tools[{index}]");
            match tool.get("type").map(|kind| (kind.as_str(), kind)) {
                None | Some((Some("custom"), _)) | Some((_, Value::Null)) => {}
                Some((_, kind)) => {
                    return invalid(
                        &format!("{field}.type"),
                        kind,
                        "is not supported: tools are `custom`, and called by the client",
                    );
                }
            }
            let fields = [
                ("name", "name"),
                ("description", "description"),
                ("input_schema", "parameters"),
            ];
            function_of(&field, tool, &fields, true)
        });
        let tools = tools.collect::<Result<Vec<Value>, Fault>>()?;
        let tools = checked_tools("tools", Some(Value::Array(tools)))?;
        let none = self
            .tool_choice
            .as_ref()
            .is_some_and(|choice| choice.kind == "none");
        Ok(if none { Vec::new() } else { tools })
    }

    /// The required form of the answer.
    fn form(&mut self, tools: &[Value]) -> Result<Option<AnswerForm>, Fault> {
        if let Some(choice) = &self.tool_choice {
            let name = match (choice.kind.as_str(), &choice.name) {
                ("auto" | "none", _) => return self.output_form(),
                ("any", _) => None,
                ("tool", Some(name)) => {
                    if !has_tool(tools, name) {
                        return invalid("tool_choice.name", name, "is not one of `tools`");
                    }
                    Some(name.clone())
                }
                ("tool", None) => return invalid("tool_choice.name", "", "is missing"),
                (other, _) => {
                    return invalid(
                        "tool_choice.type",
                        other,
                        "is not one of `auto`, `any`, `tool`, `none`",
                    );
                }
            };
            if tools.is_empty() {
                return invalid(
                    "tool_choice",
                    &choice.kind,
                    "needs `tools`, and there are none",
                );
            }
            return Ok(Some(AnswerForm::ToolCall { name }));
        }
        self.output_form()
    }

    fn output_form(&mut self) -> Result<Option<AnswerForm>, Fault> {
        let config = self.output_config.take().unwrap_or_default();
        let (field, format) = match config.format {
            Some(format) => ("output_config.format", Some(format)),
            None => ("output_format", self.output_format.take()),
        };
        let mut format = match format {
            None | Some(Value::Null) => return Ok(None),
            Some(format) => format,
        };
        if format.get("type").and_then(Value::as_str) != Some("json_schema") {
            return invalid(field, format, "is not of the type `json_schema`");
        }
        match format.get_mut("schema").map(Value::take) {
            Some(schema) => Ok(Some(AnswerForm::JsonSchema {
                schema,
                field: if field == "output_format" {
                    "output_format.schema"
                } else {
                    "output_config.format.schema"
                },
            })),
            None => invalid(&format!("{field}.schema"), "", "is missing"),
        }
    }

    /// Converts the request to plain values.
    pub(super) fn into_request(
        mut self,
        meta: RequestMeta,
        model: String,
    ) -> Result<ChatRequest, Fault> {
        let max_tokens = at_least_one("max_tokens", self.max_tokens)?
            .ok_or_else(|| Fault::invalid("max_tokens", "", "is missing"))?;
        if let Some(thinking) = &self.thinking
            && !matches!(
                thinking.kind.as_str(),
                "enabled" | "disabled" | "adaptive" | "between_tools"
            )
        {
            return invalid(
                "thinking.type",
                &thinking.kind,
                "is not one of `enabled`, `adaptive`, `disabled`",
            );
        }
        let conversation = self.conversation()?;
        let form = self.form(&conversation.tools)?;
        if conversation.continues && form.is_some() {
            let problem =
                "is the role of the last message: a continued answer cannot have a format";
            return invalid("messages", "assistant", problem);
        }
        let sampling = SamplingFields {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            ..SamplingFields::default()
        };
        Ok(ChatRequest {
            meta,
            model,
            prompt: Prompt::Chat(conversation),
            max_tokens: Some(max_tokens),
            sampling: SamplingDialect::ANTHROPIC.read(&sampling)?,
            stop: stop_texts("stop_sequences", self.stop_sequences, STOP_TEXTS_MAX)?,
            form,
            streamed: self.stream == Some(true),
            ..ChatRequest::default()
        })
    }
}

/// Messages parsed so far.
struct Messages {
    messages: Vec<ChatMessage>,
    /// Names of the called tools, by call id.
    tools: BTreeMap<String, String>,
}

impl Messages {
    fn push(&mut self, index: usize, message: WireMessage) -> Result<(), Fault> {
        let role = match message.role.as_str() {
            "system" => Role::System,
            role => role_of(
                &format!("messages[{index}].role"),
                role,
                &["user", "assistant"],
            )?,
        };
        let field = format!("messages[{index}].content");
        let blocks = match message.content {
            Value::String(text) => {
                self.messages.push(ChatMessage::new(role, text));
                return Ok(());
            }
            Value::Array(blocks) => blocks,
            other => return invalid(&field, other, "is neither a text nor a list of blocks"),
        };
        let mut spoken = ChatMessage::new(role, "");
        for (place, block) in blocks.into_iter().enumerate() {
            let field = format!("{field}[{place}]");
            self.block(&field, block, &mut spoken)?;
        }
        let silent =
            spoken.content.is_empty() && spoken.tool_calls.is_empty() && spoken.reasoning.is_none();
        if !silent {
            self.messages.push(spoken);
        }
        Ok(())
    }

    fn block(
        &mut self,
        field: &str,
        mut block: Value,
        spoken: &mut ChatMessage,
    ) -> Result<(), Fault> {
        let kind = block
            .get("type")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        let text = |block: &Value, key: &str| {
            let text = block.get(key).and_then(Value::as_str).map(str::to_owned);
            text.ok_or_else(|| Fault::invalid(&format!("{field}.{key}"), "", "is missing"))
        };
        match (kind.as_str(), spoken.role) {
            ("text", _) => spoken.content.push_str(&text(&block, "text")?),
            ("thinking", Role::Assistant) => {
                let thoughts = text(&block, "thinking")?;
                spoken.reasoning.get_or_insert_default().push_str(&thoughts);
            }
            // from other models; only they can decrypt it
            ("redacted_thinking", Role::Assistant) => {}
            ("tool_use", Role::Assistant) => {
                let (id, name) = (text(&block, "id")?, text(&block, "name")?);
                self.tools.insert(id.clone(), name.clone());
                spoken.tool_calls.push(ToolCall {
                    id,
                    name,
                    arguments: match block.get_mut("input").map(Value::take) {
                        Some(input @ Value::Object(_)) => input.to_string(),
                        other => {
                            return invalid(
                                &format!("{field}.input"),
                                other.unwrap_or_default(),
                                "is not an object",
                            );
                        }
                    },
                });
            }
            ("tool_result", Role::User) => {
                let id = text(&block, "tool_use_id")?;
                let content = block
                    .get_mut("content")
                    .map(Value::take)
                    .unwrap_or_default();
                let mut outcome =
                    ChatMessage::new(Role::Tool, text_of(&format!("{field}.content"), content)?);
                if block.get("is_error") == Some(&Value::Bool(true)) {
                    outcome.content.insert_str(0, "error: ");
                }
                outcome.name = self.tools.get(&id).cloned();
                outcome.tool_call_id = Some(id);
                self.messages.push(outcome);
            }
            _ => {
                return invalid(
                    &format!("{field}.type"),
                    if kind.is_empty() {
                        block.to_string()
                    } else {
                        kind
                    },
                    "is not supported here: this model takes `text`, `tool_use` and `tool_result`",
                );
            }
        }
        Ok(())
    }
}

/// A text, or joined blocks of text.
fn text_of(field: &str, content: Value) -> Result<String, Fault> {
    let blocks = match content {
        Value::Null => return Ok(String::new()),
        Value::String(text) => return Ok(text),
        Value::Array(blocks) => blocks,
        other => return invalid(field, other, "is neither a text nor a list of blocks"),
    };
    let mut text = String::new();
    for (index, block) in blocks.iter().enumerate() {
        match (block.get("type").and_then(Value::as_str), block.get("text")) {
            (Some("text"), Some(Value::String(piece))) => text.push_str(piece),
            (Some("text") | None, _) => {
                return invalid(&format!("{field}[{index}]"), block, "has no `text`");
            }
            (Some(kind), _) => {
                return invalid(
                    &format!("{field}[{index}].type"),
                    kind,
                    "is not supported: this model takes `text`",
                );
            }
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::body::parse_json;
    use cotenant_units::Tokens;

    fn request(body: &Value) -> Result<ChatRequest, String> {
        parse_json::<WireRequest>(body.to_string().as_bytes())
            .and_then(|wire| wire.into_request(RequestMeta::default(), "m".to_owned()))
            .map_err(|fault| fault.message().to_owned())
    }

    #[test]
    fn fields_of_other_apis_are_refused_or_named() {
        let body = |field: &str, value: Value| json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], field: value});
        for field in ["grammar", "guided_json", "logprobs", "n"] {
            let error = request(&body(field, json!({"x": 1}))).unwrap_err();
            assert!(error.starts_with(field), "{error}");
        }
        let ignored = |body: Value| {
            parse_json::<WireRequest>(body.to_string().as_bytes())
                .unwrap()
                .ignored()
        };
        assert_eq!(
            ignored(body("response_format", json!({"type": "text"}))),
            ["response_format"]
        );
        for harmless in ["metadata", "service_tier", "cache_control"] {
            assert!(
                ignored(body(harmless, json!({"x": 1}))).is_empty(),
                "{harmless}"
            );
        }
    }

    #[test]
    fn blocks_become_messages_with_calls_and_their_outcomes() {
        let read = request(&json!({
            "model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "be brief", "cache_control": {}}],
            "stop_sequences": ["\n"], "temperature": 0.5, "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "f"},
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "wait"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "no"}], "is_error": true},
                    {"type": "text", "text": "so?"}]}],
        }))
        .unwrap();
        let conversation = match &read.prompt {
            Prompt::Chat(conversation) => conversation.clone(),
            other => panic!("{other:?}"),
        };
        let shape: Vec<(Role, &str)> = conversation
            .messages
            .iter()
            .map(|message| (message.role, message.content.as_str()))
            .collect();
        assert_eq!(
            shape,
            [
                (Role::System, "be brief"),
                (Role::User, "hi"),
                (Role::Assistant, "wait"),
                (Role::Tool, "error: no"),
                (Role::User, "so?"),
            ]
        );
        assert_eq!(conversation.messages[2].reasoning.as_deref(), Some("hm"));
        assert_eq!(
            conversation.messages[2].tool_calls[0].arguments,
            r#"{"a":1}"#
        );
        assert_eq!(conversation.messages[3].name.as_deref(), Some("f"));
        assert_eq!(conversation.messages[3].tool_call_id.as_deref(), Some("t1"));
        assert_eq!(conversation.variables["enable_thinking"], json!(true));
        assert_eq!(
            conversation.tools[0]["function"]["parameters"],
            json!({"type": "object"})
        );
        assert_eq!(
            (read.form, read.max_tokens, read.stop),
            (
                Some(AnswerForm::ToolCall {
                    name: Some("f".to_owned())
                }),
                Some(Tokens::new(9)),
                vec!["\n".to_owned()]
            )
        );
    }

    #[test]
    fn words_of_the_assistant_in_the_end_are_continued() {
        let begun =
            json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]);
        let read = request(&json!({"model": "m", "max_tokens": 9, "messages": begun})).unwrap();
        assert!(
            matches!(&read.prompt, Prompt::Chat(conversation) if conversation.continues),
            "{read:?}"
        );
        let form = json!({"format": {"type": "json_schema", "schema": {"type": "object"}}});
        let asked =
            json!({"model": "m", "max_tokens": 9, "messages": begun, "output_config": form});
        assert!(
            request(&asked)
                .unwrap_err()
                .contains("cannot have a format")
        );
    }

    #[test]
    fn a_wrong_value_is_named_with_its_limit() {
        let user = json!([{"role": "user", "content": "hi"}]);
        let blocks =
            |role: &str, block: Value| json!({"messages": [{"role": role, "content": [block]}]});
        let errors: Vec<String> = [
            json!({"max_tokens": null}),
            json!({"max_tokens": 0}),
            json!({"messages": []}),
            json!({"messages": [{"role": "robot", "content": "hi"}]}),
            json!({"messages": [{"role": "user", "content": 7}]}),
            json!({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]}),
            blocks("user", json!({"type": "image", "source": {}})),
            blocks("user", json!({"text": "hi"})),
            blocks("user", json!({"type": "tool_use", "id": "a", "name": "f", "input": {}})),
            blocks("assistant", json!({"type": "tool_use", "id": "a", "name": "f", "input": "x"})),
            blocks("user", json!({"type": "tool_result", "content": "x"})),
            blocks("user", json!({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]})),
            json!({"system": [{"type": "image"}]}),
            json!({"temperature": 1.5}),
            json!({"tools": [{"type": "web_search_20260209", "name": "web_search"}]}),
            json!({"tools": [{"name": "f"}]}),
            json!({"tools": [{"input_schema": {}}]}),
            json!({"tool_choice": {"type": "any"}}),
            json!({"tool_choice": {"type": "perhaps"}}),
            json!({"tool_choice": {"type": "tool", "name": "g"}}),
            json!({"thinking": {"type": "much"}}),
            json!({"output_config": {"format": {"type": "xml"}}}),
            json!({"output_format": {"type": "json_schema"}}),
            json!({"stop_sequences": 7}),
            json!({"mcp_servers": [{"url": "x"}]}),
        ]
        .iter()
        .map(|more| {
            let mut body = json!({"model": "m", "max_tokens": 9, "messages": user});
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            request(&body).unwrap_err()
        })
        .collect();
        insta::assert_snapshot!(errors.join("\n"));
    }
}
