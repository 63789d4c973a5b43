//! Hung arbiter: the services still respond, and report it.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use cotenant::{
    policy::{
        event::{Answer, Event},
        lease::Ticket,
        snapshot::Snapshot,
    },
    rpc::{
        DeathLog, Endpoint, EventLog, Limits, Notice, Roles, Server, Sockets, Supervisor,
        supervisor::SubmitError,
        v1::{
            self, lease_service_client::LeaseServiceClient,
            operator_service_client::OperatorServiceClient,
        },
    },
    units::Timestamp,
};
use tokio::sync::{broadcast, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::daemon::{Parrot, reason, request};

/// Control loop that accepts events without replying, or accepts none.
struct Stalled {
    tickets: AtomicU64,
    taken: Mutex<Vec<(Event, Option<oneshot::Sender<Answer>>)>>,
    full: AtomicBool,
    snapshot: watch::Sender<Arc<Snapshot>>,
    notices: broadcast::Sender<Notice>,
    events: EventLog,
    deaths: DeathLog,
}

impl Supervisor for Stalled {
    fn boot_id(&self) -> &str {
        "stalled"
    }

    fn now(&self) -> (Timestamp, SystemTime) {
        (Timestamp::START, SystemTime::UNIX_EPOCH)
    }

    fn ticket(&self) -> Ticket {
        Ticket(self.tickets.fetch_add(1, Ordering::Relaxed))
    }

    fn submit(
        &self,
        event: Event,
        answer: Option<(Ticket, oneshot::Sender<Answer>)>,
    ) -> Result<(), SubmitError> {
        if self.full.load(Ordering::Relaxed) {
            return Err(SubmitError::Full);
        }
        let answer = answer.map(|(_, answer)| answer);
        self.taken.lock().unwrap().push((event, answer));
        Ok(())
    }

    fn snapshot(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshot.subscribe()
    }

    fn notices(&self) -> broadcast::Receiver<Notice> {
        self.notices.subscribe()
    }

    fn events(&self) -> &EventLog {
        &self.events
    }

    fn deaths(&self) -> &DeathLog {
        &self.deaths
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_ends_at_its_deadline_and_the_state_is_still_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cotenant.sock");
    let mut sockets = Sockets::new();
    sockets.bind_path(&path, 0o600).unwrap();
    let stalled = Arc::new(Stalled {
        tickets: AtomicU64::new(0),
        taken: Mutex::default(),
        full: AtomicBool::new(false),
        snapshot: watch::Sender::default(),
        notices: broadcast::Sender::new(8),
        events: EventLog::new(8),
        deaths: DeathLog::new(1),
    });
    let stop = CancellationToken::new();
    let server = Server::new(
        sockets,
        Arc::<Stalled>::clone(&stalled),
        Arc::<Parrot>::default(),
        Roles::new(nix::unistd::getuid().as_raw()),
        Limits::default(),
    )
    .await;
    let serving = tokio::spawn(server.serve(stop.clone()));
    let endpoint: Endpoint = path.to_str().unwrap().parse().unwrap();
    let channel = endpoint.connect().await.unwrap();
    let mut client = LeaseServiceClient::new(channel.clone());

    let mut asks = tonic::Request::new(request("one", "camera", 1));
    asks.set_timeout(Duration::from_secs(2));
    let begun = Instant::now();
    let status = client.create_lease(asks).await.unwrap_err();
    assert_eq!(
        reason(&status),
        (Code::DeadlineExceeded, "DEADLINE_PASSED".into())
    );
    assert!(
        begun.elapsed() >= Duration::from_millis(1750),
        "not before its time"
    );
    {
        let taken = stalled.taken.lock().unwrap();
        let events: Vec<_> = taken.iter().map(|(event, _)| event).collect();
        assert!(
            matches!(
                events[..],
                [Event::LeaseRequested { ticket: asked, .. }, Event::LeaseRequestCancelled { ticket: cancelled }]
                    if asked == cancelled
            ),
            "{events:?}"
        );
    }
    OperatorServiceClient::new(channel)
        .get_status(v1::GetStatusRequest {})
        .await
        .unwrap();

    stalled.full.store(true, Ordering::Relaxed);
    let status = client
        .create_lease(request("two", "camera", 1))
        .await
        .unwrap_err();
    assert_eq!(reason(&status), (Code::Unavailable, "OVERLOADED".into()));
    stop.cancel();
    serving.await.unwrap().unwrap();
}
