//! Processes: memory use and descent.

use std::{collections::BTreeSet, fs, io};

use super::{
    ProbeError, ProbeRoot,
    source::{lines, number, read_bytes, words},
};
use crate::units::Bytes;

/// Who a process is, from `/proc/<pid>/stat`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessStat {
    /// Its id.
    pub pid: u32,
    /// Name of the program, at most 15 characters.
    pub command: String,
    /// `R`, `S`, `D`, `Z` and so on.
    pub state: char,
    /// The process that it belongs to.
    pub parent: u32,
    /// Its process group.
    pub group: u32,
    /// Its session.
    pub session: u32,
    /// When it was started, in clock ticks since boot: with the pid it names a process for good.
    pub start_ticks: u64,
}

impl ProcessStat {
    /// Reads it now; `None` when there is no such process.
    ///
    /// # Errors
    /// When the file is there and cannot be read.
    pub fn read(root: &ProbeRoot, pid: u32) -> Result<Option<Self>, ProbeError> {
        let path = root.process(pid).join("stat");
        match read_bytes(&path) {
            Ok(text) => Ok(Self::parse(&text)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(ProbeError::io("a process", &path, error)),
        }
    }

    /// Parses the text of `/proc/<pid>/stat`. The name may hold anything, brackets and blanks too.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let open = text.iter().position(|b| *b == b'(')?;
        let close = text.iter().rposition(|b| *b == b')')?;
        let command = text.get(open + 1..close)?;
        let mut fields = words(text.get(close + 1..)?.trim_ascii_end());
        let id = |word: Option<&[u8]>| u32::try_from(number(word?)?).ok();
        let pid = id(Some(text.get(..open)?.trim_ascii()))?;
        let state = char::from(*fields.next()?.first()?);
        let (parent, group, session) = (id(fields.next())?, id(fields.next())?, id(fields.next())?);
        // Field 22; the session was field 6 (proc_pid_stat(5)).
        let start_ticks = number(fields.nth(22 - 7)?)?;
        Some(Self {
            pid,
            command: String::from_utf8_lossy(command).into_owned(),
            state,
            parent,
            group,
            session,
            start_ticks,
        })
    }

    /// Whether it has ended and waits to be reaped; it holds no memory then.
    #[must_use]
    pub fn is_zombie(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

/// What a process uses, from `/proc/<pid>/smaps_rollup`. GPU memory is not in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Pages in memory, those shared with others in part: what ending it would free at least.
    pub pss: Bytes,
    /// Pages in memory, shared ones in full.
    pub rss: Bytes,
    /// Of `pss`, those without a file behind them; `None` before kernel 5.2.
    pub pss_anon: Option<Bytes>,
    /// Of `pss`, those of files.
    pub pss_file: Option<Bytes>,
    /// Pages pushed out to swap, shared ones in part.
    pub swap_pss: Bytes,
    /// Pages that may not be reclaimed.
    pub locked: Bytes,
}

impl ProcessMemory {
    /// Reads it now; `None` when there is no such process, or it is a zombie or a thread of the kernel.
    ///
    /// # Errors
    /// When the file is there and cannot be read: another user's process.
    pub fn read(root: &ProbeRoot, pid: u32) -> Result<Option<Self>, ProbeError> {
        let path = root.process(pid).join("smaps_rollup");
        match read_bytes(&path) {
            Ok(text) => Ok(Self::parse(&text)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(ProbeError::io("memory of a process", &path, error)),
        }
    }

    /// Parses the text of `/proc/<pid>/smaps_rollup`.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let mut memory = Self::default();
        let (mut pss, mut rss) = (None, None);
        for (_, line) in lines(text) {
            let mut words = words(line);
            let key = words.next().unwrap_or_default();
            let value = || {
                let mut words = words.clone();
                words.next().and_then(number).map(Bytes::from_kib)
            };
            match key {
                b"Pss:" => pss = value(),
                b"Rss:" => rss = value(),
                b"Pss_Anon:" => memory.pss_anon = value(),
                b"Pss_File:" => memory.pss_file = value(),
                b"SwapPss:" => memory.swap_pss = value().unwrap_or_default(),
                b"Locked:" => memory.locked = value().unwrap_or_default(),
                _ => {}
            }
        }
        (memory.pss, memory.rss) = (pss?, rss?);
        Some(memory)
    }
}

/// `VmRSS` as `/proc/<pid>/statm` has it: cheap, readable for everybody, shared pages in full.
#[must_use]
pub fn resident(root: &ProbeRoot, pid: u32) -> Option<Bytes> {
    let text = read_bytes(&root.process(pid).join("statm")).ok()?;
    let pages = words(text.trim_ascii()).nth(1).and_then(number)?;
    Some(Bytes::new(pages).saturating_mul(page_bytes()))
}

/// All processes at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessTable {
    /// In the order of their ids.
    pub processes: Vec<ProcessStat>,
}

impl ProcessTable {
    /// Reads it now. Processes that end meanwhile are left out.
    ///
    /// # Errors
    /// When `/proc` cannot be listed.
    pub fn read(root: &ProbeRoot) -> Result<Self, ProbeError> {
        let entries = fs::read_dir(&root.proc).map_err(|error| ProbeError::io("processes", &root.proc, error))?;
        let mut processes: Vec<ProcessStat> = entries
            .flatten()
            .filter_map(|entry| number(entry.file_name().as_encoded_bytes()))
            .filter_map(|pid| u32::try_from(pid).ok())
            .filter_map(|pid| ProcessStat::read(root, pid).ok().flatten())
            .collect();
        processes.sort_unstable_by_key(|process| process.pid);
        Ok(Self { processes })
    }

    /// A process and all that descend from it.
    #[must_use]
    pub fn tree(&self, pid: u32) -> BTreeSet<u32> {
        let start = self.processes.iter().filter(|process| process.pid == pid);
        self.descendants(start.map(|process| process.pid).collect())
    }

    /// The processes of a session and all that descend from them, also where they began a session of their own.
    #[must_use]
    pub fn session(&self, session: u32) -> BTreeSet<u32> {
        let members = self.processes.iter().filter(|process| process.session == session);
        self.descendants(members.map(|process| process.pid).collect())
    }

    /// The processes of a process group.
    #[must_use]
    pub fn group(&self, group: u32) -> BTreeSet<u32> {
        let members = self.processes.iter().filter(|process| process.group == group);
        members.map(|process| process.pid).collect()
    }

    fn descendants(&self, mut found: BTreeSet<u32>) -> BTreeSet<u32> {
        loop {
            let before = found.len();
            for process in &self.processes {
                if found.contains(&process.parent) {
                    found.insert(process.pid);
                }
            }
            if found.len() == before {
                return found;
            }
        }
    }
}

/// What several processes use together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemorySum {
    /// Sum of PSS, and of RSS where PSS could not be read.
    pub pss: Bytes,
    /// Sum of what is swapped out.
    pub swap_pss: Bytes,
    /// Processes counted.
    pub processes: u32,
    /// Of them, those that count with their RSS, since they belong to another user: the sum is an upper bound then.
    pub by_rss: u32,
}

/// Adds up what processes use; those that have ended count nothing.
pub fn sum(root: &ProbeRoot, pids: impl IntoIterator<Item = u32>) -> MemorySum {
    let mut sum = MemorySum::default();
    for pid in pids {
        let (pss, swap_pss) = match ProcessMemory::read(root, pid) {
            Ok(Some(memory)) => (memory.pss, memory.swap_pss),
            Ok(None) => continue,
            Err(_) => match resident(root, pid) {
                Some(rss) => {
                    sum.by_rss += 1;
                    (rss, Bytes::ZERO)
                }
                None => continue,
            },
        };
        sum.pss = sum.pss.saturating_add(pss);
        sum.swap_pss = sum.swap_pss.saturating_add(swap_pss);
        sum.processes += 1;
    }
    sum
}

/// The session of this process.
#[must_use]
pub fn own_session() -> u32 {
    nix::unistd::getsid(None).map_or(0, |session| session.as_raw().unsigned_abs())
}

/// Whether an error means that the process has ended: its files vanish, or read as ESRCH.
pub(super) fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// Bytes of a page on this machine.
pub(super) fn page_bytes() -> u64 {
    nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)
        .ok()
        .flatten()
        .and_then(|bytes| u64::try_from(bytes).ok())
        .unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STAT: &str = "4712 (tmux: ser) ver) S 1 4712 4711 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 1000 50 18";

    fn process(pid: u32, parent: u32, session: u32) -> ProcessStat {
        ProcessStat {
            pid,
            command: String::new(),
            state: 'S',
            parent,
            group: session,
            session,
            start_ticks: 0,
        }
    }

    #[test]
    fn a_name_with_brackets_and_blanks_is_read() {
        let stat = ProcessStat::parse(STAT.as_bytes()).unwrap();
        assert_eq!(
            (stat.pid, stat.command.as_str(), stat.state),
            (4712, "tmux: ser) ver", 'S')
        );
        assert_eq!((stat.parent, stat.group, stat.session), (1, 4712, 4711));
        assert_eq!(stat.start_ticks, 98_765);
        assert!(!stat.is_zombie());
    }

    #[test]
    fn memory_is_read_from_the_rollup() {
        let text = b"55d0-7ffc ---p 00000000 00:00 0    [rollup]\nRss:   1884 kB\nPss:   521 kB\nPss_Anon:  100 kB\n\
            Pss_File: 421 kB\nSwapPss:  7 kB\nLocked:  3 kB\n";
        let memory = ProcessMemory::parse(text).unwrap();
        assert_eq!((memory.rss, memory.pss), (Bytes::from_kib(1884), Bytes::from_kib(521)));
        assert_eq!(
            (memory.swap_pss, memory.locked),
            (Bytes::from_kib(7), Bytes::from_kib(3))
        );
        assert_eq!(memory.pss_anon, Some(Bytes::from_kib(100)));
        assert_eq!(ProcessMemory::parse(b""), None);
    }

    #[test]
    fn a_session_takes_in_children_that_left_it() {
        let table = ProcessTable {
            processes: vec![
                process(10, 1, 10),
                process(11, 10, 10),
                // A worker with a session of its own, and its child, listed before its parent.
                process(12, 14, 14),
                process(14, 11, 14),
                process(20, 1, 20),
                // Adopted by init after its parent ended: still of the session.
                process(30, 1, 10),
            ],
        };
        assert_eq!(Vec::from_iter(table.session(10)), [10, 11, 12, 14, 30]);
        assert_eq!(Vec::from_iter(table.tree(11)), [11, 12, 14]);
        assert_eq!(Vec::from_iter(table.group(14)), [12, 14]);
        assert!(table.tree(99).is_empty());
    }

    proptest! {
        #[test]
        fn parsing_returns_for_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = (ProcessStat::parse(&bytes), ProcessMemory::parse(&bytes));
        }

        #[test]
        fn parsing_returns_for_a_cut_line(cut in 0..STAT.len()) {
            let _ = ProcessStat::parse(&STAT.as_bytes()[..cut]);
        }
    }
}
