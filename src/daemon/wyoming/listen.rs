//! Listeners of the Wyoming API.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::{
    session::Talk,
    settings::Settings,
    shared::{Behind, Door},
};
use crate::{
    config::{Config, WyomingConfig, WyomingListen},
    daemon::{control_handle::ControlHandle, error::RunError, parts::Parts, socket_folder::make_parent},
    speech::{
        client::Endpoint,
        server::{Server, ServerLimits, Service},
        wyoming::Info,
    },
    worker::handle::WorkerHandle,
};

/// Addresses that are taken and not served yet.
#[derive(Default)]
pub(in crate::daemon) struct Bound(Vec<Server>);

impl Bound {
    /// Takes what `config` wants.
    pub(in crate::daemon) async fn take(config: &WyomingConfig) -> Result<Self, RunError> {
        let limits = ServerLimits {
            connections: usize::try_from(config.connections_max).unwrap_or(usize::MAX),
            ..ServerLimits::default()
        };
        let mut servers = Vec::new();
        for listen in &config.listen {
            let endpoint = match listen {
                WyomingListen::Tcp(address) => Endpoint::Tcp(address.to_string()),
                WyomingListen::Unix(path) => {
                    make_parent(path)?;
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
    pub(in crate::daemon) fn addresses(&self) -> String {
        let known = self.0.iter().filter_map(|server| server.endpoint().ok());
        let words: Vec<String> = known.map(|endpoint| endpoint.to_string()).collect();
        if words.is_empty() {
            "none".to_owned()
        } else {
            words.join(", ")
        }
    }

    /// Serves until `stop` is cancelled.
    pub(in crate::daemon) fn open(
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

impl Service for Door {
    type Session = Talk;

    fn info(&self) -> Info {
        Info::clone(&self.0.board.info())
    }

    fn session(&self) -> Talk {
        Talk::new(self.clone())
    }
}

/// What the workers said about themselves, in the folder of what outlives a restart.
pub(super) const BOARD_FILE: &str = "wyoming.json";
