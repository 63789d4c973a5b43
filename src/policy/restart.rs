//! Restart policy: intensity and backoff.
//!
//! A start that lacks memory is no attempt: memory is awaited in the admission queue.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::params::RestartParams;
use cotenant_units::Timestamp;

/// Failures of one worker, or of the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Restart {
    /// Failures within the window, oldest first; at most the intensity plus one.
    recent: VecDeque<Timestamp>,
    in_a_row: u32,
    ready_since: Option<Timestamp>,
}

impl Restart {
    /// Records that it is ready.
    pub(super) fn ready(&mut self, now: Timestamp) {
        self.ready_since = Some(now);
    }

    /// Records a failure. Returns the time of the restart; `None` after too many failures within the window. The wait
    /// doubles with each consecutive failure, and is reset after `stable_after`.
    pub(super) fn failed(&mut self, limits: &RestartParams, now: Timestamp) -> Option<Timestamp> {
        self.forget_if_stable(limits, now);
        while let Some(oldest) = self.recent.front()
            && now.saturating_since(*oldest) >= limits.window
        {
            self.recent.pop_front();
        }
        self.recent.push_back(now);
        let most = usize::try_from(limits.intensity).unwrap_or(usize::MAX);
        (self.recent.len() <= most).then(|| self.next_try(limits, now))
    }

    /// Records a failure caused by a condition that is waited for: the wait grows as with any failure, without giving
    /// up.
    pub(super) fn held_up(&mut self, limits: &RestartParams, now: Timestamp) -> Timestamp {
        self.forget_if_stable(limits, now);
        self.next_try(limits, now)
    }

    fn forget_if_stable(&mut self, limits: &RestartParams, now: Timestamp) {
        if let Some(since) = self.ready_since.take()
            && now.saturating_since(since) >= limits.stable_after
        {
            self.forget();
        }
    }

    fn next_try(&mut self, limits: &RestartParams, now: Timestamp) -> Timestamp {
        let doubled = 1u32.checked_shl(self.in_a_row).unwrap_or(u32::MAX);
        let wait = limits.backoff_min.saturating_mul(doubled);
        let wait = wait.min(limits.backoff_max);
        self.in_a_row = self.in_a_row.saturating_add(1).min(DOUBLINGS_MAX);
        now + wait
    }

    /// Clears the failures before a start by an operator.
    pub(super) fn forget(&mut self) {
        self.recent.clear();
        self.in_a_row = 0;
    }

    /// Returns the failures within the window, as of the last one.
    pub(super) fn recent_failures(&self) -> usize {
        self.recent.len()
    }
}

/// 2^20 times the minimum wait exceeds any maximum wait.
const DOUBLINGS_MAX: u32 = 20;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const fn at(millis: u64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    #[test]
    fn the_wait_doubles_up_to_its_limit_and_then_it_gives_up() {
        let limits = RestartParams {
            intensity: 4,
            backoff_max: Duration::from_secs(2),
            ..RestartParams::default()
        };
        let mut restart = Restart::default();
        assert_eq!(restart.failed(&limits, at(0)), Some(at(500)));
        assert_eq!(restart.failed(&limits, at(500)), Some(at(1500)));
        assert_eq!(restart.failed(&limits, at(1500)), Some(at(3500)));
        assert_eq!(restart.failed(&limits, at(3500)), Some(at(5500)));
        assert_eq!(restart.failed(&limits, at(5500)), None);
    }

    #[test]
    fn failures_outside_the_window_do_not_count_but_the_wait_stays_long() {
        let (limits, mut restart) = (RestartParams::default(), Restart::default());
        for second in [0, 30, 59] {
            assert!(restart.failed(&limits, at(second * 1000)).is_some());
        }
        assert_eq!(restart.failed(&limits, at(60_000)), Some(at(64_000)));
    }

    #[test]
    fn a_stable_time_makes_the_wait_short_again_and_a_short_one_does_not() {
        let (limits, mut restart) = (RestartParams::default(), Restart::default());
        let _ = restart.failed(&limits, at(0));
        restart.ready(at(1000));
        assert_eq!(restart.failed(&limits, at(60_999)), Some(at(61_999)));
        restart.ready(at(62_000));
        assert_eq!(restart.failed(&limits, at(122_000)), Some(at(122_500)));
    }
}
