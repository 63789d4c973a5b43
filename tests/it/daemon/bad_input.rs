//! Invalid requests of a tenant: a clear refusal, and an unchanged ledger.

use std::{io::Read as _, os::unix::net::UnixStream};

use cotenant::{
    rpc::v1::{
        CreateLeaseRequest, Engine, EngineState, HoldLeaseRequest, LeaseClass, ReleaseLeaseRequest,
        RenewLeaseRequest, TargetState, WatchEventsRequest, WorkerState,
        lease_service_client::LeaseServiceClient, operator_service_client::OperatorServiceClient,
    },
    speech::wyoming::{Event, event::Synthesize},
    units::Bytes,
};
use serde_json::{Value, json};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use super::{
    installation::{Installation, budget, demo_model, tts},
    wyoming_client::{Client, LISTENER},
};
use crate::{
    http::client::post_json,
    rpc::{daemon::granted, hold::Held, leases::bad_requests},
    support::{PATIENCE, channel_of},
};

const MIB: u64 = 1 << 20;

fn good(request_id: &str) -> CreateLeaseRequest {
    CreateLeaseRequest {
        request_id: request_id.to_owned(),
        tenant: "camera".to_owned(),
        lease_class: LeaseClass::Interactive.into(),
        min_bytes: 8 * MIB,
        term: Some(prost_types::Duration {
            seconds: 60,
            nanos: 0,
        }),
        ..CreateLeaseRequest::default()
    }
}

fn reason(status: &Status) -> (Code, String) {
    let info = status.get_details_error_info();
    (
        status.code(),
        info.map(|info| info.reason).unwrap_or_default(),
    )
}

/// Returns the ledger's entries without expiry and measurements.
fn book(installation: &Installation) -> Vec<(Value, Value, Value)> {
    let leases = installation.json(&["leases"]);
    let of = |lease: &Value| {
        (
            lease["name"].clone(),
            lease["state"].clone(),
            lease["heldBytes"].clone(),
        )
    };
    leases.as_array().unwrap().iter().map(of).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_tenant_says_wrong_is_refused_with_a_reason_and_the_book_is_untouched() {
    let installation = Installation::new(&budget(64));
    let daemon = installation.start().await;
    let mut client = daemon.leases();
    let lease = granted(&mut client, good("one")).await;
    let before = book(&installation);
    assert_eq!(before.len(), 1);

    // No worker here has the name refused there.
    let mut sizes = bad_requests(&good("two"));
    sizes.retain(|(_, request)| request.tenant != "asr");
    sizes.extend([
        (
            "more than there are addresses",
            CreateLeaseRequest {
                min_bytes: 1 << 60,
                ..good("two")
            },
        ),
        (
            "a name of a megabyte",
            CreateLeaseRequest {
                tenant: "a".repeat(1 << 20),
                ..good("two")
            },
        ),
    ]);
    for (what, request) in sizes {
        let status = client.create_lease(request).await.expect_err(what);
        let (code, reason) = reason(&status);
        assert!(
            matches!(
                code,
                Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange
            ),
            "{what}: {status:?}"
        );
        assert!(
            !reason.is_empty() || code == Code::OutOfRange,
            "{what}: {status:?}"
        );
        assert!(
            status.message().len() < 1000,
            "{what}: a message of bounded length"
        );
    }
    assert_eq!(book(&installation), before);

    // An identical request returns the same lease; with other content it is refused.
    let again = granted(&mut client, good("one")).await;
    assert_eq!(
        (again.name, again.generation),
        (lease.name.clone(), lease.generation)
    );
    let other = CreateLeaseRequest {
        min_bytes: 9 * MIB,
        ..good("one")
    };
    let status = client.create_lease(other).await.unwrap_err();
    assert_eq!(
        reason(&status),
        (Code::AlreadyExists, "REQUEST_ID_REUSED".to_owned())
    );

    let renew = |name: &str, generation: u64, boot_id: &str| RenewLeaseRequest {
        name: name.to_owned(),
        boot_id: boot_id.to_owned(),
        generation,
    };
    for (asked, expected) in [
        (
            renew("camera#999", 1, &lease.boot_id),
            (Code::NotFound, "UNKNOWN_LEASE"),
        ),
        (
            renew(&lease.name, lease.generation + 7, &lease.boot_id),
            (Code::FailedPrecondition, "STALE_GENERATION"),
        ),
        (
            renew(&lease.name, lease.generation, "another run"),
            (Code::FailedPrecondition, "BOOT_ID_CHANGED"),
        ),
    ] {
        let status = client.renew_lease(asked).await.unwrap_err();
        assert_eq!(
            reason(&status),
            (expected.0, expected.1.to_owned()),
            "{status:?}"
        );
    }
    assert_eq!(book(&installation), before);

    // Replies to targets that were never set, or set long ago, and repetitions.
    let (say, said) = tokio::sync::mpsc::channel(8);
    let answer = |nonce| HoldLeaseRequest {
        name: lease.name.clone(),
        boot_id: lease.boot_id.clone(),
        generation: lease.generation,
        nonce,
        target_bytes: 1,
        state: TargetState::Applied.into(),
        used_bytes: Some(0),
        error_detail: String::new(),
    };
    let opening = HoldLeaseRequest {
        nonce: 0,
        target_bytes: 0,
        state: 0,
        used_bytes: None,
        ..answer(0)
    };
    say.send(opening).await.unwrap();
    for nonce in [1, 1, u64::MAX, 7] {
        say.send(answer(nonce)).await.unwrap();
    }
    let mut heard = client
        .hold_lease(ReceiverStream::new(said))
        .await
        .unwrap()
        .into_inner();
    let reported = heard.message().await;
    assert!(reported.is_ok(), "{reported:?}");
    assert_eq!(
        book(&installation),
        before,
        "what was not asked for credits nothing"
    );
    drop((say, heard));
    assert!(installation.tell(&["status"]).contains("held 8 MiB"));
    daemon.end().await;
}

/// A reply counts once, even if repeated while its target is pending; forged ones never count.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_is_said_again_while_its_target_is_pending_changes_nothing() {
    // This process is the measured holder; no lease is ended for being late.
    let installation =
        Installation::new(&budget(768).replace("8MiB}", "8MiB, deadlines: {batch: 60s}}"));
    let daemon = installation.start().await;
    let mut client = daemon.leases();
    let batch = CreateLeaseRequest {
        tenant: "index".to_owned(),
        lease_class: LeaseClass::Batch.into(),
        max_bytes: 700 * MIB,
        ..good("index")
    };
    let lease = granted(&mut client, batch).await;
    let pages = vec![1u8; usize::try_from(500 * MIB).unwrap()];
    std::hint::black_box(&pages);
    let mut held = Held::open(&mut client, lease.clone()).await;
    let mut other = daemon.leases();
    let urgent = tokio::spawn(async move {
        let asks = CreateLeaseRequest {
            tenant: "wake".to_owned(),
            lease_class: LeaseClass::AudioRealtime.into(),
            min_bytes: 400 * MIB,
            max_wait: Some(prost_types::Duration {
                seconds: 30,
                nanos: 0,
            }),
            ..good("wake")
        };
        other.create_lease(asks).await
    });
    let target = held.target().await;
    let (nonce, bytes, used) = (target.nonce, target.target_bytes, Bytes::new(500 * MIB));
    let before = book(&installation);
    for (nonce, bytes, said, verdict) in [
        (nonce, bytes, TargetState::Deferred, TargetState::Deferred),
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
        (nonce, 0, TargetState::Applied, TargetState::Conflict),
    ] {
        held.answer(nonce, bytes, said, used).await;
        assert_eq!(held.receipt().await.1, verdict);
    }
    assert_eq!(book(&installation), before, "nothing is credited");
    assert!(!urgent.is_finished());
    urgent.abort();
    let release = ReleaseLeaseRequest {
        name: lease.name,
        boot_id: lease.boot_id,
        generation: lease.generation,
    };
    client.release_lease(release).await.unwrap();
    daemon.end().await;
    let journal = std::fs::read_to_string(installation.path("journal.ndjson")).unwrap();
    let answers = journal.matches(r#""event":"target_answered""#).count();
    assert_eq!(answers, 1, "the others stay outside the arbiter");
    installation.replay();
}

/// User without processes on this machine.
const OTHER_UID: u32 = 61_006;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_users_lease_can_neither_be_renewed_nor_released() {
    let installation = Installation::new(&budget(64));
    let daemon = installation.start().await;
    let Some(channel) = channel_of(&installation.abstract_name(), OTHER_UID).await else {
        eprintln!("left out: only root can be another user");
        daemon.end().await;
        return;
    };
    let lease = granted(&mut daemon.leases(), good("one")).await;
    let before = book(&installation);
    let mut process = LeaseServiceClient::new(channel);
    let renewed = process.renew_lease(RenewLeaseRequest {
        name: lease.name.clone(),
        boot_id: lease.boot_id.clone(),
        generation: lease.generation,
    });
    let renewed = renewed.await.unwrap_err();
    let released = process.release_lease(ReleaseLeaseRequest {
        name: lease.name.clone(),
        boot_id: lease.boot_id.clone(),
        generation: lease.generation,
    });
    let released = released.await.unwrap_err();
    for status in [renewed, released] {
        assert_eq!(status.code(), Code::PermissionDenied, "{status:?}");
        assert!(!reason(&status).1.is_empty(), "{status:?}");
    }
    assert_eq!(book(&installation), before);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_connections_and_an_unread_stream_leave_others_served() {
    let installation = Installation::new("");
    installation.configure_grpc(
        &budget(64),
        "limits: {connections: {per_process: 8}, streams: {per_process: 1}, reader_patience: 1s}",
    );
    let daemon = installation.start().await;
    let mut client = daemon.leases();
    let lease = granted(&mut client, good("one")).await;

    // More events than the window of a connection, for clients that do not read.
    for number in 0..300 {
        let asked = CreateLeaseRequest {
            tenant: "t".repeat(63),
            validate_only: true,
            ..good(&format!("r{number}"))
        };
        // A refusal for want of a fresh sample is an event as well.
        if let Err(refused) = client.create_lease(asked).await {
            assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        }
    }
    let narrow = tonic::transport::Endpoint::from_shared(format!(
        "unix://{}",
        installation.socket().display()
    ))
    .unwrap();
    let narrow = narrow
        .initial_stream_window_size(65_535)
        .connect()
        .await
        .unwrap();
    let mut narrow = OperatorServiceClient::new(narrow);
    let unread = narrow.watch_events(WatchEventsRequest::default());
    let mut unread = unread.await.unwrap().into_inner();

    let socket = installation.socket();
    let crowd = tokio::task::spawn_blocking(move || {
        let (mut open, mut closed) = (Vec::new(), 0);
        for _ in 0..10_000 {
            let mut stream = UnixStream::connect(&socket).unwrap();
            if open.len() < 6 {
                open.push(stream);
            } else {
                closed += usize::from(stream.read(&mut [0]).is_ok_and(|read| read == 0));
            }
        }
        closed
    });
    // Meanwhile, connected clients are served.
    let mut renewals = 0;
    while !crowd.is_finished() {
        let renew = RenewLeaseRequest {
            name: lease.name.clone(),
            boot_id: lease.boot_id.clone(),
            generation: lease.generation,
        };
        timeout(PATIENCE, client.renew_lease(renew))
            .await
            .unwrap()
            .unwrap();
        renewals += 1;
    }
    assert_eq!(
        crowd.await.unwrap(),
        10_000 - 6,
        "closed at once, without a byte"
    );
    assert!(renewals > 0);
    // The slot of an abandoned connection is free again.
    let mut operator = daemon.operator();
    let free_again = async {
        while operator
            .watch_events(WatchEventsRequest::default())
            .await
            .is_err()
        {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, free_again).await.unwrap();
    let status = loop {
        match timeout(PATIENCE, unread.message()).await.unwrap() {
            Ok(message) => assert!(message.is_some(), "the stream ends as if it were complete"),
            Err(status) => break status,
        }
    };
    assert_eq!(
        reason(&status),
        (Code::Aborted, "READER_STALLED".to_owned())
    );
    assert!(installation.tell(&["status"]).contains("held 8 MiB"));
    daemon.end().await;
}

/// A worker whose memory can never be granted is not awaited: every speech listener reports this at once, with figures.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn speech_that_can_never_be_had_is_refused_at_once_on_every_listener() {
    // It fits the budget alone, but not together with the LLM's floor.
    let voice = tts().replace("peak: 16MiB", "peak: 62MiB");
    let installation = Installation::new(&format!(
        "{}{}workers:\n{voice}{LISTENER}",
        budget(64),
        demo_model(1024)
    ));
    let daemon = installation.start().await;
    daemon
        .until("the LLM runs", |status| {
            let state = status.engine.as_ref().map(Engine::state);
            state == Some(EngineState::Ready)
                && status.workers[0].state() == WorkerState::AwaitingMemory
        })
        .await;
    let answer = timeout(PATIENCE, daemon.speak("good night")).await.unwrap();
    assert_eq!(answer.status, 503, "{}", answer.text());
    let error: Value = serde_json::from_str(answer.text()).unwrap();
    assert_eq!(error["error"]["code"], "memory_pressure", "{error}");
    let message = error["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("62 MiB") && message.contains("budget"),
        "{message}"
    );

    let mut client = Client::connect(&installation).await;
    client
        .say(Event::Synthesize(Synthesize {
            text: "good night".to_owned(),
            voice: None,
        }))
        .await;
    let (code, text) = timeout(PATIENCE, client.refusal()).await.unwrap();
    assert_eq!(code, "memory-pressure", "{text}");
    assert!(text.contains("62 MiB"), "{text}");
    daemon.end().await;
}

/// A value that every listener parses, but that leaves no token to sample, is the caller's error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_setting_that_no_token_could_be_chosen_with_is_refused_with_its_limits() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(1024)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let messages = json!([{"role": "user", "content": "hello"}]);
    let refused = daemon
        .chat(json!({ "messages": messages, "temperature": 1.0, "top_p": 1e-46 }))
        .await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    let error: Value = serde_json::from_str(refused.text()).unwrap();
    let message = error["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("top_p: `1e-46` is not between 1e-30 and 1"),
        "{message}"
    );
    let body =
        json!({ "model": "demo", "messages": messages, "options": { "repeat_penalty": 2e-38 } });
    let refused = post_json(daemon.http, "/api/chat", &body).await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    assert!(
        refused
            .text()
            .contains("repeat_penalty: `2e-38` is not between 0.01 and 10"),
        "{}",
        refused.text()
    );
    let least =
        json!({ "messages": messages, "temperature": 1.0, "top_p": 1e-30, "max_tokens": 3 });
    let answer = daemon.chat(least).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    daemon.end().await;
}
