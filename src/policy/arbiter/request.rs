//! What tenants ask: a lease, its renewal, another size, its end.

use std::time::Duration;

use super::{
    core::Arbiter,
    leases::{above_target, invalid},
};
use crate::{
    policy::{
        admission::{Want, WantKind},
        decision::{AdmissionDecision, LeaseEnd},
        event::{Action, Answer},
        lease::{Denial, LeaseId, LeaseKind, LeaseRequest, Peer, Ticket},
        lease_table::{OF_PROCESS, OF_USER, Phase},
        params::ENGINE_TENANT,
    },
    units::Bytes,
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
                let (name, held) = (self.state.leases.name_of(id), self.state.ledger.held_by(id));
                let message = if self.state.leases.get(id).is_some_and(|lease| lease.is_owned_by(peer)) {
                    format!("{name} has ended, and its holder knows it")
                } else {
                    format!(
                        "{name}: end acknowledged by uid {} on the holder's behalf; {held} credited once measured",
                        peer.uid
                    )
                };
                self.explain(message.clone());
                self.done(ticket, message);
                return;
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
        let name = self.state.leases.name_of(id);
        let message = format!(
            "released {name} with {}, free once measured",
            self.state.ledger.held_by(id)
        );
        self.explain(message.clone());
        if !by_holder {
            self.out.push(Action::EndLease {
                lease: name,
                end: LeaseEnd::ReleasedByOther { uid: peer.uid },
            });
        }
        // A peer that releases the lease of another answers for it that the holder may not have heard.
        self.begin_ending(id, Bytes::ZERO);
        self.done(ticket, message);
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
            _ if min > held && self.state.draining => Err(Denial::Draining {
                tenant: tenant.clone(),
                asked: min,
            }),
            _ => Ok(()),
        });
        if let Err(denial) = fault {
            self.deny(ticket, denial);
            return;
        }
        // The last call says what its holder wants; what waits of an earlier one would be granted beside it.
        let replaced = Denial::Replaced {
            lease: self.state.leases.name_of(id).to_string(),
        };
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
            if self
                .state
                .leases
                .get(id)
                .is_some_and(|lease| lease.wants_less_than(max))
            {
                self.state.leases.end_revocation(id, &mut self.state.ledger);
            }
            if self.state.nobody_waits_before(class) {
                let more = max.saturating_sub(held).min(self.state.available(class, true));
                self.grow_lease(id, held.saturating_add(more));
            }
        }
        self.answer_lease(ticket, id);
    }

    fn check_request(&self, request: &LeaseRequest) -> Result<(), Denial> {
        let tenant = &request.tenant;
        for (field, text) in [("tenant", tenant), ("request_id", &request.request_id)] {
            let limit = self.state.params.lease.text_max;
            if Bytes::of_len(text.len()).get() > u64::from(limit) {
                let shown: String = text.chars().take(SHOWN_MAX).collect();
                return Err(invalid(
                    &shown,
                    field,
                    &shown,
                    format!("has {} bytes and may have {limit}", text.len()),
                ));
            }
        }
        if tenant.is_empty() || tenant.chars().any(char::is_control) {
            return Err(invalid(
                tenant,
                "tenant",
                tenant,
                "is empty or has control characters".to_owned(),
            ));
        }
        if tenant == ENGINE_TENANT || (self.state.workers.contains(tenant) && !self.state.asks_for_itself(tenant)) {
            return Err(invalid(
                tenant,
                "tenant",
                tenant,
                "is the name of a holder of ours".to_owned(),
            ));
        }
        if tenant.contains(OF_PROCESS) || tenant.contains(OF_USER) {
            return Err(invalid(
                tenant,
                "tenant",
                tenant,
                format!("has `{OF_PROCESS}` or `{OF_USER}` in it, by which processes of one name are told apart"),
            ));
        }
        self.check_sizes(tenant, request.min, request.max)?;
        let limits = &self.state.params.lease;
        if request.term < limits.term_min || request.term > limits.term_max {
            return Err(invalid(
                tenant,
                "term",
                &format!("{:?}", request.term),
                format!("is not between {:?} and {:?}", limits.term_min, limits.term_max),
            ));
        }
        if request.wait > limits.wait_max {
            return Err(invalid(
                tenant,
                "wait",
                &format!("{:?}", request.wait),
                format!("is above the limit of {:?}", limits.wait_max),
            ));
        }
        if self.state.draining {
            return Err(Denial::Draining {
                tenant: tenant.clone(),
                asked: request.min,
            });
        }
        Ok(())
    }

    fn check_sizes(&self, tenant: &str, min: Bytes, max: Bytes) -> Result<(), Denial> {
        if min == Bytes::ZERO {
            return Err(invalid(tenant, "min", &min, "is zero".to_owned()));
        }
        if max < min {
            return Err(invalid(tenant, "max", &max, format!("is below min of {min}")));
        }
        if min > self.state.ledger.budget() {
            return Err(Denial::ExceedsBudget {
                tenant: tenant.to_owned(),
                asked: min,
                budget: self.state.ledger.budget(),
            });
        }
        Ok(())
    }

    fn check_quota(&self, request: &LeaseRequest) -> Result<(), Denial> {
        let uid = request.peer.uid;
        let held = self
            .state
            .leases
            .values()
            .filter(|lease| lease.kind == LeaseKind::Tenant && lease.owner.0 == uid)
            .count();
        let waiting = self
            .state
            .queue
            .values()
            .filter(|want| matches!(&want.kind, WantKind::Lease(other) if other.peer.uid == uid))
            .count();
        let limit = u64::from(self.state.params.lease.leases_per_uid);
        if Bytes::of_len(held + waiting).get() >= limit {
            return Err(Denial::QuotaExceeded {
                tenant: request.tenant.clone(),
                what: format!("leases of uid {uid}"),
                limit,
            });
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
                let asker = pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"));
                let denial = Denial::NotHolder {
                    lease: format!("{}#{}", request.tenant, lease.0),
                    uid: request.peer.uid,
                    problem: format!("{asker} waits for it by the same request id"),
                };
                self.deny(ticket, denial);
            }
            (None, None) => return false,
            _ => self.deny(
                ticket,
                Denial::RequestIdReused {
                    tenant: request.tenant.clone(),
                    request_id: request.request_id.clone(),
                },
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
            let denial = self
                .state
                .insufficient(&request.tenant, None, request.min, request.class);
            self.deny(ticket, denial);
        } else {
            self.answer(
                ticket,
                Answer::WouldGrant {
                    bytes: request.max.min(available).max(request.min),
                    after_shedding: missing,
                },
            );
        }
    }
}

/// Whether two requests ask the same, whoever's process carries them.
fn same_content(one: &LeaseRequest, other: &LeaseRequest) -> bool {
    (one.class, one.min, one.max, one.term) == (other.class, other.min, other.max, other.term)
}

/// Characters of a text that is too long which are shown in the denial.
const SHOWN_MAX: usize = 32;
