//! OpenAI's Realtime API over a real WebSocket, with scripted backends.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use cotenant::{
    conversation::{refusal::Refusal, refusals::at_limit},
    heap,
    http::{
        Limits,
        backend::{
            AnswerForm, AnswerPart, ChatEvent, ChatRequest, FinishReason, Role, Usage, VoiceWish,
        },
    },
    policy::{pressure::PressureLevel, snapshot::Snapshot},
    units::{Bytes, Tokens},
};
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::{net::TcpStream, time::timeout};
use tokio_tungstenite::{
    WebSocketStream, client_async,
    tungstenite::{
        Message,
        client::IntoClientRequest as _,
        error::Error as WsError,
        protocol::{CloseFrame, frame::coding::CloseCode},
    },
};

use super::{
    client::{Connection, get, post_json, request},
    script::{Answers, Open, Step, delta, engine_lost, failed, finished, open, open_with, started},
};

/// Longer than any event; only a hang reaches it.
const HANG: Duration = Duration::from_secs(30);

struct Client {
    socket: WebSocketStream<TcpStream>,
}

impl Client {
    async fn connect(address: SocketAddr, query: &str) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        let url = format!("ws://{address}/v1/realtime{query}");
        let (socket, _response) = client_async(url, stream).await.unwrap();
        Self { socket }
    }

    /// Opens a session, and reads its creation event.
    async fn open(open: &Open) -> Self {
        let mut client = Self::connect(open.address, "?model=tiny").await;
        let created = client.next().await;
        assert_eq!(created["type"], "session.created");
        client
    }

    /// Opens a session with these settings.
    async fn with(open: &Open, session: Value) -> Self {
        let mut client = Self::open(open).await;
        client
            .send(&json!({"type": "session.update", "session": session}))
            .await;
        assert_eq!(client.next().await["type"], "session.updated");
        client
    }

    async fn send(&mut self, event: &Value) {
        self.socket
            .send(Message::text(event.to_string()))
            .await
            .unwrap();
    }

    /// Returns the next message, except pings.
    async fn message(&mut self) -> Option<Message> {
        loop {
            match timeout(HANG, self.socket.next())
                .await
                .expect("the server hangs")
            {
                Some(Ok(Message::Ping(_))) => {}
                Some(Ok(message)) => return Some(message),
                Some(Err(_)) | None => return None,
            }
        }
    }

    async fn next(&mut self) -> Value {
        match self.message().await {
            Some(Message::Text(text)) => serde_json::from_str(&text).unwrap(),
            other => panic!("no event: {other:?}"),
        }
    }

    /// Returns all events up to the first of this type.
    async fn until(&mut self, kind: &str) -> Vec<Value> {
        let mut events = Vec::new();
        loop {
            let event = self.next().await;
            let last = event["type"] == kind;
            events.push(event);
            if last {
                return events;
            }
        }
    }

    /// Returns the next event, which must be an error with this code and parameter.
    async fn error(&mut self, code: &str, param: Option<&str>) -> Value {
        let event = self.next().await;
        assert_eq!(event["type"], "error", "{event}");
        assert_eq!(event["error"]["code"], code, "{event}");
        if let Some(param) = param {
            assert_eq!(event["error"]["param"], param, "{event}");
        }
        event
    }

    async fn append(&mut self, samples: &[i16]) {
        for piece in samples.chunks(2400) {
            self.send(&json!({"type": "input_audio_buffer.append", "audio": encoded(piece)}))
                .await;
        }
    }

    async fn say(&mut self, text: &str) {
        let content = json!([{"type": "input_text", "text": text}]);
        let item = json!({"type": "message", "role": "user", "content": content});
        self.send(&json!({"type": "conversation.item.create", "item": item}))
            .await;
        self.until("conversation.item.done").await;
    }

    async fn respond(&mut self) {
        self.send(&json!({"type": "response.create"})).await;
    }

    async fn closed(&mut self) -> u16 {
        match self.message().await {
            Some(Message::Close(Some(frame))) => frame.code.into(),
            other => panic!("not closed: {other:?}"),
        }
    }
}

fn encoded(samples: &[i16]) -> String {
    let bytes: Vec<u8> = samples
        .iter()
        .flat_map(|sample| sample.to_le_bytes())
        .collect();
    BASE64.encode(bytes)
}

/// Returns a loud tone at 24 kHz.
fn loud(millis: usize) -> Vec<i16> {
    let period = [0, 6000, 8000, 6000, 0, -6000, -8000, -6000];
    period.into_iter().cycle().take(millis * 24).collect()
}

fn quiet(millis: usize) -> Vec<i16> {
    vec![0; millis * 24]
}

fn types(events: &[Value]) -> Vec<&str> {
    events
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect()
}

fn of_type<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
    events
        .iter()
        .filter(|event| event["type"] == kind)
        .collect()
}

fn text_only() -> Value {
    json!({"type": "realtime", "output_modalities": ["text"], "instructions": "be brief"})
}

fn pressure() -> Refusal {
    Refusal::PressureHigh {
        act: "start an answer".to_owned(),
        level: PressureLevel::Critical,
        retry_after: Duration::from_millis(50),
    }
}

/// Returns the contents of a request's messages.
fn contents(asked: &ChatRequest) -> Vec<&str> {
    let messages = asked.prompt.messages().iter();
    messages.map(|message| message.content.as_str()).collect()
}

#[tokio::test]
async fn a_written_conversation_comes_in_order() {
    let open = open().await;
    let mut client = Client::with(&open, text_only()).await;
    client.say("turn on the light").await;
    client
        .send(&json!({"type": "response.create", "response": {"metadata": {"a": "b"}, "max_output_tokens": 20}}))
        .await;
    let events = client.until("response.done").await;
    assert_eq!(
        types(&events),
        [
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "conversation.item.done",
            "response.output_item.done",
            "response.done",
        ]
    );
    let mut ids: Vec<&str> = events
        .iter()
        .map(|event| event["event_id"].as_str().unwrap())
        .collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), events.len());
    assert_eq!(events[0]["response"]["metadata"], json!({"a": "b"}));
    assert_eq!(events[6]["text"], "It is done.");
    let response = &events[10]["response"];
    assert_eq!(
        (&response["status"], &response["status_details"]),
        (&json!("completed"), &Value::Null)
    );
    assert_eq!(response["output"][0], events[9]["item"]);
    assert_eq!(
        response["output"][0]["content"],
        json!([{"type": "output_text", "text": "It is done."}])
    );
    let usage = &response["usage"];
    assert_eq!(
        (&usage["input_tokens"], &usage["output_tokens"]),
        (&json!(12), &json!(3))
    );
    assert_eq!(usage["input_token_details"]["cached_tokens"], 8);
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert_eq!(asked.max_tokens, Some(Tokens::new(20)));
    // As in OpenAI's sessions, so that answers vary.
    assert_eq!(asked.sampling.defaults.temperature, Some(0.8));
    assert!(asked.sampling.asked.seed.is_some());
    let roles: Vec<Role> = asked
        .prompt
        .messages()
        .iter()
        .map(|message| message.role)
        .collect();
    assert_eq!(roles, [Role::System, Role::User]);

    // the answer is then part of the conversation
    client.say("and now off").await;
    client.respond().await;
    client.until("response.done").await;
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert_eq!(
        contents(&asked),
        [
            "be brief",
            "turn on the light",
            "It is done.",
            "and now off"
        ]
    );
    assert_eq!(
        open.script.ended.lock().unwrap().pop(),
        Some(("/v1/realtime".to_owned(), 101))
    );
    let end = CloseFrame {
        code: CloseCode::Normal,
        reason: "".into(),
    };
    client.socket.close(Some(end)).await.unwrap();
    assert_eq!(client.closed().await, 1000);
}

#[tokio::test]
async fn a_spoken_turn_is_heard_answered_and_spoken() {
    let open = open().await;
    let session = json!({"type": "realtime", "audio": {
        "input": {"transcription": {"model": "pocketsphinx", "language": "en"}}, "output": {"voice": "echo"}}});
    let mut client = Client::with(&open, session).await;
    for piece in [quiet(200), loud(600), quiet(700)] {
        client.append(&piece).await;
    }
    let events = client.until("response.done").await;
    let mut order = types(&events);
    order.dedup();
    let order: Vec<&str> = order
        .into_iter()
        .filter(|kind| !kind.ends_with("audio.delta"))
        .collect();
    assert_eq!(
        order,
        [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            "conversation.item.input_audio_transcription.delta",
            "conversation.item.input_audio_transcription.completed",
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
            "response.output_audio_transcript.delta",
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "conversation.item.done",
            "response.output_item.done",
            "response.done",
        ]
    );
    let item = &events[0]["item_id"];
    for kind in [
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
    ] {
        assert_eq!(of_type(&events, kind)[0]["item_id"], *item, "{kind}");
    }
    assert_eq!(
        of_type(
            &events,
            "conversation.item.input_audio_transcription.completed"
        )[0]["transcript"],
        "turn on the light"
    );
    let (start, end) = (&events[0]["audio_start_ms"], &events[1]["audio_end_ms"]);
    assert!(
        start.as_u64().unwrap() <= 200 && (1200..1500).contains(&end.as_u64().unwrap()),
        "{start} {end}"
    );
    // one second at 16 kHz is one second at 24 kHz
    let bytes: usize = of_type(&events, "response.output_audio.delta")
        .iter()
        .map(|event| {
            BASE64
                .decode(event["delta"].as_str().unwrap())
                .unwrap()
                .len()
        })
        .sum();
    assert_eq!(bytes, 2 * 24_000);
    let response = &events.last().unwrap()["response"];
    assert_eq!(
        response["output"][0]["content"],
        json!([{"type": "output_audio", "transcript": "It is done."}])
    );

    let heard = open.script.transcriptions.lock().unwrap().pop().unwrap();
    assert_eq!(heard.language.as_deref(), Some("en"));
    let millis = heard.audio.samples.len() / 16;
    assert!((1000..1500).contains(&millis), "{millis} ms were heard");
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert_eq!(asked.prompt.messages()[0].content, "turn on the light");
    let spoken = open.script.speeches.lock().unwrap().pop().unwrap();
    assert_eq!(
        (spoken.text.as_str(), spoken.voice),
        ("It is done.", VoiceWish::Known("kal".to_owned()))
    );

    // the conversation keeps the audible part of the answer
    let id = response["output"][0]["id"].clone();
    let truncate = |end: u64| json!({"type": "conversation.item.truncate", "item_id": id, "content_index": 0, "audio_end_ms": end});
    client.send(&truncate(1001)).await;
    client.error("item_truncate_invalid_audio_end", None).await;
    client.send(&truncate(600)).await;
    assert_eq!(client.next().await["type"], "conversation.item.truncated");
    client
        .send(&json!({"type": "conversation.item.retrieve", "item_id": id}))
        .await;
    assert_eq!(
        client.next().await["item"]["content"][0]["transcript"],
        "It is"
    );
}

/// As long as the early pause, plus the audio buffered by the resampler.
const PAUSE_MS: usize = 250;

/// Waits until the script has received this many requests of each kind.
async fn worked(open: &Open, transcriptions: usize, chats: usize, speeches: usize) {
    let script = &open.script;
    let counts = || {
        (
            script.transcriptions.lock().unwrap().len(),
            script.chats.lock().unwrap().len(),
            script.speeches.lock().unwrap().len(),
        )
    };
    timeout(HANG, async {
        while counts() != (transcriptions, chats, speeches) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await
    .unwrap_or_else(|_| panic!("{:?}", counts()));
}

#[tokio::test]
async fn an_answer_is_begun_in_the_silence_at_the_end_of_a_turn_and_given_at_its_end() {
    let open = open().await;
    let script = &open.script;
    let session =
        json!({"type": "realtime", "audio": {"input": {"transcription": {"model": "any"}}}});
    let mut client = Client::with(&open, session).await;
    client.append(&[loud(200), quiet(PAUSE_MS)].concat()).await;
    client.until("input_audio_buffer.speech_started").await;
    worked(&open, 1, 1, 1).await;
    assert!(script.transcriptions.lock().unwrap()[0].meta.early);
    assert!(script.chats.lock().unwrap()[0].meta.early);
    let silent = timeout(Duration::from_millis(100), client.socket.next()).await;
    assert!(silent.is_err(), "{silent:?}");
    client.append(&quiet(400)).await;
    let events = client.until("response.done").await;
    assert_eq!(events[0]["type"], "input_audio_buffer.speech_stopped");
    let kinds = types(&events);
    let at = |kind: &str| kinds.iter().position(|found| *found == kind).unwrap();
    let transcribed = "conversation.item.input_audio_transcription.completed";
    assert!(at("input_audio_buffer.committed") < at(transcribed));
    assert!(at(transcribed) < at("response.created"));
    assert_eq!(
        events.last().unwrap()["response"]["output"][0]["content"],
        json!([{"type": "output_audio", "transcript": "It is done."}])
    );
    worked(&open, 1, 1, 1).await;

    // Time for the next turn: audio that arrives faster than real time is a file.
    tokio::time::sleep(Duration::from_millis(1000)).await;
    // A user who continues has not asked.
    script.answer([started(), delta("It is "), Step::Hang]);
    client.append(&[loud(200), quiet(PAUSE_MS)].concat()).await;
    worked(&open, 2, 2, 1).await;
    client.append(&loud(100)).await;
    script.all_dropped().await;

    // Nor is an answer used that was started with other instructions.
    script.answer([started(), delta("Yes."), finished()]);
    tokio::time::sleep(Duration::from_millis(400)).await;
    client.append(&quiet(300)).await;
    worked(&open, 3, 3, 2).await;
    let update = json!({"type": "session.update", "session": {"type": "realtime", "instructions": "be kind"}});
    client.send(&update).await;
    client.append(&quiet(300)).await;
    client.until("response.done").await;
    worked(&open, 3, 4, 3).await;
    let chats = script.chats.lock().unwrap();
    let last = chats.last().unwrap();
    assert_eq!(contents(last)[0], "be kind");
    assert!(!last.meta.early);
}

#[tokio::test]
async fn an_answer_begun_early_is_given_up_for_memory_and_for_requests_and_begun_at_the_end() {
    let open = open().await;
    let mut client = Client::open(&open).await;
    let script = &open.script;
    let Answers(states, answers) = &script.answers;
    for round in 0..2 {
        script.answer([started(), delta("It is "), Step::Hang]);
        client.append(&[loud(200), quiet(PAUSE_MS)].concat()).await;
        worked(&open, 2 * round + 1, 2 * round + 1, round).await;
        if round == 0 {
            let mut short = Snapshot::default();
            short.memory.coming_back = Bytes::new(1);
            states.send_replace(Arc::new(short));
        } else {
            answers.make_way();
        }
        script.all_dropped().await;
        states.send_replace(Arc::default());
        script.answer([started(), delta("It is done."), finished()]);
        client.append(&quiet(400)).await;
        let done = client.until("response.done").await.pop().unwrap();
        assert_eq!(done["response"]["status"], "completed");
        worked(&open, 2 * round + 2, 2 * round + 2, round + 1).await;
        assert!(!script.chats.lock().unwrap().last().unwrap().meta.early);
        // time for the next turn: audio that arrives faster than real time is a file
        tokio::time::sleep(Duration::from_millis(900)).await;
    }
}

#[tokio::test]
async fn an_answer_that_could_not_be_begun_early_is_begun_at_the_end() {
    let open = open().await;
    let mut client = Client::open(&open).await;
    let busy = || at_limit("answer", "work ahead of a request", 0_u64);
    // The recogniser is busy.
    open.script.refuse([busy()]);
    client.append(&[loud(200), quiet(PAUSE_MS)].concat()).await;
    worked(&open, 1, 0, 0).await;
    client.append(&quiet(400)).await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(done["response"]["status"], "completed");
    worked(&open, 2, 1, 1).await;

    // The recogniser completes after the end of the utterance.
    *open.script.transcript_after.lock().unwrap() = Some(Duration::from_millis(100));
    tokio::time::sleep(Duration::from_millis(900)).await;
    client.append(&[loud(200), quiet(PAUSE_MS)].concat()).await;
    worked(&open, 3, 1, 1).await;
    open.script.refuse([busy()]);
    client.append(&quiet(400)).await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(done["response"]["status"], "completed");
    worked(&open, 4, 2, 2).await;
    *open.script.transcript_after.lock().unwrap() = None;

    // The LLM is busy.
    tokio::time::sleep(Duration::from_millis(900)).await;
    open.script.answer([started(), failed(busy())]);
    client.append(&[loud(200), quiet(PAUSE_MS)].concat()).await;
    worked(&open, 5, 3, 2).await;
    open.script.answer([started(), delta("Yes."), finished()]);
    client.append(&quiet(400)).await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(done["response"]["status"], "completed");
    worked(&open, 5, 4, 3).await;
}

#[tokio::test]
async fn a_user_who_speaks_cancels_the_answer_and_so_does_the_client() {
    let open = open().await;
    let mut client = Client::open(&open).await;
    open.script.answer([started(), delta("It is "), Step::Hang]);
    client.say("turn on the light").await;
    client.respond().await;
    client.until("response.output_audio_transcript.delta").await;
    assert_eq!(open.script.live.load(Ordering::SeqCst), 1);
    client.respond().await;
    client
        .error("conversation_already_has_active_response", None)
        .await;
    // 50 ms after its first sample, at any offset, and without further samples
    client.append(&[0; 4801]).await;
    client.append(&loud(50)).await;
    let events = client.until("response.done").await;
    assert_eq!(events[0]["type"], "input_audio_buffer.speech_started");
    assert_eq!(events[0]["audio_start_ms"], 0);
    let response = &events.last().unwrap()["response"];
    assert_eq!(
        (&response["status"], &response["status_details"]["reason"]),
        (&json!("cancelled"), &json!("turn_detected"))
    );
    assert_eq!(response["output"][0]["status"], "incomplete");
    open.script.all_dropped().await;

    client.append(&quiet(700)).await;
    client.until("response.output_audio_transcript.delta").await;
    client
        .send(&json!({"type": "response.cancel", "response_id": "resp_other"}))
        .await;
    client.error("response_cancel_not_active", None).await;
    client.send(&json!({"type": "response.cancel"})).await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(
        done["response"]["status_details"]["reason"],
        "client_cancelled"
    );
    open.script.all_dropped().await;
    client.send(&json!({"type": "response.cancel"})).await;
    let error = client.error("response_cancel_not_active", None).await;
    assert!(
        error["error"]["message"]
            .as_str()
            .unwrap()
            .starts_with("Cancellation failed")
    );
}

#[tokio::test]
async fn turns_of_the_clients_own_wait_for_the_recogniser() {
    let open = open().await;
    *open.script.transcript_after.lock().unwrap() = Some(Duration::from_millis(100));
    let session = json!({"type": "realtime", "output_modalities": ["text"], "audio": {"input": {"turn_detection": null}}});
    let mut client = Client::with(&open, session).await;
    client.append(&loud(50)).await;
    client
        .send(&json!({"type": "input_audio_buffer.commit", "event_id": "mine"}))
        .await;
    let error = client.error("input_audio_buffer_commit_empty", None).await;
    assert_eq!(error["error"]["event_id"], "mine");
    client.append(&loud(950)).await;
    client
        .send(&json!({"type": "input_audio_buffer.commit"}))
        .await;
    client.respond().await;
    let events = client.until("response.done").await;
    assert_eq!(
        types(&events)[..5],
        [
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
            "response.output_item.added",
        ]
    );
    let heard = open.script.transcriptions.lock().unwrap().pop().unwrap();
    assert_eq!(heard.audio.samples.len(), 16_000);
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert_eq!(asked.prompt.messages()[0].content, "turn on the light");
    client.append(&loud(200)).await;
    client
        .send(&json!({"type": "input_audio_buffer.clear"}))
        .await;
    assert_eq!(client.next().await["type"], "input_audio_buffer.cleared");
    client
        .send(&json!({"type": "input_audio_buffer.commit"}))
        .await;
    client.error("input_audio_buffer_commit_empty", None).await;
}

/// The scripted voice has a single speed.
#[tokio::test]
async fn a_speed_that_the_voice_does_not_honour_is_named_once() {
    let open = open().await;
    let mut client = Client::with(
        &open,
        json!({"type": "realtime", "audio": {"output": {"speed": 1.25}}}),
    )
    .await;
    for errors in [1, 0] {
        client.say("turn on the light").await;
        client.respond().await;
        let events = client.until("response.done").await;
        assert_eq!(events.last().unwrap()["response"]["status"], "completed");
        let named = of_type(&events, "error");
        assert_eq!(named.len(), errors, "{events:?}");
        for event in named {
            assert_eq!(event["error"]["param"], "session.audio.output.speed");
            assert_eq!(
                event["error"]["message"],
                "session.audio.output.speed: `1.25` is not honoured: this voice has one speed"
            );
        }
    }
    client
        .send(&json!({"type": "session.update", "session": {"type": "realtime"}}))
        .await;
    assert_eq!(
        client.next().await["session"]["audio"]["output"]["speed"],
        1.0,
        "what is in force"
    );
}

#[tokio::test]
async fn a_session_of_transcription_writes_down_and_answers_nothing() {
    let open = open().await;
    let mut client = Client::connect(open.address, "?intent=transcription").await;
    assert_eq!(client.next().await["session"]["type"], "transcription");
    let session = json!({"type": "transcription", "audio": {"input": {"transcription": {"model": "pocketsphinx"}}}});
    client
        .send(&json!({"type": "session.update", "session": session}))
        .await;
    client.next().await;
    client.append(&[loud(400), quiet(700)].concat()).await;
    let kind = "conversation.item.input_audio_transcription.completed";
    let done = client.until(kind).await.pop().unwrap();
    assert_eq!(done["transcript"], "turn on the light");
    assert_eq!(done["usage"]["type"], "duration");
    client.respond().await;
    client.error("invalid_session_type", None).await;
    assert!(open.script.chats.lock().unwrap().is_empty());
}

#[tokio::test]
async fn tools_are_called_and_their_outcomes_go_back() {
    let open = open().await;
    let tool = json!({"type": "function", "name": "light", "parameters": {"type": "object"}});
    let mut session = text_only();
    session["tools"] = json!([tool]);
    let mut client = Client::with(&open, session).await;
    let call = |arguments: &str| {
        Step::Event(ChatEvent::Part(AnswerPart::ToolCall {
            name: "light".to_owned(),
            arguments: arguments.to_owned(),
        }))
    };
    let ended = |reason| {
        Step::Event(ChatEvent::Finished {
            reason,
            usage: Usage::default(),
        })
    };
    open.script.answer([
        started(),
        call("{\"on\":true}"),
        ended(FinishReason::ToolCalls),
    ]);
    client.say("turn on the light").await;
    client
        .send(&json!({"type": "response.create", "response": {"tool_choice": {"type": "function", "name": "light"}}}))
        .await;
    let events = client.until("response.done").await;
    assert_eq!(
        types(&events)[1..],
        [
            "response.output_item.added",
            "conversation.item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "conversation.item.done",
            "response.output_item.done",
            "response.done",
        ]
    );
    let called = &events.last().unwrap()["response"]["output"][0];
    assert_eq!(called["arguments"], "{\"on\":true}");
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert!(
        matches!(asked.form, Some(AnswerForm::ToolCall { name: Some(name) }) if name == "light")
    );

    let item =
        json!({"type": "function_call_output", "call_id": called["call_id"], "output": "it is on"});
    client
        .send(&json!({"type": "conversation.item.create", "item": item}))
        .await;
    open.script
        .answer([started(), call("{\"on\":"), ended(FinishReason::Length)]);
    client.respond().await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(
        done["response"]["status_details"]["reason"],
        "max_output_tokens"
    );
    assert_eq!(done["response"]["output"][0]["status"], "incomplete");
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    let [.., calling, outcome] = asked.prompt.messages() else {
        panic!("{:?}", asked.prompt)
    };
    assert_eq!(
        (calling.tool_calls.len(), calling.role),
        (1, Role::Assistant)
    );
    assert_eq!(
        (outcome.content.as_str(), outcome.name.as_deref()),
        ("it is on", Some("light"))
    );
}

#[tokio::test]
async fn a_wrong_event_is_an_error_with_its_field_and_the_session_goes_on() {
    let open = open().await;
    let mut client = Client::with(&open, text_only()).await;
    let update = |session: Value| json!({"type": "session.update", "session": session});
    let input = |input: Value| update(json!({"audio": {"input": input}}));
    let create = |item: Value| json!({"type": "conversation.item.create", "item": item});
    let respond = |response: Value| json!({"type": "response.create", "response": response});
    for (event, code, param) in [
        (json!({}), "invalid_value", "type"),
        (
            json!({"type": "conversation.item.invent"}),
            "invalid_value",
            "type",
        ),
        (
            json!({"type": "input_audio_buffer.append"}),
            "invalid_type",
            "audio",
        ),
        (
            json!({"type": "input_audio_buffer.append", "audio": 7}),
            "invalid_type",
            "audio",
        ),
        (
            json!({"type": "conversation.item.create", "item": 7}),
            "invalid_type",
            "item",
        ),
        (
            json!({"type": "conversation.item.create", "previous_item_id": 7, "item": {}}),
            "invalid_type",
            "previous_item_id",
        ),
        (
            json!({"type": "conversation.item.truncate", "item_id": "x", "audio_end_ms": "1"}),
            "invalid_type",
            "audio_end_ms",
        ),
        (
            json!({"type": "session.update", "session": []}),
            "invalid_type",
            "session",
        ),
        (
            json!({"type": "input_audio_buffer.append", "audio": "?"}),
            "invalid_value",
            "audio",
        ),
        (
            json!({"type": "input_audio_buffer.append", "audio": "AAAA"}),
            "invalid_value",
            "audio",
        ),
        (
            json!({"type": "input_audio_buffer.commit"}),
            "input_audio_buffer_commit_empty",
            "",
        ),
        (
            json!({"type": "conversation.item.delete", "item_id": "x"}),
            "item_delete_invalid_item_id",
            "item_id",
        ),
        (
            json!({"type": "conversation.item.retrieve", "item_id": "x"}),
            "item_retrieve_invalid_item_id",
            "item_id",
        ),
        (
            json!({"type": "conversation.item.truncate", "item_id": "x", "audio_end_ms": 1}),
            "item_truncate_invalid_item_id",
            "item_id",
        ),
        (
            json!({"type": "conversation.item.truncate", "item_id": "x", "audio_end_ms": -1}),
            "invalid_value",
            "audio_end_ms",
        ),
        (
            update(json!({"model": "gpt-9"})),
            "model_not_found",
            "session.model",
        ),
        (
            update(json!({"colour": "red"})),
            "invalid_value",
            "session.colour",
        ),
        (
            update(json!({"type": "video"})),
            "invalid_value",
            "session.type",
        ),
        (
            update(json!({"output_modalities": ["text", "audio"]})),
            "invalid_value",
            "session.output_modalities",
        ),
        (
            update(json!({"tools": [{"type": "web_search"}]})),
            "invalid_value",
            "session.tools[0].type",
        ),
        (
            update(json!({"max_output_tokens": 0})),
            "invalid_value",
            "session.max_output_tokens",
        ),
        (
            update(json!({"prompt": {"id": "x"}})),
            "invalid_value",
            "session.prompt",
        ),
        (
            input(json!({"format": {"type": "audio/pcmu"}})),
            "invalid_value",
            "session.audio.input.format",
        ),
        (
            input(json!({"format": {"type": "audio/pcm", "rate": 16000}})),
            "invalid_value",
            "session.audio.input.format",
        ),
        (
            input(json!({"turn_detection": {"type": "server_vad", "threshold": 2}})),
            "invalid_value",
            "session.audio.input.turn_detection.threshold",
        ),
        (
            input(json!({"turn_detection": {"type": "server_vad", "idle_timeout_ms": 5000}})),
            "invalid_value",
            "session.audio.input.turn_detection.idle_timeout_ms",
        ),
        (
            create(json!({"type": "message", "role": "robot"})),
            "invalid_value",
            "item.role",
        ),
        (
            create(json!({"type": "message", "role": "user", "id": "root"})),
            "invalid_value",
            "item.id",
        ),
        (
            create(
                json!({"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "x"}]}),
            ),
            "invalid_value",
            "item.content[0].type",
        ),
        (
            create(
                json!({"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": "AAAA"}]}),
            ),
            "invalid_value",
            "item.content[0].audio",
        ),
        (
            json!({"type": "conversation.item.create", "previous_item_id": "x", "item": {"type": "message", "role": "user"}}),
            "item_create_invalid_previous_item_id",
            "previous_item_id",
        ),
        (
            respond(json!({"conversation": "other"})),
            "invalid_value",
            "response.conversation",
        ),
        (
            respond(json!({"input": [{"type": "item_reference", "id": "x"}]})),
            "item_reference_invalid_item_id",
            "response.input[0].id",
        ),
        (
            respond(json!({"tool_choice": {"type": "function", "name": "f"}})),
            "invalid_value",
            "response.tool_choice",
        ),
    ] {
        let mut event = event;
        event["event_id"] = json!("mine");
        client.send(&event).await;
        let error = client.error(code, None).await;
        let param = (!param.is_empty()).then_some(param);
        assert_eq!(error["error"]["param"], json!(param), "{error}");
        assert_eq!(error["error"]["event_id"], "mine");
    }
    for (text, code) in [("{", "invalid_json"), ("[]", "invalid_type")] {
        client.socket.send(Message::text(text)).await.unwrap();
        let error = client.error(code, None).await;
        assert_eq!(error["error"]["param"], Value::Null, "{error}");
    }
    client
        .socket
        .send(Message::binary(vec![1, 2]))
        .await
        .unwrap();
    client.error("invalid_message", None).await;
    let item = json!({"id": "own", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]});
    client.send(&create(item.clone())).await;
    client.until("conversation.item.done").await;
    client.send(&create(item)).await;
    client
        .error("item_create_duplicate_item_id", Some("item.id"))
        .await;
    client.respond().await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(done["response"]["status"], "completed");
    let empty = json!({"conversation": "none", "input": [], "instructions": ""});
    client.send(&respond(empty)).await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(
        done["response"]["status_details"]["error"]["code"],
        "conversation_empty"
    );
}

#[tokio::test]
async fn every_event_of_an_item_names_the_item_before_it() {
    let open = open().await;
    let mut session = text_only();
    session["audio"] = json!({"input": {"turn_detection": null}});
    let mut client = Client::with(&open, session).await;
    let user = |id: &str| json!({"type": "message", "role": "user", "id": id, "content": [{"type": "input_text", "text": "hi"}]});
    for (id, after, before) in [
        ("first", Value::Null, Value::Null),
        ("second", Value::Null, json!("first")),
        ("between", json!("first"), json!("first")),
        ("zeroth", json!("root"), Value::Null),
    ] {
        client
            .send(&json!({"type": "conversation.item.create", "previous_item_id": after, "item": user(id)}))
            .await;
        for event in client.until("conversation.item.done").await {
            let previous = event.as_object().unwrap().get("previous_item_id");
            assert_eq!(previous, Some(&before), "{event}");
        }
    }
    client
        .send(&json!({"type": "conversation.item.create", "previous_item_id": "gone", "item": user("x")}))
        .await;
    let code = "item_create_invalid_previous_item_id";
    let error = client.error(code, Some("previous_item_id")).await;
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("`gone`"), "{message}");

    client.append(&loud(200)).await;
    client
        .send(&json!({"type": "input_audio_buffer.commit"}))
        .await;
    let events = client.until("conversation.item.done").await;
    assert_eq!(events[0]["type"], "input_audio_buffer.committed");
    for event in &events {
        assert_eq!(event["previous_item_id"], "second", "{event}");
    }
    client.respond().await;
    let given = client.until("response.done").await;
    for kind in ["conversation.item.added", "conversation.item.done"] {
        let event = of_type(&given, kind)[0];
        assert_eq!(event["previous_item_id"], events[0]["item_id"], "{event}");
    }
}

#[tokio::test]
async fn committed_silence_is_an_empty_transcript_and_its_response_answers_the_rest() {
    let open = open().await;
    let session = json!({"type": "realtime", "output_modalities": ["text"], "audio": {
        "input": {"turn_detection": null, "transcription": {"model": "pocketsphinx"}}}});
    let mut client = Client::with(&open, session).await;
    // before any text, also while the recogniser still listens
    for listening in [None, Some(Duration::from_millis(50))] {
        *open.script.transcript_after.lock().unwrap() = listening;
        client.append(&quiet(400)).await;
        client
            .send(&json!({"type": "input_audio_buffer.commit"}))
            .await;
        client.respond().await;
        let events = client.until("response.done").await;
        let kind = "conversation.item.input_audio_transcription.completed";
        assert_eq!(of_type(&events, kind)[0]["transcript"], "");
        let response = &events.last().unwrap()["response"];
        let details = &response["status_details"];
        assert_eq!(
            (&response["status"], &details["type"]),
            (&json!("incomplete"), &json!("incomplete"))
        );
        assert_eq!(details["error"]["code"], "conversation_empty");
        assert!(of_type(&events, "error").is_empty(), "{events:?}");
        assert!(open.script.chats.lock().unwrap().is_empty());
    }
    client.say("turn on the light").await;
    client.append(&quiet(400)).await;
    client
        .send(&json!({"type": "input_audio_buffer.commit"}))
        .await;
    client.respond().await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(done["response"]["status"], "completed");
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert_eq!(contents(&asked), ["turn on the light"]);
}

#[tokio::test]
async fn a_response_beside_the_conversation_leaves_it_as_it_is() {
    let open = open().await;
    let mut client = Client::with(&open, text_only()).await;
    client.say("turn on the light").await;
    let input = json!([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "aside"}]}]);
    client.send(&json!({"type": "response.create", "response": {"conversation": "none", "input": input}})).await;
    let events = client.until("response.done").await;
    assert!(of_type(&events, "conversation.item.added").is_empty());
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert_eq!(asked.prompt.messages()[1].content, "aside");
    client.respond().await;
    client.until("response.done").await;
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert_eq!(contents(&asked), ["be brief", "turn on the light"]);
}

#[tokio::test]
async fn pressure_that_stays_is_a_failed_response_and_the_next_one_is_given() {
    let limits = Limits {
        session_patience: Duration::ZERO,
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let mut client = Client::open(&open).await;
    client.say("turn on the light").await;
    open.script.refuse([pressure()]);
    client.respond().await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(done["response"]["status"], "failed");
    let error = &done["response"]["status_details"]["error"];
    assert_eq!(
        (&error["code"], &error["type"]),
        (&json!("memory_pressure"), &json!("server_error"))
    );

    open.script
        .answer([started(), delta("It "), failed(engine_lost())]);
    client.respond().await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(
        done["response"]["status_details"]["error"]["code"],
        "engine_lost"
    );
    assert_eq!(done["response"]["output"][0]["status"], "incomplete");

    // the voice fails during the answer
    open.script
        .answer([started(), delta("It is done."), finished()]);
    *open.script.speech.lock().unwrap() = vec![Ok(vec![1000; 8000]), Err(pressure())];
    client.respond().await;
    let events = client.until("response.done").await;
    assert!(!of_type(&events, "response.output_audio.delta").is_empty());
    let error = &events.last().unwrap()["response"]["status_details"]["error"];
    assert_eq!(error["code"], "memory_pressure");
    *open.script.speech.lock().unwrap() = vec![Ok(vec![1000; 8000])];
    client.respond().await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(done["response"]["status"], "completed");

    // the recogniser fails
    open.script.refuse([pressure()]);
    client.append(&[loud(400), quiet(700)].concat()).await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(
        done["response"]["status_details"]["error"]["code"],
        "memory_pressure"
    );
}

#[tokio::test]
async fn pressure_that_passes_is_waited_for() {
    let open = open().await;
    let mut client = Client::open(&open).await;
    client.say("turn on the light").await;
    open.script.refuse([pressure(), pressure()]);
    client.respond().await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(done["response"]["status"], "completed");
    open.script.refuse([pressure()]);
    client.append(&[loud(400), quiet(700)].concat()).await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(done["response"]["status"], "completed");
    assert_eq!(open.script.transcriptions.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn a_conversation_longer_than_the_context_loses_its_oldest_where_it_may() {
    let open = open().await;
    let too_long = || Refusal::ContextLengthExceeded {
        model: "tiny".to_owned(),
        prompt: Tokens::new(100),
        limit: Tokens::new(50),
    };
    let mut client = Client::with(&open, text_only()).await;
    for number in 0..8 {
        client.say(&format!("this is message {number}")).await;
    }
    open.script.refuse([too_long()]);
    client.respond().await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(done["response"]["status"], "completed");
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    let messages = asked.prompt.messages();
    assert_eq!(
        (messages[0].role, messages.last().unwrap().content.as_str()),
        (Role::System, "this is message 7")
    );
    assert!((3..5).contains(&messages.len()), "{messages:?}");

    client
        .send(&json!({"type": "session.update", "session": {"truncation": "disabled"}}))
        .await;
    client.next().await;
    open.script.refuse([too_long()]);
    client.respond().await;
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(
        done["response"]["status_details"]["error"]["code"],
        "context_length_exceeded"
    );
}

#[tokio::test]
async fn what_cannot_be_a_session_is_refused_before_it_is_one() {
    let open = open_with(
        Limits {
            sessions_max: 1,
            ..Limits::default()
        },
        true,
    )
    .await;
    async fn refused(
        open: &Open,
        query: &str,
        headers: &[(&'static str, &'static str)],
    ) -> (u16, String) {
        let stream = TcpStream::connect(open.address).await.unwrap();
        let mut request = format!("ws://{}/v1/realtime{query}", open.address)
            .into_client_request()
            .unwrap();
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        match client_async(request, stream).await {
            Err(WsError::Http(response)) => {
                let code = response
                    .headers()
                    .get("x-should-retry")
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .to_owned();
                (response.status().as_u16(), code)
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(
        refused(&open, "?model=gpt-9", &[]).await,
        (404, "false".to_owned())
    );
    assert_eq!(
        refused(&open, "?model=flite", &[]).await,
        (404, "false".to_owned())
    );
    let foreign = [("origin", "https://evil.example")];
    assert_eq!(
        refused(&open, "", &foreign).await,
        (403, "false".to_owned())
    );
    assert_eq!(
        refused(&open, "", &[("host", "evil.example")]).await,
        (421, "false".to_owned())
    );
    let cross = [("sec-fetch-site", "cross-site")];
    assert_eq!(refused(&open, "", &cross).await, (403, "false".to_owned()));
    let answer = get(open.address, "/v1/realtime").await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (400, "websocket_required")
    );

    let client = Client::open(&open).await;
    assert_eq!(
        refused(&open, "?model=tiny", &[]).await,
        (429, "true".to_owned())
    );
    drop(client);
    let draining = Snapshot {
        draining: true,
        ..Snapshot::default()
    };
    *open.script.snapshot.lock().unwrap() = draining;
    loop {
        match refused(&open, "?model=tiny", &[]).await {
            // the previous session is about to end
            (429, _) => tokio::task::yield_now().await,
            other => break assert_eq!(other, (503, "true".to_owned())),
        }
    }
    let none = open_with(Limits::default(), false).await;
    assert_eq!(refused(&none, "", &[]).await, (404, "false".to_owned()));
}

#[tokio::test]
async fn a_message_beyond_its_limit_ends_the_session_with_a_reason() {
    let open = open().await;
    let mut client = Client::open(&open).await;
    let audio = "A".repeat(1 << 20);
    client
        .send(&json!({"type": "input_audio_buffer.append", "audio": audio}))
        .await;
    client.error("invalid_message", None).await;
    assert_eq!(client.closed().await, 1009);
    let answer = post_json(
        open.address,
        "/v1/chat/completions",
        &json!({"messages": [{"role": "user", "content": "hi"}]}),
    )
    .await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn audio_beyond_its_limit_is_an_error_and_what_was_said_stays() {
    let limits = Limits {
        audio_duration_max: Duration::from_secs(1),
        sessions_audio_max: Bytes::from_kib(40),
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let session = json!({"type": "realtime", "output_modalities": ["text"], "audio": {"input": {"turn_detection": null}}});
    let mut client = Client::with(&open, session.clone()).await;
    client.append(&loud(900)).await;
    client.append(&loud(200)).await;
    let error = client.error("invalid_value", Some("audio")).await;
    assert!(
        error["error"]["message"]
            .as_str()
            .unwrap()
            .contains("limit of 1 s"),
        "{error}"
    );
    // the audio of all sessions together is also limited
    let mut other = Client::with(&open, session).await;
    other.append(&loud(500)).await;
    other.error("rate_limit_exceeded", None).await;
    client
        .send(&json!({"type": "input_audio_buffer.commit"}))
        .await;
    client.respond().await;
    client.until("response.done").await;
    let heard = open.script.transcriptions.lock().unwrap().pop().unwrap();
    assert!(
        heard.audio.samples.len() >= 900 * 16,
        "{}",
        heard.audio.samples.len()
    );
    drop(heard);
    other
        .send(&json!({"type": "input_audio_buffer.clear"}))
        .await;
    other.until("input_audio_buffer.cleared").await;
    other.append(&loud(500)).await;
    other
        .send(&json!({"type": "input_audio_buffer.commit"}))
        .await;
    other.until("input_audio_buffer.committed").await;
}

#[tokio::test]
async fn a_conversation_has_a_limit_and_its_oldest_items_are_deleted() {
    let limits = Limits {
        session_items_max: Bytes::from_kib(6),
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let mut client = Client::with(&open, text_only()).await;
    client.say(&"a".repeat(2000)).await;
    client.say(&"b".repeat(2000)).await;
    assert_eq!(client.next().await["type"], "conversation.item.deleted");
    client.respond().await;
    client.until("response.done").await;
    let asked = open.script.chats.lock().unwrap().pop().unwrap();
    assert!(asked.prompt.messages()[1].content.starts_with('b'));
    let content = json!([{"type": "input_text", "text": "c".repeat(5000)}]);
    let item = json!({"type": "message", "role": "user", "content": content});
    client
        .send(&json!({"type": "conversation.item.create", "item": item}))
        .await;
    client.error("invalid_value", Some("item")).await;
}

/// Eight sessions with tools of 0.9 MB took 519 MB.
#[tokio::test]
async fn the_settings_of_sessions_take_bounded_memory() {
    let open = open().await;
    let tools = |objects: usize| {
        let schema = format!(r#"{{"enum":[{}]}}"#, vec![r#"{"":0}"#; objects].join(","));
        let tool = format!(r#"{{"type":"function","name":"f","parameters":{schema}}}"#);
        format!(r#"{{"type":"session.update","session":{{"type":"realtime","tools":[{tool}]}}}}"#)
    };
    let mut sessions = Vec::new();
    for _ in 0..8 {
        let mut session = Client::open(&open).await;
        session
            .socket
            .send(Message::text(tools(100_000)))
            .await
            .unwrap();
        let refused = session.error("request_too_large", None).await;
        assert!(
            refused["error"]["message"]
                .as_str()
                .unwrap()
                .contains("the limit is 2 MiB"),
            "{refused}"
        );
        sessions.push(session);
    }
    // Each fits alone, but not all together.
    let large = tools(4000);
    let tree = heap::tree_bytes(large.as_bytes());
    assert!(
        (Bytes::from_kib(1500)..Bytes::from_kib(2000)).contains(&tree),
        "{tree}"
    );
    let mut kinds = Vec::new();
    for session in &mut sessions {
        session
            .socket
            .send(Message::text(large.clone()))
            .await
            .unwrap();
        let event = session.next().await;
        kinds.push(
            event["error"]["code"]
                .as_str()
                .unwrap_or("updated")
                .to_owned(),
        );
    }
    assert_eq!(kinds[0], "updated");
    assert_eq!(kinds[1..], ["rate_limit_exceeded"; 7]);
    // Earlier settings stay in force, and smaller ones free memory.
    sessions[0]
        .socket
        .send(Message::text(tools(1)))
        .await
        .unwrap();
    assert_eq!(sessions[0].next().await["type"], "session.updated");
    sessions[1].socket.send(Message::text(large)).await.unwrap();
    assert_eq!(sessions[1].next().await["type"], "session.updated");
}

#[tokio::test]
async fn a_session_that_does_not_read_is_given_up_and_its_answer_with_it() {
    let limits = Limits {
        write_stall_timeout: Duration::from_millis(200),
        sessions_max: 1,
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let mut client = Client::open(&open).await;
    let mut steps = vec![started()];
    steps.extend((0..20_000).map(|_| delta(&"word ".repeat(200))));
    steps.push(Step::Hang);
    open.script.answer(steps);
    client
        .send(&json!({"type": "session.update", "session": text_only()}))
        .await;
    client.say("turn on the light").await;
    client.respond().await;
    client.until("response.created").await;
    timeout(HANG, open.script.all_dropped()).await.unwrap();
    assert_eq!(get(open.address, "/v1/models").await.status, 200);
}

#[tokio::test]
async fn a_session_without_an_event_ends_with_a_reason() {
    let limits = Limits {
        session_idle_timeout: Duration::from_millis(300),
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let mut client = Client::open(&open).await;
    client.error("session_expired", None).await;
    assert_eq!(client.closed().await, 1000);
}

#[tokio::test]
async fn shutdown_lets_the_answer_end_and_closes_the_session() {
    let open = open().await;
    let mut idle = Client::open(&open).await;
    let mut client = Client::with(&open, text_only()).await;
    open.script.answer([
        started(),
        delta("It is "),
        Step::Gate,
        delta("done."),
        finished(),
    ]);
    client.say("turn on the light").await;
    client.respond().await;
    client.until("response.output_text.delta").await;
    open.shutdown.cancel();
    assert_eq!(idle.closed().await, 1001);
    client
        .send(&json!({"type": "input_audio_buffer.commit"}))
        .await;
    client.error("input_audio_buffer_commit_empty", None).await;
    open.script.gate.notify_one();
    let done = client.until("response.done").await.pop().unwrap();
    assert_eq!(done["response"]["status"], "completed");
    assert_eq!(client.closed().await, 1001);
}

#[tokio::test]
async fn a_session_ends_with_its_listener() {
    let open = open().await;
    let mut client = Client::with(&open, text_only()).await;
    open.script.answer([started(), delta("It is "), Step::Hang]);
    client.say("turn on the light").await;
    client.respond().await;
    client.until("response.output_text.delta").await;
    open.serving.abort();
    while client.message().await.is_some() {}
    timeout(HANG, open.script.all_dropped()).await.unwrap();
    let mut connection = match TcpStream::connect(open.address).await {
        Ok(stream) => Connection::over(stream),
        Err(_refused) => return,
    };
    connection
        .send_lossy(&request("GET", "/health", &[], b""))
        .await;
    assert!(connection.closed().await);
}
