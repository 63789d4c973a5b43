//! Arbiter: the state machine that the daemon talks to.
//!
//! ```text
//!               ┌───────────── handle(now, event) ─────────────┐
//!   event ────► │ due deadlines ─► the event ─► what follows   │ ────► actions, in order
//!               └──────────────────────────────────────────────┘
//!     what follows: start what is wanted ─► serve the queue ─► shed under pressure ─► grow back
//! ```
//!
//! What follows is decided from the state alone, each time from the start, so that a lost answer or a crossed message
//! leaves no intention behind. The machines are modules of [`policy`](crate::policy) and know nothing of the arbiter:
//! `lease_table`, `admission`, `pressure`, `dwell`, `engine_control`, `growth`, `engine_supply`, `stop_or_shed`. The files
//! here, from the top: `route` events, `readings`, `request`, `operate`, `engine` and `restore` one kind of event each,
//! `view` the snapshot and the invariants, `regrow`, `serve` and `reclaim` what grows, is granted and is reclaimed,
//! `candidates` and `reach` what could be, `leases` and `engine/orders` effects, `core` the state.

mod candidates;
mod checkpoint;
mod core;
mod engine;
mod engine_load;
mod learn;
mod leases;
mod notified;
mod operate;
mod reach;
mod readings;
mod reclaim;
mod regrow;
mod request;
mod restore;
mod route;
mod serve;
mod view;
mod worker;

#[cfg(test)]
mod tests;

pub use self::{
    checkpoint::{Checkpoint, CheckpointError},
    core::Arbiter,
};
