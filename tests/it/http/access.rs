//! Clients with keys: accepted ones, the form of refusals, and proxies.

use std::sync::Arc;

use cotenant::{
    http::{Access, Client, Key, Keyless, Limits},
    policy::{lease::Class, roles::Role},
    units::Tokens,
};
use serde_json::json;
use tokio::net::TcpStream;
use tokio_tungstenite::{client_async, tungstenite::client::IntoClientRequest as _};

use super::{
    client::{Connection, get, post, request},
    script::{Open, Step, delta, finished, open_to, started},
};

const CHAT: &str = "/v1/chat/completions";
const KEY: (&str, &str) = ("authorization", "Bearer key-of-the-kitchen");

async fn with_keys(keyless: Keyless) -> Open {
    let client = |name, key: &str, class, tokens| {
        let role = if name == "study" {
            Role::Operator
        } else {
            Role::Viewer
        };
        Arc::new(Client::new(
            (name, Key::new(key.to_owned())),
            class,
            role,
            1,
            tokens,
            None,
        ))
    };
    let access = Access {
        hosts: vec!["box.example".to_owned()],
        clients: Some(vec![
            client(
                "kitchen",
                "key-of-the-kitchen",
                Class::Batch,
                Some(Tokens::new(7)),
            ),
            client("study", "key-of-the-study", Class::Interactive, None),
        ]),
        keyless,
        ..Access::default()
    };
    open_to(Limits::default(), true, access).await
}

fn question() -> Vec<u8> {
    json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9})
        .to_string()
        .into_bytes()
}

#[tokio::test]
async fn an_operators_key_commands_and_any_other_only_looks() {
    let open = with_keys(Keyless::default()).await;
    let operator = ("authorization", "Bearer key-of-the-study");
    let password = ("authorization", "Basic bWU6a2V5LW9mLXRoZS1zdHVkeQ==");
    let operate = async |header, body: serde_json::Value| {
        let body = body.to_string().into_bytes();
        post(open.address, "/operate", &[header], &body).await
    };
    let shed = json!({"command": "shed", "bytes": 16 << 20});
    let done = operate(operator, shed.clone()).await;
    assert_eq!(
        (done.status, &done.json()["outcome"]),
        (
            200,
            &json!("shed 16 MiB of 16 MiB; the engine holds 20 MiB")
        )
    );
    let done = operate(operator, json!({"command": "regrow"})).await;
    assert_eq!(done.json()["outcome"], "everything has its full size");
    // A viewer's key is refused by name, and the password of a browser is no key here.
    for (header, body, status, code) in [
        (KEY, shed.clone(), 403, "role_missing"),
        (password, shed, 401, "invalid_api_key"),
        (
            operator,
            json!({"command": "restart", "worker": "asr"}),
            400,
            "invalid_value",
        ),
        (operator, json!({"command": "drain"}), 400, "invalid_type"),
        (operator, json!({"command": "shed"}), 400, "invalid_type"),
    ] {
        let refused = operate(header, body.clone()).await;
        assert_eq!(
            (refused.status, refused.error_code().as_str()),
            (status, code),
            "{body}"
        );
        if status == 403 {
            let message = refused.json()["error"]["message"].to_string();
            assert!(
                message.contains("client `kitchen` has the role viewer"),
                "{message}"
            );
        }
    }
    for (header, may) in [(KEY, false), (operator, true), (password, true)] {
        let mut connection = Connection::open(open.address).await;
        connection
            .send(&request("GET", "/status.json", &[header], b""))
            .await;
        let status = connection.answer().await;
        assert_eq!(status.json()["mayOperate"], may, "{header:?}");
    }
}

#[tokio::test]
async fn without_a_known_key_each_protocol_refuses_in_its_own_form() {
    let open = with_keys(Keyless::default()).await;
    for headers in [
        &[][..],
        &[("authorization", "Bearer key-of-the-kitche")],
        &[("x-api-key", "no")],
    ] {
        let openai = post(open.address, CHAT, headers, &question()).await;
        assert_eq!(
            (openai.status, openai.error_code().as_str()),
            (401, "invalid_api_key")
        );
        assert_eq!(openai.json()["error"]["type"], "invalid_request_error");
        assert_eq!(openai.header("www-authenticate"), "Bearer");
        assert_eq!(openai.header("x-should-retry"), "false");
        let anthropic = post(open.address, "/v1/messages", headers, b"{}").await;
        assert_eq!(
            (anthropic.status, &anthropic.json()["type"]),
            (401, &json!("error"))
        );
        assert_eq!(anthropic.json()["error"]["type"], "authentication_error");
        let ollama = post(open.address, "/api/chat", headers, b"{}").await;
        assert_eq!(ollama.status, 401);
        assert!(
            ollama.json()["error"].as_str().unwrap().contains("API key"),
            "{ollama:?}"
        );
        for path in [
            "/v1/models",
            "/health",
            "/metrics",
            "/status.json",
            "/history.json",
            "/",
            "/v1/realtime",
            "/nothing",
        ] {
            assert_eq!(get(open.address, path).await.status, 401, "{path}");
        }
    }
    assert!(open.script.chats.lock().unwrap().is_empty());
    assert_eq!(
        post(open.address, CHAT, &[KEY], &question()).await.status,
        200
    );
    let key = ("x-api-key", "key-of-the-study");
    assert_eq!(
        post(open.address, CHAT, &[key], &question()).await.status,
        200
    );
    let asked = open.script.chats.lock().unwrap();
    let clients: Vec<_> = asked
        .iter()
        .map(|chat| chat.meta.client.as_ref().unwrap())
        .collect();
    assert_eq!(
        (&*clients[0].name, clients[0].class),
        ("kitchen", Class::Batch)
    );
    assert_eq!(
        (clients[0].tokens_max, &*clients[1].name),
        (Some(Tokens::new(7)), "study")
    );
}

#[tokio::test]
async fn health_and_metrics_are_open_where_the_setting_says_so() {
    let open = with_keys(Keyless {
        health: true,
        metrics: true,
    })
    .await;
    assert_eq!(get(open.address, "/health").await.status, 200);
    assert_eq!(get(open.address, "/metrics").await.status, 200);
    assert_eq!(get(open.address, "/v1/models").await.status, 401);
}

#[tokio::test]
async fn a_client_has_so_many_requests_at_once_and_others_have_their_own() {
    let open = with_keys(Keyless::default()).await;
    open.script
        .answer([started(), Step::Gate, delta("done"), finished()]);
    let mut first = Connection::open(open.address).await;
    first
        .send(&request("POST", CHAT, &[KEY], &question()))
        .await;
    while open.script.chats.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    let second = post(open.address, CHAT, &[KEY], &question()).await;
    assert_eq!(
        (second.status, second.error_code().as_str()),
        (429, "rate_limit_exceeded")
    );
    assert!(
        second.text().contains("client `kitchen`"),
        "{}",
        second.text()
    );
    open.script.answer([started(), delta("done"), finished()]);
    let other = post(
        open.address,
        CHAT,
        &[("x-api-key", "key-of-the-study")],
        &question(),
    )
    .await;
    assert_eq!(other.status, 200);
}

#[tokio::test]
async fn a_realtime_session_needs_a_key_in_a_header_or_as_browsers_send_it() {
    let open = with_keys(Keyless::default()).await;
    for (header, value, opens) in [
        ("authorization", "Bearer key-of-the-study", true),
        (
            "sec-websocket-protocol",
            "realtime, openai-insecure-api-key.key-of-the-kitchen",
            true,
        ),
        (
            "sec-websocket-protocol",
            "realtime, openai-insecure-api-key.wrong",
            false,
        ),
        ("x-nothing", "1", false),
    ] {
        let stream = TcpStream::connect(open.address).await.unwrap();
        let url = format!("ws://{}/v1/realtime?model=tiny", open.address);
        let mut handshake = url.into_client_request().unwrap();
        handshake
            .headers_mut()
            .insert(header, value.parse().unwrap());
        let opened = client_async(handshake, stream).await;
        assert_eq!(
            opened.is_ok(),
            opens,
            "{header}: {value}: {:?}",
            opened.err()
        );
    }
}

/// A page of an allowed host sends browser requests: first without a key, then with it.
#[tokio::test]
async fn a_page_of_an_allowed_host_is_let_in_by_its_browser() {
    let open = with_keys(Keyless::default()).await;
    let ask = async |method: &'static str, headers: &[(&str, &str)]| {
        let mut connection = Connection::open(open.address).await;
        connection
            .send(&request(method, CHAT, headers, &question()))
            .await;
        connection.answer().await
    };
    let origin = ("origin", "https://box.example");
    let wanted = [
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,x-a"),
    ];
    let answer = ask("OPTIONS", &[origin, wanted[0], wanted[1]]).await;
    assert_eq!(answer.status, 204, "{answer:?}");
    assert_eq!(
        answer.header("access-control-allow-origin"),
        "https://box.example"
    );
    assert_eq!(
        answer.header("access-control-allow-headers"),
        "authorization,x-a"
    );
    assert!(
        answer
            .header("access-control-allow-methods")
            .contains("POST")
    );
    for (headers, status) in [
        (&[origin, ("sec-fetch-site", "cross-site"), KEY][..], 200),
        (&[origin], 401),
    ] {
        let answer = ask("POST", headers).await;
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(
            answer.header("access-control-allow-origin"),
            "https://box.example"
        );
        assert!(answer.header("vary").contains("origin"));
    }
    for foreign in ["https://evil.example", "null"] {
        for method in ["OPTIONS", "POST"] {
            let answer = ask(method, &[("origin", foreign), wanted[0], KEY]).await;
            assert_eq!(
                (answer.status, answer.error_code().as_str()),
                (403, "origin_not_allowed"),
                "{answer:?}"
            );
            assert!(
                answer.text().contains("`http.allowed_hosts`"),
                "{}",
                answer.text()
            );
            assert_eq!(answer.header("access-control-allow-origin"), "");
        }
    }
    assert_eq!(ask("OPTIONS", &[KEY]).await.status, 405, "of no page");
}

/// Home Assistant's ingress passes on the host and the origin of the user's browser.
#[tokio::test]
async fn a_trusted_proxy_passes_on_any_host_name_and_others_do_not() {
    let sent = [
        ("Host", "home.example:8123"),
        ("origin", "https://home.example:8123"),
    ];
    for (proxy, status) in [("127.0.0.1", 200), ("172.30.32.2", 421)] {
        let access = Access {
            proxies: vec![proxy.parse().unwrap()],
            ..Access::default()
        };
        let open = open_to(Limits::default(), true, access).await;
        let answer = post(open.address, CHAT, &sent, &question()).await;
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(answer.header("access-control-allow-origin"), "");
    }
}

/// The headers that nginx sends in the example of `docs/operating.md`.
#[tokio::test]
async fn what_a_proxy_with_tls_sends_is_served_under_its_host_name() {
    let open = with_keys(Keyless::default()).await;
    let document = include_str!("../../../docs/operating.md");
    let set: Vec<&str> = document
        .lines()
        .filter_map(|line| line.trim().strip_prefix("proxy_set_header "))
        .collect();
    let value = |value: &str| match value.trim_end_matches(';') {
        "$host" => "box.example".to_owned(),
        "$remote_addr" => "203.0.113.7".to_owned(),
        "$http_upgrade" => String::new(),
        literal => literal.trim_matches('"').to_owned(),
    };
    let headers: Vec<(&str, String)> = set
        .iter()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, text)| (name, value(text)))
        .filter(|(_, value)| !value.is_empty())
        .collect();
    assert!(
        headers
            .iter()
            .any(|(name, value)| *name == "Host" && value == "box.example"),
        "{headers:?}"
    );
    let mut sent: Vec<(&str, &str)> = headers
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect();
    sent.push(KEY);
    assert_eq!(
        post(open.address, CHAT, &sent, &question()).await.status,
        200
    );
    sent.retain(|(name, _)| *name != "Host");
    sent.push(("Host", "other.example"));
    assert_eq!(
        post(open.address, CHAT, &sent, &question()).await.status,
        421
    );
}
