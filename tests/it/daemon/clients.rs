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
async fn no_request_fails_while_memory_is_shed_again_and_again() {
    if !speech_is_installed() {
        return;
    }
    let house = house();
    let daemon = house.start().await;
    daemon.whole().await;
    let over = AtomicBool::new(false);
    let mut arguments = vec![url(&daemon), "--brief".to_owned()];
    arguments.extend(["--say", "turn on the kitchen light"].map(str::to_owned));
    let ollama = [format!("http://{}", daemon.http), "--rounds".to_owned(), "3".to_owned()];
    let ((output, asked), sheds) = tokio::join!(
        async {
            let output = tokio::join!(
                client("openai_client.py", &arguments),
                client("ollama_client.py", &ollama)
            );
            over.store(true, Ordering::Relaxed);
            output
        },
        async {
            let mut operator = daemon.operator();
            let mut sheds = 0;
            while !over.load(Ordering::Relaxed) {
                let shed = cotenant::rpc::v1::ShedRequest { shed_bytes: 48 << 20 };
                sheds += u32::from(operator.shed(shed).await.is_ok());
                tokio::time::sleep(Duration::from_millis(20)).await;
                let _refused = operator.regrow(cotenant::rpc::v1::RegrowRequest {}).await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            sheds
        }
    );
    let (Some(output), Some(asked)) = (output, asked) else {
        return;
    };
    assert!(output.status.success(), "{}", said(&output));
    assert!(asked.status.success(), "{}", said(&asked));
    assert!(sheds > 10, "{sheds} sheds only");
    println!("{sheds} sheds");
    for route in ["/v1/chat/completions", "/api/chat"] {
        for code in ["500", "503"] {
            let failed = daemon
                .metric(&format!(
                    "cotenant_request_seconds_count{{route=\"{route}\",code=\"{code}\"}}"
                ))
                .await;
            assert!(failed.is_none_or(|count| count == 0.0), "{route} {code}: {failed:?}");
        }
    }
    daemon.end().await;
}
