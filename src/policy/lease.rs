//! The life of a lease: requested, granted, revoking, gone.
//!
//! ```text
//!             deny, wait over                     every byte verified back
//!   requested ───────────────► (answered)    ┌──────────────────────────────┐
//!       │ grant                              │ lower target     applied     │
//!       └──────────► granted ────────────────┴► revoking ───────► granted   │
//!                      │  release, expire, holder lost                       │
//!                      └──────────────────────────────────────────► gone ◄───┘
//! ```
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use cotenant_units::{Bytes, Timestamp};

/// How urgent the holder's work is; the first is the most urgent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Speech as it is spoken or heard: ASR, TTS.
    AudioRealtime,
    /// A user waits for an answer.
    Interactive,
    /// The LLM: gives way by becoming slower.
    LlmElastic,
    /// No user waits.
    Batch,
}

impl Class {
    /// All of them, the most urgent first.
    pub const ALL: [Self; 4] = [
        Self::AudioRealtime,
        Self::Interactive,
        Self::LlmElastic,
        Self::Batch,
    ];

    /// The next more urgent class; the most urgent one is its own.
    #[must_use]
    pub const fn more_urgent(self) -> Self {
        match self {
            Self::AudioRealtime | Self::Interactive => Self::AudioRealtime,
            Self::LlmElastic => Self::Interactive,
            Self::Batch => Self::LlmElastic,
        }
    }

    /// Its name in files and messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AudioRealtime => "audio-realtime",
            Self::Interactive => "interactive",
            Self::LlmElastic => "llm-elastic",
            Self::Batch => "batch",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Who stands behind a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseKind {
    /// The LLM in this process.
    Engine,
    /// A program that asked over gRPC.
    Tenant,
    /// A child process that we manage and hold the lease for.
    Worker,
}

/// Number of a lease, unique in one run of the supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

/// A lease as events and operators name it: `asr#7`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseName {
    pub id: LeaseId,
    /// The tenant that holds or held it.
    pub tenant: String,
}

impl fmt::Display for LeaseName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.tenant, self.id.0)
    }
}

/// Connects a request with its one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ticket(pub u64);

/// Who sent a request, by the credentials of its socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Peer {
    pub uid: u32,
    /// Process id, where the socket shows it.
    pub pid: Option<u32>,
    /// Whether the peer may act on leases of others.
    pub operator: bool,
}

/// A request for memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRequest {
    /// Name of the holder, as it appears in the book: `asr`.
    pub tenant: String,
    /// Chosen by the caller; a second request with the same one and the same content books nothing again.
    pub request_id: String,
    /// Who is asking.
    pub peer: Peer,
    pub class: Class,
    /// The least that is of use.
    pub min: Bytes,
    /// The most that is of use.
    pub max: Bytes,
    /// Lifetime between two renewals.
    pub term: Duration,
    /// How long the request may wait in the queue; zero asks for an answer now.
    pub wait: Duration,
    /// Answers what would happen and books nothing.
    pub validate_only: bool,
}

/// Where a lease is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseState {
    /// Waits in the queue.
    Requested,
    /// Held.
    Granted,
    /// Held, and asked to become smaller by a deadline.
    Revoking,
    /// Ended; its bytes are back or unaccounted.
    Gone,
}

/// A lower target that the holder has been asked to reach.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// Names this target; an answer to another one is stale.
    pub nonce: u64,
    /// What the holder may keep.
    pub bytes: Bytes,
    /// When it has to be reached.
    pub deadline: Timestamp,
}

/// A lease as others see it. In JSON the groups are not to be seen: their fields stand beside each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseView {
    pub id: LeaseId,
    pub tenant: String,
    /// As whom its process is measured: the name, unless another process has that name too.
    #[serde(default)]
    pub holder: String,
    /// Who stands behind it.
    pub kind: LeaseKind,
    pub class: Class,
    /// Where it is in its life.
    pub state: LeaseState,
    /// Rises with every grant; an answer or renewal that carries an older one is refused.
    pub generation: u64,
    #[serde(flatten)]
    pub memory: LeaseMemory,
    /// What it has been asked to come down to.
    pub target: Option<Target>,
    pub granted_at: Timestamp,
    /// When it ends unless renewed; `None` for leases that we hold ourselves.
    pub expires_at: Option<Timestamp>,
    #[serde(flatten)]
    pub owner: LeaseOwner,
}

/// Memory of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseMemory {
    pub held: Bytes,
    /// The least that is of use to the holder.
    pub min: Bytes,
    /// The most that is of use to the holder.
    pub max: Bytes,
    pub used: Option<Bytes>,
    pub used_at: Option<Timestamp>,
}

/// Owner of a lease, by its socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseOwner {
    pub owner_uid: u32,
    /// Process of the owner, where its socket shows it; it is measured by it.
    pub owner_pid: Option<u32>,
}

impl LeaseView {
    /// As whom its process is measured: what [`Measure`](super::event::Action::Measure) names.
    #[must_use]
    pub fn holder(&self) -> &str {
        if self.holder.is_empty() {
            &self.tenant
        } else {
            &self.holder
        }
    }

    /// Whether it only waits in the queue: what its process uses says nothing of a lease.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.state == LeaseState::Requested
    }

    /// `asr#7`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}#{}", self.tenant, self.id.0)
    }
}

/// What the holder says about a lower target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
pub enum TargetAnswer {
    /// The bytes have been given back; counted once they are measured to be back.
    Applied,
    /// Accepted, but this much is still in use above the target.
    Deferred {
        /// Bytes above the target.
        overage: Bytes,
    },
    /// The holder cannot or will not.
    Refused {
        /// Its words.
        reason: String,
    },
}
