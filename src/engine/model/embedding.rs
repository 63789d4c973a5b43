//! Token embeddings: from a tied head in memory, else from the file.

use super::{forward::Pass, products::Failure, weights::Place};
use crate::{
    backend::{DeviceError, Operation, Row, RowBytes, Widen},
    error::ForwardError,
    preemption::Preempt,
    reader::{Extent, Missing},
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
        let at_once = (ROWS_BYTES_MAX / self.model.spec.embedding_row().max(1)).max(1);
        for some in missing.chunks(at_once) {
            self.embed_read(some)?;
        }
        Ok(())
    }

    /// Reads embeddings from the file; each token comes with its row.
    fn embed_read(&mut self, tokens: &[(usize, u32)]) -> Result<(), ForwardError> {
        let asked = self
            .model
            .weights
            .ask_for_rows(&self.model.spec, tokens.iter().map(|(_, token)| *token));
        asked.map_err(|error| {
            let (embedding, bytes) = (&self.model.spec.embedding, self.model.spec.embedding_row());
            let row = Extent {
                what: embedding.name.as_str().into(),
                offset: embedding.offset,
                bytes,
            };
            row.error(
                self.model.header.path(),
                format!("no thread is available: {error}"),
            )
        })?;
        let read = loop {
            let preemption = &mut self.preemption;
            match self
                .model
                .weights
                .rows_asked_for(&mut || preemption.check() == Preempt::No)
            {
                Ok(read) => break read,
                Err(Missing::Stopped) => {
                    let found = self.preemption.check();
                    self.preempt(found, Place::default())
                        .map_err(|failure| self.failed(failure, 0))?;
                }
                Err(missing) => return Err(self.failed(Failure::Missing(missing), 0)),
            }
        };
        let bytes = read.chunks_exact(self.model.spec.embedding_row().max(1));
        let rows = tokens.iter().zip(bytes);
        let rows: Vec<Row<'_>> = rows
            .map(|((row, _), bytes)| self.row_of(*row, RowBytes::Host(bytes.into())))
            .collect();
        Ok(self.widen(&rows)?)
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

/// Bytes of embeddings requested at once, which are not in the ledger until they are converted: a dozen rows or more.
/// Reading a row takes nine times as long as handing over a batch. Our choice.
const ROWS_BYTES_MAX: usize = 16 << 10;
