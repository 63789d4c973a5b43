//! Gap in a sequence whose oldest tokens were dropped.
//!
//! ```text
//!   read:      s s s s . . . . . . . a b c        s: attention sinks, kept, in whole blocks
//!   dropped:   s s s s         . . . a b c        the three oldest blocks after the sinks
//!   as if:     s s s s . . . a b c
//! ```
//!
//! Positions are those within the cache (<https://arxiv.org/abs/2309.17453>): tokens after the gap move up. Rotary
//! positions encode only the distance between two tokens, so keys need no rotation as in llama.cpp's context shift:
//! tokens keep the angles at which they were read, and a query is rotated back by the length of the gap when it attends
//! to tokens before it. Dropping therefore moves no data, loses no precision, and is the same for every KV type.
//! Windows are measured in the positions at which tokens were read: a token that has left the window does not return.
//! Recurrent layers keep their state, which includes the dropped tokens.

use crate::{
    backend::Gap,
    spec::{AttentionSpec, Rotation},
};

/// Dropped tokens of the sequence, and the rule for dropping more.
#[derive(Debug)]
pub(super) struct Dropped {
    /// Tokens at the beginning that are kept; `None` if dropping is not allowed.
    pub(super) sinks: Option<u32>,
    /// Tokens before the gap.
    pub(super) after: u32,
    /// Length of the gap.
    pub(super) tokens: u32,
    /// Rotations of queries by minus the length of the gap, followed by those of local layers, if any.
    pub(super) back: Vec<f32>,
    /// Floats of the first of the two tables.
    pub(super) angles: usize,
}

impl Dropped {
    pub(super) fn none(attention: &AttentionSpec) -> Self {
        Self {
            sinks: None,
            after: 0,
            tokens: 0,
            // Allocated at the start, so that a shed that drops tokens does not allocate.
            back: vec![0.0; attention.kinds().map(|kind| kind.rotary).sum()],
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

    /// Returns the gap for global or `local` layers.
    pub(super) fn gap(&self, local: bool) -> Option<Gap<'_>> {
        let (whole, others) = self.back.split_at_checked(self.angles).unwrap_or_default();
        (self.tokens > 0).then(|| Gap {
            after: self.after as usize,
            back: if local { others } else { whole }.into(),
        })
    }

    /// Number of cached tokens that the token at `position` sees through a window of `window` tokens, itself included.
    /// The window counts the positions at which tokens were read, since cells of older tokens were not kept.
    pub(super) fn window(&self, position: usize, window: usize) -> usize {
        let (after, gap) = (self.after as usize, self.tokens as usize);
        let end = position + 1;
        if gap == 0 || end >= after + window {
            return window;
        }
        end.saturating_sub((end + gap).saturating_sub(window).min(after))
    }

    /// Computes the rotation of queries by minus the length of the gap.
    pub(super) fn turn_back(&mut self, (attention, factors): Turn<'_>) {
        let mut left = self.back.as_mut_slice();
        for (number, kind) in attention.kinds().enumerate() {
            let Some((table, rest)) = left.split_at_mut_checked(kind.rotary) else {
                return;
            };
            left = rest;
            // Queries already carry the magnitude.
            let rotation = Rotation {
                magnitude: 1.0,
                ..kind.rotation
            };
            let factors = factors.filter(|_| number == 0);
            rotation.fill(self.tokens as usize, factors, table);
            for pair in table.chunks_exact_mut(2) {
                if let [_, sine] = pair {
                    *sine = -*sine;
                }
            }
        }
    }
}

/// Inputs of a rotation: the attention's angles, and their frequency factors, if any.
pub(super) type Turn<'a> = (&'a AttentionSpec, Option<&'a [f32]>);
