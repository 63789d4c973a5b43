//! Limits of requests, bodies and connections.

use std::{sync::atomic::Ordering, time::Duration};

use cotenant::{
    http::{Limits, serve},
    units::Bytes,
};
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use serde_json::json;
use tokio::net::{TcpSocket, TcpStream, UnixListener, UnixStream};

use super::{
    client::{Connection, get, post, post_form, post_json, request},
    script::{Step, delta, finished, open, open_with, started},
};

const CHAT: &str = "/v1/chat/completions";

fn question() -> Vec<u8> {
    json!({"messages": [{"role": "user", "content": "hi"}]})
        .to_string()
        .into_bytes()
}

#[tokio::test]
async fn a_header_line_of_1_mib_is_431_and_others_go_on() {
    let open = open().await;
    let mut connection = Connection::open(open.address).await;
    let line = "a".repeat(1 << 20);
    connection
        .send_lossy(&request("GET", "/health", &[("x-long", &line)], b""))
        .await;
    assert_eq!(connection.answer().await.status, 431);
    assert!(connection.closed().await);
    assert_eq!(get(open.address, "/v1/models").await.status, 200);
}

#[tokio::test]
async fn a_page_of_another_site_cannot_make_a_browser_ask() {
    let open = open().await;
    for (site, status) in [("cross-site", 403), ("same-origin", 200), ("none", 200)] {
        let answer = post(open.address, CHAT, &[("sec-fetch-site", site)], &question()).await;
        assert_eq!(answer.status, status, "{site}");
    }
    assert_eq!(open.script.chats.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn what_is_not_http_is_400() {
    let open = open().await;
    let mut connection = Connection::open(open.address).await;
    connection
        .send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n")
        .await;
    assert_eq!(connection.answer().await.status, 400);
}

#[tokio::test]
async fn a_body_beyond_its_limit_is_413_whether_announced_or_not() {
    let open = open().await;
    let huge = vec![b' '; (1 << 20) + 1];
    let answer = post(open.address, CHAT, &[], &huge).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (413, "request_too_large")
    );
    assert!(
        answer.text().contains("the limit is 1 MiB"),
        "{}",
        answer.text()
    );

    let mut connection = Connection::open(open.address).await;
    connection
        .send(
            format!(
                "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            .as_bytes(),
        )
        .await;
    let piece = vec![b' '; 1 << 16];
    for _ in 0..17 {
        connection.send_lossy(b"10000\r\n").await;
        connection.send_lossy(&piece).await;
        connection.send_lossy(b"\r\n").await;
    }
    let answer = connection.answer().await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (413, "request_too_large")
    );
    // 26 MiB of audio
    let answer = post(
        open.address,
        "/v1/audio/transcriptions",
        &[("content-type", "multipart/form-data; boundary=B")],
        &vec![0; 26 << 20],
    )
    .await;
    assert_eq!(answer.status, 413);
}

#[tokio::test]
async fn a_body_that_stops_coming_is_408() {
    let limits = Limits {
        body_idle_timeout: Duration::from_millis(50),
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let mut connection = Connection::open(open.address).await;
    connection
        .send(
            format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{{")
                .as_bytes(),
        )
        .await;
    let answer = connection.answer().await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (408, "request_timeout")
    );
}

#[tokio::test]
async fn slow_bodies_of_one_client_keep_no_other_from_its_place_and_end() {
    let limits = Limits {
        body_grace: Duration::from_millis(300),
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let mut slow = Vec::new();
    for _ in 0..32 {
        let mut connection = Connection::open(open.address).await;
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 1000000\r\n\r\n";
        connection.send(head.as_bytes()).await;
        // its body is being read
        connection.wait_for("100 Continue").await;
        connection.send(b"{").await;
        slow.push(connection);
    }
    assert_eq!(post(open.address, CHAT, &[], &question()).await.status, 200);
    for mut connection in slow {
        let answer = connection.answer().await;
        assert_eq!(
            (answer.status, answer.error_code().as_str()),
            (408, "request_timeout")
        );
        assert!(answer.text().contains("16 KiB/s"), "{}", answer.text());
    }
}

#[tokio::test]
async fn one_address_has_half_of_the_connections() {
    let limits = Limits {
        connections_max: 4,
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let mut held = [
        Connection::open(open.address).await,
        Connection::open(open.address).await,
    ];
    for connection in &mut held {
        connection.send(&request("GET", "/health", &[], b"")).await;
        assert_eq!(connection.answer().await.status, 200);
    }
    let answer = Connection::open(open.address).await.answer().await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (503, "too_many_connections")
    );
    assert!(
        answer
            .text()
            .contains("2 are open, which is the limit of one client"),
        "{}",
        answer.text()
    );
    // from another address
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let mut other = Connection::over(socket.connect(open.address).await.unwrap());
    other.send(&request("GET", "/health", &[], b"")).await;
    assert_eq!(other.answer().await.status, 200);
}

#[tokio::test]
async fn a_body_that_drips_for_too_long_is_408() {
    let limits = Limits {
        body_timeout: Duration::from_millis(100),
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let stream = TcpStream::connect(open.address).await.unwrap();
    let (read, mut write) = tokio::io::split(stream);
    let dripping = tokio::spawn(async move {
        use tokio::io::AsyncWriteExt;
        let head =
            format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n");
        write.write_all(head.as_bytes()).await.unwrap();
        let mut tick = tokio::time::interval(Duration::from_millis(5));
        while write.write_all(b" ").await.is_ok() {
            tick.tick().await;
        }
    });
    let mut connection = Connection::over(tokio::io::join(read, tokio::io::sink()));
    assert_eq!(connection.answer().await.status, 408);
    dripping.abort();
}

#[tokio::test]
async fn a_head_that_never_ends_is_given_up() {
    let limits = Limits {
        head_timeout: Duration::from_millis(50),
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let mut connection = Connection::open(open.address).await;
    connection.send(b"GET /health HTTP/1.1\r\nhost: ").await;
    assert!(connection.closed().await);
}

#[tokio::test]
async fn one_request_too_many_is_429_and_room_comes_back() {
    let limits = Limits {
        requests_max: 1,
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    open.script
        .answer([started(), delta("It"), Step::Gate, finished()]);
    let mut first = Connection::open(open.address).await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true});
    first
        .send(&request("POST", CHAT, &[], body.to_string().as_bytes()))
        .await;
    first.wait_for("It").await;

    let answer = post_json(open.address, CHAT, &body).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (429, "rate_limit_exceeded")
    );
    assert_eq!(answer.header("x-should-retry"), "true");
    assert!(answer.text().contains("limit of 1"), "{}", answer.text());
    // reading the health is not limited
    assert_eq!(get(open.address, "/health").await.status, 200);
    // a chat does not take a slot of speech
    let speech = post_json(
        open.address,
        "/v1/audio/speech",
        &json!({"input": "hi", "response_format": "pcm"}),
    )
    .await;
    assert_eq!(speech.status, 200, "{}", speech.text());

    open.script.gate.notify_one();
    first.wait_for("[DONE]").await;
    first.answer().await;
    open.script.answer([started(), finished()]);
    assert_eq!(post(open.address, CHAT, &[], &question()).await.status, 200);
}

#[tokio::test]
async fn of_64_clients_at_once_none_waits_for_the_limit_of_another_kind() {
    let open = open().await;
    open.script.answer([started(), Step::Gate, finished()]);
    let (answers, mut answered) = tokio::sync::mpsc::channel(64);
    let address = open.address;
    for number in 0..64 {
        let answers = answers.clone();
        tokio::spawn(async move {
            let (kind, answer) = match number % 4 {
                0 => {
                    let fields: [(&str, Option<&str>, &[u8]); 1] =
                        [("file", Some("a.wav"), SILENT_WAV)];
                    (
                        "transcription",
                        post_form(address, "/v1/audio/transcriptions", &fields).await,
                    )
                }
                1 => {
                    let body = json!({"input": "hi", "response_format": "pcm"});
                    (
                        "speech",
                        post_json(address, "/v1/audio/speech", &body).await,
                    )
                }
                _ => ("chat", post(address, CHAT, &[], &question()).await),
            };
            answers.send((kind, answer)).await.unwrap();
        });
    }
    // All of these are answered while sixteen chats wait for the engine.
    let mut counts = std::collections::BTreeMap::new();
    for _ in 0..48 {
        let (kind, answer) = answered.recv().await.unwrap();
        *counts.entry((kind, answer.status)).or_insert(0) += 1;
        if answer.status == 429 {
            assert!(
                !answer.header("retry-after").is_empty()
                    && !answer.header("retry-after-ms").is_empty()
            );
        }
    }
    let expected = [
        (("chat", 429), 16),
        (("speech", 200), 16),
        (("transcription", 200), 16),
    ];
    assert_eq!(counts, expected.into());
    for _ in 0..16 {
        open.script.gate.notify_one();
        let (kind, answer) = answered.recv().await.unwrap();
        assert_eq!((kind, answer.status), ("chat", 200));
    }
}

/// Header of a WAV file, without samples.
const SILENT_WAV: &[u8] =
    b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0data\0\0\0\0";

#[tokio::test]
async fn one_connection_too_many_is_503() {
    let limits = Limits {
        connections_max: 1,
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let mut first = Connection::open(open.address).await;
    first.send(&request("GET", "/health", &[], b"")).await;
    assert_eq!(first.answer().await.status, 200);
    let mut second = Connection::open(open.address).await;
    let answer = second.answer().await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (503, "too_many_connections")
    );
    first.send(&request("GET", "/health", &[], b"")).await;
    assert_eq!(first.answer().await.status, 200);
}

#[tokio::test]
async fn bodies_together_have_a_limit_too() {
    let limits = Limits {
        requests_memory_max: Bytes::from_kib(16),
        ..Limits::default()
    };
    let open = open_with(limits, true).await;
    let body = format!(
        r#"{{"messages": [{{"role": "user", "content": "{}"}}], "stream": true}}"#,
        "a".repeat(900)
    );
    open.script
        .answer([started(), delta("It"), Step::Gate, finished()]);
    let mut first = Connection::open(open.address).await;
    first
        .send(&request("POST", CHAT, &[], body.as_bytes()))
        .await;
    // while it is answered, it keeps its memory
    first.wait_for("It").await;
    let answer = post(open.address, CHAT, &[], body.as_bytes()).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (429, "rate_limit_exceeded")
    );
    assert!(
        answer.text().contains("memory for requests"),
        "{}",
        answer.text()
    );
    drop(first);
    open.script.answer([started(), finished()]);
    while post(open.address, CHAT, &[], &question()).await.status != 200 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn shutdown_lets_the_running_answer_end_and_takes_nothing_new() {
    let mut open = open().await;
    open.script
        .answer([started(), delta("It"), Step::Gate, finished()]);
    let mut first = Connection::open(open.address).await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true});
    first
        .send(&request("POST", CHAT, &[], body.to_string().as_bytes()))
        .await;
    first.wait_for("It").await;
    open.shutdown.cancel();
    while TcpStream::connect(open.address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    open.script.gate.notify_one();
    first.wait_for("[DONE]").await;
    drop(first);
    (&mut open.serving).await.unwrap();
}

#[tokio::test]
async fn shutdown_drops_what_does_not_end_in_time() {
    let limits = Limits {
        drain_timeout: Duration::from_millis(50),
        ..Limits::default()
    };
    let mut open = open_with(limits, true).await;
    open.script.answer([started(), delta("It"), Step::Hang]);
    let mut first = Connection::open(open.address).await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true});
    first
        .send(&request("POST", CHAT, &[], body.to_string().as_bytes()))
        .await;
    first.wait_for("It").await;
    open.shutdown.cancel();
    (&mut open.serving).await.unwrap();
    assert_eq!(open.script.live.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn the_same_endpoints_are_served_on_a_unix_socket() {
    let open = open().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("http.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let serving = tokio::spawn(serve(listener, open.api.clone(), open.shutdown.clone()));
    let mut connection = Connection::over(UnixStream::connect(&path).await.unwrap());
    connection
        .send(&request("POST", CHAT, &[], &question()))
        .await;
    let answer = connection.answer().await;
    assert_eq!(
        (answer.status, &answer.json()["model"]),
        (200, &json!("tiny"))
    );
    drop(connection);
    open.shutdown.cancel();
    serving.await.unwrap();
}

#[test]
fn any_body_gets_an_answer_in_shape() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let open = runtime.block_on(open());
    let mut runner = TestRunner::new(Config {
        cases: 200,
        failure_persistence: None,
        ..Config::default()
    });
    let paths = prop::sample::select(vec![CHAT, "/v1/audio/speech", "/v1/audio/transcriptions"]);
    let body = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        r#"\{"(messages|input|voice|stream|stop)": ?(null|1|-1e400|"[a-z]{0,9}"|\[\]|\{\}|\[\{"role": ?"user"\}\])\}"#
            .prop_map(String::into_bytes),
    ];
    let kind = prop::sample::select(vec![
        "application/json",
        "multipart/form-data; boundary=B",
        "x",
    ]);
    runner
        .run(&(paths, body, kind), |(path, body, kind)| {
            let answer =
                runtime.block_on(post(open.address, path, &[("content-type", kind)], &body));
            prop_assert!(answer.complete);
            if answer.status != 200 {
                prop_assert_eq!(answer.status, 400);
                prop_assert!(!answer.error_code().is_empty());
            }
            Ok(())
        })
        .unwrap();
}
