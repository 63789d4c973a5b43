//! One file of a model.

use std::path::PathBuf;

use crate::units::Bytes;

/// One file of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The file.
    pub path: PathBuf,
    /// The number of its first byte, counted through all parts.
    pub base: u64,
    /// Its length when it was opened.
    pub bytes: Bytes,
}
