//! Conversations with the LLM, shared by the engine and all APIs.

use std::{
    collections::BTreeSet,
    hash::{BuildHasher as _, RandomState},
};

use serde::Serialize;
use serde_json::{Map, Value};

use self::schema::KeptSchema;
use cotenant_policy::kv_type::KvType;
use cotenant_units::Tokens;

pub mod refusal;
pub mod refusals;
pub mod schema;
pub mod sinks;

/// Role of a speaker. A closed set: templates build control tokens from it, so it must not be free text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The model.
    Assistant,
    /// The application; also `developer`, as newer clients call it.
    System,
    /// The result of a tool call.
    Tool,
    /// The user.
    User,
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// The speaker.
    pub role: Role,
    /// The text; parts are joined, an absent text is empty.
    pub content: String,
    /// The model's thoughts before its text.
    pub reasoning: Option<String>,
    /// Tools called by the model.
    pub tool_calls: Vec<ToolCall>,
    /// The call whose result this is.
    pub tool_call_id: Option<String>,
    /// The tool whose result this is.
    pub name: Option<String>,
}

impl ChatMessage {
    /// A message that is only text.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }
}

/// A tool call by the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Its id.
    pub id: String,
    /// The tool.
    pub name: String,
    /// A JSON object, as text.
    pub arguments: String,
}

/// Messages and tools.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// Messages, oldest first.
    pub messages: Vec<ChatMessage>,
    /// Callable tools, in OpenAI's format: `{"type": "function", "function": {…}}`.
    pub tools: Vec<Value>,
    /// Variables for the template, such as `enable_thinking`.
    pub variables: Map<String, Value>,
    /// Whether the last message, by the model, is the beginning of the answer.
    pub continues: bool,
    /// Tokens of an earlier conversation, including its answer, that precede it.
    pub before: Vec<u32>,
}

impl Conversation {
    /// Whether an answer may continue the last message: text of the assistant, after other messages.
    pub fn ends_with_words_of_the_model(&self) -> bool {
        let last = self.messages.last().filter(|_| self.messages.len() > 1);
        last.is_some_and(|last| {
            last.role == Role::Assistant && last.tool_calls.is_empty() && !last.content.is_empty()
        })
    }
}

impl From<Vec<ChatMessage>> for Conversation {
    fn from(messages: Vec<ChatMessage>) -> Self {
        Self {
            messages,
            ..Self::default()
        }
    }
}

/// The input that an answer continues.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// A conversation, rendered by the model's chat template.
    Chat(Conversation),
    /// Verbatim text. Control tokens written in it are not recognised.
    Text(String),
    /// Verbatim text, in which control tokens are recognised.
    Raw(String),
    /// Verbatim tokens.
    Tokens(Vec<u32>),
}

impl Default for Prompt {
    fn default() -> Self {
        Self::Chat(Conversation::default())
    }
}

impl Prompt {
    /// The messages of a conversation; otherwise empty.
    pub fn messages(&self) -> &[ChatMessage] {
        match self {
            Self::Chat(conversation) => &conversation.messages,
            Self::Raw(_) | Self::Text(_) | Self::Tokens(_) => &[],
        }
    }

    /// The tools of a conversation; otherwise empty.
    pub fn tools(&self) -> &[Value] {
        match self {
            Self::Chat(conversation) => &conversation.tools,
            Self::Raw(_) | Self::Text(_) | Self::Tokens(_) => &[],
        }
    }
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// The model's thoughts before its text.
    Reasoning(String),
    /// The model's text.
    Text(String),
    /// A tool call.
    ToolCall {
        /// The tool.
        name: String,
        /// A JSON object, as text.
        arguments: String,
    },
}

impl ToolCall {
    /// The arguments in the form expected by templates: an object, or the text if it is not one.
    pub fn arguments_value(&self) -> Value {
        let is_object = self.arguments.trim_start().starts_with('{');
        is_object
            .then(|| serde_json::from_str(&self.arguments).ok())
            .flatten()
            .unwrap_or_else(|| Value::from(self.arguments.as_str()))
    }
}

/// Required form of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum AnswerForm {
    /// Any JSON object.
    JsonObject,
    /// JSON that is valid by a schema.
    JsonSchema {
        /// The schema.
        schema: Value,
        /// The client's field that contained it, for messages.
        field: &'static str,
    },
    /// A call of the tool with this name, or of any tool.
    ToolCall {
        /// The name.
        name: Option<String>,
    },
}

/// Partial sampling settings: of a client, of the model's file, or of the API.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingWish {
    /// 0 to 2; 0 always takes the most likely token.
    pub temperature: Option<f64>,
    /// 0 to 1: only the most likely tokens that together reach this probability; 0 leaves one.
    pub top_p: Option<f64>,
    /// Only this many of the most likely tokens; 0 for all.
    pub top_k: Option<u32>,
    /// 0 to 1: only tokens at least this many times as likely as the most likely one.
    pub min_p: Option<f64>,
    /// Divisor for the score of recent tokens; 1 has no effect.
    pub repeat_penalty: Option<f64>,
    /// Subtracted for each occurrence of a generated token, −2 to 2.
    pub frequency_penalty: Option<f64>,
    /// Subtracted once from every generated token, −2 to 2.
    pub presence_penalty: Option<f64>,
    /// The same seed, settings and prompt give the same answer.
    pub seed: Option<u64>,
}

impl SamplingWish {
    /// No settings.
    pub const NONE: Self = Self {
        temperature: None,
        top_p: None,
        top_k: None,
        min_p: None,
        repeat_penalty: None,
        frequency_penalty: None,
        presence_penalty: None,
        seed: None,
    };

    /// The unmodified distribution: OpenAI's default, and that of APIs whose originals specify none.
    pub const AS_COMPUTED: Self = Self {
        temperature: Some(1.0),
        ..Self::NONE
    };

    /// The same, completed by `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            temperature: self.temperature.or(other.temperature),
            top_p: self.top_p.or(other.top_p),
            top_k: self.top_k.or(other.top_k),
            min_p: self.min_p.or(other.min_p),
            repeat_penalty: self.repeat_penalty.or(other.repeat_penalty),
            frequency_penalty: self.frequency_penalty.or(other.frequency_penalty),
            presence_penalty: self.presence_penalty.or(other.presence_penalty),
            seed: self.seed.or(other.seed),
        }
    }

    /// A random seed of 32 bits, which every client's language can represent.
    pub fn random_seed() -> u64 {
        // The standard library's hash maps use random keys, different for each map.
        RandomState::new().hash_one(0u8) >> 32
    }
}

impl AnswerForm {
    /// Keywords of its schemas that are not enforced, by the containing field: an answer may violate them.
    pub fn let_through(&self, tools: &[Value]) -> BTreeSet<String> {
        let named = |field: &'static str, schema: &Value| {
            let keywords = KeptSchema::of(schema)
                .map(|kept| kept.let_through)
                .unwrap_or_default();
            keywords
                .into_iter()
                .map(move |keyword| format!("{field}.{keyword}"))
        };
        match self {
            Self::JsonObject => BTreeSet::new(),
            Self::JsonSchema { schema, field } => named(field, schema).collect(),
            Self::ToolCall { name } => tools
                .iter()
                .filter_map(|tool| tool.get("function"))
                .filter(|function| {
                    name.as_deref()
                        .is_none_or(|name| function.get("name").is_some_and(|own| own == name))
                })
                .filter_map(|function| function.get("parameters"))
                .flat_map(|parameters| named("tools", parameters))
                .collect(),
        }
    }
}

/// Reason for the end of an answer, as reported by APIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The limit of tokens, the context, or the KV capacity was reached.
    Length,
    /// The model ended it.
    Stop,
    /// A stop text was found: the one at this index of the request.
    StopText(usize),
    /// The model ended it with tool calls.
    ToolCalls,
}

/// Resources used by an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: Tokens,
    /// Prompt tokens that were already in the KV cache.
    pub cached_tokens: Tokens,
    /// Tokens generated, the end token included.
    pub completion_tokens: Tokens,
    /// The smallest KV type in which any of its context was stored.
    pub kv_type: KvType,
    /// Tokens of its context dropped during the answer: the oldest after the sinks.
    pub dropped_tokens: Tokens,
}

impl Usage {
    /// The sum of two answers.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let sum = |one: Tokens, other: Tokens| Tokens::new(one.get().saturating_add(other.get()));
        Self {
            prompt_tokens: sum(self.prompt_tokens, other.prompt_tokens),
            cached_tokens: sum(self.cached_tokens, other.cached_tokens),
            completion_tokens: sum(self.completion_tokens, other.completion_tokens),
            kv_type: self.kv_type.min(other.kv_type),
            dropped_tokens: sum(self.dropped_tokens, other.dropped_tokens),
        }
    }
}
