//! Feasibility of requests, so that an unsatisfiable one does not block the queue.
//!
//! The engine keeps its floor, and running workers keep their size at rest unless the waiting request may stop them.
//! The rest of the budget is the maximum that a holder can get while they stay. A larger request still waits, since one
//! of them may end; but no holder is kept small for it, it does not block the queue, and it is explained with its need,
//! the bytes available, and the remedy.
//!
//! Requests of the supervisor itself have no deadline. Nothing is reserved for them either while the use of tenants and
//! unmanaged processes makes them infeasible: those may end in a minute or never, and until then the engine uses the
//! memory. Afterwards the request takes its turn ([`admission`](crate::admission)).

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
    /// Returns the bytes that may be booked for a class now: free, minus those reserved for returning holders.
    ///
    /// The engine's floor is reserved against every class, since a running engine cannot give it up either. The space
    /// of a worker is reserved against less urgent classes, and against tenants of the same class.
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

    /// Returns the space reserved for wanted workers that do not run, are not in the queue and can be started; and the
    /// bytes that workers about to be restarted lack.
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
        // Memory for the next request of a running worker is lent to the engine, which returns it before the worker
        // needs it. Reading it again costs as much as streaming it for one token.
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

    /// Returns the arithmetic if the engine can never be loaded: its floor exceeds the budget, or the part above the
    /// watermark.
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

    /// Returns the minimum need of a request beyond the bytes it holds.
    pub(super) fn needed_by(&self, want: &Want) -> Bytes {
        let held = self.ledger.held_by(want.lease);
        self.asked_by(want).saturating_sub(held)
    }

    /// Returns the minimum size that a request asks for.
    pub(super) fn asked_by(&self, want: &Want) -> Bytes {
        match &want.kind {
            WantKind::Lease(request) => request.min,
            WantKind::Grow { min, .. } => *min,
            WantKind::WorkerStart => self.start_least(&want.tenant),
            WantKind::WorkerVariant { variant } => self.worker_peak(&want.tenant, Some(variant)),
        }
    }

    /// Returns the reason why nothing is granted to this class now, regardless of free memory.
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

    /// Denies grants while the supervisor drains.
    pub(super) fn not_draining(&self, tenant: &str, asked: Bytes) -> Result<(), Denial> {
        if !self.draining {
            return Ok(());
        }
        let tenant = tenant.to_owned();
        Err(Denial::Draining { tenant, asked })
    }

    /// Whether this class is not admitted at the present level.
    fn waits_for_normal(&self, class: Class) -> bool {
        class >= Class::LlmElastic && self.pressure.level() > PressureLevel::Normal
    }

    /// Whether a request can never be served while the holders stay that it cannot reclaim.
    pub(super) fn is_out_of_reach(&self, want: &Want) -> bool {
        self.is_beyond(want, Whose::Ours)
    }

    fn is_beyond(&self, want: &Want, whose: Whose) -> bool {
        self.asked_by(want) > self.reach(&want.tenant, want.class, whose)
    }

    /// Whether a worker can never start while the holders stay that it cannot reclaim. Outside the queue only the
    /// engine and workers count; in the queue it would have its turn.
    pub(super) fn start_is_out_of_reach(&self, worker: &Worker) -> bool {
        let name = &worker.params.name;
        let whose = if worker.is_waiting() {
            Whose::All
        } else {
            Whose::Ours
        };
        self.start_least(name) > self.reach(name, worker.params.class, whose)
    }

    /// Whether a request waits for which memory is reserved.
    pub(super) fn a_request_waits(&self) -> bool {
        self.queue.values().any(|want| self.is_kept_for(want))
    }

    fn is_kept_for(&self, want: &Want) -> bool {
        !self.is_beyond(want, Whose::keep_from(want))
    }

    /// Returns the use of a worker of one size right after a restart, if its growth since then justifies one: for a
    /// waiting request of another holder that is at least as urgent, or for an engine that streams layers, by the time
    /// that an answer loses.
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
            // During a pause between two sentences the same answer continues.
            && self.now.saturating_since(worker.idle_since) >= start.max(PAUSE);
        (for_a_request || for_the_engine).then_some(fresh)
    }

    /// Returns the maximum bytes for a holder while the holders stay that it cannot reclaim.
    fn reach(&self, holder: &str, class: Class, whose: Whose) -> Bytes {
        let keepers = self.keepers(holder, class, whose).into_iter();
        keepers.fold(self.ledger.budget(), |left, (_, bytes)| {
            left.saturating_sub(bytes)
        })
    }

    /// Returns the holders that cannot be reclaimed completely for `class`, with the bytes that they keep.
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

    /// Returns the memory that a worker waits for.
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

    /// Whether it blocks the requests behind it.
    pub(super) fn holds_back(&self, want: &Want) -> bool {
        !self.waits_for_normal(want.class) && !self.is_out_of_reach(want)
    }
}

/// Holders whose memory counts as kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    /// The engine and workers.
    Ours,
    /// Also tenants and unmanaged processes.
    All,
}

impl Whose {
    /// Returns the holders against which memory is reserved for a request: one without a deadline can wait for all of
    /// them.
    const fn keep_from(want: &Want) -> Self {
        match want.deadline {
            Some(_) => Self::Ours,
            None => Self::All,
        }
    }
}

/// Longest start that a request waits for. Our choice: a pause between two turns of a conversation.
const QUICK_START: Duration = Duration::from_secs(3);

/// Minimum run time before a restart for the engine, as a multiple of the start: one request in twenty finds it
/// starting.
const RUN_LEAST: u32 = 20;

/// Time without requests after which a worker has no part in a spoken answer. Our choice: about the interval between
/// sentences of a slow LLM.
const PAUSE: Duration = Duration::from_secs(1);
