//! Command line as a client, and its exit codes.

use std::process::{Command, Output};

use cotenant::{
    rpc::{Role, Roles},
    units::Bytes,
};

use super::daemon::{Daemon, Settings, granted, request};

/// Runs the program against a daemon.
async fn run(daemon: &Daemon, arguments: &[&str]) -> Output {
    run_as(daemon, None, arguments).await
}

async fn run_as(daemon: &Daemon, uid: Option<u32>, arguments: &[&str]) -> Output {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new(env!("CARGO_BIN_EXE_cotenant"));
    command.args(arguments).env(
        "COTENANT_ENDPOINT",
        format!("unix-abstract:{}", daemon.abstract_name),
    );
    if let Some(uid) = uid {
        command.uid(uid).gid(uid);
    }
    tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_leases_and_events_tell_what_is_there_and_what_happened() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    let lease = granted(&mut client, request("one", "camera", 100)).await;
    daemon.state(|snapshot| snapshot.leases.len() == 2).await;

    let status = run(&daemon, &["status"]).await;
    assert_eq!(code(&status), 0, "{status:?}");
    let text = stdout(&status);
    assert!(text.contains("budget    1 GiB: held 164 MiB"), "{text}");
    assert!(text.contains(&lease.name) && text.contains("asr"), "{text}");

    let status = run(&daemon, &["status", "--output", "json"]).await;
    let json: serde_json::Value = serde_json::from_str(&stdout(&status)).unwrap();
    assert_eq!(json["budget"]["heldBytes"], Bytes::from_mib(164).get());
    assert_eq!(json["pressure"]["level"], "PRESSURE_LEVEL_NORMAL");

    let leases = run(&daemon, &["leases", "-o", "ndjson"]).await;
    let names: Vec<_> = stdout(&leases)
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["name"].clone())
        .collect();
    assert!(names.contains(&lease.name.clone().into()), "{names:?}");

    let events = run(&daemon, &["events"]).await;
    assert_eq!(code(&events), 0, "{events:?}");
    assert!(
        stdout(&events).contains("`camera` (interactive) requests 100 MiB"),
        "{}",
        stdout(&events)
    );

    let released = run(&daemon, &["leases", "release", &lease.name]).await;
    assert_eq!(code(&released), 0, "{released:?}");
    daemon
        .state(|snapshot| !snapshot.leases.iter().any(|view| view.tenant == "camera"))
        .await;
    let unknown = run(&daemon, &["leases", "release", &lease.name]).await;
    assert_eq!(code(&unknown), 4);
    assert!(
        stderr(&unknown).contains("hint: `cotenant leases` lists them"),
        "{unknown:?}"
    );
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pipe_that_closes_early_is_no_error() {
    let daemon = Daemon::start().await;
    let program = env!("CARGO_BIN_EXE_cotenant");
    // The second one gets no line, as from a supervisor that does nothing after the reader has closed.
    for (command, expected) in [
        ("events -f | head -n 1", "supervisor"),
        ("events -f --after 1000000 | true", ""),
    ] {
        let endpoint = daemon.endpoint();
        let output = tokio::task::spawn_blocking(move || {
            Command::new("bash")
                .args(["-c", &format!("set -o pipefail; {program} {command}")])
                .env("COTENANT_ENDPOINT", endpoint)
                .output()
                .unwrap()
        })
        .await
        .unwrap();
        assert_eq!(code(&output), 0, "{output:?}");
        assert!(stdout(&output).contains(expected), "{output:?}");
        assert_eq!(stderr(&output), "");
    }
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn generate_streams_the_text_to_stdout() {
    let daemon = Daemon::start().await;
    let said = run(&daemon, &["generate", "turn on the light", "--seed", "1"]).await;
    assert_eq!(
        (code(&said), stdout(&said).as_str()),
        (0, "turn on the light\n"),
        "{said:?}"
    );
    assert!(
        stderr(&said).starts_with("4 prompt and 4 completion tokens"),
        "{said:?}"
    );
    let json = run(&daemon, &["generate", "hello you", "-o", "json"]).await;
    let json: serde_json::Value = serde_json::from_str(&stdout(&json)).unwrap();
    assert_eq!(json["text"], "hello you");
    let long = run(&daemon, &["generate", &"word ".repeat(101)]).await;
    assert_eq!(code(&long), 4);
    assert!(
        stderr(&long).contains(
            "cannot take a prompt of 101 tokens: this model's maximum context length is 100 tokens (`parrot`)"
        ),
        "{long:?}"
    );
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exit_codes_tell_refused_from_unreachable_from_misused() {
    let daemon = Daemon::start().await;
    for (arguments, expected) in [
        (&["stop", "absent"][..], 4),
        (&["shed", "0B"], 2),
        (&["shed", "12"], 2),
        (&["shed"], 2),
        (&["status", "--endpoint", "http://localhost:1"], 2),
        (&["status", "--endpoint", "unix:///nonexistent.sock"], 3),
        (
            &["status", "--endpoint", "unix-abstract:no-listener-here"],
            3,
        ),
        (&["replay", "/nonexistent"], 1),
        (&["--help"], 0),
        (&["completions", "bash"], 0),
        (&["stop", "asr"], 0),
        (&["start", "asr"], 0),
        (&["recycle", "asr"], 0),
        (&["regrow"], 4),
        (&["drain"], 0),
        (&["drain", "--wait", "0s"], 2),
        (&["drain", "--wait", "60"], 2),
        (&["drain", "--wait", "25h"], 2),
        (&["drain", "--wait", "soon"], 2),
        (&["drain", "--wait", "1s", "--off"], 2),
        (&["drain", "--wait", "1s"], 0),
        (
            &[
                "drain",
                "--wait",
                "1s",
                "--endpoint",
                "unix:///nonexistent.sock",
            ],
            3,
        ),
        (&["health"], 4),
        (&["health", "--service", "cotenant.v1.LeaseService"], 0),
        (&["health", "--service", "nonsense"], 3),
        (&["health", "--endpoint", "unix:///nonexistent.sock"], 2),
        (&["health", "--nonsense"], 1),
    ] {
        let output = run(&daemon, arguments).await;
        assert_eq!(code(&output), expected, "{arguments:?}: {output:?}");
        if expected != 0 && arguments[0] != "health" {
            assert!(stderr(&output).starts_with("error: "), "{output:?}");
            assert_eq!(stdout(&output), "");
        }
    }
    let unreachable = run(
        &daemon,
        &["status", "--endpoint", "unix:///nonexistent.sock"],
    )
    .await;
    insta::assert_snapshot!(stderr(&unreachable), @r"
    error: cannot reach the supervisor at `unix:///nonexistent.sock`
      caused by: No such file or directory (os error 2)
    hint: is `cotenant serve` running? Name its socket with --endpoint or COTENANT_ENDPOINT
    ");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_waits_until_it_serves() {
    let daemon = Daemon::start().await;
    let asks = run(&daemon, &["health", "--wait", "--timeout", "20s"]);
    let sets = async { daemon.health.set(cotenant::rpc::health::OVERALL, true) };
    let (asked, ()) = tokio::join!(asks, sets);
    assert_eq!(
        (code(&asked), stdout(&asked).as_str()),
        (0, "SERVING\n"),
        "{asked:?}"
    );
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_journal_replays_from_the_command_line_and_a_forged_one_does_not() {
    let daemon = Daemon::start().await;
    let mut client = daemon.leases().await;
    granted(&mut client, request("one", "camera", 100)).await;
    let _ = client
        .create_lease(request("two", "radio", 5000))
        .await
        .unwrap_err();
    let kept = tempfile::tempdir().unwrap();
    let journal = daemon.folder.path().join("journal.ndjson");
    let copy = kept.path().join("journal.ndjson");
    daemon
        .state(|snapshot| snapshot.leases.iter().any(|view| view.tenant == "camera"))
        .await;
    // The writer flushes when idle; the denial is the last relevant line here.
    let mut text = String::new();
    while !text.contains("exceeds_budget") {
        text = std::fs::read_to_string(&journal).unwrap();
        tokio::task::yield_now().await;
    }
    std::fs::write(&copy, &text).unwrap();
    let same = run(&daemon, &["replay", copy.to_str().unwrap()]).await;
    assert_eq!(code(&same), 0, "{same:?}");
    assert!(stdout(&same).contains("identical decisions"), "{same:?}");

    // The record claims that 1 MiB more was granted.
    let held = Bytes::from_mib(100).get();
    let forged = text.replace(
        &format!("\"held\":{held}"),
        &format!("\"held\":{}", held + (1 << 20)),
    );
    assert_ne!(forged, text);
    std::fs::write(&copy, forged).unwrap();
    let other = run(&daemon, &["replay", copy.to_str().unwrap()]).await;
    assert_eq!(code(&other), 1, "{other:?}");
    assert!(stdout(&other).contains("different decision"), "{other:?}");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_user_has_the_role_it_is_given_and_no_more() {
    if !nix::unistd::getuid().is_root() {
        println!("left out: only root can act as another user");
        return;
    }
    const OTHER_UID: u32 = 65534;
    // UID 65534 must be able to run the program: parent folders may be inaccessible to others.
    let reachable = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .args([env!("CARGO_BIN_EXE_cotenant"), "--version"])
        .output();
    if !reachable.is_ok_and(|output| output.status.success()) {
        println!("left out: the program cannot be run by another user here");
        return;
    }
    for (others, status, shed, release) in [
        (None, 4, 4, 4),
        (Some(Role::Viewer), 0, 4, 4),
        (Some(Role::Tenant), 0, 4, 4),
        (Some(Role::Operator), 0, 0, 0),
    ] {
        let mut roles = Roles::new(0);
        roles.members.others = others;
        let daemon = Daemon::start_with(Settings {
            roles,
            ..Settings::default()
        })
        .await;
        let mut client = daemon.leases().await;
        let lease = granted(&mut client, request("one", "camera", 100)).await;
        daemon.state(|snapshot| snapshot.leases.len() == 2).await;
        let reported = run_as(&daemon, Some(OTHER_UID), &["status"]).await;
        assert_eq!(code(&reported), status, "{others:?}: {reported:?}");
        let reported = run_as(&daemon, Some(OTHER_UID), &["stop", "asr"]).await;
        assert_eq!(code(&reported), shed, "{others:?}: {reported:?}");
        let reported = run_as(
            &daemon,
            Some(OTHER_UID),
            &["leases", "release", &lease.name],
        )
        .await;
        assert_eq!(code(&reported), release, "{others:?}: {reported:?}");
        if others == Some(Role::Tenant) {
            // A tenant may release its own leases, but this one belongs to another.
            assert!(
                stderr(&reported).contains("it belongs to uid 0"),
                "{reported:?}"
            );
        }
        if others.is_none() {
            assert!(
                stderr(&reported).contains("uid 65534 (no role)"),
                "{reported:?}"
            );
        }
        daemon.end().await;
    }
}
