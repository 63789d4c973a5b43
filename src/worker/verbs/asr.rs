//! `cotenant worker asr`: Wyoming recogniser on pocketsphinx, in two sizes.

use std::{
    fmt, fs,
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::{
    error::VerbError,
    pocketsphinx::{Decoder, ModelFiles, Pocketsphinx, Search, SphinxError},
    serve::{EngineThread, ListenArgs, artifact, keep_large_blocks_apart, own_rss, serve, trim},
};
use cotenant_speech::{
    audio::{ASR_RATE_HZ, MonoAudio, PcmDecoder},
    resample::Resampler,
    server::{
        Activity, BAD_REQUEST, BUSY, Refusal, Reply, Service, Session, SessionError, TOO_LONG,
    },
    wyoming::{
        AudioFormat, Event, Info,
        event::{Resized, Text, Transcript, TranscriptStart},
        info::{AsrProgram, Model},
    },
};
use cotenant_units::Bytes;

/// Options of `cotenant worker asr`.
#[derive(Clone, Debug, clap::Args)]
pub struct AsrOptions {
    /// Listening address.
    #[command(flatten)]
    pub listen: ListenArgs,
    // At the start; clients may switch by `cotenant-resize`.
    /// Sentences of a grammar (33 MB), or any English sentence (102 MB)
    #[arg(long, value_enum, default_value_t = Vocabulary::Open)]
    pub vocabulary: Vocabulary,
    /// JSGF file for `--vocabulary grammar`
    #[arg(long, value_name = "FILE")]
    pub grammar: Option<PathBuf>,
    /// Folder of the acoustic model [default: that of the package `pocketsphinx-en-us`]
    #[arg(long, value_name = "DIR")]
    pub model_dir: Option<PathBuf>,
}

/// What a recogniser understands; the names are its variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Vocabulary {
    /// `grammar`: the sentences of a JSGF file. About 33 MB.
    #[value(help = None)]
    Grammar,
    /// `open`: any English sentence, by a language model. About 102 MB.
    #[value(help = None)]
    Open,
}

impl Vocabulary {
    /// Returns the vocabulary with this name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Grammar, Self::Open]
            .into_iter()
            .find(|known| known.name() == name)
    }

    /// Returns its name as a variant.
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
/// If the engine or its model cannot be loaded, or the address cannot be bound.
pub fn run_asr(options: &AsrOptions) -> Result<(), VerbError> {
    keep_large_blocks_apart();
    serve(&options.listen.endpoint(), || Recogniser::load(options))
}

/// Service with one decoder on its own thread.
struct Recogniser {
    engine: EngineThread<Job>,
    /// Samples that may still be recorded, over all connections.
    room: Arc<Semaphore>,
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
                // A disconnected client does not need the result.
                let _ = reply.send(engine.hear(&samples));
            }
            Job::Resize { vocabulary, reply } => {
                let _ = reply.send(engine.resize(vocabulary));
            }
        })?;
        Ok(Self {
            engine,
            room: Arc::new(Semaphore::new(RECORDED_SAMPLES_MAX)),
        })
    }
}

impl Service for Recogniser {
    type Session = Hearing;

    fn info(&self) -> Info {
        let english = |name: &str, description: &str| Model {
            artifact: artifact(
                name,
                description,
                "CMU Sphinx",
                "https://cmusphinx.github.io",
            ),
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
            room: Arc::clone(&self.room),
            recording: None,
        }
    }
}

struct Hearing {
    engine: EngineThread<Job>,
    room: Arc<Semaphore>,
    recording: Option<Recording>,
}

/// Incoming audio in the engine's format.
struct Recording {
    decoder: PcmDecoder,
    resampler: Option<Resampler>,
    samples: Vec<i16>,
    room: Arc<Semaphore>,
    /// Permits for the capacity of `samples`.
    held: Vec<OwnedSemaphorePermit>,
}

impl Recording {
    fn new(format: AudioFormat, room: Arc<Semaphore>) -> Result<Self, Refusal> {
        let resampler = match format.rate {
            ASR_RATE_HZ => None,
            rate => Some(Resampler::new(rate, ASR_RATE_HZ).map_err(|error| bad(&error))?),
        };
        Ok(Self {
            decoder: PcmDecoder::new(format).map_err(|error| bad(&error))?,
            resampler,
            samples: Vec::new(),
            room,
            held: Vec::new(),
        })
    }

    fn push(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        let samples = self.decoder.push(bytes);
        let samples = match &mut self.resampler {
            None => samples,
            Some(resampler) => resampler.push(&samples).map_err(|error| bad(&error))?,
        };
        if self.samples.len() + samples.len() > RECORDING_SAMPLES_MAX {
            let text = format!(
                "recording is longer than the limit of {} s",
                RECORDING_MAX.as_secs()
            );
            return Err(Refusal::new(TOO_LONG, text));
        }
        if self.samples.capacity() < self.samples.len() + samples.len() {
            // Doubling would take up to twice the final size.
            let step = RECORDING_STEP.max(samples.len());
            let permits = u32::try_from(step).unwrap_or(u32::MAX);
            let held = Arc::clone(&self.room)
                .try_acquire_many_owned(permits)
                .map_err(|_full| {
                    let text = format!(
                        "other recordings leave less than {} s of capacity",
                        RECORDED_SAMPLES_MAX / RATE
                    );
                    Refusal::new(BUSY, text)
                })?;
            self.held.push(held);
            self.samples.reserve_exact(step);
        }
        self.samples.extend(samples);
        Ok(())
    }

    /// Returns the samples with their permits.
    fn finish(mut self) -> Result<(Vec<i16>, Vec<OwnedSemaphorePermit>), Refusal> {
        if let Some(resampler) = self.resampler {
            self.samples
                .extend(resampler.finish().map_err(|error| bad(&error))?);
        }
        Ok((self.samples, self.held))
    }
}

impl Session for Hearing {
    async fn handle(&mut self, event: Event, reply: &Reply) -> Result<(), SessionError> {
        match event {
            Event::AudioStart(start) => {
                self.recording = Some(Recording::new(start.format, Arc::clone(&self.room))?);
                Ok(())
            }
            Event::AudioChunk(chunk) => {
                let recording = self.recording.as_mut().ok_or_else(|| {
                    Refusal::new(BAD_REQUEST, "`audio-chunk` without `audio-start`")
                })?;
                if chunk.format != recording.decoder.format() {
                    return Err(Refusal::new(
                        BAD_REQUEST,
                        "`audio-chunk` differs in format from its `audio-start`",
                    )
                    .into());
                }
                Ok(recording.push(&chunk.audio)?)
            }
            Event::AudioStop(_) => {
                let recording = self.recording.take();
                // An empty recording is silence.
                let (samples, _held) = recording.map_or(Ok(<_>::default()), Recording::finish)?;
                let text = hear(&self.engine, &samples, reply).await?;
                let transcript = Event::Transcript(Transcript {
                    text,
                    language: Some("en".to_owned()),
                    context: None,
                });
                Ok(reply.send(transcript).await?)
            }
            Event::Resize(wanted) => {
                let vocabulary = Vocabulary::named(&wanted.variant).ok_or_else(|| {
                    let text = format!(
                        "no variant `{}`; known are `grammar` and `open`",
                        wanted.variant
                    );
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

    fn activity(&self) -> Activity {
        match self.recording {
            Some(_) => Activity::Receiving,
            None => Activity::Idle,
        }
    }
}

/// Transcribes a recording. A long one is recognised in parts, each followed by a partial transcript, which shows
/// progress; recordings of other clients are recognised in between.
async fn hear(
    engine: &EngineThread<Job>,
    samples: &[i16],
    reply: &Reply,
) -> Result<String, SessionError> {
    if samples.len() <= PART_MAX {
        return Ok(hear_part(engine, samples).await?);
    }
    reply
        .send(Event::TranscriptStart(TranscriptStart::default()))
        .await?;
    let mut text = String::new();
    for part in parts_of(samples) {
        let mut heard = hear_part(engine, part).await?;
        if !heard.is_empty() && !text.is_empty() {
            heard.insert(0, ' ');
        }
        text.push_str(&heard);
        reply
            .send(Event::TranscriptChunk(Text { text: heard }))
            .await?;
    }
    Ok(text)
}

async fn hear_part(engine: &EngineThread<Job>, samples: &[i16]) -> Result<String, Refusal> {
    if samples.is_empty() {
        return Ok(String::new());
    }
    let mut audio = MonoAudio::new(ASR_RATE_HZ, samples.to_vec());
    audio.pad(PAD_BEFORE, PAD_AFTER);
    let samples = audio.samples;
    let heard = engine.ask(|reply| Job::Hear { samples, reply }).await;
    heard
        .ok_or_else(busy)?
        .map_err(|error| Refusal::new("engine-failed", error.to_string()))
}

/// Splits a long recording at pauses or, if there is none for too long, where it is quietest.
fn parts_of(samples: &[i16]) -> Vec<&[i16]> {
    let level = |frame: &[i16]| {
        frame
            .iter()
            .map(|sample| u64::from(sample.unsigned_abs()))
            .sum::<u64>()
    };
    let levels: Vec<u64> = samples.chunks(FRAME).map(level).collect();
    let mut sorted = levels.clone();
    sorted.sort_unstable();
    let loud = sorted.get(sorted.len() * 9 / 10).copied().unwrap_or(0);
    let quiet = (loud / QUIET_SHARE).max(QUIET_LEVEL * FRAME as u64);
    let mut parts = Vec::new();
    let (mut rest, mut levels) = (samples, levels.as_slice());
    while !rest.is_empty() {
        let frames = part_frames(levels, quiet);
        let (part, behind) = rest.split_at((frames * FRAME).min(rest.len()));
        parts.push(part);
        rest = behind;
        levels = levels.get(frames..).unwrap_or_default();
    }
    parts
}

/// Returns the number of frames up to the middle of the first pause after speech.
fn part_frames(levels: &[u64], quiet: u64) -> usize {
    let (mut spoken, mut pause) = (false, 0);
    for (at, &level) in levels.iter().enumerate().take(PART_MAX / FRAME) {
        if level > quiet {
            (spoken, pause) = (true, 0);
        } else {
            pause += 1;
        }
        if spoken && pause == PAUSE_FRAMES {
            return at + 1 - PAUSE_FRAMES / 2;
        }
    }
    let most = PART_MAX / FRAME;
    if levels.len() <= most {
        return levels.len().max(1);
    }
    let quietest = (most * 2 / 3..most).min_by_key(|&at| levels.get(at).copied().unwrap_or(0));
    quietest.unwrap_or(most) + 1
}

fn bad(error: &dyn std::error::Error) -> Refusal {
    Refusal::new(BAD_REQUEST, error.to_string())
}

fn busy() -> Refusal {
    Refusal::new(BUSY, "too many requests wait for the recogniser")
}

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

/// Decoder, with the settings for loading another one.
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

    /// Switches to another vocabulary; returns the resident set size afterwards.
    fn resize(&mut self, vocabulary: Vocabulary) -> Result<Option<Bytes>, SphinxError> {
        if vocabulary == self.vocabulary && self.decoder.is_some() {
            return Ok(own_rss());
        }
        let before = self.vocabulary;
        if let Err(error) = self.switch(vocabulary) {
            // Restore the old vocabulary.
            self.switch(before)?;
            return Err(error);
        }
        tracing::info!(from = %before, to = %vocabulary, "switched");
        Ok(own_rss())
    }

    /// Frees the old model before the new one is loaded, so that only one is in memory.
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
        // Loading leaves free buffers in the heap.
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
            most: GRAMMAR_MAX,
        });
    }
    Ok(text)
}

/// Maximum length of a grammar; that of a household has a few KiB.
const GRAMMAR_MAX: Bytes = Bytes::from_kib(256);

/// Longest recording, 18.3 MiB, equal to the limit in `http`; a spoken command lasts 2 to 5 s.
const RECORDING_MAX: Duration = Duration::from_mins(10);
const RECORDING_SAMPLES_MAX: usize = 600 * RATE;

/// Samples by which the memory of a recording grows: 4 s, longer than a command.
const RECORDING_STEP: usize = 1 << 16;

/// Limit on all recordings together, 24 MiB: the longest one and several commands.
const RECORDED_SAMPLES_MAX: usize = 12 << 20;

/// Longest part recognised at once. Our choice: completed within seconds on a slow board, and longer than any command.
const PART_MAX: usize = 15 * RATE;

/// Frame of 50 ms; 0.7 s of quiet frames are a pause.
const FRAME: usize = RATE / 20;
const PAUSE_FRAMES: usize = 14;

/// Quiet is a twentieth of the loud parts, or the noise of a silent room.
const QUIET_SHARE: u64 = 20;
const QUIET_LEVEL: u64 = 60;

/// [`ASR_RATE_HZ`] as `usize`.
const RATE: usize = ASR_RATE_HZ as usize;

/// Silence added before a recording. Without padding, the first and last words are lost; with it, 12 of 12 commands are
/// recognised.
const PAD_BEFORE: Duration = Duration::from_millis(300);
const PAD_AFTER: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_recording_is_cut_in_its_pauses_and_nothing_of_it_is_lost() {
        let spoken =
            |seconds: usize| (0..seconds * RATE).map(|at| if at % 80 < 40 { 4000 } else { -4000 });
        let silence = |tenths: usize| std::iter::repeat_n(3i16, tenths * RATE / 10);
        let mut samples: Vec<i16> = silence(10).chain(spoken(3)).chain(silence(20)).collect();
        samples.extend(spoken(4).chain(silence(5)).chain(spoken(40)));
        let parts = parts_of(&samples);
        assert_eq!(parts.concat(), samples);
        assert!(parts.iter().all(|part| part.len() <= PART_MAX));
        let first = parts[0].len();
        assert!(
            (4 * RATE..5 * RATE).contains(&first),
            "cut in the first pause: {first}"
        );
        // Half a second is not a pause; audio without a pause is split nevertheless.
        assert!(parts[1].len() > 10 * RATE, "{}", parts[1].len());
        assert_eq!(
            parts.len(),
            6,
            "{:?}",
            parts.iter().map(|part| part.len()).collect::<Vec<_>>()
        );
        assert_eq!(parts_of(&vec![0; 40 * RATE]).concat().len(), 40 * RATE);
    }
}
