//! Decisions about memory without a holder.

use serde::{Deserialize, Serialize};

use crate::policy::{page_pool::Release, reboot::RebootReason};

/// What was found or decided about memory without a holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryDecision {
    /// What became of memory that was given back, on a board with a page pool for the GPU.
    Released(Release),
    /// The machine has been in a state for so long that only a reboot ends it.
    RebootAdvised(RebootReason),
    /// The machine has not been in that state for as long.
    RebootNotAdvised(RebootReason),
}
