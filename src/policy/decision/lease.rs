//! Decisions about leases.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    growth_wait::unless_zero,
    lease::{LeaseName, TargetAnswer},
    reason::still_uses,
};
use cotenant_units::Bytes;

/// A decision about a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum LeaseDecision {
    /// A lease did not fit into the ledger.
    #[error("`{tenant}`: cannot reserve {asked}: {free} is free")]
    NotBooked {
        tenant: String,
        asked: Bytes,
        free: Bytes,
    },
    /// The holder's process has ended, or its control group is gone; its memory is credited.
    #[error(
        "{lease}{}: its holder has ended and its memory is free; {free} is free of {budget}",
        with_more(leases - 1)
    )]
    HolderGone {
        /// Lease through which the end was noticed.
        lease: LeaseName,
        /// Number of its leases, that one included.
        leases: usize,
        free: Bytes,
        budget: Bytes,
    },
    /// A holder has answered its target; nothing is credited yet.
    #[error("{lease} {}", answered(answer, *claimed))]
    Answered {
        lease: LeaseName,
        answer: TargetAnswer,
        claimed: Option<Bytes>,
    },
    /// A holder has answered a target that is not in force.
    #[error("{lease} answered target {nonce}, and {}: ignored", in_force(*current))]
    AnswerIgnored {
        lease: LeaseName,
        nonce: u64,
        current: Option<u64>,
    },
    /// A holder uses more than its leases hold.
    #[error(
        "`{holder}` uses {used} and holds {held}: {} are unaccounted; {free} is free",
        used.saturating_sub(*held)
    )]
    BeyondLease {
        /// Name under which it is measured.
        holder: String,
        used: Bytes,
        held: Bytes,
        /// Free memory, without the unaccounted use.
        free: Bytes,
    },
    /// A measurement shows the target as reached; the freed bytes are credited.
    #[error(
        "{lease} shrank to {stays}, {freed} verified after {} ms: it uses {used}; {free} is free of {budget}",
        took.as_millis()
    )]
    Reduced {
        lease: LeaseName,
        stays: Bytes,
        freed: Bytes,
        took: Duration,
        used: Bytes,
        free: Bytes,
        budget: Bytes,
    },
    /// A holder lowered its lease but was not measured there: it keeps its memory.
    #[error(
        "{lease} requested to shrink to {target} and {}: it keeps its memory",
        still_uses(*used)
    )]
    WishNotSeen {
        lease: LeaseName,
        target: Bytes,
        used: Option<Bytes>,
    },
    /// An ended lease was removed from the ledger after a reading.
    #[error(
        "{lease} is removed from the ledger with {held}{}; {free} is free of {budget}",
        unless_zero("; ", *rest, " is still in use and unaccounted")
    )]
    Closed {
        lease: LeaseName,
        held: Bytes,
        /// Bytes still in use, unaccounted.
        rest: Bytes,
        free: Bytes,
        budget: Bytes,
    },
    /// An ended lease was removed from the ledger after a sample, since its holder cannot be measured.
    #[error("{lease} has ended and cannot be measured: its {held} are free by the last sample")]
    ClosedUnmeasured { lease: LeaseName, held: Bytes },
    /// An ended lease was removed from the ledger without a reading in time; its bytes are unaccounted.
    #[error(
        "{lease} has ended and was not measured in time: its {held} are unaccounted until then"
    )]
    ClosedUnaccounted { lease: LeaseName, held: Bytes },
    /// An ended lease keeps the bytes that its holder may still take, since the holder has not acknowledged the end.
    #[error(
        "{lease} has ended unacknowledged: {bytes} stay in the ledger for {:.1} s at most; {free} is free of {budget}",
        at_most.as_secs_f64()
    )]
    KeptUntilAcknowledged {
        lease: LeaseName,
        bytes: Bytes,
        /// Upper bound: the rest of its term.
        at_most: Duration,
        free: Bytes,
        budget: Bytes,
    },
    /// Released by its holder or on the holder's behalf; credited once measured.
    #[error("released {lease} with {held}, free once measured")]
    Released { lease: LeaseName, held: Bytes },
    /// The end was acknowledged by the holder, or on its behalf by the user `by`.
    #[error("{lease}{}", acknowledged(*by, *held))]
    EndAcknowledged {
        lease: LeaseName,
        by: Option<u32>,
        held: Bytes,
    },
    /// Leases and workers of the previous run were taken over.
    #[error(
        "taken over from the previous run: {leases} leases, {workers} workers, {held} held of {budget}"
    )]
    TakenOver {
        leases: usize,
        workers: usize,
        held: Bytes,
        budget: Bytes,
    },
    /// The book of an earlier run arrived too late, and is ignored.
    #[error("the ledger of an earlier run arrived too late and is not taken over")]
    BookTooLate,
    /// A lease of the previous run was dropped, since a worker now has its name.
    #[error("lease {lease} is not taken over: a worker now has its name")]
    NameTaken { lease: LeaseName },
    /// A lease of the previous run was dropped, since it does not fit.
    #[error("lease {lease} is not taken over: its {held} do not fit, {free} is free of {budget}")]
    NotTakenOver {
        lease: LeaseName,
        held: Bytes,
        free: Bytes,
        budget: Bytes,
    },
}

/// Why a lease ends without its holder's request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum LeaseEnd {
    /// Not renewed within its term.
    #[error("expired: not renewed within its {} s term", term.as_secs_f64())]
    Expired { term: Duration },
    /// Released by another process of its user, or by an operator.
    #[error("was released by uid {uid}, not by its holder")]
    ReleasedByOther { uid: u32 },
    /// Its holder did not reach its target in time.
    #[error(
        "ends: {cause}; its target of {target} was due {:.1} s ago, and nothing is credited",
        late.as_secs_f64()
    )]
    NotReduced {
        target: Bytes,
        /// Time since the deadline of the target.
        late: Duration,
        cause: NotReduced,
    },
}

/// Evidence that a holder has not reached its target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum NotReduced {
    /// The holder did not answer.
    #[error("it did not reply")]
    Unanswered,
    /// The holder refused.
    #[error("it refused: {reason}")]
    Refused { reason: String },
    /// A reading newer than the answer shows more.
    #[error("{claim} and still uses {used}")]
    Measured { used: Bytes, claim: Claim },
    /// It answered, and no reading could be taken since.
    #[error("{claim} and cannot be measured")]
    Unmeasurable { claim: Claim },
}

/// Claim of a holder about a target that no measurement has confirmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Claim {
    /// The memory has been freed.
    #[error("it answered `applied`")]
    Applied,
    /// It requested more time.
    #[error("it requested more time")]
    Deferred,
    /// It lowered its lease itself.
    #[error("it requested less itself")]
    Resized,
}

fn answered(answer: &TargetAnswer, claimed: Option<Bytes>) -> String {
    match (answer, claimed) {
        (TargetAnswer::Applied, Some(claimed)) => {
            format!("reports to use {claimed} now; not yet measured")
        }
        (TargetAnswer::Applied, None) => "reports that it has shrunk; not yet measured".to_owned(),
        (TargetAnswer::Deferred { overage }, _) => {
            format!("still needs {overage} above its target")
        }
        (TargetAnswer::Refused { reason }, _) => format!("refuses its target: {reason}"),
    }
}

fn acknowledged(by: Option<u32>, held: Bytes) -> String {
    by.map_or_else(
        || " has ended, and its holder has acknowledged it".to_owned(),
        |uid| format!(": end acknowledged by uid {uid} on the holder's behalf; {held} credited once measured"),
    )
}

fn in_force(target: Option<u64>) -> String {
    target.map_or_else(
        || "has no target".to_owned(),
        |target| format!("target {target} is in force"),
    )
}

fn with_more(leases: usize) -> String {
    if leases == 0 {
        String::new()
    } else {
        format!(" with {leases} more leases")
    }
}
