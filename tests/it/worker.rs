//! Workers as child processes: real programs, real signals, the kernel's figures.

use std::{
    error::Error,
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use cotenant::{
    probe::{
        ProbeRoot,
        processes::{self, ProcessTable},
    },
    units::Bytes,
    worker::{
        confine::Groups,
        handle::{ResizeError, StartError, WorkerState},
        orphans::end_orphans,
        report::{ExitStatus, FailureReason, Intent, MemoryReading, WorkerEventKind},
        spec::{Listen, Readiness},
    },
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UnixListener},
};

use crate::support::{Bench, eventually, runs, speech_is_installed, started};

fn pid_of(pid: u32) -> Pid {
    Pid::from_raw(i32::try_from(pid).unwrap())
}

/// Returns the number after `word` on a line of a worker's output.
fn number_in(lines: &[String], word: &str) -> u32 {
    let line = lines
        .iter()
        .find_map(|line| line.strip_prefix(word))
        .unwrap();
    line.trim().parse().unwrap()
}

#[tokio::test]
async fn a_worker_starts_gets_ready_and_stops() {
    let mut bench = Bench::new();
    let mut spec = bench.silent_spec("ballast", &["${SELF}", "worker", "ballast", "1MiB"]);
    spec.argv[0] = env!("CARGO_BIN_EXE_cotenant").to_owned();
    spec.readiness = Readiness::LogLine("holding".to_owned());
    spec.oom_score_adj = Some(700);
    let worker = bench.handle(spec);
    assert_eq!(worker.state(), WorkerState::Stopped);
    assert!(worker.measure().await.is_none(), "unknown is not zero");
    assert!(
        worker.stop_because(None, "").await.is_none(),
        "it does not run"
    );

    let pid = started(&worker).await;
    assert!(
        matches!(bench.next().await, WorkerEventKind::Starting { pid: started } if started == pid)
    );
    assert!(matches!(bench.next().await, WorkerEventKind::Ready { .. }));
    assert_eq!(worker.state(), WorkerState::Ready { pid });
    let adjustment = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
    assert_eq!(adjustment.trim(), "700");
    assert!(
        matches!(worker.start(None).await, Err(StartError::Running { pid: running, .. }) if running == pid)
    );

    let report = worker.stop_because(None, "").await.unwrap();
    assert_eq!(
        report.status,
        ExitStatus::Code(0),
        "it ends by itself on SIGTERM"
    );
    assert_eq!(report.intended_by_us, Some(Intent::Stop));
    assert!(report.ready_at.is_some());
    assert_eq!(report.stdout, ["taking 1 MiB", "holding 1 MiB"]);
    assert!(matches!(bench.next().await, WorkerEventKind::Exited(_)));
    assert_eq!(worker.state(), WorkerState::Stopped);
    assert!(!runs(pid));

    let again = started(&worker).await;
    assert_ne!(again, pid);
    assert_eq!(worker.starts(), 2);
    assert_eq!(
        worker
            .stop_because(Some(Duration::ZERO), "")
            .await
            .unwrap()
            .status,
        killed()
    );
}

fn killed() -> ExitStatus {
    ExitStatus::Signal {
        signal: 9,
        core_dumped: false,
    }
}

#[tokio::test]
async fn a_worker_that_ignores_sigterm_is_killed_after_its_grace() {
    let bench = Bench::new();
    let mut spec = bench.silent_spec(
        "deaf",
        &[
            "sh",
            "-c",
            "trap '' TERM; echo deaf; while :; do sleep 1000; done",
        ],
    );
    spec.readiness = Readiness::LogLine("deaf".to_owned());
    let worker = bench.handle(spec);
    started(&worker).await;
    let report = worker
        .stop_because(Some(Duration::from_millis(50)), "")
        .await
        .unwrap();
    assert_eq!(report.status, killed());
    assert_eq!(report.intended_by_us, Some(Intent::Stop));
    assert!(
        report
            .to_string()
            .contains("was killed by SIGKILL after the supervisor stopped it"),
        "{report}"
    );
}

#[tokio::test]
async fn a_stopped_worker_still_ends() {
    let bench = Bench::new();
    let worker = bench.handle(bench.silent_spec("paused", &["sleep", "1000"]));
    let pid = started(&worker).await;
    kill(pid_of(pid), Signal::SIGSTOP).unwrap();
    let report = worker
        .stop_because(Some(Duration::from_secs(20)), "")
        .await
        .unwrap();
    assert_eq!(
        report.status,
        ExitStatus::Signal {
            signal: 15,
            core_dumped: false
        }
    );
}

#[tokio::test]
async fn the_children_of_a_worker_end_with_it_wherever_they_hide() {
    let mut bench = Bench::new();
    let script = "sleep 1000 & echo child $!; setsid sleep 1000 & echo escaped $!; echo all; exec sleep 1000";
    let mut spec = bench.silent_spec("family", &["sh", "-c", script]);
    spec.readiness = Readiness::LogLine("all".to_owned());
    let worker = bench.handle(spec);
    let pid = started(&worker).await;
    bench.next().await;
    bench.next().await;

    // Another process kills only the leader.
    kill(pid_of(pid), Signal::SIGKILL).unwrap();
    let WorkerEventKind::Exited(report) = bench.next().await else {
        panic!("an end")
    };
    assert_eq!(report.status, killed());
    assert_eq!(report.intended_by_us, None);
    assert!(
        report
            .to_string()
            .contains("was killed by SIGKILL, sender unknown"),
        "no evidence of exhausted memory: {report}"
    );
    assert_eq!(report.left_behind, 2);
    for word in ["child", "escaped"] {
        assert!(!runs(number_in(&report.stdout, word)), "{word} still runs");
    }
}

#[tokio::test]
async fn an_exit_code_of_137_is_not_a_signal() {
    let mut bench = Bench::new();
    let mut spec = bench.silent_spec(
        "misreporting",
        &[
            "sh",
            "-c",
            "i=0; while [ $i -lt 20 ]; do echo line $i >&2; i=$((i+1)); done; exit 137",
        ],
    );
    spec.log_lines = 3;
    let worker = bench.handle(spec);
    worker.start(None).await.unwrap();
    let report = loop {
        if let WorkerEventKind::Exited(report) = bench.next().await {
            break report;
        }
    };
    assert_eq!(report.status, ExitStatus::Code(137));
    assert!(
        report.to_string().contains("exited with code 137,"),
        "{report}"
    );
    assert_eq!(report.stderr, ["line 17", "line 18", "line 19"]);
}

#[tokio::test]
async fn a_program_that_cannot_be_executed_is_named() {
    let mut bench = Bench::new();
    let not_executable = bench.dir.path().join("notes.txt");
    std::fs::write(&not_executable, "no program").unwrap();
    for (program, expected) in [
        (
            "/nowhere/asr",
            "cannot execute `/nowhere/asr` as worker `gone`",
        ),
        (
            not_executable.to_str().unwrap(),
            "notes.txt` as worker `gone`",
        ),
    ] {
        let worker = bench.handle(bench.silent_spec("gone", &[program]));
        let error = worker.start(None).await.unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.source().is_some());
        let WorkerEventKind::Failed {
            reason: FailureReason::NotStarted { error },
        } = bench.next().await
        else {
            panic!("a failure")
        };
        assert!(
            error.contains(expected) && error.contains("os error"),
            "{error}"
        );
        assert_eq!(worker.state(), WorkerState::Stopped);
    }
}

#[tokio::test]
async fn a_command_line_that_cannot_be_built_starts_nothing() {
    let mut bench = Bench::new();
    let worker = bench.handle(bench.silent_spec("asr", &["asr", "${PORT}"]));
    assert!(matches!(
        worker.start(None).await,
        Err(StartError::Launch { .. })
    ));
    let WorkerEventKind::Failed { reason } = bench.next().await else {
        panic!("a failure")
    };
    assert_eq!(
        reason,
        FailureReason::NotStarted {
            error:
                "cannot build the command line of worker `asr`: `${PORT}` in `${PORT}` has no value"
                    .to_owned()
        }
    );
}

#[tokio::test]
async fn a_worker_that_never_gets_ready_is_stopped_and_says_why() {
    let mut bench = Bench::new();
    let mut spec = bench.spec("silent", &["sleep", "1000"]);
    spec.ready_timeout = Duration::from_millis(100);
    let worker = bench.handle(spec);
    let pid = worker.start(None).await.unwrap();
    bench.next().await;
    let WorkerEventKind::Failed {
        reason: FailureReason::NotReady {
            waited,
            last_attempt,
        },
    } = bench.next().await
    else {
        panic!("a failure")
    };
    assert_eq!(waited, Duration::from_millis(100));
    let last_attempt = last_attempt.unwrap();
    assert!(
        last_attempt.starts_with("cannot connect to `unix://"),
        "{last_attempt}"
    );
    let WorkerEventKind::Exited(report) = bench.next().await else {
        panic!("an end")
    };
    assert_eq!(report.intended_by_us, Some(Intent::NotReady));
    assert_eq!(report.ready_at, None);
    assert!(!runs(pid));
    assert!(!worker.ready().await);
}

#[tokio::test]
async fn a_worker_that_answers_garbage_is_not_ready() {
    let mut bench = Bench::new();
    let mut spec = bench.spec("babbler", &["sleep", "1000"]);
    spec.ready_timeout = Duration::from_secs(1);
    let worker = bench.handle(spec);
    worker.start(None).await.unwrap();
    bench.next().await;
    // The test itself listens in place of the worker.
    let listener = UnixListener::bind(bench.socket("babbler")).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.write_all(b"\x7fELF garbage\n\xff\xff").await;
        }
    });
    let WorkerEventKind::Failed {
        reason: FailureReason::NotReady { last_attempt, .. },
    } = bench.next().await
    else {
        panic!("a failure")
    };
    let last_attempt = last_attempt.unwrap();
    assert!(
        last_attempt
            .contains("does not speak Wyoming: header of a Wyoming message is not a JSON object"),
        "{last_attempt}"
    );
    assert!(matches!(bench.next().await, WorkerEventKind::Exited(_)));
}

#[tokio::test]
async fn an_http_worker_is_ready_once_it_answers_200() {
    let bench = Bench::new();
    let mut spec = bench.silent_spec("whisper", &["sleep", "1000"]);
    spec.listen = Listen::FreePort;
    spec.readiness = Readiness::Http {
        path: "/health".to_owned(),
        status: 200,
    };
    let worker = bench.handle(spec);
    worker.start(None).await.unwrap();
    let address = worker.endpoint().unwrap().to_string();
    let listener = TcpListener::bind(address.trim_start_matches("tcp://"))
        .await
        .unwrap();
    let server = tokio::spawn(async move {
        let mut asked = Vec::new();
        for status in ["503 loading model", "200 OK"] {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let count = stream.read(&mut request).await.unwrap();
            asked.push(String::from_utf8_lossy(&request[..count]).into_owned());
            let reply = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
            stream.write_all(reply.as_bytes()).await.unwrap();
        }
        asked
    });
    assert!(worker.ready().await);
    for request in server.await.unwrap() {
        assert!(request.starts_with("GET /health HTTP/1.1\r\n"), "{request}");
    }
    worker.stop_because(Some(Duration::ZERO), "").await.unwrap();
}

#[tokio::test]
async fn a_worker_does_not_outlive_its_handle() {
    let mut bench = Bench::new();
    let worker = bench.handle(bench.silent_spec("left", &["sh", "-c", "sleep 1000 & wait"]));
    let pid = started(&worker).await;
    drop(worker);
    let report = loop {
        if let WorkerEventKind::Exited(report) = bench.next().await {
            break report;
        }
    };
    assert_eq!(report.intended_by_us, Some(Intent::Abandoned));
    assert!(!runs(pid));
}

#[test]
fn a_worker_does_not_outlive_its_runtime() {
    let bench = Bench::new();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let (worker, pid) = runtime.block_on(async {
        let worker = bench.handle(bench.silent_spec("left", &["sleep", "1000"]));
        let pid = started(&worker).await;
        (worker, pid)
    });
    drop(runtime);
    assert!(!runs(pid));
    drop(worker);
}

#[tokio::test]
async fn the_memory_of_a_worker_is_that_of_its_whole_tree() {
    let bench = Bench::new();
    let program = env!("CARGO_BIN_EXE_cotenant");
    let script = format!("{program} worker ballast 24MiB & {program} worker ballast 8MiB & wait");
    let worker = bench.handle(bench.silent_spec("tree", &["sh", "-c", &script]));
    let pid = started(&worker).await;
    let full = || {
        let proc = Path::new("/proc");
        let table = ProcessTable::read(proc).unwrap();
        processes::sum(proc, table.family(pid)).anonymous >= Some(Bytes::from_mib(32))
    };
    eventually("32 MiB are there", full).await;
    let reading = worker.measure().await.unwrap();
    assert_eq!((reading.sum.processes, reading.sum.by_rss), (3, 0));
    assert!(reading.sum.anonymous.unwrap() >= Bytes::from_mib(32));
    // Memory shared by two processes of one program, possibly most of it, counts once.
    let resident = |pid: i32| {
        let status = procfs::process::Process::new(pid).and_then(|process| process.status());
        Bytes::from_kib(status.unwrap().vmrss.unwrap())
    };
    let children: Vec<i32> = procfs::process::all_processes()
        .unwrap()
        .filter_map(|process| process.ok()?.stat().ok())
        .filter(|stat| stat.ppid == i32::try_from(pid).unwrap())
        .map(|stat| stat.pid)
        .collect();
    assert_eq!(children.len(), 2);
    let all: Bytes = children.into_iter().map(resident).sum();
    assert!(reading.sum.used < all, "{} of {all}", reading.sum.used);
}

#[tokio::test]
async fn a_recogniser_grows_and_gives_back_what_it_took() {
    if !speech_is_installed() {
        return;
    }
    let bench = Bench::new();
    let worker = bench.asr();
    started(&worker).await;
    assert_eq!(worker.variant().as_deref(), Some("grammar"));
    // Anonymous pages: the proportional share of shared ones depends on other users of the library.
    let held = |reading: Option<MemoryReading>| reading.unwrap().sum.anonymous.unwrap();
    let small = held(worker.measure().await);
    assert!(small < Bytes::from_mib(40), "{small}");
    for round in 0..3 {
        let grown = worker.resize("open").await.unwrap();
        assert_eq!(worker.variant().as_deref(), Some("open"));
        let large = held(grown.after);
        assert!(
            large > small + Bytes::from_mib(48),
            "round {round}: from {small} to {large}"
        );
        let shrunk = worker.resize("grammar").await.unwrap();
        let back = held(shrunk.after);
        println!("round {round}: {small} -> {large} -> {back}");
        assert!(
            back < small + Bytes::from_mib(2),
            "round {round}: from {small} to {back}"
        );
    }
    assert!(matches!(
        worker.resize("huge").await,
        Err(ResizeError::Variant { .. })
    ));
    assert_eq!(
        worker.stop_because(None, "").await.unwrap().status,
        ExitStatus::Code(0)
    );
    assert!(matches!(
        worker.resize("open").await,
        Err(ResizeError::NotReady { .. })
    ));
}

#[tokio::test]
async fn a_worker_starts_in_the_variant_asked_for() {
    if !speech_is_installed() {
        return;
    }
    let bench = Bench::new();
    let worker = bench.asr();
    assert!(matches!(
        worker.start(Some("huge")).await,
        Err(StartError::Variant { .. })
    ));
    worker.start(Some("open")).await.unwrap();
    assert!(worker.ready().await);
    assert_eq!(worker.variant().as_deref(), Some("open"));
    assert!(worker.measure().await.unwrap().sum.anonymous.unwrap() > Bytes::from_mib(80));
    worker.stop_because(None, "").await.unwrap();
    assert!(!bench.socket("asr").exists(), "a worker removes its socket");
}

fn no_groups() -> Groups {
    Groups::none("not in this test")
}

#[tokio::test]
async fn a_daemonized_child_without_its_environment_is_measured_with_its_worker_and_ends_with_it() {
    let mut bench = Bench::new();
    let program = env!("CARGO_BIN_EXE_cotenant");
    // Forks twice, starts a new session and clears its environment; its parent has ended when it starts.
    let hidden = format!("env -i setsid {program} worker ballast 24MiB >/dev/null 2>&1 </dev/null");
    let script = format!("({hidden} &); ({hidden} &); echo all; exec sleep 1000");
    let mut spec = bench.silent_spec("hiding", &["sh", "-c", &script]);
    spec.readiness = Readiness::LogLine("all".to_owned());
    let worker = bench.handle(spec);
    let pid = started(&worker).await;
    bench.next().await;
    bench.next().await;
    let mut reading = None;
    for _ in 0..600 {
        reading = worker.measure().await;
        if reading.is_some_and(|reading| reading.sum.anonymous >= Some(Bytes::from_mib(48))) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(reading.unwrap().sum.processes, 3, "{reading:?}");
    let table = ProcessTable::read(Path::new("/proc")).unwrap();
    let hidden: Vec<u32> = table
        .family(pid)
        .into_iter()
        .filter(|member| *member != pid)
        .collect();

    kill(pid_of(pid), Signal::SIGKILL).unwrap();
    let report = loop {
        if let WorkerEventKind::Exited(report) = bench.next().await {
            break report;
        }
    };
    assert_eq!(report.left_behind, 2, "{report}");
    for pid in hidden {
        assert!(!runs(pid), "{pid} still runs");
        assert!(
            !Path::new(&format!("/proc/{pid}")).exists(),
            "{pid} is not reaped"
        );
    }
}

/// Not a test: a supervisor to be killed by another test.
#[tokio::test]
#[ignore = "runs as a child of `the_workers_of_a_killed_supervisor_are_ended`"]
async fn supervisor_to_be_killed() {
    let mut bench = Bench::new();
    let mut spec = bench.silent_spec(
        "orphan",
        &["sh", "-c", "sleep 1000 & echo child $!; exec sleep 1000"],
    );
    spec.readiness = Readiness::LogLine("child".to_owned());
    let worker = bench.handle(spec);
    let pid = started(&worker).await;
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    println!("leader {pid} child {}", children.trim());
    loop {
        bench.next().await;
    }
}

#[tokio::test]
async fn the_workers_of_a_killed_supervisor_are_ended() {
    let mut supervisor = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "worker::supervisor_to_be_killed",
            "--ignored",
            "--nocapture",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(supervisor.stdout.take().unwrap()).lines();
    let line = lines
        .find_map(|line| Some(line.unwrap().split_once("leader ")?.1.to_owned()))
        .unwrap();
    let (leader, child) = line.split_once(" child ").unwrap();
    let (leader, child): (u32, u32) = (leader.parse().unwrap(), child.trim().parse().unwrap());

    let roots = ProbeRoot::default();
    assert!(
        !end_orphans(&roots, &no_groups(), None, &[])
            .await
            .iter()
            .any(|orphan| orphan.pid == child),
        "its supervisor runs beside us"
    );
    assert!(runs(leader) && runs(child));

    supervisor.kill().unwrap();
    assert_eq!(supervisor.wait().unwrap().signal(), Some(9));
    eventually("the kernel ends the leader", || !runs(leader)).await;
    assert!(runs(child), "the child of a worker is what is left");
    let ended = end_orphans(&roots, &no_groups(), None, &[]).await;
    let orphan = ended.iter().find(|orphan| orphan.pid == child).unwrap();
    assert_eq!(orphan.worker, "orphan");
    assert!(orphan.ended && !runs(child));
}

#[tokio::test]
async fn ballast_takes_memory_at_the_rate_asked_for() {
    let bench = Bench::new();
    let argv = [
        env!("CARGO_BIN_EXE_cotenant"),
        "worker",
        "ballast",
        "16MiB",
        "--rate",
        "64MiB",
    ];
    let mut spec = bench.silent_spec("ballast", &argv);
    spec.readiness = Readiness::LogLine("holding 16 MiB".to_owned());
    let worker = bench.handle(spec);
    let started_at = std::time::Instant::now();
    started(&worker).await;
    assert!(
        started_at.elapsed() >= Duration::from_millis(240),
        "{:?}",
        started_at.elapsed()
    );
    assert!(worker.measure().await.unwrap().sum.anonymous.unwrap() >= Bytes::from_mib(16));
    assert_eq!(
        worker.stop_because(None, "").await.unwrap().status,
        ExitStatus::Code(0)
    );
}
