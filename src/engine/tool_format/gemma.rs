//! Calls as Gemma 4 writes them: `call:name{key:<|"|>text<|"|>,list:[1,true]}`.
//!
//! Texts stand between two control tokens, keys have no quotes, and fields are ordered by key. A part of a schema that
//! has no rule here, such as a pattern, is written as JSON, which the parser of answers reads as well.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::parts::{Field, bounds, in_sequence, literal, properties, repetitions, schema_alone};

/// The expression of a call of the function `name`. Its rules begin with `gemma` and `index`.
pub(super) fn call(rules: &mut String, index: usize, name: &str, parameters: &Value) -> String {
    let mut notation = Notation {
        rules,
        index,
        count: 0,
        root: parameters,
        references: BTreeMap::new(),
    };
    let arguments = notation.value(parameters);
    let open = literal(&format!("{CALL_START}call:{name}"));
    format!("{open} {arguments} {}", literal(CALL_END))
}

/// Rules of the arguments of one function.
struct Notation<'call> {
    rules: &'call mut String,
    index: usize,
    count: usize,
    root: &'call Value,
    /// Rules of the definitions in use.
    references: BTreeMap<String, String>,
}

impl Notation<'_> {
    fn new_name(&mut self) -> String {
        self.count += 1;
        format!("gemma_{}_{}", self.index, self.count)
    }

    /// The rule of a value.
    fn value(&mut self, schema: &Value) -> String {
        let name = self.new_name();
        self.define(&name, schema);
        name
    }

    fn define(&mut self, name: &str, schema: &Value) {
        let written = self.written(name, schema);
        let rule = written.unwrap_or_else(|| {
            let schema = schema_alone(schema, self.root);
            format!("{name}: %json {schema}\n")
        });
        self.rules.push_str(&rule);
    }

    /// The rule in Gemma's notation, if there is one.
    fn written(&mut self, name: &str, schema: &Value) -> Option<String> {
        let map = schema.as_object()?;
        let only = |keywords: &[&str]| {
            let ignored = |key: &str| ["$defs", "definitions", "x-guidance"].contains(&key);
            map.keys()
                .all(|key| ignored(key) || keywords.contains(&key.as_str()))
        };
        let expression = if only(&["$ref"]) {
            self.referred(map.get("$ref")?.as_str()?)?
        } else if only(&["anyOf"]) || only(&["oneOf"]) {
            let all = map.get("anyOf").or_else(|| map.get("oneOf"));
            self.either(all?.as_array()?)
        } else if only(&["type", "enum"]) && map.contains_key("enum") {
            constants(map.get("enum")?.as_array()?)?
        } else if only(&["type", "const"]) && map.contains_key("const") {
            constants(std::slice::from_ref(map.get("const")?))?
        } else {
            match map.get("type")? {
                Value::Array(types) => {
                    let one = |kind: &Value| {
                        let mut map = map.clone();
                        map.insert("type".to_owned(), kind.clone());
                        Value::Object(map)
                    };
                    let each: Vec<Value> = types.iter().map(one).collect();
                    self.either(&each)
                }
                kind if kind == "string" && only(&["type", "minLength", "maxLength"]) => {
                    self.text(name, schema)
                }
                kind if kind == "array" && only(&["type", "items", "minItems", "maxItems"]) => {
                    self.list(schema)?
                }
                kind if kind == "object"
                    && only(&["type", "properties", "required", "additionalProperties"]) =>
                {
                    self.object(name, map)?
                }
                _ => return None,
            }
        };
        Some(format!("{name}: {expression}\n"))
    }

    fn either(&mut self, schemas: &[Value]) -> String {
        let each: Vec<String> = schemas.iter().map(|schema| self.value(schema)).collect();
        each.join(" | ")
    }

    fn referred(&mut self, reference: &str) -> Option<String> {
        if let Some(name) = self.references.get(reference) {
            return Some(name.clone());
        }
        let root = self.root;
        let schema = root.pointer(reference.strip_prefix('#')?)?;
        let name = self.new_name();
        self.references.insert(reference.to_owned(), name.clone());
        self.define(&name, schema);
        Some(name)
    }

    /// The expression of a text; its rule is the same for all texts of one length.
    fn text(&mut self, name: &str, schema: &Value) -> String {
        let (quote, times) = (literal(QUOTE), repetitions(schema));
        let name = if times == "*" { "gemma_text" } else { name };
        let head = format!("{name}_body[suffix={quote}]: ");
        if !self.rules.contains(&head) {
            let body = format!("/(?s:.{times})/ & ~/(?s:.*)<\\|\"\\|>(?s:.*)/");
            self.rules.push_str(&format!("{head}{body}\n"));
        }
        format!("{quote} {name}_body")
    }

    fn list(&mut self, schema: &Value) -> Option<String> {
        let item = self.value(schema.get("items")?);
        let (least, most) = bounds(schema, "minItems", "maxItems").unwrap_or((0, String::new()));
        if most == "0" {
            return Some("\"[]\"".to_owned());
        }
        let less = |count: u64| count.saturating_sub(1);
        let most = most.parse().map_or(most, |most| less(most).to_string());
        let items = format!("{item} (\",\" {item}){{{},{most}}}", less(least));
        let items = if least == 0 {
            format!("({items})?")
        } else {
            items
        };
        Some(format!("\"[\" {items} \"]\""))
    }

    fn object(&mut self, name: &str, map: &Map<String, Value>) -> Option<String> {
        let schema = Value::Object(map.clone());
        let mut all: Vec<_> = properties(&schema).collect();
        let is_named = |required: &Value| all.iter().any(|(key, ..)| required == key);
        let required = map.get("required").and_then(Value::as_array);
        let is_closed = map.get("additionalProperties") == Some(&Value::Bool(false));
        if !is_closed || !required.into_iter().flatten().all(is_named) {
            return None;
        }
        all.sort_by_key(|(key, ..)| key.to_lowercase());
        let mut fields = Vec::new();
        for (key, schema, is_required) in all {
            let open = literal(&format!("{}:", written_key(key)?));
            let grammar = format!("{open} {}", self.value(schema));
            fields.push(Field {
                grammar,
                is_required,
            });
        }
        let fields = in_sequence(self.rules, name, &fields, ",");
        Some(format!("\"{{\" {fields} \"}}\""))
    }
}

fn constants(values: &[Value]) -> Option<String> {
    let written: Option<Vec<_>> = values.iter().map(constant).collect();
    let literals: Vec<String> = written?.iter().map(|text| literal(text)).collect();
    Some(literals.join(" | "))
}

/// A value in Gemma's notation; `None` if a text in it cannot be quoted.
fn constant(value: &Value) -> Option<String> {
    Some(match value {
        Value::String(text) if text.contains(QUOTE) => return None,
        Value::String(text) => format!("{QUOTE}{text}{QUOTE}"),
        Value::Array(list) => {
            let list: Option<Vec<_>> = list.iter().map(constant).collect();
            format!("[{}]", list?.join(","))
        }
        Value::Object(map) => {
            let field = |(key, value): (&String, &Value)| {
                Some(format!("{}:{}", written_key(key)?, constant(value)?))
            };
            let fields: Option<Vec<_>> = map.iter().map(field).collect();
            format!("{{{}}}", fields?.join(","))
        }
        other => other.to_string(),
    })
}

/// A key, quoted if it is not a plain name.
fn written_key(key: &str) -> Option<String> {
    let is_plain = !key.is_empty()
        && key
            .chars()
            .all(|character| character.is_alphanumeric() || matches!(character, '_' | '-' | '.'));
    if is_plain {
        return Some(key.to_owned());
    }
    constant(&Value::from(key))
}

/// Messages in which the results of tools, and the text after them, are part of the message of their calls.
pub(crate) fn with_results(messages: Vec<Value>) -> Vec<Value> {
    let mut joined: Vec<Value> = Vec::with_capacity(messages.len());
    for message in messages {
        let calls = joined
            .last_mut()
            .and_then(Value::as_object_mut)
            .filter(|last| last.contains_key("tool_calls"));
        let role = message.get("role").and_then(Value::as_str);
        match (calls, role) {
            (Some(calls), Some("tool")) => {
                let mut result = Map::new();
                result
                    .extend(name_of_result(calls, &message).map(|name| ("name".to_owned(), name)));
                let said = message.get("content").cloned().unwrap_or_default();
                result.insert("response".to_owned(), said);
                let results = calls.entry("tool_responses").or_insert_with(|| json!([]));
                if let Value::Array(results) = results {
                    results.push(Value::Object(result));
                }
            }
            (Some(calls), Some("assistant"))
                if calls.contains_key("tool_responses")
                    && calls.get("content").is_some_and(|said| said == "")
                    && message.get("tool_calls").is_none() =>
            {
                let said = message.get("content").cloned();
                calls.insert("content".to_owned(), said.unwrap_or_default());
            }
            _ => joined.push(message),
        }
    }
    joined
}

/// The name of the function with this result.
fn name_of_result(calls: &Map<String, Value>, result: &Value) -> Option<Value> {
    let id = result.get("tool_call_id");
    let all = calls.get("tool_calls").and_then(Value::as_array);
    let call = all.into_iter().flatten().find(|call| call.get("id") == id);
    let name = call.and_then(|call| call.pointer("/function/name"));
    name.or_else(|| result.get("name")).cloned()
}

const CALL_START: &str = "<|tool_call>";
const CALL_END: &str = "<tool_call|>";
/// Before and after a text.
const QUOTE: &str = "<|\"|>";
