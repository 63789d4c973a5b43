//! What tenants ask: a lease, its renewal, another size, its end.

use std::time::Duration;

use super::{
    core::{Arbiter, Lease, Phase},
    queue::{Want, WantKind},
};
use crate::{
    policy::{
        decision::LeaseEnd,
        event::{Action, Answer},
        lease::{Class, Denial, LeaseId, LeaseKind, LeaseRequest, Peer, Ticket},
        params::ENGINE_TENANT,
        pressure::PressureLevel,
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
        let wait = request.wait;
        let want = Want {
            tenant: request.tenant.clone(),
            class: request.class,
            lease: self.counters.lease(),
            tickets: vec![ticket],
            since: self.now,
            ages_from: self.now,
            deadline: Some(self.now + wait),
            kind: WantKind::Lease(request),
        };
        self.ask_or_queue(want, wait);
    }

    pub(super) fn take_cancellation(&mut self, ticket: Ticket) {
        for want in self.queue.values_mut() {
            want.tickets.retain(|waiting| *waiting != ticket);
        }
        let abandoned: Vec<_> = self
            .queue
            .iter()
            .filter(|(_, want)| want.tickets.is_empty() && want.deadline.is_some())
            .map(|(place, _)| *place)
            .collect();
        for place in abandoned {
            if let Some(want) = self.queue.remove(&place) {
                self.explain(format!("`{}` does not wait any more", want.tenant));
            }
        }
    }

    pub(super) fn take_renewal(&mut self, ticket: Ticket, id: LeaseId, generation: u64, peer: &Peer) {
        match self.owned(id, generation, peer) {
            Ok(()) => {
                let now = self.now;
                if let Some(lease) = self.leases.get_mut(&id) {
                    lease.expires_at = lease.request.as_ref().map(|request| now + request.term);
                }
                self.answer_lease(ticket, id);
            }
            Err(denial) => self.deny(ticket, denial),
        }
    }

    pub(super) fn take_release(&mut self, ticket: Ticket, id: LeaseId, generation: u64, peer: &Peer) {
        match self.hears_of_end(id, generation, peer) {
            Ok(false) => {}
            Ok(true) => {
                let (name, held) = (self.lease_name(id), self.ledger.held_by(id));
                let owner = self.leases.get(&id).map(|lease| (lease.owner_uid, lease.owner_pid));
                let message = if owner == Some((peer.uid, peer.pid)) {
                    format!("{name} has ended, and its holder knows it")
                } else {
                    format!(
                        "{name} has ended, uid {} stands for it that its holder knows; its {held} are free once measured",
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
        match self.owned(id, generation, peer) {
            Ok(()) => {
                let message = format!(
                    "released {} with {}, free once measured",
                    self.lease_name(id),
                    self.ledger.held_by(id)
                );
                self.explain(message.clone());
                // Who holds it does not know, unless it is the one who says so.
                let owner = self.leases.get(&id).map(|lease| (lease.owner_uid, lease.owner_pid));
                if owner.is_some_and(|owner| owner != (peer.uid, peer.pid)) {
                    self.out.push(Action::EndLease {
                        lease: self.name_of(id),
                        end: LeaseEnd::ReleasedByOther { uid: peer.uid },
                    });
                }
                // Whoever releases the lease of another takes it upon himself that the holder may not have heard.
                self.begin_ending(id, Bytes::ZERO);
                self.done(ticket, message);
            }
            Err(denial) => self.deny(ticket, denial),
        }
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
        if let Err(denial) = self.owned(id, generation, peer) {
            self.deny(ticket, denial);
            return;
        }
        let Some(lease) = self.leases.get(&id) else { return };
        let (tenant, class) = (lease.tenant.clone(), lease.class);
        let held = self.ledger.held_by(id);
        let fault = self.check_sizes(&tenant, min, max).and_then(|()| match &lease.phase {
            Phase::Revoking(revocation) if !revocation.voluntary && max > revocation.target.bytes => {
                Err(above_target(&tenant, max, revocation.target.bytes))
            }
            _ if min > held && self.draining => Err(Denial::Draining {
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
            lease: self.lease_name(id),
        };
        self.forget_wants_of(id, &replaced);
        if min > held {
            let wait = wait.min(self.params.lease.wait_max);
            let want = Want {
                tenant,
                class,
                lease: id,
                tickets: vec![ticket],
                since: self.now,
                ages_from: self.now,
                deadline: Some(self.now + wait),
                kind: WantKind::Grow { min, max },
            };
            self.ask_or_queue(want, wait);
            return;
        }
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.min = min;
            lease.max = max;
            self.noted += 1;
        }
        if max < held {
            // Less than it has all the same, if more than it wanted last: what it was spared for goes on.
            self.lower_voluntarily(id, max);
        } else {
            // Who wanted less may think better of it before that is measured.
            if self.wants_less_than(id, max) {
                self.end_revocation(id);
            }
            if self.nobody_waits_before(class) {
                let more = max.saturating_sub(held).min(self.available(class, true));
                self.grow_lease(id, held.saturating_add(more));
            }
        }
        self.answer_lease(ticket, id);
    }

    /// Whether the holder has asked for less than `max` by itself, and that has not been measured yet.
    pub(super) fn wants_less_than(&self, id: LeaseId, max: Bytes) -> bool {
        self.leases.get(&id).is_some_and(|lease| {
            matches!(&lease.phase, Phase::Revoking(revocation) if revocation.voluntary && max > revocation.target.bytes)
        })
    }

    /// Whether `peer` may act on the lease.
    pub(super) fn owned(&self, id: LeaseId, generation: u64, peer: &Peer) -> Result<(), Denial> {
        let unknown = || Denial::UnknownLease {
            lease: format!("#{}", id.0),
        };
        let lease = self.leases.get(&id).ok_or_else(unknown)?;
        if matches!(lease.phase, Phase::Ending { .. }) {
            return Err(unknown());
        }
        let refuse = |problem| Denial::NotHolder {
            lease: self.lease_name(id),
            uid: peer.uid,
            problem,
        };
        if lease.kind != LeaseKind::Tenant {
            return Err(refuse("the supervisor holds it itself".to_owned()));
        }
        if lease.owner_uid != peer.uid && !peer.operator {
            return Err(refuse(format!("it belongs to uid {}", lease.owner_uid)));
        }
        if lease.generation != generation {
            return Err(Denial::StaleGeneration {
                lease: self.lease_name(id),
                generation,
                current: lease.generation,
            });
        }
        Ok(())
    }

    pub(super) fn answer_lease(&mut self, ticket: Ticket, id: LeaseId) {
        if let Some(lease) = self.lease_view(id) {
            self.answer(ticket, Answer::Lease { lease });
        }
    }

    fn check_request(&self, request: &LeaseRequest) -> Result<(), Denial> {
        let tenant = &request.tenant;
        for (field, text) in [("tenant", tenant), ("request_id", &request.request_id)] {
            let limit = self.params.lease.text_max;
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
        if tenant == ENGINE_TENANT || (self.workers.contains(tenant) && !self.asks_for_itself(tenant)) {
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
        let limits = &self.params.lease;
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
        if self.draining {
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
        if min > self.ledger.budget() {
            return Err(Denial::ExceedsBudget {
                tenant: tenant.to_owned(),
                asked: min,
                budget: self.ledger.budget(),
            });
        }
        Ok(())
    }

    fn check_quota(&self, request: &LeaseRequest) -> Result<(), Denial> {
        let uid = request.peer.uid;
        let held = self
            .leases
            .values()
            .filter(|lease| lease.kind == LeaseKind::Tenant && lease.owner_uid == uid)
            .count();
        let waiting = self
            .queue
            .values()
            .filter(|want| matches!(&want.kind, WantKind::Lease(other) if other.peer.uid == uid))
            .count();
        let limit = u64::from(self.params.lease.leases_per_uid);
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
    /// A place in the queue is that of the process that took it: who joined it would be granted what is measured of another.
    fn answer_repeated(&mut self, ticket: Ticket, request: &LeaseRequest) -> bool {
        if request.request_id.is_empty() || request.validate_only {
            return false;
        }
        let same_id = |other: &LeaseRequest| {
            (&other.tenant, &other.request_id, other.peer.uid)
                == (&request.tenant, &request.request_id, request.peer.uid)
        };
        let granted = self.leases.iter().find_map(|(id, lease)| {
            let other = lease.request.as_ref().filter(|other| same_id(other))?;
            let ended = matches!(lease.phase, Phase::Ending { .. });
            (!ended).then(|| (*id, same_content(other, request)))
        });
        let waiting = self.queue.iter().find_map(|(place, want)| match &want.kind {
            WantKind::Lease(other) if same_id(other) => {
                Some((*place, want.lease, same_content(other, request), &other.peer))
            }
            _ => None,
        });
        match (granted, waiting) {
            (Some((id, true)), _) => self.answer_lease(ticket, id),
            (None, Some((place, _, true, peer))) if peer.pid == request.peer.pid => {
                if let Some(want) = self.queue.get_mut(&place) {
                    want.tickets.push(ticket);
                }
            }
            (None, Some((_, lease, true, peer))) => {
                let asker = peer
                    .pid
                    .map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"));
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
        if let Some(denial) = self.admission_denial(&request.tenant, request.class, request.min) {
            self.deny(ticket, denial);
            return;
        }
        let available = self.available(request.class, true);
        let missing = request.min.saturating_sub(available);
        if missing > self.reclaimable_for(request.class) {
            let denial = self.insufficient(&request.tenant, None, request.min, request.class);
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

    /// Why nothing is granted to this class now, whatever is free.
    pub(super) fn admission_denial(&self, tenant: &str, class: Class, asked: Bytes) -> Option<Denial> {
        let limit = self.params.pressure.sample_age_max;
        let age = self.pressure.sampled_at().map(|at| self.now.saturating_since(at));
        let stale = age.filter(|age| *age > limit).map(|age| Denial::StaleSample {
            tenant: tenant.to_owned(),
            asked,
            age,
            limit,
        });
        stale.or_else(|| self.pressure_denial(tenant, class, asked))
    }

    /// Classes that can wait are not admitted under pressure.
    pub(super) fn pressure_denial(&self, tenant: &str, class: Class, asked: Bytes) -> Option<Denial> {
        let level = self.pressure.level();
        (class >= Class::LlmElastic && level > PressureLevel::Normal).then(|| Denial::PressureHigh {
            tenant: tenant.to_owned(),
            asked,
            class,
            level,
        })
    }

    /// As whom the process behind a request is measured: by the name that it asks by first, as long as no other process has
    /// that.
    ///
    /// What one process uses, and gives back, must not count for another that has taken the same name, by chance or not.
    /// Nor may it count twice where one process asks by several names: it is one holder by whatever names, since all of its
    /// memory is in each measurement of it.
    pub(super) fn holder_for(&self, request: &LeaseRequest) -> String {
        let (tenant, peer) = (&request.tenant, &request.peer);
        // A worker that asks for itself is measured as the worker.
        if self.workers.contains(tenant) {
            return tenant.clone();
        }
        // The kernel gives a process id to one process at a time, whatever user it acts as.
        let is_it = |name: &str, owner_uid: u32, owner_pid: Option<u32>| match peer.pid {
            Some(_) => owner_pid == peer.pid,
            None => owner_pid.is_none() && (name, owner_uid) == (tenant.as_str(), peer.uid),
        };
        let known = self
            .leases
            .values()
            .find(|lease| lease.kind == LeaseKind::Tenant && is_it(&lease.tenant, lease.owner_uid, lease.owner_pid));
        if let Some(lease) = known {
            return lease.holder().to_owned();
        }
        let ghost = self.ghosts.iter().find(|(_, ghost)| {
            let lease = &ghost.lease;
            is_it(&lease.tenant, lease.owner_uid, lease.owner_pid)
        });
        if let Some((holder, _)) = ghost {
            return holder.clone();
        }
        let taken = self.leases.values().any(|lease| lease.holder() == tenant) || self.ghosts.contains_key(tenant);
        match peer.pid {
            _ if !taken => tenant.clone(),
            Some(pid) => format!("{tenant}{OF_PROCESS}{pid})"),
            None => format!("{tenant}{OF_USER}{})", peer.uid),
        }
    }

    /// Books a new lease. The caller has made sure that it fits.
    pub(super) fn grant(&mut self, id: LeaseId, bytes: Bytes, lease: Lease) -> bool {
        self.grant_over(None, id, bytes, lease)
    }

    /// As [`grant`](Self::grant), where what `from` holds becomes part of it.
    pub(super) fn grant_over(&mut self, from: Option<LeaseId>, id: LeaseId, bytes: Bytes, lease: Lease) -> bool {
        let more = bytes.saturating_sub(from.map_or(Bytes::ZERO, |from| self.ledger.held_by(from)));
        let booked = if let Some(from) = from {
            self.ledger.hand_over(from, id, lease.holder(), bytes, self.now)
        } else {
            self.ledger.book(id, lease.holder(), bytes, self.now)
        };
        match booked {
            Ok(()) => {
                self.changed_at = self.now;
                self.pressure.expect(more);
                self.ghosts.remove(lease.holder());
                self.leases.insert(id, lease);
                true
            }
            Err(error) => {
                self.explain(format!("`{}`: {error}", lease.tenant));
                false
            }
        }
    }

    /// Raises what a lease holds, if that fits.
    pub(super) fn grow_lease(&mut self, id: LeaseId, bytes: Bytes) -> bool {
        let before = self.ledger.held_by(id);
        let grown = self.ledger.raise(id, bytes, self.now).is_ok();
        let more = self.ledger.held_by(id).saturating_sub(before);
        if more > Bytes::ZERO {
            self.changed_at = self.now;
            self.pressure.expect(more);
        }
        grown
    }
}

/// Whether two requests ask the same, whoever's process carries them.
fn same_content(one: &LeaseRequest, other: &LeaseRequest) -> bool {
    (one.class, one.min, one.max, one.term) == (other.class, other.min, other.max, other.term)
}

pub(super) fn invalid(tenant: &str, field: &str, value: &dyn ToString, problem: String) -> Denial {
    Denial::Invalid {
        tenant: tenant.to_owned(),
        field: field.to_owned(),
        value: value.to_string(),
        problem,
    }
}

/// Why a lease under a target does not become larger than that.
pub(super) fn above_target(tenant: &str, max: Bytes, target: Bytes) -> Denial {
    invalid(
        tenant,
        "max",
        &max,
        format!("is above {target}, to which the lease has been asked to come down"),
    )
}

/// Between the name of a tenant and what tells its process apart from another one of the same name.
const OF_PROCESS: &str = " (pid ";
const OF_USER: &str = " (uid ";

/// Characters of a text that is too long which are shown in the denial.
const SHOWN_MAX: usize = 32;
