//! Deadlines are served at their instant, and what has ended does not come back.

use std::{collections::BTreeSet, time::Duration};

use cotenant::policy::{
    event::Action,
    lease::{LeaseId, LeaseState},
};

use super::{Checker, Step};

/// The grace for the last measurement, and the liar is named within it.
const ESCALATED_WITHIN: Duration = Duration::from_millis(250);

#[derive(Default)]
pub(crate) struct Deadlines {
    ended: BTreeSet<LeaseId>,
}

impl Checker for Deadlines {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        for lease in &step.before.leases {
            if lease.expires_at.is_some_and(|at| at < step.now) && !step.jumped {
                return Err(format!(
                    "a deadline was missed: {} expired at {:?}, it is {}",
                    lease.name(),
                    lease.expires_at,
                    step.now
                ));
            }
        }
        for lease in &step.after.leases {
            if lease.expires_at.is_some_and(|at| at <= step.now) {
                return Err(format!("a deadline was not served: {} has expired", lease.name()));
            }
            if let (LeaseState::Revoking, Some(target)) = (lease.state, &lease.target)
                && target.deadline + ESCALATED_WITHIN < step.now
            {
                return Err(format!(
                    "a deadline was neither kept nor escalated: {} was to be at {} by {}, it is {}",
                    lease.name(),
                    target.bytes,
                    target.deadline,
                    step.now
                ));
            }
            let lives = matches!(lease.state, LeaseState::Granted | LeaseState::Revoking);
            if lives && self.ended.contains(&lease.id) {
                return Err(format!("{} has ended and is back", lease.name()));
            }
        }
        for action in step.actions {
            if let Action::EndLease { lease, .. } = action {
                self.ended.insert(*lease);
            }
        }
        Ok(())
    }
}
