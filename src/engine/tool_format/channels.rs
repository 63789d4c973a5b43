//! Messages in channels as gpt-oss reads and writes them (Harmony).

use serde_json::Value;

use super::parts::literal;

/// The expression of a call of the function `name`; its rules have the number `index`.
pub(super) fn call(rules: &mut String, index: usize, name: &str, parameters: &Value) -> String {
    rules.push_str(&format!("args_{index}: %json {parameters}\n"));
    let open = format!("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>");
    format!("{} args_{index}", literal(&open))
}

/// The grammar of JSON for the user.
pub(crate) fn final_grammar(schema: &Value) -> String {
    let open = "\"<|channel|>final\" \" <|constrain|>json\"? \"<|message|>\"";
    after_thoughts(
        "said",
        &format!("said: {open} json\njson: %json {schema}\n"),
    )
}

/// A grammar of which `start` is the last message of an answer, after thoughts if the model has any.
pub(super) fn after_thoughts(start: &str, rules: &str) -> String {
    format!(
        "start: thoughts? last\nlast: {start}\n\
         thoughts: \"<|channel|>analysis<|message|>\" thought \"<|start|>assistant\"\n\
         thought[suffix=\"<|end|>\"]: /(?s:.*)/ & ~/(?s:.*)<\\|(end|start|channel)\\|>(?s:.*)/\n{rules}"
    )
}

/// Messages as the template reads them: thoughts have another name, and a message has one call, which its result
/// follows.
pub(crate) fn in_messages(messages: Vec<Value>) -> Vec<Value> {
    let mut all: Vec<Value> = Vec::with_capacity(messages.len());
    let mut rest = messages.into_iter().peekable();
    while let Some(mut message) = rest.next() {
        let Some(fields) = message.as_object_mut() else {
            all.push(message);
            continue;
        };
        let calls = match fields.remove("tool_calls") {
            Some(Value::Array(calls)) => calls,
            _ => Vec::new(),
        };
        if let Some(thoughts) = fields.remove("reasoning_content") {
            fields.insert("thinking".to_owned(), thoughts);
            if !calls.is_empty() {
                // The template has a place for one of the two.
                fields.insert("content".to_owned(), Value::from(""));
            }
        }
        if calls.is_empty() {
            all.push(message);
            continue;
        }
        let mut results = Vec::new();
        while let Some(result) = rest.next_if(|next| next.get("role") == Some(&"tool".into())) {
            results.push(result);
        }
        for call in calls {
            let id = call.get("id").cloned();
            let mut one = std::mem::take(fields);
            fields.extend(
                one.get("role")
                    .map(|role| ("role".to_owned(), role.clone())),
            );
            fields.insert("content".to_owned(), Value::from(""));
            one.insert("tool_calls".to_owned(), Value::Array(vec![call]));
            all.push(Value::Object(one));
            let place = results
                .iter()
                .position(|result| result.get("tool_call_id") == id.as_ref());
            all.extend(place.map(|place| results.remove(place)));
        }
        all.append(&mut results);
    }
    all
}

/// Tools, each with a description, which the template demands.
pub(crate) fn described(tools: &mut [Value]) {
    for tool in tools {
        if let Some(function) = tool.get_mut("function").and_then(Value::as_object_mut) {
            let description = function.entry("description").or_insert(Value::Null);
            if description.is_null() {
                *description = Value::from("");
            }
        }
    }
}

/// Whether a header after [`CHANNEL`] is complete and that of the last message.
pub(crate) fn is_last_message(header: &str) -> bool {
    let channel = header.strip_prefix(CHANNEL).unwrap_or(header);
    ["final", "commentary"]
        .iter()
        .any(|name| channel.starts_with(name))
        && channel.contains("<|message|>")
}

/// Tag before the name of a channel.
pub(crate) const CHANNEL: &str = "<|channel|>";
/// Header of a text for the user.
pub(crate) const FINAL: &str = "<|channel|>final<|message|>";
