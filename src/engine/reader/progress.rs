//! Progress and speed of running reads.

use cotenant_units::micros;
use std::{
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

/// Progress of readers, and their signal to stop.
///
/// A read of a few MiB takes seconds on a disk slower than that per second; its waiter must distinguish such a disk
/// from a hanging one.
#[derive(Debug)]
pub struct ReadProgress {
    began: Instant,
    /// Time of the last data, in microseconds after the start.
    last_us: AtomicU64,
    given_up: AtomicBool,
}

impl ReadProgress {
    /// For readers that start now.
    pub fn new() -> Self {
        Self {
            began: Instant::now(),
            last_us: AtomicU64::new(0),
            given_up: AtomicBool::new(false),
        }
    }

    /// Records the arrival of data.
    pub fn note(&self) {
        let now = micros(self.began.elapsed());
        self.last_us.fetch_max(now, Ordering::Relaxed);
    }

    /// Time without data.
    pub fn idle(&self) -> Duration {
        let last = Duration::from_micros(self.last_us.load(Ordering::Relaxed));
        self.began.elapsed().saturating_sub(last)
    }

    /// Cancels the reads: a read that needs another disk access ends instead.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
    }

    /// Allows reads again.
    pub fn take_up(&self) {
        self.given_up.store(false, Ordering::Release);
    }

    /// Whether running reads must end.
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }
}

impl Default for ReadProgress {
    fn default() -> Self {
        Self::new()
    }
}

/// Size of one disk request, chosen so that even a slow disk responds several times per second.
#[derive(Debug)]
pub(super) struct ReadSize(AtomicUsize);

impl ReadSize {
    pub(super) const fn new() -> Self {
        Self(AtomicUsize::new(ASK_FIRST))
    }

    /// Bytes to request: whole pages.
    pub(super) fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Learns from a read. Concurrent updates may lose one sample; the next one replaces it.
    pub(super) fn learn(&self, bytes: usize, took: Duration) {
        let asked = self.bytes();
        let fits = bytes as u128 * ANSWER_WITHIN.as_nanos() / took.as_nanos().max(1);
        let fits = usize::try_from(fits).unwrap_or(usize::MAX);
        // A short read is a lower bound of the fitting size; and a quick reply to it tells nothing about a disk with a
        // fixed latency per request.
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

/// Initial size: four threads requesting this much each get a reply within the
/// [`DiskTimeout`](crate::disk::DiskTimeout) from a disk of 256 KiB/s. A fast disk reaches whole pieces after two
/// requests.
const ASK_FIRST: usize = 256 << 10;
/// The same for 64 KiB/s. A multiple of every kernel's page size.
const ASK_LEAST: usize = 64 << 10;
/// Larger than any piece, so that no read of a fast disk is split.
const ASK_MOST: usize = 16 << 20;
/// Largest growth factor from one read to the next. Our choice.
const ASK_GROWS: usize = 4;
/// Our choice: a sixteenth of the time after which a disk counts as stalled. An SD card that delivers 20 MB/s to four
/// threads still gets requests of 1 MiB, at which it is at its fastest.
const ANSWER_WITHIN: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::DiskTimeout;

    /// Request size after some reads from a disk of this rate per second and thread.
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
        // The end of an extent tells nothing about larger reads.
        size.learn(4096, Duration::from_micros(1));
        assert_eq!(size.bytes(), 4 << 20);
        // A momentary stall is recovered from.
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
