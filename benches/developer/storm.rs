//! `developer storm`: random demands in a control group with a memory limit.
//!
//! The real daemon with the demo model, workers, neighbours without leases, and tenants that fill their grants run in
//! one limited group with this program. Together they demand more than its limit, so the LLM has to shed in time:
//! otherwise the kernel kills a process, which its own counter shows.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use tonic::transport::Channel;

use super::kill::Random;
use cotenant::cli::bench::{
    daemon,
    load::Reading,
    report::{Limit, Report},
};
use cotenant::{
    cli::{
        demo::{talk::Talk, watch},
        stage::{Process, Stage},
    },
    probe::{
        ProbeRoot,
        cgroup::{Cgroup, CgroupVersion},
    },
    rpc::v1::{
        ControlWorkerRequest, EngineState, GetStatusRequest, GetStatusResponse, PressureLevel,
        WorkerCommand, WorkerState, llm_service_client::LlmServiceClient,
        operator_service_client::OperatorServiceClient,
    },
    units::Bytes,
};

/// Settings of the benchmark.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StormArgs {
    /// Storms, one after the other.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub storms: u32,
    /// Of the random demands; the same seed asks for the same things.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Limit of the group. Workers, daemon and this program take some 150 MiB of it, and the LLM 135 MiB, of which it can
/// shed 128.
const LIMIT: Bytes = Bytes::from_mib(512);

/// Largest total of the neighbours: together with a tenant it exceeds the memory above the watermark, but fits once the
/// LLM has shed all that it can.
const NEIGHBOURS: u64 = 200;

/// Most MiB filled by a tenant.
const TENANT: u64 = 48;

/// Most MiB used by `cotenant hold` itself.
const HOLDER: u64 = 16;

const PATIENCE: Duration = Duration::from_secs(60);

/// Context of the demo model: 128 MiB of KV.
const KV_TOKENS: u32 = 65_536;

/// Charged to the group but not to a process: page tables, sockets, the kernel's own memory.
const KERNEL: Bytes = Bytes::from_mib(48);

#[derive(Default)]
struct Seen {
    critical: u32,
    granted: u32,
    asked: u32,
    used_max: Bytes,
    kv_least: Option<u32>,
    settle: Vec<Duration>,
}

pub(super) async fn run(args: &StormArgs) -> Result<Report, String> {
    let group =
        Limited::enter(LIMIT).map_err(|problem| format!("cannot limit memory here: {problem}"))?;
    let began = Instant::now();
    let mut stage = Stage::set(configuration).map_err(|error| error.to_string())?;
    let done = storms(args, &group, &mut stage, began).await;
    done.map_err(|problem| {
        let kills = group.kills();
        format!(
            "{problem}; the group's counter of kills: {kills:?}; the daemon's last log lines:\n{}",
            stage.log_tail(15)
        )
    })
}

async fn storms(
    args: &StormArgs,
    group: &Limited,
    stage: &mut Stage,
    began: Instant,
) -> Result<Report, String> {
    let mut random = Random(args.seed);
    let channel = watch::connect(&stage.socket(), PATIENCE).await?;
    let mut operator = OperatorServiceClient::new(channel.clone());
    let first = daemon::until(&mut operator, PATIENCE, calm).await?;
    let workers = starts(&first);
    let full = first
        .engine
        .as_ref()
        .map_or(0, |engine| engine.kv_capacity_full_tokens);
    let talk = Talk::start(
        LlmServiceClient::new(channel.clone()),
        "tell me a story",
        began,
    );
    if !talk.stories(1, PATIENCE).await {
        return Err(format!(
            "the LLM does not talk: {:?}",
            talk.outcome().failures
        ));
    }
    let reading = Reading::now();
    let daemon = stage.daemon().pid();
    let mut seen = Seen::default();
    for number in 1..=args.storms {
        storm(&mut random, stage, &mut operator, &mut seen, number).await?;
        let over = Instant::now();
        if stage.daemon().pid() != daemon || !matches!(stage.daemon().ended(), Ok(None)) {
            return Err(format!("storm {number}: the daemon has ended"));
        }
        // Two of three storms start before the last one has ended.
        if random.below(3) == 0 {
            daemon::until(&mut operator, PATIENCE, calm)
                .await
                .map_err(|problem| format!("storm {number}: {problem}"))?;
            seen.settle.push(over.elapsed());
        }
    }
    let last = daemon::until(&mut operator, PATIENCE, calm).await?;
    let outcome = talk.stop().await;
    let engine = last.engine.clone().unwrap_or_default();
    let mut report = Report::new(
        "storm",
        format!(
            "{} storms, seed {}, in a group of {} ({}): the daemon, an LLM of {} at most that talks, three workers, \
             neighbours and tenants",
            args.storms,
            args.seed,
            LIMIT,
            group.name(),
            Bytes::new(engine.full_plan_bytes),
        ),
    );
    let none = Some(Limit::AtMost(0.0));
    let kills = group.kills().ok_or("the group does not tell of kills")?;
    report.figure(
        "kills for memory, by the group's counters",
        "",
        number(kills),
        none,
    );
    let again = number(u64::from(starts(&last).saturating_sub(workers)));
    report.figure(
        "workers `a` and `b` stopped to make room, and started again",
        "",
        again,
        None,
    );
    report.figure(
        "storms with a Critical level seen",
        "",
        f64::from(seen.critical),
        None,
    );
    report.figure("tenants asked", "", f64::from(seen.asked), None);
    report.figure("tenants granted", "", f64::from(seen.granted), None);
    report.figure(
        "most charged to the group",
        "MiB",
        mib(seen.used_max.get()),
        Some(Limit::AtMost(mib(LIMIT.get()))),
    );
    report.figure(
        "the group ran against its limit",
        "times",
        number(group.hits()),
        None,
    );
    report.figure(
        "LLM: sheds verified, in all",
        "MiB",
        mib(engine.shed_bytes),
        None,
    );
    report.figure(
        "LLM: grown back, in all",
        "MiB",
        mib(engine.regrown_bytes),
        None,
    );
    report.figure(
        "LLM: least KV capacity seen",
        "tokens",
        f64::from(seen.kv_least.unwrap_or(full)),
        None,
    );
    report.figure("LLM: answers", "", number(outcome.stories), None);
    report.figure(
        "LLM: answers different",
        "",
        number(outcome.different),
        none,
    );
    report.figure(
        "LLM: answers aborted",
        "",
        number(outcome.failures.len().try_into().unwrap_or(u64::MAX)),
        None,
    );
    report.times(
        "over to calm and whole",
        std::mem::take(&mut seen.settle),
        None,
    );
    report.others(&reading);
    if let Some(first) = outcome.failures.first() {
        report.note(format!("the first aborted answer: {first}"));
    }
    Ok(report)
}

/// Runs one storm: one or two neighbours, a tenant, sometimes a start or stop of a worker.
async fn storm(
    random: &mut Random,
    stage: &Stage,
    operator: &mut OperatorServiceClient<Channel>,
    seen: &mut Seen,
    number: u32,
) -> Result<(), String> {
    let mut neighbours = Vec::new();
    let mut left = NEIGHBOURS;
    for _ in 0..=random.below(2) {
        let size = 16 + random.below(left - 16);
        let rate = 64 + random.below(960);
        neighbours.push((size, rate, Duration::from_millis(random.below(150))));
        left -= size;
        if left < 64 {
            break;
        }
    }
    let tenant = (random.below(3) > 0).then(|| 8 + random.below(TENANT - 8));
    let worker = (random.below(3) == 0).then(|| random.below(2) == 0);
    let long = Duration::from_millis(100 + random.below(700));
    if let Some(start) = worker {
        let command = if start {
            WorkerCommand::Start
        } else {
            WorkerCommand::Stop
        };
        let request = ControlWorkerRequest {
            name: "c".to_owned(),
            command: command.into(),
        };
        // A refusal for lack of memory is legitimate.
        let _ = operator.control_worker(request).await;
    }
    let mut running = Vec::new();
    let start = |arguments: Vec<String>| {
        Process::start(&arguments).map_err(|error| format!("storm {number}: {error}"))
    };
    if let Some(size) = tenant {
        seen.asked += 1;
        running.push(start(held(stage, number, size)?)?);
    }
    for (size, rate, pause) in neighbours {
        tokio::time::sleep(pause).await;
        let arguments = [
            "worker",
            "ballast",
            &format!("{size}MiB"),
            "--rate",
            &format!("{rate}MiB"),
        ];
        running.push(start(arguments.map(str::to_owned).to_vec())?);
    }
    let end = Instant::now() + long;
    let mut critical = false;
    let mut granted = false;
    while Instant::now() < end {
        let status = operator.get_status(GetStatusRequest {}).await;
        let status = status
            .map_err(|status| format!("storm {number}: {}", status.message()))?
            .into_inner();
        let level = status
            .pressure
            .as_ref()
            .map(cotenant::rpc::v1::Pressure::level);
        critical |= level == Some(PressureLevel::Critical);
        granted |= status
            .leases
            .iter()
            .any(|lease| lease.tenant == "guest" && lease.held_bytes > 0);
        if let Some(engine) = &status.engine {
            let least = seen.kv_least.get_or_insert(engine.kv_capacity_tokens);
            *least = (*least).min(engine.kv_capacity_tokens);
        }
        if let Some(used) = Cgroup::own(&ProbeRoot::default()).and_then(|group| group.memory().used)
        {
            seen.used_max = seen.used_max.max(used);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    seen.critical += u32::from(critical);
    seen.granted += u32::from(granted);
    // On a separate thread, because each may take a moment to exit.
    tokio::task::spawn_blocking(move || drop(running))
        .await
        .map_err(|error| error.to_string())
}

/// Returns the command of a tenant unaware of leases, under `cotenant hold`, that fills its grant.
fn held(stage: &Stage, number: u32, mib: u64) -> Result<Vec<String>, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    // The lease includes `hold` itself.
    let (lease, fill) = (format!("{}MiB", mib + HOLDER), format!("{mib}MiB"));
    let endpoint = format!("unix://{}", stage.socket().display());
    let program = program.display().to_string();
    let class = if number.is_multiple_of(2) {
        "interactive"
    } else {
        "audio-realtime"
    };
    let arguments = [
        "hold",
        "guest",
        "--min",
        &lease,
        "--class",
        class,
        "--wait",
        "400ms",
        "--endpoint",
        &endpoint,
        "--",
        &program,
        "worker",
        "ballast",
        &fill,
    ];
    Ok(arguments.map(str::to_owned).to_vec())
}

/// Returns whether the level is Normal, no memory is in transition, and the LLM is complete again.
fn calm(status: &GetStatusResponse) -> bool {
    let normal = status
        .pressure
        .as_ref()
        .is_some_and(|pressure| pressure.level() == PressureLevel::Normal);
    let engine = status.engine.as_ref().is_some_and(|engine| {
        engine.state() == EngineState::Ready
            && !engine.changing
            && engine.kv_capacity_tokens == engine.kv_capacity_full_tokens
    });
    let ready = |name: &str| {
        let mut workers = status.workers.iter();
        workers.any(|worker| worker.name == name && worker.state() == WorkerState::Ready)
    };
    normal && engine && ready("a") && ready("b")
}

/// Returns the starts of the two workers that only the supervisor stops.
fn starts(status: &GetStatusResponse) -> u32 {
    let workers = status.workers.iter().filter(|worker| worker.name != "c");
    workers.map(|worker| worker.starts).sum()
}

/// Limited control group that contains this process for the lifetime of the value.
struct Limited {
    version: CgroupVersion,
    home: PathBuf,
    folder: PathBuf,
}

impl Limited {
    fn enter(limit: Bytes) -> Result<Self, String> {
        let root = ProbeRoot::default();
        let own = Cgroup::own(&root).ok_or("no memory controller of control groups is mounted")?;
        let limit_file = match own.version() {
            CgroupVersion::V1 => "memory.limit_in_bytes",
            CgroupVersion::V2 => "memory.max",
        };
        let home = own.folder().to_owned();
        let folder = home.join(format!("cotenant-storm-{}", std::process::id()));
        let failed = |what: &str, error: &std::io::Error| format!("{what}: {error}");
        fs::create_dir(&folder)
            .map_err(|error| failed(&format!("`{}`", folder.display()), &error))?;
        let group = Self {
            version: own.version(),
            home,
            folder,
        };
        if !group.folder.join(limit_file).exists() {
            // Version 2 delegates a controller only on request, and only from a group without processes.
            fs::write(group.home.join("cgroup.subtree_control"), "+memory").map_err(|error| {
                failed(
                    "the memory controller is not handed on to groups below ours",
                    &error,
                )
            })?;
        }
        fs::write(group.folder.join(limit_file), limit.get().to_string())
            .map_err(|error| failed(&format!("`{limit_file}`"), &error))?;
        // Prevent swapping.
        let _ = match group.version {
            CgroupVersion::V1 => fs::write(
                group.folder.join("memory.memsw.limit_in_bytes"),
                limit.get().to_string(),
            ),
            CgroupVersion::V2 => fs::write(group.folder.join("memory.swap.max"), "0"),
        };
        group
            .take_in(&group.folder)
            .map_err(|error| failed("this process does not get in", &error))?;
        Ok(group)
    }

    fn take_in(&self, folder: &Path) -> std::io::Result<()> {
        fs::write(folder.join("cgroup.procs"), std::process::id().to_string())
    }

    fn name(&self) -> &'static str {
        match self.version {
            CgroupVersion::V1 => "version 1",
            CgroupVersion::V2 => "version 2",
        }
    }

    /// Returns kills in the group and its descendants: version 1 counts each group separately, version 2
    /// hierarchically.
    fn kills(&self) -> Option<u64> {
        let root = ProbeRoot::default();
        let own = Cgroup::own(&root)?.memory().oom_kills?;
        if self.version == CgroupVersion::V2 {
            return Some(own);
        }
        let below = fs::read_dir(&self.folder)
            .ok()?
            .flatten()
            .filter_map(|entry| {
                let text = fs::read_to_string(entry.path().join("memory.oom_control")).ok()?;
                let line = text
                    .lines()
                    .find_map(|line| line.strip_prefix("oom_kill "))?;
                line.trim().parse::<u64>().ok()
            });
        Some(own + below.sum::<u64>())
    }

    fn hits(&self) -> u64 {
        let own = Cgroup::own(&ProbeRoot::default());
        own.and_then(|group| group.memory().limit_hits)
            .unwrap_or_default()
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        let _ = self.take_in(&self.home);
        // The last process may still be exiting.
        let end = Instant::now() + Duration::from_secs(2);
        while Instant::now() < end {
            for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
                if entry.path().is_dir() {
                    let _ = fs::remove_dir(entry.path());
                }
            }
            if fs::remove_dir(&self.folder).is_ok() || !self.folder.exists() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn configuration(folder: &Path) -> String {
    let folder = folder.display();
    let worker = |name: &str, autostart: bool| {
        format!(
            "  - {{name: {name}, role: other, class: audio-realtime, argv: [\"${{SELF}}\", worker, ballast, 24MiB], \
             autostart: {autostart}, ready: {{kind: log, text: holding, timeout: 20s}}, memory: {{steady: 40MiB, peak: 40MiB}}}}\n"
        )
    };
    format!(
        "\
budget:
  total: {}MiB
  reserve: 64MiB
  watermarks: {{elevated: 96MiB, critical: 48MiB, last_resort: 16MiB}}
  hysteresis: 16MiB
  scope: session
  dwell: 300ms
shedding: {{reclaim_min: 32MiB, settle: 50ms}}
llm: {{path: {folder}/demo.gguf, name: bench, threads: 1, context: {KV_TOKENS}, kv_floor: 512}}
workers:
{}{}{}http: {{listen: none}}
grpc: {{socket: {folder}/cotenant.sock, abstract_name: none}}
journal: {{path: {folder}/journal.ndjson}}
state_dir: {folder}/state
runtime_dir: {folder}
log: {{filter: info, format: text}}
",
        LIMIT.saturating_sub(KERNEL).whole_mib(),
        worker("a", true),
        worker("b", true),
        worker("c", false),
    )
}

fn number(number: u64) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}

#[expect(clippy::cast_precision_loss, reason = "some GiB")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1u32 << 20)
}
