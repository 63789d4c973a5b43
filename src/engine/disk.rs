//! Time limit for disk reads, abandoned work, and memory kept by hanging reads.

use std::{
    fmt,
    fs::File,
    hash::{DefaultHasher, Hasher as _},
    io::{self, Read},
    sync::{Arc, Condvar, Mutex, Weak},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::arena::SharedMapping;
use cotenant_units::Bytes;
use cotenant_units::lock::{locked, waited_for};

/// Time within which a disk must deliver data: the single limit of all reads of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DiskTimeout(Duration);

/// The disk did not respond in time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot read `{what}`: the disk did not respond for {} ms, the limit is {} ms",
    waited.as_millis(),
    limit.0.as_millis()
)]
pub struct Stalled {
    /// The awaited data.
    pub what: Arc<str>,
    /// Time waited so far.
    pub waited: Duration,
    /// The time limit.
    pub limit: DiskTimeout,
}

impl DiskTimeout {
    /// A limit of this duration.
    pub const fn new(limit: Duration) -> Self {
        Self(limit)
    }

    /// Whether a disk from which nothing has arrived for `idle` counts as stalled.
    #[must_use]
    pub fn is_over(self, idle: Duration) -> bool {
        idle >= self.0
    }

    /// Remaining time to wait for `what`, if nothing has arrived for `idle`.
    ///
    /// # Errors
    /// The time is over.
    pub fn left(self, idle: Duration, what: &Arc<str>) -> Result<Duration, Stalled> {
        let left = self.0.saturating_sub(idle);
        if left.is_zero() {
            Err(self.stalled(idle, what))
        } else {
            Ok(left)
        }
    }

    /// The error for `what` after `waited` without data, regardless of the limit.
    #[must_use]
    pub fn stalled(self, waited: Duration, what: &Arc<str>) -> Stalled {
        Stalled {
            what: Arc::clone(what),
            waited,
            limit: self,
        }
    }
}

impl Default for DiskTimeout {
    /// A 4 MiB piece takes 40 ms on a slow card.
    fn default() -> Self {
        Self(Duration::from_secs(4))
    }
}

/// Record of the read in progress. Computation between two reads has no time limit.
#[derive(Clone, Default)]
pub struct DiskWatch {
    shared: Arc<Shared>,
    #[cfg(test)]
    hindrance: Option<Hindrance>,
}

/// Called before each disk access with its description.
#[cfg(test)]
type Hindrance = Arc<dyn Fn(&str) + Send + Sync>;

/// Identity of the first bytes of a file, including its header with the tensor table.
#[derive(Clone, Debug, Default)]
pub(super) struct Head {
    pub(super) bytes: u64,
    hash: DefaultHasher,
}

impl Head {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        self.hash.write(bytes);
    }

    pub(super) fn hash(&self) -> u64 {
        self.hash.finish()
    }
}

/// Work on its own thread.
pub struct WatchedWork<T> {
    watch: DiskWatch,
    thread: JoinHandle<T>,
}

/// Memory and threads that were abandoned, and that hanging reads keep until they return.
#[derive(Clone, Debug, Default)]
pub struct Retained {
    since: Option<Instant>,
    memory: Vec<Weak<SharedMapping>>,
    work: Vec<Weak<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The current disk access and its start.
    asks: Option<(Arc<str>, Instant)>,
    /// Bytes delivered by it.
    brought: u64,
    /// The caller has stopped waiting.
    given_up: bool,
    ended: bool,
}

impl DiskWatch {
    /// A watch hindered by `hindrance`.
    #[cfg(test)]
    pub(super) fn hindered(hindrance: Hindrance) -> Self {
        Self {
            hindrance: Some(hindrance),
            ..Self::default()
        }
    }

    /// Accesses the disk for `what`. The work keeps the delivered bytes until it ends.
    ///
    /// # Errors
    /// The error of `ask`, or that the caller has stopped waiting.
    pub fn asking(&self, what: &str, ask: impl FnOnce() -> io::Result<usize>) -> io::Result<usize> {
        {
            let mut state = locked(&self.shared.state);
            if state.given_up {
                return Err(io::ErrorKind::TimedOut.into());
            }
            state.asks = Some((what.into(), Instant::now()));
        }
        #[cfg(test)]
        if let Some(hindrance) = &self.hindrance {
            hindrance(what);
        }
        let brought = ask();
        let mut state = locked(&self.shared.state);
        state.asks = None;
        state.brought += *brought.as_ref().unwrap_or(&0) as u64;
        brought
    }

    /// As [`Self::asking`], for results other than bytes.
    ///
    /// # Errors
    /// As [`Self::asking`].
    pub fn asking_for<T>(&self, what: &str, ask: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let mut answer = None;
        self.asking(what, || {
            answer = Some(ask()?);
            Ok(0)
        })?;
        answer.ok_or_else(|| io::ErrorKind::Other.into())
    }
}

/// A file that records each read and hashes the bytes read.
pub struct WatchedFile<'file> {
    file: &'file File,
    what: &'file str,
    watch: &'file DiskWatch,
    head: Head,
}

impl<'file> WatchedFile<'file> {
    /// Wraps `file`, named `what` in errors.
    pub fn new(file: &'file File, what: &'file str, watch: &'file DiskWatch) -> Self {
        Self {
            file,
            what,
            watch,
            head: Head::default(),
        }
    }

    /// Identity of the bytes read.
    pub(super) fn into_head(self) -> Head {
        self.head
    }
}

impl Read for WatchedFile<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.watch.asking(self.what, || self.file.read(buffer))?;
        self.head.add(buffer.get(..count).unwrap_or_default());
        Ok(count)
    }
}

impl fmt::Debug for DiskWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}

impl<T: Send + 'static> WatchedWork<T> {
    /// Starts `work`, which records its disk accesses in a watch of its own, hindered in the same way as `watch`.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(
        watch: &DiskWatch,
        work: impl FnOnce(&DiskWatch) -> T + Send + 'static,
    ) -> io::Result<Self> {
        let mut theirs = watch.clone();
        theirs.shared = Arc::default();
        let watch = theirs.clone();
        let thread = thread::Builder::new()
            .name("cotenant-reader".to_owned())
            .spawn(move || {
                // Also on a panic.
                let _end = End(&theirs.shared);
                work(&theirs)
            })?;
        Ok(Self { watch, thread })
    }

    /// Waits for completion.
    ///
    /// # Errors
    /// The disk did not respond in time; with the memory that the work keeps until it returns. Further accesses of the
    /// work fail.
    pub fn wait(self, limit: DiskTimeout) -> Result<T, (Stalled, Retained)> {
        let shared = &self.watch.shared;
        let mut state = locked(&shared.state);
        while !state.ended {
            let left = match &state.asks {
                None => limit.0,
                Some((what, since)) => match limit.left(since.elapsed(), what) {
                    Ok(left) => left,
                    Err(stalled) => {
                        let (since, work) = (Some(*since), vec![Arc::downgrade(shared)]);
                        state.given_up = true;
                        return Err((
                            stalled,
                            Retained {
                                since,
                                memory: Vec::new(),
                                work,
                            },
                        ));
                    }
                },
            };
            // The next access may begin right after this check.
            state = waited_for(&shared.ended, state, left.max(LOOK_LEAST)).0;
        }
        drop(state);
        Ok(self
            .thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    }
}

impl Retained {
    /// Memory that reads hanging since then may keep.
    pub fn of(memory: impl IntoIterator<Item = Weak<SharedMapping>>, since: Instant) -> Self {
        let mut left = Self {
            since: Some(since),
            ..Self::default()
        };
        left.mark(memory);
        left
    }

    /// Number of memory pieces still kept by reads; released ones are forgotten.
    pub(super) fn pieces(&mut self) -> usize {
        self.memory.retain(|memory| memory.strong_count() > 0);
        self.memory.len()
    }

    /// The memory kept.
    pub(super) fn memory(&self) -> impl Iterator<Item = Arc<SharedMapping>> {
        self.memory.iter().filter_map(Weak::upgrade)
    }

    /// Merges another record; duplicates count once, and returned reads are dropped.
    pub fn add(&mut self, other: Self) {
        if !other.hangs() {
            return;
        }
        if !self.hangs() {
            *self = other;
            return;
        }
        self.since = self.since.into_iter().chain(other.since).min();
        self.mark(other.memory);
        self.work.extend(other.work);
    }

    fn mark(&mut self, memory: impl IntoIterator<Item = Weak<SharedMapping>>) {
        for mark in memory {
            if self.memory.iter().all(|other| !other.ptr_eq(&mark)) {
                self.memory.push(mark);
            }
        }
    }

    /// Whether reads still keep anything.
    pub fn hangs(&self) -> bool {
        self.memory.iter().any(|memory| memory.strong_count() > 0) || self.works().next().is_some()
    }

    /// Duration of the hang.
    pub fn hung(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Bytes kept.
    pub fn bytes(&self) -> Bytes {
        let memory: Bytes = self.memory().map(|memory| memory.held()).sum();
        self.works()
            .map(|work| Bytes::new(locked(&work.state).brought).saturating_add(THREAD))
            .fold(memory, Bytes::saturating_add)
    }

    fn works(&self) -> impl Iterator<Item = Arc<Shared>> {
        let work = self.work.iter().filter_map(Weak::upgrade);
        work.filter(|work| !locked(&work.state).ended)
    }
}

impl Shared {}

/// Signals the end of the work.
struct End<'work>(&'work Shared);

impl Drop for End<'_> {
    fn drop(&mut self) {
        let mut state = locked(&self.0.state);
        state.asks = None;
        state.ended = true;
        drop(state);
        self.0.ended.notify_all();
    }
}

/// Polling interval close to the time limit.
const LOOK_LEAST: Duration = Duration::from_millis(1);
/// Resident memory of a reading thread besides the data: its buffer of 256 KiB, and some pages of its stack.
const THREAD: Bytes = Bytes::from_kib(512);

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;
    use crate::arena::{Backing, Mapping};

    const LONG: DiskTimeout = DiskTimeout(Duration::from_secs(60));
    const SHORT: DiskTimeout = DiskTimeout(Duration::from_millis(1));

    fn yield_while(condition: impl Fn() -> bool) {
        while condition() {
            thread::yield_now();
        }
    }

    #[test]
    fn what_is_done_in_time_is_had_and_a_panic_goes_on() {
        let work = WatchedWork::start(&DiskWatch::default(), |watch| {
            watch.asking("it", || Ok(7)).unwrap()
        });
        assert_eq!(work.unwrap().wait(LONG).unwrap(), 7);
        let work =
            WatchedWork::start(&DiskWatch::default(), |_| assert_eq!(1, 2, "as planted")).unwrap();
        let waited =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work.wait(LONG).is_ok()));
        assert!(waited.is_err());
    }

    #[test]
    fn what_computes_for_long_does_not_hang() {
        let computes = Arc::new(AtomicBool::new(true));
        let theirs = Arc::clone(&computes);
        let work = WatchedWork::start(&DiskWatch::default(), move |watch| {
            watch.asking("a little", || Ok(1)).unwrap();
            yield_while(|| theirs.load(Ordering::Acquire));
        })
        .unwrap();
        let began = Instant::now();
        let shared = Arc::clone(&work.watch.shared);
        let ends = thread::spawn(move || {
            yield_while(|| began.elapsed() < SHORT.0 * 50);
            assert!(!locked(&shared.state).ended);
            computes.store(false, Ordering::Release);
        });
        work.wait(SHORT).unwrap();
        assert!(began.elapsed() >= SHORT.0 * 50);
        ends.join().unwrap();
    }

    #[test]
    fn a_disk_that_hangs_is_left_alone_and_asked_for_nothing_more() {
        let hangs = Arc::new(AtomicBool::new(true));
        let (theirs, asked) = (Arc::clone(&hangs), Arc::new(AtomicUsize::new(0)));
        let counted = Arc::clone(&asked);
        let work = WatchedWork::start(&DiskWatch::default(), move |watch| {
            watch.asking("the first", || Ok(1000)).unwrap();
            let second = watch.asking("the second", || {
                yield_while(|| theirs.load(Ordering::Acquire));
                Ok(24)
            });
            second.unwrap();
            watch.asking("the third", || Ok(counted.fetch_add(1, Ordering::AcqRel)))
        });
        let (stalled, mut left) = work.unwrap().wait(SHORT).unwrap_err();
        assert_eq!((&*stalled.what, stalled.limit), ("the second", SHORT));
        assert!(stalled.waited >= SHORT.0 && left.hung() >= SHORT.0);
        let memory = Mapping::new(Bytes::from_kib(64), Backing::OnTouch).unwrap();
        let memory = Arc::new(SharedMapping::from(memory));
        let marks = vec![Arc::downgrade(&memory), Arc::downgrade(&memory)];
        left.add(Retained::of(marks, Instant::now()));
        assert!(left.hangs());
        assert_eq!(
            left.bytes(),
            THREAD + Bytes::new(1000) + Bytes::from_kib(64)
        );
        hangs.store(false, Ordering::Release);
        yield_while(|| left.works().next().is_some());
        assert!(left.hangs(), "the memory");
        drop(memory);
        assert!(!left.hangs() && left.bytes() == Bytes::ZERO);
        assert_eq!(asked.load(Ordering::Acquire), 0);
    }
}
