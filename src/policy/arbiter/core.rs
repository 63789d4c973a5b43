//! State of the arbiter, the actions of the present call, and what follows from a change of the lease table.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    policy::{
        admission::{Want, WantKind},
        deadline::Deadline,
        decision::Decision,
        denial::{Denial, Problem},
        event::{Action, Answer, Done},
        lease::{Class, LeaseId, LeaseKind, LeaseView, Ticket},
        lease_table::{Effect, Lease, LeaseTable, Turn},
        page_pool::PagePool,
        params::{Params, ParamsError},
        pressure::Sample,
        reason::ReclaimReason,
        reboot::RebootAdvice,
        state::State,
    },
    units::{Bytes, Timestamp},
};

/// The one state machine that the daemon talks to: takes what happened, and says what must be done about it.
///
/// ```
/// use cotenant::policy::{Arbiter, event::{Action, Event}, params::{Params, Scope}, pressure::{MemoryReading, Sample}};
/// use cotenant::units::{Bytes, Timestamp};
///
/// let params = Params::for_budget(Bytes::from_gib(8), Bytes::from_gib(1), Scope::Machine);
/// let mut arbiter = Arbiter::new(params)?;
/// let (mem_total, mem_available) = (Bytes::from_gib(8), Bytes::from_gib(7));
/// let memory = MemoryReading { mem_total, mem_available, ..MemoryReading::default() };
/// let sample = Sample { memory, ..Sample::default() };
/// let actions = arbiter.handle(Timestamp::START, Event::Sampled(sample));
/// assert!(matches!(actions[..], [Action::SampleAfter { .. }]));
/// # Ok::<(), cotenant::policy::params::ParamsError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arbiter {
    #[serde(flatten)]
    pub(super) state: State,
    #[serde(default)]
    pub(super) page_pool: PagePool,
    #[serde(default)]
    pub(super) reboot: RebootAdvice,
    pub(super) sample: Option<Sample>,
    /// The last shed under pressure.
    pub(super) relieved_at: Option<Timestamp>,
    pub(super) stats: Stats,
    /// Changes of what outlives this run, besides those that the ledger and the leases count.
    pub(super) noted: u64,
    /// Figures of what was last decided about a subject, so that it is not decided again with each sample.
    pub(super) said: BTreeMap<String, String>,
    /// Until when there is nothing to do by the clock; `None` when that is not known.
    #[serde(default)]
    pub(super) idle_until: Option<Timestamp>,
    /// Actions of the present call.
    #[serde(skip)]
    pub(super) out: Vec<Action>,
}

/// Sums for the snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stats {
    pub(super) sheds: u64,
    pub(super) shed_bytes: Bytes,
    pub(super) regrown_bytes: Bytes,
}

impl Arbiter {
    /// An arbiter with an empty book.
    ///
    /// # Errors
    /// All faults of `params`.
    pub fn new(params: Params) -> Result<Self, ParamsError> {
        Ok(Self {
            state: State::new(params)?,
            page_pool: PagePool::default(),
            reboot: RebootAdvice::default(),
            sample: None,
            relieved_at: None,
            stats: Stats::default(),
            noted: 0,
            said: BTreeMap::new(),
            idle_until: None,
            out: Vec::new(),
        })
    }

    /// The settings.
    #[must_use]
    pub const fn params(&self) -> &Params {
        &self.state.params
    }

    pub(super) fn answer(&mut self, ticket: Ticket, answer: Answer) {
        self.out.push(Action::Answer { ticket, answer });
    }

    pub(super) fn done(&mut self, ticket: Ticket, done: Done) {
        self.answer(ticket, Answer::Done { done });
    }

    pub(super) fn deny(&mut self, ticket: Ticket, denial: Denial) {
        let retry_after = self.retry_after(&denial);
        self.answer(ticket, Answer::Denied { denial, retry_after });
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

    /// Decides about a state that lasts, once for each change of its `figures` as they are shown: a byte more is no
    /// news.
    pub(super) fn decide_once(&mut self, subject: &str, figures: &[Bytes], decision: impl Into<Decision>) {
        let shown: Vec<String> = figures.iter().map(ToString::to_string).collect();
        let shown = shown.join(", ");
        if self.said.get(subject) != Some(&shown) {
            self.said.insert(subject.to_owned(), shown);
            self.decide(decision);
        }
    }

    /// The instant after `span`, later than now whatever a setting says: a deadline that is due at once would go unserved.
    pub(super) fn later(&self, span: Duration) -> Timestamp {
        Deadline::after(self.state.now, span).at()
    }

    /// When a denied request may be worth another try.
    fn retry_after(&self, denial: &Denial) -> Option<Duration> {
        let state = &self.state;
        match denial {
            Denial::InsufficientMemory { asked, free, reclaimable, .. } => {
                if free.saturating_add(*reclaimable) >= *asked {
                    Some(state.params.shed.settle)
                } else {
                    Some(state.params.pressure.dwell)
                }
            }
            Denial::StaleSample { .. } => Some(state.params.pressure.sample_max),
            Denial::PressureHigh { .. } => Some(state.params.pressure.dwell),
            Denial::QuotaExceeded { .. } => Some(state.params.shed.settle),
            Denial::NotGrowing { wait } => Some(wait.retry_after().unwrap_or(state.params.pressure.dwell)),
            _ => None,
        }
    }
}

impl Arbiter {
    /// Changes the table, and applies what follows from that, in order.
    pub(super) fn with_leases<T>(&mut self, change: impl FnOnce(&mut LeaseTable, &mut Turn<'_>) -> T) -> T {
        let mut turn = Turn { now: self.state.now, ledger: &mut self.state.ledger, effects: Vec::new() };
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
        let span = class.map_or(self.state.params.shed.settle, |class| self.state.params.shed.deadlines.of(class));
        let deadline = self.state.now + span;
        let nonce = self.with_leases(|leases, turn| leases.begin_revocation(id, bytes, deadline, false, turn));
        self.refuse_growth_of(id, bytes);
        self.out.push(Action::SetTarget { lease: id, nonce, bytes, deadline, reason });
    }

    /// Denies what waits for a lease or a worker that is gone.
    pub(super) fn forget_wants_of(&mut self, lease: LeaseId, denial: &Denial) {
        for want in self.state.queue.take_for(lease) {
            self.deny_all(want.tickets, denial);
        }
    }

    /// Refuses what waits to make a lease larger that is asked to come down to `target`, as a call would be that comes
    /// now.
    fn refuse_growth_of(&mut self, lease: LeaseId, target: Bytes) {
        for want in self.state.queue.take_growth_of(lease) {
            if let WantKind::Grow { max, .. } = want.kind {
                self.deny_all(want.tickets, &above_target(&want.tenant, max, target));
            }
        }
    }

    /// Queues something that we want ourselves.
    pub(super) fn queue_own(&mut self, tenant: &str, class: Class, lease: LeaseId, kind: WantKind) {
        self.state.queue.insert(Want::ours(tenant, class, lease, kind, self.state.now));
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
        let state = &self.state;
        let mut view = state.leases.view(id, &state.ledger)?;
        if view.kind == LeaseKind::Engine {
            // Memory that no token has touched is held, and not used.
            let untouched = state.engine.kv.untouched;
            view.memory.used = view.memory.used.map(|used| used.saturating_sub(untouched));
        }
        Some(view)
    }
}

/// Why a lease under a target does not become larger than that.
pub(super) fn above_target(tenant: &str, max: Bytes, target: Bytes) -> Denial {
    Denial::invalid(tenant, "max", &max, Problem::AboveTarget { target })
}
