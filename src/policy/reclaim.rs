//! Reclaim for a request, for an operator and under pressure: amount and holders, as functions of the state.
//!
//! Computes the cheapest sufficient set over the offers of all [holders](super::holder); the decision lists chosen and
//! rejected candidates. Under pressure, the next round waits for the settle time and for a sample newer than the last
//! release.

use super::{
    choose::{Choice, Offer, choose, reclaimable},
    holder::Purpose,
    lease::Class,
    pay::{Level, Pay},
    pressure::PressureLevel,
    reason::ReclaimReason,
    residency::EnginePlan,
    shedding::{Chosen, NextShed, Source, Weighing},
    state::State,
};
use cotenant_units::{Bytes, Timestamp};

/// The holders to reclaim from, with the bytes of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reclaim {
    pub(super) purpose: Purpose,
    pub(super) weighing: Weighing,
    /// Bytes by kind and holder.
    pub(super) chosen: Vec<Chosen>,
    /// The smaller plan of the engine.
    pub(super) plan: Option<EnginePlan>,
}

/// Action under pressure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Relief {
    /// Headroom is above the Elevated watermark.
    NotNeeded,
    /// An earlier reclaim is in progress, or no newer sample shows its effect.
    Waits,
    /// Memory to reclaim.
    Reclaim(Box<Reclaim>),
    /// Nothing can be reclaimed; `spared` if the level does not permit the price of the remaining candidates.
    NothingLeft { spared: bool },
}

/// Returns the reclaim of `missing` bytes for a request of `class`; `None` if all candidates together are too little.
pub(super) fn for_request(
    state: &State,
    class: Class,
    missing: Bytes,
    reason: ReclaimReason,
) -> Option<Reclaim> {
    let purpose = Purpose::Request(class);
    enough(state, &state.offers(purpose), missing, purpose, reason)
}

/// Returns the same from the engine's memory above its floor only.
pub(super) fn from_engine(state: &State, missing: Bytes, reason: ReclaimReason) -> Option<Reclaim> {
    let purpose = Purpose::Request(Class::Interactive);
    let offers = state.engine_offers(purpose);
    enough(state, &offers, missing, purpose, reason)
}

/// Returns the reclaim for an operator's shed of `bytes` from the engine, or of as much as it can give.
pub(super) fn for_operator(state: &State, bytes: Bytes, reason: ReclaimReason) -> Option<Reclaim> {
    let purpose = Purpose::Request(Class::AudioRealtime);
    weigh(state, &state.engine_offers(purpose), bytes, purpose, reason)
}

/// Returns the reclaim of bytes held beyond a lowered budget: all of them, or as many as possible.
pub(super) fn over_budget(state: &State) -> Option<Reclaim> {
    let (over, budget) = (state.ledger.over_budget(), state.ledger.budget());
    let missing = over.saturating_sub(state.coming_back());
    if missing == Bytes::ZERO {
        return None;
    }
    let purpose = Purpose::Request(Class::AudioRealtime);
    let reason = ReclaimReason::OverBudget { over, budget };
    weigh(state, &state.offers(purpose), missing, purpose, reason)
}

/// Returns the action while the headroom is below the upper watermark; `relieved_at` is the time of the last shed.
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
    // Includes the loss expected until the next step: steps of a fixed size never catch up with a process that
    // allocates as much in each settle time.
    let wanted = elevated
        .saturating_add(shed.minimum_reclaim)
        .saturating_add(state.pressure.trend.lost_within(shed.settle));
    let coming = state.physically_coming_back(level);
    let missing = wanted.saturating_sub(headroom).saturating_sub(coming);
    if missing == Bytes::ZERO {
        return Relief::Waits;
    }
    let pay = Pay::now(&state.pressure, limits, missing);
    let purpose = Purpose::Pressure(pay);
    let mut offers = state.offers(purpose);
    let owed = elevated.saturating_sub(headroom).saturating_sub(coming);
    // Processes are stopped only for bytes missing below the watermark; the predicted loss is taken from other
    // candidates.
    let goes_on = |offer: &&Offer| !offer.source.stops();
    let without_stops: Bytes = offers.iter().filter(goes_on).map(Offer::bytes).sum();
    let need = if without_stops >= owed {
        offers.retain(|offer| !offer.source.stops());
        missing
    } else {
        owed
    };
    let reason = ReclaimReason::Pressure {
        level,
        headroom,
        watermark: elevated,
        missing,
        wanted,
    };
    match weigh(state, &offers, need, purpose, reason) {
        Some(reclaim) => Relief::Reclaim(Box::new(reclaim)),
        None => Relief::NothingLeft {
            spared: !pay.is_serious()
                || !state
                    .engine_offers(Purpose::Pressure(pay.unbounded()))
                    .is_empty(),
        },
    }
}

/// Returns the shed at a headroom just below the upper watermark; `None` before the first sample.
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
    // At Elevated nothing is given up that slows the engine; above it, anything may be.
    let chosen_for = |pay| {
        let purpose = Purpose::Pressure(pay);
        select(state, &state.offers(purpose), need, purpose)
            .0
            .chosen
    };
    let gentle = chosen_for(Pay::new(Level::Elevated, need));
    let chosen = if gentle.is_empty() {
        chosen_for(Pay::new(Level::Critical, need))
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
    offers: &[Offer],
    missing: Bytes,
    purpose: Purpose,
    reason: ReclaimReason,
) -> Option<Reclaim> {
    let suffices = reclaimable(offers) >= missing;
    suffices.then(|| weigh(state, offers, missing, purpose, reason))?
}

/// Weighs the cheapest sufficient set, or all offers if they are too little.
fn weigh(
    state: &State,
    offers: &[Offer],
    need: Bytes,
    purpose: Purpose,
    reason: ReclaimReason,
) -> Option<Reclaim> {
    let (choice, plan, rows) = select(state, offers, need, purpose);
    if choice.chosen.is_empty() {
        return None;
    }
    let mut weighing = Weighing::new(reason, need, &rows, &choice);
    weighing.reclaimable = reclaimable(offers);
    let engine = state.engine.params.as_ref();
    let engine = engine.filter(|_| state.engine.lease.is_some());
    weighing.mode = engine.map(|params| params.mode);
    weighing.spared = state.spared(purpose);
    Some(Reclaim {
        purpose,
        weighing,
        chosen: choice.chosen,
        plan,
    })
}

/// Returns the cheapest sufficient set, the engine's plan for its share, and the weighed offers.
fn select(
    state: &State,
    offers: &[Offer],
    need: Bytes,
    purpose: Purpose,
) -> (Choice, Option<EnginePlan>, Vec<Offer>) {
    let Choice { chosen, above_ppm } = choose(offers, need);
    let is_engine = |source: &Source| source.is_of_engine();
    let (engine, mut others): (Vec<Chosen>, Vec<Chosen>) =
        chosen.into_iter().partition(|one| is_engine(&one.source));
    let sum = |chosen: &[Chosen]| chosen.iter().map(|one| one.bytes).sum::<Bytes>();
    // The engine's steps are coarse: its plan is computed for the bytes not covered by others.
    let bytes = sum(&engine).min(need.saturating_sub(sum(&others)));
    let (plan, parts, mut rows) = if offers.iter().any(|offer| is_engine(&offer.source)) {
        state.engine_gives(bytes, purpose)
    } else {
        (None, Vec::new(), Vec::new())
    };
    others.splice(0..0, parts);
    let holders = offers.iter().filter(|offer| !is_engine(&offer.source));
    rows.extend(holders.cloned());
    let chosen = others;
    (Choice { chosen, above_ppm }, plan, rows)
}
