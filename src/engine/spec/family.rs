//! Model families and the composition of their layers.

use super::rotation::Rotation;
use crate::gguf::TensorInfo;
use cotenant_policy::residency::LayerKind;

/// The supported families.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// EXAONE 4 without windows.
    Exaone4,
    /// Gemma 2.
    Gemma2,
    /// Gemma 3, its text part.
    Gemma3,
    /// Gemma 4, its text part: an input of its own for each layer, and layers without keys of their own.
    Gemma4,
    /// gpt-oss: a mixture of experts with biases, and attention with sinks.
    GptOss,
    /// Granite 3 and 4 dense: Llama with scaling factors.
    Granite,
    /// Granite 4 hybrid: Mamba-2 with some attention layers, dense or with a mixture of experts.
    GraniteHybrid,
    /// LFM2 and LFM2.5 dense: short convolutions with attention layers at intervals.
    Lfm2,
    /// LFM2 with a mixture of experts in all but the first layers.
    Lfm2Moe,
    /// Llama 2 and 3, and early Mistral.
    Llama,
    /// Ministral 3 and Mistral Small 3: Llama whose queries grow with their position.
    Mistral3,
    /// Nemotron-H and Nemotron 3 Nano dense: each layer is Mamba-2, attention without rotation, or a feed-forward part.
    NemotronH,
    /// Nemotron 3 Nano with a mixture of experts in place of each feed-forward part.
    NemotronHMoe,
    /// OLMo 2 and 3.
    Olmo2,
    /// Phi-3 and Phi-4 dense.
    Phi3,
    /// Qwen2 and Qwen2.5 dense.
    Qwen2,
    /// Qwen3 dense.
    Qwen3,
    /// Qwen3 with a mixture of experts.
    Qwen3Moe,
    /// Qwen3.5: Gated DeltaNet with an attention layer at intervals.
    Qwen35,
    /// Qwen3.5 and 3.6 with a mixture of experts, one of which computes every token.
    Qwen35Moe,
    /// Qwen3-VL dense: its text part, which is Qwen3.
    Qwen3Vl,
    /// Qwen3-VL with a mixture of experts: its text part.
    Qwen3VlMoe,
    /// SmolLM3: Llama with some layers without rotation.
    SmolLm3,
    /// StableLM 2 1.6B, StableLM 3B and Stable Code 3B.
    StableLm,
}

impl Architecture {
    /// All of them, by name.
    pub const ALL: [Self; 24] = [
        Self::Exaone4,
        Self::Gemma2,
        Self::Gemma3,
        Self::Gemma4,
        Self::GptOss,
        Self::Granite,
        Self::GraniteHybrid,
        Self::Lfm2,
        Self::Lfm2Moe,
        Self::Llama,
        Self::Mistral3,
        Self::NemotronH,
        Self::NemotronHMoe,
        Self::Olmo2,
        Self::Phi3,
        Self::Qwen2,
        Self::Qwen3,
        Self::Qwen3Moe,
        Self::Qwen35,
        Self::Qwen35Moe,
        Self::Qwen3Vl,
        Self::Qwen3VlMoe,
        Self::SmolLm3,
        Self::StableLm,
    ];

    /// The name in `general.architecture`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exaone4 => "exaone4",
            Self::Gemma2 => "gemma2",
            Self::Gemma3 => "gemma3",
            Self::Gemma4 => "gemma4",
            Self::GptOss => "gpt-oss",
            Self::Granite => "granite",
            Self::GraniteHybrid => "granitehybrid",
            Self::Lfm2 => "lfm2",
            Self::Lfm2Moe => "lfm2moe",
            Self::Llama => "llama",
            Self::Mistral3 => "mistral3",
            Self::NemotronH => "nemotron_h",
            Self::NemotronHMoe => "nemotron_h_moe",
            Self::Olmo2 => "olmo2",
            Self::Phi3 => "phi3",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen3Moe => "qwen3moe",
            Self::Qwen35 => "qwen35",
            Self::Qwen35Moe => "qwen35moe",
            Self::Qwen3Vl => "qwen3vl",
            Self::Qwen3VlMoe => "qwen3vlmoe",
            Self::SmolLm3 => "smollm3",
            Self::StableLm => "stablelm",
        }
    }
}

/// Norms of a family's layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Norms {
    /// Before each part.
    pub(crate) before: bool,
    /// Of each part's output.
    pub(crate) after: bool,
    /// Of queries and keys.
    pub(crate) heads: HeadNorms,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadNorms {
    None,
    /// Of each head.
    Each,
    /// Of all heads as one.
    Whole,
}

impl Architecture {
    /// Whether its layers may have a mixture of experts in place of the feed-forward part. `llama` is then Mixtral.
    pub(crate) const fn has_experts(self) -> bool {
        matches!(
            self,
            Self::Gemma4
                | Self::GptOss
                | Self::GraniteHybrid
                | Self::Lfm2Moe
                | Self::Llama
                | Self::NemotronHMoe
                | Self::Qwen3Moe
                | Self::Qwen35Moe
                | Self::Qwen3VlMoe
        )
    }

    /// Whether it is Gemma: embeddings grow with the width, and gates are Gaussian.
    pub(crate) const fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3 | Self::Gemma4)
    }

    /// Whether it is Granite: embeddings, attention, outputs of parts and logits have factors of their own.
    pub(crate) const fn is_granite(self) -> bool {
        matches!(self, Self::Granite | Self::GraniteHybrid)
    }

    /// Whether it is LFM2: short convolutions beside attention.
    pub(crate) const fn is_lfm2(self) -> bool {
        matches!(self, Self::Lfm2 | Self::Lfm2Moe)
    }

    /// Whether it is Nemotron-H: each layer is a mixer or a feed-forward part, whose activation has no gate.
    pub(crate) const fn is_nemotron(self) -> bool {
        matches!(self, Self::NemotronH | Self::NemotronHMoe)
    }

    /// Whether it is Qwen3.5: Gated DeltaNet beside attention with a gated output.
    pub(crate) const fn is_qwen35(self) -> bool {
        matches!(self, Self::Qwen35 | Self::Qwen35Moe)
    }

    /// Whether its norms subtract the mean and add a bias (LayerNorm).
    pub(crate) const fn centres(self) -> bool {
        matches!(self, Self::StableLm)
    }

    /// Norms of its attention layers.
    pub(crate) const fn norms(self) -> Norms {
        let (before, after, heads) = match self {
            Self::Exaone4 => (false, true, HeadNorms::Each),
            Self::Gemma2 => (true, true, HeadNorms::None),
            Self::Gemma3 | Self::Gemma4 => (true, true, HeadNorms::Each),
            Self::Lfm2
            | Self::Lfm2Moe
            | Self::Qwen3
            | Self::Qwen3Moe
            | Self::Qwen35
            | Self::Qwen35Moe
            | Self::Qwen3Vl
            | Self::Qwen3VlMoe => (true, false, HeadNorms::Each),
            Self::Olmo2 => (false, true, HeadNorms::Whole),
            Self::GptOss
            | Self::Granite
            | Self::GraniteHybrid
            | Self::Llama
            | Self::Mistral3
            | Self::NemotronH
            | Self::NemotronHMoe
            | Self::Phi3
            | Self::Qwen2
            | Self::SmolLm3
            | Self::StableLm => (true, false, HeadNorms::None),
        };
        Norms {
            before,
            after,
            heads,
        }
    }
}

/// Activation function of a feed-forward gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x · σ(1.702 · x)` of `x` up to 7; its factor is limited to ±7, and one is added (gpt-oss).
    Clamped,
    /// `x · Φ(x)`, by the hyperbolic tangent.
    Gelu,
    /// `max(x, 0)²`, of the up projection, without a gate.
    ReluSquared,
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
    /// Soft cap of these scores, if the model has one.
    pub score_cap: Option<f32>,
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
    /// Whether the values of each head are normalised, without weights.
    pub values_normed: bool,
}

impl AttentionSpec {
    /// Returns the constants of the layers of [`Self::local`], or of the others.
    #[must_use]
    pub fn of_layers(&self, local: bool) -> Self {
        match self.local.filter(|_| local) {
            None => *self,
            Some(local) => Self {
                kv_heads: local.kv_heads,
                head_dim: local.head_dim,
                rotary: local.rotary,
                rotation: local.rotation,
                ..*self
            },
        }
    }

    /// Returns the constants of each kind of layer.
    pub fn kinds(&self) -> impl Iterator<Item = Self> {
        let local = self.local.map(|_| self.of_layers(true));
        std::iter::once(*self).chain(local)
    }

    /// Elements of all projected queries of a token, with their gates.
    pub const fn projected(&self) -> usize {
        self.query() * if self.gated { 2 } else { 1 }
    }

    /// Elements of all query heads.
    pub const fn query(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of all key heads, and of all value heads.
    pub const fn kv(&self) -> usize {
        self.kv_heads * self.head_dim
    }
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
    #[expect(clippy::cast_precision_loss, reason = "whole steps are far below 2^24")]
    pub fn at(&self, position: usize) -> f32 {
        1.0 + self.scale * (1.0 + (position / self.step.max(1)) as f32).ln()
    }
}

/// Layers that attend differently: to the last tokens only (Gemma), or without positions (SmolLM3).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalAttention {
    /// Tokens seen by them, the current one included; unlimited if absent.
    pub window: Option<usize>,
    /// Rotation of these layers.
    pub rotation: Rotation,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Rotated elements of a head.
    pub rotary: usize,
}

/// An input of its own for each layer: a token has an embedding per layer, to which a projection of its first embedding
/// is added.
#[derive(Clone, Debug)]
pub struct LayerInputs {
    /// Elements of each.
    pub width: usize,
    /// Embeddings of a token for all layers, one after another.
    pub table: TensorInfo,
}

/// Elements of a head that are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// 2i and 2i+1.
    Adjacent,
    /// i and i + half of the rotated elements.
    Halves,
}

/// Constants of recurrent layers, which are all of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecurrentSpec {
    /// Short convolutions (LFM2).
    Convolution(ConvolutionSpec),
    /// Gated DeltaNet (Qwen3.5).
    Delta(DeltaSpec),
    /// Selective scans (Mamba-2).
    Scan(ScanSpec),
}

impl RecurrentSpec {
    /// Elements of the projected inputs of one token.
    pub const fn inputs(&self) -> usize {
        match self {
            Self::Convolution(spec) => 3 * spec.channels,
            Self::Delta(spec) => spec.channels(),
            Self::Scan(spec) => spec.channels(),
        }
    }

    /// Elements of intermediate results of one token.
    pub const fn scratch(&self) -> usize {
        match self {
            Self::Convolution(_) => 0,
            Self::Delta(spec) => spec.channels(),
            Self::Scan(spec) => spec.channels(),
        }
    }

    /// Elements of the result of one token.
    pub const fn values(&self) -> usize {
        match self {
            Self::Convolution(spec) => spec.channels,
            Self::Delta(spec) => spec.values(),
            Self::Scan(spec) => spec.values(),
        }
    }

    /// Heads, each with a decay and an update strength.
    pub const fn value_heads(&self) -> usize {
        match self {
            Self::Convolution(_) => 0,
            Self::Delta(spec) => spec.value_heads,
            Self::Scan(spec) => spec.heads,
        }
    }

    /// Operations for one token beside the products with weights.
    pub const fn work(&self) -> usize {
        match self {
            Self::Convolution(spec) => (spec.taps + 2) * spec.channels,
            // Each element of a state is decayed, read, corrected and read again.
            Self::Delta(spec) => 4 * spec.values() * spec.head_dim,
            // As above, without the correction.
            Self::Scan(spec) => 3 * spec.state_len(),
        }
    }

    /// Elements of the state matrices of one layer.
    pub const fn state_len(&self) -> usize {
        match self {
            Self::Convolution(_) => 0,
            Self::Delta(spec) => spec.state_len(),
            Self::Scan(spec) => spec.state_len(),
        }
    }

    /// Elements of the convolution's state in one layer.
    pub const fn conv_len(&self) -> usize {
        match self {
            Self::Convolution(spec) => (spec.taps - 1) * spec.channels,
            Self::Delta(spec) => spec.conv_len(),
            Self::Scan(spec) => spec.conv_len(),
        }
    }

    /// Elements of a row of a state matrix.
    pub const fn state_columns(&self) -> usize {
        match self {
            Self::Convolution(_) => 0,
            Self::Delta(spec) => spec.head_dim,
            Self::Scan(spec) => spec.state,
        }
    }
}

/// Constants of short convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvolutionSpec {
    /// Channels: the width of the residual stream.
    pub channels: usize,
    /// Taps of the convolution.
    pub taps: usize,
}

/// Constants of a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertSpec {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that compute a token.
    pub used: usize,
    /// Width of an expert.
    pub inner: usize,
    /// The part that computes every token.
    pub beside: Beside,
    /// First layers with a feed-forward part in place of the mixture.
    pub dense: usize,
    /// Scores of experts by their logits.
    pub scores: Scores,
    /// Factor of the weights of a token's experts, whose sum is otherwise one.
    pub scale: f32,
}

/// The part that computes every token beside the experts that the router chooses, by its width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// An expert that is added to the others (Granite 4, Nemotron 3).
    Added(usize),
    /// None.
    Nothing,
    /// An expert whose output a gate of its own weighs (Qwen3.5).
    Gated(usize),
    /// A feed-forward part. It, the experts and the router have norms of their own (Gemma 4).
    Normed(usize),
}

impl Beside {
    /// Its width; 0 if there is none.
    pub const fn width(self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Added(width) | Self::Gated(width) | Self::Normed(width) => width,
        }
    }
}

/// Scores of the experts of a token. The best are used; their weights are the scores divided by their sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// The logits themselves; the weights are probabilities over the experts in use.
    Logits,
    /// Each by itself: `σ(x)`; a bias is added for the choice.
    Sigmoid,
    /// Probabilities over all.
    Softmax,
}

/// Constants of Gated DeltaNet layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSpec {
    /// Key heads, which are also the query heads.
    pub key_heads: usize,
    /// Value heads; head h uses key head h mod `key_heads`.
    pub value_heads: usize,
    /// Elements of a key head and of a value head.
    pub head_dim: usize,
    /// Taps of the convolution.
    pub taps: usize,
}

impl DeltaSpec {
    /// Channels of the convolution: queries, keys, values.
    pub const fn channels(&self) -> usize {
        (2 * self.key_heads + self.value_heads) * self.head_dim
    }

    /// Elements of all value heads.
    pub const fn values(&self) -> usize {
        self.value_heads * self.head_dim
    }

    /// Elements of the state matrices of one layer.
    pub const fn state_len(&self) -> usize {
        self.value_heads * self.head_dim * self.head_dim
    }

    /// Elements of the convolution's state in one layer.
    pub const fn conv_len(&self) -> usize {
        (self.taps - 1) * self.channels()
    }
}

/// Constants of selective scans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanSpec {
    /// Groups of heads, which share B and C; head h belongs to group h / (`heads` / `groups`).
    pub groups: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of B and of C, and of the state of each of a head's elements.
    pub state: usize,
    /// Taps of the convolution.
    pub taps: usize,
}

impl ScanSpec {
    /// Channels of the convolution: inputs, B, C.
    pub const fn channels(&self) -> usize {
        self.values() + 2 * self.groups * self.state
    }

    /// Elements of all heads.
    pub const fn values(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of the state matrices of one layer.
    pub const fn state_len(&self) -> usize {
        self.values() * self.state
    }

    /// Elements of the convolution's state in one layer.
    pub const fn conv_len(&self) -> usize {
        (self.taps - 1) * self.channels()
    }
}

/// One layer.
#[derive(Clone, Debug)]
pub struct LayerSpec {
    /// Attention, recurrent, or a feed-forward part alone.
    pub kind: LayerKind,
    /// Whether it is one of the attention layers of [`AttentionSpec::local`].
    pub local: bool,
    /// Whether it attends to the keys and values of the last layer of its kind that has its own.
    pub borrows: bool,
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
    /// Decay of the recurrent state; of a scan, the step.
    Alpha,
    /// Strength of the recurrent update.
    Beta,
    /// Input of a draft block from an embedding and a state.
    Draft,
    /// Experts, back to the residual stream; the rows of one after those of another.
    ExpertDown,
    /// Gates of experts.
    ExpertGate,
    /// Experts.
    ExpertUp,
    /// Feed-forward, back to the residual stream.
    FfnDown,
    /// Feed-forward gate.
    FfnGate,
    /// Feed-forward.
    FfnUp,
    /// Gate of the recurrent output.
    Gate,
    /// Both gates and the input of a short convolution.
    Gates,
    /// Attention keys.
    Key,
    /// Gate of the layer's own input.
    LayerGate,
    /// The layer's own input from a token's embedding.
    LayerInput,
    /// The layer's own input, back to the residual stream.
    LayerOutput,
    /// Mixer output, back to the residual stream.
    Output,
    /// Attention queries, and their gate if present.
    Query,
    /// Queries, keys and values of a recurrent layer; of a scan, its inputs, B and C.
    QueryKeyValue,
    /// A logit for each expert.
    Router,
    /// A logit for the expert that computes every token.
    SharedGate,
    /// Attention values.
    Value,
}

/// A small tensor that is resident in every plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Vector {
    /// Convolution taps of each channel, oldest first.
    Convolution,
    /// Bias of the convolution of each channel.
    ConvolutionBias,
    /// Logarithmic decay per value head, negative.
    Decay,
    /// Bias of the decay per value head.
    DecayBias,
    /// Norm of the embedding in a draft block's input.
    DraftEmbeddingNorm,
    /// Norm before the head of a draft, if it has one of its own.
    DraftOutputNorm,
    /// Norm of the state in a draft block's input.
    DraftStateNorm,
    /// Bias of the feed-forward output.
    FfnDownBias,
    /// Bias of the feed-forward gate.
    FfnGateBias,
    /// Bias of each expert's output.
    ExpertDownBias,
    /// Bias of each expert's gate.
    ExpertGateBias,
    /// Norm before the experts, if they have one of their own.
    ExpertNorm,
    /// Norm of the experts' output, if they have one of their own.
    ExpertPostNorm,
    /// Factor of each expert's output.
    ExpertScale,
    /// Bias of each expert's up projection.
    ExpertUpBias,
    /// Norm of the output of the part beside experts.
    FfnBesideNorm,
    /// Norm before the feed-forward part, if the family has one.
    FfnNorm,
    /// Bias of that norm, which then subtracts the mean first.
    FfnNormBias,
    /// Norm of the feed-forward output.
    FfnPostNorm,
    /// Bias of the feed-forward up projection.
    FfnUpBias,
    /// Bias of the projected keys.
    KeyBias,
    /// Norm of each key head, or of all as one.
    KeyNorm,
    /// Norm of the projection to the layer's own input.
    LayerInputNorm,
    /// Norm of what the layer's own input adds.
    LayerPostNorm,
    /// Factor of the residual stream after the layer.
    LayerScale,
    /// Norm before the mixer, if the family has one.
    MixerNorm,
    /// Bias of that norm, which then subtracts the mean first.
    MixerNormBias,
    /// Norm of the mixer's output.
    MixerPostNorm,
    /// Bias of the mixer's output.
    OutputBias,
    /// Bias of the projected queries.
    QueryBias,
    /// Norm of each query head, or of all as one.
    QueryNorm,
    /// Bias of the router's logits.
    RouterBias,
    /// Factors of the router's normalised input.
    RouterScale,
    /// Added to the scores of experts for the choice.
    ScoreBias,
    /// A further score of each query head, which takes weight from those of tokens.
    Sinks,
    /// Factor of each head's input in the output of a scan.
    Skip,
    /// Norm of each recurrent output head; of a scan, of each group of heads.
    StateNorm,
    /// Bias of the projected values.
    ValueBias,
}

impl Role {
    /// The matrices of a mixture, of which a token needs the rows of some experts; there may be no gates.
    pub const EXPERTS: [Self; 3] = [Self::ExpertGate, Self::ExpertUp, Self::ExpertDown];
}

impl LayerSpec {
    /// The matrix for `role`, with its index in the order of use.
    pub fn matrix(&self, role: Role) -> Option<(usize, &Matrix)> {
        self.matrices
            .iter()
            .enumerate()
            .find(|(_, matrix)| matrix.role == role)
    }
}
