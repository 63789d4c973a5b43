//! Progress and speed of reads while they are under way.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

/// Progress of readers, and the sign for them to give up the rest.
///
/// A read of a few MiB takes seconds on a disk that brings less than that in a second; who waits for it has to know that
/// disk from one that hangs.
#[derive(Debug)]
pub struct ReadProgress {
    began: Instant,
    /// When something came last, in microseconds after that.
    last_us: AtomicU64,
    given_up: AtomicBool,
}

impl ReadProgress {
    /// Of readers that begin now.
    #[must_use]
    pub fn new() -> Self {
        Self {
            began: Instant::now(),
            last_us: AtomicU64::new(0),
            given_up: AtomicBool::new(false),
        }
    }

    /// Something has come.
    pub fn note(&self) {
        let now = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.last_us.fetch_max(now, Ordering::Relaxed);
    }

    /// For how long nothing has come.
    #[must_use]
    pub fn idle(&self) -> Duration {
        let last = Duration::from_micros(self.last_us.load(Ordering::Relaxed));
        self.began.elapsed().saturating_sub(last)
    }

    /// What is being read is not wanted any more: a read that has to ask the disk again ends instead.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
    }

    /// What is read from now on is wanted.
    pub fn take_up(&self) {
        self.given_up.store(false, Ordering::Release);
    }

    /// Whether reads under way are to end.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }
}

impl Default for ReadProgress {
    fn default() -> Self {
        Self::new()
    }
}

/// How much a disk is asked for at once, so that it answers several times in a second however slow it is.
#[derive(Debug)]
pub(super) struct ReadSize(AtomicUsize);

impl ReadSize {
    pub(super) const fn new() -> Self {
        Self(AtomicUsize::new(ASK_FIRST))
    }

    /// Bytes to ask for: whole pages.
    pub(super) fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Learns from a read. Threads that learn at the same time may forget what one of them has seen; the next tells again.
    pub(super) fn learn(&self, bytes: usize, took: Duration) {
        let asked = self.bytes();
        let fits = bytes as u128 * ANSWER_WITHIN.as_nanos() / took.as_nanos().max(1);
        let fits = usize::try_from(fits).unwrap_or(usize::MAX);
        // A short read says that less than it fits, and not that no more would; and one that is answered soon all the same
        // says nothing of a disk that takes some time for each, whatever it brings.
        let says_nothing = fits >= asked || (bytes < ASK_FIRST && took <= ANSWER_WITHIN);
        if bytes < asked && says_nothing {
            return;
        }
        let next = fits
            .clamp(ASK_LEAST, ASK_MOST)
            .min(asked.saturating_mul(ASK_GROWS));
        let next = next - next % ASK_LEAST;
        if next != asked {
            self.0.store(next, Ordering::Relaxed);
        }
    }
}

/// Before anything was learned: four threads that ask for so much are all answered within the [`DiskTimeout`](crate::disk::DiskTimeout)
/// by a disk that brings 256 KiB in a second. A fast one is asked for whole pieces after two of these.
const ASK_FIRST: usize = 256 << 10;
/// The same for 64 KiB in a second. A multiple of all pages that kernels have.
const ASK_LEAST: usize = 64 << 10;
/// More than any piece has, so that no read of a fast disk is cut.
const ASK_MOST: usize = 16 << 20;
/// By how many times the next read may be larger. Our choice.
const ASK_GROWS: usize = 4;
/// Our choice: a sixteenth of the time after which a disk counts as stalled. An SD card that brings 20 MB in a second to four
/// threads is still asked for a MiB at once, at which it is as fast as it gets.
const ANSWER_WITHIN: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::DiskTimeout;

    /// What is asked for at once of a disk that brings so much in a second to this thread, after some reads.
    fn settles_at(per_second: u64) -> usize {
        let size = ReadSize::new();
        let mut longest = Duration::ZERO;
        for _ in 0..20 {
            let took = Duration::from_micros(size.bytes() as u64 * 1_000_000 / per_second);
            longest = longest.max(took);
            size.learn(size.bytes(), took);
        }
        let what = "piece".into();
        assert!(
            DiskTimeout::default().left(longest, &what).is_ok(),
            "{longest:?} at {per_second}"
        );
        size.bytes()
    }

    #[test]
    fn a_slow_disk_is_asked_for_less_and_a_fast_one_for_whole_pieces() {
        assert_eq!(settles_at(2 << 30), ASK_MOST);
        assert_eq!(settles_at(4 << 20), 1 << 20);
        assert_eq!(settles_at(1 << 20), 256 << 10);
        assert_eq!(settles_at(100 << 10), ASK_LEAST);
        let size = ReadSize::new();
        size.learn(ASK_FIRST, Duration::from_micros(200));
        size.learn(size.bytes(), Duration::from_micros(500));
        assert_eq!(size.bytes(), 4 << 20, "after two reads");
        size.learn(4096, Duration::from_millis(8));
        assert_eq!(size.bytes(), 4 << 20, "each read takes some time");
        size.learn(4096, ANSWER_WITHIN * 2);
        assert_eq!(size.bytes(), ASK_LEAST);
        (0..3).for_each(|_| size.learn(size.bytes(), Duration::from_micros(500)));
        // The end of an extent says nothing of what more would take.
        size.learn(4096, Duration::from_micros(1));
        assert_eq!(size.bytes(), 4 << 20);
        // A moment in which it stood still is made up for.
        size.learn(4 << 20, Duration::from_secs(3));
        assert_eq!(size.bytes(), 320 << 10);
        size.learn(size.bytes(), Duration::from_millis(1));
        size.learn(size.bytes(), Duration::from_millis(4));
        assert_eq!(size.bytes(), 5 << 20);
    }

    #[test]
    fn idle_is_since_the_last_beat() {
        let progress = ReadProgress::new();
        let since = Instant::now();
        while progress.idle() < Duration::from_millis(5) {
            std::thread::yield_now();
        }
        progress.note();
        assert!(progress.idle() < since.elapsed());
    }
}
