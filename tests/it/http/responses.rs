//! OpenAI's Responses and completions, and llama.cpp's tokenization, on scripted backends.

use cotenant::http::backend::{
    AnswerForm, AnswerPart, ChatEvent, FinishReason, Prompt, Role, Usage,
};
use serde_json::{Value, json};

use super::{
    client::{Answer, post, post_json, with},
    script::{Step, delta, engine_lost, failed, open, started},
};

const PATH: &str = "/v1/responses";

fn question(more: &Value) -> Value {
    with(json!({"model": "tiny", "input": "turn on the light"}), more)
}

/// Returns events in order, each with its name and consecutive numbers.
fn events(answer: &Answer) -> Vec<Value> {
    let events = answer.named_events();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    events
}

fn types(events: &[Value]) -> Vec<&str> {
    events
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect()
}

fn ended(reason: FinishReason) -> Step {
    Step::Event(ChatEvent::Finished {
        reason,
        usage: Usage::default(),
    })
}

fn call(arguments: &str) -> Step {
    Step::Event(ChatEvent::Part(AnswerPart::ToolCall {
        name: "light".to_owned(),
        arguments: arguments.to_owned(),
    }))
}

#[tokio::test]
async fn a_response_in_one_piece_has_openais_shape() {
    let open = open().await;
    let answer = post_json(
        open.address,
        PATH,
        &question(&json!({"instructions": "be brief", "max_output_tokens": 20, "store": true, "metadata": {"a": "b"}})),
    )
    .await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.header("x-cotenant-ignored"), "store");
    let body = answer.json();
    let id = body["id"].as_str().unwrap();
    assert!(id.starts_with("resp_"));
    for (key, value) in [
        ("object", json!("response")),
        ("status", json!("completed")),
        ("store", json!(false)),
        ("model", json!("tiny")),
        ("metadata", json!({"a": "b"})),
        ("instructions", json!("be brief")),
        ("max_output_tokens", json!(20)),
        ("tool_choice", json!("auto")),
        ("text", json!({"format": {"type": "text"}})),
        ("incomplete_details", Value::Null),
        (
            "usage",
            json!({
                "input_tokens": 12, "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
                "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 15,
            }),
        ),
    ] {
        assert_eq!(body[key], value, "{key}");
    }
    assert_eq!(
        body["output"],
        json!([{
            "id": body["output"][0]["id"], "type": "message", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "It is done.", "annotations": [], "logprobs": []}],
        }])
    );
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    let roles: Vec<Role> = asked
        .prompt
        .messages()
        .iter()
        .map(|message| message.role)
        .collect();
    assert_eq!(roles, [Role::System, Role::User]);
}

#[tokio::test]
async fn a_stream_comes_in_order() {
    let open = open().await;
    let answer = post_json(open.address, PATH, &question(&json!({"stream": true}))).await;
    assert!(answer.complete);
    let events = events(&answer);
    assert_eq!(
        types(&events),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    assert_eq!(events[4]["item_id"], events[2]["item"]["id"]);
    assert_eq!(events[6]["text"], "It is done.");
    assert_eq!(events[9]["response"]["output"][0], events[8]["item"]);
    assert_eq!(events[9]["response"]["usage"]["total_tokens"], 15);
}

#[tokio::test]
async fn calls_are_items_and_what_its_length_cuts_is_incomplete() {
    let open = open().await;
    let thought = Step::Event(ChatEvent::Part(AnswerPart::Reasoning("hm".to_owned())));
    open.script.answer([
        started(),
        thought,
        call(r#"{"a":1}"#),
        ended(FinishReason::ToolCalls),
    ]);
    let body = post_json(open.address, PATH, &question(&json!({})))
        .await
        .json();
    assert_eq!(body["output"][0]["type"], "reasoning");
    assert_eq!(body["output"][0]["content"][0]["text"], "hm");
    let called = &body["output"][1];
    assert_eq!(
        (&called["type"], &called["status"]),
        (&json!("function_call"), &json!("completed"))
    );
    assert_eq!(
        (&called["name"], &called["arguments"]),
        (&json!("light"), &json!("{\"a\":1}"))
    );
    assert!(called["call_id"].as_str().unwrap().starts_with("call_"));

    open.script
        .answer([started(), call(r#"{"a":"#), ended(FinishReason::Length)]);
    let events = events(&post_json(open.address, PATH, &question(&json!({"stream": true}))).await);
    assert_eq!(
        types(&events)[2..],
        [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.incomplete",
        ]
    );
    let response = &events.last().unwrap()["response"];
    assert_eq!(
        response["incomplete_details"],
        json!({"reason": "max_output_tokens"})
    );
    assert_eq!(response["output"][0]["status"], "incomplete");
}

#[tokio::test]
async fn a_form_and_a_tool_reach_the_engine() {
    let open = open().await;
    let format =
        json!({"type": "json_schema", "name": "x", "schema": {"type": "null"}, "strict": true});
    let answer = post_json(
        open.address,
        PATH,
        &question(&json!({"text": {"format": format}})),
    )
    .await;
    assert_eq!(answer.json()["text"]["format"], format);
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert!(
        matches!(asked.form, Some(AnswerForm::JsonSchema { schema, .. }) if schema == json!({"type": "null"}))
    );
    let tool = json!({"type": "function", "name": "f", "parameters": {"type": "object"}});
    post_json(
        open.address,
        PATH,
        &question(&json!({"tools": [tool], "tool_choice": "none"})),
    )
    .await;
    assert!(
        open.script
            .chats
            .lock()
            .unwrap()
            .pop()
            .unwrap()
            .prompt
            .tools()
            .is_empty()
    );
}

#[tokio::test]
async fn a_failure_after_the_first_byte_is_reported_in_both_ways_that_clients_look_for() {
    let open = open().await;
    open.script
        .answer([started(), delta("It "), failed(engine_lost())]);
    let events = events(&post_json(open.address, PATH, &question(&json!({"stream": true}))).await);
    let [.., response, error] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(
        (&response["type"], &response["response"]["status"]),
        (&json!("response.failed"), &json!("failed"))
    );
    assert_eq!(response["response"]["error"]["code"], "server_error");
    assert_eq!(response["response"]["output"][0]["status"], "incomplete");
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("error"), &json!("engine_lost"))
    );
    assert_eq!(error["error"]["code"], "engine_lost");
}

#[tokio::test]
async fn a_wrong_request_names_its_field() {
    let open = open().await;
    for (more, code, param) in [
        (json!({"input": []}), "invalid_value", "input"),
        (
            json!({"max_output_tokens": "x"}),
            "invalid_type",
            "max_output_tokens",
        ),
        (
            json!({"previous_response_id": "resp_1"}),
            "invalid_value",
            "previous_response_id",
        ),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "invalid_value",
            "input[0].content[0].type",
        ),
        (json!({"model": "gpt-9"}), "model_not_found", "model"),
    ] {
        let answer = post_json(open.address, PATH, &question(&more)).await;
        assert_eq!(answer.error_code(), code, "{more}");
        assert_eq!(answer.json()["error"]["param"], param);
    }
    open.script.refuse([
        cotenant::conversation::refusal::Refusal::ContextLengthExceeded {
            model: "tiny".to_owned(),
            prompt: cotenant::units::Tokens::new(9000),
            limit: cotenant::units::Tokens::new(4096),
        },
    ]);
    let answer = post_json(open.address, PATH, &question(&json!({}))).await;
    assert_eq!(
        (answer.status, answer.json()["error"]["param"].clone()),
        (400, json!("input"))
    );
    let answer = post_json(
        open.address,
        "/v1/responses/input_tokens",
        &question(&json!({})),
    )
    .await;
    assert_eq!(
        answer.json(),
        json!({"object": "response.input_tokens", "input_tokens": 17})
    );
}

#[tokio::test]
async fn a_completion_goes_on_with_a_text_without_a_template() {
    let open = open().await;
    let path = "/v1/completions";
    let body = |more: Value| with(json!({"model": "tiny", "prompt": "once "}), &more);
    let asked =
        json!({"max_tokens": 9, "echo": true, "stop": ".", "min_p": 0.1, "ignore_eos": true});
    let answer = post_json(open.address, path, &body(asked)).await;
    assert_eq!(answer.header("x-cotenant-ignored"), "ignore_eos");
    let mut answered = answer.json();
    assert!(
        answered["id"].as_str().unwrap().starts_with("cmpl-"),
        "{answered}"
    );
    (answered["id"], answered["created"]) = (json!(""), json!(0));
    assert!(answered["system_fingerprint"].take().is_string());
    assert_eq!(
        answered,
        json!({
            "id": "", "object": "text_completion", "created": 0, "model": "tiny", "system_fingerprint": null,
            "choices": [{"text": "once It is done.", "index": 0, "logprobs": null, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15,
                "prompt_tokens_details": {"cached_tokens": 8},
            },
        })
    );
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert_eq!(asked.prompt, Prompt::Text("once ".to_owned()));

    let streamed =
        json!({"prompt": [[1, 2]], "stream": true, "stream_options": {"include_usage": true}});
    let (mut payloads, _) = post_json(open.address, path, &body(streamed))
        .await
        .events();
    assert_eq!(payloads.pop().as_deref(), Some("[DONE]"));
    let chunks: Vec<Value> = payloads
        .iter()
        .map(|payload| serde_json::from_str(payload).unwrap())
        .collect();
    let text: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["text"].as_str())
        .collect();
    assert_eq!(text, "It is done.");
    assert_eq!(chunks.last().unwrap()["usage"]["total_tokens"], 15);
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert_eq!(asked.prompt, Prompt::Tokens(vec![1, 2]));

    for (more, param) in [
        (json!({"prompt": vec!["a"; 65]}), "prompt"),
        (json!({"prompt": ["a", ""]}), "prompt[1]"),
        (json!({"prompt": ["a", 7]}), "prompt[1]"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": [-1]}), "prompt"),
        (json!({"prompt": [["a"]]}), "prompt[0]"),
        (json!({"prompt": 7}), "prompt"),
        (json!({"logprobs": 0}), "logprobs"),
        (json!({"suffix": "x"}), "suffix"),
        (json!({"best_of": 2}), "best_of"),
        (json!({"prompt": [1], "echo": true}), "echo"),
        (json!({"max_tokens": -2}), "max_tokens"),
    ] {
        let answer = post_json(open.address, path, &body(more.clone())).await;
        assert_eq!(answer.json()["error"]["param"], param, "{more}");
    }
}

#[tokio::test]
async fn each_prompt_of_a_request_has_its_choice_in_order() {
    let open = open().await;
    let path = "/v1/completions";
    let texts = json!({"model": "tiny", "prompt": ["one", "two", "two"], "echo": true, "seed": 7});
    let answered = post_json(open.address, path, &texts).await.json();
    let said = |index: usize, text: &str| json!({"text": text, "index": index, "logprobs": null, "finish_reason": "stop"});
    assert_eq!(
        answered["choices"],
        json!([
            said(0, "oneIt is done."),
            said(1, "twoIt is done."),
            said(2, "twoIt is done.")
        ])
    );
    assert_eq!(
        answered["usage"],
        json!({
            "prompt_tokens": 36, "completion_tokens": 9, "total_tokens": 45,
            "prompt_tokens_details": {"cached_tokens": 24},
        })
    );
    let asked: Vec<_> = open.script.chats.lock().unwrap().drain(..).collect();
    let seeds: Vec<_> = asked.iter().map(|chat| chat.sampling.asked.seed).collect();
    assert_eq!(
        seeds,
        [Some(7), Some(8), Some(9)],
        "equal prompts may differ"
    );

    let tokens = json!({
        "model": "tiny", "prompt": [[1, 2], [3]], "stream": true, "stream_options": {"include_usage": true}, "max_tokens": -1,
    });
    let (mut payloads, _) = post_json(open.address, path, &tokens).await.events();
    assert_eq!(payloads.pop().as_deref(), Some("[DONE]"));
    let chunks: Vec<Value> = payloads
        .iter()
        .map(|payload| serde_json::from_str(payload).unwrap())
        .collect();
    let mut streamed = [String::new(), String::new()];
    let mut ends = Vec::new();
    for choice in chunks
        .iter()
        .flat_map(|chunk| chunk["choices"].as_array().unwrap())
    {
        let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        streamed[index].push_str(choice["text"].as_str().unwrap());
        if choice["finish_reason"] == "stop" {
            ends.push(index);
        }
    }
    assert_eq!(
        (streamed, ends),
        (["It is done."; 2].map(str::to_owned), vec![0, 1])
    );
    assert_eq!(chunks.last().unwrap()["usage"]["total_tokens"], 30);
    let asked: Vec<_> = open.script.chats.lock().unwrap().drain(..).collect();
    let prompts: Vec<_> = asked.iter().map(|chat| &chat.prompt).collect();
    assert_eq!(
        prompts,
        [&Prompt::Tokens(vec![1, 2]), &Prompt::Tokens(vec![3])]
    );
    assert!(asked.iter().all(|chat| chat.max_tokens.is_none()));

    open.script.refuse([
        cotenant::conversation::refusal::Refusal::ContextLengthExceeded {
            model: "tiny".to_owned(),
            prompt: cotenant::units::Tokens::new(9000),
            limit: cotenant::units::Tokens::new(4096),
        },
    ]);
    let refused = post_json(open.address, path, &texts).await;
    assert_eq!(
        (refused.status, refused.json()["error"]["param"].clone()),
        (400, json!("prompt[0]"))
    );

    // As in OpenAI's API: nothing is generated.
    let none = json!({"model": "tiny", "prompt": "once", "max_tokens": 0});
    assert_eq!(post_json(open.address, path, &none).await.status, 200);
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert_eq!(asked.max_tokens, Some(cotenant::units::Tokens::ZERO));
}

#[tokio::test]
async fn texts_are_tokenized_and_tokens_are_texts_again() {
    let open = open().await;
    let address = open.address;
    let tokenize = |body: Value| async move { post_json(address, "/tokenize", &body).await };
    let tokens = tokenize(json!({"content": "hi"})).await.json();
    assert_eq!(tokens, json!({"tokens": [104, 105]}));
    let pieces = json!({"content": "ü", "add_special": true, "with_pieces": true});
    assert_eq!(
        tokenize(pieces).await.json(),
        json!({"tokens": [{"id": 0, "piece": "\u{0}"}, {"id": 195, "piece": [195]}, {"id": 188, "piece": [188]}]})
    );
    let text = post_json(open.address, "/detokenize", &json!({"tokens": [104, 105]})).await;
    assert_eq!(text.json(), json!({"content": "hi"}));
    for (path, body, param) in [
        ("/tokenize", json!({}), "content"),
        (
            "/tokenize",
            json!({"content": "x".repeat(300 << 10)}),
            "content",
        ),
        ("/detokenize", json!({"tokens": ["a"]}), "tokens[0]"),
        ("/detokenize", json!({"tokens": vec![1; 200_000]}), "tokens"),
    ] {
        let answer = post_json(open.address, path, &body).await;
        assert_eq!(answer.status, 400, "{path}");
        assert_eq!(
            answer.json()["error"]["param"].as_str().unwrap_or_default(),
            param
        );
    }
}

#[tokio::test]
async fn translations_are_refused_by_name() {
    let open = open().await;
    let answer = post(open.address, "/v1/audio/translations", &[], b"").await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (404, "not_supported")
    );
    assert!(
        answer.text().contains("/v1/audio/transcriptions"),
        "{}",
        answer.text()
    );
}
