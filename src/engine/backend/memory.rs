//! Backend memory: buffers, views, and address space backed part by part.
//!
//! Outside a backend these are handles. Only the backend that allocated memory opens it, through one [`Access`] per
//! operation, and it executes one operation at a time. A view keeps its buffer: memory used by an operation in flight
//! cannot be released, and a premature release returns nothing.

use std::{
    borrow::Cow,
    io,
    marker::PhantomData,
    ops::Range,
    ptr::NonNull,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use super::DeviceError;
use crate::{arena::SharedMapping, reserve::Reserve};
use cotenant_policy::{kv_type::KvType, residency::KvShape};
use cotenant_units::Bytes;

/// Identity of a backend, with a single value: its owner opens the memory that it allocated.
#[derive(Debug)]
pub(super) struct Owner(u64);

impl Owner {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn buffer(&self, memory: impl Into<SharedMapping>) -> Buffer {
        Buffer {
            memory: Arc::new(memory.into()),
            owner: self.0,
        }
    }

    /// Floats of a buffer, borrowed exclusively.
    pub(super) fn read<'a>(
        &'a mut self,
        from: &'a Buffer,
        floats: Range<usize>,
    ) -> Result<&'a [f32], DeviceError> {
        let view = from.view(floats);
        let read = Access::new(self).read(&view)?;
        // SAFETY: as in `Access::read`; the buffer is borrowed as well, and so is the owner.
        Ok(unsafe { std::slice::from_raw_parts(read.as_ptr(), read.len()) })
    }

    pub(super) fn region(&self, space: Reserve) -> Region {
        Region {
            space: Arc::new(Space::Host(space)),
            owner: self.0,
        }
    }

    pub(super) fn device_region(&self, space: Box<dyn DeviceSpace>) -> Region {
        Region {
            space: Arc::new(Space::Device(space)),
            owner: self.0,
        }
    }

    /// Device address of a view that lies inside its buffer.
    pub(super) fn device_address(&self, view: &View) -> Result<u64, DeviceError> {
        self.device_place(view)
            .map(|(start, offset)| start + offset)
    }

    /// The same as the device address of the buffer, and the view's offset from it.
    pub(super) fn device_place(&self, view: &View) -> Result<(u64, u64), DeviceError> {
        self.is_own(view.owner)?;
        let inside = view.offset.checked_add(view.len);
        if inside.is_none_or(|end| end > view.memory.bytes().as_len()) {
            return Err(view.outside());
        }
        let start = view
            .memory
            .device()
            .map(|memory| (memory.address(), view.offset as u64));
        start.ok_or_else(|| DeviceError::new("memory of the host is used"))
    }

    /// Device address of `len` bytes from `offset` of address space, all of which are open.
    pub(super) fn device_range(
        &self,
        region: &Region,
        offset: usize,
        len: usize,
    ) -> Result<u64, DeviceError> {
        self.is_own(region.owner)?;
        match &*region.space {
            Space::Device(space) if offset.saturating_add(len) <= space.open().as_len() => {
                Ok(space.address() + offset as u64)
            }
            _ => Err(DeviceError::new("a part of the cache is closed")),
        }
    }

    /// Device address of bytes, all of which are backed by memory.
    pub(super) fn device_span(&self, span: &Span) -> Result<u64, DeviceError> {
        match span {
            Span::Buffer(view) => self.device_address(view),
            Span::Region(region, bytes) => self.device_range(region, bytes.start, bytes.len()),
        }
    }

    fn is_own(&self, owner: u64) -> Result<(), DeviceError> {
        if owner == self.0 {
            Ok(())
        } else {
            Err(DeviceError::new("memory of another backend is used"))
        }
    }
}

/// Device address space with a prefix backed by memory. Dropping it releases it.
pub(super) trait DeviceSpace: std::fmt::Debug + Send + Sync {
    /// As [`Reserve::set_open`].
    fn set_open(&mut self, bytes: Bytes) -> io::Result<Bytes>;

    /// Length of the backed prefix.
    fn open(&self) -> Bytes;

    /// The same, including closed memory whose release the device has not confirmed.
    fn resident(&self) -> Bytes;

    /// Device address of its start.
    fn address(&self) -> u64;
}

/// Backing of a region.
#[derive(Debug)]
enum Space {
    Host(Reserve),
    Device(Box<dyn DeviceSpace>),
}

/// A separately released piece of memory.
#[derive(Debug)]
pub struct Buffer {
    memory: Arc<SharedMapping>,
    owner: u64,
}

impl Buffer {
    /// Length in bytes: whole pages.
    pub fn bytes(&self) -> Bytes {
        self.memory.bytes()
    }

    /// Length including its staging memory.
    pub fn held(&self) -> Bytes {
        self.memory.held()
    }

    /// Resident size.
    pub fn resident(&self) -> Bytes {
        self.memory.resident()
    }

    /// Populates all of it in pieces, so that other threads may map memory meanwhile.
    pub fn touch(&self) {
        self.memory.touch(0, self.bytes().as_len());
    }

    /// Populates all of it in one call; pages that are refused now are populated at first use.
    pub fn populate(&self) {
        self.memory.populate().ok();
    }

    /// The mapping that readers fill in place.
    #[must_use]
    pub const fn shared(&self) -> &Arc<SharedMapping> {
        &self.memory
    }

    /// A weak reference, which shows whether a hanging read keeps it.
    #[must_use]
    pub fn mark(&self) -> Weak<SharedMapping> {
        Arc::downgrade(&self.memory)
    }

    /// The `f32` in `range`.
    pub fn view(&self, range: Range<usize>) -> View {
        self.view_bytes(range.start.saturating_mul(4), range.len().saturating_mul(4))
    }

    /// The `f32` from `start` on.
    pub fn from(&self, start: usize) -> View {
        self.view(start..(self.bytes().as_len() / 4).max(start))
    }

    /// `len` bytes from `offset`.
    pub fn view_bytes(&self, offset: usize, len: usize) -> View {
        View {
            memory: Arc::clone(&self.memory),
            owner: self.owner,
            offset,
            len,
        }
    }

    /// Releases it; returns its resident size: zero while an operation in flight or a hanging read holds it.
    #[must_use]
    pub fn release(self) -> Bytes {
        Arc::into_inner(self.memory).map_or(Bytes::ZERO, SharedMapping::release)
    }
}

/// A part of a buffer.
#[derive(Clone, Debug)]
pub struct View {
    memory: Arc<SharedMapping>,
    owner: u64,
    offset: usize,
    len: usize,
}

impl View {
    /// Length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// `len` bytes of it from `offset`.
    #[must_use]
    pub fn part(&self, offset: usize, len: usize) -> Self {
        Self {
            offset: self.offset.saturating_add(offset),
            len,
            ..self.clone()
        }
    }

    /// Whether it is empty.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether both are the same range of the same buffer.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.memory, &other.memory)
            && (self.offset, self.len) == (other.offset, other.len)
    }

    /// Its address, or `None` unless it lies inside its buffer.
    pub fn range(&self) -> Option<NonNull<u8>> {
        self.memory.range(self.offset, self.len)
    }

    fn start(&self) -> Result<NonNull<u8>, DeviceError> {
        self.range().ok_or_else(|| self.outside())
    }

    fn outside(&self) -> DeviceError {
        DeviceError::new(format!(
            "{} bytes from byte {} are not inside a buffer of {}",
            self.len,
            self.offset,
            self.memory.bytes()
        ))
    }
}

/// Address space with a prefix backed by memory.
#[derive(Debug)]
pub struct Region {
    space: Arc<Space>,
    owner: u64,
}

impl Region {
    /// As [`Reserve::set_open`].
    ///
    /// # Errors
    ///
    /// As [`Reserve::set_open`], and while an operation in flight uses it.
    pub fn set_open(&mut self, bytes: Bytes) -> io::Result<Bytes> {
        match Arc::get_mut(&mut self.space) {
            Some(Space::Host(space)) => space.set_open(bytes),
            Some(Space::Device(space)) => space.set_open(bytes),
            None => Err(io::ErrorKind::ResourceBusy.into()),
        }
    }

    /// Whether its open part is backed by memory before the first touch.
    pub fn is_memory_at_once(&self) -> bool {
        matches!(&*self.space, Space::Device(_))
    }

    /// As [`Reserve::populate_from`].
    ///
    /// # Errors
    ///
    /// As [`Reserve::populate_from`].
    pub fn populate_from(&self, bytes: Bytes) -> io::Result<()> {
        match &*self.space {
            Space::Host(space) => space.populate_from(bytes),
            Space::Device(_) => Ok(()),
        }
    }

    /// Resident size.
    pub fn resident(&self) -> Bytes {
        match &*self.space {
            Space::Host(space) => space.resident(),
            Space::Device(space) => space.resident(),
        }
    }

    /// As [`Reserve::range`]; `None` for memory of a device.
    pub fn range(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        match &*self.space {
            Space::Host(space) => space.range(offset, len),
            Space::Device(_) => None,
        }
    }

    /// A handle for an operation.
    #[must_use]
    pub fn lend(&self) -> Self {
        Self {
            space: Arc::clone(&self.space),
            owner: self.owner,
        }
    }
}

/// Bytes of a buffer, or of address space.
#[derive(Debug)]
pub enum Span {
    /// A range of a buffer.
    Buffer(View),
    /// A range of address space.
    Region(Region, Range<usize>),
}

impl Span {
    /// Number of bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Buffer(view) => view.len(),
            Self::Region(_, bytes) => bytes.len(),
        }
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The cache for an operation: blocks of `[layer][key, value][head][token][element]`, each at an independent place.
#[derive(Debug)]
pub struct Cells<'a> {
    /// Its memory.
    pub space: Region,
    /// Its type.
    pub kind: KvType,
    /// Its dimensions.
    pub shape: KvShape,
    /// The place of each usable block, in units of blocks.
    pub places: Cow<'a, [usize]>,
}

impl Cells<'_> {
    /// An owned copy.
    #[must_use]
    pub fn into_owned(self) -> Cells<'static> {
        Cells {
            space: self.space,
            kind: self.kind,
            shape: self.shape,
            places: self.places.into_owned().into(),
        }
    }
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Keys.
    Key,
    /// Values.
    Value,
}

/// Byte offset of one head's `part` of the attention layer `layer` in every block.
pub fn offset_in_block(
    shape: &KvShape,
    kind: KvType,
    layer: usize,
    part: Part,
    head: usize,
) -> usize {
    let part = match part {
        Part::Key => 0,
        Part::Value => 1,
    };
    let row = (layer * 2 + part) * shape.kv_heads as usize + head;
    row * shape.block_tokens.get() as usize * Bytes::new(shape.row_bytes(kind)).as_len()
}

/// The memory of one operation during its execution: written ranges overlap no other range.
pub(super) struct Access<'op> {
    owner: u64,
    /// Start, end, and whether it is written.
    spans: [(usize, usize, bool); SPANS_MAX],
    count: usize,
    /// Excludes other accesses for its lifetime.
    exclusive: PhantomData<&'op mut Owner>,
}

impl<'op> Access<'op> {
    pub(super) const fn new(owner: &'op mut Owner) -> Self {
        Self {
            owner: owner.0,
            spans: [(0, 0, false); SPANS_MAX],
            count: 0,
            exclusive: PhantomData,
        }
    }

    /// Opens floats for reading.
    pub(super) fn read(&mut self, view: &'op View) -> Result<&'op [f32], DeviceError> {
        let start = self.open(view, false)?;
        floats_of(start, view.len)?;
        // SAFETY: inside a mapping that the view keeps; aligned; the backend that has the owner executes one operation
        // at a time, and none of its own writes overlap, as `open` has checked. Readers never fill memory that is in a
        // view.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr().cast(), view.len / 4) })
    }

    /// As [`Self::read`], for an optional view.
    pub(super) fn read_some(
        &mut self,
        view: Option<&'op View>,
    ) -> Result<Option<&'op [f32]>, DeviceError> {
        view.map(|view| self.read(view)).transpose()
    }

    /// Opens bytes for reading.
    pub(super) fn read_bytes(&mut self, view: &'op View) -> Result<&'op [u8], DeviceError> {
        let start = self.open(view, false)?;
        // SAFETY: as in `read`.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), view.len) })
    }

    /// Bytes of a weight, which no operation writes.
    pub(super) fn weight(&self, view: &'op View) -> Result<&'op [u8], DeviceError> {
        let start = self.address(view)?;
        if self.overlaps(start, view.len, false) {
            return Err(DeviceError::new("a result lies where a weight does"));
        }
        // SAFETY: as in `read`; written memory is opened before weights are.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), view.len) })
    }

    /// Opens floats for writing.
    #[expect(
        clippy::mut_from_ref,
        reason = "`open` has checked that nothing else is opened there"
    )]
    pub(super) fn write(&mut self, view: &'op View) -> Result<&'op mut [f32], DeviceError> {
        let start = self.open(view, true)?;
        floats_of(start, view.len)?;
        // SAFETY: as in `read`, and the operation opens no overlapping range.
        Ok(unsafe { std::slice::from_raw_parts_mut(start.as_ptr().cast(), view.len / 4) })
    }

    /// Opens bytes for writing.
    #[expect(
        clippy::mut_from_ref,
        reason = "`open` has checked that nothing else is opened there"
    )]
    pub(super) fn write_bytes(&mut self, view: &'op View) -> Result<&'op mut [u8], DeviceError> {
        let start = self.open(view, true)?;
        // SAFETY: as in `write`.
        Ok(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), view.len) })
    }

    /// Address space of this backend, of which one operation writes one part.
    pub(super) fn region(&self, region: &'op Region) -> Result<&'op Reserve, DeviceError> {
        self.is_own(region.owner)?;
        match &*region.space {
            Space::Host(space) => Ok(space),
            Space::Device(_) => Err(DeviceError::new("memory of a device is used")),
        }
    }

    /// Opens floats of a buffer or of address space for writing.
    #[expect(clippy::mut_from_ref, reason = "as `write`")]
    pub(super) fn write_span(&mut self, span: &'op Span) -> Result<&'op mut [f32], DeviceError> {
        let start = self.span(span)?;
        let start = self.claim(start, span.len(), true)?;
        floats_of(start, span.len())?;
        // SAFETY: as in `write`; the span keeps its mapping, which is open there.
        Ok(unsafe { std::slice::from_raw_parts_mut(start.as_ptr().cast(), span.len() / 4) })
    }

    /// Source or target bytes of a copy: the caller excludes overlaps.
    pub(super) fn span(&self, span: &Span) -> Result<NonNull<u8>, DeviceError> {
        match span {
            Span::Buffer(view) => self.address(view),
            Span::Region(region, bytes) => {
                let address = self.region(region)?.range(bytes.start, bytes.len());
                address.ok_or_else(|| DeviceError::new("a block of the cache is closed"))
            }
        }
    }

    fn is_own(&self, owner: u64) -> Result<(), DeviceError> {
        if owner == self.owner {
            Ok(())
        } else {
            Err(DeviceError::new("memory of another backend is used"))
        }
    }

    fn address(&self, view: &View) -> Result<NonNull<u8>, DeviceError> {
        self.is_own(view.owner)?;
        view.start()
    }

    fn open(&mut self, view: &View, written: bool) -> Result<NonNull<u8>, DeviceError> {
        let start = self.address(view)?;
        self.claim(start, view.len, written)
    }

    /// Records a range that the operation uses.
    fn claim(
        &mut self,
        start: NonNull<u8>,
        len: usize,
        written: bool,
    ) -> Result<NonNull<u8>, DeviceError> {
        if self.overlaps(start, len, written) {
            return Err(DeviceError::new("a result lies where something else does"));
        }
        let from = start.addr().get();
        let Some(span) = self.spans.get_mut(self.count) else {
            return Err(DeviceError::new(format!(
                "an operation uses more than {SPANS_MAX} views"
            )));
        };
        *span = (from, from + len, written);
        self.count += 1;
        Ok(start)
    }

    /// Whether an overlapping range is open, if one of the two is written.
    fn overlaps(&self, start: NonNull<u8>, len: usize, written: bool) -> bool {
        let (from, to) = (start.addr().get(), start.addr().get() + len);
        self.spans
            .iter()
            .take(self.count)
            .any(|&(first, end, other)| (written || other) && from < end && first < to)
    }
}

fn floats_of(start: NonNull<u8>, len: usize) -> Result<(), DeviceError> {
    if start.addr().get().is_multiple_of(4) && len.is_multiple_of(4) {
        Ok(())
    } else {
        Err(DeviceError::new("a view of floats is cut or misaligned"))
    }
}

/// Most views of an operation, which attention has, with some spare.
const SPANS_MAX: usize = 24;
