//! Sequence of tokens: KV cache, recurrent state, and their reusable prefixes.
//!
//! Attention layers can be cut back to any length; windowed layers only while they still hold the window, or to a copy
//! of it. A recurrent state cannot be cut back; it is copied where another prompt is likely to diverge, and the copy is
//! restored.
//!
//! Copies are stored in free places of the KV cache, like the blocks of parked conversations, so they need no lease of
//! their own. When tokens or a smaller capacity need their place, the least useful are evicted.

use std::{ops::Range, time::Instant};

mod lanes;

use super::{
    dropped::{Dropped, Turn},
    marks::{Kind, Marks},
    parked::{
        AllParked, Asked, Conversation, Kept, LOST_MIN, Lane, Near, Parked, common_prefix,
        last_within,
    },
};
use crate::{
    backend::{Backend, DeviceError},
    kv::{Copy as KvCopy, KvCache, KvError, Resized},
    spec::{AttentionSpec, POSITIONS_MAX},
    state::{RecurrentState, Trial},
};
use cotenant_policy::kv_type::KvType;
use cotenant_units::{Bytes, Tokens};

/// The sequence that a pass extends, and the parked conversations.
pub(super) struct Sequence {
    pub(super) cache: KvCache,
    pub(super) state: RecurrentState,
    /// Positions, with copies of the state, to which the sequence can be cut back.
    pub(super) marks: Marks,
    /// Tokens in the cache, without dropped ones.
    pub(super) position: u32,
    /// Length after the pass in progress.
    needed: u32,
    /// Length after a prompt that is read in several passes; its places stay reserved between them.
    expected: u32,
    pub(super) dropped: Dropped,
    /// Window size of windowed layers, in tokens.
    window: Option<u32>,
    /// The smallest KV type that any token of the sequence has been stored in.
    pub(super) kv_precision: KvType,
    pub(super) conversation: Conversation,
    /// The other conversations, which may share tokens with it.
    parked: AllParked,
    /// Whether the last pass did not complete.
    pub(super) lost: bool,
    /// Drafted tokens that the state has not advanced by, if the backend tries them.
    pub(super) trial: Option<Trial>,
    /// Device error from a call that cannot return it; the next pass reports it.
    pub(super) broken: Option<DeviceError>,
}

/// Outcome of finding a place for a saved copy.
pub(super) enum Restored {
    /// Another conversation has it.
    Shared,
    /// Its contents follow.
    Placed(KvCopy),
    /// There is no place.
    NoPlace,
}

impl Sequence {
    pub(super) fn new(
        cache: KvCache,
        (state, trial): (RecurrentState, Option<Trial>),
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
            trial,
            broken: None,
        }
    }

    /// Whether tried tokens are neither accepted nor taken back.
    pub(super) fn is_tried(&self) -> bool {
        self.trial.as_ref().is_some_and(|trial| trial.rows > 0)
    }

    /// Forgets tokens that were tried.
    pub(super) fn forget_trial(&mut self) {
        if let Some(trial) = &mut self.trial {
            trial.rows = 0;
        }
    }

    /// Memory for tokens that are tried.
    pub(super) fn trial_bytes(&self) -> Bytes {
        let trial = self.trial.as_ref();
        trial.map_or(Bytes::ZERO, |trial| trial.memory().bytes())
    }

    /// Whether tokens of a draft can be taken back.
    pub(super) fn takes_back(&self) -> bool {
        !self.cache.has_windows() && (!self.needs_marks() || self.trial.is_some())
    }

    /// Keeps an error for the next pass.
    pub(super) fn note(&mut self, result: Result<(), DeviceError>) {
        if let Err(error) = result {
            self.broken.get_or_insert(error);
        }
    }

    /// Bytes of it that are in memory.
    pub(super) fn resident(&self) -> Bytes {
        let trial = self.trial.as_ref();
        let trial = trial.map_or(Bytes::ZERO, |trial| trial.memory().resident());
        self.cache.resident() + self.state.resident() + trial
    }

    /// Drops the sequence.
    pub(super) fn reset(&mut self, backend: &mut dyn Backend) {
        self.position = 0;
        self.forget_trial();
        self.dropped.forget();
        self.marks.clear();
        self.release_copies();
        self.cache.put_in_order();
        self.kv_precision = self.cache.kind();
        let reset = self.state.reset(backend);
        self.note(reset);
        self.lost = false;
    }

    /// Returns to the last mark; to the start if there is none.
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

    /// Makes the conversation with the longest common prefix with a prompt the sequence, cut back to the usable part.
    /// Parks the previous sequence, whose tokens are `held`, if enough of it would be lost. Returns the position at
    /// which the prompt diverges from another conversation, if it does.
    pub(super) fn select(
        &mut self,
        backend: &mut dyn Backend,
        held: &[u32],
        asked: Asked<'_>,
    ) -> Option<u32> {
        // At least one token must be computed, since the logits after the sequence are not kept.
        let most = u32::try_from(asked.prompt.len().saturating_sub(1)).unwrap_or(u32::MAX);
        let is_own = self.conversation.client.as_ref() == asked.client;
        let own = common_prefix(held, asked.prompt).min(most);
        let (mut common, length) = (if is_own { own } else { 0 }, self.position);
        self.needed = length;
        if is_own {
            self.parked
                .learn(&self.conversation, (common, most), length);
        }
        if length - common.min(length) >= LOST_MIN {
            self.park(backend, held, common);
        }
        let start = self.reach(common);
        let nearest = self.parked.nearest(asked, self.has_copies());
        let nearest = nearest.filter(|near| (near.start, near.common) > (start, common));
        let parts = if let Some(near) = nearest {
            common = near.common;
            self.parked.learn_from(near, most);
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

    /// Length of the longest usable prefix of the first `common` tokens.
    fn reach(&self, common: u32) -> u32 {
        if common >= self.position || !self.needs_marks() && self.has_window(common) {
            common
        } else {
            last_within(self.marks.all(), common)
        }
    }

    /// Parks the sequence, of which the next prompt shares `common` tokens, unless it cannot be continued, or needs a
    /// copy for which there is no place.
    fn park(&mut self, backend: &mut dyn Backend, held: &[u32], common: u32) {
        let is_superseded = self.conversation.is_superseded_at(common);
        // A copy that is unlikely to be used takes as much memory as any other.
        if !self.is_continuable(held) || self.has_copies() && is_superseded {
            return;
        }
        if self.has_copies() {
            self.mark_ends(backend);
            if self.marks.all().is_empty() {
                return;
            }
        }
        let client = self.conversation.client.clone();
        // Drop earlier versions of this conversation.
        while let Some(number) = self.parked.within(client.as_ref(), held) {
            self.forget(number);
        }
        self.push(held, is_superseded);
    }

    /// Whether a later prompt can continue the sequence, whose tokens are `held`.
    pub(super) fn is_continuable(&self, held: &[u32]) -> bool {
        !self.lost
            && self.dropped.tokens() == 0
            && self.kv_precision >= self.cache.kind()
            && held.len() == self.position as usize
    }

    /// Marks the position where the next prompt may diverge, and the present one.
    fn mark_ends(&mut self, backend: &mut dyn Backend) {
        let end = self.conversation.end;
        // Windowed layers made no copy there, since the window usually still holds the end.
        if !self.needs_marks() && end < self.position && self.has_window(end) {
            self.mark(backend, Kind::End, end);
        }
        self.mark(backend, Kind::End, self.position);
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

    /// Makes the common prefix of a prompt and a parked conversation the sequence, cut back to the usable part. Returns
    /// whether the prompt is unlikely to be the conversation's own next one.
    fn take_up(&mut self, backend: &mut dyn Backend, near: Near) -> bool {
        let Near {
            number,
            common,
            start,
        } = near;
        let Some(parked) = self.parked.get_mut(number) else {
            return false;
        };
        let length = parked.length();
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

    /// Evicts the least useful conversation; returns `false` if none can be evicted.
    fn forget_one(&mut self) -> bool {
        let number = self.parked.least_useful();
        if let Some(number) = number {
            self.forget(number);
        }
        number.is_some()
    }

    /// Drops the least useful copy or parked conversation, but no copy that the sequence is likely to continue from;
    /// returns `false` if there is none. Its places are free once blocks are laid out again.
    fn give_up_one(&mut self) -> bool {
        let given_up = self.parked.has_superseded() && self.forget_one()
            || self
                .marks
                .pop_spare(self.parked.diverges_at(&self.conversation))
            || self.parked.pop_spare()
            || self.forget_one();
        self.release_copies();
        given_up
    }

    /// Drops the copies that no sequence refers to.
    fn release_copies(&mut self) {
        let marks = self.marks.all().iter().map(|mark| &mark.copy);
        self.cache.keep_copies(marks.chain(self.parked.copies()));
    }

    /// Evicts conversations and copies until the sequence fits with `used` tokens, and gives it a block of its own for
    /// the next token. Returns `false` if the lanes leave too little capacity.
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
            if !self.give_up_any() {
                return false;
            }
            self.cache.cut(self.position);
        }
    }

    /// As [`Self::give_up_one`], and then also copies that the next prompts of running answers would continue from.
    fn give_up_any(&mut self) -> bool {
        self.give_up_one() || self.pop_mark_of_lane() || self.pop_mark()
    }

    /// Drops a copy of a lane other than its state; returns `false` if there is none.
    fn pop_mark_of_lane(&mut self) -> bool {
        let popped = self.parked.pop_of_lane();
        self.release_copies();
        popped
    }

    /// Drops a copy of the sequence; returns `false` if it has none.
    fn pop_mark(&mut self) -> bool {
        let popped = self.marks.pop(|_| true);
        self.release_copies();
        popped
    }

    /// Changes the capacity as [`KvCache::resize`] does, and evicts conversations that no longer fit.
    pub(super) fn resize(
        &mut self,
        backend: &mut dyn Backend,
        capacity: Tokens,
        used: u32,
    ) -> Result<Resized, KvError> {
        let capacity = capacity.max(Tokens::new(self.held(used)));
        while !self.cache.fits(capacity, used) && self.give_up_any() {}
        self.cache.resize(backend, capacity, used)
    }

    /// Converts the `used` tokens of the sequence and all parked conversations to another type.
    pub(super) fn convert(
        &mut self,
        backend: &mut dyn Backend,
        kind: KvType,
        used: u32,
    ) -> Result<Resized, KvError> {
        // Copies cannot be converted.
        if self.has_copies() {
            while self.forget_one() {}
            self.marks.clear();
            self.parked.forget_copies();
            self.release_copies();
        }
        // Lost precision requires recomputation, for parked conversations as for the sequence.
        if kind > self.cache.kind() {
            while let Some(number) = self.parked.less_precise_than(kind) {
                self.forget(number);
            }
        }
        let converted = self.cache.convert(backend, kind, used);
        // Also after a failure, which may have occurred before or after the conversion.
        let now = self.cache.kind();
        self.parked.converted(now);
        self.kv_precision = if used == 0 {
            now
        } else {
            self.kv_precision.min(now)
        };
        converted
    }

    /// Capacity, in tokens, taken by the first `used` tokens of the sequence and by all lanes.
    pub(super) fn held(&self, used: u32) -> u32 {
        if !self.parked.has_lanes() {
            return used;
        }
        let is_lane = |number| self.parked.is_lane(number);
        let tokens = self.cache.tokens_held(used, is_lane).max(used);
        tokens.saturating_add(self.cache.tokens_of_copies(self.parked.states()))
    }

    /// Makes the copies that a continuation of the sequence needs, if there is free capacity; returns whether it can be
    /// continued then.
    pub(super) fn prepare_saving(&mut self, backend: &mut dyn Backend) -> bool {
        if !self.has_copies() {
            return true;
        }
        let copies = self.aside_takes().saturating_mul(2);
        if self.cache.is_ready(self.position.saturating_add(copies)) {
            self.needed = self.position;
            self.mark_ends(backend);
        }
        !self.marks.all().is_empty()
    }

    /// Parked conversations with their numbers, except lanes.
    pub(super) fn idle(&self) -> impl Iterator<Item = (usize, &Parked)> {
        self.parked.idle()
    }

    /// Returns a parked conversation.
    pub(super) fn parked(&self, number: usize) -> Option<&Parked> {
        self.parked.get(number)
    }

    /// Number of the prompt's first tokens that a conversation in memory holds, and how many of them can be reused.
    pub(super) fn in_memory(&self, held: &[u32], asked: Asked<'_>) -> (u32, u32) {
        let is_own = self.conversation.client.as_ref() == asked.client;
        let own = if is_own && self.is_continuable(held) {
            common_prefix(held, asked.prompt)
        } else {
            0
        };
        let near = |needs_marks| self.parked.nearest(asked, needs_marks);
        let held = near(false).map_or(0, |near| near.common);
        let reusable = near(self.has_copies()).map_or(0, |near| near.start);
        (held.max(own), reusable.max(self.reach(own)))
    }

    /// Parks the sequence, whose tokens are `held`, before a prompt, and begins an empty one.
    pub(super) fn park_and_reset(
        &mut self,
        backend: &mut dyn Backend,
        held: &[u32],
        asked: Asked<'_>,
    ) {
        if self.position >= LOST_MIN {
            let is_own = self.conversation.client.as_ref() == asked.client;
            let own = common_prefix(held, asked.prompt);
            self.needed = self.position;
            self.park(backend, held, if is_own { own } else { 0 });
        }
        self.conversation = Conversation::default();
        self.needed = 0;
        self.reset(backend);
    }

    /// Parked conversations, in the order in which they were parked.
    pub(super) fn kept_conversations(&self) -> Vec<Kept> {
        let held = self.cache.held(self.position);
        let marks = self.marks.all().iter().map(|mark| &mark.copy);
        let copies: Vec<&KvCopy> = marks.chain(self.parked.copies()).collect();
        let kept = |(number, one): (usize, &Parked)| {
            let (own, shared) = held.get(number).copied().unwrap_or_default();
            let its = one.marks.iter().map(|mark| &mark.copy);
            let of_copies = its.map(|copy| self.cache.copy_tokens(copy, &copies).get());
            let length = one.length();
            Kept {
                request: one.conversation.request,
                client: one.conversation.client.clone(),
                tokens: Tokens::new(length),
                shared,
                alone: Tokens::new(of_copies.fold(own.get(), u32::saturating_add)),
                lost: Tokens::new(length.saturating_sub(shared.get())),
                saved: None,
                is_superseded: one.is_superseded,
                since: one.since,
            }
        };
        self.parked.idle().map(kept).collect()
    }

    /// Capacity, in tokens, that a lane takes beyond that of its tokens.
    pub(super) fn aside_takes(&self) -> u32 {
        self.cache.tokens_of_copy(self.state.memory())
    }

    /// Reserves places between passes for `tokens` tokens of the sequence, and gives it a block of its own for the next
    /// token. 0 ends the reservation.
    pub(super) fn expect(&mut self, backend: &mut dyn Backend, tokens: u32) {
        self.expected = tokens;
        if tokens == 0 {
            self.marks.forget_wanted();
        } else {
            // If there is no place, the first pass reports it.
            self.make_place(backend, tokens);
        }
    }

    /// Tokens whose places are reserved between two passes.
    pub(super) fn kept(&self) -> u32 {
        self.position.max(self.expected)
    }

    /// Cuts the sequence back to its longest usable prefix of at most `tokens` tokens. Resets a lost sequence, and one
    /// whose tokens were once stored in a smaller KV type than the present one.
    pub(super) fn keep(&mut self, backend: &mut dyn Backend, tokens: u32) {
        // Recompute tokens that lost precision as soon as a larger type is in force: an answer must not depend on
        // earlier sheds.
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

    /// Recovers the usable prefix of a sequence whose last pass was cancelled: attention layers hold every completed
    /// chunk, recurrent ones their last copy. Windows that a large chunk has overwritten are lost.
    pub(super) fn recover(&mut self, backend: &mut dyn Backend) {
        self.lost = false;
        self.marks.forget_wanted();
        if self.needs_marks() || !self.has_window(self.position) {
            self.go_back(backend);
        }
    }

    /// Whether windowed layers hold all tokens that a token at `position` sees.
    fn has_window(&self, position: u32) -> bool {
        self.cache.has_window_from(self.first_seen(position))
    }

    /// Returns the first token that a token at `position` sees in windowed layers.
    fn first_seen(&self, position: u32) -> u32 {
        self.window.map_or(0, |window| {
            position.saturating_add(1).saturating_sub(window)
        })
    }

    /// Whether the model has a recurrent state, so that it can be cut back to marks only.
    pub(super) fn needs_marks(&self) -> bool {
        self.state.bytes() > Bytes::ZERO
    }

    /// Whether copies are useful; other models can be cut back anywhere.
    pub(super) fn has_copies(&self) -> bool {
        self.needs_marks() || self.cache.has_windows()
    }

    /// Marks `position`, if there is place for the copy: the current position, or an earlier one whose window is still
    /// held.
    fn mark(&mut self, backend: &mut dyn Backend, kind: Kind, position: u32) {
        if position == 0 || self.marks.has(position) {
            return;
        }
        self.marks.make_room(kind);
        let saved = self.save(backend, self.first_seen(position)..position, false);
        // Without a copy, the next prompt is recomputed.
        if let Some(copy) = self.noted(saved) {
            self.marks.put(kind, position, copy);
        }
    }

    /// Copies the state and the `windows` tokens of windowed layers, evicting less useful copies; returns `None` if
    /// there is no place.
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
            let given_up = if goes_on {
                // A running answer is worth more than the beginning of a later one.
                self.give_up_any()
            } else {
                self.give_up_one() || self.marks.pop_for_another()
            };
            if !given_up {
                break saved;
            }
        };
        // The places of future blocks may have changed.
        self.cache.touch(self.needed);
        saved
    }

    /// Returns the copy, if any; keeps an error for the next pass.
    fn noted(&mut self, saved: Result<Option<KvCopy>, DeviceError>) -> Option<KvCopy> {
        match saved {
            Ok(copy) => copy,
            Err(error) => {
                self.note(Err(error));
                None
            }
        }
    }

    /// Notes the `end` where the conversation's next prompt is likely to diverge from this one, and marks it. Only
    /// recurrent layers need a mark: the window usually still holds that position.
    pub(super) fn mark_at(&mut self, end: u32) {
        self.conversation.end = end;
        if self.needs_marks() {
            self.marks.want_end(end);
        }
    }

    /// Prepares for a pass up to `used` tokens: evicts copies from their places. Returns `false` if there is too little
    /// capacity.
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

    /// Tokens up to the next position to be marked, where the next chunk ends.
    pub(super) fn until_mark(&self, streams: bool) -> Option<usize> {
        let next = self
            .has_copies()
            .then(|| self.marks.next(self.position, streams))
            .flatten()?;
        Some((next - self.position) as usize)
    }

    /// Marks the sequence at a wanted position, or at the last end of a chunk before it.
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

    /// Number of tokens that can be dropped now.
    pub(super) fn droppable(&self) -> Tokens {
        let blocks = self.droppable_blocks().map_or(0, |(_, blocks)| blocks);
        Tokens::new(blocks.saturating_mul(self.block()))
    }

    /// Drops the excess of `used` tokens over `capacity`, as far as dropping is allowed; returns the number dropped.
    pub(super) fn drop_for(&mut self, turn: Turn<'_>, capacity: Tokens, used: u32) -> u32 {
        let capacity = capacity
            .get()
            .div_ceil(self.block())
            .saturating_mul(self.block());
        self.drop_oldest(turn, used.saturating_sub(capacity), used)
    }

    /// Drops at least `tokens` in whole blocks, or as many as allowed, of a cache that holds `used`; returns the
    /// number.
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
        // Marks before the gap are invalid, and no prompt continues this sequence.
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

    /// Returns the first block that may be dropped, and the number of droppable blocks from there on: neither the block
    /// being written nor the last full one.
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
