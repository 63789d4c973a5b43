//! The Wyoming listener with real workers, a real engine, and non-compliant workers.

use std::time::{Duration, Instant};

use cotenant::speech::{
    client::{ClientTimeouts, Endpoint, WyomingClient},
    wyoming::{
        AudioFormat, Event,
        event::{AudioStart, RunPipeline, Synthesize, Transcript},
    },
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixListener,
};

use super::installation::{Installation, asr, budget, demo_model, said, tts};
use super::wyoming_client::{Client, LISTENER, with_voice_at_a_socket, wyoming_socket};
use crate::support::{PATIENCE, speech_is_installed};

fn asks(text: &str) -> Event {
    Event::Transcript(Transcript {
        text: text.to_owned(),
        ..Transcript::default()
    })
}

fn speaks(text: &str) -> Event {
    Event::Synthesize(Synthesize {
        text: text.to_owned(),
        voice: None,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_utterance_ends_the_answer_at_once_and_the_engine_is_free() {
    let installation = Installation::new(&format!("{}{}{LISTENER}", budget(128), demo_model(4096)));
    let daemon = installation.start().await;
    daemon.whole().await;
    let mut client = Client::connect(&installation).await;
    let wanted = RunPipeline {
        start_stage: "asr".to_owned(),
        end_stage: "handle".to_owned(),
    };
    client.say(Event::RunPipeline(wanted)).await;
    // If it is reported before it can be interrupted, use the next one.
    for _ in 0..20 {
        client.say(asks("tell me a story")).await;
        client.until("handled-chunk").await;
        let start = AudioStart {
            format: AudioFormat::mono_16_bit(16_000),
            timestamp: None,
        };
        client.say(Event::AudioStart(start)).await;
        client.until("handled-stop").await;
        let interrupted = daemon
            .metric("cotenant_request_seconds_count{route=\"wyoming/handle\",code=\"499\"}")
            .await;
        if interrupted.is_some() {
            // Far from its end, because the engine answers the next one now.
            let started = Instant::now();
            client.say(asks("good night")).await;
            client.until("handled-stop").await;
            assert!(started.elapsed() < PATIENCE);
            daemon.end().await;
            return;
        }
    }
    panic!("it could not be interrupted: {}", installation.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn describe_is_answered_while_no_worker_is_up() {
    let installation = Installation::new("");
    // A file whose open blocks the engine.
    let model = installation.path("model.gguf");
    nix::unistd::mkfifo(&model, nix::sys::stat::Mode::S_IRWXU).unwrap();
    installation.configure(&format!(
        "{}llm: {{path: {}, name: demo, threads: 1}}\n{LISTENER}workers:
  - name: asr
    role: asr
    argv: [sleep, \"1000\"]
    memory: {{steady: 4MiB}}
",
        budget(128),
        model.display(),
    ));
    let daemon = installation.start().await;
    let client = WyomingClient::new(
        Endpoint::Unix(wyoming_socket(&installation)),
        ClientTimeouts::default(),
    );
    let mut slowest = Duration::ZERO;
    for _ in 0..50 {
        let began = Instant::now();
        let info = client.describe().await.unwrap();
        slowest = slowest.max(began.elapsed());
        assert_eq!(info.asr[0].artifact.name, "asr");
        assert_eq!(info.handle[0].artifact.name, "demo");
        assert!(info.tts.is_empty());
    }
    println!("describe took {slowest:?} at most");
    assert!(
        slowest < Duration::from_secs(1),
        "Home Assistant gives up after 1 s: {slowest:?}"
    );
    drop(daemon);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_answers_garbage_is_reported_to_that_client_and_the_next_is_served() {
    let (installation, socket) = with_voice_at_a_socket();
    let daemon = installation.start().await;
    daemon
        .until("ready", super::installation::workers_ready)
        .await;
    let start = b"{\"type\":\"audio-start\",\"data\":{\"rate\":8000,\"width\":2,\"channels\":1}}\n";
    let chunk =
        b"{\"type\":\"audio-chunk\",\"data\":{\"rate\":8000,\"width\":2,\"channels\":1},\"payload_length\":4}\n";
    let stop = b"{\"type\":\"audio-stop\"}\n";
    let answers: [Vec<u8>; 5] = [
        b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        [&start[..], &chunk[..], b"\x01\x00"].concat(),
        [&start[..], b"\xff\xfe{}\n"].concat(),
        b"{\"type\":\"error\",\"data\":{\"text\":\"no such thing\",\"code\":\"odd\"}}\n".to_vec(),
        [&start[..], &chunk[..], b"\x01\x00\x02\x00", &stop[..]].concat(),
    ];
    // The test itself listens in place of the worker.
    let _ = std::fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket).unwrap();
    let (says, answer) = tokio::sync::watch::channel(Vec::new());
    let misreporting = tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let words: Vec<u8> = answer.borrow().clone();
            let mut request = [0; 4096];
            if stream.read(&mut request).await.is_ok_and(|count| count > 0) {
                let _ = stream.write_all(&words).await;
            }
        }
    });
    for (number, words) in answers.into_iter().enumerate() {
        says.send_replace(words);
        let mut client = Client::connect(&installation).await;
        client.say(speaks("good night")).await;
        if number == 4 {
            let audio = client.until("audio-stop").await;
            assert_eq!(audio[1].payload, [1, 0, 2, 0]);
            continue;
        }
        let error = client.until("error").await.pop().unwrap();
        assert_eq!(error.data["code"], "worker-lost", "{error:?}");
        let text = error.data["text"].as_str().unwrap();
        assert!(text.starts_with("worker `tts` failed: "), "{text}");
        assert!(
            client.reader.next().await.unwrap().is_none(),
            "it is not closed"
        );
        // The listener itself stays open.
        let listener = WyomingClient::new(
            Endpoint::Unix(wyoming_socket(&installation)),
            ClientTimeouts::default(),
        );
        listener.ping().await.unwrap();
    }
    misreporting.abort();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recording_is_said_and_answered_from_the_command_line() {
    if !speech_is_installed() {
        return;
    }
    let installation = Installation::new(&format!(
        "{}{}{LISTENER}workers:\n{}{}",
        budget(256),
        demo_model(4096),
        tts(),
        asr()
    ));
    let daemon = installation.start().await;
    daemon.whole().await;
    let recording = daemon.speak("turn on the kitchen light").await.body;
    std::fs::write(installation.path("question.wav"), &recording).unwrap();
    std::fs::write(
        installation.path("broken.wav"),
        &recording[..recording.len() / 2],
    )
    .unwrap();
    let uri = format!("unix://{}", wyoming_socket(&installation).display());
    let talk = |file: &str| {
        installation.run(&[
            "talk",
            file,
            "--uri",
            &uri,
            "--out",
            "answer.wav",
            "-o",
            "json",
        ])
    };
    let output = tokio::task::block_in_place(|| talk("question.wav"));
    assert!(output.status.success(), "{}", said(&output));
    let spoken: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(spoken["heard"], "turn on the kitchen light");
    assert!(
        spoken["answer"].as_str().unwrap().contains("kitchen"),
        "{spoken}"
    );
    assert!(
        spoken["firstAudioMs"].as_u64() <= spoken["doneMs"].as_u64(),
        "{spoken}"
    );
    let answer = std::fs::read(installation.path("answer.wav")).unwrap();
    let answer = cotenant::speech::audio::parse_wav(&answer, PATIENCE).unwrap();
    assert!(
        answer.duration() > Duration::from_millis(300),
        "{:?}",
        answer.duration()
    );
    let output = tokio::task::block_in_place(|| talk("broken.wav"));
    assert!(
        !output.status.success() && said(&output).contains("truncated"),
        "{}",
        said(&output)
    );
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_by_the_dozen_do_not_delay_describe() {
    let installation = Installation::new(&format!("{}{LISTENER}", budget(64)));
    let daemon = installation.start().await;
    // More than there are slots.
    let mut idle = Vec::new();
    for _ in 0..40 {
        idle.push(
            tokio::net::UnixStream::connect(wyoming_socket(&installation))
                .await
                .unwrap(),
        );
    }
    // Its own limit is the one second allowed by Home Assistant.
    let client = WyomingClient::new(
        Endpoint::Unix(wyoming_socket(&installation)),
        ClientTimeouts::default(),
    );
    for _ in 0..20 {
        client.describe().await.unwrap();
    }
    drop(idle);
    daemon.end().await;
}
