//! Reserved address space that is backed by memory part by part.
//!
//! Opening changes protection and populates nothing, so that it takes microseconds at any length; the kernel populates
//! pages at first use. Closing replaces the pages by fresh, inaccessible address space.

use std::{io, num::NonZeroUsize, ptr::NonNull};

use nix::sys::mman::{self, MapFlags, ProtFlags};

use super::arena::{HUGE_PAGE, SharedMapping};
use cotenant_units::{Bytes, page};

/// Address space with an accessible prefix.
#[derive(Debug)]
pub struct Reserve {
    /// The whole range, inaccessible except for the first `open` bytes.
    space: SharedMapping,
    open: usize,
    /// Unit of opening and closing.
    granule: usize,
}

impl Reserve {
    /// Reserves room for `bytes`, all inaccessible. `granule` is a page, or a huge page for memory in huge pages; any
    /// other value is taken as a page.
    ///
    /// # Errors
    /// No address space.
    pub fn new(bytes: Bytes, granule: Bytes) -> io::Result<Self> {
        let granule = if granule == HUGE_PAGE {
            HUGE_PAGE
        } else {
            page()
        };
        Ok(Self {
            space: SharedMapping::inaccessible(bytes.round_up(granule))?,
            open: 0,
            granule: granule.as_len(),
        })
    }

    /// Opens or closes until the first `bytes`, rounded up to the granule, are accessible. Returns the resident size of
    /// the closed part.
    ///
    /// # Errors
    /// The size exceeds the reservation, or the kernel refuses; nothing has changed then.
    pub fn set_open(&mut self, bytes: Bytes) -> io::Result<Bytes> {
        let wanted = bytes.as_len().next_multiple_of(self.granule);
        let mut freed = Bytes::ZERO;
        if wanted > self.open {
            self.open_up(self.open, wanted - self.open)?;
        } else if wanted < self.open {
            freed = self.space.resident_in(wanted, self.open - wanted);
            self.close_down(wanted, self.open - wanted)?;
        }
        self.open = wanted;
        Ok(freed)
    }

    /// Populates everything open after the first `bytes`.
    ///
    /// # Errors
    /// No memory; a part may be populated then.
    pub fn populate_from(&self, bytes: Bytes) -> io::Result<()> {
        let from = bytes.as_len().next_multiple_of(self.granule).min(self.open);
        self.space.populate_part(from, self.open - from)
    }

    /// Resident size of the open part.
    pub fn resident(&self) -> Bytes {
        self.space.resident_in(0, self.open)
    }

    /// The address of `len` bytes from `offset`, or `None` unless all are open.
    pub fn range(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if offset.checked_add(len)? > self.open {
            return None;
        }
        self.space.range(offset, len)
    }

    fn open_up(&self, offset: usize, len: usize) -> io::Result<()> {
        let start = self.part(offset, len)?;
        // SAFETY: a part of our own mapping, without pointers into it while it is closed.
        unsafe {
            mman::mprotect(
                start.cast(),
                len,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
            )
        }?;
        let advice = if self.granule == HUGE_PAGE.as_len() {
            libc::MADV_HUGEPAGE
        } else {
            // Even with system-wide huge pages: a part of one cannot be returned.
            libc::MADV_NOHUGEPAGE
        };
        for advice in [advice, libc::MADV_DONTDUMP] {
            // SAFETY: as above; these advices change no contents. Best effort: a kernel without huge pages uses small
            // ones.
            unsafe { libc::madvise(start.as_ptr().cast(), len, advice) };
        }
        Ok(())
    }

    fn close_down(&self, offset: usize, len: usize) -> io::Result<()> {
        let start = self.part(offset, len)?;
        let length = NonZeroUsize::new(len).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED;
        // SAFETY: replaces a part of our own mapping; the caller's `&mut self` excludes borrows from it.
        unsafe { mman::mmap_anonymous(Some(start.addr()), length, ProtFlags::PROT_NONE, flags) }?;
        Ok(())
    }

    fn part(&self, offset: usize, len: usize) -> io::Result<NonNull<u8>> {
        self.space
            .range(offset, len)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opening_takes_no_memory_and_closing_gives_all_of_it_back() {
        for granule in [page(), HUGE_PAGE] {
            let mut reserve = Reserve::new(Bytes::from_mib(64), granule).unwrap();
            assert!(reserve.range(0, 1).is_none(), "nothing is open");
            reserve.set_open(Bytes::from_mib(16)).unwrap();
            assert_eq!(
                (Bytes::of_len(reserve.open), reserve.resident()),
                (Bytes::from_mib(16), Bytes::ZERO)
            );

            let start = reserve.range(0, 16 << 20).unwrap();
            for page in 0..2048 {
                // SAFETY: inside the first 8 MiB of the open part, and not shared.
                unsafe { start.add(page * 4096).write(7) };
            }
            assert_eq!(reserve.resident(), Bytes::from_mib(8));
            assert_eq!(
                reserve.set_open(Bytes::from_mib(4)).unwrap(),
                Bytes::from_mib(4)
            );
            assert_eq!(
                (Bytes::of_len(reserve.open), reserve.resident()),
                (Bytes::from_mib(4), Bytes::from_mib(4))
            );
            assert!(reserve.range(4 << 20, 1).is_none(), "closed is closed");
            // SAFETY: open throughout.
            let kept = unsafe { reserve.range(0, 1).unwrap().read() };
            assert_eq!(kept, 7, "what stays is as it was");

            // Reopened memory is fresh.
            reserve.set_open(Bytes::from_mib(16)).unwrap();
            // SAFETY: open again.
            assert_eq!(unsafe { reserve.range(5 << 20, 1).unwrap().read() }, 0);
        }
    }

    #[test]
    fn more_than_was_reserved_is_refused_and_changes_nothing() {
        let mut reserve = Reserve::new(Bytes::from_mib(1), page()).unwrap();
        reserve.set_open(Bytes::from_kib(8)).unwrap();
        assert!(reserve.set_open(Bytes::from_mib(2)).is_err());
        assert_eq!(Bytes::of_len(reserve.open), Bytes::from_kib(8));
    }
}
