//! Work ahead of a request: at the end of what a user says, before it is certain that it is the end.

use super::control_handle::ControlHandle;
use cotenant_conversation::{refusal::Refusal, refusals::at_limit};

/// Admits it if memory is ample and no request would be slower. Others are admitted, and it makes way for them.
///
/// # Errors
/// A refusal that no client sees: the work is done when it is asked for.
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
