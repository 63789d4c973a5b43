//! Work ahead of a request: at the end of what a user says, before it is certain that it is the end.

use cotenant_conversation::{refusal::Refusal, refusals::at_limit};
use cotenant_policy::{pressure::PressureLevel, snapshot::Snapshot};

/// Admits it if memory is ample and no request would be slower.
///
/// # Errors
/// A refusal that no client sees: the work is done when it is asked for.
pub(super) fn admit(act: &str, state: &Snapshot, idle: bool) -> Result<(), Refusal> {
    if idle && state.pressure.level == PressureLevel::Normal {
        return Ok(());
    }
    Err(at_limit(
        act,
        "work ahead of a request, beside others or while memory is short,",
        0_u64,
    ))
}
