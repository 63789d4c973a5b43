//! What a tenant says wrong, to the daemon itself: a clear refusal, and the book as it was.

use cotenant::rpc::v1::{CreateLeaseRequest, HoldLeaseRequest, LeaseClass, RenewLeaseRequest, TargetState};
use serde_json::Value;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use super::house::{House, budget};

const MIB: u64 = 1 << 20;

fn good(request_id: &str) -> CreateLeaseRequest {
    CreateLeaseRequest {
        request_id: request_id.to_owned(),
        tenant: "camera".to_owned(),
        lease_class: LeaseClass::Interactive.into(),
        min_bytes: 8 * MIB,
        term: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
        ..CreateLeaseRequest::default()
    }
}

fn reason(status: &Status) -> (Code, String) {
    let info = status.get_details_error_info();
    (status.code(), info.map(|info| info.reason).unwrap_or_default())
}

/// What is on the book; not how long it may stay there, nor what was measured.
fn book(house: &House) -> Vec<(Value, Value, Value)> {
    let leases = house.json(&["leases"]);
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
    let house = House::new(&budget(64));
    let daemon = house.start().await;
    let mut client = daemon.leases();
    let lease = client
        .create_lease(good("one"))
        .await
        .unwrap()
        .into_inner()
        .lease
        .unwrap();
    let before = book(&house);
    assert_eq!(before.len(), 1);

    let minus_one = (-1i64).cast_unsigned();
    let wrong = |change: fn(&mut CreateLeaseRequest)| {
        let mut request = good("two");
        change(&mut request);
        request
    };
    let sizes = [
        ("zero", wrong(|request| request.min_bytes = 0)),
        (
            "what looks negative",
            CreateLeaseRequest {
                min_bytes: minus_one,
                ..good("two")
            },
        ),
        (
            "a maximum that looks negative",
            CreateLeaseRequest {
                max_bytes: minus_one,
                ..good("two")
            },
        ),
        ("a maximum below the minimum", wrong(|request| request.max_bytes = 1)),
        (
            "more than there are addresses",
            wrong(|request| request.min_bytes = 1 << 60),
        ),
        (
            "a name of a megabyte",
            wrong(|request| request.tenant = "a".repeat(1 << 20)),
        ),
        ("no request id", wrong(|request| request.request_id.clear())),
        (
            "a term below zero",
            wrong(|request| request.term = Some(prost_types::Duration { seconds: -1, nanos: 0 })),
        ),
    ];
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
        assert!(!reason.is_empty() || code == Code::OutOfRange, "{what}: {status:?}");
        assert!(status.message().len() < 1000, "{what}: a message of bounded length");
    }
    assert_eq!(book(&house), before);

    // The same request again is the same lease; with another content it is refused.
    let again = client
        .create_lease(good("one"))
        .await
        .unwrap()
        .into_inner()
        .lease
        .unwrap();
    assert_eq!((again.name, again.generation), (lease.name.clone(), lease.generation));
    let other = CreateLeaseRequest {
        min_bytes: 9 * MIB,
        ..good("one")
    };
    let status = client.create_lease(other).await.unwrap_err();
    assert_eq!(reason(&status), (Code::AlreadyExists, "REQUEST_ID_REUSED".to_owned()));

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
        assert_eq!(reason(&status), (expected.0, expected.1.to_owned()), "{status:?}");
    }
    assert_eq!(book(&house), before);

    // Answers to targets that were never set, or long ago, and again.
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
    let mut heard = client.hold_lease(ReceiverStream::new(said)).await.unwrap().into_inner();
    let told = heard.message().await;
    assert!(told.is_ok(), "{told:?}");
    assert_eq!(book(&house), before, "nothing is credited for what nobody asked");
    drop((say, heard));
    assert!(house.tell(&["status"]).contains("held 8 MiB"));
    daemon.end().await;
}
