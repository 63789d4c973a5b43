//! `grpc.health.v1`: health of each part.

use tonic_health::{ServingStatus, server::HealthReporter};

/// The whole supervisor, as `grpc_health_probe` asks without a name.
pub const OVERALL: &str = "";
/// The lease service.
pub const LEASES: &str = "cotenant.v1.LeaseService";
/// The operator service.
pub const OPERATORS: &str = "cotenant.v1.OperatorService";
/// The generation service.
pub const LLM: &str = "cotenant.v1.LlmService";
/// The engine: serving while it answers.
pub const ENGINE: &str = "cotenant.engine";
/// Pressure: serving unless it is Critical.
pub const PRESSURE: &str = "cotenant.pressure";

/// The name of a worker: `cotenant.worker.asr`.
#[must_use]
pub fn worker(name: &str) -> String {
    format!("cotenant.worker.{name}")
}

/// Sets what the health service says. Clones set the same.
#[derive(Clone, Debug)]
pub struct Health {
    reporter: HealthReporter,
}

impl Health {
    /// Nothing serves but the services themselves, until it is set.
    pub(super) async fn new(reporter: HealthReporter) -> Self {
        let health = Self { reporter };
        for name in [OVERALL, ENGINE, PRESSURE] {
            health.set(name, false).await;
        }
        for name in [LEASES, OPERATORS, LLM] {
            health.set(name, true).await;
        }
        health
    }

    /// Sets whether `name` serves; a name that was not known before becomes known.
    pub async fn set(&self, name: &str, serving: bool) {
        let status = if serving {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        self.reporter.set_service_status(name, status).await;
    }
}
