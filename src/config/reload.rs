//! What a running supervisor takes over of a changed file, key by key, and what needs a restart.
//!
//! Every field of [`Config`] is taken apart here with its key, so that a new setting does not compile before it is
//! decided on.

use super::{
    BudgetConfig, Config, GrpcConfig, GrpcLimits, HttpConfig, JournalConfig, LeaseConfig, LlmConfig, LogConfig,
    RolesConfig, SafeProfileConfig, SheddingConfig, Watermarks, WorkerConfig, WyomingConfig,
};
use crate::policy::{compute::DeviceSettings, event::ChangedKeys, params::ClassDeadlines};

impl Config {
    /// These settings with those of `new` that a running supervisor takes over, and the keys that differ.
    ///
    /// ```
    /// use cotenant::config::Config;
    /// let running = Config::parse("log: {filter: info, format: text}").unwrap();
    /// let file = Config::parse("log: {filter: debug, format: json}").unwrap();
    /// let (next, changes) = running.reloaded(&file);
    /// assert_eq!((next.log.filter.as_str(), next.log.format), ("debug", running.log.format));
    /// assert_eq!((changes.applied, changes.restart), (vec!["log.filter".to_owned()], vec!["log.format".to_owned()]));
    /// ```
    #[must_use]
    pub fn reloaded(&self, new: &Self) -> (Self, ChangedKeys) {
        let mut merge = Merge::default();
        let config = merge.config(self, new);
        (config, merge.changes)
    }
}

/// Takes settings over or keeps them, and notes the keys.
#[derive(Default)]
struct Merge {
    changes: ChangedKeys,
    /// Every key that was looked at, and whether it is taken over.
    #[cfg(test)]
    seen: Vec<(String, bool)>,
}

impl Merge {
    /// A setting that is taken over.
    fn live<T: Clone + PartialEq>(&mut self, key: &str, old: &T, new: &T) -> T {
        #[cfg(test)]
        self.seen.push((key.to_owned(), true));
        if old != new {
            self.changes.applied.push(key.to_owned());
        }
        new.clone()
    }

    /// A setting that counts from the next start of the supervisor.
    fn fixed<T: Clone + PartialEq>(&mut self, key: &str, old: &T, new: &T) -> T {
        #[cfg(test)]
        self.seen.push((key.to_owned(), false));
        if old != new {
            self.changes.restart.push(key.to_owned());
        }
        old.clone()
    }

    fn config(&mut self, old: &Config, new: &Config) -> Config {
        Config {
            budget: self.budget(&old.budget, &new.budget),
            shedding: self.shedding(&old.shedding, &new.shedding),
            leases: self.leases(old.leases, new.leases),
            llm: match (&old.llm, &new.llm) {
                (Some(old), Some(new)) => Some(self.llm(old, new)),
                (old, new) => self.fixed("llm", old, new),
            },
            workers: self.workers(&old.workers, &new.workers),
            http: HttpConfig {
                listen: self.fixed("http.listen", &old.http.listen, &new.http.listen),
                allowed_hosts: self.live("http.allowed_hosts", &old.http.allowed_hosts, &new.http.allowed_hosts),
                keys_file: self.live("http.keys_file", &old.http.keys_file, &new.http.keys_file),
                keyless: self.live("http.keyless", &old.http.keyless, &new.http.keyless),
                models: self.live("http.models", &old.http.models, &new.http.models),
                voices: self.live("http.voices", &old.http.voices, &new.http.voices),
            },
            wyoming: self.wyoming(&old.wyoming, &new.wyoming),
            grpc: self.grpc(&old.grpc, &new.grpc),
            journal: match (&old.journal, &new.journal) {
                (Some(old), Some(new)) => Some(JournalConfig {
                    path: self.fixed("journal.path", &old.path, &new.path),
                    max_size: self.fixed("journal.max_size", &old.max_size, &new.max_size),
                }),
                (old, new) => self.fixed("journal.path", old, new),
            },
            safe_profile: SafeProfileConfig {
                crashes: self.fixed(
                    "safe_profile.crashes",
                    &old.safe_profile.crashes,
                    &new.safe_profile.crashes,
                ),
                within: self.fixed(
                    "safe_profile.within",
                    &old.safe_profile.within,
                    &new.safe_profile.within,
                ),
            },
            state_dir: self.fixed("state_dir", &old.state_dir, &new.state_dir),
            runtime_dir: self.fixed("runtime_dir", &old.runtime_dir, &new.runtime_dir),
            log: LogConfig {
                filter: self.live("log.filter", &old.log.filter, &new.log.filter),
                format: self.fixed("log.format", &old.log.format, &new.log.format),
            },
        }
    }

    fn budget(&mut self, old: &BudgetConfig, new: &BudgetConfig) -> BudgetConfig {
        let (was, is) = (&old.watermarks, &new.watermarks);
        BudgetConfig {
            total: self.live("budget.total", &old.total, &new.total),
            reserve: self.live("budget.reserve", &old.reserve, &new.reserve),
            scope: self.fixed("budget.scope", &old.scope, &new.scope),
            watermarks: Watermarks {
                elevated: self.live("budget.watermarks.elevated", &was.elevated, &is.elevated),
                critical: self.live("budget.watermarks.critical", &was.critical, &is.critical),
                last_resort: self.live("budget.watermarks.last_resort", &was.last_resort, &is.last_resort),
            },
            hysteresis: self.live("budget.hysteresis", &old.hysteresis, &new.hysteresis),
            dwell: self.live("budget.dwell", &old.dwell, &new.dwell),
            grace: self.live("budget.grace", &old.grace, &new.grace),
            fill_rate_mib_per_s: self.live(
                "budget.fill_rate_max",
                &old.fill_rate_mib_per_s,
                &new.fill_rate_mib_per_s,
            ),
            sample_min: self.live("budget.sample_min", &old.sample_min, &new.sample_min),
            sample_max: self.live("budget.sample_max", &old.sample_max, &new.sample_max),
        }
    }

    fn shedding(&mut self, old: &SheddingConfig, new: &SheddingConfig) -> SheddingConfig {
        let (was, is) = (&old.deadlines, &new.deadlines);
        SheddingConfig {
            reclaim_min: self.live("shedding.reclaim_min", &old.reclaim_min, &new.reclaim_min),
            settle: self.live("shedding.settle", &old.settle, &new.settle),
            deadlines: ClassDeadlines {
                audio_realtime: self.live(
                    "shedding.deadlines.audio-realtime",
                    &was.audio_realtime,
                    &is.audio_realtime,
                ),
                interactive: self.live("shedding.deadlines.interactive", &was.interactive, &is.interactive),
                llm_elastic: self.live("shedding.deadlines.llm-elastic", &was.llm_elastic, &is.llm_elastic),
                batch: self.live("shedding.deadlines.batch", &was.batch, &is.batch),
            },
            verify_timeout: self.live("shedding.verify_timeout", &old.verify_timeout, &new.verify_timeout),
        }
    }

    fn leases(&mut self, old: LeaseConfig, new: LeaseConfig) -> LeaseConfig {
        LeaseConfig {
            term_min: self.live("leases.term_min", &old.term_min, &new.term_min),
            term_max: self.live("leases.term_max", &old.term_max, &new.term_max),
            wait_max: self.live("leases.wait_max", &old.wait_max, &new.wait_max),
            queue_max: self.live("leases.queue_max", &old.queue_max, &new.queue_max),
            per_user_max: self.live("leases.per_user_max", &old.per_user_max, &new.per_user_max),
        }
    }

    fn llm(&mut self, old: &LlmConfig, new: &LlmConfig) -> LlmConfig {
        LlmConfig {
            path: self.fixed("llm.path", &old.path, &new.path),
            name: self.fixed("llm.name", &old.name, &new.name),
            threads: self.fixed("llm.threads", &old.threads, &new.threads),
            device: DeviceSettings {
                choice: self.fixed("llm.device", &old.device.choice, &new.device.choice),
                memory: self.fixed("llm.cuda.memory", &old.device.memory, &new.device.memory),
                kernels: self.fixed("llm.cuda.kernels", &old.device.kernels, &new.device.kernels),
            },
            context: self.fixed("llm.context", &old.context, &new.context),
            vocabulary: self.fixed("llm.vocabulary", &old.vocabulary, &new.vocabulary),
            answer_tokens_max: self.fixed("llm.answer_tokens_max", &old.answer_tokens_max, &new.answer_tokens_max),
            answer_time_max: self.fixed("llm.answer_time_max", &old.answer_time_max, &new.answer_time_max),
            kv_floor: self.fixed("llm.kv_floor", &old.kv_floor, &new.kv_floor),
            kv_memory: self.fixed("llm.kv_memory", &old.kv_memory, &new.kv_memory),
            kv_type: self.fixed("llm.kv_type", &old.kv_type, &new.kv_type),
            kv_type_least: self.fixed("llm.kv_type_least", &old.kv_type_least, &new.kv_type_least),
            prefill_chunk: self.fixed("llm.prefill_chunk", &old.prefill_chunk, &new.prefill_chunk),
            prefill_chunk_max: self.fixed("llm.prefill_chunk_max", &old.prefill_chunk_max, &new.prefill_chunk_max),
            mode: self.fixed("llm.mode", &old.mode, &new.mode),
            resident_layers_min: self.fixed(
                "llm.resident_layers_min",
                &old.resident_layers_min,
                &new.resident_layers_min,
            ),
            after: self.fixed("llm.after", &old.after, &new.after),
            load_timeout: self.fixed("llm.load_timeout", &old.load_timeout, &new.load_timeout),
            apply_timeout: self.fixed("llm.apply_timeout", &old.apply_timeout, &new.apply_timeout),
            restart: self.fixed("llm.restart", &old.restart, &new.restart),
        }
    }

    /// Workers of the same name; one that is new or gone needs a restart, and so does another order.
    fn workers(&mut self, old: &[WorkerConfig], new: &[WorkerConfig]) -> Vec<WorkerConfig> {
        let names =
            |workers: &[WorkerConfig]| -> Vec<String> { workers.iter().map(|worker| worker.name.clone()).collect() };
        let (was, is) = (names(old), names(new));
        let mut only_in_one: Vec<&String> = was.iter().filter(|name| !is.contains(name)).collect();
        only_in_one.extend(is.iter().filter(|name| !was.contains(name)));
        for name in &only_in_one {
            self.changes.restart.push(format!("workers.{name}"));
        }
        if only_in_one.is_empty() {
            self.fixed("workers", &was, &is);
        }
        let merged = old.iter().map(|old| {
            let new = new.iter().find(|new| new.name == old.name);
            new.map_or_else(|| old.clone(), |new| self.worker(old, new))
        });
        merged.collect()
    }

    fn worker(&mut self, old: &WorkerConfig, new: &WorkerConfig) -> WorkerConfig {
        let key = |key: &str| format!("workers.{}.{key}", old.name);
        WorkerConfig {
            name: old.name.clone(),
            role: self.fixed(&key("role"), &old.role, &new.role),
            argv: self.live(&key("argv"), &old.argv, &new.argv),
            env: self.live(&key("env"), &old.env, &new.env),
            working_dir: self.live(&key("working_dir"), &old.working_dir, &new.working_dir),
            protocol: self.fixed(&key("protocol"), &old.protocol, &new.protocol),
            model: self.fixed(&key("model"), &old.model, &new.model),
            endpoint: self.live(&key("socket"), &old.endpoint, &new.endpoint),
            ready: self.live(&key("ready"), &old.ready, &new.ready),
            class: self.live(&key("class"), &old.class, &new.class),
            memory: self.live(&key("memory"), &old.memory, &new.memory),
            restart: self.live(&key("restart"), &old.restart, &new.restart),
            stop_grace: self.live(&key("stop_grace"), &old.stop_grace, &new.stop_grace),
            oom_score_adj: self.live(&key("oom_score_adj"), &old.oom_score_adj, &new.oom_score_adj),
            autostart: self.fixed(&key("autostart"), &old.autostart, &new.autostart),
            pinned: self.live(&key("pinned"), &old.pinned, &new.pinned),
            after: self.fixed(&key("after"), &old.after, &new.after),
            lease: self.fixed(&key("lease"), &old.lease, &new.lease),
            idle: self.live(&key("idle"), &old.idle, &new.idle),
            wake_timeout: self.fixed(&key("wake_timeout"), &old.wake_timeout, &new.wake_timeout),
            answer_timeout: self.fixed(&key("answer_timeout"), &old.answer_timeout, &new.answer_timeout),
            user: self.live(&key("user"), &old.user, &new.user),
            group: self.live(&key("group"), &old.group, &new.group),
            limits: self.live(&key("limits"), &old.limits, &new.limits),
            sandbox: self.live(&key("sandbox"), &old.sandbox, &new.sandbox),
            pressure: self.live(&key("pressure"), &old.pressure, &new.pressure),
        }
    }

    fn wyoming(&mut self, old: &WyomingConfig, new: &WyomingConfig) -> WyomingConfig {
        WyomingConfig {
            listen: self.fixed("wyoming.listen", &old.listen, &new.listen),
            languages: self.fixed("wyoming.languages", &old.languages, &new.languages),
            system: self.fixed("wyoming.system", &old.system, &new.system),
            wait_max: self.fixed("wyoming.wait_max", &old.wait_max, &new.wait_max),
            audio_max: self.fixed("wyoming.audio_max", &old.audio_max, &new.audio_max),
            connections_max: self.fixed("wyoming.connections_max", &old.connections_max, &new.connections_max),
            conversations_max: self.fixed(
                "wyoming.conversations_max",
                &old.conversations_max,
                &new.conversations_max,
            ),
            history_max: self.fixed("wyoming.history_max", &old.history_max, &new.history_max),
        }
    }

    fn grpc(&mut self, old: &GrpcConfig, new: &GrpcConfig) -> GrpcConfig {
        let (was, is) = (&old.roles, &new.roles);
        let (limited, limits) = (&old.limits, &new.limits);
        GrpcConfig {
            socket: self.fixed("grpc.socket", &old.socket, &new.socket),
            abstract_name: self.fixed("grpc.abstract_name", &old.abstract_name, &new.abstract_name),
            tcp: self.fixed("grpc.tcp", &old.tcp, &new.tcp),
            roles: RolesConfig {
                operators: self.fixed("grpc.roles.operators", &was.operators, &is.operators),
                watchdogs: self.fixed("grpc.roles.watchdogs", &was.watchdogs, &is.watchdogs),
                tenants: self.fixed("grpc.roles.tenants", &was.tenants, &is.tenants),
                viewers: self.fixed("grpc.roles.viewers", &was.viewers, &is.viewers),
                others: self.fixed("grpc.roles.others", &was.others, &is.others),
            },
            limits: GrpcLimits {
                message_max: self.fixed("grpc.limits.message_max", &limited.message_max, &limits.message_max),
                calls_per_connection: self.fixed(
                    "grpc.limits.calls_per_connection",
                    &limited.calls_per_connection,
                    &limits.calls_per_connection,
                ),
                connections: self.fixed("grpc.limits.connections", &limited.connections, &limits.connections),
                streams: self.fixed("grpc.limits.streams", &limited.streams, &limits.streams),
                reader_patience: self.fixed(
                    "grpc.limits.reader_patience",
                    &limited.reader_patience,
                    &limits.reader_patience,
                ),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const WORKERS: &str = "llm: {path: /m.gguf}\nworkers: [{name: NAME, argv: [x], memory: {steady: 1MiB}}]";

    /// Every key with whether it is taken over; those of workers as `workers.NAME.key`.
    fn keys() -> Vec<(String, bool)> {
        let config = Config::parse(&WORKERS.replace("NAME", "name")).unwrap();
        let mut merge = Merge::default();
        assert_eq!(merge.config(&config, &config), config);
        assert_eq!(merge.changes, ChangedKeys::default());
        merge.seen
    }

    #[test]
    fn each_key_of_the_document_is_taken_over_or_needs_a_restart_as_it_says() {
        let document = include_str!("../../docs/operating.md");
        let listed = |heading: &str| -> BTreeSet<String> {
            let rows = document.lines().filter_map(|line| line.strip_prefix(heading));
            let names = rows.flat_map(|row| row.split('`').skip(1).step_by(2).map(str::to_owned));
            names.collect()
        };
        let of = |wanted: bool| -> BTreeSet<String> {
            let keys = keys().into_iter().filter(|(_, live)| *live == wanted);
            keys.map(|(key, _)| key.replace("workers.name.", "workers.NAME."))
                .collect()
        };
        assert_eq!(listed("| taken over |"), of(true));
        assert_eq!(listed("| needs a restart |"), of(false));
    }

    #[test]
    fn workers_that_come_go_or_change_their_order_need_a_restart() {
        let text = |names: [&str; 2]| {
            let worker = |name| format!("{{name: {name}, argv: [x], memory: {{steady: 1MiB}}}}");
            format!("workers: [{}, {}]", worker(names[0]), worker(names[1]))
        };
        let running = Config::parse(&text(["a", "b"])).unwrap();
        for (names, restart) in [
            (["a", "c"], vec!["workers.b", "workers.c"]),
            (["b", "a"], vec!["workers"]),
        ] {
            let (next, changes) = running.reloaded(&Config::parse(&text(names)).unwrap());
            assert_eq!(next, running);
            assert_eq!(
                (changes.applied, changes.restart),
                (Vec::new(), restart.iter().map(|key| (*key).to_owned()).collect())
            );
        }
    }

    #[test]
    fn what_is_taken_over_is_that_of_the_file_and_the_rest_stays() {
        let text = |argv: &str, autostart: bool, steady: &str| {
            format!("workers: [{{name: a, argv: [{argv}], autostart: {autostart}, memory: {{steady: {steady}}}}}]")
        };
        let running = Config::parse(&text("old", true, "1MiB")).unwrap();
        let file = Config::parse(&text("new", false, "2MiB")).unwrap();
        let (next, changes) = running.reloaded(&file);
        assert_eq!(next.workers[0].argv, ["new"]);
        assert!(next.workers[0].autostart);
        assert_eq!(changes.applied, ["workers.a.argv", "workers.a.memory"]);
        assert_eq!(changes.restart, ["workers.a.autostart"]);
        let again = next.reloaded(&file).1;
        assert_eq!(again.restart, ["workers.a.autostart"], "it is named until it is done");
    }
}
