//! Exit of a worker's process, and its consequence.

use super::run::{Stage, StopCause};
use crate::{
    lease::{LeaseId, Ticket},
    snapshot::Rest,
};
use cotenant_units::Timestamp;

/// A process that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) lease: LeaseId,
    /// Those who waited for its change of variant.
    pub(crate) tickets: Vec<Ticket>,
    /// Whether we had asked it to stop.
    pub(crate) stopping: bool,
    pub(crate) next: AfterExit,
}

/// The consequence of the end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterExit {
    /// It stays down.
    Rests,
    /// It was stopped for being idle.
    Sleeps,
    /// It was stopped to make room, and is started at once if it fits: it was to be restarted as small as it was, and by
    /// what it had grown to it might never come back.
    Shed {
        restarts_if_fits: bool,
    },
    Restarts,
    Failed(Failure),
}

/// The consequence of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    RetriesAt(Timestamp),
    /// It failed too often.
    GivenUp,
    /// It would fail in the same way again.
    NeedsOperator,
}

/// How a worker rests after the exit of a process in `stage`, and what follows; `None` after a failure.
pub(super) fn consequence(
    stage: &Stage,
    intended: bool,
    wanted: bool,
) -> Option<(Option<Rest>, AfterExit)> {
    match stage {
        Stage::Stopping {
            cause: StopCause::Operator,
            ..
        } => Some((Some(Rest::Operator), AfterExit::Rests)),
        Stage::Stopping {
            cause: StopCause::Idle,
            ..
        } => Some((Some(Rest::Idle), AfterExit::Sleeps)),
        Stage::Stopping {
            cause: StopCause::Shed,
            outgrown,
        } => {
            let restarts_if_fits = *outgrown && wanted;
            Some((
                wanted.then_some(Rest::Shed),
                AfterExit::Shed { restarts_if_fits },
            ))
        }
        Stage::Stopping {
            cause: StopCause::Recycle,
            ..
        } => Some((None, AfterExit::Restarts)),
        Stage::Starting | Stage::Ready(_) if intended => Some((None, AfterExit::Rests)),
        Stage::Stopping {
            cause: StopCause::NotReady,
            ..
        }
        | Stage::Starting
        | Stage::Ready(_) => None,
    }
}
