//! State, and the actions of the present call: what each handler of an event and each order works with.

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

/// One call of the arbiter: the state that it changes, which it stands for, and the actions that it has decided on.
#[derive(Debug)]
pub(super) struct Context<'a> {
    pub(super) state: &'a mut State,
    pub(super) machine: &'a mut Machine,
    pub(super) record: &'a mut Record,
    /// Actions, in order.
    pub(super) out: Vec<Action>,
}

/// The machine as last seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Machine {
    #[serde(default)]
    pub(super) page_pool: PagePool,
    #[serde(default)]
    pub(super) reboot: RebootAdvice,
}

/// Decisions and changes so far, as far as later calls need them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// The last shed under pressure.
    pub(super) relieved_at: Option<Timestamp>,
    pub(super) stats: Totals,
    /// Figures of what was last decided about a subject, so that it is not decided again with each sample.
    pub(super) said: BTreeMap<String, Vec<Bytes>>,
    /// The request that the queue waits for, of which it was last decided that it waits.
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

    /// Decides about a state that lasts, once for each change of its `figures` that is worth a line: by a sixteenth and
    /// 1 MiB at least, or from or to nothing. Our choice: what others use wavers, and a wait may last for hours.
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

    /// The instant after `span`, later than now whatever a setting says: a deadline that is due at once would go unserved.
    pub(super) fn later(&self, span: Duration) -> Timestamp {
        self.now + span.max(TICK)
    }

    /// Changes the table, and applies what follows from that, in order.
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
    pub(super) fn set_target(&mut self, id: LeaseId, bytes: Bytes, reason: &ReclaimReason) {
        let deadline = self.now + self.target_span(id);
        let lease = self.leases.get(id);
        // A worker cannot answer: what is measured after its notification counts.
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

    /// A holder that itself wanted less than `max` has changed its mind before that was measured.
    pub(super) fn forget_wish(&mut self, id: LeaseId, max: Bytes) {
        let lease = self.leases.get(id);
        if lease.is_some_and(|lease| lease.wants_less_than(max)) {
            self.state.leases.end_revocation(id, &mut self.state.ledger);
        }
    }

    /// Denies what waits for a lease or a worker that is gone.
    pub(super) fn forget_wants_of(&mut self, lease: LeaseId, denial: &Denial) {
        for want in self.queue.take(|want| want.lease == lease) {
            self.deny_all(want.tickets, denial);
        }
    }

    /// Refuses what waits to make a lease larger that is asked to come down to `target`, as a call would be that comes
    /// now.
    fn refuse_growth_of(&mut self, lease: LeaseId, target: Bytes) {
        let grows = |want: &Want| matches!(want.kind, WantKind::Grow { .. });
        let refused = self.queue.take(|want| want.lease == lease && grows(want));
        for want in refused {
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

    pub(super) fn note_level(&mut self, change: Option<LevelChange>) {
        self.out.extend(change.map(Action::LevelChanged));
    }

    /// Notes that `credited` came off the book, by a shed of ours or otherwise, and that `freed` of it had been used.
    pub(super) fn note_reclaimed(&mut self, credited: Bytes, freed: Bytes, by_shed: bool) {
        self.changed_at = self.now;
        self.machine.page_pool.released(freed, self.now);
        if by_shed {
            self.state.dwell.begin(self.state.now);
            self.record.stats.sheds = self.record.stats.sheds.saturating_add(1);
            self.record.stats.shed_bytes = self.record.stats.shed_bytes.saturating_add(credited);
        }
    }

    /// Decides what is also the answer to the caller.
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

/// When a denied request may be worth another try.
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

/// Why a lease under a target does not become larger than that.
pub(super) fn above_target(tenant: &str, max: Bytes, target: Bytes) -> Denial {
    Denial::invalid(tenant, "max", &max, Problem::AboveTarget { target })
}

/// The resolution of [`Timestamp`].
const TICK: Duration = Duration::from_micros(1);
