//! Denials: why a request was not granted, with the figures that every API renders in its own protocol.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    growth_wait::GrowthWait,
    lease::Class,
    pressure_level::PressureLevel,
    reason::{Share, StopReason},
    snapshot::WorkerState,
};
use cotenant_units::{Bytes, TimeSpan};

/// Name of an operator in place of a tenant; tenants have no space in their names.
pub const OPERATOR: &str = "an operator";

/// Why a request was not granted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "denial")]
pub enum Denial {
    /// Does not fit, even after reclaiming everything that this class may.
    #[error("{}", lacks(tenant, *asked, *free, *reclaimable, *budget, holders))]
    InsufficientMemory {
        tenant: String,
        /// Minimum bytes requested.
        asked: Bytes,
        /// Budget minus everything held or unaccounted.
        free: Bytes,
        /// Reclaimable bytes for this class.
        reclaimable: Bytes,
        budget: Bytes,
        holders: Holders,
    },
    /// Exceeds the whole budget.
    #[error("cannot grant {asked} to `{tenant}`: the whole budget is {budget}")]
    ExceedsBudget {
        tenant: String,
        asked: Bytes,
        budget: Bytes,
    },
    /// The request contradicts itself, a limit, or the state of an object it names.
    #[error("cannot take the request of `{tenant}`: {field}: `{value}` {problem}")]
    Invalid {
        tenant: String,
        field: String,
        value: String,
        problem: Problem,
    },
    /// The request id was used before with other content.
    #[error(
        "cannot take request `{request_id}` of `{tenant}`: the id was used before with other content"
    )]
    RequestIdReused { tenant: String, request_id: String },
    /// Too many leases or waiting requests.
    #[error("cannot take the request of `{tenant}`: {what} is at its limit of {limit}")]
    QuotaExceeded {
        tenant: String,
        what: Quota,
        limit: u64,
    },
    /// No such lease, or it has ended; an expired lease is not restored.
    #[error("lease {lease} is unknown or has ended")]
    UnknownLease {
        /// Name given by the caller.
        lease: String,
    },
    /// A waiting call was replaced by a later one for the same lease.
    #[error("cannot resize lease {lease}: superseded by a later call of its holder")]
    Replaced { lease: String },
    /// The lease was granted again: the old generation is void.
    #[error(
        "lease {lease} cannot be changed with generation {generation}: the current one is {current}"
    )]
    StaleGeneration {
        lease: String,
        /// Generation of the caller.
        generation: u64,
        /// Present generation.
        current: u64,
    },
    /// The lease belongs to another holder.
    #[error("lease {lease} cannot be changed by uid {uid}: {problem}")]
    NotHolder {
        lease: String,
        /// User of the caller.
        uid: u32,
        problem: NotHolder,
    },
    /// The control group is that of another lease, or one of the two is inside the other.
    #[error(
        "cannot grant `{tenant}` a lease for control group `{cgroup}`: lease {lease} counts the processes of `{held}`"
    )]
    CgroupHeld {
        tenant: String,
        cgroup: String,
        /// Group of the other lease.
        held: String,
        lease: String,
    },
    /// The last sample of the machine is too old for a grant.
    #[error(
        "cannot grant {asked} to `{tenant}`: the last sample is {:.1} s old, and grants need one of at most {:.1} s",
        age.as_secs_f64(),
        limit.as_secs_f64()
    )]
    StaleSample {
        tenant: String,
        asked: Bytes,
        age: Duration,
        limit: Duration,
    },
    /// This class is not admitted at the present level.
    #[error(
        "cannot grant {asked} to `{tenant}`: pressure is {level} and class {class} waits until it is Normal"
    )]
    PressureHigh {
        tenant: String,
        asked: Bytes,
        class: Class,
        level: PressureLevel,
    },
    /// The engine cannot grow.
    #[error("cannot grow back: {wait}")]
    NotGrowing { wait: GrowthWait },
    /// The supervisor drains.
    #[error("cannot grant {asked} to `{tenant}`: the supervisor is draining")]
    Draining { tenant: String, asked: Bytes },
}

/// The holders of the missing memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holders {
    pub class: Class,
    pub shares: Vec<Share>,
    /// Used, but held by no tenant.
    pub unaccounted: Bytes,
}

/// A limit that is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Quota {
    /// Leases of all users and their waiting requests.
    #[error("leases of all users")]
    Leases,
    #[error("the queue")]
    Queue,
    /// A user's share of the queue.
    #[error("the share of uid {uid} in the queue")]
    QueueOf { uid: u32 },
    #[error("leases of uid {uid}")]
    LeasesOf { uid: u32 },
}

/// Why a peer may not act on a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum NotHolder {
    /// The supervisor holds it itself.
    #[error("the supervisor holds it itself")]
    Supervisor,
    #[error("it belongs to uid {uid}")]
    OwnedBy { uid: u32 },
    /// It has ended unacknowledged, and keeps `held` for `left`.
    #[error(
        "it has ended and belongs to uid {uid}; its {held} are kept for {:.1} s more unless its holder acknowledges \
         the end",
        left.as_secs_f64()
    )]
    Ended {
        uid: u32,
        held: Bytes,
        left: Duration,
    },
    /// Another process waits for it with the same request id.
    #[error(
        "{} waits for it by the same request id",
        pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
    )]
    Awaited { pid: Option<u32> },
}

/// Fault of a value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Problem {
    #[error("is zero")]
    Zero,
    #[error("is below min of {min}")]
    BelowMin { min: Bytes },
    #[error("is not between {} and {}", TimeSpan(*least), TimeSpan(*most))]
    NotBetween { least: Duration, most: Duration },
    #[error("is above the limit of {}", TimeSpan(*limit))]
    AboveLimit { limit: Duration },
    #[error("has {bytes} bytes and may have {limit}")]
    TooLong { bytes: usize, limit: u32 },
    /// A name that is empty or contains control characters.
    #[error("is empty or has control characters")]
    Unprintable,
    /// A name reserved for the supervisor's own holders.
    #[error("is reserved for the supervisor")]
    OwnHolder,
    /// A name with the suffixes that distinguish holders of one name.
    #[error("has `{}`, `{}` or ` (cgroup ` in it, which distinguish holders of one name", marks.0, marks.1)]
    Marked { marks: (String, String) },
    /// More than the present target of the lease.
    #[error("is above {target}, the target of the lease")]
    AboveTarget { target: Bytes },
    #[error("is not configured")]
    NotConfigured,
    #[error("no engine is configured")]
    NoEngine,
    /// The engine is loading, or failed to change recently.
    #[error("the engine is loading, or its last change failed; it applies with the next plan")]
    EngineBusy,
    #[error("was not applied as plan {revision}: {reason}")]
    NotApplied { revision: u64, reason: String },
    #[error("{}", no_variant(known))]
    NotAVariant { known: Vec<String> },
    #[error("is {} and cannot change", state.word())]
    NotReady { state: WorkerState },
    #[error("is changing to `{variant}`; retry afterwards")]
    ChangingTo { variant: String },
    #[error("cannot change at present")]
    CannotChange,
    /// A variant kept because of this error.
    #[error("was kept: {error}")]
    Kept { error: String },
    #[error("was requested, without a reply within {:.1} s", within.as_secs_f64())]
    NotAnswered { within: Duration },
    #[error("exited while it changed: {cause}")]
    Exited { cause: String },
    #[error("is being stopped: {0}")]
    Stopping(Box<StopReason>),
    /// A fault of settings, as text of their check.
    #[serde(untagged)]
    #[error("{0}")]
    Text(String),
}

impl Denial {
    /// Creates the denial of an invalid value.
    #[must_use]
    pub fn invalid(tenant: &str, field: &str, value: &dyn ToString, problem: Problem) -> Self {
        Self::Invalid {
            tenant: tenant.to_owned(),
            field: field.to_owned(),
            value: value.to_string(),
            problem,
        }
    }
}

/// ` (a#1 holds 6 GiB, none of it for batch: interactive is more urgent; …)`, or an empty string.
impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            class,
            shares,
            unaccounted,
        } = self;
        let shares = shares.iter().map(|share| match &share.spared {
            Some(why) => format!(
                "{} holds {}, none of it for {class}: {why}",
                share.holder, share.held
            ),
            None => format!(
                "{} holds {} and can release {}",
                share.holder, share.held, share.gives
            ),
        });
        let unaccounted = (*unaccounted > Bytes::ZERO)
            .then(|| format!("{unaccounted} is unaccounted and held by no tenant"));
        let all: Vec<String> = shares.chain(unaccounted).collect();
        if all.is_empty() {
            return Ok(());
        }
        write!(f, " ({})", all.join("; "))
    }
}

fn lacks(
    tenant: &str,
    asked: Bytes,
    free: Bytes,
    reclaimable: Bytes,
    budget: Bytes,
    holders: &Holders,
) -> String {
    if tenant != OPERATOR {
        return format!(
            "cannot grant {asked} to `{tenant}`: {free} is free and {reclaimable} can be reclaimed, of a {budget} budget{holders}"
        );
    }
    let Some(Share { held, spared, .. }) = holders.shares.first() else {
        return format!("cannot shed {asked}: no LLM is loaded");
    };
    let why = spared.as_ref().map(|why| format!(", because it {why}"));
    format!(
        "cannot shed {asked}: the LLM can release {reclaimable} of its {held}{}",
        why.unwrap_or_default()
    )
}

fn no_variant(known: &[String]) -> String {
    if known.is_empty() {
        "is unavailable: the worker has no variants".to_owned()
    } else {
        format!("is not one of its variants: {}", known.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        lease::{Class, LeaseId, LeaseName},
        reason::{Share, SpareReason},
    };

    #[test]
    fn a_shed_that_is_refused_for_now_says_why() {
        let held = Bytes::from_mib(132);
        let denial = Denial::InsufficientMemory {
            tenant: OPERATOR.to_owned(),
            asked: Bytes::from_mib(10),
            free: Bytes::ZERO,
            reclaimable: Bytes::ZERO,
            budget: Bytes::from_mib(400),
            holders: Holders {
                class: Class::AudioRealtime,
                shares: vec![Share {
                    holder: LeaseName {
                        id: LeaseId(1),
                        tenant: "llm".to_owned(),
                    },
                    held,
                    gives: Bytes::ZERO,
                    spared: Some(SpareReason::EngineBusy),
                }],
                unaccounted: Bytes::ZERO,
            },
        };
        assert_eq!(
            denial.to_string(),
            "cannot shed 10 MiB: the LLM can release 0 B of its 132 MiB, because it is loading, or its last shed failed"
        );
    }

    #[test]
    fn a_denial_of_a_value_names_its_bounds() {
        let invalid = |field, problem| Denial::invalid("a", field, &"1h", problem);
        let (least, most) = (Duration::from_secs(2), Duration::from_secs(300));
        let term = invalid("term", Problem::NotBetween { least, most });
        assert_eq!(
            term.to_string(),
            "cannot take the request of `a`: term: `1h` is not between 2 s and 5 min"
        );
        let variant = invalid("variant", Problem::NotAVariant { known: Vec::new() });
        assert!(
            variant
                .to_string()
                .ends_with("variant: `1h` is unavailable: the worker has no variants"),
            "{variant}"
        );
    }

    #[test]
    fn a_denial_names_the_holders_of_what_is_missing() {
        let share = |id, held, spared| Share {
            holder: LeaseName {
                id: LeaseId(id),
                tenant: "a".to_owned(),
            },
            held: Bytes::from_gib(held),
            gives: Bytes::from_gib(1),
            spared,
        };
        let class = Class::Interactive;
        let denial = |shares, unaccounted| Denial::InsufficientMemory {
            tenant: "b".to_owned(),
            asked: Bytes::from_gib(6),
            free: Bytes::from_gib(2),
            reclaimable: Bytes::ZERO,
            budget: Bytes::from_gib(8),
            holders: Holders {
                class,
                shares,
                unaccounted,
            },
        };
        let words =
            "cannot grant 6 GiB to `b`: 2 GiB is free and 0 B can be reclaimed, of a 8 GiB budget";
        assert_eq!(denial(Vec::new(), Bytes::ZERO).to_string(), words);
        let shares = vec![
            share(1, 6, Some(SpareReason::AsUrgent(class))),
            share(2, 3, None),
        ];
        assert_eq!(
            denial(shares, Bytes::from_mib(5)).to_string(),
            format!(
                "{words} (a#1 holds 6 GiB, none of it for interactive: interactive is as urgent; a#2 holds 3 GiB and can release \
                 1 GiB; 5 MiB is unaccounted and held by no tenant)"
            )
        );
        let ended = NotHolder::Ended {
            uid: 1000,
            held: Bytes::from_mib(300),
            left: Duration::from_millis(7675),
        };
        assert_eq!(
            ended.to_string(),
            "it has ended and belongs to uid 1000; its 300 MiB are kept for 7.7 s more unless its holder \
             acknowledges the end"
        );
    }
}
