//! Realtime API events in any order and shape: the session replies to the last, or closes.

use std::{net::SocketAddr, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::{net::TcpStream, time::timeout};
use tokio_tungstenite::{client_async, tungstenite::Message};

use crate::{
    runner::{Target, fuzz},
    targets::serving,
};

/// Events of one session.
const EVENTS_MAX: usize = 24;

#[test]
fn realtime_events() {
    let target = Target {
        name: "realtime",
        examples: (0..24u8)
            .map(|seed| {
                (0..40u8)
                    .map(|at| seed.wrapping_mul(at).wrapping_add(at.wrapping_mul(5)))
                    .collect()
            })
            .collect(),
        words: &["\u{0}", "\u{1}", "\u{7f}", "abc", "\n\n\n\n"],
        memory_max: |_length| 96 << 20,
        hang: Duration::from_secs(2),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (address, stop) = runtime.block_on(serving());
    fuzz(&target, |bytes| runtime.block_on(session(address, bytes)));
    stop.cancel();
}

/// The kinds of the received events, and the end of the session.
async fn session(address: SocketAddr, bytes: &[u8]) -> String {
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut socket, _response) =
        client_async(format!("ws://{address}/v1/realtime?model=demo"), stream)
            .await
            .expect("a session");
    let mut bytes = bytes.iter().copied();
    for _ in 0..EVENTS_MAX {
        let Some(kind) = bytes.next() else { break };
        if socket.send(message(kind, &mut bytes)).await.is_err() {
            break; // it has been closed, which is read below
        }
    }
    let last = json!({"type": "the last", "event_id": "last"}).to_string();
    let _ = socket.send(Message::text(last)).await;
    let mut said = String::new();
    loop {
        match timeout(Duration::from_secs(15), socket.next())
            .await
            .expect("the session hangs")
        {
            Some(Ok(Message::Text(text))) => {
                let event: Value = serde_json::from_str(&text).unwrap();
                let kind = event["type"].as_str().unwrap();
                if kind == "error" && event["error"]["event_id"] == "last" {
                    break;
                }
                assert_ne!(event["error"]["type"], "server_error", "{event}");
                if !said.contains(kind) {
                    said.push_str(kind);
                    said.push(' ');
                }
            }
            Some(Ok(Message::Close(frame))) => {
                said.push_str(if frame.is_some() {
                    "closed with a code"
                } else {
                    "closed"
                });
                break;
            }
            Some(Ok(_)) => {}
            Some(Err(_)) | None => {
                said.push_str("ended");
                break;
            }
        }
    }
    let _ = socket.close(None).await;
    while let Ok(Some(Ok(_))) = timeout(Duration::from_secs(15), socket.next()).await {}
    said
}

fn pick<'a>(words: &[&'a str], at: u8) -> &'a str {
    words[usize::from(at) % words.len()]
}

/// An event selected by the bytes, one in eight of a wrong shape.
fn message(kind: u8, bytes: &mut impl Iterator<Item = u8>) -> Message {
    let mut next = |most: u8| bytes.next().unwrap_or(0) % most;
    let samples = |loud: bool, count: usize| {
        let sample: i16 = if loud { 9000 } else { 0 };
        let bytes: Vec<u8> = (0..count)
            .flat_map(|at| (if at % 8 < 4 { sample } else { -sample }).to_le_bytes())
            .collect();
        BASE64.encode(bytes)
    };
    let id = format!("item_{}", next(4));
    let mut event = match kind % 16 {
        0 => {
            json!({"type": "session.update", "session": {"type": "realtime", "output_modalities": [pick(&["text", "audio"], next(2))]}})
        }
        1 => json!({"type": "session.update", "session": {"type": "realtime", "audio": {"input": {
            "turn_detection": (next(2) == 0).then(|| json!({"type": "server_vad", "silence_duration_ms": 100})),
            "transcription": {"model": "asr"}}}}}),
        2 => {
            json!({"type": "session.update", "session": {"type": "realtime", "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "tool_choice": pick(&["auto", "required", "none", "g"], next(4))}})
        }
        3..=5 => {
            json!({"type": "input_audio_buffer.append", "audio": samples(next(2) == 0, 2400 * usize::from(next(8)))})
        }
        6 => json!({"type": "input_audio_buffer.commit"}),
        7 => json!({"type": "input_audio_buffer.clear"}),
        8 | 9 => {
            json!({"type": "conversation.item.create", "item": {"id": id, "type": "message", "role": pick(&["user", "system", "assistant"], next(3)), "content": [{"type": "input_text", "text": "hi"}]}})
        }
        10 => {
            json!({"type": "conversation.item.create", "previous_item_id": id, "item": {"type": "function_call_output", "call_id": "c", "output": "x"}})
        }
        11 => json!({"type": "conversation.item.delete", "item_id": id}),
        12 => json!({"type": "conversation.item.retrieve", "item_id": id}),
        13 => {
            json!({"type": "conversation.item.truncate", "item_id": id, "content_index": next(2), "audio_end_ms": i64::from(next(200)) * 100 - 100})
        }
        14 => {
            json!({"type": "response.create", "response": {"conversation": pick(&["auto", "none"], next(2)), "max_output_tokens": i64::from(next(9)) - 1}})
        }
        _ => json!({"type": "response.cancel"}),
    };
    match next(32) {
        0 => return Message::text(event.to_string().get(1..).unwrap_or_default().to_owned()),
        1 => return Message::binary(vec![next(255); 9]),
        2 => {
            // One of its fields is replaced.
            let fields = event.as_object_mut().unwrap();
            let names: Vec<String> = fields.keys().cloned().collect();
            let name = names[usize::from(next(8)) % names.len()].clone();
            let odd = [
                json!(null),
                json!(-1),
                json!("x".repeat(70_000)),
                json!([[[]]]),
                json!({"type": {}}),
            ];
            fields.insert(name, odd[usize::from(next(5))].clone());
        }
        _ => {}
    }
    Message::text(event.to_string())
}
