//! Sequence of tokens: KV cache, recurrent state, and what of both a later prompt can go on from.
//!
//! Attention layers forget nothing, so that a sequence can be cut back to any length; those with windows to where they have
//! the window still, or a copy of it. A recurrent state cannot be taken
//! back; it is copied where another prompt is likely to part from this one, and the copy taken up again.
//!
//! Copies lie in the KV cache, at places that no block has, as do the blocks of conversations that are parked. So they cost no
//! lease of their own; when tokens or a smaller capacity need the place, those that are missed least are given up.

use std::{ops::Range, time::Instant};

use super::{
    dropped::{Dropped, Turn},
    marks::{Kind, Mark, Marks, take_spare},
    parked::{
        AllParked, Asked, Conversation, Kept, LOST_MIN, Lane, Near, Parked, common_prefix,
        last_within,
    },
};
use crate::{
    backend::{Backend, DeviceError, Span},
    kv::{Copy as KvCopy, KvCache, KvError, Resized},
    spec::{AttentionSpec, POSITIONS_MAX},
    state::RecurrentState,
};
use cotenant_policy::kv_type::KvType;
use cotenant_units::{Bytes, Tokens};

/// The sequence that a model goes on from.
pub(super) struct Sequence {
    pub(super) cache: KvCache,
    pub(super) state: RecurrentState,
    /// Copies of the state that this sequence can be cut back to.
    pub(super) marks: Marks,
    /// Tokens in the cache: those that were dropped do not count.
    pub(super) position: u32,
    /// How many it comes to by the pass under way.
    needed: u32,
    /// How many it comes to by a prompt that is read in several passes, with those of others between them: their places are kept
    /// for it.
    expected: u32,
    pub(super) dropped: Dropped,
    /// Tokens that layers with windows see.
    window: Option<u32>,
    /// The smallest type that any token of the sequence has been kept in.
    pub(super) kv_precision: KvType,
    pub(super) conversation: Conversation,
    /// The others, which it may have tokens in common with.
    parked: AllParked,
    /// After a pass that did not finish.
    pub(super) lost: bool,
    /// Why the device computes no more, found in a call that returns no error; the next pass does.
    pub(super) broken: Option<DeviceError>,
}

impl Sequence {
    pub(super) fn new(
        cache: KvCache,
        state: RecurrentState,
        attention: &AttentionSpec,
        kv_precision: KvType,
    ) -> Self {
        Self {
            cache,
            state,
            marks: Marks::default(),
            position: 0,
            needed: 0,
            expected: 0,
            dropped: Dropped::none(attention),
            window: attention
                .local
                .and_then(|local| local.window)
                .and_then(|window| u32::try_from(window).ok()),
            kv_precision,
            conversation: Conversation::default(),
            parked: AllParked::default(),
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

    /// Pages of it that are in memory.
    pub(super) fn resident(&self) -> Bytes {
        self.cache.resident() + self.state.resident()
    }

    /// Drops the sequence.
    pub(super) fn reset(&mut self, backend: &mut dyn Backend) {
        self.position = 0;
        self.dropped.forget();
        self.marks.clear();
        self.release_copies();
        self.cache.put_in_order();
        self.kv_precision = self.cache.kind();
        let reset = self.state.reset(backend);
        self.note(reset);
        self.lost = false;
    }

    /// Goes back to where the last copy was taken; to the start where there is none.
    fn go_back(&mut self, backend: &mut dyn Backend) {
        let Some(mark) = self.marks.last() else {
            self.reset(backend);
            return;
        };
        self.position = mark.position;
        let restored = self.cache.restore(backend, &mark.copy, self.state.memory());
        self.cache.cut(self.position);
        self.note(restored);
    }

    /// The conversation that has the most in common with a prompt becomes the sequence, as far as that can be gone on from;
    /// the sequence until then, with the tokens `held`, is parked where it would be missed. Returns where the prompt parts
    /// from what another conversation goes on with.
    pub(super) fn select(
        &mut self,
        backend: &mut dyn Backend,
        held: &[u32],
        asked: Asked<'_>,
    ) -> Option<u32> {
        // At least one token must be left to compute, since the scores after the sequence are not kept.
        let most = u32::try_from(asked.prompt.len().saturating_sub(1)).unwrap_or(u32::MAX);
        let is_own = self.conversation.client.as_ref() == asked.client;
        let own = common_prefix(held, asked.prompt).min(most);
        let (mut common, length) = (if is_own { own } else { 0 }, self.position);
        self.needed = length;
        if length - common.min(length) >= LOST_MIN {
            self.park(backend, held, common);
        }
        let start = self.reach(common);
        let nearest = self.parked.nearest(asked, self.has_copies());
        let nearest = nearest.filter(|near| (near.start, near.common) > (start, common));
        let parts = if let Some(near) = nearest {
            common = near.common;
            self.take_up(backend, near)
        } else {
            let parts = common < length.min(self.conversation.end);
            self.keep(backend, common);
            parts
        };
        self.conversation.client = asked.client.cloned();
        self.conversation.request = asked.request;
        while self.parked.is_beyond(self.cache.capacity()) && self.forget_one() {}
        self.release_copies();
        self.cache.cut(self.position);
        parts.then_some(common)
    }

    /// How many of the first `common` tokens the sequence can be cut back to.
    fn reach(&self, common: u32) -> u32 {
        if common >= self.position || !self.needs_marks() && self.has_window(common) {
            common
        } else {
            last_within(self.marks.all(), common)
        }
    }

    /// Parks the sequence, of which the next prompt goes on with so many tokens: unless it cannot be gone on from, or not
    /// without a copy for which there is no place.
    fn park(&mut self, backend: &mut dyn Backend, held: &[u32], common: u32) {
        let is_whole = !self.lost
            && self.dropped.tokens() == 0
            && self.kv_precision >= self.cache.kind()
            && held.len() == self.position as usize;
        let is_superseded = self.conversation.is_superseded_at(common);
        // A copy that is likely to be of no use takes as much memory as any other.
        if !is_whole || self.has_copies() && is_superseded {
            return;
        }
        if self.has_copies() {
            let end = self.conversation.end;
            // Windows had no copy made there, since they do not pass on so soon.
            if !self.needs_marks() && end < self.position && self.has_window(end) {
                self.mark(backend, Kind::End, end);
            }
            self.mark(backend, Kind::End, self.position);
            if self.marks.all().is_empty() {
                return;
            }
        }
        let client = self.conversation.client.clone();
        // What was parked of it before.
        while let Some(number) = self.parked.within(client.as_ref(), held) {
            self.forget(number);
        }
        self.push(held, is_superseded);
    }

    fn push(&mut self, held: &[u32], is_superseded: bool) -> Lane {
        self.cache.park(self.position);
        self.parked.push(Parked {
            conversation: self.conversation.clone(),
            tokens: held.to_vec(),
            marks: self.marks.all().to_vec(),
            kv_precision: self.kv_precision,
            is_superseded,
            turn: 0,
            since: Instant::now(),
            is_lane: false,
            state: None,
        })
    }

    /// What a prompt has in common with a conversation that is parked becomes the sequence, as far as that can be cut back. Says
    /// whether another prompt than its own next one does so.
    fn take_up(&mut self, backend: &mut dyn Backend, near: Near) -> bool {
        let Near {
            number,
            common,
            start,
        } = near;
        let Some(parked) = self.parked.get_mut(number) else {
            return false;
        };
        let length = u32::try_from(parked.tokens.len()).unwrap_or(u32::MAX);
        self.conversation = parked.conversation.clone();
        self.kv_precision = parked.kv_precision;
        let is_lane = parked.is_lane;
        parked.is_superseded = !is_lane && self.conversation.is_superseded_at(common);
        self.marks.take_up(parked.marks.clone());
        self.cache.take_up(number, start);
        (self.position, self.lost) = (start, false);
        self.dropped.forget();
        if length - common.min(length) < LOST_MIN && !is_lane {
            self.forget(number);
        }
        if self.has_copies() {
            self.marks.part_at(common);
            self.go_back(backend);
        }
        common < length.min(self.conversation.end)
    }

    fn forget(&mut self, number: usize) {
        self.parked.remove(number);
        self.cache.forget(number);
    }

    /// Gives up the conversation that is missed least; `false` where none is parked.
    fn forget_one(&mut self) -> bool {
        let number = self.parked.least_useful();
        if let Some(number) = number {
            self.forget(number);
        }
        number.is_some()
    }

    /// Gives up what is missed least of copies and parked conversations, but no copy that the sequence is likely to go on from;
    /// `false` where there is nothing. Places are free once blocks are laid out again.
    fn give_up_one(&mut self) -> bool {
        let given_up = self.marks.pop_spare() || self.parked.pop_spare() || self.forget_one();
        self.release_copies();
        given_up
    }

    /// Gives up the copies that no sequence has.
    fn release_copies(&mut self) {
        let marks = self.marks.all().iter().map(|mark| &mark.copy);
        self.cache.keep_copies(marks.chain(self.parked.copies()));
    }

    /// Gives up conversations and copies until the sequence may come to `used` tokens, and makes the block that it ends in its
    /// own. `false` where answers under way beside it leave no place.
    fn make_place(&mut self, backend: &mut dyn Backend, used: u32) -> bool {
        loop {
            let is_shared = self.cache.is_shared(self.position);
            let own = if is_shared { self.block() } else { 0 };
            if self.cache.is_ready(used.saturating_add(own)) {
                if is_shared {
                    let parted = self.cache.part(backend, self.position);
                    self.note(parted);
                }
                return true;
            }
            if !(self.give_up_one() || self.pop_mark()) {
                return false;
            }
            self.cache.cut(self.position);
        }
    }

    /// Gives up a copy of the sequence; `false` where it has none.
    fn pop_mark(&mut self) -> bool {
        let popped = self.marks.pop(|_| true);
        self.release_copies();
        popped
    }

    /// Changes the capacity as [`KvCache::resize`] does; conversations that find no place in it are given up.
    pub(super) fn resize(
        &mut self,
        backend: &mut dyn Backend,
        capacity: Tokens,
        used: u32,
    ) -> Result<Resized, KvError> {
        let capacity = capacity.max(Tokens::new(self.held(used)));
        while !self.cache.fits(capacity, used) && (self.give_up_one() || self.pop_mark()) {}
        self.cache.resize(backend, capacity, used)
    }

    /// Brings the `used` tokens of the sequence, and all that is parked, to another type.
    pub(super) fn convert(
        &mut self,
        backend: &mut dyn Backend,
        kind: KvType,
        used: u32,
    ) -> Result<Resized, KvError> {
        // Copies are of no type that they could be converted from.
        if self.has_copies() {
            while self.forget_one() {}
            self.marks.clear();
            self.parked.forget_copies();
            self.release_copies();
        }
        // What a conversion has lost is read again, as of the sequence itself.
        if kind > self.cache.kind() {
            while let Some(number) = self.parked.less_precise_than(kind) {
                self.forget(number);
            }
        }
        let converted = self.cache.convert(backend, kind, used);
        // Also after a failure: it may have come behind the conversion, or before it.
        let now = self.cache.kind();
        self.parked.converted(now);
        self.kv_precision = if used == 0 {
            now
        } else {
            self.kv_precision.min(now)
        };
        converted
    }

    /// Tokens of capacity that the first `used` tokens of the sequence take, with those whose answers are under way beside it.
    pub(super) fn held(&self, used: u32) -> u32 {
        if !self.parked.has_lanes() {
            return used;
        }
        let is_lane = |number| self.parked.is_lane(number);
        let tokens = self.cache.tokens_held(used, is_lane).max(used);
        tokens.saturating_add(self.cache.tokens_of_copies(self.parked.states()))
    }

    /// Parks the sequence, which has the tokens `held`, where it can be gone on from.
    pub(super) fn park_whole(&mut self, backend: &mut dyn Backend, held: &[u32]) {
        if self.position >= LOST_MIN {
            self.needed = self.position;
            self.park(backend, held, 0);
        }
    }

    /// The conversations that are parked with their numbers, but those whose answers are under way.
    pub(super) fn idle(&self) -> impl Iterator<Item = (usize, &Parked)> {
        self.parked.idle()
    }

    /// Parks one that was saved.
    pub(super) fn push_saved(&mut self, parked: Parked) {
        self.parked.push(parked);
    }

    /// Whether nothing was computed or parked.
    pub(super) fn is_untouched(&self) -> bool {
        self.position == 0 && self.parked.is_empty()
    }

    /// The conversations that are parked, in the order in which they were.
    pub(super) fn kept_conversations(&self) -> Vec<Kept> {
        let held = self.cache.held(self.position);
        let marks = self.marks.all().iter().map(|mark| &mark.copy);
        let copies: Vec<&KvCopy> = marks.chain(self.parked.copies()).collect();
        let kept = |(number, one): (usize, &Parked)| {
            let (own, shared) = held.get(number).copied().unwrap_or_default();
            let its = one.marks.iter().map(|mark| &mark.copy);
            let of_copies = its.map(|copy| self.cache.copy_tokens(copy, &copies).get());
            Kept {
                request: one.conversation.request,
                client: one.conversation.client.clone(),
                tokens: Tokens::new(u32::try_from(one.tokens.len()).unwrap_or(u32::MAX)),
                shared,
                alone: Tokens::new(of_copies.fold(own.get(), u32::saturating_add)),
                is_superseded: one.is_superseded,
                since: one.since,
            }
        };
        self.parked.idle().map(kept).collect()
    }

    /// Sets the sequence, which has the tokens `held`, aside, to go on with it beside others; a new one begins. `None` where that
    /// cannot be done: tokens of it were dropped, or there is no place for a copy of its state and windows.
    pub(super) fn set_aside(&mut self, backend: &mut dyn Backend, held: &[u32]) -> Option<Lane> {
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

    /// Tokens of capacity that setting a conversation aside takes beside those of its tokens.
    pub(super) fn aside_takes(&self) -> u32 {
        self.cache.tokens_of_copy(self.state.memory())
    }

    /// Whether one that was set aside has lost its state, and cannot be gone on with.
    pub(super) fn is_lost(&self, lane: Lane) -> bool {
        let number = self.parked.number_of(lane);
        let parked = number.and_then(|number| self.parked.get(number));
        self.has_copies() && parked.is_some_and(|parked| parked.state.is_none())
    }

    /// Notes that the state of one that was set aside is worth nothing: a pass with tokens of it did not finish.
    pub(super) fn lose(&mut self, lane: Lane) {
        let number = self.parked.number_of(lane);
        if let Some(parked) = number.and_then(|number| self.parked.get_mut(number)) {
            parked.state = None;
        }
        self.release_copies();
    }

    /// Where the blocks of a layer with a window lie that a token at `position` of one that was set aside sees, part by part, and where
    /// the layer is computed; of the block that the token is written to only, if it `is_written`.
    pub(super) fn aside_window(
        &self,
        lane: Lane,
        number: usize,
        position: (u32, bool),
    ) -> Option<Vec<(Span, Span)>> {
        let parked = self.parked.get(self.parked.number_of(lane)?)?;
        let copy = (parked.state.as_ref()?, self.state.memory());
        Some(self.cache.window_of_copy(copy, number, position))
    }

    /// Where a layer of the state of one that was set aside lies, part by part, and where it is computed in.
    pub(super) fn aside_layer(&self, lane: Lane, layer: usize) -> Option<Vec<(Span, Span)>> {
        let parked = self.parked.get(self.parked.number_of(lane)?)?;
        let (bytes, memory) = self.state.layer_of_copy(layer)?;
        let mut at = 0;
        let parts = self.cache.parts_of(parked.state.as_ref()?, bytes);
        let spans = parts.into_iter().map(|part| {
            let view = memory.view_bytes(at, part.len());
            at += part.len();
            (part, Span::Buffer(view))
        });
        Some(spans.collect())
    }

    /// One that was set aside becomes the sequence; the one until then, with the tokens `held`, is parked. Returns its tokens.
    pub(super) fn resume(
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
        let tokens = std::mem::take(&mut parked.tokens);
        self.marks.take_up(std::mem::take(&mut parked.marks));
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

    /// The answer of one that was set aside is over: it is parked as others are, where it can be gone on from.
    pub(super) fn leave(&mut self, lane: Lane) {
        let number = self.parked.number_of(lane);
        let Some((number, parked)) =
            number.and_then(|number| Some((number, self.parked.get_mut(number)?)))
        else {
            return;
        };
        parked.is_lane = false;
        parked.since = Instant::now();
        if let Some(state) = parked.state.take() {
            let end = u32::try_from(parked.tokens.len()).unwrap_or(u32::MAX);
            take_spare(&mut parked.marks);
            parked.marks.push(Mark::of(end, state, false));
        }
        if parked.marks.is_empty() && self.has_copies() {
            self.forget(number);
        }
        self.release_copies();
    }

    /// Keeps places for so many tokens of the sequence between two passes, the block that it ends in made its own first; for none
    /// beyond its own once they have been read.
    pub(super) fn expect(&mut self, backend: &mut dyn Backend, tokens: u32) {
        self.expected = tokens;
        if tokens == 0 {
            self.marks.forget_wanted();
        } else {
            // Without a place the first pass says so.
            self.make_place(backend, tokens);
        }
    }

    /// Tokens that places are kept for between two passes.
    pub(super) fn kept(&self) -> u32 {
        self.position.max(self.expected)
    }

    /// Finds places for so many more tokens of each of these, while the sequence keeps those of `kept` tokens; says whether there
    /// are.
    pub(super) fn make_places(
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
                if !self.give_up_one() {
                    return false;
                }
                self.cache.cut(kept);
            }
        })
    }

    /// The number of one that was set aside, and its length.
    pub(super) fn lane(&self, lane: Lane) -> Option<(usize, u32)> {
        let number = self.parked.number_of(lane)?;
        let tokens = &self.parked.get(number)?.tokens;
        Some((number, u32::try_from(tokens.len()).unwrap_or(u32::MAX)))
    }

    /// The smallest type that one that was set aside has been kept in.
    pub(super) fn precision_of(&self, lane: Lane) -> Option<KvType> {
        let parked = self.parked.get(self.parked.number_of(lane)?)?;
        Some(parked.kv_precision)
    }

    /// Notes that tokens of one that was set aside have been computed.
    pub(super) fn extend(&mut self, lane: Lane, tokens: &[u32]) {
        let number = self.parked.number_of(lane);
        if let Some(parked) = number.and_then(|number| self.parked.get_mut(number)) {
            parked.tokens.extend_from_slice(tokens);
            if let Some(copy) = &mut parked.state {
                let length = u32::try_from(parked.tokens.len()).unwrap_or(u32::MAX);
                self.cache.extend_copy(copy, length);
            }
        }
    }

    /// Takes back the last tokens of one that was set aside, or of the sequence, of a model that can be cut back anywhere.
    pub(super) fn take_back(&mut self, lane: Option<Lane>, tokens: u32) {
        let Some(lane) = lane else {
            self.position = self.position.saturating_sub(tokens);
            self.cache.cut(self.position);
            return;
        };
        let number = self.parked.number_of(lane);
        if let Some(parked) = number.and_then(|number| self.parked.get_mut(number)) {
            let left = parked.tokens.len().saturating_sub(tokens as usize);
            parked.tokens.truncate(left);
        }
    }

    /// Cuts the sequence back to the longest beginning of at most `tokens` tokens that can be gone on from. Nothing is
    /// left of a sequence that was lost, nor of one that is kept in a larger type than it has been converted to before.
    pub(super) fn keep(&mut self, backend: &mut dyn Backend, tokens: u32) {
        // What a conversion has lost is read again as soon as there is place for it: an answer does not depend on what
        // was shed before it.
        if self.lost || self.kv_precision < self.cache.kind() {
            self.reset(backend);
            return;
        }
        self.marks.part_at(tokens);
        self.release_copies();
        if tokens < self.position {
            if self.needs_marks() || !self.has_window(tokens) {
                self.go_back(backend);
            } else {
                self.position = tokens;
                self.cache.cut(tokens);
            }
        }
    }

    /// Takes up a sequence whose last pass was broken off, as far as it can be gone on from: attention layers have every
    /// chunk that was finished, recurrent ones their last copy. Windows that a large chunk has passed on are lost.
    pub(super) fn recover(&mut self, backend: &mut dyn Backend) {
        self.lost = false;
        self.marks.forget_wanted();
        if self.needs_marks() || !self.has_window(self.position) {
            self.go_back(backend);
        }
    }

    /// Whether the layers with windows have what a token at `position` sees.
    fn has_window(&self, position: u32) -> bool {
        self.cache.has_window_from(self.first_seen(position))
    }

    /// The first token that a token at `position` sees in layers with windows.
    fn first_seen(&self, position: u32) -> u32 {
        self.window.map_or(0, |window| {
            position.saturating_add(1).saturating_sub(window)
        })
    }

    /// Whether [`Self::mark`] is of any use: a model without recurrent layers can be cut back anywhere.
    pub(super) fn needs_marks(&self) -> bool {
        self.state.bytes() > Bytes::ZERO
    }

    /// Whether copies are of any use: other models can be cut back anywhere.
    pub(super) fn has_copies(&self) -> bool {
        self.needs_marks() || self.cache.has_windows()
    }

    /// Makes it possible to cut the sequence back to `position`, if there is place for that: where it is now, or where its
    /// layers with windows still have all that is seen there.
    fn mark(&mut self, backend: &mut dyn Backend, kind: Kind, position: u32) {
        if position == 0 || self.marks.has(position) {
            return;
        }
        self.marks.make_room(kind);
        let saved = self.save(backend, self.first_seen(position)..position, false);
        // Without place the next prompt is read again.
        if let Some(copy) = self.noted(saved) {
            self.marks.put(kind, position, copy);
        }
    }

    /// Copies the state and these tokens of layers with windows, giving up others that are missed less; `None` where there is no
    /// place for it.
    fn save(
        &mut self,
        backend: &mut dyn Backend,
        windows: Range<u32>,
        goes_on: bool,
    ) -> Result<Option<KvCopy>, DeviceError> {
        let used = self.needed.max(self.kept());
        let saved = loop {
            self.release_copies();
            self.cache.cut(self.position);
            let (state, windows) = (self.state.memory(), (windows.clone(), goes_on));
            let saved = self.cache.save(backend, used, state, windows);
            if !matches!(saved, Ok(None)) {
                break saved;
            }
            if !(self.give_up_one() || self.marks.pop_for_another()) {
                break saved;
            }
        };
        // The places of blocks to come may be others now.
        self.cache.touch(self.needed);
        saved
    }

    /// What was copied, if anything; keeps an error for the next pass.
    fn noted(&mut self, saved: Result<Option<KvCopy>, DeviceError>) -> Option<KvCopy> {
        match saved {
            Ok(copy) => copy,
            Err(error) => {
                self.note(Err(error));
                None
            }
        }
    }

    /// Marks the sequence where its own next prompt may part from this one: of use only to recurrent layers, since windows
    /// do not pass on so soon.
    pub(super) fn mark_at(&mut self, position: u32) {
        self.conversation.end = position;
        if self.needs_marks() {
            self.marks.want_end(position);
        }
    }

    /// Notes that a pass is about to hold `used` tokens: their place is not that of copies any more. `false` where there is none.
    pub(super) fn touch(&mut self, backend: &mut dyn Backend, used: u32) -> bool {
        if !self.make_place(backend, used) {
            return false;
        }
        self.needed = used;
        self.cache.touch(used);
        let window = self.window.unwrap_or(0);
        if !self.cache.may_save(used, self.state.memory(), window) {
            self.marks.forget_fork();
        }
        true
    }

    /// Tokens up to the next place that is to be marked, where the next chunk ends for it.
    pub(super) fn until_mark(&self, streams: bool) -> Option<usize> {
        let next = self
            .has_copies()
            .then(|| self.marks.next(self.position, streams))
            .flatten()?;
        Some((next - self.position) as usize)
    }

    /// Marks the sequence if this is a place for it, or the last one before it where a chunk ends.
    pub(super) fn mark_if_wanted(
        &mut self,
        backend: &mut dyn Backend,
        chunk: usize,
        streams: bool,
    ) {
        if !self.has_copies() || self.lost {
            return;
        }
        let chunk = u32::try_from(chunk).unwrap_or(u32::MAX);
        for kind in self
            .marks
            .due(self.position, chunk, streams)
            .into_iter()
            .flatten()
        {
            self.mark(backend, kind, self.position);
        }
    }

    /// Tokens that could be dropped now.
    pub(super) fn droppable(&self) -> Tokens {
        let blocks = self.droppable_blocks().map_or(0, |(_, blocks)| blocks);
        Tokens::new(blocks.saturating_mul(self.block()))
    }

    /// Drops as much as `used` tokens are too many for `capacity`, as far as that is allowed; returns how many.
    pub(super) fn drop_for(&mut self, turn: Turn<'_>, capacity: Tokens, used: u32) -> u32 {
        let capacity = capacity
            .get()
            .div_ceil(self.block())
            .saturating_mul(self.block());
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
        // Nothing before can be gone back to, and no prompt goes on from here.
        self.marks.clear();
        self.release_copies();
        self.cache
            .drop_blocks(first as usize, blocks as usize, used);
        self.position -= tokens;
        self.dropped.after = first * block;
        self.dropped.tokens += tokens;
        self.dropped.turn_back(turn);
        tokens
    }

    /// The first block that may be dropped, and how many from there on: neither the one that is being written nor the
    /// last one that is full.
    fn droppable_blocks(&self) -> Option<(u32, u32)> {
        let block = self.block();
        let first = if self.dropped.tokens > 0 {
            self.dropped.after / block
        } else {
            self.dropped.sinks?.div_ceil(block)
        };
        self.dropped.sinks?;
        let most = (self.position / block).saturating_sub(first.saturating_add(1));
        let reach = (POSITIONS_MAX - self.dropped.tokens.min(POSITIONS_MAX)) / block;
        Some((first, most.min(reach)))
    }

    fn block(&self) -> u32 {
        self.cache.shape().block_tokens.get().max(1)
    }
}
