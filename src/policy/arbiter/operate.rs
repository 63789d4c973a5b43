//! What operators ask for: memory back, KV in another type, other settings.

use super::core::Arbiter;
use crate::{
    policy::{
        denial::{Denial, Problem},
        engine_control::{PlanKind, WaitingConversion, WaitingShed, bytes_in},
        event::{ChangedKeys, Done},
        kv_type::KvType,
        lease::{Class, Ticket},
        params::{ENGINE_TENANT, Params},
        reason::{PlanReason, ReclaimReason},
        reclaim,
        residency::EnginePlan,
    },
    units::Bytes,
};

impl Arbiter {
    pub(super) fn take_operator_shed(&mut self, ticket: Ticket, bytes: Bytes) {
        if bytes == Bytes::ZERO {
            self.deny(ticket, Denial::invalid(ENGINE_TENANT, "bytes", &bytes, Problem::Zero));
            return;
        }
        let before = self
            .state
            .engine
            .lease
            .map_or(Bytes::ZERO, |id| self.state.ledger.held_by(id));
        let reclaim = reclaim::for_operator(&self.state, bytes, ReclaimReason::Operator { asked: bytes });
        let promised = reclaim.is_some_and(|reclaim| self.carry_out(reclaim));
        match self.state.engine.plans.pending.last_key_value() {
            Some((revision, _)) if promised => {
                let revision = *revision;
                self.state.engine.waiting.sheds.push(WaitingShed {
                    ticket,
                    revision,
                    asked: bytes,
                    before,
                });
            }
            _ => {
                let denial = self.state.insufficient("operator", None, bytes, Class::AudioRealtime);
                self.deny(ticket, denial);
            }
        }
    }

    /// From now on KV is kept as `kind` when memory is plentiful. What is there is converted: at once when it becomes
    /// smaller, and as soon as there is room for it when it becomes larger.
    pub(super) fn take_operator_kv_type(&mut self, ticket: Ticket, kind: KvType) {
        let invalid = |problem| Denial::invalid(ENGINE_TENANT, "kv_type", &kind, problem);
        if !self.state.engine.set_kv_type(kind) {
            self.deny(ticket, invalid(Problem::NoEngine));
            return;
        }
        let (floor, full) = (self.state.engine.floor_bytes(), self.state.engine.full_plan());
        let full_bytes = full.as_ref().map(|full| bytes_in(self.state.engine.shape(), full));
        if let Some((id, full_bytes)) = self.state.engine.lease.zip(full_bytes) {
            self.state
                .leases
                .set_bounds(id, floor.unwrap_or(Bytes::ZERO), full_bytes);
        }
        let (Some(id), Some(shape), Some(goal)) = (
            self.state.engine.lease,
            self.state.engine.shape(),
            self.state.engine.goal(),
        ) else {
            self.done(ticket, Done::KvWhenLoaded(kind));
            return;
        };
        if goal.kv_type == kind {
            self.done(ticket, Done::KvIs(kind));
            return;
        }
        if !self.state.engine.can_shed(self.state.now) {
            self.deny(ticket, invalid(Problem::EngineBusy));
            return;
        }
        let plan = EnginePlan {
            kv_type: kind,
            ..goal.clone()
        };
        let (before, bytes) = (self.state.ledger.held_by(id), shape.plan_bytes(&plan));
        let change = self.change_to(goal, &plan);
        let smaller = kind < goal.kv_type;
        let more = bytes.saturating_sub(before);
        let no_room = !smaller && !self.has_room_to_grow(more);
        if no_room || (!smaller && !self.grow_lease(id, bytes.max(before))) {
            let more = no_room.then_some(more);
            self.done(ticket, Done::KvWhenRoom { kv_type: kind, more });
            return;
        }
        let kind_of_plan = if smaller { PlanKind::Shed } else { PlanKind::Regrow };
        // What is given up on wish stays so for the dwell, as any shed; what is wished back is not waited for.
        if smaller {
            self.state.dwell.begin(self.state.now);
        } else {
            self.state.dwell.end();
        }
        self.ask_engine(plan, kind_of_plan, Some(PlanReason::KvType { change }));
        if let Some((revision, _)) = self.state.engine.plans.pending.last_key_value() {
            self.state.engine.waiting.conversions.push(WaitingConversion {
                ticket,
                revision: *revision,
                kind,
                before,
            });
        }
    }

    /// Goes on with other settings, or with none of them changed.
    pub(super) fn take_reconfigured(&mut self, ticket: Ticket, params: Params, changes: ChangedKeys) {
        match self.state.reconfigure(params) {
            Ok(()) => self.done(ticket, Done::Reconfigured(changes)),
            Err(fault) => {
                let denial = Denial::invalid("operator", &fault.setting, &fault.value, Problem::Text(fault.problem));
                self.deny(ticket, denial);
            }
        }
    }
}
