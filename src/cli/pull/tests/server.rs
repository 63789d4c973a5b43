//! HTTP server of these tests, which speaks as the hubs do and fails on request.

use std::{
    collections::BTreeMap,
    io::{self, BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex},
    thread,
};

/// A request.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub path: String,
    /// Names are in lower case.
    pub headers: BTreeMap<String, String>,
}

impl Request {
    /// First byte of the requested range.
    pub(super) fn from(&self) -> usize {
        let range = self.headers.get("range").map(String::as_str);
        let from = range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-'));
        from.map_or(0, |from| from.parse().unwrap())
    }
}

/// A response.
#[derive(Clone, Debug, Default)]
pub(super) struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// The connection ends after so many bytes of the body.
    pub cut: Option<usize>,
    /// The body's position in its file, for the gate.
    pub from: usize,
}

impl Reply {
    pub(super) fn status(status: u16) -> Self {
        Self {
            status,
            ..Self::default()
        }
    }

    /// A document.
    pub(super) fn json(value: &serde_json::Value) -> Self {
        Self {
            body: value.to_string().into_bytes(),
            ..Self::status(200)
        }
    }

    pub(super) fn redirect(to: String) -> Self {
        Self::status(302).with("location", to)
    }

    /// The whole file, whatever the range.
    pub(super) fn whole(file: &[u8]) -> Self {
        Self {
            body: file.to_vec(),
            ..Self::status(200)
        }
    }

    /// The requested range of a file.
    pub(super) fn range(request: &Request, file: &[u8]) -> Self {
        let from = request.from();
        if from >= file.len() {
            return Self::status(416);
        }
        let range = format!("bytes {from}-{}/{}", file.len() - 1, file.len());
        Self {
            body: file[from..].to_vec(),
            from,
            ..Self::status(206)
        }
        .with("content-range", range)
    }

    pub(super) fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    pub(super) fn cut(mut self, bytes: usize) -> Self {
        self.cut = Some(bytes);
        self
    }
}

/// A server on a free port of the loopback device.
pub(super) struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    answer: Box<dyn Fn(&Request) -> Reply + Send + Sync>,
    seen: Mutex<Vec<Request>>,
    gate: Mutex<Gate>,
    moved: Condvar,
}

/// Bodies are sent up to `open`, a position in their file; `sent` is the farthest that was reached.
struct Gate {
    open: usize,
    sent: usize,
    /// Connections from before the gate was moved end.
    round: usize,
}

impl Server {
    pub(super) fn start(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            answer: Box::new(answer),
            seen: Mutex::default(),
            gate: Mutex::new(Gate {
                open: usize::MAX,
                sent: 0,
                round: 0,
            }),
            moved: Condvar::new(),
        });
        let theirs = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, shared) = (stream.unwrap(), Arc::clone(&theirs));
                // A client that goes away is the test's own.
                thread::spawn(move || drop(shared.serve(&stream)));
            }
        });
        Self { address, shared }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(super) fn port(&self) -> u16 {
        self.address.port()
    }

    /// Requests so far.
    pub(super) fn seen(&self) -> Vec<Request> {
        self.shared.seen.lock().unwrap().clone()
    }

    /// Sends bodies up to this position of their file, on new connections.
    pub(super) fn open(&self, position: usize) {
        let mut gate = self.shared.gate.lock().unwrap();
        (gate.open, gate.sent) = (position, 0);
        gate.round += 1;
        self.shared.moved.notify_all();
    }

    /// Waits until a body was sent up to the gate; false once `ended` returns true.
    pub(super) fn wait_at_gate(&self, mut ended: impl FnMut() -> bool) -> bool {
        let mut gate = self.shared.gate.lock().unwrap();
        while gate.sent < gate.open {
            let wait = std::time::Duration::from_millis(20);
            (gate, _) = self.shared.moved.wait_timeout(gate, wait).unwrap();
            if ended() {
                return false;
            }
        }
        true
    }
}

impl Shared {
    fn serve(&self, stream: &TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let round = self.gate.lock().unwrap().round;
        let mut reader = BufReader::new(stream);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            let mut words = line.split(' ');
            let (method, path) = (words.next().unwrap(), words.next().unwrap().to_owned());
            let mut headers = BTreeMap::new();
            loop {
                let mut line = String::new();
                reader.read_line(&mut line)?;
                let Some((name, value)) = line.trim().split_once(": ") else {
                    break;
                };
                headers.insert(name.to_lowercase(), value.to_owned());
            }
            let request = Request { path, headers };
            self.seen.lock().unwrap().push(request.clone());
            if method == "CONNECT" {
                // A proxy whose every target is this server.
                (&mut &*stream).write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
                continue;
            }
            let reply = (self.answer)(&request);
            let mut head = format!(
                "HTTP/1.1 {} Text\r\ncontent-length: {}\r\n",
                reply.status,
                reply.body.len()
            );
            for (name, value) in &reply.headers {
                head.push_str(&format!("{name}: {value}\r\n"));
            }
            head.push_str("\r\n");
            (&mut &*stream).write_all(head.as_bytes())?;
            let end = reply.cut.unwrap_or(usize::MAX).min(reply.body.len());
            let mut at = 0;
            while at < end {
                let position = reply.from + at;
                let mut gate = self.gate.lock().unwrap();
                while gate.open <= position {
                    if gate.round != round {
                        return Ok(());
                    }
                    gate.sent = gate.sent.max(position);
                    self.moved.notify_all();
                    gate = self.moved.wait(gate).unwrap();
                }
                let next = end.min(at + (1 << 16)).min(gate.open - reply.from);
                drop(gate);
                (&mut &*stream).write_all(&reply.body[at..next])?;
                at = next;
            }
            if reply.cut.is_some() {
                return Ok(());
            }
        }
    }
}
