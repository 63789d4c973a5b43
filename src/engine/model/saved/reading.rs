//! Reading saved conversations back: for a prompt that continues one, and ahead after a start.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    index::{BLOCK, Entry, SavedMark, Slot, damaged},
    reload::{Piece, Reload, Target},
    tier::{Memory, Saved, expected},
    transfers::{BUFFERS, Done, PIECE},
};
use crate::{
    backend::Backend,
    model::{
        parked::{Asked, Conversation, LOST_MIN, common_prefix},
        sequence::{Restored, Sequence},
    },
};
use cotenant_units::Bytes;

impl Saved {
    pub(in crate::model) fn begin_reload(
        &mut self,
        memory: Memory<'_>,
        held: &[u32],
        asked: Asked<'_>,
        token: Duration,
    ) -> bool {
        self.token = token;
        let disk = self.disk.as_ref();
        if self.reload.is_some() || disk.is_none_or(|(_, transfers)| transfers.hangs()) {
            return false;
        }
        let (sequence, kind) = (&*memory.sequence, memory.sequence.cache.kind());
        if sequence.cache.bytes_at(0).is_none() {
            // Memory of a device, or no memory.
            return false;
        }
        // At least one token must be computed, since the logits after the sequence are not kept.
        let most = asked.prompt.len().saturating_sub(1);
        let prompt = asked.prompt.get(..most).unwrap_or_default();
        let client = asked.client.map(|client| &**client);
        let mut best: Option<(u32, Entry)> = None;
        for entry in self.index.of(client).filter(|one| one.saved.kind == kind) {
            let common = common_prefix(&entry.saved.tokens, prompt);
            let start = if sequence.has_copies() {
                entry.saved.mark_within(common)
            } else {
                common
            };
            if best.as_ref().is_none_or(|(longest, _)| start >= *longest) {
                best = Some((start, entry.clone()));
            }
        }
        let Some((start, entry)) = best else {
            return false;
        };
        let (in_memory, reusable) = sequence.in_memory(held, asked);
        let gained = start.saturating_sub(reusable);
        if gained < LOST_MIN || start > sequence.cache.capacity().get() {
            return false;
        }
        // Blocks that are in memory are not read.
        let in_memory = in_memory as usize / BLOCK * BLOCK;
        let unread = (start as usize).saturating_sub(in_memory).div_ceil(BLOCK);
        let mut marks = entry.saved.marks.iter();
        let mark = marks.find(|mark| sequence.has_copies() && mark.position == start);
        let copy = mark.map_or(0, |mark| mark.copy.len());
        let bytes = sequence.cache.place_len().saturating_mul(unread + copy);
        let reading = self.reading(Bytes::of_len(bytes));
        let computing = token.saturating_mul(gained);
        if reading >= computing {
            return false;
        }
        let Memory { sequence, backend } = memory;
        sequence.park_and_reset(backend, held, asked);
        let conversation = Conversation {
            client: asked.client.cloned(),
            request: asked.request,
            end: entry.saved.end,
        };
        let tokens = prompt.get(..start as usize).unwrap_or_default();
        let marks: Vec<SavedMark> = mark.cloned().into_iter().collect();
        let memory = Memory { sequence, backend };
        let until = Instant::now() + computing;
        self.begin(
            memory,
            &entry,
            conversation,
            (tokens, &marks),
            (until, true),
        );
        true
    }

    pub(in crate::model) fn begin_read_ahead(
        &mut self,
        memory: Memory<'_>,
        held: &[u32],
    ) -> Option<bool> {
        let is_in_reach = memory.sequence.cache.bytes_at(0).is_some();
        if !self.open() || self.reload.is_some() || !is_in_reach {
            return (!self.is_pending()).then_some(false);
        }
        while let Some(number) = self.ahead.pop() {
            let mut entries = self.index.entries().iter();
            let Some(entry) = entries.find(|entry| entry.number == number).cloned() else {
                continue;
            };
            if entry.saved.kind != memory.sequence.cache.kind() {
                continue;
            }
            let conversation = Conversation {
                client: entry.saved.client.as_deref().map(Into::into),
                request: 0,
                end: entry.saved.end,
            };
            let saved = Arc::clone(&entry.saved);
            let asked = Asked {
                client: conversation.client.as_ref(),
                prompt: &saved.tokens,
                request: 0,
            };
            let (in_memory, _) = memory.sequence.in_memory(held, asked);
            if in_memory.saturating_add(LOST_MIN) as usize > saved.tokens.len() {
                continue;
            }
            let until = Instant::now() + AHEAD_MAX;
            let what = (&saved.tokens[..], &saved.marks[..]);
            let begun = self.begin(memory, &entry, conversation, what, (until, false));
            if !begun {
                // Older ones are read when a prompt continues them.
                self.ahead.clear();
            }
            return Some(begun);
        }
        Some(false)
    }

    /// Finds places for the first tokens of a saved conversation and for copies at its `marks`, and begins to read
    /// them. With `evicts`, other conversations are evicted for that.
    fn begin(
        &mut self,
        memory: Memory<'_>,
        entry: &Entry,
        conversation: Conversation,
        (tokens, marks): (&[u32], &[SavedMark]),
        (until, evicts): (Instant, bool),
    ) -> bool {
        let Memory { sequence, backend } = memory;
        let precision = entry.saved.precision;
        let (lane, shared) = sequence.begin_restore(conversation, tokens, precision);
        let mut pieces = Vec::new();
        let (place_len, index) = (sequence.cache.place_len(), &self.index);
        let mut add = |slot: &Slot, target: &Target| {
            for (at, check) in (0..place_len).step_by(PIECE).zip(&slot.checks) {
                pieces.push(Piece {
                    offset: index.offset(slot.number) + at as u64,
                    len: PIECE.min(place_len - at),
                    check: *check,
                    target: target.clone(),
                    at,
                    is_done: false,
                });
            }
        };
        let mut has_places = true;
        for mark in marks {
            let at = (mark.position, mark.is_fork);
            let copy = (mark.windows, mark.copy.len());
            match sequence.restore_mark((lane, tokens), at, copy, evicts) {
                Restored::Shared => {}
                Restored::Placed(copy) => {
                    for (number, slot) in mark.copy.iter().enumerate() {
                        add(slot, &Target::Copy(copy.clone(), number));
                    }
                }
                Restored::NoPlace => has_places = false,
            }
        }
        let first = shared / BLOCK;
        let end = tokens.len().div_ceil(BLOCK);
        for (number, slot) in entry.saved.blocks.iter().enumerate().take(end).skip(first) {
            add(slot, &Target::Block(number));
        }
        let rest = u32::try_from(tokens.len() - shared).unwrap_or(u32::MAX);
        has_places = has_places && sequence.restore_places(lane, rest, evicts);
        // Copies into places follow all queued operations on them.
        let settled = sequence.cache.settle(backend).is_ok();
        if !(has_places && settled) {
            sequence.abandon(lane);
            return false;
        }
        self.series += 1;
        self.reload = Some(Reload {
            number: entry.number,
            lane,
            tokens: tokens.to_vec(),
            shared,
            next: 0,
            left: pieces.len(),
            pieces,
            until,
        });
        true
    }

    pub(in crate::model) fn go_on(&mut self, memory: Memory<'_>, patience: Duration) -> bool {
        let Memory { sequence, backend } = memory;
        let mut went_on = self.read_some(sequence, backend, patience);
        // The buffers that were filled meanwhile.
        for _ in 1..BUFFERS {
            if matches!(went_on, Ok(true)) {
                went_on = self.read_some(sequence, backend, Duration::ZERO);
            }
        }
        let is_over = match (&went_on, &self.reload) {
            (Err(_), _) => true,
            (Ok(_), Some(reload)) => reload.left == 0 || Instant::now() >= reload.until,
            (Ok(_), None) => return false,
        };
        if !is_over {
            return true;
        }
        let number = self.reload.as_ref().map(|reload| reload.number);
        if let (Err(error), Some(number)) = (went_on, number) {
            self.counts.failed += 1;
            let path = self.disk.as_ref().map(|(folder, _)| folder.header(number));
            let path = path.unwrap_or_default();
            tracing::warn!(
                "cannot read saved conversation `{}`: {error}; its prompt is computed again",
                path.display()
            );
            if is_damage(&error) {
                self.remove(number);
            }
        }
        self.end(sequence);
        false
    }

    /// Waits at most `patience` for the next piece; returns whether one has arrived.
    fn read_some(
        &mut self,
        sequence: &mut Sequence,
        backend: &mut dyn Backend,
        patience: Duration,
    ) -> io::Result<bool> {
        let (Some(reload), Some((_, transfers))) = (&mut self.reload, &mut self.disk) else {
            return Ok(false);
        };
        while let Some(piece) = reload.pieces.get(reload.next)
            && let Some(buffer) = transfers.buffer()?
        {
            transfers.read((self.series, reload.next), buffer, piece.len, piece.offset);
            reload.next += 1;
        }
        let Some(done) = transfers.take(patience)? else {
            return Ok(false);
        };
        let Done {
            tag: (series, number),
            result,
            buffer,
            took,
        } = done;
        let Some(mut buffer) = buffer else {
            return Ok(true);
        };
        let piece = reload.pieces.get_mut(number);
        let result = match piece.filter(|_| series == self.series) {
            None => Ok(()),
            Some(piece) => match result {
                Ok(check) if check == piece.check => {
                    sequence.cache.settle(backend).map_err(io::Error::other)?;
                    let place = match &piece.target {
                        Target::Block(block) => sequence.place_of(reload.lane, *block),
                        Target::Copy(copy, place) => {
                            sequence.cache.copy_places(copy).0.get(*place).copied()
                        }
                    };
                    let target = place.and_then(|place| sequence.cache.bytes_at_mut(place));
                    let target =
                        target.and_then(|bytes| bytes.get_mut(piece.at..piece.at + piece.len));
                    if let (Some(target), Some(read)) =
                        (target, buffer.bytes_mut().get(..piece.len))
                    {
                        target.copy_from_slice(read);
                        piece.is_done = true;
                    }
                    reload.left -= 1;
                    let bytes = (piece.len as u64).max(1);
                    let newest = (took.as_nanos() << 20) / u128::from(bytes);
                    let newest = u64::try_from(newest).unwrap_or(u64::MAX);
                    let before = expected(self.read_ns_per_mib, self.measured.elapsed());
                    self.measured = Instant::now();
                    self.read_ns_per_mib =
                        (before / 4).saturating_mul(3).saturating_add(newest / 4);
                    Ok(())
                }
                Ok(_) => Err(damaged("its blocks are damaged")),
                Err(error) => Err(error),
            },
        };
        transfers.put_back(buffer);
        result.map(|()| true)
    }

    pub(in crate::model) fn end(&mut self, sequence: &mut Sequence) {
        let Some(reload) = self.reload.take() else {
            return;
        };
        if let Some((_, transfers)) = &mut self.disk {
            transfers.rest();
        }
        let missing = reload.pieces.iter().filter(|piece| !piece.is_done);
        let whole = missing.map(|piece| match piece.target {
            Target::Block(number) => number * BLOCK,
            Target::Copy(..) => 0,
        });
        let whole = whole.min().unwrap_or(reload.tokens.len());
        let is_part = whole < reload.tokens.len();
        if is_part && (whole <= reload.shared || sequence.has_copies()) {
            sequence.abandon(reload.lane);
            return;
        }
        let rest = reload.tokens.get(reload.shared..whole);
        let rest = rest.unwrap_or_default();
        sequence.extend(reload.lane, rest);
        sequence.leave(reload.lane);
        self.counts.reloaded += 1;
        self.counts.reloaded_tokens += rest.len() as u64;
    }
}

/// Whether a saved conversation cannot be read later either.
fn is_damage(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
    )
}

/// Time limit for reading one conversation ahead. Our choice.
const AHEAD_MAX: Duration = Duration::from_secs(10);
