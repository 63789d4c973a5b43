//! Decisions about the engine, growth and memory that nobody holds, as English.

use crate::policy::{
    decision::{EngineDecision, GrowthDecision, MemoryDecision},
    page_pool::Release,
};

pub(super) fn engine(decision: &EngineDecision) -> String {
    match decision {
        EngineDecision::FloorExceedsBudget { error } => format!(
            "the model is not loaded: {error} with all memory free; use a smaller model or `llm.kv_floor`, or a larger budget"
        ),
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

pub(super) fn memory(decision: &MemoryDecision) -> String {
    let MemoryDecision::Released(Release { bytes, to_pool, to_os }) = decision;
    format!("released {bytes}: {to_pool} to the GPU's page pool, {to_os} to the OS")
}
