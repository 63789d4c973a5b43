//! Bytes from outside, damaged in every way: no panic, no hang, bounded memory.
//!
//! Each target begins with valid examples and a dictionary of its format. An example is damaged (bits, numbers, lengths,
//! words, splices, repetitions), run, and kept as a new example when it led to an answer that was not seen before; the
//! answers' texts, with their figures left out, stand in for coverage, so that this needs no instrumented build.
//!
//! | variable | what it does |
//! |---|---|
//! | `COTENANT_FUZZ_SECONDS` | how long each target runs; 1 by default |
//! | `COTENANT_FUZZ_SEED` | where the damage begins; a failure prints it |
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "test helpers may fail loudly, and say what they have done"
)]

mod damage;
mod memory;
mod models;
mod realtime;
mod runner;
mod schemas;
mod targets;
use cotenant_dev::weights;
