//! Tests of constrained answers.

use super::*;
use crate::{
    sampling::Sampler,
    sampling::Sampling,
    test_vocabulary::{CHANNEL_TOKENS, TestVocabulary},
};

fn tokenizer() -> Tokenizer {
    Tokenizer::from_header(&TestVocabulary::chatml().header()).unwrap()
}

fn schema(schema: Value) -> AnswerForm {
    AnswerForm::JsonSchema {
        schema,
        field: "format",
    }
}

fn compile(
    form: &AnswerForm,
    tools: &[Value],
    format: ToolFormat,
) -> Result<Box<dyn TokenMask>, ConstraintError> {
    masked(form, tools, format, After::Nothing)
}

fn masked(
    form: &AnswerForm,
    tools: &[Value],
    format: ToolFormat,
    after: After,
) -> Result<Box<dyn TokenMask>, ConstraintError> {
    masked_by(&tokenizer(), form, tools, format, after)
}

fn masked_by(
    tokenizer: &Tokenizer,
    form: &AnswerForm,
    tools: &[Value],
    format: ToolFormat,
    after: After,
) -> Result<Box<dyn TokenMask>, ConstraintError> {
    let setup = || Setup {
        words: tokenizer.pieces().clone(),
        ends: tokenizer.ends().collect(),
        template: None,
    };
    let helper = Helper::new(None);
    mask(
        &helper,
        tokenizer,
        setup,
        form,
        (tools, format),
        after,
        Client::PATIENT,
    )
}

/// Returns the answer of a model without preferences: any token that the form allows, by the seed. With an odd
/// seed, the model also chooses the forced tokens.
fn babble(mask: Box<dyn TokenMask>, seed: u64, most: usize) -> Option<String> {
    babble_by(&tokenizer(), mask, seed, most)
}

fn babble_by(
    tokenizer: &Tokenizer,
    mut mask: Box<dyn TokenMask>,
    seed: u64,
    most: usize,
) -> Option<String> {
    let mut sampler = Sampler::new(Sampling {
        temperature: 1.0,
        seed,
        ..Sampling::GREEDY
    })
    .unwrap();
    let mut said = Vec::new();
    for _ in 0..most {
        // More logits than tokens, as in some models.
        let mut logits = vec![0.0; tokenizer.vocabulary() as usize + 7];
        mask.apply(&mut logits).unwrap();
        let token = sampler.next(&logits, &[]).unwrap();
        if tokenizer.is_end(token) {
            return Some(tokenizer.decode(&said));
        }
        said.push(token);
        mask.accept(token, tokenizer.bytes(token)).unwrap();
        loop {
            if mask.is_complete().unwrap() {
                return Some(tokenizer.decode(&said));
            }
            let forced = mask.force(&mut |bytes| {
                if seed % 2 == 1 {
                    return Vec::new();
                }
                tokenizer.encode_ahead(bytes)
            });
            let forced = forced.unwrap();
            said.extend_from_slice(&forced);
            if forced.is_empty() {
                break;
            }
        }
    }
    None
}

/// The names and punctuation of a call are forced; the model chooses the rest.
#[test]
fn what_a_form_leaves_no_choice_about_comes_at_once() {
    let wanted = json!({
        "type": "object",
        "properties": {"temperature_in_degrees": {"const": 21}, "brightness": {"enum": [10, 20]}},
        "required": ["temperature_in_degrees", "brightness"],
        "additionalProperties": false,
    });
    let tokenizer = tokenizer();
    let mut mask = compile(&schema(wanted), &[], ToolFormat::Tagged).unwrap();
    let first = tokenizer.encode("{").unwrap()[0];
    mask.apply(&mut vec![0.0; tokenizer.vocabulary() as usize])
        .unwrap();
    mask.accept(first, tokenizer.bytes(first)).unwrap();
    assert!(!mask.is_complete().unwrap());
    let mut bytes = Vec::new();
    let forced = mask.force(&mut |forced| {
        bytes = forced.to_vec();
        tokenizer.encode_ahead(forced)
    });
    let said = tokenizer.decode(&forced.unwrap());
    let all = String::from_utf8(bytes).unwrap();
    assert!(
        all.contains("temperature_in_degrees") && all.starts_with(&said) && said != all,
        "{all}: {said}"
    );
    assert!(!mask.is_complete().unwrap(), "the model goes on from there");
}

#[test]
fn whatever_the_model_thinks_its_answer_is_of_the_form() {
    let wanted = json!({
        "type": "object",
        "properties": {
            "room": {"enum": ["kitchen", "hall"]},
            "on": {"type": "boolean"},
            "level": {"type": "integer", "minimum": 0, "maximum": 100},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        },
        "required": ["room", "on", "level"],
        "additionalProperties": false,
        "$defs": {"tag": {"type": "string", "maxLength": 3}},
    });
    for seed in 0..20 {
        let mask = compile(&schema(wanted.clone()), &[], ToolFormat::Tagged).unwrap();
        let text = babble(mask, seed, 400).expect("it ends by itself");
        let value: Value = serde_json::from_str(&text).unwrap();
        assert!(
            ["kitchen", "hall"].contains(&value["room"].as_str().unwrap()),
            "{text}"
        );
        assert!(value["on"].is_boolean(), "{text}");
        assert!(
            (0..=100).contains(&value["level"].as_i64().unwrap()),
            "{text}"
        );
        assert!(
            value["tags"].as_array().is_none_or(|tags| tags.len() <= 2),
            "{text}"
        );
    }
}

#[test]
fn objects_have_no_keys_of_the_model_s_own_making() {
    let named = json!({"a": {"type": "boolean"}});
    let inner = json!({"type": "object", "properties": named, "required": ["a"]});
    let wanted = json!({
        "type": "object",
        "properties": {"one": inner, "many": {"type": "array", "items": {"$ref": "#/$defs/x"}, "maxItems": 1}},
        "required": ["one", "many"],
        "$defs": {"x": inner},
    });
    for seed in 0..20 {
        let mask = compile(&schema(wanted.clone()), &[], ToolFormat::Tagged).unwrap();
        let text = babble(mask, seed, 400).expect("it ends by itself");
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value.as_object().unwrap().len(), 2, "{text}");
        assert_eq!(value["one"].as_object().unwrap().len(), 1, "{text}");
    }
    let closed = |schema: Value| with_layout(&schema).unwrap()["additionalProperties"].clone();
    assert_eq!(closed(json!({"properties": {}})), json!(false));
    // Explicit settings stay, and so do schemas without properties.
    for open in [
        json!({"properties": {}, "additionalProperties": true}),
        json!({"type": "object"}),
    ] {
        assert!(closed(open)["$ref"].is_string());
    }
    // An object described in several places: each would rule out the others' properties.
    for combined in [
        json!({"type": "object", "properties": named, "anyOf": [
            {"required": ["a"]}, {"type": "object", "properties": {"b": {}}},
        ]}),
        json!({"allOf": [
            {"type": "object", "properties": named}, {"type": "object", "properties": {"b": {}}, "patternProperties": {"^x": {}}},
        ]}),
    ] {
        assert_eq!(with_layout(&combined).unwrap()["anyOf"], combined["anyOf"]);
        assert_eq!(with_layout(&combined).unwrap()["allOf"], combined["allOf"]);
        assert_eq!(closed(combined), Value::Null);
    }
    // A self-contained object can be closed, and alternatives that name no more leave it unchanged.
    for one in [
        json!({"allOf": [{"properties": named}, {"properties": {"b": {}}}]}),
        json!({"properties": named, "anyOf": [{"required": ["a"]}]}),
    ] {
        assert_eq!(closed(one), json!(false));
    }
    // A property may have the name of a keyword, and values are not schemas.
    let odd = json!({"properties": {"properties": {"const": {"properties": {}}}}});
    let odd = with_layout(&odd).unwrap();
    assert_eq!(
        odd["properties"]["properties"],
        json!({"const": {"properties": {}}})
    );
}

#[test]
fn calls_are_of_the_form_that_the_model_writes() {
    use crate::answer::{AnswerReader, AnswerStyle, Thoughts};
    use cotenant_conversation::AnswerPart;
    let tool = |name: &str| {
        json!({"type": "function", "function": {"name": name, "parameters": {
            "type": "object",
            "properties": {
                "room": {"type": "string", "enum": ["kitchen", "hall"]},
                "level": {"type": "integer", "minimum": 0, "maximum": 9},
                "note": {"type": "string", "maxLength": 2},
            },
            "required": ["room", "level"],
            "additionalProperties": false,
        }}})
    };
    let tools = [
        tool("light"),
        tool("fan \"2\""),
        json!({"type": "function", "function": {"name": "stop"}}),
        json!({"type": "function", "function": {"name": "halt", "parameters": {}}}),
        json!({"type": "function", "function": {"name": "idle", "parameters": {"type": "object"}}}),
        json!({"type": "function", "function": {"name": "turn", "parameters": {
            "properties": {"on": {"type": "boolean"}}, "required": ["on"],
        }}}),
    ];
    let formats = [
        ToolFormat::Bare,
        ToolFormat::Channels,
        ToolFormat::Gemma,
        ToolFormat::Listed,
        ToolFormat::Mistral,
        ToolFormat::Parameters,
        ToolFormat::Python,
        ToolFormat::Tagged,
    ];
    for format in formats {
        for (name, expected) in [(None, None), (Some("light".to_owned()), Some("light"))] {
            for seed in 0..8 {
                let mask =
                    compile(&AnswerForm::ToolCall { name: name.clone() }, &tools, format).unwrap();
                let Some(text) = babble(mask, seed, 3000) else {
                    continue;
                };
                let style = AnswerStyle {
                    thoughts: match format {
                        ToolFormat::Channels => Thoughts::Channels { in_text: false },
                        _ => Thoughts::None,
                    },
                    tools: Some(format),
                };
                let mut reader = AnswerReader::new(&tools);
                reader.set_style(style);
                let mut parts = reader.push(&text);
                parts.extend(reader.finish(false));
                parts.retain(|part| !matches!(part, AnswerPart::Reasoning(_)));
                let [AnswerPart::ToolCall { name, arguments }] = parts.as_slice() else {
                    panic!("{format:?}: {text:?}: {parts:?}");
                };
                assert!(expected.is_none_or(|expected| expected == name), "{text}");
                let arguments: Value = serde_json::from_str(arguments).unwrap();
                if ["stop", "halt", "idle"].contains(&name.as_str()) {
                    assert_eq!(arguments, json!({}), "{text}");
                } else if name == "turn" {
                    assert!(arguments["on"].is_boolean(), "{text}");
                } else {
                    assert!(
                        ["kitchen", "hall"].contains(&arguments["room"].as_str().unwrap()),
                        "{text}"
                    );
                    assert!(
                        (0..=9).contains(&arguments["level"].as_i64().unwrap()),
                        "{text}"
                    );
                }
            }
        }
    }
}

/// The model thinks or not, and then writes a message of the form.
#[test]
fn json_of_gpt_oss_is_in_the_channel_for_the_user() {
    use crate::answer::{AnswerReader, AnswerStyle, Thoughts};
    use cotenant_conversation::AnswerPart;
    let vocabulary = TestVocabulary {
        control: CHANNEL_TOKENS.into(),
        ..TestVocabulary::chatml()
    };
    let tokenizer = Tokenizer::from_header(&vocabulary.header()).unwrap();
    let wanted = json!({"type": "object", "properties": {"room": {"type": "string", "minLength": 20, "maxLength": 40}}, "required": ["room"]});
    let mut thought = 0;
    for seed in 0..20 {
        let form = schema(wanted.clone());
        let mask = masked_by(
            &tokenizer,
            &form,
            &[],
            ToolFormat::Channels,
            After::Channels,
        );
        let Some(text) = babble_by(&tokenizer, mask.unwrap(), seed, 3000) else {
            continue;
        };
        let mut reader = AnswerReader::new(&[]);
        reader.set_style(AnswerStyle {
            thoughts: Thoughts::Channels { in_text: false },
            tools: None,
        });
        let mut parts = reader.push(&text);
        parts.extend(reader.finish(false));
        let before = parts.len();
        parts.retain(|part| !matches!(part, AnswerPart::Reasoning(_)));
        thought += usize::from(before > parts.len());
        let said = parts.iter().map(|part| match part {
            AnswerPart::Text(text) => text.as_str(),
            other => panic!("{text:?}: {other:?}"),
        });
        let said: Value = serde_json::from_str(&said.collect::<String>()).unwrap();
        let length = said["room"].as_str().unwrap().chars().count();
        assert!((20..=40).contains(&length), "{text}");
    }
    assert!(thought > 0, "some of them think first");
}

/// Any token may follow in a text, also the control tokens around others.
#[test]
fn calls_of_gemma_4_nest_and_no_text_ends_them() {
    use crate::answer::{AnswerReader, AnswerStyle, Thoughts};
    use cotenant_conversation::AnswerPart;
    let fixture = "../../tests/fixtures/gemma4-tokens/vocabulary.gguf";
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(fixture);
    let header = crate::gguf::Header::read(&file).unwrap();
    let tokenizer = Tokenizer::from_header(&header).unwrap();
    let tool = json!({"type": "function", "function": {"name": "plan a", "parameters": {
        "type": "object",
        "properties": {
            "Zone": {"type": "object", "properties": {"b": {"type": "integer"}, "a:c": {"type": "boolean"}}, "required": ["b"]},
            "name": {"type": "string", "minLength": 8, "maxLength": 12},
            "list": {"type": "array", "items": {"type": ["string", "null"], "maxLength": 3}, "minItems": 1, "maxItems": 3},
            "kind": {"enum": ["x", 2, null, {"k": ["<tool_call|>"]}]},
            "next": {"$ref": "#/$defs/node"},
            "day": {"type": "string", "format": "date"},
            "either": {"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 0}]},
            "map": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 2}, "maxProperties": 1},
        },
        "required": ["Zone", "name", "list", "kind", "day", "map"],
        "$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}, "required": ["next"]}},
    }}});
    let tools = [tool];
    for seed in 0..40 {
        let form = AnswerForm::ToolCall { name: None };
        let mask = masked_by(&tokenizer, &form, &tools, ToolFormat::Gemma, After::Nothing).unwrap();
        let Some(text) = babble_by(&tokenizer, mask, seed, 3000) else {
            continue;
        };
        let begins = text.starts_with("<|tool_call>call:plan a{day:\"");
        assert!(begins && text.ends_with("}<tool_call|>"), "{text}");
        let mut reader = AnswerReader::new(&tools);
        reader.set_style(AnswerStyle {
            thoughts: Thoughts::None,
            tools: Some(ToolFormat::Gemma),
        });
        let mut parts = reader.push(&text);
        parts.extend(reader.finish(false));
        let [AnswerPart::ToolCall { name, arguments }] = parts.as_slice() else {
            panic!("{text:?}: {parts:?}");
        };
        assert_eq!(name, "plan a", "{text}");
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        let named = arguments["name"].as_str().unwrap();
        assert!((8..=12).contains(&named.chars().count()), "{text}");
        assert!(arguments["Zone"]["b"].is_number(), "{text}");
        let zone = &arguments["Zone"]["a:c"];
        assert!(zone.is_null() || zone.is_boolean(), "{text}");
        let list = arguments["list"].as_array().unwrap();
        assert!((1..=3).contains(&list.len()), "{text}");
        assert!(
            list.iter().all(|item| item.is_null() || item.is_string()),
            "{text}"
        );
        assert_eq!(arguments["day"].as_str().unwrap().len(), 10, "{text}");
        assert!(arguments["map"].as_object().unwrap().len() <= 1, "{text}");
        assert!(
            arguments
                .get("next")
                .is_none_or(|next| next.get("next").is_some()),
            "{text}"
        );
    }
    let name = json!({"type": "string"});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"name": name}, "required": ["name"],
    }}});
    let form = AnswerForm::ToolCall { name: None };
    let mut mask = masked_by(
        &tokenizer,
        &form,
        &[tool],
        ToolFormat::Gemma,
        After::Nothing,
    )
    .unwrap();
    let call = "<|tool_call>call:f{name:<|\"|>a<tool_call|>}<|channel><|\"|>}<tool_call|>";
    for token in tokenizer.encode_rendered(call, None).unwrap() {
        assert!(!mask.is_complete().unwrap());
        let mut logits = vec![0.0; tokenizer.vocabulary() as usize];
        mask.apply(&mut logits).unwrap();
        assert!(
            logits[token as usize].is_finite(),
            "{}",
            tokenizer.decode(&[token])
        );
        mask.accept(token, tokenizer.bytes(token)).unwrap();
    }
    assert!(mask.is_complete().unwrap());
}

#[test]
fn what_cannot_be_kept_is_refused_by_name() {
    let refused = |value: Value| {
        compile(&schema(value), &[], ToolFormat::Tagged)
            .err()
            .map(|error| error.to_string())
    };
    let kind = refused(json!({"type": "text"})).unwrap();
    assert!(kind.contains("text"), "{kind}");
    assert_eq!(refused(json!([1])).unwrap(), "it is a list, not an object");
    assert_eq!(
        refused(json!({"type": "array", "items": {"type": "string", "minLength": 1_000_000}}))
            .unwrap(),
        "`minLength` is 1000000, above the limit of 1000"
    );
    assert!(refused(json!({"$ref": "https://example.com/schema"})).is_some());
    assert_eq!(
        refused(json!({"$dynamicRef": "#x"})).unwrap(),
        "`$dynamicRef` is not supported"
    );
    let pattern = refused(json!({"type": "string", "pattern": "("})).unwrap();
    assert!(pattern.contains("unclosed group"), "{pattern}");
    let none = compile(
        &AnswerForm::ToolCall { name: None },
        &[],
        ToolFormat::Tagged,
    )
    .err();
    assert_eq!(none, Some(ConstraintError::NoTools));
    for fine in [
        json!({}),
        json!(true),
        json!({"type": "object", "title": "x", "x-guidance": {"lenient": 7}}),
    ] {
        assert_eq!(refused(fine), None);
    }
}

#[test]
fn each_keyword_that_is_kept_is_kept_whatever_the_model_thinks() {
    type Holds = fn(&Value) -> bool;
    let rows: Vec<(Value, Holds)> = vec![
        (json!({"type": "integer"}), |value| {
            value.as_f64().unwrap().abs() <= 1e15
        }),
        (json!({"type": "number"}), |value| {
            value.as_f64().unwrap().abs() <= 1e15
        }),
        (json!({"type": "integer", "minimum": 3}), |value| {
            value.as_i64().unwrap() >= 3
        }),
        (
            json!({"type": "integer", "exclusiveMaximum": -3}),
            |value| value.as_i64().unwrap() < -3,
        ),
        (
            json!({"type": "number", "minimum": 0.5, "maximum": 1.5}),
            |value| (0.5..=1.5).contains(&value.as_f64().unwrap()),
        ),
        (json!({"type": "integer", "multipleOf": 7}), |value| {
            value.as_i64().unwrap() % 7 == 0
        }),
        (json!({"type": ["boolean", "null"]}), |value| {
            value.is_boolean() || value.is_null()
        }),
        (json!({"type": "boolean", "nullable": true}), |value| {
            value.is_boolean() || value.is_null()
        }),
        (json!({"enum": ["a", 1, null]}), |value| {
            [json!("a"), json!(1), Value::Null].contains(value)
        }),
        (json!({"const": {"a": [1, "x"]}}), |value| {
            *value == json!({"a": [1, "x"]})
        }),
        (
            json!({"type": "string", "minLength": 2, "maxLength": 4}),
            |value| (2..=4).contains(&value.as_str().unwrap().chars().count()),
        ),
        (json!({"type": "string", "maxLength": 5.0}), |value| {
            value.as_str().unwrap().chars().count() <= 5
        }),
        (
            json!({"type": "string", "pattern": "^[A-Z]{3}-\\d{2}$"}),
            |value| {
                let text = value.as_str().unwrap().as_bytes();
                text.len() == 6
                    && text[0].is_ascii_uppercase()
                    && text[3] == b'-'
                    && text[5].is_ascii_digit()
            },
        ),
        (json!({"type": "string", "format": "date"}), |value| {
            value.as_str().unwrap().len() == 10
        }),
        (
            json!({"type": "string", "format": "password", "maxLength": 3}),
            |value| value.as_str().unwrap().len() <= 12,
        ),
        (
            json!({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}),
            |value| (2..=3).contains(&value.as_array().unwrap().len()),
        ),
        (
            json!({"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": false, "minItems": 2}),
            |value| {
                value[0].is_null() && value[1].is_boolean() && value.as_array().unwrap().len() == 2
            },
        ),
        (
            json!({"type": "array", "items": [{"type": "null"}], "additionalItems": false}),
            |value| value.as_array().unwrap().iter().all(Value::is_null),
        ),
        (
            json!({"type": "integer", "minimum": 3, "maximum": 5, "exclusiveMaximum": true}),
            |value| (3..5).contains(&value.as_i64().unwrap()),
        ),
        (
            json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX, "format": "int64"}),
            Value::is_i64,
        ),
        (json!({"type": "string", "format": "date-time"}), |value| {
            value.as_str().unwrap().len() <= 35
        }),
        (
            json!({"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}]}),
            |value| value.as_array().unwrap().len() == 2 && value[1].is_boolean(),
        ),
        (
            json!({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}}),
            |value| {
                value
                    .as_object()
                    .unwrap()
                    .keys()
                    .all(|key| key == "a" || key == "b")
            },
        ),
        (
            json!({"properties": {"a": {"type": "null"}}, "required": ["a", "b"]}),
            |value| value["a"].is_null() && value.get("b").is_some(),
        ),
        (
            json!({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}),
            Value::is_null,
        ),
        (
            json!({"anyOf": [{"type": "null"}, {"const": 5}]}),
            |value| value.is_null() || *value == json!(5),
        ),
        (
            json!({"oneOf": [{"type": "null"}, {"const": 5}]}),
            |value| value.is_null() || *value == json!(5),
        ),
        (
            json!({"allOf": [
                {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"], "additionalProperties": {"type": "null"}},
            ]}),
            |value| value["a"].is_null() && value.get("b").is_some_and(Value::is_null),
        ),
        (
            json!({"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "null"}}, "required": ["b"], "unevaluatedProperties": false}),
            |value| *value == json!({"b": null}),
        ),
        (
            json!({"type": "object", "patternProperties": {"^x$": {"type": "null"}}, "additionalProperties": false, "maxProperties": 1}),
            |value| *value == json!({}) || *value == json!({"x": null}),
        ),
        (
            json!({"$ref": "#/$defs/node", "$defs": {"node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                "required": ["next"],
            }}}),
            |value| value.get("next").is_some(),
        ),
    ];
    for (wanted, holds) in rows {
        for seed in 0..6 {
            let mask =
                compile(&schema(wanted.clone()), &[], ToolFormat::Tagged).unwrap_or_else(|error| {
                    panic!("{wanted}: {error}");
                });
            let Some(text) = babble(mask, seed, 300) else {
                continue;
            };
            let value: Value = serde_json::from_str(&text)
                .unwrap_or_else(|error| panic!("{wanted}: {text:?}: {error}"));
            assert!(holds(&value), "{wanted}: {text}");
        }
    }
}

#[test]
fn numbers_without_bounds_end() {
    let digits = tokenizer().encode("7").unwrap()[0];
    for wanted in [
        json!({"type": "integer"}),
        json!({"type": "number"}),
        json!({"type": "integer", "minimum": 1e16}),
        json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        json!({"type": "array", "items": {}, "minItems": 1}),
    ] {
        let mut mask = compile(&schema(wanted.clone()), &[], ToolFormat::Tagged).unwrap();
        // A model that would generate sevens forever.
        let mut run = 0;
        for _ in 0..60 {
            let mut logits = vec![0.0; tokenizer().vocabulary() as usize];
            mask.apply(&mut logits).unwrap();
            let seven = logits[digits as usize].is_finite();
            run = if seven { run + 1 } else { 0 };
            assert!(run <= 20, "{wanted}");
            let next = if seven {
                digits
            } else {
                Sampler::new(Sampling::GREEDY)
                    .unwrap()
                    .next(&logits, &[])
                    .unwrap()
            };
            if tokenizer().is_end(next) {
                break;
            }
            mask.accept(next, tokenizer().bytes(next)).unwrap();
            if mask.is_complete().unwrap() {
                break;
            }
        }
    }
}

#[test]
fn a_text_of_the_greatest_length_is_followed_to_its_end() {
    let wanted = json!({"type": "string", "minLength": 999, "maxLength": 1000});
    let mask = compile(&schema(wanted), &[], ToolFormat::Tagged).unwrap();
    let text = babble(mask, 3, 5000).expect("it ends by itself");
    let value: Value = serde_json::from_str(&text).unwrap();
    assert!(value.as_str().unwrap().chars().count() >= 999);
}

#[test]
fn a_form_begins_where_the_thoughts_end() {
    let tokenizer = tokenizer();
    let mut mask = masked(
        &AnswerForm::JsonObject,
        &[],
        ToolFormat::Tagged,
        After::Text("</think>"),
    )
    .unwrap();
    let scores = |mask: &mut Box<dyn TokenMask>| {
        let mut logits = vec![0.0; tokenizer.vocabulary() as usize];
        mask.apply(&mut logits).unwrap();
        logits
    };
    let thinking = scores(&mut mask);
    let ruled_out = thinking.iter().filter(|logit| logit.is_infinite()).count();
    assert_eq!(
        ruled_out,
        tokenizer.ends().count(),
        "only the end is ruled out"
    );
    for piece in ["h", "m</thi", "nk>"] {
        for token in tokenizer.encode(piece).unwrap() {
            mask.accept(token, tokenizer.bytes(token)).unwrap();
            assert!(!mask.is_complete().unwrap());
        }
    }
    let answering = scores(&mut mask);
    let allowed: Vec<u32> = (0..)
        .zip(&answering)
        .filter(|(_, logit)| logit.is_finite())
        .map(|(token, _)| token)
        .collect();
    assert_eq!(tokenizer.decode(&allowed), "{");
}
