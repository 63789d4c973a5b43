//! State that a killed daemon leaves to the next one.

use std::{fs, process::Command};

use cotenant::rpc::v1::{
    CreateLeaseRequest, Lease, LeaseClass, LeaseKind, LeaseState, ListLeasesRequest,
    ReleaseLeaseRequest, RenewLeaseRequest,
};
use nix::sys::signal::{Signal, kill};
use tonic::Code;

use super::frozen::Frozen;
use super::installation::{
    Daemon, Installation, PROGRAM, anonymous, ballast, budget, demo_model, pid_of, pids, worker,
    workers_ready,
};
use crate::support::{PATIENCE, eventually, runs};

async fn lease(daemon: &Daemon<'_>, tenant: &str, mib: u64, seconds: i64) -> Lease {
    let asked = CreateLeaseRequest {
        request_id: format!("{tenant} asks"),
        tenant: tenant.to_owned(),
        lease_class: LeaseClass::Interactive.into(),
        min_bytes: mib << 20,
        max_bytes: mib << 20,
        term: Some(prost_types::Duration { seconds, nanos: 0 }),
        max_wait: None,
        kind: LeaseKind::Unspecified.into(),
        validate_only: false,
        cgroup: String::new(),
    };
    let granted = daemon
        .leases()
        .create_lease(asked)
        .await
        .unwrap()
        .into_inner();
    granted.lease.unwrap()
}

fn renewal(lease: &Lease) -> RenewLeaseRequest {
    RenewLeaseRequest {
        name: lease.name.clone(),
        boot_id: lease.boot_id.clone(),
        generation: lease.generation,
    }
}

async fn held(daemon: &Daemon<'_>) -> Vec<(String, u64)> {
    let listed = daemon
        .leases()
        .list_leases(ListLeasesRequest::default())
        .await
        .unwrap();
    let leases = listed.into_inner().leases.into_iter();
    leases
        .filter(|lease| lease.state() != LeaseState::Gone)
        .map(|lease| (lease.tenant, lease.held_bytes >> 20))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_go_on_for_a_term_and_those_that_have_ended_stay_so() {
    let installation = Installation::new(&budget(64));
    let daemon = installation.start().await;
    let kept = lease(&daemon, "kept", 24, 20).await;
    let silent = lease(&daemon, "silent", 8, 2).await;
    let released = lease(&daemon, "released", 4, 20).await;
    let release = ReleaseLeaseRequest {
        name: released.name.clone(),
        boot_id: released.boot_id.clone(),
        generation: released.generation,
    };
    daemon.leases().release_lease(release).await.unwrap();
    daemon.kill();

    let daemon = installation.start().await;
    // From the first reply on, granted memory is not granted again.
    assert_eq!(
        held(&daemon).await,
        [("kept".to_owned(), 24), ("silent".to_owned(), 8)]
    );
    let renewed = daemon
        .leases()
        .renew_lease(renewal(&kept))
        .await
        .unwrap()
        .into_inner();
    let renewed = renewed.lease.unwrap();
    assert_eq!(
        (&renewed.name, renewed.generation),
        (&kept.name, kept.generation)
    );
    assert_ne!(
        renewed.boot_id, kept.boot_id,
        "from now on it belongs to this run"
    );
    for (what, lease) in [
        ("released", &released),
        (
            "unknown",
            &Lease {
                name: "kept#77".to_owned(),
                ..kept.clone()
            },
        ),
    ] {
        let refused = daemon
            .leases()
            .renew_lease(renewal(lease))
            .await
            .unwrap_err();
        assert_eq!(refused.code(), Code::NotFound, "{what}: {refused}");
    }
    let stale = Lease {
        generation: kept.generation + 1,
        ..kept.clone()
    };
    daemon
        .leases()
        .renew_lease(renewal(&stale))
        .await
        .unwrap_err();
    let foreign = Lease {
        boot_id: "another".to_owned(),
        ..kept.clone()
    };
    let refused = daemon
        .leases()
        .renew_lease(renewal(&foreign))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    // A lease that is not renewed expires by its term, and does not return.
    tokio::time::timeout(PATIENCE, async {
        while held(&daemon).await.len() > 1 {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    })
    .await
    .unwrap();
    daemon
        .leases()
        .renew_lease(renewal(&silent))
        .await
        .unwrap_err();
    // An identical request is the same lease, also in the second run after the grant.
    daemon.kill();
    let daemon = installation.start().await;
    let again = lease(&daemon, "kept", 24, 20).await;
    assert_eq!(
        (&again.name, again.generation),
        (&kept.name, kept.generation)
    );
    daemon.leases().renew_lease(renewal(&kept)).await.unwrap();
    daemon
        .leases()
        .renew_lease(renewal(&silent))
        .await
        .unwrap_err();
    // New leases get new numbers.
    let new = lease(&daemon, "new", 4, 20).await;
    assert!(new.generation > kept.generation && new.name != silent.name);
    daemon.end().await;
    // A clean end does not revoke tenants' leases.
    let daemon = installation.start().await;
    assert_eq!(
        held(&daemon).await,
        [("kept".to_owned(), 24), ("new".to_owned(), 4)]
    );
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_ends_after_it_was_taken_over_is_noticed_and_started_again() {
    let installation = Installation::new(&format!("{}workers:\n{}", budget(64), ballast()));
    let daemon = installation.start().await;
    let before = pids(&daemon.until("ready", workers_ready).await);
    daemon.kill();
    let daemon = installation.start().await;
    assert_eq!(pids(&daemon.until("ready", workers_ready).await), before);
    kill(pid_of(before[0]), Signal::SIGKILL).unwrap();
    let status = daemon
        .until("another one is ready", |status| {
            workers_ready(status) && pids(status) != before
        })
        .await;
    let ballast = worker(&status, "ballast");
    assert_eq!((ballast.starts, ballast.failures), (2, 1));
    assert!(
        ballast
            .last_exit
            .contains("an exit status that the supervisor could not read"),
        "{}",
        ballast.last_exit
    );
    // Its certificate is written like any other.
    let certificates = installation.json(&["postmortem", "ballast"]);
    let certificate = &certificates[0];
    assert_eq!(certificate["pid"], before[0]);
    let took_us = certificate["tookUs"].as_u64().unwrap();
    assert!(took_us < 200_000, "{took_us} µs");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_whose_configuration_has_changed_is_ended_and_started_again() {
    let installation = Installation::new(&format!("{}workers:\n{}", budget(64), ballast()));
    let daemon = installation.start().await;
    let before = pids(&daemon.until("ready", workers_ready).await);
    daemon.kill();
    assert!(runs(before[0]));
    installation.configure(&format!(
        "{}workers:\n{}",
        budget(64),
        ballast().replace("2MiB]", "3MiB]")
    ));
    let daemon = installation.start().await;
    eventually("the one before has ended", || !runs(before[0])).await;
    let status = daemon.until("ready", workers_ready).await;
    assert_ne!(pids(&status), before);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_writes_on_while_its_output_is_not_read_and_the_next_supervisor_reads_it() {
    let installation = Installation::new(&format!(
        "{}workers:\n  - {{name: talker, role: other, argv: [sh, -c, 'echo up; while sleep 0.02; do echo tick 1>&2; done'], ready: {{kind: log, text: up}}, memory: {{steady: 8MiB}}}}\n",
        budget(64)
    ));
    let daemon = installation.start().await;
    let before = pids(&daemon.until("ready", workers_ready).await);
    daemon.kill();
    let log = installation.log().len();
    let daemon = installation.start().await;
    // Ready at once, although the previous supervisor had consumed its line.
    assert_eq!(pids(&daemon.until("ready", workers_ready).await), before);
    eventually("it is heard again", || {
        installation.log()[log..].contains("tick")
    })
    .await;
    assert_eq!(pids(&daemon.status().await), before);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_whose_only_sign_may_have_been_read_before_is_not_ended_for_want_of_it() {
    let installation = Installation::new(&format!(
        "{}workers:\n{}",
        budget(64),
        ballast().replace("timeout: 20s", "timeout: 2s")
    ));
    let daemon = installation.start().await;
    let before = pids(&daemon.until("ready", workers_ready).await);
    daemon.kill();
    // Killed after it had read the line, but before it had recorded that.
    fs::remove_file(installation.path("run/book")).unwrap();
    let daemon = installation.start().await;
    assert_eq!(pids(&daemon.until("ready", workers_ready).await), before);
    eventually("it counts as ready", || {
        installation.log().contains("assumed ready")
    })
    .await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_loop_sheds_and_is_restarted_with_its_workers() {
    let installation = Installation::new(&format!(
        "{}{}workers:\n{}",
        budget(128),
        demo_model(16_384),
        ballast()
    ));
    let daemon = installation.start().await;
    let workers = pids(&daemon.whole().await);
    // Calibration made the engine release a part of its layers.
    daemon
        .until("it has measured itself", |status| {
            let engine = status.engine.as_ref();
            engine.is_some_and(|engine| engine.milli_tokens_per_second > 0)
        })
        .await;
    let (pid, full) = (daemon.pid(), anonymous(daemon.pid()));
    // A loop that resumes in time continues, and regrows the shed memory.
    let frozen = Frozen::thread(pid, "control");
    eventually("the stall is noticed", || {
        installation.log().contains("has not run for 1.75 s")
    })
    .await;
    // Its layers; the KV cache is mostly untouched.
    eventually("the engine has shed without the loop", || {
        anonymous(pid) + (3 << 20) < full
    })
    .await;
    assert!(
        !installation.log().contains("runs again"),
        "the loop had no part in it"
    );
    frozen.thaw();
    eventually("it runs again", || {
        installation.log().contains("runs again")
    })
    .await;
    daemon.whole().await;
    // A loop that does not resume ends the daemon, and nothing else.
    let frozen = Frozen::thread(pid, "control");
    let code = daemon.ends().code();
    frozen.thaw();
    assert_eq!(code, Some(70), "{}", installation.log());
    assert!(workers.iter().all(|pid| runs(*pid)));
    let daemon = installation.start().await;
    assert_eq!(pids(&daemon.whole().await), workers);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_of_ours_that_is_never_taken_over_gives_its_memory_back() {
    let installation = Installation::new(&format!(
        "{}workers:\n{}    env: {{COTENANT_ALONE_MS: '5000'}}\n",
        budget(64),
        ballast()
    ));
    let daemon = installation.start().await;
    let workers = pids(&daemon.until("ready", workers_ready).await);
    // An intermediate daemon keeps it.
    daemon.kill();
    let daemon = installation.start().await;
    assert_eq!(pids(&daemon.until("ready", workers_ready).await), workers);
    daemon.kill();
    eventually("it has ended by itself", || {
        !workers.iter().any(|pid| runs(*pid))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_is_started_again_after_the_program_was_replaced() {
    let mut installation = Installation::new(&format!("{}workers:\n{}", budget(64), ballast()));
    let program = installation.path("program");
    // By another process: a file that is open for writing in this one cannot be executed.
    let copy = || {
        let copied = Command::new("cp")
            .arg(PROGRAM)
            .arg(&program)
            .status()
            .unwrap();
        assert!(copied.success());
    };
    copy();
    program
        .display()
        .to_string()
        .clone_into(&mut installation.program);
    let daemon = installation.start().await;
    let before = pids(&daemon.until("ready", workers_ready).await);
    fs::remove_file(&program).unwrap();
    copy();
    kill(pid_of(before[0]), Signal::SIGKILL).unwrap();
    daemon
        .until("another one is ready", |status| {
            workers_ready(status) && pids(status) != before
        })
        .await;
    daemon.end().await;
}
