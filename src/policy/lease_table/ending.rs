//! Ends of leases: released, expired or with their holder; measured, and off the book.

use std::time::Duration;

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
    /// The process of a holder is gone: all of its leases end in one step, for it may have as many as its user may.
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

    /// Begins to end a lease: it cannot be renewed any more, and its bytes stay on the book until a reading shows where
    /// they are. `claimable` is what its holder may still take as far as it knows: zero if it knows of the end.
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

    /// The holder acknowledges the end of its lease, or its user or an operator does on its behalf. Returns whether that
    /// was still open.
    ///
    /// # Errors
    /// If it is, and the peer is neither of them.
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
        // Its use before the acknowledgement shows nothing.
        (*since, *deadline, *next_poll, *open) =
            (now, now + turn.shed.verify_timeout, now + VERIFY_POLL, None);
        self.measure(id, turn);
        Ok(true)
    }

    /// A sample of the scope, newer than the end of an unmeasurable lease, shows what is left of it as unmanaged; so it
    /// does with residual use that cannot be read.
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
                .map_or(Duration::ZERO, |request| request.term);
            turn.act(Action::EndLease {
                lease: self.name_of(id),
                end: LeaseEnd::Expired { term },
            });
            self.begin_ending(id, Bytes::ZERO, turn);
        }
    }

    /// Closes what could not be measured in time, and asks for the readings that are due.
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
                    // Nothing is to be seen before its term is over, but that it uses less.
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

    /// Takes a lease that has ended off the book, by a reading of its holder.
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

    /// Takes what its holder may not take any more off a lease that has ended; what is used of it is unaccounted.
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

    /// No reading of an ended lease was had in time: its memory is unaccounted, and never credited.
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

    /// Takes an ended lease off the book.
    fn close(&mut self, id: LeaseId, turn: &mut Turn<'_>) -> Bytes {
        turn.effects.push(Effect::Moved);
        self.remove(id, turn)
    }

    /// Takes what an ended lease holds off the book. Its holder is measured on while it uses more than its other leases hold.
    /// Returns what it held, and how much that is.
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
