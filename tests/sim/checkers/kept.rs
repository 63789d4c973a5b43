//! Compliance: a process that has come down is never ended for a target.
//!
//! This holds for all names under which it has leases, and for any use by others.

use cotenant::{
    policy::{
        decision::{Claim, LeaseEnd, NotReduced},
        event::Action,
    },
    units::Bytes,
};

use super::{Checker, Step};

pub(crate) struct Kept;

impl Checker for Kept {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        for action in step.actions {
            let Action::EndLease { lease, end } = action else {
                continue;
            };
            let Some(ended) = step.before.leases.iter().find(|other| other.id == lease.id) else {
                continue;
            };
            let of_it = ended.owner.owner_pid.and_then(|pid| step.keeping.get(&pid));
            let (Some(used), Some(target)) = (of_it, &ended.target) else {
                continue;
            };
            let others: Bytes = step
                .before
                .leases
                .iter()
                .filter(|other| {
                    other.owner.owner_pid == ended.owner.owner_pid && other.id != ended.id
                })
                .map(|other| other.memory.held)
                .sum();
            let claimed = matches!(
                end,
                LeaseEnd::NotReduced {
                    cause: NotReduced::Measured {
                        claim: Claim::Applied,
                        ..
                    } | NotReduced::Unmeasurable {
                        claim: Claim::Applied
                    },
                    ..
                }
            );
            if claimed && *used <= target.bytes.saturating_add(others) {
                return Err(format!(
                    "an honest holder is ended: its process uses {used}, {} was to be at {} beside {others}: {end:?}",
                    ended.name(),
                    target.bytes
                ));
            }
        }
        Ok(())
    }
}
