//! `developer grants` and `renewals`: many leases on a daemon without a model.
//!
//! All leases belong to one tenant, this program, which is measured once; the first lease covers its own use.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Streaming, transport::Channel};

use cotenant::cli::bench::{
    daemon,
    load::Reading,
    report::{Limit, Report},
};
use cotenant::{
    cli::stage::Stage,
    rpc::v1::{
        CreateLeaseRequest, HoldLeaseRequest, HoldLeaseResponse, Lease, LeaseClass,
        ReleaseLeaseRequest, RenewLeaseRequest, hold_lease_response::Message,
        lease_service_client::LeaseServiceClient,
    },
    units::Bytes,
};

/// Settings of `developer grants`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct GrantsArgs {
    /// Leases to create and give back, one after the other.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Threads of this program beside its main one, which then hand requests and answers to each other; with none, it
    /// is the client that most are: one thread that waits for its answer.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=16))]
    pub client_threads: u32,
}

/// Settings of `developer renewals`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RenewalsArgs {
    /// Leases, each with a connection of its own.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub leases: u32,
    /// Seconds to renew for.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub seconds: u64,
    /// Renew by a call each instead of on the streams of the leases.
    #[arg(long)]
    pub calls: bool,
}

/// Limit of the 99th percentile of a grant while memory is free.
const GRANT_P99_MAX: Duration = Duration::from_millis(1);

/// Minimum renewals per second and core.
const RENEWALS_MIN: f64 = 20_000.0;

/// Lease for this program's own use.
const OWN_USE: Bytes = Bytes::from_mib(256);

const PATIENCE: Duration = Duration::from_secs(20);

/// Renewals sent by a stream before it waits for the first reply: roughly one client's concurrency.
const UNDER_WAY: usize = 4;

/// `developer grants`.
pub(super) async fn grants(args: &GrantsArgs) -> Result<Report, String> {
    let (stage, mut client) = open(Bytes::from_gib(2)).await?;
    create(&mut client, request("own", OWN_USE)).await?;
    let reading = Reading::now();
    let mut times = Vec::new();
    for round in 0..args.rounds {
        let request = request(&format!("grant {round}"), Bytes::from_mib(1));
        let asked = Instant::now();
        let lease = create(&mut client, request).await?;
        times.push(asked.elapsed());
        release(&mut client, &lease).await?;
    }
    let mut report = Report::new(
        "grants",
        format!(
            "{} leases of 1 MiB over the socket, each given back; {} more threads in the client",
            args.rounds, args.client_threads
        ),
    );
    report.times("asked to granted, memory free", times, Some(GRANT_P99_MAX));
    report.others(&reading);
    drop(stage);
    Ok(report)
}

/// `developer renewals`.
pub(super) async fn renewals(args: &RenewalsArgs) -> Result<Report, String> {
    let (mut stage, mut first) = open(Bytes::from_gib(2)).await?;
    let daemon = stage.daemon().pid();
    keep_to_one_core(daemon)?;
    create(&mut first, request("own", OWN_USE)).await?;
    let mut tenants = Vec::new();
    for number in 0..args.leases {
        let mut client = LeaseServiceClient::new(daemon::connected(&stage, PATIENCE).await?);
        let lease = create(
            &mut client,
            request(&format!("lease {number}"), Bytes::from_mib(1)),
        )
        .await?;
        tenants.push((client, lease));
    }
    let reading = Reading::now();
    let (cpu, began) = (cpu_seconds(daemon)?, Instant::now());
    let end = began + Duration::from_secs(args.seconds);
    let calls = args.calls;
    let tasks = tenants.into_iter().map(|(client, lease)| async move {
        if calls {
            renew_by_calls(client, lease, end).await
        } else {
            renew_on_stream(client, lease, end).await
        }
    });
    let counts = futures_util::future::join_all(tasks.map(tokio::spawn)).await;
    let (took, cpu) = (began.elapsed().as_secs_f64(), cpu_seconds(daemon)? - cpu);
    let mut renewals = 0u32;
    for count in counts {
        renewals += count.map_err(|error| error.to_string())??;
    }
    let way = if args.calls {
        "a call each"
    } else {
        "their streams"
    };
    let setting = format!(
        "{} leases with a connection each are renewed by {way}; the daemon on one core",
        args.leases
    );
    let mut report = Report::new("renewals", setting);
    let renewals = f64::from(renewals);
    report.figure(
        "renewals in a second of the daemon's core",
        "per s",
        renewals / cpu.max(f64::EPSILON),
        Some(Limit::AtLeast(RENEWALS_MIN)),
    );
    report.figure(
        "renewals in a second by the clock",
        "per s",
        renewals / took,
        None,
    );
    report.figure("core used by the daemon", "%", 100.0 * cpu / took, None);
    report.others(&reading);
    report.note("the clients of this program share the machine with the daemon");
    Ok(report)
}

async fn renew_by_calls(
    mut client: LeaseServiceClient<Channel>,
    lease: Lease,
    end: Instant,
) -> Result<u32, String> {
    let mut count = 0;
    while Instant::now() < end {
        let renew = RenewLeaseRequest {
            name: lease.name.clone(),
            boot_id: lease.boot_id.clone(),
            generation: lease.generation,
        };
        client
            .renew_lease(renew)
            .await
            .map_err(reported("cannot renew"))?;
        count += 1;
    }
    Ok(count)
}

async fn renew_on_stream(
    mut client: LeaseServiceClient<Channel>,
    lease: Lease,
    end: Instant,
) -> Result<u32, String> {
    let (say, mut hear) = hold(&mut client, UNDER_WAY).await?;
    let message = daemon::message_of(&lease);
    let mut count = 0;
    for _ in 0..UNDER_WAY {
        say.send(message.clone())
            .await
            .map_err(|error| error.to_string())?;
    }
    while Instant::now() < end {
        match hear.message().await.map_err(reported("the stream broke"))? {
            Some(HoldLeaseResponse {
                message: Some(Message::Renewed(_)),
            }) => count += 1,
            other => return Err(format!("{} was sent {other:?}", lease.name)),
        }
        say.send(message.clone())
            .await
            .map_err(|error| error.to_string())?;
    }
    Ok(count)
}

/// Starts a daemon without a model, with space for the tenants simulated by this program.
async fn open(budget: Bytes) -> Result<(Stage, LeaseServiceClient<Channel>), String> {
    let stage =
        Stage::set(|folder| configuration(folder, budget)).map_err(|error| error.to_string())?;
    let channel = daemon::connected(&stage, PATIENCE).await?;
    Ok((stage, LeaseServiceClient::new(channel)))
}

fn request(id: &str, size: Bytes) -> CreateLeaseRequest {
    CreateLeaseRequest {
        request_id: id.to_owned(),
        tenant: "bench".to_owned(),
        lease_class: LeaseClass::Interactive.into(),
        min_bytes: size.get(),
        term: Some(prost_types::Duration {
            seconds: 60,
            nanos: 0,
        }),
        ..CreateLeaseRequest::default()
    }
}

async fn create(
    client: &mut LeaseServiceClient<Channel>,
    request: CreateLeaseRequest,
) -> Result<Lease, String> {
    let created = client
        .create_lease(request)
        .await
        .map_err(reported("cannot create a lease"))?;
    created
        .into_inner()
        .lease
        .ok_or_else(|| "the answer holds no lease".to_owned())
}

async fn release(client: &mut LeaseServiceClient<Channel>, lease: &Lease) -> Result<(), String> {
    let release = ReleaseLeaseRequest {
        name: lease.name.clone(),
        boot_id: lease.boot_id.clone(),
        generation: lease.generation,
    };
    client
        .release_lease(release)
        .await
        .map_err(reported("cannot give a lease back"))?;
    Ok(())
}

async fn hold(
    client: &mut LeaseServiceClient<Channel>,
    room: usize,
) -> Result<(mpsc::Sender<HoldLeaseRequest>, Streaming<HoldLeaseResponse>), String> {
    let (say, said) = mpsc::channel(room);
    let hear = client.hold_lease(ReceiverStream::new(said)).await;
    Ok((
        say,
        hear.map_err(reported("cannot hold a lease"))?.into_inner(),
    ))
}

fn reported(act: &'static str) -> impl Fn(tonic::Status) -> String {
    move |status| format!("{act}: {}", status.message())
}

/// Pins a process and all its threads to one processor, the last available one.
fn keep_to_one_core(pid: u32) -> Result<(), String> {
    let failed = |what: &str| format!("cannot keep the daemon to one core: {what}");
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"))
        .map_err(|error| failed(&error.to_string()))?;
    for task in tasks.flatten() {
        let tid = task
            .file_name()
            .to_string_lossy()
            .parse()
            .map_err(|_| failed("its threads"))?;
        let tid = nix::unistd::Pid::from_raw(tid);
        let allowed =
            nix::sched::sched_getaffinity(tid).map_err(|error| failed(&error.to_string()))?;
        let last = (0..nix::sched::CpuSet::count())
            .rev()
            .find(|core| allowed.is_set(*core).unwrap_or(false));
        let mut one = nix::sched::CpuSet::new();
        one.set(last.ok_or_else(|| failed("it may use none"))?)
            .map_err(|error| failed(&error.to_string()))?;
        nix::sched::sched_setaffinity(tid, &one).map_err(|error| failed(&error.to_string()))?;
    }
    Ok(())
}

/// Returns the processor time of a process so far: fields 14 and 15 of `/proc/[pid]/stat` (proc(5)).
fn cpu_seconds(pid: u32) -> Result<f64, String> {
    let stat =
        std::fs::read_to_string(format!("/proc/{pid}/stat")).map_err(|error| error.to_string())?;
    let fields = stat
        .rsplit_once(')')
        .map(|(_, fields)| fields.split_ascii_whitespace());
    let mut times = fields.into_iter().flatten().skip(11).map(str::parse::<f64>);
    match (times.next(), times.next()) {
        (Some(Ok(user)), Some(Ok(system))) => {
            Ok((user + system) / cotenant::cli::bench::load::TICKS)
        }
        _ => Err(format!("cannot read the processor time of {pid}")),
    }
}

fn configuration(folder: &Path, budget: Bytes) -> String {
    let folder = folder.display();
    // The reserve covers the daemon's own use; watermarks are low, since the budget may be full.
    format!(
        "\
budget:
  total: {}KiB
  reserve: 1GiB
  watermarks: {{elevated: 3MiB, critical: 2MiB, last_resort: 1MiB}}
  hysteresis: 1MiB
  scope: session
  sample_max: 1s
shedding: {{reclaim_min: 1MiB}}
leases: {{per_user_max: 1000, queue_max: 1000}}
http: {{listen: none}}
grpc:
  socket: {folder}/cotenant.sock
  abstract_name: none
  limits:
    connections: {{per_process: 2000, per_user: 2000, total: 2000}}
    streams: {{per_process: 2000, per_user: 2000, total: 2000}}
journal: {{path: {folder}/journal.ndjson}}
state_dir: {folder}/state
runtime_dir: {folder}
log: {{filter: warn, format: text}}
",
        (budget + Bytes::from_gib(1)).get() / 1024,
    )
}
