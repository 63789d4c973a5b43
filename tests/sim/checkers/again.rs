//! Retry delay: a request that the engine just failed is not repeated at once.
//!
//! Repeating it would block all other requests.

use std::{collections::BTreeMap, time::Duration};

use cotenant::{
    policy::{
        event::{Action, EngineApplied, Event},
        reason::PlanReason,
        residency::EnginePlan,
    },
    units::Timestamp,
};

use super::{Checker, Step};

#[derive(Default)]
pub(crate) struct Again {
    asked: BTreeMap<u64, EnginePlan>,
    /// A plan that was answered while another one was in force.
    answered: Option<(Timestamp, EnginePlan)>,
}

impl Checker for Again {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        match step.event {
            Event::EngineApplied(EngineApplied {
                revision, in_force, ..
            }) => {
                let asked = self
                    .asked
                    .remove(revision)
                    .filter(|asked| asked != in_force);
                self.answered = asked.map(|asked| (step.now, asked));
                self.asked.retain(|other, _| other > revision);
            }
            // Its sheddable memory may have changed.
            Event::EngineActivity { .. }
            | Event::EngineApplyFailed { .. }
            | Event::EngineFailed { .. } => {
                self.answered = None;
            }
            _ => {}
        }
        for action in step.actions {
            let Action::ApplyPlan {
                revision,
                plan,
                reason,
            } = action
            else {
                continue;
            };
            if let Some((at, answered)) = &self.answered
                && answered == plan
                && step.now.saturating_since(*at) < ANSWER_HOLDS
                && !matches!(reason, PlanReason::Confirm | PlanReason::Unanswered)
            {
                return Err(format!(
                    "asked again: what was answered at {at} is asked for: {plan:?} ({reason})"
                ));
            }
            self.asked.insert(*revision, plan.clone());
        }
        Ok(())
    }
}

/// The engine is asked again after a second.
const ANSWER_HOLDS: Duration = Duration::from_millis(900);
