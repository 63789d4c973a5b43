//! Orders to the engine, and their state until answered.

use super::context::Context;
use crate::{
    decision::EngineDecision,
    denial::{Denial, Problem},
    engine_control::{Pending, PlanKind, WaitingOperator, Wish},
    event::{Action, Answer, Done, EngineApplied, ShedLimit, ShedOutcome},
    params::ENGINE_TENANT,
    reason::{PlanReason, ReclaimReason},
    residency::EnginePlan,
    state::State,
};
use cotenant_units::{Bytes, Tokens};

/// Sends a smaller plan to the engine.
pub(super) fn shed(cx: &mut Context<'_>, plan: EnginePlan, reclaim: ReclaimReason) {
    let engine = &cx.engine;
    let goal = engine.goal().unwrap_or(&plan);
    let gives = engine.bytes_in(goal).saturating_sub(engine.bytes_in(&plan));
    let change = engine.change_to(&plan);
    let reason = PlanReason::Shed {
        reclaim,
        gives,
        change,
    };
    ask(cx, plan, PlanKind::Shed, Some(reason));
}

/// Sends a plan; without a `reason`, one to load the model. Growth is already booked.
pub(super) fn ask(
    cx: &mut Context<'_>,
    plan: EnginePlan,
    kind: PlanKind,
    reason: Option<PlanReason>,
) {
    cx.engine.plans.last += 1;
    let revision = cx.engine.plans.last;
    let from = cx
        .engine
        .goal()
        .map_or(Bytes::ZERO, |goal| cx.engine.bytes_in(goal));
    if let Some(id) = cx.engine.lease {
        cx.ledger.set_moving(id, true);
    }
    cx.state.engine.plans.pending.insert(
        revision,
        Pending {
            plan: plan.clone(),
            asked_at: cx.state.now,
            kind,
            from,
        },
    );
    cx.out.push(match reason {
        None => Action::LoadEngine { revision, plan },
        Some(reason) => Action::ApplyPlan {
            revision,
            plan,
            reason,
        },
    });
}

pub(super) fn serve_deadlines(cx: &mut Context<'_>) {
    cx.state.engine.forget_past(cx.state.now);
    if cx.state.engine.take_read(cx.state.now) {
        cx.out.push(Action::ReinspectModel);
    }
    // An unanswered plan may be in force all the same; so the intended one is sent once more.
    if let Some(plan) = cx.state.engine.take_unconfirmed(cx.state.now) {
        cx.decide(EngineDecision::Unconfirmed);
        ask(cx, plan, PlanKind::Shed, Some(PlanReason::Confirm));
    }
    let Some((revision, overdue)) = cx.engine.overdue(cx.now) else {
        return;
    };
    let after = cx.now.saturating_since(overdue.asked_at);
    cx.decide(EngineDecision::Unanswered { revision, after });
    cx.engine.plans.pending.remove(&revision);
    cx.engine.plans.doubt(revision, overdue.plan.clone());
    answer_operators(cx, revision, Err("it does not respond"));
    if overdue.kind == PlanKind::Shed {
        // It may still be in progress: the dwell counts from the last request.
        cx.state.dwell.begin(cx.state.now);
    }
    ask(cx, overdue.plan, overdue.kind, Some(PlanReason::Unanswered));
}

/// Credits memory that a newer measurement of the engine shows as free.
pub(super) fn settle(cx: &mut Context<'_>) {
    let Some(id) = cx.engine.lease else {
        return;
    };
    if !cx.engine.is_ready() {
        return;
    }
    let held = cx.ledger.held_by(id);
    let used = cx.ledger.used_by(ENGINE_TENANT).unwrap_or(held);
    cx.state
        .ledger
        .lower(id, cx.state.engine.needs().max(used.min(held)));
    cx.state
        .ledger
        .set_moving(id, !cx.state.engine.plans.pending.is_empty());
}

/// Returns what limited a shed: the floor, a running answer, or a missing confirmation.
fn shed_limit(state: &State, held: Bytes) -> ShedLimit {
    let limits = state.engine.limits();
    let floor = state.engine.floor_bytes().unwrap_or_default();
    match limits.map(|limits| limits.kv_used) {
        _ if held <= floor => ShedLimit::Floor { bytes: floor },
        Some(tokens) if tokens > Tokens::ZERO => ShedLimit::RunningAnswer { tokens },
        _ => ShedLimit::NotConfirmed,
    }
}

/// Answers operators whose requests have an outcome.
pub(super) fn answer_operators(
    cx: &mut Context<'_>,
    revision: u64,
    outcome: Result<&EngineApplied, &str>,
) {
    let held = cx.engine_held();
    let (due, waiting) = std::mem::take(&mut cx.engine.operators)
        .into_iter()
        .partition(|operator| operator.revision <= revision);
    cx.engine.operators = waiting;
    let due: Vec<WaitingOperator> = due;
    for WaitingOperator {
        ticket,
        revision,
        before,
        wish,
    } in due
    {
        match (outcome, wish) {
            (Ok(applied), Wish::KvType { kind }) => cx.done(
                ticket,
                Done::KvChanged {
                    kv_type: kind,
                    before,
                    held,
                    freed: applied.freed,
                    untouched: applied.untouched_given,
                    took: applied.took,
                },
            ),
            (Ok(_), Wish::Shed { asked }) => {
                let freed = before.saturating_sub(held);
                let limited_by = (freed < asked).then(|| shed_limit(cx.state, held));
                let outcome = ShedOutcome {
                    asked,
                    freed,
                    held,
                    limited_by,
                };
                cx.answer(ticket, Answer::Shed(outcome));
            }
            (Err(reason), wish) => {
                let (field, value) = match wish {
                    Wish::KvType { kind } => ("kv_type", kind.to_string()),
                    Wish::Shed { .. } => ("plan", revision.to_string()),
                };
                let reason = reason.to_owned();
                let problem = Problem::NotApplied { revision, reason };
                let denial = Denial::invalid(ENGINE_TENANT, field, &value, problem);
                cx.deny(ticket, denial);
            }
        }
    }
}
