//! Observation of the daemon from outside: its status and its journal.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tonic::transport::Channel;

use cotenant_rpc::v1::{
    EngineState, GetStatusRequest, GetStatusResponse, JournalEntry, LeaseKind, WatchEventsRequest,
    operator_service_client::OperatorServiceClient,
};
use cotenant_units::{Bytes, Timestamp, lock::locked};

/// Interval between two looks at the status.
const LOOK: Duration = Duration::from_millis(50);

/// Observation of memory by owner.
#[derive(Clone, Debug)]
pub struct Look {
    /// Time since the start of the demonstration.
    pub at: Timestamp,
    /// Measured use by owner.
    pub owners: BTreeMap<String, Bytes>,
    /// KV capacity of the LLM not yet touched, which the kernel does not count.
    pub untouched: Bytes,
    /// Sum of all leases.
    pub held: Bytes,
    /// The budget.
    pub budget: Bytes,
}

/// Journal line.
#[derive(Clone, Debug)]
pub struct Line {
    /// Time since the start of the demonstration.
    pub at: Timestamp,
    /// Name of the event or action.
    pub name: String,
    /// Its sentence.
    pub summary: String,
    /// The body.
    pub body: serde_json::Value,
}

#[derive(Debug, Default)]
struct Seen {
    looks: Vec<Look>,
    lines: Vec<Line>,
    status: Option<GetStatusResponse>,
    failures: Vec<String>,
}

/// Observer that runs until dropped.
#[derive(Debug)]
pub struct Watch {
    seen: Arc<Mutex<Seen>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Watch {
    /// Starts observing. `daemon` is its process, `began` the start of the demonstration, and `neighbour` returns the
    /// neighbour's process while there is one.
    pub fn start(
        client: OperatorServiceClient<Channel>,
        daemon: u32,
        began: Instant,
        neighbour: Arc<Mutex<Option<u32>>>,
    ) -> Self {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let looking = tokio::spawn(look(
            client.clone(),
            daemon,
            began,
            neighbour,
            Arc::clone(&seen),
        ));
        let reading = tokio::spawn(read(client, began, Arc::clone(&seen)));
        Self {
            seen,
            tasks: vec![looking, reading],
        }
    }

    /// Returns the last status.
    pub fn status(&self) -> Option<GetStatusResponse> {
        self.with(|seen| seen.status.clone())
    }

    /// Returns all looks.
    pub fn looks(&self) -> Vec<Look> {
        self.with(|seen| seen.looks.clone())
    }

    /// Returns all lines.
    pub fn lines(&self) -> Vec<Line> {
        self.with(|seen| seen.lines.clone())
    }

    /// Returns failed calls.
    pub fn failures(&self) -> Vec<String> {
        self.with(|seen| seen.failures.clone())
    }

    /// Waits until the status is as wanted; `false` if that takes longer than `limit`.
    pub async fn until(
        &self,
        limit: Duration,
        wanted: impl Fn(&GetStatusResponse) -> bool,
    ) -> bool {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            if self.status().is_some_and(|status| wanted(&status)) {
                return true;
            }
            tokio::time::sleep(LOOK).await;
        }
        false
    }

    fn with<T>(&self, read: impl FnOnce(&Seen) -> T) -> T {
        read(&locked(&self.seen))
    }
}

async fn look(
    mut client: OperatorServiceClient<Channel>,
    daemon: u32,
    began: Instant,
    neighbour: Arc<Mutex<Option<u32>>>,
    seen: Arc<Mutex<Seen>>,
) {
    let mut ticks = tokio::time::interval(LOOK);
    // If a look takes long, later ones are not made up for.
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut supervisor = None;
    loop {
        ticks.tick().await;
        let process = pss(daemon).unwrap_or(Bytes::ZERO);
        let status = match client.get_status(GetStatusRequest {}).await {
            Ok(status) => status.into_inner(),
            Err(status) => {
                let mut seen = locked(&seen);
                seen.failures
                    .push(format!("GetStatus: {}", status.message()));
                return;
            }
        };
        let neighbour = *locked(&neighbour);
        let engine = engine_use(&status).or_else(|| Some(process.saturating_sub(supervisor?)));
        let engine = engine.unwrap_or(Bytes::ZERO).min(process);
        supervisor = Some(process.saturating_sub(engine));
        let look = owners(
            &status,
            engine,
            process,
            neighbour,
            Timestamp::START + began.elapsed(),
        );
        let mut seen = locked(&seen);
        seen.looks.push(look);
        seen.status = Some(status);
    }
}

/// Returns the engine's memory by its own mappings; `None` while it loads or changes, when its last figure no longer
/// matches the process. Changes meanwhile are the engine's: the supervisor's own memory changes little.
fn engine_use(status: &GetStatusResponse) -> Option<Bytes> {
    let engine = status.engine.as_ref()?;
    match engine.state() {
        EngineState::Ready if !engine.changing => {}
        EngineState::Ready | EngineState::Loading => return None,
        _ => return Some(Bytes::ZERO),
    }
    let lease = status
        .leases
        .iter()
        .find(|lease| lease.kind() == LeaseKind::Engine)?;
    Some(Bytes::new(lease.used_bytes?))
}

/// Returns memory by owner: workers and the neighbour by their processes, the LLM by its own mappings, the supervisor
/// by the rest of the daemon's process.
fn owners(
    status: &GetStatusResponse,
    engine: Bytes,
    process: Bytes,
    neighbour: Option<u32>,
    at: Timestamp,
) -> Look {
    let mut owners = BTreeMap::new();
    owners.insert("llm".to_owned(), engine);
    owners.insert("supervisor".to_owned(), process.saturating_sub(engine));
    for worker in &status.workers {
        let used = worker.pid.and_then(pss).unwrap_or(Bytes::ZERO);
        owners.insert(worker.name.clone(), used);
    }
    owners.insert(
        "neighbour".to_owned(),
        neighbour.and_then(pss).unwrap_or(Bytes::ZERO),
    );
    let budget = status.budget.unwrap_or_default();
    Look {
        at,
        owners,
        untouched: Bytes::new(
            status
                .engine
                .as_ref()
                .map_or(0, |engine| engine.kv_untouched_bytes),
        ),
        held: Bytes::new(budget.held_bytes),
        budget: Bytes::new(budget.budget_bytes),
    }
}

/// Returns the proportional set size of a process, from the kernel.
pub fn pss(pid: u32) -> Option<Bytes> {
    let proc = cotenant_probe::ProbeRoot::default().proc;
    let memory = cotenant_probe::processes::ProcessMemory::read(&proc, pid).ok()??;
    Some(memory.pss)
}

/// Waits until the kernel counts `wanted` for a process; `false` if that takes longer than `limit`.
pub async fn until_pss(pid: u32, wanted: Bytes, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    while Instant::now() < end {
        if pss(pid).is_some_and(|pss| pss >= wanted) {
            return true;
        }
        tokio::time::sleep(LOOK).await;
    }
    false
}

async fn read(mut client: OperatorServiceClient<Channel>, began: Instant, seen: Arc<Mutex<Seen>>) {
    let request = WatchEventsRequest {
        after_sequence: 0,
        boot_id: String::new(),
        no_follow: false,
    };
    let mut stream = match client.watch_events(request).await {
        Ok(stream) => stream.into_inner(),
        Err(status) => {
            let mut seen = locked(&seen);
            seen.failures
                .push(format!("WatchEvents: {}", status.message()));
            return;
        }
    };
    while let Ok(Some(message)) = stream.message().await {
        if let Some(entry) = message.entry {
            let line = line_of(entry, Timestamp::START + began.elapsed());
            locked(&seen).lines.push(line);
        }
    }
}

fn line_of(entry: JournalEntry, at: Timestamp) -> Line {
    Line {
        at,
        name: entry.name,
        summary: entry.summary,
        body: serde_json::from_str(&entry.body_json).unwrap_or_default(),
    }
}

/// Connects to the daemon's socket once it answers.
pub async fn connect(socket: &Path, limit: Duration) -> Result<Channel, String> {
    let end = Instant::now() + limit;
    let endpoint = tonic::transport::Endpoint::try_from(format!("unix://{}", socket.display()))
        .map_err(|error| error.to_string())?;
    loop {
        match endpoint.connect().await {
            Ok(channel) => return Ok(channel),
            Err(error) if Instant::now() >= end => return Err(error.to_string()),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}
