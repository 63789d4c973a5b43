//! What is shed, for a request or under pressure, and what grows back.
//!
//! A set of shrinking holders is asked at once; of processes that must be stopped, one at a time. Under pressure the
//! next round waits for the settle time and for a sample that is newer than what came back.
//!
//! What was shed grows back in the reverse order: workers that were stopped, variants, then the engine; not before the
//! dwell is over, not while anybody waits, and only into space that the book has and the last sample shows.

use super::{
    core::{Arbiter, Phase},
    engine::{PlanKind, bytes_in, describe, larger_of_both},
    queue::WantKind,
    worker::Worker,
};
use crate::{
    policy::{
        lease::{Class, LeaseKind, Ticket},
        pressure::PressureLevel,
        shedding::{Candidate, Chosen, Source, choose, reclaimable},
        snapshot::WorkerState,
    },
    units::{Bytes, Timestamp},
};

/// For whom memory is asked back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// For a request of this class: only less urgent holders give, and what counts is what the book gets.
    Request(Class),
    /// For the machine: everybody gives, and what counts is what is really in use.
    Pressure { last_resort: bool },
}

impl Arbiter {
    /// Asks back `missing` bytes for a request of `class`; nothing, if not all of it can be had.
    pub(super) fn reclaim_for(&mut self, class: Class, missing: Bytes, reason: &str) -> bool {
        let candidates = self.candidates(Purpose::Request(class));
        if reclaimable(&candidates) < missing {
            return false;
        }
        self.carry_out(choose(candidates, missing), Purpose::Request(class), reason);
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
        let chosen = choose(self.candidates(purpose), missing);
        if self.carry_out(chosen, purpose, &reason) {
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
            .filter(|worker| worker.params.peak_of(None) <= room.min(self.ledger.free()))
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
            let more = worker.params.peak_of(Some(&variant)).saturating_sub(held);
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
        if *goal == full || now_bytes >= full_bytes {
            return Err(format!("the engine has its full plan: {}", describe(Some(shape), goal)));
        }
        let on_the_book = self.ledger.free().saturating_sub(self.returning_or_waiting_workers());
        let more = room.min(on_the_book);
        let target = now_bytes.saturating_add(more);
        let no_room = || {
            format!(
                "the engine stays at {}: {on_the_book} is free on the book and {room} by measurement",
                describe(Some(shape), goal)
            )
        };
        let Ok(plan) = shape.plan(target, &limits) else {
            return Err(no_room());
        };
        // What is on the way from one plan to the other may hold parts of both.
        let both = larger_of_both(goal, &plan);
        let peak = shape.plan_bytes(&both).max(shape.plan_bytes(&plan));
        let gained = shape.plan_bytes(&plan).saturating_sub(now_bytes);
        let least = self
            .params
            .shed
            .minimum_reclaim
            .min(full_bytes.saturating_sub(now_bytes));
        let too_little = gained < least && plan != full;
        if peak > target.max(now_bytes)
            || peak > held.saturating_add(on_the_book)
            || gained == Bytes::ZERO
            || too_little
        {
            return Err(no_room());
        }
        let reason = format!(
            "growing back by {gained}: {} is free, headroom {} above the watermark and the minimum reclaim; from {} to {}",
            self.ledger.free(),
            room,
            describe(Some(shape), goal),
            describe(Some(shape), &plan)
        );
        if !self.grow_lease(id, peak) {
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

    /// Everything that could give memory back.
    fn candidates(&self, purpose: Purpose) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        let gives = |class: Class| match purpose {
            Purpose::Request(urgent) => class > urgent,
            Purpose::Pressure { .. } => true,
        };
        let critical = self.pressure.level() == PressureLevel::Critical;
        if gives(Class::LlmElastic)
            && let Some(candidate) = self.engine_candidate()
        {
            candidates.push(candidate);
        }
        for (id, lease) in &self.leases {
            let waits = self.queue.values().any(|want| want.lease == *id);
            let elastic = lease.kind == LeaseKind::Tenant && matches!(lease.phase, Phase::Granted);
            let spared = matches!(purpose, Purpose::Pressure { .. }) && lease.class < Class::LlmElastic && !critical;
            if !elastic || waits || spared || !gives(lease.class) {
                continue;
            }
            let held = self.ledger.held_by(*id);
            let used = match purpose {
                Purpose::Request(_) => held,
                Purpose::Pressure { .. } => self
                    .ledger
                    .measurement(&lease.tenant)
                    .map_or(held, |measured| measured.used.min(held)),
            };
            let bytes = used.saturating_sub(lease.min);
            let deadline = self.params.shed.deadlines.of(lease.class).as_millis();
            candidates.push(Candidate {
                source: Source::Tenant(*id),
                class: lease.class,
                bytes,
                divisible: true,
                cost_now_ms: u64::try_from(deadline).unwrap_or(u64::MAX) / 2,
                cost_undo_ms: bytes.whole_mib() / MIB_PER_MS,
            });
        }
        for worker in self.workers.values().filter(|worker| gives(worker.params.class)) {
            self.worker_candidate(worker, purpose, critical, &mut candidates);
        }
        candidates
    }

    fn engine_candidate(&self) -> Option<Candidate> {
        if !self.engine.can_shed(self.now) {
            return None;
        }
        let shape = self.engine.shape()?;
        let goal = self.engine.goal()?;
        let least = self.engine.least_plan()?;
        let bytes = shape.plan_bytes(goal).saturating_sub(shape.plan_bytes(&least));
        let kv = shape
            .kv
            .capacity_bytes(goal.kv_capacity)
            .saturating_sub(shape.kv.capacity_bytes(least.kv_capacity));
        let layers_mib = bytes.saturating_sub(kv).whole_mib();
        Some(Candidate {
            source: Source::Engine,
            class: Class::LlmElastic,
            bytes,
            divisible: true,
            cost_now_ms: layers_mib / MIB_PER_MS * TOKENS_SLOWED,
            cost_undo_ms: layers_mib / MIB_PER_MS,
        })
    }

    fn worker_candidate(&self, worker: &Worker, purpose: Purpose, critical: bool, candidates: &mut Vec<Candidate>) {
        let name = &worker.params.name;
        if worker.state != WorkerState::Ready || worker.resizing.is_some() {
            return;
        }
        let waits = self.queue.values().any(|want| Some(want.lease) == worker.lease);
        let (idle, last_resort) = match purpose {
            Purpose::Request(_) => (worker.requests == 0 && !waits, false),
            Purpose::Pressure { last_resort } => (worker.requests == 0 && critical && !waits, critical && last_resort),
        };
        let held = self.worker_held(name);
        let reload = u64::try_from(worker.params.reload.as_millis()).unwrap_or(u64::MAX);
        if idle && let Some(smaller) = smaller_variant(worker, held) {
            let bytes = held.saturating_sub(worker.params.steady_of(Some(&smaller)));
            candidates.push(Candidate {
                source: Source::WorkerVariant {
                    worker: name.clone(),
                    variant: smaller,
                },
                class: worker.params.class,
                bytes,
                divisible: false,
                cost_now_ms: reload / 2,
                cost_undo_ms: reload,
            });
        } else if (idle || last_resort) && !self.a_worker_is_stopping() {
            let busy = worker.requests > 0;
            let idle_for = self.now.saturating_since(worker.idle_since).as_secs();
            candidates.push(Candidate {
                source: Source::WorkerStop(name.clone()),
                class: worker.params.class,
                bytes: held,
                divisible: false,
                cost_now_ms: if busy { BUSY_STOP_MS } else { 0 },
                cost_undo_ms: reload.saturating_mul(1 + IDLE_LONG_S / (1 + idle_for)),
            });
        }
    }

    /// Asks what has been chosen. Returns whether anybody has been asked.
    fn carry_out(&mut self, chosen: Vec<Chosen>, purpose: Purpose, reason: &str) -> bool {
        let mut asked = false;
        for Chosen { source, bytes } in chosen {
            match source {
                Source::Engine => {
                    asked |= self.shed_engine(bytes, reason) > Bytes::ZERO;
                }
                Source::Tenant(id) => {
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
                Source::WorkerVariant { worker, variant } => {
                    self.shrink_worker(&worker, variant, reason);
                    asked = true;
                }
                Source::WorkerStop(worker) => {
                    if !self.a_worker_is_stopping() {
                        self.explain(format!("stopping worker `{worker}` for its {bytes}: {reason}"));
                        self.stop_worker_to_shed(&worker, reason);
                        asked = true;
                    }
                }
            }
        }
        if asked {
            self.shed_at = Some(self.now);
        }
        asked
    }
}

/// The largest variant that is smaller than the present one and needs no more than is held to get there.
fn smaller_variant(worker: &Worker, held: Bytes) -> Option<String> {
    let steady = worker.steady();
    worker
        .params
        .variants
        .iter()
        .filter(|variant| variant.steady < steady && variant.peak <= held)
        .max_by_key(|variant| variant.steady)
        .map(|variant| variant.name.clone())
}

/// Rate at which weights are read from a local file: 2 GiB/s, a common NVMe drive.
const MIB_PER_MS: u64 = 2;
/// A shed of layers slows this many tokens before it is likely undone.
const TOKENS_SLOWED: u64 = 8;
/// Stopping a worker in the middle of its work costs its user an utterance.
const BUSY_STOP_MS: u64 = 10_000;
/// After this many seconds of idleness a stop costs only the start.
const IDLE_LONG_S: u64 = 60;
