//! Service description of a Wyoming server.
//!
//! Written strictly, because the reference client raises `TypeError` if `name`, `installed` or `attribution` is
//! missing; read leniently, because servers have any version.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// The answer to `describe`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Info {
    /// Recognisers.
    #[serde(deserialize_with = "or_default")]
    pub asr: Vec<AsrProgram>,
    /// Voices.
    #[serde(deserialize_with = "or_default")]
    pub tts: Vec<TtsProgram>,
    /// Assistants that handle a text.
    #[serde(deserialize_with = "or_default")]
    pub handle: Vec<HandleProgram>,
    /// Intent recognisers, passed through.
    #[serde(deserialize_with = "or_default")]
    pub intent: Vec<Value>,
    /// Wake word detectors, passed through.
    #[serde(deserialize_with = "or_default")]
    pub wake: Vec<Value>,
    /// Microphones, passed through.
    #[serde(deserialize_with = "or_default")]
    pub mic: Vec<Value>,
    /// Loudspeakers, passed through.
    #[serde(deserialize_with = "or_default")]
    pub snd: Vec<Value>,
}

/// Author of an artifact.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Attribution {
    /// Name of the author or project.
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    /// Its address.
    #[serde(deserialize_with = "or_default")]
    pub url: String,
}

/// Common fields of every program, model and voice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Artifact {
    /// Its name.
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    /// Its author.
    #[serde(deserialize_with = "or_default")]
    pub attribution: Attribution,
    /// Whether it is available.
    #[serde(deserialize_with = "or_default")]
    pub installed: bool,
    /// Description for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Its version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// A recogniser.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AsrProgram {
    /// Common fields.
    #[serde(flatten)]
    pub artifact: Artifact,
    /// Models of the recogniser.
    #[serde(deserialize_with = "or_default")]
    pub models: Vec<Model>,
    /// Whether it sends partial transcripts.
    #[serde(deserialize_with = "or_default")]
    pub supports_transcript_streaming: bool,
}

/// A speech synthesiser.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TtsProgram {
    /// Common fields.
    #[serde(flatten)]
    pub artifact: Artifact,
    /// Its voices. The field is `voices`, not `models`.
    #[serde(deserialize_with = "or_default")]
    pub voices: Vec<Model>,
    /// Whether it accepts text in pieces.
    #[serde(deserialize_with = "or_default")]
    pub supports_synthesize_streaming: bool,
}

/// An assistant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HandleProgram {
    /// Common fields.
    #[serde(flatten)]
    pub artifact: Artifact,
    /// Models of the assistant.
    #[serde(deserialize_with = "or_default")]
    pub models: Vec<Model>,
    /// Whether it sends answers in pieces.
    #[serde(deserialize_with = "or_default")]
    pub supports_handled_streaming: bool,
    /// Whether it can control the home.
    #[serde(deserialize_with = "or_default")]
    pub supports_home_control: bool,
}

/// A model or voice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Model {
    /// Common fields.
    #[serde(flatten)]
    pub artifact: Artifact,
    /// Supported languages, as `en` or `en-US`.
    #[serde(deserialize_with = "or_default")]
    pub languages: Vec<String>,
    /// Speakers of a voice; none for a single-speaker voice.
    #[serde(deserialize_with = "speakers", skip_serializing_if = "Vec::is_empty")]
    pub speakers: Vec<Speaker>,
}

/// A speaker of a multi-speaker voice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Speaker {
    /// Its name.
    pub name: String,
}

/// Reads the valid speakers; models of recognisers may use this name for something else.
fn speakers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Speaker>, D::Error> {
    let value = Option::<Value>::deserialize(deserializer)?;
    let listed = value
        .as_ref()
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    Ok(listed
        .filter_map(|speaker| Speaker::deserialize(speaker).ok())
        .collect())
}

/// Treats an explicit null like a missing field.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_the_reference_client_needs_is_always_written() {
        let info = Info {
            tts: vec![TtsProgram {
                voices: vec![Model::default()],
                ..TtsProgram::default()
            }],
            ..Info::default()
        };
        assert_eq!(
            serde_json::to_value(&info).unwrap(),
            json!({
                "asr": [], "handle": [], "intent": [], "wake": [], "mic": [], "snd": [],
                "tts": [{
                    "name": "", "installed": false, "attribution": {"name": "", "url": ""},
                    "supports_synthesize_streaming": false,
                    "voices": [{
                        "name": "", "installed": false, "attribution": {"name": "", "url": ""}, "languages": [],
                    }],
                }],
            })
        );
    }

    #[test]
    fn nulls_and_unknown_fields_are_read_as_nothing() {
        let info: Info = serde_json::from_value(json!({
            "asr": [{"name": "whisper", "installed": true, "attribution": null, "models": [{"name": "tiny", "speakers": 3}], "new": 1}],
            "tts": null,
            "satellite": {"name": "x"},
        }))
        .unwrap();
        assert_eq!(info.asr[0].artifact.name, "whisper");
        assert_eq!(info.asr[0].models[0].artifact.name, "tiny");
        assert!(info.asr[0].models[0].speakers.is_empty());
        let voice: Model =
            serde_json::from_value(json!({"name": "libri", "speakers": [{"name": "p1"}, 7]}))
                .unwrap();
        assert_eq!(
            voice.speakers,
            [Speaker {
                name: "p1".to_owned()
            }]
        );
        assert!(info.tts.is_empty());
    }
}
