//! `cotenant worker …`: built-in workers.

use std::{
    error::Error,
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::{Args, Subcommand, ValueEnum};

use super::quantity;
use crate::{
    speech::client::Endpoint,
    units::Bytes,
    worker::verbs::{
        VerbError,
        asr::{AsrOptions, Vocabulary, run_asr},
        ballast::{BallastOptions, run_ballast},
        tts::{TtsEngine, TtsOptions, run_tts},
    },
};

/// Runs one of the workers that this program itself can be.
#[derive(Clone, Debug, Args)]
pub struct WorkerArgs {
    /// Which one.
    #[command(subcommand)]
    command: WorkerCommand,
}

/// The workers.
#[derive(Clone, Debug, Subcommand)]
pub(super) enum WorkerCommand {
    /// Speech to text: a Wyoming server on pocketsphinx
    Asr(AsrArgs),
    /// Text to speech: a Wyoming server on flite or espeak-ng
    Tts(TtsArgs),
    /// A neighbour that takes memory and holds it
    Ballast(BallastArgs),
}

/// Where a worker listens.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub(super) struct ListenArgs {
    /// Listen on this Unix socket
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Listen on `unix:///path` or `tcp://host:port`
    #[arg(long, value_name = "URI")]
    uri: Option<Endpoint>,
}

/// Arguments of `cotenant worker asr`.
#[derive(Clone, Debug, Args)]
pub(super) struct AsrArgs {
    #[command(flatten)]
    listen: ListenArgs,
    /// What is understood: the sentences of a grammar (33 MB), or any English sentence (102 MB)
    #[arg(long, value_enum, default_value_t = VocabularyArg::Open)]
    vocabulary: VocabularyArg,
    /// JSGF file for `--vocabulary grammar`
    #[arg(long, value_name = "FILE")]
    grammar: Option<PathBuf>,
    /// Folder of the model, in place of that of the package `pocketsphinx-en-us`
    #[arg(long, value_name = "DIR")]
    model_dir: Option<PathBuf>,
}

/// Arguments of `cotenant worker tts`.
#[derive(Clone, Debug, Args)]
pub(super) struct TtsArgs {
    #[command(flatten)]
    listen: ListenArgs,
    /// What speaks
    #[arg(long, value_enum, default_value_t = EngineArg::Flite)]
    engine: EngineArg,
    /// Voice of espeak-ng, for example `en-us`
    #[arg(long, value_name = "NAME")]
    voice: Option<String>,
}

/// Arguments of `cotenant worker ballast`.
#[derive(Clone, Debug, Args)]
pub(super) struct BallastArgs {
    /// How much memory to take, for example `400MiB`
    #[arg(value_name = "SIZE", value_parser = quantity::size)]
    bytes: Bytes,
    /// How much per second, for example `200MiB`; as fast as it goes without
    #[arg(long, value_name = "SIZE", value_parser = quantity::size)]
    rate: Option<Bytes>,
    /// Seconds to hold it; until SIGTERM without
    #[arg(long, value_name = "SECONDS")]
    hold: Option<u64>,
}

/// Runs a worker to its end and says on stderr what went wrong.
#[must_use]
pub(super) fn run(arguments: WorkerArgs) -> ExitCode {
    let result = match arguments.command {
        WorkerCommand::Asr(arguments) => run_asr(&AsrOptions {
            listen: arguments.listen.endpoint(),
            vocabulary: arguments.vocabulary.into(),
            grammar: arguments.grammar,
            model_dir: arguments.model_dir,
        }),
        WorkerCommand::Tts(arguments) => run_tts(&TtsOptions {
            listen: arguments.listen.endpoint(),
            engine: arguments.engine.into(),
            voice: arguments.voice,
        }),
        WorkerCommand::Ballast(arguments) => run_ballast(&BallastOptions {
            bytes: arguments.bytes,
            rate: arguments.rate,
            hold: arguments.hold.map(Duration::from_secs),
        }),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::FAILURE
        }
    }
}

impl ListenArgs {
    fn endpoint(self) -> Endpoint {
        match (self.uri, self.socket) {
            (Some(uri), _) => uri,
            // clap demands one of the two.
            (None, socket) => Endpoint::Unix(socket.unwrap_or_else(|| Path::new("").to_owned())),
        }
    }
}

/// Names of vocabularies on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum VocabularyArg {
    Grammar,
    Open,
}

impl From<VocabularyArg> for Vocabulary {
    fn from(argument: VocabularyArg) -> Self {
        match argument {
            VocabularyArg::Grammar => Self::Grammar,
            VocabularyArg::Open => Self::Open,
        }
    }
}

/// Names of engines on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum EngineArg {
    EspeakNg,
    Flite,
}

impl From<EngineArg> for TtsEngine {
    fn from(argument: EngineArg) -> Self {
        match argument {
            EngineArg::EspeakNg => Self::EspeakNg,
            EngineArg::Flite => Self::Flite,
        }
    }
}

fn report(error: &VerbError) {
    let mut text = format!("error: {error}\n");
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!("  caused by: {error}\n"));
        cause = error.source();
    }
    if let Some(hint) = error.hint() {
        text.push_str(&format!("hint: {hint}\n"));
    }
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}
