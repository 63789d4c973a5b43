//! The official Python client, unmodified.

use std::{path::Path, process::Command};

use super::daemon::Daemon;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unmodified_grpcio_does_what_a_tenant_does() {
    let Ok(venv) = std::env::var("COTENANT_CLIENTS_VENV") else {
        println!("left out: COTENANT_CLIENTS_VENV is not set; tests/run sets it");
        return;
    };
    let daemon = Daemon::start().await;
    daemon.health.set(cotenant::rpc::health::OVERALL, true);
    let mut command = Command::new(Path::new(&venv).join("bin/python"));
    command
        .arg(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/clients/grpc_client.py"
        ))
        .arg(daemon.socket())
        .arg(&daemon.abstract_name);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap();
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    daemon.end().await;
}
