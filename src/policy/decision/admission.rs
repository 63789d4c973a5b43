//! Decisions about requests that wait, are granted or denied.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::LeaseName;
use crate::{
    policy::{
        lease::{Class, Denial},
        snapshot::WorkerWait,
    },
    units::Bytes,
};

/// What was decided about requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdmissionDecision {
    /// Nothing new is admitted from now on.
    DrainBegun,
    /// Requests are admitted again.
    DrainEnded,
    /// A lease is granted.
    Granted {
        /// The lease.
        lease: LeaseName,
        /// What it holds.
        bytes: Bytes,
        /// How long the request waited.
        waited: Duration,
        /// Free after it.
        free: Bytes,
        /// The budget.
        budget: Bytes,
    },
    /// A lease holds more, as its holder asked.
    Grown {
        /// The lease.
        lease: LeaseName,
        /// What it held.
        from: Bytes,
        /// What it holds.
        to: Bytes,
        /// How long the request waited.
        waited: Duration,
        /// Free after it.
        free: Bytes,
        /// The budget.
        budget: Bytes,
    },
    /// The first in the queue waits for more than can be reclaimed now.
    Waits {
        /// What waits.
        tenant: String,
        /// What is missing, and the holders.
        denial: Denial,
    },
    /// A request waits for what it cannot have while others keep what they hold; it does not block the queue.
    OutOfReach {
        /// What waits.
        tenant: String,
        /// What is missing, and the holders.
        denial: Denial,
    },
    /// A worker needs more than it can have while others keep what they hold.
    StartOutOfReach {
        /// The worker.
        worker: String,
        /// What it needs, and what it could have.
        wait: WorkerWait,
    },
    /// A request is served as a more urgent class, because it has waited for long.
    Aged {
        /// What waits.
        tenant: String,
        /// Its class.
        class: Class,
        /// For how long.
        waited: Duration,
        /// The class it is served as.
        rank: Class,
    },
    /// A request was served as the most urgent class for its time, and is served as its own again.
    TurnOver {
        /// What waits.
        tenant: String,
        /// Its class.
        class: Class,
    },
    /// A request was withdrawn.
    Withdrawn {
        /// What had waited.
        tenant: String,
    },
}
