//! Model shapes from the `config.json` of a Hugging Face repository.
//!
//! The engine computes from GGUF files. The memory of such a file follows from the shape and the types of its weights,
//! so that a model can be planned before it is converted or downloaded.

use std::{
    fs::File,
    io::{self, Read as _},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
};

use nix::sys::memfd::{MFdFlags, memfd_create};
use serde::Deserialize;
use serde_json::Value;

use super::{
    Engine,
    error::{LoadError, LoadErrorKind},
    protocol::Inspected,
    spec::Architecture,
    synthetic::{Gemma4, Synthetic, TypeMix},
    tensor_group::{NamedTensor, TensorGroup},
};
use cotenant_units::Bytes;

/// Error of reading a model's shape from its `config.json`.
#[derive(Debug, thiserror::Error)]
#[error("cannot take the shape of a model from `{path}`")]
pub struct ConfigJsonError {
    /// The file.
    pub path: PathBuf,
    /// The cause.
    #[source]
    pub kind: ConfigJsonErrorKind,
}

/// Fault of a `config.json`.
#[derive(Debug, thiserror::Error)]
pub enum ConfigJsonErrorKind {
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// It is implausibly long.
    #[error("it has more than {limit}")]
    TooLong {
        /// The length limit.
        limit: Bytes,
    },
    /// It is not JSON.
    #[error("it is not JSON")]
    Json(#[source] serde_json::Error),
    /// The engine does not support the family.
    #[error("`model_type` is `{found}`; known are {}", families())]
    Family {
        /// The family.
        found: String,
    },
    /// A dimension is missing or out of range.
    #[error("`{key}` is {value}, {limit}")]
    Dimension {
        /// The key.
        key: &'static str,
        /// The value, or the text for a missing one.
        value: String,
        /// The accepted range.
        limit: String,
    },
}

/// Reads the shape of a model from its `config.json`, for weights of these types.
///
/// # Errors
/// The file cannot be read, or its family is not supported.
pub fn read_config_json(path: &Path, types: TypeMix) -> Result<Synthetic, ConfigJsonError> {
    let error = |kind| ConfigJsonError {
        path: path.to_owned(),
        kind,
    };
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(CONFIG_MAX.get() + 1).read_to_string(&mut text))
        .map_err(|cause| error(cause.into()))?;
    if Bytes::of_len(text.len()) > CONFIG_MAX {
        return Err(error(ConfigJsonErrorKind::TooLong { limit: CONFIG_MAX }));
    }
    shape_of(&text, types).map_err(error)
}

/// Memory of a model of this shape, without weights and without a file.
///
/// # Errors
/// The engine does not support it, or there is no memory for its header.
pub fn inspect_shape(model: &Synthetic, threads: usize) -> Result<Inspected, LoadError> {
    let failed = |source: io::Error| {
        let kind = LoadErrorKind::Allocate {
            what: "the header of a shape".to_owned(),
            bytes: Bytes::from_mib(32),
            source,
        };
        LoadError::new(Path::new("config.json"), kind)
    };
    let file: File = memfd_create("cotenant-shape", MFdFlags::MFD_CLOEXEC)
        .map_err(|errno| failed(errno.into()))?
        .into();
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    file.try_clone()
        .and_then(|file| model.write_hollow(file))
        .map_err(failed)?;
    Engine::inspect_with(&path, None, threads)
}

/// The tensors of `*.safetensors` next to `config`, grouped by purpose, from their headers. Unreadable files, and
/// headers that list more than the file contains, are skipped.
pub fn safetensors_beside(config: &Path) -> Vec<TensorGroup> {
    let folder = config.parent().unwrap_or(Path::new("."));
    let folder = if folder.as_os_str().is_empty() {
        Path::new(".")
    } else {
        folder
    };
    let Ok(entries) = folder.read_dir() else {
        return Vec::new();
    };
    let mut tensors = Vec::new();
    for entry in entries.flatten().take(FILES_MAX) {
        let path = entry.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "safetensors")
        {
            tensors.extend(safetensors_of(&path).unwrap_or_default());
        }
    }
    TensorGroup::of_safetensors(&tensors)
}

/// The tensors listed by the header of a safetensors file, if they fit the file.
fn safetensors_of(path: &Path) -> Option<Vec<NamedTensor>> {
    #[derive(Deserialize)]
    struct Tensor {
        dtype: String,
        #[serde(default)]
        shape: Vec<u64>,
        data_offsets: (u64, u64),
    }
    let mut file = File::open(path).ok()?;
    let whole = file.metadata().ok()?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length).ok()?;
    let length = u64::from_le_bytes(length);
    if length > SAFETENSORS_HEADER_MAX.get() || length > whole {
        return None;
    }
    let header: serde_json::Map<String, Value> = serde_json::from_reader(file.take(length)).ok()?;
    let mut total = 0u64;
    let mut tensors = Vec::new();
    for (name, tensor) in header {
        if name != "__metadata__" {
            let Tensor {
                dtype,
                shape,
                data_offsets: (start, end),
            } = Tensor::deserialize(tensor).ok()?;
            let bytes = end.checked_sub(start)?;
            total = total.saturating_add(bytes);
            tensors.push(NamedTensor {
                name,
                dtype,
                dims: shape,
                bytes: Bytes::new(bytes),
            });
        }
    }
    (total <= whole).then_some(tensors)
}

fn shape_of(text: &str, types: TypeMix) -> Result<Synthetic, ConfigJsonErrorKind> {
    let whole: Value = serde_json::from_str(text).map_err(ConfigJsonErrorKind::Json)?;
    // Vision models keep the text model in a section of its own.
    let config = whole
        .get("text_config")
        .filter(|part| part.is_object())
        .unwrap_or(&whole);
    let named = |value: &Value| {
        value
            .get("model_type")
            .and_then(Value::as_str)
            .map(str::to_owned)
    };
    let family = named(config).or_else(|| named(&whole)).unwrap_or_default();
    let name = family.strip_suffix("_text").unwrap_or(&family);
    let Some((_, architecture)) = FAMILIES.into_iter().find(|(known, _)| *known == name) else {
        return Err(ConfigJsonErrorKind::Family { found: family });
    };
    let read = Dimensions(config);
    let heads = read.number("num_attention_heads", 1024)?;
    let width = read.number("hidden_size", WIDTH_MAX)?;
    let gemma4 = architecture == Architecture::Gemma4;
    let whole_dim = if gemma4 {
        "global_head_dim"
    } else {
        "head_dim"
    };
    let head_dim = match read.optional(whole_dim, 1024)? {
        Some(dim) => dim,
        None => width / heads.max(1),
    };
    let kv_heads = read.optional("num_key_value_heads", 1024)?.unwrap_or(heads);
    if let Some(Value::Bool(true)) = config.get("enable_moe_block") {
        return Err(ConfigJsonErrorKind::Dimension {
            key: "enable_moe_block",
            value: "`true`".to_owned(),
            limit: "and experts of this family are planned from the GGUF file only".to_owned(),
        });
    }
    let recurrent = match architecture {
        Architecture::Qwen35 | Architecture::Qwen35Moe => (
            read.number("linear_num_key_heads", 1024)?,
            read.number("linear_num_value_heads", 1024)?,
            read.number("linear_key_head_dim", 1024)?,
        ),
        _ => (0, 0, 0),
    };
    let part = config
        .get("partial_rotary_factor")
        .or_else(|| config.get("rope_parameters")?.get("partial_rotary_factor"))
        .and_then(Value::as_f64);
    Ok(Synthetic {
        architecture,
        layers: read.number("num_hidden_layers", 512)?,
        width,
        feed_forward: match architecture {
            Architecture::Qwen3Moe | Architecture::Qwen35Moe => {
                read.number("moe_intermediate_size", WIDTH_MAX)?
            }
            _ => read.number("intermediate_size", WIDTH_MAX)?,
        },
        heads,
        kv_heads: match gemma4 {
            true => read
                .optional("num_global_key_value_heads", 1024)?
                .unwrap_or(kv_heads),
            false => kv_heads,
        },
        head_dim,
        rotary: match part {
            Some(part) if (0.0..1.0).contains(&part) => rotated(head_dim, part),
            _ => head_dim,
        },
        rotary_base: 10_000.0,
        windows: match architecture {
            // Defaults of the library for keys missing from the file.
            Architecture::Gemma2 | Architecture::Gemma3 => (
                read.optional("sliding_window", 1 << 24)?.unwrap_or(4096),
                read.pattern(if architecture == Architecture::Gemma2 {
                    2
                } else {
                    6
                })?,
            ),
            Architecture::Gemma4 => (
                read.optional("sliding_window", 1 << 24)?.unwrap_or(512),
                read.pattern(5)?,
            ),
            Architecture::GptOss => (
                read.optional("sliding_window", 1 << 24)?.unwrap_or(128),
                read.pattern(2)?,
            ),
            _ => (0, 0),
        },
        recurrent,
        experts: match architecture {
            Architecture::Qwen3Moe | Architecture::Qwen35Moe => (
                read.number("num_experts", 512)?,
                read.number("num_experts_per_tok", 512)?,
            ),
            Architecture::GptOss => (
                read.number("num_local_experts", 512)?,
                read.number("num_experts_per_tok", 512)?,
            ),
            _ => (0, 0),
        },
        gemma4: match gemma4 {
            true => Gemma4 {
                layer_inputs: read
                    .whole("hidden_size_per_layer_input", WIDTH_MAX)?
                    .unwrap_or(256),
                borrowing: read.whole("num_kv_shared_layers", 512)?.unwrap_or(20),
                doubled: config.get("use_double_wide_mlp") != Some(&Value::Bool(false)),
                local_kv_heads: kv_heads,
            },
            false => Gemma4::NONE,
        },
        vocabulary: read.number("vocab_size", VOCABULARY_MAX)?.max(260),
        context_max: read.number("max_position_embeddings", 1 << 24)?,
        tied: match config
            .get("tie_word_embeddings")
            .or_else(|| whole.get("tie_word_embeddings"))
        {
            Some(tied) => tied.as_bool().unwrap_or(false),
            // The library's own default, on which Gemma's files rely.
            None => architecture.is_gemma(),
        },
        nextn: 0,
        types,
        seed: 0,
    })
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "at most 1024 elements, and a part of them"
)]
fn rotated(head_dim: u32, part: f64) -> u32 {
    (f64::from(head_dim) * part) as u32
}

fn families() -> String {
    let names = FAMILIES.map(|(name, _)| name);
    names.join(", ")
}

/// Families by their `model_type`, without the ending of a text model's section.
const FAMILIES: [(&str, Architecture); 16] = [
    ("gemma2", Architecture::Gemma2),
    ("gemma3", Architecture::Gemma3),
    ("gemma4", Architecture::Gemma4),
    ("gpt_oss", Architecture::GptOss),
    ("granite", Architecture::Granite),
    ("llama", Architecture::Llama),
    ("mistral", Architecture::Llama),
    ("olmo2", Architecture::Olmo2),
    ("phi3", Architecture::Phi3),
    ("qwen2", Architecture::Qwen2),
    ("qwen3", Architecture::Qwen3),
    ("qwen3_5", Architecture::Qwen35),
    ("qwen3_5_moe", Architecture::Qwen35Moe),
    ("qwen3_moe", Architecture::Qwen3Moe),
    ("smollm3", Architecture::SmolLm3),
    ("stablelm", Architecture::StableLm),
];

/// Integers of a configuration.
struct Dimensions<'a>(&'a Value);

impl Dimensions<'_> {
    fn number(&self, key: &'static str, most: u32) -> Result<u32, ConfigJsonErrorKind> {
        self.optional(key, most)?
            .ok_or_else(|| wrong(key, "missing".to_owned(), most))
    }

    /// Interval of layers that see all tokens, from a number or from the kinds of layers.
    fn pattern(&self, usual: u32) -> Result<u32, ConfigJsonErrorKind> {
        let kinds = self.0.get("layer_types").and_then(Value::as_array);
        let first = kinds.and_then(|kinds| {
            kinds
                .iter()
                .position(|kind| kind.as_str() == Some("full_attention"))
        });
        let listed = first.and_then(|first| u32::try_from(first + 1).ok());
        Ok(match listed {
            Some(listed) => listed,
            None => self
                .optional("sliding_window_pattern", 512)?
                .unwrap_or(usual),
        })
    }

    /// As [`Self::optional`], where zero stands for none.
    fn whole(&self, key: &'static str, most: u32) -> Result<Option<u32>, ConfigJsonErrorKind> {
        match self.0.get(key).and_then(Value::as_u64) {
            Some(0) => Ok(Some(0)),
            _ => self.optional(key, most),
        }
    }

    fn optional(&self, key: &'static str, most: u32) -> Result<Option<u32>, ConfigJsonErrorKind> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value
                .as_u64()
                .and_then(|value| u32::try_from(value).ok())
                .filter(|value| (1..=most).contains(value))
                .map(Some)
                .ok_or_else(|| wrong(key, format!("`{value}`"), most)),
        }
    }
}

fn wrong(key: &'static str, value: String, most: u32) -> ConfigJsonErrorKind {
    ConfigJsonErrorKind::Dimension {
        key,
        value,
        limit: format!("and must be a whole number from 1 to {most}"),
    }
}

/// A `config.json` has some KiB.
const CONFIG_MAX: Bytes = Bytes::from_mib(1);
/// The library's own limit is 100 MB; 10 MiB have room for 50 000 tensors.
const SAFETENSORS_HEADER_MAX: Bytes = Bytes::from_mib(10);
const FILES_MAX: usize = 4096;
const WIDTH_MAX: u32 = 1 << 18;
/// Four times the largest vocabulary of current models.
const VOCABULARY_MAX: u32 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor_group::TensorKind;
    use cotenant_policy::kv_type::KvType;
    use cotenant_units::Tokens;

    fn inspect(text: &str) -> Inspected {
        inspect_shape(&shape_of(text, TypeMix::Q4KM).unwrap(), 1).unwrap()
    }

    const LLAMA_3_8B: &str = r#"{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "tie_word_embeddings": false}"#;
    const LLAMA_3_2_3B: &str = r#"{"model_type": "llama", "num_hidden_layers": 28, "hidden_size": 3072,
        "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": true}"#;
    const GEMMA_2_2B: &str = r#"{"model_type": "gemma2", "num_hidden_layers": 26, "hidden_size": 2304,
        "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window": 4096}"#;
    const STABLELM_2_1_6B: &str = r#"{"model_type": "stablelm", "num_hidden_layers": 24, "hidden_size": 2048,
        "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352,
        "max_position_embeddings": 4096, "partial_rotary_factor": 0.25, "tie_word_embeddings": false}"#;
    const QWEN3_5_4B: &str = r#"{"model_type": "qwen3_5", "tie_word_embeddings": true, "text_config": {
        "model_type": "qwen3_5_text", "num_hidden_layers": 32, "hidden_size": 2560, "intermediate_size": 9216,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
        "max_position_embeddings": 262144, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "rope_parameters": {"partial_rotary_factor": 0.25}}}"#;

    const GEMMA_3_4B: &str = r#"{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text",
        "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072,
        "sliding_window": 1024}}"#;

    #[test]
    fn the_kv_cache_of_llama_3_8b_at_4096_tokens_has_512_mib() {
        let kv = inspect(LLAMA_3_8B).shape.kv;
        assert_eq!(
            kv.capacity_bytes(Tokens::new(4096), KvType::F16),
            Bytes::from_mib(512)
        );
    }

    /// Published as "~109 MB": 0.109 GiB at one byte for each element; our rows of 8 bits carry a scale for each 32.
    #[test]
    fn the_kv_cache_of_llama_3_2_3b_at_2048_tokens_and_8_bits_has_0_109_gib() {
        let kv = inspect(LLAMA_3_2_3B).shape.kv;
        let elements = kv.bytes_per_token(KvType::F16).get() / 2 * 2048;
        assert_eq!(elements, Bytes::from_mib(112).get());
        assert_eq!(elements * 1000 / Bytes::from_gib(1).get(), 109);
        assert_eq!(
            kv.capacity_bytes(Tokens::new(2048), KvType::Q8),
            Bytes::from_mib(119).round_up(kv.granule)
        );
    }

    /// Published as 64 KiB per token: 8 of 32 layers attend with 4 KV heads of 256 elements, which implies 4 bytes per
    /// element. As f16 it is half of that; if all 32 layers attended, it would be 128 KiB.
    #[test]
    fn a_token_of_qwen3_5_4b_has_16_ki_elements_of_kv() {
        let shape = inspect(QWEN3_5_4B).shape;
        assert_eq!(shape.kv.attention_layers, 8);
        assert_eq!(shape.kv.bytes_per_token(KvType::F16), Bytes::from_kib(32));
        assert_eq!(
            shape.kv.bytes_per_token(KvType::F16).get() / 2 * 4,
            Bytes::from_kib(64).get()
        );
        // 24 recurrent layers of 32 heads of 128 × 128 with the convolution's state, and the working area of one layer.
        assert!(
            (Bytes::from_mib(50)..Bytes::from_mib(54)).contains(&shape.state_bytes),
            "{}",
            shape.state_bytes
        );
    }

    /// 5 of 34 layers keep all tokens: 20 KiB per token; the others 116 KiB for the last 1024 and those attending
    /// together.
    #[test]
    fn the_kv_cache_of_gemma_3_4b_at_131072_tokens_has_2_7_gib() {
        let kv = inspect(GEMMA_3_4B).shape.kv;
        assert_eq!((kv.attention_layers, kv.windowed_layers()), (34, 29));
        assert_eq!(kv.bytes_per_token(KvType::F16), Bytes::from_kib(20));
        let windows = Bytes::from_kib(116 * 25 * 64).round_up(kv.granule);
        let whole = Bytes::from_kib(20 * 131_072);
        assert_eq!(
            kv.capacity_bytes(Tokens::new(131_072), KvType::F16),
            whole + windows
        );
        assert!(
            whole + windows < Bytes::from_mib(2750),
            "{}",
            whole + windows
        );
    }

    /// llama.cpp counts 4.65 and 7.52 thousand million, with keys and values of layers that use those of others: 0.02 and
    /// 0.06. 15 of 35 layers of E2B have their own, of which three keep all tokens: one head of 512 elements each.
    #[test]
    fn gemma_4_e2b_and_e4b_have_the_parameters_that_llama_cpp_counts_and_keep_few_keys() {
        const E2B: &str = r#"{"model_type": "gemma4", "text_config": {"model_type": "gemma4_text",
            "num_hidden_layers": 35, "hidden_size": 1536, "intermediate_size": 6144, "num_attention_heads": 8,
            "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "num_kv_shared_layers": 20,
            "hidden_size_per_layer_input": 256, "sliding_window": 512, "vocab_size": 262144,
            "max_position_embeddings": 131072}}"#;
        let shape = inspect(E2B);
        let elements: u64 = shape.tensors.iter().map(|group| group.elements).sum();
        assert_eq!(elements / 10_000_000, 462);
        let kv = shape.shape.kv;
        assert_eq!((kv.attention_layers, kv.windowed_layers()), (15, 12));
        assert_eq!(kv.bytes_per_token(KvType::F16), Bytes::from_kib(6));
        let e4b = E2B
            .replace("\"num_hidden_layers\": 35", "\"num_hidden_layers\": 42")
            .replace("1536", "2560")
            .replace("6144", "10240")
            .replace("\"num_key_value_heads\": 1", "\"num_key_value_heads\": 2")
            .replace(
                "\"num_kv_shared_layers\": 20",
                "\"num_kv_shared_layers\": 18, \"use_double_wide_mlp\": false",
            )
            .replace("\"vocab_size\"", "\"layer_types\": [\"a\", \"a\", \"a\", \"a\", \"a\", \"full_attention\"], \"vocab_size\"");
        let elements: u64 = inspect(&e4b)
            .tensors
            .iter()
            .map(|group| group.elements)
            .sum();
        assert_eq!(elements / 10_000_000, 746);
    }

    /// Published as 20.9 thousand million, in a file of 12.1 GB; half of the layers keep 128 tokens.
    #[test]
    fn gpt_oss_20b_has_its_published_parameters_and_weights() {
        let text = r#"{"model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "intermediate_size": 2880,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
            "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088, "max_position_embeddings": 131072,
            "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": false}"#;
        let shape = shape_of(text, TypeMix::MXFP4Moe).unwrap();
        let inspected = inspect_shape(&shape, 1).unwrap();
        let elements: u64 = inspected.tensors.iter().map(|group| group.elements).sum();
        assert_eq!(elements / 100_000_000, 209);
        let bytes: Bytes = inspected.tensors.iter().map(|group| group.bytes).sum();
        assert_eq!(bytes.get() / 100_000_000, 120, "and the header");
        let kv = inspected.shape.kv;
        assert_eq!((kv.attention_layers, kv.windowed_layers()), (24, 12));
        assert_eq!(kv.bytes_per_token(KvType::F16), Bytes::from_kib(24));
        // Biases of experts are small and always in memory.
        let fixed = inspected.shape.fixed_bytes;
        assert!(fixed > Bytes::from_mib(25), "{fixed}");
    }

    #[test]
    fn parameters_and_weights_are_those_of_the_model_card() {
        for (text, parameters, weights) in [
            // Billions of parameters in hundredths, and MiB of a Q4_K_M file (published: 4.58 GiB, 1.87 GiB, 1.71 GB,
            // 1.03 GB).
            (LLAMA_3_8B, 803, 4690),
            (LLAMA_3_2_3B, 321, 1920),
            (GEMMA_2_2B, 261, 1630),
            (STABLELM_2_1_6B, 164, 983),
        ] {
            let inspected = inspect(text);
            let elements: u64 = inspected.tensors.iter().map(|group| group.elements).sum();
            assert_eq!(elements / 10_000_000, parameters);
            let bytes: Bytes = inspected.tensors.iter().map(|group| group.bytes).sum();
            assert!(
                bytes.whole_mib().abs_diff(weights) * 100 <= weights * 3,
                "{bytes}"
            );
        }
    }

    #[test]
    fn what_is_no_configuration_of_a_known_model_is_refused_with_its_value() {
        let said = |text: &str| shape_of(text, TypeMix::Q4KM).unwrap_err().to_string();
        assert_eq!(said("{"), "it is not JSON");
        assert!(
            said(r#"{"model_type": "mamba"}"#).starts_with("`model_type` is `mamba`; known are")
        );
        assert_eq!(
            said(&LLAMA_3_8B.replace("14336", "-5")),
            "`intermediate_size` is `-5`, and must be a whole number from 1 to 262144"
        );
        assert!(
            said(&LLAMA_3_8B.replace("num_hidden_layers", "layers"))
                .starts_with("`num_hidden_layers` is missing")
        );
        assert!(said(&LLAMA_3_8B.replace("128256", "4000000000")).contains("1048576"));
    }

    #[test]
    fn headers_of_safetensors_are_added_up_and_lies_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("config.json");
        assert_eq!(safetensors_beside(&config), []);
        let put = |name: &str, header: &str, data: usize| {
            let mut file = (header.len() as u64).to_le_bytes().to_vec();
            file.extend_from_slice(header.as_bytes());
            file.resize(file.len() + data, 0);
            std::fs::write(folder.path().join(name), file).unwrap();
        };
        put(
            "a.safetensors",
            r#"{"model.layers.0.mlp.up_proj.weight": {"dtype": "BF16", "shape": [5, 10], "data_offsets": [0, 100]}, "__metadata__": {}}"#,
            100,
        );
        put(
            "b.safetensors",
            r#"{"model.layers.1.mlp.down_proj.weight": {"dtype": "F32", "shape": [5, 5], "data_offsets": [100, 200]}}"#,
            200,
        );
        put(
            "lie.safetensors",
            r#"{"y": {"dtype": "BF16", "shape": [50], "data_offsets": [0, 99999]}}"#,
            1,
        );
        std::fs::write(folder.path().join("short.safetensors"), [255; 9]).unwrap();
        let found = safetensors_beside(&config);
        let [group] = found.as_slice() else {
            panic!("{found:?}")
        };
        assert_eq!(
            (group.kind, group.tensors, group.elements),
            (TensorKind::FeedForward, 2, 75)
        );
        assert_eq!((group.bytes, group.types.len()), (Bytes::new(200), 2));
    }
}
