//! Orders to workers: start, change, shrink, stop.
//!
//! A notification tells a worker only that memory is short; the size to which it shrinks is known from its settings. As
//! a tenant, it gets a target with a deadline and is credited when measured. Since it cannot answer, every measurement
//! after the notification counts. A worker that does not shrink is logged, not notified again, and stopped unless it is
//! busy.

use super::context::Context;
use crate::{
    admission::WantKind,
    decision::{ChangeCause, Decision, WorkerDecision},
    denial::{Denial, Problem},
    event::{Action, Done},
    growth_wait::GrowthWait,
    lease::{LeaseId, LeaseKind, Ticket},
    lease_table::{Lease, Lower, Revocation},
    reason::{IgnoredPressure, ReclaimReason, StopReason},
    worker::{Resizing, StopCause, Worker},
};
use cotenant_units::{Bytes, Timestamp};

/// Queues the start of a worker.
pub(super) fn want(cx: &mut Context<'_>, name: &str) {
    let Some(worker) = cx.state.workers.get_mut(name) else {
        return;
    };
    worker.want(cx.state.now);
    let class = worker.params.class;
    let id = cx.leases.next_id();
    cx.queue_own(name, class, id, WantKind::WorkerStart);
}

/// Queues the change of a worker to a larger variant.
pub(super) fn queue_variant(cx: &mut Context<'_>, name: &str, variant: String) {
    let worker = cx.workers.get(name);
    if let Some((lease, class)) = worker.and_then(|it| Some((it.lease()?, it.params.class))) {
        cx.queue_own(name, class, lease, WantKind::WorkerVariant { variant });
    }
}

/// Restarts a worker right after its exit, before its memory is granted to another holder.
pub(super) fn start_again_at_once(cx: &mut Context<'_>, name: &str) {
    if cx.draining || cx.start_least(name) > cx.ledger.free() {
        want(cx, name);
        return;
    }
    let id = cx.leases.next_id();
    start(cx, name, id);
}

/// Starts a worker; the caller has checked that its least need fits.
pub(super) fn start(cx: &mut Context<'_>, name: &str, id: LeaseId) {
    let peak = cx.worker_peak(name, None);
    let spare = cx.ledger.free().min(peak);
    let peak = cx.start_least(name).max(spare);
    if !book(cx, name, id, peak) {
        want(cx, name);
        return;
    }
    let Some(worker) = cx.state.workers.get_mut(name) else {
        return;
    };
    worker.start(id, cx.state.now);
    let variant = worker.variant().map(str::to_owned);
    cx.record.said.remove(&out_of_reach(name));
    cx.decide(WorkerDecision::Starting {
        worker: name.to_owned(),
        peak,
        free: cx.ledger.free(),
        budget: cx.ledger.budget(),
    });
    cx.out.push(Action::StartWorker {
        worker: name.to_owned(),
        variant,
    });
}

/// Grants the supervisor's lease for a worker. Returns `false` if it does not fit.
pub(super) fn book(cx: &mut Context<'_>, name: &str, id: LeaseId, bytes: Bytes) -> bool {
    let Some(worker) = cx.state.workers.get(name) else {
        return false;
    };
    let params = &worker.params;
    let peaks = params.variants.iter().map(|variant| variant.peak);
    let bounds = (
        params.steady_of(None),
        peaks.max().unwrap_or(params.peak_of(None)),
    );
    let kind = (LeaseKind::Worker, params.class);
    let lease = Lease::of_ours(
        &params.name,
        kind,
        cx.state.leases.next_generation(),
        bounds,
        cx.now,
    );
    let booked = cx.grant(id, bytes, lease);
    if booked {
        cx.ledger.set_moving(id, true);
    }
    booked
}

/// Changes a worker to a larger variant; the caller has checked that it fits.
pub(super) fn grow(cx: &mut Context<'_>, name: &str, variant: String, tickets: Vec<Ticket>) {
    let changeable = cx
        .workers
        .get(name)
        .filter(|worker| worker.is_settled())
        .and_then(Worker::lease);
    let peak = cx.worker_peak(name, Some(&variant));
    if changeable.is_some_and(|id| cx.grow_lease(id, peak)) {
        change(cx, name, variant, tickets, ChangeCause::Asked);
        return;
    }
    cx.deny_all(tickets, &invalid(name, Problem::CannotChange));
}

/// Notifies a worker of a shortage of memory. Returns whether it was notified.
pub(super) fn notify_of_pressure(cx: &mut Context<'_>, name: &str, reason: &ReclaimReason) -> bool {
    let worker = cx.workers.get(name);
    let Some((id, least)) = worker.and_then(|worker| worker.lease().zip(worker.params.shrinks_to))
    else {
        return false;
    };
    cx.set_target(id, least, reason);
    true
}

pub(super) fn change(
    cx: &mut Context<'_>,
    name: &str,
    variant: String,
    tickets: Vec<Ticket>,
    cause: ChangeCause,
) {
    let resizing = Resizing {
        variant: variant.clone(),
        tickets,
        asked_at: cx.now,
        to_shed: matches!(cause, ChangeCause::Room { .. }),
    };
    let worker = name.to_owned();
    if cause != ChangeCause::Asked {
        cx.decide(WorkerDecision::Changing {
            worker: worker.clone(),
            variant: variant.clone(),
            cause,
        });
    }
    if let Some(run) = cx.workers.get_mut(name).and_then(Worker::run_mut) {
        run.change(resizing);
    }
    set_moving(cx, name);
    cx.out.push(Action::ResizeWorker { worker, variant });
}

pub(super) fn stop(cx: &mut Context<'_>, name: &str, reason: StopReason) {
    stop_for(cx, name, StopCause::of(&reason), reason);
}

/// Stops a worker for `reason`, which does not determine what follows its exit; `cause` does.
pub(super) fn stop_for(cx: &mut Context<'_>, name: &str, cause: StopCause, reason: StopReason) {
    let worker = cx.state.workers.get_mut(name);
    let Some(run) = worker.and_then(Worker::run_mut) else {
        return;
    };
    let (lease, tickets) = (run.lease, run.stop(cause, cx.state.now));
    let denial = invalid(name, Problem::Stopping(Box::new(reason.clone())));
    cx.deny_all(tickets, &denial);
    cx.forget_wants_of(lease, &denial);
    cx.ledger.set_moving(lease, true);
    cx.out.push(Action::StopWorker {
        worker: name.to_owned(),
        reason,
    });
}

/// Returns the denial of an operation on a worker.
pub(super) fn invalid(name: &str, problem: Problem) -> Denial {
    Denial::invalid(name, "worker", &name, problem)
}

/// Marks a worker's lease as moving while it starts, changes or stops, or has no measurement since.
pub(super) fn set_moving(cx: &mut Context<'_>, name: &str) {
    let worker = cx.workers.get(name);
    let Some((run, is_settled)) = worker.and_then(|it| Some((it.run()?, it.is_settled()))) else {
        return;
    };
    let measured = cx.ledger.measurement(name);
    let is_measured = measured.is_some_and(|measured| measured.at >= run.since);
    let id = run.lease;
    cx.ledger.set_moving(id, !(is_settled && is_measured));
}

/// Key of a decision that is logged once for each start that is out of reach.
pub(super) fn out_of_reach(name: &str) -> String {
    format!("worker `{name}` is out of reach")
}

/// Verifies by measurement the smaller variant that a worker has confirmed; `since` is the time of the request.
pub(super) fn verify_variant(
    cx: &mut Context<'_>,
    name: &str,
    used: Option<Bytes>,
    since: Timestamp,
) {
    let Some(worker) = cx.workers.get(name) else {
        return;
    };
    let (shed, now) = (&cx.params.shed, cx.now);
    let span = shed.deadlines.of(worker.params.class).max(shed.settle);
    if let Some(who) = worker.lease() {
        let lower = Lower {
            who,
            to: worker.steady(),
            had: Some(cx.ledger.held_by(who)),
            deadline: now + span,
            answered_at: Some(since),
        };
        cx.with_leases(|leases, turn| leases.begin_revocation(&lower, false, turn));
    }
    if used.is_some() {
        settle_notified(cx, name, used, now);
    }
}

/// Credits a notified worker if the measurement shows it as shrunk. Returns whether it was under a target.
pub(super) fn settle_notified(
    cx: &mut Context<'_>,
    name: &str,
    used: Option<Bytes>,
    taken_at: Timestamp,
) -> bool {
    let id = cx.workers.get(name).and_then(Worker::lease);
    let comes_down = |id: &LeaseId| cx.leases.get(*id).and_then(Lease::revocation).is_some();
    let Some(id) = id.filter(comes_down) else {
        return false;
    };
    if let Some(revocation) = cx.with_leases(|leases, turn| leases.verify(id, used, taken_at, turn))
    {
        end_notification(cx, id, &revocation);
    }
    true
}

/// Handles a worker that has not shrunk by its deadline: logs it if busy, else stops it.
pub(super) fn end_notification(cx: &mut Context<'_>, id: LeaseId, revocation: &Revocation) {
    let Some(lease) = cx.leases.get(id) else {
        return;
    };
    let name = lease.tenant.clone();
    let used = revocation.evidence.used();
    let late = cx.now.saturating_since(revocation.target.deadline);
    let Some(worker) = cx.workers.get_mut(&name) else {
        return;
    };
    if !worker.ignored_pressure() {
        return;
    }
    let at_work = worker.requests > 0;
    let ignored = IgnoredPressure {
        pid: worker.run().and_then(|run| run.pid).unwrap_or_default(),
        used,
        target: revocation.target.bytes,
        late,
        worker: name,
    };
    if at_work {
        cx.decide(WorkerDecision::IgnoresPressure(ignored));
    } else {
        let name = ignored.worker.clone();
        stop(cx, &name, StopReason::IgnoredPressure(ignored));
    }
}

/// Books a worker's steady size again. The worker is not notified: it allocates when it needs the memory.
pub(super) fn restore_notified(cx: &mut Context<'_>, name: &str) -> Result<Done, GrowthWait> {
    let worker = cx.workers.get(name);
    let sized = worker.and_then(|worker| Some((worker.lease()?, worker.steady())));
    let (id, steady) = sized.ok_or(GrowthWait::Changing)?;
    if !cx.grow_lease(id, steady) {
        return Err(GrowthWait::Budget {
            needs: steady,
            free: cx.ledger.free(),
            reserved: Bytes::ZERO,
        });
    }
    let worker = name.to_owned();
    let decision = Decision::from(WorkerDecision::Restored { worker, steady });
    cx.decide(decision.clone());
    Ok(Done::Decided(decision))
}
