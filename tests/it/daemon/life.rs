//! Start and end of the daemon, and the state it leaves.

use std::{
    os::unix::{fs::PermissionsExt as _, net::UnixDatagram},
    process::Command,
    time::{Duration, Instant},
};

use cotenant::rpc::{
    Endpoint,
    v1::{
        CreateLeaseRequest, GetStatusResponse, LeaseClass, SequenceState,
        lease_service_client::LeaseServiceClient,
    },
};
use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};

use super::installation::{
    Installation, PROGRAM, asr, ballast, budget, content, demo_model, pid_of, pids, said, worker,
    workers_ready,
};
use crate::{
    http::client::{get, post},
    support::{PATIENCE, eventually, runs, speech_is_installed},
};

/// Text that was wrapped for a terminal.
pub(super) fn in_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_status_is_watched_until_the_daemon_ends() {
    let installation = Installation::new(&budget(64));
    let daemon = installation.start().await;
    let arguments = ["status", "--watch=20ms", "-o", "ndjson"];
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| installation.run(&arguments));
        // Some readings; fewer on a slow machine are enough.
        std::thread::sleep(Duration::from_millis(500));
        daemon.signal(Signal::SIGKILL);
        let watched = watching.join().unwrap();
        assert_eq!(watched.status.code(), Some(3), "{}", said(&watched));
        let states = String::from_utf8(watched.stdout).unwrap();
        assert!(states.lines().count() > 1, "{states}");
        for state in states.lines() {
            let state: Value = serde_json::from_str(state).unwrap();
            assert_eq!(state["budget"]["budgetBytes"], 64 << 20, "{state}");
        }
    });
    let none = said(&installation.run(&["status", "--watch=0s"]));
    assert!(none.contains("not above zero"), "{none}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_without_a_model_manages_workers_and_leases() {
    let installation = Installation::new(&format!("{}workers:\n{}", budget(64), ballast()));
    let daemon = installation.start().await;
    daemon.until("the worker is ready", workers_ready).await;
    let answer = daemon.ask("hello").await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (404, "model_not_found"),
        "{}",
        answer.text()
    );
    let generate = installation.run(&["generate", "hello"]);
    assert_eq!(generate.status.code(), Some(4));
    let health = said(&installation.run(&["health", "--service", "nope"]));
    assert!(
        health.contains("hint: services: `cotenant.engine`")
            && health.contains("`cotenant.worker.ballast`"),
        "{health}"
    );
    let resize = said(&installation.run(&["resize", "ballast", "large"]));
    assert!(
        resize.contains("is unavailable: the worker has no variants"),
        "{resize}"
    );
    let term = said(&installation.run(&["hold", "vision", "--min", "1MiB", "--term", "1h"]));
    assert!(term.contains("`1 h` is not between "), "{term}");
    assert!(
        term.contains("hint: `leases.term_min` and `leases.term_max`"),
        "{term}"
    );
    let status = installation.json(&["status"]);
    assert_eq!(status["engine"]["state"], "ENGINE_STATE_ABSENT");
    daemon.end().await;
}

/// Returns processes with `word` among their arguments.
fn all_with(word: &str) -> Vec<u32> {
    let has = |pid: &u32| {
        std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| {
            line.split(|byte| *byte == 0)
                .any(|argument| argument == word.as_bytes())
        })
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(has)
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_is_killed_leaves_its_workers_to_the_next_one_and_an_orderly_end_leaves_nothing()
 {
    let mark = format!("1000.{}", std::process::id());
    let installation = Installation::new(&format!(
        "{}{}workers:\n{}  - {{name: family, role: other, argv: [sh, -c, 'setsid sleep {mark} & exec sleep 1000'], memory: {{steady: 8MiB}}}}\n",
        budget(128),
        demo_model(1024),
        ballast()
    ));
    let daemon = installation.start().await;
    let status = daemon.whole().await;
    let answer = content(&daemon.ask("hello").await);
    let workers = pids(&status);
    assert_eq!(workers.len(), 2);
    eventually("a child hides", || !all_with(&mark).is_empty()).await;
    let hidden = all_with(&mark);
    daemon.kill();
    installation.replay();

    let daemon = installation.start().await;
    let status = daemon.whole().await;
    assert_eq!(
        pids(&status),
        workers,
        "the same processes: {}",
        installation.log()
    );
    assert!(
        status.workers.iter().all(|worker| worker.starts == 1),
        "{status:#?}"
    );
    assert!(
        hidden.iter().all(|pid| runs(*pid)),
        "a child of a worker that goes on"
    );
    assert_eq!(content(&daemon.ask("hello").await), answer);
    daemon.end().await;
    eventually("the hidden child has ended", || {
        !hidden.iter().any(|pid| runs(*pid))
    })
    .await;
    // And once more, after a clean end.
    let daemon = installation.start().await;
    daemon.whole().await;
    daemon.end().await;
    assert_eq!(
        installation.replay().lines().count(),
        3,
        "three runs in one journal"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_ends_it_in_the_middle_of_an_answer() {
    let installation = Installation::new(&format!(
        "{}{}workers:\n{}",
        budget(128),
        demo_model(4096),
        ballast()
    ));
    let daemon = installation.start().await;
    daemon.whole().await;
    let pid = daemon.pid();
    let (answer, ()) = tokio::join!(daemon.ask("tell me a story"), async {
        let deadline = Instant::now() + PATIENCE;
        while daemon
            .metric("cotenant_kv_used_bytes")
            .await
            .is_none_or(|bytes| bytes == 0.0)
        {
            assert!(Instant::now() < deadline, "it does not generate");
        }
        daemon.signal(Signal::SIGTERM);
    });
    // The answer ends with a reason, not silently.
    assert!([200, 503].contains(&answer.status), "{}", answer.text());
    eventually("it ends", || !runs(pid)).await;
    installation.replay();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_another_user_kills_comes_back_and_the_events_say_why() {
    if !speech_is_installed() {
        return;
    }
    let installation = Installation::new(&format!("{}workers:\n{}", budget(192), asr()));
    let daemon = installation.start().await;
    let status = daemon.until("ready", workers_ready).await;
    let before = worker(&status, "asr").pid.unwrap();
    kill(pid_of(before), Signal::SIGKILL).unwrap();
    let status = daemon
        .until("another one is ready", |status| {
            workers_ready(status) && worker(status, "asr").pid.is_some_and(|pid| pid != before)
        })
        .await;
    let asr = worker(&status, "asr");
    assert_eq!((asr.starts, asr.failures), (2, 1));
    assert!(
        asr.last_exit
            .contains("was killed by SIGKILL, sender unknown"),
        "{}",
        asr.last_exit
    );
    assert!(
        installation
            .events()
            .contains("was killed by SIGKILL, sender unknown")
    );
    let table = in_one_line(&installation.tell(&["status"]));
    assert!(table.contains("was killed by SIGKILL"), "{table}");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_drains_admits_nothing_new() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(1024)));
    let daemon = installation.start().await;
    daemon.whole().await;
    assert_eq!(installation.run(&["health"]).status.code(), Some(0));
    installation.tell(&["drain"]);
    let answer = daemon.ask("hello").await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (503, "draining"),
        "{}",
        answer.text()
    );
    assert_eq!(
        installation.run(&["generate", "hello"]).status.code(),
        Some(4)
    );
    assert_eq!(installation.run(&["health"]).status.code(), Some(4));
    assert!(installation.tell(&["status"]).contains("draining"));
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_follows_the_events_misses_none_and_goes_on_with_the_next_supervisor() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGKILL] {
        let installation = Installation::new(&format!("{}{}", budget(128), demo_model(1024)));
        let daemon = installation.start().await;
        let printed = tempfile::NamedTempFile::new().unwrap();
        let complaints = tempfile::NamedTempFile::new().unwrap();
        let mut follow = Command::new(PROGRAM)
            .args(["events", "--follow", "--endpoint"])
            .arg(format!("unix://{}", installation.socket().display()))
            .stdout(printed.reopen().unwrap())
            .stderr(complaints.reopen().unwrap())
            .spawn()
            .unwrap();
        daemon.whole().await;
        // Closing the terminal does not end it.
        daemon.signal(Signal::SIGHUP);
        installation.tell(&["shed", "512KiB"]);
        let pid = daemon.pid();
        // The decision must precede the end.
        daemon
            .until("shed", |status| {
                status
                    .engine
                    .as_ref()
                    .is_some_and(|engine| engine.sheds == 1)
            })
            .await;
        // Nothing can be reported after a SIGKILL, so the line must already be written.
        let text = || std::fs::read_to_string(printed.path()).unwrap();
        eventually("the decision is reported", || {
            text().contains("an operator asked for 512 KiB")
        })
        .await;
        daemon.signal(signal);
        eventually("it ends", || !runs(pid)).await;
        let complaint = || std::fs::read_to_string(complaints.path()).unwrap();
        eventually("it is reported", || {
            complaint().contains("the supervisor stopped")
        })
        .await;
        assert!(
            text().contains("an operator asked for 512 KiB"),
            "{signal}: {}",
            text()
        );
        // The next daemon continues in the same output.
        drop(daemon);
        let daemon = installation.start().await;
        eventually("it goes on", || complaint().contains("reconnected")).await;
        installation.tell(&["drain"]);
        eventually("what happens next is reported", || text().contains("drain")).await;
        assert!(
            !complaint().contains("missing"),
            "{signal}: {}",
            complaint()
        );
        follow.kill().unwrap();
        follow.wait().unwrap();
        daemon.end().await;
        installation.replay();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_client_is_answered_before_the_machine_was_read() {
    const RUNS: usize = 3;
    let installation = Installation::new(&budget(64));
    for run in 0..RUNS {
        let asks = async {
            loop {
                let request = CreateLeaseRequest {
                    request_id: format!("run {run}"),
                    tenant: format!("early-{run}"),
                    lease_class: LeaseClass::Interactive.into(),
                    min_bytes: 1 << 20,
                    ..CreateLeaseRequest::default()
                };
                // It is queried as soon as the socket exists, earlier than by any user.
                if let Ok(channel) = Endpoint::Path(installation.socket()).connect().await
                    && LeaseServiceClient::new(channel)
                        .create_lease(request)
                        .await
                        .is_ok()
                {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let (daemon, ()) = tokio::join!(installation.start(), asks);
        daemon.end().await;
    }
    let journal = std::fs::read_to_string(installation.path("journal.ndjson")).unwrap();
    let mut sampled = false;
    let mut asked = 0;
    for line in journal.lines() {
        sampled &= !line.contains("\"kind\":\"start\"");
        sampled |= line.contains("\"event\":\"sampled\"");
        if line.contains("\"event\":\"lease_requested\"") {
            assert!(sampled, "asked before there was a sample, in run {asked}");
            asked += 1;
        }
    }
    assert_eq!(asked, RUNS);
}

fn notified(socket: &UnixDatagram) -> Vec<String> {
    let mut messages = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(length) = socket.recv(&mut buffer) {
        messages.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
    }
    messages
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_takes_over_what_it_can_and_names_what_needs_a_restart() {
    let mut installation = Installation::new(&format!("{}workers:\n{}", budget(96), ballast()));
    let systemd = UnixDatagram::bind(installation.path("notify")).unwrap();
    systemd.set_nonblocking(true).unwrap();
    let wrapper = installation.path("as-a-service");
    let script = format!(
        "#!/bin/sh\nNOTIFY_SOCKET={} exec {PROGRAM} \"$@\"\n",
        installation.path("notify").display()
    );
    std::fs::write(&wrapper, script).unwrap();
    std::fs::set_permissions(&wrapper, std::fs::Permissions::from_mode(0o755)).unwrap();
    installation.program = wrapper.to_str().unwrap().to_owned();
    let daemon = installation.start().await;
    daemon.until("the worker is ready", workers_ready).await;
    let same = installation.tell(&["reload"]);
    assert_eq!(same, "nothing has changed\n");
    notified(&systemd);

    // A file with a fault changes nothing, regardless of its other contents.
    let text = std::fs::read_to_string(installation.config()).unwrap();
    let changed = text
        .replace("dwell: 300ms", "dwell: 450ms")
        .replace("ballast, 2MiB", "ballast, 3MiB")
        .replace("filter: info", "filter: debug")
        .replace("journal.ndjson}", "journal.ndjson, max_size: 1MiB}");
    std::fs::write(
        installation.config(),
        changed.replace("reclaim_min: 8MiB", "reclaim_min: 8"),
    )
    .unwrap();
    let refused = installation.run(&["reload"]);
    assert_eq!(refused.status.code(), Some(78), "{}", said(&refused));
    let words = said(&refused);
    assert!(
        words.contains("shedding.reclaim_min: `8` has no unit") && words.contains("hint: "),
        "{words}"
    );
    let logged = "configuration not reloaded, nothing changed";
    let by = format!(" by uid {}, nothing", nix::unistd::getuid());
    eventually(
        "the refusal is logged, and an event with its origin",
        || {
            let event = logged.replace(", nothing", &by);
            installation.log().contains(logged) && installation.events().contains(&event)
        },
    )
    .await;

    // Neither does a budget in which the workers could never run.
    std::fs::write(
        installation.config(),
        changed.replace("total: 160MiB", "total: 72MiB"),
    )
    .unwrap();
    let refused = installation.run(&["reload"]);
    assert_eq!(refused.status.code(), Some(78), "{}", said(&refused));
    assert!(
        said(&refused).contains("is above the whole budget of 8 MiB"),
        "{}",
        said(&refused)
    );

    std::fs::write(installation.config(), &changed).unwrap();
    let done = installation.json(&["reload"]);
    assert_eq!(
        (&done["appliedKeys"], &done["restartKeys"]),
        (
            &serde_json::json!(["budget.dwell", "workers.ballast.argv", "log.filter"]),
            &serde_json::json!(["journal.max_size"])
        )
    );
    let reported = notified(&systemd).join("\n");
    let (begun, ended) = (
        reported.rfind("RELOADING=1\nMONOTONIC_USEC="),
        reported.rfind("READY=1"),
    );
    assert!(begun.is_some() && begun < ended, "{reported}");
    eventually("the log has finer lines", || {
        installation.log().contains("\"level\":\"DEBUG\"")
    })
    .await;
    assert!(
        installation
            .events()
            .contains("applied: budget.dwell, workers.ballast.argv, log.filter")
    );

    // The worker keeps running, and uses the new settings from its next start.
    let argument = |status: &GetStatusResponse| {
        let pid = worker(status, "ballast").pid.unwrap();
        std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap()
    };
    let status = daemon.status().await;
    assert!(argument(&status).contains("2MiB") && worker(&status, "ballast").starts == 1);
    installation.tell(&["recycle", "ballast"]);
    let status = daemon
        .until("started again", |status| {
            workers_ready(status) && worker(status, "ballast").starts == 2
        })
        .await;
    assert!(argument(&status).contains("3MiB"));

    // The method of systemd.
    std::fs::write(
        installation.config(),
        changed.replace("dwell: 450ms", "dwell: 500ms"),
    )
    .unwrap();
    daemon.signal(Signal::SIGHUP);
    eventually("the signal is obeyed", || {
        installation
            .events()
            .contains("applied: budget.dwell; needs")
    })
    .await;
    daemon.end_after(&["configuration not reloaded"]).await;
    installation.replay();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_reads_the_document_of_status_with_the_last_events() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(1024)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let named = |status: &GetStatusResponse| !status.next_shed.is_empty();
    daemon.until("the next shed is named", named).await;
    let printed = installation.json(&["status"]);
    let mut shown = get(daemon.http, "/status.json").await.json();
    let mut only_here = |field: &str| shown.as_object_mut().unwrap().remove(field).unwrap();
    let events = only_here("events");
    assert_eq!(only_here("postMortems"), serde_json::json!([]));
    assert!(only_here("host").is_string());
    only_here("board");
    assert_eq!(only_here("mayOperate"), false);
    let history = get(daemon.http, "/history.json").await.json();
    assert_eq!(history["stepSeconds"], 2);
    let mut marks = history["marks"].as_array().unwrap().iter();
    let load = marks.find(|mark| mark["kind"] == "growth").unwrap();
    assert!(
        load["text"].as_str().unwrap().contains("; ready after "),
        "{load}"
    );
    let fields = |document: &Value| -> Vec<String> {
        document.as_object().unwrap().keys().cloned().collect()
    };
    assert_eq!(fields(&shown), fields(&printed));
    for part in ["budget", "engine"] {
        assert_eq!(fields(&shown[part]), fields(&printed[part]), "{part}");
    }
    assert_eq!(
        shown["engine"]["layersResident"],
        printed["engine"]["layersResident"]
    );
    let events = events.as_array().unwrap();
    assert!((2..=40).contains(&events.len()), "{events:?}");
    assert!(
        events
            .iter()
            .all(|event| event["name"] != "sampled" && event.get("body").is_none())
    );
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conversations_survive_a_restart_where_they_are_kept_on_disk() {
    for keeps in [true, false] {
        let model = demo_model(8192).replace("}\n", &format!(", keep_conversations: {keeps}}}\n"));
        let installation = Installation::new(&format!("{}{model}", budget(128)));
        let question = "the light in the kitchen was on all day long. ".repeat(30);
        let mut messages = vec![json!({"role": "user", "content": question})];
        let daemon = installation.start().await;
        daemon.whole().await;
        let answer = daemon.chat(json!({ "messages": messages })).await;
        daemon.end().await;
        let folder = installation.path("state/conversations");
        assert_eq!(folder.join("1").exists(), keeps);
        messages.push(json!({"role": "assistant", "content": content(&answer)}));
        messages.push(json!({"role": "user", "content": "and now?"}));
        let daemon = installation.start().await;
        daemon.whole().await;
        let answer = daemon.chat(json!({ "messages": messages })).await;
        let usage = answer.json()["usage"].clone();
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
        assert_eq!(cached.unwrap() > 100, keeps, "{usage}");
        let shown = daemon.until("an answer has ended", |status| {
            status.engine.as_ref().unwrap().sequences.len() == 1
        });
        let shown = shown.await.engine.unwrap().sequences;
        assert_eq!(shown[0].disk_bytes > 0, keeps, "{shown:?}");
        daemon.end().await;
        // Switched off, it leaves nothing behind.
        if keeps {
            let off = format!("{}{}", budget(128), demo_model(8192));
            installation.configure(&off);
            let daemon = installation.start().await;
            assert!(!folder.exists());
            daemon.end().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequences_are_listed_with_their_kv_and_what_they_reused() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(8192)));
    let daemon = installation.start().await;
    let fresh = daemon.whole().await;
    assert!(fresh.engine.unwrap().sequences.is_empty());
    let question = "the light in the kitchen was on all day long. ".repeat(30);
    let mut messages = vec![json!({"role": "user", "content": question})];
    for turn in 0..2 {
        let answer = daemon.chat(json!({ "messages": messages })).await;
        messages.push(json!({"role": "assistant", "content": content(&answer)}));
        messages.push(json!({"role": "user", "content": "and now?"}));
        let usage = answer.json()["usage"].clone();
        let kept = daemon.until("kept", |status| {
            let sequences = &status.engine.as_ref().unwrap().sequences;
            sequences.len() == 1 && sequences[0].state() == SequenceState::Kept
        });
        let engine = kept.await.engine.unwrap();
        let sequence = &engine.sequences[0];
        assert_eq!(sequence.lease_class(), LeaseClass::Interactive);
        let figures = [
            sequence.prompt_tokens,
            sequence.generated_tokens,
            sequence.reused_tokens,
        ];
        let answered = [
            "/prompt_tokens",
            "/completion_tokens",
            "/prompt_tokens_details/cached_tokens",
        ];
        assert_eq!(
            figures.map(u64::from),
            answered.map(|at| usage.pointer(at).unwrap().as_u64().unwrap())
        );
        assert_eq!(sequence.reused_tokens > 100, turn > 0, "{sequence:?}");
        assert!(sequence.kv_tokens >= sequence.prompt_tokens, "{sequence:?}");
        assert_eq!(
            sequence.kv_blocks,
            sequence.kv_tokens.div_ceil(engine.kv_block_tokens)
        );
        // 2 KiB per token, in whole blocks.
        assert!(
            sequence.kv_bytes >= u64::from(sequence.kv_tokens) * 2048,
            "{sequence:?}"
        );
        let shown = &installation.json(&["status"])["engine"]["sequences"][0];
        assert_eq!(shown["kvTokens"], sequence.kv_tokens);
    }
    // A conversation that diverges earlier is kept separately.
    let other = format!(
        "{} and the one in the hall?",
        &question[..question.len() / 2]
    );
    daemon
        .chat(json!({ "messages": [{"role": "user", "content": other}] }))
        .await;
    let both = daemon.until("two are kept", |status| {
        let sequences = &status.engine.as_ref().unwrap().sequences;
        sequences.len() == 2 && sequences[1].idle.is_some()
    });
    let engine = both.await.engine.unwrap();
    let [last, beside] = &engine.sequences[..] else {
        panic!("{engine:?}");
    };
    assert_eq!(last.idle, None, "{last:?}");
    assert_eq!(beside.state(), SequenceState::Kept);
    assert!(beside.kv_tokens > last.kv_tokens, "{beside:?}");
    assert!(beside.shared_bytes < beside.kv_bytes, "{beside:?}");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_journal_is_drawn_by_owner_with_what_was_shed() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(16_384)));
    let daemon = installation.start().await;
    daemon.whole().await;
    installation.tell(&["shed", "8MiB"]);
    daemon.end().await;
    let journal = installation.path("journal.ndjson").display().to_string();
    let svg = installation.path("memory.svg");
    installation.tell(&[
        "plot",
        &journal,
        "--since",
        "1h",
        "--svg",
        &svg.display().to_string(),
    ]);
    let svg = std::fs::read_to_string(svg).unwrap();
    for text in ["budget 128 MiB", "unaccounted", "llm", "shed "] {
        assert!(svg.contains(text), "{text} is not in the picture");
    }
    let points = installation.json(&["plot", &journal]);
    let held = |point: &Value| point["heldBytes"]["llm"].as_u64().unwrap_or(0);
    let held: Vec<u64> = points.as_array().unwrap().iter().map(held).collect();
    let most = *held.iter().max().unwrap();
    assert!(
        held[0] == 0 && most > 8 << 20 && held.last().unwrap() + (8 << 20) <= most,
        "{held:?}"
    );
    assert!(
        installation
            .tell(&["plot", &journal])
            .contains("budget 128 MiB")
    );
    // From now on, not from the last line.
    let old = std::fs::read_to_string(&journal)
        .unwrap()
        .replace("\"unix_us\":1", "\"unix_us\":");
    let before = installation.path("old.ndjson");
    std::fs::write(&before, old).unwrap();
    let refused = installation.run(&["plot", &before.display().to_string(), "--since", "1h"]);
    assert!(
        said(&refused).contains("no events in this period"),
        "{}",
        said(&refused)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn api_keys_are_read_again_and_never_shown() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(1024)));
    let keys = installation.path("keys.yaml");
    let write = |text: &str, mode| {
        std::fs::write(&keys, text).unwrap();
        std::fs::set_permissions(&keys, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let text = std::fs::read_to_string(installation.config()).unwrap();
    let text = text
        .replace(
            "http: {",
            &format!("http: {{keys_file: {}, ", keys.display()),
        )
        .replace("dwell: 300ms", "dwell: 10m");
    std::fs::write(installation.config(), text).unwrap();
    write(
        "clients: [{name: kitchen, key: first-key-of-kitchen, tokens_max: 3}]\n",
        0o644,
    );
    let (status, complaint) = installation.refuses_to_start();
    assert_eq!(status.code(), Some(78), "{complaint}");
    assert!(
        complaint.contains("mode 0644") && complaint.contains("chmod 600"),
        "{complaint}"
    );

    write(
        "clients: [{name: kitchen, key: first-key-of-kitchen, tokens_max: 3}]\n",
        0o600,
    );
    let daemon = installation.start().await;
    daemon.whole().await;
    let ask = async |key: &str, body: &str| {
        let header = format!("Bearer {key}");
        post(
            daemon.http,
            "/v1/chat/completions",
            &[("authorization", header.as_str())],
            body.as_bytes(),
        )
        .await
    };
    let body = r#"{"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}"#;
    let answer = ask("first-key-of-kitchen", body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(
        answer.json()["usage"]["completion_tokens"]
            .as_u64()
            .unwrap()
            <= 3,
        "{}",
        answer.text()
    );
    assert_eq!(ask("second-key-of-kitchen", body).await.status, 401);

    // A context beyond the KV capacity in force: the event names its client.
    installation.tell(&["shed", "1MiB"]);
    let capacity = async || daemon.status().await.engine.unwrap().kv_capacity_tokens;
    let shed = capacity().await;
    assert!(shed < 1024, "{shed}");
    let wish = r#"{"model": "demo", "messages": [{"role": "user", "content": "hello"}], "stream": false,
        "options": {"num_ctx": 1024, "num_predict": 2}}"#;
    let key = ("authorization", "Bearer first-key-of-kitchen");
    assert_eq!(
        post(daemon.http, "/api/chat", &[key], wish.as_bytes())
            .await
            .status,
        200
    );
    eventually("the event names the client", || {
        installation
            .events()
            .contains("a request of client `kitchen` requests")
    })
    .await;
    // This is not an operator's command: the shed and its dwell stay in force.
    assert_eq!(capacity().await, shed);
    assert!(
        daemon
            .status()
            .await
            .engine
            .unwrap()
            .growth_waits
            .contains("the dwell after the last shed")
    );
    assert!(
        !installation
            .events()
            .contains("an operator requests regrowth"),
        "{}",
        installation.events()
    );

    write(
        "clients: [{name: kitchen, key: second-key-of-kitchen}]\n",
        0o600,
    );
    assert_eq!(installation.tell(&["reload"]), "applied: http.keys_file\n");
    assert_eq!(installation.tell(&["reload"]), "nothing has changed\n");
    assert_eq!(ask("first-key-of-kitchen", body).await.status, 401);
    assert_eq!(ask("second-key-of-kitchen", body).await.status, 200);
    write(
        "clients: [{name: kitchen, key: third-key-of-kitchen}]\n",
        0o640,
    );
    assert_eq!(installation.run(&["reload"]).status.code(), Some(78));
    assert_eq!(
        ask("second-key-of-kitchen", body).await.status,
        200,
        "what runs stays"
    );
    let shown = installation.json(&["events"]).to_string()
        + &installation.log()
        + &said(&installation.run(&["check", installation.config().to_str().unwrap()]));
    assert!(!shown.contains("key-of-kitchen"), "{shown}");
    daemon.end_after(&["configuration not reloaded"]).await;
}

/// Both ends of the configuration's ranges, as far as one daemon can run with all of them at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_works_at_both_ends_of_what_the_configuration_accepts() {
    let least = "budget: {total: 192MiB, reserve: 64MiB, scope: session, hysteresis: 0B, dwell: 0s, grace: 0s, fill_rate_max: 1MiB, sample_min: 1ms, sample_max: 10ms}
shedding: {reclaim_min: 0B, settle: 0s, verify_timeout: 100ms, deadlines: {audio-realtime: 1ms, interactive: 1ms, llm-elastic: 1ms, batch: 1ms}}
leases: {term_min: 100ms, term_max: 100ms, wait_max: 0s, queue_max: 1, per_user_max: 1}
llm: {path: MODEL, name: demo, threads: 1, context: 1024, kv_floor: 64, prefill_chunk: 1, prefill_chunk_max: 1, answer_tokens_max: 1, answer_time_max: 1s, resident_layers_min: 0, restart: {intensity: 0, window: 1s, stable_after: 0s, backoff: 1ms, backoff_max: 1ms}}
workers:
  - {name: ballast, role: other, argv: [\"${SELF}\", worker, ballast, 2MiB], ready: {kind: log, text: holding, timeout: 20s}, stop_grace: 0s, restart: {intensity: 0, window: 1s, stable_after: 0s, backoff: 1ms, backoff_max: 1ms}, memory: {steady: 12MiB, peak: 16MiB, recycle_above: none}}
wyoming: {listen: [\"tcp://127.0.0.1:0\"], wait_max: 0s, audio_max: 1s, connections_max: 1, conversations_max: 0, history_max: 0B}
";
    let most = "budget: {total: 1GiB, reserve: 64MiB, scope: session, dwell: 1h, grace: 1m, fill_rate_max: 1024GiB, sample_min: 1s, sample_max: 10s}
shedding: {settle: 1m, verify_timeout: 10m, deadlines: {audio-realtime: 1m, interactive: 1m, llm-elastic: 1m, batch: 1m}}
leases: {term_min: 1h, term_max: 1d, wait_max: 1h, queue_max: 1000, per_user_max: 1000}
llm: {path: MODEL, name: demo, threads: 256, context: 1048576, kv_floor: 64, prefill_chunk: 4096, prefill_chunk_max: 4096, answer_tokens_max: 1048576, answer_time_max: 1d, resident_layers_min: 1024, load_timeout: 1h, apply_timeout: 10m, restart: {intensity: 100, window: 1d, stable_after: 1d, backoff: 1h, backoff_max: 1d}}
workers:
  - {name: ballast, role: other, argv: [\"${SELF}\", worker, ballast, 2MiB], ready: {kind: log, text: holding, timeout: 30m}, stop_grace: 10m, restart: {intensity: 100, window: 1d, stable_after: 1d, backoff: 1h, backoff_max: 1d}, memory: {steady: 12MiB, peak: 16MiB, recycle_above: none}}
wyoming: {listen: [\"tcp://127.0.0.1:0\"], wait_max: 1m, audio_max: 10m, connections_max: 1024, conversations_max: 10000, history_max: 1MiB}
";
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/demo-model/demo.gguf");
    for (sections, journal, grows) in [(least, "64KiB", true), (most, "64GiB", false)] {
        let installation = Installation::new(&sections.replace("MODEL", model));
        let text = std::fs::read_to_string(installation.config()).unwrap();
        let text = text
            .replace(
                "journal.ndjson}",
                &format!("journal.ndjson, max_size: {journal}}}"),
            )
            .replace(
                "crashes: 0",
                if grows {
                    "crashes: 0, within: 1s"
                } else {
                    "crashes: 100, within: 1d"
                },
            );
        std::fs::write(installation.config(), text).unwrap();
        let daemon = installation.start().await;
        let loaded = daemon.until("all that fits is there", |status| {
            let engine = status.engine.as_ref().unwrap();
            engine.layers_resident == engine.layers_total
                && engine.layers_total > 0
                && workers_ready(status)
        });
        let full = loaded.await.engine.unwrap().plan_bytes;
        assert_eq!(daemon.ask("hello").await.status, 200);
        installation.tell(&["shed", "1MiB"]);
        if grows {
            daemon
                .until("it has grown back", |status| {
                    status.engine.as_ref().unwrap().plan_bytes == full
                })
                .await;
        }
        daemon.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_three_crashes_the_llm_stays_off_and_an_operator_loads_it() {
    let installation = Installation::new(&format!(
        "{}{}workers:\n{}",
        budget(128),
        demo_model(1024),
        ballast()
    ));
    let text = std::fs::read_to_string(installation.config()).unwrap();
    std::fs::write(
        installation.config(),
        text.replace("crashes: 0", "crashes: 3"),
    )
    .unwrap();
    installation.start().await.end().await;
    for _ in 0..3 {
        installation.start().await.kill();
    }
    let daemon = installation.start().await;
    let status = daemon
        .until("the worker is ready and the LLM off", |status| {
            workers_ready(status)
                && status
                    .engine
                    .as_ref()
                    .is_some_and(|engine| !engine.failure.is_empty())
        })
        .await;
    let failure = status.engine.unwrap().failure;
    assert!(
        failure.starts_with("safe profile: the daemon crashed 3 times"),
        "{failure}"
    );
    let events = installation.events();
    let words: Vec<&str> = events.split_whitespace().collect();
    assert!(
        words
            .join(" ")
            .contains("safe profile: the daemon crashed 3 times"),
        "{events}"
    );
    let health = get(daemon.http, "/health").await;
    assert!(
        health.status == 503 && health.text().contains("safe profile"),
        "{}",
        health.text()
    );
    assert_eq!(daemon.metric("cotenant_safe_profile").await, Some(1.0));
    assert_eq!(daemon.ask("hello").await.status, 500);
    installation.tell(&["load"]);
    daemon.whole().await;
    assert_eq!(daemon.metric("cotenant_safe_profile").await, Some(0.0));
    assert_eq!(daemon.ask("hello").await.status, 200);
    daemon.kill();

    // A reload loads it too.
    let daemon = installation.start().await;
    assert_eq!(daemon.metric("cotenant_safe_profile").await, Some(1.0));
    installation.tell(&["reload"]);
    daemon.whole().await;
    daemon.end_after(&["the LLM has failed"]).await;
}
