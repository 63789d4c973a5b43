//! Reasons for which a request is refused; each API renders them in its own protocol.
//!
//! HTTP renders them in `http/fault.rs`, gRPC in `rpc/status.rs`, Wyoming in `daemon/wyoming/refuse.rs`. Each match is
//! exhaustive, so that a new reason has to say what it is in each protocol.
//!
//! Permanent and temporary reasons differ: clients take a 400 as final, so a prompt that does not fit a KV capacity that
//! was shed is [`Refusal::KvCapacityShed`], while one that can never fit is [`Refusal::ContextLengthExceeded`].
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use cotenant_policy::pressure::PressureLevel;
use cotenant_units::{Bytes, Tokens};

/// Why a request is refused, or why one that had begun could not be finished.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "refusal")]
pub enum Refusal {
    /// Does not fit now, and will after a shed or a regrow.
    #[error(
        "cannot {act}: it needs {asked}, {free} is free and {reclaimable} can be reclaimed, of a {budget} budget"
    )]
    InsufficientMemory {
        /// What was to be done, as it reads after "cannot": `start a chat completion`.
        act: String,
        asked: Bytes,
        /// Budget minus everything held or unaccounted.
        free: Bytes,
        /// What others could give back for this class.
        reclaimable: Bytes,
        budget: Bytes,
        retry_after: Duration,
    },
    /// Would fit, but nothing of this class is admitted at this pressure.
    #[error("cannot {act}: pressure is {level}")]
    PressureHigh {
        act: String,
        level: PressureLevel,
        retry_after: Duration,
    },
    /// The prompt is longer than the *configured* context.
    #[error(
        "cannot take a prompt of {prompt} tokens: this model's maximum context length is {limit} tokens (`{model}`)"
    )]
    ContextLengthExceeded {
        model: String,
        prompt: Tokens,
        limit: Tokens,
    },
    /// The prompt fits the configured context, and not the KV capacity as shed.
    #[error(
        "cannot take a prompt of {prompt} tokens now: the KV cache of `{model}` is shed to {capacity} of {limit} tokens"
    )]
    KvCapacityShed {
        model: String,
        prompt: Tokens,
        capacity: Tokens,
        limit: Tokens,
        retry_after: Duration,
    },
    /// The KV cache of a running sequence was taken away.
    #[error("generation stopped after {generated} tokens: its KV cache was reclaimed")]
    KvReclaimed {
        generated: Tokens,
        retry_after: Duration,
    },
    /// A limit for one client, or for all of them, is reached.
    #[error("cannot {act}: {what} is at its limit of {limit}")]
    QuotaExceeded {
        act: String,
        /// What is full: `the queue`, `requests in flight`.
        what: String,
        limit: u64,
        retry_after: Duration,
    },
    /// The supervisor takes nothing new.
    #[error("cannot {act}: the supervisor is draining")]
    Draining { act: String, retry_after: Duration },
    /// Engine or worker are being started: the model is loading, the worker restarting.
    #[error("cannot {act} yet: {who} is {state}")]
    Starting {
        act: String,
        /// Who would do it: `the engine`, `worker asr`.
        who: String,
        /// What it does instead: `loading`, `restarting after exit code 3`.
        state: String,
        retry_after: Duration,
    },
    /// The engine died; what it was generating is lost.
    #[error("the engine is lost: {reason}")]
    EngineLost {
        reason: String,
        retry_after: Duration,
    },
    /// The LLM failed permanently: nothing but a change of its file, the settings or the machine brings it back.
    #[error("the LLM has failed and is not loaded again by itself: {failure}")]
    ModelFailed { failure: String },
    /// A worker died, hung, or answered nonsense in the middle of the request.
    #[error("worker `{worker}` failed: {reason}")]
    WorkerLost {
        worker: String,
        reason: String,
        retry_after: Duration,
    },
    /// The system gives no thread for the work.
    #[error("cannot {act}: {cause}")]
    NoThread {
        act: String,
        /// With the system's error.
        cause: String,
        retry_after: Duration,
    },
    /// The answer cannot come within the time that the caller is ready to wait.
    #[error(
        "cannot {act} in time: the caller waits {patience_ms} ms, it would take {expected_ms} ms"
    )]
    DeadlineUnreachable {
        act: String,
        /// How long the caller waits, ms.
        patience_ms: u64,
        /// How long it would take, ms.
        expected_ms: u64,
        retry_after: Duration,
    },
    /// A value of the request is wrong or not supported.
    #[error("{field}: {}{problem}", quoted(value))]
    Invalid {
        /// Field at fault, as the protocol names it.
        field: String,
        /// Its value, shortened; empty where the problem names what is meant.
        value: String,
        /// What is wrong with it: `is above the limit of 2`.
        problem: String,
    },
    /// No model of this name serves this kind of request.
    #[error("the model `{model}` does not exist{known}")]
    UnknownModel {
        model: String,
        /// Those that do, as `; there is a, b`; may be empty.
        known: String,
    },
    /// Nothing of this kind is configured: no LLM, no ASR, no TTS.
    #[error("cannot {act}: no {what} is configured")]
    NotConfigured {
        act: String,
        /// What is missing: `speech recogniser`.
        what: String,
    },
    /// An operator has stopped the worker, and only an operator starts it again.
    #[error("cannot {act}: an operator has stopped worker `{worker}`")]
    Stopped { act: String, worker: String },
}

impl Refusal {
    /// When it is worth trying the same request again; `None` when it never is.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::InsufficientMemory { retry_after, .. }
            | Self::PressureHigh { retry_after, .. }
            | Self::KvCapacityShed { retry_after, .. }
            | Self::KvReclaimed { retry_after, .. }
            | Self::QuotaExceeded { retry_after, .. }
            | Self::Draining { retry_after, .. }
            | Self::Starting { retry_after, .. }
            | Self::EngineLost { retry_after, .. }
            | Self::WorkerLost { retry_after, .. }
            | Self::NoThread { retry_after, .. }
            | Self::DeadlineUnreachable { retry_after, .. } => Some(*retry_after),
            Self::ContextLengthExceeded { .. }
            | Self::ModelFailed { .. }
            | Self::Invalid { .. }
            | Self::UnknownModel { .. }
            | Self::NotConfigured { .. }
            | Self::Stopped { .. } => None,
        }
    }

    /// The remedy of the caller or the operator; `None` where the message says it.
    #[must_use]
    pub const fn hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::InsufficientMemory { .. } | Self::PressureHigh { .. } => {
                "try again after the stated time; `cotenant status` shows who holds what"
            }
            Self::ContextLengthExceeded { .. } => {
                "shorten the prompt, or raise the context in the configuration"
            }
            Self::KvCapacityShed { .. } => {
                "try again when the KV cache has grown back, or shorten the prompt"
            }
            Self::KvReclaimed { .. } | Self::Starting { .. } => "try again after the stated time",
            Self::QuotaExceeded { .. } => "try again with fewer requests at once",
            Self::Draining { .. } => {
                "try again later: an operator ends it by `cotenant drain --off`, or a restart does"
            }
            Self::EngineLost { .. } | Self::WorkerLost { .. } => {
                "try again after the stated time; `cotenant events` shows what happened"
            }
            Self::NoThread { .. } => {
                "try again after the stated time; `TasksMax` of the unit and `ulimit -u` limit threads"
            }
            Self::DeadlineUnreachable { .. } => {
                "allow a longer read timeout, or try again when pressure has fallen"
            }
            Self::NotConfigured { .. } => "add it to the configuration",
            Self::Stopped { .. } => "an operator starts it by `cotenant start`",
            // The failure names its remedy.
            Self::ModelFailed { .. } | Self::Invalid { .. } | Self::UnknownModel { .. } => {
                return None;
            }
        })
    }
}

/// A value in front of its problem, where there is one.
#[must_use]
pub fn quoted(value: &str) -> String {
    if value.is_empty() {
        String::new()
    } else {
        format!("`{value}` ")
    }
}

/// For decisions that come without a time of their own.
///
/// Our choice: longer than a shed (the target is 300 ms), shorter than the 2 s after which LiveKit retries anyway.
pub const RETRY_AFTER_DEFAULT: Duration = Duration::from_millis(500);
