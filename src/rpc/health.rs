//! `grpc.health.v1`: health of each part.

use std::collections::BTreeMap;

use futures_util::{StreamExt, stream::BoxStream};
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tonic::{Request, Response, Status};

use super::health_v1::{
    HealthCheckRequest, HealthCheckResponse, HealthListRequest, HealthListResponse,
    health_check_response::ServingStatus,
    health_server::{self, HealthServer},
};

/// The whole supervisor, queried by `grpc_health_probe` without a name.
pub const OVERALL: &str = "";
/// The lease service.
pub const LEASES: &str = "cotenant.v1.LeaseService";
/// The operator service.
pub const OPERATORS: &str = "cotenant.v1.OperatorService";
/// The generation service.
pub const LLM: &str = "cotenant.v1.LlmService";
/// The engine: serving while it takes requests.
pub const ENGINE: &str = "cotenant.engine";
/// Pressure: serving unless it is Critical.
pub const PRESSURE: &str = "cotenant.pressure";
/// The machine: serving unless a reboot is advised.
pub const REBOOT: &str = "cotenant.reboot";

/// The name of a worker: `cotenant.worker.asr`.
pub fn worker(name: &str) -> String {
    format!("cotenant.worker.{name}")
}

/// The health of each part by name. Clones share it.
#[derive(Clone, Debug)]
pub struct Health(watch::Sender<BTreeMap<String, ServingStatus>>);

impl Health {
    /// Initially the services are serving and no reboot is advised.
    pub(super) fn new() -> Self {
        let parts = [OVERALL, ENGINE, PRESSURE].map(|name| (name, ServingStatus::NotServing));
        let services = [LEASES, OPERATORS, LLM, REBOOT].map(|name| (name, ServingStatus::Serving));
        let known = parts
            .into_iter()
            .chain(services)
            .map(|(name, status)| (name.to_owned(), status));
        Self(watch::Sender::new(known.collect()))
    }

    /// Sets whether `name` serves; new names are added. Watchers are only sent changes.
    pub fn set(&self, name: &str, serving: bool) {
        let status = if serving {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        self.0
            .send_if_modified(|known| known.insert(name.to_owned(), status) != Some(status));
    }

    pub(super) fn service(&self) -> HealthServer<Self> {
        HealthServer::new(self.clone())
    }
}

#[tonic::async_trait]
impl health_server::Health for Health {
    type WatchStream = BoxStream<'static, Result<HealthCheckResponse, Status>>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let status = self.0.borrow().get(&request.get_ref().service).copied();
        status
            .map(|status| Response::new(response(status)))
            .ok_or_else(|| Status::not_found("unknown service"))
    }

    async fn list(
        &self,
        _request: Request<HealthListRequest>,
    ) -> Result<Response<HealthListResponse>, Status> {
        let known = self.0.borrow();
        let statuses = known
            .iter()
            .map(|(name, status)| (name.clone(), response(*status)));
        Ok(Response::new(HealthListResponse {
            statuses: statuses.collect(),
        }))
    }

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let service = request.into_inner().service;
        let mut last = None;
        let changes = WatchStream::new(self.0.subscribe()).filter_map(move |known| {
            let status = known
                .get(&service)
                .copied()
                .unwrap_or(ServingStatus::ServiceUnknown);
            let changed = last.replace(status) != Some(status);
            std::future::ready(changed.then(|| Ok(response(status))))
        });
        Ok(Response::new(changes.boxed()))
    }
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse {
        status: status.into(),
    }
}
