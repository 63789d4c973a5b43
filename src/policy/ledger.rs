//! Ledger: budget, held memory by holder, and unaccounted use.
//!
//! `held` is what has been promised, and never exceeds the budget. `used` is what the kernel says. What is used beyond
//! what is held is unaccounted, whether by a holder we know or by unmanaged processes, and is not free either:
//! `free = budget − held − unaccounted`.
//!
//! A measurement knows nothing of what was booked after it. So the use of a holder that was booked after the last
//! sample is not looked for in that sample, and a holder whose measurement is older than its booking, or too old, is
//! taken to use what it holds. Unknown is not zero, and not plenty.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use super::lease::LeaseId;
use cotenant_units::{Bytes, Timestamp};

/// More was to be booked than is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot book {asked}: {free} is free")]
pub(super) struct OverCommit {
    /// What was to be booked in addition.
    pub(super) asked: Bytes,
    /// What is free.
    pub(super) free: Bytes,
}

/// The book.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ledger {
    budget: Bytes,
    reserve: Bytes,
    /// What was held when the budget was lowered below it, or has been since: it can only become less.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ceiling: Option<Bytes>,
    #[serde(with = "crate::pairs")]
    entries: BTreeMap<LeaseId, Entry>,
    measured: BTreeMap<String, Measurement>,
    scope: Option<ScopeUse>,
    /// The two last estimates of use by processes that are not on the book.
    outside: [Option<Bytes>; 2],
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    tenant: String,
    held: Bytes,
    /// When it last became larger.
    booked_at: Timestamp,
    /// Whether its holder is growing or shrinking, so that its measurement runs behind.
    moving: bool,
}

/// One reading of a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Measurement {
    /// Bytes that the kernel attributes to it.
    pub(super) used: Bytes,
    /// When it was read.
    pub(super) at: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ScopeUse {
    used: Bytes,
    at: Timestamp,
}

impl Ledger {
    /// An empty book.
    pub(super) fn new(budget: Bytes, reserve: Bytes) -> Self {
        Self {
            budget,
            reserve,
            ..Self::default()
        }
    }

    /// Changes the budget. Where that is below what is held, nothing is free until enough was given back.
    pub(super) fn set_budget(&mut self, budget: Bytes, reserve: Bytes) {
        self.budget = budget;
        self.reserve = reserve;
        self.ceiling = Some(self.held());
        self.lower_ceiling();
    }

    /// What is held beyond the budget, since that was lowered.
    pub(super) fn over_budget(&self) -> Bytes {
        self.held().saturating_sub(self.budget)
    }

    /// Notes what was given back since the budget was lowered below what is held.
    pub(super) fn lower_ceiling(&mut self) {
        let Some(ceiling) = self.ceiling else { return };
        let held = self.held();
        self.ceiling = (held > self.budget).then_some(held.min(ceiling));
    }

    /// Books a new lease, of which what is booked for `from` becomes a part.
    ///
    /// # Errors
    /// If what it needs beyond that is more than what is free; the book is unchanged.
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

    /// Raises what a lease holds; a lower or equal amount changes nothing.
    ///
    /// # Errors
    /// If it is more than what is free; the book is unchanged.
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

    /// Raises what a lease holds to the measured use of its holder, as far as the budget reaches. That use was unaccounted
    /// until now, so that what is free stays the same. Returns by how much it was raised.
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

    /// Lowers what a lease holds; a higher or equal amount changes nothing. Returns what became free of it.
    pub(super) fn lower(&mut self, id: LeaseId, bytes: Bytes) -> Bytes {
        let Some(entry) = self.entries.get_mut(&id) else {
            return Bytes::ZERO;
        };
        let freed = entry.held.saturating_sub(bytes);
        entry.held = entry.held.min(bytes);
        freed
    }

    /// Takes a lease off the book. What its holder is measured to use beyond its other leases is unaccounted from now
    /// on, until it is measured to be back. Returns what it held.
    pub(super) fn close(&mut self, id: LeaseId) -> Bytes {
        self.entries
            .remove(&id)
            .map_or(Bytes::ZERO, |entry| entry.held)
    }

    /// Says whether a holder is on its way to another size.
    pub(super) fn set_moving(&mut self, id: LeaseId, moving: bool) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.moving = moving;
        }
    }

    /// Takes a reading of a holder; an older one than the last changes nothing.
    pub(super) fn measure(&mut self, tenant: &str, used: Bytes, at: Timestamp) {
        if self.measured.get(tenant).is_none_or(|last| last.at <= at) {
            self.measured
                .insert(tenant.to_owned(), Measurement { used, at });
            self.estimate_outside();
        }
    }

    /// Forgets the readings of a holder whose memory is back: its process is gone, or it uses nothing.
    pub(super) fn forget(&mut self, tenant: &str) {
        self.measured.remove(tenant);
        self.estimate_outside();
    }

    /// Use of a holder without a lease that was not measured to be back is an unmanaged process's from now on.
    ///
    /// The last sample shows it. So that estimate counts alone: the one before it was made while the memory was a
    /// holder's, and by the lower of both it would be free until the next sample.
    pub(super) fn estrange(&mut self, tenant: &str) {
        if self.entries.values().all(|entry| entry.tenant != tenant) {
            self.measured.remove(tenant);
        }
        self.estimate_outside();
        self.outside[0] = self.outside[1];
    }

    /// Takes a reading of everything that counts against the budget; an older one than the last changes nothing.
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

    /// Bytes that one lease holds; zero if it is not on the book.
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

    /// When the scope was last read.
    pub(super) fn scope_at(&self) -> Option<Timestamp> {
        self.scope.map(|scope| scope.at)
    }

    /// Use by processes that are not on the book, as far as it exceeds the reserve.
    pub(super) fn unmanaged(&self) -> Bytes {
        self.outside()
            .map_or(Bytes::ZERO, |outside| outside.saturating_sub(self.reserve))
    }

    /// The unused part of the reserve: it is there to be used, but not by us.
    ///
    /// By the last estimate alone: one that was made while a new lease was not used yet is too low by as much, and the
    /// lease would count twice with the first sample that shows it.
    pub(super) fn unused_reserve(&self) -> Bytes {
        let [_, outside] = self.outside;
        self.reserve.saturating_sub(outside.unwrap_or(Bytes::ZERO))
    }

    /// Use beyond what is held: of known holders, and of unmanaged processes.
    pub(super) fn unaccounted(&self) -> Bytes {
        self.excess().saturating_add(self.unmanaged())
    }

    /// Use of known holders beyond what they hold.
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

    /// The measured use of all holders; those that were not measured are not in it.
    pub(super) fn measured_use(&self) -> Bytes {
        self.measured
            .values()
            .map(|measured| measured.used)
            .fold(Bytes::ZERO, Bytes::saturating_add)
    }

    /// The use of all holders, by measurement where there is one and by the book where there is none.
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

    /// Whether the book is right: what is held never exceeds the budget, or what was held when that was lowered.
    pub(super) fn is_conserved(&self) -> bool {
        self.held() <= self.ceiling.unwrap_or(self.budget)
    }

    /// Whether it has entries for these leases, in the order of their numbers, and for no other.
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

    /// The lower of the last two estimates: a holder that grows between its measurement and the sample looks like a
    /// process in one sample, and not in the next.
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

    /// The presumed share of a holder in a sample taken at `at`.
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

/// A measurement older than this, seen from a sample, says little about that sample: holders are measured once per
/// second at least.
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
        assert_eq!(error.to_string(), "cannot book 6 MiB: 2 MiB is free");
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
