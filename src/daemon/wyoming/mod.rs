//! Wyoming API: recogniser, voice, assistant and speech to speech on one address.
//!
//! ```text
//! describe                              ─► info                                    from memory, see `board`
//! audio-start, -chunk*, -stop           ─► transcript
//! synthesize                            ─► audio-start, -chunk*, -stop
//! synthesize-start, -chunk*, -stop      ─► the same by sentences, then synthesize-stopped
//! transcript                            ─► handled-start, -chunk*, handled, -stop  or not-handled
//! run-pipeline{asr … tts}, audio…       ─► transcript, handled…, audio…            see `road`
//! ```
//!
//! A connection does one thing at a time. On a road a new utterance ends the answer to the one before (barge-in):
//! generation stops, its KV is free, and audio that is not written yet is dropped.

mod board;
mod conversations;
mod refuse;
mod road;
mod session;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(super) use refuse::rendered;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use self::{board::Board, conversations::Conversations, session::Talk};
use super::{control_handle::ControlHandle, error::RunError, parts::Parts};
use crate::{
    config::{Config, WyomingConfig, WyomingListen},
    http::backend::{ChatBackend, SpeechBackend},
    speech::{
        client::Endpoint,
        server::{Server, ServerLimits, Service},
        wyoming::Info,
    },
    telemetry::Metrics,
    units::Bytes,
    worker::handle::WorkerHandle,
};

/// What can be set.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    languages: Vec<String>,
    system: Option<String>,
    wait_max: Duration,
    audio_max: Duration,
    conversations_max: usize,
    history_max: Bytes,
    /// Names of voices as clients send them, and the worker's voice that each stands for.
    aliases: BTreeMap<String, String>,
}

impl Settings {
    fn of(config: &Config) -> Self {
        let door = &config.wyoming;
        Self {
            languages: door.languages.clone(),
            system: door.system.clone(),
            wait_max: door.wait_max,
            audio_max: door.audio_max,
            conversations_max: usize::try_from(door.conversations_max).unwrap_or(usize::MAX),
            history_max: door.history_max,
            aliases: config.http.voices.clone(),
        }
    }
}

/// What stands behind the door.
pub(super) struct Behind {
    /// Recogniser and voice.
    pub(super) speech: Option<Arc<dyn SpeechBackend>>,
    /// The LLM and its name.
    pub(super) chat: Option<(Arc<dyn ChatBackend>, String)>,
    /// The workers that are asked what they are: recogniser and voice.
    pub(super) asr: Option<WorkerHandle>,
    /// See `asr`.
    pub(super) tts: Option<WorkerHandle>,
    /// Where requests are counted.
    pub(super) metrics: Arc<Metrics>,
}

/// The door. Clones are the same door.
#[derive(Clone)]
pub(super) struct Door(Arc<Inner>);

/// What all connections share.
struct Inner {
    speech: Option<Arc<dyn SpeechBackend>>,
    chat: Option<(Arc<dyn ChatBackend>, String)>,
    board: Arc<Board>,
    conversations: Mutex<Conversations>,
    /// KiB of audio that may still be recorded.
    audio: Arc<Semaphore>,
    settings: Settings,
    metrics: Arc<Metrics>,
}

/// Addresses that are taken and not served yet.
#[derive(Default)]
pub(super) struct Bound(Vec<Server>);

impl Bound {
    /// Takes what `config` wants.
    pub(super) async fn take(config: &WyomingConfig) -> Result<Self, RunError> {
        let limits = ServerLimits {
            connections: usize::try_from(config.connections_max).unwrap_or(usize::MAX),
            ..ServerLimits::default()
        };
        let mut servers = Vec::new();
        for listen in &config.listen {
            let endpoint = match listen {
                WyomingListen::Tcp(address) => Endpoint::Tcp(address.to_string()),
                WyomingListen::Unix(path) => {
                    super::listeners::make_parent(path).map_err(|source| RunError::Folder {
                        path: path.parent().unwrap_or(path).to_owned(),
                        source,
                    })?;
                    Endpoint::Unix(path.clone())
                }
            };
            let server = Server::bind(&endpoint, limits)
                .await
                .map_err(|source| RunError::Listen {
                    listener: format!("wyoming {endpoint}"),
                    source,
                })?;
            servers.push(server);
        }
        Ok(Self(servers))
    }

    /// Where it listens, for people.
    pub(super) fn addresses(&self) -> String {
        let known = self.0.iter().filter_map(|server| server.endpoint().ok());
        let words: Vec<String> = known.map(|endpoint| endpoint.to_string()).collect();
        if words.is_empty() {
            "none".to_owned()
        } else {
            words.join(", ")
        }
    }

    /// Serves until `stop` is cancelled.
    pub(super) fn open(
        self,
        behind: Behind,
        config: &Config,
        control: &Arc<ControlHandle>,
        parts: &Parts,
        stop: &CancellationToken,
    ) -> Vec<tokio::task::JoinHandle<()>> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let workers: Vec<WorkerHandle> = behind.asr.iter().chain(&behind.tts).cloned().collect();
        let (door, known) = Door::new(behind, Settings::of(config), Some(&config.state_dir.join(BOARD_FILE)));
        let board = Arc::clone(&door.0.board);
        let control = Arc::clone(control);
        parts.spawn("the board of the Wyoming door", async move {
            board.keep(known, control, workers).await;
        });
        self.0
            .into_iter()
            .map(|server| {
                let (door, stop, reporter) = (door.clone(), stop.clone(), parts.clone());
                parts.spawn("Wyoming", async move {
                    server.run(door, stop.clone()).await;
                    if !stop.is_cancelled() {
                        reporter.report("Wyoming has ended".to_owned());
                    }
                })
            })
            .collect()
    }
}

impl Door {
    fn new(behind: Behind, settings: Settings, path: Option<&Path>) -> (Self, BTreeMap<String, Info>) {
        let name = |worker: &Option<WorkerHandle>| worker.as_ref().map(|worker| worker.name().to_owned());
        let llm = behind.chat.as_ref().map(|(_, name)| name.clone());
        let parts = board::Parts::new(&settings, name(&behind.asr), name(&behind.tts), llm);
        let (board, known) = Board::open(parts, path.map(Path::to_owned));
        let conversations = Conversations::new(settings.conversations_max, settings.history_max);
        let inner = Inner {
            speech: behind.speech,
            chat: behind.chat,
            board,
            conversations: Mutex::new(conversations),
            audio: Arc::new(Semaphore::new(AUDIO_KIB_MAX)),
            settings,
            metrics: behind.metrics,
        };
        (Self(Arc::new(inner)), known)
    }
}

impl Service for Door {
    type Session = Talk;

    fn info(&self) -> Info {
        Info::clone(&self.0.board.info())
    }

    fn session(&self) -> Talk {
        Talk::new(self.clone())
    }
}

/// Counts one request of the door when it has ended.
struct Counted<'a> {
    metrics: &'a Metrics,
    what: &'static str,
    began: Instant,
    code: u16,
}

impl<'a> Counted<'a> {
    fn begin(metrics: &'a Metrics, what: &'static str) -> Self {
        Self {
            metrics,
            what,
            began: Instant::now(),
            code: CANCELLED,
        }
    }

    fn ended(mut self, code: u16) {
        self.code = code;
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.metrics.request(self.what, self.code, self.began.elapsed());
    }
}

/// What the workers said about themselves, in the folder of what outlives a restart.
const BOARD_FILE: &str = "wyoming.json";

/// All utterances that are being recorded, in KiB: nearly nine of a minute at 16 kHz. Our choice; it comes out of the
/// reserve.
const AUDIO_KIB_MAX: usize = 16 << 10;

/// Codes of HTTP, so that one metric serves all APIs: done, invalid, not now, and abandoned by the client.
const DONE: u16 = 200;
const WRONG: u16 = 400;
const CANCELLED: u16 = 499;
const NOT_NOW: u16 = 503;
