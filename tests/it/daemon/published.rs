//! A published model in the daemon: forms, tools and sheds through each API.

use cotenant::rpc::v1::ShedRequest;
use serde_json::{Value, json};

use super::installation::{Daemon, Installation, budget};
use crate::{
    http::client::post_json,
    published::{SMOLLM2, models},
};

/// `budget:` and `llm:` with SmolLM2.
fn configuration(context: u32) -> Option<String> {
    let path = models()?.join(SMOLLM2);
    Some(format!(
        "{}llm: {{path: \"{}\", name: demo, threads: 2, context: {context}, kv_floor: 256, kv_memory: at-once}}\n",
        budget(700),
        path.display()
    ))
}

/// Schemas as sent by clients, each with a suitable question.
fn forms() -> Vec<(&'static str, Value)> {
    vec![
        (
            "Is Paris the capital of France?",
            json!({"type": "boolean"}),
        ),
        (
            "How many legs has a spider?",
            json!({"type": "integer", "minimum": 0, "maximum": 100}),
        ),
        (
            "Choose a colour.",
            json!({"type": "string", "enum": ["red", "green", "blue"]}),
        ),
        (
            "Name two animals.",
            json!({
                "type": "array", "items": {"type": "string", "maxLength": 24}, "minItems": 2, "maxItems": 2,
            }),
        ),
        (
            "Turn on the kitchen light.",
            json!({
                "type": "object",
                "properties": {
                    "room": {"type": "string", "enum": ["kitchen", "office"]},
                    "on": {"type": "boolean"},
                    "level": {"type": "integer", "minimum": 0, "maximum": 100},
                },
                "required": ["room", "on", "level"],
                "additionalProperties": false,
            }),
        ),
        (
            "Describe a city.",
            json!({
                "$defs": {"place": {
                    "type": "object",
                    "properties": {"name": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
                    "required": ["name", "country"], "additionalProperties": false,
                }},
                "type": "object",
                "properties": {
                    "place": {"$ref": "#/$defs/place"},
                    "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
                    "mayor": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}]},
                },
                "required": ["place", "code", "mayor"], "additionalProperties": false,
            }),
        ),
    ]
}

/// Returns whether a value satisfies one of [`forms`]; supports only their keywords.
fn keeps(value: &Value, schema: &Value, root: &Value) -> bool {
    if let Some(name) = schema["$ref"].as_str() {
        return keeps(
            value,
            root.pointer(name.trim_start_matches('#')).unwrap(),
            root,
        );
    }
    if let Some(any) = schema["anyOf"].as_array() {
        return any.iter().any(|one| keeps(value, one, root));
    }
    if let Some(listed) = schema["enum"].as_array() {
        return listed.contains(value);
    }
    let at_most = |size: usize, keyword: &str| {
        schema[keyword]
            .as_u64()
            .is_none_or(|most| size as u64 <= most)
    };
    match schema["type"].as_str().unwrap() {
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "integer" => value
            .as_i64()
            .is_some_and(|number| (0..=100).contains(&number)),
        "string" => value.as_str().is_some_and(|text| {
            let code = |text: &str| {
                text.len() == 5
                    && text[..2].chars().all(|one| one.is_ascii_uppercase())
                    && text[2..].chars().all(|one| one.is_ascii_digit())
            };
            at_most(text.chars().count(), "maxLength")
                && (schema["pattern"].is_null() || code(text))
        }),
        "array" => value.as_array().is_some_and(|items| {
            items.len() == 2 && items.iter().all(|item| keeps(item, &schema["items"], root))
        }),
        "object" => value.as_object().is_some_and(|fields| {
            let properties = schema["properties"].as_object().unwrap();
            fields.len() == properties.len()
                && properties.iter().all(|(name, one)| {
                    fields
                        .get(name)
                        .is_some_and(|value| keeps(value, one, root))
                })
        }),
        other => panic!("no such type here: {other}"),
    }
}

async fn ask(daemon: &Daemon<'_>, path: &str, body: Value) -> Value {
    let answer = post_json(daemon.http, path, &body).await;
    assert_eq!(answer.status, 200, "{path} {body}: {}", answer.text());
    answer.json()
}

/// Returns the list item with this `type`.
fn of_type<'list>(list: &'list Value, kind: &str) -> &'list Value {
    let mut items = list.as_array().unwrap().iter();
    items
        .find(|item| item["type"] == kind)
        .unwrap_or_else(|| panic!("no `{kind}` in {list}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_published_model_keeps_each_form_by_each_api() {
    let Some(configuration) = configuration(2048) else {
        return;
    };
    let mut installation = Installation::new(&configuration);
    installation.prefer_release();
    let daemon = installation.start().await;
    daemon.whole().await;
    for (question, schema) in forms() {
        let messages = json!([{"role": "user", "content": question}]);
        let form = json!({"type": "json_schema", "name": "answer", "schema": schema});
        let nested = json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": true}});
        let chat = ask(
            &daemon,
            "/v1/chat/completions",
            json!({
                "model": "demo", "temperature": 0, "max_tokens": 200, "messages": messages, "response_format": nested,
            }),
        );
        let responses = ask(
            &daemon,
            "/v1/responses",
            json!({
                "model": "demo", "temperature": 0, "max_output_tokens": 200, "input": question, "text": {"format": form},
            }),
        );
        let anthropic = ask(
            &daemon,
            "/v1/messages",
            json!({
                "model": "demo", "temperature": 0, "max_tokens": 200, "messages": messages,
                "output_config": {"format": {"type": "json_schema", "schema": schema}},
            }),
        );
        let ollama = ask(
            &daemon,
            "/api/chat",
            json!({
                "model": "demo", "stream": false, "options": {"temperature": 0, "num_predict": 200}, "messages": messages, "format": schema,
            }),
        );
        let generate = ask(
            &daemon,
            "/api/generate",
            json!({
                "model": "demo", "stream": false, "options": {"temperature": 0, "num_predict": 200}, "prompt": question, "format": schema,
            }),
        );
        for (api, text) in [
            (
                "chat",
                chat.await["choices"][0]["message"]["content"].clone(),
            ),
            (
                "responses",
                of_type(
                    &of_type(&responses.await["output"], "message")["content"],
                    "output_text",
                )["text"]
                    .clone(),
            ),
            (
                "messages",
                of_type(&anthropic.await["content"], "text")["text"].clone(),
            ),
            ("ollama chat", ollama.await["message"]["content"].clone()),
            ("ollama generate", generate.await["response"].clone()),
        ] {
            let value: Value = serde_json::from_str(text.as_str().unwrap())
                .unwrap_or_else(|_| panic!("{api}: {text}"));
            assert!(
                keeps(&value, &schema, &schema),
                "{api}: {value} does not keep {schema}"
            );
        }
    }
    // The form without a schema: any object.
    let any = daemon
        .chat(json!({"messages": [{"role": "user", "content": "Describe a cat as JSON."}], "max_tokens": 400,
            "response_format": {"type": "json_object"}}))
        .await;
    assert_eq!(any.status, 200, "{}", any.text());
    let finished = any.json()["choices"][0]["finish_reason"] == "stop";
    let text = any.json()["choices"][0]["message"]["content"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(text.trim_start().starts_with('{'), "{text}");
    assert!(
        !finished || serde_json::from_str::<Value>(&text).unwrap().is_object(),
        "{text}"
    );
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_published_model_calls_the_tool_that_is_forced_by_each_api() {
    let Some(configuration) = configuration(2048) else {
        return;
    };
    let mut installation = Installation::new(&configuration);
    installation.prefer_release();
    let daemon = installation.start().await;
    daemon.whole().await;
    let schema = json!({
        "type": "object",
        "properties": {"room": {"type": "string", "enum": ["kitchen", "office"]}, "on": {"type": "boolean"}},
        "required": ["room", "on"],
        "additionalProperties": false,
    });
    let messages = json!([{"role": "user", "content": "Turn on the kitchen light."}]);
    let (name, about) = ("set_light", "Turns a light on or off.");
    let function = json!({"type": "function", "function": {"name": name, "description": about, "parameters": schema}});
    let flat =
        json!({"type": "function", "name": name, "description": about, "parameters": schema});
    let tool = json!({"name": name, "description": about, "input_schema": schema});
    for choice in [
        json!("required"),
        json!({"type": "function", "function": {"name": name}}),
    ] {
        let chat = ask(&daemon, "/v1/chat/completions", json!({
            "model": "demo", "temperature": 0, "max_tokens": 200, "messages": messages, "tools": [function], "tool_choice": choice,
        }))
        .await;
        let choice = &chat["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{chat}");
        let call = &choice["message"]["tool_calls"][0]["function"];
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert!(
            call["name"] == name && keeps(&arguments, &schema, &schema),
            "{call}"
        );
    }
    for choice in [json!("required"), json!({"type": "function", "name": name})] {
        let responses = ask(
            &daemon,
            "/v1/responses",
            json!({
                "model": "demo", "temperature": 0, "max_output_tokens": 200, "input": "Turn on the kitchen light.",
                "tools": [flat], "tool_choice": choice,
            }),
        )
        .await;
        let call = of_type(&responses["output"], "function_call");
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert!(
            call["name"] == name && keeps(&arguments, &schema, &schema),
            "{call}"
        );
    }
    for choice in [
        json!({"type": "any"}),
        json!({"type": "tool", "name": name}),
    ] {
        let anthropic = ask(&daemon, "/v1/messages", json!({
            "model": "demo", "temperature": 0, "max_tokens": 200, "messages": messages, "tools": [tool], "tool_choice": choice,
        }))
        .await;
        assert_eq!(anthropic["stop_reason"], "tool_use", "{anthropic}");
        let call = of_type(&anthropic["content"], "tool_use");
        assert!(
            call["name"] == name && keeps(&call["input"], &schema, &schema),
            "{call}"
        );
    }
    // Ollama cannot force a tool: the model may ignore an offered one, and a call is returned as a call.
    let ollama = ask(&daemon, "/api/chat", json!({
        "model": "demo", "stream": false, "options": {"temperature": 0, "num_predict": 200}, "messages": messages, "tools": [function],
    }))
    .await;
    let text = ollama["message"]["content"].as_str().unwrap_or_default();
    assert!(!text.contains("<tool_call>"), "{ollama}");
    daemon.end().await;
}

/// Sheds during an answer, and an answer with streamed layers: the text is always identical.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_published_model_gives_memory_while_it_answers_and_says_the_same() {
    let Some(configuration) = configuration(4096) else {
        return;
    };
    let mut installation = Installation::new(&configuration);
    installation.prefer_release();
    let daemon = installation.start().await;
    let full = daemon.whole().await.engine.unwrap();
    let body = json!({
        "model": "demo", "temperature": 0, "max_tokens": 96,
        "messages": [{"role": "user", "content": "Tell me a story about a lighthouse keeper."}],
    });
    let said = |answer: &Value| {
        answer["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let first = said(&ask(&daemon, "/v1/chat/completions", body.clone()).await);
    assert!(first.len() > 100, "{first}");
    let mut fewest = full.layers_resident;
    // The second request exceeds the whole KV cache, so that layers are shed.
    let more_than_kv = (full.kv_capacity_bytes >> 20) + 16;
    for mib in [40, more_than_kv, 40] {
        let request = ShedRequest {
            shed_bytes: mib << 20,
        };
        let shed = async {
            let shed = daemon.operator().shed(request).await.unwrap().into_inner();
            println!("{}", shed.message);
            daemon.status().await.engine.unwrap().layers_resident
        };
        let (answer, resident) =
            tokio::join!(ask(&daemon, "/v1/chat/completions", body.clone()), shed);
        assert_eq!(
            said(&answer),
            first,
            "after a shed of {mib} MiB in mid-answer"
        );
        fewest = fewest.min(resident);
    }
    assert!(
        fewest < full.layers_resident,
        "{fewest} of {} layers are resident",
        full.layers_total
    );
    // Layers that are not resident are streamed.
    assert_eq!(
        said(&ask(&daemon, "/v1/chat/completions", body).await),
        first
    );
    daemon.end().await;
}
