//! Speed of a disk: initial, sustained, and its variation.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::fcntl::{OFlag, PosixFadviseAdvice, posix_fadvise};
use serde::{Deserialize, Serialize};

use cotenant_engine::{
    arena::{Backing, Mapping},
    reader::READERS,
};
use cotenant_units::{Bytes, lock::locked};

/// Read rates, MiB per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct DiskRates {
    /// In the first second, which a disk's own cache may serve.
    pub burst_mib_per_s: u64,
    /// In the second half.
    pub sustained_mib_per_s: u64,
    /// 2.5th percentile of 100 ms windows after the first second.
    pub slow_mib_per_s: u64,
    /// 97.5th percentile of these windows.
    pub fast_mib_per_s: u64,
}

/// Elapsed time, and bytes read until then.
pub(crate) type Mark = (Duration, u64);

impl DiskRates {
    /// Reads the file past the page cache for `limit`, repeatedly if it is short, like streamed parts: with as many
    /// threads, into huge pages, which permit larger disk requests than small ones. `progress` is called repeatedly
    /// with the elapsed time.
    pub(crate) fn measure(
        path: &Path,
        limit: Duration,
        progress: &mut dyn FnMut(Duration),
    ) -> io::Result<Self> {
        Ok(Self::of(&Self::read(path, limit, progress)?))
    }

    fn read(
        path: &Path,
        limit: Duration,
        progress: &mut dyn FnMut(Duration),
    ) -> io::Result<Vec<Mark>> {
        // If the file system has no direct I/O, data is dropped from the page cache after reading.
        let direct = OpenOptions::new()
            .read(true)
            .custom_flags(OFlag::O_DIRECT.bits())
            .open(path);
        let is_direct = direct.is_ok();
        let file = direct.or_else(|_| File::open(path))?;
        let pieces = file.metadata()?.len().div_ceil(PIECE.get());
        let drop_cache = || {
            let dropped = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
            if is_direct {
                Ok(())
            } else {
                dropped.map_err(io::Error::from)
            }
        };
        drop_cache()?;
        let (next, began) = (AtomicU64::new(0), Instant::now());
        let marks = Mutex::new((vec![(Duration::ZERO, 0)], 0));
        let read = || -> io::Result<()> {
            let mut room = Mapping::new(PIECE, Backing::Now)?;
            while began.elapsed() < limit && pieces > 0 {
                let piece = next.fetch_add(1, Ordering::Relaxed);
                if piece > 0 && piece.is_multiple_of(pieces) {
                    drop_cache()?;
                }
                let read = file.read_at(room.bytes_mut(), piece % pieces * PIECE.get())?;
                let mut marks = locked(&marks);
                marks.1 += read as u64;
                let mark = (began.elapsed(), marks.1);
                marks.0.push(mark);
            }
            Ok(())
        };
        thread::scope(|scope| {
            let readers: Vec<_> = (0..READERS)
                .map(|_| thread::Builder::new().spawn_scoped(scope, read))
                .collect::<io::Result<_>>()?;
            while readers.iter().any(|reader| !reader.is_finished()) {
                thread::sleep(LOOK.min(limit));
                progress(began.elapsed());
            }
            let ended = readers.into_iter().map(|reader| {
                reader
                    .join()
                    .unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
            });
            ended.collect::<io::Result<Vec<()>>>()
        })?;
        // Data read here was not cached before, and must not stay cached.
        drop_cache()?;
        let (marks, _) = marks.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(marks)
    }

    /// Computes rates from a reading.
    pub(crate) fn of(marks: &[Mark]) -> Self {
        let (first, last) = (
            marks.first().copied().unwrap_or_default(),
            marks.last().copied().unwrap_or_default(),
        );
        let burst = marks
            .iter()
            .copied()
            .take_while(|mark| mark.0 <= BURST_TIME)
            .last();
        let half = marks.iter().copied().find(|mark| mark.0 >= last.0 / 2);
        let sustained = rate(half.filter(|half| half.1 < last.1).unwrap_or(first), last);
        let mut windows = windows(marks);
        windows.sort_unstable();
        let at = |per_mille: usize| {
            windows
                .get(windows.len().saturating_sub(1) * per_mille / 1000)
                .copied()
        };
        Self {
            burst_mib_per_s: rate(first, burst.filter(|mark| mark.1 > 0).unwrap_or(last)),
            sustained_mib_per_s: sustained,
            slow_mib_per_s: at(25).map_or(sustained, |slow| slow.min(sustained)),
            fast_mib_per_s: at(975).map_or(sustained, |fast| fast.max(sustained)),
        }
    }
}

/// Returns the rates of windows after the first second, or of all if it lasted less.
fn windows(marks: &[Mark]) -> Vec<u64> {
    let settled = marks
        .iter()
        .position(|mark| mark.0 >= BURST_TIME)
        .filter(|settled| marks.len() - settled > 1);
    let mut rest = marks.iter().copied().skip(settled.unwrap_or(0));
    let Some(mut from) = rest.next() else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for mark in rest {
        if mark.0.saturating_sub(from.0) >= WINDOW {
            found.push(rate(from, mark));
            from = mark;
        }
    }
    found
}

fn rate(from: Mark, to: Mark) -> u64 {
    let us = to.0.saturating_sub(from.0).as_micros().max(1);
    let per_s = u128::from(to.1.saturating_sub(from.1)) * 1_000_000 / us;
    Bytes::new(u64::try_from(per_s).unwrap_or(u64::MAX))
        .whole_mib()
        .max(1)
}

const BURST_TIME: Duration = Duration::from_secs(1);
/// Window length: about one token of a mostly streamed model at NVMe speed.
const WINDOW: Duration = Duration::from_millis(100);
const PIECE: Bytes = Bytes::from_mib(8);
const LOOK: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_is_fast_at_first_has_two_rates_and_one_that_is_steady_does_not_wander() {
        let mut marks = vec![(Duration::ZERO, 0)];
        for tenth in 1..=80u64 {
            // 2000 MiB/s for a second, then 400.
            let mib = if tenth <= 10 {
                tenth * 200
            } else {
                2000 + (tenth - 10) * 40
            };
            marks.push((Duration::from_millis(tenth * 100), mib << 20));
        }
        let rates = |burst, sustained, slow, fast| DiskRates {
            burst_mib_per_s: burst,
            sustained_mib_per_s: sustained,
            slow_mib_per_s: slow,
            fast_mib_per_s: fast,
        };
        assert_eq!(DiskRates::of(&marks), rates(2000, 400, 400, 400));
        let short = [(Duration::ZERO, 0), (Duration::from_millis(10), 10 << 20)];
        assert_eq!(DiskRates::of(&short), rates(1000, 1000, 1000, 1000));
        assert_eq!(DiskRates::of(&short[..1]), rates(1, 1, 1, 1));
    }

    #[test]
    fn a_short_file_is_read_again_until_the_time_is_over_and_an_empty_one_once() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let limit = Duration::from_millis(20);
        let empty = DiskRates::measure(file.path(), limit, &mut |_| {}).unwrap();
        assert_eq!(empty.sustained_mib_per_s, 1);
        std::fs::write(file.path(), vec![7; 100_000]).unwrap();
        let mut until = Duration::ZERO;
        let marks = DiskRates::read(file.path(), limit * 10, &mut |at| until = at).unwrap();
        assert!(until >= limit * 10, "{until:?}");
        assert!(
            marks.last().is_some_and(|mark| mark.1 > 100_000),
            "it is read once only: {marks:?}"
        );
        assert!(DiskRates::measure(Path::new("/nowhere"), limit, &mut |_| {}).is_err());
    }
}
