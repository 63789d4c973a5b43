//! Speech pipeline of one utterance: recogniser, LLM, voice.
//!
//! ```text
//! audio ─► recogniser ─► transcript ─► LLM ─► pieces of text ─► sentences ─► voice ─► audio
//! ```
//!
//! The voice speaks the first sentence while the rest of the answer is still being generated. Cancelling drops every
//! stage: the LLM's request is cancelled, and its KV is freed.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::StreamExt as _;
use serde_json::{Map, Value};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::sync::CancellationToken;

use super::{
    refuse::{error_of, not_handled},
    shared::{Api, Asked, Counted, DONE, NOT_NOW, WRONG},
};
use cotenant_conversation::{
    refusal::Refusal,
    refusals::{Passing, not_configured},
};
use cotenant_http::{
    backend::{
        AnswerPart, ChatEvent, ChatMessage, ChatRequest, Prompt, RequestMeta, Role, RunningAnswer,
        SpeechRequest, TranscribeRequest, Transcript,
    },
    patiently,
};
use cotenant_speech::{
    audio::{MonoAudio, pcm_bytes},
    sentences::Sentences,
    server::{Reply, SessionError},
    wyoming::{
        AudioFormat, Event,
        event::{
            AudioChunk, AudioStart, AudioStop, Handled, HandledStart, RunPipeline, Text,
            Transcript as Written, TranscriptStart,
        },
    },
};
use cotenant_telemetry::{Span, SpanKind};
use cotenant_units::{Tokens, lock::locked, millis};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pipeline {
    pub(super) from: FirstStage,
    pub(super) to: LastStage,
}

/// First stage, which determines the client's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstStage {
    /// As `audio-start`, `audio-chunk`, `audio-stop`.
    Audio,
    /// As `transcript`.
    Text,
    /// As `synthesize`.
    Words,
}

/// Last stage, which determines the client's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LastStage {
    /// The transcript.
    Text,
    /// The LLM's answer.
    Answer,
    /// The answer as speech.
    Speech,
}

impl Pipeline {
    /// Returns the requested pipeline; `None` if its stages are unknown or out of order.
    pub(super) fn parse(wanted: &RunPipeline) -> Option<Self> {
        let from = match wanted.start_stage.as_str() {
            "asr" => FirstStage::Audio,
            "intent" | "handle" => FirstStage::Text,
            "tts" => FirstStage::Words,
            _ => return None,
        };
        let to = match wanted.end_stage.as_str() {
            "asr" => LastStage::Text,
            "intent" | "handle" => LastStage::Answer,
            "tts" => LastStage::Speech,
            _ => return None,
        };
        let least = match from {
            FirstStage::Audio => LastStage::Text,
            FirstStage::Text => LastStage::Answer,
            FirstStage::Words => LastStage::Speech,
        };
        (to >= least).then_some(Self { from, to })
    }
}

pub(super) enum Input {
    /// An utterance.
    Audio {
        /// Samples at 16 kHz.
        audio: MonoAudio,
        /// Permit for its memory.
        held: Option<OwnedSemaphorePermit>,
        /// Its language, if known.
        language: Option<String>,
    },
    /// Text input.
    Text {
        text: String,
        /// Context with the name of its conversation.
        context: Map<String, Value>,
    },
    /// Text to be spoken.
    Words {
        text: String,
        /// Requested voice.
        voice: VoiceChoice,
    },
    /// Text to be spoken, in pieces.
    Pieces {
        written: mpsc::Receiver<String>,
        voice: VoiceChoice,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct VoiceChoice {
    /// Name of the voice; `None` for the worker's default.
    pub(super) voice: Option<String>,
    /// Speaker of a multi-speaker voice.
    pub(super) speaker: Option<String>,
}

pub(super) struct Run {
    api: Api,
    reply: Reply,
    unwanted: CancellationToken,
    asked: Asked,
    span: Span,
    /// Counts all stages as one answer; `None` during a drain, which refuses them.
    answer: Option<RunningAnswer>,
}

/// Reason why a run ends early.
enum Failure {
    /// Reported to the client, whose connection is then closed.
    Refused(Refusal),
    /// The client is gone.
    Session(SessionError),
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<SessionError> for Failure {
    fn from(error: SessionError) -> Self {
        Self::Session(error)
    }
}

impl From<cotenant_speech::wyoming::FrameError> for Failure {
    fn from(error: cotenant_speech::wyoming::FrameError) -> Self {
        Self::Session(error.into())
    }
}

#[derive(Default)]
struct Answer {
    text: String,
    context: Map<String, Value>,
    begun: bool,
    first_after: Option<Duration>,
}

#[derive(Default)]
struct Spoken {
    format: Option<AudioFormat>,
    first_after: Option<Duration>,
}

impl Run {
    /// Creates a run that answers by `reply` until cancelled by `unwanted`; it works ahead if the client is yet to ask.
    pub(super) fn new(api: Api, reply: Reply, unwanted: CancellationToken, asked: Asked) -> Self {
        Self {
            api,
            reply,
            unwanted,
            asked,
            span: Span::default(),
            answer: None,
        }
    }

    /// Runs all stages up to `last`.
    pub(super) async fn run(mut self, begin: Input, last: LastStage) -> Result<(), SessionError> {
        let api = self.api.clone();
        let what = name_of(&begin, last);
        let counted = Counted::begin(&api.0.metrics, what, self.asked.clone());
        self.answer = api.0.answers.begin();
        self.span = api.0.tracer.begin(what, SpanKind::Server, None);
        self.span.set("network.protocol.name", "wyoming");
        let done = match begin {
            Input::Audio {
                audio,
                held,
                language,
            } => self.hear_and_go_on(audio, held, language, last).await,
            Input::Text { text, context } => self.reply_to(text, context, last).await,
            Input::Words { text, voice } => {
                let (pieces, written) = mpsc::channel(1);
                // The channel is empty.
                let _ = pieces.try_send(text);
                drop(pieces);
                self.speak_text(written, voice, false).await
            }
            Input::Pieces { written, voice } => self.speak_text(written, voice, true).await,
        };
        if done.is_ok() && !self.is_asked().await {
            self.span.event("the user went on");
            return Ok(());
        }
        if self.unwanted.is_cancelled() {
            self.span.event("interrupted");
            // The client no longer waits for the result.
            return match done {
                Err(Failure::Session(lost)) => Err(lost),
                Err(Failure::Refused(_)) | Ok(()) => Ok(()),
            };
        }
        match done {
            Ok(()) => counted.ended(DONE),
            Err(Failure::Session(_)) => self.span.event("client_gone"),
            Err(Failure::Refused(ref refusal)) => {
                self.span.fail("refused", &refusal.to_string());
                counted.ended(match refusal.retry_after() {
                    Some(_) => NOT_NOW,
                    None => WRONG,
                });
            }
        }
        done.map_err(|failure| match failure {
            Failure::Session(error) => error,
            Failure::Refused(refusal) => error_of(&refusal).into(),
        })
    }

    /// Returns metadata for the requests of a stage: its span is a child of the turn's.
    fn meta(&self) -> RequestMeta {
        RequestMeta {
            trace: self.span.context(),
            early: !self.asked.already(),
            part_of: self.answer.clone(),
            ..RequestMeta::default()
        }
    }

    /// Waits until the client has asked; `false` if the run is cancelled first.
    async fn is_asked(&self) -> bool {
        if self.asked.already() {
            return true;
        }
        let mut asked = self.asked.clone();
        self.unless_unwanted(asked.wait())
            .await
            .is_some_and(|asked| asked.is_ok())
    }

    async fn hear_and_go_on(
        &self,
        audio: MonoAudio,
        held: Option<OwnedSemaphorePermit>,
        language: Option<String>,
        last: LastStage,
    ) -> Result<(), Failure> {
        let in_pieces = AtomicBool::new(false);
        let heard = self.hear(audio, language, &in_pieces);
        let Some(heard) = self.unless_unwanted(heard).await else {
            return Ok(());
        };
        let heard = heard?;
        drop(held);
        let transcript = Written {
            text: heard.text.clone(),
            language: heard.language,
            context: None,
        };
        self.reply.send(Event::Transcript(transcript)).await?;
        if in_pieces.into_inner() {
            self.reply.send(Event::TranscriptStop).await?;
        }
        if last == LastStage::Text {
            return Ok(());
        }
        if heard.text.trim().is_empty() {
            self.reply
                .send(Event::NotHandled(said("nothing was heard", Map::new())))
                .await?;
            return Ok(());
        }
        self.reply_to(heard.text, Map::new(), last).await
    }

    async fn pass_on(&self, text: String, begun: &AtomicBool) -> Result<(), Failure> {
        if !begun.swap(true, Ordering::Relaxed) {
            let start = Event::TranscriptStart(TranscriptStart::default());
            self.reply.send(start).await?;
        }
        Ok(self
            .reply
            .send(Event::TranscriptChunk(Text { text }))
            .await?)
    }

    /// Transcribes `audio`. Without samples, the result is empty, and the recogniser is not called.
    ///
    /// Partial transcripts are passed on, and `in_pieces` is set; after the first one there is no retry, since its text
    /// would be sent twice.
    async fn hear(
        &self,
        audio: MonoAudio,
        language: Option<String>,
        in_pieces: &AtomicBool,
    ) -> Result<Transcript, Failure> {
        if audio.samples.is_empty() {
            return Ok(Transcript::default());
        }
        let Some(speech) = &self.api.0.speech else {
            return Err(not_configured("transcribe speech", "speech recogniser").into());
        };
        let audio = Arc::new(audio);
        self.patiently(|| {
            let (sender, mut pieces) = mpsc::channel(PIECES_AHEAD);
            let mut hearing = speech.transcribe(TranscribeRequest {
                meta: self.meta(),
                model: String::new(),
                audio: Arc::clone(&audio),
                language: language.clone(),
                prompt: None,
                pieces: Some(sender),
            });
            async move {
                let heard = loop {
                    tokio::select! {
                        biased;
                        Some(piece) = pieces.recv() => {
                            if let Err(failure) = self.pass_on(piece, in_pieces).await {
                                return Ok(Err(failure));
                            }
                        }
                        heard = &mut hearing => break heard,
                    }
                };
                while let Ok(piece) = pieces.try_recv() {
                    if let Err(failure) = self.pass_on(piece, in_pieces).await {
                        return Ok(Err(failure));
                    }
                }
                match heard {
                    Err(refusal) if in_pieces.load(Ordering::Relaxed) => Ok(Err(refusal.into())),
                    heard => heard.map(Ok),
                }
            }
        })
        .await?
    }

    async fn reply_to(
        &self,
        text: String,
        context: Map<String, Value>,
        last: LastStage,
    ) -> Result<(), Failure> {
        let mut answer = Answer {
            context,
            ..Answer::default()
        };
        let mut spoken = Spoken::default();
        let (reply, dropped) = self.reply.cancellable();
        let work = async {
            if last < LastStage::Speech {
                return self.answer(&text, &mut answer, None, &reply).await;
            }
            let (sentences, to_speak) = mpsc::channel(SENTENCES_AHEAD);
            let written = self.answer(&text, &mut answer, Some(sentences), &reply);
            tokio::try_join!(
                written,
                self.speak(to_speak, VoiceChoice::default(), &mut spoken, &reply)
            )
            .map(drop)
        };
        let done = self.unless_unwanted(work).await;
        if done.is_none() {
            // Unwritten output is dropped too.
            dropped.cancel();
        }
        if !self.is_asked().await {
            return Ok(());
        }
        if let Some(first) = answer.first_after {
            self.api.0.metrics.first_token(first);
        }
        self.remember(&text, &answer);
        self.close_answer(done.as_ref().is_some_and(Result::is_ok), &answer)
            .await?;
        let done_aloud = last == LastStage::Speech && matches!(done, Some(Ok(())));
        let refused = match done {
            Some(Err(Failure::Refused(refusal))) => Some(refusal),
            Some(Err(lost)) => return Err(lost),
            Some(Ok(())) | None => None,
        };
        if let Some(refusal) = refused {
            self.excuse(refusal, &answer, last, &mut spoken).await?;
        }
        // An answer without words, such as a picture, has a start and a stop: clients wait for the end of the audio.
        if done_aloud && spoken.format.is_none() {
            self.start_audio(SILENT, &mut spoken, &self.reply).await?;
        }
        if spoken.format.is_some() {
            self.reply
                .send(Event::AudioStop(AudioStop::default()))
                .await?;
        }
        if let Some(first) = spoken.first_after {
            self.api.0.metrics.first_audio(first);
            tracing::info!(
                first_text_ms = answer.first_after.map(millis),
                first_audio_ms = millis(first),
                done_ms = millis(self.asked.ago()),
                interrupted = self.unwanted.is_cancelled(),
                "answered aloud"
            );
        }
        Ok(())
    }

    /// Reports why there is no answer. A shortage of memory does not end the connection: it is reported as text, and as
    /// speech if the answer would have been spoken.
    async fn excuse(
        &self,
        refusal: Refusal,
        answer: &Answer,
        last: LastStage,
        spoken: &mut Spoken,
    ) -> Result<(), Failure> {
        let Some(text) = not_handled(&refusal) else {
            return Err(refusal.into());
        };
        if answer.begun {
            return Ok(()); // its first part is already sent, and closed
        }
        tracing::info!(text, "not handled");
        self.reply
            .send(Event::NotHandled(said(&text, answer.context.clone())))
            .await?;
        if last < LastStage::Speech {
            return Ok(());
        }
        let (pieces, excuse) = mpsc::channel(1);
        let _ = pieces.try_send(text);
        drop(pieces);
        let aloud = self.speak(excuse, VoiceChoice::default(), spoken, &self.reply);
        self.unless_unwanted(aloud).await.unwrap_or(Ok(()))
    }

    /// Ends the pieces of an answer with its complete text so far.
    async fn close_answer(&self, done: bool, answer: &Answer) -> Result<(), Failure> {
        if !answer.begun && !done {
            return match self.unwanted.is_cancelled() {
                true => {
                    let interrupted = said("interrupted", answer.context.clone());
                    Ok(self.reply.send(Event::NotHandled(interrupted)).await?)
                }
                false => Ok(()),
            };
        }
        if !answer.begun {
            let start = HandledStart {
                context: some(answer.context.clone()),
            };
            self.reply.send(Event::HandledStart(start)).await?;
        }
        let handled = said(&answer.text, answer.context.clone());
        self.reply.send(Event::Handled(handled)).await?;
        Ok(self.reply.send(Event::HandledStop).await?)
    }

    fn remember(&self, asked: &str, answer: &Answer) {
        let Some(id) = conversation(&answer.context).filter(|_| !answer.text.is_empty()) else {
            return;
        };
        let mut known = locked(&self.api.0.conversations);
        known.remember(id, asked.to_owned(), answer.text.clone());
    }

    /// Generates the answer; its text is sent to the client and, sentence by sentence, to `voice`.
    async fn answer(
        &self,
        text: &str,
        answer: &mut Answer,
        voice: Option<mpsc::Sender<String>>,
        reply: &Reply,
    ) -> Result<(), Failure> {
        let Some((chat, model)) = &self.api.0.chat else {
            return Err(not_configured("answer", "LLM").into());
        };
        let mut turns = {
            let mut known = locked(&self.api.0.conversations);
            conversation(&answer.context).map_or_else(Default::default, |id| known.recall(id))
        };
        let system = self.api.0.settings.system.as_ref();
        let mut sentences = Sentences::default();
        'again: loop {
            let request = ChatRequest {
                model: model.clone(),
                prompt: Prompt::Chat(
                    system
                        .map(|system| ChatMessage::new(Role::System, system.clone()))
                        .into_iter()
                        .chain(turns.messages())
                        .chain([ChatMessage::new(Role::User, text.to_owned())])
                        .collect::<Vec<_>>()
                        .into(),
                ),
                meta: self.meta(),
                max_tokens: Some(ANSWER_TOKENS_MAX),
                streamed: true,
                ..ChatRequest::default()
            };
            let mut events = match self.patiently(|| chat.chat(request.clone())).await {
                Ok(events) => events,
                Err(refusal) if is_too_long(&refusal) && turns.forget_oldest() => continue,
                Err(refusal) => return Err(refusal.into()),
            };
            while let Some(event) = events.next().await {
                match event {
                    ChatEvent::Part(AnswerPart::Text(piece)) => {
                        if !std::mem::replace(&mut answer.begun, true) {
                            answer.first_after = Some(self.asked.ago());
                            let start = HandledStart {
                                context: some(answer.context.clone()),
                            };
                            reply.send(Event::HandledStart(start)).await?;
                        }
                        answer.text.push_str(&piece);
                        if let Some(voice) = &voice {
                            for sentence in sentences.push(&piece) {
                                // The receiver is dropped only after a failure, which the voice reports itself.
                                let _ = voice.send(sentence).await;
                            }
                        }
                        reply
                            .send(Event::HandledChunk(Text { text: piece }))
                            .await?;
                    }
                    ChatEvent::Finished { .. } => break,
                    // The KV capacity was reduced below the conversation's length: drop its oldest turns first.
                    ChatEvent::Failed(refusal)
                        if !answer.begun && is_too_long(&refusal) && turns.forget_oldest() =>
                    {
                        continue 'again;
                    }
                    // The text so far is the answer.
                    ChatEvent::Failed(Refusal::KvReclaimed { .. }) if answer.begun => break,
                    ChatEvent::Failed(refusal) => return Err(refusal.into()),
                    _ => {}
                }
            }
            break;
        }
        if let (Some(voice), Some(sentence)) = (voice, sentences.finish()) {
            let _ = voice.send(sentence).await;
        }
        Ok(())
    }

    /// Speaks a text that arrives in pieces; with `streaming`, one more event ends the answer.
    async fn speak_text(
        &self,
        mut written: mpsc::Receiver<String>,
        voice: VoiceChoice,
        streaming: bool,
    ) -> Result<(), Failure> {
        let mut spoken = Spoken::default();
        let (to_voice, to_speak) = mpsc::channel(SENTENCES_AHEAD);
        let cut = async {
            let mut sentences = Sentences::default();
            while let Some(piece) = written.recv().await {
                for sentence in sentences.push(&piece) {
                    let _ = to_voice.send(sentence).await;
                }
            }
            if let Some(sentence) = sentences.finish() {
                let _ = to_voice.send(sentence).await;
            }
            drop(to_voice);
            Ok(())
        };
        let aloud = async {
            tokio::try_join!(cut, self.speak(to_speak, voice, &mut spoken, &self.reply)).map(drop)
        };
        match self.unless_unwanted(aloud).await {
            Some(done) => done?,
            None => return Ok(()),
        }
        // A text without words has a start and a stop.
        if spoken.format.is_none() {
            self.start_audio(SILENT, &mut spoken, &self.reply).await?;
        }
        self.reply
            .send(Event::AudioStop(AudioStop::default()))
            .await?;
        if streaming {
            self.reply.send(Event::SynthesizeStopped).await?;
        }
        Ok(())
    }

    /// Speaks each sentence as it arrives, all at the rate of the first.
    async fn speak(
        &self,
        mut sentences: mpsc::Receiver<String>,
        choice: VoiceChoice,
        spoken: &mut Spoken,
        reply: &Reply,
    ) -> Result<(), Failure> {
        let Some(speech) = &self.api.0.speech else {
            return Err(not_configured("speak", "voice").into());
        };
        while let Some(text) = sentences.recv().await {
            let stream = self
                .patiently(|| {
                    speech.synthesize(SpeechRequest {
                        meta: self.meta(),
                        model: String::new(),
                        text: text.clone(),
                        voice: choice.voice.clone().into(),
                        speaker: choice.speaker.clone(),
                        speed: 1.0,
                        whole: false,
                    })
                })
                .await?;
            let format = match spoken.format {
                Some(format) => format,
                None => {
                    let format = AudioFormat::mono_16_bit(stream.rate);
                    self.start_audio(format, spoken, reply).await?;
                    format
                }
            };
            let mut pieces = stream.at_rate(format.rate)?;
            while let Some(samples) = pieces.next().await {
                self.send_audio(&samples?, format, spoken, reply).await?;
            }
        }
        Ok(())
    }

    async fn start_audio(
        &self,
        format: AudioFormat,
        spoken: &mut Spoken,
        reply: &Reply,
    ) -> Result<(), Failure> {
        spoken.format = Some(format);
        let start = AudioStart {
            format,
            timestamp: None,
        };
        Ok(reply.send(Event::AudioStart(start)).await?)
    }

    async fn send_audio(
        &self,
        samples: &[i16],
        format: AudioFormat,
        spoken: &mut Spoken,
        reply: &Reply,
    ) -> Result<(), Failure> {
        for samples in samples.chunks(CHUNK_SAMPLES) {
            let chunk = AudioChunk {
                format,
                timestamp: None,
                audio: pcm_bytes(samples),
            };
            reply.send(Event::AudioChunk(chunk)).await?;
            if spoken.first_after.is_none() {
                spoken.first_after = Some(self.asked.ago());
            }
        }
        Ok(())
    }

    /// Retries until served, or until waiting is pointless.
    async fn patiently<T, F>(&self, attempt: impl FnMut() -> F) -> Result<T, Refusal>
    where
        F: Future<Output = Result<T, Refusal>>,
    {
        let helps = |refusal: &Refusal, attempts| {
            self.asked.already()
                && match Passing::of(refusal) {
                    Passing::Soon => true,
                    Passing::Once => attempts <= 1,
                    Passing::Never => false,
                }
        };
        patiently(self.api.0.settings.wait_max, helps, attempt).await
    }

    /// Returns the result, or `None` if the run is cancelled.
    async fn unless_unwanted<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.unwanted.cancelled() => None,
            done = work => Some(done),
        }
    }
}

/// Returns the name of a request in the metrics.
const fn name_of(begin: &Input, last: LastStage) -> &'static str {
    match (begin, last) {
        (Input::Words { .. } | Input::Pieces { .. }, _) => "wyoming/synthesize",
        (Input::Audio { .. }, LastStage::Text) => "wyoming/transcribe",
        (_, LastStage::Answer | LastStage::Text) => "wyoming/handle",
        (_, LastStage::Speech) => "wyoming/talk",
    }
}

/// Returns whether a shorter prompt would be accepted.
const fn is_too_long(refusal: &Refusal) -> bool {
    matches!(
        refusal,
        Refusal::ContextLengthExceeded { .. } | Refusal::KvCapacityShed { .. }
    )
}

/// Returns the name of the conversation of a context.
fn conversation(context: &Map<String, Value>) -> Option<&str> {
    context
        .get("conversation_id")?
        .as_str()
        .filter(|id| !id.is_empty())
}

fn said(text: &str, context: Map<String, Value>) -> Handled {
    Handled {
        text: Some(text.to_owned()),
        context: some(context),
    }
}

fn some(context: Map<String, Value>) -> Option<Map<String, Value>> {
    (!context.is_empty()).then_some(context)
}

/// Longest answer: some five minutes of speech.
const ANSWER_TOKENS_MAX: Tokens = Tokens::new(1024);

/// Bound of the queue of transcript pieces to the client; the recogniser blocks if it is full.
const PIECES_AHEAD: usize = 16;

/// Bound of the queue of sentences to the voice; the LLM blocks if it is full.
const SENTENCES_AHEAD: usize = 8;

/// Samples per message: 64 ms at 16 kHz.
const CHUNK_SAMPLES: usize = 1024;

/// Format reported for a text without words.
const SILENT: AudioFormat = AudioFormat::mono_16_bit(16_000);
