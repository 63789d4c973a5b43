//! Pressure level: entered at once, left after the dwell.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::PressureLevel;
use crate::{params::PressureParams, reason::LevelReason};
use cotenant_units::{Bytes, Timestamp};

/// A change of level with the figures that led to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LevelChange {
    /// Before.
    pub from: PressureLevel,
    /// Now.
    pub to: PressureLevel,
    /// Why, with figures.
    pub reason: LevelReason,
}

/// The level, and what it falls to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Level {
    pub(super) level: PressureLevel,
    calm: Option<Calm>,
    /// When the level last rose.
    #[serde(default)]
    pub(super) rose_at: Timestamp,
}

/// Since when the headroom has been above the watermark of the level, and the worst level that it has stood for since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Calm {
    since: Timestamp,
    worst: PressureLevel,
}

impl Level {
    /// The level that a headroom stands for, `margin` above the watermarks.
    pub(super) fn of(params: &PressureParams, headroom: Bytes, margin: Bytes) -> PressureLevel {
        if headroom < params.critical_below.saturating_add(margin) {
            PressureLevel::Critical
        } else if headroom < params.elevated_below.saturating_add(margin) {
            PressureLevel::Elevated
        } else {
            PressureLevel::Normal
        }
    }

    /// The headroom has not recovered.
    pub(super) const fn stay(&mut self) {
        self.calm = None;
    }

    pub(super) fn rise(
        &mut self,
        to: PressureLevel,
        reason: LevelReason,
        at: Timestamp,
    ) -> Option<LevelChange> {
        let from = self.level;
        (to > from).then(|| {
            *self = Self {
                level: to,
                calm: None,
                rose_at: at,
            };
            LevelChange { from, to, reason }
        })
    }

    /// The headroom stands for `now`, by the watermarks and the hysteresis; after a gap it is unknown since when.
    pub(super) fn recover(&mut self, now: PressureLevel, at: Timestamp, gap: bool) {
        let calm = self.calm.filter(|_| !gap).unwrap_or(Calm {
            since: at,
            worst: now,
        });
        let worst = calm.worst.max(now);
        self.calm = (now < self.level).then_some(Calm { worst, ..calm });
    }

    /// The rest of the dwell; `None` while the headroom has not recovered.
    pub(super) fn dwell_left(&self, now: Timestamp, dwell: Duration) -> Option<Duration> {
        Some(dwell.saturating_sub(now.saturating_since(self.calm?.since)))
    }

    /// Falls to what the headroom stands for, whatever is left of the dwell.
    pub(super) fn fall(
        &mut self,
        headroom: Bytes,
        at: Timestamp,
        dwell: Duration,
    ) -> Option<LevelChange> {
        let calm = self.calm.take()?;
        let from = std::mem::replace(&mut self.level, calm.worst);
        let lasted = at.saturating_since(calm.since);
        let reason = LevelReason::Above {
            headroom,
            lasted,
            dwell,
        };
        Some(LevelChange {
            from,
            to: calm.worst,
            reason,
        })
    }
}
