//! Memory of the processes of a session.
//!
//! ```text
//!   list  ──► every process, its parent and its session                     some 10 µs each
//!   RSS   ──► of the members, from a counter that the kernel keeps          some 10 µs each
//!   PSS   ──► of the members, from their page tables                        10 ms for each GiB
//! ```
//!
//! Page tables are read when a process is new, when it has shrunk, and in rotation; between two readings, a growing
//! process counts with its last PSS plus its RSS growth, an upper bound. A process that fills memory is thus noticed at
//! once, without a walk of its page tables. Once the lists have reached their size, nothing is allocated.

use std::{
    fmt::Write as _,
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom},
    os::fd::AsRawFd as _,
    time::{Duration, Instant},
};

use super::{
    ProbeError, ProbeRoot,
    processes::{MemorySum, ProcessMemory, ProcessStat, is_gone, living_thread},
    source::{number, words},
};
use cotenant_units::{Bytes, page};

/// Reader of a session, its descendants, and additional processes with theirs.
#[derive(Debug)]
pub(super) struct SessionReader {
    root: ProbeRoot,
    session: u32,
    others: Vec<u32>,
    folder: File,
    found: Vec<Found>,
    /// Processes whose main thread has ended, each with a thread that shows their memory; sorted by process id.
    threads: Vec<(u32, u32)>,
    members: Vec<Member>,
    path: String,
    text: Vec<u8>,
    page: u64,
}

#[derive(Clone, Copy, Debug)]
struct Found {
    pid: u32,
    parent: u32,
    session: u32,
    start_ticks: u64,
    is_member: bool,
}

/// Process of the session, and its last readings.
#[derive(Clone, Copy, Debug)]
struct Member {
    pid: u32,
    start_ticks: u64,
    /// From its page tables; its RSS if they are unreadable.
    pss: Bytes,
    by_rss: bool,
    /// Its RSS at that reading of its page tables.
    rss_then: Bytes,
    rss: Bytes,
    read_at: Option<Instant>,
    is_there: bool,
}

impl SessionReader {
    pub(super) fn open(root: &ProbeRoot, session: u32) -> Result<Self, ProbeError> {
        let folder = File::open(&root.proc)
            .map_err(|error| ProbeError::io("processes", &root.proc, error))?;
        Ok(Self {
            root: root.clone(),
            session,
            others: Vec::new(),
            folder,
            found: Vec::with_capacity(LISTED),
            members: Vec::with_capacity(LISTED),
            threads: Vec::new(),
            path: String::with_capacity(128),
            text: vec![0; TEXT],
            page: page().get(),
        })
    }

    /// Includes these processes and their descendants, although they belong to another session.
    pub(super) fn count_too(&mut self, pids: impl IntoIterator<Item = u32>) {
        self.others.extend(pids);
    }

    /// Returns an upper bound of their current memory: growth since page tables were read counts in full.
    pub(super) fn read(&mut self, now: Instant) -> Result<MemorySum, ProbeError> {
        self.list()
            .map_err(|error| ProbeError::io("processes", &self.root.proc, error))?;
        self.choose();
        for index in 0..self.members.len() {
            self.look(index, now);
        }
        self.members.retain(|member| member.is_there);
        let mut sum = MemorySum::default();
        for member in &self.members {
            let grown = member.rss.saturating_sub(member.rss_then);
            sum.used = sum.used.saturating_add(member.pss).saturating_add(grown);
            sum.processes += 1;
            sum.by_rss += u32::from(member.by_rss);
        }
        Ok(sum)
    }

    /// Renews the oldest page-table readings for a few milliseconds, as the basis of the next reading; call it after
    /// the reading was delivered.
    pub(super) fn refresh(&mut self, now: Instant) {
        let ends = Instant::now() + REFRESH;
        while Instant::now() < ends {
            let stale = self
                .members
                .iter()
                .enumerate()
                .filter(|(_, member)| member.is_stale(now));
            let Some((index, _)) = stale.min_by_key(|(_, member)| member.read_at) else {
                return;
            };
            self.read_tables(index, now);
        }
    }

    pub(super) fn wants_refresh(&self, now: Instant) -> bool {
        self.members.iter().any(|member| member.is_stale(now))
    }

    /// Lists all processes by `getdents64` into a reused buffer.
    fn list(&mut self) -> io::Result<()> {
        self.found.clear();
        self.threads.clear();
        (&self.folder).seek(SeekFrom::Start(0))?;
        let mut entries = [0u8; 8192];
        loop {
            // SAFETY: the kernel writes at most the length of the buffer.
            let length = unsafe {
                libc::syscall(
                    libc::SYS_getdents64,
                    self.folder.as_raw_fd(),
                    entries.as_mut_ptr(),
                    entries.len(),
                )
            };
            let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
            let mut rest = entries.get(..length).unwrap_or_default();
            if rest.is_empty() {
                return Ok(());
            }
            while let Some((name, next)) = entry(rest) {
                rest = next;
                let pid = number(name).and_then(|pid| u32::try_from(pid).ok());
                if let Some(found) = pid.and_then(|pid| self.find(pid)) {
                    self.found.push(found);
                }
            }
        }
    }

    /// Reads the identity of a process; `None` if it has ended.
    fn find(&mut self, pid: u32) -> Option<Found> {
        let text = self.file(pid, "stat").ok()?;
        let stat = ProcessStat::parse(text)?;
        if stat.main_thread_has_ended()
            && let Some(thread) = living_thread(&self.root.proc, pid)
        {
            self.threads.push((pid, thread));
        }
        (!stat.is_dead()).then_some(Found {
            pid: stat.pid,
            parent: stat.parent,
            session: stat.session,
            start_ticks: stat.start_ticks,
            is_member: false,
        })
    }

    /// Marks the members of the session and their descendants, with their last readings.
    fn choose(&mut self) {
        self.found.sort_unstable_by_key(|found| found.pid);
        for found in &mut self.found {
            found.is_member = found.session == self.session || self.others.contains(&found.pid);
        }
        let mut changed = true;
        while std::mem::take(&mut changed) {
            for index in 0..self.found.len() {
                let Some(found) = self.found.get(index).copied() else {
                    continue;
                };
                let parent = self
                    .found
                    .binary_search_by_key(&found.parent, |other| other.pid);
                let is_child = parent
                    .ok()
                    .and_then(|parent| self.found.get(parent))
                    .is_some_and(|parent| parent.is_member);
                if is_child
                    && !found.is_member
                    && let Some(found) = self.found.get_mut(index)
                {
                    found.is_member = true;
                    changed = true;
                }
            }
        }
        for member in &mut self.members {
            member.is_there = false;
        }
        for found in self.found.iter().filter(|found| found.is_member) {
            let known = |member: &&mut Member| {
                member.pid == found.pid && member.start_ticks == found.start_ticks
            };
            match self.members.iter_mut().find(known) {
                Some(member) => member.is_there = true,
                None => self.members.push(Member {
                    pid: found.pid,
                    start_ticks: found.start_ticks,
                    pss: Bytes::ZERO,
                    by_rss: false,
                    rss_then: Bytes::ZERO,
                    rss: Bytes::ZERO,
                    read_at: None,
                    is_there: true,
                }),
            }
        }
    }

    /// Reads the RSS of a member, and its page tables if their reading is missing or the RSS has fallen.
    fn look(&mut self, index: usize, now: Instant) {
        let Some(member) = self
            .members
            .get(index)
            .copied()
            .filter(|member| member.is_there)
        else {
            return;
        };
        let rss = self.resident(member.pid);
        if let Some(member) = self.members.get_mut(index) {
            match rss {
                Some(rss) => member.rss = rss,
                None => member.is_there = false,
            }
        }
        let shrunk = rss.is_some_and(|rss| rss.saturating_add(NOISE) < member.rss_then);
        if shrunk || member.read_at.is_none() {
            self.read_tables(index, now);
        }
    }

    fn read_tables(&mut self, index: usize, now: Instant) {
        let Some(pid) = self.members.get(index).map(|member| member.pid) else {
            return;
        };
        let rss = self.resident(pid);
        let read = self.file(pid, "smaps_rollup").map(ProcessMemory::parse);
        let Some(member) = self.members.get_mut(index) else {
            return;
        };
        member.read_at = Some(now);
        let Some(rss) = rss else {
            member.is_there = false;
            return;
        };
        // Growth during the reading of its tables counts as growth.
        member.rss_then = rss;
        member.rss = member.rss.max(rss);
        match read {
            Ok(Some(memory)) => {
                (member.pss, member.by_rss) = (memory.pss, false);
            }
            // It has no memory any more.
            Ok(None) => member.pss = Bytes::ZERO,
            Err(error) if is_gone(&error) => member.is_there = false,
            // Another user's process: its shared memory counts in full.
            Err(_) => (member.pss, member.by_rss) = (rss, true),
        }
    }

    /// Reads `VmRSS` from the kernel's counters.
    fn resident(&mut self, pid: u32) -> Option<Bytes> {
        let page = self.page;
        let text = self.file(pid, "statm").ok()?;
        let pages = words(text.trim_ascii()).nth(1).and_then(number)?;
        Some(Bytes::new(pages).saturating_mul(page))
    }

    fn file(&mut self, pid: u32, name: &str) -> io::Result<&[u8]> {
        self.path.clear();
        let folder = self.root.proc.display();
        let shown_by = self.threads.iter().find(|(process, _)| *process == pid);
        match shown_by {
            Some((_, thread)) => write!(self.path, "{folder}/{pid}/task/{thread}/{name}"),
            None => write!(self.path, "{folder}/{pid}/{name}"),
        }
        .map_err(io::Error::other)?;
        let length = File::open(&self.path)?.read(&mut self.text)?;
        Ok(self.text.get(..length).unwrap_or_default())
    }
}

impl Member {
    /// Returns whether to read its page tables: periodically, and whenever that is cheap and useful.
    fn is_stale(&self, now: Instant) -> bool {
        let Some(read_at) = self.read_at else {
            return true;
        };
        let changed = self.rss != self.rss_then && self.rss <= SMALL && read_at < now;
        changed || now.saturating_duration_since(read_at) > STALE
    }
}

/// Returns the name of the first entry of a `getdents64` list, and the remaining list.
fn entry(list: &[u8]) -> Option<(&[u8], &[u8])> {
    // Inode and offset of 8 bytes each, length of 2, type of 1, then the NUL-terminated name.
    let length = usize::from(u16::from_ne_bytes(list.get(16..18)?.try_into().ok()?));
    let name = list.get(19..length)?;
    let end = name.iter().position(|byte| *byte == 0)?;
    Some((name.get(..end)?, list.get(length..)?))
}

/// Initial capacity of the process list; more processes cause an allocation.
const LISTED: usize = 1024;
/// Upper bound of `stat`, `statm` and `smaps_rollup`.
const TEXT: usize = 4096;
/// Error of a process's RSS counter: threads and processors keep part of it locally.
const NOISE: Bytes = Bytes::from_mib(1);
/// Size of a process whose page tables are read in well under a millisecond.
const SMALL: Bytes = Bytes::from_mib(64);
/// Time for refreshing page tables after a sample (our choice: some 512 MiB of small pages).
const REFRESH: Duration = Duration::from_millis(5);
/// Greatest age of a page-table reading: sharing with other processes may have changed.
const STALE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use proptest::prelude::*;

    use super::*;

    /// Process folder made of files.
    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new() -> Self {
            let machine = Self(tempfile::tempdir().unwrap());
            fs::create_dir(machine.0.path().join("proc")).unwrap();
            machine
        }

        fn folder(&self, pid: u32) -> std::path::PathBuf {
            self.0.path().join(format!("proc/{pid}"))
        }

        fn process(&self, pid: u32, parent: u32, session: u32) -> &Self {
            fs::create_dir(self.folder(pid)).unwrap();
            let stat = format!(
                "{pid} (a) b) S {parent} {pid} {session} 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 0 77 0 0"
            );
            fs::write(self.folder(pid).join("stat"), stat).unwrap();
            self.rss(pid, 8).pss(pid, 4)
        }

        fn rss(&self, pid: u32, mib: u64) -> &Self {
            let text = format!("1 {} 0 0 0 0 0", (mib << 20) / page().get());
            fs::write(self.folder(pid).join("statm"), text).unwrap();
            self
        }

        fn pss(&self, pid: u32, mib: u64) -> &Self {
            let kib = mib << 10;
            let text =
                format!("00400000-7fff rollup\nRss: {kib} kB\nPss: {kib} kB\nSwapPss: 0 kB\n");
            fs::write(self.folder(pid).join("smaps_rollup"), text).unwrap();
            self
        }

        fn reader(&self, session: u32) -> SessionReader {
            SessionReader::open(&ProbeRoot::at(self.0.path()), session).unwrap()
        }
    }

    fn mib(sum: MemorySum) -> u64 {
        sum.used.get() >> 20
    }

    #[test]
    fn a_session_takes_in_children_that_left_it_and_those_who_are_named() {
        let machine = Machine::new();
        machine
            .process(10, 1, 10)
            .process(11, 10, 10)
            .process(20, 1, 20)
            .process(21, 20, 21);
        // A child with its own session, and its child, which is listed before it.
        machine
            .process(14, 11, 14)
            .process(12, 14, 14)
            .process(30, 1, 10);
        let mut reader = machine.reader(10);
        let now = Instant::now();
        assert_eq!(reader.read(now).unwrap().processes, 5);
        reader.count_too([20]);
        let sum = reader.read(now).unwrap();
        assert_eq!((sum.processes, mib(sum), sum.by_rss), (7, 28, 0));
        fs::remove_dir_all(machine.folder(30)).unwrap();
        assert_eq!(mib(reader.read(now).unwrap()), 24);
    }

    #[test]
    fn growth_counts_at_once_and_page_tables_are_read_when_less_is_there_or_in_turn() {
        let machine = Machine::new();
        machine.process(10, 1, 10).rss(10, 200).pss(10, 150);
        let mut reader = machine.reader(10);
        let start = Instant::now();
        assert_eq!(mib(reader.read(start).unwrap()), 150);
        // It fills memory; its shared part is unknown until its tables are read.
        machine.rss(10, 300).pss(10, 170);
        assert_eq!(mib(reader.read(start).unwrap()), 250);
        assert!(
            !reader.wants_refresh(start),
            "a large process, and its tables were read a moment ago"
        );
        let later = start + STALE * 2;
        assert!(reader.wants_refresh(later));
        reader.refresh(later);
        assert!(!reader.wants_refresh(later));
        assert_eq!(mib(reader.read(later).unwrap()), 170);
        // It shrinks: only memory confirmed by the tables is deducted.
        machine.rss(10, 280).pss(10, 160);
        assert_eq!(mib(reader.read(later).unwrap()), 160);
        // Another program with the same id is another process.
        fs::remove_dir_all(machine.folder(10)).unwrap();
        machine.process(10, 1, 10);
        let stat = fs::read_to_string(machine.folder(10).join("stat"))
            .unwrap()
            .replace(" 77 ", " 99 ");
        fs::write(machine.folder(10).join("stat"), stat).unwrap();
        assert_eq!(mib(reader.read(later).unwrap()), 4);
    }

    #[test]
    fn a_small_process_that_grew_is_read_after_the_sample() {
        let machine = Machine::new();
        machine.process(10, 1, 10);
        let mut reader = machine.reader(10);
        let start = Instant::now();
        assert_eq!(mib(reader.read(start).unwrap()), 4);
        machine.rss(10, 20).pss(10, 5);
        let next = start + Duration::from_millis(10);
        assert_eq!(mib(reader.read(next).unwrap()), 16);
        reader.refresh(next);
        assert_eq!(mib(reader.read(next).unwrap()), 5);
    }

    #[test]
    fn what_cannot_be_listed_is_an_error_and_what_is_not_ours_counts_in_full() {
        assert!(SessionReader::open(&ProbeRoot::at(Path::new("/nonexistent")), 1).is_err());
        let machine = Machine::new();
        machine.process(10, 1, 10);
        let tables = machine.folder(10).join("smaps_rollup");
        fs::remove_file(&tables).unwrap();
        // Reading a folder fails, like reading another user's tables.
        fs::create_dir(&tables).unwrap();
        let sum = machine.reader(10).read(Instant::now()).unwrap();
        assert_eq!((mib(sum), sum.by_rss), (8, 1));
    }

    proptest! {
        #[test]
        fn a_list_of_any_bytes_ends(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut rest = &bytes[..];
            while let Some((_, next)) = entry(rest) {
                prop_assert!(next.len() < rest.len());
                rest = next;
            }
        }
    }
}
