//! Workers that rest, wake, exceed bounds, fail under memory shortage, and use HTTP.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use cotenant::rpc::v1::{CreateLeaseRequest, GetStatusResponse, LeaseClass, WorkerState};
use nix::sys::signal::{Signal, kill};

use super::installation::{
    Daemon, Installation, PROGRAM, asr, budget, demo_model, pid_of, said, worker, workers_ready,
};
use crate::support::fixture;

/// Returns an entry of `workers:` for the speech server in Python, with further keys.
fn http_worker(name: &str, role: &str, protocol: &str, further: &str) -> String {
    format!(
        "  - name: {name}
    role: {role}
    protocol: {protocol}
    argv: [python3, {}, \"${{PORT}}\"]
    ready: {{kind: http, timeout: 30s}}
    memory: {{steady: 40MiB, peak: 60MiB}}
{further}",
        fixture("speech_server.py").display()
    )
}

/// Returns an entry of `workers:` that takes this much memory, with further keys.
fn taker(name: &str, takes_mib: u32, declared: &str, further: &str) -> String {
    format!(
        "  - name: {name}
    argv: [\"${{SELF}}\", worker, ballast, {takes_mib}MiB]
    ready: {{kind: notify, timeout: 30s}}
    restart: {{backoff: 50ms, backoff_max: 100ms}}
    memory: {declared}
{further}"
    )
}

pub(super) fn python_is_there() -> bool {
    let found = Command::new("python3")
        .args(["-c", "import http.server"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !found {
        println!("left out: there is no python3");
    }
    found
}

fn state_of(status: &GetStatusResponse, name: &str) -> (WorkerState, String) {
    let worker = worker(status, name);
    (worker.state(), worker.resting.clone())
}

fn second_of_speech() -> Vec<u8> {
    cotenant::speech::audio::MonoAudio::new(16_000, crate::support::voiced(16_000))
        .to_wav()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_speak_http_are_reached_through_the_same_listeners() {
    if !python_is_there() {
        return;
    }
    let own = (
        "whisper-server",
        "piper-http",
        "",
        "response_format=json, temperature=0.0",
    );
    let openai = (
        "openai-http",
        "openai-http",
        "    model: base\n",
        "model=base, response_format=json",
    );
    for (ears, mouth, model, fields) in [own, openai] {
        let installation = Installation::new(&format!(
            "{}workers:\n{}{}",
            budget(256),
            http_worker("ears", "asr", ears, model),
            http_worker("mouth", "tts", mouth, model)
        ));
        let daemon = installation.start().await;
        daemon.until("ready", workers_ready).await;
        let heard = daemon.hear(&second_of_speech()).await;
        assert_eq!(heard.status, 200, "{}", heard.text());
        assert_eq!(
            heard.json()["text"],
            format!("16000 frames at 16000; {fields}")
        );
        let spoken = daemon.speak("hello").await;
        assert_eq!(
            (spoken.status, spoken.header("content-type")),
            (200, "audio/wav")
        );
        // The tone is 0.1 s at 22 050 Hz and arrives at the listener's higher rate, complete.
        assert!(
            spoken.body.len() > 22_050 / 10 * 2,
            "{} bytes",
            spoken.body.len()
        );

        // A failed request is reported to its client, and the next is served.
        for (text, reason) in [
            ("fail", "no memory for that voice"),
            ("garbage", "its audio is not WAV"),
        ] {
            let answer = daemon.speak(text).await;
            assert_eq!(
                (answer.status, answer.error_code().as_str()),
                (503, "worker_lost"),
                "{text}"
            );
            assert!(answer.text().contains(reason), "{}", answer.text());
        }
        // Truncated audio is not reported as complete.
        let cut = daemon.speak("cut").await;
        assert!(
            cut.status == 503 || !cut.complete,
            "{}: {} bytes",
            cut.status,
            cut.body.len()
        );
        assert_eq!(daemon.speak("hello").await.status, 200);
        daemon.end().await;
    }
}

/// Creates an installation whose voice sleeps after a second of idleness.
fn sleepy_installation() -> Installation {
    let rest = "    idle: {stop_after: 1s}\n    wake_timeout: 30s\n";
    Installation::new(&format!(
        "{}workers:\n{}",
        budget(128),
        http_worker("mouth", "tts", "piper-http", rest)
    ))
}

fn asleep(status: &GetStatusResponse) -> bool {
    state_of(status, "mouth") == (WorkerState::Stopped, "idle".to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_sleeps_when_it_has_nothing_to_do_and_a_request_wakes_it() {
    if !python_is_there() {
        return;
    }
    let installation = sleepy_installation();
    let daemon = installation.start().await;
    let status = daemon.until("it sleeps", asleep).await;
    assert_eq!(worker(&status, "mouth").failures, 0);

    // One start serves many simultaneous requests.
    let answers = futures_util::future::join_all((0..4).map(|_| daemon.speak("hello"))).await;
    for answer in answers {
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let status = daemon.until("it sleeps again", asleep).await;
    assert_eq!(worker(&status, "mouth").starts, 2);

    installation.tell(&["stop", "mouth"]);
    let answer = daemon.speak("hello").await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (503, "stopped")
    );
    assert_eq!(answer.header("x-should-retry"), "false");
    assert!(
        answer
            .text()
            .contains("an operator has stopped worker `mouth`"),
        "{}",
        answer.text()
    );
    assert!(
        installation
            .tell(&["status"])
            .contains("stopped (operator)")
    );
    installation.tell(&["start", "mouth"]);
    daemon.until("ready", workers_ready).await;
    assert_eq!(daemon.speak("hello").await.status, 200);
    daemon.end().await;
    installation.replay();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_outgrows_its_bounds_is_started_again() {
    let installation = Installation::new(&format!(
        "{}workers:\n{}",
        budget(256),
        "  - name: ratchet
    argv: [\"${SELF}\", worker, ballast, 90MiB, --rate, 30MiB]
    ready: {kind: log, text: taking, timeout: 30s}
    memory: {steady: 30MiB, peak: 40MiB, recycle_above: 40MiB}
"
    ));
    let daemon = installation.start().await;
    let status = daemon
        .until("it was started again", |status| {
            worker(status, "ratchet").starts >= 2
        })
        .await;
    assert_eq!(worker(&status, "ratchet").failures, 0, "that is no failure");
    assert!(
        installation
            .tell(&["events"])
            .contains("above its recycle limit")
    );
    daemon.end().await;
    installation.replay();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_while_memory_is_short_is_not_answered_by_a_loop_of_starts() {
    // 120 MiB of budget. The neighbour takes 80 MiB without a lease, so that the reader cannot restart.
    let installation = Installation::new(&format!(
        "{}workers:\n{}{}",
        budget(120),
        taker("reader", 30, "{steady: 45MiB, peak: 60MiB}", ""),
        taker(
            "neighbour",
            80,
            "{steady: 4MiB, recycle_above: none}",
            "    autostart: false\n    class: audio-realtime\n"
        ),
    ));
    let daemon = installation.start().await;
    let status = daemon
        .until("the reader is ready", |status| {
            worker(status, "reader").state() == WorkerState::Ready
        })
        .await;
    let before = worker(&status, "reader").pid.unwrap();
    installation.tell(&["start", "neighbour"]);
    daemon
        .until("the neighbour has its memory", |status| {
            worker(status, "neighbour").state() == WorkerState::Ready
        })
        .await;
    // It may already have been stopped for pressure; otherwise it dies now, as after a failed allocation.
    let _ = kill(pid_of(before), Signal::SIGKILL);
    let waits = |status: &GetStatusResponse| {
        let (state, resting) = state_of(status, "reader");
        state == WorkerState::AwaitingMemory || resting == "shed"
    };
    let status = daemon.until("it waits for its memory", waits).await;
    let starts = worker(&status, "reader").starts;
    // Longer than ten backoffs.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(2);
    daemon
        .until("time passes, and it waits on", |status| {
            assert!(waits(status), "{:?}", state_of(status, "reader"));
            std::time::Instant::now() >= until
        })
        .await;
    let failures = worker(&daemon.status().await, "reader").failures;
    assert!(failures <= 1, "{failures} failures");

    installation.tell(&["stop", "neighbour"]);
    let status = daemon
        .until("it is back", |status| {
            worker(status, "reader").state() == WorkerState::Ready
        })
        .await;
    let reader = worker(&status, "reader");
    assert_eq!(
        (reader.starts, reader.failures),
        (starts + 1, failures),
        "by one start"
    );
    daemon.end().await;
    installation.replay();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_order_of_starts_is_that_of_the_file() {
    for (llm_after, expected) in [
        ("", ["llm", "asr", "tts"]),
        ("after: [tts]", ["tts", "llm", "asr"]),
    ] {
        let model = demo_model(512).replace("name: demo", &format!("name: demo, {llm_after}"));
        let installation = Installation::new(&format!(
            "{}{}workers:\n{}{}",
            budget(128),
            model.replace(", ,", ","),
            taker("asr", 2, "{steady: 12MiB, peak: 16MiB}", ""),
            taker("tts", 2, "{steady: 12MiB, peak: 16MiB}", ""),
        ));
        let daemon = installation.start().await;
        daemon.whole().await;
        // The journal is complete only after that: it is written behind the decisions.
        daemon.end().await;
        let journal = std::fs::read_to_string(installation.path("journal.ndjson")).unwrap();
        let mut order = Vec::new();
        for line in journal.lines() {
            let who = if line.contains("\"load_engine\"") {
                "llm"
            } else if line.contains("\"start_worker\"") {
                if line.contains("\"asr\"") {
                    "asr"
                } else {
                    "tts"
                }
            } else {
                continue;
            };
            order.push(who);
        }
        assert_eq!(order, expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_shows_each_worker_as_it_would_be_started() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let installation = Installation::new(&format!(
        "{}workers:
  - name: asr
    role: asr
    argv: [python3, -m, wyoming_faster_whisper, --uri, 'unix://${{SOCKET}}', --model, base]
    memory: {{steady: 4MiB}}
    limits: {{open_files: 100, memory: 64MiB}}
    sandbox: {{read: [/usr], syscalls: restricted}}
  - name: mouth
    role: tts
    protocol: piper-http
    port: {port}
    argv: [python3, -m, piper.http_server, --port, '${{PORT}}']
    memory: {{steady: 4MiB}}
",
        budget(64)
    ));
    let shown: serde_json::Value = installation.json(&["check", "cotenant.yaml"]);
    let [asr, mouth] = shown["workers"].as_array().unwrap().as_slice() else {
        panic!("{shown}")
    };
    let socket = installation.path("run/asr.sock").display().to_string();
    assert_eq!(asr["argv"][4], format!("unix://{socket}"));
    assert_eq!(
        (&asr["protocol"], &asr["endpoint"]),
        (&"wyoming".into(), &format!("unix://{socket}").into())
    );
    let confinement = asr["confinement"].to_string();
    for what in [
        "memory limit: ",
        "resource limits: open_files 100",
        "files: ",
        "system calls: ",
    ] {
        assert!(confinement.contains(what), "{what} is not in {confinement}");
    }
    assert_eq!(mouth["argv"][4], port.to_string());
    let warning = mouth["warnings"][0].as_str().unwrap();
    assert!(
        warning.starts_with(&format!("port {port} of 127.0.0.1 is taken by `")),
        "{warning}"
    );
    assert!(
        shown["verdict"]
            .as_str()
            .unwrap()
            .contains("everything fits"),
        "{shown}"
    );
    assert!(!Path::new(&socket).exists(), "nothing was started");

    // A start failure is reported, with an exit code.
    installation.configure(&format!(
        "{}workers: [{{name: a, argv: [x], memory: {{steady: 1MiB}}, user: no-such-user}}]\n",
        budget(64)
    ));
    let output = installation.run(&["check", "cotenant.yaml"]);
    assert_eq!(output.status.code(), Some(78), "{}", said(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("cannot start: user `no-such-user` does not exist"),
        "{text}"
    );
    assert!(Path::new(PROGRAM).exists());
}

/// Returns a request that soon ends if it is not granted.
fn asks(tenant: &str, class: LeaseClass, mib: u64, seconds: i64) -> CreateLeaseRequest {
    CreateLeaseRequest {
        request_id: format!("{tenant} asks for {mib}"),
        tenant: tenant.to_owned(),
        lease_class: class.into(),
        min_bytes: mib << 20,
        max_bytes: mib << 20,
        term: Some(prost_types::Duration {
            seconds: 60,
            nanos: 0,
        }),
        max_wait: Some(prost_types::Duration { seconds, nanos: 0 }),
        ..CreateLeaseRequest::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_memory_of_a_worker_that_sleeps_is_kept_and_it_is_back_in_time() {
    if !python_is_there() {
        return;
    }
    let installation = sleepy_installation();
    let daemon = installation.start().await;
    daemon.until("it sleeps", asleep).await;
    // Its peak is 60 MiB: a lease of 100 of 128 MiB would prevent its restart, one of 40 does not.
    let mut leases = daemon.leases();
    let denied = leases
        .create_lease(asks("thief", LeaseClass::Batch, 100, 0))
        .await
        .unwrap_err();
    assert_eq!(denied.code(), tonic::Code::ResourceExhausted, "{denied}");
    leases
        .create_lease(asks("guest", LeaseClass::Batch, 40, 0))
        .await
        .unwrap();
    let began = std::time::Instant::now();
    let answer = daemon.speak("hello").await;
    let took = began.elapsed();
    assert_eq!(
        answer.status,
        200,
        "within its `wake_timeout`: {}",
        answer.text()
    );
    println!("it was woken and had answered after {took:?}");
    daemon.end().await;
    installation.replay();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_becomes_smaller_before_it_is_stopped() {
    if !crate::support::speech_is_installed() {
        return;
    }
    let installation = Installation::new(&format!(
        "{}workers:\n{}    class: batch\n",
        budget(160),
        asr()
    ));
    let daemon = installation.start().await;
    let before = daemon.until("ready", workers_ready).await;
    installation.tell(&["resize", "asr", "open", "--wait", "15s", "--timeout", "20s"]);
    // 116 of 160 MiB are held: 80 can be reclaimed by shrinking its vocabulary, more only by ending it.
    let mut leases = daemon.leases();
    leases
        .create_lease(asks("voice", LeaseClass::Interactive, 80, 15))
        .await
        .unwrap();
    let status = daemon
        .until("it is smaller", |status| {
            worker(status, "asr").variant == "grammar"
        })
        .await;
    let smaller = worker(&status, "asr");
    assert_eq!(
        (smaller.state(), smaller.starts),
        (WorkerState::Ready, 1),
        "{smaller:?}"
    );
    assert_eq!(smaller.pid, worker(&before, "asr").pid);
    leases
        .create_lease(asks("second", LeaseClass::Interactive, 60, 15))
        .await
        .unwrap();
    daemon
        .until("it is stopped", |status| {
            state_of(status, "asr").0 == WorkerState::Stopped
        })
        .await;
    assert_eq!(worker(&daemon.status().await, "asr").failures, 0);
    daemon.end().await;
    installation.replay();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_with_a_lease_of_its_own_is_the_only_one_to_ask_for_it() {
    let Some(venv) = std::env::var_os("COTENANT_CLIENTS_VENV") else {
        println!("left out: COTENANT_CLIENTS_VENV is not set; `tests/run` prepares it");
        return;
    };
    let clients = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients");
    let installation = Installation::new("");
    installation.configure(&format!(
        "{}workers:
  - name: vision
    role: other
    lease: own
    argv: [{}, -B, {}, {}, vision, \"90\"]
    ready: {{kind: log, text: granted, timeout: 30s}}
    restart: {{backoff: 50ms}}
    memory: {{steady: 60MiB, peak: 100MiB, recycle_above: none}}
",
        budget(256),
        Path::new(&venv).join("bin/python").display(),
        clients.join("own_lease.py").display(),
        installation.socket().display(),
    ));
    let daemon = installation.start().await;
    let status = daemon.until("ready", workers_ready).await;
    let pid = worker(&status, "vision").pid.unwrap();
    let held = || {
        let leases = installation.json(&["leases"]);
        let of = leases.as_array().unwrap().iter();
        of.filter(|lease| lease["tenant"] == "vision")
            .map(|lease| lease["heldBytes"].as_u64().unwrap() >> 20)
            .filter(|held| *held > 0)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        held(),
        [90],
        "one lease, and it is its own: {}",
        installation.json(&["leases"])
    );

    // Another process of the same user requests its name.
    let denied = denied_the_name(&daemon, "vision").await;
    assert!(denied.contains("it is a worker, process "), "{denied}");
    assert_eq!(held().len(), 1);

    // Its lease ends with it; the next one requests again.
    kill(pid_of(pid), Signal::SIGKILL).unwrap();
    let status = daemon
        .until("another one is ready", |status| {
            workers_ready(status) && worker(status, "vision").pid != Some(pid)
        })
        .await;
    assert_eq!(held(), [90], "{status:?}");
    daemon.end().await;
}

/// The figures of a board with 15 656 MiB at a scale of 1 to 100: TTS 238 and 97 more with its first sentence, ASR 1936
/// with a peak of 1092 more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orin_nx_v080_ends_well_in_either_order_of_starts() {
    for after in ["", "after: [tts, asr]"] {
        let model = demo_model(16_384).replace("name: demo", &format!("name: demo, {after}"));
        let installation = Installation::new(&format!(
            "{}{}workers:\n{}{}",
            budget(150),
            model.replace(", ,", ","),
            taker("tts", 4, "{steady: 14MiB, peak: 18MiB}", ""),
            taker(
                "asr",
                20,
                "{steady: 30MiB, peak: 42MiB}",
                "    after: [tts]\n"
            ),
        ));
        let daemon = installation.start().await;
        let status = daemon.whole().await;
        for name in ["tts", "asr"] {
            let worker = worker(&status, name);
            assert_eq!(
                (worker.starts, worker.failures),
                (1, 0),
                "{after}: {worker:?}"
            );
        }
        let budget = status.budget.unwrap();
        assert!(budget.held_bytes <= budget.budget_bytes, "{budget:?}");
        assert_eq!(daemon.ask("hello").await.status, 200);
        daemon.end().await;
        installation.replay();
    }
}

/// The LLM fails, the voice grows into its memory and keeps it, and the LLM must be reloaded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zoe_outage_ends_with_the_llm_back_and_the_voice_beside_it() {
    let installation = Installation::new("");
    let once = installation.path("grown").display().to_string();
    installation.configure(&format!(
        "{}{}workers:
  - name: tts
    role: other
    class: batch
    argv:
      - sh
      - -c
      - 'if [ -e {once} ]; then exec \"$0\" worker ballast 8MiB; else : > {once}; exec \"$0\" worker ballast 120MiB --rate 60MiB; fi'
      - \"${{SELF}}\"
    ready: {{kind: log, text: taking, timeout: 30s}}
    restart: {{backoff: 50ms}}
    memory: {{steady: 20MiB, peak: 26MiB, recycle_above: 40MiB}}
",
        budget(160),
        demo_model(32_768)
    ));
    let daemon = installation.start().await;
    let status = daemon
        .until("the voice is up", |status| {
            worker(status, "tts").state() == WorkerState::Ready
        })
        .await;
    let pid = worker(&status, "tts").pid.unwrap();
    // No supervisor observes its growth.
    daemon.kill();
    crate::support::eventually("it has grown far beyond its lease", || {
        super::installation::anonymous(pid) > 100 << 20
    })
    .await;

    let daemon = installation.start().await;
    // In either order: the LLM is reloaded, or the voice is found to be far too large.
    let status = daemon
        .until(
            "the LLM is whole, beside a voice that was started again",
            |status| {
                super::installation::whole(status)
                    && workers_ready(status)
                    && worker(status, "tts").starts > 1
            },
        )
        .await;
    let voice = worker(&status, "tts");
    assert_eq!(
        (voice.starts, voice.failures),
        (2, 0),
        "it was started again, once: {voice:?}"
    );
    assert_ne!(voice.pid, Some(pid));
    assert_eq!(daemon.ask("hello").await.status, 200);
    daemon.end().await;
    installation.replay();
}

/// Returns why this process, which is not a worker, is denied a lease under a worker's name: its memory would be
/// subtracted twice from each sample, with its worker and with its lease.
async fn denied_the_name(daemon: &Daemon<'_>, worker: &str) -> String {
    let asked = asks(worker, LeaseClass::Interactive, 10, 0);
    let denied = daemon.leases().create_lease(asked).await.unwrap_err();
    assert_eq!(denied.code(), tonic::Code::PermissionDenied, "{denied}");
    denied.message().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_of_a_worker_has_no_lease_by_another_name_and_no_tenant_has_one_by_the_name_of_a_worker_that_starts()
 {
    let installation = Installation::new("");
    installation.configure(&format!(
        "{}workers:
  - name: nest
    role: other
    argv: [sh, -c, '\"$0\" hold extra --min 8MiB -- true 2>{{FOLDER}}/refused; echo $? >{{FOLDER}}/code; exec \"$0\" worker ballast 2MiB', \"${{SELF}}\"]
    env: {{COTENANT_ENDPOINT: \"unix://{}\"}}
    ready: {{kind: log, text: holding, timeout: 30s}}
    memory: {{steady: 12MiB, peak: 16MiB}}
  - name: vision
    role: other
    lease: own
    argv: [sh, -c, 'until [ -e {{FOLDER}}/go ]; do sleep 0.05; done; \"$0\" hold vision --min 20MiB -- sleep 1000 & wait', \"${{SELF}}\"]
    env: {{COTENANT_ENDPOINT: \"unix://{}\"}}
    ready: {{kind: log, text: holds, timeout: 60s}}
    memory: {{steady: 40MiB, peak: 50MiB}}
",
        budget(128),
        installation.socket().display(),
        installation.socket().display(),
    ));
    let daemon = installation.start().await;
    let status = daemon
        .until("the first is ready and the second starts", |status| {
            state_of(status, "nest").0 == WorkerState::Ready
                && state_of(status, "vision").0 == WorkerState::Starting
        })
        .await;
    let refused = std::fs::read_to_string(installation.path("refused")).unwrap();
    assert_eq!(
        std::fs::read_to_string(installation.path("code"))
            .unwrap()
            .trim(),
        "4",
        "{refused}"
    );
    let pid = worker(&status, "nest").pid.unwrap();
    assert!(
        refused.contains(&format!(
            "belongs to worker `nest`, process {pid}, and is measured with it"
        )),
        "{refused}"
    );
    assert!(
        status.leases.iter().all(|lease| lease.tenant != "extra"),
        "{status:?}"
    );

    // It is not ready, but its name is already reserved.
    let denied = denied_the_name(&daemon, "vision").await;
    // Regardless of whether its process exists yet.
    assert!(denied.contains("it is a worker, "), "{denied}");
    assert!(denied.ends_with(" does not belong"), "{denied}");
    std::fs::write(installation.path("go"), "").unwrap();
    let status = daemon.until("both are ready", workers_ready).await;
    let held = |tenant: &str| -> u64 {
        let of_it = status.leases.iter().filter(|lease| lease.tenant == tenant);
        of_it.map(|lease| lease.held_bytes >> 20).sum()
    };
    assert_eq!(held("vision"), 20, "{status:?}");
    daemon.end().await;
}
