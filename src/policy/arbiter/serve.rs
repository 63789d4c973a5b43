//! Service of the queue: grants, explained waits, and reclaim for the first request.
//!
//! For the order see [`admission`](crate::admission).

use std::time::Duration;

use super::{
    context::Context,
    reclaim_orders,
    worker_orders::{self, out_of_reach},
};
use crate::{
    admission::{Place, Want, WantKind},
    decision::AdmissionDecision,
    denial::Denial,
    lease::{Class, LeaseId, LeaseRequest},
    lease_table::Lease,
    reason::ReclaimReason,
    reclaim,
    state::State,
};
use cotenant_units::Bytes;

/// Serves a request at once, or queues it for at most `wait`.
pub(super) fn ask_or_queue(cx: &mut Context<'_>, want: Want, wait: Duration) {
    let full = cx.queue.full_for(&want, &cx.params.lease);
    let overtakes = cx.none_waits_before(want.class);
    let tenant = want.tenant.clone();
    let place = cx.queue.insert(want);
    if overtakes && serve(cx, place) {
        return;
    }
    let denial = match full {
        _ if wait.is_zero() => cx.queue.get(place).map(|want| why_not(cx.state, want)),
        Some((what, limit)) => Some(Denial::QuotaExceeded {
            tenant: tenant.clone(),
            what,
            limit: limit.into(),
        }),
        None => None,
    };
    if let Some(denial) = denial {
        let tickets = cx.queue.remove(place).map(|want| want.tickets);
        cx.deny_all(tickets.unwrap_or_default(), &denial);
        return;
    }
    // The request no longer blocks the queue, so its wait is logged only here.
    let hopeless = cx.queue.get(place).filter(|want| cx.is_out_of_reach(want));
    if let Some(denial) = hopeless.map(|want| why_not(cx.state, want)) {
        cx.decide(AdmissionDecision::OutOfReach { tenant, denial });
    }
}

pub(super) fn serve_queue(cx: &mut Context<'_>) {
    for place in cx.queue.places() {
        if serve(cx, place) {
            continue;
        }
        let Some(want) = cx.queue.get(place) else {
            continue;
        };
        if cx.holds_back(want) {
            let first = want.lease;
            note_first(cx, Some(first));
            return reclaim_for_want(cx, place);
        }
        if want.kind == WantKind::WorkerStart && cx.is_out_of_reach(want) {
            let name = want.tenant.clone();
            explain_out_of_reach(cx, &name);
        }
    }
    note_first(cx, None);
}

/// Notes the request that the queue waits for: a different one, or a new wait of the same one, is explained again.
fn note_first(cx: &mut Context<'_>, first: Option<LeaseId>) {
    if cx.record.first_waits != first {
        cx.record.first_waits = first;
        cx.record.said.remove(FIRST_WAITS);
    }
}

/// Explains a start that needs more than can become free, once for each change of the figures.
fn explain_out_of_reach(cx: &mut Context<'_>, name: &str) {
    let worker = cx.workers.get(name);
    if let Some(wait) = worker.and_then(|worker| cx.worker_wait(worker)) {
        let (worker, figures) = (name.to_owned(), [wait.needs, wait.free, wait.most]);
        let decision = AdmissionDecision::StartOutOfReach { worker, wait };
        cx.decide_once(&out_of_reach(name), &figures, decision);
    }
}

pub(super) fn serve_deadlines(cx: &mut Context<'_>) {
    for aged in cx.state.queue.age(&cx.state.params.lease, cx.state.now) {
        cx.decide(aged);
    }
    let now = cx.now;
    let is_due = |want: &Want| want.deadline.is_some_and(|deadline| deadline <= now);
    for want in cx.queue.take(is_due) {
        let denial = why_not(cx.state, &want);
        cx.deny_all(want.tickets, &denial);
    }
}

pub(super) fn deny_all_waiting(cx: &mut Context<'_>) {
    for want in cx.queue.take(|_| true) {
        let denial = Denial::Draining {
            asked: cx.asked_by(&want),
            tenant: want.tenant,
        };
        cx.deny_all(want.tickets, &denial);
    }
}

fn why_not(state: &State, want: &Want) -> Denial {
    let asked = state.asked_by(want);
    state
        .admission_denial(&want.tenant, want.class, asked)
        .unwrap_or_else(|| state.insufficient(&want.tenant, Some(want.lease), asked, want.class))
}

/// Returns the bytes that a want needs beyond its lease, and those available; `None` if it is not admitted now.
fn needed_and_available(state: &State, want: &Want) -> Option<(Bytes, Bytes)> {
    let denial = state.admission_denial(&want.tenant, want.class, state.asked_by(want));
    // The peak of a worker that requests its own lease is reserved until now.
    let reserved = state.reserved_until_asked(want);
    let available = state
        .available(want.class, want.deadline.is_some())
        .saturating_add(reserved.map_or(Bytes::ZERO, |(_, bytes)| bytes));
    (denial.is_none()).then(|| (state.needed_by(want), available))
}

/// Serves a want if it fits. Returns whether it is off the queue.
fn serve(cx: &mut Context<'_>, place: Place) -> bool {
    let Some(want) = cx.queue.get(place) else {
        return true;
    };
    let Some((needed, available)) = needed_and_available(cx.state, want) else {
        return false;
    };
    if needed > available {
        return false;
    }
    let reserved = cx.reserved_until_asked(want);
    let Some(want) = cx.queue.remove(place) else {
        return true;
    };
    match want.kind.clone() {
        WantKind::Lease(request) => {
            grant_lease(cx, want, request, reserved.map(|(from, _)| from), available);
        }
        WantKind::Grow { min, max, .. } => grow_for(cx, want, (min, max), available),
        WantKind::WorkerStart => worker_orders::start(cx, &want.tenant, want.lease),
        WantKind::WorkerVariant { variant } => {
            worker_orders::grow(cx, &want.tenant, variant, want.tickets);
        }
    }
    true
}

fn grant_lease(
    cx: &mut Context<'_>,
    want: Want,
    request: LeaseRequest,
    from: Option<LeaseId>,
    available: Bytes,
) {
    let (min, bytes) = (request.min, request.max.min(available));
    // A worker that requests its own lease is measured as the worker.
    let holder = if cx.workers.contains_key(&request.tenant) {
        request.tenant.clone()
    } else {
        cx.leases.holder_for(&request)
    };
    let generation = cx.leases.next_generation();
    let lease = Lease::of_tenant(request, holder, generation, cx.now);
    if !cx.with_leases(|leases, turn| leases.grant((want.lease, lease), from, bytes, turn)) {
        let denial = cx.insufficient(&want.tenant, Some(want.lease), min, want.class);
        cx.deny_all(want.tickets, &denial);
        return;
    }
    cx.decide(AdmissionDecision::Granted {
        lease: cx.leases.name_of(want.lease),
        bytes,
        waited: cx.now.saturating_since(want.since),
        free: cx.ledger.free(),
        budget: cx.ledger.budget(),
    });
    for ticket in want.tickets {
        cx.answer_lease(ticket, want.lease);
    }
}

fn grow_for(cx: &mut Context<'_>, want: Want, (min, max): (Bytes, Bytes), available: Bytes) {
    let id = want.lease;
    cx.forget_wish(id, max);
    let held = cx.ledger.held_by(id);
    let bytes = max.min(held.saturating_add(available)).max(min);
    cx.grow_lease(id, bytes);
    cx.leases.set_bounds(id, min, max);
    cx.decide(AdmissionDecision::Grown {
        lease: cx.leases.name_of(id),
        from: held,
        to: bytes,
        waited: cx.now.saturating_since(want.since),
        free: cx.ledger.free(),
        budget: cx.ledger.budget(),
    });
    for ticket in want.tickets {
        cx.answer_lease(ticket, id);
    }
}

/// Reclaims what the first request lacks, if enough can be reclaimed.
fn reclaim_for_want(cx: &mut Context<'_>, place: Place) {
    let Some(want) = cx.queue.get(place) else {
        return;
    };
    let Some((needed, available)) = needed_and_available(cx.state, want) else {
        return;
    };
    let (tenant, class, ours) = (want.tenant.clone(), want.class, want.deadline.is_none());
    let (own, asked) = (Some(want.lease), cx.asked_by(want));
    let coming_back = cx.coming_back();
    let expected = available.saturating_add(coming_back);
    let missing = needed.saturating_sub(expected);
    if missing == Bytes::ZERO {
        return;
    }
    let reason = ReclaimReason::Request {
        tenant: tenant.clone(),
        class,
        needed,
        free: cx.ledger.free(),
        coming_back,
        budget: cx.ledger.budget(),
    };
    let has_its_turn = ours && place.0 < class && place.0 < Class::LlmElastic;
    let reclaim = if has_its_turn {
        reclaim::from_engine(cx.state, missing, reason)
    } else {
        reclaim::for_request(cx.state, class, missing, reason)
    };
    if let Some(reclaim) = reclaim {
        reclaim_orders::carry_out(cx, reclaim);
    } else {
        let denial = cx.insufficient(&tenant, own, asked, class);
        let figures = [asked, cx.available(class, true), cx.reclaimable_for(class)];
        let decision = AdmissionDecision::Waits { tenant, denial };
        cx.decide_once(FIRST_WAITS, &figures, decision);
    }
}

/// Key of a decision that is logged once.
const FIRST_WAITS: &str = "the first in the queue waits";
