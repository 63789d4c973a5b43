//! Resource limits and sandboxes of real processes, as enforced by the kernel.

use std::{fs, time::Duration};

use cotenant::{
    probe::ProbeRoot,
    units::Bytes,
    worker::{
        confine::{Confinement, FileAccess, Groups, Resource, SyscallFilter},
        handle::{StartError, WorkerHandle},
        report::{ExitReport, ExitStatus, WorkerEventKind},
        spec::{Listen, Readiness, WorkerSpec},
    },
};

use crate::support::{Bench, started};

/// Runs a script to completion, as a worker that only prints.
async fn output_of(bench: &mut Bench, spec: WorkerSpec) -> ExitReport {
    let worker = bench.handle(spec);
    worker.start(None).await.unwrap();
    ended(bench).await
}

async fn ended(bench: &mut Bench) -> ExitReport {
    loop {
        if let WorkerEventKind::Exited(report) = bench.next().await {
            return report;
        }
    }
}

fn script(bench: &Bench, text: &str, confinement: Confinement) -> WorkerSpec {
    WorkerSpec {
        confinement,
        ..bench.silent_spec("confined", &["sh", "-c", text])
    }
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

#[tokio::test]
async fn resource_limits_are_in_force_from_the_first_instruction() {
    let mut bench = Bench::new();
    let confinement = Confinement {
        resources: [
            (Resource::OpenFiles, Some(64)),
            (Resource::Core, Some(0)),
            (Resource::FileSize, Some(4096)),
        ]
        .into(),
        ..Confinement::default()
    };
    let text = "cat /proc/self/limits";
    let spec = script(&bench, text, confinement);
    let report = output_of(&mut bench, spec).await;
    let limit = |name: &str| {
        let line = report
            .stdout
            .iter()
            .find(|line| line.starts_with(name))
            .unwrap();
        let words: Vec<&str> = line[name.len()..].split_whitespace().collect();
        (words[0].to_owned(), words[1].to_owned())
    };
    let both = |value: &str| (value.to_owned(), value.to_owned());
    assert_eq!(limit("Max open files"), both("64"));
    assert_eq!(limit("Max core file size"), both("0"));
    assert_eq!(limit("Max file size"), both("4096"));
}

#[tokio::test]
async fn an_address_space_that_is_too_small_ends_in_the_worker_and_nowhere_else() {
    let mut bench = Bench::new();
    let mut spec = bench.silent_spec(
        "small",
        &[
            env!("CARGO_BIN_EXE_cotenant"),
            "worker",
            "ballast",
            "256MiB",
        ],
    );
    spec.confinement
        .resources
        .insert(Resource::AddressSpace, Some(200 << 20));
    let report = output_of(&mut bench, spec).await;
    assert!(
        matches!(report.status, ExitStatus::Code(code) if code != 0),
        "{report}"
    );
    assert!(
        report.stderr.iter().any(|line| line.contains("256 MiB")),
        "{:?}",
        report.stderr
    );
}

#[tokio::test]
async fn a_worker_runs_as_another_user_or_says_why_not() {
    let mut bench = Bench::new();
    let confinement = Confinement {
        user: Some("65534".to_owned()),
        group: Some("65534".to_owned()),
        ..Confinement::default()
    };
    let spec = script(&bench, "id -u; id -g; id -G", confinement);
    if is_root() {
        let report = output_of(&mut bench, spec).await;
        assert_eq!(report.stdout, ["65534", "65534", "65534"], "{report}");
    } else {
        let error = bench.handle(spec).start(None).await.unwrap_err();
        assert!(
            matches!(&error, StartError::Confine { source, .. } if source.to_string().contains("lacks `CAP_SET"))
        );
    }
}

#[tokio::test]
async fn a_worker_of_another_user_still_ends_with_its_handle() {
    if !is_root() {
        println!("left out: only root can start a worker as another user");
        return;
    }
    let bench = Bench::new();
    let mut spec = bench.silent_spec("other", &["sh", "-c", "echo up; exec sleep 1000"]);
    spec.confinement.user = Some("65534".to_owned());
    spec.readiness = Readiness::LogLine("up".to_owned());
    let worker = bench.handle(spec);
    let pid = started(&worker).await;
    // Changing the user clears the parent-death signal; it must be set afterwards.
    let report = worker.stop_because(None, "").await.unwrap();
    assert_eq!(report.pid, pid);
}

#[tokio::test]
async fn files_outside_the_list_are_out_of_reach() {
    let mut bench = Bench::new();
    let folder = tempfile::tempdir().unwrap();
    for name in ["models", "state", "secret"] {
        fs::create_dir(folder.path().join(name)).unwrap();
        fs::write(folder.path().join(name).join("file"), name).unwrap();
    }
    let confinement = Confinement {
        files: Some(FileAccess {
            read: vec![folder.path().join("models")],
            write: vec![folder.path().join("state")],
        }),
        ..Confinement::default()
    };
    let text = "cd /; cat D/models/file; echo; cat D/secret/file || echo no secret; \
                echo new > D/state/file && cat D/state/file; echo new > D/models/file || echo no change";
    let text = text.replace('D', folder.path().to_str().unwrap());
    let worker = bench.handle(script(&bench, &text, confinement));
    worker.start(None).await.unwrap();
    let report = ended(&mut bench).await;
    let measures = worker.measures();
    let files = measures
        .iter()
        .find(|measure| measure.what == "files")
        .unwrap();
    if let Err(reason) = &files.state {
        println!("left out: {reason}");
        return;
    }
    assert_eq!(
        report.stdout,
        ["models", "no secret", "new", "no change"],
        "{:?}",
        report.stderr
    );
    assert_eq!(
        fs::read_to_string(folder.path().join("models/file")).unwrap(),
        "models"
    );
}

#[tokio::test]
async fn refused_system_calls_fail_and_the_worker_goes_on() {
    let mut bench = Bench::new();
    let confinement = Confinement {
        syscalls: SyscallFilter::Restricted,
        ..Confinement::default()
    };
    let folder = tempfile::tempdir().unwrap();
    let mount = format!(
        "mount -t tmpfs none {} || echo no mount",
        folder.path().display()
    );
    let text = format!("grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status; {mount}; echo on");
    let worker = bench.handle(script(&bench, &text, confinement));
    worker.start(None).await.unwrap();
    let report = ended(&mut bench).await;
    let measures = worker.measures();
    let calls = measures
        .iter()
        .find(|measure| measure.what == "system calls")
        .unwrap();
    if let Err(reason) = &calls.state {
        println!("left out: {reason}");
        return;
    }
    let lines: Vec<String> = report
        .stdout
        .iter()
        .map(|line| line.replace(char::is_whitespace, " "))
        .collect();
    assert_eq!(
        lines,
        ["NoNewPrivs: 1", "Seccomp: 2", "no mount", "on"],
        "{:?}",
        report.stderr
    );
}

#[tokio::test]
async fn a_restricted_worker_reads_nothing_of_its_supervisor() {
    const PEEK: &str = r#"
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
parent = os.getppid()
class Range(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
def attempt(name, work):
    ctypes.set_errno(0)
    try:
        done = work() >= 0
    except OSError:
        done = False
    print(name, "works" if done else "fails")
with open(f"/proc/self/maps") as maps:
    here = int(maps.readline().split("-")[0], 16)
buffer = ctypes.create_string_buffer(8)
local, remote = Range(ctypes.addressof(buffer), 8), Range(here, 8)
both = (ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
attempt("readv", lambda: libc.process_vm_readv(os.getpid(), *both))
attempt("writev", lambda: libc.process_vm_writev(os.getpid(), *both[:1], 0, *both[2:]))
pidfd = libc.syscall(434, parent, 0)
attempt("getfd", lambda: libc.syscall(438, pidfd, 0, 0))
attempt("ptrace", lambda: libc.ptrace(0x4206, parent, None, None))
attempt("mem", lambda: os.open(f"/proc/{parent}/mem", os.O_RDONLY))
attempt("environ", lambda: os.open(f"/proc/{parent}/environ", os.O_RDONLY) and len(os.listdir(f"/proc/{parent}/fd")))
attempt("own", lambda: os.open("/proc/self/mem", os.O_RDONLY))
"#;
    let mut bench = Bench::new();
    let confinement = |syscalls| Confinement {
        syscalls,
        ..Confinement::default()
    };
    let python = |bench: &Bench, syscalls| WorkerSpec {
        confinement: confinement(syscalls),
        ..bench.silent_spec("peeping", &["python3", "-c", PEEK])
    };
    let spec = python(&bench, SyscallFilter::Restricted);
    let worker = bench.handle(spec);
    if worker.start(None).await.is_err() {
        println!("left out: there is no python3");
        return;
    }
    let report = ended(&mut bench).await;
    let measures = worker.measures();
    let calls = measures
        .iter()
        .find(|measure| measure.what == "system calls")
        .unwrap();
    if let Err(reason) = &calls.state {
        println!("left out: {reason}");
        return;
    }
    let expected = [
        "readv fails",
        "writev fails",
        "getfd fails",
        "ptrace fails",
        "mem fails",
        "environ fails",
        "own works",
    ];
    assert_eq!(report.stdout, expected, "{calls}: {:?}", report.stderr);

    let spec = python(&bench, SyscallFilter::All);
    let report = output_of(&mut bench, spec).await;
    assert!(
        report.stdout.contains(&"readv works".to_owned()),
        "{:?}",
        report.stdout
    );
}

#[tokio::test]
async fn a_restricted_worker_has_no_capability_beyond_files_signals_and_ports() {
    if !is_root() {
        println!("left out: only root has any to lose");
        return;
    }
    let mut bench = Bench::new();
    let confinement = Confinement {
        syscalls: SyscallFilter::Restricted,
        ..Confinement::default()
    };
    let spec = script(&bench, "grep CapEff /proc/self/status", confinement);
    let report = output_of(&mut bench, spec).await;
    let set = report
        .stdout
        .first()
        .and_then(|line| line.split_whitespace().nth(1))
        .unwrap_or("all");
    let set = u64::from_str_radix(set, 16).unwrap_or(u64::MAX);
    assert_eq!(set & !0x0080_44ff, 0, "{:?}", report.stdout);
}

#[tokio::test]
async fn what_is_required_and_cannot_be_had_starts_nothing() {
    let mut bench = Bench::new();
    let confinement = Confinement {
        memory: Some(Bytes::from_mib(64)),
        required: true,
        ..Confinement::default()
    };
    // This supervisor creates no groups.
    let error = bench
        .handle(script(&bench, "true", confinement))
        .start(None)
        .await
        .unwrap_err();
    let StartError::Confine { source, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(
        source.to_string(),
        "cannot confine it as required: memory limit: not in force: this supervisor makes no control groups"
    );
    assert!(matches!(bench.next().await, WorkerEventKind::Failed { .. }));
}

#[tokio::test]
async fn a_worker_above_the_limit_of_its_group_ends_alone() {
    let groups = Groups::open(&ProbeRoot::default());
    if let Err(reason) = groups.describe() {
        println!("left out: {reason}");
        return;
    }
    let mut bench = Bench::new();
    let ballast = |bench: &Bench, name: &str, bytes: &str| WorkerSpec {
        readiness: Readiness::Notify,
        confinement: Confinement {
            memory: Some(Bytes::from_mib(48)),
            ..Confinement::default()
        },
        ..bench.silent_spec(
            name,
            &[env!("CARGO_BIN_EXE_cotenant"), "worker", "ballast", bytes],
        )
    };
    let modest = bench.grouped(ballast(&bench, "modest", "8MiB"), &groups);
    let pid = started(&modest).await;
    let limit = modest
        .measures()
        .into_iter()
        .find(|measure| measure.what == "memory limit")
        .unwrap();
    if let Err(reason) = &limit.state {
        println!("left out: {reason}");
        modest.stop_because(None, "").await;
        return;
    }
    let group = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    assert!(group.contains("cotenant-worker-"), "{group}");
    let charged = modest.measure().await.unwrap().cgroup.unwrap();
    assert!(
        charged >= Bytes::from_mib(8) && charged <= Bytes::from_mib(48),
        "{charged}"
    );

    let greedy = bench.grouped(ballast(&bench, "greedy", "400MiB"), &groups);
    greedy.start(None).await.unwrap();
    let report = ended(&mut bench).await;
    assert_eq!(&*report.worker, "greedy");
    assert!(
        matches!(report.status, ExitStatus::Signal { signal: 9, .. }),
        "{report}"
    );
    assert_eq!(report.intended_by_us, None);
    assert!(modest.state().pid() == Some(pid), "the other one goes on");

    modest.stop_because(None, "").await.unwrap();
    let place = limit.state.unwrap();
    let folder = place.split('`').nth(1).unwrap();
    assert!(!fs::exists(folder).unwrap(), "{folder} is left");
}

#[tokio::test]
async fn a_worker_is_ready_when_it_tells_so_or_when_its_output_matches() {
    let bench = Bench::new();
    let mut spec = bench.silent_spec(
        "notifier",
        &[env!("CARGO_BIN_EXE_cotenant"), "worker", "ballast", "1MiB"],
    );
    spec.readiness = Readiness::Notify;
    let notifier = bench.handle(spec);
    started(&notifier).await;
    notifier
        .stop_because(Some(Duration::ZERO), "")
        .await
        .unwrap();

    let mut spec = bench.silent_spec(
        "matcher",
        &["sh", "-c", "echo model 7 of 7 loaded; exec sleep 1000"],
    );
    spec.readiness = Readiness::LogPattern(r"^model (\d) of \d loaded$".to_owned());
    let matcher = bench.handle(spec);
    started(&matcher).await;
    matcher
        .stop_because(Some(Duration::ZERO), "")
        .await
        .unwrap();
}

#[tokio::test]
async fn workers_that_want_ports_get_different_ones_and_a_taken_one_is_named() {
    let mut bench = Bench::new();
    let worker = |bench: &Bench, name: &str, listen| {
        bench.handle(WorkerSpec {
            listen,
            ..bench.silent_spec(name, &["sh", "-c", "exec sleep 1000", "${PORT}"])
        })
    };
    let port = |worker: &WorkerHandle| worker.endpoint().unwrap().to_string();
    let (one, two) = (
        worker(&bench, "one", Listen::FreePort),
        worker(&bench, "two", Listen::FreePort),
    );
    started(&one).await;
    started(&two).await;
    assert_ne!(port(&one), port(&two));

    let taken = port(&one).rsplit(':').next().unwrap().parse().unwrap();
    let third = worker(&bench, "third", Listen::Port(taken));
    third.start(None).await.unwrap_err();
    let error = loop {
        if let WorkerEventKind::Failed { reason } = bench.next().await {
            break format!("{reason:?}");
        }
    };
    assert!(
        error.contains(&format!(
            "port {taken} of 127.0.0.1 is taken by another worker"
        )),
        "{error}"
    );
    one.stop_because(Some(Duration::ZERO), "").await.unwrap();
    third.start(None).await.unwrap();
    third.stop_because(Some(Duration::ZERO), "").await.unwrap();
    two.stop_because(Some(Duration::ZERO), "").await.unwrap();
}

/// Raises an ambient capability of this thread, as `AmbientCapabilities=` of a unit does. Returns whether that
/// succeeded.
fn raise_ambient() -> bool {
    #[repr(C)]
    struct Head {
        version: u32,
        pid: i32,
    }
    /// `CAP_KILL` of `<linux/capability.h>`.
    const CAP_KILL: u32 = 5;
    let mut head = Head {
        version: 0x2008_0522,
        pid: 0,
    };
    let mut sets = [[0_u32; 3]; 2];
    // SAFETY: the header says version 3, whose data are two blocks of effective, permitted and inheritable bits.
    let raised = unsafe {
        libc::syscall(libc::SYS_capget, &raw mut head, sets.as_mut_ptr()) == 0
            && {
                sets[0][2] |= 1 << CAP_KILL;
                libc::syscall(libc::SYS_capset, &raw mut head, sets.as_ptr()) == 0
            }
            && libc::prctl(
                libc::PR_CAP_AMBIENT,
                libc::PR_CAP_AMBIENT_RAISE,
                CAP_KILL,
                0,
                0,
            ) == 0
    };
    raised
        && fs::read_to_string("/proc/thread-self/status")
            .unwrap()
            .contains("CapAmb:\t0000000000000020")
}

#[tokio::test]
async fn a_worker_inherits_no_capability_of_its_supervisor() {
    if !raise_ambient() {
        println!("left out: this process has no capability that it could pass on");
        return;
    }
    let mut bench = Bench::new();
    for user in [None, Some("65534".to_owned())] {
        let confinement = Confinement {
            user: user.clone(),
            ..Confinement::default()
        };
        let spec = script(
            &bench,
            "grep -E 'CapAmb|CapEff' /proc/self/status",
            confinement,
        );
        if user.is_some() && !is_root() {
            break;
        }
        let report = output_of(&mut bench, spec).await;
        let of = |set: &str| {
            report
                .stdout
                .iter()
                .find_map(|line| line.strip_prefix(set))
                .unwrap()
                .trim()
                .to_owned()
        };
        assert_eq!(of("CapAmb:"), "0000000000000000", "{user:?}");
        if user.is_some() {
            assert_eq!(of("CapEff:"), "0000000000000000");
        }
    }
}
