//! `cotenant bench engine`: speed, memory and elasticity with the user's own model.
//!
//! All figures are measured alternately in one run: each round takes every figure once, including the peer's, so that
//! drift of the machine's speed favours neither. A model whose streamed and resident logits differ is not measured.

mod elastic;
mod report;
mod settings;
mod streaming;
mod subject;

use std::path::PathBuf;

use clap::ValueEnum;

pub use self::{
    report::{TOKENS, Values, mib, percent},
    settings::{EngineSettings, OpenModel},
    subject::{Bench, count, file_bytes, spread},
};
use super::load::Reading;
use crate::{
    Output,
    exit::{self, CliError},
    progress::Progress,
};
pub use cotenant_units::causes::in_one_line;

/// What to measure, and how.
#[derive(Clone, Debug, clap::Args)]
pub struct EngineArgs {
    /// GGUF model to measure.
    #[arg(long, value_name = "GGUF")]
    pub model: PathBuf,
    /// Only these sections [default: speed, streaming, elasticity, peer, workspace].
    #[arg(long, value_enum, value_delimiter = ',')]
    pub only: Vec<Section>,
    /// How to measure.
    #[command(flatten)]
    pub settings: EngineSettings,
}

/// A group of figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Section {
    /// Prefill and decoding, all layers resident.
    Speed,
    /// Decoding with part of the weights resident.
    Streaming,
    /// Shed and regrowth of weights and KV capacity.
    Elasticity,
    /// Speed of llama.cpp.
    Peer,
    /// Many sheds during decoding and during a prompt (`--sheds`, `--shed-mib`).
    Sheds,
    /// Workspace of prefill.
    Workspace,
}

/// Runs the benchmark and prints its figures.
///
/// # Errors
/// If the model cannot be loaded or computed, is not exact, or the peer fails.
pub(super) fn run(args: &EngineArgs, output: Output) -> Result<(), CliError> {
    args.settings.use_instructions()?;
    let sections: Vec<Section> = Section::value_variants()
        .iter()
        .copied()
        .filter(|section| match args.only.as_slice() {
            [] => *section != Section::Sheds,
            only => only.contains(section),
        })
        .collect();
    Bench::prepare(&args.settings, &args.model)
        .and_then(|mut bench| {
            bench.begin()?;
            let (mut progress, rounds) = (Progress::new(), u64::from(bench.settings.rounds));
            for round in 1..=bench.settings.rounds {
                progress.show(u64::from(round - 1), rounds, "measuring");
                let reading = Reading::now();
                sections
                    .iter()
                    .try_for_each(|section| measure(&mut bench, *section))?;
                bench.end_round(round, &reading);
            }
            if sections.contains(&Section::Workspace) {
                bench.workspace()?;
            }
            Ok(bench.report())
        })
        .map_err(|problem| CliError::plain(problem, exit::FAILED))?
        .write(output)
}

/// Measures the figures of a section once.
///
/// # Errors
/// If the model or the peer fails.
pub fn measure(bench: &mut Bench<'_>, section: Section) -> Result<(), String> {
    match section {
        Section::Elasticity => bench.elasticity(),
        Section::Peer => bench.ask_peer(),
        Section::Speed => bench.speed(),
        Section::Streaming => bench.streaming(),
        Section::Sheds => {
            bench.sheds()?;
            bench.prompt_sheds()
        }
        Section::Workspace => Ok(()),
    }
}
