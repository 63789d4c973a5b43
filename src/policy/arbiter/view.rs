//! The snapshot, and the invariants that end every call.

use super::core::Arbiter;
use crate::{
    policy::{
        admission::{Want, WantKind},
        lease::{LeaseId, LeaseKind, LeaseState, LeaseView},
        lease_table::Lease,
        snapshot::{EngineView, Snapshot, WorkerView},
    },
    units::{Bytes, Timestamp},
};

impl Arbiter {
    /// When [`DeadlineReached`](crate::policy::event::Event::DeadlineReached) is due, if ever; later than the last event.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Timestamp> {
        [
            self.leases.next_deadline(),
            self.queue.next_deadline(self.now),
            self.engine.next_deadline(self.now),
            self.next_worker_deadline(),
            self.dwell.ends(self.now),
            self.pressure.grace_ends().filter(|end| *end > self.now),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// The state as operators, metrics and tests see it.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let mut leases: Vec<LeaseView> = self.leases.ids().filter_map(|id| self.lease_view(*id)).collect();
        leases.extend(self.leases.residual_views(&self.ledger));
        leases.extend(self.queue.values().filter_map(waiting_view));
        Snapshot {
            at: self.now,
            budget: self.ledger.budget(),
            held: self.ledger.held(),
            used: self.ledger.measured_use().saturating_sub(self.engine.kv.untouched),
            unaccounted: self.ledger.unaccounted(),
            free: self.ledger.free(),
            unmanaged: self.ledger.unmanaged(),
            returning: self
                .engine
                .returning()
                .unwrap_or(Bytes::ZERO)
                .saturating_add(self.returning_or_waiting_workers()),
            coming_back: self.coming_back(),
            headroom: self.pressure.headroom(),
            level: self.pressure.level(),
            elevated_below: self.params.pressure.elevated_below,
            critical_below: self.params.pressure.critical_below,
            minimum_reclaim: self.params.shed.minimum_reclaim,
            losing_per_s: self.pressure.losing_per_s(),
            exhausted_in: self.pressure.exhausted_in(),
            sample_interval: self.pressure.interval(),
            sample: self.sample.clone(),
            leases,
            waiting: self.queue.len(),
            engine: EngineView {
                state: self.engine.state(),
                shape: self.engine.shape().cloned(),
                in_force: self.engine.plans.in_force.clone(),
                asked: self
                    .engine
                    .plans
                    .pending
                    .last_key_value()
                    .map(|(_, pending)| pending.plan.clone()),
                full: self.engine.full_plan(),
                waits: self.engine_waits(),
                failure: self.engine.failure.clone(),
                milli_tokens_per_s: self.engine.milli_tokens_per_s(),
                kv: self.engine.kv_view(),
            },
            workers: self
                .workers
                .values()
                .map(|worker| WorkerView {
                    name: worker.params.name.clone(),
                    state: worker.state(),
                    pid: worker.run().and_then(|run| run.pid),
                    variant: worker.variant().map(str::to_owned),
                    starts: worker.history.starts,
                    failures: worker.history.failures,
                    last_exit: worker.history.last_exit.clone(),
                    last_death: worker.last_death.clone(),
                    retry_at: worker.retry_at(),
                    rest: worker.rest(),
                    winding_up: worker.is_winding_down(),
                    waits: self.worker_wait(worker),
                })
                .collect(),
            peaks: self.peaks.clone(),
            draining: self.draining,
            sheds: self.stats.sheds,
            shed_bytes: self.stats.shed_bytes,
            regrown_bytes: self.stats.regrown_bytes,
        }
    }

    /// Asserts of one lease that its time is ahead; ends a renewal, which touches nothing else.
    ///
    /// # Panics
    /// If it is not so.
    #[expect(clippy::panic, reason = "a broken book is worth a restart")]
    pub(super) fn assert_lasts(&self, id: LeaseId) {
        let past = |lease: &&Lease| lease.expires_at.is_some_and(|at| at <= self.now);
        if self.leases.get(id).is_some_and(|lease| past(&lease)) {
            panic!(
                "the book is broken at {}: lease {} is past its time",
                self.now,
                self.leases.name_of(id)
            );
        }
    }

    /// Asserts that the state makes sense; ends every call but renewals, in release builds too.
    ///
    /// What is held never exceeds the budget; every lease on the book has its entry and the reverse; a lease that gives
    /// memory back has a deadline ahead; the engine is never asked below its floor, and its lease covers every plan
    /// that it may be at; no deadline that is due has been left unserved.
    ///
    /// # Panics
    /// If one of these is not so. A broken book is worth a restart: going on would over-commit memory that others use.
    #[expect(clippy::panic, reason = "a broken book is worth a restart; see above")]
    pub fn assert_invariants(&self) {
        if let Some(broken) = self.broken_invariant() {
            panic!("the book is broken at {}: {broken}", self.now);
        }
    }

    pub(super) fn broken_invariant(&self) -> Option<String> {
        if !self.ledger.is_conserved() {
            return Some(format!(
                "{} is held of a {} budget",
                self.ledger.held(),
                self.ledger.budget()
            ));
        }
        if let Some(id) = self.ledger.differs_from(self.leases.ids()) {
            return Some(format!("lease {} is on one book only", id.0));
        }
        if let Some(name) = self.leases.past_its_time(self.now) {
            return Some(format!("lease {name} is past its time"));
        }
        self.broken_engine()
            .or_else(|| self.broken_worker())
            .or_else(|| self.unserved_deadline())
    }

    fn broken_engine(&self) -> Option<String> {
        let held = self.engine.lease.map(|id| self.ledger.held_by(id));
        let limits = self.engine.limits()?;
        let shape = self.engine.shape()?;
        for (revision, pending) in &self.engine.plans.pending {
            let floor = limits.kv_floor.min(shape.context_max);
            let least = shape.parts_of(limits.resident_min).min(shape.layers.len());
            if pending.plan.kv_capacity < floor || pending.plan.resident.len() < least {
                return Some(format!("plan {revision} is below the engine's floor"));
            }
            if held.is_none_or(|held| held < shape.plan_bytes(&pending.plan)) {
                return Some(format!("plan {revision} is not covered by the engine's lease"));
            }
        }
        let lost = self.engine.is_ready() && held.is_none();
        lost.then(|| "the engine runs without a lease".to_owned())
    }

    fn broken_worker(&self) -> Option<String> {
        self.workers.values().find_map(|worker| {
            let id = worker.lease()?;
            let (name, state) = (&worker.params.name, worker.state());
            self.leases
                .get(id)
                .is_none()
                .then(|| format!("worker `{name}` is {state:?} and not booked"))
        })
    }

    fn unserved_deadline(&self) -> Option<String> {
        let next = self.next_deadline()?;
        (next <= self.now).then(|| format!("a deadline of {next} has not been served"))
    }
}

fn waiting_view(want: &Want) -> Option<LeaseView> {
    let WantKind::Lease(request) = &want.kind else {
        return None;
    };
    Some(LeaseView {
        id: want.lease,
        tenant: want.tenant.clone(),
        holder: String::new(),
        kind: LeaseKind::Tenant,
        class: want.class,
        state: LeaseState::Requested,
        generation: 0,
        held: Bytes::ZERO,
        min: request.min,
        max: request.max,
        used: None,
        used_at: None,
        target: None,
        granted_at: want.since,
        expires_at: None,
        owner_uid: request.peer.uid,
        owner_pid: request.peer.pid,
    })
}
