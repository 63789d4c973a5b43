//! Reads of parts into memory, on threads that are abandoned if the disk hangs.

use std::{
    io,
    path::Path,
    ptr::NonNull,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    arena::{Backing, Mapping, SharedMapping},
    backend::Buffer,
    disk::{DiskTimeout, Retained, Stalled},
    error::ReadError,
    reader::{Extent, PATIENCE_STEP, READERS, ReadProgress, Source, WeightFile, read_staged},
    shape::PartLayout,
};
use cotenant_units::lock::{locked, waited_for};
use cotenant_units::{Bytes, page};

/// A part that is being read.
pub(super) struct Growing {
    pub(super) index: usize,
    arena: Buffer,
    steps: Vec<Step>,
}

/// One read.
struct Step {
    extent: Extent,
    /// Offset in the arena of its page-aligned superset.
    target: usize,
}

/// Outcome of reading parts.
#[derive(Default)]
pub(super) struct Grown {
    /// Complete parts, from the first one on.
    pub(super) whole: Vec<Buffer>,
    /// Memory kept by hanging reads.
    pub(super) left: Retained,
    /// Reason for an incomplete result; `None` if growth was preempted.
    pub(super) failed: Option<GrowError>,
}

/// Why a part could not be read into memory.
pub(super) enum GrowError {
    Allocate(io::Error),
    Read(ReadError),
    Stalled(Stalled),
}

impl Growing {
    pub(super) fn new(index: usize, layout: &PartLayout, arena: Buffer) -> Self {
        Self {
            index,
            arena,
            steps: steps_of(layout),
        }
    }

    /// Name of the first extent read, for messages.
    pub(super) fn what(layout: &PartLayout) -> Arc<str> {
        layout
            .runs
            .first()
            .map_or_else(|| "weights".into(), |(run, _)| Arc::clone(&run.what))
    }
}

/// Splits a part into reads that end at page boundaries and at multiples of [`READ_MAX`], so that a slow disk does not
/// block one call for long.
fn steps_of(layout: &PartLayout) -> Vec<Step> {
    let mut steps = Vec::new();
    for (extent, target) in &layout.runs {
        let end = extent.offset + extent.bytes as u64;
        let mut from = extent.offset;
        while from < end {
            let to = end.min(from - from % READ_MAX + READ_MAX);
            let part = Extent {
                what: Arc::clone(&extent.what),
                offset: from,
                bytes: usize::try_from(to - from).unwrap_or(usize::MAX),
            };
            let ahead = usize::try_from(part.aligned_offset() - extent.aligned_offset())
                .unwrap_or(usize::MAX);
            steps.push(Step {
                extent: part,
                target: target + ahead,
            });
            from = to;
        }
    }
    steps
}

struct Shared {
    file: Arc<dyn Source>,
    /// Each with the index of its part.
    steps: Vec<(usize, Step)>,
    state: Mutex<State>,
    progress: ReadProgress,
    /// Signals the end of a read.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    arenas: Vec<Buffer>,
    /// The next step to take.
    next: usize,
    /// Steps in progress.
    reading: Vec<usize>,
    /// The first part with an abandoned read.
    given_up: Option<usize>,
    failed: Option<(usize, ReadError)>,
    /// Whether readers stop taking steps.
    stop: bool,
}

/// Reads parts in order, so that all parts before the first failure are complete. Gives up when the disk stalls; reads
/// in progress then keep their memory until they return.
///
/// After [`WANTED_AFTER`], if other work is `wanted`, it ends with the parts complete by then. That is no failure
/// unless the disk hangs.
pub(super) fn read_parts(
    file: &Arc<dyn Source>,
    parts: Vec<Growing>,
    limit: DiskTimeout,
    wanted: &mut dyn FnMut() -> bool,
) -> Grown {
    let (mut steps, mut arenas) = (Vec::new(), Vec::new());
    for (number, part) in parts.into_iter().enumerate() {
        steps.extend(part.steps.into_iter().map(|step| (number, step)));
        arenas.push(part.arena);
    }
    // A device's pages are populated at once, and each thread stages in page-locked memory of its own.
    let is_staged = arenas
        .iter()
        .any(|arena: &Buffer| arena.shared().is_beyond_host());
    let threads = if is_staged { READERS } else { GROWERS }.min(steps.len());
    let shared = Arc::new(Shared {
        file: Arc::clone(file),
        steps,
        state: Mutex::new(State {
            arenas,
            reading: Vec::with_capacity(threads),
            ..State::default()
        }),
        progress: ReadProgress::new(),
        ended: Condvar::new(),
    });
    let mut readers = Vec::with_capacity(threads);
    for _ in 0..threads {
        let theirs = Arc::clone(&shared);
        let thread = thread::Builder::new().name("cotenant-reader".to_owned());
        match thread.spawn(move || theirs.fill()) {
            Ok(reader) => readers.push(reader),
            // The existing threads do all the work.
            Err(_) if !readers.is_empty() => break,
            Err(error) => {
                return Grown {
                    failed: Some(GrowError::Allocate(error)),
                    ..Grown::default()
                };
            }
        }
    }
    let (grown, hangs) = shared.wait(limit, wanted);
    if !hangs {
        for reader in readers {
            reader
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    }
    grown
}

impl Shared {
    /// A reader thread.
    fn fill(&self) {
        let mut staging = None;
        let mut state = locked(&self.state);
        while !state.stop {
            let at = state.next;
            let Some((number, step)) = self.steps.get(at) else {
                return;
            };
            let Some(arena) = state
                .arenas
                .get(*number)
                .map(|arena| Arc::clone(arena.shared()))
            else {
                return;
            };
            state.next += 1;
            if state.reading.is_empty() {
                // No thread has waited for the disk so far.
                self.progress.note();
            }
            state.reading.push(at);
            drop(state);
            let result = if arena.is_beyond_host() {
                self.bring(step, &arena, &mut staging)
            } else {
                let target = arena.range(step.target, step.extent.aligned_bytes());
                read_run(self.file.as_ref(), &step.extent, target, &self.progress)
            };
            self.progress.note();
            // At the end of a step this must be the arena's only owner.
            drop(arena);
            state = locked(&self.state);
            state.reading.retain(|other| *other != at);
            if let Err(error) = result {
                state.stop = true;
                if self.progress.is_given_up() {
                    state.given_up = state.given_up.into_iter().chain([*number]).min();
                } else if state
                    .failed
                    .as_ref()
                    .is_none_or(|(first, _)| number < first)
                {
                    state.failed = Some((*number, error));
                }
            }
            self.ended.notify_all();
        }
    }

    /// Reads a step into this thread's staging memory, and copies it to a device.
    fn bring(
        &self,
        step: &Step,
        arena: &SharedMapping,
        staging: &mut Option<SharedMapping>,
    ) -> Result<(), ReadError> {
        let extent = &step.extent;
        let refused = |problem: &str| extent.error(Path::new(""), problem);
        let no_place = || refused(NO_PLACE);
        let device = arena.device().ok_or_else(no_place)?;
        let staging = match staging {
            Some(staging) => staging,
            None => staging.insert(
                device
                    .page_locked(read_room())
                    .map_err(|error| refused(&error.to_string()))?,
            ),
        };
        let bytes = staging.bytes().as_len();
        let place = staging.range(0, bytes).ok_or_else(no_place)?;
        // SAFETY: whole pages of this thread's own; the arena ranges of steps are disjoint.
        unsafe {
            read_staged(
                self.file.as_ref(),
                extent,
                (device, step.target),
                (place, bytes),
                &self.progress,
            )
        }
    }

    /// Waits until all steps are done or stopped; returns the outcome, and whether a read still hangs.
    fn wait(&self, limit: DiskTimeout, wanted: &mut dyn FnMut() -> bool) -> (Grown, bool) {
        let (began, mut gives_way, mut limit) = (Instant::now(), false, limit);
        let mut state = locked(&self.state);
        let mut stalled = None;
        while !state.reading.is_empty() || !(state.stop || state.next >= self.steps.len()) {
            let idle = self.progress.idle();
            let first = state
                .reading
                .iter()
                .min()
                .and_then(|at| self.steps.get(*at));
            let left = match first.map(|(_, step)| limit.left(idle, &step.extent.what)) {
                None => LOOK_LEAST,
                Some(Ok(left)) => left,
                Some(Err(error)) => {
                    stalled = Some(error);
                    break;
                }
            };
            if !gives_way && began.elapsed() >= WANTED_AFTER {
                drop(state);
                gives_way = wanted();
                state = locked(&self.state);
                if gives_way {
                    // Reads in progress end with the next reply of the disk.
                    state.stop = true;
                    self.progress.give_up();
                    limit = limit.min(DiskTimeout::new(WANTED_AFTER));
                }
            }
            state = waited_for(&self.ended, state, PATIENCE_STEP.min(left)).0;
        }
        state.stop = true;
        self.progress.give_up();
        let number_of = |at: &usize| self.steps.get(*at).map(|(number, _)| *number);
        let hanging: Vec<usize> = state.reading.iter().filter_map(number_of).collect();
        let missing = hanging
            .iter()
            .copied()
            .chain(number_of(&state.next))
            .chain(state.given_up);
        let missing = missing.min();
        let failed = state.failed.take();
        let arenas = std::mem::take(&mut state.arenas);
        drop(state);
        let first = failed.as_ref().map(|(number, _)| *number);
        let (mut whole_parts, mut left) = (Vec::new(), Vec::new());
        let whole = first
            .into_iter()
            .chain(missing)
            .min()
            .unwrap_or(arenas.len());
        for (number, arena) in arenas.into_iter().enumerate() {
            if hanging.contains(&number) {
                left.push(arena.mark());
            } else if number < whole && whole_parts.len() == number {
                whole_parts.push(arena);
            }
        }
        // With neither, growth was preempted.
        let failed = failed
            .map(|(_, error)| GrowError::Read(error))
            .or(stalled.map(GrowError::Stalled));
        (
            Grown {
                whole: whole_parts,
                left: Retained::of(left, began),
                failed,
            },
            !hanging.is_empty(),
        )
    }
}

/// Time to read `parts` with the threads and steps of growth, but into memory that is already resident: the baseline of
/// growth.
///
/// # Errors
/// When memory cannot be allocated, or the file cannot be read.
pub fn raw_read(file: &WeightFile, parts: &[&PartLayout]) -> io::Result<Duration> {
    let buffers =
        (0..GROWERS).map(|_| Mapping::new(read_room(), Backing::Now).map(SharedMapping::from));
    let buffers = Mutex::new(buffers.collect::<io::Result<Vec<_>>>()?);
    let buffers = || locked(&buffers);
    let steps: Vec<Step> = parts.iter().flat_map(|part| steps_of(part)).collect();
    let (started, progress) = (Instant::now(), ReadProgress::new());
    let failed = claimed(steps.len(), GROWERS, |at| {
        // One buffer per thread.
        let (step, buffer) = steps.get(at).zip(buffers().pop())?;
        let target = buffer.range(0, step.extent.aligned_bytes());
        let done = read_run(file, &step.extent, target, &progress);
        buffers().push(buffer);
        done.err()
    });
    let took = started.elapsed();
    failed
        .into_iter()
        .next()
        .map_or(Ok(took), |error| Err(io::Error::other(error)))
}

/// Calls `work` with each number below `count` on up to `threads` threads that claim numbers in order; returns all
/// results.
pub(super) fn claimed<T: Send>(
    count: usize,
    threads: usize,
    work: impl Fn(usize) -> Option<T> + Sync,
) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let claim = || {
        let mut all = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return all;
            }
            all.extend(work(number));
        }
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads.min(count))
            .filter_map(|_| {
                let thread = thread::Builder::new().name("cotenant-reader".to_owned());
                // The existing threads do all the work.
                thread.spawn_scoped(scope, claim).ok()
            })
            .collect();
        let mut all = claim();
        for other in others {
            all.extend(
                other
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            );
        }
        all
    })
}

/// Reads `extent` to `target`, in a mapping of which no other thread uses these bytes.
fn read_run(
    file: &dyn Source,
    extent: &Extent,
    target: Option<NonNull<u8>>,
    progress: &ReadProgress,
) -> Result<(), ReadError> {
    let target = target.ok_or_else(|| extent.error(Path::new(""), NO_PLACE))?;
    // SAFETY: inside a mapping from which no slice is taken; page-aligned by the layout of arenas; the ranges of steps
    // are disjoint.
    unsafe { file.read(extent, target, progress) }
}

const NO_PLACE: &str = "it does not fit its arena";
/// Reader threads for parts: while some wait for the disk, others populate pages, which is slower if the memory is new
/// to a virtual machine.
pub const GROWERS: usize = 4;
/// Largest read; larger ones are no faster. A multiple of the page size.
const READ_MAX: u64 = 4 << 20;
/// Buffer size for one read and the partial pages at both ends.
fn read_room() -> Bytes {
    Bytes::new(READ_MAX).saturating_add(page().saturating_mul(2))
}
/// Interval of checks whether a thread has begun.
const LOOK_LEAST: Duration = Duration::from_millis(1);
/// Time after which growth is preempted by other work, and after that the time without progress that counts as a stall.
/// Our choice: twice the time in which a slow disk should answer a read.
const WANTED_AFTER: Duration = Duration::from_millis(500);
