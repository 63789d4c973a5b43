//! The speech workers behind the doors.

use std::{sync::Arc, time::Duration};

use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture};

use super::{hub::Hub, hung::suspect, llm::chain};
use crate::{
    http::backend::{SpeechBackend, SpeechRequest, SpeechStream, TranscribeRequest, Transcript},
    policy::{refusal::Refusal, snapshot},
    speech::{
        audio::{ASR_RATE_HZ, MonoAudio},
        client::{ClientError, ClientTimeouts, WyomingClient},
    },
    worker::handle::{WorkerHandle, WorkerState},
};

/// When a client may try again while a worker is being started.
const RETRY_SOON: Duration = Duration::from_millis(500);

/// The speech workers, as the doors see them.
pub(super) struct Voice {
    hub: Arc<Hub>,
    asr: Option<WorkerHandle>,
    tts: Option<WorkerHandle>,
}

impl Voice {
    /// The doors' view of the workers.
    pub(super) fn new(hub: Arc<Hub>, asr: Option<WorkerHandle>, tts: Option<WorkerHandle>) -> Arc<Self> {
        Arc::new(Self { hub, asr, tts })
    }

    fn client(&self, worker: Option<&WorkerHandle>, act: &str, what: &str) -> Result<(WyomingClient, String), Refusal> {
        let state = self.hub.state();
        if state.draining {
            return Err(Refusal::Draining {
                act: act.to_owned(),
                retry_after: RETRY_SOON,
            });
        }
        let Some(worker) = worker else {
            return Err(Refusal::NotConfigured {
                act: act.to_owned(),
                what: what.to_owned(),
            });
        };
        let name = worker.spec().name.clone();
        let given_up = state
            .workers
            .iter()
            .find(|view| view.name == name && view.state == snapshot::WorkerState::Degraded);
        if let Some(view) = given_up {
            return Err(Refusal::WorkerLost {
                worker: name,
                reason: view.last_exit.clone().unwrap_or_default(),
                retry_after: RETRY_SOON,
            });
        }
        match (worker.state(), worker.endpoint()) {
            (WorkerState::Ready { .. }, Some(endpoint)) => {
                Ok((WyomingClient::new(endpoint, ClientTimeouts::default()), name))
            }
            (state, _) => Err(Refusal::Starting {
                act: act.to_owned(),
                who: format!("worker `{name}`"),
                state: word(state).to_owned(),
                retry_after: RETRY_SOON,
            }),
        }
    }
}

/// The state in one word, for messages.
const fn word(state: WorkerState) -> &'static str {
    match state {
        WorkerState::Ready { .. } => "ready",
        WorkerState::Starting { .. } => "starting",
        WorkerState::Stopped => "stopped",
        WorkerState::Stopping { .. } => "stopping",
    }
}

fn lost(worker: String) -> impl FnOnce(ClientError) -> Refusal {
    move |error| Refusal::WorkerLost {
        worker,
        reason: chain(&error),
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
            let (client, name) = self.client(self.asr.as_ref(), "transcribe speech", "speech recogniser")?;
            let at_work = self.hub.at_work(&name);
            if let Some(language) = &request.language {
                let info = client.describe().await.map_err(lost(name.clone()))?;
                let models = info.asr.iter().flat_map(|program| &program.models);
                let known: Vec<&str> = models.flat_map(|model| &model.languages).map(String::as_str).collect();
                check_language(language, &known)?;
            }
            let audio = MonoAudio::new(ASR_RATE_HZ, request.samples.to_vec());
            let heard = client.hear(&audio, request.language.as_deref()).await;
            drop(at_work);
            let heard = heard
                .inspect_err(|error| suspect(self.asr.as_ref(), error))
                .map_err(lost(name))?;
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
            let (client, name) = self.client(self.tts.as_ref(), "speak", "voice")?;
            let at_work = self.hub.at_work(&name);
            let speech = client
                .synthesize(&request.text, request.voice.as_deref())
                .await
                .inspect_err(|error| suspect(self.tts.as_ref(), error))
                .map_err(lost(name.clone()))?;
            let worker = self.tts.clone();
            Ok(SpeechStream {
                rate: speech.sample_rate_hz(),
                chunks: speech
                    .map(move |chunk| {
                        let _ = &at_work;
                        chunk
                            .inspect_err(|error| suspect(worker.as_ref(), error))
                            .map_err(lost(name.clone()))
                    })
                    .boxed(),
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
        let (hub, _inbox) = Hub::new("boot".to_owned(), Vec::new(), crate::daemon::clock::Clock::start());
        let request = SpeechRequest {
            meta: crate::http::backend::RequestMeta::default(),
            model: String::new(),
            text: "hello".to_owned(),
            voice: None,
            speed: 1.25,
        };
        let refusal = Voice::new(hub, None, None).synthesize(request).await.err().unwrap();
        assert!(
            matches!(refusal, Refusal::Invalid { ref field, .. } if field == "speed"),
            "{refusal}"
        );
    }
}
