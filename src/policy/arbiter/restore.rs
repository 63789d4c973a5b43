//! State handed from one run to the next.
//!
//! ```text
//!   last run:  held, asked to come down ──► held, all of it, for one more term
//!              ended, not yet measured back ──► fenced: what is still used is a stranger's until its holder ends; what
//!                                               a holder may take that has not heard of it, for one more term
//!              waiting in the queue ──► gone; whoever waited asks again
//!   worker:    alive ──► booked as it was, starting until it answers
//!              gone ──► as at any start
//! ```
//!
//! What is taken over counts at once, before anything else is admitted, so that nothing is promised twice.

use std::time::Duration;

use super::{
    core::{Arbiter, Lease, Phase},
    worker::{Resizing, StopCause},
};
use crate::policy::{
    book::{AdoptedWorker, Book, BookedChange, BookedLease, BookedStop, BookedWorker},
    lease::{LeaseId, LeaseKind},
    snapshot::WorkerState,
};

impl Arbiter {
    /// What the next run has to know of this one.
    #[must_use]
    pub fn book(&self) -> Book {
        let booked = |id: &LeaseId, lease: &Lease| {
            Some(BookedLease {
                id: *id,
                generation: lease.generation,
                held: self.ledger.held_by(*id),
                min: lease.min,
                max: lease.max,
                request: lease.request.clone()?,
            })
        };
        let (mut leases, mut ended) = (Vec::new(), Vec::new());
        for (id, lease) in &self.leases {
            match lease.phase {
                Phase::Granted | Phase::Revoking(_) => leases.extend(booked(id, lease)),
                Phase::Ending { belief: Some(_), .. } => ended.extend(booked(id, lease)),
                Phase::Ending { belief: None, .. } => {}
            }
        }
        let workers = self.workers.values().map(|worker| BookedWorker {
            name: worker.params.name.clone(),
            wanted: worker.wanted,
            lease: worker.lease.map(|id| (id, self.ledger.held_by(id))),
            ready: worker.answered && worker.lease.is_some(),
            variant: worker.variant.clone(),
            change: worker.resizing.as_ref().map(|resizing| BookedChange {
                variant: resizing.variant.clone(),
                to_shed: resizing.to_shed,
            }),
            stop: worker.stop.map(|cause| match cause {
                StopCause::Operator => BookedStop::ForGood,
                // One that was to sleep is started, and sleeps again when it has nothing to do.
                StopCause::Idle | StopCause::Recycle | StopCause::NotReady => BookedStop::Again,
                StopCause::Shed => BookedStop::ToShed,
            }),
            stopped_to_shed: worker.stopped_to_shed,
            variant_before_shed: worker.variant_before_shed.clone(),
            starts: worker.starts,
            failures: worker.failures,
            last_exit: worker.last_exit.clone(),
        });
        Book {
            last: self.counters.last(),
            leases,
            ended,
            workers: workers.collect(),
        }
    }

    /// Changes whenever [`Arbiter::book`] may have; two calls with the same number need only one writing.
    #[must_use]
    pub const fn book_changes(&self) -> u64 {
        self.ledger.changes().wrapping_add(self.noted)
    }

    pub(super) fn take_recovered(&mut self, mut book: Book, adopted: &[AdoptedWorker]) {
        if !self.leases.is_empty() || !self.queue.is_empty() {
            self.explain("a book of an earlier run comes too late and is not taken over".to_owned());
            return;
        }
        self.noted += 1;
        // A target may have been sent that was not written down; its number must not come to mean another one.
        book.last.nonce = book.last.nonce.saturating_add(NONCES_SKIPPED);
        self.counters.skip(book.last);
        for booked in &book.workers {
            self.restore_worker(booked);
        }
        for worker in adopted {
            let booked = book.workers.iter().find(|booked| booked.name == worker.worker);
            self.adopt_worker(worker, booked);
        }
        for lease in book.leases {
            self.restore_lease(lease);
        }
        for lease in book.ended {
            let id = lease.id;
            self.restore_lease(lease);
            let held = self.ledger.held_by(id);
            self.begin_ending(id, held);
        }
        self.changed_at = self.now;
        self.explain(format!(
            "taken over from the run before: {} leases, {} workers, {} held of {}",
            self.leases
                .values()
                .filter(|lease| lease.kind == LeaseKind::Tenant)
                .count(),
            adopted.len(),
            self.ledger.held(),
            self.ledger.budget()
        ));
    }

    /// What was wanted of a worker, whether or not it is still alive.
    fn restore_worker(&mut self, booked: &BookedWorker) {
        let Some(worker) = self.workers.get_mut(&booked.name) else {
            return;
        };
        worker.wanted = booked.wanted;
        // Nobody but an operator takes back that a worker is to run by itself.
        worker.rest.by_operator = worker.params.autostart && !booked.wanted;
        worker.stopped_to_shed = booked.stopped_to_shed;
        worker.starts = booked.starts;
        worker.failures = booked.failures;
        worker.last_exit.clone_from(&booked.last_exit);
        if worker.stopped_to_shed {
            // Its turn at the start has been; it comes back when there is room.
            worker.begun_at = Some(self.now);
        }
    }

    /// Books a worker that runs, and asks it again what it was asked.
    fn adopt_worker(&mut self, adopted: &AdoptedWorker, booked: Option<&BookedWorker>) {
        let (name, now) = (&adopted.worker, self.now);
        let Some(worker) = self.workers.get(name) else { return };
        let variant = booked.map_or_else(|| adopted.variant.clone(), |booked| booked.variant.clone());
        let known = booked.and_then(|booked| booked.lease);
        let (id, held) = match known {
            Some(known) => known,
            // Started, and killed before that was written: it may take all that it needs for its start.
            None => (self.counters.lease(), worker.params.peak_of(variant.as_deref())),
        };
        let generation = self.counters.generation();
        let lease = worker.new_lease(generation, now);
        // What does not fit is not promised: it shows as unaccounted, and the worker has to go.
        let fits = held.min(self.ledger.free());
        if !self.grant(id, fits, lease) {
            return;
        }
        self.ledger.set_moving(id, true);
        let stop = booked.and_then(|booked| booked.stop);
        if let Some(worker) = self.workers.get_mut(name) {
            worker.lease = Some(id);
            worker.state = WorkerState::Starting;
            worker.state_since = now;
            worker.begun_at = Some(now);
            worker.pid = Some(adopted.pid);
            worker.rest.taken_over_at = Some(now);
            // Of which of its sizes its high water is, nobody knows.
            worker.peak_is_of_others = worker.params.variants.len() > 1;
            // Not asked again for what it shows only once, though we end before it has answered to us.
            worker.answered = booked.is_some_and(|booked| booked.ready);
            worker.starts = worker.starts.max(1);
            worker.variant = variant;
            worker.variant_before_shed = booked.and_then(|booked| booked.variant_before_shed.clone());
            worker.resizing = booked.and_then(|booked| booked.change.clone()).map(|change| Resizing {
                variant: change.variant,
                tickets: Vec::new(),
                asked_at: now,
                to_shed: change.to_shed,
            });
        }
        self.explain(format!(
            "worker `{name}` (pid {}) has outlived the run before and is taken over with {held}",
            adopted.pid
        ));
        if fits < held {
            let reason = format!("it holds {held}, and the budget is {}", self.ledger.budget());
            self.stop_worker(name, StopCause::Recycle, &reason);
        } else if let Some(stop) = stop {
            let cause = match stop {
                BookedStop::Again => StopCause::Recycle,
                BookedStop::ForGood => StopCause::Operator,
                BookedStop::ToShed => StopCause::Shed,
            };
            self.stop_worker(name, cause, "it was asked to stop before the supervisor ended");
        }
    }

    /// Whether it is known what those use that were taken over, and a later sample shows what is left beside them: while
    /// nobody watched they may have grown into any space.
    pub(super) fn taken_over_are_measured(&self) -> bool {
        self.workers.values().all(|worker| {
            worker.rest.taken_over_at.is_none_or(|at| {
                let measured = self.ledger.measurement(&worker.params.name);
                let known = measured.is_some_and(|measured| {
                    measured.at >= at && self.pressure.sampled_at().is_some_and(|sampled| sampled > measured.at)
                });
                known || self.now >= at + MEASURED_WITHIN
            })
        })
    }

    /// A lease goes on for one more term, in which its holder has to come back.
    fn restore_lease(&mut self, booked: BookedLease) {
        let BookedLease {
            id,
            generation,
            held,
            min,
            max,
            request,
        } = booked;
        let term = request
            .term
            .clamp(self.params.lease.term_min, self.params.lease.term_max);
        let tenant = request.tenant.clone();
        if self.workers.contains_key(&tenant) {
            self.explain(format!(
                "lease {tenant}#{} is not taken over: a worker has its name now",
                id.0
            ));
            return;
        }
        let lease = Lease {
            tenant: tenant.clone(),
            holder: self.holder_for(&request),
            kind: LeaseKind::Tenant,
            class: request.class,
            generation,
            min,
            max,
            granted_at: self.now,
            expires_at: Some(self.now + term),
            owner_uid: request.peer.uid,
            owner_pid: request.peer.pid,
            request: Some(request),
            phase: Phase::Granted,
        };
        if !self.grant(id, held, lease) {
            self.explain(format!(
                "lease {tenant}#{} is not taken over: its {held} do not fit, {} is free of {}",
                id.0,
                self.ledger.free(),
                self.ledger.budget()
            ));
        }
    }
}

/// How long a worker that was taken over may stay unmeasured before the LLM is loaded beside it all the same: four of the
/// slowest samples.
const MEASURED_WITHIN: Duration = Duration::from_secs(4);

/// More targets than are sent between two writings of the book.
const NONCES_SKIPPED: u64 = 1 << 20;
