//! Transfers between memory and the file of saved blocks, on threads that are abandoned if the disk hangs.
//!
//! ```text
//!   KV place ──copy──► buffer ──O_DIRECT──► slot of the file      and back
//!   engine's thread             a transfer thread
//! ```
//!
//! The transfer threads access only their buffers, so that a shed never waits for the disk.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::{
        fd::AsFd as _,
        unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};

use nix::fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise};

use crate::{
    arena::{Backing, Mapping},
    disk::DiskTimeout,
};
use cotenant_policy::residency::ModelShape;
use cotenant_units::{Bytes, lock::locked};

/// The transfer threads and the buffers that they do not use.
#[derive(Debug)]
pub(super) struct Transfers {
    jobs: mpsc::Sender<Job>,
    done: mpsc::Receiver<Done>,
    buffers: Vec<Mapping>,
    in_flight: usize,
    /// Time of the last result, or of the first job after a pause.
    progress: Instant,
    /// Time after which the disk counts as stalled.
    limit: DiskTimeout,
}

/// Called before each transfer; an error is its result.
#[cfg(test)]
pub(in crate::model) type Hindrance = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

/// The folder of saved conversations: one file of blocks, and one header per conversation.
pub(super) struct Folder {
    path: PathBuf,
    blocks: File,
    /// The same file past the page cache, where the file system supports that.
    direct: Option<File>,
    #[cfg(test)]
    hindrance: Mutex<Option<Hindrance>>,
}

/// Identifies a job to its owner: a series of jobs, and the number within it.
pub(super) type Tag = (u64, usize);

struct Job {
    tag: Tag,
    work: Work,
}

enum Work {
    Write(Mapping, usize, u64),
    Read(Mapping, usize, u64),
    Other(Box<dyn FnOnce() -> io::Result<()> + Send>),
}

/// Result of a job.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) tag: Tag,
    /// CRC of the transferred bytes.
    pub(super) result: io::Result<u32>,
    /// The buffer, with the bytes read.
    pub(super) buffer: Option<Mapping>,
    /// Time of the transfer.
    pub(super) took: Duration,
}

impl Transfers {
    /// Starts the threads; `limit` is the time after which the disk counts as stalled.
    pub(super) fn start(folder: &Arc<Folder>, limit: DiskTimeout) -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let queue = Arc::new(Mutex::new(queue));
        let (sink, done) = mpsc::channel();
        for _ in 0..BUFFERS {
            let (queue, sink, folder) = (Arc::clone(&queue), sink.clone(), Arc::clone(folder));
            let next = move || {
                let queue = locked(&queue);
                queue.recv().ok()
            };
            thread::Builder::new()
                .name("cotenant-saver".to_owned())
                .spawn(move || {
                    while let Some(job) = next() {
                        if sink.send(folder.carry_out(job)).is_err() {
                            return;
                        }
                    }
                })?;
        }
        Ok(Self {
            jobs,
            done,
            buffers: Vec::new(),
            in_flight: 0,
            progress: Instant::now(),
            limit,
        })
    }

    /// Returns a buffer of [`PIECE`] bytes if one is free; allocates it if fewer than [`BUFFERS`] exist.
    ///
    /// # Errors
    /// When it cannot be allocated.
    pub(super) fn buffer(&mut self) -> io::Result<Option<Mapping>> {
        let free = self.buffers.pop();
        if free.is_some() || self.in_flight >= BUFFERS {
            return Ok(free);
        }
        Mapping::new(Bytes::of_len(PIECE), Backing::OnTouch).map(Some)
    }

    /// Returns an unused buffer.
    pub(super) fn put_back(&mut self, buffer: Mapping) {
        self.buffers.push(buffer);
    }

    /// Starts to write the first `len` bytes of `buffer` at `offset` of the file of blocks.
    pub(super) fn write(&mut self, tag: Tag, buffer: Mapping, len: usize, offset: u64) {
        self.submit(tag, Work::Write(buffer, len, offset));
    }

    /// Starts to read `len` bytes at `offset` of the file of blocks.
    pub(super) fn read(&mut self, tag: Tag, buffer: Mapping, len: usize, offset: u64) {
        self.submit(tag, Work::Read(buffer, len, offset));
    }

    /// Starts other work with the disk.
    pub(super) fn run(&mut self, tag: Tag, work: impl FnOnce() -> io::Result<()> + Send + 'static) {
        self.submit(tag, Work::Other(Box::new(work)));
    }

    fn submit(&mut self, tag: Tag, work: Work) {
        if self.in_flight == 0 {
            self.progress = Instant::now();
        }
        self.in_flight += 1;
        // The threads end only after this sender.
        self.jobs.send(Job { tag, work }).ok();
    }

    /// Waits at most `patience` for the next result; returns `None` without one.
    ///
    /// # Errors
    /// When the disk has not responded in time.
    pub(super) fn take(&mut self, patience: Duration) -> io::Result<Option<Done>> {
        if self.in_flight == 0 {
            return Ok(None);
        }
        if let Ok(done) = self.done.recv_timeout(patience) {
            self.in_flight -= 1;
            self.progress = Instant::now();
            return Ok(Some(done));
        }
        if self.hangs() {
            let waited = self.progress.elapsed().as_millis();
            let problem = format!("the disk did not respond for {waited} ms");
            return Err(io::Error::new(io::ErrorKind::TimedOut, problem));
        }
        Ok(None)
    }

    /// Whether the disk has not responded in time.
    pub(super) fn hangs(&self) -> bool {
        self.in_flight > 0 && self.limit.is_over(self.progress.elapsed())
    }

    #[cfg(test)]
    pub(super) const fn set_limit(&mut self, limit: DiskTimeout) {
        self.limit = limit;
    }

    /// Whether no job is in flight, after receiving the results of earlier series, whose buffers are freed.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub(super) fn is_idle(&mut self) -> io::Result<bool> {
        while self.take(Duration::ZERO)?.is_some() {}
        Ok(self.in_flight == 0)
    }

    /// Memory of the buffers: all of it while a transfer runs, none while the disk rests.
    pub(super) fn bytes(&self) -> Bytes {
        if self.buffers.is_empty() && self.in_flight == 0 {
            return Bytes::ZERO;
        }
        Bytes::of_len(PIECE * BUFFERS)
    }

    /// Frees the buffers that are not in use.
    pub(super) fn rest(&mut self) {
        self.buffers.clear();
    }
}

/// The shape of a model with conversations on disk: every plan has the buffers of its transfers.
pub(crate) fn with_transfers(shape: ModelShape) -> ModelShape {
    let buffers = Bytes::of_len(PIECE * BUFFERS);
    ModelShape {
        workspace_fixed_bytes: shape.workspace_fixed_bytes.saturating_add(buffers),
        ..shape
    }
}

impl Folder {
    /// Opens or creates the folder; its files are readable only by this user.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        match fs::metadata(path) {
            // Written by an earlier version.
            Ok(metadata) if metadata.is_file() => fs::remove_file(path)?,
            _ => {}
        }
        if let Err(error) = DirBuilder::new().mode(0o700).create(path)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(error);
        }
        let file = path.join(BLOCKS);
        let options = |flags| {
            let mut options = OpenOptions::new();
            options
                .read(true)
                .write(true)
                .create(true)
                .mode(0o600)
                .custom_flags(flags);
            options
        };
        Ok(Self {
            path: path.to_owned(),
            blocks: options(0).open(&file)?,
            direct: options(libc::O_DIRECT).open(&file).ok(),
            #[cfg(test)]
            hindrance: Mutex::default(),
        })
    }

    /// Hinders all transfers that begin from now on.
    #[cfg(test)]
    pub(super) fn hinder(&self, hindrance: Hindrance) {
        *self.hindrance.lock().unwrap() = Some(hindrance);
    }

    /// Path of a conversation's header.
    pub(super) fn header(&self, number: u64) -> PathBuf {
        self.path.join(number.to_string())
    }

    /// Numbers of the headers, in ascending order. Removes other files, but no folders, such as `lost+found`.
    pub(super) fn numbers(&self) -> io::Result<Vec<u64>> {
        let mut numbers = Vec::new();
        for file in fs::read_dir(&self.path)? {
            let file = file?;
            if file.file_type()?.is_dir() {
                continue;
            }
            let name = file.file_name();
            match name.to_str().and_then(|name| name.parse().ok()) {
                Some(number) => numbers.push(number),
                None if name == BLOCKS => {}
                // An incomplete header.
                None => remove(&self.path.join(name))?,
            }
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Writes a header at once: an incomplete one never has its name.
    pub(super) fn write_header(&self, number: u64, text: &[u8]) -> io::Result<()> {
        let path = self.header(number);
        let new = path.with_extension("new");
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)?;
        let written = file.write_all(text).and_then(|()| fs::rename(&new, &path));
        if written.is_err() {
            remove(&new).ok();
        }
        written
    }

    /// Removes a header, and returns the space of blocks that no other header refers to.
    pub(super) fn remove(&self, number: u64, blocks: &[(u64, u64)]) -> io::Result<()> {
        remove(&self.header(number))?;
        self.release(blocks);
        Ok(())
    }

    /// Returns the space of ranges of the file of blocks; best effort, since they are written again later.
    pub(super) fn release(&self, blocks: &[(u64, u64)]) {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let signed = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        for (offset, len) in blocks {
            fallocate(&self.blocks, flags, signed(*offset), signed(*len)).ok();
        }
    }

    /// Length of the file of blocks.
    pub(super) fn blocks_len(&self) -> io::Result<u64> {
        Ok(self.blocks.metadata()?.len())
    }

    /// Cuts the file of blocks.
    pub(super) fn cut_blocks(&self, len: u64) -> io::Result<()> {
        self.blocks.set_len(len)
    }

    fn carry_out(&self, job: Job) -> Done {
        let (tag, began) = (job.tag, Instant::now());
        let (result, buffer) = match job.work {
            Work::Write(mut buffer, len, offset) => {
                let result = self.write_at(aligned(&mut buffer, len), offset);
                let result = result.map(|()| crc(&mut buffer, len));
                (result, Some(buffer))
            }
            Work::Read(mut buffer, len, offset) => {
                let result = self.read_at(aligned(&mut buffer, len), offset);
                let result = result.map(|()| crc(&mut buffer, len));
                (result, Some(buffer))
            }
            Work::Other(work) => (self.carry_out_other(work).map(|()| 0), None),
        };
        Done {
            tag,
            result,
            buffer,
            took: began.elapsed(),
        }
    }

    #[cfg(test)]
    fn hindered(&self) -> io::Result<()> {
        let hindrance = self.hindrance.lock().unwrap().clone();
        hindrance.map_or(Ok(()), |hindrance| hindrance())
    }

    fn carry_out_other(&self, work: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        #[cfg(test)]
        self.hindered()?;
        work()
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        #[cfg(test)]
        self.hindered()?;
        let direct = self.direct.as_ref();
        match direct.map(|direct| direct.write_all_at(bytes, offset)) {
            Some(Err(error)) if is_unsupported(&error) => {}
            Some(result) => return result,
            None => {}
        }
        self.blocks.write_all_at(bytes, offset)?;
        self.blocks.sync_data()?;
        self.forget(bytes, offset);
        Ok(())
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        #[cfg(test)]
        self.hindered()?;
        let direct = self.direct.as_ref();
        match direct.map(|direct| direct.read_exact_at(bytes, offset)) {
            Some(Err(error)) if is_unsupported(&error) => {}
            Some(result) => return result,
            None => {}
        }
        self.blocks.read_exact_at(bytes, offset)?;
        self.forget(bytes, offset);
        Ok(())
    }

    /// Drops a range from the page cache, whose memory is not in the ledger.
    fn forget(&self, bytes: &[u8], offset: u64) {
        let signed = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let (offset, len) = (signed(offset), signed(bytes.len() as u64));
        let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
        posix_fadvise(self.blocks.as_fd(), offset, len, advice).ok();
    }
}

/// The first `len` bytes of a buffer, rounded up to what direct transfers require.
fn aligned(buffer: &mut Mapping, len: usize) -> &mut [u8] {
    let end = len.next_multiple_of(ALIGNMENT);
    buffer.bytes_mut().get_mut(..end).unwrap_or_default()
}

fn crc(buffer: &mut Mapping, len: usize) -> u32 {
    crc32fast::hash(buffer.bytes_mut().get(..len).unwrap_or_default())
}

/// Whether a file system has refused a direct transfer.
fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

/// Removes a file, if it exists.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Name of the file of blocks.
const BLOCKS: &str = "blocks";
/// Bytes of one transfer. Our choice: a card that reads 20 MB/s takes 50 ms for one.
pub(super) const PIECE: usize = 1 << 20;
/// Number of buffers, and of threads: one transfer is in progress while the bytes of another are copied.
pub(super) const BUFFERS: usize = 2;
/// Alignment of direct transfers: that of disks with large sectors.
pub(super) const ALIGNMENT: usize = 4096;
