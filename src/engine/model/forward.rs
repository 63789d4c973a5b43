//! One forward pass: the layers of all families from one table.

use std::{ops::Range, time::Instant};

use super::{
    Logits, Model, Scores,
    products::{Failure, Input, Progress, Want},
    weights::Place,
    workspace::Slot,
};
use crate::{
    engine::{
        backend::{
            Activate, Attend, Backend, Buffer, Delta, Finish, Norm, Operation, Prepare, Residual, Rotate, Types, View,
        },
        error::ForwardError,
        preemption::{Checkpoint, Preempt, Preemption, Work},
        shape::FLAGS,
        spec::{RecurrentSpec, Role, Vector},
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
    /// What the last part has made is to be added to the residual stream, by this.
    residual: Option<Residual>,
}

impl Model {
    /// Appends `tokens` to the sequence, in chunks of the plan's `prefill_chunk`, and returns the logits of the last one.
    ///
    /// # Errors
    /// See [`ForwardError`]; after most of them the sequence is lost.
    pub fn forward(&mut self, tokens: &[u32], checkpoint: &mut dyn Checkpoint) -> Result<Logits<'_>, ForwardError> {
        let first = self.pass(tokens, checkpoint, None)?;
        let row = self.position.saturating_sub(first).saturating_sub(1);
        let read = result(self.backend.as_mut(), &self.logits, self.spec.vocabulary, (first, row));
        match read {
            Ok(logits) => Ok(Logits(logits)),
            Err(error) => {
                self.lost = true;
                Err(error)
            }
        }
    }

    /// As [`Self::forward`], returning the first of the most likely tokens alone where a device finds it: then nothing else is read.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_greedy(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
    ) -> Result<Scores<'_>, ForwardError> {
        let first = self.pass(tokens, checkpoint, None)?;
        let row = self.position.saturating_sub(first).saturating_sub(1);
        let (vocabulary, backend) = (self.spec.vocabulary, self.backend.as_mut());
        match greatest(backend, &self.logits, vocabulary, (first, row)) {
            Ok(Some(token)) => Ok(Scores::Greatest(token)),
            Ok(None) => {
                let logits = result(backend, &self.logits, vocabulary, (first, row));
                logits.map(|logits| Scores::All(Logits(logits)))
            }
            Err(error) => {
                self.lost = true;
                Err(error)
            }
        }
    }

    /// As [`Self::forward`], handing the logits of every token to `each` with its index in `tokens`.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_all(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), ForwardError> {
        self.pass(tokens, checkpoint, Some(each)).map(drop)
    }

    /// Appends `tokens`; the logits of the last one are to be read, unless each was. Says where the last chunk begins.
    fn pass(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
        mut each: Each<'_>,
    ) -> Result<u32, ForwardError> {
        if let Some(error) = &self.broken {
            return Err(error.clone().into());
        }
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
        let first = result?;
        self.mark_wanted = 0;
        Ok(first)
    }

    /// Between two chunks, and behind the last one, however that ended.
    fn end_chunk(&mut self, preemption: &mut Preemption<'_>) {
        if let Some(report) = self.rechunk_if_wanted() {
            preemption.rechunked(report);
        }
    }

    /// The chunks of a pass, one after the other. Says where the last one begins.
    fn chunks(
        &mut self,
        tokens: &[u32],
        mut needed: u32,
        preemption: &mut Preemption<'_>,
        each: &mut Each<'_>,
    ) -> Result<u32, ForwardError> {
        let (mut done, mut first) = (0, self.position);
        while done < tokens.len() {
            first = self.position;
            self.end_chunk(preemption);
            let end = tokens.len().min(done + self.workspace.chunk());
            let end = self.until_mark().map_or(end, |left| end.min(done + left));
            let chunk = tokens.get(done..end).unwrap_or_default();
            let last = end == tokens.len();
            self.weights.expect_head(last || each.is_some());
            let mut run = Run { rows: chunk.len(), needed, preemption: &mut *preemption, residual: None };
            let result = self.chunk(chunk, &mut run).and_then(|()| self.finish_chunk(done, last, each, &mut run));
            needed = run.needed;
            if let Err(error) = result {
                self.lost = true;
                return Err(error);
            }
            done = end;
            self.mark_if_wanted();
        }
        Ok(first)
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
        let needed =
            u32::try_from(tokens.len()).ok().and_then(|count| self.position.checked_add(count)).unwrap_or(u32::MAX);
        if needed > self.spec.context_max {
            return Err(ForwardError::ContextFull { needed, limit: self.spec.context_max });
        }
        let capacity = self.cache.capacity();
        if needed > capacity.get() {
            return Err(ForwardError::KvFull { capacity, needed });
        }
        Ok(needed)
    }

    /// All layers for one chunk.
    fn chunk(&mut self, tokens: &[u32], run: &mut Run<'_, '_>) -> Result<(), ForwardError> {
        let floats = self.flags();
        self.backend.queue(Operation::Fill { floats, value: 0.0 })?;
        self.embed(tokens, run)?;
        self.rotate(tokens.len())?;
        for layer in 0..self.spec.layers.len() {
            if run.rows == 1 {
                run.preemption.layer_queued(self.backend.as_mut())?;
            }
            let found = run.preemption.check();
            let first = self.layout.layers.get(layer).and_then(|parts| parts.iter().min());
            let place = Place { part: first.copied().unwrap_or(self.layout.head.start), piece: 0 };
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
                for (row, at) in (0..run.rows).zip(0u32..) {
                    self.head(row, run)?;
                    let place = (self.position, at);
                    let logits = result(self.backend.as_mut(), &self.logits, self.spec.vocabulary, place)?;
                    each(done + row, logits);
                }
            }
            // They are waited for where they are read.
            None if last => self.head(run.rows - 1, run)?,
            None => {
                let flags = self.spec.vocabulary..self.spec.vocabulary + FLAGS;
                is_finite(self.backend.read(&self.logits, flags)?, (self.position, 0))?;
            }
        }
        self.position += u32::try_from(run.rows).unwrap_or(u32::MAX);
        Ok(())
    }

    /// What operations set where a result is not finite, behind the logits: of keys and values, and of the logits.
    fn flags(&self) -> View {
        self.logits.view(self.spec.vocabulary..self.spec.vocabulary + FLAGS)
    }

    /// Cosines and sines for the rows of a chunk; behind them those of local layers, where there are any.
    fn rotate(&mut self, rows: usize) -> Result<(), ForwardError> {
        let attention = &self.spec.attention;
        let width = attention.rotary.max(2);
        // Tokens keep the positions at which they were read, whatever is dropped before them.
        let position = self.position as usize + self.dropped.tokens() as usize;
        let local = attention.local.as_ref().map(|local| (local.rotation, None));
        let all = [Some((attention.rotation, self.weights.rope_factors())), local];
        for (number, (rotation, factors)) in all.into_iter().flatten().enumerate() {
            self.backend.queue(Operation::Rotate(Rotate {
                rotation,
                factors: factors.map(Into::into),
                position,
                width,
                to: self.workspace.rotary.view(number * rows * width..(number + 1) * rows * width),
            }))?;
        }
        Ok(())
    }

    /// One layer for the rows of a chunk.
    fn layer(&mut self, index: usize, run: &mut Run<'_, '_>) -> Result<(), Failure> {
        let kind = self.spec.layers.get(index).ok_or(Failure::NoMatrix)?.kind;
        match (kind, self.spec.recurrent) {
            (LayerKind::Recurrent, Some(recurrent)) => self.recurrent(index, &recurrent, run)?,
            _ => self.attention(index, run)?,
        }
        self.feed_forward(index, run)
    }

    /// The matrices of a layer that have these roles, with where their products go: `rows` rows of so many elements.
    fn wants(&self, index: usize, wants: &[(Role, Slot, usize)], rows: usize) -> Result<Vec<Want>, Failure> {
        let layer = self.spec.layers.get(index).ok_or(Failure::NoMatrix)?;
        let want = |&(role, slot, stride): &(Role, Slot, usize)| {
            let (number, matrix) = layer.matrix(role).ok_or(Failure::NoMatrix)?;
            Ok(Want {
                number,
                dtype: matrix.tensor.dtype,
                columns: matrix.columns,
                stride,
                out: self.workspace.slot(slot).view(0..rows * stride),
            })
        };
        wants.iter().map(want).collect()
    }

    /// Products of the rows in `source`, of which there are copies, with some matrices of a layer, which are in one part.
    fn products(
        &mut self,
        index: usize,
        source: Slot,
        wants: &[(Role, Slot, usize)],
        run: &mut Run<'_, '_>,
    ) -> Result<(), Failure> {
        self.products_then(index, source, wants, None, run)
    }

    /// The same, and what becomes of them.
    fn products_then(
        &mut self,
        index: usize,
        source: Slot,
        wants: &[(Role, Slot, usize)],
        activate: Option<Activate>,
        run: &mut Run<'_, '_>,
    ) -> Result<(), Failure> {
        let wants = self.wants(index, wants, run.rows)?;
        let first = wants.first().ok_or(Failure::NoMatrix)?;
        let part = self.layout.layers.get(index).and_then(|parts| parts.get(first.number));
        let mut at = Place { part: *part.ok_or(Failure::NoMatrix)?, piece: 0 };
        let mut input = Input {
            floats: self.workspace.slot(source).view(0..run.rows * first.columns),
            copies: self.workspace.copies(),
            rows: run.rows,
            activate,
        };
        if run.rows > 1 {
            let found = run.preemption.check_if_due();
            self.preempt(found, at, run)?;
        }
        loop {
            let backend = self.backend.as_mut();
            match self.weights.multiply(backend, at, &self.layout, &wants, &mut input, run.preemption)? {
                Progress::Done => break,
                Progress::Paused(place) => {
                    at = place;
                    self.preempt(Preempt::Pause, at, run)?;
                }
            }
        }
        // Not together with them, as they were made in pieces.
        let left = input.activate.take();
        Ok(left.map_or(Ok(()), |activate| self.backend.queue(Operation::Activate(activate)))?)
    }

    /// Copies of a result for products with the matrices of a layer that have these roles.
    fn prepare(&self, index: usize, roles: &[Role], first: usize) -> Prepare {
        let layer = self.spec.layers.get(index);
        let matrices = roles.iter().filter_map(|role| layer?.matrix(*role));
        Prepare {
            copies: self.workspace.copies(),
            types: matrices.map(|(_, matrix)| matrix.tensor.dtype).collect(),
            first,
        }
    }

    /// What the last part has made is added to the residual stream, which is normalised for products with these roles.
    fn norm(&mut self, index: usize, vector: Vector, roles: &[Role], run: &mut Run<'_, '_>) -> Result<(), Failure> {
        let floats = 0..run.rows * self.spec.width;
        let weight = self.weights.vector(&self.layout.fixed, index, vector);
        let norm = Norm {
            stream: self.workspace.stream.view(floats.clone()),
            normed: self.workspace.normed.view(floats),
            residual: run.residual.take(),
            weight: weight.ok_or(Failure::NoMatrix)?,
            epsilon: self.spec.epsilon,
            prepare: self.prepare(index, roles, 0),
        };
        Ok(self.backend.queue(Operation::Norm(norm))?)
    }

    /// How what a part has made is added to the residual stream.
    fn residual(&self, index: usize, bias: Vector, norm: Vector) -> Residual {
        let vector = |vector| self.weights.vector(&self.layout.fixed, index, vector);
        Residual { bias: vector(bias), norm: vector(norm), scale: self.spec.residual_scale }
    }

    fn attention(&mut self, index: usize, run: &mut Run<'_, '_>) -> Result<(), Failure> {
        let attention = &self.spec.attention;
        let query = attention.heads * attention.head_dim;
        let kv = attention.kv_heads * attention.head_dim;
        let projected = if attention.gated { 2 * query } else { query };
        let width = self.spec.width;
        self.norm(index, Vector::MixerNorm, &[Role::Query, Role::Key, Role::Value], run)?;
        let wants =
            [(Role::Query, Slot::Wide, projected), (Role::Key, Slot::Second, kv), (Role::Value, Slot::Third, kv)];
        self.products(index, Slot::Normed, &wants, run)?;
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
                run.preemption.queued(self.backend.as_mut(), Work::Attention, work, began)?;
                let found = run.preemption.check_if_due();
                let place = self.place_of(index, Role::Output);
                self.preempt(found, place, run)?;
            }
        }
        let wants = [(Role::Output, Slot::Normed, width)];
        self.products(index, Slot::Mixed, &wants, run)?;
        run.residual = Some(self.residual(index, Vector::OutputBias, Vector::MixerPostNorm));
        Ok(())
    }

    /// Attention of some rows of a chunk of `all`; those before them have been there.
    fn attend(&mut self, index: usize, all: usize, rows: Range<usize>) -> Result<(), Failure> {
        let layer = self.spec.layers.get(index).ok_or(Failure::NoMatrix)?;
        let (spec, work) = (self.spec.attention, &self.workspace);
        let query = spec.heads * spec.head_dim;
        let kv = spec.kv_heads * spec.head_dim;
        let projected = if spec.gated { 2 * query } else { query };
        let vector = |vector| self.weights.vector(&self.layout.fixed, index, vector);
        let number = self.spec.layers.iter().take(index).filter(|layer| layer.kind == LayerKind::Attention).count();
        // Behind the angles of all rows come those of local layers.
        let (angles, window) = match spec.local.filter(|_| layer.local) {
            Some(local) => (all + rows.start, local.window),
            None => (rows.start, None),
        };
        let of_rows = |width: usize| rows.start * width..rows.end * width;
        self.backend.queue(Operation::Attend(Attend {
            spec,
            window,
            gap: self.dropped.gap(layer.local),
            // A bias of queries would have to come before it; the families that have one let no queries grow.
            temperature: self.spec.temperature,
            epsilon: self.spec.epsilon,
            query_bias: vector(Vector::QueryBias),
            key_bias: vector(Vector::KeyBias),
            value_bias: vector(Vector::ValueBias),
            query_norm: vector(Vector::QueryNorm),
            key_norm: vector(Vector::KeyNorm),
            rotary: work.rotary.view(angles * spec.rotary..(angles + rows.len()) * spec.rotary),
            query: work.wide.view(of_rows(projected)),
            key: work.second.view(of_rows(kv)),
            value: work.third.view(of_rows(kv)),
            cells: self.cache.cells(),
            layer: number,
            position: self.position as usize + rows.start,
            rows: rows.len(),
            out: work.mixed.view(of_rows(query)),
            scratch: work.scratch.from(0),
            broken: self.logits.view(self.spec.vocabulary..self.spec.vocabulary + 1),
            prepare: self.prepare(index, &[Role::Output], rows.start),
        }))?;
        Ok(())
    }

    fn recurrent(&mut self, index: usize, recurrent: &RecurrentSpec, run: &mut Run<'_, '_>) -> Result<(), Failure> {
        let width = self.spec.width;
        let (channels, values) = (recurrent.channels(), recurrent.values());
        let wants = [
            (Role::QueryKeyValue, Slot::Wide, channels),
            (Role::Gate, Slot::Second, values),
            (Role::Alpha, Slot::Third, recurrent.value_heads),
            (Role::Beta, Slot::Fourth, recurrent.value_heads),
        ];
        self.norm(index, Vector::MixerNorm, &wants.map(|(role, ..)| role), run)?;
        self.products(index, Slot::Normed, &wants, run)?;
        // Each element of a state is decayed, asked, corrected and asked again.
        let work_of_row = (4 * values * recurrent.head_dim) as u64;
        let mut first = 0;
        while first < run.rows {
            let rows = run.preemption.estimators.delta.rows(work_of_row).min(run.rows - first);
            let began = Instant::now();
            self.delta(index, recurrent, run.rows, first..first + rows)?;
            first += rows;
            if run.rows > 1 {
                let work = work_of_row * rows as u64;
                run.preemption.queued(self.backend.as_mut(), Work::Delta, work, began)?;
                let found = run.preemption.check_if_due();
                let place = self.place_of(index, Role::Output);
                self.preempt(found, place, run)?;
            }
        }
        let wants = [(Role::Output, Slot::Normed, width)];
        self.products(index, Slot::Wide, &wants, run)?;
        run.residual = Some(self.residual(index, Vector::OutputBias, Vector::MixerPostNorm));
        Ok(())
    }

    /// The delta rule for some rows of a chunk of `all`; those before them have been there.
    fn delta(&mut self, index: usize, spec: &RecurrentSpec, all: usize, rows: Range<usize>) -> Result<(), Failure> {
        let work = &self.workspace;
        let vector = |vector| {
            let vector = self.weights.vector(&self.layout.fixed, index, vector);
            vector.ok_or(Failure::NoMatrix)
        };
        let of_rows = |width: usize| rows.start * width..rows.end * width;
        let (state, history) = self.state.layer(index).ok_or(Failure::NoMatrix)?;
        self.backend.queue(Operation::Delta(Delta {
            spec: *spec,
            epsilon: self.spec.epsilon,
            mixed: work.wide.view(0..all * spec.channels()),
            gate: work.second.view(of_rows(spec.values())),
            alpha: work.third.view(of_rows(spec.value_heads)),
            beta: work.fourth.view(of_rows(spec.value_heads)),
            scratch: work.mixed.from(0),
            convolution: vector(Vector::Convolution)?,
            decay_bias: vector(Vector::DecayBias)?,
            decay: vector(Vector::Decay)?,
            norm: vector(Vector::StateNorm)?,
            state,
            history,
            prepare: self.prepare(index, &[Role::Output], rows.start),
            rows,
        }))?;
        Ok(())
    }

    fn feed_forward(&mut self, index: usize, run: &mut Run<'_, '_>) -> Result<(), Failure> {
        let (inner, width) = (self.spec.feed_forward, self.spec.width);
        let wants = [(Role::FfnGate, Slot::Wide, inner), (Role::FfnUp, Slot::Second, inner)];
        self.norm(index, Vector::FfnNorm, &wants.map(|(role, ..)| role), run)?;
        let vector = |vector| self.weights.vector(&self.layout.fixed, index, vector);
        let activate = Activate {
            activation: self.spec.activation,
            gate: self.workspace.wide.view(0..run.rows * inner),
            up: self.workspace.second.view(0..run.rows * inner),
            gate_bias: vector(Vector::FfnGateBias),
            up_bias: vector(Vector::FfnUpBias),
            width: inner,
            prepare: self.prepare(index, &[Role::FfnDown], 0),
        };
        self.products_then(index, Slot::Normed, &wants, Some(activate), run)?;
        let wants = [(Role::FfnDown, Slot::Normed, width)];
        self.products(index, Slot::Wide, &wants, run)?;
        run.residual = Some(self.residual(index, Vector::FfnDownBias, Vector::FfnPostNorm));
        Ok(())
    }

    /// Where the matrix of a layer for `role` begins.
    fn place_of(&self, index: usize, role: Role) -> Place {
        let layer = self.spec.layers.get(index);
        let number = layer.and_then(|layer| layer.matrix(role)).map_or(0, |(number, _)| number);
        let part = self.layout.layers.get(index).and_then(|parts| parts.get(number));
        Place { part: part.copied().unwrap_or_default(), piece: 0 }
    }

    /// Logits of row `row` of the chunk, each row once.
    fn head(&mut self, row: usize, run: &mut Run<'_, '_>) -> Result<(), ForwardError> {
        let (width, vocabulary) = (self.spec.width, self.spec.vocabulary);
        let fixed = (self.weights.fixed(), &self.layout.fixed);
        let floats = self.workspace.normed.view(row * width..(row + 1) * width);
        let last = self.spec.layers.len().saturating_sub(1);
        self.backend.queue(Operation::Norm(Norm {
            stream: self.workspace.stream.view(row * width..(row + 1) * width),
            normed: floats.clone(),
            residual: run.residual.as_ref().map(|_| self.residual(last, Vector::FfnDownBias, Vector::FfnPostNorm)),
            weight: fixed.0.view(fixed.1.output_norm..fixed.1.output_norm + width),
            epsilon: self.spec.epsilon,
            prepare: Prepare {
                copies: self.workspace.copies(),
                types: Types::from_iter([self.spec.head.dtype]),
                first: 0,
            },
        }))?;
        let mut input = Input { floats, copies: self.workspace.copies(), rows: 1, activate: None };
        let logits = self.logits.view(0..vocabulary);
        let mut at = Place { part: self.layout.head.start, piece: 0 };
        loop {
            let parts = (&self.spec, &self.layout);
            let backend = self.backend.as_mut();
            let progress = self.weights.head(backend, parts, logits.clone(), &mut input, at, run.preemption);
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
        let all = 0..vocabulary;
        let bias = self.layout.fixed.output_bias;
        self.backend.queue(Operation::Finish(Finish {
            logits,
            said: self.spec.said.as_deref().unwrap_or(std::slice::from_ref(&all)).into(),
            bias: bias.map(|at| self.weights.fixed().view(at..at + vocabulary)),
            scale: self.spec.logit_scale,
            cap: self.spec.logit_cap,
            found: self.logits.view(vocabulary + 1..vocabulary + FLAGS),
        }))?;
        Ok(())
    }
}

/// Waits for what is queued, and returns the logits; `place` is where their chunk begins, and which row of it they belong to.
fn result<'a>(
    backend: &'a mut dyn Backend,
    logits: &'a Buffer,
    vocabulary: usize,
    place: (u32, u32),
) -> Result<&'a [f32], ForwardError> {
    let (logits, flags) = backend.read(logits, 0..vocabulary + FLAGS)?.split_at(vocabulary);
    is_finite(flags, place)?;
    Ok(logits)
}

/// Waits for what is queued, and returns the number of the greatest logit where the backend finds it; `place` as for [`result`].
fn greatest(
    backend: &mut dyn Backend,
    logits: &Buffer,
    vocabulary: usize,
    place: (u32, u32),
) -> Result<Option<u32>, ForwardError> {
    let flags = backend.read(logits, vocabulary..vocabulary + FLAGS)?;
    is_finite(flags, place)?;
    let found = flags.get(1).map(|number| number.to_bits());
    Ok(found.filter(|number| (*number as usize) < vocabulary))
}

/// Refuses results that are not finite, by what operations set of the chunk that begins at `first` and of the logits of its row `row`.
fn is_finite(flags: &[f32], (first, row): (u32, u32)) -> Result<(), ForwardError> {
    let row = match flags {
        [0.0, _, _, 0.0] => return Ok(()),
        [0.0, ..] => row,
        // What the cache keeps of a NaN is a finite number: all that comes behind it is worth nothing.
        _ => 0,
    };
    Err(ForwardError::NotFinite { position: first.saturating_add(row) })
}

/// Rows that attend together at least: with fewer, widening a long context costs as much as attending to it.
const ATTENTION_ROWS_MIN: usize = 4;
