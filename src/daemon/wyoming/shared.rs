//! State shared by all Wyoming connections.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tokio::sync::{Semaphore, watch};

use super::{
    conversations::Conversations,
    info_cache::{self, InfoCache},
};
use cotenant_config::WyomingConfig;
use cotenant_http::backend::{ChatBackend, RunningAnswers, SpeechBackend};
use cotenant_speech::{voice_activity::EarlyPause, wyoming::Info};
use cotenant_telemetry::{Metrics, Tracer};
use cotenant_worker::handle::WorkerHandle;

/// The backends of the API.
pub(crate) struct Backends {
    /// Recogniser and voice.
    pub(crate) speech: Option<Arc<dyn SpeechBackend>>,
    /// The LLM and its name.
    pub(crate) chat: Option<(Arc<dyn ChatBackend>, String)>,
    /// Workers that are asked for descriptions: recogniser and voice.
    pub(crate) asr: Option<WorkerHandle>,
    /// See `asr`.
    pub(crate) tts: Option<WorkerHandle>,
    /// Counters of requests.
    pub(crate) metrics: Arc<Metrics>,
    /// Begins the spans of turns.
    pub(crate) tracer: Tracer,
    /// Counts turns as answers.
    pub(crate) answers: Arc<RunningAnswers>,
}

/// The API; clones share their state.
#[derive(Clone)]
pub(crate) struct Api(pub(super) Arc<Inner>);

/// Shared state of all connections.
pub(super) struct Inner {
    pub(super) speech: Option<Arc<dyn SpeechBackend>>,
    pub(super) chat: Option<(Arc<dyn ChatBackend>, String)>,
    pub(super) cache: Arc<InfoCache>,
    pub(super) conversations: Mutex<Conversations>,
    /// KiB of audio that may still be recorded.
    pub(super) audio: Arc<Semaphore>,
    /// The pause after which an utterance has probably ended.
    pub(super) early_pause: Mutex<EarlyPause>,
    pub(super) settings: WyomingConfig,
    /// Names of voices used by clients, and the worker's voice for each.
    pub(super) aliases: BTreeMap<String, String>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) tracer: Tracer,
    pub(super) answers: Arc<RunningAnswers>,
}

impl Api {
    pub(super) fn new(
        backends: Backends,
        settings: WyomingConfig,
        aliases: BTreeMap<String, String>,
        path: Option<&Path>,
    ) -> (Self, BTreeMap<String, Info>) {
        let name =
            |worker: &Option<WorkerHandle>| worker.as_ref().map(|worker| worker.name().to_owned());
        let parts = info_cache::Parts {
            asr: name(&backends.asr),
            tts: name(&backends.tts),
            llm: backends.chat.as_ref().map(|(_, name)| name.clone()),
            languages: settings.languages.clone(),
        };
        let (cache, known) = InfoCache::open(parts, path.map(Path::to_owned));
        let conversations_max = usize::try_from(settings.conversations_max).unwrap_or(usize::MAX);
        let conversations = Conversations::new(conversations_max, settings.history_max);
        let inner = Inner {
            speech: backends.speech,
            chat: backends.chat,
            cache,
            conversations: Mutex::new(conversations),
            audio: Arc::new(Semaphore::new(AUDIO_KIB_MAX)),
            early_pause: Mutex::default(),
            settings,
            aliases,
            metrics: backends.metrics,
            tracer: backends.tracer,
            answers: backends.answers,
        };
        (Self(Arc::new(inner)), known)
    }
}

/// When the client has asked, which may be after the work has begun.
#[derive(Clone)]
pub(super) struct Asked(watch::Receiver<Option<Instant>>);

impl Asked {
    /// Now.
    pub(super) fn now() -> Self {
        Self(watch::channel(Some(Instant::now())).1)
    }

    /// Later, when [`Ask::ask`] is called, or never.
    pub(super) fn later() -> (Ask, Self) {
        let (ask, asked) = watch::channel(None);
        (Ask(ask), Self(asked))
    }

    pub(super) fn already(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// How long ago; zero before.
    pub(super) fn ago(&self) -> Duration {
        let asked = *self.0.borrow();
        asked.map_or(Duration::ZERO, |asked| asked.elapsed())
    }

    /// Waits until then.
    ///
    /// # Errors
    /// When it will never be.
    pub(super) async fn wait(&mut self) -> Result<(), watch::error::RecvError> {
        self.0.wait_for(Option::is_some).await.map(drop)
    }
}

/// Reports that the client has asked.
pub(super) struct Ask(watch::Sender<Option<Instant>>);

impl Ask {
    pub(super) fn ask(self) {
        self.0.send_replace(Some(Instant::now()));
    }
}

/// Counts one request when it has ended.
pub(super) struct Counted<'a> {
    metrics: &'a Metrics,
    what: &'static str,
    asked: Asked,
    code: u16,
}

impl<'a> Counted<'a> {
    pub(super) fn begin(metrics: &'a Metrics, what: &'static str, asked: Asked) -> Self {
        Self {
            metrics,
            what,
            asked,
            code: CANCELLED,
        }
    }

    pub(super) fn ended(mut self, code: u16) {
        self.code = code;
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if self.asked.already() {
            self.metrics.request(self.what, self.code, self.asked.ago());
        }
    }
}

/// All utterances that are being recorded, with the answers that are held for them, in KiB: nearly nine of a minute at
/// 16 kHz. Our choice; it comes out of the reserve.
pub(super) const AUDIO_KIB_MAX: usize = 16 << 10;

/// Codes of HTTP, so that one metric serves all APIs: done, invalid, not now, and abandoned by the client.
pub(super) const DONE: u16 = 200;
pub(super) const WRONG: u16 = 400;
pub(super) const CANCELLED: u16 = 499;
pub(super) const NOT_NOW: u16 = 503;
