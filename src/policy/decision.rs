//! Decisions with their figures, one enum for each machine.
//!
//! A decision is a value, so that tests, metrics and `cotenant why` match on it. The sentence beside each variant is no
//! part of the value; `thiserror` derives `Display` from it.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    denial::Denial,
    growth_wait::{GrowthWait, unless_zero},
    lease::{Class, LeaseName, TargetAnswer},
    page_pool::Release,
    params::MachineMemory,
    pressure_level::PressureLevel,
    reason::{IgnoredPressure, PlanSize, ReclaimReason, still_uses},
    reboot::RebootReason,
    residency::FloorError,
    snapshot::{WorkerState, WorkerWait},
};
use cotenant_units::{Bytes, Tokens};

/// A decision of one of the machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// About a lease that is held or ends.
    #[error("{0}")]
    Lease(LeaseDecision),
    /// About a request that waits, is granted or denied.
    #[error("{0}")]
    Admission(AdmissionDecision),
    /// About the engine's load, plans and failures.
    #[error("{0}")]
    Engine(EngineDecision),
    /// About a worker's start, size and end.
    #[error("{0}")]
    Worker(WorkerDecision),
    /// About what grows back, and when.
    #[error("{0}")]
    Growth(GrowthDecision),
    /// About memory without a holder.
    #[error("{0}")]
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum LeaseDecision {
    /// A lease could not be booked.
    #[error("`{tenant}`: cannot book {asked}: {free} is free")]
    NotBooked {
        tenant: String,
        asked: Bytes,
        free: Bytes,
    },
    /// The process of the holder has ended, and its memory is credited.
    #[error(
        "{lease}{}: its process has ended and its memory is free; {free} is free of {budget}",
        with_more(leases - 1)
    )]
    HolderGone {
        /// The lease by which its end was noticed.
        lease: LeaseName,
        /// How many leases it had, that one included.
        leases: usize,
        free: Bytes,
        budget: Bytes,
    },
    /// A holder has answered its target; nothing is credited for that.
    #[error("{lease} {}", answered(answer, *claimed))]
    Answered {
        lease: LeaseName,
        answer: TargetAnswer,
        claimed: Option<Bytes>,
    },
    /// A holder has answered a target that is not in force.
    #[error("{lease} answered target {nonce}, and {}: ignored", in_force(*current))]
    AnswerIgnored {
        lease: LeaseName,
        nonce: u64,
        current: Option<u64>,
    },
    /// A holder uses more than it holds.
    #[error(
        "`{holder}` uses {used} and holds {held}: {} are unaccounted; {free} is free",
        used.saturating_sub(*held)
    )]
    BeyondLease {
        /// As whom it is measured.
        holder: String,
        used: Bytes,
        held: Bytes,
        /// What is free; what it uses beyond is not.
        free: Bytes,
    },
    /// A target was measured to be reached, and what that freed is credited.
    #[error(
        "{lease} is down to {stays}, {freed} verified after {} ms: it uses {used}; {free} is free of {budget}",
        took.as_millis()
    )]
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
    #[error(
        "{lease} wanted to come down to {target} and {}: it keeps what it holds",
        still_uses(*used)
    )]
    WishNotSeen {
        lease: LeaseName,
        target: Bytes,
        used: Option<Bytes>,
    },
    /// An ended lease is off the book by a reading.
    #[error(
        "{lease} is off the book with {held}{}; {free} is free of {budget}",
        unless_zero("; ", *rest, " is still in use and unaccounted")
    )]
    Closed {
        lease: LeaseName,
        held: Bytes,
        /// What of it is still used, and unaccounted.
        rest: Bytes,
        free: Bytes,
        budget: Bytes,
    },
    /// An ended lease is off the book by a sample, since its holder cannot be measured.
    #[error(
        "{lease} has ended and cannot be measured: its {held} are free as far as the last sample shows"
    )]
    ClosedUnmeasured { lease: LeaseName, held: Bytes },
    /// An ended lease is off the book, and its bytes are unaccounted: no reading was had in time.
    #[error(
        "{lease} has ended and was not measured in time: its {held} are unaccounted until it is"
    )]
    ClosedUnaccounted { lease: LeaseName, held: Bytes },
    /// An ended lease keeps what its holder may still take, since that has not acknowledged the end.
    #[error(
        "{lease} has ended unacknowledged: {bytes} stay on the book for {:.1} s at most; {free} is free of {budget}",
        at_most.as_secs_f64()
    )]
    KeptUntilAcknowledged {
        lease: LeaseName,
        bytes: Bytes,
        /// For how long at most: the rest of its term.
        at_most: Duration,
        free: Bytes,
        budget: Bytes,
    },
    /// Its holder gives it back, or another process on the holder's behalf; it is free once measured.
    #[error("released {lease} with {held}, free once measured")]
    Released { lease: LeaseName, held: Bytes },
    /// Its end is acknowledged, by the holder or on its behalf by the user `by`.
    #[error("{lease}{}", acknowledged(*by, *held))]
    EndAcknowledged {
        lease: LeaseName,
        by: Option<u32>,
        held: Bytes,
    },
    /// Leases and workers of the run before are taken over.
    #[error(
        "taken over from the run before: {leases} leases, {workers} workers, {held} held of {budget}"
    )]
    TakenOver {
        leases: usize,
        workers: usize,
        held: Bytes,
        budget: Bytes,
    },
    /// A book of an earlier run comes too late, and is not taken over.
    #[error("a book of an earlier run comes too late and is not taken over")]
    BookTooLate,
    /// A lease of the run before is not taken over, since a worker has its name now.
    #[error("lease {lease} is not taken over: a worker has its name now")]
    NameTaken { lease: LeaseName },
    /// A lease of the run before is not taken over, since it does not fit.
    #[error("lease {lease} is not taken over: its {held} do not fit, {free} is free of {budget}")]
    NotTakenOver {
        lease: LeaseName,
        held: Bytes,
        free: Bytes,
        budget: Bytes,
    },
}

/// Why a lease ends against the will of its holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum LeaseEnd {
    /// It was not renewed within its term.
    #[error("expired: not renewed within its {} s term", term.as_secs_f64())]
    Expired { term: Duration },
    /// Another process of its user, or an operator, released it.
    #[error("was released by uid {uid}, not by its holder")]
    ReleasedByOther { uid: u32 },
    /// Its holder has not come down to its target in time.
    #[error(
        "ends: {cause}; its target of {target} was due {:.1} s ago, and nothing is credited",
        late.as_secs_f64()
    )]
    NotReduced {
        target: Bytes,
        /// How long the deadline of the target is over.
        late: Duration,
        cause: NotReduced,
    },
}

/// How it is known that a holder has not come down to its target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum NotReduced {
    /// It has not answered.
    #[error("it has not answered")]
    Unanswered,
    /// It has refused.
    #[error("it refused: {reason}")]
    Refused { reason: String },
    /// A reading that is newer than its answer shows more.
    #[error("{claim} and still uses {used}")]
    Measured { used: Bytes, claim: Claim },
    /// It has answered, and no reading since then could be taken.
    #[error("{claim} and cannot be measured")]
    Unmeasurable { claim: Claim },
}

/// The claim of a holder about a target that it has not been seen to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Claim {
    /// The memory has been given back.
    #[error("it answered `applied`")]
    Applied,
    /// It needs more time.
    #[error("it asked for more time")]
    Deferred,
    /// It asked for less by itself.
    #[error("it asked for less itself")]
    Resized,
}

/// A decision about requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum AdmissionDecision {
    /// Nothing new is admitted from now on.
    #[error("draining: nothing new is admitted")]
    DrainBegun,
    /// Requests are admitted again.
    #[error("the drain has ended: requests are admitted again")]
    DrainEnded,
    /// A lease is granted.
    #[error(
        "granted {bytes} to {lease} after {} ms: {free} is free of {budget}",
        waited.as_millis()
    )]
    Granted {
        lease: LeaseName,
        bytes: Bytes,
        waited: Duration,
        free: Bytes,
        budget: Bytes,
    },
    /// A lease holds more, as its holder asked.
    #[error(
        "grown {lease} from {from} to {to} after {} ms: {free} is free of {budget}",
        waited.as_millis()
    )]
    Grown {
        lease: LeaseName,
        from: Bytes,
        to: Bytes,
        waited: Duration,
        free: Bytes,
        budget: Bytes,
    },
    /// The first in the queue waits for more than can be reclaimed now.
    #[error("`{tenant}` waits: {denial}")]
    Waits { tenant: String, denial: Denial },
    /// A request waits for what it cannot have while others keep what they hold; it does not block the queue.
    #[error("`{tenant}` waits for what it cannot have at present: {denial}")]
    OutOfReach { tenant: String, denial: Denial },
    /// A worker needs more than it can have while others keep what they hold.
    #[error("worker `{worker}` cannot be started: {wait}")]
    StartOutOfReach { worker: String, wait: WorkerWait },
    /// A request is served as a more urgent class, because it has waited for long.
    #[error(
        "`{tenant}` ({class}) has waited for {} s and is served as {rank} now",
        waited.as_secs()
    )]
    Aged {
        tenant: String,
        class: Class,
        waited: Duration,
        rank: Class,
    },
    /// A request was served as the most urgent class for its time, and is served as its own again.
    #[error("`{tenant}` ({class}) has had its turn and waits on")]
    TurnOver { tenant: String, class: Class },
    /// A request was withdrawn.
    #[error("`{tenant}` does not wait any more")]
    Withdrawn { tenant: String },
}

/// A decision about the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum EngineDecision {
    /// The model is not loaded, since no memory that comes free would suffice.
    #[error(
        "the model is not loaded: {error} with all memory free; use a smaller model or `llm.kv_floor`, or a larger \
         budget"
    )]
    FloorExceedsBudget { error: FloorError },
    /// A model was inspected, and no engine is configured.
    #[error("`{model}` was inspected, and no engine is configured")]
    NotConfigured { model: String },
    /// A model was inspected while one is loaded, and is ignored.
    #[error("`{model}` was inspected while a model is loaded: ignored")]
    AlreadyLoaded { model: String },
    /// The memory of a model is known.
    #[error("`{model}` has {layers} layers, {token} of KV for each token and needs {full} in full")]
    Inspected {
        model: String,
        layers: u32,
        /// KV of one token.
        token: Bytes,
        full: Bytes,
    },
    /// A model that failed is loaded again after a wait.
    #[error("the model was inspected again; it is loaded in {:.1} s", wait.as_secs_f64())]
    LoadDelayed { wait: Duration },
    /// The floor does not fit now.
    #[error(
        "the engine waits for memory: {error}: {free} is free, {kept} is kept for workers, headroom is {headroom} \
         with a watermark of {watermark}"
    )]
    WaitsForMemory {
        error: FloorError,
        free: Bytes,
        /// Kept for workers.
        kept: Bytes,
        headroom: Bytes,
        watermark: Bytes,
    },
    /// The model is loaded.
    #[error(
        "loading the engine with {plan}, {full} in full: {free} is free after it, {kept} of that is kept for workers"
    )]
    Loading {
        plan: PlanSize,
        full: Bytes,
        free: Bytes,
        /// Kept for workers, of what is free.
        kept: Bytes,
    },
    /// A report about a plan that is not waited for is ignored.
    #[error("{}", stray.about(*revision))]
    StrayPlan { revision: u64, stray: StrayPlan },
    /// A plan is in force.
    #[error("{}", outcome.with(*revision, took.as_millis(), plan.as_ref(), *used, *free))]
    Applied {
        revision: u64,
        outcome: PlanOutcome,
        plan: Option<PlanSize>,
        used: Bytes,
        free: Bytes,
        took: Duration,
    },
    /// A shed gave back less than it promised.
    #[error("engine promised {promised}, {credited} are credited and the kernel shows {freed}")]
    Short {
        promised: Bytes,
        credited: Bytes,
        freed: Bytes,
    },
    /// A plan could not be applied.
    #[error(
        "the engine could not apply plan {revision} ({plan}): {reason}; in force was {}",
        or_empty(in_force.as_ref())
    )]
    NotApplied {
        revision: u64,
        reason: String,
        plan: PlanSize,
        in_force: Option<PlanSize>,
    },
    /// The engine is gone, and `freed` off the book.
    #[error("the LLM has failed: {reason}; {freed} are off the book; {next}")]
    Gone {
        reason: String,
        freed: Bytes,
        next: NextLoad,
    },
    /// The running answer has lost its oldest tokens, as its request allows.
    #[error(
        "the answer has lost {tokens} tokens of its context, the oldest, as its request allows: {in_all} in all"
    )]
    ContextLost { tokens: u32, in_all: u32 },
    /// The plan in force is unknown, and the last known one is asked for.
    #[error("the plan in force is unknown; asking for the last one that was known")]
    Unconfirmed,
    /// A plan was not answered in time, and is asked for again.
    #[error(
        "the engine has not answered plan {revision} within {:.1} s; asking again",
        after.as_secs_f64()
    )]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum NextLoad {
    #[error("loading again in {:.1} s", .0.as_secs_f64())]
    In(Duration),
    /// Its file is read again.
    #[error("reading its file again in {:.1} s", .0.as_secs_f64())]
    ReadIn(Duration),
    /// When the file or the settings have changed.
    #[error("it is not loaded again until that has changed")]
    NeedsChange,
    /// It failed too often.
    #[error("it failed too often and is not loaded again")]
    GivenUp,
    /// When the disk has answered; reads that hang keep so much.
    #[error("reads that hang keep {left}, and it is inspected again when the disk has answered")]
    WaitsForDisk { left: Bytes },
    #[error("there is nothing to load")]
    NothingToLoad,
}

/// A decision about a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum WorkerDecision {
    /// It is started, and its peak is held for it.
    #[error("starting worker `{worker}` with {peak} held for its peak; {free} is free of {budget}")]
    Starting {
        worker: String,
        peak: Bytes,
        free: Bytes,
        budget: Bytes,
    },
    /// It runs and answers nothing, and is ended.
    #[error("worker `{worker}` (pid {pid}) does not respond and is ended: {evidence}")]
    Unresponsive {
        worker: String,
        pid: u32,
        evidence: String,
    },
    /// It answers.
    #[error("worker `{worker}` (pid {pid}) is ready after {} ms", took.as_millis())]
    Ready {
        worker: String,
        pid: u32,
        took: Duration,
    },
    /// A report does not fit its state, and is ignored.
    #[error("worker `{worker}` {report}: ignored")]
    Ignored { worker: String, report: StrayReport },
    /// It died of something that an operator can cure.
    #[error("remedy: {remedy}")]
    Died {
        /// The end in one sentence, by its death certificate.
        sentence: String,
        remedy: String,
    },
    /// Its process is gone, and its memory is credited.
    #[error(
        "worker `{worker}` exited {}: {freed} returned to the budget, {free} is free",
        if *expected { "as requested" } else { "unexpectedly" }
    )]
    Exited {
        worker: String,
        cause: String,
        /// Whether it had been asked to.
        expected: bool,
        freed: Bytes,
        free: Bytes,
    },
    /// It has failed, and is started again after a wait.
    #[error(
        "worker `{worker}` starts again in {:.1} s, failure {failures} of {intensity} within {:.0} s",
        wait.as_secs_f64(),
        window.as_secs_f64()
    )]
    Restarting {
        worker: String,
        wait: Duration,
        failures: usize,
        /// Failures within the window that are answered with a restart.
        intensity: u32,
        window: Duration,
    },
    /// It has failed too often, and is not started again.
    #[error(
        "worker `{worker}` failed {failures} times within {:.0} s and is left alone; start it by hand",
        window.as_secs_f64()
    )]
    GivenUp {
        worker: String,
        failures: usize,
        window: Duration,
    },
    /// It would fail in the same way again, and is not started again.
    #[error(
        "worker `{worker}` would end in the same way again and is left alone; start it by hand when its cause is cured"
    )]
    NeedsOperator { worker: String },
    /// A request starts it.
    #[error("worker `{worker}` is woken by a request")]
    Woken { worker: String },
    /// It is asked into another variant.
    #[error("worker `{worker}` changes to variant `{variant}`: {cause}")]
    Changing {
        worker: String,
        variant: String,
        cause: ChangeCause,
    },
    /// It was measured at its size, and its lease comes down to it.
    #[error(
        "worker `{worker}` uses {used}: its lease comes down by {freed} to {stays}, {free} is free"
    )]
    Settled {
        worker: String,
        used: Bytes,
        stays: Bytes,
        freed: Bytes,
        free: Bytes,
    },
    /// It uses more than it may: it takes nothing new, and is started again when its requests have ended.
    #[error(
        "worker `{worker}` uses {used}, above {above} where it is recycled, and holds {held}: it takes nothing new, \
         ends its {requests} requests and is restarted"
    )]
    Outgrown {
        worker: String,
        used: Bytes,
        /// Above this it is started again.
        above: Bytes,
        held: Bytes,
        requests: u32,
    },
    /// It has used more than it is set to need at most, and from now on its own peak counts.
    #[error(
        "worker `{worker}` used {peak}{}, and its start reserved {configured}: from now on its own peak counts",
        variant.as_ref().map_or_else(String::new, |name| format!(" in variant `{name}`"))
    )]
    PeakLearned {
        worker: String,
        variant: Option<String>,
        peak: Bytes,
        /// What it is set to need.
        configured: Bytes,
    },
    /// It was killed at the limit of its control group, so that more has to be free for its next start.
    #[error(
        "worker `{worker}` was killed at the limit of its group with {had}: from now on {needs} has to be free for it"
    )]
    PeakRaised {
        worker: String,
        had: Bytes,
        needs: Bytes,
    },
    /// It was notified that memory is short, has not come down, and keeps what it holds since it is at work.
    #[error("{0}; it is at work and keeps what it holds")]
    IgnoresPressure(IgnoredPressure),
    /// It reported a smaller variant, is not measured there, and holds what it held.
    #[error(
        "worker `{worker}` reported that it has become smaller and {}; it still holds {held}",
        still_uses(*used)
    )]
    NotSmaller {
        worker: String,
        used: Option<Bytes>,
        held: Bytes,
    },
    /// It may hold its steady size again.
    #[error("worker `{worker}` may hold its {steady} again")]
    Restored { worker: String, steady: Bytes },
    /// It has changed its variant.
    #[error(
        "worker `{worker}` is in variant `{variant}` after {} ms{}, holds {held}",
        took.as_millis(),
        uses(*used)
    )]
    Resized {
        worker: String,
        variant: String,
        took: Duration,
        used: Option<Bytes>,
        held: Bytes,
    },
    /// It could not change its variant.
    #[error("worker `{worker}` stays in variant `{variant}`: {error}{}", uses(*used))]
    VariantKept {
        worker: String,
        variant: String,
        error: String,
        used: Option<Bytes>,
    },
    /// It has outlived the run before, and is taken over.
    #[error(
        "worker `{worker}` (pid {pid}) has outlived the run before and is taken over with {held}"
    )]
    TakenOver {
        worker: String,
        pid: u32,
        held: Bytes,
    },
}

/// Why a worker is asked into another variant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum ChangeCause {
    /// A client or an operator wants it, or it gets back what it had.
    #[error("asked for")]
    Asked,
    /// To make room.
    #[error("{reason}")]
    Room { reason: ReclaimReason },
    /// It is idle.
    #[error("nothing to do for {} s", idle.as_secs())]
    Idle { idle: Duration },
}

/// A report of a worker that does not fit its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum StrayReport {
    /// It answers, and was not being started.
    #[error("(pid {pid}) answers while it is {}", state.word())]
    Ready { pid: u32, state: WorkerState },
    /// It has exited, and did not run.
    #[error("exited ({cause}) and was not running")]
    Exited { cause: String },
    /// It has changed, and was not ready.
    #[error("changed to `{variant}` while it does not run")]
    Changed { variant: String },
}

/// A decision about shortage and growth.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum GrowthDecision {
    /// Memory that had grown back was shed again soon, so that the dwell is longer from now on.
    #[error(
        "what had grown back was shed again after {:.1} s; nothing grows for {:.1} s",
        stayed.as_secs_f64(),
        dwell.as_secs_f64()
    )]
    BackedOff {
        /// How long it had stayed.
        stayed: Duration,
        /// From now on.
        dwell: Duration,
    },
    /// A client wants more KV capacity than can be had now.
    #[error("a client wants a KV capacity of {wanted} tokens, {present} are planned: {wait}")]
    CapacityWithheld {
        wanted: Tokens,
        /// What the engine is asked to hold.
        present: Tokens,
        wait: GrowthWait,
    },
    /// Nothing more is shed: what is left costs more than the level may.
    #[error("{level}: nothing more is shed; what is left costs its users more than this level may")]
    EngineSpared { level: PressureLevel },
    /// Nothing is left to shed.
    #[error(
        "{level}: nothing is left to shed; {unaccounted} is unaccounted, the supervisor itself uses {}",
        own.map_or_else(|| "an unknown part".to_owned(), |own| own.to_string())
    )]
    NothingLeft {
        level: PressureLevel,
        unaccounted: Bytes,
        /// Of the supervisor itself, where that is known.
        own: Option<Bytes>,
    },
}

/// What was found or decided about memory without a holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum MemoryDecision {
    /// What became of memory that was given back, on a board with a page pool for the GPU.
    #[error("released {}: {} to the GPU's page pool, {} to the OS", .0.bytes, .0.to_pool, .0.to_os)]
    Released(Release),
    /// The machine has been in a state for so long that only a reboot ends it.
    #[error("reboot advised: {0}")]
    RebootAdvised(RebootReason),
    /// The machine has not been in that state for as long.
    #[error("reboot no longer advised; it was since {0}")]
    RebootNotAdvised(RebootReason),
    /// The machine, or a control group around the supervisor, has too little memory now for what runs, or for the
    /// configuration.
    #[error(
        "the {machine} are too little, the budget is {budget}: {reason}; raise the limit or stop what needs it"
    )]
    TooSmall {
        machine: MachineMemory,
        budget: Bytes,
        reason: String,
    },
}

impl StrayPlan {
    fn about(&self, revision: u64) -> String {
        match self {
            Self::NoLease => format!("the engine applied plan {revision}, and holds no lease"),
            Self::EarlierLoad => {
                format!("the engine applied plan {revision} of an earlier load: ignored")
            }
            Self::Failed { reason } => {
                format!("plan {revision} failed, and is no longer waited for: {reason}")
            }
        }
    }
}

impl PlanOutcome {
    fn with(
        &self,
        revision: u64,
        ms: u128,
        plan: Option<&PlanSize>,
        used: Bytes,
        free: Bytes,
    ) -> String {
        let holds = format!("{}, uses {used}", or_empty(plan));
        match self {
            Self::Ready => format!("engine ready after {ms} ms: {holds}"),
            Self::Shed {
                credited,
                freed,
                untouched,
            } => {
                let untouched = unless_zero(" and ", *untouched, " had not been touched");
                format!(
                    "engine shed {credited} in {ms} ms, the kernel shows {freed}{untouched}: {holds}; {free} is free"
                )
            }
            Self::ChunkEnded { credited, freed } => format!(
                "a chunk of a prompt has ended, and smaller ones follow: engine gave up {credited} in {ms} ms, the kernel \
                 shows {freed}: {holds}; {free} is free"
            ),
            Self::Grown => format!("engine has grown in {ms} ms: {holds}; {free} is free"),
            Self::Confirmed => format!("engine applied plan {revision} in {ms} ms: {holds}"),
        }
    }
}

fn answered(answer: &TargetAnswer, claimed: Option<Bytes>) -> String {
    match (answer, claimed) {
        (TargetAnswer::Applied, Some(claimed)) => {
            format!("reports to use {claimed} now; not yet measured")
        }
        (TargetAnswer::Applied, None) => {
            "reports that it has come down; not yet measured".to_owned()
        }
        (TargetAnswer::Deferred { overage }, _) => {
            format!("still needs {overage} above its target")
        }
        (TargetAnswer::Refused { reason }, _) => format!("refuses its target: {reason}"),
    }
}

fn acknowledged(by: Option<u32>, held: Bytes) -> String {
    by.map_or_else(
        || " has ended, and its holder has acknowledged it".to_owned(),
        |uid| format!(": end acknowledged by uid {uid} on the holder's behalf; {held} credited once measured"),
    )
}

fn in_force(target: Option<u64>) -> String {
    target.map_or_else(
        || "has no target".to_owned(),
        |target| format!("target {target} is in force"),
    )
}

fn with_more(leases: usize) -> String {
    if leases == 0 {
        String::new()
    } else {
        format!(" with {leases} more leases")
    }
}

fn or_empty(plan: Option<&PlanSize>) -> String {
    plan.map(ToString::to_string).unwrap_or_default()
}

fn uses(used: Option<Bytes>) -> String {
    used.map_or_else(String::new, |used| format!(", uses {used}"))
}
