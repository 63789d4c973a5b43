//! Ledger: no over-commit, and consistent totals.

use cotenant::{policy::lease::LeaseState, units::Bytes};

use super::{Checker, Step};

pub(crate) struct Ledger;

impl Checker for Ledger {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        let after = step.after;
        let sum: Bytes = after
            .leases
            .iter()
            .filter(|lease| lease.state != LeaseState::Requested)
            .map(|lease| lease.memory.held)
            .sum();
        if sum != after.memory.held {
            return Err(format!(
                "conservation: the leases hold {sum}, the book says {}",
                after.memory.held
            ));
        }
        if after.memory.held > after.memory.budget {
            return Err(format!(
                "over-commit: {} is held of {}",
                after.memory.held, after.memory.budget
            ));
        }
        let all = after
            .memory
            .held
            .saturating_add(after.memory.unaccounted)
            .saturating_add(after.memory.free);
        if all < after.memory.budget
            || (after.memory.free > Bytes::ZERO && all > after.memory.budget)
        {
            return Err(format!(
                "conservation: {} held, {} unaccounted and {} free of {}",
                after.memory.held, after.memory.unaccounted, after.memory.free, after.memory.budget
            ));
        }
        Ok(())
    }
}
