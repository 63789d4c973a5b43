//! Generation backend that the daemon offers to gRPC.

use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::mpsc;

use cotenant_conversation::{
    ChatMessage, FinishReason, SamplingWish, Usage, refusal::Refusal, sinks::Sinks,
};
use cotenant_units::Tokens;

/// Generates text; the daemon implements it over the engine.
pub trait Generator: Send + Sync + 'static {
    /// Admits a request, or returns the reason to refuse it. Events are sent in the order of [`GenerateEvent`];
    /// dropping the receiver stops the generation at the next token.
    ///
    /// The channel should be bounded to a few events, and the engine must not wait for a reader: the service receives
    /// events promptly, and drops the receiver when the client does not take them for
    /// [`reader_patience`](super::Limits::reader_patience).
    fn generate(
        &self,
        request: GenerateRequest,
    ) -> BoxFuture<'_, Result<mpsc::Receiver<GenerateEvent>, Refusal>>;
}

/// Text or conversation to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Messages, put through the model's chat template; oldest first, at least one.
    Messages(Vec<ChatMessage>),
    /// Text as it is.
    Prompt(String),
}

/// A request for text.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// Text or conversation to continue.
    pub input: Input,
    /// How to choose tokens. The ranges have been checked.
    pub sampling: SamplingWish,
    /// The most tokens to generate; `None` leaves it to the context.
    pub max_tokens: Option<Tokens>,
    /// Texts that end the generation and are not part of the answer.
    pub stop: Vec<String>,
    /// Tokens that stay when the oldest part of the context is dropped.
    pub sinks: Option<Sinks>,
    /// Time left until the client's deadline, if it has one: requests that cannot finish in time may be refused at
    /// once.
    pub time_left: Option<Duration>,
}

/// How long a generation took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// From admission to the first token.
    pub to_first_token: Duration,
    /// From admission to the end.
    pub total: Duration,
}

/// Something that happens in a generation: one `Started`, any number of `Delta`, one `Finished` or `Failed`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GenerateEvent {
    /// Admitted.
    Started {
        /// Name of the model.
        model: String,
        /// Tokens of the prompt.
        prompt: Tokens,
        /// Seed of the random numbers.
        seed: u64,
    },
    /// More text; whole characters.
    Delta {
        /// The text.
        text: String,
    },
    /// The end.
    Finished {
        /// Why.
        reason: FinishReason,
        /// Resource usage.
        usage: Usage,
        /// How long it took.
        times: Times,
    },
    /// The end, without success.
    Failed(Refusal),
}

/// Default of [`reader_patience`](super::Limits::reader_patience).
///
/// Our choice: twice the 10 s in which keepalive finds a dead peer, since a live one that does not read is rarer.
pub(super) const READER_PATIENCE: Duration = Duration::from_secs(20);
