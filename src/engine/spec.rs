//! What a model consists of: the header's constants and tensors, checked, in the order in which they are used.

use std::ops::Range;

use candle_core::quantized::GgmlDType;

use self::{keys::Keys, layers::LayerBuilder, rotary::Rotary};
use super::{
    disk::Attention,
    error::{LoadError, LoadErrorKind},
    gguf::{Header, StringTable, TensorInfo},
    sayable::Sayable,
};
use crate::{policy::residency::LayerKind, units::Tokens};

mod keys;
mod layers;
mod rotary;

pub use rotary::Rotation;

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
    /// What embeddings are multiplied with.
    pub embedding_scale: f32,
    /// What the gate of the feed-forward part goes through.
    pub activation: Activation,
    /// Logits are squeezed between plus and minus this, where a model does so.
    pub logit_cap: Option<f32>,
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
    /// Rows of the head that are used, in order; all when absent.
    pub said: Option<Vec<Range<usize>>>,
    /// Whether [`Self::head`] is [`Self::embedding`].
    pub tied: bool,
    /// Weight of the last norm.
    pub output_norm: TensorInfo,
    /// Divisors of the rotary angles (Llama 3.1 and later, Phi-3).
    pub rope_factors: Option<TensorInfo>,
}

impl Spec {
    /// Leaves the head the rows that are to be said; all where nothing is said about them.
    pub(super) fn reduce(
        &mut self,
        header: &Header,
        vocabulary: Option<&Sayable>,
        attention: &Attention,
    ) -> Result<(), LoadError> {
        if let Some(vocabulary) = vocabulary {
            let rows = vocabulary
                .rows(header, self.vocabulary, attention)
                .map_err(|kind| LoadError::new(header.path(), kind))?;
            self.said = Some(rows);
        }
        Ok(())
    }
}

/// Blocks for multi-token prediction that the file of this header has and the engine leaves alone.
pub(super) fn skipped_blocks(header: &Header) -> u32 {
    header.u32(&Keys { header }.full(KEY_SKIPPED)).unwrap_or(0)
}

/// The key for blocks that predict more than one token.
const KEY_SKIPPED: &str = "nextn_predict_layers";

/// The families that the engine knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Gemma 3, its text part.
    Gemma3,
    /// Llama 2 and 3.
    Llama,
    /// Phi-3 and Phi-4 dense.
    Phi3,
    /// Qwen2 and Qwen2.5 dense.
    Qwen2,
    /// Qwen3 dense.
    Qwen3,
    /// Qwen3.5: Gated DeltaNet with an attention layer now and then.
    Qwen35,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Gemma3,
        Self::Llama,
        Self::Phi3,
        Self::Qwen2,
        Self::Qwen3,
        Self::Qwen35,
    ];

    /// The name in `general.architecture`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gemma3 => "gemma3",
            Self::Llama => "llama",
            Self::Phi3 => "phi3",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen35 => "qwen35",
        }
    }
}

/// What the gate of a feed-forward part goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x · Φ(x)`, by the hyperbolic tangent.
    Gelu,
    /// `x · σ(x)`.
    Silu,
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
    /// What products of queries and keys are multiplied with.
    pub scale: f32,
    /// Elements of a head that are rotated.
    pub rotary: usize,
    /// By which angles, in layers that see the whole context.
    pub rotation: Rotation,
    /// What is different in layers that see the last tokens only.
    pub local: Option<LocalAttention>,
    /// Which elements make a pair.
    pub pairing: Pairing,
    /// Whether the query projection also yields a gate for the output.
    pub gated: bool,
}

/// Layers that see the last tokens only (Gemma 3).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalAttention {
    /// Tokens that they see, the present one included.
    pub window: usize,
    /// Angles of these layers.
    pub rotation: Rotation,
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
    /// Whether an attention layer sees the last tokens only, see [`AttentionSpec::local`].
    pub local: bool,
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
    /// Norm of what the feed-forward part adds.
    FfnPostNorm,
    /// Added to the projected keys.
    KeyBias,
    /// Norm of each key head.
    KeyNorm,
    /// Norm before the mixer.
    MixerNorm,
    /// Norm of what the mixer adds.
    MixerPostNorm,
    /// Added to the projected queries.
    QueryBias,
    /// Norm of each query head.
    QueryNorm,
    /// Norm of each recurrent output head.
    StateNorm,
    /// Added to the projected values.
    ValueBias,
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
        Self::read_for(header, None)
    }

    /// As [`Self::read`], for contexts of up to `context` tokens; some models rotate differently beyond a length.
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    pub fn read_for(header: &Header, context: Option<Tokens>) -> Result<Self, LoadError> {
        Self::read_kind(header, context).map_err(|kind| LoadError::new(header.path(), kind))
    }

    fn read_kind(header: &Header, context: Option<Tokens>) -> Result<Self, LoadErrorKind> {
        let name = header.architecture();
        let Some(architecture) = Architecture::ALL.into_iter().find(|known| known.name() == name) else {
            return Err(LoadErrorKind::Architecture {
                architecture: name.to_owned(),
                known: KNOWN,
            });
        };
        let keys = Keys { header };
        let blocks = keys.count("block_count", LAYERS_MAX)?;
        let skipped = keys.optional(KEY_SKIPPED, LAYERS_MAX)?.unwrap_or(0);
        let Some(depth) = blocks.checked_sub(skipped).filter(|&depth| depth > 0) else {
            return Err(keys.wrong(KEY_SKIPPED, format!("{skipped} of {blocks} blocks leaves none")));
        };
        if let Some(experts) = keys
            .optional("expert_count", EXPERTS_MAX)?
            .filter(|&experts| experts > 0)
        {
            return Err(keys.wrong("expert_count", format!("`{experts}` is not supported")));
        }
        let width = keys.count("embedding_length", WIDTH_MAX)?;
        let feed_forward = keys.count("feed_forward_length", WIDTH_MAX)?;
        let rotary = keys.rotary(width)?;
        let Rotary { rotation, factors } = Rotary::read(header, rotary, context)?;
        let attention = keys.attention(architecture, width, rotation, depth)?;
        let recurrent = match architecture {
            Architecture::Qwen35 => Some(keys.recurrent()?),
            _ => None,
        };
        let embedding = tensor(header, "token_embd.weight")?;
        let vocabulary = match embedding.dims.as_slice() {
            &[columns, rows] if columns == width as u64 && rows <= u64::from(u32::MAX) => len(rows),
            _ => return Err(bad_shape(embedding, &format!("[{width}, vocabulary]"))),
        };
        // Rows beyond the last token are padding; a token without a row would fail each prompt that has it.
        if let Some(tokens) = header.strings("tokenizer.ggml.tokens").map(StringTable::len)
            && tokens > vocabulary
        {
            return Err(bad_shape(embedding, &format!("{tokens} tokens")));
        }
        let head = match header.tensor("output.weight") {
            Some(head) if head.dims == embedding.dims => Some(head),
            Some(head) => return Err(bad_shape(head, &format!("{:?}", embedding.dims))),
            None => None,
        };
        let output_norm = vector(header, "output_norm.weight", &[width])?;
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
                None => builder.attention(architecture, attention.local.is_some() && keys.is_local(index))?,
            };
            refuse_unknown(header, &builder.prefix, &layer)?;
            layers.push(layer);
        }
        refuse_stray(header)?;
        Ok(Self {
            architecture,
            width,
            feed_forward,
            vocabulary,
            context_max: keys.context()?,
            epsilon: header
                .f32(&keys.full("attention.layer_norm_rms_epsilon"))
                .ok_or_else(|| keys.wrong("attention.layer_norm_rms_epsilon", "it is missing".to_owned()))?,
            embedding_scale: match architecture {
                Architecture::Gemma3 => root(width),
                _ => 1.0,
            },
            activation: match architecture {
                Architecture::Gemma3 => Activation::Gelu,
                _ => Activation::Silu,
            },
            logit_cap: match architecture {
                Architecture::Gemma3 => header
                    .f32(&keys.full("final_logit_softcapping"))
                    .filter(|&cap| cap != 0.0),
                _ => None,
            },
            attention,
            recurrent,
            layers,
            said: None,
            tied: head.is_none(),
            head: head.unwrap_or(embedding).clone(),
            embedding: embedding.clone(),
            output_norm,
            rope_factors: factors,
        })
    }

    /// Length of the embedding of a token in the file.
    #[must_use]
    pub fn embedding_row(&self) -> usize {
        self.width / self.embedding.dtype.block_size() * self.embedding.dtype.type_size()
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

/// The same for tensors that belong to no layer.
fn refuse_stray(header: &Header) -> Result<(), LoadErrorKind> {
    let stray = header
        .tensors()
        .find(|info| !info.name.starts_with("blk.") && !OUTSIDE_LAYERS.contains(&info.name.as_str()));
    match stray {
        None => Ok(()),
        Some(info) => Err(LoadErrorKind::TensorUnknown {
            tensor: info.name.clone(),
            architecture: header.architecture().to_owned(),
        }),
    }
}

#[expect(clippy::cast_precision_loss, reason = "widths are below 2^24")]
fn root(number: usize) -> f32 {
    (number as f32).sqrt()
}

fn len(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

const KNOWN: &str = "gemma3, llama, phi3, qwen2, qwen3 and qwen35";
const OUTSIDE_LAYERS: [&str; 6] = [
    "token_embd.weight",
    "output.weight",
    "output_norm.weight",
    "rope_freqs.weight",
    rotary::LONG,
    rotary::SHORT,
];
/// llama.cpp's `LLAMA_MAX_EXPERTS`.
const EXPERTS_MAX: usize = 512;
/// llama.cpp's `LLAMA_MAX_LAYERS`.
const LAYERS_MAX: usize = 512;
/// Four times the width of the largest dense models of today.
const WIDTH_MAX: usize = 1 << 18;
const HEADS_MAX: usize = 1024;
const HEAD_DIM_MAX: usize = 1024;
/// Kernels go through heads in steps of this many elements.
const HEAD_DIM_MULTIPLE: usize = 8;
const TAPS_MAX: usize = 16;
/// Positions are angles by way of `f32`, which tells whole numbers apart up to here. The longest context of today's models
/// is 10 Mi tokens.
pub(super) const POSITIONS_MAX: u32 = 1 << 24;
/// llama.cpp's default for `full_attention_interval`.
const FULL_ATTENTION_INTERVAL: usize = 4;
