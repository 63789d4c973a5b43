//! Coverage: the ledger covers the real use of compliant holders.
//!
//! Reclaimed memory is not free before it is released.

use cotenant::units::Bytes;

use super::{Checker, Step};

pub(crate) struct Covered;

impl Checker for Covered {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        for ((tenant, pid), used) in step.honest_use {
            let held: Bytes = step
                .after
                .leases
                .iter()
                .filter(|lease| lease.tenant == *tenant && lease.owner.owner_pid == *pid)
                .map(|lease| lease.memory.held)
                .sum();
            if held < *used {
                return Err(format!(
                    "no book covers `{tenant}`: it really uses {used} and holds {held}"
                ));
            }
        }
        Ok(())
    }
}
