//! Parser of a streamed answer: reasoning, text and tool calls.
//!
//! ```text
//!  <think> thoughts </think>   text   <tool_call> … </tool_call>   text …
//!  └──── Reasoning ────────┘ └ Text ┘ └────── ToolCall ────────┘
//! ```
//!
//! Nothing that the model wrote is lost: what looks like a call and is none comes as text, as it stands. A call that the end
//! of the answer cuts is one all the same, with the arguments as far as they came: a voice would read it out as text.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::tool_format::ToolFormat;
use crate::conversation::AnswerPart;

/// How an answer is to be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerStyle {
    /// Whether thoughts are separated, and whether the prompt has begun them already.
    pub thoughts: Thoughts,
    /// How calls are written; `None` when there are no tools to call.
    pub tools: Option<ToolFormat>,
}

/// Where the model's thoughts are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Thoughts {
    /// The model is not known to think: everything is text.
    #[default]
    None,
    /// The prompt ends in the middle of them.
    Open,
    /// The answer may begin with them.
    Perhaps,
}

/// Takes an answer apart as it comes.
#[derive(Debug)]
pub struct AnswerReader {
    style: AnswerStyle,
    /// Tool and parameter of those that are texts, whatever their text looks like.
    texts: BTreeSet<(String, String)>,
    state: State,
    /// What came and is not certain yet.
    held: String,
    /// Whether any text was given out since the last thought or call; white space at its beginning is dropped.
    any_text: bool,
    /// White space that is only text if text follows.
    space: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but white space has come.
    Beginning,
    /// All until the end is perhaps one call.
    Bare,
    Call,
    Text,
    Thinking,
}

impl AnswerReader {
    /// A reader at the beginning of an answer to a conversation with these tools.
    #[must_use]
    pub fn new(style: AnswerStyle, tools: &[Value]) -> Self {
        Self {
            style,
            texts: text_parameters(tools),
            state: match style.thoughts {
                Thoughts::Open => State::Thinking,
                Thoughts::None | Thoughts::Perhaps => State::Beginning,
            },
            held: String::new(),
            any_text: false,
            space: String::new(),
        }
    }

    /// The parts that are certain once this piece is there.
    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        if self.style == AnswerStyle::default() {
            if !piece.is_empty() {
                parts.push(AnswerPart::Text(piece.to_owned()));
            }
            return parts;
        }
        self.held.push_str(piece);
        while self.step(&mut parts) {}
        parts
    }

    /// The rest, once nothing follows; `cut` when the model had not come to an end.
    pub fn finish(&mut self, cut: bool) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Thinking if !held.is_empty() => parts.push(AnswerPart::Reasoning(held)),
            State::Thinking => {}
            // The beginning of a tag that is cut is no text either.
            State::Text if cut && is_tag_begun(&held) => {}
            State::Beginning | State::Text => self.text(&held, &mut parts),
            State::Call if cut && call_of(&held, &self.texts).is_none() => {
                parts.extend(cut_call(&held, &self.texts));
            }
            State::Call => self.call(&held, "", &mut parts),
            State::Bare => match bare_calls(&held) {
                Some(calls) => parts.extend(calls),
                None if cut => parts.extend(cut_bare_calls(&held)),
                None => self.text(&held, &mut parts),
            },
        }
        parts
    }

    /// Does what can be done with what is held; whether there may be more to do.
    fn step(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        match self.state {
            State::Beginning => {
                let begun = self.held.trim_start();
                if begun.is_empty() || (self.style.thoughts == Thoughts::Perhaps && is_begun(begun, THINK)) {
                    return false;
                }
                let lead = self.held.len() - begun.len();
                if self.style.thoughts == Thoughts::Perhaps && begun.starts_with(THINK) {
                    self.held.drain(..lead + THINK.len());
                    self.state = State::Thinking;
                } else if self.style.tools == Some(ToolFormat::Bare) && begun.starts_with('{') {
                    self.state = State::Bare;
                } else {
                    // Without thoughts before it, white space at the beginning is the model's own.
                    self.any_text = self.style.thoughts == Thoughts::None && self.style.tools.is_none();
                    self.state = State::Text;
                }
                true
            }
            State::Bare => false,
            State::Thinking => {
                let (clear, found) = self.take_until(THOUGHT);
                if !clear.is_empty() {
                    parts.push(AnswerPart::Reasoning(clear));
                }
                if found {
                    self.state = State::Beginning;
                    // They come once.
                    self.style.thoughts = Thoughts::Open;
                }
                found
            }
            State::Text => {
                if !matches!(self.style.tools, Some(ToolFormat::Parameters | ToolFormat::Tagged)) {
                    let text = std::mem::take(&mut self.held);
                    self.text(&text, parts);
                    return false;
                }
                let (clear, found) = self.take_until(CALL);
                self.text(&clear, parts);
                if found {
                    self.state = State::Call;
                }
                found
            }
            State::Call => {
                let Some(end) = self.held.find(CALLED) else {
                    return false;
                };
                let inner: String = self.held.drain(..end).collect();
                self.held.drain(..CALLED.len());
                self.state = State::Text;
                self.call(&inner, CALLED, parts);
                true
            }
        }
    }

    /// Takes what is before `tag`, and `tag` itself if it is there; what may become it stays.
    fn take_until(&mut self, tag: &str) -> (String, bool) {
        if let Some(at) = self.held.find(tag) {
            let before = self.held.drain(..at).collect();
            self.held.drain(..tag.len());
            return (before, true);
        }
        let keep = self
            .held
            .char_indices()
            .map(|(at, _)| at)
            .find(|&at| is_begun(self.held.get(at..).unwrap_or_default(), tag))
            .unwrap_or(self.held.len());
        (self.held.drain(..keep).collect(), false)
    }

    fn text(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        self.space.push_str(text);
        if !self.any_text {
            let lead = self.space.len() - self.space.trim_start().len();
            self.space.drain(..lead);
        }
        let end = if self.style.tools.is_some() {
            // What is between text and a call belongs to neither.
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

    fn call(&mut self, inner: &str, close: &str, parts: &mut Vec<AnswerPart>) {
        match call_of(inner, &self.texts) {
            Some(call) => {
                self.space.clear();
                self.any_text = false;
                parts.push(call);
            }
            None => self.text(&format!("{CALL}{inner}{close}"), parts),
        }
    }
}

fn text_parameters(tools: &[Value]) -> BTreeSet<(String, String)> {
    let functions = tools.iter().filter_map(|tool| tool.get("function"));
    functions
        .filter_map(|function| {
            let name = function.get("name")?.as_str()?;
            let properties = function.get("parameters")?.get("properties")?.as_object()?;
            Some(properties.iter().filter_map(move |(key, schema)| {
                let is_text = schema.get("type").and_then(Value::as_str) == Some("string");
                is_text.then(|| (name.to_owned(), key.clone()))
            }))
        })
        .flatten()
        .collect()
}

/// Whether `text` is the beginning of `tag`, and not all of it.
fn is_begun(text: &str, tag: &str) -> bool {
    text.len() < tag.len() && tag.starts_with(text)
}

/// Whether `text` ends with the beginning of a call's tag, which [`AnswerReader::take_until`] held back.
fn is_tag_begun(text: &str) -> bool {
    !text.is_empty() && is_begun(text, CALL)
}

/// A call of which only the beginning came: nothing while its name is not complete.
fn cut_call(inner: &str, texts: &BTreeSet<(String, String)>) -> Option<AnswerPart> {
    let inner = inner.trim_start();
    if inner.starts_with('{') {
        return cut_json_call(inner);
    }
    let (name, rest) = inner.strip_prefix("<function=")?.split_once('>')?;
    // Complete parameters, as an object that is not closed.
    let complete = rest.rfind("</parameter>").map_or(0, |at| at + "</parameter>".len());
    let whole = format!("<function={name}>{}", rest.get(..complete)?);
    let Some(AnswerPart::ToolCall { name, mut arguments }) = call_of(&whole, texts) else {
        return None;
    };
    arguments.pop();
    Some(AnswerPart::ToolCall { name, arguments })
}

/// The same of `{"name": …, "arguments": …`.
fn cut_json_call(text: &str) -> Option<AnswerPart> {
    let rest = text.trim_start().strip_prefix('{')?.trim_start().strip_prefix("\"name\"")?;
    let rest = rest.trim_start().strip_prefix(':')?;
    let mut values = serde_json::Deserializer::from_str(rest).into_iter::<String>();
    let name = values.next()?.ok()?;
    let rest = rest.get(values.byte_offset()..)?.trim_start();
    let arguments = rest
        .strip_prefix(',')
        .and_then(|rest| {
            let rest = rest.trim_start();
            rest.strip_prefix("\"arguments\"").or_else(|| rest.strip_prefix("\"parameters\""))
        })
        .and_then(|rest| rest.trim_start().strip_prefix(':'))
        .map_or("", str::trim_start);
    // What closes the call around whole arguments is cut off with it.
    let mut whole = serde_json::Deserializer::from_str(arguments).into_iter::<Value>();
    let end = match whole.next() {
        Some(Ok(_)) => whole.byte_offset(),
        _ => arguments.len(),
    };
    Some(AnswerPart::ToolCall { name, arguments: arguments.get(..end)?.to_owned() })
}

/// The same of calls one after the other, of which the last is cut.
fn cut_bare_calls(text: &str) -> Vec<AnswerPart> {
    let mut calls = Vec::new();
    let mut rest = text.trim_start();
    loop {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        match values.next() {
            Some(Ok(value)) => calls.extend(call_of_json(&value)),
            _ => {
                calls.extend(cut_json_call(rest));
                return calls;
            }
        }
        rest = rest.get(values.byte_offset()..).unwrap_or_default().trim_start_matches([';', ' ', '\n', '\r', '\t']);
    }
}

/// The call between two tags.
fn call_of(inner: &str, texts: &BTreeSet<(String, String)>) -> Option<AnswerPart> {
    let inner = inner.trim();
    if inner.starts_with('{') {
        return call_of_json(&serde_json::from_str(inner).ok()?);
    }
    let (name, rest) = inner.strip_prefix("<function=")?.split_once('>')?;
    let (name, mut rest) = (name.trim(), rest.trim());
    let mut arguments = Map::new();
    while let Some(parameter) = rest.strip_prefix("<parameter=") {
        let (key, after) = parameter.split_once('>')?;
        let (value, after) = after.split_once("</parameter>")?;
        // The line breaks around a value belong to the tags.
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let place = (name.to_owned(), key.trim().to_owned());
        let value = if texts.contains(&place) {
            Value::from(value)
        } else {
            serde_json::from_str(value).unwrap_or_else(|_| Value::from(value))
        };
        arguments.insert(place.1, value);
        rest = after.trim_start();
    }
    let ended = rest.is_empty() || rest.trim() == "</function>";
    ended.then(|| AnswerPart::ToolCall { name: name.to_owned(), arguments: Value::Object(arguments).to_string() })
}

fn call_of_json(value: &Value) -> Option<AnswerPart> {
    let name = value.get("name")?.as_str()?;
    let arguments = value.get("arguments").or_else(|| value.get("parameters"))?;
    arguments.is_object().then(|| AnswerPart::ToolCall { name: name.to_owned(), arguments: arguments.to_string() })
}

/// The calls of an answer that is nothing but calls: JSON objects, one after the other, with semicolons or without.
fn bare_calls(text: &str) -> Option<Vec<AnswerPart>> {
    let mut calls = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        let value = values.next()?.ok()?;
        calls.push(call_of_json(&value)?);
        rest = rest.get(values.byte_offset()..)?.trim_start_matches([';', ' ', '\n', '\r', '\t']);
    }
    (!calls.is_empty()).then_some(calls)
}

const THINK: &str = "<think>";
/// What ends the thoughts.
pub(super) const THOUGHT: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALLED: &str = "</tool_call>";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(style: AnswerStyle, pieces: &[&str]) -> Vec<AnswerPart> {
        let tool = serde_json::json!({"type": "function", "function": {
            "name": "set_light",
            "parameters": {"type": "object", "properties": {"room": {"type": "string"}, "level": {"type": "integer"}}},
        }});
        let mut reader = AnswerReader::new(style, &[tool]);
        let mut parts: Vec<AnswerPart> = pieces.iter().flat_map(|piece| reader.push(piece)).collect();
        parts.extend(reader.finish(false));
        let mut joined: Vec<AnswerPart> = Vec::new();
        for part in parts {
            match (joined.last_mut(), part) {
                (Some(AnswerPart::Text(before)), AnswerPart::Text(text))
                | (Some(AnswerPart::Reasoning(before)), AnswerPart::Reasoning(text)) => before.push_str(&text),
                (_, part) => joined.push(part),
            }
        }
        joined
    }

    fn text(text: &str) -> AnswerPart {
        AnswerPart::Text(text.to_owned())
    }

    fn reasoning(text: &str) -> AnswerPart {
        AnswerPart::Reasoning(text.to_owned())
    }

    fn call(name: &str, arguments: &str) -> AnswerPart {
        AnswerPart::ToolCall { name: name.to_owned(), arguments: arguments.to_owned() }
    }

    const TAGGED: AnswerStyle = AnswerStyle { thoughts: Thoughts::Perhaps, tools: Some(ToolFormat::Tagged) };

    #[test]
    fn thoughts_text_and_calls_are_reported_apart_however_they_are_cut() {
        let answer = "<think>hm\n</think>\n\nI will look.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"at\": \
                      \"<b>\"}}\n</tool_call>\n<tool_call>{\"name\": \"wait\", \"arguments\": {}}</tool_call>";
        let expected = [reasoning("hm\n"), text("I will look."), call("look", r#"{"at":"<b>"}"#), call("wait", "{}")];
        assert_eq!(read(TAGGED, &[answer]), expected);
        let pieces: Vec<String> = answer.chars().map(String::from).collect();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        assert_eq!(read(TAGGED, &pieces), expected);
    }

    #[test]
    fn thoughts_that_the_prompt_began_are_reported_apart() {
        let style = AnswerStyle { thoughts: Thoughts::Open, tools: None };
        assert_eq!(read(style, &["so</th", "ink>\n\n on it "]), [reasoning("so"), text("on it ")]);
        assert_eq!(read(style, &["never done"]), [reasoning("never done")]);
        // Thoughts come once; what looks like them later is text.
        assert_eq!(read(style, &["a</think>b<think>c</think>"]), [reasoning("a"), text("b<think>c</think>")]);
    }

    #[test]
    fn a_call_of_functions_and_parameters_becomes_json() {
        let answer = "<tool_call>\n<function=set_light>\n<parameter=room>\n12\n</parameter>\n<parameter=level>\n7\n\
                      </parameter>\n</function>\n</tool_call>";
        assert_eq!(read(TAGGED, &[answer]), [call("set_light", r#"{"room":"12","level":7}"#)]);
    }

    #[test]
    fn a_bare_call_is_one_only_if_it_is_the_whole_answer() {
        let style = AnswerStyle { thoughts: Thoughts::None, tools: Some(ToolFormat::Bare) };
        assert_eq!(read(style, &["{\"name\": \"f\", ", "\"parameters\": {\"a\": 1}}"]), [call("f", r#"{"a":1}"#)]);
        assert_eq!(read(style, &["{\"a\": 1} is JSON"]), [text("{\"a\": 1} is JSON")]);
        assert_eq!(read(style, &["no {call}"]), [text("no {call}")]);
    }

    #[test]
    fn a_call_that_the_length_cuts_is_a_cut_call_and_never_text() {
        let cut = |format: ToolFormat, answer: &str| {
            let style = AnswerStyle { thoughts: Thoughts::None, tools: Some(format) };
            let tool = serde_json::json!({"type": "function", "function": {
                "name": "f",
                "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}},
            }});
            let mut reader = AnswerReader::new(style, &[tool]);
            let mut parts = reader.push(answer);
            parts.extend(reader.finish(true));
            parts
        };
        let whole = "{\"name\": \"f\", \"arguments\": {\"a\": \"x\", \"b\": 12}}";
        for length in 0..whole.len() {
            let begun = &whole[..length];
            for (format, answer) in
                [(ToolFormat::Tagged, format!("<tool_call>\n{begun}")), (ToolFormat::Bare, begun.to_owned())]
            {
                let parts = cut(format, &answer);
                let expected = match length {
                    0..12 => vec![],
                    12..27 => vec![call("f", "")],
                    _ => vec![call("f", &begun[27..length.min(whole.len() - 1)])],
                };
                assert_eq!(parts, expected, "{format:?}: {answer}");
            }
        }
        assert_eq!(cut(ToolFormat::Tagged, "I will. <tool_c"), [text("I will.")], "the beginning of a tag is no text");
        assert_eq!(
            cut(ToolFormat::Parameters, "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\n1"),
            [call("f", r#"{"a":"x""#)]
        );
        assert_eq!(cut(ToolFormat::Parameters, "<tool_call>\n<functio"), []);
        // Whole calls stay whole, and text that is cut stays text.
        assert_eq!(cut(ToolFormat::Tagged, &format!("<tool_call>{whole}")), [call("f", r#"{"a":"x","b":12}"#)]);
        assert_eq!(cut(ToolFormat::Tagged, "a < b"), [text("a < b")]);
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for answer in [
            "<tool_call>{broken</tool_call>",
            "<tool_call>[1]</tool_call>",
            "a <tool_call>{\"name\": \"f\"",
            "a < b, <tool",
            "<tool_call><function=f></tool_call><parameter=x>",
        ] {
            let parts = read(TAGGED, &[answer]);
            let said: String = parts
                .iter()
                .map(|part| match part {
                    AnswerPart::Text(text) => text.as_str(),
                    _ => "",
                })
                .collect();
            if !answer.contains("<function=f>") {
                assert_eq!(said, answer);
            }
        }
        // Without tools nothing is looked for.
        assert_eq!(read(AnswerStyle::default(), &[" <tool_call>"]), [text(" <tool_call>")]);
    }

    proptest! {
        #[test]
        fn cutting_changes_nothing(
            pieces in prop::collection::vec("(<think>|</think>|<tool_call>|</tool_call>|\\{\"name\": \"f\", \"arguments\": \\{\\}\\}|<|[a-z \\n{}ü])", 0..12),
            tools in prop::option::of(prop::sample::select(vec![ToolFormat::Bare, ToolFormat::Parameters, ToolFormat::Tagged])),
            thoughts in prop::sample::select(vec![Thoughts::None, Thoughts::Open, Thoughts::Perhaps]),
        ) {
            let style = AnswerStyle { thoughts, tools };
            let whole = pieces.concat();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let chars: Vec<String> = whole.chars().map(String::from).collect();
            let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
            let expected = read(style, &[&whole]);
            prop_assert_eq!(read(style, &pieces), expected.clone());
            prop_assert_eq!(read(style, &chars), expected);
        }
    }
}
