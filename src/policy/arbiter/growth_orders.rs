//! Orders of growth: load of the engine, and regrowth one step at a time.
//!
//! The next step and its preconditions are decided in [`growth`].

use super::{context::Context, engine_orders, reclaim_orders, serve, worker_orders};
use crate::{
    decision::{EngineDecision, GrowthDecision},
    engine_control::PlanKind,
    event::{CapacityWanted, Done},
    growth::{self, Load},
    growth_wait::GrowthWait,
    lease::{Class, LeaseKind},
    lease_table::Lease,
    params::ENGINE_TENANT,
    reason::{PlanReason, PlanSize, ReclaimReason},
    reclaim,
    residency::EnginePlan,
    shedding::Source,
};
use cotenant_units::Bytes;

/// Regrows what was shed, one step at a time.
pub(super) fn grow_back(cx: &mut Context<'_>) {
    if cx.dwell.left(cx.now).is_none() {
        let _ = grow_one_step(cx);
    }
}

/// Grows the KV capacity for a client's request: the wanted part from memory that may grow now, the needed part from
/// layers as well. Dwell, back-off and an operator's shed stay in force, except for a running answer as described at
/// [`growth::capacity_plan`].
pub(super) fn take_capacity_wanted(cx: &mut Context<'_>, want: &CapacityWanted) {
    let Some(present) = cx.engine.goal().map(|plan| plan.kv_capacity) else {
        return;
    };
    let (needed, wanted) = (want.needed, want.wanted.max(want.needed));
    if wanted <= present {
        return;
    }
    let grown = growth::capacity_plan(cx.state, needed, wanted, want.is_running).and_then(|plan| {
        let change = cx.engine.change_to(&plan);
        // The request has not begun, so the capacity is still unused.
        cx.state
            .engine
            .pin_capacity(needed.min(plan.kv_capacity), cx.state.now);
        grow_engine(cx, plan, PlanReason::Capacity { wanted, change })
    });
    if let Err(wait) = grown {
        cx.decide(GrowthDecision::CapacityWithheld {
            wanted,
            present,
            wait,
        });
    }
}

/// Performs the most valuable step of growth, or returns the reason to wait.
pub(super) fn grow_one_step(cx: &mut Context<'_>) -> Result<Done, GrowthWait> {
    let Some(next) = growth::next(cx.state)? else {
        return Ok(Done::FullSize);
    };
    let done = match next {
        (Source::WorkerStop { worker }, _) => {
            worker_orders::want(cx, &worker);
            serve::serve_queue(cx);
            Done::WorkerReturns { worker }
        }
        (Source::WorkerVariant { worker, variant }, _) => {
            worker_orders::queue_variant(cx, &worker, variant.clone());
            serve::serve_queue(cx);
            Done::VariantReturns { worker, variant }
        }
        (Source::WorkerNotified { worker }, _) => worker_orders::restore_notified(cx, &worker)?,
        (_, Some(step)) => grow_engine(cx, step.plan, step.reason)?,
        (_, None) => return Ok(Done::FullSize),
    };
    cx.state.dwell.grown(cx.state.now);
    Ok(done)
}

/// Books a larger plan, and sends it.
fn grow_engine(
    cx: &mut Context<'_>,
    plan: EnginePlan,
    reason: PlanReason,
) -> Result<Done, GrowthWait> {
    let (bytes, held) = (cx.engine.bytes_in(&plan), cx.engine_held());
    let booked = cx
        .engine
        .lease
        .is_some_and(|id| cx.grow_lease(id, bytes.max(held)));
    if !booked {
        return Err(growth::room(cx.state)
            .unwrap_or_default()
            .lacks(bytes.saturating_sub(held)));
    }
    // The plan also gives up memory if it applies a smaller KV type set by an operator, or if a larger prefill chunk or
    // KV capacity displaces layers.
    let gives_up =
        |goal: &EnginePlan| plan.kv_type < goal.kv_type || !goal.resident.is_subset(&plan.resident);
    if cx.engine.goal().is_some_and(gives_up) {
        cx.state.dwell.begin(cx.state.now);
    }
    engine_orders::ask(cx, plan, PlanKind::Regrow, Some(reason.clone()));
    Ok(Done::Grows(reason))
}

/// Loads the engine if it fits, or reclaims memory for its floor from other holders.
pub(super) fn load_engine(cx: &mut Context<'_>) {
    match growth::load(cx.state) {
        None => {}
        Some(Load::Fits { plan, kept }) => load_with(cx, plan, kept),
        Some(Load::Lacks {
            error,
            missing,
            kept,
            headroom,
        }) => {
            let free = cx.ledger.free();
            if let Some(missing) = missing {
                let reason = ReclaimReason::EngineFloor {
                    missing,
                    floor: error.floor,
                    free,
                };
                let reclaim = reclaim::for_request(cx.state, Class::LlmElastic, missing, reason);
                reclaim.map(|reclaim| reclaim_orders::carry_out(cx, reclaim));
            }
            let figures = [error.floor, error.available, free, kept, headroom];
            let watermark = cx.params.pressure.elevated_below;
            let decision = EngineDecision::WaitsForMemory {
                error,
                free,
                kept,
                headroom,
                watermark,
            };
            cx.decide_once(WAITS, &figures, decision);
        }
    }
}

fn load_with(cx: &mut Context<'_>, plan: EnginePlan, kept: Bytes) {
    let (bytes, size) = (
        cx.engine.bytes_in(&plan),
        PlanSize::of(cx.engine.shape(), &plan),
    );
    let bounds = cx.engine.lease_bounds().unwrap_or((bytes, bytes));
    let generation = cx.leases.next_generation();
    let kind = (LeaseKind::Engine, Class::LlmElastic);
    let lease = Lease::of_ours(ENGINE_TENANT, kind, generation, bounds, cx.now);
    let id = cx.leases.next_id();
    if !cx.grant(id, bytes, lease) {
        return;
    }
    cx.state.engine.load(id, cx.state.now);
    cx.record.said.remove(WAITS);
    cx.decide(EngineDecision::Loading {
        plan: size,
        full: bounds.1,
        free: cx.ledger.free(),
        kept,
    });
    engine_orders::ask(cx, plan, PlanKind::Load, None);
}

/// Key of a decision that is logged once.
const WAITS: &str = "the engine waits";
