//! `cotenant worker …`: built-in workers.

use std::process::ExitCode;

use clap::{Args, Subcommand};

use super::serve::explain;
use cotenant_engine::embedding::Embedder;
use cotenant_probe::{ProbeRoot, cores::usable_cores};
use cotenant_units::{Tokens, causes::in_one_line};
use cotenant_worker::verbs::{
    VerbError,
    asr::{AsrOptions, run_asr},
    ballast::{BallastOptions, run_ballast},
    embed::{EmbedOptions, EmbedText, NotEmbedded, run_embed},
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
    /// Text to vectors: OpenAI's `/v1/embeddings` by a GGUF model
    Embed(EmbedOptions),
    /// A neighbour that allocates memory and holds it
    Ballast(BallastOptions),
}

/// Runs a worker to its end; prints the reason of a failure on stderr.
pub(super) fn run(arguments: &WorkerArgs) -> ExitCode {
    let result = match &arguments.command {
        WorkerCommand::Asr(options) => run_asr(options),
        WorkerCommand::Tts(options) => run_tts(options),
        WorkerCommand::Embed(options) => embed(options),
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

/// Serves a model of this program's engine.
fn embed(options: &EmbedOptions) -> Result<(), VerbError> {
    let (path, context) = (options.model.clone(), Tokens::new(options.context));
    let threads = options
        .threads
        .map_or_else(|| usable_cores(&ProbeRoot::default()), usize::from);
    run_embed(options, move || {
        let mut model = Embedder::open(&path, context, threads)?;
        Ok(move |asked: EmbedText| {
            let embedded = model.embed(&asked.text, asked.dimensions, asked.truncate);
            embedded
                .map(|embedded| (embedded.vector, embedded.tokens))
                .map_err(|error| NotEmbedded {
                    of_request: error.is_of_request(),
                    reason: in_one_line(&error),
                })
        })
    })
}
