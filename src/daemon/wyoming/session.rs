//! Wyoming connection: its event sequence and its current task.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::BoxFuture;
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use super::{
    pipeline::{FirstStage, Input, LastStage, Pipeline, Run, VoiceChoice},
    refuse::error_of,
    shared::{AUDIO_KIB_MAX, Api, Ask, Asked},
};
use crate::voice::is_same_language;
use cotenant_conversation::refusals::{at_limit, invalid};
use cotenant_speech::{
    audio::{ASR_RATE_HZ, AudioError, MonoAudio, PcmDecoder},
    resample::Resampler,
    server::{
        self, Activity, BAD_REQUEST, HELD_KIB, Hold, NOT_SUPPORTED, Reply, Session, SessionError,
    },
    voice_activity::{VoiceDetector, VoiceEdge, comes_as_spoken},
    wyoming::{
        AudioFormat, Event,
        event::{RunPipeline, Voice},
        info::Model,
    },
};
use cotenant_units::lock::locked;

pub(crate) struct Connection {
    api: Api,
    language: Option<String>,
    recording: Option<Recording>,
    /// Requested stages, if there are several.
    pipeline: Option<Pipeline>,
    /// Text being spoken while it is written.
    text: Option<Text>,
    job: Option<Job>,
    /// Answer to an utterance that has probably ended.
    early: Option<Early>,
}

/// Work ahead of the end of an utterance; its answers are held until then.
struct Early {
    job: Job,
    ask: Ask,
    hold: Hold,
    /// Memory of held answers.
    _room: OwnedSemaphorePermit,
    unwanted: BoxFuture<'static, ()>,
}

struct Text {
    pieces: mpsc::Sender<String>,
    bytes: usize,
}

/// Task running for the client.
struct Job {
    task: JoinHandle<Result<(), SessionError>>,
    unwanted: CancellationToken,
}

impl Drop for Job {
    /// Cancels the task and frees its resources.
    fn drop(&mut self) {
        self.unwanted.cancel();
    }
}

impl Job {
    async fn end(&mut self) -> Result<(), SessionError> {
        match (&mut self.task).await {
            Ok(done) => done,
            Err(error) => Err(server::Refusal::new(
                "internal",
                format!("the answer panicked: {error}"),
            )
            .into()),
        }
    }
}

impl Connection {
    pub(super) const fn new(api: Api) -> Self {
        Self {
            api,
            language: None,
            recording: None,
            pipeline: None,
            text: None,
            job: None,
            early: None,
        }
    }

    /// Waits for the current task. Requests on one connection are answered in order.
    async fn settle(&mut self) -> Result<(), SessionError> {
        (self.text, self.early) = (None, None);
        match self.job.take() {
            Some(mut job) => job.end().await,
            None => Ok(()),
        }
    }

    /// Cancels the current task, because a new utterance has begun.
    async fn barge_in(&mut self) -> Result<(), SessionError> {
        (self.text, self.early) = (None, None);
        let Some(mut job) = self.job.take() else {
            return Ok(());
        };
        job.unwanted.cancel();
        match job.end().await {
            // The refusal is already sent; later events begin another exchange.
            Err(SessionError::Refused(_)) | Ok(()) => Ok(()),
            Err(lost) => Err(lost),
        }
    }

    fn start(&mut self, begin: Input, last: LastStage, reply: &Reply) {
        self.job = Some(self.run(begin, last, reply.clone(), Asked::now()));
    }

    fn run(&self, begin: Input, last: LastStage, reply: Reply, asked: Asked) -> Job {
        let unwanted = CancellationToken::new();
        let run = Run::new(self.api.clone(), reply, unwanted.clone(), asked);
        let task = tokio::spawn(run.run(begin, last));
        Job { task, unwanted }
    }

    /// Returns the last stage for an utterance.
    fn last_stage(&self) -> LastStage {
        match self.pipeline {
            Some(Pipeline {
                from: FirstStage::Audio,
                to,
            }) => to,
            Some(_) | None => LastStage::Text,
        }
    }

    /// Starts work ahead if the utterance has probably ended, and drops it if the utterance continues.
    fn look_ahead(&mut self, edges: &[VoiceEdge], reply: &Reply) {
        for edge in edges {
            if !matches!(edge, VoiceEdge::Paused(_)) && self.early.take().is_some() {
                locked(&self.api.0.early_pause).went_on();
            }
        }
        let Some(VoiceEdge::Paused(_)) = edges.last() else {
            return;
        };
        let copied = self
            .recording
            .as_ref()
            .filter(|_| self.job.is_none())
            .and_then(|recording| recording.copied(&self.api));
        let room = Arc::clone(&self.api.0.audio).try_acquire_many_owned(HELD_KIB);
        let (Some((audio, held)), Ok(room)) = (copied, room) else {
            return;
        };
        // From here on, other requests may cancel it.
        let unwanted = self.api.0.answers.unwanted();
        let begin = Input::Audio {
            audio,
            held: Some(held),
            language: self.language.clone(),
        };
        let (reply, hold) = reply.held();
        let (ask, asked) = Asked::later();
        let job = self.run(begin, self.last_stage(), reply, asked);
        self.early = Some(Early {
            job,
            ask,
            hold,
            _room: room,
            unwanted,
        });
    }

    /// Continues with the work done ahead, unless it failed.
    async fn take_early(&mut self, reply: &Reply) -> Result<bool, SessionError> {
        let Some(early) = self
            .early
            .take()
            .filter(|early| !early.job.task.is_finished())
        else {
            return Ok(false);
        };
        locked(&self.api.0.early_pause).ended();
        early.ask.ask();
        self.job = Some(early.job);
        reply.release(&early.hold).await?;
        Ok(true)
    }

    async fn begin_recording(&mut self, format: AudioFormat) -> Result<(), SessionError> {
        if self.pipeline.is_some() {
            self.barge_in().await?;
        } else {
            self.settle().await?;
        }
        let pause = locked(&self.api.0.early_pause).get();
        self.recording = Some(Recording::new(format, pause)?);
        Ok(())
    }

    /// Applies a `run-pipeline`.
    async fn set_pipeline(&mut self, wanted: &RunPipeline) -> Result<(), SessionError> {
        self.barge_in().await?;
        self.recording = None;
        self.pipeline = Some(Pipeline::parse(wanted).ok_or_else(|| {
            server::Refusal::new(
                BAD_REQUEST,
                format!(
                    "cannot run a pipeline from `{}` to `{}`: start and end must be `asr`, `handle` or `tts`, in this \
                     order",
                    wanted.start_stage.escape_debug(),
                    wanted.end_stage.escape_debug()
                ),
            )
        })?);
        Ok(())
    }

    /// Returns the voice for a request. An unknown name selects the default voice, as over HTTP; an unknown speaker is
    /// an error.
    fn voice(&self, wanted: Option<Voice>) -> Result<VoiceChoice, SessionError> {
        let wanted = wanted.unwrap_or_default();
        let api = &self.api.0;
        let info = api.cache.info();
        let mut voices: Vec<_> = info
            .tts
            .iter()
            .flat_map(|program| &program.voices)
            .collect();
        let speaker = wanted.speaker.filter(|speaker| !speaker.is_empty());
        let choice = |voice: Option<&Model>| VoiceChoice {
            voice: voice.map(|voice| voice.artifact.name.clone()),
            speaker: speaker.clone(),
        };
        let name = wanted.name.filter(|name| !name.is_empty());
        let name = name.map(|name| api.aliases.get(&name).cloned().unwrap_or(name));
        let named = name.and_then(|name| {
            let voice = voices.iter().find(|voice| voice.artifact.name == name).copied();
            if voice.is_none() {
                let shown: String = name.chars().take(SHOWN_MAX).collect();
                tracing::info!(voice = %shown.escape_debug(), "unknown voice; spoken by the default one");
            }
            voice
        });
        if let Some(voice) = named {
            let name = &voice.artifact.name;
            let known: Vec<&str> = voice
                .speakers
                .iter()
                .map(|speaker| speaker.name.as_str())
                .collect();
            return match &speaker {
                Some(speaker) if known.is_empty() => Err(unknown_speaker(
                    speaker,
                    &format!("the voice `{name}` has one speaker"),
                )),
                Some(speaker) if !known.contains(&speaker.as_str()) => {
                    let shown = known
                        .iter()
                        .take(SPEAKERS_SHOWN)
                        .map(|known| format!("`{known}`"));
                    let shown = shown.collect::<Vec<_>>().join(", ");
                    let count = known.len();
                    let known = format!("the voice `{name}` has {count} speakers: {shown}");
                    Err(unknown_speaker(speaker, &known))
                }
                _ => Ok(choice(Some(voice))),
            };
        }
        if let Some(speaker) = &speaker {
            // Without a voice, select the first one with this speaker.
            voices.retain(|voice| voice.speakers.iter().any(|known| known.name == *speaker));
            if voices.is_empty() {
                return Err(unknown_speaker(speaker, "no installed voice has it"));
            }
        }
        let Some(language) = wanted.language.filter(|language| !language.is_empty()) else {
            // The worker's default, except for a speaker that only one voice has.
            return Ok(choice(
                voices.first().copied().filter(|_| speaker.is_some()),
            ));
        };
        let speaks = |tags: &[String]| tags.iter().any(|tag| is_same_language(tag, &language));
        match voices.iter().find(|voice| speaks(&voice.languages)) {
            Some(voice) => Ok(choice(Some(voice))),
            None if voices.iter().all(|voice| voice.languages.is_empty()) => Ok(choice(None)),
            None => {
                let shown: String = language.chars().take(SHOWN_MAX).collect();
                let problem = "is not a language of an installed voice";
                Err(error_of(&invalid("voice.language", shown, problem)).into())
            }
        }
    }
}

impl Session for Connection {
    async fn handle(&mut self, event: Event, reply: &Reply) -> Result<(), SessionError> {
        match event {
            Event::RunPipeline(wanted) => self.set_pipeline(&wanted).await,
            Event::Transcribe(wanted) => {
                self.language = wanted.language.filter(|language| !language.is_empty());
                Ok(())
            }
            Event::AudioStart(start) => self.begin_recording(start.format).await,
            Event::AudioChunk(chunk) => {
                if self.recording.is_none() {
                    // Clients of old protocol versions send no `audio-start`.
                    self.begin_recording(chunk.format).await?;
                }
                if let Some(recording) = &mut self.recording {
                    let edges = recording.push(chunk.format, &chunk.audio, &self.api)?;
                    self.look_ahead(&edges, reply);
                }
                Ok(())
            }
            Event::AudioStop(_) => {
                let recording = self.recording.take();
                if self.take_early(reply).await? {
                    return Ok(());
                }
                self.settle().await?;
                let (audio, held) = match recording {
                    Some(recording) => recording.finish()?,
                    None => (MonoAudio::new(ASR_RATE_HZ, Vec::new()), None),
                };
                let begin = Input::Audio {
                    audio,
                    held,
                    language: self.language.clone(),
                };
                self.start(begin, self.last_stage(), reply);
                Ok(())
            }
            Event::Transcript(said) => {
                self.barge_in().await?;
                // Typed text goes through the same stages as speech.
                let last = self.pipeline.map_or(LastStage::Answer, |pipeline| {
                    pipeline.to.max(LastStage::Answer)
                });
                let begin = Input::Text {
                    text: said.text,
                    context: said.context.unwrap_or_default(),
                };
                self.start(begin, last, reply);
                Ok(())
            }
            // Within a stream, the whole text is sent again for servers without streaming.
            Event::Synthesize(_) if self.text.is_some() => Ok(()),
            Event::Synthesize(wanted) => {
                self.settle().await?;
                server::check_text_length(wanted.text.len())?;
                let voice = self.voice(wanted.voice)?;
                let begin = Input::Words {
                    text: wanted.text,
                    voice,
                };
                self.start(begin, LastStage::Speech, reply);
                Ok(())
            }
            Event::SynthesizeStart(wanted) => {
                self.settle().await?;
                let voice = self.voice(wanted.voice)?;
                let (pieces, written) = mpsc::channel(PIECES_QUEUED);
                self.text = Some(Text { pieces, bytes: 0 });
                self.start(Input::Pieces { written, voice }, LastStage::Speech, reply);
                Ok(())
            }
            Event::SynthesizeChunk(piece) => {
                let Some(text) = &mut self.text else {
                    return Err(server::Refusal::new(
                        BAD_REQUEST,
                        "`synthesize-chunk` without `synthesize-start`",
                    )
                    .into());
                };
                text.bytes += piece.text.len();
                server::check_text_length(text.bytes)?;
                // The receiver is dropped only after a failure, which it reports itself.
                let _ = text.pieces.send(piece.text).await;
                Ok(())
            }
            Event::SynthesizeStop => match self.text.take() {
                Some(_) => Ok(()),
                None => Err(server::Refusal::new(
                    BAD_REQUEST,
                    "`synthesize-stop` without `synthesize-start`",
                )
                .into()),
            },
            // Clients wait for an answer to these for as long as the connection is open.
            Event::Other(frame) if matches!(frame.kind.as_str(), "recognize" | "detect") => {
                let text = format!(
                    "no service for `{}` is configured (hint: send `transcript` to the assistant)",
                    frame.kind
                );
                Err(server::Refusal::new(NOT_SUPPORTED, text).into())
            }
            _ => Ok(()),
        }
    }

    async fn progress(&mut self) -> Result<(), SessionError> {
        match (&mut self.job, &mut self.early) {
            (Some(job), _) => {
                let done = job.end().await;
                self.job = None;
                done
            }
            (None, Some(early)) => {
                (&mut early.unwanted).await;
                self.early = None;
                Ok(())
            }
            (None, None) => std::future::pending().await,
        }
    }

    fn activity(&self) -> Activity {
        if self.job.is_some() && self.text.is_none() {
            Activity::Working
        } else if self.recording.is_some() || self.text.is_some() {
            Activity::Receiving
        } else {
            Activity::Idle
        }
    }
}

/// Incoming audio in the recogniser's format.
struct Recording {
    decoder: PcmDecoder,
    resampler: Option<Resampler>,
    audio: MonoAudio,
    held: Option<OwnedSemaphorePermit>,
    detector: VoiceDetector,
    began: Instant,
}

impl Recording {
    fn new(format: AudioFormat, pause: Duration) -> Result<Self, SessionError> {
        let resampler = match format.rate {
            ASR_RATE_HZ => None,
            rate => Some(Resampler::new(rate, ASR_RATE_HZ).map_err(|error| bad(&error.into()))?),
        };
        // The client determines the end.
        let mut detector = VoiceDetector::new(ASR_RATE_HZ, THRESHOLD, Duration::MAX);
        detector.set_early_pause(pause);
        Ok(Self {
            decoder: PcmDecoder::new(format).map_err(|error| bad(&error))?,
            resampler,
            audio: MonoAudio::new(ASR_RATE_HZ, Vec::new()),
            held: None,
            detector,
            began: Instant::now(),
        })
    }

    /// Adds a piece, and returns where speech starts, pauses and resumes in it.
    fn push(
        &mut self,
        format: AudioFormat,
        bytes: &[u8],
        api: &Api,
    ) -> Result<Vec<VoiceEdge>, SessionError> {
        if format != self.decoder.format() {
            return Err(server::Refusal::new(
                BAD_REQUEST,
                "`audio-chunk` differs in format from its `audio-start`",
            )
            .into());
        }
        let mut samples = self.decoder.push(bytes);
        if let Some(resampler) = &mut self.resampler {
            samples = resampler
                .push(&samples)
                .map_err(|error| bad(&error.into()))?;
        }
        self.audio.samples.extend_from_slice(&samples);
        let (duration, limit) = (self.audio.duration(), api.0.settings.audio_max);
        if duration > limit {
            return Err(server::Refusal::new(
                "too-long",
                AudioError::TooLong { duration, limit }.to_string(),
            )
            .into());
        }
        self.hold(api)?;
        Ok(self.detector.push(&samples))
    }

    /// Returns a copy of the audio so far, if it arrives in real time and there is memory for the copy.
    fn copied(&self, api: &Api) -> Option<(MonoAudio, OwnedSemaphorePermit)> {
        if !comes_as_spoken(self.audio.duration(), self.began.elapsed()) {
            return None;
        }
        let kib = u32::try_from(kib_of(&self.audio)).ok()?;
        let held = Arc::clone(&api.0.audio).try_acquire_many_owned(kib).ok()?;
        Some((self.audio.clone(), held))
    }

    /// Reserves its share of the memory for audio.
    fn hold(&mut self, api: &Api) -> Result<(), SessionError> {
        let needed = kib_of(&self.audio);
        let held = self
            .held
            .as_ref()
            .map_or(0, OwnedSemaphorePermit::num_permits);
        let more = u32::try_from(needed.saturating_sub(held)).unwrap_or(u32::MAX);
        if more == 0 {
            return Ok(());
        }
        let Ok(permit) = Arc::clone(&api.0.audio).try_acquire_many_owned(more) else {
            let what = "the memory for audio, in KiB,";
            let refusal = at_limit("record the utterance", what, AUDIO_KIB_MAX);
            return Err(error_of(&refusal).into());
        };
        match &mut self.held {
            Some(held) => held.merge(permit),
            None => self.held = Some(permit),
        }
        Ok(())
    }

    fn finish(mut self) -> Result<(MonoAudio, Option<OwnedSemaphorePermit>), SessionError> {
        if let Some(resampler) = self.resampler.take() {
            let rest = resampler.finish().map_err(|error| bad(&error.into()))?;
            self.audio.samples.extend(rest);
        }
        Ok((self.audio, self.held))
    }
}

/// Returns the memory of recorded samples in KiB.
fn kib_of(audio: &MonoAudio) -> usize {
    (2 * audio.samples.len()).div_ceil(1024)
}

fn unknown_speaker(speaker: &str, problem: &str) -> SessionError {
    let shown: String = speaker.chars().take(SHOWN_MAX).collect();
    let problem = format!("is not known: {problem}");
    error_of(&invalid("voice.speaker", shown, problem)).into()
}

fn bad(error: &AudioError) -> SessionError {
    server::Refusal::new(BAD_REQUEST, error.to_string()).into()
}

/// Bound of the queue of text pieces to the voice; if it is full, the connection is not read.
const PIECES_QUEUED: usize = 64;

/// Threshold for detecting pauses: OpenAI's default for turns.
const THRESHOLD: f64 = 0.5;

/// Speakers listed in an error: some voices have hundreds.
const SPEAKERS_SHOWN: usize = 10;

/// Characters of a value shown in an error.
const SHOWN_MAX: usize = 80;
