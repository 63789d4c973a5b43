//! State from which decisions are computed, as one read-only value.
//!
//! The arbiter owns it and applies the decisions. [`reach`](super::reach), [`holder`](super::holder) and
//! [`reclaim`](super::reclaim) are pure functions of it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    admission::{Admission, Want, WantKind},
    dwell::Dwell,
    engine_control::EngineControl,
    lease::{LeaseId, LeaseKind, LeaseView},
    lease_table::{Lease, LeaseTable, Phase},
    ledger::Ledger,
    params::{ENGINE_TENANT, ParamFault, Params, ParamsError},
    peaks::{LearnedPeak, Peaks},
    pressure::{Pressure, PressureLevel},
    worker::Worker,
    worker_control::Workers,
};
use cotenant_units::{Bytes, Timestamp};

/// The ledger, its holders, the admission queue, and the pressure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) params: Params,
    pub(super) now: Timestamp,
    pub(super) ledger: Ledger,
    pub(super) pressure: Pressure,
    pub(super) leases: LeaseTable,
    pub(super) queue: Admission,
    pub(super) engine: EngineControl,
    pub(super) workers: Workers,
    /// Learned peaks of holders, from earlier runs and this one.
    #[serde(default)]
    pub(super) peaks: Peaks,
    pub(super) draining: bool,
    /// Dwell before growth.
    pub(super) dwell: Dwell,
    /// Time of the last grant or release; older samples do not show it.
    pub(super) changed_at: Timestamp,
}

impl State {
    /// Creates a state without leases.
    pub(super) fn new(params: Params) -> Result<Self, ParamsError> {
        params.validate()?;
        let mut peaks = params.peaks.clone();
        for worker in &params.workers {
            peaks.forget_other_models(&worker.name, worker.model.as_deref());
        }
        let workers = params.workers.iter();
        let workers = workers.map(|worker| (worker.name.clone(), Worker::new(worker)));
        Ok(Self {
            now: Timestamp::START,
            ledger: Ledger::new(params.budget.bytes(), params.budget.reserve),
            pressure: Pressure::new(params.pressure),
            leases: LeaseTable::default(),
            queue: Admission::default(),
            engine: EngineControl::new(params.engine.as_ref()),
            workers: workers.collect(),
            peaks,
            draining: false,
            dwell: Dwell::new(params.pressure.dwell, params.pressure.dwell_by_growth),
            changed_at: Timestamp::START,
            params,
        })
    }

    /// Applies new settings, except those of the engine and the scope. Those of a running worker apply from its next
    /// start.
    ///
    /// # Errors
    /// The first invalid setting, such as a budget below `held`; nothing is changed.
    pub(super) fn reconfigure(&mut self, params: Params) -> Result<(), ParamFault> {
        let (budget, held) = (params.budget.bytes(), self.ledger.held());
        if held > budget && budget < self.ledger.budget() {
            return Err(ParamFault {
                setting: "budget".to_owned(),
                value: budget.to_string(),
                problem: format!(
                    "is below the {held} that is held; shed the LLM or stop workers first, or restart"
                ),
            });
        }
        self.resize(params)
    }

    /// Applies settings for a budget that shrank by itself: bytes held beyond it have to be reclaimed.
    ///
    /// # Errors
    /// The first invalid setting; nothing is changed.
    pub(super) fn resize(&mut self, mut params: Params) -> Result<(), ParamFault> {
        params.engine.clone_from(&self.params.engine);
        params.budget.scope = self.params.budget.scope;
        params.peaks.clone_from(&self.params.peaks);
        if let Some(fault) = params
            .validate()
            .err()
            .and_then(|error| error.faults.into_iter().next())
        {
            return Err(fault);
        }
        self.ledger
            .set_budget(params.budget.bytes(), params.budget.reserve);
        self.params = params;
        self.renew_dwell();
        let names: Vec<String> = self.workers.keys().cloned().collect();
        for name in names {
            self.renew_worker(&name);
        }
        Ok(())
    }

    /// Applies the configured dwell and the measured duration of growth.
    pub(super) fn renew_dwell(&mut self) {
        let mut limits = self.params.pressure;
        self.dwell.set_span(limits.dwell, limits.dwell_by_growth);
        limits.dwell = self.dwell.base();
        self.pressure.set_params(limits);
    }

    /// Applies a worker's settings, unless it is running.
    pub(super) fn renew_worker(&mut self, name: &str) {
        let worker = self
            .workers
            .get_mut(name)
            .filter(|worker| worker.run().is_none());
        if let (Some(worker), Some(params)) = (worker, self.params.worker(name))
            && worker.renew(params)
        {
            self.peaks
                .forget_other_models(name, params.model.as_deref());
        }
    }

    /// Returns a lease as its holder and operators see it.
    pub(super) fn lease_view(&self, id: LeaseId) -> Option<LeaseView> {
        let mut view = self.leases.view(id, &self.ledger)?;
        if view.kind == LeaseKind::Engine {
            // Untouched memory is held but not used.
            let untouched = self.engine.kv.untouched;
            view.memory.used = view.memory.used.map(|used| used.saturating_sub(untouched));
        }
        Some(view)
    }

    pub(super) fn engine_held(&self) -> Bytes {
        self.engine
            .lease
            .map_or(Bytes::ZERO, |id| self.ledger.held_by(id))
    }

    pub(super) fn worker_held(&self, name: &str) -> Bytes {
        let lease = self.workers.get(name).and_then(Worker::lease);
        lease.map_or(Bytes::ZERO, |id| self.ledger.held_by(id))
    }

    /// Returns the bytes that must be free for a worker to reach a variant: configured or learned.
    pub(super) fn worker_peak(&self, name: &str, variant: Option<&str>) -> Bytes {
        let Some(worker) = self.workers.get(name) else {
            return Bytes::ZERO;
        };
        let variant = worker.params.variant(variant);
        let variant = variant.map(|known| known.name.as_str());
        let (configured, steady) = (
            worker.params.peak_of(variant),
            worker.params.steady_of(variant),
        );
        // Use beyond the budget was measured without that limit: no worker waits for more than the budget, or its
        // configured peak.
        let expected = match self.peaks.of(name, variant) {
            Some(peak) if worker.params.rest.auto => peak.with_margin(),
            _ => self.peaks.expected(name, variant, configured, steady),
        };
        expected.min(self.ledger.budget().max(configured))
    }

    /// Returns the bytes that must be free to start a worker: its peak if its starts are unknown, otherwise the larger
    /// of its learned start and its size at rest, at most its peak. The rest of its peak is booked as well if it is
    /// free.
    pub(super) fn start_least(&self, name: &str) -> Bytes {
        let peak = self.worker_peak(name, None);
        let Some(worker) = self.workers.get(name) else {
            return peak;
        };
        let variant = worker.params.variant(None).map(|first| first.name.as_str());
        let learned = self.peaks.of(name, variant);
        let start = learned.and_then(LearnedPeak::start_with_margin);
        start.map_or(peak, |start| {
            let rest = if worker.params.rest.auto {
                Bytes::ZERO
            } else {
                worker.params.steady_of(variant)
            };
            start.max(rest).min(peak)
        })
    }

    pub(super) fn configured_peak(&self, name: &str, variant: Option<&str>) -> Bytes {
        let worker = self.workers.get(name);
        worker.map_or(Bytes::ZERO, |worker| worker.params.peak_of(variant))
    }

    /// Returns the engine's bytes held but not used in a sample of this time: later measurements may not be part of it.
    pub(super) fn promised_at(&self, sampled_at: Timestamp) -> Bytes {
        let measured = self.ledger.measurement(ENGINE_TENANT);
        let promised = measured.map_or(Bytes::ZERO, |measured| {
            self.engine_held().saturating_sub(measured.used)
        });
        let is_newer = measured.is_some_and(|measured| measured.at > sampled_at);
        if is_newer {
            promised.max(self.pressure.promised())
        } else {
            promised
        }
    }

    /// Returns the size that a holder will have after its present change.
    fn goes_to(&self, lease: &Lease, held: Bytes) -> Bytes {
        match (&lease.phase, lease.kind) {
            (Phase::Revoking(revocation), _) => revocation.target.bytes,
            (Phase::Granted, LeaseKind::Engine) => {
                let goal = self.engine.goal();
                goal.map_or(held, |goal| self.engine.bytes_in(goal))
            }
            (Phase::Granted, LeaseKind::Worker) => {
                let worker = self.workers.get(&lease.tenant);
                worker.map_or(held, |worker| worker.stays(held).min(held))
            }
            (Phase::Granted, LeaseKind::Tenant)
            | (Phase::Ending { .. } | Phase::Residual { .. }, _) => held,
        }
    }

    /// Returns the bytes that all leases in transition are expected to release.
    pub(super) fn coming_back(&self) -> Bytes {
        let (now, settle) = (self.now, self.params.shed.settle);
        let coming = self.leases.iter().map(|(id, lease)| {
            let held = self.ledger.held_by(id);
            if let Phase::Ending {
                since,
                unacknowledged,
                ..
            } = &lease.phase
            {
                // Bytes that its holder may use until the end of its term are not expected before that.
                let over = unacknowledged.map_or(*since, |open| open.until);
                let is_awaited = now <= over + settle && over <= now + settle;
                return if is_awaited { held } else { Bytes::ZERO };
            }
            held.saturating_sub(self.goes_to(lease, held))
        });
        coming.fold(Bytes::ZERO, Bytes::saturating_add)
    }

    /// Returns the used bytes that holders were asked for and have not released.
    ///
    /// At Critical, only the engine is waited for beyond the settle time.
    pub(super) fn physically_coming_back(&self, level: PressureLevel) -> Bytes {
        let patient = level < PressureLevel::Critical;
        let is_awaited = |lease: &Lease| match (&lease.phase, lease.kind) {
            (Phase::Revoking(revocation), _) => {
                let is_new = self.now < revocation.asked_at + self.params.shed.settle;
                !revocation.voluntary && (patient || is_new)
            }
            (_, LeaseKind::Engine) => !self.engine.plans.pending.is_empty(),
            (_, LeaseKind::Worker) => patient,
            (_, LeaseKind::Tenant) => false,
        };
        let awaited = self.leases.iter().filter(|(_, lease)| is_awaited(lease));
        let coming = awaited.map(|(id, lease)| {
            let held = self.ledger.held_by(id);
            let used = self.ledger.used_by(&lease.holder).unwrap_or(held);
            match self.goes_to(lease, held) {
                stays if stays < held => used.saturating_sub(stays),
                _ => Bytes::ZERO,
            }
        });
        coming.fold(Bytes::ZERO, Bytes::saturating_add)
    }

    /// Returns the booking for a worker that now requests its lease itself.
    pub(super) fn reserved_until_asked(&self, want: &Want) -> Option<(LeaseId, Bytes)> {
        let worker = self
            .workers
            .get(&want.tenant)
            .filter(|worker| worker.params.own_lease)?;
        let id = worker.lease()?;
        matches!(want.kind, WantKind::Lease(_)).then(|| (id, self.ledger.held_by(id)))
    }

    /// Whether a request under this name is that of a running worker with `own_lease`.
    pub(super) fn asks_for_itself(&self, name: &str) -> bool {
        let worker = self.workers.get(name);
        worker.is_some_and(|worker| worker.params.own_lease && worker.is_up())
    }

    /// Whether the workers taken over are measured, and a later sample shows the remaining memory: while unmeasured
    /// they may have grown without bound.
    pub(super) fn taken_over_are_measured(&self) -> bool {
        self.workers.values().all(|worker| {
            let Some(at) = worker.run().and_then(|run| run.taken_over_at) else {
                return true;
            };
            let measured = self.ledger.measurement(&worker.params.name);
            let known = measured.zip(self.pressure.sampled_at());
            known.is_some_and(|(measured, sampled)| measured.at >= at && sampled > measured.at)
                || self.now >= at + MEASURED_WITHIN
        })
    }

    /// Returns the time that a holder has to reach a lower target; longer for a worker notified of pressure.
    pub(super) fn target_span(&self, id: LeaseId) -> Duration {
        let shed = &self.params.shed;
        self.leases.get(id).map_or(shed.settle, |lease| {
            let span = shed.deadlines.of(lease.class);
            match lease.kind {
                LeaseKind::Worker => span.max(NOTIFIED_DEADLINE_MIN),
                LeaseKind::Engine | LeaseKind::Tenant => span,
            }
        })
    }

    /// Returns the bytes that a worker shrunk by a notification lacks to its steady size.
    pub(super) fn notified_lacks(&self, worker: &Worker) -> Option<Bytes> {
        let id = worker
            .lease()
            .filter(|_| worker.params.shrinks_to.is_some())?;
        let granted = matches!(self.leases.get(id)?.phase, Phase::Granted);
        let more = worker.steady().saturating_sub(self.ledger.held_by(id));
        (worker.is_ready() && granted && more > Bytes::ZERO).then_some(more)
    }
}

/// Time after which the LLM is loaded even if a worker taken over is still unmeasured: four sampling intervals of
/// maximum length.
const MEASURED_WITHIN: Duration = Duration::from_secs(4);

/// Minimum time for a worker of any class: programs that watch memory pressure usually use averages of 100 ms within 1
/// s (systemd's `MemoryPressureThresholdSec=`), and releasing 1 GiB took 151 ms.
const NOTIFIED_DEADLINE_MIN: Duration = Duration::from_secs(1);
