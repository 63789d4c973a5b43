//! Model constants from metadata.

use super::{
    family::{
        Architecture, AttentionSpec, Beside, ConvolutionSpec, DeltaSpec, ExpertSpec, LayerInputs,
        LocalAttention, Pairing, ScanSpec, Scores, Temperature,
    },
    layers::LAYER_PROJECTION,
    limits::{
        EXPERTS_MAX, FULL_ATTENTION_INTERVAL, HEAD_DIM_MAX, HEAD_DIM_MULTIPLE, HEADS_MAX,
        POSITIONS_MAX, TAPS_MAX, WIDTH_MAX, len, root,
    },
    rotation::Rotation,
    tensors::{bad_shape, tensor},
};
use crate::{error::LoadErrorKind, gguf::Header};

/// Metadata under the architecture's prefix.
pub(super) struct Keys<'header> {
    pub(super) header: &'header Header,
}

impl Keys<'_> {
    pub(super) fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.header.architecture())
    }

    pub(super) fn wrong(&self, key: &str, problem: String) -> LoadErrorKind {
        LoadErrorKind::Metadata {
            key: self.full(key),
            problem,
        }
    }

    pub(super) fn optional(&self, key: &str, limit: usize) -> Result<Option<usize>, LoadErrorKind> {
        let full = self.full(key);
        let Some(value) = self.header.value(&full) else {
            return Ok(None);
        };
        let number = value
            .as_u64()
            .ok_or_else(|| self.wrong(key, format!("{value} is not a whole number")))?;
        if number > limit as u64 {
            return Err(LoadErrorKind::Limit {
                what: full,
                value: number,
                limit: limit as u64,
            });
        }
        Ok(Some(len(number)))
    }

    pub(super) fn count(&self, key: &str, limit: usize) -> Result<usize, LoadErrorKind> {
        self.positive(key, self.optional(key, limit)?)
    }

    fn positive(&self, key: &str, value: Option<usize>) -> Result<usize, LoadErrorKind> {
        match value {
            Some(0) => Err(self.wrong(key, "it is 0".to_owned())),
            Some(count) => Ok(count),
            None => Err(self.wrong(key, "it is missing".to_owned())),
        }
    }

    /// As [`Self::count`], for a number that some writers store per layer: all values must be equal.
    pub(super) fn count_of_layers(&self, key: &str, limit: usize) -> Result<usize, LoadErrorKind> {
        self.positive(key, self.optional_of_layers(key, limit)?)
    }

    /// The number of one layer, where writers may store it per layer.
    pub(super) fn count_of_layer(
        &self,
        key: &str,
        limit: usize,
        layer: usize,
    ) -> Result<usize, LoadErrorKind> {
        self.positive(key, self.optional_of(key, limit, |other| other == layer)?)
    }

    /// Width of the feed-forward part of a layer; zero if it has none.
    pub(super) fn width_of_layer(&self, layer: usize) -> Result<usize, LoadErrorKind> {
        let key = "feed_forward_length";
        let width = self.optional_of(key, WIDTH_MAX, |other| other == layer)?;
        width.map_or_else(|| self.positive(key, None), Ok)
    }

    fn optional_of_layers(&self, key: &str, limit: usize) -> Result<Option<usize>, LoadErrorKind> {
        self.optional_of(key, limit, |_| true)
    }

    /// The number of some layers, which must be equal. Zeros belong to layers without it: recurrent layers have no KV
    /// heads.
    fn optional_of(
        &self,
        key: &str,
        limit: usize,
        layers: impl Fn(usize) -> bool,
    ) -> Result<Option<usize>, LoadErrorKind> {
        let Some(list) = self.header.ints(&self.full(key)) else {
            return self.optional(key, limit);
        };
        let of_layers = list.iter().enumerate().filter(|(layer, _)| layers(*layer));
        let mut counts = of_layers
            .map(|(_, &count)| count)
            .filter(|&count| count != 0);
        let first = counts.next().unwrap_or(0);
        if let Some(other) = counts.find(|&count| count != first) {
            return Err(self.wrong(key, format!("it differs by layer: {first} and {other}")));
        }
        match usize::try_from(first) {
            Ok(count) if count <= limit => Ok(Some(count)),
            _ => Err(self.wrong(key, format!("`{first}` is not a number from 1 to {limit}"))),
        }
    }

    /// The mixture of experts, if the model has one.
    pub(super) fn experts(
        &self,
        architecture: Architecture,
        depth: usize,
    ) -> Result<Option<ExpertSpec>, LoadErrorKind> {
        let count = self.optional("expert_count", EXPERTS_MAX)?;
        let Some(count) = count.filter(|&count| count > 0) else {
            return Ok(None);
        };
        if !architecture.has_experts() {
            let problem = format!("a mixture of {count} experts is not supported");
            return Err(self.wrong("expert_count", problem));
        }
        if architecture == Architecture::NemotronHMoe {
            let latent = self.optional("moe_latent_size", WIDTH_MAX)?;
            if let Some(latent) = latent.filter(|&latent| latent > 0) {
                let problem = format!("experts in a space of {latent} elements are not supported");
                return Err(self.wrong("moe_latent_size", problem));
            }
            let key = "expert_weights_norm";
            if self.header.bool(&self.full(key)) != Some(true) {
                let problem = "weights whose sum is not one are not supported".to_owned();
                return Err(self.wrong(key, problem));
            }
        }
        let used = self.count("expert_used_count", count)?;
        let inner = match self.optional_of_layers("expert_feed_forward_length", WIDTH_MAX)? {
            Some(inner) => self.positive("expert_feed_forward_length", Some(inner))?,
            None => self.count_of_layers("feed_forward_length", WIDTH_MAX)?,
        };
        let beside = match architecture {
            Architecture::Gemma4 => {
                Beside::Normed(self.count_of_layers("feed_forward_length", WIDTH_MAX)?)
            }
            Architecture::GraniteHybrid => {
                match self.optional("expert_shared_feed_forward_length", WIDTH_MAX)? {
                    Some(width) if width > 0 => Beside::Added(width),
                    _ => Beside::Nothing,
                }
            }
            Architecture::NemotronHMoe => {
                Beside::Added(self.count("expert_shared_feed_forward_length", WIDTH_MAX)?)
            }
            Architecture::Qwen35Moe => {
                Beside::Gated(self.count("expert_shared_feed_forward_length", WIDTH_MAX)?)
            }
            _ => Beside::Nothing,
        };
        let dense = match architecture {
            Architecture::Lfm2Moe => self
                .optional("leading_dense_block_count", depth - 1)?
                .unwrap_or(0),
            _ => 0,
        };
        let scores = match (self.optional("expert_gating_func", 255)?, architecture) {
            (Some(2), Architecture::Lfm2Moe) => Scores::Sigmoid,
            (Some(2) | None, Architecture::NemotronHMoe) => Scores::Sigmoid,
            (Some(3) | None, Architecture::GptOss) => Scores::Logits,
            (Some(1), _) | (None, _) => Scores::Softmax,
            (Some(other), _) => {
                return Err(self.wrong(
                    "expert_gating_func",
                    format!("function {other} is not supported"),
                ));
            }
        };
        Ok(Some(ExpertSpec {
            count,
            used,
            inner,
            beside,
            dense,
            scores,
            scale: match architecture {
                Architecture::NemotronHMoe => self.factor("expert_weights_scale", 1.0)?,
                _ => 1.0,
            },
        }))
    }

    /// A fraction; its default if the file has none or 0.
    pub(super) fn factor(&self, key: &str, usual: f32) -> Result<f32, LoadErrorKind> {
        match self.header.f32(&self.full(key)) {
            None => Ok(usual),
            Some(0.0) => Ok(usual),
            Some(factor) if factor.is_finite() => Ok(factor),
            Some(factor) => Err(self.wrong(key, format!("`{factor}` is not a finite number"))),
        }
    }

    /// The model's longest context.
    pub(super) fn context(&self) -> Result<u32, LoadErrorKind> {
        let context = self.count("context_length", POSITIONS_MAX as usize)?;
        Ok(u32::try_from(context).unwrap_or(POSITIONS_MAX))
    }

    pub(super) fn attention(
        &self,
        architecture: Architecture,
        width: usize,
        rotation: Rotation,
        depth: usize,
    ) -> Result<AttentionSpec, LoadErrorKind> {
        let heads = self.count_of_layers("attention.head_count", HEADS_MAX)?;
        let two_kinds = architecture == Architecture::Gemma4;
        let kv_heads = self.kv_heads(heads, |layer| {
            !two_kinds || !self.is_local(architecture, layer)
        })?;
        let lacking = match (architecture, depth) {
            (Architecture::Exaone4, EXAONE4_32B_LAYERS) => Some("windows"),
            (Architecture::StableLm, STABLELM_12B_LAYERS) => Some("parts that compute in parallel"),
            _ => None,
        };
        if let Some(what) = lacking {
            let problem = format!("a model of {depth} layers has {what}, which are not supported");
            return Err(self.wrong("block_count", problem));
        }
        let head_dim = self.head_dim(width)?;
        self.check_head("attention.value_length", head_dim)?;
        let rotary = self.rotary(width)?;
        let (local_dim, local_rotary, local_kv_heads) = match two_kinds {
            true => {
                self.count("attention.sliding_window", u32::MAX as usize)?;
                let dim = self.count("attention.key_length_swa", HEAD_DIM_MAX)?;
                self.check_head("attention.value_length_swa", dim)?;
                let rotary = self.rotary_of("rope.dimension_count_swa", dim)?;
                let is_local = |layer| self.is_local(architecture, layer);
                (dim, rotary, self.kv_heads(heads, is_local)?)
            }
            false => (head_dim, rotary, kv_heads),
        };
        let local = |window, rotation| LocalAttention {
            window,
            rotation,
            kv_heads: local_kv_heads,
            head_dim: local_dim,
            rotary: local_rotary,
        };
        let local = match architecture {
            Architecture::Gemma2
            | Architecture::Gemma3
            | Architecture::Gemma4
            | Architecture::GptOss
            | Architecture::Olmo2 => self
                .optional("attention.sliding_window", u32::MAX as usize)?
                .or((architecture == Architecture::Gemma2).then_some(GEMMA2_WINDOW))
                .filter(|&window| window > 0)
                .map(|window| {
                    let rotation = match architecture {
                        Architecture::Gemma2 => rotation,
                        Architecture::GptOss => Rotation {
                            base: self
                                .header
                                .f32(&self.full("rope.freq_base_swa"))
                                .unwrap_or(rotation.base),
                            ..rotation
                        },
                        // As in llama.cpp: without the scaling of the other layers, and with their base.
                        Architecture::Olmo2 => Rotation::plain(rotation.base),
                        _ => Rotation::plain(
                            self.header
                                .f32(&self.full("rope.freq_base_swa"))
                                .unwrap_or(LOCAL_BASE),
                        ),
                    };
                    local(Some(window), rotation)
                }),
            Architecture::SmolLm3 => Some(local(None, Rotation::STILL)),
            _ => None,
        };
        Ok(AttentionSpec {
            heads,
            kv_heads,
            head_dim,
            scale: match architecture {
                // The 27B models, recognised by their depth as in llama.cpp.
                Architecture::Gemma2 if depth == GEMMA2_27B_LAYERS => 1.0 / root(width / heads),
                Architecture::Gemma3 if depth == GEMMA3_27B_LAYERS => 1.0 / root(width / heads),
                Architecture::Gemma4 => 1.0,
                _ if architecture.is_granite() => {
                    self.factor("attention.scale", 1.0 / root(head_dim))?
                }
                _ => 1.0 / root(head_dim),
            },
            score_cap: match architecture {
                Architecture::Gemma2 => Some(self.factor("attn_logit_softcapping", SCORE_CAP)?),
                _ => None,
            },
            rotary,
            rotation,
            local,
            pairing: match architecture {
                Architecture::Granite
                | Architecture::GraniteHybrid
                | Architecture::Llama
                | Architecture::Mistral3
                | Architecture::SmolLm3 => Pairing::Adjacent,
                _ => Pairing::Halves,
            },
            gated: architecture.is_qwen35(),
            values_normed: architecture == Architecture::Gemma4,
        })
    }

    /// Key and value heads of these layers; all heads in a list of zeros, of a model without attention layers.
    fn kv_heads(
        &self,
        heads: usize,
        layers: impl Fn(usize) -> bool,
    ) -> Result<usize, LoadErrorKind> {
        let key = "attention.head_count_kv";
        let found = self.optional_of(key, HEADS_MAX, layers)?;
        let kv_heads = found.filter(|heads| *heads > 0).unwrap_or(heads);
        if heads.is_multiple_of(kv_heads) {
            Ok(kv_heads)
        } else {
            Err(self.wrong(key, format!("{kv_heads} does not divide {heads} heads")))
        }
    }

    /// Refuses heads whose values have another length (`key`) than their keys, or one that no kernel supports.
    pub(super) fn check_head(&self, key: &str, head_dim: usize) -> Result<(), LoadErrorKind> {
        let value_dim = self.optional(key, HEAD_DIM_MAX)?.unwrap_or(head_dim);
        if value_dim == head_dim && head_dim > 0 && head_dim.is_multiple_of(HEAD_DIM_MULTIPLE) {
            return Ok(());
        }
        Err(self.wrong(
            &key.replace("value", "key"),
            format!(
                "heads of {head_dim} and {value_dim} elements: both must be one multiple of {HEAD_DIM_MULTIPLE}"
            ),
        ))
    }

    /// Layers at the end without keys and values of their own, each of which uses those of an earlier layer of its kind.
    pub(super) fn borrowing(
        &self,
        architecture: Architecture,
        depth: usize,
    ) -> Result<usize, LoadErrorKind> {
        let key = "attention.shared_kv_layers";
        if architecture != Architecture::Gemma4 {
            return Ok(0);
        }
        let borrowing = self.optional(key, depth)?.unwrap_or(0);
        let own = depth - borrowing;
        let kind = |layer: usize| self.is_local(architecture, layer);
        match (own..depth).find(|layer| (0..own).all(|other| kind(other) != kind(*layer))) {
            None => Ok(borrowing),
            Some(layer) => Err(self.wrong(
                key,
                format!("layer {layer} has no earlier layer of its kind among the first {own}"),
            )),
        }
    }

    /// Inputs of their own for `depth` layers, if they have them.
    pub(super) fn layer_inputs(
        &self,
        architecture: Architecture,
        depth: usize,
        vocabulary: usize,
    ) -> Result<Option<LayerInputs>, LoadErrorKind> {
        let key = "embedding_length_per_layer_input";
        if architecture != Architecture::Gemma4 {
            return Ok(None);
        }
        let Some(width) = self.optional(key, WIDTH_MAX)?.filter(|&width| width > 0) else {
            return Ok(None);
        };
        let table = tensor(self.header, "per_layer_token_embd.weight")?;
        let projection = tensor(self.header, LAYER_PROJECTION)?;
        let (all, columns) = (
            (depth * width) as u64,
            self.count("embedding_length", WIDTH_MAX)?,
        );
        if !table.has_dims(&[all, vocabulary as u64]) {
            return Err(bad_shape(table, &format!("[{all}, {vocabulary}]")));
        }
        if !projection.has_dims(&[columns as u64, all]) {
            return Err(bad_shape(projection, &format!("[{columns}, {all}]")));
        }
        if !width.is_multiple_of(table.dtype.block_size()) {
            let problem = format!(
                "{width} is no multiple of {} elements",
                table.dtype.block_size()
            );
            return Err(self.wrong(key, problem));
        }
        let table = table.clone();
        Ok(Some(LayerInputs { width, table }))
    }

    /// Growth of queries with their position (`mistral3`), as in llama.cpp's `llm_graph_input_attn_temp`.
    pub(super) fn temperature(&self) -> Result<Option<Temperature>, LoadErrorKind> {
        let scale = self.factor("attention.temperature_scale", 0.0)?;
        if scale == 0.0 {
            return Ok(None);
        }
        let original = "rope.scaling.original_context_length";
        let step = match self.optional(original, POSITIONS_MAX as usize)? {
            Some(step) => self.positive(original, Some(step))?,
            None => self.count("context_length", POSITIONS_MAX as usize)?,
        };
        Ok(Some(Temperature { scale, step }))
    }

    pub(super) fn convolution(&self, width: usize) -> Result<ConvolutionSpec, LoadErrorKind> {
        let taps = self.count("shortconv.l_cache", TAPS_MAX)?;
        if taps < 2 {
            return Err(self.wrong("shortconv.l_cache", format!("{taps} is below 2")));
        }
        if let Some(window) = self
            .optional("attention.sliding_window", u32::MAX as usize)?
            .filter(|&window| window > 0)
        {
            return Err(self.wrong(
                "attention.sliding_window",
                format!("a window of {window} tokens beside convolutions is not supported"),
            ));
        }
        Ok(ConvolutionSpec {
            channels: width,
            taps,
        })
    }

    pub(super) fn delta(&self) -> Result<DeltaSpec, LoadErrorKind> {
        if self.header.bool(&self.full("ssm.v_head_reordered")) == Some(false) {
            return Err(self.wrong(
                "ssm.v_head_reordered",
                "value heads in the publisher's order are not supported".to_owned(),
            ));
        }
        let spec = DeltaSpec {
            key_heads: self.count("ssm.group_count", HEADS_MAX)?,
            value_heads: self.count("ssm.time_step_rank", HEADS_MAX)?,
            head_dim: self.count("ssm.state_size", HEAD_DIM_MAX)?,
            taps: self.count("ssm.conv_kernel", TAPS_MAX)?,
        };
        let inner = self.count("ssm.inner_size", WIDTH_MAX)?;
        if inner != spec.values() {
            return Err(self.wrong(
                "ssm.inner_size",
                format!(
                    "{inner} is not {} value heads of {}",
                    spec.value_heads, spec.head_dim
                ),
            ));
        }
        if !spec.value_heads.is_multiple_of(spec.key_heads) {
            return Err(self.wrong(
                "ssm.group_count",
                format!(
                    "{} does not divide {} value heads",
                    spec.key_heads, spec.value_heads
                ),
            ));
        }
        if !spec.head_dim.is_multiple_of(HEAD_DIM_MULTIPLE) || spec.taps < 2 {
            return Err(self.wrong(
                "ssm.state_size",
                format!(
                    "{} is no multiple of {HEAD_DIM_MULTIPLE}, or {} taps are fewer than 2",
                    spec.head_dim, spec.taps
                ),
            ));
        }
        Ok(spec)
    }

    pub(super) fn scan(&self) -> Result<ScanSpec, LoadErrorKind> {
        let heads = self.count("ssm.time_step_rank", HEADS_MAX)?;
        let inner = self.count("ssm.inner_size", WIDTH_MAX)?;
        let spec = ScanSpec {
            groups: self.count("ssm.group_count", HEADS_MAX)?,
            heads,
            head_dim: inner / heads,
            state: self.count("ssm.state_size", HEAD_DIM_MAX)?,
            taps: self.count("ssm.conv_kernel", TAPS_MAX)?,
        };
        let is_multiple = |number: usize| number > 0 && number.is_multiple_of(HEAD_DIM_MULTIPLE);
        let (key, problem) = if inner != spec.values() || !is_multiple(spec.head_dim) {
            let what = format!("{heads} heads of one multiple of {HEAD_DIM_MULTIPLE} elements");
            ("ssm.inner_size", format!("{inner} is not {what}"))
        } else if !heads.is_multiple_of(spec.groups) {
            let problem = format!("{} does not divide {heads} heads", spec.groups);
            ("ssm.group_count", problem)
        } else if !is_multiple(spec.state) {
            let problem = format!("{} is no multiple of {HEAD_DIM_MULTIPLE}", spec.state);
            ("ssm.state_size", problem)
        } else if spec.taps < 2 {
            ("ssm.conv_kernel", format!("{} is below 2", spec.taps))
        } else {
            return Ok(spec);
        };
        Err(self.wrong(key, problem))
    }

    pub(super) fn is_recurrent(&self, architecture: Architecture, layer: usize) -> bool {
        if let Some(list) = self.header.bools(&self.full("attention.recurrent_layers")) {
            return list.get(layer).copied().unwrap_or(false);
        }
        let interval = self.header.u32(&self.full("full_attention_interval"));
        // Recurrent layers have no KV heads, in files that store the number per layer.
        let heads = self.header.ints(&self.full("attention.head_count_kv"));
        if architecture == Architecture::GraniteHybrid || architecture.is_nemotron() {
            // As in llama.cpp: no other key says it.
            return heads.is_some_and(|heads| heads.get(layer) == Some(&0));
        }
        match (interval, heads) {
            (None, Some(heads)) if heads.contains(&0) => heads.get(layer) == Some(&0),
            (interval, _) => {
                let interval =
                    interval.map_or(FULL_ATTENTION_INTERVAL, |interval| interval as usize);
                !(layer + 1).is_multiple_of(interval.max(1))
            }
        }
    }

    /// Elements of an attention head.
    fn head_dim(&self, width: usize) -> Result<usize, LoadErrorKind> {
        match self.optional("attention.key_length", HEAD_DIM_MAX)? {
            Some(dim) => Ok(dim),
            None => Ok(width / self.count_of_layers("attention.head_count", HEADS_MAX)?),
        }
    }

    /// Rotated elements of a head.
    pub(super) fn rotary(&self, width: usize) -> Result<usize, LoadErrorKind> {
        self.rotary_of("rope.dimension_count", self.head_dim(width)?)
    }

    fn rotary_of(&self, key: &str, head_dim: usize) -> Result<usize, LoadErrorKind> {
        let rotary = self.optional(key, HEAD_DIM_MAX)?.unwrap_or(head_dim);
        if rotary == 0 || rotary > head_dim || !rotary.is_multiple_of(2) {
            return Err(self.wrong(key, format!("{rotary} of {head_dim} elements")));
        }
        Ok(rotary)
    }

    /// Refuses rotation sections that leave pairs of a head without a position: in text, all sections have the same
    /// position except the fourth, which has none.
    pub(super) fn check_sections(&self, rotary: usize) -> Result<(), LoadErrorKind> {
        let key = "rope.dimension_sections";
        let Some(sections) = self.header.ints(&self.full(key)) else {
            return Ok(());
        };
        let (pairs, sum) = (
            rotary as u64 / 2,
            sections.iter().map(|&pairs| i64::from(pairs)).sum::<i64>(),
        );
        let fits = (3..=4).contains(&sections.len())
            && sections.iter().all(|&pairs| pairs >= 0)
            && sections.get(3).is_none_or(|&pairs| pairs == 0)
            && u64::try_from(sum) == Ok(pairs);
        let problem = || format!("{sections:?} are not three sections of {pairs} pairs in all");
        if fits {
            Ok(())
        } else {
            Err(self.wrong(key, problem()))
        }
    }

    /// Whether an attention layer is one of [`AttentionSpec::local`]: by a list, or by an interval.
    pub(super) fn is_local(&self, architecture: Architecture, layer: usize) -> bool {
        if architecture == Architecture::SmolLm3 {
            return (layer + 1).is_multiple_of(STILL_INTERVAL);
        }
        let key = self.full("attention.sliding_window_pattern");
        if let Some(list) = self.header.bools(&key) {
            return list.get(layer).copied().unwrap_or(false);
        }
        let pattern = self.header.u32(&key).map_or_else(
            || match architecture {
                Architecture::Gemma2 | Architecture::GptOss => SECOND_PATTERN,
                Architecture::Olmo2 => OLMO3_PATTERN,
                _ => LOCAL_PATTERN,
            },
            |pattern| pattern as usize,
        );
        pattern == 0 || !(layer + 1).is_multiple_of(pattern)
    }
}

/// llama.cpp's default for `rope.freq_base_swa`.
const LOCAL_BASE: f32 = 10_000.0;
/// llama.cpp's default for the scores of Gemma 2.
const SCORE_CAP: f32 = 50.0;
/// llama.cpp's default for the window of Gemma 2.
const GEMMA2_WINDOW: usize = 4096;
/// llama.cpp's default for Gemma 2 and gpt-oss: every second layer sees everything.
const SECOND_PATTERN: usize = 2;
/// llama.cpp's default for Gemma 3: every sixth layer sees everything.
const LOCAL_PATTERN: usize = 6;
/// llama.cpp's default for OLMo 3: every fourth layer sees everything.
const OLMO3_PATTERN: usize = 4;
/// Layers of EXAONE 4 32B, by which llama.cpp recognises the model with windows.
const EXAONE4_32B_LAYERS: usize = 64;
/// Layers of StableLM 2 12B, the only size whose attention and feed-forward part read the same input.
const STABLELM_12B_LAYERS: usize = 40;
/// llama.cpp's value for SmolLM3: every fourth layer has no rotation.
const STILL_INTERVAL: usize = 4;
/// Layers of Gemma 2 27B, the only size with another scaling rule.
const GEMMA2_27B_LAYERS: usize = 46;
/// Layers of Gemma 3 27B, the only size with another scaling rule.
const GEMMA3_27B_LAYERS: usize = 62;
