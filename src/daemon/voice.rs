//! Adapter between the speech APIs and speech workers.

use std::{
    collections::VecDeque,
    mem,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream};

use tokio::{sync::Semaphore, time::Instant};

use super::{
    backlog::Backlog,
    control_handle::{AtWork, ControlHandle},
    early,
    reach::{self, Look, RETRY_SOON, TO_ANSWER, look, lost, refusal_of},
    workers::{Speaker, Way},
};
use cotenant_config::WorkerProtocol;
use cotenant_conversation::{
    refusal::Refusal,
    refusals::{invalid, not_configured, worker_lost},
};
use cotenant_http::backend::{
    RequestMeta, SpeechBackend, SpeechRequest, SpeechStream, TranscribeRequest, Transcript,
    VoiceWish,
};
use cotenant_rpc::supervisor::Supervisor as _;
use cotenant_speech::{
    client::{self, ClientError, ClientTimeouts, Endpoint, WyomingClient},
    http::{HttpClient, HttpShape, Manner},
    resample::{ResampleError, Resampler},
    sentences::Sentences,
    voice_activity::contains_speech,
    worker::SpeechClient,
};
use cotenant_telemetry::{Span, SpanContext, SpanKind, Tracer};
use cotenant_units::{causes::in_one_line, lock::locked, millis};

/// Concurrent recordings in a recogniser. Our choice: short ones are transcribed between the parts of a long one, and
/// its memory suffices for one long and several short ones.
const RECORDINGS_AT_ONCE: usize = 4;

/// Continuation of "cannot".
const TRANSCRIBE: &str = "transcribe speech";
const SPEAK: &str = "speak";

/// Spoken duration of a character, which makes texts comparable with recordings.
const SPOKEN_CHARACTER: Duration = Duration::from_millis(60);

/// Rest of work in a single part.
const NO_REST: (Duration, u32) = (Duration::ZERO, 0);

/// Speech workers as used by the APIs.
pub(super) struct Voice {
    control: Arc<ControlHandle>,
    asr: Option<Speaker>,
    tts: Option<Speaker>,
    recordings: Arc<Queue>,
    texts: Arc<Queue>,
    /// Permits for concurrent recordings in the recogniser; further ones wait in order of arrival.
    places: Semaphore,
    /// Voices last announced by the worker.
    announced: Mutex<Vec<String>>,
    tracer: Tracer,
}

struct Queue {
    act: &'static str,
    control: Arc<ControlHandle>,
    backlog: Mutex<Backlog>,
}

/// Recording or text in a worker's queue.
struct Queued {
    queue: Arc<Queue>,
    work: Duration,
    /// Its work, plus all work queued before it.
    with_others: Duration,
    outcome: Outcome,
}

enum Outcome {
    Dropped,
    Answered,
    /// Total time spent waiting for the worker.
    AnsweredIn(Duration),
}

impl Queue {
    fn new(act: &'static str, control: &Arc<ControlHandle>) -> Arc<Self> {
        Arc::new(Self {
            act,
            control: Arc::clone(control),
            backlog: Mutex::default(),
        })
    }

    /// Queues work, if the complete answer, with `rest` in further parts, is expected within the client's timeout.
    fn admit(
        self: &Arc<Self>,
        work: Duration,
        rest: (Duration, u32),
        patience: Option<Duration>,
    ) -> Result<Queued, Refusal> {
        let (now, _) = self.control.now();
        let patience = patience.map(|patience| patience.saturating_sub(TO_ANSWER));
        let mut backlog = locked(&self.backlog);
        let with_others = backlog
            .admit_whole(now, work, rest, patience)
            .map_err(|expected| Refusal::DeadlineUnreachable {
                act: self.act.to_owned(),
                patience_ms: millis(patience.unwrap_or_default()),
                expected_ms: millis(expected),
                retry_after: expected
                    .saturating_sub(patience.unwrap_or_default())
                    .max(RETRY_SOON),
            })?;
        Ok(Queued {
            queue: Arc::clone(self),
            work,
            with_others,
            outcome: Outcome::Dropped,
        })
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        let (now, _) = self.queue.control.now();
        let mut backlog = locked(&self.queue.backlog);
        match self.outcome {
            Outcome::Dropped => backlog.dropped(self.work),
            Outcome::Answered => backlog.answered(now, self.work),
            Outcome::AnsweredIn(waited) => {
                // The remaining share of the time was spent on others.
                let share = self.work.as_secs_f64() / self.with_others.as_secs_f64();
                backlog.answered_in(now, self.work, waited.mul_f64(share));
            }
        }
    }
}

impl Voice {
    pub(super) fn new(
        control: Arc<ControlHandle>,
        asr: Option<Speaker>,
        tts: Option<Speaker>,
        tracer: Tracer,
    ) -> Arc<Self> {
        Arc::new(Self {
            recordings: Queue::new(TRANSCRIBE, &control),
            texts: Queue::new(SPEAK, &control),
            control,
            asr,
            tts,
            places: Semaphore::new(RECORDINGS_AT_ONCE),
            announced: Mutex::default(),
            tracer,
        })
    }

    /// Returns a client of a worker that accepts requests, and a guard that counts a request in flight; waits for the
    /// worker if necessary.
    ///
    /// # Errors
    /// If it is stopped permanently, or does not accept requests in time.
    async fn client(
        &self,
        speaker: Option<&Speaker>,
        act: &str,
        what: &str,
        meta: &RequestMeta,
    ) -> Result<(SpeechClient, AtWork, String), Refusal> {
        let speaker = speaker.ok_or_else(|| not_configured(act, what))?;
        let (endpoint, at_work) = reach::worker(&self.control, speaker, act, meta).await?;
        let name = speaker.handle.name().to_owned();
        Ok((client_of(endpoint, &speaker.way), at_work, name))
    }
}

/// Returns the client for a worker at this endpoint.
fn client_of(endpoint: Endpoint, way: &Way) -> SpeechClient {
    let timeouts = ClientTimeouts {
        // A single-threaded server describes itself only after it has finished speaking for another client.
        describe: way.answer_timeout,
        transcribe: way.answer_timeout,
        synthesize: way.answer_timeout,
        ..ClientTimeouts::default()
    };
    let shape = match way.protocol {
        WorkerProtocol::OpenaiHttp => HttpShape::Openai,
        WorkerProtocol::PiperHttp => HttpShape::Piper,
        WorkerProtocol::WhisperServer => HttpShape::Whisper,
        WorkerProtocol::None | WorkerProtocol::Wyoming => {
            return SpeechClient::Wyoming(WyomingClient::new(endpoint, timeouts));
        }
    };
    match endpoint {
        Endpoint::Tcp(address) => {
            SpeechClient::Http(HttpClient::new(address, shape, way.model.clone(), timeouts))
        }
        // The configuration excludes Unix sockets for HTTP workers.
        unix @ Endpoint::Unix(_) => SpeechClient::Wyoming(WyomingClient::new(unix, timeouts)),
    }
}

fn spoken(text: &str) -> Duration {
    SPOKEN_CHARACTER.saturating_mul(u32::try_from(text.chars().count().max(1)).unwrap_or(u32::MAX))
}

/// Returns whether two tags have the same language, such as `en` and `en-GB`.
pub(super) fn is_same_language(one: &str, other: &str) -> bool {
    let primary = |tag: &str| tag.split(['-', '_']).next().map(str::to_lowercase);
    primary(one) == primary(other)
}

/// Refuses a language that the recogniser does not announce, since its text would be wrong. A recogniser that announces
/// none is used anyway.
fn check_language(wanted: &str, known: &[&str]) -> Result<(), Refusal> {
    if known.is_empty() || known.iter().any(|tag| is_same_language(tag, wanted)) {
        return Ok(());
    }
    let known = known.join(", ");
    let problem = format!("is not a language of the recogniser: {known}");
    Err(invalid("language", wanted, problem))
}

impl SpeechBackend for Voice {
    fn transcribe(&self, request: TranscribeRequest) -> BoxFuture<'_, Result<Transcript, Refusal>> {
        async move {
            let span = self.span("transcribe", "text", self.asr.as_ref(), request.meta.trace);
            span.set(
                "cotenant.audio.seconds",
                request.audio.duration().as_secs_f64(),
            );
            if !contains_speech(&request.audio.samples) {
                span.event("no speech");
                return Ok(Transcript {
                    text: String::new(),
                    language: request.language,
                });
            }
            let transcribed = self.transcribe_in(&span, request).await;
            if let Err(refusal) = &transcribed {
                span.fail("refused", &refusal.to_string());
            }
            transcribed
        }
        .boxed()
    }

    fn synthesize(&self, request: SpeechRequest) -> BoxFuture<'_, Result<SpeechStream, Refusal>> {
        async move {
            let span = self.span("speak", "speech", self.tts.as_ref(), request.meta.trace);
            let characters = u64::try_from(request.text.chars().count()).unwrap_or(u64::MAX);
            span.set("cotenant.text.characters", characters);
            self.synthesize_in(span, request).await
        }
        .boxed()
    }

    fn voices(&self) -> BoxFuture<'_, Vec<String>> {
        async move {
            if let Some(speaker) = &self.tts
                && let Look::Go(endpoint) = look(&self.control.state(), speaker, false, SPEAK)
            {
                // If a worker does not respond, its last description is kept.
                let _unheard = self.announced_by(&client_of(endpoint, &speaker.way)).await;
            }
            locked(&self.announced).clone()
        }
        .boxed()
    }
}

impl Voice {
    fn span(
        &self,
        what: &str,
        output: &str,
        speaker: Option<&Speaker>,
        trace: Option<SpanContext>,
    ) -> Span {
        let span = self.tracer.begin(what, SpanKind::Internal, trace);
        span.set("gen_ai.operation.name", what);
        span.set("gen_ai.provider.name", "cotenant");
        span.set("gen_ai.output.type", output);
        if let Some(speaker) = speaker {
            span.set("gen_ai.request.model", speaker.handle.name());
        }
        span
    }

    /// Asks a worker for its voices, which are remembered while it is not running.
    async fn announced_by(&self, client: &SpeechClient) -> Result<Vec<String>, ClientError> {
        let voices = client.voices().await?;
        locked(&self.announced).clone_from(&voices);
        Ok(voices)
    }

    /// Returns the name of the voice; `None` if the worker chooses.
    async fn voice_of(
        &self,
        wish: VoiceWish,
        client: &SpeechClient,
    ) -> Result<Option<String>, ClientError> {
        match wish {
            VoiceWish::Any => Ok(None),
            VoiceWish::Known(name) => Ok(Some(name)),
            VoiceWish::Asked { name, otherwise } => {
                let announced = self.announced_by(client).await?;
                Ok(if announced.contains(&name) {
                    Some(name)
                } else {
                    otherwise
                })
            }
        }
    }

    async fn transcribe_in(
        &self,
        span: &Span,
        request: TranscribeRequest,
    ) -> Result<Transcript, Refusal> {
        early::admit(request.meta.early, TRANSCRIBE, &self.control, || {
            self.places.available_permits() == RECORDINGS_AT_ONCE
        })?;
        let mut queued =
            self.recordings
                .admit(request.audio.duration(), NO_REST, request.meta.patience)?;
        // The semaphore is never closed.
        let _place = self.places.acquire().await.ok();
        let (client, at_work, name) = self
            .client(
                self.asr.as_ref(),
                TRANSCRIBE,
                "speech recogniser",
                &request.meta,
            )
            .await?;
        span.event("started");
        if let Some(language) = &request.language {
            let known = client.languages().await.map_err(lost(name.clone()))?;
            let known: Vec<&str> = known.iter().map(String::as_str).collect();
            check_language(language, &known)?;
        }
        let heard = client
            .hear(
                &request.audio,
                request.language.as_deref(),
                request.pieces.as_ref(),
            )
            .await;
        match (&heard, &self.asr) {
            // The connection has been closed, but the worker may compute on without a client.
            (Err(ClientError::Late { .. }), Some(ears)) => ears.hangs.busy_until_done(at_work),
            _ => drop(at_work),
        }
        if heard.is_ok() {
            queued.outcome = Outcome::Answered;
        }
        drop(queued);
        let heard = heard
            .inspect_err(|error| {
                if let Some(worker) = &self.asr {
                    worker.hangs.failed(error);
                }
            })
            .map_err(|error| refusal_of(error, name, "file"))?;
        if let Some(ears) = &self.asr {
            ears.hangs.answered();
        }
        Ok(Transcript {
            text: heard.text,
            language: heard.language.or(request.language),
        })
    }

    async fn synthesize_in(
        &self,
        span: Span,
        request: SpeechRequest,
    ) -> Result<SpeechStream, Refusal> {
        let mut sentences = Sentences::default();
        let mut texts: VecDeque<String> = sentences.push(&request.text).into_iter().collect();
        texts.extend(sentences.finish());
        // A text without words is passed on unchanged.
        let first = texts.pop_front().unwrap_or_else(|| request.text.clone());
        let rest = match request.whole {
            true => (
                texts.iter().map(|text| spoken(text)).sum(),
                u32::try_from(texts.len()).unwrap_or(u32::MAX),
            ),
            false => NO_REST,
        };
        let refused = |refusal: Refusal| {
            span.fail("refused", &refusal.to_string());
            refusal
        };
        let queued = self
            .texts
            .admit(spoken(&first), rest, request.meta.patience)
            .map_err(refused)?;
        let (client, at_work, worker) = self
            .client(self.tts.as_ref(), SPEAK, "voice", &request.meta)
            .await
            .map_err(refused)?;
        span.event("started");
        let hurried = (request.speed - 1.0).abs() > f64::EPSILON;
        let ignored: &[_] = if hurried && !client.takes_speed() {
            &["speed"]
        } else {
            &[]
        };
        let voice = self.voice_of(request.voice, &client).await;
        let voice = voice.map_err(lost(worker.clone())).map_err(refused)?;
        let mut speaking = Speaking {
            client,
            voice: voice.clone(),
            speaker: request.speaker,
            speed: request.speed,
            texts,
            queue: Arc::clone(&self.texts),
            queued: Some(queued),
            waited: Duration::ZERO,
            tts: self.tts.clone(),
            worker,
            span,
            _at_work: at_work,
        };
        let speech = speaking.begin(&first).await?;
        speaking.span.event("first_audio");
        let rate = speech.sample_rate_hz();
        let sound = Sound {
            speech,
            resampler: None,
        };
        let chunks = stream::unfold(Some((speaking, sound)), move |state| async move {
            let (mut speaking, mut sound) = state?;
            match speaking.next(&mut sound, rate).await {
                Ok(Some(samples)) => Some((Ok(samples), Some((speaking, sound)))),
                Ok(None) => None,
                Err(refusal) => Some((Err(refusal), None)),
            }
        });
        Ok(SpeechStream {
            rate,
            voice,
            ignored,
            chunks: chunks.boxed(),
        })
    }
}

/// Text spoken sentence by sentence, so that audio begins with the first sentence, regardless of the worker.
struct Speaking {
    client: SpeechClient,
    voice: Option<String>,
    speaker: Option<String>,
    speed: f64,
    texts: VecDeque<String>,
    queue: Arc<Queue>,
    /// Sentence in the worker's queue, and the time spent waiting for it.
    queued: Option<Queued>,
    waited: Duration,
    tts: Option<Speaker>,
    worker: String,
    span: Span,
    _at_work: AtWork,
}

/// Current sentence, and the resampler to the rate of the first.
struct Sound {
    speech: client::SpeechStream,
    resampler: Option<Resampler>,
}

impl Speaking {
    async fn begin(&mut self, text: &str) -> Result<client::SpeechStream, Refusal> {
        let since = Instant::now();
        let said = Manner {
            voice: self.voice.as_deref(),
            speaker: self.speaker.as_deref(),
            speed: self.speed,
        };
        let begun = self.client.synthesize(text, &said).await;
        self.waited += since.elapsed();
        begun.map_err(|error| self.failed(error))
    }

    /// Returns the next samples at `rate`; `None` at the end.
    async fn next(&mut self, sound: &mut Sound, rate: u32) -> Result<Option<Vec<i16>>, Refusal> {
        loop {
            let since = Instant::now();
            let samples = sound.speech.next().await;
            self.waited += since.elapsed();
            if let Some(samples) = samples {
                let samples = samples.map_err(|error| self.failed(error))?;
                return match &mut sound.resampler {
                    None => Ok(Some(samples)),
                    Some(resampler) => resampler
                        .push(&samples)
                        .map(Some)
                        .map_err(|error| self.unusable(&error)),
                };
            }
            if let Some(resampler) = sound.resampler.take() {
                return resampler
                    .finish()
                    .map(Some)
                    .map_err(|error| self.unusable(&error));
            }
            if let Some(tts) = &self.tts {
                tts.hangs.answered();
            }
            let waited = mem::take(&mut self.waited);
            if let Some(mut queued) = self.queued.take() {
                queued.outcome = Outcome::AnsweredIn(waited);
            }
            let Some(text) = self.texts.pop_front() else {
                return Ok(None);
            };
            self.queued = Some(self.queue.admit(spoken(&text), NO_REST, None)?);
            sound.speech = self.begin(&text).await?;
            sound.resampler = match sound.speech.sample_rate_hz() {
                same if same == rate => None,
                other => Some(Resampler::new(other, rate).map_err(|error| self.unusable(&error))?),
            };
        }
    }

    fn failed(&self, error: ClientError) -> Refusal {
        if let Some(tts) = &self.tts {
            tts.hangs.failed(&error);
        }
        self.span.fail("failed", &in_one_line(&error));
        refusal_of(error, self.worker.clone(), "input")
    }

    fn unusable(&self, error: &ResampleError) -> Refusal {
        let reason = format!("its audio cannot be used: {}", in_one_line(error));
        worker_lost(&self.worker, reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_language_that_the_recogniser_does_not_know_is_refused_by_name() {
        for wanted in ["en", "EN", "en-GB", "en_us"] {
            check_language(wanted, &["en", "en-US"]).unwrap();
        }
        check_language("de", &[]).unwrap();
        let refusal = check_language("de", &["en", "en-US"]).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "language: `de` is not a language of the recogniser: en, en-US"
        );
    }
}
