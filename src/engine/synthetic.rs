//! GGUF models of random weights at any shape.
//!
//! Quantised weights are drawn as blocks, not quantised from floats: a block of random quants with a fitting scale is as
//! good a random weight, and a gigabyte of it takes seconds instead of minutes. The same seed gives the same file.

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use candle_core::quantized::GgmlDType;

use super::{gguf::type_number, spec::Architecture};

/// A model to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct Synthetic {
    /// Family.
    pub architecture: Architecture,
    /// Layers.
    pub layers: u32,
    /// Width of the residual stream.
    pub width: u32,
    /// Width of the feed-forward part.
    pub feed_forward: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Elements of an attention head.
    pub head_dim: u32,
    /// Elements of a head that are rotated.
    pub rotary: u32,
    /// Base of the rotary angles.
    pub rotary_base: f32,
    /// Key heads, value heads and head elements of recurrent layers (`qwen35`).
    pub recurrent: (u32, u32, u32),
    /// Tokens of the vocabulary; at least 260.
    pub vocabulary: u32,
    /// Longest context in the header.
    pub context_max: u32,
    /// Whether the embedding is the output head too.
    pub tied: bool,
    /// Blocks for multi-token prediction behind the layers (`qwen35`).
    pub nextn: u32,
    /// Types of the matrices.
    pub types: TypeMix,
    /// Where the weights are drawn from.
    pub seed: u64,
}

/// Types of a model's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TypeMix {
    /// All the same.
    All(GgmlDType),
    /// As llama.cpp's `Q4_K_M`: Q4_K, with Q6_K for the head and for half of the values and down projections. Rows that are no
    /// multiple of 256 are in Q5_0 and Q8_0 instead.
    Q4KM,
}

impl TypeMix {
    /// What rows of so many columns are stored in, when it should be `dtype`.
    const fn fitting(self, dtype: GgmlDType, columns: u32) -> GgmlDType {
        match (self, dtype) {
            (Self::Q4KM, GgmlDType::Q4K) if !columns.is_multiple_of(256) => GgmlDType::Q5_0,
            (Self::Q4KM, GgmlDType::Q6K) if !columns.is_multiple_of(256) => GgmlDType::Q8_0,
            _ => dtype,
        }
    }

    /// The types that llama.cpp calls by this name: `q4_k_m`, `q8_0`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "q4_k_m" => Self::Q4KM,
            "q4_0" => Self::All(GgmlDType::Q4_0),
            "q5_k" => Self::All(GgmlDType::Q5K),
            "q6_k" => Self::All(GgmlDType::Q6K),
            "q8_0" => Self::All(GgmlDType::Q8_0),
            "f16" => Self::All(GgmlDType::F16),
            "bf16" => Self::All(GgmlDType::BF16),
            _ => return None,
        })
    }
}

impl Synthetic {
    /// A model of `architecture` that a test computes in milliseconds: rows of 256 elements, so that every type fits.
    #[must_use]
    pub const fn tiny(architecture: Architecture, types: TypeMix, seed: u64) -> Self {
        Self {
            architecture,
            layers: 4,
            width: 256,
            feed_forward: 256,
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            rotary: match architecture {
                Architecture::Qwen35 => 16,
                Architecture::Phi3 => 48,
                _ => 64,
            },
            rotary_base: 10_000.0,
            recurrent: (2, 4, 64),
            vocabulary: 320,
            context_max: 4096,
            tied: !matches!(architecture, Architecture::Llama | Architecture::Mistral3),
            nextn: 0,
            types,
            seed,
        }
    }

    /// The shape of Qwen3.5-0.8B.
    #[must_use]
    pub const fn qwen35_0_8b(types: TypeMix, seed: u64) -> Self {
        Self {
            architecture: Architecture::Qwen35,
            layers: 24,
            width: 1024,
            feed_forward: 3584,
            heads: 8,
            kv_heads: 2,
            head_dim: 256,
            rotary: 64,
            rotary_base: 1e7,
            recurrent: (16, 16, 128),
            vocabulary: 248_320,
            context_max: 262_144,
            tied: true,
            nextn: 0,
            types,
            seed,
        }
    }

    /// The shape of Qwen3.5-4B.
    #[must_use]
    pub const fn qwen35_4b(types: TypeMix, seed: u64) -> Self {
        Self {
            layers: 32,
            width: 2560,
            feed_forward: 9216,
            heads: 16,
            kv_heads: 4,
            recurrent: (16, 32, 128),
            ..Self::qwen35_0_8b(types, seed)
        }
    }

    /// The shape of Qwen3-0.6B.
    #[must_use]
    pub const fn qwen3_0_6b(types: TypeMix, seed: u64) -> Self {
        Self {
            architecture: Architecture::Qwen3,
            layers: 28,
            width: 1024,
            feed_forward: 3072,
            heads: 16,
            kv_heads: 8,
            head_dim: 128,
            rotary: 128,
            rotary_base: 1e6,
            recurrent: (0, 0, 0),
            vocabulary: 151_936,
            context_max: 40_960,
            tied: true,
            nextn: 0,
            types,
            seed,
        }
    }

    /// The shape of Llama-3.2-1B.
    #[must_use]
    pub const fn llama_3_2_1b(types: TypeMix, seed: u64) -> Self {
        Self {
            architecture: Architecture::Llama,
            layers: 16,
            width: 2048,
            feed_forward: 8192,
            heads: 32,
            kv_heads: 8,
            head_dim: 64,
            rotary: 64,
            rotary_base: 500_000.0,
            recurrent: (0, 0, 0),
            vocabulary: 128_256,
            context_max: 131_072,
            tied: true,
            nextn: 0,
            types,
            seed,
        }
    }

    /// The shape of Gemma 3 1B, whose rows are no multiple of 256.
    #[must_use]
    pub const fn gemma3_1b(types: TypeMix, seed: u64) -> Self {
        Self {
            architecture: Architecture::Gemma3,
            layers: 26,
            width: 1152,
            feed_forward: 6912,
            heads: 4,
            kv_heads: 1,
            head_dim: 256,
            rotary: 256,
            rotary_base: 1e6,
            recurrent: (0, 0, 0),
            vocabulary: 262_144,
            context_max: 32_768,
            tied: true,
            nextn: 0,
            types,
            seed,
        }
    }

    /// The shape of Qwen2.5-0.5B, whose rows are no multiple of 256.
    #[must_use]
    pub const fn qwen2_5_0_5b(types: TypeMix, seed: u64) -> Self {
        Self {
            architecture: Architecture::Qwen2,
            layers: 24,
            width: 896,
            feed_forward: 4864,
            heads: 14,
            kv_heads: 2,
            head_dim: 64,
            rotary: 64,
            rotary_base: 1e6,
            recurrent: (0, 0, 0),
            vocabulary: 151_936,
            context_max: 32_768,
            tied: true,
            nextn: 0,
            types,
            seed,
        }
    }

    /// Writes the model to `path`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        write_part(path, &self.metadata(), &self.tensors(), &mut Random(self.seed))
    }

    /// Writes the model to `parts` files in `folder`, as `llama-gguf-split` would; returns the first.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write_parts(&self, folder: &Path, parts: u16) -> io::Result<PathBuf> {
        let tensors = self.tensors();
        let each = tensors.len().div_ceil(usize::from(parts.max(1))).max(1);
        let path = |part: usize| folder.join(format!("model-{part:05}-of-{parts:05}.gguf"));
        let mut random = Random(self.seed);
        for (number, some) in tensors.chunks(each).enumerate() {
            let mut entries = if number == 0 { self.metadata() } else { Vec::new() };
            let list = [
                ("split.no", Entry::Short(u16::try_from(number).unwrap_or(u16::MAX))),
                ("split.count", Entry::Short(parts)),
                (
                    "split.tensors.count",
                    Entry::Int(i32::try_from(tensors.len()).unwrap_or(i32::MAX)),
                ),
            ];
            entries.extend(list.map(|(key, value)| (key.to_owned(), value)));
            write_part(&path(number + 1), &entries, some, &mut random)?;
        }
        Ok(path(1))
    }

    /// Writes the header, and leaves a hole where the weights would be: enough for what only reads headers.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_hollow(&self, mut file: File) -> io::Result<()> {
        let (mut metadata, tensors) = (self.metadata(), self.tensors());
        // Vocabularies of byte-level models have about one merge for each token.
        let merges = (0..self.vocabulary).map(|index| format!("\u{120} filler{index}"));
        if let Some((_, entry)) = metadata.iter_mut().find(|(key, _)| key == "tokenizer.ggml.merges") {
            *entry = Entry::Texts(merges.collect());
        }
        let (header, bytes) = header_of(&metadata, &tensors);
        file.write_all(&header)?;
        file.set_len((header.len() as u64).saturating_add(bytes))
    }

    fn metadata(&self) -> Vec<(String, Entry)> {
        let arch = self.architecture.name();
        let mut list: Vec<(String, Entry)> = vec![
            ("general.architecture".to_owned(), Entry::Text(arch.to_owned())),
            (
                "general.name".to_owned(),
                Entry::Text(match self.architecture {
                    // llama.cpp looks for Microsoft's control tokens when the name has `phi3` in it.
                    Architecture::Phi3 => format!("synthetic-phi-{}", self.seed),
                    _ => format!("synthetic-{arch}-{}", self.seed),
                }),
            ),
            ("general.alignment".to_owned(), Entry::Uint(32)),
        ];
        let mut put = |key: &str, value: Entry| list.push((format!("{arch}.{key}"), value));
        put("block_count", Entry::Uint(self.layers + self.nextn));
        put("context_length", Entry::Uint(self.context_max));
        put("embedding_length", Entry::Uint(self.width));
        put("feed_forward_length", Entry::Uint(self.feed_forward));
        put("attention.head_count", Entry::Uint(self.heads));
        put("attention.head_count_kv", Entry::Uint(self.kv_heads));
        put("attention.key_length", Entry::Uint(self.head_dim));
        put("attention.value_length", Entry::Uint(self.head_dim));
        put("attention.layer_norm_rms_epsilon", Entry::Float(1e-6));
        put("rope.freq_base", Entry::Float(self.rotary_base));
        put("rope.dimension_count", Entry::Uint(self.rotary));
        match self.architecture {
            Architecture::Llama | Architecture::SmolLm3 => put("vocab_size", Entry::Uint(self.vocabulary)),
            Architecture::Granite => {
                put("vocab_size", Entry::Uint(self.vocabulary));
                put("attention.scale", Entry::Float(0.0625));
                put("embedding_scale", Entry::Float(12.0));
                put("residual_scale", Entry::Float(0.22));
                put("logit_scale", Entry::Float(8.0));
            }
            Architecture::Mistral3 => {
                put("vocab_size", Entry::Uint(self.vocabulary));
                put("attention.temperature_scale", Entry::Float(0.1));
                put("rope.scaling.type", Entry::Text("yarn".to_owned()));
                put("rope.scaling.factor", Entry::Float(16.0));
                put("rope.scaling.original_context_length", Entry::Uint(8));
                put("rope.scaling.yarn_beta_fast", Entry::Float(4.0));
                put("rope.scaling.yarn_beta_slow", Entry::Float(0.25));
                put("rope.scaling.yarn_log_multiplier", Entry::Float(1.0));
            }
            Architecture::Gemma3 => {
                put("attention.sliding_window", Entry::Uint(WINDOW));
                put("attention.sliding_window_pattern", Entry::Uint(2));
                put("rope.scaling.type", Entry::Text("linear".to_owned()));
                put("rope.scaling.factor", Entry::Float(8.0));
                put("final_logit_softcapping", Entry::Float(30.0));
            }
            Architecture::Phi3 => {
                put("rope.scaling.type", Entry::Text("longrope".to_owned()));
                put(
                    "rope.scaling.original_context_length",
                    Entry::Uint(self.context_max / 2),
                );
                put("rope.scaling.attn_factor", Entry::Float(1.19));
            }
            Architecture::Qwen2 => {
                put("rope.scaling.type", Entry::Text("yarn".to_owned()));
                put("rope.scaling.factor", Entry::Float(4.0));
                put(
                    "rope.scaling.original_context_length",
                    Entry::Uint(self.context_max / 4),
                );
            }
            Architecture::Qwen3 => {}
            Architecture::Qwen3Vl => {
                let pairs = self.rotary.cast_signed() / 2;
                let sections = [pairs - 2 * (pairs / 3), pairs / 3, pairs / 3, 0];
                put("rope.dimension_sections", Entry::Ints(sections.to_vec()));
                put("n_deepstack_layers", Entry::Uint(3));
            }
            Architecture::Qwen35 => {
                let (keys, values, dim) = self.recurrent;
                let pairs = self.rotary / 2;
                let sections = [pairs - 2 * (pairs / 3), pairs / 3, pairs / 3, 0];
                put(
                    "rope.dimension_sections",
                    Entry::Ints(sections.map(u32::cast_signed).to_vec()),
                );
                put("ssm.conv_kernel", Entry::Uint(4));
                put("ssm.state_size", Entry::Uint(dim));
                put("ssm.group_count", Entry::Uint(keys));
                put("ssm.time_step_rank", Entry::Uint(values));
                put("ssm.inner_size", Entry::Uint(values * dim));
                put("full_attention_interval", Entry::Uint(4));
                if self.nextn > 0 {
                    put("nextn_predict_layers", Entry::Uint(self.nextn));
                }
            }
        }
        self.tokenizer(&mut list);
        list
    }

    /// A byte-level vocabulary: 256 bytes, one merge, filler, and three control tokens at the end.
    fn tokenizer(&self, list: &mut Vec<(String, Entry)>) {
        let controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
        let ordinary = self.vocabulary.saturating_sub(3);
        let mut tokens: Vec<String> = (0..=255u8).map(|byte| byte_symbol(byte).to_string()).collect();
        tokens.push("\u{120}t".to_owned());
        tokens.extend((tokens.len()..ordinary as usize).map(|index| format!("\u{120}filler{index}")));
        let mut kinds = vec![1i32; tokens.len()];
        tokens.extend(controls.map(str::to_owned));
        kinds.extend([3; 3]);
        let pre = match self.architecture {
            Architecture::Llama | Architecture::SmolLm3 => "llama-bpe",
            Architecture::Gemma3 | Architecture::Granite | Architecture::Mistral3 | Architecture::Phi3 => "gpt-2",
            Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Qwen3Vl => "qwen2",
            Architecture::Qwen35 => "qwen35",
        };
        let mut put = |key: &str, value: Entry| list.push((format!("tokenizer.{key}"), value));
        put("ggml.model", Entry::Text("gpt2".to_owned()));
        put("ggml.pre", Entry::Text(pre.to_owned()));
        put("ggml.tokens", Entry::Texts(tokens));
        put("ggml.token_type", Entry::Ints(kinds));
        put("ggml.merges", Entry::Texts(vec!["\u{120} t".to_owned()]));
        put("ggml.bos_token_id", Entry::Uint(ordinary));
        put("ggml.eos_token_id", Entry::Uint(ordinary + 2));
        put("ggml.padding_token_id", Entry::Uint(ordinary));
        put("ggml.add_bos_token", Entry::Bool(false));
        put("chat_template", Entry::Text(CHAT_TEMPLATE.to_owned()));
    }

    fn tensors(&self) -> Vec<Plan> {
        let mut list = Vec::new();
        let head = match self.types {
            TypeMix::All(dtype) => dtype,
            TypeMix::Q4KM => GgmlDType::Q6K,
        };
        let (width, kv) = (self.width, self.kv_heads * self.head_dim);
        let embedding = match self.types {
            TypeMix::Q4KM if !self.tied => GgmlDType::Q4K,
            _ => head,
        };
        let (head, embedding) = (self.types.fitting(head, width), self.types.fitting(embedding, width));
        list.push(Plan::matrix("token_embd.weight", width, self.vocabulary, embedding));
        if !self.tied {
            list.push(Plan::matrix("output.weight", width, self.vocabulary, head));
        }
        list.push(Plan::vector("output_norm.weight", width, Draw::Norm));
        match self.architecture {
            Architecture::Llama => {
                list.push(Plan::vector("rope_freqs.weight", self.rotary / 2, Draw::Factors));
            }
            Architecture::Phi3 => {
                for name in ["rope_factors_long.weight", "rope_factors_short.weight"] {
                    list.push(Plan::vector(name, self.rotary / 2, Draw::Factors));
                }
            }
            _ => {}
        }
        for layer in 0..self.layers + self.nextn {
            let mut matrix = |name: &str, columns: u32, rows: u32, more: bool| {
                let dtype = match self.types {
                    TypeMix::All(dtype) => dtype,
                    TypeMix::Q4KM if more && self.more_bits(layer) => GgmlDType::Q6K,
                    TypeMix::Q4KM => GgmlDType::Q4K,
                };
                let dtype = self.types.fitting(dtype, columns);
                list.push(Plan::matrix(
                    &format!("blk.{layer}.{name}.weight"),
                    columns,
                    rows,
                    dtype,
                ));
            };
            let extra = layer >= self.layers;
            let recurrent = self.architecture == Architecture::Qwen35 && !extra && (layer + 1) % 4 != 0;
            let (keys, values, dim) = self.recurrent;
            let channels = (2 * keys + values) * dim;
            let query = self.heads * self.head_dim;
            if recurrent {
                matrix("attn_qkv", width, channels, true);
                matrix("attn_gate", width, values * dim, false);
                matrix("ssm_alpha", width, values, false);
                matrix("ssm_beta", width, values, false);
                matrix("ssm_out", values * dim, width, false);
            } else {
                let gated = if self.architecture == Architecture::Qwen35 {
                    2
                } else {
                    1
                };
                if self.architecture == Architecture::Phi3 {
                    matrix("attn_qkv", width, query + 2 * kv, true);
                } else {
                    matrix("attn_q", width, gated * query, false);
                    matrix("attn_k", width, kv, false);
                    matrix("attn_v", width, kv, true);
                }
                matrix("attn_output", query, width, false);
            }
            if self.architecture == Architecture::Phi3 {
                matrix("ffn_up", width, 2 * self.feed_forward, false);
            } else {
                matrix("ffn_gate", width, self.feed_forward, false);
                matrix("ffn_up", width, self.feed_forward, false);
            }
            matrix("ffn_down", self.feed_forward, width, true);
            if extra {
                matrix("nextn.eh_proj", 2 * width, width, false);
            }
            let mut vector =
                |name: &str, len: u32, draw: Draw| list.push(Plan::vector(&format!("blk.{layer}.{name}"), len, draw));
            vector("attn_norm.weight", width, Draw::Norm);
            if self.architecture == Architecture::Qwen35 {
                vector("post_attention_norm.weight", width, Draw::Norm);
            } else {
                vector("ffn_norm.weight", width, Draw::Norm);
            }
            match self.architecture {
                Architecture::Gemma3 => {
                    vector("post_attention_norm.weight", width, Draw::Norm);
                    vector("post_ffw_norm.weight", width, Draw::Norm);
                }
                Architecture::Granite => {
                    vector("attn_output.bias", width, Draw::Bias);
                    vector("ffn_gate.bias", self.feed_forward, Draw::Bias);
                    vector("ffn_up.bias", self.feed_forward, Draw::Bias);
                    vector("ffn_down.bias", width, Draw::Bias);
                }
                Architecture::Qwen2 => {
                    vector("attn_q.bias", query, Draw::Bias);
                    vector("attn_k.bias", kv, Draw::Bias);
                    vector("attn_v.bias", kv, Draw::Bias);
                }
                _ => {}
            }
            if recurrent {
                vector("ssm_dt.bias", values, Draw::Bias);
                vector("ssm_a", values, Draw::Decay);
                vector("ssm_norm.weight", dim, Draw::Norm);
                list.push(Plan {
                    name: format!("blk.{layer}.ssm_conv1d.weight"),
                    columns: 4,
                    rows: channels,
                    dtype: GgmlDType::F32,
                    draw: Draw::Bias,
                    flat: false,
                });
            } else if matches!(
                self.architecture,
                Architecture::Gemma3 | Architecture::Qwen3 | Architecture::Qwen35 | Architecture::Qwen3Vl
            ) {
                vector("attn_q_norm.weight", self.head_dim, Draw::Norm);
                vector("attn_k_norm.weight", self.head_dim, Draw::Norm);
            }
            if extra {
                let mut vector = |name: &str| {
                    list.push(Plan::vector(
                        &format!("blk.{layer}.nextn.{name}.weight"),
                        width,
                        Draw::Norm,
                    ));
                };
                vector("enorm");
                vector("hnorm");
                vector("shared_head_norm");
            }
        }
        if self.architecture == Architecture::Qwen2 {
            list.push(Plan::vector("output.bias", self.vocabulary, Draw::Bias));
        }
        list
    }

    /// llama.cpp's `use_more_bits`.
    const fn more_bits(&self, layer: u32) -> bool {
        let eighth = self.layers / 8;
        layer < eighth || layer >= 7 * self.layers / 8 || (layer - eighth) % 3 == 2
    }
}

/// Writes a file with some tensors.
fn write_part(path: &Path, entries: &[(String, Entry)], tensors: &[Plan], random: &mut Random) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let (header, _) = header_of(entries, tensors);
    out.write_all(&header)?;
    let mut row = Vec::new();
    for tensor in tensors {
        let mut written = 0u64;
        for _ in 0..tensor.rows {
            row.clear();
            tensor.draw(random, &mut row);
            out.write_all(&row)?;
            written += row.len() as u64;
        }
        let padding = written.next_multiple_of(ALIGNMENT) - written;
        out.write_all(vec![0u8; usize::try_from(padding).unwrap_or(0)].as_slice())?;
    }
    out.flush()
}

/// The header of a file with these tensors, padded, and the length of the tensors.
fn header_of(entries: &[(String, Entry)], tensors: &[Plan]) -> (Vec<u8>, u64) {
    let mut header = Vec::new();
    header.extend_from_slice(b"GGUF");
    header.extend_from_slice(&3u32.to_le_bytes());
    header.extend_from_slice(&(tensors.len() as u64).to_le_bytes());
    header.extend_from_slice(&(entries.len() as u64).to_le_bytes());
    for (key, value) in entries {
        put_text(&mut header, key);
        value.put(&mut header);
    }
    let mut offset = 0u64;
    for tensor in tensors {
        put_text(&mut header, &tensor.name);
        let dims = if tensor.rows == 1 && tensor.flat { 1u32 } else { 2 };
        header.extend_from_slice(&dims.to_le_bytes());
        header.extend_from_slice(&u64::from(tensor.columns).to_le_bytes());
        if dims == 2 {
            header.extend_from_slice(&u64::from(tensor.rows).to_le_bytes());
        }
        header.extend_from_slice(&type_number(tensor.dtype).to_le_bytes());
        header.extend_from_slice(&offset.to_le_bytes());
        offset = (offset + tensor.bytes()).next_multiple_of(ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(32), 0);
    (header, offset)
}

/// One metadata value.
enum Entry {
    Bool(bool),
    Float(f32),
    Int(i32),
    Ints(Vec<i32>),
    Short(u16),
    Text(String),
    Texts(Vec<String>),
    Uint(u32),
}

impl Entry {
    fn put(&self, out: &mut Vec<u8>) {
        let kind: u32 = match self {
            Self::Bool(_) => 7,
            Self::Float(_) => 6,
            Self::Int(_) => 5,
            Self::Ints(_) | Self::Texts(_) => 9,
            Self::Short(_) => 2,
            Self::Text(_) => 8,
            Self::Uint(_) => 4,
        };
        out.extend_from_slice(&kind.to_le_bytes());
        match self {
            Self::Bool(value) => out.push(u8::from(*value)),
            Self::Float(value) => out.extend_from_slice(&value.to_le_bytes()),
            Self::Int(value) => out.extend_from_slice(&value.to_le_bytes()),
            Self::Short(value) => out.extend_from_slice(&value.to_le_bytes()),
            Self::Ints(list) => {
                out.extend_from_slice(&5u32.to_le_bytes());
                out.extend_from_slice(&(list.len() as u64).to_le_bytes());
                for value in list {
                    out.extend_from_slice(&value.to_le_bytes());
                }
            }
            Self::Text(text) => put_text(out, text),
            Self::Texts(list) => {
                out.extend_from_slice(&8u32.to_le_bytes());
                out.extend_from_slice(&(list.len() as u64).to_le_bytes());
                for text in list {
                    put_text(out, text);
                }
            }
            Self::Uint(value) => out.extend_from_slice(&value.to_le_bytes()),
        }
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// One tensor to be written.
struct Plan {
    name: String,
    columns: u32,
    rows: u32,
    dtype: GgmlDType,
    draw: Draw,
    /// One axis only.
    flat: bool,
}

/// How elements are drawn.
#[derive(Clone, Copy)]
enum Draw {
    /// Small, around zero.
    Bias,
    /// Logarithmic decay: between -0.05 and -1.05.
    Decay,
    /// Rotary factors: 1 to 8.
    Factors,
    /// Around zero, so that a product keeps the size of its input.
    Matrix,
    /// Around one.
    Norm,
}

impl Plan {
    fn matrix(name: &str, columns: u32, rows: u32, dtype: GgmlDType) -> Self {
        Self {
            name: name.to_owned(),
            columns,
            rows,
            dtype,
            draw: Draw::Matrix,
            flat: false,
        }
    }

    fn vector(name: &str, len: u32, draw: Draw) -> Self {
        Self {
            name: name.to_owned(),
            columns: len,
            rows: 1,
            dtype: GgmlDType::F32,
            draw,
            flat: true,
        }
    }

    fn bytes(&self) -> u64 {
        let block = u64::try_from(self.dtype.block_size()).unwrap_or(1);
        let size = u64::try_from(self.dtype.type_size()).unwrap_or(1);
        u64::from(self.columns) / block * size * u64::from(self.rows)
    }

    /// Draws one row.
    fn draw(&self, random: &mut Random, out: &mut Vec<u8>) {
        #[expect(clippy::cast_precision_loss, reason = "columns are far below 2^24")]
        let size = 1.0 / (self.columns as f32).sqrt();
        let blocks = self.columns as usize / self.dtype.block_size();
        for _ in 0..blocks {
            match self.dtype {
                GgmlDType::F32 => {
                    let value = match self.draw {
                        Draw::Bias => random.spread() * 0.3,
                        Draw::Decay => -0.55 - 0.5 * random.spread(),
                        Draw::Factors => 4.5 + 3.5 * random.spread(),
                        Draw::Matrix => random.spread() * size * SQRT_3,
                        Draw::Norm => 1.0 + 0.1 * random.spread(),
                    };
                    out.extend_from_slice(&value.to_le_bytes());
                }
                GgmlDType::F16 => put_half(out, random.spread() * size * SQRT_3),
                GgmlDType::BF16 => {
                    let value = half::bf16::from_f32(random.spread() * size * SQRT_3);
                    out.extend_from_slice(&value.to_bits().to_le_bytes());
                }
                // Below: a scale such that the spread of the whole block is `size`, then random quants.
                GgmlDType::Q8_0 => {
                    put_half(out, size / 73.9);
                    random.fill(out, 32);
                }
                GgmlDType::Q4_0 => {
                    put_half(out, size / 4.6);
                    random.fill(out, 16);
                }
                GgmlDType::Q5_0 => {
                    put_half(out, size / 9.2);
                    random.fill(out, 20);
                }
                GgmlDType::Q4_1 | GgmlDType::Q5_1 => {
                    let (spread, middle, bytes) = match self.dtype {
                        GgmlDType::Q4_1 => (4.6, 7.5, 16),
                        _ => (9.2, 15.5, 20),
                    };
                    put_half(out, size / spread);
                    put_half(out, -size / spread * middle);
                    random.fill(out, bytes);
                }
                GgmlDType::Q2K => {
                    // Scales and minimums of four bits each, the same, so that quants are around 1.5.
                    for _ in 0..16 {
                        let scale = random.between(8, 16);
                        out.push(scale | (scale << 4));
                    }
                    random.fill(out, 64);
                    put_half(out, size / (1.12 * 11.7));
                    put_half(out, 1.5 * size / (1.12 * 11.7));
                }
                GgmlDType::Q3K => {
                    random.fill(out, 32 + 64 + 12);
                    put_half(out, size / (2.3 * 18.6));
                }
                GgmlDType::Q4K | GgmlDType::Q5K => {
                    // value = d·s·q − dmin·m with m = s and dmin such that quants are around zero.
                    let five = self.dtype == GgmlDType::Q5K;
                    let (spread, middle) = if five { (9.2, 15.5) } else { (4.6, 7.5) };
                    let scale = size / (spread * 48.0);
                    put_half(out, scale);
                    put_half(out, scale * middle);
                    out.extend_from_slice(&random.packed_scales());
                    random.fill(out, if five { 160 } else { 128 });
                }
                GgmlDType::Q6K => {
                    random.fill(out, 192);
                    for _ in 0..16 {
                        out.push(random.between(32, 96));
                    }
                    put_half(out, size / (18.5 * 66.0));
                }
                GgmlDType::Q8_1 | GgmlDType::Q8K => {
                    // Nothing is written with these; zeros are valid blocks of both.
                    out.resize(out.len() + self.dtype.type_size(), 0);
                }
            }
        }
    }
}

fn put_half(out: &mut Vec<u8>, value: f32) {
    out.extend_from_slice(&half::f16::from_f32(value).to_bits().to_le_bytes());
}

/// SplitMix64: small, fast, and the same everywhere.
struct Random(u64);

impl Random {
    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between -1 and 1.
    #[expect(clippy::cast_precision_loss, reason = "24 bits fit")]
    fn spread(&mut self) -> f32 {
        (self.next() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    #[expect(clippy::cast_possible_truncation, reason = "the remainder is below 256")]
    const fn between(&mut self, low: u8, high: u8) -> u8 {
        low + (self.next() % (high - low) as u64) as u8
    }

    fn fill(&mut self, out: &mut Vec<u8>, mut bytes: usize) {
        while bytes > 0 {
            let word = self.next().to_le_bytes();
            let count = bytes.min(word.len());
            out.extend(word.iter().take(count));
            bytes -= count;
        }
    }

    /// Eight 6-bit scales from 32 to 63, the minimums equal to them, packed as K-quants have them.
    fn packed_scales(&mut self) -> [u8; 12] {
        let scales: [u8; 8] = std::array::from_fn(|_| self.between(32, 64));
        let mut packed = [0u8; 12];
        let (low, high) = scales.split_at(4);
        for (index, (low, high)) in low.iter().zip(high).enumerate() {
            let top = (high >> 4) << 6;
            if let [scale, _, _, _, min, _, _, _, both, ..] = packed.get_mut(index..).unwrap_or_default() {
                *scale = low | top;
                *min = low | top;
                *both = (high & 15) | (high << 4);
            }
        }
        packed
    }
}

/// The character that stands for `byte` in byte-level vocabularies (GPT-2's `bytes_to_unicode`).
fn byte_symbol(byte: u8) -> char {
    let plain = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if plain(byte) {
        return char::from(byte);
    }
    let number = (0..byte).filter(|&before| !plain(before)).count();
    u32::try_from(number)
        .ok()
        .and_then(|number| char::from_u32(256 + number))
        .unwrap_or('?')
}

/// Tokens that local layers see: few, so that short tests see a difference.
const WINDOW: u32 = 6;
const SQRT_3: f32 = 1.732_050_8;
const ALIGNMENT: u64 = 32;
const CHAT_TEMPLATE: &str = "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}";
