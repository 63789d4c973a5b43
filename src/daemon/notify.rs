//! Notifications to systemd: readiness, watchdog, status.

use std::{sync::Arc, time::Duration};

use sd_notify::NotifyState;

use cotenant_policy::snapshot::{EngineState, Snapshot};

/// Notifies that gRPC and HTTP answer and the budget is fixed; the model may still be loading.
pub(super) fn ready() {
    tell(&[NotifyState::Ready]);
}

/// Notifies that the configuration is being reloaded; [`ready`] follows.
pub(super) fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        // Without a timestamp, systemd would wait for the end of a reload whose start it did not see.
        Err(error) => tracing::debug!(%error, "systemd is not notified of the reload"),
    }
}

pub(super) fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// Returns half of the watchdog's timeout, if systemd has enabled it.
pub(super) fn watchdog_interval() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|time| time / 2)
}

/// Notifies the watchdog, with a status line.
pub(super) fn alive(snapshot: &Arc<Snapshot>) {
    let status = status_line(snapshot);
    tell(&[NotifyState::Watchdog, NotifyState::Status(&status)]);
}

/// Renders `Normal, llm 24/32 layers, KV 4096 tokens, 3 leases, 1.9 GiB free`.
pub(super) fn status_line(snapshot: &Snapshot) -> String {
    let engine = match (&snapshot.engine.shape, &snapshot.engine.in_force) {
        (Some(shape), Some(plan)) => format!(
            ", llm {}/{} layers, KV {} tokens",
            shape.resident_layers(plan),
            shape.layer_count(),
            plan.kv_capacity
        ),
        _ => String::new(),
    };
    let engine = match (&snapshot.engine.failure, snapshot.engine.state) {
        (Some(failure), EngineState::Failed) => format!(", llm failed: {failure}"),
        (_, EngineState::Loading) => ", llm loading".to_owned(),
        _ => engine,
    };
    format!(
        "{}{engine}, {} leases, {} free",
        snapshot.pressure.level,
        snapshot.leases.len(),
        snapshot.memory.free
    )
}

fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::debug!(%error, "systemd could not be notified");
    }
}
