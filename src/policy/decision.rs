//! Decisions with their figures, one enum for each machine.
//!
//! A decision is a value, so that tests, metrics and `cotenant why` match on it. The sentence beside each variant is no
//! part of the value; `thiserror` derives `Display` from it.
#![expect(missing_docs, reason = "fields are named by what they hold")]

mod engine;
mod lease;
mod worker;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::{
    engine::{EngineDecision, NextLoad, PlanOutcome, StrayPlan},
    lease::{Claim, LeaseDecision, LeaseEnd, NotReduced},
    worker::{ChangeCause, StrayReport, WorkerDecision},
};
use crate::{
    denial::Denial,
    growth_wait::GrowthWait,
    lease::{Class, LeaseName},
    page_pool::Release,
    params::MachineMemory,
    pressure_level::PressureLevel,
    reboot::RebootReason,
    snapshot::WorkerWait,
};
use cotenant_units::{Bytes, Tokens};

/// A decision of one of the machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// About a lease that is held or ends.
    #[error("{0}")]
    Lease(LeaseDecision),
    /// About a request that waits, is granted or denied.
    #[error("{0}")]
    Admission(AdmissionDecision),
    /// About the engine's load, plans and failures.
    #[error("{0}")]
    Engine(EngineDecision),
    /// About a worker's start, size and end.
    #[error("{0}")]
    Worker(WorkerDecision),
    /// About what grows back, and when.
    #[error("{0}")]
    Growth(GrowthDecision),
    /// About memory without a holder.
    #[error("{0}")]
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

/// A decision about requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum AdmissionDecision {
    /// Nothing new is admitted from now on.
    #[error("draining: nothing new is admitted")]
    DrainBegun,
    /// Requests are admitted again.
    #[error("the drain has ended: requests are admitted again")]
    DrainEnded,
    /// A lease is granted.
    #[error(
        "granted {bytes} to {lease} after {} ms: {free} is free of {budget}",
        waited.as_millis()
    )]
    Granted {
        lease: LeaseName,
        bytes: Bytes,
        waited: Duration,
        free: Bytes,
        budget: Bytes,
    },
    /// A lease holds more, as its holder asked.
    #[error(
        "grown {lease} from {from} to {to} after {} ms: {free} is free of {budget}",
        waited.as_millis()
    )]
    Grown {
        lease: LeaseName,
        from: Bytes,
        to: Bytes,
        waited: Duration,
        free: Bytes,
        budget: Bytes,
    },
    /// The first in the queue waits for more than can be reclaimed now.
    #[error("`{tenant}` waits: {denial}")]
    Waits { tenant: String, denial: Denial },
    /// A request waits for what it cannot have while others keep what they hold; it does not block the queue.
    #[error("`{tenant}` waits for what it cannot have at present: {denial}")]
    OutOfReach { tenant: String, denial: Denial },
    /// A worker needs more than it can have while others keep what they hold.
    #[error("worker `{worker}` cannot be started: {wait}")]
    StartOutOfReach { worker: String, wait: WorkerWait },
    /// A request is served as a more urgent class, because it has waited for long.
    #[error(
        "`{tenant}` ({class}) has waited for {} s and is served as {rank} now",
        waited.as_secs()
    )]
    Aged {
        tenant: String,
        class: Class,
        waited: Duration,
        rank: Class,
    },
    /// A request was served as the most urgent class for its time, and is served as its own again.
    #[error("`{tenant}` ({class}) has had its turn and waits on")]
    TurnOver { tenant: String, class: Class },
    /// A request was withdrawn.
    #[error("`{tenant}` does not wait any more")]
    Withdrawn { tenant: String },
}

/// A decision about shortage and growth.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum GrowthDecision {
    /// Memory that had grown back was shed again soon, so that the dwell is longer from now on.
    #[error(
        "what had grown back was shed again after {:.1} s; nothing grows for {:.1} s",
        stayed.as_secs_f64(),
        dwell.as_secs_f64()
    )]
    BackedOff {
        /// How long it had stayed.
        stayed: Duration,
        /// From now on.
        dwell: Duration,
    },
    /// A client wants more KV capacity than can be had now.
    #[error("a client wants a KV capacity of {wanted} tokens, {present} are planned: {wait}")]
    CapacityWithheld {
        wanted: Tokens,
        /// What the engine is asked to hold.
        present: Tokens,
        wait: GrowthWait,
    },
    /// Nothing more is shed: what is left costs more than the level may.
    #[error("{level}: nothing more is shed; what is left costs its users more than this level may")]
    EngineSpared { level: PressureLevel },
    /// Nothing is left to shed.
    #[error(
        "{level}: nothing is left to shed; {unaccounted} is unaccounted, the supervisor itself uses {}",
        own.map_or_else(|| "an unknown part".to_owned(), |own| own.to_string())
    )]
    NothingLeft {
        level: PressureLevel,
        unaccounted: Bytes,
        /// Of the supervisor itself, where that is known.
        own: Option<Bytes>,
    },
}

/// What was found or decided about memory without a holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum MemoryDecision {
    /// What became of memory that was given back, on a board with a page pool for the GPU.
    #[error("released {}: {} to the GPU's page pool, {} to the OS", .0.bytes, .0.to_pool, .0.to_os)]
    Released(Release),
    /// The machine has been in a state for so long that only a reboot ends it.
    #[error("reboot advised: {0}")]
    RebootAdvised(RebootReason),
    /// The machine has not been in that state for as long.
    #[error("reboot no longer advised; it was since {0}")]
    RebootNotAdvised(RebootReason),
    /// The machine, or a control group around the supervisor, has too little memory now for what runs, or for the
    /// configuration.
    #[error(
        "the {machine} are too little, the budget is {budget}: {reason}; raise the limit or stop what needs it"
    )]
    TooSmall {
        machine: MachineMemory,
        budget: Bytes,
        reason: String,
    },
}
