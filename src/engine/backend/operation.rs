//! Operations of a backend: plain data on views of its memory.
//!
//! Each covers what one launch of a device covers. What an operation borrows is copied by a backend that executes it later; its
//! views stay what they are, so that what they lie in is neither released nor written by others before it has been executed.

use std::{borrow::Cow, ops::Range};

use candle_core::quantized::GgmlDType;

use super::memory::{Cells, Region, Span, View};
use crate::{
    gguf::SUPPORTED,
    spec::{Activation, AttentionSpec, RecurrentSpec, Rotation, Temperature},
};
use cotenant_policy::kv_type::KvType;

/// Something to compute.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a box would be an allocation for each operation"
)]
pub enum Operation<'a> {
    /// The gate of a feed-forward part.
    Activate(Activate),
    /// An attention layer.
    Attend(Attend<'a>),
    /// Changes the type of a KV cache.
    Convert(Convert),
    /// A Gated DeltaNet layer.
    Delta(Delta),
    /// Sets floats.
    Fill {
        /// Which.
        floats: View,
        /// To what.
        value: f32,
    },
    /// Logits from the products with the head.
    Finish(Finish<'a>),
    /// Copies bytes.
    Move {
        /// Which.
        from: Span,
        /// To where, as many.
        to: Span,
    },
    /// Products with weights.
    Multiply(Multiply<'a>),
    /// The residual stream, with what a part adds to it, normalised.
    Norm(Norm),
    /// Cosines and sines of a chunk.
    Rotate(Rotate<'a>),
    /// Rows of the file as `f32`.
    Widen(Widen<'a>),
}

impl Operation<'_> {
    /// The same without what it borrows.
    #[must_use]
    pub fn into_owned(self) -> Operation<'static> {
        match self {
            Self::Activate(job) => Operation::Activate(job),
            Self::Attend(job) => Operation::Attend(Attend {
                gap: job.gap.map(|gap| Gap {
                    after: gap.after,
                    back: gap.back.into_owned().into(),
                }),
                cells: job.cells.into_owned(),
                ..job
            }),
            Self::Convert(job) => Operation::Convert(job),
            Self::Delta(job) => Operation::Delta(job),
            Self::Fill { floats, value } => Operation::Fill { floats, value },
            Self::Finish(job) => Operation::Finish(Finish {
                said: job.said.into_owned().into(),
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
            Self::Widen(job) => Operation::Widen(Widen {
                rows: job.rows.iter().map(Row::to_owned).collect(),
                ..job
            }),
        }
    }
}

/// Types of weights, a bit for each of [`SUPPORTED`].
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
    /// Where they are.
    pub memory: View,
    /// Rows that fit.
    pub rows: usize,
    /// Elements of the longest row that fits.
    pub columns: usize,
    /// Weight types that may be multiplied with.
    pub types: Types,
}

/// Copies to be made of an operation's result, for the products that follow.
#[derive(Clone, Debug)]
pub struct Prepare {
    /// Where to.
    pub copies: Copies,
    /// For products with weights of which types.
    pub types: Types,
    /// The row of the copies that belongs to the first row of the result.
    pub first: usize,
}

/// Turns rows of the file's types into `f32`.
#[derive(Debug)]
pub struct Widen<'a> {
    /// The rows.
    pub rows: Cow<'a, [Row<'a>]>,
    /// Their type.
    pub dtype: GgmlDType,
    /// What every element is multiplied with.
    pub scale: f32,
}

/// A row of the file.
#[derive(Clone, Debug)]
pub struct Row<'a> {
    /// Its bytes.
    pub from: RowBytes<'a>,
    /// Where it goes, with as many elements.
    pub to: View,
}

/// Where the bytes of a row are.
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

/// Computes cosines and sines of positions that follow each other.
#[derive(Debug)]
pub struct Rotate<'a> {
    /// By which angles.
    pub rotation: Rotation,
    /// What the angles are divided by.
    pub factors: Option<Cow<'a, [f32]>>,
    /// The first position.
    pub position: usize,
    /// Elements of a head that are rotated.
    pub width: usize,
    /// A row for each position.
    pub to: View,
}

/// `stream += normed`, and then `normed = rms(stream) · weight`.
#[derive(Clone, Debug)]
pub struct Norm {
    /// The residual stream; its rows are as long as `weight`.
    pub stream: View,
    /// What a part has made of it, and the result.
    pub normed: View,
    /// What happens to the former before it is added; nothing is added when absent.
    pub residual: Option<Residual>,
    /// Weights of the norm.
    pub weight: View,
    /// Added to the mean square.
    pub epsilon: f32,
    /// Copies of the result.
    pub prepare: Prepare,
}

/// What happens to the output of a part before it is added to the residual stream, in this order.
#[derive(Clone, Debug)]
pub struct Residual {
    /// Added to it.
    pub bias: Option<View>,
    /// It is normalised with these weights.
    pub norm: Option<View>,
    /// It is multiplied with this.
    pub scale: f32,
}

/// Products of all rows of `input` with weights.
#[derive(Debug)]
pub struct Multiply<'a> {
    /// With which; products that follow each other share a result or have results of their own.
    pub products: Cow<'a, [Product]>,
    /// What to multiply.
    pub input: View,
    /// The same in other formats.
    pub copies: Copies,
    /// Rows of the input.
    pub rows: usize,
    /// What becomes of the two products, of a gate and of what it is multiplied with: a device does it in the same launch.
    pub activate: Option<Activate>,
}

/// `out[r][first + i] = Σ weight[i][c] · input[r][c]`.
#[derive(Clone, Debug)]
pub struct Product {
    /// Rows of the matrix one after the other, in the file's own format.
    pub weight: View,
    /// The number of the model's part that they lie in, where that is resident: what may be kept for when it is multiplied with again.
    pub part: Option<usize>,
    /// Their type.
    pub dtype: GgmlDType,
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
    /// Where the result goes.
    pub out: View,
    /// Elements of one row of `out`.
    pub stride: usize,
    /// Element of a row of `out` that belongs to the first row of `weight`.
    pub first: usize,
}

/// An attention layer from projections to the input of its output projection.
#[derive(Debug)]
pub struct Attend<'a> {
    /// Constants.
    pub spec: AttentionSpec,
    /// Tokens that each token sees, itself included, when not all.
    pub window: Option<usize>,
    /// Where tokens behind the first ones were dropped.
    pub gap: Option<Gap<'a>>,
    /// Growth of queries with their position; comes before everything else.
    pub temperature: Option<Temperature>,
    /// Added to the projected queries, where the architecture has such a bias.
    pub query_bias: Option<View>,
    /// Added to the projected keys.
    pub key_bias: Option<View>,
    /// Added to the projected values.
    pub value_bias: Option<View>,
    /// Added to the mean square in head norms.
    pub epsilon: f32,
    /// Weights of the query head norm, where the architecture has one.
    pub query_norm: Option<View>,
    /// Weights of the key head norm.
    pub key_norm: Option<View>,
    /// Cosine and sine of each pair of each row.
    pub rotary: View,
    /// Projected queries, with their gates when `spec.gated`; overwritten.
    pub query: View,
    /// Projected keys; overwritten.
    pub key: View,
    /// Projected values.
    pub value: View,
    /// The cache, with room for `position + rows` tokens.
    pub cells: Cells<'a>,
    /// Number of the layer among the attention layers.
    pub layer: usize,
    /// Tokens in the cache before these rows.
    pub position: usize,
    /// Tokens to attend.
    pub rows: usize,
    /// Where the result goes.
    pub out: View,
    /// Memory of [`Device::scratch_bytes`](super::Device::scratch_bytes); what is in it before and after means nothing.
    pub scratch: View,
    /// Set to one where a projected key or value is not finite, since what the cache keeps of it is.
    pub broken: View,
    /// Copies of the result.
    pub prepare: Prepare,
}

/// Tokens that are not in the cache any more, between some that stay and all others.
///
/// Both kept the positions at which they were read, so that only queries have to be turned: for what stays before the
/// gap back by its length, as if it were not there.
#[derive(Debug)]
pub struct Gap<'a> {
    /// Tokens before it; whole blocks.
    pub after: usize,
    /// Cosine and sine by which each pair of a query is turned back.
    pub back: Cow<'a, [f32]>,
}

/// Brings rows of a KV cache to another type where they lie.
#[derive(Debug)]
pub struct Convert {
    /// Where they lie, one after the other from its start, and will; open for both.
    pub space: Region,
    /// How many there are: one for each token, head, layer, and for keys and values.
    pub rows: usize,
    /// Elements of one.
    pub elements: usize,
    /// What they are kept as.
    pub from: KvType,
    /// What they are to be kept as.
    pub to: KvType,
}

/// A Gated DeltaNet layer from projections to the input of its output projection, for some rows of a chunk; those before them
/// have been there.
#[derive(Debug)]
pub struct Delta {
    /// Constants.
    pub spec: RecurrentSpec,
    /// Added in the norms.
    pub epsilon: f32,
    /// Projected queries, keys and values of the whole chunk; the results take their place, packed in rows of
    /// [`RecurrentSpec::values`] from its start.
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
    /// State matrices of the layer, each transposed: row j is what value element j remembers.
    pub state: View,
    /// The convolution's last inputs, oldest first.
    pub history: View,
    /// The rows, of the chunk.
    pub rows: Range<usize>,
    /// Copies of the result.
    pub prepare: Prepare,
}

/// `gate = activation(gate) · up`.
#[derive(Debug)]
pub struct Activate {
    /// Which activation.
    pub activation: Activation,
    /// Projected gate; the result, of which [`Multiply::activate`] makes copies alone.
    pub gate: View,
    /// What it is multiplied with.
    pub up: View,
    /// Added to each row of the gate first.
    pub gate_bias: Option<View>,
    /// The same of `up`.
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
    /// Which of them were computed.
    pub said: Cow<'a, [Range<usize>]>,
    /// Added to them first.
    pub bias: Option<View>,
    /// What they are divided by then.
    pub scale: f32,
    /// And bent to stay below.
    pub cap: Option<f32>,
    /// Three words that are set: the number of the first of the greatest logits, all bits of which are set where it is not looked
    /// for; its value; and no zero where a logit is not finite.
    pub found: View,
}
