//! Metrics of the LLM's requests, speed, context and conversations.

use std::{
    fmt,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use prometheus_client::{
    encoding::text::encode_registry,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use cotenant_policy::snapshot::EngineView;
use cotenant_units::Tokens;

use crate::table::{Labels, Size, Table, labels, raise};

/// Load reported by the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LlmLoad {
    /// Requests being answered.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
    /// Tokens in the KV cache.
    pub used: Tokens,
    /// Conversations kept for a later turn.
    pub conversations: usize,
    /// Their tokens.
    pub kept: Tokens,
    /// Kept tokens in blocks shared with other conversations.
    pub shared: Tokens,
    /// Conversations on disk.
    pub saved: usize,
    /// Their bytes.
    pub saved_bytes: u64,
    /// Conversations written to disk so far.
    pub written: u64,
    /// Conversations read back from disk so far.
    pub read_back: u64,
    /// Failed transfers so far.
    pub failed: u64,
    /// Tokens drafted so far.
    pub drafted: u64,
    /// Drafted tokens that were accepted.
    pub accepted: u64,
    /// Uses of a mixture's experts that were in memory.
    pub experts_found: u64,
    /// Uses for which they were read from disk.
    pub experts_read: u64,
}

#[derive(Debug)]
pub(crate) struct LlmMetrics {
    requests: Family<Labels<1>, Size>,
    kv_usage: Family<Labels<0>, Gauge<f64, AtomicU64>>,
    vllm: VllmNames,
    speed: Family<Labels<1>, Gauge<f64, AtomicU64>>,
    context: Family<Labels<1>, Size>,
    conversations: Size,
    conversation_tokens: Family<Labels<1>, Size>,
    saved: Size,
    saved_bytes: Size,
    transfers: Family<Labels<1>, Counter>,
    drafted: Family<Labels<1>, Counter>,
    experts: Family<Labels<1>, Counter>,
}

impl LlmMetrics {
    pub(crate) fn new(table: &mut Table) -> Self {
        Self {
            requests: table.add("llm_requests", "Requests being answered, and in the queue"),
            kv_usage: table.add(
                "llm_kv_usage_ratio",
                "Used part of the KV capacity that is in force",
            ),
            vllm: VllmNames::new(),
            speed: table.add(
                "llm_tokens_per_second",
                "Predicted answer tokens per second under the plan in force and under the full one",
            ),
            context: table.add(
                "llm_context_tokens",
                "KV capacity of the plan in force and of the full one",
            ),
            conversations: table.add("llm_conversations", "Conversations kept for a later turn"),
            conversation_tokens: table.add(
                "llm_conversation_tokens",
                "Tokens of kept conversations, and those of them in blocks that several share",
            ),
            saved: table.add("llm_saved_conversations", "Conversations on disk"),
            saved_bytes: table.add("llm_saved_bytes", "Bytes of conversations on disk"),
            transfers: table.add(
                "llm_saved_transfers",
                "Conversations written to disk and read back, and failed transfers",
            ),
            drafted: table.add("llm_drafted_tokens", "Tokens drafted, by outcome"),
            experts: table.add(
                "llm_expert_uses",
                "Uses of a mixture's experts, found in memory or read from disk",
            ),
        }
    }

    /// Sets the figures known to the arbiter.
    pub(crate) fn observe(&self, engine: &EngineView) {
        self.speed.clear();
        self.context.clear();
        let plans = [
            ("now", &engine.in_force, engine.milli_tokens_per_s),
            ("full", &engine.full, engine.full_milli_tokens_per_s),
        ];
        for (name, plan, speed) in plans {
            let labels = labels([("plan", name)]);
            if let Some(plan) = plan {
                let context = engine.context_of(plan);
                self.context
                    .get_or_create(&labels)
                    .set(context.get().into());
            }
            if let Some(speed) = speed {
                let thousandths = u32::try_from(speed).unwrap_or(u32::MAX);
                self.speed
                    .get_or_create(&labels)
                    .set(f64::from(thousandths) / 1000.0);
            }
        }
    }

    /// Enables or disables [`Self::encode_vllm`].
    pub(crate) fn show_vllm(&self, shown: bool) {
        self.vllm.shown.store(shown, Ordering::Relaxed);
    }

    /// Writes the load under vLLM's names, if enabled.
    ///
    /// # Errors
    /// Those of the writer.
    pub(crate) fn encode_vllm(&self, writer: &mut impl fmt::Write) -> fmt::Result {
        if self.vllm.shown.load(Ordering::Relaxed) {
            encode_registry(writer, &self.vllm.registry)?;
        }
        Ok(())
    }

    /// Sets the engine's report for `model`, and its KV capacity.
    pub(crate) fn set(&self, model: &str, load: &LlmLoad, capacity: Tokens) {
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        let states = [
            ("running", load.running, &self.vllm.running),
            ("waiting", load.waiting, &self.vllm.waiting),
        ];
        for (state, number, vllm) in states {
            self.requests
                .get_or_create(&labels([("state", state)]))
                .set(count(number));
            vllm.get_or_create(&labels([(MODEL_NAME, model)]))
                .set(count(number));
        }
        if capacity > Tokens::ZERO {
            let ratio = f64::from(load.used.get()) / f64::from(capacity.get());
            let used = [
                self.kv_usage.get_or_create(&[]),
                self.vllm.kv.get_or_create(&labels([(MODEL_NAME, model)])),
            ];
            for gauge in used {
                gauge.set(ratio.min(1.0));
            }
        }
        self.conversations.set(count(load.conversations));
        for (kind, tokens) in [("kept", load.kept), ("shared", load.shared)] {
            self.conversation_tokens
                .get_or_create(&labels([("kind", kind)]))
                .set(tokens.get().into());
        }
        self.saved.set(count(load.saved));
        self.saved_bytes.set(load.saved_bytes);
        let transfers = [
            ("written", load.written),
            ("read", load.read_back),
            ("failed", load.failed),
        ];
        for (kind, total) in transfers {
            let counter = self.transfers.get_or_create(&labels([("kind", kind)]));
            raise(&counter, total);
        }
        let rejected = load.drafted.saturating_sub(load.accepted);
        for (outcome, total) in [("accepted", load.accepted), ("rejected", rejected)] {
            let counter = self.drafted.get_or_create(&labels([("outcome", outcome)]));
            raise(&counter, total);
        }
        let uses = [("memory", load.experts_found), ("disk", load.experts_read)];
        for (place, total) in uses {
            raise(
                &self.experts.get_or_create(&labels([("from", place)])),
                total,
            );
        }
    }
}

/// The same load with vLLM's names and label, in a registry without our prefix.
#[derive(Debug)]
struct VllmNames {
    registry: Registry,
    running: Family<Labels<1>, Size>,
    waiting: Family<Labels<1>, Size>,
    kv: Family<Labels<1>, Gauge<f64, AtomicU64>>,
    shown: AtomicBool,
}

impl VllmNames {
    fn new() -> Self {
        let mut table = Table(Registry::default());
        Self {
            running: table.add(
                "vllm:num_requests_running",
                "As cotenant_llm_requests{state=\"running\"}",
            ),
            waiting: table.add(
                "vllm:num_requests_waiting",
                "As cotenant_llm_requests{state=\"waiting\"}",
            ),
            kv: table.add(
                "vllm:kv_cache_usage_perc",
                "As cotenant_llm_kv_usage_ratio: 0 to 1",
            ),
            registry: table.0,
            shown: AtomicBool::new(false),
        }
    }
}

/// vLLM's label for the model.
const MODEL_NAME: &str = "model_name";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Metrics;

    #[test]
    fn the_load_has_vllms_names_where_they_are_wanted() {
        let metrics = Metrics::new();
        let load = LlmLoad {
            running: 2,
            waiting: 1,
            used: Tokens::new(512),
            ..LlmLoad::default()
        };
        metrics.set_llm("tiny", &load, Tokens::new(2048));
        assert!(!metrics.encode().contains("vllm:"), "off by default");
        metrics.show_vllm_names(true);
        let text = metrics.encode();
        for series in [
            r#"vllm:num_requests_running{model_name="tiny"} 2"#,
            r#"vllm:num_requests_waiting{model_name="tiny"} 1"#,
            r#"vllm:kv_cache_usage_perc{model_name="tiny"} 0.25"#,
            "# EOF",
        ] {
            assert_eq!(
                text.lines().filter(|line| *line == series).count(),
                1,
                "{series} in\n{text}"
            );
        }
        assert!(text.ends_with("# EOF\n"));
        metrics.show_vllm_names(false);
        assert!(!metrics.encode().contains("vllm:"));
    }
}
