//! Faulty workers behind the listeners: hangs, aborted replies, foreign protocols.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use cotenant::{
    rpc::v1::WorkerState,
    speech::wyoming::{
        AudioFormat, Event, Voice,
        event::{AudioChunk, AudioStart, AudioStop, Synthesize},
    },
};
use futures_util::future::join_all;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;

use super::{
    installation::{Daemon, Installation, budget, worker, workers_ready},
    workers::python_is_there,
    wyoming_client::{Client, LISTENER},
};
use crate::{
    http::client::{Answer, post},
    support::{PATIENCE, fixture},
};

/// Creates an installation with a recogniser and a voice, in a few lines of Python.
fn installation() -> Installation {
    installation_with("500ms")
}

fn installation_with(answer_timeout: &str) -> Installation {
    let entry = |name: &str, role: &str| {
        format!(
            "  - name: {name}
    role: {role}
    argv: [python3, {}, \"${{SOCKET}}\"]
    restart: {{backoff: 50ms}}
    answer_timeout: {answer_timeout}
    memory: {{steady: 30MiB, peak: 40MiB}}
",
            fixture("wyoming_worker.py").display()
        )
    };
    Installation::new(&format!(
        "{}{LISTENER}workers:\n{}{}",
        budget(128),
        entry("ears", "asr"),
        entry("mouth", "tts")
    ))
}

fn speaks(text: &str, voice: Option<Voice>) -> Event {
    Event::Synthesize(Synthesize {
        text: text.to_owned(),
        voice,
    })
}

fn speaker(name: Option<&str>, speaker: &str) -> Option<Voice> {
    Some(Voice {
        name: name.map(str::to_owned),
        speaker: Some(speaker.to_owned()),
        language: None,
    })
}

/// Returns 0.1 s of audio in Wyoming's format.
fn voice() -> Vec<u8> {
    cotenant::speech::audio::pcm_bytes(&crate::support::voiced(1600))
}

/// Returns 0.1 s of audio as a WAV file.
fn speech() -> Vec<u8> {
    cotenant::speech::audio::MonoAudio::new(16_000, crate::support::voiced(1600))
        .to_wav()
        .unwrap()
}

/// Waits until the listener returns the descriptions of its workers.
async fn reported(
    client: &mut Client,
    wanted: impl Fn(&serde_json::Map<String, serde_json::Value>) -> bool,
) {
    loop {
        client.say(Event::Describe).await;
        let info = client.until("info").await.pop().unwrap();
        if wanted(&info.data) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Checks that the other worker still serves.
async fn hears(daemon: &Daemon<'_>) {
    let spoken = speech();
    let heard = daemon.hear(&spoken).await;
    assert_eq!(
        (heard.status, &heard.json()["text"]),
        (200, &"turn on".into()),
        "{}",
        heard.text()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_hangs_in_the_middle_of_its_audio_is_reported_ended_and_started_again() {
    if !python_is_there() {
        return;
    }
    let installation = installation();
    let daemon = installation.start().await;
    let before = daemon.until("ready", workers_ready).await;

    // One of its requests hangs: its client is notified, and nothing else is affected.
    let mut client = Client::connect(&installation).await;
    client.say(speaks("stick", None)).await;
    assert_eq!(client.until("audio-chunk").await[0].kind, "audio-start");
    let (code, text) = client.refusal().await;
    assert_eq!(code, "worker-lost");
    assert!(text.contains("did not synthesize within 0.5 s"), "{text}");
    hears(&daemon).await;
    let answer = daemon.speak("stick").await;
    assert!(
        !answer.complete || answer.status == 503,
        "{}",
        answer.status
    );
    assert_eq!(daemon.speak("hello").await.status, 200);
    let status = daemon.status().await;
    assert_eq!(
        worker(&status, "mouth").pid,
        worker(&before, "mouth").pid,
        "it answers others"
    );

    // The whole worker hangs: it is ended, and the certificate gives the reason.
    let mut client = Client::connect(&installation).await;
    client.say(speaks("hang", None)).await;
    assert_eq!(client.refusal().await.0, "worker-lost");
    hears(&daemon).await;
    let status = daemon
        .until("another one is ready", |status| {
            let mouth = worker(status, "mouth");
            mouth.state() == WorkerState::Ready && mouth.starts == 2
        })
        .await;
    assert_eq!(worker(&status, "ears").pid, worker(&before, "ears").pid);
    let certificate = installation.json(&["postmortem", "mouth"]);
    assert!(
        certificate.to_string().contains("\"hang\""),
        "{certificate}"
    );
    let words = installation.tell(&["postmortem", "mouth"]);
    assert!(words.contains("3 later probes timed out"), "{words}");
    assert_eq!(daemon.speak("hello").await.status, 200);
    daemon.end_after(&["worker does not respond"]).await;
}

/// A worker that replies only to `GET /health`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_over_http_that_answers_no_request_in_a_row_is_ended_as_hung() {
    if !python_is_there() {
        return;
    }
    let installation = Installation::new(&format!(
        "{}workers:
  - name: mouth
    role: tts
    protocol: piper-http
    argv: [python3, {}, \"${{PORT}}\"]
    ready: {{kind: http, timeout: 30s}}
    restart: {{backoff: 50ms}}
    answer_timeout: 1s
    memory: {{steady: 40MiB, peak: 60MiB}}
",
        budget(128),
        fixture("speech_server.py").display()
    ));
    let daemon = installation.start().await;
    daemon.until("ready", workers_ready).await;
    // Two are no proof, if another request was answered in between.
    for text in ["hang", "hello", "hang", "hang"] {
        let answer = daemon.speak(text).await;
        let expected = if text == "hello" { 200 } else { 503 };
        assert_eq!(answer.status, expected, "{}", answer.text());
    }
    assert_eq!(worker(&daemon.status().await, "mouth").starts, 1);
    assert_eq!(daemon.speak("hang").await.status, 503);
    daemon
        .until("another one is ready", |status| {
            workers_ready(status) && worker(status, "mouth").starts == 2
        })
        .await;
    let words = installation.tell(&["postmortem", "mouth"]);
    assert!(
        words.contains("none of the last 3 requests was answered"),
        "{words}"
    );
    assert_eq!(daemon.speak("hello").await.status, 200);
    daemon.end_after(&["worker does not respond"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_worker_sends_wrong_is_reported_to_that_client_alone() {
    if !python_is_there() {
        return;
    }
    let installation = installation();
    let daemon = installation.start().await;
    let before = daemon.until("ready", workers_ready).await;
    for (text, problem) in [("garbage", "does not speak Wyoming"), ("half", "")] {
        let mut client = Client::connect(&installation).await;
        client.say(speaks(text, None)).await;
        let (code, said) = client.refusal().await;
        assert_eq!(code, "worker-lost");
        assert!(
            said.starts_with("worker `mouth` failed: ") && said.contains(problem),
            "{said}"
        );
        let mut next = Client::connect(&installation).await;
        next.say(speaks("hello", None)).await;
        next.until("audio-stop").await;
        hears(&daemon).await;
    }
    // A client that sends half a frame and disconnects.
    let mut client = Client::connect(&installation).await;
    client
        .writer
        .write_all(b"{\"type\":\"audio-chunk\",\"payload_length\":640}\n\0\0")
        .await
        .unwrap();
    drop(client);
    hears(&daemon).await;
    let after = daemon.status().await;
    for name in ["ears", "mouth"] {
        assert_eq!(
            worker(&after, name).pid,
            worker(&before, name).pid,
            "{name}"
        );
    }
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transcript_that_comes_in_pieces_is_passed_on_in_pieces() {
    if !python_is_there() {
        return;
    }
    let installation = installation();
    let daemon = installation.start().await;
    daemon.until("ready", workers_ready).await;
    let mut client = Client::connect(&installation).await;
    reported(&mut client, |info| {
        info["asr"][0]["supports_transcript_streaming"] == true
    })
    .await;
    let format = AudioFormat::mono_16_bit(16_000);
    for _ in 0..2 {
        client
            .say(Event::AudioStart(AudioStart {
                format,
                timestamp: None,
            }))
            .await;
        client
            .say(Event::AudioChunk(AudioChunk {
                format,
                timestamp: None,
                audio: voice(),
            }))
            .await;
        client.say(Event::AudioStop(AudioStop::default())).await;
        let frames = client.until("transcript-stop").await;
        let reported: Vec<_> = frames
            .iter()
            .map(|frame| {
                (
                    frame.kind.as_str(),
                    frame.data.get("text").and_then(|text| text.as_str()),
                )
            })
            .collect();
        assert_eq!(
            reported,
            [
                ("transcript-start", None),
                ("transcript-chunk", Some("turn")),
                ("transcript-chunk", Some(" on")),
                ("transcript", Some("turn on")),
                ("transcript-stop", None),
            ]
        );
    }
    // Over HTTP the same pieces are deltas.
    let spoken = speech();
    let fields = [
        ("model", None, &b"whisper-1"[..]),
        ("stream", None, b"true"),
        ("file", Some("a.wav"), &spoken),
    ];
    let answer =
        crate::http::client::post_form(daemon.http, "/v1/audio/transcriptions", &fields).await;
    let payloads: Vec<serde_json::Value> = answer
        .text()
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    let reported: Vec<_> = payloads
        .iter()
        .map(|payload| {
            payload["delta"]
                .as_str()
                .or_else(|| payload["text"].as_str())
        })
        .collect();
    assert_eq!(
        reported,
        [Some("turn"), Some(" on"), Some("turn on")],
        "{}",
        answer.text()
    );
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_voice_of_several_people_speaks_as_the_one_who_is_asked_for() {
    if !python_is_there() {
        return;
    }
    let installation = installation();
    let daemon = installation.start().await;
    daemon.until("ready", workers_ready).await;
    let mut client = Client::connect(&installation).await;
    reported(&mut client, |info| {
        info["tts"][0]["voices"][0]["speakers"][1]["name"] == "bass"
    })
    .await;
    for (voice, sample) in [
        (None, 0),
        (speaker(Some("choir"), "alto"), 1),
        (speaker(Some("choir"), "bass"), 2),
        (speaker(None, "bass"), 2),
        // This voice does not exist.
        (speaker(Some("alloy"), "bass"), 2),
    ] {
        client.say(speaks("hello", voice)).await;
        let frames = client.until("audio-stop").await;
        assert_eq!(frames[1].payload[..2], [sample, 0]);
    }
    for (voice, problem) in [
        (
            speaker(Some("choir"), "tenor"),
            "the voice `choir` has 2 speakers: `alto`, `bass`",
        ),
        (
            speaker(Some("solo"), "alto"),
            "the voice `solo` has one speaker",
        ),
        (speaker(None, "tenor"), "no installed voice has it"),
        (speaker(Some("alloy"), "tenor"), "no installed voice has it"),
    ] {
        let mut client = Client::connect(&installation).await;
        client.say(speaks("hello", voice)).await;
        let (code, text) = client.refusal().await;
        assert!(
            code == "bad-request" && text.contains(problem),
            "{code}: {text}"
        );
    }
    daemon.end().await;
}

/// A WAV file is complete within the client's read timeout, any other format has started by then. Every request is
/// accepted before the voice's speed is known, and after a pause.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn speech_that_cannot_come_within_the_clients_read_timeout_is_refused_at_once() {
    if !python_is_there() {
        return;
    }
    let installation = installation_with("10s");
    let daemon = installation.start().await;
    daemon.until("ready", workers_ready).await;
    let say = async |text: &str, format: &str, patience: Option<&str>| {
        let mut headers = vec![("content-type", "application/json")];
        headers.extend(patience.map(|patience| ("x-stainless-read-timeout", patience)));
        let body =
            json!({ "model": "tts-1", "voice": "alloy", "input": text, "response_format": format });
        post(
            daemon.http,
            "/v1/audio/speech",
            &headers,
            body.to_string().as_bytes(),
        )
        .await
    };
    let refused = |answer: &Answer| {
        assert_eq!(
            (answer.status, answer.error_code().as_str()),
            (503, "deadline_unreachable")
        );
        assert_eq!(answer.header("x-should-retry"), "true");
    };
    let short = "Slowly spoken.";
    assert_eq!(say(short, "wav", Some("1")).await.status, 200);

    let long = [short; 8].join(" ");
    refused(&say(&long, "wav", Some("1")).await);
    for (format, patience) in [
        ("pcm", Some("1")),
        ("flac", Some("1")),
        ("wav", Some("60")),
        ("wav", None),
    ] {
        let answer = say(&long, format, patience).await;
        assert!(
            answer.status == 200 && answer.complete,
            "{format}: {}",
            answer.status
        );
    }

    // With other requests queued it is refused, and accepted once they are done.
    let is_refused = Cell::new(false);
    let others = join_all((0..12).map(async |_| {
        while !is_refused.get() {
            let answer = say(short, "pcm", None).await;
            assert!(answer.status == 200 && answer.complete, "{}", answer.status);
        }
    }));
    let behind = async {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let answer = say(short, "pcm", Some("1")).await;
            if answer.status != 200 {
                is_refused.set(true);
                break refused(&answer);
            }
            assert!(Instant::now() < deadline, "it was never refused");
        }
    };
    tokio::join!(others, behind);
    assert_eq!(say(short, "pcm", Some("1")).await.status, 200);
    daemon.end().await;
}
