//! `developer bodies`: whether the daemon returns the memory of large requests of every API.
//!
//! Each free-form field gets values of each shape, from a few bytes to the limit of a body: over HTTP, the Realtime
//! API, Wyoming and gRPC. Most are refused, the others are answered with one token. The result is the daemon's
//! anonymous memory one minute after the last request, minus that before the first.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use cotenant::{
    cli::{
        bench::{
            daemon,
            load::Reading,
            report::{Limit, Report},
        },
        stage::Stage,
    },
    rpc::v1::{
        ChatMessage, ChatRole, Conversation, EngineState, GenerateRequest, generate_request::Input,
        llm_service_client::LlmServiceClient, operator_service_client::OperatorServiceClient,
    },
};
use futures_util::{SinkExt as _, StreamExt as _};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UnixStream},
    time::timeout,
};
use tokio_tungstenite::{client_async, tungstenite::Message};
use tonic::transport::Channel;

use crate::{
    shapes::{FIELDS, body_of, shapes},
    soak::{anonymous_kib, free_port},
};

/// Settings of the measurement.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct BodiesArgs {
    /// Requests to send.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(100..))]
    pub requests: u32,
    /// Clients at once.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=32))]
    pub clients: u32,
    /// The model; the demonstration's where none is given.
    #[arg(long)]
    pub model: Option<std::path::PathBuf>,
    /// Seconds between the last request and the reading.
    #[arg(long, default_value_t = 60)]
    pub rest: u64,
}

pub(crate) async fn run(args: &BodiesArgs) -> Result<Report, String> {
    let port = free_port().map_err(|error| error.to_string())?;
    let model = args.model.as_deref();
    let mut stage = Stage::set(|folder| configuration(folder, model, port))
        .map_err(|error| error.to_string())?;
    let channel = daemon::connected(&stage, PATIENCE).await?;
    let mut operator = OperatorServiceClient::new(channel.clone());
    daemon::until(&mut operator, PATIENCE, |status| {
        status
            .engine
            .as_ref()
            .is_some_and(|engine| engine.state() == EngineState::Ready && !engine.changing)
    })
    .await
    .map_err(daemon::last_words(&stage))?;
    let pid = stage.daemon().pid();
    let wyoming = stage.socket().with_file_name("wyoming.sock");
    let target = Target {
        port,
        wyoming: wyoming.into(),
        channel,
        sizes: [1 << 20, 128 << 10, 8 << 10, 256].map(Sized::of),
    };
    let reading = Reading::now();
    let read = || anonymous_kib(pid).ok_or("the daemon has ended");
    // One-time allocations of the first answers: buffers of the model, threads, pages of the templates.
    for number in 0..WARM_UP {
        let _answered = request(&target, number * PRIME, 3).await;
    }
    tokio::time::sleep(Duration::from_secs(args.rest.min(5))).await;
    let (before, began) = (read()?, Instant::now());
    let next = Arc::new(AtomicU32::new(0));
    let target = Arc::new(target);
    let clients: Vec<_> = (0..args.clients)
        .map(|_| {
            let (next, target, requests) = (Arc::clone(&next), Arc::clone(&target), args.requests);
            tokio::spawn(async move {
                let mut counts = Counts::default();
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= requests {
                        return counts;
                    }
                    counts.add(
                        request(
                            &target,
                            number,
                            usize::try_from(number % 4).unwrap_or_default(),
                        )
                        .await,
                    );
                }
            })
        })
        .collect();
    let mut most = before;
    while !clients.iter().all(tokio::task::JoinHandle::is_finished) {
        most = most.max(read()?);
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let mut counts = Counts::default();
    for client in clients {
        counts.join(client.await.map_err(|error| error.to_string())?);
    }
    let took = began.elapsed();
    tokio::time::sleep(Duration::from_secs(args.rest)).await;
    let left = read()? - before;
    let setting = format!(
        "{} requests by {} clients in {:.0} s: {} answered, {} refused",
        args.requests,
        args.clients,
        took.as_secs_f64(),
        counts.answered,
        counts.refused
    );
    let mut report = Report::new("bodies", setting);
    report.figure("anonymous memory before", "KiB", before, None);
    report.figure(
        "the most meanwhile, beyond that",
        "KiB",
        most - before,
        Some(Limit::AtMost(MOST_KIB)),
    );
    let rest = format!("what is left of it {} s behind the last", args.rest);
    report.figure(&rest, "KiB", left, Some(Limit::AtMost(LEFT_KIB)));
    report.figure(
        "requests without an answer",
        "",
        f64::from(counts.lost),
        Some(Limit::AtMost(0.0)),
    );
    report.others(&reading);
    Ok(report)
}

/// Target of the requests, with their values.
struct Target {
    port: u16,
    wyoming: Box<Path>,
    channel: Channel,
    sizes: [Sized; 4],
}

/// Values of one size, one per shape.
struct Sized {
    bytes: usize,
    values: Vec<String>,
}

impl Sized {
    fn of(bytes: usize) -> Self {
        Self {
            bytes,
            values: shapes(bytes.saturating_sub(300).max(16)),
        }
    }
}

#[derive(Clone, Copy, Default)]
struct Counts {
    answered: u32,
    refused: u32,
    lost: u32,
}

impl Counts {
    fn add(&mut self, answered: Result<bool, String>) {
        match answered {
            Ok(true) => self.answered += 1,
            Ok(false) => self.refused += 1,
            Err(problem) => {
                self.lost += 1;
                eprintln!("{problem}");
            }
        }
    }

    fn join(&mut self, other: Self) {
        self.answered += other.answered;
        self.refused += other.refused;
        self.lost += other.lost;
    }
}

/// Sends request number `number` with values of this size; returns whether it was answered or refused.
async fn request(target: &Target, number: u32, size: usize) -> Result<bool, String> {
    let number = usize::try_from(number).map_err(|error| error.to_string())?;
    let sized = target.sizes.get(size).ok_or("no such size")?;
    let value = sized
        .values
        .get(number / 4 % sized.values.len())
        .ok_or("no values")?;
    let asked = async {
        match number % 25 {
            0 => realtime(target, value).await,
            1 => wyoming(target, value).await,
            2 => generate(target, sized.bytes).await,
            _ => {
                let (path, field) = FIELDS.get(number / 3 % FIELDS.len()).ok_or("no fields")?;
                post(target.port, path, &body_of(field, value)).await
            }
        }
    };
    timeout(PATIENCE, asked)
        .await
        .map_err(|_late| format!("request {number}: no answer in time"))?
}

async fn post(port: u16, path: &str, body: &[u8]) -> Result<bool, String> {
    let answer = exchange(port, path, body).await?;
    let status = answer
        .get(9..12)
        .and_then(|status| str::from_utf8(status).ok())
        .unwrap_or_default();
    match status {
        "200" => Ok(true),
        "400" | "404" | "413" | "429" | "503" | "529" => Ok(false),
        other => Err(format!("{path}: status `{other}`")),
    }
}

/// Sends one request on a separate connection; returns the response, its head included.
pub(crate) async fn exchange(port: u16, path: &str, body: &[u8]) -> Result<Vec<u8>, String> {
    let failed = |error: std::io::Error| format!("{path}: {error}");
    let mut stream = TcpStream::connect(("127.0.0.1", port))
        .await
        .map_err(failed)?;
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n\
         content-length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.map_err(failed)?;
    // An early refusal may close the connection during the request.
    let _refused = stream.write_all(body).await;
    let mut answer = Vec::new();
    let _reset = stream.read_to_end(&mut answer).await;
    Ok(answer)
}

/// Opens a session with the value as its tools and as an item.
async fn realtime(target: &Target, value: &str) -> Result<bool, String> {
    let failed = |error: &dyn std::error::Error| format!("realtime: {error}");
    let stream = TcpStream::connect(("127.0.0.1", target.port))
        .await
        .map_err(|error| failed(&error))?;
    let url = format!("ws://127.0.0.1:{}/v1/realtime?model=tiny", target.port);
    let Ok((mut socket, _)) = client_async(url, stream).await else {
        return Ok(false);
    };
    let update = format!(
        r#"{{"type":"session.update","session":{{"tools":[{{"type":"function","name":"f","parameters":{{"enum":{value}}}}}]}}}}"#
    );
    let item = format!(
        r#"{{"type":"conversation.item.create","item":{{"type":"message","role":"user","content":{value}}}}}"#
    );
    for event in [update, item] {
        if socket.send(Message::text(event)).await.is_err() {
            return Ok(false);
        }
    }
    let mut updated = false;
    for _ in 0..3 {
        match socket.next().await {
            Some(Ok(Message::Text(text))) => updated |= text.contains("session.updated"),
            _ => break,
        }
    }
    let _closed = socket.close(None).await;
    Ok(updated)
}

async fn wyoming(target: &Target, value: &str) -> Result<bool, String> {
    let mut stream = UnixStream::connect(&target.wyoming)
        .await
        .map_err(|error| format!("wyoming: {error}"))?;
    let data = format!(r#"{{"text":"hi","context":{{"x":{value}}}}}"#);
    let head = format!(
        "{{\"type\":\"synthesize\",\"data_length\":{}}}\n",
        data.len()
    );
    let sent = stream
        .write_all(format!("{head}{data}{{\"type\":\"ping\"}}\n").as_bytes())
        .await;
    let mut answer = [0; 4096];
    let read = stream.read(&mut answer).await.unwrap_or_default();
    Ok(sent.is_ok()
        && answer
            .get(..read)
            .is_some_and(|answer| !String::from_utf8_lossy(answer).contains("\"error\"")))
}

/// Sends as many messages as fit.
async fn generate(target: &Target, bytes: usize) -> Result<bool, String> {
    let message = ChatMessage {
        role: ChatRole::User.into(),
        content: String::new(),
    };
    let input = Input::Conversation(Conversation {
        messages: vec![message; bytes / 5],
    });
    let asked = GenerateRequest {
        input: Some(input),
        max_tokens: Some(1),
        ..GenerateRequest::default()
    };
    let mut client = LlmServiceClient::new(target.channel.clone());
    match client.generate(asked).await {
        Ok(answer) => {
            let mut events = answer.into_inner();
            while let Ok(Some(_)) = events.message().await {}
            Ok(true)
        }
        Err(_refused) => Ok(false),
    }
}

fn configuration(folder: &Path, model: Option<&Path>, port: u16) -> String {
    let demo = folder.join("demo.gguf");
    let (model, folder) = (model.unwrap_or(&demo).display(), folder.display());
    format!(
        "\
budget: {{total: 2GiB, reserve: 256MiB, scope: session}}
llm: {{path: {model}, name: tiny, context: 2048, kv_floor: 512, answer_tokens_max: 1}}
workers:
  - name: tts
    role: tts
    argv: [\"${{SELF}}\", worker, tts, --socket, \"${{SOCKET}}\"]
    memory: {{steady: 10MiB, peak: 16MiB}}
http: {{listen: '127.0.0.1:{port}'}}
wyoming: {{listen: ['unix://{folder}/wyoming.sock']}}
grpc: {{socket: {folder}/cotenant.sock, abstract_name: none}}
journal: {{path: {folder}/journal.ndjson}}
state_dir: {folder}/state
runtime_dir: {folder}
log: {{filter: error, format: text}}
"
    )
}

/// Requests before the first reading.
const WARM_UP: u32 = 200;
/// Stride that spreads the first requests over all fields.
const PRIME: u32 = 37;
/// Memory that may remain a minute later.
const LEFT_KIB: f64 = 8.0 * 1024.0;
/// Limit on memory of concurrent requests: JSON requests, sessions, one template, and the bodies being read.
const MOST_KIB: f64 = 128.0 * 1024.0;
const LOOK_EVERY: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(120);
