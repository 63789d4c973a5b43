//! Composition root, control loop and adapters.
//!
//! `run` constructs all parts, `control_loop` is the loop, `control_thread` its thread, and `shutdown` the end of a
//! run; decisions are made by policy. `device` performs actions; `engine`, `workers`, `sampling` and `measure` produce
//! events; `record`, `handoff` and `figures` keep records; `llm`, `voice`, `status`, `wyoming` and `listeners` serve
//! clients, and `activation` takes sockets from systemd.

mod activation;
mod backlog;
mod bind;
mod certificates;
mod chat;
mod clock;
mod control_handle;
pub mod control_loop;
mod control_thread;
mod crash_guard;
mod device;
mod early;
mod embedder;
mod engine;
mod error;
mod event_export;
mod figures;
mod folders;
mod handoff;
mod hang_detector;
mod history;
mod history_feed;
mod listeners;
mod llm;
mod measure;
mod notify;
mod parts;
mod peaks;
mod reach;
mod record;
#[cfg(test)]
mod refusals;
mod reload;
mod run;
mod sampling;
mod sequences;
mod shutdown;
mod signals;
mod startup_trim;
mod status;
mod tenants;
mod voice;
mod watchdog;
mod workers;
mod wyoming;

pub use activation::PassedSockets;
pub use bind::is_here;
pub use clock::MonotonicClock;
pub use control_handle::ControlHandle;
pub use control_thread::ControlThread;
pub use engine::{compute, sayable, threads};
pub use error::RunError;
pub use folders::{Obstacle, obstacles};
pub use peaks::{PeaksError, learned_peaks};
pub use run::{Source, run};
pub use workers::spec_of;
