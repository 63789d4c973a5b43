//! Task that reads the hour before this run for the history.

use std::{path::PathBuf, sync::Arc};

use super::{control_handle::ControlHandle, history::earlier, parts::Parts};
use cotenant_memory::heap;
use cotenant_rpc::Supervisor as _;
use cotenant_threads::blocking;

/// Reads the hour before this run from its journal. Readings of this run are recorded as states are published, without
/// wake-ups of their own.
pub(super) fn spawn(control: &Arc<ControlHandle>, journal: Option<PathBuf>, parts: &Parts) {
    let Some(path) = journal else { return };
    let control = Arc::clone(control);
    parts.spawn("the reader of the history", async move {
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
    });
}
