//! Backend trait: the arithmetic of a model.
//!
//! Operations are as coarse as a kernel wants to be (a whole attention step, a whole Gated DeltaNet step), work on
//! memory that the backend itself allocated, and are finished when they return. The device that this is for has one
//! memory for CPU and GPU: a CUDA backend allocates mappings that the GPU sees under the same address, so that the
//! reader, the arenas and the book need not know which of the two computes.

use std::io;

use candle_core::quantized::GgmlDType;

use super::{
    arena::{Backing, Mapping},
    kv::KvCache,
    reserve::Reserve,
    spec::{AttentionSpec, RecurrentSpec},
};
use crate::{policy::kv_type::KvType, units::Bytes};

pub mod cpu;
pub mod cuda;

/// Memory and arithmetic of one device.
pub trait Backend: Send {
    /// Name and kernel set, for people: `cpu (avx2)`.
    fn name(&self) -> String;

    /// Memory that both this backend and the host can use.
    ///
    /// # Errors
    ///
    /// When there is none.
    fn allocate(&self, bytes: Bytes, backing: Backing) -> io::Result<Mapping>;

    /// Address space for memory that comes and goes part by part, and that both this backend and the host can use.
    ///
    /// # Errors
    ///
    /// When there is none.
    fn reserve(&self, bytes: Bytes, granule: Bytes) -> io::Result<Reserve>;

    /// Gives back what it keeps for later and nobody holds: free pages of the allocator, on a device the driver's pools.
    /// Called when a model has been opened, and not on the way of a shed.
    fn trim(&self);

    /// Bytes that the copies of one token's activations need which [`Backend::prepare`] makes.
    fn prepared_bytes(&self, types: &[GgmlDType], columns: usize) -> Bytes;

    /// Bytes that [`Backend::attend`] needs beside its job's other buffers, whatever their length.
    fn scratch_bytes(&self, spec: &AttentionSpec) -> Bytes;

    /// Turns a row of `row` bytes in the type `dtype` into `f32`.
    fn dequantize(&self, dtype: GgmlDType, row: &[u8], out: &mut [f32]);

    /// `out[r] = rms(input[r]) · weight` for each of the `rows` rows of `weight.len()` elements.
    fn rms_norm(&self, input: &[f32], weight: &[f32], epsilon: f32, rows: usize, out: &mut [f32]);

    /// The same where the rows lie.
    fn rms_norm_in_place(&self, rows_of: &mut [f32], weight: &[f32], epsilon: f32, rows: usize);

    /// Makes the copies of `rows` rows of `columns` elements that products with weights of `types` need.
    fn prepare(&self, input: &[f32], rows: usize, columns: usize, types: &[GgmlDType], prepared: &mut Prepared);

    /// Multiplies: `out[r][first + i] = Σ weight[i][c] · input[r][c]` for each job.
    fn project(&self, jobs: &mut [Projection<'_>], input: &[f32], prepared: &Prepared, rows: usize);

    /// `stream += other`.
    fn add(&self, stream: &mut [f32], other: &[f32]);

    /// `gate = gelu(gate) · up`, by the hyperbolic tangent.
    fn gelu_mul(&self, gate: &mut [f32], up: &[f32]);

    /// `gate = silu(gate) · up`.
    fn silu_mul(&self, gate: &mut [f32], up: &[f32]);

    /// One attention layer from projections to the input of its output projection.
    fn attend(&self, job: &mut AttentionJob<'_>);

    /// Brings rows of the KV cache to another type where they lie.
    fn convert(&self, job: &mut ConvertJob<'_>);

    /// One Gated DeltaNet layer from projections to the input of its output projection.
    fn delta(&self, job: &mut DeltaJob<'_>);
}

/// Copies of activations in the formats that quantised products need.
#[derive(Debug)]
pub struct Prepared {
    /// Where they are.
    pub memory: Mapping,
    /// Rows that fit.
    pub rows: usize,
    /// Elements of the longest row that fits.
    pub columns: usize,
    /// Weight types that may be multiplied with.
    pub types: Vec<GgmlDType>,
}

/// Rows of a weight matrix.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'memory> {
    /// The rows, one after the other, in the file's own format.
    pub bytes: &'memory [u8],
    /// Their type.
    pub dtype: GgmlDType,
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
}

/// A product with a weight matrix, or with some of its rows.
#[derive(Debug)]
pub struct Projection<'memory> {
    /// What to multiply with.
    pub weight: Weight<'memory>,
    /// Where the result goes.
    pub out: &'memory mut [f32],
    /// Elements of one row of `out`.
    pub stride: usize,
    /// Element of a row of `out` that belongs to the first row of `weight`.
    pub first: usize,
}

/// What an attention layer needs.
#[derive(Debug)]
pub struct AttentionJob<'memory> {
    /// Constants.
    pub spec: &'memory AttentionSpec,
    /// Tokens that each token sees, itself included, when not all.
    pub window: Option<usize>,
    /// Where tokens behind the first ones were dropped.
    pub gap: Option<Gap<'memory>>,
    /// Added to the projected queries, where the architecture has such a bias.
    pub query_bias: Option<&'memory [f32]>,
    /// Added to the projected keys.
    pub key_bias: Option<&'memory [f32]>,
    /// Added to the projected values.
    pub value_bias: Option<&'memory [f32]>,
    /// Added to the mean square in head norms.
    pub epsilon: f32,
    /// Weights of the query head norm, where the architecture has one.
    pub query_norm: Option<&'memory [f32]>,
    /// Weights of the key head norm.
    pub key_norm: Option<&'memory [f32]>,
    /// Cosine and sine of each pair of each row.
    pub rotary: &'memory [f32],
    /// Projected queries, with their gates when `spec.gated`; overwritten.
    pub query: &'memory mut [f32],
    /// Projected keys; overwritten.
    pub key: &'memory mut [f32],
    /// Projected values.
    pub value: &'memory [f32],
    /// The cache, with room for `position + rows` tokens.
    pub cache: &'memory mut KvCache,
    /// Number of the layer among the attention layers.
    pub layer: usize,
    /// Tokens in the cache before this chunk.
    pub position: usize,
    /// Tokens of this chunk.
    pub rows: usize,
    /// Where the result goes.
    pub out: &'memory mut [f32],
    /// Memory of [`Backend::scratch_bytes`]; what is in it before and after means nothing.
    pub scratch: &'memory mut [f32],
}

/// Tokens that are not in the cache any more, between some that stay and all others.
///
/// Both kept the positions at which they were read, so that only queries have to be turned: for what stays before the
/// gap back by its length, as if it were not there.
#[derive(Clone, Copy, Debug)]
pub struct Gap<'memory> {
    /// Tokens before it; whole blocks.
    pub after: usize,
    /// Cosine and sine by which each pair of a query is turned back.
    pub back: &'memory [f32],
}

/// What changing the type of a KV cache needs.
#[derive(Debug)]
pub struct ConvertJob<'memory> {
    /// Where the rows lie, one after the other from its start, and will; open for both.
    pub space: &'memory mut Reserve,
    /// How many there are: one for each token, head, layer, and for keys and values.
    pub rows: usize,
    /// Elements of one.
    pub elements: usize,
    /// What they are kept as.
    pub from: KvType,
    /// What they are to be kept as.
    pub to: KvType,
}

/// What a Gated DeltaNet layer needs.
#[derive(Debug)]
pub struct DeltaJob<'memory> {
    /// Constants.
    pub spec: &'memory RecurrentSpec,
    /// Added in the norms.
    pub epsilon: f32,
    /// Projected queries, keys and values; the result takes their place, packed in rows of [`RecurrentSpec::values`].
    pub mixed: &'memory mut [f32],
    /// Projected gate of the output.
    pub gate: &'memory [f32],
    /// Projected decay.
    pub alpha: &'memory [f32],
    /// Projected update strength.
    pub beta: &'memory [f32],
    /// Room for the convolution's output.
    pub scratch: &'memory mut [f32],
    /// Convolution taps, oldest first, for each channel.
    pub convolution: &'memory [f32],
    /// Bias of the decay.
    pub decay_bias: &'memory [f32],
    /// Logarithmic decay, negative.
    pub decay: &'memory [f32],
    /// Weights of the output norm.
    pub norm: &'memory [f32],
    /// State matrices of the layer, each transposed: row j is what value element j remembers.
    pub state: &'memory mut [f32],
    /// The convolution's last inputs, oldest first.
    pub history: &'memory mut [f32],
    /// Tokens of this chunk.
    pub rows: usize,
}
