//! Journal writer with its own thread.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufWriter, Read, Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tracing::warn;

use super::{Content, JournalEntry, own::open_own};
use cotenant_units::{Bytes, Timestamp};

/// Settings of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalSettings {
    /// Path of the file; with `None`, lines are only passed to the observer.
    pub path: Option<PathBuf>,
    /// Size at which the file is rotated. Default 16 MiB.
    pub file_max: Bytes,
    /// Rotated files to keep, as `journal.ndjson.1` and so on; the oldest is deleted. Default 4.
    pub files_kept: u32,
    /// Bound of the queue to the writer, in lines. Default 4096: some seconds of a busy supervisor.
    pub queue_max: usize,
}

impl Default for JournalSettings {
    fn default() -> Self {
        Self {
            path: None,
            file_max: Bytes::from_mib(16),
            files_kept: 4,
            queue_max: 4096,
        }
    }
}

/// The journal cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file cannot be opened.
    #[error("cannot open journal `{path}`")]
    Open {
        /// Its path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Its thread cannot be started.
    #[error("cannot start the thread that writes the journal")]
    Thread(#[source] io::Error),
}

/// Producer side of the journal. Belongs to the loop that drives the arbiter.
#[derive(Debug)]
pub struct Journal {
    /// Boxed, because the queue allocates room for all its entries at the start.
    queue: Option<SyncSender<Box<JournalEntry>>>,
    writer: Option<JoinHandle<()>>,
    boot_id: String,
    /// Number of the last line, dropped ones included.
    sequence: u64,
    /// Lines dropped since the last accepted one.
    missing: u64,
    lost: Arc<Lost>,
    /// Whether a checkpoint should precede the next event.
    wants_checkpoint: Arc<AtomicBool>,
}

/// Counts of lines that were not written.
#[derive(Debug, Default)]
struct Lost {
    dropped: AtomicU64,
    failed: AtomicU64,
}

impl Journal {
    /// Opens the journal of run `boot_id`, appending to earlier runs. The writer's thread calls `observer` with each
    /// line and its entry, even if the write fails.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened, or the thread cannot be started.
    pub fn open(
        settings: &JournalSettings,
        boot_id: &str,
        observer: impl FnMut(&JournalEntry, &str) + Send + 'static,
    ) -> Result<Self, JournalError> {
        let file = settings
            .path
            .as_ref()
            .map(|path| {
                Rotating::open(path, settings.file_max.get(), settings.files_kept).map_err(
                    |source| JournalError::Open {
                        path: path.clone(),
                        source,
                    },
                )
            })
            .transpose()?;
        let lost = Arc::<Lost>::default();
        let wants_checkpoint = Arc::<AtomicBool>::default();
        let (queue, lines) = sync_channel(settings.queue_max.max(1));
        let writer = Writer {
            lines,
            file,
            observer,
            lost: Arc::clone(&lost),
            loss_logged: None,
            wants_checkpoint: Arc::clone(&wants_checkpoint),
        };
        let writer = std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || writer.run())
            .map_err(JournalError::Thread)?;
        Ok(Self {
            queue: Some(queue),
            writer: Some(writer),
            boot_id: boot_id.to_owned(),
            sequence: 0,
            missing: 0,
            lost,
            wants_checkpoint,
        })
    }

    /// Returns whether a checkpoint should be recorded before the next event: the file is nearly full, or lines are
    /// missing, after which later ones could not be replayed. Recording one resets this.
    pub fn wants_checkpoint(&self) -> bool {
        self.wants_checkpoint.load(Ordering::Relaxed)
    }

    /// Adds a line without blocking. If the writer cannot keep up, the line is dropped and counted, and the next
    /// accepted line records the gap.
    pub fn record(&mut self, at: Timestamp, time: SystemTime, content: Content) {
        let Some(queue) = &self.queue else { return };
        let unix_us = time
            .duration_since(UNIX_EPOCH)
            .ok()
            .and_then(|since| u64::try_from(since.as_micros()).ok())
            .unwrap_or(0);
        let entry = |sequence, content| {
            Box::new(JournalEntry {
                sequence,
                boot_id: self.boot_id.clone(),
                at,
                unix_us,
                content,
            })
        };
        if self.missing > 0 {
            let gap = entry(
                self.sequence + 1,
                Content::Dropped {
                    lines: self.missing,
                },
            );
            if queue.try_send(gap).is_ok() {
                self.sequence += 1;
                self.missing = 0;
            }
        }
        self.sequence += 1;
        let is_checkpoint = matches!(content, Content::Checkpoint(_));
        // No line is accepted before the gap preceding it has been recorded.
        let taken = self.missing == 0
            && match queue.try_send(entry(self.sequence, content)) {
                Ok(()) => true,
                Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => false,
            };
        if taken && is_checkpoint {
            self.wants_checkpoint.store(false, Ordering::Relaxed);
        }
        if !taken {
            self.missing += 1;
            self.wants_checkpoint.store(true, Ordering::Relaxed);
            self.lost.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of the last line.
    pub const fn last_sequence(&self) -> u64 {
        self.sequence
    }

    /// Returns the lines dropped because the writer could not keep up, and the lines whose write failed.
    pub fn lost(&self) -> (u64, u64) {
        (
            self.lost.dropped.load(Ordering::Relaxed),
            self.lost.failed.load(Ordering::Relaxed),
        )
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            warn!("the thread that writes the journal has panicked");
        }
    }
}

/// Shortest interval between two writes. Our choice: the queue holds a hundred times the output of a busy loop.
const REST: Duration = Duration::from_millis(1);

struct Writer<F> {
    lines: Receiver<Box<JournalEntry>>,
    file: Option<Rotating>,
    observer: F,
    lost: Arc<Lost>,
    /// Time of the last log message about lost lines.
    loss_logged: Option<Instant>,
    wants_checkpoint: Arc<AtomicBool>,
}

/// Shortest interval between log messages about lost lines. Our choice.
const LOSS_LOGGED_EVERY: Duration = Duration::from_secs(60);

impl<F: FnMut(&JournalEntry, &str)> Writer<F> {
    fn run(mut self) {
        let mut flushed_at: Option<Instant> = None;
        while let Ok(mut entry) = self.lines.recv() {
            // Lines that arrive meanwhile are written together: waking this thread for each line costs the loop more
            // than the line itself.
            if flushed_at.is_some_and(|at| at.elapsed() < REST) {
                std::thread::sleep(REST);
            }
            // Flushed at a pause, so that a busy loop needs few system calls and readers see complete lines soon.
            loop {
                self.write(&entry);
                match self.lines.try_recv() {
                    Ok(next) => entry = next,
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
                }
            }
            let flushed = self.file.as_mut().map_or(Ok(()), Rotating::flush);
            self.judge(&flushed);
            flushed_at = Some(Instant::now());
        }
    }

    fn write(&mut self, entry: &JournalEntry) {
        let mut line = match serde_json::to_string(entry) {
            Ok(line) => line,
            Err(error) => {
                warn!(sequence = entry.sequence, %error, "cannot write a line of the journal");
                self.lost.failed.fetch_add(1, Ordering::Relaxed);
                return;
            }
        };
        if let Content::Dropped { lines } = entry.content
            && self.is_to_be_logged()
        {
            warn!(lines, "the journal lost lines: its disk was too slow");
        }
        (self.observer)(entry, &line);
        line.push('\n');
        let is_checkpoint = matches!(entry.content, Content::Checkpoint(_));
        let written = self
            .file
            .as_mut()
            .map_or(Ok(()), |file| file.write(&line, is_checkpoint));
        if self.file.as_ref().is_some_and(Rotating::is_nearly_full) && !is_checkpoint {
            self.wants_checkpoint.store(true, Ordering::Relaxed);
        }
        self.judge(&written);
    }

    fn judge(&mut self, result: &io::Result<()>) {
        if let Err(error) = result {
            self.lost.failed.fetch_add(1, Ordering::Relaxed);
            if self.is_to_be_logged() {
                warn!(%error, "cannot write the journal: lines are lost until it can be written");
            }
        }
    }

    /// Returns whether a loss is logged as well as counted, at most once per interval: a full disk accepts a short line
    /// now and then, and a flood of messages does not help.
    fn is_to_be_logged(&mut self) -> bool {
        let is_due = self
            .loss_logged
            .is_none_or(|at| at.elapsed() >= LOSS_LOGGED_EVERY);
        if is_due {
            self.loss_logged = Some(Instant::now());
        }
        is_due
    }
}

/// File that is rotated when full.
struct Rotating {
    path: PathBuf,
    file: BufWriter<File>,
    length: u64,
    length_max: u64,
    kept: u32,
    /// Length of the checkpoint at its head, if any.
    head: u64,
    /// Whether its last line may be incomplete.
    torn: bool,
}

impl Rotating {
    fn open(path: &Path, length_max: u64, kept: u32) -> io::Result<Self> {
        let (file, length, torn) = open(path)?;
        Ok(Self {
            path: path.to_owned(),
            file: BufWriter::new(file),
            length,
            length_max: length_max.max(1),
            kept,
            head: 0,
            torn,
        })
    }

    /// Returns whether a checkpoint is due, which begins the next file. An eighth of the file is left for lines before
    /// it; if that is too little, the next file begins without a checkpoint and receives it slightly later.
    const fn is_nearly_full(&self) -> bool {
        self.length > self.length_max / 8 * 7 && self.length > self.head.saturating_mul(2)
    }

    fn write(&mut self, line: &str, is_checkpoint: bool) -> io::Result<()> {
        let added = u64::try_from(line.len()).unwrap_or(u64::MAX);
        let is_full = self.length.saturating_add(added) > self.length_max;
        if self.length > 0 && (is_full || (is_checkpoint && self.is_nearly_full())) {
            self.rotate()?;
            self.head = if is_checkpoint { added } else { 0 };
        }
        if std::mem::replace(&mut self.torn, true) {
            self.file.write_all(b"\n")?;
        }
        self.file.write_all(line.as_bytes())?;
        self.torn = false;
        self.length = self.length.saturating_add(added);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush().inspect_err(|_| self.torn = true)
    }

    /// Renames `journal` to `journal.1`, `journal.1` to `journal.2`, and deletes the last one.
    fn rotate(&mut self) -> io::Result<()> {
        self.file.flush()?;
        if self.kept == 0 {
            self.file.get_ref().set_len(0)?;
            self.length = 0;
            return Ok(());
        }
        for number in (1..=self.kept).rev() {
            let from = match number {
                1 => self.path.clone(),
                _ => aside(&self.path, number - 1),
            };
            match std::fs::rename(&from, aside(&self.path, number)) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        let (file, length, torn) = open(&self.path)?;
        self.file = BufWriter::new(file);
        self.length = length;
        self.torn = torn;
        Ok(())
    }
}

fn aside(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    PathBuf::from(name)
}

/// Opens for appending; also returns the length, and whether the last line is torn.
fn open(path: &Path) -> io::Result<(File, u64, bool)> {
    let mut options = OpenOptions::new();
    let mut file = open_own(
        path,
        options.read(true).append(true).create(true).mode(FILE_MODE),
    )?;
    let length = file.seek(SeekFrom::End(0))?;
    let mut last = [b'\n'];
    if length > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
    }
    Ok((file, length, last != *b"\n"))
}

/// Not world-readable: names of tenants and their users are private.
const FILE_MODE: u32 = 0o640;

#[cfg(test)]
mod tests {
    use std::{fs, sync::mpsc};

    use super::*;
    use crate as journal;
    use cotenant_policy::event::Event;

    fn drain_event() -> Content {
        Content::Event(Event::DrainRequested { by: None })
    }

    fn settings(path: &Path) -> JournalSettings {
        JournalSettings {
            path: Some(path.to_owned()),
            ..JournalSettings::default()
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.ndjson");
        let mut written = Journal::open(&settings(&path), "boot-a", |_, _| {}).unwrap();
        written.record(Timestamp::from_millis(7), UNIX_EPOCH, drain_event());
        drop(written);
        let contents = journal::read(&path).unwrap();
        assert_eq!(contents.entries.len(), 1);
        assert_eq!(contents.entries[0].sequence, 1);
        assert_eq!(contents.entries[0].boot_id, "boot-a");
        assert_eq!(contents.entries[0].content, drain_event());
        assert!(!contents.torn);
    }

    #[test]
    fn a_line_torn_by_a_crash_does_not_swallow_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.ndjson");
        fs::write(&path, "{\"sequence\":1,\"boot").unwrap();
        let mut written = Journal::open(&settings(&path), "boot-b", |_, _| {}).unwrap();
        written.record(Timestamp::START, UNIX_EPOCH, drain_event());
        drop(written);
        let contents = journal::read(&path).unwrap();
        assert_eq!(contents.entries.len(), 1);
        assert_eq!(contents.damaged, [1]);
    }

    #[test]
    fn a_full_file_is_put_aside_and_the_oldest_goes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.ndjson");
        let settings = JournalSettings {
            file_max: Bytes::new(300),
            files_kept: 2,
            ..settings(&path)
        };
        let mut written = Journal::open(&settings, "boot-c", |_, _| {}).unwrap();
        for _ in 0..20 {
            written.record(Timestamp::START, UNIX_EPOCH, drain_event());
        }
        drop(written);
        let mut files: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        assert_eq!(
            files,
            ["journal.ndjson", "journal.ndjson.1", "journal.ndjson.2"]
        );
        for file in files {
            assert!(fs::metadata(folder.path().join(file)).unwrap().len() <= 300);
        }
        assert_eq!(
            journal::read(&path)
                .unwrap()
                .entries
                .last()
                .unwrap()
                .sequence,
            20
        );
    }

    #[test]
    fn a_disk_that_takes_a_line_now_and_then_is_logged_once() {
        let (_queue, lines) = sync_channel(1);
        let mut writer = Writer {
            lines,
            file: None,
            observer: |_: &JournalEntry, _: &str| {},
            lost: Arc::default(),
            loss_logged: None,
            wants_checkpoint: Arc::default(),
        };
        let full = || Err(io::ErrorKind::StorageFull.into());
        writer.judge(&full());
        let logged = writer.loss_logged;
        assert!(logged.is_some());
        for _ in 0..3 {
            writer.judge(&Ok(()));
            writer.judge(&full());
        }
        assert_eq!(writer.loss_logged, logged);
        assert_eq!(writer.lost.failed.load(Ordering::Relaxed), 4);
    }

    #[test]
    fn a_writer_that_cannot_keep_up_drops_lines_and_records_the_gap() {
        let (release, held) = mpsc::channel::<()>();
        let (seen, lines) = mpsc::channel();
        let settings = JournalSettings {
            queue_max: 2,
            ..JournalSettings::default()
        };
        let mut journal = Journal::open(&settings, "boot-d", move |entry, _| {
            seen.send(entry.clone()).unwrap();
            let _ = held.recv();
        })
        .unwrap();
        let record =
            |journal: &mut Journal| journal.record(Timestamp::START, UNIX_EPOCH, drain_event());
        record(&mut journal);
        // The writer has taken the first line and is blocked; two more fit, and two do not.
        lines.recv().unwrap();
        for _ in 0..4 {
            record(&mut journal);
        }
        assert_eq!(journal.lost(), (2, 0));
        drop(release);
        assert_eq!(lines.recv().unwrap().sequence, 2);
        assert_eq!(lines.recv().unwrap().sequence, 3);
        record(&mut journal);
        assert_eq!(journal.last_sequence(), 7);
        drop(journal);
        let rest: Vec<_> = lines
            .iter()
            .map(|entry| (entry.sequence, entry.content))
            .collect();
        assert_eq!(
            rest,
            [(6, Content::Dropped { lines: 2 }), (7, drain_event())]
        );
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error_with_its_name() {
        let error = Journal::open(
            &settings(Path::new("/nonexistent/journal")),
            "boot-e",
            |_, _| {},
        )
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot open journal `/nonexistent/journal`"
        );
    }
}
