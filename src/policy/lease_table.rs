//! Lease table: leases from their grant to their end, and residual use after it.
//!
//! ```text
//!   granted ── lower target ──► revoking ── answered, and then measured at the target ──► granted, credited
//!                                  │ deadline, and a grace for the last measurement
//!                                  ▼
//!   granted ── release, expire ─► ending ── measured ──► gone; what is still used is unaccounted
//! ```
//!
//! An answer is never credited, and neither is silence, nor low use: a holder that has not answered its target may not
//! have heard of it, and may lawfully fill the lease that it had a moment after it was measured. So a measurement counts
//! down to what the holder may still take *as far as it knows*: the target once it has answered that it comes down, all
//! of its lease before. That goes for the end of a lease too. A lease that ends without its holder's knowledge keeps that
//! much on the book until the holder acknowledges the end (it releases the lease), its process is gone, or the term that
//! it was granted last is over, after which no holder relies on a lease ([`Unacknowledged`]).
//!
//! The holder's own measurement is asked for every [`VERIFY_POLL`]; where a holder cannot be measured, the next sample of
//! the scope shows its memory as unmanaged.
//!
//! The table knows leases and the ledger only. What follows elsewhere from a change of it is an [`Effect`].

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

/// All leases, and the holders that still use memory after the end of theirs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LeaseTable {
    #[serde(with = "crate::pairs")]
    leases: BTreeMap<LeaseId, Lease>,
    /// Holders that are measured beyond what they hold.
    beyond: BTreeSet<String>,
    /// The last numbers given out.
    last: LastNumbers,
}

/// The consequences of a change of the table, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Is done or recorded.
    Act(Action),
    /// Memory has been handed out, and so much will be missing from now on.
    Granted { more: Bytes },
    /// Memory came back, or its place is another: older samples show something else.
    Moved,
    /// A holder has come down; by a shed, unless it wished so itself.
    Reclaimed { freed: Bytes, by_shed: bool },
    /// Requests that wait for the lease are denied.
    Deny { lease: LeaseId, denial: Denial },
}

/// The context of a change of the table.
pub(super) struct Turn<'a> {
    pub(super) now: Timestamp,
    pub(super) shed: ShedParams,
    /// Time between two readings that are not urgent.
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

    /// The name of a lease in decisions.
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

    /// Whether `peer` may act on the lease.
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

    /// As whom the process behind a request is measured: by the name that it asks by first, as long as no other process
    /// has that.
    ///
    /// The use of one process, and its release, must not count for another that has taken the same name, by chance or
    /// not. Nor may it count twice where one process asks by several names: it is one holder by all of its names, since
    /// all of its memory is in each measurement of it.
    pub(super) fn holder_for(&self, request: &LeaseRequest) -> String {
        let (tenant, peer) = (&request.tenant, &request.peer);
        // The kernel gives a process id to one process at a time, whatever user it acts as.
        let is_it = |name: &str, (uid, pid): (u32, Option<u32>)| match peer.pid {
            Some(_) => pid == peer.pid,
            None => pid.is_none() && (name, uid) == (tenant.as_str(), peer.uid),
        };
        let mut tenants = self.values();
        let known = tenants
            .find(|lease| lease.kind == LeaseKind::Tenant && is_it(&lease.tenant, lease.owner));
        if let Some(lease) = known {
            return lease.holder.clone();
        }
        match peer.pid {
            _ if !self.is_known(tenant) => tenant.clone(),
            Some(pid) => format!("{tenant}{OF_PROCESS}{pid})"),
            None => format!("{tenant}{OF_USER}{})", peer.uid),
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

    /// Goes on behind the numbers of an earlier run.
    pub(super) fn skip(&mut self, last: LastNumbers) {
        self.last.lease = self.last.lease.max(last.lease);
        self.last.generation = self.last.generation.max(last.generation);
        self.last.nonce = self.last.nonce.max(last.nonce);
    }

    /// A number that no lease has had.
    pub(super) const fn next_id(&mut self) -> LeaseId {
        self.last.lease += 1;
        LeaseId(self.last.lease)
    }

    pub(super) const fn next_generation(&mut self) -> u64 {
        self.last.generation += 1;
        self.last.generation
    }

    /// Books a new lease, of which what `from` holds becomes a part. Returns whether it fits.
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

    /// Raises what a lease holds, if that fits.
    pub(super) fn raise(id: LeaseId, bytes: Bytes, turn: &mut Turn<'_>) -> bool {
        let before = turn.ledger.held_by(id);
        let grown = turn.ledger.raise(id, bytes, turn.now).is_ok();
        let more = turn.ledger.held_by(id).saturating_sub(before);
        if more > Bytes::ZERO {
            turn.effects.push(Effect::Granted { more });
        }
        grown
    }

    /// Grants one more term.
    pub(super) fn renew(&mut self, id: LeaseId, now: Timestamp) {
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.expires_at = lease.request.as_ref().map(|request| now + request.term);
        }
    }

    /// Sets the bounds that the holder wants from now on.
    pub(super) fn set_bounds(&mut self, id: LeaseId, min: Bytes, max: Bytes) {
        if let Some(lease) = self.leases.get_mut(&id) {
            (lease.min, lease.max) = (min, max);
        }
    }

    /// Takes a lease off the table at once, with what it holds.
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

    /// Names a holder that uses more than it holds, once each time that it begins to.
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

    /// What its holder uses without a lease is measured no more, or is part of another lease.
    fn drop_residual(&mut self, holder: &str, ledger: &mut Ledger) {
        let is_its = |lease: &Lease| lease.is_residual() && lease.holder == holder;
        for (id, _) in self.leases.extract_if(.., |_, lease| is_its(lease)) {
            ledger.close(id);
        }
    }

    /// Asks for a reading of the holder.
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

    /// A lease that is past its time without having been ended, if there is one.
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

/// Time between two measurements of a holder that gives memory back.
const VERIFY_POLL: Duration = Duration::from_millis(50);

/// Use beyond a lease that is put down to whole pages and shared libraries.
const SLACK_PER_MILLE: u32 = 20;
const SLACK: Bytes = Bytes::from_mib(1);

/// Between the name of a tenant and what tells its process apart from another one of the same name.
pub(super) const OF_PROCESS: &str = " (pid ";
pub(super) const OF_USER: &str = " (uid ";
