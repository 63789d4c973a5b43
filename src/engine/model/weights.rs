//! Weights in arenas of resident parts, in the ring, or in the file.

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    experts::Experts,
    growth::{self, GrowError, Growing},
};
use crate::{
    arena::{Backing, SharedMapping},
    backend::{Backend, Buffer, DeviceError, Fence, Operation, Row, RowBytes, View, Widen},
    disk::{DiskTimeout, DiskWatch, Retained, Stalled, WatchedWork},
    error::LoadErrorKind,
    gguf::TensorInfo,
    reader::{Extent, Missing, RowReader, Source, Stream, WantedRows, WeightFile},
    shape::{FixedLayout, Layout, PartLayout},
    spec::{Spec, Vector},
};
use cotenant_units::Bytes;

/// Position of a pass in the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) part: usize,
    /// Index among the part's pieces.
    pub(super) piece: usize,
}

/// All weights of a model.
pub(super) struct Weights {
    file: Arc<dyn Source>,
    fixed: Buffer,
    /// Divisors of the rotary angles, one per pair, if the model has them.
    factors: Option<Vec<f32>>,
    /// Arena of each part; `None` if it is not resident.
    arenas: Vec<Option<Buffer>>,
    /// Experts of a mixture in them.
    experts: Option<Experts>,
    stream: Option<Stream>,
    /// Pieces in use by operations in flight: a fence, and the number of pieces that it guards.
    lent: VecDeque<(Fence, usize)>,
    /// Replaced or released rings that a hanging read keeps until it returns.
    rings_left: Retained,
    /// Time since which there is no stream because reads hang.
    hung: Option<Instant>,
    /// Arenas of an abandoned growth that hanging reads keep.
    arenas_left: Retained,
    /// Limit after which the disk counts as stalled.
    limit: DiskTimeout,
    /// Reader of embeddings, from its first use on.
    rows: Option<RowReader>,
    /// Whether the stream was started before the model and has served no request yet.
    begun: bool,
    /// Index of each part's first piece in the stream's schedule.
    first_piece: Vec<usize>,
    /// The first piece of the head.
    head_piece: usize,
    /// Time that kernels have waited for the readers.
    waited: Duration,
}

impl Weights {
    /// Creates weights with the stream started by [`begin`]; `limit` is the time after which the disk counts as
    /// stalled.
    pub(super) fn new(
        file: Arc<dyn Source>,
        (fixed, factors): (Buffer, Option<Vec<f32>>),
        parts: usize,
        experts: Option<Experts>,
        (stream, limit): (Option<Stream>, DiskTimeout),
    ) -> Self {
        Self {
            file,
            fixed,
            factors,
            arenas: (0..parts).map(|_| None).collect(),
            experts,
            begun: stream.is_some(),
            stream,
            lent: VecDeque::with_capacity(BATCHES_MAX + 1),
            rings_left: Retained::default(),
            hung: None,
            arenas_left: Retained::default(),
            limit,
            rows: None,
            first_piece: vec![0; parts],
            head_piece: 0,
            waited: Duration::ZERO,
        }
    }

    /// Copies the vectors that are resident in every plan to one buffer; also returns the divisors of the rotary
    /// angles.
    pub(super) fn fixed_of(
        backend: &mut dyn Backend,
        layout: &FixedLayout,
        spec: &Spec,
        read: &[(usize, Vec<u8>)],
    ) -> Result<(Buffer, Option<Vec<f32>>), LoadErrorKind> {
        let fixed = backend
            .allocate(layout.bytes, Backing::OnTouch)
            .map_err(|source| LoadErrorKind::Allocate {
                what: "norms and biases".to_owned(),
                bytes: layout.bytes,
                source,
            })?;
        let all = vectors_of(layout, spec);
        for (number, bytes) in read {
            let Some((tensor, at)) = all.get(*number) else {
                continue;
            };
            let elements = bytes.len() / tensor.dtype.type_size();
            let row = Row {
                from: RowBytes::Host(bytes.as_slice().into()),
                to: fixed.view(*at..*at + elements),
            };
            backend.queue(Operation::Widen(Widen {
                rows: std::slice::from_ref(&row).into(),
                dtype: tensor.dtype,
                scale: 1.0,
            }))?;
        }
        let half = spec.attention.rotary / 2;
        let factors = match layout.rope_factors {
            Some(at) => Some(backend.read(&fixed, at..at + half)?.to_vec()),
            None => None,
        };
        Ok((fixed, factors))
    }

    /// Reads parts into arenas of their own; returns the bytes added, and the reason if parts are missing. Growth that
    /// takes long is preempted by other `wanted` work, which is no failure unless the disk hangs.
    pub(super) fn grow(
        &mut self,
        backend: &dyn Backend,
        parts: &[(usize, &PartLayout)],
        wanted: &mut dyn FnMut() -> bool,
    ) -> (Bytes, Result<(), (usize, GrowError)>) {
        if let Some((index, layout)) = parts.first()
            && self.arenas_left.hangs()
        {
            // More reads would hang too.
            let stalled = self
                .limit
                .stalled(self.arenas_left.hung(), &Growing::what(layout));
            return (Bytes::ZERO, Err((*index, GrowError::Stalled(stalled))));
        }
        let mut result = Ok(());
        let mut growing = Vec::new();
        for (index, layout) in parts {
            match backend.part(layout.arena) {
                Ok(arena) => growing.push(Growing::new(*index, layout, arena)),
                Err(error) => {
                    result = Err((*index, GrowError::Allocate(error)));
                    break;
                }
            }
        }
        let indices: Vec<usize> = growing.iter().map(|part| part.index).collect();
        let read = growth::read_parts(&self.file, growing, self.limit, wanted);
        if let Some(error) = read.failed {
            let index = indices.get(read.whole.len()).copied().unwrap_or_default();
            result = Err((index, error));
        }
        self.arenas_left = read.left;
        let mut grown = Bytes::ZERO;
        let has_pieces = |index: usize| {
            let layout = parts.iter().find(|(number, _)| *number == index);
            layout.is_none_or(|(_, layout)| !layout.pieces.is_empty())
        };
        for (index, arena) in indices.into_iter().zip(read.whole) {
            if !has_pieces(index) {
                // Another expert may need pages that the first one in its room does not.
                arena.populate();
            }
            if let Some(slot) = self.arenas.get_mut(index) {
                grown += arena.bytes();
                *slot = Some(arena);
            }
            if let Some(experts) = &mut self.experts {
                experts.filled(index);
            }
        }
        (grown, result)
    }

    /// Releases part `index`; returns the bytes mapped, and the bytes of these that were in memory.
    pub(super) fn shed(&mut self, index: usize) -> (Bytes, Bytes) {
        if let Some(experts) = &mut self.experts {
            experts.released(index);
        }
        match self.arenas.get_mut(index).and_then(Option::take) {
            Some(arena) => (arena.bytes(), arena.release()),
            None => (Bytes::ZERO, Bytes::ZERO),
        }
    }

    /// Starts, restarts or stops the stream so that it brings the parts that are not resident, beginning with `place`.
    /// Nothing queued may be in flight.
    ///
    /// While the disk hangs, at most one ring more than the plan's exists; then there may be no stream afterwards. That
    /// is no error of the plan: a pass that needs the stream reports it.
    ///
    /// Returns the bytes mapped for it, and the bytes released: requested and freed.
    pub(super) fn stream(
        &mut self,
        backend: &dyn Backend,
        layout: &Layout,
        place: Place,
    ) -> io::Result<(Bytes, Bytes, Bytes)> {
        let schedule = Schedule::of(layout, place, |part| {
            self.arenas.get(part).is_some_and(Option::is_none)
        });
        self.first_piece = schedule.first_piece;
        self.head_piece = schedule.head_piece;
        if schedule.extents.is_empty() {
            let (asked, freed) = self.stop_stream();
            self.hung = None;
            return Ok((Bytes::ZERO, asked, freed));
        }
        let begun = std::mem::take(&mut self.begun);
        let (extents, first) = (schedule.extents, schedule.first);
        // A stream that cannot be restarted is dropped: its pieces are not those of the new schedule.
        let started = match self.stream.take() {
            Some(stream) if begun && first == 0 && stream.reads(&extents) => {
                // Pages may still be missing, see `settle`.
                let grown = stream.ring_bytes();
                Ok((stream, grown))
            }
            Some(stream) => self
                .restarted(backend, stream, extents, first)
                .map(|stream| (stream, Bytes::ZERO)),
            None if self.rings_left.pieces() > LEFT_MAX => Err(io::ErrorKind::TimedOut.into()),
            None => {
                let ring = backend.ring(layout.ring, Backing::Now)?;
                let started = Stream::start(Arc::clone(&self.file), ring, extents.into(), first);
                started.map(|stream| {
                    let grown = stream.ring_bytes();
                    (stream, grown)
                })
            }
        };
        match started {
            Ok((mut stream, grown)) => {
                stream.set_limit(self.limit);
                self.hung = None;
                self.stream = Some(stream);
                Ok((grown, Bytes::ZERO, Bytes::ZERO))
            }
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                self.hung.get_or_insert_with(Instant::now);
                Ok((Bytes::ZERO, Bytes::ZERO, Bytes::ZERO))
            }
            Err(error) => Err(error),
        }
    }

    /// Stops the stream; returns the size of its ring, and the bytes of it that were in memory.
    pub(super) fn stop_stream(&mut self) -> (Bytes, Bytes) {
        self.stream
            .take()
            .map_or((Bytes::ZERO, Bytes::ZERO), |stream| {
                let (asked, mark) = (stream.ring_bytes(), stream.ring_mark());
                let freed = stream.release_ring();
                self.note_left(mark);
                (asked, freed)
            })
    }

    /// Waits until the whole ring is in memory.
    pub(super) fn settle(&self) {
        if let Some(stream) = &self.stream {
            stream.settle();
        }
    }

    /// Returns used pieces to the readers, and waits until at most `most` batches of them are in flight.
    pub(super) fn reclaim(
        &mut self,
        backend: &mut dyn Backend,
        most: usize,
    ) -> Result<(), DeviceError> {
        while let Some(&(fence, count)) = self.lent.front() {
            if self.lent.len() > most {
                backend.wait(fence)?;
            } else if !backend.done(fence)? {
                break;
            }
            self.lent.pop_front();
            if let Some(stream) = &self.stream {
                // SAFETY: the fence lies behind all operations that use these pieces, and has passed.
                unsafe { stream.release(count) };
            }
        }
        Ok(())
    }

    /// Records that the operations queued so far read `count` more pieces.
    pub(super) fn lend(
        &mut self,
        backend: &mut dyn Backend,
        count: usize,
    ) -> Result<(), DeviceError> {
        self.lent.push_back((backend.mark(), count));
        self.reclaim(backend, BATCHES_MAX)
    }

    /// Restarts the stream with another schedule.
    fn restarted(
        &mut self,
        backend: &dyn Backend,
        mut stream: Stream,
        extents: Vec<Extent>,
        first: usize,
    ) -> io::Result<Stream> {
        let mark = stream.ring_mark();
        let allowed = self.rings_left.pieces() < LEFT_MAX;
        let mut another = |bytes| {
            if allowed {
                backend.ring(bytes, Backing::Now)
            } else {
                Err(io::ErrorKind::TimedOut.into())
            }
        };
        let restarted = stream
            .restart(extents.into(), first, &mut another)
            .map(|()| stream);
        if !restarted
            .as_ref()
            .is_ok_and(|stream| mark.ptr_eq(&stream.ring_mark()))
        {
            self.note_left(mark);
        }
        restarted
    }

    /// Counts a ring that is no longer the stream's, while a hanging read keeps it.
    fn note_left(&mut self, ring: Weak<SharedMapping>) {
        self.rings_left.add(Retained::of([ring], Instant::now()));
    }

    /// Returns a stall error for `what` if there is no stream because reads hang.
    pub(super) fn hung(&self, what: &Arc<str>) -> Option<Stalled> {
        self.hung
            .map(|since| self.limit.stalled(since.elapsed(), what))
    }

    /// All memory that reads hanging since `began` or longer would keep if these weights were dropped.
    pub(super) fn kept(&self, began: Instant) -> Retained {
        let mut kept = Retained::of(self.stream.as_ref().map(Stream::ring_mark), began);
        if let Some(experts) = &self.experts {
            kept.add(experts.kept(began));
        }
        kept.add(self.rings_left.clone());
        kept.add(self.arenas_left.clone());
        kept
    }

    /// Bytes that hanging reads keep until they return.
    pub(super) fn left_bytes(&self) -> Bytes {
        self.rings_left.bytes() + self.arenas_left.bytes()
    }

    /// Sets whether the next pass ends with the head, so that readers do not read it needlessly.
    pub(super) fn expect_head(&self, wanted: bool) {
        if let Some(stream) = &self.stream {
            stream.set_end(if wanted { usize::MAX } else { self.head_piece });
        }
    }

    /// Returns the embedding of `token` if it is in memory: in the head, if the tensor is tied.
    pub(super) fn embedding(&self, spec: &Spec, layout: &Layout, token: u32) -> Option<View> {
        let number = token as usize;
        let row = spec.embedding_row();
        layout.head.clone().filter(|_| spec.tied).find_map(|part| {
            let mut slabs = layout.parts.get(part)?.slabs.iter();
            let slab = slabs.find(|slab| (slab.row..slab.row + slab.rows).contains(&number))?;
            let arena = self.arena(part)?;
            Some(arena.view_bytes(slab.offset + (number - slab.row) * row, row))
        })
    }

    /// Requests rows of `bytes` bytes of a matrix with embeddings from the file.
    pub(super) fn ask_for_rows(
        &mut self,
        (tensor, bytes): (&TensorInfo, usize),
        tokens: impl Iterator<Item = u32>,
    ) -> io::Result<()> {
        let reader = match self.rows.take() {
            Some(reader) => reader,
            None => RowReader::start(Arc::clone(&self.file))?,
        };
        reader.ask(WantedRows {
            what: tensor.name.as_str().into(),
            offsets: tokens
                .map(|token| tensor.offset + u64::from(token) * bytes as u64)
                .collect(),
            bytes,
        });
        self.rows = Some(reader);
        Ok(())
    }

    /// Waits for the requested embeddings.
    pub(super) fn rows_asked_for(
        &self,
        patience: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<u8>, Missing> {
        let reader = self.rows.as_ref();
        reader.map_or(Ok(Vec::new()), |reader| reader.wait(self.limit, patience))
    }

    /// Returns a vector of layer `index`, if the architecture has one of this kind.
    pub(super) fn vector(
        &self,
        layout: &FixedLayout,
        index: usize,
        vector: Vector,
    ) -> Option<View> {
        Some(self.fixed.view(layout.vector(index, vector)?))
    }

    /// Divisors of the rotary angles, if the model has them.
    pub(super) fn rope_factors(&self) -> Option<&[f32]> {
        self.factors.as_deref()
    }

    /// Index of a part's first piece in the stream's schedule, if there is a stream.
    pub(super) fn streamed(&self, part: usize) -> Option<usize> {
        self.stream.as_ref()?;
        self.first_piece.get(part).copied()
    }

    /// Waits for a piece, as [`Stream::acquire`].
    pub(super) fn acquire(
        &mut self,
        backend: &mut dyn Backend,
        first: usize,
        most: usize,
        patience: &mut dyn FnMut() -> bool,
    ) -> Result<Result<Vec<View>, Missing>, DeviceError> {
        if !self.stream.as_ref().is_some_and(|stream| stream.has(first)) {
            // Borrowed pieces may occupy the whole ring.
            self.reclaim(backend, 0)?;
        }
        let acquired = self
            .stream
            .as_ref()
            .map(|stream| stream.acquire(first, most, patience));
        Ok(acquired.unwrap_or(Err(Missing::Stopped)))
    }

    pub(super) fn arena(&self, index: usize) -> Option<&Buffer> {
        self.arenas.get(index)?.as_ref()
    }

    pub(super) const fn experts(&self) -> Option<&Experts> {
        self.experts.as_ref()
    }

    /// Time after which the disk counts as stalled.
    pub(super) const fn limit(&self) -> DiskTimeout {
        self.limit
    }

    /// Experts, and the time after which the disk counts as stalled.
    pub(super) const fn experts_by(&mut self) -> (DiskTimeout, Option<&mut Experts>) {
        (self.limit, self.experts.as_mut())
    }

    pub(super) const fn source(&self) -> &Arc<dyn Source> {
        &self.file
    }

    /// Rooms for experts that are not resident.
    pub(super) fn staging(&self) -> Option<&Buffer> {
        self.experts.as_ref().map(Experts::staging)
    }

    pub(super) const fn fixed(&self) -> &Buffer {
        &self.fixed
    }

    /// Replaces the source and the stall limit.
    #[cfg(test)]
    pub(super) fn read_from(&mut self, file: Arc<dyn Source>, limit: DiskTimeout) {
        self.limit = limit;
        self.file = file;
        self.rows = None;
    }

    /// Adds to the time that kernels have waited for the readers.
    pub(super) const fn note_waited(&mut self, time: Duration) {
        self.waited = self.waited.saturating_add(time);
    }

    /// Total time that kernels have waited for the readers.
    pub(super) const fn waited(&self) -> Duration {
        self.waited
    }

    /// Reads weights without computing; returns the bytes and the time, counted once the ring has been full. Reads all
    /// weights in turn, as far as time permits: rereading a few would measure a cache of the disk or host. The readers
    /// must be restarted before a pass.
    pub(super) fn read_alone(
        &mut self,
        backend: &mut dyn Backend,
        layout: &Layout,
        limit: Duration,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Option<(Bytes, Duration)> {
        let all = Schedule::of(layout, Place::default(), |_| true).extents;
        let pieces: Vec<usize> = all.iter().map(|extent| extent.bytes).collect();
        self.reclaim(backend, 0).ok()?;
        let stream = self.stream.take()?;
        let stream = self.restarted(backend, stream, all, 0).ok()?;
        let stream = &*self.stream.insert(stream);
        let (mut passed, mut filled) = (0, false);
        let (started, mut since) = (Instant::now(), Instant::now());
        let mut windows: Vec<(usize, Duration)> = Vec::new();
        let ring = layout.ring.as_len();
        for (index, bytes) in pieces.iter().enumerate().cycle() {
            stream.pass(index, go_on).ok()?;
            passed += bytes;
            // Discard the first fill of the ring.
            let over =
                !filled || since.elapsed() >= WINDOW || passed >= ring.saturating_mul(WINDOW_RINGS);
            if passed >= ring && over {
                if std::mem::replace(&mut filled, true) {
                    windows.push((passed, since.elapsed()));
                }
                (passed, since) = (0, Instant::now());
                if !windows.is_empty()
                    && (started.elapsed() >= limit || windows.len() >= WINDOWS_MAX)
                {
                    break;
                }
            }
            if !go_on() {
                return None;
            }
        }
        // Ignores single pauses of the disk, but not regular ones.
        windows.sort_by_key(|(bytes, took)| {
            took.as_nanos().saturating_mul(MIB) / (*bytes as u128).max(1)
        });
        let middle = windows.get(windows.len() / 4..windows.len() - windows.len() / 4)?;
        if middle.is_empty() {
            return None;
        }
        let bytes = middle.iter().map(|(bytes, _)| bytes).sum();
        Some((
            Bytes::of_len(bytes),
            middle.iter().map(|(_, took)| *took).sum(),
        ))
    }

    /// Whether parts must be streamed but no stream serves them.
    pub(super) fn needs_stream(&self, layout: &Layout) -> bool {
        let mut arenas = self.arenas.iter().enumerate();
        (self.begun || self.stream.is_none())
            && arenas.any(|(part, arena)| arena.is_none() && layout.is_streamed(part))
    }

    /// Size of the ring, and of the memory that hanging reads keep.
    pub(super) fn ring_bytes(&self) -> Bytes {
        let ring = self.stream.as_ref().map_or(Bytes::ZERO, Stream::ring_bytes);
        ring + self.left_bytes()
    }

    pub(super) fn resident(&self) -> Bytes {
        let parts: Bytes = self.arenas.iter().flatten().map(Buffer::resident).sum();
        let ring = self
            .stream
            .as_ref()
            .map_or(Bytes::ZERO, Stream::ring_resident);
        let left = self.rings_left.memory().chain(self.arenas_left.memory());
        let left: Bytes = left.map(|memory| memory.resident()).sum();
        let staging = self.staging().map_or(Bytes::ZERO, Buffer::resident);
        staging + parts + self.fixed.resident() + ring + left
    }
}

/// Extents that readers bring for each token, in order.
struct Schedule {
    extents: Vec<Extent>,
    /// Index of the first extent to read.
    first: usize,
    /// Index of each part's first piece.
    first_piece: Vec<usize>,
    /// The first piece of the head.
    head_piece: usize,
}

impl Schedule {
    /// Returns the schedule of the parts that are `streamed`, beginning with `place`.
    fn of(layout: &Layout, place: Place, streamed: impl Fn(usize) -> bool) -> Self {
        let mut extents: Vec<Extent> = Vec::new();
        let (mut first, mut head_piece) = (0, 0);
        let mut first_piece = Vec::with_capacity(layout.parts.len());
        for (index, part) in layout.parts.iter().enumerate() {
            if index <= layout.head.start {
                head_piece = extents.len();
            }
            first_piece.push(extents.len());
            let streamed = layout.is_streamed(index) && streamed(index);
            if index == place.part {
                first = extents.len() + if streamed { place.piece } else { 0 };
            }
            if streamed {
                extents.extend(part.pieces.iter().map(|piece| piece.extent.clone()));
            }
        }
        Self {
            first: first % extents.len().max(1),
            extents,
            first_piece,
            head_piece,
        }
    }
}

/// Starts to stream the parts that are not `resident`, from the first layer on, before the model exists.
pub(super) fn begin(
    backend: &dyn Backend,
    source: Arc<dyn Source>,
    layout: &Layout,
    resident: impl Fn(usize) -> bool,
    limit: DiskTimeout,
) -> io::Result<Option<Stream>> {
    let schedule = Schedule::of(layout, Place::default(), |part| !resident(part));
    if schedule.extents.is_empty() {
        return Ok(None);
    }
    let ring = backend.ring(layout.ring, Backing::OnTouch)?;
    let mut stream = Stream::begin(source, ring, schedule.extents.into(), 0)?;
    stream.set_limit(limit);
    Ok(Some(stream))
}

/// All vectors, each with its index in the `f32` of the fixed mapping.
fn vectors_of<'model>(
    layout: &'model FixedLayout,
    spec: &'model Spec,
) -> Vec<(&'model TensorInfo, usize)> {
    let rope = spec.rope_factors.as_ref().zip(layout.rope_factors);
    let norm_bias = spec.output_norm_bias.as_ref().zip(layout.output_norm_bias);
    let bias = spec.output_bias.as_ref().zip(layout.output_bias);
    layout
        .vectors
        .iter()
        .flatten()
        .map(|(_, tensor, at)| (tensor, *at))
        .chain([(&spec.output_norm, layout.output_norm)])
        .chain(norm_bias)
        .chain(bias)
        .chain(rope)
        .collect()
}

/// Returns the extents of the vectors in the order of their numbers, and has the system prefetch them: they are small
/// and far apart, and each would otherwise wait for large reads.
pub(super) fn expect_vectors(
    file: &WeightFile,
    layout: &FixedLayout,
    spec: &Spec,
    watch: &DiskWatch,
) -> Vec<Extent> {
    let extents: Vec<Extent> = vectors_of(layout, spec)
        .into_iter()
        .map(|(tensor, _)| Extent {
            what: tensor.name.as_str().into(),
            offset: tensor.offset,
            bytes: tensor.bytes.as_len(),
        })
        .collect();
    file.expect(&extents, watch);
    extents
}

/// Read of the vectors that are resident in every plan: several at a time, for systems that did not prefetch them.
pub(super) struct Vectors(Vec<WatchedWork<VectorsRead>>);

/// Vectors, each with its number.
type VectorsRead = Result<Vec<(usize, Vec<u8>)>, LoadErrorKind>;

impl Vectors {
    /// Begins to read the vectors.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(super) fn begin(
        file: &Arc<WeightFile>,
        extents: Vec<Extent>,
        watch: &DiskWatch,
    ) -> io::Result<Self> {
        let (extents, next) = (
            Arc::<[Extent]>::from(extents),
            Arc::new(AtomicUsize::new(0)),
        );
        // The readers and this thread: the last to end checks whether the file is unchanged.
        let working = Arc::new(AtomicUsize::new(1));
        let mut readers = Vec::with_capacity(SMALL_READERS);
        for _ in 0..SMALL_READERS {
            let (file, extents) = (Arc::clone(file), Arc::clone(&extents));
            let (next, theirs) = (Arc::clone(&next), Arc::clone(&working));
            working.fetch_add(1, Ordering::AcqRel);
            let read = move |watch: &DiskWatch| {
                let read = read_vectors(&file, &extents, &next, watch);
                if theirs.fetch_sub(1, Ordering::AcqRel) == 1 {
                    file.forget_all();
                    file.check_unchanged(watch)?;
                }
                read
            };
            match WatchedWork::start(watch, read) {
                Ok(reader) => readers.push(reader),
                // The existing threads do all the work.
                Err(_) if !readers.is_empty() => {
                    working.fetch_sub(1, Ordering::AcqRel);
                }
                Err(error) => return Err(error),
            }
        }
        if working.fetch_sub(1, Ordering::AcqRel) == 1 {
            let file = Arc::clone(file);
            let look = move |watch: &DiskWatch| {
                file.forget_all();
                file.check_unchanged(watch).map(|()| Vec::new())
            };
            readers.push(WatchedWork::start(watch, look)?);
        }
        Ok(Self(readers))
    }

    /// Waits for the vectors, each with its number.
    ///
    /// # Errors
    /// When they cannot be read; the outer error, when the disk stalls.
    pub(super) fn wait(self, limit: DiskTimeout) -> Result<VectorsRead, (Stalled, Retained)> {
        let (mut all, mut hanging): (VectorsRead, Option<(Stalled, Retained)>) =
            (Ok(Vec::new()), None);
        for reader in self.0 {
            match reader.wait(limit) {
                Ok(Ok(read)) => {
                    if let Ok(all) = &mut all {
                        all.extend(read);
                    }
                }
                Ok(Err(error)) => all = all.and(Err(error)),
                Err(hangs) => match &mut hanging {
                    Some((_, left)) => left.add(hangs.1),
                    None => hanging = Some(hangs),
                },
            }
        }
        hanging.map_or(Ok(all), Err)
    }
}

/// Reads vectors that no other thread has claimed until none is left.
fn read_vectors(
    file: &WeightFile,
    extents: &[Extent],
    next: &AtomicUsize,
    watch: &DiskWatch,
) -> VectorsRead {
    let mut read = Vec::new();
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let Some(extent) = extents.get(number) else {
            return Ok(read);
        };
        let mut bytes = vec![0; extent.bytes];
        file.read_expected(extent, &mut bytes, watch)?;
        read.push((number, bytes));
    }
}

/// Threads that read vectors. The system prefetches all of them: more threads would only wait, each for its stack
/// behind the threads that populate memory.
const SMALL_READERS: usize = 2;
/// Rings that hanging reads may keep beside the stream's: one, so that reading continues if only some reads hang. With
/// more, a stalled disk would take memory beyond any plan.
const LEFT_MAX: usize = 1;
/// Batches of streamed pieces that operations in flight may read: one is computed while the next is queued. More would
/// leave the readers less of the ring.
const BATCHES_MAX: usize = 2;
/// Length of one measurement of the read rate: throttled disks (of a virtual machine or a control group) alternate
/// between running and pausing every tenth of a second (`DFL_THROTL_SLICE` of Linux), and the mean is wanted.
const WINDOW: Duration = Duration::from_millis(100);
/// Passes of the ring that end a measurement early, and the maximum of measurements: they bound the time for small
/// models, whose ring is small.
const WINDOW_RINGS: usize = 16;
const WINDOWS_MAX: usize = 12;
const MIB: u128 = 1 << 20;

#[cfg(test)]
mod tests;
