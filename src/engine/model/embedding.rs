//! Token embeddings: from a tied head in memory, else from the file.

use super::{forward::Pass, products::Failure, weights::Place};
use crate::{
    backend::{DeviceError, Operation, Row, RowBytes, Widen},
    error::ForwardError,
    gguf::TensorInfo,
    preemption::Preempt,
    reader::{Extent, Missing},
    spec::Spec,
};

impl Pass<'_, '_> {
    /// Writes the embeddings of a chunk's tokens to the residual stream.
    pub(super) fn embed(&mut self, tokens: &[u32]) -> Result<(), ForwardError> {
        let found = self.preemption.check_if_due();
        self.preempt(found, Place::default())
            .map_err(|failure| self.failed(failure, 0))?;
        let mut missing = Vec::new();
        let mut rows = Vec::with_capacity(tokens.len());
        for (row, token) in tokens.iter().enumerate() {
            match self
                .model
                .weights
                .embedding(&self.model.spec, &self.model.layout, *token)
            {
                Some(view) => rows.push(self.row_of(row, RowBytes::View(view))),
                None => missing.push((row, *token)),
            }
        }
        self.widen(&rows)?;
        drop(rows);
        self.read_rows(Table::Tokens, &missing, |pass, some, read| {
            let bytes = read.chunks_exact(pass.model.spec.embedding_row().max(1));
            let rows = some.iter().zip(bytes);
            let rows: Vec<Row<'_>> = rows
                .map(|((row, _), bytes)| pass.row_of(*row, RowBytes::Host(bytes.into())))
                .collect();
            Ok(pass.widen(&rows)?)
        })
    }

    /// Reads embeddings from the file, a few at once; each token comes with its row.
    pub(super) fn read_rows(
        &mut self,
        table: Table,
        tokens: &[(usize, u32)],
        mut then: impl FnMut(&mut Self, &[(usize, u32)], &[u8]) -> Result<(), ForwardError>,
    ) -> Result<(), ForwardError> {
        let (_, bytes) = table.of(&self.model.spec);
        let at_once = (ROWS_BYTES_MAX / bytes.max(1)).max(1);
        for some in tokens.chunks(at_once) {
            let read = self.read_at_once(table, some)?;
            then(self, some, &read)?;
        }
        Ok(())
    }

    fn read_at_once(
        &mut self,
        table: Table,
        tokens: &[(usize, u32)],
    ) -> Result<Vec<u8>, ForwardError> {
        let (tensor, bytes) = table.of(&self.model.spec);
        let asked = self
            .model
            .weights
            .ask_for_rows((tensor, bytes), tokens.iter().map(|(_, token)| *token));
        asked.map_err(|error| {
            let row = Extent {
                what: tensor.name.as_str().into(),
                offset: tensor.offset,
                bytes,
            };
            row.error(
                self.model.header.path(),
                format!("no thread is available: {error}"),
            )
        })?;
        loop {
            let preemption = &mut self.preemption;
            match self
                .model
                .weights
                .rows_asked_for(&mut || preemption.check() == Preempt::No)
            {
                Ok(read) => return Ok(read),
                Err(Missing::Stopped) => {
                    let found = self.preemption.check();
                    self.preempt(found, Place::default())
                        .map_err(|failure| self.failed(failure, 0))?;
                }
                Err(missing) => return Err(self.failed(Failure::Missing(missing), 0)),
            }
        }
    }

    /// Returns the operand that converts an embedding to row `row` of the residual stream.
    fn row_of<'a>(&self, row: usize, from: RowBytes<'a>) -> Row<'a> {
        let width = self.model.spec.width;
        Row {
            from,
            to: self
                .model
                .workspace
                .stream
                .view(row * width..(row + 1) * width),
        }
    }

    fn widen(&mut self, rows: &[Row<'_>]) -> Result<(), DeviceError> {
        if rows.is_empty() {
            return Ok(());
        }
        self.model.backend.queue(Operation::Widen(Widen {
            rows: rows.into(),
            dtype: self.model.spec.embedding.dtype,
            scale: self.model.spec.embedding_scale,
        }))
    }
}

/// Embeddings in the file.
#[derive(Clone, Copy, Debug)]
pub(super) enum Table {
    /// Those of all layers.
    Layers,
    /// Those that begin the residual stream.
    Tokens,
}

impl Table {
    /// Returns the matrix, and the bytes of a row.
    fn of(self, spec: &Spec) -> (&TensorInfo, usize) {
        match (self, &spec.layer_inputs) {
            (Self::Layers, Some(inputs)) => (&inputs.table, spec.layer_inputs_row()),
            _ => (&spec.embedding, spec.embedding_row()),
        }
    }
}

/// Bytes of embeddings requested at once, which are not in the ledger until they are converted: a dozen rows or more.
/// Reading a row takes nine times as long as handing over a batch. Our choice.
const ROWS_BYTES_MAX: usize = 16 << 10;
