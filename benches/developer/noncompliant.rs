//! `developer noncompliant`: tenants that falsely acknowledge a target.
//!
//! Each non-compliant holder is a separate process: it holds a lease, fills it with real pages, and replies APPLIED to
//! its target at once without releasing anything. It measures the delay from the deadline to the notification that its
//! lease has ended for that reason. The requesting tenant must not be granted the memory before that process has ended.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    sync::mpsc,
    task::JoinHandle,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use cotenant::cli::bench::{
    daemon,
    load::Reading,
    report::{Limit, Report},
};
use cotenant::{
    cli::{demo::watch, stage::Stage},
    rpc::v1::{
        CreateLeaseRequest, HoldLeaseRequest, LeaseClass, ListLeasesRequest, ReleaseLeaseRequest,
        TargetState, hold_lease_response::Message, lease_service_client::LeaseServiceClient,
    },
    units::Bytes,
};

/// Settings of `developer noncompliant`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct NoncompliantArgs {
    /// Holders, one after the other.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
}

/// Settings of one holder.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct HolderArgs {
    /// Socket of the supervisor.
    pub socket: PathBuf,
    /// Name of the tenant.
    pub tenant: String,
}

/// Limit on the delay of the detection after the deadline.
const FOUND_MAX: Duration = Duration::from_millis(250);

const BUDGET: Bytes = Bytes::from_mib(256);

/// Lease of a non-compliant holder.
const HELD: Bytes = Bytes::from_mib(128);

/// Memory filled by a non-compliant holder.
const FILLED: Bytes = Bytes::from_mib(96);

/// Request of a more urgent tenant: more than is free with the non-compliant holder, less than without it.
const ASKED: Bytes = Bytes::from_mib(180);

/// Time after the detection at which the memory must still not be granted.
const LOOK_AFTER: Duration = Duration::from_millis(200);

const PATIENCE: Duration = Duration::from_secs(20);

pub(super) async fn run(args: &NoncompliantArgs) -> Result<Report, String> {
    let stage = Stage::set(configuration).map_err(|error| error.to_string())?;
    let channel = daemon::connected(&stage, PATIENCE).await?;
    let mut client = LeaseServiceClient::new(channel);
    let reading = Reading::now();
    let (mut late, mut credited, mut granted) = (Vec::new(), 0u32, 0u32);
    for round in 0..args.rounds {
        let problem =
            |problem: String| daemon::last_words(&stage)(format!("round {round}: {problem}"));
        let mut holder =
            Holder::start(&stage.socket(), &format!("holder{round}")).map_err(problem)?;
        holder.until("holds").await.map_err(problem)?;
        let mut asker = ask(&client, round);
        let found = holder.until("found ").await.map_err(problem)?;
        let micros = found
            .parse()
            .map_err(|_| problem(format!("`{found}` is no time")))?;
        late.push(Duration::from_micros(micros));
        let early = tokio::time::timeout(LOOK_AFTER, &mut asker).await.is_ok();
        credited += u32::from(early);
        holder.end().await;
        // It may be granted before this process observes the end of the holder.
        if !early {
            let outcome = tokio::time::timeout(PATIENCE, &mut asker).await;
            let outcome =
                outcome.map_err(|_| problem("what came back was not granted".to_owned()))?;
            outcome
                .map_err(|error| problem(error.to_string()))?
                .map_err(problem)?;
            granted += 1;
        }
        until_empty(&mut client).await.map_err(problem)?;
    }
    let mut report = Report::new(
        "noncompliant",
        format!(
            "{} tenants, one after the other, hold {HELD}, use more than {FILLED}, and say to a target below that they \
             have come down",
            args.rounds
        ),
    );
    report.times("found out after the deadline", late, Some(FOUND_MAX));
    let number = |number: u32| f64::from(number);
    let none = Some(Limit::AtMost(0.0));
    report.figure(
        "grants out of what was not freed",
        "",
        number(credited),
        none,
    );
    let all = Some(Limit::AtLeast(number(args.rounds)));
    report.figure(
        "grants once the non-compliant holder was gone",
        "",
        number(granted),
        all,
    );
    report.others(&reading);
    Ok(report)
}

/// Process of a non-compliant holder, ended on drop.
struct Holder {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Holder {
    fn start(socket: &Path, tenant: &str) -> Result<Self, String> {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut child = Command::new(program)
            .args(["noncompliant-holder"])
            .arg(socket)
            .arg(tenant)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| format!("cannot start a non-compliant holder: {error}"))?;
        let stdout = child
            .stdout
            .take()
            .ok_or("a non-compliant holder has no output")?;
        let lines = BufReader::new(stdout).lines();
        Ok(Self { child, lines })
    }

    /// Waits for a line with this prefix; returns the rest of it.
    async fn until(&mut self, beginning: &str) -> Result<String, String> {
        let line = tokio::time::timeout(PATIENCE, self.lines.next_line()).await;
        let line = line.map_err(|_| {
            format!("no `{beginning}` of the non-compliant holder within {PATIENCE:?}")
        })?;
        let line = line.map_err(|error| error.to_string())?;
        let line =
            line.ok_or_else(|| format!("the non-compliant holder ended before `{beginning}`"))?;
        match line.strip_prefix(beginning) {
            Some(rest) => Ok(rest.to_owned()),
            None => Err(format!("the non-compliant holder says `{line}`")),
        }
    }

    async fn end(mut self) {
        let _ = self.child.kill().await;
    }
}

/// Requests more than is free, as a more urgent tenant.
fn ask(client: &LeaseServiceClient<Channel>, round: u32) -> JoinHandle<Result<(), String>> {
    let mut client = client.clone();
    let request = CreateLeaseRequest {
        request_id: format!("asker {round}"),
        tenant: "asker".to_owned(),
        lease_class: LeaseClass::AudioRealtime.into(),
        min_bytes: ASKED.get(),
        max_wait: Some(prost_types::Duration {
            seconds: 30,
            nanos: 0,
        }),
        ..CreateLeaseRequest::default()
    };
    tokio::spawn(async move {
        let created = client.create_lease(request).await;
        created
            .map(drop)
            .map_err(|status| status.message().to_owned())
    })
}

/// Releases this program's leases, and waits until the ledger is empty.
async fn until_empty(client: &mut LeaseServiceClient<Channel>) -> Result<(), String> {
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        let list = client.list_leases(ListLeasesRequest::default()).await;
        let leases = list
            .map_err(|status| status.message().to_owned())?
            .into_inner()
            .leases;
        if leases.iter().all(|lease| lease.held_bytes == 0) {
            return Ok(());
        }
        for lease in leases.iter().filter(|lease| lease.tenant == "asker") {
            // A lease that is already ending refuses.
            let _ = client
                .release_lease(ReleaseLeaseRequest {
                    name: lease.name.clone(),
                    boot_id: lease.boot_id.clone(),
                    generation: lease.generation,
                })
                .await;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Err("leases stay on the book".to_owned())
}

/// `developer non-compliant holder`: runs one of them.
pub(super) async fn hold(args: &HolderArgs) -> Result<(), String> {
    let reported = |status: tonic::Status| status.message().to_owned();
    let channel = watch::connect(&args.socket, PATIENCE).await?;
    let mut client = LeaseServiceClient::new(channel);
    let request = CreateLeaseRequest {
        request_id: args.tenant.clone(),
        tenant: args.tenant.clone(),
        lease_class: LeaseClass::Interactive.into(),
        min_bytes: Bytes::from_mib(8).get(),
        max_bytes: HELD.get(),
        term: Some(prost_types::Duration {
            seconds: 60,
            nanos: 0,
        }),
        ..CreateLeaseRequest::default()
    };
    let created = client
        .create_lease(request)
        .await
        .map_err(reported)?
        .into_inner();
    let lease = created.lease.ok_or("the answer holds no lease")?;
    let memory = vec![1u8; FILLED.as_len()];
    std::hint::black_box(&memory);
    let (say, said) = mpsc::channel(4);
    let hear = client.hold_lease(ReceiverStream::new(said));
    say.send(daemon::message_of(&lease))
        .await
        .map_err(|error| error.to_string())?;
    let mut hear = hear.await.map_err(reported)?.into_inner();
    line("holds");
    let mut deadline = None;
    loop {
        match hear
            .message()
            .await
            .map_err(reported)?
            .and_then(|response| response.message)
        {
            Some(Message::Target(target)) => {
                let left = target
                    .deadline_in
                    .and_then(|left| Duration::try_from(left).ok());
                deadline = Some(Instant::now() + left.unwrap_or_default());
                let lie = HoldLeaseRequest {
                    nonce: target.nonce,
                    target_bytes: target.target_bytes,
                    state: TargetState::Applied.into(),
                    used_bytes: Some(target.target_bytes),
                    ..daemon::message_of(&lease)
                };
                say.send(lie).await.map_err(|error| error.to_string())?;
            }
            Some(Message::Ended(ended)) => {
                let deadline = deadline.ok_or("ended before it was asked")?;
                if !ended
                    .reason
                    .contains("it answered `applied` and still uses")
                {
                    return Err(format!("ended for another reason: {}", ended.reason));
                }
                line(&format!("found {}", deadline.elapsed().as_micros()));
                break;
            }
            Some(_) => {}
            None => return Err("the stream ended without a word".to_owned()),
        }
    }
    // It keeps its memory until killed.
    std::future::pending::<()>().await;
    drop(memory);
    Ok(())
}

fn line(text: &str) {
    use std::io::Write as _;
    let mut stdout = std::io::stdout().lock();
    let _ = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
}

fn configuration(folder: &Path) -> String {
    let folder = folder.display();
    // The reserve covers the daemon and this program; the watermarks are low, since the budget may be full.
    format!(
        "\
budget:
  total: {}MiB
  reserve: 256MiB
  watermarks: {{elevated: 3MiB, critical: 2MiB, last_resort: 1MiB}}
  hysteresis: 1MiB
  scope: session
shedding: {{reclaim_min: 1MiB}}
http: {{listen: none}}
grpc: {{socket: {folder}/cotenant.sock, abstract_name: none}}
journal: {{path: {folder}/journal.ndjson}}
state_dir: {folder}/state
runtime_dir: {folder}
log: {{filter: info, format: text}}
",
        256 + BUDGET.whole_mib(),
    )
}
