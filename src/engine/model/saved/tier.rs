//! The disk as the second tier of the KV cache: the saved conversations of a model.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    path::Path,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use super::{
    index::{Entry, Index, ModelStamp, Ranges, SavedConversation, read_header},
    reload::Reload,
    transfers::{Folder, Transfers},
};
use crate::{
    backend::Backend,
    disk::DiskTimeout,
    kv::KvCache,
    model::{parked::Kept, sequence::Sequence},
    reader::FileIdentity,
};
use cotenant_policy::{kv_type::KvType, speed::Calibration};
use cotenant_units::{Bytes, Tokens};

/// Saved conversations of a model, and the transfer in progress.
pub(in crate::model) struct Saved {
    pub(super) index: Index,
    /// Where headers are read at the start.
    opening: Option<mpsc::Receiver<io::Result<Found>>>,
    pub(super) disk: Option<(Arc<Folder>, Transfers)>,
    pub(super) stamp: Option<ModelStamp>,
    /// Number of the last series of transfers.
    pub(super) series: u64,
    pub(super) reload: Option<Reload>,
    /// Conversations that are still to be read ahead after the start, the most recent last.
    pub(super) ahead: Vec<u64>,
    /// Time to read a MiB, as measured by reads, and when the last of them ended.
    pub(super) read_ns_per_mib: u64,
    pub(super) measured: Instant,
    /// Time to compute a token of a prompt.
    pub(super) token: Duration,
    /// Time after which the disk counts as stalled.
    limit: DiskTimeout,
    pub(super) counts: SavedCounts,
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

/// The model's sequences, and their backend.
pub(in crate::model) struct Memory<'model> {
    pub(in crate::model) sequence: &'model mut Sequence,
    pub(in crate::model) backend: &'model mut dyn Backend,
}

impl Saved {
    /// Begins to read which conversations are saved in the folder at `path`, for the model with these `files`, rotary
    /// `factors` and `vocabulary`; `limit` is the time after which the disk counts as stalled.
    pub(in crate::model) fn start(
        path: &Path,
        files: Vec<FileIdentity>,
        factors: &[f32],
        (cache, vocabulary): (&KvCache, u32),
        limit: DiskTimeout,
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
                let stamp = ModelStamp { files, rotary };
                // The engine may have ended.
                sink.send(find(&folder, stamp, expected, &place_bytes)).ok();
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
            measured: Instant::now(),
            token: Duration::ZERO,
            limit,
            counts: SavedCounts::default(),
        })
    }

    /// Notes which of the kept conversations are saved, and what their eviction costs.
    pub(in crate::model) fn note_kept(&self, kept: &mut [Kept], sequence: &Sequence) {
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
    pub(in crate::model) fn is_opening(&mut self) -> bool {
        !self.open() && self.is_pending()
    }

    /// Whether the folder has not been read yet.
    pub(super) const fn is_pending(&self) -> bool {
        self.opening.is_some()
    }

    /// Takes over what was found at the start; returns the folder and the transfers if they are open.
    pub(super) fn open(&mut self) -> bool {
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
        let mut transfers = match Transfers::start(&folder, self.limit) {
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

    /// Memory of the buffers between the disk and the KV cache.
    pub(in crate::model) fn buffer_bytes(&self) -> Bytes {
        let disk = self.disk.as_ref();
        disk.map_or(Bytes::ZERO, |(_, transfers)| transfers.bytes())
    }

    pub(super) fn bytes_of(&self, saved: &SavedConversation) -> Bytes {
        Bytes::of_len(
            saved
                .slots()
                .count()
                .saturating_mul(self.index.slot_bytes()),
        )
    }

    /// Expected time to read `bytes`.
    pub(super) fn reading(&self, bytes: Bytes) -> Duration {
        let kib = bytes.get() / 1024;
        let per_mib = expected(self.read_ns_per_mib, self.measured.elapsed());
        Duration::from_nanos(per_mib.saturating_mul(kib) / 1024)
    }

    pub(in crate::model) fn view(&self, client: Option<&str>, held: &[u32]) -> SavedView {
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

    /// Hinders all transfers from now on.
    #[cfg(test)]
    pub(in crate::model) fn hinder(&mut self, limit: DiskTimeout, hindrance: super::Hindrance) {
        if let Some((folder, transfers)) = &mut self.disk {
            folder.hinder(hindrance);
            transfers.set_limit(limit);
        }
    }

    /// Limits the file of blocks.
    #[cfg(test)]
    pub(in crate::model) const fn limit_slots(&mut self, slots: usize) {
        self.index.limit_slots(slots);
    }

    /// Removes a saved conversation from the disk.
    pub(super) fn remove(&mut self, number: u64) {
        let ranges: Ranges = self.index.remove(number);
        self.ahead.retain(|other| *other != number);
        if let Some((folder, transfers)) = &mut self.disk {
            let folder = Arc::clone(folder);
            transfers.run((0, 0), move || folder.remove(number, &ranges));
        }
    }
}

/// Expected time to read a MiB, in nanoseconds, from a measurement of this age. Half of what exceeds the time of a usual
/// drive is forgotten in each [`HALF_LIFE`]: conversations on a disk that was slow once are not read, so that it would
/// never be measured again.
pub(super) fn expected(measured: u64, age: Duration) -> u64 {
    let usual = Calibration::FIELD.read_ns_per_mib;
    let halvings = age.as_secs() / HALF_LIFE.as_secs();
    let halvings = u32::try_from(halvings).unwrap_or(u32::MAX);
    let excess = measured.saturating_sub(usual).checked_shr(halvings);
    measured.min(usual).saturating_add(excess.unwrap_or(0))
}

/// Opens the folder and reads its headers; removes those that are damaged or of another model, and names them.
///
/// # Errors
/// When the disk fails. Everything stays.
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
            // It was not read: the disk or a permission is at fault, and the conversation may be whole.
            Err(error) if error.kind() != io::ErrorKind::InvalidData => return Err(error),
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

/// Half-life of measured times. Our choice: a disk that took 64 times as long as usual is tried again within an hour.
const HALF_LIFE: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_read_is_forgotten_and_a_fast_one_is_not() {
        let usual = Calibration::FIELD.read_ns_per_mib;
        let slow = 65 * usual;
        assert_eq!(expected(slow, Duration::ZERO), slow);
        assert_eq!(expected(slow, HALF_LIFE), 33 * usual);
        assert_eq!(expected(slow, HALF_LIFE * 6), 2 * usual);
        assert_eq!(expected(u64::MAX, Duration::MAX), usual);
        assert_eq!(expected(usual / 2, Duration::MAX), usual / 2);
    }
}
