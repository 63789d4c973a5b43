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

pub(crate) struct Backends {
    pub(crate) speech: Option<Arc<dyn SpeechBackend>>,
    /// The LLM and its name.
    pub(crate) chat: Option<(Arc<dyn ChatBackend>, String)>,
    /// Recogniser, asked for its description.
    pub(crate) asr: Option<WorkerHandle>,
    /// Voice, asked for its description.
    pub(crate) tts: Option<WorkerHandle>,
    pub(crate) metrics: Arc<Metrics>,
    /// Starts the spans of turns.
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
    /// Permits of audio to record, in KiB.
    pub(super) audio: Arc<Semaphore>,
    /// Pause after which an utterance has probably ended.
    pub(super) early_pause: Mutex<EarlyPause>,
    pub(super) settings: WyomingConfig,
    /// Clients' names of voices, with the worker's voice for each.
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

/// Time at which the client asked, possibly after the work began.
#[derive(Clone)]
pub(super) struct Asked(watch::Receiver<Option<Instant>>);

impl Asked {
    pub(super) fn now() -> Self {
        Self(watch::channel(Some(Instant::now())).1)
    }

    /// Asked when [`Ask::ask`] is called, or never.
    pub(super) fn later() -> (Ask, Self) {
        let (ask, asked) = watch::channel(None);
        (Ask(ask), Self(asked))
    }

    pub(super) fn already(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// Returns the time since then; zero before.
    pub(super) fn ago(&self) -> Duration {
        let asked = *self.0.borrow();
        asked.map_or(Duration::ZERO, |asked| asked.elapsed())
    }

    /// Waits until the client asks.
    ///
    /// # Errors
    /// If it never will.
    pub(super) async fn wait(&mut self) -> Result<(), watch::error::RecvError> {
        self.0.wait_for(Option::is_some).await.map(drop)
    }
}

/// Sender for [`Asked`].
pub(super) struct Ask(watch::Sender<Option<Instant>>);

impl Ask {
    pub(super) fn ask(self) {
        self.0.send_replace(Some(Instant::now()));
    }
}

/// Counts one request at its end.
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

/// Limit on all utterances being recorded and the answers held for them, in KiB: nearly nine minutes at 16 kHz. Our
/// choice; it is part of the reserve.
pub(super) const AUDIO_KIB_MAX: usize = 16 << 10;

/// HTTP codes, so that one metric serves all APIs: done, invalid, not now, cancelled by the client.
pub(super) const DONE: u16 = 200;
pub(super) const WRONG: u16 = 400;
pub(super) const CANCELLED: u16 = 499;
pub(super) const NOT_NOW: u16 = 503;
