//! Formats of external input.

use std::{
    io::Write as _,
    net::SocketAddr,
    sync::{Arc, LazyLock},
    time::Duration,
};

use cotenant::{
    causes::in_one_line,
    config::Config,
    conversation::refusal::Refusal,
    engine::Header,
    http::{
        self, Api, Limits,
        backend::{
            AnswerPart, Asked, Backends, ChatBackend, ChatEvent, ChatRequest, ChatStream,
            FinishReason, HistoryQuery, ModelInfo, ModelKind, Prompt, RunningAnswers,
            SpeechBackend, SpeechRequest, SpeechStream, StatusBackend, TokenizerBackend,
            TranscribeRequest, Transcript, Usage, Voice,
        },
    },
    policy::snapshot::Snapshot,
    speech::{
        audio::MonoAudio,
        decode::decode_whole_for_asr,
        decoder::{DecodeError, Decoder},
        wyoming::{
            AudioFormat, Event, FrameLimits,
            event::{AudioChunk, AudioStart, Transcript as Written},
            frame::{Decoded, decode},
        },
    },
    units::Tokens,
};
use futures_util::{StreamExt as _, future::BoxFuture, stream};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::runner::{Target, fuzz};

const MIB: usize = 1 << 20;

/// Time limit of an input processed only in this process.
const HANG: Duration = Duration::from_secs(2);

/// The same if a process decodes audio, which has its own bound.
const DECODER_HANG: Duration = Duration::from_secs(20);

#[test]
fn wyoming_frames() {
    let format = AudioFormat::mono_16_bit(16_000);
    let events = [
        Event::Describe,
        Event::AudioStart(AudioStart {
            format,
            timestamp: Some(1),
        }),
        Event::AudioChunk(AudioChunk {
            format,
            timestamp: None,
            audio: vec![1; 640],
        }),
        Event::Transcript(Written {
            text: "turn on the light".to_owned(),
            ..Written::default()
        }),
        Event::SynthesizeStop,
    ];
    let mut examples: Vec<Vec<u8>> = events
        .into_iter()
        .map(|event| event.into_frame().encode().unwrap())
        .collect();
    examples.push(examples.concat());
    examples.push(
        b"{\"type\":\"info\",\"data\":{\"asr\":[{\"name\":\"x\",\"models\":null}]},\"data_length\":13}\n{\"tts\":[null]}"
            .to_vec(),
    );
    let target = Target {
        name: "wyoming",
        examples,
        words: &[
            "\n",
            "{\"type\":\"",
            "\"data_length\":",
            "\"payload_length\":",
            "\"data\":",
            "null",
            "audio-chunk",
            "synthesize",
            "\"rate\":",
            "\"width\":",
            "\"channels\":",
            "\"text\":",
            "run-pipeline",
            "\"start_stage\":",
            "info",
            "\\ud800",
        ],
        memory_max: |length| 8 * MIB + 64 * length,
        hang: HANG,
    };
    fuzz(&target, |bytes| {
        let mut rest = bytes;
        let mut said = String::new();
        loop {
            match decode(rest, FrameLimits::default()) {
                Ok(Decoded::Incomplete(needed)) => {
                    assert!(needed > rest.len());
                    return said + "incomplete";
                }
                Ok(Decoded::Frame(frame, consumed)) => {
                    assert!(consumed > 0 && consumed <= rest.len());
                    rest = &rest[consumed..];
                    match Event::from_frame(*frame) {
                        Ok(event) => {
                            said.push_str(event.kind());
                            // Parsed events can be encoded.
                            let _ = event.into_frame().encode();
                        }
                        Err(error) => said.push_str(&in_one_line(&error)),
                    }
                }
                Err(error) => return said + &in_one_line(&error),
            }
        }
    });
}

#[test]
fn wav_files() {
    let beep = MonoAudio::new(8_000, (0..800).map(|n| n * 40).collect())
        .to_wav()
        .unwrap();
    let mut examples = vec![
        beep.clone(),
        MonoAudio::new(16_000, vec![]).to_wav().unwrap(),
    ];
    for (format, channels, bits) in [
        (1u16, 2u16, 16u16),
        (1, 1, 8),
        (1, 2, 24),
        (1, 1, 32),
        (3, 2, 32),
    ] {
        let mut file = beep.clone();
        let frame = channels * bits / 8;
        file[20..22].copy_from_slice(&format.to_le_bytes());
        file[22..24].copy_from_slice(&channels.to_le_bytes());
        file[24..28].copy_from_slice(&44_100u32.to_le_bytes());
        file[28..32].copy_from_slice(&(44_100 * u32::from(frame)).to_le_bytes());
        file[32..34].copy_from_slice(&frame.to_le_bytes());
        file[34..36].copy_from_slice(&bits.to_le_bytes());
        examples.push(file);
    }
    let target = Target {
        name: "wav",
        examples,
        words: &[
            "RIFF",
            "WAVE",
            "fmt ",
            "data",
            "LIST",
            "fact",
            "\x01\0",
            "\u{fe}\u{ff}",
            "\0\0\0\0",
        ],
        // 16 kHz from 2 kHz, in 8 bits: sixteen bytes per byte, twice during copying.
        memory_max: |length| 8 * MIB + 64 * length,
        hang: HANG,
    };
    fuzz(&target, |bytes| {
        match decode_whole_for_asr(bytes, Duration::from_secs(60)) {
            Ok(audio) => {
                assert!(audio.duration() <= Duration::from_secs(61));
                format!("{}", audio.samples.len().checked_ilog2().unwrap_or(0) > 8)
            }
            Err(error) => in_one_line(&error),
        }
    });
}

/// Formats with third-party decoders, which run in a bounded process.
#[test]
fn compressed_audio() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/audio");
    let mut examples = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|kind| kind != "md") {
            examples.push(std::fs::read(path).unwrap());
        }
    }
    examples.sort();
    let target = Target {
        name: "compressed audio",
        examples,
        words: &[
            "OggS",
            "OpusHead",
            "OpusTags",
            "vorbis",
            "fLaC",
            "ID3",
            "\u{7f}ELF",
            "ftyp",
            "moov",
            "mdat",
            "stsz",
            "stco",
            "stts",
            "esds",
            "\x1aE\u{df}\u{a3}",
            "A_OPUS",
        ],
        memory_max: |length| 8 * MIB + 64 * length,
        hang: DECODER_HANG,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let decoder = decoder();
    fuzz(&target, |bytes| {
        let limit = Duration::from_secs(60);
        match runtime.block_on(decoder.decode(bytes, limit, |_bytes| true)) {
            Ok(audio) => {
                assert!(audio.duration() <= limit + Duration::from_millis(1));
                format!("{}", audio.samples.len().checked_ilog2().unwrap_or(0) > 8)
            }
            Err(error @ (DecodeError::Audio(_) | DecodeError::Bounds)) => error.to_string(),
            Err(error) => panic!("{error:?}"),
        }
    });
}

fn decoder() -> Decoder {
    Decoder::new(env!("CARGO_BIN_EXE_cotenant").into())
}

#[test]
fn configurations() {
    let example = include_str!("../../deploy/cotenant.yaml");
    let switched_on: String = example
        .lines()
        .map(|line| {
            line.replacen(
                "# ",
                "",
                usize::from(line.trim_start().starts_with("# ") && line.contains(':')),
            ) + "\n"
        })
        .collect();
    let small = "budget: {total: 1GiB, reserve: 10%}\nworkers:\n  - {name: a, role: asr, argv: [x], memory: {steady: 1MiB}}\n";
    let target = Target {
        name: "yaml",
        examples: vec![
            example.into(),
            switched_on.into(),
            small.into(),
            b"{}".to_vec(),
        ],
        words: &[
            "&a ",
            "*a",
            "<<: ",
            "!!",
            "|",
            ">",
            "- ",
            ": ",
            "\n",
            "~",
            "null",
            "\t",
            "---\n",
            "...\n",
            "\u{feff}",
            "\u{2028}",
            "GiB",
            "1m 30s",
            "none",
            "workers:",
            "budget:",
            "${PORT}",
            "\"",
            "'",
            "%TAG ! x\n",
            "? ",
        ],
        memory_max: |length| 64 * MIB + 64 * length,
        hang: HANG,
    };
    fuzz(&target, |bytes| {
        match Config::parse(&String::from_utf8_lossy(bytes)) {
            Ok(config) => format!(
                "good: {} {}",
                config.llm.is_some(),
                config.workers.len().min(2)
            ),
            Err(error) => in_one_line(&error),
        }
    });
}

#[test]
fn gguf_headers() {
    let mut header = b"GGUF\x03\0\0\0".to_vec();
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    header.extend(1u64.to_le_bytes());
    header.extend(3u64.to_le_bytes());
    text(&mut header, "general.architecture");
    header.extend(8u32.to_le_bytes());
    text(&mut header, "qwen3");
    text(&mut header, "general.alignment");
    header.extend(4u32.to_le_bytes());
    header.extend(32u32.to_le_bytes());
    text(&mut header, "tokenizer.ggml.tokens");
    header.extend(9u32.to_le_bytes());
    header.extend(8u32.to_le_bytes());
    header.extend(2u64.to_le_bytes());
    text(&mut header, "a");
    text(&mut header, "b");
    text(&mut header, "output.weight");
    header.extend(2u32.to_le_bytes());
    header.extend(8u64.to_le_bytes());
    header.extend(4u64.to_le_bytes());
    header.extend(0u32.to_le_bytes());
    header.extend(0u64.to_le_bytes());
    header.resize(header.len().next_multiple_of(32) + 128, 7);
    let model =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/demo-model/demo.gguf");
    let demo = std::fs::read(model).unwrap();
    let target = Target {
        name: "gguf",
        examples: vec![header, demo[..65_536].to_vec()],
        words: &[
            "GGUF",
            "general.architecture",
            "tokenizer.ggml.tokens",
            "\x08\0\0\0",
            "\x09\0\0\0",
            "\x0c\0\0\0",
        ],
        memory_max: |length| 16 * MIB + 64 * length,
        hang: HANG,
    };
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_owned();
    fuzz(&target, |bytes| {
        file.as_file_mut().set_len(0).unwrap();
        std::io::Seek::rewind(file.as_file_mut()).unwrap();
        file.write_all(bytes).unwrap();
        match Header::read(&path) {
            Ok(header) => format!("good: {}", header.tensors().count().min(3)),
            Err(error) => in_one_line(&error),
        }
    });
}

#[test]
fn http_bodies() {
    let chat = br#"{"model":"demo","messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"stream":false,
        "max_tokens":5,"temperature":0.5,"top_p":1,"stop":["a"],"seed":7,"tools":[{"type":"function","function":{"name":"f",
        "parameters":{"type":"object"}}}],"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":
        {"type":"object","properties":{"a":{"type":"integer"}}}}}}"#;
    let message = br#"{"model":"demo","max_tokens":5,"system":"s","messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":"x"}]}],"tools":[{"name":"f","input_schema":{"type":"object"}}]}"#;
    let input = br#"{"model":"demo","input":[{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"x"}],"text":{"format":{"type":"json_object"}}}"#;
    let speech = br#"{"model":"tts","input":"good night","voice":"slt","response_format":"wav","speed":1.0}"#;
    let json = |path: &'static str, body: &[u8]| (path, "application/json", body.to_vec());
    fuzz_http(
        ("http", HANG),
        &[
            json("/v1/chat/completions", chat),
            json("/v1/chat/completions", br#"{"model":"demo","messages":[{"role":"user","content":"hi"}],"stream":true}"#),
            json("/v1/audio/speech", speech),
            json("/api/chat", br#"{"model":"demo","messages":[{"role":"user","content":"hi"}],"options":{"num_ctx":4,"tfs_z":1},"keep_alive":"5m"}"#),
            json("/api/generate", br#"{"model":"demo","prompt":"hi","system":"s","format":"json","think":false,"options":{"stop":["."]}}"#),
            json("/api/show", br#"{"model":"demo"}"#),
            json("/v1/messages", message),
            json("/v1/messages", br#"{"model":"demo","max_tokens":5,"stream":true,"messages":[{"role":"user","content":"hi"}]}"#),
            json("/v1/messages/count_tokens", message),
            json("/v1/responses", input),
            json("/v1/responses", br#"{"model":"demo","input":"hi","stream":true,"instructions":"s"}"#),
            json("/v1/responses/input_tokens", input),
            json("/v1/completions", br#"{"model":"demo","prompt":["once"],"echo":true,"stream":true}"#),
            json("/tokenize", br#"{"content":"once","with_pieces":true}"#),
            json("/detokenize", br#"{"tokens":[104,105]}"#),
        ],
    );
}

#[test]
fn http_uploads() {
    let wav = MonoAudio::new(16_000, vec![5; 200]).to_wav().unwrap();
    let form = |fields: &str| {
        let head = "Content-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n";
        [
            fields.as_bytes(),
            b"--x\r\n",
            head.as_bytes(),
            &wav,
            b"\r\n--x--\r\n",
        ]
        .concat()
    };
    let field = |name: &str, value: &str| {
        format!("--x\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
    };
    let multipart =
        |path: &'static str, body: Vec<u8>| (path, "multipart/form-data; boundary=x", body);
    let many = ["model", "language", "prompt", "temperature", "stream"]
        .map(|name| field(name, "1"))
        .concat();
    fuzz_http(
        ("http uploads", DECODER_HANG),
        &[
            multipart("/v1/audio/transcriptions", form(&field("model", "asr"))),
            multipart(
                "/v1/audio/transcriptions",
                form(&(field("response_format", "verbose_json") + &many)),
            ),
            multipart(
                "/v1/audio/transcriptions",
                form(&(field("model", "asr") + &field("stream", "true"))),
            ),
            multipart("/v1/audio/translations", form(&field("model", "asr"))),
            (
                "/v1/audio/transcriptions",
                "application/json",
                b"{}".to_vec(),
            ),
        ],
    );
}

/// Mutates request bodies; the first byte of an input selects one of `cases`.
fn fuzz_http(
    (name, hang): (&'static str, Duration),
    cases: &[(&'static str, &'static str, Vec<u8>)],
) {
    let example = |number: usize, body: &[u8]| [&[u8::try_from(number).unwrap()], body].concat();
    let target = Target {
        name,
        examples: cases
            .iter()
            .enumerate()
            .map(|(number, (_, _, body))| example(number, body))
            .collect(),
        words: &[
            "\"",
            "null",
            "true",
            "{",
            "}",
            "[",
            "]",
            "\\u0000",
            "\\ud800",
            "1e309",
            "\"messages\":",
            "\"role\":\"tool\"",
            "\"stream\":true",
            "\r\n--x\r\n",
            "--x--",
            "filename*=utf-8''",
            "RIFF",
            "\"stop\":",
            "\"type\":\"image_url\"",
            "\"$ref\":\"#\"",
            "\"pattern\":\"(a*)*b\"",
            "\"enum\":",
            "\"anyOf\":",
            "\"format\":",
            "\"input\":",
            "\"tokens\":",
        ],
        memory_max: |length| 64 * MIB + 64 * length,
        hang,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (address, stop) = runtime.block_on(serving());
    fuzz(&target, |bytes| {
        let (number, body) = bytes.split_first().unwrap_or((&0, &[]));
        let (path, kind, _) = &cases[usize::from(*number) % cases.len()];
        runtime.block_on(async {
            timeout(hang, post(address, path, kind, body))
                .await
                .expect("no answer")
        })
    });
    stop.cancel();
}

/// Status and reason of the answer.
async fn post(address: SocketAddr, path: &str, kind: &str, body: &[u8]) -> String {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    // A server that has refused may close before all bytes are sent.
    let _ = stream.write_all(body).await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    let text = String::from_utf8_lossy(&answer);
    assert!(text.starts_with("HTTP/1.1 "), "{text}");
    assert!(!text.starts_with("HTTP/1.1 500"), "{text}");
    let reason = text.split("\"message\":").nth(1).unwrap_or_default();
    // The rest without figures; the status stays complete.
    let status: String = text[9..12]
        .chars()
        .map(|digit| char::from(digit as u8 + b'A' - b'0'))
        .collect();
    format!("{status} {}", reason.trim_start_matches('"'))
}

pub(crate) async fn serving() -> (SocketAddr, CancellationToken) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let backend = Arc::new(Willing);
    let backends = Backends {
        chat: Some(Arc::clone(&backend) as Arc<dyn ChatBackend>),
        tokenizer: Some(Arc::clone(&backend) as Arc<dyn TokenizerBackend>),
        decoder: decoder(),
        speech: Some(Arc::clone(&backend) as Arc<dyn SpeechBackend>),
        embedding: None,
        status: backend,
        tracer: cotenant::telemetry::Tracer::default(),
    };
    let stop = CancellationToken::new();
    tokio::spawn(http::serve(
        listener,
        Api::new(backends, Limits::default()),
        stop.clone(),
    ));
    (address, stop)
}

/// Backends that accept every request that passes the API.
struct Willing;

impl ChatBackend for Willing {
    fn chat(&self, _request: ChatRequest) -> BoxFuture<'_, Result<ChatStream, Refusal>> {
        let finished = ChatEvent::Finished {
            reason: FinishReason::Stop,
            usage: Usage::default(),
        };
        Box::pin(async {
            Ok(stream::iter([
                ChatEvent::Part(AnswerPart::Text("yes".to_owned())),
                finished,
            ])
            .boxed())
        })
    }
}

/// Each byte is a token.
impl TokenizerBackend for Willing {
    fn count(&self, prompt: Prompt) -> BoxFuture<'_, Result<Tokens, Refusal>> {
        let tokens = u32::try_from(prompt.messages().len()).unwrap_or(u32::MAX);
        Box::pin(async move { Ok(Tokens::new(tokens)) })
    }

    fn tokenize(
        &self,
        text: String,
        _begin: bool,
        _control: bool,
    ) -> BoxFuture<'_, Result<Vec<u32>, Refusal>> {
        Box::pin(async move { Ok(text.bytes().map(u32::from).collect()) })
    }

    fn pieces(&self, tokens: Vec<u32>) -> BoxFuture<'_, Result<Vec<Vec<u8>>, Refusal>> {
        Box::pin(async move {
            Ok(tokens
                .into_iter()
                .map(|token| vec![token.to_le_bytes()[0]])
                .collect())
        })
    }
}

impl SpeechBackend for Willing {
    fn transcribe(&self, request: TranscribeRequest) -> BoxFuture<'_, Result<Transcript, Refusal>> {
        let text = format!("{} samples", request.audio.samples.len());
        Box::pin(async {
            Ok(Transcript {
                text,
                ..Transcript::default()
            })
        })
    }

    fn synthesize(&self, _request: SpeechRequest) -> BoxFuture<'_, Result<SpeechStream, Refusal>> {
        Box::pin(async {
            Ok(SpeechStream {
                rate: 16_000,
                voice: None,
                ignored: &[],
                chunks: stream::iter([Ok(vec![1; 100])]).boxed(),
            })
        })
    }
}

static ANSWERS: LazyLock<RunningAnswers> =
    LazyLock::new(|| RunningAnswers::new(tokio::sync::watch::channel(Arc::default()).1));

impl StatusBackend for Willing {
    fn ask(&self, _asked: Asked) -> BoxFuture<'static, Option<cotenant::policy::event::Answer>> {
        Box::pin(std::future::ready(None))
    }

    fn answers(&self) -> &RunningAnswers {
        &ANSWERS
    }

    fn snapshot(&self) -> Arc<Snapshot> {
        Arc::new(Snapshot::default())
    }

    fn metrics(&self) -> String {
        String::new()
    }

    fn document(&self) -> serde_json::Value {
        serde_json::Value::Null
    }

    fn history(&self, _query: &HistoryQuery) -> serde_json::Value {
        serde_json::Value::Null
    }

    fn models(&self) -> Vec<ModelInfo> {
        let model = |id: &str, kind| ModelInfo {
            aliases: Vec::new(),
            id: id.to_owned(),
            kind,
            created: 0,
            bytes: cotenant::units::Bytes::ZERO,
            weights: None,
        };
        vec![
            model("demo", ModelKind::Chat),
            model("tts", ModelKind::Speech),
            model("asr", ModelKind::Transcription),
        ]
    }

    fn voices(&self) -> Vec<Voice> {
        vec![Voice {
            name: "slt".to_owned(),
            aliases: vec!["alloy".to_owned()],
        }]
    }

    fn request_ended(&self, _route: &str, _code: u16, _took: Duration) {}

    fn first_token(&self, _took: Duration) {}
}
