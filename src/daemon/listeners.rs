//! Listeners: gRPC on its sockets, HTTP on its port, Wyoming on its addresses.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;

use super::{
    activation::{self, Address, PassedListener, PassedSocket, PassedSockets},
    bind,
    certificates::certificates_of,
    control_handle::ControlHandle,
    error::RunError,
    folders::make_parent,
    parts::Parts,
    wyoming,
};
use cotenant_config::{Config, GrpcLimits, TcpConfig};
use cotenant_conversation::{refusal::Refusal, refusals::not_configured};
use cotenant_http::{self as http, Access, backend::Backends};
use cotenant_policy::{
    health::Health,
    lease::LeaseId,
    pressure::PressureLevel,
    snapshot::{EngineState, Snapshot, WorkerState},
};
use cotenant_rpc::{
    health,
    llm::{GenerateEvent, GenerateRequest, Generator},
    peer::Process,
    remote::Remote,
    roles::{Members, Roles},
    server::{self, Server, Sockets},
    supervisor::Supervisor,
};
use cotenant_units::causes::in_one_line;

/// File mode of the gRPC socket: the daemon's user and group.
const SOCKET_MODE: u32 = 0o660;

/// Bound listeners that are not served yet. If binding fails, a running supervisor is unaffected.
pub(super) struct Bound {
    sockets: Sockets,
    names: Vec<String>,
    roles: Roles,
    limits: server::Limits,
    http: Vec<TcpListener>,
    wyoming: wyoming::Bound,
}

pub(super) struct Listeners {
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
    grpc: String,
    http: Vec<SocketAddr>,
    wyoming: String,
}

/// Backends of the APIs.
pub(super) struct Clients {
    pub(super) backends: Backends,
    pub(super) access: watch::Receiver<Arc<Access>>,
    pub(super) wyoming: wyoming::Backends,
    pub(super) generator: Option<Arc<dyn Generator>>,
}

/// LLM service without a model.
struct NoModel;

impl Generator for NoModel {
    fn generate(
        &self,
        _request: GenerateRequest,
    ) -> futures_util::future::BoxFuture<
        '_,
        Result<tokio::sync::mpsc::Receiver<GenerateEvent>, Refusal>,
    > {
        Box::pin(async { Err(not_configured("generate", "model")) })
    }
}

impl Bound {
    /// Binds the listeners of `config` that were not `passed`, and takes all passed ones.
    pub(super) async fn take(config: &Config, passed: &PassedSockets) -> Result<Self, RunError> {
        let mut bound = Self {
            sockets: Sockets::new(),
            names: Vec::new(),
            roles: roles_of(&config.grpc.roles),
            limits: limits_of(&config.grpc.limits),
            http: Vec::new(),
            wyoming: wyoming::Bound::take(config, passed).await?,
        };
        let of_systemd = RunError::system("a socket of systemd's");
        bound.take_passed(config, passed).map_err(of_systemd)?;
        let is_ours = |address| !passed.hold(activation::GRPC, &address);
        if let Some(path) = config
            .grpc
            .socket
            .as_ref()
            .filter(|&path| is_ours(Address::Path(path.clone())))
        {
            make_parent(path)?;
            bound
                .sockets
                .bind_path(path, SOCKET_MODE)
                .map_err(|source| RunError::Socket { source })?;
            bound.names.push(format!("unix://{}", path.display()));
        }
        let name = config.grpc.abstract_name.as_ref();
        if let Some(name) = name.filter(|&name| is_ours(Address::Abstract(name.clone()))) {
            bound
                .sockets
                .bind_abstract(name)
                .map_err(|source| RunError::Socket { source })?;
            bound.names.push(format!("unix-abstract:{name}"));
        }
        if let Some(tcp) = &config.grpc.tcp {
            let remote = remote_of(tcp, passed.of(activation::GRPC, config))?;
            let address = remote.address().unwrap_or(tcp.listen);
            bound.names.push(format!("https://{address}"));
            bound.sockets.add_remote(remote);
        }
        for (key, address) in config
            .open_listeners()
            .into_iter()
            .chain(passed.open_listeners(config))
        {
            let networks = if address.ip().is_unspecified() {
                "every network of this machine"
            } else {
                "the network of this address"
            };
            tracing::warn!(%address, "`{key}` serves {networks} without a password; listen on 127.0.0.1, or restrict access");
        }
        let is_ours =
            |address: &SocketAddr| !passed.hold(activation::HTTP, &Address::Tcp(*address));
        if let Some(address) = config.http.listen.filter(is_ours) {
            let listener = bind::listen("http.listen", address).and_then(TcpListener::from_std);
            let failed = RunError::listen(format!("`http.listen: {address}`"));
            bound.http.push(listener.map_err(failed)?);
        }
        Ok(bound)
    }

    /// Takes the gRPC and HTTP sockets passed by systemd.
    fn take_passed(&mut self, config: &Config, passed: &PassedSockets) -> io::Result<()> {
        for socket in passed.of(activation::GRPC, config) {
            if let PassedListener::Unix(listener) = &socket.listener {
                self.sockets.add(listener.try_clone()?)?;
                self.names.push(match &socket.address {
                    Address::Abstract(name) => format!("unix-abstract:{name}"),
                    address => format!("unix://{address}"),
                });
            }
        }
        for socket in passed.of(activation::HTTP, config) {
            if let PassedListener::Tcp(listener) = &socket.listener {
                listener.set_nonblocking(true)?;
                self.http
                    .push(TcpListener::from_std(listener.try_clone()?)?);
            }
        }
        Ok(())
    }
}

impl Listeners {
    /// Serves the bound listeners: gRPC with the tasks of `on_control`, the rest with `parts`.
    pub(super) async fn open(
        mut bound: Bound,
        control: &Arc<ControlHandle>,
        clients: Clients,
        config: &Config,
        holders: Vec<(LeaseId, Arc<Process>)>,
        (parts, on_control): (&Parts, &Parts),
    ) -> Result<Self, RunError> {
        let mut listeners = Self {
            stop: CancellationToken::new(),
            tasks: Vec::new(),
            grpc: String::new(),
            http: Vec::new(),
            wyoming: bound.wyoming.addresses(),
        };
        let http = std::mem::take(&mut bound.http);
        let serving = std::mem::take(&mut bound.wyoming).open(
            clients.wyoming,
            config,
            control,
            parts,
            &listeners.stop,
        );
        listeners.tasks.extend(serving);
        if !bound.names.is_empty() {
            listeners.grpc = bound.names.join(", ");
            let generator = clients.generator.unwrap_or_else(|| Arc::new(NoModel));
            listeners
                .open_grpc(bound, control, generator, holders, on_control)
                .await;
        }
        if !http.is_empty() {
            let api =
                http::Api::with_access(clients.backends, http::Limits::default(), clients.access);
            for listener in http {
                listeners.open_http(listener, api.clone(), parts)?;
            }
        }
        Ok(listeners)
    }

    async fn open_grpc(
        &mut self,
        bound: Bound,
        control: &Arc<ControlHandle>,
        generator: Arc<dyn Generator>,
        holders: Vec<(LeaseId, Arc<Process>)>,
        parts: &Parts,
    ) {
        let supervisor = Arc::clone(control) as Arc<dyn Supervisor>;
        let server = Server::new(
            bound.sockets,
            supervisor,
            generator,
            bound.roles,
            bound.limits,
        )
        .await;
        let server = server.held_by(holders);
        parts.spawn(
            "health",
            report_health(server.health(), Arc::clone(control)),
        );
        let (stop, reporter) = (self.stop.clone(), parts.clone());
        self.tasks.push(parts.spawn("gRPC", async move {
            let served = server.serve(stop.clone()).await;
            if !stop.is_cancelled() {
                let why = served.map_or_else(
                    |error| format!(": {}", in_one_line(&error)),
                    |()| String::new(),
                );
                reporter.report(format!("gRPC has ended{why}"));
            }
        }));
    }

    fn open_http(
        &mut self,
        listener: TcpListener,
        api: http::Api,
        parts: &Parts,
    ) -> Result<(), RunError> {
        let failed = RunError::listen("http".to_owned());
        let address = listener.local_addr().map_err(failed)?;
        self.http.push(address);
        let (stop, reporter) = (self.stop.clone(), parts.clone());
        self.tasks.push(parts.spawn("HTTP", async move {
            http::serve(listener, api, stop.clone()).await;
            if !stop.is_cancelled() {
                reporter.report("HTTP has ended".to_owned());
            }
        }));
        Ok(())
    }

    pub(super) fn grpc_address(&self) -> &str {
        &self.grpc
    }

    pub(super) fn http_address(&self) -> String {
        let words: Vec<String> = self.http.iter().map(ToString::to_string).collect();
        if words.is_empty() {
            "none".to_owned()
        } else {
            words.join(", ")
        }
    }

    pub(super) fn wyoming_address(&self) -> &str {
        &self.wyoming
    }

    /// Closes the listeners, and waits at most `patience` for requests in flight.
    pub(super) async fn close(self, patience: Duration) {
        self.stop.cancel();
        let ends = self.tasks.into_iter().map(|task| timeout(patience, task));
        futures_util::future::join_all(ends).await;
    }
}

/// Keeps the health service up to date.
async fn report_health(service: health::Health, control: Arc<ControlHandle>) {
    let mut states = control.snapshot();
    loop {
        let state = Arc::clone(&states.borrow_and_update());
        for (name, serves) in health_of(&state, control.sample_age()) {
            service.set(&name, serves);
        }
        // Samples age without an event.
        if let Ok(Err(_closed)) = timeout(HEALTH_EVERY, states.changed()).await {
            return;
        }
    }
}

/// Longest interval between two updates of the health service.
const HEALTH_EVERY: Duration = Duration::from_secs(1);

/// Returns the TLS listener, on a socket of `passed` if there is one.
fn remote_of<'a>(
    tcp: &TcpConfig,
    passed: impl Iterator<Item = &'a PassedSocket>,
) -> Result<Remote, RunError> {
    let certificates = certificates_of(tcp)?;
    let mut listeners = passed.filter_map(|socket| match &socket.listener {
        PassedListener::Tcp(listener) => Some(listener.try_clone()),
        PassedListener::Unix(_) => None,
    });
    let listener = match listeners.next() {
        Some(listener) => listener.map_err(RunError::system("a socket of systemd's"))?,
        None => {
            let failed = RunError::listen(format!("`grpc.tcp: {}`", tcp.listen));
            bind::listen("grpc.tcp", tcp.listen).map_err(failed)?
        }
    };
    Remote::on(listener, &certificates, tcp.role).map_err(|source| RunError::Remote { source })
}

fn roles_of(members: &Members) -> Roles {
    let mut roles = Roles::new(nix::unistd::geteuid().as_raw());
    roles.members.clone_from(members);
    // Members of the daemon's group may connect; an administrator chooses them.
    let own = nix::unistd::getegid().as_raw();
    if own != 0 && members.others.is_none() {
        roles.members.viewers.gids.push(own);
    }
    roles
}

/// Converts the limits of the configuration, bounded by the limit on open files.
fn limits_of(config: &GrpcLimits) -> server::Limits {
    let mut connections = config.connections;
    let files = files_for(connections.total * FILES_PER_CONNECTION + FILES_OF_OUR_OWN);
    let room = files.saturating_sub(FILES_OF_OUR_OWN) / FILES_PER_CONNECTION;
    if room < connections.total {
        tracing::warn!(
            files,
            connections = room,
            "the limit of open files leaves room for fewer connections than are configured; raise LimitNOFILE"
        );
        connections.total = room.max(1);
    }
    server::Limits {
        message_bytes: config.message_max.as_len(),
        calls_per_connection: config.calls_per_connection,
        connections,
        streams: config.streams,
        reader_patience: config.reader_patience,
        ..server::Limits::default()
    }
}

/// Raises the limit on open files to `wanted`, as far as allowed; returns the limit.
fn files_for(wanted: u64) -> u64 {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return wanted; // unknown: no bound; accepting pauses while no descriptor is free
    };
    let raised = wanted.min(hard).max(soft);
    match setrlimit(Resource::RLIMIT_NOFILE, raised, hard) {
        Ok(()) => raised,
        Err(_) => soft,
    }
}

/// The socket, the pidfd of the peer, and another pidfd per lease (usually one).
const FILES_PER_CONNECTION: u64 = 3;

/// Files of the journal, the model, the probes, the workers' pipes and the HTTP clients (our choice: four for each of
/// 64 workers, and as much again).
const FILES_OF_OUR_OWN: u64 = 512;

fn health_of(
    snapshot: &Snapshot,
    sample_age: Option<Duration>,
) -> impl Iterator<Item = (String, bool)> + '_ {
    let engine = matches!(snapshot.engine.state, EngineState::Ready);
    let parts = [
        (health::OVERALL, Health::of(snapshot, sample_age).serves()),
        (health::ENGINE, engine && !snapshot.draining),
        (
            health::PRESSURE,
            snapshot.pressure.level < PressureLevel::Critical,
        ),
        (health::REBOOT, snapshot.reboot.is_empty()),
    ];
    let workers = snapshot.workers.iter().map(|worker| {
        (
            health::worker(&worker.name),
            worker.state == WorkerState::Ready,
        )
    });
    parts
        .into_iter()
        .map(|(name, serves)| (name.to_owned(), serves))
        .chain(workers)
}
