//! `cotenant demo`: the whole system on real processes, with a verdict.
//!
//! It runs the real daemon in a temporary folder, the demo model, and two real speech workers. A spoken question passes
//! through the APIs that products use; then the recogniser needs more memory while the LLM generates, a neighbour takes
//! memory without a lease, and another process kills a worker. The final claims are checked from outside: by clients of
//! the daemon and by the kernel's figures for its processes. With `--real`, models and speech servers are published
//! ones.

mod http;
mod play;
mod published;
mod report;
pub mod talk;
pub mod watch;

use std::{
    io::Write as _,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tonic::transport::Channel;

use self::{
    http::Http,
    play::{NEIGHBOUR_RATE, Scenario},
    report::{Check, Report, Sizes},
    talk::Talk,
    watch::{Watch, connect},
};
use crate::{
    Global, Output,
    chart::MarkKind,
    output::write_json,
    session::{self, Interrupts},
    stage::{Process, Stage},
};
use cotenant_rpc::v1::{
    ControlWorkerRequest, EngineState, GetStatusResponse, ResizeWorkerRequest, WorkerCommand,
    WorkerState, llm_service_client::LlmServiceClient,
    operator_service_client::OperatorServiceClient,
};
use cotenant_threads::blocking;
use cotenant_units::{Bytes, causes::in_one_line, lock::locked};

/// Size of the chart on the terminal, in characters.
const CHART_WIDTH: usize = 100;
const CHART_HEIGHT: usize = 16;

/// Time limit of each step: servers in Python import for seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// Settings of the demonstration.
#[derive(Clone, Debug, clap::Args)]
pub struct DemoArgs {
    /// Folder for the chart, the events and the daemon's log.
    #[arg(long, default_value = "demo-report", value_name = "FOLDER")]
    pub out: PathBuf,
    /// Keep the daemon running afterwards until Ctrl-C.
    #[arg(long)]
    pub keep: bool,
    /// Use SmolLM2 135M, Whisper tiny.en and Piper; needs Python. Downloads 410 MB once, after confirmation.
    #[arg(long)]
    pub real: bool,
    #[command(flatten)]
    published: published::Source,
}

/// Runs the demonstration; the exit code is its verdict.
pub(super) fn run(global: &Global, args: &DemoArgs) -> ExitCode {
    // Before a minute is spent on a run whose report cannot be written.
    if let Err(error) = report::make_folder(&args.out) {
        eprintln!("error: cannot write the report to `{}`", args.out.display());
        eprintln!("  caused by: {error}");
        eprintln!("hint: name a writable folder with --out");
        return ExitCode::FAILURE;
    }
    let scenario = if args.real {
        match args.published.fetch() {
            Ok(folder) => Scenario::published(&folder),
            Err(problem) => {
                eprintln!("error: cannot prepare the published models\n  caused by: {problem}");
                return ExitCode::FAILURE;
            }
        }
    } else {
        Scenario::built_in()
    };
    session::in_own_session(|| run_here(args, &scenario, global.output))
}

fn run_here(args: &DemoArgs, scenario: &Scenario, output: Output) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: cannot start the demonstration\n  caused by: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(async {
        let mut interrupts = Interrupts::new().map_err(|error| error.to_string())?;
        let (verdict, stage) = tokio::select! {
            played = play(args, scenario, output) => played?,
            code = interrupts.next() => return Ok(Err(code)),
        };
        if args.keep {
            interrupts.next().await;
        }
        drop(stage);
        Ok::<_, String>(Ok(verdict))
    });
    match result {
        Ok(Ok(true)) => ExitCode::SUCCESS,
        Ok(Ok(false)) => ExitCode::FAILURE,
        Ok(Err(code)) => {
            eprintln!("error: the demonstration was interrupted; daemon and workers were stopped");
            ExitCode::from(code)
        }
        Err(problem) => {
            eprintln!("error: the demonstration failed: {problem}");
            ExitCode::FAILURE
        }
    }
}

/// Printer of lines, most of them with the elapsed time.
struct Narrator {
    began: Instant,
    output: Output,
}

impl Narrator {
    /// Prints text for people: on stdout, or on stderr if stdout carries a document for programs. A closed pipe ends
    /// the output, not the demonstration.
    fn line(&self, text: &str) {
        let _ = match self.output {
            Output::Table => writeln!(std::io::stdout().lock(), "{text}"),
            Output::Json | Output::Ndjson => writeln!(std::io::stderr().lock(), "{text}"),
        };
    }

    fn say(&self, text: &str) {
        self.line(&format!(
            "{:5.1}s  {text}",
            self.began.elapsed().as_secs_f64()
        ));
    }

    /// Prints the supervisor's decisions since the last call, in its own words.
    fn decisions(&self, watch: &Watch, reported: &mut usize) {
        let lines = watch.lines();
        for line in lines.iter().skip(*reported) {
            if DECISIONS.contains(&line.name.as_str()) {
                self.line(&format!(
                    "          {:5.1}s  {}",
                    line.at.since_start().as_secs_f64(),
                    line.summary
                ));
            }
        }
        *reported = lines.len();
    }
}

/// Journal lines that are shown as they occur.
const DECISIONS: [&str; 6] = [
    "apply_plan",
    "engine_applied",
    "level_changed",
    "resize_worker",
    "start_worker",
    "worker_exited",
];

struct RoundTrip {
    asked: Vec<u8>,
    heard: String,
    answer: String,
    spoken: Vec<u8>,
    took: Duration,
}

async fn round_trip(http: &Http, question: &'static str) -> Result<RoundTrip, String> {
    let http = http.clone();
    blocking(move || {
        let asked = http.speak(question).map_err(|error| in_one_line(&error))?;
        let began = Instant::now();
        let heard = http.hear(&asked).map_err(|error| in_one_line(&error))?;
        let answer = http.ask(&heard).map_err(|error| in_one_line(&error))?;
        let spoken = http.speak(&answer).map_err(|error| in_one_line(&error))?;
        Ok(RoundTrip {
            asked,
            heard,
            answer,
            spoken,
            took: began.elapsed(),
        })
    })
    .await
    .map_err(|error| error.to_string())?
}

/// Returns whether a recogniser understood these words, ignoring its capitals and punctuation.
fn same_words(heard: &str, said: &str) -> bool {
    let words = |text: &str| -> Vec<String> {
        let words = text
            .split(|one: char| !one.is_alphanumeric())
            .filter(|word| !word.is_empty());
        words.map(str::to_lowercase).collect()
    };
    words(heard) == words(said)
}

pub(super) fn ready(status: &GetStatusResponse) -> bool {
    let engine = status.engine.as_ref();
    engine.is_some_and(|engine| engine.state() == EngineState::Ready)
        && status
            .workers
            .iter()
            .all(|worker| worker.state() == WorkerState::Ready)
}

/// Returns a part that will not become ready, with the reason.
fn given_up(status: &GetStatusResponse) -> Option<String> {
    let worker = status
        .workers
        .iter()
        .find(|worker| worker.state() == WorkerState::Degraded)
        .map(|worker| {
            format!(
                "worker `{}` does not run: {}",
                worker.name, worker.last_exit
            )
        });
    let engine = status
        .engine
        .as_ref()
        .filter(|engine| engine.state() == EngineState::Failed);
    worker.or_else(|| engine.map(|engine| engine.failure.clone()))
}

/// Returns whether the engine has all layers resident and its full KV capacity.
pub(super) fn whole(status: &GetStatusResponse) -> bool {
    status.engine.as_ref().is_some_and(|engine| {
        !engine.changing
            && engine.layers_resident == engine.layers_total
            && engine.kv_capacity_tokens == engine.kv_capacity_full_tokens
    })
}

/// Returns whether the engine has shed KV capacity and layers, and has no change pending.
fn squeezed_in_both(status: &GetStatusResponse) -> bool {
    status.engine.as_ref().is_some_and(|engine| {
        !engine.changing
            && engine.layers_resident < engine.layers_total
            && engine.kv_capacity_tokens < engine.kv_capacity_full_tokens
    })
}

fn engine_line(status: &GetStatusResponse) -> String {
    status.engine.as_ref().map_or_else(String::new, |engine| {
        format!(
            "llm {}/{} layers resident, KV {} tokens",
            engine.layers_resident, engine.layers_total, engine.kv_capacity_tokens
        )
    })
}

fn free_port() -> std::io::Result<SocketAddr> {
    TcpListener::bind(("127.0.0.1", 0))?.local_addr()
}

fn resize_asr(variant: &str) -> ResizeWorkerRequest {
    ResizeWorkerRequest {
        name: "asr".to_owned(),
        variant: variant.to_owned(),
        max_wait: Duration::from_secs(5).try_into().ok(),
    }
}

/// Makes ASR take more memory: by its larger variant or, without variants, by a start. Returns the duration.
async fn grow_asr(
    operator: &mut OperatorServiceClient<Channel>,
    watch: &Watch,
    scenario: &Scenario,
) -> Result<Duration, String> {
    let refused = |status: tonic::Status| status.message().to_owned();
    if let Some([_, large]) = scenario.asr_variants {
        let before = Instant::now();
        operator
            .resize_worker(resize_asr(large))
            .await
            .map_err(refused)?;
        return Ok(before.elapsed());
    }
    let command = |command: WorkerCommand| ControlWorkerRequest {
        name: "asr".to_owned(),
        command: command.into(),
    };
    operator
        .control_worker(command(WorkerCommand::Stop))
        .await
        .map_err(refused)?;
    if !watch.until(PATIENCE, asr_stopped).await {
        return Err("it did not stop".to_owned());
    }
    let before = Instant::now();
    operator
        .control_worker(command(WorkerCommand::Start))
        .await
        .map_err(refused)?;
    if !watch.until(PATIENCE, ready).await {
        return Err("it was not ready in time".to_owned());
    }
    Ok(before.elapsed())
}

#[expect(clippy::too_many_lines, reason = "a script, read from top to bottom")]
async fn play(
    args: &DemoArgs,
    scenario: &Scenario,
    output: Output,
) -> Result<(bool, Stage), String> {
    let &Scenario {
        question, story, ..
    } = scenario;
    let began = Instant::now();
    let narrator = Narrator { began, output };
    let text = |error: std::io::Error| error.to_string();
    for real in report::what_is_real() {
        narrator.line(&format!("        {real}"));
    }

    let address = free_port().map_err(text)?;
    let mut stage = Stage::set(|folder| scenario.configuration(folder, address)).map_err(text)?;
    let planned = published::planned(&stage.config()).await?;
    let channel = connect(&stage.socket(), PATIENCE).await;
    let channel = channel.map_err(|problem| stage.last_words(problem))?;
    let mut operator = OperatorServiceClient::new(channel.clone());
    let neighbour_pid = Arc::new(Mutex::new(None));
    let watch = Watch::start(
        operator.clone(),
        stage.daemon().pid(),
        began,
        Arc::clone(&neighbour_pid),
    );
    watch
        .until(PATIENCE, |status| {
            ready(status) || given_up(status).is_some()
        })
        .await;
    let status = watch.status().unwrap_or_default();
    if let Some(what) = given_up(&status) {
        return Err(stage.last_words(what));
    }
    if !ready(&status) {
        let problem = format!("LLM and workers were not ready within {PATIENCE:?}");
        return Err(stage.last_words(problem));
    }
    let budget = status.budget.unwrap_or_default();
    narrator.say(&format!(
        "budget {} · {} · {} leases hold {}",
        Bytes::new(budget.budget_bytes),
        engine_line(&status),
        status.leases.len(),
        Bytes::new(budget.held_bytes)
    ));

    let mut reported = 0;
    narrator.decisions(&watch, &mut reported);
    let http = Http::new(address, scenario.model);
    let mut report = Report::new(scenario.total);
    report.mark(began, MarkKind::Note, "spoken question");
    let first = round_trip(&http, question).await?;
    narrator.say(&format!(
        "spoken \"{question}\" → heard \"{}\" → \"{}\" → {} KiB of speech, in {:.2} s",
        first.heard,
        first.answer,
        first.spoken.len() / 1024,
        first.took.as_secs_f64()
    ));
    report.check(Check::new(
        "speech in gives speech out",
        same_words(&first.heard, question)
            && !first.answer.is_empty()
            && first.spoken.len() > 8 * 1024,
        format!("heard {:?}, answered {:?}", first.heard, first.answer),
    ));

    // The LLM generates throughout everything below.
    let talk = Talk::start_with(
        LlmServiceClient::new(channel.clone()),
        vec![story.to_owned()],
        scenario.story_tokens,
        began,
    );
    if !talk.stories(2, PATIENCE).await {
        return Err(format!(
            "the LLM generated no story: {:?}",
            talk.outcome().failures
        ));
    }
    let calm = talk.rate();
    narrator.say(&format!(
        "the LLM generates continuously, {calm:.0} tokens/s"
    ));

    let sizes = Sizes::of(&watch.looks(), planned);
    narrator.say(&sizes.to_string());
    report.check(sizes.check());

    // 1. The recogniser needs its large vocabulary while the LLM generates, and memory is full.
    let granted = grow_asr(&mut operator, &watch, scenario).await;
    match &granted {
        Ok(took) => narrator.say(&format!(
            "ASR {}, with no memory free: granted and loaded in {:.0} ms · {}",
            scenario.asr_growth,
            took.as_secs_f64() * 1e3,
            engine_line(&watch.status().unwrap_or_default())
        )),
        Err(problem) => narrator.say(&format!("ASR was refused its memory: {problem}")),
    }
    report.mark(began, MarkKind::Shed, "ASR grows");
    tokio::time::sleep(Duration::from_millis(300)).await;
    narrator.say(&engine_line(&watch.status().unwrap_or_default()));
    narrator.decisions(&watch, &mut reported);
    let second = round_trip(&http, question).await;
    if let Some([small, _]) = scenario.asr_variants {
        let _ = operator.resize_worker(resize_asr(small)).await;
        report.mark(began, MarkKind::Regrow, "ASR shrinks");
    }
    report.check(Check::new(
        "ASR got its memory while the LLM talked",
        granted.is_ok() && second.is_ok(),
        granted.as_ref().map_or_else(Clone::clone, |took| {
            format!("{:.0} ms, model load included", took.as_secs_f64() * 1e3)
        }),
    ));
    let back = watch.until(PATIENCE, whole).await;
    narrator.say(&format!(
        "ASR has its memory; {}: {}",
        if back { "grown back" } else { "NOT grown back" },
        engine_line(&watch.status().unwrap_or_default())
    ));

    narrator.decisions(&watch, &mut reported);

    // 2. A neighbour takes memory without a lease.
    report.mark(began, MarkKind::Alarm, "neighbour comes");
    let takes = scenario.neighbour(&watch.status().unwrap_or_default());
    narrator.say(&format!("a neighbour takes {takes} without a lease"));
    let pss_before = watch::pss(stage.daemon().pid());
    let mut neighbour = Process::ballast(takes, NEIGHBOUR_RATE).map_err(text)?;
    *locked(&neighbour_pid) = Some(neighbour.pid());
    // First the kernel counts all of its memory; then the engine's response ends.
    let came = watch::until_pss(neighbour.pid(), takes, PATIENCE).await;
    let shed = watch.until(PATIENCE, squeezed_in_both).await;
    let pss_after = watch::pss(stage.daemon().pid());
    let squeezed_status = watch.status().unwrap_or_default();
    let squeezed = talk.rate();
    narrator.say(&format!(
        "{} · daemon {} → {} as the kernel counts it · {squeezed:.0} tokens/s",
        engine_line(&squeezed_status),
        pss_before.unwrap_or_default(),
        pss_after.unwrap_or_default(),
    ));
    narrator.decisions(&watch, &mut reported);
    report.check(Check::new(
        "KV capacity and layers were shed",
        came && shed && squeezed_in_both(&squeezed_status),
        engine_line(&squeezed_status),
    ));
    report.check(report::verified(&watch.lines(), pss_before, pss_after));
    let third = round_trip(&http, question).await;
    if let Ok(third) = &third {
        narrator.say(&format!("the same question: \"{}\"", third.answer));
    }
    report.check(Check::new(
        "identical answer under pressure",
        third
            .as_ref()
            .is_ok_and(|third| third.answer == first.answer),
        third
            .as_ref()
            .map_or_else(Clone::clone, |third| format!("{:?}", third.answer)),
    ));

    // 3. Another process kills the recogniser.
    let asr = worker_pid(&watch.status().unwrap_or_default(), "asr");
    report.mark(began, MarkKind::Alarm, "ASR killed by another process");
    let killed = Instant::now();
    if let Some(pid) = asr.and_then(|pid| i32::try_from(pid).ok()) {
        let _ = nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(pid),
            nix::sys::signal::Signal::SIGKILL,
        );
    }
    let returned = watch
        .until(PATIENCE, |status| {
            let now = worker_pid(status, "asr");
            now.is_some() && now != asr && ready(status)
        })
        .await;
    let status = watch.status().unwrap_or_default();
    let worker = status
        .workers
        .into_iter()
        .find(|worker| worker.name == "asr")
        .unwrap_or_default();
    narrator.say(&format!(
        "another process kills ASR (\"{}\"); back after {:.1} s",
        worker.last_exit,
        killed.elapsed().as_secs_f64()
    ));
    let took = killed.elapsed();
    let fourth = if returned {
        round_trip(&http, question).await
    } else {
        let known = [worker.waits_for, worker.remedy, worker.last_exit]
            .into_iter()
            .find(|why| !why.is_empty());
        Err(format!(
            "ASR did not restart: {}",
            known.unwrap_or_default()
        ))
    };
    report.check(Check::new(
        "a killed worker is restarted",
        fourth
            .as_ref()
            .is_ok_and(|fourth| fourth.answer == first.answer),
        fourth
            .as_ref()
            .map_or_else(Clone::clone, |_| format!("{:.1} s", took.as_secs_f64())),
    ));

    narrator.decisions(&watch, &mut reported);

    // 4. The neighbour leaves.
    let alone = neighbour.ended().map_err(text)?.is_none();
    drop(neighbour);
    *locked(&neighbour_pid) = None;
    report.mark(began, MarkKind::Regrow, "neighbour leaves");
    let left = Instant::now();
    let regrown = watch.until(PATIENCE, whole).await;
    let status = watch.status().unwrap_or_default();
    narrator.say(&format!(
        "the neighbour exits; {} after {:.1} s (dwell included)",
        engine_line(&status),
        left.elapsed().as_secs_f64()
    ));
    narrator.decisions(&watch, &mut reported);
    report.check(Check::new("regrown", regrown, engine_line(&status)));
    tokio::time::sleep(Duration::from_millis(500)).await;
    let calm_again = talk.rate();
    narrator.say(&format!("{calm_again:.0} tokens/s again"));

    let outcome = talk.stop().await;
    let fifth = round_trip(&http, question).await;
    let requests: Vec<String> = [second.err(), third.err(), fourth.err(), fifth.err()]
        .into_iter()
        .flatten()
        .collect();
    report.check(Check::new(
        "one story, generated again and again, token for token the same",
        outcome.different == 0 && outcome.stories > 2,
        format!(
            "{} times, {} tokens, {} different",
            outcome.stories, outcome.tokens, outcome.different
        ),
    ));
    report.check(Check::new(
        "0 failed requests",
        requests.is_empty() && outcome.failures.is_empty() && watch.failures().is_empty(),
        Some(
            [requests, outcome.failures, watch.failures()]
                .concat()
                .join("; "),
        )
        .filter(|faults| !faults.is_empty())
        .unwrap_or_else(|| format!("of {} answers and 5 spoken questions", outcome.stories)),
    ));
    report.check(report::within_budget(&watch.looks()));
    report.check(report::no_kills(
        &watch.lines(),
        &watch.status().unwrap_or_default(),
        alone,
        usize::from(scenario.asr_variants.is_none()),
    ));
    report.check(report::daemon_lives(
        stage.daemon().ended().ok().flatten().is_none(),
    ));

    let mut written = report.write(&args.out, &watch, &stage).map_err(text)?;
    written.push(report::write_conversation(
        &args.out,
        &[&first.asked, &first.spoken],
    )?);
    narrator.line("");
    narrator.line(
        &report
            .chart(&watch.looks())
            .to_text(CHART_WIDTH, CHART_HEIGHT, false),
    );
    narrator.line(&report.verdict());
    for path in &written {
        narrator.line(&format!("        wrote {}", path.display()));
    }
    if output != Output::Table {
        // A closed pipe ends the output, not the demonstration.
        let _ = write_json(output, &report.json(&written));
    }
    if args.keep {
        narrator.line("");
        narrator.line(&format!(
            "        try:  cotenant --endpoint unix://{} status",
            stage.socket().display()
        ));
        narrator.line(&format!(
            "              curl -N http://{address}/v1/chat/completions -H 'content-type: application/json' \\"
        ));
        narrator.line(&format!(
            "                -d '{{\"model\":\"{}\",\"stream\":true,\"messages\":[{{\"role\":\"user\",\"content\":\"{story}\"}}]}}'",
            scenario.model
        ));
        narrator.line("        Ctrl-C ends it.");
    }
    Ok((report.passed(), stage))
}

fn asr_stopped(status: &GetStatusResponse) -> bool {
    status
        .workers
        .iter()
        .any(|worker| worker.name == "asr" && worker.state() == WorkerState::Stopped)
}

fn worker_pid(status: &GetStatusResponse, name: &str) -> Option<u32> {
    let worker = status.workers.iter().find(|worker| worker.name == name)?;
    if worker.state() == WorkerState::Ready {
        worker.pid
    } else {
        None
    }
}
