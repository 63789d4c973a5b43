//! Events and actions of the arbiter.
//!
//! Events are the arbiter's only input: replaying a journal of events yields the same actions. A reclaim is credited by
//! the event that confirms the release, not by the request.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    book::{AdoptedWorker, Book},
    death::DeathCertificate,
    decision::{Decision, LeaseEnd},
    denial::Denial,
    engine_failure::Cure,
    kv_type::KvType,
    lease::{LeaseId, LeaseName, LeaseRequest, LeaseView, Peer, TargetAnswer, Ticket},
    params::{MachineMemory, Params},
    peaks::Peaks,
    pressure::{LevelChange, Sample},
    reason::{PlanReason, ReclaimReason, StopReason},
    residency::{EnginePlan, ModelShape},
    shedding::Weighing,
    speed::{Calibration, Timing},
};
use cotenant_units::{Bytes, Timestamp, Tokens};

/// A parked conversation: its KV blocks are kept beside those of the running sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdleConversation {
    /// KV capacity that its end frees, in tokens.
    pub capacity: Tokens,
    /// Tokens that its next prompt has to recompute after that; of one that is saved, those that take as long as reading
    /// it back.
    pub tokens: Tokens,
    /// Time since its last answer.
    pub idle_ms: u64,
    /// Whether another conversation has probably replaced it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub superseded: bool,
}

/// Input of the arbiter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum Event {
    /// A sample of the machine: at the start, after each [`Action::SampleAfter`], and when a PSI trigger fires.
    Sampled(Sample),
    /// A reading of a holder's memory; `used` is `None` if the reading failed, and zero if the process has ended.
    ///
    /// Every [`Action::Measure`] is answered by one of these. In addition, every holder is measured at least once per
    /// second, as close to a sample as possible: use in the sample beyond these readings is attributed to unmanaged
    /// processes.
    Measured {
        /// Name of the holder, as in [`LeaseView::holder`].
        tenant: String,
        /// Bytes that the kernel attributes to it.
        used: Option<Bytes>,
        taken_at: Timestamp,
    },
    /// A client asks for a lease.
    LeaseRequested {
        ticket: Ticket,
        request: LeaseRequest,
    },
    /// The caller has stopped waiting.
    LeaseRequestCancelled { ticket: Ticket },
    /// A holder renews its lease.
    LeaseRenewed(LeaseCall),
    /// A holder requests new bounds.
    LeaseResizeRequested(LeaseResize),
    /// A holder releases its lease.
    LeaseReleased(LeaseCall),
    /// A holder answers a lower target.
    TargetAnswered(TargetAnswered),
    /// The process or control group that held a lease is gone.
    HolderLost {
        lease: LeaseId,
        /// The process that ended. Memory is credited only if this is the measured process. `None` for a control group,
        /// and in journals of older versions.
        pid: Option<u32>,
    },
    /// The model's header was read; nothing is loaded yet.
    EngineInspected { shape: ModelShape },
    /// The engine carried out a plan; also sent for the load.
    EngineApplied(EngineApplied),
    /// The engine failed to carry out a plan. Completed steps are not undone, so the memory in force may belong to
    /// either plan.
    EngineApplyFailed { revision: u64, reason: String },
    /// The engine has ended and its memory is freed.
    EngineFailed {
        reason: String,
        /// Condition for loading it again. Absent in journals of older versions.
        #[serde(default)]
        cure: Cure,
        /// Memory kept by reads that hang because the disk does not respond. Once they have returned, the model's
        /// header is read again and reported as [`Self::EngineInspected`]; nothing is loaded before. Absent in journals
        /// of older versions.
        #[serde(skip_serializing_if = "Option::is_none")]
        left: Option<Bytes>,
    },
    /// The engine began or finished generating.
    EngineActivity {
        /// Requests running or waiting.
        requests: u32,
        /// Tokens of the running sequence in the KV cache.
        kv_used: u32,
        /// Tokens kept from earlier answers while no request runs; the next prompt may reuse them.
        #[serde(default)]
        kv_kept: u32,
        /// Tokens of the running answer's prompt.
        #[serde(default)]
        kv_prompt: u32,
        /// Maximum tokens of the prompt and its answer. Journals of older versions have neither.
        #[serde(default)]
        kv_most: u32,
        /// Tokens that may be dropped from the running sequence: the oldest ones after the attention sinks.
        #[serde(default)]
        kv_droppable: u32,
        /// Tokens dropped from it.
        #[serde(default)]
        kv_dropped: u32,
        /// Memory that the engine holds but has not touched yet.
        #[serde(default)]
        untouched: Bytes,
        /// Parked conversations. Absent in journals of older versions.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        beside: Vec<IdleConversation>,
    },
    /// The engine measured its own speed and that of the disk.
    EngineCalibrated(Calibration),
    /// The engine completed an answer and reports its timing.
    EngineTimed(Timing),
    /// A worker is ready.
    WorkerReady { worker: String, pid: u32 },
    /// Certificate of a worker's death, or of a failed start. [`WorkerExited`](Self::WorkerExited) follows when the
    /// whole process group has ended.
    WorkerDied { certificate: Box<DeathCertificate> },
    /// A worker's process has ended and was reaped, or could not be started.
    WorkerExited {
        worker: String,
        /// Whether the supervisor requested it.
        intended: bool,
        /// Cause as text: `exit code 3`, `killed by SIGKILL, sender unknown`.
        cause: String,
    },
    /// Peak memory of a worker's processes since its start, from the kernel's counters.
    PeakMeasured { worker: String, peak: Bytes },
    /// A worker started or finished a request.
    WorkerActivity { worker: String, requests: u32 },
    /// A client has a request for a worker that is not ready to accept it.
    WorkerWanted {
        worker: String,
        /// Key of the client, if clients have keys. Absent in journals of older versions.
        #[serde(skip_serializing_if = "Option::is_none")]
        client: Option<String>,
    },
    /// A client requests another variant of a worker (ASR from grammar to open vocabulary).
    WorkerResizeRequested(WorkerResize),
    /// A worker changed its variant, or failed to and kept the previous one.
    WorkerResized(WorkerResized),
    /// A detector found a worker that runs but does not respond.
    WorkerUnresponsive {
        worker: String,
        pid: u32,
        /// The requests without a response: `transcribe within 30.0 s, and 3 questions after it`.
        evidence: String,
    },
    /// A client's request needs or prefers more KV capacity than is in force.
    ///
    /// Needed capacity is taken from layers while growth is blocked: dwell, back-off and an operator's shed remain in
    /// effect. For an answer in progress it is also taken from free memory regardless of the dwell, and from layers at
    /// Critical: the answer would end without it.
    CapacityWanted(CapacityWanted),
    /// An operator requests an immediate shed of `bytes` from the engine.
    OperatorShed {
        ticket: Ticket,
        bytes: Bytes,
        /// Absent in journals of older versions.
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<Origin>,
    },
    /// An operator permits growth without waiting for the dwell.
    OperatorRegrow {
        ticket: Ticket,
        /// Absent in journals of older versions.
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<Origin>,
    },
    /// An operator changes the KV type; stored blocks are converted.
    OperatorKvType {
        ticket: Ticket,
        kv_type: KvType,
        /// Absent in journals of older versions.
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<Origin>,
    },
    /// An operator starts, stops or recycles a worker.
    OperatorWorker {
        ticket: Ticket,
        worker: String,
        command: WorkerCommand,
        /// Absent in journals of older versions.
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<Origin>,
    },
    /// Leases of the previous run, without those whose holders have ended.
    ///
    /// Only valid as the first event of a run: later it would conflict with leases of this run.
    Recovered {
        /// Leases and state of the previous run.
        book: Book,
        /// Its workers that are still running.
        adopted: Vec<AdoptedWorker>,
    },
    /// The leases of the previous run cannot be read: their memory counts as unaccounted until their holders request
    /// them again. Unknown to older versions.
    BookLost {
        /// Path of the damaged file.
        kept: String,
    },
    /// Stop admitting requests; running ones may complete.
    DrainRequested {
        /// Absent in journals of older versions.
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<Origin>,
    },
    /// An operator ends a drain: requests are admitted again. Unknown to older versions.
    DrainCancelled {
        /// Absent in journals of older versions.
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<Origin>,
    },
    /// An operator requests a load of a model that failed to load or was missing.
    OperatorLoad {
        ticket: Ticket,
        /// The operator; `None` if the supervisor loads a model that is safe again, and in journals of older versions.
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<Origin>,
    },
    /// An operator reloads the configuration. Unknown to older versions.
    Reconfigured {
        ticket: Ticket,
        /// All settings. Those of the engine, the scope and the learned peaks are unchanged; those of a running worker
        /// apply from its next start.
        params: Box<Params>,
        /// Keys of the file that have changed.
        changes: ChangedKeys,
        /// Absent in journals of older versions.
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<Origin>,
    },
    /// A reloaded configuration was refused before its settings were considered; nothing has changed. Unknown to older
    /// versions.
    ReloadRefused {
        /// The error.
        cause: String,
        /// Absent in journals of older versions.
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<Origin>,
    },
    /// The memory of the machine, or the limit of a control group around the supervisor, has changed. Unknown to older
    /// versions.
    Resized {
        /// Its new size.
        machine: MachineMemory,
        /// Settings for that size, or the reason why none are valid.
        params: Result<Box<Params>, String>,
    },
    /// The time returned by `next_deadline` has been reached.
    DeadlineReached,
}

impl Event {
    /// Returns the ticket of the call that this event, or a later one, answers.
    #[must_use]
    pub const fn ticket(&self) -> Option<Ticket> {
        match self {
            Self::LeaseRequested { ticket, .. }
            | Self::LeaseRenewed(LeaseCall { ticket, .. })
            | Self::LeaseResizeRequested(LeaseResize { ticket, .. })
            | Self::LeaseReleased(LeaseCall { ticket, .. })
            | Self::WorkerResizeRequested(WorkerResize { ticket, .. })
            | Self::OperatorShed { ticket, .. }
            | Self::OperatorRegrow { ticket, .. }
            | Self::OperatorKvType { ticket, .. }
            | Self::OperatorWorker { ticket, .. }
            | Self::OperatorLoad { ticket, .. }
            | Self::Reconfigured { ticket, .. } => Some(*ticket),
            _ => None,
        }
    }
}

/// A holder's call about its lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseCall {
    pub ticket: Ticket,
    pub lease: LeaseId,
    pub generation: u64,
    pub peer: Peer,
}

/// New bounds requested for a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseResize {
    pub ticket: Ticket,
    pub lease: LeaseId,
    pub generation: u64,
    pub peer: Peer,
    pub min: Bytes,
    pub max: Bytes,
    pub wait: Duration,
}

/// A holder's answer to a lower target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetAnswered {
    pub lease: LeaseId,
    pub nonce: u64,
    pub answer: TargetAnswer,
    /// Use claimed by the holder, if any. Never credited; measured instead.
    pub claimed: Option<Bytes>,
}

/// The engine's report of a plan carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineApplied {
    pub revision: u64,
    /// The plan in force; may exceed the requested one if the running sequence needs it.
    pub in_force: EnginePlan,
    /// Memory freed, as measured by the kernel.
    pub freed: Bytes,
    /// Size of the engine's mappings, touched or not.
    pub used: Bytes,
    /// The part of `used` that was never touched and takes no memory yet.
    #[serde(default)]
    pub untouched: Bytes,
    /// Bytes given up that were never touched, so that the kernel frees nothing for them.
    #[serde(default)]
    pub untouched_given: Bytes,
    pub took: Duration,
}

impl EngineApplied {
    /// A plan whose memory is touched, and that freed none.
    pub const fn new(revision: u64, in_force: EnginePlan, used: Bytes, took: Duration) -> Self {
        Self {
            revision,
            in_force,
            freed: Bytes::ZERO,
            used,
            untouched: Bytes::ZERO,
            untouched_given: Bytes::ZERO,
            took,
        }
    }
}

/// The variant requested for a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerResize {
    pub ticket: Ticket,
    pub worker: String,
    pub variant: String,
    pub wait: Duration,
    /// Absent in journals of older versions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<Origin>,
}

/// The variant of a worker after a requested change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerResized {
    pub worker: String,
    pub variant: String,
    pub used: Option<Bytes>,
    pub error: Option<String>,
}

/// KV capacity wanted for a client's request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapacityWanted {
    /// Tokens required to serve the request; zero if the present capacity suffices.
    pub needed: Tokens,
    /// Preferred KV capacity.
    pub wanted: Tokens,
    /// Key of the client, if clients have keys. Absent in journals of older versions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Whether its answer is in progress and would end without the capacity.
    #[serde(default)]
    pub is_running: bool,
}

/// Keys of the configuration that differ from the running settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedKeys {
    /// Applied at once; for workers, from the next start.
    pub applied: Vec<String>,
    /// Applied only by a restart of the supervisor.
    pub restart: Vec<String>,
}

/// Origin of an operator's command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// A process of this user, over a local socket.
    #[error("uid {0}")]
    Uid(u32),
    /// A client on another machine, by the common name of its certificate.
    #[error("certificate `{0}`")]
    Certificate(String),
    /// A client of the HTTP API, by the name of its key.
    #[error("key `{0}`")]
    Key(String),
    /// A signal to the supervisor: `SIGHUP`.
    #[error("{0}")]
    Signal(String),
}

/// An operator's command to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerCommand {
    /// Stop it and start it again.
    Recycle,
    /// Start it.
    Start,
    /// Stop it until an operator starts it.
    Stop,
}

/// The only answer to a [`Ticket`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "result")]
pub enum Answer {
    /// Granted, renewed or resized, with the lease's new state.
    Lease { lease: LeaseView },
    /// The grant that a `validate_only` request would get.
    WouldGrant {
        bytes: Bytes,
        /// Bytes that would be reclaimed from others first.
        after_shedding: Bytes,
    },
    /// The outcome of an operator's shed.
    Shed(ShedOutcome),
    /// Success.
    Done { done: Done },
    /// Failure.
    Denied {
        denial: Denial,
        /// Time after which a retry may succeed, if any.
        retry_after: Option<Duration>,
    },
}

/// The outcome of an operator's shed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShedOutcome {
    pub asked: Bytes,
    /// Reduction of the engine's lease.
    pub freed: Bytes,
    /// Bytes that the engine holds now.
    pub held: Bytes,
    /// Reason why `freed` is below `asked`; `None` if it is not.
    pub limited_by: Option<ShedLimit>,
}

/// Why a shed freed less than an operator requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "limit")]
pub enum ShedLimit {
    /// The engine is at its floor.
    #[error("the floor of the engine is {bytes}")]
    Floor { bytes: Bytes },
    /// The running answer uses the remaining KV capacity.
    #[error("the running answer uses {tokens} tokens of KV")]
    RunningAnswer { tokens: Tokens },
    /// The engine gave up less than was requested.
    #[error("the engine has not confirmed the rest")]
    NotConfirmed,
}

/// Outcome of a successful call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Done {
    /// Outcome stated by the decision.
    #[error("{0}")]
    Decided(Decision),
    /// An operator's command to a worker.
    #[error("worker `{worker}` {done}")]
    Worker { worker: String, done: WorkerDone },
    /// The plan requested from the engine.
    #[error("{0}")]
    Grows(PlanReason),
    #[error("worker `{worker}` restarts")]
    WorkerReturns { worker: String },
    #[error("worker `{worker}` returns to variant `{variant}`")]
    VariantReturns { worker: String, variant: String },
    /// Growth waits only for the next sample.
    #[error("regrowth starts with the next sample")]
    GrowsWhenSampled,
    /// Everything has its full size.
    #[error("everything has its full size")]
    FullSize,
    /// No LLM is configured.
    #[error("no LLM is configured")]
    NoEngine,
    /// The model is loaded, or is being loaded.
    #[error("the model is loaded, or is being loaded")]
    Loaded,
    /// The model's file is being read.
    #[error("the model's file is being read; `cotenant status` shows the result")]
    Inspecting,
    /// KV already has this type.
    #[error("the KV type is already {0}")]
    KvIs(KvType),
    /// KV will have this type when the engine is loaded.
    #[error("the KV type {0} applies when the engine is loaded")]
    KvWhenLoaded(KvType),
    /// KV will have this type once there is room for `more`, or once the ledger has room.
    #[error(
        "the KV type {kv_type} applies as soon as {}",
        more.map_or_else(|| "the ledger has room".to_owned(), |more| format!("there is room for {more} more"))
    )]
    KvWhenRoom {
        kv_type: KvType,
        more: Option<Bytes>,
    },
    /// KV has this type from now on.
    #[error(
        "the KV type is now {kv_type}: {}, in {:.1} ms; the engine holds {held}, {before} before",
        kv_given(*before, *held, *freed, *untouched),
        took.as_secs_f64() * 1000.0
    )]
    KvChanged {
        kv_type: KvType,
        before: Bytes,
        held: Bytes,
        /// Bytes freed, as measured by the kernel.
        freed: Bytes,
        /// Bytes given up that were never touched.
        untouched: Bytes,
        took: Duration,
    },
    /// The configuration was read again.
    #[error("{0}")]
    Reconfigured(ChangedKeys),
}

/// The outcome of a command to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum WorkerDone {
    #[error("already runs")]
    Runs,
    #[error("is already starting")]
    IsStarting,
    /// It starts once memory is available.
    #[error("starts when there is memory")]
    Starts,
    #[error("stops")]
    Stops,
    #[error("is restarted")]
    Restarts,
    /// It runs in this variant.
    #[error("is in variant `{variant}`")]
    IsIn { variant: String },
}

/// Output of the arbiter. The shell carries it out; the outcome is reported as an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "action")]
pub enum Action {
    /// Answer a caller.
    Answer { ticket: Ticket, answer: Answer },
    /// Request a tenant to shrink to a target; sent on its hold stream.
    SetTarget {
        lease: LeaseId,
        nonce: u64,
        bytes: Bytes,
        deadline: Timestamp,
        reason: ReclaimReason,
    },
    /// Notify a tenant that its lease has ended.
    EndLease { lease: LeaseName, end: LeaseEnd },
    /// Load the model with this plan.
    LoadEngine { revision: u64, plan: EnginePlan },
    /// Change the engine's plan, between two tokens.
    ApplyPlan {
        revision: u64,
        plan: EnginePlan,
        reason: PlanReason,
    },
    /// Start a worker; its lease is booked.
    StartWorker {
        worker: String,
        /// The variant to start with, if it has variants.
        variant: Option<String>,
    },
    /// Stop a worker: SIGTERM, and SIGKILL after its grace.
    StopWorker { worker: String, reason: StopReason },
    /// End an unresponsive worker: SIGABRT, so that it can write a core dump or trace, and SIGKILL after its grace.
    AbortWorker { worker: String, evidence: String },
    /// Switch a worker to another variant; the larger size is booked.
    ResizeWorker { worker: String, variant: String },
    /// Read the header of the model's file, reported as [`Event::EngineInspected`] or [`Event::EngineFailed`]. A GPU
    /// that failed to compute is tried again.
    InspectModel,
    /// Read the header again as an automatic retry: a GPU that failed to compute is not tried again.
    ReinspectModel,
    /// Store the learned peaks for the next run.
    StorePeaks { peaks: Peaks },
    /// Measure a holder at once instead of in the next round.
    Measure { tenant: String },
    /// Release the memory kept in nvmap's page pool, if permitted; the next samples show the effect.
    EmptyPagePool { bytes: Bytes },
    /// Sample the machine after this time.
    SampleAfter { wait: Duration },
    /// The pressure level has changed.
    LevelChanged(LevelChange),
    /// A reclaim: the candidates, their costs and the choice. The resulting requests follow.
    Weighed { weighing: Weighing },
    /// A decision with its figures that requires no action.
    Decided { decision: Decision },
}

impl fmt::Display for ShedOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            asked, freed, held, ..
        } = self;
        write!(f, "shed {freed} of {asked}; the engine holds {held}")?;
        self.limited_by
            .map_or(Ok(()), |limit| write!(f, ": {limit}"))
    }
}

impl fmt::Display for ChangedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = [
            ("applied", &self.applied),
            ("needs a restart", &self.restart),
        ];
        let changed = keys.iter().filter(|(_, keys)| !keys.is_empty());
        let parts: Vec<String> = changed
            .map(|(what, keys)| format!("{what}: {}", keys.join(", ")))
            .collect();
        if parts.is_empty() {
            return f.write_str("nothing has changed");
        }
        f.write_str(&parts.join("; "))
    }
}

fn kv_given(before: Bytes, held: Bytes, freed: Bytes, untouched: Bytes) -> String {
    let given = before.saturating_sub(held);
    if given == Bytes::ZERO {
        return format!("{} more", held.saturating_sub(before));
    }
    format!("{given} reclaimed, the kernel shows {freed} and {untouched} had not been touched")
}
