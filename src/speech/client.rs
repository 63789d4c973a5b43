//! Wyoming client: one connection per request, a timeout on every step.

use std::{
    fmt, io,
    path::PathBuf,
    pin::Pin,
    str::FromStr,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    sync::mpsc,
    time::{Instant, timeout},
};
use tokio_stream::Stream;

use super::{
    audio::{AudioError, MonoAudio, PcmDecoder},
    wyoming::{
        AudioFormat, Event, EventError, FrameError, FrameLimits, FrameReader, Info, Voice,
        event::{AudioChunk, AudioStart, AudioStop, Ping, Resize, Synthesize, Transcribe},
        write_frame,
    },
};

pub use super::wyoming::event::Resized;

/// Address of a Wyoming server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// On a Unix socket.
    Unix(PathBuf),
    /// On `host:port`.
    Tcp(String),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp://{address}"),
        }
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let wrong = || EndpointError {
            text: text.to_owned(),
        };
        match text.split_once("://") {
            Some(("unix", path)) if !path.is_empty() => Ok(Self::Unix(PathBuf::from(path))),
            Some(("tcp", address)) => match address.rsplit_once(':') {
                Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                    Ok(Self::Tcp(address.to_owned()))
                }
                _ => Err(wrong()),
            },
            _ => Err(wrong()),
        }
    }
}

/// The text is not an [`Endpoint`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is neither `unix:///path` nor `tcp://host:port`")]
pub struct EndpointError {
    text: String,
}

/// Time limits of each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientTimeouts {
    /// To connect.
    pub connect: Duration,
    /// For `describe` and `ping`: to write the request and read the answer.
    pub describe: Duration,
    /// From the last audio to the transcript, and for sending each piece of audio.
    pub transcribe: Duration,
    /// Between two messages of speech.
    pub synthesize: Duration,
    /// From the request for embeddings to their vectors.
    pub embed: Duration,
    /// For switching to another variant, which may load a model.
    pub resize: Duration,
}

impl Default for ClientTimeouts {
    /// Home Assistant allows 1 s for `describe`; LiveKit 30 s for STT and TTS, and 10 s to connect, for which 2 s
    /// suffice on one machine; loading a model from a cold SD card takes some seconds.
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            describe: Duration::from_secs(1),
            transcribe: Duration::from_secs(30),
            synthesize: Duration::from_secs(30),
            embed: Duration::from_secs(30),
            resize: Duration::from_secs(30),
        }
    }
}

/// Transcript of a recogniser.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// The text; empty if no speech was recognised.
    pub text: String,
    /// Its language, if the server sends it: `en`.
    pub language: Option<String>,
}

/// A client of one Wyoming server.
#[derive(Clone, Debug)]
pub struct WyomingClient {
    endpoint: Endpoint,
    timeouts: ClientTimeouts,
    limits: FrameLimits,
}

impl WyomingClient {
    /// A client that connects for each request.
    pub fn new(endpoint: Endpoint, timeouts: ClientTimeouts) -> Self {
        Self {
            endpoint,
            timeouts,
            limits: FrameLimits::default(),
        }
    }

    /// The description of the server.
    ///
    /// # Errors
    /// If it cannot be reached, does not reply in time, or replies with an unexpected event.
    pub async fn describe(&self) -> Result<Info, ClientError> {
        let reply = self
            .exchange(
                Event::Describe,
                self.timeouts.describe,
                |event| match event {
                    Event::Info(info) => Some(*info),
                    _ => None,
                },
            )
            .await?;
        Ok(reply)
    }

    /// Checks that the server responds; errors as for [`describe`](Self::describe).
    pub async fn ping(&self) -> Result<(), ClientError> {
        let ping = Event::Ping(Ping::default());
        self.exchange(ping, self.timeouts.describe, |event| {
            matches!(event, Event::Pong(_)).then_some(())
        })
        .await
    }

    /// Checks that the server accepts a connection, with any protocol.
    ///
    /// # Errors
    /// If it cannot be reached.
    pub async fn connect_only(&self) -> Result<(), ClientError> {
        self.connect().await.map(drop)
    }

    /// Switches a built-in worker to another variant.
    ///
    /// # Errors
    /// As for [`describe`](Self::describe), and if the worker lacks the variant or cannot load it.
    pub async fn resize(&self, variant: &str) -> Result<Resized, ClientError> {
        let resize = Event::Resize(Resize {
            variant: variant.to_owned(),
        });
        self.exchange(resize, self.timeouts.resize, |event| match event {
            Event::Resized(resized) => Some(resized),
            _ => None,
        })
        .await
    }

    /// Transcribes `audio` with the expected `language`; empty if no speech was recognised. Partial transcripts are
    /// sent to `pieces` as they arrive.
    ///
    /// # Errors
    /// As for [`describe`](Self::describe), and if the server refuses.
    pub async fn hear(
        &self,
        audio: &MonoAudio,
        language: Option<&str>,
        pieces: Option<&mpsc::Sender<String>>,
    ) -> Result<Heard, ClientError> {
        let (mut reader, mut writer) = self.connect().await?;
        let format = AudioFormat::mono_16_bit(audio.sample_rate_hz);
        let patience = self.timeouts.transcribe;
        let send = async {
            let transcribe = Transcribe {
                language: language.map(str::to_owned),
                ..Transcribe::default()
            };
            self.send(&mut writer, Event::Transcribe(transcribe), patience)
                .await?;
            let start = AudioStart {
                format,
                timestamp: None,
            };
            self.send(&mut writer, Event::AudioStart(start), patience)
                .await?;
            for samples in audio.samples.chunks(CHUNK_SAMPLES) {
                let chunk = AudioChunk {
                    format,
                    timestamp: None,
                    audio: samples
                        .iter()
                        .flat_map(|sample| sample.to_le_bytes())
                        .collect(),
                };
                self.send(&mut writer, Event::AudioChunk(chunk), patience)
                    .await?;
            }
            self.send(
                &mut writer,
                Event::AudioStop(AudioStop::default()),
                patience,
            )
            .await
        };
        // The server may refuse before it has read all audio; its `error` is more specific than our broken pipe.
        let reported = tokio::sync::Notify::new();
        let receive = async {
            // Each of Whisper's pieces begins with a space, also the first.
            let mut begun = false;
            loop {
                match self.receive(&mut reader).await? {
                    Event::TranscriptChunk(piece) => {
                        reported.notify_one();
                        let text = if begun {
                            piece.text.as_str()
                        } else {
                            piece.text.trim_start()
                        };
                        // An empty piece is only a sign of life.
                        if let Some(pieces) = pieces.filter(|_| !text.is_empty()) {
                            begun = true;
                            // The receiver is dropped at the end of the request, which also drops this future.
                            let _ = pieces.send(text.to_owned()).await;
                        }
                    }
                    Event::Transcript(transcript) => {
                        return Ok(Heard {
                            text: transcript.text.trim().to_owned(),
                            language: transcript.language,
                        });
                    }
                    Event::Error(error) => return Err(self.refused(error)),
                    _ => {}
                }
            }
        };
        tokio::pin!(receive);
        let sent = tokio::select! {
            biased;
            early = &mut receive => return early,
            sent = send => sent,
        };
        let answered = loop {
            // Each piece restarts the time limit.
            tokio::select! {
                biased;
                answered = &mut receive => break Some(answered),
                () = reported.notified() => {}
                () = tokio::time::sleep(patience) => break None,
            }
        };
        match (answered, sent) {
            (Some(Ok(heard)), _) => Ok(heard),
            (Some(Err(refused @ ClientError::Refused { .. })), _) => Err(refused),
            (_, Err(failed)) => Err(failed),
            (Some(Err(error)), Ok(())) => Err(error),
            (None, Ok(())) => Err(self.late("transcribe", patience)),
        }
    }

    /// Synthesises `text`; returns as soon as the audio begins.
    ///
    /// Dropping the returned value closes the connection.
    ///
    /// # Errors
    /// As for [`describe`](Self::describe), and if the server refuses. Later failures are items of the stream.
    pub async fn synthesize(
        &self,
        text: &str,
        voice: Option<&str>,
    ) -> Result<SpeechStream, ClientError> {
        self.speak(text, voice, None).await
    }

    /// The same with one speaker of a multi-speaker voice; errors as for [`synthesize`](Self::synthesize).
    pub async fn speak(
        &self,
        text: &str,
        voice: Option<&str>,
        speaker: Option<&str>,
    ) -> Result<SpeechStream, ClientError> {
        let (mut reader, mut writer) = self.connect().await?;
        let patience = self.timeouts.synthesize;
        let request = Event::Synthesize(Synthesize {
            text: text.to_owned(),
            voice: (voice.is_some() || speaker.is_some()).then(|| Voice {
                name: voice.map(str::to_owned),
                speaker: speaker.map(str::to_owned),
                language: None,
            }),
        });
        self.send(&mut writer, request, patience).await?;
        let format = loop {
            let event = timeout(patience, self.receive(&mut reader))
                .await
                .map_err(|_| self.late("synthesize", patience))??;
            match event {
                Event::AudioStart(start) => break start.format,
                Event::Error(error) => return Err(self.refused(error)),
                _ => {}
            }
        };
        let mut decoder = PcmDecoder::new(format).map_err(ClientError::Audio)?;
        let mut length = SpokenLength::new(text, 1.0, format.rate);
        let (sender, receiver) = mpsc::channel(QUEUED_CHUNKS);
        let client = self.clone();
        tokio::spawn(async move {
            // Held until the end, because some servers treat a half-closed connection as closed.
            let _writer = writer;
            loop {
                let event = tokio::select! {
                    () = sender.closed() => return,
                    event = timeout(length.patience(patience), client.receive(&mut reader)) => event,
                };
                let item = match event.unwrap_or_else(|_| Err(client.late("synthesize", patience)))
                {
                    Ok(Event::AudioChunk(chunk)) => {
                        let samples = decoder.push(&chunk.audio);
                        length
                            .take(&client.endpoint, samples.len())
                            .map(|()| samples)
                    }
                    Ok(Event::AudioStop(_)) => return,
                    Ok(Event::Error(error)) => Err(client.refused(error)),
                    Ok(_) => match length.take(&client.endpoint, 0) {
                        Ok(()) => continue,
                        Err(error) => Err(error),
                    },
                    Err(error) => Err(error),
                };
                let last = item.is_err();
                if sender.send(item).await.is_err() || last {
                    return;
                }
            }
        });
        Ok(SpeechStream::new(format.rate, receiver))
    }

    /// Opens a separate connection for an exchange of several events.
    ///
    /// # Errors
    /// If the server cannot be reached.
    pub async fn open(&self) -> Result<Exchange, ClientError> {
        let (reader, writer) = self.connect().await?;
        Ok(Exchange {
            client: self.clone(),
            reader,
            writer,
        })
    }

    /// Sends one event and waits for the answer accepted by `wanted`.
    async fn exchange<T>(
        &self,
        request: Event,
        patience: Duration,
        wanted: impl Fn(Event) -> Option<T>,
    ) -> Result<T, ClientError> {
        let act = act_of(&request);
        let (mut reader, mut writer) = self.connect().await?;
        let talk = async {
            // A server that closes at once may have sent the reason first, which is more specific than our broken pipe.
            let sent = self.send(&mut writer, request, patience).await;
            loop {
                match (self.receive(&mut reader).await, &sent) {
                    (Ok(Event::Error(error)), _) => return Err(self.refused(error)),
                    (Ok(event), _) => {
                        if let Some(reply) = wanted(event) {
                            return Ok(reply);
                        }
                    }
                    (Err(ClientError::Broken { .. } | ClientError::Closed { .. }), Err(_)) => break,
                    (Err(error), _) => return Err(error),
                }
            }
            Err(sent.err().unwrap_or_else(|| ClientError::Closed {
                endpoint: self.endpoint.clone(),
            }))
        };
        timeout(patience, talk)
            .await
            .unwrap_or_else(|_| Err(self.late(act, patience)))
    }

    async fn connect(&self) -> Result<(FrameReader<BoxedReader>, BoxedWriter), ClientError> {
        let patience = self.timeouts.connect;
        let connecting = async {
            Ok::<(BoxedReader, BoxedWriter), io::Error>(match &self.endpoint {
                Endpoint::Unix(path) => {
                    let (reader, writer) = UnixStream::connect(path).await?.into_split();
                    (Box::new(reader), Box::new(writer))
                }
                Endpoint::Tcp(address) => {
                    let stream = TcpStream::connect(address).await?;
                    stream.set_nodelay(true)?;
                    let (reader, writer) = stream.into_split();
                    (Box::new(reader), Box::new(writer))
                }
            })
        };
        let (reader, writer) = timeout(patience, connecting)
            .await
            .map_err(|_| self.late("connect", patience))?
            .map_err(|source| ClientError::Connect {
                endpoint: self.endpoint.clone(),
                source,
            })?;
        Ok((FrameReader::new(reader, self.limits), writer))
    }

    async fn send(
        &self,
        writer: &mut BoxedWriter,
        event: Event,
        patience: Duration,
    ) -> Result<(), ClientError> {
        let frame = event.into_frame();
        timeout(patience, write_frame(writer, &frame))
            .await
            .map_err(|_| self.late("write", patience))?
            .map_err(|source| self.broken(source))
    }

    async fn receive(&self, reader: &mut FrameReader<BoxedReader>) -> Result<Event, ClientError> {
        match reader.next().await {
            Ok(Some(frame)) => Event::from_frame(frame).map_err(|source| ClientError::Event {
                endpoint: self.endpoint.clone(),
                source,
            }),
            Ok(None) => Err(ClientError::Closed {
                endpoint: self.endpoint.clone(),
            }),
            Err(source) => Err(self.broken(source)),
        }
    }

    fn refused(&self, error: super::wyoming::event::ErrorReply) -> ClientError {
        let code = error
            .code
            .map(|code| code.chars().take(CODE_CHARS_MAX).collect());
        ClientError::Refused {
            endpoint: self.endpoint.clone(),
            text: brief(&error.text),
            code,
        }
    }

    fn late(&self, act: &'static str, limit: Duration) -> ClientError {
        ClientError::Late {
            endpoint: self.endpoint.clone(),
            act,
            limit,
        }
    }

    fn broken(&self, error: FrameError) -> ClientError {
        let endpoint = self.endpoint.clone();
        match error {
            FrameError::Io(source) => ClientError::Broken { endpoint, source },
            source => ClientError::Frame { endpoint, source },
        }
    }
}

/// A bidirectional connection.
pub struct Exchange {
    client: WyomingClient,
    reader: FrameReader<BoxedReader>,
    writer: BoxedWriter,
}

impl Exchange {
    /// Sends one event.
    ///
    /// # Errors
    /// If the server does not read it in time, or has disconnected.
    pub async fn send(&mut self, event: Event) -> Result<(), ClientError> {
        let patience = self.client.timeouts.transcribe;
        self.client.send(&mut self.writer, event, patience).await
    }

    /// The next event.
    ///
    /// # Errors
    /// If none arrives in time, it is an `error`, or the connection is closed.
    pub async fn receive(&mut self) -> Result<Event, ClientError> {
        let patience = self.client.timeouts.synthesize;
        match timeout(patience, self.client.receive(&mut self.reader)).await {
            Ok(Ok(Event::Error(error))) => Err(self.client.refused(error)),
            Ok(received) => received,
            Err(_) => Err(self.client.late("answer", patience)),
        }
    }
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange")
            .field("endpoint", &self.client.endpoint)
            .finish_non_exhaustive()
    }
}

/// Streamed speech: mono samples in pieces, or the error that ended it.
#[derive(Debug)]
pub struct SpeechStream {
    sample_rate_hz: u32,
    receiver: mpsc::Receiver<Result<Vec<i16>, ClientError>>,
}

impl SpeechStream {
    pub(super) const fn new(
        sample_rate_hz: u32,
        receiver: mpsc::Receiver<Result<Vec<i16>, ClientError>>,
    ) -> Self {
        Self {
            sample_rate_hz,
            receiver,
        }
    }

    /// Samples per second.
    pub const fn sample_rate_hz(&self) -> u32 {
        self.sample_rate_hz
    }

    /// The next piece; `None` at the end.
    pub async fn next(&mut self) -> Option<Result<Vec<i16>, ClientError>> {
        self.receiver.recv().await
    }

    /// Collects all of it, at most `limit` long.
    ///
    /// # Errors
    /// If the server fails or exceeds the limit.
    pub async fn collect(mut self, limit: Duration) -> Result<MonoAudio, ClientError> {
        let mut audio = MonoAudio::new(self.sample_rate_hz, Vec::new());
        while let Some(samples) = self.next().await {
            audio.samples.extend(samples?);
            let duration = audio.duration();
            if duration > limit {
                return Err(ClientError::Audio(AudioError::TooLong { duration, limit }));
            }
        }
        Ok(audio)
    }
}

impl Stream for SpeechStream {
    type Item = Result<Vec<i16>, ClientError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.receiver.poll_recv(context)
    }
}

/// Bounds on the length of speech and on its synthesis.
#[derive(Debug)]
pub(super) struct SpokenLength {
    limit: Duration,
    rate: u32,
    samples: u64,
    /// Time spent waiting for the server, because a client may read only as fast as the audio plays.
    waited: Duration,
    asked: Instant,
}

impl SpokenLength {
    pub(super) fn new(text: &str, speed: f64, sample_rate_hz: u32) -> Self {
        let characters = u32::try_from(text.chars().count()).unwrap_or(u32::MAX);
        let limit = SPOKEN_LEAST.saturating_add(SPOKEN_PER_CHARACTER.saturating_mul(characters));
        // A slower voice needs more time.
        let limit =
            Duration::try_from_secs_f64(limit.as_secs_f64() / speed.clamp(SPEED_LEAST, 1.0))
                .unwrap_or(limit);
        Self {
            limit,
            rate: sample_rate_hz.max(1),
            samples: 0,
            waited: Duration::ZERO,
            asked: Instant::now(),
        }
    }

    /// Counts received samples.
    ///
    /// # Errors
    /// If they are too many for the text, or too late.
    pub(super) fn take(&mut self, endpoint: &Endpoint, samples: usize) -> Result<(), ClientError> {
        self.samples = self
            .samples
            .saturating_add(u64::try_from(samples).unwrap_or(u64::MAX));
        self.waited = self.waited.saturating_add(self.asked.elapsed());
        let spoken = Duration::from_secs(self.samples / u64::from(self.rate));
        if spoken.max(self.waited) <= self.limit {
            return Ok(());
        }
        Err(ClientError::Endless {
            endpoint: endpoint.clone(),
            limit: self.limit,
        })
    }

    /// Time limit for the next piece, at most `patience`.
    pub(super) fn patience(&mut self, patience: Duration) -> Duration {
        self.asked = Instant::now();
        patience.min(self.limit.saturating_sub(self.waited))
    }
}

/// A server's message, as one line of an error.
pub(super) fn brief(text: &str) -> String {
    let start: String = text.chars().take(REFUSAL_CHARS_MAX).collect();
    let mut line = start.split_whitespace().collect::<Vec<_>>().join(" ");
    if start.len() < text.len() {
        line.push('…');
    }
    line
}

/// Failure of a request to a Wyoming server.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No server listens.
    #[error("cannot connect to `{endpoint}`")]
    Connect {
        /// Address of the server.
        endpoint: Endpoint,
        /// Cause.
        source: io::Error,
    },
    /// A step took too long.
    #[error("`{endpoint}` did not {act} within {:.1} s", limit.as_secs_f64())]
    Late {
        /// Address of the server.
        endpoint: Endpoint,
        /// The step.
        act: &'static str,
        /// The time limit.
        limit: Duration,
    },
    /// The connection was closed before the answer.
    #[error("`{endpoint}` closed the connection without an answer")]
    Closed {
        /// Address of the server.
        endpoint: Endpoint,
    },
    /// The connection failed.
    #[error("connection to `{endpoint}` broke")]
    Broken {
        /// Address of the server.
        endpoint: Endpoint,
        /// Cause.
        source: io::Error,
    },
    /// The response is not a Wyoming message.
    #[error("`{endpoint}` does not speak Wyoming")]
    Frame {
        /// Address of the server.
        endpoint: Endpoint,
        /// Cause.
        source: FrameError,
    },
    /// The response is a Wyoming message with wrong fields.
    #[error("`{endpoint}` sent an unexpected event")]
    Event {
        /// Address of the server.
        endpoint: Endpoint,
        /// Cause.
        source: EventError,
    },
    /// The HTTP response is not the expected one.
    #[error("`{endpoint}` sent an invalid response: {problem}")]
    Answer {
        /// Address of the server.
        endpoint: Endpoint,
        /// Fault of the response.
        problem: String,
    },
    /// The speech exceeds any plausible length for the text.
    #[error("`{endpoint}` sent more than {:.0} s of speech, too much for the text", limit.as_secs_f64())]
    Endless {
        /// Address of the server.
        endpoint: Endpoint,
        /// The limit.
        limit: Duration,
    },
    /// The server refuses.
    #[error("`{endpoint}` refused: {text}")]
    Refused {
        /// Address of the server.
        endpoint: Endpoint,
        /// Its reason.
        text: String,
        /// Its code, for example `memory-pressure`.
        code: Option<String>,
    },
    /// The received audio cannot be used.
    #[error("cannot use the audio")]
    Audio(#[source] AudioError),
}

/// The verb of a request for "did not … within".
fn act_of(request: &Event) -> &'static str {
    match request {
        Event::Describe => "answer `describe`",
        Event::Ping(_) => "answer `ping`",
        Event::Resize(_) => "switch its size",
        _ => "answer",
    }
}

type BoxedReader = Box<dyn AsyncRead + Send + Unpin>;
type BoxedWriter = Box<dyn AsyncWrite + Send + Unpin>;

/// Samples per message: 64 ms at 16 kHz, between Home Assistant's 20 ms and the reference tools' 128 ms.
const CHUNK_SAMPLES: usize = 1024;

/// Shown characters of a refusal.
const REFUSAL_CHARS_MAX: usize = 300;
const CODE_CHARS_MAX: usize = 64;

/// Our choice: ten times the usual duration of a character, because numbers and signs are spoken as several words.
const SPOKEN_PER_CHARACTER: Duration = Duration::from_secs(1);
/// Our choice: for pauses, and for loading a voice.
const SPOKEN_LEAST: Duration = Duration::from_secs(60);
/// The slowest speed in requests.
const SPEED_LEAST: f64 = 0.25;

/// Pieces of audio in the queue of the player; then the server waits.
pub(super) const QUEUED_CHUNKS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_a_server_are_one_short_line() {
        assert_eq!(brief("no  voice\n of that name"), "no voice of that name");
        let long = brief(&"ü".repeat(1 << 20));
        assert_eq!(
            (long.chars().count(), long.ends_with('…')),
            (REFUSAL_CHARS_MAX + 1, true)
        );
    }

    #[test]
    fn speech_may_be_ten_times_as_long_as_people_take_and_ends_then() {
        let endpoint = Endpoint::Tcp("127.0.0.1:1".to_owned());
        let mut length = SpokenLength::new("Turn on the light.", 1.0, 16_000);
        length.take(&endpoint, 16_000 * 78).unwrap();
        let error = length.take(&endpoint, 16_000).unwrap_err().to_string();
        assert_eq!(
            error,
            "`tcp://127.0.0.1:1` sent more than 78 s of speech, too much for the text"
        );
        SpokenLength::new("Turn on the light.", 0.25, 16_000)
            .take(&endpoint, 16_000 * 300)
            .unwrap();
    }

    #[test]
    fn endpoints_read_as_they_print() {
        for text in [
            "unix:///run/cotenant/asr.sock",
            "tcp://127.0.0.1:10300",
            "tcp://[::1]:10200",
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "asr.sock",
            "unix://",
            "tcp://localhost",
            "tcp://:1",
            "tcp://h:99999",
            "http://h:1",
        ] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }
}
