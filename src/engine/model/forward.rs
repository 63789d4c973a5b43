//! Layers of all families from one table, for a chunk of a pass.

use std::{ops::Range, time::Instant};

use super::{
    batch::Batch,
    loaded::Model,
    parked::Lane,
    products::{Failure, Input, Progress, Want},
    residency,
    trial::{self, Recurrence},
    weights::Place,
    workspace::Slot,
};
use crate::{
    backend::{
        Activate, Attend, Attended, Finish, Matrices, Norm, Operation, Prepare, Residual, Rotate,
        Span, Types, View,
    },
    error::ForwardError,
    preemption::{Preempt, Preemption, Work},
    reader::{Extent, Missing},
    shape::{FLAGS, WINDOW_ROWS, logits_stride},
    spec::{LayerSpec, RecurrentSpec, Role, Vector},
};
use cotenant_policy::residency::LayerKind;

/// Forward pass in progress; computes one chunk at a time.
pub(super) struct Pass<'pass, 'checkpoint> {
    pub(super) model: &'pass mut Model,
    /// Preemption points.
    pub(super) preemption: Preemption<'checkpoint>,
    /// Length of the sequence after the pass.
    pub(super) needed: u32,
    /// Tokens of the chunk.
    pub(super) rows: usize,
    /// Conversations of the chunk's rows.
    pub(super) batch: Batch,
    /// Whether the state of the sequence stays until its rows are accepted.
    pub(super) is_trial: bool,
    /// Pending addition of the last part's output to the residual stream, if any.
    pub(super) residual: Option<Residual>,
}

impl Pass<'_, '_> {
    /// Acts on the result of a preemption check while no weight is in use. `place` is computed next.
    pub(super) fn preempt(&mut self, found: Preempt, place: Place) -> Result<(), Failure> {
        match found {
            Preempt::No => Ok(()),
            Preempt::Pause => {
                if let Some(plan) = self.preemption.take() {
                    let Self {
                        model,
                        preemption,
                        needed,
                        ..
                    } = self;
                    let result = residency::change(model, &plan, place, needed, false, &mut || {
                        preemption.wanted()
                    });
                    preemption.applied(result);
                }
                Ok(())
            }
            Preempt::Stop => Err(Failure::Stopped),
        }
    }

    /// Converts a failure of layer `layer`, or of the head if `layer` is beyond the last one, to the error of the pass.
    pub(super) fn failed(&self, failure: Failure, layer: usize) -> ForwardError {
        match failure {
            Failure::Stopped | Failure::Missing(Missing::Stopped) => self.cancelled(layer),
            Failure::Missing(Missing::Stalled(stalled)) => stalled.into(),
            Failure::Missing(Missing::Failed(error)) => ForwardError::Read(error),
            Failure::Device(error) => error.into(),
            Failure::NoMatrix => {
                let extent = Extent {
                    what: format!("layer {layer}").into(),
                    offset: 0,
                    bytes: 0,
                };
                ForwardError::Read(
                    extent.error(self.model.header.path(), "its reader is not running"),
                )
            }
        }
    }

    fn cancelled(&self, layer: usize) -> ForwardError {
        ForwardError::Cancelled {
            position: self.model.sequence.position,
            layer: u32::try_from(layer).unwrap_or(u32::MAX),
        }
    }

    /// Flags that operations set on non-finite results, stored after the logits of `result`: for keys and values, and
    /// for logits.
    pub(super) fn flags(&self, result: usize) -> View {
        let at = result * logits_stride(&self.model.spec) + self.model.spec.vocabulary;
        self.model.logits.view(at..at + FLAGS)
    }

    /// Computes cosines and sines for the rows of a chunk, followed by those of local layers, if any.
    pub(super) fn rotate(&mut self, rows: usize) -> Result<(), ForwardError> {
        // Without attention layers, no memory is allocated for them.
        if self.model.spec.attention_layers() == 0 {
            return Ok(());
        }
        let own = self.batch.own().clone();
        if !own.is_empty() {
            // Tokens keep the positions at which they were read, even if tokens before them are dropped.
            let sequence = &self.model.sequence;
            let position = sequence.position as usize + sequence.dropped.tokens() as usize;
            self.rotate_from(position, own.clone(), rows)?;
        }
        for row in (0..own.start).chain(own.end..rows) {
            let (_, position) = self.lane(row).ok_or(ForwardError::SequenceLost)?;
            self.rotate_from(position, row..row + 1, rows)?;
        }
        Ok(())
    }

    /// Computes angles for `rows` of a chunk of `all`, the first at `position`.
    pub(super) fn rotate_from(
        &mut self,
        position: usize,
        rows: Range<usize>,
        all: usize,
    ) -> Result<(), ForwardError> {
        let mut first = 0;
        for (number, kind) in self.model.spec.attention.kinds().enumerate() {
            let width = kind.rotary;
            let factors = self.model.weights.rope_factors().filter(|_| number == 0);
            self.model.backend.queue(Operation::Rotate(Rotate {
                rotation: kind.rotation,
                factors: factors.map(Into::into),
                position,
                width,
                to: self
                    .model
                    .workspace
                    .rotary
                    .view(first + rows.start * width..first + rows.end * width),
            }))?;
            first += all * width;
        }
        Ok(())
    }

    /// Returns the number of row `row`'s lane among the parked conversations, and the row's position.
    fn lane(&self, row: usize) -> Option<(usize, usize)> {
        let other = self.batch.other(row)?;
        let (number, length) = self.model.sequence.lane(other.lane)?;
        Some((number, length as usize + other.ahead as usize))
    }

    /// Returns the matrices of a layer with these roles and their output views: `rows` rows with the given stride.
    fn wants(
        &self,
        index: usize,
        wants: &[(Role, Slot, usize)],
        rows: usize,
    ) -> Result<Vec<Want>, Failure> {
        let layer = self.model.spec.layer(index).ok_or(Failure::NoMatrix)?;
        let want = |&(role, slot, stride): &(Role, Slot, usize)| {
            let (number, matrix) = layer.matrix(role).ok_or(Failure::NoMatrix)?;
            Ok(Want {
                number,
                dtype: matrix.tensor.dtype,
                columns: matrix.columns,
                stride,
                out: self.model.workspace.slot(slot).view(0..rows * stride),
            })
        };
        wants.iter().map(want).collect()
    }

    /// Multiplies the rows in `source`, whose copies exist, with matrices of one part of a layer.
    pub(super) fn products(
        &mut self,
        index: usize,
        source: Slot,
        wants: &[(Role, Slot, usize)],
    ) -> Result<(), Failure> {
        self.products_then(index, source, wants, None)
    }

    /// As [`Self::products`], followed by an activation.
    fn products_then(
        &mut self,
        index: usize,
        source: Slot,
        wants: &[(Role, Slot, usize)],
        activate: Option<Activate>,
    ) -> Result<(), Failure> {
        let wants = self.wants(index, wants, self.rows)?;
        let first = wants.first().ok_or(Failure::NoMatrix)?;
        let part = self
            .model
            .layout
            .layers
            .get(index)
            .and_then(|parts| parts.get(first.number));
        let mut at = Place {
            part: *part.ok_or(Failure::NoMatrix)?,
            piece: 0,
        };
        let mut input = Input {
            floats: self
                .model
                .workspace
                .slot(source)
                .view(0..self.rows * first.columns),
            copies: self.model.workspace.copies(),
            rows: self.rows,
            activate,
        };
        if self.rows > 1 {
            let found = self.preemption.check_if_due();
            self.preempt(found, at)?;
        }
        loop {
            let backend = self.model.backend.as_mut();
            match self.model.weights.multiply(
                backend,
                at,
                &self.model.layout,
                &wants,
                &mut input,
                &mut self.preemption,
            )? {
                Progress::Done => break,
                Progress::Paused(place) => {
                    at = place;
                    self.preempt(Preempt::Pause, at)?;
                }
            }
        }
        // The products were queued in pieces, so the activation is queued on its own.
        let left = input.activate.take();
        Ok(left.map_or(Ok(()), |activate| {
            self.model.backend.queue(Operation::Activate(activate))
        })?)
    }

    /// Returns how to copy a result for products with the matrices of these roles.
    pub(super) fn prepare(&self, index: usize, roles: &[Role], first: usize) -> Prepare {
        let layer = self.model.spec.layer(index);
        let matrices = roles.iter().filter_map(|role| layer?.matrix(*role));
        Prepare {
            copies: self.model.workspace.copies(),
            types: matrices.map(|(_, matrix)| matrix.tensor.dtype).collect(),
            first,
        }
    }

    /// Adds the output of the last part to the residual stream, and normalises the sum for products with these roles;
    /// without `vectors`, it is used as it is.
    pub(super) fn norm(
        &mut self,
        index: usize,
        vectors: Option<[Vector; 2]>,
        roles: &[Role],
    ) -> Result<(), Failure> {
        let floats = 0..self.rows * self.model.spec.width;
        let (weights, fixed) = (&self.model.weights, &self.model.layout.fixed);
        let vector = |vector| weights.vector(fixed, index, vector);
        let [weight, bias] = vectors.map_or([None, None], |vectors| vectors.map(vector));
        let norm = Norm {
            stream: self.model.workspace.stream.view(floats.clone()),
            normed: self.model.workspace.normed.view(floats),
            residual: self.residual.take(),
            width: self.model.spec.width,
            weight,
            bias,
            epsilon: self.model.spec.epsilon,
            prepare: self.prepare(index, roles, 0),
        };
        Ok(self.model.backend.queue(Operation::Norm(norm))?)
    }

    /// Returns how a part's output is added to the residual stream.
    pub(super) fn residual(&self, index: usize, bias: Vector, norm: Vector) -> Residual {
        let vector = |vector| {
            self.model
                .weights
                .vector(&self.model.layout.fixed, index, vector)
        };
        Residual {
            bias: vector(bias),
            norm: vector(norm),
            scale: self.model.spec.residual_scale,
            sum: None,
        }
    }

    /// As [`Self::residual`], of the last part of a layer.
    pub(super) fn last_residual(&self, index: usize, bias: Vector, norm: Vector) -> Residual {
        let fixed = &self.model.layout.fixed;
        Residual {
            sum: self.model.weights.vector(fixed, index, Vector::LayerScale),
            ..self.residual(index, bias, norm)
        }
    }

    pub(super) fn attention(&mut self, index: usize) -> Result<(), Failure> {
        let layer = self.model.spec.layer(index).ok_or(Failure::NoMatrix)?;
        let borrows = layer.borrows;
        let attention = self.model.spec.attention.of_layers(layer.local);
        let (query, kv) = (attention.query(), attention.kv());
        let width = self.model.spec.width;
        let wants = [
            (Role::Query, Slot::Wide, attention.projected()),
            (Role::Key, Slot::Second, kv),
            (Role::Value, Slot::Third, kv),
        ];
        self.mixer_inputs(
            index,
            wants.get(..if borrows { 1 } else { 3 }).unwrap_or_default(),
        )?;
        let mut first = 0;
        while first < self.rows {
            let seen = self.model.sequence.position as usize + self.rows;
            let most = self
                .preemption
                .estimators
                .attention
                .rows((2 * query * seen) as u64);
            let began = Instant::now();
            let rows = self.attend(index, first, most.max(ATTENTION_ROWS_MIN))?;
            first += rows;
            if self.rows > 1 {
                let work = (2 * query * seen * rows) as u64;
                self.preemption.queued(
                    self.model.backend.as_mut(),
                    Work::Attention,
                    work,
                    began,
                )?;
                let found = self.preemption.check_if_due();
                let place = self.place_of(index, Role::Output);
                self.preempt(found, place)?;
            }
        }
        let wants = [(Role::Output, Slot::Normed, width)];
        self.products(index, Slot::Mixed, &wants)?;
        self.residual = Some(self.residual(index, Vector::OutputBias, Vector::MixerPostNorm));
        Ok(())
    }

    /// Number of rows from `first` on of a chunk that can attend together in a layer: limited by the window, whose
    /// blocks are reused.
    fn rows_together(&self, index: usize, first: usize) -> usize {
        let run = self.batch.run(first);
        let spec = &self.model.spec;
        let Some(window) = spec.layer(index).and_then(|layer| spec.window(layer)) else {
            return run;
        };
        let position = self.model.sequence.position as usize + first;
        // Across a gap, each row's window covers a different number of tokens.
        if self.model.sequence.dropped.window(position, window) == window {
            run.min(WINDOW_ROWS)
        } else {
            1
        }
    }

    /// Computes attention from row `first` of the chunk on, for at most `most` rows; returns their number. Earlier rows
    /// are complete.
    fn attend(&mut self, index: usize, first: usize, most: usize) -> Result<usize, Failure> {
        let layer = self.model.spec.layer(index).ok_or(Failure::NoMatrix)?;
        let (local, borrows) = (layer.local, layer.borrows);
        let is_draft = index == self.model.spec.layers.len();
        let window = self.model.spec.window(layer);
        let alike = |other: &&LayerSpec| {
            other.kind == LayerKind::Attention
                && !other.borrows
                && self.model.spec.window(other).is_some() == window.is_some()
        };
        let before = self.model.spec.layers.iter().take(index);
        let number = before.filter(alike).count() - usize::from(borrows);
        // A windowed layer has one working area: the lane's blocks are copied to it.
        let other = self.batch.other(first).filter(|_| window.is_some());
        let moved = match other.zip(self.lane(first)) {
            Some((other, (_, position))) => {
                self.move_window((other.lane, number), (position, false))?;
                Some((other.lane, position))
            }
            None => None,
        };
        let (whole, work) = (self.model.spec.attention, &self.model.workspace);
        let spec = whole.of_layers(local);
        let (query, kv, projected) = (spec.query(), spec.kv(), spec.projected());
        let vector = |vector| {
            self.model
                .weights
                .vector(&self.model.layout.fixed, index, vector)
        };
        // Angles of local layers follow those of all rows.
        let angles = if local { self.rows * whole.rotary } else { 0 };
        let sequence = &self.model.sequence;
        let (mut sequences, mut end) = (Vec::new(), first);
        while end < self.rows.min(first.saturating_add(most)) {
            let rows = self.rows_together(index, end).min(first + most - end);
            let (cells, position) = match self.batch.other(end) {
                None if is_draft => {
                    let draft = self.model.draft.as_ref().ok_or(Failure::NoMatrix)?;
                    (draft.cells(), draft.tokens as usize + end)
                }
                None => {
                    let own = end - self.batch.own().start;
                    let position = sequence.position as usize + own;
                    (sequence.cache.cells(window.is_some()), position)
                }
                Some(_) => {
                    let (parked, position) = self.lane(end).ok_or(Failure::Stopped)?;
                    let cells = match moved {
                        Some(_) => sequence.cache.cells_aside().ok_or(Failure::NoMatrix)?,
                        None => sequence.cache.cells_of(parked),
                    };
                    (cells, position)
                }
            };
            sequences.push(Attended {
                rows,
                position,
                cells,
                flag: self.batch.result_of(end) * logits_stride(&self.model.spec),
            });
            end += rows;
            if window.is_some() {
                break;
            }
        }
        let position = sequences.first().map_or(0, |first| first.position);
        let of_rows = |width: usize| first * width..end * width;
        self.model.backend.queue(Operation::Attend(Attend {
            spec,
            is_causal: true,
            window: window.map(|window| self.model.sequence.dropped.window(position, window)),
            gap: self.model.sequence.dropped.gap(local),
            // A query bias would have to be applied first; no family has both a bias and a temperature.
            temperature: self.model.spec.temperature,
            epsilon: self.model.spec.epsilon,
            query_bias: vector(Vector::QueryBias),
            key_bias: vector(Vector::KeyBias),
            value_bias: vector(Vector::ValueBias),
            query_norm: vector(Vector::QueryNorm),
            key_norm: vector(Vector::KeyNorm),
            sinks: vector(Vector::Sinks),
            rotary: work
                .rotary
                .view(angles + first * spec.rotary..angles + end * spec.rotary),
            query: work.wide.view(of_rows(projected)),
            stored: (!borrows)
                .then(|| [&work.second, &work.third].map(|buffer| buffer.view(of_rows(kv)))),
            sequences,
            layer: if is_draft || moved.is_some() {
                0
            } else {
                number
            },
            out: work.mixed.view(of_rows(query)),
            scratch: work.scratch.from(0),
            broken: self.model.logits.from(self.model.spec.vocabulary),
            prepare: self.prepare(index, &[Role::Output], first),
        }))?;
        if let Some((lane, position)) = moved.filter(|_| !borrows) {
            self.move_window((lane, number), (position, true))?;
        }
        Ok(end - first)
    }

    /// Copies the blocks in the window of a lane's token to the working area; with `is_written`, copies the token's
    /// block back.
    fn move_window(
        &mut self,
        (lane, number): (Lane, usize),
        (position, is_written): (usize, bool),
    ) -> Result<(), Failure> {
        let position = u32::try_from(position).unwrap_or(u32::MAX);
        let sequence = &self.model.sequence;
        let parts = sequence.aside_window(lane, number, (position, is_written));
        for (copy, memory) in parts.ok_or(Failure::NoMatrix)? {
            let (from, to) = if is_written {
                (memory, copy)
            } else {
                (copy, memory)
            };
            self.model.backend.queue(Operation::Move { from, to })?;
        }
        Ok(())
    }

    pub(super) fn recurrent(
        &mut self,
        index: usize,
        recurrent: &RecurrentSpec,
    ) -> Result<(), Failure> {
        let (inputs, values, heads) = (
            recurrent.inputs(),
            recurrent.values(),
            recurrent.value_heads(),
        );
        match recurrent {
            RecurrentSpec::Convolution(_) => {
                self.mixer_inputs(index, &[(Role::Gates, Slot::Wide, inputs)])?;
            }
            RecurrentSpec::Delta(_) => {
                let wants = [
                    (Role::QueryKeyValue, Slot::Wide, inputs),
                    (Role::Gate, Slot::Second, values),
                    (Role::Alpha, Slot::Third, heads),
                    (Role::Beta, Slot::Fourth, heads),
                ];
                self.mixer_inputs(index, &wants)?;
            }
            RecurrentSpec::Scan(_) => {
                let wants = [
                    (Role::Gate, Slot::Second, values),
                    (Role::QueryKeyValue, Slot::Wide, inputs),
                    (Role::Alpha, Slot::Third, heads),
                ];
                self.mixer_inputs(index, &wants)?;
            }
        }
        let work_of_row = recurrent.work() as u64;
        let mut first = 0;
        while first < self.rows {
            let (lane, together) = self.batch.conversation(first);
            let is_trial = self.is_trial && lane.is_none();
            let rows = match is_trial {
                // The state stays, so that all rows begin with it.
                true => together,
                false => self.preemption.estimators.delta.rows(work_of_row),
            };
            let rows = rows.min(together).min(self.rows - first);
            let began = Instant::now();
            let some = first..first + rows;
            let state = match lane {
                Some(lane) => self.state_of_lane(index, lane, recurrent)?,
                None => self.state(index)?,
            };
            let is_moved = matches!(state.0, Matrices::Whole(_));
            if is_trial {
                trial::keep_inputs(self.model, index, &some)?;
            }
            self.recur(index, recurrent, state, (some, is_trial))?;
            if let Some(lane) = lane {
                self.move_state(index, lane, is_moved, |copy, area| (area, copy))?;
            }
            first += rows;
            if self.rows > 1 {
                let work = work_of_row * rows as u64;
                self.preemption
                    .queued(self.model.backend.as_mut(), Work::Delta, work, began)?;
                let found = self.preemption.check_if_due();
                let place = self.place_of(index, Role::Output);
                self.preempt(found, place)?;
            }
        }
        let wants = [(Role::Output, Slot::Normed, self.model.spec.width)];
        self.products(index, Slot::Wide, &wants)?;
        self.residual = Some(self.residual(index, Vector::OutputBias, Vector::MixerPostNorm));
        Ok(())
    }

    /// Queues the norm before the mixer and the products with these matrices.
    fn mixer_inputs(&mut self, index: usize, wants: &[(Role, Slot, usize)]) -> Result<(), Failure> {
        let vectors = [Vector::MixerNorm, Vector::MixerNormBias];
        let roles: Vec<Role> = wants.iter().map(|(role, ..)| *role).collect();
        self.norm(index, Some(vectors), &roles)?;
        self.products(index, Slot::Normed, wants)
    }

    /// Returns the state matrices and the convolution history of a layer of the sequence.
    fn state(&self, index: usize) -> Result<(Matrices, View), Failure> {
        let (matrices, history) = self
            .model
            .sequence
            .state
            .layer(index)
            .ok_or(Failure::NoMatrix)?;
        Ok((Matrices::Whole(matrices), history))
    }

    /// Returns the state matrices and the convolution history of a layer of a lane: matrices where they are stored if the
    /// backend can compute on them, all else in the working area.
    fn state_of_lane(
        &mut self,
        index: usize,
        lane: Lane,
        recurrent: &RecurrentSpec,
    ) -> Result<(Matrices, View), Failure> {
        let sequence = &self.model.sequence;
        let parts = sequence.matrices_of_lane(lane, index);
        let parts = parts.ok_or(Failure::NoMatrix)?;
        let (matrices, history) = sequence.state.aside().ok_or(Failure::NoMatrix)?;
        let may_be = Matrices::may_be(&parts, recurrent.state_columns());
        let is_moved = !(self.model.backend.takes_parts() && may_be);
        self.move_state(index, lane, is_moved, |copy, area| (copy, area))?;
        let matrices = if is_moved {
            Matrices::Whole(matrices)
        } else {
            Matrices::Parts(parts)
        };
        Ok((matrices, history))
    }

    /// Copies a layer of a lane's state, or its convolution history, between its copy and the working area.
    fn move_state(
        &mut self,
        index: usize,
        lane: Lane,
        is_whole: bool,
        direction: impl Fn(Span, Span) -> (Span, Span),
    ) -> Result<(), Failure> {
        let parts = self.model.sequence.aside_layer(lane, index, is_whole);
        for (copy, area) in parts.ok_or(Failure::NoMatrix)? {
            let (from, to) = direction(copy, area);
            self.model.backend.queue(Operation::Move { from, to })?;
        }
        Ok(())
    }

    /// Queues the recurrence of a layer for `rows` of a chunk; earlier rows are complete.
    fn recur(
        &mut self,
        index: usize,
        recurrent: &RecurrentSpec,
        state: (Matrices, View),
        (rows, is_trial): (Range<usize>, bool),
    ) -> Result<(), Failure> {
        let (work, heads) = (&self.model.workspace, recurrent.value_heads());
        let of_heads = rows.start * heads..rows.end * heads;
        let recurrence = Recurrence {
            index,
            inputs: [
                work.wide.view(0..self.rows * recurrent.inputs()),
                work.third.view(of_heads.clone()),
                work.fourth.view(of_heads),
            ],
            is_trial,
            prepare: self.prepare(index, &[Role::Output], rows.start),
            rows,
        };
        let operation = recurrence.operation(self.model, recurrent, state);
        let operation = operation.ok_or(Failure::NoMatrix)?;
        Ok(self.model.backend.queue(operation)?)
    }

    pub(super) fn feed_forward(&mut self, index: usize) -> Result<(), Failure> {
        self.norm(index, Some(FFN_NORM), &[Role::FfnGate, Role::FfnUp])?;
        self.gated(index, Slot::Normed)?;
        self.residual = Some(self.ffn_residual(index));
        Ok(())
    }

    /// Returns how the output of the feed-forward part, or of experts, is added to the residual stream.
    pub(super) fn ffn_residual(&self, index: usize) -> Residual {
        let (bias, norm) = (Vector::FfnDownBias, Vector::FfnPostNorm);
        match self.model.spec.layer_inputs.is_some() {
            true => self.residual(index, bias, norm),
            false => self.last_residual(index, bias, norm),
        }
    }

    /// Computes the feed-forward part of the normed rows.
    pub(super) fn gated(&mut self, index: usize, out: Slot) -> Result<(), Failure> {
        let layer = self.model.spec.layer(index).ok_or(Failure::NoMatrix)?;
        let (_, up) = layer.matrix(Role::FfnUp).ok_or(Failure::NoMatrix)?;
        let (inner, width) = (up.rows, self.model.spec.width);
        let has_gate = layer.matrix(Role::FfnGate).is_some();
        let wants = match has_gate {
            true => vec![
                (Role::FfnGate, Slot::Wide, inner),
                (Role::FfnUp, Slot::Second, inner),
            ],
            false => vec![(Role::FfnUp, Slot::Wide, inner)],
        };
        let vector = |vector| {
            self.model
                .weights
                .vector(&self.model.layout.fixed, index, vector)
        };
        let activate = Activate {
            activation: self.model.spec.activation,
            gate: self.model.workspace.wide.view(0..self.rows * inner),
            up: has_gate.then(|| self.model.workspace.second.view(0..self.rows * inner)),
            gate_bias: vector(match has_gate {
                true => Vector::FfnGateBias,
                false => Vector::FfnUpBias,
            }),
            up_bias: vector(Vector::FfnUpBias).filter(|_| has_gate),
            width: inner,
            prepare: self.prepare(index, &[Role::FfnDown], 0),
        };
        self.products_then(index, Slot::Normed, &wants, Some(activate))?;
        self.products(index, Slot::Wide, &[(Role::FfnDown, out, width)])
    }

    /// Returns the place at which a layer's matrix for `role` begins.
    fn place_of(&self, index: usize, role: Role) -> Place {
        let layer = self.model.spec.layer(index);
        let number = layer
            .and_then(|layer| layer.matrix(role))
            .map_or(0, |(number, _)| number);
        let part = self
            .model
            .layout
            .layers
            .get(index)
            .and_then(|parts| parts.get(number));
        Place {
            part: part.copied().unwrap_or_default(),
            piece: 0,
        }
    }

    /// Computes the logits of `rows` of the chunk, written from the first result on.
    pub(super) fn head(&mut self, rows: Range<usize>) -> Result<(), ForwardError> {
        let (width, vocabulary) = (self.model.spec.width, self.model.spec.vocabulary);
        let stride = logits_stride(&self.model.spec);
        let fixed = &self.model.layout.fixed;
        let of_norm = |at: usize| self.model.weights.fixed().view(at..at + width);
        let floats = rows.start * width..rows.end * width;
        let normed = self.model.workspace.normed.view(floats.clone());
        self.model.backend.queue(Operation::Norm(Norm {
            stream: self.model.workspace.stream.view(floats),
            normed: normed.clone(),
            residual: self.residual.clone(),
            width,
            weight: Some(of_norm(fixed.output_norm)),
            bias: fixed.output_norm_bias.map(of_norm),
            epsilon: self.model.spec.epsilon,
            prepare: Prepare {
                copies: self.model.workspace.copies(),
                types: Types::from_iter([self.model.spec.head.dtype]),
                first: 0,
            },
        }))?;
        let mut input = Input {
            floats: normed,
            copies: self.model.workspace.copies(),
            rows: rows.len(),
            activate: None,
        };
        let logits = self.model.logits.view(0..rows.len() * stride);
        let mut at = Place {
            part: self.model.layout.head.start,
            piece: 0,
        };
        loop {
            let parts = (&self.model.spec, &self.model.layout);
            let backend = self.model.backend.as_mut();
            let progress = self.model.weights.head(
                backend,
                parts,
                logits.clone(),
                &mut input,
                at,
                &mut self.preemption,
            );
            let preempted = match progress {
                Ok(Progress::Done) => break,
                Ok(Progress::Paused(place)) => {
                    at = place;
                    self.preempt(Preempt::Pause, at)
                }
                Err(failure) => Err(failure),
            };
            preempted.map_err(|failure| self.failed(failure, self.model.spec.layers.len()))?;
        }
        let all = 0..vocabulary;
        let bias = self.model.layout.fixed.output_bias;
        for row in 0..rows.len() {
            let first = row * stride;
            self.model.backend.queue(Operation::Finish(Finish {
                logits: self.model.logits.view(first..first + vocabulary),
                said: self
                    .model
                    .spec
                    .said
                    .as_deref()
                    .unwrap_or(std::slice::from_ref(&all))
                    .into(),
                bias: bias.map(|at| self.model.weights.fixed().view(at..at + vocabulary)),
                scale: self.model.spec.logit_scale,
                cap: self.model.spec.logit_cap,
                found: self
                    .model
                    .logits
                    .view(first + vocabulary + 1..first + stride),
            }))?;
        }
        Ok(())
    }
}

/// The norm before the feed-forward part.
pub(super) const FFN_NORM: [Vector; 2] = [Vector::FfnNorm, Vector::FfnNormBias];
/// Minimum of rows that attend together: with fewer, widening a long context costs as much as attention.
const ATTENTION_ROWS_MIN: usize = 4;
