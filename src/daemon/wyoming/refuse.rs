//! Rendering of [`Refusal`] over Wyoming.
//!
//! Recognition and speech end with `error` and a closed connection. A conversation that fails for want of memory or
//! context is `not-handled` with the reason, so that it is spoken to the user; other failures of it are an `error` too.

use cotenant_policy::refusal::Refusal;
use cotenant_speech::server;

/// How a conversation ends that has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Unanswered {
    /// `not-handled`, with this text.
    NotHandled(String),
    /// `error`, and the end of the connection.
    Error(server::Refusal),
}

/// The `error` that a refusal is.
pub(super) fn error_of(refusal: &Refusal) -> server::Refusal {
    server::Refusal::new(code_of(refusal), text_of(refusal))
}

/// What a refusal is to a user who talks with the assistant.
pub(super) fn unanswered(refusal: &Refusal) -> Unanswered {
    match refusal {
        Refusal::InsufficientMemory { .. }
        | Refusal::PressureHigh { .. }
        | Refusal::ContextLengthExceeded { .. }
        | Refusal::KvCapacityShed { .. }
        | Refusal::KvReclaimed { .. } => Unanswered::NotHandled(refusal.to_string()),
        Refusal::QuotaExceeded { .. }
        | Refusal::Draining { .. }
        | Refusal::Starting { .. }
        | Refusal::EngineLost { .. }
        | Refusal::ModelFailed { .. }
        | Refusal::WorkerLost { .. }
        | Refusal::DeadlineUnreachable { .. }
        | Refusal::Invalid { .. }
        | Refusal::UnknownModel { .. }
        | Refusal::NotConfigured { .. }
        | Refusal::Stopped { .. } => Unanswered::Error(error_of(refusal)),
    }
}

/// Whether the same request may well be served in a moment, so that it waits instead of being refused at once.
pub(super) const fn passes(refusal: &Refusal) -> Passing {
    match refusal {
        Refusal::InsufficientMemory { .. }
        | Refusal::PressureHigh { .. }
        | Refusal::QuotaExceeded { .. }
        | Refusal::Draining { .. }
        | Refusal::Starting { .. } => Passing::Soon,
        // It is being restarted; what it was asked for may also be what it died of.
        Refusal::WorkerLost { .. } => Passing::Once,
        Refusal::ContextLengthExceeded { .. }
        | Refusal::KvCapacityShed { .. }
        | Refusal::KvReclaimed { .. }
        | Refusal::EngineLost { .. }
        | Refusal::ModelFailed { .. }
        | Refusal::DeadlineUnreachable { .. }
        | Refusal::Invalid { .. }
        | Refusal::UnknownModel { .. }
        | Refusal::NotConfigured { .. }
        | Refusal::Stopped { .. } => Passing::Never,
    }
}

/// How often a refused request is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passing {
    /// As often as the time allows.
    Soon,
    /// Once.
    Once,
    /// Not at all.
    Never,
}

const fn code_of(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::InsufficientMemory { .. }
        | Refusal::PressureHigh { .. }
        | Refusal::KvCapacityShed { .. } => "memory-pressure",
        Refusal::ContextLengthExceeded { .. } => "context-length-exceeded",
        Refusal::KvReclaimed { .. } => "kv-reclaimed",
        Refusal::QuotaExceeded { .. } => "busy",
        Refusal::Draining { .. } => server::DRAINING,
        Refusal::Starting { .. } => "starting",
        Refusal::EngineLost { .. } => "engine-lost",
        Refusal::ModelFailed { .. } => "model-failed",
        Refusal::WorkerLost { .. } => "worker-lost",
        Refusal::DeadlineUnreachable { .. } => "deadline-unreachable",
        Refusal::Invalid { .. } => server::BAD_REQUEST,
        Refusal::UnknownModel { .. } => "model-not-found",
        Refusal::NotConfigured { .. } => "not-configured",
        Refusal::Stopped { .. } => "stopped",
    }
}

fn text_of(refusal: &Refusal) -> String {
    match refusal.hint() {
        Some(hint) => format!("{refusal} (hint: {hint})"),
        None => refusal.to_string(),
    }
}

/// The `error` of a refusal, and the text of `not-handled` where that is what a conversation gets, for the test that has
/// all protocols in one table.
#[cfg(test)]
pub(crate) fn rendered(refusal: &Refusal) -> (server::Refusal, Option<String>) {
    let not_handled = match unanswered(refusal) {
        Unanswered::NotHandled(text) => Some(text),
        Unanswered::Error(_) => None,
    };
    (error_of(refusal), not_handled)
}
