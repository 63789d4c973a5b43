//! Readings of the machine.

use serde::{Deserialize, Serialize};

use cotenant_units::{Bytes, Timestamp};

/// Detection of memory stalls: the best method that this kernel offers.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, thiserror::Error,
)]
#[serde(rename_all = "snake_case")]
pub enum StallWatch {
    /// None: the kernel counts no stalls.
    #[error("not watched, the kernel counts no stalls")]
    Absent,
    /// Polled with each sample.
    #[error("polled with each sample")]
    Polling,
    /// A trigger of the kernel, within two seconds.
    #[error("by a trigger with a window of 2 s")]
    TwoSeconds,
    /// A trigger of the kernel, within one second.
    #[error("by a trigger with a window of 1 s")]
    OneSecond,
}

/// GPU memory, with its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuUse {
    /// Counted by the driver.
    Counted(Bytes),
    /// Growth of unaccounted memory since the start, including the page pool of the GPU.
    Inferred(Bytes),
}

impl GpuUse {
    /// The bytes, from either source.
    #[must_use]
    pub const fn bytes(self) -> Bytes {
        let (Self::Counted(bytes) | Self::Inferred(bytes)) = self;
        bytes
    }
}

/// Memory that the limits of the control groups around the supervisor allow. The kernel kills inside a full group even
/// if the machine has free memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupRoom {
    /// Lowest limit.
    pub limit: Bytes,
    /// Least memory left in a group: unused bytes of its limit, and page cache that it can drop.
    pub left: Bytes,
}

/// One reading of the machine. `None` means not available: neither zero nor ample.
///
/// In a journal the groups are flattened into one record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Time of the reading.
    pub taken_at: Timestamp,
    /// `/proc/meminfo`.
    #[serde(flatten)]
    pub memory: MemoryReading,
    /// CMA and the GPU.
    #[serde(flatten)]
    pub gpu: GpuReading,
    /// Memory used by zram for swapped-out pages. Not an input of any decision.
    #[serde(skip)]
    pub zram_store: Option<Bytes>,
    /// Largest free block of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest_free: Option<Bytes>,
    /// Memory used by all processes that share the budget, for a budget of scope `session`.
    pub scope_used: Option<Bytes>,
    /// Stalls for memory.
    #[serde(flatten)]
    pub stalls: StallReading,
    /// Counters of the kernel.
    #[serde(flatten)]
    pub counters: KernelCounters,
    /// Memory of the supervisor's own process without the LLM. It is covered by the reserve, not by a lease; the excess
    /// is unaccounted.
    pub own_used: Option<Bytes>,
    /// Detection of stalls.
    pub stall_watch: Option<StallWatch>,
}

/// Memory of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReading {
    /// `MemTotal`.
    pub mem_total: Bytes,
    /// `MemAvailable`, plus the reclaimable part of ZFS's cache.
    pub mem_available: Bytes,
    /// `MemFree`.
    pub mem_free: Bytes,
    /// Limits of the control groups around the supervisor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupRoom>,
}

/// Memory available to the GPU, and used by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuReading {
    /// `CmaFree`: memory that user pages may borrow, and that the GPU cannot allocate.
    pub cma_free: Option<Bytes>,
    /// Pages that the nvmap pool keeps for the next GPU allocation.
    pub nvmap_pool: Option<Bytes>,
    /// Memory held by the GPU of a board with unified memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_used: Option<GpuUse>,
    /// Part of `gpu_used` that no process holds, at most 10 s old.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_orphaned: Option<Bytes>,
}

/// Pressure stall information of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StallReading {
    /// PSI memory `some`, `avg10`, in hundredths of a percent.
    pub psi_some_avg10: Option<u32>,
    /// PSI memory `some`, total stall so far, µs.
    pub psi_some_total_us: Option<u64>,
    /// PSI memory `full`, total stall so far, µs.
    pub psi_full_total_us: Option<u64>,
}

/// Cumulative event counters of the kernel; each may be missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelCounters {
    /// `workingset_refault_file` so far, or `workingset_refault` before Linux 5.9: pages read again soon after their
    /// eviction. The earliest sign of thrashing.
    pub refaults_file: Option<u64>,
    /// `pgscan_direct` so far: pages scanned in direct reclaim by an allocating process.
    pub pgscan_direct: Option<u64>,
    /// Sum of `allocstall_*` over all zones so far: number of direct reclaims.
    pub allocstalls: Option<u64>,
    /// `pswpin` so far, pages.
    pub swap_ins: Option<u64>,
    /// `oom_kill` so far: processes killed by the kernel because memory was exhausted.
    pub oom_kills: Option<u64>,
    /// `cma_alloc_fail` so far, since Linux 5.13: failed CMA allocations of cameras and displays.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cma_failures: Option<u64>,
}

impl Sample {
    /// Returns the memory that can be allocated without reclaiming from a process; page cache that can be dropped
    /// counts: `MemAvailable − CmaFree`, plus the nvmap pool if readable, capped by the control groups around the
    /// supervisor.
    #[must_use]
    pub fn available(&self) -> Bytes {
        let memory = &self.memory;
        let machine = memory
            .mem_available
            .saturating_sub(self.gpu.cma_free.unwrap_or(Bytes::ZERO))
            .saturating_add(self.gpu.nvmap_pool.unwrap_or(Bytes::ZERO));
        memory
            .group
            .map_or(machine, |group| group.left.min(machine))
    }

    /// Returns the total of which [`available`](Self::available) is a part: `MemTotal`, or the limit of a control
    /// group.
    #[must_use]
    pub fn total(&self) -> Bytes {
        self.memory.group.map_or(self.memory.mem_total, |group| {
            group.limit.min(self.memory.mem_total)
        })
    }

    /// Returns the memory that can be allocated without any reclaim, as seen by libraries that query CUDA: `MemFree −
    /// CmaFree`, plus the nvmap pool if readable.
    #[must_use]
    pub fn free_without_reclaim(&self) -> Bytes {
        self.memory
            .mem_free
            .saturating_sub(self.gpu.cma_free.unwrap_or(Bytes::ZERO))
            .saturating_add(self.gpu.nvmap_pool.unwrap_or(Bytes::ZERO))
    }
}
