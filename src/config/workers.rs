//! Settings of workers: defaults by role and protocol, and consistency.

use std::{collections::BTreeSet, ops::RangeInclusive, path::Path, time::Duration};

use super::{
    Listen, PressureConfig, PressureWatch, Readiness, ReadyConfig, WorkerConfig, WorkerMemory,
    WorkerProtocol, WorkerRole,
    checker::{Checker, DAY, HOUR, MILLI, MILLIS_100, SECOND, SIZE_MAX, placeholders},
    confinement,
    raw::{self, RawMemory, RawPressure, RawReady, RawRestart, RawWorker, Text},
};
use cotenant_policy::{
    lease::Class,
    params::{RestartParams, VariantParams},
};
use cotenant_units::Bytes;

pub(super) fn check(
    checker: &mut Checker,
    raw: &[RawWorker],
    runtime_dir: &Path,
) -> Vec<WorkerConfig> {
    if raw.len() > WORKERS_MAX {
        let message = format!(
            "has {} workers, at most {WORKERS_MAX} are managed",
            raw.len()
        );
        checker.fault("workers", message, None);
    }
    raw.iter()
        .take(WORKERS_MAX)
        .enumerate()
        .map(|(index, raw)| worker(checker, raw, &format!("workers[{index}]"), runtime_dir))
        .collect()
}

fn worker(checker: &mut Checker, raw: &RawWorker, at: &str, runtime_dir: &Path) -> WorkerConfig {
    let key = |name: &str| format!("{at}.{name}");
    checker.require(&key("name"), &raw.name, "write `name: asr`");
    let name = checker.name(&key("name"), &raw.name).unwrap_or_default();
    if RESERVED.contains(&name.as_str()) {
        checker.fault(
            &key("name"),
            format!("`{name}` is reserved by the supervisor"),
            Some("choose another name"),
        );
    }
    let role = checker
        .one_of(
            &key("role"),
            &raw.role,
            &[
                ("asr", WorkerRole::Asr),
                ("embedding", WorkerRole::Embedding),
                ("other", WorkerRole::Other),
                ("tts", WorkerRole::Tts),
            ],
        )
        .unwrap_or(WorkerRole::Other);
    let protocol = checker
        .one_of(
            &key("protocol"),
            &raw.protocol,
            &[
                ("none", WorkerProtocol::None),
                ("openai", WorkerProtocol::OpenaiHttp),
                ("openai-http", WorkerProtocol::OpenaiHttp),
                ("piper-http", WorkerProtocol::PiperHttp),
                ("whisper-server", WorkerProtocol::WhisperServer),
                ("wyoming", WorkerProtocol::Wyoming),
            ],
        )
        .unwrap_or(match role {
            WorkerRole::Asr | WorkerRole::Tts => WorkerProtocol::Wyoming,
            WorkerRole::Embedding => WorkerProtocol::OpenaiHttp,
            WorkerRole::Other => WorkerProtocol::None,
        });
    if role == WorkerRole::Embedding && protocol != WorkerProtocol::OpenaiHttp {
        checker.fault(
            &key("protocol"),
            "a worker for embeddings is reached by `openai-http` only",
            Some("write `protocol: openai-http`, or `role: other`"),
        );
    } else if role != WorkerRole::Other && protocol == WorkerProtocol::None {
        checker.fault(
            &key("protocol"),
            "a worker for speech cannot be reached with `none`",
            Some("write `protocol: wyoming`, `protocol: openai-http`, or `role: other`"),
        );
    }
    let fitting = match protocol {
        WorkerProtocol::PiperHttp => WorkerRole::Tts,
        WorkerProtocol::WhisperServer => WorkerRole::Asr,
        _ => role,
    };
    if matches!(role, WorkerRole::Asr | WorkerRole::Tts) && role != fitting {
        let (message, hint) = match fitting {
            WorkerRole::Tts => (
                "`piper-http` is a protocol for TTS only",
                "write `role: tts`, or another protocol",
            ),
            _ => (
                "`whisper-server` is a protocol for ASR only",
                "write `role: asr`, or another protocol",
            ),
        };
        checker.fault(&key("protocol"), message, Some(hint));
    }
    let memory = memory(checker, &raw.memory.0, &key("memory"));
    let endpoint = endpoint(checker, raw, at, protocol, &name, runtime_dir);
    command(checker, raw, at, &endpoint);
    WorkerConfig {
        role,
        argv: raw.argv.clone(),
        env: raw.env.0.clone(),
        working_dir: checker.directory(&key("working_dir"), &raw.working_dir),
        ready: ready(checker, &raw.ready, &key("ready"), protocol, &endpoint),
        protocol,
        model: model(checker, raw, at, protocol).unwrap_or_else(|| name.clone()),
        listen: endpoint,
        class: checker
            .class(&key("class"), &raw.class)
            .unwrap_or(match role {
                WorkerRole::Asr | WorkerRole::Tts => Class::AudioRealtime,
                WorkerRole::Embedding => Class::Interactive,
                WorkerRole::Other => Class::Batch,
            }),
        pressure: pressure(checker, &raw.pressure, &key("pressure"), &memory),
        restart: restart(checker, &raw.restart, &key("restart")),
        stop_grace: checker
            .duration(
                &key("stop_grace"),
                &raw.stop_grace,
                Duration::ZERO..=Duration::from_secs(600),
            )
            .unwrap_or(SECOND),
        oom_score_adj: checker
            .number(&key("oom_score_adj"), &raw.oom_score_adj, -1000..=1000)
            .unwrap_or(300),
        autostart: checker
            .switch(&key("autostart"), &raw.autostart)
            .unwrap_or(true),
        pinned: checker.switch(&key("pinned"), &raw.pinned).unwrap_or(false),
        after: raw.after.clone(),
        lease: confinement::lease(checker, raw, at),
        idle: confinement::idle(checker, &raw.idle, &key("idle"), memory.variants.len() > 1),
        wake_timeout: confinement::wake_timeout(checker, raw, at),
        answer_timeout: checker
            .duration(
                &key("answer_timeout"),
                &raw.answer_timeout,
                Duration::from_millis(100)..=Duration::from_secs(600),
            )
            .unwrap_or(ANSWER_TIMEOUT),
        confinement: confinement::confinement(checker, raw, at),
        memory,
        name,
    }
}

/// The model name sent to an OpenAI-compatible server.
fn model(
    checker: &mut Checker,
    raw: &RawWorker,
    at: &str,
    protocol: WorkerProtocol,
) -> Option<String> {
    let key = format!("{at}.model");
    if raw.model.0.is_some() && protocol != WorkerProtocol::OpenaiHttp {
        checker.fault(
            &key,
            "only `openai-http` requests name a model",
            Some("remove it, or write `protocol: openai-http`"),
        );
    }
    checker.word(&key, &raw.model)
}

impl WorkerProtocol {
    /// Returns whether it uses HTTP.
    pub const fn is_http(self) -> bool {
        matches!(
            self,
            Self::OpenaiHttp | Self::PiperHttp | Self::WhisperServer
        )
    }
}

fn endpoint(
    checker: &mut Checker,
    raw: &RawWorker,
    at: &str,
    protocol: WorkerProtocol,
    name: &str,
    runtime_dir: &Path,
) -> Listen {
    let (socket_key, port_key) = (format!("{at}.socket"), format!("{at}.port"));
    if raw.socket.0.is_some() && raw.port.0.is_some() {
        checker.fault(
            &port_key,
            "both `socket` and `port` are set",
            Some("remove one: a worker listens on one address"),
        );
        return Listen::Nowhere;
    }
    if raw.socket.0.is_some() {
        if protocol.is_http() {
            checker.fault(
                &socket_key,
                "an HTTP worker needs a port",
                Some("write `port: auto`"),
            );
        }
        return checker
            .socket(&socket_key, &raw.socket)
            .map_or(Listen::Nowhere, Listen::Socket);
    }
    match (raw.port.0.as_deref(), protocol) {
        (Some("auto"), _) => Listen::FreePort,
        (None, protocol) if protocol.is_http() => Listen::FreePort,
        (Some(_), _) => checker
            .number(&port_key, &raw.port, 1..=u16::MAX)
            .map_or(Listen::Nowhere, Listen::Port),
        // A worker of another user may not create a socket in the daemon's folder.
        (None, WorkerProtocol::Wyoming) if raw.user.0.is_some() => Listen::FreePort,
        (None, WorkerProtocol::Wyoming) => {
            let socket = runtime_dir.join(format!("{name}.sock"));
            checker.socket_fits(&format!("{at}.name"), &socket);
            Listen::Socket(socket)
        }
        (None, _) => Listen::Nowhere,
    }
}

/// Reads program, arguments and environment, with their placeholders.
fn command(checker: &mut Checker, raw: &RawWorker, at: &str, endpoint: &Listen) {
    let key = format!("{at}.argv");
    match raw.argv.first() {
        None => {
            checker.fault(
                &key,
                "is missing or empty",
                Some("write program and arguments: `[piper, --uri, …]`"),
            );
        }
        Some(program) if program.trim().is_empty() => {
            checker.fault(&format!("{key}[0]"), "the program is empty", None);
        }
        Some(_) => {}
    }
    let mut mentioned = BTreeSet::new();
    let arguments = raw
        .argv
        .iter()
        .enumerate()
        .map(|(i, text)| (format!("{key}[{i}]"), text, false));
    let variables = raw
        .env
        .0
        .iter()
        .map(|(name, text)| (format!("{at}.env.{name}"), text, true));
    for (path, text, in_env) in arguments.chain(variables) {
        if text.contains('\0') {
            checker.fault(&path, "contains a NUL character", None);
        }
        for placeholder in placeholders(text) {
            let of_ours = placeholder
                .strip_prefix("ENV:")
                .is_some_and(|name| in_env && !name.is_empty());
            if !of_ours && !PLACEHOLDERS.contains(&placeholder) {
                let hint = match raw::nearest(placeholder, &PLACEHOLDERS) {
                    Some(near) => format!("did you mean `${{{near}}}`?"),
                    None => {
                        "known are `${NAME}`, `${PORT}`, `${SELF}`, `${SOCKET}` and `${VARIANT}`"
                            .to_owned()
                    }
                };
                checker.fault(
                    &path,
                    format!("`${{{placeholder}}}` is not a placeholder"),
                    Some(&hint),
                );
            }
            mentioned.insert(placeholder);
        }
    }
    for name in raw.env.0.keys() {
        if name.is_empty() || name.contains(['=', '\0']) {
            checker.fault(
                &format!("{at}.env"),
                format!("`{}` is not a variable", name.escape_debug()),
                None,
            );
        }
    }
    let has_port = matches!(endpoint, Listen::FreePort | Listen::Port(_));
    if *endpoint == Listen::FreePort && !mentioned.contains("PORT") && !raw.argv.is_empty() {
        checker.fault(
            &key,
            "the worker does not receive its port",
            Some("pass `${PORT}` in `argv` or `env`, or write the number as `port`"),
        );
    }
    if mentioned.contains("PORT") && !has_port {
        checker.fault(
            &key,
            "`${PORT}` is used, but the worker has no port",
            Some("write `port: auto`"),
        );
    }
    if mentioned.contains("SOCKET") && !matches!(endpoint, Listen::Socket(_)) {
        checker.fault(
            &key,
            "`${SOCKET}` is used, but the worker has no socket",
            Some(if raw.user.0.is_some() {
                "pass `tcp://127.0.0.1:${PORT}`, or write `socket` with a folder in which its `user` may create one"
            } else {
                "write `socket` or `protocol: wyoming`"
            }),
        );
    }
    if mentioned.contains("VARIANT") && raw.memory.0.variants.is_empty() {
        checker.fault(
            &key,
            "`${VARIANT}` is used, but the worker has no variants",
            Some("write `memory.variants`"),
        );
    }
}

fn ready(
    checker: &mut Checker,
    raw: &RawReady,
    at: &str,
    protocol: WorkerProtocol,
    endpoint: &Listen,
) -> ReadyConfig {
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Kind {
        Connect,
        Describe,
        Http,
        Log,
        Notify,
        Started,
    }
    let default = match (protocol, endpoint) {
        (WorkerProtocol::Wyoming, _) => Kind::Describe,
        (_, Listen::Nowhere) => Kind::Started,
        _ => Kind::Connect,
    };
    let kind_key = format!("{at}.kind");
    let kind = checker
        .one_of(
            &kind_key,
            &raw.kind,
            &[
                ("connect", Kind::Connect),
                ("describe", Kind::Describe),
                ("http", Kind::Http),
                ("log", Kind::Log),
                ("notify", Kind::Notify),
                ("started", Kind::Started),
            ],
        )
        .unwrap_or(default);
    if kind == Kind::Describe && protocol != WorkerProtocol::Wyoming {
        checker.fault(
            &kind_key,
            "only Wyoming workers support `describe`",
            Some("write `protocol: wyoming`"),
        );
    }
    if kind == Kind::Http && !matches!(endpoint, Listen::FreePort | Listen::Port(_)) {
        checker.fault(&kind_key, "`http` needs a port", Some("write `port: auto`"));
    }
    if kind == Kind::Connect && *endpoint == Listen::Nowhere {
        checker.fault(
            &kind_key,
            "`connect` needs a socket or a port",
            Some("write `socket` or `port`"),
        );
    }
    for (name, text) in [("path", &raw.path), ("status", &raw.status)] {
        if text.0.is_some() && kind != Kind::Http {
            checker.fault(
                &format!("{at}.{name}"),
                "belongs to `kind: http`",
                Some("remove it, or write `kind: http`"),
            );
        }
    }
    for (name, text) in [("text", &raw.text), ("pattern", &raw.pattern)] {
        if text.0.is_some() && kind != Kind::Log {
            checker.fault(
                &format!("{at}.{name}"),
                "belongs to `kind: log`",
                Some("remove it, or write `kind: log`"),
            );
        }
    }
    let check = match kind {
        Kind::Connect => Readiness::Connect,
        Kind::Describe => Readiness::Describe,
        Kind::Http => {
            let path = raw.path.0.clone().unwrap_or_else(|| "/health".to_owned());
            if !path.starts_with('/') || path.chars().any(|c| c.is_control() || c == ' ') {
                checker.fault(
                    &format!("{at}.path"),
                    format!("`{}` is not the path of a URL", path.escape_debug()),
                    Some("write it from `/`, for example `/health`"),
                );
            }
            let status = checker.number(&format!("{at}.status"), &raw.status, 100..=599);
            Readiness::Http {
                path,
                status: status.unwrap_or(200),
            }
        }
        Kind::Log if raw.pattern.0.is_some() => {
            let key = format!("{at}.pattern");
            let pattern = raw.pattern.0.clone().unwrap_or_default();
            if let Err(error) = regex::RegexBuilder::new(&pattern)
                .size_limit(PATTERN_BYTES_MAX)
                .build()
            {
                let error = error.to_string();
                let reason = error
                    .lines()
                    .last()
                    .unwrap_or_default()
                    .trim_start_matches("error: ");
                checker.fault(
                    &key,
                    format!(
                        "`{}` is not a regular expression: {reason}",
                        pattern.escape_debug()
                    ),
                    Some("quote it with `'`, or write `text` for plain text"),
                );
            }
            if raw.text.0.is_some() {
                checker.fault(
                    &key,
                    "both `text` and `pattern` are set",
                    Some("keep one of the two"),
                );
            }
            Readiness::LogPattern(pattern)
        }
        Kind::Log => {
            let text = raw.text.0.clone().unwrap_or_default();
            if text.trim().is_empty() {
                checker.fault(
                    &format!("{at}.text"),
                    "is required for `kind: log`",
                    Some("write a part of the line, for example `text: Ready`"),
                );
            }
            Readiness::LogLine(text)
        }
        Kind::Notify => Readiness::Notify,
        Kind::Started => Readiness::Started,
    };
    ReadyConfig {
        check,
        timeout: checker
            .duration(
                &format!("{at}.timeout"),
                &raw.timeout,
                MILLIS_100..=Duration::from_secs(1800),
            )
            .unwrap_or(Duration::from_secs(60)),
    }
}

fn memory(checker: &mut Checker, raw: &RawMemory, at: &str) -> WorkerMemory {
    let (steady_key, peak_key) = (format!("{at}.steady"), format!("{at}.peak"));
    let mut variants: Vec<VariantParams> = Vec::new();
    for (index, variant) in raw.variants.iter().enumerate() {
        let at = format!("{at}.variants[{index}]");
        let (name_key, bytes_key) = (format!("{at}.name"), format!("{at}.bytes"));
        checker.require(
            &name_key,
            &variant.name,
            "write `{name: small, bytes: 60MiB}`",
        );
        checker.require(
            &bytes_key,
            &variant.bytes,
            "write `{name: small, bytes: 60MiB}`",
        );
        let name = checker.name(&name_key, &variant.name).unwrap_or_default();
        let bytes = checker.size(&bytes_key, &variant.bytes, WORKER_SIZES);
        let peak = peak(checker, &format!("{at}.peak"), &variant.peak, bytes);
        if !name.is_empty() && variants.iter().any(|other| other.name == name) {
            checker.fault(
                &name_key,
                format!("`{name}` is listed twice"),
                Some("give each variant its own name"),
            );
        }
        variants.push(VariantParams {
            name,
            steady: bytes.unwrap_or_default(),
            peak,
        });
    }
    if let Some(first) = variants.first() {
        for (key, text) in [(&steady_key, &raw.steady), (&peak_key, &raw.peak)] {
            if text.0.is_some() {
                checker.fault(
                    key,
                    "the variants have their own sizes",
                    Some("keep one of the two"),
                );
            }
        }
        let largest = variants
            .iter()
            .map(|variant| variant.peak)
            .max()
            .unwrap_or_default();
        let (recycle_above, recycle_leaks) =
            confinement::recycle_above(checker, &raw.recycle_above, at, largest);
        return WorkerMemory {
            auto: false,
            steady: first.steady,
            peak: first.peak,
            recycle_above,
            recycle_leaks,
            variants,
        };
    }
    let auto = raw.steady.0.is_none();
    let steady = checker.size(&steady_key, &raw.steady, WORKER_SIZES);
    let (steady, peak) = if auto {
        // The reservation for the first start may be given without other sizes.
        let first = checker.size(&peak_key, &raw.peak, WORKER_SIZES);
        (AUTO_STEADY, first.unwrap_or(AUTO_PEAK))
    } else {
        (
            steady.unwrap_or_default(),
            peak(checker, &peak_key, &raw.peak, steady),
        )
    };
    let (recycle_above, recycle_leaks) =
        confinement::recycle_above(checker, &raw.recycle_above, at, peak);
    WorkerMemory {
        auto,
        steady,
        peak,
        recycle_above,
        recycle_leaks,
        variants,
    }
}

/// Reads the notification of memory pressure, and its guaranteed effect.
fn pressure(
    checker: &mut Checker,
    raw: &RawPressure,
    at: &str,
    memory: &WorkerMemory,
) -> PressureConfig {
    let watch = checker
        .one_of(
            &format!("{at}.watch"),
            &raw.watch,
            &[
                ("fifo", PressureWatch::Fifo),
                ("none", PressureWatch::None),
                ("socket", PressureWatch::Socket),
            ],
        )
        .unwrap_or_default();
    let key = format!("{at}.shrinks_to");
    let shrinks_to = checker.size(&key, &raw.shrinks_to, WORKER_SIZES);
    if let Some(least) = shrinks_to {
        if watch == PressureWatch::None {
            checker.fault(
                &key,
                "a worker with `watch: none` is never notified",
                Some("remove one of the two"),
            );
        } else if !memory.variants.is_empty() {
            checker.fault(
                &key,
                "a worker with variants is switched between them",
                Some("remove `shrinks_to`, or the variants"),
            );
        } else if !memory.auto && memory.steady > Bytes::ZERO && least >= memory.steady {
            let steady = memory.steady;
            checker.fault(
                &key,
                format!("{least} is not below `memory.steady`, {steady}"),
                Some("write its size after it has released all spare memory"),
            );
        }
    }
    PressureConfig { watch, shrinks_to }
}

/// Reads the peak; by default a quarter above the size at rest, until it is measured.
fn peak(checker: &mut Checker, at: &str, raw: &Text, steady: Option<Bytes>) -> Bytes {
    let steady = steady.unwrap_or_default();
    let Some(peak) = checker.size(at, raw, WORKER_SIZES) else {
        return steady.saturating_add(steady.per_mille(PEAK_ABOVE_STEADY_PER_MILLE));
    };
    if peak < steady {
        checker.fault(
            at,
            format!("{peak} is below {steady}, the size of the worker at rest"),
            Some("`peak` includes the memory held at rest"),
        );
    }
    peak
}

pub(super) fn restart(checker: &mut Checker, raw: &RawRestart, at: &str) -> RestartParams {
    let key = |name: &str| format!("{at}.{name}");
    let defaults = RestartParams::default();
    let backoff = checker
        .duration(&key("backoff"), &raw.backoff, MILLI..=HOUR)
        .unwrap_or(defaults.backoff_min);
    let backoff_max = checker.duration(&key("backoff_max"), &raw.backoff_max, MILLI..=DAY);
    if backoff_max.is_some_and(|longest| longest < backoff) {
        checker.fault(
            &key("backoff_max"),
            "is below `backoff`",
            Some("raise `backoff_max` or lower `backoff`"),
        );
    }
    RestartParams {
        intensity: checker
            .number(&key("intensity"), &raw.intensity, 0..=100)
            .unwrap_or(defaults.intensity),
        window: checker
            .duration(&key("window"), &raw.window, SECOND..=DAY)
            .unwrap_or(defaults.window),
        stable_after: checker
            .duration(
                &key("stable_after"),
                &raw.stable_after,
                Duration::ZERO..=DAY,
            )
            .unwrap_or(defaults.stable_after),
        backoff_min: backoff,
        backoff_max: backoff_max.unwrap_or_else(|| defaults.backoff_max.max(backoff)),
    }
}

/// Peak over steady until it is measured: speech stacks showed 1.11 to 1.19, 20–40 % is the rule of thumb.
const PEAK_ABOVE_STEADY_PER_MILLE: u32 = 250;

/// Memory limit of a compiled pattern; a nested counted repetition could take gigabytes.
const PATTERN_BYTES_MAX: usize = 1 << 20;

/// Reservation for the first start of a worker with learned sizes and no `peak` (our choice: Whisper tiny and base and
/// Piper take 145 to 320 MiB). Use beyond it is booked as measured.
const AUTO_PEAK: Bytes = Bytes::from_mib(320);

/// Initial size at rest of such a worker: nearly zero, since its lease follows measured use.
const AUTO_STEADY: Bytes = Bytes::from_kib(4);

/// From one page to far beyond any device.
const WORKER_SIZES: RangeInclusive<Bytes> = Bytes::from_kib(4)..=SIZE_MAX;

/// Longest wait of a request for an answer: LiveKit's value for STT and TTS (`livekit/agents/types.py`).
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Ledger, metrics and chart are designed for a handful; the bound stops generated files from growing without limit.
const WORKERS_MAX: usize = 64;

const RESERVED: [&str; 4] = ["cotenant", "engine", "llm", "supervisor"];

/// Placeholders of `argv` and `env`.
const PLACEHOLDERS: [&str; 5] = ["NAME", "PORT", "SELF", "SOCKET", "VARIANT"];
