//! Weighing: the journal states the compared costs before any tenant is asked for memory.
//!
//! The choice suffices, or is all that exists.

use cotenant::{policy::event::Action, units::Bytes};

use super::{Checker, Step};

pub(crate) struct Weighed;

impl Checker for Weighed {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        let mut reported = false;
        for action in step.actions {
            match action {
                Action::Weighed { weighing } => {
                    reported = true;
                    let chosen: Bytes = weighing
                        .candidates
                        .iter()
                        .filter_map(|weighed| weighed.chosen)
                        .sum();
                    if chosen < weighing.need.min(weighing.reclaimable) {
                        return Err(format!("too little was chosen: {weighing:?}"));
                    }
                    if weighing
                        .candidates
                        .iter()
                        .any(|weighed| weighed.chosen > Some(weighed.bytes))
                    {
                        return Err(format!("more was chosen than there is: {weighing:?}"));
                    }
                }
                Action::SetTarget { reason, .. } if !reported => {
                    return Err(format!(
                        "asked for memory without a comparison of costs: {reason}"
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }
}
