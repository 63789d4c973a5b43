//! What is there and how it is: models, health, metrics, and the page.

use axum::{
    Json,
    extract::{Path, State},
    http::{HeaderValue, StatusCode, header},
    response::{Html, IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{
    backend::{ModelInfo, ModelKind, StatusBackend},
    doors::Doors,
    fault::{Fault, shortened},
};
use crate::policy::{
    refusal::Refusal,
    snapshot::{EngineState, Snapshot, WorkerState},
};

/// `GET /v1/models`.
pub(super) async fn models(State(doors): State<Doors>) -> Json<Value> {
    let models: Vec<Value> = doors.backends().status.models().iter().map(model_json).collect();
    Json(json!({"object": "list", "data": models}))
}

/// `GET /v1/models/{id}`; ids may contain slashes.
pub(super) async fn model(State(doors): State<Doors>, Path(id): Path<String>) -> Result<Json<Value>, Fault> {
    let models = doors.backends().status.models();
    models
        .iter()
        .find(|model| model.id == id)
        .map(|model| Json(model_json(model)))
        .ok_or_else(|| unknown_model(&id, &models))
}

/// The refusal of a model that is not there; names those that are.
pub(super) fn unknown_model<'a>(id: &str, models: impl IntoIterator<Item = &'a ModelInfo>) -> Fault {
    let known: Vec<String> = models.into_iter().map(|model| format!("`{}`", model.id)).collect();
    Fault::from(Refusal::UnknownModel {
        model: shortened(id),
        known: if known.is_empty() {
            String::new()
        } else {
            format!("; there is {}", known.join(", "))
        },
    })
}

fn model_json(model: &ModelInfo) -> Value {
    json!({"id": model.id, "object": "model", "created": model.created, "owned_by": "cotenant"})
}

/// `GET /health`: 200 when a request would be taken, 503 while it would not. Pressure alone never makes it fail.
pub(super) async fn health(State(doors): State<Doors>) -> Response {
    let snapshot = doors.backends().status.snapshot();
    let (code, status) = health_of(&snapshot);
    (code, Json(json!({"status": status, "pressure": snapshot.level}))).into_response()
}

fn health_of(snapshot: &Snapshot) -> (StatusCode, &'static str) {
    if snapshot.draining {
        return (StatusCode::SERVICE_UNAVAILABLE, "draining");
    }
    match snapshot.engine.state {
        EngineState::Absent | EngineState::Ready => (StatusCode::OK, "ok"),
        EngineState::Loading => (StatusCode::SERVICE_UNAVAILABLE, "loading model"),
        EngineState::Failed => (StatusCode::SERVICE_UNAVAILABLE, "engine failed"),
    }
}

/// `GET /running`, as llama-swap has it: what runs, and in which state.
pub(super) async fn running(State(doors): State<Doors>) -> Json<Value> {
    Json(json!({"running": running_of(&doors.backends().status.snapshot(), &doors.backends().status.models())}))
}

fn running_of(snapshot: &Snapshot, models: &[ModelInfo]) -> Vec<Value> {
    let engine = match snapshot.engine.state {
        EngineState::Absent => None,
        EngineState::Loading => Some("starting"),
        EngineState::Ready => Some("ready"),
        EngineState::Failed => Some("stopped"),
    };
    let mut running: Vec<Value> = engine
        .into_iter()
        .flat_map(|state| {
            models
                .iter()
                .filter(|model| model.kind == ModelKind::Chat)
                .map(move |model| json!({"model": model.id, "state": state, "kind": "engine"}))
        })
        .collect();
    running.extend(snapshot.workers.iter().filter_map(|worker| {
        let state = match worker.state {
            WorkerState::Ready => "ready",
            WorkerState::AwaitingMemory | WorkerState::BackingOff | WorkerState::Starting => "starting",
            WorkerState::Stopping => "stopping",
            WorkerState::Stopped | WorkerState::Degraded => return None,
        };
        Some(json!({"model": worker.name, "state": state, "kind": "worker", "pid": worker.pid}))
    }));
    running
}

/// `GET /metrics`.
pub(super) async fn metrics(State(doors): State<Doors>) -> Response {
    (
        [(header::CONTENT_TYPE, HeaderValue::from_static(OPENMETRICS))],
        doors.backends().status.metrics(),
    )
        .into_response()
}

/// `GET /status.json`: the arbiter's state, the last events, models and voices; bytes as integers, times in µs.
pub(super) async fn status_json(State(doors): State<Doors>) -> Response {
    let status = &doors.backends().status;
    ([NO_STORE], Json(status_of(status.as_ref()))).into_response()
}

fn status_of(status: &dyn StatusBackend) -> Value {
    let events: Vec<Value> = status
        .recent_events(EVENTS_SHOWN)
        .iter()
        .map(|event| json!({"at": event.at, "text": event.text}))
        .collect();
    let models: Vec<String> = status.models().into_iter().map(|model| model.id).collect();
    let voices: Vec<String> = status.voices().into_iter().map(|voice| voice.name).collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "snapshot": *status.snapshot(),
        "events": events,
        "models": models,
        "voices": voices,
    })
}

/// `GET /`: one page that needs nothing from elsewhere.
pub(super) async fn page() -> Response {
    (
        [
            NO_STORE,
            (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(PAGE_MAY_DO)),
        ],
        Html(include_str!("page.html")),
    )
        .into_response()
}

const NO_STORE: (header::HeaderName, HeaderValue) = (header::CACHE_CONTROL, HeaderValue::from_static("no-store"));

/// The page loads nothing from elsewhere and talks to nobody but us.
const PAGE_MAY_DO: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                           connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

/// The format that `prometheus-client` writes.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Our choice: what fits a screen.
const EVENTS_SHOWN: usize = 40;
