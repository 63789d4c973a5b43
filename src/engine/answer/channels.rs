//! Reader of an answer that consists of messages in channels, as gpt-oss writes it (Harmony).
//!
//! ```text
//!  <|channel|>analysis<|message|> thoughts <|end|>
//!  <|start|>assistant<|channel|>commentary to=functions.light <|constrain|>json<|message|> {…} <|call|>
//!  <|start|>assistant<|channel|>final<|message|> text <|return|>
//! ```
//!
//! The prompt ends before the first channel. The last tag of each line ends the answer and is not part of it.

use super::tags::held_back;

/// Incremental reader.
#[derive(Debug)]
pub(super) struct Channels {
    place: Place,
    /// Received text that is not classified yet.
    held: String,
}

/// Place in the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// Before a message's text.
    Header,
    /// In a message.
    Message(Kind),
}

/// Kind of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A call of this tool; its text is a JSON object.
    Call(String),
    /// Text for the user.
    Text,
    /// Thoughts.
    Thought,
}

/// A piece of an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// A message begins.
    Begin,
    /// A part of thoughts or of a text, or all of a call.
    Said(Kind, String),
}

impl Channels {
    /// A reader at the beginning of an answer, or in its text if the prompt has begun it.
    pub(super) const fn new(in_text: bool) -> Self {
        Self {
            place: if in_text {
                Place::Message(Kind::Text)
            } else {
                Place::Header
            },
            held: String::new(),
        }
    }

    /// Appends a part of the answer, and returns the pieces that are certain.
    pub(super) fn push(&mut self, text: &str) -> Vec<Piece> {
        self.held.push_str(text);
        let mut pieces = Vec::new();
        while self.step(&mut pieces) {}
        pieces
    }

    /// Returns the remaining pieces at the end of the answer; the beginning of a header is none, nor is that of a tag if
    /// the answer was `cut`.
    pub(super) fn finish(&mut self, cut: bool) -> Vec<Piece> {
        let held = std::mem::take(&mut self.held);
        match &self.place {
            Place::Header if is_header(&held) => Vec::new(),
            Place::Header => vec![Piece::Begin, Piece::Said(Kind::Text, held)],
            Place::Message(kind) => {
                let end = if cut {
                    held_back(&held, &ENDS)
                } else {
                    held.len()
                };
                let said = held.get(..end).unwrap_or_default().to_owned();
                vec![Piece::Said(kind.clone(), said)]
            }
        }
    }

    /// Advances by one step over the held text; returns whether to call again.
    fn step(&mut self, pieces: &mut Vec<Piece>) -> bool {
        match self.place.clone() {
            Place::Header => {
                let end = self.held.find(MESSAGE).map(|at| at + MESSAGE.len());
                let whole = end.and_then(|end| self.held.get(..end));
                let kind = match whole {
                    // With its end, since a part of a tag before it begins no header.
                    Some(header) if is_header(header) => {
                        let kind = kind_of(header);
                        self.held.drain(..header.len());
                        kind
                    }
                    None if is_header(&self.held) => return false,
                    // Without a header, all is text.
                    _ => Kind::Text,
                };
                pieces.push(Piece::Begin);
                self.place = Place::Message(kind);
                true
            }
            Place::Message(kind) => {
                let found = ENDS
                    .iter()
                    .filter_map(|tag| Some((self.held.find(tag)?, *tag)));
                let found = found.min();
                let end = match found {
                    Some((at, _)) => at,
                    // A call is complete at its end only.
                    None if matches!(kind, Kind::Call(_)) => return false,
                    None => held_back(&self.held, &ENDS),
                };
                let said: String = self.held.drain(..end).collect();
                let is_call = matches!(kind, Kind::Call(_));
                if is_call || !said.is_empty() {
                    pieces.push(Piece::Said(kind, said));
                }
                if let Some((_, tag)) = found {
                    if tag == END {
                        self.held.drain(..tag.len());
                    }
                    self.place = Place::Header;
                }
                found.is_some()
            }
        }
    }
}

/// Whether a text may be the beginning of a header.
fn is_header(text: &str) -> bool {
    let text = text.trim_start();
    let begun = |tag: &&str| text.starts_with(*tag) || tag.starts_with(text);
    text.len() <= HEADER_MAX && HEADER_STARTS.iter().any(begun)
}

/// The kind of a message with this header.
fn kind_of(header: &str) -> Kind {
    let word_after = |tag: &str| {
        let (_, rest) = header.split_once(tag)?;
        let end = rest.find(|character: char| character.is_whitespace() || character == '<');
        rest.get(..end.unwrap_or(rest.len()))
    };
    match (word_after("to="), word_after(CHANNEL)) {
        (Some(tool), _) => Kind::Call(tool.strip_prefix(FUNCTIONS).unwrap_or(tool).to_owned()),
        (None, Some(THOUGHTS)) => Kind::Thought,
        (None, _) => Kind::Text,
    }
}

const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const END: &str = "<|end|>";
const START: &str = "<|start|>";
/// Tags at which a message ends; models forget the first one.
const ENDS: [&str; 3] = [END, START, CHANNEL];
/// Texts with which headers begin: the prompt has begun the first one.
const HEADER_STARTS: [&str; 4] = [START, CHANNEL, MESSAGE, "to="];
/// The channel of thoughts.
const THOUGHTS: &str = "analysis";
/// Namespace of the conversation's tools.
const FUNCTIONS: &str = "functions.";
/// Our choice: names of tools have up to 64 characters.
const HEADER_MAX: usize = 256;
