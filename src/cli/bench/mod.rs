//! `cotenant bench`: figures, measured on this machine in one run.

mod autopsy;
mod daemon;
mod engine;
mod first_byte;
mod grant;
mod kill;
mod liars;
mod load;
mod peer;
mod replay;
mod report;
mod rivals;
mod storm;
mod tenants;
mod voice;

use std::process::ExitCode;

use super::{
    Global, Output,
    exit::{self, CliError},
    session::{self, Interrupts},
};

/// What to measure.
#[derive(Debug, clap::Subcommand)]
pub enum Bench {
    /// Whether each of many injected deaths is called by its name, and how soon.
    Autopsy(autopsy::AutopsyArgs),
    /// How fast the engine is, what it holds, and how quickly it gives back.
    Engine(Box<engine::EngineArgs>),
    /// How long after a neighbour crosses the line the first byte is shed.
    FirstByte(first_byte::FirstByteArgs),
    /// How long ASR waits for memory that the LLM holds, while the LLM talks.
    Grant(grant::GrantArgs),
    /// How long a grant takes while memory is free.
    Grants(tenants::GrantsArgs),
    /// Whether workers and leases outlive a daemon that is killed at random points.
    Kill(kill::KillArgs),
    /// How soon a tenant that acknowledges and frees nothing is found out.
    Liars(liars::LiarsArgs),
    /// One of those tenants.
    #[command(hide = true)]
    Liar(liars::LiarArgs),
    /// How many renewals one core carries.
    Renewals(tenants::RenewalsArgs),
    /// How long a day takes to be fed through the arbiter again.
    Replay(replay::ReplayArgs),
    /// The arbiter beside the rules of other programs, on the same simulated days.
    Rivals(rivals::RivalsArgs),
    /// Whether random demands for memory in a group with a limit get anybody killed.
    Storm(storm::StormArgs),
    /// How long after an utterance its answer can be heard, alone and beside a neighbour that takes memory.
    Voice(voice::VoiceArgs),
}

pub(super) fn run(global: &Global, bench: &Bench) -> Result<ExitCode, CliError> {
    match bench {
        Bench::Kill(args) => kill::run(args),
        Bench::Engine(args) => {
            engine::run(args, global.output)?;
            Ok(ExitCode::SUCCESS)
        }
        Bench::Replay(args) => {
            let report = replay::run(args).map_err(|problem| CliError::plain(problem, exit::FAILED))?;
            report.write(global.output)?;
            Ok(ExitCode::SUCCESS)
        }
        Bench::Rivals(args) => {
            rivals::run(args, global.output)?;
            Ok(ExitCode::SUCCESS)
        }
        Bench::Autopsy(args) => name_deaths(args, global.output),
        Bench::FirstByte(args) => on_a_stage(|| reported(first_byte::run(args), global.output)),
        Bench::Grant(args) => on_a_stage(|| reported(grant::run(args), global.output)),
        Bench::Grants(args) => on_a_stage_with(args.client_threads, || reported(tenants::grants(args), global.output)),
        Bench::Liars(args) => on_a_stage(|| reported(liars::run(args), global.output)),
        Bench::Liar(args) => measured(|| liars::lie(args)).map(|()| ExitCode::SUCCESS),
        Bench::Renewals(args) => on_a_stage(|| reported(tenants::renewals(args), global.output)),
        Bench::Storm(args) => on_a_stage(|| reported(storm::run(args), global.output)),
        Bench::Voice(args) => on_a_stage(|| voice::run(args, global.output)),
    }
}

/// Threads of a measurement beside the main one.
const THREADS: u32 = 2;

/// Prints the report of a measurement.
async fn reported(
    measuring: impl Future<Output = Result<report::Report, String>>,
    format: Output,
) -> Result<(), String> {
    measuring.await?.write(format).map_err(|error| error.to_string())
}

/// Runs what has a daemon of its own, in a session of its own, until it ends or is interrupted.
fn on_a_stage<F: Future<Output = Result<(), String>>>(measure: impl FnOnce() -> F) -> Result<ExitCode, CliError> {
    on_a_stage_with(THREADS, measure)
}

/// The same with so many threads beside the main one.
fn on_a_stage_with<F: Future<Output = Result<(), String>>>(
    threads: u32,
    measure: impl FnOnce() -> F,
) -> Result<ExitCode, CliError> {
    let mut result = Ok(());
    let code = session::in_own_session(|| {
        result = measured_with(threads, measure);
        ExitCode::SUCCESS
    });
    result.map(|()| code)
}

fn name_deaths(args: &autopsy::AutopsyArgs, format: Output) -> Result<ExitCode, CliError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| CliError::failed("cannot start", error))?;
    let right = runtime.block_on(async {
        let mut interrupts = Interrupts::new().map_err(|error| CliError::failed("cannot start", error))?;
        tokio::select! {
            done = autopsy::run(args, format) => done,
            code = interrupts.next() => Err(CliError::plain("the measurement was interrupted", code)),
        }
    })?;
    Ok(ExitCode::from(if right { exit::OK } else { exit::FAILED }))
}

fn measured<F: Future<Output = Result<(), String>>>(measure: impl FnOnce() -> F) -> Result<(), CliError> {
    measured_with(THREADS, measure)
}

fn measured_with<F: Future<Output = Result<(), String>>>(
    threads: u32,
    measure: impl FnOnce() -> F,
) -> Result<(), CliError> {
    let mut builder = match usize::try_from(threads) {
        Ok(threads @ 1..) => {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            builder.worker_threads(threads);
            builder
        }
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = builder
        .enable_all()
        .build()
        .map_err(|error| CliError::failed("cannot start", error))?;
    runtime.block_on(async {
        let mut interrupts = Interrupts::new().map_err(|error| CliError::failed("cannot start", error))?;
        tokio::select! {
            done = measure() => done.map_err(|problem| CliError::plain(problem, exit::FAILED)),
            code = interrupts.next() => Err(CliError::plain("the measurement was interrupted", code)),
        }
    })
}
