//! Backend operations: plain data on views of its memory.
//!
//! Each corresponds to one launch of a device. A backend with deferred execution copies borrowed data; the views keep
//! their buffers, so that these are neither released nor overwritten before the execution.

use std::{borrow::Cow, ops::Range};

use super::memory::{Cells, Region, Span, View};
use crate::{
    gguf::{GgmlDType, SUPPORTED},
    spec::{
        Activation, AttentionSpec, ConvolutionSpec, DeltaSpec, Rotation, ScanSpec, Temperature,
    },
};
use cotenant_policy::kv_type::KvType;

/// An operation.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a box would be an allocation for each operation"
)]
pub enum Operation<'a> {
    /// Gate of a feed-forward part.
    Activate(Activate),
    /// An attention layer.
    Attend(Attend<'a>),
    /// Sums of rows with factors.
    Combine(Combine<'a>),
    /// Changes the type of a KV cache.
    Convert(Convert),
    /// A short convolution.
    Convolve(Convolve),
    /// A Gated DeltaNet layer.
    Delta(Delta),
    /// Sets floats.
    Fill {
        /// Target.
        floats: View,
        /// Value.
        value: f32,
    },
    /// Logits from the products with the head.
    Finish(Finish<'a>),
    /// Some rows, one after another.
    Gather(Gather<'a>),
    /// Copies bytes.
    Move {
        /// Source.
        from: Span,
        /// Target of the same length.
        to: Span,
    },
    /// Products with weights.
    Multiply(Multiply<'a>),
    /// Adds a part's output to the residual stream and normalises it.
    Norm(Norm),
    /// Cosines and sines of a chunk.
    Rotate(Rotate<'a>),
    /// A Mamba-2 layer.
    Scan(Scan),
    /// Rows of the file converted to `f32`.
    Widen(Widen<'a>),
}

impl Operation<'_> {
    /// An owned copy.
    #[must_use]
    pub fn into_owned(self) -> Operation<'static> {
        match self {
            Self::Activate(job) => Operation::Activate(job),
            Self::Attend(job) => Operation::Attend(Attend {
                gap: job.gap.map(|gap| Gap {
                    after: gap.after,
                    back: gap.back.into_owned().into(),
                }),
                sequences: job
                    .sequences
                    .into_iter()
                    .map(Attended::into_owned)
                    .collect(),
                ..job
            }),
            Self::Combine(job) => Operation::Combine(Combine {
                terms: job.terms.into_owned().into(),
                biases: job.biases.map(|biases| RowBiases {
                    of: biases.of.into_owned().into(),
                    ..biases
                }),
                ..job
            }),
            Self::Convert(job) => Operation::Convert(job),
            Self::Convolve(job) => Operation::Convolve(job),
            Self::Delta(job) => Operation::Delta(job),
            Self::Fill { floats, value } => Operation::Fill { floats, value },
            Self::Finish(job) => Operation::Finish(Finish {
                said: job.said.into_owned().into(),
                ..job
            }),
            Self::Gather(job) => Operation::Gather(Gather {
                rows: job.rows.into_owned().into(),
                ..job
            }),
            Self::Move { from, to } => Operation::Move { from, to },
            Self::Multiply(job) => Operation::Multiply(Multiply {
                products: job.products.into_owned().into(),
                ..job
            }),
            Self::Norm(job) => Operation::Norm(job),
            Self::Rotate(job) => Operation::Rotate(Rotate {
                factors: job.factors.map(|factors| factors.into_owned().into()),
                ..job
            }),
            Self::Scan(job) => Operation::Scan(job),
            Self::Widen(job) => Operation::Widen(Widen {
                rows: job.rows.iter().map(Row::to_owned).collect(),
                ..job
            }),
        }
    }
}

/// A set of weight types, one bit per entry of [`SUPPORTED`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Types(u32);

impl Types {
    /// Whether `dtype` is one of them.
    #[must_use]
    pub fn has(self, dtype: GgmlDType) -> bool {
        self.any(|known| known == dtype)
    }

    /// Whether `is` holds for any of them.
    pub fn any(self, is: impl Fn(GgmlDType) -> bool) -> bool {
        SUPPORTED
            .iter()
            .enumerate()
            .any(|(number, dtype)| self.0 >> number & 1 == 1 && is(*dtype))
    }
}

impl FromIterator<GgmlDType> for Types {
    fn from_iter<I: IntoIterator<Item = GgmlDType>>(types: I) -> Self {
        let bit = |dtype| {
            SUPPORTED
                .iter()
                .position(|known| *known == dtype)
                .map_or(0, |number| 1 << number)
        };
        Self(types.into_iter().map(bit).fold(0, |all, bit| all | bit))
    }
}

/// Memory for copies of activations in the formats that quantised products need.
#[derive(Clone, Debug)]
pub struct Copies {
    /// Their memory.
    pub memory: View,
    /// Rows that fit.
    pub rows: usize,
    /// Elements of the longest row that fits.
    pub columns: usize,
    /// Supported weight types.
    pub types: Types,
}

/// Copies of an operation's result for subsequent products.
#[derive(Clone, Debug)]
pub struct Prepare {
    /// Target of the copies.
    pub copies: Copies,
    /// Weight types of the products.
    pub types: Types,
    /// Row of the copies that corresponds to the first row of the result.
    pub first: usize,
}

/// Conversion of rows of the file's types to `f32`.
#[derive(Debug)]
pub struct Widen<'a> {
    /// The rows.
    pub rows: Cow<'a, [Row<'a>]>,
    /// Their type.
    pub dtype: GgmlDType,
    /// Factor of every element.
    pub scale: f32,
}

/// A row of the file.
#[derive(Clone, Debug)]
pub struct Row<'a> {
    /// Its bytes.
    pub from: RowBytes<'a>,
    /// Target, of the same number of elements.
    pub to: View,
}

/// Source of a row's bytes.
#[derive(Clone, Debug)]
pub enum RowBytes<'a> {
    /// Read by the host.
    Host(Cow<'a, [u8]>),
    /// In memory of the backend.
    View(View),
}

impl Row<'_> {
    fn to_owned(&self) -> Row<'static> {
        Row {
            from: match &self.from {
                RowBytes::Host(bytes) => RowBytes::Host(bytes.to_vec().into()),
                RowBytes::View(view) => RowBytes::View(view.clone()),
            },
            to: self.to.clone(),
        }
    }
}

/// Cosines and sines of consecutive positions.
#[derive(Debug)]
pub struct Rotate<'a> {
    /// The rotation.
    pub rotation: Rotation,
    /// Divisors of the angles.
    pub factors: Option<Cow<'a, [f32]>>,
    /// The first position.
    pub position: usize,
    /// Rotated elements of a head.
    pub width: usize,
    /// One row per position.
    pub to: View,
}

/// `stream += normed`, and then `normed = rms(stream) · weight`, `normed = rms(stream − mean) · weight + bias` with a bias,
/// or `normed = stream` without a norm.
#[derive(Clone, Debug)]
pub struct Norm {
    /// The residual stream.
    pub stream: View,
    /// Elements of its rows.
    pub width: usize,
    /// Output of a part, replaced by the result.
    pub normed: View,
    /// Transformation of that output before it is added; nothing is added if absent.
    pub residual: Option<Residual>,
    /// Weights of the norm, if there is one.
    pub weight: Option<View>,
    /// Bias of the norm, if it has one.
    pub bias: Option<View>,
    /// Added to the mean square.
    pub epsilon: f32,
    /// Copies of the result.
    pub prepare: Prepare,
}

/// Transformation of a part's output before it is added to the residual stream, in this order.
#[derive(Clone, Debug)]
pub struct Residual {
    /// Bias added to it.
    pub bias: Option<View>,
    /// Weights of its norm.
    pub norm: Option<View>,
    /// Its factor.
    pub scale: f32,
    /// Factor of the sum, if there is one.
    pub sum: Option<View>,
}

/// `to[i] = from[rows[i]]`.
#[derive(Debug)]
pub struct Gather<'a> {
    /// Source.
    pub from: View,
    /// Numbers of rows of the source.
    pub rows: Cow<'a, [u32]>,
    /// Elements of a row.
    pub width: usize,
    /// Target.
    pub to: View,
    /// Copies of the result.
    pub prepare: Prepare,
}

/// `to[i] = Σ factor · (from[row] + bias)` over the terms of a row, in their order.
#[derive(Debug)]
pub struct Combine<'a> {
    /// Source.
    pub from: View,
    /// Row of the source and its factor, equally many for each row of the target.
    pub terms: Cow<'a, [(u32, f32)]>,
    /// Biases of the terms, if they have any.
    pub biases: Option<RowBiases<'a>>,
    /// Elements of a row.
    pub width: usize,
    /// Target.
    pub to: View,
}

/// Biases of the terms of a [`Combine`].
#[derive(Debug)]
pub struct RowBiases<'a> {
    /// The biases, in rows as long as those of the source.
    pub rows: View,
    /// Number of each term's row.
    pub of: Cow<'a, [u32]>,
}

/// Products of all rows of `input` with weights.
#[derive(Debug)]
pub struct Multiply<'a> {
    /// The products; consecutive ones share a result or have separate ones.
    pub products: Cow<'a, [Product]>,
    /// Rows to multiply.
    pub input: View,
    /// Copies of these rows in other formats.
    pub copies: Copies,
    /// Rows of the input.
    pub rows: usize,
    /// Activation of two of the products, a gate and its factor: a device computes it in the same launch.
    pub activate: Option<Activate>,
}

/// `out[r][first + i] = Σ weight[i][c] · input[r][c]`.
#[derive(Clone, Debug)]
pub struct Product {
    /// Consecutive rows of the matrix, in the file's own format.
    pub weight: View,
    /// Index of the model's part that contains them, if it is resident: the key for cached data of repeated products.
    pub part: Option<usize>,
    /// Their type.
    pub dtype: GgmlDType,
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
    /// Target of the result.
    pub out: View,
    /// Elements of one row of `out`.
    pub stride: usize,
    /// Element of a row of `out` that corresponds to the first row of `weight`.
    pub first: usize,
}

/// An attention layer from projections to the input of its output projection.
#[derive(Debug)]
pub struct Attend<'a> {
    /// Constants.
    pub spec: AttentionSpec,
    /// Whether a token sees no later one; otherwise each sees all of these rows.
    pub is_causal: bool,
    /// Tokens seen by each token, itself included; `None` for all.
    pub window: Option<usize>,
    /// Position of dropped tokens after the first ones.
    pub gap: Option<Gap<'a>>,
    /// Growth of queries with their position; applied first.
    pub temperature: Option<Temperature>,
    /// Bias of the projected queries, if the architecture has one.
    pub query_bias: Option<View>,
    /// Bias of the projected keys.
    pub key_bias: Option<View>,
    /// Bias of the projected values.
    pub value_bias: Option<View>,
    /// Added to the mean square in head norms.
    pub epsilon: f32,
    /// Weights of the query head norm, if the architecture has one.
    pub query_norm: Option<View>,
    /// Weights of the key head norm.
    pub key_norm: Option<View>,
    /// A further score of each query head, whose exponential is added to the sum of weights, if the architecture has one.
    pub sinks: Option<View>,
    /// Cosine and sine of each pair of each row.
    pub rotary: View,
    /// Projected queries, with their gates when `spec.gated`; overwritten.
    pub query: View,
    /// Projected keys and values, to be stored in the cache; overwritten. Absent if the cache holds them.
    pub stored: Option<[View; 2]>,
    /// The rows in order, by conversation; with a window, of one conversation.
    pub sequences: Vec<Attended<'a>>,
    /// Number of the layer among the attention layers.
    pub layer: usize,
    /// Target of the result.
    pub out: View,
    /// Memory of [`Device::scratch_bytes`](super::Device::scratch_bytes); its contents are meaningless before and
    /// after.
    pub scratch: View,
    /// Flags of the conversations, set to one if a projected key or value is not finite, because the cache's form of it
    /// is finite.
    pub broken: View,
    /// Copies of the result.
    pub prepare: Prepare,
}

impl Attend<'_> {
    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.rows).sum()
    }
}

/// Consecutive rows of one conversation.
#[derive(Debug)]
pub struct Attended<'a> {
    /// Their number.
    pub rows: usize,
    /// Tokens in the cache before them.
    pub position: usize,
    /// Their blocks of the cache, which is the same for all conversations, with room for `position + rows` tokens.
    /// Conversations with a common prefix share its blocks, but none to which these rows are written.
    pub cells: Cells<'a>,
    /// Index of their flag.
    pub flag: usize,
}

impl Attended<'_> {
    fn into_owned(self) -> Attended<'static> {
        Attended {
            cells: self.cells.into_owned(),
            ..self
        }
    }
}

/// Gap of dropped tokens in the cache, between those kept at the beginning and all later ones.
///
/// Both sides keep their original positions, so that only queries are rotated: for tokens before the gap, back by its
/// length, as if it did not exist.
#[derive(Debug)]
pub struct Gap<'a> {
    /// Tokens before it; whole blocks.
    pub after: usize,
    /// Cosine and sine that rotate each pair of a query back.
    pub back: Cow<'a, [f32]>,
}

/// In-place conversion of rows of a KV cache to another type.
#[derive(Debug)]
pub struct Convert {
    /// Their memory, consecutive from its start; open for both types.
    pub space: Region,
    /// Number of rows: one per token, head and layer, for keys and for values.
    pub rows: usize,
    /// Elements of a row.
    pub elements: usize,
    /// Current type.
    pub from: KvType,
    /// New type.
    pub to: KvType,
}

/// A short convolution from projections to the input of its output projection, for some rows of a chunk, after the rows
/// before them.
#[derive(Debug)]
pub struct Convolve {
    /// Constants.
    pub spec: ConvolutionSpec,
    /// Gate of the input, gate of the output and input for each row of the whole chunk; replaced by the results, packed
    /// in rows of [`ConvolutionSpec::channels`] from its start.
    pub mixed: View,
    /// Convolution taps, oldest first, for each channel.
    pub convolution: View,
    /// The convolution's last inputs, oldest first.
    pub history: View,
    /// Whether the last inputs stay as before these rows, on a [device that tries states](super::Device::tries_states).
    pub is_trial: bool,
    /// Row range within the chunk.
    pub rows: Range<usize>,
    /// Copies of the result.
    pub prepare: Prepare,
}

/// A Gated DeltaNet layer from projections to the input of its output projection, for some rows of a chunk, after the
/// rows before them.
#[derive(Debug)]
pub struct Delta {
    /// Constants.
    pub spec: DeltaSpec,
    /// Epsilon of the norms.
    pub epsilon: f32,
    /// Projected queries, keys and values of the whole chunk; replaced by the results, packed in rows of
    /// [`DeltaSpec::values`] from its start.
    pub mixed: View,
    /// Projected gate of the output.
    pub gate: View,
    /// Projected decay.
    pub alpha: View,
    /// Projected update strength.
    pub beta: View,
    /// Room for the convolution's output.
    pub scratch: View,
    /// Convolution taps, oldest first, for each channel.
    pub convolution: View,
    /// Bias of the decay.
    pub decay_bias: View,
    /// Logarithmic decay, negative.
    pub decay: View,
    /// Weights of the output norm.
    pub norm: View,
    /// State matrices of the layer.
    pub state: Matrices,
    /// The convolution's last inputs, oldest first.
    pub history: View,
    /// Whether state and last inputs stay as before these rows, which are few, on a [device that tries
    /// states](super::Device::tries_states).
    pub is_trial: bool,
    /// Row range within the chunk.
    pub rows: Range<usize>,
    /// Copies of the result.
    pub prepare: Prepare,
}

/// A Mamba-2 layer from projections to the input of its output projection, for some rows of a chunk, after the rows
/// before them.
#[derive(Debug)]
pub struct Scan {
    /// Constants.
    pub spec: ScanSpec,
    /// Epsilon of the norm.
    pub epsilon: f32,
    /// Projected inputs, B and C of the whole chunk; replaced by the results, packed in rows of [`ScanSpec::values`]
    /// from its start.
    pub mixed: View,
    /// Projected gate of the output.
    pub gate: View,
    /// Projected step of each head.
    pub step: View,
    /// Room for the convolution's output.
    pub scratch: View,
    /// Convolution taps, oldest first, for each channel.
    pub convolution: View,
    /// Bias of the convolution, if it has one.
    pub convolution_bias: Option<View>,
    /// Bias of the step.
    pub step_bias: View,
    /// Logarithmic decay of each head, negative.
    pub decay: View,
    /// Factor of each head's input in its output.
    pub skip: View,
    /// Weights of the output norm of each group.
    pub norm: View,
    /// State matrices of the layer.
    pub state: Matrices,
    /// The convolution's last inputs, oldest first.
    pub history: View,
    /// As [`Delta::is_trial`].
    pub is_trial: bool,
    /// Row range within the chunk.
    pub rows: Range<usize>,
    /// Copies of the result.
    pub prepare: Prepare,
}

/// State matrices of a layer's heads, each transposed: row j belongs to value element j.
#[derive(Debug)]
pub enum Matrices {
    /// In one place.
    Whole(View),
    /// In consecutive parts, which only a [backend that takes parts](super::Backend::takes_parts) computes on; each has
    /// a multiple of [`ROWS_TOGETHER`] rows.
    Parts(Vec<Span>),
}

impl Matrices {
    /// Whether a backend that takes parts computes on these, with rows of `columns` elements.
    pub fn may_be(parts: &[Span], columns: usize) -> bool {
        let together = columns * ROWS_TOGETHER * size_of::<f32>();
        parts.len() <= PARTS_MAX && parts.iter().all(|part| part.len().is_multiple_of(together))
    }
}

/// Most parts of a layer's matrices; a layer of Qwen3.5-0.8B takes two or three, with `q4` KV six.
const PARTS_MAX: usize = 8;
/// Rows of a state matrix that kernels take together.
pub const ROWS_TOGETHER: usize = 2;

/// `gate = activation(gate) · up`, or `gate = activation(gate)`.
#[derive(Debug)]
pub struct Activate {
    /// The activation function.
    pub activation: Activation,
    /// Projected gate; replaced by the result, of which [`Multiply::activate`] makes only copies.
    pub gate: View,
    /// Its factor, if the activation has one.
    pub up: Option<View>,
    /// Bias added to each row of the gate first.
    pub gate_bias: Option<View>,
    /// The same for `up`.
    pub up_bias: Option<View>,
    /// Elements of a row.
    pub width: usize,
    /// Copies of the result.
    pub prepare: Prepare,
}

/// Logits from the products with the head.
#[derive(Debug)]
pub struct Finish<'a> {
    /// One row.
    pub logits: View,
    /// Computed rows of the head.
    pub said: Cow<'a, [Range<usize>]>,
    /// Bias added first.
    pub bias: Option<View>,
    /// Divisor applied next.
    pub scale: f32,
    /// Soft cap applied last.
    pub cap: Option<f32>,
    /// Three output words: the index of the first greatest logit, all bits set if all are −∞; its value; and
    /// non-zero if a logit is not finite.
    pub found: View,
}
