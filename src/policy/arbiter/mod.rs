//! Arbiter: the state machine that the daemon talks to.
//!
//! ```text
//!               ┌───────────── handle(now, event) ─────────────┐
//!   event ────► │ due deadlines ─► the event ─► what follows   │ ────► actions, in order
//!               └──────────────────────────────────────────────┘
//!     what follows: start what is wanted ─► serve the queue ─► shed under pressure ─► grow back
//! ```
//!
//! The consequences are decided from the state alone, each time from the start, so that a lost answer or a crossed
//! message leaves no intention behind. The machines are modules of [`policy`](crate::policy) and do not use the
//! arbiter: `lease_table`, `admission`, `pressure`, `dwell`, `engine_control`, `worker_control`. What can be had is
//! computed by functions of the `state` that change nothing: `reach`, `candidates`, `stop_or_shed`, `reclaim`,
//! `growth`. The files here, from the top, each calling only those below: `route` events, readings and deadlines;
//! `request`, `engine`, `worker` and `restore` one kind of event each; `view` the snapshot and the invariants;
//! `regrow`; `serve` the queue; `reclaim`; `worker_orders` and `engine/orders`; `learn`; `core`.

mod checkpoint;
mod core;
mod engine;
mod learn;
mod reclaim;
mod regrow;
mod request;
mod restore;
mod route;
mod serve;
mod view;
mod worker;
mod worker_orders;

#[cfg(test)]
mod tests;

pub use self::{
    checkpoint::{Checkpoint, CheckpointError},
    core::Arbiter,
};
