//! Services for kubelet: registration, preparation of claims, health of the device.

use std::{
    fs, io,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures_util::{Stream, stream};
use tokio::{net::UnixListener, sync::watch, time::timeout};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, transport::Server};
use tracing::{error, info, warn};

use super::{
    claim::{ClaimName, DEVICE},
    driver::Driver,
    pool::Health,
    proto::{
        dra::{
            Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest,
            NodePrepareResourcesResponse, NodeUnprepareResourceResponse,
            NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
            dra_plugin_server::{DraPlugin, DraPluginServer},
        },
        health::{
            DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest,
            NodeWatchResourcesResponse,
            dra_resource_health_server::{DraResourceHealth, DraResourceHealthServer},
        },
        registration::{
            InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
            registration_server::{Registration, RegistrationServer},
        },
    },
};
use cotenant_units::causes::in_one_line;

/// Sockets of a plugin in kubelet's folder.
#[derive(Clone, Debug)]
pub(crate) struct Sockets {
    /// Found by kubelet in its folder `plugins_registry`.
    registration: PathBuf,
    /// Named at the registration.
    services: PathBuf,
}

/// A socket cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketError {
    #[error("path of a socket has {length} bytes, and may have {SOCKET_MAX}: `{}`; name a shorter --kubelet-dir", path.display())]
    TooLong { path: PathBuf, length: usize },
    #[error("cannot listen at `{}`", path.display())]
    Listen {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot serve kubelet")]
    Serve(#[source] tonic::transport::Error),
}

impl Sockets {
    /// Names the sockets; `instance` keeps those of two pods apart during an update.
    pub(crate) fn new(
        kubelet: &Path,
        driver: &str,
        instance: Option<&str>,
    ) -> Result<Self, SocketError> {
        let suffix = instance.map(|uid| format!("-{uid}")).unwrap_or_default();
        let sockets = Self {
            registration: kubelet
                .join("plugins_registry")
                .join(format!("{driver}{suffix}-reg.sock")),
            services: kubelet
                .join("plugins")
                .join(driver)
                .join(format!("dra{suffix}.sock")),
        };
        for path in [&sockets.registration, &sockets.services] {
            let length = path.as_os_str().len();
            if length > SOCKET_MAX {
                let path = path.clone();
                return Err(SocketError::TooLong { path, length });
            }
        }
        Ok(sockets)
    }

    /// Serves until `stop` ends. The services listen before kubelet can find the registration.
    pub(crate) async fn serve(
        &self,
        driver: Arc<Driver>,
        stop: impl Future<Output = ()>,
    ) -> Result<(), SocketError> {
        let services = listen(&self.services)?;
        let registration = listen(&self.registration)?;
        let info = PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: driver.own.driver.clone(),
            endpoint: self.services.display().to_string(),
            supported_versions: SERVICES.map(str::to_owned).to_vec(),
        };
        let plugin = Server::builder()
            .add_service(DraPluginServer::new(Plugin(Arc::clone(&driver))))
            .add_service(DraResourceHealthServer::new(Plugin(driver)))
            .serve_with_incoming(UnixListenerStream::new(services));
        let registered = Server::builder()
            .add_service(RegistrationServer::new(Registered(info)))
            .serve_with_incoming(UnixListenerStream::new(registration));
        let served = tokio::select! {
            served = plugin => served,
            served = registered => served,
            () = stop => Ok(()),
        };
        // Kubelet notices by this that the plugin is gone.
        for path in [&self.registration, &self.services] {
            if let Err(error) = fs::remove_file(path) {
                warn!(path = %path.display(), %error, "cannot remove a socket");
            }
        }
        served.map_err(SocketError::Serve)
    }
}

/// Opens a socket, in place of one that an earlier process left.
fn listen(path: &Path) -> Result<UnixListener, SocketError> {
    let failed = |source| SocketError::Listen {
        path: path.to_owned(),
        source,
    };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    UnixListener::bind(path).map_err(failed)
}

struct Registered(PluginInfo);

#[tonic::async_trait]
impl Registration for Registered {
    async fn get_info(
        &self,
        _request: Request<InfoRequest>,
    ) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(self.0.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            info!("registered with kubelet");
        } else {
            error!(error = status.error, "kubelet refuses the registration");
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

struct Plugin(Arc<Driver>);

impl Plugin {
    async fn prepare(&self, claim: Claim) -> NodePrepareResourceResponse {
        let name = ClaimName {
            namespace: claim.namespace,
            name: claim.name,
            uid: claim.uid,
        };
        match self.0.prepare(&name).await {
            Ok(booking) => {
                let device = self.0.cdi.device(&name.uid);
                let devices = booking.shares.into_iter().map(|share| Device {
                    request_names: vec![share.request],
                    pool_name: self.0.own.node.clone(),
                    device_name: DEVICE.to_owned(),
                    cdi_device_ids: vec![device.clone()],
                    share_id: share.share_id,
                });
                NodePrepareResourceResponse {
                    devices: devices.collect(),
                    error: String::new(),
                }
            }
            Err(error) => {
                let error = failure("prepare", &name, &error);
                NodePrepareResourceResponse {
                    devices: Vec::new(),
                    error,
                }
            }
        }
    }
}

/// Logs the failure of an act, and returns its text, which kubelet shows in an event of the pod.
fn failure(act: &str, claim: &ClaimName, error: &dyn std::error::Error) -> String {
    let ClaimName {
        namespace, name, ..
    } = claim;
    let text = format!(
        "cannot {act} claim `{namespace}/{name}`: {}",
        in_one_line(error)
    );
    warn!("{text}");
    text
}

#[tonic::async_trait]
impl DraPlugin for Plugin {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims.into_iter();
        let prepared = claims.map(async |claim| (claim.uid.clone(), self.prepare(claim).await));
        let claims = futures_util::future::join_all(prepared).await;
        Ok(Response::new(NodePrepareResourcesResponse {
            claims: claims.into_iter().collect(),
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let mut claims = std::collections::HashMap::new();
        for Claim {
            namespace,
            uid,
            name,
        } in request.into_inner().claims
        {
            let name = ClaimName {
                namespace,
                name,
                uid,
            };
            let released = self.0.unprepare(&name.uid).await;
            let error = released
                .err()
                .map(|error| failure("unprepare", &name, &error));
            let error = error.unwrap_or_default();
            claims.insert(name.uid, NodeUnprepareResourceResponse { error });
        }
        Ok(Response::new(NodeUnprepareResourcesResponse { claims }))
    }
}

#[tonic::async_trait]
impl DraResourceHealth for Plugin {
    type NodeWatchResourcesStream =
        Pin<Box<dyn Stream<Item = Result<NodeWatchResourcesResponse, Status>> + Send>>;

    async fn node_watch_resources(
        &self,
        _request: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let mut health = self.0.view.health.subscribe();
        health.mark_changed();
        let pool = self.0.own.node.clone();
        let states = stream::unfold((health, pool), async |(mut health, pool)| {
            let state = next(&mut health, &pool).await?;
            Some((Ok(state), (health, pool)))
        });
        Ok(Response::new(Box::pin(states)))
    }
}

/// Returns the next health: a change, or the same again before kubelet takes it for unknown.
async fn next(
    health: &mut watch::Receiver<Health>,
    pool: &str,
) -> Option<NodeWatchResourcesResponse> {
    if let Ok(Err(_ended)) = timeout(HEALTH_EVERY, health.changed()).await {
        return None;
    }
    let (status, message) = match &*health.borrow_and_update() {
        Health::Unknown(message) => (HealthStatus::Unknown, message.clone()),
        Health::Healthy(message) => (HealthStatus::Healthy, message.clone()),
        Health::Unhealthy(message) => (HealthStatus::Unhealthy, message.clone()),
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let seconds = now.unwrap_or_default().as_secs();
    Some(NodeWatchResourcesResponse {
        devices: vec![DeviceHealth {
            device: Some(DeviceIdentifier {
                pool_name: pool.to_owned(),
                device_name: DEVICE.to_owned(),
            }),
            health: status.into(),
            last_updated_time: i64::try_from(seconds).unwrap_or_default(),
            health_check_timeout_seconds: 0,
            message,
        }],
    })
}

/// Services, as kubelet names them.
const SERVICES: [&str; 2] = ["v1.DRAPlugin", "v1alpha1.DRAResourceHealth"];

/// Longest path of a socket, of `sun_path`.
const SOCKET_MAX: usize = 107;

/// Kubelet takes a health for unknown after 30 s.
const HEALTH_EVERY: Duration = Duration::from_secs(10);
