//! Growth: the next step, or the condition that it waits for, as pure functions of the state.
//!
//! The reverse of shedding, with the same costs: of everything given up that would fit, the part with the highest cost
//! per byte is restored first. Nothing grows before the [dwell](super::dwell) after the last shed has passed, while a
//! satisfiable request waits, beyond the room in the budget and the last sample, or into the space reserved for stopped
//! workers. The sizes to which workers return are in [`holder`](super::holder).
//!
//! Growth leaves the headroom at the Elevated watermark plus the hysteresis: below that the level would not return to
//! Normal. Loading leaves the same margin, so a plan that fits at load also fits at regrowth. Layers grow before KV
//! capacity, because untouched capacity is worth nothing yet; in the mode `max-context` the configured order applies. A
//! request that needs more capacity than there is gets it from layers.

use super::{
    choose::Offer,
    growth_wait::GrowthWait,
    lease::Class,
    params::ResidencyMode,
    pressure::PressureLevel,
    price::Price,
    reason::{PlanChange, PlanReason, PlanSize},
    residency::{EnginePlan, FloorError, ModelShape, PlanLimits},
    shedding::Source,
    state::State,
    worker_control::first_are_up,
};
use cotenant_units::{Bytes, Tokens};

/// Memory that growth may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GrowthRoom {
    /// Free bytes of the budget.
    pub(super) free: Bytes,
    /// Headroom of a sample newer than the last change, minus bytes of the engine's lease that were unused then.
    pub(super) headroom: Bytes,
    /// The Elevated watermark.
    pub(super) elevated: Bytes,
    /// The hysteresis above it.
    pub(super) hysteresis: Bytes,
    /// Reserved for returning workers.
    pub(super) reserved: Bytes,
}

impl GrowthRoom {
    /// Returns the bytes permitted by both the budget and the headroom.
    pub(super) fn bytes(&self) -> Bytes {
        self.by_headroom()
            .min(self.free)
            .saturating_sub(self.reserved)
    }

    /// Returns the headroom above the watermark plus hysteresis.
    pub(super) fn by_headroom(&self) -> Bytes {
        self.headroom
            .saturating_sub(self.elevated.saturating_add(self.hysteresis))
    }

    /// Returns the condition that a step of `step` bytes waits for.
    pub(super) fn lacks(&self, step: Bytes) -> GrowthWait {
        let needs = self.reserved.saturating_add(step);
        if self.free < needs {
            return GrowthWait::Budget {
                needs: step,
                free: self.free,
                reserved: self.reserved,
            };
        }
        GrowthWait::Headroom {
            needs: needs
                .saturating_add(self.elevated)
                .saturating_add(self.hysteresis),
            has: self.headroom,
            elevated: self.elevated,
            hysteresis: self.hysteresis,
            reserved: self.reserved,
            step,
        }
    }
}

/// A plan to grow into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EngineStep {
    /// The plan.
    pub(super) plan: EnginePlan,
    /// Bytes that it takes, and the cost of not having them.
    pub(super) gain: Offer,
    /// Reason for the step.
    pub(super) reason: PlanReason,
}

/// Returns the engine's next step within `room`; `Ok(None)` with the full plan.
///
/// # Errors
/// The condition that the next step waits for.
fn engine_step(state: &State, room: GrowthRoom) -> Result<Option<EngineStep>, GrowthWait> {
    let engine = &state.engine;
    let (shape, limits, goal) = may_grow(state)?;
    let full = engine.full_plan().ok_or(GrowthWait::NotLoaded)?;
    if *goal == full {
        return Ok(None);
    }
    let (now_bytes, full_bytes) = (shape.plan_bytes(goal), shape.plan_bytes(&full));
    let held = state.engine_held();
    let gain = |source, bytes, price| Offer::whole(source, Class::LlmElastic, bytes, price);
    // During a request the chunk keeps its size.
    let is_idle = engine.is_idle();
    let limits = if is_idle {
        limits
    } else {
        limits.at_chunk(goal.prefill_chunk)
    };
    if full_bytes <= now_bytes && (is_idle || goal.prefill_chunk == full.prefill_chunk) {
        // The layers are smaller than the ring: all resident takes no more memory than some streamed.
        return Ok(Some(EngineStep {
            plan: full,
            gain: gain(Source::Layers, Bytes::new(1), 0),
            reason: PlanReason::FullForNothing {
                now: PlanSize::of(Some(shape), goal),
            },
        }));
    }
    let mut target = now_bytes.saturating_add(room.bytes());
    if goal.prefill_chunk > full.prefill_chunk {
        // An oversized chunk that cannot shrink yet is not added to the full plan: the target is at most the full plan
        // with the present KV type, which shrinks only with the full plan.
        let most = EnginePlan {
            kv_type: full.kv_type.max(goal.kv_type),
            ..full.clone()
        };
        target = target.min(shape.plan_bytes(&most).max(now_bytes));
    }
    // If everything fits, nothing is streamed and larger chunks are useless. During a request the limits permit no
    // larger one.
    if target < full_bytes
        && let Some(plan) = shape.rechunked(goal, target, &limits)
    {
        // Only memory taken from others counts; memory taken from layers is already part of the choice.
        let bytes = shape.plan_bytes(&plan);
        let taken = bytes.saturating_sub(now_bytes).max(Bytes::new(1));
        let reason = PlanReason::Chunk {
            tokens: plan.prefill_chunk,
            before: goal.prefill_chunk,
            streamed: shape.missing(&goal.resident).bytes,
            change: PlanChange::of(Some(shape), goal, &plan),
        };
        return Ok(Some(EngineStep {
            plan,
            gain: gain(Source::PrefillChunk, taken, 0),
            reason,
        }));
    }
    // Skips planning if the room is too small for any step: this runs for every event.
    let kv_least = state.params.shed.minimum_reclaim;
    let missing = full_bytes.saturating_sub(now_bytes);
    let layers_first = limits.mode != ResidencyMode::MaxContext;
    let layer = shape
        .least_layer_without(&goal.resident)
        .filter(|_| layers_first);
    let least = layer.unwrap_or(kv_least).min(missing);
    if room.bytes() < least {
        return Err(room.lacks(least));
    }
    // Restores the most valuable parts first, without giving anything up.
    let kv = engine.kv_contents(state.now);
    let plan = shape.grown(goal, target, &limits, &kv);
    let bytes = shape.plan_bytes(&plan);
    let gained = bytes.saturating_sub(now_bytes);
    let kv_least = kv_least.min(missing);
    let only_kv = plan.resident == goal.resident && plan != full;
    if gained == Bytes::ZERO || (only_kv && gained < kv_least) {
        return Err(room.lacks(if only_kv { kv_least } else { least }));
    }
    if bytes > held.saturating_add(room.free.saturating_sub(room.reserved)) {
        return Err(room.lacks(bytes.saturating_sub(held)));
    }
    let price = Price::new(shape, &limits).given_up(&plan, goal, &kv);
    let reason = PlanReason::Regrowth {
        gains: gained,
        free: room.free,
        above: room.by_headroom(),
        change: PlanChange::of(Some(shape), goal, &plan),
    };
    Ok(Some(EngineStep {
        plan,
        gain: gain(Source::Layers, gained, price),
        reason,
    }))
}

/// The next part to restore, and the engine's step if it belongs to the engine.
pub(super) type NextGrowth = (Source, Option<EngineStep>);

/// Returns the most valuable step over all holders; `None` if nothing is missing.
///
/// # Errors
/// The condition that it waits for.
pub(super) fn next(state: &State) -> Result<Option<NextGrowth>, GrowthWait> {
    if let Some(wait) = waits(state) {
        return Err(wait);
    }
    let room = room(state).ok_or(GrowthWait::Sample)?;
    let engine = engine_step(state, room);
    let waits = engine.as_ref().err().copied();
    let step = engine.ok().flatten();
    let workers = state.worker_returns(room.by_headroom());
    let dwell = state.dwell.left_for_workers(state.now);
    let dwell = dwell.filter(|_| !workers.is_empty());
    let mut gains = if dwell.is_some() { Vec::new() } else { workers };
    gains.extend(step.as_ref().map(|step| step.gain.clone()));
    // The reverse of shedding: the most expensive candidate is restored first.
    let dearest = gains.into_iter().max_by(Offer::by_price_of_a_byte);
    let Some(gain) = dearest else {
        let waits = waits.or(dwell.map(|left| GrowthWait::Dwell { left }));
        return waits.map_or(Ok(None), Err);
    };
    Ok(Some((gain.source, step)))
}

/// Whether the engine can be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// With this plan, beside the bytes reserved for workers.
    Fits { plan: EnginePlan, kept: Bytes },
    /// Its floor does not fit. `missing` is the amount to reclaim from others, if that is sufficient.
    Lacks {
        error: FloorError,
        missing: Option<Bytes>,
        kept: Bytes,
        headroom: Bytes,
    },
}

/// Returns the plan of a load, or the shortage; `None` if no load is pending, or without a sample.
///
/// It is loaded once its floor fits beside the memory reserved for workers, and before the workers that start after it.
pub(super) fn load(state: &State) -> Option<Load> {
    let workers_are_up = first_are_up(&state.workers, state.now) && state.taken_over_are_measured();
    if state.draining || !workers_are_up || !state.engine.waits_to_load(state.now) {
        return None;
    }
    // Without a sample, assume no free memory.
    let headroom = state.pressure.headroom()?;
    let (shape, limits) = (state.engine.shape()?, state.engine.limits()?);
    let kept = state.returning_or_waiting_workers();
    let on_the_book = state.ledger.free().saturating_sub(kept);
    // Leaves the same margin as growth, so that the loaded plan also fits at regrowth.
    let pressure = &state.params.pressure;
    let measured =
        headroom.saturating_sub(pressure.elevated_below.saturating_add(pressure.hysteresis));
    Some(match shape.plan(on_the_book.min(measured), &limits) {
        Ok(plan) => Load::Fits { plan, kept },
        Err(error) => {
            let others_have_it =
                error.floor <= measured && error.floor > on_the_book && !state.a_request_waits();
            let missing = others_have_it.then(|| error.floor.saturating_sub(on_the_book));
            Load::Lacks {
                error,
                missing,
                kept,
                headroom,
            }
        }
    })
}

/// Returns the condition that blocks all growth.
fn waits(state: &State) -> Option<GrowthWait> {
    let level = state.pressure.level();
    if state.draining {
        Some(GrowthWait::Draining)
    } else if level != PressureLevel::Normal {
        let left = state.pressure.dwell_left(state.now);
        Some(GrowthWait::Pressure { level, left })
    } else if let Some(left) = state.dwell.left(state.now) {
        Some(GrowthWait::Dwell { left })
    } else if state.a_request_waits() {
        let waiting = state.queue.len();
        Some(GrowthWait::Requests { waiting })
    } else if room(state).is_none() {
        Some(GrowthWait::Sample)
    } else {
        None
    }
}

/// Returns the memory for growth, if the last sample is newer than the last change.
pub(super) fn room(state: &State) -> Option<GrowthRoom> {
    let sampled_at = state.pressure.sampled_at()?;
    let room = GrowthRoom {
        free: state.ledger.free(),
        headroom: state
            .pressure
            .headroom()?
            .saturating_sub(state.pressure.promised()),
        elevated: state.params.pressure.elevated_below,
        hysteresis: state.params.pressure.hysteresis,
        reserved: state.returning_or_waiting_workers(),
    };
    let fresh = state.now.saturating_since(sampled_at) <= state.params.pressure.sample_age_max;
    (fresh && sampled_at > state.changed_at).then_some(room)
}

/// Returns the engine's shape, limits and goal, or the reason why it cannot grow now.
fn may_grow(state: &State) -> Result<(&ModelShape, PlanLimits, &EnginePlan), GrowthWait> {
    let engine = &state.engine;
    let (Some(_), Some(shape), Some(limits), Some(goal)) =
        (engine.lease, engine.shape(), engine.limits(), engine.goal())
    else {
        return Err(GrowthWait::NotLoaded);
    };
    if !engine.plans.pending.is_empty() {
        return Err(GrowthWait::Changing);
    }
    if let Some(until) = engine.blocked.growth.filter(|until| state.now < *until) {
        let left = until.saturating_since(state.now);
        return Err(GrowthWait::Settling { left });
    }
    Ok((shape, limits, goal))
}

/// Returns the condition that the engine's growth waits for; `None` with the full plan, or during a change.
pub(super) fn engine_waits(state: &State) -> Option<GrowthWait> {
    let changes = !state.engine.plans.pending.is_empty();
    let is_full = state.engine.full_plan().as_ref() == state.engine.goal();
    if !state.engine.is_ready() || changes || is_full {
        return None;
    }
    if let Some(wait) = waits(state) {
        return Some(wait);
    }
    let room = room(state)?;
    engine_step(state, room).err()
}

/// Whether `more` bytes are available at once, by the ledger and the last sample, with no request waiting.
pub(super) fn has_room(state: &State, more: Bytes) -> bool {
    state.pressure.level() == PressureLevel::Normal
        && state.queue.is_empty()
        && state.engine.plans.pending.is_empty()
        && more <= room(state).unwrap_or_default().bytes()
}

/// Returns the plan with the KV capacity that a request needs or prefers.
///
/// If `is_running`, the needed capacity, and no more, is taken from free memory regardless of the dwell: layers are
/// restored before untouched capacity. Otherwise it is taken from layers, at any level, since no other holder is
/// affected; the capacity then uses all memory of the first layer given up, so that the next block does not cost
/// another layer.
pub(super) fn capacity_plan(
    state: &State,
    needed: Tokens,
    wanted: Tokens,
    is_running: bool,
) -> Result<EnginePlan, GrowthWait> {
    if state.draining {
        return Err(GrowthWait::Draining);
    }
    let level = state.pressure.level();
    if level == PressureLevel::Critical && !is_running {
        let left = state.pressure.dwell_left(state.now);
        return Err(GrowthWait::Pressure { level, left });
    }
    let (shape, limits, goal) = may_grow(state)?;
    let room = room(state).unwrap_or_default();
    let waits = waits(state);
    let more = match waits {
        None => room.bytes(),
        Some(GrowthWait::Dwell { .. }) if is_running => room.bytes(),
        Some(_) => Bytes::ZERO,
    };
    let limits = limits.at_chunk(goal.prefill_chunk);
    let now = shape.plan_bytes(goal);
    let with = |wanted, more| {
        shape.with_capacity(goal, (needed, wanted), now.saturating_add(more), &limits)
    };
    let plan = if is_running {
        let beside = with(needed, more).filter(|plan| plan.resident == goal.resident);
        beside.or_else(|| with(wanted, Bytes::ZERO))
    } else {
        with(wanted, more)
    };
    plan.ok_or_else(|| {
        let tokens = needed.max(wanted).get();
        let tokens = Tokens::new(tokens.saturating_sub(goal.kv_capacity.get()));
        let step = shape.kv.capacity_bytes(tokens, goal.kv_type);
        waits.unwrap_or_else(|| room.lacks(step))
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        params::{EngineParams, Params, Scope},
        pressure::{MemoryReading, Sample},
    };
    use cotenant_units::Timestamp;

    fn state() -> State {
        let mut params = Params::for_budget(Bytes::from_gib(1), Bytes::ZERO, Scope::Machine);
        params.engine = Some(EngineParams::default());
        State::new(params).unwrap()
    }

    fn see(state: &mut State, millis: u64) {
        let available = Bytes::from_gib(1);
        let memory = MemoryReading {
            mem_total: available,
            mem_available: available,
            ..MemoryReading::default()
        };
        let taken_at = Timestamp::from_millis(millis);
        state.now = taken_at;
        let sample = Sample {
            memory,
            taken_at,
            ..Sample::default()
        };
        assert_eq!(state.pressure.observe(&sample, available), None);
    }

    #[test]
    fn growth_says_what_it_waits_for_from_the_state_alone() {
        let mut state = state();
        assert_eq!(
            next(&state),
            Err(GrowthWait::Sample),
            "what there is, is not known"
        );
        see(&mut state, 1);
        assert_eq!(next(&state), Err(GrowthWait::NotLoaded));
        state.dwell.begin(state.now);
        assert!(matches!(next(&state), Err(GrowthWait::Dwell { .. })));
        state.draining = true;
        assert_eq!(next(&state), Err(GrowthWait::Draining));
    }

    #[test]
    fn a_level_that_only_dwells_says_when_that_ends() {
        let at = |left| GrowthWait::Pressure {
            level: PressureLevel::Elevated,
            left,
        };
        let left = Duration::from_millis(1500);
        assert_eq!(at(None).to_string(), "pressure is Elevated");
        assert_eq!(
            at(Some(left)).to_string(),
            "pressure stays Elevated until its dwell ends in 1.5 s"
        );
        assert_eq!(at(Some(left)).retry_after(), Some(left));
        let of_before: GrowthWait =
            serde_json::from_str("{\"wait\": \"pressure\", \"level\": \"elevated\"}").unwrap();
        assert_eq!(of_before, at(None));
    }
}
