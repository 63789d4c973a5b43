//! Parser of client events.

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use super::super::{
    body::{bounded_tree, parse_json, wrong_type},
    fault::{Fault, invalid, shortened},
    numbers::Whole,
};
use cotenant_units::Bytes;

/// An event of a client.
#[derive(Debug)]
pub(super) enum ClientEvent {
    Append(Append),
    Cancel(Cancel),
    Clear,
    Commit,
    Create(Create),
    Delete(Item),
    Respond(Map<String, Value>),
    Retrieve(Item),
    Truncate(Truncate),
    Update(Map<String, Value>),
}

#[derive(Debug, Deserialize)]
pub(super) struct Append {
    /// Base64 of 16-bit samples.
    pub(super) audio: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Cancel {
    pub(super) response_id: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Create {
    /// The preceding item; `root` for none, absent for the last one.
    pub(super) previous_item_id: Option<String>,
    pub(super) item: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Item {
    pub(super) item_id: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Truncate {
    pub(super) item_id: String,
    pub(super) content_index: Option<Whole>,
    pub(super) audio_end_ms: Whole,
}

#[derive(Deserialize)]
struct Respond {
    response: Option<Map<String, Value>>,
}

#[derive(Deserialize)]
struct Update {
    session: Map<String, Value>,
}

/// Parses one message, which may take up to `max` in memory; returns the client's event id and the event.
pub(super) fn read(text: &str, max: Bytes) -> (Option<String>, Result<ClientEvent, Fault>) {
    let map = bounded_tree(text.as_bytes(), max)
        .and_then(|_| parse_json::<Map<String, Value>>(text.as_bytes()));
    let map = match map {
        Ok(map) => map,
        Err(fault) => return (None, Err(fault)),
    };
    let id = map.get("event_id").and_then(Value::as_str);
    (id.map(shortened), of(map))
}

fn of(map: Map<String, Value>) -> Result<ClientEvent, Fault> {
    let kind = map.get("type").and_then(Value::as_str).unwrap_or_default();
    Ok(match kind {
        "conversation.item.create" => ClientEvent::Create(fields(map)?),
        "conversation.item.delete" => ClientEvent::Delete(fields(map)?),
        "conversation.item.retrieve" => ClientEvent::Retrieve(fields(map)?),
        "conversation.item.truncate" => ClientEvent::Truncate(fields(map)?),
        "input_audio_buffer.append" => ClientEvent::Append(fields(map)?),
        "input_audio_buffer.clear" => ClientEvent::Clear,
        "input_audio_buffer.commit" => ClientEvent::Commit,
        "response.cancel" => ClientEvent::Cancel(fields(map)?),
        "response.create" => {
            ClientEvent::Respond(fields::<Respond>(map)?.response.unwrap_or_default())
        }
        "session.update" => ClientEvent::Update(fields::<Update>(map)?.session),
        _ => {
            return invalid(
                "type",
                kind,
                "is not one of `session.update`, `input_audio_buffer.append`, `.commit`, `.clear`, \
                 `conversation.item.create`, `.retrieve`, `.truncate`, `.delete`, `response.create`, `.cancel`",
            );
        }
    })
}

fn fields<T: DeserializeOwned>(map: Map<String, Value>) -> Result<T, Fault> {
    serde_path_to_error::deserialize(Value::Object(map)).map_err(|error| wrong_type(&error))
}
