//! Learned sizes: no variant of a worker inherits the use of another one.

use cotenant::policy::{event::Action, params::ENGINE_TENANT, peaks::LearnedPeak};

use super::{Checker, Step};

pub(crate) struct Learned;

impl Checker for Learned {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        for action in step.actions {
            let Action::StorePeaks { peaks } = action else {
                continue;
            };
            let of_variant =
                |peak: &&LearnedPeak| peak.variant.is_some() && peak.holder != ENGINE_TENANT;
            for peak in peaks.iter().filter(of_variant) {
                let used = step
                    .used_most
                    .get(&(peak.holder.clone(), peak.variant.clone()));
                let used = used.copied().unwrap_or_default();
                if peak.bytes > used {
                    return Err(format!(
                        "learned from another variant: {peak:?}, which has used {used} at most"
                    ));
                }
            }
        }
        Ok(())
    }
}
