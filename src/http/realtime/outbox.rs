//! Queue of outgoing events.

use std::{collections::VecDeque, future::poll_fn};

use axum::{
    Error,
    extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket},
};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use futures_util::{SinkExt as _, stream::SplitSink};
use serde_json::{Value, json};

use super::super::{api::Api, fault::Fault, stream::merged};
use cotenant_units::Bytes;

/// Events to send, in order.
pub(super) struct Outbox {
    api: Api,
    waiting: VecDeque<Message>,
    /// Their bytes.
    bytes: usize,
    /// Whether an event was handed to the socket and may be unsent.
    unsent: bool,
}

impl Outbox {
    pub(super) const fn new(api: Api) -> Self {
        Self {
            api,
            waiting: VecDeque::new(),
            bytes: 0,
            unsent: false,
        }
    }

    pub(super) fn event(&mut self, kind: &str, fields: Value) {
        let event = json!({"type": kind, "event_id": self.api.fresh_id("event_")});
        let event = merged(event, fields).to_string();
        self.push(Message::Text(Utf8Bytes::from(event)));
    }

    /// Adds a fault, with the id of the client event that caused it.
    pub(super) fn error(&mut self, fault: &Fault, of_event: Option<&str>) {
        let mut json = fault.to_json();
        if let Some(error) = json.get_mut("error").and_then(Value::as_object_mut) {
            error.insert("event_id".to_owned(), json!(of_event));
        }
        self.event("error", json);
    }

    pub(super) fn close(&mut self, code: u16, reason: &'static str) {
        self.push(Message::Close(Some(CloseFrame {
            code,
            reason: Utf8Bytes::from_static(reason),
        })));
    }

    /// Adds a ping, which a live client answers.
    pub(super) fn ping(&mut self) {
        self.push(Message::Ping(Vec::new().into()));
    }

    fn push(&mut self, message: Message) {
        self.bytes += length(&message);
        self.waiting.push_back(message);
    }

    /// Bytes in the queue.
    pub(super) fn bytes(&self) -> Bytes {
        Bytes::of_len(self.bytes)
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_sent(&self) -> bool {
        self.waiting.is_empty() && !self.unsent
    }

    /// Sends the queue; cancel-safe.
    ///
    /// # Errors
    /// If the client has disconnected, or has not read for too long.
    pub(super) async fn send(
        &mut self,
        sink: &mut SplitSink<WebSocket, Message>,
    ) -> Result<(), Error> {
        while !self.waiting.is_empty() {
            poll_fn(|cx| sink.poll_ready_unpin(cx)).await?;
            if let Some(message) = self.waiting.pop_front() {
                self.bytes -= length(&message);
                self.unsent = true;
                sink.start_send_unpin(message)?;
            }
        }
        sink.flush().await?;
        self.unsent = false;
        Ok(())
    }

    pub(super) fn base64(bytes: &[u8]) -> String {
        BASE64.encode(bytes)
    }
}

/// Bytes of text; other messages are small.
fn length(message: &Message) -> usize {
    match message {
        Message::Text(text) => text.len(),
        _ => 0,
    }
}
