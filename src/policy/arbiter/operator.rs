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

/// Answers an operator once the engine has answered the last plan sent.
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

/// Sets the KV type used when memory is ample. Existing KV is converted: at once to a smaller type, and to a larger one
/// as soon as it fits.
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
    // Compared with the plan, not the lease: after a failed growth, the lease still holds bytes that are returned once
    // that is confirmed.
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
    // A requested shed lasts for the dwell, as any shed; a requested growth does not wait.
    if smaller {
        cx.state.dwell.begin(cx.state.now);
    } else {
        cx.dwell.end();
    }
    engine_orders::ask(cx, plan, kind_of_plan, Some(PlanReason::KvType { change }));
    await_engine(cx, ticket, before, Wish::KvType { kind });
    Ok(())
}

/// Applies other settings, or none of them if one is at fault.
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

/// Applies the new budget after the machine or a control group was resized. If no valid budget results, the settings
/// stay in force, and reclaim follows from pressure alone.
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

/// Ends the dwell, also that of the level once the headroom has recovered, and the back-off. A regrow without effect is
/// denied with the reason to wait.
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
            // Memory was returned a moment ago. It regrows as soon as a sample shows how much is free.
            cx.out.push(Action::SampleAfter {
                wait: cx.params.pressure.sample_min,
            });
            cx.done(ticket, Done::GrowsWhenSampled);
        }
        Err(wait) => return Err(Denial::NotGrowing { wait }),
    }
    Ok(())
}

/// Inspects a model again if its floor exceeded the budget before the budget grew.
fn load_what_fits_now(cx: &mut Context<'_>, was_too_large: bool) {
    if was_too_large && cx.engine.lease.is_none() && cx.floor_out_of_reach().is_none() {
        cx.engine.read_again();
        cx.out.push(Action::InspectModel);
    }
}

/// Inspects a model that is not loaded; the rest is as at the start.
pub(super) fn take_load(cx: &mut Context<'_>, ticket: Ticket) {
    let done = if cx.engine.params.is_none() {
        Done::NoEngine
    } else if cx.engine.lease.is_some() {
        Done::Loaded
    } else {
        // Failures before the operator's command no longer count.
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
