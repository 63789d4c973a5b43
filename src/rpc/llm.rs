//! Generation backend for gRPC.

use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::mpsc;

use cotenant_conversation::{
    ChatMessage, FinishReason, SamplingWish, Usage, refusal::Refusal, sinks::Sinks,
};
use cotenant_units::Tokens;

/// Generates text; `daemon` implements it with the engine.
pub trait Generator: Send + Sync + 'static {
    /// Admits a request, or refuses it. Events are sent in the order of [`GenerateEvent`]; dropping the receiver stops
    /// the generation at the next token.
    ///
    /// The channel should be bounded to a few events, and the engine must not wait for a reader: the service receives
    /// events promptly, and drops the receiver if the client does not read for
    /// [`reader_patience`](super::Limits::reader_patience).
    fn generate(
        &self,
        request: GenerateRequest,
    ) -> BoxFuture<'_, Result<mpsc::Receiver<GenerateEvent>, Refusal>>;
}

/// Text or conversation to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Messages for the model's chat template; oldest first, at least one.
    Messages(Vec<ChatMessage>),
    /// Verbatim text.
    Prompt(String),
}

/// A request for text.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// Text or conversation to continue.
    pub input: Input,
    /// Sampling settings, with their ranges checked.
    pub sampling: SamplingWish,
    /// Maximum number of tokens; `None` leaves it to the context.
    pub max_tokens: Option<Tokens>,
    /// Texts that end the generation and are omitted from the answer.
    pub stop: Vec<String>,
    /// Tokens that are kept when the oldest context is dropped.
    pub sinks: Option<Sinks>,
    /// Time left until the client's deadline, if any: a request that cannot finish in time may be refused at once.
    pub time_left: Option<Duration>,
}

/// Durations of a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// From admission to the first token.
    pub to_first_token: Duration,
    /// From admission to the end.
    pub total: Duration,
}

/// Events of a generation: one `Started`, any number of `Delta`, one `Finished` or `Failed`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GenerateEvent {
    /// Admitted.
    Started {
        /// Name of the model.
        model: String,
        /// Tokens of the prompt.
        prompt: Tokens,
        /// Random seed.
        seed: u64,
    },
    /// A piece of text, in whole characters.
    Delta {
        /// The text.
        text: String,
    },
    /// The generation is complete.
    Finished {
        /// Reason for the end.
        reason: FinishReason,
        /// Resource usage.
        usage: Usage,
        /// Its durations.
        times: Times,
    },
    /// The generation failed.
    Failed(Refusal),
}

/// Default of [`reader_patience`](super::Limits::reader_patience).
///
/// Our choice: twice the 10 s in which keepalive detects a dead peer, because a live one that does not read is rarer.
pub(super) const READER_PATIENCE: Duration = Duration::from_secs(20);
