//! The single-file Python helper, with the example of `docs/clients/leases.md`.

use std::{path::Path, process::Stdio};

use cotenant::rpc::v1::{CreateLeaseRequest, LeaseClass};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
};

use super::installation::{Installation, budget};
use crate::support::PATIENCE;

const MIB: u64 = 1 << 20;

const EXAMPLE: &str = include_str!("../../clients/lease_example.py");
const DOCUMENT: &str = include_str!("../../../docs/clients/leases.md");

/// Refused with its reason; granted, resized, released.
const SHORT: &str = r#"
import cotenant
try:
    with cotenant.lease("huge", min="900GiB"):
        pass
except cotenant.Refused as error:
    print(error.reason, error.retry_after)
with cotenant.lease("small", min="4MiB") as lease:
    print(lease.held_bytes, lease.resize("6MiB"), lease.ended)
print(lease.ended)
"#;

/// Silence for nearly a whole term; renewals are due each third.
const AWAY: &str = r#"
import queue, time
import cotenant
lease = cotenant.Lease("away", min="4MiB", term=3000, endpoint="unix:///nowhere")
lease.name, lease.boot_id, lease.generation = "away#1", "boot", 1
lease._say = say = queue.Queue()
lease._heard = time.monotonic() - 3000 + 0.2
lease._pulse()
print(lease.ended, say.qsize())
"#;

/// No server answers: one stream after another ends at once.
const STREAMS: &str = r#"
import threading, time
import cotenant
lease = cotenant.Lease("away", min="4MiB", term=300, endpoint="unix:///nowhere")
lease.name, lease.boot_id, lease.generation = "away#1", "boot", 1
lease._heard = time.monotonic()
streams, renew, enough = [], lease._renew, threading.Event()
def counted(say, answer=b""):
    streams.append(say)
    renew(say, answer)
    if len(streams) == 4:
        enough.set()
lease._renew = counted
hold = threading.Thread(target=lease._hold)
hold.start()
enough.wait()
pulses = lambda: [thread for thread in threading.enumerate() if thread.name == "cotenant pulse"]
print(len({id(say) for say in streams}), len(pulses()))
lease._end("enough")
hold.join()
for pulse in pulses():
    pulse.join()
print(lease.ended)
"#;

fn python(installation: &Installation) -> Option<Command> {
    let Ok(venv) = std::env::var("COTENANT_CLIENTS_VENV") else {
        println!("left out: COTENANT_CLIENTS_VENV is not set; tests/run sets it");
        return None;
    };
    let mut command = Command::new(Path::new(&venv).join("bin/python"));
    command
        .env(
            "PYTHONPATH",
            concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/python"),
        )
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env(
            "COTENANT_ENDPOINT",
            format!("unix://{}", installation.socket().display()),
        )
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    Some(command)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lease_in_python_shrinks_when_reported_and_ends_when_the_supervisor_stays_away() {
    assert!(
        DOCUMENT.contains(EXAMPLE),
        "the document shows another example than the one that is tested"
    );
    let installation = Installation::new(&budget(220));
    let (Some(mut short), Some(mut example)) = (python(&installation), python(&installation))
    else {
        return;
    };
    let daemon = installation.start().await;
    let output = tokio::time::timeout(PATIENCE, short.args(["-c", SHORT]).output()).await;
    let output = output.unwrap().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "EXCEEDS_BUDGET None\n4194304 6291456 None\ngiven back\n"
    );
    daemon
        .until("its leases are gone", |status| status.leases.is_empty())
        .await;

    example.arg(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/clients/lease_example.py"
    ));
    let mut example = example.spawn().unwrap();
    let mut lines = BufReader::new(example.stdout.take().unwrap()).lines();
    let mut next = async || {
        tokio::time::timeout(PATIENCE, lines.next_line())
            .await
            .unwrap()
            .unwrap()
            .unwrap()
    };
    assert_eq!(next().await, format!("holds {}", 140 * MIB));
    // Its stream keeps the lease for more than a term.
    daemon
        .until("it is measured", |status| {
            status
                .leases
                .iter()
                .any(|lease| lease.used_bytes() > 75 * MIB)
        })
        .await;
    let asked = CreateLeaseRequest {
        request_id: "camera".to_owned(),
        tenant: "camera".to_owned(),
        lease_class: LeaseClass::Interactive.into(),
        min_bytes: 130 * MIB,
        max_wait: Some(prost_types::Duration {
            seconds: 10,
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
    assert!(
        next()
            .await
            .starts_with(&format!("shrink to {} since ", 90 * MIB))
    );
    daemon.kill();
    let away = "the supervisor has been away for longer than the term of 2 s";
    assert_eq!(next().await, format!("shrink to 0 since {away}"));
    assert_eq!(next().await, format!("over: {away}"));
    assert!(example.wait().await.unwrap().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_in_python_is_over_with_its_term_and_not_at_the_next_renewal() {
    let installation = Installation::new(&budget(64));
    let Some(mut away) = python(&installation) else {
        return;
    };
    let output = tokio::time::timeout(PATIENCE, away.args(["-c", AWAY]).output()).await;
    assert_eq!(
        String::from_utf8_lossy(&output.unwrap().unwrap().stdout),
        "the supervisor has been away for longer than the term of 3000 s 1\n",
        "nothing but the end of the stream is said"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_in_python_has_one_pulse_however_many_streams_it_has_tried() {
    let installation = Installation::new(&budget(64));
    let Some(mut away) = python(&installation) else {
        return;
    };
    let output = tokio::time::timeout(PATIENCE, away.args(["-c", STREAMS]).output()).await;
    assert_eq!(
        String::from_utf8_lossy(&output.unwrap().unwrap().stdout),
        "4 1\nenough\n"
    );
}
