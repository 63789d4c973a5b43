//! Parser of a journal line.
//!
//! The kind of a line always precedes its body, so the body is parsed directly as that kind. Serde's derive for a
//! flattened, tagged value would first buffer a generic value, for each of half a million lines a day.

use std::fmt;

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{DeserializeSeed, Error, IgnoredAny, MapAccess, Visitor},
};

use cotenant_policy::{
    arbiter::Checkpoint,
    event::{Action, Event},
    params::Params,
};
use cotenant_units::Timestamp;

/// A line of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct JournalEntry {
    /// Its number in this run, from 1, without gaps unless lines were dropped.
    pub sequence: u64,
    /// Id of the run.
    pub boot_id: String,
    /// Time since the start of the run, µs.
    pub at: Timestamp,
    /// Wall-clock time, µs since 1970.
    pub unix_us: u64,
    /// Content of the line.
    #[serde(flatten)]
    pub content: Content,
}

/// Content of a line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", content = "body")]
pub enum Content {
    /// The supervisor started.
    Start(Box<Start>),
    /// An event of the arbiter.
    Event(Event),
    /// An action of the arbiter.
    Action(Action),
    /// The complete state of the arbiter at this point.
    Checkpoint(Box<Checkpoint>),
    /// Lines are missing here, because the writer could not keep up.
    Dropped {
        /// Number of missing lines.
        lines: u64,
    },
}

/// The settings with which a run started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Version of the program.
    pub version: String,
    /// The settings of policy.
    pub params: Params,
}

impl Content {
    /// Returns the start of a run of this version.
    pub fn start(params: Params) -> Self {
        Self::Start(Box::new(Start {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            params,
        }))
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    Sequence,
    BootId,
    At,
    UnixUs,
    Kind,
    Body,
    #[serde(other)]
    Other,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Start,
    Event,
    Action,
    Checkpoint,
    Dropped,
}

#[derive(Deserialize)]
struct Dropped {
    lines: u64,
}

impl<'de> DeserializeSeed<'de> for Kind {
    type Value = Content;

    fn deserialize<D: Deserializer<'de>>(self, body: D) -> Result<Content, D::Error> {
        Ok(match self {
            Self::Start => Content::Start(Deserialize::deserialize(body)?),
            Self::Event => Content::Event(Deserialize::deserialize(body)?),
            Self::Action => Content::Action(Deserialize::deserialize(body)?),
            Self::Checkpoint => Content::Checkpoint(Deserialize::deserialize(body)?),
            Self::Dropped => Content::Dropped {
                lines: Dropped::deserialize(body)?.lines,
            },
        })
    }
}

impl<'de> Deserialize<'de> for JournalEntry {
    fn deserialize<D: Deserializer<'de>>(line: D) -> Result<Self, D::Error> {
        line.deserialize_map(Line)
    }
}

struct Line;

impl<'de> Visitor<'de> for Line {
    type Value = JournalEntry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a line of a journal")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut line: A) -> Result<JournalEntry, A::Error> {
        let (mut sequence, mut boot_id, mut at, mut unix_us) = (None, None, None, None);
        let (mut kind, mut content, mut early) = (None::<Kind>, None, None::<serde_json::Value>);
        while let Some(field) = line.next_key()? {
            match field {
                Field::Sequence => sequence = Some(line.next_value()?),
                Field::BootId => boot_id = Some(line.next_value()?),
                Field::At => at = Some(line.next_value()?),
                Field::UnixUs => unix_us = Some(line.next_value()?),
                Field::Kind => kind = Some(line.next_value()?),
                Field::Body => match kind {
                    Some(kind) => content = Some(line.next_value_seed(kind)?),
                    None => early = Some(line.next_value()?),
                },
                Field::Other => {
                    line.next_value::<IgnoredAny>()?;
                }
            }
        }
        let missing = A::Error::missing_field;
        let kind = kind.ok_or_else(|| missing("kind"))?;
        let content = match (content, early) {
            (Some(content), _) => content,
            (None, Some(body)) => kind.deserialize(body).map_err(A::Error::custom)?,
            (None, None) => return Err(missing("body")),
        };
        Ok(JournalEntry {
            sequence: sequence.ok_or_else(|| missing("sequence"))?,
            boot_id: boot_id.ok_or_else(|| missing("boot_id"))?,
            at: at.ok_or_else(|| missing("at"))?,
            unix_us: unix_us.ok_or_else(|| missing("unix_us"))?,
            content,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cotenant_policy::event::Event;

    fn read(text: &str) -> Result<JournalEntry, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn the_order_of_the_fields_does_not_matter_and_unknown_ones_are_left_out() {
        let usual = r#"{"sequence":2,"boot_id":"a","at":7,"unix_us":9,"kind":"event","body":{"event":"drain_requested"}}"#;
        let other = r#"{"new":[1],"body":{"event":"drain_requested"},"unix_us":9,"at":7,"boot_id":"a","kind":"event","sequence":2}"#;
        let entry = read(usual).unwrap();
        assert_eq!(
            entry.content,
            Content::Event(Event::DrainRequested { by: None })
        );
        assert_eq!(read(other).unwrap(), entry);
        assert_eq!(serde_json::to_string(&entry).unwrap(), usual);
    }

    #[test]
    fn a_command_names_its_origin_except_in_older_journals() {
        let older = r#"{"sequence":2,"boot_id":"a","at":7,"unix_us":9,"kind":"event","body":{"event":"operator_regrow","ticket":1}}"#;
        for (by, words) in [
            ("", "an operator requests regrowth"),
            (
                r#","by":{"uid":1000}"#,
                "an operator (uid 1000) requests regrowth",
            ),
            (
                r#","by":{"key":"kitchen"}"#,
                "an operator (key `kitchen`) requests regrowth",
            ),
        ] {
            let line = older.replace("}}", &format!("{by}}}}}"));
            let entry = read(&line).unwrap();
            assert_eq!(crate::render(&entry), words);
            assert_eq!(serde_json::to_string(&entry).unwrap(), line);
        }
    }

    #[test]
    fn what_is_missing_or_unknown_is_named() {
        let dropped = r#"{"sequence":2,"boot_id":"a","at":7,"unix_us":9,"kind":"dropped","body":{"lines":3}}"#;
        assert_eq!(
            read(dropped).unwrap().content,
            Content::Dropped { lines: 3 }
        );
        for (from, to, words) in [
            (r#""kind":"dropped","#, "", "missing field `kind`"),
            (r#","body":{"lines":3}"#, "", "missing field `body`"),
            (r#""at":7,"#, "", "missing field `at`"),
            ("dropped", "invented", "unknown variant `invented`"),
            (r#"{"lines":3}"#, "{}", "missing field `lines`"),
        ] {
            let error = read(&dropped.replace(from, to)).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
