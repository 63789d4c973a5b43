//! State of the arbiter, and the actions of the present call.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    policy::{
        deadline::Deadline,
        decision::Decision,
        denial::Denial,
        event::{Action, Answer, Done},
        lease::Ticket,
        page_pool::PagePool,
        params::{Params, ParamsError},
        pressure::Sample,
        state::State,
    },
    units::{Bytes, Timestamp},
};

/// The one state machine that the daemon talks to: takes what happened, and says what must be done about it.
///
/// ```
/// use cotenant::policy::{Arbiter, event::{Action, Event}, params::{Params, Scope}, pressure::Sample};
/// use cotenant::units::{Bytes, Timestamp};
///
/// let params = Params::for_budget(Bytes::from_gib(8), Bytes::from_gib(1), Scope::Machine);
/// let mut arbiter = Arbiter::new(params)?;
/// let sample = Sample { mem_total: Bytes::from_gib(8), mem_available: Bytes::from_gib(7), ..Sample::default() };
/// let actions = arbiter.handle(Timestamp::START, Event::Sampled(sample));
/// assert!(matches!(actions[..], [Action::SampleAfter { .. }]));
/// # Ok::<(), cotenant::policy::params::ParamsError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arbiter {
    #[serde(flatten)]
    pub(super) state: State,
    pub(super) sample: Option<Sample>,
    #[serde(default)]
    pub(super) page_pool: PagePool,
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
            sample: None,
            page_pool: PagePool::default(),
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

    /// Decides about a state that lasts, once for each change of its `figures` as they are shown: a byte more is no news.
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
        match denial {
            Denial::InsufficientMemory {
                asked,
                free,
                reclaimable,
                ..
            } => {
                if free.saturating_add(*reclaimable) >= *asked {
                    Some(self.state.params.shed.settle)
                } else {
                    Some(self.state.params.pressure.dwell)
                }
            }
            Denial::StaleSample { .. } => Some(self.state.params.pressure.sample_max),
            Denial::PressureHigh { .. } => Some(self.state.params.pressure.dwell),
            Denial::QuotaExceeded { .. } => Some(self.state.params.shed.settle),
            Denial::NotGrowing { wait } => Some(wait.retry_after().unwrap_or(self.state.params.pressure.dwell)),
            _ => None,
        }
    }
}
