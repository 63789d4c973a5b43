//! `developer drafts`: answers with and without drafted tokens.
//!
//! Two engines answer the same questions alternately, one with drafts and one without, with all layers resident and
//! with half of them streamed. One question asks for a text that repeats its prompt, one for a text that does not.
//!
//! With `--accept`, the model verifies tokens of which each is accepted with the same probability: those of a simulated source
//! that costs nothing, the most that any source can gain; or as many as its draft block computes, if it has one, in the time
//! that it takes.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use cotenant::{
    cli::bench::{
        load::Reading,
        report::{Limit, Report, median},
    },
    conversation::{ChatMessage, Prompt, Role},
    engine::{
        Engine, EngineEvent, EngineOptions, Flow, ForwardError, GenerateEvent, GenerateRequest,
        Model, ModelOptions, RequestId, model::Span,
    },
    policy::{
        params::EngineParams,
        residency::{EnginePlan, PlanLimits},
    },
    units::Tokens,
};
use tokio::sync::mpsc;

/// Settings of the measurement.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DraftsArgs {
    /// The model.
    #[arg(long)]
    pub model: PathBuf,
    /// Threads that compute.
    #[arg(long, default_value_t = 2)]
    pub threads: u32,
    /// Turns of each question.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub turns: u32,
    /// Simulate a source whose tokens are accepted with these probabilities, in percent.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u8).range(0..=100))]
    pub accept: Vec<u8>,
}

struct Answering {
    engine: Engine,
    _events: mpsc::Receiver<EngineEvent>,
    asked: u64,
}

pub(crate) fn run(args: &DraftsArgs) -> Result<Report, String> {
    let reading = Reading::now();
    let setting = format!("{}, {} threads", args.model.display(), args.threads);
    let mut report = Report::new("drafts", setting);
    let shape =
        Engine::inspect(&args.model, args.threads as usize).map_err(|error| error.to_string())?;
    let full = EnginePlan {
        kv_capacity: Tokens::new(4096),
        ..shape.full_plan(&PlanLimits::new(&EngineParams::default(), Tokens::ZERO))
    };
    let half = EnginePlan {
        resident: full
            .resident
            .iter()
            .copied()
            .filter(|part| {
                let part = (part % 2, shape.layers.get(*part as usize));
                part.0 == 0 || part.1.is_some_and(|part| !part.is_streamed())
            })
            .collect(),
        ..full.clone()
    };
    for (name, plan, limit) in [
        ("all layers in memory", full, Limit::AtLeast(1.5)),
        ("half of them streamed", half, Limit::AtLeast(1.8)),
    ] {
        if !args.accept.is_empty() {
            simulate((args, name), &plan, &mut report)?;
            continue;
        }
        let mut with = Answering::start(args, &plan, true)?;
        let mut without = Answering::start(args, &plan, false)?;
        for (question, content, limit) in [
            ("repeats", repeats(), limit),
            ("story", STORY.to_owned(), Limit::AtLeast(0.97)),
        ] {
            compare(
                (args, &format!("{question}, {name}")),
                [&mut with, &mut without],
                &content,
                limit,
                &mut report,
            )?;
        }
    }
    report.others(&reading);
    Ok(report)
}

fn compare(
    (args, name): (&DraftsArgs, &str),
    [with, without]: [&mut Answering; 2],
    content: &str,
    limit: Limit,
    report: &mut Report,
) -> Result<(), String> {
    let (mut ratios, mut rates, mut different) = (Vec::new(), Vec::new(), 0u32);
    let before = with.engine.handle().snapshot();
    for _ in 0..args.turns {
        let (text, rate) = with.ask(content)?;
        let (other, plain) = without.ask(content)?;
        different += u32::from(text != other);
        ratios.push(rate / plain);
        rates.push(plain);
    }
    let after = with.engine.handle().snapshot();
    let count = |tokens: u64| f64::from(u32::try_from(tokens).unwrap_or(u32::MAX));
    let drafted = count(after.tokens_drafted - before.tokens_drafted);
    let accepted = count(after.drafts_accepted - before.drafts_accepted);
    report.figure(
        format!("{name}: tokens/s without drafts"),
        "",
        median(&rates).unwrap_or_default(),
        None,
    );
    report.figure(format!("{name}: drafted tokens"), "", drafted, None);
    report.figure(
        format!("{name}: accepted of them"),
        "%",
        100.0 * accepted / drafted.max(1.0),
        None,
    );
    report.figure(
        format!("{name}: tokens/s with drafts over without"),
        "",
        median(&ratios).unwrap_or_default(),
        Some(limit),
    );
    report.figure(
        format!("{name}: different answers"),
        "",
        f64::from(different),
        Some(Limit::AtMost(0.0)),
    );
    Ok(())
}

/// Measures verification of a simulated source by number of drafted tokens.
fn simulate(
    (args, name): (&DraftsArgs, &str),
    plan: &EnginePlan,
    report: &mut Report,
) -> Result<(), String> {
    let options = ModelOptions::for_threads(args.threads as usize);
    let mut model = Model::open(&args.model, plan, &options).map_err(|error| error.to_string())?;
    if !model.takes_back() {
        return Err("tokens of this model cannot be taken back".to_owned());
    }
    for percent in &args.accept {
        for depth in [1, 2, 3, 5, 7] {
            let mut ratios = Vec::new();
            for turn in 0..args.turns {
                let mut random = Random(u64::from(turn) + 1);
                let seconds = |model: &mut Model, random: &mut Random, depth| {
                    model.reset();
                    let prompt: Vec<u32> = (0..64).map(|_| random.below(1000)).collect();
                    let go_on = &mut || Flow::Continue;
                    model
                        .forward(&prompt, go_on)
                        .map_err(|error| error.to_string())?;
                    verified(model, random, *percent, depth).map_err(|error| error.to_string())
                };
                let without: Result<f64, String> = seconds(&mut model, &mut random, 0);
                let with = seconds(&mut model, &mut random, depth);
                ratios.push(without? / with?);
            }
            report.figure(
                format!("{name}: {percent} % accepted, {depth} drafted: speed over none"),
                "",
                median(&ratios).unwrap_or_default(),
                None,
            );
        }
    }
    Ok(())
}

/// Returns the seconds of each of [`SIMULATED`] tokens, with passes of `depth` drafted tokens.
fn verified(
    model: &mut Model,
    random: &mut Random,
    percent: u8,
    depth: usize,
) -> Result<f64, ForwardError> {
    let (mut tokens, began) = (0, Instant::now());
    let mut held = vec![0; model.position() as usize];
    while tokens < SIMULATED {
        let rows: Vec<u32> = (0..=depth).map(|_| random.below(1000)).collect();
        held.extend(rows.first());
        model.draft(&held, depth, &mut || true)?;
        let accepts = |_: &usize| random.below(100) < u32::from(percent);
        let accepted = (0..depth).take_while(accepts).count();
        let span = Span {
            lane: None,
            tokens: &rows,
            scored: rows.len(),
        };
        let position = model.position();
        model.forward_together(&[span], &mut || Flow::Continue)?;
        for number in 0..=accepted {
            model.greatest_of(number, position)?;
        }
        let rejected = u32::try_from(depth - accepted).unwrap_or(0);
        model.take_back(None, rejected);
        held.extend(rows.iter().skip(1).take(accepted));
        tokens += 1 + u32::try_from(accepted).unwrap_or(0);
    }
    Ok(began.elapsed().as_secs_f64() / f64::from(tokens))
}

/// Numbers of a linear congruential generator (Knuth's MMIX).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        u32::try_from(self.0 >> 33).unwrap_or(0) % limit
    }
}

impl Answering {
    fn start(args: &DraftsArgs, plan: &EnginePlan, drafts: bool) -> Result<Self, String> {
        let (sink, mut events) = mpsc::channel(64);
        let options = EngineOptions {
            drafts,
            ..EngineOptions::default()
        };
        let model = ModelOptions::for_threads(args.threads as usize);
        let engine = Engine::start(options, model, sink).map_err(|error| error.to_string())?;
        // Without drafts, a draft block is no part of the model.
        let inspected = Engine::inspect_with(&args.model, None, args.threads as usize);
        let inspected = inspected.map_err(|error| error.to_string())?;
        let parts = inspected.drafting(drafts).shape.layers.len();
        let mut plan = plan.clone();
        plan.resident.retain(|part| (*part as usize) < parts);
        engine.handle().load(&args.model, plan);
        match events.blocking_recv() {
            Some(EngineEvent::Ready { .. }) => Ok(Self {
                engine,
                _events: events,
                asked: 0,
            }),
            other => Err(format!("the model was not loaded: {other:?}")),
        }
    }

    /// Asks, and returns the answer with its tokens per second after the first token.
    fn ask(&mut self, content: &str) -> Result<(String, f64), String> {
        self.asked += 1;
        let prompt = Prompt::Chat(vec![ChatMessage::new(Role::User, content)].into());
        let request = GenerateRequest {
            max_tokens: Some(Tokens::new(ANSWER)),
            ..GenerateRequest::new(RequestId::new(self.asked), prompt)
        };
        let mut stream = self
            .engine
            .handle()
            .generate(request)
            .map_err(|error| error.to_string())?;
        let (mut text, mut first) = (String::new(), None::<Instant>);
        while let Some(event) = stream.blocking_recv() {
            match event {
                GenerateEvent::Started { .. } => {}
                GenerateEvent::Delta { text: more, .. } => {
                    first.get_or_insert_with(Instant::now);
                    text.push_str(&more);
                }
                GenerateEvent::Finished { usage, .. } => {
                    let took = first.map_or(Duration::ZERO, |first| first.elapsed());
                    let tokens = f64::from(usage.completion_tokens.get().saturating_sub(1));
                    return Ok((text, tokens / took.as_secs_f64().max(1e-6)));
                }
                GenerateEvent::Failed(error) => return Err(error.to_string()),
            }
        }
        Err("the engine has ended".to_owned())
    }
}

/// Returns a text to be rewritten with a change in each line.
fn repeats() -> String {
    let lines: Vec<_> = ["kitchen", "hall", "bedroom", "study", "garden", "garage"]
        .iter()
        .map(|room| format!("The lamp in the {room} is on, and the window is shut."))
        .collect();
    format!(
        "Repeat this text word for word, three times:\n{}",
        lines.join("\n")
    )
}

const STORY: &str = "Tell me a story about a lighthouse keeper and his cat.";
const ANSWER: u32 = 256;
/// Tokens of a simulated answer: at least this many.
const SIMULATED: u32 = 48;
