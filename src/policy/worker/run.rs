//! Life of a worker's process: starting, ready, changing its variant, stopping.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::breath::Breath;
use crate::{
    book::{BookedChange, BookedRun, BookedStop},
    lease::{LeaseId, Ticket},
    params::StartParams,
    reason::StopReason,
};
use cotenant_units::{Bytes, Timestamp};

/// Life of a worker's process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) lease: LeaseId,
    pub(crate) pid: Option<u32>,
    pub(crate) variant: Option<String>,
    pub(super) stage: Stage,
    /// Time of its start, readiness, last change or stop request.
    pub(crate) since: Timestamp,
    pub(crate) resizing: Option<Resizing>,
    /// Variant before it was shrunk to free memory.
    pub(crate) before_shed: Option<String>,
    pub(super) peak: RunPeak,
    /// When it was taken over from an earlier run; its high water may then include growth since its start.
    pub(crate) taken_over_at: Option<Timestamp>,
    /// Whether it has answered, in this run of the supervisor or an earlier one.
    pub(super) answered: bool,
    /// Its failure would recur with another start.
    pub(super) needs_operator: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Stage {
    Starting,
    Ready(Ready),
    Stopping {
        cause: StopCause,
        /// It was due for a recycle for its size when it was stopped for another cause.
        outgrown: bool,
    },
}

/// State of a ready worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ready {
    pub(super) at: Timestamp,
    pub(super) winding: Option<Winding>,
    /// Since when it has been measured above its bound.
    pub(super) over_since: Option<Timestamp>,
    /// Memory of its requests.
    #[serde(default)]
    pub(super) breath: Breath,
    /// Variant before it was shrunk when idle.
    pub(super) before_rest: Option<String>,
    /// It was requested to shrink to its smallest variant when idle, or could not be.
    pub(super) shrunk: bool,
    /// It did not shrink when notified of a shortage of memory.
    pub(super) ignores_pressure: bool,
}

/// Wind-down of a worker: it accepts no requests, and ends when the running ones have completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Winding {
    pub(super) cause: WindCause,
    pub(super) since: Timestamp,
}

/// Cause of a wind-down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum WindCause {
    Idle,
    /// It exceeds its bound.
    Outgrown,
}

/// Kernel's high water of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RunPeak {
    pub(super) seen: Option<Bytes>,
    /// Whether this life has been counted.
    pub(super) counted: bool,
    /// High water that another variant of this process may have caused; no evidence for this variant unless exceeded.
    pub(super) of_others: Option<Bytes>,
    /// Whether the next reading belongs to another variant.
    pub(super) next_is_of_others: bool,
}

impl RunPeak {
    /// Attributes the high water so far to another variant: the kernel keeps one for the whole life.
    pub(super) fn leave(&mut self) {
        self.of_others = self.of_others.max(self.seen);
    }

    /// Returns whether `peak` is of the present variant: well above the high water of others.
    pub(super) fn is_own(&self, peak: Bytes) -> bool {
        self.of_others.is_none_or(|others| {
            peak > others.saturating_add(others.per_mille(UNSTEADY_PER_MILLE).max(UNSTEADY))
        })
    }
}

/// Tolerance between two readings of the same high water. Since Linux 6.2 the kernel sums per-CPU counters without
/// synchronisation, each within 32 pages or twice the number of processors, so a later reading may be lower. The size
/// and the share are our choice.
const UNSTEADY: Bytes = Bytes::from_mib(4);
const UNSTEADY_PER_MILLE: u32 = 50;

/// Change of variant in progress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Resizing {
    pub(crate) variant: String,
    pub(crate) tickets: Vec<Ticket>,
    pub(crate) asked_at: Timestamp,
    pub(crate) to_shed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum StopCause {
    Idle,
    Operator,
    Recycle,
    Shed,
    NotReady,
}

impl StopCause {
    /// Maps the reason of a stop to its cause.
    pub(crate) const fn of(reason: &StopReason) -> Self {
        match reason {
            StopReason::Reclaim { .. } | StopReason::IgnoredPressure(_) => Self::Shed,
            StopReason::Idle => Self::Idle,
            StopReason::Operator => Self::Operator,
            StopReason::NotReady { .. }
            | StopReason::NotStopped
            | StopReason::NotChanged { .. } => Self::NotReady,
            StopReason::Outgrown
            | StopReason::Recycle
            | StopReason::OverBudget { .. }
            | StopReason::AskedBefore => Self::Recycle,
        }
    }
}

impl Run {
    pub(super) fn new(lease: LeaseId, variant: Option<String>, now: Timestamp) -> Self {
        Self {
            lease,
            pid: None,
            variant,
            stage: Stage::Starting,
            since: now,
            resizing: None,
            before_shed: None,
            peak: RunPeak::default(),
            taken_over_at: None,
            answered: false,
            needs_operator: false,
        }
    }

    /// Returns the life of a process started by an earlier run of the supervisor; `resizes` if it has more than one
    /// variant.
    pub(super) fn adopted(
        booked: &BookedRun,
        lease: LeaseId,
        pid: u32,
        resizes: bool,
        now: Timestamp,
    ) -> Self {
        let change = booked.change.clone();
        Self {
            pid: Some(pid),
            // Readiness is shown only once: kept even if the supervisor ends before the worker answers again.
            answered: booked.ready,
            resizing: change.map(|BookedChange { variant, to_shed }| Resizing {
                variant,
                tickets: Vec::new(),
                asked_at: now,
                to_shed,
            }),
            before_shed: booked.variant_before_shed.clone(),
            // The variant of its high water is unknown.
            peak: RunPeak {
                next_is_of_others: resizes,
                ..RunPeak::default()
            },
            taken_over_at: Some(now),
            ..Self::new(lease, booked.variant.clone(), now)
        }
    }

    /// Returns its part of the book for the next run; `held` is its entry in the ledger.
    pub(super) fn booked(&self, held: Bytes) -> BookedRun {
        let change = self.resizing.as_ref();
        BookedRun {
            lease: Some((self.lease, held)),
            ready: self.answered,
            variant: self.variant.clone(),
            change: change.map(|change| BookedChange {
                variant: change.variant.clone(),
                to_shed: change.to_shed,
            }),
            stop: self.stopping().map(|cause| match cause {
                StopCause::Operator => BookedStop::ForGood,
                // Started; it is stopped again when idle.
                StopCause::Idle | StopCause::Recycle | StopCause::NotReady => BookedStop::Again,
                StopCause::Shed => BookedStop::ToShed,
            }),
            variant_before_shed: self.before_shed.clone(),
        }
    }

    pub(super) const fn ready(&self) -> Option<&Ready> {
        match &self.stage {
            Stage::Ready(ready) => Some(ready),
            Stage::Starting | Stage::Stopping { .. } => None,
        }
    }

    pub(super) const fn ready_mut(&mut self) -> Option<&mut Ready> {
        match &mut self.stage {
            Stage::Ready(ready) => Some(ready),
            Stage::Starting | Stage::Stopping { .. } => None,
        }
    }

    pub(crate) const fn stopping(&self) -> Option<StopCause> {
        match self.stage {
            Stage::Stopping { cause, .. } => Some(cause),
            Stage::Starting | Stage::Ready(_) => None,
        }
    }

    pub(super) const fn stopping_mut(&mut self) -> Option<&mut StopCause> {
        match &mut self.stage {
            Stage::Stopping { cause, .. } => Some(cause),
            Stage::Starting | Stage::Ready(_) => None,
        }
    }

    /// Marks the worker ready. Returns the time that took, or `None` if it was not starting.
    pub(super) fn answered(&mut self, pid: u32, now: Timestamp) -> Option<Duration> {
        if self.stage != Stage::Starting {
            return None;
        }
        let took = now.saturating_since(self.since);
        self.stage = Stage::Ready(Ready {
            at: now,
            ..Ready::default()
        });
        self.answered = true;
        self.pid = Some(pid);
        self.since = now;
        if let Some(resizing) = &mut self.resizing {
            // A change requested by an earlier run and not confirmed; repeating it is harmless.
            resizing.asked_at = now;
        }
        Some(took)
    }

    /// Begins to stop. Returns the callers that waited for a change of variant.
    pub(crate) fn stop(&mut self, cause: StopCause, now: Timestamp) -> Vec<Ticket> {
        let outgrown = self.ready().is_some_and(Ready::is_outgrown);
        self.stage = Stage::Stopping { cause, outgrown };
        self.since = now;
        self.resizing
            .take()
            .map_or_else(Vec::new, |resizing| resizing.tickets)
    }

    /// Begins a change of variant.
    pub(crate) fn change(&mut self, resizing: Resizing) {
        if resizing.to_shed {
            self.before_shed = self.before_shed.take().or_else(|| self.variant.clone());
        }
        self.peak.leave();
        // Without a reading so far, the next one may be of the variant being left.
        self.peak.next_is_of_others |= self.peak.seen.is_none();
        self.resizing = Some(resizing);
    }

    /// Ends a change: the worker is in `variant`, which may be `smaller`, or has kept its own. Returns the change that
    /// was requested; the outer `None` if it is not ready.
    pub(super) fn changed(
        &mut self,
        (variant, smaller): (&str, bool),
        failed: bool,
        now: Timestamp,
    ) -> Option<Option<Resizing>> {
        let Stage::Ready(ready) = &mut self.stage else {
            return None;
        };
        let resizing = self.resizing.take();
        if smaller || failed {
            // Readings up to the next one may be of the larger variant.
            self.peak.leave();
            self.peak.next_is_of_others = true;
        }
        self.variant = Some(variant.to_owned());
        // Measurements of another variant do not apply to this one.
        ready.breath = Breath::default();
        self.since = now;
        if failed {
            // It has kept its variant: there is none to return to.
            ready.before_rest = None;
        } else if resizing.as_ref().is_none_or(|resizing| !resizing.to_shed) {
            self.before_shed = None;
        }
        Some(resizing)
    }

    /// Returns when the process is stopped if it makes no progress, and the reason.
    pub(super) fn due(
        &self,
        start: &StartParams,
        stop_grace: Duration,
    ) -> Option<(Timestamp, StopReason)> {
        let within = start.ready_timeout;
        Some(match &self.stage {
            Stage::Starting => (self.since + within, StopReason::NotReady { within }),
            Stage::Stopping { .. } => {
                let at = self.since + stop_grace + STOP_SLACK;
                (at, StopReason::NotStopped)
            }
            Stage::Ready(_) => {
                let resizing = self.resizing.as_ref()?;
                let variant = resizing.variant.clone();
                // It could still change at any time, to a size that does not fit by then.
                let reason = StopReason::NotChanged { variant, within };
                (resizing.asked_at + within, reason)
            }
        })
    }
}

impl Ready {
    pub(super) fn is_outgrown(&self) -> bool {
        self.winding
            .is_some_and(|winding| winding.cause == WindCause::Outgrown)
    }
}

/// Time to reap a worker that was killed after its grace; reaping one of 1 GiB took 182 to 248 ms.
const STOP_SLACK: Duration = Duration::from_secs(2);
