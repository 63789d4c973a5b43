//! Limits per peer.

use std::io::Read;

use cotenant::rpc::{
    Bounds, Limits,
    v1::{self, generate_request::Input},
};
use tonic::Code;

use super::daemon::{Daemon, PATIENCE, Settings, WIDE, granted, reason, request};

fn limited(limits: Limits) -> Settings {
    Settings {
        limits,
        ..Settings::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_above_the_limit_is_refused_and_the_connection_goes_on() {
    let daemon = Daemon::start().await;
    let mut client = daemon.llm().await;
    let large = v1::GenerateRequest {
        input: Some(Input::Prompt("x".repeat(2 << 20))),
        ..v1::GenerateRequest::default()
    };
    let status = client.generate(large).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status:?}");
    assert!(status.message().contains("limit"), "{status:?}");
    let small = v1::GenerateRequest {
        input: Some(Input::Prompt("hello".into())),
        ..v1::GenerateRequest::default()
    };
    client.generate(small).await.unwrap();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_one_process_are_limited_and_a_closed_one_counts_no_more() {
    let streams = Bounds {
        per_process: 3,
        ..WIDE
    };
    let daemon = Daemon::start_with(limited(Limits {
        streams,
        ..Limits::default()
    }))
    .await;
    let mut client = daemon.operator().await;
    let mut open = Vec::new();
    for _ in 0..3 {
        let stream = client
            .watch_events(v1::WatchEventsRequest::default())
            .await
            .unwrap();
        open.push(stream.into_inner());
    }
    let status = client
        .watch_events(v1::WatchEventsRequest::default())
        .await
        .unwrap_err();
    assert_eq!(
        reason(&status),
        (Code::ResourceExhausted, "QUOTA_EXCEEDED".into())
    );
    // Other calls are not streams.
    client.get_status(v1::GetStatusRequest {}).await.unwrap();
    open.clear();
    let again = async {
        while client
            .watch_events(v1::WatchEventsRequest::default())
            .await
            .is_err()
        {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, again).await.unwrap();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_that_never_reads_is_cut_off_with_a_reason_and_leaves_its_place() {
    let streams = Bounds {
        per_process: 1,
        ..WIDE
    };
    let daemon = Daemon::start_with(Settings {
        limits: Limits {
            streams,
            reader_patience: std::time::Duration::from_millis(200),
            ..Limits::default()
        },
        events_kept: 100_000,
        ..Settings::default()
    })
    .await;
    let mut client = daemon.leases().await;
    // More events than the window of a connection.
    for number in 0..300 {
        let asked = v1::CreateLeaseRequest {
            validate_only: true,
            ..request(&format!("r{number}"), &"t".repeat(63), 1)
        };
        client.create_lease(asked).await.unwrap();
    }
    let mut narrow =
        v1::operator_service_client::OperatorServiceClient::new(daemon.narrow_channel().await);
    let unread = narrow
        .watch_events(v1::WatchEventsRequest::default())
        .await
        .unwrap();
    let mut other = daemon.operator().await;
    let free_again = async {
        while other
            .watch_events(v1::WatchEventsRequest::default())
            .await
            .is_err()
        {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, free_again).await.unwrap();
    // If it reads again, it receives the messages in flight, and the reason.
    let mut unread = unread.into_inner();
    let status = loop {
        match tokio::time::timeout(PATIENCE, unread.message())
            .await
            .unwrap()
        {
            Ok(message) => assert!(message.is_some(), "the stream ends as if it were complete"),
            Err(status) => break status,
        }
    };
    assert_eq!(reason(&status), (Code::Aborted, "READER_STALLED".into()));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_connections_leave_others_served() {
    let connections = Bounds {
        per_process: 8,
        ..WIDE
    };
    let daemon = Daemon::start_with(limited(Limits {
        connections,
        ..Limits::default()
    }))
    .await;
    let mut client = daemon.leases().await;
    let lease = granted(&mut client, request("one", "camera", 10)).await;
    let socket = daemon.socket();
    let closed = tokio::task::spawn_blocking(move || {
        let mut open = Vec::new();
        let mut closed = 0;
        for _ in 0..10_000 {
            // When the socket's queue is full, connecting waits for the supervisor to accept.
            let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
            if open.len() < 7 {
                open.push(stream);
            } else {
                // Closed at once, without a byte.
                closed += usize::from(stream.read(&mut [0]).is_ok_and(|read| read == 0));
            }
        }
        closed
    })
    .await
    .unwrap();
    assert_eq!(closed, 10_000 - 7);
    let renewed = client
        .renew_lease(v1::RenewLeaseRequest {
            name: lease.name,
            boot_id: lease.boot_id,
            generation: lease.generation,
        })
        .await;
    assert!(renewed.is_ok(), "{renewed:?}");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_user_has_so_many_leases() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    for number in 0..64 {
        granted(
            &mut client,
            request(&format!("r{number}"), &format!("t{number}"), 1),
        )
        .await;
    }
    let status = client
        .create_lease(request("more", "more", 1))
        .await
        .unwrap_err();
    assert_eq!(
        reason(&status),
        (Code::ResourceExhausted, "QUOTA_EXCEEDED".into())
    );
    // With this many holders named, a denial still fits into the trailers that clients accept.
    let status = client
        .create_lease(request("large", "large", 5000))
        .await
        .unwrap_err();
    assert_eq!(reason(&status).0, Code::FailedPrecondition);
    daemon.end().await;
}
