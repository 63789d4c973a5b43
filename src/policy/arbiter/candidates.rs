//! Who could give memory back, what that costs, and who is spared.
//!
//! The engine gives KV blocks that no sequence uses, blocks that keep the last answer, precision of KV where that is
//! allowed, the oldest blocks of a running answer where its request allows that, layers, and the workspace of larger
//! prefill chunks, each at its own cost
//! by what it makes the user wait for ([`Worth`](crate::policy::speed::Worth)); tenants what they hold beyond their least;
//! workers a smaller variant, or themselves. Who is as urgent as the one who asks is spared, and so is what is pinned.

use std::time::Duration;

use super::{
    core::{Arbiter, Phase},
    worker::Worker,
};
use crate::{
    policy::{
        kv_type::KvType,
        lease::{Class, LeaseId, LeaseKind},
        params::ResidencyMode,
        pressure::PressureLevel,
        residency::{EnginePlan, ModelShape, PlanLimits},
        shedding::{Candidate, Cost, Source, Spared, Step, reclaimable},
        snapshot::WorkerState,
    },
    units::{Bytes, Tokens},
};

/// For whom memory is asked back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// For a request of this class: only less urgent holders give, and what counts is what the book gets.
    Request(Class),
    /// For the machine: everybody gives, and what counts is what is really in use.
    Pressure(Urgency),
}

/// How far a shed under pressure goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Urgency {
    /// Elevated, with no more to come: nothing that makes the engine slower.
    Warning,
    /// Critical, or about to be.
    Urgent,
    /// Below the last watermark: even work that is under way.
    LastResort,
}

impl Purpose {
    pub(super) fn takes_from(self, class: Class) -> bool {
        match self {
            Self::Request(urgent) => class > urgent,
            Self::Pressure(_) => true,
        }
    }
}

impl Arbiter {
    /// Everything that could give memory back.
    pub(super) fn candidates(&self, purpose: Purpose) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        if purpose.takes_from(Class::LlmElastic) {
            candidates.extend(self.engine_candidates(purpose));
        }
        for id in self.leases.keys() {
            candidates.extend(self.tenant_candidate(*id, purpose));
        }
        for worker in self.workers.values() {
            candidates.extend(self.worker_candidate(worker, purpose));
        }
        candidates
    }

    /// What one lease could give.
    pub(super) fn gives(&self, id: LeaseId, purpose: Purpose) -> Bytes {
        let Some(lease) = self.leases.get(&id) else {
            return Bytes::ZERO;
        };
        let candidates = match lease.kind {
            LeaseKind::Engine if purpose.takes_from(lease.class) => self.engine_candidates(purpose),
            LeaseKind::Engine => Vec::new(),
            LeaseKind::Tenant => self.tenant_candidate(id, purpose).into_iter().collect(),
            LeaseKind::Worker => {
                let worker = self.workers.get(&lease.tenant);
                worker
                    .and_then(|worker| self.worker_candidate(worker, purpose))
                    .into_iter()
                    .collect()
            }
        };
        reclaimable(&candidates)
    }

    /// What the engine could give.
    pub(super) fn engine_candidates(&self, purpose: Purpose) -> Vec<Candidate> {
        if !self.engine.can_shed(self.now) {
            return Vec::new();
        }
        let (Some(shape), Some(limits), Some(goal)) = (self.engine.shape(), self.engine.limits(), self.engine.goal())
        else {
            return Vec::new();
        };
        // Neither slower tokens nor less precise ones, before it is serious.
        let serious = purpose != Purpose::Pressure(Urgency::Warning);
        let kv_least = if serious { limits.kv_type_least } else { goal.kv_type };
        let mut candidates = kv_candidates(
            shape,
            &limits,
            goal,
            (self.engine.kv_kept(), self.engine.untouched_blocks()),
            kv_least,
        );
        if serious {
            let held = self.engine.kv_held();
            candidates.extend(kv_type_candidate(shape, &limits, goal, held));
            let droppable = self.engine.kv_droppable();
            let oldest = oldest_kv_candidate(shape, &limits, goal, kv_least, droppable, &candidates);
            candidates.extend(oldest);
            candidates.extend(layers_candidate(shape, &limits, goal));
            if !self.engine.is_chunk_pinned() {
                candidates.extend(chunk_candidate(shape, &limits, goal));
            }
        }
        candidates.retain(|candidate| candidate.bytes() > Bytes::ZERO);
        candidates
    }

    fn tenant_candidate(&self, id: LeaseId, purpose: Purpose) -> Option<Candidate> {
        let lease = self.leases.get(&id)?;
        if lease.kind != LeaseKind::Tenant || self.why_spared(id, purpose).is_some() {
            return None;
        }
        let held = self.ledger.held_by(id);
        let used = match purpose {
            Purpose::Request(_) => held,
            Purpose::Pressure(_) => self
                .ledger
                .measurement(lease.holder())
                .map_or(held, |measured| measured.used.min(held)),
        };
        let bytes = used.saturating_sub(lease.min);
        let free_us = micros(self.params.shed.deadlines.of(lease.class));
        let cost = Cost {
            free_us,
            // It gives up what it has some use for, and waits for that as long as it may take over it.
            now_us: free_us / 2,
            undo_us: self.engine.speed().reading_us(bytes),
            ..Cost::default()
        };
        let source = Source::Tenant {
            lease: id,
            tenant: lease.tenant.clone(),
        };
        let units = u32::try_from(bytes.get().div_ceil(TENANT_UNIT.get())).unwrap_or(u32::MAX);
        let mut candidate = Candidate::even(source, lease.class, TENANT_UNIT, units, cost);
        // The last unit may not be a whole one.
        for step in &mut candidate.steps {
            step.bytes = step.bytes.min(bytes);
        }
        (bytes > Bytes::ZERO).then_some(candidate)
    }

    fn worker_candidate(&self, worker: &Worker, purpose: Purpose) -> Option<Candidate> {
        let id = worker.lease?;
        if self.why_spared(id, purpose).is_some() {
            return None;
        }
        // Asked first, stopped only when that has brought nothing.
        if let Some(told) = self.told_candidate(worker, purpose) {
            return Some(told);
        }
        let (name, class) = (worker.params.name.clone(), worker.params.class);
        let held = self.worker_held(&name);
        if held == Bytes::ZERO {
            return None; // it holds a lease of its own, and is asked by that
        }
        let reload = micros(worker.params.reload);
        let stopping = micros(worker.params.stop_grace);
        if worker.requests == 0
            && let Some(smaller) = smaller_variant(worker, held)
        {
            let bytes = held.saturating_sub(worker.params.steady_of(Some(&smaller)));
            let cost = Cost {
                free_us: reload,
                now_us: reload / 2,
                undo_us: reload,
                ..Cost::default()
            };
            let variant = Source::WorkerVariant {
                worker: name,
                variant: smaller,
            };
            return Some(Candidate::whole(variant, class, bytes, cost));
        }
        if self.a_worker_is_stopping() {
            return None;
        }
        let idle_s = self.now.saturating_since(worker.idle_since).as_secs();
        let cost = Cost {
            free_us: stopping,
            now_us: if worker.requests > 0 { BUSY_STOP_US } else { 0 },
            // Who has been idle for long is not likely to be missed soon.
            undo_us: reload.saturating_mul(1 + IDLE_LONG_S / (1 + idle_s)),
            ..Cost::default()
        };
        Some(Candidate::whole(Source::WorkerStop { worker: name }, class, held, cost))
    }

    /// Why a lease is not asked to give anything for `purpose`; `None` if it can be asked.
    pub(super) fn why_spared(&self, id: LeaseId, purpose: Purpose) -> Option<String> {
        let lease = self.leases.get(&id)?;
        let critical = self.pressure.level() == PressureLevel::Critical;
        if let Purpose::Request(urgent) = purpose
            && lease.class <= urgent
        {
            let than = if lease.class == urgent { "as" } else { "more" };
            return Some(format!("{} is {than} urgent", lease.class));
        }
        match (&lease.phase, lease.kind) {
            (Phase::Revoking(revocation), _) => {
                return Some(format!("is coming down to {} already", revocation.target.bytes));
            }
            (Phase::Ending { .. }, _) => return Some("is ending already".to_owned()),
            (Phase::Granted, _) => {}
        }
        let waits = || self.queue.values().any(|want| want.lease == id);
        match lease.kind {
            LeaseKind::Engine => {
                let gives = self.engine_candidates(purpose);
                if !self.engine.can_shed(self.now) {
                    Some("is loading, or failed to shed a moment ago".to_owned())
                } else if gives.is_empty() && purpose == Purpose::Pressure(Urgency::Warning) {
                    Some("has no KV blocks to give, and keeps its layers until Critical is ahead".to_owned())
                } else if gives.is_empty() {
                    Some("has given up all that it can".to_owned())
                } else {
                    None
                }
            }
            LeaseKind::Tenant => {
                let pressed = matches!(purpose, Purpose::Pressure(_));
                // One that waits to become larger is asked like any other: whoever asks is served before it.
                if pressed && lease.class < Class::LlmElastic && !critical {
                    Some(format!("{} gives at Critical only", lease.class))
                } else if self.ledger.held_by(id) <= lease.min {
                    Some(format!("is at its least of {}", lease.min))
                } else {
                    None
                }
            }
            LeaseKind::Worker => {
                let worker = self.workers.get(&lease.tenant)?;
                let last_resort = matches!(purpose, Purpose::Pressure(Urgency::LastResort)) && critical;
                if worker.params.pinned {
                    Some("is pinned".to_owned())
                } else if worker.state != WorkerState::Ready || worker.resizing.is_some() {
                    Some("is changing".to_owned())
                } else if last_resort || self.told_candidate(worker, purpose).is_some() {
                    None
                } else if worker.requests > 0 {
                    Some("is busy".to_owned())
                } else if waits() {
                    Some("waits to become larger".to_owned())
                } else if matches!(purpose, Purpose::Pressure(_)) && !critical {
                    Some("a worker gives at Critical only".to_owned())
                } else if matches!(purpose, Purpose::Pressure(_)) && !self.pressure.is_critical_now() {
                    Some("the lower watermark is behind us, and a worker gives below it only".to_owned())
                } else {
                    None
                }
            }
        }
    }

    /// Workers that could be stopped, and are not among the `candidates`, since others give what is missing now.
    pub(super) fn not_stopped_for_foresight(&self, candidates: &[Candidate], purpose: Purpose) -> Vec<Spared> {
        self.workers
            .values()
            .filter_map(|worker| {
                let id = worker.lease?;
                let could = self.worker_candidate(worker, purpose)?;
                let among = candidates.iter().any(|candidate| candidate.source == could.source);
                (!among).then(|| Spared {
                    why: "would be stopped, and what is missing now comes back without".to_owned(),
                    holder: self.lease_name(id),
                    held: self.ledger.held_by(id),
                })
            })
            .collect()
    }

    /// Those who hold something and are not asked, with the reason.
    pub(super) fn spared(&self, purpose: Purpose) -> Vec<Spared> {
        self.leases
            .keys()
            .filter_map(|id| {
                Some(Spared {
                    why: self.why_spared(*id, purpose)?,
                    holder: self.lease_name(*id),
                    held: self.ledger.held_by(*id),
                })
            })
            .collect()
    }
}

/// KV blocks that no sequence uses, and those that keep what the last answer has left.
///
/// They are weighed by what they hold in the smallest type that KV may be converted to in the same shed, so that both
/// together never promise more than they give. Blocks that no token has touched take no memory yet and cost nothing,
/// unless the mode asks for context.
fn kv_candidates(
    shape: &ModelShape,
    limits: &PlanLimits,
    goal: &EnginePlan,
    (kept, untouched): (Tokens, u32),
    kv_least: KvType,
) -> Vec<Candidate> {
    let kind = goal.kv_type.min(kv_least);
    let block = shape.kv.block_tokens.get().max(1);
    let all = shape.blocks_to_give(goal, limits);
    let has = goal.kv_capacity;
    let after = |blocks: u32| Tokens::new(has.get().saturating_sub(blocks.saturating_mul(block)));
    let unused = all.min(has.get().saturating_sub(kept.get()) / block);
    let worth = shape.worth(limits);
    let unit = shape.kv.blocks_bytes(1, kind);
    let gives = |blocks: u32| {
        let all = shape.kv.capacity_bytes(has, kind);
        all.saturating_sub(shape.kv.capacity_bytes(after(blocks), kind))
    };
    let unpriced = match limits.mode {
        ResidencyMode::MaxContext => 0,
        ResidencyMode::Balanced | ResidencyMode::MaxSpeed => untouched.min(unused),
    };
    let undo = |blocks: u32| {
        let touched = blocks.saturating_sub(unpriced);
        in_us(TOUCH_NS_PER_MIB, shape.kv.blocks_bytes(touched, goal.kv_type))
    };
    let free = |blocks: u32| in_us(UNMAP_NS_PER_MIB, shape.kv.blocks_bytes(blocks, goal.kv_type));
    let cost = |from: Tokens, blocks: u32, now_us: u64| Cost {
        free_us: free(blocks),
        now_us,
        undo_us: undo(blocks),
        milli_tokens_per_s: 0,
        context: Tokens::new(from.get().saturating_sub(after(blocks).get())),
    };
    let beyond = |blocks: u32| {
        let to = after(blocks.max(unpriced));
        worth.context_us(after(unpriced), to, kept.min(to))
    };
    let mut unused_kv = Candidate::graded(
        Source::UnusedKv,
        Class::LlmElastic,
        unit,
        unused,
        cost(has, unused, beyond(unused)),
        |blocks| beyond(blocks).saturating_add(undo(blocks)),
    );
    // A sequence that has lost its end can be cut back to what is left of it, unless it has a recurrent state, which cannot
    // be taken back: then it has to be read again as a whole.
    let prefix = all - unused;
    let lost = |blocks: u32| {
        let left = if shape.state_bytes == Bytes::ZERO {
            after(unused.saturating_add(blocks)).min(kept)
        } else {
            Tokens::ZERO
        };
        worth.context_us(kept, left, kept)
    };
    let mut prefix_kv = Candidate::graded(
        Source::PrefixKv,
        Class::LlmElastic,
        unit,
        prefix,
        Cost {
            free_us: free(prefix),
            now_us: lost(prefix),
            undo_us: undo(prefix),
            milli_tokens_per_s: 0,
            context: kept,
        },
        |blocks| lost(blocks).saturating_add(undo(blocks)),
    );
    for step in &mut unused_kv.steps {
        step.bytes = gives(step.units);
    }
    for step in &mut prefix_kv.steps {
        step.bytes = gives(unused.saturating_add(step.units)).saturating_sub(gives(unused));
    }
    for candidate in [&mut unused_kv, &mut prefix_kv] {
        candidate.steps.retain(|step| step.bytes > Bytes::ZERO);
    }
    vec![unused_kv, prefix_kv]
}

/// KV in a smaller type, one step for each type that is allowed; `held` tokens have to be converted.
fn kv_type_candidate(shape: &ModelShape, limits: &PlanLimits, goal: &EnginePlan, held: Tokens) -> Option<Candidate> {
    let worth = shape.worth(limits);
    let capacity = goal.kv_capacity;
    let now = shape.kv.capacity_bytes(capacity, goal.kv_type);
    let converting = in_us(CONVERT_NS_PER_MIB, shape.kv.capacity_bytes(held, goal.kv_type));
    let lost = |kind: KvType| worth.precision_us(capacity, held, goal.kv_type, kind);
    let kinds = std::iter::successors(goal.kv_type.smaller(), |kind| kind.smaller());
    let kinds = kinds.take_while(|kind| *kind >= limits.kv_type_least);
    let steps: Vec<Step> = (1..)
        .zip(kinds.clone())
        .map(|(units, kind)| Step {
            units,
            bytes: now.saturating_sub(shape.kv.capacity_bytes(capacity, kind)),
            cost_us: lost(kind).saturating_add(converting.saturating_mul(2)),
        })
        .collect();
    let most = steps.last()?.bytes;
    Some(Candidate {
        source: Source::KvType,
        class: Class::LlmElastic,
        cost: Cost {
            free_us: in_us(UNMAP_NS_PER_MIB, most).saturating_add(converting),
            now_us: converting.saturating_add(lost(kinds.last()?)),
            undo_us: converting,
            milli_tokens_per_s: 0,
            context: Tokens::ZERO,
        },
        steps,
        unit: Bytes::ZERO,
    })
}

/// The oldest KV blocks of the running answer, of which `droppable` tokens may be lost.
///
/// They come behind all that the engine could give of its KV otherwise, which are the `others`, for only they take something
/// from the answer that nothing brings back: so each costs more than all of those together.
fn oldest_kv_candidate(
    shape: &ModelShape,
    limits: &PlanLimits,
    goal: &EnginePlan,
    kv_least: KvType,
    droppable: Tokens,
    others: &[Candidate],
) -> Option<Candidate> {
    let kind = goal.kv_type.min(kv_least);
    let (block, has) = (shape.kv.block_tokens.get().max(1), goal.kv_capacity);
    let free = shape.blocks_to_give(goal, limits);
    let idle = PlanLimits {
        kv_used: Tokens::ZERO,
        ..*limits
    };
    let most = shape.blocks_to_give(goal, &idle).saturating_sub(free);
    let blocks = most.min(droppable.get() / block);
    let without = |blocks: u32| {
        let left = has.get().saturating_sub(blocks.saturating_mul(block));
        shape.kv.capacity_bytes(Tokens::new(left), kind)
    };
    let worth = shape.worth(limits);
    let tokens = |blocks: u32| blocks.saturating_mul(block).min(limits.kv_used.get());
    let lost = |blocks: u32| {
        let left = Tokens::new(limits.kv_used.get().saturating_sub(tokens(blocks)));
        worth
            .context_us(limits.kv_used, left, limits.kv_used)
            .saturating_mul(LOST_FOR_GOOD)
    };
    let before: u64 = others
        .iter()
        .filter_map(|candidate| candidate.steps.last())
        .map(|step| step.cost_us)
        .fold(BEHIND_OTHERS_US, u64::saturating_add);
    let moving = |blocks: u32| in_us(COPY_NS_PER_MIB, shape.kv.blocks_bytes(blocks, goal.kv_type));
    let mut candidate = Candidate::graded(
        Source::OldestKv,
        Class::LlmElastic,
        shape.kv.blocks_bytes(1, kind),
        blocks,
        Cost {
            free_us: in_us(UNMAP_NS_PER_MIB, shape.kv.blocks_bytes(blocks, goal.kv_type))
                .saturating_add(moving(blocks)),
            now_us: moving(blocks).saturating_add(lost(blocks)),
            undo_us: 0,
            milli_tokens_per_s: 0,
            context: Tokens::new(tokens(blocks)),
        },
        |blocks| before.saturating_add(moving(blocks)).saturating_add(lost(blocks)),
    );
    for step in &mut candidate.steps {
        step.bytes = without(free).saturating_sub(without(free.saturating_add(step.units)));
    }
    candidate.steps.retain(|step| step.bytes > Bytes::ZERO);
    (!candidate.steps.is_empty()).then_some(candidate)
}

/// Resident layers, one step for each.
fn layers_candidate(shape: &ModelShape, limits: &PlanLimits, goal: &EnginePlan) -> Option<Candidate> {
    let gives = shape.layers_give(goal, limits);
    let worth = shape.worth(limits);
    let speed = worth.speed();
    let ring = if goal.resident.len() == shape.layers.len() {
        shape.ring_bytes
    } else {
        Bytes::ZERO
    };
    let steps: Vec<Step> = (1..)
        .zip(&gives)
        .map(|(units, bytes)| {
            let layers = bytes.saturating_add(ring);
            Step {
                units,
                bytes: *bytes,
                cost_us: worth.streaming_us(layers).saturating_add(speed.reading_us(layers)),
            }
        })
        .collect();
    let most = gives.last()?.saturating_add(ring);
    let streamed: Bytes = shape
        .layers
        .iter()
        .zip(0u32..)
        .filter(|(_, index)| !goal.resident.contains(index))
        .map(|(layer, _)| layer.resident_bytes)
        .sum();
    let before = speed.milli_tokens_per_s(worth.weights(), streamed);
    let after = speed.milli_tokens_per_s(worth.weights(), streamed.saturating_add(most));
    Some(Candidate {
        source: Source::Layers,
        class: Class::LlmElastic,
        cost: Cost {
            free_us: in_us(UNMAP_NS_PER_MIB, most),
            now_us: worth.streaming_us(most),
            undo_us: speed.reading_us(most),
            milli_tokens_per_s: before.saturating_sub(after),
            context: Tokens::ZERO,
        },
        steps,
        unit: Bytes::ZERO,
    })
}

/// Workspace of a chunk that is larger than that of every other plan, as a whole.
fn chunk_candidate(shape: &ModelShape, limits: &PlanLimits, goal: &EnginePlan) -> Option<Candidate> {
    let bytes = shape.chunk_bytes(limits.prefill_chunk, goal.prefill_chunk);
    let worth = shape.worth(limits);
    let streamed = shape.bytes_without(&goal.resident);
    let slower = worth.prompts_us(streamed, limits.prefill_chunk);
    let cost = Cost {
        free_us: in_us(UNMAP_NS_PER_MIB, bytes),
        now_us: slower.saturating_sub(worth.prompts_us(streamed, goal.prefill_chunk)),
        undo_us: in_us(TOUCH_NS_PER_MIB, bytes),
        ..Cost::default()
    };
    let candidate = || Candidate::whole(Source::PrefillChunk, Class::LlmElastic, bytes, cost);
    (bytes > Bytes::ZERO).then(candidate)
}

/// The largest variant that is smaller than the present one and needs no more than is held to get there.
fn smaller_variant(worker: &Worker, held: Bytes) -> Option<String> {
    let steady = worker.steady();
    worker
        .params
        .variants
        .iter()
        .filter(|variant| variant.steady < steady && variant.peak <= held)
        .max_by_key(|variant| variant.steady)
        .map(|variant| variant.name.clone())
}

pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

const fn in_us(ns_per_mib: u64, bytes: Bytes) -> u64 {
    ns_per_mib.saturating_mul(bytes.get() / 1024) / 1024 / 1000
}

/// Tenants count in bytes; a step of the search is a part of what they have, and what it gives too much is spared.
const TENANT_UNIT: Bytes = Bytes::new(4096);
/// Unmapping 1 GiB took 151 ms in small pages.
const UNMAP_NS_PER_MIB: u64 = 147_000;
/// Mapping and touching takes about 0.4 ms for each MiB, as measured on the engine's KV cache.
const TOUCH_NS_PER_MIB: u64 = 400_000;
/// Converting KV reads and writes it once: 0.35 to 1.5 ms for each MiB of `f16` with two threads of a busy machine.
const CONVERT_NS_PER_MIB: u64 = 700_000;
/// Dropping KV copies at most as much of it as is given back. Our choice of 5 GB/s: what is copied to is in memory, and memory
/// is read at 32 to 36 GB/s by two threads (docs/performance.md).
const COPY_NS_PER_MIB: u64 = 200_000;
/// How much dearer a token is that is lost for good than one that can be read again. Our choice.
const LOST_FOR_GOOD: u64 = 4;
/// What asking several costs at most, so that it does not outweigh the order.
const BEHIND_OTHERS_US: u64 = 1000;
/// Stopping a worker in the middle of its work costs its user an utterance.
const BUSY_STOP_US: u64 = 10_000_000;
/// After this many seconds of idleness a stop costs only the start.
const IDLE_LONG_S: u64 = 60;
