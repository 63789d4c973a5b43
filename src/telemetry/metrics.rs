//! All metrics, in OpenMetrics format.
//!
//! Most figures come from one [`Snapshot`]; methods named after events count those between snapshots.

mod snapshot;

use std::{
    sync::{Mutex, atomic::AtomicU64},
    time::Duration,
};

use prometheus_client::{
    encoding::text::{encode_eof, encode_registry},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
        info::Info,
    },
    registry::Registry,
};

#[cfg(doc)]
use cotenant_policy::snapshot::Snapshot;
use cotenant_policy::{death::DeathClass, pressure::PressureLevel};
use cotenant_units::{Bytes, Tokens, lock::locked};

use crate::{
    build_name::commit,
    llm::{LlmLoad, LlmMetrics},
    node::{Node, NodeInfo},
    table::{Known, Labels, Size, Table, labels, raise},
};

/// All metrics. Updates and encoding are mutually exclusive, so that a scrape sees one state.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    whole: Mutex<()>,
    node: Node,
    budget: Size,
    budget_free: Size,
    budget_held: Size,
    budget_unaccounted: Size,
    budget_used: Size,
    supervisor: Known,
    headroom: Known,
    memory_available: Known,
    cma_free: Known,
    gpu_used: Known,
    page_pool: Known,
    zram_store: Known,
    leases: Family<Labels<1>, Size>,
    lease_held: Family<Labels<2>, Size>,
    lease_used: Family<Labels<1>, Size>,
    lease_target: Family<Labels<1>, Size>,
    lease_denied: Family<Labels<1>, Counter>,
    reclaim: Histogram,
    reclaim_missed: Family<Labels<1>, Counter>,
    llm_state: Family<Labels<1>, Size>,
    layers: Family<Labels<1>, Size>,
    weights_resident: Size,
    kv_capacity: Size,
    kv_used: Size,
    prefill_chunk: Size,
    command_gap: Gauge<f64, AtomicU64>,
    llm: LlmMetrics,
    shed_events: Family<Labels<1>, Counter>,
    shed_bytes: Family<Labels<2>, Counter>,
    regrow_bytes: Counter,
    pressure_level: Size,
    safe_profile: Size,
    reboot_advised: Family<Labels<1>, Size>,
    pressure_some: Family<Labels<1>, Gauge<f64, AtomicU64>>,
    pressure_stall: Family<Labels<1>, Counter<f64, AtomicU64>>,
    worker_state: Family<Labels<2>, Size>,
    worker_deaths: Family<Labels<2>, Counter>,
    worker_restarts: Family<Labels<2>, Counter>,
    worker_memory: Family<Labels<2>, Size>,
    oom_kills: Counter,
    request: Family<Labels<2>, Histogram, fn() -> Histogram>,
    first_token: Histogram,
    first_audio: Histogram,
    tokens: Family<Labels<1>, Counter>,
    heartbeat_age: Family<Labels<1>, Gauge<f64, AtomicU64>>,
    journal_lost: Counter,
    log_dropped: Counter,
    spans_exported: Counter,
    spans_dropped: Counter,
    standby_served: Counter,
    standby_missed: Counter,
}

impl Metrics {
    /// All metrics at zero.
    pub fn new() -> Self {
        let mut table = Table(Registry::with_prefix("cotenant"));
        table.0.register(
            "build",
            "Version of the program",
            Info::new([("version", env!("CARGO_PKG_VERSION")), ("git", commit())]),
        );
        Self {
            node: Node::add(&mut table),
            budget: table.add("budget_bytes", "Memory that may be handed out"),
            budget_free: table.add(
                "budget_free_bytes",
                "Budget minus all that is held or unaccounted",
            ),
            budget_held: table.add("budget_held_bytes", "Sum of all leases"),
            budget_unaccounted: table.add(
                "budget_unaccounted_bytes",
                "Measured use beyond what is held",
            ),
            budget_used: table.add("budget_used_bytes", "Measured use of all holders"),
            supervisor: table.add(
                "supervisor_bytes",
                "Memory of the daemon itself beyond what the LLM has touched",
            ),
            headroom: table.add(
                "headroom_bytes",
                "Available memory above the last watermark",
            ),
            memory_available: table.add(
                "memory_available_bytes",
                "MemAvailable plus the reclaimable cache of ZFS",
            ),
            cma_free: table.add("cma_free_bytes", "CmaFree, which the GPU cannot use"),
            gpu_used: table.add("gpu_used_bytes", "Memory in use by the GPU of a Jetson"),
            page_pool: table.add(
                "gpu_page_pool_bytes",
                "Freed GPU memory that nvmap keeps for the GPU",
            ),
            zram_store: table.add(
                "zram_store_bytes",
                "Memory in which zram stores swapped pages",
            ),
            leases: table.add("leases", "Leases and waiting requests by state"),
            lease_held: table.add("lease_held_bytes", "Bytes held in the ledger"),
            lease_used: table.add(
                "lease_used_bytes",
                "Bytes that the kernel attributes to the holder, once for all its leases",
            ),
            lease_target: table.add(
                "lease_target_bytes",
                "Size to which the holder was asked to shrink, in bytes",
            ),
            lease_denied: table.add("lease_denied", "Requests denied"),
            reclaim: table.with(
                "reclaim_seconds",
                "Time from a request for memory until its reclaim was verified",
                Histogram::new(exponential_buckets(0.005, 2.0, 12)),
            ),
            reclaim_missed: table.add(
                "reclaim_missed",
                "Targets that were not reached by their deadline",
            ),
            llm_state: table.add(
                "llm_state",
                "1 for the current state of the LLM, 0 for the others",
            ),
            layers: table.add("llm_layers", "Layers of the model, resident or streamed"),
            weights_resident: table.add("llm_weights_resident_bytes", "Weights in memory"),
            kv_capacity: table.add("kv_capacity_bytes", "Capacity of the KV cache"),
            kv_used: table.add("kv_used_bytes", "Use of the KV cache by sequences"),
            prefill_chunk: table.add(
                "llm_prefill_chunk_tokens",
                "Tokens of a prompt that are computed at once",
            ),
            command_gap: table.add(
                "llm_command_gap_max_seconds",
                "Longest time in which the working engine accepted no command",
            ),
            llm: LlmMetrics::new(&mut table),
            shed_events: table.add(
                "shed_events",
                "Sheds by the pressure level that led to them",
            ),
            shed_bytes: table.add("shed_bytes", "Bytes released from the ledger by sheds"),
            regrow_bytes: table.add("regrow_bytes", "Bytes regrown by the engine"),
            safe_profile: table.add(
                "safe_profile",
                "1 while the LLM is off after crashes of the daemon",
            ),
            reboot_advised: table.add(
                "reboot_advised",
                "1 while only a reboot recovers lost memory",
            ),
            pressure_level: table.add("pressure_level", "0 Normal, 1 Elevated, 2 Critical"),
            pressure_some: table.add(
                "pressure_some_ratio",
                "Share of time in which tasks waited for memory",
            ),
            pressure_stall: table.add(
                "pressure_stall_seconds",
                "Time in which tasks waited for memory, since boot",
            ),
            worker_state: table.add(
                "worker_state",
                "1 for the current state of a worker, 0 for the others",
            ),
            worker_deaths: table.add("worker_deaths", "Deaths of a worker by cause"),
            worker_restarts: table.add(
                "worker_restarts",
                "Restarts of a worker after an unrequested end, by its cause",
            ),
            worker_memory: table.add("worker_memory_bytes", "Memory of a worker, measured"),
            oom_kills: table.add(
                "oom_kills",
                "Processes killed by the kernel for lack of memory, since boot",
            ),
            request: table.with(
                "request_seconds",
                "Time from a request to the end of its answer",
                Family::new_with_constructor(request_histogram as fn() -> Histogram),
            ),
            first_token: table.with(
                "time_to_first_token_seconds",
                "Time from a request to the first token of its answer",
                Histogram::new(exponential_buckets(0.01, 2.0, 12)),
            ),
            first_audio: table.with(
                "time_to_first_audio_seconds",
                "Time from the end of an utterance to the first sound of its answer",
                Histogram::new(exponential_buckets(0.01, 2.0, 12)),
            ),
            tokens: table.add("tokens", "Tokens read (prompt) and written (completion)"),
            heartbeat_age: table.add(
                "watchdog_heartbeat_age_seconds",
                "Time since a loop last advanced",
            ),
            journal_lost: table.add(
                "journal_lines_lost",
                "Journal lines not written to the file",
            ),
            log_dropped: table.add(
                "log_lines_dropped",
                "Log lines lost because their reader was slow",
            ),
            spans_exported: table.add("spans_exported", "Spans accepted by the collector"),
            spans_dropped: table.add(
                "spans_dropped",
                "Spans lost because the collector was unreachable, slow or refused them",
            ),
            standby_served: table.add(
                "standby_served",
                "Memory of sheds allocated from the emergency reserve",
            ),
            standby_missed: table.add(
                "standby_missed",
                "Memory of sheds allocated from the system, beyond the emergency reserve",
            ),
            registry: table.0,
            whole: Mutex::new(()),
        }
    }

    /// Creates all series that may be counted, at zero: for Prometheus, an appearing series is not an increase.
    pub fn expect<'name>(&self, workers: impl Iterator<Item = &'name str>, denials: &[&str]) {
        let _whole = locked(&self.whole);
        for worker in workers {
            for class in DeathClass::ALL {
                drop(
                    self.worker_deaths
                        .get_or_create(&labels([("worker", worker), ("class", class.name())])),
                );
            }
            for reason in ["exited", "killed", "not_ready"] {
                drop(
                    self.worker_restarts
                        .get_or_create(&labels([("worker", worker), ("reason", reason)])),
                );
            }
            drop(
                self.reclaim_missed
                    .get_or_create(&labels([("tenant", worker)])),
            );
        }
        for reason in denials {
            drop(
                self.lease_denied
                    .get_or_create(&labels([("reason", reason)])),
            );
        }
        for level in ["normal", "elevated", "critical"] {
            drop(self.shed_events.get_or_create(&labels([("level", level)])));
        }
        for what in ["kv", "layers", "workspace", "worker", "tenant"] {
            for reason in ["lease", "operator", "pressure"] {
                drop(
                    self.shed_bytes
                        .get_or_create(&labels([("what", what), ("reason", reason)])),
                );
            }
        }
        for kind in ["prompt", "cached", "completion"] {
            drop(self.tokens.get_or_create(&labels([("kind", kind)])));
        }
    }

    /// Counts a denied lease request.
    pub fn lease_denied(&self, reason: &str) {
        self.lease_denied
            .get_or_create(&labels([("reason", reason)]))
            .inc();
    }

    /// Records verified reclaim.
    pub fn reclaimed(&self, took: Duration) {
        self.reclaim.observe(took.as_secs_f64());
    }

    /// Counts a holder that missed its target.
    pub fn reclaim_missed(&self, tenant: &str) {
        self.reclaim_missed
            .get_or_create(&labels([("tenant", tenant)]))
            .inc();
    }

    /// Counts a verified shed caused by `level`.
    pub fn shed(&self, level: PressureLevel) {
        self.shed_events
            .get_or_create(&[("level", level.to_string().to_lowercase())])
            .inc();
    }

    /// Counts bytes released by a shed: `kv`, `layers`, `workspace`, `worker`, `tenant`; by reason: `lease`,
    /// `operator`, `pressure`.
    pub fn shed_bytes(&self, what: &str, reason: &str, bytes: Bytes) {
        self.shed_bytes
            .get_or_create(&labels([("what", what), ("reason", reason)]))
            .inc_by(bytes.get());
    }

    /// Bytes of sequences in the KV cache.
    pub fn set_kv_used(&self, bytes: Bytes) {
        self.kv_used.set(bytes.get());
    }

    /// Counts a restart of a worker after an unexpected exit: `exited`, `killed`, `not_ready`.
    pub fn worker_restarted(&self, worker: &str, reason: &str) {
        self.worker_restarts
            .get_or_create(&labels([("worker", worker), ("reason", reason)]))
            .inc();
    }

    /// Counts a death of a worker, or a failed start: `memcg_oom`, `exec_failed`.
    pub fn worker_died(&self, worker: &str, class: &str) {
        self.worker_deaths
            .get_or_create(&labels([("worker", worker), ("class", class)]))
            .inc();
    }

    /// Memory of a worker, by kind: `pss`, `rss`, `cgroup`. `None` if it has ended, or the figure is unknown.
    pub fn set_worker_memory(&self, worker: &str, kind: &str, bytes: Option<Bytes>) {
        let labels = labels([("worker", worker), ("kind", kind)]);
        match bytes {
            Some(bytes) => {
                self.worker_memory.get_or_create(&labels).set(bytes.get());
            }
            None => {
                self.worker_memory.remove(&labels);
            }
        }
    }

    /// Records a completed request.
    pub fn request(&self, route: &str, code: u16, took: Duration) {
        let labels = [("route", route.to_owned()), ("code", code.to_string())];
        self.request
            .get_or_create(&labels)
            .observe(took.as_secs_f64());
    }

    /// Records the first token of an answer.
    pub fn first_token(&self, took: Duration) {
        self.first_token.observe(took.as_secs_f64());
    }

    /// Records the time from the end of an utterance to the first audio of its answer.
    pub fn first_audio(&self, took: Duration) {
        self.first_audio.observe(took.as_secs_f64());
    }

    /// Counts tokens that were read (`prompt`) or generated (`completion`).
    pub fn tokens(&self, kind: &str, count: u64) {
        self.tokens
            .get_or_create(&labels([("kind", kind)]))
            .inc_by(count);
    }

    /// Time since a loop last advanced.
    pub fn set_heartbeat_age(&self, component: &str, age: Duration) {
        self.heartbeat_age
            .get_or_create(&labels([("component", component)]))
            .set(age.as_secs_f64());
    }

    /// Journal lines lost so far.
    pub fn set_journal_lost(&self, lines: u64) {
        raise(&self.journal_lost, lines);
    }

    /// Identity of this machine and its configuration.
    pub fn set_node(&self, node: &NodeInfo) {
        let _whole = locked(&self.whole);
        self.node.set(node);
    }

    /// Publishes the LLM's load also under vLLM's names.
    pub fn show_vllm_names(&self, shown: bool) {
        self.llm.show_vllm(shown);
    }

    /// Requests and conversations of the LLM `model`, and the capacity of its KV cache.
    pub fn set_llm(&self, model: &str, load: &LlmLoad, capacity: Tokens) {
        self.llm.set(model, load, capacity);
    }

    /// The longest time in which the engine accepted no command.
    pub fn set_command_gap(&self, gap: Duration) {
        self.command_gap.set(gap.as_secs_f64());
    }

    /// Allocations served by the emergency reserve, and those that did not fit.
    pub fn set_standby(&self, served: u64, missed: u64) {
        raise(&self.standby_served, served);
        raise(&self.standby_missed, missed);
    }

    /// Spans accepted by a collector, and lost spans, so far.
    pub fn set_spans(&self, exported: u64, dropped: u64) {
        raise(&self.spans_exported, exported);
        raise(&self.spans_dropped, dropped);
    }

    /// Log lines lost so far.
    pub fn set_log_dropped(&self, lines: u64) {
        raise(&self.log_dropped, lines);
    }

    /// All metrics as OpenMetrics text.
    pub fn encode(&self) -> String {
        let _whole = locked(&self.whole);
        let mut text = String::new();
        // Writing to a `String` does not fail, and labels are strings or numbers.
        let _ = encode_registry(&mut text, &self.registry)
            .and_then(|()| self.llm.encode_vllm(&mut text))
            .and_then(|()| encode_eof(&mut text));
        text
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

fn request_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.01, 2.0, 14))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cotenant_policy::{
        engine_failure::{EngineFailure, NextTry},
        lease::{
            Class, LeaseId, LeaseKind, LeaseMemory, LeaseOwner, LeaseState, LeaseView, Target,
        },
        pressure::{KernelCounters, MemoryReading, Sample, StallReading},
        snapshot::{
            EngineState, MemoryView, PressureView, Snapshot, Totals, WorkerState, WorkerView,
        },
    };
    use cotenant_units::Timestamp;

    fn lease(id: u64, tenant: &str, kind: LeaseKind, mib: u64) -> LeaseView {
        LeaseView {
            id: LeaseId(id),
            tenant: tenant.to_owned(),
            holder: String::new(),
            kind,
            class: Class::AudioRealtime,
            state: LeaseState::Granted,
            generation: id,
            memory: LeaseMemory {
                held: Bytes::from_mib(mib),
                min: Bytes::ZERO,
                max: Bytes::from_mib(mib),
                used: None,
                used_at: None,
            },
            target: None,
            granted_at: Timestamp::START,
            expires_at: None,
            owner: LeaseOwner {
                owner_uid: 0,
                owner_pid: None,
                cgroup: None,
            },
        }
    }

    #[test]
    fn all_metrics_are_written_as_openmetrics() {
        let metrics = Metrics::new();
        let mut asr = lease(2, "asr", LeaseKind::Worker, 180);
        asr.memory.used = Some(Bytes::from_mib(170));
        asr.state = LeaseState::Revoking;
        asr.target = Some(Target {
            nonce: 1,
            bytes: Bytes::from_mib(120),
            deadline: Timestamp::NEVER,
        });
        metrics.observe(&Snapshot {
            memory: MemoryView {
                budget: Bytes::from_mib(896),
                held: Bytes::from_mib(580),
                free: Bytes::from_mib(316),
                ..MemoryView::default()
            },
            pressure: PressureView {
                headroom: Some(Bytes::from_mib(200)),
                level: PressureLevel::Elevated,
                sample: Some(Sample {
                    memory: MemoryReading {
                        mem_available: Bytes::from_gib(4),
                        ..MemoryReading::default()
                    },
                    stalls: StallReading {
                        psi_some_avg10: Some(6142),
                        psi_some_total_us: Some(1_500_000),
                        ..StallReading::default()
                    },
                    counters: KernelCounters {
                        oom_kills: Some(3),
                        ..KernelCounters::default()
                    },
                    ..Sample::default()
                }),
                ..PressureView::default()
            },
            leases: vec![lease(1, "llm", LeaseKind::Engine, 400), asr],
            totals: Totals {
                regrown_bytes: Bytes::from_mib(7),
                ..Totals::default()
            },
            ..Snapshot::default()
        });
        metrics.lease_denied("insufficient_memory");
        metrics.reclaimed(Duration::from_millis(180));
        metrics.reclaim_missed("asr");
        metrics.shed(PressureLevel::Critical);
        metrics.shed_bytes("layers", "pressure", Bytes::from_mib(210));
        metrics.worker_died("asr", "memcg_oom");
        metrics.worker_restarted("asr", "killed");
        metrics.lease_denied("a \"quoted\" reason");
        metrics.set_worker_memory("asr", "pss", Some(Bytes::from_mib(170)));
        metrics.request("/v1/chat/completions", 200, Duration::from_millis(750));
        metrics.first_token(Duration::from_millis(30));
        metrics.tokens("completion", 42);
        metrics.set_heartbeat_age("arbiter", Duration::from_millis(20));
        metrics.set_log_dropped(5);
        metrics.set_spans(9, 4);
        metrics.set_journal_lost(2);
        metrics.set_standby(151, 1);
        metrics.set_command_gap(Duration::from_micros(1500));
        let load = LlmLoad {
            running: 2,
            waiting: 1,
            used: Tokens::new(512),
            conversations: 3,
            kept: Tokens::new(900),
            shared: Tokens::new(600),
            saved: 2,
            saved_bytes: 5 << 20,
            written: 7,
            read_back: 4,
            failed: 1,
            drafted: 40,
            accepted: 30,
            experts_found: 500,
            experts_read: 120,
        };
        metrics.set_llm("tiny", &load, Tokens::new(2048));
        metrics.set_node(&NodeInfo {
            board: "NVIDIA Jetson Orin Nano".to_owned(),
            l4t: "36.4.7".to_owned(),
            model: "tiny".to_owned(),
            config_hash: "85944171f73967e8".to_owned(),
        });
        // Series of a family have no order.
        let text = metrics.encode();
        let mut lines: Vec<&str> = text
            .lines()
            .filter(|line| !line.contains("_bucket{"))
            .collect();
        assert_eq!(lines.last(), Some(&"# EOF"));
        lines.sort_by_key(|line| {
            line.trim_start_matches("# HELP ")
                .trim_start_matches("# TYPE ")
        });
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn what_may_be_counted_is_there_at_zero_from_the_start() {
        let metrics = Metrics::new();
        metrics.expect(["asr"].into_iter(), &["insufficient_memory"]);
        let text = metrics.encode();
        for series in [
            r#"cotenant_worker_deaths_total{worker="asr",class="memcg_oom"} 0"#,
            r#"cotenant_worker_restarts_total{worker="asr",reason="killed"} 0"#,
            r#"cotenant_lease_denied_total{reason="insufficient_memory"} 0"#,
            r#"cotenant_reclaim_missed_total{tenant="asr"} 0"#,
            r#"cotenant_shed_events_total{level="critical"} 0"#,
            r#"cotenant_shed_bytes_total{what="layers",reason="pressure"} 0"#,
            r#"cotenant_tokens_total{kind="completion"} 0"#,
        ] {
            assert!(
                text.lines().any(|line| line == series),
                "{series} is not in\n{text}"
            );
        }
        assert_eq!(
            text.matches("cotenant_worker_deaths_total{").count(),
            DeathClass::ALL.len()
        );
    }

    #[test]
    fn the_states_of_the_llm_and_of_workers_are_series() {
        let metrics = Metrics::new();
        let mut snapshot = Snapshot {
            workers: vec![WorkerView {
                name: "asr".to_owned(),
                state: WorkerState::Degraded,
                ..WorkerView::default()
            }],
            ..Snapshot::default()
        };
        metrics.observe(&snapshot);
        assert!(
            !metrics.encode().contains("cotenant_llm_state{"),
            "there is none"
        );
        let failure = |next| {
            Some(EngineFailure {
                reason: "it is cut".to_owned(),
                next,
            })
        };
        let never = || NextTry::Never {
            remedy: String::new(),
        };
        for (state, failure, says) in [
            (EngineState::Loading, None, "loading"),
            (EngineState::Ready, None, "ready"),
            (EngineState::Failed, failure(NextTry::Now), "retrying"),
            (EngineState::Failed, failure(never()), "failed"),
        ] {
            (snapshot.engine.state, snapshot.engine.failure) = (state, failure);
            metrics.observe(&snapshot);
            let text = metrics.encode();
            let set: Vec<&str> = text
                .lines()
                .filter(|line| line.contains("_state{") && line.ends_with(" 1"))
                .collect();
            let says = format!(r#"cotenant_llm_state{{state="{says}"}} 1"#);
            let worker = r#"cotenant_worker_state{worker="asr",state="degraded"} 1"#;
            assert_eq!(set, [says.as_str(), worker], "{text}");
            assert!(
                !text.contains("cotenant_llm_layers{"),
                "a share of no layers is no figure"
            );
        }
    }

    #[test]
    fn what_a_process_uses_counts_once_for_all_its_leases() {
        let metrics = Metrics::new();
        // Two processes with one name; the second also has a lease under another name.
        let leases = [
            ("tts", "tts"),
            ("tts", "tts"),
            ("tts", "tts (pid 7)"),
            ("cache", "tts (pid 7)"),
        ];
        let leases = leases
            .into_iter()
            .zip(1..)
            .map(|((tenant, holder), id)| LeaseView {
                holder: holder.to_owned(),
                memory: LeaseMemory {
                    used: Some(Bytes::from_mib(4)),
                    ..lease(id, tenant, LeaseKind::Tenant, 10).memory
                },
                ..lease(id, tenant, LeaseKind::Tenant, 10)
            });
        metrics.observe(&Snapshot {
            leases: leases.collect(),
            ..Snapshot::default()
        });
        let text = metrics.encode();
        let used: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("cotenant_lease_used_bytes{"))
            .collect();
        assert_eq!(used, [r#"cotenant_lease_used_bytes{tenant="tts"} 8388608"#]);
    }

    #[test]
    fn what_has_ended_vanishes_and_what_is_unknown_is_left_out() {
        let metrics = Metrics::new();
        let mut snapshot = Snapshot {
            leases: vec![
                lease(1, "tts", LeaseKind::Tenant, 10),
                lease(2, "tts", LeaseKind::Tenant, 20),
            ],
            ..Snapshot::default()
        };
        metrics.observe(&snapshot);
        let text = metrics.encode();
        assert!(text.contains(r#"cotenant_lease_held_bytes{tenant="tts",kind="tenant"} 31457280"#));
        assert!(text.contains(r#"cotenant_leases{state="granted"} 2"#));
        assert!(!text.contains("\ncotenant_headroom_bytes"), "{text}");
        snapshot.leases.clear();
        metrics.observe(&snapshot);
        let text = metrics.encode();
        assert!(!text.contains("tts"));
        assert!(text.contains(r#"cotenant_leases{state="granted"} 0"#));
    }
}
