//! Reasons with their figures: why memory is reclaimed, a plan or a level changes, a worker stops, a holder is spared.
//!
//! A reason is a value; `journal/render` makes its sentence.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    kv_type::KvType,
    lease::{Class, LeaseName},
    pressure_level::PressureLevel,
    residency::{EnginePlan, ModelShape},
};
use cotenant_units::{Bytes, Tokens};

/// For what memory is reclaimed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReclaimReason {
    /// A request or a worker's start; `needed` beyond what it holds.
    Request {
        tenant: String,
        class: Class,
        needed: Bytes,
        free: Bytes,
        coming_back: Bytes,
        budget: Bytes,
    },
    /// The engine's floor, `missing` of which is not free.
    EngineFloor {
        missing: Bytes,
        floor: Bytes,
        free: Bytes,
    },
    Operator {
        asked: Bytes,
    },
    /// More is held than the budget, since that was lowered.
    OverBudget {
        over: Bytes,
        budget: Bytes,
    },
    /// Headroom below the watermark; `missing` more are to come back for a headroom of `wanted`.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlanReason {
    Shed {
        reclaim: ReclaimReason,
        gives: Bytes,
        change: PlanChange,
    },
    /// An operator wants KV kept as the type of the new plan.
    KvType { change: PlanChange },
    /// A request wants so much KV capacity.
    Capacity { wanted: Tokens, change: PlanChange },
    /// The full plan takes no more than the one in force.
    FullForNothing { now: PlanSize },
    /// Larger prefill chunks: reading `streamed` for each takes longer than computing it.
    Chunk {
        tokens: Tokens,
        before: Tokens,
        streamed: Bytes,
        change: PlanChange,
    },
    /// What was shed comes back; `above` is the headroom beyond the watermark and its hysteresis.
    Regrowth {
        gains: Bytes,
        free: Bytes,
        above: Bytes,
        change: PlanChange,
    },
    /// To know which plan is in force.
    Confirm,
    /// It was asked for before and not answered.
    Unanswered,
}

/// Why a worker is stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// To make room; it holds `held`.
    Reclaim {
        held: Bytes,
        reclaim: ReclaimReason,
    },
    /// It was notified that memory is short, and has not come down.
    IgnoredPressure(IgnoredPressure),
    /// It did not answer after its start.
    NotReady {
        within: Duration,
    },
    /// It has not ended within its grace, and is stopped again.
    NotStopped,
    /// It did not answer whether it has changed its variant.
    NotChanged {
        variant: String,
        within: Duration,
    },
    /// It reported a smaller variant and was not measured there.
    NotSmaller {
        used: Option<Bytes>,
        held: Bytes,
    },
    /// It has had nothing to do.
    Idle,
    /// It holds more than it may.
    Outgrown,
    Operator,
    /// An operator asked to restart it.
    Recycle,
    /// It was taken over with more than the budget has.
    OverBudget {
        held: Bytes,
        budget: Bytes,
    },
    /// The run before this one had asked it to stop.
    AskedBefore,
}

/// A worker that was notified that memory is short, and has not come down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LevelReason {
    /// All tasks stalled for `stalled_us` of `of_us`.
    AllStalled {
        headroom: Bytes,
        watermark: Bytes,
        stalled_us: u64,
        of_us: u64,
    },
    /// Samples in a row show allocations that stalled, or scanned pages themselves.
    StallsAgain {
        headroom: Bytes,
        watermark: Bytes,
        stalls: u64,
        scans: u64,
    },
    /// File pages are read again, so many per second, for so long.
    Refaults {
        headroom: Bytes,
        per_s: u64,
        lasted: Duration,
    },
    /// The kernel refused so many allocations of CMA.
    CmaRefused { headroom: Bytes, refused: u64 },
    /// Below the watermark, and confirmed.
    Below {
        headroom: Bytes,
        watermark: Bytes,
        by: Confirmation,
    },
    /// Above the watermark of the level for longer than the dwell.
    Above {
        headroom: Bytes,
        lasted: Duration,
        dwell: Duration,
    },
}

/// Why one sample below a watermark is believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Confirmation {
    /// The sample before it, with this headroom, was below as well.
    SecondSample {
        before: Bytes,
    },
    /// The first one below the lower watermark.
    FirstSample {
        before: Bytes,
    },
    /// At the present slope `left` is left in `ahead_ms`.
    Slope {
        lost: Bytes,
        took_ms: u64,
        left: Bytes,
        ahead_ms: u64,
    },
    /// PSI `some`.
    Stalled {
        stalled_us: u64,
        of_us: u64,
    },
    /// Allocations that stalled.
    Stalls {
        count: u64,
    },
    /// Pages that were scanned by those who allocate.
    Scans {
        pages: u64,
    },
    SwapIns {
        pages: u64,
        took_ms: u64,
    },
    Refaults {
        pages: u64,
        took_ms: u64,
    },
}

/// Why a holder is not asked to give anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpareReason {
    AsUrgent(Class),
    MoreUrgent(Class),
    /// It is under a target already.
    ComingDown {
        to: Bytes,
    },
    Ending,
    /// The engine is loading, or failed to shed a moment ago.
    EngineBusy,
    /// The engine has no KV blocks to give, and its layers cost more than the level may.
    KeepsLayers,
    /// The engine has given all that it can.
    AllGiven,
    /// Holders of this class give at Critical only.
    BeforeCritical(Class),
    AtLeast(Bytes),
    Pinned,
    Changing,
    Busy,
    WaitsToGrow,
    /// Workers give at Critical only.
    WorkersBeforeCritical,
    /// The level is Critical still, and headroom is above its watermark again.
    Recovered,
    /// A worker that could be stopped; others give what is missing now.
    OthersSuffice,
    /// A worker that was stopped to make room and was needed again at once; it is not stopped for so long.
    WantedAgain {
        remaining: Duration,
    },
}

/// A holder, what it holds, and what of that can be reclaimed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    pub holder: LeaseName,
    pub held: Bytes,
    pub gives: Bytes,
    pub spared: Option<SpareReason>,
}
