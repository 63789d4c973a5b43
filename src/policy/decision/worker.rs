//! Decisions about a worker's start, size and end.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    reason::{IgnoredPressure, ReclaimReason},
    snapshot::WorkerState,
};
use cotenant_units::Bytes;

/// A decision about a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum WorkerDecision {
    /// It is started, and its peak is held for it.
    #[error("starting worker `{worker}` with {peak} held for its peak; {free} is free of {budget}")]
    Starting {
        worker: String,
        peak: Bytes,
        free: Bytes,
        budget: Bytes,
    },
    /// It runs and answers nothing, and is ended.
    #[error("worker `{worker}` (pid {pid}) does not respond and is ended: {evidence}")]
    Unresponsive {
        worker: String,
        pid: u32,
        evidence: String,
    },
    /// It answers.
    #[error("worker `{worker}` (pid {pid}) is ready after {} ms", took.as_millis())]
    Ready {
        worker: String,
        pid: u32,
        took: Duration,
    },
    /// A report does not fit its state, and is ignored.
    #[error("worker `{worker}` {report}: ignored")]
    Ignored { worker: String, report: StrayReport },
    /// It died of something that an operator can cure.
    #[error("remedy: {remedy}")]
    Died {
        /// The end in one sentence, by its death certificate.
        sentence: String,
        remedy: String,
    },
    /// Its process is gone, and its memory is credited.
    #[error(
        "worker `{worker}` exited {}: {freed} returned to the budget, {free} is free",
        if *expected { "as requested" } else { "unexpectedly" }
    )]
    Exited {
        worker: String,
        cause: String,
        /// Whether it had been asked to.
        expected: bool,
        freed: Bytes,
        free: Bytes,
    },
    /// It has failed, and is started again after a wait.
    #[error(
        "worker `{worker}` starts again in {:.1} s, failure {failures} of {intensity} within {:.0} s",
        wait.as_secs_f64(),
        window.as_secs_f64()
    )]
    Restarting {
        worker: String,
        wait: Duration,
        failures: usize,
        /// Failures within the window that are answered with a restart.
        intensity: u32,
        window: Duration,
    },
    /// It has failed too often, and is not started again.
    #[error(
        "worker `{worker}` failed {failures} times within {:.0} s and is left alone; start it by hand",
        window.as_secs_f64()
    )]
    GivenUp {
        worker: String,
        failures: usize,
        window: Duration,
    },
    /// It would fail in the same way again, and is not started again.
    #[error(
        "worker `{worker}` would end in the same way again and is left alone; start it by hand when its cause is cured"
    )]
    NeedsOperator { worker: String },
    /// A request starts it.
    #[error("worker `{worker}` is woken by a request")]
    Woken { worker: String },
    /// It is asked into another variant.
    #[error("worker `{worker}` changes to variant `{variant}`: {cause}")]
    Changing {
        worker: String,
        variant: String,
        cause: ChangeCause,
    },
    /// It was measured at its size, and its lease comes down to it.
    #[error(
        "worker `{worker}` uses {used}: its lease comes down by {freed} to {stays}, {free} is free"
    )]
    Settled {
        worker: String,
        used: Bytes,
        stays: Bytes,
        freed: Bytes,
        free: Bytes,
    },
    /// It uses more than it may: it takes nothing new, and is started again when its requests have ended.
    #[error(
        "worker `{worker}` uses {used}, above {above} where it is recycled, and holds {held}: it takes nothing new, \
         ends its {requests} requests and is restarted"
    )]
    Outgrown {
        worker: String,
        used: Bytes,
        /// Above this it is started again.
        above: Bytes,
        held: Bytes,
        requests: u32,
    },
    /// It has used more than it is set to need at most, and from now on its own peak counts.
    #[error(
        "worker `{worker}` used {peak}{}, and its start reserved {configured}: from now on its own peak counts",
        variant.as_ref().map_or_else(String::new, |name| format!(" in variant `{name}`"))
    )]
    PeakLearned {
        worker: String,
        variant: Option<String>,
        peak: Bytes,
        /// What it is set to need.
        configured: Bytes,
    },
    /// It was killed at the limit of its control group, so that more has to be free for its next start.
    #[error(
        "worker `{worker}` was killed at the limit of its group with {had}: from now on {needs} has to be free for it"
    )]
    PeakRaised {
        worker: String,
        had: Bytes,
        needs: Bytes,
    },
    /// It was asked to come down, has not, and keeps what it holds since it is at work.
    #[serde(alias = "not_smaller")]
    #[error("{0}; it is at work and keeps what it holds")]
    IgnoresPressure(IgnoredPressure),
    /// It may hold its steady size again.
    #[error("worker `{worker}` may hold its {steady} again")]
    Restored { worker: String, steady: Bytes },
    /// It has changed its variant.
    #[error(
        "worker `{worker}` is in variant `{variant}` after {} ms{}, holds {held}",
        took.as_millis(),
        uses(*used)
    )]
    Resized {
        worker: String,
        variant: String,
        took: Duration,
        used: Option<Bytes>,
        held: Bytes,
    },
    /// It could not change its variant.
    #[error("worker `{worker}` stays in variant `{variant}`: {error}{}", uses(*used))]
    VariantKept {
        worker: String,
        variant: String,
        error: String,
        used: Option<Bytes>,
    },
    /// It has outlived the run before, and is taken over.
    #[error(
        "worker `{worker}` (pid {pid}) has outlived the run before and is taken over with {held}"
    )]
    TakenOver {
        worker: String,
        pid: u32,
        held: Bytes,
    },
}

/// Why a worker is asked into another variant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum ChangeCause {
    /// A client or an operator wants it, or it gets back what it had.
    #[error("asked for")]
    Asked,
    /// To make room.
    #[error("{reason}")]
    Room { reason: ReclaimReason },
    /// It is idle.
    #[error("nothing to do for {} s", idle.as_secs())]
    Idle { idle: Duration },
}

/// A report of a worker that does not fit its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum StrayReport {
    /// It answers, and was not being started.
    #[error("(pid {pid}) answers while it is {}", state.word())]
    Ready { pid: u32, state: WorkerState },
    /// It has exited, and did not run.
    #[error("exited ({cause}) and was not running")]
    Exited { cause: String },
    /// It has changed, and was not ready.
    #[error("changed to `{variant}` while it does not run")]
    Changed { variant: String },
}

fn uses(used: Option<Bytes>) -> String {
    used.map_or_else(String::new, |used| format!(", uses {used}"))
}
