//! Decisions about leases and requests as English.

use crate::policy::decision::{AdmissionDecision, LeaseDecision};

pub(super) fn lease(decision: &LeaseDecision) -> String {
    match decision {
        LeaseDecision::HolderGone { lease, free, budget } => {
            format!("{lease}: its process has ended and its memory is free; {free} is free of {budget}")
        }
    }
}

pub(super) fn admission(decision: &AdmissionDecision) -> String {
    match decision {
        AdmissionDecision::DrainBegun => "draining: nothing new is admitted".to_owned(),
    }
}
