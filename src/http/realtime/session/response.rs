//! The response of a session: announced, started and ended.

use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::state::{Active, Ahead, Session};
use crate::{
    backend::{
        AnswerForm, AnswerPart, ChatEvent, ChatMessage, ChatRequest, Conversation, Prompt,
        RequestMeta, Retention, Role,
    },
    body::bounded_tree,
    chat_wire::ToolChoice,
    fault::{Fault, invalid},
    generation::ended_silently,
    memory::RequestMemory,
    realtime::{
        output::{End, Output, Place},
        run::{Run, Step, Voice},
        settings::Settings,
    },
    sampling::{SamplingDialect, SamplingFields},
};
use cotenant_conversation::refusal::{RETRY_AFTER_DEFAULT, Refusal};
use cotenant_telemetry::{Span, SpanKind};

impl Session {
    /// Reserves memory for client input and the values that a response derives from it.
    pub(super) fn set_aside(&self, memory: &RequestMemory, sent: &Value) -> Result<(), Fault> {
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

    /// Announces a complete item; the oldest items are deleted for it if necessary.
    pub(super) fn announced(&mut self, id: &str, item: &Value) {
        let followed = self.items.followed(id, item);
        for kind in ["conversation.item.added", "conversation.item.done"] {
            self.outbox.event(kind, followed.clone());
        }
        self.evict();
    }

    pub(super) fn evict(&mut self) {
        while let Some(item) = self.items.evict(self.api.limits().session_items_max) {
            self.outbox
                .event("conversation.item.deleted", json!({"item_id": item}));
        }
    }

    /// Whether the end of a turn requests a response.
    pub(super) fn responds(&self) -> bool {
        let turns = self.settings.turns.as_ref();
        turns.is_some_and(|turns| turns.respond) && !self.settings.transcription_only
    }

    /// Request metadata for a stage of the session.
    pub(super) fn part_meta(&self, span: &Span) -> RequestMeta {
        RequestMeta {
            id: self.meta.id.clone(),
            trace: span.context(),
            ..RequestMeta::default()
        }
    }

    /// The span of a turn: a new trace, unless the client has started one for the session.
    pub(super) fn turn_begins(&self) -> Span {
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

    /// Announces a response, which starts once all utterances are recognised.
    pub(super) fn announce(
        &mut self,
        response: Map<String, Value>,
        closing: bool,
    ) -> Result<(), Fault> {
        if self.settings.transcription_only {
            let message = "a session of the type `transcription` generates no responses";
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

    /// Starts the announced response once all earlier speech is recognised.
    pub(super) fn start(&mut self) {
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

    /// The request for a response to the conversation, or only to `items`, with text that is not an item yet.
    pub(super) fn asked(
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

    pub(super) fn step(&mut self, step: Option<Step>) {
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
            // Reported once: afterwards no speed is in force.
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
    pub(super) fn end(&mut self, end: End) {
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

impl Ahead {
    /// Whether this early answer matches the request made now.
    pub(super) fn answers(&self, request: &ChatRequest, voice: Option<&Voice>) -> bool {
        let mut now = ChatRequest {
            meta: self.request.meta.clone(),
            ..request.clone()
        };
        // This API has no field for the seed.
        now.sampling.asked.seed = self.request.sampling.asked.seed;
        now == self.request && voice == self.voice.as_ref()
    }
}

pub(in crate::realtime) fn draining() -> Refusal {
    Refusal::Draining {
        act: "generate a response".to_owned(),
        retry_after: RETRY_AFTER_DEFAULT,
    }
}

const NO_WORDS: &str = "cannot generate a response: the conversation has no text, and there are no instructions \
    (hint: commit audio with speech, or send text by `conversation.item.create`)";
/// A field that some voices ignore.
const SPEED: &str = "session.audio.output.speed";
/// Concurrent JSON trees of settings: the session's, those of its response, and those of the request to the LLM.
const TREES_MAX: u64 = 3;
