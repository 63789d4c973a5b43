//! Answers of the LLM, whole or streamed, shared by all text APIs.
//!
//! ```text
//!               refused                       refused: the API's error
//!   admitting ────────► status code   ┌───────────────────────────────┐
//!       │ admitted, or waited long    │                               │
//!       └──────────► stream opened ───┴► begin ─► parts ─► end of the answer
//!                      kept alive after every second of silence
//! ```

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Json,
    extract::Request,
    http::{HeaderName, HeaderValue},
    response::{IntoResponse, Response},
};
use futures_util::{
    StreamExt,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;

use super::{
    admission::admitted,
    api::Api,
    backend::{AnswerPart, ChatBackend, ChatEvent, ChatRequest, ChatStream, FinishReason, Usage},
    body::{bounded_tree, parse_json, received},
    fault::Fault,
    generation::{Generation, Said, collected},
    memory::RequestMemory,
    patience::is_of_memory,
    stream::{Payload, admission_patience, held_for_memory, lines, sse},
};
use cotenant_conversation::{refusal::Refusal, refusals::not_configured};
use cotenant_units::Bytes;

/// Serialises one answer for one API.
pub(super) trait Writer: Send + Sized + 'static {
    /// First payloads of a stream, once the prompt has been read.
    fn begin(&mut self, prompt: Usage) -> Vec<Payload>;
    fn part(&mut self, part: AnswerPart) -> Vec<Payload>;
    /// The tokens of prompt and answer, before the end of a stream that requested them.
    fn context(&mut self, _tokens: Vec<u32>) {}
    /// The end of an answer that is followed by another in the same stream.
    fn next(&mut self, _reason: FinishReason, _usage: Usage) -> Vec<Payload> {
        Vec::new()
    }
    fn end(&mut self, reason: FinishReason, usage: Usage) -> Vec<Payload>;
    /// The end of a stream that cannot be completed.
    fn fail(&mut self, fault: &Fault) -> Vec<Payload> {
        vec![Payload::from(&fault.to_json())]
    }
    /// A complete answer that is followed by another.
    fn keep(&mut self, _said: Said, _reason: FinishReason, _usage: Usage) {}
    fn whole(self, said: Said, reason: FinishReason, usage: Usage) -> Value;
    /// A fault, with its field under the name used by the API.
    fn named(&self, fault: Fault) -> Fault {
        fault
    }
    /// Keep-alive line of a line stream; event streams use comments.
    fn silence(&self) -> Option<Payload> {
        None
    }
}

/// The LLM, or 404.
pub(super) fn llm(api: &Api) -> Result<Arc<dyn ChatBackend>, Fault> {
    let chat = api.backends().chat.clone();
    chat.ok_or_else(|| not_configured(ACT, "model").into())
}

/// Parses a JSON request and reserves memory for it and the values built from it, until the last byte of its answer.
///
/// # Errors
/// 400 for invalid JSON or fields, 413 if it is too large, 429 if no memory is free now.
pub(super) async fn read_json<T: DeserializeOwned>(
    api: &Api,
    request: Request,
) -> Result<(T, RequestMemory), Fault> {
    let tree_max = api.limits().tree_max;
    read_made(api, request, |body| {
        let tree = bounded_tree(body, tree_max)?;
        Ok(tree.saturating_mul(TREES_MAX))
    })
    .await
}

/// [`read_json`] for requests without trees: texts, numbers, and lists of numbers.
pub(super) async fn read_plain_json<T: DeserializeOwned>(
    api: &Api,
    request: Request,
) -> Result<(T, RequestMemory), Fault> {
    read_made(api, request, |body| {
        Ok(Bytes::of_len(body.len().saturating_mul(PLAIN_MAX)))
    })
    .await
}

/// Parses a JSON request; `made` bounds the memory of derived values beside the body.
async fn read_made<T: DeserializeOwned>(
    api: &Api,
    request: Request,
    made: impl FnOnce(&[u8]) -> Result<Bytes, Fault>,
) -> Result<(T, RequestMemory), Fault> {
    let (parts, body) = request.into_parts();
    let memory = RequestMemory::in_extensions(&parts.extensions);
    let body = received(body).await?;
    let made = made(&body)?.saturating_add(Bytes::of_len(body.len()));
    memory.hold(api.request_memory(), READ, made)?;
    Ok((parse_json(&body)?, memory))
}

/// Answers a request, streamed or whole as requested. Failures before the first byte are returned.
pub(super) async fn answer<W: Writer>(
    api: Api,
    request: ChatRequest,
    writer: W,
    began: Instant,
) -> Result<Response, Fault> {
    answer_all(api, (request, VecDeque::new()), writer, began).await
}

/// Answers requests in sequence, as parts of one answer in the form that the first one requests. Failures before the
/// first byte are returned.
pub(super) async fn answer_all<W: Writer>(
    api: Api,
    (first, rest): Requests,
    mut writer: W,
    began: Instant,
) -> Result<Response, Fault> {
    let backend = llm(&api)?;
    let meta = first.meta.clone();
    let streamed = first.streamed;
    let seed = first
        .sampling
        .asked
        .seed
        .map(|seed| [(SEED, HeaderValue::from(seed))]);
    let mut asked = Asked {
        backend,
        requests: rest,
        hold: held_for_memory(&api, &meta),
        api,
    };
    let mut running = (asked.admission(first), began);
    if !streamed {
        loop {
            let (admission, began) = running;
            let answered =
                async { collected(Generation::new(admission.await?, began, &asked.api)).await };
            let (said, reason, usage) = answered
                .await
                .map_err(|refusal| writer.named(refusal.into()))?;
            match asked.next() {
                Some(next) => {
                    writer.keep(said, reason, usage);
                    running = next;
                }
                None => return Ok((seed, Json(writer.whole(said, reason, usage))).into_response()),
            }
        }
    }
    let limits = asked.api.limits().clone();
    let (mut admission, began) = running;
    let stage = match timeout(admission_patience(&meta, &limits), &mut admission).await {
        Ok(admitted) => {
            let events = admitted.map_err(|refusal| writer.named(refusal.into()))?;
            Stage::Running(Generation::new(events, began, &asked.api))
        }
        // too late for a status code: open the stream, keep the client waiting, and report a failure in the stream
        Err(_elapsed) => Stage::Admitting(admission, began),
    };
    let silence = writer.silence();
    let payloads = payloads(stage, asked, writer);
    let response = match silence {
        None => sse(payloads.map(Ok), &meta, &limits),
        Some(silence) => lines(payloads, silence, &meta, &limits),
    };
    Ok((seed, response).into_response())
}

/// The request that determines the form of the answer, and those answered after it.
pub(super) type Requests = (ChatRequest, VecDeque<ChatRequest>);

type Admission = BoxFuture<'static, Result<ChatStream, Refusal>>;

struct Asked {
    api: Api,
    backend: Arc<dyn ChatBackend>,
    requests: VecDeque<ChatRequest>,
    /// How long each waits while memory is short.
    hold: Duration,
}

impl Asked {
    fn admission(&self, request: ChatRequest) -> Admission {
        let (backend, hold) = (Arc::clone(&self.backend), self.hold);
        Box::pin(async move { admitted(&*backend, request, hold, is_of_memory).await })
    }

    /// Starts the admission of the next request.
    fn next(&mut self) -> Option<(Admission, Instant)> {
        let request = self.requests.pop_front()?;
        Some((self.admission(request), Instant::now()))
    }
}

enum Stage {
    Admitting(Admission, Instant),
    Running(Generation),
    Done,
}

/// The payloads of a streamed answer.
struct Streamed<W> {
    stage: Stage,
    asked: Asked,
    writer: W,
    begun: bool,
    queue: VecDeque<Payload>,
}

fn payloads<W: Writer>(stage: Stage, asked: Asked, writer: W) -> BoxStream<'static, Payload> {
    let streamed = Streamed {
        stage,
        asked,
        writer,
        begun: false,
        queue: VecDeque::new(),
    };
    stream::unfold(streamed, |mut streamed| async move {
        let payload = streamed.next().await?;
        Some((payload, streamed))
    })
    .boxed()
}

impl<W: Writer> Streamed<W> {
    async fn next(&mut self) -> Option<Payload> {
        loop {
            if let Some(payload) = self.queue.pop_front() {
                return Some(payload);
            }
            self.stage = match std::mem::replace(&mut self.stage, Stage::Done) {
                Stage::Admitting(admission, began) => match admission.await {
                    Ok(events) => Stage::Running(Generation::new(events, began, &self.asked.api)),
                    Err(refusal) => self.fail(refusal),
                },
                Stage::Running(mut generation) => {
                    let event = generation.next().await;
                    self.take(event, generation)
                }
                Stage::Done => return None,
            };
        }
    }

    fn take(&mut self, event: ChatEvent, generation: Generation) -> Stage {
        match event {
            ChatEvent::Started {
                prompt_tokens,
                cached_tokens,
            } => {
                self.begin(Usage {
                    prompt_tokens,
                    cached_tokens,
                    ..Usage::default()
                });
                Stage::Running(generation)
            }
            ChatEvent::Part(part) => {
                self.begin(Usage::default());
                self.queue.extend(self.writer.part(part));
                Stage::Running(generation)
            }
            ChatEvent::Context(tokens) => {
                self.writer.context(tokens);
                Stage::Running(generation)
            }
            ChatEvent::Finished { reason, usage } => {
                self.begin(usage);
                match self.asked.next() {
                    Some((admission, began)) => {
                        self.begun = false;
                        self.queue.extend(self.writer.next(reason, usage));
                        Stage::Admitting(admission, began)
                    }
                    None => {
                        self.queue.extend(self.writer.end(reason, usage));
                        Stage::Done
                    }
                }
            }
            ChatEvent::Failed(refusal) => self.fail(refusal),
        }
    }

    fn begin(&mut self, prompt: Usage) {
        if !std::mem::replace(&mut self.begun, true) {
            self.queue.extend(self.writer.begin(prompt));
        }
    }

    fn fail(&mut self, refusal: Refusal) -> Stage {
        let fault = self.writer.named(refusal.into());
        tracing::warn!(
            reason = fault.message(),
            "an answer failed after its first byte"
        );
        self.queue.extend(self.writer.fail(&fault));
        Stage::Done
    }
}

/// The seed of the answer, given or random: equal seed, settings and prompt give an equal answer.
const SEED: HeaderName = HeaderName::from_static("x-cotenant-seed");

/// Completes "cannot".
const ACT: &str = "start an answer";
const READ: &str = "read the request";
/// Concurrent JSON trees of one request: its fields, and their copies in the prompt or the answer.
const TREES_MAX: u64 = 2;
/// Memory per byte of text in a list of numbers: a `u32` for two bytes of text, twice while the list doubles.
const PLAIN_MAX: usize = 4;
