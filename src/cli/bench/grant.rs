//! `cotenant bench grant`: how long somebody waits for memory that the LLM holds, while the LLM talks.
//!
//! A budget without room; a tenant of the class of ASR that holds a small lease and asks for more; an engine that
//! generates without a pause and has to shed. Each round: ask, wait for the grant, use the memory for real, give it
//! back, let the engine grow again.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use tonic::transport::Channel;

use crate::cli::{
    demo::{talk::Talk, watch},
    stage::Stage,
};
use crate::{
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
    /// Model to generate with; the demo model when absent.
    #[arg(long, value_name = "GGUF")]
    pub model: Option<PathBuf>,
}

/// What ASR holds when it asks for more.
const ASR_SMALL: Bytes = Bytes::from_mib(32);

/// Room that is left in the budget, so that it is not exactly full.
const SLACK: Bytes = Bytes::from_mib(8);

/// The longest that one step may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// What was asked of the engine that it holds in this benchmark: KV tokens of the demo model, 128 MiB.
const KV_TOKENS: u32 = 65_536;

/// Prints a line; a closed pipe ends the output, not the measurement.
macro_rules! line {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout().lock(), $($text)*);
    }};
}

/// Runs the benchmark and prints its figures.
///
/// # Errors
///
/// When the daemon does not come up, or a grant fails.
pub(super) async fn run(args: &GrantArgs) -> Result<(), String> {
    let began = Instant::now();
    let more = Bytes::from_mib(args.mib);
    // The engine's own size decides the budget, so it is asked first, with all the room it wants.
    let roomy =
        Stage::set(|folder| configuration(folder, args, Bytes::from_gib(64))).map_err(|error| error.to_string())?;
    let mut operator = OperatorServiceClient::new(connected(&roomy).await?);
    let full = wait(&mut operator, &roomy, |status| engine_is(status, EngineState::Ready)).await?;
    let engine = Bytes::new(full.engine.map_or(0, |engine| engine.full_plan_bytes));
    drop(roomy);

    let total = engine + ASR_SMALL + SLACK;
    let mut stage = Stage::set(|folder| configuration(folder, args, total)).map_err(|error| error.to_string())?;
    let channel = connected(&stage).await?;
    let mut operator = OperatorServiceClient::new(channel.clone());
    let mut leases = LeaseServiceClient::new(channel.clone());
    wait(&mut operator, &stage, whole).await?;
    let lease = leases
        .create_lease(CreateLeaseRequest {
            request_id: "bench".to_owned(),
            tenant: "asr".to_owned(),
            lease_class: LeaseClass::AudioRealtime.into(),
            min_bytes: ASR_SMALL.get(),
            max_bytes: ASR_SMALL.get(),
            term: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
            max_wait: None,
            ..CreateLeaseRequest::default()
        })
        .await
        .map_err(|status| format!("cannot create the lease: {}", status.message()))?
        .into_inner()
        .lease
        .ok_or("the answer holds no lease")?;
    let daemon = stage.daemon().pid();
    line!(
        "engine {engine}, budget {total}, ASR holds {ASR_SMALL} and asks for {more} more; {} rounds",
        args.rounds
    );

    let talk = Talk::start(LlmServiceClient::new(channel.clone()), "tell me a story", began);
    if !talk.stories(1, PATIENCE).await {
        return Err(format!("the LLM does not talk: {:?}", talk.outcome().failures));
    }
    let mut waits = Vec::new();
    let mut fell = Vec::new();
    let mut lease = lease;
    for round in 1..=args.rounds {
        wait(&mut operator, &stage, whole).await?;
        let before = watch::pss(daemon).unwrap_or_default();
        let asked = Instant::now();
        lease = resize(&mut leases, &lease, ASR_SMALL + more)
            .await
            .map_err(|problem| format!("round {round}: {problem}"))?;
        waits.push(asked.elapsed());
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
    waits.sort_unstable();
    fell.sort_unstable();
    let engine = status.into_inner().engine.unwrap_or_default();
    line!(
        "asked → granted, verified shed included: p50 {:.1} ms, p99 {:.1} ms, max {:.1} ms",
        milliseconds(&waits, 500),
        milliseconds(&waits, 990),
        milliseconds(&waits, 1000),
    );
    line!(
        "daemon's PSS at the grant: fell by {} at the median, by {} at least",
        at(&fell, 500).copied().unwrap_or_default(),
        fell.first().copied().unwrap_or_default()
    );
    line!(
        "sheds {}, {} verified back, {} grown back",
        engine.sheds,
        Bytes::new(engine.shed_bytes),
        Bytes::new(engine.regrown_bytes)
    );
    line!(
        "answers meanwhile: {}, {} tokens, {} different, {} aborted",
        outcome.stories,
        outcome.tokens,
        outcome.different,
        outcome.failures.len()
    );
    if outcome.different > 0 || !outcome.failures.is_empty() {
        return Err(format!("answers were disturbed: {:?}", outcome.failures));
    }
    Ok(())
}

fn at<T>(sorted: &[T], per_mille: usize) -> Option<&T> {
    let last = sorted.len().checked_sub(1)?;
    sorted.get((sorted.len() * per_mille).div_ceil(1000).saturating_sub(1).min(last))
}

fn milliseconds(sorted: &[Duration], per_mille: usize) -> f64 {
    at(sorted, per_mille).map_or(0.0, |wait| wait.as_secs_f64() * 1e3)
}

async fn connected(stage: &Stage) -> Result<Channel, String> {
    watch::connect(&stage.socket(), PATIENCE)
        .await
        .map_err(|problem| format!("{problem}; the daemon's last words:\n{}", stage.log_tail(15)))
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

async fn wait(
    operator: &mut OperatorServiceClient<Channel>,
    stage: &Stage,
    wanted: impl Fn(&GetStatusResponse) -> bool,
) -> Result<GetStatusResponse, String> {
    let end = Instant::now() + PATIENCE;
    loop {
        let status = operator
            .get_status(GetStatusRequest {})
            .await
            .map_err(|status| format!("{}; the daemon's last words:\n{}", status.message(), stage.log_tail(15)))?
            .into_inner();
        if wanted(&status) {
            return Ok(status);
        }
        if Instant::now() >= end {
            return Err(format!(
                "the engine is not as it should be after {PATIENCE:?}: {:?}; the daemon's last words:\n{}",
                status.engine,
                stage.log_tail(15)
            ));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
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
  reserve: 1GiB
  watermarks: {{elevated: 3MiB, critical: 2MiB, last_resort: 1MiB}}
  hysteresis: 1MiB
  scope: session
  dwell: 100ms
  sample_max: 100ms
shedding: {{reclaim_min: 1MiB}}
llm:
  path: {model}
  name: bench
  context: {KV_TOKENS}
  kv_floor: 512
http: {{listen: none}}
grpc: {{socket: {folder}/cotenant.sock, abstract_name: none}}
journal: {{path: {folder}/journal.ndjson}}
state_dir: {folder}/state
runtime_dir: {folder}
log: {{filter: info, format: text}}
",
        (total + Bytes::from_gib(1)).get() / 1024,
    )
}
