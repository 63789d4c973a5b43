//! What is shed, for a request or under pressure, and what grows back.
//!
//! The cheapest set that suffices is computed over everybody who could give ([`candidates`](super::candidates)), and the
//! balance is told with it, winners and losers. A set of shrinking holders is asked at once; of processes that must be stopped, one at a time. Under pressure the
//! next round waits for the settle time and for a sample that is newer than what came back.
//!
//! What was shed grows back in the reverse order: workers that were stopped, variants, then the engine; not before the
//! dwell is over, not while anybody waits, and only into space that the book has and the last sample shows.

use super::{
    candidates::Purpose,
    core::{Arbiter, Phase},
    engine::{PlanKind, bytes_in, describe},
    queue::WantKind,
};
use crate::{
    policy::{
        event::Action,
        lease::{Class, LeaseKind, Ticket},
        params::Planted,
        pressure::PressureLevel,
        shedding::{Candidate, Chosen, Source, Weighing, choose, reclaimable},
        snapshot::WorkerState,
    },
    units::{Bytes, Timestamp},
};

impl Arbiter {
    /// Asks back `missing` bytes for a request of `class`; nothing, if not all of it can be had.
    pub(super) fn reclaim_for(&mut self, class: Class, missing: Bytes, reason: &str) -> bool {
        let purpose = Purpose::Request(class);
        let candidates = self.candidates(purpose);
        if reclaimable(&candidates) < missing {
            return false;
        }
        self.weigh_and_ask(&candidates, missing, purpose, reason);
        true
    }

    /// What others could give back for `class`.
    pub(super) fn reclaimable_for(&self, class: Class) -> Bytes {
        reclaimable(&self.candidates(Purpose::Request(class)))
    }

    /// Sheds while the headroom is below the upper watermark.
    pub(super) fn relieve_pressure(&mut self) {
        let level = self.pressure.level();
        let (Some(headroom), Some(sampled_at)) = (self.pressure.headroom(), self.pressure.sampled_at()) else {
            return;
        };
        let elevated = self.params.pressure.elevated_below;
        if level == PressureLevel::Normal || headroom >= elevated {
            self.said.remove("nothing left to shed");
            return;
        }
        if self.pressure.in_grace(self.now) {
            return;
        }
        let settling = self
            .relieved_at
            .is_some_and(|at| self.now < at + self.params.shed.settle);
        if settling || sampled_at < self.changed_at {
            return;
        }
        let wanted = elevated.saturating_add(self.params.shed.minimum_reclaim);
        let need = wanted.saturating_sub(headroom);
        let missing = need.saturating_sub(self.physically_coming_back(level));
        if missing == Bytes::ZERO {
            return;
        }
        let last_resort = headroom < self.params.pressure.last_resort_below;
        let purpose = Purpose::Pressure { last_resort };
        let reason =
            format!("{level}: headroom {headroom} is below {elevated}, {missing} more are to come back for {wanted}");
        let candidates = self.candidates(purpose);
        if self.weigh_and_ask(&candidates, missing, purpose, &reason) {
            self.relieved_at = Some(self.now);
            self.said.remove("nothing left to shed");
        } else {
            self.explain_once(
                "nothing left to shed",
                format!(
                    "{level}: nothing is left to shed; the unaccounted {} are not ours",
                    self.ledger.unaccounted()
                ),
            );
        }
    }

    /// Grows back what was shed, one step at a time.
    pub(super) fn grow_back(&mut self) {
        let dwelt = self
            .shed_at
            .is_none_or(|at| self.now >= at + self.params.pressure.dwell);
        if dwelt {
            let _ = self.grow_one_step();
        }
    }

    /// When growth is to be looked at again, if time is all that is missing.
    pub(super) fn next_growth(&self) -> Option<Timestamp> {
        let at = self.shed_at? + self.params.pressure.dwell;
        (at > self.now).then_some(at)
    }

    pub(super) fn take_operator_regrow(&mut self, ticket: Ticket) {
        if let Some(denial) = self.pressure_denial("llm", Class::LlmElastic, Bytes::ZERO) {
            self.deny(ticket, denial);
            return;
        }
        self.shed_at = None;
        self.engine.growth_blocked_until = None;
        match self.grow_one_step() {
            Ok(message) | Err(message) => self.done(ticket, message),
        }
    }

    /// Notes that memory came back, by a shed of ours or otherwise.
    pub(super) fn note_reclaimed(&mut self, freed: Bytes, by_shed: bool) {
        self.changed_at = self.now;
        if by_shed {
            self.shed_at = Some(self.now);
            self.stats.sheds = self.stats.sheds.saturating_add(1);
            self.stats.shed_bytes = self.stats.shed_bytes.saturating_add(freed);
        }
    }

    /// What grows now, or why nothing does.
    fn grow_one_step(&mut self) -> Result<String, String> {
        if self.draining {
            return Err("nothing grows while draining".to_owned());
        }
        if self.pressure.level() != PressureLevel::Normal {
            return Err(format!("nothing grows while pressure is {}", self.pressure.level()));
        }
        if !self.queue.is_empty() {
            return Err("nothing grows while somebody waits".to_owned());
        }
        let Some(room) = self.room() else {
            return Err("nothing grows before a sample shows what the last change left".to_owned());
        };
        if let Some(name) = self.worker_to_bring_back(room) {
            self.want_worker(&name);
            self.serve_queue();
            return Ok(format!("worker `{name}` comes back"));
        }
        if let Some((name, variant, class)) = self.variant_to_restore(room) {
            if let Some(lease) = self.workers.get(&name).and_then(|worker| worker.lease) {
                let kind = WantKind::WorkerVariant {
                    variant: variant.clone(),
                };
                self.queue_own(&name, class, lease, kind);
                self.serve_queue();
            }
            return Ok(format!("worker `{name}` goes back to variant `{variant}`"));
        }
        if let Some(name) = self.told_to_restore(room) {
            return self.restore_told(&name);
        }
        self.grow_engine(room)
    }

    /// What the last sample shows above the upper watermark and the minimum reclaim, if it is newer than the last change.
    fn room(&self) -> Option<Bytes> {
        let headroom = self.pressure.headroom()?;
        let sampled_at = self.pressure.sampled_at()?;
        let watermark = self
            .params
            .pressure
            .elevated_below
            .saturating_add(self.params.shed.minimum_reclaim);
        (sampled_at >= self.changed_at).then(|| headroom.saturating_sub(watermark))
    }

    fn worker_to_bring_back(&self, room: Bytes) -> Option<String> {
        self.workers
            .values()
            .filter(|worker| worker.stopped_to_shed && worker.state == WorkerState::Stopped)
            .filter(|worker| self.worker_peak(&worker.params.name, None) <= room.min(self.ledger.free()))
            .min_by_key(|worker| (worker.params.class, worker.params.start_order))
            .map(|worker| worker.params.name.clone())
    }

    fn variant_to_restore(&self, room: Bytes) -> Option<(String, String, Class)> {
        self.workers.values().find_map(|worker| {
            let variant = worker.variant_before_shed.clone()?;
            if worker.state != WorkerState::Ready || worker.resizing.is_some() {
                return None;
            }
            let held = self.worker_held(&worker.params.name);
            let more = self
                .worker_peak(&worker.params.name, Some(&variant))
                .saturating_sub(held);
            let fits = more <= room.min(self.available(worker.params.class, false));
            fits.then(|| (worker.params.name.clone(), variant, worker.params.class))
        })
    }

    fn grow_engine(&mut self, room: Bytes) -> Result<String, String> {
        let blocked = self.engine.growth_blocked_until.is_some_and(|until| self.now < until);
        let (Some(id), Some(shape), Some(limits), Some(goal), Some(full)) = (
            self.engine.lease,
            self.engine.shape(),
            self.engine.limits(),
            self.engine.goal(),
            self.engine.full_plan(),
        ) else {
            return Err("the engine is not loaded".to_owned());
        };
        if blocked || !self.engine.pending.is_empty() {
            return Err("the engine is changing, or failed to a moment ago".to_owned());
        }
        let (held, now_bytes, full_bytes) = (self.ledger.held_by(id), shape.plan_bytes(goal), shape.plan_bytes(&full));
        if *goal == full {
            return Err(format!("the engine has its full plan: {}", describe(Some(shape), goal)));
        }
        if full_bytes <= now_bytes {
            // The ring of a model whose layers are smaller than it: all resident takes no more than some streamed.
            let reason = format!("the full plan takes no more than {}", describe(Some(shape), goal));
            self.ask_engine(full, PlanKind::Regrow, reason.clone());
            return Ok(reason);
        }
        // Never into space that somebody needs to come back, by the book and by what is really there.
        let kept = if self.is_planted(Planted::GrownIntoReserved) {
            Bytes::ZERO
        } else {
            self.returning_or_waiting_workers()
        };
        let on_the_book = self.ledger.free().saturating_sub(kept);
        let room = room.saturating_sub(kept);
        let more = room.min(on_the_book);
        let target = now_bytes.saturating_add(more);
        let no_room = || {
            format!(
                "the engine stays at {}: {on_the_book} is free on the book and {room} by measurement",
                describe(Some(shape), goal)
            )
        };
        // What is worth most comes back first, and nothing is given up for it.
        let plan = shape.grown(goal, target, &limits);
        let bytes = shape.plan_bytes(&plan);
        let gained = bytes.saturating_sub(now_bytes);
        let least = self
            .params
            .shed
            .minimum_reclaim
            .min(full_bytes.saturating_sub(now_bytes));
        let too_little = gained < least && plan != full;
        if bytes > held.saturating_add(on_the_book) || gained == Bytes::ZERO || too_little {
            return Err(no_room());
        }
        let reason = format!(
            "growing back by {gained}: {} is free, headroom {} above the watermark and the minimum reclaim; from {} to {}",
            self.ledger.free(),
            room,
            describe(Some(shape), goal),
            describe(Some(shape), &plan)
        );
        if !self.grow_lease(id, bytes) {
            return Err("the growth does not fit the book".to_owned());
        }
        self.ask_engine(plan, PlanKind::Regrow, reason.clone());
        Ok(reason)
    }

    /// Bytes that holders have been asked for and have not given back, by what they use.
    ///
    /// At Critical nobody but the engine is waited for any longer than the settle time.
    fn physically_coming_back(&self, level: PressureLevel) -> Bytes {
        let patient = level < PressureLevel::Critical;
        let settle = self.params.shed.settle;
        let mut sum = Bytes::ZERO;
        for (id, lease) in &self.leases {
            let held = self.ledger.held_by(*id);
            let used = self
                .ledger
                .measurement(&lease.tenant)
                .map_or(held, |measured| measured.used);
            let stays = match (&lease.phase, lease.kind) {
                (Phase::Revoking(revocation), _)
                    if !revocation.voluntary && (patient || self.now < revocation.asked_at + settle) =>
                {
                    revocation.target.bytes
                }
                (Phase::Granted, LeaseKind::Worker) if patient => self.worker_stays(&lease.tenant, held),
                (Phase::Granted, LeaseKind::Engine) => match self.engine.goal() {
                    Some(goal) if !self.engine.pending.is_empty() => bytes_in(self.engine.shape(), goal),
                    _ => held,
                },
                (Phase::Granted | Phase::Revoking(_) | Phase::Ending { .. }, _) => held,
            };
            if stays < held {
                sum = sum.saturating_add(used.saturating_sub(stays));
            }
        }
        sum
    }

    /// Asks the cheapest set back that suffices. Returns whether anybody has been asked.
    pub(super) fn weigh_and_ask(
        &mut self,
        candidates: &[Candidate],
        need: Bytes,
        purpose: Purpose,
        reason: &str,
    ) -> bool {
        let chosen = choose(candidates, need);
        if chosen.is_empty() {
            return false;
        }
        let mut weighing = Weighing::new(reason, need, candidates, &chosen);
        weighing.mode = self.engine.mode().filter(|_| self.engine.lease.is_some());
        weighing.spared = self.spared(purpose);
        self.out.push(Action::Weighed { weighing });
        self.carry_out(chosen, purpose, reason)
    }

    fn carry_out(&mut self, chosen: Vec<Chosen>, purpose: Purpose, reason: &str) -> bool {
        let mut asked = false;
        let (mut blocks, mut layers) = (0u32, 0u32);
        for Chosen { source, units, bytes } in chosen {
            match source {
                // Nothing is asked of anybody for it, and nothing is credited.
                Source::PageCache => {}
                Source::UnusedKv | Source::PrefixKv => blocks = blocks.saturating_add(units),
                Source::Layers => layers = layers.saturating_add(units),
                Source::Tenant { lease: id, .. } => {
                    let held = self.ledger.held_by(id);
                    let from = match (purpose, self.leases.get(&id)) {
                        (Purpose::Pressure { .. }, Some(lease)) => self
                            .ledger
                            .measurement(&lease.tenant)
                            .map_or(held, |measured| measured.used.min(held)),
                        _ => held,
                    };
                    self.set_target(id, from.saturating_sub(bytes), reason);
                    asked = true;
                }
                Source::WorkerTold { worker } => asked |= self.tell_worker(&worker, reason),
                Source::WorkerVariant { worker, variant } => {
                    self.shrink_worker(&worker, variant, reason);
                    asked = true;
                }
                Source::WorkerStop { worker } => {
                    if !self.a_worker_is_stopping() {
                        self.explain(format!("stopping worker `{worker}` for its {bytes}: {reason}"));
                        self.stop_worker_to_shed(&worker, reason);
                        asked = true;
                    }
                }
            }
        }
        if blocks > 0 || layers > 0 {
            asked |= self.shed_engine(blocks, layers, reason) > Bytes::ZERO;
        }
        if asked {
            self.shed_at = Some(self.now);
        }
        asked
    }
}
