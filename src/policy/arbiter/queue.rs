//! Who is served next: by class, then by arrival; who has waited for long, as if it were more urgent.
//!
//! The order is strict: who does not fit holds back those behind it, so that nobody is overtaken for ever. It lasts no
//! longer than the first one's deadline. Worker starts wait in the same queue without a deadline, and what they hold
//! back is the space that they need. Who needs more than can be had ([`reach`](super::reach)), or is not admitted under
//! pressure, holds nobody back.
//!
//! So that nobody starves behind a stream of more urgent requests, who waits rises by a class for each half of the
//! longest wait of a request, up to [`Class::Interactive`] and never beside realtime audio. There it has its turn: what
//! comes free is kept for it, and a worker's start or growth takes from the engine what that has beyond its floor. A turn
//! is over after a sixth of the longest wait, and then it ages anew, so that nobody else starves behind it either.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    core::{Arbiter, Lease, Phase},
    request::above_target,
};
use crate::{
    policy::{
        lease::{Class, Denial, LeaseId, LeaseKind, LeaseRequest, Ticket},
        stop_or_shed::Purpose,
    },
    units::{Bytes, Timestamp},
};

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
    #[serde(default)]
    pub(super) ages_from: Timestamp,
    /// `None` for what we want ourselves.
    pub(super) deadline: Option<Timestamp>,
    pub(super) kind: WantKind,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum WantKind {
    /// A new lease.
    Lease(LeaseRequest),
    /// A lease that is to become larger.
    Grow { min: Bytes, max: Bytes },
    /// A worker that is to be started.
    WorkerStart,
    /// A worker that is to become larger.
    WorkerVariant { variant: String },
}

impl Want {
    /// As whom it waits at `now`, and when that changes; `age` is the time for each class. `None` when its turn is over.
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

/// What came of looking at a want.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Service {
    Served,
    Blocked,
}

impl Arbiter {
    /// Serves at once, or queues for as long as `wait` allows.
    pub(super) fn ask_or_queue(&mut self, want: Want, wait: Duration) {
        let place = (want.class, self.counters.arrival());
        let bound = usize::try_from(self.params.lease.queue_max).unwrap_or(usize::MAX);
        let waiting = self.queue.values().filter(|want| want.deadline.is_some()).count();
        let user = self.user_of(&want);
        let theirs = self
            .queue
            .values()
            .filter(|other| user.is_some() && self.user_of(other) == user);
        let (share, theirs) = (self.params.lease.queue_max.div_ceil(2), theirs.count());
        let overtakes = self.nobody_waits_before(want.class);
        let (tickets, tenant) = (want.tickets.clone(), want.tenant.clone());
        self.queue.insert(place, want);
        if overtakes && self.serve(place) == Service::Served {
            return;
        }
        let denial = if wait.is_zero() {
            self.queue.get(&place).map(|want| self.why_not(want))
        } else if waiting >= bound {
            Some(Denial::QuotaExceeded {
                tenant: tenant.clone(),
                what: "the queue".to_owned(),
                limit: u64::from(self.params.lease.queue_max),
            })
        } else if let Some(uid) = user
            && Bytes::of_len(theirs).get() >= u64::from(share)
        {
            // One user does not fill it.
            Some(Denial::QuotaExceeded {
                tenant: tenant.clone(),
                what: format!("the share of uid {uid} in the queue"),
                limit: u64::from(share),
            })
        } else {
            None
        };
        if let Some(denial) = denial {
            self.queue.remove(&place);
            for ticket in tickets {
                self.deny(ticket, denial.clone());
            }
            return;
        }
        // It is passed over from now on, so that this is the only time to tell.
        let hopeless = self.queue.get(&place).filter(|want| self.is_out_of_reach(want));
        if let Some(why) = hopeless.map(|want| self.why_not(want)) {
            self.explain(format!("`{tenant}` waits for what it cannot have at present: {why}"));
        }
    }

    /// Whose tenant waits; nobody's where a worker does.
    fn user_of(&self, want: &Want) -> Option<u32> {
        match &want.kind {
            WantKind::Lease(request) => Some(request.peer.uid),
            WantKind::Grow { .. } => self.leases.get(&want.lease).map(|lease| lease.owner_uid),
            WantKind::WorkerStart | WantKind::WorkerVariant { .. } => None,
        }
    }

    /// Queues something that we want ourselves.
    pub(super) fn queue_own(&mut self, tenant: &str, class: Class, lease: LeaseId, kind: WantKind) {
        let place = (class, self.counters.arrival());
        self.queue.insert(
            place,
            Want {
                tenant: tenant.to_owned(),
                class,
                lease,
                tickets: Vec::new(),
                since: self.now,
                ages_from: self.now,
                deadline: None,
                kind,
            },
        );
    }

    pub(super) fn nobody_waits_before(&self, class: Class) -> bool {
        let mut before = self.queue.range(..=(class, u64::MAX));
        !before.any(|(_, want)| self.holds_back(want))
    }

    /// Whether those behind it wait while it does.
    fn holds_back(&self, want: &Want) -> bool {
        let pressed = self.pressure_denial(&want.tenant, want.class, Bytes::ZERO).is_some();
        !pressed && !self.is_out_of_reach(want)
    }

    pub(super) fn serve_queue(&mut self) {
        let places: Vec<Place> = self.queue.keys().copied().collect();
        for place in places {
            if self.serve(place) == Service::Served {
                continue;
            }
            let Some(want) = self.queue.get(&place) else { continue };
            if self.holds_back(want) {
                self.reclaim_for_want(place);
                break;
            }
            if want.kind == WantKind::WorkerStart && self.is_out_of_reach(want) {
                let name = want.tenant.clone();
                self.tell_out_of_reach(&name);
            }
        }
    }

    pub(super) fn serve_queue_deadlines(&mut self) {
        self.age_queue();
        let due: Vec<Place> = self
            .queue
            .iter()
            .filter(|(_, want)| want.deadline.is_some_and(|deadline| deadline <= self.now))
            .map(|(place, _)| *place)
            .collect();
        for place in due {
            if let Some(want) = self.queue.remove(&place) {
                let denial = self.why_not(&want);
                for ticket in want.tickets {
                    self.deny(ticket, denial.clone());
                }
            }
        }
    }

    pub(super) fn next_queue_deadline(&self) -> Option<Timestamp> {
        let (now, age) = (self.now, self.age());
        let each = self.queue.values();
        each.filter_map(|want| {
            let ages = want.rank(now, age).map(|(_, until)| until);
            let ages = ages.filter(|until| *until < Timestamp::NEVER);
            [want.deadline, ages].into_iter().flatten().min()
        })
        .min()
    }

    /// The time that a want waits for each class that it rises.
    fn age(&self) -> Duration {
        (self.params.lease.wait_max / 2).max(AGE_LEAST)
    }

    /// Gives everybody who has waited for long a better place, and who has had its turn its own one.
    fn age_queue(&mut self) {
        let (now, age) = (self.now, self.age());
        let moves: Vec<(Place, Option<Class>)> = self
            .queue
            .iter()
            .map(|(place, want)| (*place, want.rank(now, age).map(|(rank, _)| rank)))
            .filter(|((class, _), rank)| Some(*class) != *rank)
            .collect();
        for (place, rank) in moves {
            let Some(mut want) = self.queue.remove(&place) else {
                continue;
            };
            let (tenant, own) = (want.tenant.clone(), want.class);
            if let Some(rank) = rank {
                let waited = now.saturating_since(want.since).as_secs();
                self.explain(format!(
                    "`{tenant}` ({own}) has waited for {waited} s and is served as {rank} now"
                ));
            } else {
                want.ages_from = now;
                self.explain(format!("`{tenant}` ({own}) has had its turn and waits on"));
            }
            self.queue.insert((rank.unwrap_or(own), place.1), want);
        }
    }

    pub(super) fn deny_all_waiting(&mut self) {
        for (_, want) in std::mem::take(&mut self.queue) {
            let denial = Denial::Draining {
                asked: self.asked_by(&want),
                tenant: want.tenant,
            };
            for ticket in want.tickets {
                self.deny(ticket, denial.clone());
            }
        }
    }

    /// Drops what waits for a lease or a worker that is gone.
    pub(super) fn forget_wants_of(&mut self, lease: LeaseId, reason: &Denial) {
        let places: Vec<Place> = self
            .queue
            .iter()
            .filter(|(_, want)| want.lease == lease)
            .map(|(place, _)| *place)
            .collect();
        for place in places {
            if let Some(want) = self.queue.remove(&place) {
                for ticket in want.tickets {
                    self.deny(ticket, reason.clone());
                }
            }
        }
    }

    /// Refuses what waits to make a lease larger that is asked to come down to `target`, as a call would be that comes now.
    pub(super) fn refuse_growth_of(&mut self, lease: LeaseId, target: Bytes) {
        let grows = |want: &Want| match want.kind {
            WantKind::Grow { max, .. } if want.lease == lease => Some(max),
            _ => None,
        };
        let waiting: Vec<(Place, Bytes)> = self
            .queue
            .iter()
            .filter_map(|(place, want)| Some((*place, grows(want)?)))
            .collect();
        for (place, max) in waiting {
            let Some(want) = self.queue.remove(&place) else {
                continue;
            };
            for ticket in want.tickets {
                self.deny(ticket, above_target(&want.tenant, max, target));
            }
        }
    }

    /// What may be booked for a class now: what is free, minus what is kept for those who come back.
    ///
    /// The engine's floor is kept against everybody, since nobody could take it from a running engine either. The space
    /// of a worker is kept against less urgent ones, and against tenants that are as urgent.
    pub(super) fn available(&self, class: Class, for_tenant: bool) -> Bytes {
        let kept = self
            .returning_workers()
            .into_iter()
            .filter(|(returning, _)| *returning < class || (for_tenant && *returning == class))
            .map(|(_, bytes)| bytes)
            .chain(self.engine.returning())
            .fold(Bytes::ZERO, Bytes::saturating_add);
        self.ledger.free().saturating_sub(kept)
    }

    /// What a want needs at least, beyond what it holds.
    pub(super) fn needed_by(&self, want: &Want) -> Bytes {
        let held = self.ledger.held_by(want.lease);
        self.asked_by(want).saturating_sub(held)
    }

    /// What a want asks for at least.
    fn asked_by(&self, want: &Want) -> Bytes {
        match &want.kind {
            WantKind::Lease(request) => request.min,
            WantKind::Grow { min, .. } => *min,
            WantKind::WorkerStart => self.worker_peak(&want.tenant, None),
            WantKind::WorkerVariant { variant } => self.worker_peak(&want.tenant, Some(variant)),
        }
    }

    /// That there is not enough for `tenant`, and who has what. What is `own` to it already, or booked for the worker that
    /// it is, is part of what it asks for; another lease of its name may be anybody's.
    pub(super) fn insufficient(&self, tenant: &str, own: Option<LeaseId>, asked: Bytes, class: Class) -> Denial {
        let is_own =
            |id: LeaseId, lease: &Lease| Some(id) == own || (lease.kind == LeaseKind::Worker && lease.tenant == tenant);
        let holders: Vec<String> = self
            .leases
            .iter()
            .filter(|(id, lease)| !is_own(**id, lease))
            .map(|(id, lease)| {
                let held = self.ledger.held_by(*id);
                let purpose = Purpose::Request(class);
                let gives = self.gives(*id, purpose);
                let rest = match self.why_spared(*id, purpose) {
                    Some(why) => format!(", none of it for {class}: {why}"),
                    None => format!(" and can give {gives}"),
                };
                format!("{}#{} holds {held}{rest}", lease.tenant, id.0)
            })
            .collect();
        let mut holders = holders.join("; ");
        let unaccounted = self.ledger.unaccounted();
        if unaccounted > Bytes::ZERO {
            let comma = if holders.is_empty() { "" } else { "; " };
            holders = format!("{holders}{comma}{unaccounted} is unaccounted and nobody's to give");
        }
        Denial::InsufficientMemory {
            tenant: tenant.to_owned(),
            asked,
            free: self.available(class, true),
            reclaimable: self.reclaimable_for(class),
            budget: self.ledger.budget(),
            holders: if holders.is_empty() {
                holders
            } else {
                format!(" ({holders})")
            },
        }
    }

    /// When a denied request may be worth another try.
    pub(super) fn retry_after(&self, denial: &Denial) -> Option<Duration> {
        match denial {
            Denial::InsufficientMemory {
                asked,
                free,
                reclaimable,
                ..
            } => {
                if free.saturating_add(*reclaimable) >= *asked {
                    Some(self.params.shed.settle)
                } else {
                    Some(self.params.pressure.dwell)
                }
            }
            Denial::StaleSample { .. } => Some(self.params.pressure.sample_max),
            Denial::PressureHigh { .. } => Some(self.params.pressure.dwell),
            Denial::QuotaExceeded { .. } => Some(self.params.shed.settle),
            Denial::NotGrowing { wait } => Some(wait.retry_after().unwrap_or(self.params.pressure.dwell)),
            _ => None,
        }
    }

    fn why_not(&self, want: &Want) -> Denial {
        let asked = self.asked_by(want);
        self.admission_denial(&want.tenant, want.class, asked)
            .unwrap_or_else(|| self.insufficient(&want.tenant, Some(want.lease), asked, want.class))
    }

    fn serve(&mut self, place: Place) -> Service {
        let Some(want) = self.queue.get(&place) else {
            return Service::Served;
        };
        let asked = self.asked_by(want);
        if self.admission_denial(&want.tenant, want.class, asked).is_some() {
            return Service::Blocked;
        }
        let ours = want.deadline.is_none();
        // A worker that asks for itself has its peak booked until now.
        let reserved = self.reserved_until_asked(want);
        let available = self
            .available(want.class, !ours)
            .saturating_add(reserved.map_or(Bytes::ZERO, |(_, bytes)| bytes));
        let needed = self.needed_by(want);
        if needed > available {
            return Service::Blocked;
        }
        let Some(want) = self.queue.remove(&place) else {
            return Service::Served;
        };
        let waited = self.now.saturating_since(want.since);
        let name = format!("{}#{}", want.tenant, want.lease.0);
        match want.kind {
            WantKind::Lease(request) => {
                let bytes = request.max.min(available);
                let lease = Lease {
                    tenant: request.tenant.clone(),
                    holder: self.holder_for(&request),
                    kind: LeaseKind::Tenant,
                    class: request.class,
                    generation: self.counters.generation(),
                    min: request.min,
                    max: request.max,
                    granted_at: self.now,
                    expires_at: Some(self.now + request.term),
                    owner_uid: request.peer.uid,
                    owner_pid: request.peer.pid,
                    request: Some(request),
                    phase: Phase::Granted,
                };
                if self.grant_over(reserved.map(|(from, _)| from), want.lease, bytes, lease) {
                    self.explain(format!(
                        "granted {bytes} to {name} after {} ms: {} is free of {}",
                        waited.as_millis(),
                        self.ledger.free(),
                        self.ledger.budget()
                    ));
                    for ticket in want.tickets {
                        self.answer_lease(ticket, want.lease);
                    }
                } else {
                    let denial = self.insufficient(&want.tenant, Some(want.lease), asked, want.class);
                    for ticket in want.tickets {
                        self.deny(ticket, denial.clone());
                    }
                }
            }
            WantKind::Grow { min, max } => {
                if self.wants_less_than(want.lease, max) {
                    self.end_revocation(want.lease);
                }
                let held = self.ledger.held_by(want.lease);
                let bytes = max.min(held.saturating_add(available)).max(min);
                self.grow_lease(want.lease, bytes);
                if let Some(lease) = self.leases.get_mut(&want.lease) {
                    lease.min = min;
                    lease.max = max;
                }
                self.explain(format!(
                    "grown {name} from {held} to {bytes} after {} ms: {} is free of {}",
                    waited.as_millis(),
                    self.ledger.free(),
                    self.ledger.budget()
                ));
                for ticket in want.tickets {
                    self.answer_lease(ticket, want.lease);
                }
            }
            WantKind::WorkerStart => self.start_worker(&want.tenant, want.lease),
            WantKind::WorkerVariant { variant } => self.grow_worker(&want.tenant, variant, want.tickets),
        }
        Service::Served
    }

    /// Asks back what the first in the queue lacks, if enough can be had.
    fn reclaim_for_want(&mut self, place: Place) {
        let Some(want) = self.queue.get(&place) else { return };
        let asked = self.asked_by(want);
        if self.admission_denial(&want.tenant, want.class, asked).is_some() {
            return;
        }
        let (tenant, class, ours) = (want.tenant.clone(), want.class, want.deadline.is_none());
        let own = Some(want.lease);
        let reserved = self.reserved_until_asked(want).map_or(Bytes::ZERO, |(_, bytes)| bytes);
        let expected = self
            .available(class, !ours)
            .saturating_add(self.coming_back())
            .saturating_add(reserved);
        let missing = self.needed_by(want).saturating_sub(expected);
        if missing == Bytes::ZERO {
            return;
        }
        let reason = format!(
            "`{tenant}` ({class}) needs {} more, {} is free and {} is on its way back, of a {} budget",
            self.needed_by(want),
            self.ledger.free(),
            self.coming_back(),
            self.ledger.budget()
        );
        let has_its_turn = ours && place.0 < class && place.0 < Class::LlmElastic;
        let asked_for = if has_its_turn {
            self.reclaim_from_engine(missing, &reason)
        } else {
            self.reclaim_for(class, missing, &reason)
        };
        if !asked_for {
            let holds = self.insufficient(&tenant, own, asked, class);
            self.explain_once("the first in the queue", format!("`{tenant}` waits: {holds}"));
        }
    }

    /// Bytes of all leases in transition that are expected back.
    pub(super) fn coming_back(&self) -> Bytes {
        let mut sum = Bytes::ZERO;
        for (id, lease) in &self.leases {
            let held = self.ledger.held_by(*id);
            let stays = match (&lease.phase, lease.kind) {
                (Phase::Revoking(revocation), _) => revocation.target.bytes,
                (Phase::Ending { since, belief, .. }, _) => {
                    // What its holder may take until its term is over is not waited for before that.
                    let (settle, over) = (self.params.shed.settle, belief.map_or(*since, |belief| belief.until));
                    if self.now <= over + settle && over <= self.now + settle {
                        Bytes::ZERO
                    } else {
                        held
                    }
                }
                (Phase::Granted, LeaseKind::Engine) => {
                    let goal = self.engine.goal();
                    goal.map_or(held, |goal| self.engine.bytes_in(goal))
                }
                (Phase::Granted, LeaseKind::Worker) => self.worker_stays(&lease.tenant, held),
                (Phase::Granted, LeaseKind::Tenant) => held,
            };
            sum = sum.saturating_add(held.saturating_sub(stays));
        }
        sum
    }
}

/// The part of the time for one class that a turn lasts. Our choice: shorter than the time until the next one, so that
/// others have most of the time.
const TURN_OF_AGE: u32 = 3;
/// Where requests may hardly wait at all.
const AGE_LEAST: Duration = Duration::from_secs(1);
