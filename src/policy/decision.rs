//! Decisions with their figures, one enum for each machine.
//!
//! A decision is a value, so that tests, metrics and `cotenant why` match on it; no wording is part of a decision.

use serde::{Deserialize, Serialize};

pub use self::{
    admission::AdmissionDecision,
    engine::{EngineDecision, NextLoad, PlanOutcome, StrayPlan},
    growth::GrowthDecision,
    lease::{Claim, LeaseDecision, LeaseEnd, NotReduced},
    memory::MemoryDecision,
    worker::{ChangeCause, StrayReport, WorkerDecision},
};

mod admission;
mod engine;
mod growth;
mod lease;
mod memory;
mod worker;

/// A decision of one of the machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// About a lease that is held or ends.
    Lease(LeaseDecision),
    /// About a request that waits, is granted or denied.
    Admission(AdmissionDecision),
    /// About the engine's load, plans and failures.
    Engine(EngineDecision),
    /// About a worker's start, size and end.
    Worker(WorkerDecision),
    /// About what grows back, and when.
    Growth(GrowthDecision),
    /// About memory without a holder.
    Memory(MemoryDecision),
}

macro_rules! wrapped {
    ($($machine:ident($decision:ident)),* $(,)?) => {
        $(impl From<$decision> for Decision {
            fn from(decision: $decision) -> Self {
                Self::$machine(decision)
            }
        })*
    };
}

wrapped!(
    Lease(LeaseDecision),
    Admission(AdmissionDecision),
    Engine(EngineDecision),
    Worker(WorkerDecision),
    Growth(GrowthDecision),
    Memory(MemoryDecision),
);
