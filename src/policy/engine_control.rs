//! State of the engine: phase, plans, contents of the KV cache, and waiting operators.
//!
//! ```text
//!   absent ── inspected ──► loading ── applied ──► ready ◄──► (plans, each with its revision)
//!                              ▲                     │
//!                              └── retry, memory ── failed ◄── the engine has ended
//! ```
//!
//! A failure is cured by another load, by reading the file again later, or only by a change ([`Cure`]).
//!
//! Its lease holds the maximum of the plan in force and all unanswered plans. Growth is booked before it is requested;
//! a shed is credited with the answer, as far as the engine's own mappings confirm it.

mod answer;

use std::{cmp::Reverse, collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    decision::NextLoad,
    engine_failure::{Cure, EngineFailure, NextTry},
    event::IdleConversation,
    kv_type::KvType,
    lease::{LeaseId, Ticket},
    params::EngineParams,
    price::{KeptConversation, KvContents, Price},
    reason::PlanChange,
    residency::{EnginePlan, ModelShape, PlanLimits},
    restart::Restart,
    snapshot::{EngineState, KvView},
    speed::{Calibration, Timing},
};
use cotenant_units::{Bytes, Timestamp, Tokens};

pub(super) use self::answer::Confirmed;

/// The arbiter's view of the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EngineControl {
    pub(super) params: Option<EngineParams>,
    shape: Option<ModelShape>,
    pub(super) lease: Option<LeaseId>,
    phase: Phase,
    /// Its last failure, until it is ready again.
    failure: Option<Failure>,
    restart: Restart,
    pub(super) plans: Plans,
    pub(super) kv: KvUse,
    pace: Pace,
    pub(super) blocked: Blocked,
    #[serde(default)]
    pub(super) operators: Vec<WaitingOperator>,
    requests: u32,
}

/// Reason of a failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Failure {
    reason: String,
    /// Remedy, if only a change helps; empty if the reason contains it.
    remedy: String,
}

/// Phase of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Phase {
    /// Not configured, or the model's header was not read.
    #[default]
    Absent,
    /// Waits for memory, or is being loaded since `asked_at`.
    Loading { asked_at: Option<Timestamp> },
    /// Serves requests.
    Ready,
    /// Ended after a failure.
    Failed(Retry),
}

/// Condition for loading a failed engine again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Retry {
    /// It failed too often, or there is nothing to load.
    Never,
    /// When the back-off is over.
    At(Timestamp),
    /// Once its model can be read again, and not before this time.
    WhenReadable(Timestamp),
    /// The header of its model is read again at this time.
    ReadAt(Timestamp),
    /// The header of its model is being read again.
    Reading,
}

/// Plans in force and requested.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Plans {
    pub(super) in_force: Option<EnginePlan>,
    /// Unanswered plans, by revision.
    #[serde(with = "crate::pairs")]
    pub(super) pending: BTreeMap<u64, Pending>,
    /// Plans never answered, or carried out in part: an unknown share of each is in force.
    #[serde(with = "crate::pairs")]
    doubtful: BTreeMap<u64, EnginePlan>,
    /// Revision of the last plan.
    pub(super) last: u64,
    /// Time to request a plan again, to clear `doubtful`.
    confirm_at: Option<Timestamp>,
}

/// A requested plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Pending {
    pub(super) plan: EnginePlan,
    pub(super) asked_at: Timestamp,
    pub(super) kind: PlanKind,
    /// Bytes of the previous goal.
    pub(super) from: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum PlanKind {
    Load,
    Shed,
    Regrow,
}

/// Tokens in the KV cache, from the engine's reports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KvUse {
    /// Of the running answer.
    pub(super) used: Tokens,
    /// Of the last answer, while no request runs.
    pub(super) kept: Tokens,
    /// Expected use of the running answer.
    #[serde(default)]
    pub(super) expected: Tokens,
    /// Droppable tokens of the running answer.
    pub(super) droppable: Tokens,
    /// Dropped tokens of the running answer.
    pub(super) dropped: Tokens,
    /// Bytes held but not touched yet: promised, and still part of `MemAvailable`.
    pub(super) untouched: Bytes,
    /// Parked conversations, as of [`Self::at`].
    #[serde(default)]
    pub(super) beside: Vec<IdleConversation>,
    #[serde(default)]
    pub(super) at: Timestamp,
    /// Capacity reserved for a sequence that needs it or is about to, and the end of the reservation.
    pub(super) pinned: Option<(Tokens, Timestamp)>,
}

impl KvUse {
    /// Returns the expected use of a running answer of at most `most` tokens: its prompt and the next [`ANSWER_AHEAD`]
    /// tokens.
    pub(super) fn expected(used: Tokens, prompt: Tokens, most: Tokens) -> Tokens {
        Tokens::new(used.max(prompt).get().saturating_add(ANSWER_AHEAD)).min(most)
    }
}

/// Speed of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Pace {
    /// Measured at load and learned from answers; before that, field values.
    by: Calibration,
    is_measured: bool,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            by: Calibration::FIELD,
            is_measured: false,
        }
    }
}

/// Times before which a kind of change is not requested again: it failed, settles, or is in progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Blocked {
    /// A growth.
    pub(super) growth: Option<Timestamp>,
    /// A shed.
    pub(super) shed: Option<Timestamp>,
    /// A smaller chunk: the one in progress keeps the larger size, so another request would free nothing.
    pub(super) chunk: Option<Timestamp>,
}

/// An operator waiting for the engine's answer to a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WaitingOperator {
    pub(super) ticket: Ticket,
    /// Of the plan.
    pub(super) revision: u64,
    /// Bytes that the engine held before.
    pub(super) before: Bytes,
    pub(super) wish: Wish,
}

/// An operator's request to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Wish {
    Shed { asked: Bytes },
    KvType { kind: KvType },
}

impl EngineControl {
    pub(super) fn new(params: Option<&EngineParams>) -> Self {
        Self {
            params: params.cloned(),
            ..Self::default()
        }
    }

    pub(super) const fn state(&self) -> EngineState {
        match self.phase {
            Phase::Absent if self.params.is_none() => EngineState::Absent,
            Phase::Absent | Phase::Loading { .. } => EngineState::Loading,
            Phase::Ready => EngineState::Ready,
            Phase::Failed(_) => EngineState::Failed,
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.phase == Phase::Ready
    }

    /// Records the model's header. Returns the time of the load, if it is in the future.
    ///
    /// The back-off continues: a disk that hangs again with each load, or a file that changes each time, does not cause
    /// a loop of loads.
    pub(super) fn inspected(&mut self, shape: ModelShape, now: Timestamp) -> Option<Timestamp> {
        self.shape = Some(shape);
        if let Phase::Failed(Retry::At(at) | Retry::WhenReadable(at)) = self.phase
            && at > now
        {
            self.phase = Phase::Failed(Retry::At(at));
            return Some(at);
        }
        self.phase = Phase::Loading { asked_at: None };
        None
    }

    /// Returns the last failure and the time of the next attempt; `None` once the engine is ready.
    pub(super) fn failure(&self) -> Option<EngineFailure> {
        let failure = self.failure.as_ref()?;
        let next = match self.phase {
            Phase::Failed(Retry::Never) => NextTry::Never {
                remedy: failure.remedy.clone(),
            },
            Phase::Failed(Retry::At(at) | Retry::ReadAt(at)) => NextTry::At(at),
            Phase::Failed(Retry::WhenReadable(_)) => NextTry::WhenDiskAnswers,
            Phase::Failed(Retry::Reading)
            | Phase::Absent
            | Phase::Loading { .. }
            | Phase::Ready => NextTry::Now,
        };
        Some(EngineFailure {
            reason: failure.reason.clone(),
            next,
        })
    }

    /// Returns whether the file's header is due to be read again, and marks it as being read.
    pub(super) fn take_read(&mut self, now: Timestamp) -> bool {
        let due = matches!(self.phase, Phase::Failed(Retry::ReadAt(at)) if at <= now);
        if due {
            self.phase = Phase::Failed(Retry::Reading);
        }
        due
    }

    /// Marks the file as being read again by an operator's command: earlier failures do not delay the load.
    pub(super) fn read_again(&mut self) {
        if matches!(self.phase, Phase::Failed(_)) {
            self.phase = Phase::Failed(Retry::Reading);
        }
    }

    /// Blocks loading until the file is read again.
    pub(super) fn refuse(&mut self, reason: String, remedy: &str) {
        self.failure = Some(Failure {
            reason,
            remedy: remedy.to_owned(),
        });
        self.phase = Phase::Failed(Retry::Never);
    }

    /// Whether it waits for memory to be loaded.
    pub(super) fn waits_to_load(&self, now: Timestamp) -> bool {
        match self.phase {
            Phase::Loading { .. } => self.lease.is_none(),
            Phase::Failed(Retry::At(at)) => at <= now,
            Phase::Absent | Phase::Ready | Phase::Failed(_) => false,
        }
    }

    /// Starts loading into `lease`.
    pub(super) const fn load(&mut self, lease: LeaseId, now: Timestamp) {
        self.lease = Some(lease);
        self.phase = Phase::Loading {
            asked_at: Some(now),
        };
    }

    /// Returns the time at which the load is overdue; `None` once the engine is ready or has failed.
    pub(super) fn load_overdue_at(&self) -> Option<Timestamp> {
        let timeout = self.params.as_ref()?.load_timeout;
        match self.phase {
            Phase::Ready | Phase::Failed(_) => None,
            Phase::Loading { asked_at: Some(at) } => Some(at + timeout),
            Phase::Absent | Phase::Loading { asked_at: None } => Some(Timestamp::START + timeout),
        }
    }

    /// Returns the time until which workers wait for the engine.
    pub(super) fn holds_workers_until(&self, now: Timestamp) -> Option<Timestamp> {
        self.load_overdue_at().filter(|at| *at > now)
    }

    /// Marks the engine as ready. Returns `false` if it already was.
    pub(super) fn ready(&mut self, now: Timestamp) -> bool {
        if self.is_ready() {
            return false;
        }
        self.phase = Phase::Ready;
        self.failure = None;
        self.restart.ready(now);
        true
    }

    /// Records the end of the engine, its lease and plans; `left` is memory kept by hanging reads. Returns the
    /// condition of the next load.
    pub(super) fn failed(
        &mut self,
        reason: &str,
        cure: Cure,
        left: Option<Bytes>,
        now: Timestamp,
    ) -> NextLoad {
        self.lease = None;
        self.plans = Plans {
            last: self.plans.last,
            ..Plans::default()
        };
        self.kv = KvUse::default();
        self.blocked.chunk = None;
        self.requests = 0;
        let mut remedy = AGAIN.to_owned();
        let limits = self.params.as_ref().map(|params| params.restart);
        let (retry, next) = match (limits, cure, left) {
            (Some(limits), _, Some(left)) => (
                Retry::WhenReadable(self.restart.held_up(&limits, now)),
                NextLoad::WaitsForDisk { left },
            ),
            (_, Cure::Change { remedy: change }, _) => {
                remedy = change;
                (Retry::Never, NextLoad::NeedsChange)
            }
            (Some(limits), Cure::Reread, None) => {
                let at = self.restart.held_up(&limits, now);
                (
                    Retry::ReadAt(at),
                    NextLoad::ReadIn(at.saturating_since(now)),
                )
            }
            (Some(limits), Cure::Reload, None) if self.shape.is_some() => {
                match self.restart.failed(&limits, now) {
                    Some(at) => (Retry::At(at), NextLoad::In(at.saturating_since(now))),
                    None => (Retry::Never, NextLoad::GivenUp),
                }
            }
            (_, Cure::Reload | Cure::Reread, _) => (Retry::Never, NextLoad::NothingToLoad),
        };
        self.failure = Some(Failure {
            reason: reason.to_owned(),
            remedy,
        });
        self.phase = Phase::Failed(retry);
        next
    }

    /// Records the engine's report on requests and its KV cache. Returns the tokens dropped since the last one.
    pub(super) fn activity(&mut self, requests: u32, kv: KvUse) -> u32 {
        let finished = self.requests > requests;
        let lost = kv.dropped.get().saturating_sub(self.kv.dropped.get());
        let pinned = self.kv.pinned.filter(|_| !finished);
        self.requests = requests;
        self.kv = KvUse { pinned, ..kv };
        if finished {
            self.blocked.chunk = None;
        }
        lost
    }

    pub(super) const fn shape(&self) -> Option<&ModelShape> {
        self.shape.as_ref()
    }

    /// Returns the bytes of a plan; zero while the shape is unknown.
    pub(super) fn bytes_in(&self, plan: &EnginePlan) -> Bytes {
        let shape = self.shape.as_ref();
        shape.map_or(Bytes::ZERO, |shape| shape.plan_bytes(plan))
    }

    /// Returns the change from the goal to another plan.
    pub(super) fn change_to(&self, plan: &EnginePlan) -> PlanChange {
        PlanChange::of(self.shape(), self.goal().unwrap_or(plan), plan)
    }

    /// Returns the plan requested last, or the one in force.
    pub(super) fn goal(&self) -> Option<&EnginePlan> {
        let last = self.plans.pending.last_key_value();
        last.map(|(_, pending)| &pending.plan)
            .or(self.plans.in_force.as_ref())
    }

    /// Returns the limits of all plans, including the needs of the running sequence.
    pub(super) fn limits(&self) -> Option<PlanLimits> {
        let in_force = self.plans.in_force.as_ref();
        let capacity = in_force.map_or(Tokens::ZERO, |plan| plan.kv_capacity);
        let pinned = self.kv.pinned.map_or(Tokens::ZERO, |(tokens, _)| tokens);
        let used = self.kv.used.max(self.kv.expected).max(pinned).min(capacity);
        let params = self.params.as_ref()?;
        let limits = PlanLimits::new(params, used).at_speed(self.pace.by);
        // Larger chunks are judged by measurements only, not by field values.
        Some(if self.pace.is_measured {
            limits.with_chunks_up_to(params.prefill_chunk_max)
        } else {
            limits
        })
    }

    /// Whether no request runs, so that no chunk of a prompt is in progress.
    pub(super) const fn is_idle(&self) -> bool {
        self.requests == 0
    }

    /// Returns the contents of the KV cache under the goal, for prices.
    pub(super) fn kv_contents(&self, now: Timestamp) -> KvContents {
        let capacity = self.goal().map_or(Tokens::ZERO, |plan| plan.kv_capacity);
        let within = |tokens: Tokens| tokens.min(capacity);
        let limits = self.limits();
        let since = now.saturating_since(self.kv.at);
        let beside = self.kv.beside.iter().map(|one| KeptConversation {
            capacity: one.capacity,
            tokens: one.tokens,
            needed: KeptConversation::needed(
                Duration::from_millis(one.idle_ms).saturating_add(since),
                one.superseded,
            ),
        });
        let mut contents = KvContents {
            kept: within(self.kv.kept),
            used: within(self.kv.used),
            beside: beside.collect(),
            held: Tokens::ZERO,
            touched: within(self.touched()),
        };
        contents.beside.sort_by_key(|one| Reverse(one.needed));
        contents.held = within(contents.occupied());
        contents.used = within(limits.map_or(Tokens::ZERO, |limits| limits.kv_used));
        contents
    }

    /// Returns the contents of the KV cache, for snapshots.
    pub(super) const fn kv_view(&self) -> KvView {
        KvView {
            used: self.kv.used,
            kept: self.kv.kept,
            dropped: self.kv.dropped,
            untouched: self.kv.untouched,
        }
    }

    /// Returns the capacity touched by tokens: all but the last blocks.
    fn touched(&self) -> Tokens {
        let (Some(shape), Some(in_force)) = (self.shape(), self.plans.in_force.as_ref()) else {
            return Tokens::ZERO;
        };
        let tokens = shape.kv.block_tokens.get().max(1);
        let blocks = in_force.kv_capacity.get() / tokens;
        let untouched = shape
            .kv
            .blocks_within(blocks, in_force.kv_type, self.kv.untouched);
        Tokens::new((blocks - untouched).saturating_mul(tokens))
    }

    /// Reserves capacity for a sequence that needs it, or has requested it and not begun.
    pub(super) fn pin_capacity(&mut self, tokens: Tokens, now: Timestamp) {
        self.kv.pinned = Some((tokens, now + PINNED_FOR));
    }

    /// Replaces the field values by measurements.
    pub(super) const fn calibrated(&mut self, calibration: Calibration) {
        let prefill = self.pace.by.prefill_ns_per_mib;
        self.pace = Pace {
            by: calibration,
            is_measured: true,
        };
        if calibration.prefill_ns_per_mib == 0 {
            self.pace.by.prefill_ns_per_mib = prefill;
        }
    }

    /// Learns the engine's speed from a complete answer with the plan in force.
    pub(super) fn timed(&mut self, timing: &Timing) {
        let (Some(shape), Some(plan)) = (self.shape.as_ref(), &self.plans.in_force) else {
            return;
        };
        let weights = shape.token_bytes();
        let streamed = shape.missing(&plan.resident).bytes;
        // Each chunk of a prompt also reads the streamed layers: without any, prompt time is computing time.
        if streamed == Bytes::ZERO {
            self.pace.by = self.pace.by.learn_prompt(timing, weights);
        }
        if let Some(token_ns) = timing.token_ns() {
            self.pace.by = self.pace.by.learn(shape, &plan.resident, token_ns);
        }
    }

    /// Returns the speed under a plan in thousandths of a token per second, once it was measured.
    pub(super) fn milli_tokens_per_s(&self, plan: Option<&EnginePlan>) -> Option<u64> {
        let (shape, plan) = self.shape.as_ref().zip(plan)?;
        let rate = self.pace.by.milli_tokens_per_s(shape, &plan.resident);
        self.pace.is_measured.then_some(rate)
    }

    pub(super) const fn speed(&self) -> Calibration {
        self.pace.by
    }

    /// Returns the bytes above the engine's floor, which it returns within milliseconds: (booked, touched). Zero during
    /// a plan change.
    pub(super) fn lends(&self) -> (Bytes, Bytes) {
        let plan = self.plans.in_force.as_ref();
        let plan = plan.filter(|_| self.is_ready() && self.plans.pending.is_empty());
        let (Some(shape), Some(plan), Some(limits)) = (&self.shape, plan, self.limits()) else {
            return (Bytes::ZERO, Bytes::ZERO);
        };
        let least = shape.plan_bytes(&shape.floor_plan(&limits));
        let booked = shape.plan_bytes(plan).saturating_sub(least);
        (booked, booked.saturating_sub(self.kv.untouched))
    }

    pub(super) fn full_plan(&self) -> Option<EnginePlan> {
        let limits = PlanLimits::new(self.params.as_ref()?, Tokens::ZERO);
        Some(self.shape.as_ref()?.full_plan(&limits))
    }

    /// Returns the additional wait of an answer because up to `bytes` of its layers are read from disk for each token,
    /// µs.
    pub(super) fn streaming_us(&self, bytes: Bytes) -> u64 {
        let (Some(shape), Some(goal), Some(full), Some(limits)) =
            (&self.shape, self.goal(), self.full_plan(), self.limits())
        else {
            return 0;
        };
        let missing = shape.missing(&goal.resident);
        let streamed = missing
            .bytes
            .saturating_sub(shape.missing(&full.resident).bytes);
        let price = Price::new(shape, &limits);
        let waits = [streamed, streamed.saturating_sub(bytes)]
            .map(|bytes| price.weights_us(missing.only(bytes), goal.prefill_chunk));
        waits[0].saturating_sub(waits[1])
    }

    /// Returns the smallest plan, regardless of running requests.
    pub(super) fn floor_plan(&self) -> Option<EnginePlan> {
        let limits = PlanLimits::new(self.params.as_ref()?, Tokens::ZERO);
        Some(self.shape.as_ref()?.floor_plan(&limits))
    }

    pub(super) fn floor_bytes(&self) -> Option<Bytes> {
        Some(self.bytes_in(&self.floor_plan()?))
    }

    /// Returns the minimum and maximum size of its lease.
    pub(super) fn lease_bounds(&self) -> Option<(Bytes, Bytes)> {
        Some((self.floor_bytes()?, self.bytes_in(&self.full_plan()?)))
    }

    /// Returns the floor while a load is pending.
    pub(super) fn returning(&self) -> Option<Bytes> {
        let comes = match self.phase {
            Phase::Loading { .. } => self.lease.is_none(),
            Phase::Failed(Retry::At(_)) => true,
            Phase::Absent | Phase::Ready | Phase::Failed(_) => false,
        };
        if comes { self.floor_bytes() } else { None }
    }

    /// Returns the plan to request again when that is due: the one in force, or one that takes no more memory.
    ///
    /// A running answer may already use the larger KV capacity of a plan carried out in part: the engine then keeps
    /// that capacity, and layers that would not fit beside it are not requested.
    pub(super) fn take_unconfirmed(&mut self, now: Timestamp) -> Option<EnginePlan> {
        let plan = self.plans.take_unconfirmed(now)?;
        let capacity = self
            .plans
            .doubtful
            .values()
            .map(|doubtful| doubtful.kv_capacity)
            .max();
        let larger = capacity
            .filter(|_| !self.is_idle())
            .zip(self.shape())
            .zip(self.limits());
        let larger = larger.and_then(|((capacity, shape), limits)| {
            shape.with_capacity(
                &plan,
                (capacity, capacity),
                shape.plan_bytes(&plan),
                &limits.at_chunk(plan.prefill_chunk),
            )
        });
        Some(larger.unwrap_or(plan))
    }

    /// Returns the share that is reserved against every class: the floor, while the engine is loaded or a load is
    /// pending.
    pub(super) fn keeps(&self) -> Option<Bytes> {
        if self.lease.is_some() {
            self.floor_bytes()
        } else {
            self.returning()
        }
    }

    /// Whether a shed may be requested.
    pub(super) fn can_shed(&self, now: Timestamp) -> bool {
        self.is_ready() && self.blocked.shed.is_none_or(|until| until <= now)
    }

    /// Returns the bytes for all plans in force or requested: a plan in progress may hold parts of both.
    pub(super) fn needs(&self) -> Bytes {
        let in_force = self.plans.in_force.as_ref();
        let now = in_force.map_or(Bytes::ZERO, |plan| self.bytes_in(plan));
        self.plans
            .asked()
            .map(|plan| {
                let both =
                    in_force.map_or_else(|| plan.clone(), |in_force| in_force.with_all_of(plan));
                self.bytes_in(plan).max(self.bytes_in(&both))
            })
            .fold(now, Bytes::max)
    }

    /// Removes expired reservations and blocks.
    pub(super) fn forget_past(&mut self, now: Timestamp) {
        self.kv.pinned = self.kv.pinned.filter(|(_, until)| *until > now);
        let Blocked {
            growth,
            shed,
            chunk,
        } = &mut self.blocked;
        for block in [growth, shed, chunk] {
            *block = block.filter(|until| *until > now);
        }
    }

    /// Returns the last plan, if its answer is overdue.
    pub(super) fn overdue(&self, now: Timestamp) -> Option<(u64, Pending)> {
        let (revision, pending) = self.plans.pending.last_key_value()?;
        (self.answer_due(pending)? <= now).then(|| (*revision, pending.clone()))
    }

    fn answer_due(&self, pending: &Pending) -> Option<Timestamp> {
        let timeout = self.params.as_ref()?.apply_timeout;
        (pending.kind != PlanKind::Load).then(|| pending.asked_at + timeout)
    }

    /// Returns the next time at which something is due.
    pub(super) fn next_deadline(&self, now: Timestamp) -> Option<Timestamp> {
        self.params.as_ref()?;
        let last = self.plans.pending.last_key_value();
        let overdue = last.and_then(|(_, pending)| self.answer_due(pending));
        let retry = match self.phase {
            Phase::Failed(Retry::At(at) | Retry::ReadAt(at)) => Some(at).filter(|at| *at > now),
            _ => None,
        };
        let pinned = self.kv.pinned.map(|(_, until)| until);
        let Blocked {
            growth,
            shed,
            chunk,
        } = self.blocked;
        [
            overdue,
            retry,
            pinned,
            self.plans.confirm_at,
            growth,
            shed,
            chunk,
        ]
        .into_iter()
        .flatten()
        .min()
    }
}

impl Plans {
    /// Returns all requested plans that may be in force, in whole or in part.
    fn asked(&self) -> impl Iterator<Item = &EnginePlan> {
        self.pending
            .values()
            .map(|pending| &pending.plan)
            .chain(self.doubtful.values())
    }

    /// Removes the plans up to `revision`: its answer covers the earlier ones.
    pub(super) fn settled(&mut self, revision: u64) {
        self.pending.retain(|other, _| *other > revision);
        self.doubtful.retain(|other, _| *other > revision);
        if self.doubtful.is_empty() {
            self.confirm_at = None;
        }
    }

    /// Records that an unknown share of a plan is in force.
    pub(super) fn doubt(&mut self, revision: u64, plan: EnginePlan) {
        self.doubtful.retain(|_, other| *other != plan);
        self.doubtful.insert(revision, plan);
    }

    /// Records a failed plan. The engine processes plans in order: answers to earlier ones are lost, and completed
    /// steps of this one stay in force. The plan in force is requested again after `confirm_at`.
    pub(super) fn failed(&mut self, revision: u64, plan: EnginePlan, confirm_at: Timestamp) {
        let later = self.pending.split_off(&revision);
        let lost = std::mem::replace(&mut self.pending, later);
        let lost = lost
            .into_iter()
            .map(|(revision, pending)| (revision, pending.plan));
        self.doubtful.extend(lost);
        self.doubt(revision, plan);
        self.confirm_at = Some(confirm_at);
    }

    fn take_unconfirmed(&mut self, now: Timestamp) -> Option<EnginePlan> {
        self.confirm_at.take_if(|at| *at <= now)?;
        self.in_force.clone().filter(|_| self.pending.is_empty())
    }
}

/// Tokens ahead of a running answer whose space no shed takes. Our choice: two blocks, of which one is written by the
/// time it requests more, and a few spoken sentences if no more is available.
const ANSWER_AHEAD: u32 = 128;

/// Remedy after too many failures, or if the model was never read.
const AGAIN: &str = "`cotenant load` retries it";

/// Time for which a reserved capacity and the chunk in progress are not reclaimed again.
const PINNED_FOR: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    fn plan(kv: u32) -> EnginePlan {
        EnginePlan {
            resident: BTreeSet::new(),
            kv_capacity: Tokens::new(kv),
            prefill_chunk: Tokens::new(128),
            kv_type: KvType::F16,
        }
    }

    #[test]
    fn an_engine_without_a_model_has_nothing_to_load_after_a_failure() {
        let mut engine = EngineControl::new(Some(&EngineParams::default()));
        assert_eq!(engine.state(), EngineState::Loading);
        assert_eq!(engine.load_overdue_at(), Some(at(120_000)));
        assert_eq!(
            engine.failed("no file", Cure::Reload, None, at(1)),
            NextLoad::NothingToLoad
        );
        assert_eq!(
            (engine.state(), engine.load_overdue_at()),
            (EngineState::Failed, None)
        );
        assert!(!engine.waits_to_load(at(1_000_000)) && engine.returning().is_none());
    }

    #[test]
    fn a_plan_that_failed_is_in_doubt_until_a_later_one_is_answered() {
        let mut plans = Plans {
            in_force: Some(plan(512)),
            ..Plans::default()
        };
        plans.failed(3, plan(1024), at(11));
        assert_eq!(plans.asked().count(), 1);
        assert_eq!(plans.take_unconfirmed(at(10)), None, "not due yet");
        assert_eq!(plans.take_unconfirmed(at(11)), Some(plan(512)));
        plans.settled(4);
        assert_eq!(plans.asked().count(), 0);
    }

    #[test]
    fn a_pinned_capacity_ends_with_the_answer_or_with_its_time() {
        let mut engine = EngineControl::new(Some(&EngineParams::default()));
        engine.activity(1, KvUse::default());
        engine.pin_capacity(Tokens::new(2048), at(0));
        engine.blocked.chunk = Some(at(1000));
        engine.forget_past(at(999));
        assert!(engine.kv.pinned.is_some() && engine.blocked.chunk.is_some());
        engine.activity(0, KvUse::default());
        assert!(engine.kv.pinned.is_none() && engine.blocked.chunk.is_none());
        engine.pin_capacity(Tokens::new(2048), at(0));
        assert_eq!(engine.next_deadline(at(0)), Some(at(1000)));
        engine.forget_past(at(1000));
        assert_eq!(engine.next_deadline(at(1000)), None);
    }
}
