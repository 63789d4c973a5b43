//! State shared by all handlers: backends, limits and their permits.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use axum::Extension;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::{
    access::Access,
    backend::{Backends, RequestMeta},
    body::BodyLimits,
    limits::Limits,
    memory::{Pool, Quota, Share, Short, Who},
};
use cotenant_conversation::{refusal::Refusal, refusals::at_limit};
use cotenant_units::Bytes;

/// Backends and limits of the HTTP APIs. One value serves any number of listeners.
#[derive(Clone)]
pub struct Api {
    shared: Arc<Shared>,
}

struct Shared {
    backends: Backends,
    limits: Limits,
    access: watch::Receiver<Arc<Access>>,
    /// Separate permits per kind, so that chats waiting for the engine do not block speech.
    chats: Arc<Semaphore>,
    transcriptions: Arc<Semaphore>,
    speeches: Arc<Semaphore>,
    embeddings: Arc<Semaphore>,
    sessions: Arc<Semaphore>,
    /// Separate pools: JSON requests with derived values, audio files with decoded audio, settings of realtime
    /// sessions.
    requests: Pool,
    bodies: Pool,
    settings: Pool,
    audio_kib: Arc<Semaphore>,
    connections: Quota,
    ids: IdSource,
}

impl Api {
    /// The APIs of these backends, for all clients.
    pub fn new(backends: Backends, limits: Limits) -> Self {
        Self::with_access(
            backends,
            limits,
            watch::Sender::new(Arc::default()).subscribe(),
        )
    }

    /// The same with access rules, which may change at run time.
    pub fn with_access(
        backends: Backends,
        limits: Limits,
        access: watch::Receiver<Arc<Access>>,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                chats: Arc::new(Semaphore::new(limits.requests_max)),
                transcriptions: Arc::new(Semaphore::new(limits.requests_max)),
                speeches: Arc::new(Semaphore::new(limits.requests_max)),
                embeddings: Arc::new(Semaphore::new(limits.requests_max)),
                sessions: Arc::new(Semaphore::new(limits.sessions_max)),
                requests: Pool::new(
                    limits.requests_memory_max,
                    half(limits.requests_memory_max),
                    REQUESTS,
                ),
                bodies: Pool::new(
                    limits.bodies_max,
                    limits.bodies_max,
                    "audio files and what is decoded from them",
                ),
                settings: Pool::new(
                    limits.sessions_memory_max,
                    half(limits.sessions_memory_max),
                    "the settings of realtime sessions",
                ),
                audio_kib: kib(limits.sessions_audio_max),
                connections: Quota::new(limits.connections_max, limits.connections_max.div_ceil(2)),
                backends,
                limits,
                access,
                ids: IdSource::new(),
            }),
        }
    }

    pub(super) fn access(&self) -> Arc<Access> {
        Arc::clone(&self.shared.access.borrow())
    }

    pub(super) fn backends(&self) -> &Backends {
        &self.shared.backends
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    /// A permit for one more connection of a client, or the exhausted limit.
    pub(super) fn connection(&self, who: &Who) -> Result<Share, Short> {
        self.shared.connections.take(who, 1)
    }

    /// Checks for a free place before the body is read.
    pub(super) fn has_place(&self, kind: Kind) -> Result<(), Refusal> {
        self.place(kind).map(drop)
    }

    /// A permit for one more request of this kind, or a refusal.
    pub(super) fn place(&self, kind: Kind) -> Result<OwnedSemaphorePermit, Refusal> {
        let Shared { limits, .. } = &*self.shared;
        let (what, limit, places) = match kind {
            Kind::Chat => (
                "chat requests in flight",
                limits.requests_max,
                &self.shared.chats,
            ),
            Kind::Transcription => (
                "transcriptions in flight",
                limits.requests_max,
                &self.shared.transcriptions,
            ),
            Kind::Speech => (
                "speech requests in flight",
                limits.requests_max,
                &self.shared.speeches,
            ),
            Kind::Embedding => (
                "requests for embeddings in flight",
                limits.requests_max,
                &self.shared.embeddings,
            ),
            Kind::Realtime => (
                "realtime sessions",
                limits.sessions_max,
                &self.shared.sessions,
            ),
        };
        let place = Arc::clone(places).try_acquire_owned();
        place.map_err(|_full| at_limit("take the request", what, limit))
    }

    /// Reserves KiB of audio for a realtime session, as long as the permit lives; refused when the audio of all
    /// sessions has reached its limit.
    pub(super) fn audio_memory(&self, kib: u32) -> Result<OwnedSemaphorePermit, Refusal> {
        let room = Arc::clone(&self.shared.audio_kib).try_acquire_many_owned(kib);
        room.map_err(|_full| {
            let what = "memory for the audio of realtime sessions, in bytes,";
            let limit = self.shared.limits.sessions_audio_max.get();
            at_limit("keep the audio", what, limit)
        })
    }

    /// An id that is unique in this run and unlikely to repeat in another: `chatcmpl-5f3c…`.
    pub(super) fn fresh_id(&self, prefix: &str) -> String {
        self.shared.ids.fresh(prefix)
    }

    pub(super) fn body_limits(&self, max: Bytes) -> BodyLimits {
        let Limits {
            body_idle_timeout,
            body_timeout,
            body_grace,
            ..
        } = self.shared.limits;
        BodyLimits {
            max,
            idle: body_idle_timeout,
            total: body_timeout,
            grace: body_grace,
        }
    }

    pub(super) fn request_memory(&self) -> &Pool {
        &self.shared.requests
    }

    pub(super) fn body_memory(&self) -> &Pool {
        &self.shared.bodies
    }

    pub(super) fn settings_memory(&self) -> &Pool {
        &self.shared.settings
    }
}

/// Permits of one request: of its kind, and of its client.
pub(super) type Permits = (OwnedSemaphorePermit, Option<OwnedSemaphorePermit>);

/// Request classes with separate limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Transcription,
    Speech,
    Embedding,
    Realtime,
}

impl Kind {
    /// The kind of requests to this path.
    pub(super) fn of(path: &str) -> Self {
        match path {
            "/v1/audio/transcriptions" | "/v1/audio/translations" => Self::Transcription,
            "/v1/audio/speech" => Self::Speech,
            "/v1/embeddings" | "/api/embed" | "/api/embeddings" => Self::Embedding,
            "/v1/realtime" => Self::Realtime,
            _ => Self::Chat,
        }
    }
}

/// The share of one client.
fn half(bytes: Bytes) -> Bytes {
    Bytes::new(bytes.get() / 2)
}

const REQUESTS: &str = "requests and what is made of them";

/// One permit per KiB.
fn kib(bytes: Bytes) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(Bytes::new(bytes.get() >> 10).as_len()))
}

/// Request metadata that the middleware passes to handlers.
pub(super) type Meta = Extension<RequestMeta>;

/// Seconds since 1970, as OpenAI's `created`.
pub(super) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or(Duration::ZERO)
        .as_secs()
}

/// Generates ids: a random prefix per run, and a counter.
struct IdSource {
    run: u64,
    count: AtomicU64,
}

impl IdSource {
    fn new() -> Self {
        // The seed of the standard library's hash maps is random per process.
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
