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
    /// The worker is started, with a lease for its peak.
    #[error("starting worker `{worker}` with {peak} held for its peak; {free} is free of {budget}")]
    Starting {
        worker: String,
        peak: Bytes,
        free: Bytes,
        budget: Bytes,
    },
    /// The worker is running but does not respond, and is ended.
    #[error("worker `{worker}` (pid {pid}) does not respond and is killed: {evidence}")]
    Unresponsive {
        worker: String,
        pid: u32,
        evidence: String,
    },
    /// The worker responds.
    #[error("worker `{worker}` (pid {pid}) is ready after {} ms", took.as_millis())]
    Ready {
        worker: String,
        pid: u32,
        took: Duration,
    },
    /// A report contradicts the worker's state, and is ignored.
    #[error("worker `{worker}` {report}: ignored")]
    Ignored { worker: String, report: StrayReport },
    /// The worker died of a cause that an operator can remove.
    #[error("remedy: {remedy}")]
    Died {
        /// Summary from the death certificate.
        sentence: String,
        remedy: String,
    },
    /// The process is gone, and its memory is credited.
    #[error(
        "worker `{worker}` exited {}: {freed} returned to the budget, {free} is free",
        if *expected { "as requested" } else { "unexpectedly" }
    )]
    Exited {
        worker: String,
        cause: String,
        /// Whether the exit was requested.
        expected: bool,
        freed: Bytes,
        free: Bytes,
    },
    /// The worker failed, and is restarted after a back-off.
    #[error(
        "worker `{worker}` restarts in {:.1} s, failure {failures} of {intensity} within {:.0} s",
        wait.as_secs_f64(),
        window.as_secs_f64()
    )]
    Restarting {
        worker: String,
        wait: Duration,
        failures: usize,
        /// Failures within the window that are followed by a restart.
        intensity: u32,
        window: Duration,
    },
    /// The worker failed too often, and is not restarted.
    #[error(
        "worker `{worker}` failed {failures} times within {:.0} s and is not restarted; start it by `cotenant start`",
        window.as_secs_f64()
    )]
    GivenUp {
        worker: String,
        failures: usize,
        window: Duration,
    },
    /// The failure would recur, so the worker is not restarted.
    #[error(
        "worker `{worker}` would fail again and is not restarted; remove the cause, then start it by `cotenant start`"
    )]
    NeedsOperator { worker: String },
    /// A request starts the worker.
    #[error("worker `{worker}` is woken by a request")]
    Woken { worker: String },
    /// The worker is requested to change its variant.
    #[error("worker `{worker}` changes to variant `{variant}`: {cause}")]
    Changing {
        worker: String,
        variant: String,
        cause: ChangeCause,
    },
    /// The worker was measured below its lease, which is lowered.
    #[error(
        "worker `{worker}` uses {used}: its lease shrinks by {freed} to {stays}, {free} is free"
    )]
    Settled {
        worker: String,
        used: Bytes,
        stays: Bytes,
        freed: Bytes,
        free: Bytes,
    },
    /// The worker exceeds its bound: it accepts no requests, and is restarted after the running ones.
    #[error(
        "worker `{worker}` uses {used}, above its recycle limit {above}, and holds {held}: it admits no requests, \
         completes its {requests} and is restarted"
    )]
    Outgrown {
        worker: String,
        used: Bytes,
        /// Bound above which it is restarted.
        above: Bytes,
        held: Bytes,
        requests: u32,
    },
    /// The worker exceeded its configured peak; from now on the measured peak applies.
    #[error(
        "worker `{worker}` used {peak}{}, and its start reserved {configured}: its own peak applies from now on",
        variant.as_ref().map_or_else(String::new, |name| format!(" in variant `{name}`"))
    )]
    PeakLearned {
        worker: String,
        variant: Option<String>,
        peak: Bytes,
        /// Configured peak.
        configured: Bytes,
    },
    /// The worker was killed at the limit of its control group; its next start requires more free memory.
    #[error(
        "worker `{worker}` was killed at its group's limit of {had}: its next start requires {needs}"
    )]
    PeakRaised {
        worker: String,
        had: Bytes,
        needs: Bytes,
    },
    /// The worker did not shrink when notified, and keeps its memory since it is busy.
    #[serde(alias = "not_smaller")]
    #[error("{0}; it is busy and keeps its memory")]
    IgnoresPressure(IgnoredPressure),
    /// The lease is restored to the steady size.
    #[error("worker `{worker}` is restored to its {steady}")]
    Restored { worker: String, steady: Bytes },
    /// The worker has changed its variant.
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
    /// The worker could not change its variant.
    #[error("worker `{worker}` stays in variant `{variant}`: {error}{}", uses(*used))]
    VariantKept {
        worker: String,
        variant: String,
        error: String,
        used: Option<Bytes>,
    },
    /// The worker has outlived the previous run, and is taken over.
    #[error("worker `{worker}` (pid {pid}) of the previous run is taken over with {held}")]
    TakenOver {
        worker: String,
        pid: u32,
        held: Bytes,
    },
}

/// Cause of a change of variant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum ChangeCause {
    /// Requested by a client or an operator, or returning to an earlier variant.
    #[error("requested")]
    Asked,
    /// To free memory.
    #[error("{reason}")]
    Room { reason: ReclaimReason },
    /// The worker is idle.
    #[error("nothing to do for {} s", idle.as_secs())]
    Idle { idle: Duration },
}

/// A report that contradicts the worker's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum StrayReport {
    /// It responds, and was not starting.
    #[error("(pid {pid}) answers while it is {}", state.word())]
    Ready { pid: u32, state: WorkerState },
    /// It exited, and was not running.
    #[error("exited ({cause}) and was not running")]
    Exited { cause: String },
    /// It changed its variant, and was not ready.
    #[error("changed to `{variant}` while it does not run")]
    Changed { variant: String },
}

fn uses(used: Option<Bytes>) -> String {
    used.map_or_else(String::new, |used| format!(", uses {used}"))
}
