//! Readings of the machine.

use serde::{Deserialize, Serialize};

use cotenant_units::{Bytes, Timestamp};

/// How stalls for memory come to be known: the rung of the ladder that this kernel allows.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, thiserror::Error,
)]
#[serde(rename_all = "snake_case")]
pub enum StallWatch {
    /// Not at all: the kernel counts none.
    #[error("not watched, the kernel counts no stalls")]
    Absent,
    /// With each sample.
    #[error("polled with each sample")]
    Polling,
    /// The kernel wakes us, within two seconds.
    #[error("by a trigger with a window of 2 s")]
    TwoSeconds,
    /// The kernel wakes us, within one second.
    #[error("by a trigger with a window of 1 s")]
    OneSecond,
}

/// What the GPU holds, and how that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuUse {
    /// The driver counts it.
    Counted(Bytes),
    /// What has grown since the start of unaccounted memory, the page pool of the GPU included.
    Inferred(Bytes),
}

impl GpuUse {
    /// The figure.
    #[must_use]
    pub const fn bytes(self) -> Bytes {
        let (Self::Counted(bytes) | Self::Inferred(bytes)) = self;
        bytes
    }
}

/// What the control groups around the supervisor allow, where one has a limit: the kernel kills inside a group that is
/// full, however much the machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupRoom {
    /// The tightest limit.
    pub limit: Bytes,
    /// The least that a group has left: what it does not use of its limit, and page cache that it can drop.
    pub left: Bytes,
}

/// One reading of the machine. What is not there is `None`, which is neither zero nor plenty.
///
/// In a journal the groups are not to be seen: their fields stand beside each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// When it was read.
    pub taken_at: Timestamp,
    /// `/proc/meminfo`.
    #[serde(flatten)]
    pub memory: MemoryReading,
    /// CMA and the GPU.
    #[serde(flatten)]
    pub gpu: GpuReading,
    /// Memory that zram keeps pushed-out pages in. No decision needs it.
    #[serde(skip)]
    pub zram_store: Option<Bytes>,
    /// The largest free block of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest_free: Option<Bytes>,
    /// Memory used by all processes that share the budget, where the budget is for a session and not for the machine.
    pub scope_used: Option<Bytes>,
    /// Stalls for memory.
    #[serde(flatten)]
    pub stalls: StallReading,
    /// Counters of the kernel.
    #[serde(flatten)]
    pub counters: KernelCounters,
    /// Memory of the supervisor's own process beyond what the LLM holds. No lease covers it: the reserve does, and what
    /// exceeds that is unaccounted.
    pub own_used: Option<Bytes>,
    /// How stalls are watched.
    pub stall_watch: Option<StallWatch>,
}

/// Memory of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReading {
    /// `MemTotal`.
    pub mem_total: Bytes,
    /// `MemAvailable`, and what ZFS's cache can give back.
    pub mem_available: Bytes,
    /// `MemFree`.
    pub mem_free: Bytes,
    /// What the control groups around us allow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupRoom>,
}

/// Memory that the GPU can have, or has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuReading {
    /// `CmaFree`; memory that user pages may borrow and the GPU can never have.
    pub cma_free: Option<Bytes>,
    /// Pages that the nvmap pool keeps for the next GPU allocation.
    pub nvmap_pool: Option<Bytes>,
    /// What the GPU holds, of a board whose GPU has the memory of the processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_used: Option<GpuUse>,
    /// The part of it that no process holds, at most 10 s old.
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

/// Events that the kernel has counted so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelCounters {
    /// `workingset_refault_file` so far, pages.
    pub refaults_file: Option<u64>,
    /// `pgscan_direct` so far, pages.
    pub pgscan_direct: Option<u64>,
    /// Sum of `allocstall_*` so far.
    pub allocstalls: Option<u64>,
    /// `pswpin` so far, pages.
    pub swap_ins: Option<u64>,
    /// `oom_kill` so far.
    pub oom_kills: Option<u64>,
    /// `cma_alloc_fail` so far: what cameras and displays asked of CMA in vain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cma_failures: Option<u64>,
}

impl Sample {
    /// What the machine can still give without reclaiming from a process, page cache apart: `MemAvailable − CmaFree`,
    /// and the nvmap pool where it can be read; no more than the control groups around us allow.
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

    /// What [`available`](Self::available) is a part of: `MemTotal`, or the limit of a control group around us.
    #[must_use]
    pub fn total(&self) -> Bytes {
        self.memory.group.map_or(self.memory.mem_total, |group| {
            group.limit.min(self.memory.mem_total)
        })
    }

    /// What can be had without reclaiming anything, which is all that libraries see that ask CUDA: `MemFree − CmaFree`,
    /// and the nvmap pool where it can be read.
    #[must_use]
    pub fn free_without_reclaim(&self) -> Bytes {
        self.memory
            .mem_free
            .saturating_sub(self.gpu.cma_free.unwrap_or(Bytes::ZERO))
            .saturating_add(self.gpu.nvmap_pool.unwrap_or(Bytes::ZERO))
    }
}
