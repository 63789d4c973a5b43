//! One forward pass: the layers of all families from one table.

use candle_core::quantized::GgmlDType;

use super::{
    Checkpoint, Flow, Model,
    weights::{Failure, Input, Want},
};
use crate::{
    engine::{
        backend::{AttentionJob, Backend, DeltaJob, Prepared},
        error::{ForwardError, ReadError},
        reader::Missing,
        spec::{Activation, AttentionSpec, LayerSpec, RecurrentSpec, Role, Vector},
    },
    policy::residency::{EnginePlan, LayerKind},
    units::Bytes,
};

/// Logits of each token, with its index.
type Each<'each> = Option<&'each mut dyn FnMut(usize, &[f32])>;

/// The checkpoint, and what it said while a layer was under way.
struct Gate<'gate> {
    checkpoint: &'gate mut dyn Checkpoint,
    pending: Option<EnginePlan>,
}

impl Gate<'_> {
    fn at_boundary(&mut self) -> Flow {
        match self.pending.take() {
            Some(plan) => Flow::Apply(plan),
            None => self.checkpoint.poll(),
        }
    }

    /// Whether to go on waiting for the disk.
    fn patience(&mut self) -> bool {
        if self.pending.is_some() {
            return true;
        }
        match self.checkpoint.poll() {
            Flow::Continue => true,
            Flow::Apply(plan) => {
                self.pending = Some(plan);
                true
            }
            Flow::Stop => false,
        }
    }
}

impl Model {
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
        let mut needed = self.admit(tokens)?;
        self.cache.touch(needed);
        self.fit_marks();
        let mut gate = Gate {
            checkpoint,
            pending: None,
        };
        let mut done = 0;
        while done < tokens.len() {
            self.rechunk_if_wanted();
            let end = tokens.len().min(done + self.workspace.chunk());
            let end = self.until_mark().map_or(end, |left| end.min(done + left));
            let chunk = tokens.get(done..end).unwrap_or_default();
            let last = end == tokens.len();
            self.weights.expect_head(last || each.is_some());
            let result = self
                .chunk(chunk, &mut needed, &mut gate)
                .and_then(|()| self.finish_chunk(chunk.len(), done, last, &mut each, &mut gate));
            if let Err(error) = result {
                self.lost = true;
                return Err(error);
            }
            done = end;
            self.mark_if_wanted();
        }
        self.mark_wanted = 0;
        self.rechunk_if_wanted();
        if let Some(plan) = gate.pending {
            let result = self.change(&plan, 0, &mut self.position.clone(), true);
            gate.checkpoint.applied(result);
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
    fn chunk(&mut self, tokens: &[u32], needed: &mut u32, gate: &mut Gate<'_>) -> Result<(), ForwardError> {
        let width = self.spec.width;
        for (row, token) in tokens.iter().enumerate() {
            if let Some(out) = self
                .workspace
                .stream
                .floats_mut()
                .get_mut(row * width..(row + 1) * width)
            {
                self.weights
                    .embed(self.backend.as_ref(), &self.spec, &self.layout, *token, out)?;
            }
        }
        if self.spec.embedding_scale != 1.0
            && let Some(stream) = self.workspace.stream.floats_mut().get_mut(..tokens.len() * width)
        {
            for value in stream {
                *value *= self.spec.embedding_scale;
            }
        }
        self.rotate(tokens.len());
        for layer in 0..self.spec.layers.len() {
            match gate.at_boundary() {
                Flow::Continue => {}
                Flow::Apply(plan) => {
                    let result = self.change(&plan, layer, needed, false);
                    gate.checkpoint.applied(result);
                }
                Flow::Stop => return Err(self.cancelled(layer)),
            }
            self.layer(layer, tokens.len(), &mut || gate.patience())
                .map_err(|failure| self.failed(failure, layer))?;
        }
        Ok(())
    }

    /// What it means for the pass that layer `layer`, or the head behind the last one, could not be computed.
    fn failed(&self, failure: Failure, layer: usize) -> ForwardError {
        match failure {
            Failure::Missing(Missing::Stopped, _) => self.cancelled(layer),
            Failure::Missing(Missing::Stalled(waited), what) => ForwardError::Stalled {
                what: what.to_string(),
                waited,
            },
            Failure::Missing(Missing::Failed(error), _) => ForwardError::Read(error),
            Failure::NoMatrix => ForwardError::Read(ReadError {
                path: self.header.path().to_owned(),
                what: format!("layer {layer}"),
                offset: 0,
                bytes: Bytes::ZERO,
                problem: "its reader is not running".to_owned(),
            }),
        }
    }

    /// Logits of the rows that are asked for, and the new position.
    fn finish_chunk(
        &mut self,
        rows: usize,
        done: usize,
        last: bool,
        each: &mut Each<'_>,
        gate: &mut Gate<'_>,
    ) -> Result<(), ForwardError> {
        match each {
            Some(each) => {
                for row in 0..rows {
                    self.head(row, &mut || gate.patience())?;
                    each(done + row, self.logits());
                }
            }
            None if last => self.head(rows - 1, &mut || gate.patience())?,
            None => {}
        }
        self.position += u32::try_from(rows).unwrap_or(u32::MAX);
        Ok(())
    }

    fn cancelled(&self, layer: usize) -> ForwardError {
        ForwardError::Cancelled {
            position: self.position,
            layer: u32::try_from(layer).unwrap_or(u32::MAX),
        }
    }

    /// Cosines and sines for the rows of a chunk; behind them those of local layers, where there are any.
    fn rotate(&mut self, rows: usize) {
        let attention = &self.spec.attention;
        let (width, half) = (attention.rotary.max(2), attention.rotary / 2);
        let factors = self
            .layout
            .fixed
            .rope_factors
            .map(|at| self.weights.fixed_floats(at, half))
            .filter(|factors| factors.len() == half);
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
    fn layer(&mut self, index: usize, rows: usize, patience: &mut dyn FnMut() -> bool) -> Result<(), Failure> {
        let kind = self.spec.layers.get(index).ok_or(Failure::NoMatrix)?.kind;
        self.norm(index, Vector::MixerNorm, rows);
        match (kind, self.spec.recurrent) {
            (LayerKind::Recurrent, Some(recurrent)) => self.recurrent(index, &recurrent, rows, patience)?,
            _ => self.attention(index, rows, patience)?,
        }
        self.post_norm(index, Vector::MixerPostNorm, rows);
        self.add(rows);
        self.norm(index, Vector::FfnNorm, rows);
        self.feed_forward(index, rows, patience)?;
        self.post_norm(index, Vector::FfnPostNorm, rows);
        self.add(rows);
        Ok(())
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

    /// Adds the output of a part to the residual stream.
    fn add(&mut self, rows: usize) {
        let len = rows * self.spec.width;
        let work = &mut self.workspace;
        if let (Some(stream), Some(normed)) = (work.stream.floats_mut().get_mut(..len), work.normed.floats().get(..len))
        {
            self.backend.add(stream, normed);
        }
    }

    fn attention(&mut self, index: usize, rows: usize, patience: &mut dyn FnMut() -> bool) -> Result<(), Failure> {
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
        prepare(
            backend.as_ref(),
            layer,
            &[Role::Query, Role::Key, Role::Value],
            (work.normed.floats(), rows, spec.width),
            &mut work.prepared,
        );
        let mut wants = [
            want(Role::Query, work.wide.floats_mut(), projected),
            want(Role::Key, work.second.floats_mut(), kv),
            want(Role::Value, work.third.floats_mut(), kv),
        ];
        let input = Input {
            floats: work.normed.floats(),
            prepared: &work.prepared,
            rows,
        };
        weights.project(backend.as_ref(), index, (layer, layout), &mut wants, input, patience)?;
        let number = spec
            .layers
            .iter()
            .take(index)
            .filter(|layer| layer.kind == LayerKind::Attention)
            .count();
        let rotary = work.rotary.floats();
        let (rotary, window) = match attention.local.filter(|_| layer.local) {
            Some(local) => (
                rotary.get(rows * attention.rotary..).unwrap_or_default(),
                Some(local.window),
            ),
            None => (rotary, None),
        };
        backend.attend(&mut AttentionJob {
            spec: attention,
            window,
            gap: dropped.gap(window.is_some()),
            epsilon: spec.epsilon,
            query_bias: weights.vector(fixed, index, Vector::QueryBias),
            key_bias: weights.vector(fixed, index, Vector::KeyBias),
            value_bias: weights.vector(fixed, index, Vector::ValueBias),
            query_norm: weights.vector(fixed, index, Vector::QueryNorm),
            key_norm: weights.vector(fixed, index, Vector::KeyNorm),
            rotary,
            query: work.wide.floats_mut(),
            key: work.second.floats_mut(),
            value: work.third.floats(),
            cache,
            layer: number,
            position: self.position as usize,
            rows,
            out: work.mixed.floats_mut(),
        });
        prepare(
            backend.as_ref(),
            layer,
            &[Role::Output],
            (work.mixed.floats(), rows, query),
            &mut work.prepared,
        );
        let input = Input {
            floats: work.mixed.floats(),
            prepared: &work.prepared,
            rows,
        };
        let mut wants = [want(Role::Output, work.normed.floats_mut(), spec.width)];
        weights.project(backend.as_ref(), index, (layer, layout), &mut wants, input, patience)
    }

    fn recurrent(
        &mut self,
        index: usize,
        recurrent: &RecurrentSpec,
        rows: usize,
        patience: &mut dyn FnMut() -> bool,
    ) -> Result<(), Failure> {
        let Self {
            backend,
            spec,
            layout,
            weights,
            state,
            workspace: work,
            ..
        } = self;
        let layer = spec.layers.get(index).ok_or(Failure::NoMatrix)?;
        let fixed = &layout.fixed;
        prepare(
            backend.as_ref(),
            layer,
            &[Role::QueryKeyValue, Role::Gate, Role::Alpha, Role::Beta],
            (work.normed.floats(), rows, spec.width),
            &mut work.prepared,
        );
        let mut wants = [
            want(Role::QueryKeyValue, work.wide.floats_mut(), recurrent.channels()),
            want(Role::Gate, work.second.floats_mut(), recurrent.values()),
            want(Role::Alpha, work.third.floats_mut(), recurrent.value_heads),
            want(Role::Beta, work.fourth.floats_mut(), recurrent.value_heads),
        ];
        let input = Input {
            floats: work.normed.floats(),
            prepared: &work.prepared,
            rows,
        };
        weights.project(backend.as_ref(), index, (layer, layout), &mut wants, input, patience)?;
        let vector = |vector| weights.vector(fixed, index, vector).unwrap_or_default();
        let (matrices, history) = state.layer_mut(index).ok_or(Failure::NoMatrix)?;
        backend.delta(&mut DeltaJob {
            spec: recurrent,
            epsilon: spec.epsilon,
            mixed: work.wide.floats_mut(),
            gate: work.second.floats(),
            alpha: work.third.floats(),
            beta: work.fourth.floats(),
            scratch: work.mixed.floats_mut(),
            convolution: vector(Vector::Convolution),
            decay_bias: vector(Vector::DecayBias),
            decay: vector(Vector::Decay),
            norm: vector(Vector::StateNorm),
            state: matrices,
            history,
            rows,
        });
        prepare(
            backend.as_ref(),
            layer,
            &[Role::Output],
            (work.wide.floats(), rows, recurrent.values()),
            &mut work.prepared,
        );
        let input = Input {
            floats: work.wide.floats(),
            prepared: &work.prepared,
            rows,
        };
        let mut wants = [want(Role::Output, work.normed.floats_mut(), spec.width)];
        weights.project(backend.as_ref(), index, (layer, layout), &mut wants, input, patience)
    }

    fn feed_forward(&mut self, index: usize, rows: usize, patience: &mut dyn FnMut() -> bool) -> Result<(), Failure> {
        let Self {
            backend,
            spec,
            layout,
            weights,
            workspace: work,
            ..
        } = self;
        let layer = spec.layers.get(index).ok_or(Failure::NoMatrix)?;
        let inner = spec.feed_forward;
        prepare(
            backend.as_ref(),
            layer,
            &[Role::FfnGate, Role::FfnUp],
            (work.normed.floats(), rows, spec.width),
            &mut work.prepared,
        );
        let mut wants = [
            want(Role::FfnGate, work.wide.floats_mut(), inner),
            want(Role::FfnUp, work.second.floats_mut(), inner),
        ];
        let input = Input {
            floats: work.normed.floats(),
            prepared: &work.prepared,
            rows,
        };
        weights.project(backend.as_ref(), index, (layer, layout), &mut wants, input, patience)?;
        let len = rows * inner;
        if let (Some(gate), Some(up)) = (work.wide.floats_mut().get_mut(..len), work.second.floats().get(..len)) {
            match spec.activation {
                Activation::Gelu => backend.gelu_mul(gate, up),
                Activation::Silu => backend.silu_mul(gate, up),
            }
        }
        prepare(
            backend.as_ref(),
            layer,
            &[Role::FfnDown],
            (work.wide.floats(), rows, inner),
            &mut work.prepared,
        );
        let input = Input {
            floats: work.wide.floats(),
            prepared: &work.prepared,
            rows,
        };
        let mut wants = [want(Role::FfnDown, work.normed.floats_mut(), spec.width)];
        weights.project(backend.as_ref(), index, (layer, layout), &mut wants, input, patience)
    }

    /// Logits of row `row` of the chunk.
    fn head(&mut self, row: usize, patience: &mut dyn FnMut() -> bool) -> Result<(), ForwardError> {
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
        let input = Input {
            floats: work.normed.floats(),
            prepared: &work.prepared,
            rows: 1,
        };
        let parts = (&self.spec, &self.layout);
        let logits = self.logits.floats_mut();
        let computed = self.weights.head(self.backend.as_ref(), parts, logits, input, patience);
        if let Err(failure) = computed {
            return Err(self.failed(failure, self.spec.layers.len()));
        }
        if let Some(cap) = self.spec.logit_cap {
            for logit in self.logits.floats_mut() {
                *logit = cap * (*logit / cap).tanh();
            }
        }
        if all_finite(self.logits()) {
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

fn want(role: Role, out: &mut [f32], stride: usize) -> Want<'_> {
    Want { role, out, stride }
}

/// Makes the copies of `input` that the matrices for `roles` need.
fn prepare(
    backend: &dyn Backend,
    layer: &LayerSpec,
    roles: &[Role],
    (input, rows, columns): (&[f32], usize, usize),
    prepared: &mut Prepared,
) {
    let types: Vec<GgmlDType> = roles
        .iter()
        .filter_map(|&role| layer.matrix(role))
        .map(|(_, matrix)| matrix.tensor.dtype)
        .collect();
    backend.prepare(input, rows, columns, &types, prepared);
}
