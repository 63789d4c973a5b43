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
//! The holder's own measurement is asked for every `verify_poll`; where a holder cannot be measured, the next sample of
//! the scope shows its memory as unmanaged.
//!
//! The table knows leases and the ledger only. What follows elsewhere from a change of it is an [`Effect`].

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde::{Deserialize, Serialize};

pub(super) use self::phase::{Evidence, Lease, Phase, Revocation, Unacknowledged};
use super::{
    book::LastNumbers,
    decision::{LeaseDecision, LeaseEnd},
    denial::{Denial, NotHolder},
    event::Action,
    lease::{LeaseId, LeaseKind, LeaseName, LeaseRequest, LeaseState, LeaseView, Peer, Target, TargetAnswer},
    ledger::Ledger,
    params::ShedParams,
};
use crate::units::{Bytes, Timestamp};

mod phase;

/// All leases, and the holders that still use memory after the end of theirs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LeaseTable {
    shed: ShedParams,
    /// Time between two readings that are not urgent.
    rarely: Duration,
    #[serde(with = "crate::policy::pairs")]
    leases: BTreeMap<LeaseId, Lease>,
    /// Holders whose leases have ended, and that are still measured to use memory.
    residual: BTreeMap<String, ResidualUse>,
    /// Holders that are measured beyond what they hold.
    beyond: BTreeSet<String>,
    /// The last numbers given out.
    last: LastNumbers,
    /// Changes of what outlives this run, besides those that the ledger counts.
    changes: u64,
}

/// A holder whose leases have ended, and that is still measured to use memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ResidualUse {
    /// Its last lease, as it was at its end.
    lease: LeaseView,
    next_poll: Timestamp,
    /// Since when it cannot be read: a later sample shows its memory as unmanaged.
    unreadable_since: Option<Timestamp>,
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
    pub(super) const fn new(shed: ShedParams, rarely: Duration) -> Self {
        Self {
            shed,
            rarely,
            leases: BTreeMap::new(),
            residual: BTreeMap::new(),
            beyond: BTreeSet::new(),
            last: LastNumbers {
                lease: 0,
                generation: 0,
                nonce: 0,
            },
            changes: 0,
        }
    }

    /// Keeps to other settings from now on.
    pub(super) const fn set_params(&mut self, shed: ShedParams, rarely: Duration) {
        self.shed = shed;
        self.rarely = rarely;
    }

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
        let lease = self.leases.get(&id)?;
        let measured = ledger.measurement(&lease.holder);
        let (state, target) = match &lease.phase {
            Phase::Granted => (LeaseState::Granted, None),
            Phase::Revoking(revocation) => (LeaseState::Revoking, Some(revocation.target.clone())),
            Phase::Ending { deadline, .. } => (
                LeaseState::Gone,
                Some(Target {
                    nonce: 0,
                    bytes: Bytes::ZERO,
                    deadline: *deadline,
                }),
            ),
        };
        let (owner_uid, owner_pid) = lease.owner;
        Some(LeaseView {
            id,
            tenant: lease.tenant.clone(),
            holder: lease.holder.clone(),
            kind: lease.kind,
            class: lease.class,
            state,
            generation: lease.generation,
            held: ledger.held_by(id),
            min: lease.min,
            max: lease.max,
            used: measured.map(|measured| measured.used),
            used_at: measured.map(|measured| measured.at),
            target,
            granted_at: lease.granted_at,
            expires_at: lease.expires_at,
            owner_uid,
            owner_pid,
        })
    }

    /// Leases that have ended and whose holders still use memory.
    pub(super) fn residual_views(&self, ledger: &Ledger) -> impl Iterator<Item = LeaseView> {
        self.residual.values().map(|residual| {
            let measured = ledger.measurement(&residual.lease.holder);
            LeaseView {
                used: measured.map(|measured| measured.used),
                used_at: measured.map(|measured| measured.at),
                ..residual.lease.clone()
            }
        })
    }

    /// Whether `peer` may act on the lease.
    pub(super) fn owned(&self, id: LeaseId, generation: u64, peer: &Peer) -> Result<&Lease, Denial> {
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
        let mut tenants = self.values().filter(|lease| lease.kind == LeaseKind::Tenant);
        if let Some(lease) = tenants.find(|lease| is_it(&lease.tenant, lease.owner)) {
            return lease.holder.clone();
        }
        let mut residual = self.residual.iter();
        let known = residual.find(|(_, residual)| {
            let lease = &residual.lease;
            is_it(&lease.tenant, (lease.owner_uid, lease.owner_pid))
        });
        if let Some((holder, _)) = known {
            return holder.clone();
        }
        match peer.pid {
            _ if !self.is_known(tenant) => tenant.clone(),
            Some(pid) => format!("{tenant}{OF_PROCESS}{pid})"),
            None => format!("{tenant}{OF_USER}{})", peer.uid),
        }
    }

    pub(super) fn is_known(&self, holder: &str) -> bool {
        self.residual.contains_key(holder) || !self.has_no_lease(holder)
    }

    fn has_no_lease(&self, holder: &str) -> bool {
        self.values().all(|lease| lease.holder != holder)
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

    /// Changes of what outlives this run, besides those of the ledger.
    pub(super) const fn changes(&self) -> u64 {
        self.changes
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
        let booked = if let Some(from) = from {
            turn.ledger.hand_over(from, id, &lease.holder, bytes, turn.now)
        } else {
            turn.ledger.book(id, &lease.holder, bytes, turn.now)
        };
        match booked {
            Ok(()) => {
                turn.effects.push(Effect::Granted { more });
                self.residual.remove(&lease.holder);
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
            self.changes += 1;
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

    /// Begins to ask a holder down to `bytes`. Returns the number of the target.
    pub(super) fn begin_revocation(
        &mut self,
        id: LeaseId,
        bytes: Bytes,
        deadline: Timestamp,
        voluntary: bool,
        turn: &mut Turn<'_>,
    ) -> u64 {
        self.last.nonce += 1;
        let nonce = self.last.nonce;
        turn.ledger.set_moving(id, true);
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.phase = Phase::Revoking(Revocation {
                target: Target { nonce, bytes, deadline },
                asked_at: turn.now,
                used_before: turn.ledger.used_by(&lease.holder),
                answered: None,
                answered_at: (voluntary || lease.kind == LeaseKind::Worker).then_some(turn.now),
                applied_at: None,
                evidence: Evidence::Missing,
                next_poll: turn.now + self.shed.verify_poll,
                voluntary,
            });
        }
        nonce
    }

    /// Nothing is asked back of the lease any more.
    pub(super) fn end_revocation(&mut self, id: LeaseId, ledger: &mut Ledger) {
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.phase = Phase::Granted;
        }
        ledger.set_moving(id, false);
    }

    /// The holder itself wants less.
    ///
    /// It has no more time for what it was asked before: a target that is in force stays so, with its number and its
    /// deadline, and the wish is the answer to it; what it wants less than that follows once the target is measured.
    /// Wishes that follow each other are spared together for [`WISHES`] times the time of one, and not for ever.
    pub(super) fn lower_voluntarily(&mut self, id: LeaseId, bytes: Bytes, turn: &mut Turn<'_>) {
        let (now, timeout) = (turn.now, self.shed.verify_timeout);
        let mut first = now;
        match self.leases.get_mut(&id).map(|lease| &mut lease.phase) {
            Some(Phase::Revoking(revocation)) if !revocation.voluntary => {
                revocation.answered_at.get_or_insert(now);
                revocation.next_poll = now + self.shed.verify_poll;
                self.measure(id, turn);
                return;
            }
            Some(Phase::Revoking(revocation)) => first = revocation.asked_at,
            _ => {}
        }
        let deadline = (now + timeout).min(first + timeout * WISHES);
        self.begin_revocation(id, bytes, deadline, true, turn);
        if let Some(Phase::Revoking(revocation)) = self.leases.get_mut(&id).map(|lease| &mut lease.phase) {
            revocation.asked_at = first;
        }
        self.measure(id, turn);
    }

    /// The holder has answered its target.
    pub(super) fn answer_target(
        &mut self,
        id: LeaseId,
        nonce: u64,
        answer: TargetAnswer,
        claimed: Option<Bytes>,
        turn: &mut Turn<'_>,
    ) {
        let (lease, now) = (self.name_of(id), turn.now);
        let phase = self.leases.get_mut(&id).map(|lease| &mut lease.phase);
        let revocation = match phase {
            Some(Phase::Revoking(revocation)) if revocation.target.nonce == nonce => revocation,
            other => {
                let current = match other {
                    Some(Phase::Revoking(revocation)) => Some(revocation.target.nonce),
                    _ => None,
                };
                turn.decide(LeaseDecision::AnswerIgnored { lease, nonce, current });
                return;
            }
        };
        if !matches!(answer, TargetAnswer::Refused { .. }) {
            revocation.answered_at.get_or_insert(now);
        }
        if answer == TargetAnswer::Applied && revocation.applied_at.is_none() {
            (revocation.applied_at, revocation.evidence) = (Some(now), Evidence::Missing);
        }
        revocation.answered = Some(answer.clone());
        revocation.next_poll = now + self.shed.verify_poll;
        if answer != TargetAnswer::Applied || claimed.is_some() {
            turn.decide(LeaseDecision::Answered { lease, answer, claimed });
        }
        self.measure(id, turn);
    }

    /// The process of a holder is gone: all of its leases end in one step, for it may have as many as its user may.
    pub(super) fn holder_gone(&mut self, id: LeaseId, pid: Option<u32>, turn: &mut Turn<'_>) {
        let is_holder = |owner: Option<u32>| pid.is_none() || pid == owner;
        let Some(lease) = self.leases.get(&id) else {
            let mut residual = self.residual.values().map(|residual| &residual.lease);
            let lease = residual.find(|lease| lease.id == id && is_holder(lease.owner_pid));
            if let Some(holder) = lease.map(|lease| lease.holder.clone()) {
                self.forget_holder(&holder, turn.ledger);
                turn.effects.push(Effect::Moved);
            }
            return;
        };
        if lease.kind != LeaseKind::Tenant || !is_holder(lease.owner.1) {
            return;
        }
        let (holder, name) = (lease.holder.clone(), self.name_of(id));
        let of_process = |lease: &Lease| pid.is_some() && lease.kind == LeaseKind::Tenant && lease.owner.1 == pid;
        let ended = self.iter().filter(|(other, lease)| *other == id || of_process(lease));
        let ended: Vec<LeaseId> = ended.map(|(id, _)| id).collect();
        for other in &ended {
            self.remove(*other, turn);
        }
        self.forget_if_gone(&holder, turn.ledger);
        turn.effects.push(Effect::Moved);
        turn.decide(LeaseDecision::HolderGone {
            lease: name,
            leases: ended.len(),
            free: turn.ledger.free(),
            budget: turn.ledger.budget(),
        });
    }

    /// Begins to end a lease: it cannot be renewed any more, and its bytes stay on the book until a reading shows where
    /// they are. `claimable` is what its holder may still take as far as it knows: zero if it knows of the end.
    pub(super) fn begin_ending(&mut self, id: LeaseId, claimable: Bytes, turn: &mut Turn<'_>) {
        let now = turn.now;
        self.changes += 1;
        if let Some(lease) = self.leases.get_mut(&id) {
            let until = lease
                .expires_at
                .take()
                .filter(|at| *at > now && claimable > Bytes::ZERO);
            let unacknowledged = until.map(|until| Unacknowledged {
                bytes: claimable,
                until,
            });
            lease.phase = Phase::Ending {
                since: now,
                deadline: until.unwrap_or(now) + self.shed.verify_timeout,
                next_poll: now + self.shed.verify_poll,
                unmeasurable: false,
                unacknowledged,
            };
        }
        turn.ledger.set_moving(id, true);
        let (lease, denial) = (id, unknown(id));
        turn.effects.push(Effect::Deny { lease, denial });
        self.measure(id, turn);
    }

    /// The holder acknowledges the end of its lease, or its user or an operator does on its behalf. Returns whether that
    /// was still open.
    ///
    /// # Errors
    /// If it is, and the peer is neither of them.
    pub(super) fn acknowledge_end(
        &mut self,
        id: LeaseId,
        generation: u64,
        peer: &Peer,
        turn: &mut Turn<'_>,
    ) -> Result<bool, Denial> {
        let now = turn.now;
        let name = self.name_of(id);
        let Some(lease) = self.leases.get_mut(&id) else {
            return Ok(false);
        };
        let Phase::Ending {
            since,
            deadline,
            next_poll,
            unacknowledged: open @ Some(_),
            ..
        } = &mut lease.phase
        else {
            return Ok(false);
        };
        let owner = lease.owner.0;
        if owner != peer.uid && !peer.operator {
            let left = open.map_or(now, |open| open.until).saturating_since(now);
            return Err(Denial::NotHolder {
                lease: name.to_string(),
                uid: peer.uid,
                problem: NotHolder::Ended {
                    uid: owner,
                    held: turn.ledger.held_by(id),
                    left,
                },
            });
        }
        if generation != lease.generation {
            return Ok(false);
        }
        // Its use before the acknowledgement shows nothing.
        (*since, *deadline, *next_poll, *open) =
            (now, now + self.shed.verify_timeout, now + self.shed.verify_poll, None);
        self.changes += 1;
        self.measure(id, turn);
        Ok(true)
    }

    /// A sample of the scope, newer than the end of an unmeasurable lease, shows what is left of it as unmanaged; so it
    /// does with residual use that cannot be read.
    pub(super) fn close_unmeasurable(&mut self, taken_at: Timestamp, turn: &mut Turn<'_>) {
        if turn.ledger.scope_at() != Some(taken_at) {
            return;
        }
        for id in self.due(|phase| match phase {
            Phase::Ending {
                since,
                unmeasurable: true,
                unacknowledged,
                ..
            } => *since < taken_at && unacknowledged.is_none_or(|open| open.until <= taken_at),
            _ => false,
        }) {
            let name = self.name_of(id);
            let holder = self
                .leases
                .get(&id)
                .map(|lease| lease.holder.clone())
                .unwrap_or_default();
            let held = self.close(id, turn);
            turn.ledger.estrange(&holder);
            if self.has_no_lease(&holder) {
                self.residual.remove(&holder);
            }
            turn.decide(LeaseDecision::ClosedUnmeasured { lease: name, held });
        }
        self.residual.retain(|holder, residual| {
            let shown = residual.unreadable_since.is_some_and(|since| since < taken_at);
            if shown {
                turn.ledger.estrange(holder);
                turn.effects.push(Effect::Moved);
            }
            !shown
        });
    }

    /// Ends leases that were not renewed within their term.
    pub(super) fn expire(&mut self, turn: &mut Turn<'_>) {
        let due = self
            .iter()
            .filter(|(_, lease)| lease.expires_at.is_some_and(|at| at <= turn.now));
        let due: Vec<LeaseId> = due.map(|(id, _)| id).collect();
        for id in due {
            let Some(lease) = self.leases.get(&id) else { continue };
            let term = lease.request.as_ref().map_or(Duration::ZERO, |request| request.term);
            turn.act(Action::EndLease {
                lease: self.name_of(id),
                end: LeaseEnd::Expired { term },
            });
            self.begin_ending(id, Bytes::ZERO, turn);
        }
    }

    /// Leases whose target is over, with its grace, and was not seen to be reached.
    pub(super) fn overdue(&self, now: Timestamp) -> Vec<LeaseId> {
        let patience = self.shed.verify_timeout;
        self.due(|phase| matches!(phase, Phase::Revoking(revocation) if revocation.ends_at(patience) <= now))
    }

    /// Ends the lease of a tenant that has not come down in time. A worker's lease goes on: its revocation is returned, for
    /// its worker is to be dealt with.
    pub(super) fn escalate(&mut self, id: LeaseId, turn: &mut Turn<'_>) -> Option<Revocation> {
        let lease = self.leases.get(&id)?;
        let revocation = lease.revocation()?.clone();
        let kind = lease.kind;
        if revocation.voluntary || kind == LeaseKind::Worker {
            self.end_revocation(id, turn.ledger);
        }
        if revocation.voluntary {
            turn.decide(LeaseDecision::WishNotSeen {
                lease: self.name_of(id),
                target: revocation.target.bytes,
                used: revocation.evidence.used(),
            });
            return None;
        }
        if kind == LeaseKind::Worker {
            return Some(revocation);
        }
        turn.act(Action::EndLease {
            lease: self.name_of(id),
            end: LeaseEnd::NotReduced {
                target: revocation.target.bytes,
                late: turn.now.saturating_since(revocation.target.deadline),
                cause: revocation.cause(),
            },
        });
        // A holder that has answered may not take more than its target, whatever it does.
        let held = turn.ledger.held_by(id);
        let claimable = match revocation.answered_at {
            Some(_) => revocation.target.bytes.min(held),
            None => held,
        };
        self.begin_ending(id, claimable, turn);
        None
    }

    /// Closes what could not be measured in time, and asks for the readings that are due.
    pub(super) fn poll(&mut self, turn: &mut Turn<'_>) {
        let now = turn.now;
        for id in self.due(|phase| matches!(phase, Phase::Ending { deadline, .. } if *deadline <= now)) {
            self.give_up_on(id, turn);
        }
        for id in self.due(|phase| match phase {
            Phase::Revoking(Revocation { next_poll, .. }) | Phase::Ending { next_poll, .. } => *next_poll <= now,
            Phase::Granted => false,
        }) {
            let (poll, rarely) = (self.shed.verify_poll, self.rarely);
            match self.leases.get_mut(&id).map(|lease| &mut lease.phase) {
                Some(Phase::Revoking(Revocation { next_poll, .. })) => *next_poll = now + poll,
                Some(Phase::Ending {
                    next_poll,
                    unacknowledged,
                    ..
                }) => {
                    // Nothing is to be seen before its term is over, but that it uses less.
                    let until = unacknowledged.map(|open| open.until).filter(|until| *until > now);
                    *next_poll = until.map_or(now + poll, |until| until.min(now + rarely));
                }
                Some(Phase::Granted) | None => {}
            }
            self.measure(id, turn);
        }
        for (holder, residual) in &mut self.residual {
            if residual.next_poll <= now {
                residual.next_poll = now + self.rarely;
                let tenant = holder.clone();
                turn.effects.push(Effect::Act(Action::Measure { tenant }));
            }
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        let patience = self.shed.verify_timeout;
        let leases = self.leases.values().filter_map(|lease| {
            let phase = match &lease.phase {
                Phase::Granted => None,
                Phase::Revoking(revocation) => Some(revocation.ends_at(patience).min(revocation.next_poll)),
                Phase::Ending {
                    deadline, next_poll, ..
                } => Some((*deadline).min(*next_poll)),
            };
            [phase, lease.expires_at].into_iter().flatten().min()
        });
        let residual = self.residual.values().map(|residual| residual.next_poll);
        leases.chain(residual).min()
    }

    /// Takes a reading of a tenant, for all of its leases.
    pub(super) fn settle(&mut self, holder: &str, used: Option<Bytes>, taken_at: Timestamp, turn: &mut Turn<'_>) {
        let of_holder = |(_, lease): &(LeaseId, &Lease)| lease.holder == holder && lease.kind == LeaseKind::Tenant;
        let ids: Vec<LeaseId> = self.iter().filter(of_holder).map(|(id, _)| id).collect();
        for id in ids {
            match (self.leases.get_mut(&id).map(|lease| &mut lease.phase), used) {
                (Some(Phase::Revoking(_)), _) => {
                    self.verify(id, used, taken_at, turn);
                }
                (
                    Some(Phase::Ending {
                        since, unmeasurable, ..
                    }),
                    None,
                ) if *since < taken_at => *unmeasurable = true,
                (
                    Some(Phase::Ending {
                        since, unacknowledged, ..
                    }),
                    Some(used),
                ) if *since < taken_at => match unacknowledged.filter(|open| taken_at < open.until) {
                    Some(open) => self.credit_beyond(id, open, turn),
                    None => self.close_measured(id, holder, used, turn),
                },
                _ => {}
            }
        }
    }

    /// Takes a lease that has ended off the book, by a reading of its holder.
    fn close_measured(&mut self, id: LeaseId, holder: &str, used: Bytes, turn: &mut Turn<'_>) {
        let name = self.name_of(id);
        let view = self.view(id, turn.ledger);
        let held = self.close(id, turn);
        let rest = used.saturating_sub(turn.ledger.held_by_tenant(holder));
        if rest > Bytes::ZERO {
            self.watch_residual(view, turn.now);
        } else {
            self.forget_if_gone(holder, turn.ledger);
        }
        turn.decide(LeaseDecision::Closed {
            lease: name,
            held,
            rest,
            free: turn.ledger.free(),
            budget: turn.ledger.budget(),
        });
    }

    /// Takes what its holder may not take any more off a lease that has ended; what is used of it is unaccounted.
    fn credit_beyond(&mut self, id: LeaseId, open: Unacknowledged, turn: &mut Turn<'_>) {
        if turn.ledger.lower(id, open.bytes) == Bytes::ZERO {
            return;
        }
        turn.effects.push(Effect::Moved);
        turn.decide(LeaseDecision::KeptUntilAcknowledged {
            lease: self.name_of(id),
            bytes: open.bytes,
            at_most: open.until.saturating_since(turn.now),
            free: turn.ledger.free(),
            budget: turn.ledger.budget(),
        });
    }

    /// Takes a reading of a holder that has a target: one that is newer than its answer shows whether it has come down.
    ///
    /// One that arrives when the deadline is over decides at once, as [`escalate`](Self::escalate) does.
    pub(super) fn verify(
        &mut self,
        id: LeaseId,
        used: Option<Bytes>,
        taken_at: Timestamp,
        turn: &mut Turn<'_>,
    ) -> Option<Revocation> {
        let revocation = self.leases.get(&id)?.revocation()?;
        if revocation.answered_at.is_none_or(|at| taken_at <= at) {
            return None;
        }
        if let Some(used) = used {
            let revocation = revocation.clone();
            self.credit_reduced(id, &revocation, used, turn);
        }
        let patience = self.shed.verify_timeout;
        let Phase::Revoking(revocation) = &mut self.leases.get_mut(&id)?.phase else {
            return None;
        };
        if revocation.claimed_at().is_none_or(|at| taken_at <= at) {
            return None;
        }
        revocation.evidence = used.map_or(Evidence::Unmeasurable, |used| Evidence::Above { used });
        if revocation.ends_at(patience) > turn.now {
            return None;
        }
        self.escalate(id, turn)
    }

    /// Credits a lower target if the measurement shows it.
    fn credit_reduced(&mut self, id: LeaseId, revocation: &Revocation, used: Bytes, turn: &mut Turn<'_>) {
        let held = turn.ledger.held_by(id);
        let Some(lease) = self.leases.get(&id) else { return };
        let others = turn.ledger.held_by_tenant(&lease.holder).saturating_sub(held);
        let allowed = revocation.target.bytes.saturating_add(others);
        let promised = revocation.used_before.unwrap_or(used).saturating_sub(allowed);
        let tolerance = promised.per_mille(1000u32.saturating_sub(self.shed.verify_per_mille));
        if used > allowed.saturating_add(tolerance) {
            return;
        }
        // It wants less than it was asked for.
        let wish = (lease.kind == LeaseKind::Tenant && !revocation.voluntary).then_some(lease.max);
        let stays = revocation.target.bytes.max(used.saturating_sub(others));
        let freed = turn.ledger.lower(id, stays);
        self.end_revocation(id, turn.ledger);
        turn.effects.push(Effect::Reclaimed {
            freed,
            by_shed: !revocation.voluntary,
        });
        turn.decide(LeaseDecision::Reduced {
            lease: self.name_of(id),
            stays,
            freed,
            took: turn.now.saturating_since(revocation.asked_at),
            used,
            free: turn.ledger.free(),
            budget: turn.ledger.budget(),
        });
        if let Some(max) = wish.filter(|max| *max < stays) {
            self.lower_voluntarily(id, max, turn);
        }
    }

    /// No reading of an ended lease was had in time: its memory is unaccounted, and never credited.
    fn give_up_on(&mut self, id: LeaseId, turn: &mut Turn<'_>) {
        let Some(lease) = self.leases.get(&id) else { return };
        let holder = &lease.holder;
        let known = turn.ledger.used_by(holder).unwrap_or_default();
        let presumed = turn.ledger.held_by_tenant(holder).max(known);
        turn.ledger.measure(holder, presumed, turn.now);
        let (name, view) = (self.name_of(id), self.view(id, turn.ledger));
        let held = self.close(id, turn);
        self.watch_residual(view, turn.now);
        turn.decide(LeaseDecision::ClosedUnaccounted { lease: name, held });
    }

    /// Takes an ended lease off the book.
    fn close(&mut self, id: LeaseId, turn: &mut Turn<'_>) -> Bytes {
        turn.effects.push(Effect::Moved);
        self.remove(id, turn)
    }

    fn watch_residual(&mut self, lease: Option<LeaseView>, now: Timestamp) {
        let Some(lease) = lease.filter(|lease| self.has_no_lease(&lease.holder)) else {
            return;
        };
        let lease = LeaseView {
            state: LeaseState::Gone,
            held: Bytes::ZERO,
            target: None,
            expires_at: None,
            ..lease
        };
        let residual = ResidualUse {
            next_poll: now + self.shed.verify_poll,
            unreadable_since: None,
            lease,
        };
        self.residual.insert(residual.lease.holder.clone(), residual);
    }

    /// Residual use is forgotten when its memory is back; what cannot be read is unmanaged from the next sample on.
    pub(super) fn tend_residual(
        &mut self,
        holder: &str,
        used: Option<Bytes>,
        taken_at: Timestamp,
        turn: &mut Turn<'_>,
    ) {
        let Some(residual) = self.residual.get_mut(holder) else {
            return;
        };
        match used {
            Some(Bytes::ZERO) => {
                self.forget_holder(holder, turn.ledger);
                turn.effects.push(Effect::Moved);
            }
            Some(_) => residual.unreadable_since = None,
            None => {
                residual.unreadable_since.get_or_insert(taken_at);
            }
        }
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

    fn forget_if_gone(&mut self, holder: &str, ledger: &mut Ledger) {
        if self.has_no_lease(holder) {
            self.forget_holder(holder, ledger);
        }
    }

    fn forget_holder(&mut self, holder: &str, ledger: &mut Ledger) {
        self.residual.remove(holder);
        ledger.forget(holder);
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
        let past = self.iter().find(|(_, lease)| {
            let is_set = |deadline: Timestamp| deadline > Timestamp::START;
            let expected = match &lease.phase {
                Phase::Granted => true,
                Phase::Revoking(revocation) => is_set(revocation.target.deadline),
                Phase::Ending { deadline, .. } => is_set(*deadline),
            };
            !expected || lease.expires_at.is_some_and(|at| at <= now)
        });
        past.map(|(id, _)| self.name_of(id))
    }
}

fn unknown(id: LeaseId) -> Denial {
    Denial::UnknownLease {
        lease: format!("#{}", id.0),
    }
}

/// Use beyond a lease that is put down to whole pages and shared libraries.
const SLACK_PER_MILLE: u32 = 20;
const SLACK: Bytes = Bytes::from_mib(1);

/// How many wishes of a holder in a row, none of which is measured to come true, count as coming down. Our choice.
const WISHES: u32 = 4;

/// Between the name of a tenant and what tells its process apart from another one of the same name.
pub(super) const OF_PROCESS: &str = " (pid ";
pub(super) const OF_USER: &str = " (uid ";
