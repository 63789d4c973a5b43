//! Products with weights, wherever they are: in slices, between which commands are taken.

use std::{sync::Arc, time::Instant};

use candle_core::quantized::GgmlDType;

use super::weights::{Place, Weights};
use crate::engine::{
    arena::Mapping,
    backend::{Backend, Prepared, Projection, Weight},
    preemption::{Preempt, Preemption},
    reader::Missing,
    shape::{Layout, PartLayout, Piece},
    spec::{LayerSpec, Role, Spec},
};

/// One product that a layer wants: what, and where the result goes.
pub(super) struct Want<'out> {
    pub(super) role: Role,
    pub(super) out: &'out mut [f32],
    /// Elements of one row of `out`.
    pub(super) stride: usize,
}

/// How far a product got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Done,
    /// A plan waits at the [`Preemption`]; what is left begins here.
    Paused(Place),
}

/// Why a product could not be made.
pub(super) enum Failure {
    Missing(Missing, Arc<str>),
    /// The layer has no such matrix, which the spec excludes.
    NoMatrix,
    /// Its result has NaN or infinity in it.
    NotFinite,
    /// The checkpoint wants no more.
    Stopped,
}

/// What products start from.
#[derive(Clone, Copy)]
pub(super) struct Input<'input> {
    pub(super) floats: &'input [f32],
    pub(super) prepared: &'input Prepared,
    pub(super) rows: usize,
}

impl Weights {
    /// Multiplies `input` with some matrices of a layer, which are in the part of `at`, from there on.
    pub(super) fn project(
        &self,
        backend: &dyn Backend,
        (spec, layout): (&LayerSpec, &Layout),
        wants: &mut [Want<'_>],
        input: Input<'_>,
        at: Place,
        preemption: &mut Preemption<'_>,
    ) -> Result<Progress, Failure> {
        let mut results = Vec::with_capacity(wants.len());
        for want in wants {
            let (number, matrix) = spec.matrix(want.role).ok_or(Failure::NoMatrix)?;
            results.push(Results {
                number,
                dtype: matrix.tensor.dtype,
                columns: matrix.columns,
                stride: want.stride,
                out: &mut *want.out,
            });
        }
        self.multiply(backend, at, layout, &mut results, input, preemption)
    }

    /// Logits of one token: the products of `input` with all rows of the head, from `from` on.
    pub(super) fn head(
        &self,
        backend: &dyn Backend,
        (spec, layout): (&Spec, &Layout),
        logits: &mut [f32],
        input: Input<'_>,
        from: Place,
        preemption: &mut Preemption<'_>,
    ) -> Result<Progress, Failure> {
        let mut results = [Results {
            number: 0,
            dtype: spec.head.dtype,
            columns: spec.width,
            stride: spec.vocabulary,
            out: logits,
        }];
        let mut at = from;
        while at.part < layout.head.end {
            match preemption.check_if_due() {
                Preempt::No => {}
                Preempt::Pause => return Ok(Progress::Paused(at)),
                Preempt::Stop => return Err(Failure::Stopped),
            }
            // Resident tiles that follow each other are computed in one go.
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
                if let Progress::Paused(at) = self.multiply(backend, at, layout, &mut results, input, preemption)? {
                    return Ok(Progress::Paused(at));
                }
                at = Place {
                    part: at.part + 1,
                    piece: 0,
                };
                continue;
            }
            let mut rows = Vec::with_capacity(resident);
            for number in at.part..at.part + resident {
                self.resident_rows(number, layout, &mut rows)?;
            }
            let mut jobs = jobs_of(&mut results, &rows).ok_or(Failure::NoMatrix)?;
            backend.project(&mut jobs, input.floats, input.prepared, input.rows);
            at.part += resident;
        }
        Ok(Progress::Done)
    }

    /// Adds the matrices of a resident part to `rows`.
    fn resident_rows<'memory>(
        &'memory self,
        part: usize,
        layout: &Layout,
        rows: &mut Vec<Rows<'memory>>,
    ) -> Result<(), Failure> {
        let (arena, part) = self.arena(part).zip(layout.parts.get(part)).ok_or(Failure::NoMatrix)?;
        for slab in &part.slabs {
            rows.push(Rows {
                matrix: slab.matrix,
                row: slab.row,
                rows: slab.rows,
                bytes: arena.slice(slab.offset, slab.extent.bytes).ok_or(Failure::NoMatrix)?,
            });
        }
        Ok(())
    }

    /// Rows of a resident part that make up `pieces`, which are in the order of its slabs. Of the head a part may have rows
    /// with others between them that are not there.
    fn rows_of_pieces<'memory>(
        arena: &'memory Mapping,
        part: &PartLayout,
        pieces: &[(usize, &Piece)],
        rows: &mut Vec<Rows<'memory>>,
    ) -> Result<(), Failure> {
        rows.clear();
        let slab_of = |piece: &Piece| {
            part.slabs
                .iter()
                .position(|slab| slab.matrix == piece.matrix && (slab.row..slab.row + slab.rows).contains(&piece.row))
        };
        for run in pieces.chunk_by(|(_, one), (_, next)| slab_of(one) == slab_of(next)) {
            let first = run.first().map(|(_, piece)| *piece).ok_or(Failure::NoMatrix)?;
            let slab = slab_of(first).and_then(|slab| part.slabs.get(slab));
            let slab = slab.ok_or(Failure::NoMatrix)?;
            let count: usize = run.iter().map(|(_, piece)| piece.rows).sum();
            let offset = slab.offset + (first.row - slab.row) * slab.row_bytes;
            rows.push(Rows {
                matrix: first.matrix,
                row: first.row,
                rows: count,
                bytes: arena.slice(offset, count * slab.row_bytes).ok_or(Failure::NoMatrix)?,
            });
        }
        Ok(())
    }

    /// Multiplies `input` with those matrices of a part that have a result in `results`, from a piece on.
    fn multiply(
        &self,
        backend: &dyn Backend,
        at: Place,
        layout: &Layout,
        results: &mut [Results<'_>],
        input: Input<'_>,
        preemption: &mut Preemption<'_>,
    ) -> Result<Progress, Failure> {
        let part = layout.parts.get(at.part).ok_or(Failure::NoMatrix)?;
        let mut rows = Vec::new();
        let arena = self.arena(at.part);
        if arena.is_some() && input.rows == 1 && at.piece == 0 {
            // A token takes less than a slice for it.
            self.resident_rows(at.part, layout, &mut rows)?;
            let mut jobs = jobs_of(results, &rows).ok_or(Failure::NoMatrix)?;
            backend.project(&mut jobs, input.floats, input.prepared, input.rows);
            return Ok(Progress::Done);
        }
        let pieces: Vec<(usize, &Piece)> = part
            .pieces
            .iter()
            .enumerate()
            .skip(at.piece)
            .filter(|(_, piece)| results.iter().any(|result| result.number == piece.matrix))
            .collect();
        let work_of = |piece: &Piece| {
            let columns = results.iter().find(|result| result.number == piece.matrix);
            (piece.rows * columns.map_or(0, |result| result.columns) * input.rows) as u64
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
            let Some(arena) = arena else {
                match self.multiply_streamed(
                    backend,
                    at.part,
                    pieces.get(done..).unwrap_or_default(),
                    results,
                    input,
                    preemption,
                )? {
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
            Self::rows_of_pieces(arena, part, slice, &mut rows)?;
            let began = Instant::now();
            let mut jobs = jobs_of(results, &rows).ok_or(Failure::NoMatrix)?;
            backend.project(&mut jobs, input.floats, input.prepared, input.rows);
            let work = works.iter().skip(done).take(count).sum();
            preemption.estimators.products.learn(work, began.elapsed());
            done += count;
        }
        Ok(Progress::Done)
    }

    /// Multiplies `input` with the first of `pieces`, and with one token also with those behind it that are there; says how
    /// many it were, or nothing when a plan came while the disk was waited for.
    fn multiply_streamed(
        &self,
        backend: &dyn Backend,
        index: usize,
        pieces: &[(usize, &Piece)],
        results: &mut [Results<'_>],
        input: Input<'_>,
        preemption: &mut Preemption<'_>,
    ) -> Result<Option<usize>, Failure> {
        let (at, piece) = pieces.first().ok_or(Failure::NoMatrix)?;
        let Some((stream, base)) = self.streamed(index) else {
            let hung = self.hung().ok_or(Failure::NoMatrix)?;
            return Err(Failure::Missing(Missing::Stalled(hung), Arc::clone(&piece.extent.what)));
        };
        // With one token, what is there already is computed in one go; with several, rows of the result interleave, and a
        // piece is work enough.
        let most = if input.rows == 1 { pieces.len() } else { 1 };
        let asked = Instant::now();
        let acquired = stream.acquire(base + at, most, &mut || preemption.check() == Preempt::No);
        self.note_waited(asked.elapsed());
        let ready = match acquired {
            Ok(ready) => ready,
            Err(Missing::Stopped) if preemption.check() == Preempt::Pause => return Ok(None),
            Err(Missing::Stopped) => return Err(Failure::Stopped),
            Err(missing) => return Err(Failure::Missing(missing, Arc::clone(&piece.extent.what))),
        };
        let rows = pieces.iter().zip(ready.iter()).map(|((_, piece), bytes)| Rows {
            matrix: piece.matrix,
            row: piece.row,
            rows: piece.rows,
            bytes,
        });
        let rows: Vec<Rows<'_>> = rows.collect();
        let mut jobs = jobs_of(results, &rows).ok_or(Failure::NoMatrix)?;
        backend.project(&mut jobs, input.floats, input.prepared, input.rows);
        Ok(Some(ready.len()))
    }
}

/// Where the products with one matrix go.
struct Results<'out> {
    /// Index among the layer's matrices; 0 in the head.
    number: usize,
    dtype: GgmlDType,
    columns: usize,
    /// Elements of one row of `out`.
    stride: usize,
    out: &'out mut [f32],
}

/// Rows of a matrix in memory.
struct Rows<'memory> {
    /// Index among the layer's matrices; 0 in the head.
    matrix: usize,
    row: usize,
    rows: usize,
    bytes: &'memory [u8],
}

/// Products with `rows`, which are in the order of their matrices; those without a result are left out. Rows of one
/// matrix in several places share its result: that is for one token only.
fn jobs_of<'job>(results: &'job mut [Results<'_>], rows: &[Rows<'job>]) -> Option<Vec<Projection<'job>>> {
    let mut jobs = Vec::with_capacity(rows.len());
    for result in results {
        let mut rest: &mut [f32] = &mut *result.out;
        let mut from = 0;
        let mut mine = rows.iter().filter(|rows| rows.matrix == result.number).peekable();
        while let Some(rows) = mine.next() {
            let end = rows.row + rows.rows;
            let out = if mine.peek().is_none() {
                std::mem::take(&mut rest)
            } else {
                let (out, behind) = std::mem::take(&mut rest).split_at_mut_checked(end - from)?;
                rest = behind;
                out
            };
            jobs.push(Projection {
                weight: Weight {
                    bytes: rows.bytes,
                    dtype: result.dtype,
                    rows: rows.rows,
                    columns: result.columns,
                },
                out,
                stride: result.stride,
                first: rows.row - from,
            });
            from = end;
        }
    }
    Some(jobs)
}

/// Bytes of the head that are multiplied before commands are looked for: 8 ms of reading at 32 GB/s.
const HEAD_RUN_MAX: usize = 256 << 20;
