//! Orders of reclaim: holders that can shrink together, stops of processes one at a time.
//!
//! The holders are chosen in [`crate::reclaim`].

use super::{context::Context, engine_orders, worker_orders};
use crate::{
    decision::{ChangeCause, GrowthDecision},
    event::Action,
    reason::StopReason,
    reclaim::{self, Reclaim, Relief},
    shedding::{Chosen, Source},
    worker_control::is_any_stopping,
};

/// Reclaims the excess over a lowered budget, one round per settle time.
pub(super) fn come_within_budget(cx: &mut Context<'_>) {
    let settle = cx.params.shed.settle;
    let settling = cx.record.relieved_at.is_some_and(|at| cx.now < at + settle);
    if settling {
        return;
    }
    if let Some(reclaim) = reclaim::over_budget(cx.state) {
        carry_out(cx, reclaim);
        cx.record.relieved_at = Some(cx.now);
    }
}

/// Sheds memory while the headroom is below the upper watermark.
pub(super) fn relieve_pressure(cx: &mut Context<'_>) {
    let spared = match reclaim::under_pressure(cx.state, cx.record.relieved_at) {
        Relief::Waits => return,
        Relief::NotNeeded => {
            cx.record.said.remove(NOTHING_LEFT);
            return;
        }
        Relief::Reclaim(reclaim) => {
            if carry_out(cx, *reclaim) {
                cx.record.relieved_at = Some(cx.now);
                cx.record.said.remove(NOTHING_LEFT);
                return;
            }
            false
        }
        Relief::NothingLeft { spared } => spared,
    };
    let level = cx.pressure.level();
    if spared {
        return cx.decide_once(NOTHING_LEFT, &[], GrowthDecision::EngineSpared { level });
    }
    let own = cx.pressure.sample().and_then(|sample| sample.own_used);
    let unaccounted = cx.ledger.unaccounted();
    let decision = GrowthDecision::NothingLeft {
        level,
        unaccounted,
        own,
    };
    cx.decide_once(
        NOTHING_LEFT,
        &[unaccounted, own.unwrap_or_default()],
        decision,
    );
}

/// Carries out a reclaim, and logs it. Returns whether a request was sent to a holder.
pub(super) fn carry_out(cx: &mut Context<'_>, reclaim: Reclaim) -> bool {
    let Reclaim {
        purpose,
        weighing,
        chosen,
        plan,
    } = reclaim;
    let reason = weighing.reason.clone();
    cx.out.push(Action::Weighed { weighing });
    if chosen
        .iter()
        .any(|one| !matches!(one.source, Source::Tenant { .. }))
        && let Some(backed_off) = cx.state.dwell.undo(cx.state.now)
    {
        cx.decide(backed_off);
    }
    let mut asked = false;
    for Chosen { source, bytes } in chosen {
        match source {
            Source::Tenant { lease: id, .. } => {
                let from = cx.counts(id, purpose);
                cx.set_target(id, from.saturating_sub(bytes), &reason);
                asked = true;
            }
            Source::WorkerNotified { worker } => {
                asked |= worker_orders::notify_of_pressure(cx, &worker, &reason);
            }
            Source::WorkerVariant { worker, variant } => {
                let reason = reason.clone();
                let cause = ChangeCause::Room { reason };
                worker_orders::change(cx, &worker, variant, Vec::new(), cause);
                asked = true;
            }
            Source::WorkerStop { worker } if !is_any_stopping(&cx.workers) => {
                let (held, reclaim) = (bytes, reason.clone());
                let reason = StopReason::Reclaim { held, reclaim };
                worker_orders::stop(cx, &worker, reason);
                asked = true;
            }
            // Workers are stopped one at a time, and the engine gets one plan for all its choices.
            _ => {}
        }
    }
    if let Some(plan) = plan {
        engine_orders::shed(cx, plan, reason);
        asked = true;
    }
    if asked {
        cx.state.dwell.begin(cx.state.now);
    }
    asked
}

/// Key of a decision that is logged once.
const NOTHING_LEFT: &str = "nothing left to shed";
