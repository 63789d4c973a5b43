//! The snapshot, and the invariants that end every call.

use super::core::Arbiter;
use crate::{
    policy::{
        admission::{Want, WantKind},
        lease::{LeaseId, LeaseKind, LeaseMemory, LeaseOwner, LeaseState, LeaseView},
        lease_table::Lease,
        reclaim,
        shedding::NextShed,
        snapshot::{EngineView, MemoryView, PressureView, Snapshot, Totals, WorkerView},
    },
    units::{Bytes, Timestamp},
};

impl Arbiter {
    /// When [`DeadlineReached`](crate::policy::event::Event::DeadlineReached) is due, if ever; later than the last event.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let state = &self.state;
        [
            state.leases.next_deadline(),
            state.queue.next_deadline(state.now),
            state.engine.next_deadline(state.now),
            self.next_worker_deadline(),
            state.dwell.ends(state.now),
            state.pressure.grace_ends().filter(|end| *end > state.now),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// What would be shed first, and at which headroom; `None` before the first sample.
    #[must_use]
    pub fn next_shed(&self) -> Option<NextShed> {
        reclaim::next(&self.state)
    }

    /// The state as operators, metrics and tests see it.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let state = &self.state;
        let mut leases: Vec<LeaseView> = state.leases.ids().filter_map(|id| self.lease_view(*id)).collect();
        leases.extend(state.leases.residual_views(&state.ledger));
        leases.extend(state.queue.values().filter_map(waiting_view));
        Snapshot {
            at: state.now,
            memory: MemoryView {
                budget: state.ledger.budget(),
                held: state.ledger.held(),
                used: state.ledger.measured_use().saturating_sub(state.engine.kv.untouched),
                unaccounted: state.ledger.unaccounted(),
                free: state.ledger.free(),
                unmanaged: state.ledger.unmanaged(),
                returning: state
                    .engine
                    .returning()
                    .unwrap_or(Bytes::ZERO)
                    .saturating_add(state.returning_or_waiting_workers()),
                coming_back: state.coming_back(),
            },
            pressure: PressureView {
                headroom: state.pressure.headroom(),
                level: state.pressure.level(),
                elevated_below: state.params.pressure.elevated_below,
                critical_below: state.params.pressure.critical_below,
                minimum_reclaim: state.params.shed.minimum_reclaim,
                losing_per_s: state.pressure.losing_per_s(),
                exhausted_in: state.pressure.exhausted_in(),
                sample_interval: state.pressure.interval(),
                sample: self.sample.clone(),
            },
            leases,
            waiting: state.queue.len(),
            engine: EngineView {
                state: state.engine.state(),
                shape: state.engine.shape().cloned(),
                in_force: state.engine.plans.in_force.clone(),
                asked: state.engine.plans.pending.last_key_value().map(|(_, pending)| pending.plan.clone()),
                full: state.engine.full_plan(),
                waits: self.engine_waits(),
                failure: state.engine.failure.clone(),
                milli_tokens_per_s: state.engine.milli_tokens_per_s(),
                kv: state.engine.kv_view(),
            },
            workers: state
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
                    waits: state.worker_wait(worker),
                })
                .collect(),
            peaks: state.peaks.clone(),
            draining: state.draining,
            totals: Totals {
                sheds: self.stats.sheds,
                shed_bytes: self.stats.shed_bytes,
                regrown_bytes: self.stats.regrown_bytes,
            },
            last_release: self.page_pool.last_release,
            reboot: self.reboot.reasons().collect(),
        }
    }

    /// Asserts of one lease that its time is ahead; ends a renewal, which touches nothing else.
    ///
    /// # Panics
    /// If it is not so.
    #[expect(clippy::panic, reason = "a broken book is worth a restart")]
    pub(super) fn assert_lasts(&self, id: LeaseId) {
        let state = &self.state;
        let past = |lease: &&Lease| lease.expires_at.is_some_and(|at| at <= state.now);
        if state.leases.get(id).is_some_and(|lease| past(&lease)) {
            panic!("the book is broken at {}: lease {} is past its time", state.now, state.leases.name_of(id));
        }
    }

    /// Asserts that the state makes sense; ends every call but renewals, in release builds too.
    ///
    /// The sum of leases never exceeds the budget; every lease on the book has its entry and the reverse; a lease that
    /// gives memory back has a deadline ahead; the engine is never asked below its floor, and its lease covers every
    /// plan that it may be at; no deadline that is due has been left unserved.
    ///
    /// # Panics
    /// If one of these is not so. A broken book is worth a restart: going on would over-commit memory that others use.
    #[expect(clippy::panic, reason = "a broken book is worth a restart; see above")]
    pub fn assert_invariants(&self) {
        if let Some(broken) = self.broken_invariant() {
            panic!("the book is broken at {}: {broken}", self.state.now);
        }
    }

    pub(super) fn broken_invariant(&self) -> Option<String> {
        let state = &self.state;
        if !state.ledger.is_conserved() {
            return Some(format!("{} is held of a {} budget", state.ledger.held(), state.ledger.budget()));
        }
        if let Some(id) = state.ledger.differs_from(state.leases.ids()) {
            return Some(format!("lease {} is on one book only", id.0));
        }
        if let Some(name) = state.leases.past_its_time(state.now) {
            return Some(format!("lease {name} is past its time"));
        }
        self.broken_engine().or_else(|| self.broken_worker()).or_else(|| self.unserved_deadline())
    }

    fn broken_engine(&self) -> Option<String> {
        let state = &self.state;
        let held = state.engine.lease.map(|id| state.ledger.held_by(id));
        let limits = state.engine.limits()?;
        let shape = state.engine.shape()?;
        for (revision, pending) in &state.engine.plans.pending {
            let floor = limits.kv_floor.min(shape.context_max);
            let least = shape.parts_of(limits.resident_min).min(shape.layers.len());
            if pending.plan.kv_capacity < floor || pending.plan.resident.len() < least {
                return Some(format!("plan {revision} is below the engine's floor"));
            }
            if held.is_none_or(|held| held < shape.plan_bytes(&pending.plan)) {
                return Some(format!("plan {revision} is not covered by the engine's lease"));
            }
        }
        let lost = state.engine.is_ready() && held.is_none();
        lost.then(|| "the engine runs without a lease".to_owned())
    }

    fn broken_worker(&self) -> Option<String> {
        self.state.workers.values().find_map(|worker| {
            let (id, name, state) = (worker.lease()?, &worker.params.name, worker.state());
            let booked = self.state.leases.get(id).is_some();
            (!booked).then(|| format!("worker `{name}` is {state:?} and not booked"))
        })
    }

    fn unserved_deadline(&self) -> Option<String> {
        let next = self.next_deadline()?;
        (next <= self.state.now).then(|| format!("a deadline of {next} has not been served"))
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
        memory: LeaseMemory { held: Bytes::ZERO, min: request.min, max: request.max, used: None, used_at: None },
        target: None,
        granted_at: want.since,
        expires_at: None,
        owner: LeaseOwner { owner_uid: request.peer.uid, owner_pid: request.peer.pid },
    })
}
