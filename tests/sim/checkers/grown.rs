//! Growth: the engine uses the last sample's surplus above watermark and hysteresis.
//!
//! This applies once it used all of its memory then.

use cotenant::{
    policy::event::{Action, Event},
    units::{Bytes, Timestamp},
};

use super::{Checker, Step};

#[derive(Default)]
pub(crate) struct Grown {
    sampled_at: Timestamp,
}

impl Checker for Grown {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        if let Event::Sampled(sample) = step.event {
            self.sampled_at = self.sampled_at.max(sample.taken_at.min(step.now));
        }
        let (Some(shape), Some(headroom)) =
            (&step.after.engine.shape, step.after.pressure.headroom)
        else {
            return Ok(());
        };
        for action in step.actions {
            let Action::ApplyPlan { plan, reason, .. } = action else {
                continue;
            };
            let more = shape.plan_bytes(plan).saturating_sub(step.engine_goal());
            let unused = step.engine.unused_at(self.sampled_at);
            let pressure = &step.params.pressure;
            if more > Bytes::ZERO
                && headroom < more + unused + pressure.elevated_below + pressure.hysteresis
            {
                return Err(format!(
                    "growth of {more} into a headroom of {headroom}, of which {} stay free and the engine may use {unused}: \
                     {reason}",
                    pressure.elevated_below + pressure.hysteresis
                ));
            }
        }
        Ok(())
    }
}
