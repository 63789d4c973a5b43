//! What grows back: the reverse of shedding, by the same costs.
//!
//! Of everything that was given up and would fit, that comes back first whose loss costs most for each byte, weighed as
//! a shed weighs it; so that what is shed last is back first. Nothing grows before the dwell after the last shed is over
//! (twice, four, eight times as long where what had grown back was shed again within it), not while anybody waits who
//! could be served, only into space that the book has and the last sample shows, and never into space that a stopped
//! worker needs to come back.

use std::{cmp::Reverse, time::Duration};

use super::{
    candidates::micros,
    core::Arbiter,
    engine::{PlanKind, describe},
    queue::WantKind,
    worker::Worker,
};
use crate::{
    policy::{
        decision::GrowthDecision,
        lease::{Class, Ticket},
        pressure::PressureLevel,
        residency::{EnginePlan, ModelShape},
        shedding::{Candidate, Cost, Source},
        snapshot::WorkerState,
    },
    units::{Bytes, Timestamp, Tokens},
};

/// Something that could come back.
struct Growth {
    /// What it takes, and what being without it costs.
    gain: Candidate,
    step: Regrowth,
}

enum Regrowth {
    Worker {
        name: String,
    },
    Variant {
        name: String,
        variant: String,
        class: Class,
    },
    Told {
        name: String,
    },
    Engine {
        plan: EnginePlan,
        bytes: Bytes,
        reason: String,
    },
}

impl Growth {
    /// A larger prefill chunk, which may take the place of layers.
    fn of_chunk(shape: &ModelShape, goal: &EnginePlan, plan: EnginePlan, held: Bytes) -> Self {
        let (before, bytes) = (shape.plan_bytes(goal), shape.plan_bytes(&plan));
        let reason = format!(
            "prompts are read in chunks of {} tokens instead of {}, for reading the {} that each streams takes longer than \
             computing: from {} to {}",
            plan.prefill_chunk,
            goal.prefill_chunk,
            shape.bytes_without(&goal.resident),
            describe(Some(shape), goal),
            describe(Some(shape), &plan)
        );
        // What it takes from others counts; what it takes from layers it was weighed against.
        let taken = bytes.saturating_sub(before).max(Bytes::new(1));
        Self {
            gain: Candidate::whole(Source::PrefillChunk, Class::LlmElastic, taken, Cost::default()),
            step: Regrowth::Engine {
                plan,
                bytes: bytes.max(held),
                reason,
            },
        }
    }
}

impl Arbiter {
    /// Grows back what was shed, one step at a time.
    pub(super) fn grow_back(&mut self) {
        let dwelt = self.shed_at.is_none_or(|at| self.now >= at + self.growth_dwell());
        if dwelt {
            let _ = self.grow_one_step();
        }
    }

    /// When growth is to be looked at again, if time is all that is missing.
    pub(super) fn next_growth(&self) -> Option<Timestamp> {
        let at = self.shed_at? + self.growth_dwell();
        (at > self.now).then_some(at)
    }

    /// How long after a shed nothing grows back: the dwell, doubled each time that what had grown back did not stay for it.
    fn growth_dwell(&self) -> Duration {
        self.params.pressure.dwell.saturating_mul(1 << self.regrets)
    }

    /// Something that may have grown back is shed: if it has not stayed for the dwell, the next growth waits longer.
    pub(super) fn note_shed_of_growth(&mut self) {
        let Some(grown_at) = self.grown_at.take() else { return };
        let stayed = self.now.saturating_since(grown_at);
        if stayed >= self.params.pressure.dwell {
            self.regrets = self.regrets.saturating_sub(1);
            return;
        }
        self.regrets = (self.regrets + 1).min(REGRETS_MAX);
        let dwell = self.growth_dwell();
        self.decide(GrowthDecision::BackedOff { stayed, dwell });
    }

    /// A client's wish changes neither the dwell nor the back-off; growth that is due follows each event.
    pub(super) fn take_capacity_wanted(&mut self, wanted: Tokens) {
        let present = self.engine.goal().map(|plan| plan.kv_capacity);
        let (Some(present), Some(until)) = (present, self.next_growth()) else {
            return;
        };
        if wanted > present {
            self.decide(GrowthDecision::CapacityWithheld { wanted, present, until });
        }
    }

    pub(super) fn take_operator_regrow(&mut self, ticket: Ticket) {
        if let Some(denial) = self.pressure_denial("llm", Class::LlmElastic, Bytes::ZERO) {
            self.deny(ticket, denial);
            return;
        }
        self.shed_at = None;
        self.regrets = 0;
        self.engine.growth_blocked_until = None;
        match self.grow_one_step() {
            Ok(message) | Err(message) => self.done(ticket, message),
        }
    }

    /// What grows now, or why nothing does.
    fn grow_one_step(&mut self) -> Result<String, String> {
        if self.draining {
            return Err("nothing grows while draining".to_owned());
        }
        if self.pressure.level() != PressureLevel::Normal {
            return Err(format!("nothing grows while pressure is {}", self.pressure.level()));
        }
        if self.somebody_waits() {
            return Err("nothing grows while somebody waits".to_owned());
        }
        let Some(room) = self.room() else {
            return Err("nothing grows before a sample shows what the last change left".to_owned());
        };
        let mut steps = self.worker_returns(room);
        steps.extend(self.variant_returns(room));
        steps.extend(self.told_returns(room));
        let engine = self.engine_growth(room);
        let nothing = engine.as_ref().err().cloned();
        steps.extend(engine);
        // The reverse of shedding: what would be given up last comes back first.
        let dearest = steps
            .into_iter()
            .max_by(|one, other| one.gain.by_cost_of_a_byte(&other.gain));
        match dearest {
            Some(growth) => {
                let grown = self.carry_out_growth(growth.step);
                if grown.is_ok() {
                    self.grown_at = Some(self.now);
                }
                grown
            }
            None => Err(nothing.unwrap_or_else(|| "nothing is to grow back".to_owned())),
        }
    }

    fn carry_out_growth(&mut self, step: Regrowth) -> Result<String, String> {
        match step {
            Regrowth::Worker { name } => {
                self.want_worker(&name);
                self.serve_queue();
                Ok(format!("worker `{name}` comes back"))
            }
            Regrowth::Variant { name, variant, class } => {
                if let Some(lease) = self.workers.get(&name).and_then(|worker| worker.lease) {
                    let kind = WantKind::WorkerVariant {
                        variant: variant.clone(),
                    };
                    self.queue_own(&name, class, lease, kind);
                    self.serve_queue();
                }
                Ok(format!("worker `{name}` goes back to variant `{variant}`"))
            }
            Regrowth::Told { name } => self.restore_told(&name),
            Regrowth::Engine { plan, bytes, reason } => {
                let booked = self.engine.lease.is_some_and(|id| self.grow_lease(id, bytes));
                if !booked {
                    return Err("the growth does not fit the book".to_owned());
                }
                // KV that an operator wants in a smaller type, put into force with the next growth: that is given up too.
                // So are layers whose place a larger prefill chunk takes.
                let gives_up =
                    |goal: &EnginePlan| plan.kv_type < goal.kv_type || !goal.resident.is_subset(&plan.resident);
                if self.engine.goal().is_some_and(gives_up) {
                    self.shed_at = Some(self.now);
                }
                self.ask_engine(plan, PlanKind::Regrow, reason.clone());
                Ok(reason)
            }
        }
    }

    /// Whether so much more may be had at once: by the book, by the last sample, and with nobody else to come first.
    pub(super) fn has_room_to_grow(&self, more: Bytes) -> bool {
        let kept = self.returning_or_waiting_workers();
        let room = self.room().unwrap_or(Bytes::ZERO).min(self.ledger.free());
        self.pressure.level() == PressureLevel::Normal
            && self.queue.is_empty()
            && self.engine.pending.is_empty()
            && more <= room.saturating_sub(kept)
    }

    /// What the last sample shows above the upper watermark and the minimum reclaim, if it is newer than the last change.
    fn room(&self) -> Option<Bytes> {
        let headroom = self.pressure.headroom()?;
        let sampled_at = self.pressure.sampled_at()?;
        let watermark = self
            .params
            .pressure
            .elevated_below
            .saturating_add(self.params.shed.minimum_reclaim);
        (sampled_at >= self.changed_at).then(|| headroom.saturating_sub(watermark))
    }

    /// Workers that were stopped to make room and fit again, with what it costs to be without them.
    fn worker_returns(&self, room: Bytes) -> Vec<Growth> {
        let stopped = self.workers.values();
        let stopped = stopped.filter(|worker| worker.stopped_to_shed && worker.state == WorkerState::Stopped);
        // Of two that are worth the same for their size, the more urgent one, and then the one that is started first.
        let mut stopped: Vec<_> = stopped.collect();
        stopped.sort_by_key(|worker| Reverse((worker.params.class, worker.params.start_order)));
        let fits = |peak: Bytes| peak <= room.min(self.ledger.free());
        stopped
            .into_iter()
            .map(|worker| (worker, self.worker_peak(&worker.params.name, None)))
            .filter(|(_, peak)| fits(*peak))
            .map(|(worker, peak)| {
                let worker = &worker.params;
                let name = worker.name.clone();
                let source = Source::WorkerStop { worker: name.clone() };
                let cost = Cost {
                    undo_us: micros(worker.reload),
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
            let variant = worker.variant_before_shed.clone()?;
            if worker.state != WorkerState::Ready || worker.resizing.is_some() {
                return None;
            }
            let (name, class) = (worker.params.name.clone(), worker.params.class);
            let more = self
                .worker_peak(&name, Some(&variant))
                .saturating_sub(self.worker_held(&name));
            let reload = micros(worker.params.reload);
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
                step: Regrowth::Variant { name, variant, class },
            })
        };
        self.workers.values().filter_map(returns).collect()
    }

    fn told_returns(&self, room: Bytes) -> Vec<Growth> {
        let returns = |worker: &Worker| {
            let class = worker.params.class;
            let more = self.told_lacks(worker)?;
            let cost = Cost {
                now_us: micros(worker.params.reload) / 4,
                undo_us: self.engine.speed().reading_us(more),
                ..Cost::default()
            };
            let name = worker.params.name.clone();
            let source = Source::WorkerTold { worker: name.clone() };
            (more <= self.room_beside(class, room)).then(|| Growth {
                gain: Candidate::whole(source, class, more, cost),
                step: Regrowth::Told { name },
            })
        };
        self.workers.values().filter_map(returns).collect()
    }

    /// What is left of the room for a running worker when those have theirs that come back and are as urgent.
    fn room_beside(&self, class: Class, room: Bytes) -> Bytes {
        let kept = self
            .returning_workers()
            .into_iter()
            .filter(|(returning, _)| *returning <= class)
            .map(|(_, bytes)| bytes)
            .fold(Bytes::ZERO, Bytes::saturating_add);
        room.saturating_sub(kept).min(self.available(class, true))
    }

    /// The plan that the engine could grow to, or why there is none.
    fn engine_growth(&self, room: Bytes) -> Result<Growth, String> {
        let blocked = self.engine.growth_blocked_until.is_some_and(|until| self.now < until);
        let (Some(id), Some(shape), Some(limits), Some(goal), Some(full)) = (
            self.engine.lease,
            self.engine.shape(),
            self.engine.limits(),
            self.engine.goal(),
            self.engine.full_plan(),
        ) else {
            return Err("the engine is not loaded".to_owned());
        };
        if blocked || !self.engine.pending.is_empty() {
            return Err("the engine is changing, or failed to a moment ago".to_owned());
        }
        let (held, now_bytes, full_bytes) = (self.ledger.held_by(id), shape.plan_bytes(goal), shape.plan_bytes(&full));
        if *goal == full {
            return Err(format!("the engine has its full plan: {}", describe(Some(shape), goal)));
        }
        // While a chunk is under way it keeps its size, whatever else changes.
        let idle = self.engine.is_idle();
        let limits = if idle {
            limits
        } else {
            limits.at_chunk(goal.prefill_chunk)
        };
        if full_bytes <= now_bytes && (idle || goal.prefill_chunk == full.prefill_chunk) {
            // The ring of a model whose layers are smaller than it: all resident takes no more than some streamed.
            let reason = format!("the full plan takes no more than {}", describe(Some(shape), goal));
            let gain = Candidate::whole(Source::Layers, Class::LlmElastic, Bytes::new(1), Cost::default());
            return Ok(Growth {
                gain,
                step: Regrowth::Engine {
                    plan: full,
                    bytes: held,
                    reason,
                },
            });
        }
        // Never into space that somebody needs to come back, by the book and by what is really there.
        let kept = self.returning_or_waiting_workers();
        let on_the_book = self.ledger.free().saturating_sub(kept);
        let room = room.saturating_sub(kept);
        let more = room.min(on_the_book);
        let target = if goal.prefill_chunk > full.prefill_chunk {
            // A chunk that cannot become smaller yet does not come on top of all the rest: that with KV as it is kept now, for
            // it becomes smaller with the full plan alone.
            let most = EnginePlan {
                kv_type: full.kv_type.max(goal.kv_type),
                ..full.clone()
            };
            now_bytes
                .saturating_add(more)
                .min(shape.plan_bytes(&most).max(now_bytes))
        } else {
            now_bytes.saturating_add(more)
        };
        // Where everything fits nothing is streamed any more, and larger chunks are of no use.
        // And while a chunk is under way the limits leave none that is larger.
        if target < full_bytes
            && let Some(plan) = shape.rechunked(goal, target, &limits)
        {
            return Ok(Growth::of_chunk(shape, goal, plan, held));
        }
        let no_room = || {
            format!(
                "the engine stays at {}: {on_the_book} is free on the book and {room} by measurement",
                describe(Some(shape), goal)
            )
        };
        // No plan is sought for what is too little by any plan: this is looked at with every event.
        if more
            < self
                .params
                .shed
                .minimum_reclaim
                .min(full_bytes.saturating_sub(now_bytes))
        {
            return Err(no_room());
        }
        // What is worth most comes back first, and nothing is given up for it.
        let plan = shape.grown(goal, target, &limits);
        let bytes = shape.plan_bytes(&plan);
        let gained = bytes.saturating_sub(now_bytes);
        let least = self
            .params
            .shed
            .minimum_reclaim
            .min(full_bytes.saturating_sub(now_bytes));
        let too_little = gained < least && plan != full;
        if bytes > held.saturating_add(on_the_book) || gained == Bytes::ZERO || too_little {
            return Err(no_room());
        }
        let reason = format!(
            "growing back by {gained}: {} is free, headroom {} above the watermark and the minimum reclaim; from {} to {}",
            self.ledger.free(),
            room,
            describe(Some(shape), goal),
            describe(Some(shape), &plan)
        );
        let worth = shape.worth(&limits);
        let undone = worth.context_us(
            plan.kv_capacity,
            goal.kv_capacity,
            self.engine.kv_kept().min(goal.kv_capacity),
        );
        let kv = shape.kv.capacity_bytes(plan.kv_capacity, plan.kv_type);
        let kv_now = shape.kv.capacity_bytes(goal.kv_capacity, goal.kv_type);
        let layers = gained.saturating_sub(kv.saturating_sub(kv_now));
        let kept = self.engine.kv_kept().min(goal.kv_capacity);
        let undone = undone.saturating_add(worth.precision_us(plan.kv_capacity, kept, plan.kv_type, goal.kv_type));
        let cost = Cost {
            now_us: undone.saturating_add(worth.streaming_us(layers)),
            undo_us: worth.speed().reading_us(layers),
            ..Cost::default()
        };
        let gain = Candidate::whole(Source::Layers, Class::LlmElastic, gained, cost);
        Ok(Growth {
            gain,
            step: Regrowth::Engine { plan, bytes, reason },
        })
    }
}

/// How often the dwell is doubled at most: eight times 60 s. Our choice: a neighbour that comes and goes for hours costs
/// one needless growth in eight minutes, and one that has gone for good is noticed within them.
const REGRETS_MAX: u32 = 3;
