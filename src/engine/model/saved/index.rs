//! Index of saved conversations: which blocks each has, and which slots of the file are free.

use std::{
    io::{self, BufRead as _, Read as _},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::transfers::{ALIGNMENT, PIECE};
use crate::{
    model::parked::{Conversation, common_prefix},
    reader::FileIdentity,
    spec::POSITIONS_MAX,
};
use cotenant_policy::kv_type::KvType;

/// Header of a conversation's file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Header<Of> {
    pub(super) model: ModelStamp,
    /// Bytes of a slot.
    pub(super) slot_bytes: usize,
    pub(super) conversation: Of,
}

/// What the saved blocks depend on besides the tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ModelStamp {
    /// The files of the model, with its tokenizer.
    pub(super) files: Vec<FileIdentity>,
    /// CRC of the rotary factors, which depend on the configured context.
    pub(super) rotary: u32,
}

/// A saved conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedConversation {
    pub(super) client: Option<String>,
    pub(super) end: u32,
    pub(super) tokens: Vec<u32>,
    /// KV type of its blocks.
    pub(super) kind: KvType,
    pub(super) precision: KvType,
    pub(super) blocks: Vec<Slot>,
    pub(super) marks: Vec<SavedMark>,
}

/// A place of the KV cache in the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Slot {
    pub(super) number: usize,
    /// CRC of each piece.
    pub(super) checks: Vec<u32>,
}

/// A position to which a conversation can be cut back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedMark {
    pub(super) position: u32,
    pub(super) is_fork: bool,
    /// Blocks of windowed layers, and the number of slots for them.
    pub(super) windows: (usize, usize, usize),
    pub(super) copy: Vec<Slot>,
}

/// A saved conversation and the number of its header; later ones have larger numbers.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) number: u64,
    pub(super) saved: Arc<SavedConversation>,
}

/// All saved conversations, the oldest first.
#[derive(Debug)]
pub(super) struct Index {
    entries: Vec<Entry>,
    /// Number of references to each slot.
    uses: Vec<u32>,
    slots_max: usize,
    slot_bytes: usize,
    last: u64,
}

/// Ranges of the file that a removed conversation leaves, as offset and length.
pub(super) type Ranges = Vec<(u64, u64)>;

impl SavedConversation {
    pub(super) fn slots(&self) -> impl Iterator<Item = &Slot> {
        let copies = self.marks.iter().flat_map(|mark| &mark.copy);
        self.blocks.iter().chain(copies)
    }

    pub(super) fn slots_mut(&mut self) -> impl Iterator<Item = &mut Slot> {
        let copies = self.marks.iter_mut().flat_map(|mark| &mut mark.copy);
        self.blocks.iter_mut().chain(copies)
    }

    /// Position of the last mark within the first `common` tokens; 0 without one.
    pub(super) fn mark_within(&self, common: u32) -> u32 {
        let marks = self.marks.iter().map(|mark| mark.position);
        let within = marks.filter(|position| *position <= common);
        within.max().unwrap_or(0)
    }

    /// Whether all figures are within their limits.
    fn is_whole(&self, vocabulary: u32, slots_max: usize, place_bytes: usize) -> bool {
        let length = self.tokens.len();
        let pieces = place_bytes.div_ceil(PIECE);
        self.tokens.iter().all(|token| *token < vocabulary)
            && self.blocks.len() == length.div_ceil(BLOCK)
            && self
                .slots()
                .all(|slot| slot.number < slots_max && slot.checks.len() == pieces)
            && self.marks.iter().all(|mark| {
                let (first, end, slots) = mark.windows;
                let blocks = end.checked_sub(first);
                mark.position as usize <= length
                    && end <= self.blocks.len()
                    && slots <= WINDOW_SLOTS_MAX
                    && blocks.is_some_and(|blocks| blocks <= slots)
            })
    }
}

impl Index {
    /// Creates an empty index of slots that hold `place_bytes` bytes each.
    pub(super) fn new(place_bytes: usize) -> Self {
        let slot_bytes = place_bytes.next_multiple_of(ALIGNMENT).max(ALIGNMENT);
        Self {
            entries: Vec::new(),
            uses: Vec::new(),
            slots_max: BYTES_MAX / slot_bytes,
            slot_bytes,
            last: 0,
        }
    }

    pub(super) const fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Offset of a slot in the file.
    pub(super) const fn offset(&self, slot: usize) -> u64 {
        slot as u64 * self.slot_bytes as u64
    }

    /// Adds a conversation whose header was read.
    pub(super) fn adopt(&mut self, number: u64, saved: SavedConversation) {
        self.last = self.last.max(number);
        for slot in saved.slots() {
            self.hold(slot.number);
        }
        let saved = Arc::new(saved);
        self.entries.push(Entry { number, saved });
    }

    /// Adds a conversation whose fresh slots are held already; returns its number.
    pub(super) fn add(&mut self, number: u64, saved: SavedConversation, fresh: &[usize]) {
        self.adopt(number, saved);
        self.give_back(fresh);
    }

    /// Number of the next header.
    pub(super) const fn next_number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn hold(&mut self, slot: usize) {
        if slot >= self.uses.len() {
            self.uses.resize(slot + 1, 0);
        }
        if let Some(uses) = self.uses.get_mut(slot) {
            *uses = uses.saturating_add(1);
        }
    }

    /// Takes a free slot.
    pub(super) fn take(&mut self) -> Option<usize> {
        let free = self.uses.iter().position(|uses| *uses == 0);
        let free = free.unwrap_or(self.uses.len());
        (free < self.slots_max).then(|| self.hold(free))?;
        Some(free)
    }

    /// Gives slots back that were taken.
    pub(super) fn give_back(&mut self, slots: &[usize]) {
        for slot in slots {
            if let Some(uses) = self.uses.get_mut(*slot) {
                *uses = uses.saturating_sub(1);
            }
        }
    }

    /// Number of slots that can be taken.
    pub(super) fn free(&self) -> usize {
        let used = self.uses.iter().filter(|uses| **uses > 0).count();
        self.slots_max.saturating_sub(used)
    }

    #[cfg(test)]
    pub(super) const fn limit_slots(&mut self, slots: usize) {
        self.slots_max = slots;
    }

    /// Number of slots in the file.
    pub(super) const fn slots_max(&self) -> usize {
        self.slots_max
    }

    /// Whether there are as many conversations or tokens as permitted beside one of `tokens` tokens and without those
    /// that it has `replaced`.
    pub(super) fn is_full(&self, replaced: &[u64], tokens: usize) -> bool {
        let left = self
            .entries
            .iter()
            .filter(|one| !replaced.contains(&one.number));
        let lengths: Vec<usize> = left.map(|one| one.saved.tokens.len()).collect();
        let all = lengths.iter().sum::<usize>() + tokens;
        lengths.len() >= ENTRIES_MAX || all > TOKENS_MAX
    }

    /// Removes a conversation; returns the ranges that no other one uses.
    pub(super) fn remove(&mut self, number: u64) -> Ranges {
        let at = self.entries.iter().position(|one| one.number == number);
        let Some(entry) = at.map(|at| self.entries.remove(at)) else {
            return Vec::new();
        };
        let slots: Vec<usize> = entry.saved.slots().map(|slot| slot.number).collect();
        self.give_back(&slots);
        let mut free: Vec<usize> = slots
            .into_iter()
            .filter(|slot| self.uses.get(*slot) == Some(&0))
            .collect();
        free.sort_unstable();
        free.dedup();
        self.ranges(free)
    }

    /// Ranges of the first slots of a file that no conversation uses, and the end of the last used one.
    pub(super) fn unused(&self, len: u64) -> (Ranges, u64) {
        let end = self.uses.iter().rposition(|uses| *uses > 0);
        let end = end.map_or(0, |last| last + 1);
        let unused = (0..end).filter(|slot| self.uses.get(*slot) == Some(&0));
        (self.ranges(unused), self.offset(end).min(len))
    }

    fn ranges(&self, slots: impl IntoIterator<Item = usize>) -> Ranges {
        let range = |slot| (self.offset(slot), self.slot_bytes as u64);
        slots.into_iter().map(range).collect()
    }

    /// Returns the client's conversation of this KV type with the longest common prefix with `tokens`.
    pub(super) fn nearest(
        &self,
        client: Option<&str>,
        kind: KvType,
        tokens: &[u32],
    ) -> Option<(&Entry, u32)> {
        let own = self.of(client).filter(|one| one.saved.kind == kind);
        own.map(|one| (one, common_prefix(&one.saved.tokens, tokens)))
            .max_by_key(|(_, common)| *common)
    }

    /// Conversations of a client.
    pub(super) fn of(&self, client: Option<&str>) -> impl Iterator<Item = &Entry> {
        let is_own = move |one: &&Entry| one.saved.client.as_deref() == client;
        self.entries.iter().filter(is_own)
    }

    /// Returns the client's conversation that contains all of `tokens`, with a mark from `mark` on.
    pub(super) fn covering(
        &self,
        client: Option<&str>,
        kind: KvType,
        (tokens, mark): (&[u32], u32),
    ) -> Option<&Entry> {
        let length = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        self.of(client).find(|one| {
            one.saved.kind == kind
                && one.saved.tokens.starts_with(tokens)
                && one.saved.mark_within(length) >= mark
        })
    }

    /// Numbers of the conversations that a new one replaces: those that it continues, as in memory.
    pub(super) fn replaced_by(&self, client: Option<&str>, tokens: &[u32]) -> Vec<u64> {
        let is_replaced = |one: &&Entry| {
            let common = common_prefix(&one.saved.tokens, tokens);
            let conversation = Conversation {
                end: one.saved.end,
                ..Conversation::default()
            };
            common as usize == one.saved.tokens.len() || conversation.is_superseded_at(common)
        };
        let replaced = self.of(client).filter(is_replaced);
        replaced.map(|one| one.number).collect()
    }
}

/// Writes a header: its version, length and CRC in the first line.
pub(super) fn write_header(
    model: &ModelStamp,
    slot_bytes: usize,
    conversation: &SavedConversation,
) -> io::Result<Vec<u8>> {
    let text = serde_json::to_string(&Header {
        model: model.clone(),
        slot_bytes,
        conversation,
    })?;
    let check = crc32fast::hash(text.as_bytes());
    Ok(format!("{MAGIC} {} {check}\n{text}", text.len()).into_bytes())
}

/// Reads a header.
///
/// # Errors
/// When it is damaged, or belongs to another model.
pub(super) fn read_header(
    from: impl io::Read,
    expected: (&ModelStamp, usize, u32),
    place_bytes: impl Fn(KvType) -> usize,
) -> io::Result<SavedConversation> {
    let (model, slot_bytes, vocabulary) = expected;
    let mut from = io::BufReader::new(from);
    let mut first = String::new();
    from.by_ref().take(FIRST_MAX).read_line(&mut first)?;
    let numbers = first.strip_prefix(MAGIC).map(str::trim);
    let numbers = numbers.and_then(|numbers| numbers.split_once(' '));
    let parsed = numbers
        .and_then(|(bytes, check)| Some((bytes.parse::<u64>().ok()?, check.parse::<u32>().ok()?)));
    let (bytes, check) = parsed.ok_or_else(|| damaged("it has another format"))?;
    let mut text = Vec::new();
    from.take(TEXT_MAX).read_to_end(&mut text)?;
    if text.len() as u64 != bytes || crc32fast::hash(&text) != check {
        return Err(damaged("its header is damaged"));
    }
    let header: Header<SavedConversation> =
        serde_json::from_slice(&text).map_err(|error| damaged(&error.to_string()))?;
    let conversation = header.conversation;
    let place_bytes = place_bytes(conversation.kind);
    let is_whole = header.model == *model
        && header.slot_bytes == slot_bytes
        && conversation.is_whole(vocabulary, BYTES_MAX / slot_bytes.max(1), place_bytes);
    if !is_whole {
        return Err(damaged("it belongs to another model"));
    }
    Ok(conversation)
}

pub(super) fn damaged(problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

const MAGIC: &str = "cotenant-conversation 4";
/// Tokens of a block.
pub(super) const BLOCK: usize = crate::kv::KV_BLOCK_TOKENS.get() as usize;
/// Most blocks of a window: those of the longest context.
const WINDOW_SLOTS_MAX: usize = POSITIONS_MAX as usize / BLOCK;
/// Longest first line, in bytes.
const FIRST_MAX: u64 = 128;
/// Largest header. Our choice: a conversation of 262,144 tokens in decimal digits, and the checks of its blocks.
const TEXT_MAX: u64 = 4 << 20;
/// Largest file of blocks. Our choice: 7281 tokens of Qwen3 4B in F16, and 46,603 of SmolLM2 135M.
const BYTES_MAX: usize = 1 << 30;
/// Maximum number of saved conversations: as many as are parked.
const ENTRIES_MAX: usize = 64;
/// Maximum tokens of all saved conversations, which are kept on the heap: 4 MiB.
const TOKENS_MAX: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(
        client: &str,
        tokens: impl Iterator<Item = u32>,
        slots: &[usize],
    ) -> SavedConversation {
        let slot = |number: &usize| Slot {
            number: *number,
            checks: vec![0],
        };
        SavedConversation {
            client: Some(client.to_owned()),
            end: 60,
            tokens: tokens.collect(),
            kind: KvType::F16,
            precision: KvType::F16,
            blocks: slots.iter().map(slot).collect(),
            marks: Vec::new(),
        }
    }

    #[test]
    fn slots_are_free_once_no_conversation_uses_them() {
        let mut index = Index::new(10_000);
        assert_eq!(index.slot_bytes(), 12_288);
        let taken: Vec<usize> = (0..3).map(|_| index.take().unwrap()).collect();
        assert_eq!(taken, [0, 1, 2]);
        index.add(1, saved("hall", 0..130, &[0, 1, 2]), &taken);
        index.adopt(2, saved("hall", 0..190, &[0, 1, 3]));
        assert_eq!(index.take(), Some(4));
        index.give_back(&[4]);
        // The client's longer version replaces the first; both share two slots.
        let tokens: Vec<u32> = (0..190).collect();
        assert_eq!(index.replaced_by(Some("hall"), &tokens), [1, 2]);
        assert_eq!(index.replaced_by(Some("study"), &tokens), [0; 0]);
        assert_eq!(index.remove(1), [(2 * 12_288, 12_288)]);
        assert_eq!(index.remove(1), []);
        assert_eq!(index.take(), Some(2));
        assert_eq!(index.unused(u64::MAX), (Vec::new(), 4 * 12_288));
        assert_eq!(index.remove(2).len(), 3);
        assert_eq!(index.free(), index.slots_max() - 1);
    }

    #[test]
    fn figures_of_a_header_that_cannot_be_are_refused() {
        let with = |windows| {
            let mut one = saved("hall", 0..130, &[0, 1, 2]);
            one.marks.push(SavedMark {
                position: 128,
                is_fork: false,
                windows,
                copy: Vec::new(),
            });
            one.is_whole(200, 8, 100)
        };
        assert!(with((1, 3, 4)));
        for windows in [
            (2, 1, 4),
            (0, 4, 4),
            (0, 3, 2),
            (usize::MAX - 1, usize::MAX, 1),
            (0, 1, usize::MAX / 64),
        ] {
            assert!(!with(windows), "{windows:?}");
        }
    }

    #[test]
    fn conversations_tokens_and_bytes_are_limited() {
        let mut index = Index::new(BYTES_MAX / 4);
        let taken: Vec<usize> = std::iter::from_fn(|| index.take()).collect();
        assert_eq!((taken.len(), index.free()), (4, 0));
        for number in 1..=64 {
            assert!(!index.is_full(&[], 100));
            let number = u32::try_from(number).unwrap();
            index.adopt(
                number.into(),
                saved("hall", number * 1000..number * 1000 + 100, &[]),
            );
        }
        assert!(index.is_full(&[], 100));
        // Unless it replaces one of them.
        let next: Vec<u32> = (1000..1200).collect();
        let replaced = index.replaced_by(Some("hall"), &next);
        assert!(!index.is_full(&replaced, next.len()));
        let mut index = Index::new(4096);
        index.adopt(1, saved("hall", 0..1 << 20, &[]));
        assert!(index.is_full(&[], 100));
    }
}
