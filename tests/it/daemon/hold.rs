//! `cotenant hold`: a lease for a program that knows nothing of leases.

use std::process::Stdio;

use cotenant::rpc::v1::{CreateLeaseRequest, LeaseClass};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
};

use super::{
    house::{House, PROGRAM, budget, said},
    pressure::compiled,
};
use crate::support::{PATIENCE, eventually, runs};

const MIB: u64 = 1 << 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_under_a_lease_sheds_when_told_and_ends_when_the_supervisor_stays_away() {
    let house = House::new(&budget(220));
    let program = house.path("pressure_worker");
    if !compiled(&program) {
        return;
    }
    let daemon = house.start().await;
    let mut holder = Command::new(PROGRAM)
        .args([
            "hold", "vision", "--min", "60MiB", "--max", "140MiB", "--class", "batch", "--term", "2s",
        ])
        .arg("--endpoint")
        .arg(format!("unix://{}", house.socket().display()))
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
    // The program's own output goes through.
    let first = tokio::time::timeout(PATIENCE, output.next_line()).await;
    assert!(first.unwrap().unwrap().unwrap().starts_with("holding"));
    let status = daemon
        .until("it is measured with its program", |status| {
            status.leases.iter().any(|lease| lease.used_bytes() >= 100 * MIB)
        })
        .await;
    assert_eq!(status.leases.len(), 1, "{status:?}");

    let asked = CreateLeaseRequest {
        request_id: "camera".to_owned(),
        tenant: "camera".to_owned(),
        lease_class: LeaseClass::Interactive.into(),
        min_bytes: 130 * MIB,
        max_wait: Some(prost_types::Duration { seconds: 20, nanos: 0 }),
        ..CreateLeaseRequest::default()
    };
    let granted = daemon.leases().create_lease(asked).await.unwrap().into_inner();
    assert_eq!(granted.lease.unwrap().held_bytes, 130 * MIB);
    assert!(next().await.starts_with("come down to 90 MiB within "));
    let down = next().await;
    assert!(down.starts_with("down to "), "{down}");
    assert_eq!(next().await.split(" as ").next(), Some("holds 90 MiB"));

    let pid = holder.id().unwrap();
    let child = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok();
    daemon.kill();
    assert_eq!(next().await, "over: the supervisor is away, and the term of 2s ends");
    assert_eq!(holder.wait().await.unwrap().code(), Some(4));
    // Where the kernel tells of children, the program is gone with it.
    if let Some(child) = child.and_then(|text| text.trim().parse::<u32>().ok()) {
        eventually("the program has ended", || !runs(child)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_ends_with_its_program_which_tells_the_code_and_a_refusal_starts_nothing() {
    let house = House::new(&budget(64));
    let daemon = house.start().await;
    let output = house.run(&[
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
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{}\n", 8 * MIB));
    daemon
        .until("its lease is gone", |status| status.leases.is_empty())
        .await;
    let output = house.run(&["hold", "huge", "--min", "900GiB", "--", "echo", "started"]);
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    assert!(said(&output).contains("64 MiB"), "{}", said(&output));
    let output = house.run(&["hold", "lost", "--min", "8MiB", "--", "/no/such/program"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    daemon
        .until("its lease is gone", |status| status.leases.is_empty())
        .await;
}
