//! Every decision: no clock, no I/O, no threads, no async.
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod residency;
