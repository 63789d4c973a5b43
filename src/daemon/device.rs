//! Device of the control loop: performs actions on engine, workers and machine.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use super::{
    control_handle::ControlHandle, control_loop::Perform, engine::EngineDriver, figures::Figures,
    handoff::Handoff, measure::Measurer, notify, peaks::PeakStore, record::Recorder,
    sampling::Pace, watchdog::Watchdog, workers::Workers,
};
use cotenant_memory::emergency;
use cotenant_policy::{
    arbiter::Arbiter,
    decision::{Decision, EngineDecision, LeaseDecision, MemoryDecision, NextLoad, WorkerDecision},
    event::{Action, Event},
    lease::{LeaseKind, LeaseView},
    pressure::{LevelChange, PressureLevel},
    snapshot::Snapshot,
};
use cotenant_rpc::supervisor::Notice;
use cotenant_telemetry::Metrics;
use cotenant_units::Timestamp;
use tracing::Level;

/// Interval between rounds of measuring every holder, aligned to a sample. Verification of a shed does not wait for it:
/// the arbiter requests a measurement then.
const ROUND: Duration = Duration::from_millis(500);

/// Longest interval between two rounds, with or without samples.
const ROUND_MAX: Duration = Duration::from_secs(1);

/// Objects on which actions operate.
pub(super) struct Device {
    pub(super) control: Arc<ControlHandle>,
    pub(super) engine: Option<EngineDriver>,
    pub(super) workers: Workers,
    pub(super) pace: Pace,
    pub(super) peaks: PeakStore,
    pub(super) measurer: Measurer,
    pub(super) watchdog: Watchdog,
    pub(super) accounts: Accounts,
    pub(super) upkeep: Upkeep,
}

/// Destinations of each event's record: journal, hand-over to the next run, metrics.
pub(super) struct Accounts {
    pub(super) recorder: Recorder,
    pub(super) handoff: Handoff,
    pub(super) figures: Figures,
    pub(super) metrics: Arc<Metrics>,
}

pub(super) struct Upkeep {
    measured: Timestamp,
    notified: Timestamp,
    /// Notification interval of the service manager's watchdog, if enabled.
    notify_every: Option<Duration>,
}

impl Upkeep {
    /// Creates the state with all work last done at `now`.
    pub(super) const fn new(now: Timestamp, notify_every: Option<Duration>) -> Self {
        Self {
            measured: now,
            notified: now,
            notify_every,
        }
    }

    fn next(&self) -> Timestamp {
        let measure = self.measured + ROUND_MAX;
        self.notify_every
            .map_or(measure, |every| measure.min(self.notified + every))
    }
}

impl Perform for Device {
    fn wake(&mut self, now: Timestamp) {
        self.control.beat(now);
    }

    fn record_event(&mut self, now: Timestamp, event: &Event, arbiter: &Arbiter) {
        if let Event::WorkerDied { certificate } = event {
            let class = certificate.verdict.class.name();
            self.accounts
                .metrics
                .worker_died(&certificate.worker, class);
        }
        // A sample may trigger a shed; the next event of another kind records the checkpoint.
        if !matches!(event, Event::Sampled(_)) {
            emergency::outside(|| self.accounts.recorder.checkpoint_if_wanted(now, arbiter));
        }
        self.accounts.recorder.event(now, event);
    }

    fn record_actions(&mut self, now: Timestamp, actions: &[Action]) {
        self.accounts.recorder.actions(now, actions);
    }

    fn apply_plans(&mut self, actions: &[Action]) {
        let Some(engine) = &self.engine else { return };
        for action in actions {
            if let Action::ApplyPlan { revision, plan, .. } = action {
                engine.apply(*revision, plan.clone());
            }
        }
    }

    fn publish(&mut self, arbiter: &Arbiter, state: Arc<Snapshot>, actions: &[Action]) {
        // First: the state that a caller is shown must survive an immediate kill of this process.
        self.accounts.handoff.keep(arbiter);
        self.control.publish(Arc::clone(&state));
        self.control.history().observe(SystemTime::now(), &state);
        let last_end = |worker: &str| self.workers.last_end(worker);
        self.accounts.figures.turn(&state, actions, last_end);
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::SetTarget {
                lease,
                nonce,
                bytes,
                deadline,
                reason,
            } => {
                let state = self.control.state();
                let of_worker =
                    |view: &&LeaseView| view.id == lease && view.kind == LeaseKind::Worker;
                if let Some(view) = state.leases.iter().find(of_worker) {
                    self.workers.tell_memory_is_short(&view.tenant);
                }
                self.control.notify(Notice::Target {
                    lease,
                    nonce,
                    bytes,
                    deadline,
                    reason: reason.to_string(),
                });
            }
            Action::EndLease { lease, end } => {
                let reason = format!("lease {lease} {end}");
                tracing::warn!(lease = lease.id.0, "{reason}");
                self.control.notify(Notice::Ended {
                    lease: lease.id,
                    reason,
                });
            }
            Action::LoadEngine { revision, plan } => {
                tracing::info!(
                    revision,
                    kv_capacity = plan.kv_capacity.get(),
                    "loading the model"
                );
                if let Some(engine) = &mut self.engine {
                    engine.load(revision, plan, self.control.state().engine.shape.clone());
                }
            }
            Action::ApplyPlan {
                revision,
                plan,
                reason,
            } => {
                tracing::info!(
                    revision,
                    resident = plan.resident.len(),
                    kv_capacity = plan.kv_capacity.get(),
                    %reason,
                    "engine changes its plan"
                );
            }
            Action::StartWorker { worker, variant } => self.workers.start(&worker, variant),
            Action::StopWorker { worker, reason } => {
                tracing::warn!(worker, %reason, "worker is stopped");
                self.workers.stop(&worker, reason.to_string());
            }
            Action::AbortWorker { worker, evidence } => {
                tracing::error!(worker, evidence, "worker does not respond and is killed");
                self.workers.abort(&worker, evidence);
            }
            Action::ResizeWorker { worker, variant } => {
                tracing::info!(worker, variant, "worker changes its size");
                self.workers.resize(worker, variant);
            }
            Action::Measure { tenant } => self.measurer.measure([tenant]),
            Action::EmptyPagePool { bytes } => self.measurer.empty_page_pool(bytes),
            Action::SampleAfter { wait } => self.pace.set(wait),
            Action::LevelChanged(LevelChange { from, to, reason }) => {
                tracing::warn!(%from, %to, %reason, "pressure level changes");
                // Workers release spare memory at once; the next sample shows the result.
                if to == PressureLevel::Critical {
                    self.workers.tell_all_memory_is_short();
                }
            }
            Action::InspectModel => {
                if let Some(engine) = &self.engine {
                    engine.inspect();
                }
            }
            Action::ReinspectModel => {
                if let Some(engine) = &self.engine {
                    engine.reinspect();
                }
            }
            Action::StorePeaks { peaks } => self.peaks.store(peaks),
            Action::Weighed { weighing } => {
                tracing::debug!(?weighing, "weighed the candidates for reclaim");
            }
            Action::Decided { decision } => match level_of(&decision) {
                Level::ERROR => tracing::error!("{decision}"),
                Level::WARN => tracing::warn!("{decision}"),
                _ => tracing::info!("{decision}"),
            },
            Action::Answer { .. } => {} // delivered by the loop
        }
    }

    fn next_upkeep(&self) -> Option<Timestamp> {
        Some(self.upkeep.next())
    }

    fn upkeep(&mut self, now: Timestamp, arbiter: &Arbiter, sampled: bool) {
        let state = self.control.state();
        let since = now.saturating_since(self.upkeep.measured);
        // Measure with this sample if the next one would be too late.
        let last_chance = since + state.pressure.sample_interval > ROUND_MAX;
        if since >= ROUND_MAX || (sampled && (since >= ROUND || last_chance)) {
            self.upkeep.measured = now;
            let held = state.leases.iter().filter(|lease| !lease.waits());
            self.measurer
                .measure(held.map(|lease| lease.holder().to_owned()));
            self.control.note_next_shed(arbiter.next_shed().as_ref());
            self.accounts
                .metrics
                .set_journal_lost(self.accounts.recorder.lost());
        }
        if self.watchdog.is_unarmed()
            && let Some(floor) = arbiter.floor_plan()
        {
            self.watchdog.arm(floor);
        }
        let due = |every| now.saturating_since(self.upkeep.notified) >= every;
        if self.upkeep.notify_every.is_some_and(due) {
            self.upkeep.notified = now;
            notify::alive(&state);
        }
    }
}

/// Returns the log level of a decision: an error ends a service until something changes, a warning reports an
/// unexpected event.
const fn level_of(decision: &Decision) -> Level {
    use {EngineDecision as Engine, LeaseDecision as Lease, WorkerDecision as Worker};
    match decision {
        Decision::Engine(Engine::Gone {
            next: NextLoad::NeedsChange | NextLoad::GivenUp | NextLoad::NothingToLoad,
            ..
        }) => Level::ERROR,
        Decision::Engine(
            Engine::FloorExceedsBudget { .. }
            | Engine::Short { .. }
            | Engine::NotApplied { .. }
            | Engine::Gone { .. }
            | Engine::Unconfirmed
            | Engine::Unanswered { .. },
        )
        | Decision::Lease(
            Lease::NotBooked { .. }
            | Lease::BeyondLease { .. }
            | Lease::ClosedUnaccounted { .. }
            | Lease::NotTakenOver { .. },
        )
        | Decision::Worker(
            Worker::Unresponsive { .. }
            | Worker::GivenUp { .. }
            | Worker::NeedsOperator { .. }
            | Worker::Outgrown { .. }
            | Worker::PeakRaised { .. }
            | Worker::IgnoresPressure(_),
        )
        | Decision::Memory(MemoryDecision::RebootAdvised(_) | MemoryDecision::TooSmall { .. }) => {
            Level::WARN
        }
        _ => Level::INFO,
    }
}
