//! `POST /v1/chat/completions`.
//!
//! ```text
//!               refused                        refused: error object
//!   admitting ────────► status code   ┌───────────────────────────────┐
//!       │ admitted, or waited long    │                               │
//!       └──────────► stream opened ───┴► role ─► deltas ─► finish ─► usage ─► [DONE]
//!                      : keepalive after every second of silence
//! ```

use std::{
    collections::VecDeque,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Extension, Json,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures_util::{
    StreamExt,
    future::BoxFuture,
    stream::{self, Stream},
};
use tokio::time::timeout;

use super::{
    backend::{ChatStream, ModelKind, RequestMeta},
    body::{announced_length, parse_json, read_body},
    chat_wire::WireRequest,
    chat_writer::ChatWriter,
    doors::{Doors, Meta, unix_seconds},
    fault::Fault,
    generation::{Generation, Next, collected},
    limits::Limits,
    status::{task, unknown_model, wrong_model},
};
use crate::policy::refusal::Refusal;

/// `POST /v1/chat/completions`.
pub(super) async fn completions(
    State(doors): State<Doors>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, Fault> {
    let began = Instant::now();
    let (parts, body) = request.into_parts();
    let limits = doors.limits().clone();
    let length = announced_length(&parts.headers).unwrap_or(limits.json_max);
    let _memory = doors.body_memory(ACT, length.min(limits.json_max))?;
    let body = read_body(&parts.headers, body, doors.body_limits(limits.json_max)).await?;
    let wire: WireRequest = parse_json(&body)?;
    drop(body);

    let model = model_named(&doors, wire.model.as_deref())?;
    let Some(backend) = doors.backends().chat.clone() else {
        return Err(Fault::from(Refusal::NotConfigured {
            act: ACT.to_owned(),
            what: "model".to_owned(),
        }));
    };
    let writer = ChatWriter {
        id: doors.fresh_id("chatcmpl-"),
        created: unix_seconds(),
        model: model.clone(),
        include_usage: wire.include_usage(),
    };
    let ignored = ignored_header(&wire.ignored());
    let streamed = wire.stream == Some(true);
    let patience = admission_patience(&meta, &limits);
    let request = wire.into_request(meta.clone(), model)?;
    let mut admission: Admission = Box::pin(async move { backend.chat(request).await });

    if !streamed {
        let (said, reason, usage) = collected(Generation::new(admission.await?, began, &doors)).await?;
        return Ok((ignored, Json(writer.whole(&said, reason, usage))).into_response());
    }
    let stage = match timeout(patience, &mut admission).await {
        Ok(admitted) => Stage::Admitted(Generation::new(admitted?, began, &doors)),
        // too late for a status code: keep the client from giving up, and tell it in the stream
        Err(_elapsed) => Stage::Admitting(admission, began, doors),
    };
    let events = sse(ChatSse::new(stage, writer).into_stream().map(Ok), &meta, &limits);
    Ok((ignored, events).into_response())
}

/// A request that is being admitted.
pub(super) type Admission = BoxFuture<'static, Result<ChatStream, Refusal>>;

/// How long a stream waits for its admission before it is opened: half of what the client waits for the first byte.
pub(super) fn admission_patience(meta: &RequestMeta, limits: &Limits) -> Duration {
    meta.patience.map_or(limits.admission_timeout, |patience| {
        limits.admission_timeout.min(patience / 2)
    })
}

/// A stream of server-sent events, with a comment after every silence. An error breaks the connection off.
pub(super) fn sse<S>(payloads: S, meta: &RequestMeta, limits: &Limits) -> Response
where
    S: Stream<Item = io::Result<String>> + Send + 'static,
{
    let events = payloads.then(|payload| async {
        if payload.is_err() {
            // What came before is sent first: a connection that breaks takes along what waits to be written.
            tokio::task::yield_now().await;
        }
        payload.map(|payload| Event::default().data(payload))
    });
    let keepalive = KeepAlive::new().interval(silence(meta, limits)).text("keepalive");
    (
        // tells nginx and its like not to collect the stream
        [(NO_BUFFERING, HeaderValue::from_static("no"))],
        Sse::new(events).keep_alive(keepalive),
    )
        .into_response()
}

/// Silence after which a stream gets a comment: sooner for a client that says it waits less than three times as long.
pub(super) fn silence(meta: &RequestMeta, limits: &Limits) -> Duration {
    meta.patience.map_or(limits.keepalive, |patience| {
        limits.keepalive.min((patience / 3).max(SILENCE_MIN))
    })
}

fn model_named(doors: &Doors, name: Option<&str>) -> Result<String, Fault> {
    let models = doors.backends().status.models();
    let mut chat = models.iter().filter(|model| model.kind == ModelKind::Chat);
    match name {
        Some(name) => match chat.clone().find(|model| model.id == name) {
            Some(model) => Ok(model.id.clone()),
            None => match models.iter().find(|model| model.id == name) {
                Some(other) => Err(wrong_model(name, task(other.kind), chat)),
                None => Err(unknown_model(name, chat)),
            },
        },
        None => chat
            .next()
            .map(|model| model.id.clone())
            .ok_or_else(|| unknown_model("", [])),
    }
}

pub(super) fn ignored_header(ignored: &[&'static str]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_str(&ignored.join(", "))
        && !ignored.is_empty()
    {
        headers.insert(IGNORED, value);
    }
    headers
}

/// Where a streamed answer is.
enum Stage {
    Admitting(Admission, Instant, Doors),
    Admitted(Generation),
    Running(Generation),
    Done,
}

/// A streamed answer: payloads of server-sent events, one after the other.
struct ChatSse {
    stage: Stage,
    writer: Arc<ChatWriter>,
    queue: VecDeque<String>,
    calls: usize,
}

impl ChatSse {
    fn new(stage: Stage, writer: ChatWriter) -> Self {
        Self {
            stage,
            writer: Arc::new(writer),
            queue: VecDeque::new(),
            calls: 0,
        }
    }

    fn into_stream(self) -> impl Stream<Item = String> + Send + 'static {
        stream::unfold(self, |mut answer| async move {
            let payload = answer.next().await?;
            Some((payload, answer))
        })
    }

    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(payload) = self.queue.pop_front() {
                return Some(payload);
            }
            self.stage = match std::mem::replace(&mut self.stage, Stage::Done) {
                Stage::Admitting(admission, began, doors) => match admission.await {
                    Ok(events) => Stage::Admitted(Generation::new(events, began, &doors)),
                    Err(refusal) => self.fail(refusal),
                },
                Stage::Admitted(generation) => {
                    self.queue.push_back(self.writer.role());
                    Stage::Running(generation)
                }
                Stage::Running(mut generation) => match generation.next().await {
                    Next::Text(piece) => {
                        self.queue.push_back(self.writer.delta(&piece));
                        Stage::Running(generation)
                    }
                    Next::Reasoning(piece) => {
                        self.queue.push_back(self.writer.reasoning(&piece));
                        Stage::Running(generation)
                    }
                    Next::Call(call) => {
                        self.queue.extend(self.writer.tool_call(self.calls, &call));
                        self.calls += 1;
                        Stage::Running(generation)
                    }
                    Next::End(reason, usage) => {
                        self.queue.push_back(self.writer.finish(reason));
                        if self.writer.include_usage {
                            self.queue.push_back(self.writer.usage(usage));
                        }
                        self.queue.push_back("[DONE]".to_owned());
                        Stage::Done
                    }
                    Next::Failed(refusal) => self.fail(refusal),
                },
                Stage::Done => return None,
            };
        }
    }

    fn fail(&mut self, refusal: Refusal) -> Stage {
        let fault = Fault::from(refusal);
        tracing::warn!(
            answer = self.writer.id,
            reason = fault.message(),
            "an answer failed after its first byte"
        );
        self.queue.push_back(fault.to_json().to_string());
        Stage::Done
    }
}

/// As it reads after "cannot".
const ACT: &str = "start a chat completion";
/// Our choice: more often than this is traffic without use.
const SILENCE_MIN: Duration = Duration::from_millis(100);
const NO_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
/// Fields of the request that were read and not honoured.
pub(super) const IGNORED: HeaderName = HeaderName::from_static("x-cotenant-ignored");
