//! Unmodified clients from PyPI against the whole program.

use std::{
    path::Path,
    process::{Command, Output},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use super::house::{Daemon, House, asr, budget, demo_model, said, tts};
use crate::support::speech_is_installed;

/// Far beyond what a client takes (10 s on an idle machine): only one that hangs is given up.
const CLIENT_PATIENCE: Duration = Duration::from_secs(300);

/// Runs a client script to its end, away from the test's own thread; `None` when the environment with the clients is
/// not there.
pub(super) async fn client(script: &str, arguments: &[String]) -> Option<Output> {
    let Some(venv) = std::env::var_os("COTENANT_CLIENTS_VENV") else {
        println!("left out: COTENANT_CLIENTS_VENV is not set; `tests/run` prepares it");
        return None;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(script);
    let run = tokio::process::Command::from(Command::new(Path::new(&venv).join("bin/python")))
        .arg("-B")
        .arg(script)
        .args(arguments)
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(CLIENT_PATIENCE, run)
        .await
        .expect("the client hangs")
        .unwrap();
    println!("{}", said(&output));
    Some(output)
}

/// A house in which everything is at home.
fn house() -> House {
    // As much as the gRPC client wants to be refused.
    House::new(&format!(
        "{}{}workers:\n{}{}",
        budget(1024),
        // An answer that outgrows the floor may be cut short while memory is taken; those that are asked here do not.
        demo_model(32_768).replace("kv_floor: 128", "kv_floor: 1024"),
        tts(),
        asr()
    ))
}

fn url(daemon: &Daemon<'_>) -> String {
    format!("http://{}/v1", daemon.http)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn anthropic_and_openais_responses_work_unmodified_also_while_memory_is_shed() {
    let model = demo_model(32_768).replace("kv_floor: 128", "kv_floor: 1024");
    let house = House::new(&format!("{}{model}", budget(1024)));
    let daemon = house.start().await;
    daemon.whole().await;
    let scripts = [
        ("anthropic_client.py", vec![format!("http://{}", daemon.http)]),
        ("openai_client.py", vec![url(&daemon), "--text".to_owned()]),
    ];
    for (script, arguments) in &scripts {
        let Some(output) = client(script, arguments).await else {
            return;
        };
        assert!(output.status.success(), "{script}: {}", said(&output));
    }
    let over = AtomicBool::new(false);
    let sheds = async {
        while !over.load(Ordering::Relaxed) {
            for command in [&["shed", "64MiB"][..], &["regrow"]] {
                let _refused_at_times = tokio::task::block_in_place(|| house.run(command));
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    let clients = async {
        let [anthropic, openai] = scripts.each_ref().map(|(script, arguments)| client(script, arguments));
        let outputs = tokio::join!(anthropic, openai);
        over.store(true, Ordering::Relaxed);
        outputs
    };
    let ((anthropic, openai), ()) = tokio::join!(clients, sheds);
    for output in [anthropic.unwrap(), openai.unwrap()] {
        assert!(output.status.success(), "{}\n{}", said(&output), house.events());
    }
    let sheds = daemon.status().await.engine.unwrap().sheds;
    println!("{sheds} sheds");
    assert!(sheds >= 4, "{sheds} sheds only");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn openai_ollama_wyoming_and_grpcio_work_unmodified() {
    if !speech_is_installed() {
        return;
    }
    let house = house();
    let daemon = house.start().await;
    daemon.whole().await;
    let say = ["--say".to_owned(), "turn on the kitchen light".to_owned()];
    let mut openai = vec![url(&daemon)];
    openai.extend(say.clone());
    let worker = |name: &str| house.path(&format!("run/{name}.sock")).display().to_string();
    let wyoming = vec![worker("tts"), worker("asr"), say[1].clone()];
    let grpc = vec![house.socket().display().to_string(), house.abstract_name()];
    let ollama = vec![format!("http://{}", daemon.http)];
    for (script, arguments) in [
        ("openai_client.py", openai),
        ("ollama_client.py", ollama),
        ("wyoming_client.py", wyoming),
        ("grpc_client.py", grpc),
    ] {
        let Some(output) = client(script, &arguments).await else {
            return;
        };
        assert!(output.status.success(), "{script}: {}", said(&output));
    }
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_begin_while_the_client_waits_is_refused_at_once() {
    let house = House::new(&format!("{}{}", budget(256), demo_model(32_768)));
    let daemon = house.start().await;
    daemon.whole().await;
    let Some(output) = client("deadline_client.py", &[url(&daemon)]).await else {
        return;
    };
    assert!(output.status.success(), "{}\n{}", said(&output), house.log());
    let refused = daemon
        .metric("cotenant_request_seconds_count{route=\"/v1/chat/completions\",code=\"503\"}")
        .await;
    assert_eq!(refused, Some(2.0));
    daemon.end().await;
}
