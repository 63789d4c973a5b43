//! Unmodified clients from PyPI against the HTTP APIs.

use std::{path::Path, time::Duration};

use tokio::{net::UnixListener, process::Command};

use super::script::open;
use cotenant::http::serve;

/// Runs a client script; `None` if the environment with the clients is missing.
async fn run_client(script: &str, arguments: &[&str]) -> Option<()> {
    let Some(venv) = std::env::var_os("COTENANT_CLIENTS_VENV") else {
        eprintln!("left out: COTENANT_CLIENTS_VENV is not set; `tests/run` prepares it");
        return None;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/clients")
        .join(script);
    let run = Command::new(Path::new(&venv).join("bin/python"))
        .arg("-B")
        .arg(script)
        .args(arguments)
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(120), run)
        .await
        .expect("the client hangs")
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    eprintln!("{said}");
    Some(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_openai_package_works_unmodified_over_tcp() {
    let open = open().await;
    let url = format!("http://{}/v1", open.address);
    run_client("openai_client.py", &[&url, "--scripted"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_anthropic_package_works_unmodified() {
    let open = open().await;
    let url = format!("http://{}", open.address);
    run_client("anthropic_client.py", &[&url, "--scripted"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_openai_package_works_unmodified_over_a_unix_socket() {
    let open = open().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("http.sock");
    let serving = tokio::spawn(serve(
        UnixListener::bind(&path).unwrap(),
        open.api.clone(),
        open.shutdown.clone(),
    ));
    let uds = path.to_str().unwrap();
    run_client(
        "openai_client.py",
        &["http://localhost/v1", "--uds", uds, "--scripted"],
    )
    .await;
    serving.abort();
}
