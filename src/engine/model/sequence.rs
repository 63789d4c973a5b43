//! Sequence of tokens: KV cache, recurrent state, and what of both a later prompt can go on from.
//!
//! Attention layers forget nothing, so that a sequence can be cut back to any length. A recurrent state cannot be taken
//! back; it is copied where another prompt is likely to part from this one, and the copy taken up again.
//!
//! Copies live inside what is leased for the KV cache, where no token has been yet. So they cost no lease of their own,
//! and are the first to go: when tokens or a smaller capacity need the place, the oldest is given back to the kernel.

use super::dropped::{Dropped, Turn};
use crate::{
    engine::{
        backend::{Backend, DeviceError},
        kv::KvCache,
        spec::{AttentionSpec, POSITIONS_MAX},
        state::{RecurrentState, Snapshot},
    },
    policy::kv_type::KvType,
    units::{Bytes, Tokens},
};

/// The sequence that a model goes on from.
pub(super) struct Sequence {
    pub(super) cache: KvCache,
    pub(super) state: RecurrentState,
    /// Copies of the state that this sequence can be cut back to, by position.
    snapshots: Vec<Snapshot>,
    /// Where the next pass is to mark the sequence; 0 for nowhere.
    pub(super) mark_wanted: u32,
    /// Tokens in the cache: those that were dropped do not count.
    pub(super) position: u32,
    pub(super) dropped: Dropped,
    /// The smallest type that any token of the sequence has been kept in.
    pub(super) kv_precision: KvType,
    /// After a pass that did not finish.
    pub(super) lost: bool,
    /// Why the device computes no more, found in a call that returns no error; the next pass does.
    pub(super) broken: Option<DeviceError>,
}

impl Sequence {
    pub(super) fn new(cache: KvCache, state: RecurrentState, attention: &AttentionSpec, kv_precision: KvType) -> Self {
        Self {
            cache,
            state,
            snapshots: Vec::new(),
            mark_wanted: 0,
            position: 0,
            dropped: Dropped::none(attention),
            kv_precision,
            lost: false,
            broken: None,
        }
    }

    /// Keeps an error for the next pass.
    fn note(&mut self, result: Result<(), DeviceError>) {
        if let Err(error) = result {
            self.broken.get_or_insert(error);
        }
    }

    /// Held bytes that no page backs yet: never touched, and not taken by copies.
    pub(super) fn untouched(&self) -> Bytes {
        self.cache.untouched().saturating_sub(self.marks_bytes())
    }

    /// Pages of it that are in memory.
    pub(super) fn resident(&self) -> Bytes {
        let marks: Bytes = self.snapshots.iter().map(Snapshot::resident).sum();
        self.cache.resident() + marks + self.state.resident()
    }

    /// Drops the sequence.
    pub(super) fn reset(&mut self, backend: &mut dyn Backend) {
        self.position = 0;
        self.dropped.forget();
        self.cache.put_in_order();
        self.kv_precision = self.cache.kind();
        self.snapshots.clear();
        let reset = self.state.reset(backend);
        self.note(reset);
        self.lost = false;
    }

    /// Goes back to where the last copy was taken; to the start where there is none.
    fn go_back(&mut self, backend: &mut dyn Backend) {
        let Some(snapshot) = self.snapshots.last() else {
            self.reset(backend);
            return;
        };
        let (position, restored) = (snapshot.position(), self.state.restore(backend, snapshot));
        self.position = position;
        self.note(restored);
    }

    /// Cuts the sequence back to the longest beginning of at most `tokens` tokens that can be gone on from. Nothing is
    /// left of a sequence that was lost, nor of one that is kept in a larger type than it has been converted to before.
    pub(super) fn keep(&mut self, backend: &mut dyn Backend, tokens: u32) {
        // What a conversion has lost is read again as soon as there is place for it: an answer does not depend on what
        // was shed before it.
        if self.lost || self.kv_precision < self.cache.kind() {
            self.reset(backend);
        } else if tokens < self.position {
            if self.needs_marks() {
                self.snapshots.retain(|snapshot| snapshot.position() <= tokens);
                self.go_back(backend);
            } else {
                self.position = tokens;
            }
        }
    }

    /// Takes up a sequence whose last pass was broken off, as far as it can be gone on from: attention layers have every
    /// chunk that was finished, recurrent ones their last copy.
    pub(super) fn recover(&mut self, backend: &mut dyn Backend) {
        self.lost = false;
        self.mark_wanted = 0;
        if self.needs_marks() {
            self.go_back(backend);
        }
    }

    /// Whether [`Self::mark`] is of any use: a model without recurrent layers can be cut back anywhere.
    pub(super) fn needs_marks(&self) -> bool {
        self.state.bytes() > Bytes::ZERO
    }

    /// Makes it possible to cut the sequence back to where it is now, if there is place for that.
    pub(super) fn mark(&mut self, backend: &mut dyn Backend) {
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
            match self.state.room(backend) {
                Ok(room) => room,
                // Without it the next prompt is read again; that is no fault of this one.
                Err(_) => return,
            }
        };
        let (snapshot, copied) = self.state.snapshot(backend, room, self.position);
        self.note(copied);
        self.snapshots.push(snapshot);
    }

    /// Tokens up to the place that is to be marked, where the next chunk may end for it: not while it
    /// `streams`, since another chunk would read the layers once more.
    pub(super) fn until_mark(&self, streams: bool) -> Option<usize> {
        let left = self.mark_wanted.checked_sub(self.position).filter(|&left| left > 0)?;
        (self.needs_marks() && !streams).then_some(left as usize)
    }

    /// Marks the sequence if this is the place, or the last one before it where a chunk ends.
    pub(super) fn mark_if_wanted(&mut self, backend: &mut dyn Backend, chunk: usize, streams: bool) {
        let chunk = u32::try_from(chunk).unwrap_or(u32::MAX);
        if self.position <= self.mark_wanted
            && (self.until_mark(streams).is_none() && self.position.saturating_add(chunk) > self.mark_wanted)
        {
            self.mark_wanted = 0;
            self.mark(backend);
        }
    }

    /// Tokens that could be dropped now.
    pub(super) fn droppable(&self) -> Tokens {
        let blocks = self.droppable_blocks().map_or(0, |(_, blocks)| blocks);
        Tokens::new(blocks.saturating_mul(self.block()))
    }

    /// Drops as much as `used` tokens are too many for `capacity`, as far as that is allowed; returns how many.
    pub(super) fn drop_for(&mut self, turn: Turn<'_>, capacity: Tokens, used: u32) -> u32 {
        let capacity = capacity.get().div_ceil(self.block()).saturating_mul(self.block());
        self.drop_oldest(turn, used.saturating_sub(capacity), used)
    }

    /// Drops at least `tokens` in whole blocks, or as many as may be, of a cache that holds `used`.
    pub(super) fn drop_oldest(&mut self, turn: Turn<'_>, tokens: u32, used: u32) -> u32 {
        let block = self.block();
        let Some((first, most)) = self.droppable_blocks() else {
            return 0;
        };
        let blocks = tokens.div_ceil(block).min(most);
        if blocks == 0 {
            return 0;
        }
        let tokens = blocks * block;
        self.cache.drop_blocks(first as usize, blocks as usize, used);
        self.position -= tokens;
        self.dropped.after = first * block;
        self.dropped.tokens += tokens;
        self.dropped.turn_back(turn);
        // Nothing before can be gone back to, and no prompt goes on from here.
        self.snapshots.clear();
        self.mark_wanted = 0;
        tokens
    }

    /// The first block that may be dropped, and how many from there on: neither the one that is being written nor the
    /// last one that is full.
    fn droppable_blocks(&self) -> Option<(u32, u32)> {
        let block = self.block();
        let first =
            if self.dropped.tokens > 0 { self.dropped.after / block } else { self.dropped.sinks?.div_ceil(block) };
        self.dropped.sinks?;
        let most = (self.position / block).saturating_sub(first.saturating_add(1));
        let reach = (POSITIONS_MAX - self.dropped.tokens.min(POSITIONS_MAX)) / block;
        Some((first, most.min(reach)))
    }

    fn block(&self) -> u32 {
        self.cache.shape().block_tokens.get().max(1)
    }

    /// Gives up the oldest copies until the rest have place beside the tokens; returns what the kernel had of them.
    pub(super) fn fit_marks(&mut self, backend: &mut dyn Backend) -> Bytes {
        let mut freed = Bytes::ZERO;
        while self.marks_bytes() > self.cache.untouched() {
            let all = backend.mark();
            let finished = backend.wait(all);
            self.note(finished);
            freed += self.snapshots.remove(0).release();
        }
        freed
    }

    /// Memory of all copies.
    pub(super) fn marks_bytes(&self) -> Bytes {
        self.snapshots.iter().map(Snapshot::bytes).sum()
    }
}

/// The last two prompts: one that goes on from the last, and one that goes on from the one before (an answer that is
/// asked for again).
const MARKS_MAX: usize = 2;
