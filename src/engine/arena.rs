//! Anonymous mappings, one per separately freed piece of memory.
//!
//! `Vec`-backed weights cannot be shed: glibc raises its mmap threshold with each large `free`, so the second shed of
//! such memory returns nothing to the kernel. One `munmap` returns a mapping, and [`Mapping::resident`] queries its
//! resident size.

use std::{
    fs::File,
    hint::black_box,
    io::{self, Read as _},
    mem::ManuallyDrop,
    num::NonZeroUsize,
    ptr::NonNull,
    sync::atomic::{AtomicU8, Ordering},
};

use nix::{
    errno::Errno,
    sys::mman::{self, MapFlags, ProtFlags},
};

use cotenant_units::{Bytes, page};

/// Anonymous memory of whole pages, dropped by `munmap`.
///
/// For memory filled by another thread during reads, use [`SharedMapping`].
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory without thread affinity.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` only reads; writes go through raw pointers whose users state their exclusion.
unsafe impl Sync for Mapping {}

/// When pages are populated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// The kernel populates each page at its first access.
    OnTouch,
    /// Every page is populated before the mapping is returned, so that a capacity is resident memory.
    Now,
}

impl Mapping {
    /// Maps `bytes`, rounded up to whole pages; in huge pages if it is large enough and the kernel supports them.
    ///
    /// # Errors
    /// No address space or, with [`Backing::Now`], no memory.
    pub fn new(bytes: Bytes, backing: Backing) -> io::Result<Self> {
        let mapping = Self::aligned(bytes, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)?;
        if !has_huge_pages(page()) {
            // Even with system-wide huge pages, which adjacent mappings would share.
            mapping.advise(libc::MADV_NOHUGEPAGE).ok();
        } else if mapping.bytes() >= HUGE_PAGE {
            // Best effort: a kernel without huge pages falls back to small ones.
            mapping.advise(libc::MADV_HUGEPAGE).ok();
        }
        // Exclude weights and caches from core dumps.
        mapping.advise(libc::MADV_DONTDUMP).ok();
        if backing == Backing::Now {
            mapping.populate_part(0, mapping.len)?;
        }
        Ok(mapping)
    }

    /// Maps whole pages, aligned to a huge page if the length is at least one.
    fn aligned(bytes: Bytes, protection: ProtFlags) -> io::Result<Self> {
        let len = bytes.round_up(page()).as_len().max(page().as_len());
        let huge = HUGE_PAGE.as_len();
        let wanted = if len >= huge {
            len.saturating_add(huge)
        } else {
            len
        };
        let length = NonZeroUsize::new(wanted).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice overlaps no existing memory.
        let start = unsafe { mman::mmap_anonymous(None, length, protection, flags) }?.cast::<u8>();
        let mut mapping = Self { start, len: wanted };
        if wanted > len {
            mapping.trim_to_huge_page(len)?;
        }
        Ok(mapping)
    }

    /// Length in bytes: whole pages.
    pub const fn bytes(&self) -> Bytes {
        Bytes::of_len(self.len)
    }

    /// The address of `len` bytes from `offset`, or `None` unless all are inside.
    pub fn range(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let end = offset.checked_add(len)?;
        if end > self.len {
            return None;
        }
        // SAFETY: `offset` is inside the mapping.
        Some(unsafe { self.start.add(offset) })
    }

    /// All bytes, writable.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the whole mapping, borrowed from its only owner; initialised, as anonymous memory is zero.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Resident size by `mincore`; zero if the call fails.
    pub fn resident(&self) -> Bytes {
        self.resident_in(0, self.len)
    }

    /// Resident size of `len` bytes from the page-aligned `offset`.
    fn resident_in(&self, offset: usize, len: usize) -> Bytes {
        self.range(offset, len)
            .and_then(|start| resident_pages(start.as_ptr(), len))
            .map_or(Bytes::ZERO, |pages| page().saturating_mul(pages))
    }

    /// Unmaps it; returns whether the kernel confirmed.
    fn unmap(self) -> bool {
        let mapping = ManuallyDrop::new(self);
        // SAFETY: our own mapping, which is not dropped after this; raw users have ended by their own contract.
        unsafe { mman::munmap(mapping.start.cast(), mapping.len) }.is_ok()
    }

    /// Keeps `len` bytes starting at a huge page and unmaps the rest.
    fn trim_to_huge_page(&mut self, len: usize) -> io::Result<()> {
        let huge = HUGE_PAGE.as_len();
        let address = self.start.addr().get();
        let head = address.next_multiple_of(huge) - address;
        let tail = self.len - head - len;
        if head > 0 {
            // SAFETY: the first `head` bytes of our own mapping, without pointers into it yet.
            unsafe { mman::munmap(self.start.cast(), head) }?;
            // SAFETY: `head` is smaller than the mapping.
            self.start = unsafe { self.start.add(head) };
            self.len -= head;
        }
        if tail > 0 {
            // SAFETY: `len` bytes from the new start are inside the mapping.
            let end = unsafe { self.start.add(len) };
            // SAFETY: the last `tail` bytes of our own mapping, without pointers into it yet.
            unsafe { mman::munmap(end.cast(), tail) }?;
            self.len = len;
        }
        Ok(())
    }

    fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        self.advise_part(0, self.len, advice)
    }

    fn advise_part(&self, offset: usize, len: usize, advice: libc::c_int) -> io::Result<()> {
        let start = self.range(offset, len).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a part of our own mapping; none of the advices used here changes its contents.
        let result = unsafe { libc::madvise(start.as_ptr().cast(), len, advice) };
        Ok(Errno::result(result).map(drop)?)
    }

    /// Populates all of it; no byte may be in use yet.
    fn populate(&self) -> io::Result<()> {
        self.populate_part(0, self.len)
    }

    /// Populates `len` bytes from `offset`; none may be in use yet.
    ///
    /// In pieces: while the kernel populates one large range, it blocks mappings by other threads. 512 MiB new to a
    /// virtual machine stalled the control loop for more than 1.75 s, after which the watchdog sheds the engine.
    fn populate_part(&self, offset: usize, len: usize) -> io::Result<()> {
        for at in (0..len).step_by(HUGE_PAGE.as_len()) {
            let piece = HUGE_PAGE.as_len().min(len - at);
            match self.advise_part(offset + at, piece, libc::MADV_POPULATE_WRITE) {
                Ok(()) => {}
                // Linux before 5.14.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    self.touch(offset + at, piece);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes to each page of `len` bytes from `offset`; none may be in use yet.
    ///
    /// If the memory is new to a virtual machine, 2 MiB take milliseconds. One populating call for the whole range
    /// blocks mappings and thread starts of others; a page fault blocks no other thread, from Linux 6.4 on.
    fn touch(&self, offset: usize, len: usize) {
        let Some(start) = self.range(offset, len) else {
            return;
        };
        for page in (0..len).step_by(page().as_len()) {
            // A zero visible to the compiler turns this into a read, which populates nothing.
            // SAFETY: inside our own mapping; the write leaves the byte unchanged.
            unsafe { AtomicU8::from_ptr(start.add(page).as_ptr()) }
                .fetch_or(black_box(0), Ordering::Relaxed);
        }
    }
}

/// Memory as seen by a device: its own, or a host mapping that it reads in place. Dropping it returns it.
pub trait DeviceMemory: std::fmt::Debug + Send + Sync {
    /// Device address.
    fn address(&self) -> u64;

    /// Length in bytes.
    fn bytes(&self) -> Bytes;

    /// Copies bytes into the device's own memory and returns once they have arrived.
    ///
    /// # Errors
    ///
    /// The range is outside, or the device refuses.
    fn bring(&self, offset: usize, from: &[u8]) -> io::Result<()>;

    /// Host memory held in addition for filling it: one part of equal length per reader.
    fn staging(&self) -> Option<&SharedMapping> {
        None
    }

    /// Host memory from which [`bring`](Self::bring) copies without an intermediate copy.
    ///
    /// # Errors
    ///
    /// Not available.
    fn page_locked(&self, bytes: Bytes) -> io::Result<SharedMapping>;

    /// Returns it before the drop; reports whether the device confirmed.
    fn release(&mut self) -> bool;
}

/// A mapping shared by threads, some of which write through [`range`](Self::range), or memory of a device, which has no
/// host address.
///
/// No safe method reads its bytes.
#[derive(Debug)]
pub struct SharedMapping {
    /// Dropped before the mapping it may refer to.
    device: Option<Box<dyn DeviceMemory>>,
    host: Option<Mapping>,
}

impl From<Mapping> for SharedMapping {
    fn from(mapping: Mapping) -> Self {
        Self {
            device: None,
            host: Some(mapping),
        }
    }
}

impl SharedMapping {
    /// Memory of a device; `host` is the mapping that the device reads, if any.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "only the backend of a GPU has memory of a device")
    )]
    pub(super) fn of_device(device: Box<dyn DeviceMemory>, host: Option<Mapping>) -> Self {
        Self {
            device: Some(device),
            host,
        }
    }

    /// Reserves address space that is inaccessible until its protection is changed.
    ///
    /// # Errors
    /// No address space.
    pub(super) fn inaccessible(bytes: Bytes) -> io::Result<Self> {
        Mapping::aligned(bytes, ProtFlags::PROT_NONE).map(Self::from)
    }

    /// Length in bytes: whole pages.
    pub fn bytes(&self) -> Bytes {
        match (&self.host, &self.device) {
            (Some(host), _) => host.bytes(),
            (None, Some(device)) => device.bytes(),
            (None, None) => Bytes::ZERO,
        }
    }

    /// As [`Mapping::range`]; `None` for memory of a device.
    pub fn range(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        self.host.as_ref()?.range(offset, len)
    }

    /// The device's view, if any.
    pub(super) fn device(&self) -> Option<&dyn DeviceMemory> {
        self.device.as_deref()
    }

    /// Whether it has no host address.
    pub(super) const fn is_beyond_host(&self) -> bool {
        self.host.is_none()
    }

    /// Length including its staging memory.
    pub fn held(&self) -> Bytes {
        let staging = self.device().and_then(DeviceMemory::staging);
        self.bytes()
            .saturating_add(staging.map_or(Bytes::ZERO, Self::bytes))
    }

    /// As [`Mapping::resident`]; memory of a device counts in full.
    pub fn resident(&self) -> Bytes {
        match (&self.host, &self.device) {
            (Some(host), None) => host.resident(),
            _ => self.held(),
        }
    }

    /// Resident size of `len` bytes from the page-aligned `offset`.
    pub(super) fn resident_in(&self, offset: usize, len: usize) -> Bytes {
        self.host
            .as_ref()
            .map_or(Bytes::ZERO, |host| host.resident_in(offset, len))
    }

    /// Populates all of it; no byte may be in use yet.
    pub(super) fn populate(&self) -> io::Result<()> {
        self.host.as_ref().map_or(Ok(()), Mapping::populate)
    }

    /// As [`Self::populate`], for `len` bytes from `offset`.
    pub(super) fn populate_part(&self, offset: usize, len: usize) -> io::Result<()> {
        self.host
            .as_ref()
            .map_or(Ok(()), |host| host.populate_part(offset, len))
    }

    /// Writes to each page of `len` bytes from `offset`, which no slice may cover.
    pub(super) fn touch(&self, offset: usize, len: usize) {
        if let Some(host) = &self.host {
            host.touch(offset, len);
        }
    }

    /// Unmaps it after the last other thread has dropped it; returns the size that had been resident: zero unless the
    /// device or the kernel confirmed the release.
    #[must_use]
    pub fn release(self) -> Bytes {
        let resident = self.resident();
        let Self { device, host } = self;
        // The device first: it may read the mapping.
        let confirmed = device.is_none_or(|mut device| device.release());
        let unmapped = host.is_none_or(Mapping::unmap);
        if confirmed && unmapped {
            resident
        } else {
            Bytes::ZERO
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping; slices into it borrow it, and raw users have ended by their own contract. The only
        // possible failure is a range that is already unmapped, which needs no handling.
        unsafe { mman::munmap(self.start.cast(), self.len) }.ok();
    }
}

/// Resident pages of `len` bytes from `address`; `None` if a part is not mapped.
fn resident_pages(address: *const u8, len: usize) -> Option<u64> {
    let mut pages = 0u64;
    let mut flags = [0u8; 4096];
    let step = flags.len() * page().as_len();
    let mut done = 0;
    while done < len {
        let part = step.min(len - done);
        let count = part.div_ceil(page().as_len());
        // SAFETY: `mincore` writes one byte per page of the range, at most `flags.len()`; the addresses are looked up,
        // never dereferenced.
        let result = unsafe {
            libc::mincore(
                address.wrapping_add(done).cast_mut().cast(),
                part,
                flags.as_mut_ptr().cast(),
            )
        };
        Errno::result(result).ok()?;
        pages += flags
            .iter()
            .take(count)
            .map(|flag| u64::from(flag & 1))
            .sum::<u64>();
        done += part;
    }
    Some(pages)
}

/// Resident set of this process from `/proc/self/statm`; zero if unreadable.
pub fn process_resident() -> Bytes {
    page().saturating_mul(number_of_statm(1).unwrap_or(0))
}

/// File-backed pages within [`process_resident`]: text and constants of the program and its libraries, which the page
/// cache shares among all processes.
pub fn process_file_resident() -> Bytes {
    page().saturating_mul(number_of_statm(2).unwrap_or(0))
}

/// One field of `/proc/self/statm`, read without allocating for the shed path.
fn number_of_statm(index: usize) -> Option<u64> {
    let mut text = [0u8; 128];
    let length = File::open("/proc/self/statm").ok()?.read(&mut text).ok()?;
    let words = str::from_utf8(text.get(..length)?).ok()?;
    words.split_ascii_whitespace().nth(index)?.parse().ok()
}

/// Whether a kernel with base pages of this size has huge pages of [`HUGE_PAGE`]: as many base pages as entries of 8
/// bytes fit into one.
///
/// Those of larger base pages (32 MiB for 16 KiB, 512 MiB for 64 KiB) are not used: the kernel frees none of a huge page
/// while a part of it is mapped, and the first byte that is touched populates all of it.
pub(crate) const fn has_huge_pages(page: Bytes) -> bool {
    page.get().saturating_mul(page.get() / 8) == HUGE_PAGE.get()
}

/// Size of a huge page with 4 KiB base pages, on both architectures; a multiple of any base page.
pub const HUGE_PAGE: Bytes = Bytes::from_mib(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_populated_mapping_is_resident_and_a_released_one_is_gone() {
        for mib in [1, 5] {
            let mapping = Mapping::new(Bytes::from_mib(mib), Backing::Now).unwrap();
            assert_eq!(mapping.resident(), Bytes::from_mib(mib));
            let (address, len) = (mapping.start.as_ptr(), mapping.len);
            assert_eq!(SharedMapping::from(mapping).release(), Bytes::from_mib(mib));
            // The range is unmapped unless another test thread received the address meanwhile.
            if let Some(pages) = resident_pages(address, len) {
                assert!(page().saturating_mul(pages) <= Bytes::from_mib(mib));
            }
        }
    }

    #[test]
    fn an_untouched_mapping_holds_nothing_and_large_ones_start_at_a_huge_page() {
        let mapping = Mapping::new(Bytes::from_mib(3), Backing::OnTouch).unwrap();
        assert_eq!(mapping.resident(), Bytes::ZERO);
        assert_eq!(mapping.start.addr().get() % HUGE_PAGE.as_len(), 0);
        assert_eq!(mapping.bytes(), Bytes::from_mib(3));
    }

    #[test]
    fn huge_pages_are_used_only_with_base_pages_of_4_kib() {
        assert_eq!(
            [4, 16, 64].map(|kib| has_huge_pages(Bytes::from_kib(kib))),
            [true, false, false]
        );
    }

    #[test]
    fn a_range_outside_is_refused() {
        let mapping = Mapping::new(Bytes::new(1), Backing::OnTouch).unwrap();
        assert_eq!(mapping.bytes(), page());
        assert!(mapping.range(0, page().as_len()).is_some());
        assert!(mapping.range(page().as_len() - 1, 2).is_none());
        assert!(mapping.range(usize::MAX, 2).is_none());
    }
}
