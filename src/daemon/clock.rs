//! The only place that reads a clock.

use std::{
    future::pending,
    time::{Instant, SystemTime},
};

use crate::units::Timestamp;

/// Time since the supervisor started.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    start: Instant,
}

impl Clock {
    /// A clock that starts now.
    #[must_use]
    pub(super) fn start() -> Self {
        Self { start: Instant::now() }
    }

    /// The time now. Never goes back: the kernel's monotonic clock.
    #[must_use]
    pub(super) fn now(&self) -> Timestamp {
        Timestamp::START + self.start.elapsed()
    }

    /// The time now, since the start and by the wall clock.
    #[must_use]
    pub(super) fn both(&self) -> (Timestamp, SystemTime) {
        (self.now(), SystemTime::now())
    }

    /// Waits until `at`; for ever when it is `None`.
    pub(super) async fn sleep_until(&self, at: Option<Timestamp>) {
        let deadline = at.and_then(|at| self.start.checked_add(at.since_start()));
        match deadline {
            Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
            None => pending().await,
        }
    }
}
