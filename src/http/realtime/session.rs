//! Event loop of one session.

use std::{collections::VecDeque, future::pending, time::Duration};

use axum::{
    Error,
    extract::ws::{Message, WebSocket},
    http::StatusCode,
};
use futures_util::{
    StreamExt as _,
    stream::{SplitSink, SplitStream},
};
use serde_json::json;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

mod hearing;
mod response;
mod state;

use self::state::{Early, Times};
pub(super) use self::{response::draining, state::Session};
use super::{
    super::{
        api::Api, backend::RequestMeta, fault::Fault, memory::RequestMemory, numbers::Whole,
        transcription::Recognised,
    },
    event::{self, ClientEvent},
    input::{Input, Turn},
    items::{self, Items},
    outbox::Outbox,
    output::End,
    run::{Run, Step},
    settings::Settings,
};
use cotenant_speech::voice_activity::EarlyPause;
use cotenant_units::Bytes;

/// Events of a session.
enum Happening {
    Sent(Result<(), Error>),
    Came(Option<Result<Message, Error>>),
    Step(Option<Step>),
    Recognised(Option<Recognised>),
    /// The text of a turn that has probably ended; `None` if the early work is cancelled.
    Early(Option<String>),
    Shutdown,
    Time,
}

/// Whether the session continues.
enum Next {
    GoOn,
    Close(u16, &'static str),
    /// The client has closed the session.
    Left,
    Gone,
}

impl Session {
    pub(super) fn new(
        api: Api,
        meta: RequestMeta,
        memory: RequestMemory,
        settings: Settings,
        shutdown: CancellationToken,
    ) -> Self {
        let now = Instant::now();
        let mut input = Input::new(api.clone());
        let early_pause = EarlyPause::default();
        input.detect(settings.turns.as_ref(), early_pause);
        Self {
            id: api.fresh_id("sess_"),
            conversation: api.fresh_id("conv_"),
            memory,
            items: Items::default(),
            input,
            turn: None,
            hearing: None,
            said: VecDeque::new(),
            early: None,
            early_pause,
            ahead: None,
            turn_span: None,
            active: None,
            outbox: Outbox::new(api.clone()),
            shutdown,
            times: Times {
                seen: now,
                pinged: false,
                used: now,
            },
            settings,
            meta,
            api,
        }
    }

    pub(super) async fn run(mut self, socket: WebSocket) {
        tracing::info!(
            session = self.id,
            request = self.meta.id,
            "a realtime session began"
        );
        let (mut sink, mut stream) = socket.split();
        self.outbox.event(
            "session.created",
            json!({"session": self.settings.shown(&self.id)}),
        );
        let mut closing = false;
        let end = loop {
            if closing && self.active.is_none() && self.hearing.is_none() && self.said.is_empty() {
                break Some((CLOSE_AWAY, "the server is shutting down"));
            }
            let next = match self.next(&mut sink, &mut stream, closing).await {
                Happening::Sent(Ok(())) => Next::GoOn,
                Happening::Sent(Err(error)) => {
                    tracing::debug!(%error, "a realtime session cannot be written to");
                    Next::Gone
                }
                Happening::Came(message) => self.came(message, closing),
                Happening::Step(step) => {
                    self.step(step);
                    Next::GoOn
                }
                Happening::Recognised(text) => {
                    self.recognised(text, closing);
                    Next::GoOn
                }
                Happening::Early(text) => {
                    self.heard_early(text.as_deref());
                    Next::GoOn
                }
                Happening::Shutdown => {
                    closing = true;
                    Next::GoOn
                }
                Happening::Time => self.time(),
            };
            match next {
                Next::GoOn => {}
                Next::Close(code, reason) => break Some((code, reason)),
                Next::Left => break None,
                Next::Gone => {
                    tracing::info!(session = self.id, "a realtime session's client has gone");
                    return;
                }
            }
        };
        tracing::info!(session = self.id, ?end, "a realtime session ends");
        let Self {
            mut outbox,
            active,
            hearing,
            ..
        } = self;
        drop((active, hearing));
        let farewell = async {
            if let Some((code, reason)) = end {
                outbox.close(code, reason);
                let _gone = outbox.send(&mut sink).await;
            }
            // completes the closing handshake of the client, too
            while let Some(Ok(_unread)) = stream.next().await {}
        };
        let _gone = timeout(FAREWELL, farewell).await;
    }

    async fn next(
        &mut self,
        sink: &mut SplitSink<WebSocket, Message>,
        stream: &mut SplitStream<WebSocket>,
        closing: bool,
    ) -> Happening {
        let (waiting, unsent) = (self.outbox.len(), self.outbox.bytes());
        let deadline = self.deadline();
        let run = self.active.as_mut().and_then(|active| active.run.as_mut());
        let hearing = self.hearing.as_mut();
        let early = self.early.as_mut();
        tokio::select! {
            sent = self.outbox.send(sink), if !self.outbox.is_sent() => Happening::Sent(sent),
            // a client that does not read is not read from either
            message = stream.next(), if waiting < WAITING_MAX * 2 && unsent < UNSENT_MAX => Happening::Came(message),
            step = of_any(run, Run::next), if waiting < WAITING_MAX => Happening::Step(step),
            text = of_any(hearing, |heard| heard.hearing.next()) => Happening::Recognised(text),
            text = of_any(early, Early::heard) => Happening::Early(text),
            () = self.shutdown.cancelled(), if !closing => Happening::Shutdown,
            () = sleep_until(deadline) => Happening::Time,
        }
    }

    /// When a silent client is pinged or disconnected.
    fn deadline(&self) -> Instant {
        let seen = self.times.seen
            + if self.times.pinged {
                GONE_AFTER
            } else {
                PING_AFTER
            };
        seen.min(self.times.used + self.api.limits().session_idle_timeout)
    }

    fn time(&mut self) -> Next {
        let limit = self.api.limits().session_idle_timeout;
        let now = Instant::now();
        if self.active.is_some() {
            self.times.used = now;
        }
        if now >= self.times.used + limit {
            let message = format!("the session expired: no event for {} s", limit.as_secs());
            let fault = Fault::request(StatusCode::REQUEST_TIMEOUT, "session_expired", message);
            self.outbox.error(&fault, None);
            return Next::Close(CLOSE_NORMAL, "session expired");
        }
        if now >= self.times.seen + GONE_AFTER {
            return Next::Gone;
        }
        if now >= self.times.seen + PING_AFTER && !self.times.pinged {
            self.times.pinged = true;
            self.outbox.ping();
        }
        Next::GoOn
    }

    fn came(&mut self, message: Option<Result<Message, Error>>, closing: bool) -> Next {
        self.times.seen = Instant::now();
        self.times.pinged = false;
        match message {
            None => Next::Gone,
            Some(Ok(Message::Close(_))) => Next::Left,
            Some(Err(error)) => {
                tracing::debug!(%error, "a realtime session cannot be read");
                let limit = self.api.limits().session_message_max;
                let message = format!("cannot read the message: {error} (the limit is {limit})");
                let fault =
                    Fault::request(StatusCode::PAYLOAD_TOO_LARGE, "invalid_message", message);
                self.outbox.error(&fault, None);
                Next::Close(CLOSE_TOO_LARGE, "the message cannot be read")
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => Next::GoOn,
            Some(Ok(Message::Binary(_))) => {
                let message = "cannot take a binary message: events are JSON, in text messages";
                let fault = Fault::bad_request("invalid_message", message);
                self.outbox.error(&fault, None);
                Next::GoOn
            }
            Some(Ok(Message::Text(text))) => {
                self.times.used = self.times.seen;
                let (id, event) = event::read(&text, self.api.limits().session_tree_max);
                drop(text);
                if let Err(fault) = event.and_then(|event| self.event(event, closing)) {
                    self.outbox.error(&fault, id.as_deref());
                }
                Next::GoOn
            }
        }
    }

    fn event(&mut self, event: ClientEvent, closing: bool) -> Result<(), Fault> {
        match event {
            ClientEvent::Append(append) => {
                let mut turns = Vec::new();
                let appended = self.input.append(&append.audio, &mut turns);
                for turn in turns {
                    self.turned(turn, closing);
                }
                appended
            }
            ClientEvent::Cancel(cancel) => {
                let active = self.active.as_ref().map(|active| active.output.id.as_str());
                match (active, cancel.response_id.as_deref()) {
                    (Some(active), wanted) if wanted.is_none_or(|wanted| wanted == active) => {
                        self.end(End::Cancelled("client_cancelled"));
                        Ok(())
                    }
                    _ => Err(Fault::bad_request(
                        "response_cancel_not_active",
                        "Cancellation failed: no active response found",
                    )),
                }
            }
            ClientEvent::Clear => {
                self.input.clear();
                (self.turn, self.early) = (None, None);
                self.outbox.event("input_audio_buffer.cleared", json!({}));
                Ok(())
            }
            ClientEvent::Commit => {
                let utterance = self.input.commit()?;
                self.early = None;
                self.committed(utterance, None, false);
                Ok(())
            }
            ClientEvent::Create(create) => self.create(create),
            ClientEvent::Delete(item) => {
                self.not_given(&item.item_id)?;
                self.items.delete(&item.item_id)?;
                self.outbox.event(
                    "conversation.item.deleted",
                    json!({"item_id": item.item_id}),
                );
                Ok(())
            }
            ClientEvent::Respond(response) => {
                self.announce(response, closing)?;
                self.start();
                Ok(())
            }
            ClientEvent::Retrieve(item) => {
                let found =
                    self.items
                        .get("item_id", &item.item_id, "item_retrieve_invalid_item_id")?;
                self.outbox
                    .event("conversation.item.retrieved", json!({"item": found}));
                Ok(())
            }
            ClientEvent::Truncate(cut) => {
                self.not_given(&cut.item_id)?;
                let end: u64 = cut.audio_end_ms.to().ok_or_else(|| {
                    Fault::invalid("audio_end_ms", cut.audio_end_ms, "is below the limit of 0")
                })?;
                self.items.truncate(&cut.item_id, end)?;
                let index = cut.content_index.map_or(0, Whole::get);
                self.outbox.event(
                    "conversation.item.truncated",
                    json!({"item_id": cut.item_id, "content_index": index, "audio_end_ms": end}),
                );
                Ok(())
            }
            ClientEvent::Update(session) => {
                let updated = self.settings.updated(session, &self.api)?;
                let shown = updated.shown(&self.id);
                self.set_aside(&self.memory, &shown)?;
                let before = std::mem::replace(&mut self.settings, updated);
                if before.turns != self.settings.turns {
                    self.early = None;
                    self.input
                        .detect(self.settings.turns.as_ref(), self.early_pause);
                }
                self.outbox
                    .event("session.updated", json!({"session": shown}));
                Ok(())
            }
        }
    }

    /// Refuses to change an item of the response in progress.
    fn not_given(&self, item: &str) -> Result<(), Fault> {
        match &self.active {
            Some(active) if active.output.gives(item) => Err(Fault::bad_request(
                "item_in_progress",
                format!("`{item}` is still being generated (hint: send `response.cancel` first)"),
            )),
            _ => Ok(()),
        }
    }

    fn create(&mut self, create: event::Create) -> Result<(), Fault> {
        let max = self.api.limits().session_items_max;
        let (id, item) = items::created(create.item, || self.api.fresh_id("item_"), max)?;
        self.items
            .insert(create.previous_item_id.as_deref(), &id, item.clone())?;
        self.announced(&id, &item);
        Ok(())
    }

    fn turned(&mut self, turn: Turn, closing: bool) {
        match turn {
            Turn::Paused => self.begin_early(closing),
            Turn::Resumed => {
                if let Some(early) = self.early.take() {
                    early.span.event("the user went on");
                    self.early_pause.went_on();
                    self.input.set_early_pause(self.early_pause);
                }
            }
            Turn::Started { at_ms } => {
                let item = self.api.fresh_id("item_");
                self.outbox.event(
                    "input_audio_buffer.speech_started",
                    json!({"audio_start_ms": at_ms, "item_id": item}),
                );
                self.turn = Some(item);
                (self.early, self.ahead) = (None, None);
                if self
                    .settings
                    .turns
                    .as_ref()
                    .is_some_and(|turns| turns.interrupt)
                {
                    // a user who continues to speak has not finished the request
                    self.said.iter_mut().for_each(|said| said.respond = false);
                    if let Some(heard) = &mut self.hearing {
                        heard.respond = false;
                    }
                    self.end(End::Cancelled("turn_detected"));
                }
            }
            Turn::Stopped { at_ms, said } => {
                let item = self.turn.get_or_insert_with(|| self.api.fresh_id("item_"));
                self.outbox.event(
                    "input_audio_buffer.speech_stopped",
                    json!({"audio_end_ms": at_ms, "item_id": item}),
                );
                let early = self.early.take();
                if early.is_some() {
                    self.early_pause.ended();
                    self.input.set_early_pause(self.early_pause);
                }
                self.committed(said, early, self.responds() && !closing);
            }
        }
    }
}

/// The next event of an optional source; pending forever without one.
async fn of_any<'a, T, F, R>(source: Option<&'a mut T>, next: impl FnOnce(&'a mut T) -> F) -> R
where
    F: Future<Output = R>,
{
    match source {
        Some(source) => next(source).await,
        None => pending().await,
    }
}

/// Events in the queue above which the response pauses. Our choice: some 2 s of audio.
const WAITING_MAX: usize = 8;
/// Unsent bytes above which client input is not read, because events may repeat it.
const UNSENT_MAX: Bytes = Bytes::from_kib(256);
/// Silence of a client until a ping, and until disconnection. Our choice.
const PING_AFTER: Duration = Duration::from_secs(20);
const GONE_AFTER: Duration = Duration::from_secs(60);
/// How long a client may take to read the last events. Our choice.
const FAREWELL: Duration = Duration::from_secs(2);
const CLOSE_NORMAL: u16 = 1000;
const CLOSE_AWAY: u16 = 1001;
const CLOSE_TOO_LARGE: u16 = 1009;
