//! Decisions about workers as English.

use super::super::reason::still_uses;
use crate::{
    policy::decision::{ChangeCause, StrayReport, WorkerDecision},
    units::Bytes,
};

pub(super) fn worker(decision: &WorkerDecision) -> String {
    match decision {
        WorkerDecision::Starting { worker, peak, free, budget } => {
            format!("starting worker `{worker}` with {peak} held for its peak; {free} is free of {budget}")
        }
        WorkerDecision::Unresponsive { worker, pid, evidence } => {
            format!("worker `{worker}` (pid {pid}) does not respond and is ended: {evidence}")
        }
        WorkerDecision::Ready { worker, pid, took } => {
            format!("worker `{worker}` (pid {pid}) is ready after {} ms", took.as_millis())
        }
        WorkerDecision::Ignored { worker, report } => match report {
            StrayReport::Ready { pid, state } => {
                format!("worker `{worker}` (pid {pid}) answers while it is {}: ignored", state.word())
            }
            StrayReport::Exited { cause } => {
                format!("worker `{worker}` exited ({cause}) and was not running: ignored")
            }
            StrayReport::Changed { variant } => {
                format!("worker `{worker}` changed to `{variant}` while it does not run: ignored")
            }
        },
        // Its event says how it died.
        WorkerDecision::Died { remedy, .. } => format!("remedy: {remedy}"),
        WorkerDecision::Exited { worker, expected, freed, free, .. } => {
            let asked = if *expected { "as requested" } else { "unexpectedly" };
            format!("worker `{worker}` exited {asked}: {freed} returned to the budget, {free} is free")
        }
        WorkerDecision::Restarting { worker, wait, failures, intensity, window } => format!(
            "worker `{worker}` starts again in {:.1} s, failure {failures} of {intensity} within {:.0} s",
            wait.as_secs_f64(),
            window.as_secs_f64()
        ),
        WorkerDecision::GivenUp { worker, failures, window } => format!(
            "worker `{worker}` failed {failures} times within {:.0} s and is left alone; start it by hand",
            window.as_secs_f64()
        ),
        WorkerDecision::NeedsOperator { worker } => format!(
            "worker `{worker}` would end in the same way again and is left alone; start it by hand when its cause is cured"
        ),
        WorkerDecision::Woken { worker } => format!("worker `{worker}` is woken by a request"),
        WorkerDecision::Changing { worker, variant, cause } => {
            let why = match cause {
                ChangeCause::Asked => "asked for".to_owned(),
                ChangeCause::Room { reason } => reason.to_string(),
                ChangeCause::Idle { idle } => format!("nothing to do for {} s", idle.as_secs()),
            };
            format!("worker `{worker}` changes to variant `{variant}`: {why}")
        }
        WorkerDecision::Settled { worker, used, stays, freed, free } => {
            format!("worker `{worker}` uses {used}: its lease comes down by {freed} to {stays}, {free} is free")
        }
        WorkerDecision::Outgrown { worker, used, above, held, requests } => format!(
            "worker `{worker}` uses {used}, above {above} where it is recycled, and holds {held}: it takes nothing new, ends \
             its {requests} requests and is restarted"
        ),
        WorkerDecision::PeakLearned { worker, variant, peak, configured } => {
            let variant = variant.as_ref().map_or_else(String::new, |variant| format!(" in variant `{variant}`"));
            format!(
                "worker `{worker}` used {peak}{variant}, and is set to need {configured} at most: from now on its own peak counts"
            )
        }
        WorkerDecision::PeakRaised { worker, had, needs } => format!(
            "worker `{worker}` was killed at the limit of its group with {had}: from now on {needs} has to be free for it"
        ),
        WorkerDecision::IgnoresPressure(ignored) => {
            format!("{ignored}; it is at work and keeps what it holds")
        }
        WorkerDecision::NotSmaller { worker, used, held } => {
            let used = still_uses(*used);
            format!("worker `{worker}` reported that it has become smaller and {used}; it still holds {held}")
        }
        WorkerDecision::Restored { worker, steady } => format!("worker `{worker}` may hold its {steady} again"),
        WorkerDecision::Resized { worker, variant, took, used, held } => {
            let took = took.as_millis();
            format!("worker `{worker}` is in variant `{variant}` after {took} ms{}, holds {held}", uses(*used))
        }
        WorkerDecision::VariantKept { worker, variant, error, used } => {
            format!("worker `{worker}` stays in variant `{variant}`: {error}{}", uses(*used))
        }
        WorkerDecision::TakenOver { worker, pid, held } => {
            format!("worker `{worker}` (pid {pid}) has outlived the run before and is taken over with {held}")
        }
    }
}

fn uses(used: Option<Bytes>) -> String {
    used.map_or_else(String::new, |used| format!(", uses {used}"))
}
