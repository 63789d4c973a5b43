//! Client that exposes every byte, including those hidden by SDKs.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// Longer than any answer; only a hang reaches it.
const HANG: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
    /// Whether the body reached its announced end.
    pub(crate) complete: bool,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// Returns `error.code` of the body, whose shape is checked.
    pub(crate) fn error_code(&self) -> String {
        let body = self.json();
        let error = body["error"]
            .as_object()
            .unwrap_or_else(|| panic!("no error in {body}"));
        let mut names: Vec<&str> = error.keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["code", "message", "param", "type"]);
        assert!(!error["message"].as_str().unwrap().is_empty());
        error["code"].as_str().unwrap().to_owned()
    }

    /// Returns the payloads of the events, and the number of comments between them.
    pub(crate) fn events(&self) -> (Vec<String>, usize) {
        assert_eq!(self.header("content-type"), "text/event-stream");
        let (mut payloads, mut comments) = (Vec::new(), 0);
        for block in self.text().split("\n\n").filter(|block| !block.is_empty()) {
            // some APIs name their events
            let named = block
                .strip_prefix("event: ")
                .and_then(|block| block.split_once('\n'));
            let data = named.map_or(block, |(_name, data)| data);
            if let Some(payload) = data.strip_prefix("data: ") {
                payloads.push(payload.to_owned());
            } else {
                assert_eq!(block, ": keepalive");
                comments += 1;
            }
        }
        (payloads, comments)
    }

    /// Returns named events, whose names must match their types.
    pub(crate) fn named_events(&self) -> Vec<Value> {
        let named = self
            .text()
            .lines()
            .filter_map(|line| line.strip_prefix("event: "));
        let named: Vec<&str> = named.collect();
        let payloads = self.events().0;
        let events: Vec<Value> = payloads
            .iter()
            .map(|payload| serde_json::from_str(payload).unwrap())
            .collect();
        let types: Vec<&str> = events
            .iter()
            .map(|event| event["type"].as_str().unwrap())
            .collect();
        assert_eq!(named, types);
        events
    }
}

/// Merges two JSON objects.
pub(crate) fn with(mut object: Value, more: &Value) -> Value {
    object
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    object
}

/// Connection for sequential requests.
pub(crate) struct Connection<T = TcpStream> {
    io: T,
    seen: Vec<u8>,
    silence_max: Duration,
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> Self {
        Self::over(TcpStream::connect(address).await.unwrap())
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Connection<T> {
    pub(crate) const fn over(io: T) -> Self {
        Self {
            io,
            seen: Vec::new(),
            silence_max: HANG,
        }
    }

    /// Sets another limit on the server's silence.
    pub(crate) fn with_silence_max(self, silence_max: Duration) -> Self {
        Self {
            silence_max,
            ..self
        }
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        self.io.write_all(bytes).await.unwrap();
    }

    /// Sends as much as is accepted: a server that refuses may close during the request.
    pub(crate) async fn send_lossy(&mut self, bytes: &[u8]) {
        let _refused = self.io.write_all(bytes).await;
    }

    /// Waits until the answer so far contains `text`.
    pub(crate) async fn wait_for(&mut self, text: &str) {
        while !String::from_utf8_lossy(&self.seen).contains(text) {
            assert!(
                self.more().await,
                "closed before `{text}`: {:?}",
                String::from_utf8_lossy(&self.seen)
            );
        }
    }

    /// Returns whether the server has closed, without unread data.
    pub(crate) async fn closed(&mut self) -> bool {
        !self.more().await && self.seen.is_empty()
    }

    pub(crate) async fn answer(&mut self) -> Answer {
        let end = loop {
            if let Some(at) = find(&self.seen, b"\r\n\r\n") {
                break at;
            }
            assert!(
                self.more().await,
                "closed without an answer: {:?}",
                String::from_utf8_lossy(&self.seen)
            );
        };
        let head = String::from_utf8(self.seen[..end].to_vec()).unwrap();
        self.seen.drain(..end + 4);
        let mut lines = head.split("\r\n");
        let status = lines
            .next()
            .unwrap()
            .split(' ')
            .nth(1)
            .unwrap()
            .parse()
            .unwrap();
        let headers: BTreeMap<String, String> = lines
            .map(|line| line.split_once(':').unwrap())
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        if status == 100 {
            return Box::pin(self.answer()).await;
        }
        let (body, complete) = if headers
            .get("transfer-encoding")
            .is_some_and(|value| value == "chunked")
        {
            self.chunked().await
        } else {
            let length: usize = headers
                .get("content-length")
                .map_or(0, |length| length.parse().unwrap());
            self.exactly(length).await
        };
        Answer {
            status,
            headers,
            body,
            complete,
        }
    }

    async fn chunked(&mut self) -> (Vec<u8>, bool) {
        let mut body = Vec::new();
        loop {
            let end = loop {
                if let Some(at) = find(&self.seen, b"\r\n") {
                    break at;
                }
                if !self.more().await {
                    return (body, false);
                }
            };
            let length =
                usize::from_str_radix(std::str::from_utf8(&self.seen[..end]).unwrap(), 16).unwrap();
            self.seen.drain(..end + 2);
            let (piece, complete) = self.exactly(length + 2).await;
            if !complete {
                return (body, false);
            }
            body.extend_from_slice(&piece[..length]);
            if length == 0 {
                return (body, true);
            }
        }
    }

    async fn exactly(&mut self, length: usize) -> (Vec<u8>, bool) {
        while self.seen.len() < length {
            if !self.more().await {
                return (std::mem::take(&mut self.seen), false);
            }
        }
        (self.seen.drain(..length).collect(), true)
    }

    async fn more(&mut self) -> bool {
        let mut buffer = [0; 16 * 1024];
        let read = timeout(self.silence_max, self.io.read(&mut buffer))
            .await
            .expect("the server hangs");
        let read = read.unwrap_or(0);
        self.seen.extend_from_slice(&buffer[..read]);
        read > 0
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack
        .windows(needle.len())
        .position(|window| window == needle)
}

/// Returns a request as bytes.
pub(crate) fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut head = format!("{method} {path} HTTP/1.1\r\n");
    if headers
        .iter()
        .all(|(name, _)| !name.eq_ignore_ascii_case("host"))
    {
        head.push_str("host: localhost\r\n");
    }
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if method != "GET" {
        head.push_str(&format!("content-length: {}\r\n", body.len()));
    }
    head.push_str("\r\n");
    let mut bytes = head.into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

pub(crate) async fn get(address: SocketAddr, path: &str) -> Answer {
    let mut connection = Connection::open(address).await;
    connection.send(&request("GET", path, &[], b"")).await;
    connection.answer().await
}

pub(crate) async fn post_json(address: SocketAddr, path: &str, body: &Value) -> Answer {
    post(
        address,
        path,
        &[("content-type", "application/json")],
        body.to_string().as_bytes(),
    )
    .await
}

pub(crate) async fn post(
    address: SocketAddr,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Answer {
    let mut connection = Connection::open(address).await;
    connection
        .send_lossy(&request("POST", path, headers, body))
        .await;
    connection.answer().await
}

/// Sends a form with these fields; a field with a file name is a file.
pub(crate) async fn post_form(
    address: SocketAddr,
    path: &str,
    fields: &[(&str, Option<&str>, &[u8])],
) -> Answer {
    post(address, path, &[("content-type", FORM)], &form(fields)).await
}

/// Content type of [`form`].
pub(crate) const FORM: &str = "multipart/form-data; boundary=BOUNDARY";

/// Returns a multipart form with these fields; a field with a file name is a file.
pub(crate) fn form(fields: &[(&str, Option<&str>, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, file, value) in fields {
        let file = file.map_or_else(String::new, |file| {
            format!("; filename=\"{file}\"\r\ncontent-type: audio/wav")
        });
        body.extend_from_slice(
            format!("--BOUNDARY\r\ncontent-disposition: form-data; name=\"{name}\"{file}\r\n\r\n")
                .as_bytes(),
        );
        body.extend_from_slice(value);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(b"--BOUNDARY--\r\n");
    body
}
