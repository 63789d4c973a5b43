//! Events and actions of the arbiter.
//!
//! Events are its only input, so that a journal of them gives the same actions again. Asking for memory back frees
//! nothing; the event that confirms it does.
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

/// A conversation that the engine keeps beside the one that it computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdleConversation {
    /// KV capacity that its end frees, in tokens.
    pub capacity: Tokens,
    /// Tokens that a later prompt of it has to read again then.
    pub tokens: Tokens,
    /// How long it has waited for that prompt.
    pub idle_ms: u64,
    /// Whether another conversation is likely to have taken its place.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub superseded: bool,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum Event {
    /// The machine was read: first at the start, then as [`Action::SampleAfter`] says, and whenever a trigger fires.
    Sampled(Sample),
    /// A holder was measured; `used` is `None` when it could not be, and zero when its process is gone.
    ///
    /// Every [`Action::Measure`] is answered by one of these. All holders are measured at least once per second besides, as
    /// close to a sample as can be: what the sample shows beyond their measurements is taken for an unmanaged process's.
    Measured {
        /// Name of the holder, as [`LeaseView::holder`] has it.
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
    /// The caller does not wait any more.
    LeaseRequestCancelled { ticket: Ticket },
    /// A holder still needs its lease.
    LeaseRenewed(LeaseCall),
    /// A holder wants more or less.
    LeaseResizeRequested(LeaseResize),
    /// A holder gives its lease back.
    LeaseReleased(LeaseCall),
    /// A holder answers a lower target.
    TargetAnswered(TargetAnswered),
    /// The holder of a lease is gone: its process ended.
    HolderLost {
        lease: LeaseId,
        /// The process that ended. Only the end of the one that is measured says that its memory is back; a journal of
        /// an older version has none.
        pid: Option<u32>,
    },
    /// The model's header was read; nothing is loaded yet.
    EngineInspected { shape: ModelShape },
    /// The engine carried out a plan, the first one included.
    EngineApplied(EngineApplied),
    /// The engine could not carry out a plan. What it did until then stays done: it is unknown what of it is in force
    /// beside what was before.
    EngineApplyFailed { revision: u64, reason: String },
    /// The engine is gone, its memory with it.
    EngineFailed {
        reason: String,
        /// What loading it again needs. A journal of an older version has none.
        #[serde(default)]
        cure: Cure,
        /// What reads keep that hang, where the disk does not answer. The model's header is read again when they have
        /// returned, and comes as [`Self::EngineInspected`]; nothing is loaded before. A journal of an older version
        /// has none.
        #[serde(skip_serializing_if = "Option::is_none")]
        left: Option<Bytes>,
    },
    /// The engine began or finished generating.
    EngineActivity {
        /// Requests running or waiting.
        requests: u32,
        /// Tokens of context that the running sequence holds in the KV cache.
        kv_used: u32,
        /// Tokens that earlier answers have left there while nothing runs: the next prompt may go on from them.
        #[serde(default)]
        kv_kept: u32,
        /// Tokens of the running answer's prompt.
        #[serde(default)]
        kv_prompt: u32,
        /// Tokens that its prompt and the answer may come to. A journal of before has neither.
        #[serde(default)]
        kv_most: u32,
        /// Tokens that the running sequence may lose, the oldest behind those that stay.
        #[serde(default)]
        kv_droppable: u32,
        /// Tokens that it has lost.
        #[serde(default)]
        kv_dropped: u32,
        /// What the engine holds and has not touched yet.
        #[serde(default)]
        untouched: Bytes,
        /// Conversations beside that sequence. A journal of before has none.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        beside: Vec<IdleConversation>,
    },
    /// The engine has measured what it and the disk can do.
    EngineCalibrated(Calibration),
    /// The engine gave an answer from end to end, and timed it.
    EngineTimed(Timing),
    /// A worker answers.
    WorkerReady { worker: String, pid: u32 },
    /// Why a worker's process died, or why there was none. Its [`WorkerExited`](Self::WorkerExited) follows when the
    /// whole group of the process is gone.
    WorkerDied { certificate: Box<DeathCertificate> },
    /// A worker's process is gone and reaped, or could not be started.
    WorkerExited {
        worker: String,
        /// Whether we asked for it.
        intended: bool,
        /// What happened, in words: `exit code 3`, `killed by SIGKILL, sender unknown`.
        cause: String,
    },
    /// The most that a worker's processes have used since it was started, as the kernel remembers it.
    PeakMeasured { worker: String, peak: Bytes },
    /// A worker took up or put down a piece of work.
    WorkerActivity { worker: String, requests: u32 },
    /// A client has a request for a worker that does not take it now.
    WorkerWanted {
        worker: String,
        /// Whose request it is, where clients have keys. A journal of before has none.
        #[serde(skip_serializing_if = "Option::is_none")]
        client: Option<String>,
    },
    /// A client wants a worker in another variant (ASR from grammar to open vocabulary).
    WorkerResizeRequested(WorkerResize),
    /// A worker has changed its variant, or failed to and has kept the old one.
    WorkerResized(WorkerResized),
    /// A detector found that a worker runs and answers nothing.
    WorkerUnresponsive {
        worker: String,
        pid: u32,
        /// What went unanswered: `transcribe within 30.0 s, and 3 questions after it`.
        evidence: String,
    },
    /// A client's request needs, or would like, more KV capacity than is in force.
    ///
    /// Capacity that is needed comes from layers where nothing may grow: dwell, back-off and an operator's shed all
    /// stay. For an answer that is being written it also comes from what is free, dwell or not, and from layers at
    /// Critical: without it the sentence would end.
    CapacityWanted(CapacityWanted),
    /// An operator wants `bytes` back from the engine, now.
    OperatorShed { ticket: Ticket, bytes: Bytes },
    /// An operator allows growth at once, without waiting for the dwell.
    OperatorRegrow { ticket: Ticket },
    /// An operator wants KV kept as another type from now on, what is there included.
    OperatorKvType { ticket: Ticket, kv_type: KvType },
    /// An operator starts, stops or recycles a worker.
    OperatorWorker {
        ticket: Ticket,
        worker: String,
        command: WorkerCommand,
    },
    /// The leases of the run before this one, without those of holders that are gone.
    ///
    /// The first event of a run, or none: later it would meet leases of this run.
    Recovered {
        /// What outlived it.
        book: Book,
        /// Its workers that are alive.
        adopted: Vec<AdoptedWorker>,
    },
    /// The leases of the run before this one cannot be read: their memory counts as unaccounted until their holders ask
    /// again. A reader of before does not know it.
    BookLost {
        /// Where the damaged file is kept.
        kept: String,
    },
    /// Nothing new is admitted from now on; what runs may finish.
    DrainRequested,
    /// An operator ends a drain: requests are admitted again. A reader of before does not know it.
    DrainCancelled,
    /// An operator wants the model loaded that failed to load, or that was not there.
    OperatorLoad { ticket: Ticket },
    /// An operator has the configuration read again. A reader of before does not know it.
    Reconfigured {
        ticket: Ticket,
        /// All settings. Those of the engine, the scope and what was learned stay as they are; those of a worker that runs
        /// count from its next start.
        params: Box<Params>,
        /// Keys of the file that have changed.
        changes: ChangedKeys,
    },
    /// A configuration was read again and refused before its settings were considered; nothing has changed. A reader of before
    /// does not know it.
    ReloadRefused {
        /// What is wrong with it.
        cause: String,
    },
    /// The machine, or a control group around the supervisor, has more or less memory than before. A reader of before does not
    /// know it.
    Resized {
        /// What it has now.
        machine: MachineMemory,
        /// The settings for it, or why there are none.
        params: Result<Box<Params>, String>,
    },
    /// The time of `next_deadline` has come.
    DeadlineReached,
}

impl Event {
    /// The ticket of a call that gets an answer, with this event or later.
    #[must_use]
    pub const fn ticket(&self) -> Option<Ticket> {
        match self {
            Self::LeaseRequested { ticket, .. }
            | Self::LeaseRenewed(LeaseCall { ticket, .. })
            | Self::LeaseResizeRequested(LeaseResize { ticket, .. })
            | Self::LeaseReleased(LeaseCall { ticket, .. })
            | Self::WorkerResizeRequested(WorkerResize { ticket, .. })
            | Self::OperatorShed { ticket, .. }
            | Self::OperatorRegrow { ticket }
            | Self::OperatorKvType { ticket, .. }
            | Self::OperatorWorker { ticket, .. }
            | Self::OperatorLoad { ticket }
            | Self::Reconfigured { ticket, .. } => Some(*ticket),
            _ => None,
        }
    }
}

/// The call of a holder about its lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseCall {
    pub ticket: Ticket,
    pub lease: LeaseId,
    pub generation: u64,
    pub peer: Peer,
}

/// The bounds that a holder wants for its lease from now on.
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

/// The answer of a holder to a lower target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetAnswered {
    pub lease: LeaseId,
    pub nonce: u64,
    pub answer: TargetAnswer,
    /// What it says it uses now, if it says so. Never credited; measured instead.
    pub claimed: Option<Bytes>,
}

/// The report of the engine about a plan that it carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineApplied {
    pub revision: u64,
    /// What is in force now; may hold more than asked where the running sequence needs it.
    pub in_force: EnginePlan,
    /// Memory given back, as the kernel sees it.
    pub freed: Bytes,
    /// Memory of the engine by its own mappings, touched or not.
    pub used: Bytes,
    /// How much of that has not been touched: it takes no memory yet.
    #[serde(default)]
    pub untouched: Bytes,
    /// What was given up and had never been touched, so that the kernel had nothing to take back.
    #[serde(default)]
    pub untouched_given: Bytes,
    pub took: Duration,
}

/// The variant that a client wants a worker in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerResize {
    pub ticket: Ticket,
    pub worker: String,
    pub variant: String,
    pub wait: Duration,
}

/// The variant of a worker after it was asked to change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerResized {
    pub worker: String,
    pub variant: String,
    pub used: Option<Bytes>,
    pub error: Option<String>,
}

/// The KV capacity for a client's request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapacityWanted {
    /// Tokens without which the request cannot be served; zero if there are enough for it.
    pub needed: Tokens,
    /// Tokens that it would like the KV cache to hold.
    pub wanted: Tokens,
    /// Whose request it is, where clients have keys. A journal of before has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Whether its answer is being written, and ends without it.
    #[serde(default)]
    pub is_running: bool,
}

/// Keys of the configuration that differ from what runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedKeys {
    /// Those in force from now on; those of workers, from the next start.
    pub applied: Vec<String>,
    /// Those that need a restart of the supervisor.
    pub restart: Vec<String>,
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

/// The one answer to a [`Ticket`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "result")]
pub enum Answer {
    /// Granted, renewed or resized: the lease as it is now.
    Lease { lease: LeaseView },
    /// The grant that a `validate_only` request would get.
    WouldGrant {
        bytes: Bytes,
        /// What would be reclaimed from others first.
        after_shedding: Bytes,
    },
    /// The outcome of an operator's shed.
    Shed(ShedOutcome),
    /// Done, as `done` says.
    Done { done: Done },
    /// Not done.
    Denied {
        denial: Denial,
        /// When it may be worth trying again, if ever.
        retry_after: Option<Duration>,
    },
}

/// The outcome of an operator's shed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShedOutcome {
    pub asked: Bytes,
    /// What the engine's lease came down by.
    pub freed: Bytes,
    /// What the engine holds now.
    pub held: Bytes,
    /// Why it is less than asked for; `None` if it is not.
    pub limited_by: Option<ShedLimit>,
}

/// Why a shed gave less than an operator asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "limit")]
pub enum ShedLimit {
    /// The engine runs with no less.
    #[error("the floor of the engine is {bytes}")]
    Floor { bytes: Bytes },
    /// The running answer uses the rest of the KV capacity.
    #[error("the running answer uses {tokens} tokens of KV")]
    RunningAnswer { tokens: Tokens },
    /// The engine gave less than it was asked for.
    #[error("the engine has not confirmed the rest")]
    NotConfirmed,
}

/// The action for a caller that is done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Done {
    /// As the decision says.
    #[error("{0}")]
    Decided(Decision),
    /// An operator's command to a worker.
    #[error("worker `{worker}` {done}")]
    Worker { worker: String, done: WorkerDone },
    /// The plan that the engine is asked for.
    #[error("{0}")]
    Grows(PlanReason),
    #[error("worker `{worker}` comes back")]
    WorkerReturns { worker: String },
    #[error("worker `{worker}` goes back to variant `{variant}`")]
    VariantReturns { worker: String, variant: String },
    /// Nothing is waited for any more but the next sample.
    #[error("what has room grows back with the next sample")]
    GrowsWhenSampled,
    /// Everything has its full size.
    #[error("everything has its full size")]
    FullSize,
    /// No model can be loaded, since no LLM is configured.
    #[error("no LLM is configured")]
    NoEngine,
    /// The model is loaded, or is being loaded.
    #[error("the model is loaded, or is being loaded")]
    Loaded,
    /// The model's file is being read.
    #[error("the model's file is being read; `cotenant status` shows what comes of it")]
    Inspecting,
    /// KV is kept as this type already.
    #[error("KV is kept as {0} already")]
    KvIs(KvType),
    /// KV will be kept as this type when the engine is loaded.
    #[error("KV will be kept as {0} when the engine is loaded")]
    KvWhenLoaded(KvType),
    /// KV will be kept as this type as soon as there is room for `more`, or as soon as the book has room.
    #[error(
        "KV will be kept as {kv_type} as soon as {}",
        more.map_or_else(|| "the book has room".to_owned(), |more| format!("there is room for {more} more"))
    )]
    KvWhenRoom {
        kv_type: KvType,
        more: Option<Bytes>,
    },
    /// KV is kept as this type from now on.
    #[error(
        "KV is kept as {kv_type}: {}, in {:.1} ms; the engine holds {held}, {before} before",
        kv_given(*before, *held, *freed, *untouched),
        took.as_secs_f64() * 1000.0
    )]
    KvChanged {
        kv_type: KvType,
        before: Bytes,
        held: Bytes,
        /// What the kernel shows to be back.
        freed: Bytes,
        /// Given up, and never touched.
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
    /// It starts when there is memory.
    #[error("starts when there is memory")]
    Starts,
    #[error("stops")]
    Stops,
    #[error("is restarted")]
    Restarts,
    /// It is in this variant.
    #[error("is in variant `{variant}`")]
    IsIn { variant: String },
}

/// Something to be done. Carrying it out is the shell's work; the outcome comes back as an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "action")]
pub enum Action {
    /// Give the caller its answer.
    Answer { ticket: Ticket, answer: Answer },
    /// Ask a tenant to come down to a target; goes to its hold stream.
    SetTarget {
        lease: LeaseId,
        nonce: u64,
        bytes: Bytes,
        deadline: Timestamp,
        reason: ReclaimReason,
    },
    /// Tell a tenant that its lease has ended.
    EndLease { lease: LeaseName, end: LeaseEnd },
    /// Load the model with this plan.
    LoadEngine { revision: u64, plan: EnginePlan },
    /// Change what the engine holds, between two tokens.
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
    /// End a worker that does not respond: SIGABRT, so that it can leave a trace, and SIGKILL after its grace.
    AbortWorker { worker: String, evidence: String },
    /// Let a worker change its variant; the larger size is booked.
    ResizeWorker { worker: String, variant: String },
    /// Read the header of the model's file; it comes as [`Event::EngineInspected`] or [`Event::EngineFailed`]. A GPU that did
    /// not compute is tried again.
    InspectModel,
    /// The same as a retry by itself, for which a GPU that did not compute is not tried again.
    ReinspectModel,
    /// Keep what was learned of holders for the next run.
    StorePeaks { peaks: Peaks },
    /// Measure a holder now, rather than at the next round.
    Measure { tenant: String },
    /// Give back what nvmap's page pool keeps, where that is allowed; the next samples show what came of it.
    EmptyPagePool { bytes: Bytes },
    /// Read the machine after this time.
    SampleAfter { wait: Duration },
    /// The level has changed.
    LevelChanged(LevelChange),
    /// Memory is reclaimed: who could give what, at what cost, and who was chosen. What is asked follows.
    Weighed { weighing: Weighing },
    /// A decision with its figures that needs nothing done.
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
