//! Writer of OpenAI's chat completion answers.

use serde_json::{Map, Value, json};

use super::backend::{FinishReason, ToolCall, Usage};
use crate::{policy::kv_type::KvType, units::Tokens};

/// What the model said, all of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    pub(super) reasoning: String,
    pub(super) text: String,
    pub(super) tool_calls: Vec<ToolCall>,
}

/// Writes the answers to one request: one id and one time for all its chunks.
#[derive(Clone, Debug)]
pub(super) struct ChatWriter {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) include_usage: bool,
}

impl ChatWriter {
    /// The answer in one piece.
    pub(super) fn whole(&self, said: &Said, reason: FinishReason, usage: Usage) -> Value {
        let mut message = Map::new();
        message.insert("role".to_owned(), json!("assistant"));
        // as OpenAI has it: an answer that only calls tools says nothing
        let silent = said.text.is_empty() && !said.tool_calls.is_empty();
        message.insert(
            "content".to_owned(),
            if silent { Value::Null } else { json!(said.text) },
        );
        if !said.reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), json!(said.reasoning));
        }
        if !said.tool_calls.is_empty() {
            let calls: Vec<Value> = said.tool_calls.iter().map(call_json).collect();
            message.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        json!({
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [{
                "index": 0,
                "message": message,
                "logprobs": null,
                "finish_reason": reason_text(reason),
            }],
            "usage": usage_json(usage),
        })
    }

    /// The first chunk: who speaks.
    pub(super) fn role(&self) -> String {
        self.choice(&json!({"role": "assistant", "content": ""}), None)
    }

    /// A piece of text.
    pub(super) fn delta(&self, text: &str) -> String {
        self.choice(&json!({"content": text}), None)
    }

    /// A piece of what the model thinks.
    pub(super) fn reasoning(&self, text: &str) -> String {
        self.choice(&json!({"reasoning_content": text}), None)
    }

    /// The call of a tool: who is called, and then with what.
    pub(super) fn tool_call(&self, index: usize, call: &ToolCall) -> [String; 2] {
        let begun = json!({
            "index": index,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": ""},
        });
        let arguments = json!({"index": index, "function": {"arguments": call.arguments}});
        [begun, arguments].map(|call| self.choice(&json!({"tool_calls": [call]}), None))
    }

    /// The end of the text.
    pub(super) fn finish(&self, reason: FinishReason) -> String {
        self.choice(&json!({}), Some(reason))
    }

    /// The last chunk: no choices, only the usage.
    pub(super) fn usage(&self, usage: Usage) -> String {
        self.chunk(json!([]), Some(usage_json(usage)))
    }

    fn choice(&self, delta: &Value, reason: Option<FinishReason>) -> String {
        let choice = json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason.map(reason_text)}]);
        self.chunk(choice, self.include_usage.then_some(Value::Null))
    }

    fn chunk(&self, choices: Value, usage: Option<Value>) -> String {
        let mut chunk = Map::new();
        chunk.insert("id".to_owned(), json!(self.id));
        chunk.insert("object".to_owned(), json!("chat.completion.chunk"));
        chunk.insert("created".to_owned(), json!(self.created));
        chunk.insert("model".to_owned(), json!(self.model));
        chunk.insert("choices".to_owned(), choices);
        if let Some(usage) = usage {
            chunk.insert("usage".to_owned(), usage);
        }
        Value::Object(chunk).to_string()
    }
}

const fn reason_text(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        FinishReason::Stop => "stop",
        FinishReason::ToolCalls => "tool_calls",
    }
}

fn usage_json(usage: Usage) -> Value {
    let (prompt, completion) = (usage.prompt_tokens.get(), usage.completion_tokens.get());
    let mut json = json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": u64::from(prompt) + u64::from(completion),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens.get()},
    });
    if let Some(json) = json.as_object_mut() {
        json.extend(shed_from(usage));
    }
    json
}

/// What is ours in the usage, and there only where the answer is not what it would be with all the memory that it could
/// have.
pub(super) fn shed_from(usage: Usage) -> Map<String, Value> {
    let mut shed = Map::new();
    if usage.kv_type != KvType::F16 {
        shed.insert("kv_type".to_owned(), json!(usage.kv_type.word()));
    }
    if usage.dropped_tokens > Tokens::ZERO {
        shed.insert("kv_dropped_tokens".to_owned(), json!(usage.dropped_tokens.get()));
    }
    shed
}

fn call_json(call: &ToolCall) -> Value {
    json!({
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    })
}
