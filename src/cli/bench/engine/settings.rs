//! Settings of engine measurements.

use std::path::{Path, PathBuf};

use crate::exit::{self, CliError};
use cotenant_engine::{
    LoadError, Model, ModelOptions, Sayable, arena::Backing, backend::cpu::use_instructions,
};
use cotenant_policy::{
    compute::{Compute, DeviceChoice, DeviceSettings},
    residency::EnginePlan,
};
use cotenant_probe::{ProbeRoot, cores::usable_cores};
use cotenant_units::causes::in_one_line;

/// Returns the default of the daemon and of `calibrate`.
fn threads_here() -> u16 {
    u16::try_from(usable_cores(&ProbeRoot::default())).unwrap_or(1)
}

/// How to measure, whatever the model.
#[derive(Clone, Debug, clap::Args)]
pub struct EngineSettings {
    /// Number of compute threads [default: one per physical core, as in the daemon].
    #[arg(long, default_value_t = threads_here(), hide_default_value = true, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,
    /// Instruction set of the kernels: `baseline`, `avx2`, `avx-vnni`, `avx512` or `avx512-bf16`, on arm64 `baseline`, `dotprod` or `i8mm`
    /// [default: the best of this machine].
    #[arg(long, value_name = "NAME")]
    pub instructions: Option<String>,
    /// Compute on the GPU; llama.cpp then runs with `-ngl 99`.
    #[arg(long, conflicts_with = "instructions")]
    pub cuda: bool,
    /// Number of rounds; each measures every figure once.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Tokens per prefill chunk.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub chunk: u32,
    /// Tokens generated per measurement of decoding, with all layers resident.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub generate: u32,
    /// Tokens in the KV cache for the second measurement of decoding.
    #[arg(long, default_value_t = 1024)]
    pub depth: u32,
    /// KV capacity that is shed and regrown, in MiB.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..))]
    pub kv_mib: u64,
    /// Longest prompt for which the workspace is measured, in tokens.
    #[arg(long, default_value_t = 2048)]
    pub prompt_max: u32,
    /// Sheds per round in the section `sheds`.
    #[arg(long, default_value_t = 20)]
    pub sheds: u32,
    /// Minimum size of each of these sheds, in MiB.
    #[arg(long, default_value_t = 256)]
    pub shed_mib: u64,
    /// `llama-bench` of llama.cpp, measured alternately on the same file.
    #[arg(long, value_name = "PROGRAM")]
    pub peer: Option<PathBuf>,
}

impl EngineSettings {
    /// Selects the kernels of `--instructions`.
    ///
    /// # Errors
    /// If this machine has no kernels of that name.
    pub fn use_instructions(&self) -> Result<(), CliError> {
        let Some(name) = &self.instructions else {
            return Ok(());
        };
        use_instructions(name).map_err(|names| {
            CliError::plain(
                format!(
                    "cannot use the instructions `{name}`: this machine has kernels for {}",
                    names.join(", ")
                ),
                exit::FAILED,
            )
        })
    }

    fn compute(&self) -> Compute {
        let choice = if self.cuda {
            DeviceChoice::Cuda
        } else {
            DeviceChoice::Cpu
        };
        Compute {
            threads: usize::from(self.threads),
            device: DeviceSettings {
                choice,
                ..DeviceSettings::default()
            },
        }
    }

    /// Opens a model with a context as long as its plan's KV capacity, which is populated as tokens arrive.
    ///
    /// # Errors
    /// If it cannot be loaded.
    pub fn opened(
        &self,
        path: &Path,
        plan: &EnginePlan,
        vocabulary: Option<Sayable>,
        open: OpenModel,
    ) -> Result<Model, String> {
        let options = ModelOptions {
            compute: self.compute(),
            name: None,
            context: Some(plan.kv_capacity),
            conversations: 0,
            drafts: true,
            keeps_conversations: false,
            kv_backing: Backing::OnTouch,
            vocabulary,
            helper: None,
        };
        open(path, plan, &options).map_err(|error| in_one_line(&error))
    }
}

/// [`Model::open`], or a replacement.
pub type OpenModel = fn(&Path, &EnginePlan, &ModelOptions) -> Result<Model, LoadError>;
