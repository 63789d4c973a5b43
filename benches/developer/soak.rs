//! `developer soak`: growth of the daemon's memory with the number of served requests.
//!
//! It sends requests of every kind in rotation: chats with and without a schema by each API, transcriptions, lists of
//! models, metrics, states, leases, and bad input. The daemon's anonymous memory is read once a second; the result is
//! the slope of the regression line after the warm-up. Memory that is returned late shows as noise, a leak as slope.

use std::{
    fs,
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
        CreateLeaseRequest, EngineState, LeaseClass, ReleaseLeaseRequest, WorkerState,
        lease_service_client::LeaseServiceClient, operator_service_client::OperatorServiceClient,
    },
};

/// Settings of the soak.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SoakArgs {
    /// Requests to send.
    #[arg(long, default_value_t = 600_000, value_parser = clap::value_parser!(u32).range(100..))]
    pub requests: u32,
    /// Clients at once.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub clients: u32,
    /// Print each reading on stderr: seconds, requests, anonymous KiB.
    #[arg(long)]
    pub verbose: bool,
}

#[derive(Clone, Copy, Debug)]
struct Look {
    seconds: f64,
    requests: f64,
    kib: f64,
}

pub(super) async fn run(args: &SoakArgs) -> Result<Report, String> {
    let port = free_port().map_err(|error| error.to_string())?;
    let mut stage =
        Stage::set(|folder| configuration(folder, port)).map_err(|error| error.to_string())?;
    let channel = daemon::connected(&stage, PATIENCE).await?;
    let mut operator = OperatorServiceClient::new(channel.clone());
    daemon::until(&mut operator, PATIENCE, |status| {
        status
            .engine
            .as_ref()
            .is_some_and(|engine| engine.state() == EngineState::Ready && !engine.changing)
            && status
                .workers
                .iter()
                .all(|worker| worker.state() == WorkerState::Ready)
    })
    .await
    .map_err(daemon::last_words(&stage))?;
    let pid = stage.daemon().pid();
    let began = Instant::now();
    let reading = Reading::now();
    let (sent, failed) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let mut clients = Vec::new();
    for _ in 0..args.clients {
        let (sent, failed, requests) = (Arc::clone(&sent), Arc::clone(&failed), args.requests);
        let leases = LeaseServiceClient::new(channel.clone());
        clients.push(tokio::spawn(async move {
            let agent: ureq::Agent = ureq::Agent::config_builder()
                .http_status_as_error(false)
                .timeout_global(Some(PATIENCE))
                .build()
                .into();
            loop {
                let number = sent.fetch_add(1, Ordering::Relaxed);
                if number >= requests {
                    return;
                }
                if let Err(problem) = request(number, &agent, port, leases.clone()).await {
                    failed.fetch_add(1, Ordering::Relaxed);
                    eprintln!("request {number}: {problem}");
                }
            }
        }));
    }
    let mut looks = Vec::new();
    while !clients.iter().all(tokio::task::JoinHandle::is_finished) {
        let look = Look {
            seconds: began.elapsed().as_secs_f64(),
            requests: f64::from(sent.load(Ordering::Relaxed).min(args.requests)),
            kib: anonymous_kib(pid).ok_or("the daemon has ended")?,
        };
        if args.verbose {
            eprintln!("{:.0}\t{:.0}\t{:.0}", look.seconds, look.requests, look.kib);
        }
        looks.push(look);
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let warm: Vec<Look> = looks
        .iter()
        .copied()
        .filter(|look| look.requests >= f64::from(args.requests) * WARM_UP)
        .collect();
    let mut report = Report::new(
        "soak",
        format!(
            "{} requests by {} clients, {:.0} s",
            args.requests,
            args.clients,
            began.elapsed().as_secs_f64()
        ),
    );
    let by_request =
        slope(&warm, |look| look.requests).unwrap_or_default() * f64::from(args.requests);
    let by_minute = slope(&warm, |look| look.seconds).unwrap_or_default() * 60.0;
    let limit = Some(Limit::AtMost(GROWTH_KIB_MAX));
    report.figure(
        "growth with the requests, after the warm-up",
        "KiB",
        by_request,
        limit,
    );
    report.figure("the same in a minute", "KiB", by_minute, None);
    report.figure(
        "anonymous memory at the end",
        "KiB",
        warm.last().map_or(0.0, |look| look.kib),
        None,
    );
    let failed = f64::from(failed.load(Ordering::Relaxed));
    report.figure("requests that failed", "", failed, Some(Limit::AtMost(0.0)));
    report.others(&reading);
    Ok(report)
}

/// Sends request number `number`; each hundred includes all kinds.
async fn request(
    number: u32,
    agent: &ureq::Agent,
    port: u16,
    mut leases: LeaseServiceClient<tonic::transport::Channel>,
) -> Result<(), String> {
    let (path, body, expected) = match number % 100 {
        0..10 => ("v1/chat/completions", Some(CHAT), 200),
        10 => ("v1/chat/completions", Some(SCHEMA), 200),
        11..13 => ("api/chat", Some(OLLAMA), 200),
        13..15 => ("v1/messages", Some(MESSAGES), 200),
        15..17 => ("v1/responses", Some(RESPONSES), 200),
        17..20 => ("v1/audio/transcriptions", Some(TRANSCRIPTION), 200),
        20..25 => (
            "v1/chat/completions",
            Some("{\"model\": \"soak\", \"messages\": 7}"),
            400,
        ),
        25..30 => ("no/such/path", None, 404),
        30..55 => ("v1/models", None, 200),
        55..70 => ("metrics", None, 200),
        70..80 => ("status.json", None, 200),
        _ => {
            let asked = CreateLeaseRequest {
                request_id: format!("soak-{number}"),
                tenant: format!("tenant-{}", number % 7),
                lease_class: LeaseClass::Batch.into(),
                min_bytes: 1 << 20,
                ..CreateLeaseRequest::default()
            };
            // Released memory counts until it is measured, which under constant load takes longer than the next
            // request.
            let lease = loop {
                match leases.create_lease(asked.clone()).await {
                    Ok(lease) => break lease.into_inner().lease.unwrap_or_default(),
                    Err(status) if status.code() == tonic::Code::ResourceExhausted => {
                        tokio::time::sleep(REST).await;
                    }
                    Err(status) => return Err(status.to_string()),
                }
            };
            let release = ReleaseLeaseRequest {
                name: lease.name,
                boot_id: lease.boot_id,
                generation: lease.generation,
            };
            return leases
                .release_lease(release)
                .await
                .map(drop)
                .map_err(|status| status.to_string());
        }
    };
    let (agent, url) = (agent.clone(), format!("http://127.0.0.1:{port}/{path}"));
    let sent = tokio::task::spawn_blocking(move || {
        let mut answer = match body {
            Some(body) => agent.post(&url).content_type(kind_of(body)).send(body),
            None => agent.get(&url).call(),
        }
        .map_err(|error| error.to_string())?;
        let text = answer
            .body_mut()
            .read_to_string()
            .map_err(|error| error.to_string())?;
        match answer.status().as_u16() {
            status if status == expected => Ok(()),
            status => Err(format!("{url}: {status}: {text}")),
        }
    });
    sent.await.map_err(|error| error.to_string())?
}

fn kind_of(body: &str) -> &'static str {
    if body == TRANSCRIPTION {
        "multipart/form-data; boundary=soak"
    } else {
        "application/json"
    }
}

/// Returns the slope of the least-squares line through the readings; `None` with fewer than two.
fn slope(looks: &[Look], along: impl Fn(&Look) -> f64) -> Option<f64> {
    let count = f64::from(u32::try_from(looks.len()).ok()?);
    let mean = |of: &dyn Fn(&Look) -> f64| looks.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(&along), mean(&|look| look.kib));
    let spread: f64 = looks.iter().map(|look| (along(look) - x).powi(2)).sum();
    let together: f64 = looks
        .iter()
        .map(|look| (along(look) - x) * (look.kib - y))
        .sum();
    (spread > 0.0).then(|| together / spread)
}

/// Counts pages without a file individually: `RssAnon` of `status` is a sum of per-processor counters, each up to 32
/// pages late (`percpu_counter_batch`).
pub(crate) fn anonymous_kib(pid: u32) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Anonymous:"))?;
    line.split_whitespace().next()?.parse().ok()
}

pub(crate) fn free_port() -> std::io::Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?
        .local_addr()?
        .port())
}

fn configuration(folder: &Path, port: u16) -> String {
    let folder = folder.display();
    format!(
        "\
budget: {{total: 512MiB, reserve: 64MiB, scope: session}}
llm: {{path: {folder}/demo.gguf, name: soak, threads: 1, context: 4096, kv_floor: 512}}
workers:
  - name: asr
    role: asr
    argv: [\"${{SELF}}\", worker, asr, --socket, \"${{SOCKET}}\", --vocabulary, grammar, --grammar, {folder}/home.gram]
    memory: {{steady: 40MiB, peak: 48MiB}}
http: {{listen: '127.0.0.1:{port}'}}
grpc: {{socket: {folder}/cotenant.sock, abstract_name: none}}
journal: {{path: {folder}/journal.ndjson}}
state_dir: {folder}/state
runtime_dir: {folder}
log: {{filter: warn, format: text}}
"
    )
}

const CHAT: &str = r#"{"model": "soak", "max_tokens": 4, "messages": [{"role": "user", "content": "turn on the lamp"}]}"#;

const OLLAMA: &str = r#"{"model": "soak", "stream": false, "options": {"num_predict": 3}, "messages": [{"role": "user", "content": "hello"}]}"#;

const SCHEMA: &str = r#"{"model": "soak", "max_tokens": 16, "messages": [{"role": "user", "content": "a colour"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "colour", "schema":
    {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}}}}"#;

const MESSAGES: &str = r#"{"model": "soak", "max_tokens": 4, "messages": [{"role": "user", "content": "turn on the lamp"}]}"#;

const RESPONSES: &str =
    r#"{"model": "soak", "max_output_tokens": 16, "input": "turn on the lamp", "store": false}"#;

/// Eight samples of silence at 12.8 kHz as a WAV file: every byte is ASCII, as required for text.
const TRANSCRIPTION: &str = concat!(
    "--soak\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nasr\r\n",
    "--soak\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n",
    "RIFF\x34\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\0\x32\0\0\0\x64\0\0\x02\0\x10\0data\x10\0\0\0",
    "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
    "\r\n--soak--\r\n",
);

/// Share of requests for warm-up: pools, threads, caches and the bounded logs of events.
const WARM_UP: f64 = 0.5;

/// Tolerated rise of the line over all requests: readings vary by some pages.
const GROWTH_KIB_MAX: f64 = 256.0;

/// Pause before a lease is requested again.
const REST: Duration = Duration::from_millis(50);

const LOOK_EVERY: Duration = Duration::from_secs(1);

const PATIENCE: Duration = Duration::from_secs(60);
