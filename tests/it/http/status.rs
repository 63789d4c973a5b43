//! Models, health, metrics and the status page.

use std::sync::atomic::Ordering;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use cotenant::policy::{
    engine_failure::{EngineFailure, NextTry},
    snapshot::{EngineState, WorkerState, WorkerView},
};
use ring::digest::{SHA256, digest};
use serde_json::json;

use super::{
    client::{Connection, get, post, post_json, request},
    script::{Step, open},
};

#[tokio::test]
async fn models_are_listed_and_found_by_id() {
    let open = open().await;
    let list = get(open.address, "/v1/models").await.json();
    assert_eq!(get(open.address, "/v1/models/").await.json(), list);
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"].as_array().unwrap().len(), 6);
    let mut tiny = json!({
        "id": "tiny", "object": "model", "created": 1_700_000_000, "owned_by": "cotenant", "task": "chat",
        "root": "tiny", "type": "model", "display_name": "tiny", "created_at": "2023-11-14T22:13:20Z",
    });
    assert_eq!(list["data"][0], tiny);
    assert_eq!(get(open.address, "/v1/models/tiny").await.json(), tiny);
    (tiny["id"], tiny["display_name"]) = (json!("gpt-small"), json!("gpt-small"));
    assert_eq!(list["data"][1], tiny);
    assert_eq!(get(open.address, "/v1/models/gpt-small").await.json(), tiny);
    assert_eq!(
        get(open.address, "/v1/models/org/other").await.json()["id"],
        "org/other"
    );
    assert_eq!(
        get(open.address, "/v1/models/org%2Fother").await.json()["id"],
        "org/other"
    );
    let answer = get(open.address, "/v1/models/gpt-9").await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (404, "model_not_found")
    );
    assert_eq!(answer.json()["error"]["param"], "model");
}

#[tokio::test]
async fn an_alias_is_answered_by_its_model_in_every_api() {
    let open = open().await;
    let said = json!([{"role": "user", "content": "hi"}]);
    for (path, model) in [
        ("/v1/chat/completions", "gpt-small"),
        ("/v1/messages", "gpt-small"),
        ("/api/chat", "gpt-small:latest"),
    ] {
        let body = json!({"model": model, "messages": said, "max_tokens": 9, "stream": false});
        let answer = post_json(open.address, path, &body).await;
        assert_eq!(
            (answer.status, &answer.json()["model"]),
            (200, &json!("tiny")),
            "{path}"
        );
    }
    let tags = get(open.address, "/api/tags").await.json();
    assert_eq!(tags["models"][1]["name"], "gpt-small");
}

#[tokio::test]
async fn a_page_of_a_foreign_site_reaches_nothing() {
    let open = open().await;
    let ask = |path: &'static str, head: &'static str| async move {
        let mut connection = Connection::open(open.address).await;
        let request = format!("GET {path} HTTP/1.1\r\n{head}\r\n");
        connection.send(request.as_bytes()).await;
        connection.answer().await
    };
    for (path, code) in [
        ("/v1/models", "host_not_allowed"),
        ("/status.json", "host_not_allowed"),
    ] {
        let answer = ask(path, "host: evil.example:8410\r\n").await;
        assert_eq!((answer.status, answer.error_code().as_str()), (421, code));
        assert!(
            answer.text().contains("http.allowed_hosts"),
            "{}",
            answer.text()
        );
    }
    let answer = ask("/api/tags", "host: evil.example\r\n").await;
    assert!(answer.json()["error"].is_string(), "{}", answer.text());
    let answer = ask(
        "/v1/models",
        "host: localhost\r\norigin: https://evil.example\r\n",
    )
    .await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (403, "origin_not_allowed")
    );
    let answer = ask("/v1/models", "host: localhost\r\nhost: evil.example\r\n").await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (400, "invalid_host")
    );
    let answer = ask("/v1/models", "accept: */*\r\n").await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (400, "invalid_host")
    );
    let answer = ask(
        "/v1/models",
        "host: localhost\r\norigin: http://localhost:3000\r\n",
    )
    .await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn an_unknown_place_and_a_wrong_method_answer_in_shape() {
    let open = open().await;
    let answer = get(open.address, "/v1/nothing").await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (404, "unknown_url")
    );
    assert!(!answer.header("x-request-id").is_empty());
    for (path, instead) in [
        ("/v1/nothing", "/v1/chat/completions"),
        ("/v1/rerank", "reranking is not supported"),
        ("/api/pull", "`llm.path`"),
        ("/api/nothing", "chat, generate, embed, tags"),
    ] {
        let answer = post(open.address, path, &[], b"{}").await;
        assert_eq!(answer.status, 404);
        assert!(answer.text().contains(instead), "{path}: {}", answer.text());
    }
    let answer = get(open.address, "/v1/chat/completions").await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (405, "method_not_supported")
    );
    let answer = post(open.address, "/health", &[], b"").await;
    assert_eq!(answer.status, 405);
}

#[tokio::test]
async fn health_says_whether_a_request_would_be_taken() {
    let open = open().await;
    let answer = get(open.address, "/health").await;
    assert_eq!(
        (answer.status, answer.json()),
        (200, json!({"status": "ok", "pressure": "normal"}))
    );
    for (state, status, says) in [
        (EngineState::Loading, 503, "loading model"),
        (EngineState::Ready, 200, "ok"),
        (EngineState::Failed, 503, "engine failed: unknown"),
    ] {
        open.script.snapshot.lock().unwrap().engine.state = state;
        let answer = get(open.address, "/health").await;
        let state = json!({"state": state});
        assert_eq!(
            (
                answer.status,
                answer.json()["status"].as_str().unwrap(),
                &answer.json()["llm"]
            ),
            (status, says, &state)
        );
    }
    let next = NextTry::Never {
        remedy: "fetch the file again".to_owned(),
    };
    let failure = EngineFailure {
        reason: "it ends at byte 7".to_owned(),
        next,
    };
    open.script.snapshot.lock().unwrap().engine.failure = Some(failure);
    let answer = get(open.address, "/health").await;
    let llm = json!({"state": "failed", "reason": "it ends at byte 7", "permanent": true, "remedy": "fetch the file again"});
    assert_eq!((answer.status, &answer.json()["llm"]), (503, &llm));
    assert_eq!(
        answer.json()["status"],
        "engine failed: it ends at byte 7 (hint: fetch the file again)"
    );
    for live in ["/health?live", "/health?live=1", "/health?x=1&live"] {
        let answer = get(open.address, live).await;
        assert_eq!(
            (answer.status, answer.json()),
            (200, json!({"status": "alive"})),
            "{live}"
        );
    }
    open.script.snapshot.lock().unwrap().draining = true;
    assert_eq!(
        get(open.address, "/health").await.json()["status"],
        "draining"
    );
}

#[tokio::test]
async fn health_has_the_speed_as_a_part_of_the_full_one() {
    let open = open().await;
    let mut answers = Vec::new();
    for (state, now) in [
        (EngineState::Ready, 3000),
        (EngineState::Ready, 8000),
        (EngineState::Loading, 3000),
    ] {
        {
            let engine = &mut open.script.snapshot.lock().unwrap().engine;
            engine.state = state;
            (engine.milli_tokens_per_s, engine.full_milli_tokens_per_s) = (Some(now), Some(8000));
        }
        let answer = get(open.address, "/health").await;
        answers.push((answer.status, answer.json()["llm"].clone()));
    }
    let expected = [
        (200, json!({"state": "ready", "speed_ratio": 0.375})),
        (200, json!({"state": "ready", "speed_ratio": 1.0})),
        (503, json!({"state": "loading"})),
    ];
    assert_eq!(answers, expected);
}

#[tokio::test]
async fn a_router_that_sees_only_the_status_code_asks_for_a_speed() {
    let open = open().await;
    {
        let engine = &mut open.script.snapshot.lock().unwrap().engine;
        engine.state = EngineState::Ready;
        (engine.milli_tokens_per_s, engine.full_milli_tokens_per_s) = (Some(3000), Some(8000));
    }
    let slow = "slow: 0.375 of the full speed, 0.5 required";
    for (query, status, says) in [
        ("speed=0.5", 503, slow),
        ("x=1&speed=0.5", 503, slow),
        ("speed=0.375", 200, "ok"),
        ("speed=0", 200, "ok"),
        ("speed=0.5&live", 200, "alive"),
    ] {
        let answer = get(open.address, &format!("/health?{query}")).await;
        let seen = answer.json()["status"].clone();
        assert_eq!((answer.status, &seen), (status, &json!(says)), "{query}");
    }
    for value in ["", "half", "-0.1", "1.01", "50%25", "NaN"] {
        let answer = get(open.address, &format!("/health?speed={value}")).await;
        let error = answer.json()["error"].clone();
        assert_eq!((answer.status, &error["param"]), (400, &json!("speed")));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("from 0 to 1"), "{message}");
    }
    // A speed that is not known yet is no reason to stay away.
    open.script
        .snapshot
        .lock()
        .unwrap()
        .engine
        .milli_tokens_per_s = None;
    let answer = get(open.address, "/health?speed=1").await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[tokio::test]
async fn running_names_the_engine_and_the_workers() {
    let open = open().await;
    {
        let mut snapshot = open.script.snapshot.lock().unwrap();
        snapshot.engine.state = EngineState::Ready;
        for (name, state) in [
            ("asr", WorkerState::Ready),
            ("tts", WorkerState::BackingOff),
            ("x", WorkerState::Stopped),
        ] {
            snapshot.workers.push(WorkerView {
                name: name.to_owned(),
                state,
                pid: Some(7),
                ..WorkerView::default()
            });
        }
    }
    let body = get(open.address, "/running").await.json();
    let states: Vec<(&str, &str)> = body["running"]
        .as_array()
        .unwrap()
        .iter()
        .map(|running| {
            (
                running["model"].as_str().unwrap(),
                running["state"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        states,
        [
            ("tiny", "ready"),
            ("org/other", "ready"),
            ("asr", "ready"),
            ("tts", "starting")
        ]
    );
}

#[tokio::test]
async fn requests_are_measured_by_route_and_code() {
    let open = open().await;
    // Prometheus's text unless the client accepts OpenMetrics
    let answer = get(open.address, "/metrics").await;
    assert!(
        answer
            .header("content-type")
            .starts_with("text/plain; version=0.0.4")
    );
    assert!(!answer.text().contains("# EOF"));
    assert_eq!(open.script.next_ended().await, ("/metrics".to_owned(), 200));
    let accept = [(
        "accept",
        "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;q=0.3",
    )];
    let mut connection = Connection::open(open.address).await;
    connection
        .send(&request("GET", "/metrics", &accept, b""))
        .await;
    let answer = connection.answer().await;
    assert!(
        answer
            .header("content-type")
            .starts_with("application/openmetrics-text")
    );
    assert!(answer.text().ends_with("# EOF\n"));
    assert_eq!(open.script.next_ended().await, ("/metrics".to_owned(), 200));
    get(open.address, "/v1/models/tiny").await;
    assert_eq!(
        open.script.next_ended().await,
        ("/v1/models/{*id}".to_owned(), 200)
    );
    get(open.address, "/nowhere").await;
    assert_eq!(
        open.script.next_ended().await,
        ("unmatched".to_owned(), 404)
    );

    let question = json!({"messages": [{"role": "user", "content": "hi"}]});
    post_json(open.address, "/v1/chat/completions", &question).await;
    assert_eq!(
        open.script.next_ended().await,
        ("/v1/chat/completions".to_owned(), 200)
    );
    assert_eq!(open.script.first_tokens.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_request_whose_client_went_away_is_measured_as_499() {
    let open = open().await;
    open.script.answer([Step::Hang]);
    let mut connection = Connection::open(open.address).await;
    let question = json!({"messages": [{"role": "user", "content": "hi"}]}).to_string();
    connection
        .send(&request(
            "POST",
            "/v1/chat/completions",
            &[],
            question.as_bytes(),
        ))
        .await;
    while open.script.chats.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    drop(connection);
    assert_eq!(
        open.script.next_ended().await,
        ("/v1/chat/completions".to_owned(), 499)
    );
}

#[tokio::test]
async fn the_page_needs_nothing_from_elsewhere() {
    let open = open().await;
    let answer = get(open.address, "/").await;
    assert_eq!(answer.status, 200);
    assert!(answer.header("content-type").starts_with("text/html"));
    assert!(
        answer
            .header("content-security-policy")
            .contains("default-src 'none'")
    );
    let page = answer.text();
    for foreign in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!page.contains(foreign), "the page has {foreign}");
    }
    let status = get(open.address, "/status.json").await;
    assert_eq!(status.header("cache-control"), "no-store");
    assert_eq!(status.json()["version"], "scripted");
}

#[tokio::test]
async fn a_part_of_the_history_is_requested_by_its_first_second() {
    let open = open().await;
    let asked = |path: &'static str| get(open.address, path);
    let all = asked("/history.json").await;
    assert_eq!(all.header("cache-control"), "no-store");
    assert_eq!(all.json(), json!({"day": false, "after": null}));
    let day = asked("/history.json?day&after=1796055637").await;
    assert_eq!(day.json(), json!({"day": true, "after": 1_796_055_637_u64}));
    let refused = asked("/history.json?after=yesterday").await;
    assert_eq!(refused.status, 400);
    assert!(refused.text().contains("seconds since 1970"), "{refused:?}");
}

#[tokio::test]
async fn the_page_runs_its_own_script_and_style_only() {
    let open = open().await;
    let answer = get(open.address, "/").await;
    let (policy, page) = (answer.header("content-security-policy"), answer.text());
    assert!(!policy.contains("unsafe"), "{policy}");
    for tag in ["script", "style"] {
        let (_, rest) = page.split_once(&format!("<{tag}>")).unwrap();
        let (text, rest) = rest.split_once(&format!("</{tag}>")).unwrap();
        assert!(!rest.contains(&format!("<{tag}")), "one {tag}");
        let hash = BASE64.encode(digest(&SHA256, text.as_bytes()));
        assert!(
            policy.contains(&format!("{tag}-src 'sha256-{hash}'")),
            "{tag} is {hash}: {policy}"
        );
    }
    assert!(!page.contains(" style=") && !page.contains(" onclick="));
}
