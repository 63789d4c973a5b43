//! Life cycle of a lease: requested, granted, revoking, gone.
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

/// Urgency of a holder's work, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Speech while it is spoken or heard: ASR, TTS.
    AudioRealtime,
    /// A user waits for the result.
    Interactive,
    /// The LLM: yields memory by becoming slower.
    LlmElastic,
    /// No user waits.
    Batch,
}

impl Class {
    /// All classes, the most urgent first.
    pub const ALL: [Self; 4] = [
        Self::AudioRealtime,
        Self::Interactive,
        Self::LlmElastic,
        Self::Batch,
    ];

    /// Returns the next more urgent class; the most urgent one returns itself.
    #[must_use]
    pub const fn more_urgent(self) -> Self {
        match self {
            Self::AudioRealtime | Self::Interactive => Self::AudioRealtime,
            Self::LlmElastic => Self::Interactive,
            Self::Batch => Self::LlmElastic,
        }
    }

    /// Returns its name in files and messages.
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

/// Kind of holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseKind {
    /// The LLM in this process.
    Engine,
    /// A program with a lease over gRPC.
    Tenant,
    /// A child process; the supervisor holds the lease for it.
    Worker,
}

/// Number of a lease, unique within a run of the supervisor.
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

/// Identifies a request and its only answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ticket(pub u64);

/// Sender of a request, by the credentials of its socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Peer {
    pub uid: u32,
    /// Process id, if the socket provides it.
    pub pid: Option<u32>,
    /// Whether it may act on leases of others.
    pub operator: bool,
}

/// A request for memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRequest {
    /// Name of the holder in the ledger: `asr`.
    pub tenant: String,
    /// Chosen by the caller; a repeated request with the same id and content books nothing.
    pub request_id: String,
    /// The sender.
    pub peer: Peer,
    pub class: Class,
    /// Minimum useful size.
    pub min: Bytes,
    /// Maximum useful size.
    pub max: Bytes,
    /// Lifetime between two renewals; `None` as long as the control group exists.
    pub term: Option<Duration>,
    /// Maximum time in the queue; zero requests an immediate answer.
    pub wait: Duration,
    /// Whether to report the outcome without booking.
    pub validate_only: bool,
    /// Control group whose processes hold the lease instead of the sender, as a path below its hierarchy's mount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
}

impl LeaseRequest {
    /// Returns the process that holds the lease, if it is known and no control group holds it.
    #[must_use]
    pub fn holder_pid(&self) -> Option<u32> {
        self.peer.pid.filter(|_| self.cgroup.is_none())
    }
}

/// Phase of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseState {
    /// Waiting in the queue.
    Requested,
    /// Held.
    Granted,
    /// Held, with a lower target and a deadline.
    Revoking,
    /// Ended; its bytes are free or unaccounted.
    Gone,
}

/// A lower target for a holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// Identifies this target; an answer with another nonce is stale.
    pub nonce: u64,
    /// Bytes that the holder may keep.
    pub bytes: Bytes,
    /// Time by which it must be reached.
    pub deadline: Timestamp,
}

/// A lease's public state. In JSON, the fields of the groups are flattened into one object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseView {
    pub id: LeaseId,
    pub tenant: String,
    /// Name under which its process is measured: the tenant, unless another process has that name.
    #[serde(default)]
    pub holder: String,
    /// Kind of holder.
    pub kind: LeaseKind,
    pub class: Class,
    /// Phase of the lease.
    pub state: LeaseState,
    /// Incremented by every grant; answers and renewals with an older one are refused.
    pub generation: u64,
    #[serde(flatten)]
    pub memory: LeaseMemory,
    /// Present target, if it has to shrink.
    pub target: Option<Target>,
    pub granted_at: Timestamp,
    /// End unless renewed; `None` for leases of the supervisor itself, and for those that last as long as their group.
    pub expires_at: Option<Timestamp>,
    #[serde(flatten)]
    pub owner: LeaseOwner,
}

/// Memory of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseMemory {
    pub held: Bytes,
    /// Minimum useful size.
    pub min: Bytes,
    /// Maximum useful size.
    pub max: Bytes,
    pub used: Option<Bytes>,
    pub used_at: Option<Timestamp>,
}

/// Owner of a lease, by its socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseOwner {
    pub owner_uid: u32,
    /// Process of the owner, if the socket provides it; used for measurements.
    pub owner_pid: Option<u32>,
    /// Control group whose processes hold the lease, and are measured instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
}

impl LeaseView {
    /// Returns the name under which its process is measured, as in [`Measure`](super::event::Action::Measure).
    #[must_use]
    pub fn holder(&self) -> &str {
        if self.holder.is_empty() {
            &self.tenant
        } else {
            &self.holder
        }
    }

    /// Whether it is waiting in the queue, so that the use of its process belongs to no lease.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.state == LeaseState::Requested
    }

    /// Returns its name in messages: `asr#7`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}#{}", self.tenant, self.id.0)
    }
}

/// Answer of a holder to a lower target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
pub enum TargetAnswer {
    /// The bytes are released; credited once measured.
    Applied,
    /// Accepted, but `overage` is still in use above the target.
    Deferred {
        /// Bytes above the target.
        overage: Bytes,
    },
    /// The holder does not comply.
    Refused {
        /// Reason given by the holder.
        reason: String,
    },
}
