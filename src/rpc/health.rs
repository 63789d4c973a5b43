//! `grpc.health.v1`: health of each part.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    future::{Ready, ready},
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use tonic::{
    Request, Response, Status,
    body::Body,
    codegen::{BoxFuture, Service, http},
    server::{Grpc, NamedService, UnaryService},
};
use tonic_health::{
    ServingStatus,
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};
use tonic_prost::ProstCodec;

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
    known: Known,
}

/// What is known, and whether it serves.
type Known = Arc<Mutex<BTreeMap<String, bool>>>;

impl Health {
    /// Nothing serves but the services themselves, until it is set.
    pub(super) async fn new() -> Self {
        let health = Self {
            reporter: HealthReporter::new(),
            known: Known::default(),
        };
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
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(name.to_owned(), serving);
    }

    /// The service that says it.
    pub(super) fn service(&self) -> Listing {
        Listing {
            inner: HealthServer::new(HealthService::from_health_reporter(self.reporter.clone())),
            known: Arc::clone(&self.known),
        }
    }
}

/// The health service with `List`, which the library does not have yet.
#[derive(Clone)]
pub(super) struct Listing {
    inner: HealthServer<HealthService>,
    known: Known,
}

impl NamedService for Listing {
    const NAME: &'static str = <HealthServer<HealthService> as NamedService>::NAME;
}

impl Service<http::Request<Body>> for Listing {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        if request.uri().path() != LIST {
            return self.inner.call(request);
        }
        let list = List(Arc::clone(&self.known));
        Box::pin(async move { Ok(Grpc::new(ProstCodec::default()).unary(list, request).await) })
    }
}

struct List(Known);

impl UnaryService<ListRequest> for List {
    type Response = ListResponse;
    type Future = Ready<Result<Response<ListResponse>, Status>>;

    fn call(&mut self, _request: Request<ListRequest>) -> Self::Future {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let statuses = known.iter().map(|(name, serving)| {
            let status = if *serving { SERVING } else { NOT_SERVING };
            (name.clone(), ListStatus { status })
        });
        ready(Ok(Response::new(ListResponse {
            statuses: statuses.collect(),
        })))
    }
}

/// `grpc.health.v1.HealthListRequest`.
#[derive(Clone, PartialEq, prost::Message)]
struct ListRequest {}

/// `grpc.health.v1.HealthListResponse`.
#[derive(Clone, PartialEq, prost::Message)]
struct ListResponse {
    #[prost(map = "string, message", tag = "1")]
    statuses: HashMap<String, ListStatus>,
}

/// `grpc.health.v1.HealthCheckResponse`.
#[derive(Clone, PartialEq, prost::Message)]
struct ListStatus {
    #[prost(int32, tag = "1")]
    status: i32,
}

const LIST: &str = "/grpc.health.v1.Health/List";
/// Of `grpc.health.v1.HealthCheckResponse.ServingStatus`.
const SERVING: i32 = 1;
const NOT_SERVING: i32 = 2;
