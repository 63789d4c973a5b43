//! Shed before kill: a worker is stopped to make room only when allowed.
//!
//! A busy one at the last resort, an idle one under Critical pressure or for a more urgent holder.

use cotenant::policy::{
    event::Action,
    lease::LeaseState,
    pressure::PressureLevel,
    reason::{ReclaimReason, StopReason},
};

use super::{Checker, Step};

pub(crate) struct ShedBeforeKill;

impl Checker for ShedBeforeKill {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        for action in step.actions {
            let Action::StopWorker {
                worker,
                reason:
                    StopReason::Reclaim {
                        reclaim: reason, ..
                    },
            } = action
            else {
                continue;
            };
            let critical = step.after.pressure.level == PressureLevel::Critical;
            let last_resort = step
                .after
                .pressure
                .headroom
                .is_some_and(|headroom| headroom < step.params.pressure.last_resort_below);
            if step.busy.contains(worker) && !(critical && last_resort) {
                return Err(format!("busy worker `{worker}` is stopped: {reason}"));
            }
            let class = step.params.worker(worker).map(|worker| worker.class);
            let allowed = match reason {
                ReclaimReason::Request { tenant, .. } => {
                    let asker = step.params.worker(tenant).map(|asker| asker.class);
                    let mut leases = step.after.leases.iter();
                    asker.is_some_and(|asker| Some(asker) < class)
                        || leases.any(|lease| {
                            let waits =
                                lease.state == LeaseState::Requested || lease.tenant == *tenant;
                            waits && Some(lease.class) < class
                        })
                }
                ReclaimReason::EngineFloor { .. } | ReclaimReason::OverBudget { .. } => true,
                ReclaimReason::Operator { .. } | ReclaimReason::Pressure { .. } => critical,
            };
            if !allowed {
                let level = step.after.pressure.level;
                return Err(format!("worker `{worker}` is stopped at {level}: {reason}"));
            }
        }
        Ok(())
    }
}
