//! Sampler: all files of one sample, kept open, and the wait for the next.
//!
//! Files stay open and are read in place; a sample of the machine takes tens of microseconds (25 µs in the kernel on an
//! x86-64 server, mostly for `vmstat`). Policy decides the interval; if tasks stall for memory earlier, the trigger of
//! [`PsiWatch`] ends the wait.

use std::time::{Duration, Instant};

use super::{
    ProbeError, ProbeRoot,
    arc::ArcStats,
    board::{Board, L4tRelease},
    buddyinfo::FreeBlocks,
    cgroup::watch::GroupWatch,
    meminfo::Meminfo,
    nvmap::{Nvmap, PagePool},
    processes::MemorySum,
    psi::{Pressure, PsiAlarm, PsiRung, PsiWatch},
    session::SessionReader,
    source::{Source, number},
    swap::ZramStore,
    vmstat,
};
use cotenant_policy::{
    params::MachineMemory,
    pressure::{
        GpuReading, GpuUse, GroupRoom, KernelCounters, MemoryReading, Sample, StallReading,
    },
};
use cotenant_units::{Bytes, Timestamp};

/// Readings taken at one time. Missing values are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Memory; the reclaimable part of ZFS's cache counts as available.
    pub meminfo: Meminfo,
    /// Memory left in the enclosing control groups, if one has a limit.
    pub group: Option<GroupRoom>,
    /// Reclaim counters.
    pub vmstat: Option<KernelCounters>,
    /// Stall information.
    pub pressure: Option<Pressure>,
    /// The page pool of nvmap.
    pub pool: Option<PagePool>,
    /// GPU memory.
    pub gpu: Option<GpuUse>,
    /// GPU memory held by no process, at most 10 s old.
    pub gpu_orphaned: Option<Bytes>,
    /// Memory used by zram for swapped-out pages.
    pub zram_store: Option<Bytes>,
    /// Largest free blocks.
    pub free_blocks: Option<FreeBlocks>,
    /// Memory of the session's processes, if the budget covers a session.
    pub scope: Option<MemorySum>,
}

impl Reading {
    /// Returns `MemTotal`, or the tightest limit of an enclosing control group.
    pub fn total(&self) -> Bytes {
        self.group.map_or(self.meminfo.total, |group| {
            group.limit.min(self.meminfo.total)
        })
    }

    /// Converts it to a sample for policy.
    pub fn sample(&self, taken_at: Timestamp) -> Sample {
        Sample {
            taken_at,
            memory: MemoryReading {
                mem_total: self.meminfo.total,
                mem_available: self.meminfo.available,
                mem_free: self.meminfo.free.unwrap_or_default(),
                group: self.group,
            },
            gpu: GpuReading {
                cma_free: self.meminfo.cma_free,
                // Not `NvMapMemFree`: kernels that print it include it in their own estimate of available memory.
                nvmap_pool: self.pool.map(|pool| pool.bytes()),
                gpu_used: self.gpu,
                gpu_orphaned: self.gpu_orphaned,
            },
            zram_store: self.zram_store,
            largest_free: self.free_blocks.map(|blocks| blocks.size),
            scope_used: self.scope.map(|scope| scope.used),
            stalls: StallReading {
                psi_some_avg10: self.pressure.map(|pressure| pressure.some.avg10),
                psi_some_total_us: self.pressure.map(|pressure| pressure.some.total_us),
                psi_full_total_us: self
                    .pressure
                    .and_then(|pressure| pressure.full)
                    .map(|full| full.total_us),
            },
            counters: self.vmstat.unwrap_or_default(),
            own_used: None,
            stall_watch: None,
        }
    }
}

/// Sampler with open files.
#[derive(Debug)]
pub struct Sampler {
    session: Option<SessionReader>,
    meminfo: Source,
    arc: ArcStats,
    groups: GroupWatch,
    vmstat: Option<Source>,
    pressure: Option<Source>,
    pool_available: Option<Source>,
    pool_to_zero: Option<Source>,
    buddyinfo: Option<Source>,
    zram: ZramStore,
    gpu: GpuCounter,
    orphans: Orphans,
}

/// GPU memory without a process: nvmap's allocations in excess of its table's rows. Memory shared by two processes is
/// in both rows, so the figure is a lower bound.
#[derive(Debug)]
struct Orphans {
    nvmap: Option<Nvmap>,
    last: Option<(Instant, Option<Bytes>)>,
}

impl Orphans {
    fn read(&mut self, now: Instant) -> Option<Bytes> {
        let nvmap = self.nvmap.as_ref()?;
        if let Some((at, last)) = self.last
            && now.saturating_duration_since(at) < ORPHANS_EVERY
        {
            return last;
        }
        let held = nvmap.clients().and_then(|clients| clients.held_by_all());
        let orphaned = held
            .zip(nvmap.total())
            .map(|(held, total)| total.saturating_sub(held));
        self.last = Some((now, orphaned));
        orphaned
    }
}

/// The table has a line per process, and the kernel generates it again for each reader.
const ORPHANS_EVERY: Duration = Duration::from_secs(10);

/// Source of the GPU memory figure.
#[derive(Debug)]
enum GpuCounter {
    /// `stats/total_memory` of nvmap, as root.
    Counted(Source),
    /// Inferred from unaccounted memory; holds its value at the first reading.
    Inferred(Option<Bytes>),
    /// Dedicated GPU memory, or no GPU.
    Apart,
}

impl GpuCounter {
    fn open(root: &ProbeRoot) -> Self {
        let board = Board::read(root);
        match Source::open_optional(root.sys("kernel/debug/nvmap/stats/total_memory")) {
            Some(source) => Self::Counted(source),
            None if board.is_jetson() && board.l4t.is_none_or(L4tRelease::uses_nvmap) => {
                Self::Inferred(None)
            }
            None => Self::Apart,
        }
    }

    fn read(&mut self, meminfo: &Meminfo, zram_store: Option<Bytes>) -> Option<GpuUse> {
        if let Some(used) = meminfo.nvmap_used {
            return Some(GpuUse::Counted(used));
        }
        match self {
            Self::Counted(source) => number(source.read().ok()?.trim_ascii())
                .map(|bytes| GpuUse::Counted(Bytes::new(bytes))),
            Self::Inferred(at_start) => {
                let residual = meminfo
                    .residual()
                    .saturating_sub(zram_store.unwrap_or_default());
                Some(GpuUse::Inferred(
                    residual.saturating_sub(*at_start.get_or_insert(residual)),
                ))
            }
            Self::Apart => None,
        }
    }
}

impl Sampler {
    /// Opens the files present on this machine.
    ///
    /// With a session, each reading lists all processes (1.7 ms for 120 on an x86-64 server) and reads page tables of
    /// new and shrunken ones, so it needs a thread that may block.
    ///
    /// # Errors
    /// If there is no `/proc/meminfo`, or processes are required and cannot be listed; everything else may be missing.
    pub fn open(root: &ProbeRoot, session: Option<u32>) -> Result<Self, ProbeError> {
        let path = root.proc("meminfo");
        let meminfo =
            Source::open(path.clone()).map_err(|error| ProbeError::io("memory", &path, error))?;
        let pool =
            |name: &str| Source::open_optional(root.sys("kernel/debug/nvmap/pagepool").join(name));
        Ok(Self {
            session: session
                .map(|session| SessionReader::open(root, session))
                .transpose()?,
            meminfo,
            arc: ArcStats::open(root),
            groups: GroupWatch::open(root),
            vmstat: Source::open_optional(root.proc("vmstat")),
            pressure: Source::open_optional(root.proc("pressure/memory")),
            pool_available: pool("page_pool_available_pages"),
            pool_to_zero: pool("page_pool_pages_to_zero"),
            buddyinfo: Source::open_optional(root.proc("buddyinfo")),
            zram: ZramStore::open(root),
            gpu: GpuCounter::open(root),
            orphans: Orphans {
                nvmap: Nvmap::find(root),
                last: None,
            },
        })
    }

    /// Returns the memory that a budget may cover, as of the last `reading`.
    pub fn machine(&self, reading: &Reading) -> MachineMemory {
        MachineMemory {
            total: reading.total(),
            limited_by: self.limited_by(reading).map(str::to_owned),
        }
    }

    /// Returns whether the machine of `reading` differs from `known`, without constructing it.
    pub fn has_changed(&self, reading: &Reading, known: &MachineMemory) -> bool {
        reading.total() != known.total || self.limited_by(reading) != known.limited_by.as_deref()
    }

    fn limited_by(&self, reading: &Reading) -> Option<&str> {
        self.groups
            .tightest()
            .filter(|_| reading.total() < reading.meminfo.total)
    }

    /// Returns whether each reading lists all processes.
    pub const fn is_of_session(&self) -> bool {
        self.session.is_some()
    }

    /// Includes these processes and their descendants in the session, although they belong to another one.
    pub fn count_too(&mut self, pids: impl IntoIterator<Item = u32>) {
        if let Some(session) = &mut self.session {
            session.count_too(pids);
        }
    }

    /// Takes a reading.
    ///
    /// # Errors
    /// If memory cannot be read, or the processes of the session cannot be listed. Other unreadable values are `None`
    /// in the reading.
    pub fn read(&mut self) -> Result<Reading, ProbeError> {
        let meminfo = match self.meminfo.read() {
            Ok(text) => Meminfo::parse(text),
            Err(error) => return Err(ProbeError::io("memory", self.meminfo.path(), error)),
        };
        let mut meminfo = meminfo.map_err(|error| ProbeError::parse(self.meminfo.path(), error))?;
        let cached = self.arc.read().unwrap_or_default();
        meminfo.available = meminfo.available.saturating_add(cached).min(meminfo.total);
        let zram_store = self.zram.read();
        Ok(Reading {
            meminfo,
            group: self.groups.read(),
            gpu: self.gpu.read(&meminfo, zram_store),
            gpu_orphaned: self.orphans.read(Instant::now()),
            zram_store,
            free_blocks: text(&mut self.buddyinfo).and_then(FreeBlocks::parse),
            vmstat: text(&mut self.vmstat).map(vmstat::parse),
            pressure: text(&mut self.pressure).and_then(|text| Pressure::parse(text).ok()),
            pool: pages(&mut self.pool_available).map(|available_pages| PagePool {
                available_pages,
                to_zero_pages: pages(&mut self.pool_to_zero).unwrap_or(0),
            }),
            scope: match &mut self.session {
                Some(session) => Some(session.read(Instant::now())?),
                None => None,
            },
        })
    }

    /// Returns whether [`refresh`](Self::refresh) has work.
    pub fn wants_refresh(&self) -> bool {
        self.session
            .as_ref()
            .is_some_and(|session| session.wants_refresh(Instant::now()))
    }

    /// Updates the basis of the next readings for some milliseconds; call it after the last reading was delivered.
    pub fn refresh(&mut self) {
        if let Some(session) = &mut self.session {
            session.refresh(Instant::now());
        }
    }
}

/// Reason why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// The interval elapsed.
    Interval,
    /// Tasks stalled for memory.
    Stall,
}

/// Waits from one sample to the next.
#[derive(Debug)]
pub struct Ticker {
    rung: PsiRung,
    alarm: Option<PsiAlarm>,
}

impl Ticker {
    /// Uses the trigger of `watch`, if it has one that the runtime can watch. Call it inside a runtime.
    pub fn new(watch: PsiWatch) -> Self {
        let alarm = watch.trigger.and_then(|trigger| match PsiAlarm::new(trigger) {
            Ok(alarm) => Some(alarm),
            Err(error) => {
                tracing::warn!(%error, "cannot watch the pressure trigger: sampling by the clock alone");
                None
            }
        });
        let rung = match &alarm {
            Some(_) => watch.rung,
            None => watch.rung.min(PsiRung::ReadOnly),
        };
        Self { rung, alarm }
    }

    /// Waits until tasks stall for memory, at most `interval`. Dropping the future loses nothing.
    pub async fn next(&mut self, interval: Duration) -> Wake {
        let Some(alarm) = &mut self.alarm else {
            tokio::time::sleep(interval).await;
            return Wake::Interval;
        };
        match tokio::time::timeout(interval, alarm.stalled()).await {
            Err(_) => Wake::Interval,
            Ok(Ok(())) => Wake::Stall,
            Ok(Err(error)) => {
                tracing::warn!(%error, "the pressure trigger was removed: sampling by the clock alone");
                self.alarm = None;
                self.rung = self.rung.min(PsiRung::ReadOnly);
                Wake::Stall
            }
        }
    }

    /// Returns the access to stall information on this host.
    pub fn rung(&self) -> PsiRung {
        self.rung
    }
}

/// Reads a file that may be missing, or whose reads may fail.
fn text(source: &mut Option<Source>) -> Option<&[u8]> {
    source.as_mut()?.read().ok()
}

fn pages(source: &mut Option<Source>) -> Option<u64> {
    number(text(source)?.trim_ascii())
}
