//! Offers of holders: what each could give back and at which price, who is spared, and what workers come back to.
//!
//! The engine offers [smaller plans](crate::plan), tenants what they hold beyond their least. A worker that reacts to
//! pressure notifications is notified, one with a smaller variant becomes smaller, and only then is one stopped, one at a
//! time. Beside prices a few rules hold ([`State::why_spared`]): a holder that is as urgent as the request is spared, and so
//! are pinned and changing ones; under pressure a worker is asked only below the Critical watermark, and a busy one only
//! below that of the last resort.

use std::{cmp::Reverse, time::Duration};

use super::{
    choose::{Offer, Step, choose, reclaimable},
    denial::{Denial, Holders, OPERATOR},
    lease::{Class, LeaseId, LeaseKind},
    lease_table::{Lease, Phase},
    pay::Pay,
    plan::{Giving, Less, Shrink},
    pressure::PressureLevel,
    price::{self, Stop},
    reason::{Share, SpareReason},
    residency::{EnginePlan, PlanLimits},
    shedding::{Chosen, Source, Spared},
    state::State,
    worker::Worker,
};
use cotenant_units::Bytes;

/// For whom memory is reclaimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// For a request of this class: only less urgent holders give, and what counts is what the book gets.
    Request(Class),
    /// For the machine: every holder gives as far as that is paid, and what counts is what is really in use.
    Pressure(Pay),
}

impl Purpose {
    pub(super) fn takes_from(self, class: Class) -> bool {
        match self {
            Self::Request(urgent) => class > urgent,
            Self::Pressure(_) => true,
        }
    }
}

impl State {
    /// Everything that could give memory back.
    pub(super) fn offers(&self, purpose: Purpose) -> Vec<Offer> {
        let mut offers = Vec::new();
        if purpose.takes_from(Class::LlmElastic) {
            offers.extend(self.engine_offers(purpose));
        }
        for id in self.leases.ids() {
            offers.extend(self.tenant_offer(*id, purpose));
        }
        for worker in self.workers.values() {
            offers.extend(self.worker_offer(worker, purpose));
        }
        offers
    }

    /// What one lease could give.
    pub(super) fn gives(&self, id: LeaseId, purpose: Purpose) -> Bytes {
        let Some(lease) = self.leases.get(id) else {
            return Bytes::ZERO;
        };
        let offers = match lease.kind {
            LeaseKind::Engine if purpose.takes_from(lease.class) => self.engine_offers(purpose),
            LeaseKind::Engine => Vec::new(),
            LeaseKind::Tenant => self.tenant_offer(id, purpose).into_iter().collect(),
            LeaseKind::Worker => {
                let worker = self.workers.get(&lease.tenant);
                worker
                    .and_then(|worker| self.worker_offer(worker, purpose))
                    .into_iter()
                    .collect()
            }
        };
        reclaimable(&offers)
    }

    /// What the engine could give: weights and KV, whose prices add up.
    pub(super) fn engine_offers(&self, purpose: Purpose) -> Vec<Offer> {
        let Some(limits) = self.engine.limits() else {
            return Vec::new();
        };
        let Some(shrink) = self.engine_shrink(&limits, purpose) else {
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
        let block = self.engine.shape().map(|shape| {
            let kind = shrink.from.kv_type;
            shape.kv.blocks_bytes(1, kind)
        });
        let offers = [
            offer(Source::UnusedKv, shrink.kv(), block.unwrap_or_default()),
            offer(Source::Layers, shrink.weights(), Bytes::ZERO),
        ];
        offers
            .into_iter()
            .filter(|offer| offer.bytes() > Bytes::ZERO)
            .collect()
    }

    /// Smaller plans of the engine, where it can shed.
    fn engine_shrink<'a>(&'a self, limits: &'a PlanLimits, purpose: Purpose) -> Option<Shrink<'a>> {
        let (shape, goal) = (self.engine.shape()?, self.engine.goal()?);
        let giving = Giving {
            pay: match purpose {
                Purpose::Request(_) => None,
                Purpose::Pressure(pay) => Some(pay),
            },
            droppable: self.engine.kv.droppable,
            chunk: !self.engine.is_chunk_pinned(),
        };
        let can_shed = self.engine.can_shed(self.now);
        can_shed.then(|| Shrink::new(shape, limits, goal, self.engine.kv_contents(), giving))
    }

    /// The plan in which the engine gives the chosen bytes, with what it gives of each kind; and all that it could give,
    /// each kind as an offer of its own.
    pub(super) fn engine_gives(
        &self,
        bytes: Bytes,
        purpose: Purpose,
    ) -> (Option<EnginePlan>, Vec<Chosen>, Vec<Offer>) {
        let limits = self.engine.limits();
        let shrink = limits.as_ref();
        let shrink = shrink.and_then(|limits| self.engine_shrink(limits, purpose));
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
            // A smaller type gives more where more blocks stay.
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

    fn tenant_offer(&self, id: LeaseId, purpose: Purpose) -> Option<Offer> {
        let lease = self.leases.get(id)?;
        if lease.kind != LeaseKind::Tenant || self.why_spared(id, purpose).is_some() {
            return None;
        }
        let held = self.ledger.held_by(id);
        let used = match purpose {
            Purpose::Request(_) => held,
            Purpose::Pressure(_) => self
                .ledger
                .used_by(&lease.holder)
                .map_or(held, |used| used.min(held)),
        };
        let bytes = used.saturating_sub(lease.min);
        let deadline = self.params.shed.deadlines.of(lease.class);
        let price_us = price::of_tenant(bytes, deadline, self.engine.speed());
        let source = Source::Tenant {
            lease: id,
            tenant: lease.tenant.clone(),
        };
        (bytes > Bytes::ZERO)
            .then(|| Offer::even(source, lease.class, TENANT_UNIT, bytes, price_us))
    }

    fn worker_offer(&self, worker: &Worker, purpose: Purpose) -> Option<Offer> {
        let is_spared = self.why_spared(worker.lease()?, purpose).is_some();
        if is_spared {
            None
        } else {
            self.offer_of(worker, purpose)
        }
    }

    /// The share of a worker that is not kept: by a notification where it reacts to one, by a smaller variant while it is
    /// idle, and else by being stopped, one worker at a time.
    fn offer_of(&self, worker: &Worker, purpose: Purpose) -> Option<Offer> {
        if let Some(notified) = self.notification(worker, purpose) {
            return Some(notified);
        }
        let (name, class) = (worker.params.name.clone(), worker.params.class);
        let held = self.worker_held(&name);
        if held == Bytes::ZERO {
            return None; // it holds a lease of its own, and is asked by that
        }
        if worker.requests == 0
            && let Some(smaller) = worker.smaller_variant(held)
        {
            let bytes = held.saturating_sub(worker.params.steady_of(Some(smaller)));
            let variant = Source::WorkerVariant {
                worker: name,
                variant: smaller.to_owned(),
            };
            let price_us = price::of_variant(worker.reload());
            return Some(Offer::whole(variant, class, bytes, price_us));
        }
        if self.workers.is_any_stopping() {
            return None;
        }
        let idle = self.now.saturating_since(worker.idle_since);
        let stop = Stop {
            reload: worker.reload(),
            idle: (worker.requests == 0).then_some(idle),
            held,
            lasting: held.saturating_sub(self.start_least(&name)),
        };
        let source = Source::WorkerStop { worker: name };
        Some(Offer::whole(source, class, held, stop.price()))
    }

    /// The share of a worker that is notified: of its use under pressure, of its lease for a request.
    fn notification(&self, worker: &Worker, purpose: Purpose) -> Option<Offer> {
        let (least, id) = (worker.params.shrinks_to?, worker.lease()?);
        let (name, class) = (&worker.params.name, worker.params.class);
        let pressed = matches!(purpose, Purpose::Pressure(_));
        let spared = !purpose.takes_from(class)
            || worker.params.pinned
            || worker.ignores_pressure()
            || (pressed
                && class < Class::LlmElastic
                && self.pressure.level() < PressureLevel::Critical);
        let granted = matches!(self.leases.get(id)?.phase, Phase::Granted);
        if spared || self.queue.waits_for(id) || !granted || !worker.is_settled() {
            return None;
        }
        let held = self.ledger.held_by(id);
        let has = match self.ledger.measurement(name) {
            Some(measured) if pressed => measured.used,
            _ => held,
        };
        let bytes = has.saturating_sub(least);
        let price_us = price::of_notification(bytes, worker.reload(), self.engine.speed());
        let source = Source::WorkerNotified {
            worker: name.clone(),
        };
        (bytes > Bytes::ZERO).then(|| Offer::whole(source, class, bytes, price_us))
    }

    /// Why a worker is not asked to give anything for `purpose`; `None` if it is.
    fn why_kept(&self, worker: &Worker, purpose: Purpose) -> Option<SpareReason> {
        let pressed = matches!(purpose, Purpose::Pressure(_));
        let critical = self.pressure.level() == PressureLevel::Critical;
        if worker.params.pinned {
            Some(SpareReason::Pinned)
        } else if !worker.is_settled() {
            Some(SpareReason::Changing)
        } else if (critical && matches!(purpose, Purpose::Pressure(pay) if pay.is_unbounded()))
            || self.notification(worker, purpose).is_some()
        {
            None
        } else if worker.requests > 0 {
            Some(SpareReason::Busy)
        } else if worker.lease().is_some_and(|id| self.queue.waits_for(id)) {
            Some(SpareReason::WaitsToGrow)
        } else if pressed && !critical {
            Some(SpareReason::WorkersBeforeCritical)
        } else if pressed && !self.pressure.is_critical_now() {
            Some(SpareReason::Recovered)
        } else {
            let until = worker
                .not_worth_stopping_until()
                .filter(|until| *until > self.now);
            until.map(|until| SpareReason::WantedAgain {
                remaining: until.saturating_since(self.now),
            })
        }
    }

    /// Why a lease is not asked to give anything for `purpose`; `None` if it can be asked.
    pub(super) fn why_spared(&self, id: LeaseId, purpose: Purpose) -> Option<SpareReason> {
        let lease = self.leases.get(id)?;
        let critical = self.pressure.level() == PressureLevel::Critical;
        if let Purpose::Request(urgent) = purpose
            && lease.class <= urgent
        {
            let than = if lease.class == urgent {
                SpareReason::AsUrgent
            } else {
                SpareReason::MoreUrgent
            };
            return Some(than(lease.class));
        }
        match (&lease.phase, lease.kind) {
            (Phase::Revoking(revocation), _) => {
                return Some(SpareReason::ComingDown {
                    to: revocation.target.bytes,
                });
            }
            (Phase::Ending { .. }, _) => return Some(SpareReason::Ending),
            (Phase::Granted, _) => {}
        }
        match lease.kind {
            LeaseKind::Engine => {
                let gives = |purpose| !self.engine_offers(purpose).is_empty();
                match purpose {
                    _ if !self.engine.can_shed(self.now) => Some(SpareReason::EngineBusy),
                    _ if gives(purpose) => None,
                    Purpose::Pressure(pay) if gives(Purpose::Pressure(pay.unbounded())) => {
                        Some(SpareReason::KeepsLayers)
                    }
                    _ => Some(SpareReason::AllGiven),
                }
            }
            LeaseKind::Tenant => {
                let pressed = matches!(purpose, Purpose::Pressure(_));
                // One that waits to become larger is asked like any other: the request is served before it.
                if pressed && lease.class < Class::LlmElastic && !critical {
                    Some(SpareReason::BeforeCritical(lease.class))
                } else if self.ledger.held_by(id) <= lease.min {
                    Some(SpareReason::AtLeast(lease.min))
                } else {
                    None
                }
            }
            LeaseKind::Worker => {
                let worker = self.workers.get(&lease.tenant)?;
                self.why_kept(worker, purpose)
            }
        }
    }

    /// That there is not enough for `tenant`, and who has what. What is `own` to it already, or booked for the worker that
    /// it is, is part of what it asks for; another lease of its name may be of any process.
    pub(super) fn insufficient(
        &self,
        tenant: &str,
        own: Option<LeaseId>,
        asked: Bytes,
        class: Class,
    ) -> Denial {
        let is_own = |(id, lease): &(LeaseId, &Lease)| {
            Some(*id) == own || (lease.kind == LeaseKind::Worker && lease.tenant == tenant)
        };
        let others = self.leases.iter().filter(|one| !is_own(one));
        let purpose = Purpose::Request(class);
        let shares = others.map(|(id, _)| Share {
            holder: self.leases.name_of(id),
            held: self.ledger.held_by(id),
            gives: self.gives(id, purpose),
            spared: self.why_spared(id, purpose),
        });
        Denial::InsufficientMemory {
            tenant: tenant.to_owned(),
            asked,
            free: self.available(class, true),
            reclaimable: self.reclaimable_for(class),
            budget: self.ledger.budget(),
            holders: Holders {
                class,
                shares: shares.collect(),
                unaccounted: self.ledger.unaccounted(),
            },
        }
    }

    /// That the engine gives an operator nothing of `asked`, and why; nothing else is shed on command.
    pub(super) fn nothing_to_shed(&self, asked: Bytes) -> Denial {
        let class = Class::AudioRealtime;
        let engine = self.engine.lease;
        let mut denial = self.insufficient(OPERATOR, None, asked, class);
        if let Denial::InsufficientMemory {
            free,
            reclaimable,
            holders,
            ..
        } = &mut denial
        {
            *free = Bytes::ZERO;
            *reclaimable = engine.map_or(Bytes::ZERO, |id| self.gives(id, Purpose::Request(class)));
            holders
                .shares
                .retain(|share| Some(share.holder.id) == engine);
            holders.unaccounted = Bytes::ZERO;
        }
        denial
    }

    /// Leaves only those stops among the offers that are chosen for what is `owed`, what is missing below the watermark:
    /// what a slope foretells comes from others. Returns the workers that are spared by that.
    pub(super) fn stop_only_for(&self, offers: &mut Vec<Offer>, owed: Bytes) -> Vec<Spared> {
        let goes_on = |offer: &&Offer| !offer.source.stops();
        let without_stops: Bytes = offers.iter().filter(goes_on).map(Offer::bytes).sum();
        let stopped = if without_stops >= owed {
            Vec::new()
        } else {
            choose(offers, owed).chosen
        };
        let mut spared = Vec::new();
        offers.retain(|offer| {
            let Source::WorkerStop { worker } = &offer.source else {
                return true;
            };
            let is_chosen = stopped.iter().any(|chosen| chosen.source == offer.source);
            let id = self.workers.get(worker).and_then(Worker::lease);
            if let Some(id) = id.filter(|_| !is_chosen) {
                spared.push(Spared {
                    why: SpareReason::OthersSuffice,
                    holder: self.leases.name_of(id).to_string(),
                    held: self.ledger.held_by(id),
                });
            }
            is_chosen
        });
        spared
    }

    /// Holders that are not asked, with the reason.
    pub(super) fn spared(&self, purpose: Purpose) -> Vec<Spared> {
        self.leases
            .ids()
            .filter_map(|id| {
                Some(Spared {
                    why: self.why_spared(*id, purpose)?,
                    holder: self.leases.name_of(*id).to_string(),
                    held: self.ledger.held_by(*id),
                })
            })
            .collect()
    }

    /// Workers that were stopped, made smaller or notified to make room and fit again, with what being without it
    /// costs.
    pub(super) fn worker_returns(&self, room: Bytes) -> Vec<Offer> {
        // Of two that are worth the same for their size, the more urgent one, and then the one that is started first.
        let mut stopped: Vec<_> = self
            .workers
            .values()
            .filter(|worker| worker.was_shed())
            .collect();
        stopped
            .sort_by_key(|worker| Reverse((worker.params.class, worker.params.start.start_order)));
        let stopped = stopped.into_iter().map(|worker| {
            let params = &worker.params;
            let source = Source::WorkerStop {
                worker: params.name.clone(),
            };
            let least = self.start_least(&params.name);
            let stop = Stop {
                reload: worker.reload(),
                idle: Some(Duration::MAX),
                held: least,
                lasting: least,
            };
            Offer::whole(source, params.class, least, stop.price())
        });
        let (free, (booked, touched)) = (self.ledger.free(), self.engine.lends());
        let stopped = stopped.filter(|gain| {
            let (on_the_book, measured) = if gain.class < Class::LlmElastic {
                (free.saturating_add(booked), room.saturating_add(touched))
            } else {
                (free, room)
            };
            gain.bytes() <= on_the_book.min(measured)
        });
        let variants = self
            .workers
            .values()
            .filter_map(|worker| self.variant_return(worker));
        let notified = self
            .workers
            .values()
            .filter_map(|worker| self.notified_return(worker));
        let running = variants.chain(notified);
        let running = running.filter(|gain| gain.bytes() <= self.room_beside(gain.class, room));
        stopped.chain(running).collect()
    }

    fn variant_return(&self, worker: &Worker) -> Option<Offer> {
        let variant = worker
            .run()?
            .before_shed
            .clone()
            .filter(|_| worker.is_settled())?;
        let name = &worker.params.name;
        let peak = self.worker_peak(name, Some(&variant));
        let source = Source::WorkerVariant {
            worker: name.clone(),
            variant,
        };
        let more = peak.saturating_sub(self.worker_held(name));
        let price_us = price::of_variant(worker.reload());
        Some(Offer::whole(source, worker.params.class, more, price_us))
    }

    fn notified_return(&self, worker: &Worker) -> Option<Offer> {
        let more = self.notified_lacks(worker)?;
        let price_us = price::of_notification(more, worker.reload(), self.engine.speed());
        let source = Source::WorkerNotified {
            worker: worker.params.name.clone(),
        };
        Some(Offer::whole(source, worker.params.class, more, price_us))
    }

    /// What is left of the room for a running worker when those have theirs that come back and are as urgent.
    fn room_beside(&self, class: Class, room: Bytes) -> Bytes {
        let returning = self.returning_workers().into_iter();
        let kept = returning.filter(|(returning, _)| *returning <= class);
        let kept = kept
            .map(|(_, bytes)| bytes)
            .fold(Bytes::ZERO, Bytes::saturating_add);
        room.saturating_sub(kept).min(self.available(class, true))
    }

    /// What others could give back for `class`.
    pub(super) fn reclaimable_for(&self, class: Class) -> Bytes {
        reclaimable(&self.offers(Purpose::Request(class)))
    }
}

/// At most [`STEPS_MAX`] of what a half of a plan can give, evenly spread, and the last.
fn few_of(all: &[Less]) -> impl Iterator<Item = &Less> {
    let stride = all.len().div_ceil(STEPS_MAX).max(1);
    let is_kept = move |number: usize| (all.len() - 1 - number).is_multiple_of(stride);
    let numbered = all.iter().enumerate();
    numbered.filter_map(move |(number, less)| is_kept(number).then_some(less))
}

/// Steps in which a half of a plan is weighed against other holders: the search for the cheapest set takes no more memory
/// than is set aside for it.
const STEPS_MAX: usize = 32;

/// Tenants count in bytes; a step of the search is a part of what they have, and what it gives too much is spared.
const TENANT_UNIT: Bytes = Bytes::new(4096);

/// Kinds of things that the engine gives up, as [`Shrink::ladder`] has them.
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
        pressure::{Pressure, Sample},
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
        let pay = Pay::at_critical(mib(100));
        let (urgent, last) = (Purpose::Pressure(pay), Purpose::Pressure(pay.unbounded()));
        let kept =
            |state: &State, purpose| state.why_kept(state.workers.get("tts").unwrap(), purpose);
        let watermarks = state(Bytes::ZERO).params.pressure;
        let mut critical = state(Bytes::ZERO);
        assert_eq!(kept(&critical, urgent), None);
        let elevated = state(watermarks.critical_below.saturating_add(mib(1)));
        assert_eq!(elevated.pressure.level(), PressureLevel::Elevated);
        assert_eq!(
            kept(&elevated, urgent),
            Some(SpareReason::WorkersBeforeCritical)
        );
        let normal = state(mib(900));
        assert_eq!(kept(&normal, Purpose::Request(Class::AudioRealtime)), None);
        let mut recovered = state(Bytes::ZERO);
        let later = Sample {
            taken_at: Timestamp::from_millis(3),
            ..Sample::default()
        };
        recovered.pressure.observe(&later, mib(900));
        assert_eq!(kept(&recovered, urgent), Some(SpareReason::Recovered));
        let worker = critical.workers.get_mut("tts").unwrap();
        worker.works(1, Timestamp::from_millis(2));
        assert_eq!(kept(&critical, urgent), Some(SpareReason::Busy));
        assert_eq!(kept(&critical, last), None);
        critical.workers.get_mut("tts").unwrap().params.pinned = true;
        assert_eq!(kept(&critical, last), Some(SpareReason::Pinned));
    }
}
