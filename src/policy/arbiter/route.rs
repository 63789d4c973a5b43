//! Route of events to the machines, readings and deadlines, and what follows after each.

use std::mem;

use super::{core::Arbiter, engine::Applied};
use crate::{
    policy::{
        decision::{AdmissionDecision, MemoryDecision},
        engine_control::KvUse,
        event::{Action, Event},
        lease_table::LeaseTable,
        params::{ENGINE_TENANT, Scope},
        pressure::Sample,
        reboot::Changed,
    },
    units::{Bytes, Timestamp, Tokens},
};

impl Arbiter {
    /// Takes one event and returns what must be done about it, in order.
    ///
    /// `now` never goes back; an earlier one is taken for the last. Deadlines that are due are served before the event,
    /// so that a renewal at the very end of a term comes too late.
    ///
    /// # Panics
    /// If the book is broken: see [`Arbiter::assert_invariants`].
    #[must_use]
    pub fn handle(&mut self, now: Timestamp, event: Event) -> Vec<Action> {
        self.state.now = self.state.now.max(now);
        if let Event::LeaseRenewed { lease, .. } = event
            && self.idle_until.is_some_and(|until| self.state.now < until)
        {
            // The end of one lease moves away, and nothing else: the whole book need not be gone through for it. With
            // hundreds of tenants that is most of what there is to do.
            self.take(event);
            self.assert_lasts(lease);
            return mem::take(&mut self.out);
        }
        self.serve_deadlines();
        self.take(event);
        self.follow_up();
        self.assert_invariants();
        self.idle_until = Some(self.next_deadline().unwrap_or(Timestamp::NEVER));
        mem::take(&mut self.out)
    }

    fn serve_deadlines(&mut self) {
        self.serve_lease_deadlines();
        self.serve_queue_deadlines();
        self.serve_engine_deadlines();
        self.serve_worker_deadlines();
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Sampled(sample) => self.take_sample(sample),
            Event::Measured { tenant, used, taken_at } => self.take_measurement(&tenant, used, taken_at),
            Event::LeaseRequested { ticket, request } => self.take_request(ticket, request),
            Event::LeaseRequestCancelled { ticket } => self.take_cancellation(ticket),
            Event::LeaseRenewed { ticket, lease, generation, peer } => {
                self.take_renewal(ticket, lease, generation, &peer);
            }
            Event::LeaseResizeRequested { ticket, lease, generation, peer, min, max, wait } => {
                self.take_resize(ticket, lease, generation, &peer, (min, max), wait);
            }
            Event::LeaseReleased { ticket, lease, generation, peer } => {
                self.take_release(ticket, lease, generation, &peer);
            }
            Event::TargetAnswered { lease, nonce, answer, claimed } => {
                self.with_leases(|leases, turn| leases.answer_target(lease, nonce, answer, claimed, turn));
            }
            Event::HolderLost { lease, pid } => self.with_leases(|leases, turn| leases.holder_gone(lease, pid, turn)),
            Event::EngineInspected { shape } => self.take_engine_inspected(shape),
            Event::EngineApplied { revision, in_force, freed, used, untouched, untouched_given, took } => {
                let applied = Applied { freed, used, untouched, untouched_given, took };
                self.take_engine_applied(revision, in_force, &applied);
            }
            Event::EngineApplyFailed { revision, reason } => self.take_engine_apply_failed(revision, &reason),
            Event::EngineFailed { reason, left } => self.take_engine_failed(&reason, left),
            Event::EngineActivity { requests, kv_used, kv_kept, kv_droppable, kv_dropped, untouched } => self
                .take_engine_activity(
                    requests,
                    KvUse {
                        used: Tokens::new(kv_used),
                        kept: Tokens::new(kv_kept),
                        droppable: Tokens::new(kv_droppable),
                        dropped: Tokens::new(kv_dropped),
                        untouched,
                        pinned: None,
                    },
                ),
            Event::EngineCalibrated(calibration) => self.state.engine.calibrated(calibration),
            Event::EngineTimed(timing) => self.state.engine.timed(&timing),
            Event::WorkerReady { worker, pid } => self.take_worker_ready(&worker, pid),
            Event::WorkerDied { certificate } => self.take_worker_died(&certificate),
            Event::WorkerExited { worker, intended, cause } => self.take_worker_exited(&worker, intended, &cause),
            Event::PeakMeasured { worker, peak } => self.take_peak(&worker, peak),
            Event::WorkerActivity { worker, requests } => self.take_worker_activity(&worker, requests),
            Event::WorkerWanted { worker, .. } => self.take_worker_wanted(&worker),
            Event::WorkerResizeRequested { ticket, worker, variant, wait } => {
                self.take_worker_resize(ticket, worker, variant, wait);
            }
            Event::WorkerResized { worker, variant, used, error } => {
                self.take_worker_resized(&worker, &variant, used, error.as_deref());
            }
            Event::WorkerUnresponsive { worker, pid, evidence } => {
                self.take_worker_unresponsive(&worker, pid, evidence);
            }
            Event::CapacityWanted { needed, wanted, .. } => self.take_capacity_wanted(needed, wanted),
            Event::OperatorShed { ticket, bytes } => self.take_operator_shed(ticket, bytes),
            Event::OperatorRegrow { ticket } => self.take_operator_regrow(ticket),
            Event::OperatorKvType { ticket, kv_type } => self.take_operator_kv_type(ticket, kv_type),
            Event::OperatorWorker { ticket, worker, command } => self.take_operator_worker(ticket, &worker, command),
            Event::Recovered { book, adopted } => self.take_recovered(book, &adopted),
            Event::DrainRequested => self.take_drain(),
            Event::DrainCancelled => self.take_drain_cancelled(),
            Event::OperatorLoad { ticket } => self.take_operator_load(ticket),
            Event::Reconfigured { ticket, params, changes } => {
                self.take_reconfigured(ticket, *params, changes);
                // By shorter settings some may be over already.
                self.serve_deadlines();
            }
            Event::DeadlineReached => {}
        }
    }

    fn follow_up(&mut self) {
        self.start_workers_in_order();
        self.load_engine_if_it_fits();
        self.serve_queue();
        self.relieve_pressure();
        self.grow_back();
        self.serve_rests();
    }

    fn take_sample(&mut self, mut sample: Sample) {
        sample.taken_at = sample.taken_at.min(self.state.now);
        if self.state.pressure.sampled_at().is_some_and(|last| sample.taken_at <= last) {
            self.out.push(Action::SampleAfter { wait: self.state.pressure.interval() });
            return;
        }
        // Memory that the engine has leased and not touched looks available, and may be touched with the next token.
        let untouched = self.state.engine.kv.untouched;
        let machine = sample.available().saturating_sub(untouched);
        let scope_used = match self.state.params.budget.scope {
            Scope::Machine => Some(sample.total().max(self.state.params.budget.total).saturating_sub(machine)),
            Scope::Session => sample.scope_used.map(|used| used.saturating_add(untouched)),
        };
        let scope_left = match scope_used {
            Some(used) => {
                self.state.ledger.observe_scope(used, sample.taken_at);
                match self.state.params.budget.scope {
                    Scope::Machine => machine,
                    Scope::Session => self.state.params.budget.total.saturating_sub(used),
                }
            }
            // Unknown is not zero: the book decides.
            None => self.state.params.budget.total.saturating_sub(self.state.ledger.used_by_holders()),
        };
        let headroom = scope_left.saturating_sub(self.state.ledger.unused_reserve()).min(machine);
        if let Some(change) = self.state.pressure.observe(&sample, headroom) {
            self.out.push(Action::LevelChanged { from: change.from, to: change.to, reason: change.reason });
        }
        if let Some(release) = self.page_pool.observe(&sample) {
            self.decide(MemoryDecision::Released(release));
        }
        for changed in self.reboot.observe(&sample, self.state.pressure.level()) {
            self.decide(match changed {
                Changed::Advised(reason) => MemoryDecision::RebootAdvised(reason),
                Changed::NotAdvised(reason) => MemoryDecision::RebootNotAdvised(reason),
            });
        }
        let short = self.state.params.pressure.elevated_below;
        if let Some(bytes) = self.page_pool.bytes_to_empty(short, self.state.now) {
            self.out.push(Action::EmptyPagePool { bytes });
        }
        self.out.push(Action::SampleAfter { wait: self.state.pressure.interval() });
        self.with_leases(|leases, turn| leases.close_unmeasurable(sample.taken_at, turn));
        self.sample = Some(sample);
    }

    fn take_drain(&mut self) {
        if !self.state.draining {
            self.state.draining = true;
            self.decide(AdmissionDecision::DrainBegun);
            self.deny_all_waiting();
        }
    }

    fn take_drain_cancelled(&mut self) {
        if mem::take(&mut self.state.draining) {
            self.decide(AdmissionDecision::DrainEnded);
        }
    }
}

impl Arbiter {
    pub(super) fn take_measurement(&mut self, tenant: &str, used: Option<Bytes>, taken_at: Timestamp) {
        let taken_at = taken_at.min(self.state.now);
        match used {
            Some(used) if self.state.leases.is_known(tenant) => self.state.ledger.measure(tenant, used, taken_at),
            Some(_) => return,
            None => {}
        }
        // One that was overtaken by a newer one says how it was, and not how it is.
        let newest = self.state.ledger.measurement(tenant).map(|measured| measured.at);
        if used.is_some() && newest.is_some_and(|at| taken_at < at) {
            return;
        }
        if tenant == ENGINE_TENANT {
            self.learn_from_engine();
            self.settle_engine();
        } else if self.state.workers.contains(tenant) {
            if !self.settle_notified(tenant, used, taken_at) {
                self.settle_worker(tenant);
            }
            // One that asks for itself has its lease as any tenant.
            self.with_leases(|leases, turn| leases.settle(tenant, used, taken_at, turn));
            self.learn_from_life(tenant);
        } else {
            self.with_leases(|leases, turn| leases.settle(tenant, used, taken_at, turn));
        }
        self.with_leases(|leases, turn| {
            leases.tend_residual(tenant, used, taken_at, turn);
            leases.watch_bounds(tenant, turn);
        });
    }

    pub(super) fn serve_lease_deadlines(&mut self) {
        self.with_leases(LeaseTable::expire);
        for id in self.state.leases.overdue(self.state.now) {
            if let Some(revocation) = self.with_leases(|leases, turn| leases.escalate(id, turn)) {
                self.end_notification(id, &revocation);
            }
        }
        self.with_leases(LeaseTable::poll);
    }
}
