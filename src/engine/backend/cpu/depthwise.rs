//! Causal convolution of each channel, with an activation: the first step of layers with a state.

use super::{
    float::{add, silu},
    isa::{Isa, kernel},
    pool::Pool,
    share::Share,
};

/// A convolution of some rows of a chunk.
pub(super) struct Depthwise<'op> {
    /// Inputs of the rows.
    pub(super) inputs: &'op [f32],
    /// Taps of each channel, oldest first.
    pub(super) weights: &'op [f32],
    /// Bias of each channel, if it has one.
    pub(super) bias: Option<&'op [f32]>,
    pub(super) taps: usize,
    pub(super) channels: usize,
    /// Whether the last inputs stay as before these rows.
    pub(super) stays: bool,
}

impl Depthwise<'_> {
    /// Writes the results to `out`; `history` holds the last inputs, oldest first.
    pub(super) fn run(
        &self,
        pool: &mut Pool,
        isa: Isa,
        history: &Share<'_, f32>,
        out: &Share<'_, f32>,
    ) {
        let (taps, channels) = (self.taps, self.channels);
        let rows = self.inputs.len() / channels;
        pool.run(channels.div_ceil(CHANNELS_PER_ITEM), &|item| {
            let from = item * CHANNELS_PER_ITEM;
            let count = CHANNELS_PER_ITEM.min(channels - from);
            let weights = taps_of(self.weights, taps, from, count);
            // Row `index` of history and chunk combined.
            let source = |index: usize| match index.checked_sub(taps - 1) {
                Some(row) => &self.inputs[row * channels + from..][..count],
                // SAFETY: each channel belongs to one item, which writes its history only after its last read.
                None => unsafe { history.view(index * channels + from, count) },
            };
            for row in 0..rows {
                // SAFETY: each channel belongs to one item.
                let out = unsafe { out.slice(row * channels + from, count) };
                out.fill(0.0);
                for (tap, weights) in weights[..taps].iter().enumerate() {
                    add_products(isa, out, source(row + tap), &weights[..count]);
                }
                if let Some(bias) = self.bias {
                    add(isa, out, &bias[from..from + count]);
                }
                silu_row(isa, out);
            }
            for tap in 0..if self.stays { 0 } else { taps - 1 } {
                let newest = source(rows + tap);
                // SAFETY: each channel belongs to one item; the row read is a later one or from the chunk.
                unsafe { history.slice(tap * channels + from, count) }.copy_from_slice(newest);
            }
        });
    }
}

/// Weights of each tap for some channels.
pub(super) fn taps_of(
    convolution: &[f32],
    taps: usize,
    from: usize,
    count: usize,
) -> [[f32; CHANNELS_PER_ITEM]; TAPS_MAX] {
    let mut weights = [[0f32; CHANNELS_PER_ITEM]; TAPS_MAX];
    let channels = convolution[from * taps..].chunks_exact(taps).take(count);
    for (channel, taps) in channels.enumerate() {
        for (tap, weight) in taps.iter().enumerate() {
            weights[tap][channel] = *weight;
        }
    }
    weights
}

kernel! {
    /// `out += x · w`, element by element.
    pub(crate) fn add_products(out: &mut [f32], x: &[f32], w: &[f32]) {
        for ((out, x), w) in out.iter_mut().zip(x).zip(w) {
            *out = x.mul_add(*w, *out);
        }
    }

    /// The activation in place.
    pub(crate) fn silu_row(row: &mut [f32]) {
        for x in row.iter_mut() {
            *x = silu(*x);
        }
    }
}

/// Channels of one item of the convolution.
pub(super) const CHANNELS_PER_ITEM: usize = 256;
/// The longest convolution, see `spec`.
pub(super) const TAPS_MAX: usize = 16;
