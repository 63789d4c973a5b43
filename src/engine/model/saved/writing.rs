//! Writing idle conversations to disk.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::Arc,
    time::Duration,
};

use super::{
    index::{BLOCK, Entry, Index, SavedConversation, SavedMark, Slot, write_header},
    tier::{Memory, Saved},
    transfers::{self, PIECE, Transfers},
};
use crate::{
    arena::Mapping,
    model::{
        marks::Mark,
        parked::{Conversation, LOST_MIN, last_within},
        sequence::Sequence,
    },
};
use cotenant_units::Bytes;

/// Conversations to be saved.
#[derive(Clone, Copy, Debug)]
pub struct SaveDue {
    /// Time for which the sequence has been idle.
    pub idle: Duration,
    /// Idle time after which a conversation is saved.
    pub after: Duration,
    /// Time to compute a token of a prompt.
    pub token: Duration,
}

/// Outcome of saving the next conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveStep {
    /// One was saved.
    Saved,
    /// It was interrupted, or earlier work with the disk is not complete.
    Busy,
    /// None is due before this time has passed; `None` without any.
    Waits(Option<Duration>),
    /// The disk has failed.
    Failed,
}

/// The conversation to be saved.
enum Source {
    Parked(usize),
    Own,
}

/// What is written for a conversation.
struct Draft {
    saved: SavedConversation,
    /// Slots to write, each with its place in the KV cache.
    fresh: Vec<(usize, usize)>,
    /// Saved conversations that it replaces.
    replaced: Vec<u64>,
}

impl Saved {
    pub(in crate::model) fn save(
        &mut self,
        memory: Memory<'_>,
        held: &[u32],
        due: SaveDue,
        go_on: &mut dyn FnMut() -> bool,
    ) -> SaveStep {
        self.token = due.token;
        if !self.open() {
            return if self.is_pending() {
                SaveStep::Busy
            } else {
                SaveStep::Waits(None)
            };
        }
        let transfers = self.disk.as_mut().map(|(_, transfers)| transfers);
        match transfers.map_or(Ok(false), Transfers::is_idle) {
            Ok(true) if self.reload.is_none() => {}
            Ok(_) => return SaveStep::Busy,
            Err(error) => return self.save_failed(&error),
        }
        let Memory { sequence, backend } = memory;
        let source = match self.next_due(sequence, held, due) {
            Ok(source) => source,
            Err(next) => return SaveStep::Waits(next),
        };
        if matches!(source, Source::Own) && !sequence.prepare_saving(backend) {
            return SaveStep::Waits(None);
        }
        if let Err(error) = sequence.cache.settle(backend) {
            return self.save_failed(&io::Error::other(error));
        }
        let draft = match draft(&mut self.index, sequence, &source, held) {
            Ok(draft) => draft,
            Err(wanted) if self.make_room(sequence, &source, held, wanted) => {
                return SaveStep::Busy;
            }
            Err(_) => return SaveStep::Waits(None),
        };
        let fresh: Vec<usize> = draft.fresh.iter().map(|(slot, _)| *slot).collect();
        let written = self.write(sequence, draft, go_on);
        if !matches!(written, Ok(true)) {
            self.index.give_back(&fresh);
        }
        if let Some((_, transfers)) = &mut self.disk {
            transfers.rest();
        }
        match written {
            Ok(true) => SaveStep::Saved,
            Ok(false) => SaveStep::Busy,
            Err(error) => self.save_failed(&error),
        }
    }

    fn save_failed(&mut self, error: &io::Error) -> SaveStep {
        self.counts.failed += 1;
        tracing::warn!(
            "cannot save a conversation: {error}; it is computed again if it is evicted"
        );
        SaveStep::Failed
    }

    /// Returns the first conversation that is due; otherwise the time until the next one.
    fn next_due(
        &self,
        sequence: &Sequence,
        held: &[u32],
        due: SaveDue,
    ) -> Result<Source, Option<Duration>> {
        if sequence.cache.bytes_at(0).is_none() {
            // Memory of a device, or no memory.
            return Err(None);
        }
        let kind = sequence.cache.kind();
        let place = Bytes::of_len(sequence.cache.place_len());
        let is_wanted = |conversation: &Conversation, tokens: &[u32], mark: u32, places: usize| {
            let count = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            let client = conversation.client.as_deref();
            let read = self.reading(place.saturating_mul(places as u64));
            count >= LOST_MIN
                && places <= self.index.slots_max()
                && (mark > 0 || !sequence.has_copies())
                && read < due.token.saturating_mul(count)
                && self.index.covering(client, kind, (tokens, mark)).is_none()
        };
        let mut next: Option<Duration> = None;
        let mut is_due = |idle: Duration| {
            let left = due.after.saturating_sub(idle);
            if left > Duration::ZERO {
                next = Some(next.map_or(left, |next| next.min(left)));
            }
            left == Duration::ZERO
        };
        for (number, one) in sequence.idle() {
            let mark = one.marks.last().map_or(0, |mark| mark.position);
            let copies = one.marks.iter().map(|mark| {
                let (places, ..) = sequence.cache.copy_places(&mark.copy);
                places.len()
            });
            let places = one.tokens.len().div_ceil(BLOCK) + copies.sum::<usize>();
            if !one.is_superseded
                && is_wanted(&one.conversation, &one.tokens, mark, places)
                && is_due(one.since.elapsed())
            {
                return Ok(Source::Parked(number));
            }
        }
        let mark = sequence.marks.last().map_or(0, |mark| mark.position);
        // The copy of its present state is made when it is saved.
        let mark = mark.max(u32::from(sequence.has_copies()));
        let places = held.len().div_ceil(BLOCK);
        if sequence.is_continuable(held)
            && is_wanted(&sequence.conversation, held, mark, places)
            && is_due(due.idle)
        {
            return Ok(Source::Own);
        }
        Err(next)
    }

    /// Removes the oldest saved conversation that is not in memory as well, of this client if it has several; those that
    /// are in memory would be saved again. Returns whether one was removed: none is if all of them leave fewer than
    /// `wanted` slots.
    fn make_room(
        &mut self,
        sequence: &Sequence,
        source: &Source,
        held: &[u32],
        wanted: usize,
    ) -> bool {
        let kind = sequence.cache.kind();
        let client = match source {
            Source::Parked(number) => sequence.parked(*number).map(|one| &one.conversation),
            Source::Own => Some(&sequence.conversation),
        };
        let client = client.and_then(|conversation| conversation.client.as_deref());
        let own = (&sequence.conversation, held);
        let parked = sequence
            .idle()
            .map(|(_, one)| (&one.conversation, &one.tokens[..]));
        let in_memory: Vec<u64> = std::iter::once(own)
            .chain(parked)
            .filter_map(|(conversation, tokens)| {
                let client = conversation.client.as_deref();
                let entry = self.index.covering(client, kind, (tokens, 0))?;
                Some(entry.number)
            })
            .collect();
        let may_go = |entry: &&Entry| !in_memory.contains(&entry.number);
        let stays = self.index.entries().iter().filter(|entry| !may_go(entry));
        let stays = stays.flat_map(|entry| entry.saved.slots().map(|slot| slot.number));
        let stays = stays.collect::<BTreeSet<usize>>().len();
        if wanted > self.index.slots_max().saturating_sub(stays) {
            return false;
        }
        let own: Vec<u64> = self
            .index
            .of(client)
            .filter(may_go)
            .map(|one| one.number)
            .collect();
        let all = self
            .index
            .entries()
            .iter()
            .find(may_go)
            .map(|one| one.number);
        let oldest = own.first().copied().filter(|_| own.len() > 1).or(all);
        if let Some(number) = oldest {
            self.remove(number);
        }
        oldest.is_some()
    }

    /// Writes a conversation, and removes those that it replaces. Returns `false` if it was interrupted.
    fn write(
        &mut self,
        sequence: &Sequence,
        draft: Draft,
        go_on: &mut dyn FnMut() -> bool,
    ) -> io::Result<bool> {
        let Draft {
            mut saved,
            fresh,
            replaced,
        } = draft;
        let (Some((folder, transfers)), Some(stamp)) = (&mut self.disk, &self.stamp) else {
            return Ok(false);
        };
        self.series += 1;
        let place_len = sequence.cache.place_len();
        let pieces = place_len.div_ceil(PIECE).max(1);
        let total = fresh.len() * pieces;
        let mut checks = vec![0; total];
        let (mut next, mut done) = (0, 0);
        while done < total {
            if !go_on() {
                return Ok(false);
            }
            if let Some((slot, place)) = fresh.get(next / pieces)
                && let Some(mut buffer) = transfers.buffer()?
            {
                let at = next % pieces * PIECE;
                let bytes = sequence.cache.bytes_at(*place).unwrap_or_default();
                let bytes = bytes.get(at..place_len.min(at + PIECE)).unwrap_or_default();
                fill(&mut buffer, bytes);
                let offset = self.index.offset(*slot) + at as u64;
                transfers.write((self.series, next), buffer, bytes.len(), offset);
                next += 1;
                continue;
            }
            if let Some(check) = receive(transfers, self.series)? {
                let (number, check) = check;
                if let Some(entry) = checks.get_mut(number) {
                    *entry = check;
                }
                done += 1;
            }
        }
        let checks = fresh.iter().zip(checks.chunks(pieces));
        let checks: BTreeMap<usize, &[u32]> =
            checks.map(|((slot, _), checks)| (*slot, checks)).collect();
        for slot in saved.slots_mut() {
            if let Some(checks) = checks.get(&slot.number) {
                slot.checks = checks.to_vec();
            }
        }
        let number = self.index.next_number();
        let text = write_header(stamp, self.index.slot_bytes(), &saved)?;
        let theirs = Arc::clone(folder);
        transfers.run((self.series, total), move || {
            theirs.write_header(number, &text)
        });
        // Without a header the blocks serve this run only.
        let mut is_written = false;
        while !is_written && go_on() {
            is_written = receive(transfers, self.series)?.is_some();
        }
        let fresh: Vec<usize> = fresh.into_iter().map(|(slot, _)| slot).collect();
        self.counts.saved += 1;
        self.counts.saved_bytes += (fresh.len() * place_len) as u64;
        self.index.add(number, saved, &fresh);
        // An earlier version stays until the later one is known to be on disk.
        for number in replaced.into_iter().filter(|_| is_written) {
            self.remove(number);
        }
        Ok(true)
    }
}

/// Prepares to write a conversation: takes slots for what no saved one has. If there are too few, or too many
/// conversations, returns the number of slots that it wants.
fn draft(
    index: &mut Index,
    sequence: &Sequence,
    source: &Source,
    held: &[u32],
) -> Result<Draft, usize> {
    let cache = &sequence.cache;
    let kind = cache.kind();
    let (conversation, tokens, places, marks, precision) = match source {
        Source::Parked(number) => {
            let one = sequence.parked(*number).ok_or(usize::MAX)?;
            let places = cache.parked_places(*number);
            (
                &one.conversation,
                &one.tokens[..],
                places,
                &one.marks[..],
                one.kv_precision,
            )
        }
        Source::Own => {
            let places = cache.own_places(sequence.position);
            let marks = sequence.marks.all();
            (
                &sequence.conversation,
                held,
                places,
                marks,
                sequence.kv_precision,
            )
        }
    };
    let client = conversation.client.as_deref();
    let near = index.nearest(client, kind, tokens);
    let near = near.map(|(entry, common)| (Arc::clone(&entry.saved), common as usize));
    let mut known: BTreeMap<usize, Slot> = BTreeMap::new();
    if let Some((near, common)) = &near {
        for (number, slot) in near.blocks.iter().enumerate() {
            if ((number + 1) * BLOCK).min(tokens.len()) <= *common {
                known.insert(number, slot.clone());
            }
        }
    }
    let same_copy = |position: u32, windows: (usize, usize, usize)| {
        let all = index.of(client).filter(|one| one.saved.kind == kind);
        let prefix = tokens.get(..position as usize)?;
        let mut like = all.filter(|one| one.saved.tokens.starts_with(prefix));
        like.find_map(|one| {
            let mut marks = one.saved.marks.iter();
            let same = |mark: &&SavedMark| (mark.position, mark.windows) == (position, windows);
            marks.find(same).map(|mark| mark.copy.clone())
        })
    };
    let copies: Vec<_> = marks
        .iter()
        .map(|mark| {
            let (places, windows, slots) = cache.copy_places(&mark.copy);
            let windows = (windows.start, windows.end, slots);
            (mark, places, windows, same_copy(mark.position, windows))
        })
        .collect();
    let blocks = tokens.len().div_ceil(BLOCK);
    let of_copies = copies.iter().filter(|(.., same)| same.is_none());
    let of_copies: usize = of_copies.map(|(_, places, ..)| places.len()).sum();
    let wanted = blocks.saturating_sub(known.len()) + of_copies;
    let replaced = replaced_by(index, sequence, held, (client, tokens, marks));
    if wanted > index.free() || index.is_full(&replaced, tokens.len()) {
        return Err(wanted);
    }
    let mut fresh = Vec::with_capacity(wanted);
    let mut take = |place: usize| {
        let number = index.take()?;
        fresh.push((number, place));
        let checks = Vec::new();
        Some(Slot { number, checks })
    };
    let blocks = (0..blocks).zip(places);
    let blocks = blocks.map(|(number, place)| known.remove(&number).or_else(|| take(*place)));
    let blocks = blocks.collect::<Option<Vec<_>>>().ok_or(wanted)?;
    let marks = copies.into_iter().map(|(mark, places, windows, same)| {
        let copy = match same {
            Some(same) => same,
            None => places
                .iter()
                .map(|place| take(*place))
                .collect::<Option<_>>()?,
        };
        Some(SavedMark {
            position: mark.position,
            is_fork: mark.is_fork(),
            windows,
            copy,
        })
    });
    let marks = marks.collect::<Option<Vec<_>>>().ok_or(wanted)?;
    let saved = SavedConversation {
        client: client.map(str::to_owned),
        end: conversation.end,
        tokens: tokens.to_vec(),
        kind,
        precision,
        blocks,
        marks,
    };
    Ok(Draft {
        saved,
        fresh,
        replaced,
    })
}

/// Numbers of the saved conversations that one with these `tokens` and `marks` replaces: not those that another
/// conversation in memory needs, which would be saved again and replace this one.
fn replaced_by(
    index: &Index,
    sequence: &Sequence,
    held: &[u32],
    (client, tokens, marks): (Option<&str>, &[u32], &[Mark]),
) -> Vec<u64> {
    let kind = sequence.cache.kind();
    let own = sequence.is_continuable(held);
    let own = own.then_some((&sequence.conversation, held, sequence.marks.all()));
    let parked = sequence.idle().filter(|(_, one)| !one.is_superseded);
    let parked = parked.map(|(_, one)| (&one.conversation, &one.tokens[..], &one.marks[..]));
    let others = own.into_iter().chain(parked);
    let needed: Vec<u64> = others
        .filter(|(conversation, ..)| conversation.client.as_deref() == client)
        .filter_map(|(_, other, its)| {
            let length = u32::try_from(other.len()).unwrap_or(u32::MAX);
            let mark = last_within(its, length);
            let is_within = tokens.starts_with(other) && last_within(marks, length) >= mark;
            let entry = index.covering(client, kind, (other, mark))?;
            (!is_within).then_some(entry.number)
        })
        .collect();
    let mut replaced = index.replaced_by(client, tokens);
    replaced.retain(|number| !needed.contains(number));
    replaced
}

/// Waits briefly for a result of a series; returns its number and CRC.
fn receive(transfers: &mut Transfers, series: u64) -> io::Result<Option<(usize, u32)>> {
    let Some(done) = transfers.take(STEP)? else {
        return Ok(None);
    };
    if let Some(buffer) = done.buffer {
        transfers.put_back(buffer);
    }
    let (of, number) = done.tag;
    if of == series {
        Ok(Some((number, done.result?)))
    } else {
        Ok(None)
    }
}

/// Fills a buffer, and clears the rest of the last sector.
fn fill(buffer: &mut Mapping, bytes: &[u8]) {
    let all = buffer.bytes_mut();
    let end = bytes.len().next_multiple_of(transfers::ALIGNMENT);
    if let Some(target) = all.get_mut(..bytes.len()) {
        target.copy_from_slice(bytes);
    }
    if let Some(rest) = all.get_mut(bytes.len()..end) {
        rest.fill(0);
    }
}

/// Interval of checks while a transfer is in progress.
const STEP: Duration = Duration::from_millis(1);
