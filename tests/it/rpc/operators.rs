//! Views and commands of operators.

use cotenant::{
    policy::event::Event,
    rpc::{
        Supervisor,
        v1::{self, EntryKind},
    },
    units::Bytes,
};
use tonic::{Code, Request};

use super::daemon::{Daemon, PATIENCE, Settings, granted, reason, request};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_state_has_the_book_the_pressure_and_the_workers() {
    let daemon = Daemon::start().await;
    let mut leases = daemon.leases().await;
    granted(&mut leases, request("one", "camera", 100)).await;
    daemon
        .state(|snapshot| snapshot.leases.len() == 2 && snapshot.workers[0].pid.is_some())
        .await;
    let mut client = daemon.operator().await;
    let status = client
        .get_status(v1::GetStatusRequest {})
        .await
        .unwrap()
        .into_inner();
    let budget = status.budget.unwrap();
    assert_eq!(budget.budget_bytes, Bytes::from_gib(1).get());
    assert_eq!(budget.held_bytes, Bytes::from_mib(164).get());
    assert_eq!(
        budget.free_bytes,
        budget.budget_bytes - budget.held_bytes - budget.unaccounted_bytes
    );
    assert_eq!(status.pressure.unwrap().level(), v1::PressureLevel::Normal);
    assert_eq!(status.engine.unwrap().state(), v1::EngineState::Absent);
    assert_eq!(status.workers[0].name, "asr");
    assert!(!status.boot_id.is_empty() && status.uptime.is_some());
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_come_in_order_and_a_watch_goes_on_where_it_ended() {
    let daemon = Daemon::start().await;
    let mut client = daemon.operator().await;
    let mut leases = daemon.leases().await;
    granted(&mut leases, request("one", "camera", 100)).await;
    let watch = v1::WatchEventsRequest {
        no_follow: true,
        ..v1::WatchEventsRequest::default()
    };
    let mut stream = client
        .watch_events(watch.clone())
        .await
        .unwrap()
        .into_inner();
    let mut last = 0;
    let mut kinds = Vec::new();
    while let Some(response) = stream.message().await.unwrap() {
        assert_eq!(response.missed, 0);
        let entry = response.entry.unwrap();
        assert_eq!(entry.sequence, last + 1);
        last = entry.sequence;
        kinds.push(entry.kind());
        let body: serde_json::Value = serde_json::from_str(&entry.body_json).unwrap();
        assert!(body.is_object() && !entry.summary.is_empty() && !entry.name.is_empty());
    }
    assert_eq!(kinds[0], EntryKind::Start);
    assert!(kinds.contains(&EntryKind::Event) && kinds.contains(&EntryKind::Action));

    let follow = v1::WatchEventsRequest {
        after_sequence: last,
        no_follow: false,
        ..watch
    };
    let mut stream = client.watch_events(follow).await.unwrap().into_inner();
    granted(&mut leases, request("two", "radio", 10)).await;
    let next = tokio::time::timeout(PATIENCE, stream.message())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert_eq!(next.entry.unwrap().sequence, last + 1);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_is_too_slow_is_reported_what_it_missed_and_goes_on() {
    let daemon = Daemon::start_with(Settings {
        events_kept: 100,
        ..Settings::default()
    })
    .await;
    let mut client =
        v1::operator_service_client::OperatorServiceClient::new(daemon.narrow_channel().await);
    let watch = v1::WatchEventsRequest {
        after_sequence: 1,
        ..v1::WatchEventsRequest::default()
    };
    // Opened, but not read.
    let mut stream = client.watch_events(watch).await.unwrap().into_inner();
    let mut last = daemon.handle.events().last_sequence();
    let begin = *last.borrow();
    while *last.borrow() < begin + 5000 {
        let activity = Event::WorkerActivity {
            worker: "asr".into(),
            requests: 0,
        };
        if daemon.handle.submit(activity, None).is_err() {
            last.changed().await.unwrap();
        }
    }
    let end = *last.borrow();
    let mut missed = 0;
    let mut expected = 2;
    let reading = async {
        loop {
            let response = stream.message().await.unwrap().unwrap();
            missed += response.missed;
            let sequence = response.entry.unwrap().sequence;
            assert_eq!(
                sequence,
                expected + response.missed,
                "what is missing is reported"
            );
            expected = sequence + 1;
            if sequence >= end {
                break;
            }
        }
    };
    tokio::time::timeout(PATIENCE, reading).await.unwrap();
    assert!(
        missed > 0,
        "5000 events do not fit into a log of 100 and one window of HTTP/2"
    );
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_shed_regrow_and_command_workers() {
    let daemon = Daemon::start().await;
    let mut client = daemon.operator().await;
    // Without an engine there is nothing to shed: this is reported, not an internal error.
    let nothing = client
        .shed(v1::ShedRequest {
            shed_bytes: 1 << 20,
        })
        .await;
    if let Err(status) = &nothing {
        assert_eq!(reason(status).0, Code::ResourceExhausted);
    }
    let zero = client
        .shed(v1::ShedRequest { shed_bytes: 0 })
        .await
        .unwrap_err();
    assert_eq!(
        reason(&zero),
        (Code::InvalidArgument, "INVALID_FIELD".into())
    );
    let regrow = client.regrow(v1::RegrowRequest {}).await.unwrap_err();
    assert_eq!(
        reason(&regrow),
        (Code::FailedPrecondition, "NOT_GROWING".into())
    );

    let unknown = client
        .control_worker(v1::ControlWorkerRequest {
            name: "absent".into(),
            command: v1::WorkerCommand::Stop.into(),
        })
        .await
        .unwrap_err();
    assert_eq!(reason(&unknown), (Code::NotFound, "UNKNOWN_WORKER".into()));
    assert!(unknown.message().contains("asr"), "{unknown:?}");
    let unset = client
        .control_worker(v1::ControlWorkerRequest {
            name: "asr".into(),
            command: 0,
        })
        .await
        .unwrap_err();
    assert_eq!(reason(&unset).0, Code::InvalidArgument);
    let stop = v1::ControlWorkerRequest {
        name: "asr".into(),
        command: v1::WorkerCommand::Stop.into(),
    };
    client.control_worker(stop).await.unwrap();
    daemon
        .state(|snapshot| snapshot.workers[0].pid.is_none())
        .await;
    let no_variant = client
        .resize_worker(v1::ResizeWorkerRequest {
            name: "asr".into(),
            variant: "nonsense".into(),
            max_wait: None,
        })
        .await
        .unwrap_err();
    assert_eq!(reason(&no_variant).0, Code::InvalidArgument);

    client.drain(v1::DrainRequest { off: false }).await.unwrap();
    // In force once it is answered.
    let mut leases = daemon.leases().await;
    let drained = leases
        .create_lease(request("one", "camera", 10))
        .await
        .unwrap_err();
    assert_eq!(reason(&drained), (Code::Unavailable, "DRAINING".into()));
    client.drain(v1::DrainRequest { off: true }).await.unwrap();
    granted(&mut leases, request("two", "camera", 10)).await;
    // There is no LLM that could be loaded.
    let load = client
        .load_model(v1::LoadModelRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(load.message, "no LLM is configured");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_knows_its_parts_and_reflection_names_all_services() {
    use cotenant::rpc::health_v1::{
        HealthCheckRequest, HealthListRequest, health_check_response::ServingStatus,
        health_client::HealthClient,
    };
    let daemon = Daemon::start().await;
    let mut client = HealthClient::new(daemon.channel().await);
    let ask = |service: &str| HealthCheckRequest {
        service: service.to_owned(),
    };
    let status = client.check(ask("")).await.unwrap().into_inner().status();
    assert_eq!(
        status,
        ServingStatus::NotServing,
        "until the daemon says so"
    );
    daemon.health.set(cotenant::rpc::health::OVERALL, true);
    daemon
        .health
        .set(&cotenant::rpc::health::worker("asr"), true);
    for service in ["", "cotenant.v1.LeaseService", "cotenant.worker.asr"] {
        let status = client
            .check(ask(service))
            .await
            .unwrap()
            .into_inner()
            .status();
        assert_eq!(status, ServingStatus::Serving, "{service}");
    }
    let unknown = client.check(ask("nonsense")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    let all = client
        .list(HealthListRequest {})
        .await
        .unwrap()
        .into_inner()
        .statuses;
    assert_eq!(all["cotenant.worker.asr"].status(), ServingStatus::Serving);
    assert_eq!(all["cotenant.engine"].status(), ServingStatus::NotServing);
    let mut watched = client
        .watch(ask("cotenant.worker.tts"))
        .await
        .unwrap()
        .into_inner();
    for (set, status) in [
        (None, ServingStatus::ServiceUnknown),
        (Some(true), ServingStatus::Serving),
        (Some(false), ServingStatus::NotServing),
    ] {
        if let Some(serving) = set {
            daemon.health.set("cotenant.worker.tts", serving);
            // No updates arrive for another service.
            daemon.health.set("cotenant.engine", serving);
        }
        assert_eq!(watched.message().await.unwrap().unwrap().status(), status);
    }

    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let list = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut reflection = ServerReflectionClient::new(daemon.channel().await);
    let mut answers = reflection
        .server_reflection_info(Request::new(tokio_stream::once(list)))
        .await
        .unwrap()
        .into_inner();
    let answer = answers
        .message()
        .await
        .unwrap()
        .unwrap()
        .message_response
        .unwrap();
    let MessageResponse::ListServicesResponse(services) = answer else {
        panic!("{answer:?}")
    };
    let names: Vec<_> = services
        .service
        .into_iter()
        .map(|service| service.name)
        .collect();
    for name in [
        "cotenant.v1.LeaseService",
        "cotenant.v1.LlmService",
        "cotenant.v1.OperatorService",
        "grpc.health.v1.Health",
    ] {
        assert!(names.contains(&name.to_owned()), "{names:?}");
    }
    daemon.end().await;
}
