//! Task that records the state for the history.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::{MissedTickBehavior, interval};

use super::{control_handle::ControlHandle, history::earlier, parts::Parts};
use cotenant_memory::heap;
use cotenant_rpc::Supervisor as _;
use cotenant_threads::blocking;

/// Records the state twice a second, after the hour before this run was read from its journal.
pub(super) fn spawn(control: &Arc<ControlHandle>, journal: Option<PathBuf>, parts: &Parts) {
    let control = Arc::clone(control);
    parts.spawn_permanent("the history", async move {
        if let Some(path) = journal {
            let own = control.boot_id().to_owned();
            let problem = match blocking(move || earlier(&path, &own)).await {
                Ok(Ok(earlier)) => {
                    control.history().precede(earlier);
                    None
                }
                Ok(Err(error)) => Some(error.to_string()),
                Err(error) => Some(error.to_string()),
            };
            if let Some(problem) = problem {
                tracing::warn!("cannot read the history of the last run: {problem}");
            }
            heap::trim();
        }
        let mut ticks = interval(OBSERVE_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            ticks.tick().await;
            control
                .history()
                .observe(SystemTime::now(), &control.state());
        }
    });
}

/// Interval of readings: four in a step of the history. Our choice.
const OBSERVE_EVERY: Duration = Duration::from_millis(500);
