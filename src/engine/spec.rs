//! What a model consists of: the header's constants and tensors, checked, in the order in which they are used.

use candle_core::quantized::GgmlDType;

use super::{
    error::{LoadError, LoadErrorKind},
    gguf::{Header, TensorInfo},
};
use crate::policy::residency::LayerKind;

/// A model that the engine can compute with.
#[derive(Clone, Debug)]
pub struct Spec {
    /// GGUF architecture.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub width: usize,
    /// Width of the feed-forward part.
    pub feed_forward: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// The longest context that the model was made for.
    pub context_max: u32,
    /// Added to the mean square in every norm.
    pub epsilon: f32,
    /// Attention layers.
    pub attention: AttentionSpec,
    /// Recurrent layers, where there are any.
    pub recurrent: Option<RecurrentSpec>,
    /// The layers, first to last; multi-token-prediction blocks are left out.
    pub layers: Vec<LayerSpec>,
    /// Rows of input embeddings.
    pub embedding: TensorInfo,
    /// Output head; the embedding itself when tied.
    pub head: TensorInfo,
    /// Whether [`Self::head`] is [`Self::embedding`].
    pub tied: bool,
    /// Weight of the last norm.
    pub output_norm: TensorInfo,
    /// Divisors of the rotary angles (Llama 3.1 and later).
    pub rope_factors: Option<TensorInfo>,
    /// Blocks for multi-token prediction that the file has and the engine leaves alone.
    pub skipped_blocks: u32,
}

/// The families that the engine knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2 and 3.
    Llama,
    /// Qwen3 dense.
    Qwen3,
    /// Qwen3.5: Gated DeltaNet with an attention layer now and then.
    Qwen35,
}

/// Constants of attention layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Elements of a head that are rotated.
    pub rotary: usize,
    /// Base of the rotary angles.
    pub rotary_base: f32,
    /// Which elements make a pair.
    pub pairing: Pairing,
    /// Whether the query projection also yields a gate for the output.
    pub gated: bool,
}

/// Which elements of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// 2i and 2i+1.
    Adjacent,
    /// i and i + half of the rotated elements.
    Halves,
}

/// Constants of Gated DeltaNet layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecurrentSpec {
    /// Key heads, which are the query heads too.
    pub key_heads: usize,
    /// Value heads; head h uses key head h mod `key_heads`.
    pub value_heads: usize,
    /// Elements of a key head and of a value head.
    pub head_dim: usize,
    /// Taps of the convolution.
    pub taps: usize,
}

impl RecurrentSpec {
    /// Channels of the convolution: queries, keys, values.
    #[must_use]
    pub const fn channels(&self) -> usize {
        (2 * self.key_heads + self.value_heads) * self.head_dim
    }

    /// Elements of all value heads.
    #[must_use]
    pub const fn values(&self) -> usize {
        self.value_heads * self.head_dim
    }

    /// Elements of the state matrices of one layer.
    #[must_use]
    pub const fn state_len(&self) -> usize {
        self.value_heads * self.head_dim * self.head_dim
    }

    /// Elements that the convolution remembers in one layer.
    #[must_use]
    pub const fn conv_len(&self) -> usize {
        (self.taps - 1) * self.channels()
    }
}

/// One layer.
#[derive(Clone, Debug)]
pub struct LayerSpec {
    /// Attention or recurrent.
    pub kind: LayerKind,
    /// What is multiplied with, in the order of use. These are what a layer's residency is about.
    pub matrices: Vec<Matrix>,
    /// Norms, biases and convolutions; small, and resident in every plan.
    pub vectors: Vec<(Vector, TensorInfo)>,
}

/// A weight that is multiplied with.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// What it is for.
    pub role: Role,
    /// Where it lies.
    pub tensor: TensorInfo,
    /// Elements of a row: inputs.
    pub columns: usize,
    /// Outputs.
    pub rows: usize,
    /// Bytes of one row.
    pub row_bytes: usize,
}

/// What a matrix is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Decay of the recurrent state.
    Alpha,
    /// Strength of the recurrent update.
    Beta,
    /// Feed-forward, back to the residual stream.
    FfnDown,
    /// Feed-forward gate.
    FfnGate,
    /// Feed-forward.
    FfnUp,
    /// Gate of the recurrent output.
    Gate,
    /// Attention keys.
    Key,
    /// Mixer output, back to the residual stream.
    Output,
    /// Attention queries, and their gate where there is one.
    Query,
    /// Queries, keys and values of a recurrent layer.
    QueryKeyValue,
    /// Attention values.
    Value,
}

/// A small tensor that is resident in every plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Vector {
    /// Convolution taps, four for each channel.
    Convolution,
    /// Logarithmic decay for each value head, negative.
    Decay,
    /// Bias of the decay for each value head.
    DecayBias,
    /// Norm before the feed-forward part.
    FfnNorm,
    /// Norm of each key head.
    KeyNorm,
    /// Norm before the mixer.
    MixerNorm,
    /// Norm of each query head.
    QueryNorm,
    /// Norm of each recurrent output head.
    StateNorm,
}

impl LayerSpec {
    /// The matrix for `role`, with its index in the order of use.
    #[must_use]
    pub fn matrix(&self, role: Role) -> Option<(usize, &Matrix)> {
        self.matrices.iter().enumerate().find(|(_, matrix)| matrix.role == role)
    }
}

impl Spec {
    /// Checks the header and finds everything that the architecture needs.
    ///
    /// # Errors
    ///
    /// When the architecture is unknown, a constant or tensor is missing or contradicts the others, or the file has
    /// tensors that the engine would have to ignore.
    pub fn read(header: &Header) -> Result<Self, LoadError> {
        Self::read_kind(header).map_err(|kind| LoadError::new(header.path(), kind))
    }

    fn read_kind(header: &Header) -> Result<Self, LoadErrorKind> {
        let architecture = match header.architecture() {
            "llama" => Architecture::Llama,
            "qwen3" => Architecture::Qwen3,
            "qwen35" => Architecture::Qwen35,
            other => {
                return Err(LoadErrorKind::Architecture {
                    architecture: other.to_owned(),
                    known: KNOWN,
                });
            }
        };
        let keys = Keys { header };
        let blocks = keys.count("block_count", LAYERS_MAX)?;
        let skipped = keys.optional("nextn_predict_layers", LAYERS_MAX)?.unwrap_or(0);
        let Some(depth) = blocks.checked_sub(skipped).filter(|&depth| depth > 0) else {
            return Err(keys.wrong(
                "nextn_predict_layers",
                format!("{skipped} of {blocks} blocks leaves none"),
            ));
        };
        for (key, allowed) in [("rope.scaling.type", "none"), ("expert_count", "0")] {
            let key = keys.full(key);
            let text = match header.value(&key) {
                Some(super::gguf::Value::String(text)) => text.clone(),
                Some(other) => other
                    .as_u64()
                    .map_or_else(|| format!("{other:?}"), |number| number.to_string()),
                None => continue,
            };
            if text != allowed {
                return Err(LoadErrorKind::Metadata {
                    key,
                    problem: format!("`{text}` is not supported"),
                });
            }
        }
        let width = keys.count("embedding_length", WIDTH_MAX)?;
        let feed_forward = keys.count("feed_forward_length", WIDTH_MAX)?;
        let attention = keys.attention(architecture, width)?;
        let recurrent = match architecture {
            Architecture::Qwen35 => Some(keys.recurrent()?),
            Architecture::Llama | Architecture::Qwen3 => None,
        };
        let embedding = tensor(header, "token_embd.weight")?;
        let vocabulary = match embedding.dims.as_slice() {
            &[columns, rows] if columns == width as u64 && rows <= u64::from(u32::MAX) => len(rows),
            _ => return Err(bad_shape(embedding, &format!("[{width}, vocabulary]"))),
        };
        let head = match header.tensor("output.weight") {
            Some(head) if head.dims == embedding.dims => Some(head),
            Some(head) => return Err(bad_shape(head, &format!("{:?}", embedding.dims))),
            None => None,
        };
        let output_norm = vector(header, "output_norm.weight", &[width])?;
        let rope_factors = match header.tensor("rope_freqs.weight") {
            Some(_) => Some(vector(header, "rope_freqs.weight", &[attention.rotary / 2])?),
            None => None,
        };
        let mut seen = 0;
        let mut layers = Vec::new();
        for index in 0..depth {
            let builder = LayerBuilder {
                header,
                prefix: format!("blk.{index}."),
                width,
                feed_forward,
                attention: &attention,
            };
            let layer = match recurrent.as_ref().filter(|_| keys.is_recurrent(index)) {
                Some(recurrent) => builder.recurrent(recurrent)?,
                None => builder.attention(architecture)?,
            };
            seen += layer.matrices.len() + layer.vectors.len();
            refuse_unknown(header, &builder.prefix, &layer)?;
            layers.push(layer);
        }
        debug_assert!(seen <= header.tensors().count());
        Ok(Self {
            architecture,
            width,
            feed_forward,
            vocabulary,
            context_max: header
                .u32(&keys.full("context_length"))
                .ok_or_else(|| keys.wrong("context_length", "it is missing".to_owned()))?,
            epsilon: header
                .f32(&keys.full("attention.layer_norm_rms_epsilon"))
                .ok_or_else(|| keys.wrong("attention.layer_norm_rms_epsilon", "it is missing".to_owned()))?,
            attention,
            recurrent,
            layers,
            tied: head.is_none(),
            head: head.unwrap_or(embedding).clone(),
            embedding: embedding.clone(),
            output_norm,
            rope_factors,
            skipped_blocks: u32::try_from(skipped).unwrap_or(u32::MAX),
        })
    }

    /// Layers that attend.
    #[must_use]
    pub fn attention_layers(&self) -> usize {
        self.layers
            .iter()
            .filter(|layer| layer.kind == LayerKind::Attention)
            .count()
    }

    /// Element types of all matrices and of the head.
    pub fn matrix_types(&self) -> impl Iterator<Item = GgmlDType> {
        self.layers
            .iter()
            .flat_map(|layer| &layer.matrices)
            .map(|matrix| matrix.tensor.dtype)
            .chain([self.head.dtype])
    }
}

/// Metadata under the architecture's prefix.
struct Keys<'header> {
    header: &'header Header,
}

impl Keys<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.header.architecture())
    }

    fn wrong(&self, key: &str, problem: String) -> LoadErrorKind {
        LoadErrorKind::Metadata {
            key: self.full(key),
            problem,
        }
    }

    fn optional(&self, key: &str, limit: usize) -> Result<Option<usize>, LoadErrorKind> {
        let full = self.full(key);
        let Some(value) = self.header.value(&full) else {
            return Ok(None);
        };
        let number = value
            .as_u64()
            .ok_or_else(|| self.wrong(key, format!("{value:?} is not a whole number")))?;
        if number > limit as u64 {
            return Err(LoadErrorKind::Limit {
                what: full,
                value: number,
                limit: limit as u64,
            });
        }
        Ok(Some(len(number)))
    }

    fn count(&self, key: &str, limit: usize) -> Result<usize, LoadErrorKind> {
        match self.optional(key, limit)? {
            Some(0) => Err(self.wrong(key, "it is 0".to_owned())),
            Some(count) => Ok(count),
            None => Err(self.wrong(key, "it is missing".to_owned())),
        }
    }

    fn attention(&self, architecture: Architecture, width: usize) -> Result<AttentionSpec, LoadErrorKind> {
        let heads = self.count("attention.head_count", HEADS_MAX)?;
        // Some writers give one number for each layer; those of recurrent layers are 0.
        let kv_heads = match self.header.ints(&self.full("attention.head_count_kv")) {
            Some(list) => {
                let mut counts: Vec<i32> = list.iter().copied().filter(|&count| count != 0).collect();
                counts.dedup();
                match counts.as_slice() {
                    &[count] => usize::try_from(count).unwrap_or(0),
                    _ => return Err(self.wrong("attention.head_count_kv", format!("{list:?} differs by layer"))),
                }
            }
            None => self.optional("attention.head_count_kv", HEADS_MAX)?.unwrap_or(heads),
        };
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(self.wrong(
                "attention.head_count_kv",
                format!("{kv_heads} does not divide {heads} heads"),
            ));
        }
        let head_dim = match self.optional("attention.key_length", HEAD_DIM_MAX)? {
            Some(dim) => dim,
            None => width / heads,
        };
        let value_dim = self
            .optional("attention.value_length", HEAD_DIM_MAX)?
            .unwrap_or(head_dim);
        if value_dim != head_dim || head_dim == 0 || !head_dim.is_multiple_of(HEAD_DIM_MULTIPLE) {
            return Err(self.wrong(
                "attention.key_length",
                format!(
                    "heads of {head_dim} and {value_dim} elements: both must be one multiple of {HEAD_DIM_MULTIPLE}"
                ),
            ));
        }
        let rotary = self.optional("rope.dimension_count", HEAD_DIM_MAX)?.unwrap_or(head_dim);
        if rotary == 0 || rotary > head_dim || !rotary.is_multiple_of(2) {
            return Err(self.wrong("rope.dimension_count", format!("{rotary} of {head_dim} elements")));
        }
        Ok(AttentionSpec {
            heads,
            kv_heads,
            head_dim,
            rotary,
            rotary_base: self.header.f32(&self.full("rope.freq_base")).unwrap_or(ROTARY_BASE),
            pairing: match architecture {
                Architecture::Llama => Pairing::Adjacent,
                Architecture::Qwen3 | Architecture::Qwen35 => Pairing::Halves,
            },
            gated: architecture == Architecture::Qwen35,
        })
    }

    fn recurrent(&self) -> Result<RecurrentSpec, LoadErrorKind> {
        let spec = RecurrentSpec {
            key_heads: self.count("ssm.group_count", HEADS_MAX)?,
            value_heads: self.count("ssm.time_step_rank", HEADS_MAX)?,
            head_dim: self.count("ssm.state_size", HEAD_DIM_MAX)?,
            taps: self.count("ssm.conv_kernel", TAPS_MAX)?,
        };
        let inner = self.count("ssm.inner_size", WIDTH_MAX)?;
        if inner != spec.values() {
            return Err(self.wrong(
                "ssm.inner_size",
                format!("{inner} is not {} value heads of {}", spec.value_heads, spec.head_dim),
            ));
        }
        if !spec.value_heads.is_multiple_of(spec.key_heads) {
            return Err(self.wrong(
                "ssm.group_count",
                format!("{} does not divide {} value heads", spec.key_heads, spec.value_heads),
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

    fn is_recurrent(&self, layer: usize) -> bool {
        if let Some(list) = self.header.bools(&self.full("attention.recurrent_layers")) {
            return list.get(layer).copied().unwrap_or(false);
        }
        let interval = self
            .header
            .u32(&self.full("full_attention_interval"))
            .map_or(FULL_ATTENTION_INTERVAL, |interval| interval as usize)
            .max(1);
        !(layer + 1).is_multiple_of(interval)
    }
}

struct LayerBuilder<'spec> {
    header: &'spec Header,
    prefix: String,
    width: usize,
    feed_forward: usize,
    attention: &'spec AttentionSpec,
}

impl LayerBuilder<'_> {
    fn attention(&self, architecture: Architecture) -> Result<LayerSpec, LoadErrorKind> {
        let spec = self.attention;
        let query = spec.heads * spec.head_dim;
        let kv = spec.kv_heads * spec.head_dim;
        let mut matrices = vec![
            self.matrix(
                Role::Query,
                "attn_q.weight",
                self.width,
                if spec.gated { 2 * query } else { query },
            )?,
            self.matrix(Role::Key, "attn_k.weight", self.width, kv)?,
            self.matrix(Role::Value, "attn_v.weight", self.width, kv)?,
            self.matrix(Role::Output, "attn_output.weight", query, self.width)?,
        ];
        let mut vectors = vec![self.vector(Vector::MixerNorm, "attn_norm.weight", &[self.width])?];
        if architecture != Architecture::Llama {
            vectors.push(self.vector(Vector::QueryNorm, "attn_q_norm.weight", &[spec.head_dim])?);
            vectors.push(self.vector(Vector::KeyNorm, "attn_k_norm.weight", &[spec.head_dim])?);
        }
        self.feed_forward(architecture, &mut matrices, &mut vectors)?;
        Ok(LayerSpec {
            kind: LayerKind::Attention,
            matrices,
            vectors,
        })
    }

    fn recurrent(&self, spec: &RecurrentSpec) -> Result<LayerSpec, LoadErrorKind> {
        let mut matrices = vec![
            self.matrix(Role::QueryKeyValue, "attn_qkv.weight", self.width, spec.channels())?,
            self.matrix(Role::Gate, "attn_gate.weight", self.width, spec.values())?,
            self.matrix(Role::Alpha, "ssm_alpha.weight", self.width, spec.value_heads)?,
            self.matrix(Role::Beta, "ssm_beta.weight", self.width, spec.value_heads)?,
            self.matrix(Role::Output, "ssm_out.weight", spec.values(), self.width)?,
        ];
        let mut vectors = vec![
            self.vector(Vector::MixerNorm, "attn_norm.weight", &[self.width])?,
            self.vector(Vector::Convolution, "ssm_conv1d.weight", &[spec.taps, spec.channels()])?,
            self.vector(Vector::DecayBias, "ssm_dt.bias", &[spec.value_heads])?,
            self.vector(Vector::Decay, "ssm_a", &[spec.value_heads])?,
            self.vector(Vector::StateNorm, "ssm_norm.weight", &[spec.head_dim])?,
        ];
        self.feed_forward(Architecture::Qwen35, &mut matrices, &mut vectors)?;
        Ok(LayerSpec {
            kind: LayerKind::Recurrent,
            matrices,
            vectors,
        })
    }

    fn feed_forward(
        &self,
        architecture: Architecture,
        matrices: &mut Vec<Matrix>,
        vectors: &mut Vec<(Vector, TensorInfo)>,
    ) -> Result<(), LoadErrorKind> {
        let norm = match architecture {
            Architecture::Qwen35 => "post_attention_norm.weight",
            Architecture::Llama | Architecture::Qwen3 => "ffn_norm.weight",
        };
        vectors.push(self.vector(Vector::FfnNorm, norm, &[self.width])?);
        matrices.push(self.matrix(Role::FfnGate, "ffn_gate.weight", self.width, self.feed_forward)?);
        matrices.push(self.matrix(Role::FfnUp, "ffn_up.weight", self.width, self.feed_forward)?);
        matrices.push(self.matrix(Role::FfnDown, "ffn_down.weight", self.feed_forward, self.width)?);
        Ok(())
    }

    fn matrix(&self, role: Role, name: &str, columns: usize, rows: usize) -> Result<Matrix, LoadErrorKind> {
        let info = tensor(self.header, &format!("{}{name}", self.prefix))?;
        if info.dims != [columns as u64, rows as u64] {
            return Err(bad_shape(info, &format!("[{columns}, {rows}]")));
        }
        // candle's product of Q5_0 rows goes by two blocks.
        if info.dtype == GgmlDType::Q5_0 && !columns.is_multiple_of(64) {
            return Err(bad_shape(info, "rows of Q5_0 in pairs of blocks"));
        }
        Ok(Matrix {
            role,
            tensor: info.clone(),
            columns,
            rows,
            row_bytes: columns / info.dtype.block_size() * info.dtype.type_size(),
        })
    }

    fn vector(&self, vector_: Vector, name: &str, dims: &[usize]) -> Result<(Vector, TensorInfo), LoadErrorKind> {
        Ok((vector_, vector(self.header, &format!("{}{name}", self.prefix), dims)?))
    }
}

fn tensor<'header>(header: &'header Header, name: &str) -> Result<&'header TensorInfo, LoadErrorKind> {
    header.tensor(name).ok_or_else(|| LoadErrorKind::TensorMissing {
        tensor: name.to_owned(),
    })
}

fn vector(header: &Header, name: &str, dims: &[usize]) -> Result<TensorInfo, LoadErrorKind> {
    let info = tensor(header, name)?;
    if !info.dims.iter().copied().eq(dims.iter().map(|&dim| dim as u64)) {
        return Err(bad_shape(info, &format!("{dims:?}")));
    }
    if !matches!(info.dtype, GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16) {
        return Err(LoadErrorKind::TensorType {
            tensor: name.to_owned(),
            dtype: format!("{:?}, which a vector cannot have", info.dtype),
        });
    }
    Ok(info.clone())
}

fn bad_shape(info: &TensorInfo, expected: &str) -> LoadErrorKind {
    LoadErrorKind::TensorShape {
        tensor: info.name.clone(),
        dims: info.dims.clone(),
        dtype: format!("a model whose header says {expected}"),
    }
}

/// A tensor that is left out would change every answer without a word: a bias, a scale, an expert.
fn refuse_unknown(header: &Header, prefix: &str, layer: &LayerSpec) -> Result<(), LoadErrorKind> {
    let stray = header.tensors().find(|info| {
        info.name.starts_with(prefix)
            && !layer.matrices.iter().any(|matrix| matrix.tensor.name == info.name)
            && !layer.vectors.iter().any(|(_, known)| known.name == info.name)
    });
    match stray {
        None => Ok(()),
        Some(info) => Err(LoadErrorKind::TensorUnknown {
            tensor: info.name.clone(),
            architecture: header.architecture().to_owned(),
        }),
    }
}

fn len(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

const KNOWN: &str = "llama, qwen3 and qwen35";
/// llama.cpp's `LLAMA_MAX_LAYERS`.
const LAYERS_MAX: usize = 512;
/// Four times the width of the largest dense models of today.
const WIDTH_MAX: usize = 1 << 18;
const HEADS_MAX: usize = 1024;
const HEAD_DIM_MAX: usize = 1024;
/// Kernels go through heads in steps of this many elements.
const HEAD_DIM_MULTIPLE: usize = 8;
const TAPS_MAX: usize = 16;
/// llama.cpp's default for `rope.freq_base`.
const ROTARY_BASE: f32 = 10_000.0;
/// llama.cpp's default for `full_attention_interval`.
const FULL_ATTENTION_INTERVAL: usize = 4;
