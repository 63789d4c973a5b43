//! Health of the supervisor as a whole, as the probes of every API report it.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::time::Duration;

use super::{
    engine_failure::{EngineFailure, NextTry},
    reboot::RebootReason,
    snapshot::{EngineState, Snapshot, WorkerState},
};

/// The first reason for which the supervisor does not work as configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// Everything is running or starting.
    Serving,
    /// No admission: an operator's drain, or the end of the run.
    Draining,
    /// The last sample of the machine is too old for memory management.
    Blind { age: Duration },
    /// The LLM is off after crashes of the supervisor; the reason, with the remedy.
    SafeProfile {
        /// Reason as text.
        reason: String,
    },
    /// The LLM failed.
    EngineFailed { failure: EngineFailure },
    /// A worker failed so often that only an operator can start it.
    WorkerGivenUp { worker: String },
    /// Everything is running, and the machine has lost memory that only a reboot recovers.
    RebootAdvised { reason: RebootReason },
}

/// Maximum age of a sample for a healthy supervisor: five times the longest default interval (our choice: one late
/// sample is no fault).
pub const HEALTHY_SAMPLE_AGE: Duration = Duration::from_secs(5);

impl Health {
    /// Whether everything configured is running or starting; advice to reboot does not count.
    #[must_use]
    pub const fn serves(&self) -> bool {
        matches!(self, Self::Serving | Self::RebootAdvised { .. })
    }

    /// Returns the health in a state whose last sample is `sample_age` old; `None` before the first one.
    #[must_use]
    pub fn of(state: &Snapshot, sample_age: Option<Duration>) -> Self {
        // A longer interval may be configured.
        let age_max = HEALTHY_SAMPLE_AGE.max(state.pressure.sample_interval.saturating_mul(3));
        if state.draining {
            return Self::Draining;
        }
        if let Some(age) = sample_age.filter(|age| *age > age_max) {
            return Self::Blind { age };
        }
        if let Some(reason) = safe_profile(state) {
            return Self::SafeProfile {
                reason: reason.to_owned(),
            };
        }
        if state.engine.state == EngineState::Failed {
            let unknown = || EngineFailure {
                reason: "unknown".to_owned(),
                next: NextTry::Now,
            };
            return Self::EngineFailed {
                failure: state.engine.failure.clone().unwrap_or_else(unknown),
            };
        }
        let given_up =
            |worker: &&super::snapshot::WorkerView| worker.state == WorkerState::Degraded;
        match state.workers.iter().find(given_up) {
            Some(worker) => Self::WorkerGivenUp {
                worker: worker.name.clone(),
            },
            None => match state.reboot.first() {
                Some(&reason) => Self::RebootAdvised { reason },
                None => Self::Serving,
            },
        }
    }
}

/// Returns the reason of the safe profile: the LLM is off after crashes of the supervisor.
#[must_use]
pub fn safe_profile(state: &Snapshot) -> Option<&str> {
    let failure = state.engine.failure.as_ref()?.reason.as_str();
    (state.engine.state == EngineState::Failed && failure.starts_with(SAFE_PROFILE))
        .then_some(failure)
}

/// Prefix of the engine's failure under the safe profile.
pub const SAFE_PROFILE: &str = "safe profile";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::WorkerView;

    #[test]
    fn a_failed_engine_a_worker_given_up_and_old_samples_are_not_healthy() {
        let fresh = Some(Duration::from_millis(10));
        let mut state = Snapshot::default();
        assert_eq!(Health::of(&state, None), Health::Serving);
        let reason = RebootReason::ContiguousRefused { refusals: 3 };
        state.reboot.push(reason);
        let advised = Health::of(&state, fresh);
        assert_eq!(advised, Health::RebootAdvised { reason });
        assert!(advised.serves());
        state.workers.push(WorkerView {
            name: "asr".to_owned(),
            state: WorkerState::Degraded,
            ..WorkerView::default()
        });
        let given_up = Health::WorkerGivenUp {
            worker: "asr".to_owned(),
        };
        assert_eq!(Health::of(&state, fresh), given_up);
        state.engine.state = EngineState::Failed;
        let failed = |reason: &str| EngineFailure {
            reason: reason.to_owned(),
            next: NextTry::Now,
        };
        state.engine.failure = Some(failed("it panicked"));
        let failure = failed("it panicked");
        assert_eq!(
            Health::of(&state, fresh),
            Health::EngineFailed {
                failure: failure.clone()
            }
        );
        let reason = format!("{SAFE_PROFILE}: 3 crashes");
        state.engine.failure = Some(failed(&reason));
        assert_eq!(Health::of(&state, fresh), Health::SafeProfile { reason });
        state.engine.failure = Some(failure.clone());
        let age = HEALTHY_SAMPLE_AGE + Duration::from_millis(1);
        assert_eq!(Health::of(&state, Some(age)), Health::Blind { age });
        state.pressure.sample_interval = Duration::from_secs(4);
        assert_eq!(
            Health::of(&state, Some(age)),
            Health::EngineFailed { failure },
            "sampled on purpose so rarely"
        );
        state.draining = true;
        assert_eq!(Health::of(&state, fresh), Health::Draining);
    }
}
