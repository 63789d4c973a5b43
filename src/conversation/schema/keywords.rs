//! JSON Schema keywords by the form of their values.

/// Keywords whose value is a schema, or a list or a map of them.
pub(super) const SCHEMAS: [&str; 11] = [
    "$defs",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "definitions",
    "items",
    "oneOf",
    "patternProperties",
    "prefixItems",
    "properties",
];

/// Keywords whose value is a map of schemas.
pub(super) const MAPS: [&str; 4] = ["$defs", "definitions", "patternProperties", "properties"];

/// Keywords whose value is a number.
pub(super) const NUMBERS: [&str; 11] = [
    "exclusiveMaximum",
    "exclusiveMinimum",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
];
