//! Effects of the lease table: what is answered, denied, credited and measured after a change of it.

use super::core::Arbiter;
use crate::{
    policy::{
        admission::{Want, WantKind},
        denial::{Denial, Problem},
        event::{Action, Answer},
        lease::{Class, LeaseId, LeaseKind, LeaseView, Ticket},
        lease_table::{Effect, Lease, LeaseTable, Turn},
        reason::ReclaimReason,
    },
    units::Bytes,
};

impl Arbiter {
    /// Changes the table, and applies what follows from that, in order.
    pub(super) fn with_leases<T>(&mut self, change: impl FnOnce(&mut LeaseTable, &mut Turn<'_>) -> T) -> T {
        let mut turn = Turn {
            now: self.state.now,
            ledger: &mut self.state.ledger,
            effects: Vec::new(),
        };
        let outcome = change(&mut self.state.leases, &mut turn);
        for effect in turn.effects {
            self.apply(effect);
        }
        outcome
    }

    fn apply(&mut self, effect: Effect) {
        match effect {
            Effect::Act(action) => self.out.push(action),
            Effect::Granted { more } => {
                self.state.changed_at = self.state.now;
                self.state.pressure.expect(more);
            }
            Effect::Moved => self.state.changed_at = self.state.now,
            Effect::Reclaimed { freed, by_shed } => self.note_reclaimed(freed, by_shed),
            Effect::Deny { lease, denial } => self.forget_wants_of(lease, &denial),
        }
    }

    /// Books a new lease. Returns whether it fits.
    pub(super) fn grant(&mut self, id: LeaseId, bytes: Bytes, lease: Lease) -> bool {
        self.with_leases(|leases, turn| leases.grant((id, lease), None, bytes, turn))
    }

    /// Raises what a lease holds, if that fits.
    pub(super) fn grow_lease(&mut self, id: LeaseId, bytes: Bytes) -> bool {
        self.with_leases(|_, turn| LeaseTable::raise(id, bytes, turn))
    }

    /// Takes a lease off the book, with what waits for it.
    pub(super) fn drop_lease(&mut self, id: LeaseId) -> Bytes {
        self.with_leases(|leases, turn| leases.remove(id, turn))
    }

    pub(super) fn begin_ending(&mut self, id: LeaseId, claimable: Bytes) {
        self.with_leases(|leases, turn| leases.begin_ending(id, claimable, turn));
    }

    /// Asks a holder to come down to `bytes`.
    pub(super) fn set_target(&mut self, id: LeaseId, bytes: Bytes, reason: ReclaimReason) {
        let class = self.state.leases.get(id).map(|lease| lease.class);
        let span = class.map_or(self.state.params.shed.settle, |class| {
            self.state.params.shed.deadlines.of(class)
        });
        let deadline = self.state.now + span;
        let nonce = self.with_leases(|leases, turn| leases.begin_revocation(id, bytes, deadline, false, turn));
        self.refuse_growth_of(id, bytes);
        self.out.push(Action::SetTarget {
            lease: id,
            nonce,
            bytes,
            deadline,
            reason,
        });
    }

    /// Denies what waits for a lease or a worker that is gone.
    pub(super) fn forget_wants_of(&mut self, lease: LeaseId, denial: &Denial) {
        for want in self.state.queue.take_for(lease) {
            self.deny_all(want.tickets, denial);
        }
    }

    /// Refuses what waits to make a lease larger that is asked to come down to `target`, as a call would be that comes now.
    fn refuse_growth_of(&mut self, lease: LeaseId, target: Bytes) {
        for want in self.state.queue.take_growth_of(lease) {
            if let WantKind::Grow { max, .. } = want.kind {
                self.deny_all(want.tickets, &above_target(&want.tenant, max, target));
            }
        }
    }

    /// Queues something that we want ourselves.
    pub(super) fn queue_own(&mut self, tenant: &str, class: Class, lease: LeaseId, kind: WantKind) {
        self.state
            .queue
            .insert(Want::ours(tenant, class, lease, kind, self.state.now));
    }

    /// Notes that memory came back, by a shed of ours or otherwise.
    pub(super) fn note_reclaimed(&mut self, freed: Bytes, by_shed: bool) {
        self.state.changed_at = self.state.now;
        self.page_pool.released(freed, self.state.now);
        if by_shed {
            self.state.dwell.begin(self.state.now);
            self.stats.sheds = self.stats.sheds.saturating_add(1);
            self.stats.shed_bytes = self.stats.shed_bytes.saturating_add(freed);
        }
    }

    pub(super) fn answer_lease(&mut self, ticket: Ticket, id: LeaseId) {
        if let Some(lease) = self.lease_view(id) {
            self.answer(ticket, Answer::Lease { lease });
        }
    }

    pub(super) fn lease_view(&self, id: LeaseId) -> Option<LeaseView> {
        let mut view = self.state.leases.view(id, &self.state.ledger)?;
        if view.kind == LeaseKind::Engine {
            // What no token has touched is held, and takes no memory.
            let untouched = self.state.engine.kv.untouched;
            view.used = view.used.map(|used| used.saturating_sub(untouched));
        }
        Some(view)
    }
}

/// Why a lease under a target does not become larger than that.
pub(super) fn above_target(tenant: &str, max: Bytes, target: Bytes) -> Denial {
    Denial::invalid(tenant, "max", &max, Problem::AboveTarget { target })
}
