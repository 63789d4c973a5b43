//! When the engine is loaded: as soon as its floor fits beside what workers come back to, and before those that come after it.

use super::{
    core::{Arbiter, Lease, Phase},
    engine::describe,
};
use crate::{
    policy::{
        engine_control::{PlanKind, bytes_in},
        lease::{Class, LeaseKind},
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
        let lease = Lease {
            tenant: ENGINE_TENANT.to_owned(),
            holder: String::new(),
            kind: LeaseKind::Engine,
            class: Class::LlmElastic,
            generation: self.counters.generation(),
            min: self.engine.floor_bytes().unwrap_or(bytes),
            max: full,
            granted_at: self.now,
            expires_at: None,
            owner_uid: 0,
            owner_pid: None,
            request: None,
            phase: Phase::Granted,
        };
        let id = self.counters.lease();
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
}
