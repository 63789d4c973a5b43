//! Decisions about the engine, workers and growth as English.

use crate::policy::decision::{EngineDecision, GrowthDecision, WorkerDecision};

pub(super) fn engine(decision: &EngineDecision) -> String {
    match *decision {}
}

pub(super) fn worker(decision: &WorkerDecision) -> String {
    match decision {
        WorkerDecision::Starting {
            worker,
            peak,
            free,
            budget,
        } => format!("starting worker `{worker}` with {peak} held for its peak; {free} is free of {budget}"),
        WorkerDecision::Unresponsive { worker, pid, evidence } => {
            format!("worker `{worker}` (pid {pid}) does not respond and is ended: {evidence}")
        }
    }
}

pub(super) fn growth(decision: &GrowthDecision) -> String {
    match decision {
        GrowthDecision::CapacityWithheld { wanted, present, wait } => {
            format!("a client wants a KV capacity of {wanted} tokens, {present} are planned: {wait}")
        }
        GrowthDecision::BackedOff { stayed, dwell } => format!(
            "what had grown back was shed again after {:.1} s; nothing grows for {:.1} s",
            stayed.as_secs_f64(),
            dwell.as_secs_f64()
        ),
    }
}
