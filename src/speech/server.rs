//! Wyoming server: one task per connection, closed after an error.

use std::{
    collections::BTreeMap,
    fs,
    future::Future,
    io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, UnixListener, UnixStream},
    sync::{Semaphore, mpsc},
    task::JoinHandle,
    time::{Instant, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    client::Endpoint,
    wyoming::{
        Event, EventError, Frame, FrameError, FrameLimits, FrameReader, Info,
        event::{ErrorReply, Ping},
        write_frame,
    },
};
use cotenant_units::{Bytes, lock::locked};

/// Handler of a server's connections.
pub trait Service: Send + Sync + 'static {
    /// State of one connection.
    type Session: Session;

    /// Service description; must not wait for an engine.
    fn info(&self) -> Info;

    /// State for a new connection.
    fn session(&self) -> Self::Session;
}

/// One connection. The server itself answers `describe` and `ping`.
pub trait Session: Send + 'static {
    /// Handles one event and sends its responses. Irrelevant events are ignored.
    ///
    /// Slow work should be started here and awaited in [`progress`](Self::progress): until this returns, nothing is
    /// read from the connection, and a disconnect is not noticed.
    ///
    /// # Errors
    /// A refusal is sent as `error`; in any case the connection is closed.
    fn handle(
        &mut self,
        event: Event,
        reply: &Reply,
    ) -> impl Future<Output = Result<(), SessionError>> + Send;

    /// Waits for work started by [`handle`](Self::handle); pending forever without any. Cancel-safe.
    ///
    /// # Errors
    /// As for [`handle`](Self::handle).
    fn progress(&mut self) -> impl Future<Output = Result<(), SessionError>> + Send {
        std::future::pending()
    }

    /// Activity between two events.
    fn activity(&self) -> Activity {
        Activity::Idle
    }
}

/// Activity of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// Idle: yields to a new connection.
    Idle,
    /// A recording or text is arriving. Yields to a new connection when it stalls.
    Receiving,
    /// Work for the client is in progress, so its silence is expected.
    Working,
}

/// Reason for an early end of a connection.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The request is refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The client has disconnected or is too slow.
    #[error("cannot answer")]
    Reply(#[from] FrameError),
}

/// Reason for a refusal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    /// For people.
    pub text: String,
    /// For programs, for example `memory-pressure`.
    pub code: &'static str,
}

impl Refusal {
    /// A refusal with this code and text.
    pub fn new(code: &'static str, text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            code,
        }
    }
}

/// Checks the length of a text to be synthesised.
///
/// # Errors
/// If it exceeds [`TEXT_BYTES_MAX`].
pub fn check_text_length(bytes: usize) -> Result<(), Refusal> {
    if bytes <= TEXT_BYTES_MAX {
        return Ok(());
    }
    let (text, limit) = (Bytes::of_len(bytes), Bytes::of_len(TEXT_BYTES_MAX));
    Err(Refusal::new(
        "too-long",
        format!("text of {text} is longer than the limit of {limit}"),
    ))
}

/// Longest accepted text: some 15 minutes of speech.
pub const TEXT_BYTES_MAX: usize = 16 << 10;

/// Sends responses on one connection; clones share it, and messages are not interleaved.
#[derive(Clone, Debug)]
pub struct Reply {
    queue: mpsc::Sender<Outgoing>,
    wanted: CancellationToken,
    hold: Option<Hold>,
}

/// Responses withheld until their turn has ended.
#[derive(Clone, Debug)]
pub struct Hold(Arc<Held>);

#[derive(Debug)]
struct Held {
    /// With their bytes; `None` once released.
    waiting: tokio::sync::Mutex<Option<(Vec<Outgoing>, usize)>>,
    released: CancellationToken,
}

impl Hold {
    /// Withholds a response when memory is available; returns it if the hold was released.
    async fn keep(&self, outgoing: Outgoing, bytes: usize) -> Result<(), Outgoing> {
        loop {
            match &mut *self.0.waiting.lock().await {
                None => return Err(outgoing),
                Some((waiting, held)) if *held + bytes <= (HELD_KIB as usize) << 10 => {
                    waiting.push(outgoing);
                    *held += bytes;
                    return Ok(());
                }
                Some(_full) => {}
            }
            self.0.released.cancelled().await;
        }
    }
}

impl Reply {
    /// Sends one event when the connection's queue has space. Dropping the returned future never leaves an event half
    /// sent.
    ///
    /// # Errors
    /// If the client did not read earlier events in time or has disconnected.
    pub async fn send(&self, event: Event) -> Result<(), FrameError> {
        let frame = event.into_frame();
        let encoded = self.hold.as_ref().map(|_| frame.encode()).transpose()?;
        let mut outgoing = Outgoing::Frame(frame, self.wanted.clone());
        if let (Some(hold), Some(encoded)) = (&self.hold, encoded) {
            let bytes = FRAME_BYTES + encoded.len();
            match hold.keep(outgoing, bytes).await {
                Ok(()) => return Ok(()),
                Err(released) => outgoing = released,
            }
        }
        self.queue(outgoing).await
    }

    async fn queue(&self, outgoing: Outgoing) -> Result<(), FrameError> {
        self.queue.send(outgoing).await.map_err(|_| {
            FrameError::Io(io::Error::new(
                io::ErrorKind::BrokenPipe,
                "the client is gone, or does not read",
            ))
        })
    }

    /// A sender whose responses are withheld until [`Reply::release`] is called with its hold; beyond a limit, sending
    /// waits. They are dropped with the sender.
    pub fn held(&self) -> (Self, Hold) {
        let hold = Hold(Arc::new(Held {
            waiting: tokio::sync::Mutex::new(Some(Default::default())),
            released: CancellationToken::new(),
        }));
        let reply = Self {
            hold: Some(hold.clone()),
            ..self.clone()
        };
        (reply, hold)
    }

    /// Sends the withheld responses in order; later ones are not withheld.
    ///
    /// # Errors
    /// As for [`send`](Self::send).
    pub async fn release(&self, hold: &Hold) -> Result<(), FrameError> {
        let mut waiting = hold.0.waiting.lock().await;
        for outgoing in waiting.take().unwrap_or_default().0 {
            self.queue(outgoing).await?;
        }
        hold.0.released.cancel();
        Ok(())
    }

    /// A sender for cancellable output: after the token is cancelled nothing more is written, including queued events.
    pub fn cancellable(&self) -> (Self, CancellationToken) {
        let wanted = self.wanted.child_token();
        let reply = Self {
            wanted: wanted.clone(),
            ..self.clone()
        };
        (reply, wanted)
    }

    /// A sender, and the task that writes until the client disconnects or [`Reply::end`] is called.
    fn start(mut writer: BoxedWriter, patience: Duration) -> (Self, JoinHandle<BoxedWriter>) {
        let (queue, mut waiting) = mpsc::channel(FRAMES_QUEUED);
        let task = tokio::spawn(async move {
            while let Some(Outgoing::Frame(frame, wanted)) = waiting.recv().await {
                if wanted.is_cancelled() {
                    continue;
                }
                match timeout(patience, write_frame(&mut writer, &frame)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => {
                        tracing::debug!(%error, "client lost");
                        break;
                    }
                    Err(_) => {
                        tracing::debug!(?patience, "the client does not read");
                        break;
                    }
                }
            }
            writer
        });
        let wanted = CancellationToken::new();
        let reply = Self {
            queue,
            wanted,
            hold: None,
        };
        (reply, task)
    }

    /// Ends the writer after the queued events.
    async fn end(&self) {
        // The writer may have ended already.
        let _ = self.queue.send(Outgoing::End).await;
    }
}

/// Queued output.
#[derive(Debug)]
enum Outgoing {
    Frame(Frame, CancellationToken),
    End,
}

/// Limits of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    /// Concurrent connections. A further one replaces the one that has been idle longest, or is refused if none is
    /// idle.
    pub connections: usize,
    /// A connection without input for this long is closed.
    pub idle: Duration,
    /// Time limit for a client to read each response.
    pub write: Duration,
    /// Longest message.
    pub frame: FrameLimits,
}

impl Default for ServerLimits {
    /// A house has a dozen satellites at most. A satellite sends audio every 20 to 128 ms and opens a connection per
    /// request, so a minute of silence means a lost client.
    fn default() -> Self {
        Self {
            connections: 16,
            idle: Duration::from_secs(60),
            write: Duration::from_secs(10),
            // Clients send no lists, but descriptions of servers contain many.
            frame: FrameLimits {
                tree: Bytes::from_mib(1),
                ..FrameLimits::default()
            },
        }
    }
}

/// A listening Wyoming server.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    limits: ServerLimits,
}

impl Server {
    /// Listens; replaces a socket left by an earlier run, but not one on which another process listens.
    ///
    /// # Errors
    /// If the address is in use or cannot be bound.
    pub async fn bind(endpoint: &Endpoint, limits: ServerLimits) -> Result<Self, io::Error> {
        let listener = match endpoint {
            Endpoint::Unix(path) => {
                let listener = match UnixListener::bind(path) {
                    Err(error)
                        if error.kind() == io::ErrorKind::AddrInUse && is_abandoned(path).await =>
                    {
                        fs::remove_file(path)?;
                        UnixListener::bind(path)?
                    }
                    result => result?,
                };
                Listener::Unix(listener, SocketFile::of(path)?)
            }
            Endpoint::Tcp(address) => Listener::Tcp(TcpListener::bind(address).await?),
        };
        Ok(Self { listener, limits })
    }

    /// Serves an open TCP socket.
    ///
    /// # Errors
    /// If it cannot be used.
    pub fn on_tcp(
        listener: std::net::TcpListener,
        limits: ServerLimits,
    ) -> Result<Self, io::Error> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener: Listener::Tcp(TcpListener::from_std(listener)?),
            limits,
        })
    }

    /// Serves an open Unix socket; its file at `path` is not removed at the end.
    ///
    /// # Errors
    /// If it cannot be used.
    pub fn on_unix(
        listener: std::os::unix::net::UnixListener,
        path: PathBuf,
        limits: ServerLimits,
    ) -> Result<Self, io::Error> {
        listener.set_nonblocking(true)?;
        let file = SocketFile { path, inode: None };
        Ok(Self {
            listener: Listener::Unix(UnixListener::from_std(listener)?, file),
            limits,
        })
    }

    /// Address; for TCP port 0, the chosen port.
    ///
    /// # Errors
    /// If the kernel does not provide it.
    pub fn endpoint(&self) -> Result<Endpoint, io::Error> {
        Ok(match &self.listener {
            Listener::Unix(_, file) => Endpoint::Unix(file.path.clone()),
            Listener::Tcp(listener) => Endpoint::Tcp(listener.local_addr()?.to_string()),
        })
    }

    /// Serves until `stop` is cancelled; then waits for responses in progress.
    pub async fn run<S: Service>(self, service: S, stop: CancellationToken) {
        let service = Arc::new(service);
        let seats = Arc::new(Mutex::new(Seats::new(self.limits.connections)));
        let refusing = Arc::new(Semaphore::new(REFUSED_AT_ONCE));
        let connections = TaskTracker::new();
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((reader, writer)) => {
                    let reader = FrameReader::new(reader, self.limits.frame);
                    if let Some(seat) = Seat::take(&seats) {
                        let connection = Connection {
                            reader,
                            service: Arc::clone(&service),
                            limits: self.limits,
                            stop: stop.clone(),
                            seat,
                        };
                        connections.spawn(connection.run(writer));
                    } else if let Ok(place) = Arc::clone(&refusing).try_acquire_owned() {
                        let limit = self.limits.connections;
                        connections.spawn(async move {
                            refuse(reader, writer, limit).await;
                            drop(place);
                        });
                    }
                }
                Err(error) => {
                    // Out of descriptors or aborted by the peer: temporary, but a loop without a pause would spin.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        connections.close();
        connections.wait().await;
    }
}

/// Slots of all connections, and their activity.
struct Seats {
    limit: usize,
    next: u64,
    taken: BTreeMap<u64, (Activity, Instant, CancellationToken)>,
}

impl Seats {
    const fn new(limit: usize) -> Self {
        Self {
            limit,
            next: 0,
            taken: BTreeMap::new(),
        }
    }

    /// Takes a slot; if all are taken, that of the connection idle for longest, which is cancelled.
    fn take(&mut self, now: Instant) -> Option<(u64, CancellationToken)> {
        if self.taken.len() >= self.limit {
            let gives_way =
                |(activity, since, _): &(Activity, Instant, CancellationToken)| match activity {
                    Activity::Idle => true,
                    Activity::Receiving => now.duration_since(*since) >= STALLED,
                    Activity::Working => false,
                };
            let idle = self.taken.iter().filter(|(_, seat)| gives_way(seat));
            let longest = idle
                .min_by_key(|(_, (_, since, _))| *since)
                .map(|(&number, _)| number)?;
            if let Some((_, _, leave)) = self.taken.remove(&longest) {
                leave.cancel();
            }
        }
        let leave = CancellationToken::new();
        self.next += 1;
        self.taken
            .insert(self.next, (Activity::Idle, now, leave.clone()));
        Some((self.next, leave))
    }
}

struct Seat {
    seats: Arc<Mutex<Seats>>,
    number: u64,
    leave: CancellationToken,
}

impl Seat {
    fn take(seats: &Arc<Mutex<Seats>>) -> Option<Self> {
        let (number, leave) = locked(seats).take(Instant::now())?;
        Some(Self {
            seats: Arc::clone(seats),
            number,
            leave,
        })
    }

    /// Sets the current activity of the connection.
    fn note(&self, activity: Activity) {
        if let Some((noted, since, _)) = locked(&self.seats).taken.get_mut(&self.number) {
            (*noted, *since) = (activity, Instant::now());
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        locked(&self.seats).taken.remove(&self.number);
    }
}

/// Refuses a connection for lack of slots, and closes it.
async fn refuse(mut reader: FrameReader<BoxedReader>, mut writer: BoxedWriter, limit: usize) {
    let error = Event::Error(ErrorReply {
        text: format!(
            "all {limit} connections are busy (hint: try again, or raise the limit of connections)"
        ),
        code: Some(BUSY.to_owned()),
    });
    let reported = async {
        write_frame(&mut writer, &error.into_frame()).await?;
        writer.shutdown().await?;
        reader.discard(LINGER_BYTES).await;
        Ok::<(), FrameError>(())
    };
    let _ = timeout(LINGER, reported).await;
}

struct Connection<S: Service> {
    reader: FrameReader<BoxedReader>,
    service: Arc<S>,
    limits: ServerLimits,
    stop: CancellationToken,
    seat: Seat,
}

impl<S: Service> Connection<S> {
    async fn run(mut self, writer: BoxedWriter) {
        let (reply, writing) = Reply::start(writer, self.limits.write);
        let outcome = self.talk(&reply).await;
        let refusal = match outcome {
            Ok(()) => None,
            Err(ConnectionError::GaveWay) => {
                writing.abort();
                return;
            }
            Err(ConnectionError::Session(SessionError::Refused(refusal))) => Some(refusal),
            Err(
                ConnectionError::Session(SessionError::Reply(error))
                | ConnectionError::Frame(error @ FrameError::Io(_)),
            ) => {
                tracing::debug!(%error, "client lost");
                writing.abort();
                return;
            }
            Err(ConnectionError::Frame(error)) => {
                Some(Refusal::new(BAD_REQUEST, with_cause(&error)))
            }
            Err(ConnectionError::Event(error)) => {
                Some(Refusal::new(BAD_REQUEST, with_cause(&error)))
            }
        };
        let refused = refusal.is_some();
        if let Some(refusal) = refusal {
            tracing::debug!(code = refusal.code, text = refusal.text, "request refused");
            let error = Event::Error(ErrorReply {
                text: refusal.text,
                code: Some(refusal.code.to_owned()),
            });
            // A voice pipeline of Home Assistant waits forever after an `error` on an open connection.
            let _ = reply.send(error).await;
        }
        reply.end().await;
        let Ok(mut writer) = writing.await else {
            return;
        };
        if writer.shutdown().await.is_ok() && refused {
            // Read pending client data: closing with unread bytes would reset a TCP connection and could discard our
            // response.
            let _ = timeout(LINGER, self.reader.discard(LINGER_BYTES)).await;
        }
    }

    async fn talk(&mut self, reply: &Reply) -> Result<(), ConnectionError> {
        let mut session = self.service.session();
        loop {
            let activity = session.activity();
            self.seat.note(activity);
            let next = async {
                match activity {
                    Activity::Working => Some(self.reader.next().await),
                    _ => timeout(self.limits.idle, self.reader.next()).await.ok(),
                }
            };
            let frame = tokio::select! {
                biased;
                () = self.stop.cancelled() => match activity {
                    Activity::Idle => return Ok(()),
                    _ => return Err(SessionError::Refused(Refusal::new(DRAINING, "the server is stopping")).into()),
                },
                () = self.seat.leave.cancelled() => return Err(ConnectionError::GaveWay),
                () = reply.queue.closed() => return Ok(()),
                done = session.progress() => {
                    done?;
                    continue;
                }
                frame = next => frame,
            };
            let Some(frame) = frame else { return Ok(()) };
            let Some(frame) = frame.map_err(ConnectionError::Frame)? else {
                return Ok(());
            };
            match Event::from_frame(frame).map_err(ConnectionError::Event)? {
                Event::Describe => {
                    let info = Event::Info(Box::new(self.service.info()));
                    reply.send(info).await.map_err(SessionError::Reply)?;
                }
                Event::Ping(Ping { text }) => {
                    let pong = Event::Pong(Ping { text });
                    reply.send(pong).await.map_err(SessionError::Reply)?;
                }
                event => {
                    self.seat.note(Activity::Working);
                    session.handle(event, reply).await?;
                }
            }
        }
    }
}

/// Reason for an early end of a connection, including the server's own refusals.
enum ConnectionError {
    Session(SessionError),
    Frame(FrameError),
    Event(EventError),
    /// Another connection has taken its slot.
    GaveWay,
}

impl From<SessionError> for ConnectionError {
    fn from(error: SessionError) -> Self {
        Self::Session(error)
    }
}

#[derive(Debug)]
enum Listener {
    Unix(UnixListener, SocketFile),
    Tcp(TcpListener),
}

impl Listener {
    async fn accept(&self) -> Result<(BoxedReader, BoxedWriter), io::Error> {
        Ok(match self {
            Self::Unix(listener, _) => {
                let (reader, writer) = listener.accept().await?.0.into_split();
                (Box::new(reader), Box::new(writer))
            }
            Self::Tcp(listener) => {
                let stream = listener.accept().await?.0;
                stream.set_nodelay(true)?;
                let (reader, writer) = stream.into_split();
                (Box::new(reader), Box::new(writer))
            }
        })
    }
}

/// The file of a bound Unix socket; removed on drop, unless another process has replaced it.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Its device and inode; `None` if it must not be removed.
    inode: Option<(u64, u64)>,
}

impl SocketFile {
    fn of(path: &Path) -> Result<Self, io::Error> {
        let meta = fs::symlink_metadata(path)?;
        Ok(Self {
            path: path.to_owned(),
            inode: Some((meta.dev(), meta.ino())),
        })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|meta| self.inode == Some((meta.dev(), meta.ino())));
        if ours {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Whether a path is a socket without a listener. Connecting to any other file is refused in the same way.
async fn is_abandoned(path: &Path) -> bool {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    is_socket
        && matches!(
            UnixStream::connect(path).await,
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused
        )
}

/// An error with its cause on one line, because clients only get a text.
fn with_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

type BoxedReader = Box<dyn AsyncRead + Send + Unpin>;
type BoxedWriter = Box<dyn AsyncWrite + Send + Unpin>;

/// Code of invalid requests.
pub const BAD_REQUEST: &str = "bad-request";

/// Code of overlong audio and texts.
pub const TOO_LONG: &str = "too-long";

/// Code of requests refused for lack of capacity.
pub const BUSY: &str = "busy";

/// Code of requests in the protocol that this server lacks.
pub const NOT_SUPPORTED: &str = "not-supported";

/// Code of requests that arrive, or are incomplete, when the server stops.
pub const DRAINING: &str = "draining";

/// A recording without input for this long yields. Our choice: satellites send every 20 to 128 ms.
const STALLED: Duration = Duration::from_secs(5);

/// Concurrent refusals with a message; further connections are closed.
const REFUSED_AT_ONCE: usize = 8;

/// Messages in the write queue; then their sender waits.
const FRAMES_QUEUED: usize = 8;

/// Memory of withheld messages; then their sender waits. Our choice: some 2.5 s of audio.
pub const HELD_KIB: u32 = 128;

/// Overhead of a message besides text and samples. Our choice: a map of a few fields.
const FRAME_BYTES: usize = 1 << 10;

/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time and bytes for which a client may continue to send after a refusal; the data is discarded. Ten minutes in CD
/// quality have 101 MiB.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 128 << 20;
