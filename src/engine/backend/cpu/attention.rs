//! Attention layer: head norms, rotation, storing and attending over cache blocks.

use std::{collections::HashSet, ops::Range, ptr::NonNull};

use super::{
    cells,
    copying::Copying,
    flash::{self, Scratch},
    flash_walk::{TOKENS_MAX, Walk},
    float::{all_finite, rms_in_place, rms_of_row, rms_row_in_place},
    isa::{Isa, kernel},
    pool::Pool,
    share::Share,
};
use crate::{
    backend::{
        Attend, DeviceError, Part,
        memory::{Access, Cells},
        offset_in_block,
    },
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
    let Some(Cells { kind, shape, .. }) = job.sequences.first().map(|first| &first.cells) else {
        return Ok(());
    };
    let (kind, block_tokens) = (*kind, shape.block_tokens.get() as usize);
    let (row_bytes, block_len) = (
        cells::row_bytes(kind, dim),
        shape.block_bytes(kind).as_len(),
    );
    let mut rows = 0;
    let mut stretches = Vec::with_capacity(job.sequences.len());
    for sequence in &job.sequences {
        stretches.push(Stretch {
            first: rows,
            end: rows + sequence.rows,
            position: sequence.position,
            is_causal: job.is_causal,
            cache: Blocks {
                space: access.region(&sequence.cells.space)?,
                places: &sequence.cells.places,
                len: block_len,
            },
        });
        rows += sequence.rows;
    }
    assert_in_tests!(job.stored.is_none() || writes_are_apart(&stretches, block_tokens));
    let offset = |part, head| offset_in_block(shape, kind, job.layer, part, head);
    let mut stored = None;
    if let Some([key, value]) = &job.stored {
        let (key, value) = (access.write(key)?, access.write(value)?);
        let broken = access.write(&job.broken)?;
        for (stretch, sequence) in stretches.iter().zip(&job.sequences) {
            let floats = stretch.first * key_row..stretch.end * key_row;
            let is_finite = |kept: &[f32]| all_finite(kept.get(floats.clone()).unwrap_or_default());
            if let (false, Some(flag)) = (
                is_finite(key) && is_finite(value),
                broken.get_mut(sequence.flag),
            ) {
                *flag = 1.0;
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
        let Some(stretch) = stretch_of(&stretches, row) else {
            return;
        };
        let token = stretch.token(row);
        // SAFETY: each row is one item.
        let queries = unsafe { query.slice(row * query_row, query_row) };
        let factor = job
            .temperature
            .map_or(1.0, |temperature| temperature.at(token));
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
        let Some(block) = stretch.cache.block(token / block_tokens) else {
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
                    // SAFETY: each row has a place of its own, as asserted above, since conversations share no block that
                    // one of them writes; so only this row's item writes it, none reads it before all items are done, and one
                    // operation is executed at a time.
                    let target =
                        unsafe { std::slice::from_raw_parts_mut(target.as_ptr(), row_bytes) };
                    cells::store(isa, kind, source, bias, target);
                }
            }
        }
    });

    // Attention: one item per group of rows and of query heads of one key head, so that keys and values are widened
    // once for all of them. Later rows see more tokens and are started first, so that no long item is left at the end.
    let out = Share::new(&mut *made);
    let group = heads / kv_heads;
    let (rows_per_item, together) = tiling(rows, (kv_heads, group), pool.threads());
    let (tiles, parts) = (rows.div_ceil(rows_per_item), group.div_ceil(together));
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
                let tokens = stretch_of(&stretches, row).map_or(0, |stretch| stretch.seen(row));
                Walk::new(vector, gate, tokens.saturating_sub(window)..tokens, target)
            })
            .collect();
        let (key_at, value_at) = (offset(Part::Key, kv_head), offset(Part::Value, kv_head));
        let reads: Vec<Read<'_, 'op>> = stretches
            .iter()
            .filter_map(|stretch| {
                let first = stretch.first.max(first_row);
                let end = stretch.end.min(first_row + these);
                (first < end).then(|| Read {
                    cache: &stretch.cache,
                    walks: (first - first_row) * count..(end - first_row) * count,
                    unseen: stretch.seen(first).saturating_sub(window) / block_tokens,
                    end: stretch.seen(end - 1),
                })
            })
            .collect();
        let unseen = reads.iter().map(|read| read.unseen).min().unwrap_or(0);
        let last = reads.iter().map(|read| read.end).max().unwrap_or(0);
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
        for (index, start) in (0..last).step_by(block_tokens).enumerate().skip(unseen) {
            if gap.is_some_and(|gap| gap.after == start) {
                for (index, walk) in walks.iter_mut().enumerate() {
                    walk.query = &queries_of(index)[..dim];
                }
            }
            // Conversations with a common prefix read its blocks together.
            for same in
                reads.chunk_by(|one, other| one.place(index, start) == other.place(index, start))
            {
                let Some((read, block)) = same.first().and_then(|read| {
                    read.place(index, start)?;
                    Some((read, read.cache.block(index)?))
                }) else {
                    continue;
                };
                let end = same.iter().map(|read| read.end).max().unwrap_or(0);
                let these = read.walks.start..same.last().map_or(0, |read| read.walks.end);
                for from in (0..block_tokens.min(end - start)).step_by(TOKENS_MAX) {
                    let count = TOKENS_MAX.min(end - start - from).min(block_tokens - from);
                    let part = |block: Block<'op>, at: usize, tokens: usize| {
                        block.slice(at, tokens * row_bytes).unwrap_or_default()
                    };
                    let ahead = read
                        .cache
                        .block(index + 1)
                        .filter(|_| start + block_tokens < end);
                    let cells = flash::Cells {
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
                        walks.get_mut(these.clone()).unwrap_or_default(),
                    );
                }
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

/// Rows of one conversation, with its cache.
struct Stretch<'op> {
    first: usize,
    end: usize,
    /// Tokens before the first row.
    position: usize,
    is_causal: bool,
    cache: Blocks<'op>,
}

impl Stretch<'_> {
    /// Position of a row.
    const fn token(&self, row: usize) -> usize {
        self.position + row - self.first
    }

    /// Tokens that a row sees.
    const fn seen(&self, row: usize) -> usize {
        self.token(if self.is_causal { row } else { self.end - 1 }) + 1
    }
}

fn stretch_of<'list, 'op>(
    stretches: &'list [Stretch<'op>],
    row: usize,
) -> Option<&'list Stretch<'op>> {
    stretches.iter().find(|stretch| row < stretch.end)
}

/// Whether each row is written to a place of its own.
fn writes_are_apart(stretches: &[Stretch<'_>], block_tokens: usize) -> bool {
    let of = |stretch: &Stretch<'_>, row| {
        let token = stretch.token(row);
        let place = stretch.cache.places.get(token / block_tokens).copied();
        (place, token % block_tokens)
    };
    let mut rows = stretches
        .iter()
        .flat_map(|stretch| (stretch.first..stretch.end).map(move |row| of(stretch, row)));
    let mut seen = HashSet::new();
    rows.all(|place| seen.insert(place))
}

/// The queries of one conversation in an item, and the tokens that they read.
struct Read<'item, 'op> {
    cache: &'item Blocks<'op>,
    walks: Range<usize>,
    /// Blocks that none of them sees.
    unseen: usize,
    /// Tokens that any of them sees.
    end: usize,
}

impl Read<'_, '_> {
    /// The place of a block that begins with token `start`, if they read it.
    fn place(&self, index: usize, start: usize) -> Option<usize> {
        let is_read = index >= self.unseen && start < self.end;
        self.cache.places.get(index).copied().filter(|_| is_read)
    }
}

/// Rows per item, and query heads of one key head per item, for the least time of the slowest thread.
fn tiling(rows: usize, (kv_heads, group): (usize, usize), threads: usize) -> (usize, usize) {
    let most = group.min(QUERIES_PER_ITEM);
    let rows_max = |heads: usize| (QUERIES_PER_ITEM / heads).clamp(1, rows.max(1));
    let fewest = rows.div_ceil(rows_max(most));
    let by_rows = (fewest..=(fewest + threads).min(rows)).map(|tiles| (rows.div_ceil(tiles), most));
    let by_heads = (1..most).rev().map(|heads| (rows_max(heads), heads));
    let takes = |&(rows_per_item, heads): &(usize, usize)| {
        let items = rows.div_ceil(rows_per_item) * kv_heads * group.div_ceil(heads);
        items.div_ceil(threads.max(1)) * (BLOCK_COST + rows_per_item * heads)
    };
    by_rows.chain(by_heads).min_by_key(takes).unwrap_or((1, 1))
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
/// Time to read and transpose a block, in queries of it. Zen 5, SmolLM2: as long as three to four queries take.
const BLOCK_COST: usize = 4;
