//! Routes, and the middleware of every request: id, limits, metrics.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::{Body, Bytes as Piece, HttpBody},
    extract::{DefaultBodyLimit, MatchedPath, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures_util::stream;
use hyper::body::{Frame, SizeHint};

use super::{
    access::Access,
    api::{Api, Kind, Permits},
    backend::RequestMeta,
    body::read_body,
    chat, completions, embeddings,
    fault::{Fault, shortened},
    hosts::{self, Peer, Reach},
    memory::{RequestMemory, Who},
    messages, ollama, operate, realtime, responses, speech, status, tokens, transcription,
};
use cotenant_telemetry::{Span, SpanContext, SpanKind};

/// All routes and their middleware.
pub(super) fn router(api: &Api) -> Router {
    let work = Router::new()
        .route("/v1/chat/completions", post(chat::completions))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/messages", post(messages::messages))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/realtime", get(realtime::realtime))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/v1/audio/translations", post(transcription::translations))
        .route(
            "/v1/audio/transcriptions",
            post(transcription::transcriptions),
        )
        .route("/v1/audio/speech", post(speech::speech))
        .route("/v1/embeddings", post(embeddings::openai))
        .route("/api/embed", post(embeddings::ollama))
        .route("/api/embeddings", post(embeddings::ollama_single))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .layer(middleware::from_fn_with_state(api.clone(), admit))
        .route(SHOW, post(ollama::show))
        .route(OPERATE, post(operate::operate))
        .route_layer(middleware::from_fn_with_state(api.clone(), receive));
    Router::new()
        .route("/", get(status::page))
        .route("/status.json", get(status::status_json))
        .route("/history.json", get(status::history_json))
        .route("/health", get(status::health))
        .route("/running", get(status::running))
        .route("/metrics", get(status::metrics))
        .route("/v1/audio/voices", get(speech::voices))
        .route("/v1/models", get(status::models))
        .route("/v1/models/", get(status::models))
        .route("/v1/models/{*id}", get(status::model))
        .route("/api/version", get(ollama::version))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::ps))
        .merge(work)
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(api.clone(), guard))
        // bodies are limited by their readers
        .layer(DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(api.clone(), observe))
        .with_state(api.clone())
}

/// Outer middleware: assigns an id, counts the request, and measures it to the last byte of the answer.
async fn observe(State(api): State<Api>, mut request: Request, next: Next) -> Response {
    let meta = request_meta(&api, request.headers());
    let id = HeaderValue::from_str(&meta.id).ok();
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map_or_else(|| "unmatched".to_owned(), |path| path.as_str().to_owned());
    let measured = Measured::begin(api, route);
    request.extensions_mut().insert(meta);

    let mut response = next.run(request).await;
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    held_by_body(response, |status| measured.answered(status))
}

/// Guard: the request names this host, is not made by a page of a foreign site, and has a key if keys are required.
async fn guard(State(api): State<Api>, request: Request, next: Next) -> Response {
    let reach = request
        .extensions()
        .get::<Reach>()
        .copied()
        .unwrap_or(Reach::Network);
    let access = api.access();
    let peer = request.extensions().get::<Peer>().and_then(|peer| peer.0);
    let reach = match peer {
        Some(address) if access.proxies.contains(&address.to_canonical()) => Reach::Proxy,
        _ => reach,
    };
    let checked = hosts::check(
        reach,
        request.version(),
        request.uri(),
        request.headers(),
        &access.hosts,
    );
    let page = request
        .headers()
        .get(header::ORIGIN)
        // a proxy's own pages need no CORS
        .filter(|_| checked.is_ok() && reach != Reach::Proxy)
        .cloned();
    let mut response = match hosts::preflight(request.headers()).filter(|_| page.is_some()) {
        // browsers send preflight requests without a key
        Some(answer) if request.method() == Method::OPTIONS => answer,
        _ => for_client(&access, checked, request, next).await,
    };
    if let Some(origin) = page {
        hosts::readable_by(&origin, &mut response);
    }
    response
}

/// Serves a request of an admitted client.
async fn for_client(
    access: &Access,
    checked: Result<(), Fault>,
    mut request: Request,
    next: Next,
) -> Response {
    let checked = checked.and_then(|()| access.client_of(request.uri().path(), request.headers()));
    match checked {
        Ok(client) => {
            if let Some(meta) = request.extensions_mut().get_mut::<RequestMeta>() {
                meta.client = client;
            }
            next.run(request).await
        }
        Err(fault) => {
            let unknown = fault.status() == StatusCode::UNAUTHORIZED;
            let mut response = in_shape_of(request.uri(), fault);
            if unknown {
                // a browser asks the user for the key as a password, but only for the page: its own requests would
                // prompt repeatedly
                let scheme = match request.uri().path() {
                    "/" => "Basic realm=\"cotenant: any name, an API key as password\"",
                    _ => "Bearer",
                };
                let scheme = HeaderValue::from_static(scheme);
                response
                    .headers_mut()
                    .insert(header::WWW_AUTHENTICATE, scheme);
            }
            response
        }
    }
}

/// Receives the body before the request takes a place, so that slow bodies do not block others.
async fn receive(State(api): State<Api>, mut request: Request, next: Next) -> Response {
    let kind = Kind::of(request.uri().path());
    let client = request
        .extensions()
        .get::<RequestMeta>()
        .and_then(|meta| meta.client.clone());
    let who = request
        .extensions()
        .get::<Who>()
        .cloned()
        .unwrap_or_default()
        .with_key(client.as_deref());
    let memory = RequestMemory::of(who);
    request.extensions_mut().insert(memory.clone());
    if request.method() == Method::POST {
        let (parts, body) = request.into_parts();
        let limits = api.limits();
        let (pool, max) = match kind {
            Kind::Transcription => (api.body_memory(), limits.audio_max),
            _ => (api.request_memory(), limits.json_max),
        };
        let hold = |bytes| memory.hold(pool, "read the request", bytes);
        // neither a look nor a command waits for a place
        let looks = matches!(parts.uri.path(), SHOW | OPERATE);
        let read = match if looks { Ok(()) } else { api.has_place(kind) } {
            Ok(()) => read_body(&parts.headers, body, api.body_limits(max), hold).await,
            Err(refusal) => Err(refusal.into()),
        };
        let body = match read {
            Ok(mut pieces) => match pieces.pop() {
                Some(whole) if pieces.is_empty() => Body::from(whole),
                last => Body::from_stream(stream::iter(
                    pieces.into_iter().chain(last).map(Ok::<_, Infallible>),
                )),
            },
            Err(fault) => return in_shape_of(&parts.uri, fault),
        };
        request = Request::from_parts(parts, body);
    }
    held_by_body(next.run(request).await, |_status| memory)
}

/// Admission: bounds concurrent requests, and refuses those that a browser sends for a foreign page.
async fn admit(State(api): State<Api>, mut request: Request, next: Next) -> Response {
    let is_foreign = request
        .headers()
        .get(FETCH_SITE)
        .is_some_and(|site| site == "cross-site");
    // `guard` has already checked an `Origin`.
    if is_foreign && !request.headers().contains_key(header::ORIGIN) {
        let fault = Fault::request(
            StatusCode::FORBIDDEN,
            "cross_site_request",
            "not allowed from a page of another site (hint: list its host in `http.allowed_hosts`, and send by `fetch`)",
        );
        return in_shape_of(request.uri(), fault);
    }
    let client = request
        .extensions()
        .get::<RequestMeta>()
        .and_then(|meta| meta.client.clone());
    let own = client.map(|client| client.place()).transpose();
    let placed = own.and_then(|own| Ok((api.place(Kind::of(request.uri().path()))?, own)));
    let permit: Arc<Permits> = match placed {
        Ok(permits) => Arc::new(permits),
        Err(refusal) => return in_shape_of(request.uri(), refusal.into()),
    };
    // a realtime session outlives the response of its connection
    request.extensions_mut().insert(Arc::clone(&permit));
    let span = span_of(&api, &mut request);
    held_by_body(next.run(request).await, |status| {
        span.set("http.response.status_code", status.as_u16());
        if status.is_server_error() {
            span.fail("http", status.canonical_reason().unwrap_or_default());
        }
        (permit, span)
    })
}

/// The span of a request, the parent of its stages.
fn span_of(api: &Api, request: &mut Request) -> Span {
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map(|path| path.as_str().to_owned())
        .unwrap_or_default();
    let method = request.method().as_str().to_owned();
    let Some(meta) = request.extensions_mut().get_mut::<RequestMeta>() else {
        return Span::default();
    };
    let span =
        api.backends()
            .tracer
            .begin(&format!("{method} {route}"), SpanKind::Server, meta.trace);
    meta.trace = span.context();
    span.set("http.request.method", method.as_str());
    span.set("http.route", route.as_str());
    span.set("url.path", route.as_str());
    span.set("url.scheme", "http");
    span.set("cotenant.request.id", meta.id.as_str());
    if let Some(client) = &meta.client {
        span.set("cotenant.client", &*client.name);
    }
    span
}

async fn unknown_route(method: Method, uri: Uri) -> Response {
    let message = format!(
        "unknown request URL: {method} {} (hint: {})",
        shortened(uri.path()),
        served(uri.path())
    );
    in_shape_of(
        &uri,
        Fault::request(StatusCode::NOT_FOUND, "unknown_url", message),
    )
}

/// Endpoints to suggest for an unknown path.
fn served(path: &str) -> &'static str {
    if path.contains("rerank") {
        "reranking is not supported; embeddings are at /v1/embeddings and /api/embed"
    } else if matches!(
        path,
        "/api/pull" | "/api/create" | "/api/copy" | "/api/push" | "/api/delete"
    ) {
        "models are files named by `llm.path` in the configuration; `cotenant pull` fetches one"
    } else if path == "/v1" || path == "/v1/" {
        "Responses are served by HTTP, from POST /v1/responses; LiveKit's plugin takes `use_websocket=False`"
    } else if path.starts_with("/api/") {
        "Ollama's API has chat, generate, embed, tags, ps, show and version here"
    } else {
        "see /v1/models, /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/embeddings, /v1/audio/… and /api/…"
    }
}

async fn wrong_method(method: Method, uri: Uri) -> Response {
    let fault = Fault::request(
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_supported",
        format!("not allowed to {method} on {}", shortened(uri.path())),
    );
    in_shape_of(&uri, fault)
}

/// A failure in the form of the API at this path.
fn in_shape_of(uri: &Uri, fault: Fault) -> Response {
    if uri.path().starts_with("/api/") {
        fault.into_plain_response()
    } else if uri.path().starts_with("/v1/messages") {
        messages::MessagesFault::from(fault).into_response()
    } else {
        fault.into_response()
    }
}

fn request_meta(api: &Api, headers: &HeaderMap) -> RequestMeta {
    let text = |name: &HeaderName| headers.get(name)?.to_str().ok();
    RequestMeta {
        id: text(&REQUEST_ID)
            .filter(|id| {
                !id.is_empty()
                    && id.len() <= REQUEST_ID_MAX
                    && id.bytes().all(|byte| byte.is_ascii_graphic())
            })
            .map_or_else(|| api.fresh_id("req-"), str::to_owned),
        patience: text(&READ_TIMEOUT)
            .and_then(|seconds| seconds.trim().parse().ok())
            .filter(|seconds: &f64| *seconds > 0.0)
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
        client: None,
        trace: text(&TRACEPARENT).and_then(SpanContext::parse),
        early: false,
        part_of: None,
    }
}

/// Measurement of one request; recorded on drop, so that disconnected clients are measured too.
struct Measured {
    api: Api,
    route: String,
    code: u16,
    began: Instant,
}

impl Measured {
    fn begin(api: Api, route: String) -> Self {
        Self {
            api,
            route,
            code: CLIENT_GONE,
            began: Instant::now(),
        }
    }

    fn answered(mut self, status: StatusCode) -> Self {
        self.code = status.as_u16();
        self
    }
}

impl Drop for Measured {
    fn drop(&mut self) {
        let status = &self.api.backends().status;
        status.request_ended(&self.route, self.code, self.began.elapsed());
    }
}

/// Keeps a value until the last byte of the body is sent or the client disconnects.
fn held_by_body<H: Send + Unpin + 'static>(
    response: Response,
    hold: impl FnOnce(StatusCode) -> H,
) -> Response {
    let hold = hold(response.status());
    response.map(|body| Body::new(HoldingBody { body, _hold: hold }))
}

struct HoldingBody<H> {
    body: Body,
    _hold: H,
}

impl<H: Unpin> HttpBody for HoldingBody<H> {
    type Data = Piece;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Piece>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A POST endpoint that is read-only.
const SHOW: &str = "/api/show";
const OPERATE: &str = "/operate";
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The client's limit between two bytes, in seconds; sent by OpenAI's SDKs.
const READ_TIMEOUT: HeaderName = HeaderName::from_static("x-stainless-read-timeout");
/// Sent only by browsers; pages cannot set it.
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// The caller's span in the format of W3C Trace Context.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Our choice: three UUIDs; it is logged.
const REQUEST_ID_MAX: usize = 128;
/// Recorded when the client disconnected before the answer: nginx's "client closed request".
const CLIENT_GONE: u16 = 499;
