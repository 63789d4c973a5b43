//! Double of kubelet: finds the plugin's socket, registers it, and calls it as kubelet 1.36 does.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use cotenant_dra::proto::{
    dra::{
        Claim, Device, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest,
        dra_plugin_client::DraPluginClient,
    },
    health::{
        NodeWatchResourcesRequest, NodeWatchResourcesResponse,
        dra_resource_health_client::DraResourceHealthClient,
    },
    registration::{InfoRequest, RegistrationStatus, registration_client::RegistrationClient},
};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::{
    Streaming,
    transport::{Channel, Endpoint},
};

use super::api_server::DRIVER;
use crate::support::PATIENCE;

/// Longest call of kubelet to a plugin.
const CALL_MAX: Duration = Duration::from_secs(45);

/// A registered plugin.
pub(super) struct Kubelet {
    channel: Channel,
}

impl Kubelet {
    /// Waits for the socket in the folder of registrations, and registers the plugin behind it.
    pub(super) async fn register(folder: &Path) -> Self {
        let deadline = Instant::now() + PATIENCE;
        let channel = loop {
            let found = fs::read_dir(folder.join("plugins_registry")).into_iter();
            let mut sockets = found.flatten().flatten().map(|entry| entry.path());
            // One that was left by a plugin that was killed refuses connections.
            if let Some(socket) = sockets.next()
                && let Ok(channel) = connect(&socket).await
            {
                break channel;
            }
            assert!(Instant::now() < deadline, "no plugin is registered");
            tokio::time::sleep(Duration::from_millis(2)).await;
        };
        let mut registration = RegistrationClient::new(channel);
        let info = registration
            .get_info(InfoRequest {})
            .await
            .unwrap()
            .into_inner();
        assert_eq!((&*info.r#type, &*info.name), ("DRAPlugin", DRIVER));
        assert_eq!(
            info.supported_versions,
            ["v1.DRAPlugin", "v1alpha1.DRAResourceHealth"]
        );
        let channel = connect(Path::new(&info.endpoint)).await.unwrap();
        let status = RegistrationStatus {
            plugin_registered: true,
            error: String::new(),
        };
        registration
            .notify_registration_status(status)
            .await
            .unwrap();
        Self { channel }
    }

    /// Prepares a claim of the namespace `default`.
    ///
    /// # Errors
    /// The text that kubelet shows in an event of the pod, or the failure of the call.
    pub(super) async fn prepare(&self, uid: &str) -> Result<Vec<Device>, String> {
        let mut request = tonic::Request::new(NodePrepareResourcesRequest {
            claims: vec![named(uid)],
        });
        request.set_timeout(CALL_MAX);
        let answer = DraPluginClient::new(self.channel.clone())
            .node_prepare_resources(request)
            .await
            .map_err(|status| status.to_string())?;
        let mut claims = answer.into_inner().claims;
        let claim = claims.remove(uid).expect("each claim is answered");
        assert!(claims.is_empty());
        if claim.error.is_empty() {
            Ok(claim.devices)
        } else {
            Err(claim.error)
        }
    }

    pub(super) async fn unprepare(&self, uid: &str) -> Result<(), String> {
        let mut request = tonic::Request::new(NodeUnprepareResourcesRequest {
            claims: vec![named(uid)],
        });
        request.set_timeout(CALL_MAX);
        let answer = DraPluginClient::new(self.channel.clone())
            .node_unprepare_resources(request)
            .await
            .map_err(|status| status.to_string())?;
        let error = answer.into_inner().claims[uid].error.clone();
        if error.is_empty() { Ok(()) } else { Err(error) }
    }

    pub(super) async fn health(&self) -> Streaming<NodeWatchResourcesResponse> {
        DraResourceHealthClient::new(self.channel.clone())
            .node_watch_resources(NodeWatchResourcesRequest {})
            .await
            .unwrap()
            .into_inner()
    }
}

fn named(uid: &str) -> Claim {
    Claim {
        namespace: "default".to_owned(),
        uid: uid.to_owned(),
        name: uid.to_owned(),
    }
}

/// Connects with the authority of kubelet's clients.
async fn connect(socket: &Path) -> Result<Channel, tonic::transport::Error> {
    let path = PathBuf::from(socket);
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let path = path.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
    });
    Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
}
