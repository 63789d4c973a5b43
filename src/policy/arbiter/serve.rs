//! Service of the queue: what is granted, what waits and why, and what is reclaimed for the first one.
//!
//! The order is that of [`admission`](crate::policy::admission).

use std::time::Duration;

use super::{core::Arbiter, worker_orders::out_of_reach};
use crate::{
    policy::{
        admission::{Full, Place, Want, WantKind},
        decision::AdmissionDecision,
        denial::{Denial, Holders, Quota},
        lease::{Class, LeaseId, LeaseRequest},
        lease_table::Lease,
        reason::ReclaimReason,
        reclaim,
        snapshot::Keepers,
    },
    units::Bytes,
};

/// The outcome of an attempt to serve a want.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Service {
    Served,
    Blocked,
}

impl Arbiter {
    /// Serves at once, or queues for as long as `wait` allows.
    pub(super) fn ask_or_queue(&mut self, want: Want, wait: Duration) {
        let full = self.state.queue.full_for(&want);
        let overtakes = self.state.none_waits_before(want.class);
        let tenant = want.tenant.clone();
        let place = self.state.queue.insert(want);
        if overtakes && self.serve(place) == Service::Served {
            return;
        }
        let denial = match full {
            _ if wait.is_zero() => self.state.queue.get(place).map(|want| self.why_not(want)),
            Some(full) => Some(quota_of(&tenant, full)),
            None => None,
        };
        if let Some(denial) = denial {
            let tickets = self.state.queue.remove(place).map(|want| want.tickets);
            self.deny_all(tickets.unwrap_or_default(), &denial);
            return;
        }
        // It is passed over from now on, so that this is the only time to tell.
        let hopeless = self.state.queue.get(place).filter(|want| self.state.is_out_of_reach(want));
        if let Some(denial) = hopeless.map(|want| self.why_not(want)) {
            self.decide(AdmissionDecision::OutOfReach { tenant, denial });
        }
    }

    pub(super) fn serve_queue(&mut self) {
        for place in self.state.queue.places() {
            if self.serve(place) == Service::Served {
                continue;
            }
            let Some(want) = self.state.queue.get(place) else {
                continue;
            };
            if self.state.holds_back(want) {
                self.reclaim_for_want(place);
                break;
            }
            if want.kind == WantKind::WorkerStart && self.state.is_out_of_reach(want) {
                let name = want.tenant.clone();
                self.tell_out_of_reach(&name);
            }
        }
    }

    /// Explains a start that waits for more than it can ever have, once for each change of the figures.
    fn tell_out_of_reach(&mut self, name: &str) {
        let worker = self.state.workers.get(name);
        if let Some(wait) = worker.and_then(|worker| self.state.worker_wait(worker)) {
            let worker = name.to_owned();
            let mut figures = vec![wait.needs, wait.configured, wait.free, wait.most];
            if let Keepers::Of(keepers) = &wait.keepers {
                figures.extend(keepers.iter().map(|(_, bytes)| *bytes));
            }
            self.decide_once(&out_of_reach(name), &figures, AdmissionDecision::StartOutOfReach { worker, wait });
        }
    }

    pub(super) fn serve_queue_deadlines(&mut self) {
        for aged in self.state.queue.age(self.state.now) {
            let (tenant, class, waited) = (aged.tenant, aged.class, aged.waited);
            self.decide(match aged.rank {
                Some(rank) => AdmissionDecision::Aged { tenant, class, waited, rank },
                None => AdmissionDecision::TurnOver { tenant, class },
            });
        }
        for want in self.state.queue.take_due(self.state.now) {
            let denial = self.why_not(&want);
            self.deny_all(want.tickets, &denial);
        }
    }

    pub(super) fn deny_all_waiting(&mut self) {
        for want in self.state.queue.take_all() {
            let denial = Denial::Draining { asked: self.state.asked_by(&want), tenant: want.tenant };
            self.deny_all(want.tickets, &denial);
        }
    }

    fn why_not(&self, want: &Want) -> Denial {
        let state = &self.state;
        let asked = state.asked_by(want);
        state
            .admission_denial(&want.tenant, want.class, asked)
            .unwrap_or_else(|| state.insufficient(&want.tenant, Some(want.lease), asked, want.class))
    }

    fn serve(&mut self, place: Place) -> Service {
        let Some(want) = self.state.queue.get(place) else {
            return Service::Served;
        };
        let asked = self.state.asked_by(want);
        if self.state.admission_denial(&want.tenant, want.class, asked).is_some() {
            return Service::Blocked;
        }
        let ours = want.deadline.is_none();
        // A worker that asks for itself has its peak booked until now.
        let reserved = self.state.reserved_until_asked(want);
        let available =
            self.state.available(want.class, !ours).saturating_add(reserved.map_or(Bytes::ZERO, |(_, bytes)| bytes));
        if self.state.needed_by(want) > available {
            return Service::Blocked;
        }
        let Some(want) = self.state.queue.remove(place) else {
            return Service::Served;
        };
        match want.kind.clone() {
            WantKind::Lease(request) => self.grant_lease(want, request, reserved.map(|(from, _)| from), available),
            WantKind::Grow { min, max, .. } => self.grow_for(want, (min, max), available),
            WantKind::WorkerStart => self.start_worker(&want.tenant, want.lease),
            WantKind::WorkerVariant { variant } => self.grow_worker(&want.tenant, variant, want.tickets),
        }
        Service::Served
    }

    fn grant_lease(&mut self, want: Want, request: LeaseRequest, from: Option<LeaseId>, available: Bytes) {
        let (min, max, term) = (request.min, request.max, request.term);
        let bytes = max.min(available);
        // A worker that asks for itself is measured as the worker.
        let holder = if self.state.workers.contains(&request.tenant) {
            request.tenant.clone()
        } else {
            self.state.leases.holder_for(&request)
        };
        let generation = self.state.leases.next_generation();
        let lease = Lease::of_tenant(request, holder, generation, (min, max), term, self.state.now);
        if !self.with_leases(|leases, turn| leases.grant((want.lease, lease), from, bytes, turn)) {
            let denial = self.state.insufficient(&want.tenant, Some(want.lease), min, want.class);
            self.deny_all(want.tickets, &denial);
            return;
        }
        self.decide(AdmissionDecision::Granted {
            lease: self.state.leases.name_of(want.lease),
            bytes,
            waited: self.state.now.saturating_since(want.since),
            free: self.state.ledger.free(),
            budget: self.state.ledger.budget(),
        });
        for ticket in want.tickets {
            self.answer_lease(ticket, want.lease);
        }
    }

    fn grow_for(&mut self, want: Want, (min, max): (Bytes, Bytes), available: Bytes) {
        let id = want.lease;
        if self.state.leases.get(id).is_some_and(|lease| lease.wants_less_than(max)) {
            self.state.leases.end_revocation(id, &mut self.state.ledger);
        }
        let held = self.state.ledger.held_by(id);
        let bytes = max.min(held.saturating_add(available)).max(min);
        self.grow_lease(id, bytes);
        self.state.leases.set_bounds(id, min, max);
        self.decide(AdmissionDecision::Grown {
            lease: self.state.leases.name_of(id),
            from: held,
            to: bytes,
            waited: self.state.now.saturating_since(want.since),
            free: self.state.ledger.free(),
            budget: self.state.ledger.budget(),
        });
        for ticket in want.tickets {
            self.answer_lease(ticket, id);
        }
    }

    /// Asks back what the first in the queue lacks, if enough can be had.
    fn reclaim_for_want(&mut self, place: Place) {
        let Some(want) = self.state.queue.get(place) else {
            return;
        };
        let asked = self.state.asked_by(want);
        if self.state.admission_denial(&want.tenant, want.class, asked).is_some() {
            return;
        }
        let (tenant, class, ours) = (want.tenant.clone(), want.class, want.deadline.is_none());
        let own = Some(want.lease);
        let reserved = self.state.reserved_until_asked(want).map_or(Bytes::ZERO, |(_, bytes)| bytes);
        let needed = self.state.needed_by(want);
        let coming_back = self.state.coming_back();
        let expected = self.state.available(class, !ours).saturating_add(coming_back).saturating_add(reserved);
        let missing = needed.saturating_sub(expected);
        if missing == Bytes::ZERO {
            return;
        }
        let reason = ReclaimReason::Request {
            tenant: tenant.clone(),
            class,
            needed,
            free: self.state.ledger.free(),
            coming_back,
            budget: self.state.ledger.budget(),
        };
        let has_its_turn = ours && place.0 < class && place.0 < Class::LlmElastic;
        let asked_for = if has_its_turn {
            let reclaim = reclaim::from_engine(&self.state, missing, reason);
            reclaim.map(|reclaim| self.carry_out(reclaim)).is_some()
        } else {
            self.reclaim_for(class, missing, reason)
        };
        if !asked_for {
            let denial = self.state.insufficient(&tenant, own, asked, class);
            let figures = figures_of(&denial);
            let subject = format!("`{tenant}` is the first in the queue");
            self.decide_once(&subject, &figures, AdmissionDecision::Waits { tenant, denial });
        }
    }
}

fn quota_of(tenant: &str, full: Full) -> Denial {
    let (what, limit) = match full {
        Full::All { limit } => (Quota::Queue, limit),
        Full::User { uid, limit } => (Quota::QueueOf { uid }, limit),
    };
    Denial::QuotaExceeded { tenant: tenant.to_owned(), what, limit: u64::from(limit) }
}

/// The figures of a denial, whose change is worth another decision.
fn figures_of(denial: &Denial) -> Vec<Bytes> {
    match denial {
        Denial::InsufficientMemory {
            asked,
            free,
            reclaimable,
            holders: Holders::Shares { shares, unaccounted, .. },
            ..
        } => {
            let shares = shares.iter().flat_map(|share| [share.held, share.gives]);
            [*asked, *free, *reclaimable, *unaccounted].into_iter().chain(shares).collect()
        }
        _ => Vec::new(),
    }
}
