//! Producer of one response: the LLM, and the voice for its text.

use std::time::Instant;

use futures_util::StreamExt as _;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::super::{
    admission::admitted,
    answer::llm,
    api::{Api, Kind},
    backend::{AnswerPart, ChatEvent, ChatRequest, RequestMeta, SpeechRequest, VoiceWish},
    fault::Fault,
    generation::Generation,
    patience,
    speech::begun,
};
use cotenant_conversation::refusal::Refusal;
use cotenant_speech::sentences::Sentences;

/// Progress of a response, in order. The last step is [`ChatEvent::Finished`] with the last audio, or a fault.
pub(super) enum Step {
    Chat(ChatEvent),
    Sentence(String),
    Audio(Vec<i16>),
    /// The voice has started, and ignores the speed.
    OneSpeed,
    Failed(Fault),
}

/// Voice settings of an answer.
#[derive(Clone, PartialEq)]
pub(super) struct Voice {
    pub(super) name: VoiceWish,
    pub(super) speed: f64,
}

/// The work, which is cancelled on drop.
pub(super) struct Run {
    steps: mpsc::Receiver<Step>,
    _work: AbortOnDropHandle<()>,
}

impl Run {
    /// Starts the answer to a request.
    pub(super) fn begin(api: &Api, mut request: ChatRequest, voice: Option<Voice>) -> Self {
        let (sender, steps) = mpsc::channel(STEPS_AHEAD);
        request.meta.part_of = api.backends().status.answers().begin();
        let work = Work {
            api: api.clone(),
            meta: request.meta.clone(),
            steps: sender,
        };
        let work = tokio::spawn(async move {
            if let Err(Stop::Failed(fault)) = work.answer(request, voice).await {
                let _gone = work.steps.send(Step::Failed(fault)).await;
            }
        });
        Self {
            steps,
            _work: AbortOnDropHandle::new(work),
        }
    }

    /// The next step; `None` after the last. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Step> {
        self.steps.recv().await
    }
}

/// Retries temporary refusals within the patience of a session; returns a permanent refusal, or one that outlasts it.
pub(super) async fn patiently<T, F>(api: &Api, ask: impl Fn() -> F) -> Result<T, Refusal>
where
    F: Future<Output = Result<T, Refusal>>,
{
    patience::patiently(api.limits().session_patience, may_pass, ask).await
}

/// A session retries every temporary refusal, except for a stopping supervisor.
fn may_pass(refusal: &Refusal, _asked: u32) -> bool {
    !matches!(refusal, Refusal::Draining { .. })
}

/// Reason to stop the work.
enum Stop {
    Failed(Fault),
    /// Its receiver is gone.
    Unwanted,
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Self {
        Self::Failed(refusal.into())
    }
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Self::Failed(fault)
    }
}

struct Work {
    api: Api,
    meta: RequestMeta,
    steps: mpsc::Sender<Step>,
}

impl Work {
    async fn answer(&self, request: ChatRequest, voice: Option<Voice>) -> Result<(), Stop> {
        let (sender, sentences) = mpsc::channel(SENTENCES_AHEAD);
        let write = self.write(request, voice.is_some().then_some(sender));
        match voice {
            None => write.await,
            Some(voice) => tokio::try_join!(write, self.speak(sentences, &voice)).map(|_| ()),
        }
    }

    async fn write(
        &self,
        request: ChatRequest,
        sentences: Option<mpsc::Sender<String>>,
    ) -> Result<(), Stop> {
        let _place = self.api.place(Kind::Chat)?;
        let mut generation = self.admitted(request).await?;
        let mut pending = Sentences::default();
        let mut ended = false;
        while !ended {
            let event = generation.next().await;
            let whole = match &event {
                ChatEvent::Part(AnswerPart::Text(piece)) if sentences.is_some() => {
                    pending.push(piece)
                }
                ChatEvent::Failed(refusal) => return Err(refusal.clone().into()),
                ChatEvent::Finished { .. } => {
                    ended = true;
                    std::mem::take(&mut pending).finish().into_iter().collect()
                }
                _ => Vec::new(),
            };
            self.tell(Step::Chat(event)).await?;
            if let Some(sentences) = &sentences {
                for sentence in whole {
                    sentences.send(sentence).await.map_err(|_| Stop::Unwanted)?;
                }
            }
        }
        Ok(())
    }

    /// The admitted generation.
    async fn admitted(&self, request: ChatRequest) -> Result<Generation, Stop> {
        let began = Instant::now();
        let backend = llm(&self.api)?;
        let limit = self.api.limits().session_patience;
        let helps = match request.meta.early {
            true => |_: &Refusal, _| false,
            false => may_pass,
        };
        let events = admitted(&*backend, request, limit, helps).await?;
        Ok(Generation::new(events, began, &self.api))
    }

    async fn speak(
        &self,
        mut sentences: mpsc::Receiver<String>,
        voice: &Voice,
    ) -> Result<(), Stop> {
        while let Some(sentence) = sentences.recv().await {
            let backend = self.api.backends().speech("speak", "synthesiser")?;
            let _place = self.api.place(Kind::Speech)?;
            let request = SpeechRequest {
                meta: self.meta.clone(),
                model: String::new(),
                text: sentence.clone(),
                voice: voice.name.clone(),
                speaker: None,
                speed: voice.speed,
                whole: false,
            };
            let begin = || async {
                let speech = backend.synthesize(request.clone()).await?;
                Ok((speech.ignored.contains(&"speed"), begun(speech).await?))
            };
            let (one_speed, mut pieces) = patiently(&self.api, begin).await?;
            if one_speed {
                self.tell(Step::OneSpeed).await?;
            }
            self.tell(Step::Sentence(sentence)).await?;
            while let Some(piece) = pieces.next().await {
                self.tell(Step::Audio(piece?)).await?;
            }
        }
        Ok(())
    }

    async fn tell(&self, step: Step) -> Result<(), Stop> {
        self.steps.send(step).await.map_err(|_| Stop::Unwanted)
    }
}

/// Steps that may wait for the client; then the work waits.
const STEPS_AHEAD: usize = 16;
/// Sentences that may wait for the voice; then the LLM waits. Our choice: a long answer.
const SENTENCES_AHEAD: usize = 256;
