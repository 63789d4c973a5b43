//! Thread pool that claims work from a shared counter.
//!
//! With a static split every thread waits for the slowest one, and a spinning barrier waits for a preempted thread:
//! with one of two cores taken by another process that costs a factor of 30. Here a thread preempted between two items
//! delays no other, since it claims nothing; a thread without work spins for some 50 µs, the gap between two operations
//! of one token, and then sleeps.
//!
//! Each thread starts with its own range of items, so that its reads are contiguous, and then steals items from the
//! ends of the others' ranges.
//!
//! A thread preempted within an item delays all others for the competing process's time slice, which equals some
//! hundred items. A waiting thread therefore migrates it to the processor that would otherwise idle: there it finishes
//! within microseconds. It is then excluded, for up to some milliseconds, so that it does not share a processor with the
//! thread that made room for it, and returns on another processor. With a competing process on one of two processors
//! the other one is thus always busy, and the remaining time of the first is used as well. Two threads on one processor
//! are separated in the same way.

use std::{
    cell::UnsafeCell,
    hint, io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::sched::CpuSet;

use super::processors;
use cotenant_units::lock::locked;

/// Compute threads, the caller included.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<thread::JoinHandle<()>>,
    /// Numbers of the threads that take part in the job.
    present: Vec<usize>,
    /// When excluded threads return.
    apart_until: Option<Instant>,
    /// Duration of the last exclusion, and its end.
    pause: (Duration, Option<Instant>),
}

/// A piece of work: called once for each index below the total, with the number of the thread.
type Work<'work> = dyn Fn(usize, usize) + Sync + 'work;

struct Shared {
    /// Unclaimed range of each thread: its end (upper half) and its first item (lower half).
    stretches: Box<[Stretch]>,
    /// Number of the current job.
    number: AtomicU32,
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
    /// Changes when excluded threads return.
    rejoin: AtomicU32,
    stop: AtomicBool,
    panicked: AtomicBool,
}

/// State of one thread, in its own cache line, since threads claim concurrently.
#[repr(align(64))]
struct Stretch {
    items: AtomicU64,
    /// Whether it has claimed items of the current job that are not counted as finished.
    busy: AtomicBool,
    /// Whether it is excluded.
    apart: AtomicBool,
    /// The kernel's number of the thread; 0 before it has run.
    thread: AtomicI32,
    /// The job of its last item (upper half), and the processor it ran on (lower half).
    seen: AtomicU64,
    /// Its original affinity while it is confined.
    home: Mutex<Option<CpuSet>>,
}

impl Stretch {
    const fn new() -> Self {
        Self {
            items: AtomicU64::new(0),
            busy: AtomicBool::new(false),
            apart: AtomicBool::new(false),
            thread: AtomicI32::new(0),
            seen: AtomicU64::new(0),
            home: Mutex::new(None),
        }
    }

    /// Records that it has an item of job `number`, and its processor.
    fn begin(&self, number: u32) {
        let processor = processors::current().unwrap_or(usize::MAX) as u64 & u64::from(u32::MAX);
        self.seen
            .store((u64::from(number) << 32) | processor, Ordering::Relaxed);
        self.busy.store(true, Ordering::SeqCst);
    }

    /// Moves the thread by `how`, which returns its previous affinity, unless it was already moved.
    fn relocate(&self, how: impl FnOnce(i32) -> Option<CpuSet>) {
        Self::relocate_locked(&mut self.home(), &self.thread, how);
    }

    /// As [`relocate`](Self::relocate), if the thread has an item. Without one it may have left the job permanently:
    /// nothing would then restore its affinity before it starts other threads, which inherit it.
    fn relocate_busy(&self, how: impl FnOnce(i32) -> Option<CpuSet>) {
        let mut home = self.home();
        if self.busy.load(Ordering::SeqCst) {
            Self::relocate_locked(&mut home, &self.thread, how);
        }
    }

    fn relocate_locked(
        home: &mut Option<CpuSet>,
        thread: &AtomicI32,
        how: impl FnOnce(i32) -> Option<CpuSet>,
    ) {
        let thread = thread.load(Ordering::Relaxed);
        if thread != 0 && home.is_none() {
            *home = how(thread);
        }
    }

    fn home(&self) -> MutexGuard<'_, Option<CpuSet>> {
        locked(&self.home)
    }

    /// The processor of its last item.
    #[expect(clippy::cast_possible_truncation, reason = "the lower half of a word")]
    fn processor(&self) -> usize {
        self.seen.load(Ordering::Relaxed) as u32 as usize
    }

    /// Restores the thread's original affinity. Without an item it is not moved until its next job.
    fn settle(&self) {
        if let Some(home) = self.home().take() {
            processors::allow(self.thread.load(Ordering::Relaxed), &home);
        }
    }
}

// SAFETY: only the caller of `run` writes `job`, while no item of it can be claimed, and only a thread that has claimed
// an item reads it; the ranges order the two.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is only dereferenced as stated above.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `threads` threads, the caller included; at least 1.
    ///
    /// # Errors
    ///
    /// A thread cannot be started.
    pub(crate) fn new(threads: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            stretches: (0..threads.max(1)).map(|_| Stretch::new()).collect(),
            number: AtomicU32::new(0),
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
            present: Vec::with_capacity(threads.max(1)),
            apart_until: None,
            pause: (PAUSE_MIN, None),
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

    /// Compute threads, the caller included.
    pub(crate) const fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `work` with each number below `total`, on any thread, and returns after all calls have.
    ///
    /// # Panics
    ///
    /// A call panicked on another thread.
    pub(crate) fn run(&mut self, total: usize, work: &(impl Fn(usize) + Sync)) {
        self.run_by_thread(total, &|_, item| work(item));
    }

    /// As [`run`](Self::run), where `work` first gets the number of its thread, below [`threads`](Self::threads).
    ///
    /// # Panics
    ///
    /// As [`run`](Self::run).
    #[expect(
        clippy::panic,
        reason = "a panic of a kernel must not be lost on a thread that is not joined"
    )]
    pub(crate) fn run_by_thread(&mut self, total: usize, work: &Work<'_>) {
        if self
            .apart_until
            .is_some_and(|until| Instant::now() >= until)
        {
            self.come_back();
        }
        // Read once: a thread still finishing the previous job may exclude itself at any moment.
        let stretches = self.shared.stretches.iter().enumerate();
        let present = stretches.filter(|(_, stretch)| !stretch.apart.load(Ordering::Relaxed));
        self.present.clear();
        self.present.extend(present.map(|(index, _)| index));
        if self.present.len() < self.threads() {
            self.exclude();
        }
        if total <= 1 || self.present.len() <= 1 {
            (0..total).for_each(|item| work(0, item));
            return;
        }
        let shared = &*self.shared;
        let items = u32::try_from(total).unwrap_or(u32::MAX);
        let pointer: *const Work<'_> = work;
        // SAFETY: only the lifetime changes. `run` does not return before every item is finished, and no thread
        // dereferences the pointer without a claimed item; `&mut self` excludes a second job.
        let pointer: *const Work<'static> = unsafe { std::mem::transmute(pointer) };
        // SAFETY: no item can be claimed now: those of the last job are finished, and the new ranges are not published
        // yet.
        unsafe { *shared.job.get() = Some(pointer) };
        shared.done.store(0, Ordering::Relaxed);
        shared.total.store(items, Ordering::Relaxed);
        shared.number.fetch_add(1, Ordering::Relaxed);
        if let Some(own) = shared.stretches.first() {
            own.thread
                .store(processors::this_thread(), Ordering::Relaxed);
        }
        let threads = self.present.len() as u64;
        let present = self
            .present
            .iter()
            .filter_map(|index| shared.stretches.get(*index));
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
        if !shared.spin_for(|| shared.finished()) {
            shared.fetch_stalled(0);
            while !shared.sleep_until_done() {
                shared.fetch_stalled(0);
            }
        }
        shared.part();
        if let Some(own) = shared.stretches.first() {
            own.settle();
        }
        let is_apart = |stretch: &Stretch| stretch.apart.load(Ordering::Relaxed);
        if shared.stretches.iter().any(is_apart) {
            self.exclude();
        }
        // Indices beyond `u32` do not occur; any such item would be executed here.
        (usize::try_from(items).unwrap_or(total)..total).for_each(|item| work(0, item));
        if self.shared.panicked.load(Ordering::Acquire) {
            panic!("a kernel panicked on another thread");
        }
    }

    /// Determines when the excluded threads return: soon, unless the last ones returned too soon.
    fn exclude(&mut self) {
        if self.apart_until.is_some() {
            return;
        }
        let now = Instant::now();
        let (last, ended) = self.pause;
        let pause = match ended {
            Some(ended) if now.duration_since(ended) < last => (2 * last).min(PAUSE_MAX),
            _ => PAUSE_MIN,
        };
        self.pause = (pause, None);
        self.apart_until = Some(now + pause);
    }

    /// Readmits excluded threads, on a processor that no other thread uses.
    fn come_back(&mut self) {
        self.apart_until = None;
        self.pause.1 = Some(Instant::now());
        let shared = &*self.shared;
        let (apart, present): (Vec<&Stretch>, Vec<&Stretch>) = shared
            .stretches
            .iter()
            .partition(|stretch| stretch.apart.load(Ordering::SeqCst));
        for stretch in apart {
            let taken = present.iter().map(|stretch| stretch.processor());
            stretch.relocate(|thread| {
                processors::keep_off(thread, taken.chain(processors::current()))
            });
            stretch.apart.store(false, Ordering::SeqCst);
        }
        shared.rejoin.fetch_add(1, Ordering::SeqCst);
        futex_wake(&shared.rejoin, u32::MAX);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(caller) = self.shared.stretches.first() {
            caller.settle();
        }
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.rejoin.fetch_add(1, Ordering::SeqCst);
        futex_wake(&self.shared.rejoin, u32::MAX);
        self.shared.wake.fetch_add(1, Ordering::SeqCst);
        futex_wake(&self.shared.wake, u32::MAX);
        for thread in self.threads.drain(..) {
            // Panics inside items were caught and reported.
            thread.join().ok();
        }
    }
}

impl Shared {
    /// Claims one item: the next one of its own range, or else the last one of another's.
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
                match stretch.compare_exchange_weak(seen, left, Ordering::AcqRel, Ordering::Acquire)
                {
                    Ok(_) => return Some(item),
                    Err(now) => seen = now,
                }
            }
        })
    }

    /// Claims and executes items until none are left; returns whether there was one.
    ///
    /// They are counted as finished together: counting each would move the counter's cache line between processors more
    /// often than memory takes to deliver several items.
    fn claim_and_do(&self, own: usize) -> bool {
        let (mut finished, mut total) = (0, 0);
        while let Some(index) = self.claim(own) {
            if finished == 0 {
                self.stretches[own].begin(self.number.load(Ordering::Relaxed));
            }
            total = self.total.load(Ordering::Acquire);
            // SAFETY: an item is claimed and not yet counted as finished, so its job is in place, and stays.
            if let Some(job) = unsafe { *self.job.get() } {
                // SAFETY: as above; the caller of `run` keeps the closure alive until the last item is finished.
                let work = unsafe { &*job };
                if catch_unwind(AssertUnwindSafe(|| work(own, index as usize))).is_err() {
                    self.panicked.store(true, Ordering::Release);
                }
            }
            finished += 1;
        }
        self.stretches[own].busy.store(false, Ordering::SeqCst);
        if finished > 0
            && self.done.fetch_add(finished, Ordering::SeqCst) + finished == total
            && self.caller_sleeps.swap(0, Ordering::SeqCst) == 1
        {
            futex_wake(&self.caller_sleeps, 1);
        }
        finished > 0
    }

    /// Main loop of each thread of the pool.
    fn work(&self, own: usize) {
        self.stretches[own]
            .thread
            .store(processors::this_thread(), Ordering::Relaxed);
        loop {
            self.claim_and_do(own);
            self.stretches[own].settle();
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
            if self
                .spin_for(|| self.has_work() || self.stretches[own].apart.load(Ordering::Relaxed))
            {
                continue;
            }
            if !self.finished() {
                self.fetch_stalled(own);
            }
            let seen = self.wake.load(Ordering::SeqCst);
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            if !self.has_work() && !self.stop.load(Ordering::SeqCst) {
                futex_wait(&self.wake, seen, None);
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Migrates threads that have an item but no processor to the processor of the calling thread, which is about to
    /// sleep. If the caller of the job waits, they are excluded afterwards; if the caller is migrated, the migrating
    /// thread is.
    fn fetch_stalled(&self, own: usize) {
        let Some(here) = processors::current() else {
            return;
        };
        let time = |stretch: &Stretch| processors::time_of(stretch.thread.load(Ordering::Relaxed));
        let others = self.stretches.iter().enumerate();
        let busy: Vec<_> = others
            .filter(|(index, stretch)| *index != own && stretch.busy.load(Ordering::SeqCst))
            .map(|(index, stretch)| (index, stretch, time(stretch)))
            .collect();
        let begun = Instant::now();
        while begun.elapsed() < STALL {
            if self.finished() {
                return;
            }
            hint::spin_loop();
        }
        for (index, stretch, before) in busy {
            let had = time(stretch)
                .zip(before)
                .map(|(now, before)| now.saturating_sub(before));
            if had.is_none_or(|had| had > STALL / 4) || !stretch.busy.load(Ordering::SeqCst) {
                continue;
            }
            if index == 0 {
                self.stretches[own].apart.store(true, Ordering::SeqCst);
            } else {
                stretch.apart.store(true, Ordering::SeqCst);
            }
            stretch.relocate_busy(|thread| processors::confine(thread, here));
        }
    }

    /// Excludes threads that executed a part of the finished job on the processor of its caller.
    fn part(&self) {
        let Some((own, others)) = self.stretches.split_first() else {
            return;
        };
        let here = own.seen.load(Ordering::Relaxed);
        if own.processor() == u32::MAX as usize {
            return;
        }
        for stretch in others {
            if stretch.seen.load(Ordering::Relaxed) == here {
                stretch.apart.store(true, Ordering::SeqCst);
            }
        }
    }

    fn finished(&self) -> bool {
        self.done.load(Ordering::SeqCst) == self.total.load(Ordering::SeqCst)
    }

    /// Sleeps until all items are finished, or some time has passed; returns whether they are.
    fn sleep_until_done(&self) -> bool {
        self.caller_sleeps.store(1, Ordering::SeqCst);
        if !self.finished() {
            futex_wait(&self.caller_sleeps, 1, Some(AWAKE));
        }
        self.caller_sleeps.store(0, Ordering::SeqCst);
        self.finished()
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
    // SAFETY: the word outlives the call, and so does the limit. A failure means that the word changed or the time is
    // over, and every caller checks again anyway.
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

/// Iterations of a spinning loop before sleeping: about 50 µs.
const SPINS: u32 = 1000;
/// Time without a processor, after the spinning, from which a thread with an item is stalled; a time slice of Linux is
/// some ms.
const STALL: Duration = Duration::from_micros(20);
/// Polling interval of the caller while it waits for the last items.
const AWAKE: Duration = Duration::from_millis(1);
/// Duration of an exclusion: a thread that wrote to a socket needs its processor for some 50 µs.
const PAUSE_MIN: Duration = Duration::from_micros(250);
/// Longest exclusion: about one time slice, in which another program has its processor.
const PAUSE_MAX: Duration = Duration::from_millis(4);

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
                counts
                    .iter()
                    .all(|count| count.load(Ordering::Relaxed) == 1),
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
        // Another process may also take the processors, so this is retried until it was observed.
        while pool.apart_until.is_none() {
            pool.run(64, &|_| {
                if thread::current().id() != caller {
                    thread::sleep(AWAKE);
                }
            });
        }
        pool.apart_until = Some(Instant::now() + Duration::from_secs(3600));
        for _ in 0..50 {
            pool.run(64, &|_| {
                others.fetch_add(
                    u32::from(thread::current().id() != caller),
                    Ordering::Relaxed,
                );
            });
        }
        assert_eq!(others.load(Ordering::Relaxed), 0);
        pool.apart_until = Some(Instant::now());
        while others.load(Ordering::Relaxed) == 0 {
            pool.run(64, &|_| {
                others.fetch_add(
                    u32::from(thread::current().id() != caller),
                    Ordering::Relaxed,
                );
                thread::yield_now();
            });
        }
    }

    #[test]
    fn threads_started_after_a_job_may_run_on_all_processors() {
        let pool = Pool::new(2).unwrap();
        let stretch = &pool.shared.stretches[0];
        stretch
            .thread
            .store(processors::this_thread(), Ordering::Relaxed);
        let all = || nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).unwrap();
        let before = all();
        let confine = || {
            let here = processors::current().unwrap();
            stretch.relocate_busy(|thread| processors::confine(thread, here));
        };
        // Another thread was late to move the caller, which has finished its last item meanwhile.
        confine();
        assert_eq!(thread::spawn(all).join().unwrap(), before);
        stretch.busy.store(true, Ordering::SeqCst);
        confine();
        stretch.busy.store(false, Ordering::SeqCst);
        stretch.settle();
        assert_eq!(thread::spawn(all).join().unwrap(), before);
    }

    #[test]
    fn a_thread_that_leaves_itself_out_after_a_job_comes_back() {
        let mut pool = Pool::new(2).unwrap();
        let caller = thread::current().id();
        let others = AtomicU32::new(0);
        pool.shared.stretches[1].apart.store(true, Ordering::SeqCst);
        pool.apart_until = None;
        pool.run(64, &|_| {});
        assert!(pool.apart_until.is_some());
        while others.load(Ordering::Relaxed) == 0 {
            pool.run(64, &|_| {
                others.fetch_add(
                    u32::from(thread::current().id() != caller),
                    Ordering::Relaxed,
                );
                thread::yield_now();
            });
        }
    }

    #[test]
    fn no_item_is_lost_to_a_thread_that_leaves_itself_out_as_they_are_dealt() {
        let mut pool = Pool::new(3).unwrap();
        let shared = Arc::clone(&pool.shared);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let wavering = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                for apart in [true, false] {
                    shared.stretches[1].apart.store(apart, Ordering::SeqCst);
                }
            }
        });
        let (sender, ended) = std::sync::mpsc::channel();
        thread::spawn(move || {
            for _ in 0..20_000 {
                let done = AtomicU32::new(0);
                pool.come_back();
                pool.run(5, &|_| {
                    done.fetch_add(1, Ordering::Relaxed);
                });
                assert_eq!(done.into_inner(), 5);
            }
            sender.send(()).unwrap();
        });
        // Half a second; forever if an item is assigned to no thread.
        let ended = ended.recv_timeout(Duration::from_secs(120));
        stop.store(true, Ordering::Relaxed);
        wavering.join().unwrap();
        ended.unwrap();
    }

    #[test]
    fn a_thread_that_is_held_up_keeps_nothing_but_its_item() {
        let mut pool = Pool::new(2).unwrap();
        let shared = Arc::clone(&pool.shared);
        let helped = AtomicU32::new(0);
        for _ in 0..100 {
            let finished = AtomicU32::new(0);
            // An excluded thread, which shared a processor, could not help the delayed one here.
            pool.come_back();
            pool.run(64, &|index| {
                // It may still exclude itself, if the delayed one got no processor.
                while index == 0 && !shared.stretches[1].apart.load(Ordering::Acquire) {
                    if finished.load(Ordering::Acquire) == 63 {
                        helped.fetch_add(1, Ordering::Relaxed);
                        break;
                    }
                    thread::yield_now();
                }
                finished.fetch_add(1, Ordering::Release);
            });
            assert_eq!(finished.load(Ordering::Acquire), 64);
        }
        assert!(
            helped.load(Ordering::Relaxed) > 0,
            "a thread that was held up was never helped"
        );
    }
}
