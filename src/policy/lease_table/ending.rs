//! Ends of leases: by release, expiry or exit of the holder; measured, then removed from the ledger.

use super::{
    Effect, Lease, LeaseTable, Phase, Revocation, Turn, Unacknowledged, VERIFY_POLL, unknown,
};
use crate::{
    decision::{LeaseDecision, LeaseEnd},
    denial::{Denial, NotHolder},
    event::{Action, LeaseCall},
    lease::{LeaseId, LeaseKind},
    ledger::Ledger,
};
use cotenant_units::{Bytes, Timestamp};

impl LeaseTable {
    /// Ends all leases of a process that has exited, in one step: it may hold as many as its user is allowed.
    pub(crate) fn holder_gone(&mut self, id: LeaseId, pid: Option<u32>, turn: &mut Turn<'_>) {
        let lease = self.leases.get(&id);
        let is_holder = |lease: &&Lease| {
            lease.kind == LeaseKind::Tenant && (pid.is_none() || pid == lease.owner.1)
        };
        let Some(lease) = lease.filter(is_holder) else {
            return;
        };
        let (holder, name) = (lease.holder.clone(), self.name_of(id));
        if lease.is_residual() {
            self.forget_holder(&holder, turn.ledger);
            return turn.effects.push(Effect::Moved);
        }
        let of_process = |lease: &Lease| {
            pid.is_some() && lease.kind == LeaseKind::Tenant && lease.owner.1 == pid
        };
        let ended = self
            .iter()
            .filter(|(other, lease)| *other == id || of_process(lease));
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

    /// Begins to end a lease: it can no longer be renewed, and its bytes stay in the ledger until a reading shows what
    /// became of them. `claimable` is what its holder may still take by its own knowledge: zero if it knows of the end.
    pub(crate) fn begin_ending(&mut self, id: LeaseId, claimable: Bytes, turn: &mut Turn<'_>) {
        let now = turn.now;
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
                deadline: until.unwrap_or(now) + turn.shed.verify_timeout,
                next_poll: now + VERIFY_POLL,
                unmeasurable: false,
                unacknowledged,
            };
        }
        turn.ledger.set_moving(id, true);
        let (lease, denial) = (id, unknown(id));
        turn.effects.push(Effect::Deny { lease, denial });
        self.measure(id, turn);
    }

    /// Acknowledges the end of a lease, by its holder, its user or an operator. Returns whether the acknowledgement was
    /// pending.
    ///
    /// # Errors
    /// If it is pending, and the peer is none of them.
    pub(crate) fn acknowledge_end(
        &mut self,
        call: &LeaseCall,
        turn: &mut Turn<'_>,
    ) -> Result<bool, Denial> {
        let (now, id, peer) = (turn.now, call.lease, &call.peer);
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
        if call.generation != lease.generation {
            return Ok(false);
        }
        // Readings from before the acknowledgement are no evidence.
        (*since, *deadline, *next_poll, *open) =
            (now, now + turn.shed.verify_timeout, now + VERIFY_POLL, None);
        self.measure(id, turn);
        Ok(true)
    }

    /// Closes ended leases that cannot be measured, and unreadable residual use, once a sample of the scope newer than
    /// their end shows the rest as unmanaged.
    pub(crate) fn close_unmeasurable(&mut self, taken_at: Timestamp, turn: &mut Turn<'_>) {
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
            Phase::Residual {
                unreadable_since, ..
            } => unreadable_since.is_some_and(|since| since < taken_at),
            _ => false,
        }) {
            let name = self.name_of(id);
            let Some(lease) = self.leases.get(&id) else {
                continue;
            };
            let (holder, is_residual) = (lease.holder.clone(), lease.is_residual());
            let held = self.close(id, turn);
            turn.ledger.estrange(&holder);
            if !is_residual {
                turn.decide(LeaseDecision::ClosedUnmeasured { lease: name, held });
            }
        }
    }

    /// Ends leases that were not renewed within their term.
    pub(crate) fn expire(&mut self, turn: &mut Turn<'_>) {
        let due = self
            .iter()
            .filter(|(_, lease)| lease.expires_at.is_some_and(|at| at <= turn.now));
        let due: Vec<LeaseId> = due.map(|(id, _)| id).collect();
        for id in due {
            let Some(lease) = self.leases.get(&id) else {
                continue;
            };
            let term = lease
                .request
                .as_ref()
                .and_then(|request| request.term)
                .unwrap_or_default();
            turn.act(Action::EndLease {
                lease: self.name_of(id),
                end: LeaseEnd::Expired { term },
            });
            self.begin_ending(id, Bytes::ZERO, turn);
        }
    }

    /// Closes leases that were not measured in time, and requests the readings that are due.
    pub(crate) fn poll(&mut self, turn: &mut Turn<'_>) {
        let now = turn.now;
        for id in
            self.due(|phase| matches!(phase, Phase::Ending { deadline, .. } if *deadline <= now))
        {
            self.give_up_on(id, turn);
        }
        for id in self.due(|phase| match phase {
            Phase::Revoking(Revocation { next_poll, .. })
            | Phase::Ending { next_poll, .. }
            | Phase::Residual { next_poll, .. } => *next_poll <= now,
            Phase::Granted => false,
        }) {
            let rarely = turn.rarely;
            match self.leases.get_mut(&id).map(|lease| &mut lease.phase) {
                Some(Phase::Revoking(Revocation { next_poll, .. })) => {
                    *next_poll = now + VERIFY_POLL;
                }
                Some(Phase::Ending {
                    next_poll,
                    unacknowledged,
                    ..
                }) => {
                    // Until the term is over, a reading can only show that the holder uses less.
                    let until = unacknowledged
                        .map(|open| open.until)
                        .filter(|until| *until > now);
                    *next_poll = until.map_or(now + VERIFY_POLL, |until| until.min(now + rarely));
                }
                Some(Phase::Residual { next_poll, .. }) => *next_poll = now + rarely,
                Some(Phase::Granted) | None => {}
            }
            self.measure(id, turn);
        }
    }

    /// Removes an ended lease from the ledger, by a reading of its holder.
    pub(super) fn close_measured(
        &mut self,
        id: LeaseId,
        holder: &str,
        used: Bytes,
        turn: &mut Turn<'_>,
    ) {
        let name = self.name_of(id);
        let (held, rest) = self.retire(id, holder, used, turn);
        turn.decide(LeaseDecision::Closed {
            lease: name,
            held,
            rest,
            free: turn.ledger.free(),
            budget: turn.ledger.budget(),
        });
    }

    /// Lowers an ended lease to the bytes that its holder may still take; use beyond them is unaccounted.
    pub(super) fn credit_beyond(&mut self, id: LeaseId, open: Unacknowledged, turn: &mut Turn<'_>) {
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

    /// Closes an ended lease without a reading in time: its memory is unaccounted, and not credited.
    fn give_up_on(&mut self, id: LeaseId, turn: &mut Turn<'_>) {
        let Some(lease) = self.leases.get(&id) else {
            return;
        };
        let holder = lease.holder.clone();
        let known = turn.ledger.used_by(&holder).unwrap_or_default();
        let presumed = turn.ledger.held_by_tenant(&holder).max(known);
        turn.ledger.measure(&holder, presumed, turn.now);
        let name = self.name_of(id);
        let (held, _) = self.retire(id, &holder, presumed, turn);
        turn.decide(LeaseDecision::ClosedUnaccounted { lease: name, held });
    }

    /// Removes an ended lease from the ledger.
    fn close(&mut self, id: LeaseId, turn: &mut Turn<'_>) -> Bytes {
        turn.effects.push(Effect::Moved);
        self.remove(id, turn)
    }

    /// Removes the bytes of an ended lease from the ledger. Its holder is measured further while it uses more than its
    /// other leases hold. Returns the bytes held, and that excess.
    fn retire(
        &mut self,
        id: LeaseId,
        holder: &str,
        used: Bytes,
        turn: &mut Turn<'_>,
    ) -> (Bytes, Bytes) {
        let held = turn.ledger.lower(id, Bytes::ZERO);
        let rest = used.saturating_sub(turn.ledger.held_by_tenant(holder));
        let is_last = self
            .iter()
            .all(|(other, lease)| other == id || lease.holder != holder);
        match self.leases.get_mut(&id) {
            Some(lease) if is_last && rest > Bytes::ZERO => {
                lease.phase = Phase::Residual {
                    next_poll: turn.now + VERIFY_POLL,
                    unreadable_since: None,
                };
                self.beyond.remove(holder);
                turn.effects.push(Effect::Moved);
            }
            _ => {
                self.close(id, turn);
                if rest == Bytes::ZERO {
                    self.forget_if_gone(holder, turn.ledger);
                }
            }
        }
        (held, rest)
    }

    fn forget_if_gone(&mut self, holder: &str, ledger: &mut Ledger) {
        if self.has_no_lease(holder) {
            self.forget_holder(holder, ledger);
        }
    }

    pub(super) fn forget_holder(&mut self, holder: &str, ledger: &mut Ledger) {
        self.drop_residual(holder, ledger);
        ledger.forget(holder);
    }
}
