//! Memory of requests: bounded while they run, and returned afterwards.
//!
//! `cargo nextest` runs each test in a separate process, so that the kernel's figures belong to the test.

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

#[path = "../../../benches/developer/shapes.rs"]
mod shapes;

use shapes::{CHAT, FIELDS, body_of, shapes};

/// Observer of the peak resident set of this process.
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

/// Sends all bodies, sixteen at a time; the script holds its requests until all sixteen are answered.
async fn send_all(open: &Open, bodies: &[(&str, Vec<u8>)]) -> Vec<u16> {
    let mut statuses = Vec::new();
    for together in bodies.chunks(16) {
        let headers = [("content-type", "application/json")];
        let asked = together
            .iter()
            .map(|(path, body)| post(open.address, path, &headers, body));
        statuses.extend(join_all(asked).await.iter().map(|answer| answer.status));
        open.script.chats.lock().unwrap().clear();
        open.script.speeches.lock().unwrap().clear();
    }
    statuses
}

/// Waits until the resident set has returned to within 8 MiB.
async fn back_to(before: Bytes) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut now = process_resident();
    while now > before.saturating_add(Bytes::from_mib(8)) {
        assert!(
            Instant::now() < deadline,
            "{now} stay resident, of {before} before"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
        now = process_resident();
    }
}

/// Sixteen tools whose schemas are an enum of many objects would take 1.5 GB, and keep it.
#[tokio::test]
async fn bodies_at_their_limit_take_bounded_memory_whatever_field_is_how_large_and_give_it_back() {
    heap::return_early();
    let open = open().await;
    let warm: Vec<_> = FIELDS
        .iter()
        .map(|(path, field)| (*path, body_of(field, "[]")))
        .collect();
    send_all(&open, &warm).await;
    heap::trim();
    let before = process_resident();
    let watched = Watched::begin();
    let value_bytes = (1 << 20) - 300;
    for (turn, shape) in shapes(value_bytes).iter().enumerate() {
        // Each field gets a third of the shapes.
        let fields: Vec<_> = FIELDS.iter().skip(turn % 3).step_by(3).collect();
        for together in fields.chunks(16) {
            let bodies: Vec<_> = together
                .iter()
                .map(|(path, field)| (*path, body_of(field, shape)))
                .collect();
            for status in send_all(&open, &bodies).await {
                assert!([200, 400, 413, 429].contains(&status), "{status}");
            }
        }
    }
    let most = watched.end();
    // 16 bodies twice, at client and server, their parsed forms, and the shapes of this test.
    let grown = most.saturating_sub(before);
    assert!(
        grown < Bytes::from_mib(40 + 2 * 16 + 12 + 24),
        "{grown} more at most"
    );
    back_to(before).await;
}

/// Requests within their individual limit may exceed the common one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_fit_alone_are_bounded_together() {
    heap::return_early();
    let open = open().await;
    // Code and tables of each path are resident after its first request.
    let warm: Vec<_> = FIELDS
        .iter()
        .map(|(path, field)| (*path, body_of(field, "[]")))
        .collect();
    send_all(&open, &warm).await;
    heap::trim();
    let before = process_resident();
    let watched = Watched::begin();
    let limit = Bytes::from_mib(8).saturating_sub(Bytes::from_kib(64));
    let (mut taken, mut refused) = (0, 0);
    let small = shapes(8 << 10);
    for (place, index) in [(0, 0), (1, 2), (5, 5), (3, 18), (4, 27), (8, 35)] {
        let (path, field) = FIELDS[index];
        // As large as permitted, except for lists that double.
        let tree = heap::tree_bytes(small[place].as_bytes()).as_len();
        let value = shapes(small[place].len() * (5 << 20) / tree).remove(place);
        assert!(heap::tree_bytes(value.as_bytes()) <= limit);
        let bodies: Vec<_> = (0..16).map(|_| (path, body_of(field, &value))).collect();
        for status in send_all(&open, &bodies).await {
            taken += u32::from(status == 200);
            refused += u32::from(status == 429);
        }
    }
    let grown = watched.end().saturating_sub(before);
    assert!(
        taken > 4 && refused > 16,
        "{taken} taken, {refused} refused"
    );
    // Their memory, the bodies at client and server, and newly touched pages of this program.
    assert!(grown < Bytes::from_mib(40 + 56), "{grown} more at most");
    back_to(before).await;
}

#[tokio::test]
async fn a_tree_that_does_not_fit_is_refused_with_its_size_and_the_limit() {
    let open = open().await;
    let body = body_of(FIELDS[0].1, &shapes(1 << 19)[0]);
    let answer = post(open.address, CHAT, &[], &body).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (413, "request_too_large")
    );
    let text = answer.text();
    assert!(
        text.contains("take") && text.contains("the limit is 8 MiB"),
        "{text}"
    );
    // Common tools fit: a megabyte of them.
    let tool = r#"{"type":"function","function":{"name":"set_light","description":"Sets the brightness of a light in the house, in percent.","parameters":{"type":"object","properties":{"entity":{"type":"string","description":"The light, as the house names it."},"brightness":{"type":"integer","minimum":0,"maximum":100,"description":"0 switches it off."}},"required":["entity","brightness"]}}}"#;
    let tools = vec![tool; 128].join(",");
    let text = "A sentence of the kind that is said. ".repeat(20_000);
    let body =
        format!(r#"{{"messages":[{{"role":"user","content":"{text}"}}],"tools":[{tools}]}}"#);
    assert_eq!(
        post(open.address, CHAT, &[], body.as_bytes()).await.status,
        200
    );
}

/// All limits rely on this estimate.
#[test]
fn a_tree_is_never_larger_than_it_was_measured() {
    for shape in shapes(1 << 20) {
        let measured = heap::tree_bytes(shape.as_bytes());
        heap::trim();
        let before = process_resident();
        let tree: Value = serde_json::from_str(&shape).unwrap();
        // Memory freed while lists grew does not count.
        heap::trim();
        let taken = process_resident().saturating_sub(before);
        drop(tree);
        let head: String = shape.chars().take(24).collect();
        assert!(
            taken <= measured.saturating_add(Bytes::from_mib(4)),
            "{head}: {taken} taken, {measured} measured"
        );
        // A loose bound would refuse harmless requests. Texts that look like arguments are parsed later.
        let is_text = shape.starts_with('"');
        let loose = measured > taken.saturating_mul(3).saturating_add(Bytes::from_mib(2));
        assert!(
            is_text || !loose,
            "{head}: {taken} taken, {measured} measured"
        );
    }
}
