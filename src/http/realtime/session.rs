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
use serde_json::{Map, Value, json};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

mod hearing;

use self::hearing::{Ahead, Early, Heard, Said};
use super::{
    super::{
        api::Api,
        backend::{
            AnswerForm, AnswerPart, ChatEvent, ChatMessage, ChatRequest, Conversation,
            FinishReason, Prompt, RequestMeta, Retention, Role, Usage,
        },
        body::bounded_tree,
        chat_wire::ToolChoice,
        fault::{Fault, invalid},
        generation::ended_silently,
        memory::RequestMemory,
        numbers::Whole,
        sampling::{SamplingDialect, SamplingFields},
        transcription::Recognised,
    },
    event::{self, ClientEvent},
    input::{Input, Turn},
    items::{self, Items},
    outbox::Outbox,
    output::{End, Output, Place},
    run::{Run, Step, Voice},
    settings::Settings,
};
use cotenant_conversation::refusal::{RETRY_AFTER_DEFAULT, Refusal};
use cotenant_speech::voice_activity::EarlyPause;
use cotenant_telemetry::{Span, SpanKind};
use cotenant_units::Bytes;

/// One session.
pub(super) struct Session {
    api: Api,
    meta: RequestMeta,
    id: String,
    conversation: String,
    settings: Settings,
    /// Memory for the settings and for values that a response derives from them.
    memory: RequestMemory,
    items: Items,
    input: Input,
    /// The item of the turn that is being spoken.
    turn: Option<String>,
    hearing: Option<Heard>,
    /// Utterances to recognise next.
    said: VecDeque<Said>,
    /// Work on a turn that has probably ended, and the pause after which it has.
    early: Option<Early>,
    early_pause: EarlyPause,
    /// The answer that was begun ahead of the turn that was recognised last.
    ahead: Option<Ahead>,
    /// The span of the last turn, which the response to it continues.
    turn_span: Option<Span>,
    active: Option<Active>,
    outbox: Outbox,
    shutdown: CancellationToken,
    times: Times,
}

/// The response that is given.
struct Active {
    output: Output,
    settings: Settings,
    /// Whether it continues the conversation, or its own input only.
    own: bool,
    input: Vec<Value>,
    /// Reservation for its own data.
    _memory: RequestMemory,
    /// `None` until the preceding speech is recognised.
    run: Option<Run>,
    /// What is asked anew if the answer that was begun ahead fails before its first word.
    again: Option<(ChatRequest, Option<Voice>)>,
    span: Span,
    finished: Option<(FinishReason, Usage)>,
}

struct Times {
    /// Time of the last client data, and of a ping sent since then.
    seen: Instant,
    pinged: bool,
    /// When something happened that is no sign of life alone.
    used: Instant,
}

/// Events that a session waits for.
enum Happening {
    Sent(Result<(), Error>),
    Came(Option<Result<Message, Error>>),
    Step(Option<Step>),
    Recognised(Option<Recognised>),
    /// The text of a turn that has probably ended; `None` after a failure.
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
            // sends the answer to the client's own end, too
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
        let early = self.early.as_mut().filter(|early| !early.is_heard);
        tokio::select! {
            sent = self.outbox.send(sink), if !self.outbox.is_sent() => Happening::Sent(sent),
            // a client that does not read is not listened to either
            message = stream.next(), if waiting < WAITING_MAX * 2 && unsent < UNSENT_MAX => Happening::Came(message),
            step = of_any(run, Run::next), if waiting < WAITING_MAX => Happening::Step(step),
            text = of_any(hearing, |heard| heard.hearing.next()) => Happening::Recognised(text),
            text = of_any(early, Early::heard) => Happening::Early(text),
            () = self.shutdown.cancelled(), if !closing => Happening::Shutdown,
            () = sleep_until(deadline) => Happening::Time,
        }
    }

    /// When a silent client is pinged, or disconnected.
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
            let message = format!(
                "the session ends: it had no event for {} s",
                limit.as_secs()
            );
            let fault = Fault::request(StatusCode::REQUEST_TIMEOUT, "session_expired", message);
            self.outbox.error(&fault, None);
            return Next::Close(CLOSE_NORMAL, "no event for too long");
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

    /// Reserves memory for client input and for values that a response derives from it.
    fn set_aside(&self, memory: &RequestMemory, sent: &Value) -> Result<(), Fault> {
        let tree = bounded_tree(
            sent.to_string().as_bytes(),
            self.api.limits().session_tree_max,
        )?;
        memory.hold(
            self.api.settings_memory(),
            "keep the settings",
            tree.saturating_mul(TREES_MAX),
        )
    }

    /// Refuses to change an item that a response still adds to.
    fn not_given(&self, item: &str) -> Result<(), Fault> {
        match &self.active {
            Some(active) if active.output.gives(item) => Err(Fault::bad_request(
                "item_in_progress",
                format!("`{item}` is still being given (hint: send `response.cancel` first)"),
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

    /// Announces an item that is complete; the oldest makes room for it.
    fn announced(&mut self, id: &str, item: &Value) {
        let followed = self.items.followed(id, item);
        for kind in ["conversation.item.added", "conversation.item.done"] {
            self.outbox.event(kind, followed.clone());
        }
        self.evict();
    }

    fn evict(&mut self) {
        while let Some(item) = self.items.evict(self.api.limits().session_items_max) {
            self.outbox
                .event("conversation.item.deleted", json!({"item_id": item}));
        }
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
                    // a user who continues to speak has not asked yet
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

    /// Whether the end of a turn requests a response.
    fn responds(&self) -> bool {
        let turns = self.settings.turns.as_ref();
        turns.is_some_and(|turns| turns.respond) && !self.settings.transcription_only
    }

    /// Request metadata for a part of the session.
    fn part_meta(&self, span: &Span) -> RequestMeta {
        RequestMeta {
            id: self.meta.id.clone(),
            trace: span.context(),
            ..RequestMeta::default()
        }
    }

    /// The span of a turn: a new trace, unless the client has begun one for the session.
    fn turn_begins(&self) -> Span {
        let parent = self.meta.trace.filter(|trace| trace.from_caller);
        let span = self
            .api
            .backends()
            .tracer
            .begin("realtime/turn", SpanKind::Server, parent);
        span.set("cotenant.request.id", self.meta.id.as_str());
        span.set("gen_ai.conversation.id", self.conversation.as_str());
        span
    }

    /// Announces a response, which begins when all utterances are recognised.
    fn announce(&mut self, response: Map<String, Value>, closing: bool) -> Result<(), Fault> {
        if self.settings.transcription_only {
            let message = "a session of the type `transcription` gives no responses";
            return Err(Fault::bad_request("invalid_session_type", message));
        }
        if closing {
            return Err(draining().into());
        }
        if let Some(active) = &self.active {
            return Err(Fault::bad_request(
                "conversation_already_has_active_response",
                format!(
                    "the conversation has an active response already: {}",
                    active.output.id
                ),
            ));
        }
        let memory = self.memory.other();
        let sent = Value::Object(response);
        self.set_aside(&memory, &sent)?;
        let Value::Object(mut response) = sent else {
            return Ok(());
        };
        let kept = match response.remove("conversation") {
            None | Some(Value::Null) => true,
            Some(Value::String(word)) if word == "auto" => true,
            Some(Value::String(word)) if word == "none" => false,
            Some(other) => {
                return invalid(
                    "response.conversation",
                    other,
                    "is not one of `auto`, `none`",
                );
            }
        };
        let input = match response.remove("input") {
            None | Some(Value::Null) => None,
            Some(Value::Array(items)) => Some(items),
            Some(other) => return invalid("response.input", other, "is not a list of items"),
        };
        let metadata = response.get("metadata").cloned();
        let settings = self.settings.of_response(response)?;
        let own = input.is_none();
        let input = input.unwrap_or_default();
        self.items.messages(own, &input)?;
        let conversation = kept.then_some(self.conversation.as_str());
        let id = self.api.fresh_id("resp_");
        let output = Output::begin(
            id,
            &settings,
            metadata.as_ref(),
            conversation,
            &mut self.outbox,
        );
        self.active = Some(Active {
            output,
            settings,
            own,
            input,
            _memory: memory,
            run: None,
            again: None,
            span: Span::default(),
            finished: None,
        });
        Ok(())
    }

    /// Starts the pending response, once all speech before it is recognised.
    fn start(&mut self) {
        if self.hearing.is_some() || !self.said.is_empty() {
            return;
        }
        if self
            .active
            .as_ref()
            .is_none_or(|active| active.run.is_some())
        {
            return;
        }
        let span = self.turn_span.take().unwrap_or_else(|| self.turn_begins());
        span.resume();
        if let Some(active) = &mut self.active {
            active.span = span;
        }
        let Some(active) = &self.active else {
            return;
        };
        let meta = self.part_meta(&active.span);
        let items = (active.own, active.input.as_slice());
        match self.asked(meta, &active.settings, items, None) {
            Ok((request, voice)) => {
                let ahead = self
                    .ahead
                    .take()
                    .filter(|ahead| ahead.answers(&request, voice.as_ref()));
                let (run, again) = match ahead {
                    Some(ahead) => (ahead.run, Some((request, voice))),
                    None => (Run::begin(&self.api, request, voice), None),
                };
                if let Some(active) = &mut self.active {
                    (active.run, active.again) = (Some(run), again);
                }
            }
            Err(end) => self.end(end),
        }
    }

    /// The request for a response to the conversation, or to `items` only, with words that are not an item yet.
    fn asked(
        &self,
        meta: RequestMeta,
        settings: &Settings,
        (own, items): (bool, &[Value]),
        said: Option<&str>,
    ) -> Result<(ChatRequest, Option<Voice>), End> {
        let mut messages = self.items.messages(own, items)?;
        messages.extend(said.map(|said| ChatMessage::new(Role::User, said)));
        if !settings.instructions.is_empty() {
            messages.insert(
                0,
                ChatMessage::new(Role::System, settings.instructions.as_str()),
            );
        }
        if messages.is_empty() {
            let fault = Fault::bad_request("conversation_empty", NO_WORDS);
            return Err(End::Unanswerable(fault));
        }
        let (mut tools, choice) = settings.tools_and_choice("response")?;
        let form = match choice {
            ToolChoice::Required(name) => Some(AnswerForm::ToolCall { name }),
            ToolChoice::Auto => None,
            ToolChoice::None => {
                tools.clear();
                None
            }
        };
        let request = ChatRequest {
            meta,
            model: settings.model.clone(),
            prompt: Prompt::Chat(Conversation {
                messages,
                tools,
                ..Conversation::default()
            }),
            max_tokens: settings.max_tokens,
            sampling: SamplingDialect::REALTIME.read(&SamplingFields::default())?,
            retention: settings.retention.map(Retention::Messages),
            form,
            streamed: true,
            ..ChatRequest::default()
        };
        let voice = Voice {
            name: settings.voice(&self.api)?,
            speed: settings.speed,
        };
        Ok((request, settings.spoken.then_some(voice)))
    }

    fn step(&mut self, step: Option<Step>) {
        let Some(active) = &mut self.active else {
            return;
        };
        let place = &mut Place {
            outbox: &mut self.outbox,
            items: &mut self.items,
        };
        if matches!(step, Some(Step::Failed(_)))
            && let Some((request, voice)) = active.again.take()
        {
            active.run = Some(Run::begin(&self.api, request, voice));
            return;
        }
        if !matches!(step, Some(Step::Chat(ChatEvent::Started { .. }))) {
            active.again = None;
        }
        match step {
            Some(Step::Chat(ChatEvent::Part(part))) => match part {
                AnswerPart::Text(text) => active.output.text(&text, place),
                AnswerPart::ToolCall { name, arguments } => {
                    active.output.call(&name, &arguments, place);
                }
                // the protocol has no event for reasoning
                AnswerPart::Reasoning(_) => {}
            },
            Some(Step::Chat(ChatEvent::Finished { reason, usage })) => {
                active.finished = Some((reason, usage));
            }
            Some(Step::Chat(
                ChatEvent::Started { .. } | ChatEvent::Context(_) | ChatEvent::Failed(_),
            )) => {}
            Some(Step::Sentence(sentence)) => active.output.sentence(sentence, place),
            Some(Step::Audio(samples)) => active.output.audio(&samples, place),
            // Said once: from now on no speed is in force.
            Some(Step::OneSpeed) => {
                let speed = std::mem::replace(&mut self.settings.speed, 1.0);
                if (speed - 1.0).abs() > f64::EPSILON {
                    let fault =
                        Fault::invalid(SPEED, speed, "is not honoured: this voice has one speed");
                    self.outbox.error(&fault, None);
                }
            }
            Some(Step::Failed(fault)) => {
                tracing::warn!(reason = fault.message(), "a realtime response failed");
                self.end(End::Failed(fault));
            }
            None => {
                let end = match active.finished {
                    Some((reason, usage)) => End::Finished(reason, usage),
                    None => End::Failed(ended_silently().into()),
                };
                self.end(end);
            }
        }
    }

    /// Ends the current response, if any, and cancels its work.
    fn end(&mut self, end: End) {
        if let Some(active) = self.active.take() {
            drop(active.run);
            match &end {
                End::Failed(fault) => active.span.fail("failed", fault.message()),
                End::Cancelled(_) => active.span.event("interrupted"),
                End::Unanswerable(_) => active.span.event("no words"),
                End::Finished(..) => {}
            }
            self.times.used = Instant::now();
            active.output.end(
                end,
                &mut Place {
                    outbox: &mut self.outbox,
                    items: &mut self.items,
                },
            );
            self.evict();
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

pub(super) fn draining() -> Refusal {
    Refusal::Draining {
        act: "give a response".to_owned(),
        retry_after: RETRY_AFTER_DEFAULT,
    }
}

const NO_WORDS: &str = "cannot give a response: no item of the conversation has words, and there are no instructions \
    (hint: commit audio with speech, or send text by `conversation.item.create`)";
/// The field that not every voice honours.
const SPEED: &str = "session.audio.output.speed";
/// Events that wait before a response does. Our choice: some 2 s of sound.
const WAITING_MAX: usize = 8;
/// Unsent bytes above which no client input is read: events repeat it.
const UNSENT_MAX: Bytes = Bytes::from_kib(256);
/// JSON trees of settings that exist at once: the session's, those of its response, and those of the request to the
/// LLM.
const TREES_MAX: u64 = 3;
/// Silence of a client after which it is pinged, and after which it is disconnected. Our choice.
const PING_AFTER: Duration = Duration::from_secs(20);
const GONE_AFTER: Duration = Duration::from_secs(60);
/// How long a client may take to read the end. Our choice.
const FAREWELL: Duration = Duration::from_secs(2);
const CLOSE_NORMAL: u16 = 1000;
const CLOSE_AWAY: u16 = 1001;
const CLOSE_TOO_LARGE: u16 = 1009;
