//! Readings: samples of the machine, and measurements of holders with what falls due by them.

use super::{context::Context, engine_orders, learn, worker_events, worker_orders};
use crate::{
    policy::{
        decision::MemoryDecision,
        event::Action,
        lease_table::LeaseTable,
        params::{ENGINE_TENANT, Scope},
        pressure::Sample,
        reboot::Changed,
    },
    units::{Bytes, Timestamp},
};

pub(super) fn take_sample(cx: &mut Context<'_>, mut sample: Sample) {
    sample.taken_at = sample.taken_at.min(cx.state.now);
    if cx.state.pressure.sampled_at().is_some_and(|last| sample.taken_at <= last) {
        cx.out.push(Action::SampleAfter { wait: cx.state.pressure.interval() });
        return;
    }
    // Memory that the engine has leased and not touched looks available, and may be touched with the next token.
    let untouched = cx.state.engine.kv.untouched;
    let machine = sample.available().saturating_sub(untouched);
    let scope_used = match cx.state.params.budget.scope {
        Scope::Machine => Some(sample.total().max(cx.state.params.budget.total).saturating_sub(machine)),
        Scope::Session => sample.scope_used.map(|used| used.saturating_add(untouched)),
    };
    let scope_left = match scope_used {
        Some(used) => {
            cx.state.ledger.observe_scope(used, sample.taken_at);
            match cx.state.params.budget.scope {
                Scope::Machine => machine,
                Scope::Session => cx.state.params.budget.total.saturating_sub(used),
            }
        }
        // Unknown is not zero: the book decides.
        None => cx.state.params.budget.total.saturating_sub(cx.state.ledger.used_by_holders()),
    };
    let headroom = scope_left.saturating_sub(cx.state.ledger.unused_reserve()).min(machine);
    if let Some(change) = cx.state.pressure.observe(&sample, headroom) {
        cx.out.push(Action::LevelChanged { from: change.from, to: change.to, reason: change.reason });
    }
    if let Some(release) = cx.machine.page_pool.observe(&sample) {
        cx.decide(MemoryDecision::Released(release));
    }
    for changed in cx.machine.reboot.observe(&sample, cx.state.pressure.level()) {
        cx.decide(match changed {
            Changed::Advised(reason) => MemoryDecision::RebootAdvised(reason),
            Changed::NotAdvised(reason) => MemoryDecision::RebootNotAdvised(reason),
        });
    }
    let short = cx.state.params.pressure.elevated_below;
    if let Some(bytes) = cx.machine.page_pool.bytes_to_empty(short, cx.state.now) {
        cx.out.push(Action::EmptyPagePool { bytes });
    }
    cx.out.push(Action::SampleAfter { wait: cx.state.pressure.interval() });
    cx.with_leases(|leases, turn| leases.close_unmeasurable(sample.taken_at, turn));
    cx.machine.sample = Some(sample);
}

pub(super) fn take_measurement(cx: &mut Context<'_>, tenant: &str, used: Option<Bytes>, taken_at: Timestamp) {
    let taken_at = taken_at.min(cx.state.now);
    match used {
        Some(used) if cx.state.leases.is_known(tenant) => cx.state.ledger.measure(tenant, used, taken_at),
        Some(_) => return,
        None => {}
    }
    // One that was overtaken by a newer one says how it was, and not how it is.
    let newest = cx.state.ledger.measurement(tenant).map(|measured| measured.at);
    if used.is_some() && newest.is_some_and(|at| taken_at < at) {
        return;
    }
    if tenant == ENGINE_TENANT {
        learn::from_engine(cx);
        engine_orders::settle(cx);
    } else if cx.state.workers.contains(tenant) {
        if !worker_orders::settle_notified(cx, tenant, used, taken_at) {
            worker_events::settle(cx, tenant);
        }
        // One that asks for itself has its lease as any tenant.
        cx.with_leases(|leases, turn| leases.settle(tenant, used, taken_at, turn));
        learn::from_life(cx, tenant);
    } else {
        cx.with_leases(|leases, turn| leases.settle(tenant, used, taken_at, turn));
    }
    cx.with_leases(|leases, turn| {
        leases.tend_residual(tenant, used, taken_at, turn);
        leases.watch_bounds(tenant, turn);
    });
}

pub(super) fn serve_lease_deadlines(cx: &mut Context<'_>) {
    cx.with_leases(LeaseTable::expire);
    for id in cx.state.leases.overdue(cx.state.now) {
        if let Some(revocation) = cx.with_leases(|leases, turn| leases.escalate(id, turn)) {
            worker_orders::end_notification(cx, id, &revocation);
        }
    }
    cx.with_leases(LeaseTable::poll);
}
