//! Requests of tenants (a lease, its renewal, another size, its end), and of operators to the engine.

use std::time::Duration;

use super::core::{Arbiter, above_target};
use crate::{
    policy::{
        admission::{Want, WantKind},
        decision::{AdmissionDecision, Decision, LeaseDecision, LeaseEnd},
        denial::{Denial, NotHolder, Problem, Quota},
        engine_control::{PlanKind, WaitingOperator, Wish, bytes_in},
        event::{Action, Answer, ChangedKeys, Done},
        kv_type::KvType,
        lease::{Class, LeaseId, LeaseKind, LeaseRequest, Peer, Ticket},
        lease_table::{OF_PROCESS, OF_USER, Phase},
        params::{ENGINE_TENANT, Params},
        reason::{PlanReason, ReclaimReason},
        reclaim,
        residency::EnginePlan,
    },
    units::{Bytes, TimeSpan},
};

impl Arbiter {
    pub(super) fn take_request(&mut self, ticket: Ticket, request: LeaseRequest) {
        if let Err(denial) = self.check_request(&request) {
            self.deny(ticket, denial);
            return;
        }
        if self.answer_repeated(ticket, &request) {
            return;
        }
        if let Err(denial) = self.check_quota(&request) {
            self.deny(ticket, denial);
            return;
        }
        if request.validate_only {
            self.answer_validation(ticket, &request);
            return;
        }
        let (id, wait) = (self.state.leases.next_id(), request.wait);
        let (tenant, class) = (request.tenant.clone(), request.class);
        let want = Want::ours(&tenant, class, id, WantKind::Lease(request), self.state.now).asked(ticket, wait);
        self.ask_or_queue(want, wait);
    }

    pub(super) fn take_cancellation(&mut self, ticket: Ticket) {
        for want in self.state.queue.cancel(ticket) {
            self.decide(AdmissionDecision::Withdrawn { tenant: want.tenant });
        }
    }

    pub(super) fn take_renewal(&mut self, ticket: Ticket, id: LeaseId, generation: u64, peer: &Peer) {
        if let Err(denial) = self.state.leases.owned(id, generation, peer) {
            self.deny(ticket, denial);
            return;
        }
        self.state.leases.renew(id, self.state.now);
        self.answer_lease(ticket, id);
    }

    pub(super) fn take_release(&mut self, ticket: Ticket, id: LeaseId, generation: u64, peer: &Peer) {
        match self.with_leases(|leases, turn| leases.acknowledge_end(id, generation, peer, turn)) {
            Ok(false) => {}
            Ok(true) => {
                let owned = self.state.leases.get(id).is_some_and(|lease| lease.is_owned_by(peer));
                return self.decide_for(
                    ticket,
                    LeaseDecision::EndAcknowledged {
                        lease: self.state.leases.name_of(id),
                        by: (!owned).then_some(peer.uid),
                        held: self.state.ledger.held_by(id),
                    },
                );
            }
            Err(denial) => {
                self.deny(ticket, denial);
                return;
            }
        }
        let by_holder = match self.state.leases.owned(id, generation, peer) {
            Ok(lease) => lease.is_owned_by(peer),
            Err(denial) => {
                self.deny(ticket, denial);
                return;
            }
        };
        let lease = self.state.leases.name_of(id);
        let held = self.state.ledger.held_by(id);
        if !by_holder {
            self.out.push(Action::EndLease { lease: lease.clone(), end: LeaseEnd::ReleasedByOther { uid: peer.uid } });
        }
        // A peer that releases the lease of another answers for it that the holder may not have heard.
        self.begin_ending(id, Bytes::ZERO);
        self.decide_for(ticket, LeaseDecision::Released { lease, held });
    }

    /// Decides what is also the answer to the caller.
    fn decide_for(&mut self, ticket: Ticket, decision: LeaseDecision) {
        let decision = Decision::from(decision);
        self.decide(decision.clone());
        self.done(ticket, Done::Decided(decision));
    }

    pub(super) fn take_resize(
        &mut self,
        ticket: Ticket,
        id: LeaseId,
        generation: u64,
        peer: &Peer,
        (min, max): (Bytes, Bytes),
        wait: Duration,
    ) {
        let lease = match self.state.leases.owned(id, generation, peer) {
            Ok(lease) => lease,
            Err(denial) => {
                self.deny(ticket, denial);
                return;
            }
        };
        let (tenant, class, uid) = (lease.tenant.clone(), lease.class, lease.owner.0);
        let held = self.state.ledger.held_by(id);
        let fault = self.check_sizes(&tenant, min, max).and_then(|()| match &lease.phase {
            Phase::Revoking(revocation) if !revocation.voluntary && max > revocation.target.bytes => {
                Err(above_target(&tenant, max, revocation.target.bytes))
            }
            _ if min > held && self.state.draining => Err(Denial::Draining { tenant: tenant.clone(), asked: min }),
            _ => Ok(()),
        });
        if let Err(denial) = fault {
            self.deny(ticket, denial);
            return;
        }
        // The last call says what its holder wants; what waits of an earlier one would be granted beside it.
        let replaced = Denial::Replaced { lease: self.state.leases.name_of(id).to_string() };
        self.forget_wants_of(id, &replaced);
        if min > held {
            let wait = wait.min(self.state.params.lease.wait_max);
            let kind = WantKind::Grow { min, max, uid };
            let want = Want::ours(&tenant, class, id, kind, self.state.now).asked(ticket, wait);
            self.ask_or_queue(want, wait);
            return;
        }
        self.state.leases.set_bounds(id, min, max);
        if max < held {
            // Less than it has all the same, if more than it wanted last: what it was spared for goes on.
            self.with_leases(|leases, turn| leases.lower_voluntarily(id, max, turn));
        } else {
            // A holder that wanted less may change its mind before that is measured.
            if self.state.leases.get(id).is_some_and(|lease| lease.wants_less_than(max)) {
                self.state.leases.end_revocation(id, &mut self.state.ledger);
            }
            if self.state.none_waits_before(class) {
                let more = max.saturating_sub(held).min(self.state.available(class, true));
                self.grow_lease(id, held.saturating_add(more));
            }
        }
        self.answer_lease(ticket, id);
    }

    fn check_request(&self, request: &LeaseRequest) -> Result<(), Denial> {
        let state = &self.state;
        let (tenant, limits) = (&request.tenant, &state.params.lease);
        for (field, text) in [("tenant", tenant), ("request_id", &request.request_id)] {
            let (bytes, limit) = (text.len(), limits.text_max);
            if Bytes::of_len(bytes).get() > u64::from(limit) {
                let shown: String = text.chars().take(SHOWN_MAX).collect();
                return Err(Denial::invalid(&shown, field, &shown, Problem::TooLong { bytes, limit }));
            }
        }
        let ours = tenant == ENGINE_TENANT || (state.workers.contains(tenant) && !state.asks_for_itself(tenant));
        let problem = if tenant.is_empty() || tenant.chars().any(char::is_control) {
            Some(Problem::Unprintable)
        } else if ours {
            Some(Problem::OwnHolder)
        } else if tenant.contains(OF_PROCESS) || tenant.contains(OF_USER) {
            let marks = (OF_PROCESS.to_owned(), OF_USER.to_owned());
            Some(Problem::Marked { marks })
        } else {
            None
        };
        if let Some(problem) = problem {
            return Err(Denial::invalid(tenant, "tenant", tenant, problem));
        }
        self.check_sizes(tenant, request.min, request.max)?;
        let time = |field, value, problem| Err(Denial::invalid(tenant, field, &TimeSpan(value).to_string(), problem));
        let (least, most, limit) = (limits.term_min, limits.term_max, limits.wait_max);
        if request.term < least || request.term > most {
            return time("term", request.term, Problem::NotBetween { least, most });
        }
        if request.wait > limit {
            return time("wait", request.wait, Problem::AboveLimit { limit });
        }
        if state.draining {
            return Err(Denial::Draining { tenant: tenant.clone(), asked: request.min });
        }
        Ok(())
    }

    fn check_sizes(&self, tenant: &str, min: Bytes, max: Bytes) -> Result<(), Denial> {
        let budget = self.state.ledger.budget();
        if min == Bytes::ZERO {
            Err(Denial::invalid(tenant, "min", &min, Problem::Zero))
        } else if max < min {
            Err(Denial::invalid(tenant, "max", &max, Problem::BelowMin { min }))
        } else if min > budget {
            Err(Denial::ExceedsBudget { tenant: tenant.to_owned(), asked: min, budget })
        } else {
            Ok(())
        }
    }

    fn check_quota(&self, request: &LeaseRequest) -> Result<(), Denial> {
        let state = &self.state;
        let uid = request.peer.uid;
        let held =
            state.leases.values().filter(|lease| lease.kind == LeaseKind::Tenant && lease.owner.0 == uid).count();
        let waiting = state
            .queue
            .values()
            .filter(|want| matches!(&want.kind, WantKind::Lease(other) if other.peer.uid == uid))
            .count();
        let tenants = state.leases.values().filter(|lease| lease.kind == LeaseKind::Tenant).count();
        if tenants + state.queue.values().count() >= LEASES_MAX {
            let (what, limit) = (Quota::Leases, Bytes::of_len(LEASES_MAX).get());
            return Err(Denial::QuotaExceeded { tenant: request.tenant.clone(), what, limit });
        }
        let limit = u64::from(state.params.lease.leases_per_uid);
        if Bytes::of_len(held + waiting).get() >= limit {
            return Err(Denial::QuotaExceeded { tenant: request.tenant.clone(), what: Quota::LeasesOf { uid }, limit });
        }
        Ok(())
    }

    /// Answers a request that came before: the same lease, the same place in the queue, or that its id was used.
    ///
    /// A place in the queue is that of the process that took it: another one that joined it would be granted what is measured
    /// of the first.
    fn answer_repeated(&mut self, ticket: Ticket, request: &LeaseRequest) -> bool {
        if request.request_id.is_empty() || request.validate_only {
            return false;
        }
        let same_id = |other: &LeaseRequest| {
            (&other.tenant, &other.request_id, other.peer.uid)
                == (&request.tenant, &request.request_id, request.peer.uid)
        };
        let granted = self.state.leases.iter().find_map(|(id, lease)| {
            let other = lease.request.as_ref().filter(|other| same_id(other))?;
            (!lease.is_ending()).then(|| (id, same_content(other, request)))
        });
        let waiting = self.state.queue.values().find_map(|want| match &want.kind {
            WantKind::Lease(other) if same_id(other) => {
                Some((want.lease, same_content(other, request), other.peer.pid))
            }
            _ => None,
        });
        match (granted, waiting) {
            (Some((id, true)), _) => self.answer_lease(ticket, id),
            (None, Some((lease, true, pid))) if pid == request.peer.pid => self.state.queue.join(lease, ticket),
            (None, Some((lease, true, pid))) => {
                let denial = Denial::NotHolder {
                    lease: format!("{}#{}", request.tenant, lease.0),
                    uid: request.peer.uid,
                    problem: NotHolder::Awaited { pid },
                };
                self.deny(ticket, denial);
            }
            (None, None) => return false,
            _ => self.deny(
                ticket,
                Denial::RequestIdReused { tenant: request.tenant.clone(), request_id: request.request_id.clone() },
            ),
        }
        true
    }

    fn answer_validation(&mut self, ticket: Ticket, request: &LeaseRequest) {
        if let Some(denial) = self.state.admission_denial(&request.tenant, request.class, request.min) {
            self.deny(ticket, denial);
            return;
        }
        let available = self.state.available(request.class, true);
        let missing = request.min.saturating_sub(available);
        if missing > self.state.reclaimable_for(request.class) {
            let denial = self.state.insufficient(&request.tenant, None, request.min, request.class);
            self.deny(ticket, denial);
        } else {
            self.answer(
                ticket,
                Answer::WouldGrant { bytes: request.max.min(available).max(request.min), after_shedding: missing },
            );
        }
    }
}

/// Whether two requests ask the same, from whichever process.
fn same_content(one: &LeaseRequest, other: &LeaseRequest) -> bool {
    (one.class, one.min, one.max, one.term) == (other.class, other.min, other.max, other.term)
}

/// Characters of a text that is too long which are shown in the denial.
const SHOWN_MAX: usize = 32;

impl Arbiter {
    pub(super) fn take_operator_shed(&mut self, ticket: Ticket, bytes: Bytes) {
        if bytes == Bytes::ZERO {
            self.deny(ticket, Denial::invalid(ENGINE_TENANT, "bytes", &bytes, Problem::Zero));
            return;
        }
        let before = self.state.engine_held();
        let reclaim = reclaim::for_operator(&self.state, bytes, ReclaimReason::Operator { asked: bytes });
        let promised = reclaim.is_some_and(|reclaim| self.carry_out(reclaim));
        match self.state.engine.plans.pending.last_key_value() {
            Some((revision, _)) if promised => {
                let (revision, wish) = (*revision, Wish::Shed { asked: bytes });
                self.state.engine.operators.push(WaitingOperator { ticket, revision, before, wish });
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
            self.state.leases.set_bounds(id, floor.unwrap_or(Bytes::ZERO), full_bytes);
        }
        let (Some(id), Some(shape), Some(goal)) =
            (self.state.engine.lease, self.state.engine.shape(), self.state.engine.goal())
        else {
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
        let plan = EnginePlan { kv_type: kind, ..goal.clone() };
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
        // A wished shed stays for the dwell, as any shed; a wished growth does not wait.
        if smaller {
            self.state.dwell.begin(self.state.now);
        } else {
            self.state.dwell.end();
        }
        self.ask_engine(plan, kind_of_plan, Some(PlanReason::KvType { change }));
        if let Some((revision, _)) = self.state.engine.plans.pending.last_key_value() {
            let (revision, wish) = (*revision, Wish::KvType { kind });
            self.state.engine.operators.push(WaitingOperator { ticket, revision, before, wish });
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

/// Leases of all users, with the requests that wait. Our choice, above what one user may have: each event looks at all of
/// them, and the end of a holder of 1000 takes milliseconds.
const LEASES_MAX: usize = 1024;
