//! Weights of an encoder, all in memory.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use crate::{
    arena::Backing,
    backend::{Backend, Buffer, DeviceError, Operation, Row, RowBytes, View, Widen},
    disk::{DiskTimeout, DiskWatch, WatchedWork},
    error::{LoadError, LoadErrorKind},
    gguf::{Header, TensorInfo},
    model::refuse_zeros,
    reader::{Extent, Fetcher, Missing, Wanted, WeightFile},
    spec::EncoderSpec,
};
use cotenant_units::Bytes;

/// A file whose header and vectors were read, before its matrices.
pub(super) struct EncoderFile {
    pub(super) spec: EncoderSpec,
    file: WeightFile,
    vectors: Vec<Vec<u8>>,
}

impl EncoderFile {
    /// Reads the file at `path`; `None` if it is no encoder.
    ///
    /// # Errors
    /// When the engine cannot compute with the file, or the disk does not respond.
    pub(super) fn read(path: &Path) -> Result<Option<(Header, Self)>, LoadError> {
        let theirs = path.to_owned();
        let read = move |watch: &DiskWatch| Self::read_watched(&theirs, watch);
        let work = WatchedWork::start(&DiskWatch::default(), read);
        let work = work.map_err(|error| LoadError::new(path, LoadErrorKind::Threads(error)))?;
        work.wait(DiskTimeout::default())
            .unwrap_or_else(|(stalled, left)| {
                Err(LoadError::new(path, stalled.into()).leaving(left))
            })
    }

    fn read_watched(path: &Path, watch: &DiskWatch) -> Result<Option<(Header, Self)>, LoadError> {
        let (header, files) = Header::read_watched(path, watch)?;
        if !EncoderSpec::is_of(&header) {
            return Ok(None);
        }
        let read = || {
            let spec = EncoderSpec::read(&header)?;
            let file = WeightFile::of(header.parts(), files, watch)?;
            refuse_zeros(&header, &file, watch)?;
            let mut vectors = Vec::new();
            for tensor in spec.vectors() {
                let mut bytes = vec![0; tensor.bytes.as_len()];
                file.read_expected(&extent_of(tensor), &mut bytes, watch)?;
                vectors.push(bytes);
            }
            file.forget_all();
            file.check_unchanged(watch)?;
            Ok((spec, file, vectors))
        };
        let (spec, file, vectors) = read().map_err(|kind| LoadError::new(path, kind))?;
        let file = Self {
            spec,
            file,
            vectors,
        };
        Ok(Some((header, file)))
    }

    /// Reads the matrices, and returns all weights.
    ///
    /// # Errors
    /// When memory cannot be allocated, or the matrices cannot be read.
    pub(super) fn load(self, backend: &mut dyn Backend) -> Result<Weights, LoadErrorKind> {
        let Self {
            spec,
            file,
            vectors,
        } = self;
        let mut views = BTreeMap::new();
        let extents: Vec<Extent> = spec.matrices().map(extent_of).collect();
        let arena = extents.iter().map(Extent::aligned_bytes).sum();
        let arena = allocate(backend, "the weights", arena)?;
        let fetcher = Fetcher::start(Arc::new(file), Arc::clone(arena.shared()));
        let fetcher = fetcher.map_err(LoadErrorKind::Threads)?;
        let mut at = 0;
        for (number, extent) in extents.iter().enumerate() {
            views.insert(
                extent.offset,
                arena.view_bytes(at + extent.lead(), extent.bytes),
            );
            fetcher.ask(Wanted {
                number,
                extents: vec![(extent.clone(), at)],
            });
            at += extent.aligned_bytes();
        }
        for number in 0..extents.len() {
            let read = fetcher.wait(number, DiskTimeout::default(), &mut || true);
            read.map_err(|missing| match missing {
                Missing::Failed(error) => error.into(),
                Missing::Stalled(stalled) => LoadErrorKind::from(stalled),
                Missing::Stopped => LoadErrorKind::Replaced,
            })?;
        }
        let floats = |tensor: &TensorInfo| tensor.bytes.as_len() / tensor.dtype.type_size();
        let all: usize = spec.vectors().map(floats).sum();
        let fixed = allocate(backend, "norms and biases", (all + spec.width) * 4)?;
        let mut at = 0;
        for (tensor, bytes) in spec.vectors().zip(&vectors) {
            let to = fixed.view(at..at + floats(tensor));
            at += floats(tensor);
            widen(
                backend,
                tensor,
                [(RowBytes::Host(bytes.into()), to.clone())],
            )?;
            views.insert(tensor.offset, to);
        }
        let weights = Weights {
            views,
            sentence: fixed.view(at..at + spec.width),
        };
        if let Some(types) = &spec.types {
            let row = weights.row(types, spec.width, 0)?;
            widen(backend, types, [(row, weights.sentence.clone())])?;
        }
        Ok(weights)
    }
}

/// Weights by the place of their tensors in the file.
pub(super) struct Weights {
    views: BTreeMap<u64, View>,
    /// Added to each token's embedding; zero if the model has no kinds of sentences.
    pub(super) sentence: View,
}

impl Weights {
    /// A matrix in the file's format, or a vector of `f32`.
    pub(super) fn of(&self, tensor: &TensorInfo) -> Result<View, DeviceError> {
        let view = self.views.get(&tensor.offset).cloned();
        view.ok_or_else(|| DeviceError::new(format!("`{}` is not in memory", tensor.name)))
    }

    /// Row `row` of a table with `width` columns.
    pub(super) fn row(
        &self,
        table: &TensorInfo,
        width: usize,
        row: usize,
    ) -> Result<RowBytes<'static>, DeviceError> {
        let bytes = width / table.dtype.block_size() * table.dtype.type_size();
        let view = self.of(table)?.part(row * bytes, bytes);
        Ok(RowBytes::View(view))
    }
}

/// Queues the conversion of rows to `f32`.
pub(super) fn widen<'rows>(
    backend: &mut dyn Backend,
    table: &TensorInfo,
    rows: impl IntoIterator<Item = (RowBytes<'rows>, View)>,
) -> Result<(), DeviceError> {
    let rows = rows.into_iter().map(|(from, to)| Row { from, to });
    backend.queue(Operation::Widen(Widen {
        rows: rows.collect(),
        dtype: table.dtype,
        scale: 1.0,
    }))
}

/// Memory whose pages are populated at their first use.
pub(super) fn allocate(
    backend: &dyn Backend,
    what: &'static str,
    bytes: usize,
) -> Result<Buffer, LoadErrorKind> {
    let bytes = Bytes::of_len(bytes);
    let allocated = backend.allocate(bytes, Backing::OnTouch);
    allocated.map_err(|source| LoadErrorKind::Allocate {
        what: what.to_owned(),
        bytes,
        source,
    })
}

fn extent_of(tensor: &TensorInfo) -> Extent {
    Extent {
        what: tensor.name.as_str().into(),
        offset: tensor.offset,
        bytes: tensor.bytes.as_len(),
    }
}
