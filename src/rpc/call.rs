//! One gRPC call: peer, deadline, and its round trip to the arbiter.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::{broadcast, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status, metadata::MetadataMap, transport::server::TlsConnectInfo};
use webpki::EndEntityCert;

use super::{
    peer::PeerInfo,
    remote,
    roles::{Permission, Role, Roles},
    slots::Slots,
    status::{self, CallError},
    supervisor::{Notice, Supervisor},
};
use cotenant_policy::{
    event::{Answer, Event, Origin},
    lease::{LeaseView, Peer, Ticket},
};

/// State shared by all services.
#[derive(Clone)]
pub(super) struct Context {
    pub(super) supervisor: Arc<dyn Supervisor>,
    pub(super) roles: Arc<Roles>,
    /// Open streams of each peer.
    pub(super) streams: Slots,
    /// Announces leases released by calls. The arbiter does not notify the releasing caller, which may be an operator
    /// or another connection of the holder.
    pub(super) given_back: broadcast::Sender<Notice>,
    /// How long a client may leave its stream unread.
    pub(super) patience: Duration,
    /// Role of remote callers with a certificate; `None` on Unix sockets.
    pub(super) remote: Option<Role>,
    pub(super) stop: CancellationToken,
}

#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) peer: PeerInfo,
    pub(super) role: Role,
    /// The client's deadline and timeout.
    deadline: Option<(Instant, Duration)>,
}

impl Context {
    /// Admits a call, or returns the reason for its refusal.
    pub(super) fn admit<T>(
        &self,
        name: &'static str,
        request: &Request<T>,
        needed: Permission,
    ) -> Result<Call, CallError> {
        // A connection without credentials has neither user nor role.
        let peer = match self.remote {
            Some(_) => Some(PeerInfo {
                uid: u32::MAX,
                ..PeerInfo::default()
            }),
            None => request.extensions().get::<PeerInfo>().cloned(),
        };
        let role = self
            .remote
            .or_else(|| peer.as_ref().and_then(|peer| self.roles.role_of(peer)));
        match (peer, role) {
            (Some(peer), Some(role)) if needed.is_of(role) => Ok(Call {
                peer,
                role,
                deadline: client_timeout(request.metadata())
                    .map(|allowed| (Instant::now() + allowed, allowed)),
            }),
            (peer, role) => Err(CallError::RoleMissing {
                call: name,
                uid: peer.map_or(u32::MAX, |peer| peer.uid),
                role: role.map_or_else(|| "no role".to_owned(), |role| format!("role {role}")),
                needed: needed.to_string(),
                remedy: match self.remote {
                    Some(_) => format!(
                        "set `grpc.tcp.role` of the configuration to `{}`",
                        needed.least_role(true)
                    ),
                    None => format!(
                        "run as root or as the supervisor's user, or add your uid to `grpc.roles.{}s.uids` of the configuration",
                        needed.least_role(false)
                    ),
                },
            }),
        }
    }

    /// Sends an event and waits for its answer until the call's deadline. If the caller disconnects first, the arbiter
    /// is notified.
    pub(super) async fn ask(
        &self,
        call: &Call,
        event: impl FnOnce(Ticket) -> Event,
    ) -> Result<Answer, Status> {
        let ticket = self.supervisor.ticket();
        let (sender, receiver) = oneshot::channel();
        self.supervisor
            .submit(event(ticket), Some((ticket, sender)))
            .map_err(CallError::from)?;
        let mut pending = Pending {
            supervisor: &*self.supervisor,
            ticket: Some(ticket),
        };
        let answer = tokio::select! {
            answer = receiver => answer.map_err(|_closed| CallError::Stopping)?,
            allowed = call.expired() => return Err(CallError::DeadlinePassed { allowed }.into()),
            () = self.stop.cancelled() => return Err(CallError::Stopping.into()),
        };
        pending.ticket = None;
        match answer {
            Answer::Denied {
                denial,
                retry_after,
            } => Err(status::of_denial(&denial, retry_after)),
            answer => Ok(answer),
        }
    }
}

impl Call {
    /// The peer in policy's form.
    pub(super) fn policy_peer(&self) -> Peer {
        Peer {
            uid: self.peer.uid,
            pid: self.peer.pid,
            operator: Permission::Operate.is_of(self.role),
        }
    }

    /// The caller of a command, for the journal; `None` if its certificate has no common name.
    pub(super) fn origin<T>(&self, request: &Request<T>) -> Option<Origin> {
        let Some(tls) = request.extensions().get::<TlsConnectInfo<()>>() else {
            return Some(Origin::Uid(self.peer.uid));
        };
        let chain = tls.peer_certs()?;
        let certificate = EndEntityCert::try_from(chain.first()?).ok()?;
        remote::common_name(certificate.subject()).map(Origin::Certificate)
    }

    /// Checks that the caller is the process that requested the lease, and is measured for it. For a control group, any
    /// process of the user that requested the lease acts.
    pub(super) fn check_holds(&self, view: &LeaseView) -> Result<(), CallError> {
        let owner = (view.owner.owner_uid, view.owner.owner_pid);
        let is_process = owner.1 == self.peer.pid || view.owner.cgroup.is_some();
        if owner.0 == self.peer.uid && is_process {
            return Ok(());
        }
        Err(CallError::NotTheHolder {
            lease: view.name(),
            holder: process(view.owner.owner_pid),
            caller: process(self.peer.pid),
        })
    }

    /// Key of the call in [`Slots`]: its process, or its user if the process is unknown.
    pub(super) fn slot_key(&self) -> (u32, Option<u32>) {
        (self.peer.uid, self.peer.pid)
    }

    pub(super) fn time_left(&self) -> Option<Duration> {
        self.deadline
            .map(|(deadline, _)| deadline.saturating_duration_since(Instant::now()))
    }

    /// `wished`, or the time left if that is less, so that a response with its reason arrives in time.
    pub(super) fn wait(&self, wished: Duration) -> Duration {
        match self.time_left() {
            Some(left) => wished.min(left.saturating_sub(margin(left) * 2)),
            None => wished,
        }
    }

    /// Waits until shortly before the client's deadline, and returns its timeout; pending forever without a deadline.
    pub(super) async fn expired(&self) -> Duration {
        match self.deadline {
            Some((deadline, allowed)) => {
                let until = deadline.checked_sub(margin(allowed)).unwrap_or(deadline);
                tokio::time::sleep_until(until.into()).await;
                allowed
            }
            None => std::future::pending().await,
        }
    }
}

/// A process for error messages.
pub(super) fn process(pid: Option<u32>) -> String {
    match pid {
        Some(pid) => format!("process {pid}"),
        None => "an unidentified process".to_owned(),
    }
}

/// A ticket without an answer; notifies the arbiter if dropped.
struct Pending<'a> {
    supervisor: &'a dyn Supervisor,
    ticket: Option<Ticket>,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            // If the inbox is full, the request ends with the wait limit in its event.
            let _ = self
                .supervisor
                .submit(Event::LeaseRequestCancelled { ticket }, None);
        }
    }
}

/// Time before the client's deadline at which the call ends with `DEADLINE_EXCEEDED`.
///
/// At the deadline tonic ends it with `CANCELLED`, and the client's own timer races with the response. A tenth of the
/// timeout, at most 200 ms, suffices for a Unix socket (our choice). With 20 ms the status was late twice in three runs
/// on a fully loaded machine.
fn margin(allowed: Duration) -> Duration {
    (allowed / 10).min(Duration::from_millis(200))
}

/// Reads `grpc-timeout`: at most eight digits and a unit (gRPC over HTTP/2).
fn client_timeout(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_of_the_client_is_read_in_all_its_units() {
        for (text, expected) in [
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("3S", Some(Duration::from_secs(3))),
            ("250m", Some(Duration::from_millis(250))),
            ("7u", Some(Duration::from_micros(7))),
            ("9n", Some(Duration::from_nanos(9))),
            ("", None),
            ("S", None),
            ("-1S", None),
            ("123456789S", None),
            ("5x", None),
        ] {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            assert_eq!(client_timeout(&metadata), expected, "{text}");
        }
    }
}
