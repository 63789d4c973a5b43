//! Dwell after a shed, and back-off of growth that is undone early.
//!
//! ```text
//!   may grow ── shed ──► dwelling ── dwell over, or ended by an operator ──► may grow
//!                            ▲
//!                            └── shed within the dwell after a growth: twice as long, at most eight times
//! ```

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::decision::GrowthDecision;
use cotenant_units::Timestamp;

/// Waiting time before growth after a shed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Dwell {
    /// The longest dwell before a back-off.
    span: Duration,
    /// The shortest dwell; equals `span` if `budget.dwell` is set.
    #[serde(default)]
    least: Duration,
    /// Time of the last shed; nothing grows within the dwell after it.
    shed_at: Option<Timestamp>,
    /// Start of the last growth, until it is shed again.
    grown_at: Option<Timestamp>,
    /// Consecutive growths that were shed again early.
    regrets: u32,
    /// Duration of the engine's load, or of all its growths since the last shed.
    #[serde(default)]
    took: Option<Duration>,
    /// Whether the next growth adds to `took`; false after a shed.
    #[serde(default)]
    continues: bool,
}

impl Dwell {
    /// Creates the state before the first shed.
    pub(super) fn new(span: Duration, by_growth: bool) -> Self {
        let mut dwell = Self::default();
        dwell.set_span(span, by_growth);
        dwell
    }

    /// Sets the dwell.
    pub(super) const fn set_span(&mut self, span: Duration, by_growth: bool) {
        self.span = span;
        self.least = if by_growth { LEAST } else { span };
    }

    /// Returns the dwell without a back-off.
    pub(super) fn base(&self) -> Duration {
        self.for_engine(self.span)
    }

    /// Returns the remaining dwell; `None` if growth is permitted.
    pub(super) fn left(&self, now: Timestamp) -> Option<Duration> {
        self.left_of(self.for_engine(self.backed_off(self.span)), now)
    }

    /// Returns the remaining dwell of workers, whose starts cost their users more than their duration; `None` if one
    /// may return.
    pub(super) fn left_for_workers(&self, now: Timestamp) -> Option<Duration> {
        self.left_of(self.backed_off(self.base()), now)
    }

    fn left_of(&self, span: Duration, now: Timestamp) -> Option<Duration> {
        let ends = self.shed_at? + span;
        (ends > now).then(|| ends.saturating_since(now))
    }

    /// Returns the next time at which more growth is permitted.
    pub(super) fn ends(&self, now: Timestamp) -> Option<Timestamp> {
        let left = self.left(now).or_else(|| self.left_for_workers(now));
        left.map(|left| now + left)
    }

    /// Starts the dwell: a shed was requested, or freed memory.
    pub(super) const fn begin(&mut self, now: Timestamp) {
        self.shed_at = Some(now);
        self.continues = false;
    }

    /// Whether it started at `at`, without a later shed.
    pub(super) fn began_at(&self, at: Timestamp) -> bool {
        self.shed_at == Some(at)
    }

    /// Ends the dwell: the memory shed last is needed again.
    pub(super) const fn end(&mut self) {
        self.shed_at = None;
    }

    /// Ends the dwell and the back-off, on an operator's command.
    pub(super) const fn forget(&mut self) {
        self.shed_at = None;
        self.regrets = 0;
    }

    /// Records the start of a growth.
    pub(super) const fn grown(&mut self, now: Timestamp) {
        self.grown_at = Some(now);
    }

    /// Adds the duration of the engine's load or of one growth.
    pub(super) fn took(&mut self, took: Duration) {
        let before = self.took.filter(|_| self.continues).unwrap_or_default();
        self.took = Some(before.saturating_add(took));
        self.continues = true;
    }

    /// Records a shed of regrown memory: if that has not stayed for the dwell, the next growth waits longer.
    pub(super) fn undo(&mut self, now: Timestamp) -> Option<GrowthDecision> {
        let stayed = now.saturating_since(self.grown_at.take()?);
        if stayed >= self.base() {
            self.regrets = self.regrets.saturating_sub(1);
            return None;
        }
        self.regrets = (self.regrets + 1).min(REGRETS_MAX);
        let dwell = self.for_engine(self.backed_off(self.span));
        Some(GrowthDecision::BackedOff { stayed, dwell })
    }

    const fn backed_off(&self, dwell: Duration) -> Duration {
        dwell.saturating_mul(1 << self.regrets)
    }

    /// Limits a dwell to ten times the duration of a needless growth of the engine.
    fn for_engine(&self, dwell: Duration) -> Duration {
        let worth = self.took.map(|took| took.saturating_mul(WORTH));
        worth.map_or(dwell, |worth| dwell.min(worth.max(self.least)))
    }
}

/// Inverse of the maximum share of time spent on needless growth, a tenth. Our choice: a waiting engine reads as much
/// for each token.
const WORTH: u32 = 10;

/// The shortest dwell if `budget.dwell` is not set. Our choice: a listener perceives 1 s as a pause.
const LEAST: Duration = Duration::from_secs(1);

/// Maximum number of doublings: eight times 60 s. Our choice: a process that comes and goes for hours costs one
/// needless growth in eight minutes, and the end of one is noticed within them.
const REGRETS_MAX: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp::from_millis(seconds * 1000)
    }

    #[test]
    fn a_growth_that_takes_little_is_not_backed_off_for() {
        let mut dwell = Dwell::new(Duration::from_secs(3), false);
        for (took_ms, seconds) in [(10, 3), (440, 4), (2_000, 20), (20_000, 24)] {
            for _ in 0..4 {
                dwell.begin(at(9));
                dwell.grown(at(10));
                dwell.took(Duration::from_millis(took_ms));
                dwell.undo(at(11));
            }
            dwell.begin(at(11));
            let left = dwell.left(at(11)).unwrap();
            assert_eq!(left.as_secs(), seconds, "{took_ms} ms");
        }
        // What a growth of the engine takes says nothing of a worker.
        dwell.begin(at(11));
        dwell.took(Duration::from_millis(10));
        dwell.undo(at(11));
        assert_eq!(dwell.left(at(11)).unwrap().as_secs(), 3);
        assert_eq!(dwell.left_for_workers(at(11)).unwrap().as_secs(), 24);
        assert_eq!(dwell.ends(at(11)), Some(at(14)));
        assert_eq!(dwell.ends(at(15)), Some(at(35)));
    }

    #[test]
    fn a_dwell_that_is_left_open_is_ten_times_what_grew_back_took() {
        let mut dwell = Dwell::new(Duration::from_secs(60), true);
        assert_eq!(dwell.base().as_secs(), 60, "nothing was loaded");
        dwell.took(Duration::from_millis(50));
        assert_eq!(dwell.base().as_secs(), 1, "the load");
        dwell.begin(at(1));
        assert_eq!(dwell.base().as_secs(), 1);
        // Layer by layer.
        for _ in 0..4 {
            dwell.took(Duration::from_millis(100));
        }
        assert_eq!(dwell.base().as_secs(), 4);
        dwell.begin(at(9));
        dwell.took(Duration::from_secs(7));
        assert_eq!(dwell.base().as_secs(), 60, "a slow disk");
    }

    #[test]
    fn the_dwell_doubles_with_each_growth_that_does_not_stay_and_halves_with_one_that_does() {
        let mut dwell = Dwell::new(Duration::from_secs(60), false);
        assert_eq!(dwell.left(at(0)), None);
        let mut now = 0;
        for seconds in [60, 120, 240, 480, 480] {
            dwell.begin(at(now));
            assert_eq!(dwell.left(at(now)), Some(Duration::from_secs(seconds)));
            assert_eq!(dwell.left(at(now + seconds)), None);
            now += seconds;
            dwell.grown(at(now));
            assert!(dwell.undo(at(now + 59)).is_some());
        }
        dwell.grown(at(now));
        assert_eq!(dwell.undo(at(now + 60)), None);
        dwell.begin(at(now));
        assert_eq!(dwell.ends(at(now)), Some(at(now + 240)));
        assert_eq!(dwell.undo(at(now)), None, "nothing has grown since");
        dwell.forget();
        dwell.begin(at(now));
        assert_eq!(dwell.left(at(now + 1)), Some(Duration::from_secs(59)));
    }
}
