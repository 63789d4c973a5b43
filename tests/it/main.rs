//! Integration tests of the program: one module per surface.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "test helpers may fail loudly, and say what they leave out"
)]

mod allocations;
mod autopsy;
mod board;
mod cli;
mod confine;
mod daemon;
mod dropping;
mod engine;
mod engine_thread;
mod fidelity;
mod generate;
mod grammar;
mod helper;
mod http;
mod kv_types;
mod plan;
mod probe;
mod published;
mod rpc;
mod sayable;
mod speech;
mod stage;
mod support;
use cotenant_dev::weights;
mod worker;
