//! The engine behind the doors: requests of HTTP and gRPC become requests of the engine, and its events theirs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream};
use tokio::sync::mpsc;

use super::{engine::CurrentEngine, hub::Hub};
use crate::{
    engine::{self, EngineHandle, PromptError, RequestId, SubmitError},
    http::backend::{ChatBackend, ChatEvent, ChatRequest, ChatStream, FinishReason, Role, Usage},
    policy::{refusal::Refusal, snapshot::EngineState},
    rpc::llm::{self, Generator},
    units::{Bytes, Tokens},
};

/// When a client may try again after something that lasts as long as an answer or a load.
const RETRY_SOON: Duration = Duration::from_secs(1);

/// Events that the gRPC service may be behind.
const STREAM_BUFFER: usize = 16;

/// The one model, as the doors see it.
#[derive(Clone)]
pub(super) struct Llm(Arc<Model>);

struct Model {
    hub: Arc<Hub>,
    engine: CurrentEngine,
    name: String,
    /// KV tokens wanted when memory is ample: prompts beyond it never fit.
    context: Tokens,
    requests: AtomicU64,
}

impl Llm {
    /// The doors' view of `engine`.
    pub(super) fn new(hub: Arc<Hub>, engine: CurrentEngine, name: String, context: Tokens) -> Arc<Self> {
        Arc::new(Self(Arc::new(Model {
            hub,
            engine,
            name,
            context,
            requests: AtomicU64::new(1),
        })))
    }

    fn next_id(&self) -> RequestId {
        RequestId::new(self.0.requests.fetch_add(1, Ordering::Relaxed))
    }

    /// Hands a request to the engine. Rendering and encoding a long prompt takes too long for a thread that serves others.
    async fn submit(&self, request: engine::GenerateRequest) -> Result<Guarded, Refusal> {
        if self.0.hub.state().draining {
            return Err(Refusal::Draining {
                act: "start an answer".to_owned(),
                retry_after: RETRY_SOON,
            });
        }
        let (id, engine) = (request.id, self.0.engine.handle());
        let asked = engine.clone();
        // Dropped on the way, the events go with it, and the engine notices that nobody reads them.
        let events = tokio::task::spawn_blocking(move || asked.generate(request))
            .await
            .map_err(|panicked| Refusal::EngineLost {
                reason: format!("reading the prompt broke down: {panicked}"),
                retry_after: RETRY_SOON,
            })?
            .map_err(|error| self.refuse(&error))?;
        Ok(Guarded { events, engine, id })
    }

    /// Why there is no engine to wait for, when the arbiter has given it up or waits to load it again.
    fn failure(&self) -> Option<String> {
        let engine = &self.0.hub.state().engine;
        (engine.state == EngineState::Failed).then(|| engine.failure.clone().unwrap_or_default())
    }

    fn refuse(&self, error: &SubmitError) -> Refusal {
        let act = || "start an answer".to_owned();
        if let (SubmitError::NotReady { .. }, Some(reason)) = (error, self.failure()) {
            return Refusal::EngineLost {
                reason,
                retry_after: RETRY_SOON,
            };
        }
        match error {
            SubmitError::Draining => Refusal::Draining {
                act: act(),
                retry_after: RETRY_SOON,
            },
            SubmitError::Failed { message } => Refusal::EngineLost {
                reason: message.clone(),
                retry_after: RETRY_SOON,
            },
            SubmitError::NotReady { phase } => Refusal::Starting {
                act: act(),
                who: "the engine".to_owned(),
                state: (*phase).to_owned(),
                retry_after: RETRY_SOON,
            },
            SubmitError::QueueFull { limit, .. } => Refusal::QuotaExceeded {
                act: act(),
                what: "the queue of the engine".to_owned(),
                limit: u64::try_from(*limit).unwrap_or(u64::MAX),
                retry_after: RETRY_SOON,
            },
            SubmitError::Prompt(PromptError::BeyondContext { tokens, limit }) => Refusal::ContextLengthExceeded {
                model: self.0.name.clone(),
                prompt: *tokens,
                limit: *limit,
            },
            SubmitError::Prompt(error) => Refusal::Invalid {
                field: "messages".to_owned(),
                value: String::new(),
                problem: chain(error),
            },
            SubmitError::Duplicate { .. } => Refusal::EngineLost {
                reason: error.to_string(),
                retry_after: RETRY_SOON,
            },
        }
    }

    /// A prompt that does not fit now fits later only if it fits what is wanted when memory is ample.
    fn beyond_kv(&self, prompt: Tokens, capacity: Tokens) -> Refusal {
        if prompt > self.0.context {
            return Refusal::ContextLengthExceeded {
                model: self.0.name.clone(),
                prompt,
                limit: self.0.context,
            };
        }
        Refusal::KvCapacityShed {
            model: self.0.name.clone(),
            prompt,
            capacity,
            limit: self.0.context,
            retry_after: RETRY_SOON,
        }
    }

    fn failed(&self, error: engine::GenerateError) -> Refusal {
        use engine::GenerateError as E;
        match error {
            E::PromptBeyondKv { tokens, capacity, .. } | E::KvFull { tokens, capacity, .. } => {
                self.beyond_kv(tokens, capacity)
            }
            E::Stopping => Refusal::Draining {
                act: "finish the answer".to_owned(),
                retry_after: RETRY_SOON,
            },
            error @ (E::DeadlinePassed { .. } | E::EngineLost { .. } | E::Model { .. } | E::NotFinite { .. }) => {
                Refusal::EngineLost {
                    reason: chain(&error),
                    retry_after: RETRY_SOON,
                }
            }
        }
    }
}

/// The events of one request; dropping it cancels the request.
struct Guarded {
    events: mpsc::Receiver<engine::GenerateEvent>,
    engine: EngineHandle,
    id: RequestId,
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.engine.cancel(self.id);
    }
}

/// An error and its causes in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

fn sampling(temperature: Option<f64>, top_p: Option<f64>, top_k: Option<u32>, seed: Option<u64>) -> engine::Sampling {
    let greedy = engine::Sampling::GREEDY;
    engine::Sampling {
        temperature: temperature.unwrap_or(greedy.temperature),
        top_p: top_p.unwrap_or(greedy.top_p),
        top_k: top_k.or(greedy.top_k),
        seed: seed.unwrap_or(greedy.seed),
        ..greedy
    }
}

impl ChatBackend for Llm {
    fn chat(&self, request: ChatRequest) -> BoxFuture<'_, Result<ChatStream, Refusal>> {
        async move {
            if request.model != self.0.name {
                return Err(Refusal::UnknownModel {
                    model: request.model,
                    known: format!("; there is {}", self.0.name),
                });
            }
            let messages = request.messages.into_iter().map(|message| engine::ChatMessage {
                role: match message.role {
                    Role::Assistant => engine::Role::Assistant,
                    Role::System => engine::Role::System,
                    Role::Tool => engine::Role::Tool,
                    Role::User => engine::Role::User,
                },
                content: message.content,
            });
            let guarded = self
                .submit(engine::GenerateRequest {
                    sampling: sampling(request.temperature, request.top_p, None, request.seed),
                    max_tokens: request.max_tokens,
                    stop: request.stop,
                    ..engine::GenerateRequest::new(self.next_id(), engine::Prompt::Chat(messages.collect()))
                })
                .await?;
            let llm = self.clone();
            Ok(
                stream::unfold((guarded, llm, false), |(mut guarded, llm, ended)| async move {
                    if ended {
                        return None;
                    }
                    let event = match guarded.events.recv().await {
                        Some(event) => chat_event(&llm, event),
                        None => ChatEvent::Failed(Refusal::EngineLost {
                            reason: "it stopped without an answer".to_owned(),
                            retry_after: RETRY_SOON,
                        }),
                    };
                    let ended = matches!(event, ChatEvent::Finished { .. } | ChatEvent::Failed(_));
                    Some((event, (guarded, llm, ended)))
                })
                .boxed(),
            )
        }
        .boxed()
    }
}

fn chat_event(llm: &Llm, event: engine::GenerateEvent) -> ChatEvent {
    match event {
        engine::GenerateEvent::Started {
            prompt_tokens,
            cached_tokens,
        } => ChatEvent::Started {
            prompt_tokens,
            cached_tokens,
        },
        engine::GenerateEvent::Delta { text, .. } => ChatEvent::Delta(text),
        engine::GenerateEvent::Finished { reason, usage } => match reason {
            engine::FinishReason::KvReclaimed if usage.completion_tokens == Tokens::ZERO => {
                ChatEvent::Failed(Refusal::KvReclaimed {
                    generated: Tokens::ZERO,
                    retry_after: RETRY_SOON,
                })
            }
            reason => ChatEvent::Finished {
                reason: match reason {
                    engine::FinishReason::Stop => FinishReason::Stop,
                    engine::FinishReason::Cancelled
                    | engine::FinishReason::KvReclaimed
                    | engine::FinishReason::Length => FinishReason::Length,
                },
                usage: Usage {
                    prompt_tokens: usage.prompt_tokens,
                    cached_tokens: usage.cached_tokens,
                    completion_tokens: usage.completion_tokens,
                },
            },
        },
        engine::GenerateEvent::Failed(error) => ChatEvent::Failed(llm.failed(error)),
    }
}

impl Generator for Llm {
    fn generate(
        &self,
        request: llm::GenerateRequest,
    ) -> BoxFuture<'_, Result<mpsc::Receiver<llm::GenerateEvent>, llm::GenerateError>> {
        async move {
            let admitted = Instant::now();
            let prompt = match request.input {
                llm::Input::Prompt(text) => engine::Prompt::Text(text),
                llm::Input::Messages(messages) => engine::Prompt::Chat(
                    messages
                        .into_iter()
                        .map(|message| engine::ChatMessage {
                            role: match message.role {
                                llm::ChatRole::Assistant => engine::Role::Assistant,
                                llm::ChatRole::System => engine::Role::System,
                                llm::ChatRole::User => engine::Role::User,
                            },
                            content: message.content,
                        })
                        .collect(),
                ),
            };
            let wanted = request.sampling;
            let mut guarded = self
                .submit(engine::GenerateRequest {
                    sampling: sampling(wanted.temperature, wanted.top_p, wanted.top_k, wanted.seed),
                    max_tokens: request.max_tokens,
                    stop: request.stop,
                    deadline: request.time_left.and_then(|left| admitted.checked_add(left)),
                    ..engine::GenerateRequest::new(self.next_id(), prompt)
                })
                .await
                .map_err(generate_error)?;
            let (sender, receiver) = mpsc::channel(STREAM_BUFFER);
            let llm = self.clone();
            tokio::spawn(async move {
                let mut first_token = None;
                loop {
                    let event = tokio::select! {
                        event = guarded.events.recv() => event,
                        // Nobody reads any more, perhaps before its turn has come: dropping `guarded` cancels it.
                        () = sender.closed() => return,
                    };
                    let Some(event) = event else { return };
                    let event = match event {
                        engine::GenerateEvent::Started { prompt_tokens, .. } => llm::GenerateEvent::Started {
                            model: llm.0.name.clone(),
                            prompt: prompt_tokens,
                        },
                        engine::GenerateEvent::Delta { text, .. } => {
                            first_token.get_or_insert_with(|| admitted.elapsed());
                            llm::GenerateEvent::Delta { text }
                        }
                        engine::GenerateEvent::Finished { reason, usage } => match reason {
                            engine::FinishReason::KvReclaimed => {
                                llm::GenerateEvent::Failed(llm::GenerateError::KvReclaimed {
                                    tokens: usage.completion_tokens,
                                })
                            }
                            reason => llm::GenerateEvent::Finished {
                                reason: match reason {
                                    engine::FinishReason::Stop => llm::FinishReason::Stop,
                                    engine::FinishReason::Cancelled
                                    | engine::FinishReason::KvReclaimed
                                    | engine::FinishReason::Length => llm::FinishReason::Length,
                                },
                                usage: llm::Usage {
                                    prompt: usage.prompt_tokens,
                                    completion: usage.completion_tokens,
                                    time_to_first_token: first_token.unwrap_or_else(|| admitted.elapsed()),
                                    total: admitted.elapsed(),
                                },
                            },
                        },
                        engine::GenerateEvent::Failed(error) => {
                            llm::GenerateEvent::Failed(generate_error(llm.failed(error)))
                        }
                    };
                    if sender.send(event).await.is_err() {
                        return;
                    }
                }
            });
            Ok(receiver)
        }
        .boxed()
    }
}

/// A refusal in the words of the gRPC service.
fn generate_error(refusal: Refusal) -> llm::GenerateError {
    match refusal {
        Refusal::ContextLengthExceeded { prompt, limit, .. } => {
            llm::GenerateError::ContextExceeded { prompt, context: limit }
        }
        Refusal::KvCapacityShed {
            prompt,
            capacity,
            limit,
            retry_after,
            ..
        } => llm::GenerateError::CapacityShed {
            prompt,
            capacity,
            context: limit,
            missing: Bytes::ZERO,
            retry_after: Some(retry_after),
        },
        Refusal::Draining { .. } => llm::GenerateError::Draining,
        Refusal::QuotaExceeded { limit, retry_after, .. } => {
            let limit = u32::try_from(limit).unwrap_or(u32::MAX);
            llm::GenerateError::QueueFull {
                waiting: limit,
                limit,
                retry_after: Some(retry_after),
            }
        }
        Refusal::Starting {
            who,
            state,
            retry_after,
            ..
        } => llm::GenerateError::NotReady {
            reason: format!("{who} is {state}"),
            retry_after: Some(retry_after),
        },
        Refusal::Invalid { field, problem, .. } => llm::GenerateError::Invalid { field, problem },
        other => llm::GenerateError::EngineLost {
            reason: other.to_string(),
        },
    }
}
