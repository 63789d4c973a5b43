//! Every decision: no clock, no I/O, no threads, no async.
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod admission;
pub mod arbiter;
pub mod book;
mod choose;
pub mod compute;
pub mod death;
pub mod decision;
pub mod denial;
mod dwell;
mod engine_control;
pub mod engine_failure;
pub mod event;
mod growth;
pub mod growth_wait;
pub mod health;
mod holder;
pub mod kv_type;
pub mod lease;
mod lease_table;
mod ledger;
pub mod page_pool;
mod pairs;
pub mod params;
mod pay;
pub mod peaks;
mod plan;
pub mod pressure;
pub mod pressure_level;
pub mod price;
mod reach;
pub mod reason;
pub mod reboot;
mod reclaim;
pub mod residency;
mod restart;
pub mod roles;
pub mod shedding;
pub mod snapshot;
pub mod speed;
mod state;
pub mod streaming;
mod worker;
mod worker_control;

pub use self::arbiter::Arbiter;

// `samples.rs` refers to this crate by its name, as other crates do.
#[cfg(test)]
extern crate self as cotenant_policy;
#[cfg(test)]
#[path = "../dev/samples.rs"]
#[expect(unreachable_pub, reason = "it is a module of `cotenant-dev`, too")]
mod samples;
