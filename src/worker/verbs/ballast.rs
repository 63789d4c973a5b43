//! `cotenant worker ballast`: a worker that only takes memory.

use std::{
    io::{self, Write},
    num::NonZeroUsize,
    time::Duration,
};

use nix::sys::mman::{self, MapFlags, MmapAdvise, ProtFlags};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::{Instant, sleep, sleep_until},
};

use super::{
    error::VerbError,
    lifeline::{left_alone, tell_ready},
};
use cotenant_config::parse_size;
use cotenant_units::Bytes;

/// Options of `cotenant worker ballast`.
#[derive(Clone, Debug, clap::Args)]
pub struct BallastOptions {
    /// Memory to allocate, for example `400MiB`
    #[arg(value_name = "SIZE", value_parser = size)]
    pub bytes: Bytes,
    /// Allocation per second, for example `200MiB` [default: unlimited]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub rate: Option<Bytes>,
    /// Seconds to hold the memory [default: until SIGTERM]
    #[arg(long, value_name = "SECONDS")]
    pub hold: Option<u64>,
}

/// Parses a size with its unit: `64MiB`.
fn size(text: &str) -> Result<Bytes, String> {
    parse_size(text).map_err(|error| format!("{error}; {}", error.hint()))
}

/// Allocates memory page by page, reports completion, and holds it.
///
/// Writes `taking 400 MiB` and, once every page is resident, `holding 400 MiB` to stdout, and notifies `NOTIFY_SOCKET`.
///
/// # Errors
/// If the memory cannot be mapped, or the rate is below one page per minute.
pub fn run_ballast(options: &BallastOptions) -> Result<(), VerbError> {
    if options.rate.is_some_and(|rate| rate < Bytes::of_len(PAGE)) {
        return Err(VerbError::Options(format!(
            "the rate is below the minimum of {} per second",
            Bytes::of_len(PAGE)
        )));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(VerbError::Runtime)?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(VerbError::Runtime)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(VerbError::Runtime)?;
        tokio::select! {
            result = take_and_hold(options) => result,
            _ = terminate.recv() => Ok(()),
            _ = interrupt.recv() => Ok(()),
            () = left_alone() => Ok(()),
        }
    })
}

async fn take_and_hold(options: &BallastOptions) -> Result<(), VerbError> {
    say(&format!("taking {}", options.bytes));
    let mut ballast = Ballast::map(options.bytes)?;
    let begin = Instant::now();
    let mut taken = Bytes::ZERO;
    while taken < options.bytes {
        let step = STEP.min(options.bytes - taken);
        ballast.touch(taken, step);
        taken += step;
        match options.rate {
            Some(rate) => sleep_until(begin + due_after(taken, rate)).await,
            // Lets a signal be handled.
            None => tokio::task::yield_now().await,
        }
    }
    say(&format!("holding {}", options.bytes));
    tell_ready();
    match options.hold {
        Some(seconds) => sleep(Duration::from_secs(seconds)).await,
        None => std::future::pending::<()>().await,
    }
    drop(ballast);
    Ok(())
}

/// Returns when this much is due at this rate.
fn due_after(taken: Bytes, rate: Bytes) -> Duration {
    let micros = u128::from(taken.get()) * 1_000_000 / u128::from(rate.get().max(1));
    Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
}

/// Anonymous memory, populated when touched.
struct Ballast {
    /// Start of the mapping as an address; `None` for a size of zero.
    start: Option<std::ptr::NonNull<std::ffi::c_void>>,
    length: usize,
}

impl Ballast {
    fn map(bytes: Bytes) -> Result<Self, VerbError> {
        let Some(length) = NonZeroUsize::new(bytes.as_len()) else {
            return Ok(Self {
                start: None,
                length: 0,
            });
        };
        let failed = |error: nix::Error| VerbError::Map {
            bytes,
            source: error.into(),
        };
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe {
            mman::mmap_anonymous(
                None,
                length,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                flags,
            )
        }
        .map_err(failed)?;
        // Huge pages would populate 2 MiB per touched page. A kernel without them refuses, with the same effect.
        // SAFETY: the range is the mapping just made; the advice does not change its content.
        let _ = unsafe { mman::madvise(start, length.get(), MmapAdvise::MADV_NOHUGEPAGE) };
        Ok(Self {
            start: Some(start),
            length: length.get(),
        })
    }

    /// Writes to every page of a range. Each page gets unique content, so that it is not deduplicated.
    fn touch(&mut self, from: Bytes, bytes: Bytes) {
        let Some(start) = self.start else { return };
        let end = from
            .as_len()
            .saturating_add(bytes.as_len())
            .min(self.length);
        for offset in (from.as_len()..end).step_by(PAGE) {
            // SAFETY: the offset is below the length of the mapping, which is writable and ours alone; a single byte is
            // written, because the last page may be partial, and volatile, so that the compiler keeps the write.
            unsafe {
                let page = start.as_ptr().cast::<u8>().add(offset);
                if self.length - offset >= size_of::<usize>() {
                    page.cast::<usize>().write_volatile(offset.wrapping_add(1));
                } else {
                    page.write_volatile(1);
                }
            }
        }
    }
}

impl Drop for Ballast {
    fn drop(&mut self) {
        if let Some(start) = self.start {
            // SAFETY: the mapping is ours and no longer used.
            let _ = unsafe { mman::munmap(start, self.length) };
        }
    }
}

fn say(line: &str) {
    // The reader of our output may be gone; the memory is held regardless.
    let mut stdout = io::stdout().lock();
    let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
}

/// Smallest page size of supported machines; larger pages are touched more often than needed.
const PAGE: usize = 4096;

/// Bytes touched between two looks at the clock: 2.5 ms at a desktop's 6000 MiB/s are 16 MiB.
const STEP: Bytes = Bytes::from_kib(256);
