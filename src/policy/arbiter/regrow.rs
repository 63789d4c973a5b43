//! Load of the engine, and what grows back: the reverse of shedding, by the same costs.
//!
//! The engine is loaded as soon as its floor fits beside what workers come back to, and before those that come after
//! it. Of everything that was given up and would fit, that comes back first whose loss costs most for each byte,
//! weighed as a shed weighs it. Nothing grows before the [dwell](crate::policy::dwell) after the last shed is over,
//! while a request waits that could be served, beyond what the budget and the last sample leave, or into the space of a
//! stopped worker that is to come back. The steps are pure functions: of the engine in
//! [`growth`](crate::policy::growth), of workers in [`candidates`](crate::policy::candidates).

use super::core::Arbiter;
use crate::{
    policy::{
        decision::{EngineDecision, GrowthDecision},
        denial::Denial,
        engine_control::{PlanKind, bytes_in},
        event::Done,
        growth::{EngineGrowth, EngineStep, GrowthRoom, StepKind},
        growth_wait::GrowthWait,
        lease::{Class, LeaseKind, Ticket},
        lease_table::Lease,
        params::ENGINE_TENANT,
        pressure::PressureLevel,
        reason::{PlanReason, PlanSize, ReclaimReason},
        residency::EnginePlan,
        shedding::{Candidate, Source},
    },
    units::{Bytes, Tokens},
};

impl Arbiter {
    /// Grows back what was shed, one step at a time.
    pub(super) fn grow_back(&mut self) {
        if self.state.dwell.left(self.state.now).is_none() {
            let _ = self.grow_one_step();
        }
    }

    /// An operator ends the dwell and the back-off. A regrow that can do nothing is refused with what it waits for.
    pub(super) fn take_operator_regrow(&mut self, ticket: Ticket) {
        if let Some(denial) = self.state.pressure_denial("llm", Class::LlmElastic, Bytes::ZERO) {
            self.deny(ticket, denial);
            return;
        }
        self.state.dwell.forget();
        self.state.engine.blocked.growth = None;
        match self.grow_one_step() {
            Ok(done) => self.done(ticket, done),
            Err(wait) => self.deny(ticket, Denial::NotGrowing { wait }),
        }
    }

    /// A client's request needs more KV capacity, or would like it: from what may grow now, and what it needs from layers
    /// as well. Dwell, back-off and an operator's shed stay in force.
    pub(super) fn take_capacity_wanted(&mut self, needed: Tokens, wanted: Tokens) {
        let Some(present) = self.state.engine.goal().map(|plan| plan.kv_capacity) else {
            return;
        };
        let wanted = wanted.max(needed);
        if wanted <= present {
            return;
        }
        let grown = self.capacity_plan(needed, wanted).and_then(|plan| {
            let goal = self.state.engine.goal().unwrap_or(&plan);
            let change = self.change_to(goal, &plan);
            let bytes = self.state.engine.bytes_in(&plan);
            // It has not begun, so that nothing uses the capacity yet.
            self.state.engine.pin_capacity(needed.min(plan.kv_capacity), self.state.now);
            self.grow_engine(plan, bytes, PlanReason::Capacity { wanted, change })
        });
        if let Err(wait) = grown {
            self.decide(GrowthDecision::CapacityWithheld { wanted, present, wait });
        }
    }

    fn capacity_plan(&self, needed: Tokens, wanted: Tokens) -> Result<EnginePlan, GrowthWait> {
        if self.state.draining {
            return Err(GrowthWait::Draining);
        }
        let level = self.state.pressure.level();
        if level == PressureLevel::Critical {
            return Err(GrowthWait::Pressure { level });
        }
        let growth = self.engine_view(self.room().unwrap_or_default())?;
        let waits = self.growth_waits();
        let more = if waits.is_some() { Bytes::ZERO } else { growth.room.bytes() };
        let limits = growth.limits.at_chunk(growth.goal.prefill_chunk);
        let now = growth.shape.plan_bytes(growth.goal);
        let plan = growth.shape.with_capacity(growth.goal, (needed, wanted), now.saturating_add(more), &limits);
        plan.ok_or_else(|| {
            let tokens = needed.max(wanted).get().saturating_sub(growth.goal.kv_capacity.get());
            let step = growth.shape.kv.capacity_bytes(Tokens::new(tokens), growth.goal.kv_type);
            waits.unwrap_or_else(|| growth.room.lacks(step))
        })
    }

    /// The cause for which the engine's growth waits; `None` while it has its full plan, or changes.
    pub(super) fn engine_waits(&self) -> Option<GrowthWait> {
        let state = &self.state;
        let changes = !state.engine.plans.pending.is_empty();
        let is_full = state.engine.full_plan().as_ref() == state.engine.goal();
        if !state.engine.is_ready() || changes || is_full {
            return None;
        }
        if let Some(wait) = self.growth_waits() {
            return Some(wait);
        }
        let room = self.room()?;
        let growth = match self.engine_view(room) {
            Ok(growth) => growth,
            Err(wait) => return Some(wait),
        };
        growth.step().err()
    }

    /// The cause for which all growth waits.
    fn growth_waits(&self) -> Option<GrowthWait> {
        let state = &self.state;
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
        } else if self.room().is_none() {
            Some(GrowthWait::Sample)
        } else {
            None
        }
    }

    /// Lets the one step grow that is worth most, or says what it waits for.
    fn grow_one_step(&mut self) -> Result<Done, GrowthWait> {
        if let Some(wait) = self.growth_waits() {
            return Err(wait);
        }
        let room = self.room().ok_or(GrowthWait::Sample)?;
        let engine = self.engine_view(room).and_then(|growth| growth.step());
        let waits = engine.as_ref().err().copied();
        let step = engine.ok().flatten();
        let mut gains = self.state.worker_returns(room.by_headroom());
        gains.extend(step.as_ref().map(|step| step.gain.clone()));
        // The reverse of shedding: what would be given up last comes back first.
        let dearest = gains.into_iter().max_by(Candidate::by_cost_of_a_byte);
        match (dearest, waits) {
            (Some(gain), _) => {
                let grown = self.carry_out_growth(gain.source, step);
                if grown.is_ok() {
                    self.state.dwell.grown(self.state.now);
                }
                grown
            }
            (None, Some(wait)) => Err(wait),
            (None, None) => Ok(Done::FullSize),
        }
    }

    fn carry_out_growth(&mut self, source: Source, step: Option<EngineStep>) -> Result<Done, GrowthWait> {
        match (source, step) {
            (Source::WorkerStop { worker }, _) => {
                self.want_worker(&worker);
                self.serve_queue();
                Ok(Done::WorkerReturns { worker })
            }
            (Source::WorkerVariant { worker, variant }, _) => {
                self.queue_variant(&worker, variant.clone());
                self.serve_queue();
                Ok(Done::VariantReturns { worker, variant })
            }
            (Source::WorkerNotified { worker }, _) => self.restore_notified(&worker),
            (_, Some(step)) => {
                let reason = self.reason_of(&step);
                self.grow_engine(step.plan, step.bytes, reason)
            }
            (_, None) => Err(GrowthWait::NotLoaded),
        }
    }

    fn reason_of(&self, step: &EngineStep) -> PlanReason {
        let state = &self.state;
        let goal = state.engine.goal().unwrap_or(&step.plan);
        let change = self.change_to(goal, &step.plan);
        match step.kind {
            StepKind::FullForNothing => PlanReason::FullForNothing { now: change.from },
            StepKind::Chunk => PlanReason::Chunk {
                tokens: step.plan.prefill_chunk,
                before: goal.prefill_chunk,
                streamed: state.engine.shape().map_or(Bytes::ZERO, |shape| shape.bytes_without(&goal.resident)),
                change,
            },
            StepKind::Regrowth => PlanReason::Regrowth {
                gains: step.gain.bytes(),
                free: state.ledger.free(),
                above: self.room().unwrap_or_default().by_headroom(),
                change,
            },
        }
    }

    /// Books a plan that takes more, and asks for it.
    fn grow_engine(&mut self, plan: EnginePlan, bytes: Bytes, reason: PlanReason) -> Result<Done, GrowthWait> {
        let held = self.state.engine_held();
        let booked = self.state.engine.lease.is_some_and(|id| self.grow_lease(id, bytes.max(held)));
        if !booked {
            return Err(self.room().unwrap_or_default().lacks(bytes.saturating_sub(held)));
        }
        // KV that an operator wants in a smaller type, put into force with the next growth: that is given up too. So are
        // layers whose place a larger prefill chunk or KV capacity takes.
        let gives_up = |goal: &EnginePlan| plan.kv_type < goal.kv_type || !goal.resident.is_subset(&plan.resident);
        if self.state.engine.goal().is_some_and(gives_up) {
            self.state.dwell.begin(self.state.now);
        }
        self.ask_engine(plan, PlanKind::Regrow, Some(reason.clone()));
        Ok(Done::Grows(reason))
    }

    /// Whether so much more may be had at once: by the book, by the last sample, and with no request to come first.
    pub(super) fn has_room_to_grow(&self, more: Bytes) -> bool {
        let state = &self.state;
        state.pressure.level() == PressureLevel::Normal
            && state.queue.is_empty()
            && state.engine.plans.pending.is_empty()
            && more <= self.room().unwrap_or_default().bytes()
    }

    /// Memory that growth may use, if the last sample is newer than the last change.
    fn room(&self) -> Option<GrowthRoom> {
        let state = &self.state;
        let sampled_at = state.pressure.sampled_at()?;
        let room = GrowthRoom {
            free: state.ledger.free(),
            headroom: state.pressure.headroom()?,
            elevated: state.params.pressure.elevated_below,
            hysteresis: state.params.pressure.hysteresis,
            reserved: state.returning_or_waiting_workers(),
        };
        let fresh = state.now.saturating_since(sampled_at) <= state.params.pressure.sample_age_max;
        (fresh && sampled_at > state.changed_at).then_some(room)
    }

    /// The inputs of the engine's growth, or why nothing of it can grow now.
    fn engine_view(&self, room: GrowthRoom) -> Result<EngineGrowth<'_>, GrowthWait> {
        let state = &self.state;
        let full = state.engine.full_plan();
        let (Some(id), Some(shape), Some(limits), Some(goal), Some(full)) =
            (state.engine.lease, state.engine.shape(), state.engine.limits(), state.engine.goal(), full)
        else {
            return Err(GrowthWait::NotLoaded);
        };
        if !state.engine.plans.pending.is_empty() {
            return Err(GrowthWait::Changing);
        }
        if let Some(until) = state.engine.blocked.growth.filter(|until| state.now < *until) {
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
}

impl Arbiter {
    pub(super) fn load_engine_if_it_fits(&mut self) {
        let waiting = self.state.engine.waits_to_load(self.state.now);
        if !(self.state.draining || self.state.workers.first_are_up(self.state.now))
            || !self.state.taken_over_are_measured()
        {
            return;
        }
        // Unknown is not plenty: without a sample it is not known what there is.
        let (true, false, Some(headroom)) = (waiting, self.state.draining, self.state.pressure.headroom()) else {
            return;
        };
        let (Some(shape), Some(limits)) = (self.state.engine.shape(), self.state.engine.limits()) else {
            return;
        };
        let kept = self.state.returning_or_waiting_workers();
        let on_the_book = self.state.ledger.free().saturating_sub(kept);
        let elevated = self.state.params.pressure.elevated_below;
        // As much as growth leaves, so that what is loaded can grow back after a shed.
        let measured = headroom.saturating_sub(elevated.saturating_add(self.state.params.pressure.hysteresis));
        match shape.plan(on_the_book.min(measured), &limits) {
            Ok(plan) => self.load_engine(plan, kept),
            Err(error) => {
                let (floor, free) = (error.floor, self.state.ledger.free());
                if floor <= measured && floor > on_the_book && !self.state.a_request_waits() {
                    let missing = floor.saturating_sub(on_the_book);
                    let reason = ReclaimReason::EngineFloor { missing, floor, free };
                    self.reclaim_for(Class::LlmElastic, missing, reason);
                }
                let figures = [error.floor, error.available, free, kept, headroom];
                let watermark = elevated;
                let decision = EngineDecision::WaitsForMemory { error, free, kept, headroom, watermark };
                self.decide_once(WAITS, &figures, decision);
            }
        }
    }

    fn load_engine(&mut self, plan: EnginePlan, kept: Bytes) {
        let shape = self.state.engine.shape();
        let bytes = bytes_in(shape, &plan);
        let full = self.state.engine.full_plan().map_or(bytes, |full| bytes_in(shape, &full));
        let size = PlanSize::of(shape, &plan);
        let (least, generation) =
            (self.state.engine.floor_bytes().unwrap_or(bytes), self.state.leases.next_generation());
        let kind = (LeaseKind::Engine, Class::LlmElastic);
        let lease = Lease::of_ours(ENGINE_TENANT, kind, generation, (least, full), self.state.now);
        let id = self.state.leases.next_id();
        if !self.grant(id, bytes, lease) {
            return;
        }
        self.state.engine.load(id, self.state.now);
        self.said.remove(WAITS);
        self.decide(EngineDecision::Loading { plan: size, full, free: self.state.ledger.free(), kept });
        self.ask_engine(plan, PlanKind::Load, None);
    }
}

/// Subject of what is decided once.
const WAITS: &str = "the engine waits";
