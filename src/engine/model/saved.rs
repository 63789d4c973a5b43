//! Saved conversations: copied to disk while the engine is idle, and read back by a prompt that continues them.
//!
//! ```text
//!             idle for some time                    capacity is needed, or the daemon ends
//!   parked ─────────────────────► parked and saved ────────────────────────────────────────► saved
//!     ▲                                                                                       │
//!     └───────────────────── a prompt continues it, or the daemon has started ◄───────────────┘
//! ```
//!
//! A file holds blocks and copies of all conversations in slots, each once however many share it; a header per
//! conversation has its tokens, its slots and their checksums. A header is written after its slots, and slots are
//! reused after the headers that refer to them were removed, so that an interruption at any point loses at most what
//! was being written. A different model file, KV type or checksum rejects a conversation.

mod index;
mod transfers;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use self::{
    index::{
        BLOCK, Entry, Index, ModelStamp, Ranges, SavedConversation, SavedMark, Slot, damaged,
        read_header, write_header,
    },
    transfers::{BUFFERS, Done, Folder, PIECE, Transfers},
};
use super::{
    parked::{Asked, Conversation, Kept, LOST_MIN, Lane},
    sequence::{Restored, Sequence},
};
use crate::{
    backend::Backend,
    kv::{Copy as KvCopy, KvCache},
};
use cotenant_policy::{kv_type::KvType, speed::Calibration};
use cotenant_units::{Bytes, Tokens};

/// Saved conversations of a model, and the transfer in progress.
pub(super) struct Saved {
    index: Index,
    /// Where headers are read at the start.
    opening: Option<mpsc::Receiver<io::Result<Found>>>,
    disk: Option<(Arc<Folder>, Transfers)>,
    stamp: Option<ModelStamp>,
    /// Number of the last series of transfers.
    series: u64,
    reload: Option<Reload>,
    /// Conversations that are still to be read ahead after the start, the most recent last.
    ahead: Vec<u64>,
    /// Time to read a MiB, as measured by reads.
    read_ns_per_mib: u64,
    /// Time to compute a token of a prompt.
    token: Duration,
    counts: SavedCounts,
}

/// Conversations in the folder at the start.
struct Found {
    folder: Arc<Folder>,
    stamp: ModelStamp,
    conversations: Vec<(u64, SavedConversation)>,
}

/// What has been saved and read back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SavedCounts {
    /// Conversations written.
    pub saved: u64,
    /// Bytes written.
    pub saved_bytes: u64,
    /// Conversations of which tokens were read back.
    pub reloaded: u64,
    /// Tokens read back.
    pub reloaded_tokens: u64,
    /// Failed transfers and rejected conversations.
    pub failed: u64,
}

/// Saved conversations for display.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedView {
    /// All of them, the oldest first.
    pub conversations: Vec<OnDisk>,
    /// The one that the sequence continues.
    pub current: Option<u64>,
    /// Bytes in the file; shared ones count once.
    pub bytes: Bytes,
    /// What has been done.
    pub counts: SavedCounts,
}

/// A saved conversation for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OnDisk {
    /// Its number.
    pub number: u64,
    /// Its client.
    pub client: Option<String>,
    /// Its length in tokens.
    pub tokens: Tokens,
    /// Its bytes in the file.
    pub bytes: Bytes,
}

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

/// A conversation that is being read back.
struct Reload {
    number: u64,
    lane: Lane,
    /// The tokens to restore, of which the first `shared` are in memory.
    tokens: Vec<u32>,
    shared: usize,
    pieces: Vec<Piece>,
    /// The next piece to read.
    next: usize,
    left: usize,
    /// When computing becomes faster.
    until: Instant,
}

/// A part of a slot, and where it belongs.
struct Piece {
    offset: u64,
    len: usize,
    check: u32,
    target: Target,
    /// Offset in the place.
    at: usize,
    is_done: bool,
}

#[derive(Clone)]
enum Target {
    Block(usize),
    Copy(KvCopy, usize),
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
}

/// The model's sequences, and their backend.
pub(super) struct Memory<'model> {
    pub(super) sequence: &'model mut Sequence,
    pub(super) backend: &'model mut dyn Backend,
}

impl Saved {
    /// Begins to read which conversations are saved in the folder at `path`, for the model with these `files`, rotary
    /// `factors` and `vocabulary`.
    pub(super) fn start(
        path: &Path,
        files: Vec<PathBuf>,
        factors: &[f32],
        (cache, vocabulary): (&KvCache, u32),
    ) -> io::Result<Self> {
        let index = Index::new(cache.place_len_of(KvType::F16));
        let (sink, opening) = mpsc::channel();
        let folder = path.to_owned();
        let factors = factors.iter().flat_map(|factor| factor.to_le_bytes());
        let rotary = crc32fast::hash(&factors.collect::<Vec<u8>>());
        let place_bytes: BTreeMap<KvType, usize> = KvType::ALL
            .into_iter()
            .map(|kind| (kind, cache.place_len_of(kind)))
            .collect();
        let expected = (index.slot_bytes(), vocabulary);
        thread::Builder::new()
            .name("cotenant-saver".to_owned())
            .spawn(move || {
                let stamp = stamp(&files, rotary);
                let found = stamp.and_then(|stamp| find(&folder, stamp, expected, &place_bytes));
                // The engine may have ended.
                sink.send(found).ok();
            })?;
        Ok(Self {
            index,
            opening: Some(opening),
            disk: None,
            stamp: None,
            series: 0,
            reload: None,
            ahead: Vec::new(),
            read_ns_per_mib: Calibration::FIELD.read_ns_per_mib,
            token: Duration::ZERO,
            counts: SavedCounts::default(),
        })
    }

    /// Notes which of the kept conversations are saved, and what their eviction costs.
    pub(super) fn note_kept(&self, kept: &mut [Kept], sequence: &Sequence) {
        for (kept, (_, parked)) in kept.iter_mut().zip(sequence.idle()) {
            let mark = parked.marks.last().map_or(0, |mark| mark.position);
            let (client, kind) = (kept.client.as_deref(), sequence.cache.kind());
            let entry = self.index.covering(client, kind, (&parked.tokens, mark));
            kept.saved = entry.map(|entry| entry.number);
            let read = entry.map(|entry| self.reading(self.bytes_of(&entry.saved)));
            let in_tokens =
                read.and_then(|read| read.as_nanos().checked_div(self.token.as_nanos()));
            if let Some(tokens) = in_tokens {
                let tokens = Tokens::new(u32::try_from(tokens).unwrap_or(u32::MAX));
                kept.lost = kept.lost.min(tokens);
            }
        }
    }

    /// Whether it is not known yet which conversations there are.
    pub(super) fn is_opening(&mut self) -> bool {
        !self.open() && self.opening.is_some()
    }

    /// Takes over what was found at the start; returns the folder and the transfers if they are open.
    fn open(&mut self) -> bool {
        let found = self.opening.as_ref().map(mpsc::Receiver::try_recv);
        match found {
            None => {}
            Some(Err(mpsc::TryRecvError::Empty)) => return false,
            Some(Err(mpsc::TryRecvError::Disconnected)) => self.opening = None,
            Some(Ok(Ok(found))) => {
                self.opening = None;
                self.take_over(found);
            }
            Some(Ok(Err(error))) => {
                self.opening = None;
                self.counts.failed += 1;
                tracing::warn!("cannot open saved conversations: {error}; none is kept on disk");
            }
        }
        self.disk.is_some()
    }

    fn take_over(&mut self, found: Found) {
        let Found {
            folder,
            stamp,
            conversations,
        } = found;
        let mut transfers = match Transfers::start(&folder) {
            Ok(transfers) => transfers,
            Err(error) => {
                tracing::warn!("cannot start the threads that save conversations: {error}");
                return;
            }
        };
        for (number, conversation) in conversations {
            self.index.adopt(number, conversation);
            self.ahead.push(number);
        }
        let (unused, theirs) = (self.index.unused(u64::MAX), Arc::clone(&folder));
        transfers.run((self.series, 0), move || {
            let (ranges, end) = unused;
            theirs.release(&ranges);
            let len = theirs.blocks_len()?;
            if len > end {
                theirs.cut_blocks(end)
            } else {
                Ok(())
            }
        });
        self.disk = Some((folder, transfers));
        self.stamp = Some(stamp);
    }

    fn bytes_of(&self, saved: &SavedConversation) -> Bytes {
        Bytes::of_len(
            saved
                .slots()
                .count()
                .saturating_mul(self.index.slot_bytes()),
        )
    }

    /// Expected time to read `bytes`.
    fn reading(&self, bytes: Bytes) -> Duration {
        let kib = bytes.get() / 1024;
        Duration::from_nanos(self.read_ns_per_mib.saturating_mul(kib) / 1024)
    }

    pub(super) fn view(&self, client: Option<&str>, held: &[u32]) -> SavedView {
        let on_disk = |entry: &Entry| OnDisk {
            number: entry.number,
            client: entry.saved.client.clone(),
            tokens: Tokens::new(u32::try_from(entry.saved.tokens.len()).unwrap_or(u32::MAX)),
            bytes: self.bytes_of(&entry.saved),
        };
        let continues = |entry: &&Entry| {
            held.starts_with(&entry.saved.tokens) || entry.saved.tokens.starts_with(held)
        };
        let current = self.index.of(client).filter(|_| !held.is_empty());
        let used = self.index.slots_max() - self.index.free();
        SavedView {
            conversations: self.index.entries().iter().map(on_disk).collect(),
            current: current.filter(continues).last().map(|entry| entry.number),
            bytes: Bytes::of_len(used.saturating_mul(self.index.slot_bytes())),
            counts: self.counts,
        }
    }

    pub(super) fn save(
        &mut self,
        memory: Memory<'_>,
        held: &[u32],
        due: SaveDue,
        go_on: &mut dyn FnMut() -> bool,
    ) -> SaveStep {
        self.token = due.token;
        if !self.open() {
            return if self.opening.is_some() {
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
        let Some(draft) = self.draft(sequence, &source, held) else {
            let has_room = self.make_room(sequence, &source, held);
            return if has_room {
                SaveStep::Busy
            } else {
                SaveStep::Waits(None)
            };
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

    /// Prepares to write a conversation: takes slots for what no saved one has. Returns `None` if there are too few, or
    /// too many conversations.
    fn draft(&mut self, sequence: &Sequence, source: &Source, held: &[u32]) -> Option<Draft> {
        let cache = &sequence.cache;
        let kind = cache.kind();
        let (conversation, tokens, places, marks, precision) = match source {
            Source::Parked(number) => {
                let one = sequence.parked(*number)?;
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
        let near = self.index.nearest(client, kind, tokens);
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
            let all = self.index.of(client).filter(|one| one.saved.kind == kind);
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
        if wanted > self.index.free() || self.index.is_full(client, tokens) {
            return None;
        }
        let mut fresh = Vec::with_capacity(wanted);
        let index = &mut self.index;
        let mut take = |place: usize| {
            let number = index.take()?;
            fresh.push((number, place));
            let checks = Vec::new();
            Some(Slot { number, checks })
        };
        let blocks = (0..blocks).zip(places);
        let blocks = blocks.map(|(number, place)| known.remove(&number).or_else(|| take(*place)));
        let blocks = blocks.collect::<Option<Vec<_>>>()?;
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
        let marks = marks.collect::<Option<Vec<_>>>()?;
        let saved = SavedConversation {
            client: client.map(str::to_owned),
            end: conversation.end,
            tokens: tokens.to_vec(),
            kind,
            precision,
            blocks,
            marks,
        };
        Some(Draft { saved, fresh })
    }

    /// Removes the oldest saved conversation that is not in memory as well, of this client if it has several. Returns
    /// whether there was one: a conversation that is in memory would be saved again.
    fn make_room(&mut self, sequence: &Sequence, source: &Source, held: &[u32]) -> bool {
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

    /// Removes a saved conversation from the disk.
    fn remove(&mut self, number: u64) {
        let ranges: Ranges = self.index.remove(number);
        self.ahead.retain(|other| *other != number);
        if let Some((folder, transfers)) = &mut self.disk {
            let folder = Arc::clone(folder);
            transfers.run((0, 0), move || folder.remove(number, &ranges));
        }
    }

    /// Writes a conversation, and removes those that it replaces. Returns `false` if it was interrupted.
    fn write(
        &mut self,
        sequence: &Sequence,
        draft: Draft,
        go_on: &mut dyn FnMut() -> bool,
    ) -> io::Result<bool> {
        let Draft { mut saved, fresh } = draft;
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
        while receive(transfers, self.series)?.is_none() && go_on() {}
        let fresh: Vec<usize> = fresh.into_iter().map(|(slot, _)| slot).collect();
        let replaced = self
            .index
            .replaced_by(saved.client.as_deref(), &saved.tokens);
        self.counts.saved += 1;
        self.counts.saved_bytes += (fresh.len() * place_len) as u64;
        self.index.add(number, saved, &fresh);
        for number in replaced {
            self.remove(number);
        }
        Ok(true)
    }

    pub(super) fn begin_reload(
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
            let common = super::parked::common_prefix(&entry.saved.tokens, prompt);
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

    pub(super) fn begin_read_ahead(&mut self, memory: Memory<'_>, held: &[u32]) -> Option<bool> {
        let is_in_reach = memory.sequence.cache.bytes_at(0).is_some();
        if !self.open() || self.reload.is_some() || !is_in_reach {
            return self.opening.is_none().then_some(false);
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

    pub(super) fn go_on(&mut self, memory: Memory<'_>, patience: Duration) -> bool {
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
                    self.read_ns_per_mib = (self.read_ns_per_mib / 4)
                        .saturating_mul(3)
                        .saturating_add(newest / 4);
                    Ok(())
                }
                Ok(_) => Err(damaged("its blocks are damaged")),
                Err(error) => Err(error),
            },
        };
        transfers.put_back(buffer);
        result.map(|()| true)
    }

    pub(super) fn end(&mut self, sequence: &mut Sequence) {
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
fn fill(buffer: &mut crate::arena::Mapping, bytes: &[u8]) {
    let all = buffer.bytes_mut();
    let end = bytes.len().next_multiple_of(transfers::ALIGNMENT);
    if let Some(target) = all.get_mut(..bytes.len()) {
        target.copy_from_slice(bytes);
    }
    if let Some(rest) = all.get_mut(bytes.len()..end) {
        rest.fill(0);
    }
}

/// Whether a saved conversation cannot be read later either.
fn is_damage(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
    )
}

fn stamp(files: &[PathBuf], rotary: u32) -> io::Result<ModelStamp> {
    let of = |path: &PathBuf| {
        let metadata = fs::metadata(path)?;
        Ok((metadata.len(), metadata.mtime(), metadata.mtime_nsec()))
    };
    let files = files.iter().map(of).collect::<io::Result<_>>()?;
    Ok(ModelStamp { files, rotary })
}

/// Opens the folder and reads its headers; removes those that cannot be used, and names them.
fn find(
    path: &Path,
    stamp: ModelStamp,
    (slot_bytes, vocabulary): (usize, u32),
    place_bytes: &BTreeMap<KvType, usize>,
) -> io::Result<Found> {
    let folder = Arc::new(Folder::open(path)?);
    let mut conversations = Vec::new();
    for number in folder.numbers()? {
        let file = folder.header(number);
        let place = |kind| place_bytes.get(&kind).copied().unwrap_or(0);
        let header = File::open(&file)
            .and_then(|file| read_header(file, (&stamp, slot_bytes, vocabulary), place));
        match header {
            Ok(conversation) => conversations.push((number, conversation)),
            Err(error) => {
                tracing::warn!(
                    "cannot use saved conversation `{}`: {error}; it is removed",
                    file.display()
                );
                folder.remove(number, &[])?;
            }
        }
    }
    Ok(Found {
        folder,
        stamp,
        conversations,
    })
}

/// Interval of checks while a transfer is in progress.
const STEP: Duration = Duration::from_millis(1);
/// Time limit for reading one conversation ahead. Our choice.
const AHEAD_MAX: Duration = Duration::from_secs(10);
