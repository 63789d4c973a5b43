//! `cotenant worker asr`: Wyoming recogniser on pocketsphinx, in two sizes.

use std::{
    fmt, fs,
    io::Read,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::sync::oneshot;

use super::{
    VerbError,
    pocketsphinx::{Decoder, ModelFiles, Pocketsphinx, Search, SphinxError},
    serve::{EngineThread, artifact, keep_large_blocks_apart, own_rss, serve, trim},
};
use crate::{
    speech::{
        audio::{ASR_RATE_HZ, MonoAudio, PcmDecoder},
        client::Endpoint,
        server::{BAD_REQUEST, Refusal, Reply, Service, Session, SessionError},
        wyoming::{
            Event, Info,
            event::{Resized, Transcript},
            info::{AsrProgram, Model},
        },
    },
    units::Bytes,
};

/// Options of `cotenant worker asr`.
#[derive(Clone, Debug)]
pub struct AsrOptions {
    /// Where to listen.
    pub listen: Endpoint,
    /// What is understood at the start; clients may switch by `cotenant-resize`.
    pub vocabulary: Vocabulary,
    /// JSGF file of [`Vocabulary::Grammar`]; without it only [`Vocabulary::Open`] can be had.
    pub grammar: Option<PathBuf>,
    /// Folder of the acoustic model, dictionary and language model; where the package `pocketsphinx-en-us` puts them
    /// when `None`.
    pub model_dir: Option<PathBuf>,
}

/// What a recogniser understands; the names are its variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vocabulary {
    /// `grammar`: the sentences of a JSGF file. About 33 MB.
    Grammar,
    /// `open`: any English sentence, by a language model. About 102 MB.
    Open,
}

impl Vocabulary {
    /// The vocabulary with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::Grammar, Self::Open]
            .into_iter()
            .find(|known| known.name() == name)
    }

    /// Its name as a variant.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Grammar => "grammar",
            Self::Open => "open",
        }
    }
}

impl fmt::Display for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// When the engine or its model cannot be loaded, or the address cannot be listened on.
pub fn run_asr(options: &AsrOptions) -> Result<(), VerbError> {
    keep_large_blocks_apart();
    serve(&options.listen, || Recogniser::load(options))
}

/// The service: one decoder on a thread of its own.
struct Recogniser {
    engine: EngineThread<Job>,
}

impl Recogniser {
    fn load(options: &AsrOptions) -> Result<Self, VerbError> {
        let grammar = options.grammar.as_deref().map(read_grammar).transpose()?;
        if grammar.is_none() && options.vocabulary == Vocabulary::Grammar {
            return Err(VerbError::NoGrammar);
        }
        let (vocabulary, folder) = (options.vocabulary, options.model_dir.clone());
        let make = move || {
            let engine = Pocketsphinx::load().map_err(|error| VerbError::Asr(error.into()))?;
            let files = ModelFiles::find(folder.as_deref()).map_err(VerbError::Asr)?;
            let mut engine = Engine {
                engine,
                files,
                grammar,
                vocabulary,
                decoder: None,
            };
            engine.switch(vocabulary).map_err(VerbError::Asr)?;
            Ok(engine)
        };
        let engine = EngineThread::start(make, |engine: &mut Engine, job| match job {
            Job::Hear { samples, reply } => {
                // A client that went away does not want to know.
                let _ = reply.send(engine.hear(&samples));
            }
            Job::Resize { vocabulary, reply } => {
                let _ = reply.send(engine.resize(vocabulary));
            }
        })?;
        Ok(Self { engine })
    }
}

impl Service for Recogniser {
    type Session = Hearing;

    fn info(&self) -> Info {
        let english = |name: &str, description: &str| Model {
            artifact: artifact(name, description, "CMU Sphinx", "https://cmusphinx.github.io"),
            languages: vec!["en".to_owned(), "en-US".to_owned()],
            speakers: Vec::new(),
        };
        Info {
            asr: vec![AsrProgram {
                artifact: artifact(
                    "pocketsphinx",
                    "pocketsphinx with its English model",
                    "CMU Sphinx",
                    "https://cmusphinx.github.io",
                ),
                models: vec![
                    english(Vocabulary::Grammar.name(), "sentences of a grammar"),
                    english(Vocabulary::Open.name(), "any sentence"),
                ],
                supports_transcript_streaming: false,
            }],
            ..Info::default()
        }
    }

    fn session(&self) -> Hearing {
        Hearing {
            engine: self.engine.clone(),
            recording: None,
        }
    }
}

/// One connection.
struct Hearing {
    engine: EngineThread<Job>,
    recording: Option<Recording>,
}

/// Audio that is coming in.
struct Recording {
    decoder: PcmDecoder,
    audio: MonoAudio,
}

impl Session for Hearing {
    async fn handle(&mut self, event: Event, reply: &Reply) -> Result<(), SessionError> {
        match event {
            Event::AudioStart(start) => {
                let decoder = PcmDecoder::new(start.format).map_err(|error| bad(&error))?;
                self.recording = Some(Recording {
                    audio: MonoAudio::new(start.format.rate, Vec::new()),
                    decoder,
                });
                Ok(())
            }
            Event::AudioChunk(chunk) => {
                let recording = self
                    .recording
                    .as_mut()
                    .ok_or_else(|| Refusal::new(BAD_REQUEST, "`audio-chunk` without `audio-start`"))?;
                if chunk.format != recording.decoder.format() {
                    return Err(
                        Refusal::new(BAD_REQUEST, "`audio-chunk` differs in format from its `audio-start`").into(),
                    );
                }
                recording.audio.samples.extend(recording.decoder.push(&chunk.audio));
                let duration = recording.audio.duration();
                if duration > RECORDING_MAX {
                    let text = format!(
                        "recording of {:.1} s is longer than the limit of {:.1} s",
                        duration.as_secs_f64(),
                        RECORDING_MAX.as_secs_f64()
                    );
                    return Err(Refusal::new("too-long", text).into());
                }
                Ok(())
            }
            Event::AudioStop(_) => {
                let recording = self.recording.take();
                let text = self.hear(recording).await?;
                let transcript = Event::Transcript(Transcript {
                    text,
                    language: Some("en".to_owned()),
                    context: None,
                });
                Ok(reply.send(transcript).await?)
            }
            Event::Resize(wanted) => {
                let vocabulary = Vocabulary::named(&wanted.variant).ok_or_else(|| {
                    let text = format!("no variant `{}`; there are `grammar` and `open`", wanted.variant);
                    Refusal::new(BAD_REQUEST, text)
                })?;
                let ask = |reply| Job::Resize { vocabulary, reply };
                let rss = self.engine.ask(ask).await.ok_or_else(busy)?;
                let rss = rss.map_err(|error| Refusal::new("cannot-resize", error.to_string()))?;
                let resized = Event::Resized(Resized {
                    variant: vocabulary.name().to_owned(),
                    rss_bytes: rss.map(Bytes::get),
                });
                Ok(reply.send(resized).await?)
            }
            _ => Ok(()),
        }
    }
}

impl Hearing {
    async fn hear(&self, recording: Option<Recording>) -> Result<String, Refusal> {
        // Nothing recorded is nothing said.
        let Some(mut audio) = recording
            .map(|recording| recording.audio)
            .filter(|audio| !audio.samples.is_empty())
        else {
            return Ok(String::new());
        };
        audio = audio.resampled(ASR_RATE_HZ).map_err(|error| bad(&error))?;
        audio.pad(PAD_BEFORE, PAD_AFTER);
        let samples = audio.samples;
        let heard = self.engine.ask(|reply| Job::Hear { samples, reply }).await;
        heard
            .ok_or_else(busy)?
            .map_err(|error| Refusal::new("engine-failed", error.to_string()))
    }
}

fn bad(error: &dyn std::error::Error) -> Refusal {
    Refusal::new(BAD_REQUEST, error.to_string())
}

fn busy() -> Refusal {
    Refusal::new("busy", "too many requests wait for the recogniser")
}

/// What the engine's thread is asked.
enum Job {
    Hear {
        samples: Vec<i16>,
        reply: oneshot::Sender<Result<String, SphinxError>>,
    },
    Resize {
        vocabulary: Vocabulary,
        reply: oneshot::Sender<Result<Option<Bytes>, SphinxError>>,
    },
}

/// The decoder and what is needed to load another.
struct Engine {
    engine: Pocketsphinx,
    files: ModelFiles,
    grammar: Option<String>,
    vocabulary: Vocabulary,
    /// `None` only after a load failed.
    decoder: Option<Decoder>,
}

impl Engine {
    fn hear(&mut self, samples: &[i16]) -> Result<String, SphinxError> {
        if self.decoder.is_none() {
            self.switch(self.vocabulary)?;
        }
        self.decoder
            .as_mut()
            .map_or(Ok(String::new()), |decoder| decoder.hear(samples))
    }

    /// Takes another size; returns the resident set afterwards.
    fn resize(&mut self, vocabulary: Vocabulary) -> Result<Option<Bytes>, SphinxError> {
        if vocabulary == self.vocabulary && self.decoder.is_some() {
            return Ok(own_rss());
        }
        let before = self.vocabulary;
        if let Err(error) = self.switch(vocabulary) {
            // Better the old size than none.
            self.switch(before)?;
            return Err(error);
        }
        tracing::info!(from = %before, to = %vocabulary, "switched");
        Ok(own_rss())
    }

    /// Frees the old model before the new one is loaded, so that both never lie in memory together.
    fn switch(&mut self, vocabulary: Vocabulary) -> Result<(), SphinxError> {
        let search = match (vocabulary, &self.grammar) {
            (Vocabulary::Open, _) => Search::Open(self.files.language.clone()),
            (Vocabulary::Grammar, Some(grammar)) => Search::Grammar(grammar.clone()),
            (Vocabulary::Grammar, None) => return Err(SphinxError::Grammar),
        };
        self.decoder = None;
        trim();
        self.decoder = Some(self.engine.decoder(&self.files, &search)?);
        self.vocabulary = vocabulary;
        // Loading leaves buffers behind.
        trim();
        Ok(())
    }
}

fn read_grammar(path: &Path) -> Result<String, VerbError> {
    let failed = |source| VerbError::Grammar {
        path: path.to_owned(),
        source,
    };
    let file = fs::File::open(path).map_err(failed)?;
    let mut text = String::new();
    file.take(GRAMMAR_MAX.get() + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    let bytes = Bytes::of_len(text.len());
    if bytes > GRAMMAR_MAX {
        return Err(VerbError::GrammarTooLong {
            path: path.to_owned(),
            bytes,
        });
    }
    Ok(text)
}

/// Longest grammar that is read: a household's sentences have a few KiB.
pub(super) const GRAMMAR_MAX: Bytes = Bytes::from_kib(256);

/// Longest recording, 1.9 MB at 16 kHz; a spoken command has 2 to 5 s.
const RECORDING_MAX: Duration = Duration::from_secs(60);

/// Silence put around a recording. Without it the first and last word are lost: 12 of 12 commands are heard with it.
const PAD_BEFORE: Duration = Duration::from_millis(300);
const PAD_AFTER: Duration = Duration::from_millis(500);
