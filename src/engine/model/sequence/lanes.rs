//! Lanes: conversations whose answers are computed together with the sequence, or that are restored from the disk.

use std::{mem, ops::Range, time::Instant};

use super::{Restored, Sequence};
use crate::{
    backend::{Backend, Span},
    model::{
        marks::{Mark, take_spare},
        parked::{Asked, Conversation, LOST_MIN, Lane, Near, Parked},
    },
};
use cotenant_policy::kv_type::KvType;

impl Sequence {
    /// Begins to restore a saved conversation of these tokens, as a lane. Returns it, and the number of tokens whose
    /// blocks it shares with another one.
    pub(crate) fn begin_restore(
        &mut self,
        conversation: Conversation,
        tokens: &[u32],
        precision: KvType,
    ) -> (Lane, usize) {
        let asked = Asked {
            client: conversation.client.as_ref(),
            prompt: tokens,
            request: conversation.request,
        };
        let kind = self.cache.kind();
        let is_precise = |near: &Near| {
            let parked = self.parked.get(near.number);
            parked.is_some_and(|parked| parked.kv_precision >= kind)
        };
        let near = self.parked.nearest(asked, false).filter(is_precise);
        let blocks = near.map_or(0, |near| near.common / self.block());
        let number = near.map(|near| near.number);
        self.cache.park_shared(number, blocks as usize);
        let shared = (blocks * self.block()) as usize;
        let lane = self.parked.push(Parked {
            conversation,
            tokens: tokens.get(..shared).unwrap_or_default().to_vec(),
            marks: Vec::new(),
            kv_precision: precision,
            is_superseded: false,
            turn: 0,
            since: Instant::now(),
            is_lane: false,
            state: None,
        });
        self.parked.go_on_with_last(None);
        (lane, shared)
    }

    /// Finds a place for a saved copy of a lane that is restored with `tokens`; with `evicts`, other conversations are
    /// evicted for it.
    pub(crate) fn restore_mark(
        &mut self,
        (lane, tokens): (Lane, &[u32]),
        (position, is_fork): (u32, bool),
        (windows, places): ((usize, usize, usize), usize),
        evicts: bool,
    ) -> Restored {
        let (first, end, slots) = windows;
        let kept = self.kept();
        let prefix = tokens.get(..position as usize).unwrap_or_default();
        let parked = self.parked.of_lane(lane);
        let client = parked.and_then(|parked| parked.conversation.client.clone());
        let shared = self.parked.copy_at(client.as_ref(), prefix).filter(|copy| {
            let (_, windows, its) = self.cache.copy_places(copy);
            (windows, its) == (first..end, slots)
        });
        let shared = shared.cloned();
        let is_shared = shared.is_some();
        let copy = shared.or_else(|| {
            loop {
                let state = self.state.memory();
                let windows = (first..end, slots);
                let copy = self.cache.place_copy(kept, state, windows, places);
                if copy.is_some() || !(evicts && self.give_up_one()) {
                    return copy;
                }
                self.cache.cut(kept);
            }
        });
        let (Some(copy), Some(parked)) = (copy, self.parked.of_lane_mut(lane)) else {
            return Restored::NoPlace;
        };
        parked.marks.push(Mark::of(position, copy.clone(), is_fork));
        if is_shared {
            Restored::Shared
        } else {
            Restored::Placed(copy)
        }
    }

    /// Finds places for `tokens` more tokens of a lane; with `evicts`, other conversations are evicted for them.
    pub(crate) fn restore_places(&mut self, lane: Lane, tokens: u32, evicts: bool) -> bool {
        let kept = self.kept();
        if evicts {
            return self.make_places([(lane, tokens)], kept);
        }
        let found = self.lane(lane);
        found.is_some_and(|(number, length)| {
            let end = length.saturating_add(tokens);
            self.cache.extend(number, end, kept)
        })
    }

    /// Returns the place of a block of a lane.
    pub(crate) fn place_of(&self, lane: Lane, block: usize) -> Option<usize> {
        let number = self.parked.number_of(lane)?;
        self.cache.parked_places(number).get(block).copied()
    }

    /// Evicts a lane that was not restored.
    pub(crate) fn abandon(&mut self, lane: Lane) {
        if let Some(number) = self.parked.number_of(lane) {
            self.forget(number);
        }
        self.release_copies();
        self.cache.cut(self.position);
    }

    /// Makes the sequence, whose tokens are `held`, a lane, and begins a new sequence. Returns `None` if the sequence
    /// is lost or tokens of it were dropped, or if there is no place for a copy of its state and windows.
    pub(crate) fn set_aside(&mut self, backend: &mut dyn Backend, held: &[u32]) -> Option<Lane> {
        let is_whole = !self.lost
            && self.dropped.tokens() == 0
            && held.len() == self.position as usize
            && self.has_window(self.position);
        if !is_whole {
            return None;
        }
        let state = if self.has_copies() {
            let windows = self.first_seen(self.position)..self.position;
            let saved = self.save(backend, windows, true);
            Some(self.noted(saved)?)
        } else {
            None
        };
        let lane = self.push(held, false);
        self.parked.go_on_with_last(state);
        self.conversation = Conversation::default();
        self.marks.clear();
        self.kv_precision = self.cache.kind();
        self.position = 0;
        self.cache.cut(0);
        let reset = self.state.reset(backend);
        self.note(reset);
        Some(lane)
    }

    /// Whether a lane has lost its state and cannot continue.
    pub(crate) fn is_lost(&self, lane: Lane) -> bool {
        let parked = self.parked.of_lane(lane);
        self.has_copies() && parked.is_some_and(|parked| parked.state.is_none())
    }

    /// Discards the state of a lane, after a pass with its tokens that did not complete.
    pub(crate) fn lose(&mut self, lane: Lane) {
        if let Some(parked) = self.parked.of_lane_mut(lane) {
            parked.state = None;
        }
        self.release_copies();
    }

    /// Returns the stored blocks of a windowed layer in the window of a lane's token at `position`, part by part, each
    /// with its target in the working area; with `is_written`, only the block of that token.
    pub(crate) fn aside_window(
        &self,
        lane: Lane,
        number: usize,
        position: (u32, bool),
    ) -> Option<Vec<(Span, Span)>> {
        let parked = self.parked.of_lane(lane)?;
        let copy = (parked.state.as_ref()?, self.state.memory());
        Some(self.cache.window_of_copy(copy, number, position))
    }

    /// Returns the stored parts of a layer of a lane's state, or of its convolution state, each with its target in the
    /// working area.
    pub(crate) fn aside_layer(
        &self,
        lane: Lane,
        layer: usize,
        is_whole: bool,
    ) -> Option<Vec<(Span, Span)>> {
        let (bytes, area) = self.state.layer_of_copy(layer, is_whole)?;
        let mut at = 0;
        let parts = self.parts_of_lane(lane, bytes)?.into_iter().map(|part| {
            let view = area.part(at, part.len());
            at += part.len();
            (part, Span::Buffer(view))
        });
        Some(parts.collect())
    }

    /// Returns the stored parts of the matrices of a layer of a lane's state.
    pub(crate) fn matrices_of_lane(&self, lane: Lane, layer: usize) -> Option<Vec<Span>> {
        self.parts_of_lane(lane, self.state.matrices_of_copy(layer)?)
    }

    fn parts_of_lane(&self, lane: Lane, bytes: Range<usize>) -> Option<Vec<Span>> {
        let parked = self.parked.of_lane(lane)?;
        Some(self.cache.parts_of(parked.state.as_ref()?, bytes))
    }

    /// Makes a lane the sequence, and parks the previous sequence, whose tokens are `held`. Returns the lane's tokens.
    pub(crate) fn resume(
        &mut self,
        backend: &mut dyn Backend,
        held: &[u32],
        lane: Lane,
    ) -> Option<Vec<u32>> {
        if self.position >= LOST_MIN {
            self.park(backend, held, 0);
        }
        if self.is_lost(lane) {
            return None;
        }
        let number = self.parked.number_of(lane)?;
        let parked = self.parked.get_mut(number)?;
        let tokens = mem::take(&mut parked.tokens);
        self.marks.take_up(mem::take(&mut parked.marks));
        if let Some(state) = parked.state.take() {
            let restored = self.cache.restore(backend, &state, self.state.memory());
            self.note(restored);
        }
        let parked = self.parked.get_mut(number)?;
        self.conversation = parked.conversation.clone();
        self.kv_precision = parked.kv_precision;
        self.position = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        self.lost = false;
        self.dropped.forget();
        self.cache.take_up(number, self.position);
        self.forget(number);
        self.release_copies();
        self.cache.cut(self.position);
        Some(tokens)
    }

    /// Ends the answer of a lane, which stays parked if it can be continued.
    pub(crate) fn leave(&mut self, lane: Lane) {
        let (number, has_copies) = (self.parked.number_of(lane), self.has_copies());
        let Some(parked) = self.parked.of_lane_mut(lane) else {
            return;
        };
        parked.is_lane = false;
        parked.since = Instant::now();
        if let Some(state) = parked.state.take() {
            let end = parked.length();
            take_spare(&mut parked.marks, u32::MAX);
            parked.marks.push(Mark::of(end, state, false));
        }
        if let Some(number) = number.filter(|_| has_copies && parked.marks.is_empty()) {
            self.forget(number);
        }
        self.release_copies();
    }

    /// Reserves places for more tokens of each lane, while the sequence keeps those of `kept` tokens; returns whether
    /// there are enough.
    pub(crate) fn make_places(
        &mut self,
        lanes: impl IntoIterator<Item = (Lane, u32)>,
        kept: u32,
    ) -> bool {
        lanes.into_iter().all(|(lane, tokens)| {
            loop {
                let Some((number, length)) = self.lane(lane) else {
                    return false;
                };
                let end = length.saturating_add(tokens);
                if self.cache.extend(number, end, kept) {
                    return true;
                }
                if !(self.give_up_one() || self.pop_mark_of_lane()) {
                    return false;
                }
                self.cache.cut(kept);
            }
        })
    }

    /// Returns a lane's number among the parked conversations, and its length.
    pub(crate) fn lane(&self, lane: Lane) -> Option<(usize, u32)> {
        let number = self.parked.number_of(lane)?;
        Some((number, self.parked.get(number)?.length()))
    }

    /// The smallest KV type that a lane's tokens have been stored in.
    pub(crate) fn precision_of(&self, lane: Lane) -> Option<KvType> {
        Some(self.parked.of_lane(lane)?.kv_precision)
    }

    /// Records computed tokens of a lane.
    pub(crate) fn extend(&mut self, lane: Lane, tokens: &[u32]) {
        if let Some(parked) = self.parked.of_lane_mut(lane) {
            parked.tokens.extend_from_slice(tokens);
            if let Some(copy) = &mut parked.state {
                let length = u32::try_from(parked.tokens.len()).unwrap_or(u32::MAX);
                self.cache.extend_copy(copy, length);
            }
        }
    }

    /// Removes the last tokens of a lane, or of the sequence, of a model that can be cut back anywhere.
    pub(crate) fn take_back(&mut self, lane: Option<Lane>, tokens: u32) {
        let Some(lane) = lane else {
            self.position = self.position.saturating_sub(tokens);
            self.cache.cut(self.position);
            return;
        };
        if let Some(parked) = self.parked.of_lane_mut(lane) {
            let left = parked.tokens.len().saturating_sub(tokens as usize);
            parked.tokens.truncate(left);
        }
    }
}
