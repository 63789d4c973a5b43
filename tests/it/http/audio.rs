//! Audio routes over HTTP, with scripted backends.

use std::{os::unix::ffi::OsStrExt as _, time::Duration};

use base64::Engine as _;
use cotenant::{
    conversation::refusal::Refusal,
    http::{Limits, backend::VoiceWish},
    speech::{
        audio::{MonoAudio, parse_wav},
        decode::decode_whole_for_asr,
        decoder::Decoder,
    },
    units::Bytes,
};
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::{
    client::{Answer, get, post, post_form, post_json},
    script::{Open, open, open_with},
};

const TRANSCRIPTIONS: &str = "/v1/audio/transcriptions";
const SPEECH: &str = "/v1/audio/speech";
const LONG: Duration = Duration::from_secs(3600);

fn wav(rate: u32, channels: u16, frames: usize) -> Vec<u8> {
    let mut file = std::io::Cursor::new(Vec::new());
    let spec = hound::WavSpec {
        channels,
        sample_rate: rate,
        bits_per_sample: 16,
        sample_format: hound::SampleFormat::Int,
    };
    let mut writer = hound::WavWriter::new(&mut file, spec).unwrap();
    for index in 0..frames {
        for _ in 0..channels {
            writer
                .write_sample(i16::try_from(index % 2000).unwrap())
                .unwrap();
        }
    }
    writer.finalize().unwrap();
    file.into_inner()
}

async fn transcribe(open: &Open, file: &[u8], more: &[(&str, &str)]) -> Answer {
    let mut fields: Vec<(&str, Option<&str>, &[u8])> =
        vec![("model", None, b"whisper-1"), ("file", Some("a.wav"), file)];
    fields.extend(
        more.iter()
            .map(|(name, value)| (*name, None, value.as_bytes())),
    );
    post_form(open.address, TRANSCRIPTIONS, &fields).await
}

#[tokio::test]
async fn a_transcription_has_the_shape_that_was_asked_for() {
    let open = open().await;
    let file = wav(16_000, 1, 24_000);
    let answer = transcribe(
        &open,
        &file,
        &[
            ("language", "en"),
            ("prompt", "lights"),
            ("temperature", "0"),
        ],
    )
    .await;
    assert_eq!(
        answer.json(),
        json!({"text": "turn on the light", "usage": {"type": "duration", "seconds": 2.0}})
    );
    let asked = open.script.transcriptions.lock().unwrap().pop().unwrap();
    assert_eq!(
        (asked.audio.samples.len(), asked.model.as_str()),
        (24_000, "whisper-1")
    );
    assert_eq!(
        (asked.language.as_deref(), asked.prompt.as_deref()),
        (Some("en"), Some("lights"))
    );

    let answer = transcribe(&open, &file, &[("response_format", "text")]).await;
    assert_eq!((answer.text(), answer.status), ("turn on the light\n", 200));
    assert!(answer.header("content-type").starts_with("text/plain"));

    let body = transcribe(&open, &file, &[("response_format", "verbose_json")])
        .await
        .json();
    assert_eq!(
        (&body["task"], &body["language"], &body["duration"]),
        (&json!("transcribe"), &json!("english"), &json!(1.5))
    );
    assert_eq!(body["segments"][0]["end"], 1.5);
    assert_eq!(body["segments"][0]["text"], "turn on the light");

    let answer = transcribe(&open, &file, &[("stream", "true")]).await;
    let (payloads, _) = answer.events();
    let payloads: Vec<Value> = payloads
        .iter()
        .map(|payload| serde_json::from_str(payload).unwrap())
        .collect();
    assert_eq!(
        payloads,
        [
            json!({"type": "transcript.text.delta", "delta": "turn on the light"}),
            json!({"type": "transcript.text.done", "text": "turn on the light"}),
        ]
    );
}

#[tokio::test]
async fn audio_of_any_common_shape_reaches_the_recogniser_as_16_khz_mono() {
    let open = open().await;
    for (rate, channels, frames) in [(44_100, 2, 44_100), (8_000, 1, 8_000), (48_000, 6, 48_000)] {
        let answer = transcribe(&open, &wav(rate, channels, frames), &[]).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let asked = open.script.transcriptions.lock().unwrap().pop().unwrap();
        assert_eq!(
            asked.audio.samples.len(),
            16_000,
            "{rate} Hz, {channels} channels"
        );
    }
}

#[tokio::test]
async fn uploads_in_compressed_formats_reach_the_recogniser_as_16_khz_mono() {
    let open = open().await;
    for name in [
        "tone.mp3",
        "tone.m4a",
        "tone.ogg",
        "tone.opus",
        "tone.webm",
        "tone.flac",
    ] {
        let file = std::fs::read(crate::support::fixture("audio").join(name)).unwrap();
        let answer = transcribe(&open, &file, &[]).await;
        assert_eq!(answer.status, 200, "{name}: {}", answer.text());
        let asked = open.script.transcriptions.lock().unwrap().pop().unwrap();
        let samples = asked.audio.samples.len();
        assert!(samples.abs_diff(16_000) < 1200, "{name}: {samples} samples");
    }
}

/// The kernel ends the decoder for a Vorbis header of 5 KiB whose codebooks would take gigabytes; the daemon is
/// unaffected.
#[tokio::test]
async fn a_file_whose_decoding_would_take_gigabytes_is_400() {
    let open = open().await;
    let answer = transcribe(&open, &vorbis_bomb(), &[]).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (400, "invalid_audio"),
        "{}",
        answer.text()
    );
    assert!(
        answer.text().contains("24 MiB of memory"),
        "{}",
        answer.text()
    );
    let answer = transcribe(&open, &wav(16_000, 1, 16_000), &[]).await;
    assert_eq!(answer.status, 200);
}

/// Returns an Ogg file with a Vorbis setup header of 256 codebooks, each of 131072 entries of 32 values.
fn vorbis_bomb() -> Vec<u8> {
    let mut identification = b"\x01vorbis\0\0\0\0\x01\x44\xac\0\0".to_vec();
    identification.extend([0; 12]);
    identification.extend([0xb8, 1]);
    let comment = b"\x03vorbis\0\0\0\0\0\0\0\0\x01".to_vec();
    let mut bits: Vec<bool> = Vec::new();
    let mut push =
        |value: u64, count: u32| bits.extend((0..count).map(|bit| value >> bit & 1 == 1));
    push(255, 8);
    for _ in 0..256 {
        push(0x56_4342, 24);
        push(32, 16);
        push(1 << 17, 24);
        push(1, 1); // ordered: all codewords have 17 bits
        push(16, 5);
        push(1 << 17, 18);
        push(1, 4); // values by a lattice of one value
        push(0, 32);
        push(0, 32);
        push(0, 4);
        push(0, 1);
        push(0, 1);
    }
    let mut setup = b"\x05vorbis".to_vec();
    setup.extend(bits.chunks(8).map(|byte| {
        byte.iter()
            .rev()
            .fold(0, |sum, &bit| sum << 1 | u8::from(bit))
    }));
    setup.extend([0; 64]);
    let mut file = Vec::new();
    for (number, packet) in [identification, comment, setup].iter().enumerate() {
        file.extend(ogg_page(u8::try_from(number).unwrap(), packet));
    }
    file
}

fn ogg_page(number: u8, packet: &[u8]) -> Vec<u8> {
    let mut page = b"OggS\0".to_vec();
    page.push(if number == 0 { 2 } else { 0 });
    page.extend([0; 8]);
    page.extend([7, 0, 0, 0, number, 0, 0, 0, 0, 0, 0, 0]);
    let whole = packet.len() / 255;
    page.push(u8::try_from(whole + 1).unwrap());
    page.extend(std::iter::repeat_n(255, whole));
    page.push(u8::try_from(packet.len() % 255).unwrap());
    page.extend(packet);
    let mut sum = 0u32;
    for &byte in &page {
        sum ^= u32::from(byte) << 24;
        for _ in 0..8 {
            sum = if sum & 1 << 31 == 0 {
                sum << 1
            } else {
                sum << 1 ^ 0x04c1_1db7
            };
        }
    }
    page[22..26].copy_from_slice(&sum.to_le_bytes());
    page
}

#[tokio::test]
async fn memory_for_decoding_is_set_aside_before() {
    let limits = Limits {
        bodies_max: Bytes::from_mib(25),
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let file = std::fs::read(crate::support::fixture("audio").join("tone.mp3")).unwrap();
    let answer = transcribe(&open, &file, &[]).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let limits = Limits {
        bodies_max: Bytes::from_mib(24),
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let answer = transcribe(&open, &file, &[]).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (429, "rate_limit_exceeded")
    );
}

#[tokio::test]
async fn a_decoder_ends_with_its_client() {
    let folder = tempfile::tempdir().unwrap();
    // Unique name that identifies its process.
    let program = folder.path().join("decoder");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cotenant"), &program).unwrap();
    let running = || {
        let name = program.as_os_str().as_bytes();
        let mut processes = std::fs::read_dir("/proc").unwrap().flatten();
        processes.any(|process| {
            std::fs::read(process.path().join("cmdline")).is_ok_and(|line| line.starts_with(name))
        })
    };
    let decoder = Decoder::new(program.clone());
    // More samples than the socket between the processes buffers.
    let minutes = wav(48_000, 1, 100 * 48_000);
    let begun = Notify::new();
    let decoded = decoder.decode(&minutes, LONG, |_bytes| {
        assert!(running());
        begun.notify_one();
        true
    });
    tokio::select! {
        biased;
        () = begun.notified() => {}
        decoded = decoded => panic!("{decoded:?}"),
    }
    assert!(!running());
}

#[tokio::test]
async fn audio_without_samples_is_an_empty_text_and_troubles_no_worker() {
    let open = open().await;
    let answer = transcribe(&open, &wav(16_000, 1, 0), &[]).await;
    assert_eq!((answer.status, &answer.json()["text"]), (200, &json!("")));
    let answer = transcribe(&open, &wav(16_000, 1, 0), &[("stream", "true")]).await;
    assert_eq!(answer.events().0.len(), 1);
    assert!(open.script.transcriptions.lock().unwrap().is_empty());
}

#[tokio::test]
async fn broken_audio_is_400_and_says_what_is_wrong() {
    let limits = Limits {
        audio_duration_max: Duration::from_secs(2),
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let mut cut = wav(16_000, 1, 16_000);
    cut.truncate(1000);
    for (file, says) in [
        (
            &b""[..],
            "cannot read the audio: the file is empty (hint: send wav, mp3, m4a or aac (AAC-LC), ogg or webm (Opus, Vorbis), flac)",
        ),
        (
            b"FORM\0\0\0\x2aAIFFCOMM",
            "the file is AIFF, which is not supported (hint: send wav",
        ),
        (
            b"RF64\xff\xff\xff\xffWAVEds64",
            "the file is RF64, which is not supported",
        ),
        (
            b"RIFF\0\0\0\0AVI LIST",
            "the file is AVI, which is not supported",
        ),
        (
            b"{\"audio\": \"UklGR\"}",
            "the file is JSON, which is not supported",
        ),
        (b"ID3\x04 this is an mp3", "the MP3 file cannot be read"),
        (b"RIFF", "not a readable WAV file"),
        (&cut, "truncated"),
        (
            &wav(16_000, 1, 40_000),
            "2.5 s is longer than the limit of 2.0 s",
        ),
    ] {
        let answer = transcribe(&open, file, &[]).await;
        assert_eq!(
            (answer.status, answer.error_code().as_str()),
            (400, "invalid_audio")
        );
        assert!(answer.text().contains(says), "{says}: {}", answer.text());
        assert_eq!(answer.json()["error"]["param"], "file");
    }
    assert!(open.script.transcriptions.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_broken_form_is_400() {
    let open = open().await;
    let answer = post_form(
        open.address,
        TRANSCRIPTIONS,
        &[("model", None, b"whisper-1")],
    )
    .await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["param"]),
        (400, &json!("file"))
    );
    let answer = transcribe(
        &open,
        &wav(16_000, 1, 10),
        &[("response_format", "subtitles")],
    )
    .await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["param"]),
        (400, &json!("response_format"))
    );
    let answer = post_json(open.address, TRANSCRIPTIONS, &json!({})).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (400, "invalid_form")
    );
    let headers = [("content-type", "multipart/form-data; boundary=B")];
    let answer = post(open.address, TRANSCRIPTIONS, &headers, b"--B\r\nnonsense").await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (400, "invalid_form")
    );
}

#[tokio::test]
async fn a_refused_transcription_is_a_status_before_and_an_event_after_the_first_byte() {
    let limits = Limits {
        admission_timeout: Duration::from_millis(20),
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let lost = || Refusal::WorkerLost {
        worker: "asr".to_owned(),
        reason: "killed by SIGKILL, sender unknown".to_owned(),
        retry_after: Duration::from_millis(700),
    };
    let file = wav(16_000, 1, 1600);
    open.script.refuse([lost()]);
    let answer = transcribe(&open, &file, &[]).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (503, "worker_lost")
    );
    assert_eq!(answer.header("retry-after-ms"), "700");

    *open.script.transcript_after.lock().unwrap() = Some(Duration::from_millis(100));
    open.script.refuse([lost()]);
    let answer = transcribe(&open, &file, &[("stream", "true")]).await;
    assert_eq!(answer.status, 200);
    assert!(answer.events().0[0].contains("worker_lost"));
    assert!(!answer.complete);
}

#[tokio::test]
async fn pcm_is_24_khz_mono_whatever_the_voice_has() {
    let open = open().await;
    for rate in [16_000, 22_050, 24_000] {
        *open.script.speech_rate.lock().unwrap() = Some(rate);
        *open.script.speech.lock().unwrap() = vec![
            Ok(vec![1000; rate as usize / 2]),
            Ok(Vec::new()),
            Ok(vec![1000; rate as usize / 2]),
        ];
        let answer = post_json(
            open.address,
            SPEECH,
            &json!({"model": "tts-1", "input": "hello", "voice": "alloy", "response_format": "pcm"}),
        )
        .await;
        assert_eq!(
            (answer.status, answer.header("content-type")),
            (200, "audio/pcm")
        );
        assert_eq!(answer.header("x-cotenant-ignored"), "");
        assert!(answer.complete);
        assert_eq!(answer.body.len(), 48_000, "{rate} Hz");
    }
    let asked = open.script.speeches.lock().unwrap().pop().unwrap();
    assert_eq!(
        (asked.voice, asked.text.as_str(), asked.speed),
        (VoiceWish::Known("slt".to_owned()), "hello", 1.0)
    );
}

#[tokio::test]
async fn mp3_flac_and_opus_are_encoded_as_the_sound_comes() {
    let open = open().await;
    // mp3 is OpenAI's own default.
    for (format, kind, magic, more) in [
        (json!("flac"), "audio/flac", &b"fLaC"[..], 400),
        (json!("opus"), "audio/ogg", b"OggS", 400),
        (json!("mp3"), "audio/mpeg", b"\xff\xf3", 1400),
        (Value::Null, "audio/mpeg", b"\xff\xf3", 1400),
    ] {
        let body = json!({"model": "tts-1", "input": "hello", "response_format": format});
        let answer = post_json(open.address, SPEECH, &body).await;
        assert_eq!((answer.status, answer.header("content-type")), (200, kind));
        assert!(
            answer.complete && answer.body.starts_with(magic),
            "{format}"
        );
        let audio = decode_whole_for_asr(&answer.body, LONG).unwrap();
        assert!(
            audio.samples.len().abs_diff(16_000) <= more,
            "{format}: {}",
            audio.samples.len()
        );
    }
    // The first part is sent before the rest exists, and a failure in between aborts the connection.
    *open.script.speech.lock().unwrap() = vec![
        Ok(vec![1000; 16_000]),
        Err(Refusal::WorkerLost {
            worker: "tts".to_owned(),
            reason: "it hangs".to_owned(),
            retry_after: Duration::from_millis(500),
        }),
    ];
    for format in ["flac", "mp3", "opus"] {
        let answer = post_json(
            open.address,
            SPEECH,
            &json!({"input": "hello", "response_format": format}),
        )
        .await;
        assert_eq!((answer.status, answer.complete), (200, false));
        assert!(
            answer.body.len() > 200,
            "{format}: {} bytes",
            answer.body.len()
        );
    }
}

#[tokio::test]
async fn wav_is_sent_under_its_own_name_also_where_aac_was_asked_for() {
    let open = open().await;
    for (format, sent) in [("aac", "wav"), ("wav", "")] {
        let mut body =
            json!({"model": "tts-1", "input": "hello", "voice": {"id": "kal"}, "speed": 1.5});
        body["response_format"] = json!(format);
        let answer = post_json(open.address, SPEECH, &body).await;
        assert_eq!(
            (answer.status, answer.header("content-type")),
            (200, "audio/wav")
        );
        assert_eq!(answer.header("x-cotenant-format"), sent);
        assert_eq!(answer.header("x-cotenant-ignored"), "speed");
        let audio = parse_wav(&answer.body, LONG).unwrap();
        assert_eq!(
            (audio.sample_rate_hz, audio.samples.len()),
            (24_000, 24_000)
        );
    }
    let asked = open.script.speeches.lock().unwrap().pop().unwrap();
    assert_eq!(
        (asked.voice, asked.speed),
        (VoiceWish::Known("kal".to_owned()), 1.5)
    );
}

#[tokio::test]
async fn speech_comes_as_events_too() {
    let open = open().await;
    let body = |format: &str| json!({"model": "m", "input": "hi", "response_format": format, "stream_format": "sse"});
    let decoded = |answer: &Answer| {
        let (payloads, _) = answer.events();
        let events: Vec<Value> = payloads
            .iter()
            .map(|payload| serde_json::from_str(payload).unwrap())
            .collect();
        let (done, deltas) = events.split_last().unwrap();
        assert_eq!(done["type"], "speech.audio.done");
        assert_eq!(done["usage"]["total_tokens"], 0);
        let mut bytes = Vec::new();
        for delta in deltas {
            assert_eq!(delta["type"], "speech.audio.delta");
            let piece = delta["audio"].as_str().unwrap();
            bytes.extend(
                base64::engine::general_purpose::STANDARD
                    .decode(piece)
                    .unwrap(),
            );
        }
        bytes
    };
    let answer = post_json(open.address, SPEECH, &body("pcm")).await;
    assert_eq!(decoded(&answer).len(), 48_000);
    let answer = post_json(open.address, SPEECH, &body("wav")).await;
    let expected = MonoAudio::new(24_000, Vec::new());
    let audio = parse_wav(&decoded(&answer), LONG).unwrap();
    assert_eq!(
        (audio.sample_rate_hz, audio.samples.len()),
        (expected.sample_rate_hz, 24_000)
    );
    for body in [body("opus"), json!({"input": "hi", "stream_format": "sse"})] {
        let answer = post_json(open.address, SPEECH, &body).await;
        let audio = decode_whole_for_asr(&decoded(&answer), LONG).unwrap();
        assert!(
            audio.samples.len().abs_diff(16_000) <= 1400,
            "{}",
            audio.samples.len()
        );
    }
}

#[tokio::test]
async fn a_synthesiser_that_fails_is_a_status_before_the_first_sound_and_a_broken_stream_after_it()
{
    let open = open().await;
    let hung = || Refusal::WorkerLost {
        worker: "tts".to_owned(),
        reason: "no audio for 5 s".to_owned(),
        retry_after: Duration::from_millis(500),
    };
    let body = json!({"input": "hello", "response_format": "pcm"});
    *open.script.speech.lock().unwrap() = vec![Err(hung())];
    let answer = post_json(open.address, SPEECH, &body).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (503, "worker_lost")
    );

    *open.script.speech.lock().unwrap() = vec![Ok(vec![0; 16_000]), Err(hung())];
    let answer = post_json(open.address, SPEECH, &body).await;
    assert_eq!((answer.status, answer.complete), (200, false));
    let answer = post_json(
        open.address,
        SPEECH,
        &json!({"input": "hello", "response_format": "wav"}),
    )
    .await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (503, "worker_lost")
    );
    let answer = post_json(
        open.address,
        SPEECH,
        &json!({"input": "hello", "response_format": "pcm", "stream_format": "sse"}),
    )
    .await;
    // clients that ignore the event notice the broken connection
    let (payloads, _) = answer.events();
    let error: Value = serde_json::from_str(payloads.last().unwrap()).unwrap();
    assert_eq!(
        (&error["type"], &error["error"]["code"]),
        (&json!("error"), &json!("worker_lost"))
    );
    assert!(!answer.complete);
}

#[tokio::test]
async fn a_wrong_speech_request_is_400_and_names_its_field() {
    let open = open().await;
    for (body, param) in [
        (json!({"input": "hi", "voice": {"name": "kal"}}), "voice"),
        (json!({"input": "  "}), "input"),
        (json!({"input": "a".repeat(5000)}), "input"),
        (json!({"input": "hi", "speed": 9}), "speed"),
        (
            json!({"input": "hi", "response_format": "midi"}),
            "response_format",
        ),
        (
            json!({"input": "hi", "stream_format": "ws"}),
            "stream_format",
        ),
        (json!({"input": 7}), "input"),
    ] {
        let answer = post_json(open.address, SPEECH, &body).await;
        assert_eq!(
            (answer.status, &answer.json()["error"]["param"]),
            (400, &json!(param)),
            "{body}"
        );
    }
    assert!(open.script.speeches.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_voice_is_passed_on_where_the_worker_has_it_and_a_header_names_the_one_that_speaks() {
    let open = open().await;
    for (wanted, voice) in [
        ("darth", "slt"),
        ("echo", "kal"),
        ("slt", "slt"),
        ("amy", "amy"),
    ] {
        let answer = post_json(
            open.address,
            SPEECH,
            &json!({"input": "hi", "voice": wanted, "response_format": "pcm"}),
        )
        .await;
        assert_eq!(
            (answer.status, answer.header("x-cotenant-voice")),
            (200, voice),
            "{wanted}"
        );
    }
    let listed = get(open.address, "/v1/audio/voices").await.json();
    let shown: Vec<(&str, &Value)> = listed["voices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|voice| (voice["id"].as_str().unwrap(), &voice["aliases"]))
        .collect();
    assert_eq!(
        shown,
        [
            ("slt", &json!(["alloy", "nova"])),
            ("kal", &json!(["echo"])),
            ("amy", &json!([]))
        ]
    );
}
