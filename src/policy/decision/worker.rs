//! Decisions about a worker's start, size and end.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{policy::snapshot::WorkerState, units::Bytes};

/// Why a worker is asked into another variant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeCause {
    /// A client or an operator wants it, or it gets back what it had.
    Asked,
    /// To make room.
    Room {
        /// For what, with figures.
        reason: String,
    },
    /// It is idle.
    Idle {
        /// For how long.
        idle: Duration,
    },
}

/// A report of a worker that does not fit its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StrayReport {
    /// It answers, and was not being started.
    Ready {
        /// The process that answers.
        pid: u32,
        /// Its state.
        state: WorkerState,
    },
    /// It has exited, and did not run.
    Exited {
        /// What happened, in words.
        cause: String,
    },
    /// It has changed, and was not ready.
    Changed {
        /// To this variant.
        variant: String,
    },
}

/// What was decided about a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerDecision {
    /// It is started, and its peak is held for it.
    Starting {
        /// Its name.
        worker: String,
        /// What is held for its start.
        peak: Bytes,
        /// Free after it.
        free: Bytes,
        /// The budget.
        budget: Bytes,
    },
    /// It runs and answers nothing, and is ended.
    Unresponsive {
        /// Its name.
        worker: String,
        /// Its process.
        pid: u32,
        /// What went unanswered.
        evidence: String,
    },
    /// It answers.
    Ready {
        /// Its name.
        worker: String,
        /// Its process.
        pid: u32,
        /// From its start.
        took: Duration,
    },
    /// A report does not fit its state, and is ignored.
    Ignored {
        /// Its name.
        worker: String,
        /// The report.
        report: StrayReport,
    },
    /// It died of something that an operator can cure.
    Died {
        /// The end in one sentence, by its death certificate.
        sentence: String,
        /// What can be done.
        remedy: String,
    },
    /// Its process is gone, and its memory is credited.
    Exited {
        /// Its name.
        worker: String,
        /// What happened, in words.
        cause: String,
        /// Whether it had been asked to.
        expected: bool,
        /// What was held for it.
        freed: Bytes,
        /// Free after it.
        free: Bytes,
    },
    /// It has failed, and is started again after a wait.
    Restarting {
        /// Its name.
        worker: String,
        /// Until then.
        wait: Duration,
        /// Failures within the window.
        failures: usize,
        /// Failures within the window that are answered with a restart.
        intensity: u32,
        /// The window.
        window: Duration,
    },
    /// It has failed too often, and is not started again.
    GivenUp {
        /// Its name.
        worker: String,
        /// Failures within the window.
        failures: usize,
        /// The window.
        window: Duration,
    },
    /// It would fail in the same way again, and is not started again.
    NeedsOperator {
        /// Its name.
        worker: String,
    },
    /// A request starts it.
    Woken {
        /// Its name.
        worker: String,
    },
    /// It is asked into another variant.
    Changing {
        /// Its name.
        worker: String,
        /// Which variant.
        variant: String,
        /// Why.
        cause: ChangeCause,
    },
    /// It was measured at its size, and its lease comes down to it.
    Settled {
        /// Its name.
        worker: String,
        /// What it uses.
        used: Bytes,
        /// What it holds from now on.
        stays: Bytes,
        /// What is credited.
        freed: Bytes,
        /// Free after it.
        free: Bytes,
    },
    /// It uses more than it may: it takes nothing new, and is started again when its requests have ended.
    Outgrown {
        /// Its name.
        worker: String,
        /// What it uses.
        used: Bytes,
        /// Above this it is started again.
        above: Bytes,
        /// What it holds.
        held: Bytes,
        /// Its requests.
        requests: u32,
    },
    /// It has used more than it is set to need at most, and from now on its own peak counts.
    PeakLearned {
        /// Its name.
        worker: String,
        /// In which variant.
        variant: Option<String>,
        /// What it has used.
        peak: Bytes,
        /// What it is set to need.
        configured: Bytes,
    },
    /// It was killed at the limit of its control group, so that more has to be free for its next start.
    PeakRaised {
        /// Its name.
        worker: String,
        /// What it had.
        had: Bytes,
        /// What has to be free.
        needs: Bytes,
    },
}
