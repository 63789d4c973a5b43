//! Pressure level: raised at once, lowered after the dwell.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::PressureLevel;
use crate::{params::PressureParams, reason::LevelReason};
use cotenant_units::{Bytes, Timestamp};

/// Change of level, with its figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LevelChange {
    /// Previous level.
    pub from: PressureLevel,
    /// New level.
    pub to: PressureLevel,
    /// Cause, with figures.
    pub reason: LevelReason,
}

/// Current level, and the recovery towards a lower one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Level {
    pub(super) level: PressureLevel,
    calm: Option<Calm>,
    /// Time of the last rise.
    #[serde(default)]
    pub(super) rose_at: Timestamp,
}

/// Start of the recovery above the level's watermark, and the worst level that the headroom has indicated since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Calm {
    since: Timestamp,
    worst: PressureLevel,
}

impl Level {
    /// Returns the level that `headroom` indicates, with `margin` added to the watermarks.
    pub(super) fn of(params: &PressureParams, headroom: Bytes, margin: Bytes) -> PressureLevel {
        if headroom < params.critical_below.saturating_add(margin) {
            PressureLevel::Critical
        } else if headroom < params.elevated_below.saturating_add(margin) {
            PressureLevel::Elevated
        } else {
            PressureLevel::Normal
        }
    }

    /// Cancels the recovery.
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

    /// Records that the headroom indicates `now`, including hysteresis. After a gap in the samples the recovery starts
    /// over.
    pub(super) fn recover(&mut self, now: PressureLevel, at: Timestamp, gap: bool) {
        let calm = self.calm.filter(|_| !gap).unwrap_or(Calm {
            since: at,
            worst: now,
        });
        let worst = calm.worst.max(now);
        self.calm = (now < self.level).then_some(Calm { worst, ..calm });
    }

    /// Returns the rest of the dwell; `None` without a recovery.
    pub(super) fn dwell_left(&self, now: Timestamp, dwell: Duration) -> Option<Duration> {
        Some(dwell.saturating_sub(now.saturating_since(self.calm?.since)))
    }

    /// Lowers the level to the worst indicated during the recovery, regardless of the rest of the dwell.
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
