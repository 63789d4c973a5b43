//! When the engine is loaded: as soon as its floor fits beside what workers come back to, and before those that come after it.

use super::core::Arbiter;
use crate::{
    policy::{
        decision::EngineDecision,
        engine_control::{PlanKind, bytes_in},
        lease::{Class, LeaseKind},
        lease_table::Lease,
        params::ENGINE_TENANT,
        reason::{PlanSize, ReclaimReason},
        residency::EnginePlan,
    },
    units::Bytes,
};

impl Arbiter {
    pub(super) fn load_engine_if_it_fits(&mut self) {
        let waiting = self.state.engine.waits_to_load(self.state.now);
        if !(self.state.draining || self.state.workers.first_are_up(self.state.now))
            || !self.state.taken_over_are_measured()
        {
            return;
        }
        // Unknown is not plenty: without a sample it is not known what there is.
        let (true, false, Some(headroom)) = (waiting, self.state.draining, self.state.pressure.headroom()) else {
            return;
        };
        let (Some(shape), Some(limits)) = (self.state.engine.shape(), self.state.engine.limits()) else {
            return;
        };
        let kept = self.state.returning_or_waiting_workers();
        let on_the_book = self.state.ledger.free().saturating_sub(kept);
        let elevated = self.state.params.pressure.elevated_below;
        // As much as growth leaves, so that what is loaded can grow back after a shed.
        let measured = headroom.saturating_sub(elevated.saturating_add(self.state.params.pressure.hysteresis));
        match shape.plan(on_the_book.min(measured), &limits) {
            Ok(plan) => self.load_engine(plan, kept),
            Err(error) => {
                let (floor, free) = (error.floor, self.state.ledger.free());
                if floor <= measured && floor > on_the_book && !self.state.somebody_waits() {
                    let missing = floor.saturating_sub(on_the_book);
                    let reason = ReclaimReason::EngineFloor { missing, floor, free };
                    self.reclaim_for(Class::LlmElastic, missing, reason);
                }
                let figures = [error.floor, error.available, free, kept, headroom];
                let watermark = elevated;
                let decision = EngineDecision::WaitsForMemory {
                    error,
                    free,
                    kept,
                    headroom,
                    watermark,
                };
                self.decide_once(WAITS, &figures, decision);
            }
        }
    }

    fn load_engine(&mut self, plan: EnginePlan, kept: Bytes) {
        let shape = self.state.engine.shape();
        let bytes = bytes_in(shape, &plan);
        let full = self
            .state
            .engine
            .full_plan()
            .map_or(bytes, |full| bytes_in(shape, &full));
        let size = PlanSize::of(shape, &plan);
        let (least, generation) = (
            self.state.engine.floor_bytes().unwrap_or(bytes),
            self.state.leases.next_generation(),
        );
        let kind = (LeaseKind::Engine, Class::LlmElastic);
        let lease = Lease::of_ours(ENGINE_TENANT, kind, generation, (least, full), self.state.now);
        let id = self.state.leases.next_id();
        if !self.grant(id, bytes, lease) {
            return;
        }
        self.state.engine.load(id, self.state.now);
        self.said.remove(WAITS);
        self.decide(EngineDecision::Loading {
            plan: size,
            full,
            free: self.state.ledger.free(),
            kept,
        });
        self.ask_engine(plan, PlanKind::Load, None);
    }
}

/// Subject of what is decided once.
const WAITS: &str = "the engine waits";
