//! Items of a session's conversation, in the protocol's form.

use std::collections::VecDeque;

use serde_json::{Map, Value, json};

use super::super::{
    backend::ChatMessage,
    fault::{Fault, invalid},
    responses_wire::push_item,
};
use cotenant_memory::heap;
use cotenant_speech::audio::TTS_RATE_HZ;
use cotenant_units::Bytes;

/// Items in order.
#[derive(Default)]
pub(super) struct Items {
    items: VecDeque<Item>,
}

struct Item {
    id: String,
    shown: Value,
    /// Its spoken sentences.
    spoken: Spoken,
}

/// Spoken sentences, and samples sent.
#[derive(Clone, Debug, Default)]
pub(super) struct Spoken {
    sentences: Vec<(String, u64)>,
    samples: u64,
}

impl Spoken {
    pub(super) fn sent(&mut self, samples: usize) {
        self.samples += u64::try_from(samples).unwrap_or(u64::MAX);
    }

    /// Records the beginning of a spoken sentence.
    pub(super) fn begin(&mut self, sentence: String) {
        self.sentences.push((sentence, self.samples));
    }

    /// Milliseconds of all samples, rounded up.
    fn millis(&self) -> u64 {
        self.samples
            .saturating_mul(1000)
            .div_ceil(TTS_RATE_HZ.into())
    }

    /// The words heard until then, whole words only.
    fn heard_until(&self, millis: u64) -> String {
        let samples = millis.saturating_mul(TTS_RATE_HZ.into()) / 1000;
        let ends = self
            .sentences
            .iter()
            .skip(1)
            .map(|(_, start)| *start)
            .chain([self.samples]);
        let mut heard = Vec::new();
        for ((sentence, start), end) in self.sentences.iter().zip(ends) {
            if end <= samples {
                heard.push(sentence.as_str());
                continue;
            }
            let (part, whole) = (
                samples.saturating_sub(*start),
                end.saturating_sub(*start).max(1),
            );
            let chars = u64::try_from(sentence.chars().count()).unwrap_or(u64::MAX);
            let chars = usize::try_from(chars.saturating_mul(part) / whole).unwrap_or(usize::MAX);
            let cut = sentence
                .char_indices()
                .nth(chars)
                .map_or(sentence.len(), |(at, _)| at);
            let words = sentence.get(..cut).unwrap_or_default();
            heard.push(words.rsplit_once(' ').map_or("", |(words, _)| words));
            break;
        }
        heard.join(" ").trim_end().to_owned()
    }
}

impl Items {
    /// An item as shown to the client; `field` and `code` are those of the error if there is none.
    pub(super) fn get(&self, field: &str, id: &str, code: &'static str) -> Result<&Value, Fault> {
        let at = self.position(field, id, code)?;
        let found = self.items.get(at).map(|item| &item.shown);
        found.ok_or_else(|| absent(field, id, code))
    }

    pub(super) fn previous(&self, id: &str) -> Option<&str> {
        let at = self.items.iter().position(|item| item.id == id)?;
        let before = self.items.get(at.checked_sub(1)?);
        before.map(|before| before.id.as_str())
    }

    /// The fields of an event about an item: the item, and the id of the preceding one.
    pub(super) fn followed(&self, id: &str, item: &Value) -> Value {
        json!({"previous_item_id": self.previous(id), "item": item})
    }

    fn position(&self, field: &str, id: &str, code: &'static str) -> Result<usize, Fault> {
        let at = self.items.iter().position(|item| item.id == id);
        at.ok_or_else(|| absent(field, id, code))
    }

    /// Adds an item after another (`root`: before all), or at the end.
    ///
    /// # Errors
    /// If its id exists, or the preceding item does not.
    pub(super) fn insert(
        &mut self,
        after: Option<&str>,
        id: &str,
        shown: Value,
    ) -> Result<(), Fault> {
        if self.items.iter().any(|item| item.id == id) {
            return Err(Fault::bad_request(
                "item_create_duplicate_item_id",
                format!("the item `{id}` already exists"),
            )
            .of_param("item.id"));
        }
        let at = match after {
            None => self.items.len(),
            Some("root") => 0,
            Some(after) => {
                let code = "item_create_invalid_previous_item_id";
                self.position("previous_item_id", after, code)? + 1
            }
        };
        self.items.insert(
            at,
            Item {
                id: id.to_owned(),
                shown,
                spoken: Spoken::default(),
            },
        );
        Ok(())
    }

    /// Replaces the shown form of an item, unless it was deleted.
    pub(super) fn replace(&mut self, id: &str, shown: Value, spoken: Spoken) {
        if let Some(item) = self.items.iter_mut().find(|item| item.id == id) {
            item.shown = shown;
            item.spoken = spoken;
        }
    }

    pub(super) fn transcribed(&mut self, id: &str, text: &str) {
        let item = self.items.iter_mut().find(|item| item.id == id);
        if let Some(part) = item.and_then(|item| item.shown.pointer_mut("/content/0"))
            && let Some(part) = part.as_object_mut()
        {
            part.insert("transcript".to_owned(), json!(text));
        }
    }

    /// Deletes an item; an error if there is none.
    pub(super) fn delete(&mut self, id: &str) -> Result<(), Fault> {
        let at = self.position("item_id", id, "item_delete_invalid_item_id")?;
        self.items.remove(at);
        Ok(())
    }

    /// Removes the oldest item while all together exceed `max`; returns its id.
    pub(super) fn evict(&mut self, max: Bytes) -> Option<String> {
        let bytes = self.items.iter().fold(Bytes::ZERO, |sum, item| {
            sum.saturating_add(size(&item.shown))
        });
        if bytes <= max || self.items.len() < 2 {
            return None;
        }
        self.items.pop_front().map(|item| item.id)
    }

    /// Truncates a spoken item to the heard part; an error if it is not a spoken answer, or shorter.
    pub(super) fn truncate(&mut self, id: &str, audio_end_ms: u64) -> Result<(), Fault> {
        let item = self.items.iter_mut().find(|item| item.id == id);
        let item = item.ok_or_else(|| absent("item_id", id, "item_truncate_invalid_item_id"))?;
        let length = item.spoken.millis();
        let part = item
            .shown
            .pointer_mut("/content/0")
            .and_then(Value::as_object_mut);
        let Some(part) = part.filter(|part| part.get("type") == Some(&json!("output_audio")))
        else {
            return Err(Fault::bad_request(
                "item_truncate_invalid_item_id",
                format!("`{id}` is not a spoken answer"),
            )
            .of_param("item_id"));
        };
        if audio_end_ms > length {
            return Err(Fault::bad_request(
                "item_truncate_invalid_audio_end",
                format!(
                    "audio_end_ms: `{audio_end_ms}` is above the {length} ms that were sent of `{id}`"
                ),
            )
            .of_param("audio_end_ms"));
        }
        part.insert(
            "transcript".to_owned(),
            json!(item.spoken.heard_until(audio_end_ms)),
        );
        Ok(())
    }

    /// The conversation as messages for the LLM, followed by `more`; an error if an item cannot be converted.
    pub(super) fn messages(&self, own: bool, more: &[Value]) -> Result<Vec<ChatMessage>, Fault> {
        let mut messages = Vec::new();
        for item in self.items.iter().filter(|_| own) {
            push_item("conversation", as_text(&item.shown), &mut messages)?;
        }
        for (index, item) in more.iter().enumerate() {
            let field = format!("response.input[{index}]");
            let item = match item.get("type").and_then(Value::as_str) {
                Some("item_reference") => {
                    let id = item.get("id").and_then(Value::as_str).unwrap_or_default();
                    self.get(&format!("{field}.id"), id, "item_reference_invalid_item_id")?
                }
                _ => item,
            };
            push_item(&field, as_text(item), &mut messages)?;
        }
        // speech without words
        messages.retain(|message| {
            !message.content.is_empty()
                || !message.tool_calls.is_empty()
                || message.tool_call_id.is_some()
        });
        Ok(messages)
    }
}

/// A checked item of a client, as it is shown; `fresh` is its id if it has none. Errors are 400 and name the field, its
/// value and the limit.
pub(super) fn created(
    mut item: Map<String, Value>,
    fresh: impl FnOnce() -> String,
    max: Bytes,
) -> Result<(String, Value), Fault> {
    let id = match item.get("id") {
        None | Some(Value::Null) => fresh(),
        Some(Value::String(id)) if (1..=ID_MAX).contains(&id.len()) && id != "root" => id.clone(),
        Some(other) => {
            return invalid(
                "item.id",
                other,
                format!("is not a text of 1 to {ID_MAX} bytes"),
            );
        }
    };
    item.insert("id".to_owned(), json!(id));
    item.insert("object".to_owned(), json!("realtime.item"));
    item.insert("status".to_owned(), json!("completed"));
    let item = Value::Object(item);
    let size = size(&item);
    if size > max {
        return invalid(
            "item",
            size,
            format!("of memory is above the limit of {max}"),
        );
    }
    for (index, part) in item
        .get("content")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .enumerate()
    {
        let is_audio = part.get("audio").is_some_and(|audio| !audio.is_null());
        if is_audio && part.get("transcript").is_none_or(Value::is_null) {
            return invalid(
                &format!("item.content[{index}].audio"),
                "base64",
                "is not supported: send audio by `input_audio_buffer.append`, or its `transcript`",
            );
        }
    }
    push_item("item", as_text(&item), &mut Vec::new())?;
    Ok((id, item))
}

/// An item with its audio replaced by the transcript.
fn as_text(item: &Value) -> Value {
    let mut item = item.clone();
    let parts = item.get_mut("content").and_then(Value::as_array_mut);
    for part in parts.into_iter().flatten() {
        let kind = match part.get("type").and_then(Value::as_str) {
            Some("input_audio") => "input_text",
            Some("audio" | "output_audio") => "output_text",
            _ => continue,
        };
        let text = part
            .get("transcript")
            .filter(|text| text.is_string())
            .cloned();
        *part = json!({"type": kind, "text": text.unwrap_or_else(|| json!(""))});
    }
    item
}

fn absent(field: &str, id: &str, code: &'static str) -> Fault {
    Fault::bad_request(
        code,
        format!(
            "the conversation has no item `{}`",
            super::super::fault::shortened(id)
        ),
    )
    .of_param(field)
}

fn size(item: &Value) -> Bytes {
    heap::tree_bytes(item.to_string().as_bytes())
}

/// Our choice: clients build ids from a UUID and a word.
const ID_MAX: usize = 128;
