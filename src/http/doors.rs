//! Routes, and the middleware of every request: id, limits, metrics.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant, SystemTime},
};

use axum::{
    Extension, Router,
    body::{Body, Bytes as Piece, HttpBody},
    extract::{DefaultBodyLimit, MatchedPath, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use hyper::body::{Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    backend::{Backends, RequestMeta},
    body::BodyLimits,
    chat,
    fault::{Fault, shortened},
    limits::Limits,
    ollama, speech, status, transcription,
};
use crate::{
    policy::refusal::{RETRY_AFTER_DEFAULT, Refusal},
    units::Bytes,
};

/// The doors: backends and limits. One value serves any number of listeners.
#[derive(Clone)]
pub struct Doors {
    shared: Arc<Shared>,
}

struct Shared {
    backends: Backends,
    limits: Limits,
    /// Of each kind, so that chats that wait for the engine do not keep speech from its workers.
    chats: Arc<Semaphore>,
    transcriptions: Arc<Semaphore>,
    speeches: Arc<Semaphore>,
    body_kib: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    ids: IdSource,
}

impl Doors {
    /// Doors to these backends.
    #[must_use]
    pub fn new(backends: Backends, limits: Limits) -> Self {
        Self {
            shared: Arc::new(Shared {
                chats: Arc::new(Semaphore::new(limits.requests_max)),
                transcriptions: Arc::new(Semaphore::new(limits.requests_max)),
                speeches: Arc::new(Semaphore::new(limits.requests_max)),
                body_kib: Arc::new(Semaphore::new(Bytes::new(limits.bodies_max.get() >> 10).as_len())),
                connections: Arc::new(Semaphore::new(limits.connections_max)),
                backends,
                limits,
                ids: IdSource::new(),
            }),
        }
    }

    /// The routes.
    pub(super) fn router(&self) -> Router {
        let work = Router::new()
            .route("/v1/chat/completions", post(chat::completions))
            .route("/v1/audio/transcriptions", post(transcription::transcriptions))
            .route("/v1/audio/speech", post(speech::speech))
            .route("/api/chat", post(ollama::chat))
            .route("/api/generate", post(ollama::generate))
            .layer(middleware::from_fn_with_state(self.clone(), admit));
        Router::new()
            .route("/", get(status::page))
            .route("/status.json", get(status::status_json))
            .route("/health", get(status::health))
            .route("/running", get(status::running))
            .route("/metrics", get(status::metrics))
            .route("/v1/models", get(status::models))
            .route("/v1/models/{*id}", get(status::model))
            .route("/api/version", get(ollama::version))
            .route("/api/tags", get(ollama::tags))
            .route("/api/ps", get(ollama::ps))
            .route("/api/show", post(ollama::show))
            .merge(work)
            .fallback(unknown_route)
            .method_not_allowed_fallback(wrong_method)
            // bodies are limited where they are read, with limits of their own
            .layer(DefaultBodyLimit::disable())
            .layer(middleware::from_fn_with_state(self.clone(), observe))
            .with_state(self.clone())
    }

    pub(super) fn backends(&self) -> &Backends {
        &self.shared.backends
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    /// A permit for one more connection, or `None` when all are taken.
    pub(super) fn connection(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.shared.connections).try_acquire_owned().ok()
    }

    /// A name for something, unique in this run and unlikely to repeat in another: `chatcmpl-5f3c…`.
    pub(super) fn fresh_id(&self, prefix: &str) -> String {
        self.shared.ids.fresh(prefix)
    }

    /// Limits of a body of at most `max` bytes.
    pub(super) fn body_limits(&self, max: Bytes) -> BodyLimits {
        BodyLimits {
            max,
            idle: self.shared.limits.body_idle_timeout,
            total: self.shared.limits.body_timeout,
        }
    }

    /// Sets memory aside for a body of `bytes`, as long as the permit lives.
    ///
    /// # Errors
    /// 429 when the bodies in memory leave no room for it.
    pub(super) fn body_memory(&self, act: &str, bytes: Bytes) -> Result<OwnedSemaphorePermit, Fault> {
        let kib = u32::try_from(bytes.get().div_ceil(1 << 10)).unwrap_or(u32::MAX);
        Arc::clone(&self.shared.body_kib)
            .try_acquire_many_owned(kib)
            .map_err(|_full| {
                Fault::from(Refusal::QuotaExceeded {
                    act: act.to_owned(),
                    what: "memory for request bodies, in bytes,".to_owned(),
                    limit: self.shared.limits.bodies_max.get(),
                    retry_after: RETRY_AFTER_DEFAULT,
                })
            })
    }
}

/// What every request passes: it gets its id, is counted, and is measured to the last byte of the answer.
async fn observe(State(doors): State<Doors>, mut request: Request, next: Next) -> Response {
    let meta = request_meta(&doors, request.headers());
    let id = HeaderValue::from_str(&meta.id).ok();
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map_or_else(|| "unmatched".to_owned(), |path| path.as_str().to_owned());
    let measured = Measured::begin(doors, route);
    request.extensions_mut().insert(meta);

    let mut response = next.run(request).await;
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    held_by_body(response, |status| measured.answered(status))
}

/// What work passes besides: only so much of it at once, and none that a foreign page makes a browser send.
async fn admit(State(doors): State<Doors>, request: Request, next: Next) -> Response {
    if request
        .headers()
        .get(FETCH_SITE)
        .is_some_and(|site| site == "cross-site")
    {
        let fault = Fault::request(
            StatusCode::FORBIDDEN,
            "cross_site_request",
            "not allowed from a page of another site (hint: let its server call instead of the browser)",
        );
        return in_shape_of(request.uri(), fault);
    }
    let (kind, places) = match request.uri().path() {
        "/v1/audio/transcriptions" => ("transcriptions", &doors.shared.transcriptions),
        "/v1/audio/speech" => ("speech requests", &doors.shared.speeches),
        _ => ("chat requests", &doors.shared.chats),
    };
    let Ok(permit) = Arc::clone(places).try_acquire_owned() else {
        let fault = Fault::from(Refusal::QuotaExceeded {
            act: "take the request".to_owned(),
            what: format!("{kind} in flight"),
            limit: u64::try_from(doors.limits().requests_max).unwrap_or(u64::MAX),
            retry_after: RETRY_AFTER_DEFAULT,
        });
        return in_shape_of(request.uri(), fault);
    };
    held_by_body(next.run(request).await, |_status| permit)
}

async fn unknown_route(method: Method, uri: Uri) -> Response {
    let fault = Fault::request(
        StatusCode::NOT_FOUND,
        "unknown_url",
        format!("unknown request URL: {method} {}", shortened(uri.path())),
    );
    in_shape_of(&uri, fault)
}

async fn wrong_method(method: Method, uri: Uri) -> Response {
    let fault = Fault::request(
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_supported",
        format!("not allowed to {method} on {}", shortened(uri.path())),
    );
    in_shape_of(&uri, fault)
}

/// A failure in the shape that the clients of this path read.
fn in_shape_of(uri: &Uri, fault: Fault) -> Response {
    if uri.path().starts_with("/api/") {
        fault.into_plain_response()
    } else {
        fault.into_response()
    }
}

/// What handlers take from [`observe`].
pub(super) type Meta = Extension<RequestMeta>;

fn request_meta(doors: &Doors, headers: &HeaderMap) -> RequestMeta {
    let text = |name: &HeaderName| headers.get(name)?.to_str().ok();
    RequestMeta {
        id: text(&REQUEST_ID)
            .filter(|id| !id.is_empty() && id.len() <= REQUEST_ID_MAX && id.bytes().all(|byte| byte.is_ascii_graphic()))
            .map_or_else(|| doors.fresh_id("req-"), str::to_owned),
        patience: text(&READ_TIMEOUT)
            .and_then(|seconds| seconds.trim().parse().ok())
            .filter(|seconds: &f64| *seconds > 0.0)
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
        retries: text(&RETRY_COUNT)
            .and_then(|count| count.trim().parse().ok())
            .unwrap_or(0),
    }
}

/// Seconds since 1970, as OpenAI's `created`.
pub(super) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or(Duration::ZERO)
        .as_secs()
}

/// Measures one request; what it saw is entered when it is dropped, so that a client that goes away is measured too.
struct Measured {
    doors: Doors,
    route: String,
    code: u16,
    began: Instant,
}

impl Measured {
    fn begin(doors: Doors, route: String) -> Self {
        Self {
            doors,
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
        let status = &self.doors.backends().status;
        status.request_ended(&self.route, self.code, self.began.elapsed());
    }
}

/// Lets the answer's body hold something until its last byte is sent, or nobody wants it any more.
fn held_by_body<H: Send + Unpin + 'static>(response: Response, hold: impl FnOnce(StatusCode) -> H) -> Response {
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

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Piece>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Makes ids: a part that differs from run to run, and a number.
struct IdSource {
    run: u64,
    count: AtomicU64,
}

impl IdSource {
    fn new() -> Self {
        // The seed of the standard library's hash maps is random for each process.
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_u32(std::process::id());
        Self {
            run: hasher.finish(),
            count: AtomicU64::new(1),
        }
    }

    fn fresh(&self, prefix: &str) -> String {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}{:016x}{number:08x}", self.run)
    }
}

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The client's own limit between two bytes, in seconds; sent by OpenAI's SDKs.
const READ_TIMEOUT: HeaderName = HeaderName::from_static("x-stainless-read-timeout");
/// Sent by browsers and by nobody else; pages cannot set it.
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const RETRY_COUNT: HeaderName = HeaderName::from_static("x-stainless-retry-count");
/// Our choice: three UUIDs; it goes into logs.
const REQUEST_ID_MAX: usize = 128;
/// Entered when there was nobody to answer: nginx's "client closed request".
const CLIENT_GONE: u16 = 499;
