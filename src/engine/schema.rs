//! JSON schemas as grammars take them: closed, and with a layout.

use serde_json::{Value, json};

use cotenant_conversation::schema::{KeptSchema, SchemaError, for_each_part, is_combined};

/// Why an answer of that form cannot be promised.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// The schema cannot be the form of an answer.
    #[error(transparent)]
    Form(#[from] SchemaError),
    /// The library cannot keep the schema: a keyword that contradicts others.
    #[error("{message}")]
    Schema {
        /// What it said.
        message: String,
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
/// When it is no schema, or asks for what no answer can be.
pub(super) fn with_layout(schema: &Value) -> Result<Value, ConstraintError> {
    let mut schema = KeptSchema::of(schema)?.schema;
    if !is_combined(&schema) {
        close(&mut schema);
    }
    lay_out(&mut schema);
    Ok(schema)
}

/// Says how JSON by this schema is laid out.
pub(super) fn lay_out(schema: &mut Value) {
    if let Some(map) = schema.as_object_mut() {
        let layout = json!({
            "whitespace_flexible": false,
            "item_separator": ", ",
            "key_separator": ": ",
            // Where no value is of two of them it is the same; elsewhere it is named among what is not kept.
            "coerce_one_of": true,
        });
        map.insert(LAYOUT.to_owned(), layout);
    }
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
    for_each_part(schema, &mut |schema| close(schema));
}

/// The library's keyword for the layout of the JSON.
const LAYOUT: &str = "x-guidance";

/// Keywords that say which other properties an object may have.
const OPENING: [&str; 2] = ["additionalProperties", "patternProperties"];
