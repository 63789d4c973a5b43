//! Page pool of nvmap: memory retained by it after a release, and when to empty it.
//!
//! On a Jetson, memory freed by the GPU goes to a pool of up to an eighth of the machine's memory, where only the next
//! GPU allocation gets it at once. Therefore the first sample after a release splits it by destination, and the pool is
//! emptied when programs on the CPU run short.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::pressure::Sample;
use cotenant_units::{Bytes, Timestamp};

/// Destination of released memory, by the next sample. The remainder was allocated by others in the meantime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// Bytes released.
    pub bytes: Bytes,
    /// Bytes kept by the pool.
    pub to_pool: Bytes,
    /// Bytes available to every program.
    pub to_os: Bytes,
}

/// State of the pool and recent releases.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PagePool {
    /// Bytes released since the sample in `last`.
    open: Option<(Timestamp, Bytes)>,
    /// Pool, and available memory without it, in the last sample.
    last: Option<(Bytes, Bytes)>,
    emptied_at: Option<Timestamp>,
    pub(super) last_release: Option<Release>,
}

impl PagePool {
    /// Records a release at `now`; ignored if no pool was seen.
    pub(super) fn released(&mut self, bytes: Bytes, now: Timestamp) {
        if self.last.is_some() && bytes > Bytes::ZERO {
            let before = self.open.map_or(Bytes::ZERO, |(_, bytes)| bytes);
            self.open = Some((now, before.saturating_add(bytes)));
        }
    }

    /// Records a sample; returns the destination of the releases that it is the first to show.
    pub(super) fn observe(&mut self, sample: &Sample) -> Option<Release> {
        let Some(pool) = sample.gpu.nvmap_pool else {
            (self.open, self.last) = (None, None);
            return None;
        };
        let now = (pool, sample.available().saturating_sub(pool));
        let shown = self.open.filter(|(since, _)| sample.taken_at > *since);
        let Some(((_, bytes), before)) = shown.zip(self.last) else {
            if self.open.is_none() {
                self.last = Some(now);
            }
            return None;
        };
        (self.open, self.last) = (None, Some(now));
        let to_pool = now.0.saturating_sub(before.0).min(bytes);
        let to_os = now
            .1
            .saturating_sub(before.1)
            .min(bytes.saturating_sub(to_pool));
        self.last_release = Some(Release {
            bytes,
            to_pool,
            to_os,
        });
        self.last_release
    }

    /// Returns the bytes to empty from the pool: all of them if less than `short` is available without it. The kernel
    /// would also reclaim them, but while a process waits.
    pub(super) fn bytes_to_empty(&mut self, short: Bytes, now: Timestamp) -> Option<Bytes> {
        let (pool, low) = self.last?;
        let rests = self.emptied_at.is_some_and(|at| now < at + PAUSE);
        (pool >= LEAST && low < short && !rests).then(|| {
            self.emptied_at = Some(now);
            pool
        })
    }
}

/// Minimum worth emptying; our choice.
const LEAST: Bytes = Bytes::from_mib(64);
/// Minimum interval between attempts: more often is useless if emptying is not permitted, or the GPU refills the pool.
/// Our choice.
const PAUSE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pressure::{GpuReading, MemoryReading};

    fn sample(millis: u64, pool: u64, low: u64) -> Sample {
        Sample {
            taken_at: Timestamp::from_millis(millis),
            memory: MemoryReading {
                mem_available: Bytes::from_mib(low + 30),
                ..MemoryReading::default()
            },
            gpu: GpuReading {
                cma_free: Some(Bytes::from_mib(30)),
                nvmap_pool: Some(Bytes::from_mib(pool)),
                ..GpuReading::default()
            },
            ..Sample::default()
        }
    }

    fn mib(release: Release) -> [u64; 3] {
        [release.bytes, release.to_pool, release.to_os].map(Bytes::whole_mib)
    }

    #[test]
    fn a_release_is_split_by_the_first_sample_after_it() {
        let mut pool = PagePool::default();
        pool.released(Bytes::from_mib(9), Timestamp::START);
        assert_eq!(
            pool.observe(&sample(100, 10, 1000)),
            None,
            "nothing was known before"
        );
        pool.released(Bytes::from_mib(700), Timestamp::from_millis(200));
        assert_eq!(
            pool.observe(&sample(150, 10, 990)),
            None,
            "it was taken before"
        );
        assert_eq!(
            pool.observe(&sample(300, 510, 1150)).map(mib),
            Some([700, 500, 150])
        );
        assert_eq!(pool.observe(&sample(400, 510, 1200)), None);
        // Others fill the machine, and the pool is full.
        pool.released(Bytes::from_mib(100), Timestamp::from_millis(500));
        pool.released(Bytes::from_mib(100), Timestamp::from_millis(510));
        assert_eq!(
            pool.observe(&sample(600, 500, 1100)).map(mib),
            Some([200, 0, 0])
        );
        assert_eq!(pool.last_release.map(mib), Some([200, 0, 0]));
    }

    #[test]
    fn the_pool_is_emptied_where_programs_of_the_processor_run_short_and_not_all_the_time() {
        let mut pool = PagePool::default();
        let at = Timestamp::from_millis;
        let short = Bytes::from_mib(500);
        assert_eq!(pool.bytes_to_empty(short, at(1)), None);
        pool.observe(&sample(100, 300, 500));
        assert_eq!(pool.bytes_to_empty(short, at(100)), None, "enough is there");
        pool.observe(&sample(200, 63, 100));
        assert_eq!(
            pool.bytes_to_empty(short, at(200)),
            None,
            "the pool has next to nothing"
        );
        pool.observe(&sample(300, 300, 499));
        assert_eq!(
            pool.bytes_to_empty(short, at(300)),
            Some(Bytes::from_mib(300))
        );
        assert_eq!(pool.bytes_to_empty(short, at(5299)), None);
        assert_eq!(
            pool.bytes_to_empty(short, at(5300)),
            Some(Bytes::from_mib(300))
        );
        pool.observe(&Sample::default());
        assert_eq!(
            pool.bytes_to_empty(short, at(60_000)),
            None,
            "the pool is not read any more"
        );
    }
}
