//! What grows back: the reverse of shedding, by the same costs.
//!
//! Of everything that was given up and would fit, that comes back first whose loss costs most for each byte, weighed as
//! a shed weighs it. Nothing grows before the [dwell](crate::policy::dwell) after the last shed is over, while a request waits that could be served, beyond what the budget and
//! the last sample leave, or into the space of a stopped worker that is to come back. The engine's own step is a pure
//! function in [`growth`](crate::policy::growth).

use std::cmp::Reverse;

use super::core::Arbiter;
use crate::{
    policy::{
        decision::GrowthDecision,
        denial::Denial,
        engine_control::PlanKind,
        event::Done,
        growth::{EngineGrowth, EngineStep, GrowthRoom, StepKind},
        growth_wait::GrowthWait,
        lease::{Class, Ticket},
        pressure::PressureLevel,
        reason::PlanReason,
        residency::EnginePlan,
        shedding::{Candidate, Cost, Source, micros},
        worker::Worker,
    },
    units::{Bytes, Tokens},
};

/// Something that could come back.
struct Growth {
    /// What it takes, and what being without it costs.
    gain: Candidate,
    step: Regrowth,
}

enum Regrowth {
    Worker { name: String },
    Variant { name: String, variant: String },
    Notified { name: String },
    Engine(EngineStep),
}

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
            self.state
                .engine
                .pin_capacity(needed.min(plan.kv_capacity), self.state.now);
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
        let more = if waits.is_some() {
            Bytes::ZERO
        } else {
            growth.room.bytes()
        };
        let limits = growth.limits.at_chunk(growth.goal.prefill_chunk);
        let now = growth.shape.plan_bytes(growth.goal);
        let plan = growth
            .shape
            .with_capacity(growth.goal, (needed, wanted), now.saturating_add(more), &limits);
        plan.ok_or_else(|| {
            let tokens = needed.max(wanted).get().saturating_sub(growth.goal.kv_capacity.get());
            let step = growth.shape.kv.capacity_bytes(Tokens::new(tokens), growth.goal.kv_type);
            waits.unwrap_or_else(|| growth.room.lacks(step))
        })
    }

    /// What the engine's growth waits for; `None` while it has its full plan, or changes.
    pub(super) fn engine_waits(&self) -> Option<GrowthWait> {
        let changes = !self.state.engine.plans.pending.is_empty();
        let is_full = self.state.engine.full_plan().as_ref() == self.state.engine.goal();
        if !self.state.engine.is_ready() || changes || is_full {
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

    /// What all growth waits for.
    fn growth_waits(&self) -> Option<GrowthWait> {
        let level = self.state.pressure.level();
        if self.state.draining {
            Some(GrowthWait::Draining)
        } else if level != PressureLevel::Normal {
            Some(GrowthWait::Pressure { level })
        } else if let Some(left) = self.state.dwell.left(self.state.now) {
            Some(GrowthWait::Dwell { left })
        } else if self.state.somebody_waits() {
            let waiting = self.state.queue.len();
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
        let by_headroom = room.by_headroom();
        let mut steps = self.worker_returns(by_headroom);
        steps.extend(self.variant_returns(by_headroom));
        steps.extend(self.notified_returns(by_headroom));
        let engine = self.engine_view(room).and_then(|growth| growth.step());
        let nothing = engine.as_ref().err().copied();
        steps.extend(engine.ok().flatten().map(|step| Growth {
            gain: step.gain.clone(),
            step: Regrowth::Engine(step),
        }));
        // The reverse of shedding: what would be given up last comes back first.
        let dearest = steps
            .into_iter()
            .max_by(|one, other| one.gain.by_cost_of_a_byte(&other.gain));
        match (dearest, nothing) {
            (Some(growth), _) => {
                let grown = self.carry_out_growth(growth.step);
                if grown.is_ok() {
                    self.state.dwell.grown(self.state.now);
                }
                grown
            }
            (None, Some(wait)) => Err(wait),
            (None, None) => Ok(Done::FullSize),
        }
    }

    fn carry_out_growth(&mut self, step: Regrowth) -> Result<Done, GrowthWait> {
        match step {
            Regrowth::Worker { name } => {
                self.want_worker(&name);
                self.serve_queue();
                Ok(Done::WorkerReturns { worker: name })
            }
            Regrowth::Variant { name, variant } => {
                self.queue_variant(&name, variant.clone());
                self.serve_queue();
                Ok(Done::VariantReturns { worker: name, variant })
            }
            Regrowth::Notified { name } => self.restore_notified(&name),
            Regrowth::Engine(step) => {
                let reason = self.reason_of(&step);
                self.grow_engine(step.plan, step.bytes, reason)
            }
        }
    }

    fn reason_of(&self, step: &EngineStep) -> PlanReason {
        let goal = self.state.engine.goal().unwrap_or(&step.plan);
        let change = self.change_to(goal, &step.plan);
        match step.kind {
            StepKind::FullForNothing => PlanReason::FullForNothing { now: change.from },
            StepKind::Chunk => PlanReason::Chunk {
                tokens: step.plan.prefill_chunk,
                before: goal.prefill_chunk,
                streamed: self
                    .state
                    .engine
                    .shape()
                    .map_or(Bytes::ZERO, |shape| shape.bytes_without(&goal.resident)),
                change,
            },
            StepKind::Regrowth => PlanReason::Regrowth {
                gains: step.gain.bytes(),
                free: self.state.ledger.free(),
                above: self.room().unwrap_or_default().by_headroom(),
                change,
            },
        }
    }

    /// Books a plan that takes more, and asks for it.
    fn grow_engine(&mut self, plan: EnginePlan, bytes: Bytes, reason: PlanReason) -> Result<Done, GrowthWait> {
        let held = self
            .state
            .engine
            .lease
            .map_or(Bytes::ZERO, |id| self.state.ledger.held_by(id));
        let booked = self
            .state
            .engine
            .lease
            .is_some_and(|id| self.grow_lease(id, bytes.max(held)));
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
        self.state.pressure.level() == PressureLevel::Normal
            && self.state.queue.is_empty()
            && self.state.engine.plans.pending.is_empty()
            && more <= self.room().unwrap_or_default().bytes()
    }

    /// What growth may use, if the last sample is newer than the last change.
    fn room(&self) -> Option<GrowthRoom> {
        let sampled_at = self.state.pressure.sampled_at()?;
        let room = GrowthRoom {
            free: self.state.ledger.free(),
            headroom: self.state.pressure.headroom()?,
            elevated: self.state.params.pressure.elevated_below,
            hysteresis: self.state.params.pressure.hysteresis,
            reserved: self.state.returning_or_waiting_workers(),
        };
        let fresh = self.state.now.saturating_since(sampled_at) <= self.state.params.pressure.sample_age_max;
        (fresh && sampled_at > self.state.changed_at).then_some(room)
    }

    /// Workers that were stopped to make room and fit again, with what it costs to be without them.
    fn worker_returns(&self, room: Bytes) -> Vec<Growth> {
        let stopped = self.state.workers.values();
        let stopped = stopped.filter(|worker| worker.was_shed());
        // Of two that are worth the same for their size, the more urgent one, and then the one that is started first.
        let mut stopped: Vec<_> = stopped.collect();
        stopped.sort_by_key(|worker| Reverse((worker.params.class, worker.params.start.start_order)));
        let fits = |peak: Bytes| peak <= room.min(self.state.ledger.free());
        stopped
            .into_iter()
            .map(|worker| (worker, self.state.worker_peak(&worker.params.name, None)))
            .filter(|(_, peak)| fits(*peak))
            .map(|(worker, peak)| {
                let worker = &worker.params;
                let name = worker.name.clone();
                let source = Source::WorkerStop { worker: name.clone() };
                let cost = Cost {
                    undo_us: micros(worker.start.reload),
                    ..Cost::default()
                };
                Growth {
                    gain: Candidate::whole(source, worker.class, peak, cost),
                    step: Regrowth::Worker { name },
                }
            })
            .collect()
    }

    fn variant_returns(&self, room: Bytes) -> Vec<Growth> {
        let returns = |worker: &Worker| {
            let variant = worker.run()?.before_shed.clone()?;
            if !worker.is_settled() {
                return None;
            }
            let (name, class) = (worker.params.name.clone(), worker.params.class);
            let more = self
                .state
                .worker_peak(&name, Some(&variant))
                .saturating_sub(self.state.worker_held(&name));
            let reload = micros(worker.params.start.reload);
            let cost = Cost {
                now_us: reload / 2,
                undo_us: reload,
                ..Cost::default()
            };
            let source = Source::WorkerVariant {
                worker: name.clone(),
                variant: variant.clone(),
            };
            (more <= self.room_beside(class, room)).then(|| Growth {
                gain: Candidate::whole(source, class, more, cost),
                step: Regrowth::Variant { name, variant },
            })
        };
        self.state.workers.values().filter_map(returns).collect()
    }

    fn notified_returns(&self, room: Bytes) -> Vec<Growth> {
        let returns = |worker: &Worker| {
            let class = worker.params.class;
            let more = self.state.notified_lacks(worker)?;
            let cost = Cost {
                now_us: micros(worker.params.start.reload) / 4,
                undo_us: self.state.engine.speed().reading_us(more),
                ..Cost::default()
            };
            let name = worker.params.name.clone();
            let source = Source::WorkerTold { worker: name.clone() };
            (more <= self.room_beside(class, room)).then(|| Growth {
                gain: Candidate::whole(source, class, more, cost),
                step: Regrowth::Notified { name },
            })
        };
        self.state.workers.values().filter_map(returns).collect()
    }

    /// What is left of the room for a running worker when those have theirs that come back and are as urgent.
    fn room_beside(&self, class: Class, room: Bytes) -> Bytes {
        let kept = self
            .state
            .returning_workers()
            .into_iter()
            .filter(|(returning, _)| *returning <= class)
            .map(|(_, bytes)| bytes)
            .fold(Bytes::ZERO, Bytes::saturating_add);
        room.saturating_sub(kept).min(self.state.available(class, true))
    }

    /// What the engine's growth is decided by, or why nothing of it can grow now.
    fn engine_view(&self, room: GrowthRoom) -> Result<EngineGrowth<'_>, GrowthWait> {
        let full = self.state.engine.full_plan();
        let (Some(id), Some(shape), Some(limits), Some(goal), Some(full)) = (
            self.state.engine.lease,
            self.state.engine.shape(),
            self.state.engine.limits(),
            self.state.engine.goal(),
            full,
        ) else {
            return Err(GrowthWait::NotLoaded);
        };
        if !self.state.engine.plans.pending.is_empty() {
            return Err(GrowthWait::Changing);
        }
        if let Some(until) = self.state.engine.blocked.growth.filter(|until| self.state.now < *until) {
            let left = until.saturating_since(self.state.now);
            return Err(GrowthWait::Settling { left });
        }
        Ok(EngineGrowth {
            shape,
            goal,
            full,
            limits,
            idle: self.state.engine.is_idle(),
            kept: self.state.engine.kv_kept(),
            held: self.state.ledger.held_by(id),
            kv_step_min: self.state.params.shed.minimum_reclaim,
            room,
        })
    }
}
