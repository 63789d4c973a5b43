//! Conversations with the LLM, as the engine and all APIs have them.

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
    /// Whether the last message, which is the model's, is the beginning of the answer.
    pub continues: bool,
    /// Tokens of an earlier conversation, answer included, that go before it.
    pub before: Vec<u32>,
}

impl Conversation {
    /// Whether the last message is one that an answer may continue: words of the model's, behind others.
    #[must_use]
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

/// What an answer continues.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// A conversation, rendered with the model's chat template.
    Chat(Conversation),
    /// Text as it stands. Control tokens written in it are not recognised.
    Text(String),
    /// Text as it stands, with the control tokens that are written in it.
    Raw(String),
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
            Self::Raw(_) | Self::Text(_) | Self::Tokens(_) => &[],
        }
    }

    /// The tools of a conversation; none of anything else.
    #[must_use]
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
    pub fn arguments_value(&self) -> Value {
        let is_object = self.arguments.trim_start().starts_with('{');
        is_object
            .then(|| serde_json::from_str(&self.arguments).ok())
            .flatten()
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

/// How tokens are chosen, as far as it is said: by a client, by the model's file, or by the API.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingWish {
    /// 0 to 2; 0 takes the likeliest token always.
    pub temperature: Option<f64>,
    /// 0 to 1: only the likeliest tokens that together have this probability; 0 leaves one.
    pub top_p: Option<f64>,
    /// Only this many of the likeliest tokens; 0 for all.
    pub top_k: Option<u32>,
    /// 0 to 1: only tokens that are at least this many times as likely as the likeliest.
    pub min_p: Option<f64>,
    /// Divides the score of tokens that occurred lately; 1 has no effect.
    pub repeat_penalty: Option<f64>,
    /// Subtracted for each time that a token was generated, −2 to 2.
    pub frequency_penalty: Option<f64>,
    /// Subtracted from every token that was generated, −2 to 2.
    pub presence_penalty: Option<f64>,
    /// The same seed, settings and prompt give the same answer.
    pub seed: Option<u64>,
}

impl SamplingWish {
    /// Nothing is said.
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

    /// The distribution as the model computed it: OpenAI's default, and that of APIs whose originals have none.
    pub const AS_COMPUTED: Self = Self {
        temperature: Some(1.0),
        ..Self::NONE
    };

    /// The same, with what `other` says where this says nothing.
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

    /// A seed by chance, of 32 bits, which every client's language holds.
    #[must_use]
    pub fn random_seed() -> u64 {
        // The standard library's hash maps have keys by chance, others for each.
        RandomState::new().hash_one(0u8) >> 32
    }
}

impl AnswerForm {
    /// Keywords of its schemas that are not kept, by the field that they are in: an answer may be other than they ask for.
    #[must_use]
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

impl Usage {
    /// Of two answers together.
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
