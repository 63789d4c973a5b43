//! `cotenant catalogue`: common models by board, with the context that fits.
//!
//! Shapes come from published configurations; everything else is computed as in `plan`.

use serde_json::{Value, json};

use super::{
    device::Device,
    forecast::{Forecast, Stack},
};
use crate::{
    Global, Output,
    exit::{self, CliError},
    output::{self, Column, Table},
};
use cotenant_config::Config;
use cotenant_engine::{
    hugging_face::inspect_shape,
    spec::Architecture,
    synthetic::{Synthetic, TypeMix},
};
use cotenant_policy::params::EngineParams;
use cotenant_units::Tokens;

/// Arguments of `catalogue`.
#[derive(Clone, Debug, clap::Args)]
pub struct CatalogueArgs {
    /// Board, by name or file. Default: all known boards.
    #[arg(long, value_name = "NAME|FILE")]
    device: Option<String>,
    /// Type of the weights: `q4_k_m`, `iq4_xs`, `iq4_nl`, `mxfp4`, `mxfp4_moe`, `q4_0`, `q5_k`, `q6_k`, `q8_0`, `f16` or `bf16`.
    #[arg(long, value_name = "TYPE", value_parser = weights, default_value = "q4_k_m")]
    weights: TypeMix,
}

/// Prints the longest context and the speed of each model on each board.
pub(crate) fn run(global: &Global, args: &CatalogueArgs) -> Result<(), CliError> {
    let devices = match &args.device {
        Some(name) => vec![Device::named(name)?],
        None => Device::boards().collect(),
    };
    let defaults =
        Config::parse("").map_err(|error| CliError::plain(error.to_string(), exit::FAILED))?;
    let mut table = Table::new(
        [
            Column::Text("MODEL"),
            Column::Text("DEVICE"),
            Column::Figure("MEMORY"),
            Column::Figure("CONTEXT"),
            Column::Figure("TOKENS/S"),
            Column::Text("NOTE"),
        ]
        .to_vec(),
    );
    let mut entries = Vec::new();
    for (name, model) in models(args.weights) {
        let inspected = inspect_shape(&model, THREADS)
            .map_err(|error| CliError::failed(format!("cannot plan {name}"), error))?;
        for device in &devices {
            let stack = Stack::alone(
                device.memory,
                defaults.budget.reserve_of(device.memory),
                EngineParams::default(),
            );
            let forecast = Forecast::new(device, &stack, &inspected).map_err(|error| {
                CliError::failed(format!("cannot plan {name} on {}", device.name), error)
            })?;
            let (context, note) = match (forecast.context_resident, forecast.context_streamed) {
                (Tokens::ZERO, Tokens::ZERO) => (Tokens::ZERO, "does not fit"),
                (Tokens::ZERO, streamed) => (streamed, "layers are streamed"),
                (resident, _) if resident == inspected.shape.context_max => {
                    (resident, "the model's own limit")
                }
                (resident, _) => (resident, ""),
            };
            let speed = forecast
                .modes
                .first()
                .map_or([0; 3], |mode| mode.milli_tokens_per_s);
            table.row([
                name.to_owned(),
                device.name.clone(),
                forecast.llm.total.to_string(),
                context.to_string(),
                format!("{}.{}", speed[1] / 1000, speed[1] % 1000 / 100),
                note.to_owned(),
            ]);
            entries.push(json!({
                "model": name,
                "device": device.name,
                "bytesAt4096Tokens": forecast.llm.total,
                "contextTokens": context,
                "resident": forecast.context_resident > Tokens::ZERO,
                "milliTokensPerSecond": speed,
            }));
        }
    }
    match global.output {
        Output::Table => output::write(&format!(
            "{}memory at 4096 tokens; context beside no workers; speed ± 50 %, not measured on these boards\n",
            table.render()
        )),
        format => output::write_json(format, &Value::Array(entries)),
    }
}

pub(super) fn weights(text: &str) -> Result<TypeMix, String> {
    TypeMix::named(&text.to_ascii_lowercase()).ok_or_else(|| {
        "not a type of weights; known are q4_k_m, iq4_xs, iq4_nl, mxfp4, mxfp4_moe, q4_0, q5_k, q6_k, q8_0, f16 \
         and bf16"
            .to_owned()
    })
}

/// Returns the shapes according to published configurations.
fn models(types: TypeMix) -> Vec<(&'static str, Synthetic)> {
    let llama = Synthetic::llama_3_2_1b(types, 0);
    let qwen3 = Synthetic::qwen3_0_6b(types, 0);
    vec![
        ("Qwen3-0.6B", qwen3.clone()),
        ("Qwen3.5-0.8B", Synthetic::qwen35_0_8b(types, 0)),
        ("Llama-3.2-1B", llama.clone()),
        (
            "Llama-3.2-3B",
            Synthetic {
                layers: 28,
                width: 3072,
                heads: 24,
                head_dim: 128,
                rotary: 128,
                ..llama.clone()
            },
        ),
        (
            "Qwen3-4B",
            Synthetic {
                layers: 36,
                width: 2560,
                feed_forward: 9728,
                heads: 32,
                ..qwen3.clone()
            },
        ),
        ("Qwen3.5-4B", Synthetic::qwen35_4b(types, 0)),
        (
            "Gemma-3-4B",
            Synthetic {
                architecture: Architecture::Gemma3,
                layers: 34,
                width: 2560,
                feed_forward: 10_240,
                heads: 8,
                kv_heads: 4,
                head_dim: 256,
                rotary: 256,
                windows: (1024, 6),
                vocabulary: 262_144,
                context_max: 131_072,
                ..qwen3.clone()
            },
        ),
        (
            "Qwen2.5-7B",
            Synthetic {
                architecture: Architecture::Qwen2,
                layers: 28,
                width: 3584,
                feed_forward: 18_944,
                heads: 28,
                kv_heads: 4,
                vocabulary: 152_064,
                context_max: 32_768,
                tied: false,
                ..qwen3.clone()
            },
        ),
        (
            "Llama-3.1-8B",
            Synthetic {
                layers: 32,
                width: 4096,
                feed_forward: 14_336,
                head_dim: 128,
                rotary: 128,
                tied: false,
                ..llama
            },
        ),
        (
            "Qwen3-8B",
            Synthetic {
                layers: 36,
                width: 4096,
                feed_forward: 12_288,
                heads: 32,
                tied: false,
                ..qwen3.clone()
            },
        ),
        ("gpt-oss-20b", Synthetic::gpt_oss_20b(types, 0)),
        ("Qwen3-30B-A3B", Synthetic::qwen3_30b_a3b(types, 0)),
        ("Qwen3.6-35B-A3B", Synthetic::qwen35_35b_a3b(types, 0)),
        (
            "Qwen3-14B",
            Synthetic {
                layers: 40,
                width: 5120,
                feed_forward: 17_408,
                heads: 40,
                tied: false,
                ..qwen3
            },
        ),
    ]
}

/// Half the cores of a board with eight.
const THREADS: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use cotenant_units::Bytes;

    #[test]
    fn models_of_the_catalogue_have_the_size_of_their_names() {
        for (name, model) in models(TypeMix::Q4KM) {
            let inspected = inspect_shape(&model, 1).unwrap();
            let elements: u64 = inspected.tensors.iter().map(|group| group.elements).sum();
            let parts = name
                .split('-')
                .filter_map(|part| part.strip_suffix(['B', 'b']));
            let named: f64 = parts.flat_map(str::parse).next().unwrap();
            #[expect(clippy::cast_precision_loss, reason = "for a ratio")]
            let ratio = elements as f64 / (named * 1e9);
            assert!((0.92..1.25).contains(&ratio), "{name}: {elements}");
        }
    }

    /// Published for this model at four bits on an Orin NX 16 GB: 6113 MB with TensorRT, including context and buffers.
    #[test]
    fn qwen3_5_4b_takes_half_of_what_was_published_for_another_engine() {
        let device = Device::named("orin-nx-16g").unwrap();
        let stack = Stack::alone(
            device.memory,
            Bytes::from_mib(1252),
            EngineParams::default(),
        );
        let inspected = inspect_shape(&Synthetic::qwen35_4b(TypeMix::Q4KM, 0), THREADS).unwrap();
        let forecast = Forecast::new(&device, &stack, &inspected).unwrap();
        let total = forecast.llm.total.whole_mib();
        assert!((2600..3200).contains(&total), "{total} MiB");
        assert_eq!(forecast.context_resident, Tokens::new(262_144));
    }
}
