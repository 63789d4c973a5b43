//! Exit of a worker's process, and its consequence.

use super::run::{Run, Stage, StopCause};
use crate::snapshot::Rest;

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
    /// It failed, and is started again unless that was too often, or an operator has to change something first.
    Failed {
        needs_operator: bool,
    },
}

/// How a worker rests after the exit of a process, and what follows; `None` after a failure.
pub(super) fn consequence(
    run: &Run,
    intended: bool,
    wanted: bool,
) -> Option<(Option<Rest>, AfterExit)> {
    Some(match run.stopping() {
        Some(StopCause::Operator) => (Some(Rest::Operator), AfterExit::Rests),
        Some(StopCause::Idle) => (Some(Rest::Idle), AfterExit::Sleeps),
        Some(StopCause::Shed) => {
            let outgrown = matches!(run.stage, Stage::Stopping { outgrown: true, .. });
            let restarts_if_fits = outgrown && wanted;
            let rest = wanted.then_some(Rest::Shed);
            (rest, AfterExit::Shed { restarts_if_fits })
        }
        Some(StopCause::Recycle) => (None, AfterExit::Restarts),
        None if intended => (None, AfterExit::Rests),
        Some(StopCause::NotReady) | None => return None,
    })
}
