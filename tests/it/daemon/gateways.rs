//! Gateways, unmodified, before two daemons with a published model, one of which is squeezed, shed, drained, upgraded.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use cotenant::rpc::v1::GetStatusResponse;
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
};

use super::{
    clients::CLIENT_PATIENCE,
    installation::{Daemon, Installation, PROGRAM, budget},
};

fn speed_is_known(status: &GetStatusResponse) -> bool {
    let engine = status.engine.as_ref();
    engine.is_some_and(|engine| engine.milli_tokens_per_second > 0)
}

/// A gateway and its client.
struct Gateway {
    child: Child,
    asks: ChildStdin,
    says: Lines<BufReader<ChildStdout>>,
}

impl Gateway {
    async fn start(venv: &Path, kind: &str, daemons: [&Daemon<'_>; 2]) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/gateway_client.py");
        let mut child = Command::new(venv.join("bin/python"))
            .args(["-B", "-W", "ignore"])
            .arg(script)
            .arg(kind)
            .args(daemons.map(|daemon| format!("http://{}", daemon.http)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let asks = child.stdin.take().unwrap();
        let says = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut gateway = Self { child, asks, says };
        assert_eq!(gateway.line().await, "ready");
        gateway
    }

    async fn line(&mut self) -> String {
        let line = tokio::time::timeout(CLIENT_PATIENCE, self.says.next_line()).await;
        let line = line.expect("the gateway hangs").unwrap();
        line.expect("the gateway has ended; its output is above")
    }

    /// Sends requests: all are answered, by the same text.
    async fn asks(&mut self, requests: u32) {
        let line = format!("{requests}\n");
        self.asks.write_all(line.as_bytes()).await.unwrap();
        let said: Value = serde_json::from_str(&self.line().await).unwrap();
        assert_eq!(
            (&said["answers"], &said["texts"]),
            (&requests.into(), &1.into()),
            "{said}"
        );
    }

    async fn end(mut self) {
        drop(self.asks);
        self.child.wait().await.unwrap();
    }
}

/// Requests that each daemon has answered.
async fn answered(daemons: [&Daemon<'_>; 2]) -> [f64; 2] {
    let series = "cotenant_request_seconds_count{route=\"/v1/chat/completions\",code=\"200\"}";
    let mut counts = [0.0; 2];
    for (count, daemon) in counts.iter_mut().zip(daemons) {
        *count = daemon.metric(series).await.unwrap_or(0.0);
    }
    counts
}

/// Part of further requests that the second daemon answers.
async fn share_of_other(gateway: &mut Gateway, daemons: [&Daemon<'_>; 2], requests: u32) -> f64 {
    let before = answered(daemons).await;
    gateway.asks(requests).await;
    let after = answered(daemons).await;
    assert_eq!(
        after[0] + after[1] - before[0] - before[1],
        f64::from(requests)
    );
    (after[1] - before[1]) / f64::from(requests)
}

/// A program with a lease for as much as the LLM can shed, until it is ended.
async fn squeeze(installation: &Installation, daemon: &Daemon<'_>) -> Child {
    let status = daemon.status().await;
    let llm = status.leases.iter().find(|lease| lease.tenant == "llm");
    let mib = u64::from(BUDGET_MIB) - (llm.unwrap().min_bytes >> 20) - 8;
    let mut neighbour = Command::new(PROGRAM)
        .args(["hold", "neighbour", "--class", "audio-realtime"])
        .args(["--min", &format!("{mib}MiB"), "--wait", "20s", "--endpoint"])
        .arg(format!("unix://{}", installation.socket().display()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(neighbour.stdout.take().unwrap()).lines();
    let line = lines.next_line().await.unwrap();
    assert!(line.unwrap().starts_with("holds "));
    neighbour
}

const BUDGET_MIB: u32 = 320;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateways_send_requests_to_the_daemon_that_is_whole() {
    let [venv, models] = ["COTENANT_GATEWAYS_VENV", "COTENANT_MODELS"]
        .map(|name| std::env::var_os(name).map(PathBuf::from));
    let (Some(venv), Some(models)) = (venv, models) else {
        println!(
            "left out: COTENANT_GATEWAYS_VENV is not set; `tests/run clients` prepares it and the models"
        );
        return;
    };
    let sections = format!(
        "{}llm: {{path: {}, name: demo, threads: 1, context: 1024, kv_floor: 128, conversations: 0}}\n",
        budget(BUDGET_MIB),
        models.join("SmolLM2-135M-Instruct.Q4_1.gguf").display()
    );
    for kind in ["litellm", "vllm-router"] {
        let mut installations = [(); 2].map(|()| Installation::new(&sections));
        for installation in &mut installations {
            installation.prefer_release();
        }
        let [one, other] = &installations;
        let (first, second) = tokio::join!(one.start(), other.start());
        tokio::join!(first.whole(), second.whole());
        for daemon in [&first, &second] {
            daemon.until("its speed is known", speed_is_known).await;
        }
        let mut gateway = Gateway::start(&venv, kind, [&first, &second]).await;
        gateway.asks(20).await;

        // The one that a gateway prefers is squeezed to its floor.
        let [by_first, by_second] = answered([&first, &second]).await;
        let (one, one_runs, other_runs) = if by_first >= by_second {
            (one, first, second)
        } else {
            (other, second, first)
        };
        let daemons = [&one_runs, &other_runs];
        let mut neighbour = squeeze(one, &one_runs).await;
        // A gateway that looks each second at the health has seen it.
        tokio::time::sleep(std::time::Duration::from_secs(3)).await;
        let share = share_of_other(&mut gateway, daemons, 60).await;
        println!("{kind}: squeezed, {:.0} % to the other", 100.0 * share);
        assert!(share >= 0.8, "{kind}: {share} of requests");

        // Its memory is shed and returned while it answers: it gets more or fewer requests, and none fails.
        neighbour.kill().await.unwrap();
        one_runs.whole().await;
        let sheds = async {
            for _ in 0..10 {
                for command in [&["shed", "64MiB"][..], &["regrow"]] {
                    let _refused_at_times = tokio::task::block_in_place(|| one.run(command));
                    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
                }
            }
        };
        tokio::join!(gateway.asks(20), sheds);

        // Drained and ended while it answers, and back on the same address.
        let drain = async {
            tokio::time::sleep(std::time::Duration::from_millis(500)).await;
            tokio::task::block_in_place(|| one.tell(&["drain", "--wait", "60s"]));
        };
        tokio::join!(gateway.asks(20), drain);
        let share = share_of_other(&mut gateway, daemons, 20).await;
        println!("{kind}: drained, {:.0} % to the other", 100.0 * share);
        assert_eq!(share, 1.0, "{kind}");
        one.configure_with_http(&sections, &one_runs.http.to_string());
        let upgrade = async {
            one_runs.end().await;
            one.start().await
        };
        let ((), one_runs) = tokio::join!(gateway.asks(20), upgrade);
        one_runs.whole().await;
        gateway.asks(20).await;
        let counts = answered([&one_runs, &other_runs]).await;
        println!("{kind}: upgraded, {counts:?} answers in all");
        gateway.end().await;
        for daemon in [one_runs, other_runs] {
            daemon.end().await;
        }
    }
}
