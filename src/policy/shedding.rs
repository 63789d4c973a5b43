//! Reports on a reclaim: the candidates weighed, and the next shed.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use serde::{Deserialize, Serialize};

use super::{
    lease::{Class, LeaseId},
    params::ResidencyMode,
    reason::{ReclaimReason, SpareReason},
};
use cotenant_units::Bytes;

/// A source of reclaimable memory, with the means.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, thiserror::Error,
)]
#[serde(rename_all = "snake_case", tag = "source")]
pub enum Source {
    /// KV blocks of the engine that no sequence uses.
    #[error("unused KV blocks")]
    UnusedKv,
    /// KV blocks kept from the last answer as the prefix of the next prompt, while no request runs.
    #[error("KV blocks of earlier answers")]
    PrefixKv,
    /// The oldest KV blocks of the running answer, if its request permits dropping them; their content is lost to it.
    #[error("the oldest KV blocks of the running answer")]
    OldestKv,
    /// KV converted to a smaller type. Besides `OldestKv` the only source that changes answers; used only if
    /// configured.
    #[error("KV in a smaller type")]
    KvType,
    /// Resident layers of the engine.
    #[error("resident layers")]
    Layers,
    /// The engine's workspace for larger prefill chunks, while parts are streamed.
    #[error("larger prefill chunks")]
    PrefillChunk,
    /// A tenant that holds more than its minimum.
    #[error("{tenant}#{}", lease.0)]
    Tenant { lease: LeaseId, tenant: String },
    /// An idle worker with a smaller variant.
    #[error("worker `{worker}` as `{variant}`")]
    WorkerVariant { worker: String, variant: String },
    /// A worker, stopped.
    #[error("stopping worker `{worker}`")]
    WorkerStop { worker: String },
    /// A worker that shrinks when notified of a shortage.
    #[error("notifying worker `{worker}`")]
    WorkerNotified { worker: String },
}

impl Source {
    /// Whether it ends a process.
    #[must_use]
    pub const fn stops(&self) -> bool {
        matches!(self, Self::WorkerStop { .. })
    }

    /// Whether it belongs to the engine.
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

/// A chosen source and its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    pub source: Source,
    pub bytes: Bytes,
}

/// The next shed, and the headroom that triggers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextShed {
    /// The cheapest set that suffices; empty when nothing may be shed.
    pub chosen: Vec<Chosen>,
    /// Bytes that a shed at that headroom must free.
    pub need: Bytes,
    /// Headroom below which memory is shed.
    pub below: Bytes,
    /// Present headroom.
    pub headroom: Bytes,
}

/// Weighing before a reclaim: candidates and spared holders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weighing {
    pub reason: ReclaimReason,
    pub need: Bytes,
    /// Sum over all candidates.
    pub reclaimable: Bytes,
    /// Weighting of context and speed; `None` without an engine.
    pub mode: Option<ResidencyMode>,
    /// Candidates, the lowest price per byte first.
    pub candidates: Vec<Weighed>,
    /// Spared holders with the reason.
    pub spared: Vec<Spared>,
    /// Upper bound of the additional cost over the cheapest set, in millionths; zero if the choice is the cheapest set.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub above_ppm: u64,
}

/// One candidate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weighed {
    /// The source and the means.
    #[serde(flatten)]
    pub source: Source,
    pub class: Class,
    /// Maximum bytes that it can give.
    pub bytes: Bytes,
    /// Weight of its cost.
    pub weight: u64,
    /// Weighted cost per MiB, µs; the lowest is chosen first.
    pub score: u64,
    /// Bytes requested from it; `None` if it was not chosen.
    pub chosen: Option<Bytes>,
}

/// A holder that was not asked.
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
