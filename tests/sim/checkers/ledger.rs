//! No over-commit, and the columns add up.

use cotenant::{policy::lease::LeaseState, units::Bytes};

use super::{Checker, Step};

pub(crate) struct Ledger;

impl Checker for Ledger {
    fn check(&mut self, step: &Step<'_>) -> Result<(), String> {
        let after = step.after;
        let sum: Bytes =
            after.leases.iter().filter(|lease| lease.state != LeaseState::Requested).map(|lease| lease.held).sum();
        if sum != after.held {
            return Err(format!("conservation: the leases hold {sum}, the book says {}", after.held));
        }
        if after.held > after.budget {
            return Err(format!("over-commit: {} is held of {}", after.held, after.budget));
        }
        let all = after.held.saturating_add(after.unaccounted).saturating_add(after.free);
        if all < after.budget || (after.free > Bytes::ZERO && all > after.budget) {
            return Err(format!(
                "conservation: {} held, {} unaccounted and {} free of {}",
                after.held, after.unaccounted, after.free, after.budget
            ));
        }
        Ok(())
    }
}
