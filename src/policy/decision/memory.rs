//! Decisions about memory that nobody holds.

use serde::{Deserialize, Serialize};

use crate::policy::page_pool::Release;

/// What was found or decided about memory that nobody holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryDecision {
    /// What became of memory that was given back, on a board with a page pool for the GPU.
    Released(Release),
}
