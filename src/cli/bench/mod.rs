//! `cotenant bench`: measurements on the user's own board, each in one run.

mod board;
pub mod daemon;
pub mod engine;
mod grant;
pub mod load;
mod peer;
pub mod report;
mod voice;

use std::process::ExitCode;

use super::{
    Global,
    exit::{self, CliError},
    session::{self, Interrupts},
};

/// What to measure.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// The figures of README on this device, in one document and one picture; takes up to ten minutes.
    Board(board::BoardArgs),
    /// Speed, memory and elasticity of the LLM with your model.
    Engine(Box<engine::EngineArgs>),
    /// Latency of a grant to ASR from memory that the LLM holds, while the LLM generates.
    Grant(grant::GrantArgs),
    /// Time from the end of an utterance to the spoken answer, alone and beside a neighbour that allocates memory.
    Voice(voice::VoiceArgs),
}

pub(super) fn run(global: &Global, bench: &Command) -> Result<ExitCode, CliError> {
    match bench {
        Command::Board(args) => {
            // The thread that starts a child must last as long as this program.
            measured(0, || board::run(args)).map(|()| ExitCode::SUCCESS)
        }
        Command::Engine(args) => {
            engine::run(args, global.output)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Grant(args) => on_a_stage(THREADS, || async {
            let report = grant::run(args).await?;
            report
                .write(global.output)
                .map_err(|error| error.to_string())
        }),
        Command::Voice(args) => on_a_stage(THREADS, || voice::run(args, global.output)),
    }
}

/// Threads of a measurement in addition to the main one.
pub const THREADS: u32 = 2;

/// Runs a measurement that starts its own daemon, in its own session, until it ends or is interrupted.
///
/// # Errors
/// If the measurement fails, or is interrupted.
pub fn on_a_stage<F: Future<Output = Result<(), String>>>(
    threads: u32,
    measure: impl FnOnce() -> F,
) -> Result<ExitCode, CliError> {
    let mut result = Ok(());
    let code = session::in_own_session(|| {
        result = measured(threads, measure);
        ExitCode::SUCCESS
    });
    result.map(|()| code)
}

/// Runs a measurement with this many threads in addition to the main one, until it ends or is interrupted.
///
/// # Errors
/// If the measurement fails, or is interrupted.
pub fn measured<F: Future<Output = Result<(), String>>>(
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
