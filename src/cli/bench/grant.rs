//! `cotenant bench grant`: how long somebody waits for memory that the LLM holds, while the LLM talks.
//!
//! A budget without room; a tenant of the class of ASR that holds a small lease and asks for more; an engine that
//! generates without a pause and has to shed. Each round: ask, wait for the grant, use the memory for real, give it
//! back, let the engine grow again. The engine is asked while it writes an answer, in the middle of a prompt, or the one
//! and the other in turns.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use tonic::transport::Channel;

use super::{
    daemon,
    engine::{SEED, ShapeName, TypeName, written_model},
    load::Reading,
    report::{Limit, Report, at},
};
use crate::cli::{
    demo::{
        talk::{Phase, Talk},
        watch,
    },
    stage::Stage,
};
use crate::{
    probe::{ProbeRoot, meminfo::Meminfo},
    rpc::v1::{
        CreateLeaseRequest, EngineState, GetStatusRequest, GetStatusResponse, Lease, LeaseClass, RegrowRequest,
        UpdateLeaseRequest, lease_service_client::LeaseServiceClient, llm_service_client::LlmServiceClient,
        operator_service_client::OperatorServiceClient,
    },
    units::Bytes,
};

/// Settings of the benchmark.
#[derive(Clone, Debug, clap::Args)]
pub struct GrantArgs {
    /// Rounds to run.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// What is asked for in each round, in MiB.
    #[arg(long, default_value_t = 64)]
    pub mib: u64,
    /// Shape of the model to generate with; others than the demo model are written, with random weights, into the
    /// folder for temporary files (`TMPDIR`).
    #[arg(long, value_enum, default_value_t = ShapeName::Demo)]
    pub shape: ShapeName,
    /// Types of its matrices.
    #[arg(long = "type", value_enum, default_value_t = TypeName::Q8_0)]
    pub types: TypeName,
    /// KV tokens that it is to hold; 65536 of the demo model are 128 MiB.
    #[arg(long, default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(1024..))]
    pub context: u32,
    /// What the LLM does when it is asked.
    #[arg(long = "while", value_enum, default_value_t = While::Answer)]
    pub doing: While,
    /// Letters of the prompts that it is asked in: a token each, with the vocabulary of the demo model, or a few.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(100..=20_000))]
    pub letters: u32,
    /// A model to generate with instead.
    #[arg(long, value_name = "GGUF", conflicts_with_all = ["shape", "types"])]
    pub model: Option<PathBuf>,
}

/// What the LLM does when memory is asked of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum While {
    /// It writes an answer.
    Answer,
    /// It reads a prompt of which nothing is kept.
    Prompt,
    /// The one and the other in turns.
    Both,
}

impl While {
    /// What it does in this round, where that is waited for.
    const fn phase(self, round: u32) -> Option<Phase> {
        match self {
            Self::Answer => None,
            Self::Prompt => Some(Phase::Prompt),
            Self::Both if round.is_multiple_of(2) => Some(Phase::Answer),
            Self::Both => Some(Phase::Prompt),
        }
    }
}

/// Tokens of an answer where prompts are waited for (our choice: enough to be asked in one).
const SHORT: u32 = 24;

/// What ASR holds when it asks for more.
const ASR_SMALL: Bytes = Bytes::from_mib(32);

/// Room that is left in the budget, so that it is not exactly full.
const SLACK: Bytes = Bytes::from_mib(8);

/// What the daemon itself and this program use beside the budget.
const RESERVE: Bytes = Bytes::from_gib(1);

/// The longest that one step may take; the first one may be to read some GiB of a model.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long a grant may take that needs a shed, at the 99th percentile.
const GRANT_P99_MAX: Duration = Duration::from_millis(300);

/// Runs the benchmark and prints its figures.
///
/// # Errors
///
/// When the daemon does not come up, or a grant fails.
pub(super) async fn run(args: &GrantArgs) -> Result<Report, String> {
    let mut args = args.clone();
    let _folder = if args.model.is_none() && args.shape != ShapeName::Demo {
        let (path, folder) = written_model(args.shape, args.types, SEED)?;
        args.model = Some(path);
        Some(folder)
    } else {
        None
    };
    let args = &args;
    let began = Instant::now();
    let more = Bytes::from_mib(args.mib);
    // The engine's own size decides the budget, so it is asked first, with all the room it wants.
    let machine = Meminfo::read(&ProbeRoot::default()).map_err(|error| error.to_string())?;
    let room = machine.total.saturating_sub(RESERVE);
    let roomy = Stage::set(|folder| configuration(folder, args, room)).map_err(|error| error.to_string())?;
    let mut operator = OperatorServiceClient::new(daemon::connected(&roomy, PATIENCE).await?);
    let full = daemon::until(&mut operator, PATIENCE, |status| engine_is(status, EngineState::Ready))
        .await
        .map_err(daemon::last_words(&roomy))?;
    let engine = Bytes::new(full.engine.map_or(0, |engine| engine.full_plan_bytes));
    drop(roomy);

    let total = engine + ASR_SMALL + SLACK;
    let mut stage = Stage::set(|folder| configuration(folder, args, total)).map_err(|error| error.to_string())?;
    let channel = daemon::connected(&stage, PATIENCE).await?;
    let mut operator = OperatorServiceClient::new(channel.clone());
    let mut leases = LeaseServiceClient::new(channel.clone());
    daemon::until(&mut operator, PATIENCE, whole)
        .await
        .map_err(daemon::last_words(&stage))?;
    let lease = leases
        .create_lease(CreateLeaseRequest {
            request_id: "bench".to_owned(),
            tenant: "asr".to_owned(),
            lease_class: LeaseClass::AudioRealtime.into(),
            min_bytes: ASR_SMALL.get(),
            max_bytes: ASR_SMALL.get(),
            term: Some(prost_types::Duration {
                seconds: i64::try_from(PATIENCE.as_secs() * 2).unwrap_or(240),
                nanos: 0,
            }),
            max_wait: None,
            ..CreateLeaseRequest::default()
        })
        .await
        .map_err(|status| format!("cannot create the lease: {}", status.message()))?
        .into_inner()
        .lease
        .ok_or("the answer holds no lease")?;
    let daemon = stage.daemon().pid();
    let setting = format!(
        "{} rounds; engine {engine}, budget {total}, ASR holds {ASR_SMALL} and asks for {more} more",
        args.rounds
    );
    let reading = Reading::now();
    let llm = LlmServiceClient::new(channel.clone());
    let talk = match args.doing {
        While::Answer => Talk::start(llm, "tell me a story", began),
        While::Prompt | While::Both => Talk::start_with(llm, prompts(args.letters), SHORT, began),
    };
    if !talk.stories(1, PATIENCE).await {
        return Err(format!("the LLM does not talk: {:?}", talk.outcome().failures));
    }
    let (mut waits, mut in_prompts) = (Vec::new(), Vec::new());
    let (mut fell, mut within) = (Vec::new(), 0);
    let mut lease = lease;
    for round in 1..=args.rounds {
        daemon::until(&mut operator, PATIENCE, whole)
            .await
            .map_err(daemon::last_words(&stage))?;
        let before = watch::pss(daemon).unwrap_or_default();
        if let Some(phase) = args.doing.phase(round) {
            reach(&talk, phase, round)
                .await
                .map_err(|problem| format!("round {round}: {problem}"))?;
        }
        let doing = talk.phase();
        let asked = Instant::now();
        lease = resize(&mut leases, &lease, ASR_SMALL + more)
            .await
            .map_err(|problem| format!("round {round}: {problem}"))?;
        within += u32::from(doing == talk.phase());
        match args.doing.phase(round) {
            Some(Phase::Prompt) => in_prompts.push(asked.elapsed()),
            _ => waits.push(asked.elapsed()),
        }
        fell.push(before.saturating_sub(watch::pss(daemon).unwrap_or_default()));
        let used = vec![1u8; more.as_len()]; // real pages, as the decoder would use them
        std::hint::black_box(&used);
        drop(used);
        lease = resize(&mut leases, &lease, ASR_SMALL)
            .await
            .map_err(|problem| format!("round {round}: {problem}"))?;
        operator
            .regrow(RegrowRequest {})
            .await
            .map_err(|status| format!("round {round}: cannot regrow: {}", status.message()))?;
    }
    let outcome = talk.stop().await;
    let status = operator
        .get_status(GetStatusRequest {})
        .await
        .map_err(|status| status.message().to_owned())?;
    fell.sort_unstable();
    let engine = status.into_inner().engine.unwrap_or_default();
    let mut report = Report::new("grant", setting);
    for (what, waits) in [("in an answer", waits), ("in a prompt", in_prompts)] {
        if !waits.is_empty() {
            report.times(
                &format!("asked {what} to granted, verified shed included"),
                waits,
                Some(GRANT_P99_MAX),
            );
        }
    }
    if args.doing != While::Answer {
        report.figure("granted in the same prompt or answer", "", f64::from(within), None);
    }
    let mib = |bytes: Option<&Bytes>| bytes.map_or(0.0, |bytes| to_mib(bytes.get()));
    report.figure(
        "daemon's PSS fell at the grant: median",
        "MiB",
        mib(at(&fell, 500)),
        None,
    );
    report.figure("daemon's PSS fell at the grant: least", "MiB", mib(fell.first()), None);
    report.figure("verified back in all", "MiB", to_mib(engine.shed_bytes), None);
    report.figure("grown back in all", "MiB", to_mib(engine.regrown_bytes), None);
    let number = |number: u64| f64::from(u32::try_from(number).unwrap_or(u32::MAX));
    let count = |count: usize| f64::from(u32::try_from(count).unwrap_or(u32::MAX));
    report.figure("answers meanwhile", "", number(outcome.stories), None);
    report.figure(
        "answers different",
        "",
        number(outcome.different),
        Some(Limit::AtMost(0.0)),
    );
    report.figure(
        "answers aborted",
        "",
        count(outcome.failures.len()),
        Some(Limit::AtMost(0.0)),
    );
    report.others(&reading);
    if outcome.different > 0 || !outcome.failures.is_empty() {
        report.note(format!("answers were disturbed: {:?}", outcome.failures));
    }
    Ok(report)
}

/// Waits until the LLM does this, and has done it for a part of the time that it takes, another one in each round.
async fn reach(talk: &Talk, phase: Phase, round: u32) -> Result<(), String> {
    let end = Instant::now() + PATIENCE;
    // One that is under way may end at any moment: what counts is the next.
    let under_way = talk.phase();
    let (mut into, mut missed) = (INTO * (round * 37 % 100) / 100, None);
    while Instant::now() < end {
        let now = talk.phase();
        if let Some((doing, since)) = now
            && doing == phase
            && now != under_way
        {
            if since.elapsed() >= into {
                return Ok(());
            }
            if missed.is_some_and(|missed| missed != since) {
                // It was shorter than that.
                into = Duration::ZERO;
            }
            missed = Some(since);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Err(format!(
        "the LLM was not seen in the middle of this within {PATIENCE:?}: {phase:?}"
    ))
}

/// How far into a prompt or an answer memory is asked for at most. Our choice: less than either takes with a model of some GiB.
const INTO: Duration = Duration::from_millis(400);

/// Two prompts that begin with other words, so that nothing of the one is of use for the other.
fn prompts(letters: u32) -> Vec<String> {
    let letters = usize::try_from(letters).unwrap_or(usize::MAX);
    [
        "turn on the kitchen light and tell me a story ",
        "what is the weather like and who has called ",
    ]
    .iter()
    .map(|words| words.chars().cycle().take(letters).collect())
    .collect()
}

#[expect(clippy::cast_precision_loss, reason = "some GiB")]
fn to_mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1u32 << 20)
}

fn engine_is(status: &GetStatusResponse, state: EngineState) -> bool {
    status.engine.as_ref().is_some_and(|engine| engine.state() == state)
}

fn whole(status: &GetStatusResponse) -> bool {
    engine_is(status, EngineState::Ready)
        && status.engine.as_ref().is_some_and(|engine| {
            !engine.changing
                && engine.layers_resident == engine.layers_total
                && engine.kv_capacity_tokens == engine.kv_capacity_full_tokens
        })
}

async fn resize(leases: &mut LeaseServiceClient<Channel>, lease: &Lease, bytes: Bytes) -> Result<Lease, String> {
    leases
        .update_lease(UpdateLeaseRequest {
            name: lease.name.clone(),
            boot_id: lease.boot_id.clone(),
            generation: lease.generation,
            min_bytes: bytes.get(),
            max_bytes: bytes.get(),
            max_wait: Some(prost_types::Duration { seconds: 5, nanos: 0 }),
        })
        .await
        .map_err(|status| format!("cannot change the lease to {bytes}: {}", status.message()))?
        .into_inner()
        .lease
        .ok_or_else(|| "the answer holds no lease".to_owned())
}

fn configuration(folder: &std::path::Path, args: &GrantArgs, total: Bytes) -> String {
    let model = args.model.clone().unwrap_or_else(|| folder.join("demo.gguf"));
    let (folder, model) = (folder.display(), model.display());
    // What the daemon itself uses is the reserve here; the watermarks are low, since the budget is meant to be full.
    format!(
        "\
budget:
  total: {}KiB
  reserve: {}MiB
  watermarks: {{elevated: 3MiB, critical: 2MiB, last_resort: 1MiB}}
  hysteresis: 1MiB
  scope: session
  dwell: 100ms
  sample_max: 100ms
shedding: {{reclaim_min: 1MiB}}
llm:
  path: {model}
  name: bench
  context: {}
  kv_floor: 512
http: {{listen: none}}
grpc: {{socket: {folder}/cotenant.sock, abstract_name: none}}
journal: {{path: {folder}/journal.ndjson}}
state_dir: {folder}/state
runtime_dir: {folder}
log: {{filter: info, format: text}}
",
        (total + RESERVE).get() / 1024,
        RESERVE.whole_mib(),
        args.context,
    )
}
