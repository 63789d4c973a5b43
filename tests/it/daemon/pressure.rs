//! A forty-line program that releases memory on notification without our code, and one that does not.

use std::{path::Path, process::Command};

use cotenant::rpc::v1::{CreateLeaseRequest, Lease, LeaseClass, WorkerState};

use super::installation::{Daemon, Installation, anonymous, budget, worker};

const MIB: u64 = 1 << 20;

/// Memory kept by the worker, and memory that it can release.
const KEPT: u64 = 20;
const SPARE: u64 = 80;

/// Builds the program; returns `false` without a C compiler.
pub(super) fn compiled(at: &Path) -> bool {
    let source = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/clients/pressure_worker.c"
    );
    let mut command = Command::new("cc");
    match command
        .args(["-O1", "-Wall", "-Werror", "-o"])
        .arg(at)
        .arg(source)
        .status()
    {
        Ok(status) => {
            assert!(status.success(), "cc: {status}");
            true
        }
        Err(error) => {
            println!("left out: cc: {error}");
            false
        }
    }
}

/// Creates an installation with one worker in a budget of 160 MiB; `None` without a C compiler.
fn installation(watch: &str, deaf: &str) -> Option<Installation> {
    let installation = Installation::new("");
    let program = installation.path("pressure_worker");
    installation.configure(&format!(
        "{}workers:
  - name: cache
    role: other
    argv: [{}, \"{KEPT}\", \"{SPARE}\"{deaf}]
    ready: {{kind: log, text: holding, timeout: 20s}}
    restart: {{backoff: 50ms}}
    memory: {{steady: 110MiB, peak: 110MiB}}
    pressure: {{watch: {watch}, shrinks_to: 30MiB}}
",
        budget(160),
        program.display(),
    ));
    compiled(&program).then_some(installation)
}

async fn ready(daemon: &Daemon<'_>) -> u32 {
    let status = daemon
        .until("the worker holds what it uses", |status| {
            let used = status.leases.iter().find(|lease| lease.tenant == "cache");
            worker(status, "cache").state() == WorkerState::Ready
                && used.is_some_and(|lease| lease.used_bytes() >= (KEPT + SPARE) * MIB)
        })
        .await;
    worker(&status, "cache").pid()
}

/// Requests more than is free.
async fn ask(daemon: &Daemon<'_>) -> Lease {
    let asked = CreateLeaseRequest {
        request_id: "camera".to_owned(),
        tenant: "camera".to_owned(),
        lease_class: LeaseClass::Interactive.into(),
        min_bytes: 100 * MIB,
        max_wait: Some(prost_types::Duration {
            seconds: 20,
            nanos: 0,
        }),
        term: Some(prost_types::Duration {
            seconds: 60,
            nanos: 0,
        }),
        ..CreateLeaseRequest::default()
    };
    let granted = daemon.leases().create_lease(asked).await.unwrap();
    granted.into_inner().lease.unwrap()
}

async fn sheds_when_it_is_notified(watch: &str) {
    let Some(installation) = installation(watch, "") else {
        return;
    };
    let daemon = installation.start().await;
    let pid = ready(&daemon).await;
    assert!(anonymous(pid) >= (KEPT + SPARE) * MIB);
    let lease = ask(&daemon).await;
    // Measured by the kernel at the time of the grant.
    assert!(anonymous(pid) < (KEPT + 8) * MIB, "{}", anonymous(pid));
    let status = daemon.status().await;
    assert_eq!(worker(&status, "cache").pid(), pid, "it was not stopped");
    let cache = status
        .leases
        .iter()
        .find(|lease| lease.tenant == "cache")
        .unwrap();
    assert!(cache.held_bytes <= 32 * MIB, "{cache:?}");
    assert!(
        installation.events().contains("cache#") && installation.events().contains("verified"),
        "{}",
        installation.events()
    );
    // When memory is free again, it may reallocate.
    installation.tell(&["leases", "release", &lease.name]);
    daemon
        .until("its space is booked again", |status| {
            let cache = status.leases.iter().find(|lease| lease.tenant == "cache");
            cache.is_some_and(|lease| lease.held_bytes == 110 * MIB)
        })
        .await;
    daemon.end().await;
    assert!(
        installation
            .replay()
            .trim_end()
            .ends_with("identical decisions"),
        "{}",
        installation.replay()
    );
    assert!(!installation.path("run/cache.pressure").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_c_program_that_watches_a_fifo_sheds_when_it_is_notified() {
    sheds_when_it_is_notified("fifo").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_c_program_that_watches_a_socket_sheds_when_it_is_notified() {
    sheds_when_it_is_notified("socket").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_gives_nothing_back_is_named_never_credited_and_stopped() {
    let Some(installation) = installation("fifo", ", deaf") else {
        return;
    };
    let daemon = installation.start().await;
    let pid = ready(&daemon).await;
    let lease = ask(&daemon).await;
    assert_eq!(lease.held_bytes, 100 * MIB);
    let events = installation.events();
    let named = events.lines().find(|line| line.contains("did not shrink"));
    let named = named.unwrap_or_else(|| panic!("it is not named: {events}"));
    assert!(named.contains(&format!("(pid {pid})")), "{named}");
    assert!(
        !events.contains("verified"),
        "nothing was credited: {events}"
    );
    let status = daemon.status().await;
    assert_ne!(worker(&status, "cache").pid, Some(pid), "it was stopped");
    daemon.end().await;
}
