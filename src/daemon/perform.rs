//! Carries out what the arbiter wants. Starts the work and never waits for it: outcomes come back as events.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::oneshot;

use super::{engine::EngineDriver, hub::Hub, measure::Measurer, peaks::PeakStore, sampling::Pace, workers::Workers};
use crate::{
    journal,
    policy::{
        event::{Action, Answer},
        lease::{LeaseKind, LeaseView, Ticket},
        pressure::PressureLevel,
    },
    rpc::supervisor::Notice,
};

/// Everything that actions act on.
pub(super) struct Device {
    pub(super) hub: Arc<Hub>,
    pub(super) engine: Option<EngineDriver>,
    pub(super) workers: Workers,
    pub(super) pace: Pace,
    pub(super) peaks: PeakStore,
    pub(super) measurer: Measurer,
    /// Callers who wait.
    pub(super) answers: BTreeMap<Ticket, oneshot::Sender<Answer>>,
}

impl Device {
    /// Gives the engine its orders, before any action is [performed](Self::perform).
    pub(super) fn order(&self, actions: &[Action]) {
        let Some(engine) = &self.engine else { return };
        for action in actions {
            if let Action::ApplyPlan { revision, plan, .. } = action {
                engine.apply(*revision, plan.clone());
            }
        }
    }

    /// Carries out one action that the engine has not had as an order.
    pub(super) fn perform(&mut self, action: Action) {
        match action {
            Action::Answer { ticket, answer } => {
                if let Some(sender) = self.answers.remove(&ticket) {
                    let _ = sender.send(answer); // a caller that is gone needs no answer
                }
            }
            Action::SetTarget {
                lease,
                nonce,
                bytes,
                deadline,
                reason,
            } => {
                let state = self.hub.state();
                let of_worker = |view: &&LeaseView| view.id == lease && view.kind == LeaseKind::Worker;
                if let Some(view) = state.leases.iter().find(of_worker) {
                    self.workers.tell_memory_is_short(&view.tenant);
                }
                self.hub.notify(Notice::Target {
                    lease,
                    nonce,
                    bytes,
                    deadline,
                    reason,
                });
            }
            Action::EndLease { lease, end } => {
                let reason = journal::render_lease_end(&lease, &end);
                tracing::warn!(lease = lease.id.0, "{reason}");
                self.hub.notify(Notice::Ended {
                    lease: lease.id,
                    reason,
                });
            }
            Action::LoadEngine { revision, plan } => {
                tracing::info!(
                    revision,
                    resident = plan.resident.len(),
                    kv_capacity = plan.kv_capacity.get(),
                    "loading the model"
                );
                if let Some(engine) = &mut self.engine {
                    engine.load(revision, plan, self.hub.state().engine.shape.clone());
                }
            }
            Action::ApplyPlan { revision, plan, reason } => {
                tracing::info!(
                    revision,
                    resident = plan.resident.len(),
                    kv_capacity = plan.kv_capacity.get(),
                    reason,
                    "engine changes its plan"
                );
            }
            Action::StartWorker { worker, variant } => self.workers.start(&worker, variant),
            Action::StopWorker { worker, reason } => {
                tracing::warn!(worker, reason, "worker is stopped");
                self.workers.stop(&worker, reason);
            }
            Action::AbortWorker { worker, evidence } => {
                tracing::error!(worker, evidence, "worker does not respond and is ended");
                self.workers.abort(&worker, evidence);
            }
            Action::ResizeWorker { worker, variant } => {
                tracing::info!(worker, variant, "worker changes its size");
                self.workers.resize(worker, variant);
            }
            Action::Measure { tenant } => self.measurer.measure([tenant]),
            Action::SampleAfter { wait } => self.pace.set(wait),
            Action::LevelChanged { from, to, reason } => {
                tracing::warn!(%from, %to, reason, "pressure level changes");
                // Whoever can spare something does so at once; what it brings is in the next sample.
                if to == PressureLevel::Critical {
                    self.workers.tell_all_memory_is_short();
                }
            }
            Action::StorePeaks { peaks } => self.peaks.store(peaks),
            Action::Weighed { weighing } => tracing::debug!(?weighing, "weighed who gives memory back"),
            Action::Decided { decision } => tracing::info!("{}", journal::render_decision(&decision)),
            Action::Explain { message } => tracing::info!("{message}"),
        }
    }
}
