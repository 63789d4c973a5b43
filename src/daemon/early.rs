//! Work ahead of a request, for a user's utterance that has probably ended.

use super::control_handle::ControlHandle;
use cotenant_conversation::{refusal::Refusal, refusals::at_limit};

/// Admits early work if memory is ample and it delays no request. Any other request is admitted, and cancels early
/// work.
///
/// # Errors
/// A refusal not shown to clients: the work is done when requested.
pub(super) fn admit(
    early: bool,
    act: &str,
    control: &ControlHandle,
    idle: impl FnOnce() -> bool,
) -> Result<(), Refusal> {
    if !early {
        control.answers().make_way();
        return Ok(());
    }
    if idle() && control.state().is_ample() {
        return Ok(());
    }
    Err(at_limit(
        act,
        "work ahead of a request, beside others or while memory is short,",
        0_u64,
    ))
}
