//! Feasibility of requests, so that an unsatisfiable one does not block the queue.
//!
//! The engine keeps its floor, workers that run keep what they hold at rest unless the one who waits may stop them. What
//! is left of the budget beside these is the most that can ever be booked for a holder while they stay. A request for
//! more still waits, since one of them may end; but no holder is kept small for it, it does not block the queue, and it is
//! explained with what it needs, what it could have, and what to change.
//!
//! The supervisor's own wants have no deadline. So nothing is kept free for it either while tenants keep, and
//! unmanaged processes use, so much that it cannot have it: they may end in a minute or never, and until then the engine
//! makes use of it. When they have, it takes its turn ([`admission`](crate::admission)).

use super::{
    admission::{Want, WantKind},
    denial::Denial,
    lease::{Class, LeaseKind},
    params::{ENGINE_TENANT, Scope},
    pressure_level::PressureLevel,
    residency::FloorError,
    snapshot::WorkerWait,
    state::State,
    worker::Worker,
};
use cotenant_units::Bytes;
use std::time::Duration;

impl State {
    /// Bytes that may be booked for a class now: free, minus those kept for holders that come back.
    ///
    /// The engine's floor is kept against every class, since it cannot be taken from a running engine either. The space
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

    /// Space of workers that are wanted, do not run, are not in the queue and could be started some time; and what those
    /// lack for their start that are about to be started again.
    pub(super) fn returning_workers(&self) -> Vec<(Class, Bytes)> {
        self.returns()
            .map(|(worker, bytes)| (worker.params.class, bytes))
            .collect()
    }

    /// Memory reserved against engine growth for workers that are due to start. Sleeping and stopped workers of a more
    /// urgent class are excluded: the engine returns their memory when one of them starts.
    pub(super) fn returning_or_waiting_workers(&self) -> Bytes {
        let counts = |worker: &Worker| {
            let is_away = worker.is_asleep() || worker.was_shed();
            !(is_away && worker.params.class < Class::LlmElastic)
        };
        // What the next request of a running worker takes is lent to the engine, which gives it back before the worker has
        // it. Reading it again costs as much as one token that is streamed without it.
        let returning = self.returns().filter(|(worker, _)| {
            counts(worker) && (worker.is_winding_down() || !worker.is_ready())
        });
        let waiting = self
            .workers
            .values()
            .filter(|worker| worker.is_waiting() && !self.start_is_out_of_reach(worker));
        let waiting = waiting.map(|worker| self.start_least(&worker.params.name));
        returning
            .map(|(_, bytes)| bytes)
            .chain(waiting)
            .fold(Bytes::ZERO, Bytes::saturating_add)
    }

    fn returns(&self) -> impl Iterator<Item = (&Worker, Bytes)> {
        let within_reach = self
            .workers
            .values()
            .filter(|worker| worker.is_wanted() && !self.start_is_out_of_reach(worker));
        within_reach.filter_map(|worker| {
            let name = &worker.params.name;
            let bytes = worker.returns_for(self.start_least(name), self.worker_held(name))?;
            Some((worker, bytes))
        })
    }

    /// Why the engine can never be loaded, with its arithmetic: its floor exceeds the budget, or what the watermark leaves
    /// of it.
    pub(super) fn floor_out_of_reach(&self) -> Option<FloorError> {
        let limits = &self.params.pressure;
        let kept = match self.params.budget.scope {
            // Other processes may leave a machine more than its budget.
            Scope::Machine => Bytes::ZERO,
            Scope::Session => limits.elevated_below.saturating_add(limits.hysteresis),
        };
        let most = self.ledger.budget().saturating_sub(kept);
        self.engine
            .shape()?
            .plan(most, &self.engine.limits()?)
            .err()
    }

    /// The least need of a want, beyond what it holds.
    pub(super) fn needed_by(&self, want: &Want) -> Bytes {
        let held = self.ledger.held_by(want.lease);
        self.asked_by(want).saturating_sub(held)
    }

    /// The least that a want asks for.
    pub(super) fn asked_by(&self, want: &Want) -> Bytes {
        match &want.kind {
            WantKind::Lease(request) => request.min,
            WantKind::Grow { min, .. } => *min,
            WantKind::WorkerStart => self.start_least(&want.tenant),
            WantKind::WorkerVariant { variant } => self.worker_peak(&want.tenant, Some(variant)),
        }
    }

    /// Why nothing is granted to this class now, whatever is free.
    pub(super) fn admission_denial(
        &self,
        tenant: &str,
        class: Class,
        asked: Bytes,
    ) -> Option<Denial> {
        let limit = self.params.pressure.sample_age_max;
        let sampled_at = self.pressure.sampled_at()?;
        let age = self.now.saturating_since(sampled_at);
        let tenant = tenant.to_owned();
        if age > limit {
            return Some(Denial::StaleSample {
                tenant,
                asked,
                age,
                limit,
            });
        }
        let level = self.pressure.level();
        self.waits_for_normal(class)
            .then_some(Denial::PressureHigh {
                tenant,
                asked,
                class,
                level,
            })
    }

    /// Nothing more is handed out while the supervisor drains.
    pub(super) fn not_draining(&self, tenant: &str, asked: Bytes) -> Result<(), Denial> {
        if !self.draining {
            return Ok(());
        }
        let tenant = tenant.to_owned();
        Err(Denial::Draining { tenant, asked })
    }

    /// Classes that can wait are not admitted under pressure.
    fn waits_for_normal(&self, class: Class) -> bool {
        class >= Class::LlmElastic && self.pressure.level() > PressureLevel::Normal
    }

    /// Whether a want can never be served while those stay that it cannot take from.
    pub(super) fn is_out_of_reach(&self, want: &Want) -> bool {
        self.is_beyond(want, Whose::Ours)
    }

    fn is_beyond(&self, want: &Want, whose: Whose) -> bool {
        self.asked_by(want) > self.reach(&want.tenant, want.class, whose)
    }

    /// Whether a worker can never be started while those stay that it cannot take from: of ours if it does not wait in the
    /// queue, where it would have its turn.
    pub(super) fn start_is_out_of_reach(&self, worker: &Worker) -> bool {
        let name = &worker.params.name;
        let whose = if worker.is_waiting() {
            Whose::All
        } else {
            Whose::Ours
        };
        self.start_least(name) > self.reach(name, worker.params.class, whose)
    }

    /// Whether a request waits for which something is kept free.
    pub(super) fn a_request_waits(&self) -> bool {
        self.queue.values().any(|want| self.is_kept_for(want))
    }

    fn is_kept_for(&self, want: &Want) -> bool {
        !self.is_beyond(want, Whose::keep_from(want))
    }

    /// Use of a worker of one size right after a start, where what it has taken since is worth one: to another holder that
    /// is as urgent and waits, or to an engine that streams layers, by the time that an answer loses.
    pub(super) fn renewed(&self, name: &str) -> Option<Bytes> {
        let worker = self.workers.get(name)?;
        let fresh = self.peaks.of(name, None)?.start_with_margin();
        let fresh = fresh.filter(|_| worker.params.variants.is_empty())?;
        let (start, grown) = (worker.reload(), self.worker_held(name));
        let more = worker.steady().min(grown).saturating_sub(fresh);
        let could_have = |want: &Want| {
            let reach = self.reach(&want.tenant, want.class, Whose::keep_from(want));
            self.asked_by(want) <= reach.saturating_add(more)
        };
        let waits = |want: &Want| {
            want.tenant != name && want.class <= worker.params.class && could_have(want)
        };
        let for_a_request = start <= QUICK_START && self.queue.values().any(waits);
        let lost_us = self.engine.streaming_us(grown.saturating_sub(fresh));
        let for_the_engine = worker.params.class <= Class::LlmElastic
            && start < Duration::from_micros(lost_us)
            && worker.has_run(self.now) >= start.saturating_mul(RUN_LEAST)
            // One that pauses between two sentences goes on with the same answer.
            && self.now.saturating_since(worker.idle_since) >= start.max(PAUSE);
        (for_a_request || for_the_engine).then_some(fresh)
    }

    /// The most that can ever be booked for a holder while those stay that it cannot take from.
    fn reach(&self, holder: &str, class: Class, whose: Whose) -> Bytes {
        let keepers = self.keepers(holder, class, whose).into_iter();
        keepers.fold(self.ledger.budget(), |left, (_, bytes)| {
            left.saturating_sub(bytes)
        })
    }

    /// The holders that keep something against a holder of `class`, whatever happens.
    fn keepers(&self, holder: &str, class: Class, whose: Whose) -> Vec<(&str, Bytes)> {
        let mut kept = Vec::from_iter(self.engine.keeps().map(|floor| (ENGINE_TENANT, floor)));
        kept.extend(self.workers.values().filter_map(|worker| {
            let params = &worker.params;
            let gives = params.class > class && !params.pinned;
            let held = self.worker_held(&params.name);
            let keeps = worker.is_up() && !gives && held > Bytes::ZERO;
            keeps.then(|| (params.name.as_str(), worker.steady().min(held)))
        }));
        if whose == Whose::All {
            kept.extend(self.leases.iter().filter_map(|(id, lease)| {
                let stays = lease.kind == LeaseKind::Tenant && !lease.is_ending();
                let keeps = lease.min.min(self.ledger.held_by(id));
                stays.then_some((lease.tenant.as_str(), keeps))
            }));
            kept.push(("", self.ledger.unmanaged()));
        }
        kept.retain(|(name, _)| *name != holder);
        kept
    }

    /// The memory that a worker waits for, if it does.
    pub(super) fn worker_wait(&self, worker: &Worker) -> Option<WorkerWait> {
        if !worker.was_shed() && !worker.is_waiting() {
            return None;
        }
        let (name, class) = (worker.params.name.as_str(), worker.params.class);
        let keepers = self.keepers(name, class, Whose::Ours);
        Some(WorkerWait {
            needs: self.start_least(name),
            configured: worker.params.peak_of(None),
            free: self.available(class, false),
            most: self.reach(name, class, Whose::Ours),
            keepers: keepers
                .into_iter()
                .map(|(keeper, bytes)| (keeper.to_owned(), bytes))
                .collect(),
        })
    }

    pub(super) fn none_waits_before(&self, class: Class) -> bool {
        !self.queue.before(class).any(|want| self.holds_back(want))
    }

    /// Whether those behind it wait while it does.
    pub(super) fn holds_back(&self, want: &Want) -> bool {
        !self.waits_for_normal(want.class) && !self.is_out_of_reach(want)
    }
}

/// Whose share counts as kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    /// That of the engine and of workers.
    Ours,
    /// That of tenants and unmanaged processes too.
    All,
}

impl Whose {
    /// Against whom memory is kept for a want: one without a deadline waits until it can be had.
    const fn keep_from(want: &Want) -> Self {
        match want.deadline {
            Some(_) => Self::Ours,
            None => Self::All,
        }
    }
}

/// A start that a request may wait for. Our choice: a pause between two turns of a conversation.
const QUICK_START: Duration = Duration::from_secs(3);

/// A worker that is started again for the engine has run so many times as long: one request in twenty finds it starting.
const RUN_LEAST: u32 = 20;

/// A worker that has had no request for so long has none of the answer that is spoken. Our choice: sentences of a slow LLM come
/// about as often.
const PAUSE: Duration = Duration::from_secs(1);
