//! Decisions about leases that are held or end.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{policy::lease::LeaseId, units::Bytes};

/// A lease as events and operators name it: `asr#7`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseName {
    /// Its number.
    pub id: LeaseId,
    /// The tenant that holds or held it.
    pub tenant: String,
}

impl fmt::Display for LeaseName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.tenant, self.id.0)
    }
}

/// What was decided about a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseDecision {
    /// The process of the holder has ended, and its memory is credited.
    HolderGone {
        /// Which lease.
        lease: LeaseName,
        /// Free after it.
        free: Bytes,
        /// The budget.
        budget: Bytes,
    },
}
