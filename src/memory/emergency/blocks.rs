//! Blocks of the emergency reserve: eight sizes with free lists.
//!
//! Allocation and release are lock-free: the head of a list is updated by compare-and-swap, together with a change
//! counter against the ABA problem.

use std::{
    alloc::Layout,
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

/// Blocks of one size.
struct Class {
    size: usize,
    count: u32,
    /// Their offset in the region.
    offset: usize,
    /// The index of the first one in [`LINKS`].
    first: u32,
    /// Head of the free list: change counter against ABA in the upper half, number of the first block, from 1, in the
    /// lower; 0 is the end.
    list: AtomicU64,
    /// Index of the first block that was never used.
    fresh: AtomicU32,
    used: AtomicU32,
}

/// Sizes and counts, 704 KiB in all. A decision over 32 layers makes some 150 allocations of 125 KB in all, most below
/// 512 bytes and none above a few KiB; this suffices for several concurrent decisions, for text queued for writing, and
/// for allocations kept by leases granted through a shed. Our choice: a daemon without a model should stay small.
const SIZES: [(usize, u32); CLASSES] = [
    (64, 1024),
    (128, 1024),
    (256, 512),
    (512, 256),
    (1024, 64),
    (4096, 16),
    (16_384, 4),
    (65_536, 1),
];

const CLASSES: usize = 8;

#[repr(C, align(4096))]
struct Region(UnsafeCell<[u8; TOTAL]>);

// SAFETY: its bytes are accessed only through blocks, each of which has one owner at a time.
unsafe impl Sync for Region {}

static REGION: Region = Region(UnsafeCell::new([0; TOTAL]));

/// For each block, the number of the next one in its list, as in [`Class::list`].
static LINKS: [AtomicU32; BLOCKS] = [const { AtomicU32::new(0) }; BLOCKS];

static CLASS: [Class; CLASSES] = classes();

const TOTAL: usize = totals().0;
const BLOCKS: usize = totals().1;

/// Total bytes and blocks of all sizes.
const fn totals() -> (usize, usize) {
    let (mut bytes, mut blocks) = (0, 0);
    let mut sizes = SIZES.as_slice();
    while let [(size, count), rest @ ..] = sizes {
        bytes += *size * *count as usize;
        blocks += *count as usize;
        sizes = rest;
    }
    (bytes, blocks)
}

#[expect(
    clippy::indexing_slicing,
    reason = "computed by the compiler, which refuses what is out of bounds"
)]
const fn classes() -> [Class; CLASSES] {
    let mut classes = [const {
        Class {
            size: 0,
            count: 0,
            offset: 0,
            first: 0,
            list: AtomicU64::new(0),
            fresh: AtomicU32::new(0),
            used: AtomicU32::new(0),
        }
    }; CLASSES];
    // Large blocks first, so that each is aligned to its size.
    let (mut offset, mut first, mut index) = (0, 0, CLASSES);
    while index > 0 {
        index -= 1;
        let (size, count) = SIZES[index];
        classes[index].size = size;
        classes[index].count = count;
        classes[index].offset = offset;
        classes[index].first = first;
        offset += size * count as usize;
        first += count;
    }
    classes
}

pub(super) fn region() -> (*const u8, usize) {
    (REGION.0.get().cast(), TOTAL)
}

/// Populates every page.
///
/// # Safety
/// No block may be in use.
pub(super) unsafe fn touch() {
    let start = REGION.0.get().cast::<u8>();
    for offset in (0..TOTAL).step_by(PAGE) {
        // SAFETY: inside the region, which is unused; volatile so that the write happens.
        unsafe { start.add(offset).write_volatile(0) };
    }
}

/// Returns a block for `layout`, if one is left; no block is aligned to more than a page.
pub(super) fn take(layout: Layout) -> Option<*mut u8> {
    // Blocks are aligned to their size, at most to a page.
    let (size, align) = (layout.size(), layout.align());
    let mut fitting = CLASS.iter().filter(|class| class.size >= size.max(align));
    if align > PAGE {
        None
    } else {
        fitting.find_map(Class::take)
    }
}

/// Frees a block; false if `start` is not one.
pub(super) fn give_back(start: *mut u8) -> bool {
    let Some((class, block)) = find(start) else {
        return false;
    };
    class.give_back(block);
    true
}

/// Size of the block at `start`, if it is one.
pub(super) fn room_of(start: *mut u8) -> Option<usize> {
    find(start).map(|(class, _)| class.size)
}

pub(super) fn in_use() -> usize {
    let of = |class: &Class| class.size * class.used.load(Ordering::Relaxed) as usize;
    CLASS.iter().map(of).sum()
}

/// The class of the block at `start`, and its index in it.
fn find(start: *const u8) -> Option<(&'static Class, u32)> {
    let offset = start.addr().checked_sub(region().0.addr())?;
    if offset >= TOTAL {
        return None;
    }
    CLASS.iter().find_map(|class| {
        let number = u32::try_from(offset.checked_sub(class.offset)? / class.size).ok()?;
        (number < class.count).then_some((class, number))
    })
}

impl Class {
    fn take(&self) -> Option<*mut u8> {
        let number = self.take_listed().or_else(|| self.take_fresh())?;
        self.used.fetch_add(1, Ordering::Relaxed);
        let offset = self.offset + self.size * number as usize;
        // SAFETY: a block of this class is inside the region.
        Some(unsafe { REGION.0.get().cast::<u8>().add(offset) })
    }

    fn take_listed(&self) -> Option<u32> {
        let mut list = self.list.load(Ordering::Acquire);
        loop {
            let number = first_of(list).checked_sub(1)?;
            let next = self.link(number)?.load(Ordering::Relaxed);
            match self.change(list, next) {
                Ok(()) => return Some(number),
                Err(present) => list = present,
            }
        }
    }

    fn take_fresh(&self) -> Option<u32> {
        let next = |fresh| (fresh < self.count).then_some(fresh + 1);
        self.fresh
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
            .ok()
    }

    fn give_back(&self, number: u32) {
        let Some(link) = self.link(number) else {
            return;
        };
        self.used.fetch_sub(1, Ordering::Relaxed);
        let mut list = self.list.load(Ordering::Relaxed);
        loop {
            link.store(first_of(list), Ordering::Relaxed);
            match self.change(list, number + 1) {
                Ok(()) => return,
                Err(present) => list = present,
            }
        }
    }

    /// Sets the head of the list to `first`, if the list is unchanged.
    fn change(&self, list: u64, first: u32) -> Result<(), u64> {
        let changed = ((list >> 32).wrapping_add(1) << 32) | u64::from(first);
        self.list
            .compare_exchange_weak(list, changed, Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
    }

    fn link(&self, number: u32) -> Option<&'static AtomicU32> {
        LINKS.get((self.first + number) as usize)
    }
}

/// The number of the first block of a list.
const fn first_of(list: u64) -> u32 {
    (list & 0xffff_ffff) as u32
}

const PAGE: usize = 4096;

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, thread};

    use super::*;

    #[test]
    fn blocks_are_large_enough_aligned_and_apart() {
        let mut taken: Vec<(usize, usize)> = Vec::new();
        for (size, align) in [
            (1, 1),
            (64, 64),
            (65, 1),
            (100, 128),
            (4128, 8),
            (40, 4096),
            (65_536, 16),
        ] {
            let start = take(Layout::from_size_align(size, align).unwrap()).unwrap();
            let room = room_of(start).unwrap();
            assert!(room >= size && start.addr().is_multiple_of(align));
            taken.push((start.addr(), room));
        }
        taken.sort_unstable();
        assert!(
            taken
                .windows(2)
                .all(|pair| pair[0].0 + pair[0].1 <= pair[1].0),
            "{taken:?}"
        );
        for (start, _) in taken {
            assert!(give_back(start as *mut u8));
        }
        assert!(take(Layout::from_size_align(TOTAL, 1).unwrap()).is_none());
        assert!(take(Layout::from_size_align(64, 2 * PAGE).unwrap()).is_none());
        assert!(!give_back(std::ptr::from_ref(&PAGE).cast_mut().cast()));
    }

    #[test]
    fn what_is_used_up_is_reported_and_what_is_given_back_is_there_again() {
        let class = &CLASS[CLASSES - 1];
        let all: Vec<*mut u8> = std::iter::from_fn(|| class.take()).collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
        assert!(class.take().is_none());
        for start in &all {
            assert!(give_back(*start));
        }
        let again: Vec<*mut u8> = std::iter::from_fn(|| class.take()).collect();
        assert!(again.len() >= all.len());
        for start in again {
            assert!(give_back(start));
        }
    }

    #[test]
    fn no_block_has_two_owners_however_threads_take_turns() {
        let worker = |mark: u8| {
            move || {
                for round in 0..20_000u32 {
                    let starts: Vec<*mut u8> = (0..(round % 5 + 1))
                        .filter_map(|_| CLASS[3].take())
                        .collect();
                    for start in &starts {
                        // SAFETY: the block is ours until it is freed.
                        unsafe { start.write_bytes(mark, 512) };
                    }
                    for start in starts {
                        // SAFETY: as above.
                        let found = unsafe { std::slice::from_raw_parts(start, 512) };
                        assert!(found.iter().all(|byte| *byte == mark));
                        assert!(give_back(start));
                    }
                }
            }
        };
        let threads: Vec<_> = (1..=4).map(|mark| thread::spawn(worker(mark))).collect();
        for thread in threads {
            thread.join().unwrap();
        }
    }
}
