//! JSON schemas as forms of answers: enforced, tolerated or refused keywords.
//!
//! | keywords | treatment |
//! |---|---|
//! | `SCHEMAS`, `VALUES`, lengths, numbers of items and of properties, `format` | kept |
//! | `NARROWING`, and any of the above beyond the limits of a grammar | tolerated, and named |
//! | `REFUSED`, lower bounds beyond the length of answers | refused |
//! | all others: annotations, extensions | not part of the form |
//!
//! A schema without bounds gets some where a weak model would continue forever: a number has 15 digits before and 8
//! after the decimal point, and no exponent.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

mod keywords;
mod usual;

use self::keywords::{MAPS, NUMBERS, SCHEMAS};

/// The enforced form of a schema.
#[derive(Clone, Debug, PartialEq)]
pub struct KeptSchema {
    /// The enforced schema.
    pub schema: Value,
    /// Keywords not enforced, in full or in part: an answer may violate them.
    pub let_through: BTreeSet<&'static str>,
}

/// Reason why a schema cannot be the form of an answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SchemaError {
    /// An answer would exceed the length of answers.
    #[error("`{keyword}` is {value}, above the limit of {limit}")]
    Bound {
        /// The keyword.
        keyword: &'static str,
        /// Its value.
        value: String,
        /// The limit.
        limit: u64,
    },
    /// A keyword whose omission would change the meaning.
    #[error("`{keyword}` is not supported")]
    Keyword {
        /// The keyword.
        keyword: &'static str,
    },
    /// A reference that only leads to itself.
    #[error("the reference `{reference}` is circular")]
    Loop {
        /// The reference.
        reference: String,
    },
    /// Neither an object nor `true`.
    #[error("it is {found}, not an object")]
    NoSchema {
        /// The actual kind of value.
        found: &'static str,
    },
}

impl KeptSchema {
    /// Reads a client's schema.
    ///
    /// # Errors
    /// It is not a schema, or is unsatisfiable.
    pub fn of(schema: &Value) -> Result<Self, SchemaError> {
        if *schema == Value::Bool(false) {
            return Err(SchemaError::NoSchema { found: "`false`" });
        }
        let schema = &usual::usual(schema);
        let mut lengths = BTreeSet::new();
        collect_lengths(schema, &mut lengths)?;
        let mut reading = Reading {
            root: schema,
            lengths_kept: within_budget(lengths),
            combined: is_combined(schema),
            any: false,
            let_through: BTreeSet::new(),
        };
        let mut kept = reading.schema(schema)?;
        if reading.any {
            let definitions = kept
                .as_object_mut()
                .map(|map| map.entry("$defs").or_insert_with(|| json!({})));
            if let Some(definitions) = definitions.and_then(Value::as_object_mut) {
                definitions.insert(ANY.to_owned(), any_value());
            }
        }
        Ok(Self {
            schema: kept,
            let_through: reading.let_through,
        })
    }
}

/// State of reading one schema.
struct Reading<'schema> {
    root: &'schema Value,
    /// Enforced length ranges of texts.
    lengths_kept: BTreeSet<Lengths>,
    /// Whether objects are described in several places, each of which depends on whether the others are open.
    combined: bool,
    /// Whether [`any_value`] is referenced.
    any: bool,
    let_through: BTreeSet<&'static str>,
}

impl Reading<'_> {
    fn schema(&mut self, schema: &Value) -> Result<Value, SchemaError> {
        match schema {
            Value::Object(map) => self.object(map),
            Value::Bool(true) => Ok(self.any()),
            Value::Bool(false) => Ok(Value::Bool(false)),
            other => Err(SchemaError::NoSchema {
                found: name_of(other),
            }),
        }
    }

    /// A schema for any value, with finite numbers.
    fn any(&mut self) -> Value {
        if self.combined {
            return json!({});
        }
        self.any = true;
        json!({"$ref": format!("#/$defs/{ANY}")})
    }

    fn object(&mut self, map: &Map<String, Value>) -> Result<Value, SchemaError> {
        // zod's notation for an unsatisfiable schema.
        if map
            .get("not")
            .is_some_and(|not| *not == Value::Bool(true) || *not == json!({}))
        {
            return Ok(Value::Bool(false));
        }
        let mut kept = Map::new();
        for (key, value) in map {
            if let Some(keyword) = REFUSED.into_iter().find(|keyword| keyword == key) {
                return Err(SchemaError::Keyword { keyword });
            }
            if let Some(keyword) = NUMBERS.into_iter().find(|keyword| keyword == key)
                && !value.is_number()
            {
                self.let_through.insert(keyword);
                continue;
            }
            if key == "$ref" {
                self.check_reference(value)?;
            }
            if let Some(keyword) = NARROWING.into_iter().find(|keyword| keyword == key) {
                // With these values, they have no effect.
                let idle = !["not", "uniqueItems"].contains(&keyword);
                if *value != Value::Bool(idle) {
                    self.let_through.insert(keyword);
                }
            } else if SCHEMAS.contains(&key.as_str()) {
                kept.insert(key.clone(), self.below(key, value)?);
            } else if key == "multipleOf" && value.as_f64().is_some_and(|step| !is_countable(step))
            {
                self.let_through.insert("multipleOf");
            } else if VALUES.contains(&key.as_str()) {
                kept.insert(key.clone(), value.clone());
            }
        }
        self.alternatives(map);
        self.lengths(map, &mut kept)?;
        self.counts(map, &mut kept)?;
        self.text(map, &mut kept);
        self.rest(map, &mut kept);
        bound_numbers(&mut kept);
        if kept.is_empty() && !self.combined {
            return Ok(self.any());
        }
        if map.get("nullable") == Some(&Value::Bool(true)) {
            return Ok(or_null(kept));
        }
        Ok(Value::Object(kept))
    }

    /// Refuses a reference that leads directly back to itself.
    fn check_reference(&self, reference: &Value) -> Result<(), SchemaError> {
        let mut next = Some(reference);
        for _ in 0..CHAIN_MAX {
            let target = next
                .and_then(Value::as_str)
                .and_then(|path| self.root.pointer(path.strip_prefix('#')?));
            next = target.and_then(|target| target.get("$ref"));
            if next.is_none() {
                return Ok(());
            }
        }
        Err(SchemaError::Loop {
            reference: reference.as_str().unwrap_or_default().to_owned(),
        })
    }

    /// The value of a keyword of [`SCHEMAS`].
    fn below(&mut self, keyword: &str, value: &Value) -> Result<Value, SchemaError> {
        match value {
            Value::Array(list) => list.iter().map(|schema| self.schema(schema)).collect(),
            Value::Object(map) if MAPS.contains(&keyword) => {
                let each = map
                    .iter()
                    .map(|(name, schema)| Ok((name.clone(), self.schema(schema)?)));
                Ok(Value::Object(each.collect::<Result<_, SchemaError>>()?))
            }
            schema => self.schema(schema),
        }
    }

    /// `oneOf` is kept as `anyOf`, which is equivalent if no value matches two of them.
    fn alternatives(&mut self, map: &Map<String, Value>) {
        let Some(all) = map.get("oneOf").and_then(Value::as_array) else {
            return;
        };
        let apart = |(index, one): (usize, &Value)| {
            all.iter()
                .skip(index + 1)
                .all(|other| are_disjoint(self.root, one, other))
        };
        if !all.iter().enumerate().all(apart) {
            self.let_through.insert("oneOf");
        }
    }

    fn lengths(
        &mut self,
        map: &Map<String, Value>,
        kept: &mut Map<String, Value>,
    ) -> Result<(), SchemaError> {
        let Some(lengths) = lengths_of(map)? else {
            return Ok(());
        };
        for (keyword, value) in [("minLength", lengths.least), ("maxLength", lengths.most)] {
            let Some(value) = value else { continue };
            if self.lengths_kept.contains(&lengths) {
                kept.insert(keyword.to_owned(), value.into());
            } else if value > 0 {
                self.let_through.insert(keyword);
            }
        }
        Ok(())
    }

    /// Counts of items and of properties.
    fn counts(
        &mut self,
        map: &Map<String, Value>,
        kept: &mut Map<String, Value>,
    ) -> Result<(), SchemaError> {
        let required = map
            .get("required")
            .and_then(Value::as_array)
            .map_or(0, Vec::len);
        let properties = map
            .get("properties")
            .and_then(Value::as_object)
            .map_or(0, Map::len);
        for keyword in ["minItems", "minProperties"] {
            let Some(least) = count(map, keyword) else {
                continue;
            };
            if least > COUNT_MAX {
                return Err(SchemaError::Bound {
                    keyword,
                    value: least.to_string(),
                    limit: COUNT_MAX,
                });
            }
            let is_met = least <= u64::try_from(required).unwrap_or(u64::MAX);
            if keyword == "minItems" || properties <= required {
                kept.insert(keyword.to_owned(), least.into());
            } else if !is_met {
                self.let_through.insert(keyword);
            }
        }
        for keyword in ["maxItems", "maxProperties"] {
            let Some(most) = count(map, keyword) else {
                continue;
            };
            if most <= COUNT_MAX && (keyword == "maxItems" || properties <= required) {
                kept.insert(keyword.to_owned(), most.into());
            } else if keyword == "maxItems" || most < u64::try_from(properties).unwrap_or(u64::MAX)
            {
                self.let_through.insert(keyword);
            }
        }
        Ok(())
    }

    fn text(&mut self, map: &Map<String, Value>, kept: &mut Map<String, Value>) {
        if let Some(pattern) = map.get("pattern") {
            if pattern.as_str().is_some_and(looks_around) {
                self.let_through.insert("pattern");
            } else {
                kept.insert("pattern".to_owned(), pattern.clone());
            }
        }
        let is_text = map.get("type").is_none_or(|kind| names(kind, "string"));
        if let Some(format) = map.get("format").filter(|_| is_text) {
            if format
                .as_str()
                .is_some_and(|format| FORMATS.contains(&format))
            {
                kept.insert("format".to_owned(), format.clone());
                // Fractions of seconds, and numbers, in these formats are unbounded.
                let most = LONGEST.iter().find(|(endless, _)| format == endless);
                if let Some((_, most)) = most
                    && !kept.contains_key("maxLength")
                {
                    kept.insert("maxLength".to_owned(), (*most).into());
                }
            } else {
                self.let_through.insert("format");
            }
        }
    }

    /// Unnamed contents allowed in an object or a list.
    fn rest(&mut self, map: &Map<String, Value>, kept: &mut Map<String, Value>) {
        if let Some(open) = map
            .get("unevaluatedProperties")
            .filter(|open| **open != Value::Bool(true))
        {
            if *open == Value::Bool(false) && !self.combined {
                kept.entry("additionalProperties")
                    .or_insert_with(|| Value::Bool(false));
            } else {
                self.let_through.insert("unevaluatedProperties");
            }
        }
        let is_only = |kind: &str| {
            map.get("type").is_some_and(|value| value == kind) && !map.contains_key("enum")
        };
        if self.combined || map.contains_key("const") {
            return;
        }
        if is_only("array") && !map.contains_key("items") && !map.contains_key("prefixItems") {
            kept.insert("items".to_owned(), self.any());
        }
        if is_only("object") && OBJECTS.iter().all(|keyword| !kept.contains_key(*keyword)) {
            kept.insert("additionalProperties".to_owned(), self.any());
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Lengths {
    most: Option<u64>,
    least: Option<u64>,
}

fn lengths_of(map: &Map<String, Value>) -> Result<Option<Lengths>, SchemaError> {
    let (least, most) = (count(map, "minLength"), count(map, "maxLength"));
    if let Some(value) = least.filter(|&least| least > LENGTHS_MAX) {
        return Err(SchemaError::Bound {
            keyword: "minLength",
            value: value.to_string(),
            limit: LENGTHS_MAX,
        });
    }
    Ok((least.is_some() || most.is_some()).then_some(Lengths { most, least }))
}

/// All length ranges of texts, in a schema and its parts.
fn collect_lengths(schema: &Value, all: &mut BTreeSet<Lengths>) -> Result<(), SchemaError> {
    if let Some(map) = schema.as_object() {
        all.extend(lengths_of(map)?);
    }
    parts(schema).try_for_each(|part| collect_lengths(part, all))
}

/// The enforced ones: the shortest, as long as their total is within [`LENGTHS_MAX`].
fn within_budget(all: BTreeSet<Lengths>) -> BTreeSet<Lengths> {
    let mut by_size: BTreeMap<u64, Vec<Lengths>> = BTreeMap::new();
    for lengths in all {
        by_size
            .entry(lengths.most.max(lengths.least).unwrap_or(0))
            .or_default()
            .push(lengths);
    }
    let mut sum = 0u64;
    let fits = |(size, _): &(u64, Lengths)| {
        sum = sum.saturating_add(*size);
        sum <= LENGTHS_MAX
    };
    by_size
        .into_iter()
        .flat_map(|(size, all)| all.into_iter().map(move |lengths| (size, lengths)))
        .take_while(fits)
        .map(|(_, lengths)| lengths)
        .collect()
}

/// Whether a pattern contains constructs that no automaton supports: look-around and back-references.
fn looks_around(pattern: &str) -> bool {
    let escapes = pattern.replace("\\\\", "");
    ["(?=", "(?!", "(?<=", "(?<!", "\\k<"]
        .iter()
        .any(|part| escapes.contains(part))
        || escapes
            .split('\\')
            .skip(1)
            .any(|rest| rest.starts_with(|first: char| ('1'..='9').contains(&first)))
}

/// Bounds numbers that have no bounds.
fn bound_numbers(kept: &mut Map<String, Value>) {
    let Some(kind) = kept.get("type") else { return };
    let (integer, number) = (names(kind, "integer"), names(kind, "number"));
    if !(integer || number)
        || ["enum", "const"]
            .iter()
            .any(|keyword| kept.contains_key(*keyword))
    {
        return;
    }
    let bound = |keywords: [&str; 2]| {
        keywords
            .iter()
            .find_map(|keyword| kept.get(*keyword)?.as_f64())
    };
    let least = bound(["minimum", "exclusiveMinimum"]);
    let most = bound(["maximum", "exclusiveMaximum"]);
    let tiny = |bound: Option<f64>| bound.is_some_and(|bound| bound != 0.0 && bound.abs() < TINY);
    let decimals = number && !kept.contains_key("multipleOf") && !tiny(least) && !tiny(most);
    if least.is_none() {
        let beyond = most
            .filter(|&most| most <= -NUMBER_MAX)
            .map_or(NUMBER_MAX, |most| -most * 10.0);
        kept.insert("minimum".to_owned(), json!(-beyond));
    }
    if most.is_none() {
        let beyond = least
            .filter(|&least| least >= NUMBER_MAX)
            .map_or(NUMBER_MAX, |least| least * 10.0);
        kept.insert("maximum".to_owned(), json!(beyond));
    }
    if decimals {
        kept.insert("multipleOf".to_owned(), json!(LAST_DECIMAL));
    }
}

/// Whether a lexer supports steps of this size: it computes the remainder of each digit in 32 bits (derivre 0.3,
/// `RemainderIs`).
fn is_countable(step: f64) -> bool {
    (0..=DECIMALS_MAX).any(|decimals| {
        let place = 10f64.powi(decimals);
        let whole = (step * place).round();
        let exact = (step * place - whole).abs() <= 1e-9 * whole.abs();
        exact && whole >= 1.0 && whole * 10.0 + 9.0 * place <= f64::from(u32::MAX)
    })
}

/// A schema or null, in the notation of OpenAPI 3.0.
fn or_null(mut kept: Map<String, Value>) -> Value {
    if let Some(list) = kept.get_mut("enum").and_then(Value::as_array_mut)
        && !list.contains(&Value::Null)
    {
        list.push(Value::Null);
    }
    match kept.get_mut("type") {
        Some(Value::Array(kinds)) => kinds.push("null".into()),
        Some(kind) => *kind = json!([kind.take(), "null"]),
        None => return json!({"anyOf": [kept, {"type": "null"}]}),
    }
    Value::Object(kept)
}

/// Any value, with finite numbers.
fn any_value() -> Value {
    let again = json!({"$ref": format!("#/$defs/{ANY}")});
    let mut number = Map::from_iter([("type".to_owned(), Value::from("number"))]);
    bound_numbers(&mut number);
    json!({"anyOf": [
        {"type": ["null", "boolean", "string"]},
        number,
        {"type": "array", "items": again},
        {"type": "object", "additionalProperties": again},
    ]})
}

/// Whether the properties of one object are described in several places, each of which would rule out the others'.
pub fn is_combined(schema: &Value) -> bool {
    let many = |keyword: &str| {
        schema
            .get(keyword)
            .and_then(Value::as_array)
            .is_some_and(|list| list.len() > 1)
    };
    let properties = schema.get("properties");
    let is_own = |name: &Value| {
        name.as_str()
            .is_some_and(|name| properties.is_some_and(|all| all.get(name).is_some()))
    };
    // An alternative that only requires some of the properties names no other.
    let names_more = |schema: &Value| match schema {
        Value::Array(list) => list.iter().any(|schema| {
            schema.as_object().is_none_or(|map| {
                map.iter().any(|(key, value)| match key.as_str() {
                    "type" => false,
                    "required" => !value
                        .as_array()
                        .is_some_and(|names| names.iter().all(is_own)),
                    _ => true,
                })
            })
        }),
        _ => true,
    };
    many("allOf")
        || properties.is_some()
            && COMBINING
                .iter()
                .any(|keyword| schema.get(keyword).is_some_and(names_more))
        || parts(schema).any(is_combined)
}

/// The direct subschemas of a schema.
fn parts(schema: &Value) -> impl Iterator<Item = &Value> {
    schema
        .as_object()
        .into_iter()
        .flatten()
        .flat_map(|(keyword, value)| match value {
            Value::Object(map) if MAPS.contains(&keyword.as_str()) => map.values().collect(),
            Value::Array(list) if SCHEMAS.contains(&keyword.as_str()) => list.iter().collect(),
            Value::Object(_) if SCHEMAS.contains(&keyword.as_str()) => vec![value],
            _ => Vec::new(),
        })
}

/// Calls `act` with each direct subschema of a schema.
pub fn for_each_part(schema: &mut Value, act: &mut dyn FnMut(&mut Value)) {
    for (keyword, value) in schema.as_object_mut().into_iter().flatten() {
        match value {
            Value::Object(map) if MAPS.contains(&keyword.as_str()) => {
                map.values_mut().for_each(&mut *act);
            }
            Value::Array(list) if SCHEMAS.contains(&keyword.as_str()) => {
                list.iter_mut().for_each(&mut *act);
            }
            Value::Object(_) if SCHEMAS.contains(&keyword.as_str()) => act(value),
            _ => {}
        }
    }
}

/// Whether no value matches both: by their types, their values, or those of a property that both require.
fn are_disjoint(root: &Value, one: &Value, other: &Value) -> bool {
    let (one, other) = (resolved(root, one), resolved(root, other));
    let kind = |schema: &Value| match schema.get("type")?.as_str()? {
        "integer" => Some("number".to_owned()),
        kind => Some(kind.to_owned()),
    };
    if let (Some(one), Some(other)) = (kind(one), kind(other))
        && one != other
    {
        return true;
    }
    if let (Some(one), Some(other)) = (values(one), values(other)) {
        return one.iter().all(|value| !other.contains(value));
    }
    let requires = |schema: &Value, name: &str| {
        schema
            .get("required")
            .and_then(Value::as_array)
            .is_some_and(|list| list.iter().any(|key| key == name))
    };
    let Some(properties) = one.get("properties").and_then(Value::as_object) else {
        return false;
    };
    properties.iter().any(|(name, schema)| {
        let Some(second) = other
            .get("properties")
            .and_then(|properties| properties.get(name))
        else {
            return false;
        };
        let (Some(first), Some(second)) = (values(schema), values(second)) else {
            return false;
        };
        requires(one, name)
            && requires(other, name)
            && first.iter().all(|value| !second.contains(value))
    })
}

/// The target of a schema's reference, if it has one.
fn resolved<'schema>(root: &'schema Value, mut schema: &'schema Value) -> &'schema Value {
    for _ in 0..REFERENCES_MAX {
        let target = schema
            .get("$ref")
            .and_then(Value::as_str)
            .and_then(|path| root.pointer(path.strip_prefix('#')?));
        match target {
            Some(target) => schema = target,
            None => break,
        }
    }
    schema
}

fn values(schema: &Value) -> Option<Vec<&Value>> {
    let one = schema.get("const").map(|value| vec![value]);
    one.or_else(|| Some(schema.get("enum")?.as_array()?.iter().collect()))
}

fn names(kind: &Value, wanted: &str) -> bool {
    kind == wanted
        || kind
            .as_array()
            .is_some_and(|kinds| kinds.iter().any(|kind| kind == wanted))
}

/// A count of characters, items or properties; clients also write it as a float.
fn count(map: &Map<String, Value>, keyword: &str) -> Option<u64> {
    let value = map.get(keyword)?;
    let whole = |float: f64| {
        format!("{:.0}", float.clamp(0.0, f64::from(u32::MAX)))
            .parse()
            .ok()
    };
    value.as_u64().or_else(|| value.as_f64().and_then(whole))
}

const fn name_of(value: &Value) -> &'static str {
    match value {
        Value::Array(_) => "a list",
        Value::Bool(_) => "a boolean",
        Value::Null => "null",
        Value::Number(_) => "a number",
        Value::Object(_) => "an object",
        Value::String(_) => "a text",
    }
}

/// Keywords that are kept unchanged.
const VALUES: [&str; 10] = [
    "$ref",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "maximum",
    "minimum",
    "multipleOf",
    "required",
    "type",
];

/// Keywords that narrow a schema and that a grammar cannot express.
const NARROWING: [&str; 11] = [
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "unevaluatedItems",
    "uniqueItems",
];

/// Keywords that refer to a schema elsewhere, which is not resolved.
const REFUSED: [&str; 2] = ["$dynamicRef", "$recursiveRef"];

/// Keywords that describe the properties of an object.
const OBJECTS: [&str; 3] = ["additionalProperties", "patternProperties", "properties"];

/// Keywords that add to the properties of the enclosing object.
const COMBINING: [&str; 4] = ["$ref", "allOf", "anyOf", "oneOf"];

/// Enforced formats of texts: those supported by the library.
const FORMATS: [&str; 10] = [
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uuid",
];

/// The name of [`any_value`] among the definitions.
const ANY: &str = "cotenant any";

/// Default maximum of a number. Our choice: every JSON library reads 15 digits exactly.
const NUMBER_MAX: f64 = 1e15;

/// Default last decimal place of a number.
const LAST_DECIMAL: f64 = 1e-8;

/// Decimal places that a lexer can count; nine digits fit 32 bits.
const DECIMALS_MAX: i32 = 8;

/// Bounds nearer to zero are left unchanged: no number with this few decimal places may lie between them.
const TINY: f64 = 1e-6;

/// Total length of bounded texts, each pair of bounds counted once: the lexer has a state per character, and up to four
/// for each character that is generated.
const LENGTHS_MAX: u64 = 1000;

/// Items or properties. Our choice: more than fit a context of 8192 tokens.
const COUNT_MAX: u64 = 10_000;

/// Limit of references followed in a row.
const REFERENCES_MAX: usize = 8;

/// Length of a chain of references that counts as a loop.
const CHAIN_MAX: usize = 64;

/// The longest texts of unbounded formats: nanoseconds with an offset, and as much for a duration.
const LONGEST: [(&str, u64); 3] = [("date-time", 35), ("duration", 35), ("time", 24)];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_keyword_is_kept_let_through_by_name_or_refused() {
        let named = |schema: Value| {
            KeptSchema::of(&schema).map(|kept| kept.let_through.into_iter().collect::<Vec<_>>())
        };
        let text = |more: Value| {
            let mut schema = json!({"type": "string"});
            schema
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            schema
        };
        // Fully enforced.
        for schema in [
            json!({"type": "integer", "minimum": 1, "maximum": 3, "exclusiveMinimum": 0, "exclusiveMaximum": 9, "multipleOf": 2}),
            json!({"enum": [1, "a"], "const": 1}),
            json!({"$ref": "#/$defs/a", "$defs": {"a": {}}, "definitions": {"b": true}}),
            json!({"anyOf": [{"type": "null"}], "allOf": [{"type": "null"}]}),
            json!({"oneOf": [{"type": "null"}, {"type": "string"}]}),
            json!({"type": "array", "items": {}, "prefixItems": [{}], "minItems": 1, "maxItems": 2, "uniqueItems": false}),
            json!({"properties": {"a": {}}, "required": ["a"], "additionalProperties": false, "patternProperties": {"^x": {}}}),
            json!({"type": "object", "minProperties": 1, "maxProperties": 2}),
            json!({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": false}),
            text(
                json!({"minLength": 1, "maxLength": 1000, "pattern": "^a\\(?b", "nullable": true}),
            ),
            json!({"type": "integer", "format": "int64"}),
            // Annotations and extensions do not constrain an answer.
            text(
                json!({"title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": true, "readOnly": true,
                "writeOnly": true, "$schema": "s", "$id": "i", "$anchor": "a", "$comment": "c", "contentMediaType": "m",
                "contentEncoding": "e", "discriminator": {"propertyName": "k"}, "x-order": 1}),
            ),
        ] {
            assert_eq!(named(schema.clone()), Ok(vec![]), "{schema}");
        }
        for format in FORMATS {
            assert_eq!(named(text(json!({"format": format}))), Ok(vec![]));
        }
        // Tolerated, and named.
        for (schema, names) in [
            (text(json!({"format": "password"})), vec!["format"]),
            (text(json!({"pattern": "^(?!a)b"})), vec!["pattern"]),
            (text(json!({"pattern": "(a)\\1"})), vec!["pattern"]),
            (text(json!({"maxLength": 1001})), vec!["maxLength"]),
            (
                json!({"type": "array", "uniqueItems": true, "contains": {}, "minContains": 1, "maxContains": 2}),
                vec!["contains", "maxContains", "minContains", "uniqueItems"],
            ),
            (
                json!({"type": "array", "maxItems": 10_001, "unevaluatedItems": false}),
                vec!["maxItems", "unevaluatedItems"],
            ),
            (
                json!({"not": {"type": "null"}, "if": {}, "then": {}, "else": {}}),
                vec!["if", "not"],
            ),
            (
                json!({"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}, "propertyNames": {"maxLength": 3}}),
                vec![
                    "dependencies",
                    "dependentRequired",
                    "dependentSchemas",
                    "propertyNames",
                ],
            ),
            (
                json!({"properties": {"a": {}, "b": {}}, "minProperties": 1, "maxProperties": 1}),
                vec!["maxProperties", "minProperties"],
            ),
            (
                json!({"allOf": [{}, {}], "unevaluatedProperties": false}),
                vec!["unevaluatedProperties"],
            ),
            (
                json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
                vec!["oneOf"],
            ),
            (
                json!({"type": "integer", "minimum": "low", "maximum": {}}),
                vec!["maximum", "minimum"],
            ),
            (json!({"type": "number", "multipleOf": 0.01}), vec![]),
            (
                json!({"type": "number", "multipleOf": 1e-10}),
                vec!["multipleOf"],
            ),
            (
                json!({"type": "integer", "multipleOf": 4_000_000_000u64}),
                vec!["multipleOf"],
            ),
        ] {
            assert_eq!(named(schema.clone()), Ok(names), "{schema}");
        }
        // Refused.
        for (schema, error) in [
            (json!(false), "it is `false`, not an object"),
            (json!({"items": [[1]]}), "it is a list, not an object"),
            (json!({"$ref": "#"}), "the reference `#` is circular"),
            (
                json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "type": "null"}),
                "the reference `#/$defs/b` is circular",
            ),
            (
                json!({"$dynamicRef": "#a"}),
                "`$dynamicRef` is not supported",
            ),
            (
                text(json!({"minLength": 1001})),
                "`minLength` is 1001, above the limit of 1000",
            ),
            (
                json!({"minItems": 10_001}),
                "`minItems` is 10001, above the limit of 10000",
            ),
        ] {
            assert_eq!(named(schema).unwrap_err().to_string(), error);
        }
    }

    /// Pydantic's union with a discriminator, which makes the alternatives disjoint.
    #[test]
    fn one_of_is_kept_where_a_property_tells_the_schemas_apart() {
        let of = |kind: &str| json!({"type": "object", "properties": {"kind": {"const": kind, "type": "string"}}, "required": ["kind"]});
        let union = |second: &str| json!({"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": of("cat"), "B": of(second)}});
        assert!(
            KeptSchema::of(&union("dog"))
                .unwrap()
                .let_through
                .is_empty()
        );
        assert_eq!(
            KeptSchema::of(&union("cat")).unwrap().let_through,
            BTreeSet::from(["oneOf"])
        );
    }

    #[test]
    fn lengths_are_kept_from_the_shortest_on_as_far_as_all_together_are_in_bounds() {
        let schema = json!({"type": "object", "properties": {
            "a": {"type": "string", "maxLength": 600}, "b": {"type": "string", "maxLength": 450},
            "c": {"type": "string", "maxLength": 450}, "d": {"type": "string", "maxLength": 20},
        }});
        let kept = KeptSchema::of(&schema).unwrap();
        assert_eq!(kept.let_through, BTreeSet::from(["maxLength"]));
        let length = |name: &str| kept.schema["properties"][name]["maxLength"].clone();
        assert_eq!(
            [length("a"), length("b"), length("c"), length("d")],
            [json!(null), json!(450), json!(450), json!(20)]
        );
        // A value or a property may have the name of a keyword.
        let odd = json!({"properties": {"minLength": {"const": {"minLength": 9999}}}});
        assert_eq!(
            KeptSchema::of(&odd).unwrap().schema["properties"],
            odd["properties"]
        );
    }

    #[test]
    fn the_document_names_each_keyword() {
        let page = include_str!("../../docs/structured-output.md");
        let all = SCHEMAS
            .iter()
            .chain(&VALUES)
            .chain(&NARROWING)
            .chain(&REFUSED)
            .chain(&FORMATS);
        for keyword in all {
            assert!(page.contains(&format!("`{keyword}`")), "{keyword}");
        }
        for number in [LENGTHS_MAX.to_string(), "10,000".to_owned()] {
            assert!(page.contains(&number), "{number}");
        }
    }
}
