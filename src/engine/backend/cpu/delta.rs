//! Gated DeltaNet layer: convolution, norms, delta rule, gated output norm.
//!
//! The rule stays a recurrence over tokens, but one row's products with key and query are independent of other rows:
//! several tokens are therefore applied while a row stays in registers, and the state passes through the cache once for
//! all of them. The chunked form of the rule would need no less arithmetic for chunks this short, and its bits would
//! depend on the start of a chunk.

use std::ops::Range;

use super::{
    delta_steps::{DIM, Steps, TOKENS_TOGETHER},
    float::{dot, rms_in_place, sigmoid, silu, softplus},
    isa::{Isa, kernel},
    kernels::Kernels,
    pool::Pool,
    share::Share,
};
use crate::backend::{Delta, DeviceError, Matrices, ROWS_TOGETHER, memory::Access};

/// Returns the results of the rows.
pub(crate) fn delta<'op>(
    pool: &mut Pool,
    isa: Isa,
    job: &'op Delta,
    access: &mut Access<'op>,
) -> Result<&'op [f32], DeviceError> {
    let spec = &job.spec;
    let (channels, dim, taps, rows) = (spec.channels(), spec.head_dim, spec.taps, job.rows.len());
    let (key_heads, value_heads) = (spec.key_heads, spec.value_heads);
    let scratch = Share::new(access.write(&job.scratch)?);
    if job.is_trial && rows > TOKENS_TOGETHER {
        return Err(DeviceError::new("too many tokens are tried at once"));
    }
    let history = Share::new(access.write(&job.history)?);
    let all = access.write(&job.mixed)?;
    let (from, values) = (job.rows.start, spec.values());
    let mixed = Share::new(&mut *all);
    let convolution = access.read(&job.convolution)?;
    // SAFETY: read only until all items are done.
    let inputs = unsafe { mixed.view(from * channels, rows * channels) };
    pool.run(channels.div_ceil(CHANNELS_PER_ITEM), &|item| {
        let from = item * CHANNELS_PER_ITEM;
        let count = CHANNELS_PER_ITEM.min(channels - from);
        let weights = taps_of(convolution, taps, from, count);
        // Row `index` of history and chunk combined.
        let source = |index: usize| match index.checked_sub(taps - 1) {
            Some(row) => &inputs[row * channels + from..][..count],
            // SAFETY: each channel belongs to one item, which writes its history only after its last read.
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
        for tap in 0..if job.is_trial { 0 } else { taps - 1 } {
            let newest = source(rows + tap);
            // SAFETY: each channel belongs to one item; the row read is a later one or from the chunk.
            unsafe { history.slice(tap * channels + from, count) }.copy_from_slice(newest);
        }
    });

    // Normalise queries and keys to unit length, scale queries by 1/√dim.
    let epsilon = job.epsilon;
    pool.run(rows, &|row| {
        // SAFETY: each row is one item.
        let heads = unsafe { scratch.slice(row * channels, 2 * key_heads * dim) };
        unit_heads(isa, heads, dim, key_heads, epsilon);
    });

    let state = State::open(&job.state, access)?;
    let (alpha, beta, gate) = (
        access.read(&job.alpha)?,
        access.read(&job.beta)?,
        access.read(&job.gate)?,
    );
    let (decays, biases) = (access.read(&job.decay)?, access.read(&job.decay_bias)?);
    let norm = access.read(&job.norm)?;
    pool.run(value_heads, &|head| {
        let source = head % key_heads;
        let mut tried = Vec::new();
        for first in (0..rows).step_by(TOKENS_TOGETHER) {
            let count = TOKENS_TOGETHER.min(rows - first);
            let part = |row: usize, from: usize| {
                if row >= first + count {
                    return &[][..];
                }
                // SAFETY: read only from here on.
                unsafe { scratch.view(row * channels + from, dim) }
            };
            let (mut decayed, mut strengths) = ([0f32; TOKENS_TOGETHER], [0f32; TOKENS_TOGETHER]);
            for (row, (decay, strength)) in
                (first..rows).zip(decayed.iter_mut().zip(&mut strengths))
            {
                let at = row * value_heads + head;
                *decay = (decays[head] * softplus(alpha[at] + biases[head])).exp();
                *strength = sigmoid(beta[at]);
            }
            let queries: [&[f32]; TOKENS_TOGETHER] =
                std::array::from_fn(|at| part(first + at, source * dim));
            let keys: [&[f32]; TOKENS_TOGETHER] =
                std::array::from_fn(|at| part(first + at, (key_heads + source) * dim));
            let values_of: [&[f32]; TOKENS_TOGETHER] =
                std::array::from_fn(|at| part(first + at, 2 * key_heads * dim + head * dim));
            let steps = Steps {
                queries: &queries[..count],
                keys: &keys[..count],
                values: &values_of[..count],
                decays: &decayed,
                strengths: &strengths,
            };
            let end = (head + 1) * dim * dim;
            let mut at = head * dim * dim;
            let most = if job.is_trial { TRIED_ROWS } else { dim } * dim;
            while at < end {
                // SAFETY: each head is one item.
                let mut part = unsafe { state.part(at..end.min(at + most)) };
                if part.is_empty() {
                    break;
                }
                if job.is_trial {
                    tried.clear();
                    tried.extend_from_slice(part);
                    part = &mut tried;
                }
                let rows = (at / dim % dim, part.len() / dim);
                at += part.len();
                // SAFETY: each head of each row is written by one item; its inputs there have been consumed.
                apply(isa, part, rows, &steps, |at| unsafe {
                    mixed.slice((from + first + at) * values + head * dim + rows.0, rows.1)
                });
            }
            for row in first..first + count {
                // SAFETY: as above.
                let out = unsafe { mixed.slice((from + row) * values + head * dim, dim) };
                gated_norm(
                    isa,
                    out,
                    norm,
                    epsilon,
                    &gate[row * values + head * dim..][..dim],
                );
            }
        }
    });
    Ok(&all[from * values..][..rows * values])
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

/// The state matrices of an operation, in order.
struct State<'op>(Vec<Share<'op, f32>>);

impl<'op> State<'op> {
    fn open(matrices: &'op Matrices, access: &mut Access<'op>) -> Result<Self, DeviceError> {
        let parts = match matrices {
            Matrices::Whole(view) => vec![Share::new(access.write(view)?)],
            Matrices::Parts(parts) => {
                let parts = parts.iter().map(|part| access.write_span(part));
                parts
                    .map(|part| Ok(Share::new(part?)))
                    .collect::<Result<_, DeviceError>>()?
            }
        };
        Ok(Self(parts))
    }

    /// The first elements of a range that are in one part.
    ///
    /// # Safety
    ///
    /// As [`Share::slice`].
    #[expect(
        clippy::mut_from_ref,
        reason = "as `Share::slice`: the callers promise exclusion"
    )]
    unsafe fn part(&self, elements: Range<usize>) -> &mut [f32] {
        let Range { mut start, end } = elements;
        let len = end - start;
        for part in &self.0 {
            if start < part.len() {
                // SAFETY: the caller's promise.
                return unsafe { part.slice(start, len.min(part.len() - start)) };
            }
            start -= part.len();
        }
        &mut []
    }
}

/// The delta rule for several tokens of one head, in order, for some rows of its state: their first, and their number.
fn apply<'out>(
    isa: Isa,
    state: &mut [f32],
    (first, rows): (usize, usize),
    steps: &Steps<'_>,
    out: impl Fn(usize) -> &'out mut [f32],
) {
    if let Some(apply) = Kernels::of(isa).delta
        && steps.keys.iter().all(|key| key.len() == DIM)
        && rows.is_multiple_of(ROWS_TOGETHER)
    {
        let mut results = [[0f32; DIM]; TOKENS_TOGETHER];
        // SAFETY: the set is only chosen where the machine has it; the lengths are right.
        unsafe { apply(state, first, steps, &mut results) };
        for (at, result) in results[..steps.keys.len()].iter().enumerate() {
            out(at).copy_from_slice(&result[..rows]);
        }
        return;
    }
    for at in 0..steps.keys.len() {
        delta_step(
            isa,
            state,
            steps.queries[at],
            steps.keys[at],
            &steps.values[at][first..],
            steps.decays[at],
            steps.strengths[at],
            out(at),
        );
    }
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

    /// Normalises key and query heads of one row to unit length and scales queries.
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

    /// Output norm of one head, multiplied by the gate.
    pub(crate) fn gated_norm(out: &mut [f32], norm: &[f32], epsilon: f32, gate: &[f32]) {
        rms_in_place(out, norm, epsilon);
        for (x, g) in out.iter_mut().zip(gate) {
            *x *= silu(*g);
        }
    }
}

/// Rows of a state that are copied for a trial at once: they stay in the first-level cache.
const TRIED_ROWS: usize = 16 * ROWS_TOGETHER;
/// Channels of one item of the convolution.
pub(super) const CHANNELS_PER_ITEM: usize = 256;
/// The longest convolution, see `spec`.
pub(super) const TAPS_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::{super::test_numbers::numbers, *};

    /// State and outputs after 21 tokens, passed in groups of `together`, with a state in parts of `split` rows.
    fn run(isa: Isa, dim: usize, together: usize, split: usize) -> (Vec<f32>, Vec<f32>) {
        let tokens = 21;
        let mut state = numbers(dim * dim, 1);
        let (queries, keys, values) = (
            numbers(tokens * dim, 2),
            numbers(tokens * dim, 3),
            numbers(tokens * dim, 4),
        );
        let mut out = vec![0.0; tokens * dim];
        for first in (0..tokens).step_by(together) {
            let some = first * dim..tokens.min(first + together) * dim;
            let queries: Vec<&[f32]> = queries[some.clone()].chunks(dim).collect();
            let keys: Vec<&[f32]> = keys[some.clone()].chunks(dim).collect();
            let values: Vec<&[f32]> = values[some].chunks(dim).collect();
            let steps = Steps {
                queries: &queries,
                keys: &keys,
                values: &values,
                decays: &std::array::from_fn(|at| 0.5 + 0.02 * (first + at) as f32),
                strengths: &std::array::from_fn(|at| 0.9 - 0.03 * (first + at) as f32),
            };
            let share = Share::new(&mut out);
            for (part, rows) in state.chunks_mut(split * dim).zip((0..dim).step_by(split)) {
                let rows = (rows, part.len() / dim);
                // SAFETY: tokens are processed one after another.
                apply(isa, part, rows, &steps, |at| unsafe {
                    share.slice((first + at) * dim + rows.0, rows.1)
                });
            }
        }
        (state, out)
    }

    #[test]
    fn the_rule_has_the_same_bits_for_any_set_of_instructions_and_any_number_of_tokens_at_once() {
        for dim in [32, 128] {
            let reference = run(Isa::Baseline, dim, 1, dim);
            for &isa in Isa::available() {
                for (together, split) in [(1, dim), (2, dim), (16, dim), (1, 6), (16, 10)] {
                    let found = run(isa, dim, together, split);
                    assert_eq!(found, reference, "{isa:?} {dim} {together} {split}");
                }
            }
        }
    }
}
