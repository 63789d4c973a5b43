//! Lease table: leases from their grant to their end, and residual use after it.
//!
//! ```text
//!   granted ── lower target ──► revoking ── answered, and then measured at the target ──► granted, credited
//!                                  │ deadline, and a grace for the last measurement
//!                                  ▼
//!   granted ── release, expire ─► ending ── measured ──► gone; remaining use is unaccounted
//! ```
//!
//! Neither an answer nor silence nor low use is credited: a holder that has not answered its target may not have
//! received it, and may lawfully fill its old lease right after a measurement. A measurement is therefore credited only
//! down to the size that the holder may still use *as far as it knows*: the target once it has answered that it
//! shrinks, before that its whole lease. The same applies to the end of a lease: if the holder is not aware of it,
//! those bytes stay in the ledger until it acknowledges the end (releases the lease), its process has ended, or its
//! last granted term is over, after which no holder relies on a lease ([`Unacknowledged`]).
//!
//! The holder is measured every [`VERIFY_POLL`]; if it cannot be measured, the next sample of the scope shows its
//! memory as unmanaged.
//!
//! The table depends on leases and the ledger only. Consequences elsewhere are returned as [`Effect`]s.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde::{Deserialize, Serialize};

pub(super) use self::phase::{Evidence, Lease, Lower, Phase, Revocation, Unacknowledged};
use super::{
    book::LastNumbers,
    decision::LeaseDecision,
    denial::{Denial, NotHolder},
    event::Action,
    lease::{LeaseId, LeaseKind, LeaseName, LeaseRequest, LeaseView, Peer},
    ledger::Ledger,
    params::ShedParams,
};
use cotenant_units::{Bytes, Timestamp};

mod ending;
mod phase;
mod revocation;

/// All leases, including residual use after their end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LeaseTable {
    #[serde(with = "crate::pairs")]
    leases: BTreeMap<LeaseId, Lease>,
    /// Holders whose measured use exceeds their leases.
    beyond: BTreeSet<String>,
    /// Last numbers assigned.
    last: LastNumbers,
}

/// Consequences of a change of the table, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// An action to carry out or record.
    Act(Action),
    /// Memory was granted: `more` bytes of headroom will be used.
    Granted { more: Bytes },
    /// Memory was released or transferred: older samples are out of date.
    Moved,
    /// A holder has shrunk; by a shed, unless it requested that itself.
    Reclaimed { freed: Bytes, by_shed: bool },
    /// Requests waiting for the lease are denied.
    Deny { lease: LeaseId, denial: Denial },
}

/// Context of a change of the table.
pub(super) struct Turn<'a> {
    pub(super) now: Timestamp,
    pub(super) shed: ShedParams,
    /// Interval between readings that are not urgent.
    pub(super) rarely: Duration,
    pub(super) ledger: &'a mut Ledger,
    pub(super) effects: Vec<Effect>,
}

impl Turn<'_> {
    fn act(&mut self, action: Action) {
        self.effects.push(Effect::Act(action));
    }

    fn decide(&mut self, decision: LeaseDecision) {
        let decision = decision.into();
        self.act(Action::Decided { decision });
    }
}

impl LeaseTable {
    pub(super) fn get(&self, id: LeaseId) -> Option<&Lease> {
        self.leases.get(&id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (LeaseId, &Lease)> {
        self.leases.iter().map(|(id, lease)| (*id, lease))
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = &LeaseId> {
        self.leases.keys()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Lease> {
        self.leases.values()
    }

    /// Returns the name of a lease in decisions.
    pub(super) fn name_of(&self, id: LeaseId) -> LeaseName {
        let tenant = self.leases.get(&id).map(|lease| lease.tenant.clone());
        LeaseName {
            id,
            tenant: tenant.unwrap_or_default(),
        }
    }

    pub(super) fn view(&self, id: LeaseId, ledger: &Ledger) -> Option<LeaseView> {
        Some(self.leases.get(&id)?.view(id, ledger))
    }

    /// Returns the lease if `peer` may act on it.
    pub(super) fn owned(
        &self,
        id: LeaseId,
        generation: u64,
        peer: &Peer,
    ) -> Result<&Lease, Denial> {
        let lease = self.leases.get(&id).filter(|lease| !lease.is_ending());
        let lease = lease.ok_or_else(|| unknown(id))?;
        let refuse = |problem| Denial::NotHolder {
            lease: self.name_of(id).to_string(),
            uid: peer.uid,
            problem,
        };
        if lease.kind != LeaseKind::Tenant {
            return Err(refuse(NotHolder::Supervisor));
        }
        if lease.owner.0 != peer.uid && !peer.operator {
            return Err(refuse(NotHolder::OwnedBy { uid: lease.owner.0 }));
        }
        if lease.generation != generation {
            return Err(Denial::StaleGeneration {
                lease: self.name_of(id).to_string(),
                generation,
                current: lease.generation,
            });
        }
        Ok(lease)
    }

    /// Returns the holder name for the process or control group of a request: its first tenant name, unless another
    /// one has that name.
    ///
    /// The use of one process, and its release, must not count for another process with the same name. Nor may it count
    /// twice if one process uses several names: it is one holder under all of them, since each measurement includes all
    /// of its memory. The same applies to control groups.
    pub(super) fn holder_for(&self, request: &LeaseRequest) -> String {
        let (tenant, peer) = (&request.tenant, &request.peer);
        let cgroup = request.cgroup.as_deref();
        // A process id belongs to one process at a time, for all users.
        let is_it = |lease: &Lease| match request.holder_pid() {
            _ if cgroup.is_some() || lease.cgroup().is_some() => lease.cgroup() == cgroup,
            Some(pid) => lease.owner.1 == Some(pid),
            None => (lease.tenant.as_str(), lease.owner) == (tenant, (peer.uid, None)),
        };
        let mut tenants = self.values();
        let known = tenants.find(|lease| lease.kind == LeaseKind::Tenant && is_it(lease));
        if let Some(lease) = known {
            return lease.holder.clone();
        }
        match (cgroup, request.holder_pid()) {
            _ if !self.is_known(tenant) => tenant.clone(),
            (Some(cgroup), _) => format!("{tenant}{OF_CGROUP}{cgroup})"),
            (None, Some(pid)) => format!("{tenant}{OF_PROCESS}{pid})"),
            (None, None) => format!("{tenant}{OF_USER}{})", peer.uid),
        }
    }

    pub(super) fn is_known(&self, holder: &str) -> bool {
        self.values().any(|lease| lease.holder == holder)
    }

    fn has_no_lease(&self, holder: &str) -> bool {
        self.values()
            .all(|lease| lease.holder != holder || lease.is_residual())
    }

    pub(super) const fn last_numbers(&self) -> LastNumbers {
        self.last
    }

    /// Continues the numbers of an earlier run.
    pub(super) fn skip(&mut self, last: LastNumbers) {
        self.last.lease = self.last.lease.max(last.lease);
        self.last.generation = self.last.generation.max(last.generation);
        self.last.nonce = self.last.nonce.max(last.nonce);
    }

    /// Returns an unused lease id.
    pub(super) const fn next_id(&mut self) -> LeaseId {
        self.last.lease += 1;
        LeaseId(self.last.lease)
    }

    pub(super) const fn next_generation(&mut self) -> u64 {
        self.last.generation += 1;
        self.last.generation
    }

    /// Books a new lease, to which the bytes of `from` are transferred. Returns whether it fits.
    pub(super) fn grant(
        &mut self,
        (id, lease): (LeaseId, Lease),
        from: Option<LeaseId>,
        bytes: Bytes,
        turn: &mut Turn<'_>,
    ) -> bool {
        let more = bytes.saturating_sub(from.map_or(Bytes::ZERO, |from| turn.ledger.held_by(from)));
        let part = (bytes, from);
        let booked = turn.ledger.book(id, &lease.holder, part, turn.now);
        match booked {
            Ok(()) => {
                turn.effects.push(Effect::Granted { more });
                self.drop_residual(&lease.holder, turn.ledger);
                self.leases.insert(id, lease);
                true
            }
            Err(error) => {
                turn.decide(LeaseDecision::NotBooked {
                    tenant: lease.tenant,
                    asked: error.asked,
                    free: error.free,
                });
                false
            }
        }
    }

    /// Raises a lease, if the bytes fit.
    pub(super) fn raise(id: LeaseId, bytes: Bytes, turn: &mut Turn<'_>) -> bool {
        let before = turn.ledger.held_by(id);
        let grown = turn.ledger.raise(id, bytes, turn.now).is_ok();
        let more = turn.ledger.held_by(id).saturating_sub(before);
        if more > Bytes::ZERO {
            turn.effects.push(Effect::Granted { more });
        }
        grown
    }

    /// Extends a lease by one term.
    pub(super) fn renew(&mut self, id: LeaseId, now: Timestamp) {
        if let Some(lease) = self.leases.get_mut(&id) {
            let term = lease.request.as_ref().and_then(|request| request.term);
            lease.expires_at = term.map(|term| now + term);
        }
    }

    /// Sets the bounds requested by the holder.
    pub(super) fn set_bounds(&mut self, id: LeaseId, min: Bytes, max: Bytes) {
        if let Some(lease) = self.leases.get_mut(&id) {
            (lease.min, lease.max) = (min, max);
        }
    }

    /// Removes a lease at once and returns the bytes it held.
    pub(super) fn remove(&mut self, id: LeaseId, turn: &mut Turn<'_>) -> Bytes {
        if let Some(lease) = self.leases.remove(&id) {
            self.beyond.remove(&lease.holder);
        }
        let held = turn.ledger.close(id);
        let (lease, denial) = (id, unknown(id));
        turn.effects.push(Effect::Deny { lease, denial });
        held
    }

    pub(super) fn next_deadline(&self, shed: &ShedParams) -> Option<Timestamp> {
        let patience = shed.verify_timeout;
        let leases = self.leases.values().filter_map(|lease| {
            let phase = match &lease.phase {
                Phase::Granted => None,
                Phase::Revoking(revocation) => {
                    Some(revocation.ends_at(patience).min(revocation.next_poll))
                }
                Phase::Ending {
                    deadline,
                    next_poll,
                    ..
                } => Some((*deadline).min(*next_poll)),
                Phase::Residual { next_poll, .. } => Some(*next_poll),
            };
            [phase, lease.expires_at].into_iter().flatten().min()
        });
        leases.min()
    }

    /// Reports a holder that starts using more than it holds, once each time.
    pub(super) fn watch_bounds(&mut self, holder: &str, turn: &mut Turn<'_>) {
        let held = turn.ledger.held_by_tenant(holder);
        let used = turn.ledger.used_by(holder).unwrap_or_default();
        let slack = held.per_mille(SLACK_PER_MILLE).max(SLACK);
        if held == Bytes::ZERO || used <= held.saturating_add(slack) {
            self.beyond.remove(holder);
        } else if self.beyond.insert(holder.to_owned()) {
            turn.decide(LeaseDecision::BeyondLease {
                holder: holder.to_owned(),
                used,
                held,
                free: turn.ledger.free(),
            });
        }
    }

    /// Removes residual use of a holder that is no longer measured, or is part of another lease.
    fn drop_residual(&mut self, holder: &str, ledger: &mut Ledger) {
        let is_its = |lease: &Lease| lease.is_residual() && lease.holder == holder;
        for (id, _) in self.leases.extract_if(.., |_, lease| is_its(lease)) {
            ledger.close(id);
        }
    }

    /// Requests a reading of the holder.
    pub(super) fn measure(&self, id: LeaseId, turn: &mut Turn<'_>) {
        if let Some(lease) = self.leases.get(&id) {
            let tenant = lease.holder.clone();
            turn.act(Action::Measure { tenant });
        }
    }

    fn due(&self, is_due: impl Fn(&Phase) -> bool) -> Vec<LeaseId> {
        let due = self.leases.iter().filter(|(_, lease)| is_due(&lease.phase));
        due.map(|(id, _)| *id).collect()
    }

    /// Returns an expired lease that was not ended, if any.
    pub(super) fn past_its_time(&self, now: Timestamp) -> Option<LeaseName> {
        let is_past = |lease: &Lease| lease.expires_at.is_some_and(|at| at <= now);
        let past = self.iter().find(|(_, lease)| is_past(lease));
        past.map(|(id, _)| self.name_of(id))
    }
}

fn unknown(id: LeaseId) -> Denial {
    Denial::UnknownLease {
        lease: format!("#{}", id.0),
    }
}

/// Interval between measurements of a holder that is releasing memory.
const VERIFY_POLL: Duration = Duration::from_millis(50);

/// Tolerance for use beyond a lease: whole pages and shared libraries.
const SLACK_PER_MILLE: u32 = 20;
const SLACK: Bytes = Bytes::from_mib(1);

/// Suffix that distinguishes the holders of one tenant name.
pub(super) const OF_PROCESS: &str = " (pid ";
pub(super) const OF_USER: &str = " (uid ";
pub(super) const OF_CGROUP: &str = " (cgroup ";
