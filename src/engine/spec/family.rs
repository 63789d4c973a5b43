//! Model families and the composition of their layers.

use super::rotation::Rotation;
use crate::gguf::TensorInfo;
use cotenant_policy::residency::LayerKind;

/// The supported families.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Gemma 3, its text part.
    Gemma3,
    /// Granite 3 and 4 dense: Llama with scaling factors.
    Granite,
    /// Llama 2 and 3, and early Mistral.
    Llama,
    /// Ministral 3 and Mistral Small 3: Llama whose queries grow with their position.
    Mistral3,
    /// Phi-3 and Phi-4 dense.
    Phi3,
    /// Qwen2 and Qwen2.5 dense.
    Qwen2,
    /// Qwen3 dense.
    Qwen3,
    /// Qwen3.5: Gated DeltaNet with an attention layer at intervals.
    Qwen35,
    /// Qwen3-VL dense: its text part, which is Qwen3.
    Qwen3Vl,
    /// SmolLM3: Llama with some layers without rotation.
    SmolLm3,
}

impl Architecture {
    /// All of them, by name.
    pub const ALL: [Self; 10] = [
        Self::Gemma3,
        Self::Granite,
        Self::Llama,
        Self::Mistral3,
        Self::Phi3,
        Self::Qwen2,
        Self::Qwen3,
        Self::Qwen35,
        Self::Qwen3Vl,
        Self::SmolLm3,
    ];

    /// The name in `general.architecture`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gemma3 => "gemma3",
            Self::Granite => "granite",
            Self::Llama => "llama",
            Self::Mistral3 => "mistral3",
            Self::Phi3 => "phi3",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen35 => "qwen35",
            Self::Qwen3Vl => "qwen3vl",
            Self::SmolLm3 => "smollm3",
        }
    }
}

/// Activation function of a feed-forward gate.
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
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// Rotated elements of a head.
    pub rotary: usize,
    /// Rotation in layers that see the whole context.
    pub rotation: Rotation,
    /// Differences in some layers.
    pub local: Option<LocalAttention>,
    /// Pairing of rotated elements.
    pub pairing: Pairing,
    /// Whether the query projection also yields a gate for the output.
    pub gated: bool,
}

/// Growth of queries with their position: by `1 + scale · ln(1 + ⌊position / step⌋)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// Factor of the growth.
    pub scale: f32,
    /// Tokens per step of growth.
    pub step: usize,
}

impl Temperature {
    /// Factor of the query at `position`.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "whole steps are far below 2^24")]
    pub fn at(&self, position: usize) -> f32 {
        1.0 + self.scale * (1.0 + (position / self.step.max(1)) as f32).ln()
    }
}

/// Layers that attend differently: to the last tokens only (Gemma 3), or without positions (SmolLM3).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalAttention {
    /// Tokens seen by them, the current one included; unlimited if absent.
    pub window: Option<usize>,
    /// Rotation of these layers.
    pub rotation: Rotation,
}

/// Elements of a head that are rotated together.
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
    /// Key heads, which are also the query heads.
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

    /// Elements of the convolution's state in one layer.
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
    /// Whether it is one of the attention layers of [`AttentionSpec::local`].
    pub local: bool,
    /// Weights of products, in the order of use; the units of a layer's residency.
    pub matrices: Vec<Matrix>,
    /// Norms, biases and convolutions: small, and resident in every plan.
    pub vectors: Vec<(Vector, TensorInfo)>,
}

/// A weight of a product.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Its purpose.
    pub role: Role,
    /// Its tensor.
    pub tensor: TensorInfo,
    /// Elements of a row: inputs.
    pub columns: usize,
    /// Outputs.
    pub rows: usize,
    /// Bytes of one row.
    pub row_bytes: usize,
}

/// Purpose of a matrix.
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
    /// Attention queries, and their gate if present.
    Query,
    /// Queries, keys and values of a recurrent layer.
    QueryKeyValue,
    /// Attention values.
    Value,
}

/// A small tensor that is resident in every plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Vector {
    /// Convolution taps, four per channel.
    Convolution,
    /// Logarithmic decay per value head, negative.
    Decay,
    /// Bias of the decay per value head.
    DecayBias,
    /// Bias of the feed-forward output.
    FfnDownBias,
    /// Bias of the feed-forward gate.
    FfnGateBias,
    /// Norm before the feed-forward part.
    FfnNorm,
    /// Norm of the feed-forward output.
    FfnPostNorm,
    /// Bias of the feed-forward up projection.
    FfnUpBias,
    /// Bias of the projected keys.
    KeyBias,
    /// Norm of each key head.
    KeyNorm,
    /// Norm before the mixer.
    MixerNorm,
    /// Norm of the mixer's output.
    MixerPostNorm,
    /// Bias of the mixer's output.
    OutputBias,
    /// Bias of the projected queries.
    QueryBias,
    /// Norm of each query head.
    QueryNorm,
    /// Norm of each recurrent output head.
    StateNorm,
    /// Bias of the projected values.
    ValueBias,
}

impl LayerSpec {
    /// The matrix for `role`, with its index in the order of use.
    #[must_use]
    pub fn matrix(&self, role: Role) -> Option<(usize, &Matrix)> {
        self.matrices
            .iter()
            .enumerate()
            .find(|(_, matrix)| matrix.role == role)
    }
}
