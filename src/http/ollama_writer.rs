//! Writer of Ollama's answers.

use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use super::{
    answer::Writer,
    api::Api,
    backend::{AnswerPart, FinishReason, Usage},
    chat::shed_from,
    fault::Fault,
    generation::Said,
    stream::{Payload, merged},
};
use cotenant_units::Tokens;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// `message`, as in `/api/chat`.
    Chat,
    /// `response`, as in `/api/generate`.
    Generate,
}

pub(super) struct OllamaWriter {
    model: String,
    shape: Shape,
    api: Api,
    began: Instant,
    /// From the request to the first piece.
    first: Option<Duration>,
    context: Option<Vec<u32>>,
}

impl OllamaWriter {
    pub(super) fn new(model: String, shape: Shape, api: &Api, began: Instant) -> Self {
        Self {
            model,
            shape,
            api: api.clone(),
            began,
            first: None,
            context: None,
        }
    }

    /// A piece of an answer; an empty one keeps the connection alive.
    fn piece(&self, said: &Said) -> Payload {
        Payload::from(&merged(self.line(said), json!({"done": false})))
    }

    /// The last line of an answer; contains the whole answer unless it is streamed.
    fn last(&self, said: &Said, reason: FinishReason, usage: Usage) -> Value {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let reason = match reason {
            FinishReason::Length => "length",
            FinishReason::Stop | FinishReason::StopText(_) | FinishReason::ToolCalls => "stop",
        };
        let total = self.began.elapsed();
        let first = self.first.or(said.first_after).unwrap_or(total);
        let end = json!({
            "done": true,
            "done_reason": reason,
            "total_duration": nanos(total),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens.get(),
            "prompt_eval_duration": nanos(first),
            "eval_count": usage.completion_tokens.get(),
            "eval_duration": nanos(total.saturating_sub(first)),
        });
        let mut line = merged(self.line(said), end);
        if let Some(context) = self.context.as_ref().or(said.context.as_ref()) {
            line = merged(line, json!({"context": context}));
        }
        line = merged(line, shed_from(usage));
        if let Some(context) = self.context_in_force() {
            line = merged(line, json!({"context_length": context.get()}));
        }
        line
    }

    fn context_in_force(&self) -> Option<Tokens> {
        let engine = &self.api.backends().status.snapshot().engine;
        let plan = engine.in_force.as_ref();
        plan.map(|plan| engine.context_of(plan))
    }

    /// The answer to a request that only loads or unloads the model, which stays loaded in either case.
    pub(super) fn nothing_asked(&self, unload: bool) -> Value {
        let reason = if unload { "unload" } else { "load" };
        let end = json!({"done": true, "done_reason": reason});
        merged(self.line(&Said::default()), end)
    }

    fn line(&self, said: &Said) -> Value {
        let mut line = json!({"model": self.model, "created_at": rfc3339(SystemTime::now())});
        let thinking = match said.reasoning.as_str() {
            "" => Value::Null,
            reasoning => json!({"thinking": reasoning}),
        };
        match self.shape {
            Shape::Generate => {
                line = merged(merged(line, json!({"response": said.text})), thinking);
            }
            Shape::Chat => {
                let message = json!({"role": "assistant", "content": said.text});
                let mut message = merged(message, thinking);
                let calls: Vec<Value> = said.calls.iter().filter_map(call_json).collect();
                if !calls.is_empty() {
                    message = merged(message, json!({"tool_calls": calls}));
                }
                line = merged(line, json!({"message": message}));
            }
        }
        line
    }
}

impl Writer for OllamaWriter {
    fn begin(&mut self, _prompt: Usage) -> Vec<Payload> {
        Vec::new()
    }

    fn part(&mut self, part: AnswerPart) -> Vec<Payload> {
        self.first.get_or_insert_with(|| self.began.elapsed());
        let mut said = Said::default();
        said.push(part);
        vec![self.piece(&said)]
    }

    fn context(&mut self, tokens: Vec<u32>) {
        self.context = Some(tokens);
    }

    fn end(&mut self, reason: FinishReason, usage: Usage) -> Vec<Payload> {
        vec![Payload::from(&self.last(&Said::default(), reason, usage))]
    }

    fn fail(&mut self, fault: &Fault) -> Vec<Payload> {
        vec![Payload::from(&json!({"error": fault.message()}))]
    }

    fn whole(self, said: Said, reason: FinishReason, usage: Usage) -> Value {
        self.last(&said, reason, usage)
    }

    /// Lines cannot contain comments; an empty piece keeps the connection alive.
    fn silence(&self) -> Option<Payload> {
        Some(self.piece(&Said::default()))
    }
}

/// A tool call in Ollama's form; `None` for one truncated by the length limit, whose arguments are not an object.
fn call_json((name, arguments): &(String, String)) -> Option<Value> {
    let arguments: Value = serde_json::from_str(arguments).ok()?;
    Some(json!({"function": {"name": name, "arguments": arguments}}))
}

/// A time in Ollama's form: `2026-11-21T12:00:00.5Z`.
pub(super) fn rfc3339(time: SystemTime) -> String {
    prost_types::Timestamp::from(time).to_string()
}
