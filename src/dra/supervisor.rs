//! Client of the supervisor: its state, and leases of control groups.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio_stream::StreamExt as _;
use tonic::{Code, Request, Status, Streaming, transport::Channel};
use tonic_types::StatusExt as _;

use super::{
    book::{Held, Resize, TargetReply},
    claim::{self, Booking, ClaimError},
};
use cotenant_rpc::{
    Endpoint,
    client::ConnectError,
    v1::{
        CreateLeaseRequest, GetStatusRequest, GetStatusResponse, HoldLeaseRequest, Lease,
        LeaseClass, ListLeasesRequest, ReleaseLeaseRequest, TargetState, UpdateLeaseRequest,
        WatchEventsRequest, WatchEventsResponse, WatchLeasesRequest, WatchLeasesResponse,
        lease_service_client::LeaseServiceClient, operator_service_client::OperatorServiceClient,
    },
};
use cotenant_units::Bytes;

/// Client of the supervisor, which may be restarted at any time.
#[derive(Debug)]
pub(crate) struct Supervisor {
    endpoint: Endpoint,
    channel: Mutex<Option<Channel>>,
    /// Longest wait for the memory of a claim.
    wait: Duration,
}

/// A call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SupervisorError {
    /// It is not reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// It refuses.
    #[error("{}", refusal_text(.0))]
    Refused(Box<Status>),
    /// The claim cannot be named.
    #[error(transparent)]
    Claim(#[from] ClaimError),
}

impl From<Status> for SupervisorError {
    fn from(status: Status) -> Self {
        Self::Refused(Box::new(status))
    }
}

impl SupervisorError {
    /// Returns whether it may succeed once the supervisor is back.
    pub(crate) fn is_away(&self) -> bool {
        match self {
            Self::Connect(_) => true,
            Self::Refused(status) => {
                status.code() == Code::Unknown
                    || (status.code() == Code::Unavailable && reason(status) != "DRAINING")
            }
            Self::Claim(_) => false,
        }
    }

    /// Returns whether no such lease exists.
    fn is_absent(&self) -> bool {
        matches!(self, Self::Refused(status) if status.code() == Code::NotFound)
    }
}

/// What a request would be granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outlook {
    /// It fits, after reclaim from others.
    Fits,
    /// This much is granted at most.
    AtMost(Bytes),
    /// The budget, which the request exceeds.
    Budget(Bytes),
}

impl Supervisor {
    pub(crate) fn new(endpoint: Endpoint, wait: Duration) -> Self {
        Self {
            endpoint,
            channel: Mutex::default(),
            wait,
        }
    }

    /// Returns the channel, which connects again by itself after the first time.
    async fn channel(&self) -> Result<Channel, SupervisorError> {
        let mut known = self.channel.lock().await;
        if let Some(channel) = &*known {
            return Ok(channel.clone());
        }
        Ok(known.insert(self.endpoint.connect().await?).clone())
    }

    async fn leases_client(&self) -> Result<LeaseServiceClient<Channel>, SupervisorError> {
        Ok(LeaseServiceClient::new(self.channel().await?))
    }

    async fn operator_client(&self) -> Result<OperatorServiceClient<Channel>, SupervisorError> {
        Ok(OperatorServiceClient::new(self.channel().await?))
    }

    pub(crate) async fn status(&self) -> Result<GetStatusResponse, SupervisorError> {
        let mut client = self.operator_client().await?;
        let status = client.get_status(brief(GetStatusRequest {})).await?;
        Ok(status.into_inner())
    }

    pub(crate) async fn watch_leases(
        &self,
    ) -> Result<Streaming<WatchLeasesResponse>, SupervisorError> {
        let mut client = self.leases_client().await?;
        let stream = client.watch_leases(WatchLeasesRequest::default()).await?;
        Ok(stream.into_inner())
    }

    /// Watches events after one of a run.
    pub(crate) async fn watch_events(
        &self,
        after_sequence: u64,
        boot_id: String,
    ) -> Result<Streaming<WatchEventsResponse>, SupervisorError> {
        let mut client = self.operator_client().await?;
        let request = WatchEventsRequest {
            after_sequence,
            boot_id,
            no_follow: false,
        };
        Ok(client.watch_events(request).await?.into_inner())
    }

    /// Returns the leases of claims.
    pub(crate) async fn held(&self) -> Result<Vec<Held>, SupervisorError> {
        let mut client = self.leases_client().await?;
        let mut held = Vec::new();
        let mut page_token = String::new();
        loop {
            let request = ListLeasesRequest {
                page_size: 1000,
                page_token,
            };
            let page = client.list_leases(brief(request)).await?.into_inner();
            held.extend(Held::of(&page.leases));
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return Ok(held);
            }
        }
    }

    /// Returns what a request of `bytes` would be granted, without granting it.
    pub(crate) async fn outlook(
        &self,
        class: LeaseClass,
        bytes: Bytes,
    ) -> Result<Outlook, SupervisorError> {
        let request = CreateLeaseRequest {
            request_id: OUTLOOK.to_owned(),
            tenant: OUTLOOK.to_owned(),
            lease_class: class.into(),
            min_bytes: bytes.get(),
            validate_only: true,
            ..CreateLeaseRequest::default()
        };
        let mut client = self.leases_client().await?;
        let Err(status) = client.create_lease(brief(request)).await else {
            return Ok(Outlook::Fits);
        };
        let figure = |name| figure(&status, name);
        match reason(&status).as_str() {
            "INSUFFICIENT_MEMORY" => {
                let most = figure("free_bytes").saturating_add(figure("reclaimable_bytes"));
                Ok(Outlook::AtMost(most))
            }
            "EXCEEDS_BUDGET" => Ok(Outlook::Budget(figure("budget_bytes"))),
            "PRESSURE_HIGH" | "DRAINING" | "STALE_SAMPLE" | "QUOTA_EXCEEDED" => {
                Ok(Outlook::AtMost(Bytes::ZERO))
            }
            _ => Err(status.into()),
        }
    }

    /// Books the memory of a claim for the control group of its pod. A repetition is answered with the same lease.
    pub(crate) async fn book(
        &self,
        booking: &Booking,
        cgroup: &str,
    ) -> Result<Lease, SupervisorError> {
        let name = claim::lease_name(&booking.claim.uid)?;
        let mut request = Request::new(CreateLeaseRequest {
            request_id: name.clone(),
            tenant: name,
            lease_class: booking.class.into(),
            min_bytes: booking.min.get(),
            max_bytes: booking.max.get(),
            max_wait: prost_types::Duration::try_from(self.wait).ok(),
            cgroup: cgroup.to_owned(),
            ..CreateLeaseRequest::default()
        });
        request.set_timeout(self.wait + CALL_MAX);
        let mut client = self.leases_client().await?;
        let lease = client.create_lease(request).await?.into_inner().lease;
        lease.ok_or_else(|| Status::internal("the answer contains no lease").into())
    }

    /// Changes the upper bound of a lease; its lower one stays.
    pub(crate) async fn resize(&self, resize: &Resize) -> Result<(), SupervisorError> {
        let Resize { lease, max } = resize;
        let request = UpdateLeaseRequest {
            name: lease.name.clone(),
            boot_id: lease.boot_id.clone(),
            generation: lease.generation,
            min_bytes: lease.size.min.get(),
            max_bytes: max.get(),
            max_wait: None,
        };
        let mut client = self.leases_client().await?;
        client.update_lease(brief(request)).await?;
        Ok(())
    }

    /// Releases a lease, which may have ended.
    pub(crate) async fn release(&self, lease: &Held) -> Result<(), SupervisorError> {
        let request = ReleaseLeaseRequest {
            name: lease.name.clone(),
            boot_id: lease.boot_id.clone(),
            generation: lease.generation,
        };
        let mut client = self.leases_client().await?;
        let released = client.release_lease(brief(request)).await;
        match released.map_err(SupervisorError::from) {
            Err(error) if !error.is_absent() => Err(error),
            _ => Ok(()),
        }
    }

    /// Answers the target of a lease.
    pub(crate) async fn answer(
        &self,
        lease: &Held,
        reply: TargetReply,
    ) -> Result<(), SupervisorError> {
        let Some((nonce, target)) = lease.target else {
            return Ok(());
        };
        let (state, used) = match reply {
            TargetReply::Applied => (TargetState::Applied, lease.size.used),
            TargetReply::Deferred(used) => (TargetState::Deferred, Some(used)),
        };
        let message = HoldLeaseRequest {
            name: lease.name.clone(),
            boot_id: lease.boot_id.clone(),
            generation: lease.generation,
            nonce,
            target_bytes: target.get(),
            state: state.into(),
            used_bytes: used.map(Bytes::get).filter(|used| *used > 0),
            error_detail: String::new(),
        };
        let mut client = self.leases_client().await?;
        let open = tokio_stream::iter([HoldLeaseRequest {
            nonce: 0,
            target_bytes: 0,
            state: TargetState::Unspecified.into(),
            used_bytes: None,
            ..message.clone()
        }]);
        // The stream ends after both messages have been answered.
        let both = open.chain(tokio_stream::once(message));
        let mut answers = client.hold_lease(both).await?.into_inner();
        let read = async {
            while answers.message().await?.is_some() {}
            Ok::<_, Status>(())
        };
        match tokio::time::timeout(CALL_MAX, read).await {
            Ok(read) => Ok(read?),
            Err(_) => {
                Err(Status::deadline_exceeded("no receipt for the answer to a target").into())
            }
        }
    }
}

/// Returns a request with the deadline of calls that do not wait.
fn brief<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(CALL_MAX);
    request
}

/// Returns the machine-readable reason of a refusal.
fn reason(status: &Status) -> String {
    let info = status.get_details_error_info();
    info.map(|info| info.reason).unwrap_or_default()
}

fn figure(status: &Status, name: &str) -> Bytes {
    let info = status.get_details_error_info();
    let value = info.and_then(|info| info.metadata.get(name)?.parse().ok());
    Bytes::new(value.unwrap_or_default())
}

/// Returns message and remedy of a refusal.
fn refusal_text(status: &Status) -> String {
    let info = status.get_details_error_info();
    let hint = info.and_then(|info| info.metadata.get("hint").cloned());
    let hint = hint.map(|hint| format!(" ({hint})")).unwrap_or_default();
    format!("the supervisor refuses: {}{hint}", status.message())
}

/// Tenant and request id of requests that only ask.
const OUTLOOK: &str = "kubernetes-outlook";

/// Longest call that does not wait for memory.
const CALL_MAX: Duration = Duration::from_secs(5);
