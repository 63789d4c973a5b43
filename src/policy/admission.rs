//! Admission queue with ageing and per-user shares.
//!
//! Requests are ordered by class, then by arrival. The order is strict: a request that does not fit blocks those behind
//! it, so that none is overtaken indefinitely, but no longer than until its deadline. Worker starts wait in the same
//! queue without a deadline and block only the space that they need. A request that can never be satisfied
//! ([`reach`](super::reach)), or is not admitted under pressure, does not block the queue.
//!
//! To prevent starvation by more urgent requests, a waiting request rises by one class per half of `wait_max`, up to
//! [`Class::Interactive`] but never to realtime audio. At that rank it has its turn: freed memory is reserved for it,
//! and a worker's start or growth reclaims engine memory above the floor. A turn lasts a sixth of `wait_max`; then
//! ageing restarts, so that the request starves none behind it either.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    decision::AdmissionDecision,
    denial::Quota,
    lease::{Class, LeaseId, LeaseRequest, Ticket},
    params::LeaseParams,
};
use cotenant_units::{Bytes, Timestamp};

/// Requests waiting for memory, in the order of service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Admission {
    #[serde(with = "crate::pairs")]
    waiting: BTreeMap<Place, Want>,
    /// Number of the last arrival.
    arrivals: u64,
}

/// A place in the queue: class, then arrival.
pub(super) type Place = (Class, u64);

/// A request that waits for memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Want {
    pub(super) tenant: String,
    pub(super) class: Class,
    /// The lease to be granted or grown.
    pub(super) lease: LeaseId,
    pub(super) tickets: Vec<Ticket>,
    pub(super) since: Timestamp,
    /// Start of ageing: the arrival, or the end of its last turn.
    ages_from: Timestamp,
    /// `None` for requests of the supervisor itself.
    pub(super) deadline: Option<Timestamp>,
    pub(super) kind: WantKind,
}

/// The kind of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum WantKind {
    /// A new lease.
    Lease(LeaseRequest),
    /// Growth of a lease of this user.
    Grow { min: Bytes, max: Bytes, uid: u32 },
    /// Start of a worker.
    WorkerStart,
    /// Switch of a worker to a larger variant.
    WorkerVariant { variant: String },
}

impl Want {
    /// Creates a request of the supervisor itself.
    pub(super) fn ours(
        tenant: &str,
        class: Class,
        lease: LeaseId,
        kind: WantKind,
        now: Timestamp,
    ) -> Self {
        Self {
            tenant: tenant.to_owned(),
            class,
            lease,
            tickets: Vec::new(),
            since: now,
            ages_from: now,
            deadline: None,
            kind,
        }
    }

    /// Adds a `ticket` and a deadline of `wait` from its arrival.
    pub(super) fn asked(mut self, ticket: Ticket, wait: Duration) -> Self {
        self.tickets.push(ticket);
        self.deadline = Some(self.since + wait);
        self
    }

    /// Returns the user of the waiting tenant.
    fn user(&self) -> Option<u32> {
        match &self.kind {
            WantKind::Lease(request) => Some(request.peer.uid),
            WantKind::Grow { uid, .. } => Some(*uid),
            WantKind::WorkerStart | WantKind::WorkerVariant { .. } => None,
        }
    }

    /// Returns its rank at `now` and the time of the next change, with `age` per class; `None` when its turn is over.
    fn rank(&self, now: Timestamp, age: Duration) -> Option<(Class, Timestamp)> {
        if self.class <= Class::Interactive {
            return Some((self.class, Timestamp::NEVER));
        }
        let (mut rank, mut until) = (self.class, self.ages_from + age);
        while now >= until {
            if rank == Class::Interactive {
                return None;
            }
            rank = rank.more_urgent();
            let lasts = if rank == Class::Interactive {
                age / TURN_OF_AGE
            } else {
                age
            };
            until = until + lasts;
        }
        Some((rank, until))
    }
}

impl Admission {
    /// Returns the quota that one more request would exceed.
    pub(super) fn full_for(&self, want: &Want, limits: &LeaseParams) -> Option<(Quota, u32)> {
        let asked = self
            .values()
            .filter(|other| other.deadline.is_some())
            .count();
        let limit = limits.queue_max;
        if reached(asked, limit) {
            return Some((Quota::Queue, limit));
        }
        let uid = want.user()?;
        // One user may occupy half of the queue.
        let share = limit.div_ceil(2);
        let theirs = self
            .values()
            .filter(|other| other.user() == Some(uid))
            .count();
        reached(theirs, share).then_some((Quota::QueueOf { uid }, share))
    }

    /// Appends a request to those of its class.
    pub(super) fn insert(&mut self, want: Want) -> Place {
        self.arrivals += 1;
        let place = (want.class, self.arrivals);
        self.waiting.insert(place, want);
        place
    }

    pub(super) fn get(&self, place: Place) -> Option<&Want> {
        self.waiting.get(&place)
    }

    pub(super) fn remove(&mut self, place: Place) -> Option<Want> {
        self.waiting.remove(&place)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.waiting.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn places(&self) -> Vec<Place> {
        self.waiting.keys().copied().collect()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Want> {
        self.waiting.values()
    }

    /// Returns the requests served before a new one of `class`.
    pub(super) fn before(&self, class: Class) -> impl Iterator<Item = &Want> {
        self.waiting
            .range(..=(class, u64::MAX))
            .map(|(_, want)| want)
    }

    /// Whether a request waits for this lease, or for its growth.
    pub(super) fn waits_for(&self, lease: LeaseId) -> bool {
        self.values().any(|want| want.lease == lease)
    }

    /// Adds a ticket to the waiting request for a lease.
    pub(super) fn join(&mut self, lease: LeaseId, ticket: Ticket) {
        if let Some(want) = self.waiting.values_mut().find(|want| want.lease == lease) {
            want.tickets.push(ticket);
        }
    }

    /// Removes `ticket`, and returns the requests that only it waited for.
    pub(super) fn cancel(&mut self, ticket: Ticket) -> Vec<Want> {
        for want in self.waiting.values_mut() {
            want.tickets.retain(|waiting| *waiting != ticket);
        }
        self.take(|want| want.tickets.is_empty() && want.deadline.is_some())
    }

    /// Removes and returns the requests for which `is_out` holds.
    pub(super) fn take(&mut self, is_out: impl Fn(&Want) -> bool) -> Vec<Want> {
        let out = self.waiting.extract_if(.., |_, want| is_out(want));
        out.map(|(_, want)| want).collect()
    }

    /// Raises the rank of long-waiting requests, and resets it after a turn.
    pub(super) fn age(&mut self, limits: &LeaseParams, now: Timestamp) -> Vec<AdmissionDecision> {
        let age = age_span(limits);
        let rank = |want: &Want| want.rank(now, age).map(|(rank, _)| rank);
        let moving = self
            .waiting
            .extract_if(.., |(class, _), want| Some(*class) != rank(want));
        let moving: Vec<(Place, Want)> = moving.collect();
        let mut aged = Vec::new();
        for ((_, arrival), mut want) in moving {
            let rank = rank(&want);
            let (tenant, class) = (want.tenant.clone(), want.class);
            aged.push(if let Some(rank) = rank {
                let waited = now.saturating_since(want.since);
                AdmissionDecision::Aged {
                    tenant,
                    class,
                    waited,
                    rank,
                }
            } else {
                want.ages_from = now;
                AdmissionDecision::TurnOver { tenant, class }
            });
            self.waiting
                .insert((rank.unwrap_or(want.class), arrival), want);
        }
        aged
    }

    /// Returns the time of the next deadline or change of rank.
    pub(super) fn next_deadline(&self, limits: &LeaseParams, now: Timestamp) -> Option<Timestamp> {
        let age = age_span(limits);
        let due = |want: &Want| {
            let ages = want.rank(now, age).map(|(_, until)| until);
            let ages = ages.filter(|until| *until < Timestamp::NEVER);
            [want.deadline, ages].into_iter().flatten().min()
        };
        self.values().filter_map(due).min()
    }
}

/// Returns the waiting time per class of ageing.
fn age_span(limits: &LeaseParams) -> Duration {
    (limits.wait_max / 2).max(AGE_LEAST)
}

fn reached(count: usize, limit: u32) -> bool {
    u32::try_from(count).map_or(true, |count| count >= limit)
}

/// Duration of a turn as a fraction of the ageing time per class. Our choice: shorter than the time until the next
/// turn, so that other requests have most of the time.
const TURN_OF_AGE: u32 = 3;
/// Lower bound for a very short `wait_max`.
const AGE_LEAST: Duration = Duration::from_secs(1);
