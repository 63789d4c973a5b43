//! Headers of GGUF models at any shape.
//!
//! `cotenant plan` and `cotenant catalogue` use them to inspect models that are not on this machine.

use std::{
    fs::File,
    io::{self, Write},
};

use super::{
    gguf::{GgmlDType, type_number},
    spec::{Architecture, HeadNorms},
    tokenizer::byte_symbol,
};

mod shapes;

use Entry::{Bool, Bools, Float, Ints, Text, Texts, Uint};

/// A model whose header can be written.
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
    /// Tokens of a sliding window, and the interval of layers without one (`gemma2` to `gemma4`, `gpt-oss`, `olmo2`);
    /// the interval of attention layers, if it is not 4 (`granitehybrid`).
    pub windows: (u32, u32),
    /// Key heads, value heads and head elements of recurrent layers (`qwen35`); groups, heads and state elements of
    /// scans (`granitehybrid`, `nemotron_h`, `nemotron_h_moe`), which are twice as wide as the residual stream.
    pub recurrent: (u32, u32, u32),
    /// Experts of each layer, and those that a token uses; none if zero.
    pub experts: (u32, u32),
    /// Parts of Gemma 4 that other families do not have.
    pub gemma4: Gemma4,
    /// Tokens of the vocabulary; at least 260.
    pub vocabulary: u32,
    /// Longest context in the header.
    pub context_max: u32,
    /// Whether the embedding is also the output head.
    pub tied: bool,
    /// Blocks for multi-token prediction after the layers (`qwen35`).
    pub nextn: u32,
    /// Types of the matrices.
    pub types: TypeMix,
    /// Seed of the weights.
    pub seed: u64,
}

/// Parts of Gemma 4 that other families do not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemma4 {
    /// Elements of each layer's own input; if zero, values are keys in layers without a window.
    pub layer_inputs: u32,
    /// Last layers without keys of their own.
    pub borrowing: u32,
    /// Whether the feed-forward parts of those are twice as wide.
    pub doubled: bool,
    /// Key and value heads of layers with a window.
    pub local_kv_heads: u32,
}

impl Gemma4 {
    /// Those of other families.
    pub const NONE: Self = Self {
        layer_inputs: 0,
        borrowing: 0,
        doubled: false,
        local_kv_heads: 0,
    };
}

/// Types of a model's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TypeMix {
    /// All the same; as in llama.cpp, IQ4_NL replaces IQ4_XS in rows not divisible by 256.
    All(GgmlDType),
    /// As llama.cpp's `MXFP4_MOE`: experts in MXFP4, all others in Q8_0.
    MXFP4Moe,
    /// As llama.cpp's `Q4_K_M`: Q4_K, with Q6_K for the head and for half of the values and down projections. Rows not
    /// divisible by 256 use Q5_0 and Q8_0 instead. Experts of `gpt-oss` stay in MXFP4.
    Q4KM,
}

impl TypeMix {
    /// Returns the storage type of rows with this many columns, if `dtype` is preferred.
    const fn fitting(self, dtype: GgmlDType, columns: u32) -> GgmlDType {
        match (self, dtype) {
            (Self::Q4KM, GgmlDType::Q4K) if !columns.is_multiple_of(256) => GgmlDType::Q5_0,
            (Self::Q4KM, GgmlDType::Q6K) if !columns.is_multiple_of(256) => GgmlDType::Q8_0,
            (_, GgmlDType::IQ4XS) if !columns.is_multiple_of(256) => GgmlDType::IQ4NL,
            _ => dtype,
        }
    }

    /// The types with this name in llama.cpp: `q4_k_m`, `q8_0`.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "q4_k_m" => Self::Q4KM,
            "q4_0" => Self::All(GgmlDType::Q4_0),
            "iq4_nl" => Self::All(GgmlDType::IQ4NL),
            "iq4_xs" => Self::All(GgmlDType::IQ4XS),
            "mxfp4" => Self::All(GgmlDType::MXFP4),
            "mxfp4_moe" => Self::MXFP4Moe,
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
    /// Writes the header, with a hole in place of the weights: sufficient for header readers.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_hollow(&self, mut file: File) -> io::Result<()> {
        let (mut metadata, tensors) = (self.metadata(), self.tensors());
        // Byte-level vocabularies have about one merge per token.
        let merges = (0..self.vocabulary).map(|index| format!("\u{120} filler{index}"));
        if let Some((_, entry)) = metadata
            .iter_mut()
            .find(|(key, _)| key == "tokenizer.ggml.merges")
        {
            *entry = Texts(merges.collect());
        }
        let (header, bytes) = header_of(&metadata, &tensors);
        file.write_all(&header)?;
        file.set_len((header.len() as u64).saturating_add(bytes))
    }

    /// Its metadata.
    pub fn metadata(&self) -> Vec<(String, Entry)> {
        let arch = self.architecture.name();
        let mut list: Vec<(String, Entry)> = vec![
            ("general.architecture".to_owned(), Text(arch.to_owned())),
            (
                "general.name".to_owned(),
                Text(match self.architecture {
                    // llama.cpp looks for Microsoft's control tokens if the name contains `phi3`.
                    Architecture::Phi3 => format!("synthetic-phi-{}", self.seed),
                    _ => format!("synthetic-{arch}-{}", self.seed),
                }),
            ),
            ("general.alignment".to_owned(), Uint(32)),
        ];
        let mut put = |key: &str, value: Entry| list.push((format!("{arch}.{key}"), value));
        put("block_count", Uint(self.layers + self.nextn));
        put("context_length", Uint(self.context_max));
        put("embedding_length", Uint(self.width));
        if !matches!(
            self.architecture,
            Architecture::Gemma4 | Architecture::NemotronH | Architecture::NemotronHMoe
        ) {
            put("feed_forward_length", Uint(self.feed_forward));
        }
        if self.experts.0 > 0 {
            put("expert_count", Uint(self.experts.0));
            put("expert_used_count", Uint(self.experts.1));
            put("expert_feed_forward_length", Uint(self.feed_forward));
            if let Architecture::GraniteHybrid
            | Architecture::NemotronHMoe
            | Architecture::Qwen35Moe = self.architecture
            {
                let key = "expert_shared_feed_forward_length";
                put(key, Uint(self.feed_forward));
            }
        }
        put("attention.head_count", Uint(self.heads));
        let heads = (0..self.layers).map(|layer| match self.is_recurrent(layer) {
            false if self.has_mixer(layer) => self.kv_heads.cast_signed(),
            _ => 0,
        });
        let heads = match self.architecture {
            _ if self.architecture.is_lfm2() => Ints(heads.collect()),
            _ if self.scans() => Ints(heads.collect()),
            _ => Uint(self.kv_heads),
        };
        if self.architecture != Architecture::Gemma4 {
            put("attention.head_count_kv", heads);
        }
        put("attention.key_length", Uint(self.head_dim));
        put("attention.value_length", Uint(self.head_dim));
        let epsilon = match self.architecture.centres() {
            true => "attention.layer_norm_epsilon",
            false => "attention.layer_norm_rms_epsilon",
        };
        put(epsilon, Float(1e-6));
        if self.architecture.is_nemotron() {
            put("attention.layer_norm_epsilon", Float(1e-6));
        }
        put("rope.freq_base", Float(self.rotary_base));
        put("rope.dimension_count", Uint(self.rotary));
        match self.architecture {
            Architecture::Llama | Architecture::SmolLm3 => {
                put("vocab_size", Uint(self.vocabulary));
            }
            Architecture::Granite | Architecture::GraniteHybrid => {
                put("vocab_size", Uint(self.vocabulary));
                put("attention.scale", Float(0.0625));
                put("embedding_scale", Float(12.0));
                put("residual_scale", Float(0.22));
                put("logit_scale", Float(8.0));
                if self.scans() {
                    put("rope.scaling.finetuned", Bool(false));
                }
            }
            Architecture::NemotronH | Architecture::NemotronHMoe => {
                let inner = (0..self.layers).map(|layer| match self.has_mixer(layer) {
                    true => 0,
                    false => self.feed_forward.cast_signed(),
                });
                put("vocab_size", Uint(self.vocabulary));
                put("feed_forward_length", Ints(inner.collect()));
                if self.experts.0 > 0 {
                    put("expert_weights_norm", Bool(true));
                    put("expert_weights_scale", Float(2.5));
                }
            }
            Architecture::Mistral3 => {
                put("vocab_size", Uint(self.vocabulary));
                put("attention.temperature_scale", Float(0.1));
                put("rope.scaling.type", Text("yarn".to_owned()));
                put("rope.scaling.factor", Float(16.0));
                put(SCALED_FROM, Uint(8));
                put("rope.scaling.yarn_beta_fast", Float(4.0));
                put("rope.scaling.yarn_beta_slow", Float(0.25));
                put("rope.scaling.yarn_log_multiplier", Float(1.0));
            }
            Architecture::Gemma2 => {
                put("attention.sliding_window", Uint(self.windows.0));
                // Low enough to change the logits of random weights.
                put("attn_logit_softcapping", Float(2.0));
                put("final_logit_softcapping", Float(3.0));
            }
            Architecture::Gemma3 => {
                put("attention.sliding_window", Uint(self.windows.0));
                put(PATTERN, Uint(self.windows.1));
                put("rope.scaling.type", Text("linear".to_owned()));
                put("rope.scaling.factor", Float(8.0));
                put("final_logit_softcapping", Float(30.0));
            }
            Architecture::Gemma4 => {
                let local = (0..self.layers).map(|layer| self.is_local(layer));
                let heads = local
                    .clone()
                    .map(|local| self.kv_heads_of(local).cast_signed());
                let inner = (0..self.layers).map(|layer| self.inner(layer).cast_signed());
                put("attention.sliding_window", Uint(self.windows.0));
                put(PATTERN, Bools(local.collect()));
                put("attention.head_count_kv", Ints(heads.collect()));
                put("feed_forward_length", Ints(inner.collect()));
                put("attention.key_length_swa", Uint(self.head_dim / 2));
                put("attention.value_length_swa", Uint(self.head_dim / 2));
                put("rope.dimension_count_swa", Uint(self.rotary / 2));
                put("rope.freq_base_swa", Float(10_000.0));
                put(
                    "embedding_length_per_layer_input",
                    Uint(self.gemma4.layer_inputs),
                );
                put("attention.shared_kv_layers", Uint(self.borrowing()));
                put("final_logit_softcapping", Float(30.0));
            }
            Architecture::GptOss => {
                put("attention.sliding_window", Uint(self.windows.0));
                put("rope.scaling.type", Text("yarn".to_owned()));
                put("rope.scaling.factor", Float(32.0));
                put(SCALED_FROM, Uint(self.context_max / 32));
            }
            Architecture::Phi3 => {
                put("rope.scaling.type", Text("longrope".to_owned()));
                put(SCALED_FROM, Uint(self.context_max / 2));
                put("rope.scaling.attn_factor", Float(1.19));
            }
            Architecture::Lfm2 | Architecture::Lfm2Moe => {
                put("vocab_size", Uint(self.vocabulary));
                put("shortconv.l_cache", Uint(3));
                if self.experts.0 > 0 {
                    put("leading_dense_block_count", Uint(self.dense()));
                    put("expert_gating_func", Uint(2));
                }
            }
            Architecture::Qwen2 => {
                put("rope.scaling.type", Text("yarn".to_owned()));
                put("rope.scaling.factor", Float(4.0));
                put(SCALED_FROM, Uint(self.context_max / 4));
            }
            Architecture::Exaone4
            | Architecture::Qwen3
            | Architecture::Qwen3Moe
            | Architecture::StableLm => {}
            Architecture::Olmo2 => {
                put("attention.sliding_window", Uint(self.windows.0));
                put("rope.scaling.type", Text("yarn".to_owned()));
                put("rope.scaling.factor", Float(8.0));
                put(SCALED_FROM, Uint(self.context_max / 8));
            }
            Architecture::Qwen3Vl | Architecture::Qwen3VlMoe => {
                let pairs = self.rotary.cast_signed() / 2;
                let sections = [pairs - 2 * (pairs / 3), pairs / 3, pairs / 3, 0];
                put("rope.dimension_sections", Ints(sections.to_vec()));
                put("n_deepstack_layers", Uint(3));
            }
            Architecture::Qwen35 | Architecture::Qwen35Moe => {
                let (keys, values, dim) = self.recurrent;
                let pairs = self.rotary / 2;
                let sections = [pairs - 2 * (pairs / 3), pairs / 3, pairs / 3, 0];
                put(
                    "rope.dimension_sections",
                    Ints(sections.map(u32::cast_signed).to_vec()),
                );
                put("ssm.conv_kernel", Uint(4));
                put("ssm.state_size", Uint(dim));
                put("ssm.group_count", Uint(keys));
                put("ssm.time_step_rank", Uint(values));
                put("ssm.inner_size", Uint(values * dim));
                put("full_attention_interval", Uint(4));
                if self.nextn > 0 {
                    put("nextn_predict_layers", Uint(self.nextn));
                }
            }
        }
        if self.scans() {
            let (groups, heads, state) = self.recurrent;
            put("ssm.conv_kernel", Uint(4));
            put("ssm.state_size", Uint(state));
            put("ssm.group_count", Uint(groups));
            put("ssm.time_step_rank", Uint(heads));
            put("ssm.inner_size", Uint(2 * self.width));
        }
        self.tokenizer(&mut list);
        list
    }

    /// A byte-level vocabulary: 256 bytes, one merge, filler, and three control tokens at the end.
    fn tokenizer(&self, list: &mut Vec<(String, Entry)>) {
        let controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
        let ordinary = self.vocabulary.saturating_sub(3);
        let mut tokens: Vec<String> = (0..=255u8)
            .map(|byte| byte_symbol(byte).to_string())
            .collect();
        tokens.push("\u{120}t".to_owned());
        tokens
            .extend((tokens.len()..ordinary as usize).map(|index| format!("\u{120}filler{index}")));
        let mut kinds = vec![1i32; tokens.len()];
        tokens.extend(controls.map(str::to_owned));
        kinds.extend([3; 3]);
        let pre = match self.architecture {
            Architecture::Llama | Architecture::SmolLm3 => "llama-bpe",
            Architecture::Exaone4
            | Architecture::Gemma2
            | Architecture::Gemma3
            | Architecture::Gemma4
            | Architecture::Granite
            | Architecture::Mistral3
            | Architecture::Olmo2
            | Architecture::Phi3 => "gpt-2",
            Architecture::Qwen2
            | Architecture::Qwen3
            | Architecture::Qwen3Moe
            | Architecture::Qwen3Vl
            | Architecture::Qwen3VlMoe => "qwen2",
            Architecture::Qwen35 | Architecture::Qwen35Moe => "qwen35",
            Architecture::GptOss => "gpt-4o",
            Architecture::GraniteHybrid => "refact",
            Architecture::Lfm2 | Architecture::Lfm2Moe => "lfm2",
            Architecture::NemotronH | Architecture::NemotronHMoe => "pixtral",
            Architecture::StableLm => "stablelm2",
        };
        let mut put = |key: &str, value: Entry| list.push((format!("tokenizer.{key}"), value));
        put("ggml.model", Text("gpt2".to_owned()));
        put("ggml.pre", Text(pre.to_owned()));
        put("ggml.tokens", Texts(tokens));
        put("ggml.token_type", Ints(kinds));
        put("ggml.merges", Texts(vec!["\u{120} t".to_owned()]));
        put("ggml.bos_token_id", Uint(ordinary));
        put("ggml.eos_token_id", Uint(ordinary + 2));
        put("ggml.padding_token_id", Uint(ordinary));
        put("ggml.add_bos_token", Bool(false));
        put("chat_template", Text(CHAT_TEMPLATE.to_owned()));
    }

    /// Its tensors, in the order of the file.
    pub fn tensors(&self) -> Vec<Tensor> {
        let mut list = Vec::new();
        let head = match self.types {
            TypeMix::All(dtype) => dtype,
            TypeMix::MXFP4Moe => GgmlDType::Q8_0,
            TypeMix::Q4KM => GgmlDType::Q6K,
        };
        let (width, kv) = (self.width, self.kv_heads * self.head_dim);
        let embedding = match self.types {
            TypeMix::Q4KM if !self.tied => GgmlDType::Q4K,
            _ => head,
        };
        let (head, embedding) = (
            self.types.fitting(head, width),
            self.types.fitting(embedding, width),
        );
        list.push(Tensor::matrix(
            "token_embd.weight",
            width,
            self.vocabulary,
            embedding,
        ));
        if !self.tied {
            list.push(Tensor::matrix(
                "output.weight",
                width,
                self.vocabulary,
                head,
            ));
        }
        let output_norm = match self.architecture {
            Architecture::Lfm2 | Architecture::Lfm2Moe => "token_embd_norm.weight",
            _ => "output_norm.weight",
        };
        list.push(Tensor::vector(output_norm, width, Draw::Norm));
        if self.architecture.centres() {
            list.push(Tensor::vector("output_norm.bias", width, Draw::Bias));
        }
        match self.architecture {
            Architecture::Gemma4 | Architecture::Llama => {
                list.push(Tensor::vector(
                    "rope_freqs.weight",
                    self.rotary / 2,
                    Draw::Factors,
                ));
            }
            Architecture::Phi3 => {
                for name in ["rope_factors_long.weight", "rope_factors_short.weight"] {
                    list.push(Tensor::vector(name, self.rotary / 2, Draw::Factors));
                }
            }
            _ => {}
        }
        if self.gemma4.layer_inputs > 0 {
            let all = self.gemma4.layer_inputs * self.layers;
            let own = |name: &str, columns, rows| {
                Tensor::matrix(name, columns, rows, self.types.fitting(head, columns))
            };
            list.push(own("per_layer_token_embd.weight", all, self.vocabulary));
            list.push(own("per_layer_model_proj.weight", width, all));
            let norm = "per_layer_proj_norm.weight";
            list.push(Tensor::vector(norm, self.gemma4.layer_inputs, Draw::Norm));
        }
        for layer in 0..self.layers + self.nextn {
            let (head_dim, kv) = match self.architecture == Architecture::Gemma4 {
                true if self.is_local(layer) => (
                    self.head_dim / 2,
                    self.kv_heads_of(true) * self.head_dim / 2,
                ),
                _ => (self.head_dim, kv),
            };
            let borrows = self.borrows(layer);
            let mut stack = |name: &str, columns: u32, rows: u32, more: bool, depth: u32| {
                let dtype = match self.types {
                    TypeMix::All(dtype) => dtype,
                    TypeMix::MXFP4Moe if depth > 0 => GgmlDType::MXFP4,
                    TypeMix::MXFP4Moe => GgmlDType::Q8_0,
                    TypeMix::Q4KM if depth > 0 && self.architecture == Architecture::GptOss => {
                        GgmlDType::MXFP4
                    }
                    TypeMix::Q4KM if more && self.more_bits(layer) => GgmlDType::Q6K,
                    TypeMix::Q4KM => GgmlDType::Q4K,
                };
                let dtype = self.types.fitting(dtype, columns);
                let name = format!("blk.{layer}.{name}.weight");
                list.push(Tensor {
                    depth,
                    ..Tensor::matrix(&name, columns, rows * depth.max(1), dtype)
                });
            };
            let mut matrix = |name: &str, columns: u32, rows: u32, more: bool| {
                stack(name, columns, rows, more, 0);
            };
            let extra = layer >= self.layers;
            let recurrent = !extra && self.is_recurrent(layer);
            let convolution = recurrent && self.architecture.is_lfm2();
            let (keys, values, dim) = self.recurrent;
            let channels = (2 * keys + values) * dim;
            let scans = recurrent && self.scans();
            let has_mixer = self.has_mixer(layer);
            let mixed = 2 * width + 2 * keys * dim;
            let query = self.heads * head_dim;
            if convolution {
                matrix("shortconv.in_proj", width, 3 * width, false);
                matrix("shortconv.out_proj", width, width, false);
            } else if scans {
                matrix("ssm_in", width, 2 * width + mixed + values, false);
                matrix("ssm_out", 2 * width, width, false);
            } else if !has_mixer {
                // The feed-forward part follows.
            } else if recurrent {
                matrix("attn_qkv", width, channels, true);
                matrix("attn_gate", width, values * dim, false);
                matrix("ssm_alpha", width, values, false);
                matrix("ssm_beta", width, values, false);
                matrix("ssm_out", values * dim, width, false);
            } else {
                let gated = if self.architecture.is_qwen35() { 2 } else { 1 };
                if self.architecture == Architecture::Phi3 {
                    matrix("attn_qkv", width, query + 2 * kv, true);
                } else {
                    matrix("attn_q", width, gated * query, false);
                    if !borrows {
                        matrix("attn_k", width, kv, false);
                    }
                    if !borrows && !self.values_are_keys(layer) {
                        matrix("attn_v", width, kv, true);
                    }
                }
                matrix("attn_output", query, width, false);
            }
            let inner = self.inner(layer);
            let experts = match layer >= self.dense() && !self.is_mixer(layer) {
                true => self.experts.0,
                false => 0,
            };
            if experts > 0 {
                if self.architecture == Architecture::Gemma4 {
                    stack("ffn_gate_up_exps", width, 2 * inner, false, experts);
                    stack("ffn_gate", width, inner, false, 0);
                    stack("ffn_up", width, inner, false, 0);
                    stack("ffn_down", inner, width, true, 0);
                } else {
                    if !self.architecture.is_nemotron() {
                        stack("ffn_gate_exps", width, inner, false, experts);
                    }
                    stack("ffn_up_exps", width, inner, false, experts);
                }
                stack("ffn_down_exps", inner, width, true, experts);
                if let Architecture::GraniteHybrid | Architecture::Qwen35Moe = self.architecture {
                    stack("ffn_gate_shexp", width, inner, false, 0);
                }
                if let Architecture::GraniteHybrid
                | Architecture::NemotronHMoe
                | Architecture::Qwen35Moe = self.architecture
                {
                    stack("ffn_up_shexp", width, inner, false, 0);
                    stack("ffn_down_shexp", inner, width, true, 0);
                }
            } else if self.architecture == Architecture::Phi3 {
                matrix("ffn_up", width, 2 * self.feed_forward, false);
                matrix("ffn_down", self.feed_forward, width, true);
            } else if self.architecture.is_nemotron() {
                if !has_mixer {
                    matrix("ffn_up", width, inner, false);
                    matrix("ffn_down", inner, width, true);
                }
            } else {
                matrix("ffn_gate", width, inner, false);
                matrix("ffn_up", width, inner, false);
                matrix("ffn_down", inner, width, true);
            }
            if self.gemma4.layer_inputs > 0 {
                stack("inp_gate", width, self.gemma4.layer_inputs, false, 0);
                stack("proj", self.gemma4.layer_inputs, width, false, 0);
            }
            if extra {
                stack("nextn.eh_proj", 2 * width, width, false, 0);
            }
            if experts > 0 {
                // Publishers never quantise it.
                let name = format!("blk.{layer}.ffn_gate_inp.weight");
                list.push(Tensor::matrix(&name, width, experts, GgmlDType::F32));
            }
            let mut vector = |name: &str, len: u32, draw: Draw| {
                list.push(Tensor::vector(&format!("blk.{layer}.{name}"), len, draw));
            };
            let norms = self.architecture.norms();
            if norms.before {
                vector("attn_norm.weight", width, Draw::Norm);
                if self.architecture.is_qwen35() || self.architecture == Architecture::GptOss {
                    vector("post_attention_norm.weight", width, Draw::Norm);
                } else if !self.architecture.is_nemotron() {
                    vector("ffn_norm.weight", width, Draw::Norm);
                }
            }
            if self.architecture.centres() {
                vector("attn_norm.bias", width, Draw::Bias);
                vector("ffn_norm.bias", width, Draw::Bias);
            }
            if let Architecture::Lfm2Moe | Architecture::NemotronHMoe = self.architecture
                && experts > 0
            {
                vector("exp_probs_b.bias", experts, Draw::Bias);
            }
            if self.architecture == Architecture::Qwen35Moe {
                vector("ffn_gate_inp_shexp.weight", width, Draw::Bias);
            }
            if norms.after {
                vector("post_attention_norm.weight", width, Draw::Norm);
                vector("post_ffw_norm.weight", width, Draw::Norm);
            }
            if self.gemma4.layer_inputs > 0 {
                vector("post_norm.weight", width, Draw::Norm);
            }
            if self.architecture == Architecture::Gemma4 && experts > 0 {
                vector("ffn_gate_inp.scale", width, Draw::Norm);
                vector("ffn_down_exps.scale", experts, Draw::Norm);
                for name in ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"] {
                    vector(&format!("{name}.weight"), width, Draw::Norm);
                }
            }
            match self.architecture {
                Architecture::Gemma4 => vector("layer_output_scale.weight", 1, Draw::Norm),
                Architecture::Granite => {
                    vector("attn_output.bias", width, Draw::Bias);
                    vector("ffn_gate.bias", self.feed_forward, Draw::Bias);
                    vector("ffn_up.bias", self.feed_forward, Draw::Bias);
                    vector("ffn_down.bias", width, Draw::Bias);
                }
                Architecture::GptOss | Architecture::Qwen2 | Architecture::StableLm => {
                    vector("attn_q.bias", query, Draw::Bias);
                    vector("attn_k.bias", kv, Draw::Bias);
                    vector("attn_v.bias", kv, Draw::Bias);
                }
                _ => {}
            }
            if self.architecture == Architecture::GptOss {
                vector("attn_output.bias", width, Draw::Bias);
                vector("attn_sinks.weight", self.heads, Draw::Bias);
                vector("ffn_gate_inp.bias", experts, Draw::Bias);
            }
            let rows_of = |name: &str, columns: u32, rows: u32| Tensor {
                name: format!("blk.{layer}.{name}"),
                columns,
                rows,
                dtype: GgmlDType::F32,
                draw: Draw::Bias,
                depth: 0,
                flat: false,
            };
            if convolution {
                list.push(rows_of("shortconv.conv.weight", 3, width));
            } else if scans {
                vector("ssm_dt.bias", values, Draw::Bias);
                vector("ssm_conv1d.bias", mixed, Draw::Bias);
                list.push(rows_of("ssm_conv1d.weight", 4, mixed));
                for (name, columns, rows, draw) in [
                    ("ssm_a", 1, values, Draw::Decay),
                    ("ssm_d", 1, values, Draw::Norm),
                    ("ssm_norm.weight", 2 * width / keys, keys, Draw::Norm),
                ] {
                    let vectors = rows_of(name, columns, rows);
                    list.push(Tensor { draw, ..vectors });
                }
            } else if recurrent {
                vector("ssm_dt.bias", values, Draw::Bias);
                vector("ssm_a", values, Draw::Decay);
                vector("ssm_norm.weight", dim, Draw::Norm);
                list.push(rows_of("ssm_conv1d.weight", 4, channels));
            } else {
                let lengths = match norms.heads {
                    HeadNorms::None => None,
                    HeadNorms::Each => Some((head_dim, head_dim)),
                    HeadNorms::Whole => Some((query, kv)),
                };
                if let Some((query, key)) = lengths {
                    vector("attn_q_norm.weight", query, Draw::Norm);
                    if !borrows {
                        vector("attn_k_norm.weight", key, Draw::Norm);
                    }
                }
            }
            if self.architecture == Architecture::GptOss {
                for (name, columns) in [("gate", inner), ("up", inner), ("down", width)] {
                    let name = format!("ffn_{name}_exps.bias");
                    list.push(rows_of(&name, columns, experts));
                }
            }
            if extra {
                let mut vector = |name: &str| {
                    list.push(Tensor::vector(
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
            list.push(Tensor::vector("output.bias", self.vocabulary, Draw::Bias));
        }
        list
    }

    /// Whether a layer of Gemma 4 has a window.
    const fn is_local(&self, layer: u32) -> bool {
        !(layer + 1).is_multiple_of(self.windows.1)
    }

    /// Last layers that use the keys and values of earlier ones, of which there are some of both kinds.
    fn borrowing(&self) -> u32 {
        let most = self.layers.saturating_sub(self.windows.1);
        self.gemma4.borrowing.min(most)
    }

    /// Key and value heads of a layer of Gemma 4.
    const fn kv_heads_of(&self, local: bool) -> u32 {
        match local {
            true => self.gemma4.local_kv_heads,
            false => self.kv_heads,
        }
    }

    fn values_are_keys(&self, layer: u32) -> bool {
        self.architecture == Architecture::Gemma4
            && self.gemma4.layer_inputs == 0
            && !self.is_local(layer)
    }

    /// Width of a layer's feed-forward part.
    fn inner(&self, layer: u32) -> u32 {
        match self.gemma4.doubled && self.borrows(layer) {
            true => 2 * self.feed_forward,
            false => self.feed_forward,
        }
    }

    /// Whether a layer has no keys of its own.
    fn borrows(&self, layer: u32) -> bool {
        (self.layers - self.borrowing()..self.layers).contains(&layer)
    }

    /// First layers without experts.
    const fn dense(&self) -> u32 {
        match self.architecture {
            Architecture::Lfm2Moe if self.layers > 1 => self.layers.div_ceil(12),
            _ => 0,
        }
    }

    /// Whether its recurrent layers are scans.
    const fn scans(&self) -> bool {
        matches!(
            self.architecture,
            Architecture::GraniteHybrid | Architecture::NemotronH | Architecture::NemotronHMoe
        )
    }

    /// Whether a layer is not a feed-forward part alone.
    const fn has_mixer(&self, layer: u32) -> bool {
        !self.architecture.is_nemotron() || layer % 4 != 1
    }

    /// Whether a layer is a mixer alone.
    const fn is_mixer(&self, layer: u32) -> bool {
        self.architecture.is_nemotron() && self.has_mixer(layer)
    }

    /// Whether a layer is recurrent: three of four, two of three (`lfm2`), or two of four (`nemotron_h`).
    const fn is_recurrent(&self, layer: u32) -> bool {
        match self.architecture {
            Architecture::Lfm2 | Architecture::Lfm2Moe => !(layer + 1).is_multiple_of(3),
            Architecture::GraniteHybrid if self.windows.1 > 0 => {
                !(layer + 1).is_multiple_of(self.windows.1)
            }
            Architecture::GraniteHybrid | Architecture::Qwen35 | Architecture::Qwen35Moe => {
                !(layer + 1).is_multiple_of(4)
            }
            Architecture::NemotronH | Architecture::NemotronHMoe => layer.is_multiple_of(2),
            _ => false,
        }
    }

    /// llama.cpp's `use_more_bits`.
    const fn more_bits(&self, layer: u32) -> bool {
        let eighth = self.layers / 8;
        layer < eighth || layer >= 7 * self.layers / 8 || (layer - eighth) % 3 == 2
    }
}

/// The header of a file with these tensors, padded, and the length of the tensors.
pub fn header_of(entries: &[(String, Entry)], tensors: &[Tensor]) -> (Vec<u8>, u64) {
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
        let dims = match tensor.depth {
            0 if tensor.rows == 1 && tensor.flat => vec![tensor.columns],
            0 => vec![tensor.columns, tensor.rows],
            depth => vec![tensor.columns, tensor.rows / depth, depth],
        };
        let axes = u32::try_from(dims.len()).unwrap_or(u32::MAX);
        header.extend_from_slice(&axes.to_le_bytes());
        for dim in dims {
            header.extend_from_slice(&u64::from(dim).to_le_bytes());
        }
        header.extend_from_slice(&type_number(tensor.dtype).to_le_bytes());
        header.extend_from_slice(&offset.to_le_bytes());
        offset = (offset + tensor.bytes()).next_multiple_of(ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(32), 0);
    (header, offset)
}

/// One metadata value, in GGUF's types.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "variants are named by their type")]
pub enum Entry {
    Bool(bool),
    Bools(Vec<bool>),
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
        fn list<T>(
            out: &mut Vec<u8>,
            kind: u32,
            list: &[T],
            mut put: impl FnMut(&mut Vec<u8>, &T),
        ) {
            for number in [9, kind] {
                out.extend_from_slice(&number.to_le_bytes());
            }
            out.extend_from_slice(&(list.len() as u64).to_le_bytes());
            list.iter().for_each(|value| put(out, value));
        }
        let mut put = |kind: u32, value: &[u8]| {
            out.extend_from_slice(&kind.to_le_bytes());
            out.extend_from_slice(value);
        };
        match self {
            Bool(value) => put(7, &[u8::from(*value)]),
            Float(value) => put(6, &value.to_le_bytes()),
            Self::Int(value) => put(5, &value.to_le_bytes()),
            Self::Short(value) => put(2, &value.to_le_bytes()),
            Uint(value) => put(4, &value.to_le_bytes()),
            Text(text) => {
                put(8, &[]);
                put_text(out, text);
            }
            Bools(values) => list(out, 7, values, |out, value| out.push(u8::from(*value))),
            Ints(values) => list(out, 5, values, |out, value| out.extend(value.to_le_bytes())),
            Texts(values) => list(out, 8, values, |out, value| put_text(out, value)),
        }
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// One tensor of the file.
#[derive(Clone, Debug)]
pub struct Tensor {
    name: String,
    /// Elements of a row.
    pub columns: u32,
    /// Rows.
    pub rows: u32,
    /// Storage type of its elements.
    pub dtype: GgmlDType,
    /// Distribution of its elements.
    pub draw: Draw,
    /// Matrices in it if it has three axes, or zero.
    depth: u32,
    /// Whether it has one axis only.
    flat: bool,
}

/// Distribution of elements.
#[derive(Clone, Copy, Debug)]
pub enum Draw {
    /// Small, around zero.
    Bias,
    /// Logarithmic decay: between -0.05 and -1.05.
    Decay,
    /// Rotary factors: 1 to 8.
    Factors,
    /// Around zero, so that a product keeps the magnitude of its input.
    Matrix,
    /// Around one.
    Norm,
}

impl Tensor {
    fn matrix(name: &str, columns: u32, rows: u32, dtype: GgmlDType) -> Self {
        Self {
            name: name.to_owned(),
            columns,
            rows,
            dtype,
            draw: Draw::Matrix,
            depth: 0,
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
            depth: 0,
            flat: true,
        }
    }

    fn bytes(&self) -> u64 {
        let block = u64::try_from(self.dtype.block_size()).unwrap_or(1);
        let size = u64::try_from(self.dtype.type_size()).unwrap_or(1);
        u64::from(self.columns) / block * size * u64::from(self.rows)
    }
}

/// Alignment of each tensor, in bytes.
pub const ALIGNMENT: u64 = 32;
const PATTERN: &str = "attention.sliding_window_pattern";
const SCALED_FROM: &str = "rope.scaling.original_context_length";
const CHAT_TEMPLATE: &str = "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}";
