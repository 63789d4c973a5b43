//! The holder of a lease is the requesting, measured process, also if another one opens its stream.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    process::{Child, Command, Stdio},
};

use cotenant::{
    policy::lease::LeaseState,
    rpc::{
        Endpoint,
        v1::{
            self, TargetState, hold_lease_response::Message,
            lease_service_client::LeaseServiceClient,
        },
    },
    units::Bytes,
};
use tonic::{Code, Status, transport::Channel};

use super::{
    daemon::{Daemon, PATIENCE, granted, reason, request, seconds},
    hold::Held,
};

/// Environment variable with the lease of another process, for a process started as an onlooker.
const LEASE: &str = "COTENANT_TEST_LEASE";

/// Prefix printed by a process before its lease.
const MARK: &str = "holds ";

async fn child_client() -> LeaseServiceClient<Channel> {
    let endpoint: Endpoint = std::env::var("COTENANT_ENDPOINT").unwrap().parse().unwrap();
    LeaseServiceClient::new(endpoint.connect().await.unwrap())
}

fn child(daemon: &Daemon, test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env("COTENANT_ENDPOINT", daemon.endpoint());
    command
}

fn text_of(lease: &v1::Lease) -> String {
    format!("{} {} {}", lease.name, lease.boot_id, lease.generation)
}

fn lease_in(text: &str) -> v1::Lease {
    let words: Vec<&str> = text.split_whitespace().collect();
    v1::Lease {
        name: words[0].to_owned(),
        boot_id: words[1].to_owned(),
        generation: words[2].parse().unwrap(),
        ..v1::Lease::default()
    }
}

/// Process that has requested a lease, and runs until its input is closed.
struct Holder {
    process: Child,
    lease: v1::Lease,
}

impl Holder {
    async fn start(daemon: &Daemon) -> Self {
        let mut command = child(daemon, "rpc::onlookers::child_that_takes_a_lease_and_waits");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        tokio::task::spawn_blocking(move || {
            let mut process = command.spawn().unwrap();
            let lines = BufReader::new(process.stdout.as_mut().unwrap()).lines();
            // The harness may print earlier on the same line.
            let said = lines
                .map(Result::unwrap)
                .find(|line| line.contains(MARK))
                .unwrap();
            let lease = lease_in(said.split_once(MARK).unwrap().1);
            Self { process, lease }
        })
        .await
        .unwrap()
    }

    fn end(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// Waits until `fits` accepts the state of a lease, `None` if it is not listed.
async fn state_of(daemon: &Daemon, lease: &v1::Lease, fits: impl Fn(Option<LeaseState>) -> bool) {
    daemon
        .state(|snapshot| {
            let found = snapshot
                .leases
                .iter()
                .find(|view| view.name() == lease.name);
            fits(found.map(|view| view.state))
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_looks_on_neither_speaks_for_the_holder_nor_ends_its_lease() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    let lease = granted(&mut client, request("one", "camera", 100)).await;
    let mut looks_on = child(&daemon, "rpc::onlookers::child_that_looks_on_and_ends");
    looks_on.env(LEASE, text_of(&lease));
    let output = tokio::task::spawn_blocking(move || looks_on.output().unwrap());
    let output = output.await.unwrap();
    assert!(output.status.success(), "{output:?}");
    // Its end is observed by the end of its own lease.
    assert_eq!(daemon.count("holder_lost", "holder_lost").await, 1);
    daemon
        .state(|snapshot| {
            !snapshot
                .leases
                .iter()
                .any(|lease| lease.tenant == "onlooker")
        })
        .await;
    let mut held = Held::open(&mut client, lease).await;
    held.renew().await;
    assert!(matches!(held.next().await, Message::Renewed(_)));
    assert_eq!(daemon.count("holder_lost", "holder_lost").await, 1);
    daemon.end().await;
}

#[tokio::test]
#[ignore = "run by a_process_that_looks_on_neither_speaks_for_the_holder_nor_ends_its_lease, as a process of its own"]
async fn child_that_looks_on_and_ends() {
    let mut client = child_client().await;
    let lease = lease_in(&std::env::var(LEASE).unwrap());
    let refused = |status: &Status| {
        assert_eq!(
            reason(status),
            (Code::PermissionDenied, "NOT_HOLDER".into())
        );
        let holder = format!("process {}", std::os::unix::process::parent_id());
        assert!(status.message().contains(&holder), "{status:?}");
    };
    // It may read the state, but its replies to a target are refused.
    let mut held = Held::open(&mut client, lease.clone()).await;
    held.answer(7, 1, TargetState::Applied, Bytes::new(1)).await;
    refused(&held.hear.message().await.unwrap_err());
    // Shrinking is reserved to the holder, and so is an identical request.
    let less = v1::UpdateLeaseRequest {
        name: lease.name.clone(),
        boot_id: lease.boot_id.clone(),
        generation: lease.generation,
        min_bytes: 1,
        ..v1::UpdateLeaseRequest::default()
    };
    refused(&client.update_lease(less).await.unwrap_err());
    refused(
        &client
            .create_lease(request("one", "camera", 100))
            .await
            .unwrap_err(),
    );
    let looking = Held::open(&mut client, lease).await;
    granted(&mut client, request("own", "onlooker", 10)).await;
    drop(looking);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_ends_with_the_process_that_asked_for_it_whichever_process_opens_its_stream() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    let holder = Holder::start(&daemon).await;
    let lease = holder.lease.clone();
    let _held = Held::open(&mut client, lease.clone()).await;
    holder.end();
    state_of(&daemon, &lease, |state| state.is_none()).await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_is_watched_beyond_the_end_of_its_lease_whatever_else_is_leased_by_its_name() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    daemon.set_used("child", Bytes::from_mib(800));
    let holder = Holder::start(&daemon).await;
    let lease = holder.lease.clone();
    // It is asked to shrink, does not reply, and may use all of it until its term of five minutes ends.
    let mut urgent_client = client.clone();
    let urgent = tokio::spawn(async move {
        let asks = v1::CreateLeaseRequest {
            lease_class: v1::LeaseClass::AudioRealtime.into(),
            max_wait: seconds(50),
            ..request("wake", "wake-word", 400)
        };
        urgent_client.create_lease(asks).await
    });
    state_of(&daemon, &lease, |state| state == Some(LeaseState::Gone)).await;
    urgent.abort();
    daemon.state(|snapshot| snapshot.waiting == 0).await;
    granted(&mut client, request("two", "child", 10)).await;
    holder.end();
    state_of(&daemon, &lease, |state| state.is_none()).await;
    daemon.end().await;
}

#[tokio::test]
#[ignore = "run by others of this file, as a process of its own"]
async fn child_that_takes_a_lease_and_waits() {
    let asks = v1::CreateLeaseRequest {
        lease_class: v1::LeaseClass::Batch.into(),
        max_bytes: Bytes::from_mib(800).get(),
        term: seconds(300),
        ..request("child", "child", 100)
    };
    let lease = granted(&mut child_client().await, asks).await;
    println!("{MARK}{}", text_of(&lease));
    let waiting = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    tokio::time::timeout(PATIENCE * 3, waiting)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
}
