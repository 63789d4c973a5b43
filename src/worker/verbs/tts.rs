//! `cotenant worker tts`: Wyoming voice on flite or espeak-ng.

use std::{
    io::{self, Read, Write},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use tokio::sync::oneshot;

use super::{
    error::VerbError,
    flite::{Flite, FliteError},
    serve::{EngineThread, ListenArgs, artifact, serve},
};
use cotenant_speech::{
    audio::{AudioError, MonoAudio, parse_wav, pcm_bytes},
    sentences::Sentences,
    server::{
        Activity, BAD_REQUEST, Refusal, Reply, Service, Session, SessionError, check_text_length,
    },
    wyoming::{
        AudioFormat, Event, Info,
        event::{AudioChunk, AudioStart, AudioStop},
        info::{Model, TtsProgram},
    },
};

/// Options of `cotenant worker tts`.
#[derive(Clone, Debug, clap::Args)]
pub struct TtsOptions {
    /// Listening address.
    #[command(flatten)]
    pub listen: ListenArgs,
    /// Speech synthesiser
    #[arg(long, value_enum, default_value_t = TtsEngine::Flite)]
    pub engine: TtsEngine,
    // flite has only `slt`.
    /// Voice of espeak-ng, for example `en-us`
    #[arg(long, value_name = "NAME")]
    pub voice: Option<String>,
}

/// What speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TtsEngine {
    /// The program `espeak-ng`, once per sentence.
    #[value(help = None)]
    EspeakNg,
    /// flite's voice slt, in this process. About 5 MB.
    #[value(help = None)]
    Flite,
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// If the engine cannot be loaded, or the address cannot be bound.
pub fn run_tts(options: &TtsOptions) -> Result<(), VerbError> {
    if let (TtsEngine::Flite, Some(voice)) = (options.engine, options.voice.as_deref())
        && voice != FLITE_VOICE
    {
        return Err(VerbError::Options(format!(
            "flite has no voice `{voice}`, only `{FLITE_VOICE}`"
        )));
    }
    serve(&options.listen.endpoint(), || Speaker::load(options))
}

/// Service with one engine on its own thread.
struct Speaker {
    thread: EngineThread<Job>,
    engine: TtsEngine,
    voice: String,
}

impl Speaker {
    fn load(options: &TtsOptions) -> Result<Self, VerbError> {
        let (kind, default) = match options.engine {
            TtsEngine::EspeakNg => (TtsEngine::EspeakNg, ESPEAK_VOICE),
            TtsEngine::Flite => (TtsEngine::Flite, FLITE_VOICE),
        };
        let voice = options.voice.clone().unwrap_or_else(|| default.to_owned());
        let espeak_voice = voice.clone();
        let make = move || match kind {
            TtsEngine::Flite => Ok(Engine::Flite(Flite::load().map_err(VerbError::Flite)?)),
            TtsEngine::EspeakNg => {
                let engine = EspeakNg {
                    voice: espeak_voice,
                };
                engine.speak("ready").map_err(VerbError::Espeak)?;
                Ok(Engine::EspeakNg(engine))
            }
        };
        let thread = EngineThread::start(make, |engine: &mut Engine, job: Job| {
            // A disconnected client does not need the result.
            let _ = job.reply.send(engine.speak(&job.sentence));
        })?;
        Ok(Self {
            thread,
            engine: kind,
            voice,
        })
    }
}

impl Service for Speaker {
    type Session = Speaking;

    fn info(&self) -> Info {
        let (name, author, url) = match self.engine {
            TtsEngine::EspeakNg => (
                "espeak-ng",
                "eSpeak NG",
                "https://github.com/espeak-ng/espeak-ng",
            ),
            TtsEngine::Flite => ("flite", "CMU Flite", "http://www.festvox.org/flite"),
        };
        Info {
            tts: vec![TtsProgram {
                artifact: artifact(name, "a small voice", author, url),
                voices: vec![Model {
                    artifact: artifact(&self.voice, "a small voice", author, url),
                    languages: vec!["en".to_owned(), "en-US".to_owned()],
                    speakers: Vec::new(),
                }],
                supports_synthesize_streaming: true,
            }],
            ..Info::default()
        }
    }

    fn session(&self) -> Speaking {
        Speaking {
            thread: self.thread.clone(),
            streaming: None,
        }
    }
}

struct Speaking {
    thread: EngineThread<Job>,
    streaming: Option<Streaming>,
}

/// Text that arrives in pieces.
#[derive(Default)]
struct Streaming {
    sentences: Sentences,
    bytes: usize,
    speech: Speech,
}

/// Audio sent for one text.
#[derive(Default)]
struct Speech {
    format: Option<AudioFormat>,
}

impl Session for Speaking {
    async fn handle(&mut self, event: Event, reply: &Reply) -> Result<(), SessionError> {
        match event {
            // Within a stream, the whole text is sent again for servers without streaming.
            Event::Synthesize(_) if self.streaming.is_some() => Ok(()),
            Event::Synthesize(request) => {
                check_text_length(request.text.len())?;
                let mut speech = Speech::default();
                let mut sentences = Sentences::default();
                for sentence in sentences
                    .push(&request.text)
                    .into_iter()
                    .chain(sentences.finish())
                {
                    self.speak(sentence, &mut speech, reply).await?;
                }
                speech.stop(reply).await
            }
            Event::SynthesizeStart(_) => {
                self.streaming = Some(Streaming::default());
                Ok(())
            }
            Event::SynthesizeChunk(piece) => {
                let mut streaming = self.begun("synthesize-chunk")?;
                streaming.bytes += piece.text.len();
                check_text_length(streaming.bytes)?;
                for sentence in streaming.sentences.push(&piece.text) {
                    self.speak(sentence, &mut streaming.speech, reply).await?;
                }
                self.streaming = Some(streaming);
                Ok(())
            }
            Event::SynthesizeStop => {
                let mut streaming = self.begun("synthesize-stop")?;
                if let Some(sentence) = streaming.sentences.finish() {
                    self.speak(sentence, &mut streaming.speech, reply).await?;
                }
                streaming.speech.stop(reply).await?;
                Ok(reply.send(Event::SynthesizeStopped).await?)
            }
            _ => Ok(()),
        }
    }

    fn activity(&self) -> Activity {
        match self.streaming {
            Some(_) => Activity::Receiving,
            None => Activity::Idle,
        }
    }
}

impl Speaking {
    /// Returns the synthesis begun by `synthesize-start` that this event continues.
    fn begun(&mut self, event: &str) -> Result<Streaming, Refusal> {
        let without = || format!("`{event}` without `synthesize-start`");
        let streaming = self.streaming.take();
        streaming.ok_or_else(|| Refusal::new(BAD_REQUEST, without()))
    }

    async fn speak(
        &self,
        sentence: String,
        speech: &mut Speech,
        reply: &Reply,
    ) -> Result<(), SessionError> {
        let spoken = self.thread.ask(|reply| Job { sentence, reply }).await;
        let audio = spoken
            .ok_or_else(|| Refusal::new("busy", "too many requests wait for the voice"))?
            .map_err(|error| Refusal::new("engine-failed", error.to_string()))?;
        speech.send(&audio, reply).await
    }
}

impl Speech {
    async fn send(&mut self, audio: &MonoAudio, reply: &Reply) -> Result<(), SessionError> {
        let format = self
            .start(AudioFormat::mono_16_bit(audio.sample_rate_hz), reply)
            .await?;
        for samples in audio.samples.chunks(CHUNK_SAMPLES) {
            let chunk = AudioChunk {
                format,
                timestamp: None,
                audio: pcm_bytes(samples),
            };
            reply.send(Event::AudioChunk(chunk)).await?;
        }
        Ok(())
    }

    async fn start(
        &mut self,
        format: AudioFormat,
        reply: &Reply,
    ) -> Result<AudioFormat, SessionError> {
        if let Some(format) = self.format {
            return Ok(format);
        }
        self.format = Some(format);
        let start = AudioStart {
            format,
            timestamp: None,
        };
        reply.send(Event::AudioStart(start)).await?;
        Ok(format)
    }

    /// Sends the end; a text without words gets a start and a stop.
    async fn stop(&mut self, reply: &Reply) -> Result<(), SessionError> {
        self.start(AudioFormat::mono_16_bit(SILENT_RATE_HZ), reply)
            .await?;
        Ok(reply.send(Event::AudioStop(AudioStop::default())).await?)
    }
}

struct Job {
    sentence: String,
    reply: oneshot::Sender<Result<MonoAudio, SpeakError>>,
}

enum Engine {
    EspeakNg(EspeakNg),
    Flite(Flite),
}

impl Engine {
    fn speak(&mut self, sentence: &str) -> Result<MonoAudio, SpeakError> {
        match self {
            Self::EspeakNg(engine) => Ok(engine.speak(sentence)?),
            Self::Flite(engine) => Ok(engine.speak(sentence)?),
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum SpeakError {
    #[error(transparent)]
    Flite(#[from] FliteError),
    #[error("cannot run `espeak-ng`: {0}")]
    EspeakNg(#[from] io::Error),
}

/// The program espeak-ng. Its licence is GPL-3, hence a separate process instead of a library.
struct EspeakNg {
    voice: String,
}

impl EspeakNg {
    fn speak(&self, sentence: &str) -> io::Result<MonoAudio> {
        let mut child = Command::new("espeak-ng")
            .args(["-v", &self.voice, "--stdin", "--stdout"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        // It reads all input before it writes, but this is not guaranteed, so a separate thread sends the text.
        let wav = thread::scope(|scope| {
            thread::Builder::new().spawn_scoped(scope, move || {
                if let Some(mut stdin) = stdin {
                    let _ = stdin.write_all(sentence.as_bytes());
                }
            })?;
            let mut wav = Vec::new();
            let read = stdout.map(|stdout| stdout.take(SENTENCE_WAV_MAX).read_to_end(&mut wav));
            read.transpose().map(|_| wav)
        });
        let status = child.wait()?;
        if !status.success() {
            return Err(io::Error::other(format!("it ended with {status}")));
        }
        parse_wav(&wav?, SENTENCE_MAX).map_err(|error: AudioError| io::Error::other(error))
    }
}

/// Longest audio of a sentence; texts are split at 300 bytes before.
const SENTENCE_MAX: Duration = Duration::from_secs(120);

/// The same in bytes at 22 050 Hz, the rate of espeak-ng.
const SENTENCE_WAV_MAX: u64 = 120 * 22_050 * 2 + 64;

/// Samples per message: 64 ms at 16 kHz.
const CHUNK_SAMPLES: usize = 1024;

/// Rate reported for a text without words.
const SILENT_RATE_HZ: u32 = 16_000;

const FLITE_VOICE: &str = "slt";
const ESPEAK_VOICE: &str = "en-us";
