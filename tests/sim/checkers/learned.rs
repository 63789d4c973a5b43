//! No variant of a worker is taken to need what only another one has used.

use cotenant::policy::event::Action;

use super::{Checker, Step};

pub(crate) struct Learned;

impl Checker for Learned {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        for action in step.actions {
            let Action::StorePeaks { peaks } = action else {
                continue;
            };
            for peak in peaks.iter().filter(|peak| peak.variant.is_some()) {
                let used = step.used_most.get(&(peak.holder.clone(), peak.variant.clone()));
                if let Some(used) = used.filter(|used| peak.bytes > **used) {
                    return Err(format!("learned from another variant: {peak:?}, which has used {used} at most"));
                }
            }
        }
        Ok(())
    }
}
