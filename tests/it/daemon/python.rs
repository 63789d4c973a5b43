//! The Python helper as one file and as a package, with the examples of `docs/clients/leases.md`.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use cotenant::rpc::v1::{CreateLeaseRequest, LeaseClass};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
};

use super::installation::{Daemon, Installation, budget};
use crate::support::PATIENCE;

const MIB: u64 = 1 << 20;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/python");

const EXAMPLE: &str = include_str!("../../clients/lease_example.py");
const ASYNC_EXAMPLE: &str = include_str!("../../clients/async_lease_example.py");
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

/// The same with asyncio; a cancelled request gives back what it still obtains.
const ASYNC_SHORT: &str = r#"
import asyncio
import cotenant
async def main():
    try:
        async with cotenant.async_lease("huge", min="900GiB"):
            pass
    except cotenant.Refused as error:
        print(error.reason, error.retry_after)
    async with cotenant.async_lease("small", min="4MiB") as lease:
        print(lease.held_bytes, await lease.resize("6MiB"), lease.ended, await lease.wait(0.01))
    print(lease.ended, await lease.wait())
    late = cotenant.async_lease("late", min="4MiB")
    request = late._lease._call
    def slow(*arguments):
        answer = request(*arguments)
        entering.cancel()
        loop.call_soon_threadsafe(lambda: None)
        return answer
    loop, late._lease._call = asyncio.get_running_loop(), slow
    entering = asyncio.ensure_future(late.__aenter__())
    try:
        await entering
    except asyncio.CancelledError:
        print("cancelled")
    while late.ended is None:
        await asyncio.sleep(0.01)
    print(late.ended)
asyncio.run(main())
"#;

/// Uses each public name with its type.
const TYPED: &str = r#"
import cotenant
def shrink(target_bytes: int, reason: str) -> int | None:
    return target_bytes
async def later(target_bytes: int, reason: str) -> None:
    pass
with cotenant.lease("a", min="4MiB", on_shrink=shrink) as lease:
    held: int = lease.resize(1 << 20)
async def main() -> str | None:
    async with cotenant.async_lease("b", min=1, on_shrink=later) as lease:
        held: int = await lease.resize("1MiB")
        over: bool = await lease.wait(1.0)
    return lease.ended
failure: type[Exception] = cotenant.Refused
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

/// The interpreter of the environment with the clients' packages.
fn interpreter() -> Option<PathBuf> {
    let Ok(venv) = std::env::var("COTENANT_CLIENTS_VENV") else {
        println!("left out: COTENANT_CLIENTS_VENV is not set; tests/run sets it");
        return None;
    };
    Some(Path::new(&venv).join("bin/python"))
}

/// Python with the single file beside the program.
fn python(installation: &Installation) -> Option<Command> {
    let mut command = command(&interpreter()?, installation);
    command.env("PYTHONPATH", FOLDER);
    Some(command)
}

fn command(python: &Path, installation: &Installation) -> Command {
    let mut command = Command::new(python);
    command
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env(
            "COTENANT_ENDPOINT",
            format!("unix://{}", installation.socket().display()),
        )
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// The interpreter of a fresh environment in `folder`, with the wheel of the package and the clients' `grpcio`.
async fn installed(clients: &Path, folder: &Path) -> PathBuf {
    let fresh = folder.join("fresh");
    let run = async |arguments: &[&str]| {
        let mut command = Command::new(clients);
        let ran = command.args(arguments).stdin(Stdio::null()).output();
        let ran = tokio::time::timeout(PATIENCE, ran).await.unwrap().unwrap();
        assert!(ran.status.success(), "{arguments:?}: {ran:?}");
        String::from_utf8(ran.stdout).unwrap()
    };
    let wheels = folder.to_str().unwrap();
    let offline = ["--quiet", "--no-index", "--no-deps"];
    let build = ["--no-build-isolation", "--wheel-dir", wheels, FOLDER];
    run(&[&["-m", "pip", "wheel"][..], &offline, &build].concat()).await;
    let version = env!("CARGO_PKG_VERSION");
    let wheel = folder.join(format!("cotenant-{version}-py3-none-any.whl"));
    run(&["-m", "venv", "--without-pip", fresh.to_str().unwrap()]).await;
    let into = ["-m", "pip", "--python", fresh.to_str().unwrap(), "install"];
    run(&[&into[..], &offline, &[wheel.to_str().unwrap()]].concat()).await;
    let packages = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let of_clients = run(&["-c", packages]).await;
    let fresh = fresh.join("bin/python");
    let own = Command::new(&fresh).args(["-c", packages]).output().await;
    let own = String::from_utf8(own.unwrap().stdout).unwrap();
    std::fs::write(Path::new(own.trim()).join("clients.pth"), of_clients).unwrap();
    fresh
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lease_in_python_shrinks_when_reported_and_ends_when_the_supervisor_stays_away() {
    assert!(
        DOCUMENT.contains(EXAMPLE),
        "the document shows another example than the one that is tested"
    );
    let installation = Installation::new(&budget(220));
    let (Some(short), Some(mut example)) = (python(&installation), python(&installation)) else {
        return;
    };
    example.arg(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/clients/lease_example.py"
    ));
    let daemon = installation.start().await;
    let said = "EXCEEDS_BUDGET None\n4194304 6291456 None\ngiven back\n";
    short_leases(&daemon, short, SHORT, said).await;
    example_shrinks_and_ends(daemon, example).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_package_for_python_is_typed_and_has_leases_for_asyncio() {
    assert!(
        DOCUMENT.contains(ASYNC_EXAMPLE),
        "the document shows another example than the one that is tested"
    );
    for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
        let text = |folder: &str| std::fs::read_to_string(Path::new(folder).join(name)).unwrap();
        assert_eq!(text(FOLDER), text(env!("CARGO_MANIFEST_DIR")));
    }
    let Some(clients) = interpreter() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let fresh = installed(&clients, folder.path()).await;
    let program = folder.path().join("typed.py");
    std::fs::write(&program, TYPED).unwrap();
    let mut mypy = Command::new(&clients);
    mypy.args(["-m", "mypy", "--strict", "--cache-dir=/dev/null"])
        .arg("--python-executable")
        .args([&fresh, &program])
        .current_dir(folder.path());
    let checked = tokio::time::timeout(PATIENCE, mypy.output()).await;
    let checked = String::from_utf8(checked.unwrap().unwrap().stdout).unwrap();
    assert!(checked.contains("Success: no issues found"), "{checked}");

    let installation = Installation::new(&budget(220));
    let daemon = installation.start().await;
    let said =
        "EXCEEDS_BUDGET None\n4194304 6291456 None False\ngiven back True\ncancelled\ngiven back\n";
    short_leases(&daemon, command(&fresh, &installation), ASYNC_SHORT, said).await;
    let mut example = command(&fresh, &installation);
    example.arg(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/clients/async_lease_example.py"
    ));
    example_shrinks_and_ends(daemon, example).await;
}

/// Leases that end with their block; the daemon has none afterwards.
async fn short_leases(daemon: &Daemon<'_>, mut python: Command, program: &str, said: &str) {
    let output = tokio::time::timeout(PATIENCE, python.args(["-c", program]).output()).await;
    let output = output.unwrap().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), said);
    daemon
        .until("its leases are gone", |status| status.leases.is_empty())
        .await;
}

/// The example shrinks for another tenant, and its lease ends with the daemon.
async fn example_shrinks_and_ends(daemon: Daemon<'_>, mut example: Command) {
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
