//! Weights where they are now: in arenas of resident layers, in the ring, or in the file.

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use super::growth::{self, GrowError, Growing};
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

/// Where a pass is in the weights.
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
    /// What angles of rotation are divided by, one factor for each pair, where the model has such.
    factors: Option<Vec<f32>>,
    /// Arenas of the parts that are resident.
    arenas: Vec<Option<Buffer>>,
    stream: Option<Stream>,
    /// Pieces that operations in flight read: how many, and what they wait for.
    lent: VecDeque<(Fence, usize)>,
    /// Rings that were replaced or given up while a read hung, which keeps them until it returns.
    rings_left: Retained,
    /// Since when there has been no stream because reads hang.
    hung: Option<Instant>,
    /// Arenas of a growth that was given up, which hanging reads keep.
    arenas_left: Retained,
    /// How long the disk may take to answer.
    limit: DiskTimeout,
    /// Reads embeddings, once one had to be read.
    rows: Option<RowReader>,
    /// The stream has been started before its model was there, and nothing has been requested of it.
    begun: bool,
    /// For each part the index of its first piece in the stream's schedule.
    first_piece: Vec<usize>,
    /// The first piece of the head.
    head_piece: usize,
    /// Time that kernels have waited for the readers.
    waited: Duration,
}

impl Weights {
    /// With what has been read ahead by [`begin`], on a disk that may take so long to answer.
    pub(super) fn new(
        file: Arc<dyn Source>,
        (fixed, factors): (Buffer, Option<Vec<f32>>),
        parts: usize,
        (stream, limit): (Option<Stream>, DiskTimeout),
    ) -> Self {
        Self {
            file,
            fixed,
            factors,
            arenas: (0..parts).map(|_| None).collect(),
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

    /// What is resident in every plan, as it was read, and what angles of rotation are divided by.
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

    /// Reads parts into arenas of their own; says how much was added, and why it was not all. When it takes long it gives
    /// way to whatever else is `wanted`, which is no failure unless the disk hangs.
    pub(super) fn grow(
        &mut self,
        backend: &dyn Backend,
        parts: &[(usize, &PartLayout)],
        wanted: &mut dyn FnMut() -> bool,
    ) -> (Bytes, Result<(), (usize, GrowError)>) {
        if let Some((index, layout)) = parts.first()
            && self.arenas_left.hangs()
        {
            // Others would hang beside those that do.
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
        for (index, arena) in indices.into_iter().zip(read.whole) {
            if let Some(slot) = self.arenas.get_mut(index) {
                grown += arena.bytes();
                *slot = Some(arena);
            }
        }
        (grown, result)
    }

    /// Gives part `index` up; says what was mapped and what of it was in memory.
    pub(super) fn shed(&mut self, index: usize) -> (Bytes, Bytes) {
        match self.arenas.get_mut(index).and_then(Option::take) {
            Some(arena) => (arena.bytes(), arena.release()),
            None => (Bytes::ZERO, Bytes::ZERO),
        }
    }

    /// Starts, restarts or stops the stream so that it brings the parts that are not resident, beginning with `place`.
    ///
    /// While the disk hangs there is at most one ring more than the plan's; then there may be no stream afterwards, which
    /// is no error of a plan: a pass that needs it says so.
    ///
    /// Nothing that was queued is in flight. Returns what was mapped for it, and what was given up of it: asked and freed.
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
        // One that cannot be had again is none: what it has read is not what is asked for from now on.
        let started = match self.stream.take() {
            Some(stream) if begun && first == 0 && stream.reads(&extents) => {
                // Memory may still be found for it, see `settle`.
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

    /// Stops the stream; says how long its ring was and what of it was in memory.
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

    /// Waits until all of the ring is in memory.
    pub(super) fn settle(&self) {
        if let Some(stream) = &self.stream {
            stream.settle();
        }
    }

    /// Gives pieces back to the readers that operations have used, and waits until at most so many batches of them are in
    /// flight.
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
                // SAFETY: the fence lies behind all that was queued with them, and is passed.
                unsafe { stream.release(count) };
            }
        }
        Ok(())
    }

    /// Notes that what is queued by now reads `count` pieces more.
    pub(super) fn lend(
        &mut self,
        backend: &mut dyn Backend,
        count: usize,
    ) -> Result<(), DeviceError> {
        self.lent.push_back((backend.mark(), count));
        self.reclaim(backend, BATCHES_MAX)
    }

    /// The stream with another schedule.
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

    /// Counts a ring that is the stream's no longer as long as a read that hangs keeps it.
    fn note_left(&mut self, ring: Weak<SharedMapping>) {
        self.rings_left.add(Retained::of([ring], Instant::now()));
    }

    /// That there is no stream because reads hang, and what waits for it.
    pub(super) fn hung(&self, what: &Arc<str>) -> Option<Stalled> {
        self.hung
            .map(|since| self.limit.stalled(since.elapsed(), what))
    }

    /// All memory that reads may keep when these weights are given up, which hang since `began` or longer.
    pub(super) fn kept(&self, began: Instant) -> Retained {
        let mut kept = Retained::of(self.stream.as_ref().map(Stream::ring_mark), began);
        kept.add(self.rings_left.clone());
        kept.add(self.arenas_left.clone());
        kept
    }

    /// What hanging reads keep, and goes when they return.
    pub(super) fn left_bytes(&self) -> Bytes {
        self.rings_left.bytes() + self.arenas_left.bytes()
    }

    /// Tells the readers whether the next pass ends with the head, so that they do not read it for nothing.
    pub(super) fn expect_head(&self, wanted: bool) {
        if let Some(stream) = &self.stream {
            stream.set_end(if wanted { usize::MAX } else { self.head_piece });
        }
    }

    /// The embedding of `token` if it is in memory: in the head, when that is the same tensor.
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

    /// Asks for embeddings from the file.
    pub(super) fn ask_for_rows(
        &mut self,
        spec: &Spec,
        tokens: impl Iterator<Item = u32>,
    ) -> io::Result<()> {
        let reader = match self.rows.take() {
            Some(reader) => reader,
            None => RowReader::start(Arc::clone(&self.file))?,
        };
        let (tensor, bytes) = (&spec.embedding, spec.embedding_row());
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

    /// Waits for the embeddings that were asked for.
    pub(super) fn rows_asked_for(
        &self,
        patience: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<u8>, Missing> {
        let reader = self.rows.as_ref();
        reader.map_or(Ok(Vec::new()), |reader| reader.wait(self.limit, patience))
    }

    /// A vector of layer `index`, when the architecture has one of the kind.
    pub(super) fn vector(
        &self,
        layout: &FixedLayout,
        index: usize,
        vector: Vector,
    ) -> Option<View> {
        let (_, tensor, at) = layout
            .vectors
            .get(index)?
            .iter()
            .find(|(kind, _, _)| *kind == vector)?;
        let elements: u64 = tensor.dims.iter().product();
        Some(self.fixed.view(*at..*at + usize::try_from(elements).ok()?))
    }

    /// What the angles of rotation are divided by, where the model has such.
    pub(super) fn rope_factors(&self) -> Option<&[f32]> {
        self.factors.as_deref()
    }

    /// The place of a part's first piece in the stream's schedule, where there is one.
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
            // Readers may have no room but what is lent.
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

    pub(super) const fn fixed(&self) -> &Buffer {
        &self.fixed
    }

    /// Reads from somewhere else from now on, and waits so long for it.
    #[cfg(test)]
    pub(super) fn read_from(&mut self, file: Arc<dyn Source>, limit: DiskTimeout) {
        self.limit = limit;
        self.file = file;
        self.rows = None;
    }

    #[cfg(test)]
    pub(super) const fn file(&self) -> &Arc<dyn Source> {
        &self.file
    }

    /// Adds to the time that kernels have waited for the readers.
    pub(super) const fn note_waited(&mut self, time: Duration) {
        self.waited = self.waited.saturating_add(time);
    }

    /// Time that kernels have waited for the readers so far.
    pub(super) const fn waited(&self) -> Duration {
        self.waited
    }

    /// Reads weights without computing on them: how much, and how long it took, once the ring has been full. All of them in
    /// their turn, as far as the time goes: the same few again and again would come out of a cache of the disk or the host. The readers
    /// have to be restarted before a pass.
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
            // Whatever the ring had been filled with counts for nothing.
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
        // A disk that stands still for one moment is no slower for that; one that does so in each of them is.
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

    /// Whether parts have to be streamed, and are not.
    pub(super) fn needs_stream(&self) -> bool {
        (self.begun || self.stream.is_none()) && self.arenas.iter().any(Option::is_none)
    }

    /// The ring, and what hanging reads keep.
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
        parts + self.fixed.resident() + ring + left
    }
}

/// What readers bring for each token, in this order.
struct Schedule {
    extents: Vec<Extent>,
    /// What is read first.
    first: usize,
    /// For each part the index of its first piece.
    first_piece: Vec<usize>,
    /// The first piece of the head.
    head_piece: usize,
}

impl Schedule {
    /// The parts that are `streamed`, beginning with `place`.
    fn of(layout: &Layout, place: Place, streamed: impl Fn(usize) -> bool) -> Self {
        let mut extents: Vec<Extent> = Vec::new();
        let (mut first, mut head_piece) = (0, 0);
        let mut first_piece = Vec::with_capacity(layout.parts.len());
        for (index, part) in layout.parts.iter().enumerate() {
            if index <= layout.head.start {
                head_piece = extents.len();
            }
            first_piece.push(extents.len());
            let streamed = streamed(index);
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

/// Starts to read what is not `resident`, from the first layer on, before there is a model that computes on it.
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

/// All vectors, each with its place among the `f32` of the fixed mapping.
fn vectors_of<'model>(
    layout: &'model FixedLayout,
    spec: &'model Spec,
) -> Vec<(&'model TensorInfo, usize)> {
    let rope = spec.rope_factors.as_ref().zip(layout.rope_factors);
    let bias = spec.output_bias.as_ref().zip(layout.output_bias);
    layout
        .vectors
        .iter()
        .flatten()
        .map(|(_, tensor, at)| (tensor, *at))
        .chain([(&spec.output_norm, layout.output_norm)])
        .chain(bias)
        .chain(rope)
        .collect()
}

/// Where the vectors lie, in the order of their numbers. The system begins to bring them: they are small and lie far apart,
/// so that each would wait for large reads if it were asked for on its own.
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

/// What is resident in every plan, on its way: several vectors at a time, for systems that did not bring them before.
pub(super) struct Vectors(Vec<WatchedWork<VectorsRead>>);

/// Some vectors, each with its number.
type VectorsRead = Result<Vec<(usize, Vec<u8>)>, LoadErrorKind>;

impl Vectors {
    /// Begins to read them.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub(super) fn begin(
        file: &Arc<WeightFile>,
        extents: Vec<Extent>,
        watch: &DiskWatch,
    ) -> io::Result<Self> {
        let (extents, next) = (
            Arc::<[Extent]>::from(extents),
            Arc::new(AtomicUsize::new(0)),
        );
        // Those who read, and who starts them: the last one looks whether the file is still the same.
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
                // With fewer threads, those that there are do all of it.
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

    /// Waits until they are there, each with its number.
    ///
    /// # Errors
    /// When they cannot be read; or, as the outer one, when the disk does not answer.
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

/// Reads vectors that no other thread has taken up, as long as there are any.
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

/// Threads that take up vectors. The system knows all of them, so that more would only wait, each of them for its
/// stack behind the threads that find memory.
const SMALL_READERS: usize = 2;
/// Rings that hanging reads may keep beside the stream's: one, so that reading goes on where only some reads hang. With
/// each more, a disk that stands still would take memory that no plan has.
const LEFT_MAX: usize = 1;
/// Batches of streamed pieces that operations in flight may read: while one is computed with, the next is queued. With more,
/// the readers would have less of the ring.
const BATCHES_MAX: usize = 2;
/// How long reading is timed in one go: disks that are given out in shares (a virtual machine's, a control group's) run and
/// stand still in turns of a tenth of a second (`DFL_THROTL_SLICE` of Linux),
/// and what they give in the mean is wanted.
const WINDOW: Duration = Duration::from_millis(100);
/// Passes of the ring that are enough for one of these, and how many of these there are at most: small models, whose ring is
/// small, have their figure from so many.
const WINDOW_RINGS: usize = 16;
const WINDOWS_MAX: usize = 12;
const MIB: u128 = 1 << 20;

#[cfg(test)]
mod tests;
