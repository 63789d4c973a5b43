//! Deadlines: each is served at its instant, and ended leases do not return.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use cotenant::{
    policy::{
        event::{Action, Event, LeaseResize, TargetAnswered},
        lease::{LeaseId, LeaseKind, LeaseState, LeaseView, TargetAnswer},
    },
    units::Timestamp,
};

use super::{Checker, Step};

/// Grace after the deadline of a target, or after the reading that verifies a claim.
const ESCALATED_WITHIN: Duration = Duration::from_millis(250);

#[derive(Default)]
pub(crate) struct Deadlines {
    ended: BTreeSet<LeaseId>,
    claims: BTreeMap<(LeaseId, u64), Claimed>,
}

/// A holder's claim about a lease with a target.
#[derive(Clone, Copy)]
struct Claimed {
    at: Timestamp,
    applied: bool,
    /// Arrival of a reading newer than the claim.
    read_at: Option<Timestamp>,
}

impl Deadlines {
    /// Records claims of holders and newer readings.
    fn note(&mut self, step: &Step<'_>) {
        for (lease, nonce) in step.before.leases.iter().filter_map(pending) {
            let key = (lease.id, nonce);
            let claim = match step.event {
                Event::TargetAnswered(TargetAnswered {
                    lease: id,
                    nonce: of,
                    answer,
                    ..
                }) if (*id, *of) == key => match answer {
                    TargetAnswer::Refused { .. } => None,
                    answer => Some(*answer == TargetAnswer::Applied),
                },
                Event::LeaseResizeRequested(LeaseResize { lease: id, .. }) if *id == lease.id => {
                    Some(false)
                }
                _ => None,
            };
            let known = self.claims.get_mut(&key);
            if let Some(applied) = claim
                && known.as_ref().is_none_or(|known| applied && !known.applied)
            {
                let claimed = Claimed {
                    at: step.now,
                    applied,
                    read_at: None,
                };
                self.claims.insert(key, claimed);
            } else if let Event::Measured { tenant, taken_at, .. } = step.event
                && let Some(known) = known
                && tenant == lease.holder()
                // The arbiter treats a reading from the future as taken now.
                && (*taken_at).min(step.now) > known.at
            {
                known.read_at.get_or_insert(step.now);
            }
        }
        // A worker cannot reply: it counts as having claimed compliance when it was asked.
        for (lease, nonce) in step.after.leases.iter().filter_map(pending) {
            if lease.kind == LeaseKind::Worker {
                self.claims.entry((lease.id, nonce)).or_insert(Claimed {
                    at: step.now,
                    applied: true,
                    read_at: None,
                });
            }
        }
    }

    /// Deadline by which a lease with this target must be granted again, or ended.
    fn due(&self, step: &Step<'_>, id: LeaseId, nonce: u64, deadline: Timestamp) -> Timestamp {
        let claimed = self.claims.get(&(id, nonce));
        deadline.max(claimed.map_or(deadline, |claimed| {
            claimed
                .read_at
                .unwrap_or(claimed.at + step.params.shed.verify_timeout)
        }))
    }
}

/// A lease whose holder has a pending target, and the number of the target.
fn pending(lease: &LeaseView) -> Option<(&LeaseView, u64)> {
    let target = lease
        .target
        .as_ref()
        .filter(|_| lease.state == LeaseState::Revoking)?;
    Some((lease, target.nonce))
}

impl Checker for Deadlines {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        self.note(step);
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
                return Err(format!(
                    "a deadline was not served: {} has expired",
                    lease.name()
                ));
            }
            if let (LeaseState::Revoking, Some(target)) = (lease.state, &lease.target)
                && self.due(step, lease.id, target.nonce, target.deadline) + ESCALATED_WITHIN
                    < step.now
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
                self.ended.insert(lease.id);
            }
        }
        Ok(())
    }
}
