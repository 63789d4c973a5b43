//! Speech to speech through the APIs that products use, with real workers.

use serde_json::{Value, json};

use super::installation::{
    Installation, asr, budget, content, demo_model, tts, whole, worker, workers_ready,
};
use crate::{http::client::post_json, support::speech_is_installed};

const COMMAND: &str = "turn on the kitchen light";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_says_what_the_answer_in_one_piece_says() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(4096)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let whole = content(&daemon.ask(COMMAND).await);
    assert!(whole.contains("kitchen"), "not a sensible answer: {whole}");
    let stream = daemon
        .chat(json!({ "messages": [{"role": "user", "content": COMMAND}], "stream": true }))
        .await;
    assert_eq!(stream.status, 200);
    let (payloads, _) = stream.events();
    assert_eq!(payloads.last().unwrap(), "[DONE]");
    let mut text = String::new();
    for payload in &payloads[..payloads.len() - 1] {
        let chunk: Value = serde_json::from_str(payload).unwrap();
        text.push_str(
            chunk["choices"][0]["delta"]["content"]
                .as_str()
                .unwrap_or_default(),
        );
    }
    assert_eq!(text, whole);
    // Over gRPC, by the command line: tokens are counted like those over HTTP.
    let counted = async || {
        let mut counts = Vec::new();
        for kind in ["prompt", "completion"] {
            let name = format!("cotenant_tokens_total{{kind=\"{kind}\"}}");
            counts.push(daemon.metric(&name).await.unwrap());
        }
        counts
    };
    let before = counted().await;
    assert!(before.iter().all(|tokens| *tokens > 0.0), "{before:?}");
    let generated = installation.json(&["generate", COMMAND, "--temperature", "0"]);
    assert_eq!(generated["text"], whole.as_str());
    let usage =
        ["promptTokens", "completionTokens"].map(|kind| generated["usage"][kind].as_f64().unwrap());
    let after = counted().await;
    assert_eq!([after[0] - before[0], after[1] - before[1]], usage);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_differs_each_time_and_repeats_with_its_seed() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(4096)));
    let daemon = installation.start().await;
    daemon.whole().await;
    // The small model is certain about its training text, but not about these letters.
    let openai = json!({"model": "demo", "prompt": "zq ", "max_tokens": 12});
    let ollama = json!({"model": "demo", "prompt": "zq ", "raw": true, "stream": false, "options": {"num_predict": 12}});
    for (path, body, text, seed) in [
        ("/v1/completions", &openai, "/choices/0/text", "/seed"),
        ("/api/generate", &ollama, "/response", "/options/seed"),
    ] {
        let mut said = Vec::new();
        for _ in 0..3 {
            let answer = post_json(daemon.http, path, body).await;
            assert_eq!(answer.status, 200, "{path}: {}", answer.text());
            let words = answer.json().pointer(text).unwrap().clone();
            said.push((
                words,
                answer.header("x-cotenant-seed").parse::<u64>().unwrap(),
            ));
        }
        assert!(
            said.iter().any(|(words, _)| *words != said[0].0),
            "{path}: the same words three times: {said:?}"
        );
        let mut again = body.clone();
        let place = again
            .pointer_mut(seed.strip_suffix("/seed").unwrap())
            .unwrap();
        place["seed"] = json!(said[0].1);
        let repeated = post_json(daemon.http, path, &again).await.json();
        assert_eq!(repeated.pointer(text), Some(&said[0].0), "{path}");
    }
    // Over gRPC.
    let generate = |more: &[&str]| {
        installation.json(&[&["generate", "zq ", "--raw", "--max-tokens", "12"], more].concat())
    };
    let said = [generate(&[]), generate(&[]), generate(&[])];
    assert!(
        said.iter().any(|one| one["text"] != said[0]["text"]),
        "the same words three times: {said:?}"
    );
    let again = generate(&["--seed", &said[0]["seed"].to_string()]);
    assert_eq!(again["text"], said[0]["text"]);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn speech_in_gives_speech_out_before_and_after_a_change_of_size() {
    if !speech_is_installed() {
        return;
    }
    // Everything fits except the large vocabulary together with the full engine.
    let installation = Installation::new(&format!(
        "{}{}workers:\n{}{}",
        budget(192),
        demo_model(32_768),
        tts(),
        asr()
    ));
    let daemon = installation.start().await;
    daemon.whole().await;
    let spoken = daemon.speak(COMMAND).await;
    assert_eq!(spoken.status, 200, "{}", spoken.text());
    assert!(spoken.complete && spoken.body.starts_with(b"RIFF"));
    let heard = daemon.hear(&spoken.body).await;
    assert_eq!(heard.json()["text"], COMMAND, "{}", heard.text());
    let answer = content(&daemon.ask(COMMAND).await);

    // The large vocabulary needs memory of the engine.
    let (resized, disturbed) = tokio::join!(
        async {
            let installation = &installation;
            tokio::task::block_in_place(|| {
                installation.tell(&["resize", "asr", "open", "--wait", "15s", "--timeout", "20s"])
            })
        },
        daemon.ask(COMMAND)
    );
    assert!(resized.contains("open"), "{resized}");
    assert_eq!(content(&disturbed), answer);
    let status = daemon.status().await;
    assert_eq!(worker(&status, "asr").variant, "open");
    assert!(
        !whole(&status),
        "there was room for everything: {status:#?}"
    );
    assert!(status.engine.unwrap().sheds > 0);
    let heard = daemon.hear(&spoken.body).await;
    assert_eq!(heard.status, 200, "{}", heard.text());
    assert!(heard.text().contains("kitchen"), "{}", heard.text());

    installation.tell(&[
        "resize",
        "asr",
        "grammar",
        "--wait",
        "15s",
        "--timeout",
        "20s",
    ]);
    let status = daemon
        .until("grown back", |status| {
            whole(status) && workers_ready(status)
        })
        .await;
    assert_eq!(worker(&status, "asr").variant, "grammar");
    assert_eq!(
        worker(&status, "asr").starts,
        1,
        "it was not started again for it"
    );
    assert_eq!(daemon.hear(&spoken.body).await.json()["text"], COMMAND);
    assert_eq!(content(&daemon.ask(COMMAND).await), answer);
    let events = installation.events();
    for words in [
        "worker `asr` may switch to `open`",
        "worker `asr` may switch to `grammar`",
    ] {
        assert!(events.contains(words), "{words}: {events}");
    }
    daemon.end().await;
}
