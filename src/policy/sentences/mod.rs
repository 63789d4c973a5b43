//! Decisions, reasons and denials in words, for events, errors and the operator's views.

mod decision;
mod denial;
mod reason;
mod state;

pub use self::decision::{render_decision, render_lease_end};
