//! Model files: direct reads that keep the page cache clean.

use std::{
    fs::{File, Metadata, OpenOptions},
    hash::{DefaultHasher, Hasher as _},
    io,
    os::{
        fd::AsFd,
        unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, OnceLock},
    time::{Duration, Instant},
};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use serde::{Deserialize, Serialize};

use super::progress::{ReadProgress, ReadSize};
use crate::{
    disk::{DiskWatch, Head},
    error::{LoadErrorKind, ReadError},
    gguf::{OpenFile, Part},
};
use cotenant_units::{Bytes, lock::locked, page};

/// A range of the file with its purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Tensor or layer, for messages.
    pub what: Arc<str>,
    /// First wanted byte of the file.
    pub offset: u64,
    /// Number of wanted bytes.
    pub bytes: usize,
}

impl Extent {
    /// Offset of the aligned superset in the file.
    pub fn aligned_offset(&self) -> u64 {
        self.offset - self.offset % page().get()
    }

    /// Offset of the first wanted byte in the aligned superset.
    pub fn lead(&self) -> usize {
        usize::try_from(self.offset - self.aligned_offset()).unwrap_or(0)
    }

    /// Length of the aligned superset.
    pub fn aligned_bytes(&self) -> usize {
        (self.lead() + self.bytes).next_multiple_of(page().as_len())
    }

    /// The error of reading it from the file at `path`, which is empty if the file is not the cause.
    pub(crate) fn error(&self, path: &Path, problem: impl Into<String>) -> ReadError {
        ReadError {
            path: path.to_owned(),
            what: self.what.to_string(),
            offset: self.offset,
            bytes: Bytes::of_len(self.bytes),
            problem: problem.into(),
            replaced: false,
        }
    }
}

/// Source of weights.
pub trait Source: Send + Sync {
    /// Reads the aligned superset of `extent` to `target`, and notes at `progress` whenever data has arrived. Bytes
    /// beyond the end of the file are left unchanged.
    ///
    /// # Errors
    /// The system refuses, the file ends before the wanted bytes do, it was replaced by another model since it was
    /// opened, or `progress` was given up.
    ///
    /// # Safety
    ///
    /// `target` is page-aligned, and valid for writes of [`Extent::aligned_bytes`] without concurrent access.
    unsafe fn read(
        &self,
        extent: &Extent,
        target: NonNull<u8>,
        progress: &ReadProgress,
    ) -> Result<(), ReadError>;

    /// Reads a few bytes, such as an embedding row, to the heap; `target` is as long as `extent`.
    ///
    /// # Errors
    /// The system refuses, or the file ends too early.
    fn read_small(&self, extent: &Extent, target: &mut [u8]) -> Result<(), ReadError>;

    /// Identity of each of its files; `None` if they were not sampled.
    fn identity(&self) -> Option<Vec<FileIdentity>> {
        None
    }
}

/// Identity of a file of the opened model, for comparison with a later run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    stamp: Stamp,
    /// As [`Contents::first`].
    first: (u64, u64),
    /// As [`Contents::samples`].
    samples: u64,
}

/// The model's files, opened for direct reads.
#[derive(Debug)]
pub struct WeightFile {
    parts: Vec<PartFile>,
    /// Shared by all parts, assumed to be on one disk.
    size: ReadSize,
}

#[derive(Debug)]
struct PartFile {
    path: PathBuf,
    /// Offset of its first byte, counted across all parts.
    base: u64,
    buffered: File,
    direct: Option<File>,
    /// Its length at opening.
    bytes: u64,
    contents: Option<Contents>,
    known: Mutex<Known>,
}

/// Metadata that changes with each write to a file, but not when it is renamed or linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    bytes: u64,
    seconds: i64,
    nanoseconds: i64,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            bytes: metadata.len(),
            seconds: metadata.mtime(),
            nanoseconds: metadata.mtime_nsec(),
        }
    }
}

/// Identity of a file's contents after writes, copies or `touch`: hashes of its first bytes and of samples.
///
/// Hashing the whole file would take as long as loading it. Another model of the same shape, and a file that is being
/// written, differ in most of their bytes, and so in the samples.
#[derive(Debug)]
struct Contents {
    /// Hash of the first bytes, see [`Head`].
    first: (u64, u64),
    /// Hash of [`SAMPLES`] pages; unset until all of them were read.
    samples: OnceLock<u64>,
}

/// State of a file known to hold the model.
#[derive(Debug)]
struct Known {
    good: Stamp,
    /// A state that does not, and since when it has been unchanged.
    other: Option<(Stamp, Instant)>,
}

impl WeightFile {
    /// Opens the parts of a model, in the order of their offsets.
    ///
    /// # Errors
    /// A part cannot be opened, or there are none; a refusal of `O_DIRECT` alone is not an error.
    pub fn open(parts: &[Part]) -> io::Result<Self> {
        if parts.is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let open = |part: &Part| {
            let file = File::open(&part.path)?;
            let was = file.metadata()?;
            PartFile::of(part, (file, was), None, &DiskWatch::default()).map_err(io::Error::other)
        };
        let parts = parts.iter().map(open).collect::<io::Result<_>>()?;
        Ok(Self {
            parts,
            size: ReadSize::new(),
        })
    }

    /// From files that were opened to read their headers, each with its metadata at that time.
    ///
    /// # Errors
    /// Another file has its name by now; a refusal of `O_DIRECT` alone is not an error.
    pub(crate) fn of(
        parts: &[Part],
        files: Vec<OpenFile>,
        watch: &DiskWatch,
    ) -> Result<Self, LoadErrorKind> {
        let parts = parts.iter().zip(files);
        let parts = parts.map(|(part, OpenFile { file, was, head })| {
            let contents = Contents {
                first: (head.bytes, head.hash()),
                samples: OnceLock::new(),
            };
            PartFile::of(part, (file, was), Some(contents), watch)
        });
        Ok(Self {
            parts: parts.collect::<Result<_, _>>()?,
            size: ReadSize::new(),
        })
    }

    /// Starts read-ahead of small extents, all at once, for [`Self::read_expected`]; best effort.
    pub fn expect(&self, extents: &[Extent], watch: &DiskWatch) {
        for extent in extents {
            if let Ok((part, place)) = self.place(extent) {
                let ask = || {
                    part.advise(&place, PosixFadviseAdvice::POSIX_FADV_WILLNEED);
                    Ok(0)
                };
                watch.asking(&extent.what, ask).ok();
            }
        }
    }

    /// Reads a few expected bytes to the heap, leaving them in the page cache until [`Self::forget_all`].
    ///
    /// # Errors
    /// The system refuses, or the file ends too early.
    pub fn read_expected(
        &self,
        extent: &Extent,
        target: &mut [u8],
        watch: &DiskWatch,
    ) -> Result<(), ReadError> {
        let (part, place) = self.place(extent)?;
        let bytes = target.len();
        let ask = || {
            part.buffered
                .read_exact_at(target, place.offset)
                .map(|()| bytes)
        };
        let result = watch.asking(&extent.what, ask);
        result.map_err(|error| place.error(&part.path, describe(&error)))?;
        Ok(())
    }

    /// Checks that the files were not written or truncated since they were opened, and samples them, so that they can
    /// be recognised after later writes.
    ///
    /// # Errors
    /// They were, or cannot be read.
    pub(crate) fn check_unchanged(&self, watch: &DiskWatch) -> Result<(), LoadErrorKind> {
        for part in &self.parts {
            let samples = watch.asking_for("samples of it", || part.samples());
            let is = watch.asking_for("its length", || part.buffered.metadata());
            let is = is.map_err(LoadErrorKind::Open)?;
            if Stamp::of(&is) != part.known().good {
                return Err(LoadErrorKind::Changed {
                    path: part.path.clone(),
                    was: Bytes::new(part.bytes),
                    is: Bytes::new(is.len()),
                });
            }
            if let Some(contents) = &part.contents {
                contents
                    .samples
                    .set(samples.map_err(LoadErrorKind::Open)?)
                    .ok();
            }
        }
        Ok(())
    }

    /// Drops pages left in the page cache by small reads and the header; best effort.
    pub fn forget_all(&self) {
        for part in &self.parts {
            part.forget_all();
        }
    }

    /// The part that contains `extent`, and its range there.
    fn place(&self, extent: &Extent) -> Result<(&PartFile, Extent), ReadError> {
        let part = self.parts.iter().rfind(|part| part.base <= extent.offset);
        let part = part.ok_or_else(|| extent.error(Path::new(""), "it is in no file"))?;
        let extent = Extent {
            offset: extent.offset - part.base,
            ..extent.clone()
        };
        Ok((part, extent))
    }
}

impl PartFile {
    fn of(
        part: &Part,
        (buffered, was): (File, Metadata),
        contents: Option<Contents>,
        watch: &DiskWatch,
    ) -> Result<Self, LoadErrorKind> {
        // Small reads need one row, not megabytes of read-ahead; a refusal costs only page cache.
        posix_fadvise(
            buffered.as_fd(),
            0,
            0,
            PosixFadviseAdvice::POSIX_FADV_RANDOM,
        )
        .ok();
        let open = || {
            let mut options = OpenOptions::new();
            let direct = options
                .read(true)
                .custom_flags(libc::O_DIRECT)
                .open(&part.path)?;
            let is = direct.metadata()?;
            Ok((direct, is))
        };
        let direct = watch.asking_for("its weights", open).ok();
        let id = |meta: &Metadata| (meta.dev(), meta.ino());
        if let Some((_, is)) = direct.as_ref().filter(|(_, is)| id(is) != id(&was)) {
            return Err(LoadErrorKind::Changed {
                path: part.path.clone(),
                was: Bytes::new(was.len()),
                is: Bytes::new(is.len()),
            });
        }
        Ok(Self {
            path: part.path.clone(),
            base: part.base,
            buffered,
            direct: direct.map(|(direct, _)| direct),
            bytes: was.len(),
            contents,
            known: Mutex::new(Known {
                good: Stamp::of(&was),
                other: None,
            }),
        })
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        locked(&self.known)
    }

    fn identity(&self) -> Option<FileIdentity> {
        let contents = self.contents.as_ref()?;
        Some(FileIdentity {
            stamp: self.known().good,
            first: contents.first,
            samples: *contents.samples.get()?,
        })
    }

    fn stamp(&self) -> io::Result<Stamp> {
        self.buffered.metadata().map(|now| Stamp::of(&now))
    }

    /// Performs `read` only on the opened model: the file was not written meanwhile, and if it was written before, its
    /// contents are the same.
    fn read_known(
        &self,
        extent: &Extent,
        mut read: impl FnMut() -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        for _ in 0..READS_MAX {
            let before = self.known().good;
            read()?;
            let now = self
                .stamp()
                .map_err(|error| extent.error(&self.path, describe(&error)))?;
            if now == before {
                return Ok(());
            }
            self.recognise(extent, now)?;
        }
        Err(extent.error(
            &self.path,
            "the file was modified after it was opened, and still is",
        ))
    }

    /// Compares the contents of the written file with those of the opened model.
    fn recognise(&self, extent: &Extent, now: Stamp) -> Result<(), ReadError> {
        let mut known = self.known();
        if known.good == now {
            return Ok(());
        }
        let same = now.bytes >= self.bytes && self.is_same().is_ok_and(|same| same);
        if same && self.stamp().is_ok_and(|still| still == now) {
            known.good = now;
            known.other = None;
            return Ok(());
        }
        let since = match known.other {
            Some((other, since)) if other == now => since,
            _ => Instant::now(),
        };
        known.other = Some((now, since));
        let written = since.elapsed() >= WRITTEN_AFTER;
        drop(known);
        let problem = if written {
            "the file was modified after it was opened, and now contains a different model"
        } else {
            "the file was modified after it was opened, and contains a different model: wait until it is complete"
        };
        Err(ReadError {
            replaced: written,
            ..extent.error(&self.path, problem)
        })
    }

    /// Whether the contents equal those of the opened model.
    fn is_same(&self) -> io::Result<bool> {
        let Some(contents) = &self.contents else {
            return Ok(false);
        };
        if contents.samples.get() != Some(&self.samples()?) {
            return Ok(false);
        }
        let (bytes, hash) = contents.first;
        let (mut head, mut buffer) = (Head::default(), vec![0; HASHED_AT_ONCE]);
        while head.bytes < bytes {
            let most = usize::try_from(bytes - head.bytes)
                .unwrap_or(usize::MAX)
                .min(HASHED_AT_ONCE);
            let part = buffer.get_mut(..most).unwrap_or_default();
            self.buffered.read_exact_at(part, head.bytes)?;
            head.add(part);
        }
        self.forget_all();
        Ok(head.hash() == hash)
    }

    /// A hash of pages evenly spread over the file.
    fn samples(&self) -> io::Result<u64> {
        let (mut hash, mut page) = (DefaultHasher::new(), vec![0; SAMPLE_BYTES]);
        for number in 0..SAMPLES {
            let place = self.bytes / SAMPLES * number;
            let most = usize::try_from(self.bytes - place)
                .unwrap_or(usize::MAX)
                .min(page.len());
            let part = page.get_mut(..most).unwrap_or_default();
            self.buffered.read_exact_at(part, place)?;
            hash.write(part);
        }
        self.forget_all();
        Ok(hash.finish())
    }

    /// Drops all of it from the page cache; best effort.
    fn forget_all(&self) {
        // Length zero means the whole file.
        posix_fadvise(
            self.buffered.as_fd(),
            0,
            0,
            PosixFadviseAdvice::POSIX_FADV_DONTNEED,
        )
        .ok();
    }

    fn forget(&self, extent: &Extent) {
        self.advise(extent, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    }

    /// Advises the system about an extent in the page cache; best effort.
    fn advise(&self, extent: &Extent, advice: PosixFadviseAdvice) {
        if let (Ok(offset), Ok(bytes)) = (
            libc::off_t::try_from(extent.aligned_offset()),
            libc::off_t::try_from(extent.aligned_bytes()),
        ) {
            posix_fadvise(self.buffered.as_fd(), offset, bytes, advice).ok();
        }
    }
}

impl Source for WeightFile {
    fn identity(&self) -> Option<Vec<FileIdentity>> {
        self.parts.iter().map(PartFile::identity).collect()
    }

    unsafe fn read(
        &self,
        extent: &Extent,
        target: NonNull<u8>,
        progress: &ReadProgress,
    ) -> Result<(), ReadError> {
        let (part, extent) = self.place(extent)?;
        // SAFETY: the caller's promise; bases are whole pages, so the superset in the part has the same length.
        part.read_known(&extent, || unsafe {
            part.read(&extent, target, (&self.size, progress))
        })
    }

    fn read_small(&self, extent: &Extent, target: &mut [u8]) -> Result<(), ReadError> {
        let (part, extent) = self.place(extent)?;
        part.read_known(&extent, || {
            let result = part.buffered.read_exact_at(target, extent.offset);
            part.forget(&extent);
            result.map_err(|error| extent.error(&part.path, describe(&error)))
        })
    }
}

impl PartFile {
    /// As [`Source::read`], with offsets in this part.
    ///
    /// # Safety
    ///
    /// As [`Source::read`].
    unsafe fn read(
        &self,
        extent: &Extent,
        target: NonNull<u8>,
        (size, progress): (&ReadSize, &ReadProgress),
    ) -> Result<(), ReadError> {
        let start = extent.aligned_offset();
        let wanted = extent.lead() + extent.bytes;
        // SAFETY: the caller's promise about `target`.
        let buffer =
            unsafe { std::slice::from_raw_parts_mut(target.as_ptr(), extent.aligned_bytes()) };
        let mut done = 0usize;
        let mut file = self.direct.as_ref().unwrap_or(&self.buffered);
        let mut direct = self.direct.is_some();
        while done < wanted {
            if done > 0 && progress.is_given_up() {
                return Err(extent.error(&self.path, "it is no longer needed"));
            }
            let (_, rest) = buffer.split_at_mut(done);
            let most = rest.len().min(size.bytes());
            let (rest, _) = rest.split_at_mut(most);
            let asked = Instant::now();
            match file.read_at(rest, start + done as u64) {
                Ok(0) => {
                    return Err(extent.error(
                        &self.path,
                        format!("the file ends at byte {}", start + done as u64),
                    ));
                }
                Ok(count) => {
                    done += count;
                    size.learn(count, asked.elapsed());
                    progress.note();
                    // A direct read that stopped inside a page cannot be continued as one.
                    if direct && !done.is_multiple_of(page().as_len()) {
                        file = &self.buffered;
                        direct = false;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if direct && error.raw_os_error() == Some(libc::EINVAL) => {
                    file = &self.buffered;
                    direct = false;
                }
                Err(error) => return Err(extent.error(&self.path, describe(&error))),
            }
        }
        if !direct {
            self.forget(extent);
        }
        Ok(())
    }
}

/// Attempts to read a range before the file counts as being written.
const READS_MAX: usize = 3;
/// Sampled pages of a file: a few ms of reading. Our choice.
const SAMPLES: u64 = 32;
/// Bytes per sample.
const SAMPLE_BYTES: usize = 4096;
/// A file that has been unchanged for this long after it was first found different is complete. Our choice: programs
/// that copy and download files write several times per second.
const WRITTEN_AFTER: Duration = Duration::from_secs(2);
/// Bytes read and hashed at once.
const HASHED_AT_ONCE: usize = 1 << 18;

fn describe(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "the file ends before".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_other_contents_is_replaced_once_it_is_no_longer_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let bytes: Vec<u8> = (0..100_000u32).flat_map(u32::to_le_bytes).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = File::open(&path).unwrap();
        let was = file.metadata().unwrap();
        let mut head = Head::default();
        head.add(&bytes[..5000]);
        let part = Part {
            path: path.clone(),
            base: 0,
            bytes: Bytes::of_len(bytes.len()),
        };
        let opened = vec![OpenFile { file, was, head }];
        let file = WeightFile::of(&[part], opened, &DiskWatch::default()).unwrap();
        assert_eq!(file.identity(), None, "it was not sampled");
        file.check_unchanged(&DiskWatch::default()).unwrap();
        assert!(file.identity().is_some());
        let extent = Extent {
            what: "rows".into(),
            offset: 8000,
            bytes: 400,
        };
        let mut second = 0;
        let mut read = |contents: &[u8]| {
            std::fs::write(&path, contents).unwrap();
            // The kernel's timestamps have a resolution of some milliseconds.
            second += 1;
            let stamp = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(second);
            File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_modified(stamp)
                .unwrap();
            let mut row = vec![0; 400];
            file.read_small(&extent, &mut row).map(|()| row)
        };
        let longer = [bytes.as_slice(), b"more"].concat();
        for same in [&bytes, &longer] {
            assert_eq!(read(same).unwrap(), bytes[8000..8400]);
        }
        let begun = &bytes[..bytes.len() / 2];
        let (mut header, mut weights) = (bytes.clone(), bytes.clone());
        header[4096] ^= 1;
        weights[20_000..].reverse();
        for other in [begun, &header, &weights] {
            let error = read(other).unwrap_err();
            assert!(
                !error.replaced && error.problem.contains("wait until it is complete"),
                "{error}"
            );
            let mut known = file.parts[0].known();
            let (_, since) = known.other.as_mut().unwrap();
            *since = since.checked_sub(WRITTEN_AFTER).unwrap();
            drop(known);
            let error = file.read_small(&extent, &mut [0; 400]).unwrap_err();
            assert!(
                error.replaced && error.problem.contains("now contains a different model"),
                "{error}"
            );
        }
        assert_eq!(read(&bytes).unwrap(), bytes[8000..8400]);
    }
}
