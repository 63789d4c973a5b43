//! Checked settings, with units and defaults.

use std::{collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf, time::Duration};

use cotenant_policy::{
    compute::DeviceSettings,
    kv_type::KvType,
    lease::Class,
    params::{ClassDeadlines, ResidencyMode, RestartParams, Scope, VariantParams},
    roles::{Bounds, Ids, Role},
};
use cotenant_units::{Bytes, Layers, Tokens, fnv1a};

/// Most bytes of a configuration file that are read; a longer file is refused.
///
/// A file with 100 workers has about 60 KiB; the limit keeps a wrong path (a model, a log) out of memory.
pub const FILE_MAX: Bytes = Bytes::from_mib(1);

/// Everything that can be set, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Memory that may be handed out, and when it counts as scarce.
    pub budget: BudgetConfig,
    /// How memory is taken back.
    pub shedding: SheddingConfig,
    /// Limits on leases and requests.
    pub leases: LeaseConfig,
    /// The LLM in this process; none when the supervisor only manages workers and tenants.
    pub llm: Option<LlmConfig>,
    /// Child processes, in the order in which they are started; names are unique.
    pub workers: Vec<WorkerConfig>,
    /// HTTP APIs and metrics.
    pub http: HttpConfig,
    /// The Wyoming API.
    pub wyoming: WyomingConfig,
    /// gRPC for tenants and operators.
    pub grpc: GrpcConfig,
    /// Destination of events and actions; `None` disables the journal.
    pub journal: Option<JournalConfig>,
    /// After which crashes the LLM stays off.
    pub safe_profile: SafeProfileConfig,
    /// State that outlives a restart. Default `/var/lib/cotenant`.
    pub state_dir: PathBuf,
    /// Sockets. Default `/run/cotenant`.
    pub runtime_dir: PathBuf,
    /// Filter and format of the log.
    pub log: LogConfig,
    /// Destination of request spans, and names of metrics.
    pub telemetry: TelemetryConfig,
}

impl Config {
    /// Identifies the settings: equal ones have equal hashes on every machine, in one version of this program. Comments,
    /// the order of keys and defaults that are written out do not change it.
    ///
    /// ```
    /// use cotenant_config::Config;
    /// let hash = |text: &str| Config::parse(text).unwrap().hash();
    /// assert_eq!(hash("log: {filter: info, format: json}"), hash("log:\n  format: json  # for a collector\n"));
    /// assert_ne!(hash("log: {format: json}"), hash("log: {format: text}"));
    /// ```
    #[must_use]
    pub fn hash(&self) -> String {
        format!("{:016x}", fnv1a(&format!("{self:?}")))
    }
}

/// A limit, as bytes or as a part of the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watermark {
    /// Written as a size: `2GiB`.
    Bytes(Bytes),
    /// Written as a percentage, kept in thousandths of the budget: `6.5%` is 65.
    PerMille(u32),
}

impl Watermark {
    /// The limit in bytes, for a budget of `budget` (total minus reserve).
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

/// Headroom below which memory counts as scarce. Elevated is above critical, critical above the last resort. Absent
/// values take policy's default, a part of the budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watermarks {
    /// Below it the level is Elevated. Default 13%.
    pub elevated: Option<Watermark>,
    /// Below it the level is Critical. Default 6.5%.
    pub critical: Option<Watermark>,
    /// Below it a worker may be ended. Default 3%.
    pub last_resort: Option<Watermark>,
}

/// Memory that may be handed out, and when it counts as scarce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetConfig {
    /// All memory of the budget, reserve included. Default: the machine's memory, or the tightest limit of a control
    /// group around us if that is lower.
    pub total: Option<Bytes>,
    /// Memory that is never handed out: OS, JetPack, display, and the supervisor's own memory besides the engine's
    /// plan. Default: see [`BudgetConfig::reserve_of`].
    pub reserve: Option<Bytes>,
    /// Whose use counts. Default: the whole machine's.
    pub scope: Scope,
    /// When headroom counts as scarce.
    pub watermarks: Watermarks,
    /// How far above a watermark headroom must be to leave its level. Default 2% of the budget.
    pub hysteresis: Option<Watermark>,
    /// How long headroom must be back before the level falls and the engine grows, 0 s to 1 h. Default: ten times the
    /// duration of the LLM's last growth or load, 1 s to 60 s; without an LLM 60 s.
    pub dwell: Option<Duration>,
    /// How long a shortage that is Elevated may last before anything is shed for it; Critical never waits. Default 2 s,
    /// 0 s to 1 min.
    pub grace: Duration,
    /// Fastest rate at which memory is expected to disappear, in MiB per second; sets how often a sample is taken.
    /// Default 6000 MiB (earlyoom's figure for a desktop), 1 MiB to 1 TiB.
    pub fill_rate_mib_per_s: u32,
    /// Shortest time between two samples. Default 10 ms, 1 ms to 1 s.
    pub sample_min: Duration,
    /// Longest time between two samples. Default 1 s, 10 ms to 10 s, not below `sample_min`.
    pub sample_max: Duration,
}

impl BudgetConfig {
    /// The reserve for a budget of `total`.
    ///
    /// The setting; else for a machine 8 % of it, at least 128 MiB (an Orin NX with 15 656 MiB uses 1224 MiB when idle
    /// and headless); for a session 32 MiB, twice the greatest use of the supervisor without a model.
    #[must_use]
    pub fn reserve_of(&self, total: Bytes) -> Bytes {
        self.reserve.unwrap_or_else(|| match self.scope {
            Scope::Machine => total
                .per_mille(MACHINE_RESERVE_PER_MILLE)
                .max(MACHINE_RESERVE_MIN),
            Scope::Session => SESSION_RESERVE,
        })
    }
}

/// How memory is taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SheddingConfig {
    /// Headroom that a shed leaves above the upper watermark, so that one action is enough. Default: 5 % of the budget,
    /// at least 256 MiB, at most a quarter of the budget.
    pub reclaim_min: Option<Bytes>,
    /// Time for the effect of a shed to show before the next one. Default 250 ms, 0 s to 60 s.
    pub settle: Duration,
    /// How long a holder has to reach a lower target, by its class. Default 50 ms, 250 ms, 2 s, 2 s; 1 ms to 60 s.
    pub deadlines: ClassDeadlines,
    /// How long the end of a lease may go unmeasured. Default 5 s, 100 ms to 10 min.
    pub verify_timeout: Duration,
}

/// Limits on leases and requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseConfig {
    /// Shortest term. Default 2 s, 100 ms to 1 h.
    pub term_min: Duration,
    /// Longest term. Default 5 min, `term_min` to 24 h.
    pub term_max: Duration,
    /// Longest time that a request may wait. Default 60 s, 0 s to 1 h.
    pub wait_max: Duration,
    /// Requests that may wait at once. Default 64, 1 to 1000.
    pub queue_max: u32,
    /// Leases and waiting requests of one user. Default 64, 1 to 1000.
    pub per_user_max: u32,
}

/// When held KV capacity is populated. It is in the ledger in either case, and no other holder gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvMemory {
    /// As tokens arrive: growing takes microseconds, and programs without a lease may take memory that looks available.
    /// Default.
    AsNeeded,
    /// At once: it counts as used for every program, and growing takes as long as the kernel needs for the pages.
    AtOnce,
}

/// Tokens that the LLM may generate, besides control tokens and single bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VocabularyConfig {
    /// All.
    All,
    /// The first ones, which are the most frequent.
    First(u32),
    /// The tokens that encode nearly all of this text.
    Text(PathBuf),
}

/// The LLM in this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LlmConfig {
    /// The GGUF file. Required, absolute.
    pub path: PathBuf,
    /// Name that clients use. Default: the file's name without its extension.
    pub name: String,
    /// Threads that compute; `None` for one on each physical core. 1 to 256.
    pub threads: Option<u32>,
    /// Answers that are computed together; `None` for as many as the model can. 1 to 8.
    pub parallel: Option<u32>,
    /// Whether tokens are drafted from what prompt and answer repeat. Default true.
    pub drafts: bool,
    /// Whether idle conversations are saved to disk. Default false.
    pub keep_conversations: bool,
    /// Compute device. Default: a GPU that can compute, else the CPU.
    pub device: DeviceSettings,
    /// KV tokens wanted when memory is ample. Default 4096, 64 to 1048576.
    pub context: Tokens,
    /// Tokens that it may generate. Default: all.
    pub vocabulary: VocabularyConfig,
    /// Tokens of an answer whose request names no limit. Default 4096, 1 to 1048576.
    pub answer_tokens_max: Tokens,
    /// How long an answer may take, its prompt included; it is cut then, as by its length. Default 5 min, 1 s to 1 day.
    pub answer_time_max: Duration,
    /// Longest time that one answer is written while equally or more urgent ones wait. Default 60 s, 1 s to 1 day.
    pub answer_time_shared: Duration,
    /// KV tokens below which the engine does not run. Default 512, 64 up to `context`.
    pub kv_floor: Tokens,
    /// When KV capacity that is held becomes memory.
    pub kv_memory: KvMemory,
    /// KV type when memory is ample. Default `f16`.
    pub kv_type: KvType,
    /// The smallest type to which KV is converted when memory is short. Default: as `kv_type`, so that it never is.
    pub kv_type_least: KvType,
    /// Tokens of one prefill chunk. Default 128, 1 to 4096.
    pub prefill_chunk: Tokens,
    /// Largest prefill chunk while parts are streamed. Default 512, or `prefill_chunk` if that is larger; up to 4096.
    pub prefill_chunk_max: Tokens,
    /// Order of shedding.
    pub mode: ResidencyMode,
    /// Layers that stay resident whatever happens. Default 0.
    pub resident_layers_min: Layers,
    /// Workers that are started before it; all others after it.
    pub after: Vec<String>,
    /// How long loading may take before the workers are started without waiting for it. Default 2 min, 1 s to 1 h.
    pub load_timeout: Duration,
    /// How long the engine may take to apply a change before the request is repeated. Default 2 s, 100 ms to 10 min.
    pub apply_timeout: Duration,
    /// When it may be loaded again after a failure.
    pub restart: RestartParams,
}

/// Role of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WorkerRole {
    /// Speech to text.
    Asr,
    /// Managed for its memory only. Default.
    Other,
    /// Text to speech.
    Tts,
}

/// Protocol of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WorkerProtocol {
    /// None that we use. Default for the role `other`.
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
    /// A TCP port on loopback that the supervisor picks before each start; `${PORT}` in argv and env.
    FreePort,
    /// Nowhere.
    Nowhere,
    /// This TCP port on loopback; `${PORT}` in argv and env.
    Port(u16),
    /// This Unix socket, `${SOCKET}` in argv and env. Default for Wyoming: `<runtime_dir>/<name>.sock`, or a free port
    /// for a worker with `user`, which may not create a socket there.
    Socket(PathBuf),
}

/// When a worker counts as ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Its endpoint accepts a connection. Default where there is an endpoint.
    Connect,
    /// It answers Wyoming's `describe`. Default for Wyoming.
    Describe,
    /// `GET` of a path is answered with a status.
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
    /// It has been started. Default where there is no endpoint.
    Started,
}

impl Readiness {
    /// Whether it is lost once the start has passed.
    #[must_use]
    pub const fn is_shown_once(&self) -> bool {
        matches!(self, Self::LogLine(_) | Self::LogPattern(_) | Self::Notify)
    }
}

/// When a worker counts as ready, and how long that may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadyConfig {
    /// Kind of check.
    pub check: Readiness,
    /// How long it may take. Default 60 s, 100 ms to 30 min.
    pub timeout: Duration,
}

/// Memory of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerMemory {
    /// Whether its sizes are to be learned: `peak` is then the reservation for the first start.
    pub auto: bool,
    /// Memory at rest; with variants, that of the first.
    pub steady: Bytes,
    /// The most it holds while it loads or serves a request. Default 1.25 × `steady`, not below it.
    pub peak: Bytes,
    /// Ways to run it, the one to start with first; empty when there is one way only.
    pub variants: Vec<VariantParams>,
    /// Measured memory above which it takes no new requests, finishes current ones, and is restarted; `None` without a
    /// bound. Default: none.
    pub recycle_above: Option<Bytes>,
    /// Whether the same happens when the memory left after its work grows without end and memory is wanted. Default:
    /// yes; not with `recycle_above: none`.
    pub recycle_leaks: bool,
}

/// A child process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerConfig {
    /// Unique; `a-z`, `0-9`, `-`, `_`, starts with a letter, at most 32 characters. Names its lease.
    pub name: String,
    /// Its role.
    pub role: WorkerRole,
    /// Program and arguments; not empty. `${SOCKET}`, `${PORT}`, `${NAME}`, `${VARIANT}` and `${SELF}` (the
    /// supervisor's own program) are replaced at the start.
    pub argv: Vec<String>,
    /// Environment, on top of the supervisor's.
    pub env: BTreeMap<String, String>,
    /// Folder to start in. Default: the supervisor's.
    pub working_dir: Option<PathBuf>,
    /// Its protocol.
    pub protocol: WorkerProtocol,
    /// The model name sent to it, with `openai-http`. Default: its name.
    pub model: String,
    /// Its address.
    pub listen: Listen,
    /// When it counts as ready.
    pub ready: ReadyConfig,
    /// How urgent its work is. Default `audio-realtime` for `asr` and `tts`, else `batch`.
    pub class: Class,
    /// Its memory.
    pub memory: WorkerMemory,
    /// When it may start again.
    pub restart: RestartParams,
    /// Time between SIGTERM and SIGKILL. Default 1 s, 0 s to 10 min.
    pub stop_grace: Duration,
    /// How gladly the kernel's OOM killer takes it. Default 300, −1000 to 1000.
    pub oom_score_adj: i16,
    /// Whether it is started with the supervisor. Default true.
    pub autostart: bool,
    /// Whether it is exempt from being stopped or shrunk for others. Default no.
    pub pinned: bool,
    /// Workers, or `llm`, that must be up, or given up, before it is started.
    pub after: Vec<String>,
    /// Holder of its lease.
    pub lease: LeaseHolder,
    /// Behaviour when idle.
    pub idle: IdleConfig,
    /// How long a request waits for it while it does not run. Default 8 s, 0 s to 10 min.
    pub wake_timeout: Duration,
    /// How long its answer may keep a request waiting, also between two pieces of it. Default 30 s, 100 ms to 10 min.
    pub answer_timeout: Duration,
    /// Limits and sandbox.
    pub confinement: Confinement,
    /// How it is notified that memory is short.
    pub pressure: PressureConfig,
}

/// How a worker is notified that memory is short, by systemd's memory pressure protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PressureConfig {
    /// File behind `$MEMORY_PRESSURE_WATCH`.
    pub watch: PressureWatch,
    /// Size after a notification; below `memory.steady`. `None` if it cannot be relied on.
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
    /// Address; none with `listen: none`. Default `127.0.0.1:8410`; port 0 takes a free one.
    pub listen: Option<SocketAddr>,
    /// Host names, besides this machine's own names and addresses, under which it is served, and whose pages may use
    /// it. Default none.
    pub allowed_hosts: Vec<String>,
    /// File with the clients and their keys; without it every client is served. Default none.
    pub keys_file: Option<PathBuf>,
    /// Endpoints served without a key although clients have keys. Default `health`.
    pub keyless: Vec<Keyless>,
    /// Names of models used by clients, and the model or worker for each. Default none.
    pub models: BTreeMap<String, String>,
    /// Names of voices used by clients, and the worker's voice for each.
    pub voices: BTreeMap<String, String>,
}

/// The Wyoming API: recogniser, voice, assistant and the pipeline through all three, on one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WyomingConfig {
    /// Addresses; default none, since port 10300 is often that of a worker.
    pub listen: Vec<WyomingListen>,
    /// Declared languages of the LLM. Default `en`.
    pub languages: Vec<String>,
    /// System prompt of each conversation. Default nothing.
    pub system: Option<String>,
    /// How long a request waits for a worker or an engine that is being started, before it is refused. Default 5 s,
    /// 0 s to 1 min.
    pub wait_max: Duration,
    /// Longest utterance. Default 60 s, 1 s to 10 min.
    pub audio_max: Duration,
    /// Connections at the same time. Default 32, 1 to 1024.
    pub connections_max: u32,
    /// Conversations that are remembered. Default 32, 0 (none) to 10000.
    pub conversations_max: u32,
    /// Remembered part of each conversation. Default 16 KiB, up to 1 MiB.
    pub history_max: Bytes,
}

impl Config {
    /// The addresses of TCP that are listened on, each with its setting.
    #[must_use]
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

    /// The listeners that other machines reach without a key, each with its setting.
    #[must_use]
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

/// An address of the Wyoming API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WyomingListen {
    /// `tcp://127.0.0.1:10300`; port 0 takes a free one.
    Tcp(SocketAddr),
    /// `unix:///run/cotenant/wyoming.sock`.
    Unix(PathBuf),
}

/// gRPC for tenants and operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrpcConfig {
    /// Socket in the file system; none with `socket: none`. Default `<runtime_dir>/cotenant.sock`.
    pub socket: Option<PathBuf>,
    /// Name of the abstract socket, without its `@`; none with `abstract_name: none`. Default `cotenant`.
    pub abstract_name: Option<String>,
    /// TLS listener for other machines. Default none.
    pub tcp: Option<TcpConfig>,
    /// Roles by user and group. Root and the daemon's own user are always operators.
    pub roles: RolesConfig,
    /// Limits of a peer.
    pub limits: GrpcLimits,
}

/// gRPC by TLS, for clients with a certificate only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpConfig {
    /// Address. Required; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Certificate of the supervisor, PEM. Required.
    pub cert: PathBuf,
    /// Its key, which only its owner may read. Required.
    pub key: PathBuf,
    /// Root of the clients' certificates. Required.
    pub client_ca: PathBuf,
    /// Role of every client with such a certificate: operator, viewer or watchdog. Default viewer.
    pub role: Role,
}

/// Roles over gRPC. A peer with several has the first of operator, watchdog, tenant, viewer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RolesConfig {
    /// Do everything.
    pub operators: Ids,
    /// Read; shed, drain and recycle workers.
    pub watchdogs: Ids,
    /// Read, hold leases, generate.
    pub tenants: Ids,
    /// Read.
    pub viewers: Ids,
    /// All other users: tenant, viewer, or none. Default none: the abstract socket has no file mode, so every local
    /// user reaches it.
    pub others: Option<Role>,
}

/// Limits of a peer of the gRPC server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrpcLimits {
    /// Largest message that is taken. Default 1 MiB, 4 KiB to 64 MiB.
    pub message_max: Bytes,
    /// Calls and streams of one connection at a time. Default 64, 1 to 10000.
    pub calls_per_connection: u32,
    /// Connections. Default 32 by process, 256 by user, 1024 in all, each 1 to 100000; more is of no use where the
    /// process may not open as many files (`LimitNOFILE`).
    pub connections: Bounds,
    /// Open streams. Defaults and ranges as for connections.
    pub streams: Bounds,
    /// How long a client may leave its stream unread before it is cut off. Default 20 s, 1 s to 10 min.
    pub reader_patience: Duration,
}

/// Destination of events and actions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalConfig {
    /// The file. Default `<state_dir>/journal.ndjson`.
    pub path: PathBuf,
    /// Size at which a new file is begun; one old file is kept. Default 64 MiB, 64 KiB to 64 GiB.
    pub max_size: Bytes,
}

/// After which crashes of the supervisor the LLM stays off until an operator loads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SafeProfileConfig {
    /// Default 3, 0 (never) to 100.
    pub crashes: u32,
    /// Default 10 min, 1 s to 24 h.
    pub within: Duration,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere. Default.
    #[default]
    Auto,
    /// One JSON object a line.
    Json,
    /// For people.
    Text,
}

/// Filter and format of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogConfig {
    /// Filter in the syntax of `RUST_LOG`: `info`, `cotenant_policy=debug,info`. Default `info`.
    pub filter: String,
    /// How lines look.
    pub format: LogFormat,
}

/// Destination of request spans, and names of metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TelemetryConfig {
    /// The collector; `None` for none. Default.
    pub otlp: Option<OtlpConfig>,
    /// Certificates of authorities that a collector with TLS is checked with, PEM. Default
    /// `/etc/ssl/certs/ca-certificates.crt`.
    pub otlp_ca: PathBuf,
    /// Whether the LLM's load is also published under the names that vLLM has for it. Default false.
    pub vllm_names: bool,
}

/// A collector of spans.
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

/// Idle headless Orin NX: 1224 of 15 656 MiB (tegrastats).
const MACHINE_RESERVE_PER_MILLE: u32 = 80;

/// A Debian without desktop uses about 100 MiB.
const MACHINE_RESERVE_MIN: Bytes = Bytes::from_mib(128);

/// Twice the 16 MiB that the supervisor promises to need without a model.
const SESSION_RESERVE: Bytes = Bytes::from_mib(32);

/// Holder of a worker's lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaseHolder {
    /// The supervisor, on its behalf. Default.
    #[default]
    Supervisor,
    /// The worker itself, as a tenant under its own name; its peak is booked until its request.
    Own,
}

/// Behaviour of an idle worker. Without either setting it is kept warm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdleConfig {
    /// Idle time after which it switches to its smallest variant. 1 s to 24 h.
    pub shrink_after: Option<Duration>,
    /// After this time it is stopped, and started by the next request. 1 s to 24 h.
    pub stop_after: Option<Duration>,
}

/// Limits and sandbox of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// Limit of its control group, page cache included; it may not swap. `None` sets no limit. 1 MiB or more.
    pub memory: Option<Bytes>,
    /// Resource limits, soft and hard alike; `None` is no limit.
    pub resources: BTreeMap<Resource, Option<u64>>,
    /// Name or number of the user it runs as; the supervisor's when `None`.
    pub user: Option<String>,
    /// Name or number of its group; the user's own when `None`.
    pub group: Option<String>,
    /// The only files it may touch beside those that every program needs; all that its user may when `None`.
    pub files: Option<FileAccess>,
    /// Whether system calls that no speech worker needs are refused.
    pub syscalls: SyscallFilter,
    /// Whether the start fails if one of these cannot be applied.
    pub required: bool,
}

/// Files and folders, each with all below it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileAccess {
    /// May be read and executed.
    pub read: Vec<PathBuf>,
    /// May be read, executed and changed.
    pub write: Vec<PathBuf>,
}

/// Which system calls a worker may make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyscallFilter {
    /// All that its user may.
    #[default]
    All,
    /// All but those that trace others, change mounts, the clock, modules, swap or the kernel itself. The memory of
    /// processes outside is out of reach, and root keeps no capability beyond files, signals and ports.
    Restricted,
}

/// A limit of setrlimit(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resource {
    /// Bytes of address space.
    AddressSpace,
    /// Bytes of a core file.
    Core,
    /// Bytes of the largest file it may write.
    FileSize,
    /// Bytes it may lock.
    LockedMemory,
    /// Open files.
    OpenFiles,
    /// Processes and threads of its user.
    Processes,
}

impl Resource {
    /// As in the configuration.
    #[must_use]
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
