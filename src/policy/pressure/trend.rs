//! Slope of the headroom over the last seconds.
//!
//! One estimate, between the least and the most of three: the mean of one to two seconds, the loss up to the last sample,
//! and the one up to the sample before. What goes on is at least the least: a jump is no slope, and a one-off allocation is
//! not a trend. What was granted or given back is no loss and no gain.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use cotenant_units::{Bytes, Timestamp};

/// Readings and losses of late.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Trend {
    /// A reading some seconds ago, and a younger one that will take its place.
    earlier: [Option<(Timestamp, Bytes)>; 2],
    /// What has been granted since the last reading: its loss is no news.
    granted: Bytes,
    /// What was given back since the last reading, and when the last of it was.
    returned: (Timestamp, Bytes),
    /// The mean loss per second.
    losing: Bytes,
    /// What was lost per second up to the last sample, and up to the one before.
    lost_lately: [Bytes; 2],
    /// Since when there is a loss that goes on.
    losing_since: Option<Timestamp>,
}

impl Trend {
    /// Notes that `bytes` were granted, and will be missing from now on. What is known beforehand and has a bound is no
    /// slope, and leads nowhere: without this, a large lease looks like a neighbour that fills the machine in a second.
    pub(crate) fn granted(&mut self, bytes: Bytes) {
        self.granted = self.granted.saturating_add(bytes);
    }

    /// Notes that the engine gave back `bytes` at `now`, which the next sample shows: what others take meanwhile is a slope
    /// all the same.
    pub(crate) fn came_back(&mut self, bytes: Bytes, now: Timestamp) {
        self.returned = (now, self.returned.1.saturating_add(bytes));
    }

    /// Takes a reading after the last one. Returns what was lost in between.
    pub(super) fn observe(
        &mut self,
        last: Option<(Timestamp, Bytes)>,
        (at, headroom): (Timestamp, Bytes),
    ) -> Bytes {
        let granted = std::mem::take(&mut self.granted);
        let mut returned = Bytes::ZERO;
        if self.returned.0 <= at {
            returned = std::mem::take(&mut self.returned.1);
        }
        let expected = |before: Bytes| before.saturating_sub(granted).saturating_add(returned);
        for (_, before) in self.earlier.iter_mut().flatten() {
            *before = expected(*before);
        }
        let newest = Some((at, headroom));
        self.earlier = match self.earlier {
            [None, _] => [newest; 2],
            [_, Some((since, _))] if at.saturating_since(since) < TREND => self.earlier,
            [_, younger] => [younger, newest],
        };
        let lost = last.map_or(Bytes::ZERO, |(_, before)| {
            expected(before).saturating_sub(headroom)
        });
        let since = last.map_or(at, |(since, _)| since);
        let lately = per_second(lost, at.saturating_since(since));
        self.lost_lately = [lately, self.lost_lately[0]];
        self.losing = self.earlier[0].map_or(Bytes::ZERO, |(since, before)| {
            per_second(before.saturating_sub(headroom), at.saturating_since(since))
        });
        self.losing_since = self
            .losing_since
            .or(Some(since))
            .filter(|_| self.steady_per_s() > Bytes::ZERO);
        lost
    }

    /// The mean loss per second over the last seconds; zero if headroom does not shrink.
    pub(crate) const fn losing_per_s(&self) -> Bytes {
        self.losing
    }

    /// The loss per second that goes on.
    fn steady_per_s(&self) -> Bytes {
        let [lately, before] = self.lost_lately;
        self.losing.min(lately).min(before)
    }

    /// What will be lost within `time`, if the loss goes on.
    pub(crate) fn lost_within(&self, time: Duration) -> Bytes {
        let per_s = u128::from(self.steady_per_s().get());
        Bytes::new(to_u64(per_s * time.as_micros() / 1_000_000))
    }

    /// The most that may go on per second; `None` until there are readings of a second.
    pub(super) fn most_per_s(&self, at: Timestamp) -> Option<Bytes> {
        let [lately, before] = self.lost_lately;
        let (since, _) = self.earlier[0]?;
        let is_known = at.saturating_since(since) >= TREND;
        is_known.then(|| self.losing.max(lately).max(before))
    }

    /// The time in which `bytes` are lost; `None` if nothing is.
    pub(super) fn lost_in(&self, bytes: Bytes) -> Option<Duration> {
        let per_s = u128::from(self.steady_per_s().get());
        let micros = (u128::from(bytes.get()) * 1_000_000).checked_div(per_s)?;
        Some(Duration::from_micros(to_u64(micros)))
    }

    /// The same where it is near enough to be foretold: a loss that has lasted for a while goes on for twice as long.
    pub(super) fn foretold_in(&self, bytes: Bytes, at: Timestamp) -> Option<Duration> {
        let lasted = at.saturating_since(self.losing_since?);
        self.lost_in(bytes).filter(|left| *left <= lasted * 2)
    }
}

fn per_second(bytes: Bytes, took: Duration) -> Bytes {
    let per_s = (u128::from(bytes.get()) * 1_000_000)
        .checked_div(took.as_micros())
        .unwrap_or(0);
    Bytes::new(to_u64(per_s))
}

pub(super) fn to_u64(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

/// The slope of headroom is taken over one to two times this: shorter ones are noise.
const TREND: Duration = Duration::from_secs(1);
