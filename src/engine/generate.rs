//! One request to the model: what is asked, what is reported, and how it may fail.
//!
//! The life of a request:
//!
//! ```text
//!  submit ──refused──► SubmitError
//!    │
//!  queued ──deadline, stop──► Failed          ──cancelled, reader gone──► Finished(Cancelled)
//!    │
//!  Started ─► Delta … Delta ─► Finished(Stop | Length | Cancelled | KvReclaimed)
//!    └──────────────────────► Failed
//! ```
//!
//! Exactly one of `Finished` and `Failed` ends each stream, unless its reader has gone.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    chat::ChatError,
    constraint::ConstraintError,
    sampling::{Sampling, SamplingError},
    tokenizer::EncodeError,
};
use cotenant_conversation::{AnswerForm, sinks::Sinks};
pub use cotenant_conversation::{Prompt, Usage};
use cotenant_policy::lease::Class;
use cotenant_units::Tokens;

/// Names one request, chosen by its submitter; unique among the requests the engine knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u64);

impl RequestId {
    /// A name as given.
    #[must_use]
    pub const fn new(id: u64) -> Self {
        Self(id)
    }

    /// As a plain number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0.to_string())
    }
}

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// Its name.
    pub id: RequestId,
    /// What the answer continues.
    pub prompt: Prompt,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// The most tokens that are generated; `None` for as many as the context holds, dropped ones not counted in.
    pub max_tokens: Option<Tokens>,
    /// The answer ends before the first of these strings; they may span tokens. Empty strings are ignored.
    pub stop: Vec<String>,
    /// When the answer is of no use any more.
    pub deadline: Option<Instant>,
    /// How long the answer may take from its turn on, prompt and waits for its form included; it ends with
    /// [`FinishReason::Length`] then.
    pub time_max: Option<Duration>,
    /// How long it may be written while one of its class, or a more urgent one, waits; as above.
    pub time_shared: Option<Duration>,
    /// The KV capacity up to which more may be asked for while the answer is written; none is where there is as much.
    pub grows_to: Tokens,
    /// The form that the answer must have.
    pub form: Option<AnswerForm>,
    /// What stays of its context where the oldest of it may be dropped, so that it goes on when the KV capacity is used up
    /// or becomes smaller; nothing may be dropped when absent.
    pub sinks: Option<Sinks>,
    /// More urgent requests leave the queue first.
    pub class: Class,
    /// Who asks, for those who look.
    pub client: Option<Arc<str>>,
}

impl GenerateRequest {
    /// A request with greedy sampling, no stop strings, no limit of its own, no deadline, no form, and a context of which nothing is dropped.
    #[must_use]
    pub const fn new(id: RequestId, prompt: Prompt) -> Self {
        Self {
            id,
            prompt,
            sampling: Sampling::GREEDY,
            max_tokens: None,
            stop: Vec::new(),
            deadline: None,
            time_max: None,
            time_shared: None,
            grows_to: Tokens::ZERO,
            form: None,
            sinks: None,
            class: Class::Interactive,
            client: None,
        }
    }
}

/// What the requester receives.
#[derive(Debug)]
pub enum GenerateEvent {
    /// The request left the queue.
    Started {
        /// Tokens of the prompt.
        prompt_tokens: Tokens,
        /// How many of them were in the KV cache already.
        cached_tokens: Tokens,
    },
    /// More of the answer. Pieces are merged when the reader is slower than the model, so that nothing is lost.
    Delta {
        /// Whole characters; never empty.
        text: String,
        /// The tokens generated since the last delta; text may lag behind them by a few.
        tokens: Vec<u32>,
    },
    /// The answer is over; nothing follows.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// What it took.
        usage: Usage,
    },
    /// There is no (further) answer; nothing follows.
    Failed(GenerateError),
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FinishReason {
    /// It was cancelled, or its reader went away or stopped reading.
    Cancelled,
    /// The KV capacity that it needed was taken away while it ran; the text so far is valid.
    KvReclaimed,
    /// `max_tokens`, `time_max`, `time_shared`, the context or the KV capacity is used up.
    Length,
    /// The model ended it.
    Stop,
    /// A stop string was met: the one at this place of [`GenerateRequest::stop`].
    StopText(usize),
}

impl FinishReason {
    /// Whether the model had not come to an end.
    #[must_use]
    pub const fn is_cut(self) -> bool {
        !matches!(self, Self::Stop | Self::StopText(_))
    }
}

/// Why a prompt cannot be used, now or ever.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// More tokens than the model was made for.
    #[error("cannot take a prompt of {tokens} tokens: the context of the model ends at {limit}")]
    BeyondContext {
        /// Tokens of the prompt.
        tokens: Tokens,
        /// The longest context.
        limit: Tokens,
    },
    /// The conversation cannot be rendered.
    #[error("cannot render the conversation")]
    Chat(#[source] ChatError),
    /// The answer cannot be held to the form that is wanted.
    #[error("cannot hold the answer to its form")]
    Constraint {
        /// Where the form was wished for, as the protocol names it.
        field: String,
        /// What was wished for, shortened.
        value: String,
        /// Why.
        source: ConstraintError,
    },
    /// The process that computes templates and grammars was lost, which another attempt may not see again.
    #[error("cannot prepare the answer: the text helper failed: {message}")]
    Helper {
        /// What happened.
        message: String,
    },
    /// No tokens at all.
    #[error("cannot continue an empty prompt")]
    Empty,
    /// The text cannot be turned into tokens.
    #[error("cannot turn the prompt into tokens")]
    Encode(#[source] EncodeError),
    /// A sampling setting is out of its range.
    #[error("cannot sample as asked")]
    Sampling(#[source] SamplingError),
    /// A token that is not in the vocabulary.
    #[error("cannot take token {token}: the vocabulary has {vocabulary} tokens")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Tokens in the vocabulary.
        vocabulary: u32,
    },
}

/// Why a request was not taken.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// Another request of that name is queued or running.
    #[error("cannot take request {id}: one of that name is queued or running")]
    Duplicate {
        /// The name.
        id: RequestId,
    },
    /// The engine finishes what it has and takes nothing more.
    #[error("cannot take a request: the engine is draining")]
    Draining,
    /// The engine broke down.
    #[error("cannot take a request: the engine failed: {message}")]
    Failed {
        /// What happened.
        message: String,
    },
    /// No model is ready.
    #[error("cannot take a request: the engine is {phase}")]
    NotReady {
        /// What the engine is doing instead.
        phase: &'static str,
    },
    /// The prompt or a setting cannot be used.
    #[error("cannot take the request")]
    Prompt(#[from] PromptError),
    /// The queue is full.
    #[error("cannot take a request: {queued} are waiting, of at most {limit}")]
    QueueFull {
        /// Requests waiting.
        queued: usize,
        /// The most that may wait.
        limit: usize,
    },
}

/// Why a request that was taken got no (complete) answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GenerateError {
    /// Its deadline passed.
    #[error("cannot go on with the answer: its deadline passed after {generated} tokens")]
    DeadlinePassed {
        /// Tokens generated until then.
        generated: Tokens,
    },
    /// The engine broke down.
    #[error("cannot go on with the answer: the engine failed: {message}")]
    EngineLost {
        /// What happened.
        message: String,
    },
    /// The form of the answer is beyond what its grammar can be followed with.
    #[error("cannot go on with the answer: its form cannot be followed: {message}")]
    Form {
        /// What the library said.
        message: String,
    },
    /// The process that computes grammars was lost.
    #[error("cannot go on with the answer: the text helper failed: {message}")]
    HelperLost {
        /// What happened.
        message: String,
    },
    /// The KV cache filled up before the prompt was in it, because capacity was taken away meanwhile.
    #[error(
        "cannot take in the prompt: {position} of {tokens} tokens fill the KV capacity of {capacity} tokens"
    )]
    KvFull {
        /// Tokens of the prompt in the KV cache.
        position: Tokens,
        /// Tokens of the prompt.
        tokens: Tokens,
        /// Present KV capacity.
        capacity: Tokens,
    },
    /// The model failed otherwise.
    #[error("cannot compute the next token: {message}")]
    Model {
        /// What happened.
        message: String,
    },
    /// The model computed something that is not a number.
    #[error(
        "cannot choose the token at position {position}: the model computed values that are not finite"
    )]
    NotFinite {
        /// Position in the sequence.
        position: u32,
    },
    /// The prompt would fit the model, but not the KV capacity that the engine has now.
    #[error(
        "cannot take a prompt of {tokens} tokens: the present KV capacity is {capacity} of {limit} tokens"
    )]
    PromptBeyondKv {
        /// Tokens of the prompt.
        tokens: Tokens,
        /// Present KV capacity.
        capacity: Tokens,
        /// The longest context of the model.
        limit: Tokens,
    },
    /// The engine stopped before the answer was complete.
    #[error("cannot go on with the answer: the engine is stopping")]
    Stopping,
}
