//! Reclaim for a request, for an operator and under pressure: how much, and from which holders.
//!
//! The cheapest set that suffices is computed over all [`candidates`](super::candidates); the decision lists those that
//! were chosen and those that were not. Under pressure the next round waits for the settle time and for a sample that is
//! newer than what came back. Nothing here changes the state.

use super::{
    lease::Class,
    pressure::PressureLevel,
    reason::ReclaimReason,
    shedding::{Candidate, Chosen, NextShed, Weighing, choose, reclaimable},
    state::State,
    stop_or_shed::{Purpose, Urgency, stops_for_what_is_owed},
};
use cotenant_units::{Bytes, Timestamp};

/// The holders that are asked, and for how much.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reclaim {
    pub(super) purpose: Purpose,
    pub(super) reason: ReclaimReason,
    pub(super) weighing: Weighing,
    pub(super) chosen: Vec<Chosen>,
}

/// The action under pressure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Relief {
    /// Headroom is above the Elevated watermark.
    NotNeeded,
    /// An earlier request is under way, or no newer sample shows its effect.
    Waits,
    /// This is to be reclaimed.
    Reclaim {
        urgency: Urgency,
        reclaim: Box<Reclaim>,
    },
    /// There is nothing that could be asked for this.
    NothingLeft { urgency: Urgency },
}

/// The holders that give `missing` bytes back for a request of `class`; none, if they cannot give all of it.
pub(super) fn for_request(
    state: &State,
    class: Class,
    missing: Bytes,
    reason: ReclaimReason,
) -> Option<Reclaim> {
    let purpose = Purpose::Request(class);
    enough(state, &state.candidates(purpose), missing, purpose, reason)
}

/// The same, from what the engine has beyond its floor.
pub(super) fn from_engine(state: &State, missing: Bytes, reason: ReclaimReason) -> Option<Reclaim> {
    let purpose = Purpose::Request(Class::Interactive);
    enough(
        state,
        &state.engine_candidates(purpose),
        missing,
        purpose,
        reason,
    )
}

/// The share of the engine for an operator who asks for `bytes`: as much of that as it has.
pub(super) fn for_operator(state: &State, bytes: Bytes, reason: ReclaimReason) -> Option<Reclaim> {
    let purpose = Purpose::Request(Class::AudioRealtime);
    weigh(
        state,
        &state.engine_candidates(purpose),
        bytes,
        purpose,
        reason,
    )
}

/// What has to be given back since the budget was lowered below what is held: all of it, or as much as there is.
pub(super) fn over_budget(state: &State) -> Option<Reclaim> {
    let (over, budget) = (state.ledger.over_budget(), state.ledger.budget());
    let missing = over.saturating_sub(state.coming_back());
    if missing == Bytes::ZERO {
        return None;
    }
    let purpose = Purpose::Request(Class::AudioRealtime);
    weigh(
        state,
        &state.candidates(purpose),
        missing,
        purpose,
        ReclaimReason::OverBudget { over, budget },
    )
}

/// The shed while the headroom is below the upper watermark; `relieved_at` is when something was shed last.
pub(super) fn under_pressure(state: &State, relieved_at: Option<Timestamp>) -> Relief {
    let level = state.pressure.level();
    let (Some(headroom), Some(sampled_at)) =
        (state.pressure.headroom(), state.pressure.sampled_at())
    else {
        return Relief::Waits;
    };
    let (limits, shed) = (&state.params.pressure, &state.params.shed);
    let elevated = limits.elevated_below;
    if level == PressureLevel::Normal || headroom >= elevated {
        return Relief::NotNeeded;
    }
    let settling = relieved_at.is_some_and(|at| state.now < at + shed.settle);
    if state.pressure.in_grace(state.now) || settling || sampled_at <= state.changed_at {
        return Relief::Waits;
    }
    // The loss until the next step may follow is part of this one: steps of one size never catch up with a neighbour
    // that takes as much in each settle time.
    let wanted = elevated
        .saturating_add(shed.minimum_reclaim)
        .saturating_add(state.pressure.lost_within(shed.settle));
    let coming = state.physically_coming_back(level);
    let missing = wanted.saturating_sub(headroom).saturating_sub(coming);
    if missing == Bytes::ZERO {
        return Relief::Waits;
    }
    let urgency = if headroom < limits.last_resort_below {
        Urgency::LastResort
    } else if state.pressure.is_urgent() {
        Urgency::Urgent
    } else {
        Urgency::Warning
    };
    let purpose = Purpose::Pressure(urgency);
    let mut candidates = state.candidates(purpose);
    let owed = elevated.saturating_sub(headroom).saturating_sub(coming);
    stops_for_what_is_owed(&mut candidates, owed);
    let reason = ReclaimReason::Pressure {
        level,
        headroom,
        watermark: elevated,
        missing,
        wanted,
    };
    match weigh(state, &candidates, missing, purpose, reason) {
        Some(reclaim) => Relief::Reclaim {
            urgency,
            reclaim: Box::new(reclaim),
        },
        None => Relief::NothingLeft { urgency },
    }
}

/// What would be shed first if the headroom fell to the upper watermark; `None` before the first sample.
pub(super) fn next(state: &State) -> Option<NextShed> {
    let (headroom, below) = (
        state.pressure.headroom()?,
        state.params.pressure.elevated_below,
    );
    let need = state
        .params
        .shed
        .minimum_reclaim
        .saturating_add(below.saturating_sub(headroom));
    // At Elevated nothing is given up that makes the engine slower; beyond it everything may be.
    let chosen_for = |urgency| choose(&state.candidates(Purpose::Pressure(urgency)), need);
    let gentle = chosen_for(Urgency::Warning);
    let chosen = if gentle.is_empty() {
        chosen_for(Urgency::Urgent)
    } else {
        gentle
    };
    Some(NextShed {
        chosen,
        need,
        below,
        headroom,
    })
}

fn enough(
    state: &State,
    candidates: &[Candidate],
    missing: Bytes,
    purpose: Purpose,
    reason: ReclaimReason,
) -> Option<Reclaim> {
    let suffices = reclaimable(candidates) >= missing;
    if suffices {
        weigh(state, candidates, missing, purpose, reason)
    } else {
        None
    }
}

/// The cheapest set that suffices, or all that there is.
fn weigh(
    state: &State,
    candidates: &[Candidate],
    need: Bytes,
    purpose: Purpose,
    reason: ReclaimReason,
) -> Option<Reclaim> {
    let chosen = choose(candidates, need);
    if chosen.is_empty() {
        return None;
    }
    let mut weighing = Weighing::new(reason.clone(), need, candidates, &chosen);
    weighing.mode = state.engine.mode().filter(|_| state.engine.lease.is_some());
    weighing.spared = state.spared(purpose);
    if let Purpose::Pressure(_) = purpose {
        weighing
            .spared
            .extend(state.not_stopped_for_foresight(candidates, purpose));
    }
    Some(Reclaim {
        purpose,
        reason,
        weighing,
        chosen,
    })
}
