//! State that outlives a run.
//!
//! When a supervisor is killed, its clock, queue and engine are lost; tenants' leases and workers continue. Therefore a
//! book contains less than a [checkpoint](super::arbiter::Checkpoint): no time and nothing in progress, only the leases
//! and the wanted state of the workers. The next run receives it as its first [event](super::event::Event::Recovered),
//! with the workers found running.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use serde::{Deserialize, Serialize};

use super::lease::{LeaseId, LeaseRequest};
use cotenant_units::Bytes;

/// The part of the state that the next run needs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Book {
    /// Last numbers assigned, so that none is reused.
    pub last: LastNumbers,
    /// Held leases of tenants.
    pub leases: Vec<BookedLease>,
    /// Ended leases of tenants whose holders may not have been notified.
    #[serde(default)]
    pub ended: Vec<BookedLease>,
    /// All workers of the configuration.
    pub workers: Vec<BookedWorker>,
}

/// Last numbers assigned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastNumbers {
    pub lease: u64,
    pub generation: u64,
    pub nonce: u64,
}

/// A lease of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BookedLease {
    pub id: LeaseId,
    pub generation: u64,
    /// Bytes in the ledger, including those of an unmet target.
    pub held: Bytes,
    /// Minimum useful size.
    pub min: Bytes,
    /// Maximum useful size.
    pub max: Bytes,
    /// The original request: tenant, class, term, peer.
    pub request: LeaseRequest,
}

/// A worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BookedWorker {
    pub name: String,
    pub wanted: bool,
    /// Whether it was stopped to make room and returns when there is room.
    pub stopped_to_shed: bool,
    /// Its run, if any.
    #[serde(flatten)]
    pub run: BookedRun,
    /// Its starts and failures.
    #[serde(flatten)]
    pub history: WorkerHistory,
}

/// The run of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BookedRun {
    /// Its lease and the bytes held, while it runs.
    pub lease: Option<(LeaseId, Bytes)>,
    /// Whether it was ready in this run of the supervisor or an earlier one.
    pub ready: bool,
    pub variant: Option<String>,
    /// Requested and unconfirmed change of variant.
    pub change: Option<BookedChange>,
    /// Purpose of a requested stop.
    pub stop: Option<BookedStop>,
    /// The variant before it was shrunk to make room.
    pub variant_before_shed: Option<String>,
}

/// Starts and failures of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerHistory {
    pub starts: u32,
    pub failures: u32,
    /// The last exit, as text.
    pub last_exit: Option<String>,
}

/// A change of variant in progress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BookedChange {
    pub variant: String,
    /// Whether its purpose is to make room.
    pub to_shed: bool,
}

/// The step after a requested stop of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BookedStop {
    /// Start it again.
    Again,
    /// None: an operator requested the stop.
    ForGood,
    /// Start it when there is room.
    ToShed,
}

/// A worker of the previous run that is still running.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptedWorker {
    pub worker: String,
    pub pid: u32,
    /// The variant it was started with.
    pub variant: Option<String>,
}
