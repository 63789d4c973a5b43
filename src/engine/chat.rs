//! Rendering of conversations by the model's chat template.
//!
//! `jinja` renders the template of the model file; this module supplies its context and keeps user text from becoming
//! control text.
//!
//! # User text stays text
//!
//! A rendered conversation is one string, in which `<|im_end|>` from the template and `<|im_end|>` from a user look the
//! same. Before rendering, a mark (a Unicode noncharacter that occurs nowhere else) is therefore inserted after each
//! character of a message with which a control token could begin. The tokenizer recognises control tokens in the marked
//! string, which hides those from users, and drops the marks before it encodes the rest.
//!
//! Hence a control token can begin only in the template's own text, however the template cuts, trims or joins messages.
//! A mark before messages that begin with the rest of a control token, or form the middle of one, keeps a token from
//! starting in the template and ending in a message. Roles, from which templates do build control tokens, are a closed
//! set.
//!
//! Tags that the template itself searches for in messages, such as `</think>`, carry no mark, so that it finds them; a
//! tag that is a control token always carries one.

use serde_json::{Map, Value, json};

use super::{
    answer::{AnswerStyle, ThoughtTags, Thoughts},
    gguf::Header,
    tokenizer::Tokenizer,
    tool_format::{
        FINAL, ToolFormat, answers_in_words, calls_in_python, described, in_messages, in_words,
        system_in_words, with_results,
    },
};
pub use cotenant_conversation::{ChatMessage, Conversation, Role, ToolCall};

/// The chat template of a model.
pub struct ChatTemplate {
    /// Empty if the model has none and the usual one does not fit it.
    source: String,
    bos: String,
    eos: String,
    format: ToolFormat,
    /// Whether the template itself declares tools to the model.
    knows_tools: bool,
}

/// A conversation as one text, in which some characters carry a mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The text with its marks.
    pub text: String,
    /// The mark.
    pub mark: char,
    /// Parsing style of the answer.
    pub style: AnswerStyle,
}

impl ChatTemplate {
    /// The template of a model file; ChatML if it has none and its vocabulary has ChatML's tokens. For a file without a
    /// usable template only `render` fails, because text without roles can still be continued.
    pub fn from_header(header: &Header, tokenizer: &Tokenizer) -> Self {
        let text_of = |key: &str| {
            let token = usize::try_from(header.u32(key)?).ok()?;
            header.strings("tokenizer.ggml.tokens")?.get(token)
        };
        Self::new(
            header.string(KEY_TEMPLATE),
            tokenizer,
            text_of("tokenizer.ggml.bos_token_id").unwrap_or_default(),
            text_of("tokenizer.ggml.eos_token_id").unwrap_or_default(),
        )
    }

    fn new(source: Option<&str>, tokenizer: &Tokenizer, bos: &str, eos: &str) -> Self {
        let source = source.filter(|source| !source.is_empty());
        let usual = || usual(|text| tokenizer.control(text).is_some());
        let source = source
            .or_else(|| usual().map(|(template, _)| template))
            .unwrap_or_default();
        let (format, knows_tools) = ToolFormat::of(source);
        Self {
            source: source.to_owned(),
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            format,
            knows_tools,
        }
    }

    /// Template text; empty if there is none.
    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// Format of the model's tool calls.
    pub const fn tool_format(&self) -> ToolFormat {
        self.format
    }

    /// The conversation up to the beginning of the model's answer; `render` evaluates the template for a context.
    ///
    /// # Errors
    /// There is no template, nothing to render, or the template refuses the conversation.
    pub(super) fn render(
        &self,
        conversation: &Conversation,
        tokenizer: &Tokenizer,
        render: impl Fn(&Map<String, Value>) -> Result<String, ChatError>,
    ) -> Result<Rendered, ChatError> {
        if self.source.is_empty() {
            return Err(ChatError::NoTemplate);
        }
        if conversation.messages.is_empty() {
            return Err(ChatError::Empty);
        }
        let tools = (!conversation.tools.is_empty()).then_some(self.format);
        let once = |conversation: &Conversation| {
            let rendered = self.render_once(conversation, tools, tokenizer, &render);
            let by_system = conversation
                .messages
                .iter()
                .any(|message| message.role == Role::System);
            match rendered {
                // Templates such as Gemma 2's refuse the role.
                Err(ChatError::Refused { .. }) if by_system => self
                    .render_once(&system_in_words(conversation), tools, tokenizer, &render)
                    .or(rendered),
                rendered => rendered,
            }
        };
        if !self.knows_tools {
            return once(&in_words(conversation, self.knows_system()));
        }
        let rendered = once(conversation);
        let by_tools = conversation
            .messages
            .iter()
            .any(|message| message.role == Role::Tool);
        match rendered {
            // Some templates declare tools but refuse two tool results in a row, or fail on other forms of them.
            Err(ChatError::Refused { .. } | ChatError::Render { .. }) if by_tools => {
                once(&answers_in_words(conversation))
                    .or_else(|_| once(&in_words(conversation, self.knows_system())))
                    .or(rendered)
            }
            rendered => rendered,
        }
    }

    fn render_once(
        &self,
        conversation: &Conversation,
        tools: Option<ToolFormat>,
        tokenizer: &Tokenizer,
        render: impl Fn(&Map<String, Value>) -> Result<String, ChatError>,
    ) -> Result<Rendered, ChatError> {
        // Text with which the answer is to begin follows the template's output, which ends at the start of an answer.
        let (messages, begun) = match conversation.messages.split_last() {
            Some((last, before)) if conversation.continues => (before, last.content.as_str()),
            _ => (conversation.messages.as_slice(), ""),
        };
        let id_of = |id: &str| {
            if self.format == ToolFormat::Mistral {
                short_id(id)
            } else {
                id.to_owned()
            }
        };
        let mut said = vec![
            Value::Array(
                messages
                    .iter()
                    .map(|message| value_of(message, id_of))
                    .collect(),
            ),
            Value::Array(conversation.tools.clone()),
            Value::Object(conversation.variables.clone()),
            Value::from(begun),
        ];
        let mark = MARKS
            .into_iter()
            .find(|&mark| {
                let taken = |text: &str| text.contains(mark) || text.contains(&printed(mark));
                !taken(&self.source) && !said.iter().any(|value| contains(value, &taken))
            })
            .ok_or(ChatError::Marks)?;
        said.iter_mut()
            .for_each(|value| self.mark_all(value, mark, tokenizer));
        let mut said = said.into_iter();
        let (mut shown, tools_reported, variables) = (said.next(), said.next(), said.next());
        if let Some(Value::Array(shown)) = &mut shown {
            // Roles are a closed set, and templates compare them.
            for (message, said) in shown.iter_mut().zip(messages) {
                if let Value::Object(message) = message {
                    message.insert("role".to_owned(), json!(said.role));
                    self.write_calls(message);
                }
            }
            if self.joins_results() {
                *shown = with_results(std::mem::take(shown));
            }
            if self.format == ToolFormat::Channels {
                *shown = in_messages(std::mem::take(shown));
            }
        }
        let tools_reported = tools_reported.map(|mut tools| {
            if let (ToolFormat::Channels, Value::Array(tools)) = (self.format, &mut tools) {
                described(tools);
            }
            tools
        });
        let mut context = match variables {
            Some(Value::Object(variables)) => variables,
            _ => Map::new(),
        };
        // A client's own variables never replace these.
        context.insert("messages".to_owned(), shown.unwrap_or_default());
        match tools_reported {
            Some(tools) if !conversation.tools.is_empty() => {
                context.insert("tools".to_owned(), tools)
            }
            _ => context.remove("tools"),
        };
        context.insert("add_generation_prompt".to_owned(), Value::Bool(true));
        context.insert("bos_token".to_owned(), json!(self.bos));
        context.insert("eos_token".to_owned(), json!(self.eos));
        // If a template joins a list to a text, the template engine prints marks as escapes.
        let mut text = render(&context)?.replace(&printed(mark), &mark.to_string());
        if self.format == ToolFormat::Gemma && text.ends_with(TURN_END) {
            // The template begins no answer after a call with text.
            text.push_str(TURN_START);
        }
        let thoughts = match ThoughtTags::of(&self.source) {
            _ if self.format == ToolFormat::Channels => Thoughts::Channels {
                in_text: !begun.is_empty(),
            },
            None => Thoughts::None,
            Some(tags) if text.trim_end().ends_with(tags.begin.trim_end()) => Thoughts::Open(tags),
            Some(tags) => Thoughts::Perhaps(tags),
        };
        if begun.is_empty() {
            return Ok(Rendered {
                text,
                mark,
                style: AnswerStyle { thoughts, tools },
            });
        }
        if let Thoughts::Open(tags) = thoughts {
            // It is not a thought of the model.
            text.push_str(&format!("\n{}\n\n", tags.end));
        }
        let thoughts = match thoughts {
            Thoughts::Channels { .. } => {
                text.push_str(FINAL);
                thoughts
            }
            _ => Thoughts::None,
        };
        if let Some(Value::String(begun)) = said.next() {
            text.push_str(&begun);
        }
        Ok(Rendered {
            text,
            mark,
            style: AnswerStyle { thoughts, tools },
        })
    }

    /// Writes the calls of an earlier answer into its content, for a template of LFM2 that does not print them.
    fn write_calls(&self, message: &mut Map<String, Value>) {
        if self.format != ToolFormat::Python || self.source.contains("tool_calls") {
            return;
        }
        if let Some(Value::Array(calls)) = message.remove("tool_calls")
            && let Some(Value::String(content)) = message.get_mut("content")
        {
            content.push_str(&calls_in_python(&calls));
        }
    }

    /// Whether results of tools belong into the message of their calls: the first templates of Gemma 4 have no role for
    /// them.
    fn joins_results(&self) -> bool {
        self.format == ToolFormat::Gemma && !self.source.contains("tool_call_id")
    }

    /// Whether a system message may be among the others: the template searches for it, or searches for nothing.
    fn knows_system(&self) -> bool {
        self.source.contains("system") || !self.source.contains("raise_exception")
    }

    /// Inserts marks into all texts of a value in place: a copy would double its memory.
    fn mark_all(&self, value: &mut Value, mark: char, tokenizer: &Tokenizer) {
        match value {
            Value::String(text) => *text = self.marked(text, mark, tokenizer),
            Value::Array(list) => list
                .iter_mut()
                .for_each(|value| self.mark_all(value, mark, tokenizer)),
            Value::Object(map) => {
                map.values_mut()
                    .for_each(|value| self.mark_all(value, mark, tokenizer));
                // Our own keys contain no character with which a control token could begin; keys of schemas may. The
                // other keys stay unchanged: templates look them up by name.
                let control = tokenizer.control_texts();
                let needs_mark =
                    |key: &String| key.chars().any(|character| control.begins_with(character));
                if map.keys().any(needs_mark) {
                    let fields = std::mem::take(map).into_iter();
                    let marked = |key| {
                        if needs_mark(&key) {
                            self.marked(&key, mark, tokenizer)
                        } else {
                            key
                        }
                    };
                    *map = fields.map(|(key, value)| (marked(key), value)).collect();
                }
            }
            _ => {}
        }
    }

    /// The content with marks wherever a control token could be recognised.
    fn marked(&self, content: &str, mark: char, tokenizer: &Tokenizer) -> String {
        let control = tokenizer.control_texts();
        let mut marked = String::with_capacity(content.len() + 8);
        let trimmed = content.trim();
        // Templates trim messages; the mark goes inside the trimmed text, so that trimming still works.
        let lead = content.len() - content.trim_start().len();
        let continues = !trimmed.is_empty()
            && control.texts().any(|token| {
                token
                    .char_indices()
                    .skip(1)
                    .any(|(at, _)| meets(token.get(at..), trimmed))
            });
        for (at, character) in content.char_indices() {
            if at == lead && continues {
                marked.push(mark);
            }
            marked.push(character);
            let rest = content.get(at..).unwrap_or_default();
            if control.begins_with(character) && !self.looks_for_tag(rest, control) {
                marked.push(mark);
            }
        }
        marked
    }

    /// Whether `rest` begins with a tag that the template searches for and that is not (a prefix of) a control token.
    fn looks_for_tag(&self, rest: &str, control: &super::tokenizer::Literals) -> bool {
        let Some(tag) = rest.find('>').and_then(|end| rest.get(..=end)) else {
            return false;
        };
        tag.len() <= TAG_LENGTH_MAX
            && tag.starts_with('<')
            && self.source.contains(tag)
            && !control.texts().any(|token| token.starts_with(tag))
    }
}

/// Chat format for a model file without a chat template, as the end of a sentence; `None` if it has one.
pub(super) fn without_template(header: &Header) -> Option<&'static str> {
    if header
        .string(KEY_TEMPLATE)
        .is_some_and(|source| !source.is_empty())
    {
        return None;
    }
    let texts = header.strings("tokenizer.ggml.tokens")?;
    let usual = usual(|text| texts.iter().any(|token| token == text));
    Some(usual.map_or(REFUSED_WITHOUT, |(_, written)| written))
}

/// Template for a model file without one, by the control tokens of its vocabulary, and the description of the format.
fn usual(has: impl Fn(&str) -> bool) -> Option<(&'static str, &'static str)> {
    let usual = [
        (
            CHATML_TOKENS,
            (CHATML, "chats are written as ChatML, by its tokens"),
        ),
        (
            GEMMA_TOKENS,
            (GEMMA, "chats are written in Gemma's turns, by its tokens"),
        ),
        (
            GEMMA_4_TOKENS,
            (
                GEMMA_4,
                "chats are written in Gemma 4's turns, by its tokens",
            ),
        ),
    ];
    let mut usual = usual.into_iter();
    let found = usual.find(|(tokens, _)| tokens.iter().all(|text| has(text)));
    found.map(|(_, template)| template)
}

/// Whether one of the two is a prefix of the other.
fn meets(rest_of_token: Option<&str>, content: &str) -> bool {
    rest_of_token.is_some_and(|rest| content.starts_with(rest) || rest.starts_with(content))
}

/// An id of nine letters and digits, as Mistral's templates demand: the last characters, in which ids differ.
fn short_id(id: &str) -> String {
    let characters: Vec<char> = id.chars().filter(char::is_ascii_alphanumeric).collect();
    let last: String = characters
        .iter()
        .skip(characters.len().saturating_sub(9))
        .collect();
    format!("{last:0>9}")
}

/// A mark as the template engine prints it within a list.
fn printed(mark: char) -> String {
    mark.escape_unicode().to_string()
}

/// Whether a text in `value` satisfies `is`.
fn contains(value: &Value, is: &impl Fn(&str) -> bool) -> bool {
    match value {
        Value::String(text) => is(text),
        Value::Array(list) => list.iter().any(|value| contains(value, is)),
        Value::Object(map) => map
            .iter()
            .any(|(key, value)| is(key) || contains(value, is)),
        _ => false,
    }
}

/// Why a conversation cannot be rendered.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The template is not valid Jinja.
    #[error("cannot compile the model's chat template: {message}")]
    Compile {
        /// Message of the library.
        message: String,
    },
    /// It exceeds its limit of memory or time.
    #[error("the model's chat template exceeds the allowed memory or time")]
    Bound,
    /// The process that computes templates was lost.
    #[error("the text helper failed: {message}")]
    Helper {
        /// Description of the failure.
        message: String,
    },
    /// There is nothing to render.
    #[error("the conversation has no messages")]
    Empty,
    /// It contains all of the noncharacters used as marks.
    #[error("the messages contain each of the {} Unicode noncharacters that could mark them", MARKS.len())]
    Marks,
    /// The model has no template and lacks the tokens of the usual one.
    #[error("the model has no chat template, and its vocabulary lacks {}", CHATML_TOKENS.join(" and "))]
    NoTemplate,
    /// The template refuses the conversation, for example because of the order of its roles.
    #[error("the model's chat template refuses the conversation: {message}")]
    Refused {
        /// Message of the template.
        message: String,
    },
    /// The template failed.
    #[error("the model's chat template failed: {message}")]
    Render {
        /// Message of the library.
        message: String,
    },
}

/// A message as seen by templates, with call ids made by `id_of`.
fn value_of(message: &ChatMessage, id_of: impl Fn(&str) -> String) -> Value {
    let mut map = Map::new();
    map.insert("role".to_owned(), json!(message.role));
    map.insert("content".to_owned(), json!(message.content));
    if let Some(reasoning) = &message.reasoning {
        map.insert("reasoning_content".to_owned(), json!(reasoning));
    }
    if !message.tool_calls.is_empty() {
        let calls: Vec<Value> = message
            .tool_calls
            .iter()
            .map(|call| {
                let function = json!({"name": call.name, "arguments": call.arguments_value()});
                json!({"id": id_of(&call.id), "type": "function", "function": function})
            })
            .collect();
        map.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    if let Some(id) = &message.tool_call_id {
        map.insert("tool_call_id".to_owned(), json!(id_of(id)));
    }
    if let Some(name) = &message.name {
        map.insert("name".to_owned(), json!(name));
    }
    Value::Object(map)
}

pub(super) const KEY_TEMPLATE: &str = "tokenizer.chat_template";

const REFUSED_WITHOUT: &str = "chats are refused; completions continue a text verbatim";

/// The control tokens of ChatML.
const CHATML_TOKENS: [&str; 2] = ["<|im_start|>", "<|im_end|>"];

/// ChatML, the usual format of models published without a template in the file.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + \
                      '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}\
                      {% endif %}";

/// The control tokens of Gemma's turns.
const GEMMA_TOKENS: [&str; 2] = ["<start_of_turn>", "<end_of_turn>"];

/// Gemma's turns, for files without a template, as published by Ollama: the system text precedes the first question.
const GEMMA: &str = "{{ bos_token }}{% set said = namespace(before='') %}{% for message in messages %}\
                     {% if message['role'] == 'system' %}{% set said.before = said.before + message['content'] + '\n\n' %}\
                     {% else %}{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' + \
                     said.before + message['content'] | trim + '<end_of_turn>\n' }}{% set said.before = '' %}{% endif %}\
                     {% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}";

/// The control tokens of Gemma 4's turns.
const GEMMA_4_TOKENS: [&str; 2] = ["<|turn>", "<turn|>"];

/// Gemma 4's turns without tools, for files without a template, as of Ollama. Thoughts of earlier answers are left out.
const GEMMA_4: &str = "{{ bos_token }}{% if enable_thinking %}{{ '<|turn>system\n<|think|>\n' }}{% if messages[0]['role'] != 'system' %}\
                       {{ '<turn|>\n' }}{% endif %}{% endif %}{% for message in messages %}{% if not (loop.first and enable_thinking and \
                       message['role'] == 'system') %}{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}\
                       {% endif %}{{ message['content'].split('<channel|>')[-1] | trim + '<turn|>\n' }}{% endfor %}\
                       {% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}";

/// End of a turn of Gemma 4, and the begin of the model's.
const TURN_END: &str = "<turn|>\n";
const TURN_START: &str = "<|turn>model\n";

/// Noncharacters: never assigned, meant for the inside of a program (Unicode 16, section 23.7).
const MARKS: [char; 8] = [
    '\u{fdd0}', '\u{fdd1}', '\u{fdd2}', '\u{fdd3}', '\u{fdd4}', '\u{fdd5}', '\u{fdd6}', '\u{fdd7}',
];

/// Longest tag that templates search for; `</tool_response>` has 16 characters.
const TAG_LENGTH_MAX: usize = 32;

#[cfg(test)]
mod templates;

#[cfg(test)]
mod tests;
