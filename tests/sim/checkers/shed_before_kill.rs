//! A worker is stopped to make room only when that is allowed: a busy one at the last resort, an idle one under Critical
//! pressure or for somebody more urgent.

use cotenant::policy::{event::Action, lease::LeaseState, pressure::PressureLevel};

use super::{Checker, Step};

pub(crate) struct ShedBeforeKill;

impl Checker for ShedBeforeKill {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        let makes_room = |reason: &str| reason.contains(" needs ") || reason.contains(": headroom ");
        for action in step.actions {
            let Action::StopWorker { worker, reason } = action else {
                continue;
            };
            if !makes_room(reason) {
                continue;
            }
            let critical = step.after.level == PressureLevel::Critical;
            let last_resort = step
                .after
                .headroom
                .is_some_and(|headroom| headroom < step.params.pressure.last_resort_below);
            if step.busy.contains(worker) && !(critical && last_resort) {
                return Err(format!("busy worker `{worker}` is stopped: {reason}"));
            }
            if reason.contains(" needs ") {
                let class = step.params.worker(worker).map(|worker| worker.class);
                let more_urgent = step
                    .after
                    .leases
                    .iter()
                    .any(|lease| lease.state == LeaseState::Requested && Some(lease.class) < class);
                let for_worker = step
                    .params
                    .workers
                    .iter()
                    .any(|other| reason.contains(&format!("`{}`", other.name)) && Some(other.class) < class);
                let for_lease = step
                    .after
                    .leases
                    .iter()
                    .any(|lease| reason.contains(&format!("`{}`", lease.tenant)) && Some(lease.class) < class);
                let for_engine = reason.contains("the engine needs");
                if !more_urgent && !for_worker && !for_lease && !for_engine {
                    return Err(format!("worker `{worker}` is stopped for nobody more urgent: {reason}"));
                }
            } else if !critical {
                return Err(format!(
                    "worker `{worker}` is stopped at {}: {reason}",
                    step.after.level
                ));
            }
        }
        Ok(())
    }
}
