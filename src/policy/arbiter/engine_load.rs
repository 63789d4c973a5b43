//! When the engine is loaded: as soon as its floor fits beside what workers come back to, and before those that come after it.

use std::time::Duration;

use super::{core::Arbiter, engine::describe};
use crate::{
    policy::{
        engine_control::{PlanKind, bytes_in},
        lease::{Class, LeaseKind},
        lease_table::Lease,
        params::ENGINE_TENANT,
        residency::EnginePlan,
    },
    units::{Bytes, Timestamp},
};

impl Arbiter {
    pub(super) fn load_engine_if_it_fits(&mut self) {
        let waiting = self.engine.waits_to_load(self.now);
        if !(self.draining || self.workers.first_are_up(self.now)) || !self.taken_over_are_measured() {
            return;
        }
        // Unknown is not plenty: without a sample nobody knows what there is.
        let (true, false, Some(headroom)) = (waiting, self.draining, self.pressure.headroom()) else {
            return;
        };
        let (Some(shape), Some(limits)) = (self.engine.shape(), self.engine.limits()) else {
            return;
        };
        let kept = self.returning_or_waiting_workers();
        let on_the_book = self.ledger.free().saturating_sub(kept);
        let elevated = self.params.pressure.elevated_below;
        // As much as growth leaves, so that what is loaded can grow back after a shed.
        let measured = headroom.saturating_sub(elevated.saturating_add(self.params.pressure.hysteresis));
        match shape.plan(on_the_book.min(measured), &limits) {
            Ok(plan) => self.load_engine(plan, kept),
            Err(error) => {
                let (floor, free) = (error.floor, self.ledger.free());
                if floor <= measured && floor > on_the_book && !self.somebody_waits() {
                    let missing = floor.saturating_sub(on_the_book);
                    let reason = format!("the engine needs {missing} more for its floor of {floor}, {free} is free");
                    self.reclaim_for(Class::LlmElastic, missing, &reason);
                }
                self.explain_once(
                    "the engine waits",
                    format!(
                        "the engine waits for memory: {error}: {free} is free, {kept} is kept for workers, headroom is {headroom} with a watermark of {elevated}"
                    ),
                );
            }
        }
    }

    fn load_engine(&mut self, plan: EnginePlan, kept: Bytes) {
        let shape = self.engine.shape();
        let bytes = bytes_in(shape, &plan);
        let full = self.engine.full_plan().map_or(bytes, |full| bytes_in(shape, &full));
        let described = describe(shape, &plan);
        let (least, generation) = (
            self.engine.floor_bytes().unwrap_or(bytes),
            self.leases.next_generation(),
        );
        let kind = (LeaseKind::Engine, Class::LlmElastic);
        let lease = Lease::of_ours(ENGINE_TENANT, kind, generation, (least, full), self.now);
        let id = self.leases.next_id();
        if !self.grant(id, bytes, lease) {
            return;
        }
        self.engine.load(id, self.now);
        self.said.remove("the engine waits");
        self.explain(format!(
            "loading the engine with {described}, {full} in full: {} is free after it, {kept} of that is kept for workers",
            self.ledger.free()
        ));
        self.ask_engine(plan, PlanKind::Load, String::new());
    }

    /// Whether the workers need not wait for the engine any more.
    pub(super) fn engine_has_come_up(&self) -> bool {
        self.engine.load_overdue_at().is_none_or(|at| self.now >= at)
    }

    /// When the workers are started even if the engine has not come up.
    pub(super) fn engine_overdue(&self) -> Option<Timestamp> {
        self.engine.load_overdue_at().filter(|at| *at > self.now)
    }

    /// Whether it is known what those use that were taken over, and a later sample shows what is left beside them: while
    /// nobody watched they may have grown into any space.
    pub(super) fn taken_over_are_measured(&self) -> bool {
        self.workers.values().all(|worker| {
            worker.run().and_then(|run| run.taken_over_at).is_none_or(|at| {
                let measured = self.ledger.measurement(&worker.params.name);
                let known = measured.is_some_and(|measured| {
                    measured.at >= at && self.pressure.sampled_at().is_some_and(|sampled| sampled > measured.at)
                });
                known || self.now >= at + MEASURED_WITHIN
            })
        })
    }
}

/// How long a worker that was taken over may stay unmeasured before the LLM is loaded beside it all the same: four of the
/// slowest samples.
const MEASURED_WITHIN: Duration = Duration::from_secs(4);
