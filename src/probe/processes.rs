//! Processes: relations, start times and memory.
//!
//! The only reader of `/proc/<pid>` for workers, tenants, sessions and socket peers. Every function takes the folder
//! used as `/proc`, so that tests can provide their own. Reading page tables (`smaps_rollup`) takes 50 to 75 ms per GiB
//! of small pages on an x86-64 server, and waits for the process's memory lock: call [`sum`] on a thread that may
//! block, one task per holder.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use super::source::{lines, number, read_bytes, words};
use cotenant_units::{Bytes, page};

/// Identity and relations of a process, from `/proc/<pid>/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessStat {
    /// Its id.
    pub pid: u32,
    /// `R`, `S`, `D`, `Z` and so on.
    pub state: char,
    /// Its parent.
    pub parent: u32,
    /// Its process group.
    pub group: u32,
    /// Its session.
    pub session: u32,
    /// Number of its threads, including the main one until it is reaped; 1 for zombies.
    pub threads: u32,
    /// Start time in clock ticks since boot. Together with the id it identifies one process.
    pub start_ticks: u64,
}

impl ProcessStat {
    /// Reads the file; `None` if the process does not exist or is not visible.
    pub fn read(proc: &Path, pid: u32) -> Option<Self> {
        Self::parse(&read_bytes(&file(proc, pid, "stat")).ok()?)
    }

    /// Parses the text of `/proc/<pid>/stat`. The name may contain any characters, including parentheses and blanks.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let open = text.iter().position(|b| *b == b'(')?;
        let close = text.iter().rposition(|b| *b == b')')?;
        let id = |word: Option<&[u8]>| u32::try_from(number(word?)?).ok();
        let pid = id(Some(text.get(..open)?.trim_ascii()))?;
        let mut fields = words(text.get(close + 1..)?.trim_ascii_end());
        let state = char::from(*fields.next()?.first()?);
        let (parent, group, session) = (id(fields.next())?, id(fields.next())?, id(fields.next())?);
        // Fields 20 and 22; the session was field 6 (proc_pid_stat(5)).
        let threads = id(fields.nth(20 - 7))?;
        let start_ticks = number(fields.nth(1)?)?;
        Some(Self {
            pid,
            state,
            parent,
            group,
            session,
            threads,
            start_ticks,
        })
    }

    /// Returns whether it is a zombie, which holds no memory.
    pub const fn is_dead(self) -> bool {
        self.main_thread_has_ended() && self.threads <= 1
    }

    /// Returns whether the main thread has ended. If other threads continue, their files show the memory, the process's
    /// own do not.
    pub const fn main_thread_has_ended(self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }
}

/// Memory of a process without GPU memory, from `/proc/<pid>/smaps_rollup`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Proportional set size: the least that its end would free.
    pub pss: Bytes,
    /// Resident set size, shared pages in full.
    pub rss: Bytes,
    /// Anonymous pages, shared ones in full.
    pub anonymous: Bytes,
    /// Proportional size of shared memory; `None` before Linux 5.3.
    pub shared_pss: Option<Bytes>,
}

impl ProcessMemory {
    /// Reads the file; `None` if the process does not exist, is a zombie or a kernel thread.
    ///
    /// # Errors
    /// If the file exists but cannot be read: another user's process.
    pub fn read(proc: &Path, pid: u32) -> io::Result<Option<Self>> {
        match read_bytes(&memory_file(proc, pid, "smaps_rollup")) {
            Ok(text) => Ok(Self::parse(&text)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Parses the text of `/proc/<pid>/smaps_rollup`.
    pub fn parse(text: &[u8]) -> Option<Self> {
        Some(Self {
            pss: kib(text, b"Pss:")?,
            rss: kib(text, b"Rss:")?,
            anonymous: kib(text, b"Anonymous:").unwrap_or_default(),
            shared_pss: kib(text, b"Pss_Shmem:"),
        })
    }
}

/// Returns the thread whose files show the memory of a process whose main thread has ended while others run; `None` for
/// every other process.
pub fn living_thread(proc: &Path, pid: u32) -> Option<u32> {
    let process = ProcessStat::read(proc, pid)?;
    if !process.main_thread_has_ended() || process.is_dead() {
        return None;
    }
    let threads = fs::read_dir(file(proc, pid, "task")).ok()?.flatten();
    let ids = threads
        .filter_map(|entry| u32::try_from(number(entry.file_name().as_encoded_bytes())?).ok());
    ids.filter(|id| *id != pid).find(|id| {
        let text = read_bytes(&file(proc, pid, "task").join(id.to_string()).join("stat"))
            .unwrap_or_default();
        ProcessStat::parse(&text).is_some_and(|thread| !thread.main_thread_has_ended())
    })
}

/// Returns the path of a file that shows the memory of a process.
fn memory_file(proc: &Path, pid: u32, name: &str) -> PathBuf {
    match living_thread(proc, pid) {
        Some(thread) => file(proc, pid, "task").join(thread.to_string()).join(name),
        None => file(proc, pid, name),
    }
}

/// Reads the resident set size from `/proc/<pid>/statm`: cheap, readable for every process, shared pages in full.
pub fn resident(proc: &Path, pid: u32) -> Option<Bytes> {
    let text = read_bytes(&memory_file(proc, pid, "statm")).ok()?;
    let pages = words(text.trim_ascii()).nth(1).and_then(number)?;
    Some(Bytes::new(pages).saturating_mul(page().get()))
}

/// Reads the processor time used by all threads of a process; `None` if it does not exist.
pub fn cpu_time(pid: u32) -> Option<Duration> {
    let text = read_bytes(&file(Path::new("/proc"), pid, "stat")).ok()?;
    let close = text.iter().rposition(|byte| *byte == b')')?;
    let mut fields = words(text.get(close + 1..)?.trim_ascii_end());
    // Fields 14 and 15 (proc_pid_stat(5)); the state, field 3, is the first of these.
    let (user, system) = (number(fields.nth(14 - 3)?)?, number(fields.next()?)?);
    let per_second = sysconf(nix::unistd::SysconfVar::CLK_TCK)?;
    Some(Duration::from_millis(
        user.saturating_add(system).saturating_mul(1000) / per_second.max(1),
    ))
}

/// Reads the peak resident set size of a process, shared pages in full (`VmHWM`).
pub fn peak_resident(proc: &Path, pid: u32) -> Option<Bytes> {
    kib(
        &read_bytes(&memory_file(proc, pid, "status")).ok()?,
        b"VmHWM:",
    )
}

/// Returns the value of a variable in a process's initial environment; `None` if it is unset or unreadable.
pub fn environment(proc: &Path, pid: u32, variable: &str) -> Option<String> {
    let bytes = fs::read(file(proc, pid, "environ")).ok()?;
    bytes
        .split(|&byte| byte == 0)
        .filter_map(|entry| std::str::from_utf8(entry).ok()?.split_once('='))
        .find_map(|(name, value)| (name == variable).then(|| value.to_owned()))
}

/// Returns all visible processes; empty if `/proc` cannot be listed.
pub fn all(proc: &Path) -> Vec<ProcessStat> {
    ProcessTable::read(proc).unwrap_or_default().processes
}

/// Snapshot of all processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessTable {
    /// Sorted by id.
    pub processes: Vec<ProcessStat>,
}

impl ProcessTable {
    /// Reads all processes; those that end meanwhile are skipped.
    ///
    /// # Errors
    /// If `/proc` cannot be listed.
    pub fn read(proc: &Path) -> io::Result<Self> {
        let mut processes: Vec<ProcessStat> = fs::read_dir(proc)?
            .flatten()
            .filter_map(|entry| number(entry.file_name().as_encoded_bytes()))
            .filter_map(|pid| u32::try_from(pid).ok())
            .filter_map(|pid| ProcessStat::read(proc, pid))
            .collect();
        processes.sort_unstable_by_key(|process| process.pid);
        Ok(Self { processes })
    }

    /// Returns a process and its descendants.
    pub fn tree(&self, pid: u32) -> BTreeSet<u32> {
        self.descendants(|process| process.pid == pid)
    }

    /// Returns a process, the members of the group that it leads, and their descendants: members whose parent has ended
    /// are found by their group.
    pub fn family(&self, leader: u32) -> BTreeSet<u32> {
        self.descendants(|process| process.pid == leader || process.group == leader)
    }

    /// Returns a process and its ancestors, the nearest first, as far as they are listed.
    pub fn lineage(&self, pid: u32) -> impl Iterator<Item = u32> {
        let find = |pid| {
            let found = self
                .processes
                .binary_search_by_key(&pid, |process| process.pid);
            self.processes.get(found.ok()?)
        };
        std::iter::successors(find(pid), move |process| find(process.parent))
            .take(ANCESTORS_MAX)
            .map(|process| process.pid)
    }

    /// Returns the processes for which `is_root` holds, and their descendants.
    pub fn descendants(&self, is_root: impl Fn(&ProcessStat) -> bool) -> BTreeSet<u32> {
        let roots = self.processes.iter().filter(|process| is_root(process));
        let mut found: BTreeSet<u32> = roots.map(|process| process.pid).collect();
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

/// Returns the leader among `leaders` to whose [`family`](ProcessTable::family) a process belongs; the nearest one if
/// leaders are nested.
///
/// Ascends from `pid`: listing every process of the machine would take milliseconds.
pub fn leader_of(proc: &Path, leaders: &BTreeSet<u32>, pid: u32) -> Option<u32> {
    let mut next = pid;
    for _ in 0..ANCESTORS_MAX {
        let found = ProcessStat::read(proc, next)?;
        if let Some(leader) = [found.pid, found.group]
            .into_iter()
            .find(|id| leaders.contains(id))
        {
            return Some(leader);
        }
        next = found.parent;
    }
    None
}

/// Total memory of several processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemorySum {
    /// Sum of PSS, and of RSS where PSS could not be read.
    pub used: Bytes,
    /// Sum of anonymous pages; `None` if page tables of a process could not be read.
    pub anonymous: Option<Bytes>,
    /// Peak memory of the processes since their start, minus their present shared memory; `None` if page tables of a
    /// process could not be read.
    pub peak: Option<Bytes>,
    /// Number of processes.
    pub processes: u32,
    /// Number of processes counted by RSS, since they belong to another user: the sum is then an upper bound.
    pub by_rss: u32,
}

/// Adds up the memory of processes; ended ones count as zero.
pub fn sum(proc: &Path, pids: impl IntoIterator<Item = u32>) -> MemorySum {
    let mut sum = MemorySum {
        anonymous: Some(Bytes::ZERO),
        peak: Some(Bytes::ZERO),
        ..MemorySum::default()
    };
    let mut files = OpenMemory::default();
    for pid in pids {
        files.add(proc, pid);
        match ProcessMemory::read(proc, pid) {
            Ok(Some(memory)) => {
                let shared = memory.rss.saturating_sub(memory.pss);
                let peak = peak_resident(proc, pid)
                    .map(|peak| peak.saturating_sub(shared).max(memory.pss));
                sum.used = sum.used.saturating_add(memory.pss);
                files.mapped = plus(files.mapped, memory.shared_pss);
                sum.anonymous = plus(sum.anonymous, Some(memory.anonymous));
                sum.peak = plus(sum.peak, peak);
            }
            // Another user's process, a kernel without this file, or a process without memory.
            Ok(None) | Err(_) => {
                let rss = resident(proc, pid).unwrap_or_default();
                if rss == Bytes::ZERO {
                    continue;
                }
                sum.used = sum.used.saturating_add(rss);
                (sum.anonymous, sum.peak) = (None, None);
                sum.by_rss += 1;
                files.mapped = None;
            }
        }
        sum.processes += 1;
    }
    sum.used = sum.used.saturating_add(files.not_mapped());
    sum
}

/// Memory files (`memfd_create`) held open by processes. Pages that are not mapped are in no page table.
struct OpenMemory {
    /// Bytes by inode.
    files: BTreeMap<u64, Bytes>,
    /// Pages of such files and other shared memory in page tables; `None` if the kernel does not report them.
    mapped: Option<Bytes>,
}

impl Default for OpenMemory {
    fn default() -> Self {
        Self {
            files: BTreeMap::new(),
            mapped: Some(Bytes::ZERO),
        }
    }
}

impl OpenMemory {
    fn add(&mut self, proc: &Path, pid: u32) {
        for entry in fs::read_dir(memory_file(proc, pid, "fd"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let target = fs::read_link(entry.path()).unwrap_or_default();
            if target
                .as_os_str()
                .as_encoded_bytes()
                .starts_with(b"/memfd:")
                && let Ok(found) = fs::metadata(entry.path())
            {
                self.files
                    .insert(found.ino(), Bytes::new(found.blocks()).saturating_mul(512));
            }
        }
    }

    /// Returns a lower bound of resident memory that is in no page table.
    fn not_mapped(&self) -> Bytes {
        let all: Bytes = self.files.values().copied().sum();
        self.mapped
            .map_or(Bytes::ZERO, |mapped| all.saturating_sub(mapped))
    }
}

/// Returns the present time in clock ticks since boot, as in [`ProcessStat::start_ticks`].
pub fn boot_ticks() -> Option<u64> {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a valid timespec to write to.
    if unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) } != 0 {
        return None;
    }
    let per_second = sysconf(nix::unistd::SysconfVar::CLK_TCK)?;
    let (seconds, nanos) = (
        u64::try_from(now.tv_sec).ok()?,
        u64::try_from(now.tv_nsec).ok()?,
    );
    Some(seconds * per_second + nanos * per_second / 1_000_000_000)
}

/// Returns the session of this process.
pub fn own_session() -> u32 {
    nix::unistd::getsid(None).map_or(0, |session| session.as_raw().unsigned_abs())
}

/// Returns whether an error means that the process has ended: its files vanish, or reads fail with ESRCH.
pub(super) fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

fn sysconf(variable: nix::unistd::SysconfVar) -> Option<u64> {
    u64::try_from(nix::unistd::sysconf(variable).ok()??).ok()
}

fn file(proc: &Path, pid: u32, name: &str) -> PathBuf {
    proc.join(pid.to_string()).join(name)
}

fn plus(sum: Option<Bytes>, more: Option<Bytes>) -> Option<Bytes> {
    Some(sum?.saturating_add(more?))
}

/// Returns the value of a line `Key:   1234 kB`.
fn kib(text: &[u8], key: &[u8]) -> Option<Bytes> {
    let mut found = lines(text).filter_map(|(_, line)| line.strip_prefix(key));
    words(found.next()?)
        .next()
        .and_then(number)
        .map(Bytes::from_kib)
}

/// Limit on ancestors followed: more than any useful chain (our choice). Ids reused during the walk could form a cycle.
const ANCESTORS_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STAT: &str = "4712 (tmux: ser) ver) S 1 4712 4711 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 1000 50 18";
    const ROLLUP: &str = "00400000-7ffe000 ---p 00000000 00:00 0 [rollup]\nRss:  2048 kB\nPss:  1024 kB\nAnonymous:  512 kB\nSwap:  8 kB\nSwapPss:  4 kB\n";

    fn process(pid: u32, parent: u32, group: u32, session: u32) -> ProcessStat {
        ProcessStat {
            pid,
            state: 'S',
            parent,
            group,
            session,
            threads: 1,
            start_ticks: 0,
        }
    }

    fn stat(pid: u32, parent: u32, group: u32) -> String {
        format!("{pid} (a b) S {parent} {group} {group} 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 5 0 0")
    }

    /// Creates a folder in place of `/proc` with these files.
    fn proc(files: &[(u32, &str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (pid, name, text) in files {
            let path = file(folder.path(), *pid, name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    #[test]
    fn a_name_with_brackets_and_blanks_is_read() {
        let stat = ProcessStat::parse(STAT.as_bytes()).unwrap();
        let expected = ProcessStat {
            start_ticks: 98_765,
            ..process(4712, 1, 4712, 4711)
        };
        assert_eq!(stat, expected);
        assert!(!stat.is_dead());
        for broken in [
            "",
            "1 (x",
            "1 (x) S",
            "x (y) S 1 1 1",
            "1 (x) S 1 2 3 0 -1 0 0 0 0 0 0",
        ] {
            assert_eq!(ProcessStat::parse(broken.as_bytes()), None, "{broken}");
        }
    }

    /// The main thread ends by `pthread_exit` while another thread holds 24 MiB.
    #[test]
    fn a_process_whose_main_thread_has_ended_is_measured_by_the_others() {
        use std::io::{BufRead as _, BufReader};
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("a.py");
        // `ctypes` releases the interpreter lock for the call that ends the main thread.
        let text = r"
import ctypes, os, sys, threading, time
def alone():
    held = bytearray(b'x') * (24 << 20)
    while open(f'/proc/{os.getpid()}/stat').read().split()[2] != 'Z':
        time.sleep(0.005)
    print('alone', flush=True)
    sys.stdin.read()
    os._exit(len(held) & 1)
threading.Thread(target=alone).start()
ctypes.CDLL(None).pthread_exit(None)
";
        fs::write(&source, text).unwrap();
        let mut child = std::process::Command::new("python3")
            .arg(&source)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line.trim(), "alone");
        let (proc, pid) = (Path::new("/proc"), child.id());
        let stat = ProcessStat::read(proc, pid).unwrap();
        let (used, resident) = (sum(proc, [pid]), resident(proc, pid));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(stat.main_thread_has_ended() && !stat.is_dead(), "{stat:?}");
        assert!(
            used.used > Bytes::from_mib(24) && used.peak > Some(Bytes::from_mib(24)),
            "{used:?}"
        );
        assert!(resident > Some(Bytes::from_mib(24)), "{resident:?}");
    }

    #[test]
    fn a_memory_file_counts_whether_it_is_mapped_or_not() {
        const SIZE: usize = 24 << 20;
        let own = || sum(Path::new("/proc"), [std::process::id()]).used;
        let before = own();
        let name = c"test";
        let fd =
            nix::sys::memfd::memfd_create(name, nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        let mut memory = fs::File::from(fd);
        io::Write::write_all(&mut memory, &vec![1; SIZE]).unwrap();
        let held = own().saturating_sub(before);
        assert!(held >= Bytes::from_mib(20), "{held}");
        let copy = memory.try_clone().unwrap();
        assert!(
            own().saturating_sub(before) < Bytes::from_mib(40),
            "it counts once"
        );
        drop((memory, copy));
        assert!(own().saturating_sub(before) < Bytes::from_mib(10));
    }

    #[test]
    fn memory_is_read_from_the_rollup() {
        let expected = ProcessMemory {
            pss: Bytes::from_mib(1),
            rss: Bytes::from_mib(2),
            anonymous: Bytes::from_kib(512),
            shared_pss: None,
        };
        assert_eq!(ProcessMemory::parse(ROLLUP.as_bytes()), Some(expected));
        assert_eq!(ProcessMemory::parse(b""), None);
    }

    #[test]
    fn a_family_takes_in_children_that_left_its_group_and_members_whose_parent_has_ended() {
        let table = ProcessTable {
            processes: vec![
                process(10, 1, 10, 10),
                process(11, 10, 10, 10),
                // A worker with its own group, and its child, which is listed before it.
                process(12, 14, 14, 14),
                process(14, 11, 14, 14),
                process(20, 1, 20, 20),
                // Adopted by init after its parent ended, but still in the group.
                process(30, 1, 10, 10),
                process(31, 30, 31, 31),
            ],
        };
        assert_eq!(Vec::from_iter(table.tree(11)), [11, 12, 14]);
        assert_eq!(Vec::from_iter(table.family(10)), [10, 11, 12, 14, 30, 31]);
        assert!(table.tree(99).is_empty() && table.family(99).is_empty());
    }

    #[test]
    fn a_process_belongs_to_the_family_that_it_is_measured_with() {
        let stats = [
            (70, 1, 70),
            (71, 70, 70),
            (72, 1, 72),
            (73, 71, 73),
            (74, 1, 70),
        ];
        let texts = stats.map(|(pid, parent, group)| (pid, stat(pid, parent, group)));
        let files: Vec<_> = texts
            .iter()
            .map(|(pid, text)| (*pid, "stat", text.as_str()))
            .collect();
        let folder = proc(&files);
        let (leaders, table) = (
            BTreeSet::from([70, 90]),
            ProcessTable::read(folder.path()).unwrap(),
        );
        for pid in [70, 71, 73, 74] {
            assert_eq!(leader_of(folder.path(), &leaders, pid), Some(70), "{pid}");
            assert!(table.family(70).contains(&pid), "{pid}");
        }
        for pid in [72, 1, 99] {
            assert_eq!(leader_of(folder.path(), &leaders, pid), None, "{pid}");
        }
        let nearest = leader_of(folder.path(), &BTreeSet::from([70, 73]), 73);
        assert_eq!(nearest, Some(73));
    }

    #[test]
    fn a_sum_takes_rss_where_pss_may_not_be_read_and_leaves_out_what_has_ended() {
        let pages = (Bytes::from_mib(3).get() / page().get()).to_string();
        let statm = format!("9999 {pages} 1 1 0 1 0\n");
        let folder = proc(&[
            (70, "smaps_rollup", ROLLUP),
            (70, "status", "VmHWM:\t    3072 kB\n"),
            (71, "smaps_rollup", ROLLUP),
            (71, "status", "VmHWM:\t    1024 kB\n"),
            (72, "statm", &statm),
        ]);
        let expected = MemorySum {
            used: Bytes::from_mib(2),
            anonymous: Some(Bytes::from_mib(1)),
            // 3 MiB of one and 1 MiB of the other, each minus its present share; never less than the present sum.
            peak: Some(Bytes::from_mib(3)),
            processes: 2,
            by_rss: 0,
        };
        assert_eq!(sum(folder.path(), [70, 71, 99]), expected);
        // A file that exists but cannot be read: a folder.
        fs::create_dir(file(folder.path(), 72, "smaps_rollup")).unwrap();
        let with_rss = sum(folder.path(), [70, 72]);
        assert_eq!((with_rss.used, with_rss.by_rss), (Bytes::from_mib(4), 1));
        assert_eq!((with_rss.anonymous, with_rss.peak), (None, None));
    }

    #[test]
    fn this_process_is_found_started_and_measured() {
        let (proc, own) = (Path::new("/proc"), std::process::id());
        let stat = ProcessStat::read(proc, own).unwrap();
        assert!(stat.start_ticks <= boot_ticks().unwrap());
        assert_eq!(stat.session, own_session());
        assert!(sum(proc, [own]).used > Bytes::from_kib(100));
        assert!(peak_resident(proc, own).unwrap() >= Bytes::from_kib(100));
        assert_eq!(environment(proc, own, "NO_SUCH_VARIABLE_HERE"), None);
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
