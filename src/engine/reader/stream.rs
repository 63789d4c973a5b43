//! Read-ahead ring, filled by reader threads ahead of the kernels.

use std::{
    collections::VecDeque,
    io,
    path::Path,
    sync::{Arc, Condvar, Mutex, MutexGuard, Weak},
    thread,
    time::{Duration, Instant},
};

use super::{
    file::{Extent, Source},
    progress::ReadProgress,
    staged::read_staged,
};
use crate::{
    arena::{HUGE_PAGE, SharedMapping},
    backend::{Buffer, View},
    disk::{DiskTimeout, Stalled},
    error::ReadError,
};
use cotenant_memory::emergency;
use cotenant_units::Bytes;
use cotenant_units::lock::{locked, waited, waited_for};

/// A memory ring that its own threads fill with pieces of the file, in the order of use.
///
/// ```text
///   schedule (cyclic)   p0 p1 p2 p3 p4 p0 p1 …
///                          └used┘ └ready┘ └reading┘ └ waits for room
/// ```
///
/// The order is fixed, so readers continue across the token boundary by themselves. Several readers keep the disk busy
/// while one of them is not running.
pub struct Stream {
    shared: Arc<Shared>,
    ring: Buffer,
    source: Arc<dyn Source>,
    threads: Vec<thread::JoinHandle<()>>,
    limit: DiskTimeout,
}

/// Reason for a missing piece.
#[derive(Debug)]
pub enum Missing {
    /// It could not be read.
    Failed(ReadError),
    /// The disk did not respond in time.
    Stalled(Stalled),
    /// The waiter lost patience.
    Stopped,
}

/// Waits a step, of up to `left`, for `changed`; after one in vain, `patience` decides whether to keep waiting.
pub(super) fn wait_step<'state, T>(
    changed: &Condvar,
    (mutex, state): (&'state Mutex<T>, MutexGuard<'state, T>),
    left: Duration,
    patience: &mut dyn FnMut() -> bool,
) -> Result<MutexGuard<'state, T>, Missing> {
    let (state, timed_out) = waited_for(changed, state, PATIENCE_STEP.min(left));
    if !timed_out {
        return Ok(state);
    }
    drop(state);
    patience().then(|| locked(mutex)).ok_or(Missing::Stopped)
}

struct Shared {
    state: Mutex<State>,
    progress: ReadProgress,
    /// Signals the end of a read.
    filled: Condvar,
    /// Signals room, or other work for readers.
    room: Condvar,
}

#[derive(Default)]
struct State {
    schedule: Arc<[Extent]>,
    /// Schedule index of the next piece to read.
    next: usize,
    /// Leading slots whose pieces are acquired and not released.
    lent: usize,
    /// Current end of the schedule.
    end: usize,
    slots: VecDeque<Slot>,
    /// Slots created so far: the id of the next one.
    made: u64,
    /// Slots being read.
    reading: usize,
    /// A read failed: nothing more is read until a restart, because the pass that needs the piece ends there.
    failed: bool,
    /// Start of the next slot.
    head: usize,
    capacity: usize,
    /// Populated length of the ring, which may have slots.
    usable: usize,
    /// The rest is being populated.
    growing: bool,
    stop: bool,
}

struct Slot {
    name: u64,
    index: usize,
    start: usize,
    status: Status,
}

enum Status {
    Failed(ReadError),
    /// Since when it is being read.
    Reading(Instant),
    Ready,
}

impl Stream {
    /// Starts to read `schedule`, from `first`, into a populated ring.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(
        source: Arc<dyn Source>,
        ring: Buffer,
        schedule: Arc<[Extent]>,
        first: usize,
    ) -> io::Result<Self> {
        let mut stream = Self::with_ring(source, ring, schedule, first);
        stream.spawn()?;
        Ok(stream)
    }

    /// As [`Self::start`], without waiting for the memory of the ring: a thread populates it from the front, and pieces
    /// cycle through the populated part. Populating a page can take longer than reading it.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn begin(
        source: Arc<dyn Source>,
        ring: Buffer,
        schedule: Arc<[Extent]>,
        first: usize,
    ) -> io::Result<Self> {
        let mut stream = Self::with_ring(source, ring, schedule, first);
        {
            let mut state = locked(&stream.shared.state);
            (state.usable, state.growing) = (0, true);
        }
        let (shared, ring) = (Arc::clone(&stream.shared), Arc::clone(stream.ring.shared()));
        let grows = thread::Builder::new().name("cotenant-reader".to_owned());
        stream
            .threads
            .push(grows.spawn(move || shared.grow(&ring))?);
        stream.spawn()?;
        Ok(stream)
    }

    fn with_ring(
        source: Arc<dyn Source>,
        ring: Buffer,
        schedule: Arc<[Extent]>,
        first: usize,
    ) -> Self {
        Self {
            shared: Arc::new(Shared::new(schedule, first, ring.bytes().as_len())),
            ring,
            source,
            threads: Vec::new(),
            limit: DiskTimeout::default(),
        }
    }

    /// Waits until the whole ring is populated, as the ledger assumes.
    pub fn settle(&self) {
        let mut state = locked(&self.shared.state);
        while state.growing {
            state = waited(&self.shared.filled, state);
        }
    }

    /// Discards read-ahead data, and starts again with `schedule` from `first`: in a ring of the same length from
    /// `another` if the disk hangs, since a hanging read keeps the old one until it returns.
    ///
    /// # Errors
    /// The disk hangs and there is no other ring; or a thread cannot be started.
    ///
    /// # Panics
    ///
    /// While pieces are acquired.
    pub fn restart(
        &mut self,
        schedule: Arc<[Extent]>,
        first: usize,
        another: &mut dyn FnMut(Bytes) -> io::Result<Buffer>,
    ) -> io::Result<()> {
        let mut state = locked(&self.shared.state);
        assert!(
            state.lent == 0,
            "the pieces acquired before are still in use"
        );
        // No read of the old schedule starts any more, nor completes on a slow disk.
        state.failed = true;
        self.shared.progress.give_up();
        state = self.shared.settle(state, self.limit);
        // Without threads an earlier restart has failed: the existing ring would not be filled.
        if state.reading == 0 && !self.threads.is_empty() {
            state.schedule = schedule;
            state.end = usize::MAX;
            state.begin(first);
            self.shared.progress.take_up();
            drop(state);
            self.shared.room.notify_all();
            return Ok(());
        }
        // A read hangs in the kernel: leave it its ring until it returns, and continue with a new one.
        state.stop = true;
        let capacity = state.capacity;
        drop(state);
        self.shared.room.notify_all();
        self.threads.clear();
        self.ring = another(Bytes::of_len(capacity))?;
        self.shared = Arc::new(Shared::new(schedule, first, capacity));
        self.spawn()
    }

    /// Waits until the piece `first` is in the ring, and returns it with the following pieces that are ready too: at
    /// most `most` consecutive pieces of the schedule. Skipped pieces are discarded. The returned pieces stay acquired
    /// until they are [released](Self::release).
    ///
    /// `patience` is called periodically and decides whether to keep waiting.
    ///
    /// # Errors
    /// It could not be read, the disk did not respond, or `patience` ran out.
    pub fn acquire(
        &self,
        first: usize,
        most: usize,
        patience: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<View>, Missing> {
        let (shared, started) = (&*self.shared, Instant::now());
        let mut state = locked(&shared.state);
        let mut again = true;
        loop {
            if state.skip_to(first) {
                shared.room.notify_all();
            }
            if let Some(slot) = state.slots.get(state.lent)
                && slot.index == first
                && let Status::Failed(error) = &slot.status
            {
                if !again {
                    return Err(Missing::Failed(error.clone()));
                }
                // Its read-ahead failed, possibly long ago; the file may be intact by now.
                if state.reading == 0 {
                    again = false;
                    state.begin(first);
                    shared.room.notify_all();
                }
            }
            let ready: Vec<View> = state.ready_from(first, &self.ring).take(most).collect();
            if !ready.is_empty() {
                state.lent += ready.len();
                return Ok(ready);
            }
            // A slow disk that delivers data is responding.
            let idle = started.elapsed().min(shared.progress.idle());
            let left = self
                .limit
                .left(idle, &state.what(first))
                .map_err(Missing::Stalled)?;
            state = wait_step(&shared.filled, (&shared.state, state), left, patience)?;
        }
    }

    /// Waits until the piece `first` is in the ring, as [`Self::acquire`] does, and releases it unused.
    ///
    /// # Errors
    /// As [`Self::acquire`].
    pub fn pass(&self, first: usize, patience: &mut dyn FnMut() -> bool) -> Result<(), Missing> {
        let pieces = self.acquire(first, 1, patience)?;
        // SAFETY: no work was queued with it.
        unsafe { self.release(pieces.len()) };
        Ok(())
    }

    /// Whether `schedule` is its schedule.
    pub fn reads(&self, schedule: &[Extent]) -> bool {
        *locked(&self.shared.state).schedule == *schedule
    }

    /// Restarts the schedule at `end`, until the next call or until a piece beyond it is requested.
    pub fn set_end(&self, end: usize) {
        let mut state = locked(&self.shared.state);
        if state.end != end {
            state.end = end;
            drop(state);
            self.shared.room.notify_all();
        }
    }

    /// Whether the piece `first` is available without waiting.
    pub fn has(&self, first: usize) -> bool {
        locked(&self.shared.state)
            .ready_from(first, &self.ring)
            .next()
            .is_some()
    }

    /// Releases the room of the first `count` acquired pieces to the readers.
    ///
    /// # Safety
    ///
    /// All work queued with them has been executed.
    pub unsafe fn release(&self, count: usize) {
        let mut state = locked(&self.shared.state);
        let count = count.min(state.lent);
        state.slots.drain(..count);
        state.lent -= count;
        drop(state);
        self.shared.room.notify_all();
    }

    /// A weak reference to the ring, which shows whether a hanging read keeps it after its replacement.
    #[must_use]
    pub fn ring_mark(&self) -> Weak<SharedMapping> {
        self.ring.mark()
    }

    /// Length of the ring, including its staging memory.
    pub fn ring_bytes(&self) -> Bytes {
        self.ring.held()
    }

    /// Resident size of the ring.
    pub fn ring_resident(&self) -> Bytes {
        self.ring.resident()
    }

    /// Sets the time limit for the disk.
    pub(crate) const fn set_limit(&mut self, limit: DiskTimeout) {
        self.limit = limit;
    }

    /// Stops the readers and unmaps the ring; returns its resident size.
    #[must_use]
    pub fn release_ring(mut self) -> Bytes {
        self.finish();
        let resident = self.ring.resident();
        // The last owner, unless a hanging read keeps its own ring.
        if Arc::strong_count(self.ring.shared()) == 1 {
            resident
        } else {
            Bytes::ZERO
        }
    }

    fn spawn(&mut self) -> io::Result<()> {
        for reader in 0..READERS {
            let (shared, ring, source) = (
                Arc::clone(&self.shared),
                Arc::clone(self.ring.shared()),
                Arc::clone(&self.source),
            );
            let thread = thread::Builder::new()
                .name("cotenant-reader".to_owned())
                .spawn(move || {
                    // The disk idles while its reader waits behind a kernel's slice. A refusal by the system only makes
                    // streaming slower.
                    emergency::be_prompt().ok();
                    shared.fill(&ring, reader, source.as_ref());
                })?;
            self.threads.push(thread);
        }
        Ok(())
    }

    /// Stops the threads; a hanging read is left alone.
    fn finish(&mut self) {
        if self.threads.is_empty() {
            // The threads stayed with the ring of a hanging read, and no others could be started.
            return;
        }
        let mut state = locked(&self.shared.state);
        state.stop = true;
        self.shared.progress.give_up();
        self.shared.room.notify_all();
        state = self.shared.settle(state, self.limit);
        let hangs = state.reading > 0;
        drop(state);
        for thread in self.threads.drain(..) {
            if !hangs {
                // The thread has no way to panic; if it did, there would be nothing to add here.
                thread.join().ok();
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Shared {
    fn new(schedule: Arc<[Extent]>, first: usize, capacity: usize) -> Self {
        Self {
            state: Mutex::new(State {
                schedule,
                next: first,
                end: usize::MAX,
                capacity,
                usable: capacity,
                ..State::default()
            }),
            progress: ReadProgress::new(),
            filled: Condvar::new(),
            room: Condvar::new(),
        }
    }

    /// Waits until no read is running, or the disk does not respond.
    fn settle<'state>(
        &self,
        mut state: MutexGuard<'state, State>,
        limit: DiskTimeout,
    ) -> MutexGuard<'state, State> {
        while let Some((began, index)) = state.oldest_read() {
            let idle = began.elapsed().min(self.progress.idle());
            let Ok(left) = limit.left(idle, &state.what(index)) else {
                break;
            };
            state = waited_for(&self.filled, state, left).0;
        }
        state
    }

    /// Populates the rest of the ring from the front, and releases it to the readers.
    fn grow(&self, ring: &SharedMapping) {
        let all = ring.bytes().as_len();
        let mut state = locked(&self.state);
        while state.usable < all && !state.stop {
            let (start, end) = (state.usable, all.min(state.usable + HUGE_PAGE.as_len()));
            drop(state);
            ring.touch(start, end - start);
            state = locked(&self.state);
            state.usable = end;
            self.room.notify_all();
        }
        state.growing = false;
        self.filled.notify_all();
    }

    /// A reader thread, one of [`READERS`].
    fn fill(&self, ring: &SharedMapping, reader: usize, source: &dyn Source) {
        let mut state = locked(&self.state);
        loop {
            if state.stop {
                return;
            }
            let Some((name, extent, start)) = state.place() else {
                state = waited(&self.room, state);
                continue;
            };
            drop(state);
            let result = self.read(ring, reader, (&extent, start), source);
            self.progress.note();
            state = locked(&self.state);
            state.reading -= 1;
            state.failed |= result.is_err();
            if let Some(slot) = state.slots.iter_mut().rfind(|slot| slot.name == name) {
                slot.status = match result {
                    Ok(()) => Status::Ready,
                    Err(error) => Status::Failed(error),
                };
            }
            self.filled.notify_all();
        }
    }
}

impl Shared {
    /// Reads a piece into its slot.
    fn read(
        &self,
        ring: &SharedMapping,
        reader: usize,
        (extent, start): (&Extent, usize),
        source: &dyn Source,
    ) -> Result<(), ReadError> {
        let no_place = || extent.error(Path::new(""), "it does not fit the ring");
        let Some(memory) = ring.device().filter(|_| ring.is_beyond_host()) else {
            let target = ring
                .range(start, extent.aligned_bytes())
                .ok_or_else(no_place)?;
            // SAFETY: the slot overlaps no other slot, and stays until its status changes; slots are whole pages from
            // the start of a mapping.
            return unsafe { source.read(extent, target, &self.progress) };
        };
        let staging = memory.staging().ok_or_else(no_place)?;
        let bytes = staging.bytes().as_len() / READERS;
        let place = staging
            .range(reader * bytes, bytes)
            .filter(|_| bytes > 0)
            .ok_or_else(no_place)?;
        // SAFETY: as above, and this reader's part of the staging memory, a multiple of pages.
        unsafe {
            read_staged(
                source,
                extent,
                (memory, start),
                (place, bytes),
                &self.progress,
            )
        }
    }
}

impl State {
    /// Discards read pieces, while no read is running, to continue with the piece `first`.
    fn begin(&mut self, first: usize) {
        self.next = first;
        self.slots.truncate(self.lent);
        self.head = self.slots.back().map_or(0, |slot| {
            let extent = self.schedule.get(slot.index);
            slot.start + extent.map_or(0, Extent::aligned_bytes)
        });
        self.failed = false;
    }

    /// Allocates a slot for the next piece and marks it as being read.
    fn place(&mut self) -> Option<(u64, Extent, usize)> {
        if self.failed {
            return None;
        }
        if self.next >= self.end.min(self.schedule.len()) {
            self.next = 0;
        }
        let extent = self
            .schedule
            .get(self.next)
            .filter(|_| self.end > 0)?
            .clone();
        let len = extent.aligned_bytes();
        let start = match self.slots.front().map(|slot| slot.start) {
            None if len <= self.usable || self.usable == self.capacity => Some(0),
            None => None,
            // Slots lie in [tail, head): room after the head, or from the start up to the tail.
            Some(tail) if tail < self.head => {
                if self.head + len <= self.usable {
                    Some(self.head)
                } else {
                    (len <= tail).then_some(0)
                }
            }
            // Wrapped around: room between head and tail.
            Some(tail) => (self.head + len <= tail).then_some(self.head),
        }?;
        if start + len > self.usable && !self.slots.is_empty() {
            return None;
        }
        let name = self.made;
        self.made += 1;
        self.slots.push_back(Slot {
            name,
            index: self.next,
            start,
            status: Status::Reading(Instant::now()),
        });
        self.reading += 1;
        self.head = start + len;
        self.next += 1;
        Some((name, extent, start))
    }

    /// Start of the oldest running read, and the index of its piece.
    fn oldest_read(&self) -> Option<(Instant, usize)> {
        let reads = self.slots.iter().filter_map(|slot| match slot.status {
            Status::Reading(since) => Some((since, slot.index)),
            Status::Failed(_) | Status::Ready => None,
        });
        reads.min()
    }

    /// Description of the piece `index`, for messages.
    fn what(&self, index: usize) -> Arc<str> {
        self.schedule
            .get(index)
            .map_or_else(|| "weights".into(), |extent| Arc::clone(&extent.what))
    }

    /// Discards everything before the piece `index`; if that is not in the ring, it is read next. Returns whether
    /// readers may have work now.
    fn skip_to(&mut self, index: usize) -> bool {
        let before = self.slots.len();
        while self
            .slots
            .get(self.lent)
            .is_some_and(|slot| slot.index != index && !matches!(slot.status, Status::Reading(_)))
        {
            self.slots.remove(self.lent);
        }
        let popped = self.slots.len() != before;
        if popped {
            // The failed piece may have been discarded by that.
            self.failed = self
                .slots
                .iter()
                .any(|slot| matches!(slot.status, Status::Failed(_)));
        }
        if self
            .slots
            .iter()
            .skip(self.lent)
            .any(|slot| slot.index == index)
        {
            return popped;
        }
        if index >= self.end {
            self.end = usize::MAX;
        }
        self.next = index;
        true
    }

    /// Consecutive ready pieces from `index` on.
    fn ready_from(&self, index: usize, ring: &Buffer) -> impl Iterator<Item = View> {
        (index..)
            .zip(self.slots.iter().skip(self.lent))
            .take_while(|(index, slot)| {
                slot.index == *index && matches!(slot.status, Status::Ready)
            })
            .filter_map(|(index, slot)| {
                let extent = self.schedule.get(index)?;
                Some(ring.view_bytes(slot.start + extent.lead(), extent.bytes))
            })
    }
}

/// Reader threads: with a single one, the disk idles whenever it waits for a processor.
pub const READERS: usize = 2;
/// Interval at which a waiter checks its patience.
pub(crate) const PATIENCE_STEP: Duration = Duration::from_millis(20);

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
