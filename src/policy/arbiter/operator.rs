//! Commands of operators to the engine and to the daemon as a whole.

use std::mem;

use super::{context::Context, engine_orders, growth_orders, reclaim_orders, serve};
use crate::{
    decision::{AdmissionDecision, MemoryDecision},
    denial::{Denial, Problem},
    engine_control::{PlanKind, WaitingOperator, Wish},
    event::{Action, ChangedKeys, Done},
    growth,
    growth_wait::GrowthWait,
    kv_type::KvType,
    lease::Ticket,
    params::{ENGINE_TENANT, MachineMemory, Params},
    reason::{PlanReason, ReclaimReason},
    reclaim,
    residency::EnginePlan,
};
use cotenant_units::Bytes;

pub(super) fn take_shed(cx: &mut Context<'_>, ticket: Ticket, bytes: Bytes) -> Result<(), Denial> {
    if bytes == Bytes::ZERO {
        return Err(Denial::invalid(
            ENGINE_TENANT,
            "bytes",
            &bytes,
            Problem::Zero,
        ));
    }
    let before = cx.engine_held();
    let reclaim = reclaim::for_operator(cx.state, bytes, ReclaimReason::Operator { asked: bytes });
    let promised = reclaim.is_some_and(|reclaim| reclaim_orders::carry_out(cx, reclaim));
    if !promised {
        return Err(cx.nothing_to_shed(bytes));
    }
    await_engine(cx, ticket, before, Wish::Shed { asked: bytes });
    Ok(())
}

/// Answers an operator once the engine has answered the last plan.
fn await_engine(cx: &mut Context<'_>, ticket: Ticket, before: Bytes, wish: Wish) {
    if let Some((revision, _)) = cx.engine.plans.pending.last_key_value() {
        let revision = *revision;
        cx.engine.operators.push(WaitingOperator {
            ticket,
            revision,
            before,
            wish,
        });
    }
}

/// From now on KV is kept as `kind` when memory is plentiful. What is there is converted: at once when it becomes
/// smaller, and as soon as there is room for it when it becomes larger.
pub(super) fn take_kv_type(
    cx: &mut Context<'_>,
    ticket: Ticket,
    kind: KvType,
) -> Result<(), Denial> {
    let invalid = |problem| Denial::invalid(ENGINE_TENANT, "kv_type", &kind, problem);
    let Some(params) = &mut cx.engine.params else {
        return Err(invalid(Problem::NoEngine));
    };
    params.kv_type = kind;
    if let Some((id, (floor, full))) = cx.engine.lease.zip(cx.engine.lease_bounds()) {
        cx.leases.set_bounds(id, floor, full);
    }
    let (Some(id), Some(shape), Some(goal)) =
        (cx.engine.lease, cx.engine.shape(), cx.engine.goal())
    else {
        cx.done(ticket, Done::KvWhenLoaded(kind));
        return Ok(());
    };
    if goal.kv_type == kind {
        cx.done(ticket, Done::KvIs(kind));
        return Ok(());
    }
    if !cx.engine.can_shed(cx.now) {
        return Err(invalid(Problem::EngineBusy));
    }
    let plan = EnginePlan {
        kv_type: kind,
        ..goal.clone()
    };
    let (before, bytes) = (cx.ledger.held_by(id), shape.plan_bytes(&plan));
    let change = cx.engine.change_to(&plan);
    let smaller = kind < goal.kv_type;
    // Not against the lease: after a growth that failed it holds what is given back as soon as that is confirmed.
    let more = bytes.saturating_sub(shape.plan_bytes(goal));
    let no_room = !smaller && !growth::has_room(cx.state, more);
    if no_room || (!smaller && !cx.grow_lease(id, bytes.max(before))) {
        let more = no_room.then_some(more);
        cx.done(
            ticket,
            Done::KvWhenRoom {
                kv_type: kind,
                more,
            },
        );
        return Ok(());
    }
    let kind_of_plan = if smaller {
        PlanKind::Shed
    } else {
        PlanKind::Regrow
    };
    // A wished shed stays for the dwell, as any shed; a wished growth does not wait.
    if smaller {
        cx.state.dwell.begin(cx.state.now);
    } else {
        cx.dwell.end();
    }
    engine_orders::ask(cx, plan, kind_of_plan, Some(PlanReason::KvType { change }));
    await_engine(cx, ticket, before, Wish::KvType { kind });
    Ok(())
}

/// Goes on with other settings, or with none of them changed.
pub(super) fn take_reconfigured(
    cx: &mut Context<'_>,
    ticket: Ticket,
    params: Params,
    changes: ChangedKeys,
) -> Result<(), Denial> {
    let was_too_large = cx.floor_out_of_reach().is_some();
    cx.reconfigure(params).map_err(|fault| {
        let problem = Problem::Text(fault.problem);
        Denial::invalid("operator", &fault.setting, &fault.value, problem)
    })?;
    load_what_fits_now(cx, was_too_large);
    cx.done(ticket, Done::Reconfigured(changes));
    Ok(())
}

/// Goes on with the budget of a machine, or of a control group, that has become larger or smaller. Where there is none, what
/// runs keeps its settings, and pressure decides by what is left.
pub(super) fn take_resized(
    cx: &mut Context<'_>,
    machine: MachineMemory,
    params: Result<Box<Params>, String>,
) {
    let was_too_large = cx.floor_out_of_reach().is_some();
    let resized = params.and_then(|params| {
        let mut params = *params;
        params.machine = machine.clone();
        cx.resize(params).map_err(|fault| fault.to_string())
    });
    if let Err(reason) = resized {
        cx.params.machine = machine.clone();
        let budget = cx.ledger.budget();
        return cx.decide(MemoryDecision::TooSmall {
            machine,
            budget,
            reason,
        });
    }
    load_what_fits_now(cx, was_too_large);
    let (budget, floor) = (cx.ledger.budget(), cx.engine.keeps().unwrap_or(Bytes::ZERO));
    if floor > budget {
        let reason = format!("the LLM keeps its floor of {floor}");
        cx.decide(MemoryDecision::TooSmall {
            machine,
            budget,
            reason,
        });
    }
}

/// An operator ends the dwell, of the level too once the headroom has recovered, and the back-off. A regrow that can do nothing is refused with what it waits for.
pub(super) fn take_regrow(cx: &mut Context<'_>, ticket: Ticket) -> Result<(), Denial> {
    let change = cx.state.pressure.end_dwell(cx.state.now);
    cx.note_level(change);
    cx.dwell.forget();
    cx.engine.blocked.growth = None;
    let engine = &cx.engine;
    let lacks_something = engine.is_ready() && engine.full_plan().as_ref() != engine.goal();
    match growth_orders::grow_one_step(cx) {
        Ok(done) => cx.done(ticket, done),
        Err(GrowthWait::Sample) if lacks_something => {
            // Something was given back a moment ago. It grows by itself as soon as a sample shows how much there is.
            cx.out.push(Action::SampleAfter {
                wait: cx.params.pressure.sample_min,
            });
            cx.done(ticket, Done::GrowsWhenSampled);
        }
        Err(wait) => return Err(Denial::NotGrowing { wait }),
    }
    Ok(())
}

/// Has a model read again whose floor exceeded the budget before that became larger.
fn load_what_fits_now(cx: &mut Context<'_>, was_too_large: bool) {
    if was_too_large && cx.engine.lease.is_none() && cx.floor_out_of_reach().is_none() {
        cx.engine.read_again();
        cx.out.push(Action::InspectModel);
    }
}

/// Has the header of a model read again that is not loaded; what follows is as at the start.
pub(super) fn take_load(cx: &mut Context<'_>, ticket: Ticket) {
    let done = if cx.engine.params.is_none() {
        Done::NoEngine
    } else if cx.engine.lease.is_some() {
        Done::Loaded
    } else {
        // Failures before the operator's command do not count any more.
        cx.engine.read_again();
        cx.out.push(Action::InspectModel);
        Done::Inspecting
    };
    cx.done(ticket, done);
}

pub(super) fn take_drain(cx: &mut Context<'_>) {
    if !cx.draining {
        cx.draining = true;
        cx.decide(AdmissionDecision::DrainBegun);
        serve::deny_all_waiting(cx);
    }
}

pub(super) fn take_drain_cancelled(cx: &mut Context<'_>) {
    if mem::take(&mut cx.draining) {
        cx.decide(AdmissionDecision::DrainEnded);
    }
}
