//! Drafts by the model's own block for multi-token prediction.
//!
//! ```text
//!   next token ── embedding ── norm ─┐
//!                                    ├─ projection ── attention layer ── norm ─┬─ frequent rows of the head ─► draft
//!   state before it ────────── norm ─┘                                         └─ state before the draft after it
//! ```
//!
//! The block attends to the tokens of the answer that went through it, in a KV cache of its own. A wrong draft costs time
//! and nothing else, so tokens before the answer, and those of other drafts, may be absent from it.

use std::ops::Range;

use super::{
    batch::Batch,
    forward::Pass,
    loaded::Model,
    products::{Failure, Input, Want},
    weights::Place,
    workspace::Slot,
};
use crate::{
    backend::{Gather, Norm, Operation, Prepare, Residual, Types, View},
    error::ForwardError,
    preemption::{Flow, Preemption},
    shape::{logits_stride, narrow},
    spec::{Role, Vector},
};

/// Whether the block is in memory.
pub(super) fn is_ready(model: &Model) -> bool {
    let block = model.layout.draft.filter(|_| model.draft.is_some());
    block.is_some_and(|block| model.weights.arena(block).is_some())
}

/// Drafts up to `most` tokens after `tokens`, the sequence and the token after it; polls `go_on` after each.
pub(super) fn draft(
    model: &mut Model,
    tokens: &[u32],
    most: usize,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Vec<u32>, ForwardError> {
    let is_ready = is_ready(model) && !model.sequence.lost && !model.sequence.is_tried();
    let position = model.sequence.position;
    let Some(kv) = model.draft.as_mut().filter(|_| is_ready && most > 0) else {
        return Ok(Vec::new());
    };
    let Some((rows, end)) = kv.states.take() else {
        return Ok(Vec::new());
    };
    let first = end.saturating_sub(narrow(rows.len()));
    // The last rows may have been of tokens that were not confirmed.
    let count = position
        .saturating_sub(first)
        .min(end.saturating_sub(first)) as usize;
    let known = tokens.get(tokens.len().saturating_sub(count)..);
    let (Some(known), 1..) = (known, count) else {
        return Ok(Vec::new());
    };
    kv.begin(first, narrow(count), narrow(most));
    let (mut states, mut at) = (rows.start..rows.start + count, first);
    let (mut drafted, mut next) = (Vec::with_capacity(most), known.to_vec());
    let held = kv.tokens.saturating_add(narrow(count));
    kv.end = position;
    let result = loop {
        match step(model, &next, &states, at) {
            Ok(Some(token)) => drafted.push(token),
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
        if let Some(kv) = &mut model.draft {
            kv.tokens = kv.tokens.saturating_add(narrow(next.len()));
        }
        if drafted.len() == most || !go_on() {
            break Ok(());
        }
        at = at.saturating_add(narrow(next.len()));
        states = next.len() - 1..next.len();
        next = drafted.last().copied().into_iter().collect();
    };
    if let Some(kv) = &mut model.draft {
        // Without those of tokens that are not confirmed.
        kv.tokens = if result.is_ok() { held } else { 0 };
    }
    result.map(|()| drafted)
}

/// Computes the block for `tokens`, with the states before them and the first at `position`; returns the most likely of the
/// frequent tokens after the last. The state after the last is then in its row of the workspace.
fn step(
    model: &mut Model,
    tokens: &[u32],
    states: &Range<usize>,
    position: u32,
) -> Result<Option<u32>, ForwardError> {
    let (block, rows) = (model.spec.layers.len(), tokens.len());
    let mut checkpoint = || Flow::Continue;
    let preemption = Preemption::new(&mut checkpoint, model.estimators);
    let needed = model.sequence.kept();
    let mut pass = Pass {
        model,
        preemption,
        needed,
        rows,
        batch: Batch::of_sequence(rows),
        is_trial: false,
        residual: None,
    };
    normed_states(&mut pass, block, states)?;
    pass.embed(tokens)?;
    let dropped = pass.model.sequence.dropped.tokens() as usize;
    pass.rotate_from(position as usize + dropped, 0..rows, rows)?;
    let computed = project(&mut pass, block)
        .and_then(|()| layer(&mut pass, block))
        .and_then(|()| frequent(&mut pass, block));
    computed.map_err(|failure| pass.failed(failure, block))
}

/// Writes the normed states to the second halves of the block's input rows.
fn normed_states(
    pass: &mut Pass<'_, '_>,
    block: usize,
    states: &Range<usize>,
) -> Result<(), ForwardError> {
    let width = pass.model.spec.width;
    for (row, state) in states.clone().enumerate() {
        let from = pass
            .model
            .workspace
            .normed
            .view(state * width..(state + 1) * width);
        let at = 2 * row * width + width;
        let to = pass.model.workspace.wide.view(at..at + width);
        let norm = plain_norm(pass, block, Vector::DraftStateNorm, (from, to));
        pass.model.backend.queue(norm)?;
    }
    Ok(())
}

/// Projects the block's input rows, with the embeddings of the residual stream as their first halves, to the residual
/// stream.
fn project(pass: &mut Pass<'_, '_>, block: usize) -> Result<(), Failure> {
    let (width, rows) = (pass.model.spec.width, pass.rows);
    for row in 0..rows {
        let work = &pass.model.workspace;
        let from = work.stream.view(row * width..(row + 1) * width);
        let to = work.wide.view(2 * row * width..(2 * row + 1) * width);
        let norm = plain_norm(pass, block, Vector::DraftEmbeddingNorm, (from, to));
        pass.model.backend.queue(norm)?;
    }
    let all: Vec<u32> = (0..narrow(rows)).collect();
    let work = &pass.model.workspace;
    let (from, to) = (&work.wide, &work.second);
    let gather = Gather {
        from: from.view(0..2 * rows * width),
        rows: all.into(),
        width: 2 * width,
        to: to.view(0..2 * rows * width),
        prepare: pass.prepare(block, &[Role::Draft], 0),
    };
    let floats = work.stream.view(0..rows * width);
    pass.model.backend.queue(Operation::Gather(gather))?;
    pass.model
        .backend
        .queue(Operation::Fill { floats, value: 0.0 })?;
    let wants = [(Role::Draft, Slot::Normed, width)];
    pass.products(block, Slot::Second, &wants)?;
    pass.residual = Some(Residual {
        bias: None,
        norm: None,
        scale: 1.0,
        sum: None,
    });
    Ok(())
}

/// Computes the attention layer of the block.
fn layer(pass: &mut Pass<'_, '_>, block: usize) -> Result<(), Failure> {
    let rows = narrow(pass.rows);
    if let Some(kv) = &mut pass.model.draft {
        kv.touch(rows);
    }
    pass.attention(block)?;
    pass.feed_forward(block)
}

/// Returns the most likely token after the last row, of those whose rows of the head are frequent and in memory.
fn frequent(pass: &mut Pass<'_, '_>, block: usize) -> Result<Option<u32>, Failure> {
    let (width, rows) = (pass.model.spec.width, pass.rows);
    let model = &mut *pass.model;
    let (fixed, work) = (&model.layout.fixed, &model.workspace);
    let own = model.weights.vector(fixed, block, Vector::DraftOutputNorm);
    let norm = fixed.output_norm..fixed.output_norm + width;
    // The other rows have been read by now, and the next draft needs the state of the last one alone.
    let last = (rows - 1) * width..rows * width;
    let normed = work.normed.view(last.clone());
    model.backend.queue(Operation::Norm(Norm {
        stream: work.stream.view(last),
        normed: normed.clone(),
        residual: pass.residual.take(),
        width,
        weight: Some(own.unwrap_or_else(|| model.weights.fixed().view(norm))),
        bias: None,
        epsilon: model.spec.epsilon,
        prepare: Prepare {
            copies: work.copies(),
            types: Types::from_iter([model.spec.head.dtype]),
            first: 0,
        },
    }))?;
    let wants = [Want {
        number: 0,
        dtype: model.spec.head.dtype,
        columns: width,
        stride: logits_stride(&model.spec),
        out: model.logits.view(0..logits_stride(&model.spec)),
    }];
    let mut input = Input {
        floats: normed,
        copies: work.copies(),
        rows: 1,
        activate: None,
    };
    let mut computed = Vec::new();
    for part in model.layout.head.clone() {
        let slabs = model.layout.parts.get(part).map(|part| &part.slabs);
        let slabs = slabs.into_iter().flatten();
        let slabs: Vec<_> = slabs.map(|slab| slab.row..slab.row + slab.rows).collect();
        let is_frequent = slabs.first().is_some_and(|rows| rows.start < FREQUENT);
        if !is_frequent || model.weights.arena(part).is_none() {
            continue;
        }
        let at = Place { part, piece: 0 };
        let (backend, layout) = (model.backend.as_mut(), &model.layout);
        let preemption = &mut pass.preemption;
        model
            .weights
            .multiply(backend, at, layout, &wants, &mut input, preemption)?;
        computed.extend(slabs);
    }
    let mut best: Option<(f32, usize)> = None;
    for rows in computed {
        let logits = model.backend.read(&model.logits, rows.clone())?;
        for (row, logit) in rows.zip(logits) {
            if best.is_none_or(|(most, _)| *logit > most) {
                best = Some((*logit, row));
            }
        }
    }
    Ok(best.map(|(_, row)| narrow(row)))
}

/// Returns the norm of a row, which is copied.
fn plain_norm(
    pass: &Pass<'_, '_>,
    block: usize,
    vector: Vector,
    (from, to): (View, View),
) -> Operation<'static> {
    let (weights, fixed) = (&pass.model.weights, &pass.model.layout.fixed);
    Operation::Norm(Norm {
        stream: from,
        normed: to,
        residual: None,
        width: pass.model.spec.width,
        weight: weights.vector(fixed, block, vector),
        bias: None,
        epsilon: pass.model.spec.epsilon,
        prepare: Prepare {
            copies: pass.model.workspace.copies(),
            types: Types::default(),
            first: 0,
        },
    })
}

/// Rows of the head from which drafts are taken, with the tiles that they end in. Byte-pair vocabularies number tokens in
/// the order of their frequency. Our choice: 13 % of Qwen3.5's head, whose rows are a fifth of the 0.8B model.
const FREQUENT: usize = 32 << 10;
