//! Growth of the engine: the next step, or what it waits for, as a pure function.
//!
//! Growth leaves the headroom at the Elevated watermark plus the hysteresis: with less than that the level would not
//! return to Normal, and with that much the engine could have been loaded. So what could be loaded can grow back.
//! Layers come first and KV capacity last, because capacity that no token has touched is worth nothing yet; in the mode
//! `max-context` the configured order stands. A request that needs more capacity than there is gets it from layers.

use super::{
    growth_wait::GrowthWait,
    lease::Class,
    params::ResidencyMode,
    residency::{EnginePlan, ModelShape, PlanLimits},
    shedding::{Candidate, Cost, Source},
};
use crate::units::{Bytes, Tokens};

/// Memory that growth may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrowthRoom {
    /// Free of the budget.
    pub free: Bytes,
    /// Headroom of a sample that is newer than the last change.
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
        self.by_headroom().min(self.free).saturating_sub(self.reserved)
    }

    /// What the headroom leaves above the watermark and its hysteresis.
    #[must_use]
    pub fn by_headroom(&self) -> Bytes {
        self.headroom.saturating_sub(self.elevated.saturating_add(self.hysteresis))
    }

    /// Why a step of so many bytes has to wait.
    #[must_use]
    pub fn lacks(&self, step: Bytes) -> GrowthWait {
        let needs = self.reserved.saturating_add(step);
        if self.free < needs {
            return GrowthWait::Budget { needs: step, free: self.free, reserved: self.reserved };
        }
        GrowthWait::Headroom {
            needs: needs.saturating_add(self.elevated).saturating_add(self.hysteresis),
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
        let limits = if self.idle { self.limits } else { self.limits.at_chunk(goal.prefill_chunk) };
        let same_chunk = self.idle || goal.prefill_chunk == full.prefill_chunk;
        if full_bytes <= now_bytes && same_chunk {
            // The ring of a model whose layers are smaller than it: all resident takes no more than some streamed.
            return Ok(Some(EngineStep {
                plan: full.clone(),
                bytes: self.held,
                gain: Candidate::whole(Source::Layers, Class::LlmElastic, Bytes::new(1), Cost::default()),
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
        if bytes > self.held.saturating_add(self.room.free.saturating_sub(self.room.reserved)) {
            return Err(self.room.lacks(bytes.saturating_sub(self.held)));
        }
        let gain = Candidate::whole(Source::Layers, Class::LlmElastic, gained, self.cost_of(&plan, gained, &limits));
        Ok(Some(EngineStep { plan, bytes, gain, kind: StepKind::Regrowth }))
    }

    /// What the engine may hold after the step.
    fn target(&self, now_bytes: Bytes) -> Bytes {
        let target = now_bytes.saturating_add(self.room.bytes());
        if self.goal.prefill_chunk <= self.full.prefill_chunk {
            return target;
        }
        // A chunk that cannot become smaller yet does not come on top of all the rest: that with KV as it is kept now, for
        // it becomes smaller with the full plan alone.
        let most = EnginePlan { kv_type: self.full.kv_type.max(self.goal.kv_type), ..self.full.clone() };
        target.min(self.shape.plan_bytes(&most).max(now_bytes))
    }

    /// The least that a step takes: one layer while one is missing, a worthwhile number of KV blocks otherwise.
    fn least_step(&self, missing: Bytes) -> Bytes {
        let streamed = self.shape.layers.iter().zip(0u32..);
        let streamed = streamed.filter(|(_, index)| !self.goal.resident.contains(index));
        let layer = streamed.map(|(layer, _)| layer.resident_bytes).min();
        // The last layer makes the staging ring superfluous.
        let all_layers = self.shape.bytes_without(&self.goal.resident).saturating_sub(self.shape.ring_bytes);
        let least = match layer {
            Some(layer) if self.limits.mode != ResidencyMode::MaxContext => layer.min(all_layers),
            Some(_) | None => self.kv_step_min,
        };
        least.min(missing)
    }

    /// A larger prefill chunk: what it takes from others counts, what it takes from layers it was weighed against.
    fn chunk_step(&self, plan: EnginePlan) -> EngineStep {
        let (before, bytes) = (self.shape.plan_bytes(self.goal), self.shape.plan_bytes(&plan));
        let taken = bytes.saturating_sub(before).max(Bytes::new(1));
        EngineStep {
            plan,
            bytes: bytes.max(self.held),
            gain: Candidate::whole(Source::PrefillChunk, Class::LlmElastic, taken, Cost::default()),
            kind: StepKind::Chunk,
        }
    }

    /// What being without the step costs. Capacity that no token has touched yet costs nothing, as in a shed.
    fn cost_of(&self, plan: &EnginePlan, gained: Bytes, limits: &PlanLimits) -> Cost {
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
        Cost {
            now_us: context.saturating_add(precision).saturating_add(worth.streaming_us(layers)),
            undo_us: worth.speed().reading_us(layers),
            ..Cost::default()
        }
    }
}
