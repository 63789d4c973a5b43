//! Reservation: growth never takes the space that a stopped worker needs to restart.

use cotenant::policy::{event::Action, snapshot::EngineState};

use super::{Checker, Step};

pub(crate) struct Reserved;

impl Checker for Reserved {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        let (Some(shape), EngineState::Ready) = (&step.after.engine.shape, step.after.engine.state)
        else {
            return Ok(());
        };
        let goal = step.engine_goal();
        for action in step.actions {
            let Action::ApplyPlan { plan, reason, .. } = action else {
                continue;
            };
            if shape.plan_bytes(plan) > goal && step.after.memory.free < step.after.memory.returning
            {
                return Err(format!(
                    "growth into reserved space: {} is free and {} is kept for workers that come back: {reason}",
                    step.after.memory.free, step.after.memory.returning
                ));
            }
        }
        Ok(())
    }
}
