//! Checkpoint of the arbiter as one plain value.
//!
//! It holds every input of a decision, so that the same events lead to the same actions as in the original arbiter. It
//! is derived from the state itself, so that a field added to the state is included.

use serde::{Deserialize, Serialize};

use super::Arbiter;
use crate::params::{Params, ParamsError};
use cotenant_units::Timestamp;

/// Complete state of an [`Arbiter`] between two events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Checkpoint(Box<Arbiter>);

/// Checkpoint that cannot be resumed.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// Its settings are not valid in this version.
    #[error("cannot continue from the checkpoint of {at}: its settings are not valid")]
    Params {
        /// Time of the checkpoint.
        at: Timestamp,
        /// Their faults.
        #[source]
        source: ParamsError,
    },
    /// It is inconsistent, for example edited or damaged.
    #[error("cannot continue from the checkpoint of {at}: {broken}")]
    Broken {
        /// Time of the checkpoint.
        at: Timestamp,
        /// Violated invariant.
        broken: String,
    },
}

impl Checkpoint {
    /// Copies the state of an arbiter, between two calls of [`Arbiter::handle`].
    #[must_use]
    pub fn of(arbiter: &Arbiter) -> Self {
        Self(Box::new(arbiter.clone()))
    }

    /// Returns the time of the checkpoint, by the clock of its run.
    #[must_use]
    pub const fn at(&self) -> Timestamp {
        self.0.now()
    }

    /// Returns the settings of the arbiter.
    #[must_use]
    pub const fn params(&self) -> &Params {
        self.0.params()
    }

    /// Returns an arbiter that continues from the checkpoint: the same events lead to the same actions.
    ///
    /// # Errors
    /// If its settings are not valid, or an invariant of the ledger does not hold.
    pub fn resume(self) -> Result<Arbiter, CheckpointError> {
        let at = self.at();
        let arbiter = *self.0;
        arbiter
            .params()
            .validate()
            .map_err(|source| CheckpointError::Params { at, source })?;
        match arbiter.broken_invariant() {
            Some(broken) => Err(CheckpointError::Broken { at, broken }),
            None => Ok(arbiter),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;
    use crate::params::Scope;
    use cotenant_units::Bytes;

    fn as_json() -> serde_json::Value {
        let params = Params::for_budget(Bytes::from_gib(1), Bytes::from_mib(128), Scope::Machine);
        let mut arbiter = Arbiter::new(params).unwrap();
        let _ = arbiter.handle(
            Timestamp::from_millis(7),
            crate::event::Event::DrainRequested { by: None },
        );
        serde_json::to_value(Checkpoint::of(&arbiter)).unwrap()
    }

    #[test]
    fn what_was_written_is_read_back_with_its_time_and_settings() {
        let checkpoint: Checkpoint = serde_json::from_value(as_json()).unwrap();
        assert_eq!(checkpoint.at(), Timestamp::from_millis(7));
        assert_eq!(checkpoint.params().budget.total, Bytes::from_gib(1));
        assert!(checkpoint.resume().unwrap().snapshot().draining);
    }

    #[test]
    fn settings_that_are_not_valid_are_refused() {
        let mut json = as_json();
        json["params"]["pressure"]["hysteresis"] = Bytes::from_gib(1).get().into();
        let error = serde_json::from_value::<Checkpoint>(json)
            .unwrap()
            .resume()
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "cannot continue from the checkpoint of {}: its settings are not valid",
                Timestamp::from_millis(7)
            )
        );
        let source = error.source().unwrap().to_string();
        assert!(
            source.contains("one shed would not end the level"),
            "{source}"
        );
    }

    #[test]
    fn a_book_that_holds_more_than_the_budget_is_refused() {
        let mut json = as_json();
        json["ledger"]["entries"] = serde_json::json!([
            [1, { "tenant": "a", "held": Bytes::from_gib(2), "booked_at": 0, "moving": false }]
        ]);
        let error = serde_json::from_value::<Checkpoint>(json)
            .unwrap()
            .resume()
            .unwrap_err();
        assert!(error.to_string().contains("is held of a"), "{error}");
    }
}
