//! Decisions with their figures, one enum for each machine.
//!
//! A decision is a value, so that tests, metrics and `cotenant why` match on it; no wording is part of a decision.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    denial::Denial,
    growth_wait::GrowthWait,
    lease::{Class, LeaseName, TargetAnswer},
    page_pool::Release,
    params::MachineMemory,
    pressure_level::PressureLevel,
    reason::{IgnoredPressure, PlanSize, ReclaimReason},
    reboot::RebootReason,
    residency::FloorError,
    snapshot::{WorkerState, WorkerWait},
};
use cotenant_units::{Bytes, Tokens};

/// A decision of one of the machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// About a lease that is held or ends.
    Lease(LeaseDecision),
    /// About a request that waits, is granted or denied.
    Admission(AdmissionDecision),
    /// About the engine's load, plans and failures.
    Engine(EngineDecision),
    /// About a worker's start, size and end.
    Worker(WorkerDecision),
    /// About what grows back, and when.
    Growth(GrowthDecision),
    /// About memory without a holder.
    Memory(MemoryDecision),
}

impl Decision {
    /// Whether it ends a service until something changes: a log shows it as an error.
    #[must_use]
    pub const fn is_error(&self) -> bool {
        use NextLoad as Next;
        matches!(
            self,
            Self::Engine(EngineDecision::Gone {
                next: Next::NeedsChange | Next::GivenUp | Next::NothingToLoad,
                ..
            })
        )
    }

    /// Whether something has not gone as it should: a log shows it as a warning.
    #[must_use]
    pub const fn is_warning(&self) -> bool {
        use {EngineDecision as Engine, LeaseDecision as Lease, WorkerDecision as Worker};
        match self {
            Self::Lease(decision) => matches!(
                decision,
                Lease::NotBooked { .. }
                    | Lease::BeyondLease { .. }
                    | Lease::ClosedUnaccounted { .. }
                    | Lease::NotTakenOver { .. }
            ),
            Self::Engine(decision) => matches!(
                decision,
                Engine::FloorExceedsBudget { .. }
                    | Engine::Short { .. }
                    | Engine::NotApplied { .. }
                    | Engine::Gone { .. }
                    | Engine::Unconfirmed
                    | Engine::Unanswered { .. }
            ),
            Self::Worker(decision) => matches!(
                decision,
                Worker::Unresponsive { .. }
                    | Worker::GivenUp { .. }
                    | Worker::NeedsOperator { .. }
                    | Worker::Outgrown { .. }
                    | Worker::PeakRaised { .. }
                    | Worker::IgnoresPressure(_)
                    | Worker::NotSmaller { .. }
            ),
            Self::Memory(decision) => {
                matches!(
                    decision,
                    MemoryDecision::RebootAdvised(_) | MemoryDecision::TooSmall { .. }
                )
            }
            Self::Admission(_) | Self::Growth(_) => false,
        }
    }
}

macro_rules! wrapped {
    ($($machine:ident($decision:ident)),* $(,)?) => {
        $(impl From<$decision> for Decision {
            fn from(decision: $decision) -> Self {
                Self::$machine(decision)
            }
        })*
    };
}

wrapped!(
    Lease(LeaseDecision),
    Admission(AdmissionDecision),
    Engine(EngineDecision),
    Worker(WorkerDecision),
    Growth(GrowthDecision),
    Memory(MemoryDecision),
);

/// A decision about a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseDecision {
    /// A lease could not be booked.
    NotBooked {
        tenant: String,
        asked: Bytes,
        free: Bytes,
    },
    /// The process of the holder has ended, and its memory is credited.
    HolderGone {
        /// The lease by which its end was noticed.
        lease: LeaseName,
        /// How many leases it had, that one included.
        leases: usize,
        free: Bytes,
        budget: Bytes,
    },
    /// A holder has answered its target; nothing is credited for that.
    Answered {
        lease: LeaseName,
        answer: TargetAnswer,
        claimed: Option<Bytes>,
    },
    /// A holder has answered a target that is not in force.
    AnswerIgnored {
        lease: LeaseName,
        nonce: u64,
        current: Option<u64>,
    },
    /// A holder uses more than it holds.
    BeyondLease {
        /// As whom it is measured.
        holder: String,
        used: Bytes,
        held: Bytes,
        /// What is free; what it uses beyond is not.
        free: Bytes,
    },
    /// A target was measured to be reached, and what that freed is credited.
    Reduced {
        lease: LeaseName,
        stays: Bytes,
        freed: Bytes,
        took: Duration,
        used: Bytes,
        free: Bytes,
        budget: Bytes,
    },
    /// A holder wanted to come down and was not measured there: it keeps what it holds.
    WishNotSeen {
        lease: LeaseName,
        target: Bytes,
        used: Option<Bytes>,
    },
    /// An ended lease is off the book by a reading.
    Closed {
        lease: LeaseName,
        held: Bytes,
        /// What of it is still used, and unaccounted.
        rest: Bytes,
        free: Bytes,
        budget: Bytes,
    },
    /// An ended lease is off the book by a sample, since its holder cannot be measured.
    ClosedUnmeasured { lease: LeaseName, held: Bytes },
    /// An ended lease is off the book, and its bytes are unaccounted: no reading was had in time.
    ClosedUnaccounted { lease: LeaseName, held: Bytes },
    /// An ended lease keeps what its holder may still take, since that has not acknowledged the end.
    KeptUntilAcknowledged {
        lease: LeaseName,
        bytes: Bytes,
        /// For how long at most: the rest of its term.
        at_most: Duration,
        free: Bytes,
        budget: Bytes,
    },
    /// Its holder gives it back, or another process on the holder's behalf; it is free once measured.
    Released { lease: LeaseName, held: Bytes },
    /// Its end is acknowledged, by the holder or on its behalf by the user `by`.
    EndAcknowledged {
        lease: LeaseName,
        by: Option<u32>,
        held: Bytes,
    },
    /// Leases and workers of the run before are taken over.
    TakenOver {
        leases: usize,
        workers: usize,
        held: Bytes,
        budget: Bytes,
    },
    /// A book of an earlier run comes too late, and is not taken over.
    BookTooLate,
    /// A lease of the run before is not taken over, since a worker has its name now.
    NameTaken { lease: LeaseName },
    /// A lease of the run before is not taken over, since it does not fit.
    NotTakenOver {
        lease: LeaseName,
        held: Bytes,
        free: Bytes,
        budget: Bytes,
    },
}

/// Why a lease ends against the will of its holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseEnd {
    /// It was not renewed within its term.
    Expired { term: Duration },
    /// Another process of its user, or an operator, released it.
    ReleasedByOther { uid: u32 },
    /// Its holder has not come down to its target in time.
    NotReduced {
        target: Bytes,
        /// How long the deadline of the target is over.
        late: Duration,
        cause: NotReduced,
    },
}

/// How it is known that a holder has not come down to its target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NotReduced {
    /// It has not answered.
    Unanswered,
    /// It has refused.
    Refused { reason: String },
    /// A reading that is newer than its answer shows more.
    Measured { used: Bytes, claim: Claim },
    /// It has answered, and no reading since then could be taken.
    Unmeasurable { claim: Claim },
}

/// The claim of a holder about a target that it has not been seen to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Claim {
    /// The memory has been given back.
    Applied,
    /// It needs more time.
    Deferred,
    /// It asked for less by itself.
    Resized,
}

/// A decision about requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdmissionDecision {
    /// Nothing new is admitted from now on.
    DrainBegun,
    /// Requests are admitted again.
    DrainEnded,
    /// A lease is granted.
    Granted {
        lease: LeaseName,
        bytes: Bytes,
        waited: Duration,
        free: Bytes,
        budget: Bytes,
    },
    /// A lease holds more, as its holder asked.
    Grown {
        lease: LeaseName,
        from: Bytes,
        to: Bytes,
        waited: Duration,
        free: Bytes,
        budget: Bytes,
    },
    /// The first in the queue waits for more than can be reclaimed now.
    Waits { tenant: String, denial: Denial },
    /// A request waits for what it cannot have while others keep what they hold; it does not block the queue.
    OutOfReach { tenant: String, denial: Denial },
    /// A worker needs more than it can have while others keep what they hold.
    StartOutOfReach { worker: String, wait: WorkerWait },
    /// A request is served as a more urgent class, because it has waited for long.
    Aged {
        tenant: String,
        class: Class,
        waited: Duration,
        rank: Class,
    },
    /// A request was served as the most urgent class for its time, and is served as its own again.
    TurnOver { tenant: String, class: Class },
    /// A request was withdrawn.
    Withdrawn { tenant: String },
}

/// A decision about the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineDecision {
    /// The model is not loaded, since no memory that comes free would suffice.
    FloorExceedsBudget { error: FloorError },
    /// A model was inspected, and no engine is configured.
    NotConfigured { model: String },
    /// A model was inspected while one is loaded, and is ignored.
    AlreadyLoaded { model: String },
    /// The memory of a model is known.
    Inspected {
        model: String,
        layers: u32,
        /// KV of one token.
        token: Bytes,
        full: Bytes,
    },
    /// A model that failed is loaded again after a wait.
    LoadDelayed { wait: Duration },
    /// The floor does not fit now.
    WaitsForMemory {
        error: FloorError,
        free: Bytes,
        /// Kept for workers.
        kept: Bytes,
        headroom: Bytes,
        watermark: Bytes,
    },
    /// The model is loaded.
    Loading {
        plan: PlanSize,
        full: Bytes,
        free: Bytes,
        /// Kept for workers, of what is free.
        kept: Bytes,
    },
    /// A report about a plan that is not waited for is ignored.
    StrayPlan { revision: u64, stray: StrayPlan },
    /// A plan is in force.
    Applied {
        revision: u64,
        outcome: PlanOutcome,
        plan: Option<PlanSize>,
        used: Bytes,
        free: Bytes,
        took: Duration,
    },
    /// A shed gave back less than it promised.
    Short {
        promised: Bytes,
        credited: Bytes,
        freed: Bytes,
    },
    /// A plan could not be applied.
    NotApplied {
        revision: u64,
        reason: String,
        plan: PlanSize,
        in_force: Option<PlanSize>,
    },
    /// The engine is gone, and `freed` off the book.
    Gone {
        reason: String,
        freed: Bytes,
        next: NextLoad,
    },
    /// The running answer has lost its oldest tokens, as its request allows.
    ContextLost { tokens: u32, in_all: u32 },
    /// The plan in force is unknown, and the last known one is asked for.
    Unconfirmed,
    /// A plan was not answered in time, and is asked for again.
    Unanswered { revision: u64, after: Duration },
}

/// Why a report about a plan is ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StrayPlan {
    /// The engine holds no lease.
    NoLease,
    /// It is of an earlier load.
    EarlierLoad,
    /// It failed, and is not waited for any more.
    Failed { reason: String },
}

/// The effect of a plan that is in force; `freed` as the kernel shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlanOutcome {
    /// The engine is ready.
    Ready,
    Shed {
        credited: Bytes,
        freed: Bytes,
        /// Given up, and never touched.
        untouched: Bytes,
    },
    /// A prompt's larger chunk has ended, and smaller ones follow.
    ChunkEnded {
        credited: Bytes,
        freed: Bytes,
    },
    Grown,
    /// It is what was in force.
    Confirmed,
}

/// When an engine that is gone is loaded again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NextLoad {
    In(Duration),
    /// Its file is read again.
    ReadIn(Duration),
    /// When the file or the settings have changed.
    NeedsChange,
    /// It failed too often.
    GivenUp,
    /// When the disk has answered; reads that hang keep so much.
    WaitsForDisk {
        left: Bytes,
    },
    NothingToLoad,
}

/// A decision about a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerDecision {
    /// It is started, and its peak is held for it.
    Starting {
        worker: String,
        peak: Bytes,
        free: Bytes,
        budget: Bytes,
    },
    /// It runs and answers nothing, and is ended.
    Unresponsive {
        worker: String,
        pid: u32,
        evidence: String,
    },
    /// It answers.
    Ready {
        worker: String,
        pid: u32,
        took: Duration,
    },
    /// A report does not fit its state, and is ignored.
    Ignored { worker: String, report: StrayReport },
    /// It died of something that an operator can cure.
    Died {
        /// The end in one sentence, by its death certificate.
        sentence: String,
        remedy: String,
    },
    /// Its process is gone, and its memory is credited.
    Exited {
        worker: String,
        cause: String,
        /// Whether it had been asked to.
        expected: bool,
        freed: Bytes,
        free: Bytes,
    },
    /// It has failed, and is started again after a wait.
    Restarting {
        worker: String,
        wait: Duration,
        failures: usize,
        /// Failures within the window that are answered with a restart.
        intensity: u32,
        window: Duration,
    },
    /// It has failed too often, and is not started again.
    GivenUp {
        worker: String,
        failures: usize,
        window: Duration,
    },
    /// It would fail in the same way again, and is not started again.
    NeedsOperator { worker: String },
    /// A request starts it.
    Woken { worker: String },
    /// It is asked into another variant.
    Changing {
        worker: String,
        variant: String,
        cause: ChangeCause,
    },
    /// It was measured at its size, and its lease comes down to it.
    Settled {
        worker: String,
        used: Bytes,
        stays: Bytes,
        freed: Bytes,
        free: Bytes,
    },
    /// It uses more than it may: it takes nothing new, and is started again when its requests have ended.
    Outgrown {
        worker: String,
        used: Bytes,
        /// Above this it is started again.
        above: Bytes,
        held: Bytes,
        requests: u32,
    },
    /// It has used more than it is set to need at most, and from now on its own peak counts.
    PeakLearned {
        worker: String,
        variant: Option<String>,
        peak: Bytes,
        /// What it is set to need.
        configured: Bytes,
    },
    /// It was killed at the limit of its control group, so that more has to be free for its next start.
    PeakRaised {
        worker: String,
        had: Bytes,
        needs: Bytes,
    },
    /// It was notified that memory is short, has not come down, and keeps what it holds since it is at work.
    IgnoresPressure(IgnoredPressure),
    /// It reported a smaller variant, is not measured there, and holds what it held.
    NotSmaller {
        worker: String,
        used: Option<Bytes>,
        held: Bytes,
    },
    /// It may hold its steady size again.
    Restored { worker: String, steady: Bytes },
    /// It has changed its variant.
    Resized {
        worker: String,
        variant: String,
        took: Duration,
        used: Option<Bytes>,
        held: Bytes,
    },
    /// It could not change its variant.
    VariantKept {
        worker: String,
        variant: String,
        error: String,
        used: Option<Bytes>,
    },
    /// It has outlived the run before, and is taken over.
    TakenOver {
        worker: String,
        pid: u32,
        held: Bytes,
    },
}

/// Why a worker is asked into another variant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeCause {
    /// A client or an operator wants it, or it gets back what it had.
    Asked,
    /// To make room.
    Room { reason: ReclaimReason },
    /// It is idle.
    Idle { idle: Duration },
}

/// A report of a worker that does not fit its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StrayReport {
    /// It answers, and was not being started.
    Ready { pid: u32, state: WorkerState },
    /// It has exited, and did not run.
    Exited { cause: String },
    /// It has changed, and was not ready.
    Changed { variant: String },
}

/// A decision about shortage and growth.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrowthDecision {
    /// Memory that had grown back was shed again soon, so that the dwell is longer from now on.
    BackedOff {
        /// How long it had stayed.
        stayed: Duration,
        /// From now on.
        dwell: Duration,
    },
    /// A client wants more KV capacity than can be had now.
    CapacityWithheld {
        wanted: Tokens,
        /// What the engine is asked to hold.
        present: Tokens,
        wait: GrowthWait,
    },
    /// Nothing more is shed: what is left costs more than the level may.
    EngineSpared { level: PressureLevel },
    /// Nothing is left to shed.
    NothingLeft {
        level: PressureLevel,
        unaccounted: Bytes,
        /// Of the supervisor itself, where that is known.
        own: Option<Bytes>,
    },
}

/// What was found or decided about memory without a holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryDecision {
    /// What became of memory that was given back, on a board with a page pool for the GPU.
    Released(Release),
    /// The machine has been in a state for so long that only a reboot ends it.
    RebootAdvised(RebootReason),
    /// The machine has not been in that state for as long.
    RebootNotAdvised(RebootReason),
    /// The machine, or a control group around the supervisor, has too little memory now for what runs, or for the
    /// configuration.
    TooSmall {
        machine: MachineMemory,
        budget: Bytes,
        reason: String,
    },
}
