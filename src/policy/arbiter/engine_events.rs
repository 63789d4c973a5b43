//! Events of the engine: inspected, plan applied or failed, gone, busy or idle.
//!
//! Its state is in [`engine_control`](crate::engine_control), orders to it are in `engine_orders`.

use super::{context::Context, engine_orders};
use crate::{
    decision::{EngineDecision, NextLoad, StrayPlan},
    engine_control::{Confirmed, KvUse, PlanKind},
    engine_failure::Cure,
    event::EngineApplied,
    params::{ENGINE_TENANT, VERIFY_PER_MILLE},
    reason::PlanSize,
    residency::{ModelShape, PlanLimits},
    state::State,
};
use cotenant_units::{Bytes, Tokens};

pub(super) fn take_inspected(cx: &mut Context<'_>, shape: ModelShape) {
    let Some(params) = &cx.engine.params else {
        return cx.decide(EngineDecision::NotConfigured { model: shape.name });
    };
    if cx.engine.lease.is_some() {
        return cx.decide(EngineDecision::AlreadyLoaded { model: shape.name });
    }
    let limits = PlanLimits::new(params, Tokens::ZERO);
    cx.decide(EngineDecision::Inspected {
        model: shape.name.clone(),
        layers: shape.layer_count(),
        token: shape.kv.bytes_per_token(limits.kv_type),
        full: shape.plan_bytes(&shape.full_plan(&limits)),
    });
    // Memory kept by pending reads of an earlier load has been returned.
    cx.ledger.forget(ENGINE_TENANT);
    if let Some(at) = cx.state.engine.inspected(shape, cx.state.now) {
        let wait = at.saturating_since(cx.now);
        cx.decide(EngineDecision::LoadDelayed { wait });
    }
    if let Some(error) = cx.floor_out_of_reach() {
        cx.engine.refuse(error.to_string(), FITS);
        cx.decide(EngineDecision::FloorExceedsBudget { error });
    }
}

pub(super) fn take_applied(cx: &mut Context<'_>, applied: &EngineApplied) {
    let (now, revision) = (cx.now, applied.revision);
    let (confirmed, id) = match cx.engine.confirm(applied, now) {
        Ok(confirmed) => (confirmed, cx.engine.lease),
        Err(stray) => return ignore_plan(cx, revision, stray),
    };
    let Some(id) = id else { return };
    let before = cx.ledger.held_by(id);
    cx.ledger.measure(ENGINE_TENANT, applied.used, now);
    let stays = cx.engine.needs().max(applied.used.min(before));
    let credited = cx.ledger.lower(id, stays);
    let is_asked = !cx.engine.plans.pending.is_empty();
    cx.ledger.set_moving(id, is_asked);
    cx.changed_at = now;
    cx.decide(EngineDecision::Applied {
        revision,
        outcome: confirmed.outcome(credited, applied),
        plan: plan_in_force(cx.state),
        used: applied.used.saturating_sub(applied.untouched),
        free: cx.ledger.free(),
        took: applied.took,
    });
    let freed = credited.min(applied.freed);
    if matches!(confirmed, Confirmed::Shed(_) | Confirmed::ChunkEnded) {
        cx.note_reclaimed(credited, freed, true);
        cx.pressure.trend.came_back(credited, now);
    }
    match confirmed {
        Confirmed::Repeated => cx.pressure.trend.came_back(freed, now),
        Confirmed::Shed(asked) => {
            let promised = before.saturating_sub(cx.engine.bytes_in(&asked.plan));
            let given = credited.min(applied.freed.saturating_add(applied.untouched_given));
            if promised.per_mille(VERIFY_PER_MILLE) > given && !is_asked {
                cx.decide(EngineDecision::Short {
                    promised,
                    credited,
                    freed: applied.freed,
                });
            }
        }
        Confirmed::Grown {
            asked,
            without_chunk,
        } => {
            cx.engine.blocked.growth = Some(cx.later(cx.params.shed.settle));
            cx.dwell.took(applied.took);
            cx.renew_dwell();
            let in_force = cx.engine.plans.in_force.as_ref();
            let bytes = in_force.map_or(asked.from, |plan| cx.engine.bytes_in(plan));
            let regrown = &mut cx.record.stats.regrown_bytes;
            *regrown = regrown.saturating_add(bytes.saturating_sub(asked.from));
            // Layers displaced by the omitted chunk may regrow at once.
            if without_chunk && cx.dwell.began_at(asked.asked_at) {
                cx.dwell.end();
            }
        }
        Confirmed::Ready => {
            cx.dwell.took(applied.took);
            cx.renew_dwell();
        }
        Confirmed::ChunkEnded | Confirmed::Unchanged => {}
    }
    engine_orders::answer_operators(cx, revision, Ok(applied));
}

pub(super) fn take_apply_failed(cx: &mut Context<'_>, revision: u64, reason: &str) {
    let Some(pending) = cx.engine.plans.pending.remove(&revision) else {
        let reason = reason.to_owned();
        return ignore_plan(cx, revision, StrayPlan::Failed { reason });
    };
    if pending.kind == PlanKind::Load {
        take_failed(cx, reason, Cure::Reload, None);
        return;
    }
    cx.decide(EngineDecision::NotApplied {
        revision,
        reason: reason.to_owned(),
        plan: PlanSize::of(cx.engine.shape(), &pending.plan),
        in_force: plan_in_force(cx.state),
    });
    let (settle, dwell) = (cx.params.shed.settle, cx.dwell.base());
    // Neither growth nor the same shed is retried at once: it would fail again.
    if pending.kind == PlanKind::Shed {
        cx.engine.blocked.shed = Some(cx.later(settle));
    }
    // The plan in force is confirmed before anything grows; later, if the failed plan was itself a confirmation.
    let confirms = cx.engine.plans.in_force.as_ref() == Some(&pending.plan);
    let confirm_at = cx.later(if confirms { settle.max(dwell) } else { settle });
    let grows_at = match pending.kind {
        PlanKind::Regrow => confirm_at.max(cx.now + dwell),
        PlanKind::Shed | PlanKind::Load => confirm_at,
    };
    cx.engine.blocked.growth = cx.engine.blocked.growth.max(Some(grows_at));
    // The finished part of the plan stays in the ledger until the engine reports the plan in force.
    cx.engine.plans.failed(revision, pending.plan, confirm_at);
    engine_orders::settle(cx);
    engine_orders::answer_operators(cx, revision, Err(reason));
}

pub(super) fn take_failed(cx: &mut Context<'_>, reason: &str, cure: Cure, left: Option<Bytes>) {
    if cx.engine.params.is_none() {
        return;
    }
    let freed = cx.engine.lease.map_or(Bytes::ZERO, |id| cx.drop_lease(id));
    match left {
        // Not covered by a lease, and not available to grants.
        Some(left) => cx.state.ledger.measure(ENGINE_TENANT, left, cx.state.now),
        None => cx.ledger.forget(ENGINE_TENANT),
    }
    cx.changed_at = cx.now;
    // A retry that fails for the same reason is not logged.
    let before = cx.engine.failure();
    let is_news = before.is_none_or(|before| before.reason != reason);
    let next = cx.state.engine.failed(reason, cure, left, cx.state.now);
    let failure = cx.engine.failure().map(|failure| failure.to_string());
    if is_news || matches!(next, NextLoad::GivenUp) {
        cx.decide(EngineDecision::Gone {
            reason: failure.unwrap_or_default(),
            freed,
            next,
        });
    }
    engine_orders::answer_operators(cx, u64::MAX, Err(reason));
}

pub(super) fn take_activity(cx: &mut Context<'_>, requests: u32, kv: KvUse) {
    let in_all = kv.dropped.get();
    let lost = cx.engine.activity(requests, kv);
    if lost > 0 {
        cx.decide(EngineDecision::ContextLost {
            tokens: lost,
            in_all,
        });
    }
}

/// Remedy if the floor of a model exceeds the budget.
const FITS: &str = "`cotenant plan FILE` shows the budget that it needs";

fn plan_in_force(state: &State) -> Option<PlanSize> {
    let plan = state.engine.plans.in_force.as_ref();
    plan.map(|plan| PlanSize::of(state.engine.shape(), plan))
}

fn ignore_plan(cx: &mut Context<'_>, revision: u64, stray: StrayPlan) {
    cx.decide(EngineDecision::StrayPlan { revision, stray });
}
