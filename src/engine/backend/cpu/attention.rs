//! One attention layer: head norms, rotation, storing keys and values, and attention over the blocks of the cache.

use std::ops::Range;

use super::{
    float::{add_scaled, dot, exp, half_to_float, rms_in_place, sigmoid},
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
    let (query_bias, key_bias, value_bias) = (job.query_bias, job.key_bias, job.value_bias);
    let window = job.window.unwrap_or(usize::MAX);
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
        add_bias(queries, query_bias);
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
        add_bias(keys, key_bias);
        for head in keys.chunks_exact_mut(dim) {
            ready_head(isa, head, key_norm, epsilon, angles, spec.pairing == Pairing::Adjacent);
        }
        let token = position + row;
        let Some(block) = cache.block(token / block_tokens) else {
            return;
        };
        for head in 0..kv_heads {
            let values = &value[row * key_row + head * dim..][..dim];
            let value_bias = value_bias.map(|bias| &bias[head * dim..][..dim]);
            for (part, source, bias) in [
                (Part::Key, &keys[head * dim..][..dim], None),
                (Part::Value, values, value_bias),
            ] {
                let offset = cache.offset(layer, part, head) + (token % block_tokens) * dim * 2;
                if let Some(target) = block.range(offset, dim * 2) {
                    // SAFETY: each token has a place of its own in the block, this row's item alone writes it, nobody
                    // reads it before all items are done, and `job.cache` is borrowed exclusively; offsets are even.
                    let target = unsafe { std::slice::from_raw_parts_mut(target.as_ptr().cast::<u16>(), dim) };
                    match bias {
                        None => {
                            for (target, source) in target.iter_mut().zip(source) {
                                *target = half::f16::from_f32(*source).to_bits();
                            }
                        }
                        Some(bias) => {
                            for ((target, source), bias) in target.iter_mut().zip(source).zip(bias) {
                                *target = half::f16::from_f32(*source + *bias).to_bits();
                            }
                        }
                    }
                }
            }
        }
    });

    // Attention: one item for some rows and the query heads of one key head, so that keys and values are widened once for
    // all of them; when that leaves too few items for the threads, one for each query head.
    let out = Share::new(&mut *job.out);
    let group = heads / kv_heads;
    let tiles = rows.div_ceil(ROWS_PER_ITEM);
    let together = if tiles * kv_heads >= ITEMS_PER_THREAD * pool.threads() {
        group.min(HEADS_PER_ITEM)
    } else {
        1
    };
    let parts = group.div_ceil(together);
    pool.run(tiles * kv_heads * parts, &|item| {
        let (tile, rest) = (item / (kv_heads * parts), item % (kv_heads * parts));
        let (kv_head, part) = (rest / parts, rest % parts);
        let first_row = tile * ROWS_PER_ITEM;
        let these = ROWS_PER_ITEM.min(rows - first_row);
        let first_head = kv_head * group + part * together;
        let count = together.min(group - part * together);
        let mut walks: [Option<Online<'_>>; QUERIES_PER_ITEM] = [const { None }; QUERIES_PER_ITEM];
        for (index, walk) in walks[..these * count].iter_mut().enumerate() {
            let (row, head) = (first_row + index / count, first_head + index % count);
            // SAFETY: read only from here on; the writes above are done.
            let queries = unsafe { query.view(row * query_row + head * query_step, query_step) };
            let (vector, gate) = queries.split_at(dim);
            // SAFETY: each row and head belongs to one item.
            let target = unsafe { out.slice((row * heads + head) * dim, dim) };
            let tokens = position + row + 1;
            *walk = Some(Online::new(vector, gate, tokens.saturating_sub(window)..tokens, target));
        }
        let (key_at, value_at) = (
            cache.offset(layer, Part::Key, kv_head),
            cache.offset(layer, Part::Value, kv_head),
        );
        let tokens = position + first_row + these;
        let unseen = (position + first_row + 1).saturating_sub(window) / block_tokens;
        for (index, start) in (0..tokens).step_by(block_tokens).enumerate().skip(unseen) {
            let count = block_tokens.min(tokens - start);
            let Some(block) = cache.block(index) else {
                return;
            };
            let keys = halves(block.slice(key_at, count * dim * 2));
            let values = halves(block.slice(value_at, count * dim * 2));
            block_step(isa, dim, spec.scale, start, keys, values, &mut walks);
        }
        for walk in walks.into_iter().flatten() {
            walk.finish(isa);
        }
    });
}

fn add_bias(row: &mut [f32], bias: Option<&[f32]>) {
    for (value, bias) in row.iter_mut().zip(bias.unwrap_or_default()) {
        *value += bias;
    }
}

/// The `f16` bits in a part of a block; none when it is not there.
fn halves(bytes: Option<&[u8]>) -> &[u16] {
    // SAFETY: every bit pattern is a `u16`; offsets in a block are even, so nothing is cut off.
    bytes.map_or(&[], |bytes| unsafe { bytes.align_to::<u16>() }.1)
}

/// Softmax over blocks: the largest score so far, the sum of weights relative to it, and the weighted values in `sum`.
pub(crate) struct Online<'out> {
    query: &'out [f32],
    gate: &'out [f32],
    /// Tokens that the query sees.
    seen: Range<usize>,
    max: f32,
    weight: f32,
    sum: &'out mut [f32],
}

impl<'out> Online<'out> {
    fn new(query: &'out [f32], gate: &'out [f32], seen: Range<usize>, sum: &'out mut [f32]) -> Self {
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

    fn finish(self, isa: Isa) {
        scale_and_gate(isa, self.sum, 1.0 / self.weight, self.gate);
    }
}

kernel! {
    /// The last step of one head: weights to a sum of one, and the output gate where there is one.
    pub(crate) fn scale_and_gate(sum: &mut [f32], scale: f32, gate: &[f32]) {
        for value in sum.iter_mut() {
            *value *= scale;
        }
        for (value, gate) in sum.iter_mut().zip(gate) {
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
    /// One block of keys and values, whose first token is `start`, for all queries that see some of it.
    pub(crate) fn block_step(
        dim: usize,
        scale: f32,
        start: usize,
        keys: &[u16],
        values: &[u16],
        walks: &mut [Option<Online<'_>>; QUERIES_PER_ITEM],
    ) {
        let mut scores = [[0f32; BLOCK_TOKENS_MAX]; QUERIES_PER_ITEM];
        let mut widened = [0f32; HEAD_DIM_MAX];
        let widened = &mut widened[..dim];
        for (token, key) in keys.chunks_exact(dim).take(BLOCK_TOKENS_MAX).enumerate() {
            widen(key, widened);
            for (walk, scores) in walks.iter().flatten().zip(&mut scores) {
                if walk.seen.contains(&(start + token)) {
                    scores[token] = dot(walk.query, widened) * scale;
                }
            }
        }
        let count = (keys.len() / dim).min(BLOCK_TOKENS_MAX);
        for (walk, scores) in walks.iter_mut().flatten().zip(&mut scores) {
            let first = walk.seen.start.saturating_sub(start);
            let end = walk.seen.end.saturating_sub(start).min(count);
            if first >= end {
                continue;
            }
            let scores = &mut scores[first..end];
            let max = scores.iter().fold(walk.max, |max, score| max.max(*score));
            // Nothing was seen before the first block, and `exp` does not reach zero.
            let shrink = if start <= walk.seen.start { 0.0 } else { exp(walk.max - max) };
            walk.max = max;
            walk.weight *= shrink;
            for value in walk.sum.iter_mut() {
                *value *= shrink;
            }
            for score in scores.iter_mut() {
                *score = exp(*score - max);
            }
            for weight in scores.iter() {
                walk.weight += weight;
            }
        }
        for (token, value) in values.chunks_exact(dim).take(BLOCK_TOKENS_MAX).enumerate() {
            widen(value, widened);
            for (walk, scores) in walks.iter_mut().flatten().zip(&scores) {
                if walk.seen.contains(&(start + token)) {
                    add_scaled(walk.sum, scores[token], widened);
                }
            }
        }
    }
}

#[inline(always)]
fn widen(halves: &[u16], floats: &mut [f32]) {
    for (float, half) in floats.iter_mut().zip(halves) {
        *float = half_to_float(*half);
    }
}

/// Rows of a chunk whose queries go through the cache together.
const ROWS_PER_ITEM: usize = 8;
/// Query heads of one key head that do.
const HEADS_PER_ITEM: usize = 4;
/// Queries of one item at most.
const QUERIES_PER_ITEM: usize = ROWS_PER_ITEM * HEADS_PER_ITEM;
/// Items that a thread should have, so that none waits long for another.
const ITEMS_PER_THREAD: usize = 2;
/// The most tokens that a block has, see `shape::kv_shape`.
const BLOCK_TOKENS_MAX: usize = 128;
/// The longest head, see `spec`.
const HEAD_DIM_MAX: usize = 1024;
