//! Drains with a wait for running answers.

use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};

use super::installation::{
    Daemon, Installation, PROGRAM, budget, content, demo_model, long_form, pid_of, said,
    workers_ready,
};
use super::wyoming_client::{Client, with_voice_at_a_socket};
use crate::http::client::Connection;
use cotenant::speech::wyoming::{
    Event,
    event::{Synthesize, SynthesizeStart, Text},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixListener,
};

/// Starts a daemon with an LLM and requests an answer of this many tokens; the connection has received its first words.
async fn answering(installation: &Installation, tokens: u32) -> (Daemon<'_>, Connection) {
    let daemon = installation.start().await;
    daemon.whole().await;
    let fields = json!({"max_tokens": tokens, "response_format": long_form()});
    let mut connection = daemon.tells(fields).await;
    connection.wait_for("\"content\":").await;
    (daemon, connection)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_that_is_waited_for_ends_with_the_last_answer_and_cuts_none() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(8192)));
    let (daemon, mut connection) = answering(&installation, 4000).await;
    let answer = tokio::spawn(async move { connection.answer().await });
    assert_eq!(installation.json(&["status"])["runningAnswers"], 1);
    // The time limit has passed at the first look.
    let late = installation.run(&["drain", "--wait", "1ms"]);
    assert_eq!(late.status.code(), Some(5), "{}", said(&late));
    let error = "error: drain timed out after 1 ms; answers still running: 1";
    assert!(said(&late).contains(error), "{}", said(&late));
    let late = installation.run(&["drain", "--wait", "1ms", "-o", "json"]);
    let error: Value = serde_json::from_slice(&late.stderr).unwrap();
    assert_eq!(error["error"]["figures"], json!({"runningAnswers": 1}));
    assert_eq!(error["error"]["exitCode"], 5);
    let status = installation.tell(&["status"]);
    assert!(
        status.contains(", draining\n") && status.contains("\nrunning: 1 answer\n"),
        "{status}"
    );
    let refused = daemon.ask("hello").await;
    assert_eq!(refused.error_code(), "draining", "{}", refused.text());

    let drained = installation.json(&["drain", "--wait", "60s"]);
    assert_eq!(
        (&drained["draining"], &drained["runningAnswers"]),
        (&json!(true), &json!(0))
    );
    // It was complete when the drain ended.
    daemon.signal(Signal::SIGKILL);
    let (events, _) = answer.await.unwrap().events();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    drop(daemon);

    let daemon = installation.start().await;
    daemon.whole().await;
    assert!(!content(&daemon.ask("hello").await).is_empty());
    assert_eq!(installation.json(&["status"])["runningAnswers"], 0);
    let text = installation.tell(&["drain", "--wait", "10s"]);
    assert!(
        text.starts_with("drained after ") && text.ends_with(": no answer is running\n"),
        "{text}"
    );
    installation.tell(&["drain", "--off"]);
    assert!(!content(&daemon.ask("hello").await).is_empty());
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_is_interrupted_leaves_the_drain_and_one_that_is_overtaken_says_so() {
    let installation = Installation::new(&format!("{}{}", budget(128), demo_model(8192)));
    let (daemon, connection) = answering(&installation, 3000).await;
    let wait = || {
        Command::new(PROGRAM)
            .args(["drain", "--wait", "60s", "--endpoint"])
            .arg(format!("unix://{}", installation.socket().display()))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let interrupted = wait();
    daemon.until("draining", |status| status.draining).await;
    kill(pid_of(interrupted.id()), Signal::SIGINT).unwrap();
    assert!(!interrupted.wait_with_output().unwrap().status.success());
    assert!(daemon.status().await.draining);

    installation.tell(&["drain", "--off"]);
    let overtaken = wait();
    daemon.until("draining", |status| status.draining).await;
    installation.tell(&["drain", "--off"]);
    let output = overtaken.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    assert!(
        said(&output).contains("the drain was ended"),
        "{}",
        said(&output)
    );

    // An answer whose client has disconnected is not running.
    drop(connection);
    installation.tell(&["drain", "--wait", "30s"]);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_is_spoken_is_spoken_to_its_last_sentence_in_a_drain() {
    let (installation, socket) = with_voice_at_a_socket();
    let daemon = installation.start().await;
    daemon.until("ready", workers_ready).await;
    // The test listens in place of the worker.
    let _ = std::fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket).unwrap();
    let voice = tokio::spawn(async move {
        let format = r#"{"rate":8000,"width":2,"channels":1}"#;
        let start = format!("{{\"type\":\"audio-start\",\"data\":{format}}}\n");
        let chunk =
            format!("{{\"type\":\"audio-chunk\",\"data\":{format},\"payload_length\":2}}\n");
        let sound = [
            start.as_bytes(),
            chunk.as_bytes(),
            &[1, 0],
            b"{\"type\":\"audio-stop\"}\n",
        ]
        .concat();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 4096];
            if stream.read(&mut request).await.is_ok_and(|count| count > 0) {
                let _ = stream.write_all(&sound).await;
            }
        }
    });
    let piece = |text: &str| {
        Event::SynthesizeChunk(Text {
            text: text.to_owned(),
        })
    };
    let mut client = Client::connect(&installation).await;
    client
        .say(Event::SynthesizeStart(SynthesizeStart::default()))
        .await;
    client.say(piece("Good night. Stop the")).await;
    client.until("audio-chunk").await;
    // Between two sentences the worker has no request, but the answer still runs.
    let late = installation.run(&["drain", "--wait", "300ms"]);
    assert_eq!(late.status.code(), Some(5), "{}", said(&late));
    let mut other = Client::connect(&installation).await;
    other
        .say(Event::Synthesize(Synthesize {
            text: "Good morning.".to_owned(),
            voice: None,
        }))
        .await;
    assert_eq!(other.refusal().await.0, "draining");

    client.say(piece(" music.")).await;
    client.say(Event::SynthesizeStop).await;
    let frames = client.until("synthesize-stopped").await;
    let kinds: Vec<&str> = frames.iter().map(|frame| frame.kind.as_str()).collect();
    assert_eq!(kinds, ["audio-chunk", "audio-stop", "synthesize-stopped"]);
    installation.tell(&["drain", "--wait", "30s"]);
    voice.abort();
    daemon.end().await;
}
