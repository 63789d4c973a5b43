//! Trial of drafted tokens on layers with a state: it advances only by the tokens that are accepted.
//!
//! ```text
//!   pass     state ──► results of all rows      inputs of the rows ──► kept
//!   accept   state + kept inputs of the accepted rows ──► state
//! ```
//!
//! The inputs of a row are what the layer's recurrence reads, some KiB, where a copy of the state would be MiB.

use std::ops::Range;

use super::loaded::Model;
use crate::{
    backend::{
        Convolve, Delta, DeviceError, Matrices, Operation, Prepare, Scan, Span, Types, View,
    },
    spec::{RecurrentSpec, Vector},
    state::TrialInputs,
};

/// Keeps the inputs of layer `index` for the rows of the chunk that are tried.
pub(super) fn keep_inputs(
    model: &mut Model,
    index: usize,
    rows: &Range<usize>,
) -> Result<(), DeviceError> {
    let Some(trial) = &mut model.sequence.trial else {
        return Ok(());
    };
    trial.rows = rows.len();
    let all = 0..rows.len();
    let Some(kept) = trial.inputs(index, rows.len(), &all) else {
        return Ok(());
    };
    let work = &model.workspace;
    let buffers = [&work.wide, &work.third, &work.fourth];
    for ((buffer, width), to) in buffers.into_iter().zip(trial.widths).zip(kept) {
        if width > 0 {
            let from = Span::Buffer(buffer.view(rows.start * width..rows.end * width));
            let to = Span::Buffer(to);
            model.backend.queue(Operation::Move { from, to })?;
        }
    }
    Ok(())
}

/// Advances the state by the first `count` of the tried rows, and forgets the others.
pub(super) fn accept(model: &mut Model, count: usize) -> Result<(), DeviceError> {
    let (Some(trial), Some(recurrent)) = (&mut model.sequence.trial, model.spec.recurrent) else {
        return Ok(());
    };
    let rows = std::mem::take(&mut trial.rows);
    let count = count.min(rows);
    // A plan may have changed the chunk since.
    let step = model.workspace.chunk().max(1);
    for index in 0..model.spec.layers.len() {
        let Some((matrices, history)) = model.sequence.state.layer(index) else {
            continue;
        };
        for first in (0..count).step_by(step) {
            let some = first..count.min(first + step);
            let trial = model.sequence.trial.as_ref();
            let Some(inputs) = trial.and_then(|trial| trial.inputs(index, rows, &some)) else {
                continue;
            };
            let recurrence = Recurrence {
                index,
                inputs,
                is_trial: false,
                rows: some,
                prepare: Prepare {
                    copies: model.workspace.copies(),
                    types: Types::default(),
                    first: 0,
                },
            };
            let state = (Matrices::Whole(matrices.clone()), history.clone());
            let operation = recurrence.operation(model, &recurrent, state);
            let operation =
                operation.ok_or_else(|| DeviceError::new("a layer with a state lacks a vector"))?;
            model.backend.queue(operation)?;
        }
    }
    Ok(())
}

/// A layer's recurrence over some rows.
pub(super) struct Recurrence {
    pub(super) index: usize,
    pub(super) inputs: TrialInputs,
    pub(super) is_trial: bool,
    pub(super) rows: Range<usize>,
    pub(super) prepare: Prepare,
}

impl Recurrence {
    /// Returns the operation on this state and these last inputs; `None` for a layer that lacks a vector.
    pub(super) fn operation(
        self,
        model: &Model,
        recurrent: &RecurrentSpec,
        (state, history): (Matrices, View),
    ) -> Option<Operation<'static>> {
        let fixed = &model.layout.fixed;
        let vector = |vector| model.weights.vector(fixed, self.index, vector);
        let [mixed, alpha, beta] = self.inputs;
        Some(match recurrent {
            RecurrentSpec::Convolution(spec) => Operation::Convolve(Convolve {
                spec: *spec,
                mixed,
                convolution: vector(Vector::Convolution)?,
                history,
                is_trial: self.is_trial,
                prepare: self.prepare,
                rows: self.rows,
            }),
            RecurrentSpec::Delta(spec) => Operation::Delta(Delta {
                spec: *spec,
                epsilon: model.spec.epsilon,
                mixed,
                gate: gate_of(model, spec.values(), &self.rows),
                alpha,
                beta,
                scratch: model.workspace.mixed.from(0),
                convolution: vector(Vector::Convolution)?,
                decay_bias: vector(Vector::DecayBias)?,
                decay: vector(Vector::Decay)?,
                norm: vector(Vector::StateNorm)?,
                state,
                history,
                is_trial: self.is_trial,
                prepare: self.prepare,
                rows: self.rows,
            }),
            RecurrentSpec::Scan(spec) => Operation::Scan(Scan {
                spec: *spec,
                epsilon: model.spec.epsilon,
                mixed,
                gate: gate_of(model, spec.values(), &self.rows),
                step: alpha,
                scratch: model.workspace.mixed.from(0),
                convolution: vector(Vector::Convolution)?,
                convolution_bias: vector(Vector::ConvolutionBias),
                step_bias: vector(Vector::DecayBias)?,
                decay: vector(Vector::Decay)?,
                skip: vector(Vector::Skip)?,
                norm: vector(Vector::StateNorm)?,
                state,
                history,
                is_trial: self.is_trial,
                prepare: self.prepare,
                rows: self.rows,
            }),
        })
    }
}

/// Gates of the results of some rows, of `width` elements.
fn gate_of(model: &Model, width: usize, rows: &Range<usize>) -> View {
    let chunk = model.workspace.chunk();
    let first = rows.start.min(chunk.saturating_sub(rows.len()));
    let rows = first * width..(first + rows.len()) * width;
    model.workspace.second.view(rows)
}
