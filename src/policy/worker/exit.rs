//! Exit of a worker's process, and its consequence.

use super::run::{Run, Stage, StopCause};
use crate::snapshot::Rest;

/// Consequence of an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterExit {
    /// The worker stays stopped.
    Rests,
    /// Stopped when idle; a request starts it.
    Sleeps,
    /// Stopped to free memory. If it was due for a recycle, it is started at once if it fits: its grown size may never
    /// fit again.
    Shed {
        restarts_if_fits: bool,
    },
    Restarts,
    /// Failed. Restarted unless it failed too often or its cause needs an operator.
    Failed {
        needs_operator: bool,
    },
}

/// Returns how a worker rests after an exit, and what follows; `None` after a failure.
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
