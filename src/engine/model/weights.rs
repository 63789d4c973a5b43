//! Weights where they are now: in arenas of resident layers, in the ring, or in the file.

use std::{io, sync::Arc};

use crate::{
    engine::{
        arena::{Backing, Mapping},
        backend::{Backend, Prepared, Projection, Weight},
        error::{LoadErrorKind, ReadError},
        reader::{Extent, Missing, Ready, Source, Stream, WeightFile},
        shape::{FixedLayout, LayerLayout, Layout, Piece},
        spec::{LayerSpec, Role, Spec, Vector},
    },
    units::Bytes,
};

/// All weights of a model.
pub(super) struct Weights {
    file: Arc<WeightFile>,
    fixed: Mapping,
    layers: Vec<Option<Mapping>>,
    stream: Option<Stream>,
    /// For each layer the index of its first piece in the stream's schedule.
    first_piece: Vec<usize>,
}

/// One product that a layer wants: what, and where the result goes.
pub(super) struct Want<'out> {
    pub(super) role: Role,
    pub(super) out: &'out mut [f32],
    /// Elements of one row of `out`.
    pub(super) stride: usize,
}

/// Why a product could not be made.
pub(super) enum Failure {
    Missing(Missing, Arc<str>),
    /// The layer has no such matrix, which the spec excludes.
    NoMatrix,
}

/// What products start from.
#[derive(Clone, Copy)]
pub(super) struct Input<'input> {
    pub(super) floats: &'input [f32],
    pub(super) prepared: &'input Prepared,
    pub(super) rows: usize,
}

impl Weights {
    pub(super) fn new(file: Arc<WeightFile>, fixed: Mapping, layers: usize) -> Self {
        Self {
            file,
            fixed,
            layers: (0..layers).map(|_| None).collect(),
            stream: None,
            first_piece: vec![0; layers],
        }
    }

    /// Reads what is resident in every plan.
    pub(super) fn read_fixed(
        backend: &dyn Backend,
        file: &WeightFile,
        layout: &FixedLayout,
        spec: &Spec,
    ) -> Result<Mapping, LoadErrorKind> {
        let mut fixed = backend
            .allocate(layout.bytes, Backing::OnTouch)
            .map_err(|source| LoadErrorKind::Allocate {
                what: "the output head".to_owned(),
                bytes: layout.bytes,
                source,
            })?;
        read_run(file, &layout.head, &fixed, layout.head_target)?;
        let rope = spec.rope_factors.as_ref().zip(layout.rope_factors);
        let all = layout
            .vectors
            .iter()
            .flatten()
            .map(|(_, tensor, at)| (tensor, *at))
            .chain([(&spec.output_norm, layout.output_norm)])
            .chain(rope);
        let mut bytes = Vec::new();
        for (tensor, at) in all {
            bytes.resize(tensor.bytes.as_len(), 0);
            let extent = Extent {
                what: tensor.name.as_str().into(),
                offset: tensor.offset,
                bytes: bytes.len(),
            };
            file.read_small(&extent, &mut bytes)?;
            let elements = bytes.len() / tensor.dtype.type_size();
            if let Some(target) = fixed.floats_mut().get_mut(at..at + elements) {
                backend.dequantize(tensor.dtype, &bytes, target);
            }
        }
        file.forget_all();
        Ok(fixed)
    }

    /// Reads layer `index` into an arena of its own.
    pub(super) fn grow(
        &mut self,
        backend: &dyn Backend,
        index: usize,
        layout: &LayerLayout,
    ) -> Result<Bytes, GrowError> {
        let arena = backend
            .allocate(layout.arena, Backing::OnTouch)
            .map_err(GrowError::Allocate)?;
        for (extent, target) in &layout.runs {
            // In steps that end at page boundaries, so that a slow disk never holds one call for long.
            let end = extent.offset + extent.bytes as u64;
            let mut from = extent.offset;
            while from < end {
                let to = end.min(from - from % READ_MAX + READ_MAX);
                let part = Extent {
                    what: Arc::clone(&extent.what),
                    offset: from,
                    bytes: usize::try_from(to - from).unwrap_or(usize::MAX),
                };
                let ahead = usize::try_from(part.aligned_offset() - extent.aligned_offset()).unwrap_or(usize::MAX);
                read_run(&self.file, &part, &arena, target + ahead).map_err(GrowError::Read)?;
                from = to;
            }
        }
        let bytes = arena.bytes();
        if let Some(slot) = self.layers.get_mut(index) {
            *slot = Some(arena);
        }
        Ok(bytes)
    }

    /// Gives layer `index` up; says what was mapped and what of it was in memory.
    pub(super) fn shed(&mut self, index: usize) -> (Bytes, Bytes) {
        match self.layers.get_mut(index).and_then(Option::take) {
            Some(arena) => (arena.bytes(), arena.release()),
            None => (Bytes::ZERO, Bytes::ZERO),
        }
    }

    /// Starts, restarts or stops the stream so that it brings the layers that are not resident, beginning with `layer`.
    ///
    /// Returns what was mapped for it, and what was given up of it: asked and freed.
    pub(super) fn stream(&mut self, layout: &Layout, layer: usize) -> io::Result<(Bytes, Bytes, Bytes)> {
        let mut schedule: Vec<Extent> = Vec::new();
        for (index, parts) in layout.layers.iter().enumerate() {
            if let Some(first) = self.first_piece.get_mut(index) {
                *first = schedule.len();
            }
            if self.layers.get(index).is_some_and(Option::is_none) {
                schedule.extend(parts.pieces.iter().map(|piece| piece.extent.clone()));
            }
        }
        if schedule.is_empty() {
            return Ok(match self.stream.take() {
                None => (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO),
                Some(stream) => {
                    let asked = stream.ring().bytes();
                    (Bytes::ZERO, asked, stream.release_ring())
                }
            });
        }
        let first = self.first_piece.get(layer).copied().unwrap_or(0) % schedule.len();
        let schedule: Arc<[Extent]> = schedule.into();
        if let Some(stream) = &mut self.stream {
            stream.restart(schedule, first)?;
            return Ok((Bytes::ZERO, Bytes::ZERO, Bytes::ZERO));
        }
        let source: Arc<dyn Source> = Arc::<WeightFile>::clone(&self.file);
        let stream = Stream::start(source, layout.ring, schedule, first)?;
        let grown = stream.ring().bytes();
        self.stream = Some(stream);
        Ok((grown, Bytes::ZERO, Bytes::ZERO))
    }

    /// Multiplies `input` with some matrices of a layer.
    pub(super) fn project(
        &self,
        backend: &dyn Backend,
        index: usize,
        (spec, layout): (&LayerSpec, &LayerLayout),
        wants: &mut [Want<'_>],
        input: Input<'_>,
        patience: &mut dyn FnMut() -> bool,
    ) -> Result<(), Failure> {
        if let Some(arena) = self.arena(index) {
            let mut jobs = Vec::with_capacity(wants.len());
            for want in wants.iter_mut() {
                let (number, matrix) = spec.matrix(want.role).ok_or(Failure::NoMatrix)?;
                let offset = *layout.offsets.get(number).ok_or(Failure::NoMatrix)?;
                let bytes = arena
                    .slice(offset, matrix.tensor.bytes.as_len())
                    .ok_or(Failure::NoMatrix)?;
                jobs.push(Projection {
                    weight: Weight {
                        bytes,
                        dtype: matrix.tensor.dtype,
                        rows: matrix.rows,
                        columns: matrix.columns,
                    },
                    out: &mut *want.out,
                    stride: want.stride,
                    first: 0,
                });
            }
            backend.project(&mut jobs, input.floats, input.prepared, input.rows);
            return Ok(());
        }
        let stream = self.stream.as_ref().ok_or(Failure::NoMatrix)?;
        let base = self.first_piece.get(index).copied().unwrap_or(0);
        let numbers: Vec<usize> = wants
            .iter()
            .filter_map(|want| spec.matrix(want.role).map(|(number, _)| number))
            .collect();
        let pieces: Vec<(usize, &Piece)> = layout
            .pieces
            .iter()
            .enumerate()
            .filter(|(_, piece)| numbers.contains(&piece.matrix))
            .collect();
        let mut ready = Vec::new();
        let mut done = 0;
        while let Some((at, piece)) = pieces.get(done) {
            // With one token, what is there already is computed in one go; with several, rows of the result interleave,
            // and a piece is work enough.
            let most = if input.rows == 1 { pieces.len() - done } else { 1 };
            stream
                .acquire(base + at, most, &mut ready, patience)
                .map_err(|missing| Failure::Missing(missing, Arc::clone(&piece.extent.what)))?;
            let there = pieces.get(done..done + ready.len()).unwrap_or_default();
            let jobs = jobs_of(stream, spec, there.iter().map(|(_, piece)| *piece), &ready, wants);
            backend.project(
                &mut jobs.ok_or(Failure::NoMatrix)?,
                input.floats,
                input.prepared,
                input.rows,
            );
            stream.release(&ready);
            done += ready.len();
        }
        Ok(())
    }

    /// Turns the embedding of `token` into `f32`: from the head when that is the same tensor, else from the file.
    pub(super) fn embed(
        &self,
        backend: &dyn Backend,
        spec: &Spec,
        layout: &FixedLayout,
        token: u32,
        out: &mut [f32],
    ) -> Result<(), ReadError> {
        let tensor = &spec.embedding;
        let row = spec.width / tensor.dtype.block_size() * tensor.dtype.type_size();
        let start = token as usize * row;
        if spec.tied {
            if let Some(bytes) = self.fixed.slice(layout.head_offset + start, row) {
                backend.dequantize(tensor.dtype, bytes, out);
            }
            return Ok(());
        }
        let mut bytes = vec![0u8; row];
        let extent = Extent {
            what: tensor.name.as_str().into(),
            offset: tensor.offset + start as u64,
            bytes: row,
        };
        self.file.read_small(&extent, &mut bytes)?;
        backend.dequantize(tensor.dtype, &bytes, out);
        Ok(())
    }

    /// The output head.
    pub(super) fn head(&self, spec: &Spec, layout: &FixedLayout) -> Weight<'_> {
        Weight {
            bytes: self
                .fixed
                .slice(layout.head_offset, layout.head.bytes)
                .unwrap_or_default(),
            dtype: spec.head.dtype,
            rows: spec.vocabulary,
            columns: spec.width,
        }
    }

    /// A vector of layer `index`; empty when the architecture has none of the kind.
    pub(super) fn vector(&self, layout: &FixedLayout, index: usize, vector: Vector) -> Option<&[f32]> {
        let (_, tensor, at) = layout.vectors.get(index)?.iter().find(|(kind, _, _)| *kind == vector)?;
        let elements: u64 = tensor.dims.iter().product();
        self.fixed.floats().get(*at..*at + usize::try_from(elements).ok()?)
    }

    /// `len` elements from `at` of the vectors.
    pub(super) fn fixed_floats(&self, at: usize, len: usize) -> &[f32] {
        self.fixed.floats().get(at..at + len).unwrap_or_default()
    }

    pub(super) fn arena(&self, index: usize) -> Option<&Mapping> {
        self.layers.get(index)?.as_ref()
    }

    pub(super) const fn fixed(&self) -> &Mapping {
        &self.fixed
    }

    /// Whether layers have to be streamed, and are not.
    pub(super) fn needs_stream(&self) -> bool {
        self.stream.is_none() && self.layers.iter().any(Option::is_none)
    }

    pub(super) fn ring_bytes(&self) -> Bytes {
        self.stream.as_ref().map_or(Bytes::ZERO, |stream| stream.ring().bytes())
    }

    pub(super) fn resident(&self) -> Bytes {
        let layers: Bytes = self.layers.iter().flatten().map(Mapping::resident).sum();
        let ring = self
            .stream
            .as_ref()
            .map_or(Bytes::ZERO, |stream| stream.ring().resident());
        layers + self.fixed.resident() + ring
    }
}

/// Products with the `pieces` that are `ready`, which are in the order of the matrices. Those of one matrix share its
/// result: only one of them when there are several tokens.
fn jobs_of<'job>(
    stream: &'job Stream,
    spec: &LayerSpec,
    pieces: impl Iterator<Item = &'job Piece>,
    ready: &[Ready],
    wants: &'job mut [Want<'_>],
) -> Option<Vec<Projection<'job>>> {
    // Of each result what is not given to a piece yet, and the row at which that starts.
    let mut outs: Vec<(usize, usize, &mut [f32], usize)> = Vec::with_capacity(wants.len());
    for want in wants {
        let (number, _) = spec.matrix(want.role)?;
        outs.push((number, 0, &mut *want.out, want.stride));
    }
    let mut jobs = Vec::with_capacity(ready.len());
    let mut pieces = pieces.zip(ready).peekable();
    while let Some((piece, ready)) = pieces.next() {
        let matrix = spec.matrices.get(piece.matrix)?;
        let (_, from, out, stride) = outs.iter_mut().find(|(number, ..)| *number == piece.matrix)?;
        let is_last = pieces.peek().is_none_or(|(next, _)| next.matrix != piece.matrix);
        let whole = std::mem::take(out);
        let mine = if is_last {
            whole
        } else {
            let (mine, rest) = whole.split_at_mut_checked(piece.row + piece.rows - *from)?;
            *out = rest;
            mine
        };
        jobs.push(Projection {
            weight: Weight {
                bytes: stream.ring().slice(ready.offset, piece.extent.bytes)?,
                dtype: matrix.tensor.dtype,
                rows: piece.rows,
                columns: matrix.columns,
            },
            out: mine,
            stride: *stride,
            first: piece.row - *from,
        });
        *from = piece.row + piece.rows;
    }
    Some(jobs)
}

/// Why a layer could not be read into memory.
pub(super) enum GrowError {
    Allocate(io::Error),
    Read(ReadError),
}

/// Reads `extent` to `at` of a mapping that nobody else has yet.
fn read_run(file: &WeightFile, extent: &Extent, memory: &Mapping, at: usize) -> Result<(), ReadError> {
    let target = memory.range(at, extent.aligned_bytes()).ok_or_else(|| ReadError {
        path: std::path::PathBuf::new(),
        what: extent.what.to_string(),
        offset: extent.offset,
        bytes: Bytes::of_len(extent.bytes),
        problem: "it does not fit its arena".to_owned(),
    })?;
    // SAFETY: inside a mapping that is not yet shared, at a page boundary, since arenas are laid out so.
    unsafe { file.read(extent, target) }
}

/// The most that one read call asks for; larger ones reach no higher rate. A multiple of the page size.
const READ_MAX: u64 = 4 << 20;
