//! One Gated DeltaNet layer: convolution, norms, the delta rule, and the gated output norm.
//!
//! The rule is applied token by token here; the state of a head goes through the cache once for each token, row by row:
//! one row's products with key and query need nothing of the others.

use super::{
    float::{dot, rms_in_place, sigmoid, silu, softplus},
    isa::{Isa, kernel},
    pool::Pool,
    share::Share,
};
use crate::engine::backend::DeltaJob;

pub(crate) fn delta(pool: &mut Pool, isa: Isa, job: &mut DeltaJob<'_>) {
    let spec = job.spec;
    let (channels, dim, taps, rows) = (spec.channels(), spec.head_dim, spec.taps, job.rows);
    let (key_heads, value_heads) = (spec.key_heads, spec.value_heads);
    let scratch = Share::new(&mut *job.scratch);
    let history = Share::new(&mut *job.history);
    let mixed = Share::new(&mut *job.mixed);
    let convolution = job.convolution;
    // SAFETY: read only until all items are done.
    let inputs = unsafe { mixed.view(0, rows * channels) };
    pool.run(channels.div_ceil(CHANNELS_PER_ITEM), &|item| {
        let from = item * CHANNELS_PER_ITEM;
        let count = CHANNELS_PER_ITEM.min(channels - from);
        let mut weights = [[0f32; CHANNELS_PER_ITEM]; TAPS_MAX];
        for (channel, taps) in convolution[from * taps..].chunks_exact(taps).take(count).enumerate() {
            for (tap, weight) in taps.iter().enumerate() {
                weights[tap][channel] = *weight;
            }
        }
        // Row `index` of history and chunk together.
        let source = |index: usize| match index.checked_sub(taps - 1) {
            Some(row) => &inputs[row * channels + from..][..count],
            // SAFETY: each channel belongs to one item, which writes its history only where it no longer reads.
            None => unsafe { history.view(index * channels + from, count) },
        };
        for row in 0..rows {
            // SAFETY: each channel belongs to one item.
            let out = unsafe { scratch.slice(row * channels + from, count) };
            out.fill(0.0);
            for (tap, weights) in weights[..taps].iter().enumerate() {
                add_products(isa, out, source(row + tap), &weights[..count]);
            }
            silu_row(isa, out);
        }
        for tap in 0..taps - 1 {
            let newest = source(rows + tap);
            // SAFETY: each channel belongs to one item; the row that is read is a later one or of the chunk.
            unsafe { history.slice(tap * channels + from, count) }.copy_from_slice(newest);
        }
    });

    // Queries and keys to unit length, queries scaled by 1/√dim.
    let epsilon = job.epsilon;
    pool.run(rows, &|row| {
        // SAFETY: each row is one item.
        let heads = unsafe { scratch.slice(row * channels, 2 * key_heads * dim) };
        unit_heads(isa, heads, dim, key_heads, epsilon);
    });

    let values = spec.values();
    let state = Share::new(&mut *job.state);
    let (alpha, beta, gate) = (job.alpha, job.beta, job.gate);
    let (decays, biases, norm, epsilon) = (job.decay, job.decay_bias, job.norm, job.epsilon);
    pool.run(value_heads, &|head| {
        // SAFETY: each head is one item.
        let state = unsafe { state.slice(head * dim * dim, dim * dim) };
        let source = head % key_heads;
        for row in 0..rows {
            // SAFETY: read only from here on.
            let mixed_row = unsafe { scratch.view(row * channels, channels) };
            let query = &mixed_row[source * dim..][..dim];
            let key = &mixed_row[(key_heads + source) * dim..][..dim];
            let value = &mixed_row[2 * key_heads * dim + head * dim..][..dim];
            let decay = decays[head] * softplus(alpha[row * value_heads + head] + biases[head]);
            let strength = sigmoid(beta[row * value_heads + head]);
            // SAFETY: each head of each row is written by one item; the inputs that were here are used up.
            let out = unsafe { mixed.slice(row * values + head * dim, dim) };
            delta_step(isa, state, query, key, value, decay.exp(), strength, out);
            let gate = &gate[row * values + head * dim..][..dim];
            gated_norm(isa, out, norm, epsilon, gate);
        }
    });
}

kernel! {
    /// `out += x · w`, element by element.
    pub(crate) fn add_products(out: &mut [f32], x: &[f32], w: &[f32]) {
        for ((out, x), w) in out.iter_mut().zip(x).zip(w) {
            *out = x.mul_add(*w, *out);
        }
    }
}

kernel! {
    /// The activation in place.
    pub(crate) fn silu_row(row: &mut [f32]) {
        for x in row.iter_mut() {
            *x = silu(*x);
        }
    }
}

kernel! {
    /// Key and query heads of one row to unit length, queries scaled.
    pub(crate) fn unit_heads(heads: &mut [f32], dim: usize, queries: usize, epsilon: f32) {
        let scale = 1.0 / (dim as f32).sqrt();
        for (index, head) in heads.chunks_exact_mut(dim).enumerate() {
            let mut factor = 1.0 / (dot(head, head) + epsilon).sqrt();
            if index < queries {
                factor *= scale;
            }
            for x in head.iter_mut() {
                *x *= factor;
            }
        }
    }
}

kernel! {
    /// The delta rule for one token of one head.
    pub(crate) fn delta_step(
        state: &mut [f32],
        query: &[f32],
        key: &[f32],
        value: &[f32],
        decay: f32,
        strength: f32,
        out: &mut [f32],
    ) {
        for ((row, value), out) in state.chunks_exact_mut(key.len()).zip(value).zip(out.iter_mut()) {
            let known = dot(row, key) * decay;
            let change = strength * (value - known);
            for (s, k) in row.iter_mut().zip(key) {
                *s = k.mul_add(change, *s * decay);
            }
            *out = dot(row, query);
        }
    }
}

kernel! {
    /// Output norm of one head, times the gate.
    pub(crate) fn gated_norm(out: &mut [f32], norm: &[f32], epsilon: f32, gate: &[f32]) {
        rms_in_place(out, norm, epsilon);
        for (x, g) in out.iter_mut().zip(gate) {
            *x *= silu(*g);
        }
    }
}

/// Channels of one item of the convolution.
const CHANNELS_PER_ITEM: usize = 256;
/// The longest convolution, see `spec`.
const TAPS_MAX: usize = 16;
