//! Part of the ledger that outlives a run.
//!
//! A supervisor that is killed takes its clock, its queue and the engine with it; the leases of tenants and the workers
//! go on. So this is less than a [checkpoint](super::arbiter::Checkpoint): no time and nothing that is under way, only
//! who holds how much, and what was wanted of the workers. The next run takes it as its first
//! [event](super::event::Event::Recovered), together with the workers that it found alive.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use serde::{Deserialize, Serialize};

use super::lease::{LeaseId, LeaseRequest};
use cotenant_units::Bytes;

/// The state that the next run needs of this one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Book {
    /// The last numbers given out, so that none is given out twice.
    pub last: LastNumbers,
    /// Leases of tenants that are held; not those that have ended.
    pub leases: Vec<BookedLease>,
    /// Leases of tenants that have ended, and whose holders may not have heard of it.
    #[serde(default)]
    pub ended: Vec<BookedLease>,
    /// All workers of the configuration.
    pub workers: Vec<BookedWorker>,
}

/// The last numbers given out.
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
    /// On the book; what it was asked to give back and has not is still in it.
    pub held: Bytes,
    /// The least that is of use to the holder.
    pub min: Bytes,
    /// The most that is of use to the holder.
    pub max: Bytes,
    /// What was asked at first: tenant, class, term, who asked.
    pub request: LeaseRequest,
}

/// A worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BookedWorker {
    pub name: String,
    pub wanted: bool,
    /// It was stopped to make room, and comes back when there is room.
    pub stopped_to_shed: bool,
    /// What is on the book while it runs.
    #[serde(flatten)]
    pub run: BookedRun,
    /// What has happened to it.
    #[serde(flatten)]
    pub history: WorkerHistory,
}

/// A worker that runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BookedRun {
    /// Its lease and what is on the book, while it runs.
    pub lease: Option<(LeaseId, Bytes)>,
    /// Whether it has answered, to this run or to one before.
    pub ready: bool,
    pub variant: Option<String>,
    /// The change of variant that it was asked for and has not confirmed.
    pub change: Option<BookedChange>,
    /// Why it was asked to stop, if it was.
    pub stop: Option<BookedStop>,
    /// The variant that it had before it was made smaller to make room.
    pub variant_before_shed: Option<String>,
}

/// The history of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerHistory {
    pub starts: u32,
    pub failures: u32,
    /// The last exit, in words.
    pub last_exit: Option<String>,
}

/// A change of variant under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BookedChange {
    pub variant: String,
    /// Whether it was to make room.
    pub to_shed: bool,
}

/// The step after the end of a worker that was asked to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BookedStop {
    /// It was to be started again.
    Again,
    /// Nothing: an operator had asked for it.
    ForGood,
    /// It was to come back when there is room.
    ToShed,
}

/// A worker of the last run that was found alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptedWorker {
    pub worker: String,
    pub pid: u32,
    /// The variant that it was started with.
    pub variant: Option<String>,
}
