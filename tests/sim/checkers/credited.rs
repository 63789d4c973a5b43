//! Credit follows measurement: a shrunk lease holds what its holder really uses.

use cotenant::{
    policy::{lease::LeaseState, params::VERIFY_PER_MILLE},
    units::Bytes,
};

use super::{Checker, Step};

pub(crate) struct Credited;

/// Tolerance: whole pages, crossing readings, and the margin of [`VERIFY_PER_MILLE`].
const SLACK: Bytes = Bytes::from_mib(1);

impl Checker for Credited {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        for before in &step.before.leases {
            let Some(target) = before
                .target
                .as_ref()
                .filter(|_| before.state == LeaseState::Revoking)
            else {
                continue;
            };
            let Some(after) = step.after.leases.iter().find(|after| after.id == before.id) else {
                continue;
            };
            let Some(used) = step
                .word_use
                .get(&(before.tenant.clone(), before.owner.owner_pid))
            else {
                continue;
            };
            let credited = before.memory.held.saturating_sub(after.memory.held);
            if credited == Bytes::ZERO {
                continue;
            }
            let leaves_open = 1000 - VERIFY_PER_MILLE;
            let open = before
                .memory
                .held
                .max(*used)
                .saturating_sub(target.bytes)
                .per_mille(leaves_open);
            // A holder may have other leases: one whose request was abandoned by its caller, and which expires.
            let held: Bytes = step
                .after
                .leases
                .iter()
                .filter(|lease| {
                    lease.tenant == before.tenant && lease.owner.owner_pid == before.owner.owner_pid
                })
                .map(|lease| lease.memory.held)
                .sum();
            if *used > held.saturating_add(open).saturating_add(SLACK) {
                return Err(format!(
                    "credited and not measured: {credited} of {} are credited, its holder holds {held} and really uses {used}",
                    before.name()
                ));
            }
        }
        Ok(())
    }
}
