//! Formats in which models declare and call tools.
//!
//! | format | the call | found in the template by |
//! |---|---|---|
//! | [`ToolFormat::Tagged`] | `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>` (Hermes, Qwen 2.5, Qwen 3, Granite 4) | `<tool_call>` |
//! | [`ToolFormat::Parameters`] | `<tool_call>\n<function=…>\n<parameter=…>\n…\n</parameter>…` (Qwen 3.5, Qwen 3 Coder) | `<function=` |
//! | [`ToolFormat::Mistral`] | `[TOOL_CALLS]name[ARGS]{…}` (Mistral, Ministral, Devstral) | `[TOOL_CALLS]` |
//! | [`ToolFormat::Listed`] | `<|tool_call|>[{"name": …, "arguments": {…}}]` (Granite 3) | `<\|tool_call\|>` |
//! | [`ToolFormat::Python`] | `<|tool_call_start|>[name(key=value)]<|tool_call_end|>` (LFM2, LFM2.5) | `List of tools: ` |
//! | [`ToolFormat::Gemma`] | `<|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>` (Gemma 4) | `<\|tool_call>` |
//! | [`ToolFormat::Channels`] | `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}` (gpt-oss) | `<\|channel\|>` |
//! | [`ToolFormat::Bare`] | `{"name": …, "parameters": {…}}` and nothing else (Llama 3) | `"parameters"` and `tools` |
//!
//! The format determines the syntax of a forced call; answers are parsed in every format (`answer`).
//!
//! A template without tool support gets the tools in a system message, in the wording of Qwen 2.5's template, and
//! writes them tagged.

use serde_json::{Value, json};

mod channels;
mod gemma;
mod parts;

use self::parts::{Field, in_sequence, literal, properties, repetitions, schema_alone};
pub(super) use self::{
    channels::{CHANNEL, FINAL, described, final_grammar, in_messages, is_last_message},
    gemma::with_results,
};
use super::schema::{ConstraintError, with_layout};
use cotenant_conversation::{ChatMessage, Conversation, Role};

/// Syntax of a tool call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ToolFormat {
    /// A single JSON object.
    Bare,
    /// A message with a JSON object, after messages in other channels.
    Channels,
    /// Tags around a name and an object whose texts stand between control tokens.
    Gemma,
    /// A tag before a list of JSON objects.
    Listed,
    /// A tag before a name, another between the name and its arguments.
    Mistral,
    /// Tags around a function and its parameters, with separate tags for each.
    Parameters,
    /// Tags around a list of calls in Python's notation.
    Python,
    /// Tags around one JSON object.
    Tagged,
}

impl ToolFormat {
    /// The format of a template, and whether the template itself declares tools to the model.
    pub(super) fn of(template: &str) -> (Self, bool) {
        let knows = template.contains("tools");
        let format = if template.contains("<function=") {
            Self::Parameters
        } else if template.contains("<|channel|>") {
            Self::Channels
        } else if template.contains("[TOOL_CALLS]") {
            Self::Mistral
        } else if template.contains("<|tool_call>") {
            Self::Gemma
        } else if template.contains("<|tool_call|>") {
            Self::Listed
        } else if template.contains("<tool_call>") {
            Self::Tagged
        } else if template.contains("List of tools: ") {
            Self::Python
        } else if knows && template.contains("\"parameters\"") {
            Self::Bare
        } else {
            return (Self::Tagged, false);
        };
        (format, knows)
    }
}

/// The conversation for a template without tool support: everything about tools as text. If it does not support system
/// messages either, the tools are explained before the first question.
pub(super) fn in_words(conversation: &Conversation, knows_system: bool) -> Conversation {
    let mut messages = with_answers_joined(&conversation.messages, message_in_words);
    if !conversation.tools.is_empty() {
        let listed = instructions(&conversation.tools);
        match messages.first_mut() {
            Some(first) if first.role == Role::System => {
                first.content = format!("{}\n\n{listed}", first.content);
            }
            Some(first) if first.role == Role::User && !knows_system => {
                first.content = format!("{listed}\n\n{}", first.content);
            }
            _ => messages.insert(0, ChatMessage::new(Role::System, listed)),
        }
    }
    Conversation {
        messages,
        tools: Vec::new(),
        ..conversation.clone()
    }
}

/// The conversation for a template without system messages: their text precedes the next user message.
pub(super) fn system_in_words(conversation: &Conversation) -> Conversation {
    let mut messages: Vec<ChatMessage> = Vec::with_capacity(conversation.messages.len());
    let mut said = String::new();
    let joined = |first: &str, second: &str| format!("{first}\n\n{second}");
    for message in &conversation.messages {
        match message.role {
            Role::System if said.is_empty() => said.clone_from(&message.content),
            Role::System => said = joined(&said, &message.content),
            Role::User if !said.is_empty() => {
                let content = joined(&std::mem::take(&mut said), &message.content);
                messages.push(ChatMessage {
                    content,
                    ..message.clone()
                });
            }
            _ => messages.push(message.clone()),
        }
    }
    if !said.is_empty() {
        // Nothing follows it except, possibly, a begun answer.
        match messages
            .iter_mut()
            .rfind(|message| message.role == Role::User)
        {
            Some(last) => last.content = joined(&last.content, &said),
            None => messages.insert(0, ChatMessage::new(Role::User, said)),
        }
    }
    Conversation {
        messages,
        ..conversation.clone()
    }
}

/// The conversation for a template that supports tools but refuses the order of their results: these become user text.
pub(super) fn answers_in_words(conversation: &Conversation) -> Conversation {
    let worded = |message: &ChatMessage| {
        if message.role == Role::Tool {
            message_in_words(message)
        } else {
            message.clone()
        }
    };
    Conversation {
        messages: with_answers_joined(&conversation.messages, worded),
        ..conversation.clone()
    }
}

/// Messages after `worded`. Many templates refuse two consecutive messages of one role, so the results of several tools
/// and the user text after them are joined into one message.
fn with_answers_joined(
    all: &[ChatMessage],
    worded: impl Fn(&ChatMessage) -> ChatMessage,
) -> Vec<ChatMessage> {
    let mut messages: Vec<ChatMessage> = Vec::with_capacity(all.len());
    let mut of_tools = false;
    for message in all {
        let (worded, by_tool) = (worded(message), message.role == Role::Tool);
        match messages.last_mut() {
            Some(last)
                if last.role == Role::User
                    && worded.role == Role::User
                    && (of_tools || by_tool) =>
            {
                last.content = format!("{}\n{}", last.content, worded.content);
                of_tools = true;
            }
            _ => {
                messages.push(worded);
                of_tools = by_tool;
            }
        }
    }
    messages
}

fn message_in_words(message: &ChatMessage) -> ChatMessage {
    if message.role == Role::Tool {
        let text = format!("<tool_response>\n{}\n</tool_response>", message.content);
        return ChatMessage::new(Role::User, text);
    }
    let mut content = message.content.clone();
    for call in &message.tool_calls {
        if !content.is_empty() {
            content.push('\n');
        }
        let said = json!({"name": call.name, "arguments": call.arguments_value()});
        content.push_str(&format!("<tool_call>\n{said}\n</tool_call>"));
    }
    ChatMessage {
        reasoning: message.reasoning.clone(),
        name: message.name.clone(),
        ..ChatMessage::new(message.role, content)
    }
}

/// Calls as [`ToolFormat::Python`] writes them, from their objects in a message.
pub(super) fn calls_in_python(calls: &[Value]) -> String {
    let written = calls.iter().map(|call| {
        let function = call.get("function").unwrap_or(&Value::Null);
        let name = function.get("name").and_then(Value::as_str);
        let arguments = function.get("arguments").and_then(Value::as_object);
        let keywords = arguments.into_iter().flatten();
        let keywords = keywords.map(|(key, value)| format!("{key}={}", in_python(value)));
        let keywords: Vec<String> = keywords.collect();
        format!("{}({})", name.unwrap_or_default(), keywords.join(", "))
    });
    let written: Vec<String> = written.collect();
    format!("{PYTHON_START}[{}]{PYTHON_END}", written.join(", "))
}

fn in_python(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(_) | Value::String(_) => value.to_string(),
        Value::Array(list) => {
            let list: Vec<String> = list.iter().map(in_python).collect();
            format!("[{}]", list.join(", "))
        }
        Value::Object(map) => {
            let fields = map.iter();
            let fields =
                fields.map(|(key, value)| format!("{}: {}", literal(key), in_python(value)));
            let fields: Vec<String> = fields.collect();
            format!("{{{}}}", fields.join(", "))
        }
    }
}

fn instructions(tools: &[Value]) -> String {
    let listed: String = tools.iter().map(|tool| format!("{tool}\n")).collect();
    format!(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function \
         signatures within <tools></tools> XML tags:\n<tools>\n{listed}</tools>\n\nFor each function call, return a json \
         object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{{\"name\": \
         <function-name>, \"arguments\": <args-json-object>}}\n</tool_call>"
    )
}

/// The grammar of one call of one of `functions`, each with its `name` and `parameters`.
///
/// # Errors
/// The parameters of a function are not a schema that can be enforced.
pub(super) fn call_grammar(
    format: ToolFormat,
    functions: &[&Value],
) -> Result<String, ConstraintError> {
    let mut rules = String::new();
    let mut calls = Vec::new();
    for (index, function) in functions.iter().enumerate() {
        let name = function
            .get("name")
            .and_then(Value::as_str)
            .unwrap_or_default();
        let parameters = arguments_of(function.get("parameters"));
        let call = match format {
            ToolFormat::Parameters => call_by_parameters(&mut rules, index, name, &parameters)?,
            ToolFormat::Channels => {
                channels::call(&mut rules, index, name, &with_layout(&parameters)?)
            }
            ToolFormat::Gemma => gemma::call(&mut rules, index, name, &with_layout(&parameters)?),
            ToolFormat::Python if has_keywords(&parameters) => {
                call_by_keywords(&mut rules, index, name, &parameters)?
            }
            _ => {
                let schema = with_layout(&parameters)?;
                rules.push_str(&format!("args_{index}: %json {schema}\n"));
                let (open, close) = around_object(format, name);
                let close = if close.is_empty() {
                    String::new()
                } else {
                    literal(close)
                };
                format!("{} args_{index} {close}", literal(&open))
            }
        };
        calls.push(format!("call_{index}"));
        rules.push_str(&format!("call_{index}: {call}\n"));
    }
    let start = calls.join(" | ");
    Ok(match format {
        ToolFormat::Channels => channels::after_thoughts(&start, &rules),
        _ => format!("start: {start}\n{rules}"),
    })
}

/// Texts around the JSON object of a call's arguments.
fn around_object(format: ToolFormat, name: &str) -> (String, &'static str) {
    let quoted = Value::from(name).to_string();
    let call = format!("{{\"name\": {quoted}, \"arguments\": ");
    match format {
        ToolFormat::Mistral => (format!("[TOOL_CALLS]{name}[ARGS]"), ""),
        ToolFormat::Listed => (format!("<|tool_call|>[{call}"), "}]"),
        ToolFormat::Tagged => (format!("<tool_call>\n{call}"), "}\n</tool_call>"),
        ToolFormat::Python => (format!("{PYTHON_START}[{call}"), "}]<|tool_call_end|>"),
        ToolFormat::Bare | ToolFormat::Channels | ToolFormat::Gemma | ToolFormat::Parameters => {
            (format!("{{\"name\": {quoted}, \"parameters\": "), "}")
        }
    }
}

/// The schema of a function's arguments, which are always an object; without declared parameters it is empty.
fn arguments_of(parameters: Option<&Value>) -> Value {
    let declared = parameters.and_then(Value::as_object);
    let mut schema = declared.cloned().unwrap_or_default();
    let says_nothing = schema
        .keys()
        .all(|keyword| SAYING_NOTHING.contains(&keyword.as_str()));
    if says_nothing {
        schema.insert("properties".to_owned(), json!({}));
        schema.insert("additionalProperties".to_owned(), Value::Bool(false));
    }
    if schema.get("type").is_none_or(Value::is_null) {
        schema.insert("type".to_owned(), "object".into());
    }
    Value::Object(schema)
}

/// The rule of a call with separate tags for each parameter: texts verbatim, everything else as JSON.
fn call_by_parameters(
    rules: &mut String,
    index: usize,
    name: &str,
    parameters: &Value,
) -> Result<String, ConstraintError> {
    let parameters = with_layout(parameters)?;
    let mut call = literal(&format!("<tool_call>\n<function={name}>\n"));
    for (at, (key, schema, is_required)) in properties(&parameters).enumerate() {
        let rule = format!("p_{index}_{at}");
        let optional = if is_required { "" } else { "?" };
        call.push_str(&format!(" {rule}{optional}"));
        let open = literal(&format!("<parameter={key}>\n"));
        let close = "\n</parameter>\n";
        let is_text = schema.get("type").and_then(Value::as_str) == Some("string");
        if let Some(texts) = schema
            .get("enum")
            .and_then(Value::as_array)
            .filter(|_| is_text)
        {
            let texts: Vec<String> = texts
                .iter()
                .filter_map(Value::as_str)
                .map(literal)
                .collect();
            rules.push_str(&format!(
                "{rule}: {open} ({}) {}\n",
                texts.join(" | "),
                literal(close)
            ));
        } else if is_text {
            rules.push_str(&format!("{rule}: {open} text_{index}_{at}\n"));
            let times = repetitions(schema);
            rules.push_str(&format!(
                "text_{index}_{at}[lazy]: /(?s:.{times})\\n<\\/parameter>\\n/\n"
            ));
        } else {
            rules.push_str(&format!(
                "{rule}: {open} json_{index}_{at} {}\n",
                literal(close)
            ));
            let schema = schema_alone(schema, &parameters);
            rules.push_str(&format!("json_{index}_{at}: %json {schema}\n"));
        }
    }
    call.push(' ');
    call.push_str(&literal("</function>\n</tool_call>"));
    Ok(call)
}

/// The rule of a call in Python's notation, `name(key=value, …)`, in the order of the declared parameters.
fn call_by_keywords(
    rules: &mut String,
    index: usize,
    name: &str,
    parameters: &Value,
) -> Result<String, ConstraintError> {
    let parameters = with_layout(parameters)?;
    let mut fields = Vec::new();
    for (at, (key, schema, is_required)) in properties(&parameters).enumerate() {
        let open = literal(&format!("{key}="));
        let grammar = if schema.get("type").and_then(Value::as_str) == Some("boolean") {
            format!("{open} (\"True\" | \"False\")")
        } else {
            let schema = schema_alone(schema, &parameters);
            rules.push_str(&format!("json_{index}_{at}: %json {schema}\n"));
            format!("{open} json_{index}_{at}")
        };
        fields.push(Field {
            grammar,
            is_required,
        });
    }
    let keywords = in_sequence(rules, &format!("keywords_{index}"), &fields, ", ");
    let open = literal(&format!("{PYTHON_START}[{name}("));
    Ok(format!(
        "{open} {keywords} {}",
        literal(&format!(")]{PYTHON_END}"))
    ))
}

/// Whether all parameters can be keywords.
fn has_keywords(parameters: &Value) -> bool {
    let is_name = |key: &str| {
        !key.is_empty()
            && key
                .chars()
                .all(|character| character.is_ascii_alphanumeric() || character == '_')
    };
    properties(parameters).all(|(key, ..)| is_name(key))
}

/// Tags of [`ToolFormat::Python`].
const PYTHON_START: &str = "<|tool_call_start|>";
const PYTHON_END: &str = "<|tool_call_end|>";

/// Keywords that constrain no argument of a function.
const SAYING_NOTHING: [&str; 4] = ["$schema", "description", "title", "type"];
