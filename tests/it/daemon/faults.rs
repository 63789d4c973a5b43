//! Faults from outside: each is answered with a reason, and nothing else is affected.

use std::{fs, net::TcpListener, time::Duration};

use cotenant::rpc::v1::{CreateLeaseRequest, LeaseClass, WorkerState};
use serde_json::json;
use tonic::Code;

use super::installation::{
    Installation, anonymous, ballast, budget, chat_body, content, demo_model, long_form, said,
    whole, worker,
};
use crate::{
    http::client::{Connection, request},
    support::children,
};

const MIB: u64 = 1 << 20;

#[test]
fn a_configuration_with_several_faults_is_refused_with_all_of_them() {
    let installation = Installation::new(
        "budget: {total: 12G, reserve: 64, scope: galaxy}\n\
         llm: {path: model.gguf, context: 8, mode: fastest}\n\
         workers:\n  - {name: ASR!, role: asr, argv: []}\n",
    );
    let (status, text) = installation.refuses_to_start();
    assert_eq!(status.code(), Some(78), "{text}");
    let check = installation.run(&["check", installation.config().to_str().unwrap()]);
    assert_eq!(check.status.code(), Some(78), "{}", said(&check));
    assert_eq!(
        String::from_utf8_lossy(&check.stdout),
        "verdict: the configuration cannot be used\n",
        "nothing else is printed of a configuration that does not hold"
    );
    for text in [text, String::from_utf8(check.stderr).unwrap()] {
        for fault in [
            "budget.total",
            "budget.reserve",
            "budget.scope",
            "llm.path",
            "llm.context",
            "llm.mode",
            "workers[0].name",
            "workers[0].argv",
        ] {
            assert!(
                text.contains(fault),
                "{fault} is not among the faults: {text}"
            );
        }
        assert!(text.contains("hint: "), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_never_gets_ready_is_given_up_and_the_others_serve() {
    let installation = Installation::new(&format!(
        "{}{}workers:
  - name: mute
    role: asr
    argv: [sleep, '1000']
    ready: {{kind: describe, timeout: 200ms}}
    restart: {{intensity: 1, backoff: 20ms}}
    memory: {{steady: 4MiB}}
  - name: gone
    role: other
    argv: [/nowhere/program]
    restart: {{intensity: 1, backoff: 20ms}}
    memory: {{steady: 4MiB}}
{}",
        budget(256),
        demo_model(1024),
        ballast()
    ));
    let daemon = installation.start().await;
    let status = daemon
        .until("both have been given up", |status| {
            ["mute", "gone"]
                .iter()
                .all(|name| worker(status, name).state() == WorkerState::Degraded)
                && worker(status, "ballast").state() == WorkerState::Ready
                && whole(status)
        })
        .await;
    let mute = worker(&status, "mute");
    assert_eq!(mute.starts, 2);
    assert!(
        mute.last_exit.contains("not ready within 0.2 s")
            && mute.last_exit.contains("`ready.timeout`"),
        "{}",
        mute.last_exit
    );
    let gone = worker(&status, "gone");
    assert!(
        gone.last_exit.contains("cannot execute `/nowhere/program`"),
        "{}",
        gone.last_exit
    );

    assert!(!content(&daemon.ask("hello").await).is_empty());
    let refused = daemon.hear(b"RIFF").await;
    assert!([400, 503].contains(&refused.status), "{}", refused.text());
    // An operator may retry.
    installation.tell(&["start", "mute"]);
    daemon
        .until("it was tried again", |status| {
            worker(status, "mute").starts > 2
        })
        .await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_beyond_the_budget_is_denied_with_the_figures() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(1024)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let ask = |mib: u64| CreateLeaseRequest {
        request_id: format!("it-{mib}"),
        tenant: "camera".to_owned(),
        lease_class: LeaseClass::Interactive.into(),
        min_bytes: mib * MIB,
        max_bytes: mib * MIB,
        term: Some(prost_types::Duration {
            seconds: 30,
            nanos: 0,
        }),
        max_wait: None,
        ..CreateLeaseRequest::default()
    };
    let denied = daemon.leases().create_lease(ask(512)).await.unwrap_err();
    assert!(
        denied.message().contains("camera")
            && denied.message().contains("512 MiB")
            && denied.message().contains("128 MiB"),
        "{denied}"
    );
    assert_ne!(denied.code(), Code::Internal);
    let granted = daemon
        .leases()
        .create_lease(ask(16))
        .await
        .unwrap()
        .into_inner()
        .lease
        .unwrap();
    assert_eq!(granted.held_bytes, 16 * MIB);
    assert!(installation.tell(&["leases"]).contains("camera"));
    installation.tell(&["leases", "release", &granted.name]);
    // Its bytes leave the ledger once its process, which continues to use memory, has been measured again.
    daemon
        .until("the lease is gone", |status| {
            let camera = status.leases.iter().find(|lease| lease.tenant == "camera");
            camera.is_none_or(|lease| lease.held_bytes == 0)
        })
        .await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_too_long_for_now_is_not_one_too_long_for_ever() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(1024)));
    let daemon = installation.start().await;
    daemon.whole().await;
    // Beyond the engine's full plan.
    let endless = daemon.ask(&"turn on the kitchen light ".repeat(400)).await;
    assert_eq!(endless.status, 400, "{}", endless.text());
    assert_eq!(endless.error_code(), "context_length_exceeded");
    assert!(endless.text().contains("1024 tokens"), "{}", endless.text());
    assert_eq!(endless.header("x-should-retry"), "false");

    // Beyond its current capacity: the lease leaves it only its floor.
    let status = daemon.status().await;
    let floor = status
        .leases
        .iter()
        .find(|lease| lease.tenant == "llm")
        .unwrap()
        .min_bytes;
    let long = "turn on the kitchen light ".repeat(40);
    let lease = daemon
        .leases()
        .create_lease(CreateLeaseRequest {
            request_id: "all".to_owned(),
            tenant: "camera".to_owned(),
            lease_class: LeaseClass::AudioRealtime.into(),
            min_bytes: 128 * MIB - floor,
            max_bytes: 128 * MIB - floor,
            term: Some(prost_types::Duration {
                seconds: 30,
                nanos: 0,
            }),
            max_wait: Some(prost_types::Duration {
                seconds: 5,
                nanos: 0,
            }),
            ..CreateLeaseRequest::default()
        })
        .await
        .unwrap()
        .into_inner()
        .lease
        .unwrap();
    let shed = daemon.ask(&long).await;
    assert_eq!(shed.status, 503, "{}", shed.text());
    assert_eq!(shed.error_code(), "memory_pressure");
    assert_eq!(shed.header("x-should-retry"), "true");
    assert!(!shed.header("retry-after").is_empty());
    // A short one is still answered.
    assert!(!content(&daemon.ask("hello").await).is_empty());

    installation.tell(&["leases", "release", &lease.name]);
    daemon.whole().await;
    let fits = json!({ "messages": [{"role": "user", "content": long}], "max_tokens": 1 });
    assert_eq!(daemon.chat(fits).await.status, 200, "it fits now");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_ends_its_generation() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(8192)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let body = chat_body(json!({
        "stream": true, "max_tokens": 4000, "temperature": 2.0, "seed": 3,
        "messages": [{"role": "user", "content": "tell me a story"}],
    }))
    .to_string();
    let head = [("content-type", "application/json")];
    for _ in 0..3 {
        let mut connection = Connection::open(daemon.http).await;
        connection
            .send(&request(
                "POST",
                "/v1/chat/completions",
                &head,
                body.as_bytes(),
            ))
            .await;
        connection.wait_for("\"content\":").await;
        drop(connection);
    }
    // Three times 4000 tokens would take longer than this client waits.
    assert!(!content(&daemon.ask("hello").await).is_empty());
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_without_a_limit_of_its_own_ends_by_those_of_the_configuration() {
    let limited = |limit: &str| {
        let model = demo_model(8192).replace("kv_floor: 128", &format!("{limit}, kv_floor: 128"));
        format!("{}{model}", budget(128))
    };
    let installation = Installation::new(&limited("answer_tokens_max: 7"));
    let daemon = installation.start().await;
    daemon.whole().await;
    let story = |more: serde_json::Value| {
        let mut fields = json!({
            "temperature": 2.0, "seed": 3, "messages": [{"role": "user", "content": "tell me a story"}], "max_tokens": null,
        });
        fields
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        fields
    };
    let ended = |answer: &crate::http::client::Answer| {
        let value: serde_json::Value = serde_json::from_str(answer.text()).unwrap();
        let tokens = value["usage"]["completion_tokens"].as_u64().unwrap();
        (
            value["choices"][0]["finish_reason"]
                .as_str()
                .unwrap()
                .to_owned(),
            tokens,
        )
    };
    let short = daemon.chat(story(json!({}))).await;
    assert_eq!(ended(&short), ("length".to_owned(), 7), "{}", short.text());
    daemon.end().await;
    // The client's own limit is larger and the text is long, so the time limit ends it.
    installation.configure(&limited("answer_time_max: 1s"));
    let daemon = installation.start().await;
    daemon.whole().await;
    let long = daemon
        .chat(story(
            json!({ "max_tokens": 8000, "response_format": long_form() }),
        ))
        .await;
    let (reason, tokens) = ended(&long);
    assert!(
        reason == "length" && tokens < 7900,
        "{reason} after {tokens}: {}",
        long.text()
    );
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_answer_ends_for_one_that_waits() {
    // Answers that run together do not wait for one another.
    let one = "answer_time_shared: 1s, parallel: 1, kv_floor: 128";
    let model = demo_model(8192).replace("kv_floor: 128", one);
    let installation = Installation::new(&format!("{}{model}", budget(128)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let story = chat_body(json!({
        "stream": true, "max_tokens": 8000, "temperature": 2.0, "seed": 3,
        "messages": [{"role": "user", "content": "tell me a story"}], "response_format": long_form(),
    }));
    let mut long = Connection::open(daemon.http).await;
    let head = [("content-type", "application/json")];
    long.send(&request(
        "POST",
        "/v1/chat/completions",
        &head,
        story.to_string().as_bytes(),
    ))
    .await;
    long.wait_for("\"content\":").await;
    assert!(
        !content(&daemon.ask("hello").await).is_empty(),
        "the answer that waited"
    );
    let (events, _) = long.answer().await.events();
    let last = events
        .iter()
        .rev()
        .find(|event| event.contains("finish_reason"))
        .unwrap();
    assert!(last.contains("\"finish_reason\":\"length\""), "{last}");
    let parts = events.len();
    assert!(parts < 7900, "{parts} parts of an answer of 8000 tokens");
    daemon.end().await;
}

/// Two hundred bytes that once took gigabytes: refused by each API, and cancelled when the client disconnects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_that_would_take_all_memory_takes_none() {
    let installation = Installation::new(&format!("{}{}", budget(256), demo_model(1024)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let schema = json!({"type": "integer", "multipleOf": 62_615_533});
    let question = json!([{"role": "user", "content": "hi"}]);
    let form = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"n": schema}, "required": ["n"],
    }}});
    let asked = [
        (
            "/v1/chat/completions",
            json!({"model": "demo", "messages": question, "response_format": form}),
        ),
        (
            "/v1/chat/completions",
            json!({"model": "demo", "messages": question, "tools": [tool], "tool_choice": "required"}),
        ),
        (
            "/api/chat",
            json!({"model": "demo", "messages": question, "format": schema}),
        ),
    ];
    // One request first, for the one-time allocations of an answer and a form.
    assert!(!content(&daemon.ask("hello").await).is_empty());
    assert_eq!(
        crate::http::client::post_json(daemon.http, asked[0].0, &asked[0].1)
            .await
            .status,
        400
    );
    let before = anonymous(daemon.pid());
    for (path, body) in &asked {
        let answer = crate::http::client::post_json(daemon.http, path, body).await;
        assert_eq!(answer.status, 400, "{path}: {}", answer.text());
    }
    // Clients that disconnect during the computation.
    let head = [("content-type", "application/json")];
    for (path, body) in &asked {
        let mut connection = Connection::open(daemon.http).await;
        connection
            .send(&request("POST", path, &head, body.to_string().as_bytes()))
            .await;
        drop(connection);
    }
    // The next request is unaffected, and neither a job of the helper nor memory remains.
    assert!(!content(&daemon.ask("hello").await).is_empty());
    let helpers = children(daemon.pid());
    assert!(
        !helpers.is_empty(),
        "grammars are computed by a process of their own"
    );
    while helpers.iter().any(|&helper| !children(helper).is_empty()) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let grown = anonymous(daemon.pid()).saturating_sub(before);
    assert!(grown < 32 * MIB, "the daemon has grown by {grown} bytes");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_belongs_to_another_is_not_taken_away() {
    let installation = Installation::new(&budget(64));
    let daemon = installation.start().await;

    // Socket of a running daemon.
    let (status, text) = installation.refuses_to_start();
    assert_eq!(status.code(), Some(1), "{text}");
    let named = format!("the supervisor with pid {} runs in `", daemon.pid());
    assert!(text.contains(&named) && text.contains("hint: "), "{text}");

    // Port of a running program.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let other = Installation::new("");
    let address = taken.local_addr().unwrap().to_string();
    other.configure_with_http(&budget(64), &address);
    let (status, text) = other.refuses_to_start();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(
        text.contains(&format!("cannot open `http.listen: {address}`")) && text.contains("hint: "),
        "{text}"
    );
    assert!(
        !other.socket().exists(),
        "a start that failed leaves no socket"
    );
    drop(taken);
    other.start().await.end().await;

    // Folder that cannot be created.
    let third = Installation::new("");
    fs::write(third.path("run"), "a file").unwrap();
    third.configure(&budget(64));
    let (status, text) = third.refuses_to_start();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("run`") && text.contains("hint: "), "{text}");

    // The first daemon is unaffected.
    assert!(installation.tell(&["status"]).contains("normal"));
    daemon.end().await;
}
