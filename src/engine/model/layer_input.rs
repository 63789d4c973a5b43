//! Inputs of their own for layers.
//!
//! ```text
//!   own[layer] = (embedding of the token for the layer · √n  +  rms(projection of its first embedding)) / √2
//!   stream    += rms(output · (gelu(gate · stream) ⊙ own[layer]))
//! ```

use super::{embedding::Table, forward::Pass, products::Failure, workspace::Slot};
use crate::{
    backend::{Activate, Norm, Operation, Residual, Row, RowBytes, Span, View, Widen},
    error::ForwardError,
    spec::{Role, Vector, root},
};

/// Reads the embeddings of a chunk's tokens for all layers, and keeps those that began the residual stream.
pub(super) fn embed(pass: &mut Pass<'_, '_>, tokens: &[u32]) -> Result<(), ForwardError> {
    let Some(inputs) = &pass.model.spec.layer_inputs else {
        return Ok(());
    };
    let (width, dtype) = (inputs.width, inputs.table.dtype);
    let bytes = width / dtype.block_size() * dtype.type_size();
    let stream = pass
        .model
        .workspace
        .stream
        .view(0..pass.rows * pass.model.spec.width);
    pass.model.backend.queue(Operation::Move {
        from: Span::Buffer(stream),
        to: Span::Buffer(first_embeddings(pass)),
    })?;
    let rows: Vec<(usize, u32)> = tokens.iter().copied().enumerate().collect();
    pass.read_rows(Table::Layers, &rows, |pass, some, read| {
        let of_token = read.chunks_exact(pass.model.spec.layer_inputs_row().max(1));
        let mut rows = Vec::new();
        for ((row, _), read) in some.iter().zip(of_token) {
            for (layer, part) in read.chunks_exact(bytes.max(1)).enumerate() {
                let first = (layer * pass.rows + row) * width;
                rows.push(Row {
                    from: RowBytes::Host(part.into()),
                    to: pass.model.workspace.inputs.view(first..first + width),
                });
            }
        }
        pass.model.backend.queue(Operation::Widen(Widen {
            rows: rows.into(),
            dtype,
            scale: root(width) * HALF_POWER,
        }))?;
        Ok(())
    })
}

/// Adds what a layer makes of its own input of `inner` elements to the residual stream.
pub(super) fn add(pass: &mut Pass<'_, '_>, index: usize, inner: usize) -> Result<(), Failure> {
    let width = pass.model.spec.width;
    pass.norm(index, None, &[Role::LayerGate])?;
    pass.products(index, Slot::Normed, &[(Role::LayerGate, Slot::Wide, inner)])?;
    project_embeddings(pass, index, inner)?;
    let floats = 0..pass.rows * inner;
    pass.model.backend.queue(Operation::Activate(Activate {
        activation: pass.model.spec.activation,
        gate: pass.model.workspace.wide.view(floats.clone()),
        up: Some(pass.model.workspace.second.view(floats)),
        gate_bias: None,
        up_bias: None,
        width: inner,
        prepare: pass.prepare(index, &[Role::LayerOutput], 0),
    }))?;
    pass.products(
        index,
        Slot::Wide,
        &[(Role::LayerOutput, Slot::Normed, width)],
    )?;
    // The part has no bias.
    let none = Vector::OutputBias;
    pass.residual = Some(pass.last_residual(index, none, Vector::LayerPostNorm));
    Ok(())
}

/// Completes the own input of a layer.
fn project_embeddings(pass: &mut Pass<'_, '_>, index: usize, inner: usize) -> Result<(), Failure> {
    let (rows, width) = (pass.rows, pass.model.spec.width);
    let epsilon = pass.model.spec.epsilon;
    pass.model.backend.queue(Operation::Norm(Norm {
        stream: first_embeddings(pass),
        normed: pass.model.workspace.normed.view(0..rows * width),
        residual: None,
        width,
        weight: None,
        bias: None,
        epsilon,
        prepare: pass.prepare(index, &[Role::LayerInput], 0),
    }))?;
    pass.products(
        index,
        Slot::Normed,
        &[(Role::LayerInput, Slot::Second, inner)],
    )?;
    let (weights, fixed) = (&pass.model.weights, &pass.model.layout.fixed);
    let first = index * rows * inner;
    pass.model.backend.queue(Operation::Norm(Norm {
        stream: pass
            .model
            .workspace
            .inputs
            .view(first..first + rows * inner),
        normed: pass.model.workspace.second.view(0..rows * inner),
        residual: Some(Residual {
            bias: None,
            norm: weights.vector(fixed, index, Vector::LayerInputNorm),
            scale: HALF_POWER,
            sum: None,
        }),
        width: inner,
        weight: None,
        bias: None,
        // The projection is divided by √width before the norm, which changes this term only.
        epsilon: epsilon * root(width) * root(width),
        prepare: pass.prepare(index, &[], 0),
    }))?;
    Ok(())
}

/// The embeddings that began the residual stream.
fn first_embeddings(pass: &Pass<'_, '_>) -> View {
    let spec = &pass.model.spec;
    let inner = spec.layer_inputs.as_ref().map_or(0, |inputs| inputs.width);
    let first = spec.layers.len() * pass.rows * inner;
    let end = first + pass.rows * spec.width;
    pass.model.workspace.inputs.view(first..end)
}

/// Of the sum of two terms.
const HALF_POWER: f32 = std::f32::consts::FRAC_1_SQRT_2;
