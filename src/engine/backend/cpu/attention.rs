//! Attention layer: head norms, rotation, storing and attending over cache blocks.

use std::ptr::NonNull;

use super::{
    cells,
    copying::Copying,
    flash::{self, Cells, Scratch},
    flash_walk::{TOKENS_MAX, Walk},
    float::{all_finite, rms_in_place, rms_of_row, rms_row_in_place},
    isa::{Isa, kernel},
    pool::Pool,
    share::Share,
};
use crate::{
    backend::{Attend, DeviceError, Part, memory::Access, offset_in_block},
    reserve::Reserve,
    spec::{AttentionSpec, Pairing},
};
use cotenant_units::Bytes;

/// Elements needed by one thread for an item: a block's keys, values and scores, and rotated queries.
const fn scratch_elements(dim: usize) -> usize {
    Scratch::elements(dim, QUERIES_PER_ITEM) + QUERIES_PER_ITEM * dim
}

/// Attention scratch for this many threads.
pub(super) fn scratch_bytes(spec: &AttentionSpec, threads: usize) -> Bytes {
    Bytes::of_len(threads * scratch_elements(spec.head_dim) * 4)
}

/// The norm of all heads as one, or of each.
fn norms(weight: Option<&[f32]>, dim: usize) -> (Option<&[f32]>, Option<&[f32]>) {
    match weight {
        Some(weight) if weight.len() > dim => (Some(weight), None),
        each => (None, each),
    }
}

pub(crate) fn attend<'op>(
    pool: &mut Pool,
    isa: Isa,
    job: &'op Attend<'_>,
    access: &mut Access<'op>,
) -> Result<(), DeviceError> {
    let spec = &job.spec;
    let (heads, kv_heads, dim) = (spec.heads, spec.kv_heads, spec.head_dim);
    let block_tokens = job.cells.shape.block_tokens.get() as usize;
    let query_step = if spec.gated { 2 * dim } else { dim };
    let query_row = heads * query_step;
    let key_row = kv_heads * dim;
    let (rotary, epsilon) = (access.read(&job.rotary)?, job.epsilon);
    let (query_norms, query_norm) = norms(access.read_some(job.query_norm.as_ref())?, dim);
    let (key_norms, key_norm) = norms(access.read_some(job.key_norm.as_ref())?, dim);
    let query_bias = access.read_some(job.query_bias.as_ref())?;
    let key_bias = access.read_some(job.key_bias.as_ref())?;
    let value_bias = access.read_some(job.value_bias.as_ref())?;
    let sinks = access.read_some(job.sinks.as_ref())?;
    let window = job.window.unwrap_or(usize::MAX);
    let gap = job.gap.as_ref();
    let cells_kind = &job.cells;
    let (kind, row_bytes) = (cells_kind.kind, cells::row_bytes(cells_kind.kind, dim));
    let cache = Blocks {
        space: access.region(&cells_kind.space)?,
        places: &cells_kind.places,
        len: cells_kind.shape.block_bytes(kind).as_len(),
    };
    let offset = |part, head| offset_in_block(&cells_kind.shape, kind, job.layer, part, head);
    let (position, rows) = (job.position, job.rows);
    let mut stored = None;
    if let Some([key, value]) = &job.stored {
        let (key, value) = (access.write(key)?, access.write(value)?);
        let broken = access.write(&job.broken)?;
        for kept in [&*key, &*value] {
            if !all_finite(kept.get(..rows * key_row).unwrap_or_default()) {
                broken.fill(1.0);
            }
        }
        stored = Some((Share::new(key), Share::new(value)));
    }
    let query = Share::new(access.write(&job.query)?);
    let made = access.write(&job.out)?;
    let scratch = Share::new(access.write(&job.scratch)?);
    let copying = Copying::new(isa, &job.prepare, (rows, heads * dim), access)?;

    // Keys and values of this chunk, and preparation of its queries: one item per row.
    pool.run(rows, &|row| {
        let angles = &rotary[row * spec.rotary..(row + 1) * spec.rotary];
        // SAFETY: each row is one item.
        let queries = unsafe { query.slice(row * query_row, query_row) };
        let factor = job
            .temperature
            .map_or(1.0, |temperature| temperature.at(position + row));
        for value in queries.iter_mut().filter(|_| factor != 1.0) {
            *value *= factor;
        }
        add_bias(queries, query_bias);
        if let Some(weight) = query_norms {
            rms_row_in_place(isa, queries, weight, epsilon);
        }
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
        let Some((key, value)) = &stored else {
            return;
        };
        // SAFETY: each row is one item.
        let keys = unsafe { key.slice(row * key_row, key_row) };
        // SAFETY: as above.
        let values = unsafe { value.slice(row * key_row, key_row) };
        for head in values.chunks_exact_mut(dim).filter(|_| spec.values_normed) {
            rms_of_row(isa, head, epsilon);
        }
        add_bias(keys, key_bias);
        if let Some(weight) = key_norms {
            rms_row_in_place(isa, keys, weight, epsilon);
        }
        for head in keys.chunks_exact_mut(dim) {
            ready_head(
                isa,
                head,
                key_norm,
                epsilon,
                angles,
                spec.pairing == Pairing::Adjacent,
            );
        }
        let token = position + row;
        let Some(block) = cache.block(token / block_tokens) else {
            return;
        };
        for head in 0..kv_heads {
            let values = &values[head * dim..][..dim];
            let value_bias = value_bias.map(|bias| &bias[head * dim..][..dim]);
            for (part, source, bias) in [
                (Part::Key, &keys[head * dim..][..dim], None),
                (Part::Value, values, value_bias),
            ] {
                let offset = offset(part, head) + (token % block_tokens) * row_bytes;
                if let Some(target) = block.range(offset, row_bytes) {
                    // SAFETY: each token has its own place in the block, only this row's item writes it, none reads it
                    // before all items are done, and one operation is executed at a time.
                    let target =
                        unsafe { std::slice::from_raw_parts_mut(target.as_ptr(), row_bytes) };
                    cells::store(isa, kind, source, bias, target);
                }
            }
        }
    });

    // Attention: one item per group of rows and the query heads of one key head, so that keys and values are widened
    // once for all of them; if that leaves too few items for the threads, one per query head. Later rows see more
    // tokens and are started first, so that no long item is left at the end.
    let out = Share::new(&mut *made);
    let group = heads / kv_heads;
    let rows_per_item = (QUERIES_PER_ITEM / group).max(1);
    let tiles = rows.div_ceil(rows_per_item);
    let together = if tiles * kv_heads >= pool.threads() {
        group.min(QUERIES_PER_ITEM)
    } else {
        1
    };
    let parts = group.div_ceil(together);
    let scratch_of = scratch_elements(dim);
    pool.run_by_thread(tiles * kv_heads * parts, &|thread, item| {
        // SAFETY: a thread processes one item at a time, and thread numbers are unique.
        let scratch = unsafe { scratch.slice(thread * scratch_of, scratch_of) };
        let (scratch, turned) = scratch.split_at_mut(scratch_of - QUERIES_PER_ITEM * dim);
        let mut scratch = Scratch::new(scratch, dim);
        let (tile, rest) = (
            tiles - 1 - item / (kv_heads * parts),
            item % (kv_heads * parts),
        );
        let (kv_head, part) = (rest / parts, rest % parts);
        let first_row = tile * rows_per_item;
        let these = rows_per_item.min(rows - first_row);
        let first_head = kv_head * group + part * together;
        let count = together.min(group - part * together);
        let queries_of = |index: usize| {
            let (row, head) = (first_row + index / count, first_head + index % count);
            // SAFETY: read only from here on; all writes above have completed.
            unsafe { query.view(row * query_row + head * query_step, query_step) }
        };
        let mut walks: Vec<Walk<'_>> = (0..these * count)
            .map(|index| {
                let (row, head) = (first_row + index / count, first_head + index % count);
                let (vector, gate) = queries_of(index).split_at(dim);
                // SAFETY: each row and head belongs to one item.
                let target = unsafe { out.slice((row * heads + head) * dim, dim) };
                let tokens = position + row + 1;
                Walk::new(vector, gate, tokens.saturating_sub(window)..tokens, target)
            })
            .collect();
        let (key_at, value_at) = (offset(Part::Key, kv_head), offset(Part::Value, kv_head));
        let end = position + first_row + these;
        let unseen = (position + first_row + 1).saturating_sub(window) / block_tokens;
        let gap = gap.filter(|gap| unseen < gap.after / block_tokens);
        if let Some(gap) = gap {
            for (index, (walk, turned)) in walks
                .iter_mut()
                .zip(turned.chunks_exact_mut(dim))
                .enumerate()
            {
                turned.copy_from_slice(&queries_of(index)[..dim]);
                ready_head(
                    isa,
                    turned,
                    None,
                    epsilon,
                    &gap.back,
                    spec.pairing == Pairing::Adjacent,
                );
                walk.query = turned;
            }
        }
        for (index, start) in (0..end).step_by(block_tokens).enumerate().skip(unseen) {
            let Some(block) = cache.block(index) else {
                return;
            };
            if gap.is_some_and(|gap| gap.after == start) {
                for (index, walk) in walks.iter_mut().enumerate() {
                    walk.query = &queries_of(index)[..dim];
                }
            }
            for from in (0..block_tokens.min(end - start)).step_by(TOKENS_MAX) {
                let count = TOKENS_MAX.min(end - start - from).min(block_tokens - from);
                let part = |block: Block<'op>, at: usize, tokens: usize| {
                    block.slice(at, tokens * row_bytes).unwrap_or_default()
                };
                let ahead = cache
                    .block(index + 1)
                    .filter(|_| start + block_tokens < end);
                let cells = Cells {
                    kind,
                    dim,
                    keys: part(block, key_at + from * row_bytes, count),
                    values: part(block, value_at + from * row_bytes, count),
                    ahead: ahead
                        .map(|block| part(block, key_at, TOKENS_MAX.min(block_tokens)))
                        .unwrap_or_default(),
                };
                flash::step(
                    &mut scratch,
                    isa,
                    cells,
                    (spec.scale, spec.score_cap),
                    start + from..start + from + count,
                    &mut walks,
                );
            }
        }
        for (index, walk) in walks.into_iter().enumerate() {
            let sink = sinks.and_then(|sinks| sinks.get(first_head + index % count));
            walk.finish(isa, sink.copied());
        }
    });
    let made = made.get(..rows * heads * dim).unwrap_or_default();
    copying.all(pool, made, heads * dim);
    Ok(())
}

/// Blocks of a cache at independent places.
struct Blocks<'op> {
    space: &'op Reserve,
    places: &'op [usize],
    /// Bytes of a block.
    len: usize,
}

/// One block.
#[derive(Clone, Copy)]
struct Block<'op> {
    space: &'op Reserve,
    start: usize,
    len: usize,
}

impl<'op> Blocks<'op> {
    fn block(&self, index: usize) -> Option<Block<'op>> {
        Some(Block {
            space: self.space,
            start: self.places.get(index)? * self.len,
            len: self.len,
        })
    }
}

impl<'op> Block<'op> {
    /// The address of `len` bytes from `offset`, or `None` unless all are inside.
    fn range(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        self.space.range(self.start.checked_add(offset)?, len)
    }

    /// `len` bytes from `offset`, or `None` unless all are inside.
    fn slice(&self, offset: usize, len: usize) -> Option<&'op [u8]> {
        let start = self.range(offset, len)?;
        // SAFETY: inside the open part, which the operation keeps; initialised, as anonymous memory is zero. Writes
        // through `range` precede all reads.
        Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), len) })
    }
}

fn add_bias(row: &mut [f32], bias: Option<&[f32]>) {
    for (value, bias) in row.iter_mut().zip(bias.unwrap_or_default()) {
        *value += bias;
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

/// Queries per item: enough to make widening and transposing a block comparatively cheap.
const QUERIES_PER_ITEM: usize = 64;
