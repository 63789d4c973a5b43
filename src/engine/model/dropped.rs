//! What was dropped of a sequence.

use crate::engine::{backend::Gap, spec::AttentionSpec};

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
            back: self.back.get(first..first + self.angles).unwrap_or_default().into(),
        })
    }
}
