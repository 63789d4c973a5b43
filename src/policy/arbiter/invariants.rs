//! Invariants checked at the end of every call.

use super::view::next_deadline;
use crate::state::State;

/// Returns the first invariant that does not hold. Checked after every call except renewals, in release builds too.
///
/// The leases never exceed the budget; leases and ledger have the same entries; a lease under reclaim has a deadline
/// ahead; the engine is never sent a plan below its floor, and its lease covers every pending plan; no deadline that is
/// due is left unserved.
pub(super) fn broken(state: &State) -> Option<String> {
    if !state.ledger.is_conserved() {
        return Some(format!(
            "{} is held of a {} budget",
            state.ledger.held(),
            state.ledger.budget()
        ));
    }
    if !state.ledger.has_all(state.leases.ids()) {
        return Some("leases and ledger have different entries".to_owned());
    }
    if let Some(name) = state.leases.past_its_time(state.now) {
        return Some(format!("lease {name} is past its term"));
    }
    broken_engine(state)
        .or_else(|| broken_worker(state))
        .or_else(|| unserved_deadline(state))
}

fn broken_engine(state: &State) -> Option<String> {
    let held = state.engine.lease.map(|id| state.ledger.held_by(id));
    let limits = state.engine.limits()?;
    let shape = state.engine.shape()?;
    // If memory for layers of the floor was refused, it was loaded with fewer.
    let loaded = state
        .engine
        .plans
        .in_force
        .as_ref()
        .map_or(usize::MAX, |plan| plan.resident.len());
    for (revision, pending) in &state.engine.plans.pending {
        let floor = limits.kv_floor.min(shape.context_max);
        let least = shape
            .parts_of(limits.resident_min)
            .min(shape.layers.len())
            .min(loaded);
        if pending.plan.kv_capacity < floor || pending.plan.resident.len() < least {
            return Some(format!("plan {revision} is below the engine's floor"));
        }
        if held.is_none_or(|held| held < shape.plan_bytes(&pending.plan)) {
            return Some(format!(
                "plan {revision} is not covered by the engine's lease"
            ));
        }
    }
    let lost = state.engine.is_ready() && held.is_none();
    lost.then(|| "the engine runs without a lease".to_owned())
}

fn broken_worker(state: &State) -> Option<String> {
    state.workers.values().find_map(|worker| {
        let (id, name) = (worker.lease()?, &worker.params.name);
        let booked = state.leases.get(id).is_some();
        (!booked).then(|| format!("worker `{name}` is {:?} and not booked", worker.state()))
    })
}

fn unserved_deadline(state: &State) -> Option<String> {
    let next = next_deadline(state)?;
    (next <= state.now).then(|| format!("a deadline of {next} has not been served"))
}
