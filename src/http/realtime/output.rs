//! Ordered events of one response.

use serde_json::{Map, Value, json};

use super::{
    super::{
        backend::{FinishReason, Usage},
        chat::{call_id, id_of, shed_from},
        fault::Fault,
        stream::merged,
    },
    items::{Items, Spoken},
    outbox::Outbox,
    settings::Settings,
};
use cotenant_speech::audio::pcm_bytes;

/// Destination of the events, and the conversation to extend.
pub(super) struct Place<'a> {
    pub(super) outbox: &'a mut Outbox,
    pub(super) items: &'a mut Items,
}

/// How a response ended.
pub(super) enum End {
    Finished(FinishReason, Usage),
    /// Ended by the client, or by a user who speaks.
    Cancelled(&'static str),
    /// The conversation has no input to respond to.
    Unanswerable(Fault),
    Failed(Fault),
}

impl From<Fault> for End {
    fn from(fault: Fault) -> Self {
        Self::Failed(fault)
    }
}

/// One response in progress.
pub(super) struct Output {
    pub(super) id: String,
    /// The response as known at its start.
    shown: Value,
    spoken: bool,
    /// Whether its items are added to the conversation.
    kept: bool,
    message: Option<Message>,
    done: Vec<Option<Value>>,
    calls: usize,
}

/// The item to which text is being appended.
struct Message {
    id: String,
    index: usize,
    text: String,
    spoken: Spoken,
}

impl Output {
    pub(super) fn begin(
        id: String,
        settings: &Settings,
        metadata: Option<&Value>,
        conversation: Option<&str>,
        outbox: &mut Outbox,
    ) -> Self {
        let shown = json!({
            "object": "realtime.response",
            "id": id,
            "status": "in_progress",
            "status_details": null,
            "output": [],
            "conversation_id": conversation,
            "output_modalities": settings.modalities(),
            "max_output_tokens": settings.max_tokens_shown(),
            "audio": {"output": settings.output_shown()},
            "usage": null,
            "metadata": metadata,
        });
        outbox.event("response.created", json!({"response": shown}));
        Self {
            id,
            shown,
            spoken: settings.spoken,
            kept: conversation.is_some(),
            message: None,
            done: Vec::new(),
            calls: 0,
        }
    }

    /// Whether this item is in progress.
    pub(super) fn gives(&self, item: &str) -> bool {
        self.message
            .as_ref()
            .is_some_and(|message| message.id == item)
    }

    /// Adds text, or transcript of speech.
    pub(super) fn text(&mut self, piece: &str, place: &mut Place<'_>) {
        let mut message = self.opened(place);
        message.text.push_str(piece);
        let kind = if self.spoken {
            "response.output_audio_transcript.delta"
        } else {
            "response.output_text.delta"
        };
        place
            .outbox
            .event(kind, self.of_part(&message, json!({"delta": piece})));
        self.message = Some(message);
    }

    /// Records the beginning of a spoken sentence.
    pub(super) fn sentence(&mut self, sentence: String, place: &mut Place<'_>) {
        let mut message = self.opened(place);
        message.spoken.begin(sentence);
        self.message = Some(message);
    }

    pub(super) fn audio(&mut self, samples: &[i16], place: &mut Place<'_>) {
        let mut message = self.opened(place);
        for samples in samples.chunks(AUDIO_SAMPLES_MAX) {
            message.spoken.sent(samples.len());
            let delta = Outbox::base64(&pcm_bytes(samples));
            place.outbox.event(
                "response.output_audio.delta",
                self.of_part(&message, json!({"delta": delta})),
            );
        }
        self.message = Some(message);
    }

    pub(super) fn call(&mut self, name: &str, arguments: &str, place: &mut Place<'_>) {
        let index = self.done.len();
        self.done.push(None);
        let id = id_of("item_", &self.id, index);
        let call = call_id(&self.id, self.calls);
        self.calls += 1;
        let item = |status: &str, arguments: &str| {
            json!({
                "id": id, "object": "realtime.item", "type": "function_call", "status": status,
                "call_id": call, "name": name, "arguments": arguments,
            })
        };
        self.added(&id, index, &item("in_progress", ""), place);
        let of_call = |more: Value| {
            let call = json!({
                "response_id": self.id, "item_id": id, "output_index": index, "call_id": call,
            });
            merged(call, more)
        };
        place.outbox.event(
            "response.function_call_arguments.delta",
            of_call(json!({"delta": arguments})),
        );
        place.outbox.event(
            "response.function_call_arguments.done",
            of_call(json!({"name": name, "arguments": arguments})),
        );
        // a call truncated by the length limit is not a complete object
        let whole = serde_json::from_str::<Map<String, Value>>(arguments).is_ok();
        let item = item(if whole { "completed" } else { "incomplete" }, arguments);
        self.item_done(&id, index, item, Spoken::default(), place);
    }

    pub(super) fn end(mut self, end: End, place: &mut Place<'_>) {
        let whole = matches!(end, End::Finished(reason, _) if reason != FinishReason::Length);
        self.close(if whole { "completed" } else { "incomplete" }, place);
        let (status, details, usage) = match end {
            End::Finished(FinishReason::Length, usage) => (
                "incomplete",
                json!({"type": "incomplete", "reason": "max_output_tokens"}),
                usage_json(usage),
            ),
            End::Finished(_, usage) => ("completed", Value::Null, usage_json(usage)),
            End::Cancelled(reason) => (
                "cancelled",
                json!({"type": "cancelled", "reason": reason}),
                Value::Null,
            ),
            // without a reason: the protocol only has lengths and filters
            End::Unanswerable(fault) => with_error("incomplete", &fault),
            End::Failed(fault) => with_error("failed", &fault),
        };
        let output: Vec<Value> = self.done.into_iter().flatten().collect();
        let ended = json!({
            "status": status, "status_details": details, "output": output, "usage": usage,
        });
        let response = merged(self.shown, ended);
        place
            .outbox
            .event("response.done", json!({"response": response}));
    }

    /// The item to which text is appended; announced if new.
    fn opened(&mut self, place: &mut Place<'_>) -> Message {
        if let Some(message) = self.message.take() {
            return message;
        }
        let message = Message {
            id: id_of("item_", &self.id, self.done.len()),
            index: self.done.len(),
            text: String::new(),
            spoken: Spoken::default(),
        };
        self.done.push(None);
        let item = self.item(&message, "in_progress", &[]);
        self.added(&message.id, message.index, &item, place);
        let part = self.part(&message, "text", "audio");
        place.outbox.event(
            "response.content_part.added",
            self.of_part(&message, json!({"part": part})),
        );
        message
    }

    fn close(&mut self, status: &str, place: &mut Place<'_>) {
        let Some(message) = self.message.take() else {
            return;
        };
        if self.spoken {
            place.outbox.event(
                "response.output_audio.done",
                self.of_part(&message, json!({})),
            );
            place.outbox.event(
                "response.output_audio_transcript.done",
                self.of_part(&message, json!({"transcript": message.text})),
            );
        } else {
            place.outbox.event(
                "response.output_text.done",
                self.of_part(&message, json!({"text": message.text})),
            );
        }
        let part = self.part(&message, "text", "audio");
        place.outbox.event(
            "response.content_part.done",
            self.of_part(&message, json!({"part": part})),
        );
        let part = self.part(&message, "output_text", "output_audio");
        let item = self.item(&message, status, &[part]);
        self.item_done(&message.id, message.index, item, message.spoken, place);
    }

    fn added(&self, id: &str, index: usize, item: &Value, place: &mut Place<'_>) {
        place.outbox.event(
            "response.output_item.added",
            json!({"response_id": self.id, "output_index": index, "item": item}),
        );
        if self.kept && place.items.insert(None, id, item.clone()).is_ok() {
            let followed = place.items.followed(id, item);
            place.outbox.event("conversation.item.added", followed);
        }
    }

    fn item_done(
        &mut self,
        id: &str,
        index: usize,
        item: Value,
        spoken: Spoken,
        place: &mut Place<'_>,
    ) {
        if self.kept {
            let followed = place.items.followed(id, &item);
            place.outbox.event("conversation.item.done", followed);
            place.items.replace(id, item.clone(), spoken);
        }
        place.outbox.event(
            "response.output_item.done",
            json!({"response_id": self.id, "output_index": index, "item": item}),
        );
        if let Some(done) = self.done.get_mut(index) {
            *done = Some(item);
        }
    }

    fn item(&self, message: &Message, status: &str, content: &[Value]) -> Value {
        json!({
            "id": message.id, "object": "realtime.item", "type": "message", "status": status, "role": "assistant",
            "content": content,
        })
    }

    /// The content part; its type has different names in items and in events.
    fn part(&self, message: &Message, text: &str, audio: &str) -> Value {
        if self.spoken {
            json!({"type": audio, "transcript": message.text})
        } else {
            json!({"type": text, "text": message.text})
        }
    }

    fn of_part(&self, message: &Message, more: Value) -> Value {
        let part = json!({
            "response_id": self.id, "item_id": message.id, "output_index": message.index, "content_index": 0,
        });
        merged(part, more)
    }
}

/// Status, details and usage of a response that failed without output.
fn with_error(status: &'static str, fault: &Fault) -> (&'static str, Value, Value) {
    let error = fault.to_json().get("error").cloned();
    let details = json!({"type": status, "error": error});
    (status, details, Value::Null)
}

fn usage_json(usage: Usage) -> Value {
    let (input, output) = (usage.prompt_tokens.get(), usage.completion_tokens.get());
    let cached = usage.cached_tokens.get();
    let json = json!({
        "total_tokens": u64::from(input) + u64::from(output),
        "input_tokens": input,
        "output_tokens": output,
        "input_token_details": {
            "text_tokens": input, "audio_tokens": 0, "image_tokens": 0, "cached_tokens": cached,
            "cached_tokens_details": {"text_tokens": cached, "audio_tokens": 0, "image_tokens": 0},
        },
        "output_token_details": {"text_tokens": output, "audio_tokens": 0},
    });
    merged(json, shed_from(usage))
}

/// Half a second per event. Our choice: some 32 KiB of base64.
const AUDIO_SAMPLES_MAX: usize = 12_000;
