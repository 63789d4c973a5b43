//! One forward pass: admission, chunks, and results.

use std::ops::Range;

use super::{
    batch::{Batch, Span},
    forward::Pass,
    layer_input,
    loaded::Model,
    mixture,
    products::Failure,
    residency,
    weights::Place,
};
use crate::{
    backend::{Backend, Buffer, Operation},
    error::ForwardError,
    preemption::{Checkpoint, Preemption},
    shape::{self, FLAGS},
    spec::Role,
};
use cotenant_policy::residency::LayerKind;

/// Callback for the logits of each token, with its index.
type Each<'each> = Option<&'each mut dyn FnMut(usize, &[f32])>;

/// Appends `tokens`. Without `each`, the logits of the last token are to be read next. Returns the start position of
/// the last chunk.
pub(super) fn run(
    model: &mut Model,
    tokens: &[u32],
    checkpoint: &mut dyn Checkpoint,
    mut each: Each<'_>,
) -> Result<u32, ForwardError> {
    if let Some(error) = &model.sequence.broken {
        return Err(error.clone().into());
    }
    if model.sequence.lost || model.sequence.is_tried() {
        return Err(ForwardError::SequenceLost);
    }
    let needed = admit(model, tokens)?;
    note_states(model, None);
    let is_last = each.is_none();
    if !model.sequence.touch(model.backend.as_mut(), needed) {
        let capacity = model.sequence.cache.capacity();
        return Err(ForwardError::KvFull { capacity, needed });
    }
    let preemption = Preemption::new(checkpoint, model.estimators);
    let needed = needed.max(model.sequence.kept());
    let mut pass = Pass {
        model,
        preemption,
        needed,
        rows: 0,
        batch: Batch::default(),
        is_trial: false,
        residual: None,
    };
    let result = pass.chunks(tokens, &mut each);
    pass.end_chunk();
    let estimators = pass.preemption.estimators;
    model.estimators = estimators;
    let first = result?;
    if is_last {
        // The head has normed the last row.
        let last = model.sequence.position.saturating_sub(first) as usize;
        note_states(model, Some(last.saturating_sub(1)..last));
    }
    model.sequence.marks.forget_wanted();
    Ok(first)
}

/// Appends the tokens of `spans` to their conversations, at most one chunk. The results are to be read next, in the
/// order of the spans.
pub(super) fn run_together(
    model: &mut Model,
    spans: &[Span<'_>],
    checkpoint: &mut dyn Checkpoint,
) -> Result<(), ForwardError> {
    if let Some(error) = &model.sequence.broken {
        return Err(error.clone().into());
    }
    let (batch, tokens) = Batch::of(spans);
    refuse_unknown(model, &tokens)?;
    let results = shape::ANSWERS_MAX;
    if tokens.len() > model.rows_max() || batch.results() > results {
        return Err(ForwardError::BeyondChunk {
            tokens: tokens.len(),
            limit: model.rows_max().min(results),
        });
    }
    let has_own = !batch.own().is_empty();
    note_states(model, None);
    if has_own && (model.sequence.lost || model.sequence.is_tried()) {
        return Err(ForwardError::SequenceLost);
    }
    for span in spans {
        if span.lane.is_none() {
            let needed = admit(model, span.tokens)?;
            if !model.sequence.touch(model.backend.as_mut(), needed) {
                let capacity = model.sequence.cache.capacity();
                return Err(ForwardError::KvFull { capacity, needed });
            }
        }
    }
    if has_own {
        mark_if_wanted(model);
    }
    let is_draft = |span: &Span<'_>| span.lane.is_none() && span.scored > 1;
    let is_trial = model.sequence.trial.is_some() && spans.iter().any(is_draft);
    let own = u32::try_from(batch.own().len()).unwrap_or(u32::MAX);
    let end = model.sequence.position.saturating_add(own);
    let needed = model.sequence.kept().max(end);
    let places = spans.iter().filter_map(|span| {
        let tokens = u32::try_from(span.tokens.len()).unwrap_or(u32::MAX);
        Some((span.lane?, tokens))
    });
    if !model.sequence.make_places(places, needed) {
        let capacity = model.sequence.cache.capacity();
        let needed = model.sequence.held(0);
        return Err(ForwardError::KvFull { capacity, needed });
    }
    let mut preemption = Preemption::new(checkpoint, model.estimators);
    let lanes = || {
        spans
            .iter()
            .filter_map(|span| Some((span.lane?, span.tokens)))
    };
    if model.has_copies() && lanes().next().is_some() {
        // Copies of state and windows in the KV cache cannot be converted to another KV type.
        preemption.keep_kv_type(model.plan.kv_type);
    }
    let mut pass = Pass {
        model,
        preemption,
        needed,
        rows: tokens.len(),
        batch,
        is_trial,
        residual: None,
    };
    pass.model.weights.expect_head(true);
    let scored = pass.batch.scored();
    let result = pass.chunk(&tokens);
    let result = result.and_then(|()| pass.head(scored.clone()));
    pass.end_chunk();
    let Pass {
        model,
        mut preemption,
        ..
    } = pass;
    model.estimators = preemption.estimators;
    if result.is_ok() {
        model.sequence.position = end;
        if scored == (0..tokens.len()) && lanes().next().is_none() {
            note_states(model, Some(scored));
        }
        lanes().for_each(|(lane, tokens)| model.sequence.extend(lane, tokens));
        if has_own && !is_trial {
            mark_if_wanted(model);
        }
    } else {
        // The readers, and states of lanes, may have stopped in the middle of the pass.
        model.restart_stream();
        if is_trial {
            model.sequence.forget_trial();
        } else {
            model.sequence.lost |= has_own;
        }
        lanes().for_each(|(lane, _)| model.sequence.lose(lane));
    }
    if let Some(plan) = preemption.take_later() {
        let applied = residency::apply(model, &plan, &mut || preemption.wanted());
        preemption.applied(applied);
    }
    result
}

/// Notes which rows hold the states of the last tokens of the sequence.
fn note_states(model: &mut Model, rows: Option<Range<usize>>) {
    let end = model.sequence.position;
    if let Some(draft) = &mut model.draft {
        draft.note_states(rows, end);
    }
}

/// Refuses a pass that cannot be computed before it begins; returns the length of the sequence afterwards.
fn admit(model: &Model, tokens: &[u32]) -> Result<u32, ForwardError> {
    if tokens.is_empty() {
        return Err(ForwardError::NoTokens);
    }
    refuse_unknown(model, tokens)?;
    let needed = u32::try_from(tokens.len())
        .ok()
        .and_then(|count| model.sequence.position.checked_add(count))
        .unwrap_or(u32::MAX);
    if needed > model.spec.context_max {
        return Err(ForwardError::ContextFull {
            needed,
            limit: model.spec.context_max,
        });
    }
    let capacity = model.sequence.cache.capacity();
    if needed > capacity.get() {
        return Err(ForwardError::KvFull { capacity, needed });
    }
    Ok(needed)
}

fn refuse_unknown(model: &Model, tokens: &[u32]) -> Result<(), ForwardError> {
    let vocabulary = model.vocabulary();
    let unknown = tokens.iter().find(|&&token| token >= vocabulary);
    unknown.map_or(Ok(()), |&token| {
        Err(ForwardError::Token { token, vocabulary })
    })
}

/// Marks the sequence between two chunks, if wanted; a plan may have changed the chunk size meanwhile.
fn mark_if_wanted(model: &mut Model) {
    let streams = model.streams();
    let Model {
        backend,
        workspace,
        sequence,
        ..
    } = model;
    sequence.mark_if_wanted(backend.as_mut(), workspace.chunk(), streams);
}

impl Pass<'_, '_> {
    /// Computes one layer for the rows of a chunk.
    fn layer(&mut self, index: usize) -> Result<(), Failure> {
        let layer = self.model.spec.layers.get(index).ok_or(Failure::NoMatrix)?;
        let (kind, is_mixer) = (layer.kind, layer.matrix(Role::FfnDown).is_none());
        let has_experts = layer.matrix(Role::Router).is_some();
        match (kind, self.model.spec.recurrent) {
            (LayerKind::FeedForward, _) => {}
            (LayerKind::Recurrent, Some(recurrent)) => self.recurrent(index, &recurrent)?,
            _ => self.attention(index)?,
        }
        match self.model.spec.experts {
            Some(experts) if has_experts => mixture::compute(self, index, &experts)?,
            _ if is_mixer => {}
            _ => self.feed_forward(index)?,
        }
        match self.model.spec.layer_inputs.as_ref() {
            Some(inputs) => layer_input::add(self, index, inputs.width),
            None => Ok(()),
        }
    }

    /// Computes the chunks of a pass in order. Returns the start position of the last one.
    fn chunks(&mut self, tokens: &[u32], each: &mut Each<'_>) -> Result<u32, ForwardError> {
        let (mut done, mut first) = (0, self.model.sequence.position);
        mark_if_wanted(self.model);
        while done < tokens.len() {
            first = self.model.sequence.position;
            self.end_chunk();
            let end = tokens.len().min(done + self.model.rows_max());
            let streams = self.model.streams();
            let end = self
                .model
                .sequence
                .until_mark(streams)
                .map_or(end, |left| end.min(done + left));
            let chunk = tokens.get(done..end).unwrap_or_default();
            let last = end == tokens.len();
            self.model.weights.expect_head(last || each.is_some());
            self.batch = Batch::of_sequence(chunk.len());
            (self.rows, self.residual) = (chunk.len(), None);
            let result = self
                .chunk(chunk)
                .and_then(|()| self.finish_chunk(done, last, each));
            if let Err(error) = result {
                self.model.sequence.lost = true;
                return Err(error);
            }
            done = end;
            mark_if_wanted(self.model);
        }
        Ok(first)
    }

    /// Runs between two chunks and after the last one, even if that failed.
    fn end_chunk(&mut self) {
        if let Some(report) = residency::rechunk_if_wanted(self.model) {
            self.preemption.rechunked(report);
        }
    }

    /// Computes all layers for one chunk.
    fn chunk(&mut self, tokens: &[u32]) -> Result<(), ForwardError> {
        for result in 0..self.batch.results() {
            let floats = self.flags(result);
            self.model
                .backend
                .queue(Operation::Fill { floats, value: 0.0 })?;
        }
        let end = self
            .model
            .sequence
            .position
            .saturating_add(u32::try_from(self.batch.own().len()).unwrap_or(u32::MAX));
        self.model.sequence.cache.write_up_to(end);
        self.embed(tokens)?;
        layer_input::embed(self, tokens)?;
        self.rotate(tokens.len())?;
        for layer in 0..self.model.spec.layers.len() {
            if self.rows == 1 {
                self.preemption.layer_queued(self.model.backend.as_mut())?;
            }
            let found = self.preemption.check();
            let first = self
                .model
                .layout
                .layers
                .get(layer)
                .and_then(|parts| parts.iter().min());
            let place = Place {
                part: first.copied().unwrap_or(self.model.layout.head.start),
                piece: 0,
            };
            self.preempt(found, place)
                .and_then(|()| self.layer(layer))
                .map_err(|failure| self.failed(failure, layer))?;
        }
        Ok(())
    }

    /// Computes the requested logits and updates the position.
    fn finish_chunk(
        &mut self,
        done: usize,
        last: bool,
        each: &mut Each<'_>,
    ) -> Result<(), ForwardError> {
        match each {
            Some(each) => {
                for (row, at) in (0..self.rows).zip(0u32..) {
                    self.head(row..row + 1)?;
                    let place = (self.model.sequence.position, at);
                    let logits = result(
                        self.model.backend.as_mut(),
                        &self.model.logits,
                        (self.model.spec.vocabulary, 0),
                        place,
                    )?;
                    each(done + row, logits);
                }
            }
            // [`result`] waits for them.
            None if last => self.head(self.rows - 1..self.rows)?,
            None => {
                let flags = self.model.spec.vocabulary..self.model.spec.vocabulary + FLAGS;
                is_finite(
                    self.model.backend.read(&self.model.logits, flags)?,
                    (self.model.sequence.position, 0),
                )?;
            }
        }
        self.model.sequence.position += u32::try_from(self.rows).unwrap_or(u32::MAX);
        Ok(())
    }
}

/// Waits for queued operations and returns the logits of result `number`; `place` is the position of its chunk, and its
/// row in it.
pub(super) fn result<'a>(
    backend: &'a mut dyn Backend,
    logits: &'a Buffer,
    (vocabulary, number): (usize, usize),
    place: (u32, u32),
) -> Result<&'a [f32], ForwardError> {
    let first = number * (vocabulary + FLAGS);
    let (logits, flags) = backend
        .read(logits, first..first + vocabulary + FLAGS)?
        .split_at(vocabulary);
    is_finite(flags, place)?;
    Ok(logits)
}

/// Waits for queued operations and returns the index of the greatest logit of a result; `place` as for [`result`].
pub(super) fn greatest(
    backend: &mut dyn Backend,
    logits: &Buffer,
    (vocabulary, number): (usize, usize),
    place: (u32, u32),
) -> Result<u32, ForwardError> {
    let first = number * (vocabulary + FLAGS) + vocabulary;
    let flags = backend.read(logits, first..first + FLAGS)?;
    is_finite(flags, place)?;
    let found = flags.get(1).map(|number| number.to_bits());
    found
        .filter(|number| (*number as usize) < vocabulary)
        .ok_or_else(|| not_finite(place))
}

/// Refuses non-finite results by the flags of the chunk that begins at `first`, and of the logits of its row `row`.
fn is_finite(flags: &[f32], (first, row): (u32, u32)) -> Result<(), ForwardError> {
    match flags {
        [0.0, _, _, 0.0] => Ok(()),
        [0.0, ..] => Err(not_finite((first, row))),
        // The cache stores a NaN as a finite number: all later tokens are invalid.
        _ => Err(not_finite((first, 0))),
    }
}

const fn not_finite((first, row): (u32, u32)) -> ForwardError {
    ForwardError::NotFinite {
        position: first.saturating_add(row),
    }
}
