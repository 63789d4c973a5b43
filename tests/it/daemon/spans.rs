//! Spans of requests, and events, as received by a collector.

use std::{
    collections::BTreeMap,
    fs,
    net::{Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use cotenant::telemetry::otlp::logs::v1::{
    ExportLogsServiceRequest, ExportLogsServiceResponse, LogRecord,
    log_record::SeverityNumber,
    logs_service_server::{LogsService, LogsServiceServer},
};
use cotenant::telemetry::otlp::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse, Span,
    any_value::Value,
    span::SpanKind,
    trace_service_server::{TraceService, TraceServiceServer},
};
use nix::sys::signal::{Signal, kill};
use prost::Message as _;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::timeout,
};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{
    Request, Response, Status,
    service::Routes,
    transport::{Identity, Server, ServerTlsConfig},
};

use super::{
    fleet::{Ca, openssl_is_there},
    installation::{
        Daemon, Installation, asr, ballast, budget, chat_body, demo_model, pid_of, tts, worker,
        workers_ready,
    },
};
use crate::{
    http::client::{Connection, FORM, form, post, request},
    support::{PATIENCE, speech_is_installed},
};

/// Collector that forwards its input.
struct Collector(mpsc::UnboundedSender<ExportTraceServiceRequest>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.send(request.into_inner()).unwrap();
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Collector that forwards events.
struct EventCollector(mpsc::UnboundedSender<ExportLogsServiceRequest>);

#[tonic::async_trait]
impl LogsService for EventCollector {
    async fn export(
        &self,
        request: Request<ExportLogsServiceRequest>,
    ) -> Result<Response<ExportLogsServiceResponse>, Status> {
        self.0.send(request.into_inner()).unwrap();
        Ok(Response::new(ExportLogsServiceResponse::default()))
    }
}

fn events_of(batch: &ExportLogsServiceRequest) -> Vec<LogRecord> {
    let scopes = batch
        .resource_logs
        .iter()
        .flat_map(|resource| &resource.scope_logs);
    scopes.flat_map(|scope| scope.log_records.clone()).collect()
}

fn spans_of(batch: &ExportTraceServiceRequest) -> Vec<Span> {
    let scopes = batch
        .resource_spans
        .iter()
        .flat_map(|resource| &resource.scope_spans);
    scopes.flat_map(|scope| scope.spans.clone()).collect()
}

fn attributes(attributes: &[cotenant::telemetry::otlp::v1::KeyValue]) -> BTreeMap<String, String> {
    let text = |value: &Value| match value {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        Value::DoubleValue(number) => number.to_string(),
        Value::BoolValue(yes) => yes.to_string(),
        Value::ArrayValue(list) => format!("{} values", list.values.len()),
    };
    let known = attributes.iter().filter_map(|pair| {
        let value = pair.value.as_ref()?.value.as_ref()?;
        Some((pair.key.clone(), text(value)))
    });
    known.collect()
}

fn spoken_to(listener: &TcpListener, scheme: &str, more: &str) -> (Installation, SocketAddr) {
    let address = listener.local_addr().unwrap();
    let sections = format!(
        "{}{}telemetry: {{otlp: \"{scheme}://{address}\"}}\n{more}",
        budget(192),
        demo_model(16_384)
    );
    (Installation::new(&sections), address)
}

/// Waits until a metric has at least this value.
async fn until_metric(daemon: &Daemon<'_>, name: &str, least: f64) {
    let deadline = Instant::now() + PATIENCE;
    while daemon.metric(name).await.unwrap() < least {
        assert!(Instant::now() < deadline, "{name} does not come to {least}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_is_a_trace_with_the_sheds_that_happen_in_it() {
    let (sender, mut batches) = mpsc::unbounded_channel();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let (installation, _) = spoken_to(&listener, "grpc", "");
    let server = Server::builder().add_service(TraceServiceServer::new(Collector(sender)));
    let serving = tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let daemon = installation.start().await;
    daemon.whole().await;

    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let parent = format!("00-{trace}-00f067aa0ba902b7-01");
    let body = chat_body(json!({
        "messages": [{"role": "user", "content": "tell me all about the house"}], "stream": true, "max_tokens": 400,
    }));
    let headers = [
        ("content-type", "application/json"),
        ("traceparent", parent.as_str()),
    ];
    let mut spans: Vec<Span> = Vec::new();
    // An answer may end before the shed.
    let chat = 'shed: loop {
        let mut connection = Connection::open(daemon.http).await;
        connection
            .send(&request(
                "POST",
                "/v1/chat/completions",
                &headers,
                body.to_string().as_bytes(),
            ))
            .await;
        connection.wait_for("data: ").await;
        installation.tell(&["shed", "1MiB"]);
        assert_eq!(connection.answer().await.status, 200);
        loop {
            let batch = timeout(PATIENCE, batches.recv())
                .await
                .expect("no spans come")
                .unwrap();
            let resource = batch.resource_spans[0].resource.clone().unwrap();
            let resource = attributes(&resource.attributes);
            assert_eq!(resource["service.name"], "cotenant");
            let host = nix::unistd::gethostname().unwrap();
            assert_eq!(resource["host.name"], host.to_str().unwrap());
            spans.extend(spans_of(&batch));
            let mut chats = spans.iter().filter(|span| span.name == "chat demo");
            let Some(chat) = chats.next_back() else {
                continue;
            };
            if chat
                .events
                .iter()
                .any(|event| event.name == "cotenant.shed")
            {
                break 'shed chat.clone();
            }
            if spans.iter().any(|span| span.span_id == chat.parent_span_id) {
                spans.clear();
                daemon.whole().await;
                break;
            }
        }
    };
    while !spans.iter().any(|span| span.span_id == chat.parent_span_id) {
        spans.extend(spans_of(
            &timeout(PATIENCE, batches.recv())
                .await
                .expect("no spans come")
                .unwrap(),
        ));
    }
    let root = spans
        .iter()
        .find(|span| span.span_id == chat.parent_span_id)
        .unwrap();
    let hex = |bytes: &[u8]| {
        bytes
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    assert_eq!(
        (hex(&root.trace_id), hex(&chat.trace_id)),
        (trace.to_owned(), trace.to_owned())
    );
    assert_eq!(hex(&root.parent_span_id), "00f067aa0ba902b7");
    assert_eq!(
        (root.name.as_str(), root.kind()),
        ("POST /v1/chat/completions", SpanKind::Server)
    );
    assert_eq!(
        attributes(&root.attributes)["http.response.status_code"],
        "200"
    );
    assert!(root.start_time_unix_nano <= chat.start_time_unix_nano);
    assert!(chat.end_time_unix_nano <= root.end_time_unix_nano);

    let known = attributes(&chat.attributes);
    assert_eq!(known["gen_ai.operation.name"], "chat");
    assert_eq!(known["gen_ai.request.model"], "demo");
    assert_eq!(known["gen_ai.response.finish_reasons"], "1 values");
    assert!(
        known["gen_ai.usage.input_tokens"].parse::<u32>().unwrap() > 5,
        "{known:?}"
    );
    assert!(
        known["gen_ai.usage.output_tokens"].parse::<u32>().unwrap() > 1,
        "{known:?}"
    );
    let names: Vec<&str> = chat
        .events
        .iter()
        .map(|event| event.name.as_str())
        .collect();
    let at = |name: &str| {
        names
            .iter()
            .position(|known| *known == name)
            .unwrap_or_else(|| panic!("{name}: {names:?}"))
    };
    assert!(
        at("started") < at("first_token") && at("first_token") < at("cotenant.shed"),
        "{names:?}"
    );
    let shed = attributes(&chat.events[at("cotenant.shed")].attributes);
    assert_eq!(shed["cotenant.shed.reason"], "operator");
    assert!(
        shed["cotenant.bytes"].parse::<u64>().unwrap() >= 1 << 16,
        "{shed:?}"
    );
    // Another client's trace is separate, and read-only requests have none.
    assert_eq!(daemon.ask("hello").await.status, 200);
    let mut later = Vec::new();
    while !later
        .iter()
        .any(|span: &Span| span.parent_span_id.is_empty())
    {
        later.extend(spans_of(
            &timeout(PATIENCE, batches.recv())
                .await
                .expect("no spans come")
                .unwrap(),
        ));
    }
    assert!(later.iter().all(|span| hex(&span.trace_id) != trace));
    assert!(
        later
            .iter()
            .chain(&spans)
            .all(|span| !span.name.starts_with("GET ")),
        "{later:?}"
    );
    until_metric(&daemon, "cotenant_spans_exported_total", 4.0).await;
    assert_eq!(
        daemon.metric("cotenant_spans_dropped_total").await,
        Some(0.0)
    );
    daemon.end().await;
    serving.abort();
}

/// The stages of one turn, as requested by a client with its own trace.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_stages_of_a_turn_are_spans_of_its_trace() {
    if !speech_is_installed() {
        return;
    }
    let (sender, mut batches) = mpsc::unbounded_channel();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let (installation, _) = spoken_to(&listener, "grpc", &format!("workers:\n{}{}", tts(), asr()));
    let server = Server::builder().add_service(TraceServiceServer::new(Collector(sender)));
    let serving = tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let question = daemon.speak("turn on the kitchen light").await.body;

    let trace = [0x4b; 16];
    let parent = format!("00-{}-00f067aa0ba902b7-01", "4b".repeat(16));
    let recording = form(&[("model", None, b"asr"), ("file", Some("a.wav"), &question)]);
    let chat =
        chat_body(json!({"messages": [{"role": "user", "content": "turn on the kitchen light"}]}))
            .to_string();
    let speech = json!({"model": "tts", "input": "It is done. Good night."}).to_string();
    for (path, kind, body) in [
        ("/v1/audio/transcriptions", FORM, recording.as_slice()),
        ("/v1/chat/completions", "application/json", chat.as_bytes()),
        ("/v1/audio/speech", "application/json", speech.as_bytes()),
    ] {
        let headers = [("content-type", kind), ("traceparent", parent.as_str())];
        let answer = post(daemon.http, path, &headers, body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
    }
    let mut stages: Vec<Span> = Vec::new();
    while !["transcribe", "chat demo", "speak"]
        .iter()
        .all(|name| stages.iter().any(|span| span.name == *name))
    {
        let batch = timeout(PATIENCE, batches.recv())
            .await
            .expect("no spans come")
            .unwrap();
        stages.extend(
            spans_of(&batch)
                .into_iter()
                .filter(|span| span.trace_id == trace),
        );
    }
    let of = |name: &str| stages.iter().find(|span| span.name == name).unwrap();
    assert!(of("transcribe").end_time_unix_nano <= of("chat demo").start_time_unix_nano);
    assert!(of("chat demo").end_time_unix_nano <= of("speak").start_time_unix_nano);
    assert_eq!(
        attributes(&of("transcribe").attributes)["gen_ai.request.model"],
        "asr"
    );
    assert_eq!(
        attributes(&of("speak").attributes)["cotenant.text.characters"],
        "23"
    );
    daemon.end().await;
    serving.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_away_costs_its_spans_and_one_line() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let (installation, _) = spoken_to(&listener, "grpc", "");
    drop(listener);
    let daemon = installation.start().await;
    daemon.whole().await;
    for dropped in [1.0, 3.0] {
        assert_eq!(daemon.ask("hello").await.status, 200);
        until_metric(&daemon, "cotenant_spans_dropped_total", dropped).await;
    }
    let log = installation.logged("cannot export spans").await;
    assert_eq!(log.matches("cannot export spans").count(), 1, "{log}");
    assert_eq!(
        daemon.metric("cotenant_spans_exported_total").await,
        Some(0.0)
    );
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_go_by_tls_to_a_collector_of_the_named_ca_and_to_no_other() {
    if !openssl_is_there() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (named, other) = (
        Ca::new(folder.path().join("named")),
        Ca::new(folder.path().join("other")),
    );
    named.issue("collector", 2);
    let read = |name: &str| fs::read(named.file(name)).unwrap();
    for (scheme, ca) in [("grpcs", &named), ("https", &named), ("grpcs", &other)] {
        let (sender, mut batches) = mpsc::unbounded_channel();
        let posts = sender.clone();
        let post = axum::routing::post(async move |body: axum::body::Bytes| {
            posts
                .send(ExportTraceServiceRequest::decode(body).unwrap())
                .unwrap();
        });
        let service = Routes::new(TraceServiceServer::new(Collector(sender)));
        let routes = Routes::from(service.into_axum_router().route("/v1/traces", post));
        let tls = ServerTlsConfig::new().identity(Identity::from_pem(
            read("collector.pem"),
            read("collector.key"),
        ));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Server::builder()
            .tls_config(tls)
            .unwrap()
            .add_routes(routes);
        let serving = tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        let installation = Installation::new(&format!(
            "{}{}telemetry: {{otlp: \"{scheme}://{address}\", otlp_ca: {}}}\n",
            budget(192),
            demo_model(16_384),
            ca.file("ca.pem").display(),
        ));
        let daemon = installation.start().await;
        daemon.whole().await;
        assert_eq!(daemon.ask("hello").await.status, 200);
        if std::ptr::eq(ca, &named) {
            let batch = timeout(PATIENCE, batches.recv())
                .await
                .expect("no spans come")
                .unwrap();
            assert!(!spans_of(&batch).is_empty(), "{scheme}");
            until_metric(&daemon, "cotenant_spans_exported_total", 2.0).await;
            assert_eq!(
                daemon.metric("cotenant_spans_dropped_total").await,
                Some(0.0)
            );
        } else {
            until_metric(&daemon, "cotenant_spans_dropped_total", 2.0).await;
            let log = installation.logged("cannot export spans").await;
            assert!(log.contains("certificate"), "{log}");
            assert!(
                batches.try_recv().is_err(),
                "a collector of another CA got spans"
            );
        }
        daemon.end().await;
        serving.abort();
    }
}

/// Reads one HTTP/1.1 request and returns its body.
async fn posted(stream: &mut TcpStream, path: &str) -> Vec<u8> {
    let mut read = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&read).to_ascii_lowercase();
        if let Some(end) = read.windows(4).position(|window| window == b"\r\n\r\n") {
            assert!(text.starts_with(&format!("post {path} ")), "{text}");
            let (_, length) = text.split_once("content-length: ").unwrap();
            let length: usize = length.split("\r\n").next().unwrap().parse().unwrap();
            if read.len() >= end + 4 + length {
                return read[end + 4..].to_vec();
            }
        }
        let mut buffer = [0; 4096];
        let more = stream.read(&mut buffer).await.unwrap();
        assert!(more > 0, "closed in the middle");
        read.extend_from_slice(&buffer[..more]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_hangs_or_refuses_keeps_no_request_waiting() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let (installation, _) = spoken_to(&listener, "http", "");
    let daemon = installation.start().await;
    daemon.whole().await;

    // It accepts the batch without a reply.
    assert_eq!(daemon.ask("hello").await.status, 200);
    let (mut hung, _) = timeout(PATIENCE, listener.accept())
        .await
        .expect("no connection")
        .unwrap();
    posted(&mut hung, "/v1/traces").await;
    assert_eq!(
        daemon.metric("cotenant_spans_dropped_total").await,
        Some(0.0)
    );
    assert_eq!(
        daemon.ask("hello again").await.status,
        200,
        "while the exporter waits"
    );
    until_metric(&daemon, "cotenant_spans_dropped_total", 2.0).await;

    let (mut refusing, _) = timeout(PATIENCE, listener.accept())
        .await
        .expect("no connection")
        .unwrap();
    posted(&mut refusing, "/v1/traces").await;
    refusing
        .write_all(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
        .await
        .unwrap();
    until_metric(&daemon, "cotenant_spans_dropped_total", 4.0).await;

    assert_eq!(daemon.ask("hello").await.status, 200);
    let (mut taking, _) = timeout(PATIENCE, listener.accept())
        .await
        .expect("no connection")
        .unwrap();
    let batch =
        ExportTraceServiceRequest::decode(posted(&mut taking, "/v1/traces").await.as_slice())
            .unwrap();
    taking
        .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        .await
        .unwrap();
    assert!(spans_of(&batch).iter().any(|span| span.name == "chat demo"));
    until_metric(&daemon, "cotenant_spans_exported_total", 2.0).await;
    let log = installation.logged("spans are exported again").await;
    assert_eq!(log.matches("cannot export spans").count(), 1, "{log}");
    assert_eq!(log.matches("spans are exported again").count(), 1, "{log}");
    daemon.end().await;
}

/// Waits for an event of this name; other batches are ignored.
async fn event(
    batches: &mut mpsc::UnboundedReceiver<ExportLogsServiceRequest>,
    name: &str,
) -> LogRecord {
    loop {
        let batch = timeout(PATIENCE, batches.recv()).await;
        let batch = batch.expect("no batch").unwrap();
        let mut events = events_of(&batch).into_iter();
        if let Some(event) = events.find(|event| event.event_name == name) {
            return event;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_and_post_mortems_reach_a_collector_without_output_of_workers() {
    let (sender, mut batches) = mpsc::unbounded_channel();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let sections = format!(
        "{}telemetry: {{otlp: \"grpc://{}\", otlp_events: true}}\nworkers:\n{}",
        budget(64),
        listener.local_addr().unwrap(),
        ballast()
    );
    let server = Server::builder().add_service(LogsServiceServer::new(EventCollector(sender)));
    let serving = tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let installation = Installation::new(&sections);
    let daemon = installation.start().await;
    let status = daemon.until("ready", workers_ready).await;
    let start = event(&mut batches, "cotenant.start").await;
    let boot_id = attributes(&start.attributes)["cotenant.boot_id"].clone();
    assert_eq!(boot_id, status.boot_id);
    assert!(start.time_unix_nano > 0);

    let pid = worker(&status, "ballast").pid.unwrap();
    kill(pid_of(pid), Signal::SIGKILL).unwrap();
    let death = event(&mut batches, "cotenant.worker_died").await;
    assert_eq!(death.severity_number(), SeverityNumber::Warn);
    let Some(Value::StringValue(text)) = death.body.and_then(|body| body.value) else {
        panic!("it has no text");
    };
    assert!(text.contains("ballast"), "{text}");
    let attributes = attributes(&death.attributes);
    let postmortem: serde_json::Value =
        serde_json::from_str(&attributes["cotenant.postmortem"]).unwrap();
    assert_eq!(
        (&postmortem["worker"], &postmortem["pid"]),
        (&json!("ballast"), &json!(pid))
    );
    assert!(postmortem["class"].is_string(), "{postmortem}");
    let certificate = installation.json(&["postmortem", "ballast"]);
    assert!(certificate.to_string().contains("holding"), "{certificate}");
    assert!(!postmortem.to_string().contains("holding"), "{postmortem}");
    daemon.end().await;
    serving.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_that_a_collector_could_not_take_are_sent_again() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let sections = format!(
        "{}telemetry: {{otlp: \"http://{}\", otlp_events: true}}\n",
        budget(64),
        listener.local_addr().unwrap(),
    );
    let installation = Installation::new(&sections);
    let daemon = installation.start().await;
    let mut first = Vec::new();
    for answer in ["503 Service Unavailable", "200 OK"] {
        let (mut stream, _) = timeout(PATIENCE, listener.accept())
            .await
            .expect("no connection")
            .unwrap();
        let batch = posted(&mut stream, "/v1/logs").await;
        let batch = ExportLogsServiceRequest::decode(batch.as_slice()).unwrap();
        first.push(events_of(&batch).remove(0));
        let answer = format!("HTTP/1.1 {answer}\r\ncontent-length: 0\r\n\r\n");
        stream.write_all(answer.as_bytes()).await.unwrap();
    }
    assert_eq!(first[0], first[1]);
    assert_eq!(first[0].event_name, "cotenant.start");
    installation
        .logged("cannot export events; they are sent later")
        .await;
    daemon.end().await;
}
