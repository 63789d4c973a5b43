//! Life cycle of a lease over the wire.

use std::{process::Command, time::Duration};

use cotenant::{
    rpc::{Endpoint, v1},
    units::Bytes,
};
use tonic::Code;
use tonic_types::StatusExt;

use super::daemon::{Daemon, PATIENCE, granted, reason, request, seconds};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_created_renewed_resized_listed_and_released() {
    let daemon = Daemon::start().await;
    let before = daemon.held();
    let mut client = daemon.leases().await;
    let lease = granted(&mut client, request("one", "camera", 100)).await;
    assert_eq!(lease.held_bytes, Bytes::from_mib(100).get());
    assert_eq!(lease.state(), v1::LeaseState::Granted);
    assert!(
        lease.expires_in.unwrap().seconds >= 28,
        "a term of 30 s unless asked otherwise"
    );
    assert_eq!(daemon.held(), before + Bytes::from_mib(100));

    let named = |lease: &v1::Lease| (lease.name.clone(), lease.boot_id.clone(), lease.generation);
    let (name, boot_id, generation) = named(&lease);
    let renewed = client
        .renew_lease(v1::RenewLeaseRequest {
            name: name.clone(),
            boot_id: boot_id.clone(),
            generation,
        })
        .await
        .unwrap()
        .into_inner()
        .lease
        .unwrap();
    assert_eq!(renewed.name, name);

    let grown = client
        .update_lease(v1::UpdateLeaseRequest {
            name: name.clone(),
            boot_id: boot_id.clone(),
            generation,
            min_bytes: Bytes::from_mib(150).get(),
            max_bytes: 0,
            max_wait: None,
        })
        .await
        .unwrap()
        .into_inner()
        .lease
        .unwrap();
    assert_eq!(grown.held_bytes, Bytes::from_mib(150).get());

    let listed = client
        .list_leases(v1::ListLeasesRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert!(listed.leases.iter().any(|lease| lease.name == name));
    assert!(
        listed
            .leases
            .iter()
            .any(|lease| lease.kind() == v1::LeaseKind::Worker)
    );

    client
        .release_lease(v1::ReleaseLeaseRequest {
            name: name.clone(),
            boot_id: boot_id.clone(),
            generation: grown.generation,
        })
        .await
        .unwrap();
    daemon
        .state(|snapshot| snapshot.memory.held == before)
        .await;
    let late = client
        .renew_lease(v1::RenewLeaseRequest {
            name,
            boot_id,
            generation,
        })
        .await
        .unwrap_err();
    assert_eq!(reason(&late), (Code::NotFound, "UNKNOWN_LEASE".into()));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_abstract_socket_serves_the_same() {
    let daemon = Daemon::start().await;
    let endpoint: Endpoint = format!("unix-abstract:{}", daemon.abstract_name)
        .parse()
        .unwrap();
    let mut client =
        v1::lease_service_client::LeaseServiceClient::new(endpoint.connect().await.unwrap());
    let lease = granted(&mut client, request("one", "camera", 10)).await;
    assert_eq!(lease.owner_uid, nix::unistd::getuid().as_raw());
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_request_id_books_once() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    let first = granted(&mut client, request("one", "camera", 100)).await;
    let held = daemon.held();
    let again = granted(&mut client, request("one", "camera", 100)).await;
    assert_eq!(first.name, again.name);
    let other = client
        .create_lease(request("one", "camera", 101))
        .await
        .unwrap_err();
    assert_eq!(
        reason(&other),
        (Code::AlreadyExists, "REQUEST_ID_REUSED".into())
    );
    assert_eq!(daemon.held(), held);
    daemon.end().await;
}

/// Returns invalid requests, with the invalid field; `good` is a valid request.
pub(crate) fn bad_requests(
    good: &v1::CreateLeaseRequest,
) -> Vec<(&'static str, v1::CreateLeaseRequest)> {
    vec![
        (
            "min_bytes",
            v1::CreateLeaseRequest {
                min_bytes: 0,
                ..good.clone()
            },
        ),
        (
            "min_bytes",
            v1::CreateLeaseRequest {
                min_bytes: u64::MAX,
                ..good.clone()
            },
        ),
        // The representation of a signed -1.
        (
            "max_bytes",
            v1::CreateLeaseRequest {
                max_bytes: (-1i64).cast_unsigned(),
                ..good.clone()
            },
        ),
        (
            "max_bytes",
            v1::CreateLeaseRequest {
                max_bytes: 5,
                ..good.clone()
            },
        ),
        (
            "request_id",
            v1::CreateLeaseRequest {
                request_id: String::new(),
                ..good.clone()
            },
        ),
        (
            "request_id",
            v1::CreateLeaseRequest {
                request_id: "x".repeat(65),
                ..good.clone()
            },
        ),
        (
            "tenant",
            v1::CreateLeaseRequest {
                tenant: String::new(),
                ..good.clone()
            },
        ),
        (
            "tenant",
            v1::CreateLeaseRequest {
                tenant: "a\nb".into(),
                ..good.clone()
            },
        ),
        (
            "tenant",
            v1::CreateLeaseRequest {
                tenant: "x".repeat(64),
                ..good.clone()
            },
        ),
        (
            "tenant",
            v1::CreateLeaseRequest {
                tenant: "asr".into(),
                ..good.clone()
            },
        ),
        (
            "lease_class",
            v1::CreateLeaseRequest {
                lease_class: 0,
                ..good.clone()
            },
        ),
        (
            "lease_class",
            v1::CreateLeaseRequest {
                lease_class: 77,
                ..good.clone()
            },
        ),
        (
            "kind",
            v1::CreateLeaseRequest {
                kind: v1::LeaseKind::Engine.into(),
                ..good.clone()
            },
        ),
        (
            "kind",
            v1::CreateLeaseRequest {
                kind: -1,
                ..good.clone()
            },
        ),
        (
            "term",
            v1::CreateLeaseRequest {
                term: seconds(-1),
                ..good.clone()
            },
        ),
        (
            "term",
            v1::CreateLeaseRequest {
                term: seconds(0),
                ..good.clone()
            },
        ),
        (
            "term",
            v1::CreateLeaseRequest {
                term: seconds(i64::MIN),
                ..good.clone()
            },
        ),
        (
            "term",
            v1::CreateLeaseRequest {
                term: seconds(i64::MAX),
                ..good.clone()
            },
        ),
        (
            "max_wait",
            v1::CreateLeaseRequest {
                max_wait: seconds(-1),
                ..good.clone()
            },
        ),
        (
            "max_wait",
            v1::CreateLeaseRequest {
                max_wait: seconds(61),
                ..good.clone()
            },
        ),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_requests_are_refused_with_a_reason_and_leave_the_book_alone() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    let held = daemon.held();
    for (field, request) in bad_requests(&request("one", "camera", 10)) {
        let status = client.create_lease(request.clone()).await.unwrap_err();
        assert_eq!(
            reason(&status),
            (Code::InvalidArgument, "INVALID_FIELD".into()),
            "{request:?}"
        );
        let bad = status.get_details_bad_request().unwrap();
        assert_eq!(bad.field_violations[0].field, field, "{status:?}");
    }
    assert_eq!(daemon.held(), held);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_that_are_unknown_of_another_run_or_of_an_old_generation_are_reported_apart() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    let lease = granted(&mut client, request("one", "camera", 10)).await;
    let held = daemon.held();
    for (name, boot_id, generation, expected) in [
        (
            "camera#999999",
            lease.boot_id.as_str(),
            1,
            (Code::NotFound, "UNKNOWN_LEASE"),
        ),
        (
            "camera",
            &lease.boot_id,
            1,
            (Code::InvalidArgument, "INVALID_FIELD"),
        ),
        (
            &lease.name.replace("camera", "radio"),
            &lease.boot_id,
            lease.generation,
            (Code::NotFound, "UNKNOWN_LEASE"),
        ),
        (
            &lease.name,
            "another-run",
            lease.generation,
            (Code::FailedPrecondition, "BOOT_ID_CHANGED"),
        ),
        (
            &lease.name,
            "",
            lease.generation,
            (Code::InvalidArgument, "INVALID_FIELD"),
        ),
        (
            &lease.name,
            &lease.boot_id,
            lease.generation + 1,
            (Code::FailedPrecondition, "STALE_GENERATION"),
        ),
    ] {
        let status = client
            .release_lease(v1::ReleaseLeaseRequest {
                name: name.to_owned(),
                boot_id: boot_id.to_owned(),
                generation,
            })
            .await
            .unwrap_err();
        let (code, reported) = reason(&status);
        assert_eq!(
            (code, reported.as_str()),
            expected,
            "{name} {boot_id} {generation}"
        );
    }
    // A client cannot release the supervisor's lease of a worker.
    let snapshot = daemon.state(|snapshot| snapshot.leases.len() > 1).await;
    let of_worker = snapshot
        .leases
        .iter()
        .find(|view| view.tenant == "asr")
        .unwrap();
    let status = client
        .release_lease(v1::ReleaseLeaseRequest {
            name: of_worker.name(),
            boot_id: lease.boot_id.clone(),
            generation: of_worker.generation,
        })
        .await
        .unwrap_err();
    assert_eq!(
        reason(&status),
        (Code::PermissionDenied, "NOT_HOLDER".into())
    );
    assert_eq!(daemon.held(), held);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_never_fits_is_reported_apart_from_what_does_not_fit_now() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    let never = client
        .create_lease(request("one", "camera", 2000))
        .await
        .unwrap_err();
    assert_eq!(
        reason(&never),
        (Code::FailedPrecondition, "EXCEEDS_BUDGET".into())
    );

    granted(&mut client, request("two", "camera", 800)).await;
    let not_now = client
        .create_lease(request("three", "radio", 800))
        .await
        .unwrap_err();
    assert_eq!(
        reason(&not_now),
        (Code::ResourceExhausted, "INSUFFICIENT_MEMORY".into())
    );
    let details = not_now.get_error_details();
    let quota = &details.quota_failure().unwrap().violations[0];
    assert_eq!(quota.subject, "pools/unified");
    assert_eq!(quota.quota_metric, "unified_memory_bytes");
    assert_eq!(
        quota.quota_value,
        i64::try_from(Bytes::from_gib(1).get()).unwrap()
    );
    assert!(details.retry_info().unwrap().retry_delay.is_some());
    let figures = &details.error_info().unwrap().metadata;
    assert_eq!(
        figures["asked_bytes"],
        Bytes::from_mib(800).get().to_string()
    );
    assert!(figures["holders"].contains("camera#"), "{figures:?}");

    let asked = v1::CreateLeaseRequest {
        validate_only: true,
        ..request("four", "radio", 50)
    };
    let held = daemon.held();
    let would = client.create_lease(asked).await.unwrap().into_inner();
    assert!(would.lease.is_none());
    assert_eq!(
        would.would_grant.unwrap().granted_bytes,
        Bytes::from_mib(50).get()
    );
    assert_eq!(daemon.held(), held);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_waits_is_answered_with_its_reason_before_the_clients_deadline() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    granted(&mut client, request("one", "camera", 900)).await;
    let mut waits = tonic::Request::new(v1::CreateLeaseRequest {
        max_wait: seconds(30),
        ..request("two", "radio", 800)
    });
    waits.set_timeout(Duration::from_millis(600));
    let status = client.create_lease(waits).await.unwrap_err();
    assert_eq!(
        reason(&status),
        (Code::ResourceExhausted, "INSUFFICIENT_MEMORY".into())
    );
    daemon.state(|snapshot| snapshot.waiting == 0).await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_goes_away_leaves_the_queue() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    granted(&mut client, request("one", "camera", 900)).await;
    let mut waiting_client = client.clone();
    let waiting = tokio::spawn(async move {
        let waits = v1::CreateLeaseRequest {
            max_wait: seconds(50),
            ..request("two", "radio", 800)
        };
        waiting_client.create_lease(waits).await
    });
    daemon.state(|snapshot| snapshot.waiting == 1).await;
    waiting.abort();
    daemon.state(|snapshot| snapshot.waiting == 0).await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_ends_with_the_process_that_holds_it() {
    let daemon = Daemon::start().await;
    let before = daemon.held();
    let endpoint = daemon.endpoint();
    let child = tokio::task::spawn_blocking(move || {
        Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "rpc::leases::child_that_takes_a_lease_and_ends",
                "--ignored",
            ])
            .env("COTENANT_ENDPOINT", endpoint)
            .output()
            .unwrap()
    });
    let output = child.await.unwrap();
    assert!(output.status.success(), "{output:?}");
    daemon
        .state(|snapshot| snapshot.memory.held == before)
        .await;
    daemon
        .state(|snapshot| !snapshot.leases.iter().any(|lease| lease.tenant == "child"))
        .await;
    assert_eq!(daemon.count("holder_lost", "holder_lost").await, 1);
    daemon.end().await;
}

#[tokio::test]
#[ignore = "run by a_lease_ends_with_the_process_that_holds_it, as a process of its own"]
async fn child_that_takes_a_lease_and_ends() {
    let endpoint: Endpoint = std::env::var("COTENANT_ENDPOINT").unwrap().parse().unwrap();
    let mut client =
        v1::lease_service_client::LeaseServiceClient::new(endpoint.connect().await.unwrap());
    let lease = granted(&mut client, request("child", "child", 200)).await;
    assert_eq!(lease.held_bytes, Bytes::from_mib(200).get());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_sees_every_state_that_stays() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    let mut watch = client
        .watch_leases(v1::WatchLeasesRequest::default())
        .await
        .unwrap()
        .into_inner();
    let first = watch.message().await.unwrap().unwrap();
    assert!(!first.boot_id.is_empty());
    granted(&mut client, request("one", "camera", 100)).await;
    let seen = async {
        loop {
            let state = watch.message().await.unwrap().unwrap();
            if state.leases.iter().any(|lease| lease.tenant == "camera") {
                break;
            }
        }
    };
    tokio::time::timeout(PATIENCE, seen).await.unwrap();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_was_lost_goes_on_where_it_was() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    granted(&mut client, request("one", "camera", 100)).await;
    let state = daemon
        .state(|snapshot| snapshot.memory.held >= Bytes::from_mib(164))
        .await;
    let first = |stream: tonic::Streaming<v1::WatchLeasesResponse>| async {
        let mut stream = stream;
        let state = tokio::time::timeout(PATIENCE, stream.message())
            .await
            .unwrap();
        (state.unwrap().unwrap(), stream)
    };
    // The journal lags behind the state: with its first line written, no reader lags below.
    daemon.written_behind(1).await;
    let from_the_start = v1::WatchLeasesRequest::default();
    let stream = client
        .watch_leases(from_the_start)
        .await
        .unwrap()
        .into_inner();
    let (mut last, mut watch) = first(stream).await;
    // Until nothing changes: the worker's start and the first measurements change leases too.
    while let Ok(next) = tokio::time::timeout(Duration::from_millis(500), watch.message()).await {
        last = next.unwrap().unwrap();
    }
    drop(watch);
    assert!(!state.leases.is_empty() && last.sequence > 0);
    // From another run: the state is sent at once.
    let foreign = v1::WatchLeasesRequest {
        after_sequence: u64::MAX,
        boot_id: "another".into(),
    };
    let stream = client.watch_leases(foreign).await.unwrap().into_inner();
    assert_eq!(first(stream).await.0.leases.len(), last.leases.len());
    // Older: the state is sent at once.
    let behind = v1::WatchLeasesRequest {
        after_sequence: 1,
        boot_id: last.boot_id.clone(),
    };
    let stream = client.watch_leases(behind).await.unwrap().into_inner();
    assert_eq!(first(stream).await.0.leases.len(), last.leases.len());
    // Up to date: nothing is sent until a change.
    let current = v1::WatchLeasesRequest {
        after_sequence: daemon.last_sequence(),
        boot_id: last.boot_id.clone(),
    };
    let resumed = client.watch_leases(current).await.unwrap().into_inner();
    granted(&mut client, request("two", "radio", 7)).await;
    let (state, _watch) = first(resumed).await;
    assert!(
        state.leases.iter().any(|lease| lease.tenant == "radio"),
        "{state:?}"
    );
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_join_without_gap_or_repetition() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    for number in 0..5 {
        granted(
            &mut client,
            request(&format!("r{number}"), &format!("t{number}"), 1),
        )
        .await;
    }
    let mut names = Vec::new();
    let mut page_token = String::new();
    loop {
        let page = client
            .list_leases(v1::ListLeasesRequest {
                page_size: 2,
                page_token,
            })
            .await
            .unwrap()
            .into_inner();
        assert!(page.leases.len() <= 2);
        names.extend(page.leases.into_iter().map(|lease| lease.name));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(names.len(), 6, "five tenants and a worker: {names:?}");
    let unique: std::collections::BTreeSet<_> = names.iter().collect();
    assert_eq!(unique.len(), names.len());
    let status = client
        .list_leases(v1::ListLeasesRequest {
            page_size: 0,
            page_token: "nonsense".into(),
        })
        .await
        .unwrap_err();
    assert_eq!(reason(&status).0, Code::InvalidArgument);
    daemon.end().await;
}
