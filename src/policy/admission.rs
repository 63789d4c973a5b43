//! Admission queue with ageing and per-user shares.
//!
//! The order is by class, then by arrival. It is strict: a request that does not fit holds back those behind it, so that
//! none is overtaken for ever. It lasts no longer than the first one's deadline. Worker starts wait in the same queue
//! without a deadline, and what they hold back is the space that they need. A request that can never be satisfied
//! ([`reach`](super::reach)), or is not admitted under pressure, does not block the queue.
//!
//! So that none starves behind a stream of more urgent requests, what waits rises by a class for each half of the longest
//! wait of a request, up to [`Class::Interactive`] and never beside realtime audio. There it has its turn: what comes free
//! is kept for it, and a worker's start or growth takes from the engine what that has beyond its floor. A turn is over
//! after a sixth of the longest wait, and then it ages from the start, so that none starves behind it either.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    decision::AdmissionDecision,
    denial::Quota,
    lease::{Class, LeaseId, LeaseRequest, Ticket},
    params::LeaseParams,
};
use cotenant_units::{Bytes, Timestamp};

/// What waits for memory, in the order in which it is served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Admission {
    #[serde(with = "crate::pairs")]
    waiting: BTreeMap<Place, Want>,
    /// The last number of an arrival.
    arrivals: u64,
}

/// A place in the queue: class, then arrival.
pub(super) type Place = (Class, u64);

/// Something that waits for memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Want {
    pub(super) tenant: String,
    pub(super) class: Class,
    /// The lease that it will be, or is.
    pub(super) lease: LeaseId,
    pub(super) tickets: Vec<Ticket>,
    pub(super) since: Timestamp,
    /// Since when it ages; since the end of its last turn, if it had one.
    ages_from: Timestamp,
    /// `None` for what we want ourselves.
    pub(super) deadline: Option<Timestamp>,
    pub(super) kind: WantKind,
}

/// What is waited for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum WantKind {
    /// A new lease.
    Lease(LeaseRequest),
    /// A lease of this user that is to become larger.
    Grow { min: Bytes, max: Bytes, uid: u32 },
    /// A worker that is to be started.
    WorkerStart,
    /// A worker that is to become larger.
    WorkerVariant { variant: String },
}

impl Want {
    /// Something that the supervisor wants for itself.
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

    /// Something that `ticket` waits for until `wait` is over.
    pub(super) fn asked(mut self, ticket: Ticket, wait: Duration) -> Self {
        self.tickets.push(ticket);
        self.deadline = Some(self.since + wait);
        self
    }

    /// The user whose tenant waits.
    fn user(&self) -> Option<u32> {
        match &self.kind {
            WantKind::Lease(request) => Some(request.peer.uid),
            WantKind::Grow { uid, .. } => Some(*uid),
            WantKind::WorkerStart | WantKind::WorkerVariant { .. } => None,
        }
    }

    /// As what it waits at `now`, and when that changes; `age` is the time for each class. `None` when its turn is over.
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
    /// The bound that one more request would break.
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
        // One user does not fill it.
        let share = limit.div_ceil(2);
        let theirs = self
            .values()
            .filter(|other| other.user() == Some(uid))
            .count();
        reached(theirs, share).then_some((Quota::QueueOf { uid }, share))
    }

    /// Puts it behind those of its class.
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

    /// Those that are served before a newcomer of `class`.
    pub(super) fn before(&self, class: Class) -> impl Iterator<Item = &Want> {
        self.waiting
            .range(..=(class, u64::MAX))
            .map(|(_, want)| want)
    }

    /// Whether something waits for the lease, or to make it larger.
    pub(super) fn waits_for(&self, lease: LeaseId) -> bool {
        self.values().any(|want| want.lease == lease)
    }

    /// A ticket joins what another one waits for already.
    pub(super) fn join(&mut self, lease: LeaseId, ticket: Ticket) {
        if let Some(want) = self.waiting.values_mut().find(|want| want.lease == lease) {
            want.tickets.push(ticket);
        }
    }

    /// Takes out what only `ticket` waited for.
    pub(super) fn cancel(&mut self, ticket: Ticket) -> Vec<Want> {
        for want in self.waiting.values_mut() {
            want.tickets.retain(|waiting| *waiting != ticket);
        }
        self.take(|want| want.tickets.is_empty() && want.deadline.is_some())
    }

    /// Takes out what is to wait no longer.
    pub(super) fn take(&mut self, is_out: impl Fn(&Want) -> bool) -> Vec<Want> {
        let out = self.waiting.extract_if(.., |_, want| is_out(want));
        out.map(|(_, want)| want).collect()
    }

    /// Gives what has waited for long a better place, and what has had its turn its own one.
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

    /// When the next deadline or change of rank is due.
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

/// The time for each class that it rises.
fn age_span(limits: &LeaseParams) -> Duration {
    (limits.wait_max / 2).max(AGE_LEAST)
}

fn reached(count: usize, limit: u32) -> bool {
    u32::try_from(count).map_or(true, |count| count >= limit)
}

/// The part of the time for one class that a turn lasts. Our choice: shorter than the time until the next one, so that
/// others have most of the time.
const TURN_OF_AGE: u32 = 3;
/// Where requests may hardly wait at all.
const AGE_LEAST: Duration = Duration::from_secs(1);
