//! Simulated engine: performs plans in order, with delays.

use std::{collections::VecDeque, time::Duration};

use cotenant::{
    policy::{
        event::{CapacityWanted, EngineApplied, Event, IdleConversation},
        residency::{EnginePlan, ModelShape},
    },
    units::{Bytes, Timestamp, Tokens},
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{device::millis, faults::Faults};

#[derive(Debug, Default)]
pub(crate) struct Engine {
    pub(crate) in_force: Option<EnginePlan>,
    pub(crate) kv_used: u32,
    /// Whether the running request allows dropping its oldest context, and the number of dropped tokens.
    may_drop: bool,
    kv_dropped: u32,
    pub(crate) requests: u32,
    /// The chunk to apply after the current one.
    smaller_chunk: Option<Tokens>,
    /// The last plan in force.
    last: u64,
    commands: VecDeque<(u64, EnginePlan, Timestamp)>,
    /// Commands of an earlier life are ignored.
    pub(crate) life: u32,
    /// Memory that each life holds unused from its load on, and the number of answers after which it uses it.
    unused: (Bytes, u32),
    /// Number of started answers, and the time from which all memory is used.
    begun: u32,
    used_at: Option<Timestamp>,
}

impl Engine {
    /// For the device drawn from `seed`: half of the devices use all of their memory at once.
    pub(crate) fn new(seed: u64, shape: Option<&ModelShape>) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ PROMISES);
        let share = if rng.random_bool(0.5) {
            rng.random_range(0..=1000)
        } else {
            0
        };
        let bytes = shape.map_or(Bytes::ZERO, |shape| shape.fixed_bytes.per_mille(share));
        Self {
            unused: (bytes, rng.random_range(0..30)),
            ..Self::default()
        }
    }

    pub(crate) fn used(&self, shape: Option<&ModelShape>) -> Bytes {
        let unused = if self.used_at.is_none() {
            self.unused.0
        } else {
            Bytes::ZERO
        };
        match (shape, &self.in_force) {
            (Some(shape), Some(plan)) => shape.plan_bytes(plan).saturating_sub(unused),
            _ => Bytes::ZERO,
        }
    }

    /// Held but unused memory at this instant.
    pub(crate) fn unused_at(&self, at: Timestamp) -> Bytes {
        if self.used_at.is_some_and(|used_at| used_at <= at) {
            Bytes::ZERO
        } else {
            self.unused.0
        }
    }

    /// Whether a model is loaded or loading.
    pub(crate) fn lives(&self) -> bool {
        self.in_force.is_some() || !self.commands.is_empty()
    }

    /// Accepts a command; returns the time of its execution.
    pub(crate) fn command(
        &mut self,
        now: Timestamp,
        (revision, plan, loads): (u64, EnginePlan, bool),
        rng: &mut ChaCha8Rng,
        faults: &Faults,
    ) -> Timestamp {
        let start = self
            .commands
            .back()
            .map_or(now, |(_, _, end)| (*end).max(now));
        let took = if loads {
            let slow = if faults.slow_disk.strikes(rng, 0.5) {
                10
            } else {
                1
            };
            millis(rng, 50, 800) * slow
        } else if faults.slow_engine.strikes(rng, 0.2) {
            millis(rng, 100, 1500)
        } else {
            millis(rng, 1, 40)
        };
        let end = start + took;
        self.commands.push_back((revision, plan, end));
        end
    }

    /// Executes the next command.
    pub(crate) fn carry_out(
        &mut self,
        shape: &ModelShape,
        rng: &mut ChaCha8Rng,
        faults: &Faults,
    ) -> Option<Event> {
        let (revision, mut plan, _) = self.commands.pop_front()?;
        // The current chunk stays; growth into its place must wait.
        let kept = self
            .in_force
            .as_ref()
            .filter(|_| self.requests > 0)
            .map(|in_force| in_force.prefill_chunk);
        let no_room = self
            .in_force
            .as_ref()
            .zip(kept)
            .is_some_and(|(in_force, kept)| {
                let beside = EnginePlan {
                    prefill_chunk: plan.prefill_chunk.max(kept),
                    ..plan.clone()
                };
                shape.plan_bytes(&beside) > shape.plan_bytes(in_force).max(shape.plan_bytes(&plan))
            });
        if faults.failing_plans.strikes(rng, 0.15) {
            if let Some(in_force) = &mut self.in_force
                && rng.random_bool(0.5)
                && !no_room
            {
                // It releases first, then grows; steps completed before a failure persist.
                let all = shape.layers.len();
                let whole = plan.resident.len() == all || in_force.resident.len() == all;
                in_force
                    .resident
                    .retain(|layer| plan.resident.contains(layer));
                let grown = rng.random_range(0..=plan.resident.len());
                in_force.resident.extend(plan.resident.iter().take(grown));
                (in_force.kv_capacity, in_force.kv_type) = (plan.kv_capacity, plan.kv_type);
                in_force.prefill_chunk = kept.unwrap_or(plan.prefill_chunk);
                if whole && in_force.resident.len() < all {
                    make_room_for_the_ring(shape, in_force);
                }
            }
            return Some(Event::EngineApplyFailed {
                revision,
                reason: "sim: cannot".to_owned(),
            });
        }
        if no_room {
            return Some(Event::EngineApplyFailed {
                revision,
                reason: "sim: a chunk is under way".to_owned(),
            });
        }
        self.smaller_chunk = kept.and_then(|kept| {
            let wanted = self.smaller_chunk.unwrap_or(kept).min(plan.prefill_chunk);
            (wanted < kept).then_some(wanted)
        });
        plan.prefill_chunk = kept.unwrap_or(plan.prefill_chunk);
        if self.in_force.is_none() && faults.failing_plans.strikes(rng, 0.3) {
            // Memory is refused for one of its layers: it is loaded with fewer, unless the ring would take more than
            // those.
            let found = rng.random_range(0..=plan.resident.len());
            let resident = plan.resident.iter().take(found).copied().collect();
            let mut fewer = EnginePlan {
                resident,
                ..plan.clone()
            };
            make_room_for_the_ring(shape, &mut fewer);
            if shape.plan_bytes(&fewer) <= shape.plan_bytes(&plan) {
                plan = fewer;
            }
        }
        let before = self.used(Some(shape));
        let block = shape.kv.block_tokens.get();
        if self.may_drop {
            let least = plan
                .kv_capacity
                .get()
                .max(DROPS_NOT * block)
                .min(self.kv_used);
            self.kv_dropped += self.kv_used - least;
            self.kv_used = least;
        }
        plan.kv_capacity = plan
            .kv_capacity
            .max(Tokens::new(self.kv_used.next_multiple_of(block)));
        self.in_force = Some(plan.clone());
        self.last = revision;
        let used = self.used(Some(shape));
        let lost = before > Bytes::ZERO && faults.lost_answers.strikes(rng, 0.1);
        (!lost).then(|| {
            Event::EngineApplied(EngineApplied {
                revision,
                in_force: plan,
                freed: before.saturating_sub(used),
                used,
                untouched: Bytes::ZERO,
                untouched_given: Bytes::ZERO,
                took: Duration::from_millis(3),
            })
        })
    }

    pub(crate) fn die(&mut self) {
        *self = Self {
            life: self.life + 1,
            unused: self.unused,
            ..Self::default()
        };
    }

    /// Ends the current chunk, if a smaller one is to follow.
    pub(crate) fn end_chunk(
        &mut self,
        shape: &ModelShape,
        rng: &mut ChaCha8Rng,
        calm: bool,
    ) -> Option<Event> {
        let before = self.used(Some(shape));
        let in_force = self.in_force.as_mut()?;
        let chunk = self
            .smaller_chunk
            .take_if(|_| calm || rng.random_bool(0.5))?;
        in_force.prefill_chunk = chunk;
        let in_force = in_force.clone();
        let used = self.used(Some(shape));
        Some(Event::EngineApplied(EngineApplied {
            revision: self.last,
            in_force,
            freed: before.saturating_sub(used),
            used,
            untouched: Bytes::ZERO,
            untouched_given: Bytes::ZERO,
            took: Duration::from_millis(1),
        }))
    }

    /// The running sequence grows, requests more capacity, or ends and another begins; never while its chunk is to
    /// shrink.
    pub(crate) fn generate(
        &mut self,
        now: Timestamp,
        block: u32,
        rng: &mut ChaCha8Rng,
        calm: bool,
    ) -> Option<Event> {
        let capacity = self.in_force.as_ref()?.kv_capacity.get();
        if self.requests > 0 && self.kv_used + block > capacity && rng.random_bool(0.5) {
            let [needed, wanted] = [2, 8].map(|blocks| Tokens::new(self.kv_used + blocks * block));
            return Some(Event::CapacityWanted(CapacityWanted {
                needed,
                wanted,
                client: None,
                is_running: true,
            }));
        }
        let ends = self.smaller_chunk.is_none() && (calm || rng.random_bool(0.3));
        let kv_kept = if ends {
            (self.requests, self.kv_dropped) = (0, 0);
            self.may_drop = rng.random_bool(0.3);
            std::mem::take(&mut self.kv_used)
        } else {
            self.begun += 1 - self.requests;
            self.requests = 1;
            if self.begun > self.unused.1 {
                self.used_at.get_or_insert(now);
            }
            self.kv_used = (self.kv_used + rng.random_range(1..300)).min(capacity);
            0
        };
        Some(Event::EngineActivity {
            requests: self.requests,
            kv_used: self.kv_used,
            kv_kept,
            kv_prompt: 0,
            // Some answers are about to end.
            kv_most: self.kv_used + self.kv_used % 256,
            kv_droppable: if self.may_drop {
                self.kv_used.saturating_sub(DROPS_NOT * block)
            } else {
                0
            },
            kv_dropped: self.kv_dropped,
            untouched: Bytes::ZERO,
            beside: conversations(capacity.saturating_sub(self.kv_used), block, rng),
        })
    }
}

/// Up to four conversations, in the capacity that no answer has.
fn conversations(mut free: u32, block: u32, rng: &mut ChaCha8Rng) -> Vec<IdleConversation> {
    let mut all = Vec::new();
    for _ in 0..rng.random_range(0..5) {
        let capacity = (rng.random_range(1..9) * block).min(free);
        free -= capacity;
        all.push(IdleConversation {
            capacity: Tokens::new(capacity),
            tokens: Tokens::new(rng.random_range(0..=capacity)),
            idle_ms: rng.random_range(0..1_200_000),
            superseded: rng.random_bool(0.2),
        });
    }
    all
}

/// Removes as many of the last layers as the ring needs room.
fn make_room_for_the_ring(shape: &ModelShape, plan: &mut EnginePlan) {
    let held = |plan: &EnginePlan| {
        plan.resident
            .iter()
            .map(|layer| shape.layers[*layer as usize].resident_bytes)
            .sum()
    };
    let every: Bytes = shape.layers.iter().map(|layer| layer.resident_bytes).sum();
    while plan.resident.len() < shape.layers.len()
        && every.saturating_sub(held(plan)) < shape.ring_bytes
        && plan.resident.pop_last().is_some()
    {}
}

/// The initially unused memory is drawn from a separate source, like habits.
const PROMISES: u64 = 0x7072_6f6d_6973;

/// Blocks kept when the oldest context is dropped: the beginning, the last one, and the one being written.
const DROPS_NOT: u32 = 3;
