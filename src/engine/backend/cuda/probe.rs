//! Probe of an integrated device: measured once per device, driver and L4T, kept in a file.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{
    driver::Driver,
    gpu::Gpu,
    memory::Allocation,
    trial::{Speed, refused},
};
use crate::{arena::DeviceMemory as _, error::Unavailable};
use cotenant_units::{Bytes, lock::locked};

/// Measurements of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Probe {
    of: Measured,
    pub(super) speed: Speed,
    pub(super) room: Room,
}

/// Validity of a probe: a change of any field invalidates it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Measured {
    device: String,
    memory_bytes: usize,
    driver: i32,
    /// First line of `/etc/nv_tegra_release`; empty on other systems than Jetson.
    l4t: String,
}

/// Allocatable memory, up to half of the free memory and the limits below, and the delay until it is free again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Room {
    /// As one allocation.
    pub(super) largest_bytes: usize,
    /// As several allocations.
    pub(super) sum_bytes: usize,
    /// Delay until the driver counts it as free.
    pub(super) driver_us: Option<u64>,
    /// Delay until the system counts it as free; `None` if the system never counted it as used.
    pub(super) system_us: Option<u64>,
}

/// The last probe of this process, and the folder of probes.
#[derive(Debug)]
struct Known {
    probe: Option<Probe>,
    folder: Option<PathBuf>,
}

static KNOWN: Mutex<Known> = Mutex::new(Known {
    probe: None,
    folder: None,
});

/// Sets the folder in which probes are read and kept.
pub fn keep_probe_in(folder: &Path) {
    locked(&KNOWN).folder = Some(folder.to_owned());
}

/// Makes the next choice of a device measure it again.
pub fn forget_probe() {
    let mut known = locked(&KNOWN);
    known.probe = None;
    if let Some(folder) = &known.folder {
        fs::remove_file(folder.join(FILE)).ok();
    }
}

impl Probe {
    /// The probe of this device: from this process, from the file, or a new one, which is written there. With `graphs`,
    /// their launches are timed too.
    ///
    /// # Errors
    ///
    /// A call fails.
    pub(super) fn of_device(graphs: bool) -> Result<Self, Unavailable> {
        let mut known = locked(&KNOWN);
        if let Some(probe) = &known.probe {
            return Ok(probe.clone());
        }
        let of = Measured::now(Driver::open()?);
        let file = known.folder.as_deref().map(|folder| folder.join(FILE));
        let kept = file
            .as_deref()
            .and_then(read)
            .filter(|probe| probe.of == of);
        let probe = match kept {
            Some(probe) => probe,
            None => {
                let probe = Self::measured(of, graphs)?;
                if let Some(file) = &file {
                    // Without the file, the next start measures again.
                    write(file, &probe).ok();
                }
                probe
            }
        };
        known.probe = Some(probe.clone());
        Ok(probe)
    }

    fn measured(of: Measured, graphs: bool) -> Result<Self, Unavailable> {
        let speed = Speed::measure(graphs)?;
        let room = Room::measured().map_err(|error| refused(&error))?;
        Ok(Self { of, speed, room })
    }
}

impl Measured {
    fn now(driver: &Driver) -> Self {
        let release = fs::read_to_string("/etc/nv_tegra_release").unwrap_or_default();
        Self {
            device: driver.name.clone(),
            memory_bytes: driver.memory,
            driver: driver.version,
            l4t: release.lines().next().unwrap_or_default().to_owned(),
        }
    }
}

impl Room {
    fn measured() -> io::Result<Self> {
        let gpu = Gpu::open().map_err(io::Error::other)?;
        let half = gpu.free()? / 2;
        let largest = largest(&gpu, half.min(LARGEST_MAX));
        let (before, available) = (gpu.free()?, available());
        let began = Instant::now();
        let mut pieces = Vec::new();
        while largest > 0
            && (pieces.len() + 1) * largest <= half.min(SUM_MAX)
            && began.elapsed() < ALLOCATING_MAX
        {
            let Ok(piece) = Allocation::unwritten(&gpu, largest) else {
                break;
            };
            pieces.push(piece);
        }
        let sum = pieces
            .iter()
            .map(|piece| piece.bytes().as_len())
            .sum::<usize>();
        let (held, held_available) = (gpu.free()?, self::available());
        let taken = before.saturating_sub(held);
        let taken_available = available
            .zip(held_available)
            .map_or(0, |(before, held)| before.saturating_sub(held));
        drop(pieces);
        let freed = Instant::now();
        let driver_us = until(freed, || {
            Ok(gpu.free()?.saturating_sub(held) >= most_of(taken))
        })?;
        // The system counts nothing on a discrete device, or if the driver keeps a pool.
        let system_us = if taken_available >= sum / 2 && sum > 0 {
            let held = held_available.unwrap_or_default();
            until(freed, || {
                Ok(self::available().unwrap_or_default().saturating_sub(held)
                    >= most_of(taken_available))
            })?
        } else {
            None
        };
        Ok(Self {
            largest_bytes: largest,
            sum_bytes: sum,
            driver_us,
            system_us,
        })
    }
}

/// The largest allocation of at most `most` bytes, to the precision of a step.
fn largest(gpu: &Arc<Gpu>, most: usize) -> usize {
    let fits = |bytes: usize| Allocation::unwritten(gpu, bytes).is_ok();
    if most < STEP || fits(most) {
        return most;
    }
    let (mut least, mut most) = (0, most);
    while most - least > STEP {
        let middle = least.midpoint(most);
        if fits(middle) {
            least = middle;
        } else {
            most = middle;
        }
    }
    least
}

/// Microseconds from `began` until a condition holds; `None` on timeout.
fn until(began: Instant, mut holds: impl FnMut() -> io::Result<bool>) -> io::Result<Option<u64>> {
    loop {
        if holds()? {
            return Ok(u64::try_from(began.elapsed().as_micros()).ok());
        }
        if began.elapsed() >= FREEING_MAX {
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(1));
    }
}

const fn most_of(bytes: usize) -> usize {
    bytes - bytes / 16
}

/// `MemAvailable`, in bytes.
fn available() -> Option<usize> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_ascii_whitespace()
        .next()?
        .parse::<usize>()
        .ok()?
        .checked_mul(1024)
}

fn read(file: &Path) -> Option<Probe> {
    serde_json::from_str(&fs::read_to_string(file).ok()?).ok()
}

fn write(file: &Path, probe: &Probe) -> io::Result<()> {
    let new = file.with_extension("new");
    fs::write(&new, serde_json::to_string_pretty(probe)?)?;
    fs::rename(&new, file)
}

impl std::fmt::Display for Probe {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { speed, room, .. } = self;
        write!(
            formatter,
            "weights at {:.1} GB/s in its own memory and {:.1} GB/s mapped, a launch in {:.1} us{}; {} in one piece and {} in several can be allocated",
            gigabytes(speed.device),
            gigabytes(speed.mapped),
            speed.launch.as_secs_f64() * 1e6,
            speed.in_graph.map_or_else(String::new, |took| format!(
                " and in a graph in {:.1} us",
                took.as_secs_f64() * 1e6
            )),
            Bytes::of_len(room.largest_bytes),
            Bytes::of_len(room.sum_bytes),
        )?;
        for (us, whose) in [(room.driver_us, "driver"), (room.system_us, "system")] {
            if let Some(us) = us {
                write!(
                    formatter,
                    ", free for the {whose} after {} ms",
                    us.div_ceil(1000)
                )?;
            }
        }
        Ok(())
    }
}

#[expect(clippy::cast_precision_loss, reason = "a figure with one decimal")]
fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

/// Name of the file in its folder.
const FILE: &str = "gpu.json";
/// No part of a model is larger, and a larger sum takes longer than a start may (our choice).
const LARGEST_MAX: usize = 1 << 30;
const SUM_MAX: usize = 4 << 30;
/// Precision of the largest allocation, and time limits for allocating and waiting: with the speed, less than 2 s in
/// total.
const STEP: usize = 16 << 20;
const ALLOCATING_MAX: Duration = Duration::from_millis(500);
const FREEING_MAX: Duration = Duration::from_millis(300);
