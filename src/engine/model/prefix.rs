//! Reusable prefix of a sequence: KV cache and copies of recurrent state.
//!
//! Attention layers forget nothing, so that a sequence can be cut back to any length. A recurrent state cannot be taken
//! back; it is copied where another prompt is likely to part from this one, and the copy taken up again.
//!
//! Copies live inside what is leased for the KV cache, where no token has been yet. So they cost no lease of their own,
//! and are the first to go: when tokens or a smaller capacity need the place, the oldest is given back to the kernel.

use std::io;

use super::Model;
use crate::{engine::state::Snapshot, units::Bytes};

impl Model {
    /// Drops the sequence; what the plan holds stays.
    pub fn reset(&mut self) {
        self.position = 0;
        self.dropped.forget();
        self.cache.put_in_order();
        self.kv_precision = self.cache.kind();
        self.lineage.reset();
        self.snapshots.clear();
        let reset = self.state.reset(self.backend.as_mut());
        self.note(reset);
        if self.lost {
            self.lost = false;
            self.restart_stream();
        }
    }

    /// Goes back to where `snapshot` was taken, if the present sequence came through there; says whether it did.
    #[must_use]
    pub fn restore(&mut self, snapshot: &Snapshot) -> bool {
        if self.lost || !self.lineage.go_back(snapshot.branch(), snapshot.position()) {
            return false;
        }
        let restored = self.state.restore(self.backend.as_mut(), snapshot);
        self.note(restored);
        self.position = snapshot.position();
        self.snapshots.retain(|kept| kept.position() <= snapshot.position());
        true
    }

    /// Cuts the sequence back to the longest beginning of at most `tokens` tokens that can be gone on from; returns its
    /// length. Nothing is left of a sequence that was lost, nor of one that is kept in a larger type than it has been
    /// converted to before.
    pub fn keep(&mut self, tokens: u32) -> u32 {
        // What a conversion has lost is read again as soon as there is place for it: an answer does not depend on what
        // was shed before it.
        if self.lost || self.kv_precision < self.cache.kind() {
            self.reset();
        } else if tokens < self.position {
            if self.state.bytes() == Bytes::ZERO {
                let branch = self.lineage.current();
                if self.lineage.go_back(branch, tokens) {
                    self.position = tokens;
                } else {
                    self.reset();
                }
            } else {
                self.snapshots.retain(|snapshot| snapshot.position() <= tokens);
                match self.snapshots.pop() {
                    Some(snapshot) if self.restore(&snapshot) => self.snapshots.push(snapshot),
                    _ => self.reset(),
                }
            }
        }
        self.position
    }

    /// Takes up a sequence whose last pass was broken off, as far as it can be gone on from, and returns its length:
    /// attention layers have every chunk that was finished, recurrent ones their last copy. What failed in another way is
    /// to be [`Self::reset`].
    pub fn recover(&mut self) -> u32 {
        if std::mem::take(&mut self.lost) {
            // The readers may have been left in the middle of a pass.
            self.restart_stream();
            self.mark_wanted = 0;
            if self.needs_marks() {
                match self.snapshots.pop() {
                    Some(snapshot) if self.restore(&snapshot) => self.snapshots.push(snapshot),
                    _ => self.reset(),
                }
            } else {
                // Behind it lies what a pass has written in part.
                let branch = self.lineage.current();
                if !self.lineage.go_back(branch, self.position) {
                    self.reset();
                }
            }
        }
        self.position
    }

    /// Whether [`Self::mark`] is of any use: a model without recurrent layers can be cut back anywhere.
    #[must_use]
    pub fn needs_marks(&self) -> bool {
        self.state.bytes() > Bytes::ZERO
    }

    /// Makes it possible to cut the sequence back to where it is now, if there is place for that.
    pub fn mark(&mut self) {
        let known = |position| self.snapshots.iter().any(|snapshot| snapshot.position() == position);
        if !self.needs_marks() || self.lost || self.position == 0 || known(self.position) {
            return;
        }
        let no_room = self.untouched() < self.state.bytes();
        let room = if self.snapshots.len() >= MARKS_MAX || no_room && !self.snapshots.is_empty() {
            self.snapshots.remove(0)
        } else if no_room {
            return;
        } else {
            match self.state.room(self.backend.as_ref()) {
                Ok(room) => room,
                // Without it the next prompt is read again; that is no fault of this one.
                Err(_) => return,
            }
        };
        let snapshot = self.copy_into(room);
        self.snapshots.push(snapshot);
    }

    /// Copies what the sequence needs beside the KV cache to go on from here later.
    ///
    /// # Errors
    /// When there is no memory for the copy.
    pub fn snapshot(&mut self) -> io::Result<Snapshot> {
        let room = self.state.room(self.backend.as_ref())?;
        Ok(self.copy_into(room))
    }

    fn copy_into(&mut self, room: Snapshot) -> Snapshot {
        let place = (self.lineage.current(), self.position);
        let (snapshot, copied) = self.state.snapshot(self.backend.as_mut(), room, place);
        self.note(copied);
        snapshot
    }

    /// Marks the sequence when the next pass comes by `position`; with streamed layers where a chunk ends before it, since
    /// another chunk would read them once more.
    pub const fn mark_at(&mut self, position: u32) {
        self.mark_wanted = position;
    }

    /// Tokens up to the place that is to be marked, where the next chunk may end for it.
    pub(super) fn until_mark(&self) -> Option<usize> {
        let left = self.mark_wanted.checked_sub(self.position).filter(|&left| left > 0)?;
        let streams = self.plan.resident.len() < self.layout.parts.len();
        (self.needs_marks() && !streams).then_some(left as usize)
    }

    /// Marks the sequence if this is the place, or the last one before it where a chunk ends.
    pub(super) fn mark_if_wanted(&mut self) {
        let chunk = u32::try_from(self.workspace.chunk()).unwrap_or(u32::MAX);
        if self.position <= self.mark_wanted
            && (self.until_mark().is_none() && self.position.saturating_add(chunk) > self.mark_wanted)
        {
            self.mark_wanted = 0;
            self.mark();
        }
    }
}

/// The last two prompts: one that goes on from the last, and one that goes on from the one before (an answer that is
/// asked for again).
const MARKS_MAX: usize = 2;
