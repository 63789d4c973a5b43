//! Requests to the model: input, events and errors.
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
//! Exactly one of `Finished` and `Failed` ends each stream, unless its reader has disconnected.

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

/// Identifier of a request, chosen by its submitter; unique among the requests in the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u64);

impl RequestId {
    /// A name as given.
    pub const fn new(id: u64) -> Self {
        Self(id)
    }

    /// As a plain number.
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
    /// The text that the answer continues.
    pub prompt: Prompt,
    /// Settings of token selection.
    pub sampling: Sampling,
    /// Limit of generated tokens; `None` for as many as the context holds, not counting dropped ones.
    pub max_tokens: Option<Tokens>,
    /// The answer ends before the first of these strings; they may span tokens. Empty strings are ignored.
    pub stop: Vec<String>,
    /// Time after which the answer is useless.
    pub deadline: Option<Instant>,
    /// Longest duration of the answer from its turn on, including the prompt and waits for its form; it then ends with
    /// [`FinishReason::Length`].
    pub time_max: Option<Duration>,
    /// Longest duration while a request of its class or a more urgent one waits; ends as above.
    pub time_shared: Option<Duration>,
    /// KV capacity up to which more may be requested while the answer is generated; at that size, no more is requested.
    pub grows_to: Tokens,
    /// The required form of the answer.
    pub form: Option<AnswerForm>,
    /// Tokens kept when the oldest context is dropped, so that the answer continues when the KV capacity is used up or
    /// shrinks; if absent, nothing may be dropped.
    pub sinks: Option<Sinks>,
    /// More urgent requests leave the queue first.
    pub class: Class,
    /// The client, for status displays.
    pub client: Option<Arc<str>>,
}

impl GenerateRequest {
    /// A request with greedy sampling, no stop strings, limits, deadline or form, and a context that is never dropped.
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

/// Events received by the requester.
#[derive(Debug)]
pub enum GenerateEvent {
    /// The request left the queue.
    Started {
        /// Tokens of the prompt.
        prompt_tokens: Tokens,
        /// Prompt tokens that were already in the KV cache.
        cached_tokens: Tokens,
    },
    /// More of the answer. Pieces are merged if the reader is slower than the model, so that nothing is lost.
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
        /// Resources it took.
        usage: Usage,
    },
    /// The answer failed; nothing follows.
    Failed(GenerateError),
}

/// Reason for the end of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FinishReason {
    /// It was cancelled, or its reader disconnected or stopped reading.
    Cancelled,
    /// The KV capacity that it needed was reclaimed while it ran; the text so far is valid.
    KvReclaimed,
    /// `max_tokens`, `time_max`, `time_shared`, the context or the KV capacity is used up.
    Length,
    /// The model ended it.
    Stop,
    /// A stop string was met: the one at this index of [`GenerateRequest::stop`].
    StopText(usize),
}

impl FinishReason {
    /// Whether the model did not finish by itself.
    pub const fn is_cut(self) -> bool {
        !matches!(self, Self::Stop | Self::StopText(_))
    }
}

/// Reason why a prompt can never be used.
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
    /// The answer cannot be constrained to the requested form.
    #[error("cannot constrain the answer to its format")]
    Constraint {
        /// Field of the protocol that requested the form.
        field: String,
        /// The requested form, shortened.
        value: String,
        /// The cause.
        source: ConstraintError,
    },
    /// The process that computes templates and grammars was lost; a retry may succeed.
    #[error("cannot prepare the answer: the text helper failed: {message}")]
    Helper {
        /// Description of the failure.
        message: String,
    },
    /// No tokens at all.
    #[error("cannot continue an empty prompt")]
    Empty,
    /// The text cannot be turned into tokens.
    #[error("cannot tokenise the prompt")]
    Encode(#[source] EncodeError),
    /// A sampling setting is out of its range.
    #[error("cannot sample as requested")]
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

/// Reason for the rejection of a request.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// Another request of that name is queued or running.
    #[error("cannot take request {id}: one of that name is queued or running")]
    Duplicate {
        /// The name.
        id: RequestId,
    },
    /// The engine completes its current requests and accepts no more.
    #[error("cannot take a request: the engine is draining")]
    Draining,
    /// The engine failed.
    #[error("cannot take a request: the engine failed: {message}")]
    Failed {
        /// Description of the failure.
        message: String,
    },
    /// No model is ready.
    #[error("cannot take a request: the engine is {phase}")]
    NotReady {
        /// The current phase of the engine.
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

/// Reason why an accepted request got no (complete) answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GenerateError {
    /// Its deadline passed.
    #[error("cannot continue the answer: its deadline passed after {generated} tokens")]
    DeadlinePassed {
        /// Tokens generated until then.
        generated: Tokens,
    },
    /// The engine failed.
    #[error("cannot continue the answer: the engine failed: {message}")]
    EngineLost {
        /// Description of the failure.
        message: String,
    },
    /// The form of the answer exceeds the limits of its grammar engine.
    #[error("cannot continue the answer: its format cannot be continued: {message}")]
    Form {
        /// Message of the library.
        message: String,
    },
    /// The process that computes grammars was lost.
    #[error("cannot continue the answer: the text helper failed: {message}")]
    HelperLost {
        /// Description of the failure.
        message: String,
    },
    /// The KV cache filled up before the whole prompt was in it, because capacity was reclaimed meanwhile.
    #[error(
        "cannot prefill the prompt: {position} of {tokens} tokens fill the KV capacity of {capacity} tokens"
    )]
    KvFull {
        /// Tokens of the prompt in the KV cache.
        position: Tokens,
        /// Tokens of the prompt.
        tokens: Tokens,
        /// Current KV capacity.
        capacity: Tokens,
    },
    /// Another failure of the model.
    #[error("cannot compute the next token: {message}")]
    Model {
        /// Description of the failure.
        message: String,
    },
    /// The model computed a value that is not a number.
    #[error(
        "cannot choose the token at position {position}: the model computed values that are not finite"
    )]
    NotFinite {
        /// Position in the sequence.
        position: u32,
    },
    /// The prompt fits the model, but not the current KV capacity.
    #[error(
        "cannot take a prompt of {tokens} tokens: the present KV capacity is {capacity} of {limit} tokens"
    )]
    PromptBeyondKv {
        /// Tokens of the prompt.
        tokens: Tokens,
        /// Current KV capacity.
        capacity: Tokens,
        /// The longest context of the model.
        limit: Tokens,
    },
    /// The engine stopped before the answer was complete.
    #[error("cannot continue the answer: the engine is stopping")]
    Stopping,
}
