//! Decisions about the engine, growth and memory without a holder, as English.

use crate::{
    policy::{
        decision::{EngineDecision, GrowthDecision, MemoryDecision, NextLoad, PlanOutcome, StrayPlan},
        page_pool::Release,
    },
    units::Bytes,
};

pub(super) fn engine(decision: &EngineDecision) -> String {
    match decision {
        EngineDecision::FloorExceedsBudget { error } => format!(
            "the model is not loaded: {error} with all memory free; use a smaller model or `llm.kv_floor`, or a larger budget"
        ),
        EngineDecision::NotConfigured { model } => format!("`{model}` was inspected, and no engine is configured"),
        EngineDecision::AlreadyLoaded { model } => {
            format!("`{model}` was inspected while a model is loaded: ignored")
        }
        EngineDecision::Inspected { model, layers, token, full } => {
            format!("`{model}` has {layers} layers, {token} of KV for each token and needs {full} in full")
        }
        EngineDecision::LoadDelayed { wait } => {
            let wait = wait.as_secs_f64();
            format!("the model was inspected again; it is loaded in {wait:.1} s")
        }
        EngineDecision::WaitsForMemory { error, free, kept, headroom, watermark } => format!(
            "the engine waits for memory: {error}: {free} is free, {kept} is kept for workers, headroom is {headroom} with a \
             watermark of {watermark}"
        ),
        EngineDecision::Loading { plan, full, free, kept } => format!(
            "loading the engine with {plan}, {full} in full: {free} is free after it, {kept} of that is kept for workers"
        ),
        EngineDecision::StrayPlan { revision, stray } => match stray {
            StrayPlan::NoLease => format!("the engine applied plan {revision}, and holds no lease"),
            StrayPlan::EarlierLoad => format!("the engine applied plan {revision} of an earlier load: ignored"),
            StrayPlan::Failed { reason } => format!("plan {revision} failed, and is no longer waited for: {reason}"),
        },
        EngineDecision::Applied { revision, outcome, plan, used, free, took } => {
            let holds = plan.map_or_else(String::new, |plan| plan.to_string());
            let took = took.as_millis();
            match outcome {
                PlanOutcome::Ready => format!("engine ready after {took} ms: {holds}, uses {used}"),
                PlanOutcome::Shed { credited, freed, untouched } => {
                    let untouched = if *untouched > Bytes::ZERO {
                        format!(" and {untouched} had not been touched")
                    } else {
                        String::new()
                    };
                    format!(
                        "engine shed {credited} in {took} ms, the kernel shows {freed}{untouched}: {holds}, uses {used}; \
                         {free} is free"
                    )
                }
                PlanOutcome::ChunkEnded { credited, freed } => format!(
                    "a chunk of a prompt has ended, and smaller ones follow: engine gave up {credited} in {took} ms, the \
                     kernel shows {freed}: {holds}, uses {used}; {free} is free"
                ),
                PlanOutcome::Grown => format!("engine has grown in {took} ms: {holds}, uses {used}; {free} is free"),
                PlanOutcome::Confirmed => {
                    format!("engine applied plan {revision} in {took} ms: {holds}, uses {used}")
                }
            }
        }
        EngineDecision::Short { promised, credited, freed } => {
            format!("engine promised {promised}, {credited} are credited and the kernel shows {freed}")
        }
        EngineDecision::NotApplied { revision, reason, plan, in_force } => {
            let in_force = in_force.map_or_else(String::new, |plan| plan.to_string());
            format!("the engine could not apply plan {revision} ({plan}): {reason}; in force was {in_force}")
        }
        EngineDecision::Gone { reason, freed, next } => {
            let next = match next {
                NextLoad::In(wait) => format!("loading again in {:.1} s", wait.as_secs_f64()),
                NextLoad::GivenUp => "it failed too often and is not loaded again".to_owned(),
                NextLoad::WaitsForDisk { left } => {
                    format!("reads that hang keep {left}, and it is inspected again when the disk has answered")
                }
                NextLoad::NothingToLoad => "there is nothing to load".to_owned(),
            };
            format!("the engine is gone ({reason}), {freed} are off the book; {next}")
        }
        EngineDecision::ContextLost { tokens, in_all } => format!(
            "the answer has lost {tokens} tokens of its context, the oldest, as its request allows: {in_all} in all"
        ),
        EngineDecision::Unconfirmed => {
            "the plan in force is unknown; asking for the last one that was known".to_owned()
        }
        EngineDecision::Unanswered { revision, after } => {
            let after = after.as_secs_f64();
            format!("the engine has not answered plan {revision} within {after:.1} s; asking again")
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
        GrowthDecision::EngineSpared { level } => {
            format!("{level}: nothing more is shed that would make the engine slower, until Critical is ahead")
        }
        GrowthDecision::NothingLeft { level, unaccounted, own } => {
            let own = own.map_or_else(|| "an unknown part".to_owned(), |own| own.to_string());
            format!("{level}: nothing is left to shed; {unaccounted} is unaccounted, the supervisor itself uses {own}")
        }
    }
}

pub(super) fn memory(decision: &MemoryDecision) -> String {
    match decision {
        MemoryDecision::Released(Release { bytes, to_pool, to_os }) => {
            format!("released {bytes}: {to_pool} to the GPU's page pool, {to_os} to the OS")
        }
        MemoryDecision::RebootAdvised(reason) => format!("reboot advised: {reason}"),
        MemoryDecision::RebootNotAdvised(reason) => format!("reboot no longer advised; it was since {reason}"),
    }
}
