//! A saved conversation that is being read back.

use std::time::Instant;

use crate::{kv::Copy as KvCopy, model::parked::Lane};

/// A conversation that is being read back.
pub(super) struct Reload {
    pub(super) number: u64,
    pub(super) lane: Lane,
    /// The tokens to restore, of which the first `shared` are in memory.
    pub(super) tokens: Vec<u32>,
    pub(super) shared: usize,
    pub(super) pieces: Vec<Piece>,
    /// The next piece to read.
    pub(super) next: usize,
    pub(super) left: usize,
    /// When computing becomes faster.
    pub(super) until: Instant,
}

/// A part of a slot, and where it belongs.
pub(super) struct Piece {
    pub(super) offset: u64,
    pub(super) len: usize,
    pub(super) check: u32,
    pub(super) target: Target,
    /// Offset in the place.
    pub(super) at: usize,
    pub(super) is_done: bool,
}

/// A place in memory.
#[derive(Clone)]
pub(super) enum Target {
    Block(usize),
    Copy(KvCopy, usize),
}
