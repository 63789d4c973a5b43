//! Bounds of the engine's plan: its floor, and its lease.
//!
//! With a larger chunk it never exceeds the full plan, except for the KV blocks without which the running answer would
//! end.

use cotenant::{
    policy::{
        event::{Action, Event},
        residency::EnginePlan,
    },
    units::{Bytes, Tokens},
};

use super::{Checker, Step};

pub(crate) struct Floor;

impl Checker for Floor {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        let (Some(engine), Some(shape)) = (&step.params.engine, &step.after.engine.shape) else {
            return Ok(());
        };
        for action in step.actions {
            let (Action::ApplyPlan { plan, .. } | Action::LoadEngine { plan, .. }) = action else {
                continue;
            };
            // It was loaded with fewer layers of the floor after a refused allocation.
            let loaded = [step.before, step.after]
                .into_iter()
                .filter_map(|book| book.engine.in_force.as_ref());
            let least = loaded
                .map(|plan| plan.resident.len())
                .min()
                .unwrap_or(usize::MAX);
            let least = shape
                .layers
                .len()
                .min(engine.resident_min as usize)
                .min(least);
            if plan.kv_capacity < engine.kv_floor.min(shape.context_max)
                || plan.resident.len() < least
            {
                return Err(format!("below the floor: {plan:?}"));
            }
            if plan.kv_capacity.get() % shape.kv.block_tokens.get() != 0 {
                return Err(format!("not whole blocks: {plan:?}"));
            }
            // Larger chunks replace something, and are absent from the full plan, with the KV type in force then.
            let full = step.after.engine.full.clone();
            let full = full.map(|full| EnginePlan {
                kv_type: full.kv_type.max(plan.kv_type),
                ..full
            });
            let most = full
                .map_or(Bytes::ZERO, |full| shape.plan_bytes(&full))
                .max(step.engine_goal());
            // Except for further blocks that the running answer needs.
            let before = step
                .before
                .engine
                .asked
                .as_ref()
                .or(step.before.engine.in_force.as_ref());
            let blocks = before
                .filter(|_| step.is_for_the_answer(plan, shape))
                .map_or(Bytes::ZERO, |before| {
                    let tokens = plan
                        .kv_capacity
                        .get()
                        .saturating_sub(before.kv_capacity.get());
                    shape.kv.capacity_bytes(Tokens::new(tokens), plan.kv_type)
                });
            // An operator's KV type is applied during a running chunk, at additional cost.
            let is_ordered = matches!(step.event, Event::OperatorKvType { .. });
            let cells = |plan: &EnginePlan| shape.kv.capacity_bytes(plan.kv_capacity, plan.kv_type);
            let ordered = before
                .filter(|_| is_ordered)
                .map_or(Bytes::ZERO, |was| cells(plan).saturating_sub(cells(was)));
            if plan.prefill_chunk > engine.prefill_chunk
                && shape.plan_bytes(plan) > most + blocks + ordered
            {
                return Err(format!("a larger chunk takes more than {most}: {plan:?}"));
            }
            // A deadline may request it, and the following event of the same call reports that the engine is gone.
            let gone = matches!(step.event, Event::EngineFailed { .. });
            let book = if gone { step.before } else { step.after };
            let held: Bytes = book
                .leases
                .iter()
                .filter(|lease| lease.tenant == "llm")
                .map(|lease| lease.memory.held)
                .sum();
            if shape.plan_bytes(plan) > held {
                return Err(format!(
                    "above what is held: {} of {held}",
                    shape.plan_bytes(plan)
                ));
            }
        }
        Ok(())
    }
}
