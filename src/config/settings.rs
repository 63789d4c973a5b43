//! Checked settings, with units and defaults.

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use cotenant_policy::{
    compute::DeviceSettings,
    kv_type::KvType,
    lease::Class,
    params::{ClassDeadlines, ResidencyMode, RestartParams, Scope, VariantParams},
    roles::{Bounds, Members, Role},
};
use cotenant_units::{Bytes, Layers, Tokens, fnv1a};

/// Maximum size of a configuration file; larger files are refused.
///
/// A file with 100 workers takes about 60 KiB; the limit keeps a wrong path (a model, a log) from filling memory.
pub const FILE_MAX: Bytes = Bytes::from_mib(1);

/// All settings, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Memory to hand out, and the limits of scarcity.
    pub budget: BudgetConfig,
    /// Reclaim of memory.
    pub shedding: SheddingConfig,
    /// Limits on leases and requests.
    pub leases: LeaseConfig,
    /// The LLM in this process; `None` if the supervisor only manages workers and tenants.
    pub llm: Option<LlmConfig>,
    /// Child processes, in start order; names are unique.
    pub workers: Vec<WorkerConfig>,
    /// HTTP APIs and metrics.
    pub http: HttpConfig,
    /// The Wyoming API.
    pub wyoming: WyomingConfig,
    /// gRPC for tenants and operators.
    pub grpc: GrpcConfig,
    /// Destination of events and actions; `None` disables the journal.
    pub journal: Option<JournalConfig>,
    /// Crashes after which the LLM stays off.
    pub safe_profile: SafeProfileConfig,
    /// State that persists across restarts. Default `/var/lib/cotenant`.
    pub state_dir: PathBuf,
    /// Folder of sockets. Default `/run/cotenant`.
    pub runtime_dir: PathBuf,
    /// Filter and format of the log.
    pub log: LogConfig,
    /// Destination of request spans and events, and names of metrics.
    pub telemetry: TelemetryConfig,
}

impl Config {
    /// Returns a hash of the settings: the same on every machine, for one version of this program. Comments, the order
    /// of keys and explicit defaults do not change it.
    pub fn hash(&self) -> String {
        format!("{:016x}", fnv1a(format!("{self:?}").into_bytes()))
    }
}

/// Limit as bytes or as a part of the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watermark {
    /// Written as a size: `2GiB`.
    Bytes(Bytes),
    /// Written as a percentage, kept in thousandths of the budget: `6.5%` is 65.
    PerMille(u32),
}

impl Watermark {
    /// Returns the limit in bytes, for a budget of `budget` (total minus reserve).
    #[must_use]
    pub fn of(self, budget: Bytes) -> Bytes {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::PerMille(part) => budget.per_mille(part),
        }
    }
}

impl fmt::Display for Watermark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => bytes.fmt(f),
            Self::PerMille(part) if part.is_multiple_of(10) => write!(f, "{}%", part / 10),
            Self::PerMille(part) => write!(f, "{}.{}%", part / 10, part % 10),
        }
    }
}

/// Headroom below which memory is scarce: elevated above critical, critical above the last resort. Absent values take
/// policy's default, a part of the budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watermarks {
    /// Below it the level is Elevated. Default 13%.
    pub elevated: Option<Watermark>,
    /// Below it the level is Critical. Default 6.5%.
    pub critical: Option<Watermark>,
    /// Below it a worker may be ended. Default 3%.
    pub last_resort: Option<Watermark>,
}

/// Memory to hand out, and the limits of scarcity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetConfig {
    /// Total memory of the budget, including the reserve. Default: the machine's memory, or the tightest limit of an
    /// enclosing control group if lower.
    pub total: Option<Bytes>,
    /// Memory that is never handed out: OS, JetPack, display, and the supervisor's own memory besides the engine's
    /// plan. Default: see [`BudgetConfig::reserve_of`].
    pub reserve: Option<Bytes>,
    /// Processes whose use counts. Default: all of the machine.
    pub scope: Scope,
    /// Headroom at which memory is scarce.
    pub watermarks: Watermarks,
    /// Margin above a watermark that headroom must reach to leave its level. Default 2% of the budget.
    pub hysteresis: Option<Watermark>,
    /// Time for which headroom must have recovered before the level falls and the engine grows, 0 s to 1 h. Default:
    /// ten times the duration of the LLM's last growth or load, 1 s to 60 s; without an LLM 60 s.
    pub dwell: Option<Duration>,
    /// Time for which a shortage may stay Elevated before memory is shed; Critical is handled at once. Default 2 s, 0 s
    /// to 1 min.
    pub grace: Duration,
    /// Highest expected rate of consumption, in MiB per second; determines the sampling interval. Default 6000 MiB
    /// (earlyoom's figure for a desktop), 1 MiB to 1 TiB.
    pub fill_rate_mib_per_s: u32,
    /// Shortest sampling interval. Default 10 ms, 1 ms to 1 s.
    pub sample_min: Duration,
    /// Longest sampling interval. Default 1 s, 10 ms to 10 s, not below `sample_min`.
    pub sample_max: Duration,
}

impl BudgetConfig {
    /// Returns the reserve for a budget of `total`.
    ///
    /// Defaults without a setting: for a machine 8 % of it, at least 128 MiB (an Orin NX with 15 656 MiB uses 1224 MiB
    /// when idle and headless); for a session 32 MiB, twice the supervisor's peak without a model.
    pub fn reserve_of(&self, total: Bytes) -> Bytes {
        self.reserve.unwrap_or_else(|| match self.scope {
            Scope::Machine => total
                .per_mille(MACHINE_RESERVE_PER_MILLE)
                .max(MACHINE_RESERVE_MIN),
            Scope::Session => SESSION_RESERVE,
        })
    }
}

/// Reclaim of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SheddingConfig {
    /// Headroom above the upper watermark after a shed, so that one action suffices. Default: 5 % of the budget, at
    /// least 256 MiB, at most a quarter of the budget.
    pub reclaim_min: Option<Bytes>,
    /// Time for a shed to take effect before the next one. Default 250 ms, 0 s to 60 s.
    pub settle: Duration,
    /// Time for a holder to reach a lower target, by class. Default 50 ms, 250 ms, 2 s, 2 s; 1 ms to 60 s.
    pub deadlines: ClassDeadlines,
    /// Longest time for which the end of a lease may remain unmeasured. Default 5 s, 100 ms to 10 min.
    pub verify_timeout: Duration,
}

/// Limits on leases and requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseConfig {
    /// Shortest term. Default 2 s, 100 ms to 1 h.
    pub term_min: Duration,
    /// Longest term. Default 5 min, `term_min` to 24 h.
    pub term_max: Duration,
    /// Longest wait of a request. Default 60 s, 0 s to 1 h.
    pub wait_max: Duration,
    /// Limit on waiting requests. Default 64, 1 to 1000.
    pub queue_max: u32,
    /// Limit on leases and waiting requests per user. Default 64, 1 to 1000.
    pub per_user_max: u32,
}

/// Time at which held KV capacity is populated. It is in the ledger in either case, and is not granted to other
/// holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvMemory {
    /// As tokens arrive: growing takes microseconds, but programs without a lease may take memory that looks available.
    /// Default.
    AsNeeded,
    /// At once: every program sees it as used, and growing takes as long as the kernel needs to provide the pages.
    AtOnce,
}

/// Tokens that the LLM may generate, in addition to control tokens and single bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VocabularyConfig {
    /// All.
    All,
    /// The first ones by id, which are the most frequent.
    First(u32),
    /// The tokens that cover nearly all of this text.
    Text(PathBuf),
}

/// Default of [`LlmConfig::conversations`]: the rooms of a flat. Our choice.
pub const CONVERSATIONS: u32 = 4;

/// The LLM in this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LlmConfig {
    /// The GGUF file. Required, absolute.
    pub path: PathBuf,
    /// Its name for clients. Default: the file's name without its extension.
    pub name: String,
    /// Compute threads; `None` for one per physical core. 1 to 256.
    pub threads: Option<u32>,
    /// Answers computed together; `None` for as many as the model supports. 1 to 8.
    pub parallel: Option<u32>,
    /// Whether tokens are drafted, from repetitions or by the model's own block. Default true.
    pub drafts: bool,
    /// Conversations whose states have KV capacity beside `context`. Default 4, 0 to 64.
    pub conversations: u32,
    /// Whether idle conversations are saved to disk. Default false.
    pub keep_conversations: bool,
    /// Compute device. Default: a usable GPU, else the CPU.
    pub device: DeviceSettings,
    /// KV capacity in tokens when memory is ample. Default 4096, 64 to 1048576.
    pub context: Tokens,
    /// Tokens that it may generate. Default: all.
    pub vocabulary: VocabularyConfig,
    /// Token limit of an answer whose request sets none. Default 4096, 1 to 1048576.
    pub answer_tokens_max: Tokens,
    /// Time limit of an answer, including its prompt; the answer is then truncated as by its length. Default 5 min, 1 s
    /// to 1 day.
    pub answer_time_max: Duration,
    /// Longest time of one answer while equally or more urgent ones wait. Default 60 s, 1 s to 1 day.
    pub answer_time_shared: Duration,
    /// KV capacity in tokens below which the engine does not run. Default 512, 64 up to `context`.
    pub kv_floor: Tokens,
    /// Time at which held KV capacity is populated.
    pub kv_memory: KvMemory,
    /// KV type when memory is ample. Default `f16`.
    pub kv_type: KvType,
    /// Smallest type to which KV is converted when memory is short. Default: as `kv_type`, which disables conversion.
    pub kv_type_least: KvType,
    /// Tokens of one prefill chunk. Default 128, 1 to 4096.
    pub prefill_chunk: Tokens,
    /// Largest prefill chunk while parts are streamed. Default 512, or `prefill_chunk` if larger; up to 4096.
    pub prefill_chunk_max: Tokens,
    /// Order of shedding.
    pub mode: ResidencyMode,
    /// Layers that always stay resident. Default 0.
    pub resident_layers_min: Layers,
    /// Workers started before it; all others start after it.
    pub after: Vec<String>,
    /// Longest time for which workers wait for it to load. Default 2 min, 1 s to 1 h.
    pub load_timeout: Duration,
    /// Time for the engine to apply a change before the request is repeated. Default 2 s, 100 ms to 10 min.
    pub apply_timeout: Duration,
    /// Retries of loading after a failure.
    pub restart: RestartParams,
}

/// Role of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WorkerRole {
    /// Speech to text.
    Asr,
    /// Text to vectors.
    Embedding,
    /// Any other, managed only for its memory. Default.
    Other,
    /// Text to speech.
    Tts,
}

/// Protocol of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WorkerProtocol {
    /// No known protocol. Default for the role `other`.
    None,
    /// OpenAI's audio routes over HTTP: `/v1/audio/transcriptions`, `/v1/audio/speech`.
    OpenaiHttp,
    /// Piper's own server: `POST /synthesize`. For `tts`.
    PiperHttp,
    /// whisper.cpp's own server: `POST /inference`. For `asr`.
    WhisperServer,
    /// Wyoming events on a Unix socket or TCP port. Default for `asr` and `tts`.
    Wyoming,
}

/// Address of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// TCP port on loopback chosen by the supervisor before each start; `${PORT}` in argv and env.
    FreePort,
    /// No address.
    Nowhere,
    /// Fixed TCP port on loopback; `${PORT}` in argv and env.
    Port(u16),
    /// Unix socket, `${SOCKET}` in argv and env. Default for Wyoming: `<runtime_dir>/<name>.sock`, or a free port for a
    /// worker with `user`, which may not create a socket there.
    Socket(PathBuf),
}

/// Condition under which a worker is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Its endpoint accepts a connection. Default if it has an endpoint.
    Connect,
    /// It answers Wyoming's `describe`. Default for Wyoming.
    Describe,
    /// A `GET` of a path returns a given status.
    Http {
        /// The path. Default `/health`.
        path: String,
        /// The status. Default 200, 100 to 599.
        status: u16,
    },
    /// A line of its output contains this text.
    LogLine(String),
    /// A line of its output matches this regular expression.
    LogPattern(String),
    /// It sends `READY=1` to `NOTIFY_SOCKET`, as sd_notify(3) does.
    Notify,
    /// It has been started. Default if it has no endpoint.
    Started,
}

impl Readiness {
    /// Returns whether the sign appears only once, at the start, and cannot be checked later.
    pub const fn is_shown_once(&self) -> bool {
        matches!(self, Self::LogLine(_) | Self::LogPattern(_) | Self::Notify)
    }
}

/// Condition and time limit of a worker's readiness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadyConfig {
    /// Kind of check.
    pub check: Readiness,
    /// Its time limit. Default 60 s, 100 ms to 30 min.
    pub timeout: Duration,
}

/// Memory of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerMemory {
    /// Whether its sizes are learned: `peak` is then the reservation for the first start.
    pub auto: bool,
    /// Memory at rest; with variants, of the first one.
    pub steady: Bytes,
    /// Most memory held while loading or serving a request. Default 1.25 × `steady`, not below it.
    pub peak: Bytes,
    /// Its variants, the initial one first; empty if there is only one.
    pub variants: Vec<VariantParams>,
    /// Measured memory above which it accepts no new requests, finishes current ones, and is restarted. Default:
    /// `None`, no bound.
    pub recycle_above: Option<Bytes>,
    /// Whether it is also restarted if its memory after work keeps growing while memory is short. Default: yes; not
    /// with `recycle_above: none`.
    pub recycle_leaks: bool,
}

/// A child process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerConfig {
    /// Unique; `a-z`, `0-9`, `-`, `_`, starts with a letter, at most 32 characters. Also the name of its lease.
    pub name: String,
    /// Its role.
    pub role: WorkerRole,
    /// Program and arguments; not empty. `${SOCKET}`, `${PORT}`, `${NAME}`, `${VARIANT}` and `${SELF}` (the
    /// supervisor's own program) are substituted at the start.
    pub argv: Vec<String>,
    /// Environment, in addition to the supervisor's.
    pub env: BTreeMap<String, String>,
    /// Working directory. Default: the supervisor's.
    pub working_dir: Option<PathBuf>,
    /// Its protocol.
    pub protocol: WorkerProtocol,
    /// Model name sent to it, with `openai-http`. Default: its name.
    pub model: String,
    /// Its address.
    pub listen: Listen,
    /// Condition of its readiness.
    pub ready: ReadyConfig,
    /// Urgency of its work. Default `audio-realtime` for `asr` and `tts`, else `batch`.
    pub class: Class,
    /// Its memory.
    pub memory: WorkerMemory,
    /// Limits on restarts.
    pub restart: RestartParams,
    /// Time between SIGTERM and SIGKILL. Default 1 s, 0 s to 10 min.
    pub stop_grace: Duration,
    /// Its preference for the kernel's OOM killer. Default 300, −1000 to 1000.
    pub oom_score_adj: i16,
    /// Whether it starts with the supervisor. Default true.
    pub autostart: bool,
    /// Whether it is exempt from being stopped or shrunk for others. Default no.
    pub pinned: bool,
    /// Workers, or `llm`, that must be up or have failed permanently before it starts.
    pub after: Vec<String>,
    /// Holder of its lease.
    pub lease: LeaseHolder,
    /// Behaviour when idle.
    pub idle: IdleConfig,
    /// Time for which a request waits for it while it is not running. Default 8 s, 0 s to 10 min.
    pub wake_timeout: Duration,
    /// Longest wait for its answer, and between two parts of it. Default 30 s, 100 ms to 10 min.
    pub answer_timeout: Duration,
    /// Limits and sandbox.
    pub confinement: Confinement,
    /// Its notification when memory is short.
    pub pressure: PressureConfig,
}

/// Notification of a worker when memory is short, by systemd's memory pressure protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PressureConfig {
    /// File behind `$MEMORY_PRESSURE_WATCH`.
    pub watch: PressureWatch,
    /// Size after a notification; below `memory.steady`. `None` if no size is guaranteed.
    pub shrinks_to: Option<Bytes>,
}

/// File behind `$MEMORY_PRESSURE_WATCH`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PressureWatch {
    /// A FIFO, for a worker of one process. Default.
    #[default]
    Fifo,
    /// Nothing: `/dev/null`.
    None,
    /// A socket, for a worker of several processes.
    Socket,
}

/// Endpoints that may be served without a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keyless {
    /// `GET /health`.
    Health,
    /// `GET /metrics`.
    Metrics,
}

/// HTTP APIs and metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpConfig {
    /// Address; `None` with `listen: none`. Default `127.0.0.1:8410`; port 0 selects a free one.
    pub listen: Option<SocketAddr>,
    /// Host names, in addition to this machine's names and addresses, under which it is served and whose pages may use
    /// it. Default none.
    pub allowed_hosts: Vec<String>,
    /// Addresses of reverse proxies whose requests are served under any host name and origin. Default none.
    pub trusted_proxies: Vec<IpAddr>,
    /// File of clients and their keys; without it every client is served. Default none.
    pub keys_file: Option<PathBuf>,
    /// Endpoints served without a key even if clients have keys. Default `health`.
    pub keyless: Vec<Keyless>,
    /// Clients' names of models, each with the model or worker it refers to. Default none.
    pub models: BTreeMap<String, String>,
    /// Clients' names of voices, each with the worker's voice.
    pub voices: BTreeMap<String, String>,
}

/// The Wyoming API: recogniser, voice, assistant, and the pipeline of all three, on one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WyomingConfig {
    /// Addresses. Default none, since port 10300 is often a worker's.
    pub listen: Vec<WyomingListen>,
    /// Declared languages of the LLM. Default `en`.
    pub languages: Vec<String>,
    /// System prompt of each conversation. Default none.
    pub system: Option<String>,
    /// Time for which a request waits for a starting worker or engine before it is refused. Default 5 s, 0 s to 1 min.
    pub wait_max: Duration,
    /// Longest utterance. Default 60 s, 1 s to 10 min.
    pub audio_max: Duration,
    /// Limit on connections. Default 32, 1 to 1024.
    pub connections_max: u32,
    /// Limit on remembered conversations. Default 32, 0 (none) to 10000.
    pub conversations_max: u32,
    /// Size limit of each remembered conversation. Default 16 KiB, up to 1 MiB.
    pub history_max: Bytes,
}

impl Config {
    /// Returns the TCP listeners, each with its setting.
    pub fn listeners(&self) -> Vec<(&'static str, SocketAddr)> {
        let http = self.http.listen.map(|address| ("http.listen", address));
        let grpc = self.grpc.tcp.as_ref().map(|tcp| ("grpc.tcp", tcp.listen));
        let wyoming = self
            .wyoming
            .listen
            .iter()
            .filter_map(|listen| match listen {
                WyomingListen::Tcp(address) => Some(("wyoming.listen", *address)),
                WyomingListen::Unix(_) => None,
            });
        http.into_iter().chain(wyoming).chain(grpc).collect()
    }

    /// Returns the listeners that other machines reach without a key, each with its setting.
    pub fn open_listeners(&self) -> Vec<(&'static str, SocketAddr)> {
        let keyed = |key: &str| {
            key == "grpc.tcp" || (key == "http.listen" && self.http.keys_file.is_some())
        };
        let mut listeners = self.listeners();
        listeners
            .retain(|(key, address)| !keyed(key) && !address.ip().to_canonical().is_loopback());
        listeners
    }
}

/// Address of the Wyoming API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WyomingListen {
    /// `tcp://127.0.0.1:10300`; port 0 selects a free one.
    Tcp(SocketAddr),
    /// `unix:///run/cotenant/wyoming.sock`.
    Unix(PathBuf),
}

/// gRPC for tenants and operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrpcConfig {
    /// Socket in the file system; `None` with `socket: none`. Default `<runtime_dir>/cotenant.sock`.
    pub socket: Option<PathBuf>,
    /// Name of the abstract socket, without its `@`; `None` with `abstract_name: none`. Default `cotenant`.
    pub abstract_name: Option<String>,
    /// TLS listener for other machines. Default none.
    pub tcp: Option<TcpConfig>,
    /// Roles by user and group. Root and the daemon's own user are always operators.
    pub roles: Members,
    /// Limits per peer.
    pub limits: GrpcLimits,
}

/// gRPC over TLS, only for clients with a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpConfig {
    /// Address. Required; port 0 selects a free one.
    pub listen: SocketAddr,
    /// Certificate of the supervisor, PEM. Required.
    pub cert: PathBuf,
    /// Its key, readable only by its owner. Required.
    pub key: PathBuf,
    /// Root certificate of the clients' certificates. Required.
    pub client_ca: PathBuf,
    /// Role of every client with such a certificate: operator, viewer or watchdog. Default viewer.
    pub role: Role,
}

/// Limits per peer of the gRPC server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrpcLimits {
    /// Maximum message size. Default 1 MiB, 4 KiB to 64 MiB.
    pub message_max: Bytes,
    /// Concurrent calls and streams per connection. Default 64, 1 to 10000.
    pub calls_per_connection: u32,
    /// Connections. Default 32 per process, 256 per user, 1024 in all, each 1 to 100000; more has no effect unless the
    /// process may open as many files (`LimitNOFILE`).
    pub connections: Bounds,
    /// Open streams. Defaults and ranges as for connections.
    pub streams: Bounds,
    /// Time for which a client may leave its stream unread before it is disconnected. Default 20 s, 1 s to 10 min.
    pub reader_patience: Duration,
}

/// Destination of events and actions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalConfig {
    /// The file. Default `<state_dir>/journal.ndjson`.
    pub path: PathBuf,
    /// Size at which the file is rotated; one old file is kept. Default 64 MiB, 64 KiB to 64 GiB.
    pub max_size: Bytes,
}

/// Crashes of the supervisor after which the LLM stays off until an operator loads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SafeProfileConfig {
    /// Number of crashes. Default 3, 0 (never) to 100.
    pub crashes: u32,
    /// Period in which they are counted. Default 10 min, 1 s to 24 h.
    pub within: Duration,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere. Default.
    #[default]
    Auto,
    /// One JSON object per line.
    Json,
    /// Text for people.
    Text,
}

/// Filter and format of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogConfig {
    /// Filter in the syntax of `RUST_LOG`: `info`, `cotenant_policy=debug,info`. Default `info`.
    pub filter: String,
    /// Format of lines.
    pub format: LogFormat,
}

/// Destination of request spans, and names of metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TelemetryConfig {
    /// The collector. Default: that of the environment.
    pub otlp: Otlp,
    /// CA certificates for verifying a collector with TLS, PEM. Default `/etc/ssl/certs/ca-certificates.crt`.
    pub otlp_ca: PathBuf,
    /// Whether the collector receives events as well. Default false.
    pub otlp_events: bool,
    /// Whether the LLM's load is also published under vLLM's metric names. Default false.
    pub vllm_names: bool,
}

/// Choice of the collector of spans.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Otlp {
    /// That of the standard variables, if they name one. Default.
    #[default]
    Environment,
    /// None.
    Off,
    /// This one.
    To(OtlpConfig),
}

/// Collector of spans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtlpConfig {
    /// Whether it receives gRPC rather than protobuf over HTTP.
    pub grpc: bool,
    /// Whether the connection uses TLS.
    pub tls: bool,
    /// `host:port`.
    pub authority: String,
    /// Path of requests over HTTP.
    pub path: String,
}

/// An idle headless Orin NX uses 1224 of 15 656 MiB (tegrastats).
const MACHINE_RESERVE_PER_MILLE: u32 = 80;

/// A Debian without desktop uses about 100 MiB.
const MACHINE_RESERVE_MIN: Bytes = Bytes::from_mib(128);

/// Twice the 16 MiB that the supervisor is documented to need without a model.
const SESSION_RESERVE: Bytes = Bytes::from_mib(32);

/// Holder of a worker's lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaseHolder {
    /// The supervisor, on its behalf. Default.
    #[default]
    Supervisor,
    /// The worker itself, as a tenant under its own name; its peak is reserved until its request.
    Own,
}

/// Behaviour of an idle worker. Without settings it stays warm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdleConfig {
    /// Idle time after which it switches to its smallest variant. 1 s to 24 h.
    pub shrink_after: Option<Duration>,
    /// Idle time after which it is stopped; the next request starts it. 1 s to 24 h.
    pub stop_after: Option<Duration>,
}

/// Limits and sandbox of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// Memory limit of its control group, page cache included; it may not swap. `None` sets no limit. 1 MiB or more.
    pub memory: Option<Bytes>,
    /// Resource limits, soft and hard; `None` is no limit.
    pub resources: BTreeMap<Resource, Option<u64>>,
    /// Name or number of its user; `None` is the supervisor's.
    pub user: Option<String>,
    /// Name or number of its group; `None` is the user's own.
    pub group: Option<String>,
    /// The only files it may access, besides those that every program needs; `None` is all that its user may.
    pub files: Option<FileAccess>,
    /// Whether system calls that speech workers never need are refused.
    pub syscalls: SyscallFilter,
    /// Whether the start fails if one of these cannot be applied.
    pub required: bool,
}

/// Files and folders, each with everything below it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileAccess {
    /// Readable and executable.
    pub read: Vec<PathBuf>,
    /// Readable, executable and writable.
    pub write: Vec<PathBuf>,
}

/// System calls permitted to a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyscallFilter {
    /// Everything that its user may do.
    #[default]
    All,
    /// Everything except tracing other processes, and changing mounts, the clock, modules, swap or the kernel itself.
    /// Memory of outside processes is inaccessible, and root keeps only the capabilities for files, signals and ports.
    Restricted,
}

/// Limit of setrlimit(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resource {
    /// Bytes of address space.
    AddressSpace,
    /// Bytes of a core file.
    Core,
    /// Maximum size of a file it writes, in bytes.
    FileSize,
    /// Bytes it may lock into memory.
    LockedMemory,
    /// Open files.
    OpenFiles,
    /// Processes and threads of its user.
    Processes,
}

impl Resource {
    /// Returns its name in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AddressSpace => "address_space",
            Self::Core => "core",
            Self::FileSize => "file_size",
            Self::LockedMemory => "memlock",
            Self::OpenFiles => "open_files",
            Self::Processes => "processes",
        }
    }
}
