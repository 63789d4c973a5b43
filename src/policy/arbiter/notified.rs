//! Workers that react to pressure notifications, without our code in them.
//!
//! Such a worker learns one thing only, that memory is short, and what it comes down to is known from its settings. So
//! it is asked as a tenant is, by a target with a deadline, and credited as a tenant is, when it is measured; but it
//! cannot answer, so that what is measured after its notification counts at once. One that does not come down is named,
//! never notified again, and stopped unless it is at work.

use super::core::Arbiter;
use crate::{
    policy::{
        decision::{Decision, WorkerDecision},
        event::Done,
        growth_wait::GrowthWait,
        lease::LeaseId,
        lease_table::{Phase, Revocation},
        reason::{IgnoredPressure, StopReason},
        worker::{StopCause, Worker},
    },
    units::{Bytes, Timestamp},
};

impl Arbiter {
    /// Credits a worker that was notified if the measurement shows it. Returns whether it has been notified and not come
    /// down.
    pub(super) fn settle_notified(&mut self, name: &str, used: Option<Bytes>, taken_at: Timestamp) -> bool {
        let Some(id) = self.state.workers.get(name).and_then(Worker::lease) else {
            return false;
        };
        if !matches!(
            self.state.leases.get(id).map(|lease| &lease.phase),
            Some(Phase::Revoking(_))
        ) {
            return false;
        }
        if let Some(revocation) = self.with_leases(|leases, turn| leases.verify(id, used, taken_at, turn)) {
            self.end_notification(id, &revocation);
        }
        true
    }

    /// The deadline has passed, and the worker has not come down.
    pub(super) fn end_notification(&mut self, id: LeaseId, revocation: &Revocation) {
        let Some(lease) = self.state.leases.get(id) else { return };
        let name = lease.tenant.clone();
        let used = revocation.evidence.used();
        let late = self.state.now.saturating_since(revocation.target.deadline);
        let Some(worker) = self.state.workers.get_mut(&name) else {
            return;
        };
        if !worker.ignored_pressure() {
            return;
        }
        let at_work = worker.requests > 0;
        let ignored = IgnoredPressure {
            pid: worker.run().and_then(|run| run.pid).unwrap_or_default(),
            used,
            target: revocation.target.bytes,
            late,
            worker: name,
        };
        if at_work {
            self.decide(WorkerDecision::IgnoresPressure(ignored));
        } else {
            let name = ignored.worker.clone();
            self.stop_worker(&name, StopCause::Shed, StopReason::IgnoredPressure(ignored));
        }
    }

    /// Books a worker's steady size again. It is not notified of that: it takes the memory when it needs it.
    pub(super) fn restore_notified(&mut self, name: &str) -> Result<Done, GrowthWait> {
        let Some((id, steady)) = self
            .state
            .workers
            .get(name)
            .and_then(|worker| Some((worker.lease()?, worker.steady())))
        else {
            return Err(GrowthWait::Changing);
        };
        let now = self.state.now;
        match self.state.ledger.raise(id, steady, now) {
            Ok(()) => {
                self.state.changed_at = now;
                let worker = name.to_owned();
                let decision = Decision::from(WorkerDecision::Restored { worker, steady });
                self.decide(decision.clone());
                Ok(Done::Decided(decision))
            }
            Err(_) => Err(GrowthWait::Budget {
                needs: steady,
                free: self.state.ledger.free(),
                reserved: Bytes::ZERO,
            }),
        }
    }
}
