//! Current and peak allocations of this process.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

#[global_allocator]
static COUNTING: Counting = Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator with counters.
struct Counting;

// SAFETY: every call is passed unchanged to the system's allocator; counting touches nothing else.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) };
    }
}

/// Resets the peak, and returns the current allocations.
pub(crate) fn begin() -> usize {
    let now = NOW.load(Ordering::Relaxed);
    MOST.store(now, Ordering::Relaxed);
    now
}

/// The peak of allocations since [`begin`] returned `before`, above that value.
pub(crate) fn most_since(before: usize) -> usize {
    MOST.load(Ordering::Relaxed).saturating_sub(before)
}
