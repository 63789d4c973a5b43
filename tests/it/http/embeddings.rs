//! Embeddings in OpenAI's and Ollama's forms, with scripted backends.

use std::time::Duration;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use cotenant::conversation::refusal::Refusal;
use serde_json::{Value, json};

use super::{
    client::{get, post_json},
    script::{open, open_with},
};

const OPENAI: &str = "/v1/embeddings";

#[tokio::test]
async fn texts_of_any_number_become_vectors_in_their_order() {
    let open = open().await;
    let texts: Vec<String> = (0..40).map(|number| "x".repeat(number + 1)).collect();
    let body = json!({"model": "minilm", "input": texts, "user": "u", "dimensions": 3});
    let answer = post_json(open.address, OPENAI, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let whole = answer.json();
    assert_eq!(
        (&whole["object"], &whole["model"], &whole["usage"]),
        (
            &json!("list"),
            &json!("minilm"),
            &json!({"prompt_tokens": 40, "total_tokens": 40})
        )
    );
    let data = whole["data"].as_array().unwrap();
    for (number, datum) in (0u8..).zip(data) {
        let vector = json!([f64::from(number + 1), f64::from(number % 16), 0.5]);
        assert_eq!(
            *datum,
            json!({"object": "embedding", "index": number, "embedding": vector})
        );
    }
    assert_eq!(data.len(), 40);
    // In parts, each with a stage of the same running answer.
    let asked = open.script.embedded.lock().unwrap().clone();
    let lengths: Vec<usize> = asked.iter().map(|part| part.texts.len()).collect();
    assert_eq!(lengths, [16, 16, 8]);
    assert!(
        asked
            .iter()
            .all(|part| part.dimensions == Some(3) && !part.truncate)
    );
    assert!(asked[0].meta.part_of.is_some() && asked[0].meta.part_of == asked[2].meta.part_of);

    let body = json!({"model": "minilm:latest", "input": "four", "encoding_format": "base64"});
    let coded = post_json(open.address, OPENAI, &body).await.json();
    let bytes = BASE64_STANDARD
        .decode(coded["data"][0]["embedding"].as_str().unwrap())
        .unwrap();
    let numbers: Vec<f32> = bytes
        .chunks(4)
        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
        .collect();
    assert_eq!(numbers, [4.0, 0.0, 0.5]);
}

#[tokio::test]
async fn ollamas_forms_have_their_own_names_and_vectors_of_length_1() {
    let open = open().await;
    let body = json!({"model": "minilm", "input": ["ab", "abc"], "keep_alive": "5m", "options": {"num_ctx": 64}});
    let answer = post_json(open.address, "/api/embed", &body).await;
    assert_eq!(answer.header("x-cotenant-ignored"), "options");
    let whole = answer.json();
    let numbers = |value: &Value| -> Vec<f64> {
        let list = value.as_array().unwrap().iter();
        list.map(|number| number.as_f64().unwrap()).collect()
    };
    let [first, second] = [0, 1].map(|at| numbers(&whole["embeddings"][at]));
    for vector in [&first, &second] {
        let square: f64 = vector.iter().map(|number| number * number).sum();
        assert!((square - 1.0).abs() < 1e-6, "{vector:?}");
    }
    assert!((first[2] / first[0] - 0.25).abs() < 1e-6, "{first:?}");
    assert_eq!(whole["prompt_eval_count"], 2);
    assert!(open.script.embedded.lock().unwrap()[0].truncate);

    let body = json!({"model": "minilm", "prompt": "abc"});
    let old = post_json(open.address, "/api/embeddings", &body)
        .await
        .json();
    assert_eq!(numbers(&old["embedding"]), [3.0, 0.0, 0.5]);
    // Clients load a model by a request without input.
    let body = json!({"model": "minilm", "input": ""});
    let loaded = post_json(open.address, "/api/embed", &body).await.json();
    assert_eq!(loaded["embeddings"], json!([]));

    let tags = get(open.address, "/api/tags").await.json();
    let named = |model: &Value| model["name"] == "minilm";
    assert!(
        tags["models"].as_array().unwrap().iter().any(named),
        "{tags}"
    );
    let shown = post_json(open.address, "/api/show", &json!({"model": "minilm"})).await;
    assert_eq!(shown.json()["capabilities"], json!(["embedding"]));
}

#[tokio::test]
async fn what_cannot_be_embedded_is_refused_by_name() {
    let nothing = open_with(Default::default(), false).await;
    let answer = post_json(nothing.address, OPENAI, &json!({"input": "a"})).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (404, "not_configured")
    );
    assert!(
        answer.text().contains("`role: embedding`"),
        "{}",
        answer.text()
    );

    let open = open().await;
    for (body, status, says) in [
        (
            json!({"model": "absent", "input": "a"}),
            404,
            "there is `minilm`",
        ),
        (
            json!({"model": "tiny", "input": "a"}),
            404,
            "`tiny` is a model for chat, not for embedding; there is `minilm`",
        ),
        (json!({"input": ["a", ""]}), 400, "input[1]: is empty"),
        (
            json!({"input": [[1, 2]]}),
            400,
            "check_embedding_ctx_length=False",
        ),
        (
            json!({"input": "a", "dimensions": 0}),
            400,
            "is not between 1 and 16384",
        ),
        (
            json!({"input": "a", "encoding_format": "int8"}),
            400,
            "is neither `float` nor `base64`",
        ),
    ] {
        let answer = post_json(open.address, OPENAI, &body).await;
        assert_eq!(answer.status, status, "{body}: {}", answer.text());
        assert!(answer.text().contains(says), "{body}: {}", answer.text());
    }
    let chat = json!({"model": "minilm", "messages": [{"role": "user", "content": "hi"}]});
    let answer = post_json(open.address, "/v1/chat/completions", &chat).await;
    assert_eq!(answer.status, 404);
    assert!(answer.text().contains("not for chat"), "{}", answer.text());

    let starting = Refusal::Starting {
        act: "embed text".to_owned(),
        who: "worker `minilm`".to_owned(),
        state: "starting".to_owned(),
        retry_after: Duration::from_millis(500),
    };
    open.script.refusals.lock().unwrap().push(starting);
    let answer = post_json(
        open.address,
        "/api/embed",
        &json!({"model": "minilm", "input": "a"}),
    )
    .await;
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert!(
        answer.json()["error"]
            .as_str()
            .unwrap()
            .contains("worker `minilm`")
    );
}
