//! Merge of a changed file into a running configuration, key by key.
//!
//! Every field of [`Config`] is destructured here with its key, so that a new setting does not compile until it is
//! assigned.

use super::{
    BudgetConfig, Config, Confinement, GrpcConfig, GrpcLimits, HttpConfig, JournalConfig,
    LeaseConfig, LlmConfig, LogConfig, SafeProfileConfig, SheddingConfig, TelemetryConfig,
    Watermarks, WorkerConfig, WyomingConfig,
};
use cotenant_policy::{
    compute::DeviceSettings, event::ChangedKeys, params::ClassDeadlines, roles::Members,
};

/// Returns the settings of `running` updated with those of `file` that apply without a restart, and the keys that
/// differ.
///
/// ```
/// use cotenant_config::{Config, reloaded};
/// let running = Config::parse("log: {filter: info, format: text}").unwrap();
/// let file = Config::parse("log: {filter: debug, format: json}").unwrap();
/// let (next, changes) = reloaded(&running, &file);
/// assert_eq!((next.log.filter.as_str(), next.log.format), ("debug", running.log.format));
/// assert_eq!((changes.applied, changes.restart), (vec!["log.filter".to_owned()], vec!["log.format".to_owned()]));
/// ```
pub fn reloaded(running: &Config, file: &Config) -> (Config, ChangedKeys) {
    let mut merge = Merge::default();
    let config = merge.config(running, file);
    (config, merge.changes)
}

/// Applies or keeps settings, and records their keys.
#[derive(Default)]
struct Merge {
    changes: ChangedKeys,
    /// Every key examined, and whether it is applied.
    #[cfg(test)]
    seen: Vec<(String, bool)>,
}

/// Builds a struct of settings field by field: fields after `live` are applied, fields after `fixed` kept. A field's
/// key is its own name below `at`, or the name after `as`.
macro_rules! merged {
    (
        $merge:ident, $at:expr, $old:expr, $new:expr,
        $type:ident { $($how:ident: $($field:ident $(as $key:literal)?),+;)* $(@ $($part:ident = $value:expr),+;)? }
    ) => {
        $type {
            $($($field: {
                let key = merged!(key $at, $field $($key)?);
                $merge.$how(&key, &$old.$field, &$new.$field)
            },)+)*
            $($($part: $value,)+)?
        }
    };
    (key $at:expr, $field:ident) => { format!("{}{}", $at, stringify!($field)) };
    (key $at:expr, $field:ident $key:literal) => { format!("{}{}", $at, $key) };
}

impl Merge {
    /// Applies a setting.
    fn live<T: Clone + PartialEq>(&mut self, key: &str, old: &T, new: &T) -> T {
        #[cfg(test)]
        self.seen.push((key.to_owned(), true));
        if old != new {
            self.changes.applied.push(key.to_owned());
        }
        new.clone()
    }

    /// Keeps a setting until the supervisor restarts.
    fn fixed<T: Clone + PartialEq>(&mut self, key: &str, old: &T, new: &T) -> T {
        #[cfg(test)]
        self.seen.push((key.to_owned(), false));
        if old != new {
            self.changes.restart.push(key.to_owned());
        }
        old.clone()
    }

    fn config(&mut self, old: &Config, new: &Config) -> Config {
        merged!(self, "", old, new, Config {
            @ budget = self.budget(&old.budget, &new.budget),
                shedding = self.shedding(old.shedding, new.shedding),
                leases = merged!(self, "leases.", old.leases, new.leases, LeaseConfig {
                    live: term_min, term_max, wait_max, queue_max, per_user_max;
                }),
                llm = match (&old.llm, &new.llm) {
                    (Some(old), Some(new)) => Some(self.llm(old, new)),
                    (old, new) => self.fixed("llm", old, new),
                },
                workers = self.workers(&old.workers, &new.workers),
                http = merged!(self, "http.", old.http, new.http, HttpConfig {
                    fixed: listen;
                    live: allowed_hosts, trusted_proxies, keys_file, keyless, models, voices;
                }),
                wyoming = merged!(self, "wyoming.", old.wyoming, new.wyoming, WyomingConfig {
                    fixed: listen, languages, system, wait_max, audio_max, connections_max, conversations_max, history_max;
                }),
                grpc = self.grpc(&old.grpc, &new.grpc),
                journal = match (&old.journal, &new.journal) {
                    (Some(old), Some(new)) => {
                        Some(merged!(self, "journal.", old, new, JournalConfig { fixed: path, max_size; }))
                    }
                    (old, new) => self.fixed("journal.path", old, new),
                },
                safe_profile = merged!(self, "safe_profile.", old.safe_profile, new.safe_profile, SafeProfileConfig {
                    fixed: crashes, within;
                }),
                state_dir = self.fixed("state_dir", &old.state_dir, &new.state_dir),
                runtime_dir = self.fixed("runtime_dir", &old.runtime_dir, &new.runtime_dir),
                log = merged!(self, "log.", old.log, new.log, LogConfig { live: filter; fixed: format; }),
                telemetry = merged!(self, "telemetry.", old.telemetry, new.telemetry, TelemetryConfig {
                    fixed: otlp, otlp_ca, otlp_events;
                    live: vllm_names;
                });
        })
    }

    fn budget(&mut self, old: &BudgetConfig, new: &BudgetConfig) -> BudgetConfig {
        merged!(self, "budget.", old, new, BudgetConfig {
            live: total, reserve;
            fixed: scope;
            live: hysteresis, dwell, grace, fill_rate_mib_per_s as "fill_rate_max", sample_min, sample_max;
            @ watermarks = merged!(self, "budget.watermarks.", old.watermarks, new.watermarks, Watermarks {
                live: elevated, critical, last_resort;
            });
        })
    }

    fn shedding(&mut self, old: SheddingConfig, new: SheddingConfig) -> SheddingConfig {
        merged!(self, "shedding.", old, new, SheddingConfig {
            live: reclaim_min, settle, verify_timeout;
            @ deadlines = merged!(self, "shedding.deadlines.", old.deadlines, new.deadlines, ClassDeadlines {
                live: audio_realtime as "audio-realtime", interactive, llm_elastic as "llm-elastic", batch;
            });
        })
    }

    fn llm(&mut self, old: &LlmConfig, new: &LlmConfig) -> LlmConfig {
        merged!(self, "llm.", old, new, LlmConfig {
            fixed: path, name, threads, parallel, drafts, conversations, keep_conversations, context, vocabulary, answer_tokens_max, answer_time_max, answer_time_shared, kv_floor, kv_memory,
                kv_type, kv_type_least, prefill_chunk, prefill_chunk_max, mode, resident_layers_min, after, load_timeout,
                apply_timeout, restart;
            @ device = merged!(self, "llm.", old.device, new.device, DeviceSettings {
                fixed: choice as "device", memory as "cuda.memory", kernels as "cuda.kernels";
            });
        })
    }

    /// Merges workers by name; an added, removed or reordered worker requires a restart.
    fn workers(&mut self, old: &[WorkerConfig], new: &[WorkerConfig]) -> Vec<WorkerConfig> {
        let names = |workers: &[WorkerConfig]| -> Vec<String> {
            workers.iter().map(|worker| worker.name.clone()).collect()
        };
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
        let at = format!("workers.{}.", old.name);
        merged!(self, at, old, new, WorkerConfig {
            fixed: role;
            live: argv, env, working_dir;
            fixed: protocol, model;
            live: listen as "socket", ready, class, memory, restart, stop_grace, oom_score_adj;
            fixed: autostart;
            live: pinned;
            fixed: after, lease;
            live: idle;
            fixed: wake_timeout, answer_timeout;
            live: pressure;
            @ name = old.name.clone(),
                confinement = self.confinement(&at, &old.confinement, &new.confinement);
        })
    }

    fn confinement(&mut self, at: &str, old: &Confinement, new: &Confinement) -> Confinement {
        let limits = |it: &Confinement| (it.memory, it.resources.clone());
        let (memory, resources) = self.live(&format!("{at}limits"), &limits(old), &limits(new));
        let sandbox = |it: &Confinement| (it.files.clone(), it.syscalls, it.required);
        let (files, syscalls, required) =
            self.live(&format!("{at}sandbox"), &sandbox(old), &sandbox(new));
        merged!(self, at, old, new, Confinement {
            live: user, group;
            @ memory = memory, resources = resources, files = files, syscalls = syscalls, required = required;
        })
    }

    fn grpc(&mut self, old: &GrpcConfig, new: &GrpcConfig) -> GrpcConfig {
        merged!(self, "grpc.", old, new, GrpcConfig {
            fixed: socket, abstract_name, tcp;
            @ roles = merged!(self, "grpc.roles.", old.roles, new.roles, Members {
                    fixed: operators, watchdogs, delegates, tenants, viewers, others;
                }),
                limits = merged!(self, "grpc.limits.", old.limits, new.limits, GrpcLimits {
                    fixed: message_max, calls_per_connection, connections, streams, reader_patience;
                });
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const WORKERS: &str =
        "llm: {path: /m.gguf}\nworkers: [{name: NAME, argv: [x], memory: {steady: 1MiB}}]";

    /// Returns every key with whether it is applied; those of workers as `workers.NAME.key`.
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
            let rows = document
                .lines()
                .filter_map(|line| line.strip_prefix(heading));
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
            let (next, changes) = reloaded(&running, &Config::parse(&text(names)).unwrap());
            assert_eq!(next, running);
            assert_eq!(
                (changes.applied, changes.restart),
                (
                    Vec::new(),
                    restart.iter().map(|key| (*key).to_owned()).collect()
                )
            );
        }
    }

    #[test]
    fn what_is_taken_over_is_that_of_the_file_and_the_rest_stays() {
        let text = |argv: &str, autostart: bool, steady: &str| {
            format!(
                "workers: [{{name: a, argv: [{argv}], autostart: {autostart}, memory: {{steady: {steady}}}}}]"
            )
        };
        let running = Config::parse(&text("old", true, "1MiB")).unwrap();
        let file = Config::parse(&text("new", false, "2MiB")).unwrap();
        let (next, changes) = reloaded(&running, &file);
        assert_eq!(next.workers[0].argv, ["new"]);
        assert!(next.workers[0].autostart);
        assert_eq!(changes.applied, ["workers.a.argv", "workers.a.memory"]);
        assert_eq!(changes.restart, ["workers.a.autostart"]);
        let again = reloaded(&next, &file).1;
        assert_eq!(
            again.restart,
            ["workers.a.autostart"],
            "it is named until it is done"
        );
    }
}
