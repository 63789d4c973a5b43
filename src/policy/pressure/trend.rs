//! Slope of the headroom over the last seconds.
//!
//! The estimate lies between the least and the greatest of three rates: the mean over one to two seconds, the loss up
//! to the last sample, and the loss up to the sample before. The least is taken as steady: a jump is no slope, and a
//! one-off allocation is not a trend. Granted and returned memory count as neither loss nor gain.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use cotenant_units::{Bytes, Timestamp};

/// Recent readings and losses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Trend {
    /// Reading of one to two seconds ago, and a later one that replaces it.
    earlier: [Option<(Timestamp, Bytes)>; 2],
    /// Bytes granted since the last reading, an expected loss.
    granted: Bytes,
    /// Bytes returned since the last reading, and the time of the last return.
    returned: (Timestamp, Bytes),
    /// Mean loss per second.
    losing: Bytes,
    /// Loss per second up to the last sample, and up to the one before.
    lost_lately: [Bytes; 2],
    /// Start of the present steady loss.
    losing_since: Option<Timestamp>,
}

impl Trend {
    /// Notes a grant of `bytes`, which the next reading shows as a loss. A grant is known in advance and bounded;
    /// counted as a slope, a large lease would look like a neighbour that fills the machine within a second.
    pub(crate) fn granted(&mut self, bytes: Bytes) {
        self.granted = self.granted.saturating_add(bytes);
    }

    /// Notes that the engine returned `bytes` at `now`, which the next sample shows. Allocations by others in the
    /// meantime still count as a slope.
    pub(crate) fn came_back(&mut self, bytes: Bytes, now: Timestamp) {
        self.returned = (now, self.returned.1.saturating_add(bytes));
    }

    /// Records a reading. Returns the loss since the last one.
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

    /// Returns the mean loss per second over the last seconds; zero if headroom does not shrink.
    pub(crate) const fn losing_per_s(&self) -> Bytes {
        self.losing
    }

    /// Returns the steady loss per second.
    fn steady_per_s(&self) -> Bytes {
        let [lately, before] = self.lost_lately;
        self.losing.min(lately).min(before)
    }

    /// Returns the loss within `time` at the steady rate.
    pub(crate) fn lost_within(&self, time: Duration) -> Bytes {
        let per_s = u128::from(self.steady_per_s().get());
        Bytes::new(to_u64(per_s * time.as_micros() / 1_000_000))
    }

    /// Returns the highest of the three rates, per second; `None` before readings span one second.
    pub(super) fn most_per_s(&self, at: Timestamp) -> Option<Bytes> {
        let [lately, before] = self.lost_lately;
        let (since, _) = self.earlier[0]?;
        let is_known = at.saturating_since(since) >= TREND;
        is_known.then(|| self.losing.max(lately).max(before))
    }

    /// Returns the time until `bytes` are lost; `None` without a loss.
    pub(super) fn lost_in(&self, bytes: Bytes) -> Option<Duration> {
        let per_s = u128::from(self.steady_per_s().get());
        let micros = (u128::from(bytes.get()) * 1_000_000).checked_div(per_s)?;
        Some(Duration::from_micros(to_u64(micros)))
    }

    /// Returns [`lost_in`](Self::lost_in) if the loss has lasted long enough for a forecast: at least half of that
    /// time.
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

/// Half of the longest interval of the mean slope, which spans one to two times this: shorter intervals are noise.
const TREND: Duration = Duration::from_secs(1);
