//! Puts the daemon together and turns the loop.

use std::{
    collections::{BTreeMap, VecDeque},
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{runtime::Handle, sync::mpsc};

use super::{
    clock::Clock,
    doors::{Bound, Doors},
    engine::{EngineDriver, Inspector, Starter},
    figures::Figures,
    footprint,
    hub::{Hub, Inbound},
    llm::Llm,
    measure::Measurer,
    notify,
    parts::Parts,
    peaks::{PeakStore, learned_peaks},
    perform::Device,
    record::Recorder,
    sampling,
    signals::Signals,
    status::Status,
    survival::{Inheritance, Place, Survival},
    turn::{Beat, Turn},
    voice::Voice,
    watchdog::Watchdog,
    workers::Workers,
    wyoming::Behind,
};
use crate::{
    causes::in_one_line,
    config::{Config, KvMemory, LlmConfig, VocabularyConfig, WorkerRole},
    engine::{Engine, EngineOptions, ModelOptions, Sayable, arena::Backing},
    http::backend::{Backends, ChatBackend, SpeechBackend},
    journal::{BookError, JournalError},
    policy::{
        arbiter::Arbiter,
        book::AdoptedWorker,
        event::{Action, Event},
        params::{ParamsError, Scope},
        peaks::Peaks,
    },
    probe::{ProbeError, ProbeRoot, Sampler, process},
    rpc::{llm::Generator, server::BindError},
    standby,
    telemetry::{LinesDropped, Metrics},
    worker::{
        adopt::{all_visible, survivors},
        measure::KernelRoots,
        orphans::end_orphans,
    },
};

/// How long after the doors have opened the start counts as over.
const SETTLED: Duration = Duration::from_secs(1);

/// How long what runs may go on when the daemon is to end. With [`STOP_GRACE`](super::turn::STOP_GRACE) after it, well
/// below `TimeoutStopSec=20s` of the unit.
const DRAIN_MAX: Duration = Duration::from_secs(8);

/// How long doors may be taken when nobody has the place.
const DOORS_PATIENCE: Duration = Duration::from_millis(500);

/// Between two looks at them.
const DOORS_LOOK_EVERY: Duration = Duration::from_millis(5);

/// Why the daemon could not start, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A folder that it needs cannot be made.
    #[error("cannot create the folder `{path}`")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The machine cannot be read.
    #[error("cannot read the machine")]
    Probe(#[from] ProbeError),
    /// The configuration does not fit this machine.
    #[error("cannot use the configuration on this machine: {0}")]
    Settings(String),
    /// The settings contradict each other.
    #[error("cannot use the settings")]
    Params(#[from] ParamsError),
    /// A part of the daemon that it cannot do without is gone.
    #[error("cannot go on: {what}")]
    Lost {
        /// What: `sampling has ended`.
        what: String,
    },
    /// A door cannot be opened.
    #[error("cannot open {door}")]
    Door {
        /// Which: `http 127.0.0.1:8410`.
        door: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A socket of gRPC cannot be opened.
    #[error("cannot open gRPC")]
    Socket {
        /// Why not.
        #[source]
        source: BindError,
    },
    /// Another supervisor has its sockets in the same folder.
    #[error("cannot lock `{path}`, which the supervisor of this folder keeps locked")]
    Place {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// What the next run has to know cannot be kept.
    #[error("cannot keep the book of this run")]
    Book {
        /// Why not.
        #[source]
        source: BookError,
    },
    /// The journal cannot be written.
    #[error("cannot keep the journal")]
    Journal {
        /// Why not.
        #[source]
        source: JournalError,
    },
    /// Signals or threads cannot be set up.
    #[error("cannot set up {what}")]
    System {
        /// What.
        what: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

impl RunError {
    /// The remedy.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Folder { path, .. } => Some(format!(
                "create it for this user, or set `runtime_dir` and `state_dir` to folders that it may write ({})",
                path.display()
            )),
            Self::Door { .. } => Some("another program may use it; choose another address in the configuration".into()),
            Self::Socket { source } => Some(source.hint().to_owned()),
            Self::Place { .. } => Some("stop the other supervisor, or set `runtime_dir` to another folder".into()),
            Self::Book { .. } => Some("it lies in `runtime_dir`; a damaged one may be removed".into()),
            Self::Lost { .. } => Some("its log says more; started again it begins anew".into()),
            Self::Settings(_) | Self::Probe(_) | Self::Params(_) | Self::Journal { .. } | Self::System { .. } => None,
        }
    }
}

/// Runs the daemon until a signal ends it. `dropped` counts the lines that its log has lost; on `control` gRPC is served
/// and decisions are made, one after the other, and everything else on the runtime that this is called in.
///
/// # Errors
///
/// When it cannot start, or loses a part that it cannot do without. Faults of the engine and of workers are events.
pub async fn run(config: Config, dropped: LinesDropped, control: Handle) -> Result<(), RunError> {
    let clock = Clock::start();
    let signals = Signals::install().map_err(|source| RunError::System {
        what: "signals",
        source,
    })?;
    for folder in [&config.runtime_dir, &config.state_dir] {
        make_folder(folder)?;
    }
    let set_aside = standby::prepare();
    let root = ProbeRoot::default();
    let session = match config.budget.scope {
        Scope::Machine => None,
        Scope::Session => Some(process::own_session()),
    };
    let mut sampler = Sampler::open(&root, session)?;
    let machine = sampler.read()?.meminfo.total;
    let mut params = config
        .params(machine)
        .map_err(|faults| RunError::Settings(faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")))?;
    params.peaks = learned_peaks(&config.state_dir).unwrap_or_else(|error| {
        tracing::warn!(hint = error.hint(), "{}", in_one_line(&error));
        Peaks::default()
    });
    let mut arbiter = Arbiter::new(params.clone())?;
    // First of all that others could notice: where another supervisor runs, this is where it ends. The door that it has
    // says more than the place, so that is told.
    let place = Place::take(&config).await;
    let bound = take_doors(&config, place.is_ok()).await?;
    let boot_id = boot_id();
    let (mut survival, mut inheritance) = Survival::open(place?, &boot_id)?;
    let (hub, inbox) = Hub::new(boot_id.clone(), inheritance.boot_ids.clone(), clock);
    hub.note_locked(set_aside);
    let mut recorder = Recorder::open(&config, &hub, &params)?;
    let metrics = Arc::new(Metrics::new());
    let (parts, losses) = Parts::new();
    let on_control = parts.on(&control);

    let workers = Workers::new(&config, &hub, &parts);
    let (adopted, pids) = adopt(&workers, &inheritance).await;
    sampler.count_too(pids);
    let holders = std::mem::take(&mut inheritance.holders);
    // Before anything else can be admitted: what others hold counts from the first moment.
    let mut taken_over = Vec::new();
    if let Some(event) = inheritance.event(adopted) {
        let now = clock.now();
        recorder.event(now, &event);
        taken_over = arbiter.handle(now, event);
        for action in &taken_over {
            recorder.action(now, action);
        }
    }
    // What is in use that nobody has leased counts from the first moment too: nothing is granted unseen.
    taken_over.extend(look_first(&mut sampler, clock, &mut arbiter, &mut recorder)?);
    survival.keep(&arbiter);
    hub.publish(arbiter.snapshot());
    let llm = config.llm.as_ref();
    let engine = llm.map(|llm| start_engine(llm, &hub, &on_control)).transpose()?;
    let current = engine.as_ref().map(EngineDriver::current);
    let voice = {
        let (asr, tts) = (workers.of_role(WorkerRole::Asr), workers.of_role(WorkerRole::Tts));
        let any = asr.is_some() || tts.is_some();
        any.then(|| Voice::new(Arc::clone(&hub), asr, tts))
    };
    let speech = voice.map(|voice| voice as Arc<dyn SpeechBackend>);
    let llm = llm
        .zip(current.clone())
        .map(|(llm, engine)| Llm::new(Arc::clone(&hub), engine, llm));
    let status = Arc::new(Status::new(&hub, &metrics, &config, current.clone(), dropped));
    let backends = Backends {
        chat: llm.clone().map(|llm| llm as Arc<dyn ChatBackend>),
        speech: speech.clone(),
        status,
    };
    let behind = Behind {
        speech,
        chat: llm
            .clone()
            .zip(config.llm.as_ref())
            .map(|(llm, config)| (llm as Arc<dyn ChatBackend>, config.name.clone())),
        asr: workers.of_role(WorkerRole::Asr).map(|speaker| speaker.handle),
        tts: workers.of_role(WorkerRole::Tts).map(|speaker| speaker.handle),
        metrics: Arc::clone(&metrics),
    };
    let generator = llm.map(|llm| llm as Arc<dyn Generator>);
    let doors = Doors::open(
        bound,
        &hub,
        backends,
        generator,
        (behind, &config),
        holders,
        (&parts, &on_control),
    )
    .await?;
    let pace = sampling::spawn(sampler, &root, Arc::clone(&hub), &parts);
    if let Some(engine) = &engine {
        engine.inspect();
    }
    let engine_of_the_moment = current.clone();
    let measurer = Measurer::new(&hub, root, workers.handles(), current, &metrics, &parts);
    let mut device = Device {
        peaks: PeakStore::new(&config.state_dir, &parts),
        hub: Arc::clone(&hub),
        engine,
        workers,
        pace,
        measurer,
        answers: BTreeMap::new(),
    };
    device.order(&taken_over);
    for action in taken_over {
        device.perform(action);
    }
    tracing::info!(
        boot_id,
        budget = %arbiter.snapshot().budget,
        grpc = doors.grpc_address(),
        http = doors.http_address(),
        wyoming = doors.wyoming_address(),
        "cotenant is ready"
    );
    // What the first requests and samples touch counts as the start too.
    let locked = Arc::clone(&hub);
    tokio::spawn(async move {
        tokio::time::sleep(SETTLED).await;
        footprint::let_go_of_start();
        locked.note_locked(standby::lock_program());
    });
    let watchdog = Watchdog::start(&hub, engine_of_the_moment).map_err(|source| RunError::System {
        what: "the watchdog's thread",
        source,
    })?;
    notify::ready();
    let turn = Turn {
        arbiter,
        device,
        recorder,
        survival,
        watchdog,
        figures: Figures::new(&metrics, &params),
        metrics,
        health: doors.health_board(),
        beat: Beat::new(&hub, notify::watchdog_interval()),
        waiting: VecDeque::new(),
        hub,
    };
    match control.spawn(to_the_end(turn, inbox, signals, losses, doors)).await {
        Ok(ended) => ended,
        Err(broken) => match broken.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(cancelled) => Err(RunError::Lost {
                what: format!("the loop has ended: {cancelled}"),
            }),
        },
    }
}

/// Takes the first sample, before anybody can ask for anything. What was taken over is on the book already, so that it is
/// not taken for a stranger's.
fn look_first(
    sampler: &mut Sampler,
    clock: Clock,
    arbiter: &mut Arbiter,
    recorder: &mut Recorder,
) -> Result<Vec<Action>, ProbeError> {
    // What is read may be as old as the beginning of the reading.
    let taken_at = clock.now();
    let event = Event::Sampled(sampler.read()?.sample(taken_at));
    let now = clock.now();
    recorder.event(now, &event);
    let actions = arbiter.handle(now, event);
    for action in &actions {
        recorder.action(now, action);
    }
    Ok(actions)
}

/// Turns until a signal or a loss, then ends what there is.
async fn to_the_end(
    mut turn: Turn,
    mut inbox: mpsc::Receiver<Inbound>,
    mut signals: Signals,
    mut losses: mpsc::Receiver<String>,
    doors: Doors,
) -> Result<(), RunError> {
    let mut lost = None;
    let reason = tokio::select! {
        signal = signals.next() => signal.to_owned(),
        Some(loss) = losses.recv() => lost.insert(loss).clone(),
        () = turn.forever(&mut inbox) => "the inbox closed".to_owned(),
    };
    tracing::info!(reason, "cotenant ends");
    notify::stopping();
    tokio::select! {
        () = turn.drain(&mut inbox) => {}
        () = tokio::time::sleep(DRAIN_MAX) => tracing::warn!("what runs has not ended within {DRAIN_MAX:?}; ending it"),
        signal = signals.next() => tracing::warn!(signal, "ending at once"),
    }
    // Whoever still has something to tell must not wait for a loop that does not turn.
    drop(inbox);
    turn.finish(doors).await;
    lost.map_or(Ok(()), |what| Err(RunError::Lost { what }))
}

/// Takes over the workers that the run before has left alive and ends what else it has left. Returns them as policy
/// wants to know them, and their processes.
async fn adopt(workers: &Workers, inheritance: &Inheritance) -> (Vec<AdoptedWorker>, Vec<u32>) {
    let roots = KernelRoots::default();
    all_visible(&roots).await;
    let mut survivors = survivors(&roots, &workers.specs());
    inheritance.note_readiness(&mut survivors);
    for orphan in end_orphans(&roots, Some(workers.place()), &survivors).await {
        tracing::warn!(?orphan, "ended a process of a supervisor that is gone");
    }
    let adopted = workers.adopt(survivors).await;
    let pids = adopted.iter().map(|worker| worker.pid).collect();
    (adopted, pids)
}

/// Takes the doors. Whoever has the place may find them taken for an instant: the kernel closes what belonged to a
/// supervisor that is gone one after the other.
async fn take_doors(config: &Config, has_place: bool) -> Result<Bound, RunError> {
    let end = Instant::now() + DOORS_PATIENCE;
    loop {
        let error = match Bound::take(config).await {
            Ok(bound) => return Ok(bound),
            Err(error) => error,
        };
        let taken = match &error {
            RunError::Door { source, .. } => source.kind() == io::ErrorKind::AddrInUse,
            RunError::Socket { source } => matches!(source, BindError::InUse { .. }),
            _ => false,
        };
        if !has_place || !taken || Instant::now() > end {
            return Err(error);
        }
        tokio::time::sleep(DOORS_LOOK_EVERY).await;
    }
}

fn make_folder(path: &Path) -> Result<(), RunError> {
    fs::create_dir_all(path).map_err(|source| RunError::Folder {
        path: path.to_owned(),
        source,
    })
}

/// A name for this run that no other run has: the kernel's random UUID, or the time where that cannot be read.
fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/uuid").map_or_else(
        |_| format!("{:?}", std::time::SystemTime::now()),
        |text| text.trim().to_owned(),
    )
}

fn start_engine(llm: &LlmConfig, hub: &Arc<Hub>, parts: &Parts) -> Result<EngineDriver, RunError> {
    let threads = threads(llm);
    let (name, context) = (llm.name.clone(), llm.context);
    let kv_backing = match llm.kv_memory {
        KvMemory::AsNeeded => Backing::OnTouch,
        KvMemory::AtOnce => Backing::Now,
    };
    let vocabulary = sayable(llm);
    let inspector = Inspector::new(llm, hub);
    let expected = inspector.expected();
    let start: Starter = Box::new(move |sink| {
        let model = ModelOptions {
            threads,
            name: Some(name.clone()),
            context: Some(context),
            kv_backing,
            vocabulary: vocabulary.clone(),
            helper: Some(PathBuf::from(THIS_PROGRAM)),
        };
        Engine::start_expecting(EngineOptions::default(), model, expected.clone(), sink)
    });
    EngineDriver::new(start, llm.path.clone(), inspector, parts).map_err(|source| RunError::System {
        what: "the engine's thread",
        source,
    })
}

/// What this process runs, also after another version was installed in its place.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// The tokens that the LLM may say, as the engine takes it.
pub(crate) fn sayable(llm: &LlmConfig) -> Option<Sayable> {
    match &llm.vocabulary {
        VocabularyConfig::All => None,
        VocabularyConfig::First(count) => Some(Sayable::First(*count)),
        VocabularyConfig::Text(path) => Some(Sayable::Text(path.clone())),
    }
}

/// Threads that the LLM computes on: half of the cores unless configured, for ASR and TTS need the others meanwhile.
pub(crate) fn threads(llm: &LlmConfig) -> usize {
    llm.threads.map_or_else(
        || std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).max(1)),
        |threads| usize::try_from(threads).unwrap_or(1),
    )
}
