//! Threads that claim work from a counter.
//!
//! A static split makes every thread wait for the slowest one, and a spinning barrier waits for a thread that the kernel
//! has put aside: with one of two cores taken by a neighbour that costs a factor of 30. Here a thread that is put aside
//! between two items holds up nobody, since it claims nothing; and whoever finds no work spins for some 50 µs, the gap
//! between two operations of one token, and then sleeps.
//!
//! Each thread begins with a stretch of the items of its own, so that what it reads lies side by side, and then takes
//! items from the ends of the others' stretches.
//!
//! A thread that is put aside within an item does hold up the caller, for as long as the neighbour's slice of time lasts,
//! which is some hundred items. So a thread that is seen to have an item and no processor is left out for some time: the
//! others alone are slower, but by less.

use std::{
    cell::UnsafeCell,
    hint, io,
    os::unix::thread::JoinHandleExt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Threads that compute, the caller included.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<thread::JoinHandle<()>>,
    /// When threads that are left out come back.
    apart_until: Option<Instant>,
    /// When they last came back.
    together_since: Instant,
    /// How long the next one is left out.
    pause: Duration,
    /// When a thread with an item last had no processor.
    stalled: Option<Instant>,
}

/// A piece of work: called with each index below the total, each exactly once.
type Work<'work> = dyn Fn(usize) + Sync + 'work;

struct Shared {
    /// Of each thread the stretch of items that nobody has claimed: its end (upper half) and its first item (lower half).
    stretches: Box<[Stretch]>,
    /// Items of the current job.
    total: AtomicU32,
    job: UnsafeCell<Option<*const Work<'static>>>,
    /// Items of the current job that are finished.
    done: AtomicU32,
    /// 1 while the caller sleeps until the last item is finished.
    caller_sleeps: AtomicU32,
    /// Threads asleep, or about to be.
    sleepers: AtomicU32,
    /// Changes whenever sleepers are woken.
    wake: AtomicU32,
    /// Changes when threads that are left out come back.
    rejoin: AtomicU32,
    stop: AtomicBool,
    panicked: AtomicBool,
}

/// What one thread has to do, in a line of its own, since threads claim side by side.
#[repr(align(64))]
struct Stretch {
    items: AtomicU64,
    /// It has claimed items of the current job that are not counted as finished.
    busy: AtomicBool,
    /// It is left out.
    apart: AtomicBool,
}

// SAFETY: `job` is written by the caller of `run` alone, while no item of it can be claimed, and read only by whoever has
// claimed an item; the stretches order the two.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is only followed as stated above.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `threads` threads, of which the caller is one; at least 1.
    ///
    /// # Errors
    ///
    /// When a thread cannot be started.
    pub(crate) fn new(threads: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            stretches: (0..threads.max(1))
                .map(|_| Stretch {
                    items: AtomicU64::new(0),
                    busy: AtomicBool::new(false),
                    apart: AtomicBool::new(false),
                })
                .collect(),
            total: AtomicU32::new(0),
            job: UnsafeCell::new(None),
            done: AtomicU32::new(0),
            caller_sleeps: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            wake: AtomicU32::new(0),
            rejoin: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        });
        let mut pool = Self {
            shared,
            threads: Vec::new(),
            apart_until: None,
            together_since: Instant::now(),
            pause: PAUSE_MIN,
            stalled: None,
        };
        for index in 1..threads.max(1) {
            let shared = Arc::clone(&pool.shared);
            let thread = thread::Builder::new()
                .name(format!("cotenant-cpu-{index}"))
                .spawn(move || shared.work(index))?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Threads that compute, the caller included.
    #[must_use]
    pub(crate) const fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `work` with each number below `total`, on any thread, and returns when all calls have.
    ///
    /// # Panics
    ///
    /// When a call panicked on another thread.
    #[expect(
        clippy::panic,
        reason = "a panic of a kernel must not be lost on a thread that nobody joins"
    )]
    pub(crate) fn run(&mut self, total: usize, work: &Work<'_>) {
        if self.apart_until.is_some_and(|until| Instant::now() >= until) {
            self.come_back();
        }
        let apart = |stretch: &Stretch| stretch.apart.load(Ordering::Relaxed);
        let present = self.shared.stretches.iter().filter(|stretch| !apart(stretch)).count();
        if total <= 1 || present <= 1 {
            (0..total).for_each(work);
            return;
        }
        let shared = &*self.shared;
        let items = u32::try_from(total).unwrap_or(u32::MAX);
        let pointer: *const Work<'_> = work;
        // SAFETY: only the lifetime changes. `run` does not return before every item is finished, and nobody follows the
        // pointer without a claimed item; `&mut self` keeps a second job away.
        let pointer: *const Work<'static> = unsafe { std::mem::transmute(pointer) };
        // SAFETY: no item can be claimed now: those of the last job are finished, and the new stretches are not out yet.
        unsafe { *shared.job.get() = Some(pointer) };
        shared.done.store(0, Ordering::Relaxed);
        shared.total.store(items, Ordering::Relaxed);
        let threads = present as u64;
        let present = shared.stretches.iter().filter(|stretch| !apart(stretch));
        for (number, stretch) in (0u64..).zip(present) {
            let from = u64::from(items) * number / threads;
            let end = u64::from(items) * (number + 1) / threads;
            stretch.items.store((end << 32) | from, Ordering::SeqCst);
        }
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            shared.wake.fetch_add(1, Ordering::SeqCst);
            futex_wake(&shared.wake, items - 1);
        }
        shared.claim_and_do(0);
        if !shared.spin_for(|| shared.done.load(Ordering::SeqCst) == items) {
            self.await_done(items);
        }
        // Indices beyond `u32` do not occur; if they did, they are done here.
        (usize::try_from(items).unwrap_or(total)..total).for_each(work);
        if self.shared.panicked.load(Ordering::Acquire) {
            panic!("a kernel panicked on another thread");
        }
    }

    /// Sleeps until all items are finished. A thread that has one of them and gets no processor, for the second time in
    /// short, is left out from then on.
    fn await_done(&mut self, total: u32) {
        let started = Instant::now();
        let before: Vec<Option<Duration>> = self.threads.iter().map(processor_time).collect();
        let mut judged = false;
        while !self.shared.sleep_until_done(total) {
            if judged {
                continue;
            }
            let waited = started.elapsed();
            let others = self.threads.iter().zip(self.shared.stretches.iter().skip(1));
            let stalled: Vec<&Stretch> = others
                .zip(&before)
                .filter(|((thread, stretch), before)| {
                    let had = processor_time(thread).zip(**before);
                    let had = had.map(|(now, before)| now.saturating_sub(before));
                    let without = had.map_or(Duration::ZERO, |had| waited.saturating_sub(had));
                    without >= STALL && stretch.busy.load(Ordering::SeqCst)
                })
                .map(|((_, stretch), _)| stretch)
                .collect();
            if stalled.is_empty() {
                continue;
            }
            judged = true;
            if self
                .stalled
                .replace(started)
                .is_some_and(|last| started - last < STALLS_WITHIN)
            {
                for stretch in stalled {
                    stretch.apart.store(true, Ordering::SeqCst);
                }
                let soon = self.together_since.elapsed() < PAUSE_MAX;
                self.pause = if soon {
                    (self.pause * 2).min(PAUSE_MAX)
                } else {
                    PAUSE_MIN
                };
                self.apart_until = Some(Instant::now() + self.pause);
            }
        }
    }

    /// Takes back those that were left out.
    fn come_back(&mut self) {
        self.apart_until = None;
        self.together_since = Instant::now();
        for stretch in &self.shared.stretches {
            stretch.apart.store(false, Ordering::SeqCst);
        }
        self.shared.rejoin.fetch_add(1, Ordering::SeqCst);
        futex_wake(&self.shared.rejoin, u32::MAX);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.rejoin.fetch_add(1, Ordering::SeqCst);
        futex_wake(&self.shared.rejoin, u32::MAX);
        self.shared.wake.fetch_add(1, Ordering::SeqCst);
        futex_wake(&self.shared.wake, u32::MAX);
        for thread in self.threads.drain(..) {
            // Panics inside items were caught and told.
            thread.join().ok();
        }
    }
}

impl Shared {
    /// Claims one item: the next one of the own stretch, or else the last one of another's.
    fn claim(&self, own: usize) -> Option<u32> {
        let count = self.stretches.len();
        if self.stretches[own].apart.load(Ordering::Acquire) {
            return None;
        }
        (0..count).find_map(|ahead| {
            let stretch = &self.stretches[(own + ahead) % count].items;
            let mut seen = stretch.load(Ordering::Acquire);
            loop {
                let (next, end) = split(seen);
                if next >= end {
                    return None;
                }
                let (item, left) = if ahead == 0 {
                    (next, seen + 1)
                } else {
                    (end - 1, seen - (1 << 32))
                };
                match stretch.compare_exchange_weak(seen, left, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => return Some(item),
                    Err(now) => seen = now,
                }
            }
        })
    }

    /// Claims items and does them until there is none; says whether there was one.
    ///
    /// They are counted as finished together, for a count after each would move the counter's line between processors
    /// more often than memory takes to bring some items.
    fn claim_and_do(&self, own: usize) -> bool {
        let (mut finished, mut total) = (0, 0);
        while let Some(index) = self.claim(own) {
            self.stretches[own].busy.store(true, Ordering::Relaxed);
            total = self.total.load(Ordering::Acquire);
            // SAFETY: an item is claimed and not yet counted as finished, so the job it belongs to is in place, and stays.
            if let Some(job) = unsafe { *self.job.get() } {
                // SAFETY: as above; the caller of `run` keeps the closure alive until the last item is finished.
                let work = unsafe { &*job };
                if catch_unwind(AssertUnwindSafe(|| work(index as usize))).is_err() {
                    self.panicked.store(true, Ordering::Release);
                }
            }
            finished += 1;
        }
        self.stretches[own].busy.store(false, Ordering::Relaxed);
        if finished > 0
            && self.done.fetch_add(finished, Ordering::SeqCst) + finished == total
            && self.caller_sleeps.swap(0, Ordering::SeqCst) == 1
        {
            futex_wake(&self.caller_sleeps, 1);
        }
        finished > 0
    }

    /// What each thread of the pool does.
    fn work(&self, own: usize) {
        loop {
            self.claim_and_do(own);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let rejoin = self.rejoin.load(Ordering::SeqCst);
            if self.stretches[own].apart.load(Ordering::SeqCst) {
                if !self.stop.load(Ordering::SeqCst) {
                    futex_wait(&self.rejoin, rejoin, None);
                }
                continue;
            }
            if self.spin_for(|| self.has_work() || self.stretches[own].apart.load(Ordering::Relaxed)) {
                continue;
            }
            let seen = self.wake.load(Ordering::SeqCst);
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            if !self.has_work() && !self.stop.load(Ordering::SeqCst) {
                futex_wait(&self.wake, seen, None);
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Sleeps until all items are finished, but not for much longer than [`STALL`]; says whether they are.
    fn sleep_until_done(&self, total: u32) -> bool {
        let finished = || self.done.load(Ordering::SeqCst) == total;
        self.caller_sleeps.store(1, Ordering::SeqCst);
        if !finished() {
            futex_wait(&self.caller_sleeps, 1, Some(STALL));
        }
        self.caller_sleeps.store(0, Ordering::SeqCst);
        finished()
    }

    fn has_work(&self) -> bool {
        self.stretches.iter().any(|stretch| {
            let (next, end) = split(stretch.items.load(Ordering::SeqCst));
            next < end
        })
    }

    fn spin_for(&self, ready: impl Fn() -> bool) -> bool {
        for _ in 0..SPINS {
            if ready() || self.stop.load(Ordering::Relaxed) {
                return true;
            }
            hint::spin_loop();
        }
        false
    }
}

/// First item and end.
#[expect(clippy::cast_possible_truncation, reason = "the two halves of a word")]
const fn split(stretch: u64) -> (u32, u32) {
    (stretch as u32, (stretch >> 32) as u32)
}

/// Sleeps while `word` is `seen`, at most for `limit`; may return early.
fn futex_wait(word: &AtomicU32, seen: u32, limit: Option<Duration>) {
    let limit = limit.map(|limit| libc::timespec {
        tv_sec: libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(limit.subsec_nanos().cast_signed()),
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word outlives the call, and so does the limit. A failure means that the word changed or the time is over,
    // and every caller looks again anyway.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            seen,
            limit,
        );
    }
}

/// How long a thread has had a processor so far; `None` where the system does not say.
fn processor_time(thread: &thread::JoinHandle<()>) -> Option<Duration> {
    let mut clock: libc::clockid_t = 0;
    // SAFETY: a thread that is not yet joined.
    if unsafe { libc::pthread_getcpuclockid(thread.as_pthread_t(), &raw mut clock) } != 0 {
        return None;
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a value to be written to.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return None;
    }
    let (seconds, nanoseconds) = (u64::try_from(time.tv_sec).ok()?, u64::try_from(time.tv_nsec).ok()?);
    Some(Duration::from_secs(seconds) + Duration::from_nanos(nanoseconds))
}

fn futex_wake(word: &AtomicU32, count: u32) {
    let count = i32::try_from(count).unwrap_or(i32::MAX);
    // SAFETY: the word outlives the call.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
            count,
        );
    }
}

/// Turns of a spinning loop before sleeping: about 50 µs.
const SPINS: u32 = 1000;
/// Without a processor for so long, and with an item, a thread stalls. What a reader of weights or the system takes in between
/// is less; a slice of Linux's scheduler is some ms.
const STALL: Duration = Duration::from_millis(1);
/// A neighbour lets a thread stall again before so long: after one slice of its own and one of the thread's.
const STALLS_WITHIN: Duration = Duration::from_millis(30);
/// How long a thread is left out: at first little, since most neighbours are gone soon; where it goes on, so long that trying again costs little.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(160);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_index_is_done_exactly_once_job_after_job() {
        let mut pool = Pool::new(4).unwrap();
        for round in 0..2000usize {
            let total = round % 37;
            let counts: Vec<AtomicU32> = (0..total).map(|_| AtomicU32::new(0)).collect();
            pool.run(total, &|index| {
                counts[index].fetch_add(1, Ordering::Relaxed);
            });
            assert!(
                counts.iter().all(|count| count.load(Ordering::Relaxed) == 1),
                "round {round}"
            );
        }
    }

    #[test]
    fn a_panic_on_a_thread_reaches_the_caller() {
        let mut pool = Pool::new(3).unwrap();
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(64, &|index| assert!(index != 40, "planned"));
        }));
        assert!(result.is_err());
    }

    #[test]
    fn a_thread_that_gets_no_processor_is_left_out_for_a_time_and_comes_back() {
        let mut pool = Pool::new(2).unwrap();
        let caller = thread::current().id();
        let others = AtomicU32::new(0);
        // Somebody else may take the processors too, so this is tried until it was seen.
        while pool.apart_until.is_none() {
            pool.run(64, &|_| {
                if thread::current().id() != caller {
                    thread::sleep(STALL * 10);
                }
            });
        }
        pool.apart_until = Some(Instant::now() + Duration::from_secs(3600));
        for _ in 0..50 {
            pool.run(64, &|_| {
                others.fetch_add(u32::from(thread::current().id() != caller), Ordering::Relaxed);
            });
        }
        assert_eq!(others.load(Ordering::Relaxed), 0);
        pool.apart_until = Some(Instant::now());
        while others.load(Ordering::Relaxed) == 0 {
            pool.run(64, &|_| {
                others.fetch_add(u32::from(thread::current().id() != caller), Ordering::Relaxed);
                thread::yield_now();
            });
        }
    }

    #[test]
    fn a_thread_that_is_held_up_keeps_nothing_but_its_item() {
        let mut pool = Pool::new(2).unwrap();
        for _ in 0..100 {
            let finished = AtomicU32::new(0);
            pool.run(64, &|index| {
                while index == 0 && finished.load(Ordering::Acquire) < 63 {
                    thread::yield_now();
                }
                finished.fetch_add(1, Ordering::Release);
            });
            assert_eq!(finished.load(Ordering::Acquire), 64);
        }
    }
}
