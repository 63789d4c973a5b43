//! Hand-over of workers and leases between two runs of the daemon.
//!
//! The folder of sockets identifies the supervisor. This module owns two files in it: `supervisor.lock` is locked
//! exactly while a supervisor exists, and checked by workers; `book` is the state for the next one.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, fcntl},
};

use super::error::RunError;
use cotenant_config::Config;
use cotenant_journal::{BookError, BookFile, FoundBook, SavedBook, open_own};
use cotenant_policy::{
    arbiter::Arbiter,
    book::{AdoptedWorker, Book, BookedLease},
    event::Event,
    lease::LeaseId,
};
use cotenant_probe::processes::boot_ticks;
use cotenant_rpc::peer::Process;
use cotenant_units::causes::in_one_line;
use cotenant_worker::{adopt::Survivor, spec::Successor};

/// Place of this run among supervisors, exclusive while this value lives.
pub(super) struct Place {
    lock: File,
    successor: Successor,
}

/// Book of this run on disk.
pub(super) struct Handoff {
    _lock: File,
    file: BookFile,
    saved: SavedBook,
    /// Whether the file contains this book.
    written: bool,
    failing: bool,
}

/// State left by the previous run.
#[derive(Default)]
pub(super) struct Inheritance {
    /// Ids of the runs whose leases continue, latest first.
    pub(super) boot_ids: Vec<String>,
    book: Option<Book>,
    /// Path of a saved book that could not be read.
    lost: Option<String>,
    /// Living tenants with continuing or ended leases.
    pub(super) holders: Vec<(LeaseId, Arc<Process>)>,
}

/// Returns the folder that identifies supervisors with this configuration.
pub(super) fn successor_of(config: &Config) -> Successor {
    let folder = config
        .runtime_dir
        .canonicalize()
        .unwrap_or_else(|_| config.runtime_dir.clone());
    Successor {
        lock: folder.join("supervisor.lock"),
        place: folder.to_string_lossy().into_owned(),
    }
}

impl Place {
    /// Takes the place; waits for processes of a dead supervisor that still hold it.
    ///
    /// A supervisor killed while starting a worker leaves a process between fork and exec: it holds the lock and the
    /// listeners until it executes the program, and only then has the environment that identifies a worker.
    ///
    /// # Errors
    /// If another supervisor is running, or the file cannot be used.
    pub(super) async fn take(config: &Config) -> Result<Self, RunError> {
        let successor = successor_of(config);
        let failed = |source| RunError::Place {
            path: successor.lock.clone(),
            source,
        };
        let end = Instant::now() + GONE_PATIENCE;
        loop {
            let locked = match lock(&successor.lock) {
                Ok(Some(lock)) => return Ok(Self { lock, successor }),
                locked => locked.map_err(failed),
            };
            if let Some(pid) = living_owner(&successor.lock) {
                return Err(RunError::Running {
                    pid,
                    folder: successor.place,
                });
            }
            locked?;
            if Instant::now() > end {
                let why = "a supervisor of this folder keeps it locked";
                return Err(failed(io::Error::new(io::ErrorKind::WouldBlock, why)));
            }
            tokio::time::sleep(GONE_LOOK_EVERY).await;
        }
    }
}

impl Handoff {
    /// Reads the state left by the previous run.
    ///
    /// # Errors
    /// If the files cannot be used.
    pub(super) fn open(place: Place, boot_id: &str) -> Result<(Self, Inheritance), RunError> {
        let Place { lock, successor } = place;
        let path = PathBuf::from(&successor.place).join("book");
        let (file, found) = BookFile::open(&path).map_err(|source| RunError::Book { source })?;
        let kernel_boot_id = kernel_boot_id();
        let mut inheritance = Inheritance::default();
        match found {
            FoundBook::Whole(found) if found.kernel_boot_id == kernel_boot_id => {
                inheritance.take(found);
            }
            FoundBook::Whole(_) | FoundBook::Nothing => {}
            FoundBook::Damaged(kept) => {
                tracing::warn!(
                    hint = "tenants request leases again automatically; until then their memory is unaccounted",
                    "lost the leases of the previous run: its ledger is damaged, and kept as `{}`",
                    kept.display()
                );
                inheritance.lost = Some(kept.to_string_lossy().into_owned());
            }
        }
        let mut boot_ids = vec![boot_id.to_owned()];
        boot_ids.extend(inheritance.boot_ids.iter().take(RUNS_FOLLOWED).cloned());
        let handoff = Self {
            _lock: lock,
            file,
            saved: SavedBook {
                boot_ids,
                kernel_boot_id,
                written_at_ticks: 0,
                closed: false,
                book: Book::default(),
            },
            written: false,
            failing: false,
        };
        Ok((handoff, inheritance))
    }

    /// Writes the book if it has changed; call it before the change is announced.
    pub(super) fn keep(&mut self, arbiter: &Arbiter) {
        let mut book = arbiter.book();
        // Numbers of queue places and targets do not count as a change; the next run skips some of them.
        let last = std::mem::replace(&mut book.last, self.saved.book.last);
        if self.written && book == self.saved.book {
            return;
        }
        book.last = last;
        self.saved.book = book;
        let result = self.write();
        self.written = result.is_ok();
        match result {
            Ok(()) => self.failing = false,
            // Logged once per series of failures. The next event retries.
            Err(error) if !std::mem::replace(&mut self.failing, true) => {
                tracing::error!("{}", in_one_line(&error));
            }
            Err(_) => {}
        }
    }

    /// Records an orderly end of the run: its workers have ended, its tenants may keep their memory.
    pub(super) fn close(mut self, arbiter: &Arbiter) {
        self.saved.book = arbiter.book();
        self.saved.book.workers.clear();
        self.saved.closed = true;
        if let Err(error) = self.write() {
            tracing::warn!("{}", in_one_line(&error));
        }
    }

    fn write(&mut self) -> Result<(), BookError> {
        self.saved.written_at_ticks = boot_ticks().unwrap_or_default();
        self.file.write(&self.saved)
    }
}

impl Inheritance {
    fn take(&mut self, found: SavedBook) {
        let mut book = found.book;
        let holders = &mut self.holders;
        let mut is_held = |lease: &BookedLease| {
            // If the process is not visible, only the term decides.
            let Some(pid) = lease.request.holder_pid() else {
                return true;
            };
            let Some(process) = Process::of_earlier_peer(pid, found.written_at_ticks) else {
                tracing::info!(
                    lease = lease.id.0,
                    tenant = lease.request.tenant,
                    pid,
                    "lease not taken over: its holder has ended, its memory is free"
                );
                return false;
            };
            holders.push((lease.id, Arc::new(process)));
            true
        };
        book.leases.retain(&mut is_held);
        // A holder unaware of the end of its lease may use the memory until its own end, but no longer.
        book.ended.retain(&mut is_held);
        if found.closed {
            tracing::info!(leases = book.leases.len(), "the previous run ended cleanly");
        } else {
            tracing::warn!(
                leases = book.leases.len(),
                "the previous run was killed; taking over its workers and leases"
            );
        }
        self.boot_ids = found.boot_ids;
        self.book = Some(book);
    }

    /// Sets which workers had been ready, as far as known.
    pub(super) fn note_readiness(&self, survivors: &mut [Survivor]) {
        for survivor in survivors {
            let booked = self.book.iter().flat_map(|book| &book.workers);
            let mut booked = booked.filter(|booked| booked.name == survivor.worker);
            if let Some(booked) = booked.next() {
                survivor.was_ready = booked.run.ready;
                // It may have been switched since the start.
                survivor.variant.clone_from(&booked.run.variant);
            }
        }
    }

    /// Returns the first events of this run; none if nothing was left or lost.
    pub(super) fn events(self, adopted: Vec<AdoptedWorker>) -> Vec<Event> {
        let has_left = self.book.is_some() || !adopted.is_empty();
        let recovered = has_left.then(|| Event::Recovered {
            book: self.book.unwrap_or_default(),
            adopted,
        });
        recovered
            .into_iter()
            .chain(self.lost.map(|kept| Event::BookLost { kept }))
            .collect()
    }
}

/// Locks a file for as long as it is open in this process (`F_OFD_SETLK`), and writes the owner into it. `None` if
/// another process has locked it.
fn lock(path: &Path) -> io::Result<Option<File>> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o640);
    let file = open_own(path, &mut options)?;
    let short = |number| libc::c_short::try_from(number).map_err(io::Error::other);
    let wanted = libc::flock {
        l_type: short(libc::F_WRLCK)?,
        l_whence: short(libc::SEEK_SET)?,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    match fcntl(&file, FcntlArg::F_OFD_SETLK(&wanted)) {
        Ok(_) => {}
        Err(Errno::EAGAIN | Errno::EACCES) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let owner = format!(
        "{} {}\n",
        std::process::id(),
        boot_ticks().unwrap_or_default()
    );
    file.set_len(0)?;
    file.write_all_at(owner.as_bytes(), 0)?;
    Ok(Some(file))
}

/// Returns the supervisor recorded in the locked file, if it still runs.
pub(super) fn living_owner(path: &Path) -> Option<u32> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut fields = text.split_ascii_whitespace();
    let pid = fields.next().and_then(|pid| pid.parse().ok());
    let since = fields.next().and_then(|ticks| ticks.parse().ok());
    // In a container, successive supervisors may have the same id.
    let owner = pid.filter(|pid| *pid != std::process::id()).zip(since);
    let (pid, _) = owner.filter(|(pid, since)| Process::of_earlier_peer(*pid, *since).is_some())?;
    Some(pid)
}

/// Returns the kernel's boot id; empty if unreadable, which then compares as equal.
fn kernel_boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .unwrap_or_default()
        .trim()
        .to_owned()
}

/// Limit on earlier runs whose leases are recognised: a tenant silent for that many restarts has long lost its lease by
/// its term.
const RUNS_FOLLOWED: usize = 15;

/// Longest wait for a dead supervisor's children that hold the place. Between fork and exec a child makes only system
/// calls, but under memory pressure these may wait for pages.
const GONE_PATIENCE: Duration = Duration::from_secs(5);

const GONE_LOOK_EVERY: Duration = Duration::from_millis(2);

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use cotenant_policy::lease::{Class, LeaseRequest, Peer};
    use cotenant_units::Bytes;

    fn config_in(folder: &Path) -> Config {
        let text = format!("runtime_dir: {0}\nstate_dir: {0}\n", folder.display());
        Config::parse(&text).unwrap()
    }

    #[tokio::test]
    async fn a_place_is_had_once_and_waited_for_where_its_owner_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let config = config_in(folder.path());
        let place = Place::take(&config).await.unwrap();
        let path = place.successor.lock.clone();
        // According to the file, a living child is now the owner.
        let mut other = Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let written = format!("{} {}\n", other.id(), boot_ticks().unwrap() + 1);
        std::fs::write(&path, written).unwrap();
        let refused = Place::take(&config).await;
        assert!(matches!(refused, Err(RunError::Running { pid, .. }) if pid == other.id()));
        other.kill().unwrap();
        other.wait().unwrap();
        // It has ended, but its forked child holds the lock a little longer.
        let (next, ()) = tokio::join!(Place::take(&config), async {
            tokio::time::sleep(GONE_LOOK_EVERY * 5).await;
            drop(place);
        });
        let next = next.unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with(&format!("{} ", std::process::id())),
            "{text}"
        );
        drop(next);
    }

    #[tokio::test]
    async fn a_place_that_cannot_be_locked_is_refused_at_once_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("supervisor.lock")).unwrap();
        let begun = Instant::now();
        let refused = Place::take(&config_in(folder.path())).await;
        assert!(begun.elapsed() < GONE_PATIENCE);
        match refused.err() {
            Some(RunError::Place { source, .. }) => {
                assert_eq!(source.kind(), io::ErrorKind::IsADirectory);
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_a_holder_may_use_that_has_not_heard_of_its_end_goes_with_its_process() {
        let mut silent = Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let ended = |pid: Option<u32>, id| BookedLease {
            id: LeaseId(id),
            generation: id,
            held: Bytes::from_mib(100),
            min: Bytes::from_mib(1),
            max: Bytes::from_mib(100),
            request: LeaseRequest {
                tenant: "silent".to_owned(),
                request_id: id.to_string(),
                peer: Peer {
                    pid,
                    ..Peer::default()
                },
                class: Class::Batch,
                min: Bytes::from_mib(1),
                max: Bytes::from_mib(100),
                term: Some(Duration::from_secs(300)),
                wait: Duration::ZERO,
                validate_only: false,
                cgroup: None,
            },
        };
        let found = SavedBook {
            boot_ids: vec!["before".to_owned()],
            kernel_boot_id: kernel_boot_id(),
            written_at_ticks: boot_ticks().unwrap() + 1,
            closed: false,
            book: Book {
                ended: vec![ended(Some(silent.id()), 1), ended(None, 2)],
                ..Book::default()
            },
        };
        let taken = |found: &SavedBook| {
            let mut inheritance = Inheritance::default();
            inheritance.take(found.clone());
            let watched: Vec<_> = inheritance
                .holders
                .iter()
                .map(|(id, process)| (id.0, process.pid()))
                .collect();
            let ended: Vec<_> = inheritance
                .book
                .unwrap()
                .ended
                .iter()
                .map(|lease| lease.id.0)
                .collect();
            (ended, watched)
        };
        assert_eq!(taken(&found), (vec![1, 2], vec![(1, silent.id())]));
        silent.kill().unwrap();
        silent.wait().unwrap();
        assert_eq!(
            taken(&found),
            (vec![2], vec![]),
            "only the term tells of one that cannot be seen"
        );
    }
}
