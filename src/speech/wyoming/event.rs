//! Typed Wyoming events.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use super::{frame::Frame, info::Info};

/// A Wyoming message: one of the known types, or any other unchanged.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Event {
    /// Requests the description of a server.
    Describe,
    /// The answer to [`Describe`](Self::Describe).
    Info(Box<Info>),
    /// Requests a transcript of the following audio.
    Transcribe(Transcribe),
    /// Audio begins.
    AudioStart(AudioStart),
    /// Some audio.
    AudioChunk(AudioChunk),
    /// Audio ends.
    AudioStop(AudioStop),
    /// A transcript; as a request, text for an assistant.
    Transcript(Transcript),
    /// A transcript in pieces begins.
    TranscriptStart(TranscriptStart),
    /// A piece of the transcript.
    TranscriptChunk(Text),
    /// The pieces end; the whole transcript was sent before as [`Transcript`](Self::Transcript).
    TranscriptStop,
    /// The assistant's answer.
    Handled(Handled),
    /// The assistant has no answer; the text is the reason, for people.
    NotHandled(Handled),
    /// An answer in pieces begins.
    HandledStart(HandledStart),
    /// A piece of the answer.
    HandledChunk(Text),
    /// The pieces end; the whole answer was sent before as [`Handled`](Self::Handled).
    HandledStop,
    /// The following input is processed by several stages.
    RunPipeline(RunPipeline),
    /// Requests speech for a whole text.
    Synthesize(Synthesize),
    /// Requests speech for a text in pieces.
    SynthesizeStart(SynthesizeStart),
    /// A piece of the text.
    SynthesizeChunk(Text),
    /// The text ends.
    SynthesizeStop,
    /// The speech is complete.
    SynthesizeStopped,
    /// The request failed; the server closes the connection.
    Error(ErrorReply),
    /// Requests a [`Pong`](Self::Pong).
    Ping(Ping),
    /// The answer to [`Ping`](Self::Ping).
    Pong(Ping),
    /// Our extension: requests another variant of a worker.
    Resize(Resize),
    /// The answer to [`Resize`](Self::Resize), after the switch.
    Resized(Resized),
    /// An unknown type.
    #[serde(skip)]
    Other(Frame),
}

/// Declares the types in a header and their events; `parse` marks those with fields.
macro_rules! types {
    ($($name:literal => $event:ident $(($parse:ident))?,)+) => {
        impl Event {
            /// The message as a typed event.
            ///
            /// # Errors
            /// If a known type lacks a required field, or a field has the wrong type.
            pub fn from_frame(frame: Frame) -> Result<Self, EventError> {
                let fields = Fields { kind: frame.kind, data: frame.data };
                let mut event = match fields.kind.as_str() {
                    $($name => Self::$event $((fields.$parse()?))?,)+
                    _ => {
                        return Ok(Self::Other(Frame { kind: fields.kind, data: fields.data, payload: frame.payload }));
                    }
                };
                if let Self::AudioChunk(chunk) = &mut event {
                    chunk.audio = frame.payload;
                }
                Ok(event)
            }

            /// Its type, as in the header.
            pub fn kind(&self) -> &str {
                match self {
                    $(Self::$event { .. } => $name,)+
                    Self::Other(frame) => &frame.kind,
                }
            }
        }
    };
}

types! {
    "describe" => Describe,
    "info" => Info(parse),
    "transcribe" => Transcribe(parse),
    "audio-start" => AudioStart(parse),
    "audio-chunk" => AudioChunk(parse),
    "audio-stop" => AudioStop(parse),
    "transcript" => Transcript(parse),
    "transcript-start" => TranscriptStart(parse),
    "transcript-chunk" => TranscriptChunk(parse),
    "transcript-stop" => TranscriptStop,
    "handled" => Handled(parse),
    "not-handled" => NotHandled(parse),
    "handled-start" => HandledStart(parse),
    "handled-chunk" => HandledChunk(parse),
    "handled-stop" => HandledStop,
    "run-pipeline" => RunPipeline(parse),
    "synthesize" => Synthesize(parse),
    "synthesize-start" => SynthesizeStart(parse),
    "synthesize-chunk" => SynthesizeChunk(parse),
    "synthesize-stop" => SynthesizeStop,
    "synthesize-stopped" => SynthesizeStopped,
    "error" => Error(parse),
    "ping" => Ping(parse),
    "pong" => Pong(parse),
    "cotenant-resize" => Resize(parse),
    "cotenant-resized" => Resized(parse),
}

impl Event {
    /// The event as a message.
    #[must_use]
    pub fn into_frame(self) -> Frame {
        let (kind, data) = (self.kind().to_owned(), object(&self));
        match self {
            Self::Other(frame) => frame,
            Self::AudioChunk(chunk) => Frame {
                kind,
                data,
                payload: chunk.audio,
            },
            _ => Frame {
                kind,
                data,
                payload: Vec::new(),
            },
        }
    }
}

/// Rate and layout of raw audio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AudioFormat {
    /// Samples per second and channel.
    pub rate: u32,
    /// Bytes per sample.
    pub width: u16,
    /// Interleaved channels.
    pub channels: u16,
}

impl AudioFormat {
    /// Mono, 16 bits, little-endian: the format of speech workers.
    pub const fn mono_16_bit(rate: u32) -> Self {
        Self {
            rate,
            width: 2,
            channels: 1,
        }
    }
}

/// Fields of `transcribe`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transcribe {
    /// Model.
    pub name: Option<String>,
    /// Language.
    pub language: Option<String>,
}

/// Fields of `audio-start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AudioStart {
    /// Format of the chunks.
    #[serde(flatten)]
    pub format: AudioFormat,
    /// Milliseconds on the sender's clock.
    pub timestamp: Option<i64>,
}

/// Fields and payload of `audio-chunk`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AudioChunk {
    /// Its format.
    #[serde(flatten)]
    pub format: AudioFormat,
    /// Milliseconds on the sender's clock.
    pub timestamp: Option<i64>,
    /// The samples, little-endian.
    #[serde(skip)]
    pub audio: Vec<u8>,
}

/// Fields of `audio-stop`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AudioStop {
    /// Milliseconds on the sender's clock.
    pub timestamp: Option<i64>,
}

/// Fields of `transcript`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Transcript {
    /// The recognised text.
    pub text: String,
    /// Its language.
    pub language: Option<String>,
    /// Identifies a conversation.
    pub context: Option<Map<String, Value>>,
}

/// Fields of `transcript-start`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TranscriptStart {
    /// Its language.
    pub language: Option<String>,
}

/// Fields of `handled` and `not-handled`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Handled {
    /// The assistant's answer.
    pub text: Option<String>,
    /// Identifies a conversation.
    pub context: Option<Map<String, Value>>,
}

/// Fields of `handled-start`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HandledStart {
    /// Identifies a conversation.
    pub context: Option<Map<String, Value>>,
}

/// Supported fields of `run-pipeline`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunPipeline {
    /// The first stage: `asr`, `handle`, …
    pub start_stage: String,
    /// The last stage: `tts`, …
    pub end_stage: String,
}

/// Fields of `synthesize`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Synthesize {
    /// The text to speak.
    pub text: String,
    /// The voice to use.
    pub voice: Option<Voice>,
}

/// Fields of `synthesize-start`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SynthesizeStart {
    /// The voice to use.
    pub voice: Option<Voice>,
}

/// A requested voice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Voice {
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Or any voice of this language.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub language: Option<String>,
    /// A speaker of a multi-speaker voice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speaker: Option<String>,
}

/// Fields of an event with only a text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Text {
    /// The text.
    pub text: String,
}

/// Fields of `error`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorReply {
    /// For people.
    pub text: String,
    /// For programs.
    pub code: Option<String>,
}

/// Fields of `ping` and `pong`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ping {
    /// Returned unchanged.
    pub text: Option<String>,
}

/// Fields of our extension `cotenant-resize`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resize {
    /// The requested variant, for example `grammar` or `open`.
    pub variant: String,
}

/// Fields of our extension `cotenant-resized`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resized {
    /// The current variant.
    pub variant: String,
    /// Its resident set in bytes, if known to the worker.
    pub rss_bytes: Option<u64>,
}

/// Reason why a message is not the declared event.
#[derive(Debug, thiserror::Error)]
#[error("invalid fields of Wyoming event `{kind}`")]
pub struct EventError {
    kind: String,
    source: serde_json::Error,
}

/// Type and fields of a message being parsed.
struct Fields {
    kind: String,
    data: Map<String, Value>,
}

impl Fields {
    fn parse<T: DeserializeOwned>(&self) -> Result<T, EventError> {
        let data = self.data.iter();
        let data: Map<String, Value> = data
            .map(|(key, value)| {
                (
                    key.clone(),
                    whole(key, value).unwrap_or_else(|| value.clone()),
                )
            })
            .collect();
        serde_json::from_value(Value::Object(data)).map_err(|source| EventError {
            kind: self.kind.clone(),
            source,
        })
    }
}

/// A number of [`WHOLE`] written as a float, `16000.0`, by some languages. Fractions of a millisecond are dropped.
fn whole(key: &str, value: &Value) -> Option<Value> {
    if !WHOLE.contains(&key) || !value.is_f64() {
        return None;
    }
    let number = value.as_f64()?;
    let number = if key == TIMESTAMP {
        number.trunc()
    } else {
        number
    };
    number.to_string().parse::<i64>().ok().map(Value::from)
}

const TIMESTAMP: &str = "timestamp";
/// Integer fields of events.
const WHOLE: [&str; 4] = ["rate", "width", "channels", TIMESTAMP];

/// Its fields as a JSON object, without those that it lacks. Serialising a struct with string keys cannot fail.
fn object(event: &Event) -> Map<String, Value> {
    match serde_json::to_value(event) {
        Ok(Value::Object(mut map)) => {
            map.retain(|_, value| !value.is_null());
            map
        }
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn frame(kind: &str, data: Value) -> Frame {
        let Value::Object(data) = data else {
            panic!("an object")
        };
        Frame {
            kind: kind.to_owned(),
            data,
            payload: Vec::new(),
        }
    }

    #[test]
    fn whole_numbers_may_be_written_as_floats() {
        let start = |rate: Value| {
            let data = json!({"rate": rate, "width": 2.0, "channels": 1.0, "timestamp": 7.9});
            Event::from_frame(frame("audio-start", data))
        };
        assert_eq!(
            start(json!(16000.0)).unwrap(),
            Event::AudioStart(AudioStart {
                format: AudioFormat::mono_16_bit(16_000),
                timestamp: Some(7),
            })
        );
        assert!(start(json!(8000.5)).is_err());
        assert!(start(json!("16000")).is_err());
    }

    #[test]
    fn explicit_nulls_are_missing_fields() {
        let event = Event::from_frame(frame(
            "audio-start",
            json!({"rate": 16000, "width": 2, "channels": 1, "timestamp": null, "more": {}}),
        ))
        .unwrap();
        assert_eq!(
            event,
            Event::AudioStart(AudioStart {
                format: AudioFormat::mono_16_bit(16_000),
                timestamp: None
            })
        );
        assert_eq!(
            Event::from_frame(frame("transcribe", json!({"name": null, "language": null})))
                .unwrap(),
            Event::Transcribe(Transcribe::default())
        );
        assert_eq!(
            Event::from_frame(frame(
                "synthesize",
                json!({"text": "hello", "voice": {"name": null}})
            ))
            .unwrap(),
            Event::Synthesize(Synthesize {
                text: "hello".into(),
                voice: Some(Voice::default())
            })
        );
    }

    #[test]
    fn nothing_is_ever_written_as_null() {
        for event in [
            Event::Transcribe(Transcribe::default()),
            Event::AudioStop(AudioStop::default()),
            Event::Transcript(Transcript::default()),
            Event::Synthesize(Synthesize::default()),
            Event::Error(ErrorReply::default()),
            Event::Ping(Ping::default()),
            Event::Resized(Resized::default()),
            Event::Handled(Handled::default()),
            Event::HandledStart(HandledStart::default()),
            Event::TranscriptStart(TranscriptStart::default()),
            Event::Info(Box::default()),
        ] {
            let text = String::from_utf8(event.into_frame().encode().unwrap()).unwrap();
            assert!(!text.contains("null"), "{text}");
        }
    }

    #[test]
    fn a_chunk_keeps_its_samples() {
        let chunk = Event::AudioChunk(AudioChunk {
            format: AudioFormat::mono_16_bit(22_050),
            timestamp: Some(5),
            audio: vec![1, 2, 3, 4],
        });
        let frame = chunk.clone().into_frame();
        assert_eq!(frame.payload, [1, 2, 3, 4]);
        assert_eq!(
            Value::Object(frame.data.clone()),
            json!({"rate": 22050, "width": 2, "channels": 1, "timestamp": 5})
        );
        assert_eq!(Event::from_frame(frame).unwrap(), chunk);
    }

    #[test]
    fn other_types_pass_through() {
        let mut other = frame("voice-started", json!({"timestamp": 7, "x": [null]}));
        other.payload = vec![9];
        let event = Event::from_frame(other.clone()).unwrap();
        assert_eq!(event, Event::Other(other.clone()));
        assert_eq!(event.into_frame(), other);
    }

    #[test]
    fn a_missing_field_is_named_with_its_event() {
        let error = Event::from_frame(frame("audio-start", json!({"rate": 16000}))).unwrap_err();
        assert!(error.to_string().contains("`audio-start`"), "{error}");
        assert_eq!(
            std::error::Error::source(&error).unwrap().to_string(),
            "missing field `width`"
        );
    }

    proptest! {
        #[test]
        fn any_fields_are_an_event_or_an_error(
            kind in prop_oneof![
                Just("info"), Just("transcribe"), Just("audio-start"), Just("audio-chunk"), Just("transcript"),
                Just("synthesize"), Just("error"), Just("ping"), Just("cotenant-resized"), Just("x"),
                Just("handled"), Just("not-handled"), Just("handled-start"), Just("handled-chunk"),
                Just("transcript-start"), Just("transcript-chunk"), Just("run-pipeline"),
            ],
            fields in proptest::collection::btree_map(
                prop_oneof![Just("text"), Just("rate"), Just("width"), Just("channels"), Just("voice"), Just("asr"), Just("variant")],
                prop_oneof![
                    Just(Value::Null), Just(json!([])), Just(json!({})), Just(json!([{}])), Just(json!([null])),
                    any::<i64>().prop_map(|n| json!(n)), any::<f64>().prop_map(|n| json!(n)), ".{0,5}".prop_map(|t| json!(t)),
                ],
                0..5,
            ),
        ) {
            let data = fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
            if let Ok(event) = Event::from_frame(Frame { kind: kind.to_owned(), data, payload: vec![0] }) {
                prop_assert_eq!(event.kind(), kind);
                let again = Event::from_frame(event.clone().into_frame()).unwrap();
                prop_assert_eq!(again, event);
            }
        }
    }
}
