//! Deadlines that are later than the instant at which they were set.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use cotenant_units::Timestamp;

/// An instant by which something is due; later than the instant at which it was set.
///
/// ```
/// # use std::time::Duration;
/// use cotenant_policy::deadline::Deadline;
/// use cotenant_units::Timestamp;
/// let now = Timestamp::from_millis(5);
/// assert!(Deadline::after(now, Duration::ZERO).at() > now);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Deadline(Timestamp);

impl Deadline {
    /// Due `wait` after `now`, and at least one tick of the clock (1 µs) after it.
    #[must_use]
    pub fn after(now: Timestamp, wait: Duration) -> Self {
        Self::at_or_after(now, now + wait)
    }

    /// Due at `at`, or one tick after `now` where `at` is not later than that.
    #[must_use]
    pub fn at_or_after(now: Timestamp, at: Timestamp) -> Self {
        Self(at.max(now + TICK))
    }

    /// The instant.
    #[must_use]
    pub const fn at(self) -> Timestamp {
        self.0
    }
}

/// The resolution of [`Timestamp`].
const TICK: Duration = Duration::from_micros(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_later_than_the_instant_at_which_it_was_set() {
        let now = Timestamp::from_millis(5);
        for wait in [Duration::ZERO, TICK / 2, TICK, Duration::from_secs(1)] {
            let deadline = Deadline::after(now, wait);
            assert!(deadline.at() > now, "{wait:?}");
            assert!(deadline.at() <= now + wait.max(TICK), "{wait:?}");
        }
        assert_eq!(
            Deadline::at_or_after(now, Timestamp::START).at(),
            now + TICK
        );
    }
}
