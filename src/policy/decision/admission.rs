//! Decisions about requests that wait, are granted or denied.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    policy::{
        denial::Denial,
        lease::{Class, LeaseName},
        snapshot::WorkerWait,
    },
    units::Bytes,
};

/// A decision about requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdmissionDecision {
    /// Nothing new is admitted from now on.
    DrainBegun,
    /// Requests are admitted again.
    DrainEnded,
    /// A lease is granted.
    Granted { lease: LeaseName, bytes: Bytes, waited: Duration, free: Bytes, budget: Bytes },
    /// A lease holds more, as its holder asked.
    Grown { lease: LeaseName, from: Bytes, to: Bytes, waited: Duration, free: Bytes, budget: Bytes },
    /// The first in the queue waits for more than can be reclaimed now.
    Waits { tenant: String, denial: Denial },
    /// A request waits for what it cannot have while others keep what they hold; it does not block the queue.
    OutOfReach { tenant: String, denial: Denial },
    /// A worker needs more than it can have while others keep what they hold.
    StartOutOfReach { worker: String, wait: WorkerWait },
    /// A request is served as a more urgent class, because it has waited for long.
    Aged { tenant: String, class: Class, waited: Duration, rank: Class },
    /// A request was served as the most urgent class for its time, and is served as its own again.
    TurnOver { tenant: String, class: Class },
    /// A request was withdrawn.
    Withdrawn { tenant: String },
}
