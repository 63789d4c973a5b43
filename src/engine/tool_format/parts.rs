//! Parts of grammars and schemas shared by the formats of calls.

use serde_json::Value;

use crate::schema::lay_out;

/// A field of a call or an object.
pub(super) struct Field {
    /// The grammar of its name and its value.
    pub(super) grammar: String,
    pub(super) is_required: bool,
}

/// The expression of these fields in their order, with `separator` between those that are present. Its rules begin with
/// `name`.
pub(super) fn in_sequence(
    rules: &mut String,
    name: &str,
    fields: &[Field],
    separator: &str,
) -> String {
    let between = literal(separator);
    // `first` and `next` stand for the fields from one on, of which the first has no separator before it.
    for (at, field) in fields.iter().enumerate() {
        let after = at + 1;
        let skipped = |rule: &str| {
            if field.is_required {
                String::new()
            } else {
                format!(" | {name}_{rule}_{after}")
            }
        };
        let grammar = &field.grammar;
        rules.push_str(&format!(
            "{name}_first_{at}: {grammar} {name}_next_{after}{}\n\
             {name}_next_{at}: {between} {grammar} {name}_next_{after}{}\n",
            skipped("first"),
            skipped("next")
        ));
    }
    let end = fields.len();
    rules.push_str(&format!(
        "{name}_first_{end}: \"\"\n{name}_next_{end}: \"\"\n"
    ));
    format!("{name}_first_0")
}

/// The properties of an object: name, schema, and whether it is required.
pub(super) fn properties(schema: &Value) -> impl Iterator<Item = (&str, &Value, bool)> {
    let properties = schema.get("properties").and_then(Value::as_object);
    let required = schema.get("required").and_then(Value::as_array);
    properties.into_iter().flatten().map(move |(key, schema)| {
        let is_required = required.is_some_and(|required| required.iter().any(|name| name == key));
        (key.as_str(), schema, is_required)
    })
}

/// The schema of one part, with the definitions of the enclosing schema that it may refer to.
pub(super) fn schema_alone(schema: &Value, whole: &Value) -> Value {
    let mut schema = schema.clone();
    lay_out(&mut schema);
    for shared in ["$defs", "definitions"] {
        if let (Some(map), Some(definitions)) = (schema.as_object_mut(), whole.get(shared)) {
            map.insert(shared.to_owned(), definitions.clone());
        }
    }
    schema
}

/// Length limits of a text as a regular-expression repetition.
pub(super) fn repetitions(schema: &Value) -> String {
    bounds(schema, "minLength", "maxLength").map_or_else(
        || "*".to_owned(),
        |(least, most)| format!("{{{least},{most}}}"),
    )
}

/// The least and the greatest number by these keywords, the latter empty if unbounded; `None` if neither limits it.
pub(super) fn bounds(schema: &Value, least: &str, most: &str) -> Option<(u64, String)> {
    let bound = |keyword: &str| schema.get(keyword).and_then(Value::as_u64);
    match (bound(least), bound(most)) {
        (None | Some(0), None) => None,
        (least, most) => Some((
            least.unwrap_or(0),
            most.map_or_else(String::new, |most| most.to_string()),
        )),
    }
}

/// A text as a grammar literal, quoted as in JSON.
pub(super) fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
