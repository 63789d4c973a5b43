//! gRPC server: sockets, limits and services.

use std::{
    fs,
    future::poll_fn,
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            fs::{FileTypeExt, MetadataExt, PermissionsExt},
            net::{SocketAddr, UnixListener as StdListener, UnixStream as StdStream},
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
    task::{Poll, ready},
    time::Duration,
};

use tokio::{
    net::{UnixListener, UnixStream},
    sync::{broadcast, mpsc},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{
    DESCRIPTOR_SET,
    call::{Call, Context},
    connection::{ACCEPT_AGAIN_AFTER, Connection},
    generate::Llm,
    health::Health,
    holders::Holders,
    lease::Leases,
    llm::{Generator, READER_PATIENCE},
    operator::Operators,
    peer::{PeerInfo, Process},
    remote::{self, Remote},
    roles::Roles,
    slots::{Slot, Slots},
    status::CallError,
    supervisor::Supervisor,
    v1::{
        lease_service_server::LeaseServiceServer, llm_service_server::LlmServiceServer,
        operator_service_server::OperatorServiceServer,
    },
};
use cotenant_policy::{lease::LeaseId, roles::Bounds};
use cotenant_probe::processes::boot_ticks;

/// Limits of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest accepted message, in bytes. Default 1 MiB: a prompt of a quarter of a million tokens.
    pub message_bytes: usize,
    /// Concurrent calls and streams of one connection. Default 64.
    pub calls_per_connection: u32,
    /// Connections. Default 32 per process, 256 per user, 1024 in total.
    pub connections: Bounds,
    /// Open streams. Default 32 per process, 256 per user, 1024 in total.
    pub streams: Bounds,
    /// How long a client may leave its stream unread before the generation is stopped. Default 20 s.
    pub reader_patience: Duration,
    /// Time for clients to read pending data when the server ends. Default 2 s.
    pub stop_grace: Duration,
    /// Interval of keepalive pings on a silent connection. Default 10 s.
    pub keepalive_interval: Duration,
    /// Time limit for the reply to a ping. Default 5 s.
    pub keepalive_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let bounds = Bounds {
            per_process: 32,
            per_user: 256,
            total: 1024,
        };
        Self {
            message_bytes: 1 << 20,
            calls_per_connection: 64,
            connections: bounds,
            streams: bounds,
            reader_patience: READER_PATIENCE,
            stop_grace: Duration::from_secs(2),
            keepalive_interval: Duration::from_secs(10),
            keepalive_timeout: Duration::from_secs(5),
        }
    }
}

/// A socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another supervisor listens there.
    #[error("cannot listen on `{address}`: another process answers there")]
    InUse {
        /// Configured address.
        address: String,
    },
    /// Another kind of file exists there.
    #[error("cannot listen on `{address}`: a file that is no socket is there")]
    NotASocket {
        /// Configured address.
        address: String,
    },
    /// The system refuses it.
    #[error("cannot listen on `{address}`")]
    System {
        /// Configured address.
        address: String,
        /// Cause.
        source: io::Error,
    },
}

impl BindError {
    /// The remedy.
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::InUse { .. } => "stop the other supervisor, or configure another socket",
            Self::NotASocket { .. } => "remove the file, or configure another socket",
            Self::System { .. } => {
                "the folder must exist and be writable, and the path have at most 107 bytes"
            }
        }
    }
}

/// Bound sockets.
#[derive(Debug, Default)]
pub struct Sockets {
    listeners: Vec<StdListener>,
    files: Vec<SocketFile>,
    remote: Option<Remote>,
}

impl Sockets {
    /// No sockets.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a path socket with the file mode `mode`, such as `0o660`. A socket left by a dead supervisor is replaced;
    /// the file is removed when the server ends.
    ///
    /// # Errors
    /// If another process listens there, another kind of file exists, or the system refuses.
    pub fn bind_path(&mut self, path: &Path, mode: u32) -> Result<(), BindError> {
        let address = || path.display().to_string();
        let system = |source| BindError::System {
            address: address(),
            source,
        };
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(BindError::NotASocket { address: address() });
            }
            Ok(_) => match StdStream::connect(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    fs::remove_file(path).map_err(system)?;
                }
                Ok(_) => return Err(BindError::InUse { address: address() }),
                Err(error) => return Err(system(error)),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(system(error)),
        }
        let listener = StdListener::bind(path).map_err(system)?;
        self.files.push(SocketFile::of(path).map_err(system)?);
        // Until here the umask determines the mode; credentials of early connections are checked as well.
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(system)?;
        self.add(listener).map_err(system)
    }

    /// Adds the abstract socket `name`, without the `@`. It has no file mode: only credentials restrict it.
    ///
    /// # Errors
    /// If another process listens there, or the system refuses.
    pub fn bind_abstract(&mut self, name: &str) -> Result<(), BindError> {
        let address = || format!("@{name}");
        let system = |source| BindError::System {
            address: address(),
            source,
        };
        let socket = SocketAddr::from_abstract_name(name).map_err(system)?;
        let listener = StdListener::bind_addr(&socket).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse { address: address() },
            _ => system(error),
        })?;
        self.add(listener).map_err(system)
    }

    /// Adds a listener for other machines.
    pub fn add_remote(&mut self, remote: Remote) {
        self.remote = Some(remote);
    }

    /// Adds an open socket, as passed by systemd.
    ///
    /// # Errors
    /// If it cannot be made non-blocking.
    pub fn add(&mut self, listener: StdListener) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        self.listeners.push(listener);
        Ok(())
    }
}

/// A socket in the file system; removed on drop, if it is still the same file.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self {
            path: path.to_owned(),
            device: metadata.dev(),
            inode: metadata.ino(),
        })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let same = fs::symlink_metadata(&self.path)
            .is_ok_and(|found| found.dev() == self.device && found.ino() == self.inode);
        if same && let Err(error) = fs::remove_file(&self.path) {
            warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }
}

/// A fault that ended the server.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A socket cannot be used.
    #[error("cannot serve gRPC on a socket")]
    Socket(#[from] io::Error),
    /// The reflection descriptors are inconsistent.
    #[error("cannot serve gRPC reflection")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The transport failed.
    #[error("cannot serve gRPC")]
    Transport(#[from] tonic::transport::Error),
}

/// The gRPC server.
pub struct Server {
    sockets: Sockets,
    supervisor: Arc<dyn Supervisor>,
    generator: Arc<dyn Generator>,
    roles: Roles,
    limits: Limits,
    holders: Vec<(LeaseId, Arc<Process>)>,
    health: Health,
}

impl Server {
    /// A server with `sockets`, not yet accepting.
    pub async fn new(
        sockets: Sockets,
        supervisor: Arc<dyn Supervisor>,
        generator: Arc<dyn Generator>,
        roles: Roles,
        limits: Limits,
    ) -> Self {
        Self {
            sockets,
            supervisor,
            generator,
            roles,
            limits,
            holders: Vec::new(),
            health: Health::new(),
        }
    }

    /// Adds processes that hold leases of an earlier run, including ended ones whose memory may be in use.
    #[must_use]
    pub fn held_by(mut self, holders: Vec<(LeaseId, Arc<Process>)>) -> Self {
        self.holders = holders;
        self
    }

    /// Sets the statuses of the health service.
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Serves until `stop` is cancelled; streams then end with `UNAVAILABLE`, and other calls are completed.
    /// Connections of clients that do not read are cut after the grace.
    ///
    /// # Errors
    /// If a socket cannot be used.
    pub async fn serve(self, stop: CancellationToken) -> Result<(), ServeError> {
        let Self {
            sockets,
            supervisor,
            generator,
            roles,
            limits,
            holders: known,
            health,
            ..
        } = self;
        // Destructured here, so that the files are removed when this future ends or is dropped.
        let Sockets {
            listeners,
            files: _files,
            remote,
        } = sockets;
        let context = Context {
            supervisor: Arc::clone(&supervisor),
            roles: Arc::new(roles),
            streams: Slots::new(limits.streams),
            given_back: broadcast::Sender::new(GIVEN_BACK_MAX),
            patience: limits.reader_patience,
            remote: None,
            stop: stop.clone(),
        };
        let holders = Holders::new(supervisor, stop.clone());
        for (lease, process) in &known {
            holders.attach_holder(*lease, process);
        }

        let cut = CancellationToken::new();
        // Dropped with this future, which ends all connections.
        let _cut_at_the_end = cut.clone().drop_guard();
        tokio::spawn({
            let (stop, cut) = (stop.clone(), cut.clone());
            async move {
                stop.cancelled().await;
                tokio::time::sleep(limits.stop_grace).await;
                cut.cancel();
            }
        });
        let (accepted, connections) = mpsc::channel(ACCEPTED_MAX);
        let slots = Slots::new(limits.connections);
        for listener in listeners {
            let listener = UnixListener::from_std(listener)?;
            tokio::spawn(accept(
                listener,
                slots.clone(),
                accepted.clone(),
                stop.clone(),
                cut.clone(),
            ));
        }
        drop(accepted);

        let size = limits.message_bytes;
        let transport = || {
            tonic::transport::Server::builder()
                .max_concurrent_streams(limits.calls_per_connection)
                .http2_keepalive_interval(Some(limits.keepalive_interval))
                .http2_keepalive_timeout(Some(limits.keepalive_timeout))
        };
        let operators = |context: Context| OperatorServiceServer::new(Operators::new(context));
        let llm =
            |context: Context| LlmServiceServer::new(Llm::new(context, Arc::clone(&generator)));
        let local = transport()
            .add_service(health.service())
            .add_service(reflection().build_v1()?)
            .add_service(reflection().build_v1alpha()?)
            .add_service(
                LeaseServiceServer::new(Leases::new(context.clone(), holders))
                    .max_decoding_message_size(size),
            )
            .add_service(operators(context.clone()).max_decoding_message_size(size))
            .add_service(llm(context.clone()).max_decoding_message_size(size))
            .serve_with_incoming_shutdown(ReceiverStream::new(connections), stop.cancelled());
        let Some(Remote {
            listener,
            tls,
            role,
        }) = remote
        else {
            local.await?;
            return Ok(());
        };
        let (accepted, connections) = mpsc::channel(ACCEPTED_MAX);
        tokio::spawn(remote::accept(
            listener,
            limits.connections,
            accepted,
            stop.clone(),
            cut,
        ));
        let context = Context {
            remote: Some(role),
            ..context
        };
        // No lease service: a holder must be a process that is measured on this machine.
        let remote = transport()
            .tls_config(tls)?
            .add_service(health.service())
            .add_service(reflection().build_v1()?)
            .add_service(operators(context.clone()).max_decoding_message_size(size))
            .add_service(llm(context).max_decoding_message_size(size))
            .serve_with_incoming_shutdown(ReceiverStream::new(connections), stop.cancelled());
        tokio::try_join!(local, remote)?;
        Ok(())
    }
}

impl Context {
    /// Counts one more open stream of the caller.
    pub(super) fn stream_slot(&self, call: &Call) -> Result<Slot, CallError> {
        self.streams
            .open(call.slot_key())
            .map_err(|limit| CallError::QuotaExceeded {
                what: "open streams",
                limit,
            })
    }
}

fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTOR_SET)
}

/// Accepts one connection; also returns a time, in [`boot_ticks`], at which it was already waiting.
async fn accept_one(listener: &UnixListener) -> io::Result<(UnixStream, Option<u64>)> {
    poll_fn(|context| {
        let waiting_at = boot_ticks();
        let accepted = ready!(listener.poll_accept(context));
        Poll::Ready(accepted.map(|(stream, _)| (stream, waiting_at)))
    })
    .await
}

/// Accepts connections of one socket until the server ends; closes those above the limits at once.
async fn accept(
    listener: UnixListener,
    slots: Slots,
    accepted: mpsc::Sender<io::Result<Connection<UnixStream, PeerInfo>>>,
    stop: CancellationToken,
    cut: CancellationToken,
) {
    loop {
        let stream = tokio::select! {
            accepted = accept_one(&listener) => accepted,
            () = stop.cancelled() => return,
        };
        let (stream, waiting_at) = match stream {
            Ok(accepted) => accepted,
            Err(error) => {
                // Usually out of file descriptors; one may be closed soon.
                warn!(%error, "cannot accept a gRPC connection");
                tokio::time::sleep(ACCEPT_AGAIN_AFTER).await;
                continue;
            }
        };
        let peer = match PeerInfo::of(&stream, waiting_at) {
            Ok(peer) => peer,
            Err(error) => {
                debug!(%error, "cannot read the credentials of a client; connection closed");
                continue;
            }
        };
        match slots.open((peer.uid, peer.pid)) {
            Ok(slot) => {
                let connection = Connection::new(stream, peer, &cut, slot);
                if accepted.send(Ok(connection)).await.is_err() {
                    return;
                }
            }
            Err(limit) => debug!(
                uid = peer.uid,
                pid = peer.pid,
                limit,
                "too many connections; this one is closed"
            ),
        }
    }
}

/// Buffered notices of released leases per stream; a stream that misses one learns of the end at its next renewal.
const GIVEN_BACK_MAX: usize = 64;

/// Accepted connections that wait to be served; more wait in the kernel.
const ACCEPTED_MAX: usize = 16;
