//! Unusable inputs of a plan, as errors of the command.

use crate::exit::{self, CliError};
use cotenant_engine::LoadError;

/// Faults of a configuration on one line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct ConfigCause(pub(super) String);

/// Returns the error for an unusable model.
pub(super) fn refused(error: &LoadError) -> CliError {
    CliError::Failed {
        act: error.to_string(),
        hint: error.hint().map(str::to_owned),
        source: std::error::Error::source(error)
            .map(|cause| Box::new(ConfigCause(cotenant_units::causes::in_one_line(cause))) as _),
        code: exit::CONFIG,
    }
}
