//! OpenAI's chat completions, with scripted backends.

use std::time::{Duration, Instant};

use cotenant::{
    conversation::refusal::Refusal,
    http::{
        Limits,
        backend::{AnswerPart, ChatEvent, FinishReason, Role, Usage},
    },
    units::{Bytes, Tokens},
};
use serde_json::{Value, json};

use super::{
    client::{Answer, Connection, post, post_json, request},
    script::{Step, delta, engine_lost, failed, finished, open, open_with, started},
};

const PATH: &str = "/v1/chat/completions";

fn question(more: &Value) -> Value {
    let mut body =
        json!({"model": "tiny", "messages": [{"role": "user", "content": "turn on the light"}]});
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

fn short_of_memory() -> Refusal {
    Refusal::InsufficientMemory {
        act: "start a chat completion".to_owned(),
        asked: Bytes::from_mib(64),
        free: Bytes::from_mib(12),
        reclaimable: Bytes::from_mib(20),
        budget: Bytes::from_mib(512),
        retry_after: Duration::from_millis(50),
    }
}

fn kv_reclaimed() -> Refusal {
    Refusal::KvReclaimed {
        generated: Tokens::new(2),
        retry_after: Duration::from_millis(50),
    }
}

fn chunks(answer: &Answer) -> Vec<Value> {
    let (mut payloads, _) = answer.events();
    assert_eq!(payloads.pop().as_deref(), Some("[DONE]"));
    payloads
        .iter()
        .map(|payload| serde_json::from_str(payload).unwrap())
        .collect()
}

#[tokio::test]
async fn an_answer_in_one_piece_has_openais_shape() {
    let open = open().await;
    let answer = post_json(
        open.address,
        PATH,
        &question(&json!({"seed": 7, "temperature": 0, "top_p": 0.9, "max_tokens": 20, "stop": ["\n"], "user": "me"})),
    )
    .await;
    assert_eq!(answer.status, 200);
    assert!(answer.header("x-request-id").starts_with("req-"));
    let mut body = answer.json();
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert!(body["created"].as_u64().unwrap() > 1_700_000_000);
    body["id"] = json!("chatcmpl-…");
    body["created"] = json!(0);
    let fingerprint = body["system_fingerprint"].take();
    assert!(
        fingerprint.as_str().unwrap().starts_with("fp_"),
        "{fingerprint}"
    );
    assert_eq!(
        body,
        json!({
            "id": "chatcmpl-…", "object": "chat.completion", "created": 0, "model": "tiny", "system_fingerprint": null,
            "choices": [{
                "index": 0, "message": {"role": "assistant", "content": "It is done."}, "logprobs": null,
                "finish_reason": "stop",
            }],
            "usage": {
                "prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15,
                "prompt_tokens_details": {"cached_tokens": 8},
            },
        })
    );
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert_eq!(asked.model, "tiny");
    assert_eq!(asked.prompt.messages()[0].role, Role::User);
    assert_eq!(answer.header("x-cotenant-seed"), "7");
    let sampling = asked.sampling.asked;
    assert_eq!(
        (sampling.seed, sampling.temperature, sampling.top_p),
        (Some(7), Some(0.0), Some(0.9))
    );
    assert_eq!(asked.max_tokens, Some(Tokens::new(20)));
    assert_eq!(asked.stop, ["\n"]);
    assert_eq!(asked.meta.patience, None);
}

#[tokio::test]
async fn a_stream_comes_in_order_with_the_usage_last() {
    let open = open().await;
    let answer = post_json(
        open.address,
        PATH,
        &question(&json!({"stream": true, "stream_options": {"include_usage": true}})),
    )
    .await;
    assert_eq!(answer.status, 200);
    assert!(answer.complete);
    assert_eq!(answer.header("cache-control"), "no-cache");
    assert_eq!(answer.header("x-accel-buffering"), "no");
    assert_eq!(answer.header("transfer-encoding"), "chunked");
    assert!(!answer.header("x-request-id").is_empty());
    let chunks = chunks(&answer);
    for chunk in &chunks {
        for (name, value) in [("id", &chunks[0]["id"]), ("created", &chunks[0]["created"])] {
            assert_eq!(&chunk[name], value);
        }
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["model"], "tiny");
    }
    let choices: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"]).collect();
    let choice = |delta: Value, reason: Option<&str>| json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason}]);
    assert_eq!(
        choices,
        [
            &choice(json!({"role": "assistant", "content": ""}), None),
            &choice(json!({"content": "It is "}), None),
            &choice(json!({"content": "done."}), None),
            &choice(json!({}), Some("stop")),
            &json!([]),
        ]
    );
    assert_eq!(chunks[0]["usage"], Value::Null);
    assert_eq!(chunks[4]["usage"]["total_tokens"], 15);
}

#[tokio::test]
async fn without_include_usage_no_chunk_has_one() {
    let open = open().await;
    let answer = post_json(open.address, PATH, &question(&json!({"stream": true}))).await;
    let chunks = chunks(&answer);
    assert_eq!(chunks.len(), 4);
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
}

#[tokio::test]
async fn an_unknown_model_is_404_and_names_those_that_are_there() {
    let open = open().await;
    for model in ["gpt-9", "flite"] {
        let answer = post_json(open.address, PATH, &question(&json!({"model": model}))).await;
        assert_eq!(answer.status, 404);
        assert_eq!(answer.error_code(), "model_not_found");
        assert_eq!(answer.json()["error"]["param"], "model");
        assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
        assert_eq!(answer.header("x-should-retry"), "false");
        assert!(
            answer.text().contains("`tiny`, `org/other`"),
            "{}",
            answer.text()
        );
    }
    let mut body = question(&json!({}));
    body.as_object_mut().unwrap().remove("model");
    assert_eq!(
        post_json(open.address, PATH, &body).await.json()["model"],
        "tiny"
    );
}

#[tokio::test]
async fn a_refusal_before_the_first_byte_is_a_status_with_retry_headers() {
    let open = open().await;
    for stream in [false, true] {
        open.script.refuse([short_of_memory()]);
        let answer = post_json(open.address, PATH, &question(&json!({"stream": stream}))).await;
        assert_eq!(answer.status, 503);
        assert_eq!(answer.error_code(), "memory_pressure");
        assert_eq!(answer.header("retry-after-ms"), "50");
        assert_eq!(answer.header("retry-after"), "1");
        assert_eq!(answer.header("x-should-retry"), "true");
        assert!(!answer.header("x-request-id").is_empty());
        assert_eq!(
            post_json(open.address, PATH, &question(&json!({})))
                .await
                .status,
            200
        );
    }
    open.script.refuse([Refusal::ContextLengthExceeded {
        model: "tiny".to_owned(),
        prompt: Tokens::new(9000),
        limit: Tokens::new(4096),
    }]);
    let answer = post_json(open.address, PATH, &question(&json!({}))).await;
    assert_eq!((answer.status, answer.header("retry-after-ms")), (400, ""));
    assert_eq!(answer.error_code(), "context_length_exceeded");
}

#[tokio::test]
async fn a_failure_after_the_first_byte_is_an_error_object_and_the_end() {
    let open = open().await;
    open.script.answer([
        started(),
        delta("It "),
        failed(engine_lost()),
        delta("never"),
    ]);
    let answer = post_json(open.address, PATH, &question(&json!({"stream": true}))).await;
    assert_eq!((answer.status, answer.complete), (200, true));
    let (payloads, _) = answer.events();
    assert_eq!(payloads.len(), 3);
    let error: Value = serde_json::from_str(&payloads[2]).unwrap();
    assert_eq!(error["error"]["code"], "engine_lost");
    assert_eq!(error["error"]["type"], "server_error");
    assert_eq!(error["error"]["param"], Value::Null);

    let answer = post_json(open.address, PATH, &question(&json!({}))).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (503, "engine_lost")
    );
}

#[tokio::test]
async fn a_backend_that_ends_without_a_word_is_an_engine_that_is_lost() {
    let open = open().await;
    open.script.answer([started(), delta("It ")]);
    let answer = post_json(open.address, PATH, &question(&json!({}))).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (503, "engine_lost")
    );
}

#[tokio::test]
async fn reclaimed_kv_cuts_an_answer_short_and_refuses_one_that_has_not_begun() {
    let open = open().await;
    open.script
        .answer([started(), delta("It is"), failed(kv_reclaimed())]);
    let answer = post_json(open.address, PATH, &question(&json!({}))).await;
    assert_eq!(answer.status, 200);
    let body = answer.json();
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["choices"][0]["message"]["content"], "It is");
    assert_eq!(body["usage"]["total_tokens"], 14);
    let answer = post_json(open.address, PATH, &question(&json!({"stream": true}))).await;
    assert_eq!(
        chunks(&answer).last().unwrap()["choices"][0]["finish_reason"],
        "length"
    );

    open.script.answer([started(), failed(kv_reclaimed())]);
    let answer = post_json(open.address, PATH, &question(&json!({}))).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (503, "kv_reclaimed")
    );
}

#[tokio::test]
async fn a_stalled_stream_is_kept_alive_by_comments() {
    let limits = Limits {
        keepalive: Duration::from_millis(20),
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let stall = || Step::Stall(Duration::from_millis(200));
    open.script.answer([
        started(),
        stall(),
        delta("It is "),
        stall(),
        delta("done."),
        finished(),
    ]);
    let answer = post_json(open.address, PATH, &question(&json!({"stream": true}))).await;
    assert!(answer.events().1 >= 4, "{}", answer.text());
    assert_eq!(chunks(&answer).len(), 4);
}

#[tokio::test]
async fn a_stream_that_waits_long_for_admission_is_opened_and_reported_later() {
    let limits = Limits {
        admission_timeout: Duration::from_millis(30),
        keepalive: Duration::from_millis(20),
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    *open.script.admission.lock().unwrap() = Some(Duration::from_millis(200));
    let answer = post_json(open.address, PATH, &question(&json!({"stream": true}))).await;
    assert!(answer.events().1 >= 2, "{}", answer.text());
    assert_eq!(chunks(&answer).len(), 4);

    open.script.refuse([short_of_memory()]);
    let answer = post_json(open.address, PATH, &question(&json!({"stream": true}))).await;
    assert_eq!(answer.status, 200);
    let (payloads, _) = answer.events();
    assert_eq!(payloads.len(), 1);
    assert!(payloads[0].contains("memory_pressure"));
}

#[tokio::test]
async fn the_clients_own_deadline_and_id_reach_the_backend() {
    let open = open().await;
    let answer = post(
        open.address,
        PATH,
        &[
            ("x-stainless-read-timeout", "10.0"),
            ("x-request-id", "my-id"),
            ("authorization", "Bearer anything"),
        ],
        question(&json!({})).to_string().as_bytes(),
    )
    .await;
    assert_eq!(answer.header("x-request-id"), "my-id");
    let meta = open.script.chats.lock().unwrap().pop().unwrap().meta;
    assert_eq!(meta.patience, Some(Duration::from_secs(10)));
    assert_eq!(meta.id, "my-id");

    for odd in ["-1", "nan", "inf", "1e99", "soon"] {
        let body = question(&json!({})).to_string();
        let answer = post(
            open.address,
            PATH,
            &[("x-stainless-read-timeout", odd)],
            body.as_bytes(),
        )
        .await;
        assert_eq!(answer.status, 200);
        assert_eq!(
            open.script
                .chats
                .lock()
                .unwrap()
                .pop()
                .unwrap()
                .meta
                .patience,
            None
        );
    }
}

#[tokio::test]
async fn fields_that_are_not_honoured_are_named() {
    let open = open().await;
    let answer = post_json(
        open.address,
        PATH,
        &question(
            &json!({"logit_bias": {"7": 1}, "frequency_penalty": 0.5, "presence_penalty": 0}),
        ),
    )
    .await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("x-cotenant-ignored"), "logit_bias");
}

fn thought() -> Step {
    Step::Event(ChatEvent::Part(AnswerPart::Reasoning(
        "It is dark.".to_owned(),
    )))
}

fn call(name: &str) -> Step {
    Step::Event(ChatEvent::Part(AnswerPart::ToolCall {
        name: name.to_owned(),
        arguments: r#"{"room":"hall"}"#.to_owned(),
    }))
}

fn finished_by_calls() -> Step {
    Step::Event(ChatEvent::Finished {
        reason: FinishReason::ToolCalls,
        usage: Usage::default(),
    })
}

#[tokio::test]
async fn thoughts_and_calls_have_places_of_their_own_in_an_answer() {
    let open = open().await;
    open.script.answer([
        started(),
        thought(),
        call("light"),
        call("fan"),
        finished_by_calls(),
    ]);
    let answer = post_json(open.address, PATH, &question(&json!({})))
        .await
        .json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let message = &choice["message"];
    assert_eq!(message["content"], Value::Null);
    assert_eq!(message["reasoning_content"], "It is dark.");
    let calls = message["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    assert_eq!(
        calls[0],
        json!({"id": calls[0]["id"], "type": "function", "function": {"name": "light", "arguments": "{\"room\":\"hall\"}"}})
    );
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    let (payloads, _) = post_json(open.address, PATH, &question(&json!({"stream": true})))
        .await
        .events();
    let deltas: Vec<Value> = payloads[..payloads.len() - 1]
        .iter()
        .map(|payload| serde_json::from_str::<Value>(payload).unwrap()["choices"][0].clone())
        .collect();
    assert_eq!(
        deltas[1]["delta"],
        json!({"reasoning_content": "It is dark."})
    );
    let pieces: Vec<&Value> = deltas
        .iter()
        .map(|choice| &choice["delta"]["tool_calls"][0])
        .collect();
    assert_eq!(
        (&pieces[2]["index"], &pieces[2]["function"]["name"]),
        (&json!(0), &json!("light"))
    );
    assert_eq!(pieces[2]["function"]["arguments"], "");
    assert_eq!(
        *pieces[3],
        json!({"index": 0, "function": {"arguments": "{\"room\":\"hall\"}"}})
    );
    assert_eq!(
        (&pieces[4]["index"], &pieces[4]["function"]["name"]),
        (&json!(1), &json!("fan"))
    );
    assert_eq!(deltas.last().unwrap()["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_its_generation() {
    let open = open().await;
    open.script.answer([started(), delta("It is "), Step::Hang]);
    let mut connection = Connection::open(open.address).await;
    let body = question(&json!({"stream": true})).to_string();
    connection
        .send(&request("POST", PATH, &[], body.as_bytes()))
        .await;
    connection.wait_for("It is ").await;
    drop(connection);
    open.script.all_dropped().await;

    // the same before the first token: without a stream, and while waiting for admission
    for admission in [None, Some(Duration::from_secs(3600))] {
        *open.script.admission.lock().unwrap() = admission;
        let mut connection = Connection::open(open.address).await;
        let body = question(&json!({})).to_string();
        connection
            .send(&request("POST", PATH, &[], body.as_bytes()))
            .await;
        while open.script.chats.lock().unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
        drop(connection);
        open.script.all_dropped().await;
        open.script.chats.lock().unwrap().clear();
    }
}

#[tokio::test]
async fn two_requests_share_a_connection() {
    let open = open().await;
    let mut connection = Connection::open(open.address).await;
    let body = question(&json!({})).to_string();
    for _ in 0..2 {
        connection
            .send(&request("POST", PATH, &[], body.as_bytes()))
            .await;
        assert_eq!(connection.answer().await.status, 200);
    }
}

#[tokio::test]
async fn the_first_text_is_sent_at_once_and_not_with_the_rest() {
    let open = open().await;
    open.script.answer([
        started(),
        delta("It is "),
        Step::Gate,
        delta("done."),
        finished(),
    ]);
    let mut connection = Connection::open(open.address).await;
    let body = question(&json!({"stream": true})).to_string();
    connection
        .send(&request("POST", PATH, &[], body.as_bytes()))
        .await;
    let began = Instant::now();
    connection.wait_for("It is ").await;
    assert!(began.elapsed() < Duration::from_secs(5));
    open.script.gate.notify_one();
    connection.wait_for("[DONE]").await;
}

#[tokio::test]
async fn a_wrong_request_is_400_and_names_its_field() {
    let open = open().await;
    for (body, code, param) in [
        (json!({"messages": []}), "invalid_value", "messages"),
        (json!({"messages": "hi"}), "invalid_type", "messages"),
        (json!([]), "invalid_type", ""),
        (json!({}), "invalid_type", "messages"),
        (question(&json!({"n": 3})), "invalid_value", "n"),
        (
            question(&json!({"temperature": 9})),
            "invalid_value",
            "temperature",
        ),
        (question(&json!({"stop": 1})), "invalid_value", "stop"),
    ] {
        let answer = post_json(open.address, PATH, &body).await;
        assert_eq!(
            (answer.status, answer.error_code().as_str()),
            (400, code),
            "{body}"
        );
        assert_eq!(
            answer.json()["error"]["param"].as_str().unwrap_or(""),
            param,
            "{body}"
        );
    }
    let answer = post(open.address, PATH, &[], b"{\"model\": ").await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (400, "invalid_json")
    );
    assert!(open.script.chats.lock().unwrap().is_empty());
}

#[tokio::test]
async fn without_a_model_chat_is_404() {
    let open = open_with(Limits::default(), false).await;
    let answer = post_json(open.address, PATH, &question(&json!({}))).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (404, "not_configured")
    );
}
