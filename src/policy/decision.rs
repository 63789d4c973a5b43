//! Decisions with their figures, one enum for each machine.
//!
//! A decision is a value: tests, metrics and `cotenant why` match on it. The sentence beside each variant is not part
//! of the value; `thiserror` derives `Display` from it.
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
    /// About growth.
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
    /// Admission of requests stops.
    #[error("draining: new requests are refused")]
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
    /// A lease grew, as its holder requested.
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
    /// The first request in the queue needs more than can be reclaimed now.
    #[error("`{tenant}` waits: {denial}")]
    Waits { tenant: String, denial: Denial },
    /// A request needs more than it can get while others keep their memory; it does not block the queue.
    #[error("`{tenant}` cannot be served at present, and waits: {denial}")]
    OutOfReach { tenant: String, denial: Denial },
    /// A worker needs more than it can get while others keep their memory.
    #[error("worker `{worker}` cannot be started: {wait}")]
    StartOutOfReach { worker: String, wait: WorkerWait },
    /// A request is served as a more urgent class after a long wait.
    #[error(
        "`{tenant}` ({class}) has waited for {} s and is now served as {rank}",
        waited.as_secs()
    )]
    Aged {
        tenant: String,
        class: Class,
        waited: Duration,
        rank: Class,
    },
    /// A request has had its turn as the most urgent class and returns to its own.
    #[error("`{tenant}` ({class}) waits in its own class again after its turn")]
    TurnOver { tenant: String, class: Class },
    /// A request was withdrawn.
    #[error("`{tenant}` no longer waits")]
    Withdrawn { tenant: String },
}

/// A decision about shortage and growth.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum GrowthDecision {
    /// Regrown memory was shed again soon, so that the dwell is longer from now on.
    #[error(
        "regrown memory was shed again after {:.1} s; no growth for {:.1} s",
        stayed.as_secs_f64(),
        dwell.as_secs_f64()
    )]
    BackedOff {
        /// Time for which it stayed.
        stayed: Duration,
        /// The new dwell.
        dwell: Duration,
    },
    /// A client requests more KV capacity than is available.
    #[error("a client requests a KV capacity of {wanted} tokens, {present} are planned: {wait}")]
    CapacityWithheld {
        wanted: Tokens,
        /// Planned KV capacity.
        present: Tokens,
        wait: GrowthWait,
    },
    /// Shedding stops: the remaining candidates cost more than the level permits.
    #[error(
        "{level}: shedding stops; the remaining candidates exceed the cost allowed at this level"
    )]
    EngineSpared { level: PressureLevel },
    /// Nothing is left to shed.
    #[error(
        "{level}: nothing left to shed; {unaccounted} is unaccounted, the supervisor itself uses {}",
        own.map_or_else(|| "an unknown part".to_owned(), |own| own.to_string())
    )]
    NothingLeft {
        level: PressureLevel,
        unaccounted: Bytes,
        /// Use of the supervisor itself, if known.
        own: Option<Bytes>,
    },
}

/// Finding or decision about memory without a holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum MemoryDecision {
    /// Destination of released memory, on a board with a page pool for the GPU.
    #[error("released {}: {} to the GPU's page pool, {} to the OS", .0.bytes, .0.to_pool, .0.to_os)]
    Released(Release),
    /// The machine has been in a state that only a reboot ends, for long enough.
    #[error("reboot advised: {0}")]
    RebootAdvised(RebootReason),
    /// The machine has been out of that state for as long.
    #[error("reboot no longer advised; it was since {0}")]
    RebootNotAdvised(RebootReason),
    /// The memory of the machine, or the limit of a control group around the supervisor, is too small for the running
    /// holders or the configuration.
    #[error(
        "the {machine} do not suffice, the budget is {budget}: {reason}; raise the limit or stop holders"
    )]
    TooSmall {
        machine: MachineMemory,
        budget: Bytes,
        reason: String,
    },
}
