//! Dropping of the oldest tokens of a sequence.
//!
//! ```text
//!   read:      s s s s . . . . . . . a b c        s: the beginning, which stays; in whole blocks
//!   dropped:   s s s s         . . . a b c        three blocks of the oldest tokens behind it
//!   as if:     s s s s . . . a b c
//! ```
//!
//! Positions are those within the cache (<https://arxiv.org/abs/2309.17453>): what comes after the gap moves up. Rotary
//! positions tell only how far two tokens are from each other, so that no keys have to be turned for it, as
//! llama.cpp's context shift does. Tokens keep the angles at which they were read, and a query is turned back by the
//! length of the gap when it meets what lies before it. So dropping moves nothing, loses no precision, and is the same
//! for every KV type. Recurrent layers go on with the state that they have, which remembers what was dropped.

use super::Model;
use crate::{engine::spec::POSITIONS_MAX, units::Tokens};

impl Model {
    /// Allows that the oldest tokens behind the first `sinks` are dropped where the KV capacity is used up or becomes
    /// smaller, or forbids it. The first ones are rounded up to whole KV blocks.
    pub const fn allow_dropping(&mut self, sinks: Option<Tokens>) {
        self.dropped.sinks = match sinks {
            Some(sinks) => Some(sinks.get()),
            None => None,
        };
    }

    /// Tokens of the sequence that were dropped, and how many stayed before them.
    #[must_use]
    pub const fn dropped(&self) -> (Tokens, Tokens) {
        (Tokens::new(self.dropped.tokens), Tokens::new(self.dropped.after))
    }

    /// Tokens that could be dropped now.
    #[must_use]
    pub fn droppable(&self) -> Tokens {
        let blocks = self.droppable_blocks().map_or(0, |(_, blocks)| blocks);
        Tokens::new(blocks.saturating_mul(self.block()))
    }

    /// Drops the oldest block, to make room for more; returns how many tokens it held, none where it may not be.
    pub fn make_room(&mut self) -> Tokens {
        Tokens::new(self.drop_oldest(1, self.position))
    }

    /// Drops as much as `used` tokens are too many for `capacity`, as far as that is allowed; returns how many.
    pub(super) fn drop_for(&mut self, capacity: Tokens, used: u32) -> u32 {
        let capacity = capacity.get().div_ceil(self.block()).saturating_mul(self.block());
        self.drop_oldest(used.saturating_sub(capacity), used)
    }

    /// Drops at least `tokens` in whole blocks, or as many as may be, of a cache that holds `used`.
    fn drop_oldest(&mut self, tokens: u32, used: u32) -> u32 {
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
        self.turn_back();
        // Nothing before can be gone back to, and no prompt goes on from here.
        self.lineage.reset();
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

    /// Computes what turns queries back by the length of the gap.
    fn turn_back(&mut self) {
        let attention = &self.spec.attention;
        let factors = self.weights.rope_factors();
        let rotations = [Some((attention.rotation, factors)), attention.local.map(|local| (local.rotation, None))];
        let tables = self.dropped.back.chunks_exact_mut(attention.rotary.max(2));
        for (table, (mut rotation, factors)) in tables.zip(rotations.into_iter().flatten()) {
            // What stretches queries has done so already.
            rotation.magnitude = 1.0;
            rotation.fill(self.dropped.tokens as usize, factors, table);
            for pair in table.chunks_exact_mut(2) {
                if let [_, sine] = pair {
                    *sine = -*sine;
                }
            }
        }
    }
}
