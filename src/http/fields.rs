//! Unsupported request fields: refused if they would change the answer, otherwise named.

use serde_json::{Map, Value, json};

use super::{
    fault::{Fault, invalid},
    numbers::Whole,
};

/// Names of the unsupported fields of `place` that are set, in characters that a header permits.
pub(super) fn not_honoured(place: &str, fields: &Map<String, Value>) -> Vec<String> {
    let nameable = |name: &str| {
        name.len() <= NAME_MAX
            && name
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte))
    };
    let set = fields
        .iter()
        .filter(|(name, value)| nameable(name) && is_set(Some(value)) && !is_harmless(name, value));
    set.map(|(name, _)| format!("{place}{name}"))
        .take(IGNORED_MAX)
        .collect()
}

/// Refuses fields that no API may ignore, because they change the answer.
///
/// # Errors
/// 400 naming the field, its value and the remedy.
pub(super) fn refuse_unsupported(fields: &Map<String, Value>) -> Result<(), Fault> {
    let refused = fields.iter().find_map(|(field, value)| {
        let problem = match field.as_str() {
            _ if *value == Value::Bool(false) || !is_set(Some(value)) => return None,
            "n" | "best_of" if Whole::of(value).is_none_or(|number| number.get() != 1) => ONE_ANSWER,
            "logprobs" | "prompt_logprobs" => NO_PROBABILITIES,
            "top_logprobs" | "n_probs" if *value != json!(0) => NO_PROBABILITIES,
            "suffix" => {
                "is not supported: text is only added at the end (hint: write the gap with the model's own tokens, as `raw` prompt \
                 of /api/generate)"
            }
            "grammar" | "guided_choice" | "guided_grammar" | "guided_json" | "guided_regex"
            | "json_schema" | "structured_outputs" => {
                "is not supported: use a JSON schema in `response_format` of chat completions"
            }
            _ => return None,
        };
        Some((field, value, problem))
    });
    match refused {
        None => Ok(()),
        Some((field, Value::String(text), problem)) => invalid(field, text, problem),
        Some((field, value, problem)) => invalid(field, value, problem),
    }
}

/// Refuses more than one answer to a prompt.
///
/// # Errors
/// 400 naming the field, its value, the limit and the remedy.
pub(super) fn one_answer(field: &str, number: Option<Whole>) -> Result<(), Fault> {
    match number.filter(|number| number.get() != 1) {
        None => Ok(()),
        Some(number) => invalid(field, number, ONE_ANSWER),
    }
}

/// Whether a field is set to an effective value.
pub(super) fn is_set(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null) => false,
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::Object(map)) => !map.is_empty(),
        Some(_) => true,
    }
}

/// The names of those that are set, and of unknown fields that are ignored.
pub(super) fn ignored<const N: usize>(
    known: [(&str, bool); N],
    unknown: &Map<String, Value>,
) -> Vec<String> {
    let set = known.into_iter().filter(|(_, set)| *set);
    set.map(|(name, _)| name.to_owned())
        .chain(not_honoured("", unknown))
        .collect()
}

/// Whether the field does not change the answer.
fn is_harmless(name: &str, value: &Value) -> bool {
    match name {
        "cache_control"
        | "metadata"
        | "prompt_cache_key"
        | "prompt_cache_retention"
        | "safety_identifier"
        | "service_tier"
        | "stream_options"
        | "user" => true,
        "best_of" | "n" => true,
        "modalities" => *value == json!(["text"]),
        "parallel_tool_calls" => *value == json!(true),
        _ => matches!(value, Value::Bool(false)),
    }
}

const ONE_ANSWER: &str =
    "is not 1, the limit of answers to a prompt: send a request for each answer";

pub(super) const NO_PROBABILITIES: &str =
    "is not supported: token probabilities are not returned (hint: omit it)";

/// Our choice: Ollama has about 30 options, and proxies refuse headers above 8 KiB.
pub(super) const IGNORED_MAX: usize = 32;

/// Our choice: the longest name in Ollama's API has 17 characters.
const NAME_MAX: usize = 40;
