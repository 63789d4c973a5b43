//! When a worker is stopped rather than the LLM shed.
//!
//! 1. [`why_kept`]: a worker is asked only while it is idle, and for pressure only while memory is below the Critical
//!    watermark; below the last watermark a busy one is asked too. A pinned one never is.
//! 2. [`stop_cost`]: the price of a stop is the time to start it again, and an utterance where it is busy. Its weight is 64
//!    times that of shedding from a holder of its class ([`Candidate::weight`]), so that the LLM sheds first.
//! 3. [`stops_for_what_is_owed`]: a stop is chosen for what is missing now. What a slope foretells comes from others.

use std::{fmt, time::Duration};

use super::{
    lease::Class,
    pressure::PressureLevel,
    shedding::{Candidate, Cost, choose, micros},
};
use crate::units::Bytes;

/// For whom memory is asked back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// For a request of this class: only less urgent holders give, and what counts is what the book gets.
    Request(Class),
    /// For the machine: everybody gives, and what counts is what is really in use.
    Pressure(Urgency),
}

/// How far a shed under pressure goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Urgency {
    /// Elevated, with no more to come: nothing that makes the engine slower.
    Warning,
    /// Critical, or about to be.
    Urgent,
    /// Below the last watermark: even work that is under way.
    LastResort,
}

impl Purpose {
    pub(super) fn takes_from(self, class: Class) -> bool {
        match self {
            Self::Request(urgent) => class > urgent,
            Self::Pressure(_) => true,
        }
    }
}

/// A worker that may have to give.
pub(super) struct WorkerToGive<T: Fn() -> bool, W: Fn() -> bool> {
    pub(super) pinned: bool,
    /// It is ready and does not change its variant.
    pub(super) settled: bool,
    /// It can come down without being stopped.
    pub(super) can_be_told: T,
    pub(super) requests: u32,
    /// It waits to become larger.
    pub(super) waits_to_grow: W,
}

/// Why a worker is not asked to give anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    Pinned,
    Changing,
    Busy,
    WaitsToGrow,
    /// Pressure is not Critical.
    BeforeCritical,
    /// The level is Critical still, and headroom is above its watermark again.
    Recovered,
    /// Others give what is missing now.
    OthersSuffice,
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pinned => "is pinned",
            Self::Changing => "is changing",
            Self::Busy => "is busy",
            Self::WaitsToGrow => "waits to become larger",
            Self::BeforeCritical => "workers give at Critical only",
            Self::Recovered => "headroom is above the critical watermark; workers are stopped only below it",
            Self::OthersSuffice => "would be stopped, and others give what is missing now",
        })
    }
}

/// Why a worker is not asked to give anything for `purpose`; `None` if it is.
pub(super) fn why_kept<T: Fn() -> bool, W: Fn() -> bool>(
    worker: &WorkerToGive<T, W>,
    purpose: Purpose,
    level: PressureLevel,
    critical_now: bool,
) -> Option<Kept> {
    let pressed = matches!(purpose, Purpose::Pressure(_));
    let critical = level == PressureLevel::Critical;
    if worker.pinned {
        Some(Kept::Pinned)
    } else if !worker.settled {
        Some(Kept::Changing)
    } else if (critical && purpose == Purpose::Pressure(Urgency::LastResort)) || (worker.can_be_told)() {
        None
    } else if worker.requests > 0 {
        Some(Kept::Busy)
    } else if (worker.waits_to_grow)() {
        Some(Kept::WaitsToGrow)
    } else if pressed && !critical {
        Some(Kept::BeforeCritical)
    } else if pressed && !critical_now {
        Some(Kept::Recovered)
    } else {
        None
    }
}

/// What stopping a worker costs its user.
pub(super) fn stop_cost(busy: bool, idle: Duration, reload: Duration, stop_grace: Duration) -> Cost {
    Cost {
        free_us: micros(stop_grace),
        now_us: if busy { BUSY_STOP_US } else { 0 },
        // One that has been idle for long is not likely to be missed soon.
        undo_us: micros(reload).saturating_mul(1 + IDLE_LONG_S / (1 + idle.as_secs())),
        ..Cost::default()
    }
}

/// Leaves only those stops among the candidates that are chosen for what is `owed`, what is missing below the watermark.
pub(super) fn stops_for_what_is_owed(candidates: &mut Vec<Candidate>, owed: Bytes) {
    let goes_on = |candidate: &Candidate| !candidate.source.stops();
    let without_stops: Bytes = candidates
        .iter()
        .filter(|candidate| goes_on(candidate))
        .map(Candidate::bytes)
        .sum();
    let stopped = if without_stops >= owed {
        Vec::new()
    } else {
        choose(candidates, owed)
    };
    candidates.retain(|candidate| goes_on(candidate) || stopped.iter().any(|chosen| chosen.source == candidate.source));
}

/// Stopping a worker in the middle of its work costs its user an utterance.
const BUSY_STOP_US: u64 = 10_000_000;
/// After this many seconds of idleness a stop costs only the start.
const IDLE_LONG_S: u64 = 60;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::shedding::Source;

    type Idle = WorkerToGive<fn() -> bool, fn() -> bool>;

    fn idle() -> Idle {
        WorkerToGive {
            pinned: false,
            settled: true,
            can_be_told: || false,
            requests: 0,
            waits_to_grow: || false,
        }
    }

    #[test]
    fn an_idle_worker_gives_below_the_critical_watermark_and_a_busy_one_at_the_last_resort() {
        let urgent = Purpose::Pressure(Urgency::Urgent);
        let last = Purpose::Pressure(Urgency::LastResort);
        let critical = PressureLevel::Critical;
        assert_eq!(why_kept(&idle(), urgent, critical, true), None);
        assert_eq!(why_kept(&idle(), urgent, critical, false), Some(Kept::Recovered));
        let elevated = why_kept(&idle(), urgent, PressureLevel::Elevated, false);
        assert_eq!(elevated, Some(Kept::BeforeCritical));
        assert_eq!(
            why_kept(
                &idle(),
                Purpose::Request(Class::AudioRealtime),
                PressureLevel::Normal,
                false
            ),
            None
        );
        let busy = WorkerToGive { requests: 1, ..idle() };
        assert_eq!(why_kept(&busy, urgent, critical, true), Some(Kept::Busy));
        assert_eq!(why_kept(&busy, last, critical, true), None);
        let pinned = WorkerToGive { pinned: true, ..idle() };
        assert_eq!(why_kept(&pinned, last, critical, true), Some(Kept::Pinned));
    }

    #[test]
    fn a_stop_is_chosen_for_what_is_missing_now_only() {
        let mib = Bytes::from_mib;
        let stop = Source::WorkerStop {
            worker: "tts".to_owned(),
        };
        let cost = stop_cost(
            false,
            Duration::from_secs(600),
            Duration::from_secs(1),
            Duration::from_secs(1),
        );
        let all = [
            Candidate::even(Source::UnusedKv, Class::LlmElastic, mib(1), 30, Cost::default()),
            Candidate::whole(stop, Class::AudioRealtime, mib(100), cost),
        ];
        for (owed, left) in [(0, 1), (30, 1), (31, 2)] {
            let mut candidates = all.to_vec();
            stops_for_what_is_owed(&mut candidates, mib(owed));
            assert_eq!(candidates.len(), left, "{owed} MiB");
        }
    }
}
