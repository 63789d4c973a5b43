//! Stream of a holder.

use cotenant::{
    rpc::v1::{
        self, TargetState, hold_lease_response::Message, lease_service_client::LeaseServiceClient,
    },
    units::Bytes,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming, transport::Channel};

use super::daemon::{Daemon, PATIENCE, granted, reason, request, seconds};

/// Both ends of a holder's stream.
pub(crate) struct Held {
    say: mpsc::Sender<v1::HoldLeaseRequest>,
    pub(super) hear: Streaming<v1::HoldLeaseResponse>,
    lease: v1::Lease,
}

impl Held {
    pub(crate) async fn open(client: &mut LeaseServiceClient<Channel>, lease: v1::Lease) -> Self {
        let (say, said) = mpsc::channel(16);
        let hear = client
            .hold_lease(ReceiverStream::new(said))
            .await
            .unwrap()
            .into_inner();
        let mut held = Self { say, hear, lease };
        held.renew().await;
        assert!(matches!(held.next().await, Message::Renewed(_)));
        held
    }

    fn message(&self) -> v1::HoldLeaseRequest {
        v1::HoldLeaseRequest {
            name: self.lease.name.clone(),
            boot_id: self.lease.boot_id.clone(),
            generation: self.lease.generation,
            ..v1::HoldLeaseRequest::default()
        }
    }

    pub(super) async fn renew(&self) {
        self.say.send(self.message()).await.unwrap();
    }

    pub(crate) async fn answer(
        &self,
        nonce: u64,
        target_bytes: u64,
        state: TargetState,
        used: Bytes,
    ) {
        let message = v1::HoldLeaseRequest {
            nonce,
            target_bytes,
            state: state.into(),
            used_bytes: Some(used.get()),
            ..self.message()
        };
        self.say.send(message).await.unwrap();
    }

    pub(super) async fn next(&mut self) -> Message {
        tokio::time::timeout(PATIENCE, self.hear.message())
            .await
            .expect("nothing is heard")
            .unwrap()
            .expect("the stream has ended")
            .message
            .unwrap()
    }

    pub(crate) async fn target(&mut self) -> v1::Target {
        loop {
            if let Message::Target(target) = self.next().await {
                return target;
            }
        }
    }

    pub(crate) async fn receipt(&mut self) -> (u64, TargetState, String) {
        loop {
            if let Message::Receipt(receipt) = self.next().await {
                return (receipt.nonce, receipt.state(), receipt.reason);
            }
        }
    }
}

/// Sets up a shrinkable tenant that holds most of the budget, and an urgent one that requests its memory.
async fn with_a_target(daemon: &Daemon) -> (Held, v1::Target, tokio::task::JoinHandle<v1::Lease>) {
    let mut client = daemon.leases().await;
    let lease = granted(
        &mut client,
        v1::CreateLeaseRequest {
            lease_class: v1::LeaseClass::Batch.into(),
            max_bytes: Bytes::from_mib(800).get(),
            ..request("index", "index", 100)
        },
    )
    .await;
    assert_eq!(lease.held_bytes, Bytes::from_mib(800).get());
    daemon.set_used("index", Bytes::from_mib(800));
    let mut held = Held::open(&mut client, lease).await;
    let urgent = tokio::spawn(async move {
        let asks = v1::CreateLeaseRequest {
            lease_class: v1::LeaseClass::AudioRealtime.into(),
            max_wait: seconds(30),
            ..request("wake", "wake-word", 400)
        };
        granted(&mut client, asks).await
    });
    let target = held.target().await;
    (held, target, urgent)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_is_reported_answered_and_credited_once_it_is_measured() {
    let daemon = Daemon::start().await;
    let (mut held, target, urgent) = with_a_target(&daemon).await;
    assert!(target.target_bytes < Bytes::from_mib(800).get());
    assert!(
        target.deadline_in.is_some() && !target.reason.is_empty(),
        "{target:?}"
    );

    // Acknowledges without releasing: not credited.
    held.answer(
        target.nonce,
        target.target_bytes,
        TargetState::Applied,
        Bytes::new(target.target_bytes),
    )
    .await;
    assert_eq!(
        held.receipt().await,
        (target.nonce, TargetState::Applied, String::new())
    );
    assert!(!urgent.is_finished());
    daemon
        .state(|snapshot| {
            snapshot
                .leases
                .iter()
                .any(|lease| lease.tenant == "index" && lease.memory.used.is_some())
        })
        .await;
    assert!(!urgent.is_finished(), "granted on the holder's word");

    daemon.set_used("index", Bytes::new(target.target_bytes));
    let granted = tokio::time::timeout(PATIENCE, urgent)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(granted.held_bytes, Bytes::from_mib(400).get());
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replayed_stale_and_forged_answers_change_nothing() {
    let daemon = Daemon::start().await;
    let (mut held, target, urgent) = with_a_target(&daemon).await;
    let (nonce, bytes) = (target.nonce, target.target_bytes);
    for (nonce, bytes, state, expected) in [
        (nonce, bytes, TargetState::Deferred, TargetState::Deferred),
        (nonce, bytes, TargetState::Deferred, TargetState::Deferred),
        (
            nonce + 1,
            bytes,
            TargetState::Applied,
            TargetState::Conflict,
        ),
        (
            nonce,
            bytes - 1,
            TargetState::Applied,
            TargetState::Conflict,
        ),
    ] {
        held.answer(nonce, bytes, state, Bytes::from_mib(700)).await;
        assert_eq!(held.receipt().await.1, expected);
    }
    // The journal is ordered: once it contains the release, it contains everything before.
    let mut client = daemon.leases().await;
    client
        .release_lease(v1::ReleaseLeaseRequest {
            name: held.lease.name.clone(),
            boot_id: held.lease.boot_id.clone(),
            generation: held.lease.generation,
        })
        .await
        .unwrap();
    let passed_on = daemon.count("target_answered", "lease_released").await;
    assert_eq!(
        passed_on, 1,
        "the replayed and the forged ones stay outside"
    );
    urgent.abort();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_is_lost_leaves_the_lease_and_its_target() {
    let daemon = Daemon::start().await;
    let (held, target, urgent) = with_a_target(&daemon).await;
    let lease = held.lease.clone();
    drop(held);
    let mut client = daemon.leases().await;
    let mut again = Held::open(&mut client, lease).await;
    let reported = again.target().await;
    assert_eq!(
        (reported.nonce, reported.target_bytes),
        (target.nonce, target.target_bytes)
    );
    urgent.abort();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_lease_is_reported_on_its_stream() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    let lease = granted(
        &mut client,
        v1::CreateLeaseRequest {
            term: seconds(2),
            ..request("one", "camera", 10)
        },
    )
    .await;
    // It is not renewed after the opening, and its term is two seconds.
    let mut held = Held::open(&mut client, lease.clone()).await;
    let Message::Ended(ended) = held.next().await else {
        panic!("not the end")
    };
    assert_eq!(ended.name, lease.name);
    assert!(
        held.hear.message().await.unwrap().is_none(),
        "the stream ends with the lease"
    );
    let mut held = {
        let (say, said) = mpsc::channel(1);
        let hear = client
            .hold_lease(ReceiverStream::new(said))
            .await
            .unwrap()
            .into_inner();
        Held { say, hear, lease }
    };
    held.renew().await;
    let status = held.hear.message().await.unwrap_err();
    assert_eq!(reason(&status), (Code::NotFound, "UNKNOWN_LEASE".into()));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_keeps_one_lease_and_refuses_what_makes_no_sense() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    let one = granted(&mut client, request("one", "camera", 10)).await;
    let two = granted(&mut client, request("two", "radio", 10)).await;
    for (break_it, expected) in [
        (
            v1::HoldLeaseRequest {
                name: two.name.clone(),
                ..v1::HoldLeaseRequest::default()
            },
            "name",
        ),
        (
            v1::HoldLeaseRequest {
                nonce: 1,
                state: TargetState::Stale.into(),
                ..v1::HoldLeaseRequest::default()
            },
            "state",
        ),
        (
            v1::HoldLeaseRequest {
                nonce: 1,
                state: TargetState::Deferred.into(),
                ..v1::HoldLeaseRequest::default()
            },
            "used_bytes",
        ),
    ] {
        let mut held = Held::open(&mut client, one.clone()).await;
        let name = if break_it.name.is_empty() {
            one.name.clone()
        } else {
            break_it.name.clone()
        };
        let message = v1::HoldLeaseRequest {
            name,
            boot_id: one.boot_id.clone(),
            generation: one.generation,
            ..break_it
        };
        held.say.send(message).await.unwrap();
        let status = held.hear.message().await.unwrap_err();
        assert_eq!(
            reason(&status),
            (Code::InvalidArgument, "INVALID_FIELD".into())
        );
        assert!(status.message().starts_with(expected), "{status:?}");
    }
    // None of that affected the leases.
    Held::open(&mut client, two).await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_never_reads_stops_being_heard_and_loses_the_lease_at_its_term() {
    let daemon = Daemon::start().await;
    let mut client = LeaseServiceClient::new(daemon.narrow_channel().await);
    let lease = granted(
        &mut client,
        v1::CreateLeaseRequest {
            term: seconds(2),
            ..request("one", "camera", 10)
        },
    )
    .await;
    let held = Held::open(&mut client, lease).await;
    let flood = async {
        // The supervisor stops accepting messages while its own are unread; then sending blocks.
        loop {
            if held.say.send(held.message()).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        () = flood => {}
        _ = daemon.state(|snapshot| !snapshot.leases.iter().any(|lease| lease.tenant == "camera")) => {}
    }
    daemon.end().await;
}
