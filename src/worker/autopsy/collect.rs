//! Collection of evidence before the start and after the end.
//!
//! Evidence that cannot be read stays unknown.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::Read,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use super::{
    evidence::{CPU_TIME, Counters, Gathered, GroupCounters, Limits},
    kernel_log::KernelLog,
};
use cotenant_probe::{
    ProbeRoot,
    board::{Board, L4tRelease},
    cgroup::{self, Cgroup},
    processes,
};
use cotenant_units::{Bytes, lock::locked};

/// State before one start, for comparison at the end.
#[derive(Debug)]
pub(crate) struct Life {
    roots: ProbeRoot,
    log: KernelLog,
    before: Counters,
    /// Group of `before`, if its files are visible.
    group: Option<Cgroup>,
    available: Option<Bytes>,
    /// Resident memory of the supervisor. The kernel counts it as the child's until the child executes its program
    /// (`fork`, then `exec_mmap`), so a peak below it proves nothing.
    inherited: Option<Bytes>,
}

/// Locks the evidence gathered so far.
pub(super) fn held(found: &Mutex<Gathered>) -> MutexGuard<'_, Gathered> {
    locked(found)
}

/// Optional evidence to collect.
#[derive(Debug, Default)]
pub(super) struct Questions {
    /// Whether to list processes that may have killed it.
    pub(super) killers: bool,
    /// A missing library, and additional folders to search for other versions.
    pub(super) library: Option<(String, Vec<PathBuf>)>,
    /// The program, if it may not be executable.
    pub(super) program: Option<PathBuf>,
}

impl Life {
    /// Records the state; call it before the process exists.
    pub(crate) fn before_start(roots: &ProbeRoot) -> Self {
        Self {
            log: KernelLog::from_now(&roots.dev.join("kmsg")),
            before: Counters {
                machine_kills: machine_kills(&roots.proc),
                group: None,
            },
            group: None,
            available: available(&roots.proc),
            inherited: processes::resident(&roots.proc, std::process::id()),
            roots: roots.clone(),
        }
    }

    /// Records the group of the process; call it once the process is in its group, and whenever it may have moved.
    pub(crate) fn look_at_group(&mut self, pid: u32) {
        let (path, own) = (
            cgroup::path_of(&self.roots, &pid.to_string()),
            cgroup::path_of(&self.roots, "self"),
        );
        let known = self.before.group.as_ref().map(|group| &group.path);
        // A group shared with the supervisor proves nothing about the worker.
        if path != own
            && path.as_ref() != known
            && let Some(path) = path
        {
            let own = Cgroup::own(&self.roots);
            self.group = Cgroup::of(&self.roots, pid).filter(|group| Some(group) != own.as_ref());
            self.before.group = Some(group_counters(path, self.group.as_ref()));
        }
    }

    /// Gathers evidence after the process has ended and before it is reaped. Each item is stored in `found` as soon as
    /// it is known, in order of relevance to the output, so that a caller that times out has the items so far.
    pub(super) fn gather(
        mut self,
        pid: u32,
        pidfd: Option<&OwnedFd>,
        questions: &Questions,
        found: &Mutex<Gathered>,
    ) {
        let proc = self.roots.proc.clone();
        let note = |set: &mut dyn FnMut(&mut Gathered)| set(&mut held(found));
        if let Some((library, folders)) = &questions.library {
            for folder in folders.iter().take(FOLDERS_MAX) {
                let versions = other_versions(library, std::slice::from_ref(folder));
                note(&mut |found| {
                    found.other_versions.extend(versions.iter().cloned());
                    found.other_versions.sort();
                    found.other_versions.dedup();
                    found.other_versions.truncate(VERSIONS_SHOWN);
                });
            }
        }
        let unfit_program = questions.program.as_deref().and_then(unfit);
        note(&mut |found| found.unfit_program.clone_from(&unfit_program));
        let after = || Counters {
            machine_kills: machine_kills(&proc),
            // Version 1 does not report the group of an ended process.
            group: self
                .before
                .group
                .as_ref()
                .map(|group| group_counters(group.path.clone(), self.group.as_ref())),
        };
        let deadline = Instant::now() + LOG_TIME;
        let mut log = self.log.read(deadline);
        let mut counters = after();
        let rose = |counters: &Counters| counters != &self.before;
        // The kernel writes the line just after the counter and the signal, on another processor: retry briefly.
        for _ in 0..LOG_LOOKS {
            if !log.records.is_empty() || log.unreadable.is_some() || !rose(&counters) {
                break;
            }
            std::thread::sleep(LOG_PAUSE);
            log = self.log.read(deadline);
            counters = after();
        }
        let comm = fs::read_to_string(proc.join(pid.to_string()).join("comm"))
            .map(|comm| comm.trim_end().to_owned())
            .unwrap_or_default();
        let is_global = names_are_global(&proc);
        // Kernel evidence counts only as a whole: counters without earlier values, or a log with unknown process
        // numbers, would suggest events that did not happen.
        note(&mut |found| {
            found.log = std::mem::take(&mut log);
            (found.before, found.after) = (self.before.clone(), std::mem::take(&mut counters));
            found.comm.clone_from(&comm);
            found.pid_is_global = is_global;
            found.available_before = self.available;
        });
        let usage = pidfd.and_then(usage);
        let limits = limits(&proc, pid);
        let strict = fs::read_to_string(proc.join("sys/vm/overcommit_memory"))
            .is_ok_and(|mode| mode.trim() == "2");
        let l4t_fault = Board::read(&self.roots).l4t.and_then(L4tRelease::warning);
        // Reading precedes locking, as everywhere here: a caller that times out takes the lock.
        let available = available(&proc);
        note(&mut |found| {
            found.limits = limits.clone();
            found.cpu_time = usage.map(|(_, cpu)| cpu);
            found.peak_resident = usage
                .map(|(peak, _)| peak)
                .filter(|peak| self.inherited.is_none_or(|ours| *peak > ours));
            found.available = available;
            found.strict_overcommit = strict;
            found.l4t_fault = l4t_fault;
        });
        if questions.killers {
            let killers = killers(&proc);
            note(&mut |found| found.killers.clone_from(&killers));
        }
    }
}

/// Reads `MemAvailable`.
pub(crate) fn available(proc: &Path) -> Option<Bytes> {
    let text = fs::read_to_string(proc.join("meminfo")).ok()?;
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    Some(Bytes::from_kib(kib))
}

fn machine_kills(proc: &Path) -> Option<u64> {
    let text = fs::read_to_string(proc.join("vmstat")).ok()?;
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill "))?
        .trim()
        .parse()
        .ok()
}

/// Returns whether process ids equal those in the kernel's log, which holds only in the initial namespace.
fn names_are_global(proc: &Path) -> bool {
    // `PROC_PID_INIT_INO` of the kernel, 0xEFFFFFFC.
    fs::read_link(proc.join("self/ns/pid"))
        .is_ok_and(|link| link.as_os_str() == OsStr::new("pid:[4026531836]"))
}

fn group_counters(path: String, group: Option<&Cgroup>) -> GroupCounters {
    let memory = group.map(Cgroup::memory).unwrap_or_default();
    GroupCounters {
        path,
        kills: memory.oom_kills,
        hits: memory.limit_hits,
        limit: memory.limit,
    }
}

/// Parses `/proc/PID/limits`: name, soft and hard limit in columns of fixed width.
fn limits(proc: &Path, pid: u32) -> Limits {
    let text = fs::read_to_string(proc.join(pid.to_string()).join("limits")).unwrap_or_default();
    let mut limits = Limits::default();
    for line in text.lines().skip(1) {
        let (Some(name), Some(rest)) = (line.get(..LIMIT_NAME), line.get(LIMIT_NAME..)) else {
            continue;
        };
        let mut columns = rest
            .split_ascii_whitespace()
            .map(|column| column.parse::<u64>().ok());
        let (soft, hard) = (columns.next().flatten(), columns.next().flatten());
        if let Some(soft) = soft {
            limits.finite.insert(name.trim().to_owned(), soft);
        }
        if name.trim() == CPU_TIME {
            limits.cpu_hard = hard;
        }
    }
    limits
}

/// Returns the peak resident memory and the processor time of an ended process, including children that it waited for.
fn usage(pidfd: &OwnedFd) -> Option<(Bytes, Duration)> {
    // SAFETY: all zeroes are a valid `siginfo_t` and a valid `rusage`.
    let (mut info, mut usage): (libc::siginfo_t, libc::rusage) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: both are valid for writes, and the descriptor is open; the C library's `waitid` lacks the fifth argument.
    let result = unsafe {
        libc::syscall(
            libc::SYS_waitid,
            libc::P_PIDFD,
            pidfd.as_raw_fd(),
            &raw mut info,
            libc::WEXITED | libc::WNOHANG | libc::WNOWAIT,
            &raw mut usage,
        )
    };
    // SAFETY: `waitid` has filled in the fields of a child's end, or left the process id at 0.
    if result != 0 || unsafe { info.si_pid() } == 0 {
        return None;
    }
    let time = |time: libc::timeval| {
        let (seconds, micros) = (
            u64::try_from(time.tv_sec).ok()?,
            u64::try_from(time.tv_usec).ok()?,
        );
        Some(Duration::from_secs(seconds) + Duration::from_micros(micros))
    };
    let peak = Bytes::from_kib(u64::try_from(usage.ru_maxrss).ok()?);
    Some((peak, time(usage.ru_utime)? + time(usage.ru_stime)?))
}

/// Returns running programs that kill others when memory is short.
fn killers(proc: &Path) -> Vec<String> {
    let mut found: Vec<String> = processes::all(proc)
        .iter()
        .filter_map(|process| {
            let comm = fs::read_to_string(proc.join(process.pid.to_string()).join("comm")).ok()?;
            KILLERS
                .contains(&comm.trim_end())
                .then(|| format!("{} (pid {})", comm.trim_end(), process.pid))
        })
        .collect();
    found.sort();
    found
}

/// Returns files of other versions of a library: `libcudart.so.11.0` for `libcudart.so.12`.
pub(crate) fn other_versions(library: &str, folders: &[PathBuf]) -> Vec<String> {
    let Some((stem, _)) = library.split_once(".so") else {
        return Vec::new();
    };
    let prefix = format!("{stem}.so.");
    let mut found: Vec<String> = folders
        .iter()
        .take(FOLDERS_MAX)
        .filter_map(|folder| fs::read_dir(folder).ok())
        .flat_map(|entries| entries.take(FILES_MAX).flatten())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with(&prefix) && name != library)
        .collect();
    found.sort();
    found.dedup();
    found.truncate(VERSIONS_SHOWN);
    found
}

/// Returns why a file is not executable on this machine; `None` if it seems to be, or cannot be read.
pub(crate) fn unfit(program: &Path) -> Option<String> {
    let mut head = Vec::new();
    File::open(program)
        .ok()?
        .take(HEAD_BYTES)
        .read_to_end(&mut head)
        .ok()?;
    let shown = program.display();
    if head.starts_with(b"\x7fELF") {
        let machine = u16::from_le_bytes([*head.get(18)?, *head.get(19)?]);
        let ours = if cfg!(target_arch = "aarch64") {
            MACHINE_AARCH64
        } else {
            MACHINE_X86_64
        };
        let known = cfg!(any(target_arch = "aarch64", target_arch = "x86_64"));
        return (known && machine != ours).then(|| {
            format!(
                "`{shown}` was built for {}, and this machine is {}",
                machine_name(machine),
                machine_name(ours)
            )
        });
    }
    if head.starts_with(b"#!") {
        return None;
    }
    Some(if head.is_empty() {
        format!("`{shown}` is empty")
    } else {
        format!("`{shown}` is neither a program nor a script that names its interpreter")
    })
}

/// Returns the processor of an ELF file as a word.
pub(crate) fn machine_name(machine: u16) -> String {
    match machine {
        3 => "x86 (32 bit)".to_owned(),
        40 => "ARM (32 bit)".to_owned(),
        MACHINE_X86_64 => "x86-64".to_owned(),
        MACHINE_AARCH64 => "AArch64".to_owned(),
        243 => "RISC-V".to_owned(),
        other => format!("machine {other}"),
    }
}

/// `EM_X86_64` of elf.h.
pub(crate) const MACHINE_X86_64: u16 = 62;

/// `EM_AARCH64` of elf.h.
pub(crate) const MACHINE_AARCH64: u16 = 183;

/// Sufficient for the header of an ELF file and for `#!`.
const HEAD_BYTES: u64 = 64;

/// Width of the first column of `/proc/PID/limits` (`fs/proc/base.c`: `%-25s `).
const LIMIT_NAME: usize = 26;

/// Time limit for reading the kernel's log; a full log of 1 MiB takes about 10 ms.
const LOG_TIME: Duration = Duration::from_millis(50);

/// Retries of reading the log when a counter has risen without a line.
const LOG_LOOKS: u32 = 10;

const LOG_PAUSE: Duration = Duration::from_millis(1);

/// Programs that kill others when memory is short.
const KILLERS: [&str; 6] = [
    "earlyoom",
    "lmkd",
    "nohang",
    "oomd",
    "systemd-oomd",
    "systemd-oomd.s",
];

/// Limits on folders searched for other versions of a library, on entries of each, and on versions named.
const FOLDERS_MAX: usize = 16;
const FILES_MAX: usize = 20_000;
const VERSIONS_SHOWN: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn roots(files: &[(&str, &str)]) -> (tempfile::TempDir, ProbeRoot) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let roots = ProbeRoot::at(dir.path());
        (dir, roots)
    }

    fn group_of_7(files: &[(&str, &str)]) -> Option<GroupCounters> {
        let (_dir, roots) = roots(files);
        let mut life = Life::before_start(&roots);
        life.look_at_group(7);
        life.before.group
    }

    #[test]
    fn a_group_of_its_own_is_counted_and_one_whose_folder_cannot_be_seen_keeps_its_name() {
        let seen = group_of_7(&[
            ("proc/self/cgroup", "0::/user.slice\n"),
            ("proc/7/cgroup", "0::/cotenant/asr\n"),
            ("sys/fs/cgroup/cotenant/asr/memory.stat", "anon 0\n"),
            (
                "sys/fs/cgroup/cotenant/asr/memory.events",
                "low 0\nhigh 0\nmax 41\noom 3\noom_kill 2\n",
            ),
            ("sys/fs/cgroup/cotenant/asr/memory.max", "67108864\n"),
        ]);
        let path = "/cotenant/asr".to_owned();
        let counted = GroupCounters {
            path,
            kills: Some(2),
            hits: Some(41),
            limit: Some(Bytes::from_mib(64)),
        };
        assert_eq!(seen, Some(counted));

        // A container that shows the host's paths, with its own group at the top of the mount.
        let named = group_of_7(&[
            ("proc/self/cgroup", "4:memory:/docker/0123\n0::/\n"),
            (
                "proc/7/cgroup",
                "9:name=systemd:/\n4:cpu,memory:/docker/0123/asr\n0::/\n",
            ),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n"),
            ("sys/fs/cgroup/memory/memory.failcnt", "36\n"),
        ]);
        let path = "/docker/0123/asr".to_owned();
        assert_eq!(
            named,
            Some(GroupCounters {
                path,
                ..GroupCounters::default()
            })
        );
    }

    #[test]
    fn a_process_in_our_own_group_has_none_of_its_own() {
        let group = group_of_7(&[
            ("proc/self/cgroup", "0::/a\n"),
            ("proc/7/cgroup", "0::/a\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 0\n"),
        ]);
        assert_eq!(group, None);
    }

    #[test]
    fn limits_are_read_from_their_columns() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
            Max cpu time              5                    10                   seconds   \n\
            Max address space         268435456            unlimited            bytes     \n\
            Max data size             unlimited            unlimited            bytes     \n";
        let (_dir, roots) = roots(&[("proc/7/limits", text)]);
        let limits = limits(&roots.proc, 7);
        assert_eq!(limits.of(CPU_TIME), Some(5));
        assert_eq!(limits.cpu_hard, Some(10));
        assert_eq!(limits.of("Max address space"), Some(268_435_456));
        assert_eq!(limits.of("Max data size"), None);
        assert_eq!(
            limits.lines(),
            ["Max address space: 256 MiB", "Max cpu time: 5 s"]
        );
    }

    #[test]
    fn other_versions_of_a_library_are_found() {
        let dir = tempfile::tempdir().unwrap();
        for name in [
            "libcudart.so.11.0",
            "libcudart.so.12",
            "libcudart_static.a",
            "libcudart.so",
        ] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(
            other_versions("libcudart.so.12", &[dir.path().to_owned()]),
            ["libcudart.so.11.0"]
        );
    }

    #[test]
    fn a_file_that_is_no_program_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            fs::write(&path, bytes).unwrap();
            path
        };
        let mut foreign = b"\x7fELF\x02\x01\x01".to_vec();
        foreign.resize(64, 0);
        foreign[18] = 243;
        assert!(
            unfit(&file("riscv", &foreign))
                .unwrap()
                .contains("built for RISC-V")
        );
        assert!(unfit(&file("empty", b"")).unwrap().ends_with("is empty"));
        assert!(
            unfit(&file("text", b"hello"))
                .unwrap()
                .contains("neither a program")
        );
        assert_eq!(unfit(&file("script", b"#!/bin/sh\n")), None);
        assert_eq!(unfit(Path::new("/proc/self/exe")), None);
    }

    #[test]
    fn the_counters_of_this_machine_are_read() {
        let life = Life::before_start(&ProbeRoot::default());
        assert!(
            life.available
                .is_some_and(|available| available > Bytes::ZERO)
        );
        assert!(
            limits(Path::new("/proc"), std::process::id())
                .finite
                .contains_key("Max open files")
        );
    }
}
