//! Anthropic's API with scripted backends.

use std::time::Duration;

use cotenant::{
    conversation::refusal::Refusal,
    http::{
        Limits,
        backend::{AnswerPart, ChatEvent, FinishReason, Usage},
    },
    units::Tokens,
};
use serde_json::{Value, json};

use super::{
    client::{post, post_json, with},
    script::{Step, delta, engine_lost, failed, finished, open, open_with, started},
};

const PATH: &str = "/v1/messages";

fn question(more: &Value) -> Value {
    let messages = json!([{"role": "user", "content": "turn on the light"}]);
    with(
        json!({"model": "tiny", "max_tokens": 64, "messages": messages}),
        more,
    )
}

fn ended(reason: FinishReason) -> Step {
    Step::Event(ChatEvent::Finished {
        reason,
        usage: Usage {
            prompt_tokens: Tokens::new(12),
            completion_tokens: Tokens::new(3),
            ..Usage::default()
        },
    })
}

fn part(part: AnswerPart) -> Step {
    Step::Event(ChatEvent::Part(part))
}

fn call(arguments: &str) -> Step {
    part(AnswerPart::ToolCall {
        name: "light".to_owned(),
        arguments: arguments.to_owned(),
    })
}

#[tokio::test]
async fn an_answer_in_one_piece_has_anthropics_shape() {
    let open = open().await;
    let answer = post(
        open.address,
        PATH,
        &[("anthropic-version", "2023-06-01"), ("x-api-key", "unused")],
        question(&json!({"system": "be brief", "stop_sequences": ["\n"]}))
            .to_string()
            .as_bytes(),
    )
    .await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let mut body = answer.json();
    assert!(body["id"].as_str().unwrap().starts_with("msg_"));
    body["id"] = json!("msg_…");
    assert_eq!(
        body,
        json!({
            "id": "msg_…", "type": "message", "role": "assistant", "model": "tiny",
            "content": [{"type": "text", "text": "It is done.", "citations": null}],
            "stop_reason": "end_turn", "stop_sequence": null,
            "usage": {
                "input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 8, "output_tokens": 3,
            },
        })
    );
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert_eq!(asked.prompt.messages()[0].content, "be brief");
    assert_eq!(
        (asked.max_tokens, asked.stop),
        (Some(Tokens::new(64)), vec!["\n".to_owned()])
    );
}

#[tokio::test]
async fn a_stream_comes_in_order() {
    let open = open().await;
    let answer = post_json(open.address, PATH, &question(&json!({"stream": true}))).await;
    assert_eq!((answer.status, answer.complete), (200, true));
    let mut events = answer.named_events();
    assert_eq!(events[0]["message"]["usage"]["input_tokens"], 4);
    assert_eq!(events[0]["message"]["content"], json!([]));
    assert_eq!(events[0]["message"]["stop_reason"], Value::Null);
    events.remove(0);
    assert_eq!(
        events,
        [
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "", "citations": null}}),
            json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "It is "}}),
            json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "done."}}),
            json!({"type": "content_block_stop", "index": 0}),
            json!({
                "type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": null},
                "usage": {
                    "input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 8,
                    "output_tokens": 3,
                },
            }),
            json!({"type": "message_stop"}),
        ]
    );
}

#[tokio::test]
async fn thoughts_words_and_calls_are_blocks_of_their_own() {
    let open = open().await;
    open.script.answer([
        started(),
        part(AnswerPart::Reasoning("hm".to_owned())),
        delta("I will."),
        call(r#"{"room":"hall"}"#),
        ended(FinishReason::ToolCalls),
    ]);
    let thinking = json!({"thinking": {"type": "enabled", "budget_tokens": 1024}});
    let answer = post_json(open.address, PATH, &question(&thinking)).await;
    assert_eq!(
        answer.header("x-cotenant-ignored"),
        "thinking.budget_tokens"
    );
    let body = answer.json();
    let id = body["content"][2]["id"].clone();
    assert!(id.as_str().unwrap().starts_with("toolu_"));
    assert_eq!(
        body["content"],
        json!([
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I will.", "citations": null},
            {"type": "tool_use", "id": id, "name": "light", "input": {"room": "hall"}},
        ])
    );
    assert_eq!(body["stop_reason"], "tool_use");

    // thoughts are reported on request
    let answer = post_json(open.address, PATH, &question(&json!({"stream": true}))).await;
    let events = answer.named_events();
    let blocks: Vec<(&str, &Value)> = events
        .iter()
        .filter_map(|event| Some((event["type"].as_str()?, event.get("index")?)))
        .collect();
    assert_eq!(
        blocks,
        [
            ("content_block_start", &json!(0)),
            ("content_block_delta", &json!(0)),
            ("content_block_stop", &json!(0)),
            ("content_block_start", &json!(1)),
            ("content_block_delta", &json!(1)),
            ("content_block_stop", &json!(1)),
        ]
    );
    assert_eq!(events[4]["content_block"]["input"], json!({}));
    assert_eq!(
        events[5]["delta"],
        json!({"type": "input_json_delta", "partial_json": "{\"room\":\"hall\"}"})
    );
}

#[tokio::test]
async fn the_end_says_what_ended_it_and_a_call_that_is_cut_is_left_out() {
    let open = open().await;
    open.script
        .answer([started(), delta("one"), ended(FinishReason::StopText(1))]);
    let body = post_json(
        open.address,
        PATH,
        &question(&json!({"stop_sequences": ["a", "b"]})),
    )
    .await
    .json();
    assert_eq!(
        (&body["stop_reason"], &body["stop_sequence"]),
        (&json!("stop_sequence"), &json!("b"))
    );
    open.script.answer([
        started(),
        delta("I"),
        call(r#"{"room":"ha"#),
        ended(FinishReason::Length),
    ]);
    for stream in [false, true] {
        let answer = post_json(open.address, PATH, &question(&json!({"stream": stream}))).await;
        assert!(!answer.text().contains("tool_use"), "{}", answer.text());
        assert!(
            answer.text().contains(r#""stop_reason":"max_tokens""#),
            "{}",
            answer.text()
        );
    }
}

#[tokio::test]
async fn a_refusal_has_anthropics_status_type_and_the_retry_headers() {
    let open = open().await;
    let retry_after = Duration::from_millis(50);
    for (refusal, status, kind) in [
        (
            Refusal::KvReclaimed {
                generated: Tokens::ZERO,
                retry_after,
            },
            529,
            "overloaded_error",
        ),
        (
            Refusal::QuotaExceeded {
                act: "start an answer".to_owned(),
                what: "the queue".to_owned(),
                limit: 8,
                retry_after,
            },
            429,
            "rate_limit_error",
        ),
        (engine_lost(), 500, "api_error"),
    ] {
        open.script.refuse([refusal]);
        let answer = post_json(open.address, PATH, &question(&json!({"stream": true}))).await;
        assert_eq!(answer.status, status, "{}", answer.text());
        assert_eq!(answer.header("retry-after-ms"), "50");
        assert_eq!(answer.header("x-should-retry"), "true");
        let body = answer.json();
        assert_eq!(
            (&body["type"], &body["error"]["type"]),
            (&json!("error"), &json!(kind))
        );
    }
    open.script
        .answer([started(), delta("It "), failed(engine_lost())]);
    let answer = post_json(open.address, PATH, &question(&json!({"stream": true}))).await;
    let events = answer.named_events();
    assert_eq!(events.last().unwrap()["error"]["type"], "api_error");
    assert!(events.iter().all(|event| event["type"] != "message_stop"));
}

#[tokio::test]
async fn a_wrong_request_is_refused_in_anthropics_form() {
    let open = open().await;
    for (body, status, kind, field) in [
        (
            question(&json!({"messages": "hi"})),
            400,
            "invalid_request_error",
            "messages",
        ),
        (
            question(&json!({"max_tokens": null})),
            400,
            "invalid_request_error",
            "max_tokens",
        ),
        (
            question(&json!({"model": "gpt-9"})),
            404,
            "not_found_error",
            "gpt-9",
        ),
        (
            question(
                &json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
            ),
            400,
            "invalid_request_error",
            "messages[0].content[0].type",
        ),
    ] {
        let answer = post_json(open.address, PATH, &body).await;
        assert_eq!(
            (answer.status, &answer.json()["error"]["type"]),
            (status, &json!(kind))
        );
        let message = answer.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned();
        assert!(message.contains(field), "{message}");
        assert_eq!(answer.header("x-should-retry"), "false");
    }
    let answer = post(open.address, PATH, &[], b"{\"model\": ").await;
    assert_eq!(
        (answer.status, &answer.json()["type"]),
        (400, &json!("error"))
    );
    let body = question(&json!({})).to_string();
    let answer = post(
        open.address,
        PATH,
        &[("anthropic-version", "2030-01-01")],
        body.as_bytes(),
    )
    .await;
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("2023-06-01"), "{}", answer.text());
    let limits = Limits {
        json_max: cotenant::units::Bytes::from_kib(1),
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let answer = post_json(
        open.address,
        PATH,
        &question(&json!({"system": "x".repeat(2000)})),
    )
    .await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["type"]),
        (413, &json!("request_too_large"))
    );
    let open = open_with(Limits::default(), false).await;
    for path in [PATH, "/v1/messages/count_tokens"] {
        let answer = post_json(open.address, path, &question(&json!({}))).await;
        assert_eq!(
            (answer.status, &answer.json()["error"]["type"]),
            (404, &json!("not_found_error"))
        );
    }
}

#[tokio::test]
async fn tokens_are_counted_before_they_are_sent() {
    let open = open().await;
    let mut body = question(&json!({"system": "brief"}));
    body.as_object_mut().unwrap().remove("max_tokens");
    let answer = post_json(open.address, "/v1/messages/count_tokens", &body).await;
    assert_eq!(
        answer.json(),
        json!({"input_tokens": "turn on the lightbrief".len()})
    );
    assert!(open.script.chats.lock().unwrap().is_empty());
    open.script.answer([started(), finished()]);
}

#[tokio::test]
async fn a_prompt_beyond_the_context_is_refused_in_anthropics_words() {
    let open = open().await;
    open.script.refuse([Refusal::ContextLengthExceeded {
        model: "tiny".to_owned(),
        prompt: Tokens::new(9000),
        limit: Tokens::new(4096),
    }]);
    let answer = post_json(open.address, PATH, &question(&json!({}))).await;
    let error = &answer.json()["error"];
    assert_eq!(
        (answer.status, &error["type"]),
        (400, &json!("invalid_request_error"))
    );
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .starts_with("prompt is too long: "),
        "{error}"
    );
}
