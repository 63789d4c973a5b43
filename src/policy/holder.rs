//! Offers of holders: reclaimable bytes with their price, spared holders, and the sizes to which workers return.
//!
//! The engine offers [smaller plans](crate::plan), tenants the bytes above their minimum. A worker that reacts to
//! pressure notifications is notified, one with a smaller variant is switched to it, and otherwise workers are stopped,
//! one at a time. A few rules apply beside prices ([`State::asked`]): a holder as urgent as the request is spared, as
//! is one that is pinned, changing or at its floor; a worker is not stopped within its dwell, and a busy one only as a
//! last resort; before the headroom is Critical, only the engine and less urgent holders are reclaimed.

use std::{cmp::Reverse, time::Duration};

use super::{
    choose::{Offer, Step, reclaimable},
    denial::{Denial, Holders, OPERATOR},
    lease::{Class, LeaseId, LeaseKind},
    lease_table::{Lease, Phase},
    pay::{Level, Pay},
    plan::{Giving, Less, Shrink},
    price,
    reason::{Share, SpareReason},
    residency::EnginePlan,
    shedding::{Chosen, Source, Spared},
    state::State,
    worker::Worker,
    worker_control::is_any_stopping,
};
use cotenant_units::Bytes;

/// Purpose of a reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A request of this class: only less urgent holders are reclaimed, and ledger bytes count.
    Request(Class),
    /// Pressure: every holder is reclaimed up to the permitted price, and used bytes count.
    Pressure(Pay),
}

impl Purpose {
    /// Returns the permitted price, if it is bounded.
    const fn pay(self) -> Option<Pay> {
        match self {
            Self::Request(_) => None,
            Self::Pressure(pay) => Some(pay),
        }
    }

    /// Whether it is pressure below `level`.
    fn is_below(self, level: Level) -> bool {
        self.pay().is_some_and(|pay| pay.level < level)
    }

    /// Whether it spares `class`: one more urgent than the engine, below Critical.
    fn spares(self, class: Class) -> bool {
        class < Class::LlmElastic && self.is_below(Level::Critical)
    }
}

impl State {
    /// Returns the offers of all holders.
    pub(super) fn offers(&self, purpose: Purpose) -> Vec<Offer> {
        let asked = self.leases.ids().map(|id| self.asked(*id, purpose));
        asked.filter_map(Result::ok).flatten().collect()
    }

    /// Returns the offers of a lease.
    ///
    /// # Errors
    /// The reason why it is spared.
    fn asked(&self, id: LeaseId, purpose: Purpose) -> Result<Vec<Offer>, SpareReason> {
        let lease = self.leases.get(id).filter(|lease| !lease.is_residual());
        let Some(lease) = lease else {
            return Ok(Vec::new());
        };
        match (purpose, &lease.phase) {
            (Purpose::Request(urgent), _) if lease.class == urgent => {
                return Err(SpareReason::AsUrgent(urgent));
            }
            (Purpose::Request(urgent), _) if lease.class < urgent => {
                return Err(SpareReason::MoreUrgent(lease.class));
            }
            (_, Phase::Revoking(revocation)) => {
                let to = revocation.target.bytes;
                return Err(SpareReason::ComingDown { to });
            }
            (_, Phase::Ending { .. } | Phase::Residual { .. }) => return Err(SpareReason::Ending),
            (_, Phase::Granted) => {}
        }
        match (lease.kind, self.workers.get(&lease.tenant)) {
            (LeaseKind::Engine, _) => self.engine_asked(purpose),
            (LeaseKind::Worker, Some(worker)) => self.worker_asked(worker, purpose),
            _ => self.tenant_asked(id, lease, purpose),
        }
    }

    fn engine_asked(&self, purpose: Purpose) -> Result<Vec<Offer>, SpareReason> {
        if !self.engine.can_shed(self.now) {
            return Err(SpareReason::EngineBusy);
        }
        let offers = self.engine_offers(purpose);
        if !offers.is_empty() {
            return Ok(offers);
        }
        let more = purpose.pay().map(|pay| Purpose::Pressure(pay.unbounded()));
        Err(match more.map(|more| self.engine_offers(more)) {
            Some(more) if !more.is_empty() => SpareReason::KeepsLayers,
            _ => SpareReason::AllGiven,
        })
    }

    /// Returns the engine's offers: weights and KV, with additive prices.
    pub(super) fn engine_offers(&self, purpose: Purpose) -> Vec<Offer> {
        let Some(shrink) = self.engine_shrink(purpose) else {
            return Vec::new();
        };
        let offer = |source, less: Vec<Less>, unit| Offer {
            source,
            class: Class::LlmElastic,
            steps: few_of(&less)
                .map(|less| Step {
                    bytes: less.gives,
                    price_us: less.price_us,
                })
                .collect(),
            unit,
        };
        let shape = self.engine.shape();
        let block = shape.map(|shape| shape.kv.blocks_bytes(1, shrink.from.kv_type));
        let offers = [
            offer(Source::UnusedKv, shrink.kv(), block.unwrap_or_default()),
            offer(Source::Layers, shrink.weights(), Bytes::ZERO),
        ];
        offers
            .into_iter()
            .filter(|offer| offer.bytes() > Bytes::ZERO)
            .collect()
    }

    /// Returns the engine's smaller plans, if it can shed.
    fn engine_shrink(&self, purpose: Purpose) -> Option<Shrink<'_>> {
        let engine = &self.engine;
        let (shape, goal, limits) = (engine.shape()?, engine.goal()?, engine.limits()?);
        let giving = Giving {
            pay: purpose.pay(),
            droppable: self.engine.kv.droppable,
            chunk: self.engine.blocked.chunk.is_none(),
        };
        let kv = engine.kv_contents(self.now);
        let can_shed = engine.can_shed(self.now);
        can_shed.then(|| Shrink::new(shape, &limits, goal, kv, giving))
    }

    /// Returns the plan in which the engine gives the chosen bytes, the bytes by kind, and everything it could give,
    /// with one offer for each kind.
    pub(super) fn engine_gives(
        &self,
        bytes: Bytes,
        purpose: Purpose,
    ) -> (Option<EnginePlan>, Vec<Chosen>, Vec<Offer>) {
        let shrink = self.engine_shrink(purpose);
        let (Some(shape), Some(shrink)) = (self.engine.shape(), shrink) else {
            return (None, Vec::new(), Vec::new());
        };
        let plan = shrink.to_give(bytes);
        let (mut chosen, mut rows) = (Vec::new(), Vec::new());
        let mut before = shrink.from.clone();
        for (source, next) in PARTS.into_iter().zip(shrink.ladder()) {
            let given = |from: &EnginePlan, to: &EnginePlan| {
                shape.plan_bytes(from).saturating_sub(shape.plan_bytes(to))
            };
            let all = given(&before, &next);
            let taken = given(&before.with_all_of(&plan), &next.with_all_of(&plan));
            if taken > Bytes::ZERO {
                let source = source.clone();
                chosen.push(Chosen {
                    source,
                    bytes: taken,
                });
            }
            // A smaller type frees more if more blocks stay.
            let all = all.max(taken);
            if all > Bytes::ZERO {
                let price = shrink.price_of(&next);
                let price = price.saturating_sub(shrink.price_of(&before));
                rows.push(Offer::whole(source, Class::LlmElastic, all, price));
            }
            before = next;
        }
        let gives_something = shape.plan_bytes(&plan) < shape.plan_bytes(shrink.from);
        (gives_something.then_some(plan), chosen, rows)
    }

    fn tenant_asked(
        &self,
        id: LeaseId,
        lease: &Lease,
        purpose: Purpose,
    ) -> Result<Vec<Offer>, SpareReason> {
        let class = lease.class;
        if purpose.spares(class) {
            return Err(SpareReason::BeforeCritical(class));
        }
        if self.ledger.held_by(id) <= lease.min {
            return Err(SpareReason::AtLeast(lease.min));
        }
        let bytes = self.counts(id, purpose).saturating_sub(lease.min);
        let deadline = self.params.shed.deadlines.of(class);
        let price_us = price::of_tenant(bytes, deadline, self.engine.speed());
        let tenant = lease.tenant.clone();
        let source = Source::Tenant { lease: id, tenant };
        let offer = Offer::even(source, class, TENANT_UNIT, bytes, price_us);
        Ok(Vec::from_iter((bytes > Bytes::ZERO).then_some(offer)))
    }

    /// Returns a worker's offer: a notification if it reacts to one, a smaller variant while it is idle, otherwise a
    /// stop, one worker at a time.
    fn worker_asked(&self, worker: &Worker, purpose: Purpose) -> Result<Vec<Offer>, SpareReason> {
        let (params, is_busy) = (&worker.params, worker.requests > 0);
        let name = params.name.clone();
        let id = worker.lease().filter(|_| worker.is_settled());
        if params.pinned {
            return Err(SpareReason::Pinned);
        }
        let id = id.ok_or(SpareReason::Changing)?;
        let least = params.shrinks_to.filter(|_| !worker.ignores_pressure());
        if let Some(least) = least.filter(|_| !purpose.spares(params.class)) {
            let bytes = self.counts(id, purpose).saturating_sub(least);
            if bytes > Bytes::ZERO {
                let source = Source::WorkerNotified { worker: name };
                return Ok(vec![self.worker_offer(worker, source, bytes)]);
            }
        }
        let is_last = purpose.pay().is_some() && !purpose.is_below(Level::LastResort);
        let dwells = worker.not_worth_stopping_until().filter(|_| !is_last);
        if is_busy && !is_last {
            return Err(SpareReason::Busy);
        } else if purpose.is_below(Level::Critical) {
            return Err(SpareReason::BeforeCritical(params.class));
        } else if let Some(until) = dwells.filter(|until| *until > self.now) {
            let remaining = until.saturating_since(self.now);
            return Err(SpareReason::WantedAgain { remaining });
        }
        let held = self.ledger.held_by(id);
        let smaller = worker.smaller_variant(held).filter(|_| !is_busy);
        let (source, bytes) = match smaller {
            // It has a separate lease, which makes its own offer.
            _ if held == Bytes::ZERO => return Ok(Vec::new()),
            Some(smaller) => {
                let (worker, variant) = (name, smaller.to_owned());
                let bytes = held.saturating_sub(params.steady_of(Some(smaller)));
                (Source::WorkerVariant { worker, variant }, bytes)
            }
            None if is_any_stopping(&self.workers) => return Ok(Vec::new()),
            None => (Source::WorkerStop { worker: name }, held),
        };
        Ok(vec![self.worker_offer(worker, source, bytes)])
    }

    /// Returns the bytes of a lease that count: all held bytes for a request, the used part under pressure.
    pub(super) fn counts(&self, id: LeaseId, purpose: Purpose) -> Bytes {
        let held = self.ledger.held_by(id);
        let lease = self.leases.get(id).filter(|_| purpose.pay().is_some());
        let used = lease.and_then(|lease| self.ledger.used_by(&lease.holder));
        used.map_or(held, |used| used.min(held))
    }

    /// Returns the offer to shrink or restore a worker, at the price of being without the bytes.
    fn worker_offer(&self, worker: &Worker, source: Source, bytes: Bytes) -> Offer {
        let (params, reload) = (&worker.params, worker.reload());
        let price_us = match &source {
            Source::WorkerVariant { .. } => price::of_variant(reload),
            Source::WorkerNotified { .. } => {
                price::of_notification(bytes, reload, self.engine.speed())
            }
            _ if worker.run().is_none() => price::of_stop(reload, Some(Duration::MAX), 1),
            _ => {
                let idle = self.now.saturating_since(worker.idle_since);
                // Bytes booked for its next start do not stay free.
                let lasts = bytes.saturating_sub(self.start_least(&params.name));
                let times = bytes.get() / lasts.get().max(1);
                price::of_stop(reload, (worker.requests == 0).then_some(idle), times)
            }
        };
        Offer::whole(source, params.class, bytes, price_us)
    }

    /// Returns the denial for `tenant`, with the shares of all other holders. Excluded are its `own` lease and the
    /// booking of the worker of that name, which are part of the request; another lease of the same name may belong to
    /// any process.
    pub(super) fn insufficient(
        &self,
        tenant: &str,
        own: Option<LeaseId>,
        asked: Bytes,
        class: Class,
    ) -> Denial {
        let does_not_count = |(id, lease): &(LeaseId, &Lease)| {
            Some(*id) == own
                || lease.is_residual()
                || (lease.kind == LeaseKind::Worker && lease.tenant == tenant)
        };
        let others = self.leases.iter().filter(|one| !does_not_count(one));
        Denial::InsufficientMemory {
            tenant: tenant.to_owned(),
            asked,
            free: self.available(class, true),
            reclaimable: self.reclaimable_for(class),
            budget: self.ledger.budget(),
            holders: Holders {
                class,
                shares: others.map(|(id, _)| self.share(id, class)).collect(),
                unaccounted: self.ledger.unaccounted(),
            },
        }
    }

    /// Returns the bytes that a lease holds, and could give to a request of `class`.
    fn share(&self, id: LeaseId, class: Class) -> Share {
        let asked = self.asked(id, Purpose::Request(class));
        Share {
            holder: self.leases.name_of(id),
            held: self.ledger.held_by(id),
            gives: asked.as_deref().map_or(Bytes::ZERO, reclaimable),
            spared: asked.err(),
        }
    }

    /// Returns the denial of an operator's shed, with the reason; only the engine is shed on command.
    pub(super) fn nothing_to_shed(&self, asked: Bytes) -> Denial {
        let class = Class::AudioRealtime;
        let share = self.engine.lease.map(|id| self.share(id, class));
        Denial::InsufficientMemory {
            tenant: OPERATOR.to_owned(),
            asked,
            free: Bytes::ZERO,
            reclaimable: share.as_ref().map_or(Bytes::ZERO, |share| share.gives),
            budget: self.ledger.budget(),
            holders: Holders {
                class,
                shares: Vec::from_iter(share),
                unaccounted: Bytes::ZERO,
            },
        }
    }

    /// Returns the spared holders with the reason.
    pub(super) fn spared(&self, purpose: Purpose) -> Vec<Spared> {
        let spared = |id: &LeaseId| {
            Some(Spared {
                why: self.asked(*id, purpose).err()?,
                holder: self.leases.name_of(*id).to_string(),
                held: self.ledger.held_by(*id),
            })
        };
        self.leases.ids().filter_map(spared).collect()
    }

    /// Returns the workers that were stopped, shrunk or notified to make room and fit again, with the cost of being
    /// without them.
    pub(super) fn worker_returns(&self, room: Bytes) -> Vec<Offer> {
        // At equal value per byte, the more urgent one, then the one with the lower start order.
        let mut workers: Vec<&Worker> = self.workers.values().collect();
        workers
            .sort_by_key(|worker| Reverse((worker.params.class, worker.params.start.start_order)));
        let returns = workers.into_iter().filter_map(|worker| {
            let (source, bytes) = self.comes_back_to(worker)?;
            let fits = bytes <= self.room_for(worker, room);
            fits.then(|| self.worker_offer(worker, source, bytes))
        });
        returns.collect()
    }

    /// Returns the measure by which a worker was reclaimed, and the bytes that undo it.
    fn comes_back_to(&self, worker: &Worker) -> Option<(Source, Bytes)> {
        let name = worker.params.name.clone();
        if worker.was_shed() {
            let least = self.start_least(&name);
            return Some((Source::WorkerStop { worker: name }, least));
        }
        let before = worker.run()?.before_shed.clone();
        if let Some(variant) = before.filter(|_| worker.is_settled()) {
            let peak = self.worker_peak(&name, Some(&variant));
            let more = peak.saturating_sub(self.worker_held(&name));
            let worker = name;
            return Some((Source::WorkerVariant { worker, variant }, more));
        }
        let more = self.notified_lacks(worker)?;
        Some((Source::WorkerNotified { worker: name }, more))
    }

    /// Returns the part of `room` for a worker. A more urgent worker that is to be started may also use memory that the
    /// engine returns at once; a running one leaves room for returning workers that are at least as urgent.
    fn room_for(&self, worker: &Worker, room: Bytes) -> Bytes {
        let (class, free) = (worker.params.class, self.ledger.free());
        if worker.was_shed() && class < Class::LlmElastic {
            let (booked, touched) = self.engine.lends();
            free.saturating_add(booked)
                .min(room.saturating_add(touched))
        } else if worker.was_shed() {
            free.min(room)
        } else {
            let returning = self.returning_workers().into_iter();
            let kept = returning.filter(|(returning, _)| *returning <= class);
            let kept = kept
                .map(|(_, bytes)| bytes)
                .fold(Bytes::ZERO, Bytes::saturating_add);
            room.saturating_sub(kept).min(self.available(class, true))
        }
    }

    /// Returns the bytes that can be reclaimed from others for `class`.
    pub(super) fn reclaimable_for(&self, class: Class) -> Bytes {
        reclaimable(&self.offers(Purpose::Request(class)))
    }
}

/// Returns at most [`STEPS_MAX`] steps of one half of a plan, evenly spaced, including the last.
fn few_of(all: &[Less]) -> impl Iterator<Item = &Less> {
    let stride = all.len().div_ceil(STEPS_MAX).max(1);
    let is_kept = move |number: usize| (all.len() - 1 - number).is_multiple_of(stride);
    let numbered = all.iter().enumerate();
    numbered.filter_map(move |(number, less)| is_kept(number).then_some(less))
}

/// Maximum steps of one half of a plan in the search for the cheapest set, so that it fits its preallocated memory.
const STEPS_MAX: usize = 32;

/// Tenants give any number of units of this size; surplus of a step is trimmed.
const TENANT_UNIT: Bytes = Bytes::new(4096);

/// Kinds of memory that the engine gives up, in the order of [`Shrink::ladder`].
const PARTS: [Source; 6] = [
    Source::UnusedKv,
    Source::PrefixKv,
    Source::KvType,
    Source::OldestKv,
    Source::Layers,
    Source::PrefillChunk,
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        lease::LeaseKind,
        lease_table::{Lease, Turn},
        params::{Params, Scope, WorkerParams},
        pressure::{Pressure, PressureLevel, Sample},
    };
    use cotenant_units::Timestamp;

    fn mib(mib: u64) -> Bytes {
        Bytes::from_mib(mib)
    }

    /// An idle worker `tts` that holds 100 MiB of 1000, and the headroom given.
    fn state(headroom: Bytes) -> State {
        let mut params = Params::for_budget(mib(1000), mib(100), Scope::Machine);
        let mut pressure = Pressure::new(params.pressure);
        params.workers.push(WorkerParams {
            name: "tts".to_owned(),
            class: Class::AudioRealtime,
            steady: mib(100),
            peak: mib(100),
            ..WorkerParams::default()
        });
        let mut state = State::new(params).unwrap();
        let (id, now) = (state.leases.next_id(), Timestamp::from_millis(1));
        let kind = (LeaseKind::Worker, Class::AudioRealtime);
        let lease = Lease::of_ours("tts", kind, 1, (mib(100), mib(100)), now);
        let mut turn = Turn {
            now,
            shed: state.params.shed,
            rarely: state.params.pressure.sample_max,
            ledger: &mut state.ledger,
            effects: Vec::new(),
        };
        assert!(state.leases.grant((id, lease), None, mib(100), &mut turn));
        let worker = state.workers.get_mut("tts").unwrap();
        worker.start(id, now);
        worker.answered(7, now);
        for taken_at in [now, Timestamp::from_millis(2)] {
            let sample = Sample {
                taken_at,
                ..Sample::default()
            };
            pressure.observe(&sample, headroom);
        }
        state.pressure = pressure;
        state
    }

    #[test]
    fn an_idle_worker_gives_below_the_critical_watermark_and_a_busy_one_at_the_last_resort() {
        let pay = Pay::new(Level::Critical, mib(100));
        let (urgent, last) = (Purpose::Pressure(pay), Purpose::Pressure(pay.unbounded()));
        let now = |state: &State| Pay::now(&state.pressure, &state.params.pressure, mib(100));
        let kept = |state: &State, purpose| {
            let worker = state.workers.get("tts").unwrap();
            state.worker_asked(worker, purpose).err()
        };
        let watermarks = state(Bytes::ZERO).params.pressure;
        let mut critical = state(Bytes::ZERO);
        assert_eq!(kept(&critical, urgent), None);
        let elevated = state(watermarks.critical_below.saturating_add(mib(1)));
        assert_eq!(elevated.pressure.level(), PressureLevel::Elevated);
        let before = Some(SpareReason::BeforeCritical(Class::AudioRealtime));
        assert_eq!(kept(&elevated, Purpose::Pressure(now(&elevated))), before);
        let normal = state(mib(900));
        assert_eq!(kept(&normal, Purpose::Request(Class::AudioRealtime)), None);
        let mut recovered = state(Bytes::ZERO);
        let later = Sample {
            taken_at: Timestamp::from_millis(3),
            ..Sample::default()
        };
        recovered.pressure.observe(&later, mib(900));
        assert_eq!(recovered.pressure.level(), PressureLevel::Critical);
        assert_eq!(kept(&recovered, Purpose::Pressure(now(&recovered))), before);
        let worker = critical.workers.get_mut("tts").unwrap();
        worker.works(1, Timestamp::from_millis(2));
        assert_eq!(kept(&critical, urgent), Some(SpareReason::Busy));
        assert_eq!(kept(&critical, last), None);
        critical.workers.get_mut("tts").unwrap().params.pinned = true;
        assert_eq!(kept(&critical, last), Some(SpareReason::Pinned));
    }
}
