//! Reaction: under Critical pressure the engine sheds soon, as long as it can.

use std::time::Duration;

use cotenant::{
    policy::{event::Event, pressure::PressureLevel, residency::PlanLimits, snapshot::EngineState},
    units::Timestamp,
};

use super::{Checker, Step};

#[derive(Default)]
pub(crate) struct Reaction {
    waiting_since: Option<Timestamp>,
    /// Samples since then: without any, no reaction is due.
    samples: u32,
    sampled_at: Option<Timestamp>,
}

/// Whether a plan with the same KV capacity and fewer layers is smaller; with a large ring it may not be.
fn gives_something(step: &Step<'_>) -> Option<bool> {
    let shape = step.after.engine.shape.as_ref()?;
    let in_force = step.after.engine.in_force.as_ref()?;
    let limits = PlanLimits::new(step.params.engine.as_ref()?, in_force.kv_capacity);
    let floor = shape.floor_plan(&limits);
    Some(shape.plan_bytes(&floor) < shape.plan_bytes(in_force))
}

/// Several settle times, for failing plans and non-compliant holders.
const SOON: Duration = Duration::from_millis(1500);
/// Under Critical pressure samples arrive every 10 ms; after this pause the sampler has failed.
const SILENT: Duration = Duration::from_millis(500);

impl Checker for Reaction {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        let after = step.after;
        let short = after.pressure.level == PressureLevel::Critical
            && after
                .pressure
                .headroom
                .is_some_and(|headroom| headroom < after.pressure.critical_below);
        let can_give = after.engine.state == EngineState::Ready
            && after.engine.asked.is_none()
            && gives_something(step).unwrap_or(false);
        if !(short && can_give) || step.jumped {
            *self = Self::default();
            return Ok(());
        }
        if matches!(step.event, Event::Sampled(_)) {
            let silent = self
                .sampled_at
                .is_some_and(|at| step.now.saturating_since(at) > SILENT);
            if silent {
                *self = Self::default();
            }
            self.samples += 1;
            self.sampled_at = Some(step.now);
        } else if self
            .sampled_at
            .is_none_or(|at| step.now.saturating_since(at) > SILENT)
        {
            // Without a recent sample the policy cannot act.
            return Ok(());
        }
        let since = *self.waiting_since.get_or_insert(step.now);
        if step.now.saturating_since(since) > SOON && self.samples > 4 {
            return Err(format!(
                "no reaction: Critical with a headroom of {:?} since {since}, and the engine has {:?}",
                after.pressure.headroom, after.engine.in_force
            ));
        }
        Ok(())
    }
}
