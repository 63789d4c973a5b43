//! HTTP clients of workers: OpenAI's routes, whisper.cpp's, Piper's.
//!
//! Each request has its own connection and a timeout on every step, and buffers no more of the response than needed.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Request, Response,
    body::{Body as _, Bytes, Incoming},
    client::conn::http1,
    header,
};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{net::TcpStream, sync::mpsc, task::JoinHandle, time::timeout};

use super::{
    audio::{MonoAudio, PcmDecoder},
    client::{
        ClientError, ClientTimeouts, Endpoint, Heard, QUEUED_CHUNKS, SpeechStream, SpokenLength,
        brief,
    },
    server::BAD_REQUEST,
    wyoming::AudioFormat,
};
use cotenant_memory::heap;
use cotenant_units as units;

/// Routes of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpShape {
    /// `POST /v1/audio/transcriptions`, `/v1/audio/speech` and `/v1/embeddings`, as in OpenAI's API.
    Openai,
    /// `POST /synthesize` of `python3 -m piper.http_server`.
    Piper,
    /// `POST /inference` of whisper.cpp's `whisper-server`.
    Whisper,
}

/// Voice settings.
#[derive(Clone, Copy, Debug)]
pub struct Manner<'a> {
    /// Name of the voice.
    pub voice: Option<&'a str>,
    /// A speaker of a multi-speaker voice.
    pub speaker: Option<&'a str>,
    /// 1 is the voice's normal speed.
    pub speed: f64,
}

/// A client of one server.
#[derive(Clone, Debug)]
pub struct HttpClient {
    address: String,
    shape: HttpShape,
    /// The model name sent to the server, if the protocol requires one.
    pub(super) model: String,
    pub(super) timeouts: ClientTimeouts,
}

impl HttpClient {
    /// A client of `host:port` that connects for each request.
    pub fn new(address: String, shape: HttpShape, model: String, timeouts: ClientTimeouts) -> Self {
        Self {
            address,
            shape,
            model,
            timeouts,
        }
    }

    /// Transcribes `audio` with the expected `language`.
    ///
    /// # Errors
    /// If the server cannot be reached, does not reply in time, refuses, or replies with something else.
    pub async fn hear(
        &self,
        audio: &MonoAudio,
        language: Option<&str>,
    ) -> Result<Heard, ClientError> {
        let path = match self.shape {
            HttpShape::Openai => "/v1/audio/transcriptions",
            HttpShape::Whisper => "/inference",
            HttpShape::Piper => return Err(self.wrong("it supports TTS only".to_owned())),
        };
        let wav = audio.to_wav().map_err(ClientError::Audio)?;
        let mut fields = vec![("response_format", "json")];
        match self.shape {
            HttpShape::Openai => fields.push(("model", self.model.as_str())),
            _ => fields.push(("temperature", "0.0")),
        }
        fields.extend(language.map(|language| ("language", language)));
        let (kind, body) = multipart(&fields, &wav);
        let patience = self.timeouts.transcribe;
        let ask = async {
            let whole = self.whole(path, &kind, body, TEXT_BYTES_MAX).await?;
            let tree = heap::tree_bytes(&whole);
            if tree > TEXT_TREE_MAX {
                let problem =
                    format!("its answer would take {tree} of memory, the limit is {TEXT_TREE_MAX}");
                return Err(self.wrong(problem));
            }
            let answer: Value = serde_json::from_slice(&whole)
                .map_err(|error| self.wrong(format!("its answer is not JSON: {error}")))?;
            let text = answer.get("text").and_then(Value::as_str);
            let text = text.ok_or_else(|| self.wrong("its answer has no `text`".to_owned()))?;
            Ok(Heard {
                text: text.trim().to_owned(),
                language: answer
                    .get("language")
                    .and_then(Value::as_str)
                    .map(str::to_owned),
            })
        };
        timeout(patience, ask)
            .await
            .unwrap_or_else(|_| Err(self.late("transcribe", patience)))
    }

    /// Whether the server supports speed.
    pub const fn takes_speed(&self) -> bool {
        matches!(self.shape, HttpShape::Openai | HttpShape::Piper)
    }

    /// The server's path and body for `text`, with a speaker (Piper only).
    fn spoken_as(&self, text: &str, said: &Manner<'_>) -> Option<(&'static str, Value)> {
        let hurried = (said.speed - 1.0).abs() > f64::EPSILON;
        let (path, mut asked) = match self.shape {
            HttpShape::Openai => (
                "/v1/audio/speech",
                // Raw PCM is 24 kHz by the protocol, but not from every server; WAV states its rate.
                json!({
                    "model": self.model,
                    "input": text,
                    "voice": said.voice.unwrap_or(OPENAI_VOICE),
                    "response_format": "wav",
                }),
            ),
            HttpShape::Piper => ("/synthesize", json!({"text": text})),
            HttpShape::Whisper => return None,
        };
        let fields = asked.as_object_mut()?;
        if self.shape == HttpShape::Piper {
            for (name, value) in [("voice", said.voice), ("speaker", said.speaker)] {
                if let Some(value) = value {
                    fields.insert(name.to_owned(), value.into());
                }
            }
        }
        if hurried {
            // Piper's figure is the length of the audio, not its speed.
            let (name, value) = match self.shape {
                HttpShape::Piper => ("length_scale", said.speed.recip()),
                _ => ("speed", said.speed),
            };
            fields.insert(name.to_owned(), value.into());
        }
        Some((path, asked))
    }

    /// Synthesises `text`; returns as soon as the audio begins. Dropping the returned value closes the connection.
    ///
    /// # Errors
    /// As for [`hear`](Self::hear); later failures are items of the stream.
    pub async fn synthesize(
        &self,
        text: &str,
        said: &Manner<'_>,
    ) -> Result<SpeechStream, ClientError> {
        let Some((path, body)) = self.spoken_as(text, said) else {
            return Err(self.wrong("it supports ASR only".to_owned()));
        };
        let patience = self.timeouts.synthesize;
        let begin = async {
            let (response, connection) = self
                .post(path, "application/json", Bytes::from(body.to_string()))
                .await?;
            let response = self.accepted(response).await?;
            let raw = response
                .headers()
                .get(header::CONTENT_TYPE)
                .is_some_and(|kind| kind.as_bytes().starts_with(b"audio/pcm"));
            let mut body = response.into_body();
            let mut wav = WavHead::default();
            if raw {
                let format = AudioFormat::mono_16_bit(OPENAI_PCM_RATE_HZ);
                return Ok((format, u64::MAX, Vec::new(), body, connection));
            }
            loop {
                let Some(piece) = self.piece(&mut body).await? else {
                    return Err(self.wrong("its audio ends within the header".to_owned()));
                };
                if let Some((format, length, samples)) =
                    wav.push(&piece).map_err(|problem| self.wrong(problem))?
                {
                    return Ok((format, length, samples, body, connection));
                }
            }
        };
        let (format, length, first, mut body, connection) = timeout(patience, begin)
            .await
            .unwrap_or_else(|_| Err(self.late("synthesize", patience)))?;
        let mut decoder = PcmDecoder::new(format).map_err(ClientError::Audio)?;
        let mut spoken = SpokenLength::new(text, said.speed, format.rate);
        let (sender, receiver) = mpsc::channel(QUEUED_CHUNKS);
        let client = self.clone();
        tokio::spawn(async move {
            let _connection = connection;
            let mut left = length;
            let mut piece = Some(Bytes::from(first));
            while let Some(bytes) = piece.take() {
                let take = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                left = left.saturating_sub(u64::try_from(take).unwrap_or(u64::MAX));
                let samples = decoder.push(bytes.get(..take).unwrap_or_default());
                if let Err(error) = spoken.take(&client.endpoint(), samples.len()) {
                    let _ = sender.send(Err(error)).await;
                    return;
                }
                if !samples.is_empty() && sender.send(Ok(samples)).await.is_err() {
                    return;
                }
                if left == 0 {
                    return;
                }
                let next = tokio::select! {
                    () = sender.closed() => return,
                    next = timeout(spoken.patience(patience), client.piece(&mut body)) => next,
                };
                match next.unwrap_or_else(|_| Err(client.late("synthesize", patience))) {
                    Ok(next) => piece = next,
                    Err(error) => {
                        let _ = sender.send(Err(error)).await;
                        return;
                    }
                }
            }
            // A server that does not know the length writes none, or the maximum.
            if length != u64::MAX && left > 0 {
                let problem = format!("its audio ends {left} bytes early");
                let _ = sender.send(Err(client.wrong(problem))).await;
            }
        });
        Ok(SpeechStream::new(format.rate, receiver))
    }

    /// Posts a request, and returns the body of the answer, at most `limit` bytes.
    pub(super) async fn whole(
        &self,
        path: &str,
        kind: &str,
        body: Bytes,
        limit: usize,
    ) -> Result<Bytes, ClientError> {
        let (response, _connection) = self.post(path, kind, body).await?;
        let response = self.accepted(response).await?;
        let whole = Limited::new(response.into_body(), limit).collect().await;
        let whole = whole.map_err(|error| self.wrong(error.to_string()))?;
        Ok(whole.to_bytes())
    }

    async fn post(
        &self,
        path: &str,
        kind: &str,
        body: Bytes,
    ) -> Result<(Response<Incoming>, Connection), ClientError> {
        let limit = self.timeouts.connect;
        let stream = timeout(limit, TcpStream::connect(&self.address))
            .await
            .map_err(|_| self.late("connect", limit))?
            .map_err(|source| ClientError::Connect {
                endpoint: self.endpoint(),
                source,
            })?;
        let broken = |error: hyper::Error| ClientError::Broken {
            endpoint: self.endpoint(),
            source: std::io::Error::other(error),
        };
        let (mut sender, connection) = http1::Builder::new()
            .handshake(TokioIo::new(stream))
            .await
            .map_err(broken)?;
        let connection = Connection(tokio::spawn(async move {
            // Errors are reported to the caller waiting for the response.
            let _ = connection.await;
        }));
        let request = Request::post(path)
            .header(header::HOST, &self.address)
            .header(header::CONTENT_TYPE, kind)
            .header(header::CONNECTION, "close")
            .body(Full::new(body))
            .map_err(|error| self.wrong(error.to_string()))?;
        let response = sender.send_request(request).await.map_err(broken)?;
        Ok((response, connection))
    }

    /// The response if successful, otherwise the server's message as an error.
    async fn accepted(
        &self,
        response: Response<Incoming>,
    ) -> Result<Response<Incoming>, ClientError> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let (mut body, mut said) = (response.into_body(), Vec::new());
        while said.len() < REFUSAL_BYTES_MAX
            && let Ok(Some(piece)) = self.piece(&mut body).await
        {
            said.extend_from_slice(&piece);
        }
        let said = String::from_utf8_lossy(&said).into_owned();
        let message = serde_json::from_str::<Value>(&said).ok().and_then(|body| {
            let error = body.get("error")?;
            let text = error.get("message").or(Some(error))?.as_str()?;
            Some(text.to_owned())
        });
        let text = brief(&message.unwrap_or(said));
        Err(ClientError::Refused {
            endpoint: self.endpoint(),
            text: if text.is_empty() {
                status.to_string()
            } else {
                format!("{status}: {text}")
            },
            code: matches!(status.as_u16(), 400 | 413 | 415 | 422).then(|| BAD_REQUEST.to_owned()),
        })
    }

    /// The next bytes of a body; `None` at its end.
    async fn piece(&self, body: &mut Incoming) -> Result<Option<Bytes>, ClientError> {
        while !body.is_end_stream() {
            match body.frame().await {
                None => break,
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Some(Err(error)) => {
                    return Err(ClientError::Broken {
                        endpoint: self.endpoint(),
                        source: std::io::Error::other(error),
                    });
                }
            }
        }
        Ok(None)
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint::Tcp(self.address.clone())
    }

    pub(super) fn late(&self, act: &'static str, limit: Duration) -> ClientError {
        ClientError::Late {
            endpoint: self.endpoint(),
            act,
            limit,
        }
    }

    pub(super) fn wrong(&self, problem: String) -> ClientError {
        ClientError::Answer {
            endpoint: self.endpoint(),
            problem,
        }
    }
}

/// Ends the connection on drop, also during a response.
#[derive(Debug)]
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The header of a WAV file that arrives in pieces.
#[derive(Debug, Default)]
struct WavHead {
    seen: Vec<u8>,
}

/// Format, bytes of samples (`u64::MAX` if unknown), and the first of them.
type WavBegin = (AudioFormat, u64, Vec<u8>);

impl WavHead {
    /// Adds bytes until the samples begin.
    fn push(&mut self, piece: &[u8]) -> Result<Option<WavBegin>, String> {
        self.seen.extend_from_slice(piece);
        let seen = self.seen.as_slice();
        if seen.len() < 12 {
            return Ok(None);
        }
        if seen.get(..4) != Some(b"RIFF") || seen.get(8..12) != Some(b"WAVE") {
            return Err("its audio is not WAV".to_owned());
        }
        let mut format = None;
        let mut at = 12usize;
        while let Some(head) = seen.get(at..at.saturating_add(8)) {
            let length = number(head, 4).unwrap_or_default();
            let begin = at + 8;
            if head.starts_with(b"data") {
                let format = format.ok_or("its WAV has samples before their format")?;
                let known = (length != 0 && length < u32::MAX - 1024).then_some(u64::from(length));
                let first = seen.get(begin..).unwrap_or_default().to_vec();
                return Ok(Some((format, known.unwrap_or(u64::MAX), first)));
            }
            let end = begin.saturating_add(usize::try_from(length).unwrap_or(usize::MAX));
            if head.starts_with(b"fmt ") {
                let Some(body) = seen.get(begin..begin.saturating_add(16)) else {
                    break;
                };
                format = Some(wav_format(body)?);
            }
            at = end.saturating_add(usize::from(length % 2 == 1));
        }
        if seen.len() > WAV_HEAD_BYTES_MAX {
            return Err(format!(
                "its WAV has no samples within {WAV_HEAD_BYTES_MAX} bytes"
            ));
        }
        Ok(None)
    }
}

fn wav_format(body: &[u8]) -> Result<AudioFormat, String> {
    let short = |at: usize| {
        let bytes = body.get(at..at + 2).and_then(|bytes| bytes.try_into().ok());
        bytes.map(u16::from_le_bytes).unwrap_or_default()
    };
    let (tag, channels, bits) = (short(0), short(2), short(14));
    // 0xFFFE is the extensible form of PCM.
    if !matches!(tag, 1 | 0xFFFE) || bits % 8 != 0 {
        return Err(format!(
            "its WAV has encoding {tag} with {bits} bits, not plain samples"
        ));
    }
    Ok(AudioFormat {
        rate: number(body, 4).unwrap_or_default(),
        width: bits / 8,
        channels,
    })
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let four: [u8; 4] = bytes.get(at..at.checked_add(4)?)?.try_into().ok()?;
    Some(u32::from_le_bytes(four))
}

/// A form with a WAV file, and its content type.
fn multipart(fields: &[(&str, &str)], wav: &[u8]) -> (String, Bytes) {
    let boundary = boundary();
    let mut body = Vec::with_capacity(wav.len() + 1024);
    for (name, value) in fields {
        // Values come from configuration and clients; a line break would end the part.
        let value: String = value.chars().filter(|c| !c.is_control()).collect();
        body.extend_from_slice(
            format!(
                "--{boundary}\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n"
            )
            .as_bytes(),
        );
    }
    body.extend_from_slice(
        format!(
            "--{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"speech.wav\"\r\n\
             Content-Type: audio/wav\r\n\r\n"
        )
        .as_bytes(),
    );
    body.extend_from_slice(wav);
    body.extend_from_slice(format!("\r\n--{boundary}--\r\n").as_bytes());
    (
        format!("multipart/form-data; boundary={boundary}"),
        Bytes::from(body),
    )
}

/// A boundary too long to occur in a recording by chance.
fn boundary() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("cotenant-{:032x}-{count:016x}", since.as_nanos())
}

/// A voice that every compatible server has.
const OPENAI_VOICE: &str = "alloy";

/// From OpenAI's reference: raw PCM is 24 kHz, mono, 16 bit.
const OPENAI_PCM_RATE_HZ: u32 = 24_000;

/// A transcript of ten minutes has about 10 KiB; with segments and tokens a hundred times that.
const TEXT_BYTES_MAX: usize = 1 << 20;
/// Usual memory of JSON of that size.
const TEXT_TREE_MAX: units::Bytes = units::Bytes::from_mib(8);

/// Bytes read from a refusal.
const REFUSAL_BYTES_MAX: usize = 16 << 10;
/// Tags before the samples are short; a file with a picture is not the requested audio.
const WAV_HEAD_BYTES_MAX: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn begin_of(bytes: &[u8], step: usize) -> Result<Option<WavBegin>, String> {
        let mut head = WavHead::default();
        let mut rest = bytes;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(step.min(rest.len()));
            if let Some((format, length, mut first)) = head.push(piece)? {
                first.extend_from_slice(after);
                return Ok(Some((format, length, first)));
            }
            rest = after;
        }
        Ok(None)
    }

    #[test]
    fn a_header_is_read_whatever_the_pieces_are() {
        let audio = MonoAudio::new(22_050, vec![1, -2, 3]);
        let wav = audio.to_wav().unwrap();
        for step in [1, 7, 43, 44, 45, 1000] {
            let (format, length, samples) = begin_of(&wav, step).unwrap().unwrap();
            assert_eq!(format, AudioFormat::mono_16_bit(22_050));
            assert_eq!((length, samples), (6, vec![1, 0, 254, 255, 3, 0]));
        }
    }

    #[test]
    fn a_length_that_is_not_known_has_no_end() {
        let mut wav = MonoAudio::new(16_000, vec![5]).to_wav().unwrap();
        for size in [0u32, u32::MAX] {
            wav[40..44].copy_from_slice(&size.to_le_bytes());
            assert_eq!(begin_of(&wav, 9).unwrap().unwrap().1, u64::MAX);
        }
    }

    #[test]
    fn what_is_not_wav_is_reported() {
        assert_eq!(
            begin_of(b"<html>no such page</html>", 5).unwrap_err(),
            "its audio is not WAV"
        );
        let mut wav = MonoAudio::new(16_000, vec![5]).to_wav().unwrap();
        wav[20] = 85;
        let error = begin_of(&wav, 9).unwrap_err();
        assert_eq!(
            error,
            "its WAV has encoding 85 with 16 bits, not plain samples"
        );
    }

    #[test]
    fn a_speed_is_passed_on_as_each_server_takes_it() {
        let client = |shape| {
            HttpClient::new(
                "127.0.0.1:1".to_owned(),
                shape,
                "m".to_owned(),
                ClientTimeouts::default(),
            )
        };
        let asked = |shape, speed| {
            let manner = Manner {
                voice: Some("kal"),
                speaker: Some("7"),
                speed,
            };
            client(shape).spoken_as("hi", &manner)
        };
        let (path, body) = asked(HttpShape::Openai, 1.25).unwrap();
        assert_eq!(
            (path, &body["speed"], &body["voice"]),
            ("/v1/audio/speech", &json!(1.25), &json!("kal"))
        );
        let (path, body) = asked(HttpShape::Piper, 2.0).unwrap();
        assert_eq!(
            (path, &body["length_scale"], &body["speaker"]),
            ("/synthesize", &json!(0.5), &json!("7"))
        );
        for (shape, name) in [
            (HttpShape::Openai, "speed"),
            (HttpShape::Piper, "length_scale"),
        ] {
            assert!(client(shape).takes_speed());
            assert!(asked(shape, 1.0).unwrap().1.get(name).is_none());
        }
        assert!(
            !client(HttpShape::Whisper).takes_speed() && asked(HttpShape::Whisper, 1.0).is_none()
        );
    }

    #[tokio::test]
    async fn a_refusal_is_shown_however_long_it_is() {
        use std::io::{Read as _, Write as _};

        let says = |text: String| {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap().to_string();
            // Ends with the connection.
            std::thread::spawn(move || {
                let (mut client, _) = listener.accept().unwrap();
                let _ = client.read(&mut [0; 1 << 16]);
                let head = format!(
                    "HTTP/1.1 400 Bad Request\r\ncontent-length: {}\r\n\r\n",
                    text.len()
                );
                // The client stops reading at some point.
                let _ = client.write_all(head.as_bytes());
                let _ = client.write_all(text.as_bytes());
                let _ = client.read_to_end(&mut Vec::new());
            });
            address
        };
        for (text, shown) in [
            (String::new(), "400 Bad Request".to_owned()),
            (
                "no such voice".to_owned(),
                "400 Bad Request: no such voice".to_owned(),
            ),
            (
                "E".repeat(1 << 20),
                format!("400 Bad Request: {}…", "E".repeat(300)),
            ),
        ] {
            let address = says(text);
            let client = HttpClient::new(
                address,
                HttpShape::Openai,
                "m".to_owned(),
                ClientTimeouts::default(),
            );
            let recording = MonoAudio::new(16_000, vec![0; 160]);
            match client.hear(&recording, None).await {
                Err(ClientError::Refused { text, .. }) => assert_eq!(text, shown),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_form_holds_its_fields_and_the_file() {
        let (kind, body) = multipart(&[("language", "en\r\nX: 1"), ("model", "m")], b"RIFFdata");
        let boundary = kind.strip_prefix("multipart/form-data; boundary=").unwrap();
        let text = String::from_utf8(body.to_vec()).unwrap();
        assert_eq!(text.matches(boundary).count(), 4);
        assert!(
            text.contains("name=\"language\"\r\n\r\nenX: 1\r\n"),
            "{text}"
        );
        assert!(text.ends_with(&format!("RIFFdata\r\n--{boundary}--\r\n")));
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..400), step in 1usize..64) {
            let _ = begin_of(&bytes, step);
            if bytes.len() > 12 {
                bytes[..4].copy_from_slice(b"RIFF");
                bytes[8..12].copy_from_slice(b"WAVE");
                let _ = begin_of(&bytes, step);
            }
        }
    }
}
