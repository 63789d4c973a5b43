//! `cotenant worker …`: built-in workers.

use std::process::ExitCode;

use clap::{Args, Subcommand};

use super::serve::explain;
use cotenant_worker::verbs::{
    asr::{AsrOptions, run_asr},
    ballast::{BallastOptions, run_ballast},
    tts::{TtsOptions, run_tts},
};

/// Runs one of the workers that this program itself can be.
#[derive(Clone, Debug, Args)]
pub struct WorkerArgs {
    /// The worker.
    #[command(subcommand)]
    command: WorkerCommand,
}

/// The workers.
#[derive(Clone, Debug, Subcommand)]
enum WorkerCommand {
    /// Speech to text: a Wyoming server on pocketsphinx
    Asr(AsrOptions),
    /// Text to speech: a Wyoming server on flite or espeak-ng
    Tts(TtsOptions),
    /// A neighbour that allocates memory and holds it
    Ballast(BallastOptions),
}

/// Runs a worker to its end; prints the reason of a failure on stderr.
pub(super) fn run(arguments: &WorkerArgs) -> ExitCode {
    let result = match &arguments.command {
        WorkerCommand::Asr(options) => run_asr(options),
        WorkerCommand::Tts(options) => run_tts(options),
        WorkerCommand::Ballast(options) => run_ballast(options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            explain(&error, error.hint());
            ExitCode::FAILURE
        }
    }
}
