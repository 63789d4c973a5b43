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

/// Purpose of a reclaim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum ReclaimReason {
    /// A request or a worker's start; `needed` beyond the bytes it holds.
    #[error(
        "`{tenant}` ({class}) needs {needed} more, {free} is free and {coming_back} is being released, of a \
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
    /// The engine's floor; `missing` bytes of it are not free.
    #[error("the engine needs {missing} more for its floor of {floor}, {free} is free")]
    EngineFloor {
        missing: Bytes,
        floor: Bytes,
        free: Bytes,
    },
    #[error("an operator asked for {asked}")]
    Operator { asked: Bytes },
    /// The budget was lowered below `held`.
    #[error("{over} held beyond the budget, which was lowered to {budget}")]
    OverBudget { over: Bytes, budget: Bytes },
    /// Headroom below the watermark; `missing` bytes restore a headroom of `wanted`.
    #[error(
        "{level}: headroom {headroom} is below {watermark}, {missing} more to reclaim for {wanted}"
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
    /// Completely resident layers, and all layers.
    pub resident: (u32, u32),
    pub kv_capacity: Tokens,
    pub kv_type: KvType,
    pub bytes: Bytes,
}

impl PlanSize {
    /// Returns the size of a plan; without bytes and layers while the shape is unknown.
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

/// Old and new plan.
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

/// Reason for another plan of the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum PlanReason {
    #[error("{reclaim}; the engine sheds {gives}: {change}")]
    Shed {
        reclaim: ReclaimReason,
        gives: Bytes,
        change: PlanChange,
    },
    /// An operator requested the KV type of the new plan.
    #[error("an operator requests the KV type {}: {change}", change.to.kv_type)]
    KvType { change: PlanChange },
    /// A request needs `wanted` tokens of KV capacity.
    #[error("a request needs {wanted} tokens of KV capacity: {change}")]
    Capacity { wanted: Tokens, change: PlanChange },
    /// The full plan takes no more than the one in force.
    #[error("the full plan takes no more than {now}")]
    FullForNothing { now: PlanSize },
    /// Larger prefill chunks: reading `streamed` for each takes longer than computing it.
    #[error(
        "prefill in chunks of {tokens} tokens instead of {before}: reading the {streamed} that each streams takes \
         longer than computing: {change}"
    )]
    Chunk {
        tokens: Tokens,
        before: Tokens,
        streamed: Bytes,
        change: PlanChange,
    },
    /// Regrowth; `above` is the headroom beyond the watermark and its hysteresis.
    #[error(
        "growing back by {gains}: {free} is free, headroom {above} above the watermark and its hysteresis; {change}"
    )]
    Regrowth {
        gains: Bytes,
        free: Bytes,
        above: Bytes,
        change: PlanChange,
    },
    /// Confirmation of the plan in force.
    #[error("to confirm the plan in force")]
    Confirm,
    /// An earlier request was not answered.
    #[error("requested before, without a reply")]
    Unanswered,
}

/// Why a worker is stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// To make room; it holds `held`.
    #[error("for its {held}: {reclaim}")]
    Reclaim { held: Bytes, reclaim: ReclaimReason },
    /// It was asked to shrink because of a shortage, and did not.
    #[serde(alias = "not_smaller")]
    #[error("{0}")]
    IgnoredPressure(IgnoredPressure),
    /// It was not ready in time after its start.
    #[error("it did not respond within {:.1} s", within.as_secs_f64())]
    NotReady { within: Duration },
    /// It did not end within its grace, and is stopped again.
    #[error("it did not stop within its grace, and is stopped again")]
    NotStopped,
    /// It did not confirm a change of variant.
    #[error("it did not confirm `{variant}` within {:.1} s", within.as_secs_f64())]
    NotChanged { variant: String, within: Duration },
    /// It was idle.
    #[error("it was idle")]
    Idle,
    /// It holds more than permitted.
    #[error("it exceeded its limit")]
    Outgrown,
    #[error("an operator asked for it")]
    Operator,
    /// An operator requested a restart.
    #[error("an operator asked to restart it")]
    Recycle,
    /// It was taken over with more than the budget.
    #[error("it holds {held}, and the budget is {budget}")]
    OverBudget { held: Bytes, budget: Bytes },
    /// The previous run had asked it to stop.
    #[error("its stop was requested before the supervisor ended")]
    AskedBefore,
}

/// A worker that was notified of a shortage, or confirmed a smaller variant, and did not shrink.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(default)]
#[error(
    "worker `{worker}` (pid {pid}) {}, its target is {target}, {:.1} s past the deadline: memory is short and it did \
     not shrink; nothing is credited",
    still_uses(*used),
    late.as_secs_f64()
)]
pub struct IgnoredPressure {
    pub worker: String,
    pub pid: u32,
    /// `None` if it cannot be measured.
    pub used: Option<Bytes>,
    pub target: Bytes,
    /// Time since the deadline.
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
    /// Consecutive samples show stalled allocations, or direct page scans.
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
    /// File pages are refaulted at `per_s` per second, for `lasted`.
    #[error(
        "headroom {headroom} is not plentiful, and {per_s} file pages refault per second for {:.1} s",
        lasted.as_secs_f64()
    )]
    Refaults {
        headroom: Bytes,
        per_s: u64,
        lasted: Duration,
    },
    /// The kernel refused `refused` CMA allocations.
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

/// Why a sample below a watermark is trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Confirmation {
    /// The previous sample, with this headroom, was also below.
    #[error("second sample in a row, {before} before")]
    SecondSample { before: Bytes },
    /// The first sample below the lower watermark.
    #[error("first sample below the lower watermark, {before} before")]
    FirstSample { before: Bytes },
    /// At the present slope, `left` remains in `ahead_ms`.
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
    /// Stalled allocations.
    #[error("{count} allocations stalled")]
    Stalls { count: u64 },
    /// Pages scanned by allocating tasks.
    #[error("{pages} pages scanned by allocating tasks")]
    Scans { pages: u64 },
    #[error("{pages} pages swapped in within {took_ms} ms")]
    SwapIns { pages: u64, took_ms: u64 },
    #[error("{pages} file pages refaulted in {took_ms} ms")]
    Refaults { pages: u64, took_ms: u64 },
}

/// Why a holder is spared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum SpareReason {
    #[error("{0} is as urgent")]
    AsUrgent(Class),
    #[error("{0} is more urgent")]
    MoreUrgent(Class),
    /// It already has a lower target.
    #[error("is already shrinking to {to}")]
    ComingDown { to: Bytes },
    #[error("is already ending")]
    Ending,
    /// The engine is loading, or failed to shed recently.
    #[error("is loading, or its last shed failed")]
    EngineBusy,
    /// The engine has no KV blocks to give, and its layers cost more than the level permits.
    #[error("has no KV blocks to shed, and its layers exceed the cost allowed at this level")]
    KeepsLayers,
    /// The engine has nothing left to give.
    #[error("has shed all that it can")]
    AllGiven,
    /// Holders of this class, or workers, are reclaimed only while the headroom is Critical.
    #[error("{0} is reclaimed only while the headroom is Critical")]
    BeforeCritical(Class),
    #[error("is at its minimum of {0}")]
    AtLeast(Bytes),
    #[error("is pinned")]
    Pinned,
    #[error("is changing")]
    Changing,
    #[error("is busy")]
    Busy,
    /// Rule of an older version, in its journal.
    #[serde(
        rename = "recovered",
        alias = "workers_before_critical",
        alias = "waits_to_grow",
        alias = "others_suffice"
    )]
    #[error("was spared by a rule of an older version")]
    Older,
    /// A worker that was needed at once after a stop to make room; not stopped for the remaining time.
    #[error(
        "was needed again right after its last stop; it is not stopped for {:.0} s",
        remaining.as_secs_f64()
    )]
    WantedAgain { remaining: Duration },
}

/// A holder, its bytes, and the reclaimable part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    pub holder: LeaseName,
    pub held: Bytes,
    pub gives: Bytes,
    pub spared: Option<SpareReason>,
}

/// `3 of 8 resident layers, 2048 KV tokens, 41 MiB`; with the KV type unless it is `f16`.
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

/// Returns the measured use of a holder, for messages.
pub(super) fn still_uses(used: Option<Bytes>) -> String {
    used.map_or_else(
        || "cannot be measured".to_owned(),
        |used| format!("still uses {used}"),
    )
}
