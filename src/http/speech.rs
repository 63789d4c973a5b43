//! Handler of `POST /v1/audio/speech`: speech from text, streamed during synthesis.
//!
//! `pcm` is 24 kHz mono S16LE for any voice, because clients assume this rate. `pcm`, `mp3`, `flac` and `opus` are
//! streamed. There is no AAC encoder: a WAV file with its own content type replaces it.

use std::{future, io};

use axum::{
    Extension, Json,
    body::Body,
    extract::{Request, State},
    http::{HeaderName, HeaderValue, header},
    response::{IntoResponse, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use futures_util::{
    StreamExt,
    stream::{self, BoxStream, Stream},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    answer::read_json,
    api::{Api, Meta},
    backend::{RequestMeta, SpeechRequest, SpeechStream, Voice, VoiceWish},
    fault::{Fault, invalid},
    limits::Limits,
    numbers::in_range,
    patience::{is_of_memory, patiently},
    stream::{Payload, broken_off, held_for_memory, ignored_header, sse},
};
use cotenant_conversation::{refusal::Refusal, refusals::worker_lost};
use cotenant_speech::{
    audio::{MonoAudio, TTS_RATE_HZ, pcm_bytes, wav_stream_header},
    encode::{Encoder, Encoding},
    resample::Resampler,
};
use cotenant_units::causes::in_one_line;

pub(super) async fn speech(
    State(api): State<Api>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, Fault> {
    let backend = api.backends().speech(ACT, "synthesiser")?;
    let limits = api.limits();
    let (wire, _memory): (WireRequest, _) = read_json(&api, request).await?;

    let (format, instead) = Format::parse(wire.response_format.as_deref())?;
    let events = wants_events(wire.stream_format.as_deref())?;
    let text = checked_text(wire.input, limits)?;
    let voice = voice_named(wire.voice.as_ref(), &api.backends().status.voices())?;
    let speed = in_range("speed", wire.speed, SPEED_MIN, SPEED_MAX)?.unwrap_or(1.0);
    let whole = format == Format::Wav && !events;
    let request = SpeechRequest {
        speaker: None,
        meta: meta.clone(),
        model: wire.model.unwrap_or_default(),
        text,
        voice,
        speed,
        whole,
    };
    let hold = held_for_memory(&api, &meta);
    let speech = patiently(hold, is_of_memory, || backend.synthesize(request.clone())).await?;
    let ignored = ignored_header(speech.ignored);
    let spoken = speech
        .voice
        .as_deref()
        .and_then(|voice| HeaderValue::from_str(voice).ok());
    let pieces = begun(speech).await?;
    let mut response = match format {
        Format::Wav if whole => as_wav(pieces, limits).await?,
        format => {
            let (kind, bytes) = format.encode(pieces)?;
            if events {
                as_events(bytes, &meta, limits)
            } else {
                as_body(kind, bytes)
            }
        }
    };
    response.headers_mut().extend(ignored);
    if let Some(name) = instead {
        response
            .headers_mut()
            .insert(SENT_FORMAT, HeaderValue::from_static(name));
    }
    if let Some(voice) = spoken {
        response.headers_mut().insert(VOICE, voice);
    }
    Ok(response)
}

/// `GET /v1/audio/voices`: the voices of the configuration with their aliases, and those that the worker announces.
pub(super) async fn voices(State(api): State<Api>) -> Result<Json<Value>, Fault> {
    let backend = api.backends().speech(ACT, "synthesiser")?;
    let mut voices = api.backends().status.voices();
    for name in backend.voices().await {
        if voices.iter().all(|voice| voice.name != name) {
            voices.push(Voice {
                name,
                aliases: Vec::new(),
            });
        }
    }
    let shown =
        |voice: &Voice| json!({"id": voice.name, "name": voice.name, "aliases": voice.aliases});
    Ok(Json(
        json!({"object": "list", "voices": voices.iter().map(shown).collect::<Vec<_>>()}),
    ))
}

#[derive(Debug, Deserialize)]
struct WireRequest {
    model: Option<String>,
    input: String,
    voice: Option<Value>,
    response_format: Option<String>,
    speed: Option<f64>,
    stream_format: Option<String>,
}

/// Format of the audio sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Pcm,
    Wav,
    Encoded(Encoding),
}

impl Format {
    /// The requested format, or its substitute and the name of that.
    fn parse(name: Option<&str>) -> Result<(Self, Option<&'static str>), Fault> {
        Ok(match name {
            None | Some("mp3") => (Self::Encoded(Encoding::Mp3), None),
            Some("pcm") => (Self::Pcm, None),
            Some("wav") => (Self::Wav, None),
            Some("flac") => (Self::Encoded(Encoding::Flac), None),
            Some("opus") => (Self::Encoded(Encoding::Opus), None),
            // players detect the format from the content or its type
            Some("aac") => (Self::Wav, Some("wav")),
            Some(other) => {
                let known = "is not one of `mp3`, `opus`, `aac`, `flac`, `wav`, `pcm`";
                return invalid("response_format", other, known);
            }
        })
    }

    /// The media type, and the encoded bytes.
    fn encode(self, pieces: Pieces) -> Result<(&'static str, Encoded), Fault> {
        let pcm = |pieces: Pieces| pieces.map(|piece| piece.map(|samples| pcm_bytes(&samples)));
        Ok(match self {
            Self::Pcm => ("audio/pcm", pcm(pieces).boxed()),
            Self::Wav => {
                let header = stream::iter([Ok(wav_stream_header(TTS_RATE_HZ))]);
                ("audio/wav", header.chain(pcm(pieces)).boxed())
            }
            Self::Encoded(encoding) => {
                let kind = match encoding {
                    Encoding::Flac => "audio/flac",
                    Encoding::Mp3 => "audio/mpeg",
                    Encoding::Opus => "audio/ogg",
                };
                let (encoder, begin) = Encoder::new(encoding, TTS_RATE_HZ)
                    .map_err(|error| Fault::from(unusable(&error)))?;
                let bytes = stream::iter([Ok(begin)]).chain(encoded(pieces, encoder));
                (kind, bytes.boxed())
            }
        })
    }
}

/// Encoded bytes, streamed.
type Encoded = BoxStream<'static, Result<Vec<u8>, Refusal>>;

/// Encodes pieces as they arrive, in slices short enough not to delay other connections.
fn encoded(pieces: Pieces, encoder: Encoder) -> Encoded {
    let slices = pieces.flat_map(|piece| {
        stream::iter(match piece {
            Ok(samples) => samples
                .chunks(ENCODED_AT_ONCE)
                .map(|slice| Ok(slice.to_vec()))
                .collect(),
            Err(refusal) => vec![Err(refusal)],
        })
    });
    let slices = slices.then(|slice| async {
        tokio::task::yield_now().await;
        slice
    });
    converted(
        slices,
        encoder,
        |encoder, samples| encoder.push(&samples).map_err(|error| unusable(&error)),
        |encoder| encoder.finish().map_err(|error| unusable(&error)),
    )
}

/// Passes pieces through a converter with a final remainder; an error is the last item.
fn converted<C: Send + 'static, O: Send + 'static>(
    pieces: impl Stream<Item = Result<Vec<i16>, Refusal>> + Send + 'static,
    converter: C,
    push: fn(&mut C, Vec<i16>) -> Result<Vec<O>, Refusal>,
    finish: fn(C) -> Result<Vec<O>, Refusal>,
) -> BoxStream<'static, Result<Vec<O>, Refusal>> {
    let ended = stream::iter([None]);
    let pieces = pieces.map(Some).chain(ended);
    let converted = pieces.scan(Some(converter), move |running, piece| {
        let piece = running.take().map(|mut converter| match piece {
            Some(Ok(piece)) => {
                let converted = push(&mut converter, piece);
                *running = converted.is_ok().then_some(converter);
                converted
            }
            Some(Err(refusal)) => Err(refusal),
            None => finish(converter),
        });
        future::ready(piece)
    });
    converted.filter(is_something).boxed()
}

/// Whether a piece is an error or non-empty.
fn is_something<O>(piece: &Result<Vec<O>, Refusal>) -> future::Ready<bool> {
    future::ready(!piece.as_ref().is_ok_and(Vec::is_empty))
}

impl SpeechStream {
    /// Resamples speech; pieces are non-empty, and an `Err` is the last item.
    ///
    /// # Errors
    /// When the rates cannot be converted.
    pub fn at_rate(
        self,
        rate: u32,
    ) -> Result<BoxStream<'static, Result<Vec<i16>, Refusal>>, Refusal> {
        if self.rate == rate {
            return Ok(self.chunks.filter(is_something).boxed());
        }
        let resampler = Resampler::new(self.rate, rate).map_err(|error| unusable(&error))?;
        Ok(converted(
            self.chunks,
            resampler,
            |resampler, samples| resampler.push(&samples).map_err(|error| unusable(&error)),
            |resampler| resampler.finish().map_err(|error| unusable(&error)),
        ))
    }
}

fn wants_events(stream_format: Option<&str>) -> Result<bool, Fault> {
    match stream_format {
        None | Some("audio") => Ok(false),
        Some("sse") => Ok(true),
        Some(other) => invalid("stream_format", other, "is not one of `audio`, `sse`"),
    }
}

fn checked_text(text: String, limits: &Limits) -> Result<String, Fault> {
    let chars = text.chars().count();
    if text.trim().is_empty() {
        return invalid("input", text, "is empty");
    }
    if chars > limits.speech_chars_max {
        return invalid(
            "input",
            format!("{chars} characters"),
            format!("is above the limit of {}", limits.speech_chars_max),
        );
    }
    Ok(text)
}

/// The voice for a request: one of the configuration by name or alias, or one that the worker may announce. Without a
/// name, or with an unknown one, the default (the first): clients send names of other servers' voices.
pub(super) fn voice_named(wanted: Option<&Value>, voices: &[Voice]) -> Result<VoiceWish, Fault> {
    let default = voices.first().map(|voice| voice.name.clone());
    let wanted = match wanted {
        None | Some(Value::Null) => return Ok(default.into()),
        Some(Value::String(name)) => name.as_str(),
        Some(object) => object.get("id").and_then(Value::as_str).ok_or_else(|| {
            Fault::invalid(
                "voice",
                object,
                "is neither a name nor an object with an `id`",
            )
        })?,
    };
    let meant =
        |voice: &&Voice| voice.name == wanted || voice.aliases.iter().any(|alias| alias == wanted);
    Ok(match voices.iter().find(meant) {
        Some(voice) => VoiceWish::Known(voice.name.clone()),
        None => VoiceWish::Asked {
            name: wanted.to_owned(),
            otherwise: default,
        },
    })
}

/// Synthesised speech at 24 kHz, in non-empty pieces.
pub(super) type Pieces = BoxStream<'static, Result<Vec<i16>, Refusal>>;

/// Waits for the first sound, so that a synthesiser that fails at once gives a status code instead of a broken stream.
pub(super) async fn begun(speech: SpeechStream) -> Result<Pieces, Refusal> {
    let mut pieces = speech.at_rate(TTS_RATE_HZ)?;
    match pieces.next().await {
        Some(Ok(first)) => Ok(stream::iter([Ok(first)]).chain(pieces).boxed()),
        Some(Err(refusal)) => Err(refusal),
        None => Ok(stream::empty().boxed()),
    }
}

fn unusable(error: &dyn std::error::Error) -> Refusal {
    let reason = format!("its audio cannot be used: {}", in_one_line(error));
    worker_lost("tts", reason)
}

/// Streams the bytes. If synthesis fails midway, the connection is aborted, because nothing else signals it.
fn as_body(kind: &'static str, bytes: Encoded) -> Response {
    let bytes = bytes.map(|bytes| bytes.map_err(io::Error::other));
    (
        [(header::CONTENT_TYPE, HeaderValue::from_static(kind))],
        Body::from_stream(bytes),
    )
        .into_response()
}

/// A whole WAV file: its header must state the length, because many readers rely on it.
async fn as_wav(mut pieces: Pieces, limits: &Limits) -> Result<Response, Fault> {
    let mut audio = MonoAudio::new(TTS_RATE_HZ, Vec::new());
    while let Some(piece) = pieces.next().await {
        audio.samples.extend(piece?);
        if audio.duration() > limits.audio_duration_max {
            return invalid(
                "input",
                format!(
                    "more than {} s of speech",
                    limits.audio_duration_max.as_secs()
                ),
                "is above the limit of a `wav`; `pcm` has none",
            );
        }
    }
    let file = audio.to_wav().map_err(|error| {
        Fault::invalid(
            "response_format",
            "wav",
            format!("cannot be written: {error}"),
        )
    })?;
    Ok((
        [(header::CONTENT_TYPE, HeaderValue::from_static("audio/wav"))],
        file,
    )
        .into_response())
}

/// The bytes in Base64, as events. If synthesis fails midway, an event states the cause and the connection is aborted:
/// clients ignore unknown events and would mistake a part for the whole.
fn as_events(bytes: Encoded, meta: &RequestMeta, limits: &Limits) -> Response {
    let delta = |bytes: &[u8]| json!({"type": "speech.audio.delta", "audio": BASE64.encode(bytes)});
    let done = json!({
        "type": "speech.audio.done",
        "usage": {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0},
    });
    let events = bytes
        .flat_map(move |bytes| {
            stream::iter(match bytes {
                Ok(bytes) => vec![Ok(Payload::from(&delta(&bytes)))],
                Err(refusal) => broken_off(refusal).into(),
            })
        })
        .chain(stream::iter([Ok(Payload::from(&done))]));
    sse(events, meta, limits)
}

/// Samples encoded per slice: 100 ms, which take a millisecond.
const ENCODED_AT_ONCE: usize = 2400;

/// Completes "cannot".
const ACT: &str = "synthesise speech";
/// The voice in use.
const VOICE: HeaderName = HeaderName::from_static("x-cotenant-voice");
/// The format that replaces the requested one.
const SENT_FORMAT: HeaderName = HeaderName::from_static("x-cotenant-format");
/// OpenAI's limits.
pub(super) const SPEED_MIN: f64 = 0.25;
pub(super) const SPEED_MAX: f64 = 4.0;
