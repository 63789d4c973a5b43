//! Families of models, and what their layers consist of.

use super::rotation::Rotation;
use crate::gguf::TensorInfo;
use cotenant_policy::residency::LayerKind;

/// The families that the engine knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Gemma 3, its text part.
    Gemma3,
    /// Granite 3 and 4 dense: Llama with factors of its own.
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
    /// Qwen3.5: Gated DeltaNet with an attention layer now and then.
    Qwen35,
    /// Qwen3-VL dense, its text part, which is Qwen3.
    Qwen3Vl,
    /// SmolLM3: Llama with layers that rotate nothing.
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
    /// What is different in some layers.
    pub local: Option<LocalAttention>,
    /// Which elements make a pair.
    pub pairing: Pairing,
    /// Whether the query projection also yields a gate for the output.
    pub gated: bool,
}

/// Growth of queries with their position: by `1 + scale · ln(1 + ⌊position / step⌋)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// How much.
    pub scale: f32,
    /// Tokens after which it grows.
    pub step: usize,
}

impl Temperature {
    /// What the query at `position` is multiplied with.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "whole steps are far below 2^24")]
    pub fn at(&self, position: usize) -> f32 {
        1.0 + self.scale * (1.0 + (position / self.step.max(1)) as f32).ln()
    }
}

/// Layers that attend differently: to the last tokens only (Gemma 3), or without positions (SmolLM3).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalAttention {
    /// Tokens that they see, the present one included; all where there is no limit.
    pub window: Option<usize>,
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
    /// Whether it is one of the attention layers of [`AttentionSpec::local`].
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
    /// Added to what the feed-forward part gives back.
    FfnDownBias,
    /// Added to the gate of the feed-forward part.
    FfnGateBias,
    /// Norm before the feed-forward part.
    FfnNorm,
    /// Norm of what the feed-forward part adds.
    FfnPostNorm,
    /// Added to the other half of the feed-forward part.
    FfnUpBias,
    /// Added to the projected keys.
    KeyBias,
    /// Norm of each key head.
    KeyNorm,
    /// Norm before the mixer.
    MixerNorm,
    /// Norm of what the mixer adds.
    MixerPostNorm,
    /// Added to the mixer's output.
    OutputBias,
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
        self.matrices
            .iter()
            .enumerate()
            .find(|(_, matrix)| matrix.role == role)
    }
}
