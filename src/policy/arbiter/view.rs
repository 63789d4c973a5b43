//! Snapshot and next deadline, computed from the state.

use super::{context::Machine, worker_events};
use crate::{
    admission::{Want, WantKind},
    growth,
    lease::{LeaseState, LeaseView},
    lease_table::Lease,
    ledger::Ledger,
    snapshot::{EngineView, MemoryView, PressureView, Snapshot, Totals, WorkerView},
    state::State,
};
use cotenant_units::{Bytes, Timestamp};

/// Returns when [`DeadlineReached`](crate::event::Event::DeadlineReached) is due, if ever; later than the last event.
pub(super) fn next_deadline(state: &State) -> Option<Timestamp> {
    [
        state.leases.next_deadline(&state.params.shed),
        state.queue.next_deadline(&state.params.lease, state.now),
        state.engine.next_deadline(state.now),
        worker_events::next_deadline(state),
        state.dwell.ends(state.now),
        state.pressure.grace_ends().filter(|end| *end > state.now),
    ]
    .into_iter()
    .flatten()
    .min()
}

/// Returns the state as operators, metrics and tests see it.
pub(super) fn snapshot(state: &State, machine: &Machine, totals: Totals) -> Snapshot {
    let mut leases: Vec<LeaseView> = state
        .leases
        .ids()
        .filter_map(|id| state.lease_view(*id))
        .collect();
    let waiting = state.queue.values();
    leases.extend(waiting.filter_map(|want| waiting_view(want, &state.ledger)));
    let (engine, ledger) = (&state.engine, &state.ledger);
    let returning = engine.returning().unwrap_or(Bytes::ZERO);
    let (in_force, full) = (engine.plans.in_force.as_ref(), engine.full_plan());
    let asked = engine.plans.pending.last_key_value();
    Snapshot {
        at: state.now,
        memory: MemoryView {
            budget: ledger.budget(),
            held: ledger.held(),
            used: ledger.measured_use().saturating_sub(engine.kv.untouched),
            unaccounted: ledger.unaccounted(),
            free: ledger.free(),
            unmanaged: ledger.unmanaged(),
            returning: returning.saturating_add(state.returning_or_waiting_workers()),
            coming_back: state.coming_back(),
        },
        pressure: PressureView {
            headroom: state.pressure.headroom(),
            level: state.pressure.level(),
            elevated_below: state.params.pressure.elevated_below,
            critical_below: state.params.pressure.critical_below,
            minimum_reclaim: state.params.shed.minimum_reclaim,
            losing_per_s: state.pressure.trend.losing_per_s(),
            exhausted_in: state.pressure.exhausted_in(),
            sample_interval: state.pressure.interval(),
            sample: state.pressure.sample().cloned(),
            machine: state.params.machine.clone(),
        },
        leases,
        waiting: state.queue.len(),
        engine: EngineView {
            state: engine.state(),
            shape: engine.shape().cloned(),
            in_force: in_force.cloned(),
            asked: asked.map(|(_, pending)| pending.plan.clone()),
            waits: growth::engine_waits(state),
            failure: engine.failure(),
            milli_tokens_per_s: engine.milli_tokens_per_s(in_force),
            full_milli_tokens_per_s: engine.milli_tokens_per_s(full.as_ref()),
            kv: engine.kv_view(),
            context: state.params.engine.as_ref().map(|llm| llm.kv_wanted),
            full,
        },
        workers: state
            .workers
            .values()
            .map(|worker| WorkerView {
                name: worker.params.name.clone(),
                state: worker.state(),
                pid: worker.run().and_then(|run| run.pid),
                variant: worker.variant().map(str::to_owned),
                starts: worker.history.starts,
                failures: worker.history.failures,
                last_exit: worker.history.last_exit.clone(),
                last_death: worker.last_death.clone(),
                retry_at: worker.retry_at(),
                rest: worker.rest(),
                winding_up: worker.is_winding_down(),
                waits: state.worker_wait(worker),
            })
            .collect(),
        peaks: state.peaks.clone(),
        draining: state.draining,
        totals,
        last_release: machine.page_pool.last_release,
        reboot: machine.reboot.reasons().collect(),
    }
}

/// Returns the lease of a waiting request.
fn waiting_view(want: &Want, ledger: &Ledger) -> Option<LeaseView> {
    let WantKind::Lease(request) = want.kind.clone() else {
        return None;
    };
    let lease = Lease::of_tenant(request, String::new(), 0, want.since);
    Some(LeaseView {
        state: LeaseState::Requested,
        expires_at: None,
        ..lease.view(want.lease, ledger)
    })
}
