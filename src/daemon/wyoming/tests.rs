//! Tests of the Wyoming API with scripted backends.

mod stage;

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use serde_json::json;
use tokio::{io::AsyncWriteExt as _, time::timeout};

use cotenant_config::WyomingConfig;
use cotenant_conversation::refusal::Refusal;
use cotenant_http::backend::VoiceWish;
use cotenant_policy::{pressure::PressureLevel, snapshot::Snapshot};
use cotenant_speech::{
    audio::pcm_bytes,
    server::HELD_KIB,
    voice_activity::EarlyPause,
    wyoming::{
        AudioFormat, Event, Frame, Voice,
        event::{AudioStop, Synthesize, SynthesizeStart, Text, Transcribe},
        write_frame,
    },
};
use cotenant_units::{Bytes, Tokens, lock::locked};
use stage::*;

#[tokio::test]
async fn describe_is_answered_while_no_worker_answers() {
    let served = served(settings()).await;
    let mut client = served.connect().await;
    client.utter(100).await;
    for _ in 0..3 {
        client.say(Event::Describe).await;
        let info = client.until("info").await.pop().unwrap();
        assert_eq!(info.data["tts"][0]["voices"][0]["name"], "slt");
        assert_eq!(info.data["handle"][0]["name"], "demo");
        assert_eq!(info.data["asr"], json!([]));
    }
    assert_eq!(
        served.script.heard.lock().unwrap().len(),
        1,
        "the recogniser hangs meanwhile"
    );
}

#[tokio::test]
async fn a_service_that_there_is_not_is_refused_at_once() {
    let served = served(settings()).await;
    for kind in ["recognize", "detect"] {
        let mut client = served.connect().await;
        client.say(Event::Other(Frame::new(kind))).await;
        let (code, text) = client.refusal().await;
        assert_eq!(code, "not-supported");
        assert!(text.contains(kind), "{text}");
    }
}

#[tokio::test]
async fn audio_of_any_shape_comes_to_the_recogniser_as_it_wants_it() {
    let served = served(settings()).await;
    served.hears("close the blinds");
    let mut client = served.connect().await;
    let format = AudioFormat {
        rate: 44_100,
        width: 2,
        channels: 2,
    };
    client
        .say(Event::Transcribe(Transcribe {
            language: Some("en".to_owned()),
            name: None,
        }))
        .await;
    client.say(audio_start(format)).await;
    for piece in vec![7u8; 44_100 * 4].chunks(4_001) {
        client.say(chunk(format, piece.to_vec())).await;
    }
    client.say(Event::AudioStop(AudioStop::default())).await;
    assert_eq!(
        client.until("transcript").await[0].data["text"],
        "close the blinds"
    );
    {
        let heard = served.script.heard.lock().unwrap();
        assert!(
            heard[0].audio.samples.len().abs_diff(16_000) < 200,
            "{}",
            heard[0].audio.samples.len()
        );
        assert_eq!(heard[0].language.as_deref(), Some("en"));
    }
    // No audio is not an error, with or without frames.
    client.utter(0).await;
    assert_eq!(client.until("transcript").await[0].data["text"], "");
    client.say(Event::AudioStop(AudioStop::default())).await;
    assert_eq!(client.until("transcript").await[0].data["text"], "");
    assert_eq!(served.script.heard.lock().unwrap().len(), 1);
    let counted = served.metrics.encode();
    assert!(
        counted.contains(
            "cotenant_request_seconds_count{route=\"wyoming/transcribe\",code=\"200\"} 3"
        ),
        "{counted}"
    );
}

#[tokio::test]
async fn an_utterance_waits_for_a_worker_that_is_being_started_but_not_for_ever() {
    let served_long = served(settings()).await;
    {
        let mut turns = served_long.script.transcripts.lock().unwrap();
        turns.extend([
            Turn::Refuse(starting()),
            Turn::Refuse(starting()),
            Turn::Refuse(Refusal::WorkerLost {
                worker: "asr".to_owned(),
                reason: "gone".to_owned(),
                retry_after: Duration::ZERO,
            }),
        ]);
    }
    let mut client = served_long.connect().await;
    client.utter(100).await;
    let (code, _) = client.refusal().await;
    assert_eq!(code, "worker-lost", "the third attempt is its last");
    served_long
        .script
        .transcripts
        .lock()
        .unwrap()
        .push_back(Turn::Refuse(starting()));
    served_long.hears("good night");
    let mut client = served_long.connect().await;
    client.utter(100).await;
    assert_eq!(
        client.until("transcript").await[0].data["text"],
        "good night"
    );

    let hasty = served(WyomingConfig {
        wait_max: Duration::ZERO,
        ..settings()
    })
    .await;
    let draining = Refusal::Draining {
        act: "transcribe speech".to_owned(),
        retry_after: Duration::from_secs(1),
    };
    for (refusal, expected) in [(starting(), "starting"), (draining, "draining")] {
        hasty
            .script
            .transcripts
            .lock()
            .unwrap()
            .push_back(Turn::Refuse(refusal));
        let mut client = hasty.connect().await;
        client.utter(100).await;
        let (code, text) = client.refusal().await;
        assert_eq!(code, expected);
        assert!(
            text.contains("transcribe speech") && text.contains("hint"),
            "{text}"
        );
    }
}

#[tokio::test]
async fn a_voice_is_found_by_name_alias_or_language_and_an_unknown_name_is_spoken_by_the_default() {
    let served = served(settings()).await;
    let mut client = served.connect().await;
    let named = |name: &str| Voice {
        name: Some(name.to_owned()),
        ..Voice::default()
    };
    let spoken_in = |language: &str| Voice {
        language: Some(language.to_owned()),
        ..Voice::default()
    };
    for voice in [
        None,
        Some(named("slt")),
        Some(named("alloy")),
        Some(spoken_in("en-GB")),
        Some(named("bob")),
    ] {
        let text = "Good night.".to_owned();
        client
            .say(Event::Synthesize(Synthesize { text, voice }))
            .await;
        let frames = client.until("audio-stop").await;
        assert_eq!(kinds(&frames), ["audio-start", "audio-chunk", "audio-stop"]);
        assert_eq!(frames[1].payload.len(), 22);
    }
    let spoken: Vec<_> = served
        .script
        .spoken
        .lock()
        .unwrap()
        .iter()
        .map(|request| request.voice.clone())
        .collect();
    let slt = || VoiceWish::Known("slt".to_owned());
    assert_eq!(
        spoken,
        [VoiceWish::Any, slt(), slt(), slt(), VoiceWish::Any]
    );
    for (voice, expected) in [(
        spoken_in("fi"),
        "voice.language: `fi` is not a language of an installed voice",
    )] {
        let mut client = served.connect().await;
        let text = "x".to_owned();
        let voice = Some(voice);
        client
            .say(Event::Synthesize(Synthesize { text, voice }))
            .await;
        assert_eq!(
            client.refusal().await,
            ("bad-request".to_owned(), expected.to_owned())
        );
    }
}

#[tokio::test]
async fn a_text_in_pieces_is_spoken_as_it_comes() {
    let served = served(settings()).await;
    let mut client = served.connect().await;
    client
        .say(Event::SynthesizeStart(SynthesizeStart::default()))
        .await;
    let piece = |text: &str| {
        Event::SynthesizeChunk(Text {
            text: text.to_owned(),
        })
    };
    client.say(piece("Good night. Stop the")).await;
    assert_eq!(
        kinds(&client.until("audio-chunk").await),
        ["audio-start", "audio-chunk"]
    );
    client.say(piece(" music.")).await;
    client
        .say(Event::Synthesize(Synthesize {
            text: "Good night. Stop the music.".to_owned(),
            voice: None,
        }))
        .await;
    client.say(Event::SynthesizeStop).await;
    let frames = client.until("synthesize-stopped").await;
    assert_eq!(
        kinds(&frames),
        ["audio-chunk", "audio-stop", "synthesize-stopped"]
    );
    let spoken: Vec<_> = served
        .script
        .spoken
        .lock()
        .unwrap()
        .iter()
        .map(|request| request.text.clone())
        .collect();
    assert_eq!(spoken, ["Good night.", "Stop the music."]);
    // On the same connection, a text without words.
    let text = " ... ".to_owned();
    client
        .say(Event::Synthesize(Synthesize { text, voice: None }))
        .await;
    assert_eq!(
        kinds(&client.until("audio-stop").await),
        ["audio-start", "audio-stop"]
    );
}

#[tokio::test]
async fn a_conversation_is_remembered_by_its_id_and_others_know_nothing_of_it() {
    let served = served(WyomingConfig {
        system: Some("Be brief.".to_owned()),
        ..settings()
    })
    .await;
    for (ask, conversation, expected) in [
        (
            "my name is Ada",
            Some("a"),
            vec!["Be brief.", "my name is Ada"],
        ),
        (
            "what is my name",
            Some("a"),
            vec!["Be brief.", "my name is Ada", "Hello. ", "what is my name"],
        ),
        (
            "what is my name",
            Some("b"),
            vec!["Be brief.", "what is my name"],
        ),
        (
            "what is my name",
            None,
            vec!["Be brief.", "what is my name"],
        ),
    ] {
        served.answers(vec![Step::Say("Hello"), Step::Say(". ")]);
        let mut client = served.connect().await;
        client.say(asks(ask, conversation)).await;
        let frames = client.until("handled-stop").await;
        assert_eq!(
            kinds(&frames),
            ["handled-start", "handled-chunk", "handled", "handled-stop"]
        );
        assert_eq!(frames[3].data["text"], "Hello. ");
        let context = frames[3]
            .data
            .get("context")
            .and_then(|context| context["conversation_id"].as_str());
        assert_eq!(context, conversation);
        assert_eq!(served.asked(), expected);
    }
}

#[tokio::test]
async fn a_shed_shortens_the_conversation_before_it_refuses_it() {
    let served = served(settings()).await;
    let mut client = served.connect().await;
    for round in ["one", "two"] {
        served.answers(vec![Step::Say("Yes.")]);
        client.say(asks(round, Some("a"))).await;
        client.until("handled-stop").await;
    }
    served.answers(vec![Step::Fail(shed())]);
    served
        .script
        .chats
        .lock()
        .unwrap()
        .push_back(Turn::Refuse(shed()));
    served.answers(vec![Step::Say("No.")]);
    client.say(asks("three", Some("a"))).await;
    assert_eq!(
        client.until("handled").await.pop().unwrap().data["text"],
        "No."
    );
    client.until("handled-stop").await;
    assert_eq!(served.asked(), ["three"]);
    // Without turns to drop, the refusal is sent, and the connection stays open.
    served.answers(vec![Step::Fail(shed())]);
    client.say(asks("long", None)).await;
    let refused = client.next().await.unwrap();
    assert_eq!(refused.kind, "not-handled");
    assert!(
        refused.data["text"]
            .as_str()
            .unwrap()
            .contains("shed to 512"),
        "{refused:?}"
    );
    // The text before the KV cache was reclaimed is the answer.
    served.answers(vec![
        Step::Say("Half"),
        Step::Fail(Refusal::KvReclaimed {
            generated: Tokens::new(1),
            retry_after: Duration::ZERO,
        }),
    ]);
    client.say(asks("story", None)).await;
    assert_eq!(client.until("handled-stop").await[2].data["text"], "Half");
    let lost = || Refusal::EngineLost {
        reason: "it panicked".to_owned(),
        retry_after: Duration::from_secs(1),
    };
    served.answers(vec![Step::Say("Half"), Step::Fail(lost())]);
    client.say(asks("story", None)).await;
    assert_eq!(client.refusal().await.0, "engine-lost");
}

/// Returns a client that has spoken `heard`, and the frames of the answer up to the end of its audio.
async fn spoken(served: &Served, heard: &str, said: Vec<Step>) -> (Client, Vec<Frame>) {
    served.hears(heard);
    served.answers(said);
    let mut client = served.connect().await;
    client.say(pipeline("asr", "tts")).await;
    client.utter(100).await;
    let frames = client.until("audio-stop").await;
    (client, frames)
}

#[tokio::test]
async fn the_pipeline_goes_from_speech_to_speech_and_says_what_it_heard_and_answers() {
    let served = served(settings()).await;
    let said = vec![Step::Say("Once. "), Step::Say("Twice.")];
    let (mut client, frames) = spoken(&served, "tell me a story", said).await;
    let of = |kind: &str| {
        frames
            .iter()
            .filter(|frame| frame.kind == kind)
            .collect::<Vec<_>>()
    };
    assert_eq!(frames[0].data["text"], "tell me a story");
    assert_eq!(of("handled-chunk").len(), 2);
    assert_eq!(of("handled")[0].data["text"], "Once. Twice.");
    let samples: usize = of("audio-chunk")
        .iter()
        .map(|frame| frame.payload.len() / 2)
        .sum();
    assert_eq!(samples, "Once.".len() + "Twice.".len());
    assert!(
        served
            .metrics
            .encode()
            .contains("cotenant_time_to_first_audio_seconds_count 1"),
        "{}",
        served.metrics.encode()
    );
    // Nothing recognised: no question, no speech.
    served.hears(" ");
    client.utter(100).await;
    assert_eq!(
        kinds(&client.until("not-handled").await),
        ["transcript", "not-handled"]
    );
    assert_eq!(served.script.asked.lock().unwrap().len(), 1);
    // Lack of memory is spoken.
    served.hears("again");
    served.answers(vec![Step::Fail(shed())]);
    client.utter(100).await;
    let frames = client.until("audio-stop").await;
    assert_eq!(
        kinds(&frames),
        [
            "transcript",
            "not-handled",
            "audio-start",
            "audio-chunk",
            "audio-stop"
        ]
    );
    // A pipeline may begin and end at other stages.
    client.say(pipeline("handle", "tts")).await;
    served.answers(vec![Step::Say("Yes.")]);
    client.say(asks("really", None)).await;
    assert!(kinds(&client.until("audio-stop").await).contains(&"audio-chunk"));
    client.say(pipeline("wake", "tts")).await;
    let (code, text) = client.refusal().await;
    assert_eq!(code, "bad-request");
    assert!(text.contains("from `wake` to `tts`"), "{text}");
}

#[tokio::test]
async fn an_answer_of_pictures_alone_is_a_start_and_a_stop_of_audio() {
    let served = served(settings()).await;
    let said = vec![Step::Say("🎉"), Step::Say("👍")];
    let (_client, frames) = spoken(&served, "well done", said).await;
    let count = |kind: &str| frames.iter().filter(|frame| frame.kind == kind).count();
    assert_eq!((count("audio-start"), count("audio-chunk")), (1, 0));
    // The protocol has no parameter for sampling, so the defaults for chats apply.
    let asked = served.script.asked.lock().unwrap().pop().unwrap();
    assert_eq!(asked.sampling.defaults.temperature, Some(1.0));
}

#[tokio::test]
async fn a_new_utterance_ends_the_answer_to_the_one_before() {
    let served = served(settings()).await;
    served.hears("tell me a story");
    served.answers(vec![Step::Say("Once upon a time. And"), Step::Hang]);
    let mut client = served.connect().await;
    client.say(pipeline("asr", "tts")).await;
    client.utter(100).await;
    client.until("audio-chunk").await;
    assert_eq!(served.script.generating.load(Ordering::SeqCst), 1);

    client
        .say(audio_start(AudioFormat::mono_16_bit(16_000)))
        .await;
    timeout(PATIENCE, served.script.dropped.notified())
        .await
        .unwrap();
    assert_eq!(
        served.script.generating.load(Ordering::SeqCst),
        0,
        "generation goes on"
    );
    // The old answer is closed, with its text so far.
    let frames = client.until("audio-stop").await;
    let handled = frames.iter().find(|frame| frame.kind == "handled").unwrap();
    assert_eq!(handled.data["text"], "Once upon a time. And");

    served.hears("stop");
    served.answers(vec![Step::Say("OK.")]);
    let format = AudioFormat::mono_16_bit(16_000);
    client.say(chunk(format, vec![0; 200])).await;
    client.say(Event::AudioStop(AudioStop::default())).await;
    let frames = client.until("audio-stop").await;
    assert_eq!(frames[0].data["text"], "stop");
    assert_eq!(
        served.script.spoken.lock().unwrap().len(),
        2,
        "what was not said yet is dropped"
    );

    // A client that disconnects ends it too.
    served.hears("tell me a story");
    served.answers(vec![Step::Say("Once."), Step::Hang]);
    client.utter(100).await;
    client.until("handled-chunk").await;
    drop(client);
    timeout(PATIENCE, served.script.dropped.notified())
        .await
        .unwrap();
    while served.script.generating.load(Ordering::SeqCst) > 0 {
        timeout(PATIENCE, served.script.dropped.notified())
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn what_waits_to_be_written_is_dropped_with_an_answer_that_is_not_wanted_any_more() {
    let served = served(settings()).await;
    served.hears("tell me a story");
    served.answers(vec![Step::Say("Once. "), Step::Hang]);
    // Far more than a socket buffers.
    let endless = (0..4_000).map(|_| Ok(vec![1; 1_000])).collect();
    served
        .script
        .speech
        .lock()
        .unwrap()
        .push_back(Turn::Give(endless));
    let mut client = served.connect().await;
    client.say(pipeline("asr", "tts")).await;
    client.utter(100).await;
    client.until("audio-chunk").await;
    client
        .say(audio_start(AudioFormat::mono_16_bit(16_000)))
        .await;
    // The generation ends although the client has not read what was sent, and the rest is never sent.
    timeout(PATIENCE, served.script.dropped.notified())
        .await
        .unwrap();
    let frames = client.until("audio-stop").await;
    let samples: usize = frames.iter().map(|frame| frame.payload.len() / 2).sum();
    assert!(
        samples < 2_000_000,
        "{samples} samples of an unwanted answer"
    );
}

/// Sends loud and then quiet audio of these durations in ms.
async fn sound(client: &mut Client, loud: usize, quiet: usize) {
    let format = AudioFormat::mono_16_bit(16_000);
    let period = [0_i16, 6000, 8000, 6000, 0, -6000, -8000, -6000];
    let loud = period.into_iter().cycle().take(loud * 16);
    let samples: Vec<i16> = loud.chain(vec![0; quiet * 16]).collect();
    client.say(chunk(format, pcm_bytes(&samples))).await;
}

/// Waits until a condition holds.
async fn until(holds: impl Fn() -> bool) {
    timeout(PATIENCE, async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await
    .expect("it never holds");
}

#[tokio::test]
async fn an_answer_is_begun_in_the_silence_at_the_end_of_an_utterance_and_given_at_its_end() {
    let served = served(settings()).await;
    let script = &served.script;
    let mut client = served.connect().await;
    client.say(pipeline("asr", "tts")).await;
    let format = AudioFormat::mono_16_bit(16_000);
    client.say(audio_start(format)).await;
    served.hears("turn on the light");
    served.answers(vec![Step::Say("It is done.")]);
    sound(&mut client, 250, 200).await;
    until(|| script.spoken.lock().unwrap().len() == 1).await;
    assert!(script.heard.lock().unwrap()[0].meta.early);
    assert!(script.asked.lock().unwrap()[0].meta.early);
    let early = timeout(Duration::from_millis(100), client.reader.next()).await;
    assert!(early.is_err(), "the answer is given before the end");
    sound(&mut client, 0, 300).await;
    client.say(Event::AudioStop(AudioStop::default())).await;
    let frames = client.until("audio-stop").await;
    assert_eq!(
        kinds(&frames),
        [
            "transcript",
            "handled-start",
            "handled-chunk",
            "audio-start",
            "audio-chunk",
            "handled",
            "handled-stop",
            "audio-stop"
        ]
    );
    let heard = script.heard.lock().unwrap().len();
    assert_eq!((heard, script.asked.lock().unwrap().len()), (1, 1));

    // A user who continues has not asked: all work is repeated at the end.
    client.say(audio_start(format)).await;
    served.hears("turn on the");
    served.answers(vec![Step::Say("The"), Step::Hang]);
    sound(&mut client, 250, 200).await;
    until(|| script.generating.load(Ordering::SeqCst) == 1).await;
    served.hears("turn on the fan");
    served.answers(vec![Step::Say("The fan is on.")]);
    sound(&mut client, 100, 0).await;
    until(|| script.generating.load(Ordering::SeqCst) == 0).await;
    client.say(Event::AudioStop(AudioStop::default())).await;
    let frames = client.until("audio-stop").await;
    assert_eq!(frames[0].data["text"], "turn on the fan");
    let asked = script.asked.lock().unwrap();
    assert_eq!(asked.len(), 3);
    assert!(!asked[2].meta.early);
    drop(asked);
    let pause = locked(&served.api.0.early_pause).get();
    assert!(pause > EarlyPause::default().get(), "{pause:?}");
    let metrics = served.metrics.encode();
    let counted = |code: u16| {
        format!("cotenant_request_seconds_count{{route=\"wyoming/talk\",code=\"{code}\"}}")
    };
    assert!(
        metrics.contains(&format!("{} 2", counted(200))),
        "{metrics}"
    );
    assert!(!metrics.contains(&counted(499)), "{metrics}");
}

#[tokio::test]
async fn what_is_done_ahead_is_given_up_for_memory_and_for_requests_and_done_at_the_end() {
    let served = served(settings()).await;
    let script = &served.script;
    let mut client = served.connect().await;
    client.say(pipeline("asr", "tts")).await;
    let format = AudioFormat::mono_16_bit(16_000);
    let room = served.api.0.audio.available_permits();
    let short = |level, coming_back| {
        let mut state = Snapshot::default();
        state.pressure.level = level;
        state.memory.coming_back = coming_back;
        Some(state)
    };
    let cases = [
        short(PressureLevel::Elevated, Bytes::ZERO),
        short(PressureLevel::Normal, Bytes::new(1)),
        None,
    ];
    for (asked, short) in (1..).zip(cases) {
        client.say(audio_start(format)).await;
        served.hears("turn on the light");
        served.answers(vec![Step::Say("It is"), Step::Hang]);
        sound(&mut client, 250, 200).await;
        until(|| script.generating.load(Ordering::SeqCst) == 1).await;
        // the audio, and the held answer
        let held = room - served.api.0.audio.available_permits();
        assert_eq!(held, 15 + HELD_KIB as usize);
        match short {
            Some(short) => drop(served.states.send_replace(Arc::new(short))),
            None => served.api.0.answers.make_way(),
        }
        until(|| script.generating.load(Ordering::SeqCst) == 0).await;
        until(|| room - served.api.0.audio.available_permits() == 15).await;
        served.states.send_replace(Arc::default());
        served.hears("turn on the light");
        served.answers(vec![Step::Say("It is done.")]);
        client.say(Event::AudioStop(AudioStop::default())).await;
        client.until("audio-stop").await;
        let asked = &script.asked.lock().unwrap()[..2 * asked];
        assert!(!asked.last().unwrap().meta.early);
    }
}

#[tokio::test]
async fn what_is_not_done_ahead_is_done_at_the_end() {
    let served = served(settings()).await;
    let script = &served.script;
    let mut client = served.connect().await;
    let format = AudioFormat::mono_16_bit(16_000);
    // The recogniser has no capacity for it.
    client.say(audio_start(format)).await;
    let turns = [
        Turn::Refuse(starting()),
        Turn::Give("good night".to_owned()),
    ];
    script.transcripts.lock().unwrap().extend(turns);
    sound(&mut client, 250, 200).await;
    until(|| script.heard.lock().unwrap().len() == 1).await;
    until(|| script.transcripts.lock().unwrap().len() == 1).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    client.say(Event::AudioStop(AudioStop::default())).await;
    let transcript = client.until("transcript").await.pop().unwrap();
    assert_eq!(transcript.data["text"], "good night");
    // A file arrives faster than it was spoken.
    client.say(audio_start(format)).await;
    served.hears("good morning");
    sound(&mut client, 900, 200).await;
    client.say(Event::AudioStop(AudioStop::default())).await;
    client.until("transcript").await;
    let heard = script.heard.lock().unwrap();
    assert_eq!(heard.len(), 3);
    assert!(!heard[2].meta.early);
}

// ---- bad input ----

#[tokio::test]
async fn bad_input_is_refused_by_name_and_disturbs_no_other_session() {
    let served = served(settings()).await;
    let mut bystander = served.connect().await;
    let format = AudioFormat::mono_16_bit(16_000);
    bystander.say(audio_start(format)).await;
    bystander.say(chunk(format, vec![0; 4_000])).await;

    let wide = AudioFormat { width: 9, ..format };
    let fast = AudioFormat {
        rate: 4_000_000,
        ..format
    };
    let other = AudioFormat {
        channels: 2,
        ..format
    };
    let long = "long ".repeat(10_000);
    for (events, code, words) in [
        (vec![audio_start(wide)], "bad-request", "9 bytes per sample"),
        (vec![audio_start(fast)], "bad-request", "4000000 Hz"),
        (
            vec![audio_start(format), chunk(other, vec![0; 8])],
            "bad-request",
            "differs in format",
        ),
        // Ten minutes of audio.
        (
            std::iter::once(audio_start(format))
                .chain((0..600).map(|_| chunk(format, vec![0; 32_000])))
                .collect(),
            "too-long",
            "longer than the limit of 2.0 s",
        ),
        (
            vec![Event::SynthesizeStop],
            "bad-request",
            "without `synthesize-start`",
        ),
        (
            vec![Event::Synthesize(Synthesize {
                text: long,
                voice: None,
            })],
            "too-long",
            "longer than the limit of 16 KiB",
        ),
    ] {
        let mut client = served.connect().await;
        for event in events {
            // The server may already have closed the connection.
            if write_frame(&mut client.writer, &event.into_frame())
                .await
                .is_err()
            {
                break;
            }
        }
        let (found, text) = client.refusal().await;
        assert_eq!(found, code, "{text}");
        assert!(text.contains(words), "{text}");
    }
    for (bytes, words) in [
        (
            vec![b'x'; 1 << 20],
            "no newline within the first 65536 bytes",
        ),
        (
            b"{\"type\":\"audio-chunk\",\"payload_length\":999999999}\n".to_vec(),
            "at most 1048576 bytes",
        ),
        (
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            "not a JSON object with a `type`",
        ),
        (
            b"{\"type\":\"audio-start\",\"data\":{\"rate\":\"x\"}}\n".to_vec(),
            "audio-start",
        ),
    ] {
        let mut client = served.connect().await;
        let _ = client.writer.write_all(&bytes).await;
        let (code, text) = client.refusal().await;
        assert_eq!(code, "bad-request");
        assert!(text.contains(words), "{text}");
    }
    // Half a message, and nothing more.
    let mut client = served.connect().await;
    client
        .writer
        .write_all(b"{\"type\":\"describe\"")
        .await
        .unwrap();
    client.writer.shutdown().await.unwrap();
    let (code, text) = client.refusal().await;
    assert_eq!(
        (code.as_str(), text.contains("stream ended")),
        ("bad-request", true),
        "{text}"
    );

    served.hears("still here");
    bystander.say(Event::AudioStop(AudioStop::default())).await;
    assert_eq!(
        bystander.until("transcript").await[0].data["text"],
        "still here"
    );
}

#[tokio::test]
async fn what_has_no_sound_is_an_empty_transcript() {
    let served = served(settings()).await;
    let format = AudioFormat::mono_16_bit(16_000);
    let mut client = served.connect().await;
    // Started and stopped without audio, with an empty chunk, and only stopped.
    for events in [
        vec![audio_start(format)],
        vec![audio_start(format), chunk(format, Vec::new())],
        vec![],
    ] {
        for event in events {
            client.say(event).await;
        }
        client.say(Event::AudioStop(AudioStop::default())).await;
        assert_eq!(client.until("transcript").await[0].data["text"], "");
    }
    assert!(
        served.script.heard.lock().unwrap().is_empty(),
        "no worker was asked"
    );
}

#[tokio::test]
async fn a_voice_that_breaks_off_in_mid_sentence_is_reported_to_its_client_alone() {
    let served = served(settings()).await;
    let lost = Refusal::WorkerLost {
        worker: "tts".to_owned(),
        reason: "it did not synthesize within 30.0 s".to_owned(),
        retry_after: Duration::ZERO,
    };
    let broken = vec![Ok(vec![1; 100]), Err(lost)];
    served
        .script
        .speech
        .lock()
        .unwrap()
        .push_back(Turn::Give(broken));
    let mut client = served.connect().await;
    let words = || {
        Event::Synthesize(Synthesize {
            text: "Good night.".to_owned(),
            voice: None,
        })
    };
    client.say(words()).await;
    let (code, text) = client.refusal().await;
    assert_eq!(code, "worker-lost");
    assert!(
        text.starts_with("worker `tts` failed: it did not synthesize"),
        "{text}"
    );
    let mut next = served.connect().await;
    next.say(words()).await;
    next.until("audio-stop").await;
}

#[tokio::test]
async fn all_utterances_together_take_no_more_memory_than_they_may() {
    let served = served(WyomingConfig {
        audio_max: Duration::from_secs(600),
        ..settings()
    })
    .await;
    let format = AudioFormat::mono_16_bit(16_000);
    let mut client = served.connect().await;
    client.say(audio_start(format)).await;
    // 19 MiB, of which 16 are permitted.
    for _ in 0..20 {
        let one_mib = chunk(format, vec![0; 1 << 20]);
        if write_frame(&mut client.writer, &one_mib.into_frame())
            .await
            .is_err()
        {
            break;
        }
    }
    let (code, text) = client.refusal().await;
    assert_eq!(code, "busy", "{text}");
    // The memory is returned.
    served.hears("good night");
    let mut next = served.connect().await;
    next.utter(10_000).await;
    next.until("transcript").await;
}

#[tokio::test]
async fn a_server_that_ends_says_so_to_waiting_clients() {
    let served = served(settings()).await;
    let mut client = served.connect().await;
    client.utter(100).await;
    client.say(Event::Describe).await;
    client.until("info").await;
    served.stop.cancel();
    assert_eq!(client.refusal().await.0, "draining");
}
