//! Decisions as English; the one place where their wording is made.

mod holders;
mod leases;
mod workers;

pub use self::leases::render_lease_end;
use crate::policy::decision::Decision;

/// A decision as one line.
#[must_use]
pub fn render_decision(decision: &Decision) -> String {
    match decision {
        Decision::Lease(decision) => leases::lease(decision),
        Decision::Admission(decision) => leases::admission(decision),
        Decision::Engine(decision) => holders::engine(decision),
        Decision::Worker(decision) => workers::worker(decision),
        Decision::Growth(decision) => holders::growth(decision),
        Decision::Memory(decision) => holders::memory(decision),
    }
}
