//! Events of the engine: inspected, a plan carried out or failed, gone, busy or idle, timed.
//!
//! Its state is in [`engine_control`](crate::policy::engine_control); what it is asked for is in `orders`.

mod orders;

use std::time::Duration;

use super::core::Arbiter;
use crate::{
    policy::{
        deadline::Deadline,
        decision::{EngineDecision, NextLoad, PlanOutcome, StrayPlan},
        engine_control::{AfterFailure, KvUse, Pending, PlanKind, bytes_in},
        event::{Action, Done},
        lease::Ticket,
        params::ENGINE_TENANT,
        reason::PlanSize,
        residency::{EnginePlan, ModelShape, PlanLimits},
    },
    units::{Bytes, Tokens},
};

/// The share that the engine was chosen to give up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Given {
    /// KV blocks.
    pub(super) blocks: u32,
    /// How many of them the running answer uses, and may lose.
    pub(super) oldest: u32,
    /// What these were weighed to give.
    pub(super) block_bytes: Bytes,
    /// By how many types KV becomes smaller.
    pub(super) smaller_types: u32,
    /// Layers.
    pub(super) layers: u32,
    /// The larger prefill chunk.
    pub(super) smaller_chunk: bool,
}

/// The engine's report of a plan that it carried out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Applied {
    pub(super) freed: Bytes,
    pub(super) used: Bytes,
    pub(super) untouched: Bytes,
    pub(super) untouched_given: Bytes,
    pub(super) took: Duration,
}

impl Arbiter {
    /// The least that the engine can hold, whatever runs: for the case that the arbiter no longer decides. `None` while
    /// there is no model.
    #[must_use]
    pub fn floor_plan(&self) -> Option<EnginePlan> {
        let limits = PlanLimits::new(self.state.engine.params.as_ref()?, Tokens::ZERO);
        Some(self.state.engine.shape()?.floor_plan(&limits))
    }

    pub(super) fn take_engine_inspected(&mut self, shape: ModelShape) {
        let Some(params) = &self.state.engine.params else {
            return self.decide(EngineDecision::NotConfigured { model: shape.name });
        };
        if self.state.engine.lease.is_some() {
            return self.decide(EngineDecision::AlreadyLoaded { model: shape.name });
        }
        let limits = PlanLimits::new(params, Tokens::ZERO);
        self.decide(EngineDecision::Inspected {
            model: shape.name.clone(),
            layers: shape.layer_count(),
            token: shape.kv.bytes_per_token(limits.kv_type),
            full: shape.plan_bytes(&shape.full_plan(&limits)),
        });
        // Memory that reads of an earlier load have kept is back.
        self.state.ledger.forget(ENGINE_TENANT);
        if let Some(at) = self.state.engine.inspected(shape, self.state.now) {
            let wait = at.saturating_since(self.state.now);
            self.decide(EngineDecision::LoadDelayed { wait });
        }
        if let Some(error) = self.state.floor_out_of_reach() {
            self.state.engine.refuse(error.to_string());
            self.decide(EngineDecision::FloorExceedsBudget { error });
        }
    }

    /// Has the header of a model read again that is not loaded; what follows is as at the start.
    pub(super) fn take_operator_load(&mut self, ticket: Ticket) {
        let done = if self.state.engine.params.is_none() {
            Done::NoEngine
        } else if self.state.engine.lease.is_some() {
            Done::Loaded
        } else {
            // Failures before the operator's command do not count any more.
            self.state.engine.read_again();
            self.out.push(Action::InspectModel);
            Done::Inspecting
        };
        self.done(ticket, done);
    }

    pub(super) fn take_engine_applied(&mut self, revision: u64, in_force: EnginePlan, applied: &Applied) {
        let Applied { freed, used, untouched, untouched_given, took } = *applied;
        let Some(id) = self.state.engine.lease else {
            return self.ignore_plan(revision, StrayPlan::NoLease);
        };
        let asked = self.state.engine.plans.answered(revision);
        let loads = asked.as_ref().is_some_and(|asked| asked.kind == PlanKind::Load);
        if !self.state.engine.is_ready() && !loads {
            return self.ignore_plan(revision, StrayPlan::EarlierLoad);
        }
        self.state.engine.plans.settled(revision);
        let before = self.state.ledger.held_by(id);
        self.state.ledger.measure(ENGINE_TENANT, used, self.state.now);
        if let Some(asked) = &asked
            && in_force.kv_capacity > asked.plan.kv_capacity
        {
            self.state.engine.pin_capacity(in_force.kv_capacity, self.state.now);
            // Where the oldest may be dropped the engine has dropped what it can.
            self.state.engine.kv.droppable = Tokens::ZERO;
        }
        let chunk_was = self.state.engine.plans.in_force.as_ref().map(|plan| plan.prefill_chunk);
        let rechunked = asked.is_none() && chunk_was.is_some_and(|chunk| in_force.prefill_chunk < chunk);
        let keeps_chunk = asked.as_ref().is_some_and(|asked| in_force.prefill_chunk > asked.plan.prefill_chunk);
        if keeps_chunk {
            self.state.engine.pin_chunk(self.state.now);
        } else if chunk_was.is_some_and(|chunk| in_force.prefill_chunk < chunk) {
            self.state.engine.blocked.chunk = None;
        }
        // A request has come meanwhile: the layers whose place a larger chunk should have taken may come back at once.
        let without_chunk = asked.as_ref().is_some_and(|asked| {
            asked.kind == PlanKind::Regrow
                && in_force.prefill_chunk < asked.plan.prefill_chunk
                && self.state.dwell.began_at(asked.asked_at)
        });
        // The last known plan, asked for again to know what is in force, gives nothing up, whatever it puts right.
        let size = |plan: &EnginePlan| bytes_in(self.state.engine.shape(), plan);
        let gives_up = asked.as_ref().is_some_and(|asked| {
            let was = self.state.engine.plans.in_force.as_ref().map_or(Bytes::ZERO, size);
            asked.kind == PlanKind::Shed && (asked.from > size(&asked.plan) || was > size(&in_force))
        });
        self.state.engine.plans.in_force = Some(in_force);
        self.state.engine.kv.untouched = untouched;
        let loaded = self.state.engine.ready(self.state.now);
        let stays = self.state.engine.needs().max(used.min(before));
        let credited = self.state.ledger.lower(id, stays);
        self.state.ledger.set_moving(id, !self.state.engine.plans.pending.is_empty());
        self.state.changed_at = self.state.now;
        let kind = asked.as_ref().map(|asked| asked.kind);
        let outcome = match kind {
            None if rechunked => PlanOutcome::ChunkEnded { credited, freed },
            _ if loaded => PlanOutcome::Ready,
            Some(PlanKind::Shed) if gives_up => PlanOutcome::Shed { credited, freed, untouched: untouched_given },
            Some(PlanKind::Regrow) => PlanOutcome::Grown,
            _ => PlanOutcome::Confirmed,
        };
        self.decide(EngineDecision::Applied {
            revision,
            outcome,
            plan: self.plan_in_force(),
            used,
            free: self.state.ledger.free(),
            took,
        });
        match kind {
            Some(PlanKind::Shed) if !gives_up => {
                self.state.changed_at = self.state.now;
                self.state.pressure.came_back(credited.min(freed), self.state.now);
            }
            Some(PlanKind::Shed) => {
                self.note_reclaimed(credited, true);
                self.state.pressure.came_back(credited, self.state.now);
                let promised = asked.map_or(Bytes::ZERO, |asked| {
                    before.saturating_sub(bytes_in(self.state.engine.shape(), &asked.plan))
                });
                let short = promised.per_mille(self.state.params.shed.verify_per_mille)
                    > credited.min(freed.saturating_add(untouched_given));
                if short && self.state.engine.plans.pending.is_empty() {
                    self.decide(EngineDecision::Short { promised, credited, freed });
                }
            }
            Some(PlanKind::Regrow) => {
                self.state.engine.blocked.growth = Some(self.later(self.state.params.shed.settle));
                let from = asked.map_or(Bytes::ZERO, |asked| asked.from);
                let in_force = self.state.engine.plans.in_force.as_ref();
                let grown =
                    in_force.map_or(from, |plan| bytes_in(self.state.engine.shape(), plan)).saturating_sub(from);
                self.stats.regrown_bytes = self.stats.regrown_bytes.saturating_add(grown);
            }
            None if rechunked => {
                self.note_reclaimed(credited, true);
                self.state.pressure.came_back(credited, self.state.now);
            }
            Some(PlanKind::Load) | None => {}
        }
        if without_chunk {
            self.state.dwell.end();
        }
        self.answer_operators(revision, Ok(applied));
    }

    pub(super) fn take_engine_apply_failed(&mut self, revision: u64, reason: &str) {
        let Some(pending) = self.state.engine.plans.answered(revision) else {
            let reason = reason.to_owned();
            return self.ignore_plan(revision, StrayPlan::Failed { reason });
        };
        if pending.kind == PlanKind::Load {
            self.take_engine_failed(reason, None);
            return;
        }
        self.decide(EngineDecision::NotApplied {
            revision,
            reason: reason.to_owned(),
            plan: PlanSize::of(self.state.engine.shape(), &pending.plan),
            in_force: self.plan_in_force(),
        });
        let (settle, dwell) = (self.state.params.shed.settle, self.state.params.pressure.dwell);
        // Neither growth nor the same shed is tried again at once: what failed a moment ago fails again.
        if pending.kind == PlanKind::Shed {
            self.state.engine.blocked.shed = Some(self.later(settle));
        }
        // The plan in force is asked for before anything grows; after a longer time, if that one failed.
        let confirms = self.state.engine.plans.in_force.as_ref() == Some(&pending.plan);
        let confirm_at = Deadline::after(self.state.now, if confirms { settle.max(dwell) } else { settle });
        let grows_at = match pending.kind {
            PlanKind::Regrow => confirm_at.at().max(self.state.now + dwell),
            PlanKind::Shed | PlanKind::Load => confirm_at.at(),
        };
        self.state.engine.blocked.growth = self.state.engine.blocked.growth.max(Some(grows_at));
        // Its finished part is on the book until the engine reports which plan is in force.
        self.state.engine.plans.failed(revision, pending.plan, confirm_at);
        self.settle_engine();
        self.answer_operators(revision, Err(reason));
    }

    pub(super) fn take_engine_failed(&mut self, reason: &str, left: Option<Bytes>) {
        if self.state.engine.params.is_none() {
            return;
        }
        let freed = self.state.engine.lease.map_or(Bytes::ZERO, |id| self.drop_lease(id));
        match left {
            // No lease holds it, and nothing can be granted of it.
            Some(left) => self.state.ledger.measure(ENGINE_TENANT, left, self.state.now),
            None => self.state.ledger.forget(ENGINE_TENANT),
        }
        self.state.changed_at = self.state.now;
        let next = match self.state.engine.failed(reason, left.is_some(), self.state.now) {
            AfterFailure::RetryAt(at) => NextLoad::In(at.saturating_since(self.state.now)),
            AfterFailure::GivenUp => NextLoad::GivenUp,
            AfterFailure::WaitsForDisk => NextLoad::WaitsForDisk { left: left.unwrap_or_default() },
            AfterFailure::NothingToLoad => NextLoad::NothingToLoad,
        };
        self.decide(EngineDecision::Gone { reason: reason.to_owned(), freed, next });
        self.answer_operators(u64::MAX, Err(reason));
    }

    pub(super) fn take_engine_activity(&mut self, requests: u32, kv: KvUse) {
        let lost = self.state.engine.activity(requests, kv);
        if lost > 0 {
            self.decide(EngineDecision::ContextLost { tokens: lost, in_all: kv.dropped.get() });
        }
    }

    fn plan_in_force(&self) -> Option<PlanSize> {
        let plan = self.state.engine.plans.in_force.as_ref();
        plan.map(|plan| PlanSize::of(self.state.engine.shape(), plan))
    }

    fn ignore_plan(&mut self, revision: u64, stray: StrayPlan) {
        self.decide(EngineDecision::StrayPlan { revision, stray });
    }
}
