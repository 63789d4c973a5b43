//! Weights from the file: direct reads that leave the page cache clean, and a ring that is filled ahead of the kernels.
//!
//! The page cache is an LRU under what is a cyclic scan, so it helps nobody here and takes memory that the book does not
//! know about. Reads are `O_DIRECT` over 4 KiB-aligned supersets; where a file system refuses that (tmpfs, some network
//! mounts) they are buffered and followed by `POSIX_FADV_DONTNEED`.

use std::{
    collections::VecDeque,
    io,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

use super::{
    arena::{Backing, HUGE_PAGE, Mapping},
    error::ReadError,
};
use crate::{standby, units::Bytes};

mod attended;
mod file;
mod pulse;
mod rows;

pub use attended::{Attended, Attention, Hangs, Left};
pub use file::{Extent, Source, WeightFile};
pub use pulse::Pulse;
pub use rows::{RowReader, WantedRows};

/// A ring of memory that threads of its own fill with pieces of the file, in the order in which they will be used.
///
/// ```text
///   schedule (cyclic)   p0 p1 p2 p3 p4 p0 p1 …
///                          └used┘ └ready┘ └reading┘ └ waits for room
/// ```
///
/// The order is fixed, so the readers go on across the token boundary by themselves. Several of them keep the disk busy
/// while one of them is not running.
pub struct Stream {
    shared: Arc<Shared>,
    ring: Arc<Mapping>,
    source: Arc<dyn Source>,
    threads: Vec<thread::JoinHandle<()>>,
    stall: Duration,
}

/// A piece in the ring, ready for kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// Position in the schedule.
    pub index: usize,
    /// Where its first wanted byte is in the ring.
    pub offset: usize,
}

/// Why a piece did not come.
#[derive(Debug)]
pub enum Missing {
    /// It could not be read.
    Failed(ReadError),
    /// The disk did not answer in time.
    Stalled(Duration),
    /// The waiter lost patience.
    Stopped,
}

struct Shared {
    state: Mutex<State>,
    pulse: Pulse,
    /// A read ended.
    filled: Condvar,
    /// There is room, or something else to do for readers.
    room: Condvar,
}

struct State {
    schedule: Arc<[Extent]>,
    /// Index in the schedule of the piece that is read next.
    next: usize,
    /// Where the schedule begins anew for the time being.
    end: usize,
    slots: VecDeque<Slot>,
    /// Slots made so far: the name of the next one.
    made: u64,
    /// Slots that are being read.
    reading: usize,
    /// A read failed: nothing more is read until a restart, for the pass that needs the piece ends there.
    failed: bool,
    /// Where the next slot may start.
    head: usize,
    capacity: usize,
    /// What of the ring is in memory, and so may have slots.
    usable: usize,
    /// Memory is being found for the rest.
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
    /// Since when.
    Reading(Instant),
    Ready,
}

impl Stream {
    /// Starts to read `schedule`, from `first`, into a new ring of `ring` bytes.
    ///
    /// # Errors
    ///
    /// When the ring cannot be mapped or a thread not started.
    pub fn start(source: Arc<dyn Source>, ring: Bytes, schedule: Arc<[Extent]>, first: usize) -> io::Result<Self> {
        let mut stream = Self::with_ring(source, Mapping::new(ring, Backing::Now)?, schedule, first);
        stream.spawn()?;
        Ok(stream)
    }

    /// As [`Self::start`], without waiting for the memory of the ring: a thread finds it from the front on, and pieces go
    /// round in what there is of it. A new page can take longer than reading it full.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn begin(source: Arc<dyn Source>, ring: Bytes, schedule: Arc<[Extent]>, first: usize) -> io::Result<Self> {
        let mut stream = Self::with_ring(source, Mapping::new(ring, Backing::OnTouch)?, schedule, first);
        {
            let mut state = stream.shared.lock();
            (state.usable, state.growing) = (0, true);
        }
        let (shared, ring) = (Arc::clone(&stream.shared), Arc::clone(&stream.ring));
        let grows = thread::Builder::new().name("cotenant-reader".to_owned());
        stream.threads.push(grows.spawn(move || shared.grow(&ring))?);
        stream.spawn()?;
        Ok(stream)
    }

    fn with_ring(source: Arc<dyn Source>, ring: Mapping, schedule: Arc<[Extent]>, first: usize) -> Self {
        let ring = Arc::new(ring);
        Self {
            shared: Arc::new(Shared::new(schedule, first, ring.bytes().as_len())),
            ring,
            source,
            threads: Vec::new(),
            stall: STALL_MAX,
        }
    }

    /// Waits until all of the ring is in memory, as the book says.
    pub fn settle(&self) {
        let mut state = self.shared.lock();
        while state.growing {
            state = self.shared.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives up what was read ahead, and starts again with `schedule` from `first`: in a new ring if the disk hangs and
    /// that is `allowed`, since a read that hangs keeps the old one until it returns.
    ///
    /// # Errors
    ///
    /// [`TimedOut`](io::ErrorKind::TimedOut) when the disk hangs and no new ring is allowed; another when one, or a thread,
    /// cannot be had.
    pub fn restart(&mut self, schedule: Arc<[Extent]>, first: usize, allowed: bool) -> io::Result<()> {
        let mut state = self.shared.lock();
        // Nothing of the old schedule is begun any more, nor read to its end by a slow disk.
        state.failed = true;
        self.shared.pulse.give_up();
        state = self.shared.settle(state, self.stall);
        // Without threads a restart before has failed: there is nobody who would go on with what there is.
        if state.reading == 0 && !self.threads.is_empty() {
            state.schedule = schedule;
            state.next = first;
            state.end = usize::MAX;
            state.slots.clear();
            state.head = 0;
            state.failed = false;
            self.shared.pulse.take_up();
            drop(state);
            self.shared.room.notify_all();
            return Ok(());
        }
        // A read hangs in the kernel: leave it its ring until it returns, and go on with a new one.
        state.stop = true;
        let capacity = state.capacity;
        drop(state);
        self.shared.room.notify_all();
        self.threads.clear();
        if !allowed {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.ring = Arc::new(Mapping::new(Bytes::of_len(capacity), Backing::Now)?);
        self.shared = Arc::new(Shared::new(schedule, first, capacity));
        self.spawn()
    }

    /// Waits until the piece `first` is in the ring, and returns it with those behind it that are there as well: at most
    /// `most` of the schedule's pieces, one after the other. What was read and is skipped by this is given up.
    ///
    /// `patience` is asked now and then whether to go on waiting.
    ///
    /// # Errors
    ///
    /// When it could not be read, the disk does not answer, or `patience` ran out.
    pub fn acquire(
        &self,
        first: usize,
        most: usize,
        ready: &mut Vec<Ready>,
        patience: &mut dyn FnMut() -> bool,
    ) -> Result<(), Missing> {
        ready.clear();
        let started = Instant::now();
        let mut state = self.shared.lock();
        loop {
            if state.skip_to(first) {
                self.shared.room.notify_all();
            }
            if let Some(slot) = state.slots.front()
                && slot.index == first
                && let Status::Failed(error) = &slot.status
            {
                return Err(Missing::Failed(error.clone()));
            }
            ready.extend(state.ready_from(first).take(most));
            if !ready.is_empty() {
                return Ok(());
            }
            // A slow disk that brings something does answer.
            let waited = started.elapsed().min(self.shared.pulse.idle());
            if waited >= self.stall {
                return Err(Missing::Stalled(waited));
            }
            let (next, timed_out) = wait(&self.shared.filled, state, PATIENCE_STEP.min(self.stall));
            state = next;
            if timed_out {
                drop(state);
                if !patience() {
                    return Err(Missing::Stopped);
                }
                state = self.shared.lock();
            }
        }
    }

    /// Whether it is `schedule` that it reads.
    #[must_use]
    pub fn reads(&self, schedule: &[Extent]) -> bool {
        *self.shared.lock().schedule == *schedule
    }

    /// Lets the schedule begin anew at `end`, until told otherwise or a piece behind it is asked for.
    pub fn set_end(&self, end: usize) {
        let mut state = self.shared.lock();
        if state.end != end {
            state.end = end;
            drop(state);
            self.shared.room.notify_all();
        }
    }

    /// Gives the room of acquired pieces back to the readers; they are not looked at any more.
    pub fn release(&self, ready: &[Ready]) {
        let mut state = self.shared.lock();
        for ready in ready {
            if state.slots.front().is_some_and(|slot| slot.index == ready.index) {
                state.slots.pop_front();
            }
        }
        drop(state);
        self.shared.room.notify_all();
    }

    /// A mark of the ring, by which it is known whether a read that hangs keeps it after it was replaced.
    #[must_use]
    pub fn ring_mark(&self) -> Weak<Mapping> {
        Arc::downgrade(&self.ring)
    }

    /// The ring. Only what [`Self::acquire`] returned may be read from it.
    #[must_use]
    pub fn ring(&self) -> &Mapping {
        &self.ring
    }

    /// How long a read may take before it counts as stalled.
    pub(super) const fn set_stall(&mut self, stall: Duration) {
        self.stall = stall;
    }

    /// Stops the readers and unmaps the ring; says how much of it had been in memory.
    #[must_use]
    pub fn release_ring(mut self) -> Bytes {
        self.finish();
        let resident = self.ring.resident();
        // The last owner, unless a hanging read keeps its own ring.
        if Arc::strong_count(&self.ring) == 1 {
            resident
        } else {
            Bytes::ZERO
        }
    }

    fn spawn(&mut self) -> io::Result<()> {
        for _ in 0..READERS {
            let (shared, ring, source) = (
                Arc::clone(&self.shared),
                Arc::clone(&self.ring),
                Arc::clone(&self.source),
            );
            let thread = thread::Builder::new()
                .name("cotenant-reader".to_owned())
                .spawn(move || {
                    // A disk idles as long as its reader waits behind a kernel's slice. A system that refuses makes
                    // streaming slower, and nothing else.
                    standby::be_prompt().ok();
                    shared.fill(&ring, source.as_ref());
                })?;
            self.threads.push(thread);
        }
        Ok(())
    }

    /// Stops the threads; a read that hangs is left alone after the time for a stall.
    fn finish(&mut self) {
        if self.threads.is_empty() {
            // They were left with the ring that a hanging read keeps, and others could not be had.
            return;
        }
        let mut state = self.shared.lock();
        state.stop = true;
        self.shared.pulse.give_up();
        self.shared.room.notify_all();
        state = self.shared.settle(state, self.stall);
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

/// Waits for `changed`; says whether nothing came within `limit`.
fn wait<'state>(
    changed: &Condvar,
    state: MutexGuard<'state, State>,
    limit: Duration,
) -> (MutexGuard<'state, State>, bool) {
    let (state, result) = changed
        .wait_timeout(state, limit)
        .unwrap_or_else(PoisonError::into_inner);
    (state, result.timed_out())
}

impl Shared {
    fn new(schedule: Arc<[Extent]>, first: usize, capacity: usize) -> Self {
        Self {
            state: Mutex::new(State {
                schedule,
                next: first,
                end: usize::MAX,
                slots: VecDeque::new(),
                made: 0,
                reading: 0,
                failed: false,
                head: 0,
                capacity,
                usable: capacity,
                growing: false,
                stop: false,
            }),
            pulse: Pulse::new(),
            filled: Condvar::new(),
            room: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no read is under way, but no longer than nothing comes for `limit`.
    fn settle<'state>(&self, mut state: MutexGuard<'state, State>, limit: Duration) -> MutexGuard<'state, State> {
        while let Some(began) = state.oldest_read() {
            let left = limit.saturating_sub(began.elapsed().min(self.pulse.idle()));
            if left.is_zero() {
                break;
            }
            state = wait(&self.filled, state, left).0;
        }
        state
    }

    /// Finds memory for what of the ring has none, from the front on, and lets the readers have it.
    fn grow(&self, ring: &Mapping) {
        let all = ring.bytes().as_len();
        let mut state = self.lock();
        while state.usable < all && !state.stop {
            let (start, end) = (state.usable, all.min(state.usable + HUGE_PAGE.as_len()));
            drop(state);
            ring.touch(start, end - start);
            state = self.lock();
            state.usable = end;
            self.room.notify_all();
        }
        state.growing = false;
        self.filled.notify_all();
    }

    /// A reader thread.
    fn fill(&self, ring: &Mapping, source: &dyn Source) {
        let mut state = self.lock();
        loop {
            if state.stop {
                return;
            }
            let Some((name, extent, start)) = state.place() else {
                state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let result = match ring.range(start, extent.aligned_bytes()) {
                // SAFETY: the slot was placed where no other slot is, and stays until its status changes; slots are
                // whole pages from the start of a mapping.
                Some(target) => unsafe { source.read(&extent, target, &self.pulse) },
                None => Err(ReadError {
                    path: PathBuf::new(),
                    what: extent.what.to_string(),
                    offset: extent.offset,
                    bytes: Bytes::of_len(extent.bytes),
                    problem: "it does not fit the ring".to_owned(),
                }),
            };
            self.pulse.beat();
            state = self.lock();
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

impl State {
    /// Finds room for the next piece and marks it as being read.
    fn place(&mut self) -> Option<(u64, Extent, usize)> {
        if self.failed {
            return None;
        }
        if self.next >= self.end.min(self.schedule.len()) {
            self.next = 0;
        }
        let extent = self.schedule.get(self.next).filter(|_| self.end > 0)?.clone();
        let len = extent.aligned_bytes();
        let start = match self.slots.front().map(|slot| slot.start) {
            None if len <= self.usable || self.usable == self.capacity => Some(0),
            None => None,
            // Slots lie in [tail, head): room behind the head, or from the start up to the tail.
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

    /// When the oldest of the reads under way began.
    fn oldest_read(&self) -> Option<Instant> {
        let reads = self.slots.iter().filter_map(|slot| match slot.status {
            Status::Reading(since) => Some(since),
            Status::Failed(_) | Status::Ready => None,
        });
        reads.min()
    }

    /// Gives up what lies before the piece `index`; when that is not in the ring, it is read next. Says whether readers may
    /// have something to do by that.
    fn skip_to(&mut self, index: usize) -> bool {
        let before = self.slots.len();
        while self
            .slots
            .front()
            .is_some_and(|slot| slot.index != index && !matches!(slot.status, Status::Reading(_)))
        {
            self.slots.pop_front();
        }
        let popped = self.slots.len() != before;
        if popped {
            // What failed may have been given up by that.
            self.failed = self.slots.iter().any(|slot| matches!(slot.status, Status::Failed(_)));
        }
        if self.slots.iter().any(|slot| slot.index == index) {
            return popped;
        }
        if index >= self.end {
            self.end = usize::MAX;
        }
        self.next = index;
        true
    }

    /// The pieces from `index` on that are ready, one after the other.
    fn ready_from(&self, index: usize) -> impl Iterator<Item = Ready> {
        (index..)
            .zip(&self.slots)
            .take_while(|(index, slot)| slot.index == *index && matches!(slot.status, Status::Ready))
            .map(|(index, slot)| Ready {
                index,
                offset: slot.start + self.schedule.get(index).map_or(0, Extent::lead),
            })
    }
}

/// Threads that read: with one of them, the disk idles whenever it waits for a processor.
const READERS: usize = 2;
/// A disk that does not answer for so long counts as stalled. A 4 MiB piece takes 40 ms on a slow card.
pub(super) const STALL_MAX: Duration = Duration::from_secs(4);
/// How often a waiter looks whether it should go on.
pub(super) const PATIENCE_STEP: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        ptr::NonNull,
        sync::atomic::{AtomicBool, Ordering},
    };

    use super::*;
    use crate::engine::{arena::PAGE, gguf::Part};

    fn file(len: usize) -> (tempfile::NamedTempFile, Vec<u8>) {
        let bytes: Vec<u8> = (0..len).map(|i| u8::try_from(i * 31 % 251).unwrap()).collect();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&bytes).unwrap();
        (file, bytes)
    }

    fn open(path: &std::path::Path) -> WeightFile {
        let part = Part {
            path: path.to_owned(),
            base: 0,
            bytes: Bytes::ZERO,
        };
        WeightFile::open(&[part]).unwrap()
    }

    fn extents(parts: &[(u64, usize)]) -> Arc<[Extent]> {
        parts
            .iter()
            .map(|&(offset, bytes)| Extent {
                what: "piece".into(),
                offset,
                bytes,
            })
            .collect()
    }

    fn piece(stream: &Stream, schedule: &[Extent], index: usize) -> Vec<u8> {
        let mut ready = Vec::new();
        stream.acquire(index, 1, &mut ready, &mut || true).unwrap();
        let start = stream.ring().range(ready[0].offset, schedule[index].bytes).unwrap();
        // SAFETY: acquired, and read before it is released.
        let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), schedule[index].bytes) }.to_vec();
        stream.release(&ready);
        bytes
    }

    #[test]
    fn pieces_come_in_order_for_ever_through_a_ring_smaller_than_all_of_them() {
        let (file, bytes) = file(100_000);
        let schedule = extents(&[(17, 5000), (32, 9000), (50_001, 12_000), (99_000, 1000), (4096, 4096)]);
        let source = Arc::new(open(file.path()));
        let stream = Stream::start(source, Bytes::from_kib(36), Arc::clone(&schedule), 2).unwrap();
        for turn in 2..60 {
            let index = turn % schedule.len();
            let extent = &schedule[index];
            let start = usize::try_from(extent.offset).unwrap();
            assert_eq!(
                piece(&stream, &schedule, index),
                bytes[start..start + extent.bytes],
                "turn {turn}"
            );
        }
    }

    #[test]
    fn a_stream_that_begins_early_reads_while_memory_is_found_and_has_all_of_it_when_it_has_settled() {
        let (file, bytes) = file(60_000);
        let schedule = extents(&[(0, 9000), (20_000, 9000), (45_000, 9000)]);
        let ring = Bytes::from_mib(5);
        let stream = Stream::begin(Arc::new(open(file.path())), ring, Arc::clone(&schedule), 0).unwrap();
        assert!(stream.reads(&schedule) && !stream.reads(&schedule[1..]));
        assert_eq!(piece(&stream, &schedule, 0), bytes[..9000]);
        // Readers are under way all the while.
        stream.settle();
        assert_eq!(stream.ring().resident(), ring);
        for turn in 1..2000 {
            let index = turn % schedule.len();
            let start = usize::try_from(schedule[index].offset).unwrap();
            assert_eq!(piece(&stream, &schedule, index), bytes[start..start + 9000], "{turn}");
        }
        assert_eq!(stream.release_ring(), ring);
    }

    #[test]
    fn pieces_go_round_in_what_of_the_ring_is_in_memory() {
        let schedule = extents(&[(0, 9000), (20_000, 4000)]);
        let shared = Shared::new(schedule, 0, 64 << 10);
        let mut state = shared.lock();
        let mut placed = |usable: usize| {
            state.usable = usable << 10;
            state.place().map(|(_, _, start)| start >> 10)
        };
        assert_eq!(placed(0), None);
        assert_eq!(placed(8), None);
        assert_eq!(placed(16), Some(0));
        assert_eq!(placed(20), Some(12));
        assert_eq!(placed(20), None);
        // The first is given back, and has no room behind the other; the first part of the ring has.
        state.slots.pop_front();
        let mut placed = |usable: usize| {
            state.usable = usable << 10;
            state.place().map(|(_, _, start)| start >> 10)
        };
        assert_eq!(placed(24), Some(0));
        // Wrapped around, with 4 KiB until the other: what is found behind that is of use later.
        assert_eq!(placed(64), None);
        state.slots.pop_front();
        state.usable = 64 << 10;
        assert_eq!(state.place().map(|(_, _, start)| start >> 10), Some(12));
    }

    #[test]
    fn a_restart_continues_with_another_schedule() {
        let (file, bytes) = file(40_000);
        let source = Arc::new(open(file.path()));
        let first = extents(&[(0, 8000), (8000, 8000)]);
        let mut stream = Stream::start(source, Bytes::from_kib(24), Arc::clone(&first), 0).unwrap();
        piece(&stream, &first, 0);
        let second = extents(&[(20_000, 3000), (30_000, 10_000)]);
        stream.restart(Arc::clone(&second), 1, true).unwrap();
        assert_eq!(piece(&stream, &second, 1), bytes[30_000..40_000]);
        assert_eq!(piece(&stream, &second, 0), bytes[20_000..23_000]);
    }

    #[test]
    fn pieces_that_are_passed_over_are_given_up_and_the_end_may_move() {
        let (file, bytes) = file(60_000);
        let schedule = extents(&[(0, 9000), (9000, 9000), (20_000, 9000), (30_000, 9000), (45_000, 9000)]);
        let stream = Stream::start(
            Arc::new(open(file.path())),
            Bytes::from_kib(32),
            Arc::clone(&schedule),
            0,
        )
        .unwrap();
        let is_right = |index: usize| {
            let start = usize::try_from(schedule[index].offset).unwrap();
            assert_eq!(piece(&stream, &schedule, index), bytes[start..start + 9000], "{index}");
        };
        for end in [3, 0, usize::MAX, 1, 5] {
            stream.set_end(end);
            (0..end.min(5)).chain([0, 1, 4, 2, 3, 4]).for_each(is_right);
        }
    }

    #[test]
    fn a_file_that_ends_too_soon_is_an_error_of_that_piece_and_a_restart_heals() {
        let (file, bytes) = file(40_000);
        file.as_file().set_len(36_000).unwrap();
        let source = Arc::new(open(file.path()));
        let schedule = extents(&[(0, 4000), (35_000, 4000)]);
        let mut stream = Stream::start(source, Bytes::from_kib(16), Arc::clone(&schedule), 0).unwrap();
        assert_eq!(piece(&stream, &schedule, 0), bytes[..4000]);
        match stream.acquire(1, 1, &mut Vec::new(), &mut || true) {
            Err(Missing::Failed(error)) => {
                assert!(error.to_string().contains("the file ends at byte 36000"), "{error}");
            }
            other => panic!("{other:?}"),
        }
        let rest = extents(&[(35_000, 1000)]);
        stream.restart(Arc::clone(&rest), 0, true).unwrap();
        assert_eq!(piece(&stream, &rest, 0), bytes[35_000..36_000]);
    }

    /// Answers when it is told to.
    struct Gate {
        open: AtomicBool,
    }

    impl Source for Gate {
        unsafe fn read(&self, extent: &Extent, target: NonNull<u8>, _: &Pulse) -> Result<(), ReadError> {
            while !self.open.load(Ordering::Acquire) {
                thread::yield_now();
            }
            // SAFETY: the caller's promise.
            unsafe { target.as_ptr().write_bytes(7, extent.aligned_bytes()) };
            Ok(())
        }

        fn read_small(&self, _: &Extent, target: &mut [u8]) -> Result<(), ReadError> {
            target.fill(7);
            Ok(())
        }
    }

    /// A stream whose disk does not answer, and that does not wait long for it.
    fn gated() -> (Arc<Gate>, Arc<[Extent]>, Stream) {
        let gate = Arc::new(Gate {
            open: AtomicBool::new(false),
        });
        let schedule = extents(&[(0, 4096)]);
        let source: Arc<dyn Source> = Arc::<Gate>::clone(&gate);
        let mut stream = Stream::start(source, Bytes::from_kib(16), Arc::clone(&schedule), 0).unwrap();
        stream.set_stall(Duration::from_millis(1));
        (gate, schedule, stream)
    }

    #[test]
    fn a_disk_that_does_not_answer_is_an_error_and_the_ring_is_replaced() {
        let (gate, schedule, mut stream) = gated();
        assert!(matches!(
            stream.acquire(0, 1, &mut Vec::new(), &mut || true),
            Err(Missing::Stalled(_))
        ));
        stream.restart(Arc::clone(&schedule), 0, true).unwrap();
        assert!(matches!(
            stream.acquire(0, 1, &mut Vec::new(), &mut || false),
            Err(Missing::Stalled(_) | Missing::Stopped)
        ));
        gate.open.store(true, Ordering::Release);
        stream.set_stall(Duration::from_secs(60));
        assert_eq!(piece(&stream, &schedule, 0), vec![7; 4096]);
    }

    #[test]
    fn a_slow_disk_that_brings_something_does_not_hang() {
        let (gate, schedule, mut stream) = gated();
        let stall = Duration::from_millis(400);
        stream.set_stall(stall);
        let (began, mut ready) = (Instant::now(), Vec::new());
        let mut patience = || {
            gate.open.store(began.elapsed() > stall * 2, Ordering::Release);
            stream.shared.pulse.beat();
            true
        };
        stream.acquire(0, 1, &mut ready, &mut patience).unwrap();
        assert!(began.elapsed() > stall * 2);
        stream.release(&ready);
        assert_eq!(piece(&stream, &schedule, 0), vec![7; 4096]);
    }

    #[test]
    fn a_large_read_is_made_in_several_and_ends_early_when_it_is_given_up() {
        let (file, bytes) = file(700_000);
        let source = open(file.path());
        let memory = Mapping::new(Bytes::of_len(bytes.len()), Backing::Now).unwrap();
        let extent = Extent {
            what: "piece".into(),
            offset: 0,
            bytes: bytes.len(),
        };
        let target = memory.range(0, extent.aligned_bytes()).unwrap();
        let pulse = Pulse::new();
        pulse.give_up();
        // SAFETY: all of a mapping that nobody else has.
        let error = unsafe { source.read(&extent, target, &pulse) }.unwrap_err();
        assert_eq!(error.problem, "it is not wanted any more");
        let done = memory.slice(0, bytes.len()).unwrap();
        let done = done.iter().zip(&bytes).take_while(|(one, other)| one == other).count();
        assert!(PAGE.as_len() <= done && done < bytes.len(), "{done}");
        pulse.take_up();
        // SAFETY: as before.
        unsafe { source.read(&extent, target, &pulse) }.unwrap();
        assert!(memory.slice(0, bytes.len()).unwrap() == bytes);
    }

    #[test]
    fn a_restart_that_could_not_be_made_up_for_a_hanging_read_is_by_the_next_one() {
        let (gate, schedule, mut stream) = gated();
        while stream.shared.lock().reading == 0 {
            thread::yield_now();
        }
        let capacity = std::mem::replace(&mut stream.shared.lock().capacity, usize::MAX >> 8);
        stream.restart(Arc::clone(&schedule), 0, true).unwrap_err();
        stream.shared.lock().capacity = capacity;
        // The hanging read returns, and its threads end.
        gate.open.store(true, Ordering::Release);
        stream.set_stall(Duration::from_secs(60));
        stream.restart(Arc::clone(&schedule), 0, true).unwrap();
        assert_eq!(piece(&stream, &schedule, 0), vec![7; 4096]);
    }
}
