//! Decisions about leases and requests as English.

use super::super::reason::still_uses;
use crate::policy::{
    decision::{AdmissionDecision, Claim, LeaseDecision, LeaseEnd, NotReduced},
    lease::{LeaseName, TargetAnswer},
};
use crate::units::Bytes;

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
        LeaseDecision::Answered { lease, answer, claimed } => match (answer, claimed) {
            (TargetAnswer::Applied, Some(claimed)) => format!("{lease} reports to use {claimed} now; not yet measured"),
            (TargetAnswer::Applied, None) => format!("{lease} reports that it has come down; not yet measured"),
            (TargetAnswer::Deferred { overage }, _) => format!("{lease} still needs {overage} above its target"),
            (TargetAnswer::Refused { reason }, _) => format!("{lease} refuses its target: {reason}"),
        },
        LeaseDecision::NotBooked { tenant, asked, free } => {
            format!("`{tenant}`: cannot book {asked}: {free} is free")
        }
        LeaseDecision::AnswerIgnored { lease, nonce, current } => match current {
            Some(current) => format!("{lease} answered target {nonce}, and target {current} is in force: ignored"),
            None => format!("{lease} answered target {nonce}, and has no target: ignored"),
        },
        LeaseDecision::BeyondLease { holder, used, held, free } => {
            let beyond = used.saturating_sub(*held);
            format!("`{holder}` uses {used} and holds {held}: {beyond} are unaccounted; {free} is free")
        }
        LeaseDecision::Reduced { lease, stays, freed, took, used, free, budget } => {
            let took = took.as_millis();
            format!(
                "{lease} is down to {stays}, {freed} verified after {took} ms: it uses {used}; {free} is free of {budget}"
            )
        }
        LeaseDecision::WishNotSeen { lease, target, used } => {
            let used = still_uses(*used);
            format!("{lease} wanted to come down to {target} and {used}: it keeps what it holds")
        }
        LeaseDecision::Closed { lease, held, rest, free, budget } => {
            let rest =
                if *rest > Bytes::ZERO { format!("; {rest} is still in use and unaccounted") } else { String::new() };
            format!("{lease} is off the book with {held}{rest}; {free} is free of {budget}")
        }
        LeaseDecision::ClosedUnmeasured { lease, held } => {
            format!("{lease} has ended and cannot be measured: its {held} are free as far as the last sample shows")
        }
        LeaseDecision::ClosedUnaccounted { lease, held } => {
            format!("{lease} has ended and was not measured in time: its {held} are unaccounted until it is")
        }
        LeaseDecision::KeptUntilAcknowledged { lease, bytes, at_most, free, budget } => {
            let at_most = at_most.as_secs_f64();
            format!(
                "{lease} has ended unacknowledged: {bytes} stay on the book for {at_most:.1} s at most; \
                 {free} is free of {budget}"
            )
        }
        LeaseDecision::HolderGone { lease, leases, free, budget } => {
            let others = match leases - 1 {
                0 => String::new(),
                others => format!(" with {others} more leases"),
            };
            format!("{lease}{others}: its process has ended and its memory is free; {free} is free of {budget}")
        }
        LeaseDecision::Released { lease, held } => format!("released {lease} with {held}, free once measured"),
        LeaseDecision::EndAcknowledged { lease, by: None, .. } => {
            format!("{lease} has ended, and its holder has acknowledged it")
        }
        LeaseDecision::EndAcknowledged { lease, by: Some(uid), held } => {
            format!("{lease}: end acknowledged by uid {uid} on the holder's behalf; {held} credited once measured")
        }
        LeaseDecision::TakenOver { leases, workers, held, budget } => {
            format!("taken over from the run before: {leases} leases, {workers} workers, {held} held of {budget}")
        }
        LeaseDecision::BookTooLate => "a book of an earlier run comes too late and is not taken over".to_owned(),
        LeaseDecision::NameTaken { lease } => {
            format!("lease {lease} is not taken over: a worker has its name now")
        }
        LeaseDecision::NotTakenOver { lease, held, free, budget } => {
            format!("lease {lease} is not taken over: its {held} do not fit, {free} is free of {budget}")
        }
    }
}

pub(super) fn admission(decision: &AdmissionDecision) -> String {
    match decision {
        AdmissionDecision::DrainBegun => "draining: nothing new is admitted".to_owned(),
        AdmissionDecision::DrainEnded => "the drain has ended: requests are admitted again".to_owned(),
        AdmissionDecision::Granted { lease, bytes, waited, free, budget } => {
            format!("granted {bytes} to {lease} after {} ms: {free} is free of {budget}", waited.as_millis())
        }
        AdmissionDecision::Grown { lease, from, to, waited, free, budget } => {
            format!("grown {lease} from {from} to {to} after {} ms: {free} is free of {budget}", waited.as_millis())
        }
        AdmissionDecision::Waits { tenant, denial } => format!("`{tenant}` waits: {denial}"),
        AdmissionDecision::OutOfReach { tenant, denial } => {
            format!("`{tenant}` waits for what it cannot have at present: {denial}")
        }
        AdmissionDecision::StartOutOfReach { worker, wait } => format!("worker `{worker}` cannot be started: {wait}"),
        AdmissionDecision::Aged { tenant, class, waited, rank } => {
            format!("`{tenant}` ({class}) has waited for {} s and is served as {rank} now", waited.as_secs())
        }
        AdmissionDecision::TurnOver { tenant, class } => format!("`{tenant}` ({class}) has had its turn and waits on"),
        AdmissionDecision::Withdrawn { tenant } => format!("`{tenant}` does not wait any more"),
    }
}
