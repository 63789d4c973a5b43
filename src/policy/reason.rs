//! Reasons with their figures: why memory is reclaimed, a plan or a level changes, a worker stops, a holder is spared.
//!
//! A reason is a value; its sentence stands beside each variant.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    kv_type::KvType,
    lease::{Class, LeaseName},
    pressure_level::PressureLevel,
    residency::{EnginePlan, ModelShape},
};
use cotenant_units::{Bytes, Tokens};

/// For what memory is reclaimed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum ReclaimReason {
    /// A request or a worker's start; `needed` beyond what it holds.
    #[error(
        "`{tenant}` ({class}) needs {needed} more, {free} is free and {coming_back} is on its way back, of a \
         {budget} budget"
    )]
    Request {
        tenant: String,
        class: Class,
        needed: Bytes,
        free: Bytes,
        coming_back: Bytes,
        budget: Bytes,
    },
    /// The engine's floor, `missing` of which is not free.
    #[error("the engine needs {missing} more for its floor of {floor}, {free} is free")]
    EngineFloor {
        missing: Bytes,
        floor: Bytes,
        free: Bytes,
    },
    #[error("an operator asked for {asked}")]
    Operator { asked: Bytes },
    /// More is held than the budget, since that was lowered.
    #[error("{over} more is held than the budget, which was lowered to {budget}")]
    OverBudget { over: Bytes, budget: Bytes },
    /// Headroom below the watermark; `missing` more are to come back for a headroom of `wanted`.
    #[error(
        "{level}: headroom {headroom} is below {watermark}, {missing} more are to come back for {wanted}"
    )]
    Pressure {
        level: PressureLevel,
        headroom: Bytes,
        watermark: Bytes,
        missing: Bytes,
        wanted: Bytes,
    },
}

/// A plan in figures that do not need its model's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanSize {
    /// Layers all of whose parts are in memory, and all layers.
    pub resident: (u32, u32),
    pub kv_capacity: Tokens,
    pub kv_type: KvType,
    pub bytes: Bytes,
}

impl PlanSize {
    /// The size of a plan; without bytes and layers while the shape is unknown.
    #[must_use]
    pub fn of(shape: Option<&ModelShape>, plan: &EnginePlan) -> Self {
        Self {
            resident: shape.map_or((0, 0), |shape| {
                (shape.resident_layers(plan), shape.layer_count())
            }),
            kv_capacity: plan.kv_capacity,
            kv_type: plan.kv_type,
            bytes: shape.map_or(Bytes::ZERO, |shape| shape.plan_bytes(plan)),
        }
    }
}

/// From which plan to which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("from {from} to {to}")]
pub struct PlanChange {
    pub from: PlanSize,
    pub to: PlanSize,
}

impl PlanChange {
    pub(super) fn of(shape: Option<&ModelShape>, from: &EnginePlan, to: &EnginePlan) -> Self {
        Self {
            from: PlanSize::of(shape, from),
            to: PlanSize::of(shape, to),
        }
    }
}

/// Why the engine gets another plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum PlanReason {
    #[error("{reclaim}; the engine gives up {gives}: {change}")]
    Shed {
        reclaim: ReclaimReason,
        gives: Bytes,
        change: PlanChange,
    },
    /// An operator wants KV kept as the type of the new plan.
    #[error("an operator wants KV kept as {}: {change}", change.to.kv_type)]
    KvType { change: PlanChange },
    /// A request wants so much KV capacity.
    #[error("a request wants {wanted} tokens of KV capacity: {change}")]
    Capacity { wanted: Tokens, change: PlanChange },
    /// The full plan takes no more than the one in force.
    #[error("the full plan takes no more than {now}")]
    FullForNothing { now: PlanSize },
    /// Larger prefill chunks: reading `streamed` for each takes longer than computing it.
    #[error(
        "prompts are read in chunks of {tokens} tokens instead of {before}, for reading the {streamed} that each \
         streams takes longer than computing: {change}"
    )]
    Chunk {
        tokens: Tokens,
        before: Tokens,
        streamed: Bytes,
        change: PlanChange,
    },
    /// What was shed comes back; `above` is the headroom beyond the watermark and its hysteresis.
    #[error(
        "growing back by {gains}: {free} is free, headroom {above} above the watermark and its hysteresis; {change}"
    )]
    Regrowth {
        gains: Bytes,
        free: Bytes,
        above: Bytes,
        change: PlanChange,
    },
    /// To know which plan is in force.
    #[error("to know what is in force")]
    Confirm,
    /// It was asked for before and not answered.
    #[error("asked before, without an answer")]
    Unanswered,
}

/// Why a worker is stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// To make room; it holds `held`.
    #[error("for its {held}: {reclaim}")]
    Reclaim { held: Bytes, reclaim: ReclaimReason },
    /// It was asked to come down for want of memory, and has not.
    #[serde(alias = "not_smaller")]
    #[error("{0}")]
    IgnoredPressure(IgnoredPressure),
    /// It did not answer after its start.
    #[error("it did not answer within {:.1} s", within.as_secs_f64())]
    NotReady { within: Duration },
    /// It has not ended within its grace, and is stopped again.
    #[error("it has not ended within its grace, and is stopped again")]
    NotStopped,
    /// It did not answer whether it has changed its variant.
    #[error("it did not answer within {:.1} s whether it is `{variant}`", within.as_secs_f64())]
    NotChanged { variant: String, within: Duration },
    /// It has had nothing to do.
    #[error("it has had nothing to do")]
    Idle,
    /// It holds more than it may.
    #[error("it has outgrown what it may hold")]
    Outgrown,
    #[error("an operator asked for it")]
    Operator,
    /// An operator asked to restart it.
    #[error("an operator asked to restart it")]
    Recycle,
    /// It was taken over with more than the budget has.
    #[error("it holds {held}, and the budget is {budget}")]
    OverBudget { held: Bytes, budget: Bytes },
    /// The run before this one had asked it to stop.
    #[error("it was asked to stop before the supervisor ended")]
    AskedBefore,
}

/// A worker that was notified that memory is short, or has confirmed a smaller variant, and has not come down.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(default)]
#[error(
    "worker `{worker}` (pid {pid}) {}, its target is {target}, {:.1} s past the deadline: memory is short and it has \
     not come down; nothing is credited",
    still_uses(*used),
    late.as_secs_f64()
)]
pub struct IgnoredPressure {
    pub worker: String,
    pub pid: u32,
    /// `None` where it cannot be measured.
    pub used: Option<Bytes>,
    pub target: Bytes,
    /// How long the deadline is over.
    pub late: Duration,
}

/// Why the pressure level changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum LevelReason {
    /// All tasks stalled for `stalled_us` of `of_us`.
    #[error(
        "headroom {headroom} is below {watermark}, and all tasks stalled {stalled_us} µs of {of_us} µs"
    )]
    AllStalled {
        headroom: Bytes,
        watermark: Bytes,
        stalled_us: u64,
        of_us: u64,
    },
    /// Samples in a row show allocations that stalled, or scanned pages themselves.
    #[error(
        "headroom {headroom} is below {watermark}, and {stalls} allocations stalled and {scans} pages were scanned \
         by their callers, again"
    )]
    StallsAgain {
        headroom: Bytes,
        watermark: Bytes,
        stalls: u64,
        scans: u64,
    },
    /// File pages are read again, so many per second, for so long.
    #[error(
        "headroom {headroom} is not plentiful, and {per_s} file pages are read again per second for {:.1} s",
        lasted.as_secs_f64()
    )]
    Refaults {
        headroom: Bytes,
        per_s: u64,
        lasted: Duration,
    },
    /// The kernel refused so many allocations of CMA.
    #[error("headroom {headroom} is not plentiful, and CMA refused {refused} allocations")]
    CmaRefused { headroom: Bytes, refused: u64 },
    /// Below the watermark, and confirmed.
    #[error("headroom {headroom} is below {watermark} ({by})")]
    Below {
        headroom: Bytes,
        watermark: Bytes,
        by: Confirmation,
    },
    /// Above the watermark of the level for longer than the dwell.
    #[error(
        "headroom {headroom} and above the watermark for {:.1} s, dwell {:.1} s",
        lasted.as_secs_f64(),
        dwell.as_secs_f64()
    )]
    Above {
        headroom: Bytes,
        lasted: Duration,
        dwell: Duration,
    },
}

/// Why one sample below a watermark is believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Confirmation {
    /// The sample before it, with this headroom, was below as well.
    #[error("second sample in a row, {before} before")]
    SecondSample { before: Bytes },
    /// The first one below the lower watermark.
    #[error("first sample below the lower watermark, {before} before")]
    FirstSample { before: Bytes },
    /// At the present slope `left` is left in `ahead_ms`.
    #[error("{lost} lost in {took_ms} ms, so {left} is left in {ahead_ms} ms")]
    Slope {
        lost: Bytes,
        took_ms: u64,
        left: Bytes,
        ahead_ms: u64,
    },
    /// PSI `some`.
    #[error("PSI some stalled {stalled_us} µs of {of_us} µs")]
    Stalled { stalled_us: u64, of_us: u64 },
    /// Allocations that stalled.
    #[error("{count} allocations stalled")]
    Stalls { count: u64 },
    /// Pages that were scanned by those who allocate.
    #[error("{pages} pages scanned by those who allocate")]
    Scans { pages: u64 },
    #[error("{pages} pages swapped in within {took_ms} ms")]
    SwapIns { pages: u64, took_ms: u64 },
    #[error("{pages} file pages refaulted in {took_ms} ms")]
    Refaults { pages: u64, took_ms: u64 },
}

/// Why a holder is not asked to give anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum SpareReason {
    #[error("{0} is as urgent")]
    AsUrgent(Class),
    #[error("{0} is more urgent")]
    MoreUrgent(Class),
    /// It is under a target already.
    #[error("is coming down to {to} already")]
    ComingDown { to: Bytes },
    #[error("is ending already")]
    Ending,
    /// The engine is loading, or failed to shed a moment ago.
    #[error("is loading, or failed to shed a moment ago")]
    EngineBusy,
    /// The engine has no KV blocks to give, and its layers cost more than the level may.
    #[error("has no KV blocks to give, and its layers cost more than this level may")]
    KeepsLayers,
    /// The engine has given all that it can.
    #[error("has given up all that it can")]
    AllGiven,
    /// Holders of this class, or workers, give only while the headroom is Critical.
    #[error("{0} gives only while the headroom is Critical")]
    BeforeCritical(Class),
    #[error("is at its least of {0}")]
    AtLeast(Bytes),
    #[error("is pinned")]
    Pinned,
    #[error("is changing")]
    Changing,
    #[error("is busy")]
    Busy,
    /// By a rule of an older version, in its journal.
    #[serde(
        rename = "recovered",
        alias = "workers_before_critical",
        alias = "waits_to_grow",
        alias = "others_suffice"
    )]
    #[error("was not asked by a rule of an older version")]
    Older,
    /// A worker that was stopped to make room and was needed again at once; it is not stopped for so long.
    #[error(
        "was wanted again at once when it was stopped; it is not stopped for {:.0} s",
        remaining.as_secs_f64()
    )]
    WantedAgain { remaining: Duration },
}

/// A holder, what it holds, and what of that can be reclaimed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    pub holder: LeaseName,
    pub held: Bytes,
    pub gives: Bytes,
    pub spared: Option<SpareReason>,
}

/// `3 of 8 resident layers, 2048 KV tokens, 41 MiB`; tokens that are not kept as `f16` with their type.
impl fmt::Display for PlanSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ((resident, layers), tokens) = (self.resident, self.kv_capacity);
        write!(
            f,
            "{resident} of {layers} resident layers, {tokens} KV tokens"
        )?;
        if self.kv_type != KvType::F16 {
            write!(f, " as {}", self.kv_type)?;
        }
        write!(f, ", {}", self.bytes)
    }
}

/// What a holder is measured to use.
pub(super) fn still_uses(used: Option<Bytes>) -> String {
    used.map_or_else(
        || "cannot be measured".to_owned(),
        |used| format!("still uses {used}"),
    )
}
