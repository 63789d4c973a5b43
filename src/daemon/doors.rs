//! The doors: gRPC on its sockets, HTTP on its port.

use std::{collections::BTreeMap, io, net::SocketAddr, os::unix::fs::DirBuilderExt as _, path::Path, sync::Arc};

use tokio::{net::TcpListener, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use super::{hub::Hub, parts::Parts, run::RunError, turn::STOP_GRACE};
use crate::{
    config::Config,
    http::{self, backend::Backends},
    policy::{
        pressure::PressureLevel,
        snapshot::{EngineState, Snapshot, WorkerState},
    },
    rpc::{
        health::{self, Health},
        llm::{GenerateError, GenerateEvent, GenerateRequest, Generator},
        roles::Roles,
        server::{self, Server, Sockets},
        supervisor::Supervisor,
    },
};

/// File mode of the path socket: the daemon's user and group.
const SOCKET_MODE: u32 = 0o660;

/// Doors that are taken and not served yet. Whoever cannot have them has touched nothing of a supervisor that runs.
pub(super) struct Bound {
    sockets: Sockets,
    names: Vec<String>,
    http: Option<TcpListener>,
}

/// Doors that are open.
pub(super) struct Doors {
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
    health: Option<Health>,
    grpc: String,
    http: Option<SocketAddr>,
}

/// Without a model there is nothing to generate with.
struct NoModel;

impl Generator for NoModel {
    fn generate(
        &self,
        _request: GenerateRequest,
    ) -> futures_util::future::BoxFuture<'_, Result<tokio::sync::mpsc::Receiver<GenerateEvent>, GenerateError>> {
        Box::pin(async { Err(GenerateError::NoModel) })
    }
}

impl Bound {
    /// Takes what `config` wants.
    pub(super) async fn take(config: &Config) -> Result<Self, RunError> {
        let mut bound = Self {
            sockets: Sockets::new(),
            names: Vec::new(),
            http: None,
        };
        if let Some(path) = &config.grpc.socket {
            make_parent(path).map_err(|source| RunError::Folder {
                path: path.parent().unwrap_or(path).to_owned(),
                source,
            })?;
            bound
                .sockets
                .bind_path(path, SOCKET_MODE)
                .map_err(|source| RunError::Socket { source })?;
            bound.names.push(format!("unix://{}", path.display()));
        }
        if let Some(name) = &config.grpc.abstract_name {
            bound
                .sockets
                .bind_abstract(name)
                .map_err(|source| RunError::Socket { source })?;
            bound.names.push(format!("unix-abstract:{name}"));
        }
        if let Some(address) = config.http.listen {
            let listener = TcpListener::bind(address).await.map_err(|source| RunError::Door {
                door: format!("http {address}"),
                source,
            })?;
            bound.http = Some(listener);
        }
        Ok(bound)
    }
}

impl Doors {
    /// Serves what was taken.
    pub(super) async fn open(
        bound: Bound,
        hub: &Arc<Hub>,
        backends: Backends,
        generator: Option<Arc<dyn Generator>>,
        parts: &Parts,
    ) -> Result<Self, RunError> {
        let mut doors = Self {
            stop: CancellationToken::new(),
            tasks: Vec::new(),
            health: None,
            grpc: String::new(),
            http: None,
        };
        if !bound.names.is_empty() {
            doors.grpc = bound.names.join(", ");
            doors
                .open_grpc(
                    bound.sockets,
                    hub,
                    generator.unwrap_or_else(|| Arc::new(NoModel)),
                    parts,
                )
                .await;
        }
        if let Some(listener) = bound.http {
            doors.open_http(listener, backends, parts)?;
        }
        Ok(doors)
    }

    async fn open_grpc(&mut self, sockets: Sockets, hub: &Arc<Hub>, generator: Arc<dyn Generator>, parts: &Parts) {
        let supervisor = Arc::clone(hub) as Arc<dyn Supervisor>;
        let roles = Roles::new(nix::unistd::geteuid().as_raw());
        let server = Server::new(sockets, supervisor, generator, roles, server::Limits::default()).await;
        self.health = Some(server.health());
        let (stop, reporter) = (self.stop.clone(), parts.clone());
        self.tasks.push(parts.spawn("gRPC", async move {
            let served = server.serve(stop.clone()).await;
            if !stop.is_cancelled() {
                let why = served.map_or_else(|error| format!(": {}", super::llm::chain(&error)), |()| String::new());
                reporter.report(format!("gRPC has ended{why}"));
            }
        }));
    }

    fn open_http(&mut self, listener: TcpListener, backends: Backends, parts: &Parts) -> Result<(), RunError> {
        let address = listener.local_addr().map_err(|source| RunError::Door {
            door: "http".to_owned(),
            source,
        })?;
        self.http = Some(address);
        let doors = http::Doors::new(backends, http::Limits::default());
        let (stop, reporter) = (self.stop.clone(), parts.clone());
        self.tasks.push(parts.spawn("HTTP", async move {
            http::serve(listener, doors, stop.clone()).await;
            if !stop.is_cancelled() {
                reporter.report("HTTP has ended".to_owned());
            }
        }));
        Ok(())
    }

    /// Where gRPC listens, for people.
    pub(super) fn grpc_address(&self) -> &str {
        &self.grpc
    }

    /// Where HTTP listens, for people.
    pub(super) fn http_address(&self) -> String {
        self.http
            .map_or_else(|| "none".to_owned(), |address| address.to_string())
    }

    /// The health service, to be kept up to date.
    pub(super) fn health_board(&self) -> HealthBoard {
        HealthBoard {
            service: self.health.clone(),
            shown: BTreeMap::new(),
        }
    }

    /// Closes the doors and waits until what was in flight has ended.
    pub(super) async fn close(self) {
        self.stop.cancel();
        let ends = self
            .tasks
            .into_iter()
            .map(|task| tokio::time::timeout(STOP_GRACE, task));
        futures_util::future::join_all(ends).await;
    }
}

/// What the health service says. Whoever watches it is told of changes only, as its protocol has it.
pub(super) struct HealthBoard {
    service: Option<Health>,
    shown: BTreeMap<String, bool>,
}

impl HealthBoard {
    /// Shows the state as it is now.
    pub(super) async fn show(&mut self, snapshot: &Snapshot) {
        let Some(service) = &self.service else { return };
        for (name, serves) in health_of(snapshot) {
            if self.shown.get(&name) != Some(&serves) {
                service.set(&name, serves).await;
                self.shown.insert(name, serves);
            }
        }
    }
}

/// Which parts serve.
fn health_of(snapshot: &Snapshot) -> impl Iterator<Item = (String, bool)> + '_ {
    let engine = matches!(snapshot.engine.state, EngineState::Ready);
    let parts = [
        (health::OVERALL, !snapshot.draining),
        (health::ENGINE, engine && !snapshot.draining),
        (health::PRESSURE, snapshot.level < PressureLevel::Critical),
    ];
    let workers = snapshot
        .workers
        .iter()
        .map(|worker| (health::worker(&worker.name), worker.state == WorkerState::Ready));
    parts
        .into_iter()
        .map(|(name, serves)| (name.to_owned(), serves))
        .chain(workers)
}

/// Makes the folder of a socket, closed to strangers.
fn make_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => {
            std::fs::DirBuilder::new().recursive(true).mode(0o750).create(folder)
        }
        _ => Ok(()),
    }
}
