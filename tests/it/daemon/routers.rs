//! Information about a daemon for routers and fleets: load, speed, configuration.

use serde_json::json;

use super::installation::{Installation, budget, demo_model, long_form};
use crate::http::client::get;
use cotenant::rpc::v1::GetStatusResponse;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_changes_the_hash_of_the_configuration_and_the_names_of_metrics() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(1024)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let scraped = async || get(daemon.http, "/metrics").await.text().to_owned();
    let node = |text: &str| {
        let lines = text
            .lines()
            .filter(|line| line.starts_with("cotenant_node_info{"));
        let lines: Vec<String> = lines.map(str::to_owned).collect();
        assert_eq!(lines.len(), 1, "{text}");
        assert!(lines[0].contains("model=\"demo\""), "{lines:?}");
        lines[0].clone()
    };
    let before = scraped().await;
    assert!(!before.contains("vllm:"), "{before}");
    let text = std::fs::read_to_string(installation.config()).unwrap();
    let write = |text: &str| std::fs::write(installation.config(), text).unwrap();
    // A comment is not a change.
    write(&format!("# of the kitchen\n{text}"));
    installation.tell(&["reload"]);
    assert_eq!(node(&scraped().await), node(&before));
    write(&format!("{text}telemetry: {{vllm_names: true}}\n"));
    assert_eq!(
        installation.tell(&["reload"]),
        "applied: telemetry.vllm_names\n"
    );
    let after = scraped().await;
    assert_ne!(node(&after), node(&before));
    for series in [
        "vllm:num_requests_running{model_name=\"demo\"} 0",
        "vllm:num_requests_waiting{model_name=\"demo\"} 0",
        "vllm:kv_cache_usage_perc{model_name=\"demo\"} 0",
        "# TYPE vllm:num_requests_waiting gauge",
    ] {
        assert!(
            after.lines().any(|line| line.starts_with(series)),
            "{series}: {after}"
        );
    }
    let known = |status: &GetStatusResponse| {
        let engine = status.engine.as_ref();
        engine.is_some_and(|engine| engine.milli_tokens_per_second > 0)
    };
    daemon.until("its speed is known", known).await;
    let health = get(daemon.http, "/health").await.json();
    assert_eq!(health["llm"], json!({"state": "ready", "speed_ratio": 1.0}));
    installation.tell(&["shed", "1GiB"]);
    // At its floor it serves, but slower.
    let answer = get(daemon.http, "/health").await;
    let ratio = answer.json()["llm"]["speed_ratio"].as_f64().unwrap();
    assert!(
        answer.status == 200 && ratio > 0.0 && ratio <= 1.0,
        "{}",
        answer.text()
    );
    write(&text);
    installation.tell(&["reload"]);
    let back = scraped().await;
    assert!(!back.contains("vllm:"));
    assert_eq!(node(&back), node(&before));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_of_an_answer_whose_client_has_gone_count_as_well() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(8192)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let count = async |kind| {
        let name = format!("cotenant_tokens_total{{kind=\"{kind}\"}}");
        daemon.metric(&name).await
    };
    assert_eq!(count("prompt").await, Some(0.0));
    assert_eq!(count("completion").await, Some(0.0));
    let mut connection = daemon
        .tells(json!({"max_tokens": 3000, "response_format": long_form()}))
        .await;
    connection.wait_for("\"content\":").await;
    drop(connection);
    assert!(count("prompt").await > Some(0.0));
    assert!(count("completion").await > Some(0.0));
    daemon.end().await;
}
