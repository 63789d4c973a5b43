//! One attention layer: head norms, rotation, storing keys and values, and attention over the blocks of the cache.

use super::{
    float::{add_scaled, dot, half_to_float, rms_in_place, sigmoid},
    isa::{Isa, kernel},
    pool::Pool,
    share::Share,
};
use crate::engine::{backend::AttentionJob, kv::Part, spec::Pairing};

pub(crate) fn attend(pool: &mut Pool, isa: Isa, job: &mut AttentionJob<'_>) {
    let spec = job.spec;
    let (heads, kv_heads, dim) = (spec.heads, spec.kv_heads, spec.head_dim);
    let block_tokens = job.cache.shape().block_tokens.get() as usize;
    let query_step = if spec.gated { 2 * dim } else { dim };
    let query_row = heads * query_step;
    let key_row = kv_heads * dim;
    let (rotary, epsilon) = (job.rotary, job.epsilon);
    let (query_norm, key_norm) = (job.query_norm, job.key_norm);
    let cache = &*job.cache;
    let (layer, position, rows) = (job.layer, job.position, job.rows);
    let query = Share::new(&mut *job.query);
    let key = Share::new(&mut *job.key);
    let value = job.value;

    // Keys and values of this chunk, and its queries made ready: one item for each row.
    pool.run(rows, &|row| {
        let angles = &rotary[row * spec.rotary..(row + 1) * spec.rotary];
        // SAFETY: each row is one item.
        let queries = unsafe { query.slice(row * query_row, query_row) };
        for head in queries.chunks_exact_mut(query_step) {
            ready_head(
                isa,
                &mut head[..dim],
                query_norm,
                epsilon,
                angles,
                spec.pairing == Pairing::Adjacent,
            );
        }
        // SAFETY: each row is one item.
        let keys = unsafe { key.slice(row * key_row, key_row) };
        for head in keys.chunks_exact_mut(dim) {
            ready_head(isa, head, key_norm, epsilon, angles, spec.pairing == Pairing::Adjacent);
        }
        let token = position + row;
        let Some(block) = cache.block(token / block_tokens) else {
            return;
        };
        for head in 0..kv_heads {
            let values = &value[row * key_row + head * dim..][..dim];
            for (part, source) in [(Part::Key, &keys[head * dim..][..dim]), (Part::Value, values)] {
                let offset = cache.offset(layer, part, head) + (token % block_tokens) * dim * 2;
                if let Some(target) = block.range(offset, dim * 2) {
                    // SAFETY: each token has a place of its own in the block, this row's item alone writes it, nobody
                    // reads it before all items are done, and `job.cache` is borrowed exclusively; offsets are even.
                    let target = unsafe { std::slice::from_raw_parts_mut(target.as_ptr().cast::<u16>(), dim) };
                    for (target, source) in target.iter_mut().zip(source) {
                        *target = half::f16::from_f32(*source).to_bits();
                    }
                }
            }
        }
    });

    // Attention: one item for each row and query head.
    let out = Share::new(&mut *job.out);
    let group = heads / kv_heads;
    pool.run(rows * heads, &|item| {
        let (row, head) = (item / heads, item % heads);
        let tokens = position + row + 1;
        // SAFETY: read only from here on; the writes above are done.
        let queries = unsafe { query.view(row * query_row + head * query_step, query_step) };
        let (vector, gate) = queries.split_at(dim);
        // SAFETY: each row and head is one item.
        let target = unsafe { out.slice((row * heads + head) * dim, dim) };
        let mut walk = Online::new(target);
        let (key_at, value_at) = (
            cache.offset(layer, Part::Key, head / group),
            cache.offset(layer, Part::Value, head / group),
        );
        for (index, start) in (0..tokens).step_by(block_tokens).enumerate() {
            let count = block_tokens.min(tokens - start);
            let Some(block) = cache.block(index) else {
                return;
            };
            let keys = halves(block.slice(key_at, count * dim * 2));
            let values = halves(block.slice(value_at, count * dim * 2));
            block_step(isa, vector, keys, values, &mut walk);
        }
        walk.finish(gate);
    });
}

/// The `f16` bits in a part of a block; none when it is not there.
fn halves(bytes: Option<&[u8]>) -> &[u16] {
    // SAFETY: every bit pattern is a `u16`; offsets in a block are even, so nothing is cut off.
    bytes.map_or(&[], |bytes| unsafe { bytes.align_to::<u16>() }.1)
}

/// Softmax over blocks: the largest score so far, the sum of weights relative to it, and the weighted values in `sum`.
pub(crate) struct Online<'out> {
    max: f32,
    weight: f32,
    sum: &'out mut [f32],
}

impl<'out> Online<'out> {
    fn new(sum: &'out mut [f32]) -> Self {
        sum.fill(0.0);
        Self {
            max: f32::NEG_INFINITY,
            weight: 0.0,
            sum,
        }
    }

    fn finish(self, gate: &[f32]) {
        let scale = 1.0 / self.weight;
        for value in self.sum.iter_mut() {
            *value *= scale;
        }
        for (value, gate) in self.sum.iter_mut().zip(gate) {
            *value *= sigmoid(*gate);
        }
    }
}

kernel! {
    /// Norm and rotation of one head.
    pub(crate) fn ready_head(head: &mut [f32], norm: Option<&[f32]>, epsilon: f32, angles: &[f32], adjacent: bool) {
        if let Some(norm) = norm {
            rms_in_place(head, norm, epsilon);
        }
        let half = angles.len() / 2;
        for pair in 0..half {
            let (cos, sin) = (angles[2 * pair], angles[2 * pair + 1]);
            let (i, j) = if adjacent { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
            let (x, y) = (head[i], head[j]);
            head[i] = x * cos - y * sin;
            head[j] = x * sin + y * cos;
        }
    }
}

kernel! {
    /// One block of keys and values.
    pub(crate) fn block_step(query: &[f32], keys: &[u16], values: &[u16], walk: &mut Online<'_>) {
        let dim = query.len();
        let scale = 1.0 / (dim as f32).sqrt();
        let count = (keys.len() / dim).min(BLOCK_TOKENS_MAX);
        let mut scores = [0f32; BLOCK_TOKENS_MAX];
        let mut widened = [0f32; HEAD_DIM_MAX];
        let widened = &mut widened[..dim];
        let mut max = walk.max;
        for (score, key) in scores[..count].iter_mut().zip(keys.chunks_exact(dim)) {
            widen(key, widened);
            *score = dot(query, widened) * scale;
            max = max.max(*score);
        }
        let shrink = (walk.max - max).exp();
        walk.max = max;
        walk.weight *= shrink;
        for value in walk.sum.iter_mut() {
            *value *= shrink;
        }
        for (score, value) in scores[..count].iter().zip(values.chunks_exact(dim)) {
            let weight = (score - max).exp();
            walk.weight += weight;
            widen(value, widened);
            add_scaled(walk.sum, weight, widened);
        }
    }
}

#[inline(always)]
fn widen(halves: &[u16], floats: &mut [f32]) {
    for (float, half) in floats.iter_mut().zip(halves) {
        *float = half_to_float(*half);
    }
}

/// The most tokens that a block has, see `shape::kv_shape`.
const BLOCK_TOKENS_MAX: usize = 128;
/// The longest head, see `spec`.
const HEAD_DIM_MAX: usize = 1024;
