//! Leases and sequence numbers on disk for the next run.
//!
//! They are written before the client is notified, so unlike the journal they cannot be queued for a thread. Two slots
//! in one file are written alternately, each with its length and a checksum: a write interrupted by a kill leaves the
//! previous slot intact. Data accepted by the kernel survives the process; if the machine goes down, workers and
//! tenants end as well, so nothing is synced to disk.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::own::open_own;
use cotenant_policy::book::Book;
use cotenant_units::fnv1a;

/// Contents of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedBook {
    /// Boot ids of the runs whose leases continue here: the writing run first, then earlier ones.
    pub boot_ids: Vec<String>,
    /// The kernel's boot id.
    pub kernel_boot_id: String,
    /// Time of writing since the kernel booted, in clock ticks of `/proc/PID/stat`.
    pub written_at_ticks: u64,
    /// Whether the run ended cleanly, together with its workers.
    pub closed: bool,
    /// The leases and numbers.
    pub book: Book,
}

/// State left by the previous run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FoundBook {
    /// There was no previous run.
    Nothing,
    /// The last book that was written completely.
    Whole(SavedBook),
    /// No book in the file can be read: leases of the previous run are lost. The file is kept under this path.
    Damaged(PathBuf),
}

/// The file.
#[derive(Debug)]
pub struct BookFile {
    path: PathBuf,
    file: File,
    /// Sequence number of the last write; its parity selects the slot.
    sequence: u64,
    buffer: Vec<u8>,
}

/// A book cannot be opened or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {act} the book `{path}`")]
pub struct BookError {
    act: &'static str,
    path: PathBuf,
    source: io::Error,
}

impl BookFile {
    /// Opens the file and reads the state of the previous run. A file without a complete record is renamed, and a new
    /// one is created.
    ///
    /// # Errors
    /// If the file cannot be opened, read or renamed.
    pub fn open(path: &Path) -> Result<(Self, FoundBook), BookError> {
        let failed = |act, source| BookError {
            act,
            path: path.to_owned(),
            source,
        };
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(FILE_MODE);
        let mut open = || open_own(path, &mut options).map_err(|source| failed("open", source));
        let file = open()?;
        let mut book = Self {
            path: path.to_owned(),
            file,
            sequence: 0,
            buffer: Vec::new(),
        };
        let mut newest: Option<(u64, SavedBook)> = None;
        for place in 0..PLACES {
            let found = book
                .read_place(place)
                .map_err(|source| failed("read", source))?;
            if let Some((sequence, saved)) = found {
                book.sequence = book.sequence.max(sequence);
                if newest.as_ref().is_none_or(|(newer, _)| *newer < sequence) {
                    newest = Some((sequence, saved));
                }
            }
        }
        if let Some((_, saved)) = newest {
            return Ok((book, FoundBook::Whole(saved)));
        }
        let written = book
            .file
            .metadata()
            .map_err(|source| failed("read", source))?
            .len();
        if written == 0 {
            return Ok((book, FoundBook::Nothing));
        }
        let kept = path.with_extension("damaged");
        std::fs::rename(path, &kept).map_err(|source| failed("set aside", source))?;
        book.file = open()?;
        Ok((book, FoundBook::Damaged(kept)))
    }

    /// Writes a book over the older slot. Once this returns, the book survives the process.
    ///
    /// # Errors
    /// If it is too long, or the write fails; the previous book remains intact.
    pub fn write(&mut self, saved: &SavedBook) -> Result<(), BookError> {
        let result = self.try_write(saved);
        result.map_err(|source| BookError {
            act: "write",
            path: self.path.clone(),
            source,
        })
    }

    fn try_write(&mut self, saved: &SavedBook) -> io::Result<()> {
        let sequence = self.sequence + 1;
        self.buffer.clear();
        self.buffer.resize(HEADER, 0);
        serde_json::to_writer(&mut self.buffer, saved)?;
        let (header, body) = self.buffer.split_at_mut(HEADER);
        let length = u64::try_from(body.len()).unwrap_or(u64::MAX);
        if length > PLACE_BYTES - HEADER as u64 {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("it has {length} bytes, at most {PLACE_BYTES} are kept"),
            ));
        }
        let fields = [MAGIC, sequence, length, checksum(sequence, body)];
        for (field, to) in fields.into_iter().zip(header.chunks_exact_mut(8)) {
            to.copy_from_slice(&field.to_le_bytes());
        }
        self.file
            .write_all_at(&self.buffer, place_of(sequence) * PLACE_BYTES)?;
        self.sequence = sequence;
        Ok(())
    }

    fn read_place(&self, place: u64) -> io::Result<Option<(u64, SavedBook)>> {
        let at = place * PLACE_BYTES;
        let mut header = [0; HEADER];
        match self.file.read_exact_at(&mut header, at) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        let mut fields = header
            .chunks_exact(8)
            .map(|field| field.try_into().map_or(0, u64::from_le_bytes));
        let mut next = || fields.next().unwrap_or_default();
        let (magic, sequence, length, sum) = (next(), next(), next(), next());
        if magic != MAGIC || length > PLACE_BYTES {
            return Ok(None);
        }
        let mut body = vec![0; usize::try_from(length).unwrap_or_default()];
        match self.file.read_exact_at(&mut body, at + HEADER as u64) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        if checksum(sequence, &body) != sum {
            return Ok(None);
        }
        // A book in another version's form counts as unreadable.
        Ok(serde_json::from_slice(&body)
            .ok()
            .map(|saved| (sequence, saved)))
    }
}

const fn place_of(sequence: u64) -> u64 {
    sequence % PLACES
}

/// Returns the FNV-1a hash of the sequence and the text. It detects an interrupted write; it does not protect against
/// forgery, since a process that can write the file can also write a valid one.
fn checksum(sequence: u64, body: &[u8]) -> u64 {
    let sequence = sequence.to_le_bytes();
    fnv1a(sequence.iter().chain(body).copied())
}

/// `cotbook1` as bytes.
const MAGIC: u64 = u64::from_le_bytes(*b"cotbook1");

/// Length of the header: magic, sequence, length, checksum.
const HEADER: usize = 32;

const PLACES: u64 = 2;

/// Size of one slot: 64 leases of each of 64 users take less than 3 MiB. The file is sparse, so unused space takes no
/// blocks.
const PLACE_BYTES: u64 = 4 << 20;

/// Names of tenants and their users are private.
const FILE_MODE: u32 = 0o600;

#[cfg(test)]
mod tests {
    use super::*;
    use cotenant_policy::book::{BookedWorker, LastNumbers};

    fn saved(lease: u64) -> SavedBook {
        SavedBook {
            boot_ids: vec!["b".to_owned(), "a".to_owned()],
            kernel_boot_id: "k".to_owned(),
            written_at_ticks: 7,
            closed: false,
            book: Book {
                last: LastNumbers {
                    lease,
                    ..LastNumbers::default()
                },
                leases: Vec::new(),
                ended: Vec::new(),
                workers: vec![BookedWorker {
                    name: "asr".repeat(usize::try_from(lease).unwrap()),
                    ..BookedWorker::default()
                }],
            },
        }
    }

    #[test]
    fn the_last_book_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("book");
        let (mut file, nothing) = BookFile::open(&path).unwrap();
        assert_eq!(nothing, FoundBook::Nothing);
        // Alternately longer and shorter books.
        for lease in [1, 9, 2, 8, 3] {
            file.write(&saved(lease)).unwrap();
            let (again, found) = BookFile::open(&path).unwrap();
            assert_eq!(found, FoundBook::Whole(saved(lease)));
            file = again;
        }
    }

    #[test]
    fn a_write_that_was_cut_short_anywhere_leaves_the_one_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("book");
        let (mut file, _) = BookFile::open(&path).unwrap();
        file.write(&saved(1)).unwrap();
        file.write(&saved(2)).unwrap();
        let before = std::fs::read(&path).unwrap();
        file.write(&saved(3)).unwrap();
        let after = std::fs::read(&path).unwrap();
        let place = usize::try_from(place_of(3) * PLACE_BYTES).unwrap();
        let mut differing = (0..before.len()).filter(|at| before.get(*at) != after.get(*at));
        let last = differing.next_back().unwrap();
        for cut in place..last {
            let mut torn = before.clone();
            torn[place..cut].copy_from_slice(&after[place..cut]);
            let torn_path = folder.path().join("torn");
            // Rewrite only the changed part: the file is long.
            if cut == place {
                std::fs::write(&torn_path, &torn).unwrap();
            } else {
                let file = OpenOptions::new().write(true).open(&torn_path).unwrap();
                file.write_all_at(&after[place..cut], place as u64).unwrap();
            }
            let (_, found) = BookFile::open(&torn_path).unwrap();
            assert_eq!(
                found,
                FoundBook::Whole(saved(2)),
                "cut after {} bytes",
                cut - place
            );
        }
    }

    #[test]
    fn a_damaged_book_is_said_to_be_one_and_kept_aside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("book");
        let kept = folder.path().join("book.damaged");
        let garbage = [[0xff; 100].as_slice(), b"x", &[0; 64]];
        for garbage in garbage {
            std::fs::write(&path, garbage).unwrap();
            let (mut file, found) = BookFile::open(&path).unwrap();
            assert_eq!(found, FoundBook::Damaged(kept.clone()));
            assert_eq!(std::fs::read(&kept).unwrap(), garbage);
            file.write(&saved(4)).unwrap();
            assert_eq!(BookFile::open(&path).unwrap().1, FoundBook::Whole(saved(4)));
            std::fs::remove_file(&path).unwrap();
        }
        assert!(
            BookFile::open(folder.path())
                .unwrap_err()
                .to_string()
                .starts_with("cannot open the book")
        );
    }
}
