//! Pressure level from samples: watermarks, slope, hysteresis, dwell.
//!
//! ```text
//!   headroom ▲
//!            │  Normal
//!            ├─ elevated_below + hysteresis ── Elevated is left here, after the dwell
//!            ├─ elevated_below ─────────────── Elevated is entered here
//!            │  Elevated
//!            ├─ critical_below + hysteresis ── Critical is left here, after the dwell
//!            ├─ critical_below ─────────────── Critical is entered here
//!            │  Critical
//! ```
//!
//! A level is entered with the second sample in a row below its watermark; with the first one if the slope leads
//! below the next watermark within two samples, or if another signal confirms it. Where headroom is not plentiful, the
//! kernel's own signs raise it a step ahead of the headroom: file pages that are read again and again, Elevated below
//! twice its watermark; allocations that stall, Critical below that of Elevated. Other tenants of the machine cause such
//! signs too, so that where headroom is plentiful they say nothing.
//!
//! At Elevated nothing is shed during a grace, and after it nothing that makes the engine slower, unless Critical lies
//! ahead within the grace at the present slope; Critical acts at once. What was granted is no slope.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

pub use super::pressure_level::PressureLevel;
use super::{
    params::PressureParams,
    reason::{Confirmation, LevelReason},
};
use cotenant_units::{Bytes, Timestamp};

/// How stalls for memory come to be known: the rung of the ladder that this kernel allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StallWatch {
    /// Not at all: the kernel counts none.
    Absent,
    /// With each sample.
    Polling,
    /// The kernel wakes us, within two seconds.
    TwoSeconds,
    /// The kernel wakes us, within one second.
    OneSecond,
}

impl fmt::Display for StallWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Absent => "not watched, the kernel counts no stalls",
            Self::Polling => "polled with each sample",
            Self::TwoSeconds => "by a trigger with a window of 2 s",
            Self::OneSecond => "by a trigger with a window of 1 s",
        })
    }
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

#[cfg(test)]
pub(crate) use crate::samples::sample_with;

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

/// A change of level with the figures that led to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LevelChange {
    /// Before.
    pub from: PressureLevel,
    /// Now.
    pub to: PressureLevel,
    /// Why, with figures.
    pub reason: LevelReason,
}

/// The level, and what is needed to judge the next sample.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pressure {
    params: PressureParams,
    level: PressureLevel,
    last: Option<Reading>,
    calm: Option<Calm>,
    /// When the level last rose.
    #[serde(default)]
    rose_at: Timestamp,
    /// Since when every sample shows file pages that are read again.
    refaulting_since: Option<Timestamp>,
    /// Samples in a row that show allocations that stalled.
    #[serde(default)]
    stalls_in_a_row: u32,
    /// A reading some seconds ago, and a younger one that will take its place.
    #[serde(default)]
    earlier: [Option<(Timestamp, Bytes)>; 2],
    /// What has been granted since the last reading: its loss is no news.
    #[serde(default)]
    granted: Bytes,
    /// What was given back since the last reading, and when the last of it was.
    #[serde(default)]
    returned: (Timestamp, Bytes),
    /// Whether the last sample showed the kernel's own signs of Critical.
    #[serde(default)]
    critical_by_signs: bool,
    /// What was lost per second up to the last sample, and up to the one before.
    #[serde(default)]
    lost_lately: [Bytes; 2],
}

/// What is kept of a sample.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Reading {
    at: Timestamp,
    headroom: Bytes,
    level: PressureLevel,
    sample: Sample,
    /// What the engine held and did not use yet: it looks free here.
    #[serde(default)]
    promised: Bytes,
}

/// Since when the headroom has been above the watermark of the level, and the worst level that it has stood for since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Calm {
    since: Timestamp,
    worst: PressureLevel,
}

impl Pressure {
    /// Normal, before the first sample.
    #[must_use]
    pub const fn new(params: PressureParams) -> Self {
        Self {
            params,
            level: PressureLevel::Normal,
            last: None,
            calm: None,
            rose_at: Timestamp::START,
            refaulting_since: None,
            stalls_in_a_row: 0,
            earlier: [None, None],
            granted: Bytes::ZERO,
            returned: (Timestamp::START, Bytes::ZERO),
            critical_by_signs: false,
            lost_lately: [Bytes::ZERO; 2],
        }
    }

    /// Judges by other settings from the next sample on.
    pub const fn set_params(&mut self, params: PressureParams) {
        self.params = params;
    }

    /// Notes that `bytes` were granted, and will be missing from now on. What is known beforehand and has a bound is no
    /// slope, and leads nowhere: without this, a large lease looks like a neighbour that fills the machine in a second.
    pub fn expect(&mut self, bytes: Bytes) {
        for reading in self.earlier.iter_mut().flatten() {
            reading.1 = reading.1.saturating_sub(bytes);
        }
        self.granted = self.granted.saturating_add(bytes);
    }

    /// Notes that the engine gave back `bytes` at `now`, which the next sample shows: what others take meanwhile is a slope
    /// all the same.
    pub fn came_back(&mut self, bytes: Bytes, now: Timestamp) {
        self.returned = (now, self.returned.1.saturating_add(bytes));
    }

    /// What will be lost within `time` at the least slope of the last seconds, of the last sample and of the one before: a jump
    /// is no slope, and who has taken all that it wanted takes no more.
    #[must_use]
    pub fn lost_within(&self, time: Duration) -> Bytes {
        let lost = u128::from(self.steady_loss_per_s().get()) * time.as_micros() / 1_000_000;
        Bytes::new(to_u64(lost))
    }

    /// The least slope of the last seconds, of the last sample and of the one before.
    fn steady_loss_per_s(&self) -> Bytes {
        let [lately, before] = self.lost_lately;
        self.losing_per_s().min(lately).min(before)
    }

    /// Takes a sample with the headroom that it leaves. One that is not newer than the last changes nothing.
    pub fn observe(&mut self, sample: &Sample, headroom: Bytes) -> Option<LevelChange> {
        let at = sample.taken_at;
        if self.last.as_ref().is_some_and(|last| at <= last.at) {
            return None;
        }
        let now = self.level_of(headroom, Bytes::ZERO);
        let returned = self.count_returned(at);
        self.note_trend(at, headroom);
        self.note_lately(at, headroom, returned);
        let signal = self.signal(sample, headroom);
        self.critical_by_signs = matches!(signal, Some((PressureLevel::Critical, _)));
        let change = match signal {
            Some((to, reason)) if to > self.level && to > now => {
                let from = self.level;
                Some(LevelChange { from, to, reason })
            }
            _ if now > self.level => {
                self.calm = None;
                self.rise(sample, headroom, now)
            }
            Some((to, _)) if to >= self.level => {
                self.calm = None;
                None
            }
            _ => self.fall(at, headroom),
        };
        self.last = Some(Reading {
            at,
            headroom,
            level: now,
            sample: sample.clone(),
            promised: Bytes::ZERO,
        });
        self.granted = Bytes::ZERO;
        if let Some(change) = &change {
            if change.to > change.from {
                self.rose_at = at;
            }
            self.level = change.to;
            self.calm = None;
        }
        change
    }

    /// The level.
    #[must_use]
    pub const fn level(&self) -> PressureLevel {
        self.level
    }

    /// The rest of the dwell before the level falls; `None` while the headroom has not recovered.
    #[must_use]
    pub fn dwell_left(&self, now: Timestamp) -> Option<Duration> {
        let lasted = now.saturating_since(self.calm.as_ref()?.since);
        Some(self.params.dwell.saturating_sub(lasted))
    }

    /// The headroom of the last sample.
    #[must_use]
    pub fn headroom(&self) -> Option<Bytes> {
        self.last.as_ref().map(|last| last.headroom)
    }

    /// Notes what the engine held and did not use yet when the last sample was taken, as for templates and forms.
    pub fn note_promised(&mut self, bytes: Bytes) {
        if let Some(last) = &mut self.last {
            last.promised = bytes;
        }
    }

    /// What the engine held and did not use yet when the last sample was taken: it looks free there.
    #[must_use]
    pub fn promised(&self) -> Bytes {
        self.last.as_ref().map_or(Bytes::ZERO, |last| last.promised)
    }

    /// When the last sample was taken.
    #[must_use]
    pub fn sampled_at(&self) -> Option<Timestamp> {
        self.last.as_ref().map(|last| last.at)
    }

    /// What headroom has been losing per second over the last seconds; zero if it does not shrink.
    #[must_use]
    pub fn losing_per_s(&self) -> Bytes {
        let (Some((since, before)), Some(last)) = (self.earlier[0], &self.last) else {
            return Bytes::ZERO;
        };
        per_second(
            before.saturating_sub(last.headroom),
            last.at.saturating_since(since),
        )
    }

    /// When nothing will be left at the rate of the last seconds; `None` if headroom does not shrink now, or for hours. What was
    /// taken at once, as by a load, foretells nothing.
    #[must_use]
    pub fn exhausted_in(&self) -> Option<Duration> {
        let is_falling = self.steady_loss_per_s().saturating_mul(2) >= self.losing_per_s();
        self.reached_in(Bytes::ZERO)
            .filter(|left| is_falling && *left < EXHAUSTION_AHEAD)
    }

    /// Whether a shed still waits whether the shortage passes by itself.
    #[must_use]
    pub fn in_grace(&self, now: Timestamp) -> bool {
        self.grace_ends().is_some_and(|end| now < end)
    }

    /// When the grace of Elevated is over; `None` if there is none.
    #[must_use]
    pub fn grace_ends(&self) -> Option<Timestamp> {
        let end = self.rose_at + self.params.grace;
        (self.level == PressureLevel::Elevated && !self.is_urgent()).then_some(end)
    }

    /// Whether the last sample stands for Critical, by its headroom or by the kernel's own signs: the level itself stays for
    /// the dwell.
    #[must_use]
    pub fn is_critical_now(&self) -> bool {
        let below = self
            .headroom()
            .map(|headroom| self.level_of(headroom, self.params.hysteresis));
        self.level == PressureLevel::Critical
            && (self.critical_by_signs || below == Some(PressureLevel::Critical))
    }

    /// Whether the level is Critical, or will be within the grace at the present slope.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        let critical_ahead = self
            .reached_in(self.params.critical_below)
            .is_some_and(|left| left <= self.params.grace);
        self.level == PressureLevel::Critical || critical_ahead
    }

    fn reached_in(&self, watermark: Bytes) -> Option<Duration> {
        let headroom = self.last.as_ref()?.headroom;
        let losing = u128::from(self.losing_per_s().get());
        let above = u128::from(headroom.saturating_sub(watermark).get());
        let micros = (above * 1_000_000).checked_div(losing)?;
        Some(Duration::from_micros(to_u64(micros)))
    }

    /// Raises the readings before, now that a sample shows what was given back; returns how much that was.
    fn count_returned(&mut self, at: Timestamp) -> Bytes {
        let (since, bytes) = self.returned;
        if bytes == Bytes::ZERO || at < since {
            return Bytes::ZERO;
        }
        for reading in self.earlier.iter_mut().flatten() {
            reading.1 = reading.1.saturating_add(bytes);
        }
        self.returned = (since, Bytes::ZERO);
        bytes
    }

    fn note_lately(&mut self, at: Timestamp, headroom: Bytes, returned: Bytes) {
        let Some(last) = &self.last else { return };
        let before = last
            .headroom
            .saturating_add(returned)
            .saturating_sub(self.granted);
        let lately = per_second(
            before.saturating_sub(headroom),
            at.saturating_since(last.at),
        );
        self.lost_lately = [lately, self.lost_lately[0]];
    }

    fn note_trend(&mut self, at: Timestamp, headroom: Bytes) {
        let old = |reading: Option<(Timestamp, Bytes)>| {
            reading.is_none_or(|(since, _)| at.saturating_since(since) >= TREND)
        };
        if self.earlier[0].is_none() {
            self.earlier = [Some((at, headroom)); 2];
        } else if old(self.earlier[1]) {
            self.earlier = [self.earlier[1], Some((at, headroom))];
        }
    }

    /// What the kernel's own signs say where headroom is not plentiful.
    fn signal(&mut self, sample: &Sample, headroom: Bytes) -> Option<(PressureLevel, LevelReason)> {
        let last = self.last.as_ref()?;
        let at = sample.taken_at;
        let micros = at.saturating_since(last.at).as_micros().max(1);
        let grown =
            |before: Option<u64>, now: Option<u64>| u128::from(grown(before, now).unwrap_or(0));
        let refaults = grown(
            last.sample.counters.refaults_file,
            sample.counters.refaults_file,
        ) * 1_000_000
            / micros;
        self.refaulting_since = if refaults >= REFAULTS_PER_S {
            self.refaulting_since.or(Some(last.at))
        } else {
            None
        };
        let stalls = grown(
            last.sample.counters.allocstalls,
            sample.counters.allocstalls,
        );
        let scans = grown(
            last.sample.counters.pgscan_direct,
            sample.counters.pgscan_direct,
        );
        self.stalls_in_a_row = if stalls > 0 || scans > 0 {
            self.stalls_in_a_row.saturating_add(1)
        } else {
            0
        };
        let full = grown(
            last.sample.stalls.psi_full_total_us,
            sample.stalls.psi_full_total_us,
        );
        let all_stalled = full * 1000 / micros >= PSI_FULL_PER_MILLE && micros >= PSI_LEAST_US;
        // The kernel counts for the whole machine. What stalls others says nothing of a session while the machine has plenty.
        let plenty = Bytes::new(sample.memory.mem_total.get() / SESSION_PLENTY);
        if sample.scope_used.is_some() && sample.available() >= plenty {
            return None;
        }
        let elevated = self.params.elevated_below;
        if headroom < elevated && (self.stalls_in_a_row >= STALLS_IN_A_ROW || all_stalled) {
            let watermark = elevated;
            let reason = if all_stalled {
                LevelReason::AllStalled {
                    headroom,
                    watermark,
                    stalled_us: to_u64(full),
                    of_us: to_u64(micros),
                }
            } else {
                LevelReason::StallsAgain {
                    headroom,
                    watermark,
                    stalls: to_u64(stalls),
                    scans: to_u64(scans),
                }
            };
            return Some((PressureLevel::Critical, reason));
        }
        let refused = grown(
            last.sample.counters.cma_failures,
            sample.counters.cma_failures,
        );
        if refused > 0 && headroom < elevated.saturating_mul(2) {
            let refused = to_u64(refused);
            return Some((
                PressureLevel::Elevated,
                LevelReason::CmaRefused { headroom, refused },
            ));
        }
        let since = self.refaulting_since?;
        let (lasted, per_s) = (at.saturating_since(since), to_u64(refaults));
        let reason = LevelReason::Refaults {
            headroom,
            per_s,
            lasted,
        };
        let counts = lasted >= REFAULTS_FOR && headroom < elevated.saturating_mul(2);
        counts.then_some((PressureLevel::Elevated, reason))
    }

    /// How long the last sample may be trusted: the time in which the headroom above the next watermark can disappear
    /// at the fastest rate.
    ///
    /// While the headroom is near a watermark and hardly moves, that is up to 100 ms: the rate then follows the
    /// slope, with a margin, instead of the fastest rate. At Critical it never does.
    #[must_use]
    pub fn interval(&self) -> Duration {
        let Some(last) = &self.last else {
            return self.params.sample_min;
        };
        let next = match last.level {
            PressureLevel::Normal => self.params.elevated_below,
            PressureLevel::Elevated => self.params.critical_below,
            PressureLevel::Critical => self.params.last_resort_below,
        };
        let above = last.headroom.saturating_sub(next).get();
        let lost_in = |per_s: Bytes| Duration::from_millis(above / (per_s.get() / 1000).max(1));
        let shortest = lost_in(Bytes::from_mib(u64::from(self.params.fill_rate_mib_per_s)));
        let [lately, before] = self.lost_lately;
        let slope = self.losing_per_s().max(lately).max(before);
        let calm = lost_in(slope.saturating_mul(SLOPE_MARGIN)).min(CALM_INTERVAL);
        let has_trend =
            self.earlier[0].is_some_and(|(since, _)| last.at.saturating_since(since) >= TREND);
        let interval = if has_trend && last.level < PressureLevel::Critical {
            shortest.max(calm)
        } else {
            shortest
        };
        interval.clamp(self.params.sample_min, self.params.sample_max)
    }

    fn level_of(&self, headroom: Bytes, margin: Bytes) -> PressureLevel {
        if headroom < self.params.critical_below.saturating_add(margin) {
            PressureLevel::Critical
        } else if headroom < self.params.elevated_below.saturating_add(margin) {
            PressureLevel::Elevated
        } else {
            PressureLevel::Normal
        }
    }

    fn rise(&self, sample: &Sample, headroom: Bytes, now: PressureLevel) -> Option<LevelChange> {
        let last = self.last.as_ref()?;
        let before = last.headroom;
        let (to, by) = if last.level >= now {
            (now, Confirmation::SecondSample { before })
        } else if let Some(ahead) = self.ahead(last, sample.taken_at, headroom, now) {
            (now, ahead)
        } else if let Some(signal) = confirmation(&last.sample, sample) {
            (now, signal)
        } else if last.level > self.level || now == PressureLevel::Critical {
            (
                PressureLevel::Elevated,
                Confirmation::FirstSample { before },
            )
        } else {
            return None;
        };
        let watermark = match to {
            PressureLevel::Critical => self.params.critical_below,
            PressureLevel::Elevated | PressureLevel::Normal => self.params.elevated_below,
        };
        (to > self.level).then_some(LevelChange {
            from: self.level,
            to,
            reason: LevelReason::Below {
                headroom,
                watermark,
                by,
            },
        })
    }

    /// Where the present slope leads within two samples, if that is below the watermark after the next.
    fn ahead(
        &self,
        last: &Reading,
        at: Timestamp,
        headroom: Bytes,
        now: PressureLevel,
    ) -> Option<Confirmation> {
        let next = match now {
            PressureLevel::Normal | PressureLevel::Elevated => self.params.critical_below,
            PressureLevel::Critical => self.params.last_resort_below,
        };
        let before = last.headroom.saturating_sub(self.granted);
        let lost = u128::from(before.checked_sub(headroom)?.get());
        let took = at.saturating_since(last.at).as_micros().max(1);
        let two_samples = 2 * self
            .params
            .sample_min
            .as_micros()
            .max(took.min(self.params.sample_max.as_micros()));
        let left = headroom.saturating_sub(Bytes::new(to_u64(lost * two_samples / took)));
        (lost > 0 && left < next).then(|| Confirmation::Slope {
            lost: Bytes::new(to_u64(lost)),
            took_ms: to_u64(took / 1000),
            left,
            ahead_ms: to_u64(two_samples / 1000),
        })
    }

    fn fall(&mut self, at: Timestamp, headroom: Bytes) -> Option<LevelChange> {
        let now = self.level_of(headroom, self.params.hysteresis);
        if now >= self.level {
            self.calm = None;
            return None;
        }
        let gap_max = self.params.sample_max.saturating_mul(SAMPLES_MISSED_MAX);
        let gap = self
            .last
            .as_ref()
            .is_some_and(|last| at.saturating_since(last.at) > gap_max);
        let calm = match self.calm {
            Some(calm) if !gap => Calm {
                since: calm.since,
                worst: calm.worst.max(now),
            },
            _ => Calm {
                since: at,
                worst: now,
            },
        };
        self.calm = Some(calm);
        let (lasted, dwell) = (at.saturating_since(calm.since), self.params.dwell);
        (lasted >= dwell).then_some(LevelChange {
            from: self.level,
            to: calm.worst,
            reason: LevelReason::Above {
                headroom,
                lasted,
                dwell,
            },
        })
    }
}

fn per_second(bytes: Bytes, took: Duration) -> Bytes {
    let per_s = (u128::from(bytes.get()) * 1_000_000)
        .checked_div(took.as_micros())
        .unwrap_or(0);
    Bytes::new(to_u64(per_s))
}

/// A signal other than the headroom that confirms it.
fn confirmation(before: &Sample, now: &Sample) -> Option<Confirmation> {
    let micros = now
        .taken_at
        .saturating_since(before.taken_at)
        .as_micros()
        .max(1);
    let (of_us, took_ms) = (to_u64(micros), to_u64(micros / 1000));
    let per_s = |count: u64| u128::from(count) * 1_000_000 / micros;
    let stalled = grown(
        before.stalls.psi_some_total_us,
        now.stalls.psi_some_total_us,
    )
    .filter(|stalled| u128::from(*stalled) * 1000 / micros >= PSI_SOME_PER_MILLE)
    .map(|stalled_us| Confirmation::Stalled { stalled_us, of_us });
    let stalls =
        grown(before.counters.allocstalls, now.counters.allocstalls).filter(|count| *count > 0);
    let scans =
        grown(before.counters.pgscan_direct, now.counters.pgscan_direct).filter(|pages| *pages > 0);
    let swap_ins = grown(before.counters.swap_ins, now.counters.swap_ins)
        .filter(|pages| per_s(*pages) >= SWAP_INS_PER_S);
    let refaults = grown(before.counters.refaults_file, now.counters.refaults_file)
        .filter(|pages| per_s(*pages) >= REFAULTS_PER_S);
    stalled
        .or(stalls.map(|count| Confirmation::Stalls { count }))
        .or(scans.map(|pages| Confirmation::Scans { pages }))
        .or(swap_ins.map(|pages| Confirmation::SwapIns { pages, took_ms }))
        .or(refaults.map(|pages| Confirmation::Refaults { pages, took_ms }))
}

fn to_u64(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

/// By how much a counter has grown; `None` if it is not there, or has gone back.
fn grown(before: Option<u64>, now: Option<u64>) -> Option<u64> {
    now?.checked_sub(before?)
}

/// The part of the machine's memory, as a divisor, that is plenty for a session on it: an eighth, which is what the upper
/// watermark leaves of a whole machine.
const SESSION_PLENTY: u64 = 8;

/// lmkd takes 700 ms of full stall within 1 s for critical.
const PSI_FULL_PER_MILLE: u128 = 700;
/// Over less than this a single stall looks like many.
const PSI_LEAST_US: u128 = 100_000;
/// Two samples in a row with stalls are Critical on a board whose GPU allocations reclaim by themselves.
const STALLS_IN_A_ROW: u32 = 2;
/// How long file pages have to be read again until that counts.
const REFAULTS_FOR: Duration = Duration::from_secs(3);
/// A board in thrash swapped in 0.2 to 6 MB/s: 50 pages/s is where that begins.
const SWAP_INS_PER_S: u128 = 50;
/// The slope of headroom is taken over one to two times this: shorter ones are noise.
const TREND: Duration = Duration::from_secs(1);
/// Samples near a watermark while the headroom hardly moves. Ten of them in a second cost 2 % of a core and 4 KB/s of
/// journal, where one each 10 ms cost 18 % and 44 KB/s. lmkd polls as often; within it the fastest rate takes 600 MiB, less
/// than lies between the watermarks of a board with 16 GB.
const CALM_INTERVAL: Duration = Duration::from_millis(100);
/// How many times faster than it was lately the headroom is expected to shrink. Our choice.
const SLOPE_MARGIN: u64 = 8;
/// What lies further ahead is no forecast.
const EXHAUSTION_AHEAD: Duration = Duration::from_secs(3600);
/// lmkd takes some 70 ms of stall within 1 s for a sign of pressure.
const PSI_SOME_PER_MILLE: u128 = 70;
/// 5000 pages/s (20 MB/s) of the page cache read again: the working set does not fit.
const REFAULTS_PER_S: u128 = 5000;
/// After this many missed samples it is unknown whether the headroom stayed above the watermark.
const SAMPLES_MISSED_MAX: u32 = 4;

#[cfg(test)]
mod tests;
