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

/// One life of a worker's process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) lease: LeaseId,
    pub(crate) pid: Option<u32>,
    pub(crate) variant: Option<String>,
    pub(super) stage: Stage,
    /// When it was started, became ready, changed or was asked to stop.
    pub(crate) since: Timestamp,
    pub(crate) resizing: Option<Resizing>,
    /// The variant that it had before it was made smaller to make room.
    pub(crate) before_shed: Option<String>,
    pub(super) peak: RunPeak,
    /// When it was taken over from an earlier run, which says nothing of what it has come to use since.
    pub(crate) taken_over_at: Option<Timestamp>,
    /// Whether it has shown that it can serve, to us or to the run before.
    pub(super) answered: bool,
    /// It has died in a way that another start would repeat.
    pub(super) needs_operator: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Stage {
    Starting,
    Ready(Ready),
    Stopping {
        cause: StopCause,
        /// It was to be restarted for its size when something else stopped it.
        outgrown: bool,
    },
}

/// State of a worker that answers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ready {
    pub(super) at: Timestamp,
    pub(super) winding: Option<Winding>,
    /// Since when it has been measured above what it may hold.
    pub(super) over_since: Option<Timestamp>,
    /// What its requests take.
    #[serde(default)]
    pub(super) breath: Breath,
    /// The variant that it had before it was made smaller for being idle.
    pub(super) before_rest: Option<String>,
    /// It was asked into its smallest variant for being idle, or could not be.
    pub(super) shrunk: bool,
    /// It was asked to come down for want of memory, and did not.
    pub(super) ignores_pressure: bool,
}

/// A worker that takes nothing new, and ends when it has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Winding {
    pub(super) cause: WindCause,
    pub(super) since: Timestamp,
}

/// Why a worker takes nothing new.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum WindCause {
    Idle,
    /// It holds more than it may.
    Outgrown,
}

/// The kernel's high water of one life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RunPeak {
    pub(super) seen: Option<Bytes>,
    /// Whether a life was counted by it.
    pub(super) counted: bool,
    /// High water that another variant of this life may have left; what does not exceed it says nothing of this one.
    pub(super) of_others: Option<Bytes>,
    /// Whether the next reading is one of another variant.
    pub(super) next_is_of_others: bool,
}

impl RunPeak {
    /// Leaves a variant: the kernel remembers one high water for the whole life.
    pub(super) fn leave(&mut self) {
        self.of_others = self.of_others.max(self.seen);
    }

    /// Whether a high water is one of the present variant: well above what others have left.
    pub(super) fn is_own(&self, peak: Bytes) -> bool {
        self.of_others.is_none_or(|others| {
            peak > others.saturating_add(others.per_mille(UNSTEADY_PER_MILLE).max(UNSTEADY))
        })
    }
}

/// How far two readings of the same high water may lie apart. Since Linux 6.2 the kernel sums counters of processors as
/// they stand, each within 32 pages or twice the number of processors, so that a later reading may be lower. The size
/// and the share are our choice.
const UNSTEADY: Bytes = Bytes::from_mib(4);
const UNSTEADY_PER_MILLE: u32 = 50;

/// A change of variant under way.
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
    /// What a stop for this reason is for.
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

    /// It runs since an earlier run of the supervisor; `resizes` where it has more than one variant.
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
            // Not asked again for what it shows only once, though we end before it has answered to us.
            answered: booked.ready,
            resizing: change.map(|BookedChange { variant, to_shed }| Resizing {
                variant,
                tickets: Vec::new(),
                asked_at: now,
                to_shed,
            }),
            before_shed: booked.variant_before_shed.clone(),
            // It is unknown of which of its sizes its high water is.
            peak: RunPeak {
                next_is_of_others: resizes,
                ..RunPeak::default()
            },
            taken_over_at: Some(now),
            ..Self::new(lease, booked.variant.clone(), now)
        }
    }

    /// Its part of the book for the next run; `held` is what is on the book for it.
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
                // One that was to sleep is started, and sleeps again when it has nothing to do.
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

    /// It answers. Returns how long that took, or `None` if it was not being started.
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
            // A change that an earlier run had asked for and not seen confirmed: asked again it does no harm.
            resizing.asked_at = now;
        }
        Some(took)
    }

    /// It is asked to stop. Returns those who waited for its change of variant.
    pub(crate) fn stop(&mut self, cause: StopCause, now: Timestamp) -> Vec<Ticket> {
        let outgrown = self.ready().is_some_and(Ready::is_outgrown);
        self.stage = Stage::Stopping { cause, outgrown };
        self.since = now;
        self.resizing
            .take()
            .map_or_else(Vec::new, |resizing| resizing.tickets)
    }

    /// It is asked to change.
    pub(crate) fn change(&mut self, resizing: Resizing) {
        if resizing.to_shed {
            self.before_shed = self.before_shed.take().or_else(|| self.variant.clone());
        }
        self.peak.leave();
        // Of a start that was not read yet, the next reading may be.
        self.peak.next_is_of_others |= self.peak.seen.is_none();
        self.resizing = Some(resizing);
    }

    /// It has changed to `variant`, which may be `smaller`, or kept its own. Returns what was asked of it, or `None` if it is
    /// not ready.
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
            // What was read on the way may be of the larger one, and so may what is read next.
            self.peak.leave();
            self.peak.next_is_of_others = true;
        }
        self.variant = Some(variant.to_owned());
        // What another size took says nothing of this one.
        ready.breath = Breath::default();
        self.since = now;
        if failed {
            // It has kept its size, so that there is none to go back to.
            ready.before_rest = None;
        } else if resizing.as_ref().is_none_or(|resizing| !resizing.to_shed) {
            self.before_shed = None;
        }
        Some(resizing)
    }

    /// What its process is stopped for if it does nothing, and when.
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
                // It may still change at any time, to a size that could not be booked by then.
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

/// After its grace a worker is killed; reaping one that holds 1 GiB took 182 to 248 ms.
const STOP_SLACK: Duration = Duration::from_secs(2);
