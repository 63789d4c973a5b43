//! One file on its way from a hub to a folder, across cuts and the death of this process.
//!
//! ```text
//!  NAME.part.json   which file NAME.part belongs to: its SHA-256, or its version; written before its first byte
//!  NAME.part        the bytes received so far, only ever appended to, so that its length is the progress
//!  NAME             appears when all bytes are on the disk and their SHA-256 is right
//! ```
//!
//! The SHA-256 is computed along the way, in front of the disk. What has been written leaves the page cache.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read, Seek as _, SeekFrom, Write as _},
    os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise},
};
use ring::digest::{Context, SHA256};

use super::{
    client::{Client, Fault, Opened, cut, shown},
    hub::Source,
    meter::Meter,
};
use crate::exit::{self, CliError};
use cotenant_units::{Bytes, TimeSpan};

/// A file that is fetched into a folder.
pub(super) struct Download<'client> {
    client: &'client Client,
    source: Source,
    path: PathBuf,
    file: File,
    /// Bytes in the file; all of them are in the digest.
    have: u64,
    digest: Context,
    stream: Option<Opened>,
    /// Whether the file is at `path` already.
    is_done: bool,
}

impl<'client> Download<'client> {
    /// Looks at what is in `folder` already, and continues there.
    pub(super) fn open(
        client: &'client Client,
        source: Source,
        folder: &Path,
        meter: &mut Meter,
    ) -> Result<Self, CliError> {
        let path = folder.join(&source.name);
        let mut download = match File::open(&path) {
            Ok(file) => Self::with(client, source, path, file, true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let file = open_part(&part(&path))?;
                Self::with(client, source, path, file, false)
            }
            Err(error) => return Err(cannot("open", &path, error)),
        };
        download.have = download.length()?;
        if download.is_done {
            download.compare(meter)?;
        } else if download.is_continued() {
            download.digest_all(meter)?;
        } else {
            download.restart()?;
        }
        Ok(download)
    }

    fn with(
        client: &'client Client,
        source: Source,
        path: PathBuf,
        file: File,
        is_done: bool,
    ) -> Self {
        Self {
            client,
            source,
            path,
            file,
            have: 0,
            digest: Context::new(&SHA256),
            stream: None,
            is_done,
        }
    }

    /// What is fetched.
    pub(super) const fn source(&self) -> &Source {
        &self.source
    }

    /// Where it is once it is complete.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that are here.
    pub(super) const fn have(&self) -> u64 {
        self.have
    }

    /// Whether it was here from the beginning.
    pub(super) const fn is_done(&self) -> bool {
        self.is_done
    }

    /// Bytes of the disk that it still needs.
    pub(super) fn needs(&self) -> Bytes {
        let blocks = self.file.metadata().map_or(0, |meta| meta.blocks());
        Bytes::new(self.source.bytes).saturating_sub(Bytes::new(blocks.saturating_mul(512)))
    }

    /// Reserves the disk for all of it.
    pub(super) fn reserve(&self) -> Result<(), CliError> {
        if self.is_done {
            return Ok(());
        }
        let length = libc::off_t::try_from(self.source.bytes).unwrap_or(libc::off_t::MAX);
        match fallocate(&self.file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, length) {
            // Not every file system can.
            Ok(()) | Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => Ok(()),
            Err(error) => {
                let act = format!(
                    "cannot reserve {} for `{}`",
                    Bytes::new(self.source.bytes),
                    self.path.display()
                );
                Err(CliError::failed(act, io::Error::from(error)))
            }
        }
    }

    /// Fetches until the first `to` bytes are here. Repeats after cuts while there is progress.
    pub(super) fn fill(&mut self, to: u64, meter: &mut Meter) -> Result<(), CliError> {
        let to = to.min(self.source.bytes);
        let patience = self.client.patience();
        let (mut furthest, mut attempts) = (self.have, 0);
        while self.have < to {
            let error = match self.receive(to, meter) {
                Ok(()) => continue,
                Err(Fault::Final(error)) => return Err(error),
                Err(Fault::Passing(error)) => error,
            };
            self.stream = None;
            if self.have >= to {
                break;
            }
            if self.have >= furthest.saturating_add(PROGRESS) {
                (furthest, attempts) = (self.have, 0);
            }
            attempts += 1;
            if attempts >= patience.attempts {
                return Err(error.with_hint(format!(
                    "no progress in {attempts} attempts; pull again to continue at {}",
                    Bytes::new(self.have)
                )));
            }
            let pause = patience.pause_after(attempts);
            meter.note(&format!("{error}; next attempt in {pause:?}"));
            thread::sleep(pause);
        }
        Ok(())
    }

    /// Closes the connection; [`Self::fill`] opens another.
    pub(super) fn pause(&mut self) {
        self.stream = None;
    }

    /// Removes what was fetched.
    pub(super) fn discard(&self) -> Result<(), CliError> {
        if self.is_done {
            return Ok(());
        }
        for path in [part(&self.path), state(&self.path)] {
            remove(&path)?;
        }
        Ok(())
    }

    /// Compares the SHA-256 of all bytes with that of the hub and returns it.
    pub(super) fn verify(&self) -> Result<String, CliError> {
        let found: String = self
            .digest
            .clone()
            .finish()
            .as_ref()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        match &self.source.sha256 {
            Some(expected) if *expected != found => {
                self.discard()?;
                let act = format!(
                    "SHA-256 of `{}` is {found}, expected {expected}: its {} were removed",
                    shown(&self.source.url),
                    Bytes::new(self.have)
                );
                let hint = "pull again; if it repeats, the file or its hub's listing is wrong, or a proxy changes it";
                Err(CliError::plain(act, exit::FAILED).with_hint(hint.to_owned()))
            }
            _ => Ok(found),
        }
    }

    /// Gives a complete and verified file its name.
    pub(super) fn finish(&mut self) -> Result<(), CliError> {
        if !self.is_done {
            self.file
                .sync_all()
                .map_err(|error| cannot("write", &self.path, error))?;
            fs::rename(part(&self.path), &self.path)
                .map_err(|error| cannot("rename to", &self.path, error))?;
            self.is_done = true;
        }
        remove(&state(&self.path))?;
        let folder = self.path.parent().unwrap_or(Path::new("."));
        File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(|error| cannot("write", folder, error))
    }

    /// Reads from byte `position` on, and fetches what is not here.
    pub(super) fn reader<'read>(
        &'read mut self,
        meter: &'read mut Meter,
    ) -> Growing<'read, 'client> {
        Growing {
            download: self,
            meter,
            position: 0,
            failed: None,
        }
    }

    fn length(&self) -> Result<u64, CliError> {
        let meta = self.file.metadata();
        let meta = meta.map_err(|error| cannot("read", &self.path, error))?;
        if meta.is_file() {
            Ok(meta.len())
        } else {
            let act = format!(
                "cannot use `{}`: it is not a regular file",
                self.path.display()
            );
            Err(CliError::plain(act, exit::FAILED))
        }
    }

    /// Refuses a file of the same name with other bytes.
    fn compare(&mut self, meter: &mut Meter) -> Result<(), CliError> {
        let is_same = self.source.sha256.is_some() && self.have == self.source.bytes && {
            self.digest_all(meter)?;
            // A file that is complete is never discarded.
            self.verify().is_ok()
        };
        if is_same {
            return Ok(());
        }
        let act = format!(
            "`{}` already exists, and may be a different file",
            self.path.display()
        );
        let hint = "move it away, or choose another folder with --to";
        Err(CliError::plain(act, exit::FAILED).with_hint(hint.to_owned()))
    }

    /// Whether the bytes here belong to this source.
    fn is_continued(&self) -> bool {
        let mut kept = String::new();
        let read = open_state(&self.path, OpenOptions::new().read(true))
            .and_then(|file| file.take(STATE_BYTES_MAX).read_to_string(&mut kept));
        let identity = identity(&self.source);
        read.is_ok()
            && self.have <= self.source.bytes
            && identity.is_some_and(|identity| identity == kept)
    }

    fn digest_all(&mut self, meter: &mut Meter) -> Result<(), CliError> {
        let mut block = vec![0; BLOCK];
        let mut read = 0;
        let cannot = |error| cannot("read", &self.path, error);
        while read < self.have {
            let most = usize::try_from(self.have - read).map_or(BLOCK, |left| left.min(BLOCK));
            let block = block.get_mut(..most).unwrap_or_default();
            self.file.read_exact(block).map_err(cannot)?;
            self.digest.update(block);
            read += block.len() as u64;
            meter.show("verifying existing data", read, self.have);
        }
        Ok(())
    }

    /// Begins with no bytes.
    fn restart(&mut self) -> Result<(), CliError> {
        let cannot = |error| cannot("write", &part(&self.path), error);
        self.file.set_len(0).map_err(cannot)?;
        self.file.seek(SeekFrom::Start(0)).map_err(cannot)?;
        self.have = 0;
        self.digest = Context::new(&SHA256);
        let identity = identity(&self.source).unwrap_or_default();
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true);
        open_state(&self.path, &mut options)
            .and_then(|mut file| file.write_all(identity.as_bytes()))
            .map_err(|error| self::cannot("write", &state(&self.path), error))
    }

    /// A response that continues behind the bytes that are here.
    fn connect(&mut self) -> Result<Opened, Fault> {
        if self.have > 0 && identity(&self.source).is_none() {
            self.restart().map_err(Fault::Final)?;
        }
        let source = &self.source;
        // With a SHA-256 the bytes are right or refused, whatever their version is called.
        let validator = match source.sha256 {
            Some(_) => None,
            None => source.validator.as_deref(),
        };
        let opened = self.client.open(&source.url, self.have, validator)?;
        let changed = |figures: String| {
            let act = format!("`{}` changed on its server: {figures}", shown(&source.url));
            let hint = "pull again to read its new listing";
            Fault::Final(CliError::plain(act, exit::FAILED).with_hint(hint.to_owned()))
        };
        if opened.total != source.bytes {
            let (was, is) = (source.bytes, opened.total);
            return Err(changed(format!("it has {is} bytes, {was} were listed")));
        }
        if source.sha256.is_none() && opened.validator != source.validator {
            return Err(changed("it has another version than before".to_owned()));
        }
        if opened.from == self.have {
            return Ok(opened);
        }
        if opened.from != 0 {
            let act = format!(
                "`{}` sent byte {} instead of {}",
                shown(&source.url),
                opened.from,
                self.have
            );
            return Err(Fault::Final(CliError::plain(act, exit::FAILED)));
        }
        // The server does not serve ranges.
        self.restart().map_err(Fault::Final)?;
        Ok(opened)
    }

    /// Receives until the first `to` bytes are here.
    fn receive(&mut self, to: u64, meter: &mut Meter) -> Result<(), Fault> {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => self.connect()?,
        };
        let (from, name) = (self.have, self.source.name.as_str());
        let limit = self.client.patience().stall * STALLS_OF_A_BLOCK;
        let (file, digest) = (&self.file, &mut self.digest);
        let received = thread::scope(|scope| {
            let (blocks, received) = mpsc::sync_channel(BLOCKS);
            let (empty, emptied) = mpsc::channel();
            let writer = thread::Builder::new()
                .name("writer".to_owned())
                .spawn_scoped(scope, move || write(file, from, digest, &received, &empty))?;
            let mut at = from;
            let mut ended = Ok(());
            while at < to && ended.is_ok() {
                let most = usize::try_from(to - at).map_or(BLOCK, |left| left.min(BLOCK));
                let mut block: Vec<u8> = emptied.try_recv().unwrap_or_default();
                block.resize(most, 0);
                let count;
                (count, ended) = read_block(&mut stream.reader, &mut block, limit);
                block.truncate(count);
                at += count as u64;
                meter.show(name, at, to);
                // Without a writer, its error is the one to report.
                if count > 0 && blocks.send(block).is_err() {
                    break;
                }
            }
            drop(blocks);
            let written = writer.join();
            Ok((written, ended))
        });
        let cannot = |error| Fault::Final(cannot("write", &part(&self.path), error));
        let (written, ended) = received.map_err(cannot)?;
        let (count, written) =
            written.unwrap_or_else(|_| (0, Err(io::Error::other("the writer thread ended"))));
        self.have += count;
        written.map_err(cannot)?;
        ended.map_err(|error| cut(&self.source.url, error))?;
        self.stream = Some(stream);
        Ok(())
    }
}

/// The bytes of a download from its beginning on, fetched as they are read.
pub(super) struct Growing<'read, 'client> {
    download: &'read mut Download<'client>,
    meter: &'read mut Meter,
    position: u64,
    failed: Option<CliError>,
}

impl Growing<'_, '_> {
    /// Why a byte could not be fetched, if one could not.
    pub(super) fn into_failure(self) -> Option<CliError> {
        self.failed
    }
}

impl Read for Growing<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wanted = self.position.saturating_add(buffer.len() as u64);
        if self.failed.is_none() && self.download.have < wanted.min(self.download.source.bytes) {
            let ahead = wanted.saturating_add(AHEAD);
            self.failed = self.download.fill(ahead, self.meter).err();
        }
        if self.failed.is_some() {
            return Err(io::Error::other("it could not be fetched"));
        }
        let count = self.download.file.read_at(buffer, self.position)?;
        self.position += count as u64;
        Ok(count)
    }
}

/// Reads until the block is full, the response ends, or it takes longer than `limit`.
fn read_block(
    reader: &mut impl Read,
    block: &mut [u8],
    limit: Duration,
) -> (usize, io::Result<()>) {
    let (mut count, began) = (0, Instant::now());
    while let Some(rest) = block.get_mut(count..).filter(|rest| !rest.is_empty()) {
        if began.elapsed() > limit {
            let slow = format!("it sent {} in {}", Bytes::of_len(count), TimeSpan(limit));
            return (count, Err(io::Error::new(io::ErrorKind::TimedOut, slow)));
        }
        match reader.read(rest) {
            Ok(0) => return (count, Err(io::ErrorKind::UnexpectedEof.into())),
            Ok(more) => count += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (count, Err(error)),
        }
    }
    (count, Ok(()))
}

/// Appends blocks and adds them to the digest; returns the bytes of which both are true.
fn write(
    file: &File,
    from: u64,
    digest: &mut Context,
    received: &mpsc::Receiver<Vec<u8>>,
    empty: &mpsc::Sender<Vec<u8>>,
) -> (u64, io::Result<()>) {
    let mut count = 0;
    let result = thread::scope(|scope| {
        let (marks, due) = mpsc::sync_channel(1);
        let flusher = thread::Builder::new()
            .name("flusher".to_owned())
            .spawn_scoped(scope, move || flush(file, &due))?;
        let mut appended = Ok(());
        for block in received {
            let mut file = file;
            appended = file.write_all(&block);
            if appended.is_err() {
                break;
            }
            digest.update(&block);
            let before = count;
            count += block.len() as u64;
            // Without a flusher, its error is the one to report.
            if before / FLUSHED != count / FLUSHED && marks.send(from + count).is_err() {
                break;
            }
            let _ = empty.send(block);
        }
        drop(marks);
        let flushed = flusher
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the flush thread ended")));
        appended.and(flushed)
    });
    (count, result)
}

/// Writes back what was appended, in front of each mark, and drops it from the page cache: models are read around it.
fn flush(file: &File, due: &mpsc::Receiver<u64>) -> io::Result<()> {
    for mark in due {
        file.sync_data()?;
        let mark = libc::off_t::try_from(mark).unwrap_or(libc::off_t::MAX);
        // Only advice.
        let _ = posix_fadvise(file, 0, mark, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    }
    Ok(())
}

/// The unfinished file, locked for this process.
fn open_part(path: &Path) -> Result<File, CliError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
        .map_err(|error| {
            let hint = "name a writable folder with --to, or pull as the service's user: `sudo -u cotenant`";
            cannot("write", path, error).with_hint(hint.to_owned())
        })?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::Error(error)) => return Err(cannot("lock", path, error)),
        Err(TryLockError::WouldBlock) => return Err(busy(path)),
    }
    // Another process may have finished it before it was locked here.
    let is_same = match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(named)) => (open.dev(), open.ino()) == (named.dev(), named.ino()),
        _ => false,
    };
    if is_same { Ok(file) } else { Err(busy(path)) }
}

/// Opens the state of an unfinished file, but no link in its place.
fn open_state(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    options.custom_flags(flags).open(state(path))
}

fn busy(path: &Path) -> CliError {
    let act = format!("cannot write `{}`: another pull writes it", path.display());
    CliError::plain(act, exit::FAILED)
}

/// What bytes must have in common to belong to one file. Without a SHA-256, bytes from before a reboot may never have
/// reached the disk. `None`: they cannot be continued.
fn identity(source: &Source) -> Option<String> {
    let version = match (&source.sha256, &source.validator) {
        (Some(sha256), _) => sha256.clone(),
        (None, Some(validator)) => {
            let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
            format!("{} {validator} {}", source.url, boot.trim())
        }
        (None, None) => return None,
    };
    Some(serde_json::json!({"version": version, "bytes": source.bytes}).to_string())
}

fn part(path: &Path) -> PathBuf {
    path.with_added_extension("part")
}

fn state(path: &Path) -> PathBuf {
    path.with_added_extension("part.json")
}

fn remove(path: &Path) -> Result<(), CliError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(cannot("remove", path, error)),
        _ => Ok(()),
    }
}

pub(super) fn cannot(act: &str, path: &Path, error: io::Error) -> CliError {
    CliError::failed(format!("cannot {act} `{}`", path.display()), error)
}

/// Bytes that are handed from the network to the disk at once; at most so many are lost when this process is killed.
const BLOCK: usize = 256 << 10;
/// A block may take as long as this many stalls: two minutes, or 2 KiB/s. A server that sends a byte now and then is given
/// up like one that sends none.
const STALLS_OF_A_BLOCK: u32 = 4;
/// Blocks between the two: 8 MiB are 70 ms of a gigabit.
const BLOCKS: usize = 32;
/// Bytes between two writes to the disk; twice as many may wait for it.
const FLUSHED: u64 = 32 << 20;
/// Longest state; a validator has some hundred bytes.
const STATE_BYTES_MAX: u64 = 64 << 10;
/// Bytes fetched ahead of a header's reader.
const AHEAD: u64 = 1 << 20;
/// A server must send so many between cuts: 1 GiB in 4096 attempts at most.
const PROGRESS: u64 = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends a byte every few milliseconds.
    struct Drops;

    impl Read for Drops {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            thread::sleep(Duration::from_millis(3));
            buffer[0] = 1;
            Ok(1)
        }
    }

    #[test]
    fn a_block_that_comes_in_drops_is_given_up_with_what_has_come() {
        let (limit, mut block) = (Duration::from_millis(30), vec![0; 4096]);
        let (count, ended) = read_block(&mut Drops, &mut block, limit);
        assert!((1..4096).contains(&count), "{count}");
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let (count, ended) = read_block(&mut &[1u8; 100][..], &mut block[..100], limit);
        assert!(count == 100 && ended.is_ok());
    }
}
