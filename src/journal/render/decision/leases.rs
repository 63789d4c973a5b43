//! Decisions about leases and requests as English.

use crate::policy::decision::{AdmissionDecision, Claim, LeaseDecision, LeaseEnd, LeaseName, NotReduced};

/// Why a lease ends, as its holder and operators read it.
#[must_use]
pub fn render_lease_end(lease: &LeaseName, end: &LeaseEnd) -> String {
    match end {
        LeaseEnd::Expired { term } => {
            let term = term.as_secs_f64();
            format!("lease {lease} expired: not renewed within its {term} s term")
        }
        LeaseEnd::ReleasedByOther { uid } => format!("lease {lease} was released by uid {uid}, not by its holder"),
        LeaseEnd::NotReduced { target, late, cause } => {
            let (cause, late) = (not_reduced(cause), late.as_secs_f64());
            format!(
                "lease {lease} ends: {cause}; its target of {target} was due {late:.1} s ago, and nothing is credited"
            )
        }
    }
}

fn not_reduced(cause: &NotReduced) -> String {
    let claimed = |claim: &Claim| match claim {
        Claim::Applied => "it answered `applied`",
        Claim::Deferred => "it asked for more time",
        Claim::Resized => "it asked for less itself",
    };
    match cause {
        NotReduced::Unanswered => "it has not answered".to_owned(),
        NotReduced::Refused { reason } => format!("it refused: {reason}"),
        NotReduced::Measured { used, claim } => format!("{} and still uses {used}", claimed(claim)),
        NotReduced::Unmeasurable { claim } => format!("{} and cannot be measured", claimed(claim)),
    }
}

pub(super) fn lease(decision: &LeaseDecision) -> String {
    match decision {
        LeaseDecision::HolderGone {
            lease,
            leases,
            free,
            budget,
        } => {
            let others = match leases - 1 {
                0 => String::new(),
                others => format!(" with {others} more leases"),
            };
            format!("{lease}{others}: its process has ended and its memory is free; {free} is free of {budget}")
        }
    }
}

pub(super) fn admission(decision: &AdmissionDecision) -> String {
    match decision {
        AdmissionDecision::DrainBegun => "draining: nothing new is admitted".to_owned(),
    }
}
