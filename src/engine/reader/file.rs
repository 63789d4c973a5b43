//! The model's files: direct reads that leave the page cache clean.

use std::{
    fs::{File, Metadata, OpenOptions},
    io,
    os::{
        fd::AsFd,
        unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    },
    path::PathBuf,
    ptr::NonNull,
    sync::Arc,
    time::Instant,
};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::{
    Attention,
    pulse::{Pace, Pulse},
};
use crate::{
    engine::{
        arena::PAGE,
        error::{LoadErrorKind, ReadError},
        gguf::Part,
    },
    units::Bytes,
};

/// A part of the file, and what it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Tensor or layer, for messages.
    pub what: Arc<str>,
    /// First byte of the file that is wanted.
    pub offset: u64,
    /// Number of bytes that are wanted.
    pub bytes: usize,
}

impl Extent {
    /// Where the aligned superset starts in the file.
    #[must_use]
    pub const fn aligned_offset(&self) -> u64 {
        self.offset - self.offset % PAGE.get()
    }

    /// How far the first wanted byte is into the aligned superset.
    #[must_use]
    pub fn lead(&self) -> usize {
        usize::try_from(self.offset - self.aligned_offset()).unwrap_or(0)
    }

    /// Length of the aligned superset.
    #[must_use]
    pub fn aligned_bytes(&self) -> usize {
        (self.lead() + self.bytes).next_multiple_of(PAGE.as_len())
    }
}

/// Something that weights can be read from.
pub trait Source: Send + Sync {
    /// Reads the aligned superset of `extent` to `target`, and says so at `pulse` whenever something has come. Bytes behind
    /// the end of the file stay as they are.
    ///
    /// # Errors
    ///
    /// When the system refuses, the file ends before the wanted bytes do, it was written to since it was opened, or it was given
    /// up at `pulse`.
    ///
    /// # Safety
    ///
    /// `target` is page-aligned, and valid for writes of [`Extent::aligned_bytes`] that nobody else touches meanwhile.
    unsafe fn read(&self, extent: &Extent, target: NonNull<u8>, pulse: &Pulse) -> Result<(), ReadError>;

    /// Reads a few bytes, such as an embedding row, to the heap; `target` is as long as `extent`.
    ///
    /// # Errors
    ///
    /// When the system refuses, or the file ends before.
    fn read_small(&self, extent: &Extent, target: &mut [u8]) -> Result<(), ReadError>;
}

/// The model's file, or files, opened for direct reads.
#[derive(Debug)]
pub struct WeightFile {
    parts: Vec<PartFile>,
    /// All parts are taken to be on the same disk.
    pace: Pace,
}

#[derive(Debug)]
struct PartFile {
    path: PathBuf,
    /// The number of its first byte, counted through all parts.
    base: u64,
    buffered: File,
    direct: Option<File>,
    /// As it was before anything was read of it.
    was: Metadata,
}

/// What a write to a file changes, and being renamed or linked to does not.
fn written(metadata: &Metadata) -> (u64, i64, i64) {
    (metadata.len(), metadata.mtime(), metadata.mtime_nsec())
}

impl WeightFile {
    /// Opens the parts of a model, which are in the order of their places.
    ///
    /// # Errors
    ///
    /// When one cannot be opened at all, or there is none; a refusal of `O_DIRECT` alone is no error.
    pub fn open(parts: &[Part]) -> io::Result<Self> {
        if parts.is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let open = |part: &Part| {
            let file = File::open(&part.path)?;
            let was = file.metadata()?;
            PartFile::of(part, (file, was), &Attention::default()).map_err(io::Error::other)
        };
        let parts = parts.iter().map(open).collect::<io::Result<_>>()?;
        Ok(Self {
            parts,
            pace: Pace::new(),
        })
    }

    /// Of files that were opened to read their headers, each with what it was then.
    ///
    /// # Errors
    ///
    /// When another file has its name by now; a refusal of `O_DIRECT` alone is no error.
    pub(in crate::engine) fn of(
        parts: &[Part],
        files: Vec<(File, Metadata)>,
        attention: &Attention,
    ) -> Result<Self, LoadErrorKind> {
        let parts = parts.iter().zip(files);
        let parts = parts.map(|(part, file)| PartFile::of(part, file, attention));
        Ok(Self {
            parts: parts.collect::<Result<_, _>>()?,
            pace: Pace::new(),
        })
    }

    /// Has the system begin to bring small extents, all at once, for [`Self::read_expected`]; best effort.
    pub fn expect(&self, extents: &[Extent], attention: &Attention) {
        for extent in extents {
            if let Ok((part, place)) = self.place(extent) {
                let ask = || {
                    part.advise(&place, PosixFadviseAdvice::POSIX_FADV_WILLNEED);
                    Ok(0)
                };
                attention.asking(&extent.what, ask).ok();
            }
        }
    }

    /// Reads a few bytes that were expected to the heap, and leaves them in the page cache until [`Self::forget_all`].
    ///
    /// # Errors
    ///
    /// When the system refuses, or the file ends before.
    pub fn read_expected(&self, extent: &Extent, target: &mut [u8], attention: &Attention) -> Result<(), ReadError> {
        let (part, place) = self.place(extent)?;
        let bytes = target.len();
        let ask = || part.buffered.read_exact_at(target, place.offset).map(|()| bytes);
        let result = attention.asking(&extent.what, ask);
        result.map_err(|error| part.error(&place, &describe(&error)))?;
        Ok(())
    }

    /// Checks that nobody has written to the files, or cut them, since they were opened.
    ///
    /// # Errors
    ///
    /// When somebody has.
    pub(in crate::engine) fn check_unchanged(&self, attention: &Attention) -> Result<(), LoadErrorKind> {
        for part in &self.parts {
            let is = attention.asking_for("its length", || part.buffered.metadata());
            let is = is.map_err(LoadErrorKind::Open)?;
            if written(&is) != written(&part.was) {
                return Err(LoadErrorKind::Changed {
                    path: part.path.clone(),
                    was: Bytes::new(part.was.len()),
                    is: Bytes::new(is.len()),
                });
            }
        }
        Ok(())
    }

    /// Takes what small reads, and the reading of the header, left out of the page cache; best effort.
    pub fn forget_all(&self) {
        for part in &self.parts {
            // No length is all of it.
            posix_fadvise(part.buffered.as_fd(), 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).ok();
        }
    }

    /// The part that has `extent`, and where in it.
    fn place(&self, extent: &Extent) -> Result<(&PartFile, Extent), ReadError> {
        let part = self.parts.iter().rfind(|part| part.base <= extent.offset);
        let part = part.ok_or_else(|| ReadError {
            path: PathBuf::new(),
            what: extent.what.to_string(),
            offset: extent.offset,
            bytes: Bytes::of_len(extent.bytes),
            problem: "it is in no file".to_owned(),
        })?;
        let extent = Extent {
            offset: extent.offset - part.base,
            ..extent.clone()
        };
        Ok((part, extent))
    }
}

impl PartFile {
    fn of(part: &Part, (buffered, was): (File, Metadata), attention: &Attention) -> Result<Self, LoadErrorKind> {
        // Small reads want a row, not the megabytes around it; a refusal costs only page cache.
        posix_fadvise(buffered.as_fd(), 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM).ok();
        let open = || {
            let mut options = OpenOptions::new();
            let direct = options.read(true).custom_flags(libc::O_DIRECT).open(&part.path)?;
            let is = direct.metadata()?;
            Ok((direct, is))
        };
        let direct = attention.asking_for("its weights", open).ok();
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
            was,
        })
    }

    /// What was read belongs to what was read before: nobody has written to the file since it was opened.
    ///
    /// Asked after each read, so that no bytes of a later write are taken for a model's.
    fn expect_unwritten(&self, extent: &Extent) -> Result<(), ReadError> {
        let now = self
            .buffered
            .metadata()
            .map_err(|error| self.error(extent, &describe(&error)))?;
        if written(&now) == written(&self.was) {
            Ok(())
        } else {
            Err(self.error(
                extent,
                "the file was written to after it was opened, so that it may be another model: load it again",
            ))
        }
    }

    fn error(&self, extent: &Extent, problem: &str) -> ReadError {
        ReadError {
            path: self.path.clone(),
            what: extent.what.to_string(),
            offset: extent.offset,
            bytes: Bytes::of_len(extent.bytes),
            problem: problem.to_owned(),
        }
    }

    fn forget(&self, extent: &Extent) {
        self.advise(extent, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    }

    /// Tells the system what becomes of an extent in the page cache; best effort.
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
    unsafe fn read(&self, extent: &Extent, target: NonNull<u8>, pulse: &Pulse) -> Result<(), ReadError> {
        let (part, extent) = self.place(extent)?;
        // SAFETY: the caller's promise; bases are whole pages, so the superset in the part has the same length.
        unsafe { part.read(&extent, target, (&self.pace, pulse)) }
    }

    fn read_small(&self, extent: &Extent, target: &mut [u8]) -> Result<(), ReadError> {
        let (part, extent) = self.place(extent)?;
        let result = part.buffered.read_exact_at(target, extent.offset);
        part.forget(&extent);
        result.map_err(|error| part.error(&extent, &describe(&error)))?;
        part.expect_unwritten(&extent)
    }
}

impl PartFile {
    /// As [`Source::read`], with places in this part.
    ///
    /// # Safety
    ///
    /// As there.
    unsafe fn read(
        &self,
        extent: &Extent,
        target: NonNull<u8>,
        (pace, pulse): (&Pace, &Pulse),
    ) -> Result<(), ReadError> {
        let start = extent.aligned_offset();
        let wanted = extent.lead() + extent.bytes;
        // SAFETY: the caller's promise about `target`, passed on.
        let buffer = unsafe { std::slice::from_raw_parts_mut(target.as_ptr(), extent.aligned_bytes()) };
        let mut done = 0usize;
        let mut file = self.direct.as_ref().unwrap_or(&self.buffered);
        let mut direct = self.direct.is_some();
        while done < wanted {
            if done > 0 && pulse.is_given_up() {
                return Err(self.error(extent, "it is not wanted any more"));
            }
            let (_, rest) = buffer.split_at_mut(done);
            let most = rest.len().min(pace.bytes());
            let (rest, _) = rest.split_at_mut(most);
            let asked = Instant::now();
            match file.read_at(rest, start + done as u64) {
                Ok(0) => {
                    return Err(self.error(extent, &format!("the file ends at byte {}", start + done as u64)));
                }
                Ok(count) => {
                    done += count;
                    pace.learn(count, asked.elapsed());
                    pulse.beat();
                    // A direct read that stopped inside a page cannot go on as one.
                    if direct && !done.is_multiple_of(PAGE.as_len()) {
                        file = &self.buffered;
                        direct = false;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if direct && error.raw_os_error() == Some(libc::EINVAL) => {
                    file = &self.buffered;
                    direct = false;
                }
                Err(error) => return Err(self.error(extent, &describe(&error))),
            }
        }
        if !direct {
            self.forget(extent);
        }
        self.expect_unwritten(extent)
    }
}

fn describe(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "the file ends before".to_owned(),
        _ => error.to_string(),
    }
}
