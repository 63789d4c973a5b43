//! Memory of a backend: buffers, views of them, and address space that becomes memory part by part.
//!
//! Outside of a backend these are handles. Only the backend that allocated memory opens it, through an [`Access`] for each
//! operation, and it executes one operation at a time. A view keeps its buffer: what an operation in flight uses cannot be
//! released, and a release that comes too early gives nothing back.

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

/// Identity of a backend, of which there is one value: who has it opens what it has allocated.
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

    /// Floats of a buffer, as long as nothing else is done with it.
    pub(super) fn read<'a>(
        &'a mut self,
        from: &'a Buffer,
        floats: Range<usize>,
    ) -> Result<&'a [f32], DeviceError> {
        let view = from.view(floats);
        let read = Access::new(self).read(&view)?;
        // SAFETY: as there; the buffer is borrowed as well, and the owner is for so long.
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

    /// Where the device has a view, all of which lies in its buffer.
    pub(super) fn device_address(&self, view: &View) -> Result<u64, DeviceError> {
        self.device_place(view)
            .map(|(start, offset)| start + offset)
    }

    /// The same as where the device has the buffer, and how far behind that the view begins.
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
        start.ok_or_else(|| DeviceError::new("memory of the host is used".to_owned()))
    }

    /// Where the device has `len` bytes from `offset` of address space, all of which are open.
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
            _ => Err(DeviceError::new("a part of the cache is closed".to_owned())),
        }
    }

    /// Where the device has bytes, all of which are memory.
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
            Err(DeviceError::new(
                "memory of another backend is used".to_owned(),
            ))
        }
    }
}

/// Address space of a device of which the first part is memory. Dropping it gives it back.
pub(super) trait DeviceSpace: std::fmt::Debug + Send + Sync {
    /// As [`Reserve::set_open`].
    fn set_open(&mut self, bytes: Bytes) -> io::Result<Bytes>;

    /// How much of it is memory.
    fn open(&self) -> Bytes;

    /// The same with what was closed and the device has not confirmed to have back.
    fn resident(&self) -> Bytes;

    /// Where it begins for the device.
    fn address(&self) -> u64;
}

/// What a region is made of.
#[derive(Debug)]
enum Space {
    Host(Reserve),
    Device(Box<dyn DeviceSpace>),
}

/// A piece of memory that is released by itself.
#[derive(Debug)]
pub struct Buffer {
    memory: Arc<SharedMapping>,
    owner: u64,
}

impl Buffer {
    /// Length in bytes: whole pages.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.memory.bytes()
    }

    /// The same with what it is staged in.
    #[must_use]
    pub fn held(&self) -> Bytes {
        self.memory.held()
    }

    /// How much of it the kernel has in memory.
    #[must_use]
    pub fn resident(&self) -> Bytes {
        self.memory.resident()
    }

    /// Makes all of it memory, piece by piece, so that other threads may map memory meanwhile.
    pub fn touch(&self) {
        self.memory.touch(0, self.bytes().as_len());
    }

    /// Has the kernel find memory for all of it in one go; what it does not give now it gives at the first use.
    pub fn populate(&self) {
        self.memory.populate().ok();
    }

    /// What readers fill where it lies.
    #[must_use]
    pub const fn shared(&self) -> &Arc<SharedMapping> {
        &self.memory
    }

    /// A mark of it, by which it is known whether a read that hangs keeps it.
    #[must_use]
    pub fn mark(&self) -> Weak<SharedMapping> {
        Arc::downgrade(&self.memory)
    }

    /// The `f32` in `range`.
    #[must_use]
    pub fn view(&self, range: Range<usize>) -> View {
        self.view_bytes(range.start.saturating_mul(4), range.len().saturating_mul(4))
    }

    /// The `f32` from `start` on.
    #[must_use]
    pub fn from(&self, start: usize) -> View {
        self.view(start..(self.bytes().as_len() / 4).max(start))
    }

    /// `len` bytes from `offset`.
    #[must_use]
    pub fn view_bytes(&self, offset: usize, len: usize) -> View {
        View {
            memory: Arc::clone(&self.memory),
            owner: self.owner,
            offset,
            len,
        }
    }

    /// Gives it back; says how much of it had been in memory: nothing as long as something in flight, or a read that hangs, has it.
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
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// The first `floats` of it.
    #[must_use]
    pub fn first(mut self, floats: usize) -> Self {
        self.len = self.len.min(floats.saturating_mul(4));
        self
    }

    /// Whether it has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether both are the same part of the same buffer.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.memory, &other.memory)
            && (self.offset, self.len) == (other.offset, other.len)
    }

    /// Its address, or `None` when it is not all inside its buffer.
    #[must_use]
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

/// Address space of which the first part is memory.
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
    /// As there, and while something in flight uses it.
    pub fn set_open(&mut self, bytes: Bytes) -> io::Result<Bytes> {
        match Arc::get_mut(&mut self.space) {
            Some(Space::Host(space)) => space.set_open(bytes),
            Some(Space::Device(space)) => space.set_open(bytes),
            None => Err(io::ErrorKind::ResourceBusy.into()),
        }
    }

    /// Whether what is open is memory, touched or not.
    #[must_use]
    pub fn is_memory_at_once(&self) -> bool {
        matches!(&*self.space, Space::Device(_))
    }

    /// As [`Reserve::populate_from`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn populate_from(&self, bytes: Bytes) -> io::Result<()> {
        match &*self.space {
            Space::Host(space) => space.populate_from(bytes),
            Space::Device(_) => Ok(()),
        }
    }

    /// How much of it the kernel has in memory.
    #[must_use]
    pub fn resident(&self) -> Bytes {
        match &*self.space {
            Space::Host(space) => space.resident(),
            Space::Device(space) => space.resident(),
        }
    }

    /// As [`Reserve::range`]; memory of a device has no address.
    #[must_use]
    pub fn range(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        match &*self.space {
            Space::Host(space) => space.range(offset, len),
            Space::Device(_) => None,
        }
    }

    /// The same for an operation.
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
    /// Of a buffer.
    Buffer(View),
    /// Of address space: which of its bytes.
    Region(Region, Range<usize>),
}

impl Span {
    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Buffer(view) => view.len(),
            Self::Region(_, bytes) => bytes.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The cache as an operation needs it: blocks of `[layer][key, value][head][token][element]`, each at a place of its own.
#[derive(Debug)]
pub struct Cells<'a> {
    /// Where they lie.
    pub space: Region,
    /// What they are kept as.
    pub kind: KvType,
    /// What they are made of.
    pub shape: KvShape,
    /// The place of each block, counted in blocks; as many as may be used.
    pub places: Cow<'a, [usize]>,
}

impl Cells<'_> {
    /// The same without what it borrows.
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

/// Index of the first byte of one head's `part` of the attention layer `layer` in every block.
#[must_use]
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

/// The memory of one operation while a backend executes it: what is written overlaps nothing else.
pub(super) struct Access<'op> {
    owner: u64,
    /// Start, end, and whether it is written.
    spans: [(usize, usize, bool); SPANS_MAX],
    count: usize,
    /// Nothing else is opened meanwhile.
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

    /// Floats to be read.
    pub(super) fn read(&mut self, view: &'op View) -> Result<&'op [f32], DeviceError> {
        let start = self.open(view, false)?;
        floats_of(start, view.len)?;
        // SAFETY: inside a mapping that the view keeps; aligned; the backend that has the owner executes one operation at a time, and
        // nothing of this one writes to it, which `open` has checked. Readers fill no memory that is in a view.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr().cast(), view.len / 4) })
    }

    /// The same of what is not always there.
    pub(super) fn read_some(
        &mut self,
        view: Option<&'op View>,
    ) -> Result<Option<&'op [f32]>, DeviceError> {
        view.map(|view| self.read(view)).transpose()
    }

    /// Bytes to be read.
    pub(super) fn read_bytes(&mut self, view: &'op View) -> Result<&'op [u8], DeviceError> {
        let start = self.open(view, false)?;
        // SAFETY: as in `read`.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), view.len) })
    }

    /// Bytes of a weight, which no operation writes.
    pub(super) fn weight(&self, view: &'op View) -> Result<&'op [u8], DeviceError> {
        let start = self.address(view)?;
        if self.overlaps(start, view.len, false) {
            return Err(DeviceError::new(
                "a result lies where a weight does".to_owned(),
            ));
        }
        // SAFETY: as in `read`; what is opened to be written is opened before weights are.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), view.len) })
    }

    /// Floats to be written.
    #[expect(
        clippy::mut_from_ref,
        reason = "`open` has checked that nothing else is opened there"
    )]
    pub(super) fn write(&mut self, view: &'op View) -> Result<&'op mut [f32], DeviceError> {
        let start = self.open(view, true)?;
        floats_of(start, view.len)?;
        // SAFETY: as in `read`, and nothing else of the operation is opened where it lies.
        Ok(unsafe { std::slice::from_raw_parts_mut(start.as_ptr().cast(), view.len / 4) })
    }

    /// Bytes to be written.
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
            Space::Device(_) => Err(DeviceError::new("memory of a device is used".to_owned())),
        }
    }

    /// Bytes that are copied, or that a copy goes to: the caller takes care that nothing else is there.
    pub(super) fn span(&self, span: &Span) -> Result<NonNull<u8>, DeviceError> {
        match span {
            Span::Buffer(view) => self.address(view),
            Span::Region(region, bytes) => {
                let address = self.region(region)?.range(bytes.start, bytes.len());
                address.ok_or_else(|| DeviceError::new("a block of the cache is closed".to_owned()))
            }
        }
    }

    fn is_own(&self, owner: u64) -> Result<(), DeviceError> {
        if owner == self.owner {
            Ok(())
        } else {
            Err(DeviceError::new(
                "memory of another backend is used".to_owned(),
            ))
        }
    }

    fn address(&self, view: &View) -> Result<NonNull<u8>, DeviceError> {
        self.is_own(view.owner)?;
        view.start()
    }

    fn open(&mut self, view: &View, written: bool) -> Result<NonNull<u8>, DeviceError> {
        let start = self.address(view)?;
        if self.overlaps(start, view.len, written) {
            return Err(DeviceError::new(
                "a result lies where something else does".to_owned(),
            ));
        }
        let from = start.addr().get();
        let Some(span) = self.spans.get_mut(self.count) else {
            return Err(DeviceError::new(format!(
                "an operation uses more than {SPANS_MAX} views"
            )));
        };
        *span = (from, from + view.len, written);
        self.count += 1;
        Ok(start)
    }

    /// Whether something else is opened there, of which one of the two is written.
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
        Err(DeviceError::new(
            "a view of floats is cut or misaligned".to_owned(),
        ))
    }
}

/// Views of the operation that has the most, attention, and some more.
const SPANS_MAX: usize = 24;
