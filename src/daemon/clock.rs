//! The kernel's monotonic clock, read for decisions only here.

use std::{
    future::pending,
    time::{Instant, SystemTime},
};

use super::control_loop::Clock;
use cotenant_units::Timestamp;

/// Clock that measures the time since the supervisor started.
#[derive(Clone, Copy, Debug)]
pub struct MonotonicClock {
    start: Instant,
}

impl MonotonicClock {
    /// Starts the clock.
    pub fn start() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    /// Returns the time since the start, and the wall-clock time.
    pub(super) fn both(&self) -> (Timestamp, SystemTime) {
        (self.now(), SystemTime::now())
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> Timestamp {
        Timestamp::START + self.start.elapsed()
    }

    async fn sleep_until(&self, at: Option<Timestamp>) {
        let deadline = at.and_then(|at| self.start.checked_add(at.since_start()));
        match deadline {
            Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
            None => pending().await,
        }
    }
}
