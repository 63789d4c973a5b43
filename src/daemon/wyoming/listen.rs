//! Listeners of the Wyoming API.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::{
    session::Connection,
    shared::{Api, Backends},
};
use crate::{
    activation::{self, Address, PassedListener, PassedSockets},
    bind,
    control_handle::ControlHandle,
    error::RunError,
    folders::make_parent,
    parts::Parts,
};
use cotenant_config::{Config, WyomingListen};
use cotenant_speech::{
    client::Endpoint,
    server::{Server, ServerLimits, Service},
    wyoming::Info,
};
use cotenant_worker::handle::WorkerHandle;

/// Bound listeners that are not served yet.
#[derive(Default)]
pub(crate) struct Bound(Vec<Server>);

impl Bound {
    /// Binds the listeners of `config` that were not `passed`, and takes all passed ones.
    pub(crate) async fn take(config: &Config, passed: &PassedSockets) -> Result<Self, RunError> {
        let limits = ServerLimits {
            connections: usize::try_from(config.wyoming.connections_max).unwrap_or(usize::MAX),
            ..ServerLimits::default()
        };
        let mut servers = Vec::new();
        for socket in passed.of(activation::WYOMING, config) {
            let server = match &socket.listener {
                PassedListener::Tcp(listener) => listener
                    .try_clone()
                    .and_then(|tcp| Server::on_tcp(tcp, limits)),
                PassedListener::Unix(listener) => {
                    let path = socket.address.to_string().into();
                    listener
                        .try_clone()
                        .and_then(|unix| Server::on_unix(unix, path, limits))
                }
            };
            servers.push(server.map_err(RunError::system("a socket of systemd's"))?);
        }
        let is_ours =
            |listen: &&WyomingListen| !passed.hold(activation::WYOMING, &Address::from(*listen));
        for listen in config.wyoming.listen.iter().filter(is_ours) {
            let (endpoint, server) = match listen {
                WyomingListen::Tcp(address) => {
                    let listener = bind::listen("wyoming.listen", *address);
                    let server = listener.and_then(|listener| Server::on_tcp(listener, limits));
                    (Endpoint::Tcp(address.to_string()), server)
                }
                WyomingListen::Unix(path) => {
                    make_parent(path)?;
                    let endpoint = Endpoint::Unix(path.clone());
                    let server = Server::bind(&endpoint, limits).await;
                    (endpoint, server)
                }
            };
            let failed = RunError::listen(format!("`wyoming.listen: {endpoint}`"));
            servers.push(server.map_err(failed)?);
        }
        Ok(Self(servers))
    }

    /// Returns the addresses of the listeners for display.
    pub(crate) fn addresses(&self) -> String {
        let known = self.0.iter().filter_map(|server| server.endpoint().ok());
        let words: Vec<String> = known.map(|endpoint| endpoint.to_string()).collect();
        if words.is_empty() {
            "none".to_owned()
        } else {
            words.join(", ")
        }
    }

    /// Serves until `stop` is cancelled.
    pub(crate) fn open(
        self,
        backends: Backends,
        config: &Config,
        control: &Arc<ControlHandle>,
        parts: &Parts,
        stop: &CancellationToken,
    ) -> Vec<tokio::task::JoinHandle<()>> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let workers: Vec<WorkerHandle> =
            backends.asr.iter().chain(&backends.tts).cloned().collect();
        let (settings, aliases) = (config.wyoming.clone(), config.http.voices.clone());
        let (api, known) = Api::new(
            backends,
            settings,
            aliases,
            Some(&config.state_dir.join(INFO_FILE)),
        );
        let cache = Arc::clone(&api.0.cache);
        let control = Arc::clone(control);
        parts.spawn("the cache of Wyoming descriptions", async move {
            cache.keep(known, control, workers).await;
        });
        self.0
            .into_iter()
            .map(|server| {
                let (api, stop, reporter) = (api.clone(), stop.clone(), parts.clone());
                parts.spawn("Wyoming", async move {
                    server.run(api, stop.clone()).await;
                    if !stop.is_cancelled() {
                        reporter.report("Wyoming has ended".to_owned());
                    }
                })
            })
            .collect()
    }
}

impl Service for Api {
    type Session = Connection;

    fn info(&self) -> Info {
        Info::clone(&self.0.cache.info())
    }

    fn session(&self) -> Connection {
        Connection::new(self.clone())
    }
}

/// File of the workers' descriptions, in the state directory.
pub(super) const INFO_FILE: &str = "wyoming.json";
