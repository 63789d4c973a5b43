//! Invariants of every step.
//!
//! Each checker sees everything, including the real state of the world.

mod again;
mod breathing;
mod covered;
mod credited;
mod deadlines;
mod flapping;
mod floor;
mod grown;
mod kept;
mod learned;
mod ledger;
mod reaction;
mod reserved;
mod shed_before_kill;
mod tickets;
mod weighed;

use std::collections::BTreeMap;

use cotenant::{
    policy::{
        event::{Action, CapacityWanted, EngineApplied, Event},
        params::Params,
        residency::{EnginePlan, ModelShape},
        snapshot::Snapshot,
    },
    units::{Bytes, Timestamp},
};

pub(crate) use self::tickets::Tickets;
use crate::{
    engine::Engine,
    world::{Process, Variant},
};

/// One call of the arbiter.
pub(crate) struct Step<'a> {
    /// The time reported to the arbiter.
    pub(crate) now: Timestamp,
    /// Whether time jumped recently: delays are then not the policy's fault.
    pub(crate) jumped: bool,
    pub(crate) event: &'a Event,
    pub(crate) actions: &'a [Action],
    pub(crate) before: &'a Snapshot,
    pub(crate) after: &'a Snapshot,
    pub(crate) params: &'a Params,
    /// Real use of compliant holders.
    pub(crate) honest_use: &'a BTreeMap<Process, Bytes>,
    /// Real use of holders that have not grown since they were asked to come down, non-compliant holders included.
    pub(crate) word_use: &'a BTreeMap<Process, Bytes>,
    /// Use of processes that comply under each of their names, if nothing delays its observation.
    pub(crate) keeping: &'a BTreeMap<u32, Bytes>,
    /// Workers with requests in flight, as reported to the arbiter.
    pub(crate) busy: &'a [String],
    /// The real engine.
    pub(crate) engine: &'a Engine,
    /// The most that each worker has used in each of its variants, or in its assumed variant.
    pub(crate) used_most: &'a BTreeMap<Variant, Bytes>,
}

impl Step<'_> {
    /// The engine's target before this step, or the part of it that it has kept because it is in use: a smaller plan is
    /// not growth.
    fn engine_goal(&self) -> Bytes {
        let Some(shape) = &self.after.engine.shape else {
            return Bytes::ZERO;
        };
        let engine = &self.before.engine;
        let goal = engine.asked.as_ref().or(engine.in_force.as_ref());
        let kept = match self.event {
            Event::EngineApplied(EngineApplied { in_force, .. }) => Some(in_force),
            _ => None,
        };
        let sizes = [goal, kept]
            .into_iter()
            .flatten()
            .map(|plan| shape.plan_bytes(plan));
        sizes.max().unwrap_or(Bytes::ZERO)
    }

    /// Whether a plan has no more KV capacity than the running answer needs, and contains nothing else that is new: a
    /// request for capacity never adds layers.
    fn is_for_the_answer(&self, plan: &EnginePlan, shape: &ModelShape) -> bool {
        let block = shape.kv.block_tokens.get();
        let Event::CapacityWanted(CapacityWanted {
            needed,
            is_running: true,
            ..
        }) = self.event
        else {
            return false;
        };
        plan.kv_capacity.get() <= needed.get().next_multiple_of(block)
    }
}

/// An invariant of every step.
pub(crate) trait Checker {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String>;
}

/// All checkers, except the one of the tickets, which is also evaluated at the end.
pub(crate) fn all() -> Vec<Box<dyn Checker>> {
    vec![
        Box::new(again::Again::default()),
        Box::new(breathing::Breathing),
        Box::new(learned::Learned),
        Box::new(ledger::Ledger),
        Box::new(covered::Covered),
        Box::new(credited::Credited),
        Box::new(deadlines::Deadlines::default()),
        Box::new(flapping::Flapping::default()),
        Box::new(floor::Floor),
        Box::new(grown::Grown::default()),
        Box::new(kept::Kept),
        Box::new(reaction::Reaction::default()),
        Box::new(reserved::Reserved),
        Box::new(shed_before_kill::ShedBeforeKill),
        Box::new(weighed::Weighed),
    ]
}
