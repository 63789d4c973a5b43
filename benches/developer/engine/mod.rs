//! `developer engine`: the engine on models of random weights, and against references.
//!
//! It includes the sections of `cotenant bench engine`, so that both are measured in the same rounds.

mod choice;
mod chunks;
mod context;
mod elastic;
mod limit;
mod logits;
mod perplexity;
mod predict;
mod ratios;
pub(crate) mod shape;

use std::{
    ops::{Deref, DerefMut},
    path::PathBuf,
};

use clap::ValueEnum;
use cotenant::{
    cli::{
        Output,
        bench::{
            engine::{Bench, EngineSettings, Section as ProductSection, measure},
            load::Reading,
        },
        exit::{self, CliError},
        output,
        stage::TemporaryFolder,
    },
    units::Bytes,
};

use self::{
    ratios::Ratios,
    shape::{SEED, ShapeName, TypeName, written_model},
};

#[cfg(test)]
pub(crate) use self::{
    logits::tests as logits_tests, perplexity::tests as perplexity_tests,
    ratios::tests as ratios_tests,
};

/// What to measure, and how.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct EngineArgs {
    /// Shapes of the models that are written, with random weights, into the folder for temporary files (`TMPDIR`), one
    /// after the other; of several, a table of all ratios to the peer is the end.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [ShapeName::Qwen35Small])]
    shape: Vec<ShapeName>,
    /// Types of their matrices; each shape is measured in each.
    #[arg(long = "type", value_enum, value_delimiter = ',', default_values_t = [TypeName::Q4KM])]
    types: Vec<TypeName>,
    /// A model to measure instead.
    #[arg(long, value_name = "GGUF", conflicts_with_all = ["shape", "types", "seed"])]
    model: Option<PathBuf>,
    /// Seed of its weights: the same seed gives the same file.
    #[arg(long, default_value_t = SEED)]
    seed: u64,
    /// Write the model of `--shape`, `--type` and `--seed` to this new file, and measure nothing.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "only"])]
    write: Option<PathBuf>,
    /// A text for the perplexity of the sections `kv` and `vocabulary`.
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// For the section `vocabulary`: a value of `llm.vocabulary`, a number of tokens or the path of a text.
    #[arg(long, value_name = "COUNT|FILE")]
    vocabulary: Option<String>,
    /// For the section `logits`: llama.cpp's logits, made by `tests/fixtures/reference-shapes`.
    #[arg(long, value_name = "FILE")]
    reference: Option<PathBuf>,
    /// Memory limits of the section `limits`, in percent of the weights.
    #[arg(long, value_delimiter = ',', default_values_t = [90, 50])]
    limit: Vec<u32>,
    /// Only decode, and hold no more than this, in MiB.
    #[arg(long, hide = true)]
    hold_mib: Option<u64>,
    /// Only these sections [default: speed, streaming, elasticity, peer, workspace].
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Section>,
    /// How to measure.
    #[command(flatten)]
    settings: EngineSettings,
}

/// A group of figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Section {
    /// Prefill and decoding, all layers resident.
    Speed,
    /// Decoding with a part of the weights resident.
    Streaming,
    /// Weights and KV given up and taken back.
    Elasticity,
    /// The peer's speed.
    Peer,
    /// The speed of many residencies, predicted and measured.
    Prediction,
    /// The policy's choice of resident layers, against fixed rules.
    Choice,
    /// An engine that can stream, against one that cannot.
    Ability,
    /// Many sheds during decoding and during a prompt (`--sheds`, `--shed-mib`).
    Sheds,
    /// Decoding while another thread occupies one of the processors.
    Neighbour,
    /// The first token before anything is resident.
    FirstToken,
    /// Decoding under a memory limit (`--limit`), the peer too.
    Limits,
    /// The context in smaller types (`--text` for the perplexity), its capacity shrunk and grown (`--kv-mib`).
    Kv,
    /// The prompt of a second turn, over that of the first (`--prompt-max`).
    Turns,
    /// A prompt with nothing resident, in chunks of 128, 256 and 512 tokens.
    Chunks,
    /// A reduced output vocabulary (`--vocabulary`): memory saved, and the cost on a text (`--text`).
    Vocabulary,
    /// Logits beside llama.cpp's of the same model (`--reference`).
    Logits,
    /// Memory that prefill holds.
    Workspace,
}

pub(crate) fn run(args: &EngineArgs, output: Output) -> Result<(), CliError> {
    let failed = |problem: String| CliError::plain(problem, exit::FAILED);
    args.settings.use_instructions()?;
    if let Some(path) = &args.write {
        return shape::write(args, path, output);
    }
    if let Some(hold) = args.hold_mib {
        let (path, _folder) = args.file(args.first()).map_err(failed)?;
        let value = limit::held(args, &path, Bytes::from_mib(hold)).map_err(failed)?;
        return output::write_json(Output::Ndjson, &value);
    }
    let sections: Vec<Section> = Section::value_variants()
        .iter()
        .copied()
        .filter(|section| match args.only.as_slice() {
            [] => matches!(
                section,
                Section::Speed
                    | Section::Streaming
                    | Section::Elasticity
                    | Section::Peer
                    | Section::Workspace
            ),
            only => only.contains(section),
        })
        .collect();
    let mut ratios = Ratios::default();
    for model in args.models() {
        let (path, _folder) = args.file(model).map_err(failed)?;
        let bench = Bench::prepare(&args.settings, &path).map_err(failed)?;
        let mut bench = Workbench { bench, args };
        bench.measure(&sections).map_err(failed)?;
        let report = bench.bench.report();
        report.write(output)?;
        for figure in &report.figures {
            if let Some(peer) = &figure.peer {
                ratios.add(
                    &figure.what,
                    model,
                    (figure.median, peer.median),
                    peer.ratio,
                );
            }
        }
    }
    ratios.write(output)
}

impl EngineArgs {
    /// Returns the models to write, or one for `--model`.
    fn models(&self) -> Vec<(ShapeName, TypeName)> {
        if self.model.is_some() {
            return vec![self.first()];
        }
        self.shape
            .iter()
            .flat_map(|&shape| self.types.iter().map(move |&types| (shape, types)))
            .collect()
    }

    fn first(&self) -> (ShapeName, TypeName) {
        let shape = self
            .shape
            .first()
            .copied()
            .unwrap_or(ShapeName::Qwen35Small);
        (shape, self.types.first().copied().unwrap_or(TypeName::Q4KM))
    }

    /// Returns the file to measure, and its folder.
    fn file(
        &self,
        (shape, types): (ShapeName, TypeName),
    ) -> Result<(PathBuf, Option<TemporaryFolder>), String> {
        if let Some(path) = &self.model {
            return Ok((path.clone(), None));
        }
        let (path, folder) = written_model(shape, types, self.seed)?;
        Ok((path, Some(folder)))
    }
}

/// The product's bench, with settings for further sections.
struct Workbench<'args> {
    bench: Bench<'args>,
    args: &'args EngineArgs,
}

impl<'args> Deref for Workbench<'args> {
    type Target = Bench<'args>;

    fn deref(&self) -> &Self::Target {
        &self.bench
    }
}

impl DerefMut for Workbench<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.bench
    }
}

impl Workbench<'_> {
    fn measure(&mut self, sections: &[Section]) -> Result<(), String> {
        self.begin()?;
        for round in 1..=self.settings.rounds {
            let reading = Reading::now();
            sections
                .iter()
                .try_for_each(|section| self.section(*section))?;
            self.end_round(round, &reading);
        }
        if sections.contains(&Section::Workspace) {
            self.workspace()?;
        }
        Ok(())
    }

    fn section(&mut self, section: Section) -> Result<(), String> {
        match section {
            Section::Speed => measure(&mut self.bench, ProductSection::Speed),
            Section::Streaming => measure(&mut self.bench, ProductSection::Streaming),
            Section::Elasticity => measure(&mut self.bench, ProductSection::Elasticity),
            Section::Peer => measure(&mut self.bench, ProductSection::Peer),
            Section::Sheds => measure(&mut self.bench, ProductSection::Sheds),
            Section::Workspace => Ok(()),
            Section::Prediction => self.prediction(),
            Section::Choice => self.choice(),
            Section::Ability => self.ability(),
            Section::Neighbour => self.neighbour(),
            Section::FirstToken => self.first_token(),
            Section::Limits => self.limits(),
            Section::Kv => self.context(),
            Section::Turns => self.turns(),
            Section::Chunks => self.chunks(),
            Section::Vocabulary => self.vocabulary(),
            Section::Logits => self.logits(),
        }
    }
}
