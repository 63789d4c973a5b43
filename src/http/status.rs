//! Models, health, metrics and the page.

use std::{
    sync::LazyLock,
    time::{Duration, SystemTime},
};

use axum::{
    Extension, Json,
    extract::{Path, RawQuery, State},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{Html, IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{
    api::{Api, Meta},
    backend::{HistoryQuery, ModelInfo, ModelKind},
    fault::Fault,
    models::{task, unknown_model},
    ollama_writer::rfc3339,
    operate::operator,
    stream::merged,
};
use cotenant_policy::{
    health::Health,
    snapshot::{EngineState, EngineView, Snapshot, WorkerState},
};

pub(super) async fn models(State(api): State<Api>) -> Json<Value> {
    let models = api.backends().status.models();
    let models: Vec<Value> = models.iter().flat_map(named_json).collect();
    // the last three are Anthropic's pagination
    let (first, last) = (models.first(), models.last());
    let id = |model: Option<&Value>| model.and_then(|model| model.get("id")).cloned();
    Json(json!({
        "object": "list", "first_id": id(first), "last_id": id(last), "has_more": false, "data": models,
    }))
}

/// Ids may contain slashes.
pub(super) async fn model(
    State(api): State<Api>,
    Path(id): Path<String>,
) -> Result<Json<Value>, Fault> {
    let models = api.backends().status.models();
    models
        .iter()
        .find(|model| model.is_called(&id))
        .map(|model| Json(model_json(model, &id)))
        .ok_or_else(|| unknown_model(&id, &models))
}

/// A model under each of its names.
fn named_json(model: &ModelInfo) -> Vec<Value> {
    let names = std::iter::once(&model.id).chain(&model.aliases);
    names.map(|name| model_json(model, name)).collect()
}

/// A model under one of its names; `root` is the primary one.
fn model_json(model: &ModelInfo, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        // as in Anthropic's API
        "type": "model",
        "display_name": name,
        "created_at": rfc3339(SystemTime::UNIX_EPOCH + Duration::from_secs(model.created)),
        "created": model.created,
        "owned_by": "cotenant",
        "task": task(model.kind),
        "root": model.id,
    })
}

/// `GET /health`: 200 when a request would be accepted, otherwise 503; pressure and a slow LLM do not make it fail.
/// `GET /health?speed=RATIO`: 503 also while the LLM is slower than this part of its full speed (0 to 1), for routers
/// that look at the status code only.
/// `GET /health?live`: 200 while the process responds, for supervisors that restart it.
pub(super) async fn health(State(api): State<Api>, RawQuery(query): RawQuery) -> Response {
    let mut asked = query
        .iter()
        .flat_map(|query| query.split('&'))
        .map(|part| part.split_once('=').unwrap_or((part, "")));
    if asked.clone().any(|(name, _)| name == "live") {
        return Json(json!({"status": "alive"})).into_response();
    }
    let minimum = asked.find(|(name, _)| *name == "speed");
    let minimum = match minimum.map(|(_, value)| (value, value.parse::<f64>())) {
        None => 0.0,
        Some((_, Ok(ratio))) if (0.0..=1.0).contains(&ratio) => ratio,
        Some((value, _)) => {
            let problem = "a part of the full speed from 0 to 1 is required, such as 0.5";
            return Fault::invalid("speed", value, problem).into_response();
        }
    };
    let status = &api.backends().status;
    let snapshot = status.snapshot();
    let (mut code, mut state) = health_of(&snapshot, status.sample_age());
    if let Some(ratio) = speed_ratio(&snapshot.engine).filter(|ratio| *ratio < minimum) {
        code = StatusCode::SERVICE_UNAVAILABLE;
        state = format!("slow: {ratio} of the full speed, {minimum} required");
    }
    let mut body = json!({"status": state, "pressure": snapshot.pressure.level});
    if snapshot.engine.state != EngineState::Absent {
        body = merged(body, json!({"llm": llm_json(&snapshot.engine)}));
    }
    (code, Json(body)).into_response()
}

/// The LLM for routers: its state, its speed relative to the full one (0 to 1) while it serves, or the reason of its
/// failure.
fn llm_json(engine: &EngineView) -> Value {
    let llm = json!({"state": engine.state});
    if let Some(failure) = &engine.failure {
        let failed = json!({
            "reason": failure.reason, "permanent": failure.permanent().is_some(),
            "remedy": failure.permanent().filter(|remedy| !remedy.is_empty()),
        });
        return merged(llm, failed);
    }
    match speed_ratio(engine) {
        Some(ratio) => merged(llm, json!({"speed_ratio": ratio})),
        None => llm,
    }
}

/// The predicted speed as a part of the full one while the LLM serves.
fn speed_ratio(engine: &EngineView) -> Option<f64> {
    let permille = engine
        .speed_permille()
        .filter(|_| engine.state == EngineState::Ready)?;
    Some(f64::from(u32::try_from(permille).ok()?) / 1000.0)
}

fn health_of(snapshot: &Snapshot, sample_age: Option<Duration>) -> (StatusCode, String) {
    let fails = |why: &str| (StatusCode::SERVICE_UNAVAILABLE, why.to_owned());
    match Health::of(snapshot, sample_age) {
        Health::Draining => fails("draining"),
        Health::Blind { age } => fails(&format!(
            "degraded: no sample of the machine for {:.1} s",
            age.as_secs_f64()
        )),
        Health::SafeProfile { reason } => fails(&reason),
        Health::EngineFailed { failure } => fails(&format!("engine failed: {failure}")),
        _ if snapshot.engine.state == EngineState::Loading => fails("loading model"),
        Health::WorkerGivenUp { worker } => (
            StatusCode::OK,
            format!("degraded: worker `{worker}` is no longer restarted"),
        ),
        Health::RebootAdvised { reason } => {
            (StatusCode::OK, format!("ok, reboot advised: {reason}"))
        }
        Health::Serving => (StatusCode::OK, "ok".to_owned()),
    }
}

/// `GET /running`, in llama-swap's form: running models and their state.
pub(super) async fn running(State(api): State<Api>) -> Json<Value> {
    Json(
        json!({"running": running_of(&api.backends().status.snapshot(), &api.backends().status.models())}),
    )
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
            WorkerState::AwaitingMemory | WorkerState::BackingOff | WorkerState::Starting => {
                "starting"
            }
            WorkerState::Stopping => "stopping",
            WorkerState::Stopped | WorkerState::Degraded => return None,
        };
        Some(json!({"model": worker.name, "state": state, "kind": "worker", "pid": worker.pid}))
    }));
    running
}

/// Whether `Accept` weighs OpenMetrics at least as much as the older text. Wildcards do not count: such a client may
/// support only the older format.
fn prefers_openmetrics<'a>(accept: impl Iterator<Item = &'a [u8]>) -> bool {
    let (mut open, mut plain) = (0.0f64, 0.0f64);
    for header in accept {
        for range in String::from_utf8_lossy(header).split(',') {
            let mut parts = range
                .split(';')
                .map(|part| part.trim().to_ascii_lowercase());
            let weighed = match parts.next().as_deref() {
                Some("application/openmetrics-text") => &mut open,
                Some("text/plain" | "text/*" | "*/*") => &mut plain,
                _ => continue,
            };
            // An invalid weight counts as 0, a refusal.
            let weight =
                parts.find_map(|part| part.strip_prefix("q=").map(|q| q.parse().unwrap_or(0.0)));
            *weighed = weighed.max(weight.unwrap_or(1.0));
        }
    }
    open > 0.0 && open >= plain
}

/// `GET /metrics`: OpenMetrics for clients that accept it, the older text format for all others.
pub(super) async fn metrics(State(api): State<Api>, headers: HeaderMap) -> Response {
    let metrics = api.backends().status.metrics();
    let accepts = prefers_openmetrics(
        headers
            .get_all(header::ACCEPT)
            .iter()
            .map(HeaderValue::as_bytes),
    );
    let (kind, text) = if accepts {
        (OPENMETRICS, metrics)
    } else {
        (PROMETHEUS, in_prometheus_text(&metrics))
    };
    (
        [(header::CONTENT_TYPE, HeaderValue::from_static(kind))],
        text,
    )
        .into_response()
}

/// Converts OpenMetrics to Prometheus's text format 0.0.4: counters are described by the name of their samples, without
/// units, infos and end.
fn in_prometheus_text(metrics: &str) -> String {
    let kind_of = |name: &str| {
        let mut types = metrics
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE "));
        types.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
    };
    let mut text = String::with_capacity(metrics.len());
    for line in metrics.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("EOF" | "UNIT"), ..) => {}
            (Some("#"), Some(word @ ("HELP" | "TYPE")), Some(name), Some(rest)) => {
                let (suffix, kind) = match kind_of(name) {
                    Some("counter") => ("_total", "counter"),
                    Some("info") => ("_info", "gauge"),
                    Some(kind) => ("", kind),
                    None => ("", "untyped"),
                };
                let rest = if word == "TYPE" { kind } else { rest };
                text.push_str(&format!("# {word} {name}{suffix} {rest}\n"));
            }
            _ => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    text
}

/// `GET /status.json`: the document of `cotenant status -o json`, with the last events.
pub(super) async fn status_json(State(api): State<Api>, Extension(meta): Meta) -> Response {
    let document = api.backends().status.document();
    let rights = json!({"mayOperate": operator(&meta).is_some()});
    ([NO_STORE], Json(merged(document, rights))).into_response()
}

/// `GET /history.json`: memory by owner, speed and decisions of the last hour. `?day`: of the last day, by minutes;
/// `?after=SECONDS`: only since this second of 1970's clock.
pub(super) async fn history_json(State(api): State<Api>, RawQuery(query): RawQuery) -> Response {
    let mut wanted = HistoryQuery::default();
    for part in query.iter().flat_map(|query| query.split('&')) {
        match part.split_once('=').unwrap_or((part, "")) {
            ("day", _) => wanted.day = true,
            ("after", value) => match value.parse() {
                Ok(second) => wanted.after_s = Some(second),
                Err(_) => {
                    let problem = "seconds since 1970 are required, such as 1796055637";
                    return Fault::invalid("after", value, problem).into_response();
                }
            },
            _ => {}
        }
    }
    ([NO_STORE], Json(api.backends().status.history(&wanted))).into_response()
}

/// `GET /`: one page without external resources.
pub(super) async fn page() -> Response {
    let headers = [
        NO_STORE,
        (
            header::CONTENT_SECURITY_POLICY,
            HeaderValue::from_static(PAGE_MAY_DO),
        ),
        (
            header::REFERRER_POLICY,
            HeaderValue::from_static("no-referrer"),
        ),
        (
            header::X_CONTENT_TYPE_OPTIONS,
            HeaderValue::from_static("nosniff"),
        ),
    ];
    (headers, Html(PAGE.as_str())).into_response()
}

/// The page with its style and script in place.
static PAGE: LazyLock<String> = LazyLock::new(|| {
    let (style, script) = (include_str!("page.css"), include_str!("page.js"));
    include_str!("page.html")
        .replace("<style></style>", &format!("<style>{style}</style>"))
        .replace("<script></script>", &format!("<script>{script}</script>"))
});

const NO_STORE: (header::HeaderName, HeaderValue) =
    (header::CACHE_CONTROL, HeaderValue::from_static("no-store"));

/// Restricts the page to its own script and style, by their hashes (SHA-256, Base64), and to requests to this server;
/// only a page of the same origin, such as that of a proxy with a path for it, may frame it.
const PAGE_MAY_DO: &str = "default-src 'none'; script-src 'sha256-pTPUeg8cNFZ/bT2pHJHNLIE7wV8Xl0hbik9pqo6KJHM='; style-src 'sha256-W7XmtZaj78rCegdR4voSosUn32lWzHGx06IQonSf1IE='; \
                           connect-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'none'; \
                           require-trusted-types-for 'script'; trusted-types 'none'";

/// For browsers and scrapers without OpenMetrics.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The format written by `prometheus-client`.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_metrics_become_prometheus_text() {
        let metrics = "# HELP a_requests Requests.\n# TYPE a_requests counter\na_requests_total{code=\"200\"} 3\n\
                       # HELP a_used_bytes Used.\n# TYPE a_used_bytes gauge\n# UNIT a_used_bytes bytes\na_used_bytes 7\n\
                       # HELP a_build Build.\n# TYPE a_build info\na_build_info{git=\"x\"} 1\n# EOF\n";
        assert_eq!(
            in_prometheus_text(metrics),
            "# HELP a_requests_total Requests.\n# TYPE a_requests_total counter\na_requests_total{code=\"200\"} 3\n\
             # HELP a_used_bytes Used.\n# TYPE a_used_bytes gauge\na_used_bytes 7\n\
             # HELP a_build_info Build.\n# TYPE a_build_info gauge\na_build_info{git=\"x\"} 1\n"
        );
    }

    #[test]
    fn the_format_of_metrics_is_the_one_that_the_client_weighs_most() {
        for (accept, open) in [
            ("application/openmetrics-text; version=1.0.0", true),
            (
                "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
                true,
            ),
            (
                "text/plain;version=0.0.4;q=0.7, application/openmetrics-text;q=0.3",
                false,
            ),
            ("text/plain, Application/OpenMetrics-Text;Q=1", true),
            ("application/openmetrics-text;q=0", false),
            (
                "application/openmetrics-text;q=much, text/plain;q=0.1",
                false,
            ),
            ("*/*", false),
            ("", false),
        ] {
            assert_eq!(
                prefers_openmetrics([accept.as_bytes()].into_iter()),
                open,
                "{accept}"
            );
        }
        assert!(!prefers_openmetrics(std::iter::empty()));
    }
}
