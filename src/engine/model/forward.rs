//! One forward pass: the layers of all families from one table.

use std::{ops::Range, time::Instant};

use super::{
    Logits, Model,
    products::{Failure, Input, Progress},
    weights::Place,
    workspace::Buffer,
};
use crate::{
    engine::{
        backend::{AttentionJob, DeltaJob},
        error::ForwardError,
        preemption::{Checkpoint, Preempt, Preemption},
        spec::{Activation, AttentionSpec, RecurrentSpec, Role, Vector},
    },
    policy::residency::LayerKind,
};

/// Logits of each token, with its index.
type Each<'each> = Option<&'each mut dyn FnMut(usize, &[f32])>;

/// A chunk of a pass under way.
pub(super) struct Run<'run, 'pass> {
    /// Tokens of the chunk.
    pub(super) rows: usize,
    /// Tokens of the sequence once the pass is done.
    pub(super) needed: u32,
    pub(super) preemption: &'run mut Preemption<'pass>,
}

impl Model {
    /// Appends `tokens` to the sequence, in chunks of the plan's `prefill_chunk`, and returns the logits of the last one.
    ///
    /// # Errors
    ///
    /// See [`ForwardError`]; after most of them the sequence is lost.
    pub fn forward(&mut self, tokens: &[u32], checkpoint: &mut dyn Checkpoint) -> Result<Logits<'_>, ForwardError> {
        self.pass(tokens, checkpoint, None)?;
        Ok(Logits(self.logits()))
    }

    /// As [`Self::forward`], handing the logits of every token to `each` with its index in `tokens`.
    ///
    /// # Errors
    ///
    /// As [`Self::forward`].
    pub fn forward_all(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), ForwardError> {
        self.pass(tokens, checkpoint, Some(each))
    }

    /// Appends `tokens`; leaves the logits of the last one in the workspace.
    pub(super) fn pass(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
        mut each: Each<'_>,
    ) -> Result<(), ForwardError> {
        if self.lost {
            return Err(ForwardError::SequenceLost);
        }
        let needed = self.admit(tokens)?;
        self.cache.touch(needed);
        self.fit_marks();
        let mut preemption = Preemption::new(checkpoint, self.estimators);
        let result = self.chunks(tokens, needed, &mut preemption, &mut each);
        self.end_chunk(&mut preemption);
        self.estimators = preemption.estimators;
        result?;
        self.mark_wanted = 0;
        Ok(())
    }

    /// Between two chunks, and behind the last one, however that ended.
    fn end_chunk(&mut self, preemption: &mut Preemption<'_>) {
        if let Some(report) = self.rechunk_if_wanted() {
            preemption.rechunked(report);
        }
    }

    /// The chunks of a pass, one after the other.
    fn chunks(
        &mut self,
        tokens: &[u32],
        mut needed: u32,
        preemption: &mut Preemption<'_>,
        each: &mut Each<'_>,
    ) -> Result<(), ForwardError> {
        let mut done = 0;
        while done < tokens.len() {
            self.end_chunk(preemption);
            let end = tokens.len().min(done + self.workspace.chunk());
            let end = self.until_mark().map_or(end, |left| end.min(done + left));
            let chunk = tokens.get(done..end).unwrap_or_default();
            let last = end == tokens.len();
            self.weights.expect_head(last || each.is_some());
            let mut run = Run {
                rows: chunk.len(),
                needed,
                preemption: &mut *preemption,
            };
            let result = self
                .chunk(chunk, &mut run)
                .and_then(|()| self.finish_chunk(done, last, each, &mut run));
            needed = run.needed;
            if let Err(error) = result {
                self.lost = true;
                return Err(error);
            }
            done = end;
            self.mark_if_wanted();
        }
        Ok(())
    }

    /// Refuses what cannot be computed before anything is; returns the length of the sequence afterwards.
    fn admit(&self, tokens: &[u32]) -> Result<u32, ForwardError> {
        if tokens.is_empty() {
            return Err(ForwardError::NoTokens);
        }
        let vocabulary = self.vocabulary();
        if let Some(&token) = tokens.iter().find(|&&token| token >= vocabulary) {
            return Err(ForwardError::Token { token, vocabulary });
        }
        let needed = u32::try_from(tokens.len())
            .ok()
            .and_then(|count| self.position.checked_add(count))
            .unwrap_or(u32::MAX);
        if needed > self.spec.context_max {
            return Err(ForwardError::ContextFull {
                needed,
                limit: self.spec.context_max,
            });
        }
        let capacity = self.cache.capacity();
        if needed > capacity.get() {
            return Err(ForwardError::KvFull { capacity, needed });
        }
        Ok(needed)
    }

    /// All layers for one chunk.
    fn chunk(&mut self, tokens: &[u32], run: &mut Run<'_, '_>) -> Result<(), ForwardError> {
        let width = self.spec.width;
        self.embed(tokens, run)?;
        if self.spec.embedding_scale != 1.0
            && let Some(stream) = self.workspace.stream.floats_mut().get_mut(..tokens.len() * width)
        {
            for value in stream {
                *value *= self.spec.embedding_scale;
            }
        }
        self.rotate(tokens.len());
        for layer in 0..self.spec.layers.len() {
            let found = run.preemption.check();
            let first = self.layout.layers.get(layer).and_then(|parts| parts.iter().min());
            let place = Place {
                part: first.copied().unwrap_or(self.layout.head.start),
                piece: 0,
            };
            self.preempt(found, place, run)
                .and_then(|()| self.layer(layer, run))
                .map_err(|failure| self.failed(failure, layer))?;
        }
        Ok(())
    }

    /// Logits of the rows that are asked for, and the new position.
    fn finish_chunk(
        &mut self,
        done: usize,
        last: bool,
        each: &mut Each<'_>,
        run: &mut Run<'_, '_>,
    ) -> Result<(), ForwardError> {
        match each {
            Some(each) => {
                for row in 0..run.rows {
                    self.head(row, run)?;
                    each(done + row, self.logits());
                }
            }
            None if last => self.head(run.rows - 1, run)?,
            None => {}
        }
        self.position += u32::try_from(run.rows).unwrap_or(u32::MAX);
        Ok(())
    }

    /// Cosines and sines for the rows of a chunk; behind them those of local layers, where there are any.
    fn rotate(&mut self, rows: usize) {
        let attention = &self.spec.attention;
        let width = attention.rotary.max(2);
        let factors = self.weights.rope_factors(&self.layout.fixed, attention);
        // Tokens keep the positions at which they were read, whatever is dropped before them.
        let position = self.position as usize + self.dropped.tokens() as usize;
        let table = self.workspace.rotary.floats_mut();
        for (row, angles) in table.chunks_exact_mut(width).take(rows).enumerate() {
            attention.rotation.fill(position + row, factors, angles);
        }
        if let Some(local) = &attention.local {
            for (row, angles) in table.chunks_exact_mut(width).skip(rows).take(rows).enumerate() {
                local.rotation.fill(position + row, None, angles);
            }
        }
    }

    /// One layer for the rows of a chunk.
    fn layer(&mut self, index: usize, run: &mut Run<'_, '_>) -> Result<(), Failure> {
        let rows = run.rows;
        let kind = self.spec.layers.get(index).ok_or(Failure::NoMatrix)?.kind;
        self.norm(index, Vector::MixerNorm, rows);
        match (kind, self.spec.recurrent) {
            (LayerKind::Recurrent, Some(recurrent)) => self.recurrent(index, &recurrent, run)?,
            _ => self.attention(index, run)?,
        }
        self.post_norm(index, Vector::MixerPostNorm, rows);
        self.add(rows);
        self.norm(index, Vector::FfnNorm, rows);
        self.feed_forward(index, run)?;
        self.post_norm(index, Vector::FfnPostNorm, rows);
        self.add(rows);
        Ok(())
    }

    /// Products of the rows in `source`, `columns` wide, with some matrices of a layer, which are in one part: which, to
    /// where, and how far the rows are apart there.
    fn products(
        &mut self,
        index: usize,
        (source, columns): (Buffer, usize),
        wants: &[(Role, Buffer, usize)],
        run: &mut Run<'_, '_>,
    ) -> Result<(), Failure> {
        let layer = self.spec.layers.get(index).ok_or(Failure::NoMatrix)?;
        let matrices = wants.iter().filter_map(|(role, _, _)| layer.matrix(*role));
        let (mut types, mut first) = (Vec::with_capacity(wants.len()), None);
        for (number, matrix) in matrices {
            types.push(matrix.tensor.dtype);
            first = first.or(Some(number));
        }
        let parts = self.layout.layers.get(index).ok_or(Failure::NoMatrix)?;
        let mut at = Place {
            part: *first.and_then(|matrix| parts.get(matrix)).ok_or(Failure::NoMatrix)?,
            piece: 0,
        };
        let (input, _, prepared) = self.workspace.lend(source, &[]);
        self.backend.prepare(input, run.rows, columns, &types, prepared);
        if run.rows > 1 {
            let found = run.preemption.check_if_due();
            self.preempt(found, at, run)?;
        }
        loop {
            let (floats, mut wants, prepared) = self.workspace.lend(source, wants);
            let input = Input {
                floats,
                prepared,
                rows: run.rows,
            };
            let layer = self.spec.layers.get(index).ok_or(Failure::NoMatrix)?;
            let parts = (layer, &self.layout);
            let backend = self.backend.as_ref();
            match self
                .weights
                .project(backend, parts, &mut wants, input, at, run.preemption)?
            {
                Progress::Done => return Ok(()),
                Progress::Paused(place) => {
                    at = place;
                    self.preempt(Preempt::Pause, at, run)?;
                }
            }
        }
    }

    /// What a part adds to the residual stream, normalised first where the architecture does so.
    fn post_norm(&mut self, index: usize, vector: Vector, rows: usize) {
        if let Some(weight) = self.weights.vector(&self.layout.fixed, index, vector) {
            let normed = self.workspace.normed.floats_mut();
            self.backend.rms_norm_in_place(normed, weight, self.spec.epsilon, rows);
        }
    }

    /// The residual stream, normalised.
    fn norm(&mut self, index: usize, vector: Vector, rows: usize) {
        let weight = self
            .weights
            .vector(&self.layout.fixed, index, vector)
            .unwrap_or_default();
        let work = &mut self.workspace;
        self.backend.rms_norm(
            work.stream.floats(),
            weight,
            self.spec.epsilon,
            rows,
            work.normed.floats_mut(),
        );
    }

    /// Adds a bias to the first rows of a buffer, where the layer has one.
    fn bias(&mut self, index: usize, vector: Vector, buffer: Buffer, rows: usize) {
        let Some(bias) = self.weights.vector(&self.layout.fixed, index, vector) else {
            return;
        };
        let target = match buffer {
            Buffer::Wide => &mut self.workspace.wide,
            Buffer::Second => &mut self.workspace.second,
            _ => &mut self.workspace.normed,
        };
        for row in target.floats_mut().chunks_exact_mut(bias.len().max(1)).take(rows) {
            self.backend.add(row, bias);
        }
    }

    /// Adds the output of a part to the residual stream.
    fn add(&mut self, rows: usize) {
        let len = rows * self.spec.width;
        let work = &mut self.workspace;
        if self.spec.residual_scale != 1.0
            && let Some(normed) = work.normed.floats_mut().get_mut(..len)
        {
            for value in normed {
                *value *= self.spec.residual_scale;
            }
        }
        if let (Some(stream), Some(normed)) = (work.stream.floats_mut().get_mut(..len), work.normed.floats().get(..len))
        {
            self.backend.add(stream, normed);
        }
    }

    fn attention(&mut self, index: usize, run: &mut Run<'_, '_>) -> Result<(), Failure> {
        let attention = &self.spec.attention;
        let query = attention.heads * attention.head_dim;
        let kv = attention.kv_heads * attention.head_dim;
        let projected = if attention.gated { 2 * query } else { query };
        let width = self.spec.width;
        let wants = [
            (Role::Query, Buffer::Wide, projected),
            (Role::Key, Buffer::Second, kv),
            (Role::Value, Buffer::Third, kv),
        ];
        self.products(index, (Buffer::Normed, width), &wants, run)?;
        // What the cache keeps of a NaN is a finite number.
        for kept in [&self.workspace.second, &self.workspace.third] {
            if !all_finite(kept.floats().get(..run.rows * kv).unwrap_or_default()) {
                return Err(Failure::NotFinite);
            }
        }
        self.warm(run.rows, projected);
        let mut first = 0;
        while first < run.rows {
            let seen = self.position as usize + run.rows;
            let rows = run.preemption.estimators.attention.rows((2 * query * seen) as u64);
            let rows = rows.max(ATTENTION_ROWS_MIN).min(run.rows - first);
            let began = Instant::now();
            self.attend(index, run.rows, first..first + rows)?;
            first += rows;
            if run.rows > 1 {
                let work = (2 * query * seen * rows) as u64;
                run.preemption.estimators.attention.learn(work, began.elapsed());
                let found = run.preemption.check_if_due();
                let place = self.place_of(index, Role::Output);
                self.preempt(found, place, run)?;
            }
        }
        let wants = [(Role::Output, Buffer::Normed, width)];
        self.products(index, (Buffer::Mixed, query), &wants, run)?;
        self.bias(index, Vector::OutputBias, Buffer::Normed, run.rows);
        Ok(())
    }

    /// Lets queries grow with their position, where the model does so. A bias would have to come first; the families that do
    /// so have none of queries.
    fn warm(&mut self, rows: usize, projected: usize) {
        let Some(temperature) = self.spec.temperature else {
            return;
        };
        let queries = self.workspace.wide.floats_mut().chunks_exact_mut(projected.max(1));
        for (position, query) in (self.position as usize..).zip(queries.take(rows)) {
            let factor = temperature.at(position);
            for value in query.iter_mut().filter(|_| factor != 1.0) {
                *value *= factor;
            }
        }
    }

    /// Attention of some rows of a chunk of `all`; those before them have been there.
    fn attend(&mut self, index: usize, all: usize, rows: Range<usize>) -> Result<(), Failure> {
        let Self {
            backend,
            spec,
            layout,
            weights,
            cache,
            workspace: work,
            dropped,
            ..
        } = self;
        let layer = spec.layers.get(index).ok_or(Failure::NoMatrix)?;
        let attention: &AttentionSpec = &spec.attention;
        let query = attention.heads * attention.head_dim;
        let kv = attention.kv_heads * attention.head_dim;
        let projected = if attention.gated { 2 * query } else { query };
        let fixed = &layout.fixed;
        let number = spec
            .layers
            .iter()
            .take(index)
            .filter(|layer| layer.kind == LayerKind::Attention)
            .count();
        // Behind the angles of all rows come those of local layers.
        let (angles, window) = match attention.local.filter(|_| layer.local) {
            Some(local) => (all + rows.start, local.window),
            None => (rows.start, None),
        };
        let rotary = work
            .rotary
            .floats()
            .get(angles * attention.rotary..)
            .unwrap_or_default();
        backend.attend(&mut AttentionJob {
            spec: attention,
            window,
            gap: dropped.gap(layer.local),
            epsilon: spec.epsilon,
            query_bias: weights.vector(fixed, index, Vector::QueryBias),
            key_bias: weights.vector(fixed, index, Vector::KeyBias),
            value_bias: weights.vector(fixed, index, Vector::ValueBias),
            query_norm: weights.vector(fixed, index, Vector::QueryNorm),
            key_norm: weights.vector(fixed, index, Vector::KeyNorm),
            rotary,
            query: from(work.wide.floats_mut(), rows.start * projected),
            key: from(work.second.floats_mut(), rows.start * kv),
            value: behind(work.third.floats(), rows.start * kv),
            cache,
            layer: number,
            position: self.position as usize + rows.start,
            rows: rows.len(),
            out: from(work.mixed.floats_mut(), rows.start * query),
            scratch: work.scratch.floats_mut(),
        });
        Ok(())
    }

    fn recurrent(&mut self, index: usize, recurrent: &RecurrentSpec, run: &mut Run<'_, '_>) -> Result<(), Failure> {
        let width = self.spec.width;
        let (channels, values) = (recurrent.channels(), recurrent.values());
        let wants = [
            (Role::QueryKeyValue, Buffer::Wide, channels),
            (Role::Gate, Buffer::Second, values),
            (Role::Alpha, Buffer::Third, recurrent.value_heads),
            (Role::Beta, Buffer::Fourth, recurrent.value_heads),
        ];
        self.products(index, (Buffer::Normed, width), &wants, run)?;
        // Each element of a state is decayed, asked, corrected and asked again.
        let work_of_row = (4 * values * recurrent.head_dim) as u64;
        let mut first = 0;
        while first < run.rows {
            let rows = run.preemption.estimators.delta.rows(work_of_row).min(run.rows - first);
            let began = Instant::now();
            self.delta(index, recurrent, first..first + rows)?;
            first += rows;
            if run.rows > 1 {
                run.preemption
                    .estimators
                    .delta
                    .learn(work_of_row * rows as u64, began.elapsed());
                let found = run.preemption.check_if_due();
                let place = self.place_of(index, Role::Output);
                self.preempt(found, place, run)?;
            }
        }
        let wants = [(Role::Output, Buffer::Normed, width)];
        self.products(index, (Buffer::Wide, values), &wants, run)
    }

    /// The delta rule for some rows of a chunk; those before them have been there, and what came of them lies in the first
    /// rows of the result.
    fn delta(&mut self, index: usize, recurrent: &RecurrentSpec, rows: Range<usize>) -> Result<(), Failure> {
        let Self {
            backend,
            spec,
            layout,
            weights,
            state,
            workspace: work,
            ..
        } = self;
        let (channels, values, heads) = (recurrent.channels(), recurrent.values(), recurrent.value_heads);
        let fixed = &layout.fixed;
        let vector = |vector| weights.vector(fixed, index, vector).unwrap_or_default();
        let (matrices, history) = state.layer_mut(index).ok_or(Failure::NoMatrix)?;
        backend.delta(&mut DeltaJob {
            spec: recurrent,
            epsilon: spec.epsilon,
            mixed: from(work.wide.floats_mut(), rows.start * channels),
            gate: behind(work.second.floats(), rows.start * values),
            alpha: behind(work.third.floats(), rows.start * heads),
            beta: behind(work.fourth.floats(), rows.start * heads),
            scratch: work.mixed.floats_mut(),
            convolution: vector(Vector::Convolution),
            decay_bias: vector(Vector::DecayBias),
            decay: vector(Vector::Decay),
            norm: vector(Vector::StateNorm),
            state: matrices,
            history,
            rows: rows.len(),
        });
        if rows.start > 0 {
            // The results are narrower than what they come from, so nothing is overwritten that is still to be read.
            let made = rows.start * channels..rows.start * channels + rows.len() * values;
            work.wide.floats_mut().copy_within(made, rows.start * values);
        }
        Ok(())
    }

    fn feed_forward(&mut self, index: usize, run: &mut Run<'_, '_>) -> Result<(), Failure> {
        let (inner, width) = (self.spec.feed_forward, self.spec.width);
        let wants = [
            (Role::FfnGate, Buffer::Wide, inner),
            (Role::FfnUp, Buffer::Second, inner),
        ];
        self.products(index, (Buffer::Normed, width), &wants, run)?;
        self.bias(index, Vector::FfnGateBias, Buffer::Wide, run.rows);
        self.bias(index, Vector::FfnUpBias, Buffer::Second, run.rows);
        let (work, backend) = (&mut self.workspace, self.backend.as_ref());
        let len = run.rows * inner;
        if let (Some(gate), Some(up)) = (work.wide.floats_mut().get_mut(..len), work.second.floats().get(..len)) {
            match self.spec.activation {
                Activation::Gelu => backend.gelu_mul(gate, up),
                Activation::Silu => backend.silu_mul(gate, up),
            }
        }
        let wants = [(Role::FfnDown, Buffer::Normed, width)];
        self.products(index, (Buffer::Wide, inner), &wants, run)?;
        self.bias(index, Vector::FfnDownBias, Buffer::Normed, run.rows);
        Ok(())
    }

    /// Where the matrix of a layer for `role` begins.
    fn place_of(&self, index: usize, role: Role) -> Place {
        let layer = self.spec.layers.get(index);
        let number = layer
            .and_then(|layer| layer.matrix(role))
            .map_or(0, |(number, _)| number);
        let part = self.layout.layers.get(index).and_then(|parts| parts.get(number));
        Place {
            part: part.copied().unwrap_or_default(),
            piece: 0,
        }
    }

    /// Logits of row `row` of the chunk.
    fn head(&mut self, row: usize, run: &mut Run<'_, '_>) -> Result<(), ForwardError> {
        let width = self.spec.width;
        let norm = self.weights.fixed_floats(self.layout.fixed.output_norm, width);
        let work = &mut self.workspace;
        let stream = work.stream.floats().get(row * width..).unwrap_or_default();
        self.backend
            .rms_norm(stream, norm, self.spec.epsilon, 1, work.normed.floats_mut());
        self.backend.prepare(
            work.normed.floats(),
            1,
            width,
            &[self.spec.head.dtype],
            &mut work.prepared,
        );
        let mut at = Place {
            part: self.layout.head.start,
            piece: 0,
        };
        loop {
            let input = Input {
                floats: self.workspace.normed.floats(),
                prepared: &self.workspace.prepared,
                rows: 1,
            };
            let parts = (&self.spec, &self.layout);
            let logits = self.logits.floats_mut();
            let progress = self
                .weights
                .head(self.backend.as_ref(), parts, logits, input, at, run.preemption);
            let preempted = match progress {
                Ok(Progress::Done) => break,
                Ok(Progress::Paused(place)) => {
                    at = place;
                    self.preempt(Preempt::Pause, at, run)
                }
                Err(failure) => Err(failure),
            };
            preempted.map_err(|failure| self.failed(failure, self.spec.layers.len()))?;
        }
        let all = 0..self.spec.vocabulary;
        let said = self.spec.said.as_deref().unwrap_or(std::slice::from_ref(&all));
        let bias = self
            .layout
            .fixed
            .output_bias
            .map(|at| self.weights.fixed_floats(at, self.spec.vocabulary));
        let mut finite = true;
        for rows in said {
            let logits = self.logits.floats_mut().get_mut(rows.clone()).unwrap_or_default();
            if let Some(bias) = bias.and_then(|bias| bias.get(rows.clone())) {
                self.backend.add(logits, bias);
            }
            if self.spec.logit_scale != 1.0 {
                for logit in &mut *logits {
                    *logit /= self.spec.logit_scale;
                }
            }
            if let Some(cap) = self.spec.logit_cap {
                for logit in &mut *logits {
                    *logit = cap * (*logit / cap).tanh();
                }
            }
            finite &= all_finite(logits);
        }
        if finite {
            Ok(())
        } else {
            Err(ForwardError::NotFinite {
                position: self.position.saturating_add(u32::try_from(row).unwrap_or(u32::MAX)),
            })
        }
    }
}

/// Whether none is infinite or not a number; in stretches, so that looking at a large vocabulary takes some µs.
fn all_finite(logits: &[f32]) -> bool {
    let magnitude = |x: &f32| x.to_bits() & 0x7fff_ffff;
    logits
        .chunks(1024)
        .all(|part| part.iter().map(magnitude).fold(0, u32::max) < f32::INFINITY.to_bits())
}

/// What lies in `floats` from `start` on.
fn from(floats: &mut [f32], start: usize) -> &mut [f32] {
    floats.get_mut(start..).unwrap_or_default()
}

/// The same, to read.
fn behind(floats: &[f32], start: usize) -> &[f32] {
    floats.get(start..).unwrap_or_default()
}

/// Rows that attend together at least: with fewer, widening a long context costs as much as attending to it.
const ATTENTION_ROWS_MIN: usize = 4;
