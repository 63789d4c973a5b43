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
//! A level is entered with the second consecutive sample below its watermark; with the first one if the slope leads
//! below the next watermark within two samples, or if another signal confirms it. If headroom is not plentiful, signals
//! of the kernel raise it one step earlier: repeated refaults of file pages, to Elevated below twice its watermark;
//! stalled allocations, to Critical below that of Elevated. Other tenants of the machine cause such signals too, so
//! that with plentiful headroom they are ignored.
//!
//! At Elevated nothing is shed during a grace, and afterwards nothing that slows the engine, unless Critical is
//! predicted within the grace at the present slope; Critical acts at once. Granted memory does not count as slope.

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

/// Level, slope and kernel signals of the samples so far.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Pressure {
    params: PressureParams,
    last: Option<Reading>,
    #[serde(flatten)]
    level: Level,
    #[serde(flatten)]
    pub(super) trend: Trend,
    #[serde(flatten)]
    signals: Signals,
}

/// The stored part of a sample.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Reading {
    at: Timestamp,
    headroom: Bytes,
    level: PressureLevel,
    sample: Sample,
    /// Bytes held by the engine but not used yet, which look free in this sample.
    #[serde(default)]
    promised: Bytes,
}

impl Pressure {
    /// Creates the state before the first sample, at Normal.
    pub(super) fn new(params: PressureParams) -> Self {
        Self {
            params,
            last: None,
            level: Level::default(),
            trend: Trend::default(),
            signals: Signals::default(),
        }
    }

    /// Sets the parameters from the next sample on.
    pub(super) const fn set_params(&mut self, params: PressureParams) {
        self.params = params;
    }

    /// Records a sample with its headroom. One that is not newer than the last is ignored.
    pub(super) fn observe(&mut self, sample: &Sample, headroom: Bytes) -> Option<LevelChange> {
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
        let signs = Signs::between(&last.sample, sample, lost);
        let elevated = self.params.elevated_below;
        let signal = self.signals.observe(&signs, sample, headroom, elevated);
        match signal {
            Some((to, reason)) if to > level && to > now => self.level.rise(to, reason, at),
            _ if now > level => {
                self.level.stay();
                let before = last.headroom;
                let (to, by) = if last.level >= now {
                    (now, Confirmation::SecondSample { before })
                } else if let Some(by) = self.ahead(&signs, headroom, now) {
                    (now, by)
                } else if last.level > level || now == PressureLevel::Critical {
                    let by = Confirmation::FirstSample { before };
                    (PressureLevel::Elevated, by)
                } else {
                    return None;
                };
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
                let is_over = self.dwell_left(at)? == Duration::ZERO;
                is_over.then(|| self.level.fall(headroom, at, self.params.dwell))?
            }
        }
    }

    /// Returns the predicted headroom after two more samples at the present loss, if it is below the next watermark; or
    /// another confirmation.
    fn ahead(&self, signs: &Signs, headroom: Bytes, now: PressureLevel) -> Option<Confirmation> {
        let next = match now {
            PressureLevel::Normal | PressureLevel::Elevated => self.params.critical_below,
            PressureLevel::Critical => self.params.last_resort_below,
        };
        let (least, most) = (self.params.sample_min, self.params.sample_max);
        let ahead = 2 * Duration::from_micros(signs.took_us).min(most).max(least);
        let ahead_us = to_u64(ahead.as_micros());
        let left = headroom.saturating_sub(Bytes::new(signs.per(ahead_us, signs.lost.get())));
        let is_steep = signs.lost > Bytes::ZERO && left < next;
        let slope = is_steep.then_some(Confirmation::Slope {
            lost: signs.lost,
            took_ms: signs.took_us / 1000,
            left,
            ahead_ms: ahead_us / 1000,
        });
        slope.or_else(|| signs.confirmation())
    }

    /// Returns the level.
    pub(super) const fn level(&self) -> PressureLevel {
        self.level.level
    }

    /// Returns the remaining dwell before the level falls; `None` while the headroom has not recovered.
    pub(super) fn dwell_left(&self, now: Timestamp) -> Option<Duration> {
        self.level.dwell_left(now, self.params.dwell)
    }

    /// Ends the dwell of a level whose headroom has recovered, on an operator's command.
    pub(super) fn end_dwell(&mut self, now: Timestamp) -> Option<LevelChange> {
        let headroom = self.headroom()?;
        self.level.fall(headroom, now, self.params.dwell)
    }

    /// Returns the headroom of the last sample.
    pub(super) fn headroom(&self) -> Option<Bytes> {
        self.last.as_ref().map(|last| last.headroom)
    }

    /// Returns the last sample.
    pub(super) fn sample(&self) -> Option<&Sample> {
        self.last.as_ref().map(|last| &last.sample)
    }

    /// Records the engine's bytes held but not used at the last sample, such as those for templates and forms.
    pub(super) const fn note_promised(&mut self, bytes: Bytes) {
        if let Some(last) = &mut self.last {
            last.promised = bytes;
        }
    }

    /// Returns the engine's bytes held but not used at the last sample, which look free in it.
    pub(super) fn promised(&self) -> Bytes {
        self.last.as_ref().map_or(Bytes::ZERO, |last| last.promised)
    }

    /// Returns the time of the last sample.
    pub(super) fn sampled_at(&self) -> Option<Timestamp> {
        self.last.as_ref().map(|last| last.at)
    }

    /// Returns the time until exhaustion at the sustained slope; `None` if it has not lasted long enough for a
    /// prediction.
    pub(super) fn exhausted_in(&self) -> Option<Duration> {
        let last = self.last.as_ref()?;
        self.trend.foretold_in(last.headroom, last.at)
    }

    /// Whether a shed still waits for the shortage to pass by itself.
    pub(super) fn in_grace(&self, now: Timestamp) -> bool {
        self.grace_ends().is_some_and(|end| now < end)
    }

    /// Returns the end of the grace of Elevated; `None` if there is none.
    pub(super) fn grace_ends(&self) -> Option<Timestamp> {
        let end = self.level.rose_at + self.params.grace;
        (self.level() == PressureLevel::Elevated && !self.is_urgent()).then_some(end)
    }

    /// Whether the last sample is Critical, by its headroom or by kernel signals: the level itself lasts for the dwell.
    pub(super) fn is_critical_now(&self) -> bool {
        let is_below = |headroom| {
            Level::of(&self.params, headroom, self.params.hysteresis) == PressureLevel::Critical
        };
        self.level() == PressureLevel::Critical
            && (self.signals.is_critical() || self.headroom().is_some_and(is_below))
    }

    /// Whether the level is Critical, or is predicted to be within the grace at the sustained slope.
    pub(super) fn is_urgent(&self) -> bool {
        let above = self
            .headroom()
            .map(|headroom| headroom.saturating_sub(self.params.critical_below));
        let critical_in = above.and_then(|above| self.trend.lost_in(above));
        self.level() == PressureLevel::Critical
            || critical_in.is_some_and(|left| left <= self.params.grace)
    }

    /// Returns the validity of the last sample: the time in which the headroom above the next watermark can disappear
    /// at the fastest rate.
    ///
    /// If the headroom is near a watermark and nearly constant, up to 100 ms: the rate is then the slope with a margin
    /// instead of the fastest rate. Never at Critical.
    pub(super) fn interval(&self) -> Duration {
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

/// Sampling interval near a watermark while the headroom is nearly constant. Ten samples per second cost 2 % of a core
/// and 4 KB/s of journal, one each 10 ms 18 % and 44 KB/s. lmkd polls as often; within the interval the fastest rate
/// takes 600 MiB, less than the distance of the watermarks on a board with 16 GB.
const CALM_INTERVAL: Duration = Duration::from_millis(100);
/// Expected maximum ratio of future to recent loss. Our choice.
const SLOPE_MARGIN: u64 = 8;
/// Missed samples after which it is unknown whether the headroom stayed above the watermark.
const SAMPLES_MISSED_MAX: u32 = 4;

#[cfg(test)]
mod tests;
