//! Reports of what was weighed before memory was reclaimed, and of what is reclaimed next.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use serde::{Deserialize, Serialize};

use super::{
    lease::{Class, LeaseId},
    params::ResidencyMode,
    reason::{ReclaimReason, SpareReason},
};
use cotenant_units::Bytes;

/// Who could give memory back, and how.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, thiserror::Error,
)]
#[serde(rename_all = "snake_case", tag = "source")]
pub enum Source {
    /// KV blocks of the engine that no sequence uses.
    #[error("unused KV blocks")]
    UnusedKv,
    /// KV blocks that keep what the last answer has left, while no request runs: the prefix of the next prompt.
    #[error("KV blocks of earlier answers")]
    PrefixKv,
    /// The oldest KV blocks of the running answer, whose request allows that they are dropped; what was said in them is
    /// lost to it.
    #[error("the oldest KV blocks of the running answer")]
    OldestKv,
    /// KV of the engine, by keeping it in a smaller type; besides that the only one that changes what is answered, and weighed only
    /// where the configuration allows it.
    #[error("KV in a smaller type")]
    KvType,
    /// Layers of the engine that are resident.
    #[error("resident layers")]
    Layers,
    /// Workspace of the engine that larger prefill chunks need, while parts are streamed.
    #[error("larger prefill chunks")]
    PrefillChunk,
    /// A tenant that holds more than its least.
    #[error("{tenant}#{}", lease.0)]
    Tenant { lease: LeaseId, tenant: String },
    /// An idle worker that can do with a smaller variant.
    #[error("worker `{worker}` as `{variant}`")]
    WorkerVariant { worker: String, variant: String },
    /// A worker, by stopping it.
    #[error("stopping worker `{worker}`")]
    WorkerStop { worker: String },
    /// A worker that comes down when it is notified that memory is short.
    #[error("notifying worker `{worker}`")]
    WorkerNotified { worker: String },
}

impl Source {
    /// Whether a process ends by it.
    #[must_use]
    pub const fn stops(&self) -> bool {
        matches!(self, Self::WorkerStop { .. })
    }

    /// Whether it is a part of the engine.
    #[must_use]
    pub const fn is_of_engine(&self) -> bool {
        match self {
            Self::UnusedKv
            | Self::PrefixKv
            | Self::OldestKv
            | Self::KvType
            | Self::Layers
            | Self::PrefillChunk => true,
            Self::Tenant { .. }
            | Self::WorkerVariant { .. }
            | Self::WorkerStop { .. }
            | Self::WorkerNotified { .. } => false,
        }
    }
}

/// Something chosen, and how much of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    pub source: Source,
    pub bytes: Bytes,
}

/// What would be shed first, and at which headroom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextShed {
    /// The cheapest set that suffices; empty when nothing may be shed.
    pub chosen: Vec<Chosen>,
    /// What a shed at that headroom has to give.
    pub need: Bytes,
    /// The headroom below which something is shed.
    pub below: Bytes,
    /// The headroom now.
    pub headroom: Bytes,
}

/// What was weighed before memory was reclaimed: who was asked, and who was not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weighing {
    pub reason: ReclaimReason,
    pub need: Bytes,
    /// What all candidates could give.
    pub reclaimable: Bytes,
    /// How context and speed were weighed; nothing without an engine.
    pub mode: Option<ResidencyMode>,
    /// Who could give something, the cheapest byte first.
    pub candidates: Vec<Weighed>,
    /// Who holds something and was not asked, and why.
    pub spared: Vec<Spared>,
    /// What was chosen costs at most so many millionths more than the cheapest set; zero where it is the cheapest.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub above_ppm: u64,
}

/// A candidate in the balance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weighed {
    /// Who and how.
    #[serde(flatten)]
    pub source: Source,
    pub class: Class,
    /// The most that it can give.
    pub bytes: Bytes,
    /// By how much its cost counts.
    pub weight: u64,
    /// Its weighed cost for each MiB, µs: the less, the sooner it is asked.
    pub score: u64,
    /// What it was asked for; nothing for those who were not.
    pub chosen: Option<Bytes>,
}

/// A holder that could not be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spared {
    /// Its name: `llm#1`.
    pub holder: String,
    pub held: Bytes,
    pub why: SpareReason,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
const fn is_zero(number: &u64) -> bool {
    *number == 0
}
