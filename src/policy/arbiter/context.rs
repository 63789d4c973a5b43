//! State and pending actions of one call, passed to every handler and order.

use std::{
    collections::BTreeMap,
    ops::{Deref, DerefMut},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    admission::{Want, WantKind},
    decision::Decision,
    denial::{Denial, Problem},
    event::{Action, Answer, Done},
    lease::{Class, LeaseId, LeaseKind, Ticket},
    lease_table::{Effect, Lease, LeaseTable, Lower, Turn},
    page_pool::PagePool,
    pressure::LevelChange,
    reason::ReclaimReason,
    reboot::RebootAdvice,
    snapshot::Totals,
    state::State,
};
use cotenant_units::{Bytes, Timestamp};

/// One call of the arbiter: the state, to which it dereferences, and the actions decided so far.
#[derive(Debug)]
pub(super) struct Context<'a> {
    pub(super) state: &'a mut State,
    pub(super) machine: &'a mut Machine,
    pub(super) record: &'a mut Record,
    /// Actions, in order.
    pub(super) out: Vec<Action>,
}

/// Last known state of the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Machine {
    #[serde(default)]
    pub(super) page_pool: PagePool,
    #[serde(default)]
    pub(super) reboot: RebootAdvice,
}

/// Past decisions and changes that later calls need.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// Time of the last shed under pressure.
    pub(super) relieved_at: Option<Timestamp>,
    pub(super) stats: Totals,
    /// Figures of the last decision on each subject, so that it is not repeated with each sample.
    pub(super) said: BTreeMap<String, Vec<Bytes>>,
    /// Request at the head of the queue whose wait was last logged.
    pub(super) first_waits: Option<LeaseId>,
}

impl Deref for Context<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.state
    }
}

impl DerefMut for Context<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state
    }
}

impl Context<'_> {
    pub(super) fn answer(&mut self, ticket: Ticket, answer: Answer) {
        self.out.push(Action::Answer { ticket, answer });
    }

    pub(super) fn done(&mut self, ticket: Ticket, done: Done) {
        self.answer(ticket, Answer::Done { done });
    }

    pub(super) fn deny(&mut self, ticket: Ticket, denial: Denial) {
        let retry_after = retry_after(self.state, &denial);
        self.answer(
            ticket,
            Answer::Denied {
                denial,
                retry_after,
            },
        );
    }

    pub(super) fn deny_all(&mut self, tickets: Vec<Ticket>, denial: &Denial) {
        for ticket in tickets {
            self.deny(ticket, denial.clone());
        }
    }

    pub(super) fn decide(&mut self, decision: impl Into<Decision>) {
        let decision = decision.into();
        self.out.push(Action::Decided { decision });
    }

    /// Logs a decision about a lasting state only if its `figures` have changed by a sixteenth and at least 1 MiB, or
    /// from or to zero. Our choice: the use of others fluctuates, and a wait may last for hours.
    pub(super) fn decide_once(
        &mut self,
        subject: &str,
        figures: &[Bytes],
        decision: impl Into<Decision>,
    ) {
        let is_news = |(before, now): (&Bytes, &Bytes)| {
            let differs = before.max(now).saturating_sub(*before.min(now));
            differs >= Bytes::new(before.get() / 16).max(Bytes::from_mib(1))
                || (before != now && *before.min(now) == Bytes::ZERO)
        };
        let said = self.record.said.get(subject);
        if said
            .is_none_or(|said| said.len() != figures.len() || said.iter().zip(figures).any(is_news))
        {
            self.record
                .said
                .insert(subject.to_owned(), figures.to_vec());
            self.decide(decision);
        }
    }

    /// Returns the instant after `span`, later than now for any setting: a deadline due at once would go unserved.
    pub(super) fn later(&self, span: Duration) -> Timestamp {
        self.now + span.max(TICK)
    }

    /// Changes the table, and applies the effects in order.
    pub(super) fn with_leases<T>(
        &mut self,
        change: impl FnOnce(&mut LeaseTable, &mut Turn<'_>) -> T,
    ) -> T {
        let mut turn = Turn {
            now: self.now,
            shed: self.params.shed,
            rarely: self.params.pressure.sample_max,
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
                self.changed_at = self.now;
                self.pressure.trend.granted(more);
            }
            Effect::Moved => self.changed_at = self.now,
            Effect::Reclaimed { freed, by_shed } => self.note_reclaimed(freed, freed, by_shed),
            Effect::Deny { lease, denial } => self.forget_wants_of(lease, &denial),
        }
    }

    /// Books a new lease. Returns whether it fits.
    pub(super) fn grant(&mut self, id: LeaseId, bytes: Bytes, lease: Lease) -> bool {
        self.with_leases(|leases, turn| leases.grant((id, lease), None, bytes, turn))
    }

    /// Raises a lease to `bytes`, if that fits.
    pub(super) fn grow_lease(&mut self, id: LeaseId, bytes: Bytes) -> bool {
        self.with_leases(|_, turn| LeaseTable::raise(id, bytes, turn))
    }

    /// Removes a lease, and denies requests that wait for it. Returns the bytes held.
    pub(super) fn drop_lease(&mut self, id: LeaseId) -> Bytes {
        self.with_leases(|leases, turn| leases.remove(id, turn))
    }

    pub(super) fn begin_ending(&mut self, id: LeaseId, claimable: Bytes) {
        self.with_leases(|leases, turn| leases.begin_ending(id, claimable, turn));
    }

    /// Sets a target of `bytes` for a holder.
    pub(super) fn set_target(&mut self, id: LeaseId, bytes: Bytes, reason: &ReclaimReason) {
        let deadline = self.now + self.target_span(id);
        let lease = self.leases.get(id);
        // A worker cannot answer: measurements after its notification count.
        let is_worker = lease.is_some_and(|lease| lease.kind == LeaseKind::Worker);
        let lower = Lower {
            who: id,
            to: bytes,
            had: None,
            deadline,
            answered_at: is_worker.then_some(self.now),
        };
        let nonce = self.with_leases(|leases, turn| leases.begin_revocation(&lower, false, turn));
        self.refuse_growth_of(id, bytes);
        self.out.push(Action::SetTarget {
            lease: id,
            nonce,
            bytes,
            deadline,
            reason: reason.clone(),
        });
    }

    /// Ends a holder's own reduction to less than `max`, before it was measured.
    pub(super) fn forget_wish(&mut self, id: LeaseId, max: Bytes) {
        let lease = self.leases.get(id);
        if lease.is_some_and(|lease| lease.wants_less_than(max)) {
            self.state.leases.end_revocation(id, &mut self.state.ledger);
        }
    }

    /// Denies requests that wait for a lease or a worker that is gone.
    pub(super) fn forget_wants_of(&mut self, lease: LeaseId, denial: &Denial) {
        for want in self.queue.take(|want| want.lease == lease) {
            self.deny_all(want.tickets, denial);
        }
    }

    /// Denies waiting requests to grow a lease that is now under a target, as a new request would be.
    fn refuse_growth_of(&mut self, lease: LeaseId, target: Bytes) {
        let grows = |want: &Want| matches!(want.kind, WantKind::Grow { .. });
        let refused = self.queue.take(|want| want.lease == lease && grows(want));
        for want in refused {
            if let WantKind::Grow { max, .. } = want.kind {
                self.deny_all(want.tickets, &above_target(&want.tenant, max, target));
            }
        }
    }

    /// Queues a request of the supervisor itself.
    pub(super) fn queue_own(&mut self, tenant: &str, class: Class, lease: LeaseId, kind: WantKind) {
        self.state
            .queue
            .insert(Want::ours(tenant, class, lease, kind, self.state.now));
    }

    pub(super) fn note_level(&mut self, change: Option<LevelChange>) {
        self.out.extend(change.map(Action::LevelChanged));
    }

    /// Notes that `credited` bytes were removed from the ledger, by a shed or otherwise, of which `freed` had been in
    /// use.
    pub(super) fn note_reclaimed(&mut self, credited: Bytes, freed: Bytes, by_shed: bool) {
        self.changed_at = self.now;
        self.machine.page_pool.released(freed, self.now);
        if by_shed {
            self.state.dwell.begin(self.state.now);
            self.record.stats.sheds = self.record.stats.sheds.saturating_add(1);
            self.record.stats.shed_bytes = self.record.stats.shed_bytes.saturating_add(credited);
        }
    }

    /// Logs a decision that is also the answer to the caller.
    pub(super) fn decide_for(&mut self, ticket: Ticket, decision: impl Into<Decision>) {
        let decision = decision.into();
        self.decide(decision.clone());
        self.done(ticket, Done::Decided(decision));
    }

    pub(super) fn answer_lease(&mut self, ticket: Ticket, id: LeaseId) {
        if let Some(lease) = self.lease_view(id) {
            self.answer(ticket, Answer::Lease { lease });
        }
    }
}

/// Returns the wait after which a denied request may succeed.
fn retry_after(state: &State, denial: &Denial) -> Option<Duration> {
    match denial {
        Denial::InsufficientMemory {
            asked,
            free,
            reclaimable,
            ..
        } => {
            if free.saturating_add(*reclaimable) >= *asked {
                Some(state.params.shed.settle)
            } else {
                Some(state.params.pressure.dwell)
            }
        }
        Denial::StaleSample { .. } => Some(state.params.pressure.sample_max),
        Denial::PressureHigh { .. } => Some(state.dwell.base()),
        Denial::QuotaExceeded { .. } => Some(state.params.shed.settle),
        Denial::NotGrowing { wait } => Some(wait.retry_after().unwrap_or(state.dwell.base())),
        _ => None,
    }
}

/// Returns the denial of growth beyond a target in force.
pub(super) fn above_target(tenant: &str, max: Bytes, target: Bytes) -> Denial {
    Denial::invalid(tenant, "max", &max, Problem::AboveTarget { target })
}

/// The resolution of [`Timestamp`].
const TICK: Duration = Duration::from_micros(1);
