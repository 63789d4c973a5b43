//! Normalisation of schemas to draft 2020-12.
//!
//! | written as | becomes |
//! |---|---|
//! | `"minimum": null` | nothing, as intended by serializers |
//! | `"minimum": 3, "exclusiveMinimum": true` (draft 4) | `"exclusiveMinimum": 3` |
//! | `"maxItems": "3"`, `"type": "STRING"` (Gemini) | `3`, `"string"` |
//! | `properties`, or `items`, without a `type` | an object, or a list |
//! | a list of schemas for items, without a rule for others | exactly these items, as read by zod and llama.cpp |
//! | `required` beyond `properties` | a property of any value |
//! | `propertyNames` with `enum`, `const` or `pattern` | closed `properties` or `patternProperties` |
//! | bounds beyond the range of written numbers | no bounds |
//! | `allOf` of objects | one object with all their properties |
//! | `#/$defs/a~1b`, `#/$defs/a%3Cb%3E`, `#anchor`, `https://…#/$defs/a` of the schema itself | a plain path |

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::keywords::{MAPS, NUMBERS, SCHEMAS};

/// The normalised schema.
pub(super) fn usual(schema: &Value) -> Value {
    let mut anchors = BTreeMap::new();
    collect_anchors(schema, "#", 0, &mut anchors);
    let mut rewriting = Rewriting {
        root: schema,
        anchors,
        copies_left: COPIES_MAX,
    };
    rewriting.schema(schema)
}

struct Rewriting<'schema> {
    root: &'schema Value,
    /// Paths of schemas by their `$anchor`.
    anchors: BTreeMap<&'schema str, String>,
    /// Remaining budget of property copies.
    copies_left: usize,
}

impl Rewriting<'_> {
    fn schema(&mut self, schema: &Value) -> Value {
        let Value::Object(map) = schema else {
            return schema.clone();
        };
        let mut usual = Map::new();
        for (keyword, value) in map {
            let value = match value {
                Value::Null if keyword != "const" => continue,
                value if SCHEMAS.contains(&keyword.as_str()) => self.below(keyword, value),
                Value::String(reference) if keyword == "$ref" => self.reference(reference).into(),
                Value::String(text) if NUMBERS.contains(&keyword.as_str()) => {
                    serde_json::from_str(text)
                        .ok()
                        .filter(Value::is_number)
                        .unwrap_or_else(|| value.clone())
                }
                value if keyword == "type" => lower(value),
                value => value.clone(),
            };
            usual.insert(keyword.clone(), value);
        }
        exclusive(&mut usual, "minimum", "exclusiveMinimum");
        exclusive(&mut usual, "maximum", "exclusiveMaximum");
        typed(&mut usual);
        unbounded(&mut usual);
        tuple(&mut usual);
        self.names(&mut usual);
        self.joined(&mut usual);
        required(&mut usual);
        Value::Object(usual)
    }

    fn below(&mut self, keyword: &str, value: &Value) -> Value {
        match value {
            Value::Array(list) => list.iter().map(|schema| self.schema(schema)).collect(),
            Value::Object(map) if MAPS.contains(&keyword) => {
                let defined = keyword == "$defs" || keyword == "definitions";
                let each = map.iter().map(|(name, schema)| {
                    let name = if defined {
                        without_slash(name)
                    } else {
                        name.clone()
                    };
                    (name, self.schema(schema))
                });
                Value::Object(each.collect())
            }
            schema => self.schema(schema),
        }
    }

    /// A reference within the schema as a path without escapes.
    fn reference(&self, reference: &str) -> String {
        let id = self.root.get("$id").and_then(Value::as_str);
        let inner = id
            .and_then(|id| reference.strip_prefix(id.trim_end_matches('#')))
            .filter(|inner| inner.starts_with('#'))
            .unwrap_or(reference);
        let Some(path) = inner.strip_prefix('#') else {
            return reference.to_owned();
        };
        if let Some(path) = self.anchors.get(path) {
            return path.clone();
        }
        // An existing plain path is left unchanged.
        if !path.contains(['~', '%']) || self.root.pointer(path).is_some() && !path.contains('~') {
            return inner.to_owned();
        }
        let decoded = percent_decoded(path);
        let segments = decoded.split('/').map(|segment| {
            let name = segment.replace("~1", "/").replace("~0", "~");
            without_slash(&name)
        });
        format!("#{}", segments.collect::<Vec<_>>().join("/"))
    }

    /// Property names that are listed, or that match a pattern.
    fn names(&mut self, map: &mut Map<String, Value>) {
        let Some(names) = map.get("propertyNames") else {
            return;
        };
        let names = match names.get("$ref").and_then(Value::as_str) {
            Some(reference) => reference
                .strip_prefix('#')
                .and_then(|path| self.root.pointer(path))
                .unwrap_or(names),
            None => names,
        };
        let says = |name: &String| !ANNOTATIONS.contains(&name.as_str()) && name != "type";
        let said: Vec<&String> = names
            .as_object()
            .map(|names| names.keys().filter(|name| says(name)).collect())
            .unwrap_or_default();
        let is_text = names.get("type").is_none_or(|kind| kind == "string");
        if !is_text || names.is_boolean() {
            return;
        }
        let only = match said.as_slice() {
            [] => {
                map.remove("propertyNames");
                return;
            }
            [only] => only.as_str(),
            _ => return,
        };
        if map.contains_key("properties") || map.contains_key("patternProperties") {
            return;
        }
        let schema = match map.get("additionalProperties") {
            None | Some(Value::Bool(true)) => json!({}),
            Some(Value::Bool(false)) => return,
            Some(schema) => schema.clone(),
        };
        let (keyword, named) = match (only, names.get(only)) {
            ("enum", Some(Value::Array(all))) => {
                let copies = all.len().saturating_mul(nodes(&schema));
                let Some(left) = self.copies_left.checked_sub(copies) else {
                    return;
                };
                self.copies_left = left;
                let named = all
                    .iter()
                    .filter_map(|name| Some((name.as_str()?.to_owned(), schema.clone())));
                ("properties", named.collect::<Map<_, _>>())
            }
            ("const", Some(Value::String(name))) => {
                ("properties", Map::from_iter([(name.clone(), schema)]))
            }
            ("pattern", Some(Value::String(pattern))) => (
                "patternProperties",
                Map::from_iter([(pattern.clone(), schema)]),
            ),
            _ => return,
        };
        map.remove("propertyNames");
        map.insert(keyword.to_owned(), Value::Object(named));
        map.insert("additionalProperties".to_owned(), Value::Bool(false));
    }

    /// Merges several constraining objects into one.
    fn joined(&mut self, map: &mut Map<String, Value>) {
        let Some(all) = map.get("allOf").and_then(Value::as_array) else {
            return;
        };
        let only = |map: &Map<String, Value>, more: &[&str]| {
            let joinable = |keyword: &String| {
                [&OBJECTS[..], &ANNOTATIONS, more]
                    .iter()
                    .any(|known| known.contains(&keyword.as_str()))
            };
            map.get("type").is_none_or(|kind| kind == "object") && map.keys().all(joinable)
        };
        if !only(
            map,
            &["allOf", "unevaluatedProperties", "$defs", "definitions"],
        ) || all.len() + usize::from(map.contains_key("properties")) < 2
        {
            return;
        }
        let mut properties: Map<String, Value> = Map::new();
        let mut required: Vec<Value> = Vec::new();
        let mut add = |part: &Map<String, Value>, path: Option<&str>| {
            let own = part.get("properties").and_then(Value::as_object);
            for (name, schema) in own.into_iter().flatten() {
                let schema = match path {
                    None => schema.clone(),
                    Some(_) if name.contains('/') => return None,
                    Some(path) => json!({"$ref": format!("{path}/properties/{name}")}),
                };
                self.copies_left = self.copies_left.checked_sub(1)?;
                match properties.get_mut(name) {
                    Some(before) => *before = json!({"allOf": [before.take(), schema]}),
                    None => drop(properties.insert(name.clone(), schema)),
                }
            }
            let names = part.get("required").and_then(Value::as_array);
            for name in names.into_iter().flatten() {
                if !required.contains(name) {
                    required.push(name.clone());
                }
            }
            Some(())
        };
        let mut parts = || {
            add(map, None)?;
            for part in all {
                let part = part.as_object()?;
                match part.get("$ref").and_then(Value::as_str) {
                    Some(path) if path.starts_with("#/") && part.len() == 1 => {
                        let target = self.root.pointer(path.strip_prefix('#')?)?.as_object()?;
                        only(target, &[]).then(|| add(target, Some(path)))??;
                    }
                    _ => only(part, &[]).then(|| add(part, None))??,
                }
            }
            Some(())
        };
        if parts().is_none() || properties.is_empty() {
            return;
        }
        map.remove("allOf");
        if map.remove("unevaluatedProperties") == Some(Value::Bool(false)) {
            map.insert("additionalProperties".to_owned(), Value::Bool(false));
        }
        map.insert("type".to_owned(), "object".into());
        map.insert("properties".to_owned(), Value::Object(properties));
        if !required.is_empty() {
            map.insert("required".to_owned(), Value::Array(required));
        }
    }
}

/// Draft 4 states by a boolean whether a bound is exclusive.
fn exclusive(map: &mut Map<String, Value>, bound: &str, exclusive: &str) {
    if let Some(Value::Bool(excluded)) = map.get(exclusive) {
        let value = if *excluded { map.remove(bound) } else { None };
        match value {
            Some(value) => map.insert(exclusive.to_owned(), value),
            None => map.remove(exclusive),
        };
    }
}

fn lower(kind: &Value) -> Value {
    match kind {
        Value::String(name) => {
            let lower = name.to_ascii_lowercase();
            if TYPES.contains(&lower.as_str()) {
                lower.into()
            } else {
                kind.clone()
            }
        }
        Value::Array(list) => list.iter().map(lower).collect(),
        other => other.clone(),
    }
}

/// The type implied by a schema's keywords.
fn typed(map: &mut Map<String, Value>) {
    let has = |keywords: &[&str]| keywords.iter().any(|keyword| map.contains_key(*keyword));
    if has(&["type", "enum", "const", "$ref"]) {
        return;
    }
    let kind = if has(&["properties", "patternProperties"])
        || map
            .get("additionalProperties")
            .is_some_and(Value::is_object)
    {
        "object"
    } else if has(&["prefixItems"]) || map.get("items").is_some_and(|items| !items.is_boolean()) {
        "array"
    } else {
        return;
    };
    map.insert("type".to_owned(), kind.into());
}

/// Removes bounds beyond all numbers: those of 64 bits, and of floating-point numbers.
fn unbounded(map: &mut Map<String, Value>) {
    let beyond = |keyword: &str, sign: f64| {
        let bound = map.get(keyword).and_then(Value::as_f64);
        bound.is_some_and(|bound| bound * sign > EXACT_MAX)
    };
    let least = ["minimum", "exclusiveMinimum"];
    let most = ["maximum", "exclusiveMaximum"];
    let (low, high) = (
        most.iter().any(|keyword| beyond(keyword, -1.0)),
        least.iter().any(|keyword| beyond(keyword, 1.0)),
    );
    let drop: Vec<&str> = least
        .into_iter()
        .filter(|keyword| !low && beyond(keyword, -1.0))
        .chain(
            most.into_iter()
                .filter(|keyword| !high && beyond(keyword, 1.0)),
        )
        .collect();
    for keyword in drop {
        map.remove(keyword);
    }
}

/// Individually listed items are the only ones, unless others are specified.
fn tuple(map: &mut Map<String, Value>) {
    let (listed, others) = match (map.get("prefixItems"), map.get("items")) {
        (Some(Value::Array(listed)), None) => (listed.len(), "items"),
        (None, Some(Value::Array(listed))) if !map.contains_key("additionalItems") => {
            (listed.len(), "additionalItems")
        }
        _ => return,
    };
    if map
        .get("unevaluatedItems")
        .is_none_or(|more| *more == Value::Bool(false))
    {
        map.remove("unevaluatedItems");
        map.insert(others.to_owned(), Value::Bool(false));
        if !map.contains_key("minItems") && !map.contains_key("maxItems") {
            map.insert("minItems".to_owned(), listed.into());
        }
    }
}

fn required(map: &mut Map<String, Value>) {
    let says_others = [
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
    ];
    if says_others.iter().any(|keyword| map.contains_key(*keyword)) {
        return;
    }
    let names: Vec<String> = map
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(|name| Some(name.as_str()?.to_owned()))
        .collect();
    if let Some(properties) = map.get_mut("properties").and_then(Value::as_object_mut) {
        for name in names {
            properties.entry(name).or_insert_with(|| json!({}));
        }
    }
}

fn collect_anchors<'schema>(
    schema: &'schema Value,
    path: &str,
    depth: usize,
    anchors: &mut BTreeMap<&'schema str, String>,
) {
    let Some(map) = schema.as_object().filter(|_| depth < ANCHOR_DEPTH_MAX) else {
        return;
    };
    if let Some(anchor) = map.get("$anchor").and_then(Value::as_str)
        && path != "#"
    {
        anchors.insert(anchor, path.to_owned());
    }
    for keyword in ["$defs", "definitions"] {
        let defined = map.get(keyword).and_then(Value::as_object);
        for (name, schema) in defined.into_iter().flatten() {
            let path = format!("{path}/{keyword}/{}", without_slash(name));
            collect_anchors(schema, &path, depth + 1, anchors);
        }
    }
}

/// Number of values in a value.
fn nodes(value: &Value) -> usize {
    let below: usize = match value {
        Value::Array(list) => list.iter().map(nodes).sum(),
        Value::Object(map) => map.values().map(nodes).sum(),
        _ => 0,
    };
    below.saturating_add(1)
}

/// A definition name that can occur in paths of references.
fn without_slash(name: &str) -> String {
    name.replace('/', "\u{2215}")
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let code = after
            .get(..2)
            .filter(|_| first == b'%')
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        bytes.push(code.unwrap_or(first));
        rest = after
            .get(if code.is_some() { 2 } else { 0 }..)
            .unwrap_or_default();
    }
    String::from_utf8(bytes).unwrap_or_else(|_not_utf8| text.to_owned())
}

const TYPES: [&str; 7] = [
    "array", "boolean", "integer", "null", "number", "object", "string",
];

/// Keywords of objects that can be merged.
const OBJECTS: [&str; 3] = ["properties", "required", "type"];

/// Keywords that do not constrain a value.
const ANNOTATIONS: [&str; 10] = [
    "$anchor",
    "$comment",
    "$id",
    "$schema",
    "default",
    "deprecated",
    "description",
    "examples",
    "readOnly",
    "title",
];

/// Limit up to which a floating-point number represents every integer exactly.
const EXACT_MAX: f64 = 9_007_199_254_740_992.0;

/// Limit of values copied when objects are merged or names are listed. Our choice: the memory of a schema stays
/// proportional to its text.
const COPIES_MAX: usize = 2000;

/// Depth of nested definitions.
const ANCHOR_DEPTH_MAX: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_clients_write_in_other_ways_is_written_as_usual() {
        for (written, expected) in [
            (
                json!({"type": "integer", "minimum": null, "title": null, "required": null, "const": null}),
                json!({"type": "integer", "const": null}),
            ),
            (
                json!({"type": "integer", "minimum": 3, "exclusiveMinimum": true, "maximum": 5, "exclusiveMaximum": false}),
                json!({"type": "integer", "exclusiveMinimum": 3, "maximum": 5}),
            ),
            (
                json!({"type": ["STRING", "Null"], "maxLength": "3", "minLength": "x"}),
                json!({"type": ["string", "null"], "maxLength": 3, "minLength": "x"}),
            ),
            (
                json!({"properties": {"a": {"items": {"type": "boolean"}}}}),
                json!({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "boolean"}}}}),
            ),
            (
                json!({"type": "array", "prefixItems": [{"type": "null"}, {"type": "null"}]}),
                json!({"type": "array", "prefixItems": [{"type": "null"}, {"type": "null"}], "items": false, "minItems": 2}),
            ),
            (
                json!({"type": "array", "items": [{"type": "null"}], "maxItems": 1}),
                json!({"type": "array", "items": [{"type": "null"}], "additionalItems": false, "maxItems": 1}),
            ),
            (
                json!({"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": false, "minItems": 1}),
                json!({"type": "array", "prefixItems": [{"type": "null"}], "items": false, "minItems": 1}),
            ),
            (
                json!({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "b"]}),
                json!({"type": "object", "properties": {"a": {"type": "null"}, "b": {}}, "required": ["a", "b"]}),
            ),
            (
                json!({"type": "object", "propertyNames": {"type": "string"}}),
                json!({"type": "object"}),
            ),
            (
                json!({"type": "object", "propertyNames": {"$ref": "#/$defs/K"}, "additionalProperties": {"type": "null"},
                    "$defs": {"K": {"type": "string", "title": "K", "enum": ["a", "b"]}}}),
                json!({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "additionalProperties": false,
                    "$defs": {"K": {"type": "string", "title": "K", "enum": ["a", "b"]}}}),
            ),
            (
                json!({"type": "object", "propertyNames": {"pattern": "^x"}}),
                json!({"type": "object", "patternProperties": {"^x": {}}, "additionalProperties": false}),
            ),
            (
                json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX}),
                json!({"type": "integer"}),
            ),
            (
                json!({"type": "number", "minimum": 0, "maximum": f64::MAX}),
                json!({"type": "number", "minimum": 0}),
            ),
            (
                json!({"type": "integer", "minimum": 1e18, "maximum": i64::MAX}),
                json!({"type": "integer", "minimum": 1e18, "maximum": i64::MAX}),
            ),
        ] {
            assert_eq!(usual(&written), expected, "{written}");
        }
    }

    #[test]
    fn objects_that_all_say_something_become_one() {
        let object = |name: &str| json!({"type": "object", "properties": {name: {"type": "null"}}, "required": [name]});
        let both = json!({"a": {"type": "null"}, "b": {"type": "null"}});
        assert_eq!(
            usual(&json!({"allOf": [object("a"), object("b")], "unevaluatedProperties": false})),
            json!({"type": "object", "properties": both, "required": ["a", "b"], "additionalProperties": false})
        );
        let base = json!({"properties": {"b": {"type": "null"}}, "allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": object("a")}});
        assert_eq!(
            usual(&base)["properties"],
            json!({"b": {"type": "null"}, "a": {"$ref": "#/$defs/A/properties/a"}})
        );
        let twice = json!({"allOf": [object("a"), object("a")]});
        assert_eq!(
            usual(&twice)["properties"]["a"],
            json!({"allOf": [{"type": "null"}, {"type": "null"}]})
        );
        for left in [
            json!({"allOf": [object("a"), {"type": "object", "additionalProperties": false}]}),
            json!({"allOf": [object("a"), {"type": "object", "anyOf": [object("b")]}]}),
            json!({"properties": {"a": {"allOf": [{"$ref": "#/$defs/A"}]}}, "type": "object", "$defs": {"A": {"type": "null"}}}),
        ] {
            assert_eq!(usual(&left), left);
        }
        // The maximum number of copies.
        let many: Map<String, Value> = (0..COPIES_MAX)
            .map(|at| (at.to_string(), json!({})))
            .collect();
        let many = json!({"properties": many, "allOf": [object("a")]});
        assert!(usual(&many).get("allOf").is_some());
    }

    #[test]
    fn references_inside_of_the_schema_lead_there_however_they_are_written() {
        let schema = |reference: &str| {
            json!({
                "$id": "https://example.com/root.json",
                "$ref": reference,
                "$defs": {"a/b": {"type": "null"}, "List<a>": {"type": "null"}, "A": {"$anchor": "here", "type": "null"}},
            })
        };
        for (written, expected) in [
            ("#/$defs/a~1b", "#/$defs/a\u{2215}b"),
            ("#/$defs/List%3Ca%3E", "#/$defs/List<a>"),
            ("#/$defs/List<a>", "#/$defs/List<a>"),
            ("#here", "#/$defs/A"),
            ("https://example.com/root.json#/$defs/A", "#/$defs/A"),
            (
                "https://example.com/other.json#/$defs/A",
                "https://example.com/other.json#/$defs/A",
            ),
            ("#/$defs/%zz", "#/$defs/%zz"),
        ] {
            let usual = usual(&schema(written));
            assert_eq!(usual["$ref"], expected);
            if let Some(path) = expected
                .strip_prefix('#')
                .filter(|path| !path.contains('%'))
            {
                assert!(usual.pointer(path).is_some(), "{path}");
            }
        }
    }

    /// A schema whose parts would each be copied a hundred times.
    #[test]
    fn a_schema_that_is_written_in_other_words_grows_in_proportion() {
        let names: Vec<String> = (0..100).map(|at| at.to_string()).collect();
        let mut nested = json!({"type": "null"});
        for _ in 0..20 {
            nested = json!({"type": "object", "propertyNames": {"enum": names}, "additionalProperties": nested});
        }
        assert!(nodes(&usual(&nested)) < nodes(&nested) + 2 * COPIES_MAX);
    }
}
