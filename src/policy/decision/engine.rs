//! Decisions about the engine's load, plans and failures.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    policy::{reason::PlanSize, residency::FloorError},
    units::Bytes,
};

/// A decision about the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineDecision {
    /// The model is not loaded, since no memory that comes free would suffice.
    FloorExceedsBudget { error: FloorError },
    /// A model was inspected, and no engine is configured.
    NotConfigured { model: String },
    /// A model was inspected while one is loaded, and is ignored.
    AlreadyLoaded { model: String },
    /// The memory of a model is known.
    Inspected {
        model: String,
        layers: u32,
        /// KV of one token.
        token: Bytes,
        full: Bytes,
    },
    /// A model that failed is loaded again after a wait.
    LoadDelayed { wait: Duration },
    /// The floor does not fit now.
    WaitsForMemory {
        error: FloorError,
        free: Bytes,
        /// Kept for workers.
        kept: Bytes,
        headroom: Bytes,
        watermark: Bytes,
    },
    /// The model is loaded.
    Loading {
        plan: PlanSize,
        full: Bytes,
        free: Bytes,
        /// Kept for workers, of what is free.
        kept: Bytes,
    },
    /// A report about a plan that is not waited for is ignored.
    StrayPlan { revision: u64, stray: StrayPlan },
    /// A plan is in force.
    Applied { revision: u64, outcome: PlanOutcome, plan: Option<PlanSize>, used: Bytes, free: Bytes, took: Duration },
    /// A shed gave back less than it promised.
    Short { promised: Bytes, credited: Bytes, freed: Bytes },
    /// A plan could not be applied.
    NotApplied { revision: u64, reason: String, plan: PlanSize, in_force: Option<PlanSize> },
    /// The engine is gone, and `freed` off the book.
    Gone { reason: String, freed: Bytes, next: NextLoad },
    /// The running answer has lost its oldest tokens, as its request allows.
    ContextLost { tokens: u32, in_all: u32 },
    /// The plan in force is unknown, and the last known one is asked for.
    Unconfirmed,
    /// A plan was not answered in time, and is asked for again.
    Unanswered { revision: u64, after: Duration },
}

/// Why a report about a plan is ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StrayPlan {
    /// The engine holds no lease.
    NoLease,
    /// It is of an earlier load.
    EarlierLoad,
    /// It failed, and is not waited for any more.
    Failed { reason: String },
}

/// The effect of a plan that is in force; `freed` as the kernel shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlanOutcome {
    /// The engine is ready.
    Ready,
    Shed {
        credited: Bytes,
        freed: Bytes,
        /// Given up, and never touched.
        untouched: Bytes,
    },
    /// A prompt's larger chunk has ended, and smaller ones follow.
    ChunkEnded {
        credited: Bytes,
        freed: Bytes,
    },
    Grown,
    /// It is what was in force.
    Confirmed,
}

/// When an engine that is gone is loaded again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NextLoad {
    In(Duration),
    /// It failed too often.
    GivenUp,
    /// When the disk has answered; reads that hang keep so much.
    WaitsForDisk {
        left: Bytes,
    },
    NothingToLoad,
}
