//! Arbiter: the state machine that the daemon talks to.
//!
//! ```text
//!               ┌───────────── handle(now, event) ─────────────┐
//!   event ────► │ due deadlines ─► the event ─► what follows   │ ────► actions, in order
//!               └──────────────────────────────────────────────┘
//!     what follows: start what is wanted ─► serve the queue ─► shed under pressure ─► grow back
//! ```
//!
//! What follows is decided from the state alone, each time anew, so that a lost answer or a crossed message leaves no
//! intention behind that nobody remembers. The files: `core` the doors, `request` what tenants ask, `queue` who is served
//! next, `reach` what can be had at all, `revoke` how memory comes back from tenants, `engine`, `engine_load` and `worker` the lives of
//! ours, `candidates` who
//! could give memory back and at what cost, `reclaim` what is shed and what grows back, `learn` what holders are seen to
//! need, `notified` workers that react to pressure notifications, `view` the snapshot and the invariants, `checkpoint` the whole state as one value, `restore` what outlives a run.

mod candidates;
mod checkpoint;
mod core;
mod engine;
mod engine_load;
mod learn;
mod notified;
mod operate;
mod queue;
mod reach;
mod reclaim;
mod regrow;
mod request;
mod restore;
mod revoke;
mod view;
mod worker;

#[cfg(test)]
mod tests;

pub use self::{
    checkpoint::{Checkpoint, CheckpointError},
    core::Arbiter,
};
