//! KV cache of a draft block, and the states from which it can draft.

use std::ops::Range;

use crate::{
    arena::Backing,
    backend::{Backend, Cells},
    error::LoadErrorKind,
    kv::KvCache,
    shape,
    spec::Spec,
};
use cotenant_units::Bytes;

/// KV cache of the draft block, and where the states are from which it can draft.
pub(super) struct DraftKv {
    cache: KvCache,
    /// Tokens in the cache.
    pub(super) tokens: u32,
    /// Position in the sequence behind the last of them.
    pub(super) end: u32,
    /// Rows of the workspace with the states of the last tokens of a pass, and the position behind them.
    pub(super) states: Option<(Range<usize>, u32)>,
}

impl DraftKv {
    /// Allocates the cache of a model's draft block, `bytes` in all; nothing if they are none.
    pub(super) fn new(
        backend: &mut dyn Backend,
        spec: &Spec,
        bytes: Bytes,
    ) -> Result<Option<Self>, LoadErrorKind> {
        let Some((shape, tokens)) = shape::draft_kv(spec).filter(|_| bytes > Bytes::ZERO) else {
            return Ok(None);
        };
        let refused = |source| LoadErrorKind::Allocate {
            what: "the KV cache of the draft block".to_owned(),
            bytes,
            source,
        };
        let cache = KvCache::new(backend, shape, tokens.get(), Backing::Now);
        let mut cache = cache.map_err(refused)?;
        let resized = cache.resize(backend, tokens, 0);
        resized.map_err(|error| refused(std::io::Error::other(error)))?;
        Ok(Some(Self {
            cache,
            tokens: 0,
            end: 0,
            states: None,
        }))
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.cache.bytes()
    }

    pub(super) fn resident(&self) -> Bytes {
        self.cache.resident()
    }

    /// Returns the cache as the operand of the block's attention.
    pub(super) fn cells(&self) -> Cells<'_> {
        self.cache.cells(false)
    }

    /// Begins another answer.
    pub(super) const fn forget(&mut self) {
        self.tokens = 0;
    }

    /// Records which rows of the workspace hold the states of the last tokens before `end`; none, without rows.
    pub(super) fn note_states(&mut self, rows: Option<Range<usize>>, end: u32) {
        self.states = rows.map(|rows| (rows, end));
    }

    /// Records that `rows` more tokens are about to be written.
    pub(super) fn touch(&mut self, rows: u32) {
        let end = self.tokens.saturating_add(rows);
        self.cache.touch(end);
        self.cache.write_up_to(end);
    }

    /// Makes room for `rows` tokens from position `first` on, and `more` after them.
    pub(super) fn begin(&mut self, first: u32, rows: u32, more: u32) {
        let end = self.tokens.saturating_add(rows).saturating_add(more);
        let is_full = end > self.cache.capacity().get();
        if is_full || first < self.end {
            self.tokens = 0;
        }
    }
}
