//! Requests of tenants: a lease, its renewal, another size, its end.

use std::time::Duration;

use super::{
    context::{Context, above_target},
    serve,
};
use crate::{
    admission::{Want, WantKind},
    decision::{AdmissionDecision, Decision, LeaseDecision, LeaseEnd},
    denial::{Denial, NotHolder, Problem, Quota},
    event::{Action, Answer, Done},
    lease::{LeaseId, LeaseKind, LeaseRequest, Peer, Ticket},
    lease_table::{OF_PROCESS, OF_USER, Phase},
    params::ENGINE_TENANT,
    state::State,
};
use cotenant_units::{Bytes, TimeSpan};

pub(super) fn take_request(cx: &mut Context<'_>, ticket: Ticket, request: LeaseRequest) {
    if let Err(denial) = check_request(cx.state, &request) {
        cx.deny(ticket, denial);
        return;
    }
    if answer_repeated(cx, ticket, &request) {
        return;
    }
    if let Err(denial) = check_quota(cx.state, &request) {
        cx.deny(ticket, denial);
        return;
    }
    if request.validate_only {
        answer_validation(cx, ticket, &request);
        return;
    }
    let (id, wait) = (cx.state.leases.next_id(), request.wait);
    let (tenant, class) = (request.tenant.clone(), request.class);
    let want =
        Want::ours(&tenant, class, id, WantKind::Lease(request), cx.state.now).asked(ticket, wait);
    serve::ask_or_queue(cx, want, wait);
}

pub(super) fn take_cancellation(cx: &mut Context<'_>, ticket: Ticket) {
    for want in cx.state.queue.cancel(ticket) {
        cx.decide(AdmissionDecision::Withdrawn {
            tenant: want.tenant,
        });
    }
}

pub(super) fn take_renewal(
    cx: &mut Context<'_>,
    ticket: Ticket,
    id: LeaseId,
    generation: u64,
    peer: &Peer,
) {
    if let Err(denial) = cx.state.leases.owned(id, generation, peer) {
        cx.deny(ticket, denial);
        return;
    }
    cx.state.leases.renew(id, cx.state.now);
    cx.answer_lease(ticket, id);
}

pub(super) fn take_release(
    cx: &mut Context<'_>,
    ticket: Ticket,
    id: LeaseId,
    generation: u64,
    peer: &Peer,
) {
    match cx.with_leases(|leases, turn| leases.acknowledge_end(id, generation, peer, turn)) {
        Ok(false) => {}
        Ok(true) => {
            let owned = cx
                .state
                .leases
                .get(id)
                .is_some_and(|lease| lease.is_owned_by(peer));
            return decide_for(
                cx,
                ticket,
                LeaseDecision::EndAcknowledged {
                    lease: cx.state.leases.name_of(id),
                    by: (!owned).then_some(peer.uid),
                    held: cx.state.ledger.held_by(id),
                },
            );
        }
        Err(denial) => {
            cx.deny(ticket, denial);
            return;
        }
    }
    let by_holder = match cx.state.leases.owned(id, generation, peer) {
        Ok(lease) => lease.is_owned_by(peer),
        Err(denial) => {
            cx.deny(ticket, denial);
            return;
        }
    };
    let lease = cx.state.leases.name_of(id);
    let held = cx.state.ledger.held_by(id);
    if !by_holder {
        cx.out.push(Action::EndLease {
            lease: lease.clone(),
            end: LeaseEnd::ReleasedByOther { uid: peer.uid },
        });
    }
    // A peer that releases the lease of another answers for it that the holder may not have heard.
    cx.begin_ending(id, Bytes::ZERO);
    decide_for(cx, ticket, LeaseDecision::Released { lease, held });
}

/// Decides what is also the answer to the caller.
fn decide_for(cx: &mut Context<'_>, ticket: Ticket, decision: LeaseDecision) {
    let decision = Decision::from(decision);
    cx.decide(decision.clone());
    cx.done(ticket, Done::Decided(decision));
}

pub(super) fn take_resize(
    cx: &mut Context<'_>,
    ticket: Ticket,
    id: LeaseId,
    generation: u64,
    peer: &Peer,
    (min, max): (Bytes, Bytes),
    wait: Duration,
) {
    let lease = match cx.state.leases.owned(id, generation, peer) {
        Ok(lease) => lease,
        Err(denial) => {
            cx.deny(ticket, denial);
            return;
        }
    };
    let (tenant, class, uid) = (lease.tenant.clone(), lease.class, lease.owner.0);
    let held = cx.state.ledger.held_by(id);
    let fault = check_sizes(cx.state, &tenant, min, max).and_then(|()| match &lease.phase {
        Phase::Revoking(revocation) if !revocation.voluntary && max > revocation.target.bytes => {
            Err(above_target(&tenant, max, revocation.target.bytes))
        }
        _ if min > held && cx.state.draining => Err(Denial::Draining {
            tenant: tenant.clone(),
            asked: min,
        }),
        _ => Ok(()),
    });
    if let Err(denial) = fault {
        cx.deny(ticket, denial);
        return;
    }
    // The last call says what its holder wants; what waits of an earlier one would be granted beside it.
    let replaced = Denial::Replaced {
        lease: cx.state.leases.name_of(id).to_string(),
    };
    cx.forget_wants_of(id, &replaced);
    if min > held {
        let wait = wait.min(cx.state.params.lease.wait_max);
        let kind = WantKind::Grow { min, max, uid };
        let want = Want::ours(&tenant, class, id, kind, cx.state.now).asked(ticket, wait);
        serve::ask_or_queue(cx, want, wait);
        return;
    }
    cx.state.leases.set_bounds(id, min, max);
    if max < held {
        // Less than it has all the same, if more than it wanted last: what it was spared for goes on.
        cx.with_leases(|leases, turn| leases.lower_voluntarily(id, max, turn));
    } else {
        // A holder that wanted less may change its mind before that is measured.
        if cx
            .state
            .leases
            .get(id)
            .is_some_and(|lease| lease.wants_less_than(max))
        {
            cx.state.leases.end_revocation(id, &mut cx.state.ledger);
        }
        if cx.state.none_waits_before(class) {
            let more = max
                .saturating_sub(held)
                .min(cx.state.available(class, true));
            cx.grow_lease(id, held.saturating_add(more));
        }
    }
    cx.answer_lease(ticket, id);
}

fn check_request(state: &State, request: &LeaseRequest) -> Result<(), Denial> {
    let (tenant, limits) = (&request.tenant, &state.params.lease);
    for (field, text) in [("tenant", tenant), ("request_id", &request.request_id)] {
        let (bytes, limit) = (text.len(), limits.text_max);
        if Bytes::of_len(bytes).get() > u64::from(limit) {
            let shown: String = text.chars().take(SHOWN_MAX).collect();
            return Err(Denial::invalid(
                &shown,
                field,
                &shown,
                Problem::TooLong { bytes, limit },
            ));
        }
    }
    let ours = tenant == ENGINE_TENANT
        || (state.workers.contains(tenant) && !state.asks_for_itself(tenant));
    let problem = if tenant.is_empty() || tenant.chars().any(char::is_control) {
        Some(Problem::Unprintable)
    } else if ours {
        Some(Problem::OwnHolder)
    } else if tenant.contains(OF_PROCESS) || tenant.contains(OF_USER) {
        let marks = (OF_PROCESS.to_owned(), OF_USER.to_owned());
        Some(Problem::Marked { marks })
    } else {
        None
    };
    if let Some(problem) = problem {
        return Err(Denial::invalid(tenant, "tenant", tenant, problem));
    }
    check_sizes(state, tenant, request.min, request.max)?;
    let time = |field, value, problem| {
        Err(Denial::invalid(
            tenant,
            field,
            &TimeSpan(value).to_string(),
            problem,
        ))
    };
    let (least, most, limit) = (limits.term_min, limits.term_max, limits.wait_max);
    if request.term < least || request.term > most {
        return time("term", request.term, Problem::NotBetween { least, most });
    }
    if request.wait > limit {
        return time("wait", request.wait, Problem::AboveLimit { limit });
    }
    if state.draining {
        return Err(Denial::Draining {
            tenant: tenant.clone(),
            asked: request.min,
        });
    }
    Ok(())
}

fn check_sizes(state: &State, tenant: &str, min: Bytes, max: Bytes) -> Result<(), Denial> {
    let budget = state.ledger.budget();
    if min == Bytes::ZERO {
        Err(Denial::invalid(tenant, "min", &min, Problem::Zero))
    } else if max < min {
        Err(Denial::invalid(
            tenant,
            "max",
            &max,
            Problem::BelowMin { min },
        ))
    } else if min > budget {
        Err(Denial::ExceedsBudget {
            tenant: tenant.to_owned(),
            asked: min,
            budget,
        })
    } else {
        Ok(())
    }
}

fn check_quota(state: &State, request: &LeaseRequest) -> Result<(), Denial> {
    let uid = request.peer.uid;
    let held = state
        .leases
        .values()
        .filter(|lease| lease.kind == LeaseKind::Tenant && lease.owner.0 == uid)
        .count();
    let waiting = state
        .queue
        .values()
        .filter(|want| matches!(&want.kind, WantKind::Lease(other) if other.peer.uid == uid))
        .count();
    let tenants = state
        .leases
        .values()
        .filter(|lease| lease.kind == LeaseKind::Tenant)
        .count();
    if tenants + state.queue.values().count() >= LEASES_MAX {
        let (what, limit) = (Quota::Leases, Bytes::of_len(LEASES_MAX).get());
        return Err(Denial::QuotaExceeded {
            tenant: request.tenant.clone(),
            what,
            limit,
        });
    }
    let limit = u64::from(state.params.lease.leases_per_uid);
    if Bytes::of_len(held + waiting).get() >= limit {
        return Err(Denial::QuotaExceeded {
            tenant: request.tenant.clone(),
            what: Quota::LeasesOf { uid },
            limit,
        });
    }
    Ok(())
}

/// Answers a request that came before: the same lease, the same place in the queue, or that its id was used.
///
/// A place in the queue is that of the process that took it: another one that joined it would be granted what is measured
/// of the first.
fn answer_repeated(cx: &mut Context<'_>, ticket: Ticket, request: &LeaseRequest) -> bool {
    if request.request_id.is_empty() || request.validate_only {
        return false;
    }
    let same_id = |other: &LeaseRequest| {
        (&other.tenant, &other.request_id, other.peer.uid)
            == (&request.tenant, &request.request_id, request.peer.uid)
    };
    let granted = cx.state.leases.iter().find_map(|(id, lease)| {
        let other = lease.request.as_ref().filter(|other| same_id(other))?;
        (!lease.is_ending()).then(|| (id, same_content(other, request)))
    });
    let waiting = cx.state.queue.values().find_map(|want| match &want.kind {
        WantKind::Lease(other) if same_id(other) => {
            Some((want.lease, same_content(other, request), other.peer.pid))
        }
        _ => None,
    });
    match (granted, waiting) {
        (Some((id, true)), _) => cx.answer_lease(ticket, id),
        (None, Some((lease, true, pid))) if pid == request.peer.pid => {
            cx.state.queue.join(lease, ticket);
        }
        (None, Some((lease, true, pid))) => {
            let denial = Denial::NotHolder {
                lease: format!("{}#{}", request.tenant, lease.0),
                uid: request.peer.uid,
                problem: NotHolder::Awaited { pid },
            };
            cx.deny(ticket, denial);
        }
        (None, None) => return false,
        _ => cx.deny(
            ticket,
            Denial::RequestIdReused {
                tenant: request.tenant.clone(),
                request_id: request.request_id.clone(),
            },
        ),
    }
    true
}

fn answer_validation(cx: &mut Context<'_>, ticket: Ticket, request: &LeaseRequest) {
    if let Some(denial) = cx
        .state
        .admission_denial(&request.tenant, request.class, request.min)
    {
        cx.deny(ticket, denial);
        return;
    }
    let available = cx.state.available(request.class, true);
    let missing = request.min.saturating_sub(available);
    if missing > cx.state.reclaimable_for(request.class) {
        let denial = cx
            .state
            .insufficient(&request.tenant, None, request.min, request.class);
        cx.deny(ticket, denial);
    } else {
        cx.answer(
            ticket,
            Answer::WouldGrant {
                bytes: request.max.min(available).max(request.min),
                after_shedding: missing,
            },
        );
    }
}

/// Whether two requests ask the same, from whichever process.
fn same_content(one: &LeaseRequest, other: &LeaseRequest) -> bool {
    (one.class, one.min, one.max, one.term) == (other.class, other.min, other.max, other.term)
}

/// Characters of a text that is too long which are shown in the denial.
const SHOWN_MAX: usize = 32;

/// Leases of all users, with the requests that wait. Our choice, above what one user may have: each event looks at all of
/// them, and the end of a holder of 1000 takes milliseconds.
const LEASES_MAX: usize = 1024;
