//! Denials: why a request was not granted, with the figures that every API renders in its own protocol.
//!
//! `journal/render` makes the sentences.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    growth_wait::GrowthWait,
    lease::Class,
    pressure_level::PressureLevel,
    reason::{Share, StopReason},
    snapshot::WorkerState,
};
use cotenant_units::Bytes;

/// Stands for the tenant where an operator asks for a shed; no tenant has a name with a space.
pub const OPERATOR: &str = "an operator";

/// Why a request was not granted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "denial")]
pub enum Denial {
    /// Does not fit now, and not after everything that can be reclaimed for this class.
    InsufficientMemory {
        tenant: String,
        /// Least bytes asked for.
        asked: Bytes,
        /// Budget minus everything held or unaccounted.
        free: Bytes,
        /// What others could give back for this class.
        reclaimable: Bytes,
        budget: Bytes,
        holders: Holders,
    },
    /// Would not fit into an empty budget.
    ExceedsBudget {
        tenant: String,
        asked: Bytes,
        budget: Bytes,
    },
    /// The request's own figures contradict each other, a limit, or the state of what it names.
    Invalid {
        tenant: String,
        field: String,
        value: String,
        problem: Problem,
    },
    /// The same request id came before with other content.
    RequestIdReused { tenant: String, request_id: String },
    /// Too many leases or waiting requests.
    QuotaExceeded {
        tenant: String,
        what: Quota,
        limit: u64,
    },
    /// No such lease, or it has ended; an expired lease does not come back.
    UnknownLease {
        /// As the caller named it.
        lease: String,
    },
    /// A waiting call was replaced by a later one for the same lease.
    Replaced { lease: String },
    /// The lease was granted again since: a holder of the old generation holds nothing.
    StaleGeneration {
        lease: String,
        /// What the caller carries.
        generation: u64,
        /// What is in force.
        current: u64,
    },
    /// The lease belongs to another holder.
    NotHolder {
        lease: String,
        /// Of the caller.
        uid: u32,
        problem: NotHolder,
    },
    /// The last sample of the machine is older than a grant accepts.
    StaleSample {
        tenant: String,
        asked: Bytes,
        age: Duration,
        limit: Duration,
    },
    /// Under this pressure nothing is admitted for this class.
    PressureHigh {
        tenant: String,
        asked: Bytes,
        class: Class,
        level: PressureLevel,
    },
    /// The engine does not grow back.
    NotGrowing { wait: GrowthWait },
    /// The supervisor takes nothing new.
    Draining { tenant: String, asked: Bytes },
}

/// The holders of what is missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holders {
    pub class: Class,
    pub shares: Vec<Share>,
    /// Used and held by no tenant.
    pub unaccounted: Bytes,
}

/// A limit that is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quota {
    /// Leases of all users and their waiting requests.
    Leases,
    Queue,
    /// A user's share of the queue.
    QueueOf {
        uid: u32,
    },
    LeasesOf {
        uid: u32,
    },
}

/// Why a peer may not act on a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NotHolder {
    /// The supervisor holds it itself.
    Supervisor,
    OwnedBy {
        uid: u32,
    },
    /// It has ended unacknowledged, and keeps `held` for so long.
    Ended {
        uid: u32,
        held: Bytes,
        left: Duration,
    },
    /// Another process waits for it by the same request id.
    Awaited {
        pid: Option<u32>,
    },
}

/// The fault of a value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Problem {
    Zero,
    BelowMin {
        min: Bytes,
    },
    NotBetween {
        least: Duration,
        most: Duration,
    },
    AboveLimit {
        limit: Duration,
    },
    TooLong {
        bytes: usize,
        limit: u32,
    },
    /// A name that is empty or has control characters.
    Unprintable,
    /// A name of the supervisor's own holders.
    OwnHolder,
    /// A name with marks that tell processes of one name apart.
    Marked {
        marks: (String, String),
    },
    /// More than the target that the lease is under.
    AboveTarget {
        target: Bytes,
    },
    NotConfigured,
    NoEngine,
    /// The engine is loading, or failed to change a moment ago.
    EngineBusy,
    NotApplied {
        revision: u64,
        reason: String,
    },
    NotAVariant {
        known: Vec<String>,
    },
    NotReady {
        state: WorkerState,
    },
    ChangingTo {
        variant: String,
    },
    CannotChange,
    /// A variant that was kept for this error.
    Kept {
        error: String,
    },
    NotAnswered {
        within: Duration,
    },
    Exited {
        cause: String,
    },
    Stopping(Box<StopReason>),
    /// A fault of settings, in the words of their check.
    #[serde(untagged)]
    Text(String),
}

impl Denial {
    /// A value of a request that is refused.
    #[must_use]
    pub fn invalid(tenant: &str, field: &str, value: &dyn ToString, problem: Problem) -> Self {
        Self::Invalid {
            tenant: tenant.to_owned(),
            field: field.to_owned(),
            value: value.to_string(),
            problem,
        }
    }
}
