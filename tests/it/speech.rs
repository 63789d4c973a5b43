//! Speech over Wyoming: real voices and recognisers, and misbehaving peers.

use std::{sync::Arc, time::Duration};

use cotenant::{
    speech::{
        audio::{MonoAudio, TTS_RATE_HZ},
        client::{ClientError, ClientTimeouts, Endpoint, WyomingClient},
        server::{Refusal, Reply, Server, ServerLimits, Service, Session, SessionError},
        wyoming::{
            AudioFormat, Event, Frame, FrameLimits, FrameReader, Info,
            event::{
                AudioChunk, AudioStart, AudioStop, Ping, SynthesizeStart, Text, Transcribe,
                Transcript,
            },
            write_frame,
        },
    },
    worker::{handle::WorkerHandle, report::WorkerEventKind},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UnixStream},
    sync::Notify,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::support::{Bench, PATIENCE, speech_is_installed, started};

/// Commands of `tests/fixtures/home.gram`.
const COMMANDS: [&str; 12] = [
    "turn on the kitchen light",
    "turn off the bedroom lamp",
    "set the living room temperature to twenty degrees",
    "lock the front door",
    "open the garage door",
    "play some music in the bathroom",
    "stop the music",
    "set a timer for ten minutes",
    "what is the weather today",
    "dim the hallway light",
    "close the blinds in the bedroom",
    "good night",
];

fn client_of(worker: &WorkerHandle) -> WyomingClient {
    WyomingClient::new(worker.endpoint().unwrap(), ClientTimeouts::default())
}

async fn spoken(tts: &WyomingClient, text: &str) -> MonoAudio {
    tts.synthesize(text, None)
        .await
        .unwrap()
        .collect(PATIENCE)
        .await
        .unwrap()
}

/// Starts our recogniser and our voice; `None` if the speech libraries are not installed.
async fn both_workers() -> Option<(Bench, WorkerHandle, WorkerHandle)> {
    if !speech_is_installed() {
        return None;
    }
    let bench = Bench::new();
    let (asr, tts) = (bench.asr(), bench.tts());
    tokio::join!(started(&asr), started(&tts));
    Some((bench, asr, tts))
}

#[tokio::test]
async fn twelve_spoken_commands_are_heard_word_for_word() {
    let Some((_bench, asr, tts)) = both_workers().await else {
        return;
    };
    let (ears, mouth) = (client_of(&asr), client_of(&tts));
    let mut wrong = Vec::new();
    for command in COMMANDS {
        // Like an HTTP client: 24 kHz in a WAV file, and back.
        let wav = spoken(&mouth, command)
            .await
            .resampled(TTS_RATE_HZ)
            .unwrap()
            .to_wav()
            .unwrap();
        let audio = cotenant::speech::decode::decode_whole_for_asr(&wav, PATIENCE).unwrap();
        let heard = ears.hear(&audio, None, None).await.unwrap().text;
        if heard != command {
            wrong.push(format!("{command} -> {heard}"));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of 12 exact; {wrong:?}",
        12 - wrong.len()
    );
    tokio::join!(asr.stop_because(None, ""), tts.stop_because(None, ""));
}

#[tokio::test]
async fn a_recording_of_more_than_a_minute_is_heard_to_its_end() {
    let Some((_bench, asr, tts)) = both_workers().await else {
        return;
    };
    let mut recording = MonoAudio::new(16_000, Vec::new());
    let commands = &COMMANDS[..6];
    for command in commands {
        let command = spoken(&client_of(&tts), command)
            .await
            .resampled(16_000)
            .unwrap();
        recording.samples.extend(command.samples);
        recording.samples.extend([0; 9 * 16_000]);
    }
    assert!(recording.duration() > Duration::from_secs(60));
    let (pieces, mut reported) = tokio::sync::mpsc::channel(64);
    let heard = client_of(&asr)
        .hear(&recording, None, Some(&pieces))
        .await
        .unwrap();
    assert_eq!(heard.text, commands.join(" "));
    drop(pieces);
    let mut in_pieces = String::new();
    while let Some(piece) = reported.recv().await {
        in_pieces.push_str(&piece);
    }
    assert_eq!(in_pieces, heard.text);
    tokio::join!(asr.stop_because(None, ""), tts.stop_because(None, ""));
}

#[tokio::test]
async fn the_open_vocabulary_hears_what_no_grammar_lists() {
    let Some((_bench, asr, tts)) = both_workers().await else {
        return;
    };
    let question = spoken(&client_of(&tts), "what time is it")
        .await
        .resampled(16_000)
        .unwrap();
    let by_grammar = client_of(&asr).hear(&question, None, None).await.unwrap();
    assert_ne!(by_grammar.text, "what time is it");
    asr.resize("open").await.unwrap();
    assert_eq!(
        client_of(&asr)
            .hear(&question, None, None)
            .await
            .unwrap()
            .text,
        "what time is it"
    );
}

#[tokio::test]
async fn our_workers_say_what_they_are_and_refuse_what_makes_no_sense() {
    let Some((_bench, asr, tts)) = both_workers().await else {
        return;
    };
    let (ears, mouth) = (client_of(&asr), client_of(&tts));
    let info = ears.describe().await.unwrap();
    assert!(info.asr[0].artifact.installed && info.tts.is_empty());
    assert_eq!(info.asr[0].models[1].artifact.name, "open");
    let info = mouth.describe().await.unwrap();
    assert!(info.tts[0].voices[0].artifact.installed && info.asr.is_empty());
    ears.ping().await.unwrap();

    let silence = MonoAudio::new(16_000, Vec::new());
    assert_eq!(
        ears.hear(&silence, None, None).await.unwrap().text,
        "",
        "no audio is no error"
    );
    let endless = MonoAudio::new(8_000, vec![0; 8_000 * 601]);
    let error = ears.hear(&endless, None, None).await.unwrap_err();
    assert!(
        matches!(&error, ClientError::Refused { code: Some(code), .. } if code == "too-long"),
        "{error}"
    );
    let nothing = mouth
        .synthesize("...", None)
        .await
        .unwrap()
        .collect(PATIENCE)
        .await
        .unwrap();
    assert!(nothing.samples.is_empty());
    let error = mouth
        .synthesize(&"long ".repeat(10_000), None)
        .await
        .unwrap_err();
    assert!(
        matches!(&error, ClientError::Refused { text, .. } if text.contains("16 KiB")),
        "{error}"
    );
    let error = ears.resize("huge").await.unwrap_err();
    assert!(matches!(error, ClientError::Refused { .. }), "{error}");
}

#[tokio::test]
async fn a_text_in_pieces_is_spoken_as_it_comes() {
    if !speech_is_installed() {
        return;
    }
    let bench = Bench::new();
    let tts = bench.tts();
    started(&tts).await;
    let stream = UnixStream::connect(bench.socket("tts")).await.unwrap();
    let (reader, mut writer) = stream.into_split();
    let mut reader = FrameReader::new(reader, FrameLimits::default());
    let mut kinds = Vec::new();
    for event in [
        Event::SynthesizeStart(SynthesizeStart::default()),
        Event::SynthesizeChunk(Text {
            text: "Good night. ".to_owned(),
        }),
    ] {
        write_frame(&mut writer, &event.into_frame()).await.unwrap();
    }
    // The first sentence arrives before the text has ended.
    for _ in 0..2 {
        kinds.push(reader.next().await.unwrap().unwrap().kind);
    }
    assert_eq!(kinds, ["audio-start", "audio-chunk"]);
    for event in [
        Event::SynthesizeChunk(Text {
            text: "Stop the".to_owned(),
        }),
        Event::SynthesizeChunk(Text {
            text: " music".to_owned(),
        }),
        Event::SynthesizeStop,
    ] {
        write_frame(&mut writer, &event.into_frame()).await.unwrap();
    }
    while kinds.last().unwrap() != "synthesize-stopped" {
        kinds.push(reader.next().await.unwrap().unwrap().kind);
    }
    kinds.dedup();
    assert_eq!(
        kinds,
        [
            "audio-start",
            "audio-chunk",
            "audio-stop",
            "synthesize-stopped"
        ]
    );
}

// ---- misbehaving servers and a client ----

const HASTY: ClientTimeouts = ClientTimeouts {
    connect: Duration::from_secs(5),
    describe: Duration::from_millis(150),
    transcribe: Duration::from_millis(150),
    synthesize: Duration::from_millis(150),
    embed: Duration::from_millis(150),
    resize: Duration::from_millis(150),
};

/// Starts a server that writes these bytes on each connection, and then waits or closes.
async fn server_that_says(bytes: &'static [u8], closes: bool) -> WyomingClient {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut kept = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 1 << 16];
            let _ = stream.read(&mut request).await;
            let _ = stream.write_all(bytes).await;
            if closes {
                let _ = stream.shutdown().await;
            }
            kept.push(stream);
        }
    });
    WyomingClient::new(Endpoint::Tcp(address.to_string()), HASTY)
}

/// Whisper starts each word with a space.
#[tokio::test]
async fn a_transcript_begins_without_white_space() {
    let said = b"{\"type\":\"transcript-chunk\",\"data\":{\"text\":\" \"}}\n\
        {\"type\":\"transcript-chunk\",\"data\":{\"text\":\" Hello\"}}\n\
        {\"type\":\"transcript-chunk\",\"data\":{\"text\":\" you\"}}\n\
        {\"type\":\"transcript\",\"data\":{\"text\":\" Hello you\\n\"}}\n";
    let client = server_that_says(said, false).await;
    let audio = MonoAudio::new(16_000, vec![0; 1600]);
    let (pieces, mut heard_pieces) = tokio::sync::mpsc::channel(8);
    let heard = client.hear(&audio, None, Some(&pieces)).await.unwrap();
    assert_eq!(heard.text, "Hello you");
    drop(pieces);
    let mut all = Vec::new();
    while let Some(piece) = heard_pieces.recv().await {
        all.push(piece);
    }
    assert_eq!(all, ["Hello", " you"]);
}

#[tokio::test]
async fn a_server_that_hangs_is_given_up() {
    let client = server_that_says(b"", false).await;
    let audio = MonoAudio::new(16_000, vec![0; 16_000]);
    let text = client.describe().await.unwrap_err().to_string();
    assert!(
        text.ends_with("did not answer `describe` within 0.1 s") || text.ends_with("within 0.2 s"),
        "{text}"
    );
    assert!(matches!(
        client.hear(&audio, None, None).await,
        Err(ClientError::Late {
            act: "transcribe",
            ..
        })
    ));
    assert!(matches!(
        client.synthesize("hello", None).await,
        Err(ClientError::Late {
            act: "synthesize",
            ..
        })
    ));
    assert!(matches!(
        client.resize("open").await,
        Err(ClientError::Late { .. })
    ));
}

#[tokio::test]
async fn a_server_that_stalls_within_the_audio_ends_the_stream_with_an_error() {
    let client = server_that_says(
        b"{\"type\":\"audio-start\",\"data\":{\"rate\":8000,\"width\":2,\"channels\":1}}\n{\"type\":\"audio-chunk\",\"data\":{\"rate\":8000,\"width\":2,\"channels\":1},\"payload_length\":4}\n\x01\x00\x02\x00",
        false,
    )
    .await;
    let mut stream = client.synthesize("hello", None).await.unwrap();
    assert_eq!(stream.sample_rate_hz(), 8_000);
    assert_eq!(stream.next().await.unwrap().unwrap(), [1, 2]);
    assert!(matches!(
        stream.next().await,
        Some(Err(ClientError::Late { .. }))
    ));
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn garbage_a_closed_connection_and_a_refusal_are_reported_apart() {
    let garbage = server_that_says(b"HTTP/1.1 400 Bad Request\r\n\r\n", false).await;
    assert!(matches!(
        garbage.describe().await,
        Err(ClientError::Frame { .. })
    ));
    let closed = server_that_says(b"", true).await;
    assert!(matches!(
        closed.describe().await,
        Err(ClientError::Closed { .. })
    ));
    assert!(matches!(
        closed.synthesize("x", None).await,
        Err(ClientError::Closed { .. })
    ));
    let cut = server_that_says(b"{\"type\":\"info\",\"data_length\":10}\n{", true).await;
    assert!(matches!(
        cut.describe().await,
        Err(ClientError::Frame { .. })
    ));
    let wrong = server_that_says(b"{\"type\":\"transcript\",\"data\":{\"text\":7}}\n", false).await;
    let audio = MonoAudio::new(16_000, vec![0; 1_600_000]);
    assert!(matches!(
        wrong.hear(&audio, None, None).await,
        Err(ClientError::Event { .. })
    ));
    let odd = server_that_says(
        b"{\"type\":\"audio-start\",\"data\":{\"rate\":8000,\"width\":9,\"channels\":1}}\n",
        false,
    )
    .await;
    assert!(matches!(
        odd.synthesize("x", None).await,
        Err(ClientError::Audio(_))
    ));
    let refuses = server_that_says(
        b"{\"type\":\"error\",\"data\":{\"text\":\"no memory\",\"code\":\"memory-pressure\"}}\n",
        true,
    )
    .await;
    let error = refuses.hear(&audio, None, None).await.unwrap_err();
    assert!(
        matches!(&error, ClientError::Refused { text, code: Some(code), .. } if text == "no memory" && code == "memory-pressure"),
        "{error}"
    );
    let absent = WyomingClient::new(Endpoint::Unix("/nowhere/asr.sock".into()), HASTY);
    let error = absent.describe().await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot connect to `unix:///nowhere/asr.sock`"
    );
}

// ---- misbehaving clients and our server ----

/// Service that repeats transcripts, refuses empty ones, and waits forever on `slow`.
#[derive(Clone)]
struct Echo {
    slow: Arc<Notify>,
}

impl Service for Echo {
    type Session = Self;

    fn info(&self) -> Info {
        Info::default()
    }

    fn session(&self) -> Self {
        self.clone()
    }
}

impl Session for Echo {
    async fn handle(&mut self, event: Event, reply: &Reply) -> Result<(), SessionError> {
        match event {
            Event::Transcript(said) if said.text.is_empty() => {
                Err(Refusal::new("memory-pressure", "no memory for an empty word").into())
            }
            Event::Transcript(said) if said.text == "slow" => {
                self.slow.notify_one();
                std::future::pending().await
            }
            Event::Transcript(said) => Ok(reply.send(Event::Transcript(said)).await?),
            _ => Ok(()),
        }
    }
}

struct Served {
    _dir: tempfile::TempDir,
    path: std::path::PathBuf,
    slow: Arc<Notify>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Served {
    async fn new(limits: ServerLimits) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("echo.sock");
        let server = Server::bind(&Endpoint::Unix(path.clone()), limits)
            .await
            .unwrap();
        let stop = CancellationToken::new();
        let slow = Arc::new(Notify::new());
        let echo = Echo {
            slow: Arc::clone(&slow),
        };
        let task = tokio::spawn(server.run(echo, stop.clone()));
        Self {
            _dir: dir,
            path,
            slow,
            stop,
            task,
        }
    }

    async fn connect(&self) -> Client {
        let (reader, writer) = UnixStream::connect(&self.path).await.unwrap().into_split();
        Client {
            reader: FrameReader::new(reader, FrameLimits::default()),
            writer,
        }
    }
}

struct Client {
    reader: FrameReader<tokio::net::unix::OwnedReadHalf>,
    writer: tokio::net::unix::OwnedWriteHalf,
}

impl Client {
    async fn say(&mut self, event: Event) {
        write_frame(&mut self.writer, &event.into_frame())
            .await
            .unwrap();
    }

    async fn hear(&mut self) -> Option<Frame> {
        timeout(PATIENCE, self.reader.next())
            .await
            .unwrap()
            .unwrap()
    }
}

fn transcript(text: &str) -> Event {
    Event::Transcript(Transcript {
        text: text.to_owned(),
        ..Transcript::default()
    })
}

#[tokio::test]
async fn several_requests_on_one_connection_work() {
    let served = Served::new(ServerLimits::default()).await;
    let mut client = served.connect().await;
    for round in 0..3 {
        client.say(Event::Describe).await;
        assert_eq!(client.hear().await.unwrap().kind, "info");
        client
            .say(Event::Ping(Ping {
                text: Some("x".into()),
            }))
            .await;
        let pong = client.hear().await.unwrap();
        assert_eq!(
            (pong.kind.as_str(), &pong.data["text"]),
            ("pong", &"x".into())
        );
        client.say(Event::Other(Frame::new("voice-started"))).await;
        client.say(transcript(&round.to_string())).await;
        assert_eq!(client.hear().await.unwrap().data["text"], round.to_string());
    }
}

#[tokio::test]
async fn an_error_is_the_last_thing_on_a_connection() {
    let served = Served::new(ServerLimits::default()).await;
    let mut refused = served.connect().await;
    refused.say(transcript("")).await;
    let error = refused.hear().await.unwrap();
    assert_eq!(error.kind, "error");
    assert_eq!(error.data["code"], "memory-pressure");
    assert_eq!(error.data["text"], "no memory for an empty word");
    assert!(refused.hear().await.is_none(), "then the end");

    for garbage in [
        b"GET / HTTP/1.1\r\n\r\n".as_slice(),
        b"{\"type\":\"audio-start\"}\n",
        &[b'x'; 1 << 17],
    ] {
        let mut client = served.connect().await;
        // More than the server reads before it replies.
        let _ = client.writer.write_all(garbage).await;
        let error = client.hear().await.unwrap();
        assert_eq!(
            (error.kind.as_str(), &error.data["code"]),
            ("error", &"bad-request".into())
        );
        assert!(client.hear().await.is_none());
    }
}

#[tokio::test]
async fn describe_is_answered_while_another_connection_waits_for_ever() {
    let served = Served::new(ServerLimits::default()).await;
    let mut stuck = served.connect().await;
    stuck.say(transcript("slow")).await;
    let client = WyomingClient::new(
        Endpoint::Unix(served.path.clone()),
        ClientTimeouts::default(),
    );
    client.describe().await.unwrap();
}

#[tokio::test]
async fn a_silent_connection_is_closed_and_its_place_given_to_the_next() {
    let limits = ServerLimits {
        connections: 1,
        idle: Duration::from_millis(100),
        ..ServerLimits::default()
    };
    let served = Served::new(limits).await;
    let mut silent = served.connect().await;
    let mut next = served.connect().await;
    next.say(Event::Describe).await;
    assert_eq!(next.hear().await.unwrap().kind, "info");
    assert!(silent.hear().await.is_none());
}

#[tokio::test]
async fn idle_connections_give_way_to_new_ones_the_longest_idle_first() {
    let limits = ServerLimits {
        connections: 4,
        ..ServerLimits::default()
    };
    let served = Served::new(limits).await;
    let mut idle = Vec::new();
    for _ in 0..40 {
        idle.push(served.connect().await);
    }
    let mut used = served.connect().await;
    for _ in 0..3 {
        used.say(Event::Describe).await;
        assert_eq!(used.hear().await.unwrap().kind, "info");
        idle.push(served.connect().await);
    }
    // Each of these was idle for longer than the one used in between.
    for gone in idle.iter_mut().take(37) {
        assert!(
            gone.reader
                .next()
                .await
                .map_or(true, |frame| frame.is_none())
        );
    }
    used.say(Event::Describe).await;
    assert_eq!(used.hear().await.unwrap().kind, "info");
}

#[tokio::test]
async fn connections_at_work_keep_their_places_and_a_further_one_is_refused_at_once() {
    let limits = ServerLimits {
        connections: 2,
        ..ServerLimits::default()
    };
    let served = Served::new(limits).await;
    let mut working = Vec::new();
    for _ in 0..2 {
        let mut client = served.connect().await;
        client.say(transcript("slow")).await;
        served.slow.notified().await;
        working.push(client);
    }
    let mut refused = served.connect().await;
    let error = refused.hear().await.unwrap();
    assert_eq!(
        (error.kind.as_str(), &error.data["code"]),
        ("error", &"busy".into())
    );
    assert!(refused.hear().await.is_none());
}

#[tokio::test]
async fn a_server_takes_over_an_abandoned_socket_but_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("echo.sock");
    let endpoint = Endpoint::Unix(path.clone());
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "left behind");
    let server = Server::bind(&endpoint, ServerLimits::default())
        .await
        .unwrap();
    assert_eq!(server.endpoint().unwrap(), endpoint);
    let error = Server::bind(&endpoint, ServerLimits::default())
        .await
        .unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    drop(server);
    assert!(!path.exists());
    std::fs::write(&path, "a file of another program").unwrap();
    assert!(
        Server::bind(&endpoint, ServerLimits::default())
            .await
            .is_err()
    );
    assert_eq!(
        std::fs::read_to_string(&path).unwrap(),
        "a file of another program"
    );
}

#[tokio::test]
async fn a_server_that_stops_closes_its_connections_and_removes_its_socket() {
    let served = Served::new(ServerLimits::default()).await;
    let mut client = served.connect().await;
    client.say(Event::Describe).await;
    client.hear().await.unwrap();
    served.stop.cancel();
    assert!(client.hear().await.is_none());
    timeout(PATIENCE, served.task).await.unwrap().unwrap();
    assert!(!served.path.exists());
}

#[tokio::test]
async fn audio_in_every_shape_reaches_the_recogniser() {
    let Some((bench, _asr, tts)) = both_workers().await else {
        return;
    };
    let audio = spoken(&client_of(&tts), "close the blinds in the bedroom").await;
    // 44.1 kHz stereo with 32 bits, sent in pieces that end within a sample.
    let wide = audio.resampled(44_100).unwrap();
    let bytes: Vec<u8> = wide
        .samples
        .iter()
        .flat_map(|&sample| [i32::from(sample) << 16; 2])
        .flat_map(i32::to_le_bytes)
        .collect();
    let format = AudioFormat {
        rate: 44_100,
        width: 4,
        channels: 2,
    };
    let stream = UnixStream::connect(bench.socket("asr")).await.unwrap();
    let (reader, writer) = stream.into_split();
    let mut client = Client {
        reader: FrameReader::new(reader, FrameLimits::default()),
        writer,
    };
    client.say(Event::Transcribe(Transcribe::default())).await;
    client
        .say(Event::AudioStart(AudioStart {
            format,
            timestamp: None,
        }))
        .await;
    for piece in bytes.chunks(4_001) {
        let chunk = AudioChunk {
            format,
            timestamp: None,
            audio: piece.to_vec(),
        };
        client.say(Event::AudioChunk(chunk)).await;
    }
    client.say(Event::AudioStop(AudioStop::default())).await;
    assert_eq!(
        client.hear().await.unwrap().data["text"],
        "close the blinds in the bedroom"
    );
}

#[tokio::test]
async fn espeak_ng_speaks_when_it_is_chosen() {
    let bench = Bench::new();
    let program = env!("CARGO_BIN_EXE_cotenant");
    let argv = [
        program,
        "worker",
        "tts",
        "--socket",
        "${SOCKET}",
        "--engine",
        "espeak-ng",
    ];
    let tts = bench.handle(bench.spec("tts", &argv));
    tts.start(None).await.unwrap();
    if !tts.ready().await {
        // An optional engine: without it, only the message about its absence can be tested.
        let mut bench = bench;
        let report = loop {
            if let WorkerEventKind::Exited(report) = bench.next().await {
                break report;
            }
        };
        assert_eq!(report.stderr[0], "error: cannot run `espeak-ng`");
        assert!(
            report
                .stderr
                .last()
                .unwrap()
                .contains("apt-get install espeak-ng")
        );
        eprintln!(
            "left out: speaking itself: espeak-ng is not installed (apt-get install espeak-ng)"
        );
        return;
    }
    let audio = spoken(&client_of(&tts), "Good night. Sleep well.").await;
    assert_eq!(audio.sample_rate_hz, 22_050);
    assert!(
        audio.duration() > Duration::from_millis(800),
        "{:?}",
        audio.duration()
    );
    assert!(
        audio
            .samples
            .iter()
            .any(|sample| sample.unsigned_abs() > 1_000)
    );
}

/// Returns stderr of the program when a worker cannot run.
fn complaint(arguments: &[&str]) -> String {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_cotenant"))
        .arg("worker")
        .args(arguments)
        .output()
        .unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_worker_that_cannot_run_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let socket = path("x.sock");
    let asr = |more: &[&str]| complaint(&[&["asr", "--socket", &socket], more].concat());

    let text = asr(&["--vocabulary", "grammar"]);
    assert!(
        text.starts_with("error: vocabulary `grammar` needs a grammar file\nhint: "),
        "{text}"
    );
    let text = asr(&["--vocabulary", "grammar", "--grammar", &path("none.gram")]);
    assert!(
        text.contains("none.gram`\n  caused by: No such file"),
        "{text}"
    );
    std::fs::write(path("long.gram"), vec![b'x'; 300 << 10]).unwrap();
    let text = asr(&["--vocabulary", "grammar", "--grammar", &path("long.gram")]);
    assert!(text.contains("at most 256 KiB is read"), "{text}");
    assert!(complaint(&["asr"]).contains("--socket <PATH>"));
    assert!(
        complaint(&["tts", "--uri", "http://x"])
            .contains("neither `unix:///path` nor `tcp://host:port`")
    );
    let text = complaint(&["tts", "--socket", &socket, "--voice", "bob"]);
    assert_eq!(text, "error: flite has no voice `bob`, only `slt`\n");
    let text = complaint(&["tts", "--socket", "/nowhere/x.sock"]);
    assert!(
        text.starts_with("error: cannot listen on `unix:///nowhere/x.sock`\n  caused by: "),
        "{text}"
    );
    assert!(complaint(&["ballast", "400"]).contains("has no unit"));
    assert!(
        complaint(&["ballast", "1MiB", "--rate", "1KiB"])
            .contains("below the minimum of 4 KiB per second")
    );
    if !speech_is_installed() {
        return;
    }

    let text = asr(&["--model-dir", "/nowhere"]);
    assert!(
        text.contains("cannot find `/nowhere/en-us/mdef`")
            && text.contains("apt-get install pocketsphinx-en-us"),
        "{text}"
    );
    std::fs::write(
        path("word.gram"),
        "#JSGF V1.0;\ngrammar x;\npublic <a> = turn on the xyzzy;\n",
    )
    .unwrap();
    let text = asr(&["--vocabulary", "grammar", "--grammar", &path("word.gram")]);
    assert!(
        text.contains("words that are not in the dictionary: `xyzzy`"),
        "{text}"
    );
    std::fs::write(path("bad.gram"), "this is no grammar <").unwrap();
    let text = asr(&["--vocabulary", "grammar", "--grammar", &path("bad.gram")]);
    assert!(
        text.contains("caused by: the grammar is not valid JSGF"),
        "{text}"
    );
    assert!(
        !dir.path().join("x.sock").exists(),
        "a worker that cannot run leaves no socket"
    );
}
