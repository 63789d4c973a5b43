//! Every decision: no clock, no I/O, no threads, no async.
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod event;
pub mod lease;
pub mod pressure;
pub mod residency;
pub mod snapshot;
