//! Small daemon: the real control loop, journal and server, on a simulated device.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, SystemTime},
};

use cotenant::{
    conversation::refusal::Refusal,
    daemon::{
        ControlHandle, MonotonicClock,
        control_loop::{ControlLoop, Perform},
    },
    journal::{self, Content, Journal, JournalSettings},
    policy::{
        arbiter::{Arbiter, Checkpoint},
        event::{Action, Event},
        lease::Class,
        params::{Params, Scope, WorkerParams},
        pressure::{MemoryReading, Sample},
        snapshot::Snapshot,
    },
    rpc::{
        Bounds, Endpoint, GenerateEvent, GenerateRequest, Generator, Health, Limits, Notice, Roles,
        Server, Sockets, Supervisor,
        v1::{
            self, lease_service_client::LeaseServiceClient, llm_service_client::LlmServiceClient,
            operator_service_client::OperatorServiceClient,
        },
    },
    units::{Bytes, Timestamp},
};
use futures_util::future::{BoxFuture, FutureExt};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt;

pub(super) const TOTAL: Bytes = Bytes::from_mib(1152);
/// Reserve; the budget is 1 GiB.
pub(super) const RESERVE: Bytes = Bytes::from_mib(128);

/// Returned at the end of a text whose last word is `reclaim`.
const KV_RECLAIMED: fn() -> Refusal = || Refusal::KvReclaimed {
    generated: cotenant::units::Tokens::new(2),
    retry_after: Duration::from_millis(50),
};

/// Returned at the end of a text whose last word is `break`.
const ENGINE_LOST: fn() -> Refusal = || Refusal::EngineLost {
    reason: "it panicked".into(),
    retry_after: Duration::from_millis(50),
};

/// Generator that returns a text word by word, and counts running generations.
#[derive(Default)]
pub(super) struct Parrot {
    pub(super) running: watch::Sender<u32>,
    seeds: AtomicU32,
}

impl Generator for Parrot {
    fn generate(
        &self,
        request: GenerateRequest,
    ) -> BoxFuture<'_, Result<mpsc::Receiver<GenerateEvent>, Refusal>> {
        use cotenant::{
            conversation::{FinishReason, Usage},
            rpc::llm::{Input, Times},
            units::Tokens,
        };
        let text = match request.input {
            Input::Prompt(text) => text,
            Input::Messages(messages) => messages.last().unwrap().content.clone(),
        };
        self.seeds.fetch_add(1, Ordering::Relaxed);
        let running = self.running.clone();
        async move {
            let words = Tokens::new(u32::try_from(text.split_whitespace().count()).unwrap());
            if words > Tokens::new(100) {
                return Err(Refusal::ContextLengthExceeded {
                    model: "parrot".into(),
                    prompt: words,
                    limit: Tokens::new(100),
                });
            }
            let fails = [("reclaim", KV_RECLAIMED), ("break", ENGINE_LOST)]
                .into_iter()
                .find_map(|(word, refusal)| text.ends_with(word).then(refusal));
            let (events, received) = mpsc::channel(4);
            running.send_modify(|running| *running += 1);
            tokio::spawn(async move {
                let talk = async {
                    let started = GenerateEvent::Started {
                        model: "parrot".into(),
                        prompt: words,
                        seed: 7,
                    };
                    events.send(started).await.ok()?;
                    // Generates forever on request.
                    for word in text
                        .split_inclusive(' ')
                        .cycle()
                        .take(if text == "forever" {
                            usize::MAX
                        } else {
                            text.split_inclusive(' ').count()
                        })
                    {
                        events
                            .send(GenerateEvent::Delta { text: word.into() })
                            .await
                            .ok()?;
                    }
                    if let Some(refusal) = fails {
                        return events.send(GenerateEvent::Failed(refusal)).await.ok();
                    }
                    let usage = Usage {
                        prompt_tokens: words,
                        completion_tokens: words,
                        ..Usage::default()
                    };
                    let reason = FinishReason::Stop;
                    let times = Times::default();
                    events
                        .send(GenerateEvent::Finished {
                            reason,
                            usage,
                            times,
                        })
                        .await
                        .ok()
                };
                talk.await;
                running.send_modify(|running| *running -= 1);
            });
            Ok(received)
        }
        .boxed()
    }
}

pub(super) struct Settings {
    pub(super) limits: Limits,
    pub(super) roles: Roles,
    pub(super) events_kept: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            roles: Roles::new(nix::unistd::getuid().as_raw()),
            events_kept: 1000,
        }
    }
}

pub(super) struct Daemon {
    pub(super) folder: tempfile::TempDir,
    pub(super) handle: Arc<ControlHandle>,
    pub(super) parrot: Arc<Parrot>,
    pub(super) health: Health,
    pub(super) abstract_name: String,
    pub(super) uses: Arc<Mutex<BTreeMap<String, Bytes>>>,
    stop: CancellationToken,
    server: tokio::task::JoinHandle<()>,
    control_loop: tokio::task::JoinHandle<()>,
}

impl Daemon {
    pub(super) async fn start() -> Self {
        Self::start_with(Settings::default()).await
    }

    pub(super) async fn start_with(settings: Settings) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let unique = folder
            .path()
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned();
        let abstract_name = format!("cotenant-test-{}-{unique}", std::process::id());
        let mut sockets = Sockets::new();
        sockets
            .bind_path(&folder.path().join("cotenant.sock"), 0o666)
            .unwrap();
        sockets.bind_abstract(&abstract_name).unwrap();

        let (clock, boot_id) = (MonotonicClock::start(), format!("boot-{unique}"));
        let (handle, mut inbox) =
            ControlHandle::new(boot_id, Vec::new(), clock, settings.events_kept);
        let uses = Arc::<Mutex<BTreeMap<String, Bytes>>>::default();
        let (interval, wanted) = watch::channel(Duration::ZERO);
        let device = Device {
            handle: Arc::clone(&handle),
            uses: Arc::clone(&uses),
            journal: open_journal(&handle, folder.path().join("journal.ndjson")),
            interval,
        };
        let arbiter = Arbiter::new(params()).unwrap();
        let stop = CancellationToken::new();
        let (stopped, control, used) = (stop.clone(), Arc::clone(&handle), Arc::clone(&uses));
        let control_loop = tokio::spawn(async move {
            let mut control_loop = ControlLoop::new(arbiter, clock, device);
            tokio::select! {
                () = control_loop.run(&mut inbox) => {}
                () = sample(&control, &used, wanted) => {}
                () = stopped.cancelled() => {}
            }
        });
        // The first sample has been taken, so that it applies to requests.
        let mut snapshots = handle.snapshot();
        snapshots
            .wait_for(|snapshot| snapshot.pressure.sample.is_some())
            .await
            .unwrap();

        let parrot = Arc::<Parrot>::default();
        let server = Server::new(
            sockets,
            Arc::<ControlHandle>::clone(&handle),
            Arc::<Parrot>::clone(&parrot),
            settings.roles,
            settings.limits,
        )
        .await;
        let health = server.health();
        let serving = server.serve(stop.clone());
        Self {
            folder,
            handle,
            parrot,
            health,
            abstract_name,
            uses,
            stop,
            server: tokio::spawn(async move { serving.await.unwrap() }),
            control_loop,
        }
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join("cotenant.sock")
    }

    pub(super) fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    pub(super) async fn channel(&self) -> Channel {
        self.endpoint()
            .parse::<Endpoint>()
            .unwrap()
            .connect()
            .await
            .unwrap()
    }

    /// Returns a connection that buffers at most 64 KiB.
    pub(super) async fn narrow_channel(&self) -> Channel {
        tonic::transport::Endpoint::from_shared(self.endpoint())
            .unwrap()
            .initial_stream_window_size(65_535)
            .connect()
            .await
            .unwrap()
    }

    pub(super) async fn leases(&self) -> LeaseServiceClient<Channel> {
        LeaseServiceClient::new(self.channel().await)
    }

    pub(super) async fn operator(&self) -> OperatorServiceClient<Channel> {
        OperatorServiceClient::new(self.channel().await)
    }

    pub(super) async fn llm(&self) -> LlmServiceClient<Channel> {
        LlmServiceClient::new(self.channel().await)
    }

    pub(super) fn set_used(&self, tenant: &str, used: Bytes) {
        self.uses.lock().unwrap().insert(tenant.to_owned(), used);
    }

    /// Waits for a state accepted by `fits`.
    pub(super) async fn state(&self, fits: impl Fn(&Snapshot) -> bool) -> Arc<Snapshot> {
        let mut snapshots = self.handle.snapshot();
        let waiting = snapshots.wait_for(|snapshot| fits(snapshot));
        tokio::time::timeout(PATIENCE, waiting)
            .await
            .expect("the state never came")
            .unwrap()
            .clone()
    }

    /// Waits until the journal has a line after number `sequence`.
    pub(super) async fn written_behind(&self, sequence: u64) {
        let mut last = self.handle.events().last_sequence();
        let written = tokio::time::timeout(PATIENCE, last.wait_for(|last| *last > sequence)).await;
        written.expect("nothing was written").unwrap();
    }

    pub(super) fn last_sequence(&self) -> u64 {
        *self.handle.events().last_sequence().borrow()
    }

    pub(super) fn held(&self) -> Bytes {
        self.handle.state().memory.held
    }

    /// Ends the server and the loop, and checks that the journal replays identically.
    pub(super) async fn end(self) {
        let (socket, journal) = (self.socket(), self.folder.path().join("journal.ndjson"));
        self.stop.cancel();
        tokio::time::timeout(PATIENCE, self.server)
            .await
            .expect("the server does not end")
            .unwrap();
        self.control_loop.await.unwrap();
        assert!(!socket.exists(), "the socket is left behind");
        let contents = journal::read(&journal).unwrap();
        for run in journal::replay(&contents.entries) {
            assert_eq!(
                run.outcome,
                journal::Outcome::Same,
                "after {} events",
                run.events
            );
            assert!(run.events > 0);
        }
    }
}

/// Time limit for immediate operations on a busy machine.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

fn params() -> Params {
    Params {
        workers: vec![WorkerParams {
            name: "asr".into(),
            class: Class::AudioRealtime,
            steady: Bytes::from_mib(64),
            peak: Bytes::from_mib(64),
            ..WorkerParams::default()
        }],
        ..Params::for_budget(TOTAL, RESERVE, Scope::Machine)
    }
}

fn open_journal(handle: &Arc<ControlHandle>, path: PathBuf) -> Journal {
    let settings = JournalSettings {
        path: Some(path),
        // Some tests flood the journal, and all replay it.
        queue_max: 1 << 20,
        ..JournalSettings::default()
    };
    let seen = Arc::clone(handle);
    let mut journal = Journal::open(&settings, handle.boot_id(), move |entry, line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let body = &line["body"];
        let (kind, name) = match entry.content {
            Content::Start(_) => (v1::EntryKind::Start, &line["kind"]),
            Content::Event(_) => (v1::EntryKind::Event, &body["event"]),
            Content::Action(_) => (v1::EntryKind::Action, &body["action"]),
            Content::Dropped { .. } => (v1::EntryKind::Dropped, &line["kind"]),
            Content::Checkpoint(_) => return,
        };
        let time = SystemTime::UNIX_EPOCH + Duration::from_micros(entry.unix_us);
        seen.events().push(v1::JournalEntry {
            sequence: entry.sequence,
            boot_id: String::new(),
            at: entry.at.since_start().try_into().ok(),
            time: Some(time.into()),
            kind: kind.into(),
            name: name.as_str().unwrap().to_owned(),
            summary: journal::render(entry),
            body_json: body.to_string(),
        });
    })
    .unwrap();
    journal.record(
        Timestamp::START,
        SystemTime::now(),
        Content::start(params()),
    );
    journal
}

/// Samples the device at the arbiter's interval.
async fn sample(
    handle: &ControlHandle,
    uses: &Mutex<BTreeMap<String, Bytes>>,
    mut interval: watch::Receiver<Duration>,
) {
    loop {
        let used: Bytes = uses.lock().unwrap().values().copied().sum();
        let sample = Sample {
            taken_at: handle.now().0,
            memory: MemoryReading {
                mem_total: TOTAL,
                mem_available: TOTAL.saturating_sub(used),
                mem_free: TOTAL.saturating_sub(used),
                group: None,
            },
            ..Sample::default()
        };
        handle.tell(Event::Sampled(sample)).await;
        interval.changed().await.unwrap();
        let wait = *interval.borrow_and_update();
        let _changed = tokio::time::timeout(wait, interval.changed()).await;
    }
}

/// Simulated device: a table of holders' use, and workers that start and end at once.
struct Device {
    handle: Arc<ControlHandle>,
    uses: Arc<Mutex<BTreeMap<String, Bytes>>>,
    journal: Journal,
    interval: watch::Sender<Duration>,
}

impl Perform for Device {
    fn record_event(&mut self, now: Timestamp, event: &Event, arbiter: &Arbiter) {
        if self.journal.wants_checkpoint() {
            let checkpoint = Content::Checkpoint(Box::new(Checkpoint::of(arbiter)));
            self.journal.record(now, SystemTime::now(), checkpoint);
        }
        self.journal
            .record(now, SystemTime::now(), Content::Event(event.clone()));
    }

    fn record_actions(&mut self, now: Timestamp, actions: &[Action]) {
        for action in actions {
            self.journal
                .record(now, SystemTime::now(), Content::Action(action.clone()));
        }
    }

    fn apply_plans(&mut self, _actions: &[Action]) {}

    fn publish(&mut self, _arbiter: &Arbiter, state: Arc<Snapshot>, _actions: &[Action]) {
        self.handle.publish(state);
    }

    fn perform(&mut self, action: Action) {
        let submit = |event| self.handle.submit(event, None).unwrap();
        match action {
            Action::SetTarget {
                lease,
                nonce,
                bytes,
                deadline,
                reason,
            } => {
                self.handle.notify(Notice::Target {
                    lease,
                    nonce,
                    bytes,
                    deadline,
                    reason: reason.to_string(),
                });
            }
            Action::EndLease { lease, end } => {
                self.handle.notify(Notice::Ended {
                    lease: lease.id,
                    reason: format!("lease {lease} {end}"),
                });
            }
            Action::Measure { tenant } => {
                let used = self
                    .uses
                    .lock()
                    .unwrap()
                    .get(&tenant)
                    .copied()
                    .unwrap_or_default();
                submit(Event::Measured {
                    tenant,
                    used: Some(used),
                    taken_at: self.handle.now().0,
                });
            }
            Action::SampleAfter { wait } => drop(self.interval.send_replace(wait)),
            Action::StartWorker { worker, .. } => submit(Event::WorkerReady { worker, pid: 4242 }),
            Action::StopWorker { worker, .. } => {
                submit(Event::WorkerExited {
                    worker,
                    intended: true,
                    cause: "exit code 0".into(),
                });
            }
            _ => {}
        }
    }
}

/// Returns a request that is granted at once.
pub(super) fn request(id: &str, tenant: &str, mib: u64) -> v1::CreateLeaseRequest {
    v1::CreateLeaseRequest {
        request_id: id.into(),
        tenant: tenant.into(),
        lease_class: v1::LeaseClass::Interactive.into(),
        min_bytes: Bytes::from_mib(mib).get(),
        ..v1::CreateLeaseRequest::default()
    }
}

pub(super) fn seconds(seconds: i64) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds, nanos: 0 })
}

/// Creates a lease that must be granted.
pub(crate) async fn granted(
    client: &mut LeaseServiceClient<Channel>,
    request: v1::CreateLeaseRequest,
) -> v1::Lease {
    client
        .create_lease(request)
        .await
        .unwrap()
        .into_inner()
        .lease
        .unwrap()
}

/// Returns code and reason of an error, which must have both.
pub(crate) fn reason(status: &Status) -> (Code, String) {
    let info = status
        .get_details_error_info()
        .unwrap_or_else(|| panic!("no ErrorInfo in {status:?}"));
    assert_eq!(info.domain, "cotenant");
    assert!(
        info.reason.len() <= 63
            && info
                .reason
                .bytes()
                .all(|byte| byte.is_ascii_uppercase() || byte == b'_')
    );
    (status.code(), info.reason)
}

/// Bounds that no test reaches.
pub(super) const WIDE: Bounds = Bounds {
    per_process: 10_000,
    per_user: 10_000,
    total: 10_000,
};

impl Daemon {
    /// Returns the number of events or actions with a name, once the journal contains `after`.
    pub(super) async fn count(&self, name: &str, after: &str) -> usize {
        let events = self.handle.events();
        let mut last = events.last_sequence();
        let counting = async {
            loop {
                let page = events.after(0, usize::MAX);
                let named = |name: &str| {
                    page.records
                        .iter()
                        .filter(|record| record.name == name)
                        .count()
                };
                if named(after) > 0 {
                    return named(name);
                }
                last.changed().await.unwrap();
            }
        };
        tokio::time::timeout(PATIENCE, counting)
            .await
            .unwrap_or_else(|_| panic!("{after} never came"))
    }
}
