//! Unmodified clients from PyPI against the whole program.

use std::{
    ffi::OsStr,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Output, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use tokio::io::{AsyncBufReadExt as _, BufReader};

use super::installation::{
    Daemon, Installation, asr, ballast, budget, demo_model, embedder, encoder, said, tts,
};
use crate::support::speech_is_installed;

/// Far longer than a client runs (10 s on an idle machine), so that only a hung one is abandoned.
pub(super) const CLIENT_PATIENCE: Duration = Duration::from_secs(300);

/// Runs a client script to completion on another thread; `None` if the environment with the clients is missing.
pub(super) async fn client(script: &str, arguments: &[String]) -> Option<Output> {
    let Some(venv) = std::env::var_os("COTENANT_CLIENTS_VENV") else {
        println!("left out: COTENANT_CLIENTS_VENV is not set; `tests/run` prepares it");
        return None;
    };
    Some(run(python(&venv), script, arguments).await)
}

fn python(venv: &OsStr) -> Command {
    let mut command = Command::new(Path::new(venv).join("bin/python"));
    command.args(["-B", "-W", "ignore"]);
    command
}

async fn run(interpreter: Command, script: &str, arguments: &[String]) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/clients")
        .join(script);
    let run = tokio::process::Command::from(interpreter)
        .arg(script)
        .args(arguments)
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(CLIENT_PATIENCE, run)
        .await
        .expect("the client hangs")
        .unwrap();
    println!("{}", said(&output));
    output
}

/// Creates an installation of the release build, if there is one: clients request many answers.
fn installation(workers: &str) -> Installation {
    let mut installation = Installation::new(&format!(
        "{}{}{workers}",
        // The size that the gRPC client expects to be refused.
        budget(1024),
        // An answer that outgrows the floor may be cut short during a shed; the ones requested here do not.
        demo_model(32_768).replace("kv_floor: 128", "kv_floor: 1024"),
    ));
    installation.prefer_release();
    installation
}

fn speech_workers() -> String {
    format!("workers:\n{}{}", tts(), asr())
}

fn url(daemon: &Daemon<'_>) -> String {
    format!("http://{}/v1", daemon.http)
}

/// Sheds and regrows repeatedly.
async fn shed_until(installation: &Installation, over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        for command in [&["shed", "64MiB"][..], &["regrow"]] {
            let _refused_at_times = tokio::task::block_in_place(|| installation.run(command));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn anthropic_and_openais_responses_work_unmodified_also_while_memory_is_shed() {
    let installation = installation("");
    let daemon = installation.start().await;
    daemon.whole().await;
    let scripts = [
        (
            "anthropic_client.py",
            vec![format!("http://{}", daemon.http)],
        ),
        ("openai_client.py", vec![url(&daemon), "--text".to_owned()]),
    ];
    for (script, arguments) in &scripts {
        let Some(output) = client(script, arguments).await else {
            return;
        };
        assert!(output.status.success(), "{script}: {}", said(&output));
    }
    let over = AtomicBool::new(false);
    let sheds = shed_until(&installation, &over);
    let clients = async {
        let [anthropic, openai] = scripts
            .each_ref()
            .map(|(script, arguments)| client(script, arguments));
        let outputs = tokio::join!(anthropic, openai);
        over.store(true, Ordering::Relaxed);
        outputs
    };
    let ((anthropic, openai), ()) = tokio::join!(clients, sheds);
    for output in [anthropic.unwrap(), openai.unwrap()] {
        assert!(
            output.status.success(),
            "{}\n{}",
            said(&output),
            installation.events()
        );
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
    let installation = installation(&format!("{}{}{}", speech_workers(), embedder(), encoder()));
    let daemon = installation.start().await;
    daemon.whole().await;
    let say = ["--say".to_owned(), "turn on the kitchen light".to_owned()];
    let mut openai = vec![url(&daemon)];
    openai.extend(say.clone());
    let worker = |name: &str| {
        installation
            .path(&format!("run/{name}.sock"))
            .display()
            .to_string()
    };
    let wyoming = vec![worker("tts"), worker("asr"), say[1].clone()];
    let grpc = vec![
        installation.socket().display().to_string(),
        installation.abstract_name(),
    ];
    let ollama = vec![format!("http://{}", daemon.http)];
    for (script, arguments) in [
        ("openai_client.py", openai),
        ("ollama_client.py", ollama),
        ("wyoming_client.py", wyoming),
        ("grpc_client.py", grpc),
        ("metrics_client.py", vec![format!("http://{}", daemon.http)]),
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
    let installation = Installation::new(&format!("{}{}", budget(256), demo_model(32_768)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let Some(output) = client("deadline_client.py", &[url(&daemon)]).await else {
        return;
    };
    assert!(
        output.status.success(),
        "{}\n{}",
        said(&output),
        installation.log()
    );
    for (route, code, count) in [
        ("/v1/chat/completions", 503, 2.0),
        ("/v1/responses", 503, 1.0),
        ("/v1/messages", 529, 1.0),
    ] {
        let series = format!("cotenant_request_seconds_count{{route=\"{route}\",code=\"{code}\"}}");
        assert_eq!(daemon.metric(&series).await, Some(count), "{series}");
    }
    daemon.end().await;
}

/// Environments prepared by `tests/run clients`, and the scripts run in them.
const FRAMEWORKS: [(&str, &[&str]); 3] = [
    (
        "COTENANT_FRAMEWORKS_VENV",
        &[
            "litellm_client.py",
            "langchain_client.py",
            "livekit_client.py",
            "pipecat_client.py",
        ],
    ),
    ("COTENANT_INSTRUCTOR_VENV", &["instructor_client.py"]),
    ("COTENANT_NODE_CLIENTS", &["node_client.mjs"]),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frameworks_work_unmodified_also_while_memory_is_shed() {
    if FRAMEWORKS
        .iter()
        .any(|(variable, _)| std::env::var_os(variable).is_none())
    {
        println!(
            "left out: COTENANT_FRAMEWORKS_VENV is not set; `tests/run clients` prepares it and the others"
        );
        return;
    }
    if !speech_is_installed() {
        return;
    }
    let installation = installation(&speech_workers());
    let daemon = installation.start().await;
    daemon.whole().await;
    let arguments = [format!("http://{}", daemon.http)];
    let all = async || {
        for (variable, scripts) in FRAMEWORKS {
            let folder = std::env::var_os(variable).unwrap();
            for script in scripts {
                let interpreter = if script.ends_with(".mjs") {
                    Command::new("node")
                } else {
                    python(&folder)
                };
                let output = run(interpreter, script, &arguments).await;
                assert!(
                    output.status.success(),
                    "{script}: {}\n{}",
                    said(&output),
                    installation.events()
                );
            }
        }
    };
    all().await;
    let before = daemon.status().await.engine.unwrap().sheds;
    let over = AtomicBool::new(false);
    let clients = async {
        all().await;
        over.store(true, Ordering::Relaxed);
    };
    tokio::join!(clients, shed_until(&installation, &over));
    let sheds = daemon.status().await.engine.unwrap().sheds - before;
    println!("{sheds} sheds");
    assert!(sheds >= 4, "{sheds} sheds only");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_is_readable_in_a_browser_and_follows_the_next_daemon() {
    let Some(venv) = std::env::var_os("COTENANT_BROWSER_VENV") else {
        println!("left out: COTENANT_BROWSER_VENV is not set; `tests/run clients` prepares it");
        return;
    };
    // What is shed stays so until the script asks for it.
    let budget = budget(256).replace("dwell: 300ms", "dwell: 1m");
    let sections = format!("{budget}{}workers:\n{}", demo_model(1024), ballast());
    let mut installation = Installation::new(&sections);
    installation.prefer_release();
    let keys = installation.path("keys.yaml");
    let clients = "clients:\n  - {name: chief, key: key-of-the-operator, role: operator}\n  \
                   - {name: kitchen, key: key-of-the-viewer}\n";
    std::fs::write(&keys, clients).unwrap();
    std::fs::set_permissions(&keys, std::fs::Permissions::from_mode(0o600)).unwrap();
    let text = std::fs::read_to_string(installation.config()).unwrap();
    let with_keys = format!("http: {{keys_file: {}, ", keys.display());
    std::fs::write(installation.config(), text.replace("http: {", &with_keys)).unwrap();
    let daemon = installation.start().await;
    daemon.whole().await;
    let address = daemon.http.to_string();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/page_client.py");
    let mut browser = tokio::process::Command::from(python(&venv));
    browser.arg(script).arg(format!("http://{address}/"));
    browser.arg(&installation.program).env(
        "COTENANT_ENDPOINT",
        format!("unix://{}", installation.socket().display()),
    );
    browser.args(std::env::var_os("COTENANT_SCREENSHOTS"));
    let mut browser = browser
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(browser.stdout.take().unwrap()).lines();
    assert_eq!(
        lines.next_line().await.unwrap().as_deref(),
        Some("watching")
    );
    daemon.end().await;
    assert_eq!(lines.next_line().await.unwrap().as_deref(), Some("lost"));
    installation.configure_with_http(&sections, &address);
    let daemon = installation.start().await;
    let seen = tokio::time::timeout(CLIENT_PATIENCE, browser.wait()).await;
    assert!(
        seen.expect("the browser hangs").unwrap().success(),
        "its output is above"
    );
    daemon.end().await;
}
