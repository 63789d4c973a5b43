//! Growth: what comes back next, and what it waits for, as functions of the state that change nothing.
//!
//! It is the reverse of shedding, by the same costs: of everything that was given up and would fit, that comes back first
//! whose loss costs most for each byte, weighed as a shed weighs it. Nothing grows before the [dwell](super::dwell) after
//! the last shed is over, while a request waits that could be served, beyond what the budget and the last sample leave,
//! or into the space of a stopped worker that is to come back. What workers come back to is in
//! `candidates`.
//!
//! Growth leaves the headroom at the Elevated watermark plus the hysteresis: with less than that the level would not
//! return to Normal, and with that much the engine could have been loaded. So what could be loaded can grow back.
//! Layers come first and KV capacity last, because capacity that no token has touched is worth nothing yet; in the mode
//! `max-context` the configured order stands. A request that needs more capacity than there is gets it from layers.

use super::{
    growth_wait::GrowthWait,
    lease::Class,
    params::ResidencyMode,
    pressure::PressureLevel,
    reason::{PlanChange, PlanReason},
    residency::{EnginePlan, FloorError, ModelShape, PlanLimits},
    shedding::{Candidate, Source},
    state::State,
};
use cotenant_units::{Bytes, Tokens};

/// Memory that growth may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrowthRoom {
    /// Free of the budget.
    pub free: Bytes,
    /// Headroom of a sample that is newer than the last change, without what the engine's lease held then and it did not use yet.
    pub headroom: Bytes,
    /// The Elevated watermark.
    pub elevated: Bytes,
    /// The hysteresis above it.
    pub hysteresis: Bytes,
    /// Reserved for workers that come back.
    pub reserved: Bytes,
}

impl GrowthRoom {
    /// What may be used now, by the budget and by the headroom.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.by_headroom()
            .min(self.free)
            .saturating_sub(self.reserved)
    }

    /// What the headroom leaves above the watermark and its hysteresis.
    #[must_use]
    pub fn by_headroom(&self) -> Bytes {
        self.headroom
            .saturating_sub(self.elevated.saturating_add(self.hysteresis))
    }

    /// Why a step of so many bytes has to wait.
    #[must_use]
    pub fn lacks(&self, step: Bytes) -> GrowthWait {
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

/// What a step of the engine's growth is decided by.
#[derive(Clone, Debug)]
pub struct EngineGrowth<'a> {
    /// The model.
    pub shape: &'a ModelShape,
    /// The plan that the engine was asked for last.
    pub goal: &'a EnginePlan,
    /// The plan when memory is plentiful.
    pub full: EnginePlan,
    /// Limits of every plan.
    pub limits: PlanLimits,
    /// Whether no request runs, so that the chunk may change.
    pub idle: bool,
    /// Tokens that the last answer has left in the KV cache.
    pub kept: Tokens,
    /// What the engine's lease holds.
    pub held: Bytes,
    /// The least step that only adds KV capacity.
    pub kv_step_min: Bytes,
    /// What may be used.
    pub room: GrowthRoom,
}

/// A plan to grow into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineStep {
    /// The plan.
    pub plan: EnginePlan,
    /// What the lease has to hold for it.
    pub bytes: Bytes,
    /// What it takes, and what being without it costs.
    pub gain: Candidate,
    /// What it is for.
    pub kind: StepKind,
}

/// What a step of growth is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// The full plan takes no more than the present one.
    FullForNothing,
    /// A larger prefill chunk, which may take the place of layers.
    Chunk,
    /// Layers and KV capacity that were given up.
    Regrowth,
}

impl EngineGrowth<'_> {
    /// The next step, or what it waits for; `Ok(None)` for an engine in its full plan.
    ///
    /// # Errors
    /// What is missing for the next step.
    pub fn step(&self) -> Result<Option<EngineStep>, GrowthWait> {
        let (shape, goal, full) = (self.shape, self.goal, &self.full);
        let (now_bytes, full_bytes) = (shape.plan_bytes(goal), shape.plan_bytes(full));
        if goal == full {
            return Ok(None);
        }
        // While a chunk is under way it keeps its size, whatever else changes.
        let limits = if self.idle {
            self.limits
        } else {
            self.limits.at_chunk(goal.prefill_chunk)
        };
        let same_chunk = self.idle || goal.prefill_chunk == full.prefill_chunk;
        if full_bytes <= now_bytes && same_chunk {
            // The ring of a model whose layers are smaller than it: all resident takes no more than some streamed.
            return Ok(Some(EngineStep {
                plan: full.clone(),
                bytes: self.held,
                gain: Candidate::whole(Source::Layers, Class::LlmElastic, Bytes::new(1), 0),
                kind: StepKind::FullForNothing,
            }));
        }
        let target = self.target(now_bytes);
        // Where everything fits nothing is streamed any more, and larger chunks are of no use. And while a chunk is under
        // way the limits leave none that is larger.
        if target < full_bytes
            && let Some(plan) = shape.rechunked(goal, target, &limits)
        {
            return Ok(Some(self.chunk_step(plan)));
        }
        // No plan is computed for what is too little for any: this is looked at with every event.
        let missing = full_bytes.saturating_sub(now_bytes);
        let least = self.least_step(missing);
        if self.room.bytes() < least {
            return Err(self.room.lacks(least));
        }
        // What is worth most comes back first, and nothing is given up for it.
        let plan = shape.grown(goal, target, &limits);
        let bytes = shape.plan_bytes(&plan);
        let gained = bytes.saturating_sub(now_bytes);
        let kv_least = self.kv_step_min.min(missing);
        let only_kv = plan.resident == goal.resident && plan != *full;
        if gained == Bytes::ZERO || (only_kv && gained < kv_least) {
            return Err(self.room.lacks(if only_kv { kv_least } else { least }));
        }
        if bytes
            > self
                .held
                .saturating_add(self.room.free.saturating_sub(self.room.reserved))
        {
            return Err(self.room.lacks(bytes.saturating_sub(self.held)));
        }
        let gain = Candidate::whole(
            Source::Layers,
            Class::LlmElastic,
            gained,
            self.cost_of(&plan, gained, &limits),
        );
        Ok(Some(EngineStep {
            plan,
            bytes,
            gain,
            kind: StepKind::Regrowth,
        }))
    }

    /// What the engine may hold after the step.
    fn target(&self, now_bytes: Bytes) -> Bytes {
        let target = now_bytes.saturating_add(self.room.bytes());
        if self.goal.prefill_chunk <= self.full.prefill_chunk {
            return target;
        }
        // A chunk that cannot become smaller yet does not come on top of all the rest: that with KV as it is kept now, for
        // it becomes smaller with the full plan alone.
        let most = EnginePlan {
            kv_type: self.full.kv_type.max(self.goal.kv_type),
            ..self.full.clone()
        };
        target.min(self.shape.plan_bytes(&most).max(now_bytes))
    }

    /// The least that a step takes: one layer while one is missing, a worthwhile number of KV blocks otherwise.
    fn least_step(&self, missing: Bytes) -> Bytes {
        let streamed = self.shape.layers.iter().zip(0u32..);
        let streamed = streamed.filter(|(_, index)| !self.goal.resident.contains(index));
        let layer = streamed.map(|(layer, _)| layer.resident_bytes).min();
        // The last layer makes the staging ring superfluous.
        let all_layers = self
            .shape
            .bytes_without(&self.goal.resident)
            .saturating_sub(self.shape.ring_bytes);
        let least = match layer {
            Some(layer) if self.limits.mode != ResidencyMode::MaxContext => layer.min(all_layers),
            Some(_) | None => self.kv_step_min,
        };
        least.min(missing)
    }

    /// A larger prefill chunk: what it takes from others counts, what it takes from layers it was weighed against.
    fn chunk_step(&self, plan: EnginePlan) -> EngineStep {
        let (before, bytes) = (
            self.shape.plan_bytes(self.goal),
            self.shape.plan_bytes(&plan),
        );
        let taken = bytes.saturating_sub(before).max(Bytes::new(1));
        EngineStep {
            plan,
            bytes: bytes.max(self.held),
            gain: Candidate::whole(Source::PrefillChunk, Class::LlmElastic, taken, 0),
            kind: StepKind::Chunk,
        }
    }

    /// What being without the step costs, µs. Capacity that no token has touched yet costs nothing, as in a shed.
    fn cost_of(&self, plan: &EnginePlan, gained: Bytes, limits: &PlanLimits) -> u64 {
        let (shape, goal) = (self.shape, self.goal);
        let worth = shape.worth(limits);
        let kept = self.kept.min(goal.kv_capacity);
        let context = if limits.mode == ResidencyMode::MaxContext {
            worth.context_us(plan.kv_capacity, goal.kv_capacity, kept)
        } else {
            0
        };
        let precision = worth.precision_us(plan.kv_capacity, kept, plan.kv_type, goal.kv_type);
        let kv = shape.kv.capacity_bytes(plan.kv_capacity, plan.kv_type);
        let kv_now = shape.kv.capacity_bytes(goal.kv_capacity, goal.kv_type);
        let layers = gained.saturating_sub(kv.saturating_sub(kv_now));
        let streaming = worth
            .streaming_us(layers)
            .saturating_add(worth.speed().reading_us(layers));
        context.saturating_add(precision).saturating_add(streaming)
    }
}

/// What comes back next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NextGrowth {
    /// Of the engine.
    Engine(Box<EngineStep>),
    /// A worker that was stopped.
    Start { worker: String },
    /// A larger variant of a worker.
    Variant { worker: String, variant: String },
    /// The steady size of a worker that came down when it was notified.
    Steady { worker: String },
}

/// The one step that is worth most, of all holders; `None` where nothing is missing.
///
/// # Errors
/// What it waits for.
pub(super) fn next(state: &State) -> Result<Option<NextGrowth>, GrowthWait> {
    if let Some(wait) = waits(state) {
        return Err(wait);
    }
    let room = room(state).ok_or(GrowthWait::Sample)?;
    let engine = engine_view(state, room).and_then(|growth| growth.step());
    let waits = engine.as_ref().err().copied();
    let step = engine.ok().flatten();
    let workers = state.worker_returns(room.by_headroom());
    let dwell = state.dwell.left_for_workers(state.now);
    let dwell = dwell.filter(|_| !workers.is_empty());
    let mut gains = if dwell.is_some() { Vec::new() } else { workers };
    gains.extend(step.as_ref().map(|step| step.gain.clone()));
    // The reverse of shedding: what would be given up last comes back first.
    let dearest = gains.into_iter().max_by(Candidate::by_cost_of_a_byte);
    let Some(gain) = dearest else {
        let waits = waits.or(dwell.map(|left| GrowthWait::Dwell { left }));
        return waits.map_or(Ok(None), Err);
    };
    Ok(match gain.source {
        Source::WorkerStop { worker } => Some(NextGrowth::Start { worker }),
        Source::WorkerVariant { worker, variant } => Some(NextGrowth::Variant { worker, variant }),
        Source::WorkerNotified { worker } => Some(NextGrowth::Steady { worker }),
        _ => step.map(|step| NextGrowth::Engine(Box::new(step))),
    })
}

/// Whether the engine can be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// With this plan, beside what is kept for workers.
    Fits { plan: EnginePlan, kept: Bytes },
    /// Its floor does not fit. `missing` is what other holders would have to give, where that is all that is missing.
    Lacks {
        error: FloorError,
        missing: Option<Bytes>,
        kept: Bytes,
        headroom: Bytes,
    },
}

/// The load of the engine; `None` while nothing is to be loaded, or it is not known what there is.
///
/// It is loaded as soon as its floor fits beside what workers come back to, and before those that come after it.
pub(super) fn load(state: &State) -> Option<Load> {
    let workers_are_up = state.workers.first_are_up(state.now) && state.taken_over_are_measured();
    if state.draining || !workers_are_up || !state.engine.waits_to_load(state.now) {
        return None;
    }
    // Unknown is not plenty: without a sample it is not known what there is.
    let headroom = state.pressure.headroom()?;
    let (shape, limits) = (state.engine.shape()?, state.engine.limits()?);
    let kept = state.returning_or_waiting_workers();
    let on_the_book = state.ledger.free().saturating_sub(kept);
    // As much as growth leaves, so that what is loaded can grow back after a shed.
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

/// The cause for which all growth waits.
fn waits(state: &State) -> Option<GrowthWait> {
    let level = state.pressure.level();
    if state.draining {
        Some(GrowthWait::Draining)
    } else if level != PressureLevel::Normal {
        Some(GrowthWait::Pressure { level })
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

/// Memory that growth may use, if the last sample is newer than the last change.
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

/// The inputs of the engine's growth, or why nothing of it can grow now.
fn engine_view(state: &State, room: GrowthRoom) -> Result<EngineGrowth<'_>, GrowthWait> {
    let full = state.engine.full_plan();
    let (Some(id), Some(shape), Some(limits), Some(goal), Some(full)) = (
        state.engine.lease,
        state.engine.shape(),
        state.engine.limits(),
        state.engine.goal(),
        full,
    ) else {
        return Err(GrowthWait::NotLoaded);
    };
    if !state.engine.plans.pending.is_empty() {
        return Err(GrowthWait::Changing);
    }
    if let Some(until) = state
        .engine
        .blocked
        .growth
        .filter(|until| state.now < *until)
    {
        let left = until.saturating_since(state.now);
        return Err(GrowthWait::Settling { left });
    }
    Ok(EngineGrowth {
        shape,
        goal,
        full,
        limits,
        idle: state.engine.is_idle(),
        kept: state.engine.kv_kept(),
        held: state.ledger.held_by(id),
        kv_step_min: state.params.shed.minimum_reclaim,
        room,
    })
}

/// The cause for which the engine's growth waits; `None` while it has its full plan, or changes.
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
    let growth = match engine_view(state, room) {
        Ok(growth) => growth,
        Err(wait) => return Some(wait),
    };
    growth.step().err()
}

/// Whether so much more may be had at once: by the book, by the last sample, and with no request to come first.
pub(super) fn has_room(state: &State, more: Bytes) -> bool {
    state.pressure.level() == PressureLevel::Normal
        && state.queue.is_empty()
        && state.engine.plans.pending.is_empty()
        && more <= room(state).unwrap_or_default().bytes()
}

/// The plan that gives a request the KV capacity that it needs, or would like.
///
/// What one needs that `is_running` comes from what is free although the dwell is not over, and no more than that, for layers
/// come back before capacity that no token has touched. Else it comes from layers, at any level, since that takes nothing
/// from anybody else: all that the first of them leaves, so that the next is not given for the next block.
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
        return Err(GrowthWait::Pressure { level });
    }
    let growth = engine_view(state, room(state).unwrap_or_default())?;
    let waits = waits(state);
    let more = match waits {
        None => growth.room.bytes(),
        Some(GrowthWait::Dwell { .. }) if is_running => growth.room.bytes(),
        Some(_) => Bytes::ZERO,
    };
    let limits = growth.limits.at_chunk(growth.goal.prefill_chunk);
    let now = growth.shape.plan_bytes(growth.goal);
    let with = |wanted, more| {
        growth.shape.with_capacity(
            growth.goal,
            (needed, wanted),
            now.saturating_add(more),
            &limits,
        )
    };
    let plan = if is_running {
        let beside = with(needed, more).filter(|plan| plan.resident == growth.goal.resident);
        beside.or_else(|| with(wanted, Bytes::ZERO))
    } else {
        with(wanted, more)
    };
    plan.ok_or_else(|| {
        let tokens = needed
            .max(wanted)
            .get()
            .saturating_sub(growth.goal.kv_capacity.get());
        let step = growth
            .shape
            .kv
            .capacity_bytes(Tokens::new(tokens), growth.goal.kv_type);
        waits.unwrap_or_else(|| growth.room.lacks(step))
    })
}

/// Why the plan of a step is asked for.
pub(super) fn reason_of(state: &State, step: &EngineStep) -> PlanReason {
    let goal = state.engine.goal().unwrap_or(&step.plan);
    let change = PlanChange::of(state.engine.shape(), goal, &step.plan);
    match step.kind {
        StepKind::FullForNothing => PlanReason::FullForNothing { now: change.from },
        StepKind::Chunk => PlanReason::Chunk {
            tokens: step.plan.prefill_chunk,
            before: goal.prefill_chunk,
            streamed: state
                .engine
                .shape()
                .map_or(Bytes::ZERO, |shape| shape.bytes_without(&goal.resident)),
            change,
        },
        StepKind::Regrowth => PlanReason::Regrowth {
            gains: step.gain.bytes(),
            free: state.ledger.free(),
            above: room(state).unwrap_or_default().by_headroom(),
            change,
        },
    }
}

#[cfg(test)]
mod tests {
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
}
