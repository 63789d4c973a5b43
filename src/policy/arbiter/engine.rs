//! The life of the engine: inspected, loaded, asked for another plan, failed, loaded again.
//!
//! ```text
//!   absent ── inspected ──► loading ── applied ──► ready ◄──► (plans, each with its revision)
//!                              ▲                     │
//!                              └── backoff, memory ── failed ◄── the engine is gone
//! ```
//!
//! Its lease holds the larger of what is in force and of everything asked and not answered yet. Growth is booked before it
//! is asked; a shed is credited with the answer, as far as the engine's own mappings show it.

mod orders;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::core::Arbiter;
use crate::{
    policy::{
        event::Action,
        kv_type::KvType,
        lease::{LeaseId, Ticket},
        params::{ENGINE_TENANT, EngineParams, ResidencyMode},
        residency::{EnginePlan, ModelShape, PlanLimits},
        restart::{Restart, Verdict},
        snapshot::{EngineState, KvView},
        speed::{Speed, Timing},
        streaming::Calibration,
    },
    units::{Bytes, Timestamp, Tokens},
};

/// What is known of the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Engine {
    pub(super) params: Option<EngineParams>,
    pub(super) state: EngineState,
    shape: Option<ModelShape>,
    pub(super) lease: Option<LeaseId>,
    pub(super) in_force: Option<EnginePlan>,
    /// Plans asked and not answered, by revision.
    #[serde(with = "crate::policy::pairs")]
    pub(super) pending: BTreeMap<u64, Pending>,
    /// Plans asked and never answered, or carried out in part: nobody knows how much of them is in force.
    #[serde(with = "crate::policy::pairs")]
    doubtful: BTreeMap<u64, EnginePlan>,
    /// When to ask for a plan anew to end the doubt.
    confirm_at: Option<Timestamp>,
    kv_used: Tokens,
    /// Tokens that the last answer has left, while nobody asks.
    #[serde(default)]
    kv_kept: Tokens,
    /// Tokens that the running answer may lose, and that it has lost.
    #[serde(default)]
    kv_droppable: Tokens,
    #[serde(default)]
    kv_dropped: Tokens,
    /// What it holds and has not touched yet: promised, and still in `MemAvailable`.
    #[serde(default)]
    untouched: Bytes,
    /// By what it has timed itself.
    #[serde(default)]
    speed: Speed,
    /// What it measured when the model was loaded.
    #[serde(default)]
    calibration: Option<Calibration>,
    /// Capacity that the engine kept although it was asked for less, because the running sequence needs it.
    kv_pinned: Option<(Tokens, Timestamp)>,
    /// Until when a chunk that is under way keeps the larger size at most, although a smaller one was asked for.
    #[serde(default)]
    chunk_pinned: Option<Timestamp>,
    requests: u32,
    restart: Option<Restart>,
    pub(super) retry_at: Option<Timestamp>,
    /// Not before this, when the disk that hung has answered.
    #[serde(default)]
    hung_until: Option<Timestamp>,
    pub(super) load_asked_at: Option<Timestamp>,
    pub(super) failure: Option<String>,
    /// A growth failed: not before this again.
    pub(super) growth_blocked_until: Option<Timestamp>,
    /// A shed failed: not before this again.
    shed_blocked_until: Option<Timestamp>,
    /// Operators who wait for a shed.
    pub(super) sheds: Vec<WaitingShed>,
    /// Operators who wait for another KV type, with its revision, the type and what was held before.
    #[serde(default)]
    pub(super) conversions: Vec<(Ticket, u64, KvType, Bytes)>,
}

/// A plan that has been asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Pending {
    pub(super) plan: EnginePlan,
    asked_at: Timestamp,
    pub(super) kind: PlanKind,
    /// What the goal was before.
    from: Bytes,
}

/// An operator who waits for a shed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WaitingShed {
    pub(super) ticket: Ticket,
    /// Of the plan.
    pub(super) revision: u64,
    pub(super) asked: Bytes,
    /// What the engine held before.
    pub(super) before: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum PlanKind {
    Load,
    Shed,
    Regrow,
}

impl Engine {
    pub(super) fn new(params: Option<&EngineParams>) -> Self {
        Self {
            params: params.cloned(),
            state: EngineState::Absent,
            shape: None,
            lease: None,
            in_force: None,
            pending: BTreeMap::new(),
            doubtful: BTreeMap::new(),
            confirm_at: None,
            kv_used: Tokens::ZERO,
            kv_kept: Tokens::ZERO,
            kv_droppable: Tokens::ZERO,
            kv_dropped: Tokens::ZERO,
            untouched: Bytes::ZERO,
            speed: Speed::FIELD,
            calibration: None,
            kv_pinned: None,
            chunk_pinned: None,
            requests: 0,
            restart: params.map(|params| Restart::new(params.restart)),
            retry_at: None,
            hung_until: None,
            load_asked_at: None,
            failure: None,
            growth_blocked_until: None,
            shed_blocked_until: None,
            sheds: Vec::new(),
            conversions: Vec::new(),
        }
    }

    pub(super) const fn shape(&self) -> Option<&ModelShape> {
        self.shape.as_ref()
    }

    /// The plan that it has been asked for last, or that is in force.
    pub(super) fn goal(&self) -> Option<&EnginePlan> {
        self.pending
            .last_key_value()
            .map(|(_, pending)| &pending.plan)
            .or(self.in_force.as_ref())
    }

    /// The limits of every plan, with what the running sequence needs.
    pub(super) fn limits(&self) -> Option<PlanLimits> {
        let capacity = self.in_force.as_ref().map_or(Tokens::ZERO, |plan| plan.kv_capacity);
        let pinned = self.kv_pinned.map_or(Tokens::ZERO, |(tokens, _)| tokens);
        let used = self.kv_used.max(pinned).min(capacity);
        let params = self.params.as_ref()?;
        let limits = PlanLimits::new(params, used).at_speed(self.speed);
        // Larger chunks are worth something only by what was measured: nobody takes the figures of the field for that.
        let is_measured = self.calibration.is_some_and(|by| by.prefill_ns_per_mib > 0);
        Some(if is_measured {
            limits.with_chunks_up_to(params.prefill_chunk_max)
        } else {
            limits
        })
    }

    /// Whether nobody asks it anything, so that no chunk of a prompt is under way.
    pub(super) const fn is_idle(&self) -> bool {
        self.requests == 0
    }

    /// Whether a smaller chunk has been asked for and comes when the one under way has ended: asked again it would give
    /// nothing.
    pub(super) const fn is_chunk_pinned(&self) -> bool {
        self.chunk_pinned.is_some()
    }

    /// Tokens in the KV cache that the next prompt may go on from, while nobody asks.
    pub(super) fn kv_kept(&self) -> Tokens {
        let capacity = self.goal().map_or(Tokens::ZERO, |plan| plan.kv_capacity);
        self.kv_kept.min(capacity)
    }

    /// Tokens in the KV cache, whether or not anybody asks.
    pub(super) fn kv_held(&self) -> Tokens {
        let capacity = self.goal().map_or(Tokens::ZERO, |plan| plan.kv_capacity);
        self.kv_kept.max(self.kv_used).min(capacity)
    }

    /// What is in the KV cache, for others to look at.
    pub(super) const fn kv_view(&self) -> KvView {
        KvView {
            used: self.kv_used,
            kept: self.kv_kept,
            dropped: self.kv_dropped,
            untouched: self.untouched,
        }
    }

    /// Tokens that the running answer may lose, the oldest.
    pub(super) const fn kv_droppable(&self) -> Tokens {
        self.kv_droppable
    }

    /// KV blocks of the goal that no token has touched yet: the last ones.
    pub(super) fn untouched_blocks(&self) -> u32 {
        let (Some(shape), Some(in_force), Some(goal)) = (self.shape(), self.in_force.as_ref(), self.goal()) else {
            return 0;
        };
        let tokens = shape.kv.block_tokens.get().max(1);
        let block = shape.kv.block_bytes(in_force.kv_type).get().max(1);
        let untouched = u32::try_from(self.untouched.get() / block).unwrap_or(u32::MAX);
        let touched = (in_force.kv_capacity.get() / tokens).saturating_sub(untouched);
        (goal.kv_capacity.get() / tokens).saturating_sub(touched)
    }

    /// Keeps a capacity for a request that has asked for it and has not begun yet.
    pub(super) const fn pin_capacity(&mut self, tokens: Tokens, until: Timestamp) {
        self.kv_pinned = Some((tokens, until));
    }

    /// What it holds and may touch at any time, though it has not yet.
    pub(super) const fn untouched(&self) -> Bytes {
        self.untouched
    }

    /// Takes what was measured in place of the figures of the field.
    pub(super) const fn calibrated(&mut self, calibration: Calibration) {
        self.speed.decode_ns_per_mib = calibration.compute_ns_per_mib;
        self.speed.read_ns_per_mib = calibration.read_busy_ns_per_mib;
        if calibration.prefill_ns_per_mib > 0 {
            self.speed.prefill_ns_per_mib = calibration.prefill_ns_per_mib;
        }
        self.calibration = Some(calibration);
    }

    /// Tokens per second under the plan in force, in thousandths, once it was measured what the engine can do.
    pub(super) fn milli_tokens_per_s(&self) -> Option<u64> {
        let (shape, plan) = self.shape.as_ref().zip(self.in_force.as_ref())?;
        Some(self.calibration?.milli_tokens_per_s(shape, &plan.resident))
    }

    pub(super) const fn speed(&self) -> Speed {
        self.speed
    }

    /// From now on KV is kept so when memory is plentiful; `false` where there is no engine.
    pub(super) const fn set_kv_type(&mut self, kind: KvType) -> bool {
        match &mut self.params {
            Some(params) => {
                params.kv_type = kind;
                true
            }
            None => false,
        }
    }

    pub(super) fn set_mode(&mut self, mode: ResidencyMode) {
        if let Some(params) = &mut self.params {
            params.mode = mode;
        }
    }

    pub(super) fn mode(&self) -> Option<ResidencyMode> {
        self.params.as_ref().map(|params| params.mode)
    }

    pub(super) fn full_plan(&self) -> Option<EnginePlan> {
        let limits = PlanLimits::new(self.params.as_ref()?, Tokens::ZERO);
        Some(self.shape.as_ref()?.full_plan(&limits))
    }

    pub(super) fn floor_bytes(&self) -> Option<Bytes> {
        let limits = PlanLimits::new(self.params.as_ref()?, Tokens::ZERO);
        let shape = self.shape.as_ref()?;
        Some(shape.plan_bytes(&shape.floor_plan(&limits)))
    }

    /// Whether a shed may be asked of it.
    pub(super) fn can_shed(&self, now: Timestamp) -> bool {
        self.state == EngineState::Ready && self.shed_blocked_until.is_none_or(|until| until <= now)
    }

    /// What it needs for everything that is in force or asked: a plan on its way may hold parts of both.
    fn needs(&self) -> Bytes {
        let shape = self.shape.as_ref();
        let in_force = self.in_force.as_ref();
        let now = in_force.map_or(Bytes::ZERO, |plan| bytes_in(shape, plan));
        self.pending
            .values()
            .map(|pending| &pending.plan)
            .chain(self.doubtful.values())
            .map(|plan| {
                let both = in_force.map_or_else(|| plan.clone(), |in_force| larger_of_both(in_force, plan));
                bytes_in(shape, plan).max(bytes_in(shape, &both))
            })
            .fold(now, Bytes::max)
    }
}

/// What the engine was chosen to give up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Given {
    /// KV blocks.
    pub(super) blocks: u32,
    /// How many of them the running answer uses, and may lose.
    pub(super) oldest: u32,
    /// What these were weighed to give.
    pub(super) block_bytes: Bytes,
    /// By how many types KV becomes smaller.
    pub(super) smaller_types: u32,
    /// Layers.
    pub(super) layers: u32,
    /// The larger prefill chunk.
    pub(super) smaller_chunk: bool,
}

/// What a plan occupies; nothing while the shape is unknown.
pub(super) fn bytes_in(shape: Option<&ModelShape>, plan: &EnginePlan) -> Bytes {
    shape.map_or(Bytes::ZERO, |shape| shape.plan_bytes(plan))
}

fn larger_of_both(one: &EnginePlan, other: &EnginePlan) -> EnginePlan {
    EnginePlan {
        resident: one.resident.union(&other.resident).copied().collect(),
        kv_capacity: one.kv_capacity.max(other.kv_capacity),
        prefill_chunk: one.prefill_chunk.max(other.prefill_chunk),
        kv_type: one.kv_type.max(other.kv_type),
    }
}

/// `3 of 8 resident layers, 2048 KV tokens, 41 MiB`; tokens that are not kept as `f16` with their type.
pub(super) fn describe(shape: Option<&ModelShape>, plan: &EnginePlan) -> String {
    format!(
        "{} of {} resident layers, {} KV tokens{}, {}",
        shape.map_or(0, |shape| shape.resident_layers(plan)),
        shape.map_or(0, ModelShape::layer_count),
        plan.kv_capacity,
        match plan.kv_type {
            KvType::F16 => "",
            KvType::Q8 => " as q8",
            KvType::Q4 => " as q4",
        },
        bytes_in(shape, plan)
    )
}

/// Tokens in the KV cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct KvHeld {
    /// Of the running answer.
    pub(super) used: Tokens,
    /// Of the last answer, while nobody asks.
    pub(super) kept: Tokens,
    /// That the running answer may lose.
    pub(super) droppable: Tokens,
    /// That it has lost.
    pub(super) dropped: Tokens,
}

/// What the engine says of a plan that it carried out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Applied {
    pub(super) freed: Bytes,
    pub(super) used: Bytes,
    pub(super) untouched: Bytes,
    pub(super) untouched_given: Bytes,
    pub(super) took: Duration,
}

impl Arbiter {
    /// The least that the engine can hold, whatever runs: for the case that nobody decides any more. `None` while there
    /// is no model.
    #[must_use]
    pub fn floor_plan(&self) -> Option<EnginePlan> {
        let limits = PlanLimits::new(self.engine.params.as_ref()?, Tokens::ZERO);
        Some(self.engine.shape()?.floor_plan(&limits))
    }

    pub(super) fn take_engine_inspected(&mut self, shape: ModelShape) {
        if self.engine.params.is_none() {
            self.explain(format!("`{}` was inspected, and no engine is configured", shape.name));
            return;
        }
        if self.engine.lease.is_some() {
            self.explain(format!(
                "`{}` was inspected while a model is loaded: ignored",
                shape.name
            ));
            return;
        }
        self.explain(format!(
            "`{}` has {} layers, {} of KV for each token and needs {} in full",
            shape.name,
            shape.layer_count(),
            shape
                .kv
                .bytes_per_token(self.engine.params.as_ref().map_or(KvType::F16, |params| params.kv_type)),
            self.engine.params.as_ref().map_or(Bytes::ZERO, |params| {
                let limits = PlanLimits::new(params, Tokens::ZERO);
                shape.plan_bytes(&shape.full_plan(&limits))
            })
        ));
        // Whatever reads of an earlier load have kept is back.
        self.ledger.forget(ENGINE_TENANT);
        self.engine.shape = Some(shape);
        // A disk that answers and hangs again with each load, or a file that is another one at each, is not loaded again and
        // again.
        let retry_at = self.engine.hung_until.take().or(self.engine.retry_at);
        if let Some(at) = retry_at.filter(|at| *at > self.now) {
            self.engine.retry_at = Some(at);
            let wait = at.saturating_since(self.now).as_secs_f64();
            self.explain(format!("the model was looked at again; it is loaded in {wait:.1} s"));
            return;
        }
        self.engine.state = EngineState::Loading;
        self.engine.retry_at = None;
    }

    /// Has the header of a model read again that is not loaded; what follows is as at the start.
    pub(super) fn take_operator_load(&mut self, ticket: Ticket) {
        let message = if self.engine.params.is_none() {
            "no LLM is configured".to_owned()
        } else if self.engine.lease.is_some() {
            "the model is loaded, or is being loaded".to_owned()
        } else {
            // What failed before an operator looked at it does not count any more.
            self.engine.retry_at = None;
            self.out.push(Action::InspectModel);
            "the model's file is being read; `cotenant status` shows what comes of it".to_owned()
        };
        self.done(ticket, message);
    }

    pub(super) fn take_engine_applied(&mut self, revision: u64, in_force: EnginePlan, applied: &Applied) {
        let Applied {
            freed,
            used,
            untouched,
            untouched_given,
            took,
        } = *applied;
        let Some(id) = self.engine.lease else {
            self.explain(format!("the engine applied plan {revision}, and holds no lease"));
            return;
        };
        let asked = self.engine.pending.remove(&revision);
        let loads = asked.as_ref().is_some_and(|asked| asked.kind == PlanKind::Load);
        if self.engine.state != EngineState::Ready && !loads {
            self.explain(format!(
                "the engine applied plan {revision} of an earlier load: ignored"
            ));
            return;
        }
        self.engine.pending.retain(|other, _| *other > revision);
        self.engine.doubtful.retain(|other, _| *other > revision);
        if self.engine.doubtful.is_empty() {
            self.engine.confirm_at = None;
        }
        let before = self.ledger.held_by(id);
        self.ledger.measure(ENGINE_TENANT, used, self.now);
        if let Some(asked) = &asked
            && in_force.kv_capacity > asked.plan.kv_capacity
        {
            let until = self.now + PINNED_FOR;
            self.engine.kv_pinned = Some((in_force.kv_capacity, until));
            // Where the oldest may be dropped the engine has dropped what it can.
            self.engine.kv_droppable = Tokens::ZERO;
        }
        let chunk_was = self.engine.in_force.as_ref().map(|plan| plan.prefill_chunk);
        let rechunked = asked.is_none() && chunk_was.is_some_and(|chunk| in_force.prefill_chunk < chunk);
        let keeps_chunk = asked
            .as_ref()
            .is_some_and(|asked| in_force.prefill_chunk > asked.plan.prefill_chunk);
        if keeps_chunk {
            self.engine.chunk_pinned = Some(self.now + PINNED_FOR);
        } else if chunk_was.is_some_and(|chunk| in_force.prefill_chunk < chunk) {
            self.engine.chunk_pinned = None;
        }
        // Somebody has begun to ask meanwhile: the layers whose place a larger chunk should have taken may come back at once.
        let without_chunk = asked.as_ref().is_some_and(|asked| {
            asked.kind == PlanKind::Regrow
                && in_force.prefill_chunk < asked.plan.prefill_chunk
                && self.shed_at == Some(asked.asked_at)
        });
        // The last known plan, asked for again to know what is in force, gives nothing up, whatever it puts right.
        let size = |plan: &EnginePlan| bytes_in(self.engine.shape(), plan);
        let gives_up = asked.as_ref().is_some_and(|asked| {
            let was = self.engine.in_force.as_ref().map_or(Bytes::ZERO, size);
            asked.kind == PlanKind::Shed && (asked.from > size(&asked.plan) || was > size(&in_force))
        });
        self.engine.in_force = Some(in_force);
        self.engine.untouched = untouched;
        let loaded = self.engine.state != EngineState::Ready;
        if loaded {
            self.engine.state = EngineState::Ready;
            self.engine.failure = None;
            if let Some(restart) = &mut self.engine.restart {
                restart.ready(self.now);
            }
        }
        let stays = self.engine.needs().max(used.min(before));
        let credited = self.ledger.lower(id, stays);
        self.ledger.set_moving(id, !self.engine.pending.is_empty());
        self.changed_at = self.now;
        let kind = asked.as_ref().map(|asked| asked.kind);
        let plan = self.engine.in_force.as_ref();
        let shape = self.engine.shape();
        let now_holds = plan.map_or_else(String::new, |plan| describe(shape, plan));
        let took = took.as_millis();
        let free = self.ledger.free();
        let message = match kind {
            None if rechunked => format!(
                "a chunk of a prompt has ended, and smaller ones follow: engine gave up {credited} in {took} ms, the kernel \
                 shows {freed}: {now_holds}, uses {used}; {free} is free"
            ),
            _ if loaded => format!("engine ready after {took} ms: {now_holds}, uses {used}"),
            Some(PlanKind::Shed) if gives_up => format!(
                "engine shed {credited} in {took} ms, the kernel shows {freed}{}: {now_holds}, uses {used}; {free} is free",
                if untouched_given > Bytes::ZERO {
                    format!(" and {untouched_given} had not been touched")
                } else {
                    String::new()
                }
            ),
            Some(PlanKind::Regrow) => {
                format!("engine has grown in {took} ms: {now_holds}, uses {used}; {free} is free")
            }
            _ => format!("engine applied plan {revision} in {took} ms: {now_holds}, uses {used}"),
        };
        self.explain(message);
        match kind {
            Some(PlanKind::Shed) if !gives_up => {
                self.changed_at = self.now;
                self.pressure.came_back(credited.min(freed), self.now);
            }
            Some(PlanKind::Shed) => {
                self.note_reclaimed(credited, true);
                self.pressure.came_back(credited, self.now);
                let promised = asked.map_or(Bytes::ZERO, |asked| {
                    before.saturating_sub(bytes_in(self.engine.shape(), &asked.plan))
                });
                let short = promised.per_mille(self.params.shed.verify_per_mille)
                    > credited.min(freed.saturating_add(untouched_given));
                if short && self.engine.pending.is_empty() {
                    self.explain(format!(
                        "engine promised {promised}, {credited} are credited and the kernel shows {freed}"
                    ));
                }
            }
            Some(PlanKind::Regrow) => {
                self.engine.growth_blocked_until = Some(self.later(self.params.shed.settle));
                let from = asked.map_or(Bytes::ZERO, |asked| asked.from);
                let in_force = self.engine.in_force.as_ref();
                let grown = in_force
                    .map_or(from, |plan| bytes_in(self.engine.shape(), plan))
                    .saturating_sub(from);
                self.stats.regrown_bytes = self.stats.regrown_bytes.saturating_add(grown);
            }
            None if rechunked => {
                self.note_reclaimed(credited, true);
                self.pressure.came_back(credited, self.now);
            }
            Some(PlanKind::Load) | None => {}
        }
        if without_chunk {
            self.shed_at = None;
        }
        self.answer_operators(revision, Ok(applied));
    }

    pub(super) fn take_engine_apply_failed(&mut self, revision: u64, reason: &str) {
        let Some(pending) = self.engine.pending.remove(&revision) else {
            self.explain(format!("plan {revision} failed, and nobody waits for it: {reason}"));
            return;
        };
        if pending.kind == PlanKind::Load {
            self.take_engine_failed(reason, None);
            return;
        }
        self.explain(format!(
            "the engine could not apply plan {revision} ({}): {reason}; in force was {}",
            describe(self.engine.shape(), &pending.plan),
            self.engine
                .in_force
                .as_ref()
                .map_or_else(String::new, |plan| describe(self.engine.shape(), plan))
        ));
        let (settle, dwell) = (self.params.shed.settle, self.params.pressure.dwell);
        // Neither growth nor the same shed is tried again at once: what failed a moment ago fails again.
        if pending.kind == PlanKind::Shed {
            self.engine.shed_blocked_until = Some(self.later(settle));
        }
        // What was in force is asked for before anything grows; where that is what failed, after a longer time.
        let confirms = self.engine.in_force.as_ref() == Some(&pending.plan);
        let confirm_at = self.later(if confirms { settle.max(dwell) } else { settle });
        let grows_at = match pending.kind {
            PlanKind::Regrow => confirm_at.max(self.now + dwell),
            PlanKind::Shed | PlanKind::Load => confirm_at,
        };
        self.engine.growth_blocked_until = self.engine.growth_blocked_until.max(Some(grows_at));
        self.engine.confirm_at = Some(confirm_at);
        // The engine takes one plan after the other: the answers to earlier ones are lost.
        let later = self.engine.pending.split_off(&revision);
        let lost = std::mem::replace(&mut self.engine.pending, later);
        let lost = lost.into_iter().map(|(revision, pending)| (revision, pending.plan));
        self.engine.doubtful.extend(lost);
        // And what was done of this one stays done: it is on the book until the engine says what is in force.
        self.engine.doubtful.retain(|_, plan| *plan != pending.plan);
        self.engine.doubtful.insert(revision, pending.plan);
        self.settle_engine();
        self.answer_operators(revision, Err(reason));
    }

    pub(super) fn take_engine_failed(&mut self, reason: &str, left: Option<Bytes>) {
        if self.engine.params.is_none() {
            return;
        }
        let freed = self.engine.lease.take().map_or(Bytes::ZERO, |id| self.drop_lease(id));
        match left {
            // Nobody holds it, and nobody can have it.
            Some(left) => self.ledger.measure(ENGINE_TENANT, left, self.now),
            None => self.ledger.forget(ENGINE_TENANT),
        }
        self.changed_at = self.now;
        self.engine.state = EngineState::Failed;
        self.engine.in_force = None;
        self.engine.pending.clear();
        self.engine.doubtful.clear();
        self.engine.confirm_at = None;
        self.engine.kv_used = Tokens::ZERO;
        self.engine.kv_kept = Tokens::ZERO;
        self.engine.kv_droppable = Tokens::ZERO;
        self.engine.kv_dropped = Tokens::ZERO;
        self.engine.untouched = Bytes::ZERO;
        self.engine.kv_pinned = None;
        self.engine.chunk_pinned = None;
        self.engine.requests = 0;
        self.engine.load_asked_at = None;
        self.engine.failure = Some(reason.to_owned());
        let inspected = self.engine.shape.is_some();
        let restart = self.engine.restart.as_mut().filter(|_| inspected);
        let (verdict, hung_until) = match (restart, left) {
            (Some(restart), Some(_)) => (None, Some(restart.held_up(self.now))),
            (Some(restart), None) => (Some(restart.failed(self.now)), None),
            (None, _) => (None, None),
        };
        self.engine.hung_until = hung_until;
        self.engine.retry_at = match verdict {
            Some(Verdict::RetryAt(at)) => Some(at),
            Some(Verdict::GiveUp) | None => None,
        };
        let next = match verdict {
            Some(Verdict::RetryAt(at)) => {
                format!("loading again in {:.1} s", at.saturating_since(self.now).as_secs_f64())
            }
            Some(Verdict::GiveUp) => "it failed too often and is not loaded again".to_owned(),
            None if left.is_some() => format!(
                "reads that hang keep {}, and it is looked at again when the disk has answered",
                left.unwrap_or_default()
            ),
            None => "there is nothing to load".to_owned(),
        };
        self.explain(format!(
            "the engine is gone ({reason}), {freed} are off the book; {next}"
        ));
        self.answer_operators(u64::MAX, Err(reason));
    }

    pub(super) fn take_engine_activity(&mut self, requests: u32, kv: &KvHeld, untouched: Bytes) {
        let finished = self.engine.requests > requests;
        let lost = kv.dropped.get().saturating_sub(self.engine.kv_dropped.get());
        if lost > 0 {
            self.explain(format!(
                "the answer has lost {lost} tokens of its context, the oldest, as its request allows: {} in all",
                kv.dropped
            ));
        }
        self.engine.requests = requests;
        self.engine.kv_used = kv.used;
        self.engine.kv_kept = kv.kept;
        self.engine.kv_droppable = kv.droppable;
        self.engine.kv_dropped = kv.dropped;
        self.engine.untouched = untouched;
        if finished {
            self.engine.kv_pinned = None;
            self.engine.chunk_pinned = None;
        }
    }

    /// Learns how fast the engine is, by an answer that was given from end to end with the plan in force.
    pub(super) fn take_engine_timed(&mut self, timing: &Timing) {
        let (Some(shape), Some(plan)) = (self.engine.shape(), &self.engine.in_force) else {
            return;
        };
        let weights = shape.bytes_without(&BTreeSet::new()).saturating_add(shape.fixed_bytes);
        let streamed = shape.bytes_without(&plan.resident);
        let calibration = self.engine.calibration.map(|by| match timing.token_ns() {
            Some(token_ns) => by.learn(shape, &plan.resident, token_ns),
            None => by,
        });
        self.engine.speed = self.engine.speed.learn(timing, weights, streamed);
        self.engine.calibration = calibration;
    }
}

/// How long a capacity that the running sequence needs, and the chunk that is under way, are not asked back again.
pub(super) const PINNED_FOR: Duration = Duration::from_secs(1);
