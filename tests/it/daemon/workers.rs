//! Workers of a daemon that rest, wake, outgrow their bounds, fail while memory is short, and speak HTTP.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use cotenant::rpc::v1::{GetStatusResponse, WorkerState};
use nix::sys::signal::{Signal, kill};

use super::house::{House, PROGRAM, budget, demo_model, pid_of, said, worker, workers_ready};
use crate::support::fixture;

/// An entry of `workers:`: the speech server in Python, with further keys.
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

/// An entry of `workers:`: one that takes so much memory, with further keys.
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

fn python_is_there() -> bool {
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

fn second_of_silence() -> Vec<u8> {
    cotenant::speech::audio::MonoAudio::new(16_000, vec![0; 16_000])
        .to_wav()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_speak_http_stand_behind_the_same_doors() {
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
        let house = House::new(&format!(
            "{}workers:\n{}{}",
            budget(256),
            http_worker("ears", "asr", ears, model),
            http_worker("mouth", "tts", mouth, model)
        ));
        let daemon = house.start().await;
        daemon.until("ready", workers_ready).await;
        let heard = daemon.hear(&second_of_silence()).await;
        assert_eq!(heard.status, 200, "{}", heard.text());
        assert_eq!(heard.json()["text"], format!("16000 frames at 16000; {fields}"));
        let spoken = daemon.speak("hello").await;
        assert_eq!((spoken.status, spoken.header("content-type")), (200, "audio/wav"));
        // The tone is 0.1 s of 22 050 Hz and comes in the door's own rate, which is higher; no byte of it is lost.
        assert!(spoken.body.len() > 22_050 / 10 * 2, "{} bytes", spoken.body.len());

        // What goes wrong with one request is told to its client, and the next is served.
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
        // Audio that breaks off is not taken for its end.
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_sleeps_when_it_has_nothing_to_do_and_a_request_wakes_it() {
    if !python_is_there() {
        return;
    }
    let rest = "    idle: {stop_after: 1s}\n    wake_timeout: 30s\n";
    let house = House::new(&format!(
        "{}workers:\n{}",
        budget(128),
        http_worker("mouth", "tts", "piper-http", rest)
    ));
    let daemon = house.start().await;
    let asleep = |status: &GetStatusResponse| state_of(status, "mouth") == (WorkerState::Stopped, "idle".to_owned());
    let status = daemon.until("it sleeps", asleep).await;
    assert_eq!(worker(&status, "mouth").failures, 0);

    // Many at once: one start serves them all.
    let answers = futures_util::future::join_all((0..4).map(|_| daemon.speak("hello"))).await;
    for answer in answers {
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let status = daemon.until("it sleeps again", asleep).await;
    assert_eq!(worker(&status, "mouth").starts, 2);

    house.tell(&["stop", "mouth"]);
    let answer = daemon.speak("hello").await;
    assert_eq!((answer.status, answer.error_code().as_str()), (503, "stopped"));
    assert_eq!(answer.header("x-should-retry"), "false");
    assert!(
        answer.text().contains("an operator has stopped worker `mouth`"),
        "{}",
        answer.text()
    );
    assert!(house.tell(&["status"]).contains("stopped (operator)"));
    house.tell(&["start", "mouth"]);
    daemon.until("ready", workers_ready).await;
    assert_eq!(daemon.speak("hello").await.status, 200);
    daemon.end().await;
    house.replay();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_outgrows_its_bounds_is_started_anew() {
    let house = House::new(&format!(
        "{}workers:\n{}",
        budget(256),
        "  - name: ratchet
    argv: [\"${SELF}\", worker, ballast, 90MiB, --rate, 30MiB]
    ready: {kind: log, text: taking, timeout: 30s}
    memory: {steady: 30MiB, peak: 40MiB}
"
    ));
    let daemon = house.start().await;
    let status = daemon
        .until("it was started anew", |status| worker(status, "ratchet").starts >= 2)
        .await;
    assert_eq!(worker(&status, "ratchet").failures, 0, "that is no failure");
    assert!(house.tell(&["events"]).contains("where it is recycled"));
    daemon.end().await;
    house.replay();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_while_memory_is_short_is_not_answered_by_a_loop_of_starts() {
    // 120 MiB of budget. The neighbour takes 80 that nobody has leased, so that the reader cannot come back.
    let house = House::new(&format!(
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
    let daemon = house.start().await;
    let status = daemon
        .until("the reader is ready", |status| {
            worker(status, "reader").state() == WorkerState::Ready
        })
        .await;
    let before = worker(&status, "reader").pid.unwrap();
    house.tell(&["start", "neighbour"]);
    daemon
        .until("the neighbour has its memory", |status| {
            worker(status, "neighbour").state() == WorkerState::Ready
        })
        .await;
    // It may have been stopped for the pressure already; else it dies now, as by a failed allocation.
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

    house.tell(&["stop", "neighbour"]);
    let status = daemon
        .until("it is back", |status| {
            worker(status, "reader").state() == WorkerState::Ready
        })
        .await;
    let reader = worker(&status, "reader");
    assert_eq!((reader.starts, reader.failures), (starts + 1, failures), "by one start");
    daemon.end().await;
    house.replay();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_order_of_starts_is_that_of_the_file() {
    for (llm_after, expected) in [("", ["llm", "asr", "tts"]), ("after: [tts]", ["tts", "llm", "asr"])] {
        let model = demo_model(512).replace("name: demo", &format!("name: demo, {llm_after}"));
        let house = House::new(&format!(
            "{}{}workers:\n{}{}",
            budget(128),
            model.replace(", ,", ","),
            taker("asr", 2, "{steady: 12MiB, peak: 16MiB}", ""),
            taker("tts", 2, "{steady: 12MiB, peak: 16MiB}", ""),
        ));
        let daemon = house.start().await;
        daemon.whole().await;
        let journal = std::fs::read_to_string(house.path("journal.ndjson")).unwrap();
        let mut order = Vec::new();
        for line in journal.lines() {
            let who = if line.contains("\"load_engine\"") {
                "llm"
            } else if line.contains("\"start_worker\"") {
                if line.contains("\"asr\"") { "asr" } else { "tts" }
            } else {
                continue;
            };
            order.push(who);
        }
        assert_eq!(order, expected);
        daemon.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_shows_each_worker_as_it_would_be_started() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let house = House::new(&format!(
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
    let shown: serde_json::Value = house.json(&["check", "cotenant.yaml"]);
    let [asr, mouth] = shown["workers"].as_array().unwrap().as_slice() else {
        panic!("{shown}")
    };
    let socket = house.path("run/asr.sock").display().to_string();
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
        shown["verdict"].as_str().unwrap().contains("everything fits"),
        "{shown}"
    );
    assert!(!Path::new(&socket).exists(), "nothing was started");

    // What cannot be started is told, with an exit code.
    house.configure(&format!(
        "{}workers: [{{name: a, argv: [x], memory: {{steady: 1MiB}}, user: nobody-of-this-name}}]\n",
        budget(64)
    ));
    let output = house.run(&["check", "cotenant.yaml"]);
    assert_eq!(output.status.code(), Some(78), "{}", said(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("cannot start: user `nobody-of-this-name` does not exist"),
        "{text}"
    );
    assert!(Path::new(PROGRAM).exists());
}
