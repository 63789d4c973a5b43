//! Ollama's API with scripted backends.

use std::time::Duration;

use cotenant::{
    conversation::refusal::Refusal,
    http::backend::{AnswerForm, AnswerPart, ChatEvent, FinishReason, Prompt, Usage},
    policy::{
        kv_type::KvType,
        residency::{EnginePlan, KvShape, LayerKind, LayerShape, ModelShape},
        snapshot::{EngineState, EngineView, Snapshot},
    },
    units::{Bytes, Tokens},
};
use serde_json::{Value, json};

use super::{
    client::{get, post_json, with},
    script::{Step, delta, engine_lost, failed, finished, open, open_with, started},
};

const CHAT: &str = "/api/chat";

fn question(more: &Value) -> Value {
    let mut body = json!({"model": "tiny:latest", "messages": [{"role": "user", "content": "turn on the light"}]});
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

fn lines(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[tokio::test]
async fn the_time_of_an_answer_in_one_piece_is_that_of_its_tokens() {
    const PAUSE: Duration = Duration::from_millis(30);
    let open = open().await;
    let steps = [
        started(),
        delta("It "),
        Step::Stall(PAUSE),
        delta("is."),
        finished(),
    ];
    open.script.answer(steps);
    let whole = post_json(open.address, CHAT, &question(&json!({"stream": false})))
        .await
        .json();
    let of = |key: &str| Duration::from_nanos(whole[key].as_u64().unwrap());
    assert!(of("eval_duration") >= PAUSE, "{whole}");
    assert_eq!(
        of("prompt_eval_duration") + of("eval_duration"),
        of("total_duration")
    );
}

#[tokio::test]
async fn an_answer_comes_in_lines_and_in_one_piece() {
    let open = open().await;
    let answer = post_json(open.address, CHAT, &question(&json!({}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.header("content-type"), "application/x-ndjson");
    let said = lines(answer.text());
    let text: String = said
        .iter()
        .map(|line| line["message"]["content"].as_str().unwrap())
        .collect();
    assert_eq!(text, "It is done.");
    let (last, before) = said.split_last().unwrap();
    assert!(before.iter().all(|line| line["done"] == false));
    assert_eq!(
        (&last["done"], &last["done_reason"]),
        (&json!(true), &json!("stop"))
    );
    assert_eq!(
        (&last["prompt_eval_count"], &last["eval_count"]),
        (&json!(12), &json!(3))
    );
    assert!(last["total_duration"].as_u64().unwrap() > 0);

    let whole = post_json(open.address, CHAT, &question(&json!({"stream": false})))
        .await
        .json();
    assert_eq!(
        whole["message"],
        json!({"role": "assistant", "content": "It is done."})
    );
    assert_eq!(
        (&whole["done"], &whole["model"]),
        (&json!(true), &json!("tiny"))
    );

    let body = json!({"model": "tiny", "prompt": "turn on the light", "system": "be brief", "stream": false});
    let generated = post_json(open.address, "/api/generate", &body).await.json();
    assert_eq!(generated["response"], "It is done.");
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert_eq!(asked.prompt.messages().len(), 2);
}

#[tokio::test]
async fn wishes_are_wishes_and_nothing_asked_is_answered_at_once() {
    let open = open().await;
    let wishes = json!({"keep_alive": 0, "options": {"num_ctx": 8192, "mirostat": 1}, "format": {"type": "object"}, "stream": false});
    let answer = post_json(open.address, CHAT, &question(&wishes)).await;
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.header("x-cotenant-ignored"),
        "keep_alive, options.mirostat"
    );
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert_eq!(asked.context_wanted, Some(Tokens::new(8192)));
    assert!(matches!(
        asked.form,
        Some(AnswerForm::JsonSchema {
            field: "format",
            ..
        })
    ));

    let load = post_json(
        open.address,
        CHAT,
        &json!({"model": "tiny", "keep_alive": -1}),
    )
    .await
    .json();
    assert_eq!(
        (&load["done"], &load["done_reason"]),
        (&json!(true), &json!("load"))
    );
    let unload = json!({"model": "tiny", "keep_alive": 0});
    for path in [CHAT, "/api/generate"] {
        let unload = post_json(open.address, path, &unload).await.json();
        assert_eq!(
            (&unload["done"], &unload["done_reason"]),
            (&json!(true), &json!("unload")),
            "{path}"
        );
    }
    assert!(
        open.script.chats.lock().unwrap().is_empty(),
        "the model was asked something"
    );
}

#[tokio::test]
async fn a_raw_prompt_goes_to_the_model_as_it_is() {
    let open = open().await;
    let raw = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    let body = json!({"model": "tiny", "prompt": raw, "raw": true, "stream": false});
    let answer = post_json(open.address, "/api/generate", &body).await;
    assert_eq!(
        (answer.status, &answer.json()["response"]),
        (200, &json!("It is done."))
    );
    assert_eq!(
        open.script.chats.lock().unwrap().pop().unwrap().prompt,
        Prompt::Raw(raw.to_owned())
    );
    let beside = with(body, &json!({"system": "be brief"}));
    let answer = post_json(open.address, "/api/generate", &beside).await;
    assert_eq!(answer.status, 400);
    assert!(
        answer.json()["error"]
            .as_str()
            .unwrap()
            .starts_with("system:"),
        "{}",
        answer.text()
    );
}

#[tokio::test]
async fn the_context_of_an_answer_begins_the_next_one() {
    let open = open().await;
    let told = Step::Event(ChatEvent::Context(vec![1, 2, 3]));
    open.script
        .answer([started(), delta("It is done."), told, finished()]);
    let body = |streamed: bool| json!({"model": "tiny", "prompt": "hi", "stream": streamed});
    let whole = post_json(open.address, "/api/generate", &body(false))
        .await
        .json();
    assert_eq!(whole["context"], json!([1, 2, 3]));
    assert!(
        open.script
            .chats
            .lock()
            .unwrap()
            .pop()
            .unwrap()
            .context_reported
    );
    let said = lines(
        post_json(open.address, "/api/generate", &body(true))
            .await
            .text(),
    );
    assert_eq!(said.last().unwrap()["context"], json!([1, 2, 3]));
    let next = with(body(false), &json!({"context": [1, 2.0, 3]}));
    assert_eq!(
        post_json(open.address, "/api/generate", &next).await.status,
        200
    );
    match open.script.chats.lock().unwrap().pop().unwrap().prompt {
        Prompt::Chat(conversation) => assert_eq!(conversation.before, [1, 2, 3]),
        other => panic!("{other:?}"),
    }
    let chat = post_json(open.address, CHAT, &question(&json!({"stream": false})))
        .await
        .json();
    assert!(
        !open
            .script
            .chats
            .lock()
            .unwrap()
            .pop()
            .unwrap()
            .context_reported,
        "chat has messages: {chat}"
    );
}

#[tokio::test]
async fn a_history_beyond_the_context_loses_its_oldest_messages() {
    let said = |role: &str, text: &str| json!({"role": role, "content": text.repeat(100)});
    let history = json!({"messages": [
        said("system", "s"), said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d"), said("user", "e"),
    ], "stream": false});
    let too_long = || Refusal::ContextLengthExceeded {
        model: "tiny".to_owned(),
        prompt: Tokens::new(600),
        limit: Tokens::new(500),
    };
    let open = open().await;
    open.script.refuse([too_long()]);
    let answer = post_json(open.address, CHAT, &question(&history)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    let firsts: String = asked
        .prompt
        .messages()
        .iter()
        .map(|message| &message.content[..1])
        .collect();
    assert_eq!(
        firsts, "scde",
        "400 of 600 characters, the system's among them"
    );
    open.script.refuse([too_long()]);
    let kept = with(question(&history), &json!({"truncate": false}));
    assert_eq!(post_json(open.address, CHAT, &kept).await.status, 400);
    // A question that alone is too long loses its beginning.
    open.script.refuse([too_long()]);
    assert_eq!(
        post_json(open.address, CHAT, &question(&json!({"stream": false})))
            .await
            .status,
        200
    );
}

#[tokio::test]
async fn thoughts_and_calls_are_in_the_message() {
    let open = open().await;
    open.script.answer([
        started(),
        Step::Event(ChatEvent::Part(AnswerPart::Reasoning(
            "It is dark.".to_owned(),
        ))),
        Step::Event(ChatEvent::Part(AnswerPart::ToolCall {
            name: "light".to_owned(),
            arguments: r#"{"room":"hall"}"#.to_owned(),
        })),
        Step::Event(ChatEvent::Finished {
            reason: FinishReason::ToolCalls,
            usage: Usage::default(),
        }),
    ]);
    let said = lines(
        post_json(open.address, CHAT, &question(&json!({})))
            .await
            .text(),
    );
    assert_eq!(said[0]["message"]["thinking"], "It is dark.");
    assert_eq!(
        said[1]["message"]["tool_calls"],
        json!([{"function": {"name": "light", "arguments": {"room": "hall"}}}])
    );
    assert_eq!(said[2]["done_reason"], "stop");
}

#[tokio::test]
async fn silence_is_broken_by_empty_pieces_and_failure_is_the_last_line() {
    let limits = cotenant::http::Limits {
        keepalive: Duration::from_millis(20),
        ..cotenant::http::Limits::default()
    };
    let open = open_with(limits, true).await;
    let stall = Step::Stall(Duration::from_millis(300));
    open.script
        .answer([started(), delta("It is "), stall, failed(engine_lost())]);
    let answer = post_json(open.address, CHAT, &question(&json!({}))).await;
    let said = lines(answer.text());
    assert!(
        said.iter()
            .any(|line| line["message"]["content"] == "" && line["done"] == false),
        "{}",
        answer.text()
    );
    let error = said.last().unwrap()["error"].as_str().unwrap();
    assert!(error.contains("engine is lost"), "{error}");
}

#[tokio::test]
async fn every_refusal_is_its_status_with_a_text_and_retry_headers() {
    let retry_after = Duration::from_millis(50);
    let act = || "answer".to_owned();
    for (refusal, status, retried) in [
        (
            Refusal::InsufficientMemory {
                act: act(),
                asked: Bytes::from_mib(64),
                free: Bytes::from_mib(12),
                reclaimable: Bytes::from_mib(20),
                budget: Bytes::from_mib(512),
                retry_after,
            },
            503,
            true,
        ),
        (
            Refusal::ContextLengthExceeded {
                model: "tiny".to_owned(),
                prompt: Tokens::new(9000),
                limit: Tokens::new(4096),
            },
            400,
            false,
        ),
        (
            Refusal::KvCapacityShed {
                model: "tiny".to_owned(),
                prompt: Tokens::new(2000),
                capacity: Tokens::new(1024),
                limit: Tokens::new(4096),
                retry_after,
            },
            503,
            true,
        ),
        (
            Refusal::QuotaExceeded {
                act: act(),
                what: "the queue".to_owned(),
                limit: 16,
                retry_after,
            },
            429,
            true,
        ),
        (
            Refusal::Draining {
                act: act(),
                retry_after,
            },
            503,
            true,
        ),
        (engine_lost(), 503, true),
        (
            Refusal::Invalid {
                field: "format".to_owned(),
                value: "{}".to_owned(),
                problem: "cannot be kept".to_owned(),
            },
            400,
            false,
        ),
    ] {
        for stream in [true, false] {
            let body = question(&json!({"stream": stream, "truncate": false}));
            let open = open().await;
            open.script.refuse([refusal.clone()]);
            let answer = post_json(open.address, CHAT, &body).await;
            assert_eq!(answer.status, status, "{refusal}");
            assert!(
                answer.json()["error"]
                    .as_str()
                    .unwrap()
                    .contains(&refusal.to_string()),
                "{}",
                answer.text()
            );
            assert_eq!(answer.header("x-should-retry"), retried.to_string());
            assert_eq!(
                answer.headers.get("retry-after-ms").map(String::as_str),
                retried.then_some("50")
            );
        }
    }
}

#[tokio::test]
async fn what_was_said_stands_when_the_kv_cache_is_taken() {
    let open = open().await;
    open.script.answer([
        started(),
        delta("It is "),
        failed(Refusal::KvReclaimed {
            generated: Tokens::new(2),
            retry_after: Duration::from_millis(50),
        }),
    ]);
    let said = lines(
        post_json(open.address, CHAT, &question(&json!({})))
            .await
            .text(),
    );
    assert_eq!(said.last().unwrap()["done_reason"], "length");
}

#[tokio::test]
async fn errors_are_texts_wherever_they_come_from() {
    let open = open().await;
    for (answer, status) in [
        (
            post_json(
                open.address,
                CHAT,
                &json!({"model": "no-such-model", "messages": []}),
            )
            .await,
            404,
        ),
        (
            post_json(
                open.address,
                CHAT,
                &question(&json!({"options": {"temperature": 9}})),
            )
            .await,
            400,
        ),
        (post_json(open.address, CHAT, &json!([])).await, 400),
        (
            post_json(open.address, "/api/pull", &json!({"model": "tiny"})).await,
            404,
        ),
        (get(open.address, CHAT).await, 405),
    ] {
        assert_eq!(answer.status, status, "{}", answer.text());
        assert!(answer.json()["error"].is_string(), "{}", answer.text());
    }
    let without = open_with(cotenant::http::Limits::default(), false).await;
    let answer = post_json(without.address, CHAT, &question(&json!({}))).await;
    assert_eq!(answer.status, 404);
    assert!(answer.json()["error"].is_string());
}

#[tokio::test]
async fn what_there_is_and_what_it_holds_is_reported_from_memory() {
    let open = open().await;
    let tags = get(open.address, "/api/tags").await.json();
    let tiny = &tags["models"][0];
    assert_eq!(
        (&tiny["name"], &tiny["size"]),
        (&json!("tiny"), &json!(5 << 20))
    );
    assert_eq!(
        (
            &tiny["details"]["parameter_size"],
            &tiny["details"]["quantization_level"]
        ),
        (&json!("4.6M"), &json!("Q8_0"))
    );
    assert_eq!(tiny["digest"].as_str().unwrap().len(), 64);
    assert_eq!(tiny["modified_at"], "2023-11-14T22:13:20Z");
    let version = get(open.address, "/api/version").await.json();
    let parts: Vec<u32> = version["version"]
        .as_str()
        .unwrap()
        .split('.')
        .map(|part| part.parse().unwrap())
        .collect();
    assert!(parts >= vec![0, 6, 4], "what clients ask for: {version}");
    // Nothing is loaded yet.
    assert_eq!(
        get(open.address, "/api/ps").await.json(),
        json!({"models": []})
    );

    let shape = ModelShape {
        name: "tiny".to_owned(),
        architecture: "qwen3".to_owned(),
        layers: vec![LayerShape::new(LayerKind::Attention, 0, Bytes::from_mib(2)); 2],
        kv: KvShape {
            attention_layers: 2,
            kv_heads: 1,
            head_dim: 128,
            element_bytes: 2,
            granule: Bytes::ZERO,
            block_tokens: Tokens::new(16),
            windowed: None,
        },
        context_max: Tokens::new(4096),
        fixed_bytes: Bytes::from_mib(1),
        state_bytes: Bytes::ZERO,
        workspace_fixed_bytes: Bytes::ZERO,
        workspace_bytes_per_token: Bytes::ZERO,
        ring_bytes: Bytes::from_mib(1),
    };
    let plan = |layers: u32, tokens: u32| EnginePlan {
        resident: (0..layers).collect(),
        kv_capacity: Tokens::new(tokens),
        prefill_chunk: Tokens::new(64),
        kv_type: KvType::F16,
    };
    let (now, full) = (plan(1, 1024), plan(2, 4096));
    let (held, most) = (shape.plan_bytes(&now), shape.plan_bytes(&full));
    *open.script.snapshot.lock().unwrap() = Snapshot {
        engine: EngineView {
            state: EngineState::Ready,
            shape: Some(shape),
            in_force: Some(now),
            full: Some(full),
            context: Some(Tokens::new(2048)),
            ..EngineView::default()
        },
        ..Snapshot::default()
    };
    let ps = get(open.address, "/api/ps").await.json();
    let running = &ps["models"][0];
    assert_eq!(running["context_length"], 1024);
    assert_eq!(
        (&running["size_vram"], &running["size"]),
        (&json!(held.get()), &json!(most.get()))
    );
    let show = post_json(open.address, "/api/show", &json!({"model": "tiny"}))
        .await
        .json();
    assert_eq!(show["model_info"]["qwen3.context_length"], 4096);
    assert_eq!(show["parameters"], "num_ctx 2048");
    assert_eq!(
        show["capabilities"],
        json!(["completion", "tools", "thinking"])
    );
    assert_eq!(show["model_info"]["general.parameter_count"], 4_650_000);
    assert!(
        show["template"].as_str().unwrap().contains("<think>"),
        "{show}"
    );
    assert_eq!(
        post_json(open.address, "/api/show", &json!({"model": "x"}))
            .await
            .status,
        404
    );
}
