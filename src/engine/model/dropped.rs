//! Gap in a sequence whose oldest tokens were dropped.
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
//! for every KV type. A window is one of positions at which tokens were read: what it had passed stays out of it. Recurrent
//! layers go on with the state that they have, which remembers what was dropped.

use crate::{backend::Gap, spec::AttentionSpec};

/// What was dropped of the sequence, and what may be.
#[derive(Debug)]
pub(super) struct Dropped {
    /// Tokens at the beginning that stay; `None` where nothing may be dropped.
    pub(super) sinks: Option<u32>,
    /// Tokens before the gap.
    pub(super) after: u32,
    /// Length of the gap.
    pub(super) tokens: u32,
    /// What turns queries back by it; behind it the same for local layers, where there are any.
    pub(super) back: Vec<f32>,
    /// Floats of one of the two.
    pub(super) angles: usize,
}

impl Dropped {
    pub(super) fn none(attention: &AttentionSpec) -> Self {
        let tables = 1 + usize::from(attention.local.is_some());
        Self {
            sinks: None,
            after: 0,
            tokens: 0,
            // Allocated at the start, so that dropping for a shed allocates nothing.
            back: vec![0.0; attention.rotary * tables],
            angles: attention.rotary,
        }
    }

    pub(super) const fn forget(&mut self) {
        (self.after, self.tokens) = (0, 0);
    }

    /// Length of the gap.
    pub(super) const fn tokens(&self) -> u32 {
        self.tokens
    }

    /// The gap as global or local layers need it.
    pub(super) fn gap(&self, local: bool) -> Option<Gap<'_>> {
        let first = if local { self.angles } else { 0 };
        (self.tokens > 0).then(|| Gap {
            after: self.after as usize,
            back: self
                .back
                .get(first..first + self.angles)
                .unwrap_or_default()
                .into(),
        })
    }

    /// Tokens of the cache that the one at `position` sees, itself included, through a window: by the positions at which they
    /// were read, as what was farther away then has not been kept.
    pub(super) fn window(&self, position: usize, window: usize) -> usize {
        let (after, gap) = (self.after as usize, self.tokens as usize);
        let end = position + 1;
        if gap == 0 || end >= after + window {
            return window;
        }
        end.saturating_sub((end + gap).saturating_sub(window).min(after))
    }

    /// Computes what turns queries back by the length of the gap.
    pub(super) fn turn_back(&mut self, (attention, factors): Turn<'_>) {
        let rotations = [
            Some((attention.rotation, factors)),
            attention.local.map(|local| (local.rotation, None)),
        ];
        let tables = self.back.chunks_exact_mut(attention.rotary.max(2));
        for (table, (mut rotation, factors)) in tables.zip(rotations.into_iter().flatten()) {
            // What stretches queries has done so already.
            rotation.magnitude = 1.0;
            rotation.fill(self.tokens as usize, factors, table);
            for pair in table.chunks_exact_mut(2) {
                if let [_, sine] = pair {
                    *sine = -*sine;
                }
            }
        }
    }
}

/// What queries are turned back by: the angles of the attention, and what stretches them.
pub(super) type Turn<'a> = (&'a AttentionSpec, Option<&'a [f32]>);
