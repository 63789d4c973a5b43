//! Emergency reserve: memory and processor time with which a shed needs no system allocation.
//!
//! Decisions allocate. Normally that goes to the system allocator. Inside [`within`], blocks that were allocated,
//! touched and locked at the daemon's start serve them, so that a shed needs neither a page nor a lock whose holder
//! waits for one.
//!
//! ```text
//!   within(…) ──► the next larger free block ──► used ──► freed, by any thread
//!                    │ none is left, or too large
//!                    └──► the system's allocator; counted, see [`counts`]
//! ```
//!
//! It requires [`EmergencyAllocator`] as the program's allocator, and takes effect after [`prepare`].

mod blocks;
mod lock;
mod prompt;

use std::{
    alloc::{GlobalAlloc, Layout},
    cell::Cell,
    ptr,
    sync::{
        Once,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

pub use lock::{Locked, lock_program, lock_stack, stacks};
pub use prompt::be_prompt;

/// An allocator with reserved blocks in front of another allocator.
#[derive(Clone, Copy, Debug)]
pub struct EmergencyAllocator<A> {
    below: A,
}

/// Allocations requested inside [`within`], since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Served by reserved blocks.
    pub served: u64,
    /// Passed on to the system's allocator because no block was left.
    pub missed: u64,
}

thread_local! {
    static WITHIN: Cell<bool> = const { Cell::new(false) };
}

static READY: AtomicBool = AtomicBool::new(false);
static SERVED: AtomicU64 = AtomicU64::new(0);
static MISSED: AtomicU64 = AtomicU64::new(0);
static ENDS: AtomicBool = AtomicBool::new(false);

/// Touches and locks the blocks, and enables [`within`]. Returns the result of locking.
pub fn prepare() -> Locked {
    let (start, length) = blocks::region();
    let locked = lock::range("memory for sheds", start, length, lock::When::Now);
    static TOUCHED: Once = Once::new();
    TOUCHED.call_once(|| {
        // SAFETY: no block is in use yet, since `READY` is set below and never reset.
        unsafe { blocks::touch() };
        READY.store(true, Ordering::Release);
    });
    locked
}

/// Runs `work`; its allocations on this thread are served by reserved blocks.
///
/// Memory that outlives the work keeps its block, so this is for work that leaves little.
pub fn within<T>(work: impl FnOnce() -> T) -> T {
    with(true, work)
}

/// Runs `work` with the system's allocator, even inside [`within`]: for large allocations that are not part of a shed.
pub fn outside<T>(work: impl FnOnce() -> T) -> T {
    with(false, work)
}

fn with<T>(within: bool, work: impl FnOnce() -> T) -> T {
    /// Restores the previous state, also on a panic.
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            WITHIN.set(self.0);
        }
    }
    let _before = Before(WITHIN.replace(within));
    work()
}

/// As [`within`] if `wanted`; otherwise, for work that grows or leaves much, allocates normally.
pub fn within_if<T>(wanted: bool, work: impl FnOnce() -> T) -> T {
    if wanted { within(work) } else { work() }
}

/// Makes this process exit at the first failed allocation: for a process that exists for one bounded job. Unwinding and
/// backtraces would need more memory, and wait for locks held by the allocating thread.
pub fn end_when_refused() {
    ENDS.store(true, Ordering::Relaxed);
}

/// The result of the system's allocator; a process set to [exit](end_when_refused) does not return without it.
fn granted(start: *mut u8) -> *mut u8 {
    if start.is_null() && ENDS.load(Ordering::Relaxed) {
        // SAFETY: ends the process; none of its state is needed any more.
        unsafe { libc::_exit(1) }
    }
    start
}

/// Numbers of served and missed allocations.
pub fn counts() -> Counts {
    Counts {
        served: SERVED.load(Ordering::Relaxed),
        missed: MISSED.load(Ordering::Relaxed),
    }
}

/// Bytes of all blocks in use now, in whole blocks.
pub fn in_use() -> usize {
    blocks::in_use()
}

impl<A> EmergencyAllocator<A> {
    /// Reserved blocks in front of `below`.
    pub const fn before(below: A) -> Self {
        Self { below }
    }
}

/// A block for `layout`, if this thread may use one.
fn block(layout: Layout) -> Option<*mut u8> {
    // A thread that is being destroyed has nothing to shed.
    if !WITHIN.try_with(Cell::get).unwrap_or(false) || !READY.load(Ordering::Acquire) {
        return None;
    }
    let block = blocks::take(layout);
    if block.is_some() {
        SERVED.fetch_add(1, Ordering::Relaxed);
    } else {
        MISSED.fetch_add(1, Ordering::Relaxed);
    }
    block
}

// SAFETY: a block has the requested size and alignment and one owner until it is freed; any other memory goes back to
// the allocator below, where it came from.
unsafe impl<A: GlobalAlloc> GlobalAlloc for EmergencyAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as promised by the caller.
        block(layout).unwrap_or_else(|| granted(unsafe { self.below.alloc(layout) }))
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match block(layout) {
            Some(start) => {
                // SAFETY: the block is at least as large, and ours.
                unsafe { ptr::write_bytes(start, 0, layout.size()) };
                start
            }
            // SAFETY: as promised by the caller.
            None => granted(unsafe { self.below.alloc_zeroed(layout) }),
        }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        if !blocks::give_back(start) {
            // SAFETY: as promised by the caller; it is not a block, so it came from below.
            unsafe { self.below.dealloc(start, layout) };
        }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let room = blocks::room_of(start);
        if room.is_some_and(|room| size <= room) {
            return start;
        }
        let is_within = WITHIN.try_with(Cell::get).unwrap_or(false);
        if room.is_none() && !is_within {
            // SAFETY: as promised by the caller.
            return granted(unsafe { self.below.realloc(start, layout, size) });
        }
        // SAFETY: the caller promises that `size` is valid with this alignment.
        let larger = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        // SAFETY: as promised by the caller.
        let moved = unsafe { self.alloc(larger) };
        if !moved.is_null() {
            // SAFETY: both are at least as large as the copy, and the new one is not shared.
            unsafe { ptr::copy_nonoverlapping(start, moved, layout.size().min(size)) };
            // SAFETY: as promised by the caller, who no longer uses it.
            unsafe { self.dealloc(start, layout) };
        }
        moved
    }
}
