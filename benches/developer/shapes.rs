//! Request bodies that maximise memory per byte.

/// Free-form fields, each as a body with `@` in place of its value.
pub(crate) const FIELDS: [(&str, &str); 44] = [
    (
        CHAT,
        r#"{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":@}}}]}"#,
    ),
    (
        CHAT,
        r#"{"messages":[{"role":"user","content":"hi"}],"tools":@}"#,
    ),
    (
        CHAT,
        r#"{"messages":[{"role":"user","content":"hi"}],"response_format":{"type":"json_schema","json_schema":{"schema":{"enum":@}}}}"#,
    ),
    (
        CHAT,
        r#"{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"x":@}}"#,
    ),
    (CHAT, r#"{"messages":[{"role":"user","content":@}]}"#),
    (CHAT, r#"{"messages":@}"#),
    (
        CHAT,
        r#"{"messages":[{"role":"user","content":"hi"}],"stop":@}"#,
    ),
    (
        CHAT,
        r#"{"messages":[{"role":"user","content":"hi"}],"logit_bias":@}"#,
    ),
    (
        CHAT,
        r#"{"messages":[{"role":"user","content":"hi"}],"metadata":@}"#,
    ),
    (
        CHAT,
        r#"{"messages":[{"role":"user","content":"hi"}],"tool_choice":@}"#,
    ),
    (
        CHAT,
        r#"{"messages":[{"role":"user","content":"hi"}],"functions":@}"#,
    ),
    (
        CHAT,
        r#"{"messages":[{"role":"user","content":"hi"}],"prediction":@}"#,
    ),
    (
        CHAT,
        r#"{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":@}}]}]}"#,
    ),
    (
        CHAT,
        r#"{"messages":[{"role":"assistant","tool_calls":@}]}"#,
    ),
    (COMPLETIONS, r#"{"prompt":@}"#),
    (COMPLETIONS, r#"{"prompt":"hi","stop":@}"#),
    (COMPLETIONS, r#"{"prompt":"hi","logit_bias":@}"#),
    (COMPLETIONS, r#"{"prompt":"hi","response_format":@}"#),
    (
        MESSAGES,
        r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"hi"}],"tools":[{"name":"f","input_schema":{"enum":@}}]}"#,
    ),
    (
        MESSAGES,
        r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":@}]}"#,
    ),
    (MESSAGES, r#"{"model":"tiny","max_tokens":1,"messages":@}"#),
    (
        MESSAGES,
        r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"hi"}],"system":@}"#,
    ),
    (
        MESSAGES,
        r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{"x":@}}]},{"role":"user","content":"hi"}]}"#,
    ),
    (
        MESSAGES,
        r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"hi"}],"output_config":{"format":{"type":"json_schema","schema":{"enum":@}}}}"#,
    ),
    (
        MESSAGES,
        r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"hi"}],"context_management":@}"#,
    ),
    (
        COUNT,
        r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}],"tools":[{"name":"f","input_schema":{"enum":@}}]}"#,
    ),
    (RESPONSES, r#"{"input":@}"#),
    (
        RESPONSES,
        r#"{"input":"hi","tools":[{"type":"function","name":"f","parameters":{"enum":@}}]}"#,
    ),
    (
        RESPONSES,
        r#"{"input":"hi","text":{"format":{"type":"json_schema","schema":{"enum":@}}}}"#,
    ),
    (RESPONSES, r#"{"input":"hi","metadata":@}"#),
    (RESPONSES, r#"{"input":"hi","reasoning":{"x":@}}"#),
    (RESPONSES, r#"{"input":[{"role":"user","content":@}]}"#),
    (
        "/v1/responses/input_tokens",
        r#"{"input":"hi","tools":[{"type":"function","name":"f","parameters":{"enum":@}}]}"#,
    ),
    (
        OLLAMA,
        r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":@}}}]}"#,
    ),
    (
        OLLAMA,
        r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}],"format":{"enum":@}}"#,
    ),
    (
        OLLAMA,
        r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}],"options":{"x":@}}"#,
    ),
    (
        OLLAMA,
        r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}],"x":@}"#,
    ),
    (
        OLLAMA,
        r#"{"model":"tiny","messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{"x":@}}}]}]}"#,
    ),
    (OLLAMA, r#"{"model":"tiny","messages":@}"#),
    (
        "/api/generate",
        r#"{"model":"tiny","prompt":"hi","format":{"enum":@}}"#,
    ),
    ("/api/show", r#"{"model":"tiny","x":@}"#),
    ("/tokenize", r#"{"content":@}"#),
    ("/detokenize", r#"{"tokens":@}"#),
    (
        "/v1/audio/speech",
        r#"{"input":"hi","voice":{"id":"slt","x":@}}"#,
    ),
];
pub(crate) const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";
const RESPONSES: &str = "/v1/responses";
const OLLAMA: &str = "/api/chat";

/// Returns values of `bytes` bytes that maximise memory per byte, each in a different way.
pub(crate) fn shapes(bytes: usize) -> Vec<String> {
    let list = |item: &str| {
        let count = bytes / (item.len() + 1);
        format!("[{}]", vec![item; count.max(1)].join(","))
    };
    let keys: Vec<String> = (0..bytes / 10)
        .map(|number| format!("\"{number:x}\":0"))
        .collect();
    let nested = 50.min(bytes / 12).max(1);
    let deep = format!("{}0{}", r#"{"a":["#.repeat(nested), "]}".repeat(nested));
    let arguments = list(r#"{\"\":0}"#);
    vec![
        list(r#"{"":0}"#),
        list("{}"),
        list("0"),
        list(r#""a""#),
        list("[0]"),
        list(r#"{"role":"user"}"#),
        list("0.12345678901234567890123456789"),
        list(&deep),
        format!("{{{}}}", keys.join(",")),
        format!("\"{}\"", "\\u0041".repeat(bytes / 6)),
        format!("\"{{\\\"x\\\":{arguments}}}\""),
    ]
}

pub(crate) fn body_of(field: &str, value: &str) -> Vec<u8> {
    field.replacen('@', value, 1).into_bytes()
}
