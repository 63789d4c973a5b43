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

mod level;
mod sample;
mod signals;
mod trend;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::{
    level::Level,
    signals::{Signals, Signs},
    trend::{Trend, to_u64},
};
pub use self::{
    level::LevelChange,
    sample::{
        GpuReading, GpuUse, GroupRoom, KernelCounters, MemoryReading, Sample, StallReading,
        StallWatch,
    },
};
pub use super::pressure_level::PressureLevel;
use super::{
    params::PressureParams,
    reason::{Confirmation, LevelReason},
};
#[cfg(test)]
pub(crate) use crate::samples::sample_with;
use cotenant_units::{Bytes, Timestamp};

/// The level, the slope and the kernel's signs, by the samples so far.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pressure {
    params: PressureParams,
    last: Option<Reading>,
    #[serde(flatten)]
    level: Level,
    #[serde(flatten)]
    trend: Trend,
    #[serde(flatten)]
    signals: Signals,
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

impl Pressure {
    /// Normal, before the first sample.
    #[must_use]
    pub fn new(params: PressureParams) -> Self {
        Self {
            params,
            last: None,
            level: Level::default(),
            trend: Trend::default(),
            signals: Signals::default(),
        }
    }

    /// Judges by other settings from the next sample on.
    pub const fn set_params(&mut self, params: PressureParams) {
        self.params = params;
    }

    /// Notes that `bytes` were granted, and will be missing from now on. What is known beforehand and has a bound is no
    /// slope, and leads nowhere: without this, a large lease looks like a neighbour that fills the machine in a second.
    pub fn expect(&mut self, bytes: Bytes) {
        self.trend.granted(bytes);
    }

    /// Notes that the engine gave back `bytes` at `now`, which the next sample shows: what others take meanwhile is a slope
    /// all the same.
    pub fn came_back(&mut self, bytes: Bytes, now: Timestamp) {
        self.trend.came_back(bytes, now);
    }

    /// What will be lost within `time` at the slope that goes on.
    #[must_use]
    pub fn lost_within(&self, time: Duration) -> Bytes {
        let per_s = u128::from(self.trend.steady_per_s().get());
        Bytes::new(to_u64(per_s * time.as_micros() / 1_000_000))
    }

    /// Takes a sample with the headroom that it leaves. One that is not newer than the last changes nothing.
    pub fn observe(&mut self, sample: &Sample, headroom: Bytes) -> Option<LevelChange> {
        let at = sample.taken_at;
        let last = self.last.take();
        if last.as_ref().is_some_and(|last| at <= last.at) {
            self.last = last;
            return None;
        }
        let now = Level::of(&self.params, headroom, Bytes::ZERO);
        let before = last.as_ref().map(|last| (last.at, last.headroom));
        let lost = self.trend.observe(before, (at, headroom));
        let change = match &last {
            None => None,
            Some(last) => self.judge(last, sample, (now, headroom), lost),
        };
        self.last = Some(Reading {
            at,
            headroom,
            level: now,
            sample: sample.clone(),
            promised: Bytes::ZERO,
        });
        change
    }

    fn judge(
        &mut self,
        last: &Reading,
        sample: &Sample,
        (now, headroom): (PressureLevel, Bytes),
        lost: Bytes,
    ) -> Option<LevelChange> {
        let (at, level) = (sample.taken_at, self.level.level);
        let signs = Signs::between(&last.sample, sample);
        let elevated = self.params.elevated_below;
        let signal = self.signals.observe(&signs, sample, headroom, elevated);
        match signal {
            Some((to, reason)) if to > level && to > now => self.level.rise(to, reason, at),
            _ if now > level => {
                self.level.stay();
                let took = at.saturating_since(last.at);
                let ahead = self.ahead(took, lost, headroom, now);
                let (to, by) = self.believed(last, now, ahead, &signs)?;
                let watermark = match to {
                    PressureLevel::Critical => self.params.critical_below,
                    PressureLevel::Elevated | PressureLevel::Normal => elevated,
                };
                let reason = LevelReason::Below {
                    headroom,
                    watermark,
                    by,
                };
                self.level.rise(to, reason, at)
            }
            Some((to, _)) if to >= level => {
                self.level.stay();
                None
            }
            _ => {
                let gap_max = self.params.sample_max.saturating_mul(SAMPLES_MISSED_MAX);
                let gap = at.saturating_since(last.at) > gap_max;
                let now = Level::of(&self.params, headroom, self.params.hysteresis);
                self.level.recover(now, at, gap);
                let left = self.dwell_left(at)?;
                let is_over = left == Duration::ZERO;
                is_over.then(|| self.level.fall(headroom, at, self.params.dwell))?
            }
        }
    }

    /// The level up to which one sample is believed that stands for `now`, and why.
    fn believed(
        &self,
        last: &Reading,
        now: PressureLevel,
        ahead: Option<Confirmation>,
        signs: &Signs,
    ) -> Option<(PressureLevel, Confirmation)> {
        let before = last.headroom;
        if last.level >= now {
            Some((now, Confirmation::SecondSample { before }))
        } else if let Some(by) = ahead.or_else(|| signs.confirmation()) {
            Some((now, by))
        } else if last.level > self.level.level || now == PressureLevel::Critical {
            let by = Confirmation::FirstSample { before };
            Some((PressureLevel::Elevated, by))
        } else {
            None
        }
    }

    /// Where the loss of one sample leads within two more, if that is below the watermark after the next.
    fn ahead(
        &self,
        took: Duration,
        lost: Bytes,
        headroom: Bytes,
        now: PressureLevel,
    ) -> Option<Confirmation> {
        let next = match now {
            PressureLevel::Normal | PressureLevel::Elevated => self.params.critical_below,
            PressureLevel::Critical => self.params.last_resort_below,
        };
        let two_samples = 2 * took.min(self.params.sample_max).max(self.params.sample_min);
        let (took, ahead) = (took.as_micros().max(1), two_samples.as_micros());
        let left =
            headroom.saturating_sub(Bytes::new(to_u64(u128::from(lost.get()) * ahead / took)));
        (lost > Bytes::ZERO && left < next).then(|| Confirmation::Slope {
            lost,
            took_ms: to_u64(took / 1000),
            left,
            ahead_ms: to_u64(ahead / 1000),
        })
    }

    /// The level.
    #[must_use]
    pub const fn level(&self) -> PressureLevel {
        self.level.level
    }

    /// The rest of the dwell before the level falls; `None` while the headroom has not recovered.
    #[must_use]
    pub fn dwell_left(&self, now: Timestamp) -> Option<Duration> {
        self.level.dwell_left(now, self.params.dwell)
    }

    /// Ends the dwell of a level above which the headroom has recovered, as an operator may.
    pub fn end_dwell(&mut self, now: Timestamp) -> Option<LevelChange> {
        let headroom = self.headroom()?;
        self.level.fall(headroom, now, self.params.dwell)
    }

    /// The headroom of the last sample.
    #[must_use]
    pub fn headroom(&self) -> Option<Bytes> {
        self.last.as_ref().map(|last| last.headroom)
    }

    /// Notes what the engine held and did not use yet when the last sample was taken, as for templates and forms.
    pub const fn note_promised(&mut self, bytes: Bytes) {
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
    pub const fn losing_per_s(&self) -> Bytes {
        self.trend.losing_per_s()
    }

    /// When nothing will be left at the slope that goes on; `None` where that has not lasted long enough to foretell it.
    #[must_use]
    pub fn exhausted_in(&self) -> Option<Duration> {
        let last = self.last.as_ref()?;
        self.trend.foretold_in(last.headroom, last.at)
    }

    /// Whether a shed still waits whether the shortage passes by itself.
    #[must_use]
    pub fn in_grace(&self, now: Timestamp) -> bool {
        self.grace_ends().is_some_and(|end| now < end)
    }

    /// When the grace of Elevated is over; `None` if there is none.
    #[must_use]
    pub fn grace_ends(&self) -> Option<Timestamp> {
        let end = self.level.rose_at + self.params.grace;
        (self.level() == PressureLevel::Elevated && !self.is_urgent()).then_some(end)
    }

    /// Whether the last sample stands for Critical, by its headroom or by the kernel's own signs: the level itself stays for
    /// the dwell.
    #[must_use]
    pub fn is_critical_now(&self) -> bool {
        let is_below = |headroom| {
            Level::of(&self.params, headroom, self.params.hysteresis) == PressureLevel::Critical
        };
        self.level() == PressureLevel::Critical
            && (self.signals.is_critical() || self.headroom().is_some_and(is_below))
    }

    /// Whether the level is Critical, or will be within the grace at the slope that goes on.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        let above = self
            .headroom()
            .map(|headroom| headroom.saturating_sub(self.params.critical_below));
        let critical_in = above.and_then(|above| self.trend.lost_in(above));
        self.level() == PressureLevel::Critical
            || critical_in.is_some_and(|left| left <= self.params.grace)
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
        let slope = self.trend.most_per_s(last.at);
        let calm = slope.filter(|_| last.level < PressureLevel::Critical);
        calm.map_or(shortest, |slope| {
            let calm = lost_in(slope.saturating_mul(SLOPE_MARGIN));
            shortest.max(calm.min(CALM_INTERVAL))
        })
        .clamp(self.params.sample_min, self.params.sample_max)
    }
}

/// Samples near a watermark while the headroom hardly moves. Ten of them in a second cost 2 % of a core and 4 KB/s of
/// journal, where one each 10 ms cost 18 % and 44 KB/s. lmkd polls as often; within it the fastest rate takes 600 MiB, less
/// than lies between the watermarks of a board with 16 GB.
const CALM_INTERVAL: Duration = Duration::from_millis(100);
/// How many times faster than it was lately the headroom is expected to shrink. Our choice.
const SLOPE_MARGIN: u64 = 8;
/// After this many missed samples it is unknown whether the headroom stayed above the watermark.
const SAMPLES_MISSED_MAX: u32 = 4;

#[cfg(test)]
mod tests;
