//! Ollama's API: tags, ps, show, version, chat, generate.
//!
//! The arbiter decides about memory: `num_ctx` and `keep_alive` are hints. All endpoints but chat and generate are
//! served from cached state, also while the model loads.

use std::time::{Duration, Instant, SystemTime};

use axum::{
    Extension, Json,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    answer::{answer, llm, read_json},
    api::{Api, Meta},
    backend::{ModelInfo, ModelKind, RequestMeta},
    fault::Fault,
    models::{digest, named},
    ollama_wire::WireRequest,
    ollama_writer::{OllamaWriter, Shape, rfc3339},
    stream::{ignored_header, ignored_of, merged},
};
use cotenant_policy::snapshot::{EngineState, Snapshot};

/// A failure in Ollama's form: `{"error": "…"}`.
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

/// `GET /api/version`: our own version, and the Ollama release with this API, because clients refuse older releases.
pub(super) async fn version() -> Json<Value> {
    Json(json!({"version": OLLAMA_VERSION, "cotenant": env!("CARGO_PKG_VERSION")}))
}

/// `GET /api/tags`: the models, loaded or not.
pub(super) async fn tags(State(api): State<Api>) -> Json<Value> {
    let snapshot = api.backends().status.snapshot();
    let named = |model: &ModelInfo| -> Vec<Value> {
        let names = std::iter::once(&model.id).chain(&model.aliases);
        let named = names.map(|name| ModelInfo {
            id: name.clone(),
            ..model.clone()
        });
        named.map(|model| model_json(&model, &snapshot)).collect()
    };
    let mut models = models_of(&api, ModelKind::Chat);
    models.extend(models_of(&api, ModelKind::Embedding));
    let models: Vec<Value> = models.iter().flat_map(named).collect();
    Json(json!({"models": models}))
}

/// `GET /api/ps`: memory use. `size` is the model's size with ample memory, `size_vram` its current size,
/// `context_length` the current KV capacity.
pub(super) async fn ps(State(api): State<Api>) -> Json<Value> {
    let snapshot = api.backends().status.snapshot();
    let models: Vec<Value> = models_of(&api, ModelKind::Chat)
        .iter()
        .filter_map(|model| running_json(model, &snapshot))
        .collect();
    Json(json!({"models": models}))
}

fn models_of(api: &Api, kind: ModelKind) -> Vec<ModelInfo> {
    let mut models = api.backends().status.models();
    models.retain(|model| model.kind == kind);
    models
}

fn details(model: &ModelInfo, snapshot: &Snapshot) -> Value {
    let weights = model.weights.as_ref();
    let shape = snapshot.engine.shape.as_ref();
    let family = shape
        .filter(|_| model.kind == ModelKind::Chat)
        .map(|shape| shape.architecture.as_str());
    json!({
        "parent_model": "",
        "format": "gguf",
        "family": family.unwrap_or_default(),
        "families": family.into_iter().collect::<Vec<_>>(),
        "parameter_size": weights.map_or_else(String::new, |weights| humane(weights.parameters)),
        "quantization_level": weights.map_or("", |weights| weights.quantization.as_str()),
    })
}

/// A parameter count as on model cards: `4.6M`, `1.7B`.
fn humane(count: u64) -> String {
    let tenths = |unit: u64| format!("{}.{}", count / unit, count % unit * 10 / unit);
    match count {
        1_000_000_000.. => format!("{}B", tenths(1_000_000_000)),
        1_000_000.. => format!("{}M", tenths(1_000_000)),
        _ => format!("{}K", tenths(1_000)),
    }
}

fn model_json(model: &ModelInfo, snapshot: &Snapshot) -> Value {
    let made = SystemTime::UNIX_EPOCH + Duration::from_secs(model.created);
    json!({
        "name": model.id,
        "model": model.id,
        "modified_at": rfc3339(made),
        "size": model.bytes.get(),
        "digest": digest(model),
        "details": details(model, snapshot),
    })
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
    let running = json!({
        "size": full.get(),
        "size_vram": held.get(),
        "context_length": engine.context_of(plan).get(),
        "expires_at": NEVER,
    });
    Some(merged(model_json(model, snapshot), running))
}

#[derive(Deserialize)]
struct WireShow {
    model: Option<String>,
    /// Name of the field in older clients.
    name: Option<String>,
}

pub(super) async fn show(
    State(api): State<Api>,
    request: Request,
) -> Result<Json<Value>, OllamaFault> {
    let (wire, _memory): (WireShow, _) = read_json(&api, request).await?;
    let name = wire.model.or(wire.name).unwrap_or_default();
    let snapshot = api.backends().status.snapshot();
    if let Ok(model) = named(&api, ModelKind::Embedding, Some(&name)) {
        return Ok(Json(merged(
            model_json(&model, &snapshot),
            json!({"modelfile": "", "parameters": "", "template": "", "model_info": {}, "capabilities": ["embedding"]}),
        )));
    }
    let model = named(&api, ModelKind::Chat, Some(&name))?;
    let mut info = json!({});
    if let Some(shape) = &snapshot.engine.shape {
        let architecture = &shape.architecture;
        info = json!({
            "general.architecture": architecture,
            format!("{architecture}.context_length"): shape.context_max.get(),
            format!("{architecture}.block_count"): shape.layer_count(),
            format!("{architecture}.attention.head_count_kv"): shape.kv.kv_heads,
            format!("{architecture}.attention.key_length"): shape.kv.head_dim,
            "general.basename": shape.name,
        });
    }
    if let Some(weights) = &model.weights {
        let parameters = json!({"general.parameter_count": weights.parameters});
        info = merged(info, parameters);
    }
    let template = api.backends().status.template().unwrap_or_default();
    let thinks = ["<think>", "[THINK]", "<|channel>thought"]
        .iter()
        .any(|tag| template.contains(tag));
    let thinks = thinks.then_some("thinking");
    let capabilities: Vec<&str> = ["completion", "tools"].into_iter().chain(thinks).collect();
    let engine = &snapshot.engine;
    let wanted = engine.full.as_ref().map(|full| engine.context_of(full));
    Ok(Json(json!({
        "modelfile": "",
        "parameters": wanted.map_or_else(String::new, |tokens| format!("num_ctx {tokens}")),
        "template": template,
        "details": details(&model, &snapshot),
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": rfc3339(SystemTime::UNIX_EPOCH + Duration::from_secs(model.created)),
    })))
}

pub(super) async fn chat(
    State(api): State<Api>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, OllamaFault> {
    asked(api, meta, request, Shape::Chat).await
}

pub(super) async fn generate(
    State(api): State<Api>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, OllamaFault> {
    asked(api, meta, request, Shape::Generate).await
}

async fn asked(
    api: Api,
    meta: RequestMeta,
    request: Request,
    shape: Shape,
) -> Result<Response, OllamaFault> {
    let began = Instant::now();
    let (wire, _memory): (WireRequest, _) = read_json(&api, request).await?;
    let model = named(&api, ModelKind::Chat, Some(&wire.model))?.id;
    let asked = match shape {
        Shape::Chat => wire.into_chat(meta, model.clone()),
        Shape::Generate => wire.into_generate(meta, model.clone()),
    }?;
    llm(&api)?;
    let writer = OllamaWriter::new(model, shape, &api, began);
    let Some(request) = asked.request else {
        let nothing = Json(writer.nothing_asked(asked.unload));
        return Ok((ignored_header(&asked.ignored), nothing).into_response());
    };
    let ignored = ignored_of(asked.ignored, &request);
    Ok((ignored, answer(api, request, writer, began).await?).into_response())
}

/// The release with the newest features supported here: tools while streaming, `think`, `truncate` and `shift`.
const OLLAMA_VERSION: &str = "0.12.10";

/// The model is never unloaded for idleness.
const NEVER: &str = "9999-12-31T23:59:59Z";
