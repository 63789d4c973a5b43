//! State of the HTTP status endpoints.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::{control_handle::ControlHandle, engine::CurrentEngine};
use cotenant_config::{Config, WorkerRole};
use cotenant_http::backend::{
    Asked, HistoryQuery, ModelInfo, ModelKind, RunningAnswers, StatusBackend, Voice,
};
use cotenant_memory::emergency;
use cotenant_policy::{event::Answer, snapshot::Snapshot};
use cotenant_probe::{ProbeRoot, board::Board};
use cotenant_rpc::{Supervisor as _, json};
use cotenant_telemetry::{LinesDropped, LlmLoad, Metrics, NodeInfo, Tracer};
use cotenant_units::{Bytes, Tokens, lock::locked};

/// State, metrics and names shown over HTTP.
pub(super) struct Status {
    control: Arc<ControlHandle>,
    metrics: Arc<Metrics>,
    engine: Option<CurrentEngine>,
    dropped: LinesDropped,
    tracer: Tracer,
    /// Start time in seconds since 1970.
    created: u64,
    host: Option<String>,
    board: Board,
    names: Mutex<Names>,
}

struct Names {
    /// Name of the LLM; empty without one.
    llm: String,
    models: Vec<ModelInfo>,
    voices: Vec<Voice>,
}

impl Status {
    pub(super) fn new(
        control: &Arc<ControlHandle>,
        metrics: &Arc<Metrics>,
        config: &Config,
        engine: Option<CurrentEngine>,
        dropped: LinesDropped,
        tracer: Tracer,
    ) -> Self {
        let created = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |time| time.as_secs());
        let status = Self {
            control: Arc::clone(control),
            metrics: Arc::clone(metrics),
            engine,
            dropped,
            tracer,
            created,
            host: nix::unistd::gethostname()
                .ok()
                .and_then(|name| name.into_string().ok()),
            board: Board::read(&ProbeRoot::default()),
            names: Mutex::new(Names::of(config, created)),
        };
        status.identify(config);
        status
    }

    /// Applies names and identity of a changed configuration.
    pub(super) fn reconfigure(&self, config: &Config) {
        *locked(&self.names) = Names::of(config, self.created);
        self.identify(config);
    }

    /// Returns the last death of each worker, without its output.
    fn post_mortems(&self) -> Value {
        let state = self.control.state();
        let names = state.workers.iter().map(|worker| worker.name.as_str());
        let last = names.filter_map(|name| self.control.deaths().last(Some(name), 1).pop());
        last.map(|death| {
            let verdict = &death.verdict;
            json!({
                "worker": death.worker,
                "endedTimeMs": death.end.ended_unix_us / 1000,
                "sentence": verdict.sentence,
                "class": verdict.class,
                "confidence": verdict.confidence,
                "evidence": verdict.evidence,
                "remedy": verdict.remedy,
                "peakResidentBytes": death.memory.peak_resident,
            })
        })
        .collect()
    }

    /// Publishes the configuration in force, and the board.
    fn identify(&self, config: &Config) {
        self.metrics.show_vllm_names(config.telemetry.vllm_names);
        self.metrics.set_node(&NodeInfo {
            board: self.board.model.clone().unwrap_or_default(),
            l4t: self
                .board
                .l4t
                .map_or_else(String::new, |l4t| l4t.to_string()),
            model: locked(&self.names).llm.clone(),
            config_hash: config.hash(),
        });
    }
}

impl Names {
    fn of(config: &Config, created: u64) -> Self {
        let aliases = |name: &str| -> Vec<String> {
            let aliases = config
                .http
                .models
                .iter()
                .filter(|(_, model)| *model == name);
            aliases.map(|(alias, _)| alias.clone()).collect()
        };
        let mut models = Vec::new();
        if let Some(llm) = &config.llm {
            let file = std::fs::metadata(&llm.path).ok();
            let made = file.as_ref().and_then(|file| file.modified().ok());
            models.push(ModelInfo {
                id: llm.name.clone(),
                aliases: aliases(&llm.name),
                kind: ModelKind::Chat,
                created: made
                    .and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok())
                    .map_or(created, |time| time.as_secs()),
                bytes: file.map_or(Bytes::ZERO, |file| Bytes::new(file.len())),
                weights: None,
            });
        }
        for worker in &config.workers {
            let kind = match worker.role {
                WorkerRole::Asr => ModelKind::Transcription,
                WorkerRole::Embedding => ModelKind::Embedding,
                WorkerRole::Tts => ModelKind::Speech,
                WorkerRole::Other => continue,
            };
            models.push(ModelInfo {
                id: worker.name.clone(),
                aliases: aliases(&worker.name),
                kind,
                created,
                bytes: Bytes::ZERO,
                weights: None,
            });
        }
        let mut voices: Vec<Voice> = Vec::new();
        for (alias, name) in &config.http.voices {
            match voices.iter_mut().find(|voice| voice.name == *name) {
                Some(voice) => voice.aliases.push(alias.clone()),
                None => voices.push(Voice {
                    name: name.clone(),
                    aliases: vec![alias.clone()],
                }),
            }
        }
        // The first voice is the default, also for unknown names.
        voices.sort_by_key(|voice| !voice.aliases.iter().any(|alias| alias == "default"));
        let llm = config.llm.as_ref();
        Self {
            llm: llm.map_or_else(String::new, |llm| llm.name.clone()),
            models,
            voices,
        }
    }
}

impl StatusBackend for Status {
    fn ask(&self, asked: Asked) -> BoxFuture<'static, Option<Answer>> {
        let ticket = self.control.ticket();
        let (sender, receiver) = oneshot::channel();
        let sent = self.control.submit(asked(ticket), Some((ticket, sender)));
        Box::pin(async move {
            sent.ok()?;
            receiver.await.ok()
        })
    }

    fn snapshot(&self) -> Arc<Snapshot> {
        self.control.state()
    }

    fn sample_age(&self) -> Option<Duration> {
        self.control.sample_age()
    }

    fn metrics(&self) -> String {
        let state = self.control.state();
        self.metrics.observe(&state);
        self.metrics
            .set_heartbeat_age("loop", self.control.since_beat());
        if let Some(age) = self.control.sample_age() {
            self.metrics.set_heartbeat_age("sampling", age);
        }
        self.metrics.set_log_dropped(self.dropped.get());
        let (exported, dropped) = self.tracer.counts();
        self.metrics.set_spans(exported, dropped);
        let reserve = emergency::counts();
        self.metrics.set_standby(reserve.served, reserve.missed);
        if let Some(engine) = &self.engine {
            let snapshot = engine.handle().snapshot();
            self.metrics.set_command_gap(snapshot.command_gap_max);
            let experts = snapshot.experts.unwrap_or_default();
            let load = LlmLoad {
                running: snapshot.running.len(),
                waiting: snapshot.queued,
                used: snapshot.position,
                conversations: snapshot.kept.len(),
                kept: Tokens::new(snapshot.kept.iter().map(|kept| kept.tokens.get()).sum()),
                shared: Tokens::new(snapshot.kept.iter().map(|kept| kept.shared.get()).sum()),
                saved: snapshot.saved.conversations.len(),
                saved_bytes: snapshot.saved.bytes.get(),
                written: snapshot.saved.counts.saved,
                read_back: snapshot.saved.counts.reloaded,
                failed: snapshot.saved.counts.failed,
                drafted: snapshot.tokens_drafted,
                accepted: snapshot.drafts_accepted,
                experts_found: experts.found,
                experts_read: experts.read,
            };
            let capacity = snapshot.plan.as_ref().map(|plan| plan.kv_capacity);
            self.metrics.set_llm(
                &locked(&self.names).llm,
                &load,
                capacity.unwrap_or_default(),
            );
            if let (Some(shape), Some(plan)) = (&snapshot.shape, &snapshot.plan) {
                self.metrics
                    .set_kv_used(shape.kv.capacity_bytes(snapshot.position, plan.kv_type));
            }
        }
        self.metrics.encode()
    }

    fn document(&self) -> Value {
        let mut document = json::document(&*self.control);
        if let Some(fields) = document.as_object_mut() {
            fields.insert("host".to_owned(), json!(self.host));
            fields.insert("board".to_owned(), json!(self.board.model));
            fields.insert("postMortems".to_owned(), self.post_mortems());
        }
        document
    }

    fn history(&self, query: &HistoryQuery) -> Value {
        self.control.history().document(query)
    }

    fn request_ended(&self, route: &str, code: u16, took: Duration) {
        self.metrics.request(route, code, took);
    }

    fn answers(&self) -> &RunningAnswers {
        self.control.answers()
    }

    fn first_token(&self, took: Duration) {
        self.metrics.first_token(took);
    }

    fn models(&self) -> Vec<ModelInfo> {
        let mut models = locked(&self.names).models.clone();
        let weights = self.engine.as_ref().and_then(CurrentEngine::weights);
        models
            .iter_mut()
            .filter(|model| model.kind == ModelKind::Chat)
            .for_each(|model| model.weights.clone_from(&weights));
        models
    }

    fn template(&self) -> Option<String> {
        self.engine.as_ref()?.handle().template()
    }

    fn voices(&self) -> Vec<Voice> {
        locked(&self.names).voices.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_voice_that_is_called_the_default_speaks_when_none_is_named() {
        let config = |voices: &str| {
            let text = format!("budget: {{total: 1GiB}}\nhttp: {{voices: {{{voices}}}}}\n");
            Config::parse(&text).unwrap()
        };
        let first = |voices: &str| {
            Names::of(&config(voices), 0)
                .voices
                .first()
                .map(|voice| voice.name.clone())
        };
        assert_eq!(
            first("alloy: amy, nova: lessac, default: lessac").as_deref(),
            Some("lessac")
        );
        assert_eq!(first("alloy: amy, nova: lessac").as_deref(), Some("amy"));
    }
}
