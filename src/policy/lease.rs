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

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use super::growth_wait::GrowthWait;
use crate::units::{Bytes, Timestamp};

/// How urgent the holder's work is; the first is the most urgent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Somebody is speaking or listening: ASR, TTS.
    AudioRealtime,
    /// Somebody waits for an answer.
    Interactive,
    /// The LLM: gives way by becoming slower.
    LlmElastic,
    /// Nobody waits.
    Batch,
}

impl Class {
    /// The next more urgent class; the most urgent one is its own.
    #[must_use]
    pub const fn more_urgent(self) -> Self {
        match self {
            Self::AudioRealtime | Self::Interactive => Self::AudioRealtime,
            Self::LlmElastic => Self::Interactive,
            Self::Batch => Self::LlmElastic,
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::AudioRealtime => "audio-realtime",
            Self::Interactive => "interactive",
            Self::LlmElastic => "llm-elastic",
            Self::Batch => "batch",
        })
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

/// Connects a request with its one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ticket(pub u64);

/// Who sent a request, by the credentials of its socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Peer {
    /// User id.
    pub uid: u32,
    /// Process id, where the socket tells.
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
    /// Urgency.
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

/// A lease as others see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseView {
    /// Its number.
    pub id: LeaseId,
    /// Name of the holder.
    pub tenant: String,
    /// As whom its process is measured: the name, unless another process has that name too.
    #[serde(default)]
    pub holder: String,
    /// Who stands behind it.
    pub kind: LeaseKind,
    /// Urgency.
    pub class: Class,
    /// Where it is in its life.
    pub state: LeaseState,
    /// Rises with every grant; an answer or renewal that carries an older one is refused.
    pub generation: u64,
    /// On the book.
    pub held: Bytes,
    /// The least that is of use to the holder.
    pub min: Bytes,
    /// The most that is of use to the holder.
    pub max: Bytes,
    /// Measured, if it has been measured.
    pub used: Option<Bytes>,
    /// When `used` was measured.
    pub used_at: Option<Timestamp>,
    /// What it has been asked to come down to.
    pub target: Option<Target>,
    /// When it was granted.
    pub granted_at: Timestamp,
    /// When it ends unless renewed; `None` for leases that we hold ourselves.
    pub expires_at: Option<Timestamp>,
    /// User id of the owner.
    pub owner_uid: u32,
    /// Process of the owner, where its socket told; it is measured by it.
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

/// Why a request was not granted. Each reason has its figures, so that every door can render it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "denial")]
pub enum Denial {
    /// Does not fit now, and not after everything that may be reclaimed for this class.
    #[error(
        "cannot grant {asked} to `{tenant}`: {free} is free and {reclaimable} can be reclaimed, of a {budget} budget{holders}"
    )]
    InsufficientMemory {
        /// Name of the holder.
        tenant: String,
        /// Least bytes asked for.
        asked: Bytes,
        /// Budget minus everything held or unaccounted.
        free: Bytes,
        /// What others could give back for this class.
        reclaimable: Bytes,
        /// The budget.
        budget: Bytes,
        /// Who holds what, as ` (llm#1 holds 200 MiB, …)`; may be empty.
        holders: String,
    },
    /// Would not fit into an empty budget.
    #[error("cannot grant {asked} to `{tenant}`: the whole budget is {budget}")]
    ExceedsBudget {
        /// Name of the holder.
        tenant: String,
        /// Least bytes asked for.
        asked: Bytes,
        /// The budget.
        budget: Bytes,
    },
    /// The request's own figures contradict each other or a limit.
    #[error("cannot take the request of `{tenant}`: {field}: `{value}` {problem}")]
    Invalid {
        /// Name of the holder.
        tenant: String,
        /// Field at fault.
        field: String,
        /// Its value.
        value: String,
        /// What is wrong with it: `is above the limit of 60 s`.
        problem: String,
    },
    /// The same request id came before with other content.
    #[error("cannot take request `{request_id}` of `{tenant}`: the id was used before with other content")]
    RequestIdReused {
        /// Name of the holder.
        tenant: String,
        /// The id.
        request_id: String,
    },
    /// Too many leases or waiting requests.
    #[error("cannot take the request of `{tenant}`: {what} is at its limit of {limit}")]
    QuotaExceeded {
        /// Name of the holder.
        tenant: String,
        /// What is full: `the queue`, `leases of uid 1000`.
        what: String,
        /// The limit.
        limit: u64,
    },
    /// No such lease, or it has ended; an expired lease does not come back.
    #[error("lease {lease} is unknown or has ended")]
    UnknownLease {
        /// As the caller named it.
        lease: String,
    },
    /// A waiting call was replaced by a later one for the same lease.
    #[error("cannot resize lease {lease}: a later call of its holder has replaced this one")]
    Replaced {
        /// Name of the lease.
        lease: String,
    },
    /// The lease was granted anew since: whoever carries the old generation holds nothing.
    #[error("lease {lease} cannot be changed with generation {generation}: it is {current} now")]
    StaleGeneration {
        /// Name of the lease.
        lease: String,
        /// What the caller carries.
        generation: u64,
        /// What is in force.
        current: u64,
    },
    /// The lease belongs to somebody else.
    #[error("lease {lease} cannot be changed by uid {uid}: {problem}")]
    NotHolder {
        /// Name of the lease.
        lease: String,
        /// Who tried.
        uid: u32,
        /// `it belongs to uid 0`.
        problem: String,
    },
    /// The last sample of the machine is too old to grant anything on it.
    #[error("cannot grant {asked} to `{tenant}`: the last sample is {:.1} s old, and grants need one of at most {:.1} s",
        age.as_secs_f64(), limit.as_secs_f64())]
    StaleSample {
        /// Name of the holder.
        tenant: String,
        /// Least bytes asked for.
        asked: Bytes,
        /// Age of the last sample.
        age: Duration,
        /// The greatest age that a grant accepts.
        limit: Duration,
    },
    /// Under this pressure nothing is admitted for this class.
    #[error("cannot grant {asked} to `{tenant}`: pressure is {level} and class {class} waits until it is Normal")]
    PressureHigh {
        /// Name of the holder.
        tenant: String,
        /// Least bytes asked for.
        asked: Bytes,
        /// Its class.
        class: Class,
        /// The level.
        level: super::pressure_level::PressureLevel,
    },
    /// The engine does not grow back.
    #[error("cannot grow back: {wait}")]
    NotGrowing {
        /// What it waits for.
        wait: GrowthWait,
    },
    /// The supervisor takes nothing new.
    #[error("cannot grant {asked} to `{tenant}`: the supervisor is draining")]
    Draining {
        /// Name of the holder.
        tenant: String,
        /// Least bytes asked for.
        asked: Bytes,
    },
}

impl Denial {
    /// What the caller or an operator can do about it, if anything.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::InsufficientMemory {
                asked,
                free,
                reclaimable,
                ..
            } => {
                let reachable = free.saturating_add(*reclaimable);
                Some(if reachable >= *asked {
                    "let the request wait: what is missing can be reclaimed in time".to_owned()
                } else if reachable > Bytes::ZERO {
                    format!("ask for {reachable} or less, or let the request wait until others release")
                } else {
                    "let the request wait until others release, or stop one of the holders".to_owned()
                })
            }
            Self::ExceedsBudget { budget, .. } => Some(format!(
                "ask for {budget} or less, or raise `budget` in the configuration"
            )),
            Self::RequestIdReused { .. } => Some("use a new request id for a new request".to_owned()),
            Self::QuotaExceeded { .. } => Some("release leases that are not needed, or raise the limit".to_owned()),
            Self::NotGrowing {
                wait: GrowthWait::Headroom { needs, has, .. },
            } => Some(format!(
                "free {} more, or lower `budget.watermarks.elevated`",
                needs.saturating_sub(*has)
            )),
            Self::NotGrowing { .. } => None,
            Self::Replaced { .. } => Some("read the lease again: the later call has its own answer".to_owned()),
            Self::StaleGeneration { .. } => Some("read the lease again, and use what it says".to_owned()),
            Self::UnknownLease { .. } => Some("ask for a new lease; an ended one does not come back".to_owned()),
            Self::PressureHigh { .. } => Some("let the request wait, or ask in a more urgent class".to_owned()),
            Self::StaleSample { .. } => Some("let the request wait until the machine is read again".to_owned()),
            Self::Draining { .. } => Some("ask again when the supervisor is back".to_owned()),
            Self::Invalid { .. } | Self::NotHolder { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_denial_for_lack_of_memory_says_how_to_get_it() {
        let denial = |free, reclaimable| Denial::InsufficientMemory {
            tenant: "tts".to_owned(),
            asked: Bytes::from_mib(100),
            free: Bytes::from_mib(free),
            reclaimable: Bytes::from_mib(reclaimable),
            budget: Bytes::from_mib(400),
            holders: String::new(),
        };
        for (free, reclaimable, words) in [
            (40, 60, "let the request wait: what is missing can be reclaimed in time"),
            (
                40,
                20,
                "ask for 60 MiB or less, or let the request wait until others release",
            ),
            (
                0,
                0,
                "let the request wait until others release, or stop one of the holders",
            ),
        ] {
            assert_eq!(denial(free, reclaimable).hint().as_deref(), Some(words));
        }
    }
}
