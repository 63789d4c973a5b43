//! The loop that joins the modules: events in, actions out.
//!
//! `run` puts everything together, `turn` is the loop and `control` the thread that it runs on; nothing here decides. `survival` is what outlives a run; `engine`, `workers`, `sampling` and
//! `measure` turn what happens into events; `perform` carries out actions; `record` and `figures` keep account; `llm`,
//! `voice`, `status` and `doors` let clients in.

mod chat;
mod clock;
mod control;
mod doors;
mod engine;
mod figures;
mod footprint;
mod hub;
mod hung;
mod llm;
mod measure;
mod notify;
mod parts;
mod peaks;
mod perform;
mod record;
#[cfg(test)]
mod refusals;
mod run;
mod sampling;
mod signals;
mod status;
mod survival;
mod turn;
mod voice;
mod watchdog;
mod workers;

pub(crate) use workers::spec_of;
mod wyoming;

pub use control::Control;
pub use peaks::{PeaksError, learned_peaks};
pub use run::{RunError, run};
pub(crate) use run::{sayable, threads};
