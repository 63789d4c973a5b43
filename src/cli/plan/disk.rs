//! Speed of a disk: at first, in the long run, and how far it wanders.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Seek as _, SeekFrom},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    time::{Duration, Instant},
};

use nix::fcntl::{OFlag, PosixFadviseAdvice, posix_fadvise};
use serde::{Deserialize, Serialize};

use crate::units::Bytes;

/// Rates of reading, MiB per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct DiskRates {
    /// In the first second: as long as a disk's own cache lasts.
    pub burst_mib_per_s: u64,
    /// In the last half.
    pub sustained_mib_per_s: u64,
    /// The 2.5 percentile of windows of 100 ms after the first second.
    pub slow_mib_per_s: u64,
    /// Their 97.5 percentile.
    pub fast_mib_per_s: u64,
}

/// When so many bytes had been read, from the beginning.
pub(crate) type Mark = (Duration, u64);

impl DiskRates {
    /// Reads the file past the page cache for `limit`, from its beginning again where it is shorter. `progress` is called with
    /// the time since the beginning.
    pub(crate) fn measure(path: &Path, limit: Duration, progress: &mut dyn FnMut(Duration)) -> io::Result<Self> {
        // Where the file system has no direct reading, what is read is dropped from the page cache instead.
        let direct = OpenOptions::new().read(true).custom_flags(OFlag::O_DIRECT.bits()).open(path);
        let is_direct = direct.is_ok();
        let mut file = direct.or_else(|_| File::open(path))?;
        let drop_cache = |file: &File| {
            let dropped = posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
            if is_direct { Ok(()) } else { dropped.map_err(io::Error::from) }
        };
        drop_cache(&file)?;
        let mut room = vec![0; PIECE + ALIGNMENT];
        let skipped = room.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        let buffer = room.get_mut(skipped..skipped + PIECE).unwrap_or_default();
        let began = Instant::now();
        let mut marks: Vec<Mark> = vec![(Duration::ZERO, 0)];
        let (mut bytes, mut empty) = (0u64, true);
        while began.elapsed() < limit {
            let read = file.read(buffer)?;
            if read < PIECE {
                if read == 0 && empty {
                    break;
                }
                drop_cache(&file)?;
                file.seek(SeekFrom::Start(0))?;
            }
            empty = read == 0;
            bytes += read as u64;
            marks.push((began.elapsed(), bytes));
            progress(began.elapsed());
        }
        // What was read here was not there before, and does not stay.
        drop_cache(&file)?;
        Ok(Self::of(&marks))
    }

    /// The rates of a reading.
    pub(crate) fn of(marks: &[Mark]) -> Self {
        let (first, last) = (marks.first().copied().unwrap_or_default(), marks.last().copied().unwrap_or_default());
        let burst = marks.iter().copied().take_while(|mark| mark.0 <= BURST_TIME).last();
        let half = marks.iter().copied().find(|mark| mark.0 >= last.0 / 2);
        let sustained = rate(half.filter(|half| half.1 < last.1).unwrap_or(first), last);
        let mut windows = windows(marks);
        windows.sort_unstable();
        let at = |per_mille: usize| windows.get(windows.len().saturating_sub(1) * per_mille / 1000).copied();
        Self {
            burst_mib_per_s: rate(first, burst.filter(|mark| mark.1 > 0).unwrap_or(last)),
            sustained_mib_per_s: sustained,
            slow_mib_per_s: at(25).map_or(sustained, |slow| slow.min(sustained)),
            fast_mib_per_s: at(975).map_or(sustained, |fast| fast.max(sustained)),
        }
    }
}

/// Rates of the windows after the first second, or of all where it was over before.
fn windows(marks: &[Mark]) -> Vec<u64> {
    let settled = marks.iter().position(|mark| mark.0 >= BURST_TIME).filter(|settled| marks.len() - settled > 1);
    let mut rest = marks.iter().copied().skip(settled.unwrap_or(0));
    let Some(mut from) = rest.next() else { return Vec::new() };
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
    Bytes::new(u64::try_from(per_s).unwrap_or(u64::MAX)).whole_mib().max(1)
}

const BURST_TIME: Duration = Duration::from_secs(1);
/// About a token of a model that is mostly streamed, at the speeds of NVMe.
const WINDOW: Duration = Duration::from_millis(100);
const PIECE: usize = 4 << 20;
/// Direct reading takes blocks of the disk; none in use has larger ones.
const ALIGNMENT: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_is_fast_at_first_has_two_rates_and_one_that_is_steady_does_not_wander() {
        let mut marks = vec![(Duration::ZERO, 0)];
        for tenth in 1..=80u64 {
            // 2000 MiB/s for a second, then 400.
            let mib = if tenth <= 10 { tenth * 200 } else { 2000 + (tenth - 10) * 40 };
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
        let mut looks = 0;
        let limit = Duration::from_millis(20);
        let empty = DiskRates::measure(file.path(), limit, &mut |_| looks += 1).unwrap();
        assert_eq!((empty.sustained_mib_per_s, looks), (1, 0));
        std::fs::write(file.path(), vec![7; 100_000]).unwrap();
        let mut until = Duration::ZERO;
        DiskRates::measure(file.path(), limit, &mut |at| (looks, until) = (looks + 1, at)).unwrap();
        assert!(looks > 1 && until >= limit / 2, "{looks} pieces until {until:?}");
        assert!(DiskRates::measure(Path::new("/nowhere"), limit, &mut |_| {}).is_err());
    }
}
