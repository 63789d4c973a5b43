//! Ollama's API: tags, ps, show, version, chat, generate.
//!
//! What is about memory stays the arbiter's: `num_ctx` is a wish for KV capacity, `keep_alive` one for the model's life.
//! Everything but chat and generate is answered from memory, also while the model loads.

use std::{
    convert::Infallible,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    time::{Duration, Instant, SystemTime},
};

use axum::{
    Extension, Json,
    body::{Body, Bytes as Piece},
    extract::{Request, State},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use futures_util::{FutureExt as _, stream};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{
    backend::{ChatStream, ModelInfo, ModelKind},
    body::{announced_length, parse_json, read_body},
    chat::{Admission, IGNORED, admission_patience, silence},
    chat_writer::Said,
    doors::{Doors, Meta},
    fault::Fault,
    generation::{Generation, Next, collected},
    ollama_wire::{Asked, End, Shape, WireChat, WireGenerate, Writer, rfc3339},
    status::unknown_model,
};
use crate::policy::{
    refusal::Refusal,
    snapshot::{EngineState, Snapshot},
};

/// A failure as Ollama's clients expect it: `{"error": "…"}`.
pub(super) struct OllamaFault(Fault);

impl<F: Into<Fault>> From<F> for OllamaFault {
    fn from(fault: F) -> Self {
        Self(fault.into())
    }
}

impl IntoResponse for OllamaFault {
    fn into_response(self) -> Response {
        self.0.into_plain_response()
    }
}

/// `GET /api/version`.
pub(super) async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `GET /api/tags`: the models, loaded or not.
pub(super) async fn tags(State(doors): State<Doors>) -> Json<Value> {
    let snapshot = doors.backends().status.snapshot();
    let models: Vec<Value> = chat_models(&doors)
        .iter()
        .map(|model| model_json(model, &snapshot))
        .collect();
    Json(json!({"models": models}))
}

/// `GET /api/ps`: what is in memory. `size` is what the model would hold if it had all it wants, `size_vram` what it
/// holds now, `context_length` the KV capacity in force.
pub(super) async fn ps(State(doors): State<Doors>) -> Json<Value> {
    let snapshot = doors.backends().status.snapshot();
    let models: Vec<Value> = chat_models(&doors)
        .iter()
        .filter_map(|model| running_json(model, &snapshot))
        .collect();
    Json(json!({"models": models}))
}

fn chat_models(doors: &Doors) -> Vec<ModelInfo> {
    let mut models = doors.backends().status.models();
    models.retain(|model| model.kind == ModelKind::Chat);
    models
}

fn details(snapshot: &Snapshot) -> Value {
    let family = snapshot.engine.shape.as_ref().map(|shape| shape.architecture.as_str());
    json!({
        "parent_model": "",
        "format": "gguf",
        "family": family.unwrap_or_default(),
        "families": family.into_iter().collect::<Vec<_>>(),
        "parameter_size": "",
        "quantization_level": "",
    })
}

fn model_json(model: &ModelInfo, snapshot: &Snapshot) -> Value {
    let made = SystemTime::UNIX_EPOCH + Duration::from_secs(model.created);
    json!({
        "name": model.id,
        "model": model.id,
        "modified_at": rfc3339(made),
        "size": model.bytes.get(),
        "digest": digest(model),
        "details": details(snapshot),
    })
}

/// Tells one file from another by name, size and time, in the length that clients cut up; it is no digest of its content.
fn digest(model: &ModelInfo) -> String {
    (0u8..4)
        .map(|part| {
            let mut hasher = DefaultHasher::new();
            (part, &model.id, model.bytes.get(), model.created).hash(&mut hasher);
            format!("{:016x}", hasher.finish())
        })
        .collect()
}

fn running_json(model: &ModelInfo, snapshot: &Snapshot) -> Option<Value> {
    let engine = &snapshot.engine;
    let (shape, plan) = (engine.shape.as_ref()?, engine.in_force.as_ref()?);
    if engine.state != EngineState::Ready {
        return None;
    }
    let held = shape.plan_bytes(plan);
    let full = engine
        .full
        .as_ref()
        .map_or(held, |full| shape.plan_bytes(full).max(held));
    let mut running = model_json(model, snapshot);
    for (key, value) in [
        ("size", json!(full.get())),
        ("size_vram", json!(held.get())),
        ("context_length", json!(plan.kv_capacity.get())),
        ("expires_at", json!(NEVER)),
    ] {
        if let Value::Object(map) = &mut running {
            map.insert(key.to_owned(), value);
        }
    }
    Some(running)
}

#[derive(Deserialize)]
struct WireShow {
    model: Option<String>,
    /// As older clients call it.
    name: Option<String>,
}

/// `POST /api/show`.
pub(super) async fn show(State(doors): State<Doors>, request: Request) -> Result<Json<Value>, OllamaFault> {
    let wire: WireShow = body_of(&doors, request).await?;
    let name = wire.model.or(wire.name).unwrap_or_default();
    let model = model_named(&doors, &name)?;
    let snapshot = doors.backends().status.snapshot();
    let mut info = serde_json::Map::new();
    if let Some(shape) = &snapshot.engine.shape {
        let architecture = &shape.architecture;
        info.insert("general.architecture".to_owned(), json!(architecture));
        info.insert(format!("{architecture}.context_length"), json!(shape.context_max.get()));
        info.insert(format!("{architecture}.block_count"), json!(shape.layer_count()));
    }
    let wanted = snapshot.engine.full.as_ref().map(|full| full.kv_capacity);
    Ok(Json(json!({
        "modelfile": "",
        "parameters": wanted.map_or_else(String::new, |tokens| format!("num_ctx {tokens}")),
        "template": "",
        "details": details(&snapshot),
        "model_info": info,
        "capabilities": ["completion", "tools"],
        "modified_at": rfc3339(SystemTime::UNIX_EPOCH + Duration::from_secs(model.created)),
    })))
}

/// `POST /api/chat`.
pub(super) async fn chat(
    State(doors): State<Doors>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, OllamaFault> {
    let began = Instant::now();
    let wire: WireChat = body_of(&doors, request).await?;
    let model = model_named(&doors, &wire.model)?.id;
    let asked = wire.into_asked(meta, model.clone())?;
    let writer = Writer {
        model,
        shape: Shape::Chat,
    };
    answer(doors, asked, writer, began).await
}

/// `POST /api/generate`.
pub(super) async fn generate(
    State(doors): State<Doors>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, OllamaFault> {
    let began = Instant::now();
    let wire: WireGenerate = body_of(&doors, request).await?;
    let model = model_named(&doors, &wire.model)?.id;
    let asked = wire.into_asked(meta, model.clone())?;
    let writer = Writer {
        model,
        shape: Shape::Generate,
    };
    answer(doors, asked, writer, began).await
}

async fn body_of<T: serde::de::DeserializeOwned>(doors: &Doors, request: Request) -> Result<T, Fault> {
    let (parts, body) = request.into_parts();
    let max = doors.limits().json_max;
    let length = announced_length(&parts.headers).unwrap_or(max);
    let _memory = doors.body_memory("read the request", length.min(max))?;
    let body = read_body(&parts.headers, body, doors.body_limits(max)).await?;
    parse_json(&body)
}

/// The model of a name; Ollama's names end in `:latest` when nothing else is said.
fn model_named(doors: &Doors, name: &str) -> Result<ModelInfo, Fault> {
    let models = chat_models(doors);
    let plain = name.strip_suffix(":latest").unwrap_or(name);
    models
        .iter()
        .find(|model| model.id == name || model.id == plain)
        .cloned()
        .ok_or_else(|| unknown_model(name, &models))
}

async fn answer(doors: Doors, asked: Asked, writer: Writer, began: Instant) -> Result<Response, OllamaFault> {
    let Some(backend) = doors.backends().chat.clone() else {
        return Err(OllamaFault::from(Refusal::NotConfigured {
            act: "start a chat".to_owned(),
            what: "model".to_owned(),
        }));
    };
    let mut ignored = axum::http::HeaderMap::new();
    if asked.wants_unload {
        // what the engine holds is the arbiter's to decide
        ignored.insert(IGNORED, HeaderValue::from_static("keep_alive"));
    }
    let Some(request) = asked.request else {
        return Ok((ignored, Json(writer.loaded())).into_response());
    };
    let meta = request.meta.clone();
    let mut admission: Admission = Box::pin(async move { backend.chat(request).await });
    if !asked.streamed {
        let (said, reason, usage) = collected(Generation::new(admission.await?, began, &doors)).await?;
        let end = End {
            reason,
            usage,
            first: began.elapsed(),
            total: began.elapsed(),
            context: context_in_force(&doors),
        };
        return Ok((ignored, Json(writer.end(&said, &end))).into_response());
    }
    let patience = admission_patience(&meta, doors.limits());
    let silence = silence(&meta, doors.limits());
    let stage = match timeout(patience, &mut admission).await {
        Ok(admitted) => Stage::Running(Generation::new(admitted?, began, &doors)),
        // too late for a status code: keep the client from giving up, and tell it in the stream
        Err(_elapsed) => Stage::Admitting(admission),
    };
    let lines = Lines {
        stage,
        waiting: None,
        doors,
        writer,
        began,
        first: None,
        silence,
    };
    let body = stream::unfold(lines, |mut lines| async move {
        let line = lines.next().await?;
        Some((Ok::<_, Infallible>(Piece::from(format!("{line}\n"))), lines))
    });
    let kind = [(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"))];
    Ok((ignored, kind, Body::from_stream(body)).into_response())
}

fn context_in_force(doors: &Doors) -> Option<crate::units::Tokens> {
    let snapshot = doors.backends().status.snapshot();
    snapshot.engine.in_force.as_ref().map(|plan| plan.kv_capacity)
}

/// Where a streamed answer is.
enum Stage {
    Admitting(Admission),
    Running(Generation),
    Done,
}

/// What is being waited for; kept when a line of silence comes before it.
type Waiting = futures_util::future::BoxFuture<'static, Waited>;

enum Waited {
    Admitted(Result<ChatStream, Refusal>),
    Next(Next, Generation),
}

/// A streamed answer, line by line.
struct Lines {
    stage: Stage,
    waiting: Option<Waiting>,
    doors: Doors,
    writer: Writer,
    began: Instant,
    first: Option<Duration>,
    silence: Duration,
}

impl Lines {
    async fn next(&mut self) -> Option<Value> {
        loop {
            if self.waiting.is_none() {
                self.waiting = Some(match std::mem::replace(&mut self.stage, Stage::Done) {
                    Stage::Admitting(admission) => admission.map(Waited::Admitted).boxed(),
                    Stage::Running(mut generation) => async move {
                        let next = generation.next().await;
                        Waited::Next(next, generation)
                    }
                    .boxed(),
                    Stage::Done => return None,
                });
            }
            let waiting = self.waiting.as_mut()?;
            let Ok(waited) = timeout(self.silence, waiting).await else {
                // lines cannot have comments; an empty piece says nothing and keeps the client from giving up
                return Some(self.writer.piece(&Said::default()));
            };
            self.waiting = None;
            match waited {
                Waited::Admitted(Ok(events)) => {
                    self.stage = Stage::Running(Generation::new(events, self.began, &self.doors));
                }
                Waited::Admitted(Err(refusal)) | Waited::Next(Next::Failed(refusal), _) => {
                    let fault = Fault::from(refusal);
                    tracing::warn!(reason = fault.message(), "an answer failed after its first byte");
                    return Some(json!({"error": fault.message()}));
                }
                Waited::Next(Next::End(reason, usage), _) => {
                    let total = self.began.elapsed();
                    let end = End {
                        reason,
                        usage,
                        first: self.first.unwrap_or(total),
                        total,
                        context: context_in_force(&self.doors),
                    };
                    return Some(self.writer.end(&Said::default(), &end));
                }
                Waited::Next(next, generation) => {
                    self.first.get_or_insert_with(|| self.began.elapsed());
                    self.stage = Stage::Running(generation);
                    let mut said = Said::default();
                    match next {
                        Next::Reasoning(text) => said.reasoning = text,
                        Next::Text(text) => said.text = text,
                        Next::Call(call) => said.tool_calls.push(call),
                        Next::End(..) | Next::Failed(_) => {}
                    }
                    return Some(self.writer.piece(&said));
                }
            }
        }
    }
}

/// The model is not given up for being idle.
const NEVER: &str = "9999-12-31T23:59:59Z";
