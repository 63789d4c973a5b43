//! Revocation: targets, their deadlines, and the ends of leases.
//!
//! ```text
//!   granted ── lower target ──► revoking ── answered, and then measured at the target ──► granted, credited
//!                                  │ deadline, and a grace for the last measurement
//!                                  ▼
//!   granted ── release, expire ─► ending ── measured ──► gone; what is still used is unaccounted
//! ```
//!
//! An answer is never credited, and neither is silence, nor low use: whoever has not answered its target may not have
//! heard of it, and may lawfully fill the lease that it had a moment after it was measured. So a measurement counts down
//! to what the holder may still take *as far as it knows*: the target once it has answered that it comes down, all of
//! its lease before. That goes for the end of a lease too. One that ends while its holder does not know keeps that much
//! on the book until the holder says that it has heard (it releases the lease), its process is gone, or the term that it
//! was granted last is over, after which nobody relies on a lease ([`Belief`]).
//!
//! The holder's own measurement is asked for every `verify_poll`; where a holder cannot be measured, the next sample of
//! the scope shows its memory as a stranger's.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::core::{Arbiter, Belief, Evidence, Lease, Phase, Revocation};
use crate::{
    policy::{
        decision::{Claim, LeaseDecision, LeaseEnd, NotReduced},
        event::Action,
        lease::{Denial, LeaseId, LeaseKind, LeaseState, LeaseView, Peer, Target, TargetAnswer},
        params::ENGINE_TENANT,
    },
    units::{Bytes, Timestamp},
};

/// A holder whose leases have ended, and that is still measured to use memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ghost {
    /// Its last lease, as it was at its end.
    pub(super) lease: LeaseView,
    next_poll: Timestamp,
    /// Since when it cannot be read: a later sample shows its memory as a stranger's.
    #[serde(default)]
    unreadable_since: Option<Timestamp>,
}

impl Arbiter {
    /// Asks a tenant to come down to `bytes`.
    pub(super) fn set_target(&mut self, id: LeaseId, bytes: Bytes, reason: &str) {
        let deadline = self.now
            + self.leases.get(&id).map_or(self.params.shed.settle, |lease| {
                self.params.shed.deadlines.of(lease.class)
            });
        let nonce = self.begin_revocation(id, bytes, deadline, false);
        self.refuse_growth_of(id, bytes);
        self.out.push(Action::SetTarget {
            lease: id,
            nonce,
            bytes,
            deadline,
            reason: reason.to_owned(),
        });
    }

    /// The holder itself wants less.
    ///
    /// It has no more time for what it was asked before: a target that is in force stays so, with its number and its
    /// deadline, and the wish is the answer to it; what it wants less than that follows once the target is measured.
    /// Wishes that follow each other are spared together for [`WISHES`] times the time of one, and not for ever.
    pub(super) fn lower_voluntarily(&mut self, id: LeaseId, bytes: Bytes) {
        let (now, timeout) = (self.now, self.params.shed.verify_timeout);
        let mut first = now;
        match self.leases.get_mut(&id).map(|lease| &mut lease.phase) {
            Some(Phase::Revoking(revocation)) if !revocation.voluntary => {
                revocation.answered_at.get_or_insert(now);
                revocation.next_poll = now + self.params.shed.verify_poll;
                self.measure_lease(id);
                return;
            }
            Some(Phase::Revoking(revocation)) => first = revocation.asked_at,
            _ => {}
        }
        let deadline = (now + timeout).min(first + timeout * WISHES);
        self.begin_revocation(id, bytes, deadline, true);
        if let Some(Phase::Revoking(revocation)) = self.leases.get_mut(&id).map(|lease| &mut lease.phase) {
            revocation.asked_at = first;
        }
        self.measure_lease(id);
    }

    /// Nothing is asked back of the lease any more.
    pub(super) fn end_revocation(&mut self, id: LeaseId) {
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.phase = Phase::Granted;
        }
        self.ledger.set_moving(id, false);
    }

    pub(super) fn take_target_answer(&mut self, id: LeaseId, nonce: u64, answer: TargetAnswer, claimed: Option<Bytes>) {
        let lease = self.name_of(id);
        let now = self.now;
        let Some(Phase::Revoking(revocation)) = self.leases.get_mut(&id).map(|lease| &mut lease.phase) else {
            self.decide(LeaseDecision::AnswerIgnored {
                lease,
                nonce,
                current: None,
            });
            return;
        };
        if revocation.target.nonce != nonce {
            let current = Some(revocation.target.nonce);
            self.decide(LeaseDecision::AnswerIgnored { lease, nonce, current });
            return;
        }
        if !matches!(answer, TargetAnswer::Refused { .. }) {
            revocation.answered_at.get_or_insert(now);
        }
        if answer == TargetAnswer::Applied && revocation.applied_at.is_none() {
            (revocation.applied_at, revocation.evidence) = (Some(now), Evidence::Missing);
        }
        revocation.answered = Some(answer.clone());
        revocation.next_poll = now + self.params.shed.verify_poll;
        if answer != TargetAnswer::Applied || claimed.is_some() {
            self.decide(LeaseDecision::Answered { lease, answer, claimed });
        }
        self.measure_lease(id);
    }

    pub(super) fn take_holder_lost(&mut self, id: LeaseId, pid: Option<u32>) {
        let is_holder = |owner: Option<u32>| pid.is_none() || pid == owner;
        let Some(lease) = self.leases.get(&id) else {
            let mut ghosts = self.ghosts.iter();
            let ghost = ghosts.find(|(_, ghost)| ghost.lease.id == id && is_holder(ghost.lease.owner_pid));
            if let Some(tenant) = ghost.map(|(tenant, _)| tenant.clone()) {
                self.ghosts.remove(&tenant);
                self.ledger.forget(&tenant);
                self.changed_at = self.now;
            }
            return;
        };
        if lease.kind != LeaseKind::Tenant || !is_holder(lease.owner_pid) {
            return;
        }
        let (tenant, name) = (lease.holder().to_owned(), self.name_of(id));
        // All leases of the process end with it, in one step: a holder may have as many as its user may.
        let of_process = |(other, lease): (&LeaseId, &Lease)| {
            let same = pid.is_some() && lease.kind == LeaseKind::Tenant && lease.owner_pid == pid;
            (*other == id || same).then_some(*other)
        };
        let ended: Vec<LeaseId> = self.leases.iter().filter_map(of_process).collect();
        for other in &ended {
            self.drop_lease(*other);
        }
        self.forget_if_gone(&tenant);
        self.changed_at = self.now;
        self.decide(LeaseDecision::HolderGone {
            lease: name,
            leases: ended.len(),
            free: self.ledger.free(),
            budget: self.ledger.budget(),
        });
    }

    pub(super) fn take_measurement(&mut self, tenant: &str, used: Option<Bytes>, taken_at: Timestamp) {
        let taken_at = taken_at.min(self.now);
        match used {
            Some(used) if self.is_known(tenant) => self.ledger.measure(tenant, used, taken_at),
            Some(_) => return,
            None => {}
        }
        // One that was overtaken by a newer one says how it was, and not how it is.
        let newest = self.ledger.measurement(tenant).map(|measured| measured.at);
        if used.is_some() && newest.is_some_and(|at| taken_at < at) {
            return;
        }
        if tenant == ENGINE_TENANT {
            self.learn_from_engine();
            self.settle_engine();
        } else if self.workers.contains(tenant) {
            if !self.settle_notified(tenant, used, taken_at) {
                self.settle_worker(tenant);
            }
            // One that asks for itself has its lease as any tenant.
            self.settle_tenant(tenant, used, taken_at);
            self.learn_from_life(tenant);
        } else {
            self.settle_tenant(tenant, used, taken_at);
        }
        self.tend_ghost(tenant, used, taken_at);
        self.watch_bounds(tenant);
    }

    /// Names a holder that uses more than it holds, once each time that it begins to.
    fn watch_bounds(&mut self, tenant: &str) {
        let held = self.ledger.held_by_tenant(tenant);
        let used = self
            .ledger
            .measurement(tenant)
            .map_or(Bytes::ZERO, |measured| measured.used);
        let slack = held.per_mille(SLACK_PER_MILLE).max(SLACK);
        if held == Bytes::ZERO || used <= held.saturating_add(slack) {
            self.beyond.remove(tenant);
        } else if self.beyond.insert(tenant.to_owned()) {
            self.decide(LeaseDecision::BeyondLease {
                holder: tenant.to_owned(),
                used,
                held,
                free: self.ledger.free(),
            });
        }
    }

    /// Begins to end a lease: it cannot be renewed any more, and its bytes stay on the book until something tells where
    /// they are. `believed` is what its holder may still take as far as it knows: zero if it knows of the end.
    pub(super) fn begin_ending(&mut self, id: LeaseId, believed: Bytes) {
        let now = self.now;
        let (poll, timeout) = (self.params.shed.verify_poll, self.params.shed.verify_timeout);
        self.noted += 1;
        if let Some(lease) = self.leases.get_mut(&id) {
            let term_ends = lease.expires_at.take().filter(|at| *at > now);
            let belief = term_ends.map(|until| Belief { bytes: believed, until });
            let belief = belief.filter(|belief| belief.bytes > Bytes::ZERO);
            lease.phase = Phase::Ending {
                since: now,
                deadline: belief.map_or(now, |belief| belief.until) + timeout,
                next_poll: now + poll,
                unmeasurable: false,
                belief,
            };
        }
        self.ledger.set_moving(id, true);
        self.forget_wants_of(
            id,
            &Denial::UnknownLease {
                lease: format!("#{}", id.0),
            },
        );
        self.measure_lease(id);
    }

    /// The holder says that it has heard of the end of its lease, or its user or an operator takes that upon himself.
    /// Returns whether that was still open.
    ///
    /// # Errors
    /// If it is, and the peer is neither of them.
    pub(super) fn hears_of_end(&mut self, id: LeaseId, generation: u64, peer: &Peer) -> Result<bool, Denial> {
        let now = self.now;
        let (name, held) = (self.lease_name(id), self.ledger.held_by(id));
        let (poll, timeout) = (self.params.shed.verify_poll, self.params.shed.verify_timeout);
        let Some(lease) = self.leases.get_mut(&id) else {
            return Ok(false);
        };
        let (owner, generation_now) = (lease.owner_uid, lease.generation);
        let Phase::Ending {
            since,
            deadline,
            next_poll,
            belief: belief @ Some(_),
            ..
        } = &mut lease.phase
        else {
            return Ok(false);
        };
        if owner != peer.uid && !peer.operator {
            let rest = belief.map_or(now, |belief| belief.until).saturating_since(now);
            return Err(Denial::NotHolder {
                lease: name,
                uid: peer.uid,
                problem: format!(
                    "it has ended and belongs to uid {owner}; its {held} are kept for {:.1} s more unless its holder says \
                     that it has heard",
                    rest.as_secs_f64()
                ),
            });
        }
        if generation != generation_now {
            return Ok(false);
        }
        // What it used before it heard says nothing.
        (*since, *deadline, *next_poll, *belief) = (now, now + timeout, now + poll, None);
        self.noted += 1;
        self.measure_lease(id);
        Ok(true)
    }

    /// A sample newer than the end of an unmeasurable lease shows what is left of it as a stranger's, and so it does with
    /// the memory of a ghost that cannot be read.
    pub(super) fn close_unmeasurable(&mut self, taken_at: Timestamp) {
        let scope_known = self.ledger.scope_at() == Some(taken_at);
        let due: Vec<LeaseId> = self
            .leases
            .iter()
            .filter(|(_, lease)| {
                let Phase::Ending {
                    since,
                    unmeasurable: true,
                    belief,
                    ..
                } = lease.phase
                else {
                    return false;
                };
                scope_known && since < taken_at && belief.is_none_or(|belief| belief.until <= taken_at)
            })
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            let name = self.name_of(id);
            let holder = self
                .leases
                .get(&id)
                .map(|lease| lease.holder().to_owned())
                .unwrap_or_default();
            let held = self.close_lease(id);
            self.ledger.estrange(&holder);
            if self.has_no_lease(&holder) {
                self.ghosts.remove(&holder);
            }
            self.decide(LeaseDecision::ClosedUnmeasured { lease: name, held });
        }
        let unreadable: Vec<String> = self
            .ghosts
            .iter()
            .filter(|(_, ghost)| scope_known && ghost.unreadable_since.is_some_and(|since| since < taken_at))
            .map(|(tenant, _)| tenant.clone())
            .collect();
        for tenant in unreadable {
            self.ghosts.remove(&tenant);
            self.ledger.estrange(&tenant);
            self.changed_at = self.now;
        }
    }

    pub(super) fn serve_lease_deadlines(&mut self) {
        self.expire_leases();
        let patience = self.params.shed.verify_timeout;
        for id in self.due(|phase, now| match phase {
            Phase::Revoking(revocation) => revocation.ends_at(patience) <= now,
            Phase::Granted | Phase::Ending { .. } => false,
        }) {
            self.escalate(id);
        }
        for id in self.due(|phase, now| matches!(phase, Phase::Ending { deadline, .. } if *deadline <= now)) {
            self.give_up_on(id);
        }
        for id in self.due(|phase, now| match phase {
            Phase::Revoking(Revocation { next_poll, .. }) | Phase::Ending { next_poll, .. } => *next_poll <= now,
            Phase::Granted => false,
        }) {
            let (now, poll, rarely) = (self.now, self.params.shed.verify_poll, self.params.pressure.sample_max);
            if let Some(lease) = self.leases.get_mut(&id) {
                match &mut lease.phase {
                    Phase::Revoking(Revocation { next_poll, .. }) => *next_poll = now + poll,
                    Phase::Ending { next_poll, belief, .. } => {
                        // Nothing is to be seen before its term is over, but that it uses less.
                        let term_ends = belief.map(|belief| belief.until).filter(|until| *until > now);
                        *next_poll = term_ends.map_or(now + poll, |until| until.min(now + rarely));
                    }
                    Phase::Granted => {}
                }
            }
            self.measure_lease(id);
        }
        let now = self.now;
        let haunting: Vec<String> = self
            .ghosts
            .iter()
            .filter(|(_, ghost)| ghost.next_poll <= now)
            .map(|(tenant, _)| tenant.clone())
            .collect();
        for tenant in haunting {
            if let Some(ghost) = self.ghosts.get_mut(&tenant) {
                ghost.next_poll = now + self.params.pressure.sample_max;
            }
            self.out.push(Action::Measure { tenant });
        }
    }

    pub(super) fn next_lease_deadline(&self) -> Option<Timestamp> {
        let patience = self.params.shed.verify_timeout;
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
        let ghosts = self.ghosts.values().map(|ghost| ghost.next_poll);
        leases.chain(ghosts).min()
    }

    pub(super) fn begin_revocation(&mut self, id: LeaseId, bytes: Bytes, deadline: Timestamp, voluntary: bool) -> u64 {
        let nonce = self.counters.nonce();
        let now = self.now;
        let poll = self.params.shed.verify_poll;
        self.ledger.set_moving(id, true);
        if let Some(lease) = self.leases.get_mut(&id) {
            let used_before = self.ledger.measurement(lease.holder()).map(|measured| measured.used);
            lease.phase = Phase::Revoking(Revocation {
                target: Target { nonce, bytes, deadline },
                asked_at: now,
                used_before,
                answered: None,
                answered_at: (voluntary || lease.kind == LeaseKind::Worker).then_some(now),
                applied_at: None,
                evidence: Evidence::Missing,
                next_poll: now + poll,
                voluntary,
            });
        }
        nonce
    }

    fn expire_leases(&mut self) {
        let now = self.now;
        let due: Vec<LeaseId> = self
            .leases
            .iter()
            .filter(|(_, lease)| lease.expires_at.is_some_and(|at| at <= now))
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            let Some(lease) = self.leases.get(&id) else { continue };
            let term = lease.request.as_ref().map_or(Duration::ZERO, |request| request.term);
            self.out.push(Action::EndLease {
                lease: self.name_of(id),
                end: LeaseEnd::Expired { term },
            });
            self.begin_ending(id, Bytes::ZERO);
        }
    }

    /// The deadline of a target has passed, with its grace, and the measurement does not show it.
    fn escalate(&mut self, id: LeaseId) {
        let name = self.name_of(id);
        let Some(lease) = self.leases.get_mut(&id) else { return };
        let Phase::Revoking(revocation) = lease.phase.clone() else {
            return;
        };
        let shown = match revocation.evidence {
            Evidence::Above { used } => format!("still uses {used}"),
            Evidence::Missing | Evidence::Unmeasurable => "cannot be measured".to_owned(),
        };
        let late = self.now.saturating_since(revocation.target.deadline);
        if revocation.voluntary {
            lease.phase = Phase::Granted;
            self.ledger.set_moving(id, false);
            self.decide(LeaseDecision::WishNotSeen {
                lease: name,
                target: revocation.target.bytes,
                used: match revocation.evidence {
                    Evidence::Above { used } => Some(used),
                    Evidence::Missing | Evidence::Unmeasurable => None,
                },
            });
            return;
        }
        if lease.kind == LeaseKind::Worker {
            self.end_notification(id, &revocation, &shown);
            return;
        }
        self.out.push(Action::EndLease {
            lease: self.name_of(id),
            end: LeaseEnd::NotReduced {
                target: revocation.target.bytes,
                late,
                cause: revocation.cause(),
            },
        });
        // Whoever has answered may not take more than its target, whatever it does.
        let held = self.ledger.held_by(id);
        let believed = match revocation.answered_at {
            Some(_) => revocation.target.bytes.min(held),
            None => held,
        };
        self.begin_ending(id, believed);
    }

    /// Nobody could tell where the memory of an ended lease is: it is unaccounted, and never credited.
    fn give_up_on(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.get(&id) else { return };
        let (tenant, name) = (lease.holder().to_owned(), self.name_of(id));
        let known = self
            .ledger
            .measurement(&tenant)
            .map_or(Bytes::ZERO, |measured| measured.used);
        let presumed = self.ledger.held_by_tenant(&tenant).max(known);
        let now = self.now;
        self.ledger.measure(&tenant, presumed, now);
        let view = self.lease_view(id);
        let held = self.close_lease(id);
        self.haunt(view);
        self.decide(LeaseDecision::ClosedUnaccounted { lease: name, held });
    }

    fn settle_tenant(&mut self, tenant: &str, used: Option<Bytes>, taken_at: Timestamp) {
        let ids: Vec<LeaseId> = self
            .leases
            .iter()
            .filter(|(_, lease)| lease.holder() == tenant && lease.kind == LeaseKind::Tenant)
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            match (self.leases.get(&id).map(|lease| lease.phase.clone()), used) {
                (Some(Phase::Revoking(_)), _) => self.verify_answered(id, used, taken_at),
                (Some(Phase::Ending { since, belief, .. }), Some(used)) if since < taken_at => {
                    if let Some(belief) = belief.filter(|belief| taken_at < belief.until) {
                        self.credit_beyond_belief(id, belief);
                        continue;
                    }
                    let name = self.name_of(id);
                    let view = self.lease_view(id);
                    let held = self.close_lease(id);
                    let rest = used.saturating_sub(self.ledger.held_by_tenant(tenant));
                    if rest > Bytes::ZERO {
                        self.haunt(view);
                    } else {
                        self.forget_if_gone(tenant);
                    }
                    self.decide(LeaseDecision::Closed {
                        lease: name,
                        held,
                        rest,
                        free: self.ledger.free(),
                        budget: self.ledger.budget(),
                    });
                }
                (Some(Phase::Ending { since, .. }), None) if since < taken_at => {
                    if let Some(Phase::Ending { unmeasurable, .. }) =
                        self.leases.get_mut(&id).map(|lease| &mut lease.phase)
                    {
                        *unmeasurable = true;
                    }
                }
                _ => {}
            }
        }
    }

    /// Takes what its holder may not take any more off a lease that has ended; what is used of it is unaccounted.
    fn credit_beyond_belief(&mut self, id: LeaseId, belief: Belief) {
        if self.ledger.lower(id, belief.bytes) == Bytes::ZERO {
            return;
        }
        self.changed_at = self.now;
        self.decide(LeaseDecision::KeptUntilAcknowledged {
            lease: self.name_of(id),
            bytes: belief.bytes,
            at_most: belief.until.saturating_since(self.now),
            free: self.ledger.free(),
            budget: self.ledger.budget(),
        });
    }

    /// Takes a reading of a holder that has a target: one that is newer than its answer shows whether it has come down.
    ///
    /// One that arrives when the deadline is over decides at once.
    pub(super) fn verify_answered(&mut self, id: LeaseId, used: Option<Bytes>, taken_at: Timestamp) {
        let revocation = match self.leases.get(&id).map(|lease| &lease.phase) {
            Some(Phase::Revoking(revocation)) if revocation.answered_at.is_some_and(|at| at < taken_at) => {
                revocation.clone()
            }
            _ => return,
        };
        if let Some(used) = used {
            self.verify(id, &revocation, used);
        }
        let patience = self.params.shed.verify_timeout;
        let Some(Phase::Revoking(revocation)) = self.leases.get_mut(&id).map(|lease| &mut lease.phase) else {
            return;
        };
        if revocation.claimed_at().is_none_or(|at| taken_at <= at) {
            return;
        }
        revocation.evidence = used.map_or(Evidence::Unmeasurable, |used| Evidence::Above { used });
        if revocation.ends_at(patience) <= self.now {
            self.escalate(id);
        }
    }

    /// Credits a lower target if the measurement shows it.
    fn verify(&mut self, id: LeaseId, revocation: &Revocation, used: Bytes) {
        let held = self.ledger.held_by(id);
        let Some(lease) = self.leases.get(&id) else { return };
        let others = self.ledger.held_by_tenant(lease.holder()).saturating_sub(held);
        let allowed = revocation.target.bytes.saturating_add(others);
        let promised = revocation.used_before.unwrap_or(used).saturating_sub(allowed);
        let tolerance = promised.per_mille(1000u32.saturating_sub(self.params.shed.verify_per_mille));
        if used > allowed.saturating_add(tolerance) {
            return;
        }
        let stays = revocation.target.bytes.max(used.saturating_sub(others));
        let freed = self.ledger.lower(id, stays);
        self.end_revocation(id);
        self.note_reclaimed(freed, !revocation.voluntary);
        self.decide(LeaseDecision::Reduced {
            lease: self.name_of(id),
            stays,
            freed,
            took: self.now.saturating_since(revocation.asked_at),
            used,
            free: self.ledger.free(),
            budget: self.ledger.budget(),
        });
        // It wants less than it was asked for.
        let wish = self.leases.get(&id).filter(|lease| lease.kind == LeaseKind::Tenant);
        if let Some(max) = wish.map(|lease| lease.max).filter(|max| *max < stays)
            && !revocation.voluntary
        {
            self.lower_voluntarily(id, max);
        }
    }

    /// Takes a lease off the book for good.
    fn close_lease(&mut self, id: LeaseId) -> Bytes {
        self.changed_at = self.now;
        self.drop_lease(id)
    }

    pub(super) fn drop_lease(&mut self, id: LeaseId) -> Bytes {
        let gone = Denial::UnknownLease {
            lease: format!("#{}", id.0),
        };
        if let Some(lease) = self.leases.remove(&id) {
            self.beyond.remove(lease.holder());
        }
        let held = self.ledger.close(id);
        self.forget_wants_of(id, &gone);
        held
    }

    fn haunt(&mut self, lease: Option<LeaseView>) {
        let Some(lease) = lease.filter(|lease| self.has_no_lease(lease.holder())) else {
            return;
        };
        let lease = LeaseView {
            state: LeaseState::Gone,
            held: Bytes::ZERO,
            target: None,
            expires_at: None,
            ..lease
        };
        let next_poll = self.now + self.params.shed.verify_poll;
        self.ghosts.insert(
            lease.holder().to_owned(),
            Ghost {
                lease,
                next_poll,
                unreadable_since: None,
            },
        );
    }

    /// Leases that have ended and whose holders still use memory.
    pub(super) fn ghost_views(&self) -> impl Iterator<Item = LeaseView> + '_ {
        self.ghosts.values().map(|ghost| {
            let measured = self.ledger.measurement(ghost.lease.holder());
            LeaseView {
                used: measured.map(|measured| measured.used),
                used_at: measured.map(|measured| measured.at),
                ..ghost.lease.clone()
            }
        })
    }

    /// A ghost is forgotten when its memory is back; one that cannot be read is a stranger from the next sample on.
    fn tend_ghost(&mut self, tenant: &str, used: Option<Bytes>, taken_at: Timestamp) {
        let Some(ghost) = self.ghosts.get_mut(tenant) else {
            return;
        };
        match used {
            Some(Bytes::ZERO) => {
                self.ghosts.remove(tenant);
                self.ledger.forget(tenant);
                self.changed_at = self.now;
            }
            Some(_) => ghost.unreadable_since = None,
            None => {
                ghost.unreadable_since.get_or_insert(taken_at);
            }
        }
    }

    fn forget_if_gone(&mut self, tenant: &str) {
        if self.has_no_lease(tenant) {
            self.ledger.forget(tenant);
            self.ghosts.remove(tenant);
        }
    }

    fn has_no_lease(&self, tenant: &str) -> bool {
        self.leases.values().all(|lease| lease.holder() != tenant)
    }

    fn is_known(&self, tenant: &str) -> bool {
        self.ghosts.contains_key(tenant) || !self.has_no_lease(tenant)
    }

    pub(super) fn measure_lease(&mut self, id: LeaseId) {
        if let Some(lease) = self.leases.get(&id) {
            let tenant = lease.holder().to_owned();
            self.out.push(Action::Measure { tenant });
        }
    }

    fn due(&self, is_due: impl Fn(&Phase, Timestamp) -> bool) -> Vec<LeaseId> {
        self.leases
            .iter()
            .filter(|(_, lease)| is_due(&lease.phase, self.now))
            .map(|(id, _)| *id)
            .collect()
    }
}

/// Use beyond a lease that is put down to whole pages and shared libraries.
const SLACK_PER_MILLE: u32 = 20;
const SLACK: Bytes = Bytes::from_mib(1);

/// How many wishes of a holder in a row, none of which is measured to come true, count as coming down. Our choice.
const WISHES: u32 = 4;

impl Revocation {
    /// When a holder that is not seen to have come down is ended.
    ///
    /// A reading from before its answer shows nothing of it. So one that has answered is ended by a newer one, or when
    /// none has been taken for `patience` after the answer.
    fn ends_at(&self, patience: Duration) -> Timestamp {
        let end = self.target.deadline + GRACE;
        match (self.claimed_at(), self.evidence) {
            (Some(at), Evidence::Missing) if !self.voluntary => end.max(at + patience),
            _ => end,
        }
    }

    /// When it claimed what has to be seen: that its memory is back, or that it comes down.
    fn claimed_at(&self) -> Option<Timestamp> {
        self.applied_at.or(self.answered_at)
    }

    /// How it is known that the holder has not come down.
    fn cause(&self) -> NotReduced {
        let claim = match &self.answered {
            Some(TargetAnswer::Refused { reason }) => return NotReduced::Refused { reason: reason.clone() },
            None if self.answered_at.is_none() => return NotReduced::Unanswered,
            Some(TargetAnswer::Applied) => Claim::Applied,
            Some(TargetAnswer::Deferred { .. }) => Claim::Deferred,
            None => Claim::Resized,
        };
        match self.evidence {
            Evidence::Above { used } => NotReduced::Measured { used, claim },
            Evidence::Missing | Evidence::Unmeasurable => NotReduced::Unmeasurable { claim },
        }
    }
}

/// Time after the deadline of a target for the last measurement to arrive.
const GRACE: Duration = Duration::from_millis(200);
