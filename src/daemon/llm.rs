//! Generation for HTTP and gRPC: requests to the engine, and its events back.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::{FutureExt as _, future::BoxFuture};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{
    control_handle::ControlHandle, control_loop::Clock as _, early, engine::CurrentEngine,
};
use cotenant_config::LlmConfig;
use cotenant_conversation::{
    FinishReason, SamplingWish,
    refusal::Refusal,
    refusals::{invalid, no_thread},
};
use cotenant_engine::{
    self as engine, AnswerStyle, EngineHandle, EngineSnapshot, PromptError, RequestId, SubmitError,
};
use cotenant_http::backend::RunningAnswer;
use cotenant_policy::{
    engine_failure::NextTry,
    event::{CapacityWanted, Event},
    snapshot::EngineState,
};
use cotenant_rpc::{
    llm::{self, Generator},
    supervisor::Supervisor as _,
};
use cotenant_telemetry::{Metrics, Span, SpanContext, SpanKind, Tracer};
use cotenant_threads::{NotDone, blocking};
use cotenant_units::{Tokens, causes::in_one_line, millis};

/// Retry interval for conditions that last as long as an answer or a load.
pub(super) const RETRY_SOON: Duration = Duration::from_secs(1);

/// Longest wait of a prompt for KV capacity to regrow. Our choice: longer than growth takes, shorter than clients'
/// timeouts.
const GROWTH_PATIENCE: Duration = Duration::from_millis(500);

/// Events by which a gRPC client may lag.
const STREAM_BUFFER: usize = 16;

/// Requirements of a caller.
#[derive(Clone, Debug, Default)]
pub(super) struct Wanted {
    /// The caller's timeout.
    pub(super) patience: Option<Duration>,
    /// Whether the answer must be complete by then, or only begun.
    pub(super) whole: bool,
    /// KV capacity that the caller prefers.
    pub(super) context: Option<Tokens>,
    pub(super) client: Option<Arc<str>>,
    pub(super) trace: Option<SpanContext>,
    /// Whether the tokens of the prompt are requested.
    pub(super) tokens: bool,
    /// Whether it is work ahead of a request.
    pub(super) early: bool,
    /// Answer of which this is a stage.
    pub(super) part_of: Option<RunningAnswer>,
}

/// The model, as the APIs use it.
#[derive(Clone)]
pub(super) struct Llm(Arc<Model>);

struct Model {
    control: Arc<ControlHandle>,
    engine: CurrentEngine,
    name: String,
    /// KV tokens when memory is ample: longer prompts never fit.
    context: Tokens,
    answer_tokens_max: Tokens,
    answer_time_max: Duration,
    answer_time_shared: Duration,
    requests: AtomicU64,
    metrics: Arc<Metrics>,
    tracer: Tracer,
}

impl Llm {
    /// Creates the model run by `engine`.
    pub(super) fn new(
        control: Arc<ControlHandle>,
        engine: CurrentEngine,
        llm: &LlmConfig,
        metrics: Arc<Metrics>,
        tracer: Tracer,
    ) -> Arc<Self> {
        Arc::new(Self(Arc::new(Model {
            control,
            engine,
            name: llm.name.clone(),
            context: llm.context,
            answer_tokens_max: llm.answer_tokens_max,
            answer_time_max: llm.answer_time_max,
            answer_time_shared: llm.answer_time_shared,
            requests: AtomicU64::new(1),
            metrics,
            tracer,
        })))
    }

    pub(super) fn next_id(&self) -> RequestId {
        RequestId::new(self.0.requests.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the sampling as requested, else as the model's file recommends, else these defaults; the seed is random
    /// unless requested.
    pub(super) fn sampling(&self, asked: SamplingWish, defaults: SamplingWish) -> engine::Sampling {
        let wish = asked
            .or(self.0.engine.handle().recommended_sampling())
            .or(defaults);
        SamplingWish {
            seed: wish.seed.or_else(|| Some(SamplingWish::random_seed())),
            ..wish
        }
        .into()
    }

    /// Passes a request to the engine. Rendering and encoding run on another thread, because a long prompt would block
    /// other requests.
    pub(super) async fn submit(
        &self,
        request: engine::GenerateRequest,
        wanted: &Wanted,
    ) -> Result<(Guarded, AnswerStyle), Refusal> {
        let span = self.span_of(&request, wanted);
        let submitted = self.submit_in(&span, request, wanted).await;
        match submitted {
            Ok((events, engine, id, (style, prompt, answer))) => Ok((
                Guarded {
                    _answer: answer,
                    events,
                    engine,
                    id,
                    metrics: Arc::clone(&self.0.metrics),
                    span,
                    begun: false,
                    written: 0,
                    prompt,
                },
                style,
            )),
            Err(refusal) => {
                span.fail("refused", &refusal.to_string());
                Err(refusal)
            }
        }
    }

    /// Returns the span of an answer, by the semantic conventions of generative AI.
    fn span_of(&self, request: &engine::GenerateRequest, wanted: &Wanted) -> Span {
        let operation = match &request.prompt {
            engine::Prompt::Chat(_) => "chat",
            engine::Prompt::Raw(_) | engine::Prompt::Text(_) | engine::Prompt::Tokens(_) => {
                "text_completion"
            }
        };
        let span = self.0.tracer.begin(
            &format!("{operation} {}", self.name()),
            SpanKind::Internal,
            wanted.trace,
        );
        span.set("gen_ai.operation.name", operation);
        span.set("gen_ai.provider.name", "cotenant");
        span.set("gen_ai.request.model", self.name());
        span.set("gen_ai.request.temperature", request.sampling.temperature);
        span.set("gen_ai.request.top_p", request.sampling.top_p);
        span.set(
            "gen_ai.request.max_tokens",
            request.max_tokens.unwrap_or(self.0.answer_tokens_max).get(),
        );
        span
    }

    async fn submit_in(
        &self,
        span: &Span,
        mut request: engine::GenerateRequest,
        wanted: &Wanted,
    ) -> Result<
        (
            mpsc::Receiver<engine::GenerateEvent>,
            EngineHandle,
            RequestId,
            (AnswerStyle, Vec<u32>, RunningAnswer),
        ),
        Refusal,
    > {
        request.max_tokens.get_or_insert(self.0.answer_tokens_max);
        request.time_max = Some(self.0.answer_time_max);
        request.time_shared = Some(self.0.answer_time_shared);
        request.grows_to = self.0.context;
        let answer = wanted
            .part_of
            .clone()
            .or_else(|| self.0.control.answers().begin())
            .ok_or_else(|| draining(ACT))?;
        let (id, engine) = (request.id, self.0.engine.handle());
        early::admit(wanted.early, ACT, &self.0.control, || {
            let now = engine.snapshot();
            now.running.is_empty() && now.queued == 0
        })?;
        let place = match &request.form {
            Some(_) => engine
                .form_place(&request)
                .await
                .map_err(|error| self.refuse(&error))?,
            None => None,
        };
        let asked = engine.clone();
        // Dropped with this future when the client disconnects.
        let waiting = CancellationToken::new();
        let (gone, _waits) = (waiting.clone(), waiting.drop_guard());
        let (request, prepared) = blocking(move || {
            let gone = || gone.is_cancelled();
            let prepared = asked.prepare(&request, engine::Client { place, gone: &gone });
            // The engine receives only tokens and a mask, so no tree is kept in its queue.
            (request.prompt, request.form) = (engine::Prompt::default(), None);
            (request, prepared)
        })
        .await
        .map_err(|error| not_done("read the prompt", &error))?;
        let prepared = prepared.map_err(|error| self.refuse(&error))?;
        let style = prepared.style;
        let prompt = Tokens::new(u32::try_from(prepared.tokens.len()).unwrap_or(u32::MAX));
        self.check_in_time(&engine.snapshot(), prompt, request.max_tokens, wanted)?;
        self.ask_for_room(&engine, prompt, wanted).await?;
        // If this is dropped, the engine notices that its events are not read.
        let reported = if wanted.tokens {
            prepared.tokens.clone()
        } else {
            Vec::new()
        };
        let events = engine
            .submit(request, prepared)
            .map_err(|error| self.refuse(&error))?;
        span.event("queued");
        Ok((events, engine, id, (style, reported, answer)))
    }

    /// Works on text or tokens on another thread.
    pub(super) async fn of_text<T: Send + 'static>(
        &self,
        work: impl FnOnce(EngineHandle) -> Result<T, SubmitError> + Send + 'static,
    ) -> Result<T, Refusal> {
        let engine = self.0.engine.handle();
        let worked = blocking(move || work(engine)).await;
        let worked = worked.map_err(|error| not_done("read the text", &error))?;
        worked.map_err(|error| self.refuse(&error))
    }

    /// Refuses answers expected later than the caller's timeout.
    fn check_in_time(
        &self,
        engine: &EngineSnapshot,
        prompt: Tokens,
        max_tokens: Option<Tokens>,
        wanted: &Wanted,
    ) -> Result<(), Refusal> {
        let Some(patience) = wanted.patience else {
            return Ok(());
        };
        let mut expected = engine.begins_after(prompt, Instant::now());
        if wanted.whole
            && let Some(most) = max_tokens
        {
            // Bounded by the token limit and by the usual duration of answers.
            let at_most =
                Duration::try_from_secs_f64(f64::from(most.get()) / engine.tokens_per_second);
            expected = expected.saturating_add(
                at_most
                    .unwrap_or(engine.answer_takes)
                    .min(engine.answer_takes),
            );
        }
        if expected <= patience {
            return Ok(());
        }
        Err(Refusal::DeadlineUnreachable {
            act: "answer".to_owned(),
            patience_ms: millis(patience),
            expected_ms: millis(expected),
            // Time until the excess work is done.
            retry_after: expected.saturating_sub(patience).max(RETRY_SOON),
        })
    }

    /// Reports to the arbiter that the prompt needs, or the caller prefers, more KV capacity than is in force. Growth
    /// keeps its dwell and back-off; only a prompt that needs it waits, for at most [`GROWTH_PATIENCE`].
    async fn ask_for_room(
        &self,
        engine: &EngineHandle,
        prompt: Tokens,
        wish: &Wanted,
    ) -> Result<(), Refusal> {
        let capacity = |state: &EngineSnapshot| {
            state
                .plan
                .as_ref()
                .map_or(Tokens::ZERO, |plan| plan.kv_capacity)
        };
        let present = capacity(&engine.snapshot());
        let wanted = wish
            .context
            .unwrap_or(Tokens::ZERO)
            .min(self.0.context)
            .max(prompt);
        if wanted <= present || present == Tokens::ZERO {
            return Ok(());
        }
        if prompt > self.0.context {
            return Err(self.beyond_kv(prompt, present));
        }
        let needed = if prompt > present {
            prompt
        } else {
            Tokens::ZERO
        };
        let client = wish.client.as_deref().map(str::to_owned);
        let event = Event::CapacityWanted(CapacityWanted {
            needed,
            wanted,
            client,
            is_running: false,
        });
        let asked = self.0.control.submit(event, None);
        if asked.is_err() || prompt <= present {
            return Ok(());
        }
        let mut state = engine.watch();
        let grown = state.wait_for(|state| capacity(state) >= prompt);
        match tokio::time::timeout(GROWTH_PATIENCE, grown).await {
            Ok(_) => Ok(()),
            Err(_elapsed) => Err(self.beyond_kv(prompt, capacity(&engine.snapshot()))),
        }
    }

    /// Returns why there is no engine to wait for, if the arbiter has given it up or delays its next load.
    fn failure(&self) -> Option<Refusal> {
        let state = self.0.control.state();
        let failure = state
            .engine
            .failure
            .as_ref()
            .filter(|_| state.engine.state == EngineState::Failed)?;
        let wait = match failure.next {
            NextTry::Never { .. } => {
                return Some(Refusal::ModelFailed {
                    failure: failure.to_string(),
                });
            }
            NextTry::At(at) => at.saturating_since(self.0.control.clock().now()),
            NextTry::Now | NextTry::WhenDiskAnswers => Duration::ZERO,
        };
        Some(Refusal::EngineLost {
            reason: failure.to_string(),
            retry_after: wait.max(RETRY_SOON),
        })
    }

    fn refuse(&self, error: &SubmitError) -> Refusal {
        let act = || ACT.to_owned();
        if matches!(
            error,
            SubmitError::NotReady { .. } | SubmitError::Failed { .. }
        ) && let Some(refusal) = self.failure()
        {
            return refusal;
        }
        match error {
            SubmitError::Draining => draining(ACT),
            SubmitError::Failed { message } => lost(message.clone()),
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
            SubmitError::Prompt(PromptError::BeyondContext { tokens, limit }) => {
                Refusal::ContextLengthExceeded {
                    model: self.0.name.clone(),
                    prompt: *tokens,
                    limit: *limit,
                }
            }
            SubmitError::Prompt(PromptError::Constraint {
                field,
                value,
                source,
            }) => invalid(field, value.as_str(), format!("cannot be kept: {source}")),
            SubmitError::Prompt(error @ PromptError::Helper { .. }) => lost(in_one_line(error)),
            SubmitError::Prompt(PromptError::Sampling(error)) => {
                let (field, value, problem) = error.parts();
                invalid(field, value, problem)
            }
            SubmitError::Prompt(error) => invalid("messages", "", in_one_line(error)),
            SubmitError::Duplicate { .. } => lost(error.to_string()),
        }
    }

    /// Returns the refusal of a prompt that does not fit now: temporary only if it fits the capacity with ample memory.
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

    pub(super) fn failed(&self, error: engine::GenerateError) -> Refusal {
        use engine::GenerateError as E;
        match error {
            E::PromptBeyondKv {
                tokens, capacity, ..
            }
            | E::KvFull {
                tokens, capacity, ..
            } => self.beyond_kv(tokens, capacity),
            E::Form { message } => invalid(
                "response_format",
                "",
                format!("the requested format cannot be continued: {message}"),
            ),
            E::Stopping => draining("finish the answer"),
            // Only gRPC sets a deadline, and reports it itself.
            error @ (E::DeadlinePassed { .. }
            | E::EngineLost { .. }
            | E::HelperLost { .. }
            | E::Model { .. }
            | E::NotFinite { .. }) => lost(in_one_line(&error)),
        }
    }
}

/// Events of one request; dropping it cancels the request.
pub(super) struct Guarded {
    _answer: RunningAnswer,
    events: mpsc::Receiver<engine::GenerateEvent>,
    engine: EngineHandle,
    id: RequestId,
    metrics: Arc<Metrics>,
    span: Span,
    /// Whether a token has arrived.
    begun: bool,
    written: u64,
    /// Tokens of the prompt, if requested.
    pub(super) prompt: Vec<u32>,
}

impl Guarded {
    pub(super) async fn next(&mut self) -> Option<engine::GenerateEvent> {
        let event = self.events.recv().await;
        if let Some(event) = &event {
            self.note(event);
        }
        event
    }

    /// Records an event in span and metrics, for all APIs. Tokens count as they are processed, so that failed and
    /// cancelled answers count too.
    fn note(&mut self, event: &engine::GenerateEvent) {
        let span = &self.span;
        match event {
            engine::GenerateEvent::Started {
                prompt_tokens,
                cached_tokens,
            } => {
                self.metrics.tokens("prompt", prompt_tokens.get().into());
                self.metrics.tokens("cached", cached_tokens.get().into());
                span.event("started");
            }
            engine::GenerateEvent::Delta { tokens, .. } => {
                if !std::mem::replace(&mut self.begun, true) {
                    span.event("first_token");
                }
                let count = u64::try_from(tokens.len()).unwrap_or(u64::MAX);
                self.written = self.written.saturating_add(count);
                self.metrics.tokens("completion", count);
            }
            engine::GenerateEvent::Finished { reason, usage } => {
                // The last tokens have no text of their own.
                let all = u64::from(usage.completion_tokens.get());
                let rest = all.saturating_sub(self.written);
                self.metrics.tokens("completion", rest);
                span.set("gen_ai.usage.input_tokens", usage.prompt_tokens.get());
                span.set(
                    "gen_ai.usage.cache_read.input_tokens",
                    usage.cached_tokens.get(),
                );
                span.set("gen_ai.usage.output_tokens", usage.completion_tokens.get());
                span.set_list("gen_ai.response.finish_reasons", reason_word(*reason));
            }
            engine::GenerateEvent::Failed(error) => span.fail("failed", &in_one_line(error)),
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.engine.cancel(self.id);
    }
}

/// Returns the refusal for work on a text that was not done.
fn not_done(act: &str, error: &NotDone) -> Refusal {
    match error {
        NotDone::NoThread(_) => no_thread(act, error),
        NotDone::Panicked(_) => lost(format!("cannot {act}: {error}")),
    }
}

fn lost(reason: impl Into<String>) -> Refusal {
    Refusal::EngineLost {
        reason: reason.into(),
        retry_after: RETRY_SOON,
    }
}

fn draining(act: &str) -> Refusal {
    Refusal::Draining {
        act: act.to_owned(),
        retry_after: RETRY_SOON,
    }
}

/// Continuation of "cannot".
const ACT: &str = "start an answer";

/// Returns OpenAI's name, or the engine's own if OpenAI has none.
const fn reason_word(reason: engine::FinishReason) -> &'static str {
    match reason {
        engine::FinishReason::Stop | engine::FinishReason::StopText(_) => "stop",
        engine::FinishReason::Length => "length",
        engine::FinishReason::Cancelled => "cancelled",
        engine::FinishReason::KvReclaimed => "kv_reclaimed",
    }
}

impl Generator for Llm {
    fn generate(
        &self,
        request: llm::GenerateRequest,
    ) -> BoxFuture<'_, Result<mpsc::Receiver<llm::GenerateEvent>, Refusal>> {
        async move {
            let (admitted, time_left) = (Instant::now(), request.time_left);
            let prompt = match request.input {
                llm::Input::Prompt(text) => engine::Prompt::Text(text),
                llm::Input::Messages(messages) => engine::Prompt::Chat(messages.into()),
            };
            let sampling = self.sampling(request.sampling, SamplingWish::AS_COMPUTED);
            let seed = sampling.seed;
            let (mut guarded, _style) = self
                .submit(
                    engine::GenerateRequest {
                        sampling,
                        max_tokens: request.max_tokens,
                        stop: request.stop,
                        sinks: request.sinks,
                        deadline: time_left.and_then(|left| admitted.checked_add(left)),
                        ..engine::GenerateRequest::new(self.next_id(), prompt)
                    },
                    &Wanted {
                        patience: time_left,
                        whole: true,
                        ..Wanted::default()
                    },
                )
                .await?;
            let (sender, receiver) = mpsc::channel(STREAM_BUFFER);
            let llm = self.clone();
            tokio::spawn(async move {
                let mut first_token = None;
                loop {
                    let event = tokio::select! {
                        event = guarded.next() => event,
                        // The reader is gone, perhaps before its turn: dropping `guarded` cancels the request.
                        () = sender.closed() => return,
                    };
                    let Some(event) = event else { return };
                    let event = match event {
                        engine::GenerateEvent::Started { prompt_tokens, .. } => {
                            llm::GenerateEvent::Started {
                                model: llm.0.name.clone(),
                                prompt: prompt_tokens,
                                seed,
                            }
                        }
                        engine::GenerateEvent::Delta { text, .. } => {
                            first_token.get_or_insert_with(|| {
                                let took = admitted.elapsed();
                                llm.0.metrics.first_token(took);
                                took
                            });
                            llm::GenerateEvent::Delta { text }
                        }
                        engine::GenerateEvent::Finished { reason, usage } => match reason {
                            engine::FinishReason::KvReclaimed => {
                                llm::GenerateEvent::Failed(Refusal::KvReclaimed {
                                    generated: usage.completion_tokens,
                                    retry_after: RETRY_SOON,
                                })
                            }
                            reason => llm::GenerateEvent::Finished {
                                reason: match reason {
                                    engine::FinishReason::Stop
                                    | engine::FinishReason::StopText(_) => FinishReason::Stop,
                                    engine::FinishReason::Cancelled
                                    | engine::FinishReason::KvReclaimed
                                    | engine::FinishReason::Length => FinishReason::Length,
                                },
                                usage,
                                times: llm::Times {
                                    to_first_token: first_token
                                        .unwrap_or_else(|| admitted.elapsed()),
                                    total: admitted.elapsed(),
                                },
                            },
                        },
                        engine::GenerateEvent::Failed(engine::GenerateError::DeadlinePassed {
                            generated,
                        }) => llm::GenerateEvent::Failed(too_late(generated, time_left, admitted)),
                        engine::GenerateEvent::Failed(error) => {
                            llm::GenerateEvent::Failed(llm.failed(error))
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

/// Returns the refusal of an answer cut off by its deadline.
fn too_late(generated: Tokens, time_left: Option<Duration>, admitted: Instant) -> Refusal {
    Refusal::DeadlineUnreachable {
        act: format!("finish the answer, which has {generated} tokens,"),
        patience_ms: millis(time_left.unwrap_or_default()),
        expected_ms: millis(admitted.elapsed()),
        retry_after: RETRY_SOON,
    }
}
