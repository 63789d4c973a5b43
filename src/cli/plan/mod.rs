//! `cotenant plan`: memory and speed of a model and a stack on a device, before any download.
//!
//! Reads headers only. The shape of a model comes from the engine's own layout, plans from the policy, and the order of
//! starts and sheds from the arbiter itself ([`rehearsal`]), so that predictions equal later decisions.

pub(super) mod calibrate;
pub(super) mod catalogue;
mod device;
pub(super) mod disk;
mod forecast;
mod refused;
mod rehearsal;
mod report;
mod svg;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::ExitCode,
};

use self::calibrate::threads_here;
use self::{
    calibrate::Setting,
    catalogue::weights,
    device::Device,
    forecast::{Forecast, Stack},
    refused::{ConfigCause, refused},
    report::print,
};
use super::{
    Global, Output,
    exit::{self, CliError},
    output, quantity,
};
use cotenant_config::{self as config, Config};
use cotenant_daemon::{learned_peaks, sayable, threads};
use cotenant_engine::{
    Engine,
    hugging_face::{inspect_shape, read_config_json, safetensors_beside},
    protocol::Inspected,
    synthetic::TypeMix,
    tensor_group::TensorGroup,
};
use cotenant_policy::{
    kv_type::KvType,
    params::{EngineParams, MachineMemory, Params, ResidencyMode, Scope, WorkerParams},
};
use cotenant_units::{Bytes, Tokens};
use serde_json::Value;

/// Arguments of `plan`.
#[derive(Clone, Debug, clap::Args)]
pub struct PlanArgs {
    /// A GGUF file, or the `config.json` of a Hugging Face repository. Default: `llm.path` of the configuration.
    #[arg(value_name = "MODEL", required_unless_present = "config")]
    model: Option<PathBuf>,
    /// Use budget, LLM settings and workers of this configuration.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Board (`orin-nx-16g`, `orin-nano-8g`, `agx-orin-64g`, `thor`, `rpi5-16g`), or a file. Default: this machine.
    #[arg(long, value_name = "NAME|FILE")]
    device: Option<String>,
    /// A worker and its peak memory, such as `asr=1GiB`, or with its memory at rest, `asr=1GiB:700MiB`. Repeatable.
    #[arg(long = "worker", value_name = "NAME=PEAK[:STEADY]", value_parser = worker)]
    workers: Vec<WorkerParams>,
    /// Context length in tokens. Default: that of the configuration, else 4096.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(64..=1 << 20))]
    context: Option<u32>,
    /// Type of the KV cache: `f16`, `q8` or `q4`.
    #[arg(long, value_name = "TYPE", value_parser = quantity::kv_type())]
    kv_type: Option<KvType>,
    /// Type of the weights for a `config.json`: `q4_k_m`, `iq4_xs`, `iq4_nl`, `mxfp4`, `mxfp4_moe`, `q4_0`, `q5_k`, `q6_k`, `q8_0`,
    /// `f16` or `bf16`.
    #[arg(long, value_name = "TYPE", value_parser = weights, default_value = "q4_k_m")]
    weights: TypeMix,
    /// Reserve, excluded from the budget. Default: that of the configuration, else 8% of the memory.
    #[arg(long, value_name = "SIZE", value_parser = quantity::size)]
    reserve: Option<Bytes>,
    /// Coefficients of this machine, written by `calibrate`.
    #[arg(long, value_name = "FILE", default_value = calibrate::DEFAULT_FILE, conflicts_with = "device")]
    calibration: PathBuf,
    /// Write a bar chart of the memory to this SVG file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// A model's memory and speed on a device.
pub(super) struct Planned {
    device: Device,
    stack: Stack,
    inspected: Inspected,
    forecast: Forecast,
    /// The tensors beside a `config.json`.
    safetensors: Vec<TensorGroup>,
}

/// Prints the plan; exit code 78 if the stack cannot work on the device.
pub(super) fn run(global: &Global, args: &PlanArgs) -> Result<ExitCode, CliError> {
    let device = match &args.device {
        Some(name) => Device::named(name)?,
        None => Device::here(&args.calibration)?,
    };
    let config = args.config.as_deref().map(configuration).transpose()?;
    let model = args.model.clone();
    let model = model.or_else(|| Some(config.as_ref()?.llm.as_ref()?.path.clone()));
    let Some(model) = model else {
        let error = "cannot plan without a model: the configuration has no `llm.path`";
        return Err(CliError::plain(error, exit::USAGE)
            .with_hint("name a GGUF file or a config.json".to_owned()));
    };
    let threads = config
        .as_ref()
        .and_then(|config| config.llm.as_ref())
        .map(threads);
    let inspected = inspect(&model, args, config.as_ref(), threads)?;
    if let Some(context) = args
        .context
        .filter(|context| *context > inspected.shape.context_max.get())
    {
        let most = inspected.shape.context_max;
        eprintln!(
            "note: --context {context} exceeds the model's limit and is reduced to {most} tokens"
        );
    }
    let stack = stack(args, config.as_ref(), &device)?;
    let threads = threads.unwrap_or_else(threads_here);
    let planned = Planned {
        safetensors: safetensors(&model),
        ..Planned::new(device, stack, inspected, threads)?
    };
    if let Some(path) = &args.svg {
        let picture = svg::bar(&planned.device, &planned.stack, &planned.forecast);
        std::fs::write(path, picture).map_err(|error| {
            CliError::failed(format!("cannot write `{}`", path.display()), error)
        })?;
    }
    match global.output {
        Output::Table => output::write(&planned.text())?,
        format => output::write_json(format, &planned.json())?,
    }
    Ok(ExitCode::from(if planned.works() {
        exit::OK
    } else {
        exit::CONFIG
    }))
}

impl Planned {
    /// The plan of an inspected GGUF file alone on this machine, with default settings.
    pub(super) fn here(inspected: Inspected) -> Result<Self, CliError> {
        let device = Device::here(Path::new(calibrate::DEFAULT_FILE))?;
        let defaults =
            Config::parse("").map_err(|error| CliError::plain(error.to_string(), exit::FAILED))?;
        let reserve = defaults.budget.reserve_of(device.memory);
        let stack = Stack::alone(device.memory, reserve, EngineParams::default());
        Self::new(device, stack, inspected, threads_here())
    }

    fn new(
        mut device: Device,
        stack: Stack,
        inspected: Inspected,
        threads: usize,
    ) -> Result<Self, CliError> {
        device.compare(|| Setting::here(&inspected, threads));
        let forecast = Forecast::new(&device, &stack, &inspected)
            .map_err(|error| CliError::failed("cannot plan with these settings", error))?;
        Ok(Self {
            device,
            stack,
            inspected,
            forecast,
            safetensors: Vec::new(),
        })
    }

    /// Whether everything starts.
    pub(super) const fn works(&self) -> bool {
        self.forecast.verdict.works()
    }

    /// Whether it works, in words.
    pub(super) fn verdict(&self) -> String {
        report::verdict(&self.stack, &self.forecast)
    }

    /// The plan for people.
    pub(super) fn text(&self) -> String {
        print(
            &self.device,
            &self.stack,
            &self.inspected,
            &self.forecast,
            &self.safetensors,
        )
    }

    /// The plan for programs.
    pub(super) fn json(&self) -> Value {
        report::json(
            &self.device,
            &self.stack,
            &self.inspected,
            &self.forecast,
            &self.safetensors,
        )
    }
}

/// Returns answer tokens per second on this machine, in thousandths: with all layers resident, and with all streamed.
/// `None` if neither memory nor stored coefficients can be read.
pub(super) fn speeds_here(inspected: &Inspected, threads: usize) -> Option<[u64; 2]> {
    let mut device = Device::here(Path::new(calibrate::DEFAULT_FILE)).ok()?;
    device.compare(|| Setting::here(inspected, threads));
    let shape = &inspected.shape;
    let all: BTreeSet<u32> = (0u32..)
        .zip(&shape.layers)
        .map(|(index, _)| index)
        .collect();
    Some([all, BTreeSet::new()].map(|resident| forecast::speeds(shape, &resident, &device)[1]))
}

fn configuration(path: &Path) -> Result<Config, CliError> {
    config::load(path).map_err(|error| {
        CliError::failed(
            format!("cannot use `{}`", path.display()),
            ConfigCause(error.kind().to_string()),
        )
        .with_hint(error.kind().hints().into_iter().next())
        .with_code(exit::CONFIG)
    })
}

fn is_json(model: &Path) -> bool {
    model
        .extension()
        .is_some_and(|extension| extension == "json")
}

fn safetensors(model: &Path) -> Vec<TensorGroup> {
    if is_json(model) {
        safetensors_beside(model)
    } else {
        Vec::new()
    }
}

fn inspect(
    model: &Path,
    args: &PlanArgs,
    config: Option<&Config>,
    threads: Option<usize>,
) -> Result<Inspected, CliError> {
    let threads = threads.unwrap_or_else(threads_here);
    if is_json(model) {
        let shape = read_config_json(model, args.weights)
            .map_err(|error| CliError::failed(error.to_string(), error.kind))?;
        let mut inspected = inspect_shape(&shape, threads).map_err(|error| refused(&error))?;
        if let Some(name) = model
            .canonicalize()
            .ok()
            .and_then(|path| Some(path.parent()?.file_name()?.to_owned()))
        {
            inspected.shape.name = name.to_string_lossy().into_owned();
        }
        return Ok(inspected);
    }
    let llm = config
        .and_then(|config| config.llm.as_ref())
        .filter(|llm| llm.path == model);
    let vocabulary = llm.and_then(sayable);
    let inspected = Engine::foresee(model, vocabulary.as_ref(), threads);
    let inspected = inspected.map_err(|error| refused(&error))?;
    Ok(inspected
        .keeping_conversations(llm.is_some_and(|llm| llm.keep_conversations))
        .drafting(llm.is_none_or(|llm| llm.drafts)))
}

/// Returns the parameters of policy from arguments and configuration.
fn stack(args: &PlanArgs, config: Option<&Config>, device: &Device) -> Result<Stack, CliError> {
    let mut params = match config {
        Some(config) => config
            .params(&MachineMemory::of(device.memory))
            .map_err(|faults| {
                let faults: Vec<_> = faults.iter().map(ToString::to_string).collect();
                CliError::plain(
                    format!(
                        "cannot use the configuration on {}: {}",
                        device.name,
                        faults.join("; ")
                    ),
                    exit::CONFIG,
                )
            })?,
        None => {
            let defaults = Config::parse("")
                .map_err(|error| CliError::plain(error.to_string(), exit::FAILED))?;
            let reserve = defaults.budget.reserve_of(device.memory);
            Params::for_budget(device.memory, reserve, Scope::Machine)
        }
    };
    if let Some(reserve) = args.reserve {
        let workers = std::mem::take(&mut params.workers);
        params = Params {
            engine: params.engine,
            workers,
            ..Params::for_budget(params.budget.total, reserve, Scope::Machine)
        };
    }
    params.budget.scope = Scope::Machine;
    let engine = params.engine.get_or_insert_with(|| EngineParams {
        conversations: config::CONVERSATIONS,
        ..EngineParams::default()
    });
    if let Some(context) = args.context {
        engine.kv_wanted = Tokens::new(context);
        engine.kv_floor = engine.kv_floor.min(engine.kv_wanted);
    }
    if let Some(kind) = args.kv_type {
        engine.kv_type = kind;
        engine.kv_type_least = engine.kv_type_least.min(kind);
    }
    for added in &args.workers {
        let start_order = u32::try_from(params.workers.len()).unwrap_or(u32::MAX);
        params.workers.retain(|worker| worker.name != added.name);
        let mut added = added.clone();
        added.start.start_order = start_order;
        params.workers.push(added);
    }
    if let Some(config) = config
        && let Ok(peaks) = learned_peaks(&config.state_dir)
    {
        params.peaks = peaks;
    }
    let modes = match config {
        Some(_) => params.engine.as_ref().map(|engine| engine.mode),
        None => None,
    };
    Ok(Stack {
        mode: modes.unwrap_or(ResidencyMode::Balanced),
        params,
    })
}

/// Parses a worker and its peak: `asr=1GiB`, or with its size at rest: `asr=1GiB:700MiB`.
fn worker(text: &str) -> Result<WorkerParams, String> {
    let (name, sizes) = text
        .split_once('=')
        .filter(|(name, _)| !name.is_empty())
        .ok_or_else(|| "not a worker and its peak; write `asr=1GiB`".to_owned())?;
    let (peak, steady) = match sizes.split_once(':') {
        Some((peak, steady)) => (quantity::size(peak)?, quantity::size(steady)?),
        // Inverse of the configuration's default: the peak is 1.25 times the size at rest.
        None => {
            let peak = quantity::size(sizes)?;
            (peak, peak.per_mille(800))
        }
    };
    if steady > peak {
        return Err(format!(
            "holds `{steady}` at rest, above its peak of {peak}"
        ));
    }
    if peak < Bytes::from_kib(4) {
        return Err(format!("`{peak}` is below 4 KiB"));
    }
    Ok(WorkerParams {
        name: name.to_owned(),
        steady: steady.max(Bytes::from_kib(4)),
        peak,
        ..WorkerParams::default()
    })
}
