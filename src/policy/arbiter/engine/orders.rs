//! Orders to the engine, and their state while unanswered.

use super::{Applied, Arbiter, Given, Pending, PlanKind};
use crate::{
    policy::{
        decision::EngineDecision,
        denial::{Denial, Problem},
        engine_control::{WaitingOperator, Wish},
        event::{Action, Answer, Done, ShedLimit, ShedOutcome},
        lease::Ticket,
        params::ENGINE_TENANT,
        reason::{PlanChange, PlanReason, PlanSize, ReclaimReason},
        residency::{EnginePlan, PlanLimits},
    },
    units::{Bytes, Tokens},
};

impl Arbiter {
    /// Asks the engine to give up what was chosen. Returns what it has been asked for.
    pub(in crate::policy::arbiter) fn shed_engine(&mut self, given: Given, reclaim: ReclaimReason) -> Bytes {
        if !self.state.engine.can_shed(self.state.now) {
            return Bytes::ZERO;
        }
        let (Some(shape), Some(limits), Some(goal)) =
            (self.state.engine.shape(), self.state.engine.limits(), self.state.engine.goal())
        else {
            return Bytes::ZERO;
        };
        let oldest = given.oldest.saturating_mul(shape.kv.block_tokens.get());
        let limits = PlanLimits { kv_used: Tokens::new(limits.kv_used.get().saturating_sub(oldest)), ..limits };
        let goal_bytes = shape.plan_bytes(goal);
        let kind = (0..given.smaller_types).fold(goal.kv_type, |kind, _| kind.smaller().unwrap_or(kind));
        let kind = kind.max(limits.kv_type_least).min(goal.kv_type);
        // Blocks were weighed by what they hold in the smallest type that is allowed: in another one fewer are enough.
        let blocks = shape.blocks_that_give(goal, kind, given.block_bytes, given.blocks);
        let layers = usize::try_from(given.layers).unwrap_or(usize::MAX);
        let mut plan = shape.shrunk(goal, blocks, layers, kind, &limits);
        let least_chunk = if self.state.engine.is_chunk_pinned() {
            goal.prefill_chunk
        } else {
            goal.prefill_chunk.min(limits.prefill_chunk)
        };
        if given.smaller_chunk {
            plan.prefill_chunk = least_chunk;
        }
        let only_kv = EnginePlan { resident: goal.resident.clone(), ..plan.clone() };
        let least =
            EnginePlan { prefill_chunk: least_chunk, ..shape.shrunk(goal, u32::MAX, usize::MAX, kind, &limits) };
        let held = self.state.engine_held();
        let gives = |plan: &EnginePlan| goal_bytes.saturating_sub(shape.plan_bytes(plan));
        // The engine keeps the KV capacity that its sequence has come to need by then. The first layer that is streamed
        // needs a ring; if it is larger than the layer, the two together would not be covered by what is held. And a chunk
        // under way ends before a smaller one begins.
        let is_covered = |plan: &EnginePlan| {
            let kept = EnginePlan { kv_capacity: goal.kv_capacity, prefill_chunk: goal.prefill_chunk, ..plan.clone() };
            shape.plan_bytes(&kept) <= held
        };
        let chosen = [plan, only_kv, least].into_iter().find(|plan| gives(plan) > Bytes::ZERO && is_covered(plan));
        let Some(plan) = chosen else {
            return Bytes::ZERO;
        };
        let promised = gives(&plan);
        let change = self.change_to(goal, &plan);
        let reason = PlanReason::Shed { reclaim, gives: promised, change };
        self.ask_engine(plan, PlanKind::Shed, Some(reason));
        promised
    }

    pub(in crate::policy::arbiter) fn change_to(&self, from: &EnginePlan, to: &EnginePlan) -> PlanChange {
        let shape = self.state.engine.shape();
        PlanChange { from: PlanSize::of(shape, from), to: PlanSize::of(shape, to) }
    }

    /// Sends a plan, without a `reason` to load the model with it; growth has been booked.
    pub(in crate::policy::arbiter) fn ask_engine(
        &mut self,
        plan: EnginePlan,
        kind: PlanKind,
        reason: Option<PlanReason>,
    ) {
        let revision = self.state.engine.plans.next_revision();
        let from = self.state.engine.goal().map_or(Bytes::ZERO, |goal| self.state.engine.bytes_in(goal));
        if let Some(id) = self.state.engine.lease {
            self.state.ledger.set_moving(id, true);
        }
        self.state
            .engine
            .plans
            .pending
            .insert(revision, Pending { plan: plan.clone(), asked_at: self.state.now, kind, from });
        self.out.push(match reason {
            None => Action::LoadEngine { revision, plan },
            Some(reason) => Action::ApplyPlan { revision, plan, reason },
        });
    }

    pub(in crate::policy::arbiter) fn serve_engine_deadlines(&mut self) {
        self.state.engine.forget_past(self.state.now);
        // A plan that was not answered may be in force all the same; so the one that should be is asked for once more.
        if let Some(plan) = self.state.engine.plans.take_unconfirmed(self.state.now) {
            self.decide(EngineDecision::Unconfirmed);
            self.ask_engine(plan, PlanKind::Shed, Some(PlanReason::Confirm));
        }
        let Some((revision, overdue)) = self.state.engine.overdue(self.state.now) else {
            return;
        };
        let after = self.state.now.saturating_since(overdue.asked_at);
        self.decide(EngineDecision::Unanswered { revision, after });
        self.state.engine.plans.answered(revision);
        self.state.engine.plans.doubt(revision, overdue.plan.clone());
        self.answer_operators(revision, Err("it does not answer"));
        if overdue.kind == PlanKind::Shed {
            // It may still be under way: the dwell counts from when it was last asked for.
            self.state.dwell.begin(self.state.now);
        }
        self.ask_engine(overdue.plan, overdue.kind, Some(PlanReason::Unanswered));
    }

    /// Credits what a newer measurement of the engine shows.
    pub(in crate::policy::arbiter) fn settle_engine(&mut self) {
        let Some(id) = self.state.engine.lease else { return };
        if !self.state.engine.is_ready() {
            return;
        }
        let held = self.state.ledger.held_by(id);
        let used = self.state.ledger.used_by(ENGINE_TENANT).unwrap_or(held);
        self.state.ledger.lower(id, self.state.engine.needs().max(used.min(held)));
        self.state.ledger.set_moving(id, !self.state.engine.plans.pending.is_empty());
    }

    /// Why the engine does not give more than it has.
    fn shed_limit(&self, held: Bytes) -> ShedLimit {
        let limits = self.state.engine.limits();
        let floor = self.state.engine.floor_bytes().unwrap_or_default();
        match limits.map(|limits| limits.kv_used) {
            _ if held <= floor => ShedLimit::Floor { bytes: floor },
            Some(tokens) if tokens > Tokens::ZERO => ShedLimit::RunningAnswer { tokens },
            _ => ShedLimit::NotConfirmed,
        }
    }

    /// Tells operators what became of what they asked for.
    pub(in crate::policy::arbiter) fn answer_operators(&mut self, revision: u64, outcome: Result<&Applied, &str>) {
        let held = self.state.engine_held();
        let (due, waiting) = std::mem::take(&mut self.state.engine.operators)
            .into_iter()
            .partition(|operator| operator.revision <= revision);
        self.state.engine.operators = waiting;
        let due: Vec<WaitingOperator> = due;
        for WaitingOperator { ticket, revision: asked_as, before, wish } in due {
            match (outcome, wish) {
                (Ok(applied), Wish::KvType { kind }) => self.done(
                    ticket,
                    Done::KvChanged {
                        kv_type: kind,
                        before,
                        held,
                        freed: applied.freed,
                        untouched: applied.untouched_given,
                        took: applied.took,
                    },
                ),
                (Ok(_), Wish::Shed { asked }) => {
                    let freed = before.saturating_sub(held);
                    let limited_by = (freed < asked).then(|| self.shed_limit(held));
                    let outcome = ShedOutcome { asked, freed, held, limited_by };
                    self.answer(ticket, Answer::Shed(outcome));
                }
                (Err(reason), Wish::KvType { kind }) => self.deny_unapplied(ticket, "kv_type", &kind, asked_as, reason),
                (Err(reason), Wish::Shed { .. }) => self.deny_unapplied(ticket, "plan", &asked_as, asked_as, reason),
            }
        }
    }

    fn deny_unapplied(&mut self, ticket: Ticket, field: &str, value: &dyn ToString, revision: u64, reason: &str) {
        let reason = reason.to_owned();
        let problem = Problem::NotApplied { revision, reason };
        self.deny(ticket, Denial::invalid(ENGINE_TENANT, field, value, problem));
    }
}
