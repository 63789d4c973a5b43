//! Simulated tenants: most are honest, some are not.

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
    /// Uses no more than it holds, and shrinks when asked.
    Honest,
    /// Falsely reports compliance.
    Misreporting,
    /// Comes down long after the deadline.
    Slow,
    /// Does not reply, does not come down, does not renew.
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
    /// Its allowance: the lease, or its target.
    pub(crate) may_use: Bytes,
    /// Its process, in histories where several may share one name.
    pub(crate) pid: Option<u32>,
    /// Whether it calls again while a call of it is pending, and shrinks its lease while it is asked to come down.
    pub(crate) hasty: bool,
    /// Pending requests.
    pub(crate) asking: BTreeSet<Ticket>,
    pub(crate) alive: bool,
    /// The lease with a target that it has not received because its stream is broken: it continues with its previous
    /// allowance.
    pub(crate) deaf_to: Option<LeaseId>,
    /// Whether its lease has ended without its knowledge.
    pub(crate) unheard_end: bool,
    /// End of the last granted term: from then on it does not rely on its lease.
    pub(crate) term_ends: Timestamp,
    /// Its hold stream, and the lease of the stream.
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

    /// Its identity as a caller.
    pub(crate) fn peer(&self) -> Peer {
        Peer {
            uid: self.uid,
            pid: self.pid,
            ..Peer::default()
        }
    }

    /// Whether its lease always covers its use.
    pub(crate) fn is_honest(&self) -> bool {
        self.manners == Manners::Honest && self.alive
    }

    /// Whether it still relies on its lease: it has one as far as it knows, and its term is not over.
    pub(crate) fn relies(&self, now: Timestamp) -> bool {
        self.alive && self.lease.is_some() && now < self.term_ends
    }

    /// Whether a notification has not reached it.
    pub(crate) fn is_deaf(&self) -> bool {
        self.deaf_to.is_some_and(|id| self.is_lease(id))
    }

    pub(crate) fn is_lease(&self, id: LeaseId) -> bool {
        self.lease.as_ref().is_some_and(|lease| lease.id == id)
    }

    /// Its hold stream for a lease; a new one has no target.
    pub(crate) fn stream_of(&mut self, lease: LeaseId) -> &mut SentTarget {
        if self.stream.0 != Some(lease) {
            self.stream = (Some(lease), SentTarget::default());
        }
        &mut self.stream.1
    }

    /// Uses a random part of its allowance, or more.
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

    /// Its process dies.
    pub(crate) fn die(&mut self) {
        self.used = Bytes::ZERO;
        self.may_use = Bytes::ZERO;
        self.unheard_end = false;
        self.alive = false;
    }

    /// Another process of the same name starts.
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
