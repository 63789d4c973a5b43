//! Constrained answers: JSON by a schema, or a tool call.
//!
//! ```text
//!  AnswerForm ──► schema or grammar ──job──► helper: compiles it, computes masks (llguidance)
//!       │                                        │
//!       └─ refused by name                       └──► FormMask: which tokens may come next ──► sampler
//! ```
//!
//! The mask of the next token is computed concurrently with the model's logits.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

pub use super::schema::ConstraintError;
use super::{
    helper::{
        ANSWER_WAIT_MAX, FormPlace, Helper, Job, JobError, Kind, Setup, form_bytes, le_bytes,
    },
    sampling::{MaskError, TokenMask},
    schema::with_layout,
    tokenizer::Tokenizer,
    tool_format::{self, ToolFormat},
};
use cotenant_conversation::AnswerForm;
use cotenant_units::{Bytes, Tokens, causes::in_one_line};

/// Field of the request that set a form, and its shortened value.
pub(super) fn place(form: &AnswerForm) -> (String, String) {
    match form {
        AnswerForm::JsonObject => ("response_format".to_owned(), "json_object".to_owned()),
        AnswerForm::JsonSchema { schema, field } => {
            let mut text: String = schema.to_string().chars().take(SHOWN_CHARS_MAX).collect();
            if text.len() < schema.to_string().len() {
                text.push('…');
            }
            ((*field).to_owned(), text)
        }
        AnswerForm::ToolCall { name } => (
            "tool_choice".to_owned(),
            name.clone().unwrap_or_else(|| "required".to_owned()),
        ),
    }
}

impl From<JobError> for ConstraintError {
    fn from(error: JobError) -> Self {
        match error {
            JobError::Bound => Self::TooLarge,
            JobError::Gone => Self::Gone,
            fault => Self::Helper {
                message: in_one_line(&fault),
            },
        }
    }
}

/// The client for which a form is built.
pub struct Client<'client> {
    /// Its slot among the concurrent grammars; `None` if there is only one.
    pub place: Option<FormPlace>,
    /// Whether it has disconnected, so that nothing more is built for it.
    pub gone: &'client dyn Fn() -> bool,
}

impl Client<'_> {
    /// A client that never disconnects and needs no slot.
    pub const PATIENT: Client<'static> = Client {
        place: None,
        gone: &|| false,
    };
}

/// Memory limit for the grammar of this form, for an answer of this many tokens.
pub(super) fn bytes(form: &AnswerForm, tools: &[Value], answer: Tokens) -> Bytes {
    let length = |schema: &Value| with_layout(schema).map_or(0, |kept| kept.to_string().len());
    let grammar = match form {
        AnswerForm::JsonObject => 0,
        AnswerForm::JsonSchema { schema, .. } => length(schema),
        AnswerForm::ToolCall { name } => {
            let wanted = wanted_tools(tools, name.as_deref()).unwrap_or_default();
            wanted
                .iter()
                .filter_map(|function| function.get("parameters"))
                .map(length)
                .sum()
        }
    };
    form_bytes(grammar, answer.get() as usize)
}

/// What precedes the form in an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// Messages in other channels, and the header of its own.
    Channels,
    /// Nothing.
    Nothing,
    /// Anything up to this text, such as the end of the model's thoughts.
    Text(&'static str),
}

/// The mask of an answer of this form.
///
/// # Errors
/// The form cannot be guaranteed.
pub(super) fn mask(
    helper: &Helper,
    tokenizer: &Tokenizer,
    setup: impl Fn() -> Setup,
    form: &AnswerForm,
    (tools, format): (&[Value], ToolFormat),
    after: After,
    client: Client<'_>,
) -> Result<Box<dyn TokenMask>, ConstraintError> {
    let in_channel = |schema: &Value| (Kind::Lark, tool_format::final_grammar(schema));
    let (kind, grammar) = match form {
        AnswerForm::JsonObject if after == After::Channels => {
            in_channel(&with_layout(&json!({"type": "object"}))?)
        }
        AnswerForm::JsonSchema { schema, .. } if after == After::Channels => {
            in_channel(&with_layout(schema)?)
        }
        AnswerForm::JsonObject => (
            Kind::Schema,
            with_layout(&json!({"type": "object"}))?.to_string(),
        ),
        AnswerForm::JsonSchema { schema, .. } => (Kind::Schema, with_layout(schema)?.to_string()),
        AnswerForm::ToolCall { name } => {
            let wanted = wanted_tools(tools, name.as_deref())?;
            (Kind::Lark, tool_format::call_grammar(format, &wanted)?)
        }
    };
    let most = client
        .place
        .as_ref()
        .map_or_else(|| form_bytes(grammar.len(), 0), FormPlace::bytes);
    match helper.form(most, (kind, grammar.as_bytes()), client.gone, setup)? {
        (job, Kind::GoesOn, _) => Ok(Box::new(FormMask {
            job,
            asked: Instant::now(),
            ends: tokenizer.ends().collect(),
            waiting: match after {
                After::Text(text) => Some(Waiting {
                    text,
                    seen: Vec::new(),
                }),
                After::Channels | After::Nothing => None,
            },
            messages: (format == ToolFormat::Channels).then(|| Messages::new(tokenizer)),
            stepped: false,
            complete: false,
            forced: Vec::new(),
            _place: client.place,
        })),
        (_, _, message) => Err(ConstraintError::Schema {
            message: one_line(&String::from_utf8_lossy(&message)),
        }),
    }
}

/// The callable functions among `tools`.
fn wanted_tools<'tools>(
    tools: &'tools [Value],
    name: Option<&str>,
) -> Result<Vec<&'tools Value>, ConstraintError> {
    let functions = || tools.iter().filter_map(|tool| tool.get("function"));
    let Some(name) = name else {
        let all: Vec<_> = functions().collect();
        return if all.is_empty() {
            Err(ConstraintError::NoTools)
        } else {
            Ok(all)
        };
    };
    functions()
        .find(|function| function.get("name").and_then(Value::as_str) == Some(name))
        .map(|function| vec![function])
        .ok_or_else(|| ConstraintError::UnknownTool {
            name: name.to_owned(),
        })
}

/// A message as one line of limited length: the cause of a pattern error is in its last line.
fn one_line(message: &str) -> String {
    let words: Vec<&str> = message.split_whitespace().collect();
    words.join(" ").chars().take(MESSAGE_CHARS_MAX).collect()
}

/// Mask that keeps an answer in its form.
struct FormMask {
    job: Job,
    /// When the job last received work.
    asked: Instant,
    ends: Vec<u32>,
    waiting: Option<Waiting>,
    /// Present if the answer consists of messages in channels.
    messages: Option<Messages>,
    /// Whether the job has a token that it has not replied to yet.
    stepped: bool,
    complete: bool,
    /// Bytes that follow in any case; the job waits for a reply to them.
    forced: Vec<u8>,
    _place: Option<FormPlace>,
}

/// Text that must precede the form.
struct Waiting {
    text: &'static str,
    seen: Vec<u8>,
}

/// Messages of an answer, of which the last has the form.
struct Messages {
    /// Control tokens around messages, which are no text of the last one.
    around: Vec<u32>,
    /// The last channel and what follows it.
    seen: Vec<u8>,
    is_last: bool,
}

impl Messages {
    fn new(tokenizer: &Tokenizer) -> Self {
        Self {
            around: tokenizer.channel_tokens().collect(),
            seen: Vec::new(),
            is_last: false,
        }
    }

    /// Notes bytes that were written or will be.
    fn note(&mut self, bytes: &[u8]) {
        self.seen.extend_from_slice(bytes);
        let text = String::from_utf8_lossy(&self.seen);
        match text.rfind(tool_format::CHANNEL) {
            Some(at) => {
                let rest = text.get(at..).unwrap_or_default();
                self.is_last |= tool_format::is_last_message(rest);
                self.seen = rest.as_bytes().to_vec();
            }
            None => {
                let keep = self.seen.len().saturating_sub(tool_format::CHANNEL.len());
                self.seen.drain(..keep);
            }
        }
    }

    /// Rules out tokens around messages in the last one, unless it has not begun and one of them is next.
    fn apply(&self, logits: &mut [f32]) {
        let is_around = |token: usize| self.around.iter().any(|around| *around as usize == token);
        let mut allowed = (0..).zip(logits.iter());
        let text = |(token, logit): (usize, &f32)| *logit > f32::NEG_INFINITY && !is_around(token);
        if self.is_last && allowed.any(text) {
            for token in &self.around {
                if let Some(logit) = logits.get_mut(*token as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}

impl From<JobError> for MaskError {
    fn from(error: JobError) -> Self {
        match error {
            JobError::Bound | JobError::Gone => Self::Form {
                message: in_one_line(&error),
            },
            fault => Self::Helper {
                message: in_one_line(&fault),
            },
        }
    }
}

impl FormMask {
    /// Requests a mask instead of the forced bytes.
    fn decline(&mut self) -> Result<(), MaskError> {
        if !std::mem::take(&mut self.forced).is_empty() {
            self.job.send(Kind::Mask, &[])?;
            self.asked = Instant::now();
        }
        Ok(())
    }

    /// The next frame, which must be of this kind.
    fn receive(&mut self, wanted: Kind) -> Result<Vec<u8>, MaskError> {
        match self.job.receive()? {
            (kind, body) if kind == wanted => Ok(body),
            (_, message) => Err(MaskError::Form {
                message: one_line(&String::from_utf8_lossy(&message)),
            }),
        }
    }
}

impl TokenMask for FormMask {
    fn is_ready(&mut self, wait: Duration) -> Result<bool, MaskError> {
        if self.waiting.is_some() || self.complete {
            return Ok(true);
        }
        self.decline()?;
        if self.job.ready(wait)? {
            return Ok(true);
        }
        self.job.check(self.asked.elapsed(), ANSWER_WAIT_MAX)?;
        Ok(false)
    }

    fn apply(&mut self, logits: &mut [f32]) -> Result<(), MaskError> {
        if self.waiting.is_some() {
            // Not before the form has begun.
            for &end in &self.ends {
                if let Some(logit) = logits.get_mut(end as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
            return Ok(());
        }
        self.decline()?;
        let allowed = self.receive(Kind::Mask)?;
        let bits = allowed
            .iter()
            .flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1));
        // A model may score more tokens than its vocabulary has.
        for (logit, allowed) in logits.iter_mut().zip(bits.chain(std::iter::repeat(false))) {
            if !allowed {
                *logit = f32::NEG_INFINITY;
            }
        }
        if let Some(messages) = &self.messages {
            messages.apply(logits);
        }
        Ok(())
    }

    fn accept(&mut self, token: u32, bytes: &[u8]) -> Result<(), MaskError> {
        if let Some(waiting) = &mut self.waiting {
            waiting.seen.extend_from_slice(bytes);
            let wanted = waiting.text.as_bytes();
            if waiting
                .seen
                .windows(wanted.len())
                .any(|window| window == wanted)
            {
                self.waiting = None;
                self.asked = Instant::now();
            } else {
                let keep = waiting.seen.len().saturating_sub(wanted.len());
                waiting.seen.drain(..keep);
            }
            return Ok(());
        }
        if let Some(messages) = self.messages.as_mut().filter(|messages| !messages.is_last) {
            messages.note(bytes);
        }
        self.job.send(Kind::Token, &token.to_le_bytes())?;
        self.asked = Instant::now();
        self.stepped = true;
        Ok(())
    }

    fn is_complete(&mut self) -> Result<bool, MaskError> {
        if std::mem::take(&mut self.stepped) {
            match self.job.receive()? {
                (Kind::GoesOn, forced) => self.forced = forced,
                (Kind::Complete, _) => self.complete = true,
                (_, message) => {
                    return Err(MaskError::Form {
                        message: one_line(&String::from_utf8_lossy(&message)),
                    });
                }
            }
        }
        Ok(self.complete)
    }

    fn force(&mut self, choose: &mut dyn FnMut(&[u8]) -> Vec<u32>) -> Result<Vec<u32>, MaskError> {
        let forced = std::mem::take(&mut self.forced);
        if forced.is_empty() {
            return Ok(Vec::new());
        }
        let tokens = choose(&forced);
        if tokens.is_empty() {
            self.forced = forced;
            return Ok(tokens);
        }
        if let Some(messages) = self.messages.as_mut().filter(|messages| !messages.is_last) {
            messages.note(&forced);
        }
        self.job.send(Kind::Token, &le_bytes(&tokens))?;
        self.asked = Instant::now();
        self.stepped = true;
        Ok(tokens)
    }
}

/// Our choice: length limit of the library's message about a schema, without the schema.
const MESSAGE_CHARS_MAX: usize = 300;

/// Our choice: long enough to recognise the schema.
const SHOWN_CHARS_MAX: usize = 80;

#[cfg(test)]
mod tests;
