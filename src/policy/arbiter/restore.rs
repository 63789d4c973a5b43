//! State handed from one run to the next.
//!
//! ```text
//!   last run:  held, or under a target ──► held in full, for one more term
//!              ended, not yet measured ──► fenced: residual use counts as unmanaged until the holder exits; bytes
//!                                          that a holder unaware of the end may take, for one more term
//!              waiting in the queue ──► gone; the callers retry
//!   worker:    alive ──► booked as before, starting until it answers
//!              gone ──► as at any start
//! ```
//!
//! Leases and workers taken over count before any admission, so that no memory is promised twice.

use super::{context::Context, worker_orders};
use crate::{
    book::{AdoptedWorker, Book, BookedLease, BookedRun, BookedStop, BookedWorker},
    decision::{LeaseDecision, WorkerDecision},
    lease::{LeaseId, LeaseKind, LeaseName},
    lease_table::{Lease, Phase},
    reason::StopReason,
    state::State,
    worker::StopCause,
};

/// Returns the state that the next run needs.
pub(super) fn book(state: &State) -> Book {
    let booked = |id: LeaseId, lease: &Lease| {
        Some(BookedLease {
            id,
            generation: lease.generation,
            held: state.ledger.held_by(id),
            min: lease.min,
            max: lease.max,
            request: lease.request.clone()?,
        })
    };
    let (mut leases, mut ended) = (Vec::new(), Vec::new());
    for (id, lease) in state.leases.iter() {
        let unacknowledged = matches!(&lease.phase, Phase::Ending { unacknowledged, .. } if unacknowledged.is_some());
        if unacknowledged {
            ended.extend(booked(id, lease));
        } else if !lease.is_ending() {
            leases.extend(booked(id, lease));
        }
    }
    let workers = state.workers.values();
    let workers = workers.map(|worker| worker.booked(state.worker_held(&worker.params.name)));
    Book {
        last: state.leases.last_numbers(),
        leases,
        ended,
        workers: workers.collect(),
    }
}

pub(super) fn take_recovered(cx: &mut Context<'_>, mut book: Book, adopted: &[AdoptedWorker]) {
    if cx.leases.ids().next().is_some() || !cx.queue.is_empty() {
        return cx.decide(LeaseDecision::BookTooLate);
    }
    // Targets may have been sent after the last write of the book; their nonces must not be reused.
    book.last.nonce = book.last.nonce.saturating_add(NONCES_SKIPPED);
    cx.leases.skip(book.last);
    for booked in &book.workers {
        if let Some(worker) = cx.state.workers.get_mut(&booked.name) {
            worker.restore(booked, cx.state.now);
        }
    }
    for worker in adopted {
        let booked = book
            .workers
            .iter()
            .find(|booked| booked.name == worker.worker);
        adopt_worker(cx, worker, booked);
    }
    for lease in book.leases {
        restore_lease(cx, lease);
    }
    for lease in book.ended {
        let id = lease.id;
        restore_lease(cx, lease);
        let held = cx.ledger.held_by(id);
        cx.begin_ending(id, held);
    }
    cx.changed_at = cx.now;
    let tenants = cx
        .leases
        .values()
        .filter(|lease| lease.kind == LeaseKind::Tenant);
    cx.decide(LeaseDecision::TakenOver {
        leases: tenants.count(),
        workers: adopted.len(),
        held: cx.ledger.held(),
        budget: cx.ledger.budget(),
    });
}

/// Books a running worker, and repeats its pending stop.
fn adopt_worker(cx: &mut Context<'_>, adopted: &AdoptedWorker, booked: Option<&BookedWorker>) {
    let name = &adopted.worker;
    let Some(worker) = cx.state.workers.get(name) else {
        return;
    };
    let run = booked
        .map(|booked| booked.run.clone())
        .unwrap_or_else(|| BookedRun {
            variant: adopted.variant.clone(),
            ..BookedRun::default()
        });
    let (id, held) = run.lease.unwrap_or_else(|| {
        // Its start was not written before the supervisor was killed: it may take its whole peak.
        (
            cx.state.leases.next_id(),
            worker.params.peak_of(run.variant.as_deref()),
        )
    });
    // Bytes that do not fit are not booked: they are unaccounted, and the worker is stopped.
    let fits = held.min(cx.ledger.free());
    if !worker_orders::book(cx, name, id, fits) {
        return;
    }
    if let Some(worker) = cx.state.workers.get_mut(name) {
        worker.adopt(&run, id, adopted.pid, cx.state.now);
    }
    cx.decide(WorkerDecision::TakenOver {
        worker: name.clone(),
        pid: adopted.pid,
        held,
    });
    if fits < held {
        let budget = cx.ledger.budget();
        worker_orders::stop(cx, name, StopReason::OverBudget { held, budget });
    } else if let Some(stop) = run.stop {
        let cause = match stop {
            BookedStop::Again => StopCause::Recycle,
            BookedStop::ForGood => StopCause::Operator,
            BookedStop::ToShed => StopCause::Shed,
        };
        worker_orders::stop_for(cx, name, cause, StopReason::AskedBefore);
    }
}

/// Restores a lease for one more term, in which its holder must renew it.
fn restore_lease(cx: &mut Context<'_>, booked: BookedLease) {
    let (id, held, request) = (booked.id, booked.held, booked.request);
    let limits = cx.params.lease;
    let tenant = request.tenant.clone();
    if cx.workers.contains_key(&tenant) {
        let lease = LeaseName { id, tenant };
        return cx.decide(LeaseDecision::NameTaken { lease });
    }
    let holder = cx.leases.holder_for(&request);
    let term = request.term;
    let term = term.map(|term| term.clamp(limits.term_min, limits.term_max));
    let lease = Lease {
        min: booked.min,
        max: booked.max,
        expires_at: term.map(|term| cx.now + term),
        ..Lease::of_tenant(request, holder, booked.generation, cx.now)
    };
    if !cx.grant(id, held, lease) {
        cx.decide(LeaseDecision::NotTakenOver {
            lease: LeaseName { id, tenant },
            held,
            free: cx.ledger.free(),
            budget: cx.ledger.budget(),
        });
    }
}

/// More targets than are sent between two writes of the book.
const NONCES_SKIPPED: u64 = 1 << 20;
