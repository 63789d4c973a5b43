//! Emergency reserve of memory and processor time, so that a shed never has to allocate from the system.
//!
//! A decision makes lists, plans and words. In calm times they come from the system's allocator like everything else.
//! Inside [`within`] they come from blocks that were taken, touched and locked when the daemon started, so that a shed
//! needs neither a page, nor a lock whose holder waits for one.
//!
//! ```text
//!   within(…) ──► a block of the next size that is free ──► used ──► given back, by whatever thread
//!                    │ none is left, or too large
//!                    └──► the system's allocator; counted, see [`counts`]
//! ```
//!
//! It works in a program whose allocator is [`EmergencyAllocator`], and only after [`prepare`].

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

/// An allocator that has blocks in reserve before the one below it.
#[derive(Clone, Copy, Debug)]
pub struct EmergencyAllocator<A> {
    below: A,
}

/// What was asked for inside [`within`], since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks that were in reserve.
    pub served: u64,
    /// What none was left for, so that the system's allocator was asked.
    pub missed: u64,
}

thread_local! {
    static WITHIN: Cell<bool> = const { Cell::new(false) };
}

static READY: AtomicBool = AtomicBool::new(false);
static SERVED: AtomicU64 = AtomicU64::new(0);
static MISSED: AtomicU64 = AtomicU64::new(0);
static ENDS: AtomicBool = AtomicBool::new(false);

/// Touches and locks the blocks; from then on [`within`] has them. Returns what was locked.
pub fn prepare() -> Locked {
    let (start, length) = blocks::region();
    let locked = lock::range("memory for sheds", start, length, lock::When::Now);
    static TOUCHED: Once = Once::new();
    TOUCHED.call_once(|| {
        // SAFETY: no block is in use yet, since `READY` is set below and never taken back.
        unsafe { blocks::touch() };
        READY.store(true, Ordering::Release);
    });
    locked
}

/// Does `work`; what it allocates on this thread comes from the blocks in reserve.
///
/// What it leaves behind keeps its block, so this is for work that leaves little.
pub fn within<T>(work: impl FnOnce() -> T) -> T {
    with(true, work)
}

/// Does `work` with the system's allocator, inside [`within`] too: for what is large and no part of a shed.
pub fn outside<T>(work: impl FnOnce() -> T) -> T {
    with(false, work)
}

fn with<T>(within: bool, work: impl FnOnce() -> T) -> T {
    /// Goes back even when the work panics.
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            WITHIN.set(self.0);
        }
    }
    let _before = Before(WITHIN.replace(within));
    work()
}

/// The same where it is `wanted`; elsewhere, for work that grows or leaves much, everything is as always.
pub fn within_if<T>(wanted: bool, work: impl FnOnce() -> T) -> T {
    if wanted { within(work) } else { work() }
}

/// Has this process end at the first memory that the system refuses it: for a process that exists for one job with a bound.
/// Unwinding and backtraces would ask for more memory, and wait for locks that who asked has.
pub fn end_when_refused() {
    ENDS.store(true, Ordering::Relaxed);
}

/// What the system has given; a process that [is to end](end_when_refused) does not return without it.
fn granted(start: *mut u8) -> *mut u8 {
    if start.is_null() && ENDS.load(Ordering::Relaxed) {
        // SAFETY: ends the process; nothing of it is needed any more.
        unsafe { libc::_exit(1) }
    }
    start
}

/// How often a block was there, and how often not.
#[must_use]
pub fn counts() -> Counts {
    Counts {
        served: SERVED.load(Ordering::Relaxed),
        missed: MISSED.load(Ordering::Relaxed),
    }
}

/// Bytes of all blocks that are in use now, in whole blocks.
#[must_use]
pub fn in_use() -> usize {
    blocks::in_use()
}

impl<A> EmergencyAllocator<A> {
    /// Blocks in reserve before `below`.
    pub const fn before(below: A) -> Self {
        Self { below }
    }
}

/// A block for `layout`, if this thread is to have one.
fn block(layout: Layout) -> Option<*mut u8> {
    // A thread that is being taken down has nothing to shed.
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

// SAFETY: a block is as large as asked and as aligned, it has one owner until it is given back, and what is not one of
// the blocks goes to the allocator below, as it came from there.
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
            // SAFETY: as promised by the caller; it is none of the blocks, so it came from below.
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
            // SAFETY: both are at least as large as what is copied, and the new one is ours alone.
            unsafe { ptr::copy_nonoverlapping(start, moved, layout.size().min(size)) };
            // SAFETY: as promised by the caller, who does not use it any more.
            unsafe { self.dealloc(start, layout) };
        }
        moved
    }
}
