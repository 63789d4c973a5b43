//! Products with resident or streamed weights, in slices with preemption points between them.

use std::time::Instant;

use super::weights::{Place, Weights};
use crate::{
    backend::{Activate, Backend, Buffer, Copies, DeviceError, Multiply, Operation, Product, View},
    gguf::GgmlDType,
    preemption::{Preempt, Preemption, Work},
    reader::Missing,
    shape::{Layout, PartLayout, Piece, logits_stride},
    spec::Spec,
};

/// Progress of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Done,
    /// A plan waits at the [`Preemption`]; the remainder begins here.
    Paused(Place),
}

/// Reason for a failed product.
pub(super) enum Failure {
    Device(DeviceError),
    Missing(Missing),
    /// The layer has no such matrix; the spec excludes this.
    NoMatrix,
    /// The checkpoint has stopped the pass.
    Stopped,
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

/// Operands of products.
pub(super) struct Input {
    pub(super) floats: View,
    pub(super) copies: Copies,
    pub(super) rows: usize,
    /// Activation after the products; `None` once it is queued.
    pub(super) activate: Option<Activate>,
}

impl Input {
    fn queue(&self, backend: &mut dyn Backend, products: &[Product]) -> Result<(), DeviceError> {
        self.queue_then(backend, products, None)
    }

    fn queue_then(
        &self,
        backend: &mut dyn Backend,
        products: &[Product],
        activate: Option<Activate>,
    ) -> Result<(), DeviceError> {
        backend.queue(Operation::Multiply(Multiply {
            products: products.into(),
            input: self.floats.clone(),
            copies: self.copies.clone(),
            rows: self.rows,
            activate,
        }))
    }
}

/// A wanted matrix, and the destination of its products.
pub(super) struct Want {
    /// Index among the layer's matrices; 0 in the head.
    pub(super) number: usize,
    pub(super) dtype: GgmlDType,
    pub(super) columns: usize,
    /// Row stride of `out`, in elements.
    pub(super) stride: usize,
    pub(super) out: View,
}

impl Want {
    fn product(&self, weight: View, part: Option<usize>, row: usize, rows: usize) -> Product {
        Product {
            weight,
            part,
            dtype: self.dtype,
            rows,
            columns: self.columns,
            out: self.out.clone(),
            stride: self.stride,
            first: row,
        }
    }
}

fn want_of(wants: &[Want], matrix: usize) -> Option<&Want> {
    wants.iter().find(|want| want.number == matrix)
}

impl Weights {
    /// Computes logits: the products of `input` with all rows of the head, from `from` on.
    pub(super) fn head(
        &mut self,
        backend: &mut dyn Backend,
        (spec, layout): (&Spec, &Layout),
        logits: View,
        input: &mut Input,
        from: Place,
        preemption: &mut Preemption<'_>,
    ) -> Result<Progress, Failure> {
        let wants = [Want {
            number: 0,
            dtype: spec.head.dtype,
            columns: spec.width,
            stride: logits_stride(spec),
            out: logits,
        }];
        let mut at = from;
        while at.part < layout.head.end {
            // A run of the head takes as long as one layer or several.
            backend.mark();
            match preemption.check_if_due() {
                Preempt::No => {}
                Preempt::Pause => return Ok(Progress::Paused(at)),
                Preempt::Stop => return Err(Failure::Stopped),
            }
            // Consecutive resident tiles are computed together.
            let mut bytes = 0;
            let resident = (at.part..layout.head.end)
                .map_while(|part| self.arena(part))
                .take_while(|arena| {
                    let fits = bytes == 0 || bytes + arena.bytes().as_len() <= HEAD_RUN_MAX;
                    bytes += arena.bytes().as_len();
                    fits
                })
                .count();
            if resident == 0 || at.piece > 0 {
                if let Progress::Paused(at) =
                    self.multiply(backend, at, layout, &wants, input, preemption)?
                {
                    return Ok(Progress::Paused(at));
                }
                at = Place {
                    part: at.part + 1,
                    piece: 0,
                };
                continue;
            }
            let mut products = Vec::with_capacity(resident);
            for number in at.part..at.part + resident {
                self.resident_rows(number, layout, &wants, &mut products)?;
            }
            input.queue(backend, &products)?;
            at.part += resident;
        }
        Ok(Progress::Done)
    }

    /// Adds the wanted matrices of a resident part to `products`.
    fn resident_rows(
        &self,
        number: usize,
        layout: &Layout,
        wants: &[Want],
        products: &mut Vec<Product>,
    ) -> Result<(), Failure> {
        let (arena, part) = self
            .arena(number)
            .zip(layout.parts.get(number))
            .ok_or(Failure::NoMatrix)?;
        for slab in &part.slabs {
            if let Some(want) = want_of(wants, slab.matrix) {
                let weight = arena.view_bytes(slab.offset, slab.extent.bytes);
                products.push(want.product(weight, Some(number), slab.row, slab.rows));
            }
        }
        Ok(())
    }

    /// Fills `products` with the rows of a resident part that make up `pieces`, in the order of its slabs. A part of
    /// the head may lack rows in between, those of removed tokens.
    fn rows_of_pieces(
        arena: &Buffer,
        (number, part): (usize, &PartLayout),
        pieces: &[(usize, &Piece)],
        wants: &[Want],
        products: &mut Vec<Product>,
    ) -> Result<(), Failure> {
        products.clear();
        let slab_of = |piece: &Piece| {
            part.slabs.iter().position(|slab| {
                slab.matrix == piece.matrix && (slab.row..slab.row + slab.rows).contains(&piece.row)
            })
        };
        for run in pieces.chunk_by(|(_, one), (_, next)| slab_of(one) == slab_of(next)) {
            let first = run
                .first()
                .map(|(_, piece)| *piece)
                .ok_or(Failure::NoMatrix)?;
            let slab = slab_of(first).and_then(|slab| part.slabs.get(slab));
            let (slab, want) = slab
                .zip(want_of(wants, first.matrix))
                .ok_or(Failure::NoMatrix)?;
            let count: usize = run.iter().map(|(_, piece)| piece.rows).sum();
            let offset = slab.offset + (first.row - slab.row) * slab.row_bytes;
            let weight = arena.view_bytes(offset, count * slab.row_bytes);
            products.push(want.product(weight, Some(number), first.row, count));
        }
        Ok(())
    }

    /// Multiplies `input` with the wanted matrices of a part, from a piece on.
    pub(super) fn multiply(
        &mut self,
        backend: &mut dyn Backend,
        at: Place,
        layout: &Layout,
        wants: &[Want],
        input: &mut Input,
        preemption: &mut Preemption<'_>,
    ) -> Result<Progress, Failure> {
        let part = layout.parts.get(at.part).ok_or(Failure::NoMatrix)?;
        let mut products = Vec::with_capacity(wants.len());
        if self.arena(at.part).is_some() && input.rows == 1 && at.piece == 0 {
            // For one token this takes less than a slice.
            self.resident_rows(at.part, layout, wants, &mut products)?;
            let activate = input.activate.take();
            input.queue_then(backend, &products, activate)?;
            return Ok(Progress::Done);
        }
        let pieces: Vec<(usize, &Piece)> = part
            .pieces
            .iter()
            .enumerate()
            .skip(at.piece)
            .filter(|(_, piece)| want_of(wants, piece.matrix).is_some())
            .collect();
        let work_of = |piece: &Piece| {
            let columns = want_of(wants, piece.matrix).map_or(0, |want| want.columns);
            (piece.rows * columns * input.rows) as u64
        };
        let works: Vec<u64> = pieces.iter().map(|(_, piece)| work_of(piece)).collect();
        let mut done = 0;
        while let Some((piece_at, _)) = pieces.get(done) {
            let paused = Progress::Paused(Place {
                part: at.part,
                piece: *piece_at,
            });
            match preemption.check_if_due() {
                Preempt::No => {}
                Preempt::Pause => return Ok(paused),
                Preempt::Stop => return Err(Failure::Stopped),
            }
            let Some(arena) = self.arena(at.part) else {
                let pieces = pieces.get(done..).unwrap_or_default();
                match self.multiply_streamed(backend, at.part, pieces, wants, input, preemption)? {
                    Some(count) => done += count,
                    None => return Ok(paused),
                }
                continue;
            };
            let mut work = 0;
            let fitting = works.iter().skip(done).take_while(|piece| {
                let fits = work == 0 || work + **piece <= preemption.estimators.products.work();
                work += **piece;
                fits
            });
            let count = fitting.count().max(1);
            let slice = pieces.get(done..done + count).unwrap_or_default();
            Self::rows_of_pieces(arena, (at.part, part), slice, wants, &mut products)?;
            let began = Instant::now();
            input.queue(backend, &products)?;
            let work = works.iter().skip(done).take(count).sum();
            preemption.queued(backend, Work::Products, work, began)?;
            done += count;
        }
        Ok(Progress::Done)
    }

    /// Multiplies `input` with the first of `pieces`, and for one token also with the following ones that have been
    /// read. Returns the number of pieces, or `None` if a plan arrived while it waited for the disk.
    fn multiply_streamed(
        &mut self,
        backend: &mut dyn Backend,
        index: usize,
        pieces: &[(usize, &Piece)],
        wants: &[Want],
        input: &Input,
        preemption: &mut Preemption<'_>,
    ) -> Result<Option<usize>, Failure> {
        let (at, piece) = pieces.first().ok_or(Failure::NoMatrix)?;
        let Some(first) = self.streamed(index).map(|base| base + at) else {
            let hung = self.hung(&piece.extent.what).ok_or(Failure::NoMatrix)?;
            return Err(Failure::Missing(Missing::Stalled(hung)));
        };
        // For one token, pieces that have been read are computed together; for several, rows of the result interleave,
        // and one piece is enough work.
        let most = if input.rows == 1 { pieces.len() } else { 1 };
        let asked = Instant::now();
        let acquired = self.acquire(backend, first, most, &mut || {
            preemption.check() == Preempt::No
        })?;
        self.note_waited(asked.elapsed());
        let ready = match acquired {
            Ok(ready) => ready,
            Err(Missing::Stopped) if preemption.check() == Preempt::Pause => return Ok(None),
            Err(Missing::Stopped) => return Err(Failure::Stopped),
            Err(missing) => return Err(Failure::Missing(missing)),
        };
        let count = ready.len();
        let products = pieces.iter().zip(ready).filter_map(|((_, piece), weight)| {
            let want = want_of(wants, piece.matrix)?;
            Some(want.product(weight, None, piece.row, piece.rows))
        });
        let products: Vec<Product> = products.collect();
        let queued = input.queue(backend, &products);
        drop(products);
        self.lend(backend, count)?;
        queued?;
        Ok(Some(count))
    }
}

/// Bytes of the head multiplied between preemption checks: 8 ms of reading at 32 GB/s.
const HEAD_RUN_MAX: usize = 256 << 20;
