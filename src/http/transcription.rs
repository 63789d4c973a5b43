//! Handler of `POST /v1/audio/transcriptions`: text from an audio file.

use std::{collections::VecDeque, io, sync::Arc, time::Duration};

use axum::{
    Extension, Json,
    body::Bytes as Piece,
    extract::{FromRequest, Multipart, Request, State, multipart::MultipartError},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream};
use serde_json::{Value, json};
use tokio::{sync::mpsc, time::timeout};

use super::{
    api::{Api, Meta},
    backend::{RequestMeta, TranscribeRequest, Transcript},
    fault::{Fault, invalid, shortened},
    memory::{Held, RequestMemory, Who},
    patience::{is_of_memory, patiently},
    stream::{Payload, admission_patience, broken_off, held_for_memory, ignored_header, sse},
};
use cotenant_conversation::{
    refusal::Refusal,
    refusals::{at_limit, no_thread, worker_lost},
};
use cotenant_speech::{
    audio::{ASR_RATE_HZ, AudioError, MonoAudio},
    decode::{READ_FORMATS, decode_for_asr, is_wav},
    decoder::{self, DecodeError},
};
use cotenant_threads::{NotDone, blocking};
use cotenant_units::{Bytes, causes::in_one_line};

pub(super) async fn transcriptions(
    State(api): State<Api>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, Fault> {
    let backend = api.backends().speech(ACT, "speech recogniser")?;
    let memory = RequestMemory::in_extensions(request.extensions());
    let form = Form::read(request).await?;

    let format = Format::parse(form.response_format.as_deref())?;
    let ignored = ignored_header(&form.ignored);
    let (audio, held) = read_audio(&api, &meta, form.file).await?;
    memory.hold(api.body_memory(), ACT, Bytes::ZERO)?;

    let duration = audio.duration();
    let (pieces, heard) = mpsc::channel(PIECES_AHEAD);
    let work = if audio.samples.is_empty() {
        // silence needs no recogniser
        async { Ok(Transcript::default()) }.boxed()
    } else {
        let request = TranscribeRequest {
            meta: meta.clone(),
            model: form.model,
            audio: Arc::new(audio),
            language: form.language,
            prompt: form.prompt,
            pieces: form.stream.then_some(pieces),
        };
        let hold = held_for_memory(&api, &meta);
        async move {
            let ask = || backend.transcribe(request.clone());
            let heard = patiently(hold, is_of_memory, ask).await;
            drop(held);
            heard
        }
        .boxed()
    };
    if form.stream {
        return Ok((ignored, streamed(&api, &meta, work, heard).await?).into_response());
    }
    let transcript = work.await?;
    Ok((ignored, format.render(&transcript, duration)).into_response())
}

/// The decoded audio of a file, and the memory reserved for it.
async fn read_audio(
    api: &Api,
    meta: &RequestMeta,
    file: Piece,
) -> Result<(MonoAudio, Held), Fault> {
    let limits = api.limits();
    let duration_max = limits.audio_duration_max;
    let pool = api.body_memory();
    let mut held = pool.hold(ACT, &Who::default(), Bytes::ZERO)?;
    if is_wav(&file) && file.len() <= QUICK_WAV_MAX {
        let read = blocking(move || {
            let mut samples = Vec::new();
            let read = decode_for_asr(&file, duration_max, &mut |block| {
                samples.extend_from_slice(block);
                let room = held.resize(ACT, Bytes::of_len(2 * samples.capacity()));
                room.map_err(|_full| io::Error::from(io::ErrorKind::OutOfMemory))
            });
            read.map(|()| (MonoAudio::new(ASR_RATE_HZ, samples), held))
        });
        return match read.await {
            Ok(Ok(read)) => Ok(read),
            Ok(Err(AudioError::Handed(_))) => Err(pool.full(ACT)),
            Ok(Err(error)) => Err(invalid_audio(&in_one_line(&error))),
            Err(error @ NotDone::NoThread(_)) => Err(no_thread(ACT, &error).into()),
            Err(panicked) => {
                tracing::error!(%panicked, "reading audio panicked");
                Err(invalid_audio("it is damaged"))
            }
        };
    }
    let working = pool.hold(ACT, &Who::default(), decoder::BYTES_MAX)?;
    let patience = meta
        .patience
        .unwrap_or(limits.decode_timeout)
        .min(limits.decode_timeout);
    let decoded = api.backends().decoder.decode(&file, duration_max, |bytes| {
        held.resize(ACT, Bytes::of_len(bytes)).is_ok()
    });
    let decoded = timeout(patience, decoded).await;
    drop(working);
    match decoded {
        Ok(Ok(audio)) => Ok((audio, held)),
        Ok(Err(error @ (DecodeError::Audio(_) | DecodeError::Bounds))) => {
            Err(invalid_audio(&error.to_string()))
        }
        Ok(Err(DecodeError::NoRoom)) => Err(pool.full(ACT)),
        Ok(Err(DecodeError::Io(error))) => {
            Err(worker_lost("audio decoder", in_one_line(&error)).into())
        }
        Err(_elapsed) => {
            let what = "time to decode a file behind others, in ms,";
            Err(at_limit(ACT, what, patience.as_millis()).into())
        }
    }
}

/// `POST /v1/audio/translations`: recognisers only write the spoken language.
pub(super) async fn translations() -> Fault {
    Fault::request(
        StatusCode::NOT_FOUND,
        "not_supported",
        "translation is not supported (hint: /v1/audio/transcriptions transcribes in the spoken language)",
    )
}

/// Sends the text as events, piece by piece; the stream is kept alive meanwhile.
async fn streamed(
    api: &Api,
    meta: &RequestMeta,
    work: BoxFuture<'static, Result<Transcript, Refusal>>,
    pieces: mpsc::Receiver<String>,
) -> Result<Response, Fault> {
    let limits = api.limits();
    let mut hearing = Hearing::of(work, pieces);
    let first = match timeout(admission_patience(meta, limits), hearing.next()).await {
        Ok(Some(Recognised::Failed(refusal))) => return Err(refusal.into()),
        Ok(first) => first,
        Err(_elapsed) => None,
    };
    let rest = stream::unfold(hearing, |mut hearing| async move {
        let heard = hearing.next().await?;
        Some((heard, hearing))
    });
    let payloads = stream::iter(first).chain(rest).flat_map(|heard| {
        stream::iter(match heard {
            Recognised::Piece(text) => {
                vec![Ok(Payload::from(
                    &json!({"type": "transcript.text.delta", "delta": text}),
                ))]
            }
            Recognised::Whole(text) => vec![Ok(Payload::from(
                &json!({"type": "transcript.text.done", "text": text}),
            ))],
            Recognised::Failed(refusal) => broken_off(refusal).into(),
        })
    });
    Ok(sse(payloads, meta, limits))
}

/// Progress of a recognition.
pub(super) enum Recognised {
    Piece(String),
    Whole(String),
    Failed(Refusal),
}

/// A recognition in progress.
pub(super) struct Hearing {
    work: Option<BoxFuture<'static, Result<Transcript, Refusal>>>,
    pieces: mpsc::Receiver<String>,
    /// Whether any text was reported.
    heard: bool,
    ready: VecDeque<Recognised>,
}

impl Hearing {
    /// The events of `work`, and the pieces that it reports before its end.
    pub(super) fn of(
        work: BoxFuture<'static, Result<Transcript, Refusal>>,
        pieces: mpsc::Receiver<String>,
    ) -> Self {
        Self {
            work: Some(work),
            pieces,
            heard: false,
            ready: VecDeque::new(),
        }
    }

    /// The next report; cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Recognised> {
        while self.ready.is_empty() && self.work.is_some() {
            self.advance().await;
        }
        self.ready.pop_front()
    }

    /// Waits for the end; returns the text, or nothing after a failure. [`next`](Self::next) then reports everything.
    /// Cancel-safe.
    pub(super) async fn whole(&mut self) -> Option<&str> {
        while self.work.is_some() {
            self.advance().await;
        }
        match self.ready.back() {
            Some(Recognised::Whole(text)) => Some(text),
            _ => None,
        }
    }

    async fn advance(&mut self) {
        let Some(work) = &mut self.work else {
            return;
        };
        tokio::select! {
            biased;
            Some(text) = self.pieces.recv() => {
                self.heard = true;
                self.ready.push_back(Recognised::Piece(text));
            }
            done = work => {
                self.work = None;
                while let Ok(text) = self.pieces.try_recv() {
                    self.heard = true;
                    self.ready.push_back(Recognised::Piece(text));
                }
                match done {
                    Ok(Transcript { text, .. }) => {
                        // A recogniser that reports the whole text at once sends no pieces.
                        if !self.heard && !text.is_empty() {
                            self.ready.push_back(Recognised::Piece(text.clone()));
                        }
                        self.ready.push_back(Recognised::Whole(text));
                    }
                    Err(refusal) => self.ready.push_back(Recognised::Failed(refusal)),
                }
            }
        }
    }
}

/// The fields of the form; others are ignored.
#[derive(Default)]
struct Form {
    file: Piece,
    model: String,
    language: Option<String>,
    prompt: Option<String>,
    response_format: Option<String>,
    stream: bool,
    /// Set fields that are ignored.
    ignored: Vec<&'static str>,
}

impl Form {
    async fn read(request: Request) -> Result<Self, Fault> {
        let announced = request
            .headers()
            .get(header::CONTENT_TYPE)
            .map(|value| shortened(&String::from_utf8_lossy(value.as_bytes())));
        let mut multipart = Multipart::from_request(request, &()).await.map_err(|rejection| {
            Fault::bad_request("invalid_form",
                format!(
                    "cannot read the form: content type is `{}`, it must be `multipart/form-data` with a boundary: {}",
                    announced.as_deref().unwrap_or(""),
                    rejection.body_text(),
                ),
            )
        })?;
        let mut form = Self::default();
        let mut file = None;
        while let Some(field) = multipart
            .next_field()
            .await
            .map_err(|error| invalid_form(&error))?
        {
            let name = field.name().unwrap_or_default().to_owned();
            let bytes = field.bytes().await.map_err(|error| invalid_form(&error))?;
            let text = || String::from_utf8_lossy(&bytes).trim().to_owned();
            match name.as_str() {
                "file" => file = Some(bytes),
                "model" => form.model = text(),
                "language" => form.language = Some(text()).filter(|text| !text.is_empty()),
                "prompt" => form.prompt = Some(text()).filter(|text| !text.is_empty()),
                "response_format" => {
                    form.response_format = Some(text()).filter(|text| !text.is_empty());
                }
                "stream" => {
                    form.stream = match text().to_ascii_lowercase().as_str() {
                        "true" | "1" => true,
                        "" | "false" | "0" => false,
                        other => return invalid("stream", other, "is neither `true` nor `false`"),
                    }
                }
                // recognisers report only one segment, the whole
                "timestamp_granularities" | "timestamp_granularities[]" if text() == "word" => {
                    form.ignored.push("timestamp_granularities");
                }
                "include" | "include[]" => form.ignored.push("include"),
                "chunking_strategy" => form.ignored.push("chunking_strategy"),
                "temperature" if !matches!(text().as_str(), "" | "0" | "0.0") => {
                    form.ignored.push("temperature");
                }
                _ => {}
            }
        }
        form.file = file.ok_or_else(|| Fault::invalid("file", "", "is missing"))?;
        Ok(form)
    }
}

fn invalid_form(error: &MultipartError) -> Fault {
    Fault::bad_request(
        "invalid_form",
        format!("cannot read the form: {}", error.body_text()),
    )
}

fn invalid_audio(why: &str) -> Fault {
    let message = format!("cannot read the audio: {why} (hint: send {READ_FORMATS})");
    Fault::bad_request("invalid_audio", message).of_param("file")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Json,
    Srt,
    Text,
    VerboseJson,
    Vtt,
}

impl Format {
    fn parse(name: Option<&str>) -> Result<Self, Fault> {
        match name {
            None | Some("json") => Ok(Self::Json),
            Some("text") => Ok(Self::Text),
            Some("verbose_json") => Ok(Self::VerboseJson),
            Some("srt") => Ok(Self::Srt),
            Some("vtt") => Ok(Self::Vtt),
            Some(other) => invalid(
                "response_format",
                other,
                "is not one of `json`, `text`, `verbose_json`, `srt`, `vtt`",
            ),
        }
    }

    fn render(self, transcript: &Transcript, duration: Duration) -> Response {
        let text = &transcript.text;
        match self {
            Self::Json => Json(json!({
                "text": text,
                "usage": {"type": "duration", "seconds": duration.as_secs_f64().ceil()},
            }))
            .into_response(),
            Self::Text => format!("{text}\n").into_response(),
            Self::VerboseJson => Json(verbose(transcript, duration)).into_response(),
            Self::Srt => subtitles(text, duration, ',', "1\n").into_response(),
            Self::Vtt => {
                format!("WEBVTT\n\n{}", subtitles(text, duration, '.', "")).into_response()
            }
        }
    }
}

/// One segment for the whole. Fields that the recogniser does not provide are 0 or empty, because some clients refuse a
/// segment without one of OpenAI's fields.
fn verbose(transcript: &Transcript, duration: Duration) -> Value {
    let seconds = duration.as_secs_f64();
    let segments: Vec<Value> = (!transcript.text.is_empty())
        .then(|| {
            json!({
                "id": 0, "seek": 0, "start": 0.0, "end": seconds, "text": transcript.text, "tokens": [],
                "temperature": 0.0, "avg_logprob": 0.0, "compression_ratio": 0.0, "no_speech_prob": 0.0,
            })
        })
        .into_iter()
        .collect();
    json!({
        "task": "transcribe",
        "language": language_name(transcript.language.as_deref().unwrap_or("en")),
        "duration": seconds,
        "text": transcript.text,
        "segments": segments,
        "usage": {"type": "duration", "seconds": seconds.ceil()},
    })
}

/// One subtitle for the whole, because recognisers report no times of words.
fn subtitles(text: &str, duration: Duration, point: char, number: &str) -> String {
    if text.is_empty() {
        return String::new();
    }
    let (seconds, millis) = (duration.as_secs(), duration.subsec_millis());
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    let end = format!(
        "{hours:02}:{minutes:02}:{:02}{point}{millis:03}",
        seconds % 60
    );
    format!("{number}00:00:00{point}000 --> {end}\n{text}\n\n")
}

/// The English name of an ISO 639-1 code, as in `verbose_json`; the code itself if unknown.
fn language_name(code: &str) -> &str {
    let primary = code.split(['-', '_']).next().unwrap_or(code);
    LANGUAGES
        .iter()
        .find(|(known, _)| known.eq_ignore_ascii_case(primary))
        .map_or(code, |(_, name)| name)
}

/// Pieces that may wait for the client; then the recogniser waits.
pub(super) const PIECES_AHEAD: usize = 16;

/// Longest WAV file that is read in this process: some seconds of speech, read within milliseconds.
const QUICK_WAV_MAX: usize = 1 << 20;

/// Completes "cannot".
const ACT: &str = "transcribe";

/// The languages of OpenAI's examples and of common voices.
const LANGUAGES: [(&str, &str); 16] = [
    ("ar", "arabic"),
    ("cs", "czech"),
    ("de", "german"),
    ("en", "english"),
    ("es", "spanish"),
    ("fr", "french"),
    ("hi", "hindi"),
    ("it", "italian"),
    ("ja", "japanese"),
    ("ko", "korean"),
    ("nl", "dutch"),
    ("pl", "polish"),
    ("pt", "portuguese"),
    ("ru", "russian"),
    ("tr", "turkish"),
    ("zh", "chinese"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_language_has_its_english_name() {
        assert_eq!(language_name("en"), "english");
        assert_eq!(language_name("de-DE"), "german");
        assert_eq!(language_name("tlh"), "tlh");
    }

    #[test]
    fn subtitles_have_the_length_of_the_speech() {
        let long = Duration::from_millis(3_725_040);
        assert_eq!(
            subtitles("hi", long, ',', "1\n"),
            "1\n00:00:00,000 --> 01:02:05,040\nhi\n\n"
        );
        assert_eq!(
            subtitles("hi", long, '.', ""),
            "00:00:00.000 --> 01:02:05.040\nhi\n\n"
        );
        assert_eq!(subtitles("", long, '.', ""), "");
    }

    #[test]
    fn a_segment_has_all_fields_of_openai() {
        let transcript = Transcript {
            text: "hi".to_owned(),
            language: None,
        };
        let value = verbose(&transcript, Duration::from_millis(1500));
        let segment = value
            .pointer("/segments/0")
            .and_then(Value::as_object)
            .unwrap();
        let mut fields: Vec<&str> = segment.keys().map(String::as_str).collect();
        fields.sort_unstable();
        let numbers = [
            "avg_logprob",
            "compression_ratio",
            "end",
            "id",
            "no_speech_prob",
            "seek",
            "start",
            "temperature",
        ];
        assert!(
            numbers
                .iter()
                .all(|field| segment.get(*field).is_some_and(Value::is_number)),
            "{segment:?}"
        );
        let others = ["text", "tokens"];
        let mut all = [&numbers[..], &others[..]].concat();
        all.sort_unstable();
        assert_eq!(fields, all);
    }

    #[test]
    fn silence_has_no_segments() {
        let value = verbose(&Transcript::default(), Duration::from_millis(1500));
        assert_eq!(value.get("segments"), Some(&json!([])));
        assert_eq!(value.get("duration"), Some(&json!(1.5)));
    }
}
