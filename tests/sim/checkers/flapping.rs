//! Hysteresis: the level falls at most once per dwell, and sheds delay growth by a dwell.
//!
//! Times are those of the samples. Exempt are the KV blocks without which the running answer would end. A request made
//! because the plan in force is unknown is not a shed.

use cotenant::{
    policy::{
        event::{Action, EngineApplied, Event},
        pressure::LevelChange,
        reason::PlanReason,
    },
    units::Timestamp,
};

use super::{Checker, Step};

#[derive(Default)]
pub(crate) struct Flapping {
    fell_at: Option<Timestamp>,
    shed_at: Option<Timestamp>,
}

impl Checker for Flapping {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        let dwell = step.params.pressure.dwell;
        // An operator's request does not wait, and nothing waits for it.
        let regrow = matches!(step.event, Event::OperatorRegrow { .. });
        if matches!(
            step.event,
            Event::OperatorRegrow { .. } | Event::OperatorKvType { .. }
        ) {
            self.shed_at = None;
        }
        // Exempt are also layers that made room for a larger chunk, which a running prompt has delayed.
        if let (Event::EngineApplied(EngineApplied { in_force, .. }), Some(asked)) =
            (step.event, &step.before.engine.asked)
            && in_force.prefill_chunk < asked.prefill_chunk
        {
            self.shed_at = None;
        }
        for action in step.actions {
            match action {
                Action::LevelChanged(LevelChange { from, to, .. }) if to < from && regrow => {
                    self.fell_at = None;
                }
                Action::LevelChanged(LevelChange { from, to, reason }) if to < from => {
                    // A late sample counts at the time when it was taken.
                    let at = if let Event::Sampled(sample) = step.event {
                        sample.taken_at
                    } else {
                        step.now
                    };
                    if let Some(last) = self.fell_at.replace(at)
                        && at.saturating_since(last) < dwell
                    {
                        return Err(format!(
                            "flapping: the level fell at {last} and at {at}: {reason}"
                        ));
                    }
                }
                Action::SetTarget { .. } => self.shed_at = Some(step.now),
                Action::ApplyPlan { plan, reason, .. } => {
                    let Some(shape) = &step.after.engine.shape else {
                        continue;
                    };
                    let before = step.engine_goal();
                    let bytes = shape.plan_bytes(plan);
                    if bytes < before && !matches!(reason, PlanReason::Confirm) {
                        self.shed_at = Some(step.now);
                    } else if bytes > before
                        && !step.is_for_the_answer(plan, shape)
                        && let Some(at) = self.shed_at
                        && step.now.saturating_since(at) < dwell
                    {
                        return Err(format!(
                            "flapping: shed at {at}, growing at {} within the dwell of {dwell:?}: {reason}",
                            step.now
                        ));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}
