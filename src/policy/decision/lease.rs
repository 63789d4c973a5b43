//! Decisions about leases that are held or end.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    policy::lease::{LeaseName, TargetAnswer},
    units::Bytes,
};

/// Why a lease ends against the will of its holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseEnd {
    /// It was not renewed within its term.
    Expired { term: Duration },
    /// Another process of its user, or an operator, released it.
    ReleasedByOther { uid: u32 },
    /// Its holder has not come down to its target in time.
    NotReduced {
        target: Bytes,
        /// How long the deadline of the target is over.
        late: Duration,
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
    Refused { reason: String },
    /// A reading that is newer than its answer shows more.
    Measured { used: Bytes, claim: Claim },
    /// It has answered, and no reading since then could be taken.
    Unmeasurable { claim: Claim },
}

/// The claim of a holder about a target that it has not been seen to reach.
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

/// A decision about a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseDecision {
    /// A lease could not be booked.
    NotBooked { tenant: String, asked: Bytes, free: Bytes },
    /// The process of the holder has ended, and its memory is credited.
    HolderGone {
        /// The lease by which its end was noticed.
        lease: LeaseName,
        /// How many leases it had, that one included.
        leases: usize,
        free: Bytes,
        budget: Bytes,
    },
    /// A holder has answered its target; nothing is credited for that.
    Answered { lease: LeaseName, answer: TargetAnswer, claimed: Option<Bytes> },
    /// A holder has answered a target that is not in force.
    AnswerIgnored { lease: LeaseName, nonce: u64, current: Option<u64> },
    /// A holder uses more than it holds.
    BeyondLease {
        /// As whom it is measured.
        holder: String,
        used: Bytes,
        held: Bytes,
        /// What is free; what it uses beyond is not.
        free: Bytes,
    },
    /// A target was measured to be reached, and what that freed is credited.
    Reduced { lease: LeaseName, stays: Bytes, freed: Bytes, took: Duration, used: Bytes, free: Bytes, budget: Bytes },
    /// A holder wanted to come down and was not measured there: it keeps what it holds.
    WishNotSeen { lease: LeaseName, target: Bytes, used: Option<Bytes> },
    /// An ended lease is off the book by a reading.
    Closed {
        lease: LeaseName,
        held: Bytes,
        /// What of it is still used, and unaccounted.
        rest: Bytes,
        free: Bytes,
        budget: Bytes,
    },
    /// An ended lease is off the book by a sample, since its holder cannot be measured.
    ClosedUnmeasured { lease: LeaseName, held: Bytes },
    /// An ended lease is off the book, and its bytes are unaccounted: no reading was had in time.
    ClosedUnaccounted { lease: LeaseName, held: Bytes },
    /// An ended lease keeps what its holder may still take, since that has not acknowledged the end.
    KeptUntilAcknowledged {
        lease: LeaseName,
        bytes: Bytes,
        /// For how long at most: the rest of its term.
        at_most: Duration,
        free: Bytes,
        budget: Bytes,
    },
    /// Its holder gives it back, or another process on the holder's behalf; it is free once measured.
    Released { lease: LeaseName, held: Bytes },
    /// Its end is acknowledged, by the holder or on its behalf by the user `by`.
    EndAcknowledged { lease: LeaseName, by: Option<u32>, held: Bytes },
    /// Leases and workers of the run before are taken over.
    TakenOver { leases: usize, workers: usize, held: Bytes, budget: Bytes },
    /// A book of an earlier run comes too late, and is not taken over.
    BookTooLate,
    /// A lease of the run before is not taken over, since a worker has its name now.
    NameTaken { lease: LeaseName },
    /// A lease of the run before is not taken over, since it does not fit.
    NotTakenOver { lease: LeaseName, held: Bytes, free: Bytes, budget: Bytes },
}
