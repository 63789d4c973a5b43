//! Ledger: budget, held memory by holder, and unaccounted use.
//!
//! `held` is the sum of all leases and never exceeds the budget. `used` is measured by the kernel. Use beyond `held`,
//! by known holders or by unmanaged processes, is unaccounted and not free: `free = budget − held − unaccounted`.
//!
//! A measurement does not cover later bookings. Therefore bytes booked after the last sample are not expected in that
//! sample, and a holder whose measurement is older than its booking, or too old, is assumed to use all that it holds.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use super::lease::LeaseId;
use cotenant_units::{Bytes, Timestamp};

/// A booking that exceeds the free memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot reserve {asked}: {free} is free")]
pub(super) struct OverCommit {
    /// Additional bytes requested.
    pub(super) asked: Bytes,
    /// Bytes free.
    pub(super) free: Bytes,
}

/// Budget, leases and measurements.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ledger {
    budget: Bytes,
    reserve: Bytes,
    /// Upper bound of `held` since the budget was lowered below it; only decreases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ceiling: Option<Bytes>,
    #[serde(with = "crate::pairs")]
    entries: BTreeMap<LeaseId, Entry>,
    measured: BTreeMap<String, Measurement>,
    scope: Option<ScopeUse>,
    /// The last two estimates of use by processes without a lease.
    outside: [Option<Bytes>; 2],
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    tenant: String,
    held: Bytes,
    /// Time of the last increase.
    booked_at: Timestamp,
    /// Whether its holder is growing or shrinking, so that its measurement lags.
    moving: bool,
}

/// One reading of a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Measurement {
    /// Bytes that the kernel attributes to the holder.
    pub(super) used: Bytes,
    /// Time of the reading.
    pub(super) at: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ScopeUse {
    used: Bytes,
    at: Timestamp,
}

impl Ledger {
    /// Creates an empty ledger.
    pub(super) fn new(budget: Bytes, reserve: Bytes) -> Self {
        Self {
            budget,
            reserve,
            ..Self::default()
        }
    }

    /// Changes the budget. If it is below `held`, nothing is free until enough is released.
    pub(super) fn set_budget(&mut self, budget: Bytes, reserve: Bytes) {
        self.budget = budget;
        self.reserve = reserve;
        self.ceiling = Some(self.held());
        self.lower_ceiling();
    }

    /// Bytes held beyond a lowered budget.
    pub(super) fn over_budget(&self) -> Bytes {
        self.held().saturating_sub(self.budget)
    }

    /// Lowers the ceiling to `held` after releases, and removes it once `held` fits the budget.
    pub(super) fn lower_ceiling(&mut self) {
        let Some(ceiling) = self.ceiling else { return };
        let held = self.held();
        self.ceiling = (held > self.budget).then_some(held.min(ceiling));
    }

    /// Books a new lease, to which the bytes of `from` are transferred.
    ///
    /// # Errors
    /// If the additional bytes exceed the free memory; the ledger is unchanged.
    pub(super) fn book(
        &mut self,
        id: LeaseId,
        tenant: &str,
        (bytes, from): (Bytes, Option<LeaseId>),
        now: Timestamp,
    ) -> Result<(), OverCommit> {
        let handed_over = from.map_or(Bytes::ZERO, |from| self.held_by(from));
        self.check_free(bytes.saturating_sub(handed_over))?;
        if let Some(entry) = from.and_then(|from| self.entries.get_mut(&from)) {
            entry.held = Bytes::ZERO;
        }
        let entry = Entry {
            tenant: tenant.to_owned(),
            held: bytes,
            booked_at: now,
            moving: false,
        };
        self.entries.insert(id, entry);
        Ok(())
    }

    /// Raises a lease to `bytes`; a lower or equal amount changes nothing.
    ///
    /// # Errors
    /// If the additional bytes exceed the free memory; the ledger is unchanged.
    pub(super) fn raise(
        &mut self,
        id: LeaseId,
        bytes: Bytes,
        now: Timestamp,
    ) -> Result<(), OverCommit> {
        let more = bytes.saturating_sub(self.held_by(id));
        if more > Bytes::ZERO {
            self.check_free(more)?;
            if let Some(entry) = self.entries.get_mut(&id) {
                entry.held = bytes;
                entry.booked_at = now;
            }
        }
        Ok(())
    }

    /// Raises a lease to the measured use of its holder, as far as the budget permits, and returns the increase. That
    /// use was unaccounted, so `free` does not change.
    pub(super) fn follow(&mut self, id: LeaseId) -> Bytes {
        let Some(tenant) = self.entries.get(&id).map(|entry| entry.tenant.clone()) else {
            return Bytes::ZERO;
        };
        let used = self.used_by(&tenant).unwrap_or_default();
        let beyond = used.saturating_sub(self.held_by_tenant(&tenant));
        let more = beyond.min(self.budget.saturating_sub(self.held()));
        if more > Bytes::ZERO
            && let Some(entry) = self.entries.get_mut(&id)
        {
            entry.held = entry.held.saturating_add(more);
        }
        more
    }

    /// Lowers a lease to `bytes` and returns the reduction; a higher or equal amount changes nothing.
    pub(super) fn lower(&mut self, id: LeaseId, bytes: Bytes) -> Bytes {
        let Some(entry) = self.entries.get_mut(&id) else {
            return Bytes::ZERO;
        };
        let freed = entry.held.saturating_sub(bytes);
        entry.held = entry.held.min(bytes);
        freed
    }

    /// Removes a lease and returns the bytes it held. Measured use of its holder beyond its other leases is unaccounted
    /// until a measurement shows its release.
    pub(super) fn close(&mut self, id: LeaseId) -> Bytes {
        self.entries
            .remove(&id)
            .map_or(Bytes::ZERO, |entry| entry.held)
    }

    /// Sets whether a holder is growing or shrinking.
    pub(super) fn set_moving(&mut self, id: LeaseId, moving: bool) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.moving = moving;
        }
    }

    /// Records a reading of a holder; one older than the last is ignored.
    pub(super) fn measure(&mut self, tenant: &str, used: Bytes, at: Timestamp) {
        if self.measured.get(tenant).is_none_or(|last| last.at <= at) {
            self.measured
                .insert(tenant.to_owned(), Measurement { used, at });
            self.estimate_outside();
        }
    }

    /// Removes the reading of a holder whose memory is released: its process has ended, or it uses nothing.
    pub(super) fn forget(&mut self, tenant: &str) {
        self.measured.remove(tenant);
        self.estimate_outside();
    }

    /// Attributes the use of a holder without a lease to unmanaged processes, if its release was not measured.
    ///
    /// Only the latest estimate is kept: the one before was made while the memory belonged to a holder, and the minimum
    /// of both would count it as free until the next sample.
    pub(super) fn estrange(&mut self, tenant: &str) {
        if self.entries.values().all(|entry| entry.tenant != tenant) {
            self.measured.remove(tenant);
        }
        self.estimate_outside();
        self.outside[0] = self.outside[1];
    }

    /// Records the use of the whole scope; a reading older than the last is ignored.
    pub(super) fn observe_scope(&mut self, used: Bytes, at: Timestamp) {
        if self.scope.is_none_or(|last| last.at <= at) {
            self.scope = Some(ScopeUse { used, at });
            self.outside = [self.outside[1], self.outside[1]];
            self.estimate_outside();
        }
    }

    /// The budget.
    pub(super) const fn budget(&self) -> Bytes {
        self.budget
    }

    /// Sum of all leases.
    pub(super) fn held(&self) -> Bytes {
        self.entries.values().map(|entry| entry.held).sum()
    }

    /// Bytes that one lease holds; zero if there is no such lease.
    pub(super) fn held_by(&self, id: LeaseId) -> Bytes {
        self.entries
            .get(&id)
            .map_or(Bytes::ZERO, |entry| entry.held)
    }

    /// Bytes that all leases of one holder hold.
    pub(super) fn held_by_tenant(&self, tenant: &str) -> Bytes {
        self.entries
            .values()
            .filter(|entry| entry.tenant == tenant)
            .map(|entry| entry.held)
            .sum()
    }

    /// The last reading of a holder.
    pub(super) fn measurement(&self, tenant: &str) -> Option<Measurement> {
        self.measured.get(tenant).copied()
    }

    /// The last measured use of a holder.
    pub(super) fn used_by(&self, tenant: &str) -> Option<Bytes> {
        self.measured.get(tenant).map(|measured| measured.used)
    }

    /// Time of the last reading of the scope.
    pub(super) fn scope_at(&self) -> Option<Timestamp> {
        self.scope.map(|scope| scope.at)
    }

    /// Use by unmanaged processes beyond the reserve.
    pub(super) fn unmanaged(&self) -> Bytes {
        self.outside()
            .map_or(Bytes::ZERO, |outside| outside.saturating_sub(self.reserve))
    }

    /// The unused part of the reserve, which may be used by the system but not by holders.
    ///
    /// Based on the latest estimate only: one made while a new lease was unused is too low by that lease, which would
    /// then count twice in the first sample that includes it.
    pub(super) fn unused_reserve(&self) -> Bytes {
        let [_, outside] = self.outside;
        self.reserve.saturating_sub(outside.unwrap_or(Bytes::ZERO))
    }

    /// Use beyond `held`, by known holders and by unmanaged processes.
    pub(super) fn unaccounted(&self) -> Bytes {
        self.excess().saturating_add(self.unmanaged())
    }

    /// Use of known holders beyond their leases.
    pub(super) fn excess(&self) -> Bytes {
        let mut held: BTreeMap<&str, Bytes> = BTreeMap::new();
        for entry in self.entries.values() {
            let sum = held.entry(&entry.tenant).or_default();
            *sum = sum.saturating_add(entry.held);
        }
        self.measured
            .iter()
            .map(|(tenant, measured)| {
                let held = held.get(tenant.as_str()).copied().unwrap_or_default();
                measured.used.saturating_sub(held)
            })
            .fold(Bytes::ZERO, Bytes::saturating_add)
    }

    /// Budget minus held minus unaccounted.
    pub(super) fn free(&self) -> Bytes {
        self.budget
            .saturating_sub(self.held())
            .saturating_sub(self.unaccounted())
    }

    /// Sum of all measurements; holders without one are not included.
    pub(super) fn measured_use(&self) -> Bytes {
        self.measured
            .values()
            .map(|measured| measured.used)
            .fold(Bytes::ZERO, Bytes::saturating_add)
    }

    /// Use of all holders: measured, or `held` for those without a measurement.
    pub(super) fn used_by_holders(&self) -> Bytes {
        let unmeasured = self
            .entries
            .values()
            .filter(|entry| !self.measured.contains_key(&entry.tenant))
            .map(|entry| entry.held);
        self.measured
            .values()
            .map(|measured| measured.used)
            .chain(unmeasured)
            .fold(Bytes::ZERO, Bytes::saturating_add)
    }

    /// Whether `held` is at most the budget, or the ceiling left by lowering it.
    pub(super) fn is_conserved(&self) -> bool {
        self.held() <= self.ceiling.unwrap_or(self.budget)
    }

    /// Whether the entries are exactly these leases, in ascending order.
    pub(super) fn has_all<'a>(&self, leases: impl Iterator<Item = &'a LeaseId>) -> bool {
        leases.eq(self.entries.keys())
    }

    fn check_free(&self, asked: Bytes) -> Result<(), OverCommit> {
        let free = self.free();
        if asked > free {
            return Err(OverCommit { asked, free });
        }
        Ok(())
    }

    /// The lower of the last two estimates: growth of a holder between its measurement and the sample appears as
    /// unmanaged use in one sample only.
    fn outside(&self) -> Option<Bytes> {
        match self.outside {
            [Some(before), Some(now)] => Some(before.min(now)),
            [_, now] => now,
        }
    }

    fn estimate_outside(&mut self) {
        let Some(scope) = self.scope else { return };
        let mut tenants: BTreeMap<&str, Vec<&Entry>> = BTreeMap::new();
        for tenant in self.measured.keys() {
            tenants.insert(tenant, Vec::new());
        }
        for entry in self.entries.values() {
            tenants.entry(&entry.tenant).or_default().push(entry);
        }
        let known = tenants
            .into_iter()
            .map(|(tenant, entries)| self.attributed(tenant, &entries, scope.at))
            .fold(Bytes::ZERO, Bytes::saturating_add);
        self.outside[1] = Some(scope.used.saturating_sub(known));
    }

    /// Use attributed to a holder in a sample taken at `at`.
    fn attributed(&self, tenant: &str, entries: &[&Entry], at: Timestamp) -> Bytes {
        let measured = self.measured.get(tenant);
        let used = measured.map_or(Bytes::ZERO, |measured| measured.used);
        let mut held_then = Bytes::ZERO;
        let mut believed = true;
        for entry in entries {
            if entry.booked_at <= at {
                held_then = held_then.saturating_add(entry.held);
                believed &= !entry.moving
                    && measured.is_some_and(|measured| measured.at >= entry.booked_at);
            }
        }
        let age = measured.map(|measured| at.saturating_since(measured.at));
        if believed && age.is_some_and(|age| age <= MEASUREMENT_AGE_MAX) {
            used
        } else {
            used.max(held_then)
        }
    }
}

/// Maximum age of a measurement, relative to a sample, for use with that sample: holders are measured at least once per
/// second.
const MEASUREMENT_AGE_MAX: Duration = Duration::from_millis(1500);

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(millis: u64) -> Timestamp {
        Timestamp::from_millis(millis)
    }
    const fn mib(mib: u64) -> Bytes {
        Bytes::from_mib(mib)
    }
    const A: LeaseId = LeaseId(1);
    const B: LeaseId = LeaseId(2);

    #[test]
    fn more_than_what_is_free_is_refused_and_changes_nothing() {
        let mut ledger = Ledger::new(mib(8), mib(0));
        ledger.book(A, "a", (mib(6), None), at(0)).unwrap();
        let error = ledger.book(B, "b", (mib(6), None), at(0)).unwrap_err();
        assert_eq!(error.to_string(), "cannot reserve 6 MiB: 2 MiB is free");
        assert_eq!(ledger.held(), mib(6));
    }

    #[test]
    fn a_lease_that_is_filled_after_it_was_granted_leaves_the_reserve_as_it_is() {
        let mut ledger = Ledger::new(mib(12), mib(3));
        ledger.observe_scope(mib(3), at(50));
        ledger.observe_scope(mib(3), at(100));
        assert_eq!(ledger.unused_reserve(), mib(0));
        ledger.book(A, "a", (mib(2), None), at(150)).unwrap();
        ledger.observe_scope(mib(3), at(200));
        assert_eq!(
            ledger.unused_reserve(),
            mib(2),
            "promised, and not in use yet"
        );
        ledger.observe_scope(mib(5), at(300));
        assert_eq!(ledger.unused_reserve(), mib(0), "in use: it counts once");
    }

    #[test]
    fn unmanaged_processes_count_beyond_the_reserve_and_after_two_samples() {
        let mut ledger = Ledger::new(mib(10), mib(2));
        ledger.observe_scope(mib(1), at(0));
        assert_eq!(
            (ledger.unmanaged(), ledger.unused_reserve()),
            (mib(0), mib(1))
        );
        ledger.observe_scope(mib(5), at(10));
        assert_eq!(ledger.unmanaged(), mib(0));
        ledger.observe_scope(mib(5), at(20));
        assert_eq!(
            (ledger.unmanaged(), ledger.unused_reserve()),
            (mib(3), mib(0))
        );
        assert_eq!(ledger.free(), mib(7));
    }

    #[test]
    fn a_lease_that_follows_its_holder_changes_nothing_that_is_free_and_stays_within_the_budget() {
        let mut ledger = Ledger::new(mib(10), mib(0));
        ledger.book(A, "a", (mib(4), None), at(0)).unwrap();
        ledger.book(B, "b", (mib(2), None), at(0)).unwrap();
        ledger.measure("a", mib(7), at(10));
        assert_eq!((ledger.free(), ledger.excess()), (mib(1), mib(3)));
        assert_eq!(ledger.follow(A), mib(3));
        assert_eq!(
            (ledger.free(), ledger.excess(), ledger.held_by(A)),
            (mib(1), mib(0), mib(7))
        );
        assert_eq!(ledger.follow(A), mib(0));
        ledger.measure("a", mib(12), at(20));
        assert_eq!(ledger.follow(A), mib(1), "the rest is beyond the budget");
        assert!(ledger.is_conserved());
        assert_eq!((ledger.free(), ledger.excess()), (mib(0), mib(4)));
    }

    #[test]
    fn an_old_reading_does_not_replace_a_newer_one() {
        let mut ledger = Ledger::new(mib(10), mib(0));
        ledger.measure("a", mib(3), at(20));
        ledger.measure("a", mib(9), at(10));
        assert_eq!(ledger.unaccounted(), mib(3));
        ledger.observe_scope(mib(5), at(20));
        ledger.observe_scope(mib(9), at(10));
        assert_eq!(ledger.unmanaged(), mib(2));
    }
}
