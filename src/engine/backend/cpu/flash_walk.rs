//! Softmax of one query over blocks of tokens.

use std::ops::Range;

/// Softmax over blocks: the largest score so far, the sum of weights relative to it, and the weighted values in `sum`.
pub(crate) struct Walk<'out> {
    pub(crate) query: &'out [f32],
    pub(super) gate: &'out [f32],
    /// Tokens seen by the query.
    pub(super) seen: Range<usize>,
    pub(super) max: f32,
    pub(super) weight: f32,
    pub(crate) sum: &'out mut [f32],
}

impl<'out> Walk<'out> {
    pub(crate) fn new(
        query: &'out [f32],
        gate: &'out [f32],
        seen: Range<usize>,
        sum: &'out mut [f32],
    ) -> Self {
        sum.fill(0.0);
        Self {
            query,
            gate,
            seen,
            max: f32::NEG_INFINITY,
            weight: 0.0,
            sum,
        }
    }
}

/// The most tokens per step, and the distance between the scores of two queries.
pub(crate) const TOKENS_MAX: usize = 64;
/// Adjacent tokens in a register of AVX-512.
pub(crate) const LANES: usize = 16;
/// Queries processed together on a transposed block: a tile of 6 queries and 64 tokens fills 24 of 32 registers of
/// AVX-512; one of 16 tokens, 24 of 32 of NEON and 12 of 16 of AVX2.
pub(crate) const QUERIES_TOGETHER: usize = 6;

/// Index of a token's element in transposed keys: adjacent tokens form groups of [`LANES`], each of which has all `dim`
/// elements in order.
#[inline(always)]
pub(crate) const fn place(dim: usize, element: usize, token: usize) -> usize {
    (token / LANES * dim + element) * LANES + token % LANES
}
