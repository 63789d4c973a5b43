//! Grammar-ready JSON schemas: closed, and with a fixed layout.

use serde_json::{Value, json};

use cotenant_conversation::schema::{KeptSchema, SchemaError, for_each_part, is_combined};

/// Reason why an answer of this form cannot be guaranteed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// The schema cannot be a form of an answer.
    #[error(transparent)]
    Form(#[from] SchemaError),
    /// The library rejects the schema: a keyword contradicts others.
    #[error("{message}")]
    Schema {
        /// Message of the library.
        message: String,
    },
    /// The required tool is not among the given ones.
    #[error("no tool is named `{name}`")]
    UnknownTool {
        /// The name.
        name: String,
    },
    /// A call is required, but there are no tools.
    #[error("there are no tools to call")]
    NoTools,
    /// Its grammar exceeds its limit of memory or time.
    #[error("its grammar exceeds the allowed memory or time; simplify it")]
    TooLarge,
    /// The client disconnected while it was built.
    #[error("the client disconnected")]
    Gone,
    /// The process that builds grammars cannot be used.
    #[error("the helper process cannot be used: {message}")]
    Helper {
        /// Description of the failure.
        message: String,
    },
}

/// The schema with its JSON layout: that of Python's `json.dumps`, the most common in training data, which also
/// prevents endless white space by weak models.
///
/// # Errors
/// It is not a schema, or is unsatisfiable.
pub(super) fn with_layout(schema: &Value) -> Result<Value, ConstraintError> {
    let mut schema = KeptSchema::of(schema)?.schema;
    if !is_combined(&schema) {
        close(&mut schema);
    }
    lay_out(&mut schema);
    Ok(schema)
}

/// Sets the JSON layout of this schema.
pub(super) fn lay_out(schema: &mut Value) {
    if let Some(map) = schema.as_object_mut() {
        let layout = json!({
            "whitespace_flexible": false,
            "item_separator": ", ",
            "key_separator": ": ",
            // Equivalent if no value matches two of them; otherwise listed among the unsupported keywords.
            "coerce_one_of": true,
        });
        map.insert(LAYOUT.to_owned(), layout);
    }
}

/// Allows only named properties if a schema leaves it open: otherwise models invent further keys. OpenAI's strict mode
/// demands this of clients, and llama.cpp reads schemas in the same way.
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

/// Keywords that allow further properties of an object.
const OPENING: [&str; 2] = ["additionalProperties", "patternProperties"];
