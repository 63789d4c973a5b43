//! Mamba-2 layer: convolution, selective scan, skip, gated norm of each group.
//!
//! The scan is the delta rule without its correction: B is the key, C the query, and the step both the strength and, by
//! a factor, the logarithm of the decay. It stays a recurrence over tokens, so that its bits depend on no chunk.

use super::{
    delta::{Place, State},
    delta_steps::{Steps, TOKENS_TOGETHER},
    depthwise::Depthwise,
    float::{rms_row_in_place, silu, softplus},
    isa::{Isa, kernel},
    pool::Pool,
    share::Share,
};
use crate::backend::{DeviceError, Scan, memory::Access};

/// Returns the results of the rows.
pub(crate) fn scan<'op>(
    pool: &mut Pool,
    isa: Isa,
    job: &'op Scan,
    access: &mut Access<'op>,
) -> Result<&'op [f32], DeviceError> {
    let (spec, rows) = (&job.spec, job.rows.len());
    let (channels, values, dim) = (spec.channels(), spec.values(), spec.head_dim);
    let scratch = Share::new(access.write(&job.scratch)?);
    let history = Share::new(access.write(&job.history)?);
    if job.is_trial && rows > TOKENS_TOGETHER {
        return Err(DeviceError::new("too many tokens are tried at once"));
    }
    let all = access.write(&job.mixed)?;
    let from = job.rows.start;
    let mixed = Share::new(&mut *all);
    let convolution = Depthwise {
        // SAFETY: read only until all items are done.
        inputs: unsafe { mixed.view(from * channels, rows * channels) },
        weights: access.read(&job.convolution)?,
        bias: access.read_some(job.convolution_bias.as_ref())?,
        taps: spec.taps,
        channels,
        stays: job.is_trial,
    };
    convolution.run(pool, isa, &history, &scratch);

    let state = State::open(&job.state, access)?;
    let (steps, gate) = (access.read(&job.step)?, access.read(&job.gate)?);
    let (decays, biases) = (access.read(&job.decay)?, access.read(&job.step_bias)?);
    let (skip, norm) = (access.read(&job.skip)?, access.read(&job.norm)?);
    let heads_of_group = spec.heads / spec.groups;
    pool.run(spec.heads, &|head| {
        let shared = values + head / heads_of_group * spec.state;
        let mut tried = Vec::new();
        for first in (0..rows).step_by(TOKENS_TOGETHER) {
            let count = TOKENS_TOGETHER.min(rows - first);
            let part = |row: usize, from: usize, len: usize| {
                if row >= first + count {
                    return &[][..];
                }
                // SAFETY: read only from here on.
                unsafe { scratch.view(row * channels + from, len) }
            };
            let (mut decayed, mut strengths) = ([0f32; TOKENS_TOGETHER], [0f32; TOKENS_TOGETHER]);
            for (row, (decay, strength)) in
                (first..rows).zip(decayed.iter_mut().zip(&mut strengths))
            {
                *strength = softplus(steps[row * spec.heads + head] + biases[head]);
                *decay = (decays[head] * *strength).exp();
            }
            let of = |from: usize, len: usize| -> [&[f32]; TOKENS_TOGETHER] {
                std::array::from_fn(|at| part(first + at, from, len))
            };
            let keys = of(shared, spec.state);
            let queries = of(shared + spec.groups * spec.state, spec.state);
            let inputs = of(head * dim, dim);
            let steps = Steps {
                queries: &queries[..count],
                keys: &keys[..count],
                values: &inputs[..count],
                decays: &decayed,
                strengths: &strengths,
                corrects: false,
            };
            let place = Place {
                head,
                rows: dim,
                columns: spec.state,
            };
            let tried = job.is_trial.then_some(&mut tried);
            // SAFETY: each head of each row is written by one item; its inputs there have been consumed.
            unsafe {
                state.advance(isa, &place, &steps, tried, |at, rows| {
                    let first = (from + first + at) * values + head * dim;
                    mixed.slice(first + rows.start, rows.len())
                });
            }
        }
    });
    pool.run(rows * spec.groups, &|item| {
        let (row, group) = (item / spec.groups, item % spec.groups);
        let (first, len) = (group * heads_of_group * dim, heads_of_group * dim);
        // SAFETY: each group of each row is one item.
        let out = unsafe { mixed.slice((from + row) * values + first, len) };
        // SAFETY: read only.
        let inputs = unsafe { scratch.view(row * channels + first, len) };
        let gate = &gate[row * values + first..][..len];
        let heads = out
            .chunks_exact_mut(dim)
            .zip(inputs.chunks_exact(dim))
            .zip(gate.chunks_exact(dim));
        for (((out, inputs), gate), skip) in heads.zip(&skip[group * heads_of_group..]) {
            skip_and_gate(isa, out, inputs, *skip, gate);
        }
        rms_row_in_place(isa, out, &norm[first..first + len], job.epsilon);
    });
    Ok(&all[from * values..][..rows * values])
}

kernel! {
    /// Output of one head with its weighted input, multiplied by the gate.
    pub(crate) fn skip_and_gate(out: &mut [f32], inputs: &[f32], skip: f32, gate: &[f32]) {
        for ((out, x), g) in out.iter_mut().zip(inputs).zip(gate) {
            *out = x.mul_add(skip, *out) * silu(*g);
        }
    }
}
