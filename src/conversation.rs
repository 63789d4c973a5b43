//! Conversations with the LLM, as the engine and all APIs have them.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::{policy::kv_type::KvType, units::Tokens};

/// Who speaks in a conversation. A closed set: templates make control tokens of it, so it must not be free text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The model.
    Assistant,
    /// The application; `developer`, as newer clients call it, too.
    System,
    /// The outcome of a tool call.
    Tool,
    /// The person.
    User,
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// Who speaks.
    pub role: Role,
    /// The text; parts are joined, an absent text is empty.
    pub content: String,
    /// What the model thought before it spoke.
    pub reasoning: Option<String>,
    /// What the model wanted done.
    pub tool_calls: Vec<ToolCall>,
    /// Which call this is the outcome of.
    pub tool_call_id: Option<String>,
    /// The tool of which this is the outcome.
    pub name: Option<String>,
}

impl ChatMessage {
    /// A message that is only text.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), reasoning: None, tool_calls: Vec::new(), tool_call_id: None, name: None }
    }
}

/// The call of a tool that the model made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Its id.
    pub id: String,
    /// The tool.
    pub name: String,
    /// A JSON object, as text.
    pub arguments: String,
}

/// What was said, and what the model may do about it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// What was said, the oldest first.
    pub messages: Vec<ChatMessage>,
    /// Tools that may be called, as OpenAI's interface writes them: `{"type": "function", "function": {…}}`.
    pub tools: Vec<Value>,
    /// Variables for the template, such as `enable_thinking`.
    pub variables: Map<String, Value>,
}

impl From<Vec<ChatMessage>> for Conversation {
    fn from(messages: Vec<ChatMessage>) -> Self {
        Self { messages, ..Self::default() }
    }
}

/// What an answer continues.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// A conversation, rendered with the model's chat template.
    Chat(Conversation),
    /// Text as it stands. Control tokens written in it are not recognised.
    Text(String),
    /// Tokens as they stand.
    Tokens(Vec<u32>),
}

impl Default for Prompt {
    fn default() -> Self {
        Self::Chat(Conversation::default())
    }
}

impl Prompt {
    /// The messages of a conversation; none of anything else.
    #[must_use]
    pub fn messages(&self) -> &[ChatMessage] {
        match self {
            Self::Chat(conversation) => &conversation.messages,
            Self::Text(_) | Self::Tokens(_) => &[],
        }
    }

    /// The tools of a conversation; none of anything else.
    #[must_use]
    pub fn tools(&self) -> &[Value] {
        match self {
            Self::Chat(conversation) => &conversation.tools,
            Self::Text(_) | Self::Tokens(_) => &[],
        }
    }
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// What the model thinks, before it speaks.
    Reasoning(String),
    /// What it says.
    Text(String),
    /// What it wants done.
    ToolCall {
        /// The tool.
        name: String,
        /// A JSON object, as text.
        arguments: String,
    },
}

impl ToolCall {
    /// The arguments as templates want them: an object, or the text when it is none.
    pub(crate) fn arguments_value(&self) -> Value {
        serde_json::from_str(&self.arguments)
            .ok()
            .filter(Value::is_object)
            .unwrap_or_else(|| Value::from(self.arguments.as_str()))
    }
}

/// The form that an answer must have.
#[derive(Clone, Debug, PartialEq)]
pub enum AnswerForm {
    /// Any JSON object.
    JsonObject,
    /// JSON that is valid by a schema.
    JsonSchema {
        /// The schema.
        schema: Value,
        /// Where the client wrote it, for messages.
        field: &'static str,
    },
    /// The call of one of the tools: the one of this name, or any.
    ToolCall {
        /// The name.
        name: Option<String>,
    },
}

/// Why an answer ended, as APIs report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The limit of tokens, the context, or the KV capacity was reached.
    Length,
    /// The model ended it.
    Stop,
    /// A stop text was found: the one at this place of the request's.
    StopText(usize),
    /// The model ended it, and wants tools called.
    ToolCalls,
}

/// What an answer took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: Tokens,
    /// Those of them that were in the KV cache already.
    pub cached_tokens: Tokens,
    /// Tokens generated, the ending one included.
    pub completion_tokens: Tokens,
    /// The smallest type in which any of its context was kept.
    pub kv_type: KvType,
    /// Tokens of its context that were dropped while it was given, the oldest behind those that stay.
    pub dropped_tokens: Tokens,
}
