//! Decisions about a worker's start, size and end.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    policy::{
        reason::{IgnoredPressure, ReclaimReason},
        snapshot::WorkerState,
    },
    units::Bytes,
};

/// Why a worker is asked into another variant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeCause {
    /// A client or an operator wants it, or it gets back what it had.
    Asked,
    /// To make room.
    Room { reason: ReclaimReason },
    /// It is idle.
    Idle { idle: Duration },
}

/// A report of a worker that does not fit its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StrayReport {
    /// It answers, and was not being started.
    Ready { pid: u32, state: WorkerState },
    /// It has exited, and did not run.
    Exited { cause: String },
    /// It has changed, and was not ready.
    Changed { variant: String },
}

/// A decision about a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerDecision {
    /// It is started, and its peak is held for it.
    Starting { worker: String, peak: Bytes, free: Bytes, budget: Bytes },
    /// It runs and answers nothing, and is ended.
    Unresponsive { worker: String, pid: u32, evidence: String },
    /// It answers.
    Ready { worker: String, pid: u32, took: Duration },
    /// A report does not fit its state, and is ignored.
    Ignored { worker: String, report: StrayReport },
    /// It died of something that an operator can cure.
    Died {
        /// The end in one sentence, by its death certificate.
        sentence: String,
        remedy: String,
    },
    /// Its process is gone, and its memory is credited.
    Exited {
        worker: String,
        cause: String,
        /// Whether it had been asked to.
        expected: bool,
        freed: Bytes,
        free: Bytes,
    },
    /// It has failed, and is started again after a wait.
    Restarting {
        worker: String,
        wait: Duration,
        failures: usize,
        /// Failures within the window that are answered with a restart.
        intensity: u32,
        window: Duration,
    },
    /// It has failed too often, and is not started again.
    GivenUp { worker: String, failures: usize, window: Duration },
    /// It would fail in the same way again, and is not started again.
    NeedsOperator { worker: String },
    /// A request starts it.
    Woken { worker: String },
    /// It is asked into another variant.
    Changing { worker: String, variant: String, cause: ChangeCause },
    /// It was measured at its size, and its lease comes down to it.
    Settled { worker: String, used: Bytes, stays: Bytes, freed: Bytes, free: Bytes },
    /// It uses more than it may: it takes nothing new, and is started again when its requests have ended.
    Outgrown {
        worker: String,
        used: Bytes,
        /// Above this it is started again.
        above: Bytes,
        held: Bytes,
        requests: u32,
    },
    /// It has used more than it is set to need at most, and from now on its own peak counts.
    PeakLearned {
        worker: String,
        variant: Option<String>,
        peak: Bytes,
        /// What it is set to need.
        configured: Bytes,
    },
    /// It was killed at the limit of its control group, so that more has to be free for its next start.
    PeakRaised { worker: String, had: Bytes, needs: Bytes },
    /// It was notified that memory is short, has not come down, and keeps what it holds since it is at work.
    IgnoresPressure(IgnoredPressure),
    /// It reported a smaller variant, is not measured there, and holds what it held.
    NotSmaller { worker: String, used: Option<Bytes>, held: Bytes },
    /// It may hold its steady size again.
    Restored { worker: String, steady: Bytes },
    /// It has changed its variant.
    Resized { worker: String, variant: String, took: Duration, used: Option<Bytes>, held: Bytes },
    /// It could not change its variant.
    VariantKept { worker: String, variant: String, error: String, used: Option<Bytes> },
    /// It has outlived the run before, and is taken over.
    TakenOver { worker: String, pid: u32, held: Bytes },
}
