//! Tenants of the world: most are honest, some are not.

use std::collections::BTreeSet;

use cotenant::{
    policy::lease::{LeaseId, LeaseView, Peer, Ticket},
    rpc::target::SentTarget,
    units::{Bytes, Timestamp},
};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::faults::Faults;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manners {
    /// Uses no more than it holds, and comes down when asked.
    Honest,
    /// Says that it has come down, and has not.
    Misreporting,
    /// Comes down long after the deadline.
    Slow,
    /// Does not answer, does not come down, does not renew.
    Silent,
    /// Uses more than it holds.
    Greedy,
}

#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) manners: Manners,
    pub(crate) measurable: bool,
    pub(crate) used: Bytes,
    pub(crate) lease: Option<LeaseView>,
    /// What it may use: the lease, or its target.
    pub(crate) may_use: Bytes,
    /// Its process, in histories where several may have one name.
    pub(crate) pid: Option<u32>,
    /// Calls again while a call of it waits, and makes its lease smaller while it is asked to come down.
    pub(crate) hasty: bool,
    /// Requests under way.
    pub(crate) asking: BTreeSet<Ticket>,
    pub(crate) alive: bool,
    /// The lease whose target it has not heard of, since its stream is broken: it goes on with what it had.
    pub(crate) deaf_to: Option<LeaseId>,
    /// Its lease has ended, and it has not heard of that.
    pub(crate) unheard_end: bool,
    /// When the term ends that it was granted last: from then on it does not rely on its lease.
    pub(crate) term_ends: Timestamp,
    /// Its hold stream, and for which lease it is.
    stream: (Option<LeaseId>, SentTarget),
    pub(crate) requests: u32,
}

impl Tenant {
    pub(crate) fn new(index: usize, rng: &mut ChaCha8Rng, faults: &Faults) -> Self {
        let mut kinds = vec![Manners::Honest, Manners::Honest];
        for (exists, kind) in [
            (faults.lying_tenants.exists(), Manners::Misreporting),
            (faults.slow_tenants.exists(), Manners::Slow),
            (faults.silent_tenants.exists(), Manners::Silent),
            (faults.greedy_tenants.exists(), Manners::Greedy),
        ] {
            if exists {
                kinds.push(kind);
            }
        }
        Self {
            name: format!("tenant{index}"),
            uid: 1000 + rng.random_range(0..3),
            manners: kinds[rng.random_range(0..kinds.len())],
            measurable: !(faults.unmeasurable_tenants.strikes(rng, 0.4)),
            used: Bytes::ZERO,
            lease: None,
            may_use: Bytes::ZERO,
            pid: None,
            hasty: false,
            asking: BTreeSet::new(),
            alive: true,
            deaf_to: None,
            unheard_end: false,
            term_ends: Timestamp::START,
            stream: (None, SentTarget::default()),
            requests: 0,
        }
    }

    /// As whom it calls.
    pub(crate) fn peer(&self) -> Peer {
        Peer {
            uid: self.uid,
            pid: self.pid,
            ..Peer::default()
        }
    }

    /// Whether its use is always covered by what it holds.
    pub(crate) fn is_honest(&self) -> bool {
        self.manners == Manners::Honest && self.alive
    }

    /// Whether it still relies on its lease: it has one as far as it knows, and its term is not over.
    pub(crate) fn relies(&self, now: Timestamp) -> bool {
        self.alive && self.lease.is_some() && now < self.term_ends
    }

    /// Whether it has been notified something that it has not heard.
    pub(crate) fn is_deaf(&self) -> bool {
        self.deaf_to.is_some_and(|id| self.is_lease(id))
    }

    pub(crate) fn is_lease(&self, id: LeaseId) -> bool {
        self.lease.as_ref().is_some_and(|lease| lease.id == id)
    }

    /// Its hold stream for a lease; a new one knows of no target.
    pub(crate) fn stream_of(&mut self, lease: LeaseId) -> &mut SentTarget {
        if self.stream.0 != Some(lease) {
            self.stream = (Some(lease), SentTarget::default());
        }
        &mut self.stream.1
    }

    /// Uses a random part of what it may, or of more.
    pub(crate) fn use_memory(&mut self, rng: &mut ChaCha8Rng) {
        let may = self.may_use.get();
        let most = if self.manners == Manners::Greedy {
            may + may / 2
        } else {
            may
        };
        if most > 0 {
            self.used = Bytes::new(rng.random_range(most / 2..=most));
        }
    }

    pub(crate) fn come_down(&mut self, to: Bytes) {
        self.used = self.used.min(to);
    }

    /// Its process is gone.
    pub(crate) fn die(&mut self) {
        self.used = Bytes::ZERO;
        self.may_use = Bytes::ZERO;
        self.unheard_end = false;
        self.alive = false;
    }

    /// Another process of the same name begins.
    pub(crate) fn begin_again(&mut self) {
        self.alive = true;
        self.lease = None;
        self.unheard_end = false;
        self.asking.clear();
        self.pid = self.pid.map(|pid| pid + 100);
        self.used = Bytes::ZERO;
        self.may_use = Bytes::ZERO;
    }
}
