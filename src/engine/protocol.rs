//! Commands, events, results and errors that cross to and from the engine's thread.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::{
    breakdown::Breakdown,
    disk::Retained,
    error::{ApplyError, ApplyReport},
    generate::{FinishReason, GenerateError, RequestId, Usage},
    model::Kept,
    tensor_group::TensorGroup,
};
use cotenant_policy::{
    engine_failure::Cure,
    lease::Class,
    residency::{EnginePlan, ModelShape},
    streaming::Calibration,
};
use cotenant_units::causes::in_one_line;
use cotenant_units::{Bytes, Tokens};

/// Settings of the engine's thread.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Requests that may wait. Default 16, at least 1.
    pub queue_limit: usize,
    /// Events that a requester may leave unread before deltas are merged. Default 32.
    pub stream_buffer: usize,
    /// How long a requester may read nothing, with its buffer full, before its request is cancelled. Default 10 s.
    pub unread_limit: Duration,
    /// Answers that are computed together, where the model can do that. Default: as many as it can.
    pub answers_max: usize,
    /// Whether tokens are drafted from what was said before. Default: they are.
    pub drafts: bool,
    /// File in which conversations are kept from the end of one run to the start of the next. Default: none.
    pub conversations: Option<PathBuf>,
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
        }
    }
}

/// What the engine tells the daemon, through the one bounded sink it was started with.
///
/// Those that answer a command, and `Failed` and `Stopped`, wait until the sink has room; `RequestStarted`,
/// `RequestFinished` and `CapacityWanted` are dropped and counted when it has none. Answers go on meanwhile.
#[derive(Debug)]
pub enum EngineEvent {
    /// A plan is in force; the bytes it gave back are back.
    Applied {
        /// Which plan.
        revision: u64,
        /// What was done, and what was not possible.
        report: ApplyReport,
        /// What the engine holds now; `None` when the plan was taken in the middle of a prompt, where the snapshot
        /// shows it a little later.
        breakdown: Option<Arc<Breakdown>>,
    },
    /// A plan could not be put in force. What was done of it until then stays done, and the snapshot says what is in force:
    /// a little later when the plan was taken in the middle of a prompt.
    ApplyFailed {
        /// Which plan.
        revision: u64,
        /// Why.
        error: ApplyFailure,
    },
    /// What the engine and the disk can do, measured after the load.
    Calibrated {
        /// It.
        calibration: Calibration,
    },
    /// Weights that were given up for a moment, to measure, could not be had again: less is in force than was asked for.
    Receded {
        /// What is in force now.
        plan: Arc<EnginePlan>,
        /// What the engine holds now.
        breakdown: Arc<Breakdown>,
        /// Why.
        message: String,
    },
    /// The smaller prefill chunk of a plan that came while a chunk was under way is in force, for that has ended.
    Rechunked {
        /// What came of it.
        report: ApplyReport,
    },
    /// The thread broke down; every request has been answered, and `Stopped` follows.
    Failed {
        /// What happened.
        message: String,
        /// What loading the model again needs.
        cure: Cure,
        /// What reads that hang keep of its model: nothing is loaded before they have returned.
        hung: Option<Retained>,
    },
    /// A model could not be loaded; another may be tried.
    LoadFailed {
        /// The file.
        path: PathBuf,
        /// The error and its causes.
        message: String,
        /// The remedy, where there is one.
        hint: Option<&'static str>,
        /// What loading it again needs.
        cure: Cure,
        /// What reads that hang keep, where the disk does not answer: nothing is loaded before they have returned.
        hung: Option<Retained>,
    },
    /// A model is loaded.
    Ready {
        /// What computes it, for people.
        backend: String,
        /// Its memory, piece by piece.
        shape: Arc<ModelShape>,
        /// What is in force.
        plan: Arc<EnginePlan>,
        /// Why that is less than what was asked for.
        refused: Option<String>,
        /// What the engine holds now.
        breakdown: Arc<Breakdown>,
    },
    /// The running answer comes to the end of the KV capacity, or waits there.
    CapacityWanted {
        /// The capacity with which it goes on for a while.
        needed: Tokens,
        /// What it may come to.
        wanted: Tokens,
        /// Whose it is, where that is known.
        client: Option<Arc<str>>,
    },
    /// A request ended, in whatever way.
    RequestFinished {
        /// Its name.
        id: RequestId,
        /// How it ended.
        outcome: Result<FinishReason, GenerateError>,
        /// What it took.
        usage: Usage,
        /// From submission to the start.
        waited: Duration,
        /// From the start to the first token; `None` if there was none, or where others were answered meanwhile, or tokens took no
        /// pass of their own: it says nothing of the time for a token then.
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
    /// The thread ended; the engine holds nothing any more. Nothing follows.
    Stopped,
}

/// Why a plan could not be put in force.
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
    /// A later plan came before this one's turn.
    #[error("cannot apply the plan: revision {by} came before its turn")]
    Superseded {
        /// The later plan.
        by: u64,
    },
}

impl ApplyFailure {
    /// The failure that a model's error amounts to.
    pub(super) fn of(error: &ApplyError) -> Self {
        Self::Model {
            message: in_one_line(error),
        }
    }
}

/// What the engine is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EnginePhase {
    /// It finishes what it has and takes nothing more.
    Draining,
    /// No model was asked for yet, or loading it failed.
    #[default]
    Empty,
    /// It broke down.
    Failed {
        /// What happened.
        message: String,
    },
    /// A model is being loaded.
    Loading {
        /// The file.
        path: PathBuf,
    },
    /// It answers requests.
    Ready,
    /// Its thread ended.
    Stopped,
}

impl EnginePhase {
    /// One word for messages.
    #[must_use]
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

/// The request that is being answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningRequest {
    /// Its name.
    pub id: RequestId,
    /// Its class.
    pub class: Class,
    /// Who asks, where that is known.
    pub client: Option<Arc<str>>,
    /// Tokens of its prompt.
    pub prompt_tokens: Tokens,
    /// Tokens that prompt and answer may come to.
    pub most: Tokens,
    /// Those of them that were in the KV cache already.
    pub cached: Tokens,
    /// Tokens generated so far.
    pub generated: Tokens,
    /// Tokens of its context that may be dropped, the oldest.
    pub droppable: Tokens,
    /// Tokens of its context that were.
    pub dropped: Tokens,
}

/// A request that waits for its turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingRequest {
    /// Its name.
    pub id: RequestId,
    /// Its class.
    pub class: Class,
    /// Who asks, where that is known.
    pub client: Option<Arc<str>>,
    /// Tokens of its prompt.
    pub prompt_tokens: Tokens,
    /// Since it was submitted.
    pub waited: Duration,
}

/// The state of the engine as operators, metrics and tests see it. Published after every token and command;
/// [`Default`] is the one before anything happened.
#[derive(Clone, Debug, Default)]
pub struct EngineSnapshot {
    /// What it is doing.
    pub phase: EnginePhase,
    /// The loaded model.
    pub shape: Option<Arc<ModelShape>>,
    /// The plan in force.
    pub plan: Option<Arc<EnginePlan>>,
    /// The revision of the plan in force; `None` for the one it was loaded with.
    pub revision: Option<u64>,
    /// What it holds in all, as of the last load or plan.
    pub held: Option<Bytes>,
    /// How much of that is still untouched, so that it takes no memory.
    pub untouched: Bytes,
    /// What it holds, as of the last load, plan or request.
    pub breakdown: Option<Arc<Breakdown>>,
    /// The requests that are being answered, in the order in which they began.
    pub running: Vec<RunningRequest>,
    /// How many may be answered together.
    pub answers_max: usize,
    /// The last request that was answered, of which the KV cache keeps what [`Self::position`] says while nothing runs.
    pub last: Option<RunningRequest>,
    /// The conversations that are kept beside these.
    pub kept: Arc<[Kept]>,
    /// Tokens in the KV cache: of the running answers, what several have in common counted once; else of the last one.
    pub position: Tokens,
    /// Requests waiting.
    pub queued: usize,
    /// Requests ended, in whatever way.
    pub requests_finished: u64,
    /// Prompt tokens computed since the start; cached ones do not count.
    pub tokens_prefilled: u64,
    /// Tokens generated since the start.
    pub tokens_generated: u64,
    /// Tokens drafted since the start.
    pub tokens_drafted: u64,
    /// How many of them were right.
    pub drafts_accepted: u64,
    /// Rate of generation in the running answer, or the last one.
    pub tokens_per_second: f64,
    /// Rate at which the last prompt was taken in; 0 while it is not known, which it is not after a change of plan.
    pub prefill_per_second: f64,
    /// How long answers took lately, from their start; zero before the first.
    pub answer_takes: Duration,
    /// When the first of the running answers began.
    pub running_since: Option<Instant>,
    /// The longest time, while working, in which no command could be taken.
    pub command_gap_max: Duration,
    /// Events that found no room in the sink.
    pub events_dropped: u64,
}

impl EngineSnapshot {
    /// How long an answer would take to begin, as far as that is known: what is before it in the queue, and its own
    /// prompt.
    #[must_use]
    pub fn begins_after(&self, prompt: Tokens, now: Instant) -> Duration {
        let together = self.answers_max.max(1);
        // It begins beside those that run.
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
            // Unknown is not slow.
            Duration::ZERO
        };
        running.saturating_add(before).saturating_add(prefill)
    }
}

/// What the thread is asked to do between two tokens.
#[derive(Debug)]
pub(super) enum Command {
    /// Load a model.
    Load {
        /// The file.
        path: PathBuf,
        /// What it should hold at first.
        plan: EnginePlan,
    },
    /// Change what the model holds.
    Apply {
        /// Which plan.
        revision: u64,
        /// The plan.
        plan: EnginePlan,
    },
}

/// What the header of a model's file tells.
#[derive(Clone, Debug, PartialEq)]
pub struct Inspected {
    /// What the model occupies piece by piece.
    pub shape: ModelShape,
    /// How much of what is fixed the tokenizer takes, with the process that computes grammars and chat templates.
    pub text: Bytes,
    /// What the file has beside the text model, with its size: it stays there.
    pub unused: Vec<String>,
    /// How chats are written where the file has no chat template, as a sentence goes on.
    pub without_template: Option<&'static str>,
    /// The tensors of the file, by what they are for.
    pub tensors: Vec<TensorGroup>,
    /// Length of the file, of all its parts together.
    pub file_bytes: Bytes,
}

/// The model for which the next plan to load by was made, as it was inspected: a file that holds another one by then is not
/// loaded by it. Any model, while nothing is set.
#[derive(Clone, Debug, Default)]
pub struct Expected(Arc<Mutex<Option<ModelShape>>>);

impl Expected {
    /// From now on it is this one.
    pub fn set(&self, shape: Option<ModelShape>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = shape;
    }

    /// Whether `found` is it, whatever they are called.
    pub(super) fn is(&self, found: &ModelShape) -> bool {
        let expected = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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
        // Nothing is known: nothing is refused.
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
        // One that has run for a second takes three more, two that wait take eight.
        state.running_since = Some(now.checked_sub(Duration::from_secs(1)).unwrap());
        state.queued = 2;
        assert_eq!(
            state.begins_after(Tokens::new(200), now),
            Duration::from_secs(13)
        );
        // One that takes longer than answers do may end at any time.
        state.running_since = Some(now.checked_sub(Duration::from_secs(9)).unwrap());
        state.queued = 0;
        assert_eq!(
            state.begins_after(Tokens::new(200), now),
            Duration::from_secs(2)
        );
    }
}
