//! Fields shared by several APIs, with the same semantics.

use std::time::Duration;

use cotenant::{conversation::refusal::Refusal, http::Limits, policy::pressure::PressureLevel};
use serde_json::{Value, json};

use super::{
    client::{Answer, post_json, with},
    script::{Open, open, open_with},
};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";
const OLLAMA_CHAT: &str = "/api/chat";
const OLLAMA_GENERATE: &str = "/api/generate";

/// Sends the smallest request of an API, with additional fields.
async fn ask(open: &Open, path: &str, more: &Value) -> Answer {
    let messages = json!([{"role": "user", "content": "turn on the light"}]);
    let body = match path {
        CHAT => json!({"model": "tiny", "messages": messages}),
        COMPLETIONS => json!({"model": "tiny", "prompt": "turn on"}),
        MESSAGES => json!({"model": "tiny", "messages": messages, "max_tokens": 9}),
        RESPONSES => json!({"model": "tiny", "input": "turn on the light"}),
        OLLAMA_CHAT => json!({"model": "tiny", "messages": messages, "stream": false}),
        OLLAMA_GENERATE => json!({"model": "tiny", "prompt": "turn on the light", "stream": false}),
        "/detokenize" => json!({"tokens": []}),
        other => panic!("{other}"),
    };
    post_json(open.address, path, &with(body, more)).await
}

#[tokio::test]
async fn what_would_change_the_answer_is_refused_alike_and_what_else_is_unknown_is_named() {
    let open = open().await;
    for path in [CHAT, COMPLETIONS, OLLAMA_CHAT, OLLAMA_GENERATE] {
        for (field, value) in [
            ("logprobs", json!(true)),
            ("logprobs", json!(2)),
            ("top_logprobs", json!(2)),
            ("n_probs", json!(1)),
            ("suffix", json!("x")),
            ("grammar", json!("root ::= x")),
        ] {
            let answer = ask(&open, path, &json!({field: value})).await;
            assert_eq!(answer.status, 400, "{path} {field}: {}", answer.text());
            assert!(
                answer.text().contains(&format!("{field}: `")),
                "{}",
                answer.text()
            );
        }
        let unknown = json!({
            "dry_multiplier": 0.8, "logprobs": false, "top_logprobs": 0, "suffix": null, "user": "me", "store": false,
        });
        let answer = ask(&open, path, &unknown).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        let named = answer.header("x-cotenant-ignored");
        assert!(named.starts_with("dry_multiplier"), "{path}: {named}");
        assert!(
            !named.contains("user") && !named.contains("store"),
            "{path}: {named}"
        );
    }
}

#[tokio::test]
async fn a_whole_number_may_have_a_fraction_of_zero_and_any_other_is_refused_by_name() {
    let open = open().await;
    for (path, fields) in [
        (CHAT, "max_tokens max_completion_tokens seed n top_k n_keep"),
        (COMPLETIONS, "max_tokens seed n best_of top_k"),
        (MESSAGES, "max_tokens top_k"),
        (RESPONSES, "max_output_tokens"),
        (
            OLLAMA_CHAT,
            "options.num_ctx options.num_predict options.top_k options.seed options.num_keep",
        ),
        (
            OLLAMA_GENERATE,
            "options.num_ctx options.num_predict options.top_k options.seed options.num_keep",
        ),
    ] {
        for field in fields.split(' ') {
            let set = |value: f64| match field.strip_prefix("options.") {
                Some(name) => json!({"options": {name: value}}),
                None => json!({field: value}),
            };
            let answer = ask(&open, path, &set(1.0)).await;
            assert_eq!(answer.status, 200, "{path} {field}: {}", answer.text());
            let answer = ask(&open, path, &set(1.5)).await;
            assert_eq!(answer.status, 400, "{path} {field}");
            assert!(
                answer.text().contains(&format!("{field}: invalid type"))
                    || answer.text().contains(&format!("{field}: invalid value")),
                "{}",
                answer.text()
            );
            assert!(
                answer.text().contains("`1.5`, expected a whole number"),
                "{}",
                answer.text()
            );
        }
    }
    open.script.chats.lock().unwrap().clear();
    let asked = ask(&open, COMPLETIONS, &json!({"prompt": [1.0, 2]})).await;
    assert_eq!(asked.status, 200, "{}", asked.text());
    let asked = ask(
        &open,
        OLLAMA_CHAT,
        &json!({"options": {"num_ctx": 8192.0, "num_predict": 4.0}}),
    )
    .await;
    assert_eq!(asked.status, 200, "{}", asked.text());
    let request = open.script.chats.lock().unwrap().pop().unwrap();
    assert_eq!(
        (
            request.context_wanted.unwrap().get(),
            request.max_tokens.unwrap().get()
        ),
        (8192, 4)
    );
    let asked = ask(&open, "/detokenize", &json!({"tokens": [104.0, 105]})).await;
    assert_eq!(asked.json(), json!({"content": "hi"}));
}

#[tokio::test]
async fn a_request_is_held_while_memory_is_short_for_a_moment() {
    let open = open_with(Limits::default(), true).await;
    let pressure = || Refusal::PressureHigh {
        act: "answer".to_owned(),
        level: PressureLevel::Critical,
        retry_after: Duration::from_millis(50),
    };
    for path in [
        CHAT,
        COMPLETIONS,
        MESSAGES,
        RESPONSES,
        OLLAMA_CHAT,
        OLLAMA_GENERATE,
    ] {
        for streamed in [false, true] {
            open.script.refuse([pressure(), pressure()]);
            let answer = ask(&open, path, &json!({"stream": streamed})).await;
            assert_eq!(answer.status, 200, "{path}: {}", answer.text());
            assert!(answer.text().contains("done."), "{path}: {}", answer.text());
        }
    }
    open.script.refuse([pressure(), pressure()]);
    let answer = post_json(
        open.address,
        "/v1/audio/speech",
        &json!({"input": "hi", "response_format": "pcm"}),
    )
    .await;
    assert_eq!((answer.status, answer.body.len()), (200, 48_000));
    // A persistent condition is refused at once.
    open.script.refuse([Refusal::Draining {
        act: "answer".to_owned(),
        retry_after: Duration::from_millis(50),
    }]);
    assert_eq!(ask(&open, OLLAMA_CHAT, &json!({})).await.status, 503);
}

#[tokio::test]
async fn fields_that_are_absent_are_as_each_api_has_them() {
    let open = open().await;
    for (path, temperature, top_p, top_k) in [
        (CHAT, 1.0, None, None),
        (COMPLETIONS, 1.0, None, None),
        (MESSAGES, 1.0, None, None),
        (RESPONSES, 1.0, None, None),
        (OLLAMA_CHAT, 0.8, Some(0.9), Some(40)),
        (OLLAMA_GENERATE, 0.8, Some(0.9), Some(40)),
    ] {
        let answer = ask(&open, path, &json!({})).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        let sampling = open.script.chats.lock().unwrap().pop().unwrap().sampling;
        let defaults = sampling.defaults;
        assert_eq!(
            (defaults.temperature, defaults.top_p, defaults.top_k),
            (Some(temperature), top_p, top_k),
            "{path}"
        );
        assert_eq!(
            sampling.asked.temperature, None,
            "{path}: what the model's file recommends goes before"
        );
        assert_eq!(
            answer.header("x-cotenant-seed"),
            sampling.asked.seed.unwrap().to_string(),
            "{path}"
        );
        let streamed = ask(&open, path, &json!({"stream": true})).await;
        let seed = open
            .script
            .chats
            .lock()
            .unwrap()
            .pop()
            .unwrap()
            .sampling
            .asked
            .seed
            .unwrap();
        assert_eq!(
            streamed.header("x-cotenant-seed"),
            seed.to_string(),
            "{path}"
        );
        assert_ne!(Some(seed), sampling.asked.seed, "{path}");
    }
}
