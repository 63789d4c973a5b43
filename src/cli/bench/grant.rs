//! `cotenant bench grant`: time to a grant while the LLM generates.
//!
//! The budget is full; a tenant with the class of ASR holds a small lease and requests more; the engine generates
//! continuously and has to shed. Each round requests, waits for the grant, uses the memory, releases it, and lets the
//! engine regrow. The request comes during an answer, a prompt, or either alternately.
//!
//! The engine's plan is fully resident (`llm.kv_memory: at-once`), so that the kernel's figures show each shed. A shed
//! of untouched KV frees no page and is faster; it is measured afterwards and reported separately.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use tonic::{Code, transport::Channel};

use super::{
    daemon,
    engine::mib,
    load::Reading,
    report::{Limit, Report, at, milliseconds},
};
use crate::{
    demo::{
        self,
        talk::{Outcome, Phase, Talk},
        watch,
    },
    stage::{Stage, places},
};
use cotenant_probe::{ProbeRoot, meminfo::Meminfo};
use cotenant_rpc::v1::{
    CreateLeaseRequest, EngineState, GetStatusRequest, GetStatusResponse, Lease, LeaseClass,
    RegrowRequest, UpdateLeaseRequest, lease_service_client::LeaseServiceClient,
    llm_service_client::LlmServiceClient, operator_service_client::OperatorServiceClient,
};
use cotenant_units::Bytes;

/// Settings of the benchmark.
#[derive(Clone, Debug, clap::Args)]
pub struct GrantArgs {
    /// Number of rounds.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Memory requested in each round, in MiB.
    #[arg(long, default_value_t = 64)]
    pub mib: u64,
    /// KV capacity of the LLM in tokens; 65536 take 128 MiB with the demo model.
    #[arg(long, default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(1024..))]
    pub context: u32,
    /// Activity of the LLM during the request.
    #[arg(long = "while", value_enum, default_value_t = While::Answer)]
    pub doing: While,
    /// Length of the prompts in letters, about one token each with the demo model.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(100..=20_000))]
    pub letters: u32,
    /// GGUF model [default: the demo model].
    #[arg(long, value_name = "GGUF")]
    pub model: Option<PathBuf>,
}

/// Activity of the LLM when memory is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum While {
    /// It generates an answer.
    Answer,
    /// It prefills a prompt without a cached prefix.
    Prompt,
    /// Alternates between the two.
    Both,
}

impl While {
    /// Returns the phase of the engine to wait for in this round, if any.
    const fn phase(self, round: u32) -> Option<Phase> {
        match self {
            Self::Answer => None,
            Self::Prompt => Some(Phase::Prompt),
            Self::Both if round.is_multiple_of(2) => Some(Phase::Answer),
            Self::Both => Some(Phase::Prompt),
        }
    }
}

/// Tokens of an answer when waiting for prompts (our choice: enough for a request during one).
const SHORT: u32 = 24;

/// Lease of ASR before it requests more.
const ASR_SMALL: Bytes = Bytes::from_mib(32);

/// Memory left in the budget, so that it is not exactly full.
const SLACK: Bytes = Bytes::from_mib(8);

/// Memory of the daemon itself and of this program, outside the budget.
const RESERVE: Bytes = Bytes::from_gib(1);

/// Time limit of one step; the first one may read several GiB of a model.
const PATIENCE: Duration = Duration::from_secs(120);

/// Limit of the 99th percentile for a grant that needs a shed.
const GRANT_P99_MAX: Duration = Duration::from_millis(300);

/// Share of the requested memory by which the kernel's figure for the daemon must fall at a grant. Our choice: the
/// running answer touches some pages meanwhile.
const FELL_LEAST: f64 = 0.8;

/// Whether the shed KV capacity was resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kv {
    InUse,
    Untouched,
}

/// Results of the rounds of one daemon.
#[derive(Default)]
struct Rounds {
    in_answers: Vec<Duration>,
    in_prompts: Vec<Duration>,
    /// Decreases of the daemon's proportional set size at each grant, ascending.
    fell: Vec<Bytes>,
    /// Number of grants during the prompt or answer in which they were requested.
    within: u32,
    verified: Bytes,
    regrown: Bytes,
    outcome: Outcome,
}

/// Runs the benchmark.
///
/// # Errors
/// If the daemon does not start, or a grant fails.
pub(super) async fn run(args: &GrantArgs) -> Result<Report, String> {
    let more = Bytes::from_mib(args.mib);
    // The size of the engine determines the budget, so it is first measured with an ample one.
    let machine = Meminfo::read(&ProbeRoot::default()).map_err(|error| error.to_string())?;
    let room = machine.total.saturating_sub(RESERVE);
    let roomy = Stage::set(|folder| configuration(folder, args, room, Kv::Untouched))
        .map_err(|error| error.to_string())?;
    let mut operator = OperatorServiceClient::new(daemon::connected(&roomy, PATIENCE).await?);
    let full = daemon::until(&mut operator, PATIENCE, |status| {
        engine_is(status, EngineState::Ready)
    })
    .await
    .map_err(daemon::last_words(&roomy))?;
    let engine = Bytes::new(full.engine.map_or(0, |engine| engine.full_plan_bytes));
    drop(roomy);

    let total = engine + ASR_SMALL + SLACK;
    let reading = Reading::now();
    let mut used = measure(args, total, Kv::InUse).await?;
    let mut untouched = measure(args, total, Kv::Untouched).await?;
    let mut report = Report::new(
        "grant",
        format!(
            "{} rounds; engine {engine}, fully resident; budget {total}; ASR holds {ASR_SMALL} and requests {more} more",
            args.rounds
        ),
    );
    for (what, waits) in [
        ("in an answer", &mut used.in_answers),
        ("in a prompt", &mut used.in_prompts),
    ] {
        if !waits.is_empty() {
            report.times(
                &format!("asked {what} to granted, verified shed included"),
                std::mem::take(waits),
                Some(GRANT_P99_MAX),
            );
        }
    }
    let fell = |bytes: Option<&Bytes>| bytes.copied().map_or(0.0, mib);
    report.figure(
        "daemon's PSS fell at the grant: median",
        "MiB",
        fell(at(&used.fell, 500)),
        Some(Limit::AtLeast(mib(more) * FELL_LEAST)),
    );
    report.figure(
        "daemon's PSS fell at the grant: least",
        "MiB",
        fell(used.fell.first()),
        None,
    );
    let mut waits = std::mem::take(&mut untouched.in_answers);
    waits.append(&mut untouched.in_prompts);
    waits.sort_unstable();
    report.figure(
        format!(
            "the same for KV that no token had touched (PSS fell by {:.0} MiB): median",
            fell(at(&untouched.fell, 500))
        ),
        "ms",
        milliseconds(&waits, 500),
        None,
    );
    if args.doing != While::Answer {
        report.figure(
            "granted in the same prompt or answer",
            "",
            f64::from(used.within),
            None,
        );
    }
    report.figure("verified back in all", "MiB", mib(used.verified), None);
    report.figure("grown back in all", "MiB", mib(used.regrown), None);
    let number = |number: u64| f64::from(u32::try_from(number).unwrap_or(u32::MAX));
    let both = [&used.outcome, &untouched.outcome];
    let failures: Vec<&String> = both.iter().flat_map(|outcome| &outcome.failures).collect();
    let different: u64 = both.iter().map(|outcome| outcome.different).sum();
    let none = Some(Limit::AtMost(0.0));
    report.figure(
        "answers meanwhile",
        "",
        number(both.iter().map(|outcome| outcome.stories).sum()),
        None,
    );
    report.figure("answers different", "", number(different), none);
    report.figure(
        "answers aborted",
        "",
        number(failures.len().try_into().unwrap_or(u64::MAX)),
        none,
    );
    report.others(&reading);
    if different > 0 || !failures.is_empty() {
        report.note(format!("answers were disturbed: {failures:?}"));
    }
    Ok(report)
}

async fn measure(args: &GrantArgs, total: Bytes, kv: Kv) -> Result<Rounds, String> {
    let began = Instant::now();
    let more = Bytes::from_mib(args.mib);
    let mut stage = Stage::set(|folder| configuration(folder, args, total, kv))
        .map_err(|error| error.to_string())?;
    let channel = daemon::connected(&stage, PATIENCE).await?;
    let mut operator = OperatorServiceClient::new(channel.clone());
    let mut leases = LeaseServiceClient::new(channel.clone());
    daemon::until(&mut operator, PATIENCE, whole)
        .await
        .map_err(daemon::last_words(&stage))?;
    let mut lease = small_lease(&mut leases).await?;
    let daemon = stage.daemon().pid();
    let llm = LlmServiceClient::new(channel.clone());
    let talk = match args.doing {
        While::Answer => Talk::start(llm, "tell me a story", began),
        While::Prompt | While::Both => Talk::start_with(llm, prompts(args.letters), SHORT, began),
    };
    if !talk.stories(1, PATIENCE).await {
        return Err(format!(
            "the LLM does not answer: {:?}",
            talk.outcome().failures
        ));
    }
    let mut rounds = Rounds::default();
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
        rounds.within += u32::from(doing == talk.phase());
        match args.doing.phase(round) {
            Some(Phase::Prompt) => rounds.in_prompts.push(asked.elapsed()),
            _ => rounds.in_answers.push(asked.elapsed()),
        }
        rounds
            .fell
            .push(before.saturating_sub(watch::pss(daemon).unwrap_or_default()));
        let used = vec![1u8; more.as_len()]; // touch the pages, as a decoder would
        std::hint::black_box(&used);
        drop(used);
        lease = resize(&mut leases, &lease, ASR_SMALL)
            .await
            .map_err(|problem| format!("round {round}: {problem}"))?;
        // A regrow that is complete, or impossible, is refused: the next round waits for what it needs.
        if let Err(status) = operator.regrow(RegrowRequest {}).await
            && status.code() != Code::FailedPrecondition
        {
            return Err(format!(
                "round {round}: cannot regrow: {}",
                status.message()
            ));
        }
    }
    rounds.outcome = talk.stop().await;
    let status = operator
        .get_status(GetStatusRequest {})
        .await
        .map_err(|status| status.message().to_owned())?;
    let engine = status.into_inner().engine.unwrap_or_default();
    (rounds.verified, rounds.regrown) = (
        Bytes::new(engine.shed_bytes),
        Bytes::new(engine.regrown_bytes),
    );
    rounds.fell.sort_unstable();
    Ok(rounds)
}

/// Requests the lease that grows in each round.
async fn small_lease(leases: &mut LeaseServiceClient<Channel>) -> Result<Lease, String> {
    leases
        .create_lease(CreateLeaseRequest {
            request_id: "bench".to_owned(),
            tenant: "asr".to_owned(),
            lease_class: LeaseClass::AudioRealtime.into(),
            min_bytes: ASR_SMALL.get(),
            max_bytes: ASR_SMALL.get(),
            term: (PATIENCE * 2).try_into().ok(),
            max_wait: None,
            ..CreateLeaseRequest::default()
        })
        .await
        .map_err(|status| format!("cannot create the lease: {}", status.message()))?
        .into_inner()
        .lease
        .ok_or_else(|| "the answer holds no lease".to_owned())
}

/// Waits until the LLM has been in this phase for a part of its duration, which varies by round.
async fn reach(talk: &Talk, phase: Phase, round: u32) -> Result<(), String> {
    let end = Instant::now() + PATIENCE;
    // A phase in progress may end at any moment: wait for the next one.
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
        "the LLM did not reach phase {phase:?} within {PATIENCE:?}"
    ))
}

/// Latest point within a prompt or an answer at which memory is requested. Our choice: less than the duration of either
/// with a model of several GiB.
const INTO: Duration = Duration::from_millis(400);

/// Returns two prompts with different beginnings, so that no prefix can be reused.
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

fn engine_is(status: &GetStatusResponse, state: EngineState) -> bool {
    status
        .engine
        .as_ref()
        .is_some_and(|engine| engine.state() == state)
}

fn whole(status: &GetStatusResponse) -> bool {
    engine_is(status, EngineState::Ready) && demo::whole(status)
}

async fn resize(
    leases: &mut LeaseServiceClient<Channel>,
    lease: &Lease,
    bytes: Bytes,
) -> Result<Lease, String> {
    leases
        .update_lease(UpdateLeaseRequest {
            name: lease.name.clone(),
            boot_id: lease.boot_id.clone(),
            generation: lease.generation,
            min_bytes: bytes.get(),
            max_bytes: bytes.get(),
            max_wait: Duration::from_secs(5).try_into().ok(),
        })
        .await
        .map_err(|status| format!("cannot change the lease to {bytes}: {}", status.message()))?
        .into_inner()
        .lease
        .ok_or_else(|| "the answer holds no lease".to_owned())
}

fn configuration(folder: &std::path::Path, args: &GrantArgs, total: Bytes, kv: Kv) -> String {
    let own = || folder.join("demo.gguf");
    let model = args.model.as_ref().map_or_else(own, |path| {
        std::path::absolute(path).unwrap_or_else(|_| path.clone())
    });
    let (places, model) = (places(folder), model.display());
    let kv = match kv {
        Kv::InUse => "at-once",
        Kv::Untouched => "as-needed",
    };
    // The daemon's own use is the reserve here; the watermarks are low because the budget is full by design.
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
  kv_memory: {kv}
http: {{listen: none}}
{places}",
        (total + RESERVE).get() / 1024,
        RESERVE.whole_mib(),
        args.context,
    )
}
