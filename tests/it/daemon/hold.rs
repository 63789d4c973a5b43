//! `cotenant hold`: a lease for a program unaware of leases.

use std::process::Stdio;

use cotenant::{
    probe::processes::ProcessTable,
    rpc::v1::{CreateLeaseRequest, LeaseClass},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
};

use super::{
    installation::{Installation, PROGRAM, budget, said},
    pressure::compiled,
};
use crate::support::{PATIENCE, eventually, runs};

const MIB: u64 = 1 << 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_under_a_lease_sheds_when_reported_and_ends_when_the_supervisor_stays_away() {
    let installation = Installation::new(&budget(220));
    let program = installation.path("pressure_worker");
    if !compiled(&program) {
        return;
    }
    let daemon = installation.start().await;
    let mut holder = Command::new(PROGRAM)
        .args([
            "hold", "vision", "--min", "60MiB", "--max", "140MiB", "--class", "batch", "--term",
            "2s",
        ])
        .arg("--endpoint")
        .arg(format!("unix://{}", installation.socket().display()))
        .arg("--")
        .arg(&program)
        .args(["20", "80"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut output = BufReader::new(holder.stdout.take().unwrap()).lines();
    let mut lines = BufReader::new(holder.stderr.take().unwrap()).lines();
    let mut next = async || {
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
        line.unwrap().unwrap().unwrap()
    };
    assert!(next().await.starts_with("holds 140 MiB as `vision#"));
    // The program's own output is passed through.
    let first = tokio::time::timeout(PATIENCE, output.next_line()).await;
    assert!(first.unwrap().unwrap().unwrap().starts_with("holding"));
    let status = daemon
        .until("it is measured with its program", |status| {
            status
                .leases
                .iter()
                .any(|lease| lease.used_bytes() >= 100 * MIB)
        })
        .await;
    assert_eq!(status.leases.len(), 1, "{status:?}");

    let asked = CreateLeaseRequest {
        request_id: "camera".to_owned(),
        tenant: "camera".to_owned(),
        lease_class: LeaseClass::Interactive.into(),
        min_bytes: 130 * MIB,
        max_wait: Some(prost_types::Duration {
            seconds: 20,
            nanos: 0,
        }),
        ..CreateLeaseRequest::default()
    };
    let granted = daemon
        .leases()
        .create_lease(asked)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(granted.lease.unwrap().held_bytes, 130 * MIB);
    assert!(next().await.starts_with("shrink to 90 MiB within "));
    let down = next().await;
    assert!(down.starts_with("shrunk to "), "{down}");
    assert_eq!(next().await.split(" as ").next(), Some("holds 90 MiB"));

    let pid = holder.id().unwrap();
    let child = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok();
    daemon.kill();
    assert_eq!(
        next().await,
        "over: the supervisor is unreachable, and the term of 2 s expires"
    );
    assert_eq!(holder.wait().await.unwrap().code(), Some(4));
    // On kernels that list children, check that the program has ended too.
    if let Some(child) = child.and_then(|text| text.trim().parse::<u32>().ok()) {
        eventually("the program has ended", || !runs(child)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_ends_with_its_program_which_tells_the_code_and_a_refusal_starts_nothing() {
    let installation = Installation::new(&budget(64));
    let daemon = installation.start().await;
    let output = installation.run(&[
        "hold",
        "short",
        "--min",
        "8MiB",
        "--",
        "sh",
        "-c",
        "echo $COTENANT_LEASE_BYTES; exit 7",
    ]);
    assert_eq!(output.status.code(), Some(7), "{}", said(&output));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        format!("{}\n", 8 * MIB)
    );
    daemon
        .until("its lease is gone", |status| status.leases.is_empty())
        .await;
    let output = installation.run(&["hold", "huge", "--min", "900GiB", "--", "echo", "started"]);
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    assert!(said(&output).contains("64 MiB"), "{}", said(&output));
    let output = installation.run(&["hold", "lost", "--min", "8MiB", "--", "/no/such/program"]);
    assert_eq!(output.status.code(), Some(127), "{}", said(&output));
    daemon
        .until("its lease is gone", |status| status.leases.is_empty())
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_lasts_as_long_as_anything_that_its_program_has_started() {
    let installation = Installation::new(&budget(128));
    let daemon = installation.start().await;
    let output = installation.run(&[
        "hold",
        "short",
        "--min",
        "8MiB",
        "--",
        "sh",
        "-c",
        "(setsid sleep 0.5 &); exit 7",
    ]);
    assert_eq!(output.status.code(), Some(7), "{}", said(&output));
    assert!(
        said(&output).contains("the lease continues for 1 of its processes"),
        "{}",
        said(&output)
    );

    let hidden = format!(
        "(env -i setsid {PROGRAM} worker ballast 24MiB >/dev/null 2>&1 </dev/null &); exit 7"
    );
    let mut holder = Command::new(PROGRAM)
        .args(["hold", "hiding", "--min", "40MiB"])
        .arg("--endpoint")
        .arg(format!("unix://{}", installation.socket().display()))
        .args(["--", "sh", "-c", &hidden])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    daemon
        .until(
            "what the program has left is measured under its lease",
            |status| {
                status
                    .leases
                    .iter()
                    .any(|lease| lease.used_bytes() >= 24 * MIB)
            },
        )
        .await;
    let pid = holder.id().unwrap();
    let table = ProcessTable::read("/proc".as_ref()).unwrap();
    let hidden: Vec<u32> = table
        .tree(pid)
        .into_iter()
        .filter(|member| *member != pid)
        .collect();
    assert_eq!(hidden.len(), 1, "{hidden:?}");
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGTERM).unwrap();
    assert_eq!(holder.wait().await.unwrap().code(), Some(143));
    assert!(!runs(hidden[0]), "it ends with the lease");
    daemon
        .until("the lease is gone", |status| status.leases.is_empty())
        .await;
}

/// A second instance of a program that waits for the memory of the first, or of any other holder, is not measured as
/// the first: while it waits, its memory belongs to no lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_by_a_name_is_not_measured_as_its_holder() {
    let installation = Installation::new(&budget(128));
    let daemon = installation.start().await;
    // It reaches any target at once, since it uses very little.
    let mut holder = Command::new(PROGRAM)
        .args([
            "hold", "vision", "--min", "30MiB", "--max", "110MiB", "--class", "batch",
        ])
        .arg("--endpoint")
        .arg(format!("unix://{}", installation.socket().display()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines();
    let first = tokio::time::timeout(PATIENCE, lines.next_line()).await;
    assert!(
        first
            .unwrap()
            .unwrap()
            .unwrap()
            .starts_with("holds 110 MiB as `vision#"),
        "granted"
    );
    let filled = vec![1u8; 160 << 20];
    let asked = CreateLeaseRequest {
        request_id: "second".to_owned(),
        tenant: "vision".to_owned(),
        lease_class: LeaseClass::Batch.into(),
        min_bytes: 120 * MIB,
        max_wait: Some(prost_types::Duration {
            seconds: 60,
            nanos: 0,
        }),
        ..CreateLeaseRequest::default()
    };
    let mut leases = daemon.leases();
    let waiting = tokio::spawn(async move { leases.create_lease(asked).await });
    daemon
        .until("the second one waits", |status| {
            status.waiting_requests == 1
        })
        .await;
    // A request for half of the first lease is granted as soon as the holder has shrunk.
    installation.tell(&[
        "hold",
        "voice",
        "--min",
        "60MiB",
        "--class",
        "audio-realtime",
        "--wait",
        "20s",
        "--timeout",
        "25s",
        "--",
        "true",
    ]);
    let status = daemon.status().await;
    let first: Vec<_> = status
        .leases
        .iter()
        .filter(|lease| lease.tenant == "vision" && lease.held_bytes > 0)
        .collect();
    // The lease of `voice` may still be there: it holds its bytes until they are measured to be back.
    assert_eq!(first.len(), 1, "it has its lease: {status:?}");
    assert!(
        first[0].held_bytes <= 68 * MIB && first[0].used_bytes() < 68 * MIB,
        "{first:?}"
    );
    assert!(
        installation.events().contains("verified after"),
        "{}",
        installation.events()
    );
    assert_eq!(filled.iter().step_by(4096).count(), 160 << 8);
    waiting.abort();
    let _ = waiting.await;
    daemon.end().await;
    installation.replay();
}
