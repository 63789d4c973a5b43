//! Metrics of the LLM's requests, speed, context and conversations.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};

use cotenant_policy::{residency::EnginePlan, snapshot::EngineView};
use cotenant_units::Tokens;

use crate::table::{Labels, Size, Table, labels, raise};

/// What the engine itself reports.
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
    /// The part of these in blocks that other conversations have as well.
    pub shared: Tokens,
    /// Tokens drafted so far.
    pub drafted: u64,
    /// The part of these that was accepted.
    pub accepted: u64,
}

/// The series.
#[derive(Debug)]
pub(crate) struct LlmMetrics {
    requests: Family<Labels<1>, Size>,
    kv_usage: Family<Labels<0>, Gauge<f64, AtomicU64>>,
    speed: Family<Labels<1>, Gauge<f64, AtomicU64>>,
    context: Family<Labels<1>, Size>,
    conversations: Size,
    conversation_tokens: Family<Labels<1>, Size>,
    drafted: Family<Labels<1>, Counter>,
}

impl LlmMetrics {
    pub(crate) fn new(table: &mut Table) -> Self {
        Self {
            requests: table.add("llm_requests", "Requests being answered, and in the queue"),
            kv_usage: table.add(
                "llm_kv_usage_ratio",
                "Used part of the KV capacity that is in force",
            ),
            speed: table.add(
                "llm_tokens_per_second",
                "Tokens of an answer per second under the plan in force and under the full one, as reckoned",
            ),
            context: table.add(
                "llm_context_tokens",
                "KV capacity of the plan in force and of the full one",
            ),
            conversations: table.add(
                "llm_conversations",
                "Conversations kept for a later turn",
            ),
            conversation_tokens: table.add(
                "llm_conversation_tokens",
                "Tokens of kept conversations, and those of them in blocks that several share",
            ),
            drafted: table.add(
                "llm_drafted_tokens",
                "Tokens drafted from repetitions, by what became of them",
            ),
        }
    }

    /// Takes over what the arbiter knows.
    pub(crate) fn observe(&self, engine: &EngineView) {
        self.speed.clear();
        self.context.clear();
        let plans = [
            ("now", &engine.in_force, engine.milli_tokens_per_s),
            ("full", &engine.full, engine.full_milli_tokens_per_s),
        ];
        for (name, plan, speed) in plans {
            let labels = labels([("plan", name)]);
            if let Some(EnginePlan { kv_capacity, .. }) = plan {
                self.context
                    .get_or_create(&labels)
                    .set(kv_capacity.get().into());
            }
            if let Some(speed) = speed {
                let thousandths = u32::try_from(speed).unwrap_or(u32::MAX);
                self.speed
                    .get_or_create(&labels)
                    .set(f64::from(thousandths) / 1000.0);
            }
        }
    }

    /// Takes over what the engine reports, with its KV capacity.
    pub(crate) fn set(&self, load: &LlmLoad, capacity: Tokens) {
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        for (state, number) in [("running", load.running), ("waiting", load.waiting)] {
            self.requests
                .get_or_create(&labels([("state", state)]))
                .set(count(number));
        }
        if capacity > Tokens::ZERO {
            let ratio = f64::from(load.used.get()) / f64::from(capacity.get());
            self.kv_usage.get_or_create(&[]).set(ratio.min(1.0));
        }
        self.conversations.set(count(load.conversations));
        for (kind, tokens) in [("kept", load.kept), ("shared", load.shared)] {
            self.conversation_tokens
                .get_or_create(&labels([("kind", kind)]))
                .set(tokens.get().into());
        }
        let rejected = load.drafted.saturating_sub(load.accepted);
        for (outcome, total) in [("accepted", load.accepted), ("rejected", rejected)] {
            let counter = self.drafted.get_or_create(&labels([("outcome", outcome)]));
            raise(&counter, total);
        }
    }
}
