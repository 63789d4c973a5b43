//! Composition root: constructs every part of the daemon and runs the control loop.

use std::{
    fs, io,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{runtime::Handle, sync::watch};

use super::{
    activation::PassedSockets,
    clock::MonotonicClock,
    control_handle::ControlHandle,
    control_loop::{Clock as _, ControlLoop},
    crash_guard::CrashGuard,
    device::{Accounts, Device, Upkeep},
    embedder::Embedder,
    engine::{CurrentEngine, EngineDriver, start_engine},
    error::RunError,
    event_export,
    figures::{DENIALS, Figures},
    folders,
    handoff::{Handoff, Inheritance, Place},
    history_feed,
    listeners::{Bound, Clients, Listeners},
    llm::Llm,
    measure::Measurer,
    notify,
    parts::Parts,
    peaks::{PeakStore, learned_peaks},
    record::Recorder,
    reload::{Reloader, absolute, access_of, clients_of as clients_of_file},
    sampling::{self, Pace},
    shutdown::run_to_the_end,
    signals::Signals,
    startup_trim,
    status::Status,
    voice::Voice,
    watchdog::Watchdog,
    workers::{self, Workers},
    wyoming,
};
use cotenant_config::{Config, TelemetryConfig, WorkerRole};
use cotenant_engine::{backend, helper::THIS_PROGRAM};
use cotenant_http::{
    Access,
    backend::{
        Backends, ChatBackend, EmbeddingBackend, SpeechBackend, StatusBackend, TokenizerBackend,
    },
};
use cotenant_memory::emergency;
use cotenant_memory::heap;
use cotenant_policy::{
    arbiter::Arbiter,
    book::AdoptedWorker,
    engine_failure::Cure,
    event::Event,
    params::{MachineMemory, Params, Scope},
    peaks::Peaks,
};
use cotenant_probe::{ProbeRoot, Sampler, processes};
use cotenant_rpc::{Supervisor as _, llm::Generator, server::BindError};
use cotenant_speech::decoder::Decoder;
use cotenant_telemetry::{
    self as telemetry, Collector, EventExporter, LinesDropped, LogFilter, Metrics, OtlpProtocol,
    Tracer,
};
use cotenant_units::causes::in_one_line;
use cotenant_worker::{
    adopt::{all_visible, survivors},
    orphans::end_orphans,
};

/// Lines kept for `cotenant events`.
const EVENT_LOG_LINES: usize = 4096;

/// Time after opening the listeners at which the start is complete.
const SETTLED: Duration = Duration::from_secs(1);
/// Additional time without an LLM, after which each timer has fired once.
const SETTLED_WITHOUT_ENGINE: Duration = Duration::from_secs(3);

/// Longest wait for addresses in use although no supervisor runs here.
const LISTENERS_PATIENCE: Duration = Duration::from_millis(500);

const LISTENERS_LOOK_EVERY: Duration = Duration::from_millis(5);

/// Sources of reloadable settings, and systemd's sockets.
pub struct Source {
    /// The configuration file.
    pub file: PathBuf,
    /// Filter of the log.
    pub log: LogFilter,
    /// Sockets already open.
    pub sockets: PassedSockets,
}

/// Runs the daemon until a signal; SIGHUP reloads `source`. `dropped` counts lines lost by its log. gRPC and decisions
/// share the single-threaded `control_runtime`; everything else runs on the caller's runtime.
///
/// # Errors
/// If it cannot start, or loses a critical task. Faults of the engine and of workers are events.
pub async fn run(
    config: Config,
    source: Source,
    dropped: LinesDropped,
    control_runtime: Handle,
) -> Result<(), RunError> {
    let clock = MonotonicClock::start();
    let signals = Signals::install().map_err(RunError::system("signals"))?;
    for (key, folder) in [
        ("runtime_dir", &config.runtime_dir),
        ("state_dir", &config.state_dir),
    ] {
        folders::make(folder)?;
        folders::is_ours(key, folder, &config)?;
    }
    let keys = clients_of_file(&config).map_err(RunError::Private)?;
    backend::cuda::keep_probe_in(&config.state_dir);
    let set_aside = emergency::prepare();

    // Machine, and settings for it.
    let root = ProbeRoot::default();
    let mut sampler = open_sampler(&config, &root)?;
    let reading = sampler.read()?;
    let (machine, resized) = watch::channel(sampler.machine(&reading));
    let params = params_for(&config, &machine.borrow())?;
    let arbiter = Arbiter::new(params.clone())?;

    // Instance. If another supervisor is running, the start ends here, without effect on it. If that supervisor cannot
    // be identified, the error about the address in use is more helpful than that about the lock, so the addresses are
    // tried first.
    let place = match Place::take(&config).await {
        Err(error @ RunError::Running { .. }) => return Err(error),
        place => place,
    };
    source.sockets.report(&config);
    let bound = take_listeners(&config, &source.sockets, place.is_ok()).await?;
    let boot_id = boot_id();
    let (handoff, mut inheritance) = Handoff::open(place?, &boot_id)?;
    let (guard, safe_profile) =
        CrashGuard::begin(&config.state_dir, &source.file, config.safe_profile);

    // Shared state.
    let runs = inheritance.boot_ids.clone();
    let (control, inbox) = ControlHandle::new(boot_id.clone(), runs, clock, EVENT_LOG_LINES);
    control.note_locked(set_aside);
    control.note_listeners(config.listeners());
    let recorder = Recorder::open(&config, &control, &params)?;
    let metrics = Arc::new(Metrics::new());
    metrics.expect(
        params.workers.iter().map(|worker| worker.name.as_str()),
        &DENIALS,
    );
    let (parts, losses) = Parts::new();
    let tracer = tracer_of(&config.telemetry, &control, &parts);
    let on_control = parts.on(&control_runtime);

    // Holders: workers, the engine, and those of an earlier run.
    let workers = Workers::new(&config, &control, &parts);
    on_control.spawn(
        "activity of workers",
        workers::report_activity(Arc::clone(&control)),
    );
    let (adopted, pids) = adopt(&workers, &inheritance).await;
    sampler.count_too(pids);
    let holders = std::mem::take(&mut inheritance.holders);
    let llm = config.llm.as_ref();
    let engine = llm
        .map(|llm| start_engine(llm, &config.state_dir, &control, &on_control))
        .transpose()?;
    let current = engine.as_ref().map(EngineDriver::current);
    let status = Arc::new(Status::new(
        &control,
        &metrics,
        &config,
        current.clone(),
        dropped,
        tracer.clone(),
    ));
    let access = watch::Sender::new(Arc::new(access_of(
        &config,
        keys.clone(),
        &Access::default(),
    )));
    let shown = (&status, &metrics, &tracer);
    let clients = clients_of(
        &config,
        &control,
        &workers,
        current.as_ref(),
        shown,
        access.subscribe(),
    );
    let reloader = Reloader {
        file: absolute(&source.file),
        log: source.log,
        machine: resized,
        running: config.clone(),
        clients: keys,
        control: Arc::clone(&control),
        workers: workers.handles(),
        status,
        access,
    };

    // Loop.
    let (pace, interval) = Pace::new();
    let device = Device {
        measurer: Measurer::new(
            &control,
            root.clone(),
            workers.handles(),
            current.clone(),
            &metrics,
            &parts,
        ),
        watchdog: Watchdog::new(&control, current),
        accounts: Accounts {
            recorder,
            handoff,
            figures: Figures::new(&metrics, tracer),
            metrics,
        },
        upkeep: Upkeep::new(clock.now(), notify::watchdog_interval()),
        peaks: PeakStore::new(&config.state_dir, &parts),
        control: Arc::clone(&control),
        engine,
        workers,
        pace,
    };
    let mut control_loop = ControlLoop::new(arbiter, clock, device);
    // Before any admission: memory of the earlier run's holders, and of unmanaged processes.
    for event in inheritance.events(adopted) {
        control_loop.handle(event);
    }
    let taken_at = clock.now(); // a reading is as old as its start
    control_loop.handle(Event::Sampled(sampler.read()?.sample(taken_at)));
    sampling::spawn(
        sampler,
        &root,
        interval,
        machine,
        Arc::clone(&control),
        &parts,
    );

    // APIs.
    let listeners = Listeners::open(
        bound,
        &control,
        clients,
        &config,
        holders,
        (&parts, &on_control),
    )
    .await?;
    if let Some(reason) = safe_profile.filter(|_| config.llm.is_some()) {
        tracing::warn!("{reason}");
        let cure = Cure::Change {
            remedy: String::new(),
        };
        control_loop.handle(Event::EngineFailed {
            reason,
            cure,
            left: None,
        });
    } else if let Some(engine) = &control_loop.device().engine {
        engine.inspect();
    }
    tracing::info!(
        boot_id,
        budget = %control.state().memory.budget,
        limited_by = control.state().pressure.machine.limited_by,
        grpc = listeners.grpc_address(),
        http = listeners.http_address(),
        wyoming = listeners.wyoming_address(),
        "cotenant is ready"
    );
    let journal = config.journal.as_ref().map(|journal| journal.path.clone());
    history_feed::spawn(&control, journal, &parts);
    tokio::spawn(settle(Arc::clone(&control), config.llm.is_some()));
    let watchdog = &control_loop.device().watchdog;
    watchdog
        .start()
        .map_err(RunError::system("the watchdog's thread"))?;
    parts.spawn_permanent("reload", reloader.open());
    notify::ready();
    let running = run_to_the_end(control_loop, inbox, signals, losses, listeners);
    match control_runtime.spawn(running).await {
        Ok(ended) => {
            if ended.is_ok() {
                guard.ended();
            }
            ended
        }
        Err(broken) => match broken.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(cancelled) => Err(RunError::Lost {
                what: format!("the loop has ended: {cancelled}"),
            }),
        },
    }
}

/// Returns the API backends for these workers and this engine.
fn clients_of(
    config: &Config,
    control: &Arc<ControlHandle>,
    workers: &Workers,
    engine: Option<&CurrentEngine>,
    (status, metrics, tracer): (&Arc<Status>, &Arc<Metrics>, &Tracer),
    access: watch::Receiver<Arc<Access>>,
) -> Clients {
    let (asr, tts) = (
        workers.of_role(WorkerRole::Asr).next(),
        workers.of_role(WorkerRole::Tts).next(),
    );
    let embedders: Vec<_> = workers.of_role(WorkerRole::Embedding).collect();
    let handles =
        [&asr, &tts].map(|speaker| speaker.as_ref().map(|speaker| speaker.handle.clone()));
    let speech = (asr.is_some() || tts.is_some()).then(|| {
        Voice::new(Arc::clone(control), asr, tts, tracer.clone()) as Arc<dyn SpeechBackend>
    });
    let llm = config
        .llm
        .as_ref()
        .zip(engine.cloned())
        .map(|(llm, engine)| {
            let (metrics, tracer) = (Arc::clone(metrics), tracer.clone());
            let served = Llm::new(Arc::clone(control), engine, llm, metrics, tracer);
            (served, llm.name.clone())
        });
    let chat = llm
        .clone()
        .map(|(llm, name)| (llm as Arc<dyn ChatBackend>, name));
    let [asr, tts] = handles;
    Clients {
        backends: Backends {
            chat: chat.clone().map(|(chat, _)| chat),
            tokenizer: llm.clone().map(|(llm, _)| llm as Arc<dyn TokenizerBackend>),
            decoder: Decoder::new(THIS_PROGRAM.into()),
            speech: speech.clone(),
            embedding: (!embedders.is_empty()).then(|| {
                Embedder::new(Arc::clone(control), embedders, tracer.clone())
                    as Arc<dyn EmbeddingBackend>
            }),
            status: Arc::clone(status) as Arc<dyn StatusBackend>,
            tracer: tracer.clone(),
        },
        access,
        wyoming: wyoming::Backends {
            speech,
            chat,
            asr,
            tts,
            metrics: Arc::clone(metrics),
            tracer: tracer.clone(),
            answers: Arc::clone(control.answers()),
        },
        generator: llm.map(|(llm, _)| llm as Arc<dyn Generator>),
    }
}

/// Returns the tracer. If a collector is configured, starts the exporters of spans and of events.
fn tracer_of(config: &TelemetryConfig, control: &Arc<ControlHandle>, parts: &Parts) -> Tracer {
    let variable = |name: &str| std::env::var(name).ok();
    let otlp = match config.otlp.clone().collector(variable) {
        Ok(Some(otlp)) => otlp,
        Ok(None) => return Tracer::default(),
        Err((endpoint, protocol)) => {
            tracing::warn!(
                endpoint,
                protocol,
                "cannot export spans to OTEL_EXPORTER_OTLP_ENDPOINT: write `http://host:4318` with the protocol \
                 `http/protobuf`, or `http://host:4317` with `grpc`"
            );
            return Tracer::default();
        }
    };
    let collector = Collector {
        protocol: if otlp.grpc {
            OtlpProtocol::Grpc
        } else {
            OtlpProtocol::Http
        },
        ca: otlp.tls.then(|| config.otlp_ca.clone()),
        authority: otlp.authority,
        path: otlp.path,
    };
    let host = nix::unistd::gethostname()
        .ok()
        .and_then(|name| name.into_string().ok());
    let resource = telemetry::resource(control.boot_id(), host, variable);
    if config.otlp_events {
        let exporter = EventExporter::new(collector.clone(), resource.clone());
        parts.spawn_permanent(
            "the exporter of events",
            event_export::export(Arc::clone(control), exporter),
        );
    }
    let tracer = Tracer::recording();
    parts.spawn_permanent(
        "the exporter of spans",
        telemetry::export(tracer.clone(), collector, resource),
    );
    tracer
}

fn open_sampler(config: &Config, root: &ProbeRoot) -> Result<Sampler, RunError> {
    let session = match config.budget.scope {
        Scope::Machine => None,
        Scope::Session => Some(processes::own_session()),
    };
    Ok(Sampler::open(root, session)?)
}

/// Returns the settings of policy for a machine, with the peaks learned in earlier runs.
fn params_for(config: &Config, machine: &MachineMemory) -> Result<Params, RunError> {
    let mut params = config.params(machine).map_err(|faults| {
        RunError::Settings(
            faults
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join("; "),
        )
    })?;
    params.peaks = learned_peaks(&config.state_dir).unwrap_or_else(|error| {
        tracing::warn!(hint = error.hint(), "{}", in_one_line(&error));
        Peaks::default()
    });
    Ok(params)
}

/// Releases memory needed only by the start, and locks the rest. The first requests and samples count as part of the
/// start.
async fn settle(control: Arc<ControlHandle>, has_engine: bool) {
    tokio::time::sleep(SETTLED).await;
    if !has_engine {
        tokio::time::sleep(SETTLED_WITHOUT_ENGINE).await;
    }
    heap::trim();
    control.note_locked(emergency::lock_program());
    if !has_engine {
        // Last, since the steps before it run once.
        startup_trim::drop_program();
    }
}

/// Takes over the living workers of the previous run, and ends its other processes. Returns the workers for policy, and
/// their processes.
async fn adopt(workers: &Workers, inheritance: &Inheritance) -> (Vec<AdoptedWorker>, Vec<u32>) {
    let roots = ProbeRoot::default();
    all_visible(&roots).await;
    let mut survivors = survivors(&roots, &workers.specs());
    inheritance.note_readiness(&mut survivors);
    for orphan in end_orphans(&roots, workers.groups(), Some(workers.place()), &survivors).await {
        tracing::warn!(?orphan, "ended a leftover process of an earlier supervisor");
    }
    let adopted = workers.adopt(survivors).await;
    let pids = adopted.iter().map(|worker| worker.pid).collect();
    (adopted, pids)
}

/// Binds the listeners. Their addresses may be in use briefly after another supervisor has ended, while the kernel
/// closes its sockets.
async fn take_listeners(
    config: &Config,
    passed: &PassedSockets,
    has_place: bool,
) -> Result<Bound, RunError> {
    let end = Instant::now() + LISTENERS_PATIENCE;
    loop {
        let error = match Bound::take(config, passed).await {
            Ok(bound) => return Ok(bound),
            Err(error) => error,
        };
        let taken = match &error {
            RunError::Listen { source, .. } => source.kind() == io::ErrorKind::AddrInUse,
            RunError::Socket { source } => matches!(source, BindError::InUse { .. }),
            _ => false,
        };
        if !has_place || !taken || Instant::now() > end {
            return Err(error);
        }
        tokio::time::sleep(LISTENERS_LOOK_EVERY).await;
    }
}

/// Returns a unique name for this run: the kernel's random UUID, or the time if that cannot be read.
fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/uuid").map_or_else(
        |_| std::process::id().to_string(),
        |text| text.trim().to_owned(),
    )
}
