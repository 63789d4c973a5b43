//! Embeddings by a worker of this program, through the APIs that products use.

use std::time::Duration;

use cotenant::rpc::v1::GetStatusResponse;
use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};

use super::installation::{
    Daemon, Installation, budget, demo_model, embedder, encoder, pid_of, worker, workers_ready,
};
use crate::http::client::{get, post_json};

async fn vectors(daemon: &Daemon<'_>, model: &str, texts: &[&str]) -> Vec<Vec<f64>> {
    let body = json!({"model": model, "input": texts});
    let answer = post_json(daemon.http, "/v1/embeddings", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let whole = answer.json();
    let data = whole["data"].as_array().unwrap().iter();
    data.map(|datum| numbers(&datum["embedding"])).collect()
}

fn numbers(list: &Value) -> Vec<f64> {
    let list = list.as_array().unwrap().iter();
    list.map(|number| number.as_f64().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_become_vectors_by_a_worker_that_sleeps_and_is_started_again() {
    let idle = format!(
        "{}    idle: {{stop_after: 1s}}\n",
        embedder().replace("name: embedder", "name: sleeper")
    );
    let installation = Installation::new(&format!(
        "{}{}workers:\n{}{idle}",
        budget(512),
        demo_model(1024),
        embedder()
    ));
    let daemon = installation.start().await;
    daemon
        .until("ready", |status| worker(status, "embedder").pid.is_some())
        .await;
    let texts = ["turn on the light", "turn off the light", "what time is it"];
    let before = vectors(&daemon, "embedder", &texts).await;
    assert!(before.iter().all(|vector| vector.len() == before[0].len()));
    assert!(before[0] != before[1] && before[1] != before[2]);
    for vector in &before {
        let square: f64 = vector.iter().map(|number| number * number).sum();
        assert!((square - 1.0).abs() < 1e-5, "{square}");
    }
    // One text alone has the bits that it has among others, in Ollama's form as well.
    let body = json!({"model": "embedder", "input": texts[1]});
    let alone = post_json(daemon.http, "/api/embed", &body).await.json();
    let same = |(one, other): (&f64, &f64)| (one - other).abs() < 1e-6;
    assert!(
        numbers(&alone["embeddings"][0])
            .iter()
            .zip(&before[1])
            .all(same)
    );

    let listed = get(daemon.http, "/v1/models").await.json();
    let tasks: Vec<_> = listed["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| {
            (
                model["id"].as_str().unwrap(),
                model["task"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        tasks,
        [
            ("demo", "chat"),
            ("embedder", "embedding"),
            ("sleeper", "embedding")
        ]
    );

    // A text beyond the context is refused by OpenAI's API, and cut by Ollama's.
    let long = "light ".repeat(280);
    let body = json!({"model": "embedder", "input": ["a", long]});
    let refused = post_json(daemon.http, "/v1/embeddings", &body).await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    assert!(
        refused.text().contains("input[1]: the text has"),
        "{}",
        refused.text()
    );
    let cut = post_json(daemon.http, "/api/embed", &body).await;
    assert_eq!(cut.status, 200, "{}", cut.text());

    // Killed in the middle of a request, it is started again, and what it lost is computed again.
    let many: Vec<String> = (0..48).map(|number| format!("light {number}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let pid = |status: &GetStatusResponse| worker(status, "embedder").pid;
    let killed = pid(&daemon.status().await).unwrap();
    let (found, ()) = tokio::join!(vectors(&daemon, "embedder", &many), async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        kill(pid_of(killed), Signal::SIGKILL).unwrap();
    });
    assert_eq!(found.len(), many.len());
    daemon
        .until("another one runs", |status| {
            pid(status).is_some_and(|pid| pid != killed)
        })
        .await;
    for at in [0, 47] {
        assert_eq!(
            found[at],
            vectors(&daemon, "embedder", &many[at..=at]).await[0]
        );
    }
    assert_eq!(vectors(&daemon, "embedder", &texts).await, before);

    // Idle, it sleeps without memory; a request wakes it.
    daemon
        .until("it sleeps", |status| {
            worker(status, "sleeper").pid.is_none()
        })
        .await;
    assert_eq!(vectors(&daemon, "sleeper", &texts).await, before);

    installation.tell(&["stop", "embedder"]);
    daemon
        .until("stopped", |status| worker(status, "embedder").pid.is_none())
        .await;
    let body = json!({"model": "embedder", "input": "a"});
    let refused = post_json(daemon.http, "/v1/embeddings", &body).await;
    assert_eq!(
        (refused.status, refused.error_code().as_str()),
        (503, "stopped")
    );
    installation.tell(&["start", "embedder"]);
    daemon.until("ready again", workers_ready).await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_encoder_serves_both_apis_with_its_own_limit() {
    let installation = Installation::new(&format!(
        "{}{}workers:\n{}",
        budget(512),
        demo_model(1024),
        encoder()
    ));
    let daemon = installation.start().await;
    daemon.until("ready", workers_ready).await;
    let texts = ["turn on the light", "turn off the light"];
    let found = vectors(&daemon, "encoder", &texts).await;
    assert!(found[0] != found[1] && found.iter().all(|vector| vector.len() == 32));
    let long = "light ".repeat(280);
    let body = json!({"model": "encoder", "input": ["a", long]});
    let refused = post_json(daemon.http, "/v1/embeddings", &body).await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    let reason = "input[1]: the text has 281 tokens, the limit is 159";
    assert!(refused.text().contains(reason), "{}", refused.text());
    let cut = post_json(daemon.http, "/api/embed", &body).await;
    assert_eq!(cut.status, 200, "{}", cut.text());
    daemon.end().await;
}
