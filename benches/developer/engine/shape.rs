//! Models of random weights by name, for measurement or as a file.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use clap::ValueEnum;
use serde_json::json;

use super::EngineArgs;
use crate::weights::Weights as _;
use cotenant::{
    cli::{
        Output,
        bench::engine::file_bytes,
        exit::{self, CliError},
        output,
        stage::{TemporaryFolder, demo_model},
    },
    engine::{
        gguf::GgmlDType,
        spec::Architecture,
        synthetic::{Gemma4, Synthetic, TypeMix},
    },
};

/// Shapes of public models, and small ones of each family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ShapeName {
    /// Qwen3.5-0.8B.
    #[value(name = "qwen35-0.8b")]
    Qwen35Small,
    /// The same with a draft block.
    #[value(name = "qwen35-0.8b-drafts")]
    Qwen35SmallDrafts,
    /// Qwen3.5-4B.
    #[value(name = "qwen35-4b")]
    Qwen35Large,
    /// Qwen3-0.6B.
    #[value(name = "qwen3-0.6b")]
    Qwen3,
    /// Qwen3-30B-A3B, 18 GB in Q4_K_M.
    #[value(name = "qwen3-30b-a3b")]
    Qwen3Moe,
    /// Eight of its 48 layers and a vocabulary of 32,000 tokens.
    #[value(name = "qwen3-a3b-8")]
    Qwen3MoeSmall,
    /// Qwen3.6-35B-A3B, 20 GB in Q4_K_M.
    #[value(name = "qwen35-35b-a3b")]
    Qwen35Moe,
    /// Eight of its 40 layers and a vocabulary of 32,000 tokens.
    #[value(name = "qwen35-a3b-8")]
    Qwen35MoeSmall,
    /// Llama-3.2-1B.
    #[value(name = "llama-3.2-1b")]
    Llama,
    /// Gemma 3 1B, whose rows are no multiple of 256.
    #[value(name = "gemma3-1b")]
    Gemma3,
    /// Gemma 4 E2B with a vocabulary of 32,000 tokens.
    #[value(name = "gemma4-e2b-32k")]
    Gemma4,
    /// gpt-oss-20b, 12 GB in MXFP4_MOE.
    #[value(name = "gpt-oss-20b")]
    GptOss,
    /// Six of its 24 layers and a vocabulary of 32,000 tokens.
    #[value(name = "gpt-oss-6")]
    GptOssSmall,
    /// Granite 4.0 H 1B.
    #[value(name = "granite-4.0-h-1b")]
    GraniteHybrid,
    /// Qwen2.5-0.5B, whose rows are no multiple of 256.
    #[value(name = "qwen2.5-0.5b")]
    Qwen25,
    /// The demo model that comes with this program, with its own weights.
    #[value(name = "demo")]
    Demo,
    /// Four layers, 256 wide, of the family Gemma 2, as tests use it.
    TinyGemma2,
    /// The same of Gemma 3.
    TinyGemma3,
    /// The same of Gemma 4.
    TinyGemma4,
    /// The same of EXAONE 4.
    TinyExaone4,
    /// The same of gpt-oss.
    TinyGptOss,
    /// The same of Granite.
    TinyGranite,
    /// The same of Granite 4 hybrid.
    TinyGraniteHybrid,
    /// The same of Granite 4 hybrid with a mixture of experts.
    TinyGraniteHybridMoe,
    /// The same of LFM2.
    #[value(name = "tiny-lfm2")]
    TinyLfm2,
    /// The same of LFM2 with a mixture of experts.
    TinyLfm2Moe,
    /// The same of Llama.
    TinyLlama,
    /// The same of Ministral 3.
    TinyMistral3,
    /// The same of Nemotron-H.
    TinyNemotronH,
    /// The same of Nemotron-H with a mixture of experts.
    TinyNemotronHMoe,
    /// The same of OLMo 3.
    TinyOlmo2,
    /// The same of Phi-3.
    TinyPhi3,
    /// The same of Qwen2.
    TinyQwen2,
    /// The same of Qwen3.
    TinyQwen3,
    /// The same of Qwen3 with a mixture of experts.
    TinyQwen3Moe,
    /// The same of Qwen3.5.
    TinyQwen35,
    /// The same with a draft block.
    #[value(name = "tiny-qwen35-drafts")]
    TinyQwen35Drafts,
    /// The same of Qwen3.5 with a mixture of experts.
    TinyQwen35Moe,
    /// The same of Qwen3-VL's text part.
    #[value(name = "tiny-qwen3vl")]
    TinyQwen3Vl,
    /// The same of SmolLM3.
    #[value(name = "tiny-smollm3")]
    TinySmolLm3,
    /// The same of StableLM.
    #[value(name = "tiny-stablelm")]
    TinyStableLm,
}

/// Types of the matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TypeName {
    /// All Q8_0.
    #[value(name = "q8_0")]
    Q8_0,
    /// As llama.cpp mixes Q4_K and Q6_K.
    #[value(name = "q4_k_m")]
    Q4KM,
    /// All BF16.
    #[value(name = "bf16")]
    BF16,
    /// All F16.
    #[value(name = "f16")]
    F16,
    /// All F32.
    #[value(name = "f32")]
    F32,
    /// All Q2_K.
    #[value(name = "q2_k")]
    Q2K,
    /// All Q3_K.
    #[value(name = "q3_k")]
    Q3K,
    /// All Q4_0.
    #[value(name = "q4_0")]
    Q4_0,
    /// All Q4_1.
    #[value(name = "q4_1")]
    Q4_1,
    /// All Q4_K.
    #[value(name = "q4_k")]
    Q4K,
    /// All Q5_0.
    #[value(name = "q5_0")]
    Q5_0,
    /// All Q5_1.
    #[value(name = "q5_1")]
    Q5_1,
    /// All Q5_K.
    #[value(name = "q5_k")]
    Q5K,
    /// All Q6_K.
    #[value(name = "q6_k")]
    Q6K,
    /// All IQ4_NL.
    #[value(name = "iq4_nl")]
    IQ4NL,
    /// All IQ4_XS.
    #[value(name = "iq4_xs")]
    IQ4XS,
    /// All MXFP4.
    #[value(name = "mxfp4")]
    MXFP4,
    /// Experts in MXFP4, all others in Q8_0.
    #[value(name = "mxfp4_moe")]
    MXFP4Moe,
}

impl TypeName {
    const fn mix(self) -> TypeMix {
        TypeMix::All(match self {
            Self::MXFP4Moe => return TypeMix::MXFP4Moe,
            Self::Q4KM => return TypeMix::Q4KM,
            Self::BF16 => GgmlDType::BF16,
            Self::F16 => GgmlDType::F16,
            Self::F32 => GgmlDType::F32,
            Self::Q2K => GgmlDType::Q2K,
            Self::Q3K => GgmlDType::Q3K,
            Self::Q4_0 => GgmlDType::Q4_0,
            Self::Q4_1 => GgmlDType::Q4_1,
            Self::Q4K => GgmlDType::Q4K,
            Self::Q5_0 => GgmlDType::Q5_0,
            Self::Q5_1 => GgmlDType::Q5_1,
            Self::Q5K => GgmlDType::Q5K,
            Self::Q6K => GgmlDType::Q6K,
            Self::IQ4NL => GgmlDType::IQ4NL,
            Self::IQ4XS => GgmlDType::IQ4XS,
            Self::MXFP4 => GgmlDType::MXFP4,
            Self::Q8_0 => GgmlDType::Q8_0,
        })
    }
}

impl ShapeName {
    fn write(self, types: TypeName, seed: u64, path: &Path) -> io::Result<()> {
        let mix = types.mix();
        let tiny = |architecture| Synthetic::tiny(architecture, mix, seed);
        let model = match self {
            Self::Demo => return fs::copy(demo_model()?, path).map(drop),
            Self::Qwen35Small => Synthetic::qwen35_0_8b(mix, seed),
            Self::Qwen35SmallDrafts => Synthetic {
                nextn: 1,
                ..Synthetic::qwen35_0_8b(mix, seed)
            },
            Self::Qwen35Large => Synthetic::qwen35_4b(mix, seed),
            Self::Qwen3 => Synthetic::qwen3_0_6b(mix, seed),
            Self::Qwen3Moe => Synthetic::qwen3_30b_a3b(mix, seed),
            Self::Qwen3MoeSmall => Synthetic {
                layers: 8,
                vocabulary: 32_000,
                ..Synthetic::qwen3_30b_a3b(mix, seed)
            },
            Self::Qwen35Moe => Synthetic::qwen35_35b_a3b(mix, seed),
            Self::Qwen35MoeSmall => Synthetic {
                layers: 8,
                vocabulary: 32_000,
                ..Synthetic::qwen35_35b_a3b(mix, seed)
            },
            Self::Llama => Synthetic::llama_3_2_1b(mix, seed),
            Self::Gemma3 => gemma3_1b(mix, seed),
            Self::Gemma4 => gemma4_e2b(mix, seed),
            Self::GptOss => Synthetic::gpt_oss_20b(mix, seed),
            Self::GptOssSmall => Synthetic {
                layers: 6,
                vocabulary: 32_000,
                ..Synthetic::gpt_oss_20b(mix, seed)
            },
            Self::GraniteHybrid => granite_4_h_1b(mix, seed),
            Self::Qwen25 => qwen2_5_0_5b(mix, seed),
            Self::TinyExaone4 => tiny(Architecture::Exaone4),
            Self::TinyGemma2 => tiny(Architecture::Gemma2),
            Self::TinyGemma3 => tiny(Architecture::Gemma3),
            Self::TinyGemma4 => tiny(Architecture::Gemma4),
            Self::TinyGptOss => tiny(Architecture::GptOss),
            Self::TinyGranite => tiny(Architecture::Granite),
            Self::TinyGraniteHybrid => tiny(Architecture::GraniteHybrid),
            Self::TinyGraniteHybridMoe => Synthetic {
                experts: (8, 2),
                ..tiny(Architecture::GraniteHybrid)
            },
            Self::TinyLfm2 => tiny(Architecture::Lfm2),
            Self::TinyLfm2Moe => tiny(Architecture::Lfm2Moe),
            Self::TinyLlama => tiny(Architecture::Llama),
            Self::TinyMistral3 => tiny(Architecture::Mistral3),
            Self::TinyNemotronH => tiny(Architecture::NemotronH),
            Self::TinyNemotronHMoe => tiny(Architecture::NemotronHMoe),
            Self::TinyOlmo2 => tiny(Architecture::Olmo2),
            Self::TinyPhi3 => tiny(Architecture::Phi3),
            Self::TinyQwen2 => tiny(Architecture::Qwen2),
            Self::TinyQwen3 => tiny(Architecture::Qwen3),
            Self::TinyQwen3Moe => tiny(Architecture::Qwen3Moe),
            Self::TinyQwen35 => tiny(Architecture::Qwen35),
            Self::TinyQwen35Drafts => Synthetic {
                nextn: 1,
                ..tiny(Architecture::Qwen35)
            },
            Self::TinyQwen35Moe => tiny(Architecture::Qwen35Moe),
            Self::TinyQwen3Vl => tiny(Architecture::Qwen3Vl),
            Self::TinySmolLm3 => tiny(Architecture::SmolLm3),
            Self::TinyStableLm => tiny(Architecture::StableLm),
        };
        model.write(path)
    }
}

/// Default seed of the weights, identical on every machine.
pub(crate) const SEED: u64 = 1;

/// Writes a model of a shape to a separate folder.
pub(crate) fn written_model(
    shape: ShapeName,
    types: TypeName,
    seed: u64,
) -> Result<(PathBuf, TemporaryFolder), String> {
    let folder = TemporaryFolder::new("cotenant-model")
        .map_err(|error| format!("cannot make a temporary folder: {error}"))?;
    let path = folder.path().join("model.gguf");
    shape
        .write(types, seed, &path)
        .map_err(|error| format!("cannot write `{}`: {error}", path.display()))?;
    Ok((path, folder))
}

/// Writes the model selected by `args` to `path`, and reports its size. An existing file is left unchanged.
pub(crate) fn write(args: &EngineArgs, path: &Path, output: Output) -> Result<(), CliError> {
    let refused = |error: io::Error| {
        let why = match error.kind() {
            io::ErrorKind::AlreadyExists => "there is a file of this name already".to_owned(),
            _ => error.to_string(),
        };
        CliError::plain(
            format!("cannot write `{}`: {why}", path.display()),
            exit::FAILED,
        )
    };
    if args.shape.len() > 1 || args.types.len() > 1 {
        return Err(CliError::plain(
            "`--write` takes one shape and one type".to_owned(),
            exit::USAGE,
        ));
    }
    drop(File::create_new(path).map_err(refused)?);
    let (shape, types) = args.first();
    if let Err(error) = shape.write(types, args.seed, path) {
        // A partial model is useless, and may have filled the disk.
        let _ = fs::remove_file(path);
        return Err(refused(error));
    }
    let bytes = file_bytes(path);
    match output {
        Output::Table => output::write(&format!("wrote `{}`: {bytes}\n", path.display())),
        Output::Json | Output::Ndjson => {
            output::write_json(output, &json!({ "path": path, "bytes": bytes }))
        }
    }
}

/// Returns the shape of Gemma 3 1B, whose rows are not a multiple of 256.
fn gemma3_1b(types: TypeMix, seed: u64) -> Synthetic {
    Synthetic {
        architecture: Architecture::Gemma3,
        layers: 26,
        width: 1152,
        feed_forward: 6912,
        heads: 4,
        kv_heads: 1,
        head_dim: 256,
        rotary: 256,
        rotary_base: 1e6,
        // As in the references of llama.cpp.
        windows: (6, 2),
        recurrent: (0, 0, 0),
        experts: (0, 0),
        gemma4: Gemma4::NONE,
        vocabulary: 262_144,
        context_max: 32_768,
        tied: true,
        nextn: 0,
        types,
        seed,
    }
}

/// Returns the shape of Gemma 4 E2B with a vocabulary of 32,000 tokens.
fn gemma4_e2b(types: TypeMix, seed: u64) -> Synthetic {
    Synthetic {
        architecture: Architecture::Gemma4,
        layers: 35,
        width: 1536,
        feed_forward: 6144,
        heads: 8,
        head_dim: 512,
        rotary: 512,
        windows: (512, 5),
        gemma4: Gemma4 {
            layer_inputs: 256,
            borrowing: 20,
            doubled: true,
            local_kv_heads: 1,
        },
        vocabulary: 32_000,
        context_max: 131_072,
        ..gemma3_1b(types, seed)
    }
}

/// Returns the shape of Granite 4.0 H 1B, with its four attention layers at equal distances.
fn granite_4_h_1b(types: TypeMix, seed: u64) -> Synthetic {
    Synthetic {
        architecture: Architecture::GraniteHybrid,
        layers: 40,
        width: 1536,
        feed_forward: 4096,
        heads: 12,
        kv_heads: 4,
        head_dim: 128,
        rotary: 128,
        rotary_base: 10_000.0,
        windows: (0, 10),
        recurrent: (1, 48, 128),
        vocabulary: 100_352,
        context_max: 131_072,
        ..gemma3_1b(types, seed)
    }
}

/// Returns the shape of Qwen2.5-0.5B, whose rows are not a multiple of 256.
fn qwen2_5_0_5b(types: TypeMix, seed: u64) -> Synthetic {
    Synthetic {
        architecture: Architecture::Qwen2,
        layers: 24,
        width: 896,
        feed_forward: 4864,
        heads: 14,
        kv_heads: 2,
        head_dim: 64,
        rotary: 64,
        rotary_base: 1e6,
        windows: (0, 0),
        recurrent: (0, 0, 0),
        experts: (0, 0),
        gemma4: Gemma4::NONE,
        vocabulary: 151_936,
        context_max: 32_768,
        tied: true,
        nextn: 0,
        types,
        seed,
    }
}
