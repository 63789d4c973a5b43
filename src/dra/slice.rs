//! The ResourceSlice of a node, as the API server takes it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::{
    claim::{self, DEVICE, Identity, MEMORY},
    pool::{Offer, STEP},
    quantity,
};
use cotenant_units::Timestamp;

/// Attributes of the device, by which claims and schedulers select nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traits {
    /// Model of the board, from the device tree.
    pub board: Option<String>,
    /// Release of L4T: `36.4.7`.
    pub l4t: Option<String>,
    /// Name of the LLM.
    pub model: Option<String>,
    /// Predicted speed of answers, in whole tokens per second.
    pub tokens_per_second: Option<u64>,
}

/// Wall clock at a time since the start.
#[derive(Clone, Copy, Debug)]
pub struct WallClock {
    /// Time of the start.
    pub started: SystemTime,
}

impl WallClock {
    /// Returns the date as in the API: `2026-11-30T09:00:00Z`.
    #[must_use]
    pub fn date(&self, at: Timestamp) -> String {
        date(self.started + at.since_start())
    }
}

/// Returns the name of the slice.
#[must_use]
pub fn name(own: &Identity) -> String {
    format!("{}-{}", own.node, own.driver)
}

/// Returns the slice for server-side apply. `owner` is the uid of the node, with which the slice is deleted.
#[must_use]
pub fn slice(
    own: &Identity,
    owner: Option<&str>,
    offer: &Offer,
    traits: &Traits,
    clock: WallClock,
) -> Value {
    let mut metadata = json!({ "name": name(own) });
    if let (Some(owner), Some(metadata)) = (owner, metadata.as_object_mut()) {
        let node = json!([{ "apiVersion": "v1", "kind": "Node", "name": own.node, "uid": owner, "controller": true }]);
        metadata.insert("ownerReferences".to_owned(), node);
    }
    let step = quantity::of(STEP.get());
    let taints: Vec<Value> = offer
        .taints
        .iter()
        .map(|taint| {
            json!({
                "key": taint.key,
                "value": taint.value,
                "effect": taint.effect.name(),
                "timeAdded": clock.date(taint.since),
            })
        })
        .collect();
    let mut device = json!({
        "name": DEVICE,
        "allowMultipleAllocations": true,
        "attributes": attributes(own, traits),
        "capacity": {
            MEMORY: {
                "value": quantity::of(offer.capacity.get()),
                "requestPolicy": { "default": step, "validRange": { "min": step, "step": step } },
            },
        },
    });
    if let Some(device) = device.as_object_mut().filter(|_| !taints.is_empty()) {
        device.insert("taints".to_owned(), Value::Array(taints));
    }
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": metadata,
        "spec": {
            "driver": own.driver,
            "nodeName": own.node,
            "pool": { "name": own.node, "generation": 1, "resourceSliceCount": 1 },
            "devices": [device],
        },
    })
}

fn attributes(own: &Identity, traits: &Traits) -> Value {
    let mut attributes = Map::new();
    let mut add = |name: &str, kind: &str, value: Option<Value>| {
        if let Some(value) = value {
            attributes.insert(name.to_owned(), json!({ kind: value }));
        }
    };
    let text = |text: &Option<String>| text.as_deref().map(|text| Value::from(cut(text)));
    add(
        "class",
        "string",
        Some(Value::from(claim::name_of(own.class))),
    );
    add("board", "string", text(&traits.board));
    add("l4t", "version", text(&traits.l4t));
    add("model", "string", text(&traits.model));
    add(
        "tokensPerSecond",
        "int",
        traits.tokens_per_second.map(Value::from),
    );
    Value::Object(attributes)
}

/// Cuts a text to the longest attribute.
fn cut(text: &str) -> &str {
    let end = text
        .char_indices()
        .map(|(at, c)| at + c.len_utf8())
        .take_while(|end| *end <= ATTRIBUTE_MAX)
        .last();
    text.get(..end.unwrap_or_default()).unwrap_or_default()
}

/// Returns a date of the API, in UTC, by the calendar of Howard Hinnant's `civil_from_days`.
fn date(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let (days, rest) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Longest string of an attribute, set by the API.
const ATTRIBUTE_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        claim::tests::own,
        pool::{Effect, PRESSURE, Taint},
    };
    use cotenant_units::Bytes;
    use k8s_openapi::api::resource::v1::ResourceSlice;

    #[test]
    fn a_slice_has_the_fields_and_types_of_kubernetes_and_no_others() {
        let offer = Offer {
            capacity: Bytes::from_mib(9 * 1024),
            taints: vec![Taint {
                key: PRESSURE,
                value: "elevated",
                effect: Effect::None,
                since: Timestamp::from_millis(1500),
            }],
        };
        let traits = Traits {
            board: Some("ä".repeat(40)),
            l4t: Some("36.4.7".to_owned()),
            model: Some("qwen3.5-0.8b".to_owned()),
            tokens_per_second: Some(31),
        };
        let clock = WallClock {
            started: UNIX_EPOCH + Duration::from_secs(1_800_000_000),
        };
        let written = slice(&own(), Some("0b1c"), &offer, &traits, clock);
        let read: ResourceSlice = serde_json::from_value(written.clone()).unwrap();
        // A field that the type does not know would be missing.
        assert_eq!(serde_json::to_value(&read).unwrap(), written);
        let spec = read.spec;
        let device = &spec.devices.unwrap()[0];
        assert_eq!(device.allow_multiple_allocations, Some(true));
        let memory = &device.capacity.as_ref().unwrap()[MEMORY];
        assert_eq!(memory.value.0, "9216Mi");
        let policy = memory.request_policy.as_ref().unwrap();
        assert_eq!(policy.default.as_ref().unwrap().0, "64Mi");
        let board = &device.attributes.as_ref().unwrap()["board"];
        assert_eq!(board.string.as_ref().unwrap().len(), ATTRIBUTE_MAX);
    }

    #[test]
    fn dates_follow_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_800_000_000, "2027-01-15T08:00:00Z"),
            (4_102_444_800, "2100-01-01T00:00:00Z"),
        ] {
            assert_eq!(date(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }
}
