//! JSON schemas as grammars take them: closed, bounded, and with a layout.

use serde_json::{Value, json};

/// Why an answer of that form cannot be promised.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// A number in the schema asks for more than is built.
    #[error("`{keyword}` is {value}, above the limit of {BOUND_MAX}")]
    Bound {
        /// The keyword.
        keyword: String,
        /// Its value.
        value: String,
    },
    /// The library cannot keep the schema: a keyword that it does not know, or one that contradicts others.
    #[error("{message}")]
    Schema {
        /// What it said.
        message: String,
    },
    /// Neither an object nor `true`.
    #[error("it is {found}, not an object")]
    NoSchema {
        /// What it is instead.
        found: &'static str,
    },
    /// The tool that must be called is not among those given.
    #[error("no tool is named `{name}`")]
    UnknownTool {
        /// The name.
        name: String,
    },
    /// A call is demanded, and there is nothing to call.
    #[error("there are no tools to call")]
    NoTools,
    /// Its grammar takes more memory or time than one may take.
    #[error("its grammar takes more memory or time to build than is allowed; simplify it")]
    TooLarge,
    /// The client has gone while it was built.
    #[error("the client has gone")]
    Gone,
    /// The process that builds grammars cannot be used.
    #[error("the helper process cannot be used: {message}")]
    Helper {
        /// What happened.
        message: String,
    },
}

/// A schema with how its JSON is laid out: as Python's `json.dumps` does, which is what models have seen most, and
/// without the endless white space that weak models fall into.
///
/// # Errors
/// When it is no schema, or demands so many repetitions that building them would take the machine's memory.
pub(super) fn with_layout(schema: &Value) -> Result<Value, ConstraintError> {
    let mut schema = match schema {
        Value::Object(_) => schema.clone(),
        Value::Bool(true) => json!({}),
        other => {
            return Err(ConstraintError::NoSchema {
                found: match other {
                    Value::Array(_) => "a list",
                    Value::Bool(_) => "`false`",
                    Value::Null => "null",
                    Value::Number(_) => "a number",
                    _ => "a text",
                },
            });
        }
    };
    check_bounds(&schema)?;
    if !is_combined(&schema) {
        close(&mut schema);
    }
    if let Some(map) = schema.as_object_mut() {
        map.insert(
            LAYOUT.to_owned(),
            json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}),
        );
    }
    Ok(schema)
}

/// Whether the properties of one object are written in several places of it, each of which would rule out the others'.
fn is_combined(schema: &Value) -> bool {
    let many = |keyword: &str| schema.get(keyword).and_then(Value::as_array).is_some_and(|list| list.len() > 1);
    let own = schema.get("properties").is_some();
    many("allOf")
        || own && COMBINING.iter().any(|keyword| schema.get(keyword).is_some())
        || below(schema).any(is_combined)
}

/// Allows no properties but those that are named, where a schema says nothing of it: without that, models go on with keys
/// of their own making. OpenAI's strict mode demands it of clients, and llama.cpp reads schemas so.
fn close(schema: &mut Value) {
    if let Some(map) = schema.as_object_mut()
        && map.contains_key("properties")
        && !OPENING.iter().any(|keyword| map.contains_key(*keyword))
    {
        map.insert("additionalProperties".to_owned(), Value::Bool(false));
    }
    below_mut(schema, &mut |schema| close(schema));
}

/// The schemas that are parts of a schema.
fn below(schema: &Value) -> impl Iterator<Item = &Value> {
    schema.as_object().into_iter().flatten().flat_map(parts_of)
}

fn parts_of<'schema>((keyword, value): (&String, &'schema Value)) -> Vec<&'schema Value> {
    match value {
        Value::Object(map) if MAPS.contains(&keyword.as_str()) => map.values().collect(),
        Value::Array(list) if LISTS.contains(&keyword.as_str()) => list.iter().collect(),
        Value::Object(_) if SINGLES.contains(&keyword.as_str()) => vec![value],
        _ => Vec::new(),
    }
}

fn below_mut(schema: &mut Value, act: &mut dyn FnMut(&mut Value)) {
    for (keyword, value) in schema.as_object_mut().into_iter().flatten() {
        match value {
            Value::Object(map) if MAPS.contains(&keyword.as_str()) => map.values_mut().for_each(&mut *act),
            Value::Array(list) if LISTS.contains(&keyword.as_str()) => list.iter_mut().for_each(&mut *act),
            Value::Object(_) if SINGLES.contains(&keyword.as_str()) => act(value),
            _ => {}
        }
    }
}

fn check_bounds(value: &Value) -> Result<(), ConstraintError> {
    match value {
        Value::Object(map) => {
            for (keyword, value) in map {
                if BOUNDS.contains(&keyword.as_str())
                    && value.as_f64().is_some_and(|bound| bound > f64::from(BOUND_MAX))
                {
                    return Err(ConstraintError::Bound { keyword: keyword.clone(), value: value.to_string() });
                }
                check_bounds(value)?;
            }
            Ok(())
        }
        Value::Array(list) => list.iter().try_for_each(check_bounds),
        _ => Ok(()),
    }
}

/// The library's keyword for the layout of the JSON; what a client writes there is replaced.
const LAYOUT: &str = "x-guidance";

/// Keywords whose value is a map of schemas, a list of them, or one.
const MAPS: [&str; 5] = ["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"];
const LISTS: [&str; 5] = ["allOf", "anyOf", "items", "oneOf", "prefixItems"];
const SINGLES: [&str; 7] = ["additionalProperties", "contains", "else", "if", "items", "not", "then"];

/// Keywords that add to the properties of the object beside them.
const COMBINING: [&str; 8] = ["$ref", "allOf", "anyOf", "dependentSchemas", "else", "if", "oneOf", "then"];

/// Keywords that say which other properties an object may have.
const OPENING: [&str; 3] = ["additionalProperties", "patternProperties", "unevaluatedProperties"];

/// Keywords of schemas that say how often something is repeated.
const BOUNDS: [&str; 6] = ["maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"];

/// Our choice: beyond what fits a context of 8192 tokens, and 10 ms of building.
const BOUND_MAX: u32 = 10_000;
