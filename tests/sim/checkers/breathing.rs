//! Size limits: no worker is ended while busy, or while free memory is unclaimed.

use cotenant::policy::{
    event::Action, pressure::PressureLevel, reason::StopReason, snapshot::WorkerState,
};

use super::{Checker, Step};

pub(crate) struct Breathing;

impl Checker for Breathing {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        for action in step.actions {
            let Action::StopWorker {
                worker,
                reason: StopReason::Outgrown,
            } = action
            else {
                continue;
            };
            if step.busy.contains(worker) {
                return Err(format!(
                    "worker `{worker}` is ended in its work for its size"
                ));
            }
            let settings = step.params.worker(worker);
            if settings.is_some_and(|settings| settings.rest.recycle_above.is_some()) {
                continue;
            }
            // It winds down for some time after memory was requested; the request may be over by then.
            let began = step.before.workers.iter().find(|view| view.name == *worker);
            if began.is_none_or(|view| !view.winding_up) {
                return Err(format!(
                    "worker `{worker}` is ended for its size without having wound down"
                ));
            }
        }
        for view in step
            .after
            .workers
            .iter()
            .filter(|view| view.winding_up && view.state == WorkerState::Ready)
        {
            let before = step
                .before
                .workers
                .iter()
                .find(|before| before.name == view.name);
            let begins = before.is_some_and(|before| !before.winding_up);
            let settings = step.params.worker(&view.name);
            let for_rest = settings.is_none_or(|settings| {
                settings.rest.recycle_above.is_some() || settings.rest.idle_stop_after.is_some()
            });
            let free = step.after.memory.free;
            let wanted = step.after.pressure.level > PressureLevel::Normal
                || free.get() < step.after.memory.budget.get() / 4
                || step.before.waiting > 0
                || step
                    .after
                    .workers
                    .iter()
                    .any(|other| other.state != WorkerState::Ready);
            if begins && !for_rest && !wanted {
                return Err(format!(
                    "worker `{}` is to end for its size while {free} is free",
                    view.name
                ));
            }
        }
        Ok(())
    }
}
