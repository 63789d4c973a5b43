//! Fuzzing of external input: no panic, no hang, bounded memory.
//!
//! Each target starts with valid examples and a dictionary of its format. An example is mutated (bits, numbers,
//! lengths, words, splices, repetitions), run, and kept as a new example if it led to a new answer; the texts of the
//! answers without their figures replace coverage, so that no instrumented build is needed.
//!
//! | variable | meaning |
//! |---|---|
//! | `COTENANT_FUZZ_SECONDS` | run time per target; 1 by default |
//! | `COTENANT_FUZZ_SEED` | initial seed; a failure prints it |
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
