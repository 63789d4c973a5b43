//! Saved conversations: copied to disk while the engine is idle, and read back by a prompt that continues them.
//!
//! ```text
//!             idle for some time                    capacity is needed, or the daemon ends
//!   parked ─────────────────────► parked and saved ────────────────────────────────────────► saved
//!     ▲                                                                                       │
//!     └───────────────────── a prompt continues it, or the daemon has started ◄───────────────┘
//! ```
//!
//! A file holds blocks and copies of all conversations in slots, each once however many share it; a header per
//! conversation has its tokens, its slots and their checksums. A header is written after its slots, and slots are
//! reused after the headers that refer to them were removed, so that an interruption at any point loses at most what
//! was being written. A different model file, KV type or checksum rejects a conversation.

mod index;
mod reading;
mod reload;
mod tier;
mod transfers;
mod writing;

pub(super) use tier::{Memory, Saved};
pub use tier::{OnDisk, SavedCounts, SavedView};
#[cfg(test)]
pub(super) use transfers::Hindrance;
pub(crate) use transfers::with_transfers;
pub use writing::{SaveDue, SaveStep};
