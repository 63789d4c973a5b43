//! Readings of holders, their answers to targets, and the deadlines of leases.

use super::core::Arbiter;
use crate::{
    policy::{lease_table::LeaseTable, params::ENGINE_TENANT},
    units::{Bytes, Timestamp},
};

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
