//! Decisions about the engine's load, plans and failures.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{growth_wait::unless_zero, reason::PlanSize, residency::FloorError};
use cotenant_units::Bytes;

/// A decision about the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum EngineDecision {
    /// The model is not loaded: its floor exceeds all memory that can become free.
    #[error(
        "the model is not loaded: {error} with all memory free; use a smaller model or `llm.kv_floor`, or a larger \
         budget"
    )]
    FloorExceedsBudget { error: FloorError },
    /// A model was inspected without an engine in the configuration.
    #[error("`{model}` was inspected, and no engine is configured")]
    NotConfigured { model: String },
    /// A model was inspected while another is loaded; ignored.
    #[error("`{model}` was inspected while a model is loaded: ignored")]
    AlreadyLoaded { model: String },
    /// The memory of a model was inspected.
    #[error("`{model}` has {layers} layers, {token} of KV for each token and needs {full} in full")]
    Inspected {
        model: String,
        layers: u32,
        /// KV of one token.
        token: Bytes,
        full: Bytes,
    },
    /// A model that failed is loaded after a back-off.
    #[error("the model was inspected again; it is loaded in {:.1} s", wait.as_secs_f64())]
    LoadDelayed { wait: Duration },
    /// The floor does not fit now.
    #[error(
        "the engine waits for memory: {error}: {free} is free, {kept} is kept for workers, headroom is {headroom} \
         with a watermark of {watermark}"
    )]
    WaitsForMemory {
        error: FloorError,
        free: Bytes,
        /// Reserved for workers.
        kept: Bytes,
        headroom: Bytes,
        watermark: Bytes,
    },
    /// Loading of the model begins.
    #[error(
        "loading the engine with {plan}, {full} in full: {free} is free after it, {kept} of that is kept for workers"
    )]
    Loading {
        plan: PlanSize,
        full: Bytes,
        free: Bytes,
        /// Part of `free` that is reserved for workers.
        kept: Bytes,
    },
    /// A report about a plan that is not pending was ignored.
    #[error("report about plan {revision} ignored: {stray}")]
    StrayPlan { revision: u64, stray: StrayPlan },
    /// A plan is in force.
    #[error("{}", outcome.with(*revision, took.as_millis(), plan.as_ref(), *used, *free))]
    Applied {
        revision: u64,
        outcome: PlanOutcome,
        plan: Option<PlanSize>,
        used: Bytes,
        free: Bytes,
        took: Duration,
    },
    /// A shed freed less than promised.
    #[error("engine promised {promised}, {credited} are credited and the kernel shows {freed}")]
    Short {
        promised: Bytes,
        credited: Bytes,
        freed: Bytes,
    },
    /// A plan could not be applied.
    #[error(
        "the engine could not apply plan {revision} ({plan}): {reason}; in force was {}",
        or_empty(in_force.as_ref())
    )]
    NotApplied {
        revision: u64,
        reason: String,
        plan: PlanSize,
        in_force: Option<PlanSize>,
    },
    /// The engine is gone, and its `freed` bytes were removed from the ledger.
    #[error("the LLM has failed: {reason}; {freed} removed from the ledger; {next}")]
    Gone {
        reason: String,
        freed: Bytes,
        next: NextLoad,
    },
    /// The running answer has lost its oldest tokens, as its request allows.
    #[error(
        "the answer dropped the {tokens} oldest tokens of its context, as its request allows: {in_all} in all"
    )]
    ContextLost { tokens: u32, in_all: u32 },
    /// The plan in force is unknown; the last known one is sent again.
    #[error("the plan in force is unknown; requesting the last known one")]
    Unconfirmed,
    /// A plan was not answered in time, and is sent again.
    #[error(
        "the engine did not reply to plan {revision} within {:.1} s; requesting it again",
        after.as_secs_f64()
    )]
    Unanswered { revision: u64, after: Duration },
}

/// Why a report about a plan is ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum StrayPlan {
    #[error("the engine holds no lease")]
    NoLease,
    #[error("it is of an earlier load")]
    EarlierLoad,
    #[error("it failed, and is no longer waited for: {reason}")]
    Failed { reason: String },
}

/// Effect of a plan in force; `freed` as measured by the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlanOutcome {
    /// The engine is ready.
    Ready,
    Shed {
        credited: Bytes,
        freed: Bytes,
        /// Bytes given up that had never been touched.
        untouched: Bytes,
    },
    /// The larger chunk of a prompt has ended; smaller ones follow.
    ChunkEnded {
        credited: Bytes,
        freed: Bytes,
    },
    Grown,
    /// The plan was already in force.
    Confirmed,
}

/// When the engine is loaded again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum NextLoad {
    #[error("loading again in {:.1} s", .0.as_secs_f64())]
    In(Duration),
    /// After reading its file again.
    #[error("reading its file again in {:.1} s", .0.as_secs_f64())]
    ReadIn(Duration),
    /// After a change of the file or the settings.
    #[error("no reload until that changes")]
    NeedsChange,
    /// Not again: it failed too often.
    #[error("it failed too often and is not reloaded")]
    GivenUp,
    /// After the disk has answered; pending reads keep `left`.
    #[error("hung reads hold {left}, and it is inspected again once the disk responds")]
    WaitsForDisk { left: Bytes },
    #[error("there is nothing to load")]
    NothingToLoad,
}

impl PlanOutcome {
    fn with(
        &self,
        revision: u64,
        ms: u128,
        plan: Option<&PlanSize>,
        used: Bytes,
        free: Bytes,
    ) -> String {
        let holds = format!("{}, uses {used}", or_empty(plan));
        match self {
            Self::Ready => format!("engine ready after {ms} ms: {holds}"),
            Self::Shed {
                credited,
                freed,
                untouched,
            } => {
                let untouched = unless_zero(" and ", *untouched, " had not been touched");
                format!(
                    "engine shed {credited} in {ms} ms, the kernel shows {freed}{untouched}: {holds}; {free} is free"
                )
            }
            Self::ChunkEnded { credited, freed } => format!(
                "a prompt chunk ended, and smaller ones follow: engine shed {credited} in {ms} ms, the kernel \
                 shows {freed}: {holds}; {free} is free"
            ),
            Self::Grown => format!("engine has grown in {ms} ms: {holds}; {free} is free"),
            Self::Confirmed => format!("engine applied plan {revision} in {ms} ms: {holds}"),
        }
    }
}

fn or_empty(plan: Option<&PlanSize>) -> String {
    plan.map(ToString::to_string).unwrap_or_default()
}
