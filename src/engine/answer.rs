//! Parser of a streamed answer: reasoning, text and tool calls.
//!
//! ```text
//!  <think> thoughts </think>   text   <tool_call> … </tool_call>   text …
//!  └──── Reasoning ────────┘ └ Text ┘ └────── ToolCall ────────┘
//! ```
//!
//! Models deviate from the call format of their templates: calls without tags, in a code fence, or with the tags of
//! another family. With tools in the conversation, the parser therefore accepts every format regardless of the
//! template: between tags any function name counts, elsewhere only a declared one. No output of the model is lost: text
//! that resembles a call but is not one is returned verbatim as text. A call truncated by the end of the answer is
//! still returned as a call, with the arguments received so far; otherwise a voice would read it aloud.

use serde_json::Value;

mod calls;
mod channels;
mod literal;
mod tags;

use self::{
    calls::{CLOSERS, CallParser, Found, Functions, SEPARATORS},
    channels::{Channels, Kind, Piece},
    tags::{held_back, is_begun},
};
use super::{tokenizer::Tokenizer, tool_format::ToolFormat};
use cotenant_conversation::{AnswerPart, Prompt};

/// Parsing style of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerStyle {
    /// Whether thoughts are separated, and whether the prompt has already opened them.
    pub thoughts: Thoughts,
    /// Format of calls; `None` without tools.
    pub tools: Option<ToolFormat>,
}

/// Position of the model's thoughts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Thoughts {
    /// The answer consists of messages in channels, one of which is that of thoughts.
    Channels {
        /// Whether the prompt has begun the text for the user.
        in_text: bool,
    },
    /// No known thought tags: everything is text.
    #[default]
    None,
    /// The prompt ends inside the thoughts.
    Open(ThoughtTags),
    /// The answer may begin with thoughts.
    Perhaps(ThoughtTags),
}

/// The tags around a model's thoughts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThoughtTags {
    pub(super) begin: &'static str,
    pub(super) end: &'static str,
    /// Whether thoughts may also follow text and calls.
    again: bool,
}

impl ThoughtTags {
    const ALL: [Self; 3] = [
        Self {
            begin: "<think>",
            end: "</think>",
            again: false,
        },
        // Magistral and Ministral.
        Self {
            begin: "[THINK]",
            end: "[/THINK]",
            again: false,
        },
        // Gemma 4.
        Self {
            begin: "<|channel>thought\n",
            end: "<channel|>",
            again: true,
        },
    ];

    /// The tags that a template writes or searches for.
    pub(super) fn of(template: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|tags| template.contains(tags.end))
    }
}

/// Incremental parser of an answer.
#[derive(Debug)]
pub struct AnswerReader {
    style: AnswerStyle,
    functions: Functions,
    channels: Option<Channels>,
    state: State,
    /// Received text that is not classified yet.
    held: String,
    /// Whether any text or thought was returned since the last thought or call; leading white space is dropped.
    any_text: bool,
    /// White space that counts only if more text follows.
    space: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// After a call: its end tag, or another call.
    After(Opener),
    /// Only white space received so far.
    Beginning,
    /// Possibly a call.
    Call(Opener),
    Text,
    Thinking(ThoughtTags),
}

/// Text that opens a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Opener {
    tag: &'static str,
    /// Length of the tag's suffix that belongs to the call.
    keep: usize,
    /// Whether any function name is accepted after it, declared or not.
    any_name: bool,
}

impl Opener {
    /// Calls of any function follow.
    const fn of_any(tag: &'static str) -> Self {
        Self {
            tag,
            keep: 0,
            any_name: true,
        }
    }

    /// Calls of declared functions follow.
    const fn of_declared(tag: &'static str) -> Self {
        Self {
            any_name: false,
            ..Self::of_any(tag)
        }
    }

    const fn keeping(self, keep: usize) -> Self {
        Self { keep, ..self }
    }
}

impl AnswerReader {
    /// A reader at the beginning of an answer to a conversation with these tools; everything is text until a style is
    /// set.
    pub fn new(tools: &[Value]) -> Self {
        Self::with(Functions::of(tools))
    }

    fn with(functions: Functions) -> Self {
        Self {
            style: AnswerStyle::default(),
            functions,
            channels: None,
            state: State::Beginning,
            held: String::new(),
            any_text: false,
            space: String::new(),
        }
    }

    /// Sets the parsing style, before the first piece of the answer.
    pub fn set_style(&mut self, style: AnswerStyle) {
        self.style = style;
        self.state = match style.thoughts {
            Thoughts::Open(tags) => State::Thinking(tags),
            Thoughts::Channels { .. } | Thoughts::None | Thoughts::Perhaps(_) => State::Beginning,
        };
        self.channels = match style.thoughts {
            Thoughts::Channels { in_text } => Some(Channels::new(in_text)),
            Thoughts::None | Thoughts::Open(_) | Thoughts::Perhaps(_) => None,
        };
    }

    /// Parts that are certain after this piece.
    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        if self.style == AnswerStyle::default() {
            if !piece.is_empty() {
                parts.push(AnswerPart::Text(piece.to_owned()));
            }
            return parts;
        }
        if let Some(channels) = &mut self.channels {
            let pieces = channels.push(piece);
            self.of_channels(pieces, false, &mut parts);
            return parts;
        }
        self.held.push_str(piece);
        while self.step(false, &mut parts) {}
        parts
    }

    /// Returns pieces of messages in channels; `cut` if the last one did not end.
    fn of_channels(&mut self, pieces: Vec<Piece>, cut: bool, parts: &mut Vec<AnswerPart>) {
        for piece in pieces {
            match piece {
                Piece::Begin => {
                    self.any_text = false;
                    self.space.clear();
                }
                Piece::Said(Kind::Thought, text) => self.thought(&text, parts),
                Piece::Said(Kind::Call(name), text) if self.style.tools.is_some() => {
                    self.calls(vec![calls::of_object(&name, &text, cut)], parts);
                }
                Piece::Said(Kind::Text | Kind::Call(_), text) => self.text(&text, parts),
            }
        }
    }

    /// Remaining parts at the end of the answer; `cut` if the model did not finish.
    pub fn finish(&mut self, cut: bool) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        if let Some(channels) = &mut self.channels {
            let pieces = channels.finish(cut);
            self.of_channels(pieces, cut, &mut parts);
            return parts;
        }
        match self.state {
            // The beginning of a truncated tag is not text either.
            State::Text if cut && is_tag_begun(&self.held) => return parts,
            State::After(opener) if cut && self.is_closer_begun(opener) => return parts,
            State::Call(opener) if cut => {
                let calls = match fenced(opener, &self.held) {
                    Fenced::Body(body) => calls::cut(body, self.parser(opener, body, false)),
                    Fenced::More | Fenced::Nothing => Vec::new(),
                };
                if calls.is_empty() && !opener.any_name {
                    self.no_call(opener, &mut parts);
                } else {
                    self.held.clear();
                }
                self.calls(calls, &mut parts);
            }
            _ => while self.step(true, &mut parts) {},
        }
        if matches!(self.state, State::Thinking(_)) {
            let held = std::mem::take(&mut self.held);
            match self.only_calls(&held).filter(|_| !cut) {
                Some(calls) => parts.extend(calls),
                None => self.thought(&held, &mut parts),
            }
        } else {
            self.rest(&mut parts);
        }
        parts
    }

    /// Advances by one step over the held text; `ended` if nothing follows. Returns whether to call again.
    fn step(&mut self, ended: bool, parts: &mut Vec<AnswerPart>) -> bool {
        match self.state {
            State::Beginning => {
                let begun = self.held.trim_start();
                let tags = match self.style.thoughts {
                    Thoughts::Perhaps(tags) => Some(tags),
                    Thoughts::Channels { .. } | Thoughts::None | Thoughts::Open(_) => None,
                };
                if begun.is_empty() || tags.is_some_and(|tags| is_begun(begun, tags.begin)) {
                    return false;
                }
                let lead = self.held.len() - begun.len();
                if let Some(tags) = tags.filter(|tags| begun.starts_with(tags.begin)) {
                    self.held.drain(..lead + tags.begin.len());
                    self.state = State::Thinking(tags);
                } else if let Some(format) = self.style.tools {
                    self.state = State::Call(match format {
                        ToolFormat::Bare => Opener::of_any(""),
                        _ => Opener::of_declared(""),
                    });
                } else {
                    // Without preceding thoughts, leading white space belongs to the answer.
                    self.any_text = self.style.thoughts == Thoughts::None;
                    self.state = State::Text;
                }
                true
            }
            State::Thinking(tags) => {
                let at = self.held.find(tags.end);
                let end = at.unwrap_or_else(|| {
                    held_back(&self.held, &[tags.end]).min(self.call_in_thoughts())
                });
                let clear: String = self.held.drain(..end).collect();
                self.thought(&clear, parts);
                if at.is_some() {
                    self.held.drain(..tags.end.len());
                    (self.any_text, self.state) = (false, State::Beginning);
                    self.space.clear();
                    // Thoughts occur once.
                    self.style.thoughts = Thoughts::Open(tags);
                }
                at.is_some()
            }
            State::Text => {
                let all = self.after_text();
                if all.is_empty() {
                    self.rest(parts);
                    return false;
                }
                let found = all
                    .iter()
                    .filter_map(|(tag, keep, state)| {
                        Some((self.held.find(tag)?, tag.len() - keep, *state))
                    })
                    .min_by_key(|(at, ..)| *at);
                let tags: Vec<&str> = all.iter().map(|(tag, ..)| *tag).collect();
                let end = found.map_or_else(|| held_back(&self.held, &tags), |(at, ..)| at);
                let clear: String = self.held.drain(..end).collect();
                self.text(&clear, parts);
                if let Some((_, length, state)) = found {
                    self.held.drain(..length);
                    if matches!(state, State::Thinking(_)) {
                        self.any_text = false;
                        self.space.clear();
                    }
                    self.state = state;
                }
                found.is_some()
            }
            State::Call(opener) => self.read(opener, ended, parts),
            State::After(opener) => self.after(opener, ended, parts),
        }
    }

    /// Tags at which text ends, the length of each tag's suffix that belongs to what follows, and the state after it.
    fn after_text(&self) -> Vec<(&'static str, usize, State)> {
        let mut all = Vec::new();
        if self.style.tools.is_some() {
            let calls = OPENERS.iter();
            all.extend(calls.map(|opener| (opener.tag, opener.keep, State::Call(*opener))));
        }
        if let Thoughts::Open(tags) | Thoughts::Perhaps(tags) = self.style.thoughts
            && tags.again
        {
            all.push((tags.begin, 0, State::Thinking(tags)));
            // Models also end thoughts that they did not begin.
            all.push((tags.end, 0, State::Text));
        }
        all
    }

    /// Offset in the held thoughts at which a call begins, or may begin. Models forget to close their thoughts first.
    fn call_in_thoughts(&self) -> usize {
        if self.style.tools.is_none() {
            return self.held.len();
        }
        let parser = CallParser {
            functions: &self.functions,
            any_name: false,
            ended: false,
        };
        let openers = || OPENERS.iter().filter(|opener| opener.any_name);
        let begins = openers().flat_map(|opener| {
            let places = self.held.match_indices(opener.tag);
            places.map(|(at, tag)| (at, at + tag.len() - opener.keep))
        });
        let is_call = |body: &usize| {
            let body = self.held.get(*body..).unwrap_or_default();
            parser.read(body) != Found::Nothing
        };
        let call = begins.filter(|(_, body)| is_call(body)).map(|(at, _)| at);
        let tags: Vec<&str> = openers().map(|opener| opener.tag).collect();
        call.min().unwrap_or_else(|| held_back(&self.held, &tags))
    }

    /// The calls of a text that consists of calls only.
    fn only_calls(&self, text: &str) -> Option<Vec<AnswerPart>> {
        let mut reader = Self::with(self.functions.clone());
        reader.set_style(AnswerStyle {
            thoughts: Thoughts::None,
            ..self.style
        });
        let mut parts = reader.push(text);
        parts.extend(reader.finish(false));
        let only = parts
            .iter()
            .all(|part| matches!(part, AnswerPart::ToolCall { .. }));
        (only && !parts.is_empty()).then_some(parts)
    }

    /// Reads a call after `opener`; returns whether it could be classified.
    fn read(&mut self, opener: Opener, ended: bool, parts: &mut Vec<AnswerPart>) -> bool {
        let found = match fenced(opener, &self.held) {
            Fenced::Body(body) => {
                let before = self.held.len() - body.len();
                match self.parser(opener, body, ended).read(body) {
                    Found::Calls(calls, end) => Found::Calls(calls, before + end),
                    other => other,
                }
            }
            Fenced::More => Found::More,
            Fenced::Nothing => Found::Nothing,
        };
        match found {
            Found::Calls(calls, end) => {
                self.held.drain(..end);
                self.calls(calls, parts);
                self.state = State::After(opener);
            }
            Found::More if !ended => return false,
            Found::More | Found::Nothing => self.no_call(opener, parts),
        }
        true
    }

    /// Skips the end tag of a call and reads the next call; returns whether anything was classified.
    fn after(&mut self, opener: Opener, ended: bool, parts: &mut Vec<AnswerPart>) -> bool {
        let rest = self.held.trim_start();
        let fence = [FENCE];
        let closers = || {
            CLOSERS
                .iter()
                .chain(fence.iter().filter(|_| opener.tag == FENCE))
        };
        // Small models write one closing bracket too many.
        let closed = rest.trim_start_matches(['}', ']']).trim_start();
        let is_closer = |closer: &&str| closed.starts_with(*closer) || is_begun(closed, closer);
        let rest = if closed.is_empty() || closers().any(is_closer) {
            closed
        } else {
            rest
        };
        if ended && rest.is_empty() {
            self.held.clear();
            return false;
        }
        let closer = closers().find(|closer| rest.starts_with(**closer));
        if let Some(closer) = closer {
            let end = self.held.len() - rest.len() + closer.len();
            self.held.drain(..end);
            return true;
        }
        if !ended && (rest.is_empty() || closers().any(|closer| is_begun(rest, closer))) {
            return false;
        }
        let body = rest.trim_start_matches(SEPARATORS);
        let before = self.held.len() - body.len();
        match self.parser(opener, body, ended).read(body) {
            Found::Calls(calls, end) => {
                self.held.drain(..before + end);
                self.calls(calls, parts);
                true
            }
            Found::More => false,
            Found::Nothing => {
                self.state = State::Text;
                true
            }
        }
    }

    /// Whether the held text is only the beginning of a tag after a call, or before the next one.
    fn is_closer_begun(&self, opener: Opener) -> bool {
        let rest = self.held.trim_start();
        let fence = (opener.tag == FENCE).then_some(FENCE);
        let mut closers = CLOSERS.iter().copied().chain(fence);
        closers.any(|closer| is_begun(rest, closer)) || is_tag_begun(rest)
    }

    /// Undeclared names count only in calls written as JSON or in tags: prose contains brackets too.
    fn parser(&self, opener: Opener, body: &str, ended: bool) -> CallParser<'_> {
        let structured = body.trim_start().starts_with(['{', '[', '<']);
        let any_name = opener.any_name
            && (structured || matches!(self.state, State::Call(_)) && !opener.tag.is_empty());
        CallParser {
            functions: &self.functions,
            any_name,
            ended,
        }
    }

    /// Reclassifies a suspected call as text.
    fn no_call(&mut self, opener: Opener, parts: &mut Vec<AnswerPart>) {
        self.held.drain(..opener.keep.min(self.held.len()));
        self.state = State::Text;
        self.text(opener.tag, parts);
    }

    fn calls(&mut self, calls: Vec<AnswerPart>, parts: &mut Vec<AnswerPart>) {
        if !calls.is_empty() {
            self.space.clear();
            self.any_text = false;
            parts.extend(calls);
        }
    }

    /// Returns all held text as text.
    fn rest(&mut self, parts: &mut Vec<AnswerPart>) {
        let held = std::mem::take(&mut self.held);
        self.text(&held, parts);
    }

    /// Returns a piece of a thought; thoughts of white space only are dropped.
    fn thought(&mut self, piece: &str, parts: &mut Vec<AnswerPart>) {
        self.space.push_str(piece);
        if self.any_text || !self.space.trim_start().is_empty() {
            let thought = std::mem::take(&mut self.space);
            if !thought.is_empty() {
                self.any_text = true;
                parts.push(AnswerPart::Reasoning(thought));
            }
        }
    }

    fn text(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        self.space.push_str(text);
        if !self.any_text {
            let lead = self.space.len() - self.space.trim_start().len();
            self.space.drain(..lead);
        }
        let end = if self.style.tools.is_some() {
            // White space between text and a call belongs to neither.
            self.space.trim_end().len()
        } else {
            self.space.len()
        };
        if end == 0 {
            return;
        }
        let rest = self.space.split_off(end);
        let said = std::mem::replace(&mut self.space, rest);
        self.any_text = true;
        parts.push(AnswerPart::Text(said));
    }
}

/// A call inside a code fence, after the name of its language.
enum Fenced<'text> {
    Body(&'text str),
    More,
    Nothing,
}

fn fenced(opener: Opener, held: &str) -> Fenced<'_> {
    if opener.tag != FENCE {
        return Fenced::Body(held);
    }
    match held.split_once('\n') {
        Some((language, body)) if FENCE_LANGUAGES.contains(&language.trim()) => Fenced::Body(body),
        None if FENCE_LANGUAGES
            .iter()
            .any(|known| known.starts_with(held.trim())) =>
        {
            Fenced::More
        }
        _ => Fenced::Nothing,
    }
}

/// Whether held text is the beginning of a tag rather than of a line or anything else that occurs in prose.
fn is_tag_begun(text: &str) -> bool {
    text.len() > 1
        && OPENERS
            .iter()
            .any(|opener| opener.tag.starts_with(['<', '[']) && is_begun(text, opener.tag))
}

const FENCE: &str = "```";
/// Language names of code fences in which models write calls.
const FENCE_LANGUAGES: [&str; 6] = ["", "json", "tool_call", "tool_code", "python", "xml"];

/// Control tokens of a vocabulary that delimit thoughts and calls in the answer to `prompt`, with their texts.
pub(super) fn answer_tags(
    tokenizer: &Tokenizer,
    template: &str,
    prompt: &Prompt,
) -> Vec<(u32, &'static str)> {
    let thinks = matches!(prompt, Prompt::Chat(conversation) if !conversation.continues);
    let thoughts = ThoughtTags::of(template).filter(|_| thinks);
    let thoughts = thoughts.map(|tags| [tags.begin, tags.end]);
    let calls = (!prompt.tools().is_empty()).then_some(CALL_TAGS);
    let texts = thoughts
        .into_iter()
        .flatten()
        .chain(calls.into_iter().flatten());
    texts
        .filter_map(|text| Some((tokenizer.control(text)?, text)))
        .collect()
}

/// Texts before and inside calls that are control tokens in some vocabularies.
const CALL_TAGS: [&str; 23] = [
    "<tool_call>",
    "</tool_call>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<function_call>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<TOOLCALL>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[/TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
];

const OPENERS: [Opener; 18] = [
    Opener::of_any("<tool_call>"),
    Opener::of_any("<|tool_call|>"),
    Opener::of_any("<|tool_call_start|>"),
    Opener::of_any("<|python_tag|>"),
    Opener::of_any("[TOOL_CALLS]"),
    Opener::of_declared("<function_call>"),
    Opener::of_declared("<tools>"),
    Opener::of_declared("<function=").keeping("<function=".len()),
    // Gemma 4, FunctionGemma, Nemotron, Command R, DeepSeek's distillates, Functionary.
    Opener::of_any("<|tool_call>"),
    Opener::of_any("<start_function_call>"),
    Opener::of_any("<TOOLCALL>"),
    Opener::of_any("<|START_ACTION|>"),
    Opener::of_any("<｜tool▁calls▁begin｜>"),
    Opener::of_any(calls::DEEPSEEK).keeping(calls::DEEPSEEK.len()),
    Opener::of_declared(">>>"),
    // Phi 4 mini.
    Opener::of_declared("functools[").keeping(1),
    Opener::of_declared(FENCE),
    Opener::of_declared("\n{").keeping(1),
];

#[cfg(test)]
mod tests;
