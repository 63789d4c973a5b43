//! Memory that requests take: bounded while they are there, and given back behind them.
//!
//! `cargo nextest` runs each test in a process of its own, so that what the kernel counts is the test's.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cotenant::{engine::arena::process_resident, heap, units::Bytes};
use futures_util::future::join_all;
use serde_json::Value;

use super::{
    client::post,
    script::{Open, open},
};

/// Each field that takes what a client likes, as a body with `@` in place of its value.
const FIELDS: [(&str, &str); 44] = [
    (
        CHAT,
        r#"{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":@}}}]}"#,
    ),
    (CHAT, r#"{"messages":[{"role":"user","content":"hi"}],"tools":@}"#),
    (
        CHAT,
        r#"{"messages":[{"role":"user","content":"hi"}],"response_format":{"type":"json_schema","json_schema":{"schema":{"enum":@}}}}"#,
    ),
    (CHAT, r#"{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"x":@}}"#),
    (CHAT, r#"{"messages":[{"role":"user","content":@}]}"#),
    (CHAT, r#"{"messages":@}"#),
    (CHAT, r#"{"messages":[{"role":"user","content":"hi"}],"stop":@}"#),
    (CHAT, r#"{"messages":[{"role":"user","content":"hi"}],"logit_bias":@}"#),
    (CHAT, r#"{"messages":[{"role":"user","content":"hi"}],"metadata":@}"#),
    (CHAT, r#"{"messages":[{"role":"user","content":"hi"}],"tool_choice":@}"#),
    (CHAT, r#"{"messages":[{"role":"user","content":"hi"}],"functions":@}"#),
    (CHAT, r#"{"messages":[{"role":"user","content":"hi"}],"prediction":@}"#),
    (CHAT, r#"{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":@}}]}]}"#),
    (CHAT, r#"{"messages":[{"role":"assistant","tool_calls":@}]}"#),
    (COMPLETIONS, r#"{"prompt":@}"#),
    (COMPLETIONS, r#"{"prompt":"hi","stop":@}"#),
    (COMPLETIONS, r#"{"prompt":"hi","logit_bias":@}"#),
    (COMPLETIONS, r#"{"prompt":"hi","response_format":@}"#),
    (
        MESSAGES,
        r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"hi"}],"tools":[{"name":"f","input_schema":{"enum":@}}]}"#,
    ),
    (MESSAGES, r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":@}]}"#),
    (MESSAGES, r#"{"model":"tiny","max_tokens":1,"messages":@}"#),
    (MESSAGES, r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"hi"}],"system":@}"#),
    (
        MESSAGES,
        r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{"x":@}}]},{"role":"user","content":"hi"}]}"#,
    ),
    (
        MESSAGES,
        r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"hi"}],"output_config":{"format":{"type":"json_schema","schema":{"enum":@}}}}"#,
    ),
    (MESSAGES, r#"{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"hi"}],"context_management":@}"#),
    (
        COUNT,
        r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}],"tools":[{"name":"f","input_schema":{"enum":@}}]}"#,
    ),
    (RESPONSES, r#"{"input":@}"#),
    (RESPONSES, r#"{"input":"hi","tools":[{"type":"function","name":"f","parameters":{"enum":@}}]}"#),
    (RESPONSES, r#"{"input":"hi","text":{"format":{"type":"json_schema","schema":{"enum":@}}}}"#),
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
    (OLLAMA, r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}],"format":{"enum":@}}"#),
    (OLLAMA, r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}],"options":{"x":@}}"#),
    (OLLAMA, r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}],"x":@}"#),
    (
        OLLAMA,
        r#"{"model":"tiny","messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{"x":@}}}]}]}"#,
    ),
    (OLLAMA, r#"{"model":"tiny","messages":@}"#),
    ("/api/generate", r#"{"model":"tiny","prompt":"hi","format":{"enum":@}}"#),
    ("/api/show", r#"{"model":"tiny","x":@}"#),
    ("/tokenize", r#"{"content":@}"#),
    ("/detokenize", r#"{"tokens":@}"#),
    ("/v1/audio/speech", r#"{"input":"hi","voice":{"id":"slt","x":@}}"#),
];
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";
const RESPONSES: &str = "/v1/responses";
const OLLAMA: &str = "/api/chat";

/// A value of `bytes` that takes as much memory for them as it can, each in a way of its own.
fn shapes(bytes: usize) -> Vec<String> {
    let list = |item: &str| {
        let count = bytes / (item.len() + 1);
        format!("[{}]", vec![item; count.max(1)].join(","))
    };
    let keys: Vec<String> = (0..bytes / 10).map(|number| format!("\"{number:x}\":0")).collect();
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

fn body_of(field: &str, value: &str) -> Vec<u8> {
    field.replacen('@', value, 1).into_bytes()
}

/// The most that this process has had resident since it began to look.
struct Watched {
    stop: Arc<AtomicBool>,
    most: thread::JoinHandle<Bytes>,
}

impl Watched {
    fn begin() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let most = thread::spawn(move || {
            let mut most = process_resident();
            while !stopped.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(1));
                most = most.max(process_resident());
            }
            most
        });
        Self { stop, most }
    }

    fn end(self) -> Bytes {
        self.stop.store(true, Ordering::Relaxed);
        self.most.join().unwrap()
    }
}

/// Sends all bodies, sixteen at once; the script keeps what is asked until all sixteen are answered.
async fn send_all(open: &Open, bodies: &[(&str, Vec<u8>)]) -> Vec<u16> {
    let mut statuses = Vec::new();
    for together in bodies.chunks(16) {
        let headers = [("content-type", "application/json")];
        let asked = together.iter().map(|(path, body)| post(open.address, path, &headers, body));
        statuses.extend(join_all(asked).await.iter().map(|answer| answer.status));
        open.script.chats.lock().unwrap().clear();
        open.script.speeches.lock().unwrap().clear();
    }
    statuses
}

/// Waits until what is resident is back within 8 MiB.
async fn back_to(before: Bytes) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut now = process_resident();
    while now > before.saturating_add(Bytes::from_mib(8)) {
        assert!(Instant::now() < deadline, "{now} stay resident, of {before} before");
        tokio::time::sleep(Duration::from_millis(20)).await;
        now = process_resident();
    }
}

/// Sixteen tools whose schemas are an enum of many objects would take 1.5 GB, and keep it.
#[tokio::test]
async fn bodies_at_their_limit_take_bounded_memory_whatever_field_is_how_large_and_give_it_back() {
    let open = open().await;
    let warm: Vec<_> = FIELDS.iter().map(|(path, field)| (*path, body_of(field, "[]"))).collect();
    send_all(&open, &warm).await;
    heap::trim();
    let before = process_resident();
    let watched = Watched::begin();
    let value_bytes = (1 << 20) - 300;
    let shapes = shapes(value_bytes);
    for shape in &shapes {
        // In its turn, so that the test does not keep them all.
        for together in FIELDS.chunks(16) {
            let bodies: Vec<_> = together.iter().map(|(path, field)| (*path, body_of(field, shape))).collect();
            for status in send_all(&open, &bodies).await {
                assert!([200, 400, 413, 422, 429, 503, 529].contains(&status), "{status}");
            }
        }
    }
    drop(shapes);
    let most = watched.end();
    // 16 bodies twice, here and there, what may be made of them at once, and the shapes of this test.
    let grown = most.saturating_sub(before);
    assert!(grown < Bytes::from_mib(40 + 2 * 16 + 12 + 24), "{grown} more at most");
    back_to(before).await;
}

/// What is just within the limit of one request is not within that of all together.
#[tokio::test]
async fn requests_that_fit_alone_are_bounded_together() {
    let open = open().await;
    let before = process_resident();
    let watched = Watched::begin();
    let (mut taken, mut refused) = (0, 0);
    for shape in shapes(80 << 10) {
        if heap::tree_bytes(shape.as_bytes()) > Bytes::from_mib(8) {
            continue;
        }
        for (path, field) in &FIELDS[..14] {
            let bodies: Vec<_> = (0..16).map(|_| (*path, body_of(field, &shape))).collect();
            for status in send_all(&open, &bodies).await {
                taken += u32::from(status == 200);
                refused += u32::from(status == 429);
            }
        }
    }
    let grown = watched.end().saturating_sub(before);
    assert!(taken > 16 && refused > 16, "{taken} taken, {refused} refused");
    assert!(grown < Bytes::from_mib(40 + 24), "{grown} more at most");
    back_to(before).await;
}

#[tokio::test]
async fn a_tree_that_does_not_fit_is_refused_with_its_size_and_the_limit() {
    let open = open().await;
    let body = body_of(FIELDS[0].1, &shapes(1 << 19)[0]);
    let answer = post(open.address, CHAT, &[], &body).await;
    assert_eq!((answer.status, answer.error_code().as_str()), (413, "request_too_large"));
    let text = answer.text();
    assert!(text.contains("take") && text.contains("the limit is 8 MiB"), "{text}");
    // What common tools are has room: a megabyte of them.
    let tool = r#"{"type":"function","function":{"name":"set_light","description":"Sets the brightness of a light in the house, in percent.","parameters":{"type":"object","properties":{"entity":{"type":"string","description":"The light, as the house names it."},"brightness":{"type":"integer","minimum":0,"maximum":100,"description":"0 switches it off."}},"required":["entity","brightness"]}}}"#;
    let tools = vec![tool; 128].join(",");
    let text = "A sentence of the kind that is said. ".repeat(20_000);
    let body = format!(r#"{{"messages":[{{"role":"user","content":"{text}"}}],"tools":[{tools}]}}"#);
    assert_eq!(post(open.address, CHAT, &[], body.as_bytes()).await.status, 200);
}

/// The measure that all of this rests on.
#[test]
fn a_tree_is_never_larger_than_it_was_measured() {
    for shape in shapes(1 << 20) {
        let measured = heap::tree_bytes(shape.as_bytes());
        heap::trim();
        let before = process_resident();
        let tree: Value = serde_json::from_str(&shape).unwrap();
        let taken = process_resident().saturating_sub(before);
        drop(tree);
        let head: String = shape.chars().take(24).collect();
        assert!(taken <= measured.saturating_add(Bytes::from_mib(4)), "{head}: {taken} taken, {measured} measured");
        // A bound that is far off would refuse what is harmless. Texts that look like arguments are parsed later.
        let is_text = shape.starts_with('"');
        let loose = measured > taken.saturating_mul(3).saturating_add(Bytes::from_mib(2));
        assert!(is_text || !loose, "{head}: {taken} taken, {measured} measured");
    }
}
