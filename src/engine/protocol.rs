//! Protocol of the engine's thread: commands, events, results and errors.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use super::{
    breakdown::Breakdown,
    disk::Retained,
    error::{ApplyError, ApplyReport},
    generate::{FinishReason, GenerateError, RequestId, Usage},
    model::{ExpertCounts, Kept, SavedView, with_transfers, without_drafts},
    tensor_group::TensorGroup,
};
use cotenant_policy::{
    engine_failure::Cure,
    lease::Class,
    residency::{EnginePlan, ModelShape},
    speed::Calibration,
};
use cotenant_units::{Bytes, Tokens, causes::in_one_line, lock::locked};

/// Settings of the engine's thread.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Limit of waiting requests. Default 16, at least 1.
    pub queue_limit: usize,
    /// Unread events of a requester before deltas are merged. Default 32.
    pub stream_buffer: usize,
    /// Time for which a requester may read nothing, with its buffer full, before its request is cancelled. Default 10
    /// s.
    pub unread_limit: Duration,
    /// Number of answers computed together, if the model supports it. Default: the model's maximum.
    pub answers_max: usize,
    /// Whether tokens are drafted from earlier text. Default: enabled.
    pub drafts: bool,
    /// Folder in which conversations are kept on disk. Default: none.
    pub conversations: Option<PathBuf>,
    /// Idle time after which a conversation is saved there. Default 30 s: longer than a pause between two turns.
    pub save_after: Duration,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            queue_limit: 16,
            stream_buffer: 32,
            unread_limit: Duration::from_secs(10),
            answers_max: usize::MAX,
            drafts: true,
            conversations: None,
            save_after: Duration::from_secs(30),
        }
    }
}

/// Reports of the engine to the daemon, through the single bounded sink passed at its start.
///
/// Replies to a command, `Failed` and `Stopped` wait until the sink has room; `RequestStarted`, `RequestFinished` and
/// `CapacityWanted` are dropped and counted if it has none. Answers continue meanwhile.
#[derive(Debug)]
pub enum EngineEvent {
    /// A plan is in force; the memory it released has been returned.
    Applied {
        /// Revision of the plan.
        revision: u64,
        /// Completed and refused parts.
        report: ApplyReport,
        /// The engine's memory now; `None` if the plan was applied in the middle of a prompt, where the snapshot
        /// contains it slightly later.
        breakdown: Option<Arc<Breakdown>>,
    },
    /// A plan could not be applied. Completed parts persist, and the snapshot contains the plan in force: slightly
    /// later if the plan was applied in the middle of a prompt.
    ApplyFailed {
        /// Revision of the plan.
        revision: u64,
        /// The cause.
        error: ApplyFailure,
    },
    /// Capabilities of the engine and the disk, measured after the load.
    Calibrated {
        /// The measurements.
        calibration: Calibration,
    },
    /// Weights released temporarily for a measurement could not be reallocated: less is in force than requested.
    Receded {
        /// The plan in force.
        plan: Arc<EnginePlan>,
        /// The engine's memory now.
        breakdown: Arc<Breakdown>,
        /// The cause.
        message: String,
    },
    /// The smaller prefill chunk of a plan received during a chunk is in force after the end of that chunk.
    Rechunked {
        /// Result of the change.
        report: ApplyReport,
    },
    /// The thread failed; every request has been answered, and `Stopped` follows.
    Failed {
        /// Description of the failure.
        message: String,
        /// Condition for loading the model again.
        cure: Cure,
        /// Memory of its model kept by hanging reads: nothing is loaded before they have returned.
        hung: Option<Retained>,
    },
    /// A model could not be loaded; another may be tried.
    LoadFailed {
        /// The file.
        path: PathBuf,
        /// The error and its causes.
        message: String,
        /// The remedy, if there is one.
        hint: Option<&'static str>,
        /// Condition for loading it again.
        cure: Cure,
        /// Memory kept by hanging reads, if the disk does not respond: nothing is loaded before they have returned.
        hung: Option<Retained>,
    },
    /// A model is loaded.
    Ready {
        /// The compute backend, for display.
        backend: String,
        /// Its memory layout.
        shape: Arc<ModelShape>,
        /// The plan in force.
        plan: Arc<EnginePlan>,
        /// Why that is less than requested.
        refused: Option<String>,
        /// The engine's memory now.
        breakdown: Arc<Breakdown>,
    },
    /// The running answer approaches the end of the KV capacity, or waits there.
    CapacityWanted {
        /// The capacity with which it continues for a while.
        needed: Tokens,
        /// Its largest possible capacity.
        wanted: Tokens,
        /// Its client, if known.
        client: Option<Arc<str>>,
    },
    /// A request ended.
    RequestFinished {
        /// Its name.
        id: RequestId,
        /// Result of the request.
        outcome: Result<FinishReason, GenerateError>,
        /// Resources it took.
        usage: Usage,
        /// From submission to the start.
        waited: Duration,
        /// From the start to the first token; `None` if there was none, or if other answers or forced tokens
        /// interfered: it is then no measure of the time per token.
        prompt_took: Option<Duration>,
        /// From the start to the end.
        took: Duration,
    },
    /// A request left the queue.
    RequestStarted {
        /// Its name.
        id: RequestId,
        /// Tokens of its prompt.
        prompt_tokens: Tokens,
        /// From submission to the start.
        waited: Duration,
    },
    /// The thread ended; the engine holds no memory any more. Nothing follows.
    Stopped,
}

/// Reason why a plan could not be applied.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ApplyFailure {
    /// The model refused it.
    #[error("cannot apply the plan: {message}")]
    Model {
        /// The error and its causes.
        message: String,
    },
    /// No model is loaded.
    #[error("cannot apply the plan: no model is loaded")]
    NoModel,
    /// The engine is stopping.
    #[error("cannot apply the plan: the engine is stopping")]
    Stopping,
    /// A later plan arrived before this one's turn.
    #[error("cannot apply the plan: revision {by} superseded it")]
    Superseded {
        /// The later plan.
        by: u64,
    },
}

impl ApplyFailure {
    /// The failure that corresponds to a model's error.
    pub(super) fn of(error: &ApplyError) -> Self {
        Self::Model {
            message: in_one_line(error),
        }
    }
}

/// Phase of the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EnginePhase {
    /// It completes its current requests and accepts no more.
    Draining,
    /// No model was requested yet, or loading it failed.
    #[default]
    Empty,
    /// It failed.
    Failed {
        /// Description of the failure.
        message: String,
    },
    /// A model is loading.
    Loading {
        /// The file.
        path: PathBuf,
    },
    /// It serves requests.
    Ready,
    /// Its thread ended.
    Stopped,
}

impl EnginePhase {
    /// A single word for messages.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Draining => "draining",
            Self::Empty => "without a model",
            Self::Failed { .. } => "failed",
            Self::Loading { .. } => "loading",
            Self::Ready => "ready",
            Self::Stopped => "stopped",
        }
    }
}

/// A request being answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningRequest {
    /// Its name.
    pub id: RequestId,
    /// Its class.
    pub class: Class,
    /// Its client, if known.
    pub client: Option<Arc<str>>,
    /// Tokens of its prompt.
    pub prompt_tokens: Tokens,
    /// Largest number of tokens of prompt and answer.
    pub most: Tokens,
    /// Prompt tokens that were already in the KV cache.
    pub cached: Tokens,
    /// Tokens generated so far.
    pub generated: Tokens,
    /// Oldest tokens of its context that may be dropped.
    pub droppable: Tokens,
    /// Tokens of its context that were dropped.
    pub dropped: Tokens,
}

/// A request that waits for its turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingRequest {
    /// Its name.
    pub id: RequestId,
    /// Its class.
    pub class: Class,
    /// Its client, if known.
    pub client: Option<Arc<str>>,
    /// Tokens of its prompt.
    pub prompt_tokens: Tokens,
    /// Since it was submitted.
    pub waited: Duration,
}

/// The state of the engine for operators, metrics and tests. Published after every token and command; [`Default`] is
/// the initial one.
#[derive(Clone, Debug, Default)]
pub struct EngineSnapshot {
    /// Its phase.
    pub phase: EnginePhase,
    /// The loaded model.
    pub shape: Option<Arc<ModelShape>>,
    /// The plan in force.
    pub plan: Option<Arc<EnginePlan>>,
    /// The revision of the plan in force; `None` for the plan of the load.
    pub revision: Option<u64>,
    /// Its total memory, as of the last load or plan.
    pub held: Option<Bytes>,
    /// Untouched, and therefore not resident, part of that.
    pub untouched: Bytes,
    /// Its memory by kind, as of the last load, plan or request.
    pub breakdown: Option<Arc<Breakdown>>,
    /// Experts of a mixture, as of the last load, plan or request.
    pub experts: Option<ExpertCounts>,
    /// The requests being answered, in the order of their starts.
    pub running: Vec<RunningRequest>,
    /// Largest number of concurrent answers.
    pub answers_max: usize,
    /// The last answered request, of which the KV cache keeps [`Self::position`] tokens while nothing runs.
    pub last: Option<RunningRequest>,
    /// The conversations kept besides these.
    pub kept: Arc<[Kept]>,
    /// The conversations on disk.
    pub saved: Arc<SavedView>,
    /// Tokens in the KV cache: of the running answers, with shared tokens counted once; otherwise of the last one.
    pub position: Tokens,
    /// Requests waiting.
    pub queued: usize,
    /// Requests ended so far.
    pub requests_finished: u64,
    /// Prompt tokens computed since the start, without cached ones.
    pub tokens_prefilled: u64,
    /// Tokens generated since the start.
    pub tokens_generated: u64,
    /// Tokens drafted since the start.
    pub tokens_drafted: u64,
    /// Accepted drafted tokens.
    pub drafts_accepted: u64,
    /// Rate of generation in the running answer, or the last one.
    pub tokens_per_second: f64,
    /// Prefill rate of the last prompt; 0 while unknown, as after a change of plan.
    pub prefill_per_second: f64,
    /// Recent duration of answers from their start; zero before the first.
    pub answer_takes: Duration,
    /// When the first of the running answers began.
    pub running_since: Option<Instant>,
    /// The longest working time without accepting commands.
    pub command_gap_max: Duration,
    /// Events dropped by the full sink.
    pub events_dropped: u64,
}

impl EngineSnapshot {
    /// Estimated time until an answer begins: the requests before it in the queue, and its own prompt.
    pub fn begins_after(&self, prompt: Tokens, now: Instant) -> Duration {
        let together = self.answers_max.max(1);
        // It starts concurrently with the running ones.
        let is_next = self.running.len() + self.queued < together;
        let running = self.running_since.filter(|_| !is_next);
        let running = running.map_or(Duration::ZERO, |since| {
            self.answer_takes
                .saturating_sub(now.saturating_duration_since(since))
        });
        let rounds = if is_next { 0 } else { self.queued / together };
        let before = self
            .answer_takes
            .saturating_mul(u32::try_from(rounds).unwrap_or(u32::MAX));
        let prefill = if self.prefill_per_second > 0.0 {
            Duration::try_from_secs_f64(f64::from(prompt.get()) / self.prefill_per_second)
                .unwrap_or(Duration::MAX)
        } else {
            // Without an estimate, assume no delay.
            Duration::ZERO
        };
        running.saturating_add(before).saturating_add(prefill)
    }
}

/// Command to the thread, executed between two tokens.
#[derive(Debug)]
pub(super) enum Command {
    /// Load a model.
    Load {
        /// The file.
        path: PathBuf,
        /// Its initial plan.
        plan: EnginePlan,
    },
    /// Apply a plan.
    Apply {
        /// Revision of the plan.
        revision: u64,
        /// The plan.
        plan: EnginePlan,
    },
}

/// Contents of a model file's header.
#[derive(Clone, Debug, PartialEq)]
pub struct Inspected {
    /// The model's memory layout.
    pub shape: ModelShape,
    /// Fixed memory for drafts.
    pub draft_bytes: Bytes,
    /// The tokenizer's share of the fixed memory, including the process for grammars and chat templates.
    pub text: Bytes,
    /// Contents of the file besides the text model, with their sizes: they are not loaded.
    pub unused: Vec<String>,
    /// Chat format if the file has no chat template, as the end of a sentence.
    pub without_template: Option<&'static str>,
    /// The tensors of the file, grouped by purpose.
    pub tensors: Vec<TensorGroup>,
    /// Length of the file, of all parts together.
    pub file_bytes: Bytes,
}

impl Inspected {
    /// The same without memory for drafts, unless the engine `drafts`.
    #[must_use]
    pub fn drafting(mut self, drafts: bool) -> Self {
        if !drafts {
            self.shape = without_drafts(self.shape, self.draft_bytes);
        }
        self
    }

    /// The same with the buffers for conversations on disk, if the engine `keeps` them there.
    #[must_use]
    pub fn keeping_conversations(mut self, keeps: bool) -> Self {
        if keeps {
            self.shape = with_transfers(self.shape);
        }
        self
    }
}

/// The inspected model for which the next load's plan was made: a file that contains another model by then is not
/// loaded with it. Any model, while unset.
#[derive(Clone, Debug, Default)]
pub struct Expected(Arc<Mutex<Option<ModelShape>>>);

impl Expected {
    /// Sets the expected model.
    pub fn set(&self, shape: Option<ModelShape>) {
        *locked(&self.0) = shape;
    }

    /// Whether `found` is the expected model, regardless of names.
    pub(super) fn is(&self, found: &ModelShape) -> bool {
        let expected = locked(&self.0);
        expected.as_ref().is_none_or(|expected| {
            let named = ModelShape {
                name: found.name.clone(),
                ..expected.clone()
            };
            named == *found
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_begins_after_what_is_before_it() {
        let now = Instant::now() + Duration::from_secs(60);
        let mut state = EngineSnapshot::default();
        // Without an estimate, nothing is refused.
        assert_eq!(state.begins_after(Tokens::new(50_000), now), Duration::ZERO);
        state.prefill_per_second = 100.0;
        assert_eq!(
            state.begins_after(Tokens::new(200), now),
            Duration::from_secs(2)
        );
        state.answer_takes = Duration::from_secs(4);
        assert_eq!(
            state.begins_after(Tokens::new(200), now),
            Duration::from_secs(2)
        );
        // One that has run for a second takes three more, two waiting ones take eight.
        state.running_since = Some(now.checked_sub(Duration::from_secs(1)).unwrap());
        state.queued = 2;
        assert_eq!(
            state.begins_after(Tokens::new(200), now),
            Duration::from_secs(13)
        );
        // One that takes longer than usual may end at any time.
        state.running_since = Some(now.checked_sub(Duration::from_secs(9)).unwrap());
        state.queued = 0;
        assert_eq!(
            state.begins_after(Tokens::new(200), now),
            Duration::from_secs(2)
        );
    }
}
