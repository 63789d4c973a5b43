//! Adapter from the speech APIs to speech workers.

use std::{sync::Arc, time::Duration};

use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream};

use tokio::time::{Instant, timeout_at};

use super::{
    control_handle::{AtWork, ControlHandle},
    workers::{Speaker, Way},
};
use crate::{
    causes::in_one_line,
    config::WorkerProtocol,
    http::backend::{SpeechBackend, SpeechRequest, SpeechStream, TranscribeRequest, Transcript},
    policy::{
        event::Event,
        refusal::Refusal,
        snapshot::{self, Rest, Snapshot},
    },
    rpc::supervisor::Supervisor as _,
    speech::{
        audio::{ASR_RATE_HZ, MonoAudio},
        client::{ClientError, ClientTimeouts, Endpoint, WyomingClient},
        http::{HttpShape, HttpSpeechClient},
        worker::SpeechClient,
    },
    worker::handle::WorkerState,
};

/// When a client may try again while a worker is being started.
const RETRY_SOON: Duration = Duration::from_millis(500);

/// When a client may try again while a worker waits for what it cannot have. Our choice: as long as a request waits for a
/// worker at most, since somebody has to change something first.
const RETRY_LATE: Duration = Duration::from_secs(60);

/// What of a client's patience is left for the answer itself, a refusal included.
const TO_ANSWER: Duration = Duration::from_millis(200);

/// The speech workers as the APIs use them.
pub(super) struct Voice {
    control: Arc<ControlHandle>,
    asr: Option<Speaker>,
    tts: Option<Speaker>,
}

impl Voice {
    /// The speech workers of a configuration.
    pub(super) fn new(control: Arc<ControlHandle>, asr: Option<Speaker>, tts: Option<Speaker>) -> Arc<Self> {
        Arc::new(Self { control, asr, tts })
    }

    /// A client of a worker that takes requests, and that a request is at work; waits for the worker if it has to.
    ///
    /// # Errors
    /// When it is stopped for good, or does not take requests in time.
    async fn client(
        &self,
        speaker: Option<&Speaker>,
        act: &str,
        what: &str,
        patience: Option<Duration>,
    ) -> Result<(SpeechClient, AtWork, String), Refusal> {
        let Some(speaker) = speaker else {
            return Err(Refusal::NotConfigured {
                act: act.to_owned(),
                what: what.to_owned(),
            });
        };
        let name = speaker.handle.name().to_owned();
        let limit = speaker.way.wake_timeout;
        // What has not begun before the client gives up is of no use to it; a refusal in time is.
        let limit = patience.map_or(limit, |patience| limit.min(patience.saturating_sub(TO_ANSWER)));
        let deadline = Instant::now() + limit;
        let mut states = self.control.snapshot();
        let mut asked = false;
        loop {
            let state = states.borrow_and_update().clone();
            let mut look = look(&state, speaker, act);
            if matches!(look, Look::Go(_)) {
                // First counted, then looked at again: a worker that is wound up has seen one or the other.
                let at_work = self.control.at_work(&name);
                look = self::look(&self.control.state(), speaker, act);
                if let Look::Go(endpoint) = look {
                    return Ok((client_of(endpoint, &speaker.way), at_work, name));
                }
            }
            let doing = match look {
                Look::Never(refusal) => return Err(refusal),
                Look::Wait(doing) => doing,
                Look::Go(_) => continue,
            };
            if !asked {
                asked = true;
                self.control.tell(Event::WorkerWanted { worker: name.clone() }).await;
            }
            let late = Refusal::Starting {
                act: act.to_owned(),
                who: format!("worker `{name}`"),
                state: doing.to_owned(),
                retry_after: RETRY_SOON,
            };
            match timeout_at(deadline, states.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return Err(late),
            }
        }
    }
}

/// What can be done with a worker now.
enum Look {
    /// Ask it there.
    Go(Endpoint),
    /// It will not take this request.
    Never(Refusal),
    /// It may take it in a while; what it does now.
    Wait(&'static str),
}

fn look(state: &Snapshot, speaker: &Speaker, act: &str) -> Look {
    let act = act.to_owned();
    if state.draining {
        return Look::Never(Refusal::Draining {
            act,
            retry_after: RETRY_SOON,
        });
    }
    let name = speaker.handle.name();
    let Some(view) = state.workers.iter().find(|view| view.name == name) else {
        return Look::Wait("unknown");
    };
    match (view.state, view.rest) {
        (snapshot::WorkerState::Degraded, _) => Look::Never(Refusal::WorkerLost {
            worker: name.to_owned(),
            reason: view.last_exit.clone().unwrap_or_default(),
            retry_after: RETRY_SOON,
        }),
        (_, Some(Rest::Operator)) => Look::Never(Refusal::Stopped {
            act,
            worker: name.to_owned(),
        }),
        (snapshot::WorkerState::Ready, _) if view.winding_up => Look::Wait("about to be restarted"),
        (snapshot::WorkerState::Ready, _) => match (speaker.handle.state(), speaker.handle.endpoint()) {
            (WorkerState::Ready { .. }, Some(endpoint)) => Look::Go(endpoint),
            _ => Look::Wait("ending"),
        },
        (snapshot::WorkerState::Stopped, Some(_)) => Look::Wait("asleep"),
        (snapshot::WorkerState::Stopped, None) => Look::Wait("not started yet"),
        (snapshot::WorkerState::AwaitingMemory, _)
            if let Some(wait) = view.waits.as_ref().filter(|wait| wait.is_out_of_reach()) =>
        {
            Look::Never(Refusal::InsufficientMemory {
                act,
                asked: wait.needs,
                free: wait.free,
                reclaimable: wait.most.saturating_sub(wait.free),
                budget: state.budget,
                retry_after: RETRY_LATE,
            })
        }
        (snapshot::WorkerState::AwaitingMemory, _) => Look::Wait("waiting for memory"),
        (snapshot::WorkerState::BackingOff, _) => Look::Wait("waiting to be started again after it failed"),
        (snapshot::WorkerState::Starting, _) => Look::Wait("starting"),
        (snapshot::WorkerState::Stopping, _) => Look::Wait("stopping"),
    }
}

/// How a worker that listens there is asked.
fn client_of(endpoint: Endpoint, way: &Way) -> SpeechClient {
    let timeouts = ClientTimeouts {
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
            SpeechClient::Http(HttpSpeechClient::new(address, shape, way.model.clone(), timeouts))
        }
        // The configuration gives none to a worker that speaks HTTP.
        unix @ Endpoint::Unix(_) => SpeechClient::Wyoming(WyomingClient::new(unix, timeouts)),
    }
}

fn lost(worker: String) -> impl FnOnce(ClientError) -> Refusal {
    move |error| Refusal::WorkerLost {
        worker,
        reason: in_one_line(&error),
        retry_after: RETRY_SOON,
    }
}

/// A recogniser that does not know the language would hear something else. One that names no languages is asked anyway;
/// `en` and `en-GB` are the same to it.
fn check_language(wanted: &str, known: &[&str]) -> Result<(), Refusal> {
    let primary = |tag: &str| tag.split(['-', '_']).next().unwrap_or_default().to_lowercase();
    if known.is_empty() || known.iter().any(|tag| primary(tag) == primary(wanted)) {
        return Ok(());
    }
    Err(Refusal::Invalid {
        field: "language".to_owned(),
        value: wanted.to_owned(),
        problem: format!("is not one of those that the recogniser knows: {}", known.join(", ")),
    })
}

impl SpeechBackend for Voice {
    fn transcribe(&self, request: TranscribeRequest) -> BoxFuture<'_, Result<Transcript, Refusal>> {
        async move {
            let (client, at_work, name) = self
                .client(
                    self.asr.as_ref(),
                    "transcribe speech",
                    "speech recogniser",
                    request.meta.patience,
                )
                .await?;
            if let Some(language) = &request.language {
                let known = client.languages().await.map_err(lost(name.clone()))?;
                let known: Vec<&str> = known.iter().map(String::as_str).collect();
                check_language(language, &known)?;
            }
            let audio = MonoAudio::new(ASR_RATE_HZ, request.samples.to_vec());
            let heard = client
                .hear(&audio, request.language.as_deref(), request.pieces.as_ref())
                .await;
            drop(at_work);
            let heard = heard
                .inspect_err(|error| {
                    if let Some(worker) = &self.asr {
                        worker.hangs.failed(error);
                    }
                })
                .map_err(lost(name))?;
            if let Some(ears) = &self.asr {
                ears.hangs.answered();
            }
            Ok(Transcript {
                text: heard.text,
                language: heard.language.or(request.language),
            })
        }
        .boxed()
    }

    fn synthesize(&self, request: SpeechRequest) -> BoxFuture<'_, Result<SpeechStream, Refusal>> {
        async move {
            // Wyoming has no word for it, and a voice at the wrong speed would be taken for a fault.
            if (request.speed - 1.0).abs() > f64::EPSILON {
                return Err(Refusal::Invalid {
                    field: "speed".to_owned(),
                    value: request.speed.to_string(),
                    problem: "is not 1, the only speed that the voices have".to_owned(),
                });
            }
            let (client, at_work, name) = self
                .client(self.tts.as_ref(), "speak", "voice", request.meta.patience)
                .await?;
            let speech = client
                .synthesize(&request.text, request.voice.as_deref(), request.speaker.as_deref())
                .await
                .inspect_err(|error| {
                    if let Some(worker) = &self.tts {
                        worker.hangs.failed(error);
                    }
                })
                .map_err(lost(name.clone()))?;
            let mouth = self.tts.clone();
            let rate = speech.sample_rate_hz();
            let chunks = stream::unfold(Some((speech, at_work, mouth, name)), |speaking| async move {
                let (mut speech, at_work, mouth, name) = speaking?;
                match speech.next().await {
                    Some(Ok(samples)) => Some((Ok(samples), Some((speech, at_work, mouth, name)))),
                    Some(Err(error)) => {
                        if let Some(mouth) = &mouth {
                            mouth.hangs.failed(&error);
                        }
                        Some((Err(lost(name)(error)), None))
                    }
                    None => {
                        if let Some(mouth) = mouth {
                            mouth.hangs.answered();
                        }
                        None
                    }
                }
            });
            Ok(SpeechStream {
                rate,
                chunks: chunks.boxed(),
            })
        }
        .boxed()
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
            "language: `de` is not one of those that the recogniser knows: en, en-US"
        );
    }

    #[tokio::test]
    async fn a_speed_that_no_voice_has_is_refused() {
        let (control, _inbox) = ControlHandle::new(
            "boot".to_owned(),
            Vec::new(),
            crate::daemon::clock::MonotonicClock::start(),
            64,
        );
        let request = SpeechRequest {
            meta: crate::http::backend::RequestMeta::default(),
            model: String::new(),
            text: "hello".to_owned(),
            voice: None,
            speaker: None,
            speed: 1.25,
        };
        let refusal = Voice::new(control, None, None).synthesize(request).await.err().unwrap();
        assert!(
            matches!(refusal, Refusal::Invalid { ref field, .. } if field == "speed"),
            "{refusal}"
        );
    }
}
