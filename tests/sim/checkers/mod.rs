//! What must be true at every step. Each checker is shown everything, and knows the truth of the world.

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
        event::{Action, Event},
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
    /// The time as the arbiter has it.
    pub(crate) now: Timestamp,
    /// Time went on in a step a moment ago: what is late is no fault of the policy.
    pub(crate) jumped: bool,
    pub(crate) event: &'a Event,
    pub(crate) actions: &'a [Action],
    pub(crate) before: &'a Snapshot,
    pub(crate) after: &'a Snapshot,
    pub(crate) params: &'a Params,
    /// What holders that keep to their word really use.
    pub(crate) honest_use: &'a BTreeMap<Process, Bytes>,
    /// What holders really use that have not come to use more since they were asked to come down, non-compliant holders included.
    pub(crate) word_use: &'a BTreeMap<Process, Bytes>,
    /// What processes use that keep to their word by each of their names, where nothing keeps that from being seen in time.
    pub(crate) keeping: &'a BTreeMap<u32, Bytes>,
    /// Workers that have requests in flight, as the arbiter has been notified.
    pub(crate) busy: &'a [String],
    /// The engine as it really is.
    pub(crate) engine: &'a Engine,
    /// The most that each worker has used in each of its variants, or in what it was taken for.
    pub(crate) used_most: &'a BTreeMap<Variant, Bytes>,
}

impl Step<'_> {
    /// What the engine was to be at before this step, or has kept of that since it is in use: a plan for less is no growth.
    fn engine_goal(&self) -> Bytes {
        let Some(shape) = &self.after.engine.shape else {
            return Bytes::ZERO;
        };
        let engine = &self.before.engine;
        let goal = engine.asked.as_ref().or(engine.in_force.as_ref());
        let kept = match self.event {
            Event::EngineApplied { in_force, .. } => Some(in_force),
            _ => None,
        };
        let sizes = [goal, kept]
            .into_iter()
            .flatten()
            .map(|plan| shape.plan_bytes(plan));
        sizes.max().unwrap_or(Bytes::ZERO)
    }

    /// Whether a plan has no more KV capacity than the running answer needs, and nothing else that is new can be in it: a
    /// request for capacity never adds layers.
    fn is_for_the_answer(&self, plan: &EnginePlan, shape: &ModelShape) -> bool {
        let block = shape.kv.block_tokens.get();
        let Event::CapacityWanted {
            needed,
            is_running: true,
            ..
        } = self.event
        else {
            return false;
        };
        plan.kv_capacity.get() <= needed.get().next_multiple_of(block)
    }
}

/// Something that must be true at every step.
pub(crate) trait Checker {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String>;
}

/// All of them, except the tickets', which is asked at the end as well.
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
