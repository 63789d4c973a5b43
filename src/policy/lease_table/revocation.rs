//! Targets of leases: set, answered, and credited or escalated by a reading.

use super::{Effect, Evidence, Lease, LeaseTable, Lower, Phase, Revocation, Turn, VERIFY_POLL};
use crate::{
    decision::{LeaseDecision, LeaseEnd},
    event::{Action, TargetAnswered},
    lease::{LeaseId, LeaseKind, Target, TargetAnswer},
    ledger::Ledger,
    params::{ShedParams, VERIFY_PER_MILLE},
};
use cotenant_units::{Bytes, Timestamp};

impl LeaseTable {
    /// Sets a target for a holder. Returns its nonce.
    pub(crate) fn begin_revocation(
        &mut self,
        lower: &Lower,
        voluntary: bool,
        turn: &mut Turn<'_>,
    ) -> u64 {
        self.last.nonce += 1;
        let nonce = self.last.nonce;
        turn.ledger.set_moving(lower.who, true);
        if let Some(lease) = self.leases.get_mut(&lower.who) {
            lease.phase = Phase::Revoking(Revocation {
                target: Target {
                    nonce,
                    bytes: lower.to,
                    deadline: lower.deadline,
                },
                asked_at: turn.now,
                used_before: lower.had.or(turn.ledger.used_by(&lease.holder)),
                answered: None,
                answered_at: lower.answered_at,
                applied_at: None,
                evidence: Evidence::Missing,
                next_poll: turn.now + VERIFY_POLL,
                voluntary,
            });
        }
        nonce
    }

    fn revocation_mut(&mut self, id: LeaseId) -> Option<&mut Revocation> {
        match &mut self.leases.get_mut(&id)?.phase {
            Phase::Revoking(revocation) => Some(revocation),
            _ => None,
        }
    }

    /// Ends the reclaim from a lease.
    pub(crate) fn end_revocation(&mut self, id: LeaseId, ledger: &mut Ledger) {
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.phase = Phase::Granted;
        }
        ledger.set_moving(id, false);
    }

    /// Lowers a lease at its holder's request.
    ///
    /// This does not extend an earlier target: a target in force keeps its nonce and its deadline, the request counts
    /// as the answer to it, and a lower size follows once the target is measured. Consecutive requests together get at
    /// most [`WISHES`] times the time of one.
    pub(crate) fn lower_voluntarily(&mut self, id: LeaseId, bytes: Bytes, turn: &mut Turn<'_>) {
        let (now, timeout) = (turn.now, turn.shed.verify_timeout);
        let mut first = now;
        if let Some(revocation) = self.revocation_mut(id) {
            if !revocation.voluntary {
                revocation.answered_at.get_or_insert(now);
                revocation.next_poll = now + VERIFY_POLL;
                return self.measure(id, turn);
            }
            first = revocation.asked_at;
        }
        let lower = Lower {
            who: id,
            to: bytes,
            had: None,
            deadline: (now + timeout).min(first + timeout * WISHES),
            answered_at: Some(now),
        };
        self.begin_revocation(&lower, true, turn);
        if let Some(revocation) = self.revocation_mut(id) {
            revocation.asked_at = first;
        }
        self.measure(id, turn);
    }

    /// Records the answer of a holder to its target.
    pub(crate) fn answer_target(&mut self, answered: &TargetAnswered, turn: &mut Turn<'_>) {
        let TargetAnswered {
            lease: id,
            nonce,
            ref answer,
            claimed,
        } = *answered;
        let (lease, now) = (self.name_of(id), turn.now);
        let revocation = self.revocation_mut(id);
        let current = revocation.as_ref().map(|under_way| under_way.target.nonce);
        let Some(revocation) = revocation.filter(|_| current == Some(nonce)) else {
            return turn.decide(LeaseDecision::AnswerIgnored {
                lease,
                nonce,
                current,
            });
        };
        if !matches!(answer, TargetAnswer::Refused { .. }) {
            revocation.answered_at.get_or_insert(now);
        }
        if *answer == TargetAnswer::Applied && revocation.applied_at.is_none() {
            (revocation.applied_at, revocation.evidence) = (Some(now), Evidence::Missing);
        }
        revocation.answered = Some(answer.clone());
        revocation.next_poll = now + VERIFY_POLL;
        if *answer != TargetAnswer::Applied || claimed.is_some() {
            turn.decide(LeaseDecision::Answered {
                lease,
                answer: answer.clone(),
                claimed,
            });
        }
        self.measure(id, turn);
    }

    /// Returns the leases whose target and its grace have passed without a measurement at the target.
    pub(crate) fn overdue(&self, shed: &ShedParams, now: Timestamp) -> Vec<LeaseId> {
        let patience = shed.verify_timeout;
        self.due(|phase| matches!(phase, Phase::Revoking(revocation) if revocation.ends_at(patience) <= now))
    }

    /// Ends the lease of a tenant that did not reach its target in time. A worker's lease continues: its revocation is
    /// returned, and the caller decides about the worker.
    pub(crate) fn escalate(&mut self, id: LeaseId, turn: &mut Turn<'_>) -> Option<Revocation> {
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
        // After an answer, a holder may take no more than its target.
        let held = turn.ledger.held_by(id);
        let claimable = match revocation.answered_at {
            Some(_) => revocation.target.bytes.min(held),
            None => held,
        };
        self.begin_ending(id, claimable, turn);
        None
    }

    /// Applies a reading of a tenant to all of its leases.
    pub(crate) fn settle(
        &mut self,
        holder: &str,
        used: Option<Bytes>,
        taken_at: Timestamp,
        turn: &mut Turn<'_>,
    ) {
        let of_holder = |(_, lease): &(LeaseId, &Lease)| {
            lease.holder == holder && lease.kind == LeaseKind::Tenant
        };
        let ids: Vec<LeaseId> = self.iter().filter(of_holder).map(|(id, _)| id).collect();
        for id in ids {
            match self.leases.get_mut(&id).map(|lease| &mut lease.phase) {
                Some(Phase::Revoking(_)) => {
                    self.verify(id, used, taken_at, turn);
                }
                Some(Phase::Ending {
                    since,
                    unmeasurable,
                    unacknowledged,
                    ..
                }) if *since < taken_at => {
                    let open = unacknowledged.filter(|open| taken_at < open.until);
                    match (used, open) {
                        (None, _) => *unmeasurable = true,
                        (Some(_), Some(open)) => self.credit_beyond(id, open, turn),
                        (Some(used), None) => self.close_measured(id, holder, used, turn),
                    }
                }
                Some(Phase::Residual { .. }) if used == Some(Bytes::ZERO) => {
                    self.forget_holder(holder, turn.ledger);
                    turn.effects.push(Effect::Moved);
                }
                Some(Phase::Residual {
                    unreadable_since, ..
                }) => {
                    let since = unreadable_since.unwrap_or(taken_at);
                    *unreadable_since = used.is_none().then_some(since);
                }
                _ => {}
            }
        }
    }

    /// Applies a reading of a holder under a target: only one newer than its answer is evidence.
    ///
    /// A reading after the deadline decides at once, as [`escalate`](Self::escalate) does.
    pub(crate) fn verify(
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
        let patience = turn.shed.verify_timeout;
        let revocation = self.revocation_mut(id)?;
        if revocation.claimed_at().is_none_or(|at| taken_at <= at) {
            return None;
        }
        revocation.evidence = used.map_or(Evidence::Unmeasurable, |used| Evidence::Above { used });
        if revocation.ends_at(patience) > turn.now {
            return None;
        }
        self.escalate(id, turn)
    }

    /// Credits a target if the measurement shows it as reached.
    fn credit_reduced(
        &mut self,
        id: LeaseId,
        revocation: &Revocation,
        used: Bytes,
        turn: &mut Turn<'_>,
    ) {
        let held = turn.ledger.held_by(id);
        let Some(lease) = self.leases.get(&id) else {
            return;
        };
        let others = turn
            .ledger
            .held_by_tenant(&lease.holder)
            .saturating_sub(held);
        let allowed = revocation.target.bytes.saturating_add(others);
        let promised = revocation
            .used_before
            .unwrap_or(used)
            .saturating_sub(allowed);
        let tolerance = promised.per_mille(1000 - VERIFY_PER_MILLE);
        if used > allowed.saturating_add(tolerance) {
            return;
        }
        // The size that the holder requested, which may be below the target.
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
}

/// Bound on the time for consecutive unconfirmed requests of a holder to shrink, as a multiple of the time of one. Our
/// choice.
const WISHES: u32 = 4;
