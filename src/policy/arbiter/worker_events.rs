//! Events of workers: ready, exited, changed, measured, due.
//!
//! The state of each worker is in [`worker_control`](crate::worker_control), orders to it are in `worker_orders`. The
//! supervisor holds the lease of a worker: the peak is booked before its start, and lowered to the steady size once
//! measured. A larger variant is booked before the request; a smaller one is credited once measured.

use std::time::Duration;

use super::{
    context::Context,
    learn, reclaim_orders, serve,
    worker_orders::{self, invalid},
};
use crate::{
    admission::{Want, WantKind},
    death::{DeathCertificate, DeathClass},
    decision::{ChangeCause, Decision, StrayReport, WorkerDecision},
    denial::{Denial, Problem},
    event::{Action, Done, WorkerCommand, WorkerDone, WorkerResize, WorkerResized},
    lease::{Class, Ticket},
    lease_table::Lease,
    params::VERIFY_PER_MILLE,
    pressure_level::PressureLevel,
    reason::{ReclaimReason, StopReason},
    reclaim,
    snapshot::WorkerState,
    state::State,
    worker::{AfterExit, Commanded, Resizing, RestStep, Worker},
    worker_control::next_to_start,
};
use cotenant_units::{Bytes, Timestamp};

pub(super) fn take_ready(cx: &mut Context<'_>, name: &str, pid: u32) {
    let now = cx.now;
    let Some(worker) = cx.workers.get_mut(name) else {
        return;
    };
    let Some(took) = worker.answered(pid, now) else {
        let report = StrayReport::Ready {
            pid,
            state: worker.state(),
        };
        ignore(cx, name, report);
        return;
    };
    let change = worker
        .run()
        .and_then(|run| run.resizing.as_ref())
        .map(|resizing| resizing.variant.clone());
    cx.changed_at = now;
    cx.decide(WorkerDecision::Ready {
        worker: name.to_owned(),
        pid,
        took,
    });
    if let Some(variant) = change {
        cx.out.push(Action::ResizeWorker {
            worker: name.to_owned(),
            variant,
        });
    }
    worker_orders::set_moving(cx, name);
    measure(cx, name);
}

pub(super) fn take_died(cx: &mut Context<'_>, certificate: &DeathCertificate) {
    let Some(worker) = cx.workers.get_mut(&certificate.worker) else {
        return;
    };
    worker.died(certificate.summary());
    if let Some(remedy) = &certificate.verdict.remedy {
        cx.decide(WorkerDecision::Died {
            sentence: certificate.verdict.sentence.clone(),
            remedy: remedy.clone(),
        });
    }
    if certificate.verdict.class == DeathClass::MemcgOom {
        learn::from_oom(cx, certificate);
    }
}

/// Ends an unresponsive process, if it is the one that is running and it is not stopping.
pub(super) fn take_unresponsive(cx: &mut Context<'_>, name: &str, pid: u32, evidence: String) {
    let Some(worker) = cx.workers.get(name) else {
        return;
    };
    if !worker.is_ready() || worker.run().is_none_or(|run| run.pid != Some(pid)) {
        return;
    }
    cx.decide(WorkerDecision::Unresponsive {
        worker: name.to_owned(),
        pid,
        evidence: evidence.clone(),
    });
    cx.out.push(Action::AbortWorker {
        worker: name.to_owned(),
        evidence,
    });
}

pub(super) fn take_exited(cx: &mut Context<'_>, name: &str, intended: bool, cause: &str) {
    let Some(worker) = cx.state.workers.get_mut(name) else {
        return;
    };
    let Some((run, next)) = worker.exited(intended, cause, cx.state.now) else {
        let cause = cause.to_owned();
        ignore(cx, name, StrayReport::Exited { cause });
        return;
    };
    let freed = cx.drop_lease(run.lease);
    cx.renew_worker(name);
    cx.ledger.forget(name);
    cx.changed_at = cx.now;
    let cause = cause.to_owned();
    let expected = run.stopping().is_some() || intended;
    if let Some(resizing) = run.resizing {
        let cause = cause.clone();
        cx.deny_all(resizing.tickets, &invalid(name, Problem::Exited { cause }));
    }
    cx.decide(WorkerDecision::Exited {
        worker: name.to_owned(),
        cause,
        expected,
        freed,
        free: cx.ledger.free(),
    });
    match next {
        AfterExit::Rests => {}
        AfterExit::Sleeps => cx.note_reclaimed(freed, freed, false),
        AfterExit::Restarts => worker_orders::start_again_at_once(cx, name),
        AfterExit::Shed { restarts_if_fits } => {
            cx.note_reclaimed(freed, freed, true);
            if restarts_if_fits && cx.start_least(name) <= cx.ledger.free() {
                worker_orders::start_again_at_once(cx, name);
            }
        }
        AfterExit::Failed { needs_operator } => decide_failure(cx, name, needs_operator),
    }
}

fn decide_failure(cx: &mut Context<'_>, name: &str, needs_operator: bool) {
    let Some(worker) = cx.workers.get(name) else {
        return;
    };
    let (retry_at, failures) = (worker.retry_at(), worker.restart.recent_failures());
    let limits = worker.params.start.restart;
    let (worker, window) = (name.to_owned(), limits.window);
    cx.decide(match retry_at {
        Some(at) => WorkerDecision::Restarting {
            worker,
            wait: at.saturating_since(cx.now),
            failures,
            intensity: limits.intensity,
            window,
        },
        None if needs_operator => WorkerDecision::NeedsOperator { worker },
        None => WorkerDecision::GivenUp {
            worker,
            failures,
            window,
        },
    });
}

pub(super) fn take_activity(cx: &mut Context<'_>, name: &str, requests: u32) {
    let now = cx.now;
    if cx
        .workers
        .get_mut(name)
        .is_some_and(|worker| worker.works(requests, now))
    {
        prepare_for_work(cx, name);
    }
}

/// Books the highest use of a worker's last requests as far as memory is free, and reclaims the rest from the engine if
/// possible, before the present request allocates it.
fn prepare_for_work(cx: &mut Context<'_>, name: &str) {
    let Some(worker) = cx.workers.get(name).filter(|worker| worker.is_settled()) else {
        return;
    };
    let (need, class) = (worker.breathes_to(), worker.params.class);
    let Some(id) = worker
        .lease()
        .filter(|id| cx.ledger.held_by(*id) > Bytes::ZERO)
    else {
        return;
    };
    let held = cx.ledger.held_by(id);
    let more = need.saturating_sub(held);
    let missing = more.saturating_sub(cx.ledger.free());
    cx.grow_lease(id, held.saturating_add(more).saturating_sub(missing));
    let missing = missing.saturating_sub(cx.coming_back());
    if missing == Bytes::ZERO || class >= Class::LlmElastic {
        return;
    }
    let reason = ReclaimReason::Request {
        tenant: name.to_owned(),
        class,
        needed: need,
        free: cx.ledger.free(),
        coming_back: cx.coming_back(),
        budget: cx.ledger.budget(),
    };
    if let Some(reclaim) = reclaim::from_engine(cx.state, missing, reason) {
        reclaim_orders::carry_out(cx, reclaim);
    }
}

/// Starts a worker that sleeps or was shed, for a request.
pub(super) fn take_wanted(cx: &mut Context<'_>, name: &str) {
    if !cx.draining && cx.workers.get(name).is_some_and(Worker::can_be_woken) {
        cx.decide(WorkerDecision::Woken {
            worker: name.to_owned(),
        });
        worker_orders::want(cx, name);
    }
}

pub(super) fn take_command(
    cx: &mut Context<'_>,
    ticket: Ticket,
    name: &str,
    command: WorkerCommand,
) -> Result<(), Denial> {
    let worker = cx.workers.get(name);
    let worker = worker.ok_or_else(|| invalid(name, Problem::NotConfigured))?;
    if command != WorkerCommand::Stop {
        cx.not_draining(name, worker.params.peak_of(None))?;
    }
    let Some(worker) = cx.state.workers.get_mut(name) else {
        return Ok(());
    };
    let done = match (command, worker.state()) {
        (WorkerCommand::Start, WorkerState::Ready) => WorkerDone::Runs,
        (WorkerCommand::Start, WorkerState::Starting) => WorkerDone::IsStarting,
        (WorkerCommand::Start, _) => WorkerDone::Starts,
        (WorkerCommand::Stop, _) => WorkerDone::Stops,
        (WorkerCommand::Recycle, _) => WorkerDone::Restarts,
    };
    match worker.command(command, cx.state.now) {
        Commanded::Start => worker_orders::want(cx, name),
        Commanded::Stop(reason) => worker_orders::stop(cx, name, reason),
        Commanded::Withdraw => {
            let starts = |want: &Want| want.tenant == name && want.kind == WantKind::WorkerStart;
            cx.queue.take(starts);
        }
        Commanded::Nothing => {}
    }
    let worker = name.to_owned();
    cx.done(ticket, Done::Worker { worker, done });
    Ok(())
}

pub(super) fn take_resize(cx: &mut Context<'_>, call: WorkerResize) -> Result<(), Denial> {
    let (ticket, name, variant) = (call.ticket, call.worker, call.variant);
    let worker = cx.workers.get(&name);
    let worker = worker.ok_or_else(|| invalid(&name, Problem::NotConfigured))?;
    let known = &worker.params.variants;
    if !known.iter().any(|known| known.name == variant) {
        let known = known.iter().map(|known| known.name.clone()).collect();
        let problem = Problem::NotAVariant { known };
        return Err(Denial::invalid(&name, "variant", &variant, problem));
    }
    if !worker.is_ready() {
        let state = worker.state();
        return Err(invalid(&name, Problem::NotReady { state }));
    }
    let class = worker.params.class;
    let peak = cx.worker_peak(&name, Some(&variant));
    cx.not_draining(&name, peak)?;
    let worker = cx.state.workers.get_mut(&name);
    let Some(run) = worker.and_then(Worker::run_mut) else {
        return Ok(());
    };
    if let Some(resizing) = &mut run.resizing {
        if resizing.variant != variant {
            let variant = resizing.variant.clone();
            return Err(invalid(&name, Problem::ChangingTo { variant }));
        }
        resizing.tickets.push(ticket);
        return Ok(());
    }
    if run.variant.as_ref() == Some(&variant) {
        let done = WorkerDone::IsIn { variant };
        cx.done(ticket, Done::Worker { worker: name, done });
        return Ok(());
    }
    let wait = call.wait.min(cx.state.params.lease.wait_max);
    let kind = WantKind::WorkerVariant { variant };
    let want = Want::ours(&name, class, run.lease, kind, cx.now).asked(ticket, wait);
    serve::ask_or_queue(cx, want, wait);
    Ok(())
}

pub(super) fn take_resized(cx: &mut Context<'_>, resized: &WorkerResized) {
    let (name, variant, used) = (&resized.worker, &resized.variant, resized.used);
    let (now, error) = (cx.now, resized.error.as_ref());
    let Some(worker) = cx.workers.get_mut(name) else {
        return;
    };
    let Some(resizing) = worker.changed(variant, error.is_some(), now) else {
        let variant = variant.to_owned();
        ignore(cx, name, StrayReport::Changed { variant });
        return;
    };
    let took = resizing.as_ref().map_or(Duration::ZERO, |resizing| {
        now.saturating_since(resizing.asked_at)
    });
    cx.changed_at = now;
    if let Some(used) = used {
        cx.ledger.measure(name, used, now);
    }
    let to_shed = |resizing: &&Resizing| resizing.to_shed && error.is_none();
    if let Some(since) = resizing.as_ref().filter(to_shed).map(|it| it.asked_at) {
        // Others wait for the memory, so the confirmation needs a measurement by a deadline.
        worker_orders::verify_variant(cx, name, used, since);
    } else {
        settle(cx, name);
    }
    let tickets = resizing.map(|resizing| resizing.tickets);
    let tickets = tickets.unwrap_or_default();
    let (worker, variant) = (name.to_owned(), variant.to_owned());
    if let Some(error) = error.cloned() {
        let kept = Problem::Kept {
            error: error.clone(),
        };
        let denial = Denial::invalid(name, "variant", &variant, kept);
        cx.decide(WorkerDecision::VariantKept {
            worker,
            variant,
            error,
            used,
        });
        cx.deny_all(tickets, &denial);
    } else {
        let held = cx.worker_held(name);
        let decision = Decision::from(WorkerDecision::Resized {
            worker,
            variant,
            took,
            used,
            held,
        });
        cx.decide(decision.clone());
        for ticket in tickets {
            cx.done(ticket, Done::Decided(decision.clone()));
        }
    }
    measure(cx, name);
}

pub(super) fn serve_deadlines(cx: &mut Context<'_>) {
    let names: Vec<String> = cx.workers.keys().cloned().collect();
    for name in names {
        let now = cx.now;
        while let Some(due) = cx.workers.get_mut(&name).and_then(|it| it.take_due(now)) {
            match due {
                None => worker_orders::want(cx, &name),
                Some(reason @ StopReason::NotStopped) => {
                    let worker = name.clone();
                    cx.out.push(Action::StopWorker { worker, reason });
                }
                Some(reason) => worker_orders::stop(cx, &name, reason),
            }
        }
    }
}

/// Serves the steps of ready workers that are due by time or activity. Called last, after all other decisions.
pub(super) fn serve_rests(cx: &mut Context<'_>) {
    let names: Vec<String> = cx.workers.keys().cloned().collect();
    for name in names {
        let now = cx.now;
        let may_rest = cx
            .workers
            .get(&name)
            .is_some_and(|it| may_rest(cx.state, it));
        let worker = cx.workers.get_mut(&name);
        match worker.and_then(|worker| worker.take_rest(may_rest, now)) {
            Some(RestStep::Stop(reason)) => worker_orders::stop(cx, &name, reason),
            Some(RestStep::Shrink { variant, idle }) => {
                worker_orders::change(cx, &name, variant, Vec::new(), ChangeCause::Idle { idle });
            }
            Some(RestStep::Grow { variant }) => {
                worker_orders::queue_variant(cx, &name, variant);
                serve::serve_queue(cx);
            }
            None => {}
        }
    }
}

/// Returns whether a running worker may rest: it does not wait to grow, and is under no target.
fn may_rest(state: &State, worker: &Worker) -> bool {
    worker.lease().is_some_and(|id| {
        let comes_down = state.leases.get(id).and_then(Lease::revocation).is_some();
        !state.draining && !comes_down && !state.queue.waits_for(id)
    })
}

pub(super) fn next_deadline(state: &State) -> Option<Timestamp> {
    let workers = state.workers.values();
    let workers =
        workers.filter_map(|worker| worker.next_deadline(may_rest(state, worker), state.now));
    workers
        .chain(state.engine.holds_workers_until(state.now))
        .min()
}

/// Starts the next worker in the order of starts.
pub(super) fn start_in_order(cx: &mut Context<'_>) {
    if cx.draining {
        return;
    }
    let engine_is_up = cx.engine.holds_workers_until(cx.now).is_none();
    let next = next_to_start(&cx.workers, engine_is_up, cx.now);
    if let Some(name) = next.map(str::to_owned) {
        worker_orders::want(cx, &name);
    }
}

/// Credits what a measurement of a worker shows, once it has settled.
pub(super) fn settle(cx: &mut Context<'_>, name: &str) {
    let Some(measured) = cx.ledger.measurement(name) else {
        return;
    };
    // While a worker is up, its lease follows its measured use; declared sizes are guesses.
    let up = cx.workers.get(name).filter(|worker| worker.is_up());
    if let Some(id) = up
        .and_then(Worker::lease)
        .filter(|id| cx.ledger.held_by(*id) > Bytes::ZERO)
    {
        cx.ledger.follow(id);
    }
    watch_growth(cx, name, measured.used);
    let Some(worker) = cx.workers.get(name).filter(|worker| worker.is_settled()) else {
        return;
    };
    let Some(id) = worker
        .run()
        .filter(|run| measured.at >= run.since)
        .map(|run| run.lease)
    else {
        return;
    };
    let held = cx.ledger.held_by(id);
    let steady = worker.steady();
    let tolerance = held
        .saturating_sub(steady)
        .per_mille(1000 - VERIFY_PER_MILLE);
    let is_steady = measured.used <= steady.saturating_add(tolerance);
    let (auto, need) = (worker.params.rest.auto, worker.breathes_to());
    let mut stays = measured.used.max(steady);
    if is_steady && !auto && need == Bytes::ZERO {
        stays = steady;
    }
    // Memory that its requests may still take stays booked until they have ended.
    if worker.requests > 0 {
        stays = stays.max(need.min(held));
    }
    // Use fluctuates by some pages between measurements.
    if held.saturating_sub(stays) < NOTICED {
        stays = stays.max(held);
    }
    let freed = cx.ledger.lower(id, stays);
    worker_orders::set_moving(cx, name);
    if freed > Bytes::ZERO {
        cx.changed_at = cx.now;
    }
    // Changes with each request are not logged.
    if freed > Bytes::ZERO && need == Bytes::ZERO {
        cx.decide(WorkerDecision::Settled {
            worker: name.to_owned(),
            used: measured.used,
            stays,
            freed,
            free: cx.ledger.free(),
        });
    }
}

/// Winds down a worker whose last measurement exceeds its bound.
fn watch_growth(cx: &mut Context<'_>, name: &str, used: Bytes) {
    let settle = cx.params.shed.settle;
    let wanted = is_memory_wanted(cx.state);
    let fresh = cx.renewed(name);
    let Some(worker) = cx.state.workers.get_mut(name) else {
        return;
    };
    if let Some(above) = worker.outgrows(used, (wanted, fresh), settle, cx.state.now) {
        let requests = worker.requests;
        cx.decide(WorkerDecision::Outgrown {
            worker: name.to_owned(),
            used,
            above,
            held: cx.worker_held(name),
            requests,
        });
    }
}

/// Returns whether memory is wanted now or soon: only then is a leaking worker restarted.
fn is_memory_wanted(state: &State) -> bool {
    state.pressure.level() > PressureLevel::Normal
        || !state.queue.is_empty()
        || state
            .workers
            .values()
            .any(|worker| worker.was_shed() || worker.is_waiting())
        || state.ledger.free() < Bytes::new(state.ledger.budget().get() / FREE_SHARE)
}

/// Part of the budget, as a divisor, below which free memory counts as wanted. Our choice: it ends a leak before memory
/// runs short.
const FREE_SHARE: u64 = 8;

fn ignore(cx: &mut Context<'_>, name: &str, report: StrayReport) {
    cx.decide(WorkerDecision::Ignored {
        worker: name.to_owned(),
        report,
    });
}

fn measure(cx: &mut Context<'_>, name: &str) {
    cx.out.push(Action::Measure {
        tenant: name.to_owned(),
    });
}

/// Smallest reduction of a lease. Our choice, equal to the change at which a wait is logged again.
const NOTICED: Bytes = Bytes::from_mib(1);
