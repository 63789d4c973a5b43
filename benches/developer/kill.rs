//! `developer kill`: a daemon killed at random points, and the state kept by its successor.
//!
//! It runs the real daemon with the demo model and workers, a tenant with a lease and real pages, and an operation in
//! progress at each point: a shed, a grant that needs one, the start or the stop of a worker, the start of the daemon
//! itself. After each kill it checks the workers, that no memory is granted twice, every acknowledged lease, and the
//! length of the outage.

use std::{
    collections::BTreeSet,
    process::ExitCode,
    time::{Duration, Instant},
};

use tonic::{Code, transport::Channel};

use cotenant::cli::{
    exit::{self, CliError},
    session::{self, Interrupts},
    stage::Stage,
};
use cotenant::{
    rpc::{
        Endpoint,
        v1::{
            ControlWorkerRequest, CreateLeaseRequest, EngineState, GetStatusRequest,
            GetStatusResponse, Lease, LeaseClass, LeaseKind, LeaseState, ReleaseLeaseRequest,
            RenewLeaseRequest, ShedRequest, WorkerCommand, WorkerState,
            lease_service_client::LeaseServiceClient,
            operator_service_client::OperatorServiceClient,
        },
    },
    units::Bytes,
};

/// Settings of the benchmark.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct KillArgs {
    /// How often to kill the daemon.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..))]
    pub points: u32,
    /// Of the random points; the same seed asks for the same things at the same times.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Prints a line; a closed pipe ends the output, not the measurement.
macro_rules! line {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout().lock(), $($text)*);
    }};
}

/// Runs the benchmark in a separate session.
pub(super) fn run(args: &KillArgs) -> Result<ExitCode, CliError> {
    let mut result = Ok(());
    let code = session::in_own_session(|| {
        result = measure(args);
        ExitCode::SUCCESS
    });
    result.map(|()| code)
}

fn measure(args: &KillArgs) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| CliError::failed("cannot start", error))?;
    runtime.block_on(async {
        let mut interrupts = Interrupts::new().map_err(|error| CliError::failed("cannot start", error))?;
        let mut stage = Stage::set(configuration).map_err(|error| CliError::failed("cannot start", error))?;
        let done = tokio::select! {
            done = points(args, &mut stage) => done.map_err(|problem| {
                let problem = format!("{problem}; the daemon's last log lines:\n{}", stage.log_tail(15));
                CliError::plain(problem, exit::FAILED)
            }),
            code = interrupts.next() => Err(CliError::plain("the measurement was interrupted", code)),
        };
        // Remaining processes are ended by a daemon that shuts down cleanly.
        if !matches!(stage.daemon().ended(), Ok(None)) {
            let _ = stage.start_again();
            let _ = answered(&stage).await;
        }
        done
    })
}

/// Operation in progress at the kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    Grant,
    Idle,
    Shed,
    Start,
    Worker,
}

#[derive(Default)]
struct Seen {
    gaps: Vec<Duration>,
    grants: u32,
    held_max: Bytes,
    used_max: Bytes,
    faults: Vec<String>,
}

async fn points(args: &KillArgs, stage: &mut Stage) -> Result<(), String> {
    let began = Instant::now();
    let mut random = Random(args.seed);
    let mut seen = Seen::default();
    let (channel, _) = answered(stage).await?;
    let first = settled(&channel, |status| {
        engine_ready(status) && ["a", "b"].iter().all(|name| pid(status, name).is_some())
    })
    .await?;
    let workers = ["a", "b"].map(|name| pid(&first, name));
    let budget = Bytes::new(first.budget.map_or(0, |budget| budget.budget_bytes));
    let pages = vec![1u8; TENANT.as_len()];
    let mut lease = create(&channel, "tenant", "bench", LEASE)
        .await
        .map_err(reported)?;
    line!(
        "budget {budget}, {} workers, a tenant that holds {LEASE} and has {TENANT} of pages; {} points, seed {}",
        first.workers.len(),
        args.points,
        args.seed
    );
    for point in 1..=args.points {
        let moment = match random.below(5) {
            0 => Moment::Grant,
            1 => Moment::Shed,
            2 => Moment::Start,
            3 => Moment::Worker,
            _ => Moment::Idle,
        };
        let id = format!("grant {point}");
        let size = Bytes::from_mib(8 + random.below(48));
        let pause = Duration::from_micros(random.below(30_000));
        let (channel, _) = answered(stage).await?;
        let granted = tokio::select! {
            biased;
            // Until its reply, or the kill if that is earlier; then the pause continues.
            granted = disturb(&channel, moment, &id, size, point) => { tokio::time::sleep(pause / 2).await; granted }
            () = tokio::time::sleep(pause) => None,
        };
        let mut killed = Instant::now();
        stage.kill();
        stage.start_again().map_err(|error| error.to_string())?;
        if moment == Moment::Start {
            tokio::time::sleep(Duration::from_micros(random.below(60_000))).await;
            killed = Instant::now();
            stage.kill();
            stage.start_again().map_err(|error| error.to_string())?;
        }
        let (channel, status) = answered(stage).await?;
        seen.gaps.push(killed.elapsed());
        let mut fault = |what: String| {
            seen.faults
                .push(format!("point {point} ({moment:?}): {what}"));
        };

        // From the first reply on, no memory is granted twice.
        let mut looks = vec![status];
        match renew(&channel, &lease).await {
            Ok(renewed) => lease = renewed,
            Err(status) => fault(format!("the tenant's lease is lost: {}", status.message())),
        }
        if let Some(granted) = &granted {
            seen.grants += 1;
            if let Err(status) = renew(&channel, granted).await {
                fault(format!(
                    "a lease that was granted is lost: {}",
                    status.message()
                ));
            }
        }
        if moment == Moment::Grant {
            // Repeat the request, acknowledged or not: it must be one lease.
            match create(&channel, "guest", &id, size).await {
                Ok(again) => {
                    if granted
                        .as_ref()
                        .is_some_and(|granted| granted.name != again.name)
                    {
                        fault("the same request was granted twice".to_owned());
                    }
                    release(&channel, &again).await;
                }
                Err(status) if status.code() == Code::ResourceExhausted && granted.is_none() => {}
                Err(status) => fault(format!("the same request is refused: {}", status.message())),
            }
        }
        let status = settled(&channel, |status| {
            engine_ready(status)
                && calm(status)
                && ["a", "b"].iter().all(|name| ready(status, name))
        })
        .await?;
        if ["a", "b"].map(|name| pid(&status, name)) != workers {
            fault("a worker was started again".to_owned());
        }
        let c = processes_with(THIRD)?;
        if c.len() > 1 || c.first().copied() != pid(&status, "c") {
            fault(format!(
                "worker `c` should be {:?} and is {c:?}",
                pid(&status, "c")
            ));
        }
        looks.push(status);
        for status in &looks {
            let held: u64 = status.leases.iter().map(|lease| lease.held_bytes).sum();
            let own = status.leases.iter().find(|lease| lease.tenant == "tenant");
            if let Some(own) = own.filter(|own| own.used_bytes() > own.held_bytes) {
                let used = Bytes::new(own.used_bytes());
                seen.faults.push(format!(
                    "point {point} ({moment:?}): this program itself uses {used}, more than the {LEASE} that it holds"
                ));
            }
            // The tenants are this process under two names, so use their held memory: their measured use would count
            // twice, and include this program's own.
            let used = status
                .leases
                .iter()
                .map(|lease| match lease.tenant.as_str() {
                    "tenant" | "guest" => lease.held_bytes,
                    _ => lease.used_bytes.unwrap_or(0),
                });
            let used: u64 = used.sum();
            seen.held_max = seen.held_max.max(Bytes::new(held));
            seen.used_max = seen.used_max.max(Bytes::new(used));
            if Bytes::new(held) > budget || Bytes::new(used) > budget {
                seen.faults.push(format!(
                    "point {point} ({moment:?}): {} held and {} used of a {budget} budget",
                    Bytes::new(held),
                    Bytes::new(used)
                ));
            }
        }
        if point.is_multiple_of(50) {
            line!("{point} points in {:.0} s", began.elapsed().as_secs_f64());
        }
    }
    std::hint::black_box(&pages);
    report(seen, budget, args.points)
}

fn report(mut seen: Seen, budget: Bytes, points: u32) -> Result<(), String> {
    seen.gaps.sort_unstable();
    let gap = |per_mille: usize| {
        let last = seen.gaps.len().saturating_sub(1);
        let at = (seen.gaps.len() * per_mille)
            .div_ceil(1000)
            .saturating_sub(1)
            .min(last);
        seen.gaps.get(at).map_or(0.0, |gap| gap.as_secs_f64() * 1e3)
    };
    line!(
        "killed → answered: p50 {:.0} ms, p99 {:.0} ms, max {:.0} ms",
        gap(500),
        gap(990),
        gap(1000)
    );
    line!(
        "held at most {} and measured at most {} of {budget}; {} grants were answered before the kill and went on",
        seen.held_max,
        seen.used_max,
        seen.grants
    );
    line!("faults: {} in {points} points", seen.faults.len());
    let slow = seen.gaps.iter().filter(|gap| **gap > GAP_MAX).count();
    if slow > 0 {
        line!("{slow} gaps were above {GAP_MAX:?}");
    }
    match seen.faults.first() {
        None => Ok(()),
        Some(first) => Err(format!("{} faults, the first: {first}", seen.faults.len())),
    }
}

/// Starts the operation; returns a granted lease, if any.
async fn disturb(
    channel: &Channel,
    moment: Moment,
    id: &str,
    size: Bytes,
    point: u32,
) -> Option<Lease> {
    let mut operator = OperatorServiceClient::new(channel.clone());
    match moment {
        Moment::Grant => return create(channel, "guest", id, size).await.ok(),
        Moment::Idle | Moment::Start => std::future::pending().await,
        Moment::Shed => {
            let shed_bytes = size.get() / 2;
            let _ = operator.shed(ShedRequest { shed_bytes }).await;
        }
        Moment::Worker => {
            let command = if point.is_multiple_of(2) {
                WorkerCommand::Start
            } else {
                WorkerCommand::Stop
            };
            let request = ControlWorkerRequest {
                name: "c".to_owned(),
                command: command.into(),
            };
            let _ = operator.control_worker(request).await;
        }
    }
    None
}

/// Waits for the first reply of the daemon.
async fn answered(stage: &Stage) -> Result<(Channel, GetStatusResponse), String> {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Ok(channel) = Endpoint::Path(stage.socket()).connect().await
            && let Ok(answer) = OperatorServiceClient::new(channel.clone())
                .get_status(GetStatusRequest {})
                .await
        {
            return Ok((channel, answer.into_inner()));
        }
        if Instant::now() > end {
            return Err(format!("no answer for {PATIENCE:?}"));
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn settled(
    channel: &Channel,
    wanted: impl Fn(&GetStatusResponse) -> bool,
) -> Result<GetStatusResponse, String> {
    let end = Instant::now() + PATIENCE;
    loop {
        let answer = OperatorServiceClient::new(channel.clone())
            .get_status(GetStatusRequest {})
            .await
            .map_err(reported)?
            .into_inner();
        if wanted(&answer) {
            return Ok(answer);
        }
        if Instant::now() > end {
            return Err(format!("not settled within {PATIENCE:?}: {answer:#?}"));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn create(
    channel: &Channel,
    tenant: &str,
    id: &str,
    size: Bytes,
) -> Result<Lease, tonic::Status> {
    let request = CreateLeaseRequest {
        request_id: id.to_owned(),
        tenant: tenant.to_owned(),
        lease_class: LeaseClass::Interactive.into(),
        kind: LeaseKind::Unspecified.into(),
        min_bytes: size.get(),
        max_bytes: size.get(),
        term: Some(prost_types::Duration {
            seconds: 20,
            nanos: 0,
        }),
        max_wait: Some(prost_types::Duration {
            seconds: 3,
            nanos: 0,
        }),
        validate_only: false,
        cgroup: String::new(),
    };
    let answer = LeaseServiceClient::new(channel.clone())
        .create_lease(request)
        .await?;
    let lease = answer.into_inner().lease;
    lease.ok_or_else(|| tonic::Status::internal("the answer holds no lease"))
}

async fn renew(channel: &Channel, lease: &Lease) -> Result<Lease, tonic::Status> {
    let request = RenewLeaseRequest {
        name: lease.name.clone(),
        boot_id: lease.boot_id.clone(),
        generation: lease.generation,
    };
    let answer = LeaseServiceClient::new(channel.clone())
        .renew_lease(request)
        .await?;
    let lease = answer.into_inner().lease;
    lease.ok_or_else(|| tonic::Status::internal("the answer holds no lease"))
}

async fn release(channel: &Channel, lease: &Lease) {
    let request = ReleaseLeaseRequest {
        name: lease.name.clone(),
        boot_id: lease.boot_id.clone(),
        generation: lease.generation,
    };
    // An unreleased lease expires by its term.
    let _ = LeaseServiceClient::new(channel.clone())
        .release_lease(request)
        .await;
}

#[expect(clippy::needless_pass_by_value, reason = "an error that is mapped")]
fn reported(status: tonic::Status) -> String {
    status.message().to_owned()
}

fn engine_ready(status: &GetStatusResponse) -> bool {
    let engine = status.engine.as_ref();
    engine.is_some_and(|engine| engine.state() == EngineState::Ready)
}

/// Returns whether nothing is in transition: worker `c` runs or is stopped, and no lease is ending.
fn calm(status: &GetStatusResponse) -> bool {
    let c = status.workers.iter().find(|worker| worker.name == "c");
    c.is_some_and(|c| matches!(c.state(), WorkerState::Ready | WorkerState::Stopped))
        && status
            .leases
            .iter()
            .all(|lease| lease.tenant != "guest" || lease.state() == LeaseState::Gone)
}

fn ready(status: &GetStatusResponse, name: &str) -> bool {
    let worker = status.workers.iter().find(|worker| worker.name == name);
    worker.is_some_and(|worker| worker.state() == WorkerState::Ready)
}

fn pid(status: &GetStatusResponse, name: &str) -> Option<u32> {
    let worker = status.workers.iter().find(|worker| worker.name == name);
    worker
        .filter(|worker| worker.state() == WorkerState::Ready)?
        .pid
}

/// Returns the processes of our session with this argument.
fn processes_with(argument: &str) -> Result<BTreeSet<u32>, String> {
    let entries = std::fs::read_dir("/proc").map_err(|error| error.to_string())?;
    let session = nix::unistd::getsid(None).map_err(|error| error.to_string())?;
    let found = entries.flatten().filter_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let ours = nix::unistd::getsid(Some(nix::unistd::Pid::from_raw(pid))) == Ok(session);
        let line = std::fs::read(entry.path().join("cmdline")).ok()?;
        let has = line
            .split(|byte| *byte == 0)
            .any(|word| word == argument.as_bytes());
        (ours && has).then(|| pid.unsigned_abs())
    });
    Ok(found.collect())
}

fn configuration(folder: &std::path::Path) -> String {
    let model = folder.join("demo.gguf");
    let (folder, model) = (folder.display(), model.display());
    let worker = |name: &str, size: &str, autostart: bool| {
        format!(
            "  - {{name: {name}, role: other, class: audio-realtime, argv: [\"${{SELF}}\", worker, ballast, {size}], autostart: {autostart}, \
             ready: {{kind: log, text: holding, timeout: 5s}}, memory: {{steady: 12MiB, peak: 16MiB}}}}\n"
        )
    };
    // The budget fits all of them and a part of the model's full plan, so that guests need a shed; workers have a
    // higher class than guests, so that none is stopped for one.
    format!(
        "\
budget: {{total: 432MiB, reserve: 256MiB, scope: session, watermarks: {{elevated: 3MiB, critical: 2MiB, last_resort: 1MiB}}, \
hysteresis: 1MiB, dwell: 100ms, sample_max: 100ms}}
shedding: {{reclaim_min: 1MiB}}
llm: {{path: {model}, name: bench, threads: 1, context: 16384, kv_floor: 128}}
workers:
{}{}{}http: {{listen: none}}
grpc: {{socket: {folder}/cotenant.sock, abstract_name: none}}
journal: {{path: {folder}/journal.ndjson}}
safe_profile: {{crashes: 0}}
state_dir: {folder}/state
runtime_dir: {folder}/run
log: {{filter: info, format: text}}
",
        worker("a", "2MiB", true),
        worker("b", "4MiB", true),
        worker("c", THIRD, false),
    )
}

/// Size of the third worker, which is repeatedly started and stopped.
const THIRD: &str = "3MiB";

const TENANT: Bytes = Bytes::from_mib(24);

/// The tenant's constant lease: its pages, and this program's own use. Unaccounted use would eventually cause a worker
/// to be stopped.
const LEASE: Bytes = Bytes::from_mib(72);

const PATIENCE: Duration = Duration::from_secs(30);

/// Target for the longest outage.
const GAP_MAX: Duration = Duration::from_millis(500);

/// SplitMix64: the same seed gives the same points.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound.max(1)
    }
}
