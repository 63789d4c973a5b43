//! Settings of a realtime session after its last update.

use std::{sync::Arc, time::Duration};

use serde_json::{Map, Value, json};

use super::super::{
    admission::RETENTION,
    api::Api,
    backend::VoiceWish,
    chat_wire::{ToolChoice, at_least_one},
    fault::{Fault, invalid},
    models::model_named,
    numbers::{Whole, in_range},
    responses_wire::{function_choice, function_tools},
    speech::{SPEED_MAX, SPEED_MIN, voice_named},
};
use cotenant_speech::audio::TTS_RATE_HZ;
use cotenant_units::{Tokens, millis};

/// Settings of the next response and the next turn.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Settings {
    pub(super) model: String,
    /// Whether speech is only transcribed.
    pub(super) transcription_only: bool,
    pub(super) instructions: String,
    /// Whether answers are spoken.
    pub(super) spoken: bool,
    voice: Option<Value>,
    pub(super) speed: f64,
    /// In the client's form; the settings of a response share them.
    tools: Arc<[Value]>,
    tool_choice: Value,
    pub(super) max_tokens: Option<Tokens>,
    pub(super) turns: Option<Turns>,
    /// Transcription settings; `None` if transcripts are not requested.
    pub(super) transcription: Option<Map<String, Value>>,
    /// Part of the context to keep when the oldest items are omitted; `None` forbids omission.
    pub(super) retention: Option<f64>,
}

/// End-of-turn detection.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Turns {
    pub(super) threshold: f64,
    pub(super) prefix: Duration,
    pub(super) silence: Duration,
    /// Whether the end of a turn requests a response.
    pub(super) respond: bool,
    /// Whether the beginning of a turn cancels the current response.
    pub(super) interrupt: bool,
}

impl Default for Turns {
    /// OpenAI's defaults.
    fn default() -> Self {
        Self {
            threshold: 0.5,
            prefix: Duration::from_millis(300),
            silence: Duration::from_millis(500),
            respond: true,
            interrupt: true,
        }
    }
}

impl Settings {
    /// Initial settings of a session.
    pub(super) fn new(model: String, transcription_only: bool, with_speech: bool) -> Self {
        Self {
            model,
            transcription_only,
            instructions: String::new(),
            spoken: with_speech,
            voice: None,
            speed: 1.0,
            tools: Arc::default(),
            tool_choice: json!("auto"),
            max_tokens: None,
            turns: Some(Turns::default()),
            transcription: None,
            retention: Some(RETENTION),
        }
    }

    /// The settings updated by `session.update`; absent fields keep their value. Errors are 400 and name the field, its
    /// value and the limit.
    pub(super) fn updated(&self, session: Map<String, Value>, api: &Api) -> Result<Self, Fault> {
        let mut updated = self.clone();
        for (key, value) in session {
            let field = format!("session.{key}");
            match (key.as_str(), &value) {
                ("type", Value::String(kind)) if kind == "realtime" => {
                    updated.transcription_only = false;
                }
                ("type", Value::String(kind)) if kind == "transcription" => {
                    updated.transcription_only = true;
                }
                ("type", other) => {
                    return invalid(&field, other, "is not one of `realtime`, `transcription`");
                }
                ("model", Value::String(model)) => {
                    let named = model_named(api, Some(model));
                    updated.model = named.map_err(|fault| fault.renamed("model", &field))?;
                }
                // fields that only responses show
                ("id" | "object" | "expires_at", _) => {}
                _ => updated.set("session", &key, value)?,
            }
        }
        updated.checked("session")?;
        Ok(updated)
    }

    /// The settings of one response: the session's, overridden by `response.create`. Invalid values and unknown
    /// settings are refused.
    pub(super) fn of_response(&self, response: Map<String, Value>) -> Result<Self, Fault> {
        let mut settings = self.clone();
        for (key, value) in response {
            settings.set("response", &key, value)?;
        }
        settings.checked("response")?;
        Ok(settings)
    }

    fn set(&mut self, place: &str, key: &str, value: Value) -> Result<(), Fault> {
        let field = format!("{place}.{key}");
        let wrong = |value: &Value, problem: &str| invalid(&field, value, problem);
        match (key, value) {
            ("instructions", Value::String(text)) => self.instructions = text,
            ("instructions", Value::Null) => {}
            ("output_modalities", Value::Null) => {}
            ("output_modalities", list) if list == json!(["audio"]) => self.spoken = true,
            ("output_modalities", list) if list == json!(["text"]) => self.spoken = false,
            ("output_modalities", other) => {
                return wrong(&other, "is neither `[\"audio\"]` nor `[\"text\"]`");
            }
            ("audio", Value::Object(audio)) => {
                for (key, value) in audio {
                    match (key.as_str(), value) {
                        ("input", Value::Object(input)) => {
                            self.set_input(&format!("{field}.input"), input)?;
                        }
                        ("output", Value::Object(output)) => {
                            self.set_output(&format!("{field}.output"), output)?;
                        }
                        ("input" | "output", Value::Null) => {}
                        (_, value) => return invalid(&format!("{field}.{key}"), value, UNKNOWN),
                    }
                }
            }
            ("audio", Value::Null) => {}
            ("tools", Value::Array(tools)) => self.tools = tools.into(),
            ("tools", Value::Null) => self.tools = Arc::default(),
            ("tool_choice", Value::Null) => self.tool_choice = json!("auto"),
            ("tool_choice", choice) => self.tool_choice = choice,
            ("max_output_tokens", Value::Null) => self.max_tokens = None,
            ("max_output_tokens", Value::String(word)) if word == "inf" => self.max_tokens = None,
            ("max_output_tokens", ref number @ Value::Number(_)) => {
                let tokens = Whole::of(number)
                    .ok_or_else(|| Fault::invalid(&field, number, "is not a whole number"))?;
                self.max_tokens = at_least_one(&field, Some(tokens))?;
            }
            ("truncation", value) => self.retention = retention(&field, &value)?,
            ("prompt", value) if !value.is_null() => {
                return wrong(&value, "is not supported: prompts are not stored");
            }
            // known, harmless and ignored; shown as absent
            (
                "include" | "metadata" | "parallel_tool_calls" | "prompt" | "reasoning" | "tracing",
                _,
            ) => {}
            ("instructions" | "audio" | "tools" | "max_output_tokens", other) => {
                return wrong(&other, "has the wrong type");
            }
            (_, value) => return wrong(&value, UNKNOWN),
        }
        Ok(())
    }

    fn set_input(&mut self, place: &str, input: Map<String, Value>) -> Result<(), Fault> {
        for (key, value) in input {
            let field = format!("{place}.{key}");
            match (key.as_str(), value) {
                ("format", value) => check_format(&field, &value)?,
                ("transcription", Value::Null) => self.transcription = None,
                ("transcription", Value::Object(how)) => self.transcription = Some(how),
                ("turn_detection", value) => self.turns = turns(&field, value)?,
                ("noise_reduction", _) => {}
                (_, value) => return invalid(&field, value, UNKNOWN),
            }
        }
        Ok(())
    }

    fn set_output(&mut self, place: &str, output: Map<String, Value>) -> Result<(), Fault> {
        for (key, value) in output {
            let field = format!("{place}.{key}");
            match (key.as_str(), value) {
                ("format", value) => check_format(&field, &value)?,
                ("speed", Value::Null) => self.speed = 1.0,
                ("speed", value) => {
                    let speed = value
                        .as_f64()
                        .ok_or_else(|| Fault::invalid(&field, &value, "is not a number"))?;
                    self.speed =
                        in_range(&field, Some(speed), SPEED_MIN, SPEED_MAX)?.unwrap_or(1.0);
                }
                ("voice", value) => self.voice = Some(value).filter(|value| !value.is_null()),
                (_, value) => return invalid(&field, value, UNKNOWN),
            }
        }
        Ok(())
    }

    fn checked(&self, place: &str) -> Result<(), Fault> {
        self.tools_and_choice(place).map(|_| ())
    }

    /// The tools in the form of the chat API, and whether they are called.
    pub(super) fn tools_and_choice(&self, place: &str) -> Result<(Vec<Value>, ToolChoice), Fault> {
        let tools = function_tools(&format!("{place}.tools"), &self.tools)?;
        // a choice may be set before the tools
        let choice = match &self.tool_choice {
            Value::String(word) if word == "required" && tools.is_empty() => ToolChoice::Auto,
            choice => function_choice(Some(choice), &tools)
                .map_err(|fault| fault.renamed("tool_choice", &format!("{place}.tool_choice")))?,
        };
        Ok((tools, choice))
    }

    /// The selected voice; refused unless it is a name or an object with an `id`.
    pub(super) fn voice(&self, api: &Api) -> Result<VoiceWish, Fault> {
        voice_named(self.voice.as_ref(), &api.backends().status.voices())
            .map_err(|fault| fault.renamed("voice", "session.audio.output.voice"))
    }

    /// The settings in force, as shown to clients.
    pub(super) fn shown(&self, id: &str) -> Value {
        let format = json!({"type": "audio/pcm", "rate": TTS_RATE_HZ});
        let input = json!({
            "format": format,
            "transcription": self.transcription,
            "noise_reduction": null,
            "turn_detection": self.turns.as_ref().map(Turns::shown),
        });
        if self.transcription_only {
            return json!({
                "type": "transcription",
                "object": "realtime.transcription_session",
                "id": id,
                "audio": {"input": input},
                "include": null,
            });
        }
        json!({
            "type": "realtime",
            "object": "realtime.session",
            "id": id,
            "model": self.model,
            "output_modalities": self.modalities(),
            "instructions": self.instructions,
            "tools": &*self.tools,
            "tool_choice": self.tool_choice,
            "max_output_tokens": self.max_tokens_shown(),
            "truncation": match self.retention {
                None => json!("disabled"),
                Some(ratio) if (ratio - RETENTION).abs() < f64::EPSILON => json!("auto"),
                Some(ratio) => json!({"type": "retention_ratio", "retention_ratio": ratio}),
            },
            "audio": {"input": input, "output": self.output_shown()},
            "include": null,
            "prompt": null,
            "tracing": null,
        })
    }

    /// The format of the audio sent.
    pub(super) fn output_shown(&self) -> Value {
        json!({"format": {"type": "audio/pcm", "rate": TTS_RATE_HZ}, "voice": self.voice, "speed": self.speed})
    }

    /// `["audio"]` or `["text"]`.
    pub(super) fn modalities(&self) -> Value {
        json!([if self.spoken { "audio" } else { "text" }])
    }

    /// A number, or `inf`.
    pub(super) fn max_tokens_shown(&self) -> Value {
        self.max_tokens
            .map_or_else(|| json!("inf"), |tokens| json!(tokens.get()))
    }
}

impl Turns {
    fn shown(&self) -> Value {
        json!({
            "type": "server_vad",
            "threshold": self.threshold,
            "prefix_padding_ms": millis(self.prefix),
            "silence_duration_ms": millis(self.silence),
            "idle_timeout_ms": null,
            "create_response": self.respond,
            "interrupt_response": self.interrupt,
        })
    }
}

/// Parses `turn_detection`.
fn turns(field: &str, value: Value) -> Result<Option<Turns>, Fault> {
    let map = match value {
        Value::Null | Value::Bool(false) => return Ok(None),
        Value::Object(map) => map,
        other => return invalid(field, other, "is neither an object nor null"),
    };
    let mut turns = Turns::default();
    let semantic = match map.get("type").and_then(Value::as_str) {
        Some("server_vad") => false,
        // no model detects complete sentences: a longer pause is used instead
        Some("semantic_vad") => true,
        other => {
            return invalid(
                &format!("{field}.type"),
                other.unwrap_or_default(),
                "is not one of `server_vad`, `semantic_vad`",
            );
        }
    };
    if semantic {
        turns.silence = SEMANTIC_SILENCE;
    }
    for (key, value) in map.into_iter().filter(|(_, value)| !value.is_null()) {
        let field = format!("{field}.{key}");
        let number = |min: f64, max: f64| {
            let number = value
                .as_f64()
                .ok_or_else(|| Fault::invalid(&field, &value, "is not a number"))?;
            in_range(&field, Some(number), min, max).map(Option::unwrap_or_default)
        };
        let flag = || {
            value
                .as_bool()
                .ok_or_else(|| Fault::invalid(&field, &value, "is neither true nor false"))
        };
        match key.as_str() {
            "type" => {}
            "create_response" => turns.respond = flag()?,
            "interrupt_response" => turns.interrupt = flag()?,
            "threshold" if !semantic => turns.threshold = number(0.0, 1.0)?,
            "prefix_padding_ms" if !semantic => {
                turns.prefix = from_millis(number(0.0, PREFIX_MAX_MS)?);
            }
            "silence_duration_ms" if !semantic => {
                turns.silence = from_millis(number(SILENCE_MIN_MS, SILENCE_MAX_MS)?);
            }
            "eagerness" if semantic => {
                turns.silence = match value.as_str() {
                    Some("low") => SEMANTIC_SILENCE * 2,
                    Some("auto" | "medium") => SEMANTIC_SILENCE,
                    Some("high") => SEMANTIC_SILENCE / 2,
                    _ => {
                        return invalid(
                            &field,
                            value,
                            "is not one of `low`, `medium`, `high`, `auto`",
                        );
                    }
                };
            }
            "idle_timeout_ms" => {
                return invalid(
                    &field,
                    value,
                    "is not supported: only speech ends a silence",
                );
            }
            _ => return invalid(&field, value, UNKNOWN),
        }
    }
    Ok(Some(turns))
}

/// Parses `truncation`.
fn retention(field: &str, value: &Value) -> Result<Option<f64>, Fault> {
    match value {
        Value::Null => Ok(Some(RETENTION)),
        Value::String(word) if word == "auto" => Ok(Some(RETENTION)),
        Value::String(word) if word == "disabled" => Ok(None),
        Value::Object(map) if map.get("type") == Some(&json!("retention_ratio")) => {
            let field = format!("{field}.retention_ratio");
            let ratio = map.get("retention_ratio").and_then(Value::as_f64);
            let ratio = ratio.ok_or_else(|| Fault::invalid(&field, "", "is missing"))?;
            in_range(&field, Some(ratio), 0.0, 1.0)
        }
        other => invalid(
            field,
            other,
            "is not one of `auto`, `disabled`, an object of the type `retention_ratio`",
        ),
    }
}

fn check_format(field: &str, format: &Value) -> Result<(), Fault> {
    let kind = format
        .get("type")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if format.is_null()
        || (kind == "audio/pcm"
            && format
                .get("rate")
                .is_none_or(|rate| *rate == json!(TTS_RATE_HZ)))
    {
        return Ok(());
    }
    invalid(
        field,
        format,
        format!("is not supported: audio is `audio/pcm` at a rate of {TTS_RATE_HZ}"),
    )
}

fn from_millis(millis: f64) -> Duration {
    Duration::try_from_secs_f64(millis / 1000.0).unwrap_or_default()
}

const UNKNOWN: &str = "is not a known parameter";
/// Our choice: a pause for thought within a sentence.
const SEMANTIC_SILENCE: Duration = Duration::from_millis(700);
const PREFIX_MAX_MS: f64 = 2000.0;
/// Shorter values would end a turn at gaps between words.
const SILENCE_MIN_MS: f64 = 100.0;
const SILENCE_MAX_MS: f64 = 10_000.0;
