//! Kept conversations on disk between two runs.
//!
//! ```text
//!   cotenant-conversations 1 LENGTH CRC
//!   {"model": …, "conversations": …, "checks": …}
//!   block block block …
//! ```
//!
//! The file contains each occupied place of the KV cache once, and the order of places in each conversation and copy. A
//! different model file, KV type or checksum rejects it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File, OpenOptions},
    io::{self, BufRead as _, BufReader, BufWriter, Read as _, Write as _},
    os::{
        fd::AsFd as _,
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::Path,
    time::{Duration, Instant},
};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use serde::{Deserialize, Serialize};

use super::{
    loaded::Model,
    marks::Mark,
    parked::{Conversation, Parked},
};
use cotenant_policy::kv_type::KvType;

/// Outcome of saving or restoring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// Number of conversations.
    pub conversations: usize,
    /// Bytes of their places.
    pub bytes: u64,
}

/// Header of the file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Contents {
    /// Length and modification time of each file of the model.
    model: Vec<(u64, i64, i64)>,
    kind: KvType,
    /// Bytes of a place.
    place_bytes: usize,
    conversations: Vec<SavedConversation>,
    /// For each copy: its places; its first block of windowed layers, the block after its last, and its number of block
    /// slots.
    copies: Vec<(Vec<usize>, (usize, usize, usize))>,
    /// The CRC of each place.
    checks: Vec<u32>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedConversation {
    client: Option<String>,
    end: u32,
    tokens: Vec<u32>,
    precision: KvType,
    is_superseded: bool,
    places: Vec<usize>,
    marks: Vec<SavedMark>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedMark {
    position: u32,
    is_fork: bool,
    /// Number of its copy.
    copy: usize,
}

impl SavedConversation {
    fn copies(&self) -> impl Iterator<Item = usize> {
        self.marks.iter().map(|mark| mark.copy)
    }
}

impl Model {
    /// Writes the most recent conversations, including the sequence, whose tokens are `held`, to a file of at most 256
    /// MiB. Creates no file if there are none.
    ///
    /// # Errors
    /// When the file cannot be written within 4 s; an incomplete file is removed.
    pub fn save_conversations(&mut self, held: &[u32], path: &Path) -> io::Result<Saved> {
        remove(path)?;
        self.sequence.park_whole(self.backend.as_mut(), held);
        let cache = &self.sequence.cache;
        cache
            .settle(self.backend.as_mut())
            .map_err(io::Error::other)?;
        if cache.bytes_at(0).is_none() {
            // Memory of a device, or no memory.
            return Ok(Saved::default());
        }
        let mut contents = self.contents()?;
        let place_len = cache.place_len();
        let most = usize::try_from(BYTES_MAX).unwrap_or(usize::MAX) / place_len.max(1);
        contents.keep_last(most);
        if contents.conversations.is_empty() {
            return Ok(Saved::default());
        }
        let places = contents.number_places();
        let bytes = |place: &usize| cache.bytes_at(*place).unwrap_or_default();
        contents.checks = places
            .iter()
            .map(|place| crc32fast::hash(bytes(place)))
            .collect();
        let text = serde_json::to_string(&contents)?;
        let began = Instant::now();
        let new = path.with_extension("new");
        let written = (|| {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&new)?;
            let mut out = BufWriter::new(file);
            let check = crc32fast::hash(text.as_bytes());
            writeln!(out, "{MAGIC} {} {check}", text.len())?;
            out.write_all(text.as_bytes())?;
            for place in &places {
                if began.elapsed() > WRITING_MAX {
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        format!("not written within {} s", WRITING_MAX.as_secs()),
                    ));
                }
                out.write_all(bytes(place))?;
            }
            out.into_inner()?;
            fs::rename(&new, path)
        })();
        if let Err(error) = written {
            remove(&new).ok();
            return Err(error);
        }
        Ok(Saved {
            conversations: contents.conversations.len(),
            bytes: (places.len() * place_len) as u64,
        })
    }

    /// Restores the most recent conversations that fit the capacity, and removes the file. `go_on` is polled between
    /// places; `false` aborts without restoring any.
    ///
    /// # Errors
    /// When the file cannot be read, is damaged, or belongs to another model or KV type.
    pub fn restore_conversations(
        &mut self,
        path: &Path,
        go_on: &mut dyn FnMut() -> bool,
    ) -> io::Result<Saved> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Saved::default()),
            Err(error) => return Err(error),
        };
        let read = self.read(&file, go_on);
        // Minimise the time that conversations are on disk.
        posix_fadvise(file.as_fd(), 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).ok();
        remove(path)?;
        read
    }

    fn read(&mut self, file: &File, go_on: &mut dyn FnMut() -> bool) -> io::Result<Saved> {
        let length = file.metadata()?.len();
        let mut from = BufReader::new(file);
        let mut contents = Contents::read(&mut from, length)?;
        let expected = (
            self.stamps()?,
            self.sequence.cache.kind(),
            self.sequence.cache.place_len(),
        );
        let is_ours = expected
            == (
                std::mem::take(&mut contents.model),
                contents.kind,
                contents.place_bytes,
            )
            && contents.is_whole(self.vocabulary());
        if !is_ours {
            return Err(damaged("it belongs to another model or KV type"));
        }
        if !self.sequence.is_untouched() || self.sequence.cache.bytes_at(0).is_none() {
            return Ok(Saved::default());
        }
        let checks = std::mem::take(&mut contents.checks);
        contents.keep_last(self.sequence.cache.places());
        let wanted: BTreeMap<usize, usize> =
            contents.number_places().into_iter().zip(0..).collect();
        let place_len = self.sequence.cache.place_len();
        self.sequence.cache.touch_places(wanted.len());
        let mut unwanted = vec![0; place_len];
        for (number, check) in checks.into_iter().enumerate() {
            if !go_on() {
                return Ok(Saved::default());
            }
            let place = wanted.get(&number).copied();
            let target = place.and_then(|place| self.sequence.cache.bytes_at_mut(place));
            let target = target.unwrap_or(&mut unwanted);
            from.read_exact(target)?;
            if crc32fast::hash(target) != check {
                return Err(damaged("it is damaged"));
            }
        }
        let saved = Saved {
            conversations: contents.conversations.len(),
            bytes: (wanted.len() * place_len) as u64,
        };
        self.take_over(contents);
        Ok(saved)
    }

    fn take_over(&mut self, contents: Contents) {
        let parked = contents.conversations.iter();
        let parked = parked.map(|one| one.places.clone()).collect();
        let copies = contents.copies.into_iter();
        let copies = copies
            .map(|(places, (first, end, slots))| (places, first..end, slots))
            .collect();
        let copies = self.sequence.cache.take_over(parked, copies);
        for one in contents.conversations {
            let mark = |mark: &SavedMark| {
                let copy = copies.get(mark.copy)?.clone();
                Some(Mark::of(mark.position, copy, mark.is_fork))
            };
            self.sequence.push_saved(Parked {
                conversation: Conversation {
                    client: one.client.map(Into::into),
                    request: 0,
                    end: one.end,
                },
                marks: one.marks.iter().filter_map(mark).collect(),
                tokens: one.tokens,
                kv_precision: one.precision,
                is_superseded: one.is_superseded,
                turn: 0,
                since: Instant::now(),
                is_lane: false,
                state: None,
            });
        }
    }

    /// Collects the parked conversations.
    fn contents(&self) -> io::Result<Contents> {
        let cache = &self.sequence.cache;
        let mut copies: Vec<(Vec<usize>, (usize, usize, usize))> = Vec::new();
        let mut conversations = Vec::new();
        for (number, one) in self.sequence.idle() {
            let mut mark = |mark: &Mark| {
                let (places, windows, slots) = cache.copy_places(&mark.copy);
                let copy = (places.to_vec(), (windows.start, windows.end, slots));
                let known = copies.iter().position(|known| *known == copy);
                let copy = known.unwrap_or_else(|| {
                    copies.push(copy);
                    copies.len() - 1
                });
                SavedMark {
                    position: mark.position,
                    is_fork: mark.is_fork(),
                    copy,
                }
            };
            conversations.push(SavedConversation {
                client: one.conversation.client.as_deref().map(str::to_owned),
                end: one.conversation.end,
                tokens: one.tokens.clone(),
                precision: one.kv_precision,
                is_superseded: one.is_superseded,
                places: cache.parked_places(number).to_vec(),
                marks: one.marks.iter().map(&mut mark).collect(),
            });
        }
        Ok(Contents {
            model: self.stamps()?,
            kind: cache.kind(),
            place_bytes: cache.place_len(),
            conversations,
            copies,
            checks: Vec::new(),
        })
    }

    fn stamps(&self) -> io::Result<Vec<(u64, i64, i64)>> {
        let stamp = |part: &crate::gguf::Part| {
            let metadata = fs::metadata(&part.path)?;
            Ok((metadata.len(), metadata.mtime(), metadata.mtime_nsec()))
        };
        self.header.parts().iter().map(stamp).collect()
    }
}

impl Contents {
    fn read(from: &mut BufReader<&File>, length: u64) -> io::Result<Self> {
        let mut first = String::new();
        from.by_ref().take(FIRST_MAX).read_line(&mut first)?;
        let numbers = first.strip_prefix(MAGIC).map(str::trim);
        let numbers = numbers.and_then(|numbers| numbers.split_once(' '));
        let parsed = numbers.and_then(|(bytes, check)| {
            Some((bytes.parse::<u64>().ok()?, check.parse::<u32>().ok()?))
        });
        let (bytes, check) = parsed.ok_or_else(|| damaged("it has another format"))?;
        if bytes > length.min(TEXT_MAX) {
            return Err(damaged("it is cut short"));
        }
        let mut text = vec![0; usize::try_from(bytes).unwrap_or(0)];
        from.read_exact(&mut text)?;
        if crc32fast::hash(&text) != check {
            return Err(damaged("it is damaged"));
        }
        serde_json::from_slice(&text).map_err(Into::into)
    }

    /// Whether all indices are valid, and each conversation has places for its tokens.
    fn is_whole(&self, vocabulary: u32) -> bool {
        let places = self.checks.len();
        let is_place = |place: &usize| *place < places;
        let copies = self.copies.iter();
        copies.clone().all(|(all, (first, end, slots))| {
            let blocks = end.checked_sub(*first);
            all.iter().all(is_place) && blocks.is_some_and(|blocks| blocks <= *slots)
        }) && self.conversations.iter().all(|one| {
            one.places.iter().all(is_place)
                && one.tokens.iter().all(|token| *token < vocabulary)
                && one.copies().all(|copy| copy < self.copies.len())
                && one.tokens.len().div_ceil(BLOCK) <= one.places.len()
        })
    }

    /// Keeps the most recent conversations that occupy at most `most` places together.
    fn keep_last(&mut self, most: usize) {
        let mut places = BTreeSet::new();
        let mut keep = 0;
        for one in self.conversations.iter().rev() {
            let copies = one.copies().filter_map(|copy| self.copies.get(copy));
            let more = copies.flat_map(|(places, _)| places).chain(&one.places);
            places.extend(more.copied());
            if places.len() > most {
                break;
            }
            keep += 1;
        }
        let first = self.conversations.len() - keep;
        self.conversations.drain(..first);
        // Drop copies that no conversation refers to.
        let mut copies = Vec::new();
        let mut numbers = BTreeMap::new();
        for one in &mut self.conversations {
            for mark in &mut one.marks {
                let copy = self.copies.get(mark.copy).cloned().unwrap_or_default();
                mark.copy = *numbers.entry(mark.copy).or_insert_with(|| {
                    copies.push(copy);
                    copies.len() - 1
                });
            }
        }
        self.copies = copies;
    }

    /// Renumbers the remaining places from 0, and returns their previous numbers.
    fn number_places(&mut self) -> Vec<usize> {
        let conversations = self.conversations.iter_mut();
        let all = conversations.map(|one| &mut one.places);
        let mut all: Vec<_> = all
            .chain(self.copies.iter_mut().map(|(places, _)| places))
            .collect();
        let were: BTreeSet<usize> = all
            .iter()
            .flat_map(|places| places.iter().copied())
            .collect();
        let numbers: BTreeMap<usize, usize> = were.iter().copied().zip(0..).collect();
        for place in all.iter_mut().flat_map(|places| places.iter_mut()) {
            *place = numbers.get(place).copied().unwrap_or(0);
        }
        were.into_iter().collect()
    }
}

fn damaged(problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

const MAGIC: &str = "cotenant-conversations 2";
/// Tokens of a block.
const BLOCK: usize = crate::kv::KV_BLOCK_TOKENS.get() as usize;
/// Longest first line, in bytes.
const FIRST_MAX: u64 = 128;
/// Largest header. Our choice: 64 conversations of 100,000 tokens in decimal digits.
const TEXT_MAX: u64 = 64 << 20;
/// Largest total of places. Our choice: 11,650 tokens of SmolLM2 135M in F16.
const BYTES_MAX: u64 = 256 << 20;
/// Time limit for writing: below the 5 s that the daemon waits for the engine when it ends.
const WRITING_MAX: Duration = Duration::from_secs(4);
