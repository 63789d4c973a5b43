//! Decisions about leases that are held or end.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    policy::lease::{LeaseId, TargetAnswer},
    units::Bytes,
};

/// A lease as events and operators name it: `asr#7`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseName {
    /// Its number.
    pub id: LeaseId,
    /// The tenant that holds or held it.
    pub tenant: String,
}

impl fmt::Display for LeaseName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.tenant, self.id.0)
    }
}

/// Why a lease ends against the will of its holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseEnd {
    /// It was not renewed within its term.
    Expired {
        /// Its term.
        term: Duration,
    },
    /// Another process of its user, or an operator, released it.
    ReleasedByOther {
        /// That peer's user id.
        uid: u32,
    },
    /// Its holder has not come down to its target in time.
    NotReduced {
        /// The target.
        target: Bytes,
        /// How long the deadline of the target is over.
        late: Duration,
        /// How that is known.
        cause: NotReduced,
    },
}

/// How it is known that a holder has not come down to its target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NotReduced {
    /// It has not answered.
    Unanswered,
    /// It has refused.
    Refused {
        /// Its words.
        reason: String,
    },
    /// A reading that is newer than its answer shows more.
    Measured {
        /// What it uses.
        used: Bytes,
        /// What it claims.
        claim: Claim,
    },
    /// It has answered, and no reading since then could be taken.
    Unmeasurable {
        /// What it claims.
        claim: Claim,
    },
}

/// What a holder claims about a target that it has not been seen to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Claim {
    /// The memory has been given back.
    Applied,
    /// It needs more time.
    Deferred,
    /// It asked for less by itself.
    Resized,
}

/// What was decided about a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseDecision {
    /// A lease could not be booked.
    NotBooked {
        /// Its tenant.
        tenant: String,
        /// What was to be booked in addition.
        asked: Bytes,
        /// What is free.
        free: Bytes,
    },
    /// The process of the holder has ended, and its memory is credited.
    HolderGone {
        /// The lease by which its end was noticed.
        lease: LeaseName,
        /// How many leases it had, that one included.
        leases: usize,
        /// Free after it.
        free: Bytes,
        /// The budget.
        budget: Bytes,
    },
    /// A holder has answered its target; nothing is credited for that.
    Answered {
        /// Which lease.
        lease: LeaseName,
        /// The answer.
        answer: TargetAnswer,
        /// What it reports to use now.
        claimed: Option<Bytes>,
    },
    /// A holder has answered a target that is not in force.
    AnswerIgnored {
        /// Which lease.
        lease: LeaseName,
        /// The target that was answered.
        nonce: u64,
        /// The one in force.
        current: Option<u64>,
    },
    /// A holder uses more than it holds.
    BeyondLease {
        /// As whom it is measured.
        holder: String,
        /// What it uses.
        used: Bytes,
        /// What it holds.
        held: Bytes,
        /// What is free; what it uses beyond is not.
        free: Bytes,
    },
    /// A target was measured to be reached, and what that freed is credited.
    Reduced {
        /// Which lease.
        lease: LeaseName,
        /// What it holds from now on.
        stays: Bytes,
        /// What is credited.
        freed: Bytes,
        /// How long that took.
        took: Duration,
        /// What its holder was measured to use.
        used: Bytes,
        /// Free after it.
        free: Bytes,
        /// The budget.
        budget: Bytes,
    },
    /// A holder wanted to come down and was not measured there: it keeps what it holds.
    WishNotSeen {
        /// Which lease.
        lease: LeaseName,
        /// What it wanted to come down to.
        target: Bytes,
        /// What it uses, where it could be measured.
        used: Option<Bytes>,
    },
    /// An ended lease is off the book by a reading.
    Closed {
        /// Which lease.
        lease: LeaseName,
        /// What it held.
        held: Bytes,
        /// What of it is still used, and unaccounted.
        rest: Bytes,
        /// Free after it.
        free: Bytes,
        /// The budget.
        budget: Bytes,
    },
    /// An ended lease is off the book by a sample, since its holder cannot be measured.
    ClosedUnmeasured {
        /// Which lease.
        lease: LeaseName,
        /// What it held.
        held: Bytes,
    },
    /// An ended lease is off the book, and its bytes are unaccounted: no reading was had in time.
    ClosedUnaccounted {
        /// Which lease.
        lease: LeaseName,
        /// What it held.
        held: Bytes,
    },
    /// An ended lease keeps what its holder may still take, since that has not acknowledged the end.
    KeptUntilAcknowledged {
        /// Which lease.
        lease: LeaseName,
        /// What stays on the book.
        bytes: Bytes,
        /// For how long at most: the rest of its term.
        at_most: Duration,
        /// Free after it.
        free: Bytes,
        /// The budget.
        budget: Bytes,
    },
}
