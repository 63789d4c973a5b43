//! Reasons for refusing a request; each API renders them in its own protocol.
//!
//! HTTP renders them in `http/fault.rs`, gRPC in `rpc/status.rs`, Wyoming in `daemon/wyoming/refuse.rs`. Each match is
//! exhaustive, so that a new reason must be defined for each protocol.
//!
//! Permanent and temporary reasons differ: clients treat a 400 as permanent, so a prompt that does not fit a reduced KV
//! capacity is [`Refusal::KvCapacityShed`], one that can never fit [`Refusal::ContextLengthExceeded`].
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use cotenant_policy::pressure::PressureLevel;
use cotenant_units::{Bytes, Tokens};

/// Reason why a request is refused, or could not be completed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "refusal")]
pub enum Refusal {
    /// Does not fit now, but may after a shed or growth.
    #[error(
        "cannot {act}: it needs {asked}, {free} is free and {reclaimable} can be reclaimed, of a {budget} budget"
    )]
    InsufficientMemory {
        /// The refused action, completes "cannot": `start a chat completion`.
        act: String,
        asked: Bytes,
        /// Budget minus everything held or unaccounted.
        free: Bytes,
        /// Bytes that others could release for this class.
        reclaimable: Bytes,
        budget: Bytes,
        retry_after: Duration,
    },
    /// Fits, but nothing of this class is admitted at this pressure level.
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
    /// The prompt fits the configured context, but not the reduced KV capacity.
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
    /// The KV cache of a running sequence was reclaimed.
    #[error("generation stopped after {generated} tokens: its KV cache was reclaimed")]
    KvReclaimed {
        generated: Tokens,
        retry_after: Duration,
    },
    /// A limit for one client, or for all, is reached.
    #[error("cannot {act}: {what} is at its limit of {limit}")]
    QuotaExceeded {
        act: String,
        /// The exhausted resource: `the queue`, `requests in flight`.
        what: String,
        limit: u64,
        retry_after: Duration,
    },
    /// The supervisor admits nothing new.
    #[error("cannot {act}: the supervisor is draining")]
    Draining { act: String, retry_after: Duration },
    /// The engine or worker is starting: the model is loading, the worker restarting.
    #[error("cannot {act} yet: {who} is {state}")]
    Starting {
        act: String,
        /// The engine or worker: `the engine`, `worker asr`.
        who: String,
        /// Its state: `loading`, `restarting after exit code 3`.
        state: String,
        retry_after: Duration,
    },
    /// The engine died; the output of running requests is lost.
    #[error("the engine is lost: {reason}")]
    EngineLost {
        reason: String,
        retry_after: Duration,
    },
    /// The LLM failed permanently: only a change of its file, the settings or the machine can restore it.
    #[error("the LLM failed, and is not reloaded automatically: {failure}")]
    ModelFailed { failure: String },
    /// A worker died, hung, or replied with nonsense during the request.
    #[error("worker `{worker}` failed: {reason}")]
    WorkerLost {
        worker: String,
        reason: String,
        retry_after: Duration,
    },
    /// The system cannot create a thread for the work.
    #[error("cannot {act}: {cause}")]
    NoThread {
        act: String,
        /// The system's error.
        cause: String,
        retry_after: Duration,
    },
    /// The answer would exceed the time that the caller waits.
    #[error(
        "cannot {act} in time: the caller waits {patience_ms} ms, it would take {expected_ms} ms"
    )]
    DeadlineUnreachable {
        act: String,
        /// Time that the caller waits, ms.
        patience_ms: u64,
        /// Expected duration, ms.
        expected_ms: u64,
        retry_after: Duration,
    },
    /// A value of the request is invalid or unsupported.
    #[error("{field}: {}{problem}", quoted(value))]
    Invalid {
        /// Field name in the protocol.
        field: String,
        /// Its value, shortened; empty if the problem states it.
        value: String,
        /// Its fault: `is above the limit of 2`.
        problem: String,
    },
    /// No model of this name serves this kind of request.
    #[error("the model `{model}` does not exist{known}")]
    UnknownModel {
        model: String,
        /// Suitable models, as `; there is a, b`; may be empty.
        known: String,
    },
    /// Nothing of this kind is configured: no LLM, no ASR, no TTS.
    #[error("cannot {act}: no {what} is configured")]
    NotConfigured {
        act: String,
        /// The missing component: `speech recogniser`.
        what: String,
    },
    /// An operator has stopped the worker, and only an operator can start it.
    #[error("cannot {act}: an operator has stopped worker `{worker}`")]
    Stopped { act: String, worker: String },
}

impl Refusal {
    /// Delay before a retry of the same request; `None` if a retry is useless.
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

    /// The remedy for the caller or the operator; `None` if the message states it.
    pub const fn hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::InsufficientMemory { .. } | Self::PressureHigh { .. } => {
                "try again after the stated time; `cotenant status` shows the holders"
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
                "try again later: `cotenant drain --off` or a restart ends the drain"
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
            Self::Stopped { .. } => "`cotenant start` starts it",
            // The failure names its remedy.
            Self::ModelFailed { .. } | Self::Invalid { .. } | Self::UnknownModel { .. } => {
                return None;
            }
        })
    }
}

/// A value to precede its problem, if present.
pub fn quoted(value: &str) -> String {
    if value.is_empty() {
        String::new()
    } else {
        format!("`{value}` ")
    }
}

/// Default for decisions without a delay.
///
/// Our choice: longer than a shed (the target is 300 ms), shorter than the 2 s after which LiveKit retries in any case.
pub const RETRY_AFTER_DEFAULT: Duration = Duration::from_millis(500);
