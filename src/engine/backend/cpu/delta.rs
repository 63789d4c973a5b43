//! Gated DeltaNet layer: convolution, norms, delta rule, gated output norm.
//!
//! The rule stays a recurrence over tokens, but one row's products with key and query are independent of other rows:
//! several tokens are therefore applied while a row stays in registers, and the state passes through the cache once for
//! all of them. The chunked form of the rule would need no less arithmetic for chunks this short, and its bits would
//! depend on the start of a chunk.

use std::ops::Range;

use super::{
    delta_steps::{DIM, Steps, TOKENS_TOGETHER},
    depthwise::Depthwise,
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
    let convolution = Depthwise {
        // SAFETY: read only until all items are done.
        inputs: unsafe { mixed.view(from * channels, rows * channels) },
        weights: access.read(&job.convolution)?,
        bias: None,
        taps,
        channels,
        stays: job.is_trial,
    };
    convolution.run(pool, isa, &history, &scratch);

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
                corrects: true,
            };
            let place = Place {
                head,
                rows: dim,
                columns: dim,
            };
            let tried = job.is_trial.then_some(&mut tried);
            // SAFETY: each head of each row is written by one item; its inputs there have been consumed.
            unsafe {
                state.advance(isa, &place, &steps, tried, |at, rows| {
                    let first = (from + first + at) * values + head * dim;
                    mixed.slice(first + rows.start, rows.len())
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

/// The matrix of one head.
pub(super) struct Place {
    pub(super) head: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// The state matrices of an operation, in order.
pub(super) struct State<'op>(Vec<Share<'op, f32>>);

impl<'op> State<'op> {
    pub(super) fn open(
        matrices: &'op Matrices,
        access: &mut Access<'op>,
    ) -> Result<Self, DeviceError> {
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

    /// Advances the state of one head by some tokens; results of a token for some rows go to `out`. With `tried`, a
    /// copy there advances, and the state stays.
    ///
    /// # Safety
    ///
    /// No other thread uses this head.
    pub(super) unsafe fn advance<'out>(
        &self,
        isa: Isa,
        place: &Place,
        steps: &Steps<'_>,
        mut tried: Option<&mut Vec<f32>>,
        out: impl Fn(usize, Range<usize>) -> &'out mut [f32],
    ) {
        let (rows, columns) = (place.rows, place.columns);
        let (mut at, end) = (
            place.head * rows * columns,
            (place.head + 1) * rows * columns,
        );
        let most = if tried.is_some() { TRIED_ROWS } else { rows } * columns;
        while at < end {
            // SAFETY: the caller's promise.
            let mut part = unsafe { self.part(at..end.min(at + most)) };
            if part.is_empty() {
                break;
            }
            if let Some(tried) = &mut tried {
                tried.clear();
                tried.extend_from_slice(part);
                part = tried;
            }
            let some = (at / columns % rows, part.len() / columns);
            at += part.len();
            apply(isa, part, some, steps, |at| {
                out(at, some.0..some.0 + some.1)
            });
        }
    }
}

/// The rule for several tokens of one head, in order, for some rows of its state: their first, and their number.
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
        && first + rows <= DIM
    {
        let mut results = [[0f32; DIM]; TOKENS_TOGETHER];
        // SAFETY: the set is only chosen where the machine has it; the lengths are right.
        unsafe { apply(state, first, steps, &mut results) };
        for (at, result) in results[..steps.keys.len()].iter().enumerate() {
            out(at).copy_from_slice(&result[..rows]);
        }
        return;
    }
    let step = if steps.corrects {
        delta_step
    } else {
        scan_step
    };
    for at in 0..steps.keys.len() {
        step(
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

    /// The same without its correction: a step of a selective scan.
    pub(crate) fn scan_step(
        state: &mut [f32],
        query: &[f32],
        key: &[f32],
        value: &[f32],
        decay: f32,
        strength: f32,
        out: &mut [f32],
    ) {
        for ((row, value), out) in state.chunks_exact_mut(key.len()).zip(value).zip(out.iter_mut()) {
            let change = strength * value;
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
#[cfg(test)]
mod tests {
    use super::{super::test_numbers::numbers, *};

    /// State and outputs after 21 tokens, passed in groups of `together`, with a state in parts of `split` rows.
    fn run(
        isa: Isa,
        corrects: bool,
        dim: usize,
        together: usize,
        split: usize,
    ) -> (Vec<f32>, Vec<f32>) {
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
                corrects,
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
        for (dim, corrects) in [(32, true), (128, true), (32, false), (128, false)] {
            let reference = run(Isa::Baseline, corrects, dim, 1, dim);
            for &isa in Isa::available() {
                for (together, split) in [(1, dim), (2, dim), (16, dim), (1, 6), (16, 10)] {
                    let found = run(isa, corrects, dim, together, split);
                    assert_eq!(found, reference, "{isa:?} {dim} {together} {split}");
                }
            }
        }
    }
}
