//! Validation of the raw file: parse every value, check every range, report all faults at once.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use super::{
    BudgetConfig, CONVERSATIONS, Config, Fault, HttpConfig, JournalConfig, Keyless, KvMemory,
    LeaseConfig, Listen, LlmConfig, LoadErrorKind, LogConfig, LogFormat, SafeProfileConfig,
    SheddingConfig, VocabularyConfig, Watermarks, WorkerRole, WyomingListen,
    checker::{Checker, DAY, HOUR, MILLI, MILLIS_100, MINUTE, SECOND, SIZE_MAX},
    confinement, grpc,
    raw::{
        self, RawBudget, RawConfig, RawHttp, RawJournal, RawLeases, RawLlm, RawLog, RawShedding,
        Text,
    },
    telemetry, workers, wyoming,
};
use cotenant_policy::{
    compute::{CudaKernels, CudaMemory, DeviceChoice, DeviceSettings},
    kv_type::KvType,
    lease::Class,
    params::{
        ClassDeadlines, EngineParams, LeaseParams, MachineMemory, PressureParams, ResidencyMode,
        Scope, ShedParams,
    },
};
use cotenant_units::{Bytes, Layers, Tokens};

/// Checks every value of a file with the text `text`.
pub(super) fn check(raw: RawConfig, text: &str) -> Result<Config, LoadErrorKind> {
    let mut checker = Checker::default();
    let state_dir = checker
        .directory("state_dir", &raw.state_dir)
        .unwrap_or_else(|| PathBuf::from(STATE_DIR));
    let runtime_dir = checker
        .directory("runtime_dir", &raw.runtime_dir)
        .unwrap_or_else(|| PathBuf::from(RUNTIME_DIR));
    let config = Config {
        budget: checker.budget(&raw.budget),
        shedding: checker.shedding(&raw.shedding),
        leases: checker.leases(&raw.leases),
        llm: raw.llm.as_ref().map(|raw| checker.llm(raw)),
        workers: workers::check(&mut checker, &raw.workers, &runtime_dir),
        http: checker.http(raw.http),
        wyoming: wyoming::check(&mut checker, raw.wyoming),
        grpc: grpc::check(&mut checker, &raw.grpc, &runtime_dir),
        journal: checker.journal(&raw.journal, &state_dir),
        safe_profile: SafeProfileConfig {
            crashes: checker
                .number("safe_profile.crashes", &raw.safe_profile.crashes, 0..=100)
                .unwrap_or(3),
            within: checker
                .duration(
                    "safe_profile.within",
                    &raw.safe_profile.within,
                    SECOND..=DAY,
                )
                .unwrap_or(MINUTE * 10),
        },
        state_dir,
        runtime_dir,
        log: checker.log(&raw.log),
        telemetry: telemetry::check(&mut checker, &raw.telemetry),
    };
    let mut faults = checker.faults;
    if faults.is_empty() {
        faults = collisions(&config);
        faults.extend(unknown_models(&config));
        faults.extend(confinement::order_faults(&config));
        if let Some(total) = config.budget.total {
            faults.extend(
                config
                    .params(&MachineMemory::of(total))
                    .err()
                    .unwrap_or_default(),
            );
        }
    }
    if faults.is_empty() {
        return Ok(config);
    }
    for fault in faults.iter_mut().take(POSITIONS_MAX) {
        fault.position = raw::position(text, &fault.path);
    }
    // Faults without a position last.
    faults.sort_by_key(|fault| (fault.position.is_none(), fault.position));
    Err(LoadErrorKind::Faults(faults))
}

/// Reports names, sockets and ports used twice.
fn collisions(config: &Config) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut taken: BTreeMap<String, String> = BTreeMap::new();
    let mut claim = |what: String, path: String| {
        if let Some(first) = taken.get(&what) {
            faults.push(Fault::new(
                path,
                format!("{what} is already used by {first}"),
                Some("give each its own".to_owned()),
            ));
        } else {
            taken.insert(what, path);
        }
    };
    let socket = |socket: &Path| format!("socket `{}`", socket.display());
    let port = |address: &SocketAddr| format!("port `{}`", address.port());
    let fixed = |address: &&SocketAddr| address.port() != 0;
    if let Some(path) = &config.grpc.socket {
        claim(socket(path), "grpc.socket".to_owned());
    }
    if let Some(address) = config.http.listen.as_ref().filter(fixed) {
        claim(port(address), "http.listen".to_owned());
    }
    let tcp = config.grpc.tcp.as_ref().map(|tcp| &tcp.listen);
    if let Some(address) = tcp.filter(fixed) {
        claim(port(address), "grpc.tcp.listen".to_owned());
    }
    for (index, listen) in config.wyoming.listen.iter().enumerate() {
        let path = format!("wyoming.listen[{index}]");
        match listen {
            WyomingListen::Tcp(address) if address.port() == 0 => {}
            WyomingListen::Tcp(address) => claim(port(address), path),
            WyomingListen::Unix(own) => claim(socket(own), path),
        }
    }
    if let Some(llm) = &config.llm {
        claim(format!("name `{}`", llm.name), "llm.name".to_owned());
    }
    for (index, worker) in config.workers.iter().enumerate() {
        let at = |key: &str| format!("workers[{index}].{key}");
        claim(format!("name `{}`", worker.name), at("name"));
        match &worker.listen {
            Listen::Socket(own) => claim(socket(own), at("socket")),
            Listen::Port(port) => claim(format!("port `{port}`"), at("port")),
            Listen::FreePort | Listen::Nowhere => {}
        }
    }
    faults
}

/// Reports aliases of unknown models, and aliases that are themselves models.
fn unknown_models(config: &Config) -> Vec<Fault> {
    let llm = config.llm.iter().map(|llm| llm.name.as_str());
    let workers = config
        .workers
        .iter()
        .filter(|worker| worker.role != WorkerRole::Other);
    let known: Vec<&str> = llm
        .chain(workers.map(|worker| worker.name.as_str()))
        .collect();
    let faults = config.http.models.iter().filter_map(|(alias, model)| {
        let problem = if alias.is_empty() || known.contains(&alias.as_str()) {
            "has an alias that is empty or the name of a model"
        } else if !known.contains(&model.as_str()) {
            "refers to a model that is not configured"
        } else {
            return None;
        };
        Some(Fault::new(
            "http.models".to_owned(),
            format!(
                "`{}: {}` {problem}",
                alias.escape_debug(),
                model.escape_debug()
            ),
            Some(format!(
                "write `alias: model`, with one of {}",
                known.join(", ")
            )),
        ))
    });
    faults.collect()
}

impl Checker {
    fn budget(&mut self, raw: &RawBudget) -> BudgetConfig {
        let defaults = PressureParams::scaled_to(Bytes::ZERO);
        let config = BudgetConfig {
            total: self.size("budget.total", &raw.total, Bytes::from_mib(1)..=SIZE_MAX),
            reserve: self.size("budget.reserve", &raw.reserve, Bytes::ZERO..=SIZE_MAX),
            scope: self
                .one_of(
                    "budget.scope",
                    &raw.scope,
                    &[("machine", Scope::Machine), ("session", Scope::Session)],
                )
                .unwrap_or_default(),
            watermarks: Watermarks {
                elevated: self.watermark("budget.watermarks.elevated", &raw.watermarks.elevated),
                critical: self.watermark("budget.watermarks.critical", &raw.watermarks.critical),
                last_resort: self
                    .watermark("budget.watermarks.last_resort", &raw.watermarks.last_resort),
            },
            hysteresis: self.watermark("budget.hysteresis", &raw.hysteresis),
            dwell: self.duration("budget.dwell", &raw.dwell, Duration::ZERO..=HOUR),
            grace: self
                .duration("budget.grace", &raw.grace, Duration::ZERO..=MINUTE)
                .unwrap_or(defaults.grace),
            fill_rate_mib_per_s: self
                .size(
                    "budget.fill_rate_max",
                    &raw.fill_rate_max,
                    Bytes::from_mib(1)..=Bytes::from_gib(1024),
                )
                .and_then(|rate| u32::try_from(rate.whole_mib()).ok())
                .unwrap_or(defaults.fill_rate_mib_per_s),
            sample_min: self
                .duration("budget.sample_min", &raw.sample_min, MILLI..=SECOND)
                .unwrap_or(defaults.sample_min),
            sample_max: self
                .duration(
                    "budget.sample_max",
                    &raw.sample_max,
                    MILLI * 10..=SECOND * 10,
                )
                .unwrap_or(defaults.sample_max),
        };
        self.ordered(
            "budget.sample_max",
            ("sample_max", config.sample_max),
            ("sample_min", config.sample_min),
        );
        config
    }

    fn shedding(&mut self, raw: &RawShedding) -> SheddingConfig {
        let defaults = ShedParams::scaled_to(Bytes::ZERO);
        let mut deadline = |class: Class, text: &Text| {
            self.duration(&format!("shedding.deadlines.{class}"), text, MILLI..=MINUTE)
                .unwrap_or(defaults.deadlines.of(class))
        };
        let deadlines = ClassDeadlines {
            audio_realtime: deadline(Class::AudioRealtime, &raw.deadlines.audio_realtime),
            interactive: deadline(Class::Interactive, &raw.deadlines.interactive),
            llm_elastic: deadline(Class::LlmElastic, &raw.deadlines.llm_elastic),
            batch: deadline(Class::Batch, &raw.deadlines.batch),
        };
        SheddingConfig {
            reclaim_min: self.size(
                "shedding.reclaim_min",
                &raw.reclaim_min,
                Bytes::ZERO..=SIZE_MAX,
            ),
            settle: self
                .duration("shedding.settle", &raw.settle, Duration::ZERO..=MINUTE)
                .unwrap_or(defaults.settle),
            deadlines,
            verify_timeout: self
                .duration(
                    "shedding.verify_timeout",
                    &raw.verify_timeout,
                    MILLIS_100..=MINUTE * 10,
                )
                .unwrap_or(defaults.verify_timeout),
        }
    }

    fn leases(&mut self, raw: &RawLeases) -> LeaseConfig {
        let defaults = LeaseParams::default();
        let config = LeaseConfig {
            term_min: self
                .duration("leases.term_min", &raw.term_min, MILLIS_100..=HOUR)
                .unwrap_or(defaults.term_min),
            term_max: self
                .duration("leases.term_max", &raw.term_max, MILLIS_100..=DAY)
                .unwrap_or(defaults.term_max),
            wait_max: self
                .duration("leases.wait_max", &raw.wait_max, Duration::ZERO..=HOUR)
                .unwrap_or(defaults.wait_max),
            queue_max: self
                .number("leases.queue_max", &raw.queue_max, 1..=1000)
                .unwrap_or(defaults.queue_max),
            per_user_max: self
                .number("leases.per_user_max", &raw.per_user_max, 1..=1000)
                .unwrap_or(defaults.leases_per_uid),
        };
        self.ordered(
            "leases.term_max",
            ("term_max", config.term_max),
            ("term_min", config.term_min),
        );
        config
    }

    fn device(&mut self, raw: &RawLlm) -> DeviceSettings {
        let choices = [
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("cuda", DeviceChoice::Cuda),
        ];
        let memories = [
            ("auto", CudaMemory::Auto),
            ("mapped", CudaMemory::Mapped),
            ("device", CudaMemory::Device),
        ];
        let kernels = [("auto", CudaKernels::Auto), ("plain", CudaKernels::Plain)];
        DeviceSettings {
            choice: self
                .one_of("llm.device", &raw.device, &choices)
                .unwrap_or_default(),
            memory: self
                .one_of("llm.cuda.memory", &raw.cuda.memory, &memories)
                .unwrap_or_default(),
            kernels: self
                .one_of("llm.cuda.kernels", &raw.cuda.kernels, &kernels)
                .unwrap_or_default(),
        }
    }

    fn llm(&mut self, raw: &RawLlm) -> LlmConfig {
        self.require(
            "llm.path",
            &raw.path,
            "write `llm.path: /path/to/model.gguf`, or remove `llm`",
        );
        let path = self.directory("llm.path", &raw.path);
        let name = match &raw.name.0 {
            Some(name)
                if name.trim().is_empty()
                    || name.len() > 128
                    || name.chars().any(char::is_control) =>
            {
                self.fault("llm.name", "is not 1 to 128 printable characters", None);
                None
            }
            Some(name) => Some(name.clone()),
            None => path
                .as_deref()
                .and_then(Path::file_stem)
                .map(|stem| stem.to_string_lossy().into_owned()),
        };
        let defaults = EngineParams::default();
        let context = self
            .number("llm.context", &raw.context, 64..=1 << 20)
            .unwrap_or(defaults.kv_wanted.get());
        let kv_floor = self.number("llm.kv_floor", &raw.kv_floor, 64..=1 << 20);
        if let Some(floor) = kv_floor.filter(|floor| *floor > context) {
            self.fault(
                "llm.kv_floor",
                format!("`{floor}` exceeds `llm.context`, {context}"),
                Some("lower `llm.kv_floor` or raise `llm.context`"),
            );
        }
        let kinds = KvType::ALL.map(|kind| (kind.word(), kind));
        let kv_type = self
            .one_of("llm.kv_type", &raw.kv_type, &kinds)
            .unwrap_or(defaults.kv_type);
        let kv_type_least = self.one_of("llm.kv_type_least", &raw.kv_type_least, &kinds);
        if let Some(least) = kv_type_least.filter(|least| *least > kv_type) {
            self.fault(
                "llm.kv_type_least",
                format!("`{least}` is larger than `llm.kv_type`, {kv_type}"),
                Some("omit `llm.kv_type_least`, or set it to `q8` or `q4`"),
            );
        }
        let prefill_chunk = Tokens::new(
            self.number("llm.prefill_chunk", &raw.prefill_chunk, 1..=CHUNK_MAX)
                .unwrap_or(defaults.prefill_chunk.get()),
        );
        LlmConfig {
            path: path.unwrap_or_default(),
            name: name.unwrap_or_default(),
            threads: self.number("llm.threads", &raw.threads, 1..=256),
            parallel: match raw.parallel.0.as_deref() {
                Some("auto") => None,
                _ => self.number("llm.parallel", &raw.parallel, 1..=8),
            },
            drafts: self.switch("llm.drafts", &raw.drafts).unwrap_or(true),
            conversations: self
                .number("llm.conversations", &raw.conversations, 0..=64)
                .unwrap_or(CONVERSATIONS),
            keep_conversations: self
                .switch("llm.keep_conversations", &raw.keep_conversations)
                .unwrap_or(false),
            device: self.device(raw),
            context: Tokens::new(context),
            vocabulary: self.vocabulary(&raw.vocabulary),
            answer_tokens_max: Tokens::new(
                self.number("llm.answer_tokens_max", &raw.answer_tokens_max, 1..=1 << 20)
                    .unwrap_or(ANSWER_TOKENS_MAX),
            ),
            answer_time_max: self
                .duration("llm.answer_time_max", &raw.answer_time_max, SECOND..=DAY)
                .unwrap_or(ANSWER_TIME_MAX),
            answer_time_shared: self
                .duration(
                    "llm.answer_time_shared",
                    &raw.answer_time_shared,
                    SECOND..=DAY,
                )
                .unwrap_or(ANSWER_TIME_SHARED),
            kv_floor: Tokens::new(kv_floor.unwrap_or_else(|| context.min(defaults.kv_floor.get()))),
            kv_memory: self
                .one_of(
                    "llm.kv_memory",
                    &raw.kv_memory,
                    &[
                        ("as-needed", KvMemory::AsNeeded),
                        ("at-once", KvMemory::AtOnce),
                    ],
                )
                .unwrap_or(KvMemory::AsNeeded),
            kv_type,
            kv_type_least: kv_type_least.unwrap_or(kv_type).min(kv_type),
            prefill_chunk,
            prefill_chunk_max: Tokens::new(
                self.number(
                    "llm.prefill_chunk_max",
                    &raw.prefill_chunk_max,
                    prefill_chunk.get()..=CHUNK_MAX,
                )
                .unwrap_or_else(|| defaults.prefill_chunk_max.get().max(prefill_chunk.get())),
            ),
            mode: self
                .one_of(
                    "llm.mode",
                    &raw.mode,
                    &[
                        ("balanced", ResidencyMode::Balanced),
                        ("max-context", ResidencyMode::MaxContext),
                        ("max-speed", ResidencyMode::MaxSpeed),
                    ],
                )
                .unwrap_or(defaults.mode),
            resident_layers_min: Layers::new(
                self.number(
                    "llm.resident_layers_min",
                    &raw.resident_layers_min,
                    0..=1024,
                )
                .unwrap_or(defaults.resident_min),
            ),
            after: raw.after.clone(),
            load_timeout: self
                .duration("llm.load_timeout", &raw.load_timeout, SECOND..=HOUR)
                .unwrap_or(defaults.load_timeout),
            apply_timeout: self
                .duration(
                    "llm.apply_timeout",
                    &raw.apply_timeout,
                    MILLIS_100..=MINUTE * 10,
                )
                .unwrap_or(defaults.apply_timeout),
            restart: workers::restart(self, &raw.restart, "llm.restart"),
        }
    }

    /// Reads the vocabulary: a number of tokens, or the path of a text.
    fn vocabulary(&mut self, raw: &Text) -> VocabularyConfig {
        const PATH: &str = "llm.vocabulary";
        match raw.0.as_deref() {
            None | Some("all") => VocabularyConfig::All,
            Some(text) if text.starts_with('/') => self
                .directory(PATH, raw)
                .map_or(VocabularyConfig::All, VocabularyConfig::Text),
            Some(_) => self
                .number(PATH, raw, 256..=1 << 24)
                .map_or(VocabularyConfig::All, VocabularyConfig::First),
        }
    }

    fn http(&mut self, raw: RawHttp) -> HttpConfig {
        let given = raw.listen.0.is_some();
        let listen = match self.given("http.listen", &raw.listen) {
            None if given => None,
            None => Some(SocketAddr::from(([127, 0, 0, 1], HTTP_PORT))),
            Some("none") => None,
            Some(written) => {
                let parsed = written.parse().ok();
                if parsed.is_none() {
                    self.fault(
                        "http.listen",
                        format!("`{}` is not an address and port", written.escape_debug()),
                        Some("write an address with its port, for example `127.0.0.1:8410` or `[::1]:8410`, or `none`"),
                    );
                }
                parsed
            }
        };
        for (alias, voice) in &raw.voices.0 {
            if alias.is_empty() || voice.is_empty() {
                self.fault(
                    "http.voices",
                    format!("`{alias}: {voice}` has an empty side"),
                    None,
                );
            }
        }
        for host in &raw.allowed_hosts {
            let is_name = |c: char| {
                c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_' | ':' | '[' | ']')
            };
            let is_address = host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
            if host.is_empty() || !host.chars().all(is_name) || (host.contains(':') && !is_address)
            {
                self.fault(
                    "http.allowed_hosts",
                    format!("`{}` is not a host name", host.escape_debug()),
                    Some("write names without scheme and port, for example `box.lan`"),
                );
            }
        }
        let mut trusted_proxies = Vec::new();
        for address in &raw.trusted_proxies {
            match address.parse::<IpAddr>() {
                Ok(address) => trusted_proxies.push(address.to_canonical()),
                Err(_) => self.fault(
                    "http.trusted_proxies",
                    format!("`{}` is not an IP address", address.escape_debug()),
                    Some("write addresses without port and prefix, for example `172.30.32.2`"),
                ),
            }
        }
        let keys_file = match raw.keys_file.0.as_deref() {
            None | Some("none") => None,
            Some(_) => self.directory("http.keys_file", &raw.keys_file),
        };
        let words = [("health", Keyless::Health), ("metrics", Keyless::Metrics)];
        let keyless = raw.keyless.iter().flatten().enumerate();
        let mut keyless: Vec<Keyless> = keyless
            .filter_map(|(index, text)| {
                self.one_of(&format!("http.keyless[{index}]"), text, &words)
            })
            .collect();
        if raw.keyless.is_none() {
            keyless.push(Keyless::Health);
        }
        HttpConfig {
            listen,
            allowed_hosts: raw.allowed_hosts,
            trusted_proxies,
            keys_file,
            keyless,
            models: raw.models.0,
            voices: raw.voices.0,
        }
    }

    fn journal(&mut self, raw: &RawJournal, state_dir: &Path) -> Option<JournalConfig> {
        let path = match raw.path.0.as_deref() {
            Some("none") => None,
            Some(_) => self.directory("journal.path", &raw.path),
            None => Some(state_dir.join("journal.ndjson")),
        };
        let max_size = self
            .size(
                "journal.max_size",
                &raw.max_size,
                Bytes::from_kib(64)..=Bytes::from_gib(64),
            )
            .unwrap_or(Bytes::from_mib(64));
        path.map(|path| JournalConfig { path, max_size })
    }

    fn log(&mut self, raw: &RawLog) -> LogConfig {
        let filter = raw.filter.0.clone().unwrap_or_else(|| "info".to_owned());
        if let Err(error) = tracing_subscriber::EnvFilter::try_new(&filter) {
            self.fault(
                "log.filter",
                format!("`{}` is not a filter: {error}", filter.escape_debug()),
                Some("write a level, or levels by module: `info`, `cotenant_policy=debug,info`"),
            );
        }
        LogConfig {
            filter,
            format: self
                .one_of(
                    "log.format",
                    &raw.format,
                    &[
                        ("auto", LogFormat::Auto),
                        ("json", LogFormat::Json),
                        ("text", LogFormat::Text),
                    ],
                )
                .unwrap_or_default(),
        }
    }
}

/// Our choice: longer than any spoken answer, and than most written ones.
const ANSWER_TOKENS_MAX: u32 = 4096;
/// Our choice: longer than clients wait for one another.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(300);
/// Our choice: longer than a spoken answer, shorter than most clients' timeout for the first token.
const ANSWER_TIME_SHARED: Duration = Duration::from_secs(60);
/// Largest prefill chunk of the engine.
const CHUNK_MAX: u32 = 4096;
/// Each position requires parsing the file again; further faults are reported without one.
const POSITIONS_MAX: usize = 100;
const HTTP_PORT: u16 = 8410;
const STATE_DIR: &str = "/var/lib/cotenant";
const RUNTIME_DIR: &str = "/run/cotenant";
