//! Kinds of refusals: the table that each wire format maps to its own codes.

use super::refusal::{RETRY_AFTER_DEFAULT, Refusal};

/// Representation of a [`Refusal`] for the clients of any API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Machine-readable name in JSON, for example `memory_pressure`.
    pub code: &'static str,
    /// Name in events of Wyoming, for example `memory-pressure`.
    pub word: &'static str,
    /// HTTP status.
    pub status: u16,
}

/// Number of retries of a refused request on the client's behalf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passing {
    /// As many as time allows: an identical request may succeed shortly.
    Soon,
    /// Once.
    Once,
    /// Not at all.
    Never,
}

impl Kind {
    /// The table. The match is exhaustive: a new refusal needs its row.
    pub const fn of(refusal: &Refusal) -> Self {
        use Refusal as R;
        let (code, word, status) = match refusal {
            R::InsufficientMemory { .. } | R::PressureHigh { .. } | R::KvCapacityShed { .. } => {
                ("memory_pressure", "memory-pressure", 503)
            }
            R::ContextLengthExceeded { .. } => {
                ("context_length_exceeded", "context-length-exceeded", 400)
            }
            R::KvReclaimed { .. } => ("kv_reclaimed", "kv-reclaimed", 503),
            R::QuotaExceeded { .. } => ("rate_limit_exceeded", "busy", 429),
            R::Draining { .. } => ("draining", "draining", 503),
            R::Starting { .. } => ("starting", "starting", 503),
            R::EngineLost { .. } => ("engine_lost", "engine-lost", 503),
            // Not 503, which every client and proxy treats as temporary.
            R::ModelFailed { .. } => ("model_failed", "model-failed", 500),
            R::WorkerLost { .. } => ("worker_lost", "worker-lost", 503),
            R::NoThread { .. } => ("no_thread", "no-thread", 503),
            R::DeadlineUnreachable { .. } => ("deadline_unreachable", "deadline-unreachable", 503),
            R::Invalid { .. } => ("invalid_value", "bad-request", 400),
            R::UnknownModel { .. } => ("model_not_found", "model-not-found", 404),
            R::NotConfigured { .. } => ("not_configured", "not-configured", 404),
            R::Stopped { .. } => ("stopped", "stopped", 503),
        };
        Self { code, word, status }
    }
}

impl Passing {
    /// Whether an identical request may succeed shortly, so that it waits instead of being refused at once.
    pub const fn of(refusal: &Refusal) -> Self {
        use Refusal as R;
        match refusal {
            R::InsufficientMemory { .. }
            | R::PressureHigh { .. }
            | R::QuotaExceeded { .. }
            | R::Draining { .. }
            | R::Starting { .. } => Self::Soon,
            // The worker restarts; but the request may have caused its death.
            R::WorkerLost { .. } => Self::Once,
            _ => Self::Never,
        }
    }
}

/// The text of a refusal with its remedy, on one line.
pub fn with_hint(refusal: &Refusal) -> String {
    match refusal.hint() {
        Some(hint) => format!("{refusal} (hint: {hint})"),
        None => refusal.to_string(),
    }
}

/// Refuses an act that the configuration does not enable.
pub fn not_configured(act: &str, what: &str) -> Refusal {
    Refusal::NotConfigured {
        act: act.to_owned(),
        what: what.to_owned(),
    }
}

/// Refuses an act because a limit is currently reached.
pub fn at_limit(act: &str, what: impl Into<String>, limit: impl TryInto<u64>) -> Refusal {
    Refusal::QuotaExceeded {
        act: act.to_owned(),
        what: what.into(),
        limit: limit.try_into().unwrap_or(u64::MAX),
        retry_after: RETRY_AFTER_DEFAULT,
    }
}

/// Refuses an act because no thread can be started.
pub fn no_thread(act: &str, cause: &impl std::fmt::Display) -> Refusal {
    Refusal::NoThread {
        act: act.to_owned(),
        cause: cause.to_string(),
        retry_after: RETRY_AFTER_DEFAULT,
    }
}

/// Refuses a request for one of its fields.
pub fn invalid(field: &str, value: impl Into<String>, problem: impl Into<String>) -> Refusal {
    Refusal::Invalid {
        field: field.to_owned(),
        value: value.into(),
        problem: problem.into(),
    }
}

/// Reports a worker that failed at a request.
pub fn worker_lost(worker: &str, reason: impl Into<String>) -> Refusal {
    Refusal::WorkerLost {
        worker: worker.to_owned(),
        reason: reason.into(),
        retry_after: RETRY_AFTER_DEFAULT,
    }
}
